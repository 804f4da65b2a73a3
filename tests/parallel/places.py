"""Steps of members in all kinds of groups: every collective, in one run.

As a script it is the program of the tests' MPI processes:

    python -m mlvm mpirun -n 4 tests/parallel/places.py everything
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from mlvm.core.ops.half import cast, is_half, widened
from mlvm.core.program.program import Program
from mlvm.core.types import Array, DType
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.communicator import SMALL
from mlvm.parallel.group import AnyGroup
from mlvm.parallel.named import group
from tests.core.programs import put
from tests.parallel.members import call

FOLD = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}

Case = tuple[str, list[tuple[tuple[int, ...], str]], dict[str, Any]]

MANY = [((), "<f4"), ((0,), "<f8"), ((SMALL // 4 + 3,), "<f4"), ((3, 5), "|i1"), ((7,), "<f8")]

CASES: list[Case] = [
    ("all_reduce", [((7,), "<f4")], {"op": "sum"}),
    ("all_reduce", [((), "<f8")], {"op": "mean"}),
    ("all_reduce", [((0,), "<f4")], {"op": "sum"}),
    ("all_reduce", [((SMALL // 4 + 1,), "<f4")], {"op": "min"}),
    ("all_reduce", [((3, SMALL // 8 + 5), "<f4")], {"op": "mean"}),
    ("all_reduce", [((600_001,), "<f4")], {"op": "mean"}),
    ("all_reduce", MANY, {"op": "max"}),
    ("all_reduce", [*MANY, ((700, 701), "<f4"), ((3,), "<i2")], {"op": "sum"}),
    ("broadcast", MANY, {"root": 1}),
    ("broadcast", [((300_001,), "<f4")], {"root": 0}),
    ("all_gather", [((3, 5), "<f4")], {}),
    ("all_gather", [((), "<i8")], {}),
    ("all_gather", [((0,), "<f4")], {}),
    ("all_gather", [((SMALL // 4 + 1,), "<f4")], {}),
    ("all_gather", [((150_001,), "<f8")], {}),
    ("reduce_scatter", [((0, 3), "<f4")], {"op": "max"}),
    ("reduce_scatter", [((120, 3), "<f8")], {"op": "sum"}),
    ("reduce_scatter", [((120, 2_501), "<f4")], {"op": "mean"}),
]


def inputs_of(case: Case, rank: int, seed: int = 0) -> list[Array]:
    """Return the member's inputs."""
    rng = np.random.default_rng((seed, rank))
    return [
        np.asarray(50 * rng.standard_normal(shape)).astype(np.dtype(code))
        for shape, code in case[1]
    ]


def reduced(xs: Sequence[Array], op: str) -> Array:
    """From the left, in order of rank; of halves in f32, rounded once."""
    if is_half(xs[0]):
        return cast(reduced([widened(x) for x in xs], op), DType.of(xs[0].dtype))
    total: Array = functools.reduce(FOLD[op], xs)
    return np.divide(total, len(xs), dtype=total.dtype) if op == "mean" else total


def expected(case: Case, size: int, seed: int = 0) -> list[list[Array]]:
    """Return each member's results, by numpy alone."""
    name, _, attributes = case
    columns = list(zip(*[inputs_of(case, rank, seed) for rank in range(size)], strict=True))
    if name == "broadcast":
        return [[xs[attributes["root"]] for xs in columns]] * size
    if name == "all_gather":
        return [[np.concatenate([np.atleast_1d(x) for x in xs]) for xs in columns]] * size
    totals = [reduced(xs, attributes["op"]) for xs in columns]
    if name == "all_reduce":
        return [totals] * size
    return [[np.split(total, size)[rank] for total in totals] for rank in range(size)]


def digest(arrays: Sequence[Array]) -> str:
    """Shapes, dtypes and bits of the arrays, in short."""
    hasher = hashlib.sha256()
    for x in arrays:
        hasher.update(f"{x.shape}{x.dtype.str}".encode() + x.tobytes())
    return hasher.hexdigest()


def everything(rank: int, vm: VM) -> list[str]:
    """The digest of what each case leaves with this member, and of a ring of sends."""
    digests = [digest(call(vm, case[0], *inputs_of(case, rank), **case[2])) for case in CASES]
    call(vm, "barrier")
    size = group_size(vm)
    for length in (0, 5, 300_001):
        x = np.arange(length, dtype=np.float32) + rank
        after, before = (rank + 1) % size, (rank - 1) % size
        if rank == 0:
            call(vm, "send", x, to=after)
        [y] = call(vm, "recv", source=before, shape=(length,), dtype="f32")
        if rank:
            call(vm, "send", x, to=after)
        digests.append(digest([y]))
    return digests


def group_size(vm: VM) -> int:
    [x] = call(vm, "all_gather", np.zeros(()))
    return len(x)


