"""Trace: a function of tensors as data flow, to interpret with other kinds of values.

In: a function and the argument types. It is called once with placeholders, and the launches are
recorded as for `capture` (`trace_function`). Out: a `Trace`, which `interpret` runs with an
`Interpreter`: `batching` passes batched values, `jvp` passes values with tangents.

Invariant: an interpreter is eager code. It may be taped, captured, or be a part of an outer trace,
so transformations compose in any order.

Source: Frostig et al., Compiling machine learning programs via high-level tracing, SysML 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from mlvm.arena.arena import Allocation
from mlvm.arena.context import Tape, context, current, set_context
from mlvm.core.errors import CaptureError, MachineError, OpError, PositionError, with_article
from mlvm.core.op import OPS
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType, u64
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import zeros
from mlvm.eager.recording.lines import Line
from mlvm.eager.recording.recorder import Reader, Recorder, RetryAfterCopy, recorded_by
from mlvm.eager.tensor.apply import OneOp, Tensors, alias_of, one_op, untracked
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tree import Tree, replace, with_leaves
from mlvm.machines.residuals import PUSH
from mlvm.step.blocks import free_variables, with_blocks, without_dead_calls
from mlvm.step.flow import Block, Call, Flow, Home, LoopInfo, Procedure, Use, Value

V = TypeVar("V")
Types: TypeAlias = Sequence[TensorType]
Body: TypeAlias = Callable[[list[V]], list[V]]
"""Body of a function, or of a loop over a state."""
ScanBody: TypeAlias = Callable[[V, list[V], list[V]], tuple[list[V], list[V]]]
"""Body of a scan: from the index, the state and a row of each xs to the next state and rows."""

STOP: Final = "stop_gradient"
"""Name of a copy through which no derivative flows."""

OUTSIDE: Final = "residuals.read_outside"
"""Name of the read of a record that an enclosing recorder has pushed.

