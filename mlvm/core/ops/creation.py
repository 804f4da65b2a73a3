"""Ops that create tensors from shapes and numbers."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError, counted
from mlvm.core.op import movement
from mlvm.core.rules import require, require_representable
from mlvm.core.types import Array, DType, TensorType

# --- type rules ----------------------------------------------------------------------


def _finite(**values: float) -> None:
    for name, value in values.items():
        if not abs(value) <= sys.float_info.max:
            raise ArgumentError(f"expected a finite {name}, got {value}")


def _full(value: TensorType, shape: tuple[int, ...]) -> TensorType:
    if value.ndim:
        raise ShapeError(f"expected a scalar as the value, got {counted(value.ndim, 'dimension')}")
    return value.with_shape(shape)


def _arange(start: int | float, stop: int | float, step: int | float, dtype: str) -> TensorType:
    kind = TensorType(DType.named(dtype))
    require("real", kind)
    _finite(start=start, stop=stop, step=step)
    if step == 0:
        raise ArgumentError("expected a step other than 0, got 0")
    if kind.dtype.is_float:
        steps = (stop - start) / step
        if not math.isfinite(steps):
            raise ArgumentError(
                f"expected a finite number of elements, got start {start}, stop {stop}, step {step}"
            )
        return kind.with_shape((max(0, math.ceil(steps)),))
    if not all(isinstance(value, int) for value in (start, stop, step)):
        raise ArgumentError(
            f"expected integers as start, stop and step of {dtype}, got {start}, {stop}, {step}"
        )
    length: Any = max(0, -((start - stop) // step))
    if length:
        require_representable(start, kind.dtype)
        require_representable(start + (length - 1) * step, kind.dtype)
    return kind.with_shape((length,))


def _linspace(start: float, stop: float, num: int, endpoint: bool, dtype: str) -> TensorType:
    kind = TensorType(DType.named(dtype))
    require("float", kind)
    _finite(start=start, stop=stop)
    if num < 0:
        raise ArgumentError(f"expected num >= 0, got {num}")
    return kind.with_shape((num,))


# --- ops -----------------------------------------------------------------------------


@movement(infer=_full, copies_only=True)
def full(out: Array, value: Array, *, shape: tuple[int, ...]) -> None:
    """A tensor of that shape; every element is the scalar `value`."""
    np.copyto(out, value)


@movement(infer=lambda shape, dtype: TensorType(DType.named(dtype), shape), copies_only=True)
def zeros(out: Array, *, shape: tuple[int, ...], dtype: str) -> None:
    """A tensor of zeros with that shape."""
    out.fill(0)


@movement(infer=_arange)
def arange(
    out: Array, *, start: int | float, stop: int | float, step: int | float, dtype: str
) -> None:
    """The values start, start + step, start + 2 step, ... before `stop`.

    An integer dtype requires integers and must be able to hold every element. Floats are start + i
    * step, computed in f64 and rounded once.
    """
    if out.dtype.kind == "f":
        np.add(np.multiply(np.arange(out.size), float(step)), float(start), out)
    elif out.size:  # numpy would convert the numbers even for an empty result
        out[...] = np.arange(start, stop, step, dtype=out.dtype)


@movement(infer=_linspace)
def linspace(
    out: Array, *, start: float, stop: float, num: int, endpoint: bool = True, dtype: str
) -> None:
    """`num` evenly spaced floats from `start` up to `stop`, which is left out without `endpoint`.

    Computed in f64 and rounded once; with `endpoint` the last is exactly `stop`.
    """
    out[...] = np.linspace(start, stop, num, endpoint)


@movement(infer=lambda rows, columns, k, dtype: TensorType(DType.named(dtype), (rows, columns)))
def eye(out: Array, *, rows: int, columns: int, k: int = 0, dtype: str) -> None:
    """A matrix of ones on the k-th diagonal (above the main one for k > 0), zeros elsewhere."""
    out.fill(0)
    k = max(-out.shape[0], min(k, out.shape[1]))
    i = np.arange(max(0, -k), min(out.shape[0], out.shape[1] - k))
    out[i, i + k] = 1
