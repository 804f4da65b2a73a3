"""Rows of ops: where they are, and whether a row's bits depend on the rows beside it.

An op's rows lie along an axis of some operands and of the result, where rows a to b of the operands
give rows a to b of the result. No op says where: an axis is found that may have any length, by the
type rule, and whose rows are independent, by the reference kernel. What lies behind an axis without
rows (the columns of a sum along axis 0) is outside of the contract in docs/determinism.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.types import Array, DType, TensorType, aligned_array, aligned_copy

MOST: Final = 70
"""Rows at most."""
DTYPES: Final = ("f32", "f64", "f16", "bf16", "i64")
COUNTS: Final = tuple(range(1, MOST + 1))
_FEW: Final = (1, 2, 3, 5, 8, 13, 34, 64, 69)
"""Numbers of rows that are tried of many elements."""
_MANY: Final = 50_000
_SHAPES: Final = ("shape", "length")
"""Attributes that have the lengths of axes."""
_PRODUCTS: Final = ("matmul", "batch_contract")
"""Ops of matrices, which may be transposed. Rows are those of the first, and axes of the batch."""


@dataclass(frozen=True)
class Sample:
    """A call of an op."""

    op: str
    inputs: tuple[Array, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def type(self) -> TensorType | None:
        """Infer the type of the result; None if the op refuses these operands, or does not know
        it."""
        op = OPS[self.op]
        try:
            types = [TensorType.of(x) for x in self.inputs]
            return op.infer(types, op.bind(self.attributes))
        except MlvmError:
            return None

    def in_dtype(self, dtype: str) -> Sample | None:
        """The sample with its floats in another dtype; None if it has none, or the op refuses."""
        numpy = DType.named(dtype).numpy
        if not any(x.dtype.kind == "f" and x.dtype != numpy for x in self.inputs):
            return None
        scale = 16 if dtype == "i64" else 1  # most would be 0
        inputs = [
            half.cast(x * scale, DType.named(dtype)) if x.dtype.kind == "f" else x
            for x in self.inputs
        ]
        sample = Sample(self.op, tuple(inputs), self.attributes)
        return sample if sample.type is not None else None

    def with_integers(self, x: Array) -> Sample:
        """The sample with one operand more."""
        return Sample(self.op, (*self.inputs, x), self.attributes)

    def __str__(self) -> str:
        types = ", ".join([str(TensorType.of(x)) for x in self.inputs])
        return f"{self.op}({types}) {self.attributes or ''}".strip()


@dataclass(frozen=True)
class Rows:
    """Place of a sample's rows: an axis of the result, and one of each operand that has rows."""

    axis: int
    axes: tuple[int | None, ...]
    sized: tuple[str, ...]
    """Attributes that have their number."""

    def of(self, sample: Sample, numbers: Array) -> Sample:
        """Return the sample with these rows, which may repeat."""
        inputs = [
            x if axis is None else _take(x, numbers % x.shape[axis], axis)
            for x, axis in zip(sample.inputs, self.axes, strict=True)
        ]
        attributes = dict(sample.attributes)
        for name in self.sized:
            lengths = [*attributes[name]]
            lengths[self.axis] = len(numbers)
            attributes[name] = tuple(lengths)
        return Sample(sample.op, tuple(inputs), attributes)


def rows_of(sample: Sample) -> list[Rows]:
    """All ways in which the sample has rows."""
    result_type, operands = sample.type, range(len(sample.inputs))
    if result_type is None or not all(x.size for x in sample.inputs):
        return []
    sized = tuple([n for n in _SHAPES if _are_lengths(sample.attributes.get(n), result_type.ndim)])
    choices = []
    for axes in itertools.product(*[(None, *range(x.ndim)) for x in sample.inputs]):
        lengths = [sample.inputs[i].shape[axis] for i in operands if (axis := axes[i]) is not None]
        if max(lengths, default=0) < 2 or min(lengths) < 1:  # one row many times is no proof
            continue
        for axis in range(result_type.ndim):
            rows = Rows(axis, axes, sized)
            shape = (*result_type.shape[:axis], 7, *result_type.shape[axis + 1 :])
            type = rows.of(sample, np.arange(7)).type
            if type is not None and type.shape == shape and _independent(sample, rows):
                choices.append(rows)
    return [rows for rows in choices if all(_in_front(sample, rows, choices, i) for i in operands)]


