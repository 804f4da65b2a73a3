"""Members of groups that are killed, or stopped, at random moments.

    python -m tests.fuzz groups --kills 200 --stops 50 --seed 0
    python -m tests.fuzz groups --tcp --kills 200 --stops 50 --seed 0

Each time a group of two or three processes runs collectives of random sizes without end, blocking
and started ones, until one member is killed by SIGKILL, or stopped by SIGSTOP. The run must raise a
`GroupError` that names that member, within 5 seconds; of one that was stopped a
`GroupTimeoutError`, within 5 seconds after the group's timeout of 1 s. The other processes must be
gone after. In the end there is nothing new in /dev/shm, and this process has as many open files as
before.

With `--tcp` up to five processes meet by TCP, and each of those that are left must report it.

Prints what was tried and what came of it. What should not be is printed, and the exit status is 1.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from mlvm.core.errors import GroupError
from mlvm.core.program.program import Program
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.processes import ProcessGroup
from mlvm.parallel.tcp import TcpGroup
from tests.core.programs import put
from tests.fuzz.command import parser_of
from tests.parallel.joined import SECRET, free_address
from tests.parallel.members import call

LIMIT: Final = 5.0
"""Seconds until all must have ended."""

TIMEOUT: Final = 1.0
"""Seconds that members wait for each other where one is stopped."""

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
            handle = put(vm, x)
            vm.launch(Program.of_op("all_reduce.start", 1, {"op": "mean"}, 0), [handle])
            call(vm, "square", x)
            vm.launch(Program.of_op("all_reduce.wait", 1, {}, 0), [handle])
            vm.dealloc_tensor(handle)


def strike(pid: int, sign: signal.Signals, seconds: float, struck: list[float]) -> threading.Timer:
    """Send the signal after the given number of seconds."""

    def send() -> None:
        struck.append(time.monotonic())
        os.kill(pid, sign)

    timer = threading.Timer(seconds, send)
    timer.start()
    return timer


def one_of_processes(seed: int, sign: signal.Signals) -> tuple[float, str | None]:
    """Strike a member of a group. The seconds until the run had ended, and what was wrong."""
    rng = random.Random(seed)
    with ProcessGroup(rng.choice((2, 3)), timeout=_timeout(sign)) as group:
        pids = [pid for pid in group.pids if pid is not None]
        victim = rng.randrange(group.size)
        struck: list[float] = []
        timer = strike(pids[victim], sign, rng.uniform(0, 0.2), struck)
        message, kind = "nothing", ""
        try:
            group.run(partial(work, seed))
        except GroupError as error:
            message, kind = str(error), type(error).__name__
        timer.join()
        took = time.monotonic() - struck[0]
    expected = f"member {victim} (vm{victim}), process {pids[victim]}, was killed by SIGKILL"
    if sign == signal.SIGSTOP:
        expected = f" for member {victim} (vm{victim})"
    failure = _wrong(message, kind, expected, took, sign)
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    failure = failure or (f"processes {alive} are still there" if alive else None)
    return took, failure or (None if group.closed else "the group goes on")


def _timeout(sign: signal.Signals) -> float:
    return TIMEOUT if sign == signal.SIGSTOP else 60.0


def _wrong(message: str, kind: str, expected: str, took: float, sign: signal.Signals) -> str | None:
    is_stop = sign == signal.SIGSTOP
    if expected not in message or (is_stop and kind != "GroupTimeoutError"):
        return f"{sign.name}: not {expected!r}, but {kind} {message}"
    if took > LIMIT + (TIMEOUT if is_stop else 0):
        return f"{sign.name}: it took {took:.1f} s"
    return None


def member(rank: int, size: int, address: str, seed: int, pipe: Connection, timeout: float) -> None:
    """A process of a group that meets by TCP."""
    try:
        group = TcpGroup(rank, size, address, secret=SECRET, timeout=timeout)
        pipe.send(("", ""))
        with group:
            group.run(partial(work, seed))
    except GroupError as error:
        pipe.send((type(error).__name__, str(error)))


def one_of_tcp(seed: int, sign: signal.Signals) -> tuple[float, str | None]:
    """Strike a process of a group over TCP. The seconds until all others had told, and what was
    wrong."""
    rng = random.Random(seed)
    size = rng.choice((2, 3, 5))
    victim = rng.randrange(size)
    address = free_address()
    context = multiprocessing.get_context("fork")  # a fresh Python takes a second
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=member, args=(rank, size, address, seed, pipes[rank][1], _timeout(sign))
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for ours, _ in pipes:
            if not ours.poll(30) or ours.recv()[0]:
                return 0.0, "a group was not made"
        struck: list[float] = []
        pid = processes[victim].pid
        assert pid is not None
        strike(pid, sign, rng.uniform(0, 0.2), struck).join()
        for rank, (ours, _) in enumerate(pipes):
            if rank == victim:
                continue
            limit = LIMIT + TIMEOUT - (time.monotonic() - struck[0])
            kind, message = ours.recv() if ours.poll(limit) else ("nothing", "")
            took = time.monotonic() - struck[0]
            expected = f"member {victim} (vm{victim})"
            expected = f" for {expected}" if sign == signal.SIGSTOP else f"{expected} has left"
            failure = _wrong(message, kind, expected, took, sign)
            if failure is not None:
                return took, f"{size} members, {rank} told: {failure}"
        return took, None
    finally:
        for process, (ours, theirs) in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            ours.close()
            theirs.close()


def fuzz(kills: int, stops: int, seed: int, *, tcp: bool = False) -> tuple[str, list[str]]:
    """Strike members at random moments; return a summary, and the failures."""
    one = one_of_tcp if tcp else one_of_processes
    wrong: list[str] = []
    longest = {signal.SIGKILL: 0.0, signal.SIGSTOP: 0.0}
    one(-seed - 1, signal.SIGKILL)  # what is opened once is open after this
    shared, files = set(SHARED.iterdir()), len(list(FILES.iterdir()))
    for number in range(kills + stops):
        sign = signal.SIGKILL if number < kills else signal.SIGSTOP
        took, failure = one(seed * 1_000_003 + number, sign)
        longest[sign] = max(longest[sign], took)
        if failure is not None:
            wrong.append(f"{number}: {failure}")
    if new := set(SHARED.iterdir()) - shared:
        wrong.append(f"left in shared memory: {sorted(map(str, new))}")
    if (now := len(list(FILES.iterdir()))) > files:
        wrong.append(f"{now} open files, {files} before")
    return (
        f"{kills} members killed, the others ended after at most {longest[signal.SIGKILL]:.2f} s; "
        f"{stops} stopped, {longest[signal.SIGSTOP]:.2f} s"
    ), wrong


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--tcp", action="store_true", help="groups that meet by TCP")
    parser.add_argument("--kills", type=int, default=200, help="how many are killed")
    parser.add_argument("--stops", type=int, default=50, help="how many are stopped")
    parser.add_argument("--seed", type=int, default=0, help="of all")
    options = parser.parse_args(argv)
    summary, wrong = fuzz(options.kills, options.stops, options.seed, tcp=options.tcp)
    print(summary)
    for each in wrong:
        print(each)
    return int(bool(wrong))
