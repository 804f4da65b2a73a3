"""Lanes: one recorded function, run for many inputs at once, each with frames of its own.

A frame is one call of a function: the call of a lane, or one that a frame has made. It has a place
in the code, as a program counter, and for each of its values the number of a row. Rows of one size
lie in one growing buffer. All frames that wait at one place run what stands there in one go: the
operands' rows are gathered, a program of so many rows runs, and its results are the buffer's next
rows (Radul et al., arXiv 1910.11141; Neubig et al., arXiv 1705.07860). Calls are futures: a frame
goes on until it needs what they make.

    lanes.run {"code": c}    ( o1 .. oj s1 .. sk n x1 .. xl w1 .. wm -- )

runs the first n lanes. Lane i is given row i of each x and the whole of each w. It leaves row i of
each o. Sums over all frames are in s. How many of each there are, `code` says, a JSON object that
`mlvm.step.lanes` writes.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import (
    CheckFailed,
    LimitExceeded,
    MachineError,
    MlvmError,
    OperandValueError,
)
from mlvm.core.machine.callee import Value, is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.machine.link import bind, link
from mlvm.core.machine.run import MAX_DEPTH
from mlvm.core.machine.verify import verify
from mlvm.core.memory import HOST
from mlvm.core.ops.half import are_true
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.types import ALIGNMENT, Array, DType, TensorType, u8
from mlvm.core.vm import VM

RUN: Final = "lanes.run"

_MOST_CODES: Final = 64
_FEW: Final = 64

Step: TypeAlias = tuple[Any, ...]
Ended: TypeAlias = tuple[Array, Sequence[tuple[Array, list[Array]]], Array, Array]
"""How lanes have ended: their registers; what frames have said at each site, and which did; of all
frames the caller, and the depth."""


class _Rows:
    """Rows of so many bytes, in the VM's memory."""

    def __init__(self, vm: VM, nbytes: int) -> None:
        self._vm = weakref.ref(vm)
        self.nbytes = nbytes
        self.used = 0
        self._handle: int | None = None
        self.data: Array = np.empty((0, nbytes), np.uint8)

    def more(self, count: int) -> int:
        """Room for so many more. Returns the first's number."""
        first, self.used = self.used, self.used + count
        if self.used > len(self.data):
            rows = max(self.used, 2 * len(self.data), _FEW)
            vm, before, old = self._vm(), self.data, self._handle
            assert vm is not None  # it runs a program
            self._handle = vm.alloc_tensor(TensorType(u8, (rows, self.nbytes)))
            self.data = vm.array_of(self._handle)
            self.data[:first] = before[:first]
            if old is not None:
                vm.dealloc_tensor(old)
        return first

    def hold_one(self) -> None:
        """Have room for one at least, which stands for those that nothing has been written to."""
        if not len(self.data):
            self.more(1)
            self.used = 0

    def put(self, rows: Array) -> Array:
        """The numbers of new rows with these bytes."""
        first = self.more(len(rows))
        self.data[first : self.used] = rows
        return np.arange(first, self.used)

    def lend(self, rows: Array) -> Array:
        """Have these as the only rows, where they lie. Returns their numbers."""
        self.data, self.used = rows, len(rows)
        return np.arange(self.used)

    def of(self, numbers: Array, dtype: Any) -> Array:
        """What these rows hold, each one element."""
        chosen = np.take(self.data, numbers, axis=0, mode="clip")
        held: Array = chosen.view(dtype)[:, 0]
        return held

    def parts(self, nbytes: int) -> Array:
        """The rows in use, each in parts of so many bytes."""
        return self.data.reshape(-1, nbytes)

    def free(self) -> None:
        vm = self._vm()
        if vm is not None and self._handle is not None:
            vm.dealloc_tensor(self._handle)


