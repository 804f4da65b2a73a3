"""Kernels of elementwise ops and chains; a chain is one kernel.

A work item computes one element. On a processor it computes a vector of LANES elements if the ops
support this. Lengths and strides of broadcast operands are arguments, so one source supports all
shapes with the same broadcast pattern.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha1
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes
from mlvm.core.ops.strides import broadcast_steps, merged, packed
from mlvm.core.types import DType, Shape, TensorType, bool_, f32, promote
from mlvm.machines.gpu.dtypes import RAW
from mlvm.machines.gpu.kernels import (
    GROUP,
    REFUSED,
    Argument,
    Call,
    Calls,
    Facts,
    Types,
    flat_call,
    kernel,
    source,
)
from mlvm.machines.native.elementwise_rows import gpu_expressions

_WRAPS: Final = frozenset({"add", "subtract", "multiply", "square", "negative"})
"""Integer ops that are computed with unsigned arithmetic."""

_EXPRESSIONS: Final = gpu_expressions()
_IS: Final = ("isnan", "isinf", "isfinite")

LANES: Final = 16
_VECTORS: Final = frozenset({"exp", "log", "tanh", "sigmoid", "gelu", "gelu_slope"})
"""Ops that a processor always computes with vectors, in f32.

The vector functions of drivers are faster than the scalar functions, but have different bits. With
vectors in every chain, an op has the same bits in each chain.
"""
_BY_LANES: Final = _VECTORS | {
    *("add", "subtract", "multiply", "square", "negative", "maximum", "minimum", "clip"),
    *("abs", "relu", "multiply_add", "divide", "reciprocal", "sqrt", "rsqrt"),
    *("copy", "broadcast_to"),
}
"""Ops that a processor can compute on vectors of LANES values, in f32."""


def _computed(dtype: DType) -> str:
    """Return the C type in which elements are computed."""
    return "f32" if dtype.is_half else "u8" if dtype is bool_ else dtype.name


def converted(value: str, dtype: DType, to: DType) -> str:
    """Return an expression that converts a value to the computed type of a dtype, as `astype`."""
    if dtype is to or (to is f32 and dtype.is_half):
        return value
    if to is bool_:
        return f"({value} != 0)"
    if to.is_half:
        if dtype.name in ("f64", "i64", "u64", "i32", "u32"):
            value = f"BEFORE_HALF({value})"
        return f"rounded_{to.name}((f32)({value}))"
    if dtype.is_float and to.is_integer:
        bits = 8 * to.itemsize - (to.kind == "signed")
        low = f"-({_computed(dtype)}){2.0**bits!r}" if to.kind == "signed" else "0"
        most = f"(({to.name})(~(u64)0 >> {64 - bits}))"
        end = f"({_computed(dtype)}){2.0**bits!r}"
        return f"TRUNCATE({to.name}, {low}, {most}, {end}, {value})"
    return f"({_computed(to)})({value})"


def _is_of(names: frozenset[str], name: str, dtypes: Iterable[DType], how: Attributes) -> bool:
    """Return whether an op is one of these, in f32, and does not need erf, which vectors lack."""
    exact = name.startswith("gelu") and not how["approximate"]
    return name in names and not exact and all(dtype is f32 for dtype in dtypes)


def expression(
    name: str,
    out: DType,
    operands: Sequence[DType],
    values: Sequence[str],
    attributes: Attributes,
    lanes: int = 1,
) -> str | None:
    """Return the C expression of an op's result in the computed type of `out`, or None.

    With several lanes, values are vectors in f32.
    """
    if any(dtype.kind == "complex" for dtype in (out, *operands)):
        return None
    if name == "astype":
        return converted(values[0], operands[0], out)
    if name == "where":
        x, y = [converted(v, d, out) for v, d in zip(values[1:], operands[1:], strict=True)]
        return f"({values[0]} ? {x} : {y})"
    if name in ("copy", "broadcast_to"):
        return values[0]
    if name in _IS:
        if not operands[0].is_float:
            return str(int(name == "isfinite"))
        return f"({name}({values[0]}) != 0)"
    if name == "signbit":
        return f"(signbit({values[0]}) != 0)"
    if name in ("gelu", "gelu_slope"):
        kind = "tanh" if attributes["approximate"] else "erf"
        suffix = "_slope" if name == "gelu_slope" else ""
        of = _computed(out) if lanes == 1 else "lanes"
        return _rounded(f"gelu_{kind}{suffix}_{of}({', '.join(values)})", out)
    worked = out
    if out is bool_ and len(operands) == 2:  # a comparison of operands with different dtypes
        worked = operands[0] if operands[0] is operands[1] else promote(*operands)
    text = _EXPRESSIONS[worked.kind].get(name)
    if text is None or (name == "nextafter" and out.is_half):
        return None
    type = _computed(worked) if lanes == 1 else "lanes"
    arguments = [
        converted(value, dtype, _common(dtype, worked))
        for value, dtype in zip(values, operands, strict=True)
    ]
    if worked.is_integer and name in _WRAPS:
        wide = "u64" if worked.itemsize == 8 else "u32"
        arguments = [f"({wide}){value}" for value in arguments]
    else:
        arguments = [f"({type}){value}" for value in arguments]
    letters = dict(zip("xyz", arguments, strict=False))
    text = re.sub(r"\b[xyz]\b", lambda letter: f"({letters[letter[0]]})", text)
    text = text.replace("_T(", f"_{type}(").replace("(T)", f"({type})")
    return f"({text})" if out is bool_ else _rounded(f"({type})({text})", out)


def _common(dtype: DType, worked: DType) -> DType:
    """Return the dtype to which an operand is converted.

    For a half-precision result this is f32, in which floats, bools and one-byte integers are exact.
    Wider integers are first rounded to half precision. For other results it is `worked`.
    """
    if worked.is_half and (dtype.is_float or dtype.itemsize == 1):
        return f32
    return worked


def _rounded(value: str, dtype: DType) -> str:
    return f"rounded_{dtype.name}({value})" if dtype.is_half else value


@cache
def prelude(device: Facts) -> str:
    """Return the common start of the sources of all chains."""
    return source("elementwise.h", **({"LANES": LANES} if device.is_cpu else {}))


class DeviceLink(NamedTuple):
    """Link of a kernel: an op, the number of the result, and the numbers of the operands."""

    name: str
    target: int
    sources: tuple[int, ...]
    attributes: Attributes = NO_ATTRIBUTES


def chain_call(
    device: Facts,
    links: Sequence[DeviceLink],
    types: Mapping[int, TensorType],
    inputs: Mapping[int, Argument],
    outputs: Sequence[tuple[int, Argument]],
    shape: Shape,
) -> Call | None:
    """Return one kernel for links in order, each of which computes a new value.

    `types` are the types of all values, by number; `inputs` are the locations of the first values,
    `outputs` the values to store. Return None if an op has no expression, or if there are more
    tensors than a kernel supports.
    """
    used = [n for n in inputs if any(n in link.sources for link in links)]
    used += [n for n, _ in outputs if n in inputs and n not in used]
    dtypes = {n: type.dtype for n, type in types.items()}

    def of(link: DeviceLink) -> list[DType]:
        return [dtypes[n] for n in (link.target, *link.sources)]

    dims, strides = collapsed(shape, [types[n].shape for n in used])
    by_lanes = device.is_cpu and dims[-1] >= LANES
    by_lanes = by_lanes and all(_is_of(_BY_LANES, x.name, of(x), x.attributes) for x in links)
    in_rows = _in_rows(dims) and not by_lanes
    walk = _walk_by_lanes if by_lanes else _walk
    size, first, scalars, index = walk(math.prod(shape), dims, strides)
    names = [(f"o{k}", n, where) for k, (n, where) in enumerate(outputs)]
    names += [(f"p{k}", n, inputs[n]) for k, n in enumerate(used)]
    # Maximum bytes of a kernel's arguments, which each OpenCL device supports.
    if 16 * len(names) + 8 * len(scalars) > 1024:
        return None
    tensors = [(dtypes[n].name, name) for name, n, _ in names]
    body = [*first, *[f"POINTER({dtype}, {name});" for dtype, name in tensors]]
    values: dict[int, str] = {}
    kind = "const lanes" if by_lanes else "const COMPUTED({})"
    for k, n in enumerate(used):
        values[n], dtype = f"x{k}", dtypes[n].name
        load = f"LOAD({dtype}, p{k}, {index[k]})"
        if by_lanes:
            load = f"load_lanes(p{k} + {index[k]}, count)" if strides[k][-1] else f"(lanes){load}"
        body.append(f"{kind.format(dtype)} x{k} = {load};")
    for k, link in enumerate(links):
        out, *operands = of(link)
        arguments = [values[n] for n in link.sources]
        is_vector = device.is_cpu and _is_of(_VECTORS, link.name, of(link), link.attributes)
        if is_vector and not by_lanes:
            arguments = [f"(lanes){each}" for each in arguments]
        wide = is_vector or by_lanes
        value = expression(
            link.name, out, operands, arguments, link.attributes, LANES if wide else 1
        )
        if value is None:
            return None
        values[link.target] = f"v{k}"
        only = ".s0" if is_vector and not by_lanes else ""
        body.append(f"{kind.format(out.name)} v{k} = ({value}){only};")
    for k, (n, _) in enumerate(outputs):
        store = "store_lanes(o{0} + i, {2}, count);" if by_lanes else "STORE({1}, o{0}, i, {2});"
        body.append(store.format(k, dtypes[n].name, values[n]))
    params = [f"TENSOR({dtype}, {name})" for dtype, name in tensors]
    params += [f"const i64 {name}" for name in scalars]
    lines = "\n    ".join(body)
    rest = f"({', '.join(params)}) {{\n    {lines}\n}}\n"
    entry = f"chain_{sha1(rest.encode(), usedforsecurity=False).hexdigest()}"
    args = (*[where for *_, where in names], *map(np.int64, scalars.values()))
    text = f"{prelude(device)}KERNEL void {entry}{rest}"
    return Call(text, entry, size, (GROUP, 1) if in_rows else (GROUP,), args)


_Walk: TypeAlias = tuple[tuple[int, ...], list[str], dict[str, int], list[str]]
"""Index computation of a kernel.

