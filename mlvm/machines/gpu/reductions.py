"""Reductions by trees, which depend only on shapes, and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.core.ops.strides import around
from mlvm.core.rules import Axis, normalize_axes
from mlvm.core.types import DType, TensorType, f64
from mlvm.machines.gpu.dtypes import computed, extremes, nbytes, scalar
from mlvm.machines.gpu.kernels import (
    GROUP,
    Argument,
    Call,
    Calls,
    Facts,
    Scratch,
    Types,
    flat_call,
    kernel,
    source,
)
from mlvm.machines.gpu.moves import permuted

_CHOICE: Final = 16  # bytes of a value and an index


@dataclass(frozen=True)
class Fold:
    """C expressions of a reduction: map an element, combine two elements, finish the result.

    `of` is the dtype of the computation; "choice" is a value and an index. `defines` are additional
    macros of the source."""

    initial: str
    combine: str
    of: str
    map: str = "(v)"
    finish: str = "(a)"
    defines: tuple[tuple[str, str], ...] = ()

    def text(self, x: str, out: str, wide: int, divisor: str) -> str:
        return source(
            "reduction.c",
            X=x,
            T=out,
            A=self.of,
            D=divisor,
            WIDE=wide,
            INITIAL=self.initial,
            **{"MAP(v, i)": self.map, "COMBINE(a, b)": self.combine, "FINISH(a)": self.finish},
            **dict(self.defines),
        )


def _piece_of(length: int) -> int:
    """Return the number of elements that an item adds; longer columns need several steps."""
    return max(length, 1) if length <= 256 else 128


def fold(
    device: Facts,
    how: Fold,
    out: tuple[Argument, str],
    x: tuple[Argument, str],
    sizes: tuple[int, int, int],
    *,
    centre: tuple[Argument, ...] = (),
    divisor: Any = None,
    scratch: str = "pieces",
) -> list[Call]:
    """Return the calls that reduce the middle axis of three axes.

    `out` and `x` are the memory and the dtype names of the elements; `centre` is an additional
    operand of `MAP` in a centred fold.
    """
    before, length, behind = sizes
    divisor = np.int64(0) if divisor is None else divisor
    in_rows = behind == 1 and length > GROUP
    piece = min(length, 8192) if in_rows else _piece_of(length)
    pieces = max(-(-length // piece), 1)
    last = pieces == 1
    first = how if last else replace(how, finish="(a)")
    item = _CHOICE if how.of == "choice" else DType.named(how.of).itemsize
    to = out if last else (Scratch(scratch, before * pieces * behind * item), how.of)
    wide = 16 if device.is_cpu and behind >= 16 and not in_rows else 1
    items = before * pieces * (GROUP if in_rows else -(-behind // wide))
    text = first.text(x[1], to[1], wide, DType.of(divisor.dtype).name)
    args, numbers = (to[0], x[0], *centre), (before, length, behind, piece, pieces, divisor)
    call = flat_call(text, "rows" if in_rows else "columns", items, args, *numbers)
    if last:
        return [call]
    rest, sizes = replace(how, map="(v)"), (before, pieces, behind)
    more: Any = {"centre": centre, "divisor": divisor, "scratch": scratch + "+"}
    return [call, *fold(device, rest, out, to, sizes, **more)]


def reduced(x: TensorType, axis: Axis) -> tuple[int, int, int] | None:
    """Return the sizes of three axes, the middle axis being the reduced axis.

    Return None if the reduced axes are not adjacent.
    """
    axes = [i for i in normalize_axes(axis, x.ndim) if x.shape[i] != 1]
    if not axes:
        return x.size, 1, 1
    first, last = min(axes), max(axes)
    if any(i not in axes and x.shape[i] != 1 for i in range(first, last)):
        return None
    return around(
        (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]), first
    )


def side_by_side(
    device: Facts, out: TensorType, x: TensorType, axis: Axis
) -> tuple[list[Call], Argument, tuple[int, int, int]]:
    """Return calls that make the reduced axes adjacent, the resulting memory, and three sizes."""
    if x.size == 0:  # the kept axes have elements: the result is the fold's initial value
        return [], 1, (out.size, 0, 1)
    sizes = reduced(x, axis)
    if sizes is not None:
        return [], 1, sizes
    axes = sorted(normalize_axes(axis, x.ndim))
    order = [*[i for i in range(x.ndim) if i not in axes], *axes]
    there = Scratch("moved", x.size * x.dtype.itemsize)
    moves = permuted(device, x, order, (there, 1))
    length = math.prod(x.shape[i] for i in axes)
    return moves, there, (x.size // max(length, 1), length, 1)


def _fold_axes(
    device: Facts,
    types: Types,
    axis: Axis,
    how: Fold,
    divisor: Any = None,
    centre: Fold | None = None,
    by: Any = None,
) -> Calls:
    """Fold axes; `how` may use the result of another fold, `centre`, with the divisor `by`."""
    out, x = types
    calls, there, sizes = side_by_side(device, out, x, axis)
    at, to = (there, x.dtype.name), (0, out.dtype.name)
    if centre is None:
        return [*calls, *fold(device, how, to, at, sizes, divisor=divisor)]
    middle = Scratch("centre", nbytes(DType.named(centre.of), out.size))
    how = replace(how, defines=(("CENTRED", "1"),))
    calls = [*calls, *fold(device, centre, (middle, centre.of), at, sizes, divisor=by)]
    return [*calls, *fold(device, how, to, at, sizes, centre=(middle,), divisor=divisor)]


def _count(types: Types) -> int:
    return types[1].size // max(types[0].size, 1)


_CAST: Final = "((COMPUTED(A))(v))"


def adding(dtype: DType) -> Fold:
    """Return the reduction that sums in a dtype."""
    return Fold("0", "((a) + (b))", computed(dtype).name, _CAST)


def multiplying(dtype: DType) -> Fold:
    """Return the reduction that multiplies in a dtype."""
    return Fold("1", "((a) * (b))", computed(dtype).name, _CAST)


def _wide(x: TensorType) -> DType:
    """Return the dtype of the computation of a mean: the dtype of x, or f64 for integers."""
    return computed(x.dtype) if x.dtype.is_float else f64


@kernel("mean", computes=True)
def _mean(
    device: Facts, types: Types, *, axis: Axis, keepdims: bool, dtype: str | None = None
) -> Calls:
    wide = _wide(types[1]) if dtype is None else computed(types[0].dtype)
    if not device.has(wide):
        return None
    how = replace(adding(wide), finish="((a) / divisor)")
    return _fold_axes(device, types, axis, how, scalar(wide, _count(types)))


@kernel("var", computes=True)
def _var(device: Facts, types: Types, *, axis: Axis, keepdims: bool, correction: float) -> Calls:
    _, x = types
    wide = _wide(x)
    if not device.has(wide):
        return None
    mean = replace(adding(wide), finish="((a) / divisor)")
    squares = replace(mean, map=f"(({_CAST} - middle) * ({_CAST} - middle))")
    by, then = scalar(wide, _count(types)), scalar(wide, max(_count(types) - correction, 0))
    return _fold_axes(device, types, axis, squares, then, mean, by)


@kernel("logsumexp", computes=True)
def _logsumexp(device: Facts, types: Types, *, axis: Axis, keepdims: bool) -> Calls:
    dtype = computed(types[1].dtype)
    peak = replace(_most(dtype), finish="((a) - (a) == 0 ? (a) : 0)")
    powers = replace(adding(dtype), map="(exp((v) - middle))", finish="(log(a) + middle)")
    return _fold_axes(device, types, axis, powers, None, peak)


# --- extremes, decisions --------------------------------------------------------------


def _most(dtype: DType, of: str = ">") -> Fold:
    lowest, highest = extremes(dtype)
    best = f"((a) {of} (b) || (a) != (a) ? (a) : (b))"
    return Fold(lowest if of == ">" else highest, best, computed(dtype).name)


def _position(dtype: DType, of: str) -> Fold:
    defines = (("CHOOSES", dtype.name), ("AHEAD(a, b)", f"((a) {of} (b))"))
    return Fold("NOTHING", "(chosen(a, b))", "choice", "(choice(v, i))", "((a).place)", defines)


_FOLDS: Final[dict[str, Callable[[DType, DType], Fold]]] = {
    "sum": lambda out, x: adding(out),
    "prod": lambda out, x: multiplying(out),
    "max": lambda out, x: _most(x),
    "min": lambda out, x: _most(x, "<"),
    "argmax": lambda out, x: _position(x, ">"),
    "argmin": lambda out, x: _position(x, "<"),
    "any": lambda out, x: Fold("0", "((a) | (b))", "u8", "((v) != 0)"),
    "all": lambda out, x: Fold("1", "((a) & (b))", "u8", "((v) != 0)"),
}
"""Ops that are one fold, by the dtypes of the result and of the operand."""


def _one(name: str, device: Facts, types: Types, /, *, axis: Axis, **_: object) -> Calls:
    out, x = types
    return _fold_axes(device, types, axis, _FOLDS[name](out.dtype, x.dtype))


for _name in _FOLDS:
    kernel(_name, computes=True)(partial(_one, _name))


# --- running sums and products --------------------------------------------------------


def running(
    device: Facts,
    how: Fold,
    out: tuple[Argument, str],
    x: tuple[Argument, str],
    sizes: tuple[int, int, int],
    depth: int = 0,
) -> list[Call]:
    """Compute the running sums, or products, along the middle of three axes.

    The axis is split into pieces, which start with the result of the previous pieces.
    """
    before, length, behind = sizes
    piece = _piece_of(length)
    pieces = -(-length // piece)
    calls: list[Call] = []
    starts: Argument = out[0]  # not read if a single piece exists
    items = before * pieces * behind
    numbers = (before, length, behind, piece, pieces)
    if pieces > 1:
        count = nbytes(DType.named(how.of), items)
        totals, starts = Scratch(f"totals{depth}", count), Scratch(f"starts{depth}", count)
        text = how.text(x[1], how.of, 1, "i64")
        call = flat_call(text, "columns", items, (totals, x[0]), *numbers, 0)
        middle = (before, pieces, behind)
        sums = (totals, how.of)
        calls = [call, *running(device, how, (starts, how.of), sums, middle, depth + 1)]
    text = how.text(x[1], out[1], 1, "i64")
    return [*calls, flat_call(text, "scan", items, (out[0], x[0], starts), *numbers)]


def _cumulative(
    how: Callable[[DType], Fold],
    device: Facts,
    types: Types,
    /,
    *,
    axis: int | None,
    dtype: str | None,
) -> Calls:
    out, x = types
    sizes = around(x.shape, 0 if axis is None else axis)
    return running(device, how(out.dtype), (0, out.dtype.name), (1, x.dtype.name), sizes)


kernel("cumulative_sum", computes=True)(partial(_cumulative, adding))
kernel("cumulative_prod", computes=True)(partial(_cumulative, multiplying))
