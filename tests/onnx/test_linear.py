"""Linear models and trees of `ai.onnx.ml`, against their formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.brief import cases, refuses
from tests.onnx.making import computed

X = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
W = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75]
BOTH = X @ np.array(W, "f4").reshape(2, 3).T


@cases(
    "op, attributes, expected",
    ("Scaler", {"offset": [1.0, 2.0, 3.0], "scale": [2.0]}, (X - np.array([1, 2, 3])) * 2),
    ("Normalizer", {"norm": "L2"}, X / np.linalg.norm(X, axis=1, keepdims=True)),
    ("Normalizer", {"norm": "L1"}, X / np.abs(X).sum(1, keepdims=True)),
    ("Normalizer", {}, X / np.abs(X).max(1, keepdims=True)),
    (
        "LinearRegressor",
        {"coefficients": W, "targets": 2, "intercepts": [1.0, 0.5]},
        BOTH + np.array([1, 0.5]),
    ),
)
def test_values(op: str, attributes: Any, expected: Any) -> None:
    y = computed(op, X, domain="ai.onnx.ml", **attributes)
    assert y.dtype == np.float32
    assert np.allclose(y, expected, atol=1e-6)


def test_classes() -> None:
    options: Any = {"outputs": 2, "domain": "ai.onnx.ml", "classlabels_ints": [7, 9]}
    labels, scores = computed(
        "LinearClassifier", X, coefficients=W, post_transform="SOFTMAX", **options
    )
    powers = np.exp(BOTH)
    assert np.array_equal(labels, np.array([7, 9])[BOTH.argmax(1)])
    assert np.allclose(scores, powers / powers.sum(1, keepdims=True), atol=1e-6)
    labels, scores = computed(
        "LinearClassifier", X, coefficients=W[:3], post_transform="LOGISTIC", **options
    )
    assert np.array_equal(labels, np.where(BOTH[:, 0] > 0, 9, 7))
    assert np.allclose(scores[:, 1], 1 / (1 + np.exp(-BOTH[:, 0])), atol=1e-6)
    del options["classlabels_ints"]
    call = partial(computed, "LinearClassifier", X, coefficients=W)
    refuses(ml.errors.ModelError, "strings", call, **options)


# x0 <= 0.5 ? (x1 > -0.5 ? 0 : 1) : 2, and a tree of one leaf; nan is above 0.5, and above -0.5
_ROWS = "treeids 777779|nodeids 012340|featureids 010000|truenodeids 120000|falsenodeids 430000"
TREES: Any = {f"nodes_{k}": [*map(int, x)] for k, x in map(str.split, _ROWS.split("|"))} | {
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_GT", *["LEAF"] * 4],
    "nodes_values": [0.5, -0.5, 0.0, 0.0, 0.0, 0.0],
    "nodes_missing_value_tracks_true": [0, 1, 0, 0, 0, 0],
    "domain": "ai.onnx.ml",
}
POINTS = np.array([[0.5, 0], [0.5, -0.5], [0.6, 9], [np.nan, 0], [0, np.nan]], "f4")
LEAF = np.array([0, 1, 2, 2, 0])


def test_trees() -> None:
    own: Any = {"treeids": [7, 7, 7, 9], "nodeids": [2, 3, 4, 0], "ids": [0, 0, 0, 0]}
    target = {f"target_{name}": x for name, x in own.items()} | {"target_weights": [1.0, 2, 3, 5]}
    sums: Any = {"SUM": LEAF + 7, "AVERAGE": LEAF / 2 + 4, "MIN": LEAF + 2, "MAX": LEAF * 0 + 6}
    for how, y in sums.items():
        options = TREES | target | {"base_values": [1.0], "aggregate_function": how}
        result = computed("TreeEnsembleRegressor", POINTS, **options)
        assert np.array_equal(result.ravel(), y), how
    for labels, weights, how, best, scores in (
        ([4, 6], [0.2, 0.5, 0.1, 0.25], "NONE", [4, 6, 4, 4, 4], [0.45, 0.75, 0.35, 0.35, 0.45]),
        ([4, 6], [-1.0, 3.0, 0.0, -1.0], "LOGISTIC", [4, 6, 4, 4, 4], [-2, 2, -1, -1, -2]),
        ([4, 6, 8], [1.0, 3.0, 2.0, 2.0], "NONE", [8, 4, 6, 6, 8], [0, 3, 0, 0, 0]),
    ):
        own["ids"] = [2, 0, 1, 2] if len(labels) == 3 else [0] * 4
        more: Any = {f"class_{name}": x for name, x in own.items()} | {"post_transform": how}
        more |= {"classlabels_int64s": labels, "class_weights": weights} | TREES
        got, y = computed("TreeEnsembleClassifier", POINTS, outputs=2, **more)
        assert got.tolist() == best
        first = y[:, 0] if len(labels) == 3 else y[:, 1]
        expected = np.tanh(np.array(scores) / 2) / 2 + 0.5 if how == "LOGISTIC" else scores
        np.testing.assert_allclose(first, expected, rtol=1e-6)
