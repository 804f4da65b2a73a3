"""Errors of the native f32 functions beside the true values, over all 2^32 inputs.

    python -m tests.ulp                 all of them: a quarter of an hour on two cores
    python -m tests.ulp --sample 4097   every 4097th input
    python -m tests.ulp exp tanh

Errors are in units in the last place of the result, or of the least normal number for what lies
below it. The true value is that of the native f64 function, which the tests compare with 80-bit
arithmetic. Fails above 4. A derivative is the sum of two terms: near its zero the unit is that of
the larger one, and its limit is 5.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.types import Array, TensorType
from mlvm.machines.native._native import Pool
from mlvm.machines.native.kernels import native_kernels

_BLOCK: Final = 1 << 15  # elements at a time: they stay in the second-level cache
_TASK: Final = 64  # blocks
_POOL: Final = Pool()
_KERNELS: Any = native_kernels(_POOL)

Function = Callable[[Array], Array]


def native(op: str, *inputs: Array, **attributes: Any) -> Array:
    """The op's result by its native kernel."""
    out = np.empty_like(inputs[0])
    bound = OPS[op].bind(attributes)
    call = _KERNELS[op].call([TensorType.of(x) for x in (out, *inputs)], bound)
    assert call is not None, op
    call.run(_POOL, out, *inputs)
    return out


def _gelu(approximate: bool, x: Array) -> Array:
    return native("gelu", x, approximate=approximate)


def _slope(approximate: bool, x: Array) -> Array:
    return native("gelu_slope", x, approximate=approximate)


def _larger_term(approximate: bool, x: Array, slope: Array) -> Array:
    """The larger of Phi(x) and |x Phi'(x)|, whose sum `slope` is."""
    phi = np.where(x == 0, 0.5, _gelu(approximate, x) / x)
    return np.maximum(phi, np.abs(slope - phi))


_OPS: Final = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sigmoid", "erf"),
    *("sin", "cos", "tan"),
)
FUNCTIONS: Final[dict[str, Function]] = {
    **{name: partial(native, name) for name in _OPS},
    **{
        f"{name}_{form}": partial(function, form == "tanh")
        for name, function in (("gelu", _gelu), ("gelu_slope", _slope))
        for form in ("tanh", "erf")
    },
}
"""By name, for f32 and f64."""


def largest_error(name: str, x: Array) -> tuple[float, float]:
    """The largest error in ulp among inputs x, f32, and where it is; inf where only one of both is
    a nan or infinite. Results that are rounded correctly count as 0.5."""
    function, wide = FUNCTIONS[name], x.astype(np.float64)
    y, true = function(x), function(wide)
    others = np.flatnonzero(y.view(np.uint32) != true.astype(np.float32).view(np.uint32))
    x, y, true = x[others], y[others], true[others]
    size = np.abs(true)
    if "slope" in name:
        size = np.fmax(size, _larger_term("tanh" in name, wide[others], true))
    size = np.clip(size, 2.0**-126, float(np.finfo(np.float32).max))
    power = (size.view(np.uint64) & np.uint64(0x7FF << 52)).view(np.float64)
    error = np.abs(y - true) / power * 2.0**23
    error = np.where(np.isnan(y) & np.isnan(true), 0.5, np.nan_to_num(error, nan=math.inf))
    if not len(error):
        return 0.5, 0.0
    worst = int(np.argmax(error))
    return float(error[worst]), float(x[worst])


def errors(names: Sequence[str], step: int, first: int, last: int) -> list[tuple[float, float]]:
    """The largest error of each function at every step-th input from block first to last - 1."""
    worst = [(0.0, 0.0)] * len(names)
    for block in range(first, last):
        bits = np.arange(block * _BLOCK * step, min((block + 1) * _BLOCK * step, 1 << 32), step)
        x = bits.astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            block_errors = [largest_error(name, x) for name in names]
        worst = [max(pair) for pair in zip(worst, block_errors, strict=True)]
    return worst


def all_errors(names: Sequence[str], step: int) -> list[tuple[float, float]]:
    """The largest error of each function at every step-th input, computed on all cores."""
    blocks = -(-(1 << 32) // (_BLOCK * step))
    firsts = range(0, blocks, _TASK)
    lasts = [min(first + _TASK, blocks) for first in firsts]
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        columns = processes.map(partial(errors, names, step), firsts, lasts)
        return [max(column) for column in zip(*columns, strict=True)]


def limit(name: str) -> float:
    """Return the largest error allowed, in ulp."""
    return 5.0 if "slope" in name else 4.0


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.ulp", description=__doc__)
    parser.add_argument("names", nargs="*", default=[*FUNCTIONS])
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every N-th input")
    options = parser.parse_args()
    if unknown := {*options.names} - {*FUNCTIONS}:
        parser.error(f"names: expected {', '.join(FUNCTIONS)}, got {', '.join(unknown)}")
    results = all_errors(options.names, options.sample)
    failed = False
    for name, (error, x) in zip(options.names, results, strict=True):
        failed |= error > limit(name)
        print(f"{name:14} {error:8.3f} ulp at {x!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
