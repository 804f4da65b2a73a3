"""The verifier: what a program does to the stack, followed before it first runs.

For every pc that can be reached it knows the frame's slots by kind (Tensor, Int, Str), and by
type and text where these are known. Where paths meet, heights and kinds must agree; types that
differ become unknown. Functions are followed from their calls, once for each combination of
parameter kinds, and recursion to a fixed point. What has passed runs unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import LimitExceeded, MlvmError, ProgramError, brief, locate
from mlvm.core.machine.callee import Callee, UserFunction, WritesInto
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.slots import Finder, Slots, Stack, merged
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.program.assembly import format_instruction
from mlvm.core.program.program import STAR, Function, Opcode, Program, is_int, is_whole
from mlvm.core.types import TensorType

ANY: Final = "Any"
_MOST_ON_TOP: Final = 256  # values known above an unknown number of others, where paths meet
_FEW: Final = 32  # results of a call, which take memory in proportion to the program
_SOME: Final = -1  # one of the launch's arguments, of which it is not known
_ENDS: Final = object()  # what the method of an instruction returns behind which no path goes on

_MOST: Final = 1 << 63

MAX_CONTEXTS: Final = 16
MAX_TYPED_CONTEXTS: Final = 1000
"""Limits of combinations of kinds (`by_type`: of types) for which a function is followed; after
these it is followed for any."""


class Abstract(NamedTuple):
    """Abstract value of a stack slot: its kind, and if inferred a Tensor's type or a Str's text.

    The kind Any is a host function's result: the machine checks the value at its use.
    `argument` is the number of the launch's argument that the slot holds, or `_SOME`."""

    kind: str
    type: TensorType | None = None
    text: str | None = None
    constant: bool = False
    argument: int | None = None

    def meet(self, other: Abstract) -> Abstract | None:
        """Return the facts that hold for both; None when their kinds clash."""
        if self == other:
            return self
        if self.kind != other.kind:
            if ANY not in (self.kind, other.kind):
                return None
            return Abstract(ANY, argument=self._argument(other))
        type = self.type if self.type is other.type else None
        text = self.text if self.text == other.text else None
        constant = self.constant or other.constant
        return Abstract(self.kind, type, text, constant, self._argument(other))

    def _argument(self, other: Abstract) -> int | None:
        return self.argument if self.argument == other.argument else _SOME

    def __str__(self) -> str:
        return str(self.type) if self.type else self.kind


TENSOR: Final = Abstract("Tensor")
INT: Final = Abstract("Int")
UNKNOWN: Final = Abstract(ANY)


class State(NamedTuple):
    """A frame's slots, parameters first. It is `open` where heights differ: any number of unknown
    values lie above `slots`, and the slots `top` lie above these."""

    slots: Slots[Abstract] = Slots()
    open: bool = False
    top: tuple[Abstract, ...] = ()

    @staticmethod
    def of(slots: Sequence[Abstract]) -> State:
        return State(Slots[Abstract]().with_more(slots))

    def is_as(self, other: State) -> bool:
        """Return whether the merge of this state and the other has changed nothing."""
        return self.slots.root is other.slots.root and self[1:] == other[1:]


class Verdict(NamedTuple):
    """Facts about a verified program, by places (function, pc).

    `reached`: places that can be reached. `unproven`: calls whose operands the machine checks as
    they run, since a kind or type was not inferred. `outputs`: whether a launch may leave any.
    `bound`: each call's function, and its bound attributes.
    `cost`: with `by_type`, bytes and operations of its ops, as far as known (`VM.estimate`)."""

    reached: frozenset[tuple[str, int]]
    unproven: frozenset[tuple[str, int]]
    outputs: bool
    bound: Mapping[tuple[str, int], tuple[Callee, Attributes]]
    cost: tuple[int, int]


class Uses(NamedTuple):
    """First use of a launch's arguments: old values of `reads` matter; `makes` are overwritten."""

    reads: frozenset[int]
    makes: frozenset[int]