class _Part:
    """A program over so many rows, and the memory it works in."""

    def __init__(self, vm: VM, told: Mapping[str, Any]) -> None:
        self.program = assemble(told["text"])
        self.arguments = [
            (role, place, TensorType(DType.named(dtype), tuple(shape)))
            for role, place, dtype, shape in told["arguments"]
        ]
        self.nbytes: int = told["nbytes"]  # of its scratch memory
        self._vm = weakref.ref(vm)
        self._of: tuple[Any, ...] = ()
        self._run: Callable[[], object] = lambda: None

    def run(self, given: Sequence[Array], left: Sequence[Array], scratch: Array) -> None:
        """Run it on arrays that it is given, and those that it leaves results in."""
        arrays = [*given, *left, scratch]
        known = self._of
        if len(known) != len(arrays) or any(x is not y for x, y in zip(known, arrays, strict=True)):
            self._run = self.bound(given, left, scratch)
            self._of = tuple(arrays)
        self._run()

    def bound(
        self, given: Sequence[Array], left: Sequence[Array], scratch: Array
    ) -> partial[list[Value]]:
        """What runs it on these arrays."""
        operands = []
        for role, place, type in self.arguments:
            if role == "scratch":
                x = scratch[place : place + type.nbytes]
            else:
                x = (given if role == "input" else left)[place].reshape(-1).view(np.uint8)
            operands.append(x[: type.nbytes].view(type.dtype.numpy).reshape(type.shape))
        vm = self._vm()
        assert vm is not None
        return _prepared(vm, self.program, tuple(operands))


def _prepared(vm: VM, program: Program, operands: tuple[Array, ...]) -> partial[list[Value]]:
    """What runs the program on these arrays, again and again, as a launch does. Raises what
    `verify` raises."""
    types = tuple(map(TensorType.of, operands))
    verdict = verify(program, vm.functions, types) if vm.checked else None
    code = link(program, vm.functions, verdict, deferred=False)
    code = bind(code, operands, vm._workspace, checked=vm.checked)
    return partial(vm._run, code, operands, vm._store, vm.functions)


class _Segment:
    """Steps that run for many frames at once: a program for each of some numbers of rows."""

    def __init__(self, vm: VM, told: Mapping[str, Any]) -> None:
        self._vm, self._told = weakref.ref(vm), told["parts"]
        self.shared: list[int] = told["shared"]
        self.counts = sorted(map(int, self._told), reverse=True)
        self._parts: dict[int, _Part] = {}

    def part(self, count: int) -> _Part:
        found = self._parts.get(count)
        if found is None:
            vm = self._vm()
            assert vm is not None
            found = self._parts[count] = _Part(vm, self._told[str(count)])
        return found

    def cut(self, total: int) -> list[tuple[int, int, int]]:
        """So many rows in pieces that there are programs for: first, last and how many."""
        pieces, first = [], 0
        for count in self.counts:
            while total - first >= count:
                pieces.append((first, first + count, count))
                first += count
        return pieces


