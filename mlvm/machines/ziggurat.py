"""Tables with which numpy draws standard normal values."""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from mlvm.core.types import DType, f32, f64

_LAYERS: Final = 256
_NUMPY: Final = {f32: 0x75EE966F, f64: 0x969AEF6E}
"""Checksum of numpy's tables, by dtype."""


class Ziggurat(NamedTuple):
    """Tables of the ziggurat (Marsaglia and Tsang, Journal of Statistical Software 5, 2000).

    `widths`: widths of the layers, divided by 2^23 (f32) or 2^52 (f64), the tail first.
    `inside`: number of the 2^23 or 2^52 steps that are inside the next layer.
    `density`: density at each edge.
    """

    widths: tuple[float, ...]
    inside: tuple[int, ...]
    density: tuple[float, ...]


@cache
def ziggurat(dtype: DType = f32) -> Ziggurat | None:
    """Compute the tables of f32 or f64.

    Numpy's f64 tables were computed step by step in doubles, with an exp that rounded one value up.
    Returns None if the system's functions round differently.
    """
    single = dtype is f32
    bits, area = (23, 0.004928673233974655) if single else (52, 0.004928673233974652)
    x, density = [0.0] * _LAYERS, [1.0] * _LAYERS
    x[-1] = 3.6541528853610088  # start of the tail
    density[-1] = math.exp(-0.5 * x[-1] ** 2)
    for i in range(_LAYERS - 2, 0, -1):
        density[i] = area / x[i + 1] + density[i + 1]
        x[i] = math.sqrt(-2 * math.log(density[i]))
        if not single:
            density[i] = math.exp(-0.5 * x[i] * x[i])
            density[i] = math.nextafter(density[i], 1) if i == 38 else density[i]
    x[0] = area / density[-1]
    steps = [x[-1] / x[0], 0.0, *[x[i - 1] / x[i] for i in range(2, _LAYERS)]]
    inside = tuple([round(step * 2**bits) for step in steps])
    widths = [width / 2**bits for width in x]
    if single:
        widths, density = _narrow(widths), _narrow(density)
    tables = Ziggurat(tuple(widths), inside, tuple(density))
    return tables if crc32(repr(tables).encode()) == _NUMPY[dtype] else None


def _narrow(values: list[float]) -> list[float]:
    return [float(np.float32(value)) for value in values]
