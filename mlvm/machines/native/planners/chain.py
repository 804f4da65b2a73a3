"""Chains of elementwise ops on one shape: `kernels/chain.c`. A single op is one, too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from mlvm.core.machine.fused import Link
from mlvm.core.op import OPS, Attributes
from mlvm.core.types import DType, Shape, TensorType
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.elementwise import ROWS, conversion, row_of, stage

PIECE: Final = 512
"""Most elements that a link works on before the next one does."""

_APART: Final = 192  # bytes between the pieces of two values, so that they do not share cache sets


class _Step(NamedTuple):
    """Call of a row function: the values that it writes, `nresults` of them, then those it
    reads."""

    row: str
    values: tuple[int, ...]
    nresults: int = 1


class _Steps:
    """Chain in terms of row functions. Values are numbered: parameters first, then each value that
    passes between steps."""

    def __init__(self, links: Sequence[Link], types: Types) -> None:
        self.types = list(types)
        self.steps: list[_Step] = []
        self.cost = 0.0
        self._number: dict[int, int] = {}
        self.complete = all(self._add(*pair) for pair in zip(links, (None, *links), strict=False))

    def _add(self, link: Link, before: Link | None) -> bool:
        """Add a link behind the one `before`; return False if it has no row function."""
        sources = [self._number.get(source, source) for source in link.sources]
        operands = [self.types[source] for source in sources]
        out = link.op.infer(operands, link.attributes)
        row = out and row_of(link.op, out, operands, link.attributes)
        if not out or not row:
            return False
        if not all(_converts(x.dtype, y) for x, y in zip(operands, row.dtypes, strict=True)):
            return False
        if row.first is not None:
            for i, x in enumerate(operands):
                if x.dtype.is_integer:
                    sources[i] = self._converted(sources[i], row.first)
        sources = [self._converted(*pair) for pair in zip(sources, row.dtypes, strict=True)]
        target = link.target if link.target >= 0 else self._temporary(out)
        self._number[link.target] = target
        if before is not None and self._is_slope(link, before, sources):
            value = self.steps.pop()
            results = (value.values[0], target)
            self.steps.append(_Step(_with_slope(value.row), (*results, *sources), 2))
        elif row.result is out.dtype:
            self.steps.append(_Step(row.name, (target, *sources)))
        else:
            exact = self._temporary(out.with_dtype(row.result))
            self.steps.append(_Step(row.name, (exact, *sources)))
            self.steps.append(_Step(conversion(row.result, out.dtype), (target, exact)))
        self.cost += row.cost
        return True

    def _is_slope(self, link: Link, before: Link, sources: Sequence[int]) -> bool:
        """Return True if one row function computes the link, a slope, together with the value of
        the link before it."""
        if before.op.slope != link.op.name or before.attributes != link.attributes:
            return False
        value = self.steps[-1]
        return value.values[1:] == tuple(sources) and _with_slope(value.row) in ROWS

    def _converted(self, source: int, dtype: DType) -> int:
        type = self.types[source]
        if type.dtype is dtype:
            return source
        before = stage(type.dtype, dtype)
        if before is not type.dtype:
            return self._converted(self._converted(source, before), dtype)
        target = self._temporary(type.with_dtype(dtype))
        self.steps.append(_Step(conversion(type.dtype, dtype), (target, source)))
        return target

    def _temporary(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1


def _with_slope(row: str) -> str:
    """Return the name of the row function that computes the value of `row` and its slope."""
    op, _, dtype = row.rpartition("_")
    return f"{op}_and_slope_{dtype}"


def _converts(x: DType, y: DType) -> bool:
    """Return True if row functions convert one dtype to the other, or they are equal."""
    before = stage(x, y)
    return x is y or (
        conversion(before, y) in ROWS and (before is x or conversion(x, before) in ROWS)
    )


def chain_call(
    links: Sequence[Link], types: Types, *, unit: int | None = None
) -> KernelCall | None:
    """Plan a chain on parameters of these types, the results first; None if a link has no row
    function. All links work elementwise on the shape of the first one's result.

    A unit is `unit` consecutive elements of that shape; by default the kernel's choice. So a kernel
    that has just computed some rows of an operand may run the units that are these rows.
    """
    nparams = len(types)
    chain = _Steps(links, types)
    if not chain.complete or len(chain.types) > _native.CHAIN_MOST_VALUES:
        return None
    shape = chain.types[chain.steps[-1].values[0]].shape
    used = sorted({value for step in chain.steps for value in step.values})
    size = chain.types[chain.steps[-1].values[0]].size
    traffic = sum(types[value].nbytes for value in used if value < nparams)
    work = 50 + chain.cost * size + 0.03 * traffic
    whole = all(chain.types[value].size == size for value in used)
    if whole and len(chain.steps) == 1 and chain.steps[0].values == tuple(range(nparams)):
        return _row_call(chain.steps[0].row, types, 50 + chain.cost * size, unit)
    shapes = [chain.types[value].shape for value in used if value < nparams]
    lengths, strides = _axes(shape, shapes)
    if len(lengths) > _native.CHAIN_MOST_AXES:
        return None
    piece = PIECE
    if len(lengths) > 1 and 0 < lengths[-1] <= PIECE:
        piece -= piece % lengths[-1]
    unit = unit or piece
    places, scratch = _places(chain, strides, nparams, min(piece, size), size)
    rest = [*lengths]
    for i, value in enumerate(used):
        kind, place = places[value]
        spec = {"KIND": kind, "PARAMETER": value, "PLACE": place}
        spec["SIZE"] = chain.types[value].dtype.itemsize
        rest += [spec[name] for name in _native.CHAIN_VALUE]
        rest += strides[i] if value < nparams else [0] * len(lengths)
    for step in chain.steps:
        rest += [len(step.values), *map(used.index, step.values)]
    counts = {"naxes": len(lengths), "nvalues": len(used), "nlinks": len(chain.steps)}
    integers = {"elements": size, "unit": unit, "piece": piece, **counts}
    units = -(-size // unit)
    rows = [step.row for step in chain.steps]
    return kernel_call(
        "chain", nparams, units, work, integers, scratch=scratch, rest=rest, rows=rows
    )


def _axes(shape: Shape, shapes: Sequence[Shape]) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring axes of a shape where all operands are broadcast alike. Return their
    lengths, and each operand's strides in elements, 0 where it is broadcast."""
    lengths: list[int] = []
    patterns: list[tuple[bool, ...]] = []
    for axis, length in enumerate(shape, -len(shape)):
        if length == 1:
            continue
        pattern = tuple([-axis <= len(s) and s[axis] != 1 for s in shapes])
        if patterns and patterns[-1] == pattern:
            lengths[-1] *= length
        else:
            lengths.append(length)
            patterns.append(pattern)
    strides = []
    for i in range(len(shapes)):
        own = [n if pattern[i] else 1 for n, pattern in zip(lengths, patterns, strict=True)]
        steps = [*accumulate(reversed(own[1:]), operator.mul, initial=1)][::-1] if own else [0]
        strides.append(
            [n if pattern[i] else 0 for n, pattern in zip(steps, patterns, strict=False)] or [0]
        )
    return lengths or [1], strides


