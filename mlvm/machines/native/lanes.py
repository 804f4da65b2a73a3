"""Lanes in C: tables for `plan/lanes.c`, and its callbacks to Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from mlvm.core.errors import CheckError, LimitExceededError, OperandValueError
from mlvm.core.types import Array, DType
from mlvm.machines.lane_link import Bound, Linked, invalid
from mlvm.machines.native._native import Lanes, Pool, lane_steps
from mlvm.machines.native.loop import Prepared
from mlvm.machines.native.types import DTYPES

_KINDS: Final = lane_steps()


def _program_of(bound: Bound) -> object:
    """Return the C program of a bound part, which is built once."""
    code, operands, _, functions = bound.args
    if not isinstance(code.prepared, Prepared):
        code.prepared = Prepared(code, operands, functions)
    return code.prepared.program


class Flat:
    """Steps encoded as integers for `plan/lanes.c`.

    code: all steps, one after the other.
    at: index in `code` of each step.
    sizes: bytes of rows, which steps refer to by index.
    """

    def __init__(self, linked: Linked) -> None:
        self.sizes: list[int] = []
        self.code: list[int] = []
        self.at: list[int] = []
        for kind, *rest in linked.steps:
            self.at.append(len(self.code))
            self.code += [_KINDS[kind], *self._numbers(kind, *rest)]

    def size(self, nbytes: int) -> int:
        """Return the index of a size of rows in `sizes`."""
        if not 0 <= nbytes < 1 << 62:
            raise invalid(f"unknown row size of {nbytes} bytes")
        if nbytes not in self.sizes:
            self.sizes.append(nbytes)
        return self.sizes.index(nbytes)

    def _numbers(self, kind: str, *rest: Any) -> list[int]:
        size = self.size
        if kind == "run":
            number, *ends = rest
            of = [[x for r, n in each for x in (r, size(n))] for each in ends]
            return [number, len(ends[0]), *of[0], len(ends[1]), *of[1]]
        if kind == "call":
            entry, *ends = rest
            pairs = [[r for pair in each for r in pair] for each in ends]
            return [entry, len(ends[0]), *pairs[0], len(ends[1]), *pairs[1]]
        if kind == "take":
            to, of_, index, length, nbytes, dtype = rest
            row = size(length * nbytes), length, size(nbytes)
            return [to, of_, *row, *self._index(index, dtype)]
        if kind == "put":
            to, value, index, length, count, nbytes, dtype = rest
            sizes = size(length * nbytes), length, size(count * nbytes), count
            return [to, value, *sizes, *self._index(index, dtype)]
        if kind == "split":
            register, nbytes, dtype, other = rest
            return [register, size(nbytes), DTYPES.index(DType.named(dtype)), other]
        if kind in ("push", "read"):
            number, registers = rest if kind == "push" else rest[::-1]
            flat = [x for register, nbytes in registers for x in (register, size(nbytes))]
            return [number, size(8), len(registers), *flat]
        if kind == "add":
            return [rest[0], len(rest[1]), *rest[1]]
        if kind in ("dup", "const"):
            return [rest[0], rest[1], size(rest[2])]
        return [rest[0], size(rest[1])] if kind == "check" else list(rest)

    def _index(self, register: int, dtype: str) -> list[int]:
        of = np.dtype(dtype)
        if of.kind not in "iu":
            raise invalid(f"unsupported index of type {of}")
        return [register, self.size(of.itemsize), int(of.kind == "i")]


class NativeLanes:
    """Runner of steps in C.

    `part(segment, count)` binds a part, and also returns the arrays of operands and results.
    `grow(size, nbytes, used, more)` enlarges the memory of the rows with that size.
    """

    def __init__(
        self,
        linked: Linked,
        part: Callable[[str, int], tuple[Bound, Sequence[Array], Sequence[Array]]],
        grow: Callable[[int, int, int, int], Array],
        keep: Callable[[int], None],
    ) -> None:
        self._part, self._grow, self._steps = part, grow, linked.steps
        self._bound: dict[tuple[int, int], Bound] = {}  # the last binding of each part
        self._keep, self._nbytes = keep, 0  # bytes of frames, which the next run reuses
        self._names = [*linked.runs, *linked.sites]
        flat = Flat(linked)
        size = flat.size
        segments = [linked.segments[name] for name in self._names]
        segment_specs = [
            (_ints(sorted(each.parts, reverse=True)), *map(len, each.rows(1))) for each in segments
        ]
        sites = [
            (i, each.sum, each.outs[0], _ints(list(map(size, each.ins))))
            for i, each in enumerate(segments)
            if each.sum >= 0
        ]
        params, returned = (
            _ints([x for register, nbytes in pairs for x in (register, size(nbytes))])
            for pairs in (linked.params, linked.returned)
        )
        self._sizes = flat.sizes  # all sizes
        self._results = [nbytes for _, nbytes in linked.returned]
        self.lanes = Lanes(
            _ints(flat.code),
            _ints(flat.at),
            _ints([pc in linked.heavy for pc in range(len(flat.at))]),
            linked.width,
            _ints(flat.sizes),
            _ints([nbytes in linked.lent for nbytes in flat.sizes]),
            segment_specs,
            sites,
            len(linked.shared),
            params,
            returned,
        )

    def run(self, pool: Pool, count: int, *arrays: Sequence[Array]) -> None:
        """Run the first `count` rows.

        `arrays` are the arguments, the results and sums, which are written, and the shared
        operands.
        """
        results = arrays[1]
        if len(results) != len(self._results) or any(
            x.nbytes != len(x) * n for x, n in zip(results, self._results, strict=True)
        ):
            raise invalid("expected results of the sizes in the program's types")
        addresses = [_ints([_address(x) for x in xs]) for xs in arrays]
        self._keep(self._nbytes)
        try:
            self.lanes.run(pool, self, count, *addresses)
        finally:
            self._keep(-self._nbytes)

    # --- callbacks ------------------------------------------------------------------------

    def check_signals(self) -> None:
        """Do nothing: entering Python switches threads and raises pending exceptions."""

    def keep(self, nbytes: int) -> None:
        """Account for more bytes of frames. Raises `OutOfMemoryError` if a limit is exceeded."""
        self._keep(nbytes)
        self._nbytes += nbytes

    def grow(self, size: int, used: int, more: int) -> tuple[int, int]:
        nbytes = self._sizes[size]
        data = self._grow(size, nbytes, used, more)
        return _address(data), len(data) // max(nbytes, 1)

    def part(self, segment: int, count: int) -> tuple[object, tuple[int, ...], tuple[int, ...]]:
        bound, operands, results = self._part(self._names[segment], count)
        self._bound[segment, count] = bound
        return _program_of(bound), tuple(map(_address, operands)), tuple(map(_address, results))

    def run_part(self, segment: int, count: int) -> None:
        self._bound[segment, count]()

    def refuse(self, what: str, a: int, b: int) -> NoReturn:
        if what == "index":
            raise OperandValueError(f"index {a} is out of range for length {b}")
        if what == "depth":
            raise LimitExceededError(f"call depth exceeds the limit of {a}")
        if what == "frames":
            raise LimitExceededError(f"lanes exceed the limit of {a:,} frames; batch fewer rows")
        if what == "check":
            raise CheckError(self._steps[a][3])
        raise invalid(f"record {a} does not exist")


def _ints(numbers: Any) -> Array:
    return np.array(numbers, np.int64)


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address
