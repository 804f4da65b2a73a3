"""Chains of elementwise ops on one shape, including single ops: `kernels/chain.c`."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from mlvm.core.machine.fused import READS_WINDOW, WRITES_WINDOW, Link
from mlvm.core.op import OPS, Attributes
from mlvm.core.types import DType, Shape, TensorType, u8
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.boxes import Strides, strides
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.elementwise import ROWS, conversion, row_of, stage

PIECE: Final = 512
"""Maximum elements per unit of a single op."""

_CACHE: Final = 24576  # bytes of all values of a piece, which fit into the first-level cache
_LONG_ROW: Final = 1024  # elements; a row of a window with at least this length is a piece
_APART: Final = 192  # bytes between the pieces of two values, to use different cache sets

_LINES: Final = {
    f"{op}_{t}": (f"line_{t}", codes)
    for op, codes in {
        "add": (_native.LINE_ADD, _native.LINE_ADD),
        "subtract": (_native.LINE_SUBTRACT, _native.LINE_SUBTRACT_FROM),
        "multiply": (_native.LINE_MULTIPLY, _native.LINE_MULTIPLY),
        "divide": (_native.LINE_DIVIDE, _native.LINE_DIVIDE_BY),
    }.items()
    for t in ("f32", "f64")
}
"""Ops that may be part of a line (`lines` in `kernels/elementwise.c`): the row function, and the
numbers of the op on (value, operand) and on (operand, value)."""
_OPS: Final = {
    _native.LINE_ADD: "add",
    _native.LINE_SUBTRACT: "subtract",
    _native.LINE_SUBTRACT_FROM: "subtract_from",
    _native.LINE_MULTIPLY: "multiply",
    _native.LINE_DIVIDE: "divide",
    _native.LINE_DIVIDE_BY: "divide_by",
}
_STEPPED: Final = {*_LINES, *[line for line, _ in _LINES.values()]}
"""Row functions with steps, which read scalars as blocks."""


class _Window(NamedTuple):
    """Window of a parameter: number of elements before the first, and strides."""

    parameter: int
    offset: int
    strides: Strides


def _window_of(parameter: int, type: TensorType, attributes: Attributes) -> _Window:
    own = strides(type.with_dtype(u8))  # in elements
    offset = sum(map(operator.mul, own, attributes["start"]))
    return _Window(parameter, offset, tuple(map(operator.mul, own, attributes["step"])))


class _Written(NamedTuple):
    """Window that a chain writes in the result `out`; all other elements are copied from `x`."""

    out: int
    x: int
    attributes: Attributes


class _Step(NamedTuple):
    """Call of a row function: the `nresults` written values, then the read values.

    The `ops` of a line are applied to the second operand, the third operand, and so on.
    """

    row: str
    values: tuple[int, ...]
    nresults: int = 1
    ops: tuple[int, ...] = ()


class _Steps:
    """Chain of row functions.

    Values are numbered: parameters first, then each value that passes between steps.
    """

    def __init__(self, links: Sequence[Link], types: Types) -> None:
        self.types = list(types)
        self.steps: list[_Step] = []
        self.windows: dict[int, _Window] = {}
        self.written: dict[int, _Written] = {}
        self.cost = 0.0
        self._nparams = len(types)
        self._number: dict[int, int] = {}
        self.complete = all(self._add(*pair) for pair in zip(links, (None, *links), strict=False))
        if self.complete:
            self._join_lines(4 if self.is_of_elements else _native.CHAIN_MOST_OPERANDS)

    @property
    def is_of_elements(self) -> bool:
        """Return whether the chain and all values have one element."""
        sizes = [self.types[value].size for step in self.steps for value in step.values]
        return not self.windows and all(type(size) is int and size == 1 for size in sizes)

    def _add(self, link: Link, before: Link | None) -> bool:
        """Add a link after the link `before`; return False if it has no row function."""
        if link.op.name == READS_WINDOW:
            return self._read_window(link)
        if link.op.name == WRITES_WINDOW:
            return self._write_window(link)
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

    def _read_window(self, link: Link) -> bool:
        [source] = link.sources
        out = link.op.infer([self.types[source]], link.attributes)
        assert out is not None
        window = _window_of(source, self.types[source], link.attributes)
        for number, other in self.windows.items():
            if other == window and self.types[number] is out:
                self._number[link.target] = number
                return True
        self._number[link.target] = number = self._temporary(out)
        self.windows[number] = window
        return True

    def _write_window(self, link: Link) -> bool:
        """Write the window by the step that computes the values, or by a copy.

        The values are copied if a later step reads elements of the old value.
        """
        x, value = link.sources
        value = self._number.get(value, value)
        number = self._temporary(self.types[value])
        self.written[number] = _Written(link.target, x, link.attributes)
        self.windows[number] = _window_of(link.target, self.types[link.target], link.attributes)
        writers = [i for i, step in enumerate(self.steps) if value in step.values[: step.nresults]]
        old = {at for at, window in self.windows.items() if window.parameter in (x, link.target)}
        later = self.steps[writers[-1] + 1 :] if writers else []
        if (
            value < self._nparams
            or value in self.windows
            or any(not old.isdisjoint(step.values) for step in later)
        ):
            size = self.types[value].dtype.itemsize
            if f"copy_{size}" not in ROWS:
                return False
            self.steps.append(_Step(f"copy_{size}", (number, value)))
        else:
            for i in range(writers[-1], len(self.steps)):
                values = [number if each == value else each for each in self.steps[i].values]
                self.steps[i] = self.steps[i]._replace(values=tuple(values))
            self._number = {k: number if v == value else v for k, v in self._number.items()}
        return True

    def _join_lines(self, most: int) -> None:
        """Merge steps into one row function if each result is read only by the next step.

        The merged function has at most `most` values.

        No result may be written between them, since it may reuse the memory of an operand.
        """
        uses = Counter(value for step in self.steps for value in step.values[step.nresults :])
        writers: dict[int, int] = {}
        remaining: list[_Step | None] = []
        barrier = 0  # the first step that earlier steps must not pass
        for i, step in enumerate(self.steps):
            remaining.append(step)
            if step.row in _LINES:
                line, codes = _LINES[step.row]
                target, *operands = step.values
                for k, source in enumerate(operands):
                    at = writers.get(source, -1)
                    first = remaining[at] if at >= barrier else None
                    if first is None or uses[source] > 1 or not (first.ops or first.row in _LINES):
                        continue
                    if len(first.values) == most:
                        continue
                    before = first.values[1:]
                    if not first.ops and first.row[:3] in ("add", "mul"):  # a scalar is y, not x
                        before = tuple(sorted(before, key=lambda x: self.types[x].ndim == 0))
                    ops = (*(first.ops or _LINES[first.row][1][:1]), codes[k])
                    values = (target, *before, operands[1 - k])
                    remaining[i], remaining[at] = _Step(line, values, ops=ops), None
                    break
            for target in step.values[: step.nresults]:
                if target < self._nparams or target in self.written:
                    barrier = i + 1
                else:
                    writers[target] = i
        self.steps = [step for step in remaining if step is not None]

    def _is_slope(self, link: Link, before: Link, sources: Sequence[int]) -> bool:
        """Return whether one row function computes the link, a slope, and the previous link."""
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
    """Return the name of the row function that computes the value of `row` and the slope."""
    op, _, dtype = row.rpartition("_")
    return f"{op}_and_slope_{dtype}"


def _converts(x: DType, y: DType) -> bool:
    """Return whether the dtypes are equal, or a row function converts one to the other."""
    before = stage(x, y)
    return x is y or (
        conversion(before, y) in ROWS and (before is x or conversion(x, before) in ROWS)
    )


def chain_call(
    links: Sequence[Link], types: Types, *, unit: int | None = None
) -> KernelCall | None:
    """Plan a chain on parameters of these types, the results first.

    Return None if a link has no row function. All links are elementwise on the shape of the first
    link's result.

    A unit is `unit` consecutive elements of this shape (default: chosen here). With `unit`, a
    kernel that has just computed some rows of an operand can run the units of these rows.
    """
    nparams = len(types)
    chain = _Steps(links, types)
    if not chain.complete or not chain.steps or nparams > _native.MOST_PARAMETERS:
        return None
    shape = chain.types[chain.steps[-1].values[0]].shape
    used = sorted({value for step in chain.steps for value in step.values})
    size = chain.types[chain.steps[-1].values[0]].size
    outside = [value for value in used if value < nparams or value in chain.windows]
    traffic = sum(chain.types[value].nbytes for value in outside)
    work = 50 + chain.cost * size + 0.03 * traffic
    whole = all(chain.types[value].size == size for value in used)
    alone = chain.steps[0] if whole and len(chain.steps) == 1 else None
    if alone is not None and not alone.ops and alone.values == tuple(range(nparams)):
        return _row_call(alone.row, types, 50 + chain.cost * size, unit)
    is_of_elements = chain.is_of_elements and unit is None
    shapes = [chain.types[value].shape for value in outside]
    windows = [chain.windows.get(value) for value in outside]
    lengths, steps = _axes(shape, shapes, windows)
    if len(lengths) > _native.CHAIN_MOST_AXES:
        return None
    layout = _ScratchLayout(chain, dict(zip(outside, steps, strict=True)), size)
    piece, pitch = layout.piece, lengths[-1]
    if len(lengths) > 1 and 0 < lengths[-1] <= piece:
        pitch = layout.pitch(lengths[-1], chain)
        # elements; shorter rows of windows are copied, several at a time
        if chain.windows and pitch == lengths[-1] >= 16:
            piece = lengths[-1]
        piece -= piece % lengths[-1]
    is_short = size.__class__ is int and size <= piece and unit is None
    is_short = is_short and not chain.windows and layout.is_short
    unit = unit or piece
    is_packed = pitch is lengths[-1]
    room = min(piece, size) if is_packed else piece // lengths[-1] * pitch
    offsets, scratch = layout.offsets(len(used), room)
    rest = [*lengths]
    number = {value: i for i, value in enumerate(used)}
    for value in used:
        window = chain.windows.get(value)
        spec = {"KIND": layout.kinds[value], "PARAMETER": value, "PLACE": offsets.get(value, 0)}
        spec["SIZE"] = chain.types[value].dtype.itemsize
        spec["OFFSET"] = 0
        if window is not None:
            spec["PARAMETER"], spec["OFFSET"] = window.parameter, window.offset
        rest += [spec[name] for name in _native.CHAIN_VALUE]
        rest += layout.strides.get(value) or [0] * len(lengths)
    for step in chain.steps:
        rest += [len(step.values), *[number[value] for value in step.values]]
        by = [int(layout.kinds[value] != _native.SCALAR) for value in step.values]
        if step.ops:
            by[0] = len(by)
            by[2:] = [x + 2 * op for x, op in zip(by[2:], step.ops, strict=True)]
        rest += by
    for written in chain.written.values():
        rest += _frame(written, types)
    name = "chain_into_windows" if chain.written else "chain"
    rows = [step.row for step in chain.steps]
    if is_of_elements:
        name, piece = "chain_of_elements", scratch
        rows = [_row_of_elements(step) for step in chain.steps]
        scratch += _native.LINK_BYTES * (len(chain.steps) + 1)
    elif is_short:
        name = "short_chain"
    counts = {"naxes": len(lengths), "nvalues": len(used), "nlinks": len(chain.steps)}
    counts |= {"nwindows": len(chain.written), "pitch": pitch}
    integers = {"elements": size, "unit": unit, "piece": piece, **counts}
    units = -(-size // unit)
    return kernel_call(name, nparams, units, work, integers, scratch=scratch, rest=rest, rows=rows)


def _row_of_elements(step: _Step) -> str:
    ops = "_then_".join([_OPS[op] for op in step.ops])
    return step.row.replace("line", ops) if ops else step.row


def _are_apart(chain: _Steps) -> bool:
    """Return whether no thread may read elements between rows that a different thread writes."""
    for number, written in chain.written.items():
        for window in chain.windows.values():
            at_same = window.parameter in (written.out, written.x)
            if at_same and window._replace(parameter=written.out) != chain.windows[number]:
                return False
    return True


def _frame(written: _Written, types: Types) -> list[int]:
    """Return the integers of a window that is written (`chain_window_integers`)."""
    out, attributes = types[written.out], written.attributes
    rest = [written.out, written.x, out.nbytes, out.ndim]
    axes = zip(out.shape, *[attributes[name] for name in ("start", "length", "step")], strict=True)
    for length, start, count, step in axes:
        rest += [length, min(start, start + step * (count - 1)), count, abs(step)]
    return rest


def _axes(
    shape: Shape, shapes: Sequence[Shape], windows: Sequence[_Window | None]
) -> tuple[list[int], list[list[int]]]:
    """Merge adjacent axes with the same broadcasting; return lengths and strides.

    Windows must continue from one row to the next. Strides are in elements per operand, and 0 for a
    broadcast axis.
    """
    lengths: list[int] = []
    patterns: list[tuple[bool, ...]] = []
    ends: list[int] = []  # the last of the merged axes
    steps_of_windows = [None if window is None else window.strides for window in windows]

    def is_one(axis: int) -> bool:
        return all(
            by is None or -ends[-1] > len(by) or by[ends[-1]] == by[axis] * shape[axis]
            for by in steps_of_windows
        )

    for axis, length in enumerate(shape, -len(shape)):
        if length == 1:
            continue
        pattern = tuple([-axis <= len(s) and s[axis] != 1 for s in shapes])
        if patterns and patterns[-1] == pattern and is_one(axis):
            lengths[-1] *= length
            ends[-1] = axis
        else:
            lengths.append(length)
            patterns.append(pattern)
            ends.append(axis)
    strides = []
    for i, by in enumerate(steps_of_windows):
        own = [n if pattern[i] else 1 for n, pattern in zip(lengths, patterns, strict=True)]
        steps = [*accumulate(reversed(own[1:]), operator.mul, initial=1)][::-1] if own else [0]
        if by is not None:
            steps = [by[axis] if -axis <= len(by) else 0 for axis in ends] or [0]
        strides.append(
            [n if pattern[i] else 0 for n, pattern in zip(steps, patterns, strict=False)] or [0]
        )
    return lengths or [1], strides


class _ScratchLayout:
    """Layout of values in scratch memory; a temporary reuses the memory of a dead value.

    kinds: how the kernel addresses each value.
    piece: number of elements of a piece; all values of a piece fit into the cache.
    """

    def __init__(self, chain: _Steps, strides: dict[int, list[int]], size: int) -> None:
        self.kinds: dict[int, int] = {}
        self.strides = strides
        self._slot: dict[int, int] = {}
        self._sizes: list[int] = []
        self._free: dict[int, list[int]] = {}
        last = {value: i for i, step in enumerate(chain.steps) for value in step.values}
        nbytes = self._add_parameters(chain, size)
        for i, step in enumerate(chain.steps):
            targets, sources = step.values[: step.nresults], step.values[step.nresults :]
            for value in {*sources}:
                if self.kinds.get(value) == _native.TEMPORARY and last[value] == i:
                    self._put_back(value, chain)
            for target in [each for each in targets if each not in self.kinds]:
                self.kinds[target] = _native.TEMPORARY
                self._take(target, chain.types[target].dtype.itemsize)
                if last[target] == i:  # it is never read
                    self._put_back(target, chain)
        copied = (_native.TEMPORARY, _native.REPEATED)
        slots = {slot for value, slot in self._slot.items() if self.kinds[value] in copied}
        each = nbytes + sum(self._sizes[slot] for slot in slots)
        # below 128 elements, calls cost more than caches gain
        piece = min(max(_CACHE // max(each, 1), 128), 2048)
        self.piece = piece - piece % 64

    def _add_parameters(self, chain: _Steps, size: int) -> int:
        """Add the operands in memory; return the bytes per element of all tensors."""
        readers: dict[int, set[str]] = {}
        for step in chain.steps:
            for value in step.values:
                readers.setdefault(value, set()).add(step.row)
        tensors: dict[int, int] = {}
        for value, steps in self.strides.items():
            itemsize = chain.types[value].dtype.itemsize
            if any(steps):
                window = chain.windows.get(value)
                tensors[value if window is None else window.parameter] = itemsize
            if value in chain.written:
                kind = _native.WRITTEN
            elif value not in chain.windows and chain.types[value].size == size:
                kind = _native.WHOLE
            elif any(steps[:-1]) or steps[-1] not in (0, 1):
                kind = _native.SPREAD
            elif not any(steps) and readers[value] <= _STEPPED:
                kind = _native.SCALAR
            else:
                kind = _native.REPEATED
            self.kinds[value] = kind
            if kind != _native.WHOLE:
                self._take(value, itemsize)
        return sum(tensors.values())

    @property
    def is_short(self) -> bool:
        """Return whether all values have the chain's shape or are scalars."""
        return all(
            kind in (_native.WHOLE, _native.TEMPORARY)
            or (kind in (_native.SCALAR, _native.REPEATED) and not any(self.strides[value]))
            for value, kind in self.kinds.items()
        )

    def pitch(self, length: int, chain: _Steps) -> int:
        """Return the distance of the rows of a piece, in elements; `length` for packed rows.

        Short rows have the distance that most windows have, because calls for single rows would be
        slower.
        """
        pitches = Counter(
            self.strides[value][-2]
            for value, kind in self.kinds.items()
            if kind == _native.SPREAD and self.strides[value][-1] == 1
            if type(self.strides[value][-2]) is int  # no dynamic pitch: a hash needs its value
        )
        [(pitch, most)] = pitches.most_common(1) or [(length, 0)]
        if not (chain.windows and most > 1 and length < pitch <= length + length // 2):
            return length
        moved = [x for x in self.kinds.values() if x not in (_native.SCALAR, _native.TEMPORARY)]
        if length >= _LONG_ROW or len(moved) > 2 * most or not _are_apart(chain):
            return length
        self._free.clear()  # copied values keep their memory
        for value, kind in self.kinds.items():
            if kind == _native.WHOLE:
                written = any(value in step.values[: step.nresults] for step in chain.steps)
                self.kinds[value] = _native.WRITTEN if written else _native.SPREAD
            elif kind == _native.REPEATED and self.strides[value][-1]:
                self.kinds[value] = _native.SPREAD
            if value not in self._slot:
                self._take(value, chain.types[value].dtype.itemsize)
        return pitch

    def _take(self, value: int, itemsize: int) -> None:
        free = self._free.get(itemsize)
        if free:
            self._slot[value] = free.pop()
        else:
            self._slot[value] = len(self._sizes)
            self._sizes.append(itemsize)

    def _put_back(self, value: int, chain: _Steps) -> None:
        itemsize = chain.types[value].dtype.itemsize
        self._free.setdefault(itemsize, []).append(self._slot[value])

    def offsets(self, nvalues: int, piece: int) -> tuple[dict[int, int], int]:
        """Return the offset of each value in scratch memory, and the total bytes.

        Two pointers for each value are stored before the values.
        """
        scalars = {slot for x, slot in self._slot.items() if self.kinds[x] == _native.SCALAR}
        begin, end = [], -(-nvalues * 16 // 64) * 64
        for slot, itemsize in enumerate(self._sizes):
            begin.append(end)
            if slot in scalars:
                end += _native.BLOCK_BYTES
            elif piece == 1:
                end += _native.MOST_ITEM
            else:
                end += -(-piece * itemsize // 64) * 64 + _APART
        return {value: begin[slot] for value, slot in self._slot.items()}, end


@planner(*[op.name for op in OPS.values() if op.links and op.name != "copy"])
def single(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, *operands = types
    if out.size.__class__ is int and all(x.shape == out.shape for x in operands):  # static lengths
        dtypes = tuple([x.dtype for x in operands])
        row = row_of(OPS[op], out, operands, attributes)
        if row is None:
            return None
        if row.dtypes == dtypes and row.first is None and row.result is out.dtype:
            return _row_call(row.name, types, 50 + row.cost * out.size)
    return chain_call([Link(OPS[op], 0, tuple(range(1, len(types))), attributes)], types)


def _row_call(row: str, types: Types, work: float, unit: int | None = None) -> KernelCall | None:
    """Plan a row function on parameters of the same shape."""
    size, unit = types[0].size, unit or PIECE
    work += 0.03 * sum([type.nbytes for type in types])
    rest = [type.dtype.itemsize for type in types]
    integers = {"elements": size, "unit": unit}
    name = "short_row" if size.__class__ is int and size <= unit else "row"
    return kernel_call(name, len(types), -(-size // unit), work, integers, rest=rest, rows=[row])
