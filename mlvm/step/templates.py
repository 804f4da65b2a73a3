"""Templates of flows, with types and attributes that are formulas of sizes.

A trace with dynamic sizes has types and attributes with numbers of the trace. `frozen` replaces
each number by a `Place`, the index among the values of a launch; `FlowTemplate.flow` returns the
flow for such values. The template does not keep the trace alive. `PlannedTemplate` is the same for
the compiled program, which is planned once, at the bounds of the sizes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mlvm.arena.placement import rounded
from mlvm.core.dynamic_sizes import Length
from mlvm.core.locks import cached_property
from mlvm.core.machine.decode import decode
from mlvm.core.program.program import Instruction
from mlvm.core.types import DType, TensorType
from mlvm.step.flow import Block, Call, Flow, Home, LoopInfo, Procedure, Use, Value

if TYPE_CHECKING:  # eager calls with new numbers need this file, but not the compiler
    from mlvm.step.compile import Planned


class Place(NamedTuple):
    """Index of a number among the values of a launch."""

    number: int


class OpenPart:
    """Base class of parts of an attribute that depend on the values of a launch.

    places: the indices of the numbers
    """

    places: set[int]

    def at(self, values: Sequence[Any]) -> Any:
        """Return the part for these values; itself while these are placeholders."""
        raise NotImplementedError


class OpenType(NamedTuple):
    """Type with places among the sizes."""

    dtype: DType
    shape: tuple[int | Place, ...]

    def at(self, values: Sequence[Any]) -> TensorType:
        """Return the type for these values."""
        shape: list[Any] = [values[n.number] if type(n) is Place else n for n in self.shape]
        return TensorType(self.dtype, tuple(shape))


def frozen(value: Any) -> Any:
    """Return a type or an attribute with places instead of the numbers of the trace."""
    kind = type(value)
    if kind is TensorType:
        if not value.is_open:
            return value
        return OpenType(value.dtype, tuple([frozen(n) for n in value.shape]))
    if issubclass(kind, Length):
        return Place(value.place) if value.is_open() else value.see()
    return mapped(frozen, value)


def at(part: Any, values: Sequence[Any]) -> Any:
    """Return a frozen type or attribute for these values."""
    kind = type(part)
    if kind is OpenType:
        return part.at(values)
    if kind is Place:
        return values[part.number]
    if isinstance(part, OpenPart):
        return part.at(values)
    return mapped(lambda each: at(each, values), part)


def mapped(change: Callable[[Any], Any], part: Any) -> Any:
    """Return a tuple, list, mapping or partial function with changed items.

    If no item changes, and for other objects, return the same object.
    """
    kind = type(part)
    if kind is tuple or kind is list:
        items = list(map(change, part))
        return part if all(map(is_, items, part)) else kind(items)
    if kind is partial:
        args, keywords = mapped(change, part.args), mapped(change, part.keywords)
        is_same = args is part.args and keywords is part.keywords
        return part if is_same else partial(part.func, *args, **keywords)
    if isinstance(part, Mapping):
        entries = {name: change(each) for name, each in part.items()}
        return part if all(map(is_, entries.values(), part.values())) else entries
    return part


def places(part: Any) -> set[int]:
    """Return the indices of the places in a frozen type or attribute."""
    if type(part) is Place:
        return {part.number}
    if type(part) is OpenType:
        return places(part.shape)
    if isinstance(part, OpenPart):
        return part.places
    if type(part) is partial:
        return places(part.args) | places(part.keywords)
    if isinstance(part, (tuple, list)):
        return set().union(*map(places, part))
    return set().union(*map(places, part.values())) if isinstance(part, Mapping) else set()


class Substitution:
    """Copy of flows with `change` applied to each type and attribute."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._changed: dict[int, Any] = {}  # types
        self._keepalive: list[object] = []
        self._copies: dict[Any, Any] = {}  # copies of homes, values, blocks and procedures

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
        if home not in self._copies:
            self._copies[home] = Home(home.role, home.index, self.type(home.type))
        return self._copies[home]  # type: ignore[no-any-return]

    def value(self, value: Value) -> Value:
        """Return the copy of a value."""
        if value not in self._copies:
            home = None if value.home is None else self.home(value.home)
            self._copies[value] = Value(self.size(value), home)
        return self._copies[value]  # type: ignore[no-any-return]

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
        if block not in self._copies:
            copied = self._copies[block] = Block()
            copied.homes = set(map(self.home, block.homes))
            copied.calls = list(map(self.call, block.calls))
            copied.result = None if block.result is None else self.use(block.result)
        return self._copies[block]  # type: ignore[no-any-return]

    def procedure(self, procedure: Procedure) -> Procedure:
        """Return the copy of a procedure."""
        if procedure not in self._copies:
            copied = Procedure(procedure.name, Block(), rule=procedure.rule)
            self._copies[procedure] = copied
            copied.params = list(map(self.home, procedure.params))
            copied.block = self.block(procedure.block)
        return self._copies[procedure]  # type: ignore[no-any-return]

    def loop(self, loop: LoopInfo) -> LoopInfo:
        """Return the copy of a loop's description."""
        length = loop.length
        return LoopInfo(
            self.use(loop.i),
            self.use(length) if isinstance(length, Use) else self._change(length),
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


class Freeze(Substitution):
    """Substitution of places for the numbers of a trace.

    The size of a value is the size of the type with which it is used.

    places: the indices of all places so far
    """

    def __init__(self) -> None:
        numbers = self.places = set[int]()

        # a method would create a reference cycle that keeps the numbers alive
        def freeze_part(part: Any) -> Any:
            part = frozen(part)
            numbers.update(places(part))
            return part

        super().__init__(freeze_part)

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


class AtValues(Substitution):
    """Substitution of the values of a launch for places."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(lambda part: at(part, values))

    def size(self, value: Value) -> Any:
        nbytes: Any = value.nbytes
        return nbytes if type(nbytes) is int else self.type(nbytes).nbytes


class FlowTemplate:
    """Template of flows.

    frozen: the flow with places.
    places: the indices of all places in it.
    """

    def __init__(self, flow: Flow, places: set[int]) -> None:
        self.frozen, self.places = flow, places

    @staticmethod
    def of(flow: Flow) -> tuple[FlowTemplate, Callable[[Home], Home]]:
        """Return the template of a recorded flow, and a function from homes to frozen homes."""
        freeze = Freeze()
        return FlowTemplate(freeze.flow(flow), freeze.places), freeze.home

    def flow(self, values: Sequence[Any]) -> Flow:
        """Return the flow for these values."""
        return AtValues(values).flow(self.frozen)


def _canonical(immediates: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the immediates of a call with immutable attributes."""
    return tuple([MappingProxyType(x) if type(x) is dict else x for x in immediates])


class Site(NamedTuple):
    """Call of a program.

    It has the function's name, the frozen attributes, and the numbers and frozen types of the
    arguments.
    """

    name: str
    attributes: Any
    arguments: tuple[int, ...]
    types: tuple[Any, ...]


class Jump(NamedTuple):
    """Step that jumps, or loads the condition: the name of the code, and the number."""

    code: str
    number: int


class PlannedTemplate:
    """Template of planned programs: a step that was planned at the bounds of its sizes.

    `planned`: the program at the bounds; for a saved step, at the sizes of the last call.
    `code`: frozen immediates, by function and pc.
    `types`: frozen types, by argument.
    `sizes`: planned bytes of temporaries with such types, by argument.
    `lifetimes`: frozen types of lifetimes, by number.
    `places`: the indices of all places in it.
    """

    def __init__(
        self,
        planned: Planned,
        code: Mapping[tuple[str, int], Any],
        types: Mapping[int, OpenType],
        sizes: Mapping[int, int],
        lifetimes: Mapping[int, OpenType],
    ) -> None:
        self.planned, self.code, self.types, self.sizes = planned, code, types, sizes
        self.lifetimes = lifetimes
        self.places = places([*types.values(), *code.values(), *lifetimes.values()])

    @staticmethod
    def of(planned: Planned) -> PlannedTemplate:
        """Return the template of a program that was compiled with placeholders of sizes."""
        code = {
            (name, pc): each
            for name, function in planned.program.functions.items()
            for pc, instruction in enumerate(function.code)
            if places(each := frozen(instruction.immediates))
        }
        arguments = {i: each for i, each in enumerate(planned.arguments) if each.type.is_open}
        types = {i: frozen(each.type) for i, each in arguments.items()}
        sizes = {i: x.type.nbytes for i, x in arguments.items() if x.role == "scratch"}
        stays = {i: frozen(x.type) for i, x in enumerate(planned.lifetimes) if x.type.is_open}
        return PlannedTemplate(planned, code, types, sizes, stays)

    def with_planned(self, planned: Planned) -> PlannedTemplate:
        """Return the template with this program instead of the program at the bounds."""
        return PlannedTemplate(planned, self.code, self.types, self.sizes, self.lifetimes)

    def fix(self, largest: Sequence[Any]) -> None:
        """Replace the trace's types: make the program at the largest values."""
        planned = self.at(largest)
        assert planned is not None  # the sizes are equal to the sizes of the plan
        self.planned = planned

    def type_of(self, argument: int) -> Any:
        """Return the frozen type of an argument."""
        return self.types.get(argument) or self.planned.arguments[argument].type

    @cached_property
    def _limits(self) -> Mapping[tuple[int, ...], int]:
        """Largest products of values at these places for which temporaries fit into the plan."""
        limits: dict[tuple[int, ...], int] = {}
        for i, nbytes in self.sizes.items():
            type = self.types[i]
            places = tuple([n.number for n in type.shape if isinstance(n, Place)])
            closed = math.prod([n for n in type.shape if not isinstance(n, Place)])
            if closed:
                most = nbytes // (closed * type.dtype.itemsize)
                limits[places] = min(limits.get(places, most), most)
        return limits

    def fits(self, values: Sequence[Any]) -> bool:
        """Return whether no temporary is larger for these values than in the plan."""
        limits = self._limits.items()
        return all(math.prod([values[i] for i in places]) <= most for places, most in limits)

    def steps(self) -> list[Site | Jump] | None:
        """Return the steps of a program of calls and jumps, numbered as by the linker.

        Return None for other programs.
        """
        main = decode(self.planned.program)["main"]
        steps: list[Site | Jump] = []
        numbers: dict[int, int] = {}  # step number by first pc
        for block in main:
            numbers[block.start] = len(steps)
            for each in block.code:
                loads, name = each.arguments or [], each.name
                pushed = each.pc - each.start - (name is not None)
                if len(each.operands or ()) != len(loads) or pushed != len(loads):
                    return None
                if name is not None and each.at == 0:
                    _, _, *rest = self.code.get(("main", each.pc), (0, 0, each.attributes))
                    types = tuple(map(self.type_of, loads))
                    steps.append(Site(name, rest[0] or {}, tuple(loads), types))
                elif each.kind == "jump_if_false" and loads[0] not in self.types:
                    steps += [Jump("LOAD_ARG", loads[0]), Jump("JUMP_IF_FALSE", each.at)]
                elif each.kind == "jump":
                    steps.append(Jump("JUMP", each.at))
                elif each.kind != "halt" or block.end < len(main.function.code):
                    return None
            if block.pushed or block.changed:
                return None
        jumps = {i: x for i, x in enumerate(steps) if isinstance(x, Jump) and x.code != "LOAD_ARG"}
        if any(x.number not in numbers for x in jumps.values()):
            return None
        for i, jump in jumps.items():
            steps[i] = Jump(jump.code, numbers[jump.number])
        return steps

    def at(self, values: Sequence[Any]) -> Planned | None:
        """Return the program for these values, in the memory of the plan.

        Return None if a tensor would be larger than at the bounds.
        """
        planned = self.planned
        arguments = list(planned.arguments)
        types: dict[Any, TensorType] = {}
        for i, type in self.types.items():
            concrete = types.get(type)
            if concrete is None:
                concrete = types[type] = type.at(values)
            if i in self.sizes and concrete.nbytes > self.sizes[i]:
                return None
            arguments[i] = arguments[i]._replace(type=concrete)
        lifetimes = list(planned.lifetimes)
        for i, type in self.lifetimes.items():
            each, concrete = lifetimes[i], types.get(type) or type.at(values)
            is_whole = each.nbytes == rounded(each.type.nbytes)
            nbytes = rounded(concrete.nbytes) if is_whole else each.nbytes
            lifetimes[i] = replace(each, type=concrete, nbytes=nbytes)
        codes = {name: list(each.code) for name, each in planned.program.functions.items()}
        for (name, pc), immediates in self.code.items():
            code = codes[name]
            code[pc] = Instruction(code[pc].opcode, _canonical(at(immediates, values)))
        program = copy.copy(planned.program)  # the copy writes to the same arguments
        program.functions = {
            name: function._replace(code=tuple(codes[name]))
            for name, function in planned.program.functions.items()
        }
        return replace(
            planned, program=program, arguments=tuple(arguments), lifetimes=tuple(lifetimes)
        )
