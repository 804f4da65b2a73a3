"""Verifier, which follows the effect of a program on the stack before the first run.

For every reachable pc it infers the kinds of the frame's slots (Tensor, Int, Str), and types and
texts if they are known. Where paths join, heights and kinds must agree; types that differ become
unknown. A function is verified once per combination of parameter kinds that calls pass; recursion
is followed to a fixed point. Verified properties are not checked at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import (
    LimitExceededError,
    MlvmError,
    ProgramError,
    UnknownFunctionError,
    brief,
    counted,
    locate,
    with_article,
)
from mlvm.core.machine.callee import Callee, UserFunction, WritesInto
from mlvm.core.machine.decode import FEW, Code, Decoded, Ref, Result, argument_of, decode
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.op import Attributes
from mlvm.core.program.assembly import format_instruction
from mlvm.core.program.program import (
    STAR,
    Function,
    Instruction,
    Opcode,
    Program,
    is_int,
    is_whole,
)
from mlvm.core.sizes import MAX_SIZE
from mlvm.core.types import TensorType

ANY: Final = "Any"
_WIDTH: Final = 64  # slots per tuple, which states share if they are equal
MAX_TYPED_CONTEXTS: Final = 1000
"""Limit of the combinations of types that are verified per function (`by_type`)."""


class Abstract(NamedTuple):
    """Abstract value of a stack slot: the kind, and if inferred a Tensor's type or a Str's text.

    The kind Any is a host function's result; the machine checks the value when it is used.
    """

    kind: str
    type: TensorType | None = None
    text: str | None = None
    constant: bool = False

    def meet(self, other: Abstract) -> Abstract | None:
        """Return the facts that hold for both; None if the kinds differ."""
        if self == other:
            return self
        if self.kind != other.kind:
            if ANY not in (self.kind, other.kind):
                return None
            return UNKNOWN
        type = self.type if self.type is other.type else None
        text = self.text if self.text == other.text else None
        return Abstract(self.kind, type, text, self.constant or other.constant)

    def __str__(self) -> str:
        return str(self.type) if self.type else self.kind


TENSOR: Final = Abstract("Tensor")
INT: Final = Abstract("Int")
UNKNOWN: Final = Abstract(ANY)


State: TypeAlias = tuple[tuple[Abstract, ...], ...]
"""Slots of a frame at a join, parameters first, in tuples of `_WIDTH`.