It consists of the work items, lines of C that compute the coordinates of an item, the numeric
arguments of these lines, and the index expression of each operand.
"""


def _walk(size: int, dims: Sequence[int], strides: Sequence[Sequence[int]]) -> _Walk:
    """Return the index computation for one element per item."""
    lines = ["const i64 i = ITEM(0);", "if (i >= n) return;"]
    scalars = {"n": size}
    needed, index = _steps(dims, strides, len(dims), scalars)
    if _in_rows(dims):
        scalars["d1"] = dims[1]
        lines = [
            "if (ITEM(0) >= d1) return;",
            "const i64 c0 = ITEM(1), c1 = ITEM(0), i = c0 * d1 + c1;",
        ]
        return (dims[1], dims[0]), lines, scalars, index
    lines += _coordinates("i", size, dims, needed, scalars)
    return (size,), lines, scalars, index


def _walk_by_lanes(size: int, dims: Sequence[int], strides: Sequence[Sequence[int]]) -> _Walk:
    """Return the index computation for LANES adjacent elements per item along the last axis."""
    last = dims[-1]
    blocks = -(-last // LANES)
    items = size // last * blocks
    scalars = {"n": items, "last": last, "blocks": blocks}
    needed, index = _steps(dims, strides, len(dims) - 1, scalars)
    lines = [
        "const i64 at = ITEM(0);",
        "if (at >= n) return;",
        "const i64 row = at / blocks, column = (at - row * blocks) * LANES;",
        "const i64 i = row * last + column;",
        "const int count = last - column < LANES ? (int)(last - column) : LANES;",
        *_coordinates("row", items, dims[:-1], needed, scalars),
    ]
    index = [
        f"{text} + column" if steps[-1] and text != "i" else text
        for text, steps in zip(index, strides, strict=True)
    ]
    return (items,), lines, scalars, index


def _steps(
    dims: Sequence[int], strides: Sequence[Sequence[int]], axes: int, scalars: dict[str, int]
) -> tuple[set[int], list[str]]:
    """Return the axes with needed coordinates, and an index expression for each operand.

    The index is computed from these coordinates; the index of a packed operand is i.
    """
    needed: set[int] = set()
    index: list[str] = []
    for k, steps in enumerate(strides):
        if list(steps) == packed(dims) and any(steps):
            index.append("i")
            continue
        walked = [d for d in range(axes) if steps[d]]
        needed.update(walked)
        scalars.update({f"s{k}_{d}": steps[d] for d in walked})
        index.append(" + ".join([f"(i64)c{d} * s{k}_{d}" for d in walked]) or "0")
    return needed, index


def _coordinates(
    of: str, size: int, dims: Sequence[int], needed: set[int], scalars: dict[str, int]
) -> list[str]:
    """Return lines of C that split number `of` into coordinates."""
    if not needed:
        return []
    wide = "i64" if size >= 1 << 32 else "u32"
    lines = [f"{wide} rest = ({wide}){of};"]
    for d in range(len(dims) - 1, min(needed) - 1, -1):
        scalars[f"d{d}"] = dims[d]
        if d in needed:
            lines.append(f"const {wide} c{d} = rest % ({wide})d{d};")
        lines.append(f"rest /= ({wide})d{d};")
    return lines


def _in_rows(dims: Sequence[int]) -> bool:
    """Return whether work items are numbered along two axes."""
    # rows of a launch in two dimensions; the limit of CUDA is 2**16 - 1
    return len(dims) == 2 and dims[1] >= GROUP and dims[0] <= (1 << 15)


def collapsed(shape: Shape, operands: Sequence[Shape]) -> tuple[list[int], list[list[int]]]:
    """Merge axes of a shape where all operands allow it; at least one axis remains.

    The operands broadcast to the shape. Also return each operand's strides along the remaining
    axes.
    """
    steps = [broadcast_steps(each, len(shape)) for each in operands]
    axes = [axis for axis in zip(shape, *steps, strict=True) if axis[0] != 1]
    axes = merged(axes) or [(1, *[0] * len(operands))]
    dims, *strides = map(list, zip(*axes, strict=True))
    return dims, strides


def _one(name: str, device: Facts, types: Types, /, **attributes: object) -> Calls:
    """Return the kernel of a single op."""
    if not OPS[name].copies_only and not all(device.has(x.dtype) for x in types):
        return None
    if OPS[name].copies_only:
        condition = 1 if name == "where" else -1
        moved = {x.dtype for i, x in enumerate(types) if i != condition}
        if len(moved) == 1:  # moved as integers of the same size
            itemsize = types[0].dtype.itemsize
            if itemsize > 8:
                return None
            raw = DType.named(RAW[itemsize])
            types = [x if i == condition else x.with_dtype(raw) for i, x in enumerate(types)]
    inputs = {i: i for i in range(1, len(types))}
    links = [DeviceLink(name, 0, tuple(inputs), attributes)]
    call = chain_call(device, links, dict(enumerate(types)), inputs, [(0, 0)], types[0].shape)
    return None if call is None else [call]


@kernel("pow", judges=2)
def _pow(device: Facts, types: Types) -> Calls:
    """Return the calls of pow, which rejects negative powers of integers."""
    calls = _one("pow", device, types)
    out, _, y = types
    if calls is None or out.dtype.kind != "signed" or y.dtype.kind != "signed":
        return calls
    text = (
        "KERNEL void negative_power(TENSOR(DT, y), REFUSALS, const i64 n) {\n"
        "    POINTER(DT, y);\n"
        "    const i64 i = ITEM(0);\n"
        "    if (i < n && y[i] < 0) REFUSE(i, y[i]);\n}\n"
    )
    text = source(DT=y.dtype.name) + text
    return [flat_call(text, "negative_power", y.size, (2, REFUSED), y.size), *calls]


ELEMENTWISE: Final = frozenset(
    {
        *itertools.chain(*_EXPRESSIONS.values()),
        *("astype", "signbit", "gelu", "gelu_slope", *_IS),
        *("copy", "broadcast_to", "where"),
    }
)
"""Ops with an expression for at least some dtypes."""

assert all(OPS[name].links for name in ELEMENTWISE)
for _name in sorted(ELEMENTWISE - {"pow"}):
    kernel(_name)(partial(_one, _name))