The attribute `read` is the function that reads it."""

_KEY: Final = TensorType(u64, (2,))


class Tracer(Recorder):
    """Recorder of a function for a transformation.

    lifts: for each placeholder, the outer tensor with a tape node that the function uses. The tape
    must record those uses.
    """

    no_value = "it is traced before it has values"
    no_repeat = "it is traced before it runs"

    def __init__(self, vm: VMProtocol, what: str) -> None:
        super().__init__(vm)
        self.what = what
        around, tape = current().recorder, taping()
        outer: Mapping[Tape, int] = {} if around is None else around.outer
        self.outer = outer if tape is None else {**outer, tape: len(tape.nodes)}
        self.lifts: dict[Value, Tensor] = {}
        self.key = self.placeholder_of(_KEY)
        self.keys = [self.value_of(self.key)]
        self._lifted: dict[object, Tensor] = {}

    def lifted(self, xs: Tensors) -> Tensors:
        return tuple([self._lift(x) for x in xs])

    def use(self, x: Tensor) -> Use:
        return super().use(*self.lifted((x,)))

    def _lift(self, x: Tensor) -> Tensor:
        # `outer` contains nodes of the trace itself while a checkpoint runs again.
        if x.tape is None or x.node >= self.outer.get(x.tape, 0):
            return x
        key = x.tape, x.node, x.type
        if key not in self._lifted:
            self._lifted[key] = placeholder = self.placeholder_of(x.type)
            self.lifts[self.value_of(placeholder)] = x
        lifted = self._lifted[key]
        if x.tape is current().tape:
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
        """Return a tensor with the same value.

        No derivative flows through the recorded call."""
        [y] = self._called(STOP, [x.type], [untracked(x)])
        self.calls[-1].op = OPS["copy"]
        y.tape = None
        return y


class Trace:
    """Recorded function: `calls`, from `params` to `results`.

    Attributes:
        tree: the returned tree, with invalidated placeholders for tensors.
        states: tensors from outside, by number.
        lifts: tensors from outside with nodes of an outer tape.
        keys: the random key state from which it splits global keys, if it draws any.
    """

    def __init__(self, record: Tracer, params: list[Value], results: list[Use], tree: Tree) -> None:
        self.params, self.results, self.tree = params, results, tree
        flow = Flow(record.calls, [use.value for use in results])
        self.calls = without_dead_calls(flow)
        self.dying = _last_uses(self.calls, flow.results)
        self.states: list[Allocation] = record.outside.states
        self.lifts: Mapping[Value, Tensor] = record.lifts
        read = {use.value for call in self.calls for use in call.ins}
        self.keys = [value for value in record.keys if value in read]
        self.keepalive = record.outside.keepalive
        self.what = record.what
        _refuse_updates(self.calls, self.what)

    def with_results(self, outputs: Sequence[Tensor]) -> Tree:
        """Return the returned tree with these tensors."""
        return with_leaves(self.tree, iter(outputs))


def trace_function(fn: Callable[..., Tree], args: Sequence[Any], what: str) -> Trace:
    """Record `fn(*args)` with placeholders for the types in trees of `TensorType`s.

    `what` describes the function in errors: "a function of vmap". Raises `CaptureError` if the
    function reads a value, creates a tensor with a shape that depends on values, or updates an
    outer tensor.
    """
    vm = current_arena().vm
    while True:
        record = Tracer(vm, what)
        try:
            with recorded_by(record), context(tape=None), random.drawing_from(record.key):
                placeholders = [replace(record.placeholder_of, each, TensorType) for each in args]
                params = [record.value_of(x) for x in tensors(placeholders)]
                tree = as_tree(fn(*placeholders))
                outputs = [*record.lifted(tuple(tensors(tree)))]
                return Trace(record, params, [record.use(x) for x in outputs], tree)
        except RetryAfterCopy as error:
            make_exclusive(error.x)
        finally:
            del record


def _last_uses(calls: Sequence[Call], results: Sequence[Value]) -> dict[Call, list[Value]]:
    """Return, for each call, the values without a home that are used there for the last time."""
    later = set(results)
    dying_at: dict[Call, list[Value]] = {}
    for call in reversed(calls):
        uses = [*call.ins, *call.outs]
        for inner in with_blocks([call]) if call.blocks else ():
            uses += [*inner.ins, *inner.outs, *[b.result for b in inner.blocks if b.result]]
            if inner.loop is not None:
                counted = [] if isinstance(inner.loop.length, int) else [inner.loop.length]
                uses += [*counted, *inner.loop.xs]
        used = {use.value: None for use in uses}
        dying_at[call] = [value for value in used if value.home is None and value not in later]
        later.update(dying_at[call])
    return dying_at


def _refuse_updates(calls: Sequence[Call], what: str) -> None:
    """Raise `CaptureError` for a call that writes to a tensor from outside."""
    for call in calls:
        for use in call.outs:
            if use.value.home is not None and use.value.home.role == "state":
                raise CaptureError(
                    f"{call.line or 'here'}: {what} cannot update "
                    f"{with_article(use.type)} from outside; "
                    f"return the new value, and update it outside"
                )


class Interpreter(Protocol[V]):
    """Semantics of calls for values of a kind V other than tensors.

    Bodies and branches are functions of such values. An interpreter may run them any number of
    times, for example while it traces them.
    """

    def constant(self, x: Tensor) -> V:
        """Lift a tensor from outside."""

    def key(self) -> V:
        """Return a new random key, from which other keys are split off."""

    def reshape(self, x: V, type: TensorType) -> V:
        """View the value as a type of the same size."""

    def stop_gradient(self, x: V) -> V:
        """Return the value without derivatives."""

    def op(self, call: OneOp, xs: Sequence[V]) -> V:
        """Apply an op."""

    def cond(self, pred: V, branches: Sequence[Callable[..., list[V]]]) -> list[V]:
        """Run the first branch if `pred` is true, else the second.

        A branch may take a function to apply to values from outside.
        """

    def while_loop(self, test: Callable[[list[V]], V], body: Body[V], state: list[V]) -> list[V]:
        """Run the body while the test is true; return the final state."""

    def scan(
        self,
        body: ScanBody[V],
        state: list[V],
        xs: list[V],
        turns: V | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[list[V], list[V]]:
        """Run iterations of `body(i, state, rows)`; return the final state and stacked rows.

        A stack has `total` rows.
        """

    def function(self, procedure: Procedure, body: Body[V], args: list[V], types: Types) -> list[V]:
        """Call a function, possibly recursive, with arguments of these types."""

    def custom(self, rule: Any, body: Body[V], args: list[V], types: Types) -> list[V]:
        """Call a function with a user-defined derivative (`custom`)."""

    def other(self, call: Call, xs: Sequence[V]) -> list[V]:
        """Call a host function; return values for `call.outs`."""


def interpret(trace: Trace, interpreter: Interpreter[V], args: Sequence[V]) -> list[V]:
    """Run a trace with an interpreter, and return the results."""
    values = {**dict(zip(trace.params, args, strict=True)), **_outside_values(trace, interpreter)}
    frame = _Frame(trace, interpreter, values, {})
    frame.run(trace.calls, dying=trace.dying)
    return [frame.use(use) for use in trace.results]


def partial_eval(trace: Trace, interpreter: Interpreter[V]) -> Callable[[Sequence[V]], list[V]]:
    """Run the calls that depend on no parameter; return a function that runs all other calls.

    Calls that push residuals run with the calls that read them. Both parts use the current values
    of outer tensors.
    """
    later, rest, ready = set(trace.params), list[Call](), list[Call]()
    for call in trace.calls:
        keeps = any(each.name == PUSH for each in with_blocks([call]))
        if not keeps and later.isdisjoint(use.value for use in call.ins):
            ready.append(call)
        else:
            later.update(use.value for use in call.outs)
            rest.append(call)
    lifts = {value: interpreter.constant(alias_of(x)) for value, x in trace.lifts.items()}
    before = _Frame(trace, interpreter, {**_outside_values(trace, interpreter), **lifts}, {})
    before.run(ready)
    inner = [*with_blocks(rest)]
    needed = {use.value for call in inner for use in (*call.ins, *call.passed)}
    needed.update(use.value for use in trace.results)
    needed.update(b.result.value for call in inner for b in call.blocks if b.result is not None)
    for value in needed.difference(before.values):
        if value.home is not None and value.home.role == "state":
            before.values[value] = before.content(value.home)
    hoisted = {value: x for value, x in before.values.items() if value in needed}
    homes, dying = before.homes, _last_uses(rest, [use.value for use in trace.results])

    def finished(args: Sequence[V]) -> list[V]:
        values = {**hoisted, **dict(zip(trace.params, args, strict=True))}
        frame = _Frame(trace, interpreter, values, dict(homes))
        frame.run(rest, dying=dying)
        return [frame.use(use) for use in trace.results]

    return finished


def _outside_values(trace: Trace, interpreter: Interpreter[V]) -> dict[Value, V]:
    """Return the values of a trace that come from outside and are not arguments."""
    values = {value: interpreter.constant(x) for value, x in trace.lifts.items()}
    values.update({value: interpreter.key() for value in trace.keys})
    return values


@dataclass(eq=False)
class _Frame(Generic[V]):
    """Frame of an interpretation.

    Attributes:
        values: the values computed so far.
        homes: the current contents of memory; a block runs in an inner frame.
        outside: for a function, the caller's frame that is outside of all functions.
        cells: homes in that frame which the function updates.
    """

    trace: Trace
    interpreter: Interpreter[V]
    values: dict[Value, V]
    homes: dict[Home, V]
    outside: _Frame[V] | None = None
    cells: Sequence[Home] = ()

    def inner(self, homes: Sequence[Home], now: Sequence[V], first: Sequence[Value]) -> _Frame[V]:
        """Return a frame for a block, with the current contents `now` of these homes.

        The block's `first` values are read from them.
        """
        contents = {**self.homes, **dict(zip(homes, now, strict=True))}
        values = {**self.values, **{value: contents[value.home] for value in first if value.home}}
        return _Frame(self.trace, self.interpreter, values, contents, self.outside, self.cells)

    def use(self, use: Use) -> V:
        """Return the value under the type of this use."""
        value, type = use
        x = self.values.get(value)
        if x is None:
            if value.home is None:
                raise MachineError("a value is used before its definition; report the function")
            x = self.values[value] = self.content(value.home)
        return self.interpreter.reshape(x, type)

    def content(self, home: Home) -> V:
        """Return the content of a home: set in this frame, from outside, or zeros."""
        if home in self.homes:
            return self.homes[home]
        if home.role == "state":
            x = self.trace.states[home.index].root
            if isinstance(x, Tensor):
                return self.interpreter.constant(untracked(x))
        return self.interpreter.constant(zeros(home.type.shape, dtype=home.type.dtype))

    def assign(self, use: Use, x: V) -> None:
        """Set the value, and the content of the value's home."""
        self.values[use.value] = x
        if use.value.home is not None:
            self.homes[use.value.home] = x

    @NO_AUTOCAST
    def run(
        self,
        calls: Sequence[Call],
        computed: Container[Value | Home] = (),
        dying: Mapping[Call, Sequence[Value]] | None = None,
    ) -> None:
        """Run the calls, except those whose results are `computed` already.

        After each call the values in `dying` are dropped.
        """
        last: Sequence[Value] = ()
        around = current().line
        for call in calls:
            for value in last:
                self.values.pop(value, None)
            last = () if dying is None else dying.get(call, ())
            if any(
                use.value in computed or use.value.home in computed for use in call.outs if computed
            ):
                continue
            if call.callee is not None:
                self._call(call, call.callee)
            elif call.name == "cond":
                self._cond(call)
            elif call.loop is not None:
                self._scan(call, call.loop)
            elif call.name == "while":
                self._while(call)
            else:
                set_context(line=call.line if isinstance(call.line, Line) else None)
                try:
                    results = self._results(call)
                except OpError as error:
                    reword = getattr(call.line, "reword", None)
                    if reword is not None and isinstance(error, PositionError):
                        reword(error)
                    note = f"called from {call.line}, in {self.trace.what}"
                    if call.line and note not in getattr(error, "__notes__", ()):
                        error.add_note(note)
                    raise
                finally:
                    set_context(line=around)
                for use, y in zip(call.outs, results, strict=True):
                    self.assign(use, y)

    def _results(self, call: Call) -> list[V]:
        """Return the results of a call without blocks."""
        xs = [self.use(use) for use in call.ins]
        if call.name == STOP:
            return [self.interpreter.stop_gradient(x) for x in xs]
        if call.op is None:
            return self.interpreter.other(call, xs)
        if call.op.name == "copy":
            return xs
        return [self.interpreter.op(one_op(call.op.name, **call.attributes), xs)]

    # --- control flow -----------------------------------------------------------------

    def _begin(self, call: Call) -> tuple[list[Home], list[V], list[Value]]:
        """Return the homes that control flow writes, the contents, and the new values."""
        homes = [use.value.home for use in call.outs if use.value.home is not None]
        if any(each.callee is not None for each in with_blocks([call])):
            homes += self.cells
        homes = list(dict.fromkeys(homes))
        first = [use.value for use in call.ins if use.value.home in homes]
        for value in first:
            if value in self.values and value.home is not None:
                self.homes[value.home] = self.values[value]
        return homes, [self.content(home) for home in homes], first

    def _end(self, call: Call, homes: Sequence[Home], outputs: Sequence[V]) -> None:
        self.homes.update(zip(homes, outputs, strict=True))
        cells = [value for value in self.values if value.home in self.cells] if self.cells else []
        for value in (*[use.value for use in call.outs], *cells):  # a call does not list cells
            if value.home is not None:
                self.values[value] = self.homes[value.home]

    def _cond(self, call: Call) -> None:
        homes, before, first = self._begin(call)

        def branch(block: Block, entering: Callable[[V], V] | None = None) -> list[V]:
            frame = self.inner(homes, before, first)
            if entering is not None:
                outside = {use.value: entering(frame.use(use)) for use in free_variables([block])}
                frame.values.update(outside)
            frame.run(block.calls)
            return [frame.homes[home] for home in homes]

        pred = self.use(call.ins[0])
        branches = [partial(branch, block) for block in call.blocks]
        self._end(call, homes, self.interpreter.cond(pred, branches))

    def _while(self, call: Call) -> None:
        homes, before, first = self._begin(call)
        test, block = call.blocks

        def more(state: list[V]) -> V:
            frame = self.inner(homes, state, first)
            frame.run(test.calls)
            if test.result is None:
                raise MachineError("a loop has no test; report the function")
            return frame.use(test.result)

        def body(state: list[V]) -> list[V]:
            frame = self.inner(homes, state, first)
            frame.run(block.calls)
            return [frame.homes[home] for home in homes]

        self._end(call, homes, self.interpreter.while_loop(more, body, before))

    def _scan(self, call: Call, loop: LoopInfo) -> None:
        """Run a loop with a trip count, without the counter and the writes to stacks."""
        homes, before, first = self._begin(call)
        if loop.total == 0:
            self._end(call, homes, before)
            return
        block = call.blocks[1]
        stacks = [home for home, _ in loop.ys if home in homes]
        stacked_rows = [row for home, row in loop.ys if home in homes]
        written = {use.value for each in block.calls for use in each.outs}
        read = [(x, row) for x, row in zip(loop.xs, loop.rows, strict=True) if row in written]
        counter = loop.i.value.home
        state = dict(zip(homes, before, strict=True))
        for home in (*stacks, counter):
            if home is not None:
                state.pop(home, None)
        carried = [*state]
        done: set[Value | Home] = {*loop.rows, *stacks}
        if counter is not None:
            done.add(counter)
        first = [value for value in first if value.home in state]

        def body(i: V, now: list[V], rows: list[V]) -> tuple[list[V], list[V]]:
            frame = self.inner(carried, now, first)
            frame.values[loop.i.value] = i
            frame.values.update(zip([row for _, row in read], rows, strict=True))
            frame.run(block.calls, done)
            return [frame.homes[home] for home in carried], [frame.use(row) for row in stacked_rows]

        length = loop.length
        count = length if isinstance(length, int) else self.use(length)
        xs = [self.use(x) for x, _ in read]
        after, rows = self.interpreter.scan(
            body, [*state.values()], xs, count, loop.total, loop.reverse
        )
        self._end(call, [*carried, *stacks], [*after, *rows])

    def _call(self, call: Call, callee: Procedure) -> None:
        """Call a function with the arguments and the cells; assign the results and the cells."""
        written = {use.value for use in call.outs}
        nresults = sum(use.value in written for use in call.passed)
        results, args = callee.params[:nresults], callee.params[nresults:]
        cells = self.cells
        outside = self.outside
        if call.procedures:
            of_results = [use.value for use in call.passed[:nresults]]
            other_outputs = [use.value for use in call.outs if use.value not in of_results]
            cells = [value.home for value in other_outputs if value.home is not None]
            outside = self
        first = [value for value in self.values if value.home in cells]
        for value in first:
            if value.home is not None and value.home not in self.homes:
                self.homes[value.home] = self.values[value]

        def body(inputs: list[V]) -> list[V]:
            frame = (outside or self).inner([*args, *cells], inputs, first)
            frame.outside, frame.cells = outside, cells
            frame.run(callee.block.calls)
            return [frame.homes[home] for home in (*results, *cells)]

        passed = [self.use(use) for use in call.passed[nresults:]]
        passed += [self.content(home) for home in cells]
        types = [home.type for home in (*results, *cells)]
        if callee.rule is not None:
            outputs = self.interpreter.custom(callee.rule, body, passed, types)
        else:
            outputs = self.interpreter.function(callee, body, passed, types)
        for use, y in zip(call.passed[:nresults], outputs, strict=False):
            self.assign(use, y)
        self._end(call, cells, outputs[nresults:])
