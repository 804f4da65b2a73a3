"""Linear models of `ai.onnx.ml`, against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.onnx import load
from mlvm.onnx.encode import encode
from mlvm.onnx.writing import _attribute
from tests.brief import cases, refuses

X = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
W = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75]
BOTH = X @ np.array(W, "f4").reshape(2, 3).T


def compute(op: str, outputs: int = 1, **attributes: Any) -> list[np.ndarray[Any, Any]]:
    """Return the results of a model of one node for X."""
    floats = [
        {"name": name, "floats": value, "type": 6}
        if isinstance(value, list) and isinstance(value[0], float)
        else _attribute(name, value)
        for name, value in attributes.items()
    ]
    names = [f"y{i}" for i in range(outputs)]
    node = {"input": ["x"], "output": names, "op_type": op, "domain": "ai.onnx.ml"}
    kind = {"tensor_type": {"elem_type": 1}}
    graph = {
        "node": [node | {"attribute": floats}],
        "input": [{"name": "x", "type": kind}],
        "output": [{"name": name} for name in names],
    }
    model = {"ir_version": 8, "graph": graph}
    opsets = [{"domain": "", "version": 17}, {"domain": "ai.onnx.ml", "version": 3}]
    results = load(b"".join(encode("Model", model | {"opset_import": opsets})))(X)
    return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,))]


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
    [y] = compute(op, **attributes)
    assert y.dtype == np.float32
    assert np.allclose(y, expected, atol=1e-6)


def test_classes() -> None:
    labels, scores = compute("LinearClassifier", 2, coefficients=W, classlabels_ints=[7, 9],
                          post_transform="SOFTMAX")  # fmt: skip
    powers = np.exp(BOTH)
    assert np.array_equal(labels, np.array([7, 9])[BOTH.argmax(1)])
    assert np.allclose(scores, powers / powers.sum(1, keepdims=True), atol=1e-6)
    labels, scores = compute("LinearClassifier", 2, coefficients=W[:3], classlabels_ints=[7, 9],
                          post_transform="LOGISTIC")  # fmt: skip
    assert np.array_equal(labels, np.where(BOTH[:, 0] > 0, 9, 7))
    assert np.allclose(scores[:, 1], 1 / (1 + np.exp(-BOTH[:, 0])), atol=1e-6)
    refuses(ml.errors.ModelError, "strings", compute, "LinearClassifier", 2, coefficients=W)
