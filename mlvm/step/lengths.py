"""A flow whose types and attributes are formulas of lengths: a template of flows.

A trace with open lengths has types and attributes with numbers of the trace. `frozen` replaces each
by a `Place`, its position among the values of a launch; `Template.flow` returns the flow for such
values. Nothing of the trace is alive then. `PlannedTemplate` is the same for the compiled program:
planned once, at bounds of the lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from mlvm.core.lengths import Length
from mlvm.core.program.program import Instruction, Opcode
from mlvm.core.types import DType, TensorType
from mlvm.step.compile import Planned
from mlvm.step.flow import Block, Call, Flow, Home, LoopInfo, Procedure, Use, Value


class Place(NamedTuple):
    """Position of a number among the values of a launch."""

    number: int


class OpenType(NamedTuple):
    """Type with places among its lengths."""

    dtype: DType
    shape: tuple[int | Place, ...]

    def at(self, values: Sequence[Any]) -> TensorType:
        """Return the type for these values."""
        shape: list[Any] = [values[n.number] if type(n) is Place else n for n in self.shape]
        return TensorType(self.dtype, tuple(shape))


def frozen(value: Any) -> Any:
    """Return a type or an attribute with places for the numbers of the trace."""
    kind = type(value)
    if kind is TensorType:
        if not value.is_open:
            return value
        return OpenType(value.dtype, tuple([frozen(n) for n in value.shape]))
    if issubclass(kind, Length):
        return Place(value.place) if value.is_open() else value.see()
    if kind is tuple or kind is list:
        parts = [frozen(each) for each in value]
        return value if all(map(_is, parts, value)) else kind(parts)
    if isinstance(value, Mapping):
        entries = {name: frozen(each) for name, each in value.items()}
        return value if all(map(_is, entries.values(), value.values())) else entries
    return value


def at(part: Any, values: Sequence[Any]) -> Any:
    """Return a frozen type or attribute for these values."""
    kind = type(part)
    if kind is OpenType:
        return part.at(values)
    if kind is Place:
        return values[part.number]
    if kind is tuple or kind is list:
        parts = [at(each, values) for each in part]
        return part if all(map(_is, parts, part)) else kind(parts)
    if kind is dict:
        entries = {name: at(each, values) for name, each in part.items()}
        return part if all(map(_is, entries.values(), part.values())) else entries
    return part


def places(part: Any) -> set[int]:
    """Return the numbers of the places in a frozen type or attribute."""
    if type(part) is Place:
        return {part.number}
    if type(part) is OpenType:
        return places(part.shape)
    if isinstance(part, (tuple, list)):
        return set().union(*map(places, part))
    return set().union(*map(places, part.values())) if isinstance(part, Mapping) else set()


def _is(x: object, y: object) -> bool:
    return x is y


class Substitution:
    """A copy of flows, with `change` applied to each type and to each attribute."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._changed: dict[int, Any] = {}  # types
        self._keepalive: list[object] = []
        self._values: dict[int, Value] = {}
        self._blocks: dict[int, Block] = {}
        self._procedures: dict[int, Procedure] = {}
        self._homes: dict[int, Home] = {}

    def flow(self, flow: Flow) -> Flow:
        """Return the copy of a flow."""
        return Flow(list(map(self.call, flow.calls)), list(map(self.value, flow.results)))

    def type(self, type: Any) -> Any:
        """Return the changed type."""
        key = id(type)
        if key not in self._changed:
            self._changed[key] = self._change(type)
            self._keepalive.append(type)
        return self._changed[key]

    def types(self) -> list[Any]:
        """Return all changed types."""
        return list(self._changed.values())

    def home(self, home: Home) -> Home:
        """Return the copy of a home."""
        copied = self._homes.get(id(home))
        if copied is None:
            copied = Home(home.role, home.index, self.type(home.type))
            self._homes[id(home)] = copied
            self._keepalive.append(home)
        return copied

    def value(self, value: Value) -> Value:
        """Return the copy of a value."""
        copied = self._values.get(id(value))
        if copied is None:
            home = None if value.home is None else self.home(value.home)
            copied = self._values[id(value)] = Value(self.size(value), home)
            self._keepalive.append(value)
        return copied

    def size(self, value: Value) -> Any:
        """Return the bytes of the copy of a value."""
        return value.nbytes

    def use(self, use: Use) -> Use:
        """Return the copy of a use."""
        return Use(self.value(use.value), self.type(use.type))

    def uses(self, uses: Sequence[Use]) -> list[Use]:
        """Return the copies of uses."""
        return list(map(self.use, uses))

    def block(self, block: Block) -> Block:
        """Return the copy of a block."""
        copied = self._blocks.get(id(block))
        if copied is None:
            copied = self._blocks[id(block)] = Block()
            self._keepalive.append(block)
            copied.homes = set(map(self.home, block.homes))
            copied.calls = list(map(self.call, block.calls))
            copied.result = None if block.result is None else self.use(block.result)
        return copied

    def procedure(self, procedure: Procedure) -> Procedure:
        """Return the copy of a procedure."""
        copied = self._procedures.get(id(procedure))
        if copied is None:
            copied = Procedure(procedure.name, Block(), rule=procedure.rule)
            self._procedures[id(procedure)] = copied
            self._keepalive.append(procedure)
            copied.params = list(map(self.home, procedure.params))
            copied.block = self.block(procedure.block)
        return copied

    def loop(self, loop: LoopInfo) -> LoopInfo:
        """Return the copy of a loop's description."""
        length = self.use(loop.length) if isinstance(loop.length, Use) else loop.length
        return LoopInfo(
            self.use(loop.i),
            length if isinstance(length, Use) else self._change(length),
            self._change(loop.total),
            loop.reverse,
            self.uses(loop.xs),
            list(map(self.value, loop.rows)),
            [(self.home(home), self.use(use)) for home, use in loop.ys],
        )

    def call(self, call: Call) -> Call:
        """Return the copy of a call."""
        return Call(
            call.name,
            call.op,
            self._change(call.attributes),
            self.uses(call.outs),
            self.uses(call.ins),
            call.line,
            call.again,
            call.queue,
            tuple(map(self.block, call.blocks)),
            call.orderly,
            call.may_raise,
            None if call.callee is None else self.procedure(call.callee),
            self.uses(call.passed),
            tuple(map(self.procedure, call.procedures)),
            None if call.loop is None else self.loop(call.loop),
            call.pushes,
            call.sized,
        )


