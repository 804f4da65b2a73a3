"""The planner of memory on hard inputs: 200 rectangles that were cut into pieces, whose smallest
plan is therefore known, and the CSV files of `--instances DIR`, such as those of minimalloc.

`optimal` is the share of inputs whose plan has the smallest size: that of the rectangle; of a file
the capacity that its name states, as in A.1048576.csv, or else its lower bound. `ratio` is the mean
of sizes by these, where there is a plan. `nodes` and `ms` are means. Contenders: `mlvm` at the
effort of a captured step, `mlvm-500` at that of `python -m mlvm plan`, `orders`, which does not
search, and with `--minimalloc PATH` that program, which is given the capacity.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from bench.harness import Contender, Prepare, Round, Suite, say

if TYPE_CHECKING:  # a contender imports its own library only
    from mlvm.arena.planner import Block

INSTANCES: Final = "BENCH_INSTANCES"
MINIMALLOC: Final = "BENCH_MINIMALLOC"
"""The variables by which `--instances` and `--minimalloc` reach the contenders."""

CAPACITY: Final = 1 << 14
_MOMENTS: Final = 1 << 10
_SECONDS: Final = 30.0  # for one input of another program


class Input(NamedTuple):
    """Blocks, and the size of their smallest plan."""

    blocks: list[Block]
    smallest: int


Solve = Callable[[Input], tuple[float, int]]
"""Function that plans an input. Returns the size of the plan and the nodes."""


def rectangle(seed: int, pieces: int, *, pinwheels: bool) -> Input:
    """Cut a rectangle of moments and bytes into about so many pieces: at each step the largest
    piece into two or, with `pinwheels`, sometimes into five around a central one, which no cuts
    from side to side give."""
    from mlvm.arena.planner import Block

    rng = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    cut = [(0, _MOMENTS, 0, CAPACITY)]
    while len(cut) < pieces:
        largest = max(cut, key=lambda each: (each[1] - each[0]) * (each[3] - each[2]))
        cut.remove(largest)
        start, end, low, high = largest
        if pinwheels and end - start > 8 and high - low > 8 and rng.random() < 0.5:
            a, b = between(start + 1, end - 2), between(low + 1, high - 2)
            c, d = between(a + 1, end), between(b + 1, high)
            cut += [(start, c, low, b), (c, end, low, d), (a, end, d, high)]
            cut += [(start, a, b, high), (a, c, b, d)]
        elif end - start > 1 and (high - low < 2 or rng.random() < 0.5):
            at = between(start + 1, end)
            cut += [(start, at, low, high), (at, end, low, high)]
        else:
            at = between(low + 1, high)
            cut += [(start, end, low, at), (start, end, at, high)]
    blocks = [Block(high - low, start, end) for start, end, low, high in cut]
    return Input([blocks[i] for i in rng.permutation(len(blocks))], CAPACITY)


def rectangles(*, pinwheels: bool, count: int = 100) -> Iterator[Input]:
    """Cut so many rectangles into 20 to 119 pieces."""
    for seed in range(count):
        yield rectangle(seed, 20 + seed % 100, pinwheels=pinwheels)


def instance(file: Path) -> Iterator[Input]:
    """Read the buffers of a CSV file."""
    from mlvm.arena.planner import lower_bound
    from mlvm.show.plan_command import read_buffers

    blocks = [*read_buffers(file.name, file.read_bytes()).blocks]
    named = re.search(r"\.(\d+)\.csv$", file.name)
    yield Input(blocks, int(named[1]) if named else lower_bound(blocks, alignment=1))


def by_mlvm(effort: int, each: Input) -> tuple[float, int]:
    """Plan with the planner of captured steps; with effort 0 without a search."""
    from mlvm.arena import planner

    work = planner.WORK
    try:
        if not effort:
            planner.WORK = 0  # type: ignore[misc]
        plan, nodes = planner.plan_within(
            each.blocks, each.smallest, alignment=1, effort=max(effort, 1)
        )
    finally:
        planner.WORK = work  # type: ignore[misc]
    return plan.nbytes, nodes


def by_minimalloc(each: Input) -> tuple[float, int]:
    """Plan with minimalloc, which says whether the blocks fit; the size is else infinite."""
    with tempfile.TemporaryDirectory() as folder:
        buffers, placed = Path(folder, "buffers.csv"), Path(folder, "placed.csv")
        rows = [f"{i},{b.start},{b.end},{b.nbytes}\n" for i, b in enumerate(each.blocks)]
        buffers.write_text("id,lower,upper,size\n" + "".join(rows))
        command = [os.environ[MINIMALLOC], f"--capacity={each.smallest}"]
        command += [f"--input={buffers}", f"--output={placed}"]
        try:
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            return float("inf"), 0
        is_placed = placed.exists() and len(placed.read_text().splitlines()) > len(each.blocks)
        return each.smallest if is_placed else float("inf"), 0


def measured(solve: Solve, inputs: Callable[[], Iterator[Input]]) -> Mapping[str, float]:
    """Plan each input, and return the metrics."""
    ratios, nodes, seconds = list[float](), list[int](), list[float]()
    for each in inputs():
        start = time.perf_counter()
        nbytes, visited = solve(each)
        seconds.append(time.perf_counter() - start)
        ratios.append(max(nbytes / each.smallest, 1.0))
        nodes.append(visited)
    placed = [ratio for ratio in ratios if ratio < float("inf")]
    return {
        "optimal": float(np.mean([ratio == 1 for ratio in ratios])),
        **({"ratio": float(np.mean(placed))} if placed else {}),
        "nodes": float(np.mean(nodes)),
        "ms": 1e3 * float(np.mean(seconds)),
    }


def preparing(solve: Solve, needs: str = "") -> Prepare:
    """Return a `prepare` for a way to plan, which `needs` a variable."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        if needs and not os.environ.get(needs):
            say(f"plan: no program is given by --{needs.partition('_')[2].lower()}, skipped")
            return {}
        count = 10 if quick else 100
        inputs: dict[str, Callable[[], Iterator[Input]]] = {
            "guillotine": partial(rectangles, pinwheels=False, count=count),
            "pinwheels": partial(rectangles, pinwheels=True, count=count),
        }
        folder = os.environ.get(INSTANCES)
        for file in sorted(Path(folder).glob("*.csv")) if folder else []:
            inputs[file.stem] = partial(instance, file)
        return {case: partial(measured, solve, each) for case, each in inputs.items()}

    return prepare


SUITE = Suite(
    module="bench.plan",
    contenders=(
        Contender("mlvm", "mlvm", preparing(partial(by_mlvm, 1))),
        Contender("mlvm-500", "mlvm", preparing(partial(by_mlvm, 500))),
        Contender("orders", "mlvm", preparing(partial(by_mlvm, 0))),
        Contender("minimalloc", "mlvm", preparing(by_minimalloc, MINIMALLOC)),
    ),
    units={"optimal": "share", "ratio": "ratio", "nodes": "nodes", "ms": "ms"},
    rates=frozenset({"optimal"}),
    ours=("mlvm", "mlvm-500"),
    rounds=1,
    quick_rounds=1,
    warm_up_rounds=0,
    timeout=6000.0,
)
