"""Mixtures of experts of `com.microsoft`. All experts are computed for all rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.onnx.ops.elementwise import gated
from mlvm.onnx.ops.qlinear import low_bit_rows, scales_of_rows
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, tensor

_ACTIVATIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "relu": ml.relu,
    "gelu": ml.gelu,
    "silu": ml.silu,
    "identity": lambda x: x,
}


def _shares(at: NodeCall, logits: Any, weights: Any) -> Any:
    """Return the share of each expert in the result of each row, f32[T, E]."""
    best, places = ml.topk(ml.softmax(ml.astype(logits, ml.float32), axis=-1), at.get("k", 1))
    if weights is not None:
        best = ml.take_along_axis(ml.astype(weights, ml.float32), places, axis=-1)
    if at.get("normalize_routing_weights", 0):
        best = best / ml.sum(best, axis=-1, keepdims=True)
    chosen = ml.one_hot(places, logits.shape[-1], dtype=ml.float32)
    return ml.sum(ml.expand_dims(best, axis=-1) * chosen, axis=-2)


def _mixed(at: NodeCall, x: Any, shares: Any, first: Any, second: Any, third: Any) -> Any:
    """Sum the results of experts. The products map f[T, K] or f[E, T, K] to f[E, T, N]."""
    rows = ml.reshape(x, (-1, x.shape[-1]))
    how, fusion, y = at.get("activation_type", "relu"), at.get("swiglu_fusion", 0), first(rows)
    if how == "swiglu":
        if fusion == 0 and third is None:
            raise ModelError("expected the weights fc3 with swiglu_fusion=0, got none")
        pair = (y[..., 0::2], y[..., 1::2]) if fusion == 1 else ml.split(y, 2, axis=-1)
        alpha, beta = at.get("activation_alpha", 1.0), at.get("activation_beta", 0.0)
        gate, up = pair if fusion else (y, third(rows))
        y = gated(gate, up, alpha, beta, at.get("swiglu_limit", math.inf))
    elif how in _ACTIVATIONS:
        y = _ACTIVATIONS[how](y)
        y = y if third is None else y * third(rows)
    else:
        names = ", ".join(_ACTIVATIONS)
        raise ModelError(f"expected activation_type as swiglu, {names}, got {how!r}")
    y = ml.astype(second(y), ml.float32) * ml.expand_dims(ml.matrix_transpose(shares), axis=-1)
    return ml.astype(ml.reshape(ml.sum(y, axis=0), x.shape), x.dtype)


def _product(w: Any, bias: Any, x: Any) -> Any:
    y = ml.matmul(x, w, transpose_y=True)
    return y if bias is None else y + ml.expand_dims(bias, axis=1)


@op("com.microsoft.MoE", "tensors", absent=[3], use_sparse_mixer=0, swiglu_limit_after_activation=0)
def mixture(at: NodeCall, x: Any, logits: Any, w1: Any, b1: Any, w2: Any, b2: Any = None,
            w3: Any = None, b3: Any = None) -> Any:  # fmt: skip
    third = None if w3 is None else partial(_product, w3, b3)
    products = partial(_product, w1, b1), partial(_product, w2, b2), third
    return _mixed(at, x, _shares(at, logits, None), *products)


def _bits(node: Any, number: int) -> int:
    """Return the bits of the weights of a layer."""
    own = node.attributes.get(f"fc{number}_expert_weight_bits")
    bits: int = own or node.attributes.get("expert_weight_bits", 4)
    return bits


def _pack(number: int, zeros: int) -> Any:
    """Return the function that packs the weights of a layer, with the operand of its zeros."""

    def pack(xp: Any, node: Any, w: Any) -> Any:
        if node.attributes.get("weights_prepacked", -1) not in (-1, 0):
            raise ModelError(f"{node}: packed weights are not supported; export them as they are")
        rows = w.reshape(w.shape[0] * w.shape[1], -1)
        return low_bit_rows(xp, node, rows, _bits(node, number), zeros)

    return pack


def _quantized(at: NodeCall, number: int, w: Any, scales: Any, zeros: Any, bias: Any) -> Any:
    """Return the product with quantized weights, rows [E N, K] of all experts."""
    (count, n, *rest), scales = scales.shape, tensor(scales)
    shape = count * n, rest[0] if rest else 1
    if rest:
        scales = ml.reshape(scales, shape)
    by = scales_of_rows(scales, zeros, _bits(at.node, number), shape)

    def product(x: Any) -> Any:
        wide = ml.astype(x, ml.float32)
        if wide.ndim == 2:
            y = ml.reshape(ml.quantized_matmul(wide, w, by), (wide.shape[0], count, n))
            y = ml.permute_dims(y, (1, 0, 2))
        else:
            each = [ml.arange(i * n, i * n + n) for i in range(count)]
            rows = [ml.dequantize_rows(indices, w, by) for indices in each]
            y = ml.stack([ml.matmul(wide[i], rows[i], transpose_y=True) for i in range(count)])
        return y if bias is None else y + ml.expand_dims(tensor(bias), axis=1)

    return product


@op("com.microsoft.QMoE", "raw", packed={2: _pack(1, 11), 5: _pack(2, 12), 8: _pack(3, 13)},
    absent=[4, 7], quant_type="int", use_sparse_mixer=0,
    swiglu_limit_after_activation=0)  # fmt: skip
def quantized_mixture(
    at: NodeCall, x: Value, logits: Value, w1: Value, s1: Value, b1: Value, w2: Value, s2: Value,
    b2: Value = None, w3: Value = None, s3: Value = None, b3: Value = None, z1: Value = None,
    z2: Value = None, z3: Value = None, weights: Value = None,
) -> Value:  # fmt: skip
    if weights is None and not at.get("normalize_routing_weights", 0):
        raise ModelError(
            "expected normalize_routing_weights=1, or router_weights: without them, onnxruntime "
            "normalizes on processors and does not on GPUs"
        )
    weights = weights if weights is None else tensor(weights)
    layers = [(1, w1, s1, z1, b1), (2, w2, s2, z2, b2), (3, w3, s3, z3, b3)]
    products = [None if each[1] is None else _quantized(at, *each) for each in layers]
    return _mixed(at, tensor(x), _shares(at, tensor(logits), weights), *products)
