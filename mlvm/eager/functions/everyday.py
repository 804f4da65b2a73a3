"""What is a line or two of other functions, and typed every day: names and meaning are those of
JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.rules import require
from mlvm.core.types import bool_
from mlvm.eager.functions.arguments import axes_of, integer, integers, type_of
from mlvm.eager.functions.creation import eye, full, zeros_like
from mlvm.eager.functions.elements import nonzero
from mlvm.eager.functions.matrices import diagonal_of, floating
from mlvm.eager.functions.shapes import concat, moveaxis, pad, reshape, stack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.operands import Operand, as_operands
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

# --- comparing -----------------------------------------------------------------------


@public
def isclose(
    x: Operand, y: Operand, /, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """|x - y| <= atol + rtol |y|, elementwise. Infinities are close to themselves, nan to nothing,
    or to nan with `equal_nan`.

    x and y: shapes that broadcast to [...], any dtypes. The result: bool[...]. Raises `ShapeError`
    for other shapes.

        >>> ml.isclose(ml.asarray([1.0, 2.0]), ml.asarray([1.000001, 2.1]))
        Tensor([ True, False], bool[2])
    """
    x, y = map(floating, as_operands((x, y)))
    near = op.abs(x - y) <= float(atol) + float(rtol) * op.abs(y)
    same = (near & op.isfinite(y)) | op.equal(x, y)
    return same | (op.isnan(x) & op.isnan(y)) if equal_nan else same


@public
def allclose(
    x: Operand, y: Operand, /, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Whether all elements are close, as `isclose` has it.

    x and y: shapes that broadcast, any dtypes. The result: bool[]. Raises what `isclose` raises.

        >>> ml.allclose(ml.asarray([1.0, 2.0]), ml.asarray([1.000001, 2.0]))
        Tensor(True, bool[])
    """
    return op.all(isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan))


@public
def array_equal(x: Operand, y: Operand, /) -> Tensor:
    """Whether x and y have one shape and equal elements.

    x: [...], y: [...], any dtypes that promote. The result: bool[]. Raises `DTypeError` for dtypes
    that do not promote.

        >>> ml.array_equal(ml.zeros(2), ml.zeros(3))
        Tensor(False, bool[])
    """
    x, y = as_operands((x, y))
    return op.all(op.equal(x, y)) if x.shape == y.shape else full((), False)


# --- elements ------------------------------------------------------------------------


@public
def round(x: Tensor, /, decimals: int = 0, *, out: Tensor | None = None) -> Tensor:
    """The nearest number of so many decimals, of both parts of a complex number; halves go to the
    even one.

    x: [...], any dtype, or one of floats for other `decimals` than 0. The result: [...], in x's
    dtype. Raises `DTypeError` for integers of other `decimals`, and bools.

        >>> ml.round(ml.asarray([0.126, 2.5]), 2), ml.round(ml.asarray([0.126, 2.5]))
        (Tensor([0.13, 2.5 ], f32[2]), Tensor([0., 2.], f32[2]))
    """
    places = integer(decimals, "decimals")
    if not places:
        return op.round(x, out=out)
    if not type_of(x).dtype.is_inexact:
        raise DTypeError(f"takes floats for decimals = {places}, not {x.dtype}")
    scale = 10.0 ** abs(places)
    found = op.round(x * scale) / scale if places > 0 else op.round(x / scale) * scale
    return found if out is None else op.copy(found, out=out)


@public
def exp2(x: Tensor, /) -> Tensor:
    """2^x, elementwise.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` for what is no
    tensor, array or list.

        >>> ml.exp2(ml.asarray([3.0, -1.0]))
        Tensor([8. , 0.5], f32[2])
    """
    return op.pow(2.0, floating(x))


@public
def deg2rad(x: Tensor, /) -> Tensor:
    """Degrees in radians: pi / 180 x.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` for what is no
    tensor, array or list.

        >>> ml.deg2rad(ml.asarray([180.0]))
        Tensor([3.1415927], f32[1])
    """
    return floating(x) * (math.pi / 180)


@public
def rad2deg(x: Tensor, /) -> Tensor:
    """Radians in degrees: 180 / pi x.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` for what is no
    tensor, array or list.

        >>> ml.rad2deg(ml.asarray([3.1415927]))
        Tensor([180.], f32[1])
    """
    return floating(x) * (180 / math.pi)


