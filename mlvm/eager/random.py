"""Random tensors from keys: explicit ones as in JAX, or the next of the VM's global keys.

A key is a `u64[2]`. The same key gives the same numbers. `split` and `fold_in` make other keys from
a key, and without `key=` each draw takes `next_key()`. The global keys are split off a state, which
`seed` sets (0 at first) and each `next_key` advances in place. It does so by ops: a program that
contains them draws anew at each launch. No global key is one that `key(seed)`, `split` or `fold_in`
gives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.errors import AttributeRefused, DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, DType, TensorType, f32, f64, i64, u64
from mlvm.eager import primitives as op
from mlvm.eager.context import current_arena
from mlvm.eager.creation import asarray, full, integers
from mlvm.eager.tensor import Scalar, Tensor, alias, apply, apply_into, from_array, one_op, write

__all__ = [
    "bernoulli",
    "fold_in",
    "key",
    "next_key",
    "normal",
    "permutation",
    "randint",
    "seed",
    "set_state",
    "split",
    "state",
    "uniform",
]

_KEY: Final = TensorType(u64, (2,))
_SPLIT_ONE: Final = one_op("split_key", n=1)
_ADVANCE: Final = one_op("add")
_AS_KEY: Final = one_op("reshape", shape=(2,))


# --- keys ----------------------------------------------------------------------------


def key(seed: int) -> Tensor:
    """The key of that seed. Raises `OperandValueError` unless 0 <= seed < 2**64."""
    return from_array(_words(seed, 0))


def split(key: Tensor, n: int = 2) -> Tensor:
    """n new keys, independent of each other and of the key: u64[n,2]; `unstack` gives each."""
    return op.split_key(key, n=n)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key for each value of the integer `data`: a step, a layer."""
    return op.fold_in(key, asarray(data))


# --- the global key ------------------------------------------------------------------


class _Global:
    """The state that one VM's global keys are split off: (seed, n) for the n-th key. They count
    from 1, because (seed, 0) is `key(seed)`."""

    def __init__(self, vm: VMProtocol) -> None:
        self.lock = threading.Lock()
        with Arena(vm, "random").allocating():
            self.state = from_array(_words(0, 1))
            self.one = from_array(np.array((0, 1), np.uint64))


def prepare(vm: VMProtocol) -> _Global:
    """The state of a VM's global keys, made if there is none yet."""
    return vm.attached(_Global)


def _global() -> _Global:
    return prepare(current_arena().vm)


def next_key() -> Tensor:
    """The next global key of the current VM."""
    held = _global()
    with held.lock:
        keys = apply(_SPLIT_ONE, held.state)
        apply_into(held.state, _ADVANCE, held.state, held.one)
    return alias(_AS_KEY, keys, _KEY)


def seed(seed: int) -> None:
    """Start the current VM's global keys anew from that seed.

    Raises `OperandValueError` unless 0 <= seed < 2**64.
    """
    set_state(_words(seed, 1))


def state() -> Array:
    """The state of the current VM's global keys, to be kept for `set_state`."""
    return _global().state.numpy()


def set_state(state: Array) -> None:
    """Continue the current VM's global keys from what `state` returned earlier.

    Raises `ShapeError` for anything else than a u64 array of 2 elements.
    """
    if not isinstance(state, np.ndarray) or TensorType.of(state) is not _KEY:
        raise ShapeError(f"a state is a numpy array {_KEY}, not {state!r}")
    held = _global()
    write(held.state, state)


def _words(seed: int, n: int) -> Array:
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise OperandValueError(f"a seed is an int from 0 to 2**64 - 1, not {seed!r}")
    return np.array((seed, n), np.uint64)


# --- draws ---------------------------------------------------------------------------


def normal(
    shape: int | Sequence[int] = (), *, key: Tensor | None = None, dtype: object = f32
) -> Tensor:
    """Standard normal values, of mean 0 and variance 1."""
    return op.normal(_or_next(key), shape=integers(shape, "shape"), dtype=DType.of(dtype))


def uniform(
    shape: int | Sequence[int] = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    key: Tensor | None = None,
    dtype: object = f32,
) -> Tensor:
    """Values evenly distributed over low <= u < high; rounding may make one equal to high.

    Raises `AttributeRefused` unless low < high, and both and their distance are finite.
    """
    if not (_is_number(low) and _is_number(high) and low < high and math.isfinite(high - low)):
        raise AttributeRefused(
            f"low = {brief(low)} must be less than high = {brief(high)}, and high - low finite"
        ).at("uniform", ())
    u = op.uniform(_or_next(key), shape=integers(shape, "shape"), dtype=DType.of(dtype))
    if (low, high) == (0, 1):
        return u
    return u * float(high - low) + float(low)


def bernoulli(
    shape: int | Sequence[int] = (), p: Scalar | Tensor = 0.5, *, key: Tensor | None = None
) -> Tensor:
    """True with probability p, which is a number or a float tensor that broadcasts to the shape.

    Raises `OperandValueError` where p is no probability, `DTypeError` where it is no number.
    """
    if not isinstance(p, Tensor):
        if not _is_number(p):
            raise DTypeError(f"p is a number or a tensor, not {brief(p)}").at("bernoulli", ())
        p = full((), float(p), dtype=f64)
    return op.bernoulli(_or_next(key), p, shape=integers(shape, "shape"))


def randint(
    shape: int | Sequence[int],
    low: int,
    high: int,
    *,
    key: Tensor | None = None,
    dtype: object = i64,
) -> Tensor:
    """Integers low <= i < high, each exactly as likely as any other."""
    return op.randint(
        _or_next(key), low=low, high=high, shape=integers(shape, "shape"), dtype=DType.of(dtype)
    )


def permutation(x: int | Tensor, *, key: Tensor | None = None) -> Tensor:
    """The numbers 0 .. x-1 in random order, or a tensor with its axis 0 in random order."""
    if not isinstance(x, Tensor):
        return op.permutation(_or_next(key), n=x)
    if x.ndim == 0:
        raise ShapeError("a scalar has no axis to permute").at("permutation", (x.type,))
    return op.take(x, op.permutation(_or_next(key), n=x.shape[0]), axis=0)


def _or_next(key: Tensor | None) -> Tensor:
    if key is not None and not isinstance(key, Tensor):
        raise DTypeError(f"a key is a tensor {_KEY}, not {type(key).__name__}; see random.key")
    return next_key() if key is None else key


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float))
