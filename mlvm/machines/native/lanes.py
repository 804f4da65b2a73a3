"""Frames of many lanes on their way in C: what `plan/lanes.c` gets, and what it asks of Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from mlvm.core.errors import CheckFailed, LimitExceeded, MachineError, OperandValueError
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.link import Code
from mlvm.core.types import Array, DType
from mlvm.machines.native._native import Lanes, Pool, lane_steps
from mlvm.machines.native.loop import Prepared
from mlvm.machines.native.types import DTYPES

_KINDS: Final = lane_steps()


def program_of(code: Code, operands: Sequence[Array], functions: FunctionTable) -> object:
    """The program that runs linked code on these arrays."""
    prepared = code.prepared = Prepared(code, operands, functions)
    return prepared.program


class Flat:
    """Steps as numbers, as `plan/lanes.c` reads them: `code`, and where in it each begins, `at`.
    `sizes` are those of rows, which steps have by number; `ends` of segments how many operands and
    results. C looks at no number: raises `MachineError` for one that there is nothing of."""

    def __init__(
        self,
        steps: Sequence[Sequence[Any]],
        heavy: Sequence[int],
        width: int,
        nsegments: int,
        nsites: int,
        nshared: int,
    ) -> None:
        self._steps, self._width, self._nshared = steps, width, nshared
        if not steps or steps[-1][0] not in ("return", "jump"):
            raise MachineError("the code of lanes has no end")
        self._within(heavy, len(steps))
        self._within([step[1] for step in steps if step[0] == "run"], nsegments)
        self._within([step[1] for step in steps if step[0] == "add"], nsites)
        self.sizes: list[int] = []
        self.code: list[int] = []
        self.at: list[int] = []
        self.ends = [(0, 0)] * nsegments
        for step in steps:
            self.at.append(len(self.code))
            self.code += [_KINDS[step[0]], *self._flat(*step)]
            if step[0] == "run":
                self.ends[step[1]] = len(step[2]), len(step[3])

    @staticmethod
    def _within(numbers: Sequence[int], most: int) -> None:
        if any(not isinstance(n, int) or not 0 <= n < most for n in numbers):
            raise MachineError("the code of lanes has a number that is out of range")

    def _registers(self, *numbers: int) -> list[int]:
        self._within(numbers, self._width)
        return list(numbers)

    def _place(self, pc: int) -> int:
        self._within([pc], len(self._steps))
        return pc

    def size(self, nbytes: int) -> int:
        """The number of that size of rows."""
        self._within([nbytes], 1 << 62)
        if nbytes not in self.sizes:
            self.sizes.append(nbytes)
        return self.sizes.index(nbytes)

    def _flat(self, kind: str, *rest: Any) -> list[int]:
        """A step as numbers, as `plan/lanes.c` reads it."""
        reg, size = self._registers, self.size
        if kind == "run":
            number, ins, outs = rest
            of = [[x for r, n in each for x in (*reg(r), size(n))] for each in (ins, outs)]
            return [number, len(ins), *of[0], len(outs), *of[1]]
        if kind == "dup":
            to, of_, nbytes = rest
            return [*reg(to, of_), size(nbytes)]
        if kind == "const":
            to, number, nbytes = rest
            self._within([number], self._nshared)
            return [*reg(to), number, size(nbytes)]
        if kind == "take":
            to, of_, index, length, nbytes, dtype = rest
            sizes = size(length * nbytes), size(nbytes)
            return [*reg(to, of_), sizes[0], length, sizes[1], *self._index(index, dtype)]
        if kind == "put":
            to, value, index, length, count, nbytes, dtype = rest
            sizes = size(length * nbytes), size(count * nbytes)
            return [*reg(to, value), sizes[0], length, sizes[1], count, *self._index(index, dtype)]
        if kind == "split":
            register, nbytes, dtype, other = rest
            condition = DType.of(dtype)
            if condition.itemsize != nbytes:
                raise MachineError(f"a condition of lanes has {nbytes} bytes, {condition} has not")
            return [*reg(register), size(nbytes), DTYPES.index(condition), self._place(other)]
        if kind == "call":
            entry, passed, left = rest
            pairs = [reg(*[r for pair in each for r in pair]) for each in (passed, left)]
            return [self._place(entry), len(passed), *pairs[0], len(left), *pairs[1]]
        if kind in ("push", "read"):
            number, registers = rest if kind == "push" else rest[::-1]
            return [*reg(number), size(8), len(registers), *reg(*registers)]
        if kind == "add":
            number, registers = rest
            return [number, len(registers), *reg(*registers)]
        if kind == "check":
            register, nbytes, _ = rest
            return [*reg(register), size(nbytes)]
        return [self._place(*rest)] if kind == "jump" else reg(*rest)

    def _index(self, register: int, dtype: str) -> list[int]:
        of = np.dtype(dtype)
        if of.kind not in "iu":
            raise MachineError(f"the code of lanes has an index of {of}")
        return [*self._registers(register), self.size(of.itemsize), int(of.kind == "i")]


class NativeLanes:
    """Runs steps in C. `part(segment, count)` has a program, and the arrays that it reads its
    operands from and leaves results in; `run` runs it; `grow(nbytes, used, more)` is the memory of
    rows of that size, which has room for more."""

    def __init__(
        self,
        steps: Sequence[Sequence[Any]],
        heavy: Sequence[int],
        width: int,
        segments: Sequence[Sequence[int]],
        sites: Sequence[int],
        nshared: int,
        part: Callable[[int, int], tuple[object, Sequence[Array], Sequence[Array]]],
        run: Callable[[int, int], None],
        grow: Callable[[int, int, int], Array],
    ) -> None:
        self._part, self.run, self._grow = part, run, grow
        self._steps = steps
        flat = Flat(steps, heavy, width, len(segments), len(sites), nshared)
        self.sizes = flat.sizes
        told = [(_ints(counts), *n) for counts, n in zip(segments, flat.ends, strict=True)]
        arrays = _ints(flat.code), _ints(flat.at), _ints(heavy)
        self.lanes = Lanes(*arrays, width, _ints(flat.sizes), told, _ints(sites), nshared)

    def go(
        self, pool: Pool, first: Array, rows: Sequence[tuple[Array, int]], shared: Sequence[Array]
    ) -> tuple[Array, list[tuple[Array, list[Array]]], Array, Array]:
        """Run the lanes whose registers are `first`, with rows of each size, of which so many are
        used. Returns the registers at the end, what is said for sums, and of all frames the caller
        and the depth."""
        places = [(_address(x), len(x), used) for x, used in rows]
        shares = _ints([_address(x) for x in shared])
        regs, said, parents, depths = self.lanes.run(pool, self, first, _ints(places), shares)
        return (
            _numbers(regs).reshape(first.shape),
            [(_numbers(frames), list(map(_numbers, each))) for frames, each in said],
            _numbers(parents),
            _numbers(depths),
        )

    # --- what C asks ------------------------------------------------------------------------

    def grow(self, size: int, used: int, more: int) -> tuple[int, int]:
        data = self._grow(self.sizes[size], used, more)
        return _address(data), len(data)

    def part(self, segment: int, count: int) -> tuple[object, tuple[int, ...], tuple[int, ...]]:
        program, given, left = self._part(segment, count)
        return program, tuple(map(_address, given)), tuple(map(_address, left))

    def refuse(self, what: str, a: int, b: int) -> NoReturn:
        if what == "index":
            raise OperandValueError(f"index {a} is out of range for length {b}")
        if what == "depth":
            raise LimitExceeded(f"{a} calls lie within each other, the most that may")
        if what == "check":
            raise CheckFailed(self._steps[a][3])
        raise MachineError("no such record is there")


def _ints(numbers: Any) -> Array:
    return np.array(numbers, np.int64)


def _numbers(raw: bytes) -> Array:
    return np.frombuffer(raw, np.int64)


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address
