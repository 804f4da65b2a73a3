"""Linear models of `ai.onnx.ml`, against their formulas."""

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
