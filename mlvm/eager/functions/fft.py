"""Fourier transforms: `ml.fft`, with the names of the Python Array API standard (2025.12).

Like numpy, these functions also accept real tensors where the standard requires complex ones.
Integers and bools are converted to the default float dtype. f32 and c64 are transformed in that
precision. Explicit lengths truncate the operand or pad it with zeros. `norm` selects the scaling of
a transform of n elements: "backward" divides the inverse by n, "forward" divides the transform by
n, "ortho" divides both by sqrt(n).
"""

from __future__ import annotations

from collections.abc import Sequence

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief, counted
from mlvm.core.ops.fft import OTHER_WAY, Norm
from mlvm.core.rules import Axis, is_real
from mlvm.core.types import f64
from mlvm.eager.functions.arguments import Ints, axes_of, integer, integers, type_of
from mlvm.eager.functions.creation import Device, arange, placed
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.matrices import conj, floating
from mlvm.eager.functions.shapes import concat, roll
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.default import float_dtype
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import names_of, public


def _real(x: Tensor) -> Tensor:
    x = floating(x)
    if not x.dtype.is_float:
        raise DTypeError(f"expected real numbers, got {x.dtype.name}; use fft for complex numbers")
    return x


def _lengths(x: Tensor, s: Ints | None, axes: Ints | None) -> tuple[tuple[int, ...], list[int]]:
    """Return the axes and the lengths to transform along them."""
    if s is not None and axes is None:
        raise ArgumentError("expected axes= for the lengths in s=, got None")
    along = axes_of(tuple(axes) if isinstance(axes, range) else axes, x, name="axes")
    if s is None:
        return along, [x.shape[i] for i in along]
    lengths = integers(s, "s")
    if len(lengths) != len(along):
        raise ArgumentError(
            f"expected {counted(len(along), 'length')}, one per axis, got {len(lengths)}"
        )
    return along, [x.shape[i] if n == -1 else n for n, i in zip(lengths, along, strict=True)]


