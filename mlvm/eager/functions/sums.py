"""Functions composed of sums, products and differences along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.rules import Axis, broadcast_shapes, require
from mlvm.core.types import DType, TensorType, bool_, f32, f64, i64
from mlvm.eager.functions.arguments import axes_of, count_of, span, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import astype, stop_gradient
from mlvm.eager.functions.halves import in_f32, through_f32
from mlvm.eager.functions.matrices import floating
from mlvm.eager.functions.shapes import broadcast_to, concat, expand_dims, neighbours, part, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.dtypes import finfo, iinfo
from mlvm.eager.tensor.operands import Operand, as_operand, is_array
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
@in_f32
def std(
    x: Tensor,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    where: Tensor | None = None,
) -> Tensor:
    """Compute the standard deviation along `axis`: the square root of `var`.

    If all elements are equal, the gradient is 0, like the gradient of `sqrt` at 0.

    x: [...], any dtype. The result: the shape and dtype of `var`. Raises the errors of `var`.

        >>> ml.std(ml.asarray([1.0, 3.0]))
        Tensor(1., f32[])
    """
    return op.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims, where=where))


@public
def var(
    x: Tensor,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    out: Tensor | None = None,
    where: Tensor | None = None,
) -> Tensor:
    """Compute the variance along `axis`: the sum of |x - mean(x)|^2, divided by n - `correction`.

    For complex numbers it is the sum of the variances of the real and imaginary parts. With a
    bool tensor `where`, only the elements where it is True are used.

    x: [...], any dtype, integers and bools as f32 -> f, the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises `AxisError` if x has no such axis; `ShapeError` if
    `where` does not broadcast to x; `DTypeError` if `where` is not bool.

        >>> ml.var(ml.asarray([1.0, 3.0]))
        Tensor(1., f32[])

    Invalid calls:
        ml.var(v, where=v)  # DTypeError
        ml.var(v, where=ml.ones(3, dtype="bool"))  # ShapeError
    """
    if type_of(x).dtype.kind == "complex":
        parts = [
            var(each, axis, correction=correction, keepdims=keepdims, where=where)
            for each in (op.real(x), op.imag(x))
        ]
        return op.add(*parts, out=out)
    if where is None:
        return op.var(x, axis=axis, correction=correction, keepdims=keepdims, out=out)
    if out is not None:
        raise ArgumentError("out= cannot be combined with where=; omit out=")
    return _masked_var(x, axis, correction, keepdims, where)


@in_f32
def _masked_var(x: Tensor, axis: Axis, correction: float, keepdims: bool, mask: Tensor) -> Tensor:
    """Compute the variance of the elements at which the mask is True."""
    x = floating(x)
    zero = constant(0.0, x.dtype)
    away = op.where(mask, x - op.mean(x, axis=axis, keepdims=True, where=mask), zero)
    total = op.sum(op.square(away), axis=axis, keepdims=keepdims)
    shape = broadcast_to(astype(mask, x.dtype), x.shape)
    divisor = op.sum(shape, axis=axis, keepdims=keepdims) - float(correction)
    return total / op.where(op.greater(divisor, 0.0), divisor, constant(math.nan, x.dtype))


@public
def gradient(
    f: Tensor,
    /,
    *spacing: float | Tensor,
    axis: Axis = None,
    edge_order: Literal[1, 2] = 1,
) -> Any:
    """Return the derivative of samples along each of the axes (None: all), like `numpy.gradient`.

    It uses central differences; at the boundaries the differences are one-sided, of first or second
    order. For derivatives of functions see `grad`.

    `spacing` is one distance for all axes (default: 1), or for each axis a distance or a vector of
    coordinates. One axis returns a tensor, several axes return a tuple.

    f: [..., n, ...], any dtype but bool, integers as f32 -> the shape of f. Raises `ShapeError` if
    an axis is shorter than edge_order + 1 or the number of coordinates differs from the length of
    the axis; `ArgumentError` if the numbers of spacings and axes differ, or `edge_order` is
    unknown; `AxisError` if f has no such axis; `DTypeError` if f is bool.

        >>> ml.gradient(ml.asarray([1.0, 2.0, 4.0, 7.0]))
        Tensor([1. , 1.5, 2.5, 3. ], f32[4])

    Invalid calls:
        ml.gradient(v, 1.0, 1.0)  # ArgumentError
        ml.gradient(ml.ones(1))  # ShapeError
    """
    require("numeric", type_of(f))
    f = floating(f)
    axes = axes_of(axis, f)
    if edge_order not in (1, 2):
        raise ArgumentError(f"expected edge_order 1 or 2, got {brief(edge_order)}")
    if len(spacing) not in (0, 1, len(axes)):
        raise ArgumentError(f"expected spacings for {len(axes)} axes, got {len(spacing)}")
    steps = (spacing or (1.0,)) * (len(axes) if len(spacing) < 2 else 1)
    results = [_slopes(f, along, by, edge_order) for along, by in zip(axes, steps, strict=True)]
    return results[0] if len(results) == 1 else tuple(results)


@through_f32
def _slopes(f: Tensor, axis: int, spacing: float | Tensor, edge_order: int) -> Tensor:
    """Differentiate samples along one axis, by three points.

    Fornberg, Math. Comp. 51, 1988, 699-706."""
    n = f.shape[axis]
    if n < edge_order + 1:
        raise ShapeError(f"expected at least {edge_order + 1} samples on axis {axis}, got {n}")
    steps = as_operand(spacing, f)
    if steps.ndim:
        if steps.shape != (n,):
            raise ShapeError(f"expected coordinates of {n} samples, got {steps.type}")
        after, before = neighbours(steps if steps.dtype.is_inexact else astype(steps, f.dtype), 0)
        steps = after - before
    is_uneven = steps.ndim > 0
    h = reshape(steps, [steps.size if i == axis else 1 for i in range(f.ndim)])
    if not is_uneven:
        h = broadcast_to(h, [n - 1 if i == axis else 1 for i in range(f.ndim)])
    after, before = neighbours(f, axis)
    rises = (after - before) / h  # difference quotients of neighbours
    first, last = part(rises, axis, span(1)), part(rises, axis, span(n - 2, n - 1))
    if n == 2:
        return concat([first, last], axis=axis)
    backward, forward = neighbours(rises, axis)
    h_behind, h_ahead = neighbours(h, axis)
    if is_uneven:
        rise = forward * h_behind + backward * h_ahead
    else:  # without the sample in the middle, which may be infinite
        rise = part(f, axis, span(2, n)) - part(f, axis, span(n - 2))
    inner = rise / (h_behind + h_ahead)
    if edge_order == 2:
        (h0, h1), (h2, h3) = [
            [part(h, axis, span(i, i + 1)) for i in pair] for pair in ((0, 1), (n - 3, n - 2))
        ]
        second = part(rises, axis, span(1, 2)), part(rises, axis, span(n - 3, n - 2))
        first = first + (first - second[0]) * h0 / (h0 + h1)
        last = last + (last - second[1]) * h3 / (h2 + h3)
    return concat([first, inner, last], axis=axis)


@public
def outer(x: Tensor, y: Tensor, /) -> Tensor:
    """Multiply all pairs of elements of two vectors: x[i] * y[j].

    x: [m], y: [n] -> [m, n]. Raises `ShapeError` if an operand is not a vector; `DTypeError` if an
    operand is bool or the dtypes do not promote.

        >>> ml.outer(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor([[3., 4.],
                [6., 8.]], f32[2,2])

    Invalid calls:
        ml.linalg.outer(ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64"))  # DTypeError
        ml.linalg.outer(ml.ones(()), v)  # ShapeError
    """
    types = type_of(x), type_of(y)
    if types[0].ndim != 1 or types[1].ndim != 1:
        raise ShapeError(f"expected two vectors, got {types[0]} and {types[1]}")
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

    `prepend` and `append` are first joined with x; a number is used as one element everywhere. n =
    0 returns only x, as in numpy.

    x: [..., m], any dtype but bool; the result: [..., m - n]. Raises `ShapeError` if `prepend` or
    `append` does not fit x; `AxisError` if x has no such axis; `ArgumentError` if n is
    negative; `DTypeError` if an operand is bool.

        >>> ml.diff(ml.asarray([1.0, 4.0, 9.0]))
        Tensor([3., 5.], f32[2])

    Invalid calls:
        ml.diff(v, n=-1)  # ArgumentError
        ml.diff(v, prepend=x)  # ShapeError
    """
    [along] = axes_of(axis, x)
    times = count_of(n, "n")
    if times == 0:
        return alias_of(x)
    if prepend is not None or append is not None:
        pieces = [_joinable(each, x, along) for each in (prepend, x, append) if each is not None]
        x = concat(pieces, axis=along)
    for _ in range(times):
        if not x.shape[along]:
            break
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
    exclusive: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute cumulative sums along `axis` (None: the only axis), in the dtype that `sum` uses.

    With `include_initial` a 0 is prepended, and the axis is longer by one. With `exclusive` each
    result is the sum of the elements before the position.

    x: [...], any dtype -> [...] in `dtype`. By default, unsigned integers become u64, other
    integers and bools i64, and floats and complex numbers keep the dtype. Raises `ShapeError` if
    `axis` is None and x is not a vector; `AxisError` if x has no such axis; `DTypeError` if
    `dtype` is bool.

        >>> ml.cumulative_sum(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 3., 6.], f32[3])

    Invalid calls:
        ml.cumulative_sum(v, dtype="bool")  # DTypeError
    """
    target = None if dtype is None else DType.of(dtype)
    x = _counted(x)
    if not (include_initial or exclusive):
        return op.cumulative_sum(x, axis=axis, dtype=target, out=out)
    if out is not None:
        raise ArgumentError(
            "out= cannot be combined with include_initial= or exclusive=; omit out="
        )
    sums = op.cumulative_sum(x, axis=axis, dtype=target)
    return _from_initial(0.0, sums, axis, include_initial)


def _counted(x: Tensor) -> Tensor:
    """Convert bools to i64 for sums and products."""
    return astype(x, i64) if type_of(x).dtype is bool_ else x


def _from_initial(initial: float, x: Tensor, axis: int | None, include_last: bool) -> Tensor:
    """Prepend one element with the value `initial` along an axis (None: the only axis).

    Drop the last element unless `include_last` is True."""
    along = (axis or 0) % x.ndim
    widths = tuple((int(i == along), 0) for i in range(x.ndim))
    after = op.pad(x, widths=widths, value=initial)
    return after if include_last else part(after, along, span(x.shape[along]))


@public
def cumulative_prod(
    x: Tensor,
    /,
    axis: int | None = None,
    *,
    dtype: object = None,
    include_initial: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """Compute cumulative products along `axis` (None: the only axis), in the dtype of `prod`.

    With `include_initial` a 1 is prepended, and the axis is longer by one. With `exclusive` each
    result is the product of the elements before the position. The gradient needs no division, so it
    is correct if x contains zeros. If all elements are finite, the products from a 0 on are 0, even
    where a product of other elements overflows.

    x: [...], any dtype -> [...] in `dtype`. By default, unsigned integers become u64, other
    integers and bools i64, and floats and complex numbers keep the dtype. Raises `ShapeError` if
    `axis` is None and x is not a vector; `AxisError` if x has no such axis; `DTypeError` if
    `dtype` is bool.

        >>> ml.cumulative_prod(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 2., 6.], f32[3])

    Invalid calls:
        ml.cumulative_prod(v, dtype="bool")  # DTypeError
    """
    target = None if dtype is None else DType.of(dtype)
    x = _counted(x)
    if not (include_initial or exclusive):
        return op.cumulative_prod(x, axis=axis, dtype=target)
    if include_initial or (axis is None and x.ndim != 1):
        return _from_initial(1.0, op.cumulative_prod(x, axis=axis, dtype=target), axis, True)
    [along] = axes_of(axis or 0, x)
    _, used = neighbours(x, along)  # an infinite last element must not change the gradient
    products = op.cumulative_prod(used, axis=along, dtype=target)
    return part(_from_initial(1.0, products, along, True), along, span(x.shape[along]))


def finite_along(x: Tensor, axis: int | tuple[int, ...]) -> Tensor | None:
    """Return whether all floats along an axis are finite, as bool with that axis kept.

    Return None for other dtypes."""
    if not x.dtype.is_float:
        return None
    return op.all(op.isfinite(x), axis=axis, keepdims=True)


def product(x: Tensor, y: Tensor, finite: Tensor | None) -> Tensor:
    """Return x y, with 0 instead of nan where an overflowed product of finite numbers meets a 0.

    `finite` is True where the factors of both operands are finite."""
    if finite is None:
        return x * y
    most = float(finfo(x.dtype).max)

    def limited(x: Tensor, y: Tensor) -> Tensor:
        meets = op.logical_and(op.logical_and(op.isinf(x), op.equal(y, 0.0)), finite)
        return op.where(meets, op.copysign(constant(most, x.dtype), stop_gradient(x)), x)

    return limited(x, y) * limited(y, x)


def _scanned(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor, axis: int | None) -> Tensor:
    """Scan an associative function along an axis (None: the only axis).

    It needs log2(n) steps over all elements (Hillis and Steele, Data Parallel Algorithms, CACM 29,
    1986)."""
    if axis is None and type_of(x).ndim != 1:
        raise ShapeError(f"expected axis= for x with {type_of(x).ndim} dimensions, got None")
    [along] = axes_of(axis or 0, x)
    n, step = x.shape[along], 1
    result = alias_of(x)
    while step < n:
        behind = combine(part(result, along, span(n - step)), part(result, along, span(step, n)))
        result, step = concat([part(result, along, span(step)), behind], axis=along), 2 * step
    return result


@public
def cummax(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the cumulative maximum along `axis` (None: the only axis); nan from the first nan on.

    x: [...], integers or floats, and so is the result. Raises `ShapeError` if `axis` is None and x
    is not a vector; `AxisError` if x has no such axis; `DTypeError` if an operand is bool or
    complex.

        >>> ml.cummax(ml.asarray([1.0, 3.0, 2.0]))
        Tensor([1., 3., 3.], f32[3])
    """
    require("real", type_of(x))
    return _scanned(op.maximum, x, axis)


