"""Random programs, thrown at the machine and at the eager language.

    python -m tests.fuzz --programs 100000 --seed 0
    python -m tests.fuzz --machines --programs 100000 --seed 0
    python -m tests.fuzz --language --programs 5000 --seed 0
    python -m tests.fuzz --language --device opencl:0 --programs 1000
    python -m tests.fuzz --values --programs 1000 --seed 0
    python -m tests.fuzz --graphs --programs 1000 --seed 0

Without an option: random programs, valid ones with instructions, text or bytes changed, each
launched with a limit on its steps. Whatever they are, the VM may only run them or raise an
`MlvmError`; it loses no byte, keeps every tensor readable, and computes on. What it runs, the raw
machine and one with workers run to the same bits.

With `--machines` each of these programs runs on the reference machine and on the native one, which
must do the same.

With `--language`: random functions in the eager language, called a few times eagerly and captured,
with fusion and recomputation on and off, on one thread and on three. All must be equal to the bit,
and give the same tensors in the same places. The reference machine must do the same but for the
rounding of floats. With `--few` each program runs in a few of these ways, chosen at random. With
`--device` they run there instead of on the other machines, eagerly and captured.

With `--values`: random programs of views and updates, eagerly and captured, with gradients, beside
numpy with copies.

With `--graphs`: random ONNX graphs of 150 ops, eagerly and captured, beside ONNX Runtime. With
`--saved`: the random functions of `--language` as ONNX files, checked, run there, and read back.

Prints what was tried and what came out. The first program that does anything else is printed with
the numbers that make it again, one in the eager language cut down to what is needed, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fuzz import graphs, saved, trying, values
from tests.fuzz.language import fuzzing
from tests.fuzz.language.trying import KINDS
from tests.fuzz.machines import Machines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--language", action="store_true", help="programs in the eager language")
    parser.add_argument("--machines", action="store_true", help="the native machine beside numpy")
    parser.add_argument("--values", action="store_true", help="updates beside numpy with copies")
    parser.add_argument("--graphs", action="store_true", help="ONNX graphs beside ONNX Runtime")
    parser.add_argument("--saved", action="store_true", help="programs as ONNX files")
    parser.add_argument("--programs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=KINDS,
        help="with --language: a kind of difference that is let pass (may be given several times)",
    )
    parser.add_argument(
        "--few", action="store_true", help="with --language: few ways to run a program, at random"
    )
    parser.add_argument("--device", help="with --language: beside the processor, as opencl:0")
    parser.add_argument(
        "--memory", type=int, default=4, help="GiB of addresses for the process, if it is limited"
    )
    options = parser.parse_args(argv)
    if options.memory and not str(options.device).startswith("cuda"):  # which maps all of a GPU
        limit_memory(options.memory << 30)
    gc.freeze()  # what is there now need not be looked at when a program's garbage is collected
    fuzz: Callable[..., tuple[Any, str | None]] = trying.fuzz
    if options.language:
        fuzz = partial(fuzzing.fuzz, skip=options.skip, device=options.device, few=options.few)
    elif options.values:
        fuzz = values.fuzz
    elif options.graphs:
        fuzz = graphs.fuzz
    elif options.saved:
        fuzz = saved.fuzz
    elif options.machines:
        fuzz = partial(trying.fuzz, runs=Machines())
    runs, failure = fuzz(options.programs, options.seed, options.first)
    print(runs.report())
    if failure is not None:
        print(failure)
    return int(failure is not None)


def limit_memory(most: int) -> None:
    """So that a program that asks for too much gets an error, and not all there is."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    sys.exit(main())
