"""Learning rates over updates against closed forms, of numbers too, and the plateau of a loss."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import optim

COUNTS = [0, 1, 2, 3, 7, 10, 29, 30, 31, 69, 70, 71, 149, 150, 151, 309, 310, 100_000]


def restarts(count: int, first: int, factor: float) -> float:
    """By walking from restart to restart."""
    start, length = 0.0, float(first)
    while count >= start + length:
        start, length = start + length, length * factor
    return 0.5 + 1.5 * (1 + math.cos(math.pi * (count - start) / length)) / 2


def half_wave(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1))) / 2


SCHEDULES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "constant": (optim.constant(0.25), lambda n: 0.25),
    "cosine": (optim.cosine(2.0, 100), lambda n: half_wave(2.0, 0.0, n / 100)),
    "cosine after a step": (
        optim.cosine(2.0, 100, 1, 0.125),
        lambda n: half_wave(2.0, 0.125, (n - 1) / 99) if n else 0.0,
    ),
    "cosine after a warmup": (
        optim.cosine(2.0, 100, 30, 0.125),
        lambda n: 2.0 * n / 30 if n < 30 else half_wave(2.0, 0.125, (n - 30) / 70),
    ),
    "one cycle": (
        optim.one_cycle(2.0, 100),
        lambda n: (
            half_wave(0.08, 2.0, n / 30) if n < 30 else half_wave(2.0, 0.08 / 1e4, (n - 30) / 70)
        ),
    ),
    "one cycle that falls": (
        optim.one_cycle(2.0, 100, warmup_fraction=0, final_divisor=5),
        lambda n: half_wave(2.0, 0.016, n / 100),
    ),
    "exponential": (optim.exponential(2.0, 0.9, 10), lambda n: 2 * 0.9 ** (n / 10)),
    "step": (optim.step(2.0, 0.5, 30), lambda n: 2 * 0.5 ** (n // 30)),
    "warmup": (
        optim.warmup(optim.step(2.0, 0.5, 30), 10, initial=0.5),
        lambda n: 0.5 + 1.5 * n / 10 if n < 10 else 2 * 0.5 ** ((n - 10) // 30),
    ),
    "warmup of a number": (optim.warmup(3.0, 10), lambda n: 3.0 * min(n / 10, 1)),
    "restarts": (optim.cosine_restarts(2.0, 10, 2, 0.5), lambda n: restarts(n, 10, 2)),
    "restarts of one length": (
        optim.cosine_restarts(2.0, 10, final=0.5),
        lambda n: restarts(n, 10, 1),
    ),
    "restarts of odd lengths": (
        optim.cosine_restarts(2.0, 7, 1.5, 0.5),
        lambda n: restarts(n, 7, 1.5),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_its_formula(name: str) -> None:
    schedule, expected = SCHEDULES[name]
    tensors = [schedule(ml.asarray(np.float32(n))) for n in COUNTS]
    assert {str(rate.type) for rate in tensors} == {"f32[]"}
    values = [expected(n) for n in COUNTS]
    np.testing.assert_allclose([float(x) for x in tensors[:-1]], values[:-1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(float(tensors[-1]), values[-1], rtol=2e-2, atol=1e-7)  # f32 counts
    captured = ml.capture(schedule)
    for n, rate in zip(COUNTS, tensors, strict=True):
        assert captured(ml.asarray(np.float32(n))).item() == rate.item()


ALL = [*[each for each, _ in SCHEDULES.values()], optim.cosine(1.0, 9), optim.one_cycle(1.0, 9)]


@pytest.mark.parametrize("schedule", ALL)
def test_a_schedule_takes_a_number(schedule: Any) -> None:
    """Also if it was pickled or copied."""
    expected = schedule(ml.asarray(np.float32(5)))
    for other in (schedule, pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert repr(other) == repr(schedule)
        for count in (5, 5.0, np.int64(5), ml.asarray(np.int64(5))):
            result = other(count)
            assert result.type is expected.type
            assert result.item() == expected.item()


def test_an_optimizer_with_a_schedule_can_be_pickled() -> None:
    rate = optim.warmup(optim.Plateau(1.0), 3)
    optimizer = optim.SGD(ml.ones(2), rate)
    rate.load_state({**rate.state(), "rate": ml.asarray(0.5)})  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.learning_rate == optimizer.learning_rate
    assert vars(again)["learning_rate"](5).item() == rate(5).item() == 0.5


@pytest.mark.parametrize("first", [2, 3, 10, 50])
@pytest.mark.parametrize("factor", [2, 3])
def test_a_restart_is_at_the_very_update(first: int, factor: int) -> None:
    schedule, start = optim.cosine_restarts(1.0, first, factor), 0
    for n in range(8):
        assert schedule(start).item() == 1.0
        if start:
            assert schedule(start - 1).item() < 0.9
        start += first * factor**n


# --- a plateau -----------------------------------------------------------------------

LOSSES = [5.0, 4.0, 4.0, 3.9999, 4.1, math.nan, 4.0, 4.0, 3.0, 3.1, 3.1, 3.1, 3.1, 3.1, 3.1, -1.0]
PLATEAUS: list[dict[str, Any]] = [
    {},
    {"patience": 2},
    {"patience": 0, "factor": 0.5},
    {"patience": 1, "cooldown": 2},
    {"patience": 0, "min_rate": 0.02},
    {"patience": 1, "threshold": 0.3},
]


def plateau(settings: dict[str, Any]) -> list[float]:
    """As the documentation of PyTorch's ReduceLROnPlateau tells it."""
    rate, best, bad, cooling, history = 1.0, math.inf, 0, 0, []
    for loss in LOSSES:
        if loss < best * (1 - settings.get("threshold", 1e-4)):
            best, bad = loss, 0
        else:
            bad += 1
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > settings.get("patience", 10):
            rate = max(rate * settings.get("factor", 0.1), settings.get("min_rate", 0.0))
            cooling, bad = settings.get("cooldown", 0), 0
        history.append(rate)
    return history


@pytest.mark.parametrize("settings", PLATEAUS)
def test_a_rate_falls_on_a_plateau(settings: dict[str, Any]) -> None:
    rate = optim.Plateau(1.0, **settings)
    eager, captured = [], []
    for loss in LOSSES:
        rate.update(loss)
        eager.append(rate(0).item())
    np.testing.assert_allclose(eager, plateau(settings), rtol=1e-6)
    rate = optim.Plateau(1.0, **settings)
    update = ml.capture(lambda loss: rate.update(loss))
    for loss in LOSSES:
        update(ml.asarray(np.float32(loss)))
        captured.append(rate(0).item())
    assert captured == eager


def test_a_plateau_is_a_schedule_that_is_saved() -> None:
    w = ml.zeros(1)
    rate = optim.Plateau(1.0, factor=0.5, patience=0)
    optimizer = optim.SGD(w, rate)
    step = ml.capture(lambda g: optimizer.update(g))
    step(ml.ones(1))
    for loss in (1.0, 2.0):
        rate.update(loss)
    assert optimizer.learning_rate == 0.5
    step(ml.ones(1))
    assert w.tolist() == [-1.5]
    assert step.signatures == 1
    again = optim.Plateau(7.0, factor=0.5, patience=0)
    again.load_state({name: x.numpy() for name, x in rate.state().items()})
    assert (again.rate.item(), again.best.item()) == (0.5, 1.0)
