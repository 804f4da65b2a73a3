"""Recurrences: a recurrent cell applied to a whole sequence in one call.

Let h (and c for an LSTM) be the state before a step, p the row of `projected`, b the `bias`, and q
= h kernel, with columns for the gates:

    tanh, relu   h' = tanh(p + b + q), or relu of it
    lstm         i, f, g, o = p + b + q;  c' = sigmoid(f) c + sigmoid(i) tanh(g);
                 h' = sigmoid(o) tanh(c')
    gru          r, z = p + b + q;  n = tanh(p + sigmoid(r) (q + b));  h' = n + sigmoid(z) (h - n)

These are the formulas and the order of gates of PyTorch's `RNN`, `LSTM` and `GRU`. A sequence
finishes after `lengths` steps, if that many exist; the state is then constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.op import internal
from mlvm.core.ops.elementwise import sigmoid
from mlvm.core.rules import require, require_one_float_dtype
from mlvm.core.types import Array, TensorType, f32

Cell: TypeAlias = Literal["tanh", "relu", "lstm", "gru"]


class CellKind(NamedTuple):
    """Kind of recurrent cell.

    `gates`: columns of a kernel for each element of the state.
    `parts`: number of parts of a state: h, and for an LSTM c.
    `saved_sums`: number of sums that the backward pass reads: p + b + q of each gate, but q + b for
        n of a gru.
    `cotangents`: number of cotangents in the backward pass: for p + b + q; for a gru first for p of
        n, then for q.
    `step`, `pull`: one step of the op and one step of the vjp.
    """

    gates: int
    parts: int
    saved_sums: int
    cotangents: int
    step: Callable[..., Array]
    pull: Callable[..., Array]


# --- type rules ----------------------------------------------------------------------


def _lengths(lengths: TensorType, batch: int) -> None:
    require("integer", lengths)
    if lengths.shape != (batch,):
        raise ShapeError(f"expected lengths as [{batch}], one per sequence, got {lengths}")


def _recurrence(
    projected: TensorType,
    state: TensorType,
    kernel: TensorType,
    bias: TensorType,
    lengths: TensorType,
    cell: Cell,
    reverse: bool,
    keep: bool,
) -> TensorType:
    require_one_float_dtype(projected, state, bias)
    if kernel.dtype is not projected.dtype and not (
        kernel.dtype.is_half and projected.dtype is f32
    ):
        raise DTypeError(
            f"expected a kernel of {projected.dtype.name}, like the other operands, "
            f"got {kernel.dtype.name}"
        )
    gates, parts, saved_sums, *_ = CELLS[cell]
    if projected.ndim != 3 or state.ndim != 3:
        raise ShapeError(
            f"expected projected [time, batch, gates * hidden] and state [parts, batch, hidden], "
            f"got {projected} and {state}"
        )
    time, batch, width = projected.shape
    hidden = state.shape[2]
    if state.shape[:2] != (parts, batch) or width != gates * hidden:
        raise ShapeError(
            f"expected the state of {cell} as [{parts}, {batch}, hidden], and projected as "
            f"[{time}, {batch}, {gates} * hidden], got {state} and {projected}"
        )
    if kernel.shape != (hidden, width) or bias.shape != (width,):
        raise ShapeError(
            f"expected kernel [{hidden}, {width}] and bias [{width}], got {kernel} and {bias}"
        )
    _lengths(lengths, batch)
    return TensorType(projected.dtype, (parts + keep * saved_sums, time + 1, batch, hidden))


def _recurrence_vjp(
    g: TensorType,
    last: TensorType,
    projected: TensorType,
    states: TensorType,
    turned: TensorType,
    lengths: TensorType,
    cell: Cell,
    reverse: bool,
) -> TensorType:
    require_one_float_dtype(g, last, projected, states)
    require("float", turned)
    if g.ndim != 3:
        raise ShapeError(f"expected g as [time, batch, hidden], got {g}")
    time, batch, hidden = g.shape
    gates, parts, saved_sums, cotangents, *_ = CELLS[cell]
    sums = time, batch, gates * hidden
    stored = parts + saved_sums, time + 1, batch, hidden
    expected = (parts, batch, hidden), sums, stored, (gates * hidden, hidden)
    if (last.shape, projected.shape, states.shape, turned.shape) != expected:
        actual = last.shape, projected.shape, states.shape, turned.shape
        raise ShapeError(
            f"expected last, projected, states and turned of shapes {expected}, got {actual}"
        )
    _lengths(lengths, batch)
    return TensorType(states.dtype, (g.size * cotangents + last.size,))


def _flops(projected: TensorType, state: TensorType, kernel: TensorType, *_: object, **__: object
) -> int:  # fmt: skip
    return 2 * projected.shape[0] * projected.shape[1] * kernel.size


def _vjp_flops(g: TensorType, last: TensorType, projected: TensorType, states: TensorType,
               turned: TensorType, *_: object, **__: object) -> int:  # fmt: skip
    return 2 * g.shape[0] * g.shape[1] * turned.size


# --- ops -----------------------------------------------------------------------------


@internal(infer=_recurrence, flops=_flops)
def recurrence(
    out: Array,
    projected: Array,
    state: Array,
    kernel: Array,
    bias: Array,
    lengths: Array,
    *,
    cell: Cell,
    reverse: bool = False,
    keep: bool = False,
) -> None:
    """The states before and after all steps, and optionally the sums of the gates.

    f[time, batch, gates * hidden], f[parts, batch, hidden], f[hidden, gates * hidden], f[gates *
    hidden] and i[batch] -> f[parts, time + 1, batch, hidden].

    h is the first part, c the second. `state` is the row before the first step; with `reverse` the
    steps run from the last row to the first, and `state` is the last row. The kernel may be in half
    precision if the rest is f32: h is then rounded to it, and sums are f32. With `keep`, each
    step's sums for the backward pass follow as more parts; they are 0 after the end of a sequence.
    """
    time, kind = len(projected), CELLS[cell]
    parts = kind.parts
    out[:parts, time if reverse else 0] = state
    out[parts:, time] = 0
    for t in range(time)[:: -1 if reverse else 1]:
        before, after = out[:parts, t + reverse], out[:parts, t + (not reverse)]
        sums = kind.step(after, projected[t], bias, before[0] @ kernel, before)
        ended = (t >= lengths)[:, None]
        np.copyto(after, before, where=ended)
        for part, each in zip(out[parts:, t], np.split(sums, kind.gates, -1), strict=False):
            part[...] = np.where(ended, 0, each)


@internal(infer=_recurrence_vjp, flops=_vjp_flops)
def recurrence_vjp(
    out: Array,
    g: Array,
    last: Array,
    projected: Array,
    states: Array,
    turned: Array,
    lengths: Array,
    *,
    cell: Cell,
    reverse: bool = False,
) -> None:
    """The vjp of `recurrence`, flat: cotangents of each step and sequence, then of `state`.

    g are the cotangents of h after each step, `last` the cotangents of the last state. `states` are
    the states and sums that `recurrence` saved, `turned` is the kernel's transpose.
    """
    time, batch, (gates, parts, _, ncotangents, _, pull) = *g.shape[:2], CELLS[cell]
    width = len(turned) // gates * ncotangents
    cotangents = out[: g.size * ncotangents].reshape(time, batch, width)
    carried = last.copy()
    for t in range(time)[:: 1 if reverse else -1]:
        before, after = states[:parts, t + reverse], states[:parts, t + (not reverse)]
        ended = (t >= lengths)[:, None]
        carried[0] += g[t]
        through = pull(cotangents[t], carried, states[parts:, t], projected[t], before, after)
        np.copyto(cotangents[t], 0, where=ended)
        through[0] += cotangents[t, :, -len(turned) :] @ turned
        np.copyto(carried, through, where=~ended)
    out[cotangents.size :] = carried.reshape(-1)


def _sigmoid(x: Array) -> Array:
    y = np.empty_like(x)
    sigmoid.kernel(y, x)
    return y


def _tanh_step(after: Array, p: Array, b: Array, q: Array, before: Array) -> Array:
    np.tanh(p + b + q, after[0])
    return p


def _relu_step(after: Array, p: Array, b: Array, q: Array, before: Array) -> Array:
    np.maximum(p + b + q, 0, out=after[0])
    return p


def _lstm_step(after: Array, p: Array, b: Array, q: Array, before: Array) -> Array:
    sums = p + b + q
    i, f, g, o = np.split(sums, 4, -1)
    np.add(_sigmoid(f) * before[1], _sigmoid(i) * np.tanh(g), after[1])
    np.multiply(_sigmoid(o), np.tanh(after[1]), after[0])
    return sums


def _gru_step(after: Array, p: Array, b: Array, q: Array, before: Array) -> Array:
    hidden = before.shape[-1]
    sums = np.concatenate([(p + b + q)[:, : 2 * hidden], (q + b)[:, 2 * hidden :]], -1)
    r, z, q = np.split(sums, 3, -1)
    n = np.tanh(p[:, 2 * hidden :] + _sigmoid(r) * q)
    np.add(n, _sigmoid(z) * (before[0] - n), after[0])
    return sums


def _tanh_pull(out: Array, g: Array, sums: Array, p: Array, before: Array, after: Array) -> Array:
    np.multiply(g[0], 1 - after[0] * after[0], out)
    return np.zeros_like(g)


def _relu_pull(out: Array, g: Array, sums: Array, p: Array, before: Array, after: Array) -> Array:
    np.multiply(g[0], after[0] > 0, out)
    return np.zeros_like(g)


def _lstm_pull(out: Array, g: Array, sums: Array, p: Array, before: Array, after: Array) -> Array:
    i, f, o = map(_sigmoid, sums[[0, 1, 3]])
    n, y = np.tanh(sums[2]), np.tanh(after[1])
    c = g[1] + g[0] * o * (1 - y * y)
    parts = c * n * i * (1 - i), c * before[1] * f * (1 - f), c * i * (1 - n * n)
    np.concatenate([*parts, g[0] * y * o * (1 - o)], -1, out)
    return np.stack([np.zeros_like(c), c * f])


def _gru_pull(out: Array, g: Array, sums: Array, p: Array, before: Array, after: Array) -> Array:
    r, z, q = _sigmoid(sums[0]), _sigmoid(sums[1]), sums[2]
    n = np.tanh(p[:, -q.shape[1] :] + r * q)
    new = g[0] * (1 - z) * (1 - n * n)
    parts = new * q * r * (1 - r), g[0] * (before[0] - n) * z * (1 - z)
    np.concatenate([new, *parts, new * r], -1, out)
    through: Array = g[:1] * z
    return through


CELLS: Final[Mapping[str, CellKind]] = {
    "tanh": CellKind(1, 1, 0, 1, _tanh_step, _tanh_pull),
    "relu": CellKind(1, 1, 0, 1, _relu_step, _relu_pull),
    "lstm": CellKind(4, 2, 4, 4, _lstm_step, _lstm_pull),
    "gru": CellKind(3, 1, 3, 4, _gru_step, _gru_pull),
}
"""Kinds of cells by name."""