def uses_of(program: Program, functions: FunctionTable, nargs: int) -> Uses:
    """Return how a launch first uses each argument; as overwritten, if that cannot be inferred."""
    first: dict[int, bool] = {}
    try:
        _Verifier(program, functions, None, False, first).run()
    except MlvmError:
        first = {_SOME: True}
    reads = frozenset(i for i, writes in first.items() if not writes and i != _SOME)
    makes = {i for i, writes in first.items() if writes and i != _SOME}
    if first.get(_SOME):
        makes = set(range(nargs)) - reads
    return Uses(reads, frozenset(makes))


def verify(
    program: Program,
    functions: FunctionTable,
    arg_types: Sequence[TensorType] | None = None,
    *,
    by_type: bool = False,
) -> Verdict:
    """Verify the program on every path; return the facts that this proves.

    With `arg_types` (one for each launch argument) the operands of every op are checked too.
    With `by_type` functions are followed for each combination of parameter types, not only of
    kinds, so that their cost is known.
    Raises `ProgramError` for a malformed program, `UnknownFunction` for an unknown name, and the
    op's own `OpError` for operands. Raises `LimitExceeded` for calls that leave more values than
    `functions.max_results`. Each error has the place."""
    return _Verifier(program, functions, arg_types, by_type).run()


@dataclass(eq=False)
class _Context:
    """A function with parameters of certain kinds: what is known of it so far.

    `states`: the stack where paths meet, by pc. `result`: the results as slots, None as long as no
    `return` is reached, which the walks in `waiting` need. `callers`: the blocks with calls of it.
    `calls`: the contexts that it calls, by pc. `costs`: those of its ops, by pc."""

    function: Function
    states: dict[int, State]
    result: State | None = None
    waiting: list[_Walk] = field(default_factory=list)
    callers: dict[_Walk, None] = field(default_factory=dict)
    calls: dict[int, _Context] = field(default_factory=dict)
    costs: dict[int, tuple[int, int]] = field(default_factory=dict)


_Walk: TypeAlias = tuple[_Context, int, int, State | None]
"""A way through a function that is to be followed: from a pc, in the block of instructions that
begins at another, and with a state, None for that of its context."""


def _cost(main: _Context) -> tuple[int, int]:
    """Bytes and operations of one call. Calls of what a context is called from count nothing."""
    costs: dict[_Context, tuple[int, int]] = {}
    inside: set[_Context] = set()
    todo = [main]
    while todo:
        context = todo[-1]
        called = context.calls.values()
        if context not in costs and context not in inside:
            inside.add(context)
            todo += [each for each in called if each not in costs and each not in inside][::-1]
            continue
        todo.pop()
        if context not in costs:
            inside.remove(context)
            parts = [*context.costs.values(), *[costs[each] for each in called if each in costs]]
            costs[context] = sum(n for n, _ in parts), sum(n for _, n in parts)
    return costs[main]


