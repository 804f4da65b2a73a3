"""A contender computes the reference's logits, or it is refused before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench import inference
from bench.sizes import MixerSize, batch_of
from tests.brief import cases, refuses

SIZE = MixerSize(2, (8, 12, 3), 7, 4, 16, 2, 8, 32)
PARAMS = inference.params_of(SIZE)
EXPECTED = inference.reference(SIZE, PARAMS, batch_of(SIZE)[0])


def test_the_logits_differ_from_each_other() -> None:
    assert EXPECTED.shape == (2, 7)
    assert np.unique(EXPECTED).size == EXPECTED.size


def test_mlvm() -> None:
    inference.check(inference.mlvm_forward(SIZE, PARAMS, threads=1)(), EXPECTED)


@cases(
    "spoil, message",
    (lambda x: x[:1], "logits (1, 7) in place of (2, 7)"),
    (lambda x: x * 1.001, "a logit is off by 1.0e-03 of the largest, 0.0001 is accepted"),
    (lambda x: x * np.nan, "a logit is off by nan"),
)
def test_others_are_refused(spoil: Callable[[Any], Any], message: str) -> None:
    caught = refuses(ValueError, "", inference.check, spoil(EXPECTED), EXPECTED)
    assert str(caught).startswith(message)


def test_a_contender_with_other_logits_is_not_timed() -> None:
    prepare = inference.preparing(lambda size, params: lambda: np.zeros((1, 10)))
    refuses(ValueError, "a logit is off by", lambda: prepare(True)["tiny batch 1"]())