class Lanes:
    """The lanes of one code on one VM: its programs, and memory that is kept for the next run."""

    def __init__(self, vm: VM, text: str) -> None:
        told = json.loads(text)
        self.nresults, self.nargs, self.nshared = told["results"], told["args"], told["shared"]
        self.steps: list[Step] = [tuple(step) for step in told["steps"]]
        self.width: int = told["width"]
        self.heavy = frozenset(told["heavy"])
        self.params: list[tuple[int, int]] = told["params"]
        self.returned: list[tuple[int, int]] = told["returned"]
        self.segments = [_Segment(vm, each) for each in told["segments"]]
        self.first = None if told["first"] is None else _Segment(vm, told["first"])
        self.hoisted: list[Array] = []
        self.sites: list[Any] = [
            (site["sum"], site["sizes"], _Segment(vm, site)) for site in told["sites"]
        ]
        self.sums: int = told["sums"]
        self._vm = weakref.ref(vm)
        self.rows: dict[int, _Rows] = {}
        self.shared: list[Array] = []
        self._native: Any = None  # what runs its steps in C
        self._bound_to: list[Array] = []  # the shared operands of its programs
        self._constants = [step[2:] for step in self.steps if step[0] == "const"]
        self._ends = {
            number: ([nbytes for _, nbytes in ins], [nbytes for _, nbytes in outs])
            for kind, number, ins, outs in [step for step in self.steps if step[0] == "run"]
        }
        given = [nbytes for _, nbytes in self.params]
        self._lent = {n for n in given if n and given.count(n) == 1} - set(_made(self.steps))
        self._lent -= {nbytes for _, nbytes in self.returned}
        self._areas: dict[tuple[int, int], Array] = {}
        self._shared_before: list[Array] = []
        self._handles: list[int] = []
        scratch = max(
            [
                part["nbytes"]
                for each in [*told["segments"], *told["sites"], told["first"] or {"parts": {}}]
                for part in each["parts"].values()
            ],
            default=0,
        )
        self.scratch = self._new(max(scratch, 1))
        self.hoisted = [self._new(nbytes) for nbytes in told["hoisted"]]

    def _new(self, nbytes: int) -> Array:
        vm = self._vm()
        assert vm is not None
        handle = vm.alloc_tensor(TensorType(u8, (nbytes,)))
        self._handles.append(handle)
        return vm.array_of(handle)

    def free(self) -> None:
        """Give its memory back."""
        vm = self._vm()
        for rows in self.rows.values():
            rows.free()
        for handle in self._handles:
            if vm is not None:
                vm.dealloc_tensor(handle)

    def of(self, nbytes: int) -> _Rows:
        found = self.rows.get(nbytes)
        if found is None:
            vm = self._vm()
            assert vm is not None
            found = self.rows[nbytes] = _Rows(vm, nbytes)
        return found

    def _area(self, number: int, nbytes: int) -> Array:
        """Memory for an operand or a result of a segment."""
        found = self._areas.get((number, nbytes))
        if found is None:
            found = self._areas[number, nbytes] = self._new(max(nbytes, ALIGNMENT))
        return found

    def _same(self, given: Sequence[Array]) -> list[Array]:
        """The shared operands; those of the run before, where they are the same memory."""
        before = self._shared_before
        if len(before) != len(given):
            before = [np.empty(0)] * len(given)
        self._shared_before = [
            y if x.__array_interface__ == y.__array_interface__ else x
            for x, y in zip(given, before, strict=True)
        ]
        return self._shared_before

    def run(self, arrays: Sequence[Array]) -> None:
        """Run lanes on the parameters of the host function."""
        nresults, nsums, nargs = self.nresults, self.sums, self.nargs
        results, arrays = arrays[:nresults], arrays[nresults:]
        sums, (number, *arrays) = arrays[:nsums], arrays[nsums:]
        count = int(number)
        args, given = arrays[:nargs], self._same(arrays[nargs:])
        for rows in self.rows.values():
            rows.used = 0
        self.shared = [*given, *self.hoisted]
        if self.first is not None:
            self.first.part(1).run(
                [given[i] for i in self.first.shared], self.hoisted, self.scratch
            )
        if count < 0 or any(len(x) < count for x in (*args, *results)):
            raise OperandValueError(f"there are not as many as {count} lanes")
        regs = np.full((count, self.width), -1, np.int64)
        for (register, nbytes), x in zip(self.params, args, strict=True):
            rows = self.of(nbytes)
            regs[:, register] = (rows.lend if nbytes in self._lent else rows.put)(
                _raw(x, nbytes)[:count]
            )
        try:
            regs, said, parents, depths = self._go(regs)
            for (register, nbytes), y in zip(self.returned, results, strict=True):
                y[count:] = 0
                if nbytes and count:
                    into = _raw(y, nbytes)[:count]
                    np.take(self.of(nbytes).data, regs[:, register], axis=0, out=into, mode="clip")
            self._add_up(sums, said, count, parents, depths)
        finally:
            for nbytes in self._lent:
                self.of(nbytes).lend(np.empty((0, nbytes), np.uint8))

    def _go(self, regs: Array) -> Ended:
        """Run the lanes from these registers on, in C where there is no reason against that."""
        vm = self._vm()
        assert vm is not None
        pool = getattr(vm, "_pool", None)
        if pool is None or vm.functions.instrument is not None:
            return Run(self, regs).go()
        if self._native is None:
            from mlvm.machines.native.lanes import NativeLanes

            self._native = NativeLanes(
                self.steps,
                sorted(self.heavy),
                self.width,
                [segment.counts for segment in self.segments],
                [len(sizes) for _, sizes, _ in self.sites],
                len(self.shared),
                self._part_of,
                lambda number, count: self._part_of(number, count, run=True) and None,
                self._grown,
            )
        native = self._native
        if any(x is not y for x, y in zip(self.shared, self._bound_to, strict=False)):
            native.lanes.forget()
        self._bound_to = self.shared
        if any(self.shared[number].nbytes < nbytes for number, nbytes in self._constants):
            raise MachineError("a shared operand has fewer bytes than the code of lanes says")
        for nbytes in native.sizes:
            self.of(nbytes).hold_one()
        rows = [(self.of(nbytes).data, self.of(nbytes).used) for nbytes in native.sizes]
        return native.go(pool, regs, rows, self.shared)  # type: ignore[no-any-return]

    def _grown(self, nbytes: int, used: int, more: int) -> Array:
        rows = self.of(nbytes)
        rows.used = used
        rows.more(more)
        return rows.data

    def _part_of(
        self, number: int, count: int, *, run: bool = False
    ) -> tuple[object, list[Array], list[Array]]:
        """The program of a segment for so many rows, and where it reads and leaves them."""
        from mlvm.machines.native.lanes import program_of

        segment = self.segments[number]
        part = segment.part(count)
        ins, outs = self._ends[number]
        given = [self._area(k, count * nbytes) for k, nbytes in enumerate(ins)]
        left = [self._area(-1 - k, count * nbytes) for k, nbytes in enumerate(outs)]
        arrays = [*given, *[self.shared[i] for i in segment.shared]]
        if run:
            part.run(arrays, left, self.scratch)
            return None, given, left
        vm = self._vm()
        assert vm is not None
        code, operands = part.bound(arrays, left, self.scratch).args[:2]
        return program_of(code, operands, vm.functions), given, left

    def run_segment(
        self,
        segment: _Segment,
        operands: Sequence[tuple[Array, int]],
        outs: Sequence[int],
        total: int,
    ) -> list[Array]:
        """Run it for so many rows: operands are numbers of rows, and their sizes; of the results
        there are the sizes. Returns the numbers of the results' rows."""
        shared = [self.shared[i] for i in segment.shared]
        first = [self.of(nbytes).more(total) for nbytes in outs]
        for start, stop, count in segment.cut(total):
            given = [
                self._gathered(k, numbers[start:stop], nbytes)
                for k, (numbers, nbytes) in enumerate(operands)
            ]
            left = [self._area(-1 - k, count * nbytes) for k, nbytes in enumerate(outs)]
            segment.part(count).run([*given, *shared], left, self.scratch)
            for k, (area, nbytes) in enumerate(zip(left, outs, strict=True)):
                made = area[: count * nbytes].reshape(count, nbytes)
                self.of(nbytes).data[first[k] + start : first[k] + stop] = made
        return [np.arange(at, at + total) for at in first]

    def _add_up(
        self,
        sums: Sequence[Array],
        said: Sequence[tuple[Array, list[Array]]],
        count: int,
        parents: Array,
        depths: Array,
    ) -> None:
        """Leave the sums of what frames have said. They are added up lane by lane, and in a lane in
        the order in which its calls would run one by one: no schedule changes a bit."""
        for x in sums:
            x[...] = 0
        order = _order(count, parents, depths) if any(len(frames) for frames, _ in said) else None
        for (place, sizes, segment), (frames, rows) in zip(self.sites, said, strict=True):
            if not len(frames) or order is None:
                continue
            chosen = np.argsort(order[frames], kind="stable")
            into = sums[place].reshape(-1).view(np.uint8)
            total, after = self._area(-1, len(into)), self._area(-2, len(into))
            total[: len(into)] = into
            shared = [self.shared[i] for i in segment.shared]
            for start, stop, n in segment.cut(len(frames)):
                given = [total]
                for k, (numbers, nbytes) in enumerate(zip(rows, sizes, strict=True)):
                    given.append(self._gathered(k, numbers[chosen[start:stop]], nbytes))
                segment.part(n).run([*given, *shared], [after], self.scratch)
                total[...] = after
            into[...] = total[: len(into)]

    def _gathered(self, k: int, numbers: Array, nbytes: int) -> Array:
        """Memory for operand k of a segment, with those rows."""
        area = self._area(k, len(numbers) * nbytes)
        if nbytes:
            into = area[: len(numbers) * nbytes].reshape(-1, nbytes)
            np.take(self.of(nbytes).data, numbers, axis=0, out=into, mode="clip")
        return area


