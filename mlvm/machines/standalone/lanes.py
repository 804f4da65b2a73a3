"""Lanes as `src/lanes.c` runs them: what `mlvm.machines.lanes` makes of its code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.types import DType, TensorType, i64
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


class Site(NamedTuple):
    """The number of a sum, of each operand the number of the size of its rows, and parts."""

    sum: int
    sizes: list[int]
    parts: list[Part]


Runs = Callable[
    [Program, Sequence[TensorType]], list[tuple[KernelCall, tuple[int | Temporary, ...]]]
]


class LaneCode:
    """A code of lanes. `runs` makes kernels' calls of a program, and `beside` says what scratch
    memory a call needs. It has `nbytes` of memory of its own, from byte `at` of the step's on.
    `places`: where the calls' parameters lie, a shared operand's number or -1, and a byte.

    Raises `MachineError`, and `KeyError` and the like, for what is no code."""

    def __init__(self, text: str, runs: Runs, beside: Callable[[KernelCall], int]) -> None:
        told = json.loads(text)
        self._runs, self._beside = runs, beside
        self.at = self.nbytes = 0
        self.nresults, self.nsums, self.nargs = told["results"], told["sums"], told["args"]
        self.given: int = told["shared"]
        self.width: int = told["width"]
        self.steps: list[tuple[Any, ...]] = [tuple(step) for step in told["steps"]]
        self.heavy = frozenset(told["heavy"])
        counts = len(told["segments"]), len(told["sites"]), self.given + len(told["hoisted"])
        self.flat = Flat(self.steps, told["heavy"], self.width, *counts)
        self.places: dict[tuple[int, int], int] = {}
        self.needs: dict[int, int] = {}  # bytes that are read of a shared operand
        self.sums: dict[int, int] = {}  # bytes of a sum
        self.hoisted = [self._take(nbytes) for nbytes in told["hoisted"]]
        self._begin = self.nbytes
        self.params = [(register, self.flat.size(n)) for register, n in told["params"]]
        self.returned = [(register, self.flat.size(n)) for register, n in told["returned"]]
        for step in self.steps:
            if step[0] == "const":
                self._need(step[2], step[3])
        self.segments: list[list[Part]] = [[] for _ in told["segments"]]
        for step in self.steps:
            if step[0] == "run":
                _, number, ins, outs = step
                sizes = [n for _, n in ins], [n for _, n in outs]
                self.segments[number] = self._parts(told["segments"][number], *sizes)
        self.sites = [self._site(each) for each in told["sites"]]
        self.first = None
        if told["first"] is not None:
            self.first = self._part(1, told["first"], [], told["hoisted"], self.hoisted)

    def _take(self, nbytes: int) -> int:
        at = self.nbytes
        self.nbytes = at + -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return at

    def _need(self, number: int, nbytes: int) -> None:
        if number < self.given:
            self.needs[number] = max(self.needs.get(number, 0), nbytes)

    def _site(self, told: Mapping[str, Any]) -> Site:
        sizes = told["sizes"]
        nbytes = max(
            TensorType(DType.named(dtype), tuple(shape)).nbytes
            for part in told["parts"].values()
            for role, place, dtype, shape in part["arguments"]
            if place == 0 and role in ("input", "output")
        )
        self.sums[told["sum"]] = max(self.sums.get(told["sum"], 0), nbytes)
        parts = self._parts(told, sizes, [nbytes], total=nbytes)
        return Site(told["sum"], [self.flat.size(n) for n in sizes], parts)

    def _parts(
        self,
        told: Mapping[str, Any],
        ins: Sequence[int],
        outs: Sequence[int],
        total: int | None = None,
    ) -> list[Part]:
        """A segment's parts, the largest first; before the operands there may be a `total`."""
        parts = []
        for count in sorted(map(int, told["parts"]), reverse=True):
            given = [count * nbytes for nbytes in ins]
            left = [nbytes if total is not None else count * nbytes for nbytes in outs]
            given = given if total is None else [total, *given]
            part = {**told, "parts": {"1": told["parts"][str(count)]}}
            parts.append(self._part(count, part, given, left))
        return parts

    def _part(
        self,
        count: int,
        told: Mapping[str, Any],
        ins: Sequence[int],
        outs: Sequence[int],
        hoisted: list[int] | None = None,
    ) -> Part:
        """A program, which lies over those of other parts."""
        end, self.nbytes = self.nbytes, self._begin
        program, shared = told["parts"]["1"], told["shared"]
        given = [self._take(nbytes) for nbytes in ins]
        left = hoisted if hoisted is not None else [self._take(nbytes) for nbytes in outs]
        scratch = self._take(program["nbytes"])
        types, where = [], []
        for role, place, dtype, shape in program["arguments"]:
            types.append(TensorType(DType.named(dtype), tuple(shape)))
            nbytes = types[-1].nbytes
            if role == "input" and place >= len(given):
                where.append(self._place(shared[place - len(given)], 0))
                self._need(shared[place - len(given)], nbytes)
                continue
            at, room = scratch + place, program["nbytes"] - place
            if role != "scratch":
                at, room = (
                    (given[place], ins[place]) if role == "input" else (left[place], outs[place])
                )
            if not 0 <= nbytes <= room:
                raise ValueError(f"{nbytes} bytes do not fit in {room}")
            where.append(self._place(-1, at))
        runs = self._runs(assemble(program["text"]), types)
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
        nresults, nargs = self.nresults, self.nargs
        if None in types or len(types) != nresults + self.nsums + 1 + nargs + self.given:
            return False
        known = [type for type in types if type is not None]
        results, known = known[:nresults], known[nresults:]
        sums, number, known = known[: self.nsums], known[self.nsums], known[self.nsums + 1 :]
        sizes = [self.flat.sizes[size] for _, size in (*self.returned, *self.params)]
        rows = zip([*results, *known[:nargs]], sizes, strict=True)
        return (
            number is TensorType(i64)
            and all(x.ndim > 0 and x.nbytes == x.shape[0] * nbytes for x, nbytes in rows)
            and all(known[nargs + i].nbytes >= nbytes for i, nbytes in self.needs.items())
            and all(sums[i].nbytes == nbytes for i, nbytes in self.sums.items())
        )
