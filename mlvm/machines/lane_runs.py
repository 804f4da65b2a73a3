"""Lanes: a recorded function that runs for many inputs together, with frames per input.

    lanes.run {"program": p}    ( o1 .. oj s1 .. sk n x1 .. xl w1 .. wm -- )

runs p, a program for one row (`lane_link`), on the first n rows of each x and all of each w. Row i
of each o is the result of row i; each s is a sum over all rows.

`run.py` defines the semantics, row by row. In C, all frames that wait at the same step run it
together. The scheduler gathers the operand rows, runs a program for this number of rows, and
appends the results as new rows (Radul et al., arXiv 1910.11141; Neubig et al., arXiv 1705.07860).

Programs for rows also call these functions. Each call of a function in such a program has a number,
starting with 0:

    lanes.frame {"locals": t}   ( -- i t1 .. tn )       the number of the call, and zeros of types t
    lanes.add {"site": s}       ( i x1 .. xn -- )       adds to a sum, as the parts of site s do
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mlvm.core.errors import MachineError, MlvmError, OperandValueError
from mlvm.core.machine.callee import is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.machine.link import bind, link
from mlvm.core.machine.verify import verify
from mlvm.core.memo import Memo
from mlvm.core.memory import HOST
from mlvm.core.program.program import Program
from mlvm.core.types import ALIGNMENT, Array, TensorType, u8
from mlvm.core.vm import VM
from mlvm.machines.lane_link import (
    ADD,
    FIRST,
    FRAME,
    Bound,
    LaneProgram,
    Linked,
    Part,
    RowSegment,
    invalid,
    program_of,
)

if TYPE_CHECKING:
    from mlvm.machines.native.lanes import NativeLanes

RUN: Final = "lanes.run"


def _prepared(vm: VM, program: Program, operands: tuple[Array, ...]) -> Bound:
    """Bind the program to these arrays; return the launch, which may be repeated.

    Raises what `verify` raises.
    """
    types = tuple(map(TensorType.of, operands))
    verdict = verify(program, vm.functions, types) if vm.checked else None
    code = link(program, vm.functions, verdict, deferred=False)
    code = bind(code, operands, vm._workspace, checked=vm.checked)
    return partial(vm._run, code, operands, vm._store, vm.functions)


class _Memory:
    """Memory of the programs of a function at all sizes, which run one after the other.

    `users`: number of these programs.
    `version`: number of times that memory of a part has moved.
    `last`: program that owns the current rows.
    `vm`: a weak proxy, because the VM's function table refers to this object.
    """

    def __init__(self, vm: VM) -> None:
        self.vm = vm
        self._areas: dict[Any, tuple[int, Array]] = {}  # handle and memory by key
        self._retired: list[int] = []
        self._bindings = weakref.WeakKeyDictionary[Part, Memo[Any, Bound]]()
        self.users = self.version = 0
        self.last: Lanes | None = None

    def area(self, key: Any, nbytes: int) -> Array:
        """Return memory for an operand or a result of a part.

        If the memory has moved, the old memory is valid until `begin`.
        """
        handle, area = self._areas.get(key, (None, None))
        if area is None or len(area) < nbytes:
            area = self._new(key, max(nbytes, 0 if area is None else 2 * len(area)))
            if handle is not None:
                self._retired.append(handle)
                self.version += 1
        return area

    def _new(self, key: Any, nbytes: int) -> Array:
        handle = self.vm.alloc_tensor(TensorType(u8, (max(nbytes, ALIGNMENT),)))
        self._areas[key] = handle, self.vm.array_of(handle)
        return self._areas[key][1]

    def rows(self, key: int, nbytes: int, used: int, more: int) -> Array:
        """Return memory for `more` rows of these bytes after the rows in use."""
        handle, before = self._areas.get(key, (None, np.empty(0, np.uint8)))
        needed = (used + more) * nbytes
        if handle is None or len(before) < needed:
            area = self._new(key, max(needed, 2 * len(before), 64 * nbytes))
            area[: used * nbytes] = before[: used * nbytes]
            if handle is not None:
                self.vm.dealloc_tensor(handle)
        return self._areas[key][1]

    def begin(self) -> None:
        """Free memory without bound parts: each program drops the parts before it runs."""
        while self._retired:
            self.vm.dealloc_tensor(self._retired.pop())

    def bound(self, part: Part, operands: Sequence[Array], results: Sequence[Array]) -> Bound:
        """Bind a part to this memory."""
        program, arguments, nbytes = part.code
        scratch = self.area("scratch", nbytes)
        key = tuple([x.__array_interface__["data"][0] for x in (*operands, *results, scratch)])

        def bind_part() -> Bound:
            of_role = {"input": operands, "output": results}
            arrays = [
                type.over(scratch[place:] if role == "scratch" else of_role[role][place])
                for role, place, type in arguments
            ]
            return _prepared(self.vm, program, tuple(arrays))

        bindings = self._bindings.get(part)
        if bindings is None:  # few, because they keep tensors alive
            bindings = self._bindings[part] = Memo(2, "machines.lane_runs bindings")
        return bindings.get(key, bind_part)

    def free(self) -> None:
        """Free all memory if the last program is closed."""
        self.users -= 1
        if not self.users:
            self.begin()
            for handle, _ in self._areas.values():
                self.vm.dealloc_tensor(handle)
            self._areas.clear()
            self._bindings.clear()


class Lanes:
    """Program for rows on one VM."""

    def __init__(self, memory: _Memory, program: LaneProgram) -> None:
        vm = memory.vm
        self.memory = memory
        self.program, self.types = program.rows, program.types
        self.segments = program.segments
        self.sites = [each for each in self.segments.items() if each[1].sum >= 0]
        nhoisted = len(self.segments[FIRST].outs) if FIRST in self.segments else 0
        ngiven = len(self.types.shared) - nhoisted
        self.shared_types = self.types.shared[:ngiven]
        self.hoisted = self.types.shared[ngiven:]
        self.shared: list[Array] = []
        self._places: Any = None  # addresses of the shared operands
        self._first: Bound | None = None  # computes the hoisted operands
        self._code: Any = None
        self.calls = 0  # number of calls so far
        # By site: the number of the call, and the operands that it adds.
        self.contributions: list[list[tuple[int, list[Array]]]] = []
        self._verdict = None
        if vm.checked and not memory.users:  # the other programs differ only in sizes
            types = [*self.types.args, *self.types.shared]
            self._verdict = verify(self.program, vm.functions, types)
        self._native = None if getattr(vm, "_pool", None) is None else self._in_steps(program)
        memory.users += 1

    def _in_steps(self, program: LaneProgram) -> NativeLanes | None:
        """Create the runner in C, or return None if the program must run row by row."""
        from mlvm.machines.native.lanes import NativeLanes

        try:
            rows, keep = self.memory.rows, self.memory.vm.keep
            return NativeLanes(Linked(program), self._part_of, rows, keep)
        except MachineError:
            return None

    def _part(self, name: str, count: int) -> Part:
        segment = self.segments[name]
        part = segment.parts[count]
        ins, outs = segment.rows(count)
        for role, at, type in part.code.arguments:
            there = {"input": ins, "output": outs}.get(role, [])[at : at + 1]
            if any(type.nbytes > nbytes for nbytes in there):
                raise invalid(f"{name}.x{count} needs {type.nbytes} bytes, more than the segment")
        return part

    def _shared_of(self, segment: RowSegment) -> list[Array]:
        nargs = len(self.types.args)
        return [self.shared[i - nargs] for i in segment.shared]

    def run(self, arrays: Sequence[Array]) -> None:
        """Run the program on the parameters of the host function."""
        args, shared_types, nsums = self.types.args, self.shared_types, self.types.sums
        nresults = len(arrays) - nsums - 1 - len(args) - len(shared_types)
        if nresults < 0:
            least = len(arrays) - nresults
            raise OperandValueError(f"lanes: expected at least {least} operands, got {len(arrays)}")
        results, sums = arrays[:nresults], arrays[nresults : nresults + nsums]
        number, *xs = arrays[nresults + nsums :]
        count, xs, ws = int(number), xs[: len(args)], xs[len(args) :]
        if (
            any(len(x) * type.nbytes != x.nbytes for x, type in zip(xs, args, strict=True))
            or any(type.nbytes > w.nbytes for w, type in zip(ws, shared_types, strict=True))
            or any(site.outs[0] != sums[site.sum].nbytes for _, site in self.sites)
        ):
            raise invalid("expected operands of the sizes in the program's types")
        memory = self.memory
        memory.begin()
        places = [x.__array_interface__ for x in ws]
        if self._places != (memory.version, places):
            self._places = None  # repeat until no memory moves
            types = enumerate(self.hoisted)
            hoisted = [memory.area(("first", i), each.nbytes) for i, each in types]
            self.shared = [*ws, *hoisted]
            if self._native is not None:
                self._native.lanes.forget()
            if FIRST in self.segments:
                shared = self._shared_of(self.segments[FIRST])
                self._first = memory.bound(self._part(FIRST, 1), shared, hoisted)
            self._places = memory.version, places
        if memory.last is not self and self._native is not None:
            self._native.lanes.forget_rows()
        memory.last = None  # an error in the run may have moved rows
        if self._first is not None:
            self._first()
        if not 0 <= count <= min(map(len, (*xs, *results)), default=0):
            raise OperandValueError(
                f"lanes: expected operands with at least {count} rows, got fewer"
            )
        vm = memory.vm
        for y in results:
            y[count:] = 0
        for total in sums:
            total[...] = 0
        if self._native is None or vm.functions.instrument is not None:
            self._row_by_row(xs, results, sums, count)
            return
        self._native.run(vm._pool, count, xs, results, sums, self.shared)  # type: ignore[attr-defined]
        memory.last = self

    def _row_by_row(
        self, xs: Sequence[Array], results: Sequence[Array], sums: Sequence[Array], count: int
    ) -> None:
        """Run the program on each row separately by `run.py`: the reference semantics."""
        vm = self.memory.vm
        if self._code is None:
            self._code = link(self.program, vm.functions, self._verdict, deferred=False)
        self.calls, self.contributions = 0, [[] for _ in self.sites]
        shared = [*map(TensorType.over, self.types.shared, self.shared)]
        vm.depth += 1  # like a launch, a row has its own residuals
        try:
            for i in range(count):
                rows = [t.over(x[i : i + 1]) for x, t in zip(xs, self.types.args, strict=True)]
                outputs = vm._run(self._code, (*rows, *shared), vm._store, vm.functions)
                for y, row in zip(results, filter(is_tensor, outputs), strict=True):
                    if y[i : i + 1].nbytes != row.nbytes:
                        raise invalid(
                            f"expected result rows of {row.nbytes} bytes, got {y[i : i + 1].nbytes}"
                        )
                    TensorType.of(row).over(y[i : i + 1])[...] = row
        finally:
            vm.depth -= 1
        for (name, site), entries in zip(self.sites, self.contributions, strict=True):
            entries.sort(key=operator.itemgetter(0))
            self._add_up(sums[site.sum].reshape(-1).view(np.uint8), name, site, entries)
        self.contributions = []

    def _add_up(
        self, total: Array, name: str, site: RowSegment, entries: Sequence[tuple[int, list[Array]]]
    ) -> None:
        """Add the contributions of a site to a sum, by the largest parts.

        They are added row by row, and within a row in the order in which the calls begin.
        """
        first = 0
        for count in sorted(site.parts, reverse=True):
            operands, [after] = self._operands(site, count)
            part = self._part(name, count)
            while len(entries) - first >= count:
                operands[0][: len(total)] = total
                rows = [row for _, row in entries[first : first + count]]
                for area, column in zip(operands[1:], zip(*rows, strict=True), strict=True):
                    joined = np.concatenate([x.reshape(-1).view(np.uint8) for x in column])
                    area[: len(joined)] = joined
                self.memory.bound(part, operands, [after])()
                total[...] = after[: len(total)]
                first += count

    def _operands(self, segment: RowSegment, count: int) -> tuple[list[Array], list[Array]]:
        """Return the memory of operands and results of a part."""
        ins, outs = segment.rows(count)
        area = self.memory.area
        operands = [area(("operand", k), nbytes)[:nbytes] for k, nbytes in enumerate(ins)]
        return operands, [area(("result", k), nbytes)[:nbytes] for k, nbytes in enumerate(outs)]

    def _part_of(self, name: str, count: int) -> tuple[Bound, list[Array], list[Array]]:
        """Bind a segment for `count` rows; also return the operands and results."""
        segment = self.segments[name]
        operands, results = self._operands(segment, count)
        part, shared = self._part(name, count), self._shared_of(segment)
        return self.memory.bound(part, [*operands, *shared], results), operands, results


def register(vm: VM) -> None:
    """Register the host functions of lanes on the VM."""
    machine: VM = weakref.proxy(vm)
    cache: dict[object, Lanes] = {}
    memories: weakref.WeakKeyDictionary[Any, _Memory] = weakref.WeakKeyDictionary()
    running: list[Lanes] = []
    version = 0

    def lanes_of(attribute: object) -> Lanes:
        """Return the prepared program of an attribute.

        A nested run, as in a signal handler, uses separate memory.
        """
        nonlocal version
        if running:
            return Lanes(_Memory(machine), program_of(attribute))
        if version != int(machine.functions.version):
            version = int(machine.functions.version)
            while cache:
                cache.popitem()[1].memory.free()
            memories.clear()
        lanes = cache.pop(attribute, None)
        if lanes is None:
            if len(cache) >= 128:
                cache.pop(next(iter(cache))).memory.free()
            program = program_of(attribute)
            memory = memories.get(program.family)
            if memory is None or not memory.users:
                memory = memories[program.family] = _Memory(machine)
            lanes = Lanes(memory, program)
        cache[attribute] = lanes  # the most recently used program is the last
        return lanes

    def run(frame: Frame) -> None:
        if machine.memory is not HOST:
            raise MachineError(f"lanes: expected host memory, got {machine.memory}; use ml.VM()")
        if "code" in frame.attributes:
            raise MachineError(
                "lanes: this program was saved by mlvm 0.1 or older: capture and save it again"
            )
        attribute = frame.attributes.get("program", "")
        arrays = list(filter(is_tensor, [frame.param(i) for i in range(frame.nparams)]))
        try:
            lanes = lanes_of(attribute)
            depth = len(running)
            try:
                running.append(lanes)
                lanes.run(arrays)
            finally:
                del running[depth:]
                if depth:
                    lanes.memory.free()
        except MlvmError:
            raise
        except (AttributeError, IndexError, KeyError, ValueError, TypeError) as error:
            raise invalid(f"expected a program for rows: {error!r}") from error

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

    vm.register_callees(
        {
            name: PythonFunction(name, function, None, 0 if name != FRAME else None)
            for name, function in {RUN: run, FRAME: begin, ADD: add}.items()
        }
    )


def _running(running: Sequence[Lanes]) -> Lanes:
    if not running:
        raise MachineError(
            "lanes: only programs for rows may call this function; call ml.auto_batch"
        )
    return running[-1]