def _made(steps: Sequence[Step]) -> Iterator[int]:
    """The sizes of the rows that steps make."""
    for kind, *rest in steps:
        if kind == "run":
            yield from [nbytes for _, nbytes in rest[2]]
        elif kind in ("dup", "const"):
            yield rest[2]
        elif kind == "take":
            yield rest[4]
        elif kind == "put":
            yield rest[3] * rest[5]
        elif kind == "push":
            yield 8


def _raw(x: Array, nbytes: int) -> Array:
    """The bytes of rows of so many bytes."""
    return x.reshape(-1).view(np.uint8).reshape(len(x), nbytes)


def _order(count: int, parents: Array, depths: Array) -> Array:
    """Of each frame the place in the order in which calls would run one by one; the first frames
    are those of the lanes."""
    n = len(parents)
    size = np.ones(n, np.int64)
    by_depth = np.argsort(depths, kind="stable")
    levels = np.split(by_depth, np.flatnonzero(np.diff(depths[by_depth])) + 1)
    for level in levels[:0:-1]:
        np.add.at(size, parents[level], size[level])
    place = np.zeros(n, np.int64)
    place[:count] = np.cumsum(size[:count]) - size[:count]
    for level in levels[1:]:
        level = level[np.argsort(parents[level], kind="stable")]
        ahead = np.cumsum(size[level]) - size[level]
        begins = np.flatnonzero(np.diff(parents[level], prepend=-1))
        runs = np.diff([*begins, len(level)])
        place[level] = place[parents[level]] + 1 + ahead - np.repeat(ahead[begins], runs)
    return place


