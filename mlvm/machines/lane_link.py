"""Linker of lanes: converts a program for one row to steps that run many rows together.

`plan/lanes.c` stores the number of a row for each register of each frame. The linker simulates the
stack and assigns registers to the operands of each step. The first registers of a frame are the
parameters and locals. A call is a future: the frame waits for the results at the first use.

A program for rows is an ordinary program; `run.py` runs it for each row separately. Each function
begins with `lanes.frame`, which contains the types of the parameters and locals. A function with
parts is a segment: the part `name.x8` computes 8 rows together, and `name` computes one row. A part
begins with `lanes.part`, which describes the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.locks import cached_property
from mlvm.core.machine.callee import OUT, Value
from mlvm.core.program.encoding import Deferred
from mlvm.core.program.program import STAR, Function, Instruction, Program
from mlvm.core.types import TensorType
from mlvm.machines import residuals
from mlvm.machines.checks import CHECK

FRAME: Final = "lanes.frame"
PART: Final = "lanes.part"
ADD: Final = "lanes.add"
ROW: Final = "row"
"""Name of the function that main calls with the arguments of one row."""
FIRST: Final = "first"
"""Name of the function that computes the values that all rows share; it has a single part."""

Step: TypeAlias = list[Any]

Bound: TypeAlias = partial[list[Value]]
"""Launch of a part: `VM._run` on linked code, arrays, a store and functions."""


class PartCode(NamedTuple):
    """Code of a part.

    `program`: code without branches.
    `arguments`: role (input, output or scratch), index in that role, and type of each argument.
    `nbytes`: bytes of scratch memory.
    """

    program: Program
    arguments: Sequence[tuple[str, int, TensorType]]
    nbytes: int


class Part:
    """Segment for a number of rows; the code is compiled when it is first needed."""

    def __init__(self, make: Callable[[], PartCode]) -> None:
        self._make = make

    @property
    def code(self) -> PartCode:
        code = self._make()
        self._make = lambda: code  # compile again after an interrupt or error
        return code

    @staticmethod
    def of(function: Function) -> Part:
        """Return the part that a function represents."""
        head = _head(function, PART)
        words = head["arguments"].split()
        rows = zip(words[::3], words[1::3], words[2::3], strict=True)
        arguments = [(role, int(at), TensorType.parse(type)) for role, at, type in rows]
        code = PartCode(Program.straight(function.code[2:]), arguments, head["nbytes"])
        return Part(lambda: code)

    def function(self, name: str, facts: Mapping[str, Any]) -> Function:
        """Return the function of a part, which begins with the properties of the segment."""
        program, arguments, nbytes = self.code
        words = " ".join([f"{role} {at} {type}" for role, at, type in arguments])
        head = {**facts, "arguments": words, "nbytes": nbytes}
        return Function(name, 0, STAR, (*host_call(PART, 0, 0, head), *program.main.code))


class RowSegment(NamedTuple):
    """Function with one part per number of rows.

    `ins`, `outs`: bytes of a row of each operand and result.
    `shared`: arguments of the launch that follow the operands of a part.
    `heavy`: wait for more rows before running.
    `sum`: number of the sum to which the segment adds, or -1.
    """

    parts: dict[int, Part]
    ins: Sequence[int]
    outs: Sequence[int]
    shared: Sequence[int]
    heavy: bool
    sum: int

    def rows(self, count: int) -> tuple[list[int], list[int]]:
        """Return the bytes of each operand and result for `count` rows.

        A sum is the first operand and the result.
        """
        if self.sum >= 0:
            return [*self.outs, *[count * nbytes for nbytes in self.ins]], [*self.outs]
        return [count * nbytes for nbytes in self.ins], [count * nbytes for nbytes in self.outs]


class LaneProgram(Deferred):
    """Program for rows.

    `rows`: all functions; `run.py` runs main for each row.
    `segments`: functions with parts, by name.
    `types`: types of the operands.
    `family`: equal for programs of one function at different sizes.
    """

    def __init__(
        self, rows: Program, segments: Mapping[str, RowSegment], family: object = None
    ) -> None:
        self.rows, self.segments, self.types = rows, segments, types_of(rows)
        self.family = family or self
        if not all(min(each.parts) == 1 for each in segments.values()):
            raise MachineError("lanes: expected a part for a single row in each segment, got none")
        if any(each.sum >= 0 and len(each.outs) != 1 for each in segments.values()):
            raise MachineError(
                "lanes: expected one result, the sum, of a segment that adds to a sum"
            )

    @staticmethod
    def of(program: Program) -> LaneProgram:
        """Return the program for rows with these functions.

        Raises `MachineError` for malformed functions.
        """
        functions: list[Function] = []
        segments: dict[str, RowSegment] = {}
        for function in program.functions.values():
            name, _, rows = function.name.rpartition(".x")
            if not name:
                functions.append(function)
                continue
            head = _head(function, PART)
            segment = segments.setdefault(name, RowSegment({}, *[head[key] for key in _FACTS]))
            segment.parts[int(rows)] = Part.of(function)
        return LaneProgram(Program(functions, program.constants), segments)

    @cached_property
    def _text(self) -> str:
        return self.program.to_bytes().decode("latin-1")

    def __str__(self) -> str:
        """Return the bytes of the program as an attribute."""
        return self._text

    @property
    def program(self) -> Program:
        """The program with all functions and parts."""
        parts = [
            part.function(f"{name}.x{count}", {key: getattr(segment, key) for key in _FACTS})
            for name, segment in self.segments.items()
            for count, part in segment.parts.items()
        ]
        return Program([*self.rows.functions.values(), *parts], self.rows.constants)


_FACTS: Final = RowSegment._fields[1:]


def program_of(attribute: object) -> LaneProgram:
    """Return the program in an attribute of `lanes.run`, which may also be a text.

    Raises what `Program.from_bytes` and `LaneProgram.of` raise.
    """
    if isinstance(attribute, LaneProgram):
        return attribute
    return LaneProgram.of(Program.from_bytes(str(attribute).encode("latin-1")))


def host_call(
    name: str, nparams: int, nresults: int, attributes: Mapping[str, Any]
) -> list[Instruction]:
    """Return the code that calls a host function."""
    rest = (attributes,) if attributes else ()
    return [
        Instruction.of("push_str", name),
        Instruction.of("cfunc", nparams, nresults, *rest),
    ]


def _head(function: Function, name: str) -> Mapping[str, Any]:
    """Return the attributes of the host call `name` at the start of the function."""
    first, second, *_ = function.code
    if first != Instruction.of("push_str", name) or second.opcode.text != "cfunc":
        raise MachineError(f"lanes: expected {function.name} to begin with {name}")
    head: Mapping[str, Any] = second.immediates[2]
    return head


_NO_TYPE: Final = TensorType("u8")


class _Symbol(NamedTuple):
    """Symbolic value on the stack.

    It is a `register`, a `shared` argument, a `copy` of a register, a `name`, or a `result` of a
    step by number, which has no register yet.
    """

    kind: str
    at: Any
    type: TensorType = _NO_TYPE
    step: Step | None = None


class Types(NamedTuple):
    """Types of the operands of a program for rows.

    args: types of a row of each argument.
    shared: types of values that all rows share; the last values are the results of `first`.
    sums: number of sums.
    """

    args: list[TensorType]
    shared: list[TensorType]
    sums: int


def types_of(program: Program) -> Types:
    """Return the types of the program's operands."""
    head = _head(program.functions[ROW], FRAME)
    args, shared = ([*map(TensorType.parse, head[key])] for key in ("params", "shared"))
    return Types(args, shared, int(head["sums"]))


