"""Lanes: one recorded function, run for many inputs at once, each with separate frames.

    lanes.run {"program": p}    ( o1 .. oj s1 .. sk n x1 .. xl w1 .. wm -- )

runs p, a program for one row (`lane_link`), on the first n rows of each x and all of each w. Row i
of each o is the result of row i; each s is a sum over all rows.

The definition is `run.py`, row by row. In C all frames that wait at one place run its step
together. The scheduler gathers the operands' rows, runs a program for that number of rows, and
appends its results as new rows (Radul et al., arXiv 1910.11141; Neubig et al., arXiv 1705.07860).

Programs for rows call these, too. Each call of one of their functions has a number, from 0 on:

    lanes.frame {"locals": t}   ( -- i t1 .. tn )       the number of the call, and zeros of types t
    lanes.add {"site": s}       ( i x1 .. xn -- )       adds to a sum, as the parts of site s do
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mlvm.core.errors import MachineError, MlvmError, OperandValueError
from mlvm.core.machine.callee import Value, is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.machine.link import bind, link
from mlvm.core.machine.verify import verify
from mlvm.core.memory import HOST
from mlvm.core.program.program import Program
from mlvm.core.types import ALIGNMENT, Array, TensorType, u8
from mlvm.core.vm import VM
from mlvm.machines.lane_link import (
    ADD,
    FIRST,
    FRAME,
    Linked,
    Part,
    Segment,
    program_of,
    segments_of,
    types_of,
)

if TYPE_CHECKING:
    from mlvm.machines.native.lanes import NativeLanes

RUN: Final = "lanes.run"

_MOST_CODES: Final = 64
_FEW: Final = 64


class _Bound:
    """Part of a segment, bound to the arrays of its last run."""

    def __init__(self, vm: VM, part: Part) -> None:
        self.arguments, self.program = part.arguments, part.program
        self._vm = weakref.ref(vm)
        self._arrays: list[Array] = []
        self._run: Callable[[], object] = lambda: None

    def run(self, operands: Sequence[Array], results: Sequence[Array], scratch: Array) -> None:
        """Run the part: read `operands`, write `results`."""
        arrays = [*operands, *results, scratch]
        bound = self._arrays
        if len(bound) != len(arrays) or any(x is not y for x, y in zip(bound, arrays, strict=True)):
            self._run, self._arrays = self.on(operands, results, scratch), arrays
        self._run()

    def on(
        self, operands: Sequence[Array], results: Sequence[Array], scratch: Array
    ) -> partial[list[Value]]:
        """Bind the part to these arrays; return the launch, which may be repeated."""
        arguments = []
        for role, place, type in self.arguments:
            if role == "scratch":
                x = scratch[place : place + type.nbytes]
            else:
                x = (operands if role == "input" else results)[place].reshape(-1).view(np.uint8)
            arguments.append(_as_type(x, type))
        vm = self._vm()
        assert vm is not None
        return _prepared(vm, self.program, tuple(arguments))


def _prepared(vm: VM, program: Program, operands: tuple[Array, ...]) -> partial[list[Value]]:
    """Bind the program to these arrays; return its launch, which may be repeated. Raises what
    `verify` raises."""
    types = tuple(map(TensorType.of, operands))
    verdict = verify(program, vm.functions, types) if vm.checked else None
    code = link(program, vm.functions, verdict, deferred=False)
    code = bind(code, operands, vm._workspace, checked=vm.checked)
    return partial(vm._run, code, operands, vm._store, vm.functions)


def _as_type(x: Array, type: TensorType) -> Array:
    """Reinterpret the first bytes of an array as a tensor of that type."""
    raw = x.reshape(-1).view(np.uint8)[: type.nbytes]
    return raw.view(type.dtype.numpy).reshape(type.array_shape)


class Lanes:
    """Program for rows on one VM, with memory that is reused by the next run."""

    def __init__(self, vm: VM, text: str) -> None:
        self._vm = weakref.ref(vm)
        self._handles: list[int] = []
        self._areas: dict[tuple[int, int], Array] = {}
        self._rows: dict[int, tuple[int, Array]] = {}  # by their bytes: a handle, and all of them
        self._bound: dict[tuple[str, int], _Bound] = {}
        self.program = program_of(text)
        self.types = types_of(self.program)
        self.segments = segments_of(self.program)
        self.sites = [each for each in self.segments.items() if each[1].sum >= 0]
        parts = [part for each in self.segments.values() for part in each.parts.values()]
        self.scratch = self._new(max([part.nbytes for part in parts], default=0))
        nhoisted = len(self.segments[FIRST].outs) if FIRST in self.segments else 0
        ngiven = len(self.types.shared) - nhoisted
        self.shared_types = self.types.shared[:ngiven]
        self.hoisted = [self._new(type.nbytes) for type in self.types.shared[ngiven:]]
        self.shared: list[Array] = []
        self._places: list[dict[str, Any]] | None = None  # of the shared operands
        self._code: Any = None
        self.calls = 0  # how many there were so far
        # By site: the number of the call, and the operands that it adds.
        self.contributions: list[list[tuple[int, list[Array]]]] = []
        self._verdict = None
        if vm.checked:
            types = [*self.types.args, *self.types.shared]
            self._verdict = verify(self.program, vm.functions, types)
        self._native = None if getattr(vm, "_pool", None) is None else self._in_steps()

    def _in_steps(self) -> NativeLanes | None:
        """Make the runner in C; None for a program that only runs row by row."""
        from mlvm.machines.native.lanes import NativeLanes

        try:
            linked = Linked(self.program, self.types, self.segments)
            return NativeLanes(linked, self._part_of, self._grow, self._keep)
        except MachineError:
            return None

    def _new(self, nbytes: int) -> Array:
        vm = self._vm()
        assert vm is not None
        handle = vm.alloc_tensor(TensorType(u8, (max(nbytes, ALIGNMENT),)))
        self._handles.append(handle)
        return vm.array_of(handle)

    def free(self) -> None:
        """Free all memory of the program."""
        vm = self._vm()
        for handle in (*self._handles, *[handle for handle, _ in self._rows.values()]):
            if vm is not None:
                vm.dealloc_tensor(handle)

    def _grow(self, nbytes: int, used: int, more: int) -> Array:
        """Grow the memory of rows of that size, behind those in use."""
        vm = self._vm()
        assert vm is not None
        old, before = self._rows.get(nbytes, (None, np.empty((0, nbytes), np.uint8)))
        rows = max(used + more, 2 * len(before), _FEW)
        handle = vm.alloc_tensor(TensorType(u8, (rows, nbytes)))
        self._rows[nbytes] = handle, vm.array_of(handle)
        self._rows[nbytes][1][:used] = before[:used]
        if old is not None:
            vm.dealloc_tensor(old)
        return self._rows[nbytes][1]

    def _keep(self, nbytes: int) -> None:
        """Count bytes beside tensors, where the VM has limits."""
        vm = self._vm()
        assert vm is not None
        vm.keep(nbytes)

    def bound(self, name: str, count: int) -> _Bound:
        bound = self._bound.get((name, count))
        if bound is None:
            vm = self._vm()
            assert vm is not None
            segment = self.segments[name]
            bound = self._bound[name, count] = _Bound(vm, segment.parts[count])
            ins, outs = segment.rows(count)
            for role, at, type in bound.arguments:
                there = {"input": ins, "output": outs}.get(role, [])[at : at + 1]
                if any(type.nbytes > nbytes for nbytes in there):
                    raise MachineError(f"{name}.x{count} takes more bytes than its segment has")
        return bound

    def _area(self, number: int, nbytes: int) -> Array:
        """Return memory for an operand or a result of a segment."""
        area = self._areas.get((number, nbytes))
        if area is None:
            area = self._areas[number, nbytes] = self._new(nbytes)
        return area

    def _shared_of(self, segment: Segment) -> list[Array]:
        nargs = len(self.types.args)
        return [self.shared[i - nargs] for i in segment.shared]

    def run(self, arrays: Sequence[Array]) -> None:
        """Run the program on the parameters of the host function."""
        args, shared_types, nsums = self.types.args, self.shared_types, self.types.sums
        nresults = len(arrays) - nsums - 1 - len(args) - len(shared_types)
        if nresults < 0:
            raise OperandValueError(f"lanes: the program takes more than {len(arrays)} operands")
        results, sums = arrays[:nresults], arrays[nresults : nresults + nsums]
        number, *xs = arrays[nresults + nsums :]
        count, xs, ws = int(number), xs[: len(args)], xs[len(args) :]
        if (
            any(len(x) * type.nbytes != x.nbytes for x, type in zip(xs, args, strict=True))
            or any(type.nbytes > w.nbytes for w, type in zip(ws, shared_types, strict=True))
            or any(site.outs[0] != sums[site.sum].nbytes for _, site in self.sites)
        ):
            raise MachineError("lanes: the sizes of operands differ from the program's types")
        places = [x.__array_interface__ for x in ws]
        if places != self._places:
            self._places, self.shared = places, [*ws, *self.hoisted]
            if self._native is not None:
                self._native.lanes.forget()
        if FIRST in self.segments:
            shared = self._shared_of(self.segments[FIRST])
            self.bound(FIRST, 1).run(shared, self.hoisted, self.scratch)
        if not 0 <= count <= min(map(len, (*xs, *results)), default=0):
            raise OperandValueError(f"lanes: the operands have fewer than {count} rows")
        vm = self._vm()
        assert vm is not None
        for y in results:
            y[count:] = 0
        for total in sums:
            total[...] = 0
        if self._native is None or vm.functions.instrument is not None:
            self._row_by_row(xs, results, sums, count)
            return
        self._native.run(vm._pool, count, xs, results, sums, self.shared)  # type: ignore[attr-defined]

    def _row_by_row(
        self, xs: Sequence[Array], results: Sequence[Array], sums: Sequence[Array], count: int
    ) -> None:
        """Run the program on each row alone by `run.py`: the reference semantics."""
        vm = self._vm()
        assert vm is not None
        if self._code is None:
            self._code = link(self.program, vm.functions, self._verdict, deferred=False)
        self.calls, self.contributions = 0, [[] for _ in self.sites]
        shared = [_as_type(x, type) for x, type in zip(self.shared, self.types.shared, strict=True)]
        vm.depth += 1  # as of a launch: a row has residuals of its own
        try:
            for i in range(count):
                rows = [_as_type(x[i : i + 1], t) for x, t in zip(xs, self.types.args, strict=True)]
                outputs = vm._run(self._code, (*rows, *shared), vm._store, vm.functions)
                for y, row in zip(results, outputs, strict=True):
                    y[i : i + 1] = row
        finally:
            vm.depth -= 1
        for (name, site), entries in zip(self.sites, self.contributions, strict=True):
            entries.sort(key=operator.itemgetter(0))
            self._add_up(sums[site.sum].reshape(-1).view(np.uint8), name, site, entries)
        self.contributions = []

    def _add_up(
        self, total: Array, name: str, site: Segment, entries: Sequence[tuple[int, list[Array]]]
    ) -> None:
        """Add the contributions of a site to a sum: row by row, within a row in the order in which
        its calls begin, by the largest parts."""
        first = 0
        for count in sorted(site.parts, reverse=True):
            operands, [after] = self._operands(site, count)
            while len(entries) - first >= count:
                operands[0][: len(total)] = total
                rows = [row for _, row in entries[first : first + count]]
                for area, column in zip(operands[1:], zip(*rows, strict=True), strict=True):
                    joined = np.concatenate([x.reshape(-1).view(np.uint8) for x in column])
                    area[: len(joined)] = joined
                self.bound(name, count).run(operands, [after], self.scratch)
                total[...] = after[: len(total)]
                first += count

    def _operands(self, segment: Segment, count: int) -> tuple[list[Array], list[Array]]:
        """Return the memory of operands and results of a part."""
        ins, outs = segment.rows(count)
        operands = [self._area(k, nbytes) for k, nbytes in enumerate(ins)]
        return operands, [self._area(-1 - k, nbytes) for k, nbytes in enumerate(outs)]

    def _part_of(
        self, name: str, count: int, *, run: bool = False
    ) -> tuple[object, list[Array], list[Array]]:
        """Return the program of a segment for `count` rows, its operands and results; or `run`
        it."""
        from mlvm.machines.native.lanes import program_of

        segment, bound = self.segments[name], self.bound(name, count)
        operands, results = self._operands(segment, count)
        arrays = [*operands, *self._shared_of(segment)]
        if run:
            bound.run(arrays, results, self.scratch)
            return None, operands, results
        vm = self._vm()
        assert vm is not None
        code, arguments = bound.on(arrays, results, self.scratch).args[:2]
        return program_of(code, arguments, vm.functions), operands, results


def register(vm: VM) -> None:
    """Register the host functions of lanes on the VM."""
    reference = weakref.ref(vm)
    cache: dict[str, Lanes] = {}
    running: list[Lanes] = []
    version = 0

    def run(frame: Frame) -> None:
        nonlocal version
        machine = reference()
        assert machine is not None  # it runs a program
        if machine.memory is not HOST:
            raise MachineError("lanes: expected a VM of this process's memory, on the host")
        if "code" in frame.attributes:
            raise MachineError(
                "lanes: this program was saved by mlvm 0.1 or before: capture and save it again"
            )
        text = str(frame.attributes.get("program", ""))
        arrays = list(filter(is_tensor, [frame.param(i) for i in range(frame.nparams)]))
        try:
            if version != int(machine.functions.version):
                version = int(machine.functions.version)
                while cache:  # their programs call functions that may have been replaced
                    cache.popitem()[1].free()
            lanes = cache.pop(text, None)
            if lanes is None:
                if len(cache) >= _MOST_CODES:
                    cache.pop(next(iter(cache))).free()
                lanes = Lanes(machine, text)
            cache[text] = lanes  # the last one used is the last
            running.append(lanes)
            try:
                lanes.run(arrays)
            finally:
                running.pop()
        except MlvmError:
            raise
        except (AttributeError, IndexError, KeyError, ValueError, TypeError) as error:
            raise MachineError(f"lanes: no program for rows: {error!r}") from error

    def begin(frame: Frame) -> None:
        lanes = _running(running)
        frame.push(np.asarray(lanes.calls, np.int64))
        lanes.calls += 1
        for type in map(TensorType.parse, frame.attributes["locals"][1:]):
            frame.push(np.zeros(type.array_shape, type.dtype.numpy))

    def add(frame: Frame) -> None:
        number, *operands = [np.array(frame.param(i)) for i in range(frame.nparams)]
        entries = _running(running).contributions[frame.attributes["site"]]
        entries.append((int(number), operands))

    callees = {RUN: run, FRAME: begin, ADD: add}
    vm.register_callees(
        {
            name: PythonFunction(name, function, None, 0 if name != FRAME else None)
            for name, function in callees.items()
        }
    )


def _running(running: Sequence[Lanes]) -> Lanes:
    if not running:
        raise MachineError("lanes: this function is only called by programs for rows")
    return running[-1]
