"""Numbers in keys of caches: zeros and nans with different signs are different numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.memo import bits_of, exact_repr
from mlvm.eager.tensor import templates

X = ml.asarray([1.0, -2.0])
NUMBERS = [math.nan, -math.nan, 0.0, -0.0]
FIELDS = SimpleNamespace(number=1.0)
ITEMS = [1.0]


def _of_field() -> ml.Tensor:
    return ml.copysign(X, FIELDS.number)


def _of_item() -> ml.Tensor:
    return ml.pad(X[:0], (0, 2), value=ITEMS[0])


_captured_field, _captured_item = ml.capture(_of_field), ml.capture(_of_item)


_captured_dict = ml.capture(lambda d: ml.copysign(X, d["s"][0]))


def _with_field(number: float) -> ml.Tensor:
    FIELDS.number = number
    return _captured_field()


def _with_item(number: float) -> ml.Tensor:
    ITEMS[0] = number
    return _captured_item()


def _any(x: Any) -> Any:
    """Return x, which a type checker would refuse."""
    return x


_COPYSIGN: dict[str, Callable[[float], Any]] = {
    "copysign": lambda s: ml.copysign(X, s),
    "f64": lambda s: ml.copysign(ml.astype(X, "f64"), s),
    "f16": lambda s: ml.copysign(ml.astype(X, "f16"), s),
    "numpy number": lambda s: ml.copysign(X, _any(np.float32(s))),
    "capture": ml.capture(lambda s: ml.copysign(X, s)),
    "capture of arithmetic": ml.capture(lambda s: ml.copysign(X, s * 2.0)),
    "capture of a branch": ml.capture(lambda s: abs(X) * math.copysign(1.0, s)),
    "capture of a dict": lambda s: _captured_dict({"s": (s,)}),
    "captured field": _with_field,
    "captured item": _with_item,
    "vmap": lambda s: ml.vmap(lambda x: ml.copysign(x, s))(X),
    "full": lambda s: ml.full((2,), s),
    "full_like": lambda s: ml.full_like(X, s),
    "asarray": lambda s: ml.asarray([s, s]),
    "pad": lambda s: ml.pad(X[:0], (0, 2), value=s),
    "where": lambda s: ml.where(X != X, X, s),
    "imaginary": lambda s: ml.imag(ml.full((2,), complex(1.0, s))),
    "real": lambda s: ml.real(ml.where(X != X, X + 0j, complex(s, 1.0))),
    "numpy complex": lambda s: ml.imag(ml.full((2,), _any(np.complex64(complex(1.0, s))))),
}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", _COPYSIGN)
def test_the_sign_of_a_number_reaches_the_result(name: str, *, cached: bool) -> None:
    for _ in range(3):  # templates run from the second call on
        for number in [*NUMBERS, *reversed(NUMBERS)]:
            if cached:
                result = _COPYSIGN[name](number)
            else:
                with templates.disabled():
                    result = _COPYSIGN[name](number)
            assert (np.signbit(result.numpy()) == np.signbit(number)).all(), number


def test_keys_differ_by_bits() -> None:
    numbers = [*NUMBERS, 1.0, complex(1.0, math.nan), complex(1.0, -math.nan)]
    assert len({bits_of(x) for x in numbers}) == len(numbers)
    assert len({exact_repr({"a": ("nan", [x])}) for x in numbers}) == len(numbers)
    assert exact_repr([0.5, "nan"]) == repr([0.5, "nan"])
