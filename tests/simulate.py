"""Groups and servers in simulated worlds: every delay, loss and death is chosen by a seed.

    python -m tests.simulate --seeds 5000
    python -m tests.simulate --first 34 --seeds 1 --verbose

Each seed is a world of its own, in virtual time and in one thread (`tests/simulation/world.py`): a
group of 2 to 5 members, or a server with clients. It is struck by at most one fault. Every run that
completes must have the right bits, nobody may hang, errors must name the member that failed, and
all sockets, threads and memory must be released. Prints each seed that breaks a rule; the exit
status is 1 if there is one. A seed does the same each time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

from mlvm.parallel.blas import one_blas_thread
from tests.simulation.members import Members, little_data
from tests.simulation.serving import Serving
from tests.simulation.world import World


def one(seed: int) -> tuple[str, list[str], str]:
    """Simulate a seed. Return what it was, what was wrong, and a digest of all that happened."""
    world = World(seed)
    with little_data():
        scenario = Members(world) if seed % 4 else Serving(world)
        try:
            world.run(scenario.longest)
            wrong = list(scenario.wrong())
        except RuntimeError as error:
            wrong = [str(error)]
        world.end()
        scenario.close()
    return str(scenario), wrong, world.digest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--verbose", action="store_true", help="print every seed")
    options = parser.parse_args(argv)
    one_blas_thread.prepare()
    began, failed, counts = time.monotonic(), 0, Counter[str]()
    gc.disable()  # so that a seed does not depend on those before it
    try:
        with one_blas_thread.limited():
            for seed in range(options.first, options.first + options.seeds):
                what, wrong, digest = one(seed)
                counts[what.partition(" member ")[0]] += 1
                failed += bool(wrong)
                if wrong or options.verbose:
                    print(f"seed {seed}: {what}; {digest}", *wrong, sep="\n    ", flush=True)
                if seed % 100 == 99:
                    gc.collect()
    finally:
        gc.enable()
    seconds = time.monotonic() - began
    print(f"{options.seeds} seeds in {seconds:.0f} s, {failed} of them wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
