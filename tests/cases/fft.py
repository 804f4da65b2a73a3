"""Cases of the Fourier transforms, as the sums that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case, Draws

_draws = Draws(12)
_f64, _c128 = _draws.f64, _draws.c128


def _transformed(x: Array, axis: int, sign: int, power: float) -> Array:
    """sum_j x_j exp(sign 2 pi i j k / n) / n^power along an axis."""
    n = x.shape[axis]
    waves = np.exp(sign * 2j * np.pi * np.outer(range(n), range(n)) / n)
    moved = np.tensordot(x, waves, ([axis], [0])) / n**power
    return np.moveaxis(moved, -1, axis)


_POWERS = {"backward": 0.0, "ortho": 0.5, "forward": 1.0}


def _whole(sign: int) -> Callable[..., Array]:
    def expected(x: Array, axes: tuple[int, ...] = (-1,), norm: str = "backward") -> Array:
        power = _POWERS[norm] if sign < 0 else 1 - _POWERS[norm]
        result = x.astype(np.complex128)
        for axis in axes:
            result = _transformed(result, axis, sign, power)
        return _narrow(x, result)

    return expected


def _narrow(x: Array, result: Array) -> Array:
    """In the precision of x."""
    return result.astype(np.result_type(x.dtype, np.complex64))


def _rfft(x: Array, axis: int = -1, norm: str = "backward") -> Array:
    half = x.shape[axis] // 2 + 1
    whole = _transformed(x, axis, -1, _POWERS[norm])
    return _narrow(x, np.take(whole, range(half), axis))


def _irfft(x: Array, n: int, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of a spectrum that is made whole, whose first element is real."""
    x = np.moveaxis(x, axis, -1)
    whole = np.concatenate([x, x[..., 1 : (n + 1) // 2][..., ::-1].conj()], -1)
    whole[..., 0] = whole[..., 0].real
    if n % 2 == 0:
        whole[..., n // 2] = whole[..., n // 2].real
    result = _transformed(whole, -1, 1, 1 - _POWERS[norm]).real
    return np.moveaxis(result, -1, axis).astype(x.real.dtype)


def _cases(expected: Callable[..., Any], operands: list[Array]) -> list[Case]:
    norms: list[dict[str, Any]] = [{}, {"norm": "ortho"}, {"norm": "forward"}, {"norm": "backward"}]
    return [Case((x,), expected, how) for x, how in zip(operands, norms, strict=False)]


CASES: dict[str, list[Case]] = {
    "fft": [
        *_cases(_whole(-1), [_c128(5), _c128(2, 4), _f64(3), _c128(4).astype("F")]),
        Case((_c128(2, 3, 2),), _whole(-1), {"axes": (0, 1)}),
        Case((_f64(2, 3).astype("f"),), _whole(-1), {"axes": (-2,), "norm": "ortho"}),
        Case((_c128(2, 3),), lambda x, **_: x, {"axes": ()}),
    ],
    "ifft": [
        *_cases(_whole(1), [_c128(5), _c128(2, 4), _f64(3), _c128(4).astype("F")]),
        Case((_c128(2, 3, 2),), _whole(1), {"axes": (2, 0)}),
        Case((_f64().astype("f"),), lambda x, **_: x.astype("F"), {"axes": ()}),
    ],
    "rfft": [
        *_cases(_rfft, [_f64(4), _f64(2, 5), _f64(1), _f64(6).astype("f")]),
        Case((_f64(3, 2),), _rfft, {"axis": 0}),
    ],
    "irfft": [
        Case((_c128(3),), _irfft, {"n": 4}),
        Case((_c128(2, 3),), _irfft, {"n": 5, "norm": "ortho"}),
        Case((_c128(2, 3),), _irfft, {"n": 2, "axis": 0, "norm": "forward"}),
        Case((_c128(1),), _irfft, {"n": 1}),
        Case((_c128(4).astype("F"),), _irfft, {"n": 6}),
        Case((_f64(3),), _irfft, {"n": 4}),
        Case((_f64(3, 2),), _irfft, {"n": 5, "axis": 0}),
    ],
}
