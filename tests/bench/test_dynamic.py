"""The contenders of the suite `dynamic` compute the same, and one that does not is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench import dynamic
from bench.dynamic_sizes import (
    CASES,
    QUICK,
    GenerationSize,
    LstmTrainingSize,
    TransformerSize,
    random_tree,
    reference,
)
from bench.mlvm_dynamic import Family
from tests.brief import cases, refuses

TRAINING = [
    name for name, size in QUICK.items() if isinstance(size, LstmTrainingSize | TransformerSize)
]
STEPS = 3


def check(case: str, run: dynamic.Run) -> None:
    expected = reference(QUICK[case])
    dynamic.check(run(), expected)
    if case not in TRAINING:
        dynamic.check(run(), expected)


def test_each_case_has_a_quick_size_of_its_kind() -> None:
    assert {x: type(size) for x, size in QUICK.items()} == {x: type(CASES[x]) for x in CASES}


def test_a_random_tree_has_all_its_words_in_order() -> None:
    nodes = random_tree(9, np.random.default_rng(0))
    assert nodes.shape == (17, 3)

    def words(node: int) -> list[int]:
        word, left, right = nodes[node]
        return [word] if left < 0 else [*words(left), *words(right)]

    assert words(0) == list(range(9))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("case", QUICK)
def test_mlvm(case: str, captured: bool) -> None:
    check(case, dynamic.mlvm(QUICK[case], greedy=True, captured=captured))


@pytest.mark.parametrize("case", QUICK)
def test_replay_is_eager_to_the_bit(case: str) -> None:
    eager, captured = (
        Family(QUICK[case], captured=captured, greedy=False, fuse=False)
        for captured in (False, True)
    )
    for _ in range(STEPS):
        for one, other in zip(eager.run(), captured.run(), strict=True):
            assert one.tobytes() == other.tobytes()
    assert captured.captured is not None
    assert captured.captured.signatures == 1


def test_a_second_program_is_an_error() -> None:
    family = Family(QUICK["lstm 1 layer"], captured=True, greedy=False, fuse=True)
    words, length = family.inputs[0]
    with family.weights.allocating():
        family.inputs[1] = (ml.concat([words, words]), length)
    refuses(ValueError, "2 programs where one is to serve all", family.run)


@cases(
    "case, spoil, message",
    ("tree-lstm", lambda x: x[:-1], "input 0: a result (4,) in place of (5,)"),
    ("bert", lambda x: x * 1.001, "input 0: a result is off by 1.0e-03 of the largest"),
    ("lstm training", lambda x: x * np.nan, "input 0: a result is off by nan"),
    ("generation", lambda x: x + 1, "input 0: symbols ["),
)
def test_others_are_refused(case: str, spoil: Callable[[Any], Any], message: str) -> None:
    expected = reference(QUICK[case])
    caught = refuses(ValueError, "", dynamic.check, [spoil(each) for each in expected], expected)
    assert str(caught).startswith(message)
    refuses(ValueError, "0 results in place of 1", dynamic.check, [], expected[:1])


def test_a_contender_with_other_results_is_not_timed() -> None:
    prepare = dynamic.preparing(
        lambda size, greedy: lambda: [each + greedy + 1 for each in reference(size)],
        lambda size: isinstance(size, GenerationSize),
    )
    rounds = prepare(True)
    assert list(rounds) == ["generation"]
    refuses(ValueError, "in place of", rounds["generation"])
