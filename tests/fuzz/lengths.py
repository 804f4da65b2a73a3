"""Random functions captured with open lengths, against eager calls at several lengths each.

A function is a random list of steps on values of a few kinds: a matrix [n, d], a sequence [n], a
square [n, n], a vector [d], a list [m] of some formula of n, a scalar. Steps choose nothing by the
length, unless they branch on it. The captured function must have the bits of the eager one at each
length, or raise what it raises. So must its step, which is saved after the last call and loaded. A
step may refuse lengths at which the function computes otherwise, and these are counted. With
`--built`, each step that C takes is built, too, and run at these lengths.

    python -m tests.fuzz lengths --programs 500 --seed 0 --built
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.build.targets import CannotBuild
from mlvm.core.errors import CaptureError, MlvmError, ShapeError
from mlvm.machines.local import LocalVM
from mlvm.machines.native import _native
from mlvm.step.saved import LoadedStep, SavedStep
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.trees import bits

WIDTH = 4
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17, 23, 31)

Value = Any
Step = tuple[tuple[str, ...], str, Callable[..., Value]]
Calls = list[tuple[tuple[Any, ...], Any]]


def _scan(x: Value, state: Value, *, reverse: bool = False) -> Value:
    def turn(s: Value, row: Value) -> Value:
        after = ml.tanh(s + row)
        return after, after * 0.5

    return ml.scan(turn, state, x, reverse=reverse)


def _masked(s: Value) -> Value:
    places = ml.arange(s.shape[0])
    return ml.where(places[:, None] >= places[None, :], s, -1e9)


def _while(x: Value) -> Value:
    n = x.shape[0]
    return ml.while_loop(
        lambda s: s[0] < n - 1, lambda s: (s[0] + 1, s[1] * 0.5 + x[0]), (0, x[-1])
    )[1]


def _looped(x: Value) -> Value:
    total = x[0]
    for i in range(1, min(x.shape[0], 3)):
        total = total + x[i]
    return total


def _set(x: Value) -> Value:
    y = ml.copy(x)
    y[: x.shape[0] // 2] = 0.25
    return y


def _walked(row: Value) -> Value:
    """Follow a row of a tree: node i has the child 2 i + 1."""

    @ml.subroutine
    def value(row: Value, i: Value) -> Value:
        below = lambda: ml.tanh(row[i]) + 0.5 * value(row, 2 * i + 1)  # noqa: E731
        return ml.cond(2 * i + 1 < row.shape[0], below, lambda: row[i])

    return value(row, ml.zeros((), dtype=ml.int64))


def steps() -> list[Step]:
    """Read the steps of `lengths.txt`."""
    rows = []
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        kinds, is_step, code = line.partition(" | ")
        operands, _, result = kinds.partition(" -> ")
        if is_step and line[0] != "#":
            rows.append((tuple(operands.split()), result, eval(code, globals())))
    return rows


STEPS = steps()


def function(seed: int) -> Callable[..., Any]:
    """Make the random function of a seed: of x [n, d], ids [n], a weight, a table."""
    rng = random.Random(seed)
    kinds = {"mat": [0], "ids": [1], "weight": [2], "table": [3], "vec": [4]}
    chosen = []
    count = 5
    for _ in range(rng.randint(2, 9)):
        able = [step for step in STEPS if all(kind in kinds for kind in step[0])]
        operands, result, fn = rng.choice(able)
        chosen.append((fn, [rng.choice(kinds[kind]) for kind in operands]))
        kinds.setdefault(result, []).append(count)
        count += 1
    ends = [number for kind, numbers in kinds.items() for number in numbers if number >= 5]
    outs = rng.sample(ends, min(len(ends), 3))
    differentiates = rng.random() < 0.5

    def forward(x: Value, ids: Value, weight: Value, table: Value) -> list[Value]:
        values = [x, ids, weight, table, weight[0]]
        for fn, operands in chosen:
            values.append(fn(*[values[i] for i in operands]))
        return [values[i] for i in outs]

    def loss(x: Value, weight: Value, table: Value, ids: Value) -> Value:
        parts = [ml.sum(y) for y in forward(x, ids, weight, table) if y.dtype is ml.float32]
        return sum(parts) * 0.1 if parts else ml.sum(x)

    def random_function(x: Value, ids: Value, weight: Value, table: Value) -> Any:
        if differentiates:
            return ml.value_and_grad(loss, argnums=(0, 1, 2))(x, weight, table, ids)
        return forward(x, ids, weight, table)

    return random_function


def outcome(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the bytes of what a call returns, or the error that it raises."""
    try:
        return bits(fn(*arguments))
    except MlvmError as error:
        return type(error).__name__


