"""Cases of the random ops, beside numpy's own generator under the same Philox key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case
from tests.rows import grouped


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

CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
