"""Lanes as `src/lanes.c` runs them: what `mlvm.machines.lane_link` makes of a program for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, i64
from mlvm.machines import lane_link
from mlvm.machines.lane_link import Linked, Segment
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.lanes import Flat
from mlvm.machines.standalone.lower import Temporary

_ALIGNMENT = 64


class Call(NamedTuple):
    """A kernel's call: numbers of places, and the byte from which on it has its scratch memory."""

    call: KernelCall
    places: tuple[int, ...]
    scratch: int


class Part(NamedTuple):
    """Calls for so many rows; from which bytes on operands and results lie."""

    rows: int
    calls: list[Call]
    given: list[int]
    left: list[int]


Runs = Callable[
    [Program, Sequence[TensorType]], list[tuple[KernelCall, tuple[int | Temporary, ...]]]
]


class LaneCode:
    """A program for rows. `runs` makes kernels' calls of a program, and `beside` says what scratch
    memory a call needs. It has `nbytes` of memory of its own, from byte `at` of the step's on.
    `places`: where the calls' parameters lie, a shared operand's number or -1, and a byte.

    Raises `MachineError`, `ProgramError`, and `KeyError` and the like, for what is none."""

    def __init__(
        self,
        text: str,
        functions: FunctionTable,
        runs: Runs,
        beside: Callable[[KernelCall], int],
    ) -> None:
        program = lane_link.program_of(text)
        types = lane_link.types_of(program)
        verify(program, functions, [*types.args, *types.shared])
        self.linked = linked = Linked(program, types, lane_link.segments_of(program))
        self._runs, self._beside = runs, beside
        self.at = self.nbytes = 0
        self.nsums, self.nargs = types.sums, len(types.args)
        made = 0 if linked.first is None else len(linked.first.outs)
        self.given = types.shared[: len(types.shared) - made]
        self.flat = Flat(linked)
        self.places: dict[tuple[int, int], int] = {}
        sites = [linked.segments[name] for name in linked.sites]
        self.sums = {site.sum: site.outs[0] for site in sites}  # bytes of each
        nbytes = [max(type.nbytes, 1) for type in types.shared[len(self.given) :]]
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
        self.nbytes = at + -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return at

    def _parts(self, segment: Segment) -> list[Part]:
        """A segment's parts, the largest first."""
        counts = sorted(segment.parts, reverse=True)
        return [self._part(count, segment, *segment.rows(count)) for count in counts]

    def _part(
        self,
        count: int,
        segment: Segment,
        ins: Sequence[int],
        outs: Sequence[int],
        hoisted: list[int] | None = None,
    ) -> Part:
        """A program, which lies over those of other parts."""
        end, self.nbytes = self.nbytes, self._begin
        part = segment.parts[count]
        given = [self._take(nbytes) for nbytes in ins]
        left = hoisted if hoisted is not None else [self._take(nbytes) for nbytes in outs]
        scratch = self._take(part.nbytes)
        where = []
        for role, place, type in part.arguments:
            if role == "input" and place >= len(given):
                number = segment.shared[place - len(given)] - self.nargs
                room, at, where_ = self.linked.shared[number].nbytes, 0, number
            elif role == "scratch":
                room, at, where_ = part.nbytes - place, scratch + place, -1
            else:
                rooms, ats = (ins, given) if role == "input" else (outs, left)
                room, at, where_ = rooms[place], ats[place], -1
            if not 0 <= type.nbytes <= room:
                raise ValueError(f"{type.nbytes} bytes do not fit in {room}")
            where.append(self._place(where_, at))
        runs = self._runs(part.program, [type for _, _, type in part.arguments])
        made = [x for _, parameters in runs for x in parameters if isinstance(x, Temporary)]
        temporaries = self._take(max([x.at + x.type.nbytes for x in made], default=0))
        beside = self._take(max([self._beside(call) for call, _ in runs], default=0))
        calls = []
        for call, parameters in runs:
            places = [
                self._place(-1, temporaries + x.at) if isinstance(x, Temporary) else where[x]
                for x in parameters
            ]
            calls.append(Call(call, tuple(places), beside))
        self.nbytes = max(end, self.nbytes)
        return Part(count, calls, given, left)

    def _place(self, shared: int, at: int) -> int:
        return self.places.setdefault((shared, at), len(self.places))

    def takes(self, types: Sequence[TensorType | None]) -> bool:
        """Whether parameters of these types fit."""
        nresults, nargs = len(self.returned), self.nargs
        if None in types or len(types) != nresults + self.nsums + 1 + nargs + len(self.given):
            return False
        known = [type for type in types if type is not None]
        results, known = known[:nresults], known[nresults:]
        sums, number, known = known[: self.nsums], known[self.nsums], known[self.nsums + 1 :]
        sizes = [self.flat.sizes[size] for _, size in (*self.returned, *self.params)]
        rows = zip([*results, *known[:nargs]], sizes, strict=True)
        shared = zip(known[nargs:], self.given, strict=True)
        return (
            number is TensorType(i64)
            and all(x.ndim > 0 and x.nbytes == x.shape[0] * nbytes for x, nbytes in rows)
            and all(x.nbytes >= wanted.nbytes for x, wanted in shared)
            and all(sums[i].nbytes == nbytes for i, nbytes in self.sums.items())
        )