Consecutive states share the tuples without changes.
"""


def _state(slots: Sequence[Abstract], like: State = ()) -> State:
    """Return the slots as a state, which shares equal tuples with the state `like`."""
    parts = [tuple(slots[i : i + _WIDTH]) for i in range(0, len(slots), _WIDTH)]
    return tuple([y if x == y else x for x, y in zip_longest(parts, like[: len(parts)])])


def _height(state: State) -> int:
    return sum(map(len, state))


class Verdict(NamedTuple):
    """Facts about a verified program, by position (function, pc).

    `decoded`: the decoded functions.
    `ends`: by function and first pc of a block, the pc after the last reached instruction.
    `unproven`: calls whose operands the machine checks at run time.
    `outputs`: whether a launch may return values.
    `bound`: function and bound attributes of each call.
    `cost`: with `by_type`, bytes and operations of the ops, as far as known (`VM.estimate`).
    """

    decoded: Mapping[str, Code]
    ends: Mapping[tuple[str, int], int]
    unproven: Set[tuple[str, int]]
    outputs: bool
    bound: Mapping[tuple[str, int], tuple[Callee, Attributes]]
    cost: tuple[int, int]

    @property
    def reached(self) -> frozenset[tuple[str, int]]:
        """Return the reachable positions."""
        ranges = self.ends.items()
        return frozenset((name, pc) for (name, start), end in ranges for pc in range(start, end))


def verify(
    program: Program,
    functions: FunctionTable,
    arg_types: Sequence[TensorType] | None = None,
    *,
    by_type: bool = False,
) -> Verdict:
    """Verify the program on every path; return the proven facts.

    With `arg_types`, one per launch argument, the operands of every op are checked as well. With
    `by_type`, functions are verified for each combination of parameter types, not only of kinds, so
    that the cost is known.

    Raises `ProgramError` for a malformed program, `UnknownFunctionError` for an unknown name, and
    the op's own `OpError` for operands. Raises `LimitExceededError` for calls that return more
    values than `functions.max_results`. Each error has the location.
    """
    return _Verifier(program, functions, arg_types, by_type).run()


@dataclass(eq=False)
class _Context:
    """Function with parameters of certain kinds: the facts known so far.

    `states`: the slots at joins, by pc.
    `returns`: whether a `return` is reachable, for which the walks in `waiting` wait.
    `result`: the results, None if the number is unknown.
    `callers`: positions of calls to the function.
    `calls`: contexts that it calls, by pc.
    `costs`: costs of the ops, by pc.
    """

    function: Function
    states: dict[int, State]
    returns: bool = False
    result: State | None = None
    waiting: list[_Walk] = field(default_factory=list)
    callers: dict[tuple[_Context, int], None] = field(default_factory=dict)
    calls: dict[int, _Context] = field(default_factory=dict)
    costs: dict[int, tuple[int, int]] = field(default_factory=dict)


class _Walk(NamedTuple):
    """Path to verify, which starts at a join or after a call that waited for results."""

    context: _Context
    since: int
    start: int
    state: State | None = None
    resumed: int = 0
    results: Mapping[int, Sequence[Abstract]] = MappingProxyType({})


def _cost(main: _Context) -> tuple[int, int]:
    """Return the bytes and operations of a call. Recursive calls count as zero."""
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
    outputs: bool = False
    nargs: int = 0  # number of arguments that the program loads
    many: int = 0  # total results of calls with more than FEW results
    unproven: set[tuple[str, int]] = field(default_factory=set)
    bound: dict[tuple[str, int], tuple[Callee, Attributes]] = field(default_factory=dict)
    cached: dict[Any, Any] = field(default_factory=dict)  # bound attributes, and inferred types
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    contexts: dict[str, dict[tuple[str, ...], _Context]] = field(default_factory=dict)
    work: list[_Walk] = field(default_factory=list)
    pushed: dict[Instruction, Abstract] = field(default_factory=dict)

    def run(self) -> Verdict:
        for function in self.program.functions.values():
            _check_signature(function)
            self.context = _Context(function, {})
            for self.pc, instruction in enumerate(function.code):
                self.check_immediates(function, instruction)
        self.decoded = decode(self.program, partial(_nresults, self.functions))
        if self.program.main.nparams:
            raise ProgramError("main has no parameters; it loads the launch's arguments")
        main = self.enter(self.program.main, ())
        while self.work:
            self.follow(self.work.pop())
        facts = self.unproven, self.outputs, self.bound, _cost(main)
        return Verdict(self.decoded, self.ends, *facts)

    def follow(self, walk: _Walk) -> None:
        """Walk to a join or to the end of this path. The slots are copied only there."""
        self.context, self.since, start, state, first, results = walk
        function = self.context.function
        code, nparams = self.decoded[function.name], function.nparams
        like = self.context.states[start] if state is None else state
        self.slots = [x for part in like for x in part]
        while True:
            self.results = dict(results)
            block = code.block(start, len(self.slots) - nparams)
            for i in range(first, len(block.code)):
                each = block.code[i]
                self.pc = each.pc
                if each.fault is not None:
                    raise self.error(each.fault)
                getattr(self, each.kind)(each)
                if each.kind == "call" and not self.context.calls[each.pc].returns:
                    state = _state(self.slots, like)
                    rest = _Walk(self.context, self.since, start, state, i, self.results)
                    self.context.calls[each.pc].waiting.append(rest)
                    self.reach(start, each.pc + 1)
                    return
            self.reach(start, block.end)
            last = block.code[-1].kind if block.code else ""
            values = [*map(self.value, block.pushed)]
            if block.many:
                values += self.results[block.end - 1]
            changed = [(nparams + i, self.value(x)) for i, x in block.changed]
            if not block.is_open:
                self.slots[nparams + block.low :] = values
                for slot, x in changed:
                    self.slots[slot] = x
            if last == "halt" and not self.outputs:
                tensors = [x for x in self.slots[nparams:] if x.kind in ("Tensor", ANY)]
                self.outputs = block.is_open or bool(tensors)
            start, self.pc, first, results = block.end, block.end - 1, 0, {}
            if last in ("jump", "jump_if_false") and block.code[-1].pc == self.pc:
                like = self.merge(self.context, block.code[-1].at, _state(self.slots, like))
            if not block.goes_on:
                return
            if start >= len(function.code):
                raise ProgramError(
                    f"{function.name}: execution can reach the end of the function; end it with "
                    "halt or return"
                )
            if start in code.targets:
                if block.is_open:
                    raise self.error("expected a stack of known height where two paths join")
                self.merge(self.context, start, _state(self.slots, like))
                return

    def reach(self, start: int, end: int) -> None:
        """Mark these instructions as reachable; check that the launch arguments exist."""
        place = self.context.function.name, start
        self.ends[place] = max(end, self.ends.get(place, start))
        if self.arg_types is not None and self.nargs > len(self.arg_types):
            for self.pc in range(start, end):
                number = argument_of(self.context.function.code[self.pc])
                if number is not None and number >= len(self.arg_types):
                    raise self.error(
                        f"expected an argument below {len(self.arg_types)}, the launch's number"
                    )

    # --- the fixed point ---

    def enter(self, function: Function, params: Sequence[Abstract]) -> _Context:
        """Return the context of a call with these parameters; schedule it if they are new.

        Beyond a limit of combinations, one combination of unknown kinds stands for all.
        """
        key = tuple([str(p) if self.by_type else p.kind for p in params])
        most = MAX_TYPED_CONTEXTS if self.by_type else 16
        contexts = self.contexts.setdefault(function.name, {})
        if key not in contexts and len(contexts) >= most:
            params = (UNKNOWN,) * len(params)
            key = (ANY,) * len(params)
        context = contexts.get(key) or contexts.setdefault(key, _Context(function, {}))
        self.merge(context, 0, _state(params))
        return context

    def merge(self, context: _Context, pc: int, state: State) -> State:
        """Record that the state reaches `pc` of a function, and return the state."""
        before = context.states.get(pc)
        after = state if before is None else self.meet(before, state, f"pc {pc}")
        if after is not before:
            self.count(len(after))  # states of a high stack are rarely shared
            context.states[pc] = after
            self.work.append(_Walk(context, pc, pc))
        return state

    def meet(self, x: State, y: State, where: str) -> State:
        heights = _height(x), _height(y)
        if heights[0] != heights[1]:
            values = "the stack has {} or {} values".format(*heights)
            raise self.error(f"{values} at {where}, depending on the path")
        parts = list(x)
        for n, (a, b) in enumerate(zip(x, y, strict=True)):
            if a is not b and a != b:
                met = tuple([p.meet(q) for p, q in zip(a, b, strict=True)])
                if None in met:
                    i = met.index(None)
                    slot = f"slot {n * _WIDTH + i} is {a[i]} or {b[i]}"
                    raise self.error(f"{slot} at {where}, depending on the path")
                parts[n] = a if met == a else met  # type: ignore[assignment]
        return x if all(map(operator.is_, parts, x)) else tuple(parts)

    # --- values ---

    def value(self, ref: Ref) -> Abstract:
        """Return the facts about an operand."""
        if ref.__class__ is int:
            return self.slots[self.context.function.nparams + ref]
        if ref.__class__ is Result:
            return self.results[ref.pc][ref.number]
        assert isinstance(ref, Instruction)
        return self.pushed.get(ref) or self.push(ref)

    def operands(self, each: Decoded) -> list[Abstract]:
        return [*map(self.value, each.operands or ())]

    def push(self, instruction: Instruction) -> Abstract:
        [immediate] = instruction.immediates
        abstract = INT
        if instruction.opcode is Opcode.load_arg:
            types = self.arg_types or ()
            abstract = Abstract("Tensor", types[immediate] if immediate < len(types) else None)
        elif instruction.opcode is Opcode.push_str:
            abstract = Abstract("Str", text=immediate)
        elif instruction.opcode is Opcode.push_const:
            type = TensorType.of(self.program.constants[immediate])
            abstract = Abstract("Tensor", type, constant=True)
        self.pushed[instruction] = abstract
        return abstract

    def take(self, ref: Ref, kind: str) -> Abstract:
        value = self.value(ref)
        if value.kind not in (kind, ANY):
            raise self.error(f"expected {with_article(kind)} on top of the stack, got {value}")
        if value.kind == ANY:
            self.unproven.add((self.context.function.name, self.pc))
        return value

    # --- effects of instructions ---

    def halt(self, each: Decoded) -> None:
        """Do nothing; the end of the block handles a halt."""

    set = jump = halt

    def load_global(self, each: Decoded) -> None:
        [handle] = each.operands or ()
        self.take(handle, "Int")
        self.results[each.pc] = [TENSOR]

    def store_global(self, each: Decoded) -> None:
        tensor, handle = each.operands or ()
        self.take(handle, "Int")
        self.take(tensor, "Tensor")

    def jump_if_false(self, each: Decoded) -> None:
        [condition] = self.operands(each)
        if condition.kind == "Str" or (condition.type is not None and condition.type.size != 1):
            raise self.error(
                f"expected a condition as an Int or a Tensor of one element, got {condition}"
            )

    def cfunc(self, each: Decoded) -> None:
        name = self.take(each.callee, "Str").text
        results = None
        if name is None or each.operands is None:
            self.unproven.add((self.context.function.name, self.pc))
        else:
            results = self.results_of(name, self.operands(each), each.at, each.attributes)
        if each.results is not None and results is None:
            self.count(each.results)
            results = [UNKNOWN] * each.results
        self.results[each.pc] = results or []

    def results_of(
        self, name: str, operands: list[Abstract], nresults: Any, attributes: Any
    ) -> list[Abstract] | None:
        """Infer the results of a host function; None if it does not declare them."""
        try:
            callee = self.functions.binding(name).callee
            attributes = self.bound_by(callee, attributes)
            if callee.nresults is not None and nresults not in (STAR, callee.nresults):
                raise self.error(
                    f"{name} returns {counted(int(callee.nresults), 'result')}, the call "
                    f"expects {nresults}; write cfunc with this number"
                )
            if isinstance(callee, UserFunction):
                callee.check_count(len(operands))
                return None if callee.nresults is None else [UNKNOWN] * callee.nresults
            types = [x.type for x in operands]
            has_types = None not in types  # in this case all are Tensors
            if not has_types and any(x.kind not in ("Tensor", ANY) for x in operands):
                raise self.error(f"{name}: expected Tensors, got ({', '.join(map(str, operands))})")
            if isinstance(callee, WritesInto) and any(
                x.constant for x in operands[: callee.writes(attributes)]
            ):
                raise self.error(f"{name}: cannot write to a constant; pass a copy")
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

    def call(self, each: Decoded) -> None:
        context = self.enter(self.program.functions[each.callee], self.operands(each))
        context.callers[self.context, self.since] = None
        self.context.calls[each.pc] = context
        if context.returns and each.results is not None and context.result is not None:
            self.count(each.results)
            self.results[each.pc] = [x for part in context.result for x in part]

    def return_(self, each: Decoded) -> None:
        context, function, n = self.context, self.context.function, len(each.operands or ())
        if function.name == "main":
            raise self.error("main has no caller to return to; write halt")
        if function.nresults not in (STAR, n):
            raise self.error(
                f"{function.name} declares {counted(int(function.nresults), 'result')}, got {n}"
            )
        before, after = context.result, _state(self.operands(each))
        if not context.returns:
            context.result, context.returns = after, True
            self.work += context.waiting
            context.waiting.clear()
        elif before is not None:
            is_same = _height(before) == n
            context.result = self.meet(before, after, "the return") if is_same else None
            if context.result is not before:
                self.work += [_Walk(other, since, since) for other, since in context.callers]

    def count(self, nresults: int) -> None:
        """Limit the total results of calls with more than `FEW` results.

        Otherwise memory is unbounded: functions that call each other twice double the number of
        results.
        """
        if nresults > FEW:
            self.many += nresults
            if self.many > self.functions.max_results:
                limit = f"the limit is {self.functions.max_results:,}; return fewer"
                where = f"{self.context.function.name}, pc {self.pc}"
                raise LimitExceededError(
                    f"{where}: calls leave too many values on the stack: {limit}"
                )

    # --- immediates and errors ---

    def check_immediates(self, function: Function, instruction: Instruction) -> None:
        opcode, immediates = instruction
        first = immediates[0] if immediates else None
        if len(immediates) == 1:  # most instructions
            if opcode is Opcode.push_str and first.__class__ is str:
                return
            if opcode is Opcode.load_arg and first.__class__ is int and 0 <= first <= MAX_SIZE:
                self.nargs = max(self.nargs, first + 1)
                return
        elif opcode is Opcode.cfunc and len(immediates) == 2:
            if {*map(type, immediates)} == {int} and 0 <= min(immediates) <= max(
                immediates
            ) <= MAX_SIZE:
                return
        elif opcode is Opcode.halt and not immediates:
            return
        if not opcode.takes(len(immediates)):
            expected = " ".join(opcode.immediates) or "(none)"
            raise self.error(f"expected the immediates {expected}, got {len(immediates)}")
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
            if good and opcode is Opcode.load_arg:
                self.nargs = max(self.nargs, int(value) + 1)
            if not good:
                raise self.error(f"expected {kind.rstrip('?')} as {expected}, got {brief(value)}")

    def place(self) -> str:
        function = self.context.function
        return f"{function.name}, pc {self.pc}: {format_instruction(function.code[self.pc])}"

    def error(self, reason: str) -> ProgramError:
        error = ProgramError(f"{self.place()}: {reason}")
        error.function, error.pc = self.context.function.name, self.pc
        return error


def _nresults(functions: FunctionTable, name: str | None) -> int | None:
    """Return the number of results that the function of that name declares."""
    try:
        return None if name is None else functions.binding(name).callee.nresults
    except UnknownFunctionError:
        return None


def _check_signature(function: Function) -> None:
    name, nparams, nresults, _ = function
    if not is_whole(nparams):
        raise ProgramError(f"{name}: expected nparams >= 0, got {brief(nparams)}")
    if not _is_count(nresults):
        raise ProgramError(f"{name}: expected nresults >= 0 or *, got {brief(nresults)}")


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
"""Expected form of an immediate by opcode (None for any) and kind, and a test of it."""