class Run:
    """Frames on their way. The first ones are those of the lanes."""

    def __init__(self, lanes: Lanes, regs: Array) -> None:
        self.lanes, self.count = lanes, len(regs)
        self.n = 0
        self.regs = np.full((max(len(regs), _FEW), lanes.width), -1, np.int64)
        self.parent = np.full(len(self.regs), -1, np.int64)
        self.depth = np.zeros(len(self.regs), np.int64)
        self.site = np.full(len(self.regs), -1, np.int64)  # the step that has called it
        self.waits = np.zeros(len(self.regs), np.int64)  # for so many calls
        self.at = np.full(len(self.regs), -1, np.int64)  # where it waits for them
        self.ready: dict[int, list[Array]] = {}
        self.records: list[Array] = []  # blocks of records, each record a row of numbers
        self.nrecords = 0
        self.starts: list[int] = []
        self.said: list[list[tuple[Array, list[Array]]]] = [[] for _ in lanes.sites]
        self.shared_rows: dict[int, int] = {}
        self._more(self.count, np.full(self.count, -1), -1)
        self.regs[: self.count] = regs

    def _more(self, count: int, parents: Array, site: int) -> Array:
        """New frames, called from that step."""
        first, self.n = self.n, self.n + count
        if self.n > len(self.regs):
            extra = max(self.n, 2 * len(self.regs)) - len(self.regs)
            self.regs = np.concatenate([self.regs, np.full((extra, self.lanes.width), -1)])
            for name in ("parent", "site", "at", "depth", "waits"):
                before = getattr(self, name)
                setattr(
                    self,
                    name,
                    np.concatenate(
                        [before, np.full(extra, 0 if name in ("depth", "waits") else -1)]
                    ),
                )
        new = np.arange(first, self.n)
        self.parent[first : self.n] = parents
        self.site[first : self.n] = site
        if site >= 0:
            self.depth[first : self.n] = self.depth[parents] + 1
            if count and self.depth[first : self.n].max() > MAX_DEPTH:
                raise LimitExceeded(f"{MAX_DEPTH} calls lie within each other, the most that may")
        return new

    def go(self) -> Ended:
        """Run all frames to their end."""
        if self.count:
            self.ready[0] = [np.arange(self.count)]
        while self.ready:
            pc = self.choice()
            waiting = self.ready.pop(pc)
            self._steps(pc, waiting[0] if len(waiting) == 1 else np.concatenate(waiting))
        said = [
            (
                np.concatenate([frames for frames, _ in each]),
                list(map(np.concatenate, zip(*[rows for _, rows in each], strict=True))),
            )
            if each
            else (np.empty(0, np.int64), [])
            for each in self.said
        ]
        n = self.n
        return self.regs[: self.count], said, self.parent[:n], self.depth[:n]

    def choice(self) -> int:
        """Where to go on: what is light first, then where most frames wait, of these at the first
        place."""
        heavy, ready = self.lanes.heavy, self.ready
        light = [pc for pc in ready if pc not in heavy]
        return min(light) if light else min(ready, key=lambda pc: (-sum(map(len, ready[pc])), pc))

    def _wait(self, pc: int, frames: Array) -> None:
        if len(frames):
            self.ready.setdefault(pc, []).append(frames)

    def _steps(self, pc: int, frames: Array) -> None:
        """Run these frames until they wait."""
        lanes, first = self.lanes, pc
        while True:
            if pc in lanes.heavy and pc != first:
                self._wait(pc, frames)
                return
            kind, *rest = lanes.steps[pc]
            pc += 1
            if kind == "run":
                number, ins, outs = rest
                operands = [(self.regs[frames, r], nbytes) for r, nbytes in ins]
                sizes = [nbytes for _, nbytes in outs]
                made = lanes.run_segment(lanes.segments[number], operands, sizes, len(frames))
                for (r, _), numbers in zip(outs, made, strict=True):
                    self.regs[frames, r] = numbers
            elif kind == "move":
                to, of = rest
                self.regs[frames, to] = self.regs[frames, of]
            elif kind == "dup":
                to, of, nbytes = rest
                rows = lanes.of(nbytes)
                self.regs[frames, to] = rows.put(rows.data[self.regs[frames, of]])
            elif kind == "const":
                to, number, nbytes = rest
                self.regs[frames, to] = self._shared_row(number, nbytes)
            elif kind == "take":
                to, of, index, length, nbytes, dtype = rest
                places = self._places(frames, index, length, 1, dtype)
                if nbytes:
                    whole = lanes.of(length * nbytes)
                    parts = whole.parts(nbytes)
                    chosen = self.regs[frames, of] * length + places
                    self.regs[frames, to] = lanes.of(nbytes).put(parts[chosen])
                else:
                    self.regs[frames, to] = lanes.of(0).more(1)
            elif kind == "put":
                to, value, index, length, count, nbytes, dtype = rest
                rows = lanes.of(length * nbytes)
                fresh = frames[self.regs[frames, to] < 0]
                if len(fresh):
                    at = rows.more(len(fresh))
                    rows.data[at : rows.used] = 0
                    self.regs[fresh, to] = np.arange(at, rows.used)
                places = self._places(frames, index, length, count, dtype)
                if nbytes and count:
                    parts = rows.parts(nbytes)
                    new = lanes.of(count * nbytes).data[self.regs[frames, value]]
                    at = self.regs[frames, to] * length + places
                    parts[at[:, None] + np.arange(count)] = new.reshape(len(frames), count, nbytes)
            elif kind == "split":
                register, nbytes, dtype, other = rest
                numbers = self.regs[frames, register]
                held = are_true(lanes.of(nbytes).of(numbers, DType.of(dtype).numpy))
                self._wait(other, frames[~held])
                frames = frames[held]
            elif kind == "jump":
                [pc] = rest
            elif kind == "call":
                entry, passed, _ = rest
                called = self._more(len(frames), frames, pc - 1)
                for to, of in passed:
                    self.regs[called, to] = self.regs[frames, of]
                self.waits[frames] += 1
                self._wait(entry, called)
            elif kind == "join":
                waiting = self.waits[frames] > 0
                if waiting.any():
                    self.at[frames[waiting]] = pc
                    frames = frames[~waiting]
            elif kind == "return":
                self._return(frames)
                return
            elif kind == "push":
                number, registers = rest
                start = self.nrecords
                self.records.append(self.regs[frames][:, registers])
                self.starts.append(start)
                self.nrecords += len(frames)
                numbers = np.arange(start, self.nrecords) + 1
                self.regs[frames, number] = lanes.of(8).put(numbers.view(np.uint8).reshape(-1, 8))
            elif kind == "read":
                outs, number = rest
                self._read(frames, outs, lanes.of(8).of(self.regs[frames, number], np.int64) - 1)
            elif kind == "add":
                number, registers = rest
                self.said[number].append((frames, [self.regs[frames, r] for r in registers]))
            elif kind == "check":
                register, nbytes, message = rest
                held = lanes.of(nbytes).data[self.regs[frames, register]]
                if not held.all():
                    raise CheckFailed(message)
            else:
                raise MachineError(f"{RUN}: no step {kind!r}")
            if not len(frames):
                return

    def _places(self, frames: Array, index: int, length: int, count: int, dtype: str) -> Array:
        """The places that an index register of frames says, counted from the front."""
        size = np.dtype(dtype).itemsize
        given = self.lanes.of(size).of(self.regs[frames, index], dtype).astype(np.int64)
        places = np.where(given < 0, given + length, given)
        wrong = (places < 0) | (places > length - count)
        if wrong.any():
            raise OperandValueError(f"index {given[wrong][0]} is out of range for length {length}")
        return places

    def _shared_row(self, number: int, nbytes: int) -> int:
        found = self.shared_rows.get(number)
        if found is None:
            raw = self.lanes.shared[number].reshape(-1).view(np.uint8)[None, :nbytes]
            found = self.shared_rows[number] = int(self.lanes.of(nbytes).put(raw)[0])
        return found

    def _return(self, frames: Array) -> None:
        """Give what these frames have made to their callers."""
        parents = self.parent[frames]
        inner = parents >= 0
        if not inner.all():
            frames, parents = frames[inner], parents[inner]
        if not len(frames):
            return
        sites = self.site[frames]
        for site in [sites[0]] if (sites == sites[0]).all() else np.unique(sites):
            of = sites == site
            for to, result in self.lanes.steps[site][3]:
                self.regs[parents[of], to] = self.regs[frames[of], result]
        np.subtract.at(self.waits, parents, 1)
        free = parents[(self.waits[parents] == 0) & (self.at[parents] >= 0)]
        if len(free):
            free = np.unique(free)
            places = self.at[free]
            self.at[free] = -1
            for pc in np.unique(places):
                self._wait(int(pc), free[places == pc])

    def _read(self, frames: Array, outs: Sequence[int], numbers: Array) -> None:
        """Registers of frames from the records of those numbers."""
        blocks = np.searchsorted(self.starts, numbers, side="right") - 1
        for block in np.unique(blocks):
            of = blocks == block
            if block < 0 or (numbers[of] >= self.nrecords).any():
                raise OperandValueError("no such record is there")
            record = self.records[block][numbers[of] - self.starts[block]]
            for k, to in enumerate(outs):
                self.regs[frames[of], to] = record[:, k]


