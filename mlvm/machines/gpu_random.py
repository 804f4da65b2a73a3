"""Random draws on a device, with the bits that the processor draws: Philox4x64-10 (Salmon et al.,
SC 2011) and numpy's ways from its words to numbers, in CuPy's array arithmetic.

The generator is a function of a key and a counter, so that all blocks of a stream are made at once:
about 200 kernels, whatever the size. Nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

_BY: Final = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_BUMP: Final = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS: Final = 10
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


def words(cp: Any, key: Any, count: int, purpose: int = 0, data: Any = None) -> Any:
    """The first words of the key's stream for that purpose, 0 to draw: u64[count]. `data` is an
    integer scalar on the device, the first word of the counter."""
    blocks = -(-count // 4)
    even = cp.zeros((2, blocks), np.uint64)  # words 0 and 2 of each counter
    odd = cp.zeros((2, blocks), np.uint64)  # words 1 and 3
    even[0] = cp.arange(1, blocks + 1, dtype=np.uint64)
    if data is not None:
        data = data.astype(np.uint64)
        even[0] += data
        odd[0] = even[0] < data
    odd[1] = purpose
    low, high = _pair(cp, *[by & 0xFFFFFFFF for by in _BY]), _pair(cp, *[by >> 32 for by in _BY])
    by, bump = _pair(cp, *_BY), _pair(cp, *_BUMP)
    keys = key.reshape(2, 1).copy()
    for _ in range(_ROUNDS):
        product = by * even
        even = _high_product(even, low, high)[::-1] ^ odd ^ keys
        odd = product[::-1]
        keys += bump
    made = cp.empty((blocks, 2, 2), np.uint64)
    made[:, :, 0] = even.T
    made[:, :, 1] = odd.T
    return made.reshape(-1)[:count]


def _pair(cp: Any, first: int, second: int) -> Any:
    pair = cp.empty((2, 1), np.uint64)
    pair[0] = np.uint64(first)
    pair[1] = np.uint64(second)
    return pair


def _high_product(x: Any, low: Any, high: Any) -> Any:
    """The upper words of the products of u64 x and numbers given by their halves."""
    below, above = x & _LOW, x >> _32
    middle = high * below + (low * below >> _32)
    other = low * above + (middle & _LOW)
    return high * above + (middle >> _32) + (other >> _32)


def uniform(cp: Any, key: Any, count: int, dtype: Any) -> Any:
    """Values in 0 <= u < 1, f32 or f64 [count], as `numpy.random.Generator.random` makes them."""
    if dtype == np.float32:
        drawn = words(cp, key, -(-count // 2)).view(np.uint32)[:count] >> np.uint32(8)
        return cp.multiply(drawn, np.float32(2**-24), dtype=np.float32)
    drawn = words(cp, key, count) >> np.uint64(11)
    return cp.multiply(drawn, np.float64(2**-53), dtype=np.float64)


def integers(cp: Any, key: Any, low: int, high: int, count: int, dtype: Any) -> Any:
    """Integers low <= i < high, u64[count], each modulo 2^64, as `Generator.integers` draws them
    for that dtype: by Lemire's method (ACM TOMACS 29, 2019) from words of 8, 16, 32 or 64 bits.

    A draw is refused for some words. So many more are drawn that they do not suffice with a
    probability below 1e-30.
    """
    span = high - low  # how many there are
    first = np.uint64(low % 2**64)
    if span == 1:
        return cp.full(count, first, np.uint64)
    bits = 8 * dtype.itemsize if dtype.itemsize < 8 else 32 if span <= 2**32 else 64
    refused = 0 if span == 2**bits else (2**bits - span) % span
    part = refused / 2**bits
    drawn = math.ceil((count + 12 * math.sqrt(count * part)) / (1 - part))
    drawn = drawn + 128 if refused else count
    word = words(cp, key, -(-drawn * bits // 64))
    if bits < 64:
        word = word.view(np.dtype(f"u{bits // 8}"))[:drawn].astype(np.uint64)
    if span == 2**bits:
        return word + first
    number = np.uint64(span)
    product = word * number
    if bits < 64:
        value, rest = product >> np.uint64(bits), product & np.uint64(2**bits - 1)
    else:
        value = _high_product(word, np.uint64(span & 0xFFFFFFFF), np.uint64(span >> 32))
        rest = product
    if refused:
        taken = cp.cumsum(rest >= np.uint64(refused), dtype=np.int64)
        value = value.take(cp.searchsorted(taken, cp.arange(1, count + 1)))
    return value + first


# --- standard normal values ----------------------------------------------------------

_LAYERS: Final = 256
_EDGE: Final = 3.6541528853610088  # where the tail begins
_AREA: Final = 0.004928673233974655  # of each layer, and of the tail


def ziggurat() -> Any:
    """The table of `normal`, f32[3, 256] on the host: the widths of the layers by 2^23 (the first
    is the tail's), how many of the 2^23 steps lie inside of the next layer, and the density at each
    edge (Marsaglia and Tsang, Journal of Statistical Software 5, 2000)."""
    x, density = [0.0] * _LAYERS, [1.0] * _LAYERS
    x[-1], density[-1] = _EDGE, math.exp(-0.5 * _EDGE**2)
    for i in range(_LAYERS - 2, 0, -1):
        density[i] = _AREA / x[i + 1] + density[i + 1]
        x[i] = math.sqrt(-2 * math.log(density[i]))
    x[0] = _AREA / density[-1]
    steps = [_EDGE / x[0], 0.0, *[x[i - 1] / x[i] for i in range(2, _LAYERS)]]
    inside = [int(step * 2**23) for step in steps]
    return np.array([[width / 2**23 for width in x], inside, density], np.float32)


def normal(cp: Any, table: Any, key: Any, count: int) -> Any:
    """Standard normal values, f32[count], as `numpy.random.Generator.standard_normal` draws them.

    `table` is `ziggurat()` on the device. A value takes one word in 98 of 100 cases, and more where
    one is refused, so that a value begins where the one before it ended. Therefore everything is
    computed as if a value began at every word; then the words at which values do begin are found by
    doubling how many are known. 3 % more words than values are drawn, where 2.2 % are needed.
    """
    if not count:
        return cp.empty(0, np.float32)
    size = count + count // 32 + 256
    word = words(cp, key, size // 2 + 2).view(np.uint32)
    unit = cp.multiply(word >> np.uint32(8), np.float32(2**-24), dtype=np.float32)
    at = cp.arange(size)

    layer = (word[:size] & np.uint32(255)).astype(np.int64)
    step = (word[:size] >> np.uint32(9)).astype(np.float32)
    is_below = (word[:size] & np.uint32(256)) != 0
    value = step * table[0].take(layer)
    value = cp.where(is_below, -value, value)
    inside = step < table[1].take(layer)

    # Between two layers: by the next word, accepted or begun again behind it.
    upper, lower = table[2].take(cp.maximum(layer - 1, 0)), table[2].take(layer)
    wide = value.astype(np.float64)
    accepted = (upper - lower) * unit[1 : size + 1] + lower < cp.exp(-0.5 * wide * wide)
    in_tail = ~inside & (layer == 0)
    gives = _followed(cp, cp.where(inside | accepted | in_tail, at, at + 2), 5)

    # In the tail: by pairs of words, until one is accepted.
    logarithm = -cp.log1p(-unit)
    beyond = logarithm[:size] * np.float32(1 / _EDGE)
    below = logarithm[1 : size + 1]
    ends = _followed(cp, cp.where(below + below > beyond * beyond, at, at + 2), 6)
    end = ends.take(cp.minimum(at + 1, size - 1))
    far = np.float32(_EDGE) + beyond.take(end)
    is_left = (word[:size] & np.uint32(1 << 17)) != 0
    value = cp.where(in_tail, cp.where(is_left, -far, far), value)

    behind = cp.where(in_tail, end + 2, at + 2 - inside)
    jump = cp.minimum(behind.take(gives), size - 1)
    starts = cp.zeros(1, np.int64)
    while len(starts) < count:
        starts = cp.concatenate([starts, jump.take(starts)])
        jump = jump.take(jump)
    return value.take(gives.take(starts[:count]))


def _followed(cp: Any, pointers: Any, doublings: int) -> Any:
    """Where each pointer leads if one follows it 2^doublings times."""
    pointers = cp.minimum(pointers, len(pointers) - 1)
    for _ in range(doublings):
        pointers = pointers.take(pointers)
    return pointers
