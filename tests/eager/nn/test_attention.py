"""Attention and encodings of positions, beside numpy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.eager.nn.checks import RNG, check, f64, normal, randomized
from tests.slopes import check_slopes
from tests.trees import arrays


def attention(q: Array, k: Array, v: Array, mask: Array, scale: float | None = None) -> Array:
    """One query after the other; zeros where it sees no key."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    mask = np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for place in np.ndindex(q.shape[:-1]):
        visible = mask[place]
        if visible.any():
            weights = np.exp(k[place[:-1]][visible] @ q[place] * scale)
            out[place] = weights @ v[place[:-1]][visible] / weights.sum()
    return out


MASK = np.array(
    [[True, False, True], [False, False, False], [True, True, True], [False, True, True]]
)


@pytest.mark.parametrize("mask", [None, MASK, MASK[:1]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_scaled_dot_product_attention(
    mask: Array | None, causal: bool, scale: float | None
) -> None:
    q, k, v = normal(2, 4, 5), normal(2, 3, 5), normal(2, 3, 6)
    visible = np.ones((4, 3), bool) if mask is None else mask
    if causal:
        visible = visible & np.tri(4, 3, dtype=bool)
    expected = attention(q, k, v, visible, scale)
    mask_tensor = None if mask is None else ml.asarray(mask)
    operands = ml.asarray(q), ml.asarray(k), ml.asarray(v)
    result = ml.scaled_dot_product_attention(*operands, mask_tensor, is_causal=causal, scale=scale)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_queries_share_those_of_keys(masked: bool) -> None:
    q, k, v = normal(2, 6, 4, 5), normal(2, 3, 4, 5), normal(2, 3, 4, 2)
    bits = RNG.random((2, 6, 4, 4)) < 0.6 if masked else np.ones((4, 4), bool)
    expected = attention(q, k.repeat(2, axis=1), v.repeat(2, axis=1), bits & np.tri(4, dtype=bool))
    operands = ml.asarray(q), ml.asarray(k), ml.asarray(v)
    mask = ml.asarray(bits) if masked else None
    result = ml.scaled_dot_product_attention(*operands, mask, is_causal=True)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-14)
    check_slopes(ml.scaled_dot_product_attention, f64(4, 2, 3), f64(2, 3, 3), f64(2, 3, 2))
    one = ml.scaled_dot_product_attention(operands[0], operands[1][:, :1], operands[2][:, :1])
    expected = attention(q, k[:, [0] * 6], v[:, [0] * 6], np.ones((4, 4), bool))
    np.testing.assert_allclose(one.numpy(), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("base", [None, 100.0])
def test_a_layer_with_fewer_heads_of_keys(base: float | None) -> None:
    layer = nn.MultiHeadAttention(8, 4, num_kv_heads=2, rotary_base=base, dtype="f64").eval()
    assert layer.key.kernel.shape == layer.value.kernel.shape == (8, 4)
    w, x = randomized(layer), normal(2, 5, 8)
    q = heads_of(w, "query", x, 4)
    k, v = (heads_of(w, name, x, 2).repeat(2, axis=1) for name in ("key", "value"))
    if base is not None:
        q, k = (ml.rotary_encoding(ml.asarray(each), base=base).numpy() for each in (q, k))
    y = attention(q, k, v, np.tri(5, dtype=bool)).transpose(0, 2, 1, 3).reshape(x.shape)
    expected = y @ w["out/kernel"] + w["out/bias"]
    whole = layer(ml.asarray(x), is_causal=True).numpy()
    np.testing.assert_allclose(whole, expected, rtol=1e-10, atol=1e-13)
    assert layer.init_cache(2, 6)[0].shape == (2, 2, 6, 2)
    check(lambda layer, x: layer(x), layer, f64(1, 3, 8))


def test_a_query_that_sees_no_key_before_it_sees_none_after_it() -> None:
    """The mask lets it see later keys only, which is_causal does not."""
    q, k, v = normal(4, 5), normal(4, 5), normal(4, 6)
    later = ~np.tri(4, dtype=bool)
    operands = [ml.asarray(x) for x in (q, k, v, later)]
    assert not ml.scaled_dot_product_attention(*operands, is_causal=True).numpy().any()


def heads_of(w: dict[str, Array], name: str, x: Array, heads: int) -> Array:
    y = x @ w[f"{name}/kernel"] + w[f"{name}/bias"]
    return y.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def in_heads(w: dict[str, Array], x: Array, memory: Array, mask: Array, heads: int) -> Array:
    q = heads_of(w, "query", x, heads)
    k, v = (heads_of(w, name, memory, heads) for name in ("key", "value"))
    y = attention(q, k, v, mask).transpose(0, 2, 1, 3).reshape(x.shape)
    return y @ w["out/kernel"] + w["out/bias"]


@pytest.mark.parametrize("base", [None, 100.0])
def test_attention_layers_have_gradients(base: float | None) -> None:
    layer = nn.MultiHeadAttention(4, 2, rotary_base=base, dtype="f64")
    check(lambda layer, x: layer(x, cache=layer.init_cache(1, 4), position=0), layer, f64(1, 3, 4))


@pytest.mark.parametrize("base", [None, 100.0])
def test_a_cache_gives_what_the_whole_sequence_gives(base: float | None) -> None:
    """In parts of 2, 1, 1 and 2 positions, the last but one at a position that is a tensor."""
    layer = nn.MultiHeadAttention(8, 2, rotary_base=base, dtype="f64").eval()
    x = f64(2, 6, 8)
    whole = layer(x, is_causal=True).numpy()
    cache, outputs = layer.init_cache(2, 7), []
    before = arrays(cache)[:2]
    for first, end in ((0, 2), (2, 3), (3, 4), (4, 6)):
        at: Any = ml.asarray(first) if first == 3 else first
        y, cache = layer(x[:, first:end], cache=cache, position=at)
        outputs.append(y.numpy())
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=1e-10)
    assert not np.any(before)
    assert not cache[0].numpy()[:, :, 6:].any()
    mask = ml.asarray(np.array([False, True, True, True, True, True, True]))
    y, _ = layer(x[:, 5:6], cache=cache, position=5, mask=mask)
    y_whole = layer(x, is_causal=True, mask=mask[:6])
    np.testing.assert_allclose(y.numpy(), y_whole.numpy()[:, 5:6], rtol=1e-10)


def test_generation_is_one_captured_loop() -> None:
    """Each position's output is the next position's input, until there are as many as asked for;
    one program serves any number of them."""
    layer = nn.MultiHeadAttention(4, 2, rotary_base=10.0, dtype="f64").eval()
    begin = f64(1, 1, 4)

    def generate(x: ml.Tensor, count: ml.Tensor) -> Any:
        def turn(state: Any) -> Any:
            i, x, cache, out = state
            y, cache = layer(x, cache=cache, position=i)
            return i + 1, y, cache, ml.dynamic_update(out, y[0], i)

        state = (0, x, layer.init_cache(1, 5), ml.zeros((5, 4), dtype="f64"))
        return ml.while_loop(lambda state: state[0] < count, turn, state)[3]

    step, x = ml.capture(generate, fuse=False), [begin.numpy()[0, 0]]
    for _ in range(5):
        sequence = ml.asarray(np.array(x)[None])
        x.append(layer(sequence, is_causal=True).numpy()[0, -1])
    for count in (5, 2):
        expected = np.where(np.arange(5)[:, None] < count, x[1:], 0)
        eager = generate(begin, ml.asarray(count)).numpy()
        np.testing.assert_allclose(eager, expected, rtol=1e-9)
        np.testing.assert_array_equal(step(begin, ml.asarray(count)).numpy(), eager)
    assert "1 program>" in repr(step)


def test_dropout_of_weights_is_for_training() -> None:
    layer, x = nn.MultiHeadAttention(4, 2, dropout=0.5), ml.ones((2, 8, 4))
    assert (layer(x).numpy() != layer(x).numpy()).any()
    layer.eval()
    np.testing.assert_array_equal(layer(x).numpy(), layer(x).numpy())


# --- positions -----------------------------------------------------------------------


def test_sinusoidal_encoding() -> None:
    positions = np.array([[0, 1, 7], [2, 5000, 3]])
    expected = np.empty((2, 3, 6))
    for i in range(3):
        angle = positions / 10000 ** (2 * i / 6)
        expected[..., 2 * i], expected[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    result = ml.sinusoidal_encoding(ml.asarray(positions), 6, dtype="f64").numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)
    assert ml.sinusoidal_encoding(ml.asarray(3), 4).type == ml.ones(4).type


def test_rotary_encoding() -> None:
    """Pairs as complex numbers, times exp(i position rate)."""
    x, positions = normal(2, 3, 4, 6), np.array([3, 0, 100_000, 1])
    rates = 500.0 ** (-2 * np.arange(3) / 6)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * positions[:, None] * rates)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    result = ml.rotary_encoding(ml.asarray(x), ml.asarray(positions), base=500.0)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-9, atol=1e-11)
    single = ml.rotary_encoding(ml.asarray(x.astype(np.float32)), ml.asarray(positions), base=500.0)
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-5, atol=1e-5)
    at_rest = ml.rotary_encoding(ml.asarray(x))
    in_order = ml.rotary_encoding(ml.asarray(x), ml.arange(4))
    np.testing.assert_array_equal(at_rest.numpy(), in_order.numpy())