def register(vm: VM) -> None:
    """Make the function known to the VM's programs."""
    reference = weakref.ref(vm)
    known: dict[str, Lanes] = {}
    version = 0

    def run(frame: Frame) -> None:
        nonlocal version
        machine = reference()
        assert machine is not None  # it runs a program
        if machine.memory is not HOST:
            raise MachineError("lanes run where tensors lie in a process's memory")
        text = frame.attributes.get("code")
        arrays = list(filter(is_tensor, [frame.param(i) for i in range(frame.nparams)]))
        if not isinstance(text, str):
            raise MachineError(f"{RUN} takes its code as an attribute")
        try:
            if version != int(machine.functions.version):
                version = int(machine.functions.version)
                while known:  # their programs call functions that may have been replaced
                    known.popitem()[1].free()
            lanes = known.pop(text, None)
            if lanes is None:
                if len(known) >= _MOST_CODES:
                    known.pop(next(iter(known))).free()
                lanes = Lanes(machine, text)
            known[text] = lanes  # the last one used is the last
            lanes.run(arrays)
        except MlvmError:
            raise
        except (AttributeError, IndexError, KeyError, ValueError, TypeError) as error:
            raise MachineError(f"this is no code of lanes: {error!r}") from error

    vm.register_callees({RUN: PythonFunction(RUN, run, None, 0)})
