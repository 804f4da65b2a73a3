"""Public functions and their first two derivatives at extreme values.

    python -m tests.fuzz extremes                  # all functions, in all float dtypes
    python -m tests.fuzz extremes interp lerp      # these

The functions are those of the public table that map one to three float vectors elementwise, a few
of three operands that are optional or stacked, and the rows of tests/cases/functions.txt, which
have their arguments.

- *Precision.* At finite numbers, a result in f16, bf16 or f32 must be the one that the same
  function computes in f64, rounded. So nothing overflows or cancels on the way.
- *Limits.* At an infinity, a result must be its limit in f64, where the values at 1e50 to 1e300
  tell one. f64 near its largest number is held against the same limit.
- *Rows.* With an element replaced by an infinity, nan or a zero, a row must have numpy's values.
  Far from 1 (times 1e15 and 1e-15), f32 must have the values of f64.

`EXCEPTIONS` has what differs with a reason.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from tests.cases.tables import FUNCTIONS, Row, flat
from tests.fuzz.command import parser_of, require_known
from tests.test_docstrings import public

Fn = Callable[..., Any]

EXCEPTIONS: Final = {
    "(silu|mish|gelu|hard_swish) .* at \\(-?inf": "x times a factor: nan, as in PyTorch and JAX",
    "(asarray|nan_to_num|nextafter) .* at \\(.*(inf|e\\+3)": "it is not continuous there",
    "(f|ml)\\.nan_to_num": "the largest number depends on the dtype",
    "ml\\.clip\\(ml\\.astype|ml\\.t?ri[lu]": "numpy's expression has another meaning for these",
    "(fmod|remainder) ": "the quotient of numbers far apart has no digits; at infinity no limit",
    "floor_divide .* at \\(.*inf": "as the Python Array API standard has it",
    "(binary_cross_entropy|hinge|margin_ranking|poisson_nll)": "targets are probabilities or signs",
    "(pow|xlogy) \\w+ (first|second) ": "an exponent of which the power overflows",
    "lerp .*inf": "a weight is a finite number",
    "f\\.interp\\(.*period=": "a position far away has no digits in a period; at infinity no limit",
    "ml\\.kl_divergence\\(.* at \\((-inf|nan)": "a target that is not a probability gives nan",
    "ml\\.soft_sign\\(.* at \\(-?inf": "numpy's expression is inf / inf; the limit is right",
    "ml\\.tanh_shrink\\(.* at \\(1e-15": "x^3 / 3 is below the digits of x",
    "f\\.sinc\\(.* at \\(1e\\+15": "pi x has no digits in a period",
    "sinc .* at \\(.*(inf|e\\+3)": "pi x overflows, and sin has no limit; as in numpy and PyTorch",
    "gamma \\w+ second .* at \\(inf": "a factor, the slope of digamma, vanishes there",
    "erfcinv bf16 first": "it follows from the rounded y, whose error e^(y^2) multiplies",
    "logsumexp \\w+ (first|second) .* at \\(.*inf": "a share of infinity: nan, as in PyTorch",
    "atan2 .* second": "the square of the distance underflows",
    "ml\\.(binary_cross_entropy|gaussian_nll_loss)\\(": "logarithms, variances have a least value",
    "ml\\.(nll_loss|softmax_cross_entropy|ctc_loss|scatter)\\(.* at \\(-?(inf|nan)": (
        "numpy's expression multiplies by zeros and by infinite weights"
    ),
    "mish \\w+ second": "a product of x overflows before it vanishes",
    "f\\.einsum\\(": "sums and products have another order",
    "f\\.i0\\(": "numpy has nan at infinities",
    "f\\.gradient\\(.*RISING": "numpy has nan next to equal and infinite coordinates",
    "(ml\\.cdist\\(.*3\\.5|f\\.linalg\\.norm\\(x_4, 3)": "powers overflow, as in numpy and PyTorch",
    "f\\.quantile.* at \\(-?inf\\): -?inf": "numpy has nan next to an infinity",
    "f\\.interp.* at \\(nan\\)": "xp must be in order",
    "ml\\.topk.* at \\(nan\\)": "nan is the largest; numpy's expression drops it",
    "ml\\.(lerp|xlogy)\\(.* f64 value": "numpy's expression is the bare formula",
}
"""Pattern of a finding's line -> reason."""

_TOLERANCE: Final = {"f16": 4e-3, "bf16": 3e-2, "f32": 2e-5}
_ORDERS: Final = ("value", "first", "second")