def _fitted(x: Tensor, axes: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Truncate x, or pad it with zeros, at the end of these axes to these lengths."""
    shape = list(x.shape)
    for axis, n in zip(axes, lengths, strict=True):
        if n < 1:
            raise ShapeError(f"expected 1 element or more along axis {axis}, got {n}")
        shape[axis] = n
    overlap = [min(have, want) for have, want in zip(x.shape, shape, strict=True)]
    if overlap != list(x.shape):
        x = op.slice(x, start=(0,) * x.ndim, length=tuple(overlap), step=(1,) * x.ndim)
    if overlap != shape:
        x = op.pad(x, widths=tuple((0, n - k) for k, n in zip(overlap, shape, strict=True)))
    return x


def _along(x: Tensor, n: int | None, axis: int) -> tuple[int, int]:
    """Return an axis, counted from the front, and the length of the transform along it."""
    [along] = axes_of(integer(axis, "axis"), x)
    return along, x.shape[along] if n is None else integer(n, "n")


def _fitted_along(x: Tensor, n: int | None, axis: int) -> tuple[Tensor, int]:
    """Truncate or pad x along one axis; return it with the axis counted from the front."""
    along, length = _along(x, n, axis)
    return _fitted(x, [along], [length]), along


# --- complex elements ----------------------------------------------------------------


@public
def fft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Compute the discrete Fourier transform, sum_j x_j exp(-2 pi i j k / n), along `axis`:
    complex.

    x: [..., m], any dtype -> c[..., n], where n is m unless given. Raises `AxisError` if x has no
    such axis; `ShapeError` if there is no element along it; `ArgumentError` if `norm` is
    unknown.

        >>> ml.fft.fft(ml.asarray([1 + 0j, 0, 0, 0]))
        Tensor([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], c64[4])

    Invalid calls:
        ml.fft.fft(v, norm="none")  # ArgumentError
    """
    x, along = _fitted_along(floating(x), n, axis)
    return op.fft(x, axes=(along,), norm=norm)


@public
def ifft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Invert `fft`: sum_k x_k exp(2 pi i j k / n) / n, along `axis`: complex.

    x: [..., m], any dtype -> c[..., n], where n is m unless given. Raises `AxisError` if x has no
    such axis; `ShapeError` if there is no element along it; `ArgumentError` if `norm` is
    unknown.

        >>> ml.fft.ifft(ml.asarray([4 + 0j, 0, 0, 0]))
        Tensor([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], c64[4])

    Invalid calls:
        ml.fft.ifft(v, norm="none")  # ArgumentError
    """
    x, along = _fitted_along(floating(x), n, axis)
    return op.ifft(x, axes=(along,), norm=norm)


@public
def fftn(
    x: Tensor, /, s: Ints | None = None, axes: Ints | None = None, norm: Norm = "backward"
) -> Tensor:
    """Compute `fft` along several axes (None: all), as complex numbers.

    `s` contains the lengths; -1 means the length of the axis.

    x: [...], any dtype -> c[...]. Raises `AxisError` if x has no such axis or an axis occurs
    twice; `ShapeError` if an axis is empty; `ArgumentError` if `norm` is unknown or the numbers of
    lengths and axes differ.

        >>> ml.fft.fftn(ml.ones((2, 3), dtype=ml.complex64)).type
        c64[2,3]

    Invalid calls:
        ml.fft.fftn(x, s=(1,), axes=(0, 1))  # ArgumentError
    """
    x = floating(x)
    along, lengths = _lengths(x, s, axes)
    return op.fft(_fitted(x, along, lengths), axes=along, norm=norm)


@public
def ifftn(
    x: Tensor, /, s: Ints | None = None, axes: Ints | None = None, norm: Norm = "backward"
) -> Tensor:
    """Invert `fftn`, with complex results.

    x: [...], any dtype -> c[...]. Raises `AxisError` if x has no such axis or an axis occurs
    twice; `ShapeError` if an axis is empty; `ArgumentError` if `norm` is unknown or the numbers of
    lengths and axes differ.

        >>> ml.fft.ifftn(ml.ones((2, 3), dtype=ml.complex64)).type
        c64[2,3]

    Invalid calls:
        ml.fft.ifftn(x, s=(1,), axes=(0, 1))  # ArgumentError
    """
    x = floating(x)
    along, lengths = _lengths(x, s, axes)
    return op.ifft(_fitted(x, along, lengths), axes=along, norm=norm)


# --- real elements -------------------------------------------------------------------


@public
def rfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the first n // 2 + 1 elements of the `fft` of n real numbers, which are complex.

    The remaining elements are the conjugates of these in reverse order.

    x: [..., m], any dtype but complex -> c[..., n // 2 + 1], where n is m unless given. Raises
    `AxisError` if x has no such axis; `ShapeError` if there is no element along it;
    `ArgumentError` if `norm` is unknown; `DTypeError` if x is complex.

        >>> ml.fft.rfft(ml.ones(4))
        Tensor([4.+0.j, 0.+0.j, 0.+0.j], c64[3])

    Invalid calls:
        ml.fft.rfft(v, norm="none")  # ArgumentError
    """
    x, along = _fitted_along(_real(x), n, axis)
    return op.rfft(x, axis=along, norm=norm)


@public
def irfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Invert `rfft`: n real elements, by default 2 (m - 1) for m elements of x.

    The imaginary parts of the first element of x and, for an even n, of the last element are
    ignored.

    x: [..., m], any dtype -> f[..., n]. Raises `AxisError` if x has no such axis; `ShapeError` if
    there is no element along it; `ArgumentError` if `norm` is unknown.

        >>> ml.fft.irfft(ml.asarray([4 + 0j, 0, 0]))
        Tensor([1., 1., 1., 1.], f32[4])

    Invalid calls:
        ml.fft.irfft(v, norm="none")  # ArgumentError
        ml.fft.irfft(ml.ones(0))  # ShapeError
    """
    return _irfft(floating(x), n, axis, norm)


def _irfft(x: Tensor, n: int | None, axis: int, norm: Norm) -> Tensor:
    along, length = _along(x, n, axis)
    length = 2 * (length - 1) if n is None else length
    if length < 1:
        raise ShapeError(f"expected 1 element or more along axis {along}, got {length}")
    return op.irfft(_fitted(x, [along], [length // 2 + 1]), n=length, axis=along, norm=norm)


@public
def rfftn(
    x: Tensor, /, s: Ints | None = None, axes: Ints | None = None, norm: Norm = "backward"
) -> Tensor:
    """Compute `rfft` along the last of several axes (None: all), then `fft` along the other axes.

    x: [..., n], any dtype but complex -> c[..., n // 2 + 1]. Raises `AxisError` if x has no such
    axis or an axis occurs twice; `ShapeError` if an axis is empty; `ArgumentError` if `norm` is
    unknown, there are no axes, or the numbers of lengths and axes differ; `DTypeError` if x is
    complex.

        >>> ml.fft.rfftn(ml.ones((2, 4))).type
        c64[2,3]

    Invalid calls:
        ml.fft.rfftn(x, s=(1,), axes=(0, 1))  # ArgumentError
    """
    x = _real(x)
    along, lengths = _lengths(x, s, axes)
    if not along:
        raise ArgumentError("expected one axis or more for a real transform, got none")
    half = op.rfft(_fitted(x, along, lengths), axis=along[-1], norm=norm)
    return op.fft(half, axes=along[:-1], norm=norm) if along[:-1] else half


@public
def irfftn(
    x: Tensor, /, s: Ints | None = None, axes: Ints | None = None, norm: Norm = "backward"
) -> Tensor:
    """Invert `rfftn`: real elements, by default 2 (m - 1) along the last axis for m elements of x.

    x: [..., m], any dtype -> f[..., n]. Raises `AxisError` if x has no such axis or an axis
    occurs twice; `ShapeError` if an axis is empty; `ArgumentError` if `norm` is unknown, there are
    no axes, or the numbers of lengths and axes differ.

        >>> ml.fft.irfftn(ml.ones((2, 3), dtype=ml.complex64)).type
        f32[2,4]

    Invalid calls:
        ml.fft.irfftn(x, s=(1,), axes=(0, 1))  # ArgumentError
    """
    x = floating(x)
    along, lengths = _lengths(x, s, axes)
    if not along:
        raise ArgumentError("expected one axis or more for a real transform, got none")
    if s is None or integers(s, "s")[-1] == -1:
        lengths[-1] = 2 * (lengths[-1] - 1)
    if others := along[:-1]:
        x = op.ifft(_fitted(x, others, lengths[:-1]), axes=others, norm=norm)
    return _irfft(x, lengths[-1], along[-1], norm)


@public
def hfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Transform a Hermitian-symmetric signal, given by the first half x, to n real elements.

    The default of n is 2 (m - 1) for m elements of x.

    x: [..., m], any dtype -> f[..., n]. Raises `AxisError` if x has no such axis; `ShapeError` if
    there is no element along it; `ArgumentError` if `norm` is unknown.

        >>> ml.fft.hfft(ml.ones(3, dtype=ml.complex64)).type
        f32[4]

    Invalid calls:
        ml.fft.hfft(v, norm="none")  # ArgumentError
    """
    return _irfft(conj(floating(x)), n, axis, _other_way(norm))


@public
def ihfft(x: Tensor, /, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Invert `hfft`: n // 2 + 1 complex elements from n real elements.

    x: [..., n], any dtype but complex -> c[..., n // 2 + 1]. Raises `AxisError` if x has no such
    axis; `ShapeError` if there is no element along it; `ArgumentError` if `norm` is unknown;
    `DTypeError` if x is complex.

        >>> ml.fft.ihfft(ml.ones(4)).type
        c64[3]

    Invalid calls:
        ml.fft.ihfft(v, norm="none")  # ArgumentError
    """
    x, along = _fitted_along(_real(x), n, axis)
    return conj(op.rfft(x, axis=along, norm=_other_way(norm)))


def _other_way(norm: Norm) -> Norm:
    if norm not in OTHER_WAY:
        raise ArgumentError(f"expected norm as one of {', '.join(OTHER_WAY)}, got {brief(norm)}")
    return OTHER_WAY[norm]


# --- frequencies ---------------------------------------------------------------------


@public
def fftfreq(n: int, /, d: float = 1.0, dtype: object = None, device: Device = None) -> Tensor:
    """Return the frequencies of the elements of `fft` for samples with spacing `d`.

    They are 0, 1, ..., then the negative frequencies up to -1, all divided by n d. The default
    dtype is f32.

    The result: f[n]. Raises `ArgumentError` unless n >= 1 and d is not 0; `DTypeError` if
    `dtype` is not a float.

        >>> ml.fft.fftfreq(4)
        Tensor([ 0.  ,  0.25, -0.5 , -0.25], f32[4])

    Invalid calls:
        ml.fft.fftfreq(0)  # ArgumentError
        ml.fft.fftfreq(4, "x")  # ArgumentError
        ml.fft.fftfreq(4, dtype="i64")  # DTypeError
    """
    return _frequencies(False, n, d, dtype, device)


@public
def rfftfreq(n: int, /, d: float = 1.0, dtype: object = None, device: Device = None) -> Tensor:
    """Return the frequencies of the elements of `rfft` for samples with spacing `d`.

    They are 0, 1, ..., n // 2, all divided by n d. The default dtype is f32.

    The result: f[n // 2 + 1]. Raises `ArgumentError` unless n >= 1 and d is not 0; `DTypeError`
    if `dtype` is not a float.

        >>> ml.fft.rfftfreq(4)
        Tensor([0.  , 0.25, 0.5 ], f32[3])

    Invalid calls:
        ml.fft.rfftfreq(4, 0.0)  # ArgumentError
        ml.fft.rfftfreq(4, dtype="i64")  # DTypeError
    """
    return _frequencies(True, n, d, dtype, device)


def _frequencies(halved: bool, n: int, d: float, dtype: object, device: Device) -> Tensor:
    target = float_dtype(dtype)
    if not target.is_float:
        raise DTypeError(f"expected a real float dtype, got {target.name}")
    if integer(n, "n") < 1 or not is_real(d) or not d:
        raise ArgumentError(f"expected n >= 1 and d other than 0, got {n} and {brief(d)}")
    with placed(device):
        half = arange(0, n // 2 + 1 if halved else (n + 1) // 2, dtype=f64)
        whole = half if halved else concat([half, arange(-(n // 2), 0, dtype=f64)])
        return astype(whole * (1.0 / (n * d)), target)


@public
def fftshift(x: Tensor, /, axes: Axis = None) -> Tensor:
    """Roll x by half of each of these axes (None: all axes), so that frequency 0 is in the middle.

    x: [...], any dtype, and so is the result. Raises `AxisError` if x has no such axis or an axis
    occurs twice.

        >>> ml.fft.fftshift(ml.asarray([0, 1, 2, 3]))
        Tensor([2, 3, 0, 1], i64[4])
    """
    along = axes_of(axes, x, name="axes") if type_of(x).ndim else ()
    return roll(x, tuple(x.shape[i] // 2 for i in along), axis=along)


@public
def ifftshift(x: Tensor, /, axes: Axis = None) -> Tensor:
    """Invert `fftshift`; the two differ for axes of odd length.

    x: [...], any dtype, and so is the result. Raises `AxisError` if x has no such axis or an axis
    occurs twice.

        >>> ml.fft.ifftshift(ml.asarray([0, 1, 2, 3]))
        Tensor([2, 3, 0, 1], i64[4])
    """
    along = axes_of(axes, x, name="axes") if type_of(x).ndim else ()
    return roll(x, tuple(-(x.shape[i] // 2) for i in along), axis=along)


__all__ = names_of(globals())
