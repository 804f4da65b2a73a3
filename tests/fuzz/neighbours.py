"""The time that other clients wait for a server while one of its clients computes.

    python -m tests.fuzz neighbours --seconds 5

A client asks for nothing and counts how long that takes, first alone, then beside another one that
computes without a pause: singular values, and products of integers, whose kernels keep the lock of
the interpreter that they run in. With a process for each client the time that 99 of 100 round trips
stay below must not grow by more than three times, as long as there is a core for each; the exit
status is 1 if it does. With one process for all it is printed, too, for comparison.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.server import Server
from tests.brief import line_of, start_python
from tests.fuzz.command import parser_of

SECRET: Final = "between neighbours"
MOST: Final = 3.0
"""Times that a round trip may take beside a busy client."""

_PAUSE: Final = 0.001  # seconds between two round trips
_BUSY: Final = """if True:
    import sys
    import mlvm.eager as ml
    with ml.connect(sys.argv[1], secret=sys.argv[2]) as vm, ml.use(vm):
        x = ml.random.normal((300, 300), key=ml.random.key(0))
        n = ml.ones((400, 400), dtype="i64")
        while True:
            ml.linalg.svdvals(x)[0].tolist()
            (n @ n)[0, 0].tolist()
            print("computes", flush=True)
"""


def trips(vm: RemoteVM, seconds: float) -> tuple[float, float]:
    """The times of round trips in microseconds: that of the middle one, and that which 99 of 100
    stay below."""
    times = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        begun = time.perf_counter()
        vm.consumed_size_in_mib()
        times.append(time.perf_counter() - begun)
        time.sleep(_PAUSE)
    times.sort()
    return times[len(times) // 2] * 1e6, times[int(0.99 * len(times))] * 1e6


def measure(processes: int, seconds: float) -> float:
    """Return the factor by which 99 of 100 round trips take longer beside a busy client."""
    options = {"limits": Limits(launch_seconds=60.0), "processes": processes}
    with Server("127.0.0.1:0", secret=SECRET, **options) as server:  # type: ignore[arg-type]
        address = str(server.address)
        with connect(address, secret=SECRET) as vm:
            idle = trips(vm, seconds)
            with start_python("-c", _BUSY, address, SECRET) as busy:
                line_of(busy)
                try:
                    busy_trips = trips(vm, seconds)
                finally:
                    busy.kill()
    where = "a process for each" if processes else "one process for all"
    print(
        f"{where}: median {idle[0]:.0f} us idle, {busy_trips[0]:.0f} us beside a busy client; "
        f"99 % below {idle[1]:.0f} us idle, {busy_trips[1]:.0f} us beside it"
    )
    return busy_trips[1] / idle[1]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    text = "how often; the best counts, since others may use this host"
    parser.add_argument("--rounds", type=int, default=3, help=text)
    options = parser.parse_args(argv)
    with suppress(KeyboardInterrupt):
        measure(0, options.seconds)
        ratio = min(measure(4, options.seconds) for _ in range(options.rounds))
        print(f"{ratio:.2f} times as long; {MOST:g} may be")
        return int(ratio > MOST)
    return 130
