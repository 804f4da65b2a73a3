"""The random numbers of samples: each sample's own, evenly spread, the same for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import ArgumentError
from mlvm.input.sampling import SampleRandom, order
from tests.brief import refuses
from tests.cases.claim_tests import claims

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)


@given(SEEDS, EPOCHS, st.integers(0, 300))
def test_an_order_has_every_sample_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(order(size, seed=seed, epoch=epoch)) == list(range(size))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [tuple(order(50, seed=s, epoch=e)) for s in (0, 1, 2**64 - 1) for e in range(3)]
    assert len(set(orders)) == 9
    first = [order(20, seed=s, epoch=0)[0] for s in range(2000)]
    assert np.bincount(first, minlength=20).min() > 60  # of 100 expected


@given(SEEDS, EPOCHS, st.lists(st.integers(0, 2**40), min_size=1, max_size=8), st.data())
def test_a_sample_draws_the_same_in_any_company(
    seed: int, epoch: int, samples: list[int], data: st.DataObject
) -> None:
    together = SampleRandom(seed, epoch, np.array(samples))
    b = data.draw(st.integers(0, len(samples) - 1))
    alone = SampleRandom(seed, epoch, np.array([samples[b]]))
    for _ in range(2):
        for shape in ((), (3,), (2, 0), (2, 5)):
            assert np.array_equal(together.bits(shape)[b], alone.bits(shape)[0])
            assert np.array_equal(together.uniform(-1, 2, shape)[b], alone.uniform(-1, 2, shape)[0])
            assert np.array_equal(together.normal(shape)[b], alone.normal(shape)[0])
        assert together.beta(0.3, 1)[b] == alone.beta(0.3, 1)[0]


def test_distributions() -> None:
    random = SampleRandom(0, 0, np.arange(40000))
    assert len(random) == 40000
    u = random.uniform(2, 5, (3,))
    assert u.shape == (40000, 3)
    assert 2 <= u.min() < 2.001 < 4.999 < u.max() < 5
    assert np.abs(u.mean(0) - 3.5).max() < 0.02
    assert np.abs(np.corrcoef(u.T) - np.eye(3)).max() < 0.02
    n = random.normal((3,))
    assert n.dtype == np.float32
    assert np.abs(n.mean(0)).max() < 0.02
    assert np.abs(n.std(0) - 1).max() < 0.02
    assert np.abs(np.corrcoef(n.T) - np.eye(3)).max() < 0.02
    assert np.abs((n**4).mean() - 3) < 0.1
    i = random.integers(-2, 3)
    assert i.dtype == np.int64
    assert (np.bincount(i + 2) > 7600).all()
    assert set(i) == {-2, -1, 0, 1, 2}
    for alpha, beta in ((0.2, 0.2), (1.0, 1.0), (0.3, 0.8), (0.001, 0.001)):
        x = random.beta(alpha, beta)
        assert ((x >= 0) & (x <= 1)).all()
        total = alpha + beta
        assert abs(x.mean() - alpha / total) < 0.01
        assert abs(x.var() - alpha * beta / total**2 / (total + 1)) < 0.01


def test_epochs_and_draws_are_unrelated() -> None:
    draws = [SampleRandom(0, epoch, np.arange(20000)) for epoch in (0, 1)]
    columns = np.concatenate([random.uniform(shape=(2,)) for random in draws], axis=1)
    again = np.concatenate([random.uniform(shape=(2,)) for random in draws], axis=1)
    x = np.concatenate([columns, again], axis=1)
    assert np.abs(np.corrcoef(x.T) - np.eye(8)).max() < 0.03


def test_impossible_ranges_are_refused() -> None:
    random = SampleRandom(0, 0, np.arange(2))
    refuses(
        ArgumentError, r"expected low <= high, got low = 1\.5, high = 1", random.uniform, 1.5, 1
    )
    refuses(ArgumentError, "expected low < high, got low = 3, high = 3", random.integers, 3, 3)
    for alpha in (0.0, -1.0, 1.5, float("nan")):
        refuses(ArgumentError, "above 0 and at most 1", random.beta, alpha, 0.5)


test_rows = claims("sampling", globals())
