"""Composites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlvm.core.types import DType, TensorType, f32
from mlvm.eager import primitives as op
from mlvm.eager.tensor import Scalar, Tensor, alias, constant, from_array, one_op


def full(shape: int | Sequence[int], value: Scalar, *, dtype: object = f32) -> Tensor:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return op.full(constant(value, DType.of(dtype)), shape=shape)


def sum_to(x: Tensor, type: TensorType) -> Tensor:
    """x summed over the axes that broadcasting added or stretched from `type`, and cast to it."""
    if x.dtype is not type.dtype:
        x = op.astype(x, dtype=type.dtype)
    extra = x.ndim - type.ndim
    axes = tuple(
        i for i, n in enumerate(x.shape) if i < extra or (type.shape[i - extra] == 1 and n != 1)
    )
    if axes:
        x = op.sum(x, axis=axes, keepdims=False)
    return x if x.type is type else reshape(x, type.shape)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x with another shape of as many elements; one length may be -1. Nothing is copied."""
    type = x.type.with_shape(shape)
    return alias(one_op("reshape", shape=tuple(shape)), x, type)
