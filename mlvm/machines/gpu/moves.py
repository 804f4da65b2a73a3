"""Kernels that move or fill elements, with one source for all ops of `move`.

An op is divided into windows: regular parts of a tensor, given by lengths, and by a first element
and strides in both tensors. Elements that are only moved are treated as integers of the same size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.ops.half import cast
from mlvm.core.ops.strides import broadcast_steps, merged, packed
from mlvm.core.rules import normalize_axes, normalize_axis
from mlvm.core.types import DType, Shape, TensorType
from mlvm.machines.gpu.dtypes import RAW
from mlvm.machines.gpu.kernels import Argument, Call, Calls, Facts, Types, flat_call, kernel, source

_RUN: Final = 32  # elements along the innermost axis per item on a processor


class Window(NamedTuple):
    """Elements of a packed tensor: the index of the first, and the stride along each axis."""

    first: int
    steps: tuple[int, ...]


def whole(shape: Sequence[int], first: int = 0) -> Window:
    return Window(first, tuple(packed(shape)))


def part(shape: Shape, start: Sequence[int], step: Sequence[int]) -> Window:
    """Return the window that `slice` reads from a tensor of a shape."""
    steps = packed(shape)
    first = sum(a * b for a, b in zip(start, steps, strict=True))
    return Window(first, tuple([a * b for a, b in zip(step, steps, strict=True)]))


def broadcast(shape: Shape, to: Shape) -> Window:
    """Return the window that broadcasts a tensor to a shape."""
    return Window(0, tuple(broadcast_steps(shape, len(to))))


def move(
    device: Facts,
    lengths: Sequence[int],
    out: Window,
    x: Window,
    dtype: DType,
    to: DType | None = None,
    args: tuple[Argument, Argument] = (0, 1),
    add: bool = False,
) -> list[Call]:
    """Return the calls that move elements from a window of `args[1]` to a window of `args[0]`."""
    longer = [axis for axis in zip(lengths, out.steps, x.steps, strict=True) if axis[0] != 1]
    axes = merged(longer)[::-1] or [(1, 1, 1)]
    first, start = out.first, x.first
    moved = to is None or (to is dtype and not add)
    if moved and dtype.itemsize == 16:  # moved as two integers
        axes = [(2, 1, 1), *[(n, 2 * o, 2 * s) for n, o, s in axes]]
        first, start = 2 * first, 2 * start
    total = math.prod([n for n, _, _ in axes])
    if not total:
        return []
    most = 6  # axes of the kernel, without the innermost axis
    if len(axes) > most:  # one call for each index of the outermost axis
        n, o, s = axes[-1]
        inner = [*zip(*axes[:-1], strict=True)]
        return [
            call
            for i in range(n)
            for call in move(
                device,
                inner[0],
                Window(out.first + i * o, inner[1]),
                Window(x.first + i * s, inner[2]),
                DType.named(RAW[dtype.itemsize]) if moved else dtype,
                None if moved else to,
                args,
                add,
            )
        ]
    names = dict.fromkeys(("DT", "TO"), RAW[dtype.itemsize])
    if not moved:
        names = {"DT": dtype.name, "TO": (to or dtype).name}
    run = _RUN if device.is_cpu and axes[0][0] >= _RUN else 1
    text = source(
        "moves.h",
        **names,
        RUN=run,
        INDEX="u32" if total < 1 << 32 else "i64",
        **({"ADD": 1} if add else {}),
    )
    (n, o, s), *others = axes
    blocks = -(-n // run)
    outer = [(blocks, o * run, s * run), *others, *[(1, 0, 0)] * (most - len(axes))]
    items = total // n * blocks
    numbers = [items, first, start, n, o, s, *itertools.chain(*outer)]
    return [flat_call(text, "move", items, args, *numbers)]


def begin_as(device: Facts, x: TensorType, args: tuple[Argument, Argument] = (0, 1)) -> list[Call]:
    """Copy an operand to the result, unless they are the same memory.

    The launcher omits the call in that case.
    """
    calls = move(device, (x.size,), Window(0, (1,)), Window(0, (1,)), x.dtype, args=args)
    return [call._replace(begins=True) for call in calls]


def fill(out: TensorType, value: float | complex, argument: Argument = 0) -> list[Call]:
    """Return the calls that fill the result with a value."""
    one = _bits(out, value)
    count = out.nbytes // one.itemsize
    return [_created("fill", one.dtype, count, (argument,), count, one)]


def _bits(out: TensorType, value: float | complex) -> np.generic:
    """Return the bits of an element as an integer of the same size; 0 for 16 bytes."""
    bits = cast(np.asarray(value), out.dtype).reshape(1).view(np.uint8)
    element: np.generic = bits[:8].view(DType.named(RAW[out.dtype.itemsize]).numpy)[0]
    return element


def _created(
    entry: str,
    dtype: np.dtype[Any],
    count: int,
    args: tuple[Argument, ...],
    *numbers: int | np.generic,
) -> Call:
    text = source("creation.h", DT=DType.of(dtype).name)
    return flat_call(text, entry, count, args, *numbers)


# --- shapes and axes -----------------------------------------------------------------


@kernel("reshape")
def _reshape(device: Facts, types: Types, *, shape: Shape) -> Calls:
    _, x = types
    return move(device, (x.size,), Window(0, (1,)), Window(0, (1,)), x.dtype)


@kernel("permute_dims")
def _permute_dims(device: Facts, types: Types, *, axes: tuple[int, ...]) -> Calls:
    return permuted(device, types[1], normalize_axes(axes, types[1].ndim))


def permuted(
    device: Facts, x: TensorType, axes: Sequence[int], args: tuple[Argument, Argument] = (0, 1)
) -> list[Call]:
    """Return the calls that permute the axes of a tensor."""
    shape, steps = [x.shape[i] for i in axes], packed(x.shape)
    strided = Window(0, tuple([steps[i] for i in axes]))
    return move(device, shape, whole(shape), strided, x.dtype, args=args)


@kernel("concat")
def _concat(device: Facts, types: Types, *, axis: int) -> Calls:
    out, *xs = types
    if any(not device.has(x.dtype) for x in types if x.dtype is not out.dtype) or (
        out.dtype.kind == "complex" and any(x.dtype is not out.dtype for x in xs)
    ):
        return None
    axis = normalize_axis(axis, out.ndim)
    at, calls = 0, []
    for i, x in enumerate(xs, 1):
        start = [at if d == axis else 0 for d in range(out.ndim)]
        place = part(out.shape, start, (1,) * out.ndim)
        calls += move(device, x.shape, place, whole(x.shape), x.dtype, out.dtype, (0, i))
        at += x.shape[axis]
    return calls


# --- windows -------------------------------------------------------------------------


@kernel("flip")
def _flip(device: Facts, types: Types, *, axis: int | tuple[int, ...] | None) -> Calls:
    out, x = types
    turned = normalize_axes(axis, x.ndim)
    start = [x.shape[d] - 1 if d in turned else 0 for d in range(x.ndim)]
    step = [-1 if d in turned else 1 for d in range(x.ndim)]
    return move(device, x.shape, whole(out.shape), part(x.shape, start, step), x.dtype)


@kernel("roll")
def _roll(
    device: Facts, types: Types, *, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None
) -> Calls:
    """Exchange two parts along each axis."""
    _, x = types
    shape = x.shape if axis is not None else (x.size,)
    axes = normalize_axes(axis, x.ndim) if axis is not None else (0,)
    rolled = axis if isinstance(axis, tuple) else (axis or 0,)
    by = [0] * len(shape)
    for i, d in enumerate(rolled if axis is not None else axes):
        by[normalize_axis(d, max(len(shape), 1))] += shift[i] if isinstance(shift, tuple) else shift
    pieces = []
    for n, k in zip(shape, by, strict=True):
        k %= n
        pieces.append([(k, 0, n - k), *([(0, n - k, k)] if k else [])])  # to, from, count
    ones = (1,) * len(shape)
    return [
        call
        for piece in itertools.product(*pieces)
        for call in move(
            device,
            [n for _, _, n in piece],
            part(shape, [to for to, _, _ in piece], ones),
            part(shape, [start for _, start, _ in piece], ones),
            x.dtype,
        )
    ]


@kernel("pad")
def _pad(
    device: Facts, types: Types, *, widths: tuple[tuple[int, int], ...], value: float
) -> Calls:
    out, x = types
    if out.dtype.itemsize == 16 and value:
        return None
    place = part(out.shape, [before for before, _ in widths], (1,) * out.ndim)
    return [*fill(out, value), *move(device, x.shape, place, whole(x.shape), x.dtype)]


@kernel("slice")
def _slice(device: Facts, types: Types, *, start: Shape, length: Shape, step: Shape) -> Calls:
    out, x = types
    return move(device, length, whole(out.shape), part(x.shape, start, step), x.dtype)


@kernel("embed")
def _embed(device: Facts, types: Types, *, shape: Shape, start: Shape, step: Shape) -> Calls:
    out, x = types
    calls = move(device, x.shape, part(out.shape, start, step), whole(x.shape), x.dtype)
    return [*fill(out, 0), *calls]


@kernel("slice_add")
def _slice_add(device: Facts, types: Types, *, start: Shape, step: Shape) -> Calls:
    out, _, updates = types
    if not device.has(out.dtype):
        return None
    place = part(out.shape, start, step)
    dtype = updates.dtype
    added = move(
        device, updates.shape, place, whole(updates.shape), dtype, out.dtype, (0, 2), add=True
    )
    return [*begin_as(device, out), *added]


@kernel("slice_set")
def _slice_set(device: Facts, types: Types, *, start: Shape, length: Shape, step: Shape) -> Calls:
    out, _, values = types
    place = part(out.shape, start, step)
    source_window = broadcast(values.shape, length)
    return [
        *begin_as(device, out),
        *move(device, length, place, source_window, out.dtype, args=(0, 2)),
    ]


@kernel("gather_lanes")
def _gather_lanes(device: Facts, types: Types, *, axis_name: str, size: int) -> Calls:
    out, x, _ = types
    return move(device, out.shape, whole(out.shape), broadcast(x.shape, out.shape), x.dtype)


# --- triangles, creation -------------------------------------------------------------


def _triangle(sign: int, device: Facts, types: Types, /, *, k: int) -> Calls:
    out, x = types
    raw = DType.named(RAW[x.dtype.itemsize]).numpy
    parts = x.dtype.itemsize // raw.itemsize
    rows, columns = x.shape[-2:]
    k = max(-rows - columns, min(sign * k, rows + columns))
    count = out.size * parts
    return [_created("triangle", raw, count, (0, 1), count, rows, columns, sign, k, parts)]


kernel("tril")(partial(_triangle, 1))
kernel("triu")(partial(_triangle, -1))


@kernel("full")
def _full(device: Facts, types: Types, *, shape: Shape) -> Calls:
    out, value = types
    return move(device, out.shape, whole(out.shape), broadcast((), out.shape), value.dtype)


@kernel("zeros")
def _zeros(device: Facts, types: Types, *, shape: Shape, dtype: str) -> Calls:
    return fill(types[0], 0)


@kernel("eye")
def _eye(device: Facts, types: Types, *, rows: int, columns: int, k: int, dtype: str) -> Calls:
    [out] = types
    if out.dtype.itemsize == 16:
        return None
    one = _bits(out, 1)
    numbers = out.size, columns, max(-rows, min(k, columns)), one
    return [_created("eye", one.dtype, out.size, (0,), *numbers)]


@kernel("arange")
def _arange(
    device: Facts, types: Types, *, start: float, stop: float, step: float, dtype: str
) -> Calls:
    """Return the calls for integers; floats are computed on the host, in f64."""
    [out] = types
    if not out.dtype.is_integer:
        return None
    first, by = [np.uint64(int(each) % 2**64) for each in (start, step)]
    return [_created("arange", out.dtype.numpy, out.size, (0,), out.size, first, by)]
