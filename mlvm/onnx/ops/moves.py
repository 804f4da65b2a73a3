"""Ops that move elements, and ops on shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.ops.half import widened
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType
from mlvm.onnx.arrays import is_known
from mlvm.onnx.table import NodeCall, enter_all, op
from mlvm.onnx.values import (
    PermutedTensor,
    Value,
    are_known,
    bounded,
    in_memory,
    inverse,
    ordered,
    permuted,
    plain,
    tensor,
)

enter_all(
    "raw",
    {
        "Identity": lambda at, x: x,
        "Size": lambda at, x: np.asarray(math.prod(x.shape), np.int64),
        "SequenceConstruct": lambda at, *xs: ([*xs],),
        "SequenceEmpty": lambda at: ([],),
        "SequenceLength": lambda at, xs: np.asarray(len(xs), np.int64),
        "Optional": lambda at, x=None: (x,),
        "OptionalHasElement": lambda at, x=None: np.asarray(x is not None),
        "OptionalGetElement": lambda at, x: (x,),
    },
)


@op("Constant", "raw")
def constant(at: NodeCall) -> Value:
    for name, value in at.node.attributes.items():
        if name in ("value", "sparse_value"):
            return value
        if name.startswith("value_float"):
            return np.asarray(value, np.float32)
        if name.startswith("value_int"):
            return np.asarray(value, np.int64)
    raise ModelError("expected a constant with numbers, got strings or an empty constant")


@op("Shape", "raw")
def shape(at: NodeCall, x: Value) -> Value:
    return np.asarray(x.shape[slice(at.get("start", 0), at.get("end"))], np.int64)


@op("Transpose", "raw")
def transpose(at: NodeCall, x: Value) -> Value:
    axes = tuple(at.get("perm") or reversed(range(x.ndim)))
    if sorted(axes) != list(range(x.ndim)):
        raise ModelError(f"expected perm to order {x.ndim} axes, got {list(axes)}")
    if isinstance(x, np.ndarray):
        return np.transpose(x, axes)
    y, order = in_memory(x)
    return permuted(y, [order[axis] for axis in axes])


@op("Reshape", host=[1], older={1: "shape"})
def reshape(at: NodeCall, x: Any, shape: Any) -> Any:
    target = [int(n) for n in shape]
    if not at.get("allowzero", 0):
        target = [x.shape[i] if n == 0 and i < x.ndim else n for i, n in enumerate(target)]
    return at.xp.reshape(x, tuple(target))


@op("Flatten")
def flatten(at: NodeCall, x: Any) -> Any:
    axis = at.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return at.xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("Squeeze", host=[1], older={1: "axes"})
def squeeze(at: NodeCall, x: Any, axes: Any = None) -> Any:
    if axes is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    return at.xp.squeeze(x, axis=tuple(int(n) for n in axes))


@op("Unsqueeze com.microsoft.ExpandDims", host=[1], older={1: "axes"})
def unsqueeze(at: NodeCall, x: Any, axes: Any) -> Any:
    chosen = [int(n) for n in np.ravel(axes)]
    ndim = x.ndim + len(chosen)
    placed = {axis + ndim if axis < 0 else axis for axis in chosen}
    if len(placed) != len(chosen) or not placed <= {*range(ndim)}:
        raise ModelError(f"expected distinct axes of {ndim}, got {list(chosen)}")
    rest = iter(x.shape)
    return at.xp.reshape(x, tuple(1 if i in placed else next(rest) for i in range(ndim)))


@op("Concat", "raw")
def concat(at: NodeCall, *xs: Value) -> Value:
    axis = normalize_axis(at["axis"], xs[0].ndim)
    if are_known(xs):
        return np.concatenate(xs, axis=axis)
    lies = [x.axes for x in xs if type(x) is PermutedTensor]
    if lies and len({*lies}) == 1 and len(lies) * 2 > len(xs):
        order = inverse(lies[0])
        parts = [x.x if type(x) is PermutedTensor else ordered(tensor(x), order) for x in xs]
        return PermutedTensor(ml.concat(parts, axis=lies[0][axis]), lies[0])
    return ml.concat([tensor(x) for x in xs], axis=axis)


@op("Split", "raw", host=[1], older={1: "split"})
def split(at: NodeCall, x: Value, sizes: Any = None) -> Value:
    axis = normalize_axis(at.get("axis", 0), x.ndim)
    length = x.shape[axis]
    lengths = [] if sizes is None else sizes.reshape(-1).tolist()
    if not lengths:
        named = len(at.node.outputs)
        count = at.get("num_outputs", named)
        if count != named:
            raise ModelError(f"expected {named} parts, one for each output, got {count}")
        each = -(-length // count)
        lengths = [min(each, length - each * i) for i in range(count)]
    if sum(lengths) != length or min(lengths, default=0) < 0:
        raise ModelError(f"expected parts that add up to {length}, got {lengths}")
    ends = np.cumsum(lengths).tolist()[:-1]
    if is_known(x):
        return tuple(np.split(x, ends, axis=axis))
    y, order = in_memory(x)
    return tuple(permuted(part, order) for part in ml.split(y, ends, axis=order[axis]))


@op("Slice", "raw", host=[1, 2, 3, 4], older={1: "starts", 2: "ends", 3: "axes"})
def slice_(
    at: NodeCall, x: Value, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Value:
    axes = np.arange(starts.size) if axes is None else axes
    steps = np.ones_like(starts) if steps is None else steps
    index = [slice(None)] * x.ndim
    rows = (row.reshape(-1).tolist() for row in (starts, ends, axes, steps))
    for start, end, axis, each in zip(*rows, strict=True):
        if each == 0 or not -x.ndim <= axis < x.ndim:
            raise ModelError(
                f"expected a step other than 0 on one of {x.ndim} axes, got {each} on axis {axis}"
            )
        length = x.shape[axis]
        if each > 0:
            index[axis] = slice(*slice(start, end, each).indices(length))
            continue
        start = max(min(start + length if start < 0 else start, length - 1), 0)
        end = end + length if -length <= end < 0 else end
        index[axis] = slice(start, None if end < 0 else end, each)
    if is_known(x):
        return x[tuple(index)]
    y, order = in_memory(x)
    return permuted(y[tuple(index[axis] for axis in inverse(order))], order)


@op("Expand", host=[1])
def expand(at: NodeCall, x: Any, shape: Any) -> Any:
    target = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
    if target == tuple(x.shape):
        return x
    return at.xp.broadcast_to(x, bounded(target, at.is_host))


@op("Tile", host=[1])
def tile(at: NodeCall, x: Any, repeats: Any) -> Any:
    times = tuple(int(n) for n in repeats)
    bounded([n * m for n, m in zip(x.shape, times, strict=True)], at.is_host)
    return at.xp.tile(x, times)


@op("ConstantOfShape", host=[0])
def constant_of_shape(at: NodeCall, shape: Any) -> Any:
    value = at.get("value")
    value = np.zeros(1, np.float32) if value is None else value
    target = bounded(shape, value.dtype.kind != "V")
    if value.dtype.kind == "V":
        return ml.broadcast_to(ml.asarray(value.reshape(())), target)
    return np.full(target, value.reshape(-1)[0], value.dtype)


@op("Range com.microsoft.Range", host=[0, 1, 2])
def range_(at: NodeCall, start: Any, limit: Any, delta: Any = None) -> Any:
    first, step = start.item(), 1 if delta is None else delta.item()
    count = max(math.ceil((limit.item() - first) / step), 0) if step else -1
    bounded((count,))
    return (first + np.arange(count) * step).astype(start.dtype)


@op("EyeLike", "raw")
def eye_like(at: NodeCall, x: Value) -> Value:
    from mlvm.onnx.arrays import dtype_of

    number = at.get("dtype")
    dtype = DType.of(x.dtype) if number is None else dtype_of(number, str(at.node))
    rows, columns = bounded(x.shape)
    return np.eye(rows, columns, at.get("k", 0)).astype(dtype.numpy)


@op("Pad com.microsoft.Pad", "raw", host=[1, 2, 3], older={1: "pads paddings", 2: "value"})
def pad(at: NodeCall, x: Value, pads: Any, value: Any = None, axes: Any = None) -> Value:
    ends, fill = pads.reshape(-1).tolist(), 0.0
    if value is not None and value.size:
        fill = np.ravel(widened(value) if value.dtype.kind == "V" else value)[0].item()
    which = range(x.ndim) if axes is None else axes.reshape(-1).tolist()
    half = len(ends) // 2
    widths = [(0, 0)] * x.ndim
    for axis, low, high in zip(which, ends[:half], ends[half:], strict=True):
        widths[axis] = low, high
    mode = at.get("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):  # numpy has further modes: "empty"
        raise ModelError(f"expected mode as constant, reflect, edge or wrap, got {mode!r}")
    if is_known(x) and min(min(each) for each in widths) >= 0:
        bounded([n + sum(each) for n, each in zip(x.shape, widths, strict=True)])
        options: Any = {"constant_values": fill} if mode == "constant" else {}
        pad_by: Any = np.pad
        return pad_by(x, widths, mode, **options)
    x, order = in_memory(x)
    widths = [widths[axis] for axis in inverse(order)]
    added = [(max(low, 0), max(high, 0)) for low, high in widths]
    if mode == "constant":  # an axis may lose elements of the border of the other side
        return permuted(_cut(ml.pad(x, added, fill), widths), order)
    return permuted(ml.pad(_cut(x, widths), added, mode=mode), order)


def _cut(x: Any, widths: Any) -> Any:
    """Remove as many elements from each side as its negative width says."""
    if min((min(each) for each in widths), default=0) >= 0:
        return x
    pairs = zip(x.shape, widths, strict=True)
    return x[tuple(slice(max(-low, 0), max(n + min(high, 0), 0)) for n, (low, high) in pairs)]


@op("DepthToSpace", "raw")
def depth_to_space(at: NodeCall, x: Value) -> Value:
    x, r = tensor(x), at["blocksize"]
    n, c, *places = x.shape
    inner = c // r ** len(places)
    if at.get("mode", "DCR") == "DCR":
        x = ml.permute_dims(ml.reshape(x, (n, r, r, inner, *places)), (0, 3, 4, 1, 5, 2))
    else:
        x = ml.permute_dims(ml.reshape(x, (n, inner, r, r, *places)), (0, 1, 4, 2, 5, 3))
    return ml.reshape(x, (n, inner, places[0] * r, places[1] * r))


@op("SpaceToDepth", "raw")
def space_to_depth(at: NodeCall, x: Value) -> Value:
    x, r = tensor(x), at["blocksize"]
    n, c, height, width = x.shape
    x = ml.reshape(x, (n, c, height // r, r, width // r, r))
    axes = (0, 3, 5, 1, 2, 4) if at.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return ml.reshape(ml.permute_dims(x, axes), (n, c * r * r, height // r, width // r))


@op("CenterCropPad", host=[1])
def center_crop_pad(at: NodeCall, x: Any, shape: Any) -> Any:
    axes = at.get("axes") or range(x.ndim)
    if len(axes) != len(shape):
        raise ModelError(f"expected a length for each of {len(axes)} axes, got {len(shape)}")
    for axis, target in zip(axes, shape, strict=True):
        n, k = x.shape[axis], int(target)
        index, widths = [slice(None)] * x.ndim, [(0, 0)] * x.ndim
        if k < n:
            index[axis] = slice((n - k) // 2, (n - k) // 2 + k)
            x = x[tuple(index)]
        elif k > n:
            widths[axis] = (k - n) // 2, k - n - (k - n) // 2
            bounded([k if i == axis else m for i, m in enumerate(x.shape)], at.is_host)
            x = np.pad(x, widths) if at.is_host else ml.pad(x, widths)
    return x


@op("Trilu com.microsoft.Trilu", host=[1])
def trilu(at: NodeCall, x: Any, k: Any = None) -> Any:
    by = 0 if k is None else int(k.reshape(-1)[0])
    return (at.xp.triu if at.get("upper", 1) else at.xp.tril)(x, k=by)


@op("ReverseSequence", "tensors", host=[1])
def reverse_sequence(at: NodeCall, x: Any, lengths: Any) -> Any:
    batch, time = at.get("batch_axis", 1), at.get("time_axis", 0)
    place = np.arange(x.shape[time])[:, None]
    ends = lengths.reshape(1, -1)
    places = np.where(place < ends, ends - 1 - place, place)
    shape = [1] * x.ndim
    shape[time], shape[batch] = x.shape[time], x.shape[batch]
    places = (places if time < batch else places.T).reshape(shape)
    return ml.take_along_axis(x, ml.asarray(places), axis=time)


# --- sequences and optional values --------------------------------------------------------


@op("SequenceAt", "raw", host=[1])
def sequence_at(at: NodeCall, xs: Value, position: Any) -> Value:
    return xs[int(position.reshape(-1)[0])]


@op("SequenceInsert", "raw", host=[2])
def sequence_insert(at: NodeCall, xs: Value, x: Value, position: Any = None) -> Value:
    at_ = len(xs) if position is None else int(position.reshape(-1)[0])
    if not -len(xs) <= at_ <= len(xs):
        raise ModelError(f"expected a position of {len(xs)} elements, got {at_}")
    items = [*xs]
    items.insert(at_, x)
    return (items,)


@op("SequenceErase", "raw", host=[1])
def sequence_erase(at: NodeCall, xs: Value, position: Any = None) -> Value:
    items = [*xs]
    del items[-1 if position is None else int(position.reshape(-1)[0])]
    return (items,)


@op("ConcatFromSequence", "raw")
def concat_from_sequence(at: NodeCall, xs: Value) -> Value:
    if at.get("new_axis", 0):
        return ml.stack([tensor(x) for x in xs], axis=at["axis"])
    return concat(at, *xs)


@op("SplitToSequence", "raw", host=[1])
def split_to_sequence(at: NodeCall, x: Value, sizes: Any = None) -> Value:
    x, axis = plain(x), at.get("axis", 0)
    xp, length = (np, x.shape[axis]) if is_known(x) else (ml, x.shape[axis])
    if sizes is None:
        each = 1
    elif sizes.ndim == 0:
        each = int(sizes)
    else:
        return ([*xp.split(x, np.cumsum(sizes).tolist()[:-1], axis=axis)],)
    parts = [*xp.split(x, [*range(each, length, each)], axis=axis)]
    if sizes is None and not at.get("keepdims", 1):
        parts = [xp.squeeze(part, axis=axis) for part in parts]
    return (parts,)