def from_file(step: Any) -> SavedStep | None:
    """Save a captured function's step, and return it from the file; None for one without lengths,
    whose last call had a separate program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.mlvm")
        try:
            step.save(path)
        except CaptureError as error:
            if "is valid only for its own lengths" in str(error) or "needs the value" in str(error):
                return None
            raise
        return SavedStep.from_bytes(path.read_bytes())


def difference(
    step: SavedStep, calls: Calls, refused: Counter[str], vm: LocalVM | None = None
) -> str:
    """Return where the loaded step differs from outcomes of eager calls; nothing where it does
    not. Lengths that it serves and refuses are counted."""
    loaded = LoadedStep(step, vm or LocalVM())
    for arguments, expected in calls:
        if isinstance(expected, str):
            continue
        try:
            arrays = loaded(*[each.numpy() for each in arguments])
        except ShapeError as error:
            if "takes other branches" in str(error) or "a temporary is larger" in str(error):
                refused["refused"] += 1
                continue
            raise
        refused["served"] += 1
        if bits(arrays) != expected:
            return f"at {len(arguments[0])}: other bits from the file"
    loaded.close()
    return ""


Build = Callable[[SavedStep, Path], Path]


def difference_in_c(step: SavedStep, calls: Calls, build: Build, counts: Counter[str]) -> str:
    """Return where the step in C differs from outcomes of eager calls, as `difference` does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            program = build(step, folder)
        except CannotBuild as error:
            counts["not built" if "without functions" in str(error) else str(error)] += 1
            return ""
        for arguments, expected in calls:
            if isinstance(expected, str):
                continue
            for i, x in enumerate(arguments):
                np.save(folder / f"{i}.npy", x.numpy())
            files = [f"{i}.npy" for i in range(len(step.inputs))]
            command = [str(program), "--weights", "weights.bin", "--out", "out", *files]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
            if "takes other branches" in done.stderr:
                counts["refused in C"] += 1
                continue
            counts["served in C"] += 1
            if done.returncode:
                return f"at {len(arguments[0])}: {done.stderr}"
            arrays = [np.load(folder / "out" / f"{i}.npy") for i in range(len(step.results))]
            if bits(arrays) != expected:
                return f"at {len(arguments[0])}: other bits in C"
    return ""


def check(
    seed: int, lengths: int = 5, counts: Counter[str] | None = None, build: Build | None = None
) -> tuple[str, int]:
    """Compare the function of a seed at that many lengths, and then its step: what came of it, and
    the traces. The `counts` get the number of lengths that saved steps serve and refuse."""
    counts = Counter() if counts is None else counts
    fn, rng = function(seed), np.random.default_rng(seed)
    named = {"x": ("n", None), "ids": ("n",)} if seed % 4 else None
    step = ml.capture(fn, dynamic_axes=named, max_sizes={"n": LENGTHS[-1]} if named else None)
    weight = ml.asarray(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32))
    table = ml.asarray(rng.standard_normal((5, WIDTH)).astype(np.float32))
    failed, calls = 0, []
    for n in rng.choice(LENGTHS, size=lengths, replace=False).tolist():
        x = ml.asarray(rng.standard_normal((n, WIDTH)).astype(np.float32))
        ids = ml.asarray(rng.integers(0, 5, size=n))
        if seed % 3 == 0:  # views
            x, ids = ml.reshape(ml.reshape(x, -1), x.shape), ml.concat([ids, ids])[:n]
        arguments = x, ids, weight, table
        eager, captured = outcome(fn, arguments), outcome(step, arguments)
        if eager != captured:
            errors = [each for each in (eager, captured) if isinstance(each, str)]
            return f"wrong at {n}: {errors or 'other bits'}", 0
        failed += isinstance(eager, str)
        calls.append((arguments, eager))
    saved = from_file(step) if named and not isinstance(calls[-1][1], str) else None
    if saved is not None:
        different = difference(saved, calls, counts)
        if not different and build is not None:
            different = difference_in_c(saved, calls, build, counts)
        if different:
            return f"wrong {different}", 0
    return "raised" if failed else "equal", step.signatures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(memory=0)
    parser.add_argument("--built", action="store_true", help="build the steps as C, too")


@contextmanager
def building(built: bool) -> Iterator[Build | None]:
    """Yield the function that builds steps as C, if they are to be built."""
    if not built:
        yield None
        return
    from tests.build.making import SET, Kernels

    _native.choose_simd(SET)
    with tempfile.TemporaryDirectory() as scratch:
        yield Kernels(Path(scratch), SET).build


def fuzz(
    programs: int, seed: int, first: int = 0, *, built: bool = False
) -> tuple[Outcomes, str | None]:
    """Try the functions of that many seeds; return their outcomes and those of the saved steps'
    calls, and which were wrong."""
    saved: Counter[str] = Counter()
    with building(built) as build:

        def attempt(number: int) -> str:
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
                what, traces = check(seed + number, counts=saved, build=build)
            if what not in ("equal", "raised"):
                raise Wrong(what)
            return f"{what}, in {traces} traces"

        outcomes, failure = outcomes_of(range(first, first + programs), attempt)
    outcomes.update({f"calls of saved steps: {what}": n for what, n in saved.items()})
    return outcomes, failure
