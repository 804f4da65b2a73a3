"""Softmax, cross-entropy and layer normalisation: `kernels/rows.c`."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.rules import Axis, normalize_axes
from mlvm.core.types import TensorType
from mlvm.machines.native._native import Plan
from mlvm.machines.native.elements import integer_kind
from mlvm.machines.native.planner import Twin, Types, twin
from mlvm.machines.native.planners.reduction import collapsed

_SOME: Final = 1024  # elements; as in rows.c
_WIDTH: Final = 128  # of a block of columns
_ROWS_OF_WORK: Final = 32  # as in rows.c


def _softmax(op: str, x: TensorType, axis: Axis) -> Plan | None:
    """Along the last axis, or along any in blocks of columns; `logsumexp` along several, too."""
    axes = collapsed(x.shape, normalize_axes(axis, x.ndim))
    if axes is None or axes.rows > 1 or not x.size:
        return None
    outer, _, _, length, inner = axes
    size, work = x.dtype.itemsize, 0.25 * x.nbytes
    if inner == 1:
        return Plan(
            f"{op}_{x.dtype}", 2, [length], units=outer, work=work, scratch=3 * _SOME * size
        )
    width = min(inner, _WIDTH)
    blocks = -(-inner // width)
    return Plan(
        f"{op}_of_columns_{x.dtype}",
        2,
        [length, inner, blocks, width],
        units=outer * blocks,
        work=work,
        scratch=(3 * _SOME + _ROWS_OF_WORK * _WIDTH) * size,
    )


def _along_an_axis(op: str) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        return _softmax(op, types[1], attributes["axis"])

    return prepare


for _op in ("softmax", "log_softmax", "logsumexp"):
    twin(_op)(_along_an_axis(_op))


def _cross_entropy(op: str) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        *_, logits, labels = types
        if not logits.size:
            return None
        return Plan(
            f"{op}_{logits.dtype}",
            len(types),
            [logits.shape[-1], integer_kind(labels.dtype)],
            units=labels.size,
            work=0.25 * logits.nbytes,
            scratch=3 * _SOME * logits.dtype.itemsize,
        )

    return prepare


for _op in ("softmax_cross_entropy", "softmax_cross_entropy_vjp"):
    twin(_op)(_cross_entropy(_op))


def _layer_norm(op: str, ns: float) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        x = types[0]
        if not x.size:
            return None
        length = x.shape[-1]
        return Plan(
            f"{op}_{x.dtype}",
            len(types),
            [length],
            [attributes["eps"]],
            units=x.size // length,
            work=ns / 4 * x.nbytes,
            scratch=length * x.dtype.itemsize,
        )

    return prepare


for _op, _ns in (("layer_norm", 0.4), ("layer_norm_normalize", 0.35), ("layer_norm_vjp", 0.7)):
    twin(_op)(_layer_norm(_op, _ns))

_PARTS: Final = 32  # of the rows, at most, so that two, three or five threads share them well
_PART: Final = 8192  # elements at least, in a part


@twin("layer_norm_scale_vjp")
def layer_norm_scale_vjp(types: Types, attributes: Attributes) -> Plan | None:
    x = types[2]
    if not x.size:
        return None
    length = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    part = max(-(-rows // _PARTS), -(-_PART // length))
    part = -(-part // 4) * 4
    parts = -(-rows // part)
    return Plan(
        f"layer_norm_scale_vjp_{x.dtype}",
        3,
        [length, rows, part],
        [attributes["eps"]],
        units=parts,
        work=0.5 * x.size,
        shared=parts * length * x.dtype.itemsize,
    )
