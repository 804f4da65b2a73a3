"""Random tensors from keys: explicit ones as in JAX, or the next of the VM's global keys.

A key is a `u64[2]`. The same key gives the same numbers. `split` and `fold_in` make other keys from
a key, and without `key=` each draw takes `next_key()`. Each VM has global keys. They are split off
a state, which `seed` sets (0 at first) and each `next_key` advances in place. It does so by ops: a
program that contains them draws new numbers at each launch. No global key is one that `key(seed)`,
`split` or `fold_in` gives.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    MlvmError,
    OperandValueError,
    ShapeError,
    brief,
    user_line,
)
from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import broadcast_shapes, is_real, normalize_axis
from mlvm.core.types import Array, DType, Shape, TensorType, f32, f64, i64, u64
from mlvm.eager.functions.arguments import Ints, integer, integers
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.functions.shapes import reshape, unstack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.context import current_arena, current_capture, is_vm_chosen
from mlvm.eager.tensor.reading import write
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at
from mlvm.eager.tensor.wrapper import names_of, public

_KEY: Final = TensorType(u64, (2,))
_SPLIT_ONE: Final = one_op("split_key", n=1)
_ADVANCE: Final = one_op("add")
_AS_KEY: Final = one_op("reshape", shape=(2,))


# --- keys ----------------------------------------------------------------------------


@public
def key(seed: int) -> Tensor:
    """The key of that seed.

    The result: u64[2]. Raises `OperandValueError` unless 0 <= seed < 2**64.

        >>> ml.random.key(0).type
        u64[2]
    """
    return from_array(_words(seed, 0))


@public
def split(key: Tensor, n: int = 2) -> Tensor:
    """n new keys, independent of each other and of the key: u64[n,2]; `unstack` gives each.

    The result: u64[n, 2]. Raises `ShapeError` for what is no key, u64[2], `AttributeRefused` for a
    negative n.

        >>> ml.random.split(ml.random.key(0), 3).type
        u64[3,2]
    """
    return op.split_key(key, n=n)


@public
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key for each value of the integer `data`: a step, a layer.

    The result: u64[2]. Raises `ShapeError` for what is no key, u64[2], and data that is no scalar,
    `DTypeError` for data that is no integer.

        >>> ml.random.fold_in(ml.random.key(0), 7).type
        u64[2]
    """
    return op.fold_in(key, asarray(data))


# --- the global key ------------------------------------------------------------------


class _Global:
    """The state that one VM's global keys are split off: (seed, n) for the n-th key. They count
    from 1, because (seed, 0) is `key(seed)`."""

    def __init__(self, vm: VMProtocol) -> None:
        self.lock = threading.Lock()
        with process.lock, Arena(vm, "random").allocating():
            self.seed = process.seed
            self.is_seeded = process.number > 0
            self.state = from_array(_words(self.seed, 1))
            self.one = from_array(np.array((0, 1), np.uint64))
            process.all.add(self)

    def write(self, state: Array) -> None:
        """Continue from that state."""
        with self.lock:
            write(self.state, state)
        self.seed, self.is_seeded = int(state[0]), True

    def warn(self) -> None:
        """Warn, once, that a draw has keys of no seed, although there was one for another VM."""
        self.is_seeded = True
        if type(self.state.arena.vm).__name__ == "DryVM":  # whose draws have no values
            return
        warn_at(
            user_line(),
            f"VM {self.state.arena.vm.name!r} draws with keys that no seed has reached: "
            f"ml.random.seed was called in an arena of VM {process.alone!r}, for that VM alone; "
            f"call it outside of arenas, and it reaches all VMs",
            NoEffectWarning,
        )


