"""Fuzzers, by name: `python -m tests.fuzz NAME`; `python -m tests.fuzz NAME --help` has options.

    machines --programs 100000 --seed 0
    language --programs 5000 --seed 0
    language --device opencl:0 --programs 1000
    values, graphs, saved, transformations, lengths, interrupts, templates, guards, budgets,
        debugger, windows: as these
    arguments --only conv2d
    recipes

`machines`: random programs, valid ones with instructions, text or bytes changed, each launched
with a limit on its steps, on the reference machine and on the native one, which must do the same.
Whatever they are, a VM may only run them or raise an `MlvmError`; it loses no byte, keeps every
tensor readable, and computes on. The raw machine and one with workers give the same bits.

`language`: random functions in the eager language, called a few times eagerly and captured, with
fusion and recomputation on and off, on one thread and on three. All must be equal to the bit, and
give the same tensors in the same places. The reference machine must do the same but for the
rounding of floats. With `--device` they run there instead of on the other machines, eagerly and
captured.

`values`: random programs of views and updates, eagerly and captured, with gradients, beside numpy
with copies.

`graphs`: random ONNX graphs of 150 ops, eagerly and captured, beside ONNX Runtime. `saved`: the
random functions of `language` as ONNX files, checked, run there, and read back.

`transformations`: lanes and derivatives beside JAX. `lengths`: open axes. `interrupts`: Ctrl-C.
`guards`: state that changes between calls of a captured function, which must see it or refuse it.
`recordings`: files of `ml.runs.record` with bytes or values changed, which nothing may accept.
`kills`: processes that are killed while they record. `differences`: recordings with one difference,
which `diff` must name. `equal_runs`: recordings that must be equal.
`windows`: slices, strides, writes and loops, eagerly, captured and saved, beside numpy.
`budgets`: training steps with `capture(memory=)`, which must keep eager's bits and their budgets.

`debugger`: captured steps op by op, forwards and backwards, beside the captured call.

`templates`: random chains of public calls, with the cache of composed calls and without it, under
tapes, autocast, captures, arena resets, a second VM, threads and interrupts. Results, errors and
warnings must be identical.
`extremes`, `kinks`, `counts`, `tails` hold public functions against f64, limits and scipy: at
infinities and other extreme values, in derivatives up to the third at zeros and ties, for 70,000
elements in half precision, and in the tails of distributions. They take names of functions.

`arguments`: public functions with wrong values for each argument. `recipes`: what hints say to
write, beside the functions of numpy and PyTorch that it replaces.

Others have options of their own: `threads`, `remote` (damaged messages, killed clients), `groups`
(killed members), `neighbours` (waiting times of a server), `races` (device kernels under oclgrind),
`built` (the loop in C and built steps, under libFuzzer or sanitizers), `writers` (files, with a
full disk, in a read-only folder, killed), `attributes` (of ONNX's ops, which no code reads),
`variants` (ONNX's tests of ops in other sizes and dtypes, beside ONNX Runtime).

Prints outcomes, and `no fault found` if there is none. The first program that fails is printed with
the numbers that make it again, one in the eager language cut down to what is needed, and the exit
status is 1. Needs `pip install -e ".[test]"`, and `recipes` PyTorch.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from importlib import import_module
from typing import Any

from tests.fuzz.command import limit_memory, parser_of, told
from tests.packages import named_if_missing

PROGRAMS = (
    *("machines", "language", "values", "graphs", "saved", "transformations", "lengths"),
    *("interrupts", "templates", "guards", "budgets", "debugger", "recordings", "windows"),
    *("differences", "equal_runs", "kills"),
)
OTHERS = (
    "threads",
    "remote",
    "groups",
    "neighbours",
    "races",
    "built",
    "extremes",
    "tails",
    "counts",
    *("kinks", "writers", "attributes", "variants", "arguments", "recipes"),
)


def main(argv: list[str] | None = None) -> int:
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    rest = rest[:-1]
    if name in (*PROGRAMS, *OTHERS):
        with named_if_missing():
            is_drawn = name in PROGRAMS
            run = partial(fuzz_programs, name) if is_drawn else module_of(name).main
            status: int = run(rest)
        if status == 0:
            print(f"{name}: no fault found")
        return status
    print(__doc__ if name in ("-h", "--help") else f"expected one of {[*PROGRAMS, *OTHERS]}")
    return 0 if name in ("-h", "--help") else 2


def module_of(name: str) -> Any:
    """Import the module of a fuzzer."""
    return import_module(f"tests.fuzz.{'language.fuzzing' if name == 'language' else name}")


def fuzz_programs(name: str, argv: list[str]) -> int:
    """Run a fuzzer that draws programs by their numbers."""
    module = module_of(name)
    parser = parser_of(name, __doc__)
    most = getattr(module, "PROGRAMS", 10_000)
    parser.add_argument("--programs", type=int, default=most, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    text = "GiB of addresses for the process, if it is limited"
    parser.add_argument("--memory", type=int, default=4, help=text)
    if hasattr(module, "add_options"):
        module.add_options(parser)
    options = vars(parser.parse_args(argv))
    memory = options.pop("memory")
    if memory and not str(options.get("device")).startswith("cuda"):  # which maps all of a GPU
        limit_memory(memory << 30)
    gc.freeze()  # what is there now need not be looked at when a program's garbage is collected
    return told(*module.fuzz(**options))


if __name__ == "__main__":
    sys.exit(main())
