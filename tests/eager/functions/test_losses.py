"""The losses at their edges; what they compute is rows of a table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.cases import oracles
from tests.slopes import check_slopes

RNG = np.random.default_rng(6)
X = RNG.normal(size=(4, 3)) * 3

t = ml.asarray


def test_vectors_of_zeros_have_a_cosine_and_a_gradient() -> None:
    x, y = t(np.zeros((1, 3))), t(X[:1])
    value, pullback = ml.vjp(ml.cosine_similarity, x, y)
    assert value.numpy().tolist() == [0.0]
    assert all(np.isfinite(slope.numpy()).all() for slope in pullback(ml.ones(1, dtype="f64")))


def test_large_logits_do_not_overflow() -> None:
    x = t(np.array([1e4, -1e4, 80.0, -80.0, 50.0], np.float32))
    targets = t(np.array([1, 0, 1, 0, 0], np.float32))
    loss = ml.binary_cross_entropy_with_logits(x, targets).numpy()
    np.testing.assert_allclose(loss, [0, 0, math.exp(-80), math.exp(-80), 50], rtol=1e-5)
    gradient = ml.grad(lambda x: ml.binary_cross_entropy_with_logits(x, targets, reduction="sum"))(
        x
    )
    np.testing.assert_allclose(gradient.numpy(), [0, 0, 0, 0, 1], atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [[], [1], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("number", [-100, 1])
def test_ignored_labels_count_for_nothing(
    ignored: list[int], smoothing: float, number: int
) -> None:
    labels = oracles.LABELS.copy()
    labels[ignored] = number
    counted = labels != number

    def loss(x: ml.Tensor, reduction: Any) -> ml.Tensor:
        return ml.softmax_cross_entropy(
            x, t(labels), label_smoothing=smoothing, ignore_index=number, reduction=reduction
        )

    losses = oracles.cross_entropy(X, oracles.smoothed(oracles.ONES, smoothing))
    expected = np.where(counted, losses, 0)
    np.testing.assert_allclose(loss(t(X), "none").numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(loss(t(X), "sum").numpy(), expected.sum(), rtol=1e-12)
    mean, gradient = ml.value_and_grad(lambda x: loss(x, "mean"))(t(X))
    if not counted.any():
        assert math.isnan(mean.item())
    else:
        np.testing.assert_allclose(mean.numpy(), expected.sum() / counted.sum(), rtol=1e-12)
        assert not gradient.numpy()[~counted].any()
        check_slopes(lambda x: loss(x, "mean"), t(X))