class _Process:
    """The seed of all VMs of this process. `number` counts its changes, `all` has the keys of each
    VM, `alone` the name of a VM that was seeded alone."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.seed = self.number = 0
        self.all = weakref.WeakSet[_Global]()
        self.alone: str | None = None

    def start(self, number: int, seed: int) -> None:
        """Start the keys of all VMs, those that are made later included, from that seed. A VM
        that fails is left out: its next draw warns."""
        with self.lock:
            self.number, self.seed, found = number, seed, [*self.all]
        for each in found:
            each.is_seeded = False
            with suppress(MlvmError, OSError):
                each.write(_words(seed, 1))


process: Final = _Process()


def carried(task: Callable[..., Any]) -> Callable[..., Any]:
    """The task of a group: in another process it begins with the seed of this one, if that is
    another than before."""
    return partial(_seeded, process.number, process.seed, task) if process.number else task


def _seeded(number: int, seed: int, task: Callable[..., Any], rank: int, vm: object) -> Any:
    if (process.number, process.seed) != (number, seed):
        process.start(number, seed)
    return task(rank, vm)


def prepare(vm: VMProtocol) -> _Global:
    """The state of a VM's global keys, made if there is none yet."""
    return vm.attached(_Global)


_source: ContextVar[Callable[[], Tensor] | None] = ContextVar("source", default=None)
"""Where `next_key` has its keys from in place of the global ones, for each thread or task."""

_state: ContextVar[Tensor | None] = ContextVar("state", default=None)
"""The state that global keys are split off in place of the VM's own: in captured functions only."""


@public
def next_key() -> Tensor:
    """The next global key of the current VM.

    The result: u64[2].

        >>> ml.random.next_key().type
        u64[2]
    """
    source = _source.get()
    return _draw() if source is None else source()


@contextmanager
def keys_from(source: Callable[[], Tensor] | None) -> Iterator[None]:
    """Inside the block, `next_key` has its keys from there; without a source, from the VM."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


class _Noted:
    """Gives keys of the global state of a captured function, and keeps the state before them."""

    def __init__(self, around: _Noted | None, kept: list[Tensor], before: Tensor) -> None:
        self._around, self._kept, self._before = around, kept, before

    def __call__(self) -> Tensor:
        if not self._kept:
            self._kept.append(self._before)
        return _draw() if self._around is None else self._around()


def drawing(kept: list[Tensor]) -> AbstractContextManager[None]:
    """Inside the block, `replaying` is given what it needs to give the same keys: each that
    `next_key` gives or, where a captured function draws global keys, maybe in a loop, the state
    before: u64[1,2]."""
    source = _source.get()
    if current_capture.get() is not None and (source is None or isinstance(source, _Noted)):
        state = _state_of(prepare(current_arena().vm))
        return keys_from(_Noted(source, kept, reshape(op.copy(state), (1, 2))))
    drawn = source or _draw

    def draw() -> Tensor:
        kept.append(drawn())
        return kept[-1]

    return keys_from(draw)


@contextmanager
def replaying(kept: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, `next_key` gives the keys again for which `drawing` has kept this."""
    if not kept or kept[0].ndim == 1:
        with keys_from(iter(kept).__next__):
            yield
        return
    with drawing_from(op.copy(reshape(kept[0], (2,)))):
        yield


@contextmanager
def drawing_from(state: Tensor) -> Iterator[None]:
    """Inside the block, keys are split off this state, which they advance in place, and not off the
    VM's."""
    token = _state.set(state)
    try:
        with keys_from(None):
            yield
    finally:
        _state.reset(token)


def drawing_nowhere() -> AbstractContextManager[None]:
    """Inside the block, which is recorded and not run, no keys are added to a list, or taken."""
    return keys_from(None)


def _state_of(held: _Global) -> Tensor:
    """The state to split keys off."""
    state = _state.get()
    return held.state if state is None else state


def _draw() -> Tensor:
    held = prepare(current_arena().vm)
    if not held.is_seeded and process.alone is not None:
        held.warn()
    state = _state_of(held)
    with held.lock:
        keys = apply(_SPLIT_ONE, state)
        apply_into(state, _ADVANCE, state, held.one)
    return alias(_AS_KEY, keys, _KEY)


@public
def seed(seed: int) -> None:
    """Start the global keys of all VMs of this process from that seed, those of later VMs too, and
    the shuffling of pipelines without a seed of their own. Inside an arena, a member of a group or
    `ml.use` it is for the current VM alone; a draw on a VM that no seed has reached warns then.

    Raises `OperandValueError` unless 0 <= seed < 2**64.

        >>> ml.random.seed(0)
        >>> x = ml.random.normal(3)
        >>> ml.random.seed(0)
        >>> bool(ml.all(x == ml.random.normal(3)))
        True
    """
    set_state(_words(seed, 1))  # first, as a captured function refuses it
    if is_vm_chosen():
        process.alone = current_arena().vm.name
    else:
        process.start(process.number + 1, int(seed))


