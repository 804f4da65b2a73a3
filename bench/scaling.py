"""Speedup by a second core: two VMs of a group, a thread (`2vm`), process (`2p`) or MPI process
(`2mpi`) each, or one VM whose kernels share two threads (`2t`). They are compared with one VM on
one thread.

`image_ms` is the time of a training step for each image of its batch: `strong` has the batch of
one thread for both, `weak` as many images for each of them as the one has. `gib_ms` is the
time for each GiB of a tensor of 64 MiB that two VMs sum up, both with the result (`all_reduce`),
beside one thread that copies it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np

from bench.harness import Contender, Prepare, Round, Suite, if_native, microseconds
from bench.sizes import MIXERS, STEPS, MixerSize

Step = Callable[[], object]


def preparing(cores: int, make: Callable[[MixerSize], Step]) -> Prepare:
    """Return a `prepare` of both kinds of scaling at all sizes, with `quick` at the smallest
    alone."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        @lru_cache(maxsize=1)
        def step_of(size: MixerSize) -> Step:
            return make(size)

        def timed(size: MixerSize, times: int) -> Mapping[str, float]:
            step = step_of(size)
            elapsed = microseconds(lambda: [step() for _ in range(times)])
            return {"image_ms": elapsed / 1e3 / (times * size.batch)}

        cases: dict[str, Round] = {}
        for name in ("tiny",) if quick else MIXERS:
            size, times = MIXERS[name], 2 if quick else STEPS[name]
            cases[f"{name} strong"] = partial(timed, size, times)
            cases[f"{name} weak"] = partial(timed, size._replace(batch=size.batch * cores), times)
        return cases

    return prepare


def mlvm_eager(size: MixerSize) -> Step:
    from bench.mlvm_training import Training

    return Training(size).eager


def mlvm_eager_2vm(size: MixerSize) -> Step:
    from bench.mlvm_training import training_on

    return training_on(2, size, captured=False)


def mlvm_replay(size: MixerSize, threads: int = 1) -> Step:
    from bench.mlvm_training import Training, vm_of

    return Training(size, vm_of(threads)).replay


def mlvm_replay_2vm(size: MixerSize) -> Step:
    from bench.mlvm_training import training_on

    return training_on(2, size, captured=True)


def in_processes(what: str) -> Prepare:
    """Return a `prepare` for two members that are processes."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        from bench.members import ROUNDS
        from mlvm.parallel.processes import ProcessGroup

        return ROUNDS[what](ProcessGroup(2), quick)

    return prepare


def under_mpi(what: str) -> Prepare:
    """Return a `prepare` for two members that are MPI processes, which receive the names of
    cases."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        command = [sys.executable, "-m", "mlvm", "mpirun", "-n", "2", "-m", "bench.members"]
        pipe = subprocess.PIPE
        members = subprocess.Popen(
            [*command, what, str(int(quick))], stdin=pipe, stdout=pipe, text=True
        )
        assert members.stdin is not None
        assert members.stdout is not None
        ask, answers = members.stdin, members.stdout

        def timed(case: str) -> Mapping[str, float]:
            print(case, file=ask, flush=True)
            metrics: Mapping[str, float] = json.loads(answers.readline())
            return metrics

        return {case: partial(timed, case) for case in json.loads(answers.readline())}

    return prepare


def prepare_all_reduce(quick: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml
    from bench.members import reducing_rounds

    return reducing_rounds(ml.parallel.Group(2), quick)


def prepare_memcpy(quick: bool) -> Mapping[str, Round]:
    from bench.members import REDUCED_BYTES, REPEAT, per_gib

    x = np.ones(REDUCED_BYTES, np.uint8)
    out = np.empty_like(x)

    def copy() -> None:
        for _ in range(REPEAT):
            np.copyto(out, x)

    return {"all_reduce 64 MiB": per_gib(copy)}


SUITE = Suite(
    module="bench.scaling",
    contenders=(
        Contender("mlvm-eager", "mlvm", preparing(1, mlvm_eager)),
        Contender("mlvm-eager-2vm", "threadpoolctl", preparing(2, mlvm_eager_2vm)),
        Contender("mlvm-replay", "mlvm", preparing(1, mlvm_replay)),
        Contender(
            "mlvm-replay-2t", "mlvm", if_native(preparing(2, partial(mlvm_replay, threads=2)))
        ),
        Contender("mlvm-replay-2vm", "threadpoolctl", preparing(2, mlvm_replay_2vm)),
        Contender("mlvm-replay-2p", "threadpoolctl", in_processes("replay")),
        Contender("mlvm-replay-2mpi", "mpi4py", under_mpi("replay")),
        Contender("all_reduce", "threadpoolctl", prepare_all_reduce),
        Contender("all_reduce-2p", "threadpoolctl", in_processes("all_reduce")),
        Contender("all_reduce-2mpi", "mpi4py", under_mpi("all_reduce")),
        Contender("memcpy", "numpy", prepare_memcpy),
    ),
    units={"image_ms": "ms", "gib_ms": "ms"},
    ours=(
        "mlvm-eager-2vm",
        "mlvm-replay-2t",
        "mlvm-replay-2vm",
        "mlvm-replay-2p",
        "mlvm-replay-2mpi",
        "all_reduce",
        "all_reduce-2p",
        "all_reduce-2mpi",
    ),
    targets={
        **{
            (f"{name} {kind}", "image_ms", ours, "mlvm-replay"): target
            for name, target in {"tiny": 1.5, "cifar": 1.7, "s16": 1.85}.items()
            for kind in ("strong", "weak")
            for ours in ("mlvm-replay-2t", "mlvm-replay-2vm")
        },
        **{
            ("s16 weak", "image_ms", ours, "mlvm-replay"): 1.8
            for ours in ("mlvm-replay-2p", "mlvm-replay-2mpi")
        },
        ("all_reduce 64 MiB", "gib_ms", "all_reduce-2p", "memcpy"): 0.5,
    },
    rounds=7,
    quick_rounds=1,
)
