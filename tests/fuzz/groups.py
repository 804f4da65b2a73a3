"""Members of groups that are killed at random moments.

    python -m tests.fuzz.groups --kills 200 --seed 0

Each time a group of two or three processes runs collectives of random sizes without end, blocking
and started ones, until one member is killed by SIGKILL. The run must raise a `GroupError` that
names that member, within 5 seconds, and the other processes must be gone after. In the end there
is nothing new in /dev/shm, and this process has as many open files as before.

Prints what was tried and what came of it. What should not be is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from mlvm.core.errors import GroupError
from mlvm.core.program.program import Program
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.processes import ProcessGroup
from tests.parallel.members import call, tensor

LIMIT: Final = 5.0
"""Seconds until all must have ended."""

SHARED: Final = Path("/dev/shm")
FILES: Final = Path("/proc/self/fd")


def work(seed: int, rank: int, vm: VM) -> None:
    """Collectives without end, the same for all members."""
    rng = random.Random(seed)
    while True:
        x = np.ones(rng.choice((1, 1000, 70_000, 600_000)), np.float32)
        kind = rng.randrange(4)
        if kind == 0:
            call(vm, "all_reduce", x, op="mean")
        elif kind == 1:
            call(vm, "all_gather", x)
        elif kind == 2:
            call(vm, "broadcast", x, root=0)
        else:
            handle = tensor(vm, x)
            vm.launch(Program.of_op("all_reduce.start", 1, {"op": "mean"}, 0), [handle])
            call(vm, "square", x)
            vm.launch(Program.of_op("all_reduce.wait", 1, {}, 0), [handle])
            vm.dealloc_tensor(handle)


def kill_one(seed: int) -> tuple[float, str | None]:
    """Kill a member of a group. The seconds until the run had ended, and what was wrong."""
    rng = random.Random(seed)
    with ProcessGroup(rng.choice((2, 3))) as group:
        pids = [pid for pid in group.pids if pid is not None]
        victim = rng.randrange(group.size)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(pids[victim], signal.SIGKILL)

        timer = threading.Timer(rng.uniform(0, 0.2), kill)
        timer.start()
        try:
            group.run(partial(work, seed))
            told = "nothing"
        except GroupError as error:
            told = str(error)
        timer.join()
        took = time.monotonic() - killed[0]
    if f"member {victim} (vm{victim}), process {pids[victim]}, was killed by SIGKILL" not in told:
        return took, f"member {victim} was killed, and the run told of {told}"
    if took > LIMIT:
        return took, f"it took {took:.1f} s"
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return took, f"processes {alive} are still there" if alive else None


def fuzz(kills: int, seed: int) -> tuple[str, list[str]]:
    """What was tried, and what was wrong."""
    wrong: list[str] = []
    longest = 0.0
    kill_one(-seed - 1)  # what is opened once is open after this
    shared, files = set(SHARED.iterdir()), len(list(FILES.iterdir()))
    for number in range(kills):
        took, failure = kill_one(seed * 1_000_003 + number)
        longest = max(longest, took)
        if failure is not None:
            wrong.append(f"kill {number}: {failure}")
    if new := set(SHARED.iterdir()) - shared:
        wrong.append(f"left in shared memory: {sorted(map(str, new))}")
    if (now := len(list(FILES.iterdir()))) > files:
        wrong.append(f"{now} open files, {files} before")
    return f"{kills} members killed, the others ended after at most {longest:.2f} s", wrong


def main(argv: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.groups", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all")
    options = parser.parse_args(argv)
    told, wrong = fuzz(options.kills, options.seed)
    print(told)
    for each in wrong:
        print(each)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