@public
def angle(x: Tensor, /) -> Tensor:
    """The angle of complex numbers in the plane, in radians: `atan2(imag(x), real(x))`; of real
    numbers 0, or pi where they are negative.

    x: [...], any dtype -> [...], real. Raises `DTypeError` for what is no tensor, array or list.

        >>> ml.angle(ml.asarray([1.0j, -1.0 + 0.0j]))
        Tensor([1.5707964, 3.1415927], f32[2])
    """
    x = floating(x)
    if x.dtype.kind == "complex":
        return op.atan2(op.imag(x), op.real(x))
    return op.atan2(zeros_like(x), x)


# --- shapes and places ---------------------------------------------------------------


@public
def diag(x: Tensor, /, k: int = 0) -> Tensor:
    """The matrix that has a vector on its k-th diagonal and zeros elsewhere; of a matrix that
    diagonal.

    x: [n] -> [n + |k|, n + |k|], or [m, n] -> [its length], in x's dtype. Raises `ShapeError` for
    other than a vector or a matrix.

        >>> ml.diag(ml.asarray([1, 2])), ml.diag(ml.asarray([[1, 2], [3, 4]]), k=1)
        (Tensor([[1, 0],
                [0, 2]], i64[2,2]), Tensor([2], i64[1]))
    """
    k, ndim = integer(k, "k"), type_of(x).ndim
    if ndim == 2:
        return diagonal_of(x, k)
    if ndim != 1:
        raise ShapeError("takes a vector or a matrix; see linalg.diagonal for stacks of matrices")
    size = x.shape[0] + abs(k)
    columns = pad(x, (max(k, 0), max(-k, 0)))
    return op.where(eye(size, k=k, dtype=bool_), columns, constant(0, x.dtype))


@public
def rot90(x: Tensor, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """x turned k times by 90 degrees, from the first of the two axes to the second.

    x: [m, n, ...] -> [n, m, ...] for an odd k, else [m, n, ...]. Raises `AxisRefused` for an axis
    that x does not have.

        >>> ml.rot90(ml.asarray([[1, 2], [3, 4]]))
        Tensor([[2, 4],
                [1, 3]], i64[2,2])
    """
    first, second = axes_of(axes, x)
    turns = integer(k, "k") % 4
    if turns % 2:
        x = moveaxis(x, (first, second), (second, first))
    flipped = [axis for axis, by in ((first, turns in (1, 2)), (second, turns in (2, 3))) if by]
    return op.flip(x, axis=tuple(flipped)) if flipped else alias_of(x)


@public
def vstack(arrays: Iterable[Tensor], /) -> Tensor:
    """The tensors below each other: along their first axis, vectors as rows.

    The tensors: one shape [n], or [..., *rest]; the result: [k, n] for k vectors, else
    [..., *rest]. Raises `ShapeError` for other shapes, `DTypeError` for dtypes that do not promote.

        >>> ml.vstack([ml.zeros(2), ml.ones(2)])
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])
    """
    xs = as_operands([*arrays])
    return concat([reshape(x, (1, -1)) if x.ndim < 2 else x for x in xs])


@public
def hstack(arrays: Iterable[Tensor], /) -> Tensor:
    """The tensors beside each other: along their second axis, vectors along their only one.

    The tensors: one shape but along that axis; and so is the result. Raises `ShapeError` for other
    shapes, `DTypeError` for dtypes that do not promote.

        >>> ml.hstack([ml.zeros((2, 1)), ml.ones((2, 1))])
        Tensor([[0., 1.],
                [0., 1.]], f32[2,2])
    """
    xs = [reshape(x, -1) if not x.ndim else x for x in as_operands([*arrays])]
    return concat(xs, axis=min(1, xs[0].ndim - 1))


@public
def argwhere(x: Tensor, /) -> Tensor:
    """The positions of the elements that are not zero, in row-major order: a row for each. The
    columns are those of `nonzero`.

    x: [...] -> i64[k, x.ndim], where k elements are not zero. Raises `ShapeError` for a scalar.

        >>> ml.argwhere(ml.asarray([[0, 3], [4, 0]]))
        Tensor([[0, 1],
                [1, 0]], i64[2,2])
    """
    return stack(nonzero(x), axis=1)


@public
def unravel_index(indices: Tensor, /, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The positions, an index for each axis of a tensor of that shape, of elements that are counted
    in row-major order, as `argmax(x)` does.

    indices: i[...] -> i[...] for each axis. Raises `DTypeError` for indices that are no integers.

        >>> ml.unravel_index(ml.asarray([0, 5]), (2, 3))
        (Tensor([0, 1], i64[2]), Tensor([0, 2], i64[2]))
    """
    require("integer", type_of(indices))
    found: list[Tensor] = []
    for length in reversed(integers(shape, "shape")):
        found.append(indices % length)
        indices = indices // length
    return tuple(reversed(found))
