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
from mlvm.core.errors import CaptureError, MachineError
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType, u64
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import full
from mlvm.eager.recording.recorder import MustMove, Recorder, recorded_by
from mlvm.eager.tensor.apply import OneOp, Tensors, one_op
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import Tape, current_arena, current_capture, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tree import Tree, replace, with_leaves
from mlvm.step.blocks import with_blocks, without_dead_calls
from mlvm.step.flow import Block, Call, Flow, Home, Procedure, Turns, Use, Value

V = TypeVar("V")

_KEY: Final = TensorType(u64, (2,))


class _Tracer(Recorder):
    """Records a function for a transformation. `lifts` are tensors of tapes from outside that the
    function reaches, by what stands for each: the tape has to see who uses them."""

    def __init__(self, vm: VMProtocol, what: str) -> None:
        super().__init__(vm)
        self.what = what
        around, tape = current_capture.get(), taping()
        outer: frozenset[Tape] = frozenset() if around is None else around.outer
        self.outer = outer if tape is None else outer | {tape}
        self.lifts: dict[Value, Tensor] = {}
        self.keys: list[Value] = []
        self._lifted: dict[object, Tensor] = {}

    def lifted(self, xs: Tensors) -> Tensors:
        return tuple([self._lift(x) if x.tape in self.outer else x for x in xs])

    def _lift(self, x: Tensor) -> Tensor:
        key = x.tape, x.node, x.type
        if key not in self._lifted:
            self._lifted[key] = found = self.stand_in_of(x.type)
            self.lifts[self.value_of(found)] = x
        return self._lifted[key]

    def draw(self) -> Tensor:
        """A stand-in for a global key."""
        key = self.stand_in_of(_KEY)
        self.keys.append(self.value_of(key))
        return key


class Trace:
    """What a function does with tensors of these types: `calls`, from `params` to `results`.

    `tree` is what it returned, with stand-ins that have ended for tensors. `states` are tensors
    from outside, by number, and `lifts` those that a tape from outside follows. `keys` are the
    global random keys that it drew.
    """

    def __init__(
        self, record: _Tracer, params: list[Value], results: list[Use], tree: Tree
    ) -> None:
        self.params, self.results, self.tree = params, results, tree
        flow = Flow(record.calls, [use.value for use in results])
        self.calls = without_dead_calls(flow)
        self.states: list[Allocation] = record.states
        self.lifts: Mapping[Value, Tensor] = record.lifts
        self.keys = record.keys
        self.held = record.held
        _refuse_updates(self.calls, record.what)

    def with_results(self, made: Sequence[Tensor]) -> Tree:
        """What the function returned, with these tensors."""
        return with_leaves(self.tree, iter(made))


def traced(fn: Callable[..., Tree], given: Sequence[Any], what: str) -> Trace:
    """Record `fn(*given)`, where a `TensorType` in a tree of `given` is a parameter. `what` names
    the function in errors: "a function of vmap".

    Raises `CaptureError` for what such a function cannot do: read a value, make a tensor whose
    shape depends on values, update a tensor from outside.
    """
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        record = _Tracer(vm, what)
        try:
            with recorded_by(record), taped(None), random.keys_from(record.draw):
                params: list[Value] = []

                def stand_in(type: TensorType) -> Tensor:
                    x = record.stand_in_of(type)
                    params.append(record.value_of(x))
                    return x

                args = [replace(stand_in, each, (TensorType,)) for each in given]
                tree = as_tree(fn(*args))
                made = [*record.lifted(tuple(tensors(tree)))]
                return Trace(record, params, [record.use(x) for x in made], tree)
        except MustMove as error:
            make_exclusive(error.x)
        finally:
            del record


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
        """A new random key."""

    def seen_as(self, x: V, type: TensorType) -> V:
        """The same elements under a type of this shape."""

    def op(self, call: OneOp, xs: Sequence[V]) -> V:
        """What an op makes."""

    def cond(self, pred: V, branches: Sequence[Callable[[], list[V]]]) -> list[V]:
        """What the first branch makes if `pred` is true, else the second."""

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
        self, procedure: Procedure, body: Callable[[list[V]], list[V]], args: list[V]
    ) -> list[V]:
        """What a function that may call itself makes of its arguments."""

    def other(self, call: Call, xs: Sequence[V]) -> list[V]:
        """What a host function makes: `call.outs`."""


def run(trace: Trace, meaning: Meaning[V], args: Sequence[V]) -> list[V]:
    """The results of a trace for these arguments, as the meaning has it."""
    values = dict(zip(trace.params, args, strict=True))
    values.update({value: meaning.constant(x) for value, x in trace.lifts.items()})
    values.update({value: meaning.key() for value in trace.keys})
    frame = _Frame(trace, meaning, values, {})
    frame.run(trace.calls)
    return [frame.use(use) for use in trace.results]


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
                return self.meaning.constant(x)
        return self.meaning.constant(full(home.type.shape, 0, dtype=home.type.dtype))

    def make(self, use: Use, x: V) -> None:
        """Let the value be x from now on."""
        self.values[use.value] = x
        if use.value.home is not None:
            self.homes[use.value.home] = x

    def run(self, calls: Sequence[Call], made: Container[Value | Home] = ()) -> None:
        """Run the calls, but for those that make what is `made` already."""
        for call in calls:
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
                if call.op is None:
                    results = self.meaning.other(call, xs)
                elif call.op.name == "copy":
                    results = xs
                else:
                    results = [self.meaning.op(one_op(call.op.name, **call.attributes), xs)]
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
        for use in call.outs:
            if use.value.home is not None:
                self.values[use.value] = self.homes[use.value.home]

    def _cond(self, call: Call) -> None:
        homes, before, first = self._begin(call)

        def branch(block: Block) -> list[V]:
            frame = self.inner(homes, before, first)
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
        block = call.blocks[1]
        stacks = [home for home, _ in turns.made if home in homes]
        made = [row for home, row in turns.made if home in homes]
        counter = turns.i.value.home
        state = dict(zip(homes, before, strict=True))
        for home in (*stacks, counter):
            state.pop(home, None)
        carried = [*state]
        first = [value for value in first if value.home in state]

        def body(i: V, now: list[V], rows: list[V]) -> tuple[list[V], list[V]]:
            frame = self.inner(carried, now, first)
            frame.values[turns.i.value] = i
            frame.values.update(zip(turns.rows, rows, strict=True))
            frame.run(block.calls, {*turns.rows, *stacks, counter})
            return [frame.homes[home] for home in carried], [frame.use(row) for row in made]

        length = turns.length
        count = length if isinstance(length, int) else self.use(length)
        xs = [self.use(x) for x in turns.xs]
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
        made = self.meaning.function(callee, body, passed)
        for use, y in zip(call.passed[:nresults], made, strict=False):
            self.make(use, y)
        self._end(call, cells, made[nresults:])
