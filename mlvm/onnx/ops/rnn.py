"""Recurrent cells, over sequences of any direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.ops.recurrent import Cell
from mlvm.eager.nn.rnn import recurrence
from mlvm.onnx.ops.elementwise import ACTIVATIONS, activation
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, tensor

_ORDER: dict[str, list[int]] = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}
"""Gates of ONNX in the order of `nn`: r, z, n and i, f, g, o."""
_PLAIN: dict[str, tuple[list[str], Cell]] = {
    "GRU": (["sigmoid", "tanh"], "gru"),
    "LSTM": (["sigmoid", "tanh", "tanh"], "lstm"),
}
_NAMES: dict[str, str] = {name.lower(): name for name in ACTIVATIONS}


def _activations(at: NodeCall, default: list[str], direction: int) -> list[Callable[[Any], Any]]:
    names = at.get("activations") or default * 2
    each = len(default)
    alphas, betas = [*at.get("activation_alpha", [])], [*at.get("activation_beta", [])]
    functions: list[Callable[[Any], Any]] = []
    for name in names:
        label = _NAMES.get(name.lower(), name)
        function = activation(label)
        count, extra = len(ACTIVATIONS[label][1]), []
        if count and alphas:
            extra.append(alphas.pop(0))
            if count > 1 and betas:
                extra.append(betas.pop(0))
        functions.append(activation(label, extra) if extra else function)
    return functions[direction * each : (direction + 1) * each]


def _steps(step: Any, state: tuple[Any, ...], rows: Any, lengths: Any, reverse: bool) -> Any:
    """Run a cell over the rows.

    Return the last state, and all outputs, f[T, N, ...]. After the end of a sequence, the state
    does not change and outputs are zero.
    """
    count = rows.shape[0]

    def one(state: Any, row: Any) -> Any:
        x, t = row
        after = step(state, x)
        if lengths is None:
            return after, after[0]
        goes_on = ml.expand_dims(ml.less(t, lengths), axis=-1)
        next_state = tuple(ml.where(goes_on, *pair) for pair in zip(after, state, strict=True))
        return next_state, ml.where(goes_on, after[0], ml.zeros_like(after[0]))

    times = ml.arange(count)
    if 0 < count <= 4:  # maximum number of unrolled steps
        outputs: list[Any] = [None] * count
        for i in reversed(range(count)) if reverse else range(count):
            state, outputs[i] = one(state, (rows[i], times[i]))
        return state, ml.stack(outputs)
    return ml.scan(one, state, (rows, times), reverse=reverse)


def _turned(xp: Any, node: Any, w: Any) -> Any:
    """Transpose [directions, gates * hidden, n] to [directions, n, gates * hidden].

    The gates are in the order of `nn`.
    """
    return xp.matrix_transpose(_ordered(xp, node.type, w))


def _ordered(xp: Any, kind: str, w: Any) -> Any:
    """Sort the gates along axis 1 into the order of `nn`."""
    order = _ORDER[kind]
    each = w.shape[1] // len(order)
    return xp.concat([w[:, i * each : (i + 1) * each] for i in order], axis=1)


def _kind(at: NodeCall, direction: int, peep: Value) -> Cell | None:
    """Return the cell of `recurrence` that computes this one, or None."""
    name, own = at.node.type, at.get("activations")
    if peep is not None or at.get("clip") or at.get("input_forget"):
        return None
    if name == "RNN":
        activation = own[direction].lower() if own else "tanh"
        return activation if activation in ("tanh", "relu") else None  # type: ignore[return-value]
    names, kind = _PLAIN[name]
    first = direction * len(names)
    each = [x.lower() for x in (own or names * 2)[first : first + len(names)]]
    return kind if each == names and (name == "LSTM" or at.get("linear_before_reset")) else None


def _in_directions(at: NodeCall, x: Value, lengths: Value, starts: list[Any], count: int,
                   run: Callable[..., Any]) -> Any:  # fmt: skip
    """Run `count` directions; return outputs [T, D, N, H] and the last states.

    `run` is called with a direction, the rows of x, the first states, the lengths, and whether the
    direction is backward. It returns the outputs and the last states of the direction.
    """
    by_batch, hidden = bool(at.get("layout", 0)), at["hidden_size"]
    x = ml.swapaxes(tensor(x), 0, 1) if by_batch else tensor(x)
    lengths = lengths if lengths is None else ml.astype(tensor(lengths), ml.int64)
    outs, lasts = [], []
    for d in range(count):
        state = tuple(
            (ml.swapaxes(tensor(s), 0, 1) if by_batch else tensor(s))[d]
            if s is not None
            else ml.zeros((x.shape[1], hidden), dtype=x.dtype)
            for s in starts
        )
        reverse = at.get("direction", "forward") == "reverse" or d == 1
        states, last = run(d, x, state, lengths, reverse)
        outs.append(states)
        lasts.append(last)
    y = ml.stack(outs, axis=1)
    ends = [ml.stack([last[i] for last in lasts]) for i in range(len(starts))]
    if by_batch:
        return (ml.permute_dims(y, (2, 0, 1, 3)), *(ml.swapaxes(e, 0, 1) for e in ends))
    return (y, *ends)


def _by_rows(x: Any, product: Callable[[Any], Any]) -> Any:
    """Apply a product to all rows of x, f[T, N, K]."""
    rows = product(ml.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])))
    return ml.reshape(rows, (*x.shape[:2], rows.shape[-1]))


def _run(at: NodeCall, x: Value, w: Value, r: Value, b: Value, lengths: Value, starts: list[Any],
         cell: Callable[..., Any], peep: Value = None) -> Any:  # fmt: skip
    """Run a cell in all directions; return outputs [T, D, N, H] and the last states."""
    hidden, gates = at["hidden_size"], len(_ORDER[at.node.type])
    if b is not None:
        halves = [_ordered(ml, at.node.type, half) for half in ml.split(tensor(b), 2, axis=1)]

    def run(d: int, x: Any, state: Any, lengths: Any, reverse: bool) -> Any:
        own: Any = None if b is None else halves[0][d]
        rest: Any = None if b is None else halves[1][d]
        rows, kind = _by_rows(x, lambda flat: ml.matmul(flat, w[d])), _kind(at, d, peep)
        if kind is None:
            rows = rows if own is None else rows + own
            last, states = _steps(cell(d, r[d], rest, hidden), state, rows, lengths, reverse)
            return states, last
        if b is None:
            rest = ml.zeros((gates * hidden,), dtype=x.dtype)
        elif kind == "gru":
            rows = rows + own
        else:
            rest = own + rest
        states, last = recurrence(kind, rows, state, r[d], rest, lengths, reverse=reverse)
        if lengths is not None:
            goes_on = ml.expand_dims(ml.arange(x.shape[0]), axis=-1) < lengths
            states = ml.where(ml.expand_dims(goes_on, axis=-1), states, 0.0)
        return states, last

    return _in_directions(at, x, lengths, starts, w.shape[0], run)


def _clipped(at: NodeCall) -> Callable[[Any], Any]:
    limit = at.get("clip")
    return (lambda x: x) if not limit else (lambda x: ml.clip(x, -limit, limit))


@op("RNN", "raw", packed={1: _turned, 2: _turned})
def rnn(at: NodeCall, x: Value, w: Value, r: Value, b: Value = None, lengths: Value = None,
        h: Value = None) -> Value:  # fmt: skip
    cut = _clipped(at)

    def cell(d: int, r: Any, bias: Any, hidden: int) -> Any:
        (f,) = _activations(at, ["Tanh"], d)

        def step(state: Any, row: Any) -> Any:
            total = row + ml.matmul(state[0], r)
            return (f(cut(total if bias is None else total + bias)),)

        return step

    return _run(at, x, w, r, b, lengths, [h], cell)


@op("GRU", "raw", packed={1: _turned, 2: _turned})
def gru(at: NodeCall, x: Value, w: Value, r: Value, b: Value = None, lengths: Value = None,
        h: Value = None) -> Value:  # fmt: skip
    cut, after = _clipped(at), at.get("linear_before_reset", 0)

    def cell(d: int, r: Any, bias: Any, hidden: int) -> Any:
        f, g = _activations(at, ["Sigmoid", "Tanh"], d)

        def step(state: Any, row: Any) -> Any:
            (h,) = state
            if after:
                own = ml.matmul(h, r)
                own = own if bias is None else own + bias
                reset, z = ml.split(f(cut(row[:, : 2 * hidden] + own[:, : 2 * hidden])), 2, axis=1)
                new = g(cut(row[:, 2 * hidden :] + reset * own[:, 2 * hidden :]))
            else:
                own = ml.matmul(h, r[:, : 2 * hidden])
                own = own if bias is None else own + bias[: 2 * hidden]
                reset, z = ml.split(f(cut(row[:, : 2 * hidden] + own)), 2, axis=1)
                last = ml.matmul(reset * h, r[:, 2 * hidden :])
                last = last if bias is None else last + bias[2 * hidden :]
                new = g(cut(row[:, 2 * hidden :] + last))
            return ((1.0 - z) * new + z * h,)

        return step

    return _run(at, x, w, r, b, lengths, [h], cell)


@op("LSTM", "raw", packed={1: _turned, 2: _turned})
def lstm(at: NodeCall, x: Value, w: Value, r: Value, b: Value = None, lengths: Value = None,
         h: Value = None, c: Value = None, p: Value = None) -> Value:  # fmt: skip
    cut, coupled = _clipped(at), at.get("input_forget", 0)
    peep = None if p is None else tensor(p)

    def cell(d: int, r: Any, bias: Any, hidden: int) -> Any:
        f, g, k = _activations(at, ["Sigmoid", "Tanh", "Tanh"], d)
        looks = None if peep is None else [peep[d, i * hidden : (i + 1) * hidden] for i in range(3)]

        def step(state: Any, row: Any) -> Any:
            h, c = state
            total = row + ml.matmul(h, r)
            total = total if bias is None else total + bias
            i, forget, new, o = ml.split(total, 4, axis=1)
            if looks is not None:
                i, forget = i + looks[0] * c, forget + looks[2] * c
            i = f(cut(i))
            forget = 1.0 - i if coupled else f(cut(forget))
            c = forget * c + i * g(cut(new))
            if looks is not None:
                o = o + looks[1] * c
            return f(cut(o)) * k(c), c

        return step

    return _run(at, x, w, r, b, lengths, [h, c], cell, p)


def _zeros_of(zero: Value, direction: int) -> Value:
    """Return a zero point, on the host if it is in the file: products skip zero points of 0."""
    return np.asarray(zero[direction]) if isinstance(zero, np.ndarray) else tensor(zero)[direction]


@op("com.microsoft.DynamicQuantizeLSTM", "raw", absent=range(3, 8), input_forget=0)
def dynamic_quantize_lstm(at: NodeCall, x: Value, w: Value, r: Value, b: Value, lengths: Value,
                          h: Value, c: Value, p: Value, ws: Value, wz: Value, rs: Value,
                          rz: Value) -> Value:  # fmt: skip
    from mlvm.onnx.ops.qlinear import dynamic_matmul, rows_of

    if p is not None:
        raise ModelError("peepholes (P) are not supported; export without them")
    cut = _clipped(at)
    wq, wscale, rq, rscale = (tensor(each) for each in (w, ws, r, rs))

    def cell(d: int, r: Any, by: Any) -> Any:
        f, g, k = _activations(at, ["Sigmoid", "Tanh", "Tanh"], d)

        def step(state: Any, row: Any) -> Any:
            h, c = state
            i, o, forget, new = ml.split(row + dynamic_matmul(h, r, by), 4, axis=1)
            c = f(cut(forget)) * c + f(cut(i)) * g(cut(new))
            return f(cut(o)) * k(c), c

        return step

    def run(d: int, x: Any, state: Any, lengths: Any, reverse: bool) -> Any:
        outer, inner = (  # once instead of in each step
            rows_of(ml.matrix_transpose(q[d]), _zeros_of(zero, d))
            for q, zero in ((wq, wz), (rq, rz))
        )
        # Both sums are rows of the same shape, so they form one chain.
        inner = inner._replace(sums=ml.expand_dims(inner.sums, axis=0))
        rows = _by_rows(x, lambda flat: dynamic_matmul(flat, outer, wscale[d]))
        for bias in () if b is None else ml.split(tensor(b)[d], 2):
            rows = rows + bias
        last, states = _steps(cell(d, inner, rscale[d]), state, rows, lengths, reverse)
        return states, last

    return _in_directions(at, x, lengths, [h, c], wq.shape[0], run)