def _places(
    chain: _Steps, strides: Sequence[Sequence[int]], nparams: int, piece: int, size: int
) -> tuple[dict[int, tuple[int, int]], int]:
    """Place values in scratch memory; a temporary reuses the place of a dead one. Return the kind
    and place of each value, and the bytes in all."""
    last = {value: i for i, step in enumerate(chain.steps) for value in step.values}
    places: dict[int, tuple[int, int]] = {}
    free: dict[int, list[int]] = {}
    end = 0

    def place(value: int) -> int:
        nonlocal end
        itemsize = chain.types[value].dtype.itemsize
        if free.get(itemsize):
            return free[itemsize].pop()
        start, end = end, end + -(-piece * itemsize // 64) * 64 + _APART
        return start

    for value, steps in zip(sorted(v for v in last if v < nparams), strides, strict=True):
        if chain.types[value].size == size:
            places[value] = _native.WHOLE, 0
        else:
            places[value] = _native.SPREAD if any(steps[:-1]) else _native.REPEATED, place(value)
    for i, step in enumerate(chain.steps):
        targets, sources = step.values[: step.nresults], step.values[step.nresults :]
        for value in {*sources}:
            if value >= nparams and last[value] == i:
                free.setdefault(chain.types[value].dtype.itemsize, []).append(places[value][1])
        for target in [each for each in targets if each not in places]:
            places[target] = _native.TEMPORARY, place(target)
            if last[target] == i:  # nothing reads it
                free.setdefault(chain.types[target].dtype.itemsize, []).append(places[target][1])
    return places, end


@planner(*[op.name for op in OPS.values() if op.links and op.name != "copy"])
def single(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, *operands = types
    if out.size.__class__ is int and all(x.shape == out.shape for x in operands):  # none is open
        dtypes = tuple([x.dtype for x in operands])
        row = row_of(OPS[op], out, operands, attributes)
        if row is None:
            return None
        if row.dtypes == dtypes and row.first is None and row.result is out.dtype:
            return _row_call(row.name, types, 50 + row.cost * out.size)
    return chain_call([Link(OPS[op], 0, tuple(range(1, len(types))), attributes)], types)


def _row_call(row: str, types: Types, work: float, unit: int | None = None) -> KernelCall | None:
    """Plan a row function on parameters of one shape."""
    size, unit = types[0].size, unit or PIECE
    work += 0.03 * sum([type.nbytes for type in types])
    rest = [type.dtype.itemsize for type in types]
    integers = {"elements": size, "unit": unit}
    return kernel_call("row", len(types), -(-size // unit), work, integers, rest=rest, rows=[row])
