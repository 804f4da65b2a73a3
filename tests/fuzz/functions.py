"""Random functions that both mlvm and JAX have, for the fuzzer `transformations`.

A program is a function of a few tensors, of steps that both libraries have: arithmetic, reductions,
products, indexing, `cond`, `while_loop`, `scan`. The functions of a library are a column of
`functions.txt`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.types import Array, DType

Library = Any
"""The functions that programs use, of one library: a row of `functions.txt` each."""


def library(column: int, **modules: Any) -> Library:
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line and line[0] != "#"]
    return SimpleNamespace(**{row[0]: eval(row[1 + column], globals() | modules) for row in rows})


def jax_library() -> Library | None:
    """JAX on this processor, with 64 bits; None where it is not installed."""
    if importlib.util.find_spec("jax") is None:
        return None
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    return library(1, jax=jax, jnp=jnp)


# --- programs ------------------------------------------------------------------------

CONDITIONS = [name for name in DType.all if name != "i8"]
"""The dtypes of conditions. Those for storage cannot be rows of a scan, and the name "i8" is
refused by `astype`."""

SCANS = ("plain", "plain", "checkpoint", "no iterations", "last carry unread")
"""Kinds of scans."""

K = 3  # the length of every axis of a lane's tensors

Step = Callable[[Library, list[Any]], Any]
"""What a step makes of the values so far: vectors f64[K] or matrices f64[K,K]."""


class Program:
    """Steps on vectors and matrices."""

    def __init__(self, number: int) -> None:
        self.rng: Any = np.random.default_rng(number)
        rng = self.rng
        self.number = number
        self.ninputs = int(rng.integers(1, 4))
        self.depth = 0
        self.differentiable = True
        self.text: list[str] = []
        self.steps = [self.step(j + self.ninputs) for j in range(int(rng.integers(2, 6)))]
        del self.rng  # a captured function cannot reach one

    def pick(self, n: int) -> int:
        return int(self.rng.integers(n))

    def step(self, n: int) -> Step:
        """A step on n values, all of which are f64[K,K] or f64[K]; it makes such a one."""
        kinds = [
            *("unary", "binary", "reduce", "product", "take", "where", "joined"),
            *("sort", "cumsum", "softmax", "outer", "constant"),
        ]
        if self.depth < 2:
            kinds += ["cond", "cond", "while", "scan", "scan"]
        kind = kinds[self.pick(len(kinds))]
        self.text.append("  " * self.depth + kind)
        a, b, c = self.pick(n), self.pick(n), self.pick(n)
        simple: dict[str, Step] = {
            "unary": lambda lib, v: lib.tanh(v[a]) * 0.7 + lib.sin(v[b]),
            "binary": lambda lib, v: vector(lib, v[a]) / 2 - matrix(lib, v[b]) * vector(lib, v[c]),
            "reduce": lambda lib, v: lib.sum(matrix(lib, v[a]), axis=b % 2) / K,
            "product": lambda lib, v: lib.matmul(matrix(lib, v[a]), v[b]) * 0.3,
            "take": lambda lib, v: lib.take(matrix(lib, v[a]), index(lib, v[b]), a % 2),
            "where": lambda lib, v: lib.where(
                vector(lib, v[a]) > 0.1, matrix(lib, v[b]), vector(lib, v[c])
            ),
            "joined": lambda lib, v: lib.concat([vector(lib, v[a])[:1], vector(lib, v[b])[1:]], 0),
            "sort": lambda lib, v: lib.sort(v[a]),
            "cumsum": lambda lib, v: lib.cumsum(v[a]) * 0.5,
            "softmax": lambda lib, v: lib.softmax(v[a]) * v[b],
            "outer": lambda lib, v: vector(lib, v[a])[:, None] * vector(lib, v[b])[None, :],
            "constant": lambda lib, v: matrix(lib, v[a]) + lib.asarray(np.arange(K) * 0.1),
        }
        if kind in simple:
            return simple[kind]
        self.depth += 1
        inner = [self.step(n + 1 + j) for j in range(1 + self.pick(2))]
        other = [self.step(n + 1 + j) for j in range(1 + self.pick(2))]
        self.depth -= 1
        dtype = CONDITIONS[self.pick(len(CONDITIONS))]
        if kind == "cond":
            return partial(_cond, a, b, dtype, inner, other)
        if kind == "while":
            self.differentiable = False
            return partial(_while, a, b, dtype, inner)
        return partial(_scan, a, b, SCANS[self.pick(len(SCANS))], inner)

    def run(self, lib: Library, args: Sequence[Any]) -> Any:
        values = list(args)
        for step in self.steps:
            values.append(step(lib, values))
        return values[-1]


def vector(lib: Library, x: Any) -> Any:
    return x if x.ndim == 1 else lib.sum(x, axis=0)


def matrix(lib: Library, x: Any) -> Any:
    return x if x.ndim == 2 else lib.broadcast_to(x, (K, K))


def index(lib: Library, x: Any) -> Any:
    """Indices of 0 .. K-1 that values tell."""
    scaled = lib.sin(vector(lib, x)) * 0.49 + 0.5
    return lib.as_int(scaled * K)


def _run(steps: Sequence[Step], lib: Library, values: list[Any]) -> Any:
    values = list(values)
    for step in steps:
        values.append(step(lib, values))
    return vector(lib, values[-1])


def _cond(
    a: int, b: int, dtype: str, one: list[Step], other: list[Step], lib: Library, v: list[Any]
) -> Any:
    pred = lib.as_condition(lib.sum(v[a]) > 0.2, dtype)
    return lib.cond(
        pred,
        lambda x: _run(one, lib, [*v, x]),
        lambda x: _run(other, lib, [*v, x]),
        vector(lib, v[b]),
    )


def _while(a: int, b: int, dtype: str, body: list[Step], lib: Library, v: list[Any]) -> Any:
    limit = lib.sum(lib.tanh(vector(lib, v[a]))) * 2.0

    def more(state: Any) -> Any:
        return lib.as_condition(state[0] < limit, dtype)

    def turn(state: Any) -> Any:
        i, x = state
        return i + 0.9, lib.tanh(_run(body, lib, [*v, x]))

    zero = lib.asarray(np.float64(-1.0))
    return lib.while_loop(more, turn, (zero, vector(lib, v[b])))[1]


def _scan(a: int, b: int, kind: str, body: list[Step], lib: Library, v: list[Any]) -> Any:
    def turn(state: Any, row: Any) -> Any:
        after = lib.tanh(_run(body, lib, [*v, state * row]))
        return after, state[0] if kind == "last carry unread" else after[0]

    v = list(v)  # the caller appends to its own before a checkpointed body runs again
    xs = vector(lib, v[b])
    scan = lib.checkpointed if kind == "checkpoint" else lib.scan
    last, rows = scan(turn, vector(lib, v[a]), xs[:0] if kind == "no iterations" else xs)
    if kind == "last carry unread":
        return rows
    return last + (lib.sum(rows) if kind == "no iterations" else rows)


def arguments(program: Program) -> list[Array]:
    rng = np.random.default_rng(program.number + 10**6)
    return [rng.normal(size=(K,) if rng.random() < 0.6 else (K, K)) for _ in range(program.ninputs)]


def leaves(result: Any) -> list[Array]:
    return [np.asarray(y) for y in (result if isinstance(result, (tuple, list)) else [result])]


HERE = library(0, ml=ml)
