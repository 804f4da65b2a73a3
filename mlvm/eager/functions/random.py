"""Random tensors from keys: explicit keys as in JAX, or the global keys of the VM.

A key is a `u64[2]`. The same key results in the same numbers. `split` and `fold_in` derive new keys
from a key; without `key=` each draw uses `next_key()`. Each VM has global keys. They are split off
a state, which `seed` sets (initially 0) and each `next_key` advances in place. The update consists
of ops, so a program that contains it draws new numbers at each launch. A global key never equals a
key from `key(seed)`, `split` or `fold_in`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.arena.context import context, current
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    MlvmError,
    OperandValueError,
    ShapeError,
    brief,
    user_line,
    with_article,
)
from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import broadcast_shapes, is_real, normalize_axis
from mlvm.core.types import Array, DType, Shape, TensorType, f32, f64, i64, u64
from mlvm.eager.functions.arguments import Ints, integer, integers
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import stop_gradient, where
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.functions.shapes import reshape, unstack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.context import current_arena, default_arena, is_vm_chosen
from mlvm.eager.tensor.default import float_dtype
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.reading import write
from mlvm.eager.tensor.templates import next_key_of
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at
from mlvm.eager.tensor.wrapper import names_of, public
from mlvm.machines.native.extension import EXTENSION

_KEY: Final = TensorType(u64, (2,))
_SPLIT_ONE: Final = one_op("split_key", n=1)
_ADVANCE: Final = one_op("add")
_AS_KEY: Final = one_op("reshape", shape=(2,))
_next_in_c: Final[Callable[..., Tensor | None]] = (
    (lambda *_: None) if EXTENSION is None else EXTENSION.next_key
)

_draw_in_c: Final[Callable[..., None]] = (
    (lambda *_: None) if EXTENSION is None else EXTENSION.draw_keys
)
"""Let templates draw the next keys of a VM without Python, until `_draw_in_c()`: one that may have
to warn must call `_draw`."""


# --- keys ----------------------------------------------------------------------------


@public
def key(seed: int) -> Tensor:
    """Return the key of a seed.

    The result: u64[2]. Raises `OperandValueError` unless 0 <= seed < 2**64.

        >>> ml.random.key(0).type
        u64[2]

    Invalid calls:
        ml.random.key(-1)  # OperandValueError
    """
    return from_array(_words(seed, 0))


@public
def split(key: Tensor, n: int = 2) -> Tensor:
    """Split a key into n new keys that are independent of each other and of `key`.

    `unstack` separates them.

    The result: u64[n, 2]. Raises `ShapeError` if the key is not a u64[2]; `ArgumentError` if n
    is negative.

        >>> ml.random.split(ml.random.key(0), 3).type
        u64[3,2]

    Invalid calls:
        ml.random.split(key, -1)  # ArgumentError
    """
    return op.split_key(key, n=n)


@public
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive a new key for each value of the integer `data`: a step, a layer.

    The result: u64[2]. Raises `ShapeError` if the key is not a u64[2] or `data` is not a scalar;
    `DTypeError` if `data` is not an integer.

        >>> ml.random.fold_in(ml.random.key(0), 7).type
        u64[2]

    Invalid calls:
        ml.random.fold_in(key, 1.5)  # DTypeError
    """
    return op.fold_in(key, asarray(data))


# --- the global key ------------------------------------------------------------------


class _Global:
    """State of a VM's global keys: (seed, n) for the n-th key.

    n counts from 1, because (seed, 0) is `key(seed)`."""

    def __init__(self, vm: VMProtocol) -> None:
        self.lock = threading.Lock()
        with process.lock, Arena(vm, "random").allocating():
            self.seed = process.seed
            self.is_seeded = process.number > 0
            self.state = from_array(_words(self.seed, 1))
            self.one = from_array(np.array((0, 1), np.uint64))
            process.all.add(self)

    def write(self, state: Array) -> None:
        """Set the state."""
        _draw_in_c()
        with self.lock:
            write(self.state, state)
        self.seed, self.is_seeded = int(state[0]), True

    def warn(self) -> None:
        """Warn once if a draw uses an unseeded state although a different VM was seeded."""
        self.is_seeded = True
        if type(self.state.arena.vm).__name__ == "DryVM":  # draws of a dry VM have no values
            return
        warn_at(
            user_line(),
            f"VM {self.state.arena.vm.name!r} draws with keys that no seed has reached: "
            f"ml.random.seed was called in an arena of VM {process.alone!r}, for that VM alone; "
            f"call it outside of arenas, and it reaches all VMs",
            NoEffectWarning,
        )


