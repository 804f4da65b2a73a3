"""Learning rates that change from one update to the next.

A schedule is a function from the number of updates done, f32[], to the learning rate, f32[]. It is
written with ops, so that it can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from mlvm.core.types import f32
from mlvm.eager.functions import creation
from mlvm.eager.optim.ranges import number_in
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor

Schedule: TypeAlias = Callable[[Tensor], Tensor]


def constant(rate: float) -> Schedule:
    """The same rate for every update.

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    rate.

        >>> float(ml.optim.constant(0.1)(ml.asarray(5.0))) == float(ml.asarray(0.1))
        True
    """
    rate = number_in("constant", "rate", rate, 0)
    return lambda count: creation.full((), rate, dtype=f32)


def cosine(peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """From 0 to `peak` in a line over `warmup_steps`, then to `final` in half a cosine wave that
    ends at `total_steps` (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    rate, or unless 0 <= warmup_steps < total_steps.

        >>> rate = ml.optim.cosine(1.0, total_steps=100)
        >>> float(rate(ml.asarray(0.0))), float(rate(ml.asarray(100.0)))
        (1.0, 0.0)
    """
    peak = number_in("cosine", "peak", peak, 0)
    final = number_in("cosine", "final", final, 0)
    number_in("cosine", "total_steps", total_steps, 1)
    number_in("cosine", "warmup_steps", warmup_steps, 0, total_steps)

    def schedule(count: Tensor) -> Tensor:
        rate = _anneal(peak, final, (count - warmup_steps) / (total_steps - warmup_steps))
        if not warmup_steps:
            return rate
        return op.where(count < warmup_steps, count * (peak / warmup_steps), rate)

    return schedule


def one_cycle(
    peak: float,
    total_steps: int,
    *,
    warmup_fraction: float = 0.3,
    initial_divisor: float = 25.0,
    final_divisor: float = 1e4,
) -> Schedule:
    """From initial = peak / initial_divisor up to `peak`, and down to initial / final_divisor, in
    half a cosine wave each (Smith and Topin, arXiv 1708.07120). `warmup_fraction` of `total_steps`
    go up. The end is reached after `total_steps` updates, as in optax's `cosine_onecycle_schedule`;
    in PyTorch's `OneCycleLR` the last update reaches it. The defaults are those of both.

    It takes the count of updates, f32[], and gives f32[]. Raises `AttributeRefused` for a negative
    peak, total_steps < 1, a divisor below 1, or unless 0 <= warmup_fraction < 1.

        >>> rate = ml.optim.one_cycle(1.0, total_steps=100)
        >>> float(rate(ml.asarray(0.0))) < float(rate(ml.asarray(30.0)))
        True
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
    """From `start` at progress 0 to `end` at 1 in half a cosine wave; `end` beyond 1."""
    wave = op.cos(math.pi * op.minimum(progress, 1.0))
    return (start - end) / 2 * (1 + wave) + end
