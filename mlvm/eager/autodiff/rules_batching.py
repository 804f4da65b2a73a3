"""Batching rules: for each op, one call that computes a whole batch.

A batched tensor has the batch along axis 0: `x[i]` is the value of element i. An unbatched tensor
is the same for all elements and has no such axis. `BATCHING` has a rule for each op that has
operands and is not elementwise; elementwise ops broadcast after `align`. A rule takes the call, the
batch size n and the operands, at least one of them batched, and returns a batched tensor. Most
rules are of one kind:

    _rows       the same op with other attributes, as `ml.batch` runs it (`mlvm.step.rows`)
    _flattened  likewise, or along all axes as one
    _images     the batch and images are one axis

An unbatched operand is read once: `_product` makes one product of many rows with it. Where indices
are batched, the batch axis and the indexed axis become one. Rules are eager code, like vjp rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import PositionRefused
from mlvm.core.rules import normalize_axis
from mlvm.core.types import Shape, i64
from mlvm.eager.functions.creation import full, zeros
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import broadcast_to, moveaxis, permute_dims, reshape
from mlvm.eager.recording.lines import traced_line
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor
from mlvm.step.rows import in_lane, over_lanes


class Batched(NamedTuple):
    """Value of a transformed function.

    x: with `is_batched`, x[i] for element i of the batch; else the same x for all.
    """

    x: Tensor
    is_batched: bool

    @property
    def ndim(self) -> int:
        """The number of axes of an element."""
        return self.x.ndim - self.is_batched

    @property
    def shape(self) -> Shape:
        """The shape of an element."""
        return self.x.shape[self.is_batched :]


Rule: TypeAlias = Callable[..., Tensor]

# --- operands ------------------------------------------------------------------------


def as_batch(v: Batched, n: int) -> Tensor:
    """Return the values with a batch axis, broadcast if they have none."""
    return v.x if v.is_batched else broadcast_to(v.x, (n, *v.x.shape))


def align(v: Batched, ndim: int) -> Tensor:
    """Insert axes behind the batch axis, so that values broadcast as elements of `ndim` axes do."""
    x = v.x
    missing = ndim + 1 - x.ndim
    return reshape(x, (x.shape[0], *[1] * missing, *x.shape[1:])) if v.is_batched and missing else x


def _apply(call: OneOp, xs: Sequence[Tensor], **others: Any) -> Tensor:
    """Apply the op with some attributes replaced."""
    return apply(one_op(call.op.name, **{**call.attributes, **others}), *xs)


def _move(x: Tensor, start: int, count: int, to: int) -> Tensor:
    """Move `count` axes, from `start` on, to the position `to`."""
    axes = [*range(x.ndim)]
    block = axes[start : start + count]
    del axes[start : start + count]
    return permute_dims(x, (*axes[:to], *block, *axes[to:]))


def _merge(x: Tensor) -> Tensor:
    """Merge the first two axes."""
    return reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _split_axis(x: Tensor, n: int) -> Tensor:
    """Split the first axis into n and the rest."""
    rows = x.shape[0] // n if n else 0
    return reshape(x, (n, rows, *x.shape[1:]))


def _transpose(x: Tensor) -> Tensor:
    return moveaxis(x, -1, -2)


# --- kinds ---------------------------------------------------------------------------


def elementwise(call: OneOp, n: int, *xs: Batched) -> Tensor:
    """Apply the same op to operands that broadcast as they do for one element."""
    ndim = max([v.ndim for v in xs])
    return apply(call, *[align(v, ndim) for v in xs])


def _rows(call: OneOp, n: int, *xs: Batched) -> Tensor:
    """Apply the op once, as `mlvm.step.rows` has it for these operands, or with all of them
    batched.
    """
    types = [v.x.type.with_shape(v.shape) for v in xs]
    are_batched = [v.is_batched for v in xs]
    row_call = over_lanes(call.op, call.attributes, types, are_batched, n)
    if row_call is None:
        are_batched = [True] * len(xs)
        row_call = over_lanes(call.op, call.attributes, types, are_batched, n)
        assert row_call is not None  # the table is for ops that have such a rule
    name, attributes, row_types = row_call
    batches = [as_batch(v, n) if many else v.x for v, many in zip(xs, are_batched, strict=True)]
    operands = [
        x if x.shape == type.shape else reshape(x, type.shape)
        for x, type in zip(batches, row_types, strict=True)
    ]
    return apply(one_op(name, **attributes), *operands)


def _flattened(call: OneOp, n: int, x: Batched) -> Tensor:
    """Apply an op along an axis, where None means all axes in row-major order."""
    if call.attributes["axis"] is not None:
        return _rows(call, n, x)
    rows = reshape(x.x, (n, math.prod(x.shape)))
    result = _apply(call, [rows], axis=1)
    if result.shape == rows.shape:
        return reshape(result, x.x.shape)
    keepdims = call.attributes.get("keepdims", False)
    return reshape(result, (n, *[1] * x.ndim)) if keepdims else result


def _images(call: OneOp, n: int, x: Batched) -> Tensor:
    others = {}
    if "shape" in call.attributes:
        count, *image = call.attributes["shape"]
        others["shape"] = (n * count, *image)
    return _split_axis(_apply(call, [_merge(x.x)], **others), n)


def _images_of_two(call: OneOp, n: int, x: Batched, y: Batched) -> Tensor:
    return _split_axis(apply(call, _merge(as_batch(x, n)), _merge(as_batch(y, n))), n)


# --- products ------------------------------------------------------------------------


def _matmul(call: OneOp, n: int, x: Batched, y: Batched) -> Tensor:
    transposed_x, transposed_y = call.attributes["transpose_x"], call.attributes["transpose_y"]
    return _product(n, x, y, transposed_x, transposed_y)


def _product(n: int, x: Batched, y: Batched, transpose_x: bool, transpose_y: bool) -> Tensor:
    """Multiply matrices. An unbatched factor is multiplied once, by the rows or columns of all."""
    if not y.is_batched and y.ndim <= 2:
        rows = _transpose(x.x) if transpose_x else x.x
        return op.matmul(rows, y.x, transpose_y=transpose_y)
    if not x.is_batched and x.ndim <= 2 and y.ndim == 1:
        return op.matmul(y.x, x.x, transpose_y=x.ndim == 2 and not transpose_x)
    if not x.is_batched and x.ndim == y.ndim == 2:  # (y^T x^T)^T
        columns = y.x if transpose_y else _transpose(y.x)
        return _transpose(op.matmul(columns, x.x, transpose_y=not transpose_x))
    row, column = x.ndim == 1, y.ndim == 1
    if row:
        x = Batched(reshape(x.x, (*x.x.shape[:-1], 1, x.x.shape[-1])), x.is_batched)
    if column:
        y = Batched(reshape(y.x, (*y.x.shape, 1)), y.is_batched)
    ndim = max(x.ndim, y.ndim)
    product = op.matmul(
        align(x, ndim), align(y, ndim), transpose_x=transpose_x, transpose_y=transpose_y
    )
    shape = [*product.shape]
    if column:
        del shape[-1]
    if row:
        del shape[-1 if column else -2]
    return reshape(product, shape)


def _batch_contract(call: OneOp, n: int, x: Batched, y: Batched) -> Tensor:
    """Contract the batch and the inner axis together: one product an element."""

    def inner_first(v: Batched, is_last: bool) -> Batched:
        rows = _transpose(v.x) if is_last else v.x
        batch = v.x.shape[: v.is_batched]
        length = math.prod(rows.shape[v.is_batched : -1])
        return Batched(reshape(rows, (*batch, length, rows.shape[-1])), v.is_batched)

    inner_x = inner_first(x, not call.attributes["transpose_x"])
    inner_y = inner_first(y, call.attributes["transpose_y"])
    return _product(n, inner_x, inner_y, True, False)


def _solve(call: OneOp, n: int, x: Batched, y: Batched) -> Tensor:
    """Solve systems. A right-hand side of one axis is a column for all matrices of an element."""
    column = y.ndim == 1
    if column:
        y = Batched(reshape(y.x, (*y.x.shape, 1)), y.is_batched)
    ndim = max(x.ndim, y.ndim)
    solution = apply(call, align(x, ndim), align(y, ndim))
    return reshape(solution, solution.shape[:-1]) if column else solution


# --- indices -------------------------------------------------------------------------


def _offset(n: int, indices: Tensor, length: int, *, wraps: bool = True) -> Tensor:
    """Return the indices of all elements along an axis that joins theirs, each of that length.

    They are taken from `arange(length)`, which raises for the caller's index and length.
    """
    wide = indices if indices.dtype is i64 else op.astype(indices, dtype=i64)
    if not wraps:
        wide = op.where(op.less(wide, 0), constant(length, i64), wide)
    within = op.take(op.arange(start=0, stop=length, step=1, dtype=i64), wide, axis=0)
    numbers = op.arange(start=0, stop=n, step=1, dtype=i64)
    return within + reshape(numbers * length, (n, *[1] * (indices.ndim - 1)))


def _take(call: OneOp, n: int, x: Batched, indices: Batched) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.is_batched:
        return _apply(call, [x.x, indices.x], axis=axis + 1)
    if not x.is_batched:
        return moveaxis(apply(call, x.x, indices.x), axis, 0)
    rows = _merge(_move(x.x, axis + 1, 1, 1))
    values = op.take(rows, _offset(n, indices.x, x.shape[axis]), axis=0)
    return _move(values, 1, indices.ndim, axis + 1)


def _weighted_take(call: OneOp, n: int, x: Batched, indices: Batched, weights: Batched) -> Tensor:
    """Interpolate images: those of all elements are one batch."""
    images = _merge(as_batch(x, n))
    if not (indices.is_batched or weights.is_batched) and indices.shape[0] == 1:
        return _split_axis(apply(call, images, indices.x, weights.x), n)
    each = (n, x.shape[0], *indices.shape[1:])
    weighted = [_merge(broadcast_to(as_batch(v, n), each)) for v in (indices, weights)]
    return _split_axis(apply(call, images, *weighted), n)


def _scatter_add(call: OneOp, n: int, updates: Batched, indices: Batched) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], updates.ndim - indices.ndim + 1)
    if not indices.is_batched:
        return _apply(call, [updates.x, indices.x], axis=axis + 1)
    length = call.attributes["length"]
    rows = _move(as_batch(updates, n), axis + 1, indices.ndim, 1)
    sums = op.scatter_add(rows, _offset(n, indices.x, length), axis=0, length=n * length)
    return _move(reshape(sums, (n, length, *sums.shape[1:])), 1, 1, axis + 1)


def _index_add(call: OneOp, n: int, x: Batched, updates: Batched, indices: Batched) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.is_batched:
        return _apply(call, [as_batch(x, n), as_batch(updates, n), indices.x], axis=axis + 1)
    length = x.shape[axis]
    rows = _move(as_batch(x, n), axis + 1, 1, 1)
    added = _move(as_batch(updates, n), axis + 1, indices.ndim, 1)
    sums = op.index_add(_merge(rows), added, _offset(n, indices.x, length), axis=0)
    return _move(reshape(sums, rows.shape), 1, 1, axis + 1)


def _index_reduce(call: OneOp, n: int, x: Batched, updates: Batched, indices: Batched) -> Tensor:
    rows, batched_updates = as_batch(x, n), as_batch(updates, n)
    if not indices.is_batched:
        operands = moveaxis(rows, 0, 1), moveaxis(batched_updates, 0, indices.ndim), indices.x
        return moveaxis(apply(call, *operands), 1, 0)
    places = _offset(n, indices.x, x.shape[0])
    return reshape(apply(call, _merge(rows), batched_updates, places), rows.shape)


def _index_set(call: OneOp, n: int, x: Batched, values: Batched, indices: Batched) -> Tensor:
    axis, axes = normalize_axis(call.attributes["axis"], max(x.ndim, 1)), call.attributes["axes"]
    return _with_values(n, x, values, indices, axis, axes)


def _with_values(
    n: int, x: Batched, values: Batched, indices: Batched, axis: int, axes: int, wraps: bool = True
) -> Tensor:
    chosen = (*x.shape[:axis], *indices.shape, *x.shape[axis + axes :])
    if not indices.is_batched:
        source = align(values, len(chosen))
        return op.index_set(as_batch(x, n), source, indices.x, axis=axis + 1, axes=axes)
    lengths = x.shape[axis : axis + axes]
    length = math.prod(lengths)
    rows = _move(as_batch(x, n), axis + 1, axes, 1)
    source = broadcast_to(align(values, len(chosen)), (n, *chosen))
    places = _offset(n, indices.x, length, wraps=wraps)
    merged = reshape(rows, (n * length, *rows.shape[1 + axes :]))
    y = op.index_set(merged, _move(source, axis + 1, indices.ndim, 1), places, axis=0, axes=1)
    return _move(reshape(y, rows.shape), 1, axes, axis + 1)


def _dynamic_update(call: OneOp, n: int, x: Batched, update: Batched, start: Batched) -> Tensor:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not start.is_batched:
        return _apply(call, [as_batch(x, n), as_batch(update, n), start.x], axis=axis + 1)
    length, count = x.shape[axis], update.shape[axis]
    first = start.x if start.x.dtype is i64 else op.astype(start.x, dtype=i64)
    first = op.where(op.less(first, 0), first + length, first)
    rows = reshape(first, (n, 1)) + op.arange(start=0, stop=count, step=1, dtype=i64)
    return _with_values(n, x, update, Batched(rows, True), axis, 1, wraps=False)


def _checked_mask(mask: Tensor, count: int) -> Tensor:
    """Return the mask; all False unless each element has `count` places, so that the op raises."""
    places = op.sum(mask, axis=tuple(range(1, mask.ndim)))
    fits = op.all(op.equal(places, constant(count, i64)))
    return op.logical_and(mask, fits) if count else mask


def _mask_scatter(call: OneOp, n: int, updates: Batched, mask: Batched) -> Tensor:
    shape = call.attributes["shape"]
    if not mask.is_batched:
        places, behind = shape[: mask.ndim], shape[mask.ndim :]
        y = op.mask_scatter(_move(updates.x, 0, 1, 1), mask.x, shape=(*places, n, *behind))
        return moveaxis(y, mask.ndim, 0)
    rows = _merge(as_batch(updates, n))
    return op.mask_scatter(rows, _checked_mask(mask.x, updates.shape[0]), shape=(n, *shape))


def _mask_set(call: OneOp, n: int, x: Batched, values: Batched, mask: Batched) -> Tensor:
    count, behind = values.shape[0], x.shape[mask.ndim :]
    source = broadcast_to(align(values, len(behind) + 1), (n, count, *behind))
    if not mask.is_batched:
        result = op.mask_set(_move(as_batch(x, n), 0, 1, mask.ndim), _move(source, 0, 1, 1), mask.x)
        return moveaxis(result, mask.ndim, 0)
    return op.mask_set(as_batch(x, n), _merge(source), _checked_mask(mask.x, count))


# --- collectives of another vmap -----------------------------------------------------


def _gather_lanes(call: OneOp, n: int, x: Batched, rank: Batched) -> Tensor:
    number = constant(0, i64) if rank.is_batched else rank.x  # which only the vjp uses
    return moveaxis(apply(call, as_batch(x, n), number), 1, 0)


# --- neural --------------------------------------------------------------------------


def _dropout(call: OneOp, n: int, x: Batched, key: Batched) -> Tensor:
    """Drop elements. An unbatched key drops the same positions in each element."""
    if key.is_batched:
        return one_by_one(call, n, x, key)
    keep_mask = op.greater(apply(call, full(x.shape, 1.0, dtype=x.x.dtype), key.x), 0.0)
    scaled = x.x * (1 / (1 - call.attributes["rate"]))
    return op.where(keep_mask, scaled, constant(0.0, x.x.dtype))


def _layer_norm(call: OneOp, n: int, x: Batched, scale: Batched, bias: Batched) -> Tensor:
    if not (scale.is_batched or bias.is_batched):
        return apply(call, x.x, scale.x, bias.x)
    normal = Batched(op.layer_norm_normalize(x.x, eps=call.attributes["eps"]), x.is_batched)
    return op.multiply_add(*[align(v, x.ndim) for v in (normal, scale, bias)])


def _layer_norm_vjp(call: OneOp, n: int, g: Batched, x: Batched, scale: Batched) -> Tensor:
    if not scale.is_batched:
        return apply(call, as_batch(g, n), as_batch(x, n), scale.x)
    scaled = as_batch(g, n) * align(scale, g.ndim)
    return apply(call, scaled, as_batch(x, n), full(scale.shape, 1.0, dtype=scale.x.dtype))


def _layer_norm_scale_vjp(call: OneOp, n: int, g: Batched, x: Batched) -> Tensor:
    normal = Batched(op.layer_norm_normalize(x.x, eps=call.attributes["eps"]), x.is_batched)
    return op.sum(as_batch(g, n) * normal.x, axis=tuple(range(1, g.ndim)))


def _convolution(call: OneOp, n: int, x: Batched, y: Batched) -> Tensor:
    """Convolve. With an unbatched kernel, the batch joins the images; else it joins the groups of
    channels.
    """
    attributes = dict(call.attributes)
    if call.op.name != "conv2d_kernel_vjp" and not y.is_batched:
        if "shape" in attributes:
            attributes["shape"] = (n * attributes["shape"][0], *attributes["shape"][1:])
        return _split_axis(_apply(call, [_merge(x.x), y.x], **attributes), n)

    def in_groups(v: Batched) -> Tensor:
        channels = moveaxis(as_batch(v, n), 0, -2)
        return reshape(channels, (*channels.shape[:-2], n * channels.shape[-1]))

    attributes["groups"] = n * attributes["groups"]
    if "shape" in attributes:
        attributes["shape"] = (*attributes["shape"][:-1], n * attributes["shape"][-1])
    result = _apply(call, [in_groups(x), in_groups(y)], **attributes)
    return moveaxis(reshape(result, (*result.shape[:-1], n, result.shape[-1] // n)), -2, 0)


def one_by_one(call: OneOp, n: int, *xs: Batched, in_lanes: bool = False) -> Tensor:
    """Apply the op to one element after the other, such as for random numbers by key.

    With `in_lanes`, an error names the element.
    """
    elements = []
    for i in range(n):
        operands = [getitem(v.x, i) if v.is_batched else v.x for v in xs]
        try:
            elements.append(apply(call, *operands))
        except PositionRefused as error:
            if in_lanes:
                line = traced_line.get()
                if line is not None and line.call is not None:  # an inner `vmap` of this one
                    error.op, error.operands = line.call
                in_lane(error, [i], 0 if line is None else line.naxes)
            raise
    if not elements:
        like = call.infer(tuple([v.x.type.with_shape(v.shape) for v in xs]))
        assert like is not None  # no op with a rule is dynamic
        return zeros((0, *like.shape), dtype=like.dtype)
    return op.concat(*[reshape(x, (1, *x.shape)) for x in elements], axis=0)


def _beside_weights(call: OneOp, n: int, *xs: Batched) -> Tensor:
    """Apply the op to all rows of the first operand, with unbatched weights."""
    if xs[0].is_batched and not any(v.is_batched for v in xs[1:]):
        return apply(call, *[v.x for v in xs])
    return one_by_one(call, n, *xs)


def _dequantize(call: OneOp, n: int, x: Batched, scale: Batched) -> Tensor:
    return apply(call, x.x, as_batch(scale, n)) if x.is_batched else one_by_one(call, n, x, scale)


# --- the table -----------------------------------------------------------------------


def _for_ops(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


BATCHING: Final[dict[str, Rule]] = {
    # --- reduction ---
    **_for_ops("sum mean prod var logsumexp max min all any", _rows),
    **_for_ops("argmax argmin cumulative_sum", _flattened),
    # --- linalg ---
    "matmul": _matmul,
    "batch_contract": _batch_contract,
    # --- quantized ---
    **_for_ops("pack unpack dequantize_rows quantized_matmul integer_matmul", _beside_weights),
    "integer_conv2d": one_by_one,
    "dequantize": _dequantize,
    # --- packed ---
    "packed_matmul": _beside_weights,
    **_for_ops("pack_panels packed_conv2d", one_by_one),
    # --- decompositions ---
    **_for_ops("cholesky inv lu expm det det_vjp slogdet eigh eigvalsh eig eigvals", _rows),
    **_for_ops("qr svd svdvals", _rows),
    **_for_ops("solve solve_triangular", _solve),
    "pinv": lambda call, n, x, rtol: apply(call, as_batch(x, n), align(rtol, x.ndim - 2)),
    # --- fft ---
    **_for_ops("fft ifft rfft irfft", _rows),
    # --- collectives ---
    "sum_lanes": _rows,
    "gather_lanes": _gather_lanes,
    # --- layout ---
    **_for_ops(
        "reshape broadcast_to permute_dims concat pad slice embed slice_add slice_set", _rows
    ),
    **_for_ops("flip sort argsort top_indices tril triu", _rows),
    "roll": _flattened,
    "view": lambda call, n, x: apply(call, x.x),
    # --- creation ---
    "full": _rows,
    # --- indexing ---
    "take": _take,
    "weighted_take": _weighted_take,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_reduce": _index_reduce,
    "index_set": _index_set,
    **_for_ops("take_along_axis scatter_add_along_axis", _rows),
    **_for_ops("one_hot flat_indices", _rows),
    "dynamic_update": _dynamic_update,
    "mask_scatter": _mask_scatter,
    "mask_set": _mask_set,
    # --- neural ---
    **_for_ops("gelu gelu_slope polygamma softmax_cross_entropy softmax_cross_entropy_vjp", _rows),
    **_for_ops("layer_norm_normalize softmax log_softmax", _rows),
    "dropout": _dropout,
    "layer_norm": _layer_norm,
    "layer_norm_vjp": _layer_norm_vjp,
    "layer_norm_scale_vjp": _layer_norm_scale_vjp,
    # --- recurrent ---
    **_for_ops("recurrence recurrence_vjp", one_by_one),
    # --- windows ---
    **_for_ops("patches unpatches max_pool2d avg_pool2d", _images),
    "max_pool2d_vjp": _images_of_two,
    **_for_ops("conv2d conv_transpose2d conv2d_kernel_vjp", _convolution),
    # --- random ---
    **_for_ops("split_key fold_in normal uniform bernoulli randint permutation", one_by_one),
    **_for_ops("gamma poisson binomial multinomial", one_by_one),
}