class _Freeze(Substitution):
    """Substitution of places for the numbers of a trace. The size of a value is that of the type as
    which it is used."""

    def __init__(self) -> None:
        super().__init__(frozen)

    def use(self, use: Use) -> Use:
        copied = super().use(use)
        is_whole = use.type.is_open and use.type.nbytes == use.value.nbytes
        if is_whole and type(copied.value.nbytes) is int:
            copied.value.nbytes = copied.type  # type: ignore[assignment]
        return copied

    def call(self, call: Call) -> Call:
        copied = super().call(call)
        types: list[Any] = [use.type for use in (*copied.outs, *copied.ins)]
        copied.sized = bool(places(copied.attributes) or places(types))
        return copied


class _At(Substitution):
    """Substitution of the values of a launch for places."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(lambda part: at(part, values))

    def size(self, value: Value) -> Any:
        nbytes: Any = value.nbytes
        return nbytes if type(nbytes) is int else self.type(nbytes).nbytes


class Template:
    """Template of flows.

    frozen: the flow with places.
    places: the numbers of all places in it.
    """

    def __init__(self, flow: Flow, places: set[int]) -> None:
        self.frozen = flow
        self.places = places
        self._collect(flow.calls)

    @staticmethod
    def of(flow: Flow) -> tuple[Template, Callable[[Home], Home]]:
        """Return the template of a recorded flow, and the function from its homes to frozen
        ones."""
        freeze = _Freeze()
        frozen_flow = freeze.flow(flow)
        used = set().union(*map(places, freeze.types()))
        return Template(frozen_flow, used), freeze.home

    def _collect(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.places |= places(call.attributes)
            if call.loop is not None:
                self.places |= places((call.loop.length, call.loop.total))
            for block in (*call.blocks, *[each.block for each in call.procedures]):
                self._collect(block.calls)

    def flow(self, values: Sequence[Any]) -> Flow:
        """Return the flow for these values."""
        return _At(values).flow(self.frozen)


def _canonical(immediates: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the immediates of a call with immutable attributes."""
    return tuple([MappingProxyType(x) if type(x) is dict else x for x in immediates])