def _in_front(sample: Sample, rows: Rows, choices: Sequence[Rows], operand: int) -> bool:
    """Return whether the rows of the operand lie in front of all axes that the op works along."""
    axis = rows.axes[operand]
    if axis is None:
        return True
    if sample.op in _PRODUCTS:
        return operand == 0 or axis < sample.inputs[1].ndim - 2
    axes = {each.axes[operand] for each in choices}
    return all(i in axes or n == 1 for i, n in enumerate(sample.inputs[operand].shape[:axis]))


def _independent(sample: Sample, rows: Rows) -> bool:
    """Return whether a row is independent of the others by the reference kernel, but for
    rounding."""
    whole = _shown(rows.of(sample, np.arange(7)))
    if not whole.size:
        return False
    for numbers in (np.arange(2, 5), np.arange(1, 5), np.arange(3, 4)):
        part, same = _shown(rows.of(sample, numbers)), np.take(whole, numbers, rows.axis)
        if part.shape != same.shape or not np.allclose(part, same, 1e-2, 1e-2, equal_nan=True):
            return False
    return True


def _shown(sample: Sample) -> Array:
    """Return the reference kernel's result for the sample; an empty array where it refuses."""
    try:
        return half.shown(reference(sample)) if sample.type is not None else np.empty(0)
    except MlvmError:
        return np.empty(0)


def reference(sample: Sample) -> Array:
    """Return the reference kernel's result for the sample."""
    op = OPS[sample.op]
    return ran(half.suited(op, op.kernel, sample.inputs), sample)


def ran(kernel: Any, sample: Sample) -> Array:
    """Return the kernel's result for the sample."""
    type = sample.type
    assert type is not None, sample
    out = aligned_array(type)
    with np.errstate(all="ignore"):
        bound = OPS[sample.op].bind(sample.attributes)
        kernel(out, *map(aligned_copy, sample.inputs), **bound)
    return out


class Runs(Protocol):
    """A function that computes a sample."""

    def run(self, sample: Sample) -> Array: ...


def differing(
    machine: Runs, sample: Sample, rows: Rows, counts: Iterable[int] = COUNTS
) -> Iterator[tuple[int, int]]:
    """From which row on how many give other bits than they do among all: of the first, the last,
    and some between."""
    whole = machine.run(rows.of(sample, np.arange(MOST)))
    many = sum([x.size for x in rows.of(sample, np.arange(MOST)).inputs]) > _MANY
    for m in [m for m in counts if not many or m in _FEW]:
        for first in sorted({0, (MOST - m) // 3, MOST - m}):
            numbers = np.arange(first, first + m)
            part = machine.run(rows.of(sample, numbers))
            if not same_bits(part, _take(whole, numbers, rows.axis)):
                yield first, m


def _take(x: Array, numbers: Array, axis: int) -> Array:
    """Some rows of x; numpy alone takes no bf16."""
    if not half.is_half(x):
        return np.take(x, numbers, axis)
    return np.take(x.view(np.uint16), numbers, axis).view(x.dtype)


def same_bits(x: Array, y: Array) -> bool:
    """Return whether the arrays are the same; nans need only stand at the same places."""
    if x.tobytes() == y.tobytes():
        return True
    if x.dtype.kind not in "fc" and not half.is_half(x):
        return False
    if x.dtype.kind == "c":
        x, y = (z.view(z.real.dtype) for z in (x, y))
    nan, bits = [np.isnan(half.shown(z)) for z in (x, y)], f"u{x.dtype.itemsize}"
    equal = np.ascontiguousarray(x).view(bits) == np.ascontiguousarray(y).view(bits)
    return bool((equal | (nan[0] & nan[1])).all())


def _are_lengths(value: object, ndim: int) -> bool:
    """Return whether an attribute has the length of each axis of a result."""
    return isinstance(value, (tuple, list)) and len(value) == ndim