class _Process:
    """Seed of all VMs of this process.

    `number` counts changes, `all` contains the state of each VM, and `alone` is the name of a VM
    that was seeded separately."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.seed = self.number = 0
        self.all = weakref.WeakSet[_Global]()
        self.alone: str | None = None

    def start(self, number: int, seed: int) -> None:
        """Set the keys of all VMs, including VMs that are created later, from that seed.

        If this fails for a VM, it is skipped: the next draw on the VM warns."""
        with self.lock:
            self.number, self.seed, states = number, seed, [*self.all]
        _draw_in_c()
        for each in states:
            each.is_seeded = False
            with suppress(MlvmError, OSError):
                each.write(_words(seed, 1))


process: Final = _Process()


def carried(task: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the task of a group so that in another process it starts with this process's seed."""
    return partial(_seeded, process.number, process.seed, task) if process.number else task


def _seeded(number: int, seed: int, task: Callable[..., Any], rank: int, vm: object) -> Any:
    if (process.number, process.seed) != (number, seed):
        process.start(number, seed)
    return task(rank, vm)


def prepare(vm: VMProtocol) -> _Global:
    """Return the state of a VM's global keys; create it if necessary."""
    return vm.attached(_Global)


@public
def next_key() -> Tensor:
    """Return the next global key of the current VM.

    The result: u64[2].

        >>> ml.random.next_key().type
        u64[2]
    """
    key: Tensor = next_key_of(_next)
    return key


def _next() -> Tensor:
    source = current().key_source
    return _draw() if source is None else source()


