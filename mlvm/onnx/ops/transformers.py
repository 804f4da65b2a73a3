"""Attention, rotary embeddings and embeddings of BERT."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.onnx.arrays import dtype_of
from mlvm.onnx.ops.convnets import normalized
from mlvm.onnx.ops.reductions import widened
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import tensor


def heads(x: Any, count: int) -> Any:
    """Split heads: [N, T, H D] to [N, H, T, D]."""
    n, t, width = x.shape
    return ml.permute_dims(ml.reshape(x, (n, t, count, width // count)), (0, 2, 1, 3))


def joined(x: Any) -> Any:
    """Join heads: [N, H, T, D] to [N, T, H D]."""
    n, h, t, d = x.shape
    return ml.reshape(ml.permute_dims(x, (0, 2, 1, 3)), (n, t, h * d))


def repeated(x: Any, times: int) -> Any:
    """Repeat each head the given number of times."""
    return x if times == 1 else ml.repeat(x, times, axis=1)


def _bias(allowed: Any, dtype: Any) -> Any:
    """Return a bias of scores: 0 where allowed, otherwise -inf."""
    return ml.where(allowed, ml.zeros((), dtype=dtype), ml.full((), -math.inf, dtype=dtype))


def _behind(past: Any, now: Any) -> Any:
    """Append keys or values to the keys or values of earlier calls, if any."""
    return now if past is None else ml.concat([past, now], axis=2)


@op("Attention", "tensors")
def attention(at: NodeCall, q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None,
              past_v: Any = None, lengths: Any = None) -> Any:  # fmt: skip
    is_flat = q.ndim == 3
    if is_flat:
        q = heads(q, at["q_num_heads"])
        k, v = heads(k, at["kv_num_heads"]), heads(v, at["kv_num_heads"])
    dtype, d = q.dtype, q.shape[3]
    half = math.sqrt(at.get("scale") or 1.0 / math.sqrt(d))
    present_k, present_v = k, v = _behind(past_k, k), _behind(past_v, v)
    t, s = q.shape[2], k.shape[2]
    offset: Any = 0 if past_k is None else past_k.shape[2]
    rows, columns = ml.reshape(ml.arange(t), (t, 1)), ml.reshape(ml.arange(s), (1, s))
    bias: Any = None
    if mask is not None:
        fill = s - mask.shape[-1]
        if fill > 0:
            widths = [*[(0, 0)] * (mask.ndim - 1), (0, fill)]
            if mask.dtype == ml.bool:
                mask = ml.astype(ml.pad(ml.astype(mask, ml.uint8), widths), ml.bool)
            else:
                mask = ml.pad(mask, widths, -math.inf)
        bias = _bias(mask, dtype) if mask.dtype == ml.bool else ml.astype(mask, dtype)
    left, right = at.get("left_window_size", -1), at.get("right_window_size", -1)
    where = rows + offset
    own = None if lengths is None else ml.reshape(ml.astype(lengths, ml.int64), (-1, 1, 1, 1))
    if past_k is None and own is not None:
        where = ml.reshape(rows, (1, 1, t, 1)) + (own - t)
    limits = []
    if at.get("is_causal", 0):
        limits.append(ml.less_equal(columns, where))
    if left >= 0:
        limits.append(ml.less_equal(where - columns, left))
    if right >= 0:
        limits.append(ml.less_equal(columns - where, right))
    if own is not None:
        limits.append(ml.less(ml.reshape(columns, (1, 1, 1, s)), own))
    for allowed in limits:
        bias = _bias(allowed, dtype) if bias is None else bias + _bias(allowed, dtype)
    times = q.shape[1] // k.shape[1]
    k, v = repeated(k, times), repeated(v, times)
    scores = ml.matmul(q * half, k * half, transpose_y=True)
    mode, cap = at.get("qk_matmul_output_mode", 0), at.get("softcap", 0.0)
    shown = scores
    if cap:
        scores = ml.tanh(scores / cap) * cap
        shown = scores if mode == 1 else shown
    scores = scores if bias is None else scores + bias
    shown = scores if mode == 2 else shown
    number = at.get("softmax_precision")
    wide = scores if number is None else ml.astype(scores, dtype_of(number, "it"))
    if bias is not None:  # a row without allowed positions is zero
        none = ml.equal(ml.max(bias, axis=-1, keepdims=True), -math.inf)
        wide = ml.where(none, ml.zeros((), dtype=wide.dtype), wide)
        share = ml.softmax(wide, axis=-1)
        share = ml.where(none, ml.zeros((), dtype=share.dtype), share)
    else:
        share = ml.softmax(wide, axis=-1)
    share = ml.astype(share, dtype)
    shown = share if mode == 3 else shown
    y = ml.matmul(share, v)
    return joined(y) if is_flat else y, present_k, present_v, ml.astype(shown, dtype)


@op("ai.onnx.preview.FlexAttention", "tensors")
def flex_attention(at: NodeCall, q: Any, k: Any, v: Any) -> Any:
    half = math.sqrt(at.get("scale") or 1.0 / math.sqrt(q.shape[3]))
    times = q.shape[1] // k.shape[1]
    k, v = repeated(k, times), repeated(v, times)
    dtype, number = q.dtype, at.get("softmax_precision")
    wide = ml.float64 if dtype == ml.float64 else ml.float32
    wide = wide if number is None else dtype_of(number, "it")
    scores = ml.astype(ml.matmul(q * half, k * half, transpose_y=True), wide)
    if at.get("score_mod") is not None:
        scores = tensor(at.scope.call(at["score_mod"], [scores])[0])
    share = ml.softmax(scores, axis=-1)
    if at.get("prob_mod") is not None:
        share = tensor(at.scope.call(at["prob_mod"], [share])[0])
    return ml.astype(ml.matmul(ml.astype(share, wide), ml.astype(v, wide)), dtype)


@op("LinearAttention com.microsoft.LinearAttention", "tensors", state_window=0)
def linear_attention(at: NodeCall, q: Any, k: Any, v: Any, past: Any = None, decay: Any = None,
                     beta: Any = None) -> Any:  # fmt: skip
    dtype, count, kv_heads = q.dtype, at["q_num_heads"], at["kv_num_heads"]
    rule = at.get("update_rule", "gated_delta")
    n, t, _ = q.shape
    if (decay is None and "gated" in rule) or (beta is None and "delta" in rule):
        raise ModelError(f"expected the operands of update_rule={rule!r}, got no decay or no beta")
    pairs = (q, count), (k, kv_heads), (v, kv_heads)
    q, k, v = (ml.astype(heads(*pair), ml.float32) for pair in pairs)
    dk, dv = k.shape[3], v.shape[3]
    state = (
        ml.zeros((n, kv_heads, dk, dv), dtype=ml.float32)
        if past is None
        else ml.astype(past, ml.float32)
    )
    scale = at.get("scale", 0.0) or 1.0 / math.sqrt(max(dk, 1))
    if decay is not None:
        decay = ml.exp(ml.astype(heads(decay, kv_heads), ml.float32))
    if beta is not None:
        beta = ml.permute_dims(ml.reshape(beta, (n, t, beta.shape[2], 1)), (0, 2, 1, 3))
        beta = ml.astype(beta, ml.float32)
    outputs = []
    for i in range(t):
        key, value = k[:, :, i], v[:, :, i]
        if rule in ("gated", "gated_delta"):
            state = state * ml.expand_dims(decay[:, :, i], axis=-1)
        if rule in ("delta", "gated_delta"):
            prediction = ml.sum(state * ml.expand_dims(key, axis=-1), axis=2)
            value = beta[:, :, i] * (value - prediction)
        state = state + ml.expand_dims(key, axis=-1) * ml.expand_dims(value, axis=2)
        by_head = repeated(state, max(count // kv_heads, 1))
        query = ml.expand_dims(repeated(q[:, :, i], max(kv_heads // count, 1)), axis=-1)
        outputs.append(ml.sum(by_head * query, axis=2) * scale)
    y = ml.stack(outputs, axis=2) if outputs else ml.zeros((n, max(count, kv_heads), 0, dv))
    return ml.astype(joined(y), dtype), ml.astype(state, dtype if past is None else past.dtype)


@op("CausalConvWithState com.microsoft.CausalConvWithState", "tensors", dilation=1, ndim=1,
    state_window=0, state_length=0, state_channels_last=-1, state_update_capacity=0,
    channels_last=0, input_channels=0, input_channel_offset=0)  # fmt: skip
def causal_conv_with_state(at: NodeCall, x: Any, w: Any, b: Any = None, past: Any = None) -> Any:
    n, c, _ = x.shape
    k = w.shape[2]
    before = ml.zeros((n, c, k - 1), dtype=x.dtype) if past is None else past
    whole = ml.concat([before, x], axis=2)
    if not c or not x.shape[2]:
        return x, whole[:, :, whole.shape[2] - (k - 1) :]
    y = ml.conv1d(ml.swapaxes(whole, 1, 2), ml.permute_dims(w, (2, 1, 0)), groups=c)
    y = y if b is None else y + b
    y = ml.swapaxes(y, 1, 2)
    if at.get("activation", "none") != "none":
        y = ml.astype(ml.silu(ml.astype(y, ml.float32)), x.dtype)
    return y, whole[:, :, whole.shape[2] - (k - 1) :]


def rotated(x: Any, cos: Any, sin: Any, width: int, interleaved: bool) -> Any:
    """Rotate pairs of the first `width` features: x [N, T, H, D], cos and sin [N, T, 1, D / 2]."""
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        turned = ml.reshape(ml.stack([real, imaginary], axis=-1), turned.shape)
    else:
        turned = ml.concat([real, imaginary], axis=-1)
    return ml.concat([turned, rest], axis=-1) if rest.shape[-1] else turned


def _turned(x: Any, count: int, cos: Any, sin: Any, width: int, interleaved: bool) -> Any:
    """Rotate x [N, T, count D] or [N, H, T, D]."""
    if x.ndim == 3:
        rows = ml.reshape(x, (*x.shape[:2], count, x.shape[2] // count))
        return ml.reshape(rotated(rows, cos, sin, width, interleaved), x.shape)
    swap = 0, 2, 1, 3
    return ml.permute_dims(rotated(ml.permute_dims(x, swap), cos, sin, width, interleaved), swap)


@op("RotaryEmbedding", "tensors")
def rotary_embedding(at: NodeCall, x: Any, cos: Any, sin: Any, places: Any = None) -> Any:
    count = at["num_heads"] if x.ndim == 3 else 1
    if places is not None:
        cos, sin = (ml.take(c, places, axis=0) for c in (cos, sin))
    width = at.get("rotary_embedding_dim", 0) or x.shape[-1] // count
    if cos.shape[-1] * 2 != width:
        raise ModelError(f"expected caches of {width // 2} columns, got {cos.shape[-1]}")
    cos, sin = ml.expand_dims(cos, axis=2), ml.expand_dims(sin, axis=2)
    return _turned(x, count, cos, sin, width, bool(at.get("interleaved", 0)))


@op("com.microsoft.RotaryEmbedding", "tensors", is_packed_batching=0, scale=1.0)
def rotary_of_microsoft(at: NodeCall, x: Any, places: Any, cos: Any, sin: Any) -> Any:
    full = cos.shape[-1] * 2
    width = at.get("rotary_embedding_dim", 0) or full
    count = at.get("num_heads", 0) or x.shape[-1] // full
    n, t = x.shape[0], x.shape[-2]
    if places.size == 1:
        places = ml.reshape(places, (1, 1)) + ml.reshape(ml.arange(t, dtype=places.dtype), (1, t))
    places = ml.expand_dims(ml.broadcast_to(places, (n, t)), axis=2)
    cos, sin = (ml.take(c, places, axis=0) for c in (cos, sin))
    return _turned(x, count, cos, sin, width, bool(at.get("interleaved", 0)))


def _hidden(at: NodeCall, mask: Any, n: int, t: int, s: int, dtype: Any) -> Any:
    """Return a bias of scores that hides keys.

    A mask of two or three axes has a 0 for each hidden key. A mask of one axis contains the ends of
    the keys [N]. After them, it may contain their starts [2 N], or positions of packed sequences
    [3 N + 2], which are not needed.
    """
    if mask.shape in ((n,), (2 * n,), (3 * n + 2,)):
        columns = ml.arange(s, dtype=mask.dtype)
        shown = ml.less(columns, ml.reshape(mask[:n], (n, 1)))
        if mask.shape[0] == 2 * n:
            starts = ml.reshape(mask[n:], (n, 1))
            shown = ml.logical_and(shown, ml.greater_equal(columns, starts))
    elif mask.shape in ((n, s), (n, t, s)):
        shown = ml.greater(mask, 0)
    else:
        raise ModelError(
            f"expected a mask of the shape {[n]}, {[2 * n]}, {[n, s]} or {[n, t, s]}, got "
            f"{list(mask.shape)}"
        )
    least = ml.full((), at.get("mask_filter_value", -1e4), dtype=dtype)
    bias = ml.where(shown, ml.zeros((), dtype=dtype), least)
    return ml.expand_dims(bias, axis=(1, 2) if mask.ndim < 3 else 1)


def _attended(at: NodeCall, q: Any, k: Any, v: Any, mask: Any, added: Any) -> tuple[Any, Any]:
    """Compute attention of [N, H, T, D]; return the result [N, T, H D] and the scores."""
    (n, _, t, d), s, dtype = q.shape, k.shape[2], q.dtype
    scale = at.get("scale", 0.0) or 1.0 / math.sqrt(d)
    scores = widened(ml, ml.matmul(q * scale, k, transpose_y=True))  # f16 rounds -1e4 + x to -1e4
    scores = scores if added is None else scores + added
    if mask is not None and mask.shape not in ((n, 1), (1, 1)):  # these are placeholders
        scores = scores + _hidden(at, mask, n, t, s, scores.dtype)
    if at.get("unidirectional", 0):
        allowed = np.arange(s)[None, :] <= np.arange(t)[:, None] + (s - t)
        scores = scores + _bias(ml.asarray(allowed), scores.dtype)
    share = ml.astype(ml.softmax(scores, axis=-1), dtype)
    return joined(ml.matmul(share, v)), ml.astype(scores, dtype)


def _parts(x: Any, count: int) -> list[Any]:
    """Unpack queries, keys and values, or two of them: [N, T, H, count, D] to [N, T, H D]."""
    n, t, h, _, d = x.shape
    return [ml.reshape(x[:, :, :, i], (n, t, h * d)) for i in range(count)]


@op("com.microsoft.MultiHeadAttention", "tensors")
def multi_head_attention(at: NodeCall, q: Any, k: Any = None, v: Any = None, bias: Any = None,
                         mask: Any = None, added: Any = None, past_k: Any = None,
                         past_v: Any = None) -> Any:  # fmt: skip
    count = at["num_heads"]
    if q.ndim == 5:
        q, k, v = _parts(q, 3)
    elif k is not None and k.ndim == 5:
        k, v = _parts(k, 2)
    if k is None or v is None:
        raise ModelError(f"expected keys and values with {q.ndim} axes of queries, got none")
    if bias is not None:
        q, k = q + bias[: q.shape[2]], k + bias[q.shape[2] : q.shape[2] + k.shape[2]]
        v = v + bias[q.shape[2] + k.shape[2] :]
    q, *pair = (x if x.ndim == 4 else heads(x, count) for x in (q, k, v))
    k, v = (_behind(*each) for each in zip((past_k, past_v), pair, strict=True))
    y, scores = _attended(at, q, k, v, mask, added)
    return y, k, v, scores


@op("com.microsoft.DecoderMaskedMultiHeadAttention", "tensors", host=[7])
def decoder_masked_attention(at: NodeCall, q: Any, k: Any = None, v: Any = None, mask: Any = None,
                             added: Any = None, past_k: Any = None, past_v: Any = None,
                             past_length: Any = None, beams: Any = None, origins: Any = None,
                             bias: Any = None) -> Any:  # fmt: skip
    if beams is not None or origins is not None:
        raise ModelError("beams are not supported")
    if k is None:
        q, k, v = ml.split(q, 3, axis=2)
    if past_k is None or not at.get("past_present_share_buffer", 0):
        return multi_head_attention(at, q, k, v, bias, mask, added, past_k, past_v)
    if past_length is None:
        raise ModelError("expected past_sequence_length with past_present_share_buffer, got none")
    length, room = int(past_length.reshape(-1)[0]), past_k.shape[2]
    past = [x[:, :, :length] for x in (past_k, past_v)]
    y, k, v, scores = multi_head_attention(at, q, k, v, bias, mask, added, *past)
    pairs = (past_k, k), (past_v, v)
    return y, *(_put(x, new[:, :, length:], length, room) for x, new in pairs), scores


@op("com.microsoft.Attention", "tensors", do_rotary=0, past_present_share_buffer=0)
def attention_of_microsoft(at: NodeCall, x: Any, w: Any, bias: Any = None, mask: Any = None,
                           past: Any = None, added: Any = None) -> Any:  # fmt: skip
    y = ml.matmul(x, w)
    return projected_attention(at, y if bias is None else y + bias, mask, past, added)


def projected_attention(at: NodeCall, y: Any, mask: Any, past: Any, added: Any = None) -> Any:
    """Compute attention of queries, keys and values in the last axis of y, and the next past."""
    count, whole = at["num_heads"], y.shape[2]
    sizes = at.get("qkv_hidden_sizes") or [whole // 3] * 3
    if len(sizes) != 3 or sum(sizes) != whole:
        raise ModelError(f"expected three sizes with the sum {whole}, got {list(sizes)}")
    parts = ml.split(y, [sizes[0], sizes[0] + sizes[1]], axis=2)
    q, k, v = (heads(part, count) for part in parts)
    if past is not None:
        k, v = _behind(past[0], k), _behind(past[1], v)
    y, _ = _attended(at, q, k, v, mask, added)
    return (y, ml.stack([k, v])) if any(at.node.outputs[1:]) else y


@op("com.microsoft.GroupQueryAttention", "tensors", host=[6], causal=1, k_quant_type="NONE",
    v_quant_type="NONE", kv_cache_bit_width=0, qk_output=0, sliding_window_cache=0)  # fmt: skip
def group_query_attention(at: NodeCall, q: Any, k: Any = None, v: Any = None, past_k: Any = None,
                          past_v: Any = None, ends: Any = None, total: Any = None, cos: Any = None,
                          sin: Any = None, places: Any = None, added: Any = None,
                          sink: Any = None) -> Any:  # fmt: skip
    count, kv_heads = at["num_heads"], at["kv_num_heads"]
    if k is None:
        d = q.shape[2] // (count + 2 * kv_heads)
        q, k, v = ml.split(q, [count * d, (count + kv_heads) * d], axis=2)
    q, k, v = heads(q, count), heads(k, kv_heads), heads(v, kv_heads)
    n, _, t, d = q.shape
    room = 0 if past_k is None else past_k.shape[2]
    length = room + t if total is None else int(total.reshape(-1)[0])
    if t > length or (past_k is None and t < length):
        raise ModelError(f"expected {length} keys in total, got {room} past keys and {t} new keys")
    if t == length:  # a prompt
        before: Any = 0
    elif n == 1 or ends is None:
        before = length - t
    else:
        before = ml.reshape(ml.astype(ends, ml.int64) + (1 - t), (n, 1))
    where = ml.reshape(ml.arange(t, dtype=ml.int64), (1, t)) + before  # [N or 1, t]
    if at.get("do_rotary", 0):
        if cos is None or sin is None:
            raise ModelError("expected cos_cache and sin_cache with do_rotary, got none")
        own = ml.reshape(ml.broadcast_to(where, (n, t)) if places is None else places, (n, t, 1))
        turns, tilts = (ml.take(c, own, axis=0) for c in (cos, sin))
        width, turn = cos.shape[1] * 2, bool(at.get("rotary_interleaved", 0))
        q, k = (_turned(x, 0, turns, tilts, width, turn) for x in (q, k))
    present = [_put(past, x, before, max(room, length)) for past, x in ((past_k, k), (past_v, v))]
    k, v = (repeated(x[:, :, :length], count // kv_heads) for x in present)
    scale = at.get("scale", 0.0) or 1.0 / math.sqrt(d)
    scores = ml.matmul(q * scale, k, transpose_y=True)
    cap, window = at.get("softcap", 0.0), at.get("local_window_size", -1)
    scores = ml.tanh(scores / cap) * cap if cap else scores
    scores = scores if added is None else scores + added[..., :length]
    where, columns = ml.expand_dims(where, axis=-1), ml.arange(length, dtype=ml.int64)
    allowed = ml.less_equal(columns, where)
    if window > 0:
        allowed = ml.logical_and(allowed, ml.greater(columns, where - window))
    scores = scores + ml.expand_dims(_bias(allowed, q.dtype), axis=1)
    if sink is None and at.get("smooth_softmax", 0):
        sink = ml.zeros((count,), dtype=q.dtype)
    if sink is not None:  # a score that takes a share of the softmax without a value
        own = ml.broadcast_to(ml.reshape(sink, (1, count, 1, 1)), (n, count, t, 1))
        scores = ml.concat([scores, ml.astype(own, q.dtype)], axis=-1)
    return joined(ml.matmul(ml.softmax(scores, axis=-1)[..., :length], v)), *present


def _put(past: Any, x: Any, before: Any, room: int) -> Any:
    """Store rows [N, H, t, D] after the first `before` rows of each batch, in `room` rows."""
    if isinstance(before, int):
        parts = [x] if past is None else [past[:, :, :before], x, past[:, :, before + x.shape[2] :]]
        return parts[0] if len(parts) == 1 else ml.concat(parts, axis=2)
    t, columns = x.shape[2], ml.arange(room, dtype=ml.int64)
    source = columns - before  # [N, room]
    is_new = ml.logical_and(ml.greater_equal(source, 0), ml.less(source, t))
    index = ml.reshape(ml.clip(source, 0, t - 1), (x.shape[0], 1, room, 1))
    new = ml.take_along_axis(x, index, axis=2)
    old = ml.pad(past, [(0, 0), (0, 0), (0, room - past.shape[2]), (0, 0)])
    return ml.where(ml.reshape(is_new, (x.shape[0], 1, room, 1)), new, old)


def embedded(at: NodeCall, parts: Any, scale: Any, bias: Any, mask: Any) -> Any:
    """Normalize the sum of embeddings; return also the number of words, and the sum."""
    y = reduce(ml.add, [x for x in parts if x is not None])
    normal = normalized(y, scale, bias, 2, at.get("epsilon", 1e-12))
    counts = ml.zeros((y.shape[0],), dtype=ml.int32)
    if mask is not None:
        counts = ml.astype(ml.sum(ml.equal(mask, 1), axis=1), ml.int32)
    return normal, counts, y


def segment_rows(kinds: Any, segments: Any, ids: Any) -> Any:
    """Look up the embeddings of segments; without segments, all are segment 0."""
    if kinds is None:
        if segments is not None:
            raise ModelError("expected segment_embedding besides segment_ids, got none")
        return None
    return ml.take(kinds, ml.zeros_like(ids) if segments is None else segments, axis=0)


@op("com.microsoft.EmbedLayerNormalization", "tensors", absent=[1])
def embed_layer_normalization(at: NodeCall, ids: Any, segments: Any, words: Any, positions: Any,
                              kinds: Any = None, scale: Any = None, bias: Any = None,
                              mask: Any = None, places: Any = None) -> Any:  # fmt: skip
    by_place = positions[: ids.shape[1]] if places is None else ml.take(positions, places, axis=0)
    parts = ml.take(words, ids, axis=0), by_place, segment_rows(kinds, segments, ids)
    return embedded(at, parts, scale, bias, mask)
