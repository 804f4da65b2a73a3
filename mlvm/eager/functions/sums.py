"""Functions that are composed of sums, products and differences along an axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.rules import Axis, require
from mlvm.core.types import DType, Shape, TensorType, bool_, f32, i64
from mlvm.eager.functions.arguments import axes_of, counts_of, inferred, integer, span, type_of
from mlvm.eager.functions.elements import astype, stop_gradient
from mlvm.eager.functions.halves import in_f32, rounded, through_f32, widened
from mlvm.eager.functions.shapes import broadcast_to, concat, expand_dims, neighbours, part, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of, one_op
from mlvm.eager.tensor.autocast import in_single
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.operands import Operand, as_operand, is_array
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
@in_f32
def std(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Compute the standard deviation along `axis`: the square root of `var`. If all elements are
    equal, its gradient is 0, like that of `sqrt` at 0.

    x: [...], any dtype but complex. The result: the shape and dtype that `var` has. Raises
    `AxisRefused` if x has no such axis; `DTypeError` if an operand is complex.

        >>> ml.std(ml.asarray([1.0, 3.0]))
        Tensor(1., f32[])
    """
    return op.sqrt(op.var(x, axis=axis, correction=correction, keepdims=keepdims))


@public
def outer(x: Tensor, y: Tensor, /) -> Tensor:
    """Multiply all pairs of elements of two vectors: x[i] * y[j].

    x: [m], y: [n] -> [m, n]. Raises `ShapeError` if an operand is not a vector; `DTypeError` if an
    operand is bool or the dtypes do not promote.

        >>> ml.outer(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor([[3., 4.],
                [6., 8.]], f32[2,2])

    Refuses:
        ml.linalg.outer(ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64"))  # DTypeError
        ml.linalg.outer(ml.ones(()), v)  # ShapeError
    """
    types = type_of(x), type_of(y)
    if types[0].ndim != 1 or types[1].ndim != 1:
        raise ShapeError("expected two tensors of 1 dimension")
    return expand_dims(x, axis=1) * y


@public
@through_f32
def diff(
    x: Tensor,
    /,
    n: int = 1,
    axis: int = -1,
    *,
    prepend: Operand | None = None,
    append: Operand | None = None,
) -> Tensor:
    """Subtract neighbours along `axis`, `n` times, so that it is shorter by n.

    `prepend` and `append` are joined with x first; a number is one element everywhere. n = 0
    returns x alone, as in numpy.

    x: [..., m], any dtype but bool; the result: [..., m - n]. Raises `ShapeError` if `prepend` or
    `append` does not fit x; `AxisRefused` if x has no such axis; `ArgumentError` if n is
    negative; `DTypeError` if an operand is bool.

        >>> ml.diff(ml.asarray([1.0, 4.0, 9.0]))
        Tensor([3., 5.], f32[2])

    Refuses:
        ml.diff(v, n=-1)  # ArgumentError
        ml.diff(v, prepend=x)  # ShapeError
    """
    [along] = axes_of(axis, x)
    [times] = counts_of(integer(n, "n"), "n")
    if times == 0:
        return alias_of(x)
    if prepend is not None or append is not None:
        pieces = [_joinable(each, x, along) for each in (prepend, x, append) if each is not None]
        x = concat(pieces, axis=along)
    for _ in range(times):
        behind, before = neighbours(x, along)
        x = behind - before
    return x


def _joinable(value: Operand, x: Tensor, axis: int) -> Tensor:
    """Convert a value to join with x along an axis: a tensor, or a number as one element."""
    if isinstance(value, Tensor) or is_array(value):
        return as_operand(value, x)
    shape = [1 if i == axis else length for i, length in enumerate(x.shape)]
    return broadcast_to(as_operand(value, x), shape)


