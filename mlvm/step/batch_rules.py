"""Batching rules: for each op, the calls that compute a whole batch.

A batched value has the batch along axis 0: `x[i]` is the value of element i. An unbatched value is
the same for all elements and has no such axis. A rule gets the call for one element (`BatchedCall`)
and the operands, at least one of them batched. It emits calls and returns the batched result, or
None if the op must run for one element after the other. The emitter defines what happens with the
calls: `vmap` runs or records them (`mlvm.eager.transform.batching`), and `ml.auto_batch` accepts a
rule that emits a single call (`over_lanes`). Elementwise ops broadcast and need no rules.

An unbatched operand is read once: `_product` computes one matrix product with many rows. If indices
are batched, the batch axis and the indexed axis are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

from mlvm.core.errors import PositionError
from mlvm.core.op import OPS, Attributes, Op
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, Shape, TensorType, i64

Types: TypeAlias = Sequence[TensorType]
Value: TypeAlias = Any
"""Value of an emitter, with `shape`, `ndim` and `dtype`."""


class Emitter(Protocol):
    """Interface for the calls that rules emit."""

    is_exact: bool
    """Whether each row must have the same bits as if it were computed separately."""

    def op(self, name: str, /, *xs: Value, **attributes: Any) -> Value:
        """Emit a call of an op; return the result."""

    def reshape(self, x: Value, shape: Shape) -> Value: ...
    def permute_dims(self, x: Value, axes: Sequence[int]) -> Value: ...
    def broadcast_to(self, x: Value, shape: Shape) -> Value: ...
    def constant(self, value: float, dtype: DType) -> Value: ...


class Batched(NamedTuple):
    """Value of a transformed function.

    x: with `is_batched`, x[i] for element i of the batch; else the same x for all
    """

    x: Value
    is_batched: bool

    @property
    def ndim(self) -> int:
        """Number of axes of an element."""
        return int(self.x.ndim) - self.is_batched

    @property
    def shape(self) -> Shape:
        """Shape of an element."""
        shape: Shape = self.x.shape[self.is_batched :]
        return shape


class BatchEmitter:
    """Emitter for a batch of n elements."""

    def __init__(self, n: int, emit: Emitter) -> None:
        self.n, self.emit = n, emit

    def as_batch(self, v: Batched) -> Value:
        """Return the values with a batch axis, broadcast if they are unbatched."""
        return v.x if v.is_batched else self.emit.broadcast_to(v.x, (self.n, *v.x.shape))

    def align(self, v: Batched, ndim: int) -> Value:
        """Insert axes after the batch axis, so that values broadcast as `ndim`-d elements."""
        missing = (1,) * (ndim - v.ndim) if v.is_batched else ()
        return self.reshape(v.x, (self.n, *missing, *v.shape)) if missing else v.x

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self.emit.reshape(x, tuple(shape))

    def move(self, x: Value, start: int, count: int, to: int) -> Value:
        """Move `count` axes, from `start` on, to the position `to`."""
        axes = [*range(x.ndim)]
        block = axes[start : start + count]
        del axes[start : start + count]
        return self.emit.permute_dims(x, (*axes[:to], *block, *axes[to:]))

    def merge(self, x: Value) -> Value:
        """Merge the first two axes."""
        return self.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    def split(self, x: Value) -> Value:
        """Split the first axis into the batch and the rest."""
        rows = x.shape[0] // self.n if self.n else 0
        return self.reshape(x, (self.n, rows, *x.shape[1:]))

    def transpose(self, x: Value) -> Value:
        return self.move(x, x.ndim - 1, 1, x.ndim - 2)

    def ones(self, x: Batched) -> Value:
        """Return ones with the shape and dtype of an element."""
        return self.emit.op("full", self.emit.constant(1.0, x.x.dtype), shape=x.shape)

    def range(self, count: int) -> Value:
        return self.emit.op("arange", start=0, stop=count, step=1, dtype="i64")


class BatchedCall(BatchEmitter):
    """Call of an op for each element of a batch, with the attributes for one element."""

    def __init__(self, op: Op, attributes: Attributes, n: int, emit: Emitter) -> None:
        super().__init__(n, emit)
        self.op, self.attributes = op, attributes

    def __call__(self, *xs: Value, **changed: Any) -> Value:
        """Emit the call with some attributes replaced."""
        return self.emit.op(self.op.name, *xs, **{**self.attributes, **changed})


Rule: TypeAlias = Callable[..., Value | None]

# --- the same op ---------------------------------------------------------------------


def elementwise(call: BatchedCall, *xs: Batched) -> Value:
    """Apply the same op to operands that broadcast as they do for one element."""
    ndim = max([v.ndim for v in xs])
    return call(*[call.align(v, ndim) for v in xs])


def one_by_one(call: BatchedCall, *xs: Batched) -> None:
    """Return None: the op runs for one element after the other."""


def _same(call: BatchedCall, *xs: Batched) -> Value:
    return call(*map(call.as_batch, xs))


def _along(call: BatchedCall, *xs: Batched) -> Value:
    """Apply an op along one or more axes of the first operand; None means all axes."""
    key, ndim = "axes" if "axes" in call.attributes else "axis", xs[0].ndim
    axis = call.attributes[key]
    axis = tuple(range(ndim)) if axis is None else axis
    axes = axis if isinstance(axis, tuple) else (axis,)
    moved = tuple([normalize_axis(i, ndim) + 1 for i in axes])
    changed = {key: moved if isinstance(axis, tuple) else moved[0]}
    return call(*map(call.as_batch, xs), **changed)


def _flattened(call: BatchedCall, x: Batched) -> Value:
    """Apply an op along an axis, where None means all axes in row-major order."""
    if call.attributes["axis"] is not None:
        return _along(call, x)
    rows = call.reshape(x.x, (call.n, math.prod(x.shape)))
    result = call(rows, axis=1)
    if result.shape == rows.shape:
        return call.reshape(result, x.x.shape)
    keepdims = call.attributes.get("keepdims", False)
    return call.reshape(result, (call.n, *[1] * x.ndim)) if keepdims else result


def _reshape(call: BatchedCall, x: Batched) -> Value:
    return call(x.x, shape=(call.n, *call.attributes["shape"]))


def _broadcast_to(call: BatchedCall, x: Batched) -> Value:
    shape = call.attributes["shape"]
    return call.emit.op("broadcast_to", call.align(x, len(shape)), shape=(call.n, *shape))


def _sliced(call: BatchedCall, *xs: Batched) -> Value:
    """Apply a slice, or an op that writes or pads a slice."""
    ndim, n = max([v.ndim for v in xs]), call.n
    whole = {"start": 0, "step": 1, "widths": (0, 0), "length": n, "shape": n}
    changed = {key: (whole[key], *call.attributes[key]) for key in whole & call.attributes.keys()}
    batches = [Batched(call.as_batch(v), True) for v in xs]
    return call(*[call.align(v, ndim) for v in batches], **changed)


def _permuted(call: BatchedCall, x: Batched) -> Value:
    axes = [normalize_axis(a, x.ndim) + 1 for a in call.attributes["axes"]]
    return call(x.x, axes=(0, *axes))


def _images(call: BatchedCall, *xs: Batched) -> Value:
    """Apply an op of images: the images of all elements form one batch."""
    shape = call.attributes.get("shape")
    changed = {} if shape is None else {"shape": (call.n * shape[0], *shape[1:])}
    return call.split(call(*[call.merge(call.as_batch(v)) for v in xs], **changed))


# --- products ------------------------------------------------------------------------


def _matmul(call: BatchedCall, x: Batched, y: Batched) -> Value | None:
    transpose_x, transpose_y = call.attributes["transpose_x"], call.attributes["transpose_y"]
    if not call.emit.is_exact:
        return _product(call, x, y, transpose_x, transpose_y)
    if not y.is_batched and y.ndim == 2 and (x.ndim == 1 or not transpose_x):
        rows = call.reshape(x.x, (math.prod(x.x.shape[:-1]), x.x.shape[-1]))
        product = call(rows, y.x, transpose_x=False)
        return call.reshape(product, (*x.x.shape[:-1], product.shape[-1]))
    if x.ndim < 2 or y.ndim < 2:
        return None
    return elementwise(call, x, y)


def _product(
    call: BatchedCall, x: Batched, y: Batched, transpose_x: bool, transpose_y: bool
) -> Value:
    """Multiply matrices.

    An unbatched factor is multiplied once, by the rows or columns of all elements.
    """
    emit = call.emit
    if not y.is_batched and y.ndim <= 2:
        rows = call.transpose(x.x) if transpose_x else x.x
        return emit.op("matmul", rows, y.x, transpose_y=transpose_y)
    if not x.is_batched and x.ndim <= 2 and y.ndim == 1:
        return emit.op("matmul", y.x, x.x, transpose_y=x.ndim == 2 and not transpose_x)
    if not x.is_batched and x.ndim == y.ndim == 2:  # (y^T x^T)^T
        columns = y.x if transpose_y else call.transpose(y.x)
        return call.transpose(emit.op("matmul", columns, x.x, transpose_y=not transpose_x))
    row, column = x.ndim == 1, y.ndim == 1
    if row:
        x = x._replace(x=call.reshape(x.x, (*x.x.shape[:-1], 1, x.x.shape[-1])))
    y = _as_column(call, y) if column else y
    ndim = max(x.ndim, y.ndim)
    factors = call.align(x, ndim), call.align(y, ndim)
    product = emit.op("matmul", *factors, transpose_x=transpose_x, transpose_y=transpose_y)
    rows, columns = product.shape[-2:]
    lengths = *(() if row else (rows,)), *(() if column else (columns,))
    return call.reshape(product, (*product.shape[:-2], *lengths))


def _as_column(call: BatchedCall, y: Batched) -> Batched:
    return y._replace(x=call.reshape(y.x, (*y.x.shape, 1)))


def _batch_contract(call: BatchedCall, x: Batched, y: Batched) -> Value:
    """Contract the batch and the inner axis together: one product per element."""

    def inner_first(v: Batched, is_last: bool) -> Batched:
        rows = call.transpose(v.x) if is_last else v.x
        batch = v.x.shape[: v.is_batched]
        length = math.prod(rows.shape[v.is_batched : -1])
        return v._replace(x=call.reshape(rows, (*batch, length, rows.shape[-1])))

    inner_x = inner_first(x, not call.attributes["transpose_x"])
    inner_y = inner_first(y, call.attributes["transpose_y"])
    return _product(call, inner_x, inner_y, True, False)


def _solve(call: BatchedCall, x: Batched, y: Batched) -> Value:
    """Solve linear systems.

    A right-hand side with one axis is a column for all matrices of an element.
    """
    column = y.ndim == 1
    solution = elementwise(call, x, _as_column(call, y) if column else y)
    return call.reshape(solution, solution.shape[:-1]) if column else solution


def _beside_weights(call: BatchedCall, *xs: Batched) -> Value | None:
    """Apply the op to all rows of the first operand, with unbatched weights."""
    is_alone = xs[0].is_batched and not any(v.is_batched for v in xs[1:])
    return call(*[v.x for v in xs]) if is_alone else None


def _dequantize(call: BatchedCall, x: Batched, scale: Batched) -> Value | None:
    return call(x.x, call.as_batch(scale)) if x.is_batched else None


# --- indices -------------------------------------------------------------------------


def _offset(call: BatchedCall, indices: Value, length: int, *, wraps: bool = True) -> Value:
    """Return the indices of all elements along the merged axis, with `length` for each element.

    They are read from `arange(length)`, so an error names the caller's index and length.
    """
    emit = call.emit
    wide = indices if indices.dtype is i64 else emit.op("astype", indices, dtype="i64")
    if not wraps:
        is_negative = emit.op("less", wide, emit.constant(0, i64))
        wide = emit.op("where", is_negative, emit.constant(length, i64), wide)
    within = emit.op("take", call.range(length), wide, axis=0)
    starts = emit.op("multiply", call.range(call.n), emit.constant(length, i64))
    return emit.op("add", within, call.reshape(starts, (call.n, *[1] * (indices.ndim - 1))))


def _take(call: BatchedCall, x: Batched, indices: Batched) -> Value:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.is_batched:
        return call(x.x, indices.x, axis=axis + 1)
    if not x.is_batched:
        values = call(x.x, indices.x)
        return call.move(values, axis, 1, 0) if axis else values
    rows = call.merge(call.move(x.x, axis + 1, 1, 1))
    values = call(rows, _offset(call, indices.x, x.shape[axis]), axis=0)
    return call.move(values, 1, indices.ndim, axis + 1)


def _weighted_take(call: BatchedCall, x: Batched, indices: Batched, weights: Batched) -> Value:
    """Interpolate images: the images of all elements form one batch."""
    images = call.merge(call.as_batch(x))
    if not (indices.is_batched or weights.is_batched) and indices.shape[0] == 1:
        return call.split(call(images, indices.x, weights.x))
    each = (call.n, x.shape[0], *indices.shape[1:])
    weighted = [
        call.merge(call.emit.broadcast_to(call.as_batch(v), each)) for v in (indices, weights)
    ]
    return call.split(call(images, *weighted))


def _scatter_add(call: BatchedCall, updates: Batched, indices: Batched) -> Value:
    axis = normalize_axis(call.attributes["axis"], updates.ndim - indices.ndim + 1)
    if not indices.is_batched:
        return call(updates.x, indices.x, axis=axis + 1)
    length = call.attributes["length"]
    rows = call.move(call.as_batch(updates), axis + 1, indices.ndim, 1)
    sums = call(rows, _offset(call, indices.x, length), axis=0, length=call.n * length)
    return call.move(call.reshape(sums, (call.n, length, *sums.shape[1:])), 1, 1, axis + 1)


def _index_add(call: BatchedCall, x: Batched, updates: Batched, indices: Batched) -> Value:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not indices.is_batched:
        return call(call.as_batch(x), call.as_batch(updates), indices.x, axis=axis + 1)
    rows = call.move(call.as_batch(x), axis + 1, 1, 1)
    added = call.move(call.as_batch(updates), axis + 1, indices.ndim, 1)
    sums = call(call.merge(rows), added, _offset(call, indices.x, x.shape[axis]), axis=0)
    return call.move(call.reshape(sums, rows.shape), 1, 1, axis + 1)


def _index_reduce(call: BatchedCall, x: Batched, updates: Batched, indices: Batched) -> Value:
    rows, batch = call.as_batch(x), call.as_batch(updates)
    if not indices.is_batched:
        moved = call.move(rows, 0, 1, 1), call.move(batch, 0, 1, indices.ndim)
        return call.move(call(*moved, indices.x), 1, 1, 0)
    places = _offset(call, indices.x, x.shape[0])
    return call.reshape(call(call.merge(rows), batch, places), rows.shape)


def _index_set(call: BatchedCall, x: Batched, values: Batched, indices: Batched) -> Value:
    axis = normalize_axis(call.attributes["axis"], max(x.ndim, 1))
    return _with_values(call, x, values, indices, range(axis, axis + call.attributes["axes"]))


def _with_values(
    call: BatchedCall, x: Batched, values: Batched, indices: Batched, at: range, wraps: bool = True
) -> Value:
    """Assign values at the indices along these axes, which are merged."""
    emit, n, axis, axes = call.emit, call.n, at.start, len(at)
    chosen = (*x.shape[:axis], *indices.shape, *x.shape[at.stop :])
    source = call.align(values, len(chosen))
    if not indices.is_batched:
        where = {"axis": axis + 1, "axes": axes}
        return emit.op("index_set", call.as_batch(x), source, indices.x, **where)
    length = math.prod(x.shape[axis : at.stop])
    rows = call.move(call.as_batch(x), axis + 1, axes, 1)
    source = emit.broadcast_to(source, (n, *chosen))
    places = _offset(call, indices.x, length, wraps=wraps)
    merged = call.reshape(rows, (n * length, *rows.shape[1 + axes :]))
    moved = call.move(source, axis + 1, indices.ndim, 1)
    y = emit.op("index_set", merged, moved, places, axis=0, axes=1)
    return call.move(call.reshape(y, rows.shape), 1, axes, axis + 1)


def _dynamic_update(call: BatchedCall, x: Batched, update: Batched, start: Batched) -> Value:
    axis = normalize_axis(call.attributes["axis"], x.ndim)
    if not start.is_batched:
        return call(call.as_batch(x), call.as_batch(update), start.x, axis=axis + 1)
    emit, length = call.emit, call.emit.constant(x.shape[axis], i64)
    first = start.x if start.x.dtype is i64 else emit.op("astype", start.x, dtype="i64")
    is_negative = emit.op("less", first, emit.constant(0, i64))
    first = emit.op("where", is_negative, emit.op("add", first, length), first)
    count = call.range(update.shape[axis])
    rows = Batched(emit.op("add", call.reshape(first, (call.n, 1)), count), True)
    return _with_values(call, x, update, rows, range(axis, axis + 1), wraps=False)


def _checked_mask(call: BatchedCall, mask: Value, count: int) -> Value:
    """Return the mask, or all False unless each element has `count` True values.

    With all False, the op raises the error.
    """
    emit = call.emit
    places = emit.op("sum", mask, axis=tuple(range(1, mask.ndim)))
    fits = emit.op("all", emit.op("equal", places, emit.constant(count, i64)))
    return emit.op("logical_and", mask, fits) if count else mask


def _mask_scatter(call: BatchedCall, updates: Batched, mask: Batched) -> Value:
    shape, n = call.attributes["shape"], call.n
    if not mask.is_batched:
        places, after = shape[: mask.ndim], shape[mask.ndim :]
        y = call(call.move(updates.x, 0, 1, 1), mask.x, shape=(*places, n, *after))
        return call.move(y, mask.ndim, 1, 0)
    rows = call.merge(call.as_batch(updates))
    return call(rows, _checked_mask(call, mask.x, updates.shape[0]), shape=(n, *shape))


def _mask_set(call: BatchedCall, x: Batched, values: Batched, mask: Batched) -> Value:
    count, after = values.shape[0], x.shape[mask.ndim :]
    source = call.align(values, len(after) + 1)
    source = call.emit.broadcast_to(source, (call.n, count, *after))
    if not mask.is_batched:
        rows = call.move(call.as_batch(x), 0, 1, mask.ndim)
        return call.move(call(rows, call.move(source, 0, 1, 1), mask.x), mask.ndim, 1, 0)
    return call(call.as_batch(x), call.merge(source), _checked_mask(call, mask.x, count))


# --- collectives of outer vmaps, and neural ops ---------------------------------------


def _gather_lanes(call: BatchedCall, x: Batched, rank: Batched) -> Value:
    number = call.emit.constant(0, i64) if rank.is_batched else rank.x  # for the vjp only
    return call.move(call(call.as_batch(x), number), 1, 1, 0)


def _dropout(call: BatchedCall, x: Batched, key: Batched) -> Value | None:
    """Drop elements. An unbatched key drops the same positions in each element."""
    if key.is_batched:
        return None
    emit, dtype = call.emit, x.x.dtype
    keep_mask = emit.op("greater", call(call.ones(x), key.x), emit.constant(0.0, dtype))
    by = emit.constant(1 / (1 - call.attributes["rate"]), dtype)
    return emit.op("where", keep_mask, emit.op("multiply", x.x, by), emit.constant(0.0, dtype))


def _normal(call: BatchedCall, x: Batched) -> Batched:
    return x._replace(x=call.emit.op("layer_norm_normalize", x.x, eps=call.attributes["eps"]))


def _layer_norm(call: BatchedCall, x: Batched, scale: Batched, bias: Batched) -> Value:
    if not (scale.is_batched or bias.is_batched):
        return call(x.x, scale.x, bias.x)
    operands = [call.align(v, x.ndim) for v in (_normal(call, x), scale, bias)]
    return call.emit.op("multiply_add", *operands)


def _layer_norm_vjp(call: BatchedCall, g: Batched, x: Batched, scale: Batched) -> Value:
    if not scale.is_batched:
        return call(call.as_batch(g), call.as_batch(x), scale.x)
    scaled = call.emit.op("multiply", call.as_batch(g), call.align(scale, g.ndim))
    return call(scaled, call.as_batch(x), call.ones(scale))


def _layer_norm_scale_vjp(call: BatchedCall, g: Batched, x: Batched) -> Value:
    normal = _normal(call, x)
    product = call.emit.op("multiply", call.as_batch(g), normal.x)
    return call.emit.op("sum", product, axis=tuple(range(1, g.ndim)))


def _convolution(call: BatchedCall, x: Batched, y: Batched) -> Value:
    """Convolve images.

    With an unbatched kernel, the batch is merged with the images; else with the groups of channels.
    """
    n, shape = call.n, call.attributes.get("shape")
    if call.op.name != "conv2d_kernel_vjp" and not y.is_batched:
        changed = {} if shape is None else {"shape": (n * shape[0], *shape[1:])}
        return call.split(call(call.merge(x.x), y.x, **changed))

    def in_groups(v: Batched) -> Value:
        channels = call.move(call.as_batch(v), 0, 1, v.ndim - 1)
        return call.reshape(channels, (*channels.shape[:-2], n * channels.shape[-1]))

    changed = {} if shape is None else {"shape": (*shape[:-1], n * shape[-1])}
    groups = n * call.attributes["groups"]
    result = call(in_groups(x), in_groups(y), groups=groups, **changed)
    split = call.reshape(result, (*result.shape[:-1], n, result.shape[-1] // n))
    return call.move(split, split.ndim - 2, 1, 0)


# --- the table -----------------------------------------------------------------------


def _for_ops(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_EXACT: Final[Mapping[str, Rule]] = {
    "matmul": _matmul,
    **_for_ops("sum mean prod var logsumexp max min all any softmax log_softmax flip", _along),
    **_for_ops("sort argsort top_indices fft ifft rfft irfft", _along),
    **_for_ops("concat take_along_axis scatter_add_along_axis", _along),
    **_for_ops("argmax argmin cumulative_sum cumulative_prod roll", _flattened),
    **_for_ops("cholesky inv lu expm det det_vjp slogdet eigh eigvalsh eig eigvals", _same),
    **_for_ops("qr svd svdvals sum_lanes tril triu one_hot flat_indices searchsorted", _same),
    **_for_ops("gelu gelu_slope polygamma layer_norm_normalize", _same),
    **_for_ops("softmax_cross_entropy softmax_cross_entropy_vjp", _same),
    "reshape": _reshape,
    **_for_ops("broadcast_to full", _broadcast_to),
    **_for_ops("pad slice embed slice_add slice_set", _sliced),
    "permute_dims": _permuted,
    "take": _take,
    "layer_norm": _layer_norm,
}
"""Rules that compute rows with the same bits as separate elements, if they emit one call."""

BATCHING: Final[Mapping[str, Rule]] = {
    **_EXACT,
    "batch_contract": _batch_contract,
    # --- quantized and packed ---
    **_for_ops("pack unpack dequantize_rows quantized_matmul integer_matmul", _beside_weights),
    **_for_ops("integer_conv2d pack_panels packed_conv2d add_conv2d_kernel_vjp", one_by_one),
    "dequantize": _dequantize,
    "packed_matmul": _beside_weights,
    # --- decompositions ---
    **_for_ops("solve solve_triangular", _solve),
    "pinv": lambda call, x, rtol: call(call.as_batch(x), call.align(rtol, x.ndim - 2)),
    # --- layout and indexing ---
    "view": lambda call, x: call(x.x),
    "gather_lanes": _gather_lanes,
    "weighted_take": _weighted_take,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_reduce": _index_reduce,
    "index_set": _index_set,
    "dynamic_update": _dynamic_update,
    "mask_scatter": _mask_scatter,
    "mask_set": _mask_set,
    # --- neural ---
    "dropout": _dropout,
    "layer_norm_vjp": _layer_norm_vjp,
    "layer_norm_scale_vjp": _layer_norm_scale_vjp,
    **_for_ops("recurrence recurrence_vjp", one_by_one),
    # --- windows ---
    **_for_ops("patches unpatches max_pool2d avg_pool2d max_pool2d_vjp", _images),
    **_for_ops("conv2d conv_transpose2d conv2d_kernel_vjp", _convolution),
    # --- random ---
    **_for_ops("split_key fold_in normal uniform bernoulli randint permutation", one_by_one),
    **_for_ops("gamma poisson binomial multinomial", one_by_one),
}

# --- rows of ml.auto_batch ----------------------------------------------------------------

BatchedOp: TypeAlias = "tuple[str, Attributes, Types] | None"
"""Op name, attributes and operand types; None if no such op exists."""


class _Row:
    """Operand of a call by number, or the result of the call, -1."""

    def __init__(self, type: TensorType, number: int) -> None:
        self.type, self.number = type, number
        self.shape, self.ndim, self.dtype = type.shape, type.ndim, type.dtype


class _NotOneCall(Exception):
    """Signal that a rule emits more than one call."""


class _OneCall:
    """Emitter of a single call with unchanged or reshaped operands."""

    is_exact = True

    def __init__(self) -> None:
        self.call: BatchedOp = None

    def op(self, name: str, /, *xs: _Row, **attributes: Any) -> _Row:
        if self.call is not None or any(x.number != i for i, x in enumerate(xs)):
            raise _NotOneCall
        types = [x.type for x in xs]
        self.call = name, attributes, types
        result = OPS[name].infer(types, attributes)
        assert result is not None  # ops with rules have static shapes
        return _Row(result, -1)

    def reshape(self, x: _Row, shape: Shape) -> _Row:
        return _Row(x.type.with_shape(shape), x.number)

    def _more(self, *_: object) -> NoReturn:
        raise _NotOneCall

    permute_dims = broadcast_to = constant = _more


def over_lanes(
    op: Op, attributes: Attributes, types: Types, which: Sequence[bool], count: int
) -> BatchedOp:
    """Return the op over `count` lanes, or None if it must run lane by lane.

    `which` operands have a row for each lane; the lanes share the others.
    """
    rule = _EXACT.get(op.name, elementwise if op.elementwise else one_by_one)
    if not any(which):
        return None
    operands = [
        Batched(_Row(type.with_shape((count, *type.shape)) if is_batched else type, i), is_batched)
        for i, (type, is_batched) in enumerate(zip(types, which, strict=True))
    ]
    emit = _OneCall()
    try:
        result = rule(BatchedCall(op, attributes, count, emit), *operands)
    except _NotOneCall:
        return None
    return None if result is None else emit.call


def in_lane(error: PositionError, lane: Sequence[int], naxes: int) -> None:
    """Add the number of the lane to an error.

    The first `naxes` numbers of a position are lane numbers as well.
    """
    numbers, rest = [*lane, *error.position[:naxes]], error.position[naxes:]
    before, after = [f" at position {each}" if each else "" for each in (error.position, rest)]
    place = f"{after} of lane {numbers[0] if len(numbers) == 1 else numbers}"
    error.reason = error.reason.replace(f"{before} is ", f"{place} is ", 1)
    error.position = rest
