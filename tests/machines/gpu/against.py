"""The cases of an op on a device, beside the reference machine; all of them and larger ones by

    python -m tests.machines.gpu.against opencl:0 [OP ...]

Integers, comparisons, moves, random draws and what IEEE 754 rounds correctly have the same bits.
Elementary functions of floats are within `ULPS` units in the last place. Sums, products and what is
made of them are within as many units of the largest element.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.core.program.program import Program
from mlvm.core.types import Array
from mlvm.machines.gpu.elementwise import ELEMENTWISE
from tests.cases import CASES, Case
from tests.cases.evaluate import evaluate
from tests.core.programs import put

ULPS: Final = 16
"""OpenCL's own bounds (OpenCL C 1.2, 7.4) end at 16, that of `pow` and `erf`."""

_ROUNDED: Final = frozenset(
    [
        *("add", "subtract", "multiply", "divide", "negative", "abs", "sign", "square", "floor"),
        *("ceil", "round", "trunc", "sqrt", "reciprocal", "maximum", "minimum", "clip", "relu"),
        *("copysign", "nextafter", "remainder", "floor_divide", "multiply_add", "astype"),
    ]
)

_EITHER_ZERO: Final = frozenset(["maximum", "minimum", "clip", "relu", "max", "min"])
"""Of two zeros numpy gives this or that one, by the place in the array."""


def is_exact(name: str, result: Array) -> bool:
    """Return whether the result has the reference machine's bits."""
    op = OPS[name]
    drawn = op.kernel.__module__.endswith(".random")
    return result.dtype.kind not in "fc" or op.copies_only or drawn or name in _ROUNDED


def compare(name: str, actual: Array, expected: Array) -> None:
    """Raises `AssertionError` where they differ by more than they may."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    if is_exact(name, expected):
        # a nan's bits are nowhere defined
        np.testing.assert_array_equal(actual, expected, name, strict=True)
        if actual.dtype.kind == "f" and name not in _EITHER_ZERO:
            there = ~np.isnan(expected)
            assert np.array_equal(np.signbit(actual[there]), np.signbit(expected[there])), name
        return
    unit = float(np.finfo(expected.dtype).eps)
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    alone = name in ELEMENTWISE and not name.startswith("gelu")
    atol = 0.0 if alone else ULPS * unit * max(float(scale), 1.0)
    tiny = float(np.finfo(expected.dtype).tiny)
    np.testing.assert_allclose(actual, expected, ULPS * unit, atol + tiny, err_msg=name)


def launched(vm: ml.VM, name: str, case: Case) -> Array:
    """The op's result on the VM."""
    handles = [put(vm, np.array(x, order="C")) for x in case.inputs]
    attributes: dict[str, Any] = dict(OPS[name].bind(case.attributes))
    [result] = vm.launch(Program.of_op(name, len(handles), attributes, 1), handles)
    for handle in handles:
        vm.dealloc_tensor(handle)
    return result


def check(vm: ml.VM, name: str, case: Case) -> None:
    """Raises `AssertionError` where the device differs from what the case expects."""
    compare(name, launched(vm, name, case), case.expected(*case.inputs, **case.attributes))


def main(device: str, *names: str) -> int:
    from tests.machines.gpu.larger import LARGER, as_gpu

    every = [(name, case) for name, cases in CASES.items() for case in cases]
    small = [(name, replace(case, expected=partial(evaluate, name))) for name, case in every]
    failed = host_ops = 0
    for part, pairs in {"cases": small, "larger": LARGER, "larger, as a GPU": LARGER}.items():
        vm = ml.VM("gpu", device=device)
        if part.endswith("GPU"):
            as_gpu(vm)
        for i, (name, case) in enumerate(pairs):
            if names and name not in names:
                continue
            try:
                check(vm, name, case)
            except Exception as error:
                failed += 1
                print(f"{name}, {part} {i}: {type(error).__name__}: {error}", flush=True)
        host_ops += vm.counts.host_ops  # type: ignore[attr-defined]
    print(f"{failed} cases failed; {host_ops} ops ran on the host")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
