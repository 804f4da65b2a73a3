"""Cases of recurrences: steps of one sequence after the other, and their derivatives by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case

_rng = np.random.default_rng(11)
_GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}
_KEPT = {"tanh": 0, "relu": 0, "lstm": 4, "gru": 3}
_MANY = [4, 0, 2, 4, 3, 1, 4, 4]  # rows of 64 elements, which two threads share
_MADE = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 4}


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _step(cell: str, p: Array, q: Array, b: Array, h: Array, c: Array) -> tuple[Any, ...]:
    """The state after a step, and the sums that are kept."""
    if cell in ("tanh", "relu"):
        return np.tanh(p + q + b) if cell == "tanh" else np.maximum(p + q + b, 0), c, []
    gates = np.split(p + q + b, _GATES[cell])
    if cell == "lstm":
        c = _sigmoid(gates[1]) * c + _sigmoid(gates[0]) * np.tanh(gates[2])
        return _sigmoid(gates[3]) * np.tanh(c), c, gates
    inner = (q + b)[2 * len(h) :]
    n = np.tanh(p[2 * len(h) :] + _sigmoid(gates[0]) * inner)
    z = _sigmoid(gates[1])
    return (1 - z) * n + z * h, c, [*gates[:2], inner]


def _recurrence(
    projected: Array,
    state: Array,
    kernel: Array,
    bias: Array,
    lengths: Array,
    cell: str,
    reverse: bool = False,
    keep: bool = False,
) -> Array:
    time, parts, saved = len(projected), len(state), keep * _KEPT[cell]
    out = np.zeros((parts + saved, time + 1, *state.shape[1:]), projected.dtype)
    for i, length in enumerate(lengths.tolist()):
        h, c = state[0, i], state[-1, i]
        out[:parts, time if reverse else 0, i] = state[:, i]
        for t in reversed(range(time)) if reverse else range(time):
            if t < length:
                h, c, sums = _step(cell, projected[t, i], h @ kernel, bias, h, c)
                for part, each in zip(out[parts:, t, i], sums, strict=False):
                    part[:] = each
            out[:parts, t if reverse else t + 1, i] = [h, c][:parts]
    return out


def _after(cell: str, states: list[Array], k: int) -> Any:
    """The state after a step from these sums and that state, where the k-th goes aside."""
    s = [x + 1e-40j * (j == k) for j, x in enumerate(states)]
    if cell == "lstm":
        new = _sigmoid(s[1]) * s[-1] + _sigmoid(s[0]) * np.tanh(s[2])
        return np.stack([_sigmoid(s[3]) * np.tanh(new), new])
    if cell == "gru":
        m = np.tanh(s[0] + _sigmoid(s[1]) * s[3])
        return (m + _sigmoid(s[2]) * (s[-2] - m))[None]
    return (np.tanh(s[0]) if cell == "tanh" else s[0] * (s[0].real > 0))[None]


def _recurrence_vjp(
    g: Array,
    last: Array,
    projected: Array,
    states: Array,
    turned: Array,
    lengths: Array,
    cell: str,
    reverse: bool = False,
) -> Array:
    """By steps into the complex plane, whose quotients lose nothing."""
    (time, batch, n), parts, saved = g.shape, len(last), _MADE[cell]
    out, d = np.zeros((time, batch, saved, n)), np.array(last, "d")
    for i, length in enumerate(lengths.tolist()):
        for t in range(time) if reverse else reversed(range(time)):
            d[0, i] += g[t, i]
            if t >= length:
                continue
            h, c = (states[k, t + reverse, i].astype("d") for k in (0, parts - 1))
            if cell in ("tanh", "relu"):
                y = states[0, t + (not reverse), i]
                sums = [np.arctanh(y) if cell == "tanh" else np.where(y > 0, y, -1.0)]
            else:
                sums = [x.astype("d") for x in states[parts:, t, i]]
            if cell == "gru":
                sums = [projected[t, i, 2 * n :].astype("d"), *sums]

            slopes = [
                (_after(cell, [*sums, h, c], k).imag / 1e-40 * d[:, i]).sum(0)
                for k in range(saved + 2)
            ]
            out[t, i] = slopes[:saved]
            d[0, i] = slopes[saved] + out[t, i].reshape(-1)[-len(turned) :] @ turned
            if parts == 2:
                d[1, i] = slopes[saved + 1]
    return np.concatenate([out.ravel(), d.ravel()]).astype(g.dtype)


def _operands(cell: str, dtype: str, lengths: list[int], n: int = 3) -> tuple[Array, ...]:
    width, batch, parts = _GATES[cell] * n, len(lengths), 2 if cell == "lstm" else 1
    shapes = (4, batch, width), (parts, batch, n), (n, width), (width,)
    floats = [_rng.standard_normal(shape).astype(dtype) * 0.7 for shape in shapes]
    return (*floats, np.array(lengths))


def _back(cell: str, dtype: str, lengths: list[int], reverse: bool, n: int = 3) -> Case:
    args = _operands(cell, dtype, lengths, n)
    states = _recurrence(args[0], args[1], args[2], args[3], args[4], cell, reverse, True)
    g = _rng.standard_normal((4, len(lengths), n)).astype(dtype)
    last = _rng.standard_normal(args[1].shape).astype(dtype)
    inputs = g, last, args[0], states, np.ascontiguousarray(args[2].T), args[4]
    return Case(inputs, _recurrence_vjp, {"cell": cell, "reverse": reverse})


CASES: dict[str, list[Case]] = {
    "recurrence": [
        *[
            Case(_operands(cell, "d", [3, 9, 0]), _recurrence, {"cell": cell, "reverse": reverse})
            for cell in _GATES
            for reverse in (False, True)
        ],
        Case(_operands("lstm", "f", [4], 32), _recurrence, {"cell": "lstm", "keep": True}),
        Case(_operands("gru", "f", [2, 4]), _recurrence, {"cell": "gru", "keep": True}),
        Case(_operands("lstm", "d", _MANY, 64), _recurrence, {"cell": "lstm", "keep": True}),
    ],
    "recurrence_vjp": [
        *[_back(cell, "d", [3, 9, 0], reverse) for cell in _GATES for reverse in (False, True)],
        _back("lstm", "f", [4], False, 32),
        _back("gru", "f", [2, 4], True),
        _back("lstm", "d", _MANY, True, 64),
    ],
}