@public
def state() -> Array:
    """The state of the current VM's global keys, to be kept for `set_state`.

    The result: a numpy array, u64[2].

        >>> state = ml.random.state()
        >>> x = ml.random.normal(3)
        >>> ml.random.set_state(state)
        >>> bool(ml.all(x == ml.random.normal(3)))
        True
    """
    return prepare(current_arena().vm).state.numpy()


@public
def set_state(state: Array | Tensor) -> None:
    """Continue the current VM's global keys from what `state` returned earlier: a numpy array,
    u64[2], or the tensor that `ml.load` makes of it.

    Raises `ShapeError` for anything else than a u64 array of 2 elements.

        >>> state = ml.random.state()
        >>> x = ml.random.normal(3)
        >>> ml.random.set_state(state)
        >>> bool(ml.all(x == ml.random.normal(3)))
        True
    """
    if isinstance(state, Tensor):
        state = state.numpy()
    if not isinstance(state, np.ndarray) or TensorType.of(state) is not _KEY:
        raise ShapeError(f"a state is a numpy array {_KEY}, not {state!r}")
    prepare(current_arena().vm).write(state)


class _KeysOf:
    """The global keys of some VMs, as a checkpoint has them: u64[2] of one, u64[n,2] of several."""

    def __init__(self, vms: Sequence[VMProtocol]) -> None:
        self._all = [prepare(vm) for vm in vms]

    def state(self) -> Array:
        found = np.stack([each.state.numpy() for each in self._all])
        return found if len(found) > 1 else found[0]

    def set_state(self, state: Array) -> None:
        for each, row in zip(self._all, state.reshape(-1, 2), strict=True):
            each.write(row)

    def fitted(self, state: Array) -> Array:
        """The state of other VMs as one of these: a single state is for each of them, else each VM
        has its own as far as there are any, and stays where there is none."""
        if state.dtype != np.uint64 or state.shape[-1:] != (2,) or state.ndim > 2:
            return state
        now, rows = self.state(), state.reshape(-1, 2)
        fitted = np.array(np.broadcast_to(rows[:1], (len(self._all), 2)))
        if len(rows) != 1:
            fitted[:] = now
            fitted[: len(rows)] = rows[: len(fitted)]
        return fitted.reshape(now.shape)


def keys_of(vms: Sequence[VMProtocol]) -> _KeysOf:
    """The global keys of these VMs, with the state of a checkpoint."""
    return _KeysOf(vms)


def _words(seed: int, n: int) -> Array:
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise OperandValueError(f"a seed is an int from 0 to 2**64 - 1, not {seed!r}")
    return np.array((seed, n), np.uint64)


# --- draws ---------------------------------------------------------------------------


