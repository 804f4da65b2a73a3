"""Values on the edges of a graph.

These are host arrays, tensors, tensors whose axes have a different order in memory than in the
graph, and lists of these.

numpy computes host arrays, and `mlvm.eager` all other values. An op that exists in both is written
once, with the API of the Array API standard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, ModelError
from mlvm.core.types import DType, Shape
from mlvm.eager import Tensor
from mlvm.onnx.arrays import is_known
from mlvm.onnx.limits import limit

_WIDEST: Final = 8  # maximum bytes of an element computed on the host


class Weight(str):
    """Name of a Module's tensor that is an operand of a node."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PermutedTensor:
    """Transposed tensor that is not yet copied: axis `i` is axis `axes[i]` of x.

    Images with channels last have the axes 0, 3, 1, 2.
    """

    x: Tensor
    axes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.x.shape[axis] for axis in self.axes)

    @property
    def dtype(self) -> DType:
        return self.x.dtype

    @property
    def ndim(self) -> int:
        return self.x.ndim


Value: TypeAlias = Any  # numpy array, Tensor, PermutedTensor, list of these, or None


def permuted(x: Tensor, axes: Sequence[int]) -> Value:
    """Return the value whose axis i is axis `axes[i]` of x."""
    return x if tuple(axes) == tuple(range(len(axes))) else PermutedTensor(x, tuple(axes))


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """Invert a permutation of axes."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def ordered(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute the axes of x, without a copy if the order of axes longer than 1 does not change."""
    long = [axis for axis in axes if x.shape[axis] != 1]
    if long == sorted(long):
        return ml.reshape(x, tuple(x.shape[axis] for axis in axes))
    return ml.permute_dims(x, tuple(axes))


def plain(value: Value) -> Value:
    """Return the value with axes in order; a host array is returned unchanged."""
    return ordered(value.x, value.axes) if type(value) is PermutedTensor else value


def tensor(value: Value) -> Tensor:
    """Return the value as a tensor with axes in order."""
    if type(value) is PermutedTensor:
        return ordered(value.x, value.axes)
    return value if type(value) is Tensor else ml.asarray(value)


def in_memory(value: Value) -> tuple[Tensor, tuple[int, ...]]:
    """Return a value's tensor with the axes in memory order, and the order.

    Axis i of the value is axis `order[i]` of the tensor.
    """
    if type(value) is PermutedTensor:
        return value.x, value.axes
    x = tensor(value)
    return x, tuple(range(x.ndim))


def to_host(value: Value, what: str) -> Any:
    """Read the value as an array. Raises `CaptureError` for a tensor in a captured function."""
    if value is None or isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(tensor(value))
    except CaptureError:
        raise CaptureError(
            f"{what}: expected numbers where the function is captured, got a tensor"
        ) from None


def are_known(values: Sequence[Value]) -> bool:
    """Return whether numpy can compute with all of these."""
    return all(each is None or is_known(each) for each in values)


def bounded(shape: Sequence[int], is_host: bool = True) -> tuple[int, ...]:
    """Check the shape of a new array on the host or a tensor, and return it.

    Raises `OutOfMemoryError` for more bytes than the limit, and `ModelError` for negative lengths.
    """
    shape, most = tuple(int(n) for n in shape), limit.get()
    if any(n < 0 for n in shape):
        raise ModelError(f"expected lengths >= 0, got the shape {list(shape)}")
    if is_host and most is not None:
        most.check(math.prod(shape) * _WIDEST)
    return shape


def alike(values: Sequence[Value]) -> tuple[list[Any], tuple[int, ...] | None]:
    """Convert elementwise operands to the axis order of the largest permuted operand.

    Return the operands and the order, or None if no operand is permuted.
    """
    others = [each for each in values if type(each) is PermutedTensor]
    if not others:
        return list(values), None
    most = max(others, key=lambda each: math.prod(each.shape))
    ndim = most.ndim
    if any(each is not None and each.ndim > ndim for each in values):
        return [plain(each) for each in values], None
    order = inverse(most.axes)
    aligned: list[Any] = []
    for each in values:
        if each is None:
            aligned.append(None)
        elif type(each) is PermutedTensor and each.axes == most.axes:
            aligned.append(each.x)
        elif math.prod(each.shape) == 1 and each.ndim <= 1:
            aligned.append(plain(each))
        elif isinstance(each, np.ndarray):
            shape = (1,) * (ndim - each.ndim) + each.shape
            aligned.append(np.transpose(each.reshape(shape), order))
        else:
            shape = (1,) * (ndim - each.ndim) + tuple(each.shape)
            aligned.append(ordered(ml.reshape(plain(each), shape), order))
    return aligned, most.axes
