"""Cases of the elementwise ops: each element through Python's own operators and `math`."""

from __future__ import annotations

import cmath
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case

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

CASES: dict[str, list[Case]] = {
    "add": _arithmetic(operator.add, _int(3, -4), _int(100, -100, dtype=np.int8)),
    "subtract": _arithmetic(operator.sub, _int(3, -4), _int(100, -100, dtype=np.int8)),
    "multiply": _arithmetic(operator.mul, _int(3, -4), _int(100, -100, dtype=np.int8)),
    "multiply_add": [
        Case((_away(2, 3), _away(2, 3), _away(2, 3)), _each(_multiply_add)),
        Case((_away(2, 3), _away(), _away(2, 3)), _each(_multiply_add)),
        Case((_f32(_away(2, 1)), _f32(_away(3)), _f32(_away(2, 3))), _each(_multiply_add)),
        Case((_away(3), _away(2, 1), _away(1)), _each(_multiply_add)),
        Case((_z(2), _z(2), _z(2)), _each(_multiply_add)),
    ],
    "divide": [
        *_arithmetic(operator.truediv),
        Case((_int(3, -4), _int(7, 9, dtype=np.int64)), _each(operator.truediv, np.float32)),
        Case((_int(3, -4), _f32(_away(2))), _each(operator.truediv, np.float32)),
    ],
    "reciprocal": [*_unary(lambda v: 1 / v, _away(3, 4)), *_complex(lambda v: 1 / v, _z(2))],
    "real": [*_unary(lambda v: v, _away(2)), *_complex(lambda v: v.real, _z(2), dtype="f8")],
    "imag": [*_unary(lambda v: 0.0, _away(2)), *_complex(lambda v: v.imag, _z(2), dtype="f8")],
    "conj": [*_unary(lambda v: v, _away(2)), *_complex(lambda v: v.conjugate(), _z(2))],
    "copysign": [*_binary(math.copysign), Case((_E32[:6], -_E32[:6]), np.copysign)],
    "nextafter": [
        *_binary(math.nextafter)[:2],
        Case((_EXTREMES[:, None], _EXTREMES), np.nextafter),
    ],
    "signbit": [Case((_EXTREMES,), lambda x: np.array([math.copysign(1, v) < 0 for v in x]))],
    "floor_divide": _binary(operator.floordiv, _int(7, -7, 7, -7), _int(2, 2, -2, -2)),
    "remainder": _binary(operator.mod, _int(7, -7, 7, -7), _int(2, 2, -2, -2)),
    "pow": [
        Case((_positive(2, 3), _away(3)), _each(operator.pow)),
        Case((_f32(_positive(2, 3)), _f32(_away(3))), _each(operator.pow)),
        Case((_int(2, -3, 5), _int(3, 3, 0)), _each(operator.pow)),
        *_complex(operator.pow, _z(2), _z(2)),
    ],
    "maximum": [*_binary(max, _int(3, -4), _int(2, -1))],
    "minimum": [*_binary(min, _int(3, -4), _int(2, -1))],
    "clip": [
        Case((_away(4, 3), _LOWER, _UPPER), _each(_clip)),
        Case((_int(-5, 0, 5), _int(-1), _int(3)), _each(_clip)),
        Case((np.array([0.4]), np.array([2.0]), np.array([1.0])), _each(_clip)),
    ],
    "negative": [
        *_unary(operator.neg, _away(3, 4)),
        Case((_int(3, -4),), _each(operator.neg)),
        *_complex(operator.neg, _z(2)),
    ],
    "abs": [
        *_unary(abs, _away(3, 4)),
        Case((_int(3, -4),), _each(abs)),
        *_complex(abs, _z(2), dtype="f8"),
    ],
    "sign": [
        *_unary(_sign, _away(3, 4)),
        Case((_int(3, -4, 0),), _each(_sign)),
        *_complex(lambda v: v / abs(v), _z(2)),
    ],
    "square": [
        *_unary(lambda v: v * v, _away(3, 4)),
        Case((_int(3, -4),), _each(lambda v: v * v)),
        *_complex(lambda v: v * v, _z(2)),
    ],
    "floor": _rounding(math.floor),
    "ceil": _rounding(math.ceil),
    "round": [*_rounding(round), *_complex(lambda v: complex(round(v.real), round(v.imag)), _z(2))],
    "trunc": _rounding(math.trunc),
    "exp": [*_function("exp", _away(3, 4)), Case((_int(1, -2),), _each(math.exp, np.float32))],
    "expm1": [
        *_unary(math.expm1, _away(3, 4)),
        *_unary(math.expm1, np.array([1e-9, -1e-9])),
        *_complex(lambda v: cmath.exp(v) - 1, _z(2)),
    ],
    "log": _function("log", _positive(3, 4)),
    "log1p": [
        *_unary(math.log1p, _positive(3, 4)),
        *_unary(math.log1p, np.array([1e-9, -1e-9])),
        *_complex(lambda v: cmath.log(1 + v), _z(2)),
    ],
    "log2": [
        *_unary(math.log2, _positive(3, 4)),
        *_complex(lambda v: cmath.log(v) / math.log(2), _z(2)),
    ],
    "log10": _function("log10", _positive(3, 4)),
    "sqrt": [
        *_function("sqrt", _positive(3, 4)),
        Case((_int(2, 4),), _each(math.sqrt, np.float32)),
    ],
    "rsqrt": [
        *_unary(lambda v: 1 / math.sqrt(v), _positive(3, 4)),
        *_complex(lambda v: 1 / cmath.sqrt(v), _z(2)),
    ],
    "sin": _function("sin", _away(3, 4)),
    "cos": _function("cos", _away(3, 4)),
    "tan": _function("tan", 0.6 * _away(3, 4)),
    "asin": _function("asin", _away(3) / 3),
    "acos": _function("acos", _away(3) / 3),
    "atan": _function("atan", _away(3)),
    "atan2": [*_binary(math.atan2), Case((_E32[:, None], _E32), _each(math.atan2))],
    "hypot": [*_binary(math.hypot), Case((_E32[:, None], _E32), np.hypot)],
    "sinh": _function("sinh", _away(3)),
    "cosh": _function("cosh", _away(3)),
    "tanh": _function("tanh", _away(3, 4)),
    "asinh": _function("asinh", _away(3)),
    "acosh": _function("acosh", 1 + _positive(3)),
    "atanh": _function("atanh", _away(3) / 3),
    "logaddexp": [
        *_binary(lambda x, y: math.log(math.exp(x) + math.exp(y))),
        Case((_f32(_EXTREMES[:, None]), _f32(_EXTREMES)), np.logaddexp),
        Case((_away(5), np.full(5, 700.0)), _each(lambda x, y: max(x, y))),
    ],
    "sigmoid": [
        *_unary(lambda v: 1 / (1 + math.exp(-v)), _away(3, 4)),
        *_unary(lambda v: 1 / (1 + math.exp(-v)), np.array([-80.0, -30.0, 30.0, 80.0])),
    ],
    "erf": [*_unary(math.erf, _away(3, 4)), *_unary(math.erf, np.array([-7.0, 1e-9, 0.0, 3.5]))],
    "equal": [
        *_comparison(operator.eq),
        *_equal(operator.eq),
        Case(_BITS, _each(operator.eq, np.bool_)),
    ],
    "not_equal": [
        *_comparison(operator.ne),
        *_equal(operator.ne),
        Case(_BITS, _each(operator.ne, np.bool_)),
    ],
    "less": _comparison(operator.lt),
    "less_equal": _comparison(operator.le),
    "greater": _comparison(operator.gt),
    "greater_equal": _comparison(operator.ge),
    "isnan": _floats(math.isnan, cmath.isnan),
    "isinf": _floats(math.isinf, cmath.isinf),
    "isfinite": _floats(math.isfinite, cmath.isfinite),
    "logical_and": _logical(lambda p, q: p and q),
    "logical_or": _logical(lambda p, q: p or q),
    "logical_xor": _logical(operator.ne),
    "logical_not": [Case(_BITS[:1], _each(operator.not_, np.bool_))],
    "bitwise_and": _bitwise(operator.and_),
    "bitwise_or": _bitwise(operator.or_),
    "bitwise_xor": _bitwise(operator.xor),
    "bitwise_invert": [
        Case((_int(12, -7, 0),), _each(operator.invert)),
        Case(_BITS[:1], _each(operator.not_, np.bool_)),
    ],
    "bitwise_left_shift": [Case((_int(1, -3, 5), _int(4, 2, 0)), _each(operator.lshift))],
    "bitwise_right_shift": [Case((_int(64, -7, 5), _int(4, 1, 0)), _each(operator.rshift))],
    "where": [
        Case(
            (_BITS[0].reshape(4, 1), _away(4, 3), _away(3)),
            lambda c, x, y: _each(lambda p, a, b: a if p else b, np.float64)(c, x, y),
        ),
        Case(
            (np.array(True), _int(1, 2), _int(3, dtype=np.int64)),
            lambda c, x, y: np.array([1, 2], np.int64),
        ),
        Case((_BITS[0], _z(4), _z(4)), lambda c, x, y: np.where(c, x, y)),
        Case((_BITS[0], _z(4), _away(4)), lambda c, x, y: np.where(c, x, y)),
        Case(
            (_BITS[0], _f32(_away(4)), np.array(3)), lambda c, x, y: np.where(c, x, np.float32(3))
        ),
    ],
}