@public
def normal(shape: Ints = (), *, key: Tensor | None = None, dtype: object = f32) -> Tensor:
    """Standard normal values, of mean 0 and variance 1.

    The result: f[*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no floats.

        >>> ml.random.normal((2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    return op.normal(_or_next(key), shape=integers(shape, "shape"), dtype=DType.of(dtype))


@public
def uniform(
    shape: Ints = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    key: Tensor | None = None,
    dtype: object = f32,
) -> Tensor:
    """Values evenly distributed over low <= u < high; rounding may make one equal to high. Halves
    are those of f32, rounded once.

    The result: f[*shape]. Raises `AttributeRefused` unless low < high, and both and their distance
    are finite, `ShapeError` for a negative length and for what is no key, `DTypeError` for a dtype
    of no floats.

        >>> ml.random.uniform((2, 3), low=-1.0, key=ml.random.key(0)).type
        f32[2,3]
    """
    if not (is_real(low) and is_real(high) and low < high and math.isfinite(high - low)):
        raise AttributeRefused(
            f"low = {brief(low)} must be less than high = {brief(high)}, and high - low finite"
        )
    wanted, sizes = DType.of(dtype), integers(shape, "shape")
    if (low, high) == (0, 1):
        return op.uniform(_or_next(key), shape=sizes, dtype=wanted)
    u = op.uniform(_or_next(key), shape=sizes, dtype=_wide_dtype(wanted))
    return rounded(u * float(high - low) + float(low), wanted)


@public
def bernoulli(shape: Ints = (), p: Tensor | float = 0.5, *, key: Tensor | None = None) -> Tensor:
    """True with probability p, which is a number or a float tensor that broadcasts to the shape.

    The result: bool[*shape]. Raises `OperandValueError` where p is no probability, `DTypeError`
    where it is no float, `ShapeError` for a negative length and for what is no key, and where p
    does not broadcast to the shape.

        >>> ml.random.bernoulli(4, 1.0, key=ml.random.key(0))
        Tensor([ True,  True,  True,  True], bool[4])
    """
    if not isinstance(p, Tensor):
        if not is_real(p):
            raise DTypeError(f"p is a number or a tensor, not {brief(p)}")
        p = full((), float(p), dtype=f64)
    return op.bernoulli(_or_next(key), p, shape=integers(shape, "shape"))


@public
def randint(
    shape: Ints, *, low: int, high: int, key: Tensor | None = None, dtype: object = i64
) -> Tensor:
    """Integers low <= i < high, each exactly as likely as any other. `low` and `high` have no place
    of their own, since other libraries have them before the shape, or behind it.

    The result: i[*shape]. Raises `AttributeRefused` unless low < high, and both are of the dtype,
    `ShapeError` for a negative length and for what is no key, `DTypeError` for a dtype of no
    integers.

        >>> ml.random.randint(5, low=0, high=2, key=ml.random.key(0)).type
        i64[5]
    """
    return op.randint(
        _or_next(key), low=low, high=high, shape=integers(shape, "shape"), dtype=DType.of(dtype)
    )


@public
def permutation(x: Tensor | int, *, key: Tensor | None = None) -> Tensor:
    """The numbers 0 .. x-1 in random order, or the rows of a tensor in random order.

    x: an int n -> i64[n]; or [n, ...] -> [n, ...], a new tensor. Raises `ShapeError` for a tensor
    without axes and for what is no key, `AttributeRefused` for a negative number.

        >>> ml.sort(ml.random.permutation(4, key=ml.random.key(0)))
        Tensor([0, 1, 2, 3], i64[4])
    """
    if not isinstance(x, Tensor):
        return op.permutation(_or_next(key), n=x)
    if x.ndim == 0:
        raise ShapeError("a scalar has no axis to permute")
    return op.take(x, op.permutation(_or_next(key), n=x.shape[0]), axis=0)


@public
def categorical(
    logits: Tensor, axis: int = -1, shape: Ints | None = None, *, key: Tensor | None = None
) -> Tensor:
    """Positions along `axis`, i64, each with a probability proportional to e^logit.

    `shape` is that of the result: the shape of `logits` without the axis, or one that this
    broadcasts to. A position is where logit + noise is largest, with noise of the Gumbel
    distribution (Maddison et al., arXiv 1411.0030), as in `jax.random.categorical`: for each draw,
    as many numbers are drawn as there are logits.

    logits: f[..., K] -> i64[*shape]. Raises `DTypeError` for other than floats, `AxisRefused` for
    an axis that is not there, `ShapeError` for a shape that the logits do not fit, no logits along
    the axis, or what is no key.

        >>> ml.random.categorical(ml.asarray([0.0, 100.0]), key=ml.random.key(0))
        Tensor(1, i64[])
    """
    type = _float_type(logits, "logits")
    along = normalize_axis(integer(axis, "axis"), type.ndim) - type.ndim
    rest = tuple(n for i, n in enumerate(type.shape, -type.ndim) if i != along)
    wanted = _drawn_shape(rest, shape)
    place = len(wanted) + 1 + along
    drawn = (*wanted[:place], type.shape[along], *wanted[place:])
    wide = widened(stop_gradient(logits))
    return op.argmax(wide + _gumbel(drawn, wide.dtype, key), axis=along)


@public
def choice(
    a: Tensor | int,
    shape: Ints = (),
    *,
    replace: bool = True,
    p: Tensor | None = None,
    axis: int = 0,
    key: Tensor | None = None,
) -> Tensor:
    """Random ones of the numbers 0 .. a-1 (i64), or of the slices of a tensor along `axis`, which
    the axes of `shape` replace.

    Each is as likely as any other, or as its element of the float vector `p` says, whose sum need
    not be 1. With `replace`, one may be drawn again, and all of `p` is looked at for each draw.
    Without, none is drawn twice, and with `p` they come as if drawn one after the other, each from
    what is left (Efraimidis and Spirakis, Inf. Process. Lett. 97, 2006, by Gumbel noise); if fewer
    than are drawn have p > 0, some of the others follow.

    The result: i64[*shape] of a number, [*shape, ...] of a tensor and axis 0. Raises
    `OperandValueError` for a `p` with a negative number or nan, or without one above 0, at which a
    captured function does not look, `AttributeRefused` for more draws than there are without
    `replace`, or for any from nothing, `ShapeError` for another `p` than one number for each and
    for what is no key, `DTypeError` for a `p` that is no floats, `AxisRefused` for an axis that the
    tensor does not have.

        >>> ml.random.choice(10, 3, replace=False, key=ml.random.key(0)).type
        i64[3]
    """
    if isinstance(a, Tensor):
        n = a.shape[normalize_axis(integer(axis, "axis"), a.ndim)]
    else:
        n = integer(a, "a")
    wanted = integers(shape, "shape")
    draws = math.prod(wanted)
    if n < 0 or (draws > n and not replace) or (draws and not n):
        raise AttributeRefused(f"cannot draw {draws} of {n}{'' if replace else ' without replace'}")
    if p is not None and _float_type(p, "p").shape != (n,):
        raise ShapeError(f"p has one number for each of {n}, and is {p.type}")
    if p is not None and draws and current_capture.get() is None:
        _require_weights(widened(stop_gradient(p)).numpy())
    if not draws:
        places = full(wanted, 0, dtype=i64)
    elif p is None and replace:
        places = randint(wanted, low=0, high=n, key=key)
    elif p is None:
        places = _first(op.permutation(_or_next(key), n=n), wanted)
    elif replace:
        places = categorical(op.log(widened(stop_gradient(p))), shape=wanted, key=key)
    else:
        scores = op.log(widened(stop_gradient(p)))
        noise = _gumbel((n,), scores.dtype, key)
        places = _first(op.argsort(scores + noise, descending=True), wanted)
    return op.take(a, places, axis=axis) if isinstance(a, Tensor) else places


def _require_weights(p: Array) -> None:
    """Raise `OperandValueError` for what are no weights."""
    wrong = ~((p >= 0) & np.isfinite(p))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise OperandValueError(f"p has weights, which are 0 or more, and p[{i}] is {p[i]:g}")
    if not p.any():
        raise OperandValueError("p has no weight above 0")


@public
def truncated_normal(
    lower: Tensor | float,
    upper: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = f32,
) -> Tensor:
    """Standard normal values under the condition lower <= x <= upper, numbers or tensors that
    broadcast to `shape`; without it, to each other. By the inverse of the distribution function, as
    in `jax.random.truncated_normal`: where both bounds are on one side of 0 and more than about 4
    away (7 in f64), so few values are possible that it is coarse.

    The result: f[*shape]; of bounds that are tensors and cross, `upper`. Raises `AttributeRefused`
    unless lower < upper, for numbers, `ShapeError` for a negative length and for what is no key,
    and where the bounds do not broadcast to the shape, `DTypeError` for a dtype of no floats.

        >>> ml.random.truncated_normal(-1.0, 1.0, 3, key=ml.random.key(0)).type
        f32[3]
    """
    bounds = lower, upper
    if not any(isinstance(x, Tensor) for x in bounds) and not (
        is_real(lower) and is_real(upper) and lower < upper
    ):
        raise AttributeRefused(f"lower = {brief(lower)} must be less than upper = {brief(upper)}")
    wanted = DType.of(dtype)
    if not wanted.is_float:
        raise DTypeError(f"dtype {wanted} is not one of floats")
    low, high = [_bound(x, wanted) for x in bounds]
    given = broadcast_shapes(low.shape, high.shape)
    drawn = _drawn_shape(given, shape)
    u = op.uniform(_or_next(key), shape=drawn, dtype=_wide_dtype(wanted))
    first, last = [op.erf(widened(x) * math.sqrt(0.5)) for x in (low, high)]
    y = op.erfinv(first + u * (last - first))
    most = float(np.finfo(y.dtype.numpy.name).max)
    return op.clip(rounded(math.sqrt(2) * op.clip(y, -most, most), wanted), low, high)


# --- other distributions -------------------------------------------------------------


@public
def exponential(shape: Ints = (), *, key: Tensor | None = None, dtype: object = f32) -> Tensor:
    """Values of the exponential distribution of mean 1.

    The result: f[*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no floats.

        >>> ml.random.exponential((2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    u, wanted = _uniform(shape, key, dtype)
    return rounded(-op.log1p(-u), wanted)


@public
def laplace(shape: Ints = (), *, key: Tensor | None = None, dtype: object = f32) -> Tensor:
    """Values of the Laplace distribution of mean 0 and scale 1.

    The result: f[*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no floats.

        >>> ml.random.laplace((2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    u, wanted = _uniform(shape, key, dtype)
    side = op.maximum(2.0 * u - 1.0, float(np.finfo(u.dtype.numpy.name).epsneg) - 1.0)
    return rounded(-op.sign(side) * op.log1p(-op.abs(side)), wanted)


@public
def gumbel(shape: Ints = (), *, key: Tensor | None = None, dtype: object = f32) -> Tensor:
    """Values of the Gumbel distribution of location 0 and scale 1: -log(-log(u)).

    The result: f[*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no floats.

        >>> ml.random.gumbel((2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    wanted = DType.of(dtype)
    return rounded(_gumbel(integers(shape, "shape"), _wide_dtype(wanted), key), wanted)


@public
def cauchy(shape: Ints = (), *, key: Tensor | None = None, dtype: object = f32) -> Tensor:
    """Values of the Cauchy distribution of location 0 and scale 1.

    The result: f[*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no floats.

        >>> ml.random.cauchy((2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    u, wanted = _uniform(shape, key, dtype)
    return rounded(op.tan((u - 0.5) * math.pi), wanted)


@public
def rademacher(shape: Ints = (), *, key: Tensor | None = None, dtype: object = i64) -> Tensor:
    """-1 or 1, each as likely as the other.

    The result: [*shape]. Raises `ShapeError` for a negative length and for what is no key,
    `DTypeError` for a dtype of no signed numbers.

        >>> ml.random.rademacher((2, 3), key=ml.random.key(0)).type
        i64[2,3]
    """
    wanted = DType.of(dtype)
    if wanted.kind not in ("signed", "float"):
        raise DTypeError(f"{wanted} has no -1")
    drawn = bernoulli(shape, key=key)
    return op.where(drawn, constant(1, wanted), constant(-1, wanted))


@public
def gamma(
    a: Tensor | float, shape: Ints | None = None, *, key: Tensor | None = None, dtype: object = f32
) -> Tensor:
    """Values of the gamma distribution of shape parameter `a`, a number or a float tensor that
    broadcasts to `shape`, and scale 1. There is no gradient for `a`.

    The result: f[*shape], without it of the shape of `a`. Raises `OperandValueError` where `a` is
    not > 0, `ShapeError` for a negative length, for what is no key, and where `a` does not
    broadcast to the shape, `DTypeError` for a dtype of no floats and an `a` of another.

        >>> ml.random.gamma(2.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    [a], drawn = _parameters(shape, a=a)
    return op.gamma(_or_next(key), a, shape=drawn, dtype=DType.of(dtype))


@public
def beta(
    a: Tensor | float,
    b: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = f32,
) -> Tensor:
    """Values of the beta distribution of parameters `a` and `b`, numbers or float tensors that
    broadcast to `shape`. They are made of two draws of `gamma`, by their logarithms, so that small
    parameters are no trouble. There is no gradient for them.

    The result: f[*shape], without it of the shape that the parameters broadcast to. Raises what
    `gamma` raises.

        >>> ml.random.beta(2.0, 3.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    both, drawn = _parameters(shape, a=a, b=b)
    wanted = DType.of(dtype)
    one, other = [
        _log_gamma(each, drawn, key, wanted) for each, key in zip(both, _keys(key, 2), strict=True)
    ]
    return rounded(op.sigmoid(one - other), wanted)


@public
def dirichlet(
    alpha: Tensor, shape: Ints | None = None, *, key: Tensor | None = None, dtype: object = f32
) -> Tensor:
    """Vectors of the Dirichlet distribution, of positive numbers whose sum is 1. `alpha` has their
    parameters along its last axis, and broadcasts to [*shape, n]. It has no gradient.

    alpha: f[..., n] -> f[*shape, n], without a shape [..., n]. Raises what `gamma` raises.

        >>> ml.random.dirichlet(ml.asarray([1.0, 2.0, 3.0]), 2, key=ml.random.key(0)).type
        f32[2,3]
    """
    type = _float_type(alpha, "alpha")
    if not type.ndim:
        raise ShapeError("alpha has a last axis of parameters")
    drawn, wanted = _drawn_shape(type.shape[:-1], shape), DType.of(dtype)
    logs = _log_gamma(alpha, (*drawn, type.shape[-1]), _or_next(key), wanted)
    return rounded(op.softmax(logs, axis=-1), wanted)


@public
def student_t(
    df: Tensor | float, shape: Ints | None = None, *, key: Tensor | None = None, dtype: object = f32
) -> Tensor:
    """Values of Student's t distribution with `df` degrees of freedom, a number or a float tensor
    that broadcasts to `shape`. There is no gradient for it.

    The result: f[*shape], without it of the shape of `df`. Raises what `gamma` raises.

        >>> ml.random.student_t(3.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]
    """
    [df], drawn = _parameters(shape, df=df)
    wanted = DType.of(dtype)
    first, second = _keys(key, 2)
    half = widened(df) * 0.5
    logs = _log_gamma(half, drawn, second, wanted)
    wide = _wide_dtype(wanted)
    scale = op.exp((op.log(rounded(half, wide)) - logs) * 0.5)
    return rounded(op.normal(first, shape=drawn, dtype=wide) * scale, wanted)


@public
def poisson(
    rate: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = i64,
) -> Tensor:
    """Numbers of the Poisson distribution of mean `rate`, a number or a float tensor that
    broadcasts to `shape`. There is no gradient for it.

    The result: i[*shape], without it of the shape of `rate`. Raises `OperandValueError` where the
    rate is not in 0 .. 1e18, `ShapeError` for a negative length, for what is no key, and where the
    rate does not broadcast to the shape, `DTypeError` for a dtype of no integers and a rate of no
    floats.

        >>> ml.random.poisson(4.0, (2, 3), key=ml.random.key(0)).type
        i64[2,3]
    """
    [rate], drawn = _parameters(shape, rate=rate)
    return op.poisson(_or_next(key), rate, shape=drawn, dtype=DType.of(dtype))


@public
def binomial(
    n: Tensor | int,
    p: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = i64,
) -> Tensor:
    """How many of n trials succeed, each with probability p: numbers, or tensors that broadcast to
    `shape`. There is no gradient for p.

    The result: i[*shape], without it of the shape that n and p broadcast to. Raises
    `OperandValueError` where n is negative, or p is no probability, `ShapeError` for a negative
    length, for what is no key, and where n and p do not broadcast to the shape, `DTypeError` for a
    dtype and an n of no integers, and a p of no floats.

        >>> ml.random.binomial(10, 0.5, (2, 3), key=ml.random.key(0)).type
        i64[2,3]
    """
    trials = n if isinstance(n, Tensor) else full((), integer(n, "n"), dtype=i64)
    [p], given = _parameters(None, p=p)
    drawn = _drawn_shape(broadcast_shapes(trials.shape, given), shape)
    return op.binomial(_or_next(key), trials, p, shape=drawn, dtype=DType.of(dtype))


@public
def multinomial(
    n: Tensor | int,
    p: Tensor,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = i64,
) -> Tensor:
    """How many of n trials end in each of k ways, whose probabilities are proportional to the
    elements along the last axis of p. n and the other axes of p broadcast to `shape`. There is no
    gradient for p.

    p: f[..., k] -> i[*shape, k], without a shape of that which n and p broadcast to. Raises
    `OperandValueError` where n or p is negative, or all p are 0, `ShapeError` for a negative
    length, for what is no key, and where n and p do not broadcast to the shape, `DTypeError` for a
    dtype and an n of no integers, and a p of no floats.

        >>> ml.random.multinomial(10, ml.asarray([0.5, 0.5]), 3, key=ml.random.key(0)).type
        i64[3,2]
    """
    trials = n if isinstance(n, Tensor) else full((), integer(n, "n"), dtype=i64)
    type = _float_type(p, "p")
    if not type.ndim:
        raise ShapeError("p has a last axis of probabilities")
    drawn = _drawn_shape(broadcast_shapes(trials.shape, type.shape[:-1]), shape)
    return op.multinomial(_or_next(key), trials, p, shape=drawn, dtype=DType.of(dtype))


def _uniform(shape: Ints, key: Tensor | None, dtype: object) -> tuple[Tensor, DType]:
    """Values of 0 <= u < 1, in which halves are computed in f32; and the dtype that is wanted."""
    wanted = DType.of(dtype)
    sizes = integers(shape, "shape")
    return op.uniform(_or_next(key), shape=sizes, dtype=_wide_dtype(wanted)), wanted


def _parameters(
    shape: Ints | None, **given: Tensor | float
) -> tuple[list[Tensor], tuple[int, ...]]:
    """The parameters of a distribution as tensors, and the shape to draw in."""
    found = []
    for name, x in given.items():
        if not isinstance(x, Tensor):
            if not is_real(x):
                raise DTypeError(f"{name} is a number or a tensor, not {brief(x)}")
            x = full((), float(x), dtype=f64)
        _float_type(x, name)
        found.append(x)
    return found, _drawn_shape(broadcast_shapes(*[x.shape for x in found]), shape)


def _keys(key: Tensor | None, n: int) -> tuple[Tensor, ...]:
    return unstack(op.split_key(_or_next(key), n=n))


def _log_gamma(a: Tensor, shape: tuple[int, ...], key: Tensor, dtype: DType) -> Tensor:
    """The logarithm of a draw of `gamma`, also where that is 0: by one of a + 1, times u^(1/a)
    (Marsaglia and Tsang, A simple method for generating gamma variables, 2000, section 6)."""
    first, second = _keys(key, 2)
    wide = _wide_dtype(dtype)
    a = rounded(a, wide)
    above = op.gamma(first, op.where(op.greater(a, 0.0), a + 1.0, a), shape=shape, dtype=wide)
    u = op.uniform(second, shape=shape, dtype=wide)
    return op.log(above) + op.log1p(-u) / a


def _bound(x: float | Tensor, dtype: DType) -> Tensor:
    if isinstance(x, Tensor):
        return asarray(x, dtype=dtype)
    if not is_real(x):
        raise DTypeError(f"a bound is a number or a tensor, not {brief(x)}")
    return full((), float(x), dtype=dtype)


def _wide_dtype(dtype: DType) -> DType:
    """What draws of that dtype are computed in: f32 for halves."""
    return f32 if dtype.is_half else dtype


def _gumbel(shape: tuple[int, ...], dtype: DType, key: Tensor | None) -> Tensor:
    """-log(-log(u)), finite also where u is drawn as 0."""
    u = op.uniform(_or_next(key), shape=shape, dtype=dtype)
    return -op.log(-op.log(op.maximum(u, float(np.finfo(dtype.numpy.name).tiny))))


def _drawn_shape(given: Shape, shape: Ints | None) -> Shape:
    """The shape to draw in: the one asked for, to which the given one has to broadcast, or that."""
    if shape is None:
        return given
    wanted = integers(shape, "shape")
    try:
        fits = broadcast_shapes(given, wanted) == wanted
    except ShapeError:
        fits = False
    if not fits:
        raise ShapeError(f"draws of shape {given} do not broadcast to shape {wanted}")
    return wanted


def _first(order: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As many of the first elements of a vector as fill the shape."""
    part = op.slice(order, start=(0,), length=(math.prod(shape),), step=(1,))
    return alias(one_op("reshape", shape=shape), part, order.type.with_shape(shape))


def _float_type(x: object, name: str) -> TensorType:
    if not isinstance(x, Tensor) or not x.dtype.is_float:
        given = x.type if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DTypeError(f"{name} must be a tensor of floats, not {given}")
    return x.type


def _or_next(key: Tensor | None) -> Tensor:
    if key is not None and not isinstance(key, Tensor):
        raise DTypeError(f"a key is a tensor {_KEY}, not {type(key).__name__}; see random.key")
    return next_key() if key is None else key


__all__ = names_of(globals())
