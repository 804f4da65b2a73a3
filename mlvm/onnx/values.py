"""What flows along a graph's edges: arrays known on the host, tensors, tensors whose axes lie in
another order in memory than in the graph, and lists of these.

A known array is computed with by numpy, all else by `mlvm.eager`. So an op that both have is
written once, as the Array API standard has it.
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

_WIDEST: Final = 8  # bytes of an element that the host makes


class Weight(str):
    """The name under which a Module has an operand of a node."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Lying:
    """A tensor whose axis `i` is axis `axes[i]` of x: where channels are last, axes are 0, 3, 1,
    2. So a transposition costs nothing until its result must lie in order."""

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


Value: TypeAlias = Any  # an array of numpy, a Tensor, a Lying, a list of these, or None


def lying(x: Tensor, axes: Sequence[int]) -> Value:
    """The value whose axis i is axis `axes[i]` of x."""
    return x if tuple(axes) == tuple(range(len(axes))) else Lying(x, tuple(axes))


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The order that puts axes back."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def ordered(x: Tensor, axes: Sequence[int]) -> Tensor:
    """x with its axes in this order; no copy where those that are longer than 1 keep theirs."""
    long = [axis for axis in axes if x.shape[axis] != 1]
    if long == sorted(long):
        return ml.reshape(x, tuple(x.shape[axis] for axis in axes))
    return ml.permute_dims(x, tuple(axes))


def plain(value: Value) -> Value:
    """The value with its axes in order, a known one as it is."""
    return ordered(value.x, value.axes) if type(value) is Lying else value


def tensor(value: Value) -> Tensor:
    """The value as a tensor with its axes in order."""
    if type(value) is Lying:
        return ordered(value.x, value.axes)
    return value if type(value) is Tensor else ml.asarray(value)


def known(value: Value, what: str) -> Any:
    """The value as an array. A tensor is read, which a captured function cannot do."""
    if value is None or isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(tensor(value))
    except CaptureError:
        raise CaptureError(
            f"{what} must be known where the function is captured: give numbers, not a tensor"
        ) from None


def ints(value: Value, what: str) -> list[int]:
    """The value as a list of ints."""
    return [int(n) for n in known(value, what).reshape(-1)]


def are_known(values: Sequence[Value]) -> bool:
    """Whether numpy can compute with all of these."""
    return all(each is None or is_known(each) for each in values)


def bounded(shape: Sequence[int], is_host: bool = True) -> tuple[int, ...]:
    """The shape of what the host makes, or else a VM. Raises `OutOfMemory` for more than the limit,
    and `ModelError` for what is no shape."""
    shape, most = tuple(int(n) for n in shape), limit.get()
    if any(n < 0 for n in shape):
        raise ModelError(f"no tensor has the shape {list(shape)}")
    if is_host and most is not None:
        most.check(math.prod(shape) * _WIDEST)
    return shape


def alike(values: Sequence[Value]) -> tuple[list[Any], tuple[int, ...] | None]:
    """Tensors and arrays to compute with elementwise, and the order in which their axes lie: that
    of the largest operand; None where all lie in order."""
    most: Any = None
    for each in values:
        if type(each) is Lying and (most is None or math.prod(each.shape) > math.prod(most.shape)):
            most = each
    if most is None:
        return list(values), None
    ndim = most.ndim
    if any(each is not None and each.ndim > ndim for each in values):
        return [plain(each) for each in values], None
    order = inverse(most.axes)
    found: list[Any] = []
    for each in values:
        if each is None:
            found.append(None)
        elif type(each) is Lying and each.axes == most.axes:
            found.append(each.x)
        elif math.prod(each.shape) == 1 and each.ndim <= 1:
            found.append(plain(each))
        elif isinstance(each, np.ndarray):
            shape = (1,) * (ndim - each.ndim) + each.shape
            found.append(np.transpose(each.reshape(shape), order))
        else:
            shape = (1,) * (ndim - each.ndim) + tuple(each.shape)
            found.append(ordered(ml.reshape(plain(each), shape), order))
    return found, most.axes