class Linked:
    """Steps of a program for rows, for `plan/lanes.c`; `native/lanes.py` encodes them as integers.

    `heavy`: steps at which frames wait for other frames.
    `params`, `returned`: registers of arguments and results, with the bytes of a row.
    `lent`: row sizes that occur only in arguments.

    Raises `MachineError` for a program that only `run.py` runs.
    """

    def __init__(self, lanes: LaneProgram) -> None:
        program = self.program = lanes.rows
        self.args, self.shared, _ = lanes.types
        self.segments = dict(lanes.segments)
        self.first = self.segments.pop(FIRST, None)
        self.runs = [name for name, each in self.segments.items() if each.sum < 0]
        self.sites = [name for name, each in self.segments.items() if each.sum >= 0]
        self.steps: list[Step] = []
        self.width = 0
        self.returned: list[tuple[int, int]] = []
        self.entries: dict[str, int] = {}
        self.results: dict[str, list[int]] = {}
        self._types: dict[str, list[TensorType]] = {}  # types of registers by function
        self.calls: list[tuple[Step, str, list[int], list[TensorType]]] = []
        self.waiting: list[Step] = []  # steps for which lanes wait for each other
        # sizes of the rows of results and of locals; locals start as zeros
        self.sizes: set[int] = set()
        todo = [ROW]
        for name in todo:  # the list grows in the loop
            self._types[name] = _FunctionLinker(self, program.functions[name]).types
            todo += dict.fromkeys([name for _, name, *_ in self.calls if name not in todo])
        self.params = [(i, type.nbytes) for i, type in enumerate(self.args)]
        if missing := set(todo) - self.results.keys():
            raise MachineError(f"lanes: {min(missing)} never returns")
        for step, name, outs, types in self.calls:
            step[1] = self.entries[name]
            step[3] = list(zip(outs, self.results[name], strict=True))
            for to, of in [(b, a) for a, b in step[2]] + step[3]:
                _require_bytes(types[to], self._types[name][of].nbytes)
        if self.steps[-1][0] not in ("return", "jump"):
            raise MachineError("lanes: expected return or jump at the end of a function")
        heavy = set(map(id, self.waiting))
        self.heavy = [pc for pc, step in enumerate(self.steps) if id(step) in heavy]
        sizes = [nbytes for _, nbytes in self.params]
        self.lent = {n for n in sizes if n and sizes.count(n) == 1}
        self.lent -= self.sizes.union([nbytes for _, nbytes in self.returned])
        registers = [to for step in self.steps for to in _result_registers(step)]
        if not all(0 <= to < self.width for to in registers):
            raise MachineError("lanes: a result has no slot")


