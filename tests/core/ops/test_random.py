"""Random ops: the cases, the distributions, and that only the key decides."""

from __future__ import annotations

import numpy as np

from mlvm.core.types import Array
from tests.brief import Capsys, output_of
from tests.cases.claim_tests import claims
from tests.cases.evaluate import evaluate
from tests.interrupting import interrupted_at_line
from tests.threads import in_threads

KEY = np.array([42, 0], np.uint64)


# --- distributions --------------------------------------------------------------------


def test_bernoulli_follows_a_p_for_each_column() -> None:
    p = np.array([0, 0.2, 0.9, 1])
    x = evaluate("bernoulli", KEY, p, shape=(50_000, 4))
    assert x.dtype == np.bool_
    np.testing.assert_allclose(x.mean(0), p, atol=0.01)
    assert not x[:, 0].any()
    assert x[:, 3].all()


def _chi_square(values: Array, bins: int) -> float:
    counts = np.bincount(values.astype(np.int64), minlength=bins)
    expected = values.size / bins
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(bins: int) -> float:
    """Five standard deviations above the mean of chi-square with bins - 1 degrees of freedom."""
    freedom = bins - 1
    return freedom + 5 * float(np.sqrt(2 * freedom))


# --- keys -----------------------------------------------------------------------------


_DRAWS = """
import numpy as np
from tests.cases.evaluate import evaluate
key = np.array([42, 0], np.uint64)
for name, attributes in [
    ("normal", {"shape": (9,)}),
    ("uniform", {"shape": (9,), "dtype": "f64"}),
    ("randint", {"low": 0, "high": 1000, "shape": (9,)}),
    ("permutation", {"n": 9}),
    ("split_key", {"n": 9}),
]:
    print(evaluate(name, key, **attributes).tobytes().hex())
"""


def test_an_interrupted_first_draw_of_a_thread_changes_no_later_draw() -> None:
    drawn: list[Array] = []

    def draw() -> Array:
        return evaluate("gamma", KEY, np.float32(2), shape=(3,))

    def draw_again() -> None:
        try:
            draw()
        except KeyboardInterrupt:
            drawn.append(draw())

    while interrupted_at_line(draw_again, len(drawn) + 1, "core/ops/random"):
        pass
    assert len(drawn) > 5
    for values in drawn:
        np.testing.assert_array_equal(values, draw())


def test_another_process_draws_the_same_bits(capsys: Capsys) -> None:
    exec(_DRAWS, {})
    here = capsys.readouterr().out
    assert output_of("-c", _DRAWS) == here


def test_threads_do_not_disturb_each_other() -> None:
    expected = evaluate("normal", KEY, shape=(2000,))

    def draw(_: int) -> None:
        for _ in range(50):
            x = evaluate("normal", KEY, shape=(2000,))
            np.testing.assert_array_equal(x, expected)

    in_threads(draw, range(4))


def test_neighbouring_keys_are_uncorrelated() -> None:
    keys = [KEY, np.array([42, 1], np.uint64), *evaluate("split_key", KEY, n=3)]
    keys += [evaluate("fold_in", KEY, np.array(i)) for i in range(3)]
    draws = np.array([evaluate("normal", key, shape=(50_000,)) for key in keys])
    correlation = np.corrcoef(draws.astype(np.float64)) - np.eye(len(keys))
    assert np.abs(correlation).max() < 0.025


test_rows = claims("ops_random", globals())
