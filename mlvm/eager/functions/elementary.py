"""Composite elementwise functions with numpy's names; derivatives are correct at special points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from mlvm.core.ops.special import polynomial
from mlvm.core.rules import broadcast_shapes, require
from mlvm.core.types import DType, f32, f64
from mlvm.eager.functions.arguments import axes_of, type_of
from mlvm.eager.functions.elements import astype, from_parts, stop_gradient, where
from mlvm.eager.functions.halves import in_f32, through_f32
from mlvm.eager.functions.matrices import floating
from mlvm.eager.functions.shapes import broadcast_to, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.operands import Operand, as_operand, as_operands
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

_SINC: Final = tuple([(-1) ** k / math.factorial(2 * k + 1) for k in range(12, -1, -1)])


@public
@in_f32
def sinc(x: Tensor, /) -> Tensor:
    """Compute sin(pi x) / (pi x), and 1 at 0; nan where pi x overflows, as in numpy.

    Near 0 it is the sum of (-1)^k (pi x)^2k / (2k + 1)!, so that all derivatives are correct there.

    x: [...], floats or complex numbers, integers as f32, and so is the result. Raises `DTypeError`
    if x is bool.

        >>> ml.sinc(ml.asarray([0.0, 0.5]))
        Tensor([1.       , 0.6366198], f32[2])
    """
    require("numeric", type_of(x))
    z = floating(x) * math.pi
    near = op.less(op.abs(z), 1.0)
    inside = op.where(near, z, constant(0.0, z.dtype))
    outside = op.where(near, constant(1.0, z.dtype), z)
    return op.where(near, polynomial(_SINC, op.square(inside)), op.sin(outside) / outside)


@public
@through_f32
def cbrt(x: Tensor, /) -> Tensor:
    """Compute the real cube root, also for negative numbers; the slope at 0 is inf.

    x: [...], floats, integers as f32, and so is the result. Raises `DTypeError` if x is bool or
    complex.

        >>> ml.cbrt(ml.asarray([8.0, -27.0]))
        Tensor([ 2., -3.], f32[2])
    """
    require("real", type_of(x))
    x = floating(x)
    is_negative = op.signbit(x)
    size = op.where(is_negative, -x, x)
    root = op.pow(size, 1 / 3)
    fixed = stop_gradient(root)  # one step of Newton's method corrects the last digits
    is_plain = op.logical_and(op.greater(fixed, 0.0), op.isfinite(fixed))
    divisor = op.where(is_plain, fixed, constant(1.0, x.dtype))
    step = (stop_gradient(size) / divisor / divisor - divisor) / 3.0
    root = root + op.where(is_plain, step, constant(0.0, x.dtype))
    return op.where(is_negative, -root, root)


@public
def heaviside(x: Operand, y: Operand, /) -> Tensor:
    """Return 0 where x < 0, 1 where x > 0, y where x is 0, and nan where x is nan.

    x and y: shapes that broadcast to [...], integers or floats. The result: [...], the dtype that
    they promote to. Only y has a gradient. Raises `ShapeError` if the shapes do not fit;
    `DTypeError` if an operand is bool or complex.

        >>> ml.heaviside(ml.asarray([-1.0, 0.0, 2.0]), 0.5)
        Tensor([0. , 0.5, 1. ], f32[3])

    Invalid calls:
        ml.heaviside(v, ml.ones(3))  # ShapeError
    """
    first, second = as_operands((x, y))
    require("real", first.type, second.type)
    first = stop_gradient(first)
    zero, one = constant(0, first.dtype), constant(1, first.dtype)
    sides = op.where(op.greater(first, 0), one, op.where(op.less(first, 0), zero, first))
    return op.where(op.equal(first, 0), second, sides)


@public
@through_f32
def ldexp(x: Tensor, exponent: Tensor | int | list[Any], /) -> Tensor:
    """Compute x * 2^exponent, rounded once.

    x: floats, integers as f32; exponent: integers; shapes that broadcast to [...]. The result:
    [...], of x's dtype. Raises `ShapeError` if the shapes do not fit; `DTypeError` if x is bool or
    complex, or the exponents are not integers.

        >>> ml.ldexp(ml.asarray([0.5, 3.0]), [2, -1])
        Tensor([2. , 1.5], f32[2])

    Invalid calls:
        ml.ldexp(v, v)  # DTypeError
        ml.ldexp(v, ml.asarray([1, 2, 3]))  # ShapeError
    """
    require("real", type_of(x))
    x = floating(x)
    n = as_operand(exponent)
    require("integer", n.type)
    low, high = (-1022, 1023) if x.dtype is f64 else (-126, 127)
    rest = op.clip(astype(n, "i64"), 3 * low, 3 * high)
    parts: list[Tensor] = []
    for _ in range(3):
        parts.append(op.clip(rest, low, high))
        rest = rest - parts[-1]
    for each in reversed(parts):  # the largest is last, so only that product is rounded
        x = x * op.pow(constant(2.0, x.dtype), astype(each, x.dtype))
    return x


@public
def fmax(x: Operand, y: Operand, /) -> Tensor:
    """Return the larger of x and y, elementwise, with broadcasting; a nan is ignored.

    x and y: shapes that broadcast to [...], integers or floats. The result: [...], the dtype that
    they promote to. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand is
    bool or complex.

        >>> ml.fmax(ml.asarray([1.0, ml.nan]), 0.5)
        Tensor([1. , 0.5], f32[2])

    Invalid calls:
        ml.fmax(v, ml.ones(3))  # ShapeError
    """
    return op.maximum(*_numbers(x, y))


@public
def fmin(x: Operand, y: Operand, /) -> Tensor:
    """Return the smaller of x and y, elementwise, with broadcasting; a nan is ignored.

    x and y: shapes that broadcast to [...], integers or floats. The result: [...], the dtype that
    they promote to. Raises the errors of `fmax`.

        >>> ml.fmin(ml.asarray([1.0, ml.nan]), 0.5)
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.fmin(v, ml.ones(3))  # ShapeError
    """
    return op.minimum(*_numbers(x, y))


def _numbers(x: Operand, y: Operand) -> tuple[Tensor, Tensor]:
    """Return the operands with each nan replaced by the other operand."""
    first, second = as_operands((x, y))
    require("real", first.type, second.type)
    if not (first.dtype.is_float or second.dtype.is_float):
        return first, second
    return op.where(op.isnan(first), second, first), op.where(op.isnan(second), first, second)


@public
@in_f32
def logaddexp2(x: Operand, y: Operand, /) -> Tensor:
    """Compute log2(2^x + 2^y), elementwise, with broadcasting.

    It overflows only where the result does.

    x and y: shapes that broadcast to [...], floats, integers as f32. The result: [...], the dtype
    that they promote to. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand
    is complex.

        >>> ml.logaddexp2(ml.asarray([1.0, 1000.0]), ml.asarray([1.0, 0.0]))
        Tensor([   2., 1000.], f32[2])

    Invalid calls:
        ml.logaddexp2(v, ml.ones(3))  # ShapeError
    """
    first, second = [floating(each) for each in as_operands((x, y))]
    top = stop_gradient(op.maximum(first, second))
    top = op.where(op.isfinite(top), top, constant(0.0, top.dtype))
    scale = math.log(2)
    return top + op.logaddexp((first - top) * scale, (second - top) * scale) / scale


@public
def select(
    condlist: Sequence[Tensor], choicelist: Sequence[Operand], default: Operand = 0
) -> Tensor:
    """Select the choice of the first condition that holds, elementwise, else `default`.

    condlist: bool[...], k tensors; choicelist: k operands; all shapes broadcast to [...]. The
    result: [...], the dtype that the choices and `default` promote to. Raises `ArgumentError`
    unless the numbers of conditions and choices are equal and at least 1; `ShapeError` if the
    shapes do not fit; `DTypeError` if a condition is not bool or the dtypes do not promote.

        >>> x = ml.asarray([1.0, 2.0, 3.0])
        >>> ml.select([x < 2.0, x > 2.0], [x, 10.0 * x])
        Tensor([ 1.,  0., 30.], f32[3])

    Invalid calls:
        ml.select([], [])  # ArgumentError
        ml.select([v], [v])  # DTypeError
        ml.select([v > 0.0], [ml.ones(3)])  # ShapeError
    """
    conditions, choices = [*condlist], [*choicelist]
    if len(conditions) != len(choices) or not conditions:
        raise ArgumentError(
            f"expected equal numbers of conditions and choices, got {len(conditions)} and "
            f"{len(choices)}"
        )
    *operands, result = as_operands([*choices, default])
    for condition, choice in zip(reversed(conditions), reversed(operands), strict=True):
        result = where(condition, choice, result)
    return result


@public
def complex(x: Operand, y: Operand, /) -> Tensor:
    """Return x + iy, exactly, also for infinities, nan and -0.

    x and y: shapes that broadcast to [...], floats; integers and half precision as f32. The result:
    [...], c64 or c128. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand is
    complex already.

        >>> ml.complex(ml.asarray([1.0]), ml.asarray([ml.inf]))
        Tensor([1.+infj], c64[1])

    Invalid calls:
        ml.complex(x * 1j, v)  # DTypeError
        ml.complex(v, ml.ones(3))  # ShapeError
    """
    parts = as_operands((x, y))
    for each in parts:
        if each.dtype.kind == "complex":
            raise DTypeError(f"expected real parts, got {each.type}; pass x.real")
    dtypes = [each.dtype if each.dtype.is_float else default_float() for each in parts]
    wide = f64 if f64 in dtypes else f32
    shape = broadcast_shapes(parts[0].shape, parts[1].shape)
    return from_parts(*[broadcast_to(astype(each, wide), shape) for each in parts])


@public
def view_as_complex(x: Tensor, /) -> Tensor:
    """Return complex numbers; the last axis of x contains pairs of real and imaginary parts.

    x: f32[..., 2] or f64[..., 2] -> c[...]. Raises `ShapeError` if the length of the last axis is
    not 2; `DTypeError` if x has a different dtype.

        >>> ml.view_as_complex(ml.asarray([[1.0, 2.0]]))
        Tensor([1.+2.j], c64[1])

    Invalid calls:
        ml.view_as_complex(ml.ones((4, 3)))  # ShapeError
    """
    if type_of(x).dtype not in (f32, f64):
        raise DTypeError(f"expected f32 or f64, got {x.type}; convert with astype")
    if not x.ndim or x.shape[-1] != 2:
        raise ShapeError(f"expected pairs in the last axis, got {x.type}")
    return reshape(op.view(x, dtype="c64" if x.dtype is f32 else "c128"), x.shape[:-1])


@public
def view_as_real(x: Tensor, /) -> Tensor:
    """Return the real and imaginary parts of complex numbers, as pairs in a new last axis.

    x: c[...] -> f[..., 2]. Raises `DTypeError` if x is not complex.

        >>> ml.view_as_real(ml.asarray([1 + 2j]))
        Tensor([[1., 2.]], f32[1,2])
    """
    if type_of(x).dtype.kind != "complex":
        raise DTypeError(f"expected complex numbers, got {x.type}; convert with astype")
    pairs = op.view(reshape(x, (*x.shape, 1)), dtype=x.dtype.real.name)
    return reshape(pairs, (*x.shape, 2))


@public
def view(x: Tensor, dtype: object, /) -> Tensor:
    """Return a copy of the bytes of x as elements of a different dtype.

    If the element size differs, the length of the last axis changes. Gradients flow between complex
    numbers and the parts.

    x: [..., n], any dtype but bool -> [..., m] in `dtype`. Raises `ShapeError` if the bytes of the
    last axis are not a whole number of elements; `DTypeError` if the dtype is unknown or bool.

        >>> ml.view(ml.asarray([1.0]), ml.int32)
        Tensor([1065353216], i32[1])

    Invalid calls:
        ml.view(v, "bool")  # DTypeError
        ml.view(ml.ones(3), "f64")  # ShapeError
    """
    type_of(x)
    return op.view(x, dtype=DType.of(dtype))


@public
def put_along_axis(
    x: Tensor, indices: Tensor, values: Operand, axis: int | None, *, inplace: bool = True
) -> Tensor:
    """Write values along `axis` at the positions that `take_along_axis` reads; None: flattened.

    Like numpy's function, it updates x, which it also returns; with `inplace=False` it returns a
    new tensor, like JAX's function. If a position occurs several times, the last value is kept.

    x: [..., n, ...]; indices: i[..., k, ...], with the rank of x; values: a shape that broadcasts
    to the shape of the indices. Indices broadcast along the other axes -> the type of x. Raises
    `ShapeError` if the shapes do not fit; `AxisError` if x has no such axis; `PositionError` if an
    index is out of range; `DTypeError` if the indices are not integers or the values are of a
    different kind than x.

        >>> x = ml.zeros((2, 2))
        >>> y = ml.put_along_axis(x, ml.asarray([[1], [0]]), 5.0, axis=1)
        >>> x
        Tensor([[0., 5.],
                [5., 0.]], f32[2,2])

    Invalid calls:
        ml.put_along_axis(v, ml.asarray([9]), 1.0, 0)  # PositionError
        ml.put_along_axis(v, ints, 1j, 0)  # DTypeError
        ml.put_along_axis(x, ints, 1.0, 0)  # ShapeError
    """
    if axis is not None and type_of(indices).ndim == type_of(x).ndim:
        [along] = axes_of(axis, x)
        lengths = [indices.shape[i] if i == along else n for i, n in enumerate(x.shape)]
        indices = broadcast_to(indices, lengths)
    result = _scattered(x, axis, indices, values, "set")
    if not inplace:
        return result
    x[...] = result
    return x


@public
def scatter(
    x: Tensor, axis: int, indices: Tensor, values: Operand, *, reduce: str | None = None
) -> Tensor:
    """Return x with values written at positions along one axis, like `torch.scatter`.

    For axis 1, `x[i][indices[i][j]] = values[i][j]`. `reduce` combines the values with the old.
    `elements`: "add", "multiply", "max" or "min".

    `x`: [..., n, ...]; indices: i[..., k, ...], with the rank of x, and not longer along the other
    axes. values: a number, or a tensor at least as long as the indices along each axis -> the type
    of x. Raises `ArgumentError` if `reduce` is unknown; `ShapeError` if the shapes do not fit;
    `AxisError` if x has no such axis; `PositionError` if an index is out of range; `DTypeError`
    if the indices are not integers or the values are of a different kind than x.

        >>> ml.scatter(ml.zeros((2, 3)), 1, ml.asarray([[2], [0]]), 7.0)
        Tensor([[0., 0., 7.],
                [7., 0., 0.]], f32[2,3])

    Invalid calls:
        ml.scatter(v, 0, ints, 1.0, reduce="mean")  # ArgumentError
        ml.scatter(v, 5, ints, 1.0)  # AxisError
        ml.scatter(v, 0, ml.asarray([9]), 1.0)  # PositionError
        ml.scatter(v, 0, ints, 1j)  # DTypeError
        ml.scatter(x, 0, ints, 1.0)  # ShapeError
    """
    by = {None: "set", "add": "add", "multiply": "multiply", "max": "max", "min": "min"}
    if not isinstance(reduce, str | None) or reduce not in by:
        raise ArgumentError(f'expected reduce as "add", "multiply", "max" or "min", got {reduce!r}')
    updates = as_operand(values, x)
    if updates.ndim and updates.ndim == type_of(indices).ndim:
        updates = updates[tuple([slice(0, n) for n in indices.shape])]
    return _scattered(x, axis, indices, updates, by[reduce])


def _scattered(x: Tensor, axis: int | None, indices: Tensor, values: Operand, by: str) -> Tensor:
    """Combine values with the elements of x along an axis, for all indices of the other axes."""
    if axis is None:
        flat = _scattered(reshape(x, -1), 0, reshape(indices, -1), values, by)
        return reshape(flat, x.shape)
    [along] = axes_of(axis, x)
    require("integer", type_of(indices))
    if indices.ndim != x.ndim:
        raise ShapeError(f"expected indices of {x.ndim} dimensions, got {indices.type}")
    pairs = enumerate(zip(indices.shape, x.shape, strict=True))
    if any(i != along and n > m for i, (n, m) in pairs):
        raise ShapeError(
            f"expected indices that fit into x except along axis {along}, got {indices.type}"
        )
    updates = as_operand(values, x)
    updates = broadcast_to(updates, indices.shape)
    key = [
        indices
        if i == along
        else reshape(
            op.arange(start=0, stop=n, step=1, dtype="i64"),
            [-1 if j == i else 1 for j in range(x.ndim)],
        )
        for i, n in enumerate(indices.shape)
    ]
    result: Tensor = getattr(x.at[tuple(key)], by)(updates)
    return result