class _FunctionLinker:
    """Linker of one function, which simulates the stack and appends steps to the program's steps.

    of: the linked program. types: the types of the registers. awaited: registers that calls have
    not written yet. constants: registers of shared operands, by number.
    """

    def __init__(self, of: Linked, function: Function) -> None:
        self.of, self.function, self.steps = of, function, of.steps
        head = _head(function, FRAME)
        self.types = [*map(TensorType.parse, (*head["params"], *head["locals"]))]
        self.nparams = len(head["params"])
        if self.nparams != function.nparams:
            raise MachineError(
                f"lanes: parameters of {function.name} differ from the declared types"
            )
        of.sizes.update([type.nbytes for type in self.types[self.nparams :]])
        self.stack: list[_Symbol] = []
        self.awaited: set[int] = set()
        self.constants: dict[int, int] = {}
        entry = of.entries[function.name] = len(self.steps)
        labels = dict.fromkeys(function.targets, -1)
        jumps: list[tuple[Step, int]] = []
        for pc, (opcode, immediates) in enumerate(function.code[2:], 2):
            if pc in labels:
                self._end_block()
                labels[pc] = len(self.steps)
            kind = opcode.text
            if kind == "jump":
                self._end_block()
                jumps.append((self._emit("jump", -1), immediates[0]))
            elif kind == "jump_if_false":
                at = self._operand()
                self._end_block()
                type = self.types[at]
                if type.size != 1:
                    raise MachineError(f"lanes: expected a condition of one element, got {type}")
                split = "split", at, type.nbytes, type.dtype.name, -1
                jumps.append((self._emit(*split), immediates[0]))
            elif kind in _HANDLERS:
                _HANDLERS[kind](self, *immediates)
            else:
                raise MachineError(f"lanes: instruction {kind} is not supported")
        for step, label in jumps:
            step[-1] = labels[label]
            if step[-1] < 0:
                raise MachineError(f"lanes: label {label!r} of a jump is not defined")
        for step in self.steps[entry:]:
            computed, read = self._rows(*step)
            of.sizes.update([nbytes for _, nbytes in computed])
            for at, nbytes in (*computed, *read):
                _require_bytes(self.types[at], nbytes)
        of.width = max(of.width, len(self.types))

    def _rows(self, kind: str, *rest: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the registers that a step writes, and the registers that it only reads.

        Each has the number of bytes per row.
        """
        if kind == "run":
            return [*rest[2]], [*rest[1]]
        if kind == "move":
            return [], [(rest[0], self.types[rest[1]].nbytes)]
        if kind in ("dup", "const"):
            return [(rest[0], rest[2])], [(rest[1], rest[2])] if kind == "dup" else []
        if kind == "take":
            to, x, index, length, nbytes, dtype = rest
            return [(to, nbytes)], [(x, length * nbytes), (index, np.dtype(dtype).itemsize)]
        if kind == "put":
            to, value, index, length, count, nbytes, dtype = rest
            read = [(value, count * nbytes), (index, np.dtype(dtype).itemsize)]
            return [(to, length * nbytes)], read
        if kind == "push":
            return [(rest[0], 8)], []
        if kind == "read":
            return [], [(rest[1], 8)]
        if kind == "add":
            return [], list(zip(rest[1], self.of.segments[self.of.sites[rest[0]]].ins, strict=True))
        return [], []

    def _register(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def _emit(self, *step: Any) -> Step:
        self.steps.append(list(step))
        return self.steps[-1]

    def _join(self) -> None:
        if self.awaited:
            self._emit("join")
            self.awaited.clear()

    def _end_block(self) -> None:
        """Close a basic block: frames may enter or leave at this position."""
        self._join()
        if self.stack:
            raise MachineError(
                f"lanes: expected an empty stack at a jump, got {len(self.stack)} values"
            )

    def _settle(self, *registers: int) -> None:
        """Wait for the calls that write these registers."""
        if not self.awaited.isdisjoint(registers):
            self._join()

    def _pop(self, count: int) -> list[_Symbol]:
        if count > len(self.stack):
            raise MachineError(
                f"lanes: expected {count} values on the stack, got {len(self.stack)}"
            )
        at = len(self.stack) - count
        popped = self.stack[at:]
        del self.stack[at:]
        return popped

    def _place(self, symbol: _Symbol, to: int = -1) -> int:
        """Store the value in the register `to`, or in any register; return the register."""
        kind, at, _, step = symbol
        if kind == "register" and to < 0:
            self._settle(at)
            return int(at)
        if any(each.kind in ("register", "copy") and each.at == to for each in self.stack):
            raise MachineError("lanes: a slot is written while the stack contains its old value")
        if kind == "result" and step is self.steps[-1] and to >= 0:
            if to in self.awaited:
                self.steps.pop()
                self._join()
                self.steps.append(step)
            self._set_result(step, at, to)
        elif kind == "register":
            self._settle(at, to)
            if at != to:
                self._emit("move", to, at)
        elif kind == "shared":
            if to < 0:
                to = self.constants.setdefault(at, len(self.types))
                if to == len(self.types):
                    self._register(self.of.shared[at])
            self._settle(to)
            self._emit("const", to, at, self.of.shared[at].nbytes)
        elif kind == "copy":
            to = self._register(self.types[at]) if to < 0 else to
            self._settle(at, to)
            self._emit("dup", to, at, self.types[to].nbytes)
        else:
            raise MachineError("lanes: a value has no slot")
        return to

    def _operand(self) -> int:
        """Pop the top value; return the register that contains it."""
        return self._place(self._pop(1)[0])

    def _operands(self, count: int) -> list[int]:
        return [self._place(each) for each in self._pop(count)]

    def _set_result(self, step: Step, at: int, to: int) -> None:
        """Set the register of a step's result by number."""
        if step[0] == "call":
            self.of.calls[step[3]][2][at] = to
            self.awaited.add(to)
        elif step[0] == "run":
            step[3][at] = to, step[3][at][1]
        else:
            step[1] = to

    def _get(self, i: int) -> None:
        at = self._slot(i)
        self.stack.append(_Symbol("register", at, self.types[at]))

    def _slot(self, i: int) -> int:
        at = self.nparams + i
        if not 0 <= at < len(self.types):
            raise MachineError("lanes: a slot is out of range")
        return at

    def _set(self, i: int) -> None:
        [symbol] = self._pop(1)
        self._place(symbol, self._slot(i))

    def _load(self, i: int) -> None:
        at = i - len(self.of.args)
        if not 0 <= at < len(self.of.shared):
            raise MachineError("lanes: a function loads an argument that is not shared")
        self.stack.append(_Symbol("shared", at, self.of.shared[at]))

    def _push_str(self, name: str) -> None:
        self.stack.append(_Symbol("name", name))

    def _call(self, name: str) -> None:
        callee = self.of.program.functions[name]
        args = self._operands(callee.nparams)
        if callee.nresults == STAR:
            raise MachineError(f"lanes: expected a fixed number of results of {name}, got *")
        nresults = int(callee.nresults)
        segment = self.of.segments.get(name)
        if segment is not None:
            pairs = list(zip(args, segment.ins, strict=True))
            step = self._emit(
                "run", self.of.runs.index(name), pairs, [(-1, n) for n in segment.outs]
            )
            if segment.heavy:
                self.of.waiting.append(step)
        else:
            pairs = list(enumerate(args))
            step = self._emit("call", -1, pairs, len(self.of.calls))
            self.of.calls.append((step, name, [-1] * nresults, self.types))
        self.stack += [_Symbol("result", i, step=step) for i in range(nresults)]

    def _return(self, n: int) -> None:
        results = self._operands(n)
        self._join()
        if self.of.results.setdefault(self.function.name, results) != results:
            raise MachineError(f"lanes: expected one return in {self.function.name}, got several")
        if self.function.name == ROW:
            self.of.returned = [(at, self.types[at].nbytes) for at in results]
        self._emit("return")

    def _cfunc(self, nparams: int, nresults: int, attributes: Mapping[str, Any] = {}) -> None:
        [name] = self._pop(1)
        handler = _CALLS.get(name.at)
        if handler is None or name.kind != "name":
            raise MachineError(f"lanes: {name.at} is not supported")
        handler(self, nparams, attributes)

    def _copy(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        at = self._operand()
        self.stack.append(_Symbol("copy", at, self.types[at]))

    def _reshape(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        [symbol] = self._pop(1)
        self.stack.append(symbol._replace(type=symbol.type.with_shape(attributes["shape"])))

    def _take(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        x, index = self._pop(2)
        of, by = x.type, index.type
        if attributes["axis"] != 0 or by.size != 1:
            raise MachineError(
                f"lanes: take: expected a single index along axis 0, got {by} along axis "
                f"{attributes['axis']}"
            )
        nbytes = of.nbytes // max(of.shape[0], 1)
        row = self._place(x), self._place(index), of.shape[0], nbytes, by.dtype.numpy.str
        step = self._emit("take", -1, *row)
        self.stack.append(_Symbol("result", 0, of.with_shape(of.shape[1:]), step))

    def _put(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        to, x, value, index = self._pop(4)
        if to != x or to.kind != "register" or attributes["axis"] != 0:
            raise MachineError("lanes: expected an in-place replacement of rows along axis 0")
        sizes, at = self._place(value), self._place(index)
        self._settle(to.at)
        length, rows = to.type.shape[0], value.type.shape[0]
        nbytes = to.type.nbytes // length if length else 0
        self._emit("put", to.at, sizes, at, length, rows, nbytes, index.type.dtype.numpy.str)

    def _drop_copies(self, registers: Sequence[int]) -> None:
        """Drop copies of registers that the next step overwrites."""
        while self.steps[-1][0] == "dup" and self.steps[-1][1] == self.steps[-1][2] in registers:
            self.steps.pop()

    def _push(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        number, *saved = self._operands(nparams)
        self._drop_copies([number])
        self._emit("push", number, [(at, self.types[at].nbytes) for at in saved])

    def _read(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        *outs, number = self._operands(nparams)
        self._drop_copies(outs)
        self._emit("read", [(at, self.types[at].nbytes) for at in outs], number)

    def _add(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        _, *operands = self._operands(nparams)
        site = attributes["site"]
        if not 0 <= site < len(self.of.sites) or len(operands) != len(
            self.of.segments[self.of.sites[site]].ins
        ):
            raise MachineError(
                "lanes: the number or the operands of a sum do not match the program"
            )
        self._emit("add", site, operands)

    def _check(self, nparams: int, attributes: Mapping[str, Any]) -> None:
        at = self._operand()
        self._emit("check", at, self.types[at].nbytes, attributes["message"])


def _require_bytes(type: TensorType, nbytes: int) -> None:
    if type.nbytes != nbytes:
        raise MachineError(f"lanes: expected rows of {type.nbytes} bytes for {type}, got {nbytes}")


def _result_registers(step: Step) -> list[int]:
    """Return the registers of a step's results."""
    kind = step[0]
    if kind in ("run", "call"):
        return [to for to, _ in step[3]]
    return [step[1]] if kind == "take" else []


_HANDLERS: Final[Mapping[str, Callable[..., None]]] = {
    "get": _FunctionLinker._get,
    "set": _FunctionLinker._set,
    "load_arg": _FunctionLinker._load,
    "push_str": _FunctionLinker._push_str,
    "call": _FunctionLinker._call,
    "return": _FunctionLinker._return,
    "cfunc": _FunctionLinker._cfunc,
}
_CALLS: Final[Mapping[str, Callable[..., None]]] = {
    residuals.PUSH: _FunctionLinker._push,
    residuals.READ: _FunctionLinker._read,
    "copy": _FunctionLinker._copy,
    "reshape": _FunctionLinker._reshape,
    "take": _FunctionLinker._take,
    f"dynamic_update{OUT}": _FunctionLinker._put,
    ADD: _FunctionLinker._add,
    CHECK: _FunctionLinker._check,
}
