"""Random numbers of an input pipeline: the order of samples, and the numbers of transforms.

Each is a hash of (seed, epoch, index of the sample). Therefore it does not depend on the number of
workers, on earlier draws, or on the other samples of a batch. The hash, and the stream of numbers
that it starts, are SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014). They are computed for all samples of a batch together.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlvm.core.errors import ArgumentError
from mlvm.core.locks import cached_property
from mlvm.core.memo import memoized
from mlvm.core.splitmix import GOLDEN, Words, mixed

Indices: TypeAlias = NDArray[np.int64]
Doubles: TypeAlias = NDArray[np.float64]

_ORDER, _SAMPLE = 1, 2  # purposes with independent hashes
_MASK: Final = 2**64 - 1


@memoized(16)
def _start(purpose: int, seed: int, epoch: int) -> np.uint64:
    words = np.zeros(1, np.uint64)
    for number in (purpose, seed, epoch):
        words = mixed(words + np.uint64((number * GOLDEN) & _MASK))
    return np.uint64(words[0])


def _hash(purpose: int, seed: int, epoch: int, indices: Indices) -> Words:
    """Hash each index to a word."""
    scattered = mixed(indices.astype(np.uint64) + np.uint64(1))
    return mixed(scattered + _start(purpose, seed, epoch))


def order(size: int, *, seed: int, epoch: int) -> Indices:
    """Return the numbers 0 .. size-1 in the random order of an epoch: i64[size]."""
    return np.argsort(_hash(_ORDER, seed, epoch, np.arange(size)), kind="stable")


class SampleRandom:
    """Random numbers for the samples of a batch, with one stream for each sample.

    `indices`, i64[B], are the numbers of the samples. A draw returns an array [B, *shape], with a
    row from each stream. Row b depends only on `indices[b]`, seed, epoch and earlier draws, not on
    the other rows.

        >>> import numpy as np
        >>> random = ml.SampleRandom(seed=0, epoch=0, indices=np.asarray([5, 2]))
        >>> random.uniform().shape, random.normal((3,)).shape
        ((2,), (2, 3))
    """

    def __init__(self, seed: int, epoch: int, indices: Indices) -> None:
        self._of = seed, epoch, indices

    def __len__(self) -> int:
        return len(self._of[2])

    @cached_property
    def _words(self) -> Words:
        """The position of each stream. The first draw computes it."""
        return _hash(_SAMPLE, *self._of)

    def bits(self, shape: tuple[int, ...] = ()) -> Words:
        """Draw 64 random bits each: u64[B, *shape]."""
        count = int(np.prod(shape))
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        drawn = mixed(self._words[:, None] + steps)
        self._words = self._words + np.uint64((count * GOLDEN) & _MASK)
        return drawn.reshape(len(self), *shape)

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Doubles:
        """Draw uniformly distributed numbers low <= u < high, from 53 bits: f64[B, *shape].

        Raises `ArgumentError` unless low <= high.

        Invalid calls:
            draws.uniform(1.0, 0.0)  # ArgumentError
        """
        if not low <= high:
            raise ArgumentError(f"expected low <= high, got low = {low}, high = {high}")
        unit = (self.bits(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return low + (high - low) * unit

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> Indices:
        """Draw integers low <= i < high: i64[B, *shape].

        Raises `ArgumentError` unless low < high.

        Invalid calls:
            draws.integers(2, 2)  # ArgumentError
        """
        if not low < high:
            raise ArgumentError(f"expected low < high, got low = {low}, high = {high}")
        return low + np.floor(self.uniform(0, high - low, shape)).astype(np.int64)

    def normal(self, shape: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Draw standard normal values, by Box and Muller (1958): f32[B, *shape]."""
        count = int(np.prod(shape))
        words = self.bits((-(-count // 2),))
        # Two 32-bit halves make two values; the first half is never zero.
        ring = ((words >> np.uint64(32)).astype(np.float32) + np.float32(1)) * np.float32(2.0**-32)
        turn = words.astype(np.uint32).astype(np.float32) * np.float32(np.pi * 2.0**-31)
        radius = np.sqrt(-2 * np.log(np.minimum(ring, 1)))
        values = np.concatenate([radius * np.cos(turn), radius * np.sin(turn)], axis=1)
        return values[:, :count].reshape(len(self), *shape)

    def beta(self, alpha: float, beta: float) -> Doubles:
        """Draw beta-distributed numbers, by Jöhnk (Metrika, 1964): f64[B].

        Raises `ArgumentError` unless 0 < alpha, beta <= 1: above 1, many draws are rejected.

        Invalid calls:
            draws.beta(2.0, 1.0)  # ArgumentError
        """
        if not (0 < alpha <= 1 and 0 < beta <= 1):
            raise ArgumentError(
                f"expected alpha and beta above 0 and at most 1, got {alpha} and {beta}"
            )
        # Each sample uses one number of the stream, regardless of the number of rejected draws.
        stream = SampleRandom(*self._of)
        stream._words = self.bits()
        ratio = np.full(len(self), np.nan)
        while (pending := np.isnan(ratio)).any():
            u, v = np.log(1 - stream.uniform(shape=(2,))).T
            accepted = pending & (np.logaddexp(u / alpha, v / beta) <= 0)
            ratio[accepted] = (v / beta - u / alpha)[accepted]
        drawn: Doubles = 1 / (1 + np.exp(np.minimum(ratio, 700)))
        return drawn
