"""Learning-rate schedules.

A schedule is a function from the number of completed updates, f32[], to the learning rate, f32[].
It consists of ops, so that it can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeAlias

from mlvm.core.types import f32
from mlvm.eager.functions import creation, elements
from mlvm.eager.optim.ranges import CheckedFields, Fraction, Positive, number_in, numbers_in
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.wrapper import hinted
from mlvm.machines.old_keywords import old_keywords
from mlvm.renamed import OldAttribute, with_new_names

Schedule: TypeAlias = Callable[[Tensor], Tensor]

Count: TypeAlias = Tensor | float
"""Number of updates: f32[], or a Python number."""


P = ParamSpec("P")


class _PicklableSchedule:
    """Schedule that also accepts Python numbers.

    Copies and pickles repeat the call that returned it."""

    def __init__(self, rate: Schedule, call: partial[Any]) -> None:
        self._rate = rate
        self._call = call
        vars(self).update(vars(rate))

    def __call__(self, count: Count) -> Tensor:
        if not isinstance(count, Tensor):
            count = creation.full((), count, dtype=f32)
        return self._rate(count if count.dtype is f32 else elements.astype(count, f32))

    def __reduce__(self) -> tuple[partial[Any], tuple[()]]:
        return self._call, ()

    def __repr__(self) -> str:
        arguments = [*map(repr, self._call.args)]
        arguments += [f"{name}={x!r}" for name, x in self._call.keywords.items()]
        return f"<{self._call.func.__name__}({', '.join(arguments)})>"


def _schedule(fn: Callable[P, Schedule]) -> Callable[P, Callable[[Count], Tensor]]:
    """Wrap a schedule's constructor: the schedules accept any count, and can be pickled."""

    hinted_fn = hinted(fn)

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> Callable[[Count], Tensor]:
        return _PicklableSchedule(
            hinted_fn(*args, **keywords), partial(function, *args, **keywords)
        )

    return function


@_schedule
def constant(rate: float) -> Schedule:
    """Return a schedule with the same rate for every update.

    The schedule maps the count of updates, f32[] or a number, to f32[]. Raises `ArgumentError` if
    the rate is negative.

        >>> ml.optim.constant(0.1)(5)
        Tensor(0.1, f32[])

    Invalid calls:
        ml.optim.constant(-1.0)  # ArgumentError
    """
    rate = number_in("constant", "rate", rate, 0)
    return lambda count: creation.full((), rate, dtype=f32)


