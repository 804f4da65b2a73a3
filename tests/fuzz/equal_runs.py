"""Pairs of recordings that must be equal: `diff` must not report a false alarm.

    python -m tests.fuzz equal_runs --programs 200 --seed 0

Each pair is a training of random layers (`tests.fuzz.budgets`), and the same training with a
different number of threads, workers or members, a different transport of a group, eagerly, without
fusion, or with a different instruction set. This process must also verify the second recording.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlvm.eager as ml
from mlvm.eager.runs.diff import diff
from mlvm.eager.runs.replay import open_run
from mlvm.eager.runs.verification import verify
from mlvm.machines.native import extension
from tests.brief import run_python
from tests.fuzz.budgets import Training
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

PROGRAMS: Final = 200

STEPS: Final = 5


def train(
    folder: Path | None, seed: int, kind: str = "captured", *, is_member: bool = False
) -> None:
    """Record a training on the current VM; without a folder, the caller records it."""
    ml.random.seed(seed)
    training = Training(seed)
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


def with_set(simd: str, folder: Path, seed: int) -> None:
    """Record in a process that uses an instruction set."""
    module = "-m", "tests.fuzz.equal_runs", str(folder), str(seed)
    done = run_python(*module, MLVM_SIMD=simd)
    if done.returncode:
        raise Wrong(f"{simd}: {done.stderr[-2000:]}")


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
    **{f"set {name}": partial(with_set, name) for name in SETS},
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
