"""Cases of the neural ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case, Draws

_draws = Draws(5)
_f64, _f32, _distinct = _draws.f64, _draws.f32, _draws.distinct


# --- what must come out ---------------------------------------------------------------


def _gelu(x: Array, approximate: bool = True) -> Any:
    return x * _phi(x, approximate)


def _phi(x: Array, approximate: bool) -> Any:
    if approximate:
        return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes="d")(x)


def _gelu_slope(x: Array, approximate: bool) -> Any:
    if approximate:
        u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        density = 0.5 / np.cosh(u) ** 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    else:
        density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    return _phi(x, approximate) + x * density


def _softmax(x: Array, axis: int = -1) -> Any:
    return np.exp(x) / np.sum(np.exp(x), axis, keepdims=True)


def _log_softmax(x: Array, axis: int = -1) -> Any:
    return x - np.log(np.sum(np.exp(x), axis, keepdims=True))


def _cross_entropy(logits: Array, labels: Array) -> Any:
    loss = np.empty(labels.shape, logits.dtype)
    for i in np.ndindex(labels.shape):
        loss[i] = np.log(np.sum(np.exp(logits[i]))) - logits[i][labels[i]]
    return loss


def _cross_entropy_vjp(g: Array, logits: Array, labels: Array) -> Any:
    one_hot = np.eye(logits.shape[-1])[labels]
    return (_softmax(logits) - one_hot) * np.expand_dims(g, -1)


def _normalize(x: Array, eps: float) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Any:
    return _normalize(x, eps) * scale + bias


def _layer_norm_vjp(g: Array, x: Array, scale: Array, eps: float) -> Any:
    """Row by row with the whole Jacobian: d n_i / d x_j = (δ_ij - 1/K - n_i n_j / K) / σ."""
    k = x.shape[-1]
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape[:-1]):
        n = _normalize(x[i], eps)
        jacobian = (np.eye(k) - 1 / k - np.outer(n, n) / k) / np.sqrt(x[i].var() + eps)
        gradient[i] = (g[i] * scale) @ jacobian
    return gradient


def _layer_norm_scale_vjp(g: Array, x: Array, eps: float) -> Any:
    return (g * _normalize(x, eps)).reshape(-1, x.shape[-1]).sum(0)


def _dropout(x: Array, key: Array, rate: float) -> Any:
    draws = np.random.Generator(np.random.Philox(key=key)).random(x.shape, np.float32)
    return np.where(draws >= rate, x / (1 - rate), 0)


# --- the cases ------------------------------------------------------------------------

_KEY = np.array([7, 1], np.uint64)
_LABELS = np.array([[0, 4, 2], [1, 1, 3]])

CASES: dict[str, list[Case]] = {
    "relu": [
        Case((_distinct(3, 4),), lambda x: np.where(x > 0, x, 0)),
        Case((_f32(5),), lambda x: np.where(x > 0, x, 0)),
    ],
    "gelu": [
        Case((_f64(3, 4),), _gelu),
        Case((_f64(3, 4),), _gelu, {"approximate": False}),
        Case((_f32(2, 5),), _gelu),
        Case((_f32(2, 5),), _gelu, {"approximate": False}),
    ],
    "gelu_slope": [
        Case((_f64(3, 4),), _gelu_slope, {"approximate": True}),
        Case((_f64(3, 4),), _gelu_slope, {"approximate": False}),
        Case((_f32(7),), _gelu_slope, {"approximate": True}),
        Case((_f32(7),), _gelu_slope, {"approximate": False}),
    ],
    "dropout": [
        Case((_f64(4, 5), _KEY), _dropout, {"rate": 0.3}),
        Case((_f32(40, 1000), _KEY), _dropout, {"rate": 0.5}),
    ],
    "softmax": [
        Case((_f64(3, 4),), _softmax),
        Case((_f64(3, 4, 2),), _softmax, {"axis": 1}),
        Case((_f32(3, 4),), _softmax, {"axis": 0}),
    ],
    "log_softmax": [
        Case((_f64(3, 4),), _log_softmax),
        Case((_f64(3, 4, 2),), _log_softmax, {"axis": 1}),
        Case((_f32(3, 4),), _log_softmax, {"axis": 0}),
    ],
    "softmax_cross_entropy": [
        Case((_f64(2, 3, 5), _LABELS), _cross_entropy),
        Case((_f64(4), np.array(2, np.uint8)), _cross_entropy),
        Case((_f32(3, 5), _LABELS[0].astype(np.int32)), _cross_entropy),
    ],
    "softmax_cross_entropy_vjp": [
        Case((_f64(2, 3), _f64(2, 3, 5), _LABELS), _cross_entropy_vjp),
        Case((_f64(), _f64(4), np.array(2, np.uint8)), _cross_entropy_vjp),
        Case((_f32(3), _f32(3, 5), _LABELS[0].astype(np.int32)), _cross_entropy_vjp),
    ],
    "layer_norm": [
        Case((_f64(3, 6), _f64(6), _f64(6)), _layer_norm, {"eps": 1e-5}),
        Case((_f64(5), _f64(5), _f64(5)), _layer_norm, {"eps": 0.1}),
        Case((_f32(2, 3, 6), _f32(6), _f32(6)), _layer_norm, {"eps": 1e-6}),
    ],
    "layer_norm_normalize": [
        Case((_f64(3, 6),), _normalize, {"eps": 1e-5}),
        Case((_f32(2, 3, 6),), _normalize, {"eps": 1e-6}),
    ],
    "layer_norm_vjp": [
        Case((_f64(3, 6), _f64(3, 6), _f64(6)), _layer_norm_vjp, {"eps": 1e-5}),
        Case((_f32(2, 2, 6), _f32(2, 2, 6), _f32(6)), _layer_norm_vjp, {"eps": 1e-6}),
    ],
    "layer_norm_scale_vjp": [
        Case((_f64(3, 6), _f64(3, 6)), _layer_norm_scale_vjp, {"eps": 1e-5}),
        Case((_f64(5), _f64(5)), _layer_norm_scale_vjp, {"eps": 0.1}),
        Case((_f32(2, 2, 6), _f32(2, 2, 6)), _layer_norm_scale_vjp, {"eps": 1e-6}),
    ],
}