@_schedule
def cosine(peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Return a schedule with a linear warmup, then a cosine decay.

    The rate rises from 0 to `peak` over `warmup_steps`, then falls to `final` at `total_steps` in
    half a cosine wave (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    The schedule maps the count of updates, f32[] or a number, to f32[]. Raises `ArgumentError` if a
    rate is negative, or unless 0 <= warmup_steps < total_steps.

        >>> rate = ml.optim.cosine(1.0, total_steps=100)
        >>> rate(0), rate(100)
        (Tensor(1., f32[]), Tensor(0., f32[]))

    Invalid calls:
        ml.optim.cosine(1.0, 0)  # ArgumentError
    """
    peak, final = numbers_in("cosine", 0, peak=peak, final=final)
    number_in("cosine", "total_steps", total_steps, 1)
    number_in("cosine", "warmup_steps", warmup_steps, 0, total_steps)

    def schedule(count: Tensor) -> Tensor:
        rate = _anneal(peak, final, (count - warmup_steps) / (total_steps - warmup_steps))
        if not warmup_steps:
            return rate
        return op.where(count < warmup_steps, count * (peak / warmup_steps), rate)

    return schedule


@_schedule
def cosine_restarts(
    peak: float, first_steps: int, factor: float = 1.0, final: float = 0.0
) -> Schedule:
    """Return a schedule that falls from `peak` to `final` in half a cosine wave, with restarts.

    The first period is `first_steps`, and each period is `factor` times as long as the previous
    period (Loshchilov and Hutter, arXiv 1608.03983).

    The schedule maps the count of updates, f32[] or a number, to f32[]. Raises `ArgumentError` if
    the rate is negative or first_steps or factor is below 1.

        >>> rate = ml.optim.cosine_restarts(1.0, 10, factor=2)
        >>> rate(0), rate(10), rate(20)
        (Tensor(1., f32[]), Tensor(1., f32[]), Tensor(0.5, f32[]))

    Invalid calls:
        ml.optim.cosine_restarts(1.0, 0)  # ArgumentError
    """
    peak, final = numbers_in("cosine_restarts", 0, peak=peak, final=final)
    first, factor = numbers_in("cosine_restarts", 1, first_steps=first_steps, factor=factor)

    def start(n: Tensor) -> Tensor:
        return first / (factor - 1) * (op.pow(factor, n) - 1)

    def schedule(count: Tensor) -> Tensor:
        if factor == 1:
            return _anneal(peak, final, op.remainder(count, first) / first)
        n = op.floor(op.log1p(count * ((factor - 1) / first)) / math.log(factor))
        n = elements.where(count >= start(n + 1), n + 1, n)  # the logarithm is rounded
        n = elements.where(count < start(n), n - 1, n)
        return _anneal(peak, final, (count - start(n)) / (first * op.pow(factor, n)))

    return schedule


@_schedule
def exponential(initial: float, decay_rate: float, transition_steps: int = 1) -> Schedule:
    """Return the schedule initial * decay_rate^(count / transition_steps).

    It is optax's `exponential_decay`. The schedule maps the count of updates, f32[] or a number, to
    f32[]. Raises `ArgumentError` if a rate or decay_rate is negative or transition_steps is below
    1.

        >>> ml.optim.exponential(1.0, 0.5)(3)
        Tensor(0.125, f32[])

    Invalid calls:
        ml.optim.exponential(1.0, -1.0)  # ArgumentError
    """
    initial, decay_rate = numbers_in("exponential", 0, initial=initial, decay_rate=decay_rate)
    steps = number_in("exponential", "transition_steps", transition_steps, 1)
    return lambda count: initial * op.pow(decay_rate, count / steps)


@_schedule
def step(initial: float, decay_rate: float, step_size: int) -> Schedule:
    """Return a schedule that is multiplied by `decay_rate` every `step_size` updates.

    It starts at `initial`, and is PyTorch's `StepLR`. The schedule maps the count of updates, f32[]
    or a number, to f32[]. Raises `ArgumentError` if a rate or decay_rate is negative or step_size
    is below 1.

        >>> rate = ml.optim.step(1.0, 0.5, step_size=10)
        >>> rate(9), rate(10)
        (Tensor(1., f32[]), Tensor(0.5, f32[]))

    Invalid calls:
        ml.optim.step(1.0, 0.5, 0)  # ArgumentError
    """
    initial, decay_rate = numbers_in("step", 0, initial=initial, decay_rate=decay_rate)
    size = number_in("step", "step_size", step_size, 1)
    return lambda count: initial * op.pow(decay_rate, op.floor(count / size))


@_schedule
def warmup(schedule: float | Schedule, warmup_steps: int, initial: float = 0.0) -> Schedule:
    """Prepend a linear warmup to a schedule: from `initial` to the schedule's first rate.

    The warmup lasts `warmup_steps` updates; then the schedule counts from 0. A number is a constant
    schedule.

    The schedule maps the count of updates, f32[] or a number, to f32[]. Raises `ArgumentError` if
    the rate is negative or warmup_steps is below 1.

        >>> rate = ml.optim.warmup(ml.optim.exponential(1.0, 0.5), warmup_steps=4)
        >>> rate(1), rate(4), rate(5)
        (Tensor(0.25, f32[]), Tensor(1., f32[]), Tensor(0.5, f32[]))

    Invalid calls:
        ml.optim.warmup(1.0, 0)  # ArgumentError
    """
    initial = number_in("warmup", "initial", initial, 0)
    steps = number_in("warmup", "warmup_steps", warmup_steps, 1)
    after = schedule if callable(schedule) else constant(schedule)

    def warmed_up(count: Tensor) -> Tensor:
        rate = after(op.maximum(count - steps, 0.0))
        return op.where(count < steps, initial + (rate - initial) * (count / steps), rate)

    # the state of a `Plateau`, for code that saves the optimizer
    for name in ("state", "load_state"):
        if hasattr(schedule, name):
            setattr(warmed_up, name, getattr(schedule, name))
    return warmed_up


class Plateau(CheckedFields):
    """Schedule that reduces the rate when a loss stops decreasing: PyTorch's `ReduceLROnPlateau`.

    Pass the loss to `update`, for example once per epoch.

        rate = ml.optim.Plateau(1e-3)
        optimizer = ml.optim.Adam(model, rate)
        ...
        rate.update(validation_loss)

    A loss is better if it is below best - threshold * |best|. After more than `patience`
    consecutive losses that are not better, the rate is multiplied by `factor`, with the minimum
    `min_rate`. The next `cooldown` losses are not counted.

    `rate`, `best`, `num_bad` and `cooling`, f32[], are tensors in the current arena, so that a
    captured step can use them. Raises `ArgumentError` unless rate, patience, threshold, cooldown
    and min_rate are >= 0 and 0 <= factor < 1.

        >>> rate = ml.optim.Plateau(1.0, factor=0.5, patience=1)
        >>> for loss in [3.0, 2.0, 2.0, 2.0]: rate.update(loss)
        >>> rate
        <Plateau: Tensor(0.5, f32[])>

    Invalid calls:
        ml.optim.Plateau(-1.0)  # ArgumentError
    """

    _kinds: ClassVar = {
        "factor": Fraction,
        **dict.fromkeys(("patience", "threshold", "cooldown", "min_rate"), Positive),
    }

    if not TYPE_CHECKING:
        least = OldAttribute("Plateau", "least")

    @hinted
    @old_keywords("Plateau")
    def __init__(
        self,
        rate: float,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_rate: float = 0.0,
    ) -> None:
        first = number_in("Plateau", "rate", rate, 0)
        self.factor = number_in("Plateau", "factor", factor, 0, 1)
        self.patience, self.threshold, self.cooldown, self.min_rate = numbers_in(
            "Plateau",
            0,
            patience=patience,
            threshold=threshold,
            cooldown=cooldown,
            min_rate=min_rate,
        )
        self.rate = creation.full((), first, dtype=f32)
        self.best = creation.full((), math.inf, dtype=f32)
        self.num_bad = creation.zeros((), dtype=f32)
        self.cooling = creation.zeros((), dtype=f32)

    def __call__(self, count: Count) -> Tensor:
        """Return the current rate, f32[]; the count is ignored."""
        return self.rate

    def update(self, loss: Tensor | float) -> None:
        """Record a loss: f[] or a number."""
        if not isinstance(loss, Tensor):
            loss = creation.full((), loss, dtype=f32)
        loss = elements.astype(loss, f32)
        is_better = loss < self.best * (1 - self.threshold * op.sign(self.best))
        is_cooling = self.cooling > 0.0
        num_bad = elements.where(op.logical_or(is_better, is_cooling), 0.0, self.num_bad + 1)
        falls = num_bad > self.patience
        cooling = op.maximum(self.cooling - 1, 0.0)
        lower = op.maximum(self.rate * self.factor, self.min_rate)
        apply_into(self.best, COPY, op.where(is_better, loss, self.best))
        apply_into(self.rate, COPY, op.where(falls, lower, self.rate))
        apply_into(self.cooling, COPY, elements.where(falls, self.cooldown, cooling))
        apply_into(self.num_bad, COPY, elements.where(falls, 0.0, num_bad))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of state by name."""
        names = "rate", "best", "num_bad", "cooling"
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(with_new_names("Plateau", state))

    def __repr__(self) -> str:
        return f"<Plateau: {self.rate}>"


@_schedule
def one_cycle(
    peak: float,
    total_steps: int,
    *,
    warmup_fraction: float = 0.3,
    initial_divisor: float = 25.0,
    final_divisor: float = 1e4,
) -> Schedule:
    """Return a schedule that rises to `peak` and falls again, in half a cosine wave each.

    The rate starts at initial = peak / initial_divisor. The final value is initial / final_divisor
    (Smith and Topin, arXiv 1708.07120). It rises during the first `warmup_fraction` of
    `total_steps`. The end is reached after `total_steps` updates, as in optax's
    `cosine_onecycle_schedule`; in PyTorch's `OneCycleLR` the last update reaches it. The defaults
    are the same as in both libraries.

    The schedule maps the count of updates, f32[] or a number, to f32[]. Raises `ArgumentError` if
    the peak is negative, total_steps or a divisor is below 1, or unless 0 <= warmup_fraction < 1.

        >>> rate = ml.optim.one_cycle(1.0, total_steps=100)
        >>> rate(0), rate(30)
        (Tensor(0.04, f32[]), Tensor(1., f32[]))

    Invalid calls:
        ml.optim.one_cycle(1.0, 0)  # ArgumentError
    """
    peak = number_in("one_cycle", "peak", peak, 0)
    number_in("one_cycle", "total_steps", total_steps, 1)
    initial = peak / number_in("one_cycle", "initial_divisor", initial_divisor, 1)
    final = initial / number_in("one_cycle", "final_divisor", final_divisor, 1)
    turn = number_in("one_cycle", "warmup_fraction", warmup_fraction, 0, 1) * total_steps

    def schedule(count: Tensor) -> Tensor:
        down = _anneal(peak, final, (count - turn) / (total_steps - turn))
        if not turn:
            return down
        return op.where(count < turn, _anneal(initial, peak, count / turn), down)

    return schedule


def _anneal(start: float, end: float, progress: Tensor) -> Tensor:
    """Interpolate from `start` at progress 0 to `end` at progress 1 in half a cosine wave.

    Beyond progress 1 the value is `end`."""
    wave = op.cos(math.pi * op.minimum(progress, 1.0))
    return (start - end) / 2 * (1 + wave) + end
