"""Random draws with the keys of `ml.random`."""

from __future__ import annotations

from typing import Any

import mlvm.eager as ml
from mlvm.core.types import DType
from mlvm.onnx.arrays import dtype_of
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, bounded


def _key(at: NodeCall) -> Any:
    seed = at.get("seed")
    return {} if seed is None else {"key": ml.random.key(abs(int(seed)))}


def _drawn(at: NodeCall, shape: Any, dtype: Any) -> Any:
    wide = dtype if dtype in (ml.float32, ml.float64) else ml.float32
    if "Normal" in at.node.type:
        y = ml.random.normal(shape, dtype=wide, **_key(at))
        y = y * at.get("scale", 1.0) + at.get("mean", 0.0)
    else:
        low, high = at.get("low", 0.0), at.get("high", 1.0)
        y = ml.random.uniform(shape, dtype=wide, **_key(at)) * (high - low) + low
    return y if wide is dtype else ml.astype(y, dtype)


@op("RandomNormal RandomUniform", "raw")
def random(at: NodeCall) -> Value:
    return _drawn(at, bounded(at["shape"], False), dtype_of(at.get("dtype", 1), "it"))


@op("RandomNormalLike RandomUniformLike", "raw")
def random_like(at: NodeCall, x: Value) -> Value:
    number = at.get("dtype")
    dtype = DType.of(x.dtype) if number is None else dtype_of(number, "it")
    return _drawn(at, tuple(x.shape), dtype)


@op("Bernoulli", "tensors")
def bernoulli(at: NodeCall, x: Any) -> Any:
    number, bound = at.get("dtype"), ml.astype(x, ml.float32)
    drawn = ml.less(ml.random.uniform(x.shape, dtype=ml.float32, **_key(at)), bound)
    return ml.astype(drawn, x.dtype if number is None else dtype_of(number, "it"))


@op("Multinomial", "tensors")
def multinomial(at: NodeCall, x: Any) -> Any:
    count = at.get("sample_size", 1)
    noise = ml.random.uniform((x.shape[0], count, x.shape[1]), dtype=ml.float32, **_key(at))
    drawn = ml.argmax(ml.expand_dims(x, axis=1) - ml.log(-ml.log(noise)), axis=-1)
    return ml.astype(drawn, dtype_of(at.get("dtype", 6), "it"))
