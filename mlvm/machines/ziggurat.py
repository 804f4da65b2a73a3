"""The tables by which numpy draws standard normal values of f32."""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

import numpy as np

_LAYERS: Final = 256
_EDGE: Final = 3.6541528853610088  # where the tail begins
_AREA: Final = 0.004928673233974655  # of each layer, and of the tail


class Ziggurat(NamedTuple):
    """The widths of the layers by 2^23 (the first is the tail's), how many of the 2^23 steps lie
    inside of the next layer, and the density at each edge (Marsaglia and Tsang, Journal of
    Statistical Software 5, 2000). All are numbers of f32."""

    widths: tuple[float, ...]
    inside: tuple[int, ...]
    density: tuple[float, ...]


@cache
def ziggurat() -> Ziggurat:
    """The tables."""
    x, density = [0.0] * _LAYERS, [1.0] * _LAYERS
    x[-1], density[-1] = _EDGE, math.exp(-0.5 * _EDGE**2)
    for i in range(_LAYERS - 2, 0, -1):
        density[i] = _AREA / x[i + 1] + density[i + 1]
        x[i] = math.sqrt(-2 * math.log(density[i]))
    x[0] = _AREA / density[-1]
    steps = [_EDGE / x[0], 0.0, *[x[i - 1] / x[i] for i in range(2, _LAYERS)]]
    inside = tuple([int(step * 2**23) for step in steps])
    return Ziggurat(_narrow([width / 2**23 for width in x]), inside, _narrow(density))


def _narrow(values: list[float]) -> tuple[float, ...]:
    return tuple([float(np.float32(value)) for value in values])
