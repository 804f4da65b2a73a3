"""Random tensors as pure functions of a key, a `u64[2]` that is usually (seed, counter).

Each op runs numpy's Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011) with the key, from a fixed counter. The same key, attributes and version of numpy therefore
give the same bits in every process and thread, regardless of earlier draws. `split_key` and
`fold_in` create new keys for independent numbers.

The top word of Philox's 256-bit counter distinguishes draws, splits and folds, so keys derived from
a key never repeat the bits drawn with it.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

import numpy as np

from mlvm.core.errors import ArgumentError, OperandValueError, ShapeError
from mlvm.core.op import internal
from mlvm.core.rules import broadcast_shapes, require, require_representable
from mlvm.core.types import Array, DType, TensorType, bool_, i64, u64

_DRAW: Final = 0
SPLIT: Final = 1
FOLD: Final = 2

_KEY: Final = TensorType(u64, (2,))


class _Philox(threading.local):
    """Generator of a thread. Setting the state is eight times as fast as creating a generator."""

    generator: np.random.Generator

    def __getattr__(self, name: str) -> object:
        """Create the generator at the first use, because importing `numpy.random` is slow."""
        self.generator = np.random.Generator(np.random.Philox(key=0))
        return threading.local.__getattribute__(self, name)


_philox: Final = _Philox()


def _start(key: Array, purpose: int, data: int = 0) -> np.random.BitGenerator:
    """Return the thread's bit generator at the start of the key's stream for that purpose."""
    words = np.array((data, 0, 0, purpose), np.uint64)
    bits = _philox.generator.bit_generator
    bits.state = {
        "bit_generator": "Philox",
        "state": {"counter": words, "key": key},
        "buffer": words,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return bits


def generator(key: Array) -> np.random.Generator:
    """Return numpy's generator at the start of the key's stream.

    It draws the same numbers as `np.random.Generator(np.random.Philox(key=key))`. The thread's next
    call of this function resets it.
    """
    _start(key, _DRAW)
    return _philox.generator


def require_key(key: TensorType) -> None:
    """Raise `ShapeError` unless this is the type of a key."""
    if key is not _KEY:
        raise ShapeError(f"expected a key {_KEY}, got {key}")


# --- keys ----------------------------------------------------------------------------


def _split_key(key: TensorType, n: int) -> TensorType:
    require_key(key)
    if n < 0:
        raise ArgumentError(f"expected n >= 0 keys, got {n}")
    return TensorType(u64, (n, 2))


@internal(infer=_split_key)
def split_key(out: Array, key: Array, *, n: int) -> None:
    """n new keys, independent of each other and of `key`: u64[n,2]."""
    out[...] = _start(key, SPLIT).random_raw(out.size).reshape(out.shape)


def _fold_in(key: TensorType, data: TensorType) -> TensorType:
    require_key(key)
    require("integer", data)
    if data.ndim:
        raise ShapeError(f"expected a scalar as data, got {data}")
    return _KEY


@internal(infer=_fold_in)
def fold_in(out: Array, key: Array, data: Array) -> None:
    """A new key for each value of the integer scalar `data` (a step, a layer): u64[2]."""
    out[...] = _start(key, FOLD, int(data) % 2**64).random_raw(2)


# --- draws ---------------------------------------------------------------------------


def _drawn(allowed: str, key: TensorType, shape: tuple[int, ...], dtype: str) -> TensorType:
    require_key(key)
    drawn = TensorType(DType.named(dtype), shape)
    require(allowed, drawn)
    return drawn


_draw_float, _draw_integer = partial(_drawn, "float"), partial(_drawn, "integer")


@internal(infer=_draw_float)
def normal(out: Array, key: Array, *, shape: tuple[int, ...], dtype: str = "f32") -> None:
    """Standard normal values, with mean 0 and variance 1."""
    generator(key).standard_normal(dtype=out.dtype.type, out=out)


@internal(infer=_draw_float)
def uniform(out: Array, key: Array, *, shape: tuple[int, ...], dtype: str = "f32") -> None:
    """Uniformly distributed values, 0 <= u < 1."""
    generator(key).random(dtype=out.dtype.type, out=out)


def _bernoulli(key: TensorType, p: TensorType, shape: tuple[int, ...]) -> TensorType:
    require_key(key)
    require("float", p)
    drawn = TensorType(bool_, shape)
    _by(("p", p), shape=drawn.shape)
    return drawn


@internal(infer=_bernoulli, may_raise=True)
def bernoulli(out: Array, key: Array, p: Array, *, shape: tuple[int, ...]) -> None:
    """True with probability p, which broadcasts to `shape`; requires 0 <= p <= 1."""
    bad = p[~((p >= 0) & (p <= 1))]
    if bad.size:
        raise OperandValueError(f"expected probabilities p in [0, 1], got {bad[0]}")
    np.less(generator(key).random(out.shape), p, out)


def _randint(
    key: TensorType, low: int, high: int, shape: tuple[int, ...], dtype: str
) -> TensorType:
    drawn = _draw_integer(key, shape, dtype)
    if low >= high:
        raise ArgumentError(f"expected low < high, got low = {low}, high = {high}")
    require_representable(low, drawn.dtype)
    require_representable(high - 1, drawn.dtype)
    return drawn


@internal(infer=_randint)
def randint(
    out: Array, key: Array, *, low: int, high: int, shape: tuple[int, ...], dtype: str = "i64"
) -> None:
    """Integers low <= i < high, all with exactly the same probability."""
    out[...] = generator(key).integers(low, high, size=out.shape, dtype=out.dtype)


def _permutation(key: TensorType, n: int) -> TensorType:
    require_key(key)
    if n < 0:
        raise ArgumentError(f"expected n >= 0, got {n}")
    return TensorType(i64, (n,))


@internal(infer=_permutation)
def permutation(out: Array, key: Array, *, n: int) -> None:
    """The numbers 0 .. n-1 in random order: i64[n]."""
    out[...] = np.arange(n)
    generator(key).shuffle(out)


def _by(*parameters: tuple[str, TensorType], shape: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless parameters of these names broadcast to the shape."""
    for name, type in parameters:
        if broadcast_shapes(type.shape, shape) != shape:
            raise ShapeError(f"expected {name} to broadcast to {shape}, got shape {type.shape}")


