"""Random functions under mixed transformations, beside JAX or lane by lane.

    python -m tests.fuzz transformations --programs 1000 --seed 0

A program is a function of a few tensors, of steps that both libraries have: arithmetic, reductions,
products, indexing, `cond`, `while_loop`, `scan`. A stack of transformations goes over it: `vmap`
along any axes, `grad`, and `capture` (`jit`). Where JAX is installed, what it makes of the program
is expected, computed by NumPy (see `jaxprs`); the same program without it has its lanes computed
one by one, and put together. A program that differs is printed with the number that makes it again,
and the exit status is 1.
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
from tests.brief import Fn
from tests.fuzz import jaxprs
from tests.fuzz.command import parser_of

Library = Any
"""The functions that programs use, of one library: a row of `transformations.txt` each."""


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
    return library(1, jax=jax, jnp=jnp, jaxprs=jaxprs)


# --- programs ------------------------------------------------------------------------

CONDITIONS = [*DType.all]
"""The dtypes of conditions. Those for storage cannot be rows of a scan."""

SCANS = ("plain", "plain", "checkpoint", "no iterations", "last carry unread")
"""Kinds of scans."""

K = 3  # the length of every axis of a lane's tensors

Step = Callable[[Library, list[Any]], Any]
"""What a step makes of the values so far: vectors f64[K] or matrices f64[K,K]."""


class Program:
    """Steps on `vectors` and `matrices` of one lane, and the transformations over them."""

    def __init__(self, number: int) -> None:
        self.rng: Any = np.random.default_rng(number)
        rng = self.rng
        self.number = number
        self.ninputs = int(rng.integers(1, 4))
        self.depth = 0
        self.differentiable = True
        self.text: list[str] = []
        self.steps = [self.step(j + self.ninputs) for j in range(int(rng.integers(2, 6)))]
        self.levels = self.transformations()
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

    def transformations(self) -> list[tuple[str, Any]]:
        """From the inside out: `grad` at most once, `vmap` with an axis for each argument."""
        rng = self.rng
        levels: list[tuple[str, Any]] = []
        lanes = int(rng.integers(1, 4))
        for _ in range(lanes):
            if self.differentiable and rng.random() < 0.35 and len(levels) < 4:
                levels.append(("grad", tuple(range(self.ninputs))))
            if rng.random() < 0.3:
                levels.append(("jit", None))
            batched = rng.random(self.ninputs) < 0.7
            batched[int(rng.integers(self.ninputs))] = True
            levels.append(("vmap", tuple(bool(b) for b in batched)))
        if rng.random() < 0.3:
            levels.append(("jit", None))
        return levels

    def run(self, lib: Library, args: Sequence[Any]) -> Any:
        """One lane."""
        values = list(args)
        for step in self.steps:
            values.append(step(lib, values))
        return values[-1]

    def described(self) -> str:
        levels = ", ".join(f"{kind}{'' if of is None else of}" for kind, of in self.levels)
        return f"program {self.number}: {' '.join(self.text)}; {levels}"


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


# --- running ---------------------------------------------------------------------------


def transformed(lib: Library, program: Program, axes: dict[int, Any]) -> Fn:
    """The program under its transformations."""

    def fn(*args: Any) -> Any:
        return program.run(lib, args)

    for number, (kind, of) in enumerate(program.levels):
        if kind == "grad":

            def total(*args: Any, fn: Fn = fn) -> Any:
                results = fn(*args)
                results = results if isinstance(results, (tuple, list)) else [results]
                return sum((lib.sum(lib.sin(y)) for y in results[1:]), lib.sum(lib.sin(results[0])))

            fn = lib.grad(total, argnums=of) if lib is not HERE else _grad(total, of)
        elif kind == "jit":
            fn = lib.jit(fn)
        else:
            fn = lib.vmap(fn, in_axes=axes[number][0], out_axes=axes[number][1])
    return fn


def _grad(fn: Fn, of: tuple[int, ...]) -> Fn:
    """Gradients for several arguments, as a tuple."""
    gradient = ml.grad(fn, argnums=of)
    return lambda *args: tuple(gradient(*args))


def arguments(program: Program) -> tuple[list[Array], dict[int, Any]]:
    """Arguments with lanes, and for each `vmap` its axes."""
    rng = np.random.default_rng(program.number + 10**6)
    shapes: list[tuple[int, ...]] = [
        (K,) if rng.random() < 0.6 else (K, K) for _ in range(program.ninputs)
    ]
    axes: dict[int, Any] = {}
    for number, (kind, of) in enumerate(program.levels):
        if kind == "vmap":
            n = int(rng.integers(1, 4))
            in_axes: list[int | None] = []
            for i, batched in enumerate(of):
                axis = int(rng.integers(len(shapes[i]) + 1)) if batched else None
                if axis is not None:
                    shapes[i] = (*shapes[i][:axis], n, *shapes[i][axis:])
                    axis -= len(shapes[i]) * int(rng.integers(2))
                in_axes.append(axis)
            axes[number] = tuple(in_axes), int(rng.integers(2)) * -1
    return [rng.normal(size=shape) for shape in shapes], axes


def leaves(result: Any) -> list[Array]:
    return [np.asarray(y) for y in (result if isinstance(result, (tuple, list)) else [result])]


HERE = library(0)


def differs(program: Program, other: Library) -> str | None:
    """Return how results of the program differ between two libraries."""
    args, axes = arguments(program)
    results = HERE.computed(transformed(HERE, program, axes), args)
    expected = other.computed(transformed(other, program, axes), args)
    for ours, theirs in zip(results, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"shape {ours.shape}, not {theirs.shape}"
        if not np.allclose(ours, theirs, rtol=1e-7, atol=1e-9, equal_nan=True):
            return f"{ours.tolist()}\nnot {theirs.tolist()}"
    return None


def lane_by_lane(fn: Fn, in_axes: Any, out_axes: Any) -> Fn:
    """Return the reference of `vmap`: the function called lane by lane."""

    def batched(*args: Any) -> Any:
        pairs = list(zip(args, in_axes, strict=True))
        n = next(x.shape[axis] for x, axis in pairs if axis is not None)
        rows = [
            fn(*[x if axis is None else ml.moveaxis(x, axis, 0)[i] for x, axis in pairs])
            for i in range(n)
        ]
        if isinstance(rows[0], tuple):
            return tuple(ml.stack(column, axis=out_axes) for column in zip(*rows, strict=True))
        return ml.stack(rows, axis=out_axes)

    return batched


ONE_BY_ONE = SimpleNamespace(**vars(HERE) | {"vmap": lane_by_lane, "jit": lambda fn: fn})


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", action="store_true", help="lane by lane, also where JAX is")
    options = parser.parse_args(argv)
    jax = None if options.lanes else jax_library()
    wrong = 0
    for number in range(options.seed, options.seed + options.programs):
        program = Program(number)
        try:
            difference = differs(program, jax or ONE_BY_ONE)
        except Exception as error:  # what a program raises is what it is looked for
            difference = f"{type(error).__name__}: {error}"
        if difference is not None:
            wrong += 1
            print(program.described())
            print(difference)
        if (number - options.seed) % 50 == 49:
            print(f"{number - options.seed + 1} programs", flush=True)
    print(f"{options.programs} programs beside {'JAX' if jax else 'their lanes'}, {wrong} wrong")
    return 1 if wrong else 0