_WITH_OPTIONS: Final[dict[str, Fn]] = {
    "binary_cross_entropy_with_logits pos_weight": lambda x, t, w: (
        ml.binary_cross_entropy_with_logits(x, t, pos_weight=ml.abs(w))
    ),
    "clip min max": lambda x, low, high: ml.clip(x, low, high),
    "cond": lambda x, y, z: ml.where(x > y, y, z),
    "fma": lambda x, y, z: x * y + z,
    "interp left right": lambda x, low, high: ml.interp(
        x, ml.asarray([-1.0, 1.0], dtype=x.dtype), ml.asarray([2.0, 3.0], dtype=x.dtype),
        left=low, right=high),
    "logsumexp": lambda x, y, z: ml.logsumexp(ml.stack([x, y, z]), axis=0),
    "max": lambda x, y, z: ml.max(ml.stack([x, y, z]), axis=0),
    "median": lambda x, y, z: ml.median(ml.stack([x, y, z]), axis=0),
    "where": lambda x, y, z: ml.where(x > 0, y, z),
}  # fmt: skip
"""Name, and perhaps arguments -> a function of three operands, which are optional or stacked."""


class Finding(NamedTuple):
    """A result that is not what it should be."""

    name: str
    dtype: str
    order: str
    point: tuple[float, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        at = ", ".join(f"{x:.9g}" for x in self.point)
        return (
            f"{self.name} {self.dtype} {self.order} at ({at}): {self.got:.9g}, "
            f"expected {self.expected:.9g}"
        )


# --- elementwise functions ----------------------------------------------------------------


def functions_of(counts: Collection[int], names: Sequence[str]) -> Iterator[tuple[str, Fn, int]]:
    """Yield the public functions of so many operands, or those of these names, with the number."""
    for name, fn in sorted(public().items()):
        is_other = name.startswith(("random.", "parallel.")) or (names and name not in names)
        if is_other or inspect.isclass(fn):
            continue
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            continue
        needed = [p for p in parameters if p.default is p.empty and p.kind < p.KEYWORD_ONLY]
        if len(needed) in counts and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            yield name, fn, len(needed)


@cache
def elementwise(*names: str) -> dict[str, tuple[Fn, int]]:
    """Return the public functions that map float vectors elementwise, or those of these names, with
    their arity."""
    return {
        name: (fn, arity)
        for name, fn, arity in functions_of(range(1, 4), names)
        if names or getattr(fn, "__name__", name) == name.rpartition(".")[2]  # no alias
        if _is_elementwise(fn, arity)
    }


def _of_three(names: Sequence[str]) -> dict[str, tuple[Fn, int]]:
    """Return the functions of `_WITH_OPTIONS`, or those of these names, with their arity."""
    chosen = [each for each in _WITH_OPTIONS if not names or each.split()[0] in names]
    return {each: (_WITH_OPTIONS[each], 3) for each in chosen}


def _is_elementwise(fn: Fn, arity: int) -> bool:
    rng = np.random.default_rng(0)
    xs = [ml.asarray(rng.uniform(0.2, 0.8, 5)) for _ in range(arity)]
    try:
        with warnings.catch_warnings(action="ignore"):
            whole, again = fn(*xs), fn(*xs)
            parts = [fn(*[x[i : i + 1] for x in xs]) for i in range(5)]
    except Exception:  # whatever it wants instead
        return False
    if not all(isinstance(y, ml.Tensor) for y in (whole, again, *parts)):
        return False
    is_float = whole.dtype.is_float and whole.shape == (5,)
    if not is_float or any(y.shape != (1,) for y in parts):
        return False
    own = [float(y[0]) for y in parts]
    return (
        bool(np.allclose(whole.numpy(), own, 1e-12, equal_nan=True))
        and again.tolist() == whole.tolist()
    )


def derivative(fn: Fn, arity: int, order: int, by: int) -> Fn:
    """Return a derivative of an elementwise function by one operand, elementwise."""
    for _ in range(order):

        def slope(*xs: Any, fn: Fn = fn) -> Any:
            return ml.grad(lambda x: ml.sum(fn(*xs[:by], x, *xs[by + 1 :])))(xs[by])

        fn = slope
    return fn


def _numbers(dtype: str, arity: int) -> list[float]:
    info = ml.finfo(dtype)
    least = float(info.smallest_normal)
    sizes = {
        1: [*np.geomspace(least, float(info.max), 41), 0.5, 1.0, 2.0, 5.0, 20.0, 90.0, 710.0],
        2: [least, 1e-4, 0.5, 1.0, 3.0, 100.0, float(info.max) / 2, float(info.max)],
        3: [0.0, 0.25, 1.0, float(info.max)],
    }[arity]
    sizes = [x for x in sizes if x <= float(info.max)]
    return sorted({0.0, *sizes, *[-x for x in sizes]})


def _cast(x: Any, dtype: str) -> Any:
    return ml.astype(ml.asarray(x, dtype="f64"), dtype)


def _run(fn: Fn, columns: list[Any], dtype: str) -> Any:
    """Return the results at points as f64, or None if the function refuses them."""
    try:
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            return ml.astype(fn(*[_cast(x, dtype) for x in columns]), "f64").numpy()
    except MlvmError:
        return None


def _is_close(got: Any, expected: Any, dtype: str, order: int) -> Any:
    """Return where results in a dtype are those of f64: also beyond its numbers, and below."""
    info = ml.finfo(dtype)
    most, least = float(info.max), float(info.smallest_normal)
    tolerance = _TOLERANCE[dtype] * (1, 10, 100)[order]
    with np.errstate(all="ignore"):
        near = np.abs(got - expected) <= tolerance * np.maximum(np.abs(expected), 0.1) + least
        over = (np.abs(expected) > most * 0.9) & (np.abs(got) > most * 0.9)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return near | over & (np.sign(got) == np.sign(expected)) | same | np.isnan(expected)


def precision(name: str, fn: Fn, arity: int, dtype: str) -> Iterator[Finding]:
    """Hold results of a narrow dtype at finite numbers against those of f64."""
    numbers = _cast(_numbers(dtype, arity), dtype).astype("f64").numpy()
    grid = np.array([*itertools.product(numbers, repeat=arity)]).T
    values = _run(fn, [*grid], "f64")
    if values is None:
        return
    most = float(ml.finfo(dtype).max)
    for order, by in _derivatives(arity):
        each = derivative(fn, arity, order, by)
        wide, narrow = _run(each, [*grid], "f64"), _run(each, [*grid], dtype)
        if wide is None or narrow is None:
            return
        if order:  # what overflows has no derivative
            wide = np.where(np.abs(values) > most, np.nan, wide)
        for i in np.flatnonzero(~_is_close(narrow, wide, dtype, order)):
            yield Finding(
                name, dtype, f"{_ORDERS[order]} {by}", tuple(grid[:, i]), narrow[i], wide[i]
            )


def _derivatives(arity: int) -> list[tuple[int, int]]:
    return [(0, 0), *[(order, by) for order in (1, 2) for by in range(arity)]]


def limits(name: str, fn: Fn, arity: int, dtype: str) -> Iterator[Finding]:
    """Hold results at an infinite operand, and at f64's largest numbers, against limits."""
    others = [-3.0, 0.5, 2.0][: 3 if arity > 1 else 1]
    for order, by in _derivatives(arity):
        each = derivative(fn, arity, order, by)
        for at, sign in itertools.product(range(arity), (1.0, -1.0)):
            for rest in itertools.product(others, repeat=arity - 1):
                far = sign * np.array([1e50, 1e100, 1e200, 1e300])
                columns = [np.full(4, x) for x in (*rest[:at], 0.0, *rest[at:])]
                columns[at] = far
                values = _run(each, columns, "f64")
                if values is None or (expected := _limit(values)) is None:
                    continue
                ends = [np.inf] if dtype != "f64" else [np.inf, np.finfo(float).max]
                for end in ends:
                    columns = [np.full(1, x) for x in (*rest[:at], sign * end, *rest[at:])]
                    got = _run(each, columns, dtype)
                    if got is None or _agrees(got[0], expected, dtype):
                        continue
                    point = tuple(float(x[0]) for x in columns)
                    where = f"{_ORDERS[order]} {by}"
                    yield Finding(name, dtype, where, point, got[0], expected)


def _limit(values: Any) -> float | None:
    """Return what values at 1e50 .. 1e300 tend to; None if they do not tell."""
    if np.isnan(values).any():
        return None
    last = values[-1]
    if np.all(values == last) or np.allclose(values, last, 1e-12, 1e-40):
        return float(last) if abs(last) > 1e-40 else 0.0
    sizes = np.abs(values)
    if np.all(sizes[1:] > 1e8 * sizes[:-1]) and np.all(np.sign(values) == np.sign(last)):
        return float(np.sign(last) * np.inf)
    return None


def _agrees(got: float, expected: float, dtype: str) -> bool:
    most = float(ml.finfo(dtype).max)
    if abs(expected) > most:
        return bool(np.sign(got) == np.sign(expected) and abs(got) > min(1e3, most))
    return bool(abs(got - expected) <= max(1e-6, _TOLERANCE.get(dtype, 0)) * max(1, abs(expected)))


# --- rows of functions.txt ------------------------------------------------------------------


def _rows(names: list[str]) -> list[Row]:
    chosen = [row for row in FUNCTIONS if row.operands and row.call.startswith(("f.", "ml."))]
    return [row for row in chosen if not names or any(f".{name}(" in row.call for name in names)]


def _names_of(rows: list[Row]) -> list[str]:
    return [name for row in rows for name in re.findall(r"\b(?:f|ml)\.([\w.]+)\(", row.call)]


def _evaluated(row: Row, arrays: list[Any], dtype: str) -> list[Any] | None:
    xs = [_cast(x, dtype) if x.dtype.kind == "f" else ml.asarray(x) for x in arrays]
    try:
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            ys = flat(row.ours(*xs))
    except (MlvmError, TypeError, ValueError):
        return None
    return [ml.astype(y, "f64").numpy() if y.dtype.is_float else y.numpy() for y in ys]


def poisoned(row: Row, seed: int) -> Iterator[tuple[list[Any], float]]:
    """Return operands with an element of each float array replaced by a special value."""
    arrays = list(row.operands.values())
    rng = np.random.default_rng(seed)
    for i, x in enumerate(arrays):
        if x.dtype.kind != "f" or not x.size:
            continue
        for special in (np.inf, -np.inf, np.nan, 0.0):
            changed = x.copy()
            changed.flat[rng.integers(x.size)] = special
            yield [*arrays[:i], changed, *arrays[i + 1 :]], special


def row_findings(row: Row, seed: int) -> Iterator[Finding]:
    for arrays, special in poisoned(row, seed):
        got = _evaluated(row, arrays, "f64")
        if got is None:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                expected = row.expected(*arrays)
        except Exception:  # numpy refuses it
            continue
        yield from _differences(row, "f64", special, got, expected, 1e-8)
    for factor in (1e15, 1e-15):
        arrays = [
            x.astype(np.float32).astype(float) * np.float32(factor) if x.dtype.kind == "f" else x
            for x in row.operands.values()
        ]
        wide, narrow = _evaluated(row, arrays, "f64"), _evaluated(row, arrays, "f32")
        if wide is not None and narrow is not None:
            with np.errstate(all="ignore"):
                wide = [y.astype(np.float32) if y.dtype.kind == "f" else y for y in wide]
            yield from _differences(row, "f32", factor, narrow, wide, 1e-3)


def _differences(
    row: Row, dtype: str, special: float, got: list[Any], expected: list[Any], tolerance: float
) -> Iterator[Finding]:
    for one, other in zip(got, expected, strict=True):
        other = np.asarray(other)
        if one.shape != other.shape or other.dtype.kind not in "fc" or one.dtype.kind not in "fc":
            continue
        size = np.abs(other[np.isfinite(other)]).max(initial=0.0)
        close = np.isclose(one, other, tolerance, tolerance * min(size, 1.0), equal_nan=True)
        if not close.all():
            i = int(np.argmin(close))
            pair = complex(one.flat[i]), complex(other.flat[i])
            yield Finding(row.call, dtype, "value", (special,), pair[0].real, pair[1].real)
            return


# --- the command ------------------------------------------------------------------------------


def findings(names: list[str], dtypes: list[str], seed: int = 0) -> Iterator[Finding]:
    """Return all that differs and is not among the exceptions."""
    for name, (fn, arity) in (elementwise(*names) | _of_three(names)).items():
        for dtype in dtypes:
            if dtype != "f64":
                yield from precision(name, fn, arity, dtype)
            yield from limits(name, fn, arity, dtype)
    for row in _rows(names):
        yield from row_findings(row, seed)


def is_excepted(finding: Finding) -> bool:
    return any(re.match(pattern, str(finding)) for pattern in EXCEPTIONS)


def main(argv: list[str]) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("names", nargs="*", help="functions; all if there are none")
    parser.add_argument("--dtypes", default="f16,bf16,f32,f64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=4, help="lines of one function and derivative")
    options = parser.parse_args(argv)
    unknown = [
        name
        for name in options.names
        if not (elementwise(name) or _of_three([name]) or _rows([name]))
    ]
    require_known(parser, unknown, lambda: [*elementwise(), *_WITH_OPTIONS, *_names_of(_rows([]))])
    shown: dict[tuple[str, str, str], int] = {}
    for finding in findings(options.names, options.dtypes.split(","), options.seed):
        if is_excepted(finding):
            continue
        key = finding[:3]
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= options.most:
            print(finding, flush=True)
    print(f"{sum(shown.values())} differences in {len({key[0] for key in shown})} functions")
    return int(bool(shown))