@functools.cache
def expected_of_everything(size: int) -> list[list[str]]:
    by_case = [[digest(each) for each in expected(case, size)] for case in CASES]
    rings = [
        [digest([np.arange(n, dtype=np.float32) + (rank - 1) % size]) for rank in range(size)]
        for n in (0, 5, 300_001)
    ]
    return [list(each) for each in zip(*by_case, *rings, strict=True)]


def at_once(rank: int, vm: VM) -> list[str]:
    """Several all_reduces are started, other work and a barrier come in between."""
    arrays = [inputs_of(case, rank) for case in CASES if case[0] == "all_reduce"]
    ops = [case[2]["op"] for case in CASES if case[0] == "all_reduce"]
    handles = [[put(vm, x) for x in xs] for xs in arrays]
    for each, op in zip(handles, ops, strict=True):
        vm.launch(Program.of_op("all_reduce.start", len(each), {"op": op}, 0), each)
    call(vm, "square", np.ones(3))
    call(vm, "barrier")
    for each in reversed(handles):
        vm.launch(Program.of_op("all_reduce.wait", len(each), {}, 0), each)
    digests = [digest([vm.read(handle) for handle in each]) for each in handles]
    for handle in (handle for each in handles for handle in each):
        vm.dealloc_tensor(handle)
    return digests


@functools.cache
def expected_beside(size: int) -> list[str]:
    return [digest(expected(case, size)[0]) for case in CASES if case[0] == "all_reduce"]


# --- what goes wrong -----------------------------------------------------------------


def reduce(rank: int, vm: VM) -> Any:
    return call(vm, "all_reduce", np.ones(4, np.float32))[0].tolist()


def fails(rank: int, vm: VM) -> Any:
    if rank == 1:
        raise ValueError("boom")
    return reduce(rank, vm)


def other_type(rank: int, vm: VM) -> Any:
    return call(vm, "all_reduce", np.ones(4 + (rank == 1), np.float32))


def other_beside(rank: int, vm: VM) -> None:
    x = put(vm, np.ones(4 + (rank == 1), np.float32))
    vm.launch(Program.of_op("all_reduce.start", 1, {"op": "sum"}, 0), [x])
    time.sleep(0.05)
    vm.launch(Program.of_op("all_reduce.wait", 1, {}, 0), [x])


def other_order(rank: int, vm: VM) -> Any:
    return call(vm, "send", np.ones(4), to=0) if rank == 1 else call(vm, "barrier")


def ends(rank: int, vm: VM) -> Any:
    return call(vm, "barrier") if rank == 0 else None


def exits(rank: int, vm: VM) -> Any:
    if rank == 1:
        raise SystemExit(3)
    return call(vm, "barrier")


def is_killed(rank: int, vm: VM) -> Any:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(vm, "barrier")


def is_stopped(rank: int, vm: VM) -> Any:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return call(vm, "barrier")


def waits(rank: int, vm: VM) -> Any:
    if rank == 1:
        time.sleep(60)
    return call(vm, "barrier")


WRONG: dict[str, tuple[Callable[[int, VM], Any], list[str]]] = {
    "fails": (fails, ["ValueError: boom"]),
    "other_type": (
        other_type,
        ["GroupError: members called different collectives", "all_reduce(f32[4]", "f32[5]"],
    ),
    "other_beside": (other_beside, ["GroupError: members called different collectives", "f32[5]"]),
    "other_order": (other_order, ["deadlock: all members wait", "barrier()", "send(f64[4], to=0)"]),
    "ends": (ends, ["member 1 (vm1) has ended", "member 0 (vm0)", "barrier()"]),
}


def outcome(group: AnyGroup, fn: Callable[[int, VM], Any]) -> str:
    """Return the outcome of a run, as text."""
    try:
        return repr(group.run(fn))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Counting:
    """State kept on each member: a counter."""

    def __init__(self, rank: int, vm: VM) -> None:
        self.rank = rank
        self.total = 0

    def __call__(self, x: int, *, factor: int = 1) -> tuple[int, int]:
        self.total += factor * x
        return self.rank, self.total


def main(what: str) -> None:
    """The program of an MPI process. The first one tells in JSON what all have found."""
    with group("mpi", timeout=60) as members:
        rank = members.rank  # type: ignore[attr-defined]
        results: Any
        if what == "everything":
            counting = members.keep(Counting)
            results = {
                "everything": members.run(everything),
                "beside": members.run(at_once),
                "wrong": {name: outcome(members, fn) for name, (fn, _) in WRONG.items()},
                "after": members.run(reduce),
                "kept": [counting([1, 2, 3, 4]), counting([1, 2, 3, 4], factor=10)],
                "lambda": members.run(lambda rank, vm: 2 * rank),
            }
        elif what == "leaves":
            if rank == 1:
                raise RuntimeError("enough")
            results = outcome(members, reduce)
        elif what == "raises":
            results = members.run(fails)
        elif what == "stops":
            members.run(reduce)  # so that the timeout does not include the start of the processes
            members.timeout = members._seat.member._timeout = 1.0  # type: ignore[attr-defined]
            results = outcome(members, is_stopped)
        else:
            results = outcome(members, is_killed)
        if rank == 0:
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
