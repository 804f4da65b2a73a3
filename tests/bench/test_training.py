"""The contenders of the training benchmarks do the same work, at the sizes they are to have."""

from __future__ import annotations

import pytest

from bench.mixer import products_of
from bench.mlvm_training import Training, training_on
from bench.sizes import CASES, MIXERS, ImagesSize, batch_of

TINY = MIXERS["tiny"]
STEPS = 4


@pytest.mark.parametrize("size", CASES.values(), ids=CASES)
def test_a_batch_is_the_same_each_time_and_has_all_that_a_model_wants(
    size: ImagesSize,
) -> None:
    images, labels = batch_of(size)
    again, labels_again = batch_of(size)
    assert images.shape == (size.batch, *size.image_shape)
    assert (images == again).all()
    assert (labels == labels_again).all()
    assert 0 <= labels.min() <= labels.max() < size.num_classes


def test_a_captured_step_trains_as_the_eager_one() -> None:
    eager, captured = Training(TINY), Training(TINY)
    losses = [eager.eager() for _ in range(STEPS)]
    assert losses == sorted(losses, reverse=True)
    assert [captured.replay() for _ in range(STEPS)] == losses


@pytest.mark.parametrize("captured", [False, True])
def test_two_vms_train_as_one(captured: bool) -> None:
    pytest.importorskip("threadpoolctl")
    training = Training(TINY)
    step = training_on(2, TINY, captured=captured)
    losses = [training.eager() for _ in range(STEPS)]
    assert [step() for _ in range(STEPS)] == pytest.approx(losses, rel=1e-5)


def test_the_floor_has_the_products_of_a_step() -> None:
    """Three for each weight, but for the stem's: a forward one and two backward."""
    rows = TINY.batch * TINY.patches
    stem = rows * TINY.patch_features * TINY.hidden_dim
    head = TINY.batch * TINY.hidden_dim * TINY.num_classes
    tokens = TINY.batch * TINY.hidden_dim * TINY.patches * TINY.tokens_mlp_dim
    channels = rows * TINY.hidden_dim * TINY.channels_mlp_dim
    expected = 2 * stem + 3 * head + TINY.num_blocks * 3 * 2 * (tokens + channels)
    products = products_of(TINY)
    assert sum(out.size * x.shape[-1] for x, _, out in products) == expected
    assert all((x @ y).shape == out.shape for x, y, out in products)
