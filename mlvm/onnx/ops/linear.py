"""Linear models of `ai.onnx.ml`, to which scikit-learn's linear models are exported."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.eager import Tensor
from mlvm.onnx.table import NodeCall, op


@op("ai.onnx.ml.Scaler", "tensors")
def scaler(at: NodeCall, x: Tensor) -> Tensor:
    offset, scale = (np.array(at.get(name, [value]), "f4") for name, value in _SCALER)
    return (ml.astype(x, "f32") - ml.asarray(offset)) * ml.asarray(scale)


_SCALER = ("offset", 0.0), ("scale", 1.0)


@op("ai.onnx.ml.Normalizer", "tensors")
def normalizer(at: NodeCall, x: Tensor) -> Tensor:
    x, how = ml.astype(x, "f32"), at.get("norm", "MAX")
    if how == "L2":
        size = ml.sqrt(ml.sum(x * x, axis=-1, keepdims=True))
    else:
        size = (ml.sum if how == "L1" else ml.max)(ml.abs(x), axis=-1, keepdims=True)
    return x / ml.where(size == 0, 1.0, size)


def _scores(at: NodeCall, x: Tensor, rows: int) -> Tensor:
    """Compute x @ coefficients + intercepts; the coefficients have the given number of rows."""
    weights = np.array(at["coefficients"], "f4").reshape(rows, -1)
    scores = ml.astype(x, "f32") @ ml.asarray(np.ascontiguousarray(weights.T))
    bias = at.get("intercepts")
    return scores if not bias else scores + ml.asarray(np.array(bias, "f4"))


def transformed(at: NodeCall, scores: Tensor) -> Tensor:
    how = at.get("post_transform", "NONE")
    if how == "NONE":
        return scores
    if how == "SOFTMAX":
        return ml.softmax(scores, axis=-1)
    if how == "LOGISTIC":
        return ml.sigmoid(scores)
    raise ModelError(f"the transformation of scores {how} is not supported")


@op("ai.onnx.ml.LinearRegressor", "tensors")
def linear_regressor(at: NodeCall, x: Tensor) -> Tensor:
    return transformed(at, _scores(at, x, at.get("targets", 1)))


@op("ai.onnx.ml.LinearClassifier", "tensors")
def linear_classifier(at: NodeCall, x: Tensor) -> tuple[Any, Tensor]:
    labels = at.get("classlabels_ints")
    if not labels:
        raise ModelError("classes that are strings are not supported")
    scores = _scores(at, x, len(at["coefficients"]) // x.shape[-1])
    if scores.shape[-1] == 1:  # two classes
        scores = ml.concat([-scores, scores], axis=-1)
    best = ml.argmax(scores, axis=-1)
    return ml.take(ml.asarray(np.array(labels, "i8")), best, axis=0), transformed(at, scores)
