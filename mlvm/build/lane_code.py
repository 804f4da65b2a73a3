"""Lanes in the form that `src/lanes.c` runs, from the linker `mlvm.machines.lane_link`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mlvm.arena.placement import rounded
from mlvm.build.lower import Calls, Temporary
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, i64
from mlvm.machines.lane_link import LaneProgram, Linked, RowSegment
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.lanes import Flat


class LaneCall(NamedTuple):
    """Call of a kernel: numbers of places, and the offset of the scratch memory."""

    call: KernelCall
    places: tuple[int, ...]
    scratch: int


class LanePart(NamedTuple):
    """Calls for a number of rows, and the offsets of operands and results."""

    rows: int
    calls: list[LaneCall]
    operands: list[int]
    results: list[int]


Runs: TypeAlias = Callable[[Program, Sequence[TensorType]], Calls]


class LaneCode:
    """Program for rows, with memory.

    runs: makes the calls of a program.
    scratch_of: the bytes of scratch memory of a call.
    at, nbytes: the range in the step's memory.
    places: of the calls' parameters: (number of a shared operand or -1, offset).

    Raises `MachineError`, `ProgramError`, `KeyError` and similar errors for text that is no such
    program.
    """

    def __init__(
        self,
        program: LaneProgram,
        functions: FunctionTable,
        runs: Runs,
        scratch_of: Callable[[KernelCall], int],
    ) -> None:
        types = program.types
        verify(program.rows, functions, [*types.args, *types.shared])
        self.linked = linked = Linked(program)
        self._runs, self._scratch_of = runs, scratch_of
        self.at = self.nbytes = 0
        self.nsums, self.nargs = types.sums, len(types.args)
        nhoisted = 0 if linked.first is None else len(linked.first.outs)
        self.shared = types.shared[: len(types.shared) - nhoisted]
        self.flat = Flat(linked)
        self.places: dict[tuple[int, int], int] = {}
        sites = [linked.segments[name] for name in linked.sites]
        self.sums = {site.sum: site.outs[0] for site in sites}  # bytes by sum
        nbytes = [max(type.nbytes, 1) for type in types.shared[len(self.shared) :]]
        self.hoisted = [self._take(each) for each in nbytes]
        self._begin = self.nbytes
        self.params = [(register, self.flat.size(n)) for register, n in linked.params]
        self.returned = [(register, self.flat.size(n)) for register, n in linked.returned]
        names = [*linked.runs, *linked.sites]
        self.segments = [self._parts(linked.segments[name]) for name in names]
        self.sites = [
            (len(linked.runs) + i, site.sum, site.outs[0], [self.flat.size(n) for n in site.ins])
            for i, site in enumerate(sites)
        ]
        self.first = None
        if linked.first is not None:
            self.first = self._part(1, linked.first, [], nbytes, self.hoisted)

    def _take(self, nbytes: int) -> int:
        at = self.nbytes
        self.nbytes = at + rounded(max(nbytes, 1))
        return at

    def _parts(self, segment: RowSegment) -> list[LanePart]:
        """Build the parts of a segment, largest first."""
        counts = sorted(segment.parts, reverse=True)
        return [self._part(count, segment, *segment.rows(count)) for count in counts]

    def _part(
        self,
        count: int,
        segment: RowSegment,
        ins: Sequence[int],
        outs: Sequence[int],
        hoisted: list[int] | None = None,
    ) -> LanePart:
        """Build a part; parts share memory."""
        end, self.nbytes = self.nbytes, self._begin
        part = segment.parts[count].code
        operands = [self._take(nbytes) for nbytes in ins]
        results = hoisted if hoisted is not None else [self._take(nbytes) for nbytes in outs]
        scratch = self._take(part.nbytes)
        where = []
        for role, place, type in part.arguments:
            if role == "input" and place >= len(operands):
                number = segment.shared[place - len(operands)] - self.nargs
                room, at, where_ = self.linked.shared[number].nbytes, 0, number
            elif role == "scratch":
                room, at, where_ = part.nbytes - place, scratch + place, -1
            else:
                rooms, ats = (ins, operands) if role == "input" else (outs, results)
                room, at, where_ = rooms[place], ats[place], -1
            if not 0 <= type.nbytes <= room:
                raise ValueError(f"{type.nbytes} bytes do not fit in {room}")
            where.append(self._place(where_, at))
        runs = self._runs(part.program, [type for _, _, type in part.arguments])
        ends = [x.at + x.nbytes for _, xs in runs for x in xs if isinstance(x, Temporary)]
        temporaries = self._take(max(ends, default=0))
        scratch_at = self._take(max([self._scratch_of(call) for call, _ in runs], default=0))
        calls = []
        for call, parameters in runs:
            places = [
                self._place(-1, temporaries + x.at) if isinstance(x, Temporary) else where[x]
                for x in parameters
            ]
            calls.append(LaneCall(call, tuple(places), scratch_at))
        self.nbytes = max(end, self.nbytes)
        return LanePart(count, calls, operands, results)

    def _place(self, shared: int, at: int) -> int:
        return self.places.setdefault((shared, at), len(self.places))

    def takes(self, types: Sequence[TensorType | None]) -> bool:
        """Return True if parameters of these types fit."""
        nresults, nargs = len(self.returned), self.nargs
        if None in types or len(types) != nresults + self.nsums + 1 + nargs + len(self.shared):
            return False
        rest = [type for type in types if type is not None]
        results, rest = rest[:nresults], rest[nresults:]
        sums, number, rest = rest[: self.nsums], rest[self.nsums], rest[self.nsums + 1 :]
        sizes = [self.flat.sizes[size] for _, size in (*self.returned, *self.params)]
        rows = zip([*results, *rest[:nargs]], sizes, strict=True)
        shared = zip(rest[nargs:], self.shared, strict=True)
        return (
            number is TensorType(i64)
            and all(x.ndim > 0 and x.nbytes == x.shape[0] * nbytes for x, nbytes in rows)
            and all(x.nbytes >= type.nbytes for x, type in shared)
            and all(sums[i].nbytes == nbytes for i, nbytes in self.sums.items())
        )
