"""Pairs of recordings that must be equal: `diff` must not report a false alarm.

    python -m tests.fuzz equal_runs --programs 200 --seed 0

Each pair is a training of random layers (`tests.fuzz.budgets`), and the same training with a
different number of threads, workers or members, a different transport of a group, eagerly, without
fusion, or with a different instruction set. Other pairs are loops over scalars, with and without
machine code. This process must also verify the second recording.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.eager.runs.diff import diff
from mlvm.eager.runs.replay import open_run
from mlvm.eager.runs.verification import verify
from mlvm.machines.native import extension
from tests.brief import run_python
from tests.fuzz.budgets import Training
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

PROGRAMS: Final = 200

STEPS: Final = 5


class Scalars:
    """A step of a loop over scalars, whose body is one chain. Values become infinite and nan."""

    OPS: Final[dict[str, Any]] = {
        "add": ml.add, "subtract": ml.subtract, "multiply": ml.multiply, "divide": ml.divide,
        "where": lambda x, y: ml.where((x < y) & ~(y == 1.0) | (x != x), -x, 1.0 / y),
        "sqrt": lambda x, y: ml.sqrt(x * x + y), "limits": lambda x, y: ml.minimum(ml.exp(-x), y),
    }  # fmt: skip

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        count, self.turns = draw.randint(2, 5), draw.choice([3, 60])
        self.terms = [
            (draw.choice([*self.OPS]), draw.randrange(count + i), draw.randrange(count + i))
            for i in range(draw.randint(count, 30))
        ]
        dtype = draw.choice(["f32", "f64"])
        self.x = ml.asarray([draw.gauss(0, 1) for _ in range(count)], dtype=dtype)
        self.total = ml.zeros((), dtype=dtype)

    def step(self, x: Tensor) -> Tensor:
        def turn(i: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            values = [*state]
            for op, a, b in self.terms:
                values.append(self.OPS[op](values[a], values[b]))
            return tuple(values[-len(state) :])

        state = ml.fori_loop(0, self.turns, turn, tuple(x[i] for i in range(x.shape[0])))
        self.total += state[0]
        return ml.stack(state)


def train(
    folder: Path | None, seed: int, kind: str = "captured", *, is_member: bool = False
) -> None:
    """Record a training on the current VM; without a folder, the caller records it."""
    ml.random.seed(seed)
    training: Any = Training(seed) if seed % 3 else Scalars(seed)
    if is_member:
        training.value_and_grad = ml.parallel.value_and_grad
    fn: Any = training.step
    options: Any = {"fuse": False} if kind == "unfused" else {}
    step = ml.runs.step(fn) if kind == "eager" else ml.capture(fn, **options)
    with nullcontext() if folder is None else ml.runs.record(folder, every=3):
        for n in range(STEPS):
            step(training.x * float(n + 1))


def in_vm(folder: Path, seed: int, kind: str = "captured", **options: Any) -> None:
    with ml.use(ml.VM("run", **options)):
        train(folder, seed, kind)


def by_member(folder: Path | None, seed: int, rank: int, vm: object) -> None:
    """Train as a member of a group, on the same batch as each other member."""
    train(folder and folder / str(rank), seed, is_member=True)


def in_group(folder: Path, seed: int, size: int) -> None:
    with ml.parallel.Group(size) as group, ml.runs.record(folder, every=3):
        group.run(partial(by_member, None, seed))


def in_processes(folder: Path, seed: int) -> None:
    """Record in the processes of a group. The first member records, in a folder of its own."""
    with ml.parallel.ProcessGroup(2) as group:
        group.run(partial(by_member, folder / "members", seed))
    (folder / "members" / "0").rename(folder / "0")
    for file in (folder / "0").iterdir():
        file.rename(folder / file.name)


def in_process(folder: Path, seed: int, **variables: Any) -> None:
    """Record in a process with these variables of environment."""
    done = run_python("-m", "tests.fuzz.equal_runs", str(folder), str(seed), **variables)
    if done.returncode:
        raise Wrong(f"{variables}: {done.stderr[-2000:]}")


SETS: Final = [name for name, here in extension.simd_sets().items() if here]
VARIANTS: Final[dict[str, Callable[[Path, int], None]]] = {
    "3 threads": partial(in_vm, threads=3),
    "2 workers": partial(in_vm, workers=2),
    "2 workers of 2 threads, eagerly": partial(in_vm, kind="eager", threads=2, workers=2),
    "eagerly": partial(in_vm, kind="eager"),
    "without fusion": partial(in_vm, kind="unfused"),
    "2 members": partial(in_group, size=2),
    "4 members": partial(in_group, size=4),
    "2 processes": in_processes,
    "without machine code": partial(in_process, MLVM_MACHINE_CODE="0"),
    **{f"set {x}": partial(in_process, MLVM_SIMD=x, MLVM_MACHINE_CODE="1") for x in SETS},
}


def attempt(folder: Path, seed: int, number: int) -> str:
    """Compare a pair; return the outcome. Raises `Wrong`."""
    variant = [*VARIANTS][number % len(VARIANTS)]
    for name in ("a", "b"):
        shutil.rmtree(folder / name, ignore_errors=True)
    in_vm(folder / "a", seed + number)
    VARIANTS[variant](folder / "b", seed + number)
    other = open_run(folder / "b")
    difference = diff(open_run(folder / "a"), other)
    if difference is not None:
        raise Wrong(f"{variant}: a false alarm: {difference}")
    verified = verify(other, steps=2, seed=number)
    if verified.mismatches or verified.problems:
        raise Wrong(f"{variant}: {verified.mismatches} {verified.problems}")
    return f"equal: {variant}"


def fuzz(programs: int, seed: int, first: int) -> tuple[Outcomes, str | None]:
    with tempfile.TemporaryDirectory() as name:
        numbers = range(first, first + programs)
        return outcomes_of(numbers, partial(attempt, Path(name), seed))


if __name__ == "__main__":
    in_vm(Path(sys.argv[1]), int(sys.argv[2]))
