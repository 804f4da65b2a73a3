"""Softmax, cross-entropy and layer normalisation: `kernels/rows.c`."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axes
from mlvm.core.types import TensorType
from mlvm.machines.native._native import ROWS_OF_WORK, ROWS_TOGETHER, KernelCall
from mlvm.machines.native.elements import integer_kind
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.reduction import collapsed

_WIDTH: Final = 128  # columns per block


@planner("softmax", "log_softmax", "logsumexp", halves="rows")
def softmax(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan along the last axis, or along any axis in blocks of columns.

    `logsumexp` may also have several axes.
    """
    x = types[1]
    axes = collapsed(x.shape, normalize_axes(attributes["axis"], x.ndim))
    if axes is None or axes.rows > 1 or not x.size:
        return None
    outer, _, _, length, inner = axes
    size, work = x.dtype.itemsize, 0.25 * x.nbytes
    scratch = 3 * ROWS_TOGETHER * size
    if inner == 1:
        return kernel_call(
            f"{op}_{x.dtype.name}", 2, outer, work, {"length": length}, scratch=scratch
        )
    width = min(inner, _WIDTH)
    blocks = -(-inner // width)
    scratch += ROWS_OF_WORK * _WIDTH * size
    integers = {"length": length, "inner": inner, "blocks": blocks, "width": width}
    kernel = f"{op}_of_columns_{x.dtype.name}"
    return kernel_call(kernel, 2, outer * blocks, work, integers, scratch=scratch)


@planner("softmax_cross_entropy", "softmax_cross_entropy_vjp", halves="rows")
def cross_entropy(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    *_, logits, labels = types
    if not logits.size:
        return None
    integers = {"length": logits.shape[-1], "kind": integer_kind(labels.dtype)}
    kernel, work = f"{op}_{logits.dtype.name}", 0.25 * logits.nbytes
    scratch = 3 * ROWS_TOGETHER * logits.dtype.itemsize
    return kernel_call(kernel, len(types), labels.size, work, integers, scratch=scratch)


_NS: Final = {"layer_norm": 0.4, "layer_norm_normalize": 0.35, "layer_norm_vjp": 0.7}
"""Nanoseconds per four bytes."""


@planner(*_NS, halves="rows")
def layer_norm(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[0]
    if not x.size:
        return None
    length = x.shape[-1]
    kernel, units, work = f"{op}_{x.dtype.name}", x.size // length, _NS[op] / 4 * x.nbytes
    scratch, floats = length * x.dtype.itemsize, (attributes["eps"],)
    return kernel_call(kernel, len(types), units, work, {"length": length}, floats, scratch=scratch)


_PARTS: Final = 32  # maximum parts of the rows: two, three or five threads share them evenly
_PART: Final = 8192  # minimum elements per part


@planner("layer_norm_scale_vjp", halves="rows")
def layer_norm_scale_vjp(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[2]
    if not x.size:
        return None
    length = x.shape[-1]
    rows, part = math.prod(x.shape[:-1]), part_of_rows(x)
    parts, floats = -(-rows // part), (attributes["eps"],)
    integers = {"length": length, "count": rows, "part": part}
    kernel, shared = f"{op}_{x.dtype.name}", parts * length * x.dtype.itemsize
    return kernel_call(kernel, 3, parts, 0.5 * x.size, integers, floats, shared=shared)


def part_of_rows(x: TensorType) -> int:
    """Return the number of rows of x in a part."""
    part = max(-(-math.prod(x.shape[:-1]) // _PARTS), -(-_PART // x.shape[-1]))
    return -(-part // 4) * 4
