"""The batching rules: how each op is run for many lanes at once, beside its gradient.

A tensor with lanes has them along axis 0: `x[i]` is the value of lane i. A tensor that is the same
in all lanes has no such axis. `BATCHING` has a rule for each op that has operands and is not
elementwise: those broadcast, once the axes behind the lanes are aligned. A rule is given the call,
the number of lanes and the operands, of which one at least has lanes, and makes a tensor with
lanes. Most are one of a few kinds:

    _rows       the same op again, with other attributes, as `ml.batch` runs it (`mlvm.step.rows`)
    _flattened  so, or along all axes as one
    _images     lanes and images are one axis

So one call serves all lanes. What a lane does not change is read once: `_product` makes one product
of many rows of it. Where indices have lanes, lanes and the axis that they count along become one.

Rules are eager code, as gradient rules are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.rules import normalize_axis
from mlvm.core.types import Shape, i64
from mlvm.eager.functions.creation import full, zeros
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import broadcast_to, moveaxis, permute_dims, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor
from mlvm.step.rows import over_lanes


class Lanes(NamedTuple):
    """The values of all lanes: x[i] in lane i, or the same x in each."""

    x: Tensor
    batched: bool

    @property
    def ndim(self) -> int:
        """The number of axes in one lane."""
        return self.x.ndim - self.batched

    @property
    def shape(self) -> Shape:
        """The shape in one lane."""
        return self.x.shape[self.batched :]


Rule: TypeAlias = Callable[..., Tensor]

# --- operands ------------------------------------------------------------------------


def whole(v: Lanes, n: int) -> Tensor:
    """The values with an axis of lanes, also where they are the same in each."""
    return v.x if v.batched else broadcast_to(v.x, (n, *v.x.shape))


def aligned(v: Lanes, ndim: int) -> Tensor:
    """The values, which broadcast as they do in a lane of so many axes."""
    x = v.x
    missing = ndim + 1 - x.ndim
    return reshape(x, (x.shape[0], *[1] * missing, *x.shape[1:])) if v.batched and missing else x


def _called(call: OneOp, xs: Sequence[Tensor], **others: Any) -> Tensor:
    """The op with these attributes in place of its own."""
    return apply(one_op(call.op.name, **{**call.attributes, **others}), *xs)


def _moved(x: Tensor, start: int, count: int, to: int) -> Tensor:
    """x with so many axes, from `start` on, as the axes from `to` on."""
    axes = [*range(x.ndim)]
    block = axes[start : start + count]
    del axes[start : start + count]
    return permute_dims(x, (*axes[:to], *block, *axes[to:]))


def _joined(x: Tensor) -> Tensor:
    """The first two axes as one."""
    return reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _parted(x: Tensor, n: int) -> Tensor:
    """The first axis as n, and what is left of it."""
    rows = x.shape[0] // n if n else 0
    return reshape(x, (n, rows, *x.shape[1:]))


def _swapped(x: Tensor) -> Tensor:
    return moveaxis(x, -1, -2)


# --- kinds ---------------------------------------------------------------------------


def elementwise(call: OneOp, n: int, *xs: Lanes) -> Tensor:
    """The same op, as operands broadcast in a lane."""
    ndim = max([v.ndim for v in xs])
    return apply(call, *[aligned(v, ndim) for v in xs])


def _rows(call: OneOp, n: int, *xs: Lanes) -> Tensor:
    """One call of the same op, as `mlvm.step.rows` has it for these operands, or for operands that
    all have lanes."""
    types = [v.x.type.with_shape(v.shape) for v in xs]
    which = [v.batched for v in xs]
    made = over_lanes(call.op, call.attributes, types, which, n)
    if made is None:
        which = [True] * len(xs)
        made = over_lanes(call.op, call.attributes, types, which, n)
        assert made is not None  # the table is for ops that have such a rule
    name, attributes, seen = made
    given = [whole(v, n) if many else v.x for v, many in zip(xs, which, strict=True)]
    operands = [
        x if x.shape == type.shape else reshape(x, type.shape)
        for x, type in zip(given, seen, strict=True)
    ]
    return apply(one_op(name, **attributes), *operands)


def _flattened(call: OneOp, n: int, x: Lanes) -> Tensor:
    """`_along`, where no axis stands for all of them in row-major order."""
    if call.attributes["axis"] is not None:
        return _rows(call, n, x)
    rows = reshape(x.x, (n, math.prod(x.shape)))
    made = _called(call, [rows], axis=1)
    if made.shape == rows.shape:
        return reshape(made, x.x.shape)
    keepdims = call.attributes.get("keepdims", False)
    return reshape(made, (n, *[1] * x.ndim)) if keepdims else made


def _images(call: OneOp, n: int, x: Lanes) -> Tensor:
    others = {}
    if "shape" in call.attributes:
        count, *image = call.attributes["shape"]
        others["shape"] = (n * count, *image)
    return _parted(_called(call, [_joined(x.x)], **others), n)


def _images_of_two(call: OneOp, n: int, x: Lanes, y: Lanes) -> Tensor:
    return _parted(apply(call, _joined(whole(x, n)), _joined(whole(y, n))), n)


# --- products ------------------------------------------------------------------------


def _matmul(call: OneOp, n: int, x: Lanes, y: Lanes) -> Tensor:
    transposed_x, transposed_y = call.attributes["transpose_x"], call.attributes["transpose_y"]
    return _product(n, x, y, transposed_x, transposed_y)


def _product(n: int, x: Lanes, y: Lanes, transpose_x: bool, transpose_y: bool) -> Tensor:
    """x @ y. What all lanes share is multiplied once, by the rows or columns of all."""
    if not y.batched and y.ndim <= 2:
        rows = _swapped(x.x) if transpose_x else x.x
        return op.matmul(rows, y.x, transpose_y=transpose_y)
    if not x.batched and x.ndim <= 2 and y.ndim == 1:
        return op.matmul(y.x, x.x, transpose_y=x.ndim == 2 and not transpose_x)
    if not x.batched and x.ndim == y.ndim == 2:  # (y^T x^T)^T
        columns = y.x if transpose_y else _swapped(y.x)
        return _swapped(op.matmul(columns, x.x, transpose_y=not transpose_x))
    row, column = x.ndim == 1, y.ndim == 1
    if row:
        x = Lanes(reshape(x.x, (*x.x.shape[:-1], 1, x.x.shape[-1])), x.batched)
    if column:
        y = Lanes(reshape(y.x, (*y.x.shape, 1)), y.batched)
    ndim = max(x.ndim, y.ndim)
    made = op.matmul(
        aligned(x, ndim), aligned(y, ndim), transpose_x=transpose_x, transpose_y=transpose_y
    )
    shape = [*made.shape]
    if column:
        del shape[-1]
    if row:
        del shape[-1 if column else -2]
    return reshape(made, shape)


def _batch_contract(call: OneOp, n: int, x: Lanes, y: Lanes) -> Tensor:
    """The batch and the inner axis are contracted together: one product a lane."""

    def inner_first(v: Lanes, is_last: bool) -> Lanes:
        rows = _swapped(v.x) if is_last else v.x
        lanes = v.x.shape[: v.batched]
        length = math.prod(rows.shape[v.batched : -1])
        return Lanes(reshape(rows, (*lanes, length, rows.shape[-1])), v.batched)

    inner_x = inner_first(x, not call.attributes["transpose_x"])
    inner_y = inner_first(y, call.attributes["transpose_y"])
    return _product(n, inner_x, inner_y, True, False)


def _solve(call: OneOp, n: int, x: Lanes, y: Lanes) -> Tensor:
    """A right-hand side of one axis is a column for all matrices of a lane."""
    column = y.ndim == 1
    if column:
        y = Lanes(reshape(y.x, (*y.x.shape, 1)), y.batched)
    ndim = max(x.ndim, y.ndim)
    made = apply(call, aligned(x, ndim), aligned(y, ndim))
    return reshape(made, made.shape[:-1]) if column else made


def _pinv(call: OneOp, n: int, x: Lanes, rtol: Lanes) -> Tensor:
    return apply(call, whole(x, n), aligned(rtol, x.ndim - 2))


# --- indices -------------------------------------------------------------------------


def _counted(n: int, indices: Tensor, length: int, *, negative: bool = True) -> Tensor:
    """The indices of each lane along an axis in which the lanes, of that length, follow one
    another. One that is out of range in its lane is out of range there."""
    wide = indices if indices.dtype is i64 else op.astype(indices, dtype=i64)
    lanes = op.arange(start=0, stop=n, step=1, dtype=i64)
    first = reshape(lanes * length, (n, *[1] * (indices.ndim - 1)))
    found = op.where(op.less(wide, 0), wide + length, wide) if negative else wide
    inside = op.logical_and(op.greater_equal(found, 0), op.less(found, length))
    return op.where(inside, found + first, constant(n * length, i64))


def _take(call: OneOp, n: int, x: Lanes, indices: Lanes) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.batched:
        return _called(call, [x.x, indices.x], axis=axis + 1)
    if not x.batched:
        return moveaxis(apply(call, x.x, indices.x), axis, 0)
    rows = _joined(_moved(x.x, axis + 1, 1, 1))
    made = op.take(rows, _counted(n, indices.x, x.shape[axis]), axis=0)
    return _moved(made, 1, indices.ndim, axis + 1)


def _weighted_take(call: OneOp, n: int, x: Lanes, indices: Lanes, weights: Lanes) -> Tensor:
    """The images of all lanes are those of one."""
    images = _joined(whole(x, n))
    if not (indices.batched or weights.batched) and indices.shape[0] == 1:
        return _parted(apply(call, images, indices.x, weights.x), n)
    each = (n, x.shape[0], *indices.shape[1:])
    given = [_joined(broadcast_to(whole(v, n), each)) for v in (indices, weights)]
    return _parted(apply(call, images, *given), n)


def _scatter_add(call: OneOp, n: int, updates: Lanes, indices: Lanes) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], updates.ndim - indices.ndim + 1)
    if not indices.batched:
        return _called(call, [updates.x, indices.x], axis=axis + 1)
    length = call.attributes["length"]
    rows = _moved(whole(updates, n), axis + 1, indices.ndim, 1)
    made = op.scatter_add(rows, _counted(n, indices.x, length), axis=0, length=n * length)
    return _moved(reshape(made, (n, length, *made.shape[1:])), 1, 1, axis + 1)


def _index_add(call: OneOp, n: int, x: Lanes, updates: Lanes, indices: Lanes) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.batched:
        return _called(call, [whole(x, n), whole(updates, n), indices.x], axis=axis + 1)
    length = x.shape[axis]
    rows = _moved(whole(x, n), axis + 1, 1, 1)
    added = _moved(whole(updates, n), axis + 1, indices.ndim, 1)
    made = op.index_add(_joined(rows), added, _counted(n, indices.x, length), axis=0)
    return _moved(reshape(made, rows.shape), 1, 1, axis + 1)


def _index_reduce(call: OneOp, n: int, x: Lanes, updates: Lanes, indices: Lanes) -> Tensor:
    rows, given = whole(x, n), whole(updates, n)
    if not indices.batched:
        operands = moveaxis(rows, 0, 1), moveaxis(given, 0, indices.ndim), indices.x
        return moveaxis(apply(call, *operands), 1, 0)
    places = _counted(n, indices.x, x.shape[0])
    return reshape(apply(call, _joined(rows), given, places), rows.shape)


def _index_set(call: OneOp, n: int, x: Lanes, values: Lanes, indices: Lanes) -> Tensor:
    axis, axes = normalize_axis(call.attributes["axis"], max(x.ndim, 1)), call.attributes["axes"]
    return _with_values(n, x, values, indices, axis, axes)


def _with_values(
    n: int, x: Lanes, values: Lanes, indices: Lanes, axis: int, axes: int, negative: bool = True
) -> Tensor:
    chosen = (*x.shape[:axis], *indices.shape, *x.shape[axis + axes :])
    if not indices.batched:
        given = aligned(values, len(chosen))
        return op.index_set(whole(x, n), given, indices.x, axis=axis + 1, axes=axes)
    lengths = x.shape[axis : axis + axes]
    length = math.prod(lengths)
    rows = _moved(whole(x, n), axis + 1, axes, 1)
    given = broadcast_to(aligned(values, len(chosen)), (n, *chosen))
    places = _counted(n, indices.x, length, negative=negative)
    merged = reshape(rows, (n * length, *rows.shape[1 + axes :]))
    made = op.index_set(merged, _moved(given, axis + 1, indices.ndim, 1), places, axis=0, axes=1)
    return _moved(reshape(made, rows.shape), 1, axes, axis + 1)


def _dynamic_update(call: OneOp, n: int, x: Lanes, update: Lanes, start: Lanes) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not start.batched:
        return _called(call, [whole(x, n), whole(update, n), start.x], axis=axis + 1)
    length, count = x.shape[axis], update.shape[axis]
    first = start.x if start.x.dtype is i64 else op.astype(start.x, dtype=i64)
    first = op.where(op.less(first, 0), first + length, first)
    rows = reshape(first, (n, 1)) + op.arange(start=0, stop=count, step=1, dtype=i64)
    return _with_values(n, x, update, Lanes(rows, True), axis, 1, negative=False)


def _guarded(mask: Tensor, count: int) -> Tensor:
    """The masks of all lanes as one; none of it if a lane has not so many places."""
    places = op.sum(mask, axis=tuple(range(1, mask.ndim)))
    fits = op.all(op.equal(places, constant(count, i64)))
    return op.logical_and(mask, fits) if count else mask


def _mask_scatter(call: OneOp, n: int, updates: Lanes, mask: Lanes) -> Tensor:
    shape = call.attributes["shape"]
    if not mask.batched:
        places, behind = shape[: mask.ndim], shape[mask.ndim :]
        made = op.mask_scatter(_moved(updates.x, 0, 1, 1), mask.x, shape=(*places, n, *behind))
        return moveaxis(made, mask.ndim, 0)
    rows = _joined(whole(updates, n))
    return op.mask_scatter(rows, _guarded(mask.x, updates.shape[0]), shape=(n, *shape))


def _mask_set(call: OneOp, n: int, x: Lanes, values: Lanes, mask: Lanes) -> Tensor:
    count, behind = values.shape[0], x.shape[mask.ndim :]
    missing = [1] * (len(behind) + 1 - values.ndim)
    rows = reshape(whole(values, n), (n, count, *missing, *values.shape[1:]))
    given = broadcast_to(rows, (n, count, *behind))
    if not mask.batched:
        made = op.mask_set(_moved(whole(x, n), 0, 1, mask.ndim), _moved(given, 0, 1, 1), mask.x)
        return moveaxis(made, mask.ndim, 0)
    return op.mask_set(whole(x, n), _joined(given), _guarded(mask.x, count))


# --- lanes of another vmap -----------------------------------------------------------


def _gather_lanes(call: OneOp, n: int, x: Lanes, rank: Lanes) -> Tensor:
    number = constant(0, i64) if rank.batched else rank.x  # which only the rule back asks for
    return moveaxis(apply(call, whole(x, n), number), 1, 0)


# --- neural --------------------------------------------------------------------------


def _dropout(call: OneOp, n: int, x: Lanes, key: Lanes) -> Tensor:
    """One key keeps the same elements in each lane."""
    if key.batched:
        return looped(call, n, x, key)
    kept = op.greater(apply(call, full(x.shape, 1.0, dtype=x.x.dtype), key.x), 0.0)
    scaled = x.x * (1 / (1 - call.attributes["rate"]))
    return op.where(kept, scaled, constant(0.0, x.x.dtype))


def _layer_norm(call: OneOp, n: int, x: Lanes, scale: Lanes, bias: Lanes) -> Tensor:
    if not (scale.batched or bias.batched):
        return apply(call, x.x, scale.x, bias.x)
    normal = Lanes(op.layer_norm_normalize(x.x, eps=call.attributes["eps"]), x.batched)
    ndim = x.ndim
    return op.multiply_add(*[aligned(v, ndim) for v in (normal, scale, bias)])


def _layer_norm_vjp(call: OneOp, n: int, g: Lanes, x: Lanes, scale: Lanes) -> Tensor:
    if not scale.batched:
        return apply(call, whole(g, n), whole(x, n), scale.x)
    scaled = whole(g, n) * aligned(scale, g.ndim)
    return apply(call, scaled, whole(x, n), full(scale.shape, 1.0, dtype=scale.x.dtype))


def _layer_norm_scale_vjp(call: OneOp, n: int, g: Lanes, x: Lanes) -> Tensor:
    normal = Lanes(op.layer_norm_normalize(x.x, eps=call.attributes["eps"]), x.batched)
    return op.sum(whole(g, n) * normal.x, axis=tuple(range(1, g.ndim)))


def _convolution(call: OneOp, n: int, x: Lanes, y: Lanes) -> Tensor:
    """A kernel that all lanes' images meet is one. Else lanes are groups of channels: those of
    images, and of results."""
    how = dict(call.attributes)
    if call.op.name != "conv2d_kernel_vjp" and not y.batched:
        if "shape" in how:
            how["shape"] = (n * how["shape"][0], *how["shape"][1:])
        return _parted(_called(call, [_joined(x.x), y.x], **how), n)

    def in_groups(v: Lanes) -> Tensor:
        lanes = moveaxis(whole(v, n), 0, -2)
        return reshape(lanes, (*lanes.shape[:-2], n * lanes.shape[-1]))

    how["groups"] = n * how["groups"]
    if "shape" in how:
        how["shape"] = (*how["shape"][:-1], n * how["shape"][-1])
    made = _called(call, [in_groups(x), in_groups(y)], **how)
    return moveaxis(reshape(made, (*made.shape[:-1], n, made.shape[-1] // n)), -2, 0)


def looped(call: OneOp, n: int, *xs: Lanes) -> Tensor:
    """One lane after the other: a key makes the numbers of one."""
    lanes = [apply(call, *[getitem(v.x, i) if v.batched else v.x for v in xs]) for i in range(n)]
    if not lanes:
        like = call.infer(tuple([v.x.type.with_shape(v.shape) for v in xs]))
        assert like is not None  # no op with a rule is dynamic
        return zeros((0, *like.shape), dtype=like.dtype)
    return op.concat(*[reshape(x, (1, *x.shape)) for x in lanes], axis=0)


def _beside_weights(call: OneOp, n: int, *xs: Lanes) -> Tensor:
    """The op on all rows of the first operand, beside weights that all lanes share."""
    if xs[0].batched and not any(v.batched for v in xs[1:]):
        return apply(call, *[v.x for v in xs])
    return looped(call, n, *xs)


def _dequantize(call: OneOp, n: int, x: Lanes, scale: Lanes) -> Tensor:
    return apply(call, x.x, whole(scale, n)) if x.batched else looped(call, n, x, scale)


# --- the table -----------------------------------------------------------------------


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


BATCHING: Final[dict[str, Rule]] = {
    # --- reduction ---
    **_each("sum mean prod var logsumexp max min all any", _rows),
    **_each("argmax argmin cumulative_sum", _flattened),
    # --- linalg ---
    "matmul": _matmul,
    "batch_contract": _batch_contract,
    # --- quantized ---
    **_each("pack unpack dequantize_rows quantized_matmul integer_matmul", _beside_weights),
    "integer_conv2d": looped,
    "dequantize": _dequantize,
    # --- packed ---
    "packed_matmul": _beside_weights,
    **_each("pack_panels packed_conv2d", looped),
    # --- decompositions ---
    **_each("cholesky inv lu expm det det_vjp slogdet eigh eigvalsh eig eigvals", _rows),
    **_each("qr svd svdvals", _rows),
    **_each("solve solve_triangular", _solve),
    "pinv": _pinv,
    # --- fft ---
    **_each("fft ifft rfft irfft", _rows),
    # --- lanes ---
    "sum_lanes": _rows,
    "gather_lanes": _gather_lanes,
    # --- layout ---
    **_each("reshape broadcast_to permute_dims concat pad slice embed slice_add slice_set", _rows),
    **_each("flip sort argsort tril triu", _rows),
    "roll": _flattened,
    # --- creation ---
    "full": _rows,
    # --- indexing ---
    "take": _take,
    "weighted_take": _weighted_take,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_reduce": _index_reduce,
    "index_set": _index_set,
    **_each("take_along_axis scatter_add_along_axis", _rows),
    "one_hot": _rows,
    "dynamic_update": _dynamic_update,
    "mask_scatter": _mask_scatter,
    "mask_set": _mask_set,
    # --- neural ---
    **_each("gelu gelu_slope polygamma softmax_cross_entropy softmax_cross_entropy_vjp", _rows),
    **_each("layer_norm_normalize softmax log_softmax", _rows),
    "dropout": _dropout,
    "layer_norm": _layer_norm,
    "layer_norm_vjp": _layer_norm_vjp,
    "layer_norm_scale_vjp": _layer_norm_scale_vjp,
    # --- recurrent ---
    **_each("recurrence recurrence_vjp", looped),
    # --- windows ---
    **_each("patches unpatches max_pool2d avg_pool2d", _images),
    "max_pool2d_vjp": _images_of_two,
    **_each("conv2d conv_transpose2d conv2d_kernel_vjp", _convolution),
    # --- random ---
    **_each("split_key fold_in normal uniform bernoulli randint permutation", looped),
    **_each("gamma poisson binomial multinomial", looped),
}

_REFUSING: Final = (
    "pow take weighted_take scatter_add index_add index_reduce index_set take_along_axis one_hot "
    "scatter_add_along_axis dynamic_update mask_scatter mask_set "
    "softmax_cross_entropy softmax_cross_entropy_vjp "
    "cholesky inv solve solve_triangular det_vjp eigh eigvalsh eig eigvals svd svdvals pinv "
    "bernoulli gamma poisson binomial multinomial dequantize_rows"
)
REFUSING: Final = frozenset(_REFUSING.split())
"""Ops that refuse some values, such as an index out of range."""