class Site(NamedTuple):
    """A call of a straight program: a function's name, its frozen attributes, and the numbers and
    frozen types of the arguments that it takes."""

    name: str
    attributes: Any
    arguments: tuple[int, ...]
    types: tuple[Any, ...]


class PlannedTemplate:
    """Template of planned programs: a step that was planned at bounds of its lengths.

    planned: the program at the bounds.
    places: the numbers of all places in it.
    """

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self._code = {
            name: {
                pc: each
                for pc, instruction in enumerate(function.code)
                if (each := frozen(instruction.immediates)) is not instruction.immediates
            }
            for name, function in planned.program.functions.items()
        }
        self._types = {
            i: frozen(each.type) for i, each in enumerate(planned.arguments) if each.type.is_open
        }
        self._sizes = {
            i: planned.arguments[i].type.nbytes
            for i in self._types
            if planned.arguments[i].role == "scratch"
        }
        self.places = places(self._types).union(*map(places, self._code.values()))

    def fix_lifetimes(self, largest: Sequence[Any]) -> None:
        """Set the types of lifetimes to those at the largest values, and drop the trace's types."""
        at_bounds = Substitution(lambda part: at(frozen(part), largest))
        lifetimes = tuple(
            [replace(each, type=at_bounds.type(each.type)) for each in self.planned.lifetimes]
        )
        planned = self.at(largest)
        assert planned is not None  # it has just the bytes of the plan
        self.planned = replace(planned, lifetimes=lifetimes)

    def type_of(self, argument: int) -> Any:
        """Return the frozen type of an argument."""
        return self._types.get(argument) or self.planned.arguments[argument].type

    def scratch_types(self) -> list[tuple[OpenType, int]]:
        """Return the open types of temporaries, each with the bytes that it has in the plan."""
        return [(self._types[i], nbytes) for i, nbytes in self._sizes.items()]

    def sites(self) -> list[Site] | None:
        """Return the calls of a straight program; None for another."""
        main = self.planned.program.main
        sites: list[Site] = []
        loads: list[int] = []
        name = ""
        for pc, (opcode, immediates) in enumerate(main.code):
            if opcode is Opcode.load_arg:
                loads.append(immediates[0])
            elif opcode is Opcode.push_str:
                name = immediates[0]
            elif opcode is Opcode.cfunc and immediates[:2] == (len(loads), 0):
                [*rest] = self._code["main"].get(pc, immediates)[2:]
                types = tuple(map(self.type_of, loads))
                sites.append(Site(name, rest[0] if rest else {}, tuple(loads), types))
                loads = []
            elif opcode is not Opcode.halt:
                return None
        return sites

    def at(self, values: Sequence[Any]) -> Planned | None:
        """Return the program for these values, in the memory of the plan; None where a tensor would
        be larger than at the bounds."""
        planned = self.planned
        arguments = list(planned.arguments)
        types: dict[Any, TensorType] = {}
        for i, type in self._types.items():
            concrete = types.get(type)
            if concrete is None:
                concrete = types[type] = type.at(values)
            if i in self._sizes and concrete.nbytes > self._sizes[i]:
                return None
            arguments[i] = arguments[i]._replace(type=concrete)
        functions = []
        for function in planned.program.functions.values():
            code = list(function.code)
            for pc, immediates in self._code[function.name].items():
                code[pc] = Instruction(code[pc].opcode, _canonical(at(immediates, values)))
            functions.append(function._replace(code=tuple(code)))
        program = copy.copy(planned.program)  # it writes to the same arguments
        program.functions = {function.name: function for function in functions}
        return replace(planned, program=program, arguments=tuple(arguments))