def with_keys(
    keys: list[Tensor],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call a function in which `next_key` returns these keys first."""
    source = current().key_source or _draw
    with keys_from(lambda: keys.pop(0) if keys else source()):
        return function(*args, **keywords)


def keys_from(source: Callable[[], Tensor] | None) -> AbstractContextManager[None]:
    """Let `next_key` return keys from `source` inside the block; None: from the VM."""
    return context(key_source=source)


class _SavingSource:
    """Key source of a captured function that saves the state before the first key."""

    def __init__(self, around: _SavingSource | None, saved: list[Tensor], before: Tensor) -> None:
        self._around, self._saved, self._before = around, saved, before

    def __call__(self) -> Tensor:
        if not self._saved:
            self._saved.append(self._before)
        return _draw() if self._around is None else self._around()


def drawing(saved: list[Tensor]) -> AbstractContextManager[None]:
    """Save in `saved` the keys that the block draws, so that `replaying` can draw them again.

    In a captured function, which may draw global keys in a loop, the state before the keys is saved
    instead: u64[1,2].
    """
    source = current().key_source
    if current().recorder is not None and (source is None or isinstance(source, _SavingSource)):
        state = _state_of(prepare(current_arena().vm))
        return keys_from(_SavingSource(source, saved, reshape(op.copy(state), (1, 2))))
    drawn = source or _draw

    def draw() -> Tensor:
        saved.append(drawn())
        return saved[-1]

    return keys_from(draw)


def replaying(saved: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Draw inside the block the keys that `drawing` has saved."""
    if not saved or saved[0].ndim == 1:
        return keys_from(iter(saved).__next__)
    return drawing_from(op.copy(reshape(saved[0], (2,))))


def drawing_from(state: Tensor) -> AbstractContextManager[None]:
    """Split keys off this state inside the block, and advance it instead of the VM's state."""
    return context(key_state=state, key_source=None)


def _state_of(global_keys: _Global) -> Tensor:
    """Return the state to split keys off."""
    state: Tensor | None = current().key_state
    return global_keys.state if state is None else state


def _draw() -> Tensor:
    now = current()
    global_keys = prepare((now.arena or default_arena()).vm)
    if not global_keys.is_seeded and process.alone is not None:
        global_keys.warn()
    state = _state_of(global_keys)
    with global_keys.lock:
        key = _next_in_c(_SPLIT_ONE, state, _KEY)
        if key is not None:
            if state is global_keys.state:
                path = state.arena.fast_path
                _draw_in_c(path, _SPLIT_ONE, state, _KEY, global_keys.lock)
            return key
        keys = apply(_SPLIT_ONE, state)
        apply_into(state, _ADVANCE, state, global_keys.one)
    return alias(_AS_KEY, keys, _KEY)


@public
def seed(seed: int) -> None:
    """Seed the global keys of all VMs of this process, and the shuffling of unseeded pipelines.

    VMs that are created later are included. Inside an arena, a member of a group or `ml.use`, only
    the current VM is seeded; draws on other VMs then warn.

    Raises `OperandValueError` unless 0 <= seed < 2**64.

        >>> ml.random.seed(0)
        >>> x = ml.random.normal(3)
        >>> ml.random.seed(0)
        >>> bool(ml.all(x == ml.random.normal(3)))
        True

    Invalid calls:
        ml.random.seed(-1)  # OperandValueError
    """
    set_state(_words(seed, 1))  # called first, because captured functions reject it
    if is_vm_chosen():
        process.alone = current_arena().vm.name
        _draw_in_c()
    else:
        process.start(process.number + 1, int(seed))


@public
def state() -> Array:
    """Return the state of the current VM's global keys, for `set_state`.

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
    """Set the state of the current VM's global keys to a state that `state` returned.

    It is a numpy array, u64[2], or the tensor that `ml.load` returns for it.

    Raises `ShapeError` unless `state` is a u64 array of 2 elements.

        >>> state = ml.random.state()
        >>> x = ml.random.normal(3)
        >>> ml.random.set_state(state)
        >>> bool(ml.all(x == ml.random.normal(3)))
        True

    Invalid calls:
        ml.random.set_state(np.zeros(3))  # ShapeError
    """
    if isinstance(state, Tensor):
        state = state.numpy()
    if not isinstance(state, np.ndarray) or TensorType.of(state) is not _KEY:
        raise ShapeError(f"expected a state as a numpy array {_KEY}, got {state!r}")
    prepare(current_arena().vm).write(state)


class _KeysOf:
    """Global keys of several VMs, in the form that a checkpoint stores.

    u64[2] for one VM, u64[n,2] for several VMs."""

    def __init__(self, vms: Sequence[VMProtocol]) -> None:
        self._all = [prepare(vm) for vm in vms]

    def state(self) -> Array:
        states = np.stack([each.state.numpy() for each in self._all])
        return states if len(states) > 1 else states[0]

    def set_state(self, state: Array) -> None:
        for each, row in zip(self._all, state.reshape(-1, 2), strict=True):
            each.write(row)

    def fitted(self, state: Array) -> Array:
        """Adapt states that were saved for a different number of VMs.

        A single state is used for all VMs; otherwise VM i gets state i, and VMs without a state
        keep theirs."""
        if state.dtype != np.uint64 or state.shape[-1:] != (2,) or state.ndim > 2:
            return state
        now, rows = self.state(), state.reshape(-1, 2)
        fitted = np.array(np.broadcast_to(rows[:1], (len(self._all), 2)))
        if len(rows) != 1:
            fitted[:] = now
            fitted[: len(rows)] = rows[: len(fitted)]
        return fitted.reshape(now.shape)


def keys_of(vms: Sequence[VMProtocol]) -> _KeysOf:
    """Return the global keys of these VMs as an object that a checkpoint can store."""
    return _KeysOf(vms)


def _words(seed: int, n: int) -> Array:
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise OperandValueError(f"expected a seed as an int from 0 to 2**64 - 1, got {seed!r}")
    return np.array((seed, n), np.uint64)


# --- draws ---------------------------------------------------------------------------


@public
def normal(shape: Ints = (), *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw standard normal values, with mean 0 and variance 1.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.normal((2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.normal(2, dtype="i64")  # DTypeError
        ml.random.normal(2, key=v)  # ShapeError
    """
    return op.normal(_or_next(key), shape=integers(shape, "shape"), dtype=float_dtype(dtype))


@public
def uniform(
    shape: Ints = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw values uniformly from low <= u < high; rounding may make a value equal to high.

    Half-precision values are drawn in f32 and rounded once.

    The result: f[*shape]. Raises `ArgumentError` unless low < high, and both and high - low are
    finite in the dtype of the draws; `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.uniform((2, 3), low=-1.0, key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.uniform(2, low=2.0, high=1.0)  # ArgumentError
        ml.random.uniform(2, high=1e39)  # ArgumentError
        ml.random.uniform(2, dtype="i64")  # DTypeError
        ml.random.uniform(-2)  # ShapeError
    """
    target, sizes = _float_dtype(dtype), integers(shape, "shape")
    if not (is_real(low) and is_real(high) and low < high) or (
        (low, high) != (0, 1) and not _fits_bounds(low, high, target)
    ):
        raise ArgumentError(
            f"low = {brief(low)} must be less than high = {brief(high)}, both finite in "
            f"{target.name}, and high - low in {_wide_dtype(target).name}"
        )
    if (low, high) == (0, 1):
        return op.uniform(_or_next(key), shape=sizes, dtype=target)
    u = op.uniform(_or_next(key), shape=sizes, dtype=_wide_dtype(target))
    return rounded(u * float(high - low) + float(low), target)


def _fits_bounds(low: float, high: float, dtype: DType) -> bool:
    most, widest = [float(finfo(each).max) for each in (dtype, _wide_dtype(dtype))]
    return max(abs(low), abs(high)) <= most and high - low <= widest


@public
def bernoulli(shape: Ints = (), p: Tensor | float = 0.5, *, key: Tensor | None = None) -> Tensor:
    """Draw True with probability p, a number or a float tensor that broadcasts to the shape.

    The result: bool[*shape]. Raises `OperandValueError` if p is not a probability; `DTypeError` if
    p is not a float; `ShapeError` if a length is negative, `key` is not a u64[2], or p does not
    broadcast to the shape.

        >>> ml.random.bernoulli(4, 1.0, key=ml.random.key(0))
        Tensor([ True,  True,  True,  True], bool[4])

    Invalid calls:
        ml.random.bernoulli(3, 2.0)  # OperandValueError
        ml.random.bernoulli(2, ml.ones(2, dtype="bool"))  # DTypeError
        ml.random.bernoulli(2, ml.ones(0))  # ShapeError
    """
    return op.bernoulli(_or_next(key), _number(p, "p"), shape=integers(shape, "shape"))


@public
def randint(
    shape: Ints, *, low: int, high: int, key: Tensor | None = None, dtype: object = i64
) -> Tensor:
    """Draw integers low <= i < high, each with exactly the same probability.

    `low` and `high` are keyword arguments, because libraries disagree about the argument order.

    The result: i[*shape]. Raises `ArgumentError` unless low < high and the dtype holds both;
    `ShapeError` if a length is negative or `key` is not a u64[2]; `DTypeError` if `dtype` is not an
    integer.

        >>> ml.random.randint(5, low=0, high=2, key=ml.random.key(0)).type
        i64[5]

    Invalid calls:
        ml.random.randint(2, low=3, high=1)  # ArgumentError
        ml.random.randint(2, low=0, high=2, dtype="f32")  # DTypeError
        ml.random.randint(-2, low=0, high=2)  # ShapeError
    """
    return op.randint(
        _or_next(key), low=low, high=high, shape=integers(shape, "shape"), dtype=DType.of(dtype)
    )


@public
def permutation(x: Tensor | int, *, key: Tensor | None = None) -> Tensor:
    """Return the numbers 0 .. x-1, or the rows of a tensor, in random order.

    x: an int n -> i64[n]; or [n, ...] -> [n, ...], a new tensor. Raises `ShapeError` if x has no
    axes, or the key is not a u64[2]; `ArgumentError` if a number is negative.

        >>> ml.sort(ml.random.permutation(4, key=ml.random.key(0)))
        Tensor([0, 1, 2, 3], i64[4])

    Invalid calls:
        ml.random.permutation(-1)  # ArgumentError
        ml.random.permutation(ml.ones(()))  # ShapeError
    """
    if not isinstance(x, Tensor):
        return op.permutation(_or_next(key), n=x)
    if x.ndim == 0:
        raise ShapeError("expected at least 1 dimension to permute, got a scalar")
    return op.take(x, op.permutation(_or_next(key), n=x.shape[0]), axis=0)


@public
def categorical(
    logits: Tensor, axis: int = -1, shape: Ints | None = None, *, key: Tensor | None = None
) -> Tensor:
    """Draw indices along `axis`, i64, each with a probability proportional to e^logit.

    `shape` is the shape of the result: the shape of `logits` without the axis, or a shape to which
    this broadcasts. The result is the argmax of logit + Gumbel noise (Maddison et al., arXiv
    1411.0030), as in `jax.random.categorical`. Each draw uses one random number per logit.

    logits: f[..., K] -> i64[*shape]. Raises `DTypeError` if x is not of floats; `AxisError` if
    there is no such axis; `ShapeError` if the logits do not fit the shape, the axis is empty, or
    the key is not a u64[2].

        >>> ml.random.categorical(ml.asarray([0.0, 100.0]), key=ml.random.key(0))
        Tensor(1, i64[])
    """
    type = _float_type(logits, "logits")
    along = normalize_axis(integer(axis, "axis"), type.ndim) - type.ndim
    rest = tuple(n for i, n in enumerate(type.shape, -type.ndim) if i != along)
    result_shape = _drawn_shape(rest, shape)
    place = len(result_shape) + 1 + along
    drawn = (*result_shape[:place], type.shape[along], *result_shape[place:])
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
    """Draw from the numbers 0 .. a-1 (i64), or from the slices of a tensor along `axis`.

    The result: i64[*shape] for a number, [*shape, ...] for a tensor and axis 0. Raises
    `OperandValueError` if `p` contains a negative number or nan, or no number above 0 (not checked
    in a captured function); `ArgumentError` if there are too few elements; `ShapeError` if `p` does
    not have one number per element, or the key is not a u64[2]; `DTypeError` if `p` is not of
    floats; `AxisError` if the tensor has no such axis.

        >>> ml.random.choice(10, 3, replace=False, key=ml.random.key(0)).type
        i64[3]

    Invalid calls:
        ml.random.choice(2, 2, p=-v)  # OperandValueError
        ml.random.choice(0, 2)  # ArgumentError
        ml.random.choice(v, 1, axis="x")  # ArgumentError
        ml.random.choice(v, 2, axis=1)  # AxisError
        ml.random.choice(2, 2, p=ints)  # DTypeError
        ml.random.choice(3, 2, p=v)  # ShapeError
    """
    if isinstance(a, Tensor):
        n = a.shape[normalize_axis(integer(axis, "axis"), a.ndim)]
    else:
        n = integer(a, "a")
    result_shape = integers(shape, "shape")
    draws = math.prod(result_shape)
    if n < 0 or (draws > n and not replace) or (draws and not n):
        how = "" if replace else " without replacement; pass replace=True"
        raise ArgumentError(f"cannot draw {draws} of {n} elements{how}")
    if p is not None and _float_type(p, "p").shape != (n,):
        raise ShapeError(f"expected one number in p for each of {n}, got {p.type}")
    if p is not None and draws and current().recorder is None:
        _require_weights(widened(stop_gradient(p)).numpy())
    if not draws:
        places = full(result_shape, 0, dtype=i64)
    elif p is None and replace:
        places = randint(result_shape, low=0, high=n, key=key)
    elif p is None:
        places = _first(op.permutation(_or_next(key), n=n), result_shape)
    elif replace:
        places = categorical(op.log(widened(stop_gradient(p))), shape=result_shape, key=key)
    else:
        scores = op.log(widened(stop_gradient(p)))
        noise = _gumbel((n,), scores.dtype, key)
        places = _first(op.argsort(scores + noise, descending=True), result_shape)
    return op.take(a, places, axis=axis) if isinstance(a, Tensor) else places


def _require_weights(p: Array) -> None:
    """Raise `OperandValueError` unless p contains weights: finite, >= 0 and not all 0."""
    wrong = ~((p >= 0) & np.isfinite(p))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise OperandValueError(f"expected weights p >= 0, got {p[i]:g} at index {i}")
    if not p.any():
        raise OperandValueError("expected a weight p above 0, got only zeros")


_FAR: Final = 5.0
"""A bound from which draws of `truncated_normal` are computed from the tail."""

_FARTHER: Final = 20.0
"""A bound, divided by sqrt(2), from which the tail is that of its asymptotic expansion."""


@public
def truncated_normal(
    lower: Tensor | float,
    upper: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw standard normal values with lower <= x <= upper.

    The bounds are numbers, or tensors that broadcast to `shape` or, without it, to each other.

    Values are computed with the inverse of the distribution function, in f64. If both bounds are
    more than 5 away from 0 on one side, the inverse is that of the tail. More than about 28 away
    from 0 it is an expansion of the tail, with an error of the probability below 1e-5.

    The result: f[*shape]; where tensor bounds have lower > upper, it is `upper`. Raises
    `ArgumentError` unless lower < upper, if both are numbers; `ShapeError` if a length is negative,
    `key` is not a u64[2], or the bounds do not broadcast to the shape; `DTypeError` if `dtype` is
    not a float.

        >>> ml.random.truncated_normal(-1.0, 1.0, 3, key=ml.random.key(0)).type
        f32[3]

    Invalid calls:
        ml.random.truncated_normal(1.0, -1.0, 2)  # ArgumentError
        ml.random.truncated_normal(-1.0, 1.0, 2, dtype="i64")  # DTypeError
        ml.random.truncated_normal(v, 3.0, 3)  # ShapeError
    """
    bounds = lower, upper
    if not any(isinstance(x, Tensor) for x in bounds) and not (
        is_real(lower) and is_real(upper) and lower < upper
    ):
        raise ArgumentError(f"lower = {brief(lower)} must be less than upper = {brief(upper)}")
    target = _float_dtype(dtype)
    low, high = [asarray(_number(x, "a bound", target), dtype=target) for x in bounds]
    drawn = _drawn_shape(broadcast_shapes(low.shape, high.shape), shape)
    u = op.uniform(_or_next(key), shape=drawn, dtype=f64)
    a, b = [op.astype(x, dtype=f64) * math.sqrt(0.5) for x in (low, high)]
    first, most = op.erf(a), 1.0 - 2.0**-53  # the inverse of 1 is inf
    y = op.erfinv(op.clip(first + u * (op.erf(b) - first), -most, most))
    if isinstance(lower, Tensor) or isinstance(upper, Tensor) or lower > _FAR or upper < -_FAR:
        is_above = op.greater(low, _FAR)
        near, far = where(is_above, a, -b), where(is_above, b, -a)
        first = op.erfc(op.clip(near, 0.0, _FARTHER))
        tail = op.erfcinv(first + u * (op.erfc(op.maximum(far, 0.0)) - first))
        tail = where(op.greater(near, _FARTHER), _far_tail(u, near, far), tail)
        is_tail = op.logical_or(is_above, op.less(high, -_FAR))
        y = where(is_tail, where(is_above, tail, -tail), y)
    return op.clip(rounded(math.sqrt(2) * y, target), low, high)


def _far_tail(u: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Return the y with erfc(y) = (1 - u) erfc(near) + u erfc(far), for bounds above `_FARTHER`.

    It solves erfc(y) = exp(-y^2) / y / sqrt(pi), which is erfc(y) up to a factor 1 - 1 / (2 y^2).
    """
    near = op.clip(near, _FARTHER, 1e100)  # 1e100: its square is finite
    far = op.clip(far, near, 2.0 * near)  # erfc(2 near) / erfc(near) is 0 in f64
    log_ratio = (near - far) * (near + far) - op.log(far / near)
    depth = -op.log1p(u * op.expm1(log_ratio))  # y^2 + log(y) = near^2 + log(near) + depth
    depth = depth - 0.5 * op.log1p(depth / near / near)
    return near * op.sqrt(1.0 + depth / near / near)


# --- other distributions -------------------------------------------------------------


@public
def exponential(shape: Ints = (), *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw from the exponential distribution with mean 1.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.exponential((2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.exponential(2, dtype="i64")  # DTypeError
        ml.random.exponential(-2)  # ShapeError
    """
    u, target = _uniform(shape, key, dtype)
    return rounded(-op.log1p(-u), target)


@public
def laplace(shape: Ints = (), *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw from the Laplace distribution with mean 0 and scale 1.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.laplace((2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.laplace(2, dtype="i64")  # DTypeError
        ml.random.laplace(-2)  # ShapeError
    """
    u, target = _uniform(shape, key, dtype)
    side = op.maximum(2.0 * u - 1.0, 2.0**-53 - 1.0)
    return rounded(-op.sign(side) * op.log1p(-op.abs(side)), target)


@public
def gumbel(shape: Ints = (), *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw from the Gumbel distribution with location 0 and scale 1: -log(-log(u)).

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.gumbel((2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.gumbel(2, dtype="i64")  # DTypeError
        ml.random.gumbel(-2)  # ShapeError
    """
    target = _float_dtype(dtype)
    return rounded(_gumbel(integers(shape, "shape"), _wide_dtype(target), key), target)


@public
def cauchy(shape: Ints = (), *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw from the Cauchy distribution with location 0 and scale 1.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float.

        >>> ml.random.cauchy((2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.cauchy(2, dtype="i64")  # DTypeError
        ml.random.cauchy(-2)  # ShapeError
    """
    u, target = _uniform(shape, key, dtype)
    return rounded(op.tan((u - 0.5) * math.pi), target)


@public
def rademacher(shape: Ints = (), *, key: Tensor | None = None, dtype: object = i64) -> Tensor:
    """Draw -1 or 1 with equal probability.

    The result: [*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is unsigned or bool.

        >>> ml.random.rademacher((2, 3), key=ml.random.key(0)).type
        i64[2,3]

    Invalid calls:
        ml.random.rademacher(2, dtype="u8")  # DTypeError
        ml.random.rademacher(-2)  # ShapeError
    """
    target = DType.of(dtype)
    if target.kind not in ("signed", "float"):
        raise DTypeError(f"expected a dtype that contains -1, got {target.name}")
    return op.where(bernoulli(shape, key=key), constant(1, target), constant(-1, target))


@public
def gamma(
    a: Tensor | float, shape: Ints | None = None, *, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Draw from the gamma distribution with shape parameter `a` and scale 1.

    `a` is a number or a float tensor that broadcasts to `shape`. It has no gradient.

    The result: f[*shape]; without `shape`, the shape of `a`. Raises `OperandValueError` unless `a`
    > 0; `ShapeError` if a length is negative, the key is not a u64[2], or `a` does not broadcast to
    the shape; `DTypeError` if `dtype` or `a` is not a float.

        >>> ml.random.gamma(2.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.gamma(-1.0)  # OperandValueError
        ml.random.gamma(1.0, dtype="i64")  # DTypeError
        ml.random.gamma(v, 3)  # ShapeError
    """
    [a], drawn = _parameters(shape, a=a)
    return op.gamma(_or_next(key), a, shape=drawn, dtype=float_dtype(dtype))


@public
def beta(
    a: Tensor | float,
    b: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw from the beta distribution with parameters `a` and `b`.

    The parameters are numbers or float tensors that broadcast to `shape`; they have no gradient.
    Each value is computed from the logarithms of two `gamma` draws, which is accurate also for
    small parameters.

    The result: f[*shape]; without `shape`, the shape that the parameters broadcast to. Raises the
    errors of `gamma`.

        >>> ml.random.beta(2.0, 3.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.beta(-1.0, 1.0)  # OperandValueError
        ml.random.beta(1.0, 1.0, dtype="i64")  # DTypeError
        ml.random.beta(v, 1.0, 3)  # ShapeError
    """
    both, drawn = _parameters(shape, a=a, b=b)
    target = float_dtype(dtype)
    one, other = [
        _log_gamma(each, drawn, key, target) for each, key in zip(both, _keys(key, 2), strict=True)
    ]
    return rounded(op.sigmoid(one - other), target)


@public
def dirichlet(
    alpha: Tensor, shape: Ints | None = None, *, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Draw vectors from the Dirichlet distribution: positive numbers with the sum 1.

    `alpha` contains the parameters along the last axis, and broadcasts to [*shape, n]. It has no
    gradient.

    alpha: f[..., n] -> f[*shape, n], without a shape [..., n]. Raises the errors of `gamma`.

        >>> ml.random.dirichlet(ml.asarray([1.0, 2.0, 3.0]), 2, key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.dirichlet(v * 0.0)  # OperandValueError
    """
    type = _float_type(alpha, "alpha")
    if not type.ndim:
        raise ShapeError("expected alpha with at least 1 dimension, got a scalar")
    drawn, target = _drawn_shape(type.shape[:-1], shape), float_dtype(dtype)
    logs = _log_gamma(alpha, (*drawn, type.shape[-1]), _or_next(key), target)
    return rounded(op.softmax(logs, axis=-1), target)


@public
def student_t(
    df: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw from Student's t distribution with `df` degrees of freedom.

    `df` is a number or a float tensor that broadcasts to `shape`. It has no gradient.

    The result: f[*shape]; without `shape`, the shape of `df`. Raises the errors of `gamma`.

        >>> ml.random.student_t(3.0, (2, 3), key=ml.random.key(0)).type
        f32[2,3]

    Invalid calls:
        ml.random.student_t(-1.0)  # OperandValueError
        ml.random.student_t(1.0, dtype="i64")  # DTypeError
        ml.random.student_t(v, 3)  # ShapeError
    """
    [df], drawn = _parameters(shape, df=df)
    target = float_dtype(dtype)
    first, second = _keys(key, 2)
    half = widened(df) * 0.5
    logs = _log_gamma(half, drawn, second, target)
    wide = _wide_dtype(target)
    scale = rounded(op.exp((op.log(op.astype(half, dtype=f64)) - logs) * 0.5), wide)
    return rounded(op.normal(first, shape=drawn, dtype=wide) * scale, target)


@public
def poisson(
    rate: Tensor | float,
    shape: Ints | None = None,
    *,
    key: Tensor | None = None,
    dtype: object = i64,
) -> Tensor:
    """Draw from the Poisson distribution with mean `rate`.

    `rate` is a number or a float tensor that broadcasts to `shape`. It has no gradient.

    The result: i[*shape]; without `shape`, the shape of `rate`. Raises `OperandValueError` unless
    the rate is in 0 .. 1e18; `ShapeError` if a length is negative, the key is not a u64[2], or the
    rate does not broadcast to the shape; `DTypeError` if `dtype` is not an integer, or the rate not
    a float.

        >>> ml.random.poisson(4.0, (2, 3), key=ml.random.key(0)).type
        i64[2,3]

    Invalid calls:
        ml.random.poisson(-1.0)  # OperandValueError
        ml.random.poisson(1.0, dtype="f32")  # DTypeError
        ml.random.poisson(v, 3)  # ShapeError
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
    """Draw the number of successes in n trials with probability p.

    n and p are numbers, or tensors that broadcast to `shape`. p has no gradient.

    The result: i[*shape]; without `shape`, the shape that n and p broadcast to. Raises
    `OperandValueError` if n is negative, or p is not a probability; `ShapeError` if a length is
    negative, the key is not a u64[2], or n and p do not broadcast to the shape; `DTypeError` if
    `dtype` or n is not an integer, or p is not a float.

        >>> ml.random.binomial(10, 0.5, (2, 3), key=ml.random.key(0)).type
        i64[2,3]

    Invalid calls:
        ml.random.binomial(-1, 0.5)  # OperandValueError
        ml.random.binomial(1, 0.5, dtype="f32")  # DTypeError
        ml.random.binomial(ml.ones(0, dtype="i64"), half[0, :2])  # ShapeError
    """
    trials = _trials(n)
    [p], p_shape = _parameters(None, p=p)
    drawn = _drawn_shape(broadcast_shapes(trials.shape, p_shape), shape)
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
    """Draw the number of n trials with each of k outcomes.

    The probabilities of the outcomes are proportional to the elements along the last axis of p. n
    and the other axes of p broadcast to `shape`. p has no gradient.

    p: f[..., k] -> i[*shape, k], without `shape`, the shape that n and p broadcast to. Raises
    `OperandValueError` if n or p is negative, or all p are 0; `ShapeError` if a length is negative,
    the key is not a u64[2], or n and p do not broadcast to the shape; `DTypeError` if `dtype` or n
    is not an integer, or p is not a float.

        >>> ml.random.multinomial(10, ml.asarray([0.5, 0.5]), 3, key=ml.random.key(0)).type
        i64[3,2]

    Invalid calls:
        ml.random.multinomial(-1, v)  # OperandValueError
        ml.random.multinomial(1, v, dtype="f32")  # DTypeError
    """
    trials = _trials(n)
    type = _float_type(p, "p")
    if not type.ndim:
        raise ShapeError("expected p with at least 1 dimension, got a scalar")
    drawn = _drawn_shape(broadcast_shapes(trials.shape, type.shape[:-1]), shape)
    return op.multinomial(_or_next(key), trials, p, shape=drawn, dtype=DType.of(dtype))


def _uniform(shape: Ints, key: Tensor | None, dtype: object) -> tuple[Tensor, DType]:
    """Draw 0 <= u < 1 in f64, because f32 cannot represent the tails of a distribution.

    Also return the dtype of the result."""
    target = _float_dtype(dtype)
    return op.uniform(_or_next(key), shape=integers(shape, "shape"), dtype=f64), target


def _float_dtype(dtype: object) -> DType:
    """Return the dtype of a result. Raises `DTypeError` unless it is a float."""
    target = float_dtype(dtype)
    if not target.is_float:
        raise DTypeError(f"expected a float dtype, got {target.name}")
    return target


def _parameters(
    shape: Ints | None, **parameters: Tensor | float
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Convert the parameters of a distribution to tensors; also return the shape to draw."""
    tensors = [_number(x, name) for name, x in parameters.items()]
    for name, x in zip(parameters, tensors, strict=True):
        _float_type(x, name)
    return tensors, _drawn_shape(broadcast_shapes(*[x.shape for x in tensors]), shape)


def _trials(n: Tensor | int) -> Tensor:
    return n if isinstance(n, Tensor) else full((), integer(n, "n"), dtype=i64)


def _keys(key: Tensor | None, n: int) -> tuple[Tensor, ...]:
    return unstack(op.split_key(_or_next(key), n=n))


def _log_gamma(a: Tensor, shape: tuple[int, ...], key: Tensor, dtype: DType) -> Tensor:
    """Draw the logarithm of a `gamma` value in f64, finite even if the value underflows to 0.

    It is the logarithm for a + 1, plus log(u) / a (Marsaglia and Tsang, A simple method for
    generating gamma variables, 2000, section 6). An a below 1e-300 is replaced by 1e-300."""
    first, second = _keys(key, 2)
    a = op.astype(a, dtype=f64)
    above = op.where(op.greater(a, 0.0), a + 1.0, a)  # invalid values are rejected below
    value = op.gamma(first, above, shape=shape, dtype=_wide_dtype(dtype))
    u = op.uniform(second, shape=shape, dtype=f64)
    return op.log(op.astype(value, dtype=f64)) + op.log1p(-u) / op.maximum(a, 1e-300)


def _number(x: Tensor | float, name: str, dtype: DType = f64) -> Tensor:
    """Return the tensor, or a number as a tensor of that dtype; an error contains the name."""
    if not isinstance(x, Tensor) and not is_real(x):
        raise DTypeError(f"expected {name} as a number or a tensor, got {brief(x)}")
    return x if isinstance(x, Tensor) else full((), float(x), dtype=dtype)


def _wide_dtype(dtype: DType) -> DType:
    """Return the dtype in which draws are computed: f32 for half precision."""
    return f32 if dtype.is_half else dtype


def _gumbel(shape: tuple[int, ...], dtype: DType, key: Tensor | None) -> Tensor:
    """Draw -log(-log(1 - u)) for u with 53 bits; the result is finite also for u = 0.

    f32 represents u near 0 accurately. Near 1 it has too few numbers for categories with a
    probability below 1e-7."""
    u = rounded(op.uniform(_or_next(key), shape=shape, dtype=f64), dtype)
    u = op.clip(u, 2.0**-54, 1.0 - float(np.finfo(dtype.numpy.name).epsneg))
    return -op.log(-op.log1p(-u))


def _drawn_shape(parameter_shape: Shape, shape: Ints | None) -> Shape:
    """Return the shape to draw: `shape`, or the shape of the parameters without it.

    The shape of the parameters must broadcast to `shape`."""
    if shape is None:
        return parameter_shape
    result_shape = integers(shape, "shape")
    try:
        fits = broadcast_shapes(parameter_shape, result_shape) == result_shape
    except ShapeError:
        fits = False
    if not fits:
        raise ShapeError(
            f"expected parameters that broadcast to {result_shape}, got shape {parameter_shape}"
        )
    return result_shape


def _first(order: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first elements of a vector in the given shape."""
    part = op.slice(order, start=(0,), length=(math.prod(shape),), step=(1,))
    return alias(one_op("reshape", shape=shape), part, order.type.with_shape(shape))


def _float_type(x: object, name: str) -> TensorType:
    if not isinstance(x, Tensor) or not x.dtype.is_float:
        actual = x.type if isinstance(x, Tensor) else with_article(type(x).__name__)
        raise DTypeError(f"expected {name} as a tensor of floats, got {actual}")
    return x.type


def _or_next(key: Tensor | None) -> Tensor:
    if key is not None and not isinstance(key, Tensor):
        raise DTypeError(f"expected a key tensor {_KEY}, got {type(key).__name__}; see random.key")
    return next_key() if key is None else key


__all__ = names_of(globals())
