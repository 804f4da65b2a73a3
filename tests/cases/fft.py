"""Cases of the Fourier transforms, as the sums that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.rows import grouped

_rng = np.random.default_rng(12)


def _f64(*shape: int) -> Array:
    return _rng.standard_normal(shape)


def _c128(*shape: int) -> Array:
    return _f64(*shape) + 1j * _f64(*shape)


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


CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