@public
def cumulative_sum(
    x: Tensor,
    /,
    axis: int | None = None,
    *,
    dtype: object = None,
    include_initial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute running sums along `axis` (None: the only one), in the dtype that `sum` uses. With
    `include_initial` a 0 comes before them, and the axis is longer by one.

    x: [...], any dtype -> [...] in `dtype`; without one, unsigned integers give u64, other integers
    and bools i64, floats and complex numbers their own. Raises `ShapeError` if `axis` is None and x
    is not a vector; `AxisRefused` if x has no such axis; `DTypeError` if `dtype` is bool.

        >>> ml.cumulative_sum(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 3., 6.], f32[3])

    Refuses:
        ml.cumulative_sum(v, dtype="bool")  # DTypeError
    """
    target = None if dtype is None else DType.of(dtype)
    x = _counted(x)
    if not include_initial:
        return op.cumulative_sum(x, axis=axis, dtype=target, out=out)
    if out is not None:
        raise ArgumentError("out= is not supported with include_initial")
    return _after(0.0, op.cumulative_sum(x, axis=axis, dtype=target), axis)


def _counted(x: Tensor) -> Tensor:
    """Convert bools to i64 for sums and products."""
    return astype(x, i64) if type_of(x).dtype is bool_ else x


def _after(value: float, x: Tensor, axis: int | None) -> Tensor:
    """Prepend one element of that value along an axis (None: the only one)."""
    along = (axis or 0) % x.ndim
    return op.pad(x, widths=tuple((int(i == along), 0) for i in range(x.ndim)), value=value)


@public
def cumulative_prod(
    x: Tensor, /, axis: int | None = None, *, dtype: object = None, include_initial: bool = False
) -> Tensor:
    """Compute running products along `axis` (None: the only one), in the dtype that `prod` uses.
    With `include_initial` a 1 comes before them, and the axis is longer by one.

    It takes log2(n) products of all elements and no division, so gradients are right if x has zeros
    (Hillis and Steele, Data Parallel Algorithms, CACM 29, 1986). If all elements are finite, the
    products from a 0 on are 0, also where a product of others overflows.

    x: [...], any dtype -> [...] in `dtype`; without one, unsigned integers give u64, other integers
    and bools i64, floats and complex numbers their own. Raises `ShapeError` if `axis` is None and x
    is not a vector; `AxisRefused` if x has no such axis; `DTypeError` if `dtype` is bool.

        >>> ml.cumulative_prod(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 2., 6.], f32[3])

    Refuses:
        ml.cumulative_prod(v, dtype="bool")  # DTypeError
    """
    target = None if dtype is None else DType.of(dtype).name
    x = in_single(_counted(x))
    kind = inferred(one_op("cumulative_sum", axis=axis, dtype=target), x).dtype
    result = widened(astype(x, kind))
    along, step = (axis or 0) % x.ndim, 1
    finite = finite_along(result, along)
    while step < x.shape[along]:
        result = product(with_ones_before(result, along, step), result, finite)
        step = 2 * step
    result = rounded(result, kind)
    return _after(1.0, result, axis) if include_initial else result


def finite_along(x: Tensor, axis: int | tuple[int, ...]) -> Tensor | None:
    """Return whether all floats along an axis, which is kept, are finite; None for other dtypes."""
    if not x.dtype.is_float:
        return None
    return op.all(op.isfinite(x), axis=axis, keepdims=True)


def product(x: Tensor, y: Tensor, finite: Tensor | None) -> Tensor:
    """Return x y. Where they are products of `finite` numbers, one is 0 and the other one has
    overflowed, it is 0 instead of nan."""
    if finite is None:
        return x * y
    most = float(finfo(x.dtype).max)

    def held(x: Tensor, y: Tensor) -> Tensor:
        meets = op.logical_and(op.logical_and(op.isinf(x), op.equal(y, 0.0)), finite)
        return op.where(meets, op.copysign(constant(most, x.dtype), stop_gradient(x)), x)

    return held(x, y) * held(y, x)


def _scanned(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, axis: int | None) -> Tensor:
    """Scan an associative function along an axis (None: the only one), in log2(n) steps over all
    elements (Hillis and Steele, Data Parallel Algorithms, CACM 29, 1986)."""
    if axis is None and type_of(x).ndim != 1:
        raise ShapeError("expected an axis, unless x has 1 dimension")
    [along] = axes_of(axis or 0, x)
    n, step = x.shape[along], 1
    result = alias_of(x)
    while step < n:
        behind = combine(part(result, along, span(n - step)), part(result, along, span(step, n)))
        result, step = concat([part(result, along, span(step)), behind], axis=along), 2 * step
    return result


@public
def cummax(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the running maximum along `axis` (None: the only one); nan from the first nan on.

    x: [...], integers or floats, and so is the result. Raises `ShapeError` if `axis` is None and x
    is not a vector; `AxisRefused` if x has no such axis; `DTypeError` if an operand is bool or
    complex.

        >>> ml.cummax(ml.asarray([1.0, 3.0, 2.0]))
        Tensor([1., 3., 3.], f32[3])
    """
    require("real", type_of(x))
    return _scanned(op.maximum, x, axis)


