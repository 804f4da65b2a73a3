"""Short-time Fourier transforms, the inverse transform, and windows.

`stft` and `istft` have the semantics and arguments of PyTorch: a frame consists of `n_fft` samples
times the window, and starts `hop_length` samples after the previous frame. The windows have numpy's
names. The shifted copies of a `periodic` window add up to a constant, so use it for frames.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.ops.fft import Norm
from mlvm.core.rules import require
from mlvm.core.types import DType, f32, f64, i64
from mlvm.eager.functions.arguments import count_of, span, type_of
from mlvm.eager.functions.convolution import conv1d
from mlvm.eager.functions.creation import arange, full
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.matrices import conj, floating
from mlvm.eager.functions.shapes import broadcast_to, matrix_transpose, part, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.default import float_dtype
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Mode: TypeAlias = Literal["full", "same", "valid"]
"""The part of the sums that `convolve` and `correlate` return."""


@public
def hanning(n: int, *, periodic: bool = False, dtype: object = None) -> Tensor:
    """Return the window 1/2 - 1/2 cos(2 pi k / (n - 1)); with `periodic`, n replaces n - 1.

    The result: f[n]. Raises `ArgumentError` if n is negative; `DTypeError` if `dtype` is not a
    float.

        >>> ml.hanning(4, periodic=True)
        Tensor([0. , 0.5, 1. , 0.5], f32[4])

    Invalid calls:
        ml.hanning(-1)  # ArgumentError
        ml.hanning(2, dtype="i64")  # DTypeError
    """
    return _cosine(n, 0.5, periodic, dtype)


@public
def hamming(n: int, *, periodic: bool = False, dtype: object = None) -> Tensor:
    """Return the window 0.54 - 0.46 cos(2 pi k / (n - 1)); with `periodic`, n replaces n - 1.

    The result: f[n]. Raises `ArgumentError` if n is negative; `DTypeError` if `dtype` is not a
    float.

        >>> ml.hamming(4, periodic=True)
        Tensor([0.08, 0.54, 1.  , 0.54], f32[4])

    Invalid calls:
        ml.hamming(-1)  # ArgumentError
        ml.hamming(2, dtype="i64")  # DTypeError
    """
    return _cosine(n, 0.54, periodic, dtype)


def _cosine(n: int, mean: float, periodic: bool, dtype: object) -> Tensor:
    target = float_dtype(dtype)
    require("float", full((), 0.0, dtype=target).type)
    length = count_of(n, "n")
    if length == 1:
        return full((1,), 1.0, dtype=target)
    k = arange(length, dtype=f64)
    turn = 2 * math.pi / max(length if periodic else length - 1, 1)
    return astype(mean - (1 - mean) * op.cos(k * turn), target)


@public
def stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    window: Tensor | None = None,
    *,
    center: bool = True,
    normalized: bool = False,
) -> Tensor:
    """Compute the spectra of frames of `n_fft` samples, which start `hop_length` samples apart.

    The default of `hop_length` is `n_fft // 4`. Each frame is multiplied by the window of at most
    `n_fft` elements, centred in the frame, or by 1 without a window.

    With `center`, frame t is centred at sample t * hop_length, and the signal is reflected at both
    boundaries. `normalized` divides by sqrt(n_fft).

    x: [..., n], real or complex, integers as f32; window: f[k] -> c[..., n_fft // 2 + 1, frames],
    or for a complex x c[..., n_fft, frames]. Raises `ShapeError` if x has no axes or is too short
    for a frame, or the window is not a vector or too long; `DTypeError` if x is bool, or the window
    is not of floats; `ArgumentError` if `n_fft` or `hop_length` is below 1.

        >>> ml.stft(ml.ones((2, 100)), 16, window=ml.hanning(16, periodic=True)).type
        c64[2,9,26]

    Invalid calls:
        ml.stft(v, 0)  # ArgumentError
    """
    size, hop = _sizes(n_fft, hop_length)
    require("numeric", type_of(x))
    x = floating(x)
    x = op.astype(x, dtype=f32) if x.dtype.is_half else x
    shape = _window(window, size, x.dtype.real)
    if not x.ndim:
        raise ShapeError("expected a signal [..., samples], got a scalar")
    n, margin = x.shape[-1], size // 2 if center else 0
    if n + 2 * margin < size or (margin and n <= margin):
        raise ShapeError(f"expected at least {size} samples for a frame, got {n}")
    places = _places((n + 2 * margin - size) // hop + 1, hop, size) - margin
    if margin:
        last = n - 1
        places = last - op.abs(last - op.abs(places))
    frames = op.take(x, places, axis=-1) * shape
    norm: Norm = "ortho" if normalized else "backward"
    if x.dtype.is_float:
        return matrix_transpose(op.rfft(frames, axis=-1, norm=norm))
    return matrix_transpose(op.fft(frames, axes=(-1,), norm=norm))


@public
def istft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    window: Tensor | None = None,
    *,
    center: bool = True,
    normalized: bool = False,
    length: int | None = None,
) -> Tensor:
    """Reconstruct the signal from the spectra of frames, or the nearest signal if none matches.

    The nearest signal has the smallest mean squared difference (Griffin and Lim, Signal estimation
    from modified short-time Fourier transform, 1984). The frames times the window are added and
    divided by the sum of the squared windows. The arguments are the same as for `stft`. Samples
    outside of all windows are 0.

    x: c[..., n_fft // 2 + 1, frames] -> f[..., n], or c[..., n_fft, frames] -> c[..., n]; n is
    `length`, or the extent of the frames. Raises `ShapeError` if the shapes do not fit;
    `DTypeError` if the spectra are not complex, or the window is not of floats; `ArgumentError`
    if `n_fft` or `hop_length` is below 1, or `length` is negative.

        >>> x = ml.sin(ml.arange(64) / 5.0)
        >>> w = ml.hanning(16, periodic=True)
        >>> bool(ml.allclose(ml.istft(ml.stft(x, 16, window=w), 16, window=w), x, atol=1e-5))
        True

    Invalid calls:
        ml.istft(x * 1j, 0)  # ArgumentError
        ml.istft(x, 4)  # DTypeError
    """
    size, hop = _sizes(n_fft, hop_length)
    if type_of(x).dtype.kind != "complex":
        raise DTypeError(f"expected complex spectra, got {x.dtype.name}")
    shape = _window(window, size, x.dtype.real)
    if x.ndim < 2 or x.shape[-2] not in (size // 2 + 1, size) or not x.shape[-1]:
        raise ShapeError(f"expected [..., {size // 2 + 1} or {size}, frames], got {x.type}")
    norm: Norm = "ortho" if normalized else "backward"
    frames = x.shape[-1]
    spectra = matrix_transpose(x)
    if x.shape[-2] == size // 2 + 1:
        pieces = op.irfft(spectra, n=size, axis=-1, norm=norm)
    else:
        pieces = op.ifft(spectra, axes=(-1,), norm=norm)
    reach = size + hop * (frames - 1)
    places = reshape(_places(frames, hop, size), -1)
    pieces = reshape(pieces * shape, (*x.shape[:-2], frames * size))
    total = op.scatter_add(pieces, places, axis=-1, length=reach)
    squares = reshape(broadcast_to(op.square(shape), (frames, size)), -1)
    weight = op.scatter_add(squares, places, axis=-1, length=reach)
    reached = op.greater(weight, 1e-11)
    signal = total / op.where(reached, weight, constant(math.inf, weight.dtype))
    start = size // 2 if center else 0
    samples = reach - 2 * start if length is None else count_of(length, "length")
    signal_part = part(signal, x.ndim - 2, span(start, min(reach, start + samples)))
    missing = samples - signal_part.shape[-1]
    if missing:
        signal_part = op.pad(signal_part, widths=((0, 0),) * (x.ndim - 2) + ((0, missing),))
    return signal_part


def _sizes(n_fft: int, hop_length: int | None) -> tuple[int, int]:
    """Return the length of a frame and the distance between the starts of frames."""
    size = count_of(n_fft, "n_fft", 1)
    return size, count_of(max(size // 4, 1) if hop_length is None else hop_length, "hop_length", 1)


def _window(window: Tensor | None, size: int, dtype: DType) -> Tensor:
    """Pad the window with zeros on both sides to `size` elements of that dtype."""
    if window is None:
        return full((size,), 1.0, dtype=dtype)
    require("float", type_of(window))
    if window.ndim != 1 or window.size > size:
        raise ShapeError(f"expected a window as a vector of at most {size}, got {window.type}")
    before = (size - window.size) // 2
    padded = op.pad(window, widths=((before, size - window.size - before),))
    return astype(padded, dtype)


def _places(frames: int, hop: int, size: int) -> Tensor:
    """Return the positions of the samples of each frame: i64[frames, size]."""
    starts = op.arange(start=0, stop=frames, step=1, dtype=i64) * hop
    return reshape(starts, (frames, 1)) + op.arange(start=0, stop=size, step=1, dtype=i64)


# --- convolutions of vectors ---------------------------------------------------------


@public
@in_f32
def convolve(x: Tensor, y: Tensor, /, mode: Mode = "full") -> Tensor:
    """Convolve two vectors: element k is the sum of x[i] y[k - i].

    "full" returns all sums. "same" returns the middle sums, with the length of the longer vector.
    "valid" returns the sums that contain all elements of the shorter vector.

    x: [m], y: [n], any dtype but bool -> [m + n - 1], [max(m, n)] or [max(m, n) - min(m, n) + 1].
    Raises `ShapeError` if an operand is not a vector, or is empty; `ArgumentError` if the mode is
    unknown; `DTypeError` if an operand is bool or the dtypes do not promote.

        >>> ml.convolve(ml.asarray([1.0, 2.0, 3.0]), ml.asarray([1.0, 0.5]))
        Tensor([1. , 2.5, 4. , 1.5], f32[4])

    Invalid calls:
        ml.convolve(v, v, mode="all")  # ArgumentError
        ml.convolve(x, v)  # ShapeError
    """
    return _sums_of_products(x, y, mode, (min(x.size, y.size) - 1) // 2)


@public
@in_f32
def correlate(x: Tensor, y: Tensor, /, mode: Mode = "valid") -> Tensor:
    """Correlate two vectors, like `numpy.correlate`; `mode` is the same as for `convolve`.

    Element k of all sums is the sum of x[i + k - n + 1] conj(y[i]).

    x: [m], y: [n], any dtype but bool -> as in `convolve`. Raises the errors of `convolve`.

        >>> ml.correlate(ml.asarray([1.0, 2.0, 3.0]), ml.asarray([0.0, 1.0]))
        Tensor([2., 3.], f32[2])

    Invalid calls:
        ml.correlate(v, v, mode="all")  # ArgumentError
        ml.correlate(x, v)  # ShapeError
    """
    least = min(type_of(x).size, type_of(y).size)
    first = (least - 1) // 2 if x.size >= y.size else least // 2
    return _sums_of_products(x, conj(op.flip(y)), mode, first)


def _sums_of_products(x: Tensor, y: Tensor, mode: Mode, first: int) -> Tensor:
    """Convolve vectors; `first` is the index at which "same" begins.

    The products are arranged as a matrix, and the columns are summed; floats use a convolution of
    sequences."""
    require("numeric", type_of(x), type_of(y))
    if mode not in get_args(Mode):
        raise ArgumentError(
            f"expected mode as one of {', '.join(get_args(Mode))}, got {brief(mode)}"
        )
    if x.ndim != 1 or y.ndim != 1 or not x.size or not y.size:
        raise ShapeError(f"expected two nonempty vectors, got {x.type} and {y.type}")
    if x.size < y.size:
        x, y = y, x
    m, n = x.size, y.size
    if x.dtype.is_float and y.dtype.is_float:
        kernel = reshape(op.flip(y), (n, 1, 1))
        full_sums = reshape(conv1d(reshape(x, (1, m, 1)), kernel, padding=(n - 1, n - 1)), -1)
    else:
        products = reshape(y, (n, 1)) * x
        rows = reshape(op.pad(products, widths=((0, 0), (0, n))), -1)
        rows = reshape(part(rows, 0, span(n * (m + n - 1))), (n, m + n - 1))
        full_sums = op.sum(rows, axis=0, dtype=rows.dtype)
    start, count = {"full": (0, m + n - 1), "same": (first, m), "valid": (n - 1, m - n + 1)}[mode]
    return part(full_sums, 0, span(start, start + count))
