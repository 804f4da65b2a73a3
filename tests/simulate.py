"""Groups and servers in simulated worlds: every delay, loss and death is chosen by a seed.

    python -m tests.simulate --seeds 5000
    python -m tests.simulate --first 34 --seeds 1 --verbose
    python -m tests.simulate --defects

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

from mlvm.parallel.blas import one_blas_thread
from tests.packages import named_if_missing

with named_if_missing():
    from tests.simulation.defects import DEFECTS, having
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


def prepare() -> None:
    """Look for BLAS once: every group limits its threads."""
    one_blas_thread.prepare()


def first_wrong(defect: str, seeds: int) -> int | None:
    """Return the first seed that finds the defect, or None."""
    with having(defect), one_blas_thread.limited():
        for seed in range(seeds):
            if one(seed)[1]:
                return seed
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--verbose", action="store_true", help="print every seed")
    parser.add_argument("--defects", action="store_true", help="find known defects, one by one")
    options = parser.parse_args(argv)
    prepare()
    if options.defects:
        found = []
        for name in DEFECTS:
            found.append(first_wrong(name, options.seeds))
            text = "not found" if found[-1] is None else f"found by seed {found[-1]}"
            print(f"{name}: {text}", flush=True)
        return int(None in found)
    began, failed = time.monotonic(), 0
    gc.disable()  # so that a seed does not depend on those before it
    try:
        with one_blas_thread.limited():
            for seed in range(options.first, options.first + options.seeds):
                what, wrong, digest = one(seed)
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
