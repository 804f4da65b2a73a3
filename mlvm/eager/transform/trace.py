"""A function of tensors as data flow, and what it means when its values are read anew.

A function is called once, with stand-ins, and its launches are recorded as for `capture`. The flow
is then run again by a `Meaning`, which says what each call does to values of another kind: tensors
with lanes, or pairs of a value and its tangent. What it does is eager code. So it may be taped,
captured, or be part of another trace, and transformations compose in any order.

The method, where programs are typed data flow: Frostig et al., Compiling machine learning programs
via high-level tracing, SysML 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from mlvm.arena.arena import Allocation
from mlvm.core.errors import CaptureError, MachineError, OpError
from mlvm.core.op import OPS
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType, u64
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import zeros
from mlvm.eager.recording.recorder import MustMove, Reader, Recorder, recorded_by
from mlvm.eager.tensor.apply import OneOp, Tensors, alias_of, one_op, untracked
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import (
    Tape,
    current_arena,
    current_capture,
    current_tape,
    taped,
)
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tree import Tree, replace, with_leaves
from mlvm.machines.residuals import PUSH
from mlvm.step.blocks import free, with_blocks, without_dead_calls
from mlvm.step.flow import Block, Call, Flow, Home, Procedure, Turns, Use, Value

V = TypeVar("V")

STOP: Final = "stop_gradient"
"""What a copy is called through which no derivative goes."""

OUTSIDE: Final = "residuals.read_outside"
"""What the reading of a record is called that a recorder around a trace has pushed. Its attribute
`read` is the function that reads it there."""

_KEY: Final = TensorType(u64, (2,))


class Tracer(Recorder):
    """Records a function for a transformation. `lifts` are tensors of tapes from outside that the
    function reaches, by what stands for each: the tape has to see who uses them."""

    no_value = "which is recorded before it has any"
    no_repeat = "it is recorded before it runs"

    def __init__(self, vm: VMProtocol, what: str) -> None:
        super().__init__(vm)
        self.what = what
        around, tape = current_capture.get(), taping()
        outer: Mapping[Tape, int] = {} if around is None else around.outer
        self.outer = outer if tape is None else {**outer, tape: len(tape.nodes)}
        self.lifts: dict[Value, Tensor] = {}
        self.key = self.stand_in_of(_KEY)
        self.keys = [self.value_of(self.key)]
        self._lifted: dict[object, Tensor] = {}

    def lifted(self, xs: Tensors) -> Tensors:
        outer = self.outer  # which has nodes of the trace itself while a checkpoint runs again
        return tuple(
            [
                self._lift(x) if x.tape is not None and x.node < outer.get(x.tape, 0) else x
                for x in xs
            ]
        )

    def use(self, x: Tensor) -> Use:
        return super().use(*self.lifted((x,)))

    def _lift(self, x: Tensor) -> Tensor:
        key = x.tape, x.node, x.type
        if key not in self._lifted:
            self._lifted[key] = found = self.stand_in_of(x.type)
            self.lifts[self.value_of(found)] = x
        lifted = self._lifted[key]
        if x.tape is current_tape.get():
            lifted = untracked(lifted)
            lifted.tape, lifted.node = x.tape, x.node
        return lifted

    def pull(
        self, number: Tensor, types: Sequence[TensorType], outside: Reader | None = None
    ) -> list[Tensor]:
        if outside is None:
            return super().pull(number, types)
        return self.host_call(OUTSIDE, {"read": outside}, types, [self.use(number)])

    def stopped(self, x: Tensor) -> Tensor:
        """A tensor of the same value. The call tells that no derivative goes through it."""
        [y] = self._called(STOP, [x.type], [untracked(x)])
        self.calls[-1].op = OPS["copy"]
        y.tape = None
        return y


class Trace:
    """What a function does with tensors of these types: `calls`, from `params` to `results`.

    `tree` is what it returned, with stand-ins that have ended for tensors. `states` are tensors
    from outside, by number, and `lifts` those that a tape from outside follows. `keys` has the
    state that it splits its global random keys off, if it draws any.
    """

    def __init__(self, record: Tracer, params: list[Value], results: list[Use], tree: Tree) -> None:
        self.params, self.results, self.tree = params, results, tree
        flow = Flow(record.calls, [use.value for use in results])
        self.calls = without_dead_calls(flow)
        self.dying = _last_uses(self.calls, flow.results)
        self.states: list[Allocation] = record.states
        self.lifts: Mapping[Value, Tensor] = record.lifts
        read = {use.value for call in self.calls for use in call.ins}
        self.keys = [value for value in record.keys if value in read]
        self.held = record.held
        self.what = record.what
        _refuse_updates(self.calls, self.what)

    def with_results(self, made: Sequence[Tensor]) -> Tree:
        """What the function returned, with these tensors."""
        return with_leaves(self.tree, iter(made))


def traced(fn: Callable[..., Tree], given: Sequence[Any], what: str) -> Trace:
    """Record `fn(*given)`, where parameters stand for the types in trees of `TensorType`s. `what`
    names the function in errors: "a function of vmap".

    Raises `CaptureError` for what such a function cannot do: read a value, make a tensor whose
    shape depends on values, update a tensor from outside.
    """
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        record = Tracer(vm, what)
        try:
            with recorded_by(record), taped(None), random.drawing_from(record.key):
                args = [replace(record.stand_in_of, each, (TensorType,)) for each in given]
                params = [record.value_of(x) for x in tensors(args)]
                tree = as_tree(fn(*args))
                made = [*record.lifted(tuple(tensors(tree)))]
                return Trace(record, params, [record.use(x) for x in made], tree)
        except MustMove as error:
            make_exclusive(error.x)
        finally:
            del record


def _last_uses(calls: Sequence[Call], results: Sequence[Value]) -> dict[Call, list[Value]]:
    """The values without a home that are read last by each call, but for results."""
    seen = set(results)
    found: dict[Call, list[Value]] = {}
    for call in reversed(calls):
        uses = [*call.ins, *call.outs]
        for inner in with_blocks([call]) if call.blocks else ():
            uses += [*inner.ins, *inner.outs, *[b.result for b in inner.blocks if b.result]]
            if inner.turns is not None:
                counted = [] if isinstance(inner.turns.length, int) else [inner.turns.length]
                uses += [*counted, *inner.turns.xs]
        used = {use.value: None for use in uses}
        found[call] = [value for value in used if value.home is None and value not in seen]
        seen.update(found[call])
    return found


def _refuse_updates(calls: Sequence[Call], what: str) -> None:
    """Raise `CaptureError` for a call that writes to a tensor from outside."""
    for call in calls:
        for use in call.outs:
            if use.value.home is not None and use.value.home.role == "state":
                raise CaptureError(
                    f"{call.line or 'here'}: a {use.type} from outside of {what} is updated in it; "
                    f"return the new value, and update it outside"
                )


class Meaning(Protocol[V]):
    """What calls do with values of another kind than tensors.

    Bodies and branches are functions of such values. They may be run any number of times, also
    while another trace is made of what they do.
    """

    def constant(self, x: Tensor) -> V:
        """The value of a tensor from outside."""

    def key(self) -> V:
        """A new random key, that others are split off."""

    def seen_as(self, x: V, type: TensorType) -> V:
        """The same elements under a type of this shape."""

    def stopped(self, x: V) -> V:
        """The value, through which no derivative goes."""

    def op(self, call: OneOp, xs: Sequence[V]) -> V:
        """What an op makes."""

    def cond(self, pred: V, branches: Sequence[Callable[..., list[V]]]) -> list[V]:
        """What the first branch makes if `pred` is true, else the second. A branch may be given a
        function for the values that it reads from outside."""

    def while_loop(
        self, test: Callable[[list[V]], V], body: Callable[[list[V]], list[V]], state: list[V]
    ) -> list[V]:
        """The state after as many turns as the test is true before one."""

    def scan(
        self,
        body: Callable[[V, list[V], list[V]], tuple[list[V], list[V]]],
        state: list[V],
        xs: list[V],
        turns: V | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[list[V], list[V]]:
        """The state after so many turns `body(i, state, rows)`, and what they make, stacked in
        `total` rows."""

    def function(
        self,
        procedure: Procedure,
        body: Callable[[list[V]], list[V]],
        args: list[V],
        types: Sequence[TensorType],
    ) -> list[V]:
        """What a function that may call itself makes of its arguments, values of these types."""

    def custom(
        self,
        rule: Any,
        body: Callable[[list[V]], list[V]],
        args: list[V],
        types: Sequence[TensorType],
    ) -> list[V]:
        """What a function with a rule of its own makes of its arguments: see `custom`."""

    def other(self, call: Call, xs: Sequence[V]) -> list[V]:
        """What a host function makes: `call.outs`."""


def run(trace: Trace, meaning: Meaning[V], args: Sequence[V]) -> list[V]:
    """The results of a trace for these arguments, as the meaning has it."""
    values = {**dict(zip(trace.params, args, strict=True)), **_given(trace, meaning)}
    frame = _Frame(trace, meaning, values, {})
    frame.run(trace.calls, dying=trace.dying)
    return [frame.use(use) for use in trace.results]


def begun(trace: Trace, meaning: Meaning[V]) -> Callable[[Sequence[V]], list[V]]:
    """Run those calls that depend on no parameter. The function that is returned runs the others,
    and makes the results. What keeps residuals is run with what reads them. Both take
    tensors from outside as they are now."""
    later, rest, ready = set(trace.params), list[Call](), list[Call]()
    for call in trace.calls:
        keeps = any(each.name == PUSH for each in with_blocks([call]))
        if not keeps and later.isdisjoint(use.value for use in call.ins):
            ready.append(call)
        else:
            later.update(use.value for use in call.outs)
            rest.append(call)
    lifts = {value: meaning.constant(alias_of(x)) for value, x in trace.lifts.items()}
    before = _Frame(trace, meaning, {**_given(trace, meaning), **lifts}, {})
    before.run(ready)
    inner = [*with_blocks(rest)]
    needed = {use.value for call in inner for use in (*call.ins, *call.passed)}
    needed.update(use.value for use in trace.results)
    needed.update(b.result.value for call in inner for b in call.blocks if b.result is not None)
    for value in needed.difference(before.values):
        if value.home is not None and value.home.role == "state":
            before.values[value] = before.held(value.home)
    kept = {value: x for value, x in before.values.items() if value in needed}
    homes, dying = before.homes, _last_uses(rest, [use.value for use in trace.results])

    def finished(args: Sequence[V]) -> list[V]:
        values = {**kept, **dict(zip(trace.params, args, strict=True))}
        frame = _Frame(trace, meaning, values, dict(homes))
        frame.run(rest, dying=dying)
        return [frame.use(use) for use in trace.results]

    return finished


def _given(trace: Trace, meaning: Meaning[V]) -> dict[Value, V]:
    """The values of a trace that are no arguments, and come from outside."""
    values = {value: meaning.constant(x) for value, x in trace.lifts.items()}
    values.update({value: meaning.key() for value in trace.keys})
    return values


class _Frame(Generic[V]):
    """Calls that run on `values`; `homes` have what lies in memory now. A block runs in a frame of
    its own. A function's is inside of the frame `outside`, where its `cells` lie, homes that it
    updates."""

    def __init__(
        self,
        trace: Trace,
        meaning: Meaning[V],
        values: dict[Value, V],
        homes: dict[Home, V],
        outside: _Frame[V] | None = None,
        cells: Sequence[Home] = (),
    ) -> None:
        self.trace, self.meaning = trace, meaning
        self.values, self.homes = values, homes
        self.outside, self.cells = outside, cells

    def inner(self, homes: Sequence[Home], now: Sequence[V], first: Sequence[Value]) -> _Frame[V]:
        """A frame for a block. These lie in the homes now; so the block's `first` values there."""
        lying = {**self.homes, **dict(zip(homes, now, strict=True))}
        values = {**self.values, **{value: lying[value.home] for value in first if value.home}}
        return _Frame(self.trace, self.meaning, values, lying, self.outside, self.cells)

    def use(self, use: Use) -> V:
        """The value, as the type that it is used as."""
        value, type = use
        x = self.values.get(value)
        if x is None:
            if value.home is None:
                raise MachineError("a value is used that nothing has made")
            x = self.values[value] = self.held(value.home)
        return self.meaning.seen_as(x, type)

    def held(self, home: Home) -> V:
        """What lies there: from before, from outside, or zeros."""
        if home in self.homes:
            return self.homes[home]
        if home.role == "state":
            x = self.trace.states[home.index].root
            if isinstance(x, Tensor):
                return self.meaning.constant(untracked(x))
        return self.meaning.constant(zeros(home.type.shape, dtype=home.type.dtype))

    def make(self, use: Use, x: V) -> None:
        """Let the value be x from now on."""
        self.values[use.value] = x
        if use.value.home is not None:
            self.homes[use.value.home] = x

    @NO_AUTOCAST
    def run(
        self,
        calls: Sequence[Call],
        made: Container[Value | Home] = (),
        dying: Mapping[Call, Sequence[Value]] | None = None,
    ) -> None:
        """Run the calls, but for those that make what is `made` already. After a call those values
        are dropped that are `dying` there."""
        last: Sequence[Value] = ()
        for call in calls:
            for value in last:
                self.values.pop(value, None)
            last = () if dying is None else dying.get(call, ())
            if any(use.value in made or use.value.home in made for use in call.outs if made):
                continue
            if call.callee is not None:
                self._call(call, call.callee)
            elif call.name == "cond":
                self._cond(call)
            elif call.turns is not None:
                self._scan(call, call.turns)
            elif call.name == "while":
                self._while(call)
            else:
                xs = [self.use(use) for use in call.ins]
                if call.name == STOP:
                    results = [self.meaning.stopped(x) for x in xs]
                elif call.op is None:
                    results = self.meaning.other(call, xs)
                elif call.op.name == "copy":
                    results = xs
                else:
                    try:
                        results = [self.meaning.op(one_op(call.op.name, **call.attributes), xs)]
                    except OpError as error:
                        note = f"called from {call.line}, in {self.trace.what}"
                        if call.line and note not in getattr(error, "__notes__", ()):
                            error.add_note(note)
                        raise
                for use, y in zip(call.outs, results, strict=True):
                    self.make(use, y)

    # --- control flow -----------------------------------------------------------------

    def _begin(self, call: Call) -> tuple[list[Home], list[V], list[Value]]:
        """The homes that control flow writes to, what lies there, and its values."""
        homes = [use.value.home for use in call.outs if use.value.home is not None]
        if any(each.callee is not None for each in with_blocks([call])):
            homes += self.cells
        homes = list(dict.fromkeys(homes))
        first = [use.value for use in call.ins if use.value.home in homes]
        for value in first:
            if value in self.values and value.home is not None:
                self.homes[value.home] = self.values[value]
        return homes, [self.held(home) for home in homes], first

    def _end(self, call: Call, homes: Sequence[Home], made: Sequence[V]) -> None:
        self.homes.update(zip(homes, made, strict=True))
        cells = [value for value in self.values if value.home in self.cells] if self.cells else []
        for value in (*[use.value for use in call.outs], *cells):  # no call tells of a cell
            if value.home is not None:
                self.values[value] = self.homes[value.home]

    def _cond(self, call: Call) -> None:
        homes, before, first = self._begin(call)

        def branch(block: Block, entering: Callable[[V], V] | None = None) -> list[V]:
            frame = self.inner(homes, before, first)
            if entering is not None:
                outside = {use.value: entering(frame.use(use)) for use in free([block])}
                frame.values.update(outside)
            frame.run(block.calls)
            return [frame.homes[home] for home in homes]

        pred = self.use(call.ins[0])
        branches = [partial(branch, block) for block in call.blocks]
        self._end(call, homes, self.meaning.cond(pred, branches))

    def _while(self, call: Call) -> None:
        homes, before, first = self._begin(call)
        test, block = call.blocks

        def more(state: list[V]) -> V:
            frame = self.inner(homes, state, first)
            frame.run(test.calls)
            if test.result is None:
                raise MachineError("a loop has no test")
            return frame.use(test.result)

        def body(state: list[V]) -> list[V]:
            frame = self.inner(homes, state, first)
            frame.run(block.calls)
            return [frame.homes[home] for home in homes]

        self._end(call, homes, self.meaning.while_loop(more, body, before))

    def _scan(self, call: Call, turns: Turns) -> None:
        """A loop whose turns are counted: without its counter, and its writes to stacks."""
        homes, before, first = self._begin(call)
        if turns.total == 0:
            self._end(call, homes, before)
            return
        block = call.blocks[1]
        stacks = [home for home, _ in turns.made if home in homes]
        made = [row for home, row in turns.made if home in homes]
        taken = {use.value for each in block.calls for use in each.outs}
        read = [(x, row) for x, row in zip(turns.xs, turns.rows, strict=True) if row in taken]
        counter = turns.i.value.home
        state = dict(zip(homes, before, strict=True))
        for home in (*stacks, counter):
            if home is not None:
                state.pop(home, None)
        carried = [*state]
        done: set[Value | Home] = {*turns.rows, *stacks}
        if counter is not None:
            done.add(counter)
        first = [value for value in first if value.home in state]

        def body(i: V, now: list[V], rows: list[V]) -> tuple[list[V], list[V]]:
            frame = self.inner(carried, now, first)
            frame.values[turns.i.value] = i
            frame.values.update(zip([row for _, row in read], rows, strict=True))
            frame.run(block.calls, done)
            return [frame.homes[home] for home in carried], [frame.use(row) for row in made]

        length = turns.length
        count = length if isinstance(length, int) else self.use(length)
        xs = [self.use(x) for x, _ in read]
        after, rows = self.meaning.scan(
            body, [*state.values()], xs, count, turns.total, turns.reverse
        )
        self._end(call, [*carried, *stacks], [*after, *rows])

    def _call(self, call: Call, callee: Procedure) -> None:
        """A function gets its arguments and the cells, and gives its results and the cells."""
        written = {use.value for use in call.outs}
        nresults = sum(use.value in written for use in call.passed)
        results, args = callee.params[:nresults], callee.params[nresults:]
        cells = self.cells
        outside = self.outside
        if call.procedures:
            of_results = [use.value for use in call.passed[:nresults]]
            left = [use.value for use in call.outs if use.value not in of_results]
            cells = [value.home for value in left if value.home is not None]
            outside = self
        first = [value for value in self.values if value.home in cells]
        for value in first:
            if value.home is not None and value.home not in self.homes:
                self.homes[value.home] = self.values[value]

        def body(given: list[V]) -> list[V]:
            frame = (outside or self).inner([*args, *cells], given, first)
            frame.outside, frame.cells = outside, cells
            frame.run(callee.block.calls)
            return [frame.homes[home] for home in (*results, *cells)]

        passed = [self.use(use) for use in call.passed[nresults:]]
        passed += [self.held(home) for home in cells]
        types = [home.type for home in (*results, *cells)]
        if callee.rule is not None:
            made = self.meaning.custom(callee.rule, body, passed, types)
        else:
            made = self.meaning.function(callee, body, passed, types)
        for use, y in zip(call.passed[:nresults], made, strict=False):
            self.make(use, y)
        self._end(call, cells, made[nresults:])
