"""Linear models, encoders and imputers of `ai.onnx.ml`, as exported from scikit-learn."""

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
    if not x.size:
        return x
    if how == "L2":
        size = ml.sqrt(ml.sum(x * x, axis=-1, keepdims=True))
    elif how == "L1":
        size = ml.sum(ml.abs(x), axis=-1, keepdims=True)
    else:
        size = ml.max(x, axis=-1, keepdims=True)
    return x / ml.where(size == 0, 1.0, size)


def _scores(at: NodeCall, x: Tensor, rows: int) -> Tensor:
    """Compute x @ coefficients + intercepts; the coefficients have the given number of rows."""
    weights = np.array(at["coefficients"], "f4").reshape(rows, -1)
    scores = ml.astype(x, "f32") @ ml.asarray(np.ascontiguousarray(weights.T))
    bias = np.array(at.get("intercepts", []), "f4")
    if bias.size not in (0, rows):
        raise ModelError(f"expected {rows} intercepts, one for each row, got {bias.size}")
    return scores + ml.asarray(bias) if bias.size else scores


def transformed(at: NodeCall, scores: Tensor) -> Tensor:
    how = at.get("post_transform", "NONE")
    if how == "NONE":
        return scores
    if scores.shape[-1] == 1:  # runtimes differ
        raise ModelError(f"expected post_transform='NONE' for a single score, got {how!r}")
    if how == "SOFTMAX":
        return ml.softmax(scores, axis=-1)
    if how == "LOGISTIC":
        return ml.sigmoid(scores)
    raise ModelError(f"the transformation of scores {how} is not supported; remove it")


@op("ai.onnx.ml.LinearRegressor", "tensors")
def linear_regressor(at: NodeCall, x: Tensor) -> Tensor:
    return transformed(at, _scores(at, x, at.get("targets", 1)))


@op("ai.onnx.ml.LinearClassifier", "tensors")
def linear_classifier(at: NodeCall, x: Tensor) -> tuple[Any, Tensor]:
    labels = at.get("classlabels_ints")
    if not labels:
        raise ModelError("classes that are strings are not supported; use numbers")
    rows = len(at["coefficients"]) // x.shape[-1]
    if len(labels) != max(rows, 2):
        raise ModelError(f"expected {max(rows, 2)} classes for {rows} rows, got {len(labels)}")
    scores = _scores(at, x, rows)
    how, second = at.get("post_transform", "NONE"), scores if scores.shape[-1] == 1 else None
    if second is not None:  # two classes
        if how == "SOFTMAX":  # runtimes differ
            raise ModelError("expected another post_transform than 'SOFTMAX' for one row of scores")
        scores = ml.concat([-second, second], axis=-1)
    best = ml.argmax(scores, axis=-1)
    if second is not None and how == "NONE":  # as onnxruntime
        scores = ml.concat([1.0 - second, second], axis=-1)
    return ml.take(ml.asarray(np.array(labels, "i8")), best, axis=0), transformed(at, scores)


@op("ai.onnx.ml.Imputer", "tensors")
def imputer(at: NodeCall, x: Tensor) -> Tensor:
    if x.dtype.is_float:
        values, old = at["imputed_value_floats"], at.get("replaced_value_float", 0.0)
    else:
        values, old = at["imputed_value_int64s"], at.get("replaced_value_int64", 0)
    if len(values) not in (1, x.shape[-1]):
        raise ModelError(f"expected 1 value, or {x.shape[-1]}, got {len(values)}")
    is_old = ml.isnan(x) if old != old else ml.equal(x, old)
    return ml.where(is_old, ml.asarray(values, dtype=x.dtype), x)


@op("ai.onnx.ml.OneHotEncoder", "tensors")
def one_hot_encoder(at: NodeCall, x: Tensor) -> Tensor:
    if at.get("cats_strings"):
        raise ModelError("categories that are strings are not supported")
    categories = ml.asarray(at["cats_int64s"], dtype=ml.int64)
    matches = ml.equal(ml.expand_dims(ml.astype(x, ml.int64), axis=-1), categories)
    if not at.get("zeros", 1):
        ml.check(ml.all(ml.any(matches, axis=-1)), "expected values among the categories")
    return ml.astype(matches, ml.float32)


def _listed(at: NodeCall, **kinds: Any) -> Tensor:
    """Return the attribute that is present, one of these names, in its dtype."""
    for name, dtype in kinds.items():
        if (values := at.get(name)) is not None:
            return ml.asarray(values, dtype=dtype)
    raise ModelError(f"expected numbers, one of {', '.join(kinds)}, got strings or none")


@op("ai.onnx.ml.LabelEncoder", "tensors")
def label_encoder(at: NodeCall, x: Tensor) -> Tensor:
    keys = _listed(at, keys_int64s="i64", keys_floats="f32", keys_tensor=None)
    values = _listed(at, values_int64s="i64", values_floats="f32", values_tensor=None)
    is_float = values.dtype.is_float
    default = at.get("default_float", -0.0) if is_float else at.get("default_int64", -1)
    default = np.ravel(at.get("default_tensor", default))[0]
    matches = ml.equal(ml.expand_dims(x, axis=-1), keys)
    if keys.dtype.is_float:
        both = ml.logical_and(ml.expand_dims(ml.isnan(x), axis=-1), ml.isnan(keys))
        matches = ml.logical_or(matches, both)
    last = keys.size - 1 - ml.argmax(ml.flip(matches, axis=-1), axis=-1)  # of equal keys
    y, other = ml.take(values, last, axis=0), ml.asarray(default, dtype=values.dtype)
    return ml.where(ml.any(matches, axis=-1), y, other)


@op("ai.onnx.ml.FeatureVectorizer", "tensors")
def feature_vectorizer(at: NodeCall, *xs: Tensor) -> Tensor:
    rows = [ml.astype(x if x.ndim > 1 else ml.expand_dims(x, axis=0), ml.float32) for x in xs]
    return ml.concat(rows, axis=1)


@op("ai.onnx.ml.SVMRegressor", "tensors")
def svm_regressor(at: NodeCall, x: Tensor) -> Tensor:
    x, count = ml.astype(x, ml.float32), at.get("n_supports", 0)
    gamma, shift, degree = at.get("kernel_params") or (0.0, 0.0, 0.0)
    weights = ml.asarray(at["coefficients"], dtype=ml.float32)
    kind = at.get("kernel_type", "LINEAR") if count else "LINEAR"
    vectors = ml.asarray(at["support_vectors"], dtype=ml.float32) if count else weights
    vectors = ml.reshape(vectors, (max(count, 1), -1))
    if kind == "RBF":
        k = ml.exp(-gamma * ml.square(ml.cdist(x, vectors)))
    else:
        k = ml.matmul(x, vectors, transpose_y=True)
        if kind == "POLY":
            k = ml.pow(k * gamma + shift, degree)
        elif kind == "SIGMOID":
            k = ml.tanh(k * gamma + shift)
    y = ml.expand_dims(k @ weights, axis=1) if count else k
    y = y + float(at["rho"][0])
    if at.get("one_class", 0):
        return ml.where(y > 0, ml.ones_like(y), -ml.ones_like(y))
    return transformed(at, y)
