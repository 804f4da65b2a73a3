"""Many elements to one: `kernels/reduction.c`."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from mlvm.core.op import Attributes
from mlvm.core.rules import Axis, normalize_axes, normalize_axis
from mlvm.core.types import Shape, bool_, f32, f64, i64, u8, u64
from mlvm.machines.native._native import Plan
from mlvm.machines.native.planner import Twin, Types, twin

_UNITS: Final = 32
"""So many units at least, if the work is worth dividing: two, three or five threads have shares
that differ by little."""
_PART: Final = 8192  # elements at least, in a part of an output
_WIDEST: Final = 1024  # columns at most in a block; as in reduction.c


class Axes(NamedTuple):
    """A shape as kept, reduced, kept, reduced, kept axes, after joining neighbours."""

    outer: int
    rows: int
    middle: int
    length: int
    inner: int


def collapsed(shape: Shape, axes: tuple[int, ...]) -> Axes | None:
    """The shape as `Axes`, if neighbours of one kind and axes of length 1 leave no more."""
    lengths = [1]
    for i, n in enumerate(shape):
        if n == 1:
            continue
        if (i in axes) == (len(lengths) % 2 == 0):
            lengths[-1] *= n
        else:
            lengths.append(n)
    if len(lengths) % 2 == 0:
        lengths.append(1)
    match lengths:
        case [inner]:
            return Axes(1, 1, 1, 1, inner)
        case [outer, length, inner]:
            return Axes(outer, 1, 1, length, inner)
        case [outer, rows, middle, length, inner]:
            return Axes(outer, rows, middle, length, inner)
    return None


def reduction(
    kernel: str,
    types: Types,
    axis: Axis,
    *,
    floats: tuple[float, ...] = (),
    scratch: int,
    shared: int,
    ns: float = 1,
) -> Plan | None:
    """A plan of reduction.c. `scratch` bytes are for a column of a block, `shared` bytes for a
    result of a part. An element takes `ns` times as long as in a sum."""
    x = types[1]
    axes = collapsed(x.shape, normalize_axes(axis, x.ndim))
    if axes is None or not x.size or axes.length >= 2**31:
        return None
    outer, rows, middle, length, inner = axes
    outputs = outer * middle
    width = min(inner, _WIDEST)
    blocks = -(-inner // width)
    part_rows, part_length = rows, length
    parts_wanted = _UNITS // (outputs * blocks)
    if parts_wanted > 1 and x.size >= 2 * _PART:
        size = max(-(-_PART // width), -(-rows * length // parts_wanted))
        if size >= length:
            part_rows = -(-size // length)
        else:
            multiple = 1024 if inner == 1 else 32
            part_rows, part_length = 1, -(-size // multiple) * multiple
    parts_of_length = -(-length // part_length)
    parts = -(-rows // part_rows) * parts_of_length
    ints = [
        *(outputs, length, inner, rows, middle, middle * length * inner),
        *(parts, parts_of_length, part_rows, part_length, blocks, width),
        rows == parts == blocks == 1,
    ]
    return Plan(
        kernel,
        2,
        ints,
        floats,
        units=outputs * parts * blocks,
        work=ns * (x.nbytes * 0.02 + outputs * inner * 2),
        scratch=_WIDEST * scratch,
        shared=outputs * parts * inner * shared if parts > 1 else 0,
    )


def _sum_kernel(op: str, types: Types) -> str | None:
    """The kernel that adds or multiplies elements of x's dtype in the result's dtype."""
    out, x = types[0].dtype, types[1].dtype
    if x is out and x.is_float:
        return f"{op}_{x}"
    if out in (i64, u64) and not x.is_float:  # modulo 2^64 they are one
        return f"{op}_{u8 if x is bool_ else x}"
    return f"{op}_f32_f64" if (x, out) == (f32, f64) else None


def _sum(types: Types, axis: Axis, divisor: float) -> Plan | None:
    kernel, size = _sum_kernel("sum", types), types[0].dtype.itemsize
    if kernel is None:
        return None
    return reduction(kernel, types, axis, floats=(divisor,), scratch=size, shared=size)


@twin("sum")
def sum(types: Types, attributes: Attributes) -> Plan | None:
    return _sum(types, attributes["axis"], 1)


@twin("mean")
def mean(types: Types, attributes: Attributes) -> Plan | None:
    return _sum(types, attributes["axis"], types[1].size // max(1, types[0].size))


@twin("prod")
def prod(types: Types, attributes: Attributes) -> Plan | None:
    kernel, size = _sum_kernel("prod", types), types[0].dtype.itemsize
    if kernel not in ("prod_f32", "prod_f64", "prod_i32", "prod_i64"):
        return None
    return reduction(kernel, types, attributes["axis"], scratch=size, shared=size)


@twin("var")
def var(types: Types, attributes: Attributes) -> Plan | None:
    if not types[1].dtype.is_float:
        return None
    count = types[1].size // max(1, types[0].size)
    floats = count, max(0, count - attributes["correction"])
    size = types[1].dtype.itemsize
    return reduction(
        f"var_{types[1].dtype}",
        types,
        attributes["axis"],
        floats=floats,
        scratch=2 * size,
        shared=2 * size,
        ns=3,
    )


def _of_one_dtype(op: str) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        x = u8 if types[1].dtype is bool_ else types[1].dtype
        return reduction(
            f"{op}_{x}", types, attributes["axis"], scratch=x.itemsize, shared=x.itemsize
        )

    return prepare


def _position(op: str) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        x = u8 if types[1].dtype is bool_ else types[1].dtype
        return reduction(
            f"{op}_{x}", types, attributes["axis"], scratch=x.itemsize + 4, shared=8, ns=2
        )

    return prepare


def _decision(op: str) -> Twin:
    def prepare(types: Types, attributes: Attributes) -> Plan | None:
        x = types[1].dtype
        kernel = f"{op}_{x}" if x.is_float else f"{op}_u{8 * x.itemsize}"
        return reduction(kernel, types, attributes["axis"], scratch=1, shared=1)

    return prepare


for _op in ("max", "min"):
    twin(_op)(_of_one_dtype(_op))
for _op in ("argmax", "argmin"):
    twin(_op)(_position(_op))
for _op in ("all", "any"):
    twin(_op)(_decision(_op))


@twin("cumulative_sum")
def cumulative_sum(types: Types, attributes: Attributes) -> Plan | None:
    kernel, x = _sum_kernel("cumulative_sum", types), types[1]
    if kernel is None or not x.size:
        return None
    axis = normalize_axis(attributes["axis"] or 0, x.ndim)
    rows, length, inner = (math.prod(x.shape[part]) for part in around(axis))
    width = min(inner, _WIDEST)
    return Plan(
        kernel,
        2,
        [rows, length, inner, width],
        units=rows * -(-inner // width),
        work=x.size if inner > 1 else 1.5 * x.size,
    )


def around(axis: int) -> tuple[slice, slice, slice]:
    """The parts of a shape before, at and after an axis."""
    return slice(axis), slice(axis, axis + 1), slice(axis + 1, None)
