"""Gradient rules of the ops: from a result's cotangent to the cotangents of the operands.

`VJPS` has an entry for each op, in the order of the packages of `mlvm.core.ops`. An entry contains
a rule for each operand with a gradient; integer operands (indices, labels, keys, conditions) have
none. The first parameter of a rule is the cotangent of the result: `g`, or `c` if an operand is
called g. The names of the other parameters select the values that the rule gets, tensors first:

    x, y, ...   the operand of that name. The tape keeps it alive until the rule has run, so a
    out         rule names only values that it needs; `out` is the result.
    axis, ...   an attribute of that name
    x_type      an operand's type, which needs no memory
    types       the types of all operands, and `position` of this one among them

If an op reads only a part of an operand, the rule returns a `Sparse` cotangent. For many slices of
a tensor, the engine allocates one cotangent, and adds each slice to it in place.

The cotangent of a complex z = x + iy is dL/dx + i dL/dy, for a real L. A rule therefore multiplies
g by the conjugate of the derivative, and an operand that is real gets the real part. Rules of
holomorphic ops are written for real numbers: the engine conjugates them (`Traits.is_holomorphic`).
Rules that only add and move elements are valid for both; the docstrings of all other rules describe
the complex case.

A rule may return a cotangent with the shape to which the operands broadcast and the dtype to which
they promote: the engine sums and casts it. Rules are eager code, which an outer tape records for
gradients of gradients. A rule therefore applies only differentiable ops to values that may be
tracked.

An op's row may contain forward rules, for tangents (`rows`). For an elementwise op they are by
default the reverse rules, without conjugates. For all other rows without forward rules, such as
decompositions, the reverse rules are transposed, since they are linear in the cotangent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from inspect import signature
from operator import add
from typing import Final

from mlvm.arena.context import current
from mlvm.core.op import Attributes
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import Axis, normalize_axes, normalize_axis, reduced_shape
from mlvm.core.types import Shape, TensorType, f32, f64, i64, u8
from mlvm.eager.autodiff.op_rules import (
    NON_DIFFERENTIABLE,
    Rules,
    Sparse,
    forward,
    in_its_place,
    linear,
    multilinear,
    symmetric,
)
from mlvm.eager.autodiff.rules_linalg import DECOMPOSITIONS, TRANSFORMS
from mlvm.eager.functions.arguments import span
from mlvm.eager.functions.convolution import transpose
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.functions.shapes import neighbours, part, reshape
from mlvm.eager.functions.special import i0
from mlvm.eager.functions.sums import cumulative_prod, finite_along, product
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.tensor import Tensor

# --- elementwise -----------------------------------------------------------------------


def _masked(g: Tensor, mask: Tensor) -> Tensor:
    """Return g where the mask holds, else 0."""
    return op.where(mask, g, constant(0, g.dtype))


def _wins(g: Tensor, wins: Tensor, ties: Tensor) -> Tensor:
    """Return the cotangent of one of two operands: all of g where it wins, half where they tie."""
    return op.where(ties, g * 0.5, _masked(g, wins))


def _one_at(mask: Tensor, x: Tensor) -> Tensor:
    """Return 1 where the mask holds, else x."""
    return op.where(mask, constant(1.0, x.dtype), x)


def _pow_x(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return y x^(y-1), and 0 for x = y = 0."""
    corner = op.logical_and(op.equal(x, 0.0), op.equal(y, 0.0))
    return g * y * _one_at(corner, x) ** (y - 1.0)


