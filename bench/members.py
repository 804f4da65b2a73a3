"""Work of a group's members in `bench.scaling`, on any transport: train, or sum up a tensor.

As a program of MPI processes it takes the names of cases from the first one's input, and answers
with metrics in JSON:

    python -m mlvm mpirun -n 2 -m bench.members replay 1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final

import mlvm.eager as ml
from bench.harness import Round, microseconds
from bench.mlvm_training import Training
from bench.sizes import MIXERS, STEPS, MixerSize
from mlvm.parallel.group import AnyGroup
from mlvm.parallel.mpi import MpiGroup

REDUCED_BYTES: Final = 64 << 20
REPEAT: Final = 4


def trainer(size: MixerSize, rank: int, vm: ml.VM) -> Callable[[int], None]:
    """Return a function that runs a number of captured steps on the member's batch of that size."""
    training = Training(size, vm)

    def train(steps: int) -> None:
        for _ in range(steps):
            training.replay()

    return train


def reducer(rank: int, vm: ml.VM) -> Callable[[], None]:
    """Return a function that sums up a tensor of `REDUCED_BYTES` over all members, `REPEAT`
    times."""
    with ml.Arena(vm, "operand").allocating():
        x = ml.ones((REDUCED_BYTES // 4,))

    def reduce() -> None:
        for _ in range(REPEAT):
            ml.parallel.all_reduce(x)

    return reduce


def training_rounds(group: AnyGroup, quick: bool) -> Mapping[str, Round]:
    """Rounds of both kinds of scaling: a member has its part of the batch, or as much as all."""

    @lru_cache(maxsize=1)
    def member_trainer(size: MixerSize) -> Callable[..., object]:
        return group.keep(partial(trainer, size))

    def timed(size: MixerSize, times: int) -> Mapping[str, float]:
        train = member_trainer(size)
        elapsed = microseconds(lambda: train([times] * group.size))
        return {"image_ms": elapsed / 1e3 / (times * size.batch * group.size)}

    rounds: dict[str, Round] = {}
    for name in ("tiny",) if quick else MIXERS:
        size, times = MIXERS[name], 2 if quick else STEPS[name]
        part = size._replace(batch=size.batch // group.size)
        rounds[f"{name} strong"] = partial(timed, part, times)
        rounds[f"{name} weak"] = partial(timed, size, times)
    return rounds


def reducing_rounds(group: AnyGroup, quick: bool) -> Mapping[str, Round]:
    """Return the round of `all_reduce`."""
    reduce = group.keep(reducer)
    return {"all_reduce 64 MiB": per_gib(reduce)}


def per_gib(work: Callable[[], object]) -> Round:
    """Time work that handles `REDUCED_BYTES` bytes `REPEAT` times, for each GiB of them."""
    gib = REPEAT * REDUCED_BYTES / 2**30
    return lambda: {"gib_ms": microseconds(work) / 1e3 / gib}


ROUNDS: Final = {"replay": training_rounds, "all_reduce": reducing_rounds}


def main(what: str, quick: str) -> None:
    """Serve cases in an MPI process until its input ends."""
    with MpiGroup() as group:
        rounds = ROUNDS[what](group, quick == "1")
        is_first = group.rank == 0
        answer: object = list(rounds)
        while True:
            if is_first:
                print(json.dumps(answer), flush=True)
            case = group.run(lambda rank, vm: sys.stdin.readline().strip() if rank == 0 else "")[0]
            if not case:
                return
            answer = rounds[case]()


if __name__ == "__main__":
    main(*sys.argv[1:])
