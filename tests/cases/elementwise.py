"""Cases of the elementwise ops: each element through Python's own operators and `math`."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.rows import grouped

_rng = np.random.default_rng(1)


def _each(of: Callable[..., Any], dtype: Any = None) -> Callable[..., Array]:
    """`of` every element, as Python numbers; in the operands' dtype unless one is given."""

    def expected(*operands: Array) -> Array:
        shape = np.broadcast_shapes(*[x.shape for x in operands])
        columns = [np.broadcast_to(x, shape).ravel().tolist() for x in operands]
        values = [of(*row) for row in zip(*columns, strict=True)]
        return np.array(values, dtype or np.result_type(*operands)).reshape(shape)

    return expected


def _away(*shape: int, sign: bool = True) -> Array:
    """Values of either sign whose size is 0.3 to 2.3, at least 0.01 from an integer or a half."""
    size = math.prod(shape)
    values = 0.3 + np.floor(np.linspace(0, 19, size)) / 10 + 0.02 + 0.06 * _rng.random(size)
    signs = _rng.choice([-1.0, 1.0], size) if sign else 1.0
    return _rng.permutation(values * signs).reshape(shape)


def _positive(*shape: int) -> Array:
    return _away(*shape, sign=False)


def _f32(x: Array) -> Array:
    return x.astype(np.float32)


def _int(*values: Any, dtype: Any = np.int32) -> Array:
    return np.array(values, dtype)


_EXTREMES = np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan])
_E32 = _f32(_EXTREMES)
_BITS = np.array([False, False, True, True]), np.array([False, True, False, True])


def _unary(of: Callable[[float], float], x: Array) -> list[Case]:
    return [Case((x,), _each(of)), Case((_f32(x),), _each(of))]


def _z(*shape: int) -> Array:
    """Complex values, away from 0, from the branch cuts of functions and from their points."""
    return _away(*shape) + 1j * _away(*shape)


def _complex(of: Callable[..., Any], *operands: Array, dtype: Any = None) -> list[Case]:
    """Of c128, of c64, and where there are two operands, of c128 beside f64 and f32."""
    narrow = dtype and np.finfo(dtype).dtype.name.replace("64", "32")
    x, *rest = operands
    cases = [
        Case(operands, _each(of, dtype)),
        Case(tuple([x.astype(np.complex64) for x in operands]), _each(of, narrow)),
    ]
    for y in rest:
        cases.append(Case((x, y.real.copy()), _each(of)))
        cases.append(Case((_f32(y.real), x), _each(of)))
    return cases


def _function(name: str, x: Array) -> list[Case]:
    """A function that `math` and `cmath` have."""
    return [*_unary(getattr(math, name), x), *_complex(getattr(cmath, name), _z(2))]


def _binary(of: Callable[..., Any], *integers: Array) -> list[Case]:
    """Floats that broadcast, equal dtypes, two float dtypes, and integers of two."""
    x, y = _away(2, 1, 3), _positive(4, 1)
    cases = [
        Case((x, y), _each(of)),
        Case((x[:, 0], 3 * x[::-1, 0]), _each(of)),
        Case((_f32(x), y), _each(of)),
    ]
    return [*cases, Case(integers, _each(of))] if integers else cases


def _arithmetic(of: Callable[..., Any], *integers: Array) -> list[Case]:
    return [*_binary(of, *integers), *_complex(of, _z(2), _z(2))]


def _comparison(of: Callable[..., bool]) -> list[Case]:
    x = _away(2, 3)
    return [
        Case((x, np.where(x > 0.8, x, 0.8)), _each(of, np.bool_)),
        Case((_int(1, -2, 3), _int(1, 3, 2, dtype=np.int8)), _each(of, np.bool_)),
        Case((_EXTREMES[:, None], _EXTREMES), _each(of, np.bool_)),
    ]


def _logical(of: Callable[..., bool]) -> list[Case]:
    return [Case(_BITS, _each(of, np.bool_))]


def _bitwise(of: Callable[..., int]) -> list[Case]:
    return [
        Case((_int(12, -7, 0), _int(10, 3, -1, dtype=np.int64)), _each(of)),
        Case(_BITS, _each(of, np.bool_)),
    ]


def _sign(x: float) -> float:
    return x if math.isnan(x) else (x > 0) - (x < 0)


def _multiply_add(x: float, y: float, z: float) -> float:
    return x * y + z


def _clip(x: float, lower: float, upper: float) -> float:
    return min(max(x, lower), upper)


def _floats(of: Callable[[float], bool], of_complex: Callable[[complex], bool]) -> list[Case]:
    parts = (_EXTREMES[:, None] + 0j * np.zeros(7)).astype(complex)
    parts.imag = _EXTREMES
    return [
        Case((_EXTREMES,), _each(of, np.bool_)),
        Case((_int(1, 0),), _each(of, np.bool_)),
        Case((parts,), _each(of_complex, np.bool_)),
        Case((parts.astype(np.complex64),), _each(of_complex, np.bool_)),
    ]


def _equal(of: Callable[..., bool]) -> list[Case]:
    """Complex numbers, of which one part may be equal, and other kinds beside them."""
    x = np.array([1 + 2j, 1 + 3j, 2 + 2j, 1, complex(math.nan, 1)])
    return [
        Case((x[:, None], x), _each(of, np.bool_)),
        Case((x.astype(np.complex64), _int(1)), _each(of, np.bool_)),
        Case((_int(1, 2), np.array([1.0, 2.5])), _each(of, np.bool_)),
        Case((_int(1, 2), np.array([True, False])), _each(of, np.bool_)),
    ]


def _rounding(of: Callable[[float], float]) -> list[Case]:
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.0, 1e300])
    return [*_unary(of, _away(3, 4)), Case((halves,), _each(of)), Case((_int(-3, 4),), _each(of))]


_LOWER, _UPPER = np.array([[-0.5]]), np.array([0.5, 1.0, 1.5])

CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