@public
def cummin(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the running minimum along `axis` (None: the only one); nan from the first nan on.

    x: [...], integers or floats, and so is the result. Raises what `cummax` raises.

        >>> ml.cummin(ml.asarray([3.0, 1.0, 2.0]))
        Tensor([3., 1., 1.], f32[3])
    """
    require("real", type_of(x))
    return _scanned(op.minimum, x, axis)


@public
@in_f32
def logcumsumexp(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the running `logsumexp` along `axis` (None: the only one).

    x: [...], floats, and so is the result. Raises `ShapeError` if `axis` is None and x is not a
    vector; `AxisRefused` if x has no such axis; `DTypeError` if x is not of floats.

        >>> ml.logcumsumexp(ml.asarray([0.0, 0.0]))
        Tensor([0.       , 0.6931472], f32[2])
    """
    require("float", type_of(x))
    return _scanned(op.logaddexp, x, axis)


@public
@in_f32
def trapezoid(y: Tensor, x: Tensor | None = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Integrate y along `axis` by the trapezoidal rule, at the places x or at a spacing of `dx`.

    y: [..., n], any dtype but bool, integers as f32; x: as y, or [n] -> [...]. Raises `ShapeError`
    if x does not fit; `AxisRefused` if y has no such axis; `DTypeError` if an operand is bool or
    the dtypes do not promote.

        >>> ml.trapezoid(ml.asarray([1.0, 2.0, 3.0]))
        Tensor(4., f32[])

    Refuses:
        ml.trapezoid(ml.ones(0), v)  # ShapeError
    """
    require("numeric", type_of(y))
    [along] = axes_of(axis, y)
    y = y if y.dtype.is_inexact else astype(y, f32)
    heights = op.add(*neighbours(y, along))
    if x is None:
        return op.sum(heights, axis=along) * (dx / 2)
    require("numeric", type_of(x))
    if x.ndim == 1:
        x = reshape(x, [x.size if i == along else 1 for i in range(y.ndim)])
    if x.ndim != y.ndim or x.shape[along] != y.shape[along]:
        raise ShapeError(f"x is {x.type}, and has to be as y, or a vector of {y.shape[along]}")
    return op.sum(heights * op.subtract(*neighbours(x, along)), axis=along) / 2.0


def with_ones_before(x: Tensor, axis: int, by: int) -> Tensor:
    """Shift x by `by` places along an axis, with ones before it; elements beyond the end are
    dropped."""
    by = min(by, x.shape[axis])
    shifted = part(x, axis, span(x.shape[axis] - by))
    return op.pad(shifted, widths=tuple((by * (i == axis), 0) for i in range(x.ndim)), value=1.0)


def sum_to(x: Tensor, type: TensorType) -> Tensor:
    """Sum x over the axes that broadcasting added or stretched from `type`, and cast it. A real
    type gets the real part."""
    if x.dtype.kind == "complex" and type.dtype.is_float:
        x = op.real(x)
    if x.dtype is not type.dtype:
        x = astype(x, type.dtype)
    if x.type is type:
        return x
    is_open = x.type.is_open or type.is_open
    axes = (_broadcast_axes.__wrapped__ if is_open else _broadcast_axes)(x.shape, type.shape)
    if axes:
        x = op.sum(x, axis=axes)
    return x if x.type is type else reshape(x, type.shape)


@lru_cache(maxsize=4096)
def _broadcast_axes(shape: Shape, original: Shape) -> tuple[int, ...]:
    """Return the axes that broadcasting from `original` to `shape` added or stretched."""
    extra = len(shape) - len(original)
    return tuple(
        i for i, n in enumerate(shape) if i < extra or (original[i - extra] == 1 and n != 1)
    )
