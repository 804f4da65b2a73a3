"""Cases of the random ops, beside numpy's own generator under the same Philox key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case


def _generator(key: Array) -> Any:
    return np.random.Generator(np.random.Philox(key=key))


def _normal(key: Array, shape: Any, dtype: str = "f32") -> Any:
    return _generator(key).standard_normal(shape, DType.named(dtype).numpy.type)


def _uniform(key: Array, shape: Any, dtype: str = "f32") -> Any:
    return _generator(key).random(shape, DType.named(dtype).numpy.type)


def _bernoulli(key: Array, p: Array, shape: Any) -> Any:
    return _generator(key).random(shape) < p


def _randint(key: Array, low: int, high: int, shape: Any, dtype: str = "i64") -> Any:
    return _generator(key).integers(low, high, shape, DType.named(dtype).numpy.type)


def _permutation(key: Array, n: int) -> Any:
    return _generator(key).permutation(n)


def _split_key(key: Array, n: int) -> Any:
    return np.random.Philox(key=key, counter=1 << 192).random_raw(2 * n).reshape(n, 2)


def _fold_in(key: Array, data: Array) -> Any:
    return np.random.Philox(key=key, counter=(2 << 192) + int(data) % 2**64).random_raw(2)


def _drawn(name: str, dtype: Any) -> Callable[..., Array]:
    """Return the draws of numpy's own generator."""

    def expected(key: Array, *parameters: Array, shape: Any, **attributes: Any) -> Array:
        draw = getattr(np.random.Generator(np.random.Philox(key=key)), name)
        options = {"dtype": dtype} if name == "standard_gamma" else {}
        return np.asarray(draw(*parameters, size=shape, **options)).astype(dtype)

    return expected


def _multinomial(key: Array, n: Array, p: Array, *, shape: Any) -> Array:
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.multinomial(n, p / p.sum(), size=shape)


_KEY = np.array([7, 1], np.uint64)
_OTHER = np.array([2**64 - 1, 2**63], np.uint64)

CASES: dict[str, list[Case]] = {
    "normal": [
        Case((_KEY,), _normal, {"shape": (3, 5)}),
        Case((_OTHER,), _normal, {"shape": (7,), "dtype": "f64"}),
        Case((_KEY,), _normal, {"shape": ()}),
    ],
    "uniform": [
        Case((_KEY,), _uniform, {"shape": (3, 5)}),
        Case((_OTHER,), _uniform, {"shape": (7,), "dtype": "f64"}),
        Case((_KEY,), _uniform, {"shape": (0, 2)}),
    ],
    "bernoulli": [
        Case((_KEY, np.array(0.3)), _bernoulli, {"shape": (4, 5)}),
        Case((_OTHER, np.array([0, 0.5, 1], np.float32)), _bernoulli, {"shape": (6, 3)}),
    ],
    "randint": [
        Case((_KEY,), _randint, {"low": -3, "high": 4, "shape": (4, 5)}),
        Case((_KEY,), _randint, {"low": 0, "high": 256, "shape": (9,), "dtype": "u8"}),
        Case((_OTHER,), _randint, {"low": 0, "high": 2**64, "shape": (2,), "dtype": "u64"}),
    ],
    "gamma": [
        Case((_KEY, np.array(0.3)), _drawn("standard_gamma", np.float32), {"shape": (4, 5)}),
        Case(
            (_OTHER, np.array([0.5, 4, 100], np.float32)),
            _drawn("standard_gamma", np.float64),
            {"shape": (2, 3), "dtype": "f64"},
        ),
    ],
    "poisson": [
        Case((_KEY, np.array([0.0, 3.5, 80.0])), _drawn("poisson", np.int64), {"shape": (4, 3)}),
        Case(
            (_KEY, np.array(2, np.float32)),
            _drawn("poisson", np.uint8),
            {"shape": (9,), "dtype": "u8"},
        ),
    ],
    "binomial": [
        Case(
            (_KEY, np.array([0, 5, 400]), np.array([0.5, 0.1, 0.75])),
            _drawn("binomial", np.int64),
            {"shape": (4, 3)},
        ),
        Case((_OTHER, np.array(9), np.array(1.0)), _drawn("binomial", np.int64), {"shape": ()}),
    ],
    "multinomial": [
        Case((_KEY, np.array(30), np.array([1.0, 0.0, 3.0])), _multinomial, {"shape": (4,)})
    ],
    "permutation": [Case((_KEY,), _permutation, {"n": 11}), Case((_KEY,), _permutation, {"n": 0})],
    "split_key": [Case((_KEY,), _split_key, {"n": 3}), Case((_OTHER,), _split_key, {"n": 0})],
    "fold_in": [
        Case((_KEY, np.array(3)), _fold_in),
        Case((_OTHER, np.array(-1, np.int8)), _fold_in),
        Case((_KEY, np.array(2**64 - 1, np.uint64)), _fold_in),
    ],
}
