"""Random programs of slices, windows, strides, writes and loops, beside numpy.

A program has a few arrays of one rank and dtype. Its statements compute formulas of windows of one
shape (with steps, backwards, rows that broadcast) and write them into a window of an array, into a
row at the number of the iteration, or keep them for later statements. Some programs repeat their
statements in a loop. All ops are exact in numpy's sense: numpy, the eager language, a captured
function and its saved step must have the same bits: on one thread and three, on each instruction
set of this processor, and on the reference machine. With `--built`, steps are built in C, too.
In a third of the programs, axes of the arrays have dynamic sizes: windows grow with them, or are at
constant distances from the end. These run at several sizes.
Chains run as machine code from the first run, and never with MLVM_MACHINE_CODE=0.

    python -m tests.fuzz windows --programs 3000 --seed 0
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.machines.local import LocalVM
from mlvm.machines.native import _native
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.lengths import Build, Calls, building, difference, difference_in_c, from_file
from tests.fuzz.lengths import add_options as add_options
from tests.trees import bits

Value = Any
Shape = tuple[int, ...]
Term = Callable[[Any, list[Value], Value], Value]
"""A part of a formula: of the functions of arrays, the values, and the iteration."""
Place: TypeAlias = Callable[[Any, Any], Any]
"""An index of the iteration and the array."""
DTYPES: Final = ("f64", "f64", "f64", "f32", "i32", "i64", "u8")
NUMPY: Final = {"f64": "float64", "f32": "float32", "i32": "int32", "i64": "int64", "u8": "uint8"}
STEPS: Final = (1, 1, 1, 1, 1, 1, 2, -1, -2, 3)
OPEN: Final = 10_000
"""What is added to the smallest length of an axis or a window that grows with a dynamic size."""
MORE: Final = (0, 1, 2, 3, 7, 20, 60)
"""Elements that a call has beyond the smallest length."""


class Statement(NamedTuple):
    """Statement: writes `term` to array `target` at a place, or appends it to the values."""

    term: Term
    target: int | None
    place: Place
    text: str


class Drawn:
    """Random program."""

    def __init__(self, seed: int, *, sized: bool = False) -> None:
        rng = self.rng = random.Random(seed)
        self.dtype = rng.choice(DTYPES)
        self.ndim = rng.choice((1, 2, 2, 2, 3))
        long = rng.random() < 0.3
        self.shapes: list[Shape] = []
        for _ in range(rng.randint(1, 3)):
            shape = [rng.randint(3, 9) for _ in range(self.ndim)]
            if long:
                shape[rng.randrange(self.ndim)] = rng.choice((17, 40, 130, 700, 1500))
            self.shapes.append(tuple(shape))
        if rng.random() < 0.7:  # arrays of one shape are usual
            self.shapes = [self.shapes[0]] * len(self.shapes)
        self.narrays = len(self.shapes)
        if sized:  # arrays of one shape, whose axes have one name each
            opened = rng.sample(range(self.ndim), rng.randint(1, self.ndim))
            shape = [n + OPEN * (i in opened) for i, n in enumerate(self.shapes[0])]
            self.shapes = [tuple(shape)] * self.narrays
        self.turns = rng.choice((0, 0, 1, 2, 3))
        self.kept: list[Shape] = []  # of the values behind the arrays, within one iteration
        self.statements = [self._statement() for _ in range(rng.randint(1, 5))]

    def _window(self, shape: Shape, lengths: Shape) -> tuple[slice, ...]:
        return tuple(map(self._slice, shape, lengths))

    def _slice(self, n: int, length: int) -> slice:
        grows = length >= OPEN
        from_back = n >= OPEN and (grows or self.rng.random() < 0.5)
        n, length = n % OPEN, length % OPEN
        able = [x for x in STEPS if (length - 1) * abs(x) < n and not (grows and abs(x) > 1)]
        step = self.rng.choice(able)
        low = self.rng.randint(0, n - 1 - (length - 1) * abs(step))
        high = low + (length - 1) * abs(step) - n * from_back
        low -= n * (from_back and not grows)
        if step > 0:
            return slice(low, high + 1 if high != -1 else None, step)
        return slice(high, low - 1 if low else None, step)

    def _lengths(self) -> Shape:
        least = [min(axis) for axis in zip(*self.shapes, strict=True)]
        lengths = [max(1, n % OPEN - self.rng.choice((0, 1, 2, 2, 2, 4))) for n in least]
        grows = [n >= OPEN and self.rng.random() < 0.7 for n in least]
        return tuple([n + OPEN * by for n, by in zip(lengths, grows, strict=True)])

    def _leaf(self, lengths: Shape) -> tuple[Term, str]:
        rng = self.rng
        what = rng.random()
        if what < 0.12:
            number = rng.choice((0.5, 0.25, 3.0)) if self.dtype[0] == "f" else rng.randint(1, 3)
            kind = np.dtype(NUMPY[self.dtype]).type(number)
            return lambda xp, values, j: xp.asarray(kind), str(number)
        fit = [
            i
            for i, shape in enumerate(self.shapes + self.kept)
            if len(shape) == len(lengths)
            and all(a >= b and a % OPEN >= b % OPEN for a, b in zip(shape, lengths, strict=True))
        ]
        alike = [self.narrays + i for i, shape in enumerate(self.kept) if shape == lengths]
        if alike and rng.random() < 0.3:
            i, backwards = rng.choice(alike), (slice(None, None, -1),) * len(lengths)
            return lambda xp, values, j: values[i][backwards], f"v{i}[{backwards}]"
        i = rng.choice(fit)
        shape = (self.shapes + self.kept)[i]
        if what < 0.2 and self.ndim > 1:
            row, rest = rng.randrange(shape[0] % OPEN), self._window(shape[1:], lengths[1:])
            row -= shape[0] % OPEN * (shape[0] >= OPEN and rng.random() < 0.5)
            return lambda xp, values, j: values[i][(row, *rest)], f"v{i}[{row}, {rest}]"
        if what < 0.28 and self.ndim > 1 and self.turns:
            rest = self._window(shape[1:], lengths[1:])
            at: Place = lambda j, x: (j % x.shape[0], *rest)  # noqa: E731
            return lambda xp, values, j: values[i][at(j, values[i])], f"v{i}[j % n, {rest}]"
        window = self._window(shape, lengths)
        return lambda xp, values, j: values[i][window], f"v{i}[{window}]"

    def _term(self, lengths: Shape, size: int) -> tuple[Term, str]:
        if size <= 1:
            return self._leaf(lengths)
        left = self.rng.randint(1, size - 1)
        (a, of_a), (b, of_b) = self._term(lengths, left), self._term(lengths, size - left)
        name = self.rng.choice(("+", "+", "-", "-", "*", "least", "where"))
        if of_a[0] != "v" and of_b[0] != "v" and name in ("least", "where"):
            name = "+"  # of numbers
        terms: dict[str, Term] = {
            "+": lambda xp, values, j: a(xp, values, j) + b(xp, values, j),
            "-": lambda xp, values, j: a(xp, values, j) - b(xp, values, j),
            "*": lambda xp, values, j: a(xp, values, j) * b(xp, values, j),
            "least": lambda xp, values, j: xp.minimum(a(xp, values, j), b(xp, values, j)),
            "where": lambda xp, values, j: _greatest(xp, a(xp, values, j), b(xp, values, j)),
        }
        return terms[name], f"({of_a} {name} {of_b})"

    def _statement(self) -> Statement:
        rng = self.rng
        lengths = rng.choice(self.kept) if self.kept and rng.random() < 0.4 else self._lengths()
        term, text = self._term(lengths, rng.choice((1, 2, 3, 5, 8, 14)))
        leaf, of_leaf = self._leaf_window(lengths)
        whole: Term = lambda xp, values, j: term(xp, values, j) + leaf(xp, values, j)  # noqa: E731
        text = f"{text} + {of_leaf}"
        what = rng.random()
        if what < 0.3:
            self.kept.append(lengths)
            return Statement(whole, None, lambda j, x: None, f"v = {text}")
        target = rng.randrange(self.narrays)
        shape = self.shapes[target]
        if what < 0.45 and self.turns:
            rest = self._window(shape[1:], lengths[1:])
            row: Term = lambda xp, values, j: whole(xp, values, j)[0]  # noqa: E731
            at: Place = lambda j, x: (j % x.shape[0], *rest) if rest else j % x.shape[0]  # noqa: E731
            return Statement(row, target, at, f"v{target}[j % n, {rest}] = ({text})[0]")
        window = self._window(shape, lengths)
        return Statement(whole, target, lambda j, x: window, f"v{target}[{window}] = {text}")

    def _leaf_window(self, lengths: Shape) -> tuple[Term, str]:
        i = self.rng.randrange(self.narrays)
        window = self._window(self.shapes[i], lengths)
        return lambda xp, values, j: values[i][window], f"v{i}[{window}]"

    def arrays(self, more: Shape = (0, 0, 0)) -> list[Any]:
        """Draw arrays; dynamic axes have that many elements beyond the smallest length."""
        rng = np.random.default_rng(self.rng.randrange(1 << 30))
        shapes = [
            [n % OPEN + by * (n >= OPEN) for n, by in zip(shape, more, strict=False)]
            for shape in self.shapes
        ]
        if self.dtype[0] == "f":
            return [rng.uniform(-1, 1, shape).astype(NUMPY[self.dtype]) for shape in shapes]
        return [rng.integers(0, 9, shape).astype(NUMPY[self.dtype]) for shape in shapes]

    def turn(self, xp: Any, j: Value, arrays: list[Value]) -> list[Value]:
        """Run the statements once; return the arrays and the last value kept."""
        values = list(arrays)
        for term, target, place, _ in self.statements:
            result = term(xp, values, j)
            if target is None:
                values.append(result)
            else:
                values[target][place(j, values[target])] = result
        return values[: self.narrays] + values[self.narrays :][-1:]

    def by_numpy(self, arrays: list[Any]) -> list[Any]:
        if not self.turns:
            return self.turn(np, 0, [x.copy() for x in arrays])
        arrays = [x.copy() for x in arrays]
        for j in range(self.turns):
            self.turn(np, j, arrays)
        return arrays

    def by_mlvm(self, *arrays: Value) -> list[Value]:
        copies = [ml.copy(x) for x in arrays]
        if not self.turns:
            return self.turn(ml, 0, copies)

        def body(j: Value, state: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple(self.turn(ml, j, list(state))[: self.narrays])

        return list(ml.fori_loop(0, self.turns, body, tuple(copies)))

    def __str__(self) -> str:
        lines = [f"{self.dtype}, {self.shapes}, {self.turns} turns"]
        return "\n    ".join([*lines, *[statement.text for statement in self.statements]])


def _greatest(xp: Any, a: Value, b: Value) -> Value:
    """Return the larger element, by a choice. One of the two may be a number."""
    return xp.where(a > b, a, b)


def _bits(values: list[Any]) -> list[Any]:
    """Return what must be equal: the elements, where all nans are one."""
    arrays = [np.asarray(x) for x in values]
    return [
        np.where(x == x, x, np.asarray(np.nan, x.dtype)) if x.dtype.kind == "f" else x
        for x in arrays
    ]


def check(seed: int, counts: Counter[str], build: Build | None = None) -> str:
    """Run the program of a seed in all ways; return its outcome. Raises `Wrong`."""
    sized = seed % 3 == 2
    program = Drawn(seed, sized=sized)
    run, shape = program.by_mlvm, program.shapes[0]
    bounds = {f"n{i}": n % OPEN + MORE[-1] for i, n in enumerate(shape) if n >= OPEN}
    names = tuple([f"n{i}" if n >= OPEN else None for i, n in enumerate(shape)])
    axes = {"arrays": names} if sized else None
    step = ml.capture(run, dynamic_axes=axes, max_sizes=bounds if sized else None)
    plain = ml.capture(run, fuse=False)
    runs: dict[str, Any] = {"eager": run, "captured without fusion": plain, "captured": step}
    calls: Calls = []
    for _ in range(4 if sized else 1):
        arrays = program.arrays(tuple(program.rng.choice(MORE) for _ in shape))
        expected = _bits(program.by_numpy(arrays))
        tensors = tuple([ml.asarray(x) for x in arrays])
        for how, fn in (*runs.items(), ("captured again", step)):
            results = fn(*tensors)
            for i, (x, y) in enumerate(zip(_bits(results), expected, strict=True)):
                if x.shape != y.shape or x.dtype != y.dtype or x.tobytes() != y.tobytes():
                    raise Wrong(f"{how}: value {i} differs from numpy's\n{program}\n{x}\n{y}")
        calls.append((tensors, bits(results)))
    text = ml.disassemble(step.program)
    fused = "windows are written" if '"slice_set", 0' in text else "windows are read"
    saved = from_file(step)
    if saved is None:
        return "not saved"
    machines = [LocalVM(native=False), LocalVM(), LocalVM(threads=3)]
    found = [difference(saved, calls, counts, vm) for vm in machines]
    if build is not None:
        found.append(difference_in_c(saved, calls, build, counts))
    if any(found):
        raise Wrong(f"{found}\n{program}")
    counts["traces of dynamic sizes"] += step.signatures * sized
    return (fused if '["slice' in text else "no windows") + ", at dynamic sizes" * sized


def fuzz(
    programs: int, seed: int, first: int = 0, *, built: bool = False
) -> tuple[Outcomes, str | None]:
    """Try the programs of that many seeds; return their outcomes, and which were wrong."""
    counts: Counter[str] = Counter()
    with building(built) as build:

        def attempt(number: int) -> str:
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
                return check(seed + number, counts, build)

        native = LocalVM().native
        without = os.environ.get("MLVM_MACHINE_CODE") == "0"
        before = _native.code_after(0 if without else 1) if native else 0
        try:
            outcomes, failure = outcomes_of(range(first, first + programs), attempt)
        finally:
            if native:
                _native.code_after(before)
    outcomes.update(counts)
    return outcomes, failure
