"""The layers of transformers, beside numpy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.brief import cases, refuses
from tests.eager.nn.checks import check, f64, normal, randomized
from tests.eager.nn.test_attention import in_heads

TRI = np.tri(4, dtype=bool)


def normalized(w: dict[str, Array], part: int, x: Array) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    result: Array = (x - mean) / np.sqrt(var + 1e-6) * w[f"norm_{part}/scale"]
    return result + w[f"norm_{part}/bias"]


def below(w: dict[str, Array], name: str) -> dict[str, Array]:
    return {k.removeprefix(name): x for k, x in w.items() if k.startswith(name)}


def expected(
    w: dict[str, Array], x: Array, memory: Array | None, mask: Array, seen_memory: Array, pre: bool
) -> Array:
    parts: list[Any] = [lambda x: in_heads(below(w, "attention/"), x, x, mask, 2)]
    if memory is not None:
        of_memory = below(w, "memory_attention/")
        parts.append(lambda x: in_heads(of_memory, x, memory, seen_memory, 2))
    parts.append(
        lambda x: (
            np.maximum(x @ w["hidden/kernel"] + w["hidden/bias"], 0) @ w["out/kernel"]
            + w["out/bias"]
        )
    )
    for i, part in enumerate(parts):
        x = x + part(normalized(w, i, x)) if pre else normalized(w, i, x + part(x))
    return x


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_layers(pre: bool, causal: bool) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 5, pre_norm=pre, dtype="f64")
    w, x = randomized(layer), normal(2, 4, 6)
    mask = np.array([True, True, True, False])
    y = layer(ml.asarray(x), mask=ml.asarray(mask), is_causal=causal)
    visible = mask & TRI if causal else np.broadcast_to(mask, (4, 4))
    reference = expected(w, x, None, visible, visible, pre)
    np.testing.assert_allclose(y.numpy(), reference, rtol=1e-9, atol=1e-12)
    check(lambda layer, x: layer(x, is_causal=causal), layer, f64(1, 3, 6), tolerance=1e-5)


@pytest.mark.parametrize("pre", [False, True])
def test_decoder_layers(pre: bool) -> None:
    layer = nn.TransformerDecoderLayer(6, 2, memory_dim=4, pre_norm=pre, dtype="f64")
    assert layer.hidden.kernel.shape == (6, 24)
    w, x, memory = randomized(layer), normal(2, 4, 6), normal(2, 3, 4)
    mask = np.array([[True, True, False]])
    options: tuple[tuple[dict[str, Any], Array], ...] = (
        ({}, TRI),
        ({"is_causal": False}, np.ones((4, 4), bool)),
    )
    for causal, visible in options:
        y = layer(ml.asarray(x), ml.asarray(memory), memory_mask=ml.asarray(mask), **causal)
        reference = expected(w, x, memory, visible, np.broadcast_to(mask, (4, 3)), pre)
        np.testing.assert_allclose(y.numpy(), reference, rtol=1e-9, atol=1e-12)
    check(lambda layer, x, m: layer(x, m), layer, f64(1, 2, 6), f64(1, 3, 4), tolerance=1e-5)


@cases(
    "make, memory",
    (lambda: nn.TransformerEncoderLayer(8, 4, num_kv_heads=2, rotary_base=10.0), False),
    (lambda: nn.TransformerDecoderLayer(8, 2, pre_norm=True), True),
)
def test_a_cache_gives_what_the_whole_sequence_gives(make: Any, memory: bool) -> None:
    layer = make().astype(ml.float64).eval()
    x, others = f64(2, 5, 8), [f64(2, 3, 8)] if memory else []
    whole = layer(x, *others, is_causal=True).numpy()
    cache, outputs = layer.init_cache(2, 6), []
    for first, end in ((0, 2), (2, 3), (3, 5)):
        y, cache = layer(x[:, first:end], *others, cache=cache, position=first)
        outputs.append(y.numpy())
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=1e-10, atol=1e-13)


def test_what_is_refused() -> None:
    error = ml.errors.ArgumentError
    refuses(error, "expected hidden_dim as", nn.TransformerEncoderLayer, 4, 2, 0)
    refuses(error, "that divides embed_dim", nn.TransformerDecoderLayer, 4, 3)
    layer = nn.TransformerDecoderLayer(4, 2)
    refuses(ml.errors.ShapeError, "the memory as", layer, ml.ones((1, 2, 4)), ml.ones((2, 2, 4)))
