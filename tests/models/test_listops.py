"""ListOps: the grammar's limits, and values and trees beside an evaluator of their own."""

from __future__ import annotations

import numpy as np

from models.data import listops
from models.data.dataset import Array
from models.data.listops import MAX_ARGS, MAX_DEPTH, NO_CHILD, SYMBOLS

DATA = listops.load(1, 1500, 500)


def written(rows: Array, node: int = 0) -> list[str]:
    """The symbols of the leaves, from left to right."""
    symbol, left, right = rows[node]
    if left == NO_CHILD:
        assert right == NO_CHILD
        return [SYMBOLS[symbol]]
    return [*written(rows, left), *written(rows, right)]


def evaluated(words: list[str]) -> tuple[int, int]:
    """The value of an expression and its depth, by a stack."""
    stack: list[tuple[str, list[int], int]] = [("", [], 0)]
    deepest = 0
    for word in words:
        if word.startswith("["):
            stack.append((word[1:], [], 0))
            deepest = max(deepest, len(stack))
        elif word == "]":
            name, args, _ = stack.pop()
            assert 2 <= len(args) <= MAX_ARGS
            low, high = (sorted(args)[(len(args) - 1) // 2], sorted(args)[len(args) // 2])
            results = {
                "MIN": sorted(args)[0],
                "MAX": sorted(args)[-1],
                "MED": (low + high) // 2,
                "SM": int(str(sum(args))[-1]),
            }
            stack[-1][1].append(results[name])
        else:
            stack[-1][1].append(int(word))
    [(_, [result], _)] = stack
    return result, deepest


def test_values_are_those_of_another_evaluator() -> None:
    trees, values = DATA.train[np.arange(1000)]
    assert trees.shape == (1000, *DATA.shape)
    for rows, value in zip(trees, values, strict=True):
        result, depth = evaluated(written(rows))
        assert result == value
        assert depth <= MAX_DEPTH
    assert np.bincount(values, minlength=10).min() > 50


def test_an_example_of_the_paper() -> None:
    expression: listops.Expression = (11, [2, 9, (10, [4, 7]), 0])
    text = "[MAX 2 9 [MIN 4 7 ] 0 ]"
    assert " ".join(SYMBOLS[i] for i in listops.symbols(expression)) == text
    assert listops.value(expression) == 9
    rows = listops.nodes(expression)
    assert " ".join(written(rows)) == text
    assert (rows[:, 1] != NO_CHILD).sum() == 8
    # The operator takes its arguments one by one: the leaves lie deeper to the left.
    node, path = 0, []
    while rows[node, 1] != NO_CHILD:
        path.append(written(rows, rows[node, 2])[0])
        node = rows[node, 1]
    assert path == ["]", "0", "[MIN", "9", "2"]
    assert written(rows, node) == ["[MAX"]


def test_a_node_comes_before_its_children() -> None:
    trees, _ = DATA.test[np.arange(50)]
    for rows in trees:
        inner = np.flatnonzero(rows[:, 1] != NO_CHILD)
        assert (rows[inner, 1:] > inner[:, None]).all()
        assert len(set(rows[inner, 1:].ravel())) == 2 * len(inner)
        assert (rows[2 * len(inner) + 1 :] == (0, NO_CHILD, NO_CHILD)).all()


def test_trees_differ_and_the_seed_decides() -> None:
    def of(data: object) -> set[bytes]:
        assert isinstance(data, listops.Trees)
        return {rows.tobytes() for rows in data[np.arange(500)][0]}

    assert len(of(DATA.train)) == 500
    assert not of(DATA.train) & of(DATA.test)
    assert of(listops.load(1, 1500, 500).train) == of(DATA.train)
    assert of(listops.load(2, 501, 1).train) != of(DATA.train)


def test_operators_are_as_frequent_as_the_grammar_says() -> None:
    random = np.random.default_rng(0)
    drawn = [listops.generate(random) for _ in range(4000)]
    trees = [each for each in drawn if isinstance(each, tuple)]
    assert abs(len(trees) / 4000 - 0.25) < 0.03
    counts = np.bincount([len(arguments) for _, arguments in trees], minlength=6)[2:]
    assert (np.abs(counts / len(trees) - 0.25) < 0.06).all()
    kinds = np.bincount([operator - 10 for operator, _ in trees])
    assert (np.abs(kinds / len(trees) - 0.25) < 0.06).all()