@dataclass
class _Verifier:
    program: Program
    functions: FunctionTable
    arg_types: Sequence[TensorType] | None
    by_type: bool
    first: dict[int, bool] | None = None  # whether an argument is written before it is read
    outputs: bool = False
    many: int = 0  # results of calls that leave more than a few
    unproven: set[tuple[str, int]] = field(default_factory=set)
    bound: dict[tuple[str, int], tuple[Callee, Attributes]] = field(default_factory=dict)
    cached: dict[Any, Any] = field(default_factory=dict)  # attributes bound, and types inferred
    reached: set[tuple[str, int]] = field(default_factory=set)
    targets: dict[str, set[int]] = field(default_factory=dict)
    contexts: dict[str, dict[tuple[str, ...], _Context]] = field(default_factory=dict)
    work: list[_Walk] = field(default_factory=list)
    arguments: dict[int, Abstract] = field(default_factory=dict)  # of the launch, by number
    tensors: Finder[Abstract] = field(default_factory=lambda: Finder(_may_be_tensor))

    def run(self) -> Verdict:
        for function in self.program.functions.values():
            _check_signature(function)
            self.context = _Context(function, {})
            for self.pc, self.instruction in enumerate(function.code):
                self.check_immediates(function)
            self.targets[function.name] = function.targets
        if self.program.main.nparams:
            raise ProgramError("main has no parameters; it loads the launch's arguments")
        main = self.enter(self.program.main, ())
        while self.work:
            self.context, self.pc, self.block, state = self.work.pop()
            state = state or self.context.states[self.pc]
            self.slots, self.open, self.top = Stack(state.slots), state.open, list(state.top)
            self.follow(self.context.function, self.targets[self.context.function.name])
        reached, unproven = frozenset(self.reached), frozenset(self.unproven)
        return Verdict(reached, unproven, self.outputs, self.bound, _cost(main))

    def follow(self, function: Function, targets: set[int]) -> None:
        """Walk on to where paths meet, or this one ends. Only there a copy of the stack is kept."""
        while self.pc < len(function.code):
            opcode, immediates = self.instruction = function.code[self.pc]
            self.reached.add((function.name, self.pc))
            if getattr(self, opcode._name_)(*immediates) is _ENDS:  # `name` is a call in Python
                return
            if self.pc + 1 in targets:
                self.flow(self.pc + 1)
                return
            self.pc += 1
        raise ProgramError(f"{function.name}: the end is reached without halt or return")

    # --- the fixed point ---

    def enter(self, function: Function, params: tuple[Abstract, ...]) -> _Context:
        """The context of a call with these parameters, to be followed again if they are new."""
        key = tuple(str(p) if self.by_type else p.kind for p in params)
        if self.first is not None:
            key += tuple(str(p.argument) for p in params)
        most = MAX_TYPED_CONTEXTS if self.by_type else MAX_CONTEXTS
        contexts = self.contexts.setdefault(function.name, {})
        if key not in contexts and len(contexts) >= most:
            params = (UNKNOWN._replace(argument=self.unknown_argument),) * len(params)
            key = (ANY,) * len(params)
        context = contexts.get(key) or contexts.setdefault(key, _Context(function, {}))
        self.merge(context, 0, State.of(params))
        return context

    def flow(self, pc: int) -> None:
        """The state in hand reaches `pc` of the same function."""
        self.merge(self.context, pc, self.state())

    def state(self) -> State:
        return State(self.slots.shared(), self.open, tuple(self.top[-_MOST_ON_TOP:]))

    def merge(self, context: _Context, pc: int, state: State) -> None:
        before = context.states.get(pc)
        after = state if before is None else self.meet(before, state, f"pc {pc}")
        if before is None or not after.is_as(before):
            context.states[pc] = after
            self.work.append((context, pc, pc, None))

    def meet(self, x: State, y: State, where: str) -> State:
        open = x.open or y.open
        if not open and x.slots.height != y.slots.height:
            raise self.error(
                f"the stack has {x.slots.height} or {y.slots.height} values at {where}, "
                f"depending on the path"
            )

        def both(i: int, a: Abstract, b: Abstract) -> Abstract:
            common = a.meet(b)
            if common is None:
                raise self.error(f"slot {i} is {a} or {b} at {where}, depending on the path")
            return a if common == a else common

        top: tuple[Abstract, ...] = ()
        if open:
            x, y = _opened(x, y), _opened(y, x)
            pairs = zip(x.top[::-1], y.top[::-1], strict=False)
            top = tuple([both(i, a, b) for i, (a, b) in enumerate(pairs)][::-1])
            height = min(x.slots.height, y.slots.height)
            x, y = (each._replace(slots=each.slots.lowest(height)) for each in (x, y))
        return State(merged(x.slots, y.slots, both), open, top)

    # --- what each instruction does ---

    def halt(self) -> object:
        nparams = self.context.function.nparams
        if self.first is not None:
            self.use(list(self.slots.shared().above(nparams)))
        self.outputs |= self.open or self.tensors.any_above(self.slots.shared(), nparams)
        return _ENDS

    def push_int(self, n: int) -> None:
        self.push(INT)

    def push_str(self, s: str) -> None:
        self.push(Abstract("Str", text=s))

    def push_const(self, name: str) -> None:
        self.push(Abstract("Tensor", TensorType.of(self.program.constants[name]), constant=True))

    def load_arg(self, i: int) -> None:
        if self.arg_types is not None and i >= len(self.arg_types):
            raise self.error(f"the launch has {len(self.arg_types)} arguments")
        x = self.arguments.get(i)
        if x is None:
            type = self.arg_types[i] if self.arg_types is not None else None
            argument = None if self.first is None else i
            x = self.arguments[i] = Abstract("Tensor", type, argument=argument)
        self.push(x)

    @property
    def unknown_argument(self) -> int | None:
        return None if self.first is None else _SOME

    def use(self, read: Sequence[Abstract], written: Sequence[Abstract] = ()) -> None:
        """Note what is done with arguments, in this order."""
        if self.first is not None:
            for values, writes in ((read, False), (written, True)):
                for x in values:
                    if x.argument is not None:
                        self.first[x.argument] = self.first.get(x.argument, writes) or (
                            writes and x.argument == _SOME
                        )

    def load_global(self) -> None:
        self.take("Int")
        self.push(TENSOR._replace(argument=self.unknown_argument))

    def store_global(self) -> None:
        self.take("Int")
        self.use([self.take("Tensor")])

    def get(self, i: int) -> None:
        self.push(self.slots.at(self.place_of(i)))

    def set(self, i: int) -> None:
        value = self.take(ANY)
        self.slots.put(self.place_of(i), value)

    def cfunc(self, nparams: Any, nresults: Any, attributes: Any = NO_ATTRIBUTES) -> None:
        name = self.take("Str").text
        if nparams == STAR:
            is_exact = not self.open
            operands = self.slots.pop(len(self.slots) - self.context.function.nparams)
            self.open, self.top = False, []
        else:
            is_exact, operands = True, self.pop(nparams)
        results = None
        if self.first is not None:
            self.use_by(name, operands, attributes)
        if name is None or not is_exact:
            self.unproven.add((self.context.function.name, self.pc))
        else:
            results = self.results_of(name, operands, nresults, attributes)
        if results is None and nresults != STAR:
            self.count(nresults)
            results = [UNKNOWN] * nresults
        self.leave(results or (), open=results is None)

    def use_by(self, name: str | None, operands: list[Abstract], attributes: Any) -> None:
        """Note what a host function does with its operands; one that is not known writes them."""
        callee = self.functions.binding(name).callee if name is not None else None
        read, written = operands, list[Abstract]()
        if isinstance(callee, WritesInto):
            count = callee.writes(callee.bind(attributes))
            read, written = operands[count:], operands[:count]
        elif callee is None or isinstance(callee, UserFunction):
            read = operands[callee.reads] if callee is not None and callee.reads is not None else []
            written = [x for x in operands if all(x is not each for each in read)]
        self.use(read, written)

    def results_of(
        self, name: str, operands: list[Abstract], nresults: Any, attributes: Any
    ) -> list[Abstract] | None:
        """Infer the results of a host function; None where it does not declare them."""
        try:
            callee = self.functions.binding(name).callee
            attributes = self.bound_by(callee, attributes)
            if callee.nresults is not None and nresults not in (STAR, callee.nresults):
                raise self.error(f"{name} leaves {callee.nresults} results, not {nresults}")
            if isinstance(callee, UserFunction):
                callee.check_count(len(operands))
                return None if callee.nresults is None else [UNKNOWN] * callee.nresults
            types = [x.type for x in operands]
            has_types = None not in types  # then all are Tensors
            if not has_types and any(x.kind not in ("Tensor", ANY) for x in operands):
                raise self.error(f"{name} takes Tensors, not ({', '.join(map(str, operands))})")
            if isinstance(callee, WritesInto) and any(
                x.constant for x in operands[: callee.writes(attributes)]
            ):
                raise self.error(f"{name} would write to a constant")
            if has_types:
                if self.by_type:
                    self.context.costs[self.pc] = callee.cost(types, attributes)  # type: ignore[arg-type]
                key = callee, id(attributes), *types
                if key not in self.cached:
                    inferred = callee.infer(types, attributes) or ()  # type: ignore[arg-type]
                    self.cached[key] = [Abstract("Tensor", type) for type in inferred]
                return self.cached[key]  # type: ignore[no-any-return]
            self.unproven.add((self.context.function.name, self.pc))
            return [TENSOR] * (callee.nresults or 0)
        except ProgramError:
            raise
        except MlvmError as error:
            locate(error, self.place(), function=self.context.function.name, pc=self.pc)
            raise

    def bound_by(self, callee: Callee, attributes: Attributes) -> Attributes:
        """Bind the attributes of the current call, once for all calls that share them."""
        place, key = (self.context.function.name, self.pc), (id(attributes), callee)
        if key not in self.cached:
            self.cached[key] = callee, callee.bind(attributes)
        self.bound[place] = self.cached[key]
        return self.bound[place][1]

    def call(self, name: str) -> object:
        function = self.program.functions[name]
        params = tuple(self.pop(function.nparams))
        context = self.enter(function, params)
        context.callers[self.context, self.block, self.block, None] = None
        self.context.calls[self.pc] = context
        if context.result is None:
            self.leave(params, open=False)
            context.waiting.append((self.context, self.pc, self.block, self.state()))
            return _ENDS
        self.count(context.result.slots.height)
        self.leave([*context.result.slots.above(0)], context.result.open)
        return None

    def return_(self, n: int) -> object:
        function = self.context.function
        if function.name == "main":
            raise self.error("main has no caller to return to; it ends with halt")
        if function.nresults not in (STAR, n):
            raise self.error(f"{function.name} leaves {function.nresults} results, not {n}")
        state = State.of(self.pop(n))
        before = self.context.result
        if before is None:
            after = state
        elif function.nresults == STAR and (before.open or before.slots.height != n):
            after = State(open=True)
        else:
            after = self.meet(before, state, "the return")
        if before is None or not after.is_as(before):
            self.context.result = after
            self.work += self.context.waiting if before is None else self.context.callers
            self.context.waiting.clear()
        return _ENDS

    def jump(self, target: int) -> object:
        self.need_height()
        self.flow(target)
        return _ENDS

    def jump_if_false(self, target: int) -> None:
        self.need_height()
        condition = self.take(ANY)
        self.use([condition])
        if condition.kind == "Str" or (condition.type is not None and condition.type.size != 1):
            raise self.error(f"a condition is an Int or a Tensor of one element, not {condition}")
        self.flow(target)

    # --- the stack ---

    def push(self, value: Abstract) -> None:
        (self.top if self.open else self.slots).extend((value,))

    def leave(self, results: Sequence[Abstract], open: bool) -> None:
        """Push a call's results; if open, any number of unknown ones follow them."""
        (self.top if self.open else self.slots).extend(results)
        if open:
            self.open, self.top = True, []

    def count(self, nresults: int) -> None:
        """Bound the results of all calls with many, whose memory nothing else bounds: functions
        that call each other twice double them."""
        if nresults > _FEW:
            self.many += nresults
            if self.many > self.functions.max_results:
                where = f"{self.context.function.name}, pc {self.pc}"
                most = f"{self.functions.max_results:,}"
                raise LimitExceeded(
                    f"{where}: calls leave too many values on the stack: the limit is {most}; "
                    "return fewer"
                )

    def take(self, kind: str) -> Abstract:
        [value] = self.pop(1)
        if kind != ANY and value.kind not in (kind, ANY):
            expected = "an Int" if kind == "Int" else f"a {kind}"
            raise self.error(f"expected {expected} on top of the stack, got {value}")
        if kind != ANY and value.kind == ANY:
            self.unproven.add((self.context.function.name, self.pc))
        return value

    def pop(self, n: int) -> list[Abstract]:
        height = len(self.top)
        if not self.open:
            height = len(self.slots) - self.context.function.nparams
        if n > height:
            qualifier = " known" if self.open else ""
            raise self.error(f"needs {n} values above base; there are {height}{qualifier}")
        if not self.open:
            return self.slots.pop(n)
        at = height - n
        values = self.top[at:]
        del self.top[at:]
        return values

    def need_height(self) -> None:
        """Refuse a jump where the height is not known: a loop could grow the stack."""
        if self.open:
            raise self.error("the stack's height is not known here")

    def place_of(self, i: int) -> int:
        nparams = self.context.function.nparams
        if not -nparams <= i < len(self.slots) - nparams:
            raise self.error(
                f"slot {i} is not there: {nparams} parameters lie below base, "
                f"{len(self.slots) - nparams} values above"
            )
        return nparams + i

    # --- immediates and errors ---

    def check_immediates(self, function: Function) -> None:
        opcode, immediates = self.instruction
        if len(immediates) == 1:  # most instructions
            [first] = immediates
            if opcode is Opcode.push_str and first.__class__ is str:
                return
            if opcode is Opcode.load_arg and first.__class__ is int and 0 <= first < _MOST:
                return
        if not opcode.takes(len(immediates)):
            raise self.error(f"takes {' '.join(opcode.immediates) or 'no immediates'}")
        for kind, value in zip(opcode.immediates, immediates, strict=False):
            if kind in ("name", "func"):
                here = self.program.constants if kind == "name" else self.program.functions
                good = isinstance(value, str) and value in here
                what = "constant" if kind == "name" else "function"
                expected = "" if good else f"a {what}, of {', '.join(here) or 'none'}"
            elif kind == "label":
                good = is_int(value) and 0 <= value < len(function.code)
                expected = f"a pc below {len(function.code)}"
            else:
                expected, fits = _WANTED.get((opcode, kind)) or _WANTED[None, kind]
                good = fits(value)
            if not good:
                raise self.error(f"{kind.rstrip('?')} must be {expected}, not {brief(value)}")

    def place(self) -> str:
        return f"{self.context.function.name}, pc {self.pc}: {format_instruction(self.instruction)}"

    def error(self, reason: str) -> ProgramError:
        error = ProgramError(f"{self.place()}: {reason}")
        error.function, error.pc = self.context.function.name, self.pc
        return error