def _gamma(key: TensorType, a: TensorType, shape: tuple[int, ...], dtype: str) -> TensorType:
    require("float", a)
    _by(("a", a), shape=shape)
    return _draw_float(key, shape, dtype)


@internal(infer=_gamma, may_raise=True)
def gamma(out: Array, key: Array, a: Array, *, shape: tuple[int, ...], dtype: str = "f32") -> None:
    """Draws of the gamma distribution with shape parameter `a` and scale 1.

    `a` broadcasts to `shape`, and must be finite and > 0.
    """
    _require_all(a, (a > 0) & np.isfinite(a), "is no shape of a gamma distribution; a must be > 0")
    np.copyto(out, generator(key).standard_gamma(a, size=out.shape, dtype=out.dtype.type))


def _poisson(key: TensorType, rate: TensorType, shape: tuple[int, ...], dtype: str) -> TensorType:
    require("float", rate)
    _by(("rate", rate), shape=shape)
    return _draw_integer(key, shape, dtype)


@internal(infer=_poisson, may_raise=True)
def poisson(
    out: Array, key: Array, rate: Array, *, shape: tuple[int, ...], dtype: str = "i64"
) -> None:
    """Draws of the Poisson distribution; `rate` broadcasts to `shape`.

    Requires 0 <= rate <= 1e18.
    """
    _require_all(rate, (rate >= 0) & (rate <= 1e18), "is no rate; it must be in 0 .. 1e18")
    _write_counts(out, generator(key).poisson(rate, size=out.shape))


def _binomial(
    key: TensorType, n: TensorType, p: TensorType, shape: tuple[int, ...], dtype: str
) -> TensorType:
    require("integer", n)
    require("float", p)
    _by(("n", n), ("p", p), shape=shape)
    return _draw_integer(key, shape, dtype)


@internal(infer=_binomial, may_raise=True)
def binomial(
    out: Array, key: Array, n: Array, p: Array, *, shape: tuple[int, ...], dtype: str = "i64"
) -> None:
    """Draws of the binomial distribution: successes of n trials, each with probability p.

    n and p broadcast to `shape`. Requires n >= 0 and 0 <= p <= 1.
    """
    trials = _trials(n)
    _require_all(p, (p >= 0) & (p <= 1), "is not a probability; p must be in [0, 1]")
    _write_counts(out, generator(key).binomial(trials, p, size=out.shape))


def _multinomial(
    key: TensorType, n: TensorType, p: TensorType, shape: tuple[int, ...], dtype: str
) -> TensorType:
    require("integer", n)
    require("float", p)
    if not p.ndim or not p.shape[-1]:
        raise ShapeError(f"expected p with at least 1 probability along the last axis, got {p}")
    _by(("n", n), ("p without its last axis", p.with_shape(p.shape[:-1])), shape=shape)
    return _draw_integer(key, (*shape, p.shape[-1]), dtype)


@internal(infer=_multinomial, may_raise=True)
def multinomial(
    out: Array, key: Array, n: Array, p: Array, *, shape: tuple[int, ...], dtype: str = "i64"
) -> None:
    """Draws of the multinomial distribution: counts of each category in n trials.

    p[..., categories] are weights proportional to the probabilities; the result is [*shape,
    categories]. Requires n >= 0, and weights that are finite, >= 0 and not all 0.
    """
    trials = np.broadcast_to(_trials(n), out.shape[:-1])
    _require_all(p, (p >= 0) & np.isfinite(p), "is not proportional to a probability")
    p = p.astype(np.float64)
    largest = p.max(-1, keepdims=True)
    _require_all(largest, largest > 0, "is the sum of all p, which must be > 0")
    p /= largest  # avoids an overflow of the sum
    p /= p.sum(-1, keepdims=True)
    _write_counts(out, generator(key).multinomial(trials, np.broadcast_to(p, out.shape)))


def _trials(n: Array) -> Array:
    """Return n in numpy's dtype. Raises `OperandValueError` unless all are in 0 .. 2**63 - 1."""
    good = (n >= 0) & (n <= np.iinfo(np.int64).max)
    _require_all(n, good, "is no number of trials; n must be in 0 .. 2**63 - 1")
    return n.astype(np.int64)


def _write_counts(out: Array, drawn: Array) -> None:
    """Write the counts. Raises `OperandValueError` for a count that exceeds the dtype's range."""
    _require_all(drawn, drawn <= np.iinfo(out.dtype).max, f"was drawn, which no {out.dtype} holds")
    np.copyto(out, drawn, casting="unsafe")


def _require_all(x: Array, good: Array, reason: str) -> None:
    """Raise `OperandValueError` with the first element that is not `good`."""
    if not np.all(good):
        raise OperandValueError(f"{x[~good].flat[0]} {reason}")
