"""Fourier transforms and window functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.rules import normalize_axis
from mlvm.onnx.arrays import dtype_of
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import bounded


def _complex(x: Any) -> Any:
    """Split a last axis of 1 or 2 into real and imaginary parts."""
    real = x[..., 0]
    imaginary = x[..., 1] if x.shape[-1] == 2 else ml.zeros_like(real)
    return real, imaginary


def _matrix(n: int, k: int, sign: float, dtype: Any) -> tuple[Any, Any]:
    bounded((n, k))
    angle = sign * 2 * math.pi * (np.outer(np.arange(n), np.arange(k)) % max(n, k)) / max(n, k)
    wide = np.float64 if dtype == ml.float64 else np.float32
    return ml.asarray(np.cos(angle).astype(wide)), ml.asarray(np.sin(angle).astype(wide))


@op("DFT", "tensors", host=[1, 2], older={2: "axis"})
def dft(at: NodeCall, x: Any, length: Any = None, axis: Any = None) -> Any:
    default = 1 if at.opset < 20 else -2
    along = normalize_axis(default if axis is None else int(axis.reshape(-1)[0]), x.ndim)
    inverse, one = bool(at.get("inverse", 0)), bool(at.get("onesided", 0))
    n = x.shape[along]
    if length is not None and length.size:
        count = int(length.reshape(-1)[0])
    else:
        count = 2 * (n - 1) if inverse and one else n
    dtype = x.dtype
    if 0 in x.shape:
        bins = count // 2 + 1 if one and not inverse else count
        lengths = [bins if i == along else m for i, m in enumerate(x.shape[:-1])]
        return ml.zeros((*lengths, 1 if inverse and one else 2), dtype=dtype)
    x = x if dtype in (ml.float32, ml.float64) else ml.astype(x, ml.float32)
    real, imaginary = (ml.moveaxis(v, along, -1) for v in _complex(x))
    if inverse and one:
        z = ml.fft.irfft(_joined(real, imaginary), n=count, axis=-1)
        return ml.astype(ml.expand_dims(ml.moveaxis(z, -1, along), axis=-1), dtype)
    z = (ml.fft.ifft if inverse else ml.fft.fft)(_joined(real, imaginary), n=count, axis=-1)
    z = z[..., : count // 2 + 1] if one else z
    parts = ml.stack([ml.real(z), ml.imag(z)], axis=-1)
    return ml.astype(ml.moveaxis(parts, -2, along), dtype)


def _joined(real: Any, imaginary: Any) -> Any:
    kind = ml.complex128 if real.dtype == ml.float64 else ml.complex64
    return ml.astype(real, kind) + ml.astype(imaginary, kind) * 1j


@op("STFT", "tensors", host=[1, 3])
def stft(at: NodeCall, x: Any, step: Any, window: Any = None, length: Any = None) -> Any:
    hop = int(step.reshape(-1)[0])
    size = window.shape[0] if length is None else int(length.reshape(-1)[0])
    count = 1 + (x.shape[1] - size) // hop
    places = np.arange(count)[:, None] * hop + np.arange(size)[None, :]
    frames = ml.take(x, ml.asarray(places), axis=1)
    frames = frames if x.ndim > 2 else ml.expand_dims(frames, axis=-1)
    real, imaginary = _complex(frames)
    if window is not None:
        real, imaginary = real * window, imaginary * window
    bins = size // 2 + 1 if at.get("onesided", 1) else size
    cos, sin = _matrix(size, size, -1.0, x.dtype)
    cos, sin = cos[:, :bins], sin[:, :bins]
    up, side = ml.matmul(real, cos), ml.matmul(real, sin)
    if frames.shape[-1] == 2:
        up, side = up - ml.matmul(imaginary, sin), side + ml.matmul(imaginary, cos)
    return ml.astype(ml.stack([up, side], axis=-1), x.dtype)


@op("HannWindow HammingWindow BlackmanWindow", host=[0])
def window(at: NodeCall, size: Any) -> Any:
    count = bounded((int(size),))[0]
    turn = 2 * np.pi * np.arange(count) / (count if at.get("periodic", 1) else max(count - 1, 1))
    if at.node.type == "BlackmanWindow":
        y = 0.42 - 0.5 * np.cos(turn) + 0.08 * np.cos(2 * turn)
    else:
        a = 0.5 if at.node.type == "HannWindow" else 25 / 46
        y = a - (1 - a) * np.cos(turn)
    return y.astype(dtype_of(at.get("output_datatype", 1), "it").numpy)


@op("MelWeightMatrix", host=[0, 1, 2, 3, 4])
def mel_weight_matrix(at: NodeCall, bins: Any, length: Any, rate: Any, low: Any, high: Any) -> Any:
    count, n = int(bins), int(length)
    bounded((n // 2 + 1, count))
    first, last = (2595 * np.log10(1 + float(f) / 700) for f in (low, high))
    points = np.arange(count + 2) * ((last - first) / (count + 2)) + first
    edges = (((n + 1) * (700 * (10 ** (points / 2595) - 1))) // int(rate)).astype(int)
    filters = np.zeros((n // 2 + 1, count))
    for i, (a, b, c) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        if a == b:
            filters[b, i] = 1
        else:
            filters[a : b + 1, i] = (np.arange(a, b + 1) - a) / (b - a)
        if c > b:
            filters[b:c, i] = (c - np.arange(b, c)) / (c - b)
    return filters.astype(dtype_of(at.get("output_datatype", 1), "it").numpy)