def _opened(state: State, other: State) -> State:
    """The state as an open one. Its slots are divided as those of the other, which is open."""
    if state.open:
        return state
    start = max(other.slots.height, state.slots.height - len(other.top))
    return State(state.slots.lowest(other.slots.height), True, (*state.slots.above(start),))


def _may_be_tensor(x: Abstract) -> bool:
    return x.kind in ("Tensor", ANY)


def _check_signature(function: Function) -> None:
    name, nparams, nresults, _ = function
    if not is_whole(nparams):
        raise ProgramError(f"{name}: nparams must be >= 0, not {brief(nparams)}")
    if not _is_count(nresults):
        raise ProgramError(f"{name}: nresults must be >= 0 or *, not {brief(nresults)}")


def _is_count(value: object) -> bool:
    return is_whole(value) or (isinstance(value, str) and value == STAR)


_WANTED: Final[Mapping[tuple[Opcode | None, str], tuple[str, Callable[[Any], bool]]]] = {
    (Opcode.push_int, "n"): ("an integer of 64 bits", is_int),
    (Opcode.load_arg, "i"): ("an argument's number >= 0", is_whole),
    (None, "n"): ("a count >= 0", is_whole),
    (None, "i"): ("a slot's number", is_int),
    (None, "s"): ("a string", lambda s: isinstance(s, str)),
    (None, "nparams"): ("a count >= 0 or *", _is_count),
    (None, "nresults"): ("a count >= 0 or *", _is_count),
    (None, "attrs?"): (
        "attributes by name",
        lambda attributes: (
            isinstance(attributes, Mapping) and all(isinstance(x, str) for x in attributes)
        ),
    ),
}
"""What an immediate of that kind must be, of the opcode or of any, and what tells."""
