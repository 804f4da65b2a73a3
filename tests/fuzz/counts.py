"""Functions of many elements in half precision, against f64.

    python -m tests.fuzz counts                    # all functions, 70,000 elements
    python -m tests.fuzz counts mean var

An f16 has no number above 65,504, and a bf16 no odd integer above 256: a count of elements must not
be one. Each function of the public table that takes one float vector, and the calls of `CALLS`, are
computed in f16 and bf16 with their gradient and tangent, and held against the same in f64, rounded.
Elements are equal, so that extremes tie, or two numbers in turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from tests.fuzz.command import parser_of, require_known
from tests.fuzz.extremes import elementwise, functions_of

N: Final = 70_000
Fn = Callable[[Any], Any]

QUADRATIC: Final = {"diag", "linalg.diagonal", "kron", "cov", "corrcoef", "pdist"}
"""Functions whose results or intermediates have n^2 elements."""


EXCEPTIONS: Final = {
    "log_softmax": "its rule reads the rounded result, as in PyTorch; finite it is",
}
"""Function -> why finite results differ."""


def _column(x: Any) -> Any:
    return ml.reshape(x, (1, x.size, 1))


def _zeros(x: Any) -> Any:
    return ml.zeros(x.size, dtype="i64")


def _segments(how: str, x: Any) -> Any:
    return getattr(ml, f"segment_{how}")(x, _zeros(x), 1)


CALLS: Final[dict[str, Fn]] = {
    **{f"segment_{how}": partial(_segments, how) for how in ("max", "mean", "min", "sum")},
    "at.max": lambda x: ml.full(1, -9.0, dtype=x.dtype).at[_zeros(x)].max(x),
    "at.min": lambda x: ml.full(1, 9.0, dtype=x.dtype).at[_zeros(x)].min(x),
    "adaptive_max_pool": lambda x: ml.adaptive_max_pool(_column(x), 1),
    "adaptive_avg_pool": lambda x: ml.adaptive_avg_pool(_column(x), 1),
    "avg_pool1d": lambda x: ml.avg_pool1d(_column(x), x.size),
    "max_pool1d": lambda x: ml.max_pool1d(_column(x), x.size),
    "nn.LayerNorm": lambda x: ml.nn.LayerNorm(x.size, dtype=x.dtype)(x),
    "nn.RMSNorm": lambda x: ml.nn.RMSNorm(x.size, dtype=x.dtype)(x),
    "nn.BatchNorm": lambda x: ml.nn.BatchNorm(1, dtype=x.dtype)(ml.reshape(x, (-1, 1))),
    "nn.GroupNorm": lambda x: ml.nn.GroupNorm(1, 1, dtype=x.dtype)(_column(x)),
    "nn.InstanceNorm": lambda x: ml.nn.InstanceNorm(1, dtype=x.dtype)(_column(x)),
    "average": lambda x: ml.average(x, weights=ml.ones_like(x)),
    "quantile": lambda x: ml.quantile(x, 0.3),
    "trapezoid": lambda x: ml.trapezoid(x, dx=1 / x.size),
    "mean by axis": lambda x: ml.mean(ml.reshape(x, (2, -1)), axis=1),
    "var by axis": lambda x: ml.var(ml.reshape(x, (-1, 2)), axis=0, correction=1.0),
    "mean_squared_error": lambda x: ml.mean(ml.mean_squared_error(x, ml.zeros_like(x))),
    "linalg.vector_norm": ml.linalg.vector_norm,
    "linalg.vector_norm, inf": lambda x: ml.linalg.vector_norm(x, ord=ml.inf),
    "softmax": ml.softmax,
    "normalize": lambda x: x / ml.linalg.vector_norm(x),
    "x @ x / n": lambda x: (x / x.size) @ x,
}


def functions(*names: str) -> dict[str, Fn]:
    """Return the functions of one float vector, or those of these names."""
    found = {name: fn for name, fn in CALLS.items() if not names or name in names}
    for name, fn, _ in functions_of([1], names):
        is_new = name not in QUADRATIC and name not in found and not elementwise(name)
        if is_new and _has_gradient(fn):
            found[name] = fn
    return found


def _has_gradient(fn: Fn) -> bool:
    """Return whether it maps a vector to floats that are not more, and has a gradient."""
    x = ml.asarray(np.random.default_rng(0).uniform(0.2, 0.8, 6))
    try:
        with warnings.catch_warnings(action="ignore"):
            z = fn(x)
            slopes = ml.vjp(fn, x)[1](ml.ones_like(z))[0]
    except Exception:  # whatever it wants instead
        return False
    return isinstance(z, ml.Tensor) and z.dtype.is_float and z.size <= x.size and slopes.size == 6


def _inputs(n: int) -> dict[str, Any]:
    ones = np.ones(n)
    return {"equal": ones, "in turn": np.where(np.arange(n) % 2, 0.5, 2.0)}


def results(fn: Fn, x: Any) -> list[Any]:
    """Return the value, the gradient of its sum and a tangent, as f64."""
    value, pull = ml.vjp(fn, x)
    [gradient] = pull(ml.ones_like(value))
    tangent = ml.jvp(fn, (x,), (ml.ones_like(x),))[1]
    return [ml.astype(y, "f64").numpy() for y in (value, gradient, tangent)]


def findings(
    names: list[str], dtypes: tuple[str, ...] = ("f16", "bf16"), n: int = N
) -> Iterator[str]:
    """Return results that are not those of f64, rounded."""
    every = functions(*names)
    for name in every:
        for kind, values in _inputs(n).items():
            try:
                with warnings.catch_warnings(action="ignore"):
                    wide = results(every[name], ml.asarray(values))
            except MlvmError:
                continue
            for dtype in dtypes:
                with warnings.catch_warnings(action="ignore"):
                    narrow = results(every[name], ml.asarray(values).astype(dtype))
                for part, got, expected in zip(
                    ("value", "gradient", "tangent"), narrow, wide, strict=True
                ):
                    rounded = ml.astype(ml.asarray(expected), dtype).astype("f64").numpy()
                    size = np.abs(rounded[np.isfinite(rounded)]).max(initial=0.0)
                    tolerance = {"f16": 4e-3, "bf16": 3e-2}[dtype]
                    close = np.isclose(got, rounded, tolerance, tolerance * size + 6e-8, True)
                    if not close.all() and not (name in EXCEPTIONS and np.isfinite(got).all()):
                        i = int(np.argmin(close))
                        yield (
                            f"{name} {dtype}, elements {kind}: {part} is {got.flat[i]:.6g}, "
                            f"expected {rounded.flat[i]:.6g}"
                        )


def main(argv: list[str]) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("names", nargs="*", help="functions; all if there are none")
    parser.add_argument("--elements", type=int, default=N)
    options = parser.parse_args(argv)
    require_known(parser, [x for x in options.names if not functions(x)], functions)
    count = 0
    for finding in findings(options.names, n=options.elements):
        print(finding, flush=True)
        count += 1
    print(f"{count} differences")
    return int(bool(count))
