"""Ops over lanes: one op for many lanes at once, with a row of its operands for each lane.

The result is one op again, over operands with an axis of lanes in front. Operands that all lanes
share have none. A lane's row has the bits of the op on the lane alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import PositionRefused
from mlvm.core.op import Attributes, Op
from mlvm.core.rules import normalize_axis
from mlvm.core.types import TensorType

Types: TypeAlias = Sequence[TensorType]


class Lane(NamedTuple):
    """A call in one lane.

    attributes: of the op.
    types: of the operands in the lane.
    which: whether an operand has a row for each lane.
    total: the number of lanes.
    """

    attributes: Mapping[str, Any]
    types: Types
    which: Sequence[bool]
    total: int

    def rows(self, i: int, rank: int = 0) -> TensorType:
        """Return the type of an operand with its lanes, with at least `rank` axes in a lane."""
        type = self.types[i]
        if not self.which[i]:
            return type
        padding = (1,) * (rank - type.ndim)
        return type.with_shape((self.total, *padding, *type.shape))

    def all_rows(self, rank: int = 0) -> list[TensorType]:
        return [self.rows(i, rank) for i in range(len(self.types))]

    def attributes_with(self, **attributes: Any) -> dict[str, Any]:
        return {**self.attributes, **attributes}


BatchedOp: TypeAlias = "tuple[str, Attributes, Types] | None"
"""The op's name, its attributes, and the types it takes its operands as; None for no such op."""


def over_lanes(
    op: Op, attributes: Attributes, types: Types, which: Sequence[bool], count: int
) -> BatchedOp:
    """Return the op over `count` lanes, or None if it has to run lane by lane."""
    if not any(which):
        return None
    lane = Lane(attributes, types, which, count)
    rule = _RULES.get(op.name)
    if rule is not None:
        return rule(op.name, lane)
    if op.elementwise:
        return op.name, attributes, lane.all_rows(max((x.ndim for x in types), default=0))
    return None


def in_lane(error: PositionRefused, lane: Sequence[int], naxes: int) -> None:
    """Name the lane in an error. The first `naxes` numbers of its position are numbers of lanes,
    too.
    """
    numbers, rest = [*lane, *error.position[:naxes]], error.position[naxes:]
    place = f"position {rest} of lane {numbers[0] if len(numbers) == 1 else numbers}"
    error.reason = error.reason.replace(f"position {error.position}", place, 1)
    error.position = rest


def _matmul(name: str, lane: Lane) -> BatchedOp:
    x, y = lane.types
    many_x, many_y = lane.which
    transposes = lane.attributes["transpose_x"], lane.attributes["transpose_y"]
    if not many_y and y.ndim == 2 and many_x and (x.ndim == 1 or not transposes[0]):
        merged = (math.prod((lane.total, *x.shape[:-1])), x.shape[-1])
        return name, lane.attributes_with(transpose_x=False), (x.with_shape(merged), y)
    if x.ndim < 2 or y.ndim < 2:
        return None
    rank = max(x.ndim, y.ndim)
    return name, lane.attributes, lane.all_rows(rank)


def _all_many(rule: Callable[[str, Lane], BatchedOp]) -> Callable[[str, Lane], BatchedOp]:
    """Return a rule for operands that all have rows."""
    return lambda name, lane: rule(name, lane) if all(lane.which) else None


def _first_many(rule: Callable[[str, Lane], BatchedOp]) -> Callable[[str, Lane], BatchedOp]:
    """Return a rule for a first operand with rows, beside others without."""

    def of_first(name: str, lane: Lane) -> BatchedOp:
        return rule(name, lane) if lane.which[0] and not any(lane.which[1:]) else None

    return of_first


def _same(name: str, lane: Lane) -> BatchedOp:
    return name, lane.attributes, lane.all_rows()


def _along(name: str, lane: Lane) -> BatchedOp:
    """Batch an op along an axis of its first operand, or several."""
    key, rank = "axes" if "axes" in lane.attributes else "axis", lane.types[0].ndim
    axis = lane.attributes[key]
    if axis is None:
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    behind = tuple([normalize_axis(i, rank) + 1 for i in axes])
    changed = lane.attributes_with(**{key: behind if isinstance(axis, tuple) else behind[0]})
    return name, changed, lane.all_rows()


def _along_all(name: str, lane: Lane) -> BatchedOp:
    """Batch an op as `_along`, where None stands for all axes."""
    if lane.attributes["axis"] is None:
        lane = lane._replace(attributes=lane.attributes_with(axis=tuple(range(lane.types[0].ndim))))
    return _along(name, lane)


def _shaped(name: str, lane: Lane) -> BatchedOp:
    """Batch an op with the result's shape as an attribute."""
    shape = lane.attributes["shape"]
    rank = 0 if name == "reshape" else len(shape)
    return name, {"shape": (lane.total, *shape)}, lane.all_rows(rank)


def _sliced(name: str, lane: Lane) -> BatchedOp:
    """Batch a slice, or an op that writes or pads one."""
    n = lane.total
    whole = {"start": 0, "step": 1, "widths": (0, 0), "length": n, "shape": n}
    changed = {
        key: (whole[key], *value) if key in whole else value
        for key, value in lane.attributes.items()
    }
    return name, changed, lane.all_rows(max([type.ndim for type in lane.types]))


def _permuted(name: str, lane: Lane) -> BatchedOp:
    rank = lane.types[0].ndim
    axes = [normalize_axis(a, rank) + 1 for a in lane.attributes["axes"]]
    return name, {"axes": (0, *axes)}, lane.all_rows()


def _take(name: str, lane: Lane) -> BatchedOp:
    """Batch `take`: of a table that all lanes share, or with indices that all lanes share."""
    axis = normalize_axis(lane.attributes["axis"], lane.types[0].ndim)
    if lane.which[0]:
        return None if lane.which[1] else (name, {"axis": axis + 1}, lane.all_rows())
    return (name, {"axis": 0}, lane.all_rows()) if axis == 0 else None


def _each(names: str, rule: Callable[[str, Lane], BatchedOp]) -> Mapping[str, Any]:
    return dict.fromkeys(names.split(), rule)


_RULES: Final[Mapping[str, Callable[[str, Lane], BatchedOp]]] = {
    "matmul": _matmul,
    **_each("sum mean prod max min all any logsumexp var flip", _along_all),
    **_each("softmax log_softmax argmax argmin cumulative_sum sort argsort roll", _along),
    "top_indices": _along,
    **_each("fft ifft rfft irfft", _along),
    **_each("concat take_along_axis scatter_add_along_axis", _all_many(_along)),
    **_each("reshape broadcast_to", _shaped),
    "full": lambda name, lane: _shaped("broadcast_to", lane),
    **_each("pad slice embed slice_add slice_set", _all_many(_sliced)),
    "permute_dims": _permuted,
    "take": _take,
    "layer_norm": _first_many(_same),
    **_each("one_hot gelu gelu_slope layer_norm_normalize polygamma tril triu", _all_many(_same)),
    **_each("softmax_cross_entropy softmax_cross_entropy_vjp sum_lanes", _all_many(_same)),
    "flat_indices": _all_many(_same),
    **_each("cholesky inv lu expm det det_vjp slogdet eigh eigvalsh", _all_many(_same)),
    **_each("eig eigvals qr svd svdvals", _all_many(_same)),
}