def _pow_y(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return x^y log(x), and 0 for x = 0.

    That is the gradient for y > 0; for y <= 0 it does not exist. The log has the dtype of the
    result: a real x < 0 has a logarithm if y is complex."""
    x = x if x.dtype is out.dtype else op.astype(x, dtype=out.dtype)
    return g * out * op.log(_one_at(op.equal(x, 0.0), x))


def _clip_x(g: Tensor, x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return _masked(g, op.logical_and(op.less_equal(lower, x), op.less_equal(x, upper)))


def _clip_lower(g: Tensor, x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return _masked(g, op.logical_and(op.less(x, lower), op.less_equal(lower, upper)))


def _clip_upper(g: Tensor, x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return _masked(g, op.logical_or(op.greater(x, upper), op.greater(lower, upper)))


def _ratio(y: Tensor, x: Tensor, sign: float) -> Tensor:
    """Return y / x, for y = j1(x) (sign -1) or i1(x) (sign 1).

    Below 1/2 it is computed by the series, because the derivatives of the series do not cancel."""
    near = op.less(op.abs(x), 0.5)
    square = op.where(near, x * x * (0.25 * sign), constant(0.0, x.dtype))
    series = square * 0.0
    for k in range(7, -1, -1):
        series = series * square + 0.5 / (math.factorial(k) * math.factorial(k + 1))
    return op.where(near, series, y / _one_at(near, x))


def _beta_slope(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the cotangent of a for B(a, b): g B (digamma(a) - digamma(a + b)).

    It is computed in f64, because the difference cancels and higher derivatives overflow in half
    precision. It is 0 if a + b is inf.
    """
    wide, other = op.astype(a, dtype=f64), op.astype(b, dtype=f64)
    total = wide + other
    change = _masked(op.digamma(wide) - op.digamma(total), op.not_equal(total, math.inf))
    return rounded(op.astype(g, dtype=f64) * (op.beta(wide, other) * change), g.dtype)


def _beta_rise(a: Tensor, b: Tensor, x: Tensor, by: str) -> Tensor:
    """Return the derivative of the logarithm of the beta density by a or b."""
    logarithm = op.log(x) - op.digamma(a) if by == "a" else op.log1p(-x) - op.digamma(b)
    return logarithm + op.digamma(a + b)


def _times(density: Tensor, factor: Tensor) -> Tensor:
    """Return density * factor, and 0 where the density is 0, for any factor."""
    zero = op.equal(density, 0.0)
    return _masked(density * _one_at(zero, factor), op.logical_not(zero))


def _lowered(density: Callable[[Tensor], Tensor], a: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return out * (a - 1) / x; where x is small and a >= 1, the density of a - 1.

    The quotient itself may overflow there."""
    near = op.logical_and(op.greater_equal(a, 1.0), op.less(x, 0.5))
    above = op.logical_and(near, op.greater(a, 1.0))
    less = _masked(density(op.where(above, a - 1.0, constant(1.0, a.dtype))), above)
    return op.where(near, less, _times(out, (a - 1.0) / _one_at(near, x)))


def _gamma_density_x(g: Tensor, a: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return g * (_lowered(lambda less: op.gamma_density(less, x), a, x, out) - out)


def _beta_density_x(g: Tensor, a: Tensor, b: Tensor, x: Tensor, out: Tensor) -> Tensor:
    factor = a + b - 1.0
    rise = _lowered(lambda less: _times(op.beta_density(less, b, x), factor), a, x, out)
    fall = _lowered(lambda less: _times(op.beta_density(a, less, x), factor), b, 1.0 - x, out)
    both = op.logical_and(op.isinf(rise), op.isinf(fall))  # at 0 or 1, where one term dominates
    return g * op.where(both, op.where(op.less(x, 0.5), rise, -fall), rise - fall)


def _difference(fn: Callable[[Tensor], Tensor], a: Tensor, scale: Tensor) -> Tensor:
    """Return the derivative of `fn` at a >= 0 by differences, in f64.

    The result has about ten correct digits. It is used for second derivatives with respect to a
    parameter, which have no closed form. Steps are relative to a. If a is far below the scale on
    which `fn` changes, those would cancel: steps are relative to the scale, from a upwards.
    """
    size = op.where(op.isinf(a), constant(1.0, a.dtype), a)  # `fn` is constant at infinity
    wide = op.astype(size, dtype=f64)
    is_low = op.less(wide, 0.01 * scale)
    h = stop_gradient(op.where(is_low, scale * 0.002, wide * 0.004))
    upwards = [constant(float(k), f64) for k in range(6)]
    central = [constant(k, f64) for k in (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0)]
    y = [fn(a + op.where(is_low, *ks) * h) for ks in zip(upwards, central, strict=True)]
    parts = [y[3] - y[2], y[4] - y[1], y[5] - y[0]]
    total = 45.0 * parts[0] - 9.0 * parts[1] + parts[2]
    weights = enumerate((300.0, -300.0, 200.0, -75.0, 12.0), 1)
    rise = reduce(add, [weight * (y[k] - y[0]) for k, weight in weights])
    return op.where(is_low, rise, total) / (60.0 * h)


def _scale(total: Tensor, logarithm: Tensor) -> Tensor:
    """Return the distance from 0 within which a slope by a parameter changes, in f64.

    The slope has poles at a distance of `total`, and factors x^a."""
    total = op.astype(total, dtype=f64)
    logarithms = op.minimum(op.log1p(total) + op.abs(logarithm), 1500.0)
    return op.minimum(total, 1.0) / (1.0 + logarithms)


def _shares(x: Tensor, out: Tensor, x_type: TensorType, axis: Axis) -> Tensor:
    """Return e^x / sum(e^x) along the axes, where `out` is log(sum(e^x)).

    A half-precision `out` is rounded too much for e^(x - out): by up to 0.25 above 512 in f16."""
    if not x.dtype.is_half or 0 in x_type.shape:
        return op.exp(x - _with_axes(out, x_type, axis))
    powers = op.exp(x - op.max(stop_gradient(x), axis=axis, keepdims=True))
    return powers / op.sum(powers, axis=axis, keepdims=True)


def _share(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return g e^x / (e^x + e^y); if both are infinite with the same sign, return g / 2."""
    same = op.logical_and(op.isinf(x), op.equal(x, y))
    return g * op.sigmoid(op.where(same, constant(0.0, g.dtype), x - y))


def _abs(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return g times the sign of x; for a complex x the sign is x / |x|, which is not constant."""
    if x.dtype.is_float:
        return g * op.sign(stop_gradient(x))
    zero = op.equal(out, 0.0)
    return _masked(g * (x / _one_at(zero, out)), op.logical_not(zero))


def _abs_forward(t: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return t times the sign of x; for a complex x the real part of t conj(x) / |x|."""
    return _abs(t, x, out) if x.dtype.is_float else op.real(_abs(op.conj(t), x, out))


def _atan2_by(g: Tensor, x: Tensor, y: Tensor, of: Tensor) -> Tensor:
    """Return g of / (x^2 + y^2), and 0 at the origin, where the angle is discontinuous."""
    x, y, of = _bounded(x), _bounded(y), _bounded(of)
    scale = op.maximum(op.abs(stop_gradient(x)), op.abs(stop_gradient(y)))
    origin = op.equal(scale, 0.0)
    scale = _one_at(origin, scale)
    # divided by `scale`, so that it neither overflows nor underflows
    squares = x * (x / scale) + y * (y / scale)
    return g * (of / scale) / op.where(origin, constant(math.inf, squares.dtype), squares)


def _infinite_at_0(x: Tensor) -> Tensor:
    """Return x with infinity for 0.

    The derivative there is infinite, and 0 times that is nan. A second derivative, which this rule
    cannot compute, is therefore nan instead of a wrong 0."""
    zero = op.equal(x, 0.0)
    return op.where(zero, op.reciprocal(op.where(zero, x, constant(1.0, x.dtype))), x)


def _bounded(x: Tensor) -> Tensor:
    """Return x with infinities replaced by the largest finite numbers.

    Use it for factors that are 0 at infinity, so that the product with x is also 0."""
    most = float(finfo(x.dtype).max)
    return op.clip(x, -most, most) if x.dtype.is_float else x


def _bounded_for_more(x: Tensor) -> Tensor:
    """Return `_bounded(x)` if this rule may be differentiated; the rule itself does not need it."""
    is_last = current().tape is None and current().recorder is None
    return x if is_last else _bounded(x)


def _imag(g: Tensor, x_type: TensorType) -> Tensor:
    return g * constant(1j if x_type.dtype.kind == "complex" else 0.0, x_type.dtype)


def _sqrt(g: Tensor, out: Tensor) -> Tensor:
    """Return g / (2 sqrt(x)), and 0 at x = 0, where the slope is infinite.

    The standard deviation of equal elements and the norm of zeros are not differentiable there;
    they get 0, which is a subgradient. The second derivatives are nan there."""
    if out.dtype.is_float:
        return g / (2.0 * _infinite_at_0(out))
    zero = op.equal(out, 0.0)
    return _masked(g / (2.0 * _one_at(zero, out)), op.logical_not(zero))


# --- reductions ------------------------------------------------------------------------


def _with_axes(y: Tensor, x_type: TensorType, axis: Axis) -> Tensor:
    """Return a reduction of x, with the reduced axes as axes of length 1."""
    return reshape(y, reduced_shape(x_type.shape, axis, True))


def _spread(g: Tensor, x_type: TensorType, axis: Axis) -> Tensor:
    """Return g repeated along the axes of x that were reduced."""
    return op.broadcast_to(_with_axes(g, x_type, axis), shape=x_type.shape)


def _count(x_type: TensorType, axis: Axis) -> int:
    """Return the number of elements of x per element of the result."""
    return math.prod(x_type.shape[i] for i in normalize_axes(axis, x_type.ndim))


def _over(g: Tensor, count: float) -> Tensor:
    """Return g / count, computed in f32 for half precision, in which a count may be infinite."""
    return rounded(widened(g) / count, g.dtype)


def _var(g: Tensor, x: Tensor, x_type: TensorType, axis: Axis, correction: float) -> Tensor:
    """Return g 2 (x - mean(x)) / (n - correction)."""
    x, g = widened(x), widened(g)
    deviation = x - op.mean(x, axis=axis, keepdims=True)
    return deviation * (
        _with_axes(g, x_type, axis) * 2.0 / max(_count(x_type, axis) - correction, 0.0)
    )


def _divided(g: Tensor, chosen: Tensor, axis: Axis) -> Tensor:
    """Distribute g equally to the elements that were selected along the axes."""
    wide = widened(g)
    weights = op.astype(chosen, dtype=wide.dtype)
    return weights * (wide / op.sum(weights, axis=axis, keepdims=True))


def _extreme(g: Tensor, x: Tensor, out: Tensor, x_type: TensorType, axis: Axis) -> Tensor:
    chosen = op.equal(x, _with_axes(out, x_type, axis))
    return _divided(_with_axes(g, x_type, axis), chosen, axis)


def _ones_like(out: Tensor) -> Tensor:
    return _ones(out.shape, out.type)


def _reduction(rule: Callable[..., Tensor]) -> Rules:
    """Return the row of a reduction.

    The tangent is the sum of t times the slopes, which are the rule applied to ones."""
    names = [*signature(rule).parameters][1:]

    def tangent(
        t: Tensor, x: Tensor, out: Tensor, x_type: TensorType, attributes: Attributes
    ) -> Tensor:
        arguments = {"x": x, "out": out, "x_type": x_type, **attributes}
        ones = widened(_ones_like(out))
        slopes = rule(ones, **{name: arguments[name] for name in names})
        options = {name: attributes[name] for name in ("axis", "keepdims")}
        return rounded(op.sum(widened(t) * slopes, **options), t.dtype)

    return forward({"x": rule}, x=tangent)


def _prod(g: Tensor, x: Tensor, x_type: TensorType, axis: Axis) -> Tensor:
    """Return the product of the other elements, without a division, so zeros are handled."""
    reduced = normalize_axes(axis, x.ndim)
    order = (*[i for i in range(x.ndim) if i not in reduced], *reduced)
    moved = op.permute_dims(x, axes=order)
    n = _count(x_type, axis)
    rows = reshape(moved, (math.prod(moved.shape[: x.ndim - len(reduced)]), n))
    before = cumulative_prod(rows, axis=1, exclusive=True)
    behind = op.flip(cumulative_prod(op.flip(rows, axis=1), axis=1, exclusive=True), axis=1)
    others = product(before, behind, finite_along(rows, 1))
    others = reshape(others, moved.shape)
    return _with_axes(g, x_type, axis) * op.permute_dims(others, axes=_inverse(order))


def _recurrence(a: Tensor, b: Tensor, axis: int, finite: Tensor | None) -> Tensor:
    """Return y along an axis, with y[0] = b[0] and y[i] = a[i - 1] y[i - 1] + b[i].

    It combines pairs of windows log2(n) times (Hillis and Steele, Data Parallel Algorithms, CACM
    29, 1986). An element is multiplied only by factors inside the window, because a factor outside
    the window may be infinite. `finite` is the argument of `product`."""
    n, step = b.shape[axis], 1
    while step < n:
        added = product(a, part(b, axis, span(n - step)), finite)
        b = op.pad(added, widths=tuple((step * (i == axis), 0) for i in range(b.ndim))) + b
        if 2 * step < n:  # double the number of factors in each product of a
            later, earlier = span(step, n - step), span(n - 2 * step)
            a = product(part(a, axis, later), part(a, axis, earlier), finite)
        step = 2 * step
    return b


def _cumulative_prod(g: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Return the cotangent of x for cumulative products, without a division, so zeros are handled.

    For element i it is the product of the elements before i, times the sum over k >= i of g[k]
    times the product of the elements from i + 1 to k.
    """
    along, g = normalize_axis(axis or 0, x.ndim), widened(g)
    x = rounded(x, g.dtype)
    finite = finite_along(x, along)
    after = op.flip(neighbours(x, along)[0], axis=along)
    sums = op.flip(_recurrence(after, op.flip(g, axis=along), along, finite), axis=along)
    return product(cumulative_prod(x, axis=along, exclusive=True), sums, finite)


def _cumulative_prod_forward(
    t: Tensor, x: Tensor, out: Tensor, axis: int | None, dtype: str | None
) -> Tensor:
    along, wide = normalize_axis(axis or 0, x.ndim), widened(out).dtype
    x, t = rounded(x, wide), rounded(t, wide)
    finite = finite_along(x, along)
    slopes = product(cumulative_prod(x, axis=along, exclusive=True), t, finite)
    return rounded(_recurrence(neighbours(x, along)[0], slopes, along, finite), out.dtype)


def _cumulative_sum(g: Tensor, axis: int | None) -> Tensor:
    """Return the cumulative sums from the opposite end."""
    axis = axis or 0
    return op.flip(op.cumulative_sum(op.flip(g, axis=axis), axis=axis), axis=axis)


# --- linalg ----------------------------------------------------------------------------


def _matmul_x(
    g: Tensor, y: Tensor, x_type: TensorType, transpose_x: bool, transpose_y: bool
) -> Tensor:
    """Return g y^T.

    If x was multiplied with a batch of y, the batch is summed."""
    if y.ndim == 1:
        y, g = reshape(y, (y.size, 1)), reshape(g, (*g.shape, 1))
    if x_type.ndim == 1:
        g = reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
    product = op.batch_contract if x_type.ndim <= 2 < g.ndim else op.matmul
    if transpose_x:
        return product(y, g, transpose_x=transpose_y, transpose_y=True)
    return product(g, y, transpose_x=False, transpose_y=not transpose_y)


def _matmul_y(
    g: Tensor, x: Tensor, y_type: TensorType, transpose_x: bool, transpose_y: bool
) -> Tensor:
    """Return x^T g.

    If y was multiplied with a batch of x, the batch is summed."""
    if y_type.ndim == 1:
        g = reshape(g, (*g.shape, 1))
    if x.ndim == 1:
        x, g = reshape(x, (1, x.size)), reshape(g, (*g.shape[:-1], 1, g.shape[-1]))
    product = op.batch_contract if y_type.ndim <= 2 < g.ndim else op.matmul
    if transpose_y:
        return product(g, x, transpose_x=True, transpose_y=transpose_x)
    result = product(x, g, transpose_x=not transpose_x, transpose_y=False)
    return reshape(result, result.shape[:-1]) if y_type.ndim == 1 else result


def _centered(x: Tensor, zero: Tensor) -> Tensor:
    wide = op.subtract(op.astype(x, dtype="i32"), op.astype(zero, dtype="i32"))
    return op.astype(wide, dtype="f32")


# --- lanes -----------------------------------------------------------------------------


def _sum_lanes(g: Tensor, axis_name: str, size: int) -> Tensor:
    return op.sum_lanes(g, axis_name=axis_name, size=size)


def _gather_lanes(g: Tensor, rank: Tensor, axis_name: str, size: int) -> Tensor:
    """Return this lane's row of the sum of all lanes' cotangents."""
    return op.take(_sum_lanes(g, axis_name, size), rank, axis=0)


# --- layout ----------------------------------------------------------------------------


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of the inverse of `permute_dims`."""
    places = normalize_axes(order, len(order))
    return tuple(places.index(i) for i in range(len(order)))


def _view(g: Tensor, x_type: TensorType) -> Tensor:
    """Return the cotangent viewed as x: the parts of complex numbers are floats.

    Any other reinterpretation of bits has no slope."""
    if g.dtype.real is x_type.dtype.real:
        return op.view(g, dtype=x_type.dtype)
    return full(x_type.shape, 0, dtype=x_type.dtype)


def _view_forward(t: Tensor, dtype: str) -> Tensor:
    viewed = op.view(t, dtype=dtype)
    return viewed if viewed.dtype.real is t.dtype.real else full(viewed.shape, 0, dtype=dtype)


def _roll(g: Tensor, shift: int | tuple[int, ...], axis: Axis) -> Tensor:
    back = -shift if isinstance(shift, int) else tuple(-by for by in shift)
    return op.roll(g, shift=back, axis=axis)


def _window(g: Tensor, start: Shape, length: Shape) -> Tensor:
    """Return a contiguous part of g."""
    return op.slice(g, start=start, length=length, step=(1,) * g.ndim)


def _part(g: Tensor, types: tuple[TensorType, ...], position: int, axis: int) -> Tensor:
    """Return the slice of the cotangent that belongs to an operand of a concatenation."""
    axis = normalize_axis(axis, g.ndim)
    start = [0] * g.ndim
    start[axis] = sum(type.shape[axis] for type in types[:position])
    return _window(g, tuple(start), types[position].shape)


def _slice(g: Tensor, x_type: TensorType, start: Shape, step: tuple[int, ...]) -> Sparse:
    return Sparse(
        x_type,
        (g,),
        partial(op.embed, shape=x_type.shape, start=start, step=step),
        partial(op.slice_add, start=start, step=step),
    )


def _sliced(g: Tensor, x_type: TensorType, start: Shape, step: tuple[int, ...]) -> Tensor:
    return op.slice(g, start=start, length=x_type.shape, step=step)


def _slice_set_x(g: Tensor, start: Shape, length: Shape, step: tuple[int, ...]) -> Tensor:
    """Return g, with zeros where the values were written."""
    return op.slice_set(g, constant(0.0, g.dtype), start=start, length=length, step=step)


def _take(g: Tensor, indices: Tensor, x_type: TensorType, axis: int) -> Sparse:
    return Sparse(
        x_type,
        (g, indices),
        partial(op.scatter_add, axis=axis, length=x_type.shape[axis]),
        partial(op.index_add, axis=axis),
    )


def _reduced_by(
    x: Tensor, updates: Tensor, indices: Tensor, out: Tensor, by: str
) -> tuple[Tensor, Tensor]:
    """Return the derivatives of `index_reduce` with respect to x and to the updates.

    For a product it is the product of the other elements. For an extremum it is 1 divided by the
    number of ties."""
    if by == "multiply":
        return _products_of_others(x, updates, indices)
    dtype = f32 if out.dtype.is_half else out.dtype
    stays = op.astype(op.equal(x, out), dtype=dtype)
    stay = op.astype(op.equal(updates, op.take(out, indices, axis=0)), dtype=dtype)
    share = 1.0 / (stays + op.scatter_add(stay, indices, axis=0, length=x.shape[0]))
    return stays * share, stay * op.take(share, indices, axis=0)


def _products_of_others(x: Tensor, updates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each element of x and each update the product of all other factors.

    The factors of an element are sorted by index; the result is the product of the factors before
    times the product of the factors after."""
    count, many = x.shape[0], indices.size
    every = op.arange(start=0, stop=count, step=1, dtype=i64)
    places = op.concat(every, op.take(every, reshape(indices, (many,)), axis=0), axis=0)
    order = op.argsort(places, axis=0, descending=False)
    elements = op.concat(x, reshape(updates, (many, *x.shape[1:])), axis=0)
    rows, places = op.take(elements, order, axis=0), op.take(places, order, axis=0)
    before = _products_at_places(rows, places, many)
    behind = _products_at_places(op.flip(rows, axis=0), op.flip(places, axis=0), many)
    back = op.argsort(order, axis=0, descending=False)
    others = op.take(before * op.flip(behind, axis=0), back, axis=0)
    first, last = (op.arange(start=a, stop=b, step=1, dtype=i64)
                   for a, b in ((0, count), (count, count + many)))  # fmt: skip
    return op.take(others, first, axis=0), reshape(op.take(others, last, axis=0), updates.shape)


def _products_at_places(rows: Tensor, places: Tensor, longest: int) -> Tensor:
    """Return the product of all earlier rows with the same index, in log2 steps.

    Hillis and Steele, Data Parallel Algorithms, CACM 29, 1986."""
    numbers = op.arange(start=0, stop=places.size, step=1, dtype=i64)

    def from_before(x: Tensor, distance: int) -> Tensor:
        near = op.equal(places, op.roll(places, shift=distance, axis=0))
        near = op.logical_and(near, op.greater_equal(numbers, distance))
        near = reshape(near, (places.size, *[1] * (x.ndim - 1)))
        return op.where(near, op.roll(x, shift=distance, axis=0), constant(1, x.dtype))

    products, step = from_before(rows, 1), 1
    while step < longest:
        products, step = products * from_before(products, step), 2 * step
    return products


def _sort(g: Tensor, x: Tensor, axis: int, descending: bool) -> Tensor:
    """Return each element's cotangent at the original position of the element."""
    order = op.argsort(x, axis=axis, descending=descending)
    return op.scatter_add_along_axis(g, order, axis=axis, length=x.shape[axis])


# --- indexing --------------------------------------------------------------------------


def _index_set_values(g: Tensor, indices: Tensor, axis: int, axes: int) -> Tensor:
    """Return g where the values were written, and 0 for values that were overwritten."""
    axis = normalize_axis(axis, max(g.ndim, 1))
    lengths = g.shape[axis : axis + axes]
    merged = reshape(g, (*g.shape[:axis], math.prod(lengths), *g.shape[axis + axes :]))
    numbers = reshape(op.arange(start=0, stop=indices.size, step=1, dtype=i64), indices.shape)
    places = op.zeros(shape=(math.prod(lengths),), dtype=i64)
    stays = op.take(op.index_set(places, numbers, indices, axis=0), indices, axis=0)
    stays = op.equal(stays, numbers)
    stays = reshape(stays, (*stays.shape, *[1] * (g.ndim - axis - axes)))
    return _masked(op.take(merged, indices, axis=axis), stays)


def _along(mask: Tensor, ndim: int) -> Tensor:
    """Return the mask of leading axes with `ndim` axes, to broadcast along the remaining axes."""
    return reshape(mask, (*mask.shape, *[1] * (ndim - mask.ndim)))


def _mask_set_values(g: Tensor, mask: Tensor, values_type: TensorType) -> Tensor:
    """Return g where the mask holds, in order: a stable sort moves these positions to the front."""
    behind = g.shape[mask.ndim :]
    others = op.astype(op.logical_not(reshape(mask, (mask.size,))), dtype=u8)
    [count, *_] = values_type.shape
    places = op.slice(op.argsort(others), start=(0,), length=(count,), step=(1,))
    return op.take(reshape(g, (mask.size, *behind)), places, axis=0)


def _rows(start: Tensor, count: int) -> Tensor:
    """Return `count` row indices, beginning at `start`."""
    return op.astype(start, dtype="i64") + op.arange(start=0, stop=count, step=1, dtype="i64")


# --- neural ----------------------------------------------------------------------------

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def _gelu_second(x: Tensor, approximate: bool) -> Tensor:
    """Return the second derivative of x Phi(x): 2 Phi' + x Phi''.

    Both terms vanish beyond 30, where powers of x exceed f16."""
    x = op.clip(widened(x), -30.0, 30.0)
    if not approximate:
        return op.exp(op.square(x) * -0.5) * (2.0 - op.square(x)) / math.sqrt(2 * math.pi)
    u = (x + 0.044715 * x * op.square(x)) * _SQRT_2_OVER_PI  # Phi = (1 + tanh(u)) / 2
    du = (1.0 + 3 * 0.044715 * op.square(x)) * _SQRT_2_OVER_PI
    ddu = 6 * 0.044715 * _SQRT_2_OVER_PI * x
    t = op.tanh(u)
    return (1.0 - op.square(t)) * (du + x * (0.5 * ddu - t * op.square(du)))


def _softmax(g: Tensor, out: Tensor, axis: int) -> Tensor:
    """Return out (g - sum(g out)), for out = softmax(x)."""
    return out * (g - op.sum(g * out, axis=axis, keepdims=True))


def _log_softmax(g: Tensor, out: Tensor, axis: int) -> Tensor:
    """Return g - softmax(x) sum(g), for out = log_softmax(x)."""
    g, out = widened(g), widened(out)  # a sum in half precision may be infinite
    return g - op.exp(out) * op.sum(g, axis=axis, keepdims=True)


def _cross_entropy_vjp_g(c: Tensor, logits: Tensor, labels: Tensor, g_type: TensorType) -> Tensor:
    """Return sum(c (softmax(logits) - one_hot(labels))) along the classes."""
    error = op.softmax_cross_entropy_vjp(_ones(g_type.shape, g_type), logits, labels)
    return op.sum(c * error, axis=-1)


def _cross_entropy_vjp_logits(c: Tensor, g: Tensor, logits: Tensor) -> Tensor:
    """Return the cotangent of the logits from the cotangent c g[..., None] of softmax(logits)."""
    return _softmax(c * reshape(g, (*g.shape, 1)), op.softmax(logits), -1)


def _ones(shape: Shape, like: TensorType) -> Tensor:
    return full(shape, 1.0, dtype=like.dtype)


def _normalize(h: Tensor, x: Tensor, eps: float) -> Tensor:
    """Return J h, with J the Jacobian of `layer_norm_normalize` at x; it is symmetric."""
    return op.layer_norm_vjp(h, x, _ones(x.shape[-1:], x.type), eps=eps)


def _layer_norm_vjp_x(c: Tensor, g: Tensor, x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the gradient of the inner product of c and J h with respect to x.

    Here h = g scale, n = x normalised, and r = 1 / sqrt(var + eps). J h = r (h - mean(h) - n mean(h
    n)) depends on x through n, which has the Jacobian J, and through r. The gradient of r is -r^2 n
    / K for rows of length K.
    """

    def mean(y: Tensor) -> Tensor:
        return op.mean(y, axis=-1, keepdims=True)

    h = g * scale
    n = op.layer_norm_normalize(x, eps=eps)
    r = op.rsqrt(op.var(x, axis=-1, keepdims=True) + eps)
    c_n, h_n = mean(c * n), mean(h * n)
    through_n = _normalize((h_n * c + c_n * h) * -r, x, eps)
    return through_n - op.square(r) * n * (mean(c * h) - mean(c) * mean(h) - c_n * h_n)


def _image_rows(indices: Tensor, length: int) -> Tensor:
    """Return indices into the concatenated rows of all images."""
    first = op.arange(start=0, stop=indices.shape[0], step=1, dtype=i64) * length
    return op.astype(indices, dtype=i64) + reshape(first, (indices.shape[0], 1, 1))


def _weighted_take_x(g: Tensor, indices: Tensor, weights: Tensor, x_type: TensorType) -> Tensor:
    (n, length, channels), (many, count, taps) = x_type.shape, indices.shape
    parts = reshape(g, (n, count, 1, channels)) * reshape(weights, (many, count, taps, 1))
    if many == 1:
        merged = reshape(parts, (n, count * taps, channels))
        return op.scatter_add(merged, reshape(indices, (count * taps,)), axis=1, length=length)
    rows = reshape(_image_rows(indices, length), (n * count * taps,))
    merged = reshape(parts, (n * count * taps, channels))
    return reshape(op.scatter_add(merged, rows, axis=0, length=n * length), x_type.shape)


def _weighted_take_weights(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    (n, length, channels), (many, count, taps) = x.shape, indices.shape
    if many == 1:
        chosen = op.take(x, reshape(indices, (count, taps)), axis=1)
    else:
        flat = reshape(x, (n * length, channels))
        chosen = op.take(flat, _image_rows(indices, length), axis=0)
    each = op.sum(chosen * reshape(g, (n, count, 1, channels)), axis=3)
    return op.sum(each, axis=0, keepdims=True) if many == 1 else each


def _conv2d_kernel(g: Tensor, x: Tensor, kernel_type: TensorType, attributes: Attributes) -> Tensor:
    return op.conv2d_kernel_vjp(g, x, window=kernel_type.shape[:-2], **attributes)


def _conv_transpose2d_x(g: Tensor, kernel: Tensor, attributes: Attributes) -> Tensor:
    return op.conv2d(g, kernel, **_without("shape", attributes))


def _conv_transpose2d_kernel(
    g: Tensor, x: Tensor, kernel_type: TensorType, attributes: Attributes
) -> Tensor:
    return _conv2d_kernel(x, g, kernel_type, _without("shape", attributes))


def _without(name: str, attributes: Attributes) -> Attributes:
    return {key: value for key, value in attributes.items() if key != name}


def _beside_patches(x: Tensor) -> Tensor:
    """Reshape [N,OH,OW,C] to [N,OH,OW,1,1,C]."""
    return reshape(x, (*x.shape[:3], 1, 1, x.shape[3]))


def _max_pool2d_forward(t: Tensor, x: Tensor, out: Tensor, attributes: Attributes) -> Tensor:
    windows = op.patches(x, pad_value=-math.inf, **attributes)
    chosen = op.equal(windows, _beside_patches(out))
    is_padded = any(map(any, attributes["padding"]))
    if is_padded:
        inside = op.greater(op.patches(_ones(x.shape, x.type), **attributes), 0.0)
        chosen = op.logical_and(chosen, inside)
    parts = _divided(_beside_patches(_ones_like(out)), chosen, (3, 4))
    result = rounded(op.sum(parts * op.patches(t, **attributes), axis=(3, 4)), t.dtype)
    return _masked(result, op.any(inside, axis=(3, 4))) if is_padded else result


def _avg_pool2d(g: Tensor, x_type: TensorType, window: Pair, attributes: Attributes) -> Tensor:
    shape = (*g.shape[:3], *window, g.shape[3])
    windows = op.broadcast_to(_beside_patches(_over(g, math.prod(window))), shape=shape)
    return op.unpatches(windows, shape=x_type.shape, **_without("window", attributes))


# --- the table -------------------------------------------------------------------------


def _none(names: str) -> dict[str, Rules]:
    """Return entries for ops that are not differentiable."""
    return dict.fromkeys(names.split(), NON_DIFFERENTIABLE)


VJPS: Final[dict[str, Rules]] = {
    # --- elementwise ---
    "add": {"x": lambda g: g, "y": lambda g: g},
    "subtract": linear(x=lambda g: g, y=lambda g: -g),
    "multiply": {"x": lambda g, y: g * y, "y": lambda g, x: g * x},
    "multiply_add": {"x": lambda g, y: g * y, "y": lambda g, x: g * x, "z": lambda g: g},
    "divide": {"x": lambda g, y: g / y, "y": lambda g, y, out: -g * out / y},
    "reciprocal": {"x": lambda g, out: -g * op.square(out)},
    "remainder": {
        "x": lambda g: g,
        "y": lambda g, x, y: -g * op.floor_divide(stop_gradient(x), stop_gradient(y)),
    },
    "pow": {"x": _pow_x, "y": _pow_y},
    "maximum": {
        "x": lambda g, x, y: _wins(g, op.greater(x, y), op.equal(x, y)),
        "y": lambda g, x, y: _wins(g, op.less(x, y), op.equal(x, y)),
    },
    "minimum": {
        "x": lambda g, x, y: _wins(g, op.less(x, y), op.equal(x, y)),
        "y": lambda g, x, y: _wins(g, op.greater(x, y), op.equal(x, y)),
    },
    "clip": {"x": _clip_x, "lower": _clip_lower, "upper": _clip_upper},
    "negative": {"x": lambda g: -g},
    "abs": forward({"x": _abs}, x=_abs_forward),
    "real": linear(x=lambda g: g),
    "imag": linear(x=_imag),
    "conj": linear(x=lambda g: op.conj(g)),
    "copysign": {"x": lambda g, x, out: g * op.copysign(1.0, stop_gradient(x * out))},
    "square": {"x": lambda g, x: g * x * 2.0},  # 2 x may overflow
    "exp": {"x": lambda g, out: g * out},
    "expm1": {"x": lambda g, x: g * op.exp(x)},
    "log": {"x": lambda g, x: g / x},
    "log1p": {"x": lambda g, x: g / (x + 1.0)},
    "logaddexp": {"x": _share, "y": lambda g, x, y: _share(g, y, x)},
    "log2": {"x": lambda g, x: g / (x * math.log(2))},
    "log10": {"x": lambda g, x: g / (x * math.log(10))},
    "sqrt": {"x": _sqrt},
    "rsqrt": {"x": lambda g, x, out: g * out / (-2.0 * x)},
    "sin": {"x": lambda g, x: g * op.cos(x)},
    "cos": {"x": lambda g, x: -g * op.sin(x)},
    "tan": {"x": lambda g, out: g * (1.0 + op.square(out))},
    "asin": {"x": lambda g, x: g * op.rsqrt(1.0 - op.square(x))},
    "acos": {"x": lambda g, x: -g * op.rsqrt(1.0 - op.square(x))},
    "atan": {"x": lambda g, x: g / (1.0 + op.square(_bounded_for_more(x)))},
    "atan2": {
        "x": lambda g, x, y: _atan2_by(g, x, y, y),
        "y": lambda g, x, y: _atan2_by(-g, x, y, x),
    },
    "hypot": {
        "x": lambda g, x, out: g * (_bounded(x) / _infinite_at_0(_bounded(out))),
        "y": lambda g, y, out: g * (_bounded(y) / _infinite_at_0(_bounded(out))),
    },
    "sinh": {"x": lambda g, x: g * op.cosh(x)},
    "cosh": {"x": lambda g, x: g * op.sinh(x)},
    "tanh": {"x": lambda g, out: g * (1.0 - op.square(out))},
    "asinh": {"x": lambda g, x: g * op.rsqrt(op.square(_bounded_for_more(x)) + 1.0)},
    "acosh": {"x": lambda g, x: g * op.rsqrt(x - 1.0) * op.rsqrt(x + 1.0)},
    "atanh": {"x": lambda g, x: g / (1.0 - op.square(_bounded_for_more(x)))},
    "sigmoid": {"x": lambda g, out: g * (out * (1.0 - out))},
    "erf": {
        "x": lambda g, x: g * op.exp(-op.square(_bounded_for_more(x))) * (2 / math.sqrt(math.pi))
    },
    "where": linear(
        x=lambda g, condition: _masked(g, condition),
        y=lambda g, condition: _masked(g, op.logical_not(condition)),
    ),
    **_none(
        "floor_divide sign floor ceil round trunc nextafter signbit "
        "equal not_equal less less_equal greater greater_equal "
        "isnan isinf isfinite "
        "logical_and logical_or logical_xor logical_not "
        "bitwise_and bitwise_or bitwise_xor bitwise_invert "
        "bitwise_left_shift bitwise_right_shift"
    ),
    # --- special ---
    "erfc": {
        "x": lambda g, x: g * op.exp(-op.square(_bounded_for_more(x))) * (-2 / math.sqrt(math.pi))
    },
    "erfinv": {"x": lambda g, out: g * op.exp(op.square(out)) * (math.sqrt(math.pi) / 2)},
    "erfcinv": {"x": lambda g, out: g * op.exp(op.square(out)) * (-math.sqrt(math.pi) / 2)},
    "lgamma": {"x": lambda g, x: g * op.digamma(x)},
    "digamma": {"x": lambda g, x: g * op.polygamma(x, n=1)},
    "polygamma": symmetric(x=lambda g, x, n: g * op.polygamma(x, n=n + 1)),
    # --- bessel ---
    "j0": {"x": lambda g, x: -g * op.j1(x)},
    "j1": {"x": lambda g, x, out: g * (op.j0(x) - _ratio(out, x, -1.0))},
    "y0": {"x": lambda g, x: -g * op.y1(x)},
    "y1": {"x": lambda g, x, out: g * op.where(op.equal(x, 0.0), -out, op.y0(x) - out / x)},
    "i1": {"x": lambda g, x, out: g * (i0(x) - _ratio(out, x, 1.0))},
    # --- incomplete ---
    "beta": {
        "x": lambda g, x, y: _beta_slope(g, x, y),
        "y": lambda g, x, y: _beta_slope(g, y, x),
    },
    "gammainc": {
        "a": lambda g, a, x: g * op.gammainc_slope(a, x),
        "x": lambda g, a, x: g * op.gamma_density(a, x),
    },
    "gammaincc": {
        "a": lambda g, a, x: -g * op.gammainc_slope(a, x),
        "x": lambda g, a, x: -g * op.gamma_density(a, x),
    },
    "gamma_density": {
        "a": lambda g, a, x, out: g * _times(out, op.log(x) - op.digamma(a)),
        "x": _gamma_density_x,
    },
    "gammainc_slope": {
        "a": lambda g, a, x: _masked(
            g
            * _difference(
                lambda a: op.gammainc_slope(a, x), a, _scale(constant(1.0, x.dtype), op.log(x))
            ),
            op.not_equal(a, math.inf),
        ),
        "x": lambda g, a, x: g * _times(op.gamma_density(a, x), op.log(x) - op.digamma(a)),
    },
    "betainc": {
        "a": lambda g, a, b, x: g * op.betainc_slope(a, b, x, by="a"),
        "b": lambda g, a, b, x: g * op.betainc_slope(a, b, x, by="b"),
        "x": lambda g, a, b, x: g * op.beta_density(a, b, x),
    },
    "beta_density": {
        "a": lambda g, a, b, x, out: g * _times(out, _beta_rise(a, b, x, "a")),
        "b": lambda g, a, b, x, out: g * _times(out, _beta_rise(a, b, x, "b")),
        "x": _beta_density_x,
    },
    "betainc_slope": symmetric(
        a=lambda g, a, b, x, by: (
            g * _difference(lambda a: op.betainc_slope(a, b, x, by=by), a, _scale(a + b, op.log(x)))
        ),
        b=lambda g, a, b, x, by: (
            g
            * _difference(
                lambda b: op.betainc_slope(a, b, x, by=by), b, _scale(a + b, op.log1p(-x))
            )
        ),
        x=lambda g, a, b, x, by: g * _times(op.beta_density(a, b, x), _beta_rise(a, b, x, by)),
    ),
    # --- reduction ---
    "sum": linear(x=lambda g, x_type, axis: _spread(g, x_type, axis)),
    "mean": linear(x=lambda g, x_type, axis: _spread(_over(g, _count(x_type, axis)), x_type, axis)),
    "prod": _reduction(_prod),
    "var": _reduction(_var),
    "cumulative_sum": linear(x=_cumulative_sum),
    "cumulative_prod": forward({"x": _cumulative_prod}, x=_cumulative_prod_forward),
    "logsumexp": forward(
        {
            "x": lambda g, x, out, x_type, axis: (
                _with_axes(g, x_type, axis) * _shares(x, out, x_type, axis)
            )
        },
        x=lambda t, x, out, x_type, axis, keepdims: op.sum(
            t * _shares(x, out, x_type, axis), axis=axis, keepdims=keepdims
        ),
    ),
    **dict.fromkeys(("max", "min"), _reduction(_extreme)),
    **_none("argmax argmin all any"),
    # --- linalg ---
    "matmul": multilinear(x=_matmul_x, y=_matmul_y),
    "batch_contract": multilinear(x=_matmul_x, y=_matmul_y),
    # --- quantized ---
    "quantized_matmul": multilinear(x=lambda g, y, scale: op.matmul(g, op.dequantize(y, scale))),
    "dequantize_linear": {"scale": lambda g, x, zero: g * _centered(x, zero)},
    **_none("pack unpack dequantize dequantize_rows quantize_linear integer_matmul integer_conv2d"),
    # --- packed ---
    **_none("pack_panels packed_matmul packed_conv2d add_conv2d_kernel_vjp"),
    # --- decompositions ---
    **DECOMPOSITIONS,
    # --- fft ---
    **TRANSFORMS,
    # --- lanes ---
    "sum_lanes": linear(x=_sum_lanes),
    "gather_lanes": linear(x=_gather_lanes),
    # --- layout ---
    "reshape": linear(x=lambda g, x_type: reshape(g, x_type.shape)),
    "view": forward({"x": _view}, x=_view_forward),
    "permute_dims": linear(x=lambda g, axes: op.permute_dims(g, axes=_inverse(axes))),
    "broadcast_to": {"x": lambda g: g},
    "concat": linear(xs=_part),
    "flip": linear(x=lambda g, axis: op.flip(g, axis=axis)),
    "roll": linear(x=_roll),
    "pad": forward(
        {
            "x": lambda g, x_type, widths: _window(
                g, tuple(before for before, _ in widths), x_type.shape
            )
        },
        x=lambda t, widths: op.pad(t, widths=widths),
    ),
    "slice": linear(x=_slice),
    "embed": linear(x=_sliced),
    "slice_add": linear(
        x=lambda g: g,
        updates=lambda g, updates_type, start, step: _sliced(g, updates_type, start, step),
    ),
    "slice_set": linear(
        x=_slice_set_x,
        values=lambda g, start, length, step: op.slice(g, start=start, length=length, step=step),
    ),
    "tril": linear(x=lambda g, k: op.tril(g, k=k)),
    "triu": linear(x=lambda g, k: op.triu(g, k=k)),
    "sort": forward(
        {"x": _sort},
        x=lambda t, x, axis, descending: op.take_along_axis(
            t, op.argsort(x, axis=axis, descending=descending), axis=axis
        ),
    ),
    "astype": {"x": lambda g: g},
    "copy": {"x": lambda g: g},
    **_none("argsort top_indices searchsorted"),
    # --- creation ---
    "full": linear(value=lambda g: g),
    **_none("zeros arange linspace eye"),
    # --- indexing ---
    "take": linear(x=_take),
    "weighted_take": multilinear(x=_weighted_take_x, weights=_weighted_take_weights),
    "scatter_add": linear(updates=lambda g, indices, axis: op.take(g, indices, axis=axis)),
    "index_add": linear(
        x=lambda g: g, updates=lambda g, indices, axis: op.take(g, indices, axis=axis)
    ),
    "index_reduce": forward(
        {
            "x": lambda g, x, updates, indices, out, by: (
                g * _reduced_by(x, updates, indices, out, by)[0]
            ),
            "updates": lambda g, x, updates, indices, out, by: (
                op.take(g, indices, axis=0) * _reduced_by(x, updates, indices, out, by)[1]
            ),
        },
        x=lambda t, x, updates, indices, out, by: t * _reduced_by(x, updates, indices, out, by)[0],
        updates=lambda t, x, updates, indices, out, by: op.scatter_add(
            t * _reduced_by(x, updates, indices, out, by)[1], indices, axis=0, length=x.shape[0]
        ),
    ),
    "index_set": linear(
        x=lambda g, indices, axis, axes: op.index_set(
            g, constant(0.0, g.dtype), indices, axis=axis, axes=axes
        ),
        values=_index_set_values,
    ),
    "take_along_axis": linear(
        x=lambda g, indices, x_type, axis: op.scatter_add_along_axis(
            g, indices, axis=axis, length=x_type.shape[axis]
        )
    ),
    "dynamic_update": linear(
        x=lambda g, start, update_type, axis: op.dynamic_update(
            g, full(update_type.shape, 0.0, dtype=update_type.dtype), start, axis=axis
        ),
        update=lambda g, start, update_type, axis: op.take(
            g, _rows(start, update_type.shape[axis]), axis=axis
        ),
    ),
    "scatter_add_along_axis": linear(
        updates=lambda g, indices, axis: op.take_along_axis(g, indices, axis=axis)
    ),
    "boolean_index": linear(x=lambda g, mask, x_type: op.mask_scatter(g, mask, shape=x_type.shape)),
    "mask_scatter": linear(updates=lambda g, mask: op.boolean_index(g, mask)),
    "mask_set": linear(
        x=lambda g, mask: op.where(_along(mask, g.ndim), constant(0.0, g.dtype), g),
        values=_mask_set_values,
    ),
    **_none("one_hot nonzero_indices flat_indices"),
    # --- neural ---
    "relu": {"x": lambda g, out: _masked(g, op.greater(out, 0.0))},
    "gelu": symmetric(x=lambda g, x, approximate: g * op.gelu_slope(x, approximate=approximate)),
    "gelu_slope": symmetric(x=lambda c, x, approximate: c * _gelu_second(x, approximate)),
    "dropout": linear(x=lambda g, key, rate: op.dropout(g, key, rate=rate)),
    "softmax": symmetric(x=_softmax),
    "log_softmax": forward(
        {"x": _log_softmax},
        x=lambda t, out, axis: (
            t
            - rounded(op.sum(op.exp(widened(out)) * widened(t), axis=axis, keepdims=True), t.dtype)
        ),
    ),
    "softmax_cross_entropy": forward(
        {"logits": lambda g, logits, labels: op.softmax_cross_entropy_vjp(g, logits, labels)},
        logits=lambda t, logits, labels, out: op.sum(
            t * op.softmax_cross_entropy_vjp(_ones_like(out), logits, labels), axis=-1
        ),
    ),
    "softmax_cross_entropy_vjp": forward(
        {"g": _cross_entropy_vjp_g, "logits": _cross_entropy_vjp_logits},
        g=in_its_place,
        logits=lambda t, g, logits: _softmax(t, op.softmax(logits), -1) * reshape(g, (*g.shape, 1)),
    ),
    "layer_norm": forward(
        {
            "x": lambda g, x, scale, eps: op.layer_norm_vjp(g, x, scale, eps=eps),
            "scale": lambda g, x, eps: op.layer_norm_scale_vjp(g, x, eps=eps),
            "bias": lambda g: g,
        },
        x=lambda t, x, scale, eps: _normalize(t, x, eps) * scale,
        scale=lambda t, x, eps: op.layer_norm_normalize(x, eps=eps) * t,
        bias=lambda t: t,
    ),
    "layer_norm_normalize": symmetric(x=_normalize),
    "layer_norm_vjp": forward(
        {
            "g": lambda c, x, scale, eps: _normalize(c, x, eps) * scale,
            "x": _layer_norm_vjp_x,
            "scale": lambda c, g, x, eps: _normalize(c, x, eps) * g,
        },
        g=in_its_place,
        x=_layer_norm_vjp_x,
        scale=in_its_place,
    ),
    "layer_norm_scale_vjp": forward(
        {
            "g": lambda c, x, eps: c * op.layer_norm_normalize(x, eps=eps),
            "x": lambda c, g, x, eps: _normalize(c * g, x, eps),
        },
        g=in_its_place,
        x=lambda t, g, x, eps: op.sum(g * _normalize(t, x, eps), axis=tuple(range(x.ndim - 1))),
    ),
    # --- recurrent: `mlvm.eager.nn.rnn` differentiates the first by the second ---
    **_none("recurrence recurrence_vjp"),
    # --- windows ---
    "patches": forward(
        {
            "x": lambda g, x_type, stride, padding, dilation: op.unpatches(
                g, shape=x_type.shape, stride=stride, padding=padding, dilation=dilation
            )
        },
        x=lambda t, attributes: op.patches(t, **{**attributes, "pad_value": 0.0}),
    ),
    "unpatches": linear(
        x=lambda g, x_type, attributes: op.patches(
            g, window=x_type.shape[3:5], **_without("shape", attributes)
        )
    ),
    "conv2d": multilinear(
        x=lambda g, kernel, x_type, attributes: transpose(g, kernel, x_type.shape, **attributes),
        kernel=_conv2d_kernel,
    ),
    "conv_transpose2d": multilinear(x=_conv_transpose2d_x, kernel=_conv_transpose2d_kernel),
    "conv2d_kernel_vjp": multilinear(
        g=lambda c, x, attributes: op.conv2d(x, c, **_without("window", attributes)),
        x=lambda c, g, x_type, attributes: transpose(
            g, c, x_type.shape, **_without("window", attributes)
        ),
    ),
    "max_pool2d": forward(
        {"x": lambda g, x, attributes: op.max_pool2d_vjp(g, stop_gradient(x), **attributes)},
        x=_max_pool2d_forward,
    ),
    "max_pool2d_vjp": linear(
        g=lambda c, x, attributes: _max_pool2d_forward(
            c, x, op.max_pool2d(stop_gradient(x), **attributes), attributes
        )
    ),
    "avg_pool2d": linear(x=_avg_pool2d),
    # --- random ---
    **_none("split_key fold_in normal uniform bernoulli randint permutation"),
    **_none("gamma poisson binomial multinomial"),
}