@public
def cummin(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the cumulative minimum along `axis` (None: the only axis); nan from the first nan on.

    x: [...], integers or floats, and so is the result. Raises the errors of `cummax`.

        >>> ml.cummin(ml.asarray([3.0, 1.0, 2.0]))
        Tensor([3., 1., 1.], f32[3])
    """
    require("real", type_of(x))
    return _scanned(op.minimum, x, axis)


@public
@in_f32
def logcumsumexp(x: Tensor, /, axis: int | None = None) -> Tensor:
    """Compute the cumulative `logsumexp` along `axis` (None: the only axis).

    x: [...], floats, and so is the result. Raises `ShapeError` if `axis` is None and x is not a
    vector; `AxisError` if x has no such axis; `DTypeError` if x is not of floats.

        >>> ml.logcumsumexp(ml.asarray([0.0, 0.0]))
        Tensor([0.       , 0.6931472], f32[2])
    """
    require("float", type_of(x))
    return _scanned(op.logaddexp, x, axis)


@public
@in_f32
def trapezoid(y: Tensor, x: Tensor | None = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    """Integrate y along `axis` by the trapezoidal rule, at the positions x or with spacing `dx`.

    y: [..., n], any dtype but bool, integers as f32; x: as y, or [n] -> [...]. Raises `ShapeError`
    if x does not fit; `AxisError` if y has no such axis; `DTypeError` if an operand is bool or
    the dtypes do not promote.

        >>> ml.trapezoid(ml.asarray([1.0, 2.0, 3.0]))
        Tensor(4., f32[])

    Invalid calls:
        ml.trapezoid(ml.ones(0), v)  # ShapeError
    """
    require("numeric", type_of(y))
    [along] = axes_of(axis, y)
    y = floating(y)
    heights = op.add(*neighbours(y, along))
    if x is None:
        return op.sum(heights, axis=along) * (dx / 2)
    require("numeric", type_of(x))
    if x.ndim == 1:
        x = reshape(x, [x.size if i == along else 1 for i in range(y.ndim)])
    if x.ndim != y.ndim or x.shape[along] != y.shape[along]:
        raise ShapeError(
            f"expected x of the shape of y, {list(y.shape)}, or a vector of {y.shape[along]}, "
            f"got {x.type}"
        )
    return op.sum(heights * op.subtract(*neighbours(x, along)), axis=along) / 2.0


def reduce_where(name: str, x: Tensor, *, where: Operand, **attributes: Any) -> Tensor:
    """Reduce the elements of x at which `where` is True.

    All other elements are replaced by the neutral element of the reduction."""
    mask = as_operand(where)
    if mask.dtype is not bool_:
        raise DTypeError(f"expected where as a bool tensor, got {mask.type}")
    if broadcast_shapes(mask.shape, x.shape) != x.shape:
        raise ShapeError(
            f"expected where= as a mask that broadcasts to {x.shape}, got {mask.shape}"
        )
    if name == "mean":
        return _masked_mean(x, mask, **attributes)
    if name in ("any", "all"):
        x = astype(x, bool_)
    x = op.where(mask, x, full((), _neutral(name, x.dtype), dtype=x.dtype))
    result: Tensor = getattr(op, name)(x, **attributes)
    return result


def _neutral(name: str, dtype: DType) -> Any:
    """Return the neutral element of a reduction in that dtype."""
    if name in ("max", "min", "logsumexp"):
        sign = 1 if name == "min" else -1
        if dtype.is_inexact:
            return sign * math.inf
        if dtype is bool_:
            return name == "min"
        limits = iinfo(dtype)
        return limits.max if name == "min" else limits.min
    return {"sum": 0, "prod": 1, "any": False, "all": True}[name]


@in_f32
def _masked_mean(x: Tensor, mask: Tensor, **attributes: Any) -> Tensor:
    """Divide the sum of the elements at which the mask is True by the number of these elements."""
    x = floating(x)
    total = op.sum(op.where(mask, x, constant(0, x.dtype)), **attributes)
    counted = broadcast_to(astype(mask, x.dtype.real), x.shape)
    return total / op.sum(counted, **attributes)


def sum_to(x: Tensor, type: TensorType) -> Tensor:
    """Sum x over the axes that broadcasting added or stretched from `type`, and cast it.

    A real type gets the real part."""
    if x.dtype.kind == "complex" and type.dtype.is_float:
        x = op.real(x)
    if x.dtype is not type.dtype:
        x = astype(x, type.dtype)
    if x.type is type:
        return x
    extra = x.ndim - type.ndim
    axes = tuple(
        [i for i, n in enumerate(x.shape) if i < extra or (type.shape[i - extra] == 1 and n != 1)]
    )
    if axes:
        x = over_batch(op.sum, x, axes)
    return x if x.type is type else reshape(x, type.shape)


def over_batch(reduce: Callable[..., Tensor], x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the sum or mean over these axes, first for each image, and then over the batch.

    Therefore a captured step can process parts of a batch (`mlvm.step.parts`)."""
    if axes[:3] == (0, 1, 2) and x.dtype in (f32, f64):
        x, axes = reduce(x, axis=axes[1:]), (0,)
    return reduce(x, axis=axes)


vars(op)["reduce_where"] = reduce_where
