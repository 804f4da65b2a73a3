"""How far the native f32 functions are from the true values, over all 2^32 inputs.

    python -m tests.ulp                 all of them: some minutes
    python -m tests.ulp --sample 4096   every 4096th input
    python -m tests.ulp exp tanh

Errors are in units in the last place of the result (of the least normal number, for what lies
below it). The true value is numpy's in f64, or that of the native f64 function where numpy has none
or loses digits; the tests compare those with C's and with 80-bit arithmetic. A derivative is the
sum of two terms: near its zero the unit is that of the larger one. Fails above 4.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.types import Array, TensorType
from mlvm.machines.native._native import Pool
from mlvm.machines.native.kernels import native_kernels

LIMIT: Final = 4.0
_BLOCK: Final = 1 << 20
_POOL: Final = Pool()
_KERNELS: Any = native_kernels(_POOL)

Function = Callable[[Array], Array]


def native(op: str, *inputs: Array, **attributes: Any) -> Array:
    """The op's result by its native kernel."""
    out = np.empty_like(inputs[0])
    bound = OPS[op].bind(attributes)
    plan = _KERNELS[op].plan([TensorType.of(x) for x in (out, *inputs)], bound)
    assert plan is not None, op
    plan.run(_POOL, out, *inputs)
    return out


def _gelu(approximate: bool, x: Array) -> Array:
    return native("gelu", x, approximate=approximate)


def _slope(approximate: bool, x: Array) -> Array:
    return native("gelu_vjp", np.ones_like(x), x, approximate=approximate)


def _larger_term(approximate: bool, x: Array, slope: Array) -> Array:
    """The larger of Phi(x) and |x Phi'(x)|, whose sum `slope` is."""
    phi = np.where(x == 0, 0.5, _gelu(approximate, x) / x)
    larger: Array = np.maximum(phi, np.abs(slope - phi))
    return larger


_OPS: Final = ("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sigmoid", "erf")
FUNCTIONS: Final[dict[str, tuple[Function, Function]]] = {
    **{name: (partial(native, name), getattr(np, name, partial(native, name))) for name in _OPS},
    **{
        f"{name}_{form}": (partial(function, form == "tanh"),) * 2
        for name, function in (("gelu", _gelu), ("gelu_vjp", _slope))
        for form in ("tanh", "erf")
    },
}
"""By name: the function in f32, and that which gives the true values in f64."""


def largest_error(name: str, x: Array) -> tuple[float, float]:
    """The largest error in ulp among inputs x, f32, and where it is; inf where only one of both is
    a nan or infinite."""
    function, truth = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        y, true = function(x), truth(wide)
        size = np.abs(true)
        if "vjp" in name:
            size = np.fmax(size, _larger_term("tanh" in name, wide, true))
        exponent = np.frexp(np.clip(size, 2.0**-126, float(np.finfo(np.float32).max)))[1]
        error = np.abs(y - true) * np.exp2(24.0 - exponent)
        same = (np.isnan(y) & np.isnan(true)) | (y == true.astype(np.float32))
        error = np.where(same, np.minimum(np.nan_to_num(error, posinf=0.0), 0.5), error)
        error = np.nan_to_num(error, nan=math.inf)
    worst = int(np.argmax(error))
    return float(error[worst]), float(x[worst])


def block_errors(number: int, step: int, names: tuple[str, ...]) -> list[tuple[float, float]]:
    """The largest error of each function in one block of all inputs."""
    bits = np.arange(number * _BLOCK * step, min((number + 1) * _BLOCK * step, 1 << 32), step)
    x = bits.astype(np.uint32).view(np.float32)
    return [largest_error(name, x) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*FUNCTIONS])
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every N-th input")
    options = parser.parse_args()
    step, names = options.sample, tuple(options.names)
    blocks = range(-(-(1 << 32) // (_BLOCK * step)))
    worst = [(0.0, 0.0)] * len(names)
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for found in processes.map(partial(block_errors, step=step, names=names), blocks):
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
    for name, (error, x) in zip(names, worst, strict=True):
        print(f"{name:14} {error:8.3f} ulp at {x!r}")
    return int(max(worst)[0] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
