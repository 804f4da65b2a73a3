"""Capture and replay: a function of tensors as one planned, fused program.

    step = capture(train_step)
    for images, labels in batches:
        with batch:
            loss = step(images, labels)

The first call for arguments of certain types runs the function once, with its launches recorded
instead of run; they become one program, whose memory is planned (`mlvm.step.compile`). That call
and all later ones launch it. Python runs no more, so whatever it did besides is not done again.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import os
import types
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, overload

import numpy as np

from mlvm.arena.arena import STALE, Allocation, Arena
from mlvm.arena.planner import Plan
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    AttributeRefused,
    CaptureError,
    DTypeError,
    GradientError,
    HandleError,
    MlvmError,
    OpError,
    ShapeError,
    ShutDown,
    brief,
)
from mlvm.core.locks import new_lock
from mlvm.core.observe import explaining
from mlvm.core.program.program import Opcode, Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import Array, DType, TensorType
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.capture.guards.changing import Changing
from mlvm.eager.capture.guards.frozen import warn_of_frozen
from mlvm.eager.capture.guards.look import ASKS_CLASS, CALLED, Field, Look
from mlvm.eager.capture.guards.rebinding import Surroundings
from mlvm.eager.capture.guards.signature import Arguments, Signature, parts_of
from mlvm.eager.capture.hoisted import Hoisted, Kept, as_type, is_shared
from mlvm.eager.capture.replacing import Replacer, check_replace
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray
from mlvm.eager.parallel.shards import sharing_of
from mlvm.eager.recording import debug, recorder
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.constants import prepare_constants, scalar_array
from mlvm.eager.tensor.context import current_arena, current_capture
from mlvm.eager.tensor.garbage import collect
from mlvm.eager.tensor.number import Number, Numbers, is_same, plain
from mlvm.eager.tensor.operands import array_beside, widest_of
from mlvm.eager.tensor.reading import explain, values_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes, make_exclusive
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import flatten, replace
from mlvm.input.queue import QueueTensor
from mlvm.input.queue_get import taken_ahead
from mlvm.machines import residuals
from mlvm.machines.native.extension import EXTENSION
from mlvm.show import html
from mlvm.show.picture import timeline
from mlvm.step.compile import Planned, compile_flow, no_loop
from mlvm.step.flow import Flow, Home, Use, Value
from mlvm.step.fusion import policy_of
from mlvm.step.hoist import Hoist
from mlvm.step.replacement import Pattern, Replaced, Types
from mlvm.step.saved import SavedStep

P = ParamSpec("P")
R = TypeVar("R")

_MOST_SIGNATURES: Final = 64
_MOST_LOOKS: Final = 8
_MOST_CALLS: Final = 4
_MOST_REMEMBERED: Final = 16
_MOST_COMPUTED: Final = 2
"""How many calls in a row compute ahead what the weights have changed for, before a second program
is made."""
_ROLES: Final = "input", "output", "state"


# --- what was recorded ---------------------------------------------------------------


class _Result(NamedTuple):
    """A tensor that the function left: an argument, of the number `given`; a tensor `reached`
    otherwise; else the tensor at `home`, or a `view` of it as `type`."""

    home: Home
    type: TensorType
    view: bool
    given: int | None
    reached: Tensor | None

    @property
    def whole_output(self) -> int | None:
        """The number of the output that it is, if it is one."""
        known = self.reached is not None or self.given is not None or self.view
        return None if known or self.home.role != "output" else self.home.index

    def made(self, given: Sequence[Tensor], places: Mapping[str, Sequence[Allocation]]) -> Any:
        """The tensor of a call with these arguments. `places` has its other tensors, by role."""
        if self.reached is not None:
            return self.reached
        if self.given is not None:
            return given[self.given]
        x = places[self.home.role][self.home.index].root
        if not self.view:
            return x
        view = x.arena.view(x, self.type, Tensor)
        view.tape = None
        return view


class _Leaf(NamedTuple):
    """Stands in a tree for the result of that number."""

    number: int


class _Output(NamedTuple):
    """A tensor to be made for results. One for a `field` lies in the arena of the field's present
    tensor, any other in the current arena."""

    type: TensorType
    field: Field | None

    def alloc(self, current: Arena) -> Tensor:
        arena, field = current, self.field
        if field is not None and isinstance(field.value, Tensor):
            beside = field.value.arena
            arena = beside if beside.__class__ is Arena and beside.vm is current.vm else current
        out = arena.alloc(self.type, Tensor)
        out.tape = None
        return out


class _Computed(NamedTuple):
    """Stands in a tree for the Python number at that place."""

    place: int


class _Feed(NamedTuple):
    """What a call's numbers make of a program: all `values` that Python computes, and `arrays` for
    the tensors that have one of these."""

    given: list[float]
    values: list[Any]
    arrays: list[tuple[Tensor, Array]]


class _ChangingNumbers(NamedTuple):
    """What is known of the numbers in calls of one structure. `changed` are those that differed
    between calls. `seen` are those whose value Python has looked at: a program is for that
    value."""

    changed: set[int]
    seen: set[int]


class RecordedCall(NamedTuple):
    """What a call of a function did. `tree` is what it returned, with leaves for `results`.
    `rebound` are the fields that it rebound, with the numbers of their results. `numbers` are the
    Python numbers that may be others in a later call, and `free` are their places."""

    record: recorder.Recorder
    flow: Flow
    tree: Any
    results: list[_Result]
    outputs: list[_Output]
    rebound: list[tuple[Field, int]]
    numbers: Numbers
    free: Sequence[int]

    def named_results(self) -> list[tuple[str, Use]]:
        """The tensors that it returned, by their paths in the tree."""
        leaves = flatten(self.tree, ends=_at_leaves)[0]
        found = [(path, self.results[leaf.number], leaf.number) for path, leaf in leaves]
        return [(path, Use(self.flow.results[n], result.type)) for path, result, n in found]


class _KnownProgram:
    """The program for one signature, and what to launch it with.

    Where something is computed ahead, but the weights change before each call, `plain` is launched:
    a second program for the same calls, which computes nothing ahead. `compiled` makes it."""

    def __init__(
        self,
        planned: Planned,
        recorded: RecordedCall,
        signature: Signature,
        hoisted: Hoisted | None = None,
        compiled: Callable[[], Planned] | None = None,
    ) -> None:
        record, flow, self.tree, self.results, self.outputs, self.rebound, *_ = recorded
        self.numbers, self.free = recorded.numbers, recorded.free
        self.feed = _Feed(signature.numbers, self.numbers.values, [])
        written = {use.value.home for call in flow.calls for use in call.outs}
        self.remembered = 0  # how often a call of it was
        self.updates = [
            (home.role, home.index)
            for home in written - record.ahead_homes
            if home and home.role in ("input", "state")
        ]
        self.ahead = record.ahead
        self.held = [*signature.look.held, record.vm, *record.held]
        self.queues = [x for x in record.held if isinstance(x, QueueTensor)]
        self.fields = [field for field, _ in signature.fields]
        self.inputs = tuple([x.type for x in signature.inputs])
        self.same = {i: signature.inputs[i].root for i in record.same}
        self.roots = {id(x) for x in record.states}
        self.states = [*record.states, *(hoisted.made if hoisted is not None else ())]
        self.seen_as = record.seen_as
        leaf = self.results[self.tree.number] if type(self.tree) is _Leaf else None
        self.single = None if leaf is None or self.rebound else leaf.whole_output
        self.compiled = compiled
        self.replaced: dict[str, list[Replaced]] = {}
        self.plain: _KnownProgram | None = None
        self.writes = -1  # counted by the last call that found what is kept to be of old weights
        self.changed = 0  # how many calls in a row found new weights
        self._use(planned, hoisted)

    def _use(self, planned: Planned, hoisted: Hoisted | None) -> None:
        """Have launches be of this program, which takes what is `hoisted`."""
        self.planned = self.launched = planned
        self.hoisted = hoisted
        self.explain = partial(_name_line, planned)
        self.looped: Program | None = None
        given = planned.arguments
        self.uses = [
            (k, a.place, a.type) for k, role in enumerate(_ROLES) for a in given if a.role == role
        ]
        self.in_scratch = [(a.place, a.type) for a in given if a.role == "scratch"]
        self.storage: StorageHandle | None = None
        self.scratch: tuple[TensorHandle, ...] = ()
        first = planned.first_queue
        queues = [x for x in self.queues if x.handle == first]
        self.first = queues[0] if queues else None

    def way(self, *, loop: bool = False) -> _KnownProgram:
        """What the next call is to launch: `plain` if somebody has written to the weights since the
        last call, and did so often before, or may have where nobody counts it; else this, as in a
        `loop`."""
        way, hoisted = self, self.hoisted
        if loop or hoisted is None:
            self.launched = self.planned
            return self
        uncounted = is_shared(hoisted.vm)
        if not (hoisted.is_stale or uncounted):
            self.changed = 0
        else:
            with hoisted.vm.lock:
                before, self.writes = self.writes, hoisted.writes()
            if before != self.writes or uncounted:
                often = self.changed >= _MOST_COMPUTED or uncounted
                if often and self.compiled is not None:
                    self.plain, self.compiled = self._without(hoisted, self.compiled), None
                self.changed += 1
                way = self.plain or self
        self.launched = way.planned
        return way

    def _without(self, hoisted: Hoisted, compiled: Callable[[], Planned]) -> _KnownProgram:
        """The second program. Its plan has the bytes `ahead` too, for they are kept."""
        with uncollected():
            planned = compiled()
        planned = dataclasses.replace(
            planned, plan=planned.plan._replace(ahead=hoisted.ahead.nbytes)
        )
        other = copy.copy(self)
        other._use(planned, None)
        other.compiled = None
        return other

    def make_exclusive(self, inputs: Sequence[Tensor]) -> bool:
        """Have nobody else need the old value of an input or a state that a launch updates. Returns
        whether one of them has moved. Then the call may have another signature."""
        moved = False
        for role, i in self.updates:
            x = (inputs if role == "input" else self.states)[i].root
            if isinstance(x, Tensor):
                before = x.region
                make_exclusive(x)
                moved |= x.region is not before
        return moved

    def saved(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], states: Sequence[Allocation]
    ) -> tuple[SavedStep, list[Array]]:
        """The step with the state as it is now, and the values of its inputs."""
        types = [tuple([x.root.type for x in each]) for each in (inputs, outputs)]
        step = SavedStep(self.planned, types[0], types[1], (), tuple(map(values_of, states)))
        return step, [values_of(x.root) for x in inputs]

    def given(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """What a launch is given, by role."""
        return inputs, outputs, self.states  # as _ROLES

    def taken(self) -> list[Tensor]:
        """The elements of queues that are taken ahead of a launch, and are inputs of it."""
        return [x for queue in self.ahead for x in queue.get(kind=Tensor)]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the program is for these inputs. For that, the function reaches by itself just
        those of them that it reached at the recording, and a view by which it reached a state is a
        view still."""
        return (
            all(inputs[i].root is x for i, x in self.same.items())
            and not any(id(x.root) in self.roots for x in inputs)
            and all((view := seen()) is None or view.root is x for seen, x in self.seen_as)
        )

    def takes(self, given: list[float]) -> _Feed | None:
        """What it is launched with for these numbers; None if it is not for them."""
        last = self.feed
        whole = len(last.arrays) == len(self.numbers.tensors)  # the first has none
        if whole and all(map(operator.is_, given, last.given)):
            return last
        free = set(self.free)
        for i, (x, was) in enumerate(zip(given, last.given, strict=True)):
            if i not in free and not is_same(x, was):
                return None
        values = self.numbers.again([given[i] for i in self.free])
        if values is None:
            return None
        try:
            arrays = [
                (x, scalar_array(values[place], dtype))
                for (place, dtype), x in self.numbers.tensors.items()
            ]
        except OpError:  # the call that is recorded anew raises it
            return None
        feed = self.feed = _Feed(given, values, arrays)  # another thread may replace it at once
        return feed


class _KnownCall:
    """A call that was made, told again in C: with this program, a look at what the function reaches
    that still holds, and arguments of that `pattern`. `how` is what else decides."""

    def __init__(self, known: _KnownProgram, signature: Signature, how: Any, parts: Any) -> None:
        self.known, self.how, self.look = known, how, signature.look
        self.states = [known.states[i] for role, i in known.updates if role == "state"]
        self.updated = [i for role, i in known.updates if role == "input"]
        self.checklist = signature.look.checklist
        apart = [x for x in self.look.held if id(x) in self.look.tensors]
        states = list(known.states)
        self._given = Tensor, Arena, parts
        self._kept = states, (*apart, *states)
        self.pattern = self._pattern(known)
        self._plain: Any = None

    def _pattern(self, known: _KnownProgram) -> Any:
        return EXTENSION.Pattern(*self._given, tuple(known.uses), *self._kept)  # type: ignore[union-attr]

    def of_plain(self, plain: _KnownProgram) -> Any:
        """The pattern that gives the tensors of the program that computes nothing ahead."""
        self._plain = self._plain or self._pattern(plain)
        return self._plain

    def match(self, vm: VMProtocol, args: Any, kwargs: Any) -> Any:
        """The call's tensors, and its inputs, if it is such a call."""
        known, look = self.known, self.look
        feed = known.feed
        if self.how != _surroundings(vm) or len(feed.arrays) != len(known.numbers.tensors):
            return None
        if not self.checklist.holds():
            return None
        if look.numbers:
            values = look.values(checked=False)
            if values is None or not all(map(operator.is_, values[1], feed.given)):
                return None
        found = self.pattern.match(args, kwargs, feed.given)
        if found is not None and known.updates:
            updated = [*self.states, *[found[1][i] for i in self.updated]]
            if live_tapes or not EXTENSION.exclusive(updated):  # type: ignore[union-attr]
                return None
        return None if found is None else (feed, *found)


def _surroundings(vm: VMProtocol) -> Any:
    """What a program depends on besides arguments and what the function reaches."""
    return id(vm), debug.is_watched(vm), sharing_of(vm), autocast_dtype()


class _Scratch:
    """The scratch memory of a captured function on one VM, as large as its largest plan. Its `lock`
    is held while it is used."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.nbytes = 0
        self.storage: StorageHandle | None = None

    def reserve(self, vm: VMProtocol, known: _KnownProgram) -> tuple[TensorHandle, ...]:
        """The handles of the tensors that the program has there, on its VM."""
        nbytes = known.planned.plan.nbytes
        if self.storage is None or nbytes > self.nbytes:
            self.release(vm)
            self.storage, self.nbytes = vm.alloc_storage(nbytes), nbytes
        if known.storage != self.storage:
            known.scratch = tuple(
                vm.tensor_from_storage(self.storage, type, offset)
                for offset, type in known.in_scratch
            )
            known.storage = self.storage
        return known.scratch

    def release(self, vm: VMProtocol) -> None:
        if self.storage is not None:
            vm.dealloc_storage(self.storage)
        self.storage, self.nbytes = None, 0


def _release(scratches: Mapping[VMProtocol, _Scratch]) -> None:
    for vm, scratch in list(scratches.items()):
        with scratch.lock:
            scratch.release(vm)


class Captured(Generic[P, R]):
    """A function that runs as a program; `capture` makes it.

    `signatures` is how many programs there are. `program` and `plan` are those of the last call.
    Threads may share it: what they launch on one VM, and `close`, happen one after the other.

    A call raises what `capture` raises.

        >>> step = ml.capture(lambda x: x * x)
        >>> step(ml.ones(3)), step
        (Tensor([1., 1., 1.], f32[3]), <captured <lambda>, 1 program>)
    """

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        fuse: bool,
        recompute: bool,
        hoist: bool = True,
        replace: Mapping[Callable[..., Any], str] = types.MappingProxyType({}),
    ) -> None:
        self.fn = fn
        self._replace = check_replace(replace)
        self.fuse = fuse
        self.recompute = recompute
        self.hoist = hoist
        self._lock = new_lock()  # of what follows, while it changes
        self._programs: dict[Any, list[_KnownProgram]] = {}
        self._changes: dict[Any, _ChangingNumbers] = {}  # of the numbers, by the same keys
        self._rebound: dict[int, set[str]] = {}  # names of fields, by the id of the Module
        self._scratch: weakref.WeakKeyDictionary[VMProtocol, _Scratch] = weakref.WeakKeyDictionary()
        self._last: _KnownProgram | None = None
        self._calls: list[_KnownCall] = []
        self._names = CALLED
        self._looks: dict[tuple[int, ...], Look] = {}  # by the ids of objects in arguments
        self._changing = Changing(fn)
        # Not `__del__`: the garbage collector clears weak references of what it collects before.
        weakref.finalize(self, _release, self._scratch).atexit = False
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if current_capture.get() is not None:  # it is called inside another captured function
            return self.fn(*args, **kwargs)
        return self._call(args, kwargs)  # type: ignore[no-any-return]

    def drain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it again and again until its queue is closed and drained: while elements are there,
        in a loop of the machine's own. The results are those of the last call. It waits without the
        VM's lock, so what makes the elements may launch on the same VM.

        Raises `ShutDown` if not one element was left, and `ProgramError` unless the function
        begins by taking an element, and does so once.
        """
        return self._call(args, kwargs, loop=True)  # type: ignore[no-any-return]

    def _call(self, args: Any, kwargs: Any, *, loop: bool = False) -> Any:
        if taping() is not None:
            raise GradientError(
                f"{self!r} cannot be differentiated: capture the function that takes the gradient"
            )
        arena = current_arena()
        for call in () if loop else self._calls:
            found = call.match(arena.vm, args, kwargs)
            if found is not None:
                known = self._last = call.known
                way = known.way()
                pattern = call.pattern if way is known else call.of_plain(way)
                return self._replay(way, arena, *found, pattern=pattern)
        given, named = args, kwargs
        if not ({Tensor}.issuperset(map(type, args)) and not kwargs):
            given, named = self._with_tensors(arena.vm, args, kwargs)
        while True:
            signature, key = self._signature(arena.vm, given, named)
            found = self._find(key, signature)
            if found is None:
                try:
                    with uncollected():
                        known = self._record(arena, given, named, signature, key)
                except recorder.MustMove as error:
                    make_exclusive(error.x)
                    continue
                feed = known.takes(signature.numbers) or known.feed
            else:
                known, feed = found
            if not (known.updates and known.make_exclusive(signature.inputs)):
                break
        self._last = known
        way = known.way(loop=loop)
        result = self._replay(way, arena, feed, signature.tensors, signature.inputs, loop=loop)
        if EXTENSION is not None and found is not None and not loop:
            self._remember(known, signature, arena.vm, given, named)
        return result

    def _remember(
        self, known: _KnownProgram, signature: Signature, vm: VMProtocol, args: Any, kwargs: Any
    ) -> None:
        """Have the next such call be told in C, if it can be, and was not too often in vain."""
        plain = not (known.same or known.seen_as or known.rebound or known.ahead)
        if not plain or not signature.look.is_flat or known.remembered >= _MOST_REMEMBERED:
            return
        parts = parts_of(signature, args, kwargs)
        if parts is None:
            return
        known.remembered += 1
        call = _KnownCall(known, signature, _surroundings(vm), parts)
        others = [each for each in self._calls if each.known is not known]
        self._calls = [call, *others[: _MOST_CALLS - 1]]  # at once

    def _with_tensors(self, vm: VMProtocol, args: Any, kwargs: Any) -> Any:
        """The arguments with tensors in place of numpy arrays. These are beside all tensors of the
        call: those of its other arguments, and those that the function reaches."""
        arrays = [x for _, x in flatten((args, kwargs), None, ends=_at_arrays)[0]]
        beside = None
        if any(array.dtype in (np.float64, np.complex128) for array in arrays):
            others = replace(lambda _: None, (args, kwargs), _ARRAYS)
            signature, _ = self._signature(vm, *others)
            beside = widest_of([*signature.tensors, *signature.look.held])

        def tensor(x: Array) -> Tensor:
            own = DType.of(x.dtype)
            return asarray(x, dtype=own if beside is None else array_beside(own, beside.dtype))

        return replace(tensor, (args, kwargs), _ARRAYS) if arrays else (args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method of the instance, where the function stands in a class: captured for each
        instance."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def signatures(self) -> int:
        """How many programs there are: one for each kind of call that was recorded."""
        with self._lock:
            return sum(map(len, self._programs.values()))

    @property
    def planned(self) -> Planned:
        """The last call's program with its plan. Raises `CaptureError` before the first call."""
        return self._last_program().launched

    @property
    def program(self) -> Program:
        """The last call's program. Raises `CaptureError` before the first call."""
        return self.planned.program

    @property
    def plan(self) -> Plan:
        """The last call's plan: where its intermediates lie, and how many bytes they take. Raises
        `CaptureError` before the first call."""
        return self.planned.plan

    @property
    def replaced(self) -> dict[str, list[Replaced]]:
        """The calls of host functions that `replace` has put into the last call's program: by name,
        a list of places. Raises `CaptureError` before the first call."""
        return {name: list(places) for name, places in self._last_program().replaced.items()}

    @property
    def residuals(self) -> int:
        """The bytes of the stack on which programs of the current VM keep what gradients need of
        loops of unknown length, and of functions (see `mlvm.machines.residuals`)."""
        return residuals.held(current_arena().vm)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the scratch memory of the last call's program as SVG: what lies where, and when.
        Raises `CaptureError` before the first call, and `OSError`."""
        title = f"Memory of {getattr(self.fn, '__name__', 'a captured function')}"
        Path(path).write_text(timeline(self.planned.recording(), title=title), encoding="utf-8")

    def _repr_html_(self) -> str:
        """What notebooks show: the plan of the last call's program, and its picture."""
        known = self._last
        if known is None:
            return html.block(repr(self))
        text = f"{self!r}: {known.launched.plan}"
        return html.picture(timeline(known.launched.recording(), title=repr(self)), text) + (
            html.block(text)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last call's program, its plan and the state as it is now to a file, which
        `python -m mlvm run` takes. Where weights change before each call, and a second program
        computes nothing ahead, it is the first. Raises `CaptureError` before the first call,
        `AttributeRefused` for a name that ends in ".onnx" or ".safetensors", and `OSError`."""
        if Path(path).suffix in (".onnx", ".safetensors"):
            raise AttributeRefused(
                f"{path}: Captured.save writes a planned step, such as step.mlvm; a function as "
                "ONNX is written by ml.onnx.save, and a model's tensors by ml.save"
            )
        known = self._last_program()
        planned = known.planned
        code = planned.program.main.code
        if known.ahead or any(instruction.opcode is Opcode.push_int for instruction in code):
            raise CaptureError(f"{self!r} takes from a queue, which no file can hold")
        if known.fields or known.rebound:
            raise CaptureError(f"{self!r} rebinds {_listed(known)}, which no file can hold")
        leaves: list[_Leaf] = []
        replace(leaves.append, known.tree, _Leaf)
        left = [known.results[leaf.number] for leaf in leaves]
        results = [x.home.seen_as(x.type) for x in left]
        states: list[Allocation] = list(known.states)
        if known.hoisted is not None:
            with known.hoisted.vm.lock:
                known.hoisted.refresh()
            planned, results, numbers = planned.with_states_used(results)
            states = [known.states[number] for number in numbers]
        outputs = tuple([output.type for output in known.outputs])
        values = tuple(map(values_of, states))
        step = SavedStep(planned, known.inputs, outputs, tuple(results), values)
        Path(path).write_bytes(step.to_bytes())

    def close(self) -> None:
        """Wait for a call that runs now, give the scratch memory back, and forget the programs. A
        later call records anew."""
        with self._lock:
            scratches = dict(self._scratch)
            self._forget()
            self._changing = Changing(self.fn)
            self._last = None
        _release(scratches)

    def _forget(self) -> None:
        for each in (self._programs, self._changes, self._rebound, self._looks):
            each.clear()
        self._calls = []

    def __repr__(self) -> str:
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        return f"<captured {name}, {self.signatures} program{'s' * (self.signatures != 1)}>"

    def _last_program(self) -> _KnownProgram:
        known = self._last
        if known is None:
            raise CaptureError(f"{self!r} has not been called yet")
        return known

    def _signature(self, vm: VMProtocol, args: Any, kwargs: Any) -> tuple[Signature, Any]:
        """The call's signature, and as the key that programs are kept by."""
        arguments = Arguments((*args, *kwargs.values()))
        ids = tuple(arguments.objects)
        look = self._looks.get(ids)
        values = look.values() if look is not None else None
        while look is None or values is None:
            objects = [value for _, value in arguments.objects.values()]
            look = Look(self.fn, self._names, self._rebound, objects)
            values = look.values(checked=False)
            self._names = look.names
            with self._lock:
                if len(self._looks) >= _MOST_LOOKS:
                    self._looks.clear()
                self._looks[ids] = look
        signature = Signature(look, values, arguments)
        return signature, (*_surroundings(vm), len(args), *kwargs, *signature.key)

    def _find(self, key: Any, signature: Signature) -> tuple[_KnownProgram, _Feed] | None:
        for known in self._programs.get(key, ()):
            if known.fits(signature.inputs):
                feed = known.takes(signature.numbers)
                if feed is not None:
                    return known, feed
        return None

    def _record(
        self, arena: Arena, args: Any, kwargs: Any, signature: Signature, key: Any
    ) -> _KnownProgram:
        """Record the call. Later calls use its program too, unless the function has changed its own
        signature: then they record anew."""
        noted = self._changing.noted(signature.look, args, kwargs)
        changes, free = self._free(key, signature)
        try:
            recorded = _recorded(self.fn, args, kwargs, arena, signature, free)
        except Exception:
            if not free:
                raise
            changes.seen.update(free)  # who takes what stands for a number for none
            recorded = _recorded(self.fn, args, kwargs, arena, signature, ())
        changes.seen.update([free[i] for i in recorded.numbers.fixed()])
        name = repr(getattr(self.fn, "__qualname__", type(self.fn).__name__))
        replaced: dict[str, list[Replaced]] = {}
        if self._replace:
            replacer = Replacer(self._replace, _pattern)
            flow, replaced = replacer(recorded.flow, recorded.record.states, name)
            recorded = recorded._replace(flow=flow)
        is_plain = debug.is_watched(arena.vm)  # then each call is to be seen
        compiled = partial(
            compile_flow,
            recorded.flow,
            fuse=self.fuse and not is_plain,
            recompute=self.recompute and not is_plain,
            policy=policy_of(arena.vm),
        )
        hoist = _hoist(recorded, arena.vm) if self.hoist and not is_plain else None
        planned = compiled(hoist=hoist)
        hoisted = self._kept_ahead(planned, recorded.record.states, arena.vm)
        known = _KnownProgram(planned, recorded, signature, hoisted, compiled if hoisted else None)
        known.replaced = replaced
        with self._lock:
            for field, _ in known.rebound:  # from now on this is as an argument
                self._rebound.setdefault(id(field.owner), set()).add(field.name)
                self._looks.clear()
                self._calls = []
        now, key_now = self._signature(arena.vm, args, kwargs)
        if key_now == key and all(map(is_same, now.numbers, signature.numbers)):
            with self._lock:
                if self.signatures >= _MOST_SIGNATURES:
                    self._forget()
                if self._find(key, signature) is None:  # or another thread was faster
                    self._programs.setdefault(key, []).append(known)
        warn_of_frozen(signature.look, name)
        self._changing.add(noted, name)
        return known

    def _kept_ahead(
        self, planned: Planned, states: Sequence[Allocation], vm: VMProtocol
    ) -> Hoisted | None:
        """What the program has computed ahead: what another program of the VM has, where it is the
        same."""
        if planned.ahead is None:
            return None
        name = getattr(self.fn, "__name__", "a captured function")
        explain = partial(_name_line, planned.ahead.planned)
        with vm.lock:
            kept = vm.attached(Kept).made
            for each in kept:
                if each.fits(planned.ahead, states, vm):
                    return each
            made = Hoisted(planned.ahead, states, vm, name, explain)
            kept.add(made)
        return made

    def _free(self, key: Any, signature: Signature) -> tuple[_ChangingNumbers, list[int]]:
        """What changed between calls of this structure, and the numbers that shall be free: those
        that changed and whose value Python has not seen."""
        with self._lock:
            changes = self._changes.setdefault(key, _ChangingNumbers(set(), set()))
            for known in self._programs.get(key, ())[-1:]:
                for i, (x, was) in enumerate(zip(signature.numbers, known.feed.given, strict=True)):
                    if not is_same(x, was):
                        changes.changed.add(i)
            if ASKS_CLASS in signature.look.names:  # `type(x) is float` would not hold
                return changes, []
            return changes, sorted(changes.changed - changes.seen)

    def _replay(
        self,
        known: _KnownProgram,
        arena: Arena,
        feed: _Feed,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        loop: bool = False,
        pattern: Any = None,
    ) -> Any:
        program = again = known.planned.program
        if loop:
            if known.rebound:
                raise CaptureError(
                    f"{self!r} rebinds {_listed(known)}, which a loop of the machine's own cannot "
                    f"do; update it in place"
                )
            if len(known.ahead) > 1:
                raise no_loop(len(known.ahead))
            if not known.ahead:
                again = known.looped = known.looped or known.planned.looped()
        outputs = [output.alloc(arena) for output in known.outputs]
        self._launch(known, feed, arena.vm, program, inputs, outputs, pattern)
        if loop:
            with suppress(ShutDown):
                while True:
                    self._launch(known, feed, arena.vm, again, inputs, outputs)

        if known.single is not None:  # as below, sooner
            return outputs[known.single].root
        if known.rebound:
            arena.vm.synchronize()  # what raises has rebound nothing
        places: dict[str, Sequence[Allocation]]
        places = {"input": inputs, "output": outputs, "state": known.states}
        results = [result.made(tensors, places) for result in known.results]
        for field, number in known.rebound:
            field.set(results[number])

        def made(part: Any) -> Any:
            if isinstance(part, _Computed):
                return feed.values[part.place]
            return results[part.number] if isinstance(part, _Leaf) else copy.copy(part)

        return replace(made, known.tree, (_Leaf, _Computed, *_CHANGEABLE))

    def _launch(
        self,
        known: _KnownProgram,
        feed: _Feed,
        vm: VMProtocol,
        program: Program,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        pattern: Any = None,
        *,
        taken: bool = False,
    ) -> None:
        scratch = self._scratch.get(vm)
        if scratch is None:
            with self._lock:
                scratch = self._scratch.setdefault(vm, _Scratch())
        if known.first is not None and not taken:
            with taken_ahead(known.first):
                self._launch(known, feed, vm, program, inputs, outputs, pattern, taken=True)
            return
        if known.ahead:
            inputs = [*inputs, *known.taken()]
        used: Sequence[Allocation] = ()
        hoisted = known.hoisted
        explains: Callable[[Exception], None] = known.explain
        token = explaining.set(known.explain)
        try:
            with scratch.lock, _UNLOCKED if hoisted is None else vm.lock:
                if hoisted is not None:
                    explains = hoisted.explain
                    hoisted.refresh()
                    explains = known.explain
                of_scratch = scratch.reserve(vm, known) if known.in_scratch else ()
                handles = None
                if pattern is not None:
                    handles = pattern.handles(inputs, outputs, of_scratch)
                if handles is None:
                    given = known.given(inputs, outputs)
                    used = [as_type(given[role][i], type) for role, i, type in known.uses]
                    handles = (*[x.handle for x in used], *of_scratch)
                for x, array in feed.arrays:  # another thread's may be there
                    vm.write(x.handle, array)
                if debug.is_watched(vm):
                    given = known.given(inputs, outputs)
                    updated = [given[_ROLES.index(role)][i].root for role, i in known.updates]
                    saved = partial(known.saved, *given)
                    try:
                        debug.launch_watched(vm, program, handles, updated, saved)
                    except MlvmError as error:
                        error.late = False  # each call of it is waited for
                        raise
                    return
                vm.launch(program, handles)
        except Exception as error:
            if getattr(error, "late", False):
                raise
            if isinstance(error, HandleError):
                given = known.given(inputs, outputs)
                used = used or [given[role][i] for role, i, _ in known.uses]
                raise explain(error, vm, used) from None
            explains(error)
            raise
        finally:
            explaining.reset(token)


_UNLOCKED: Final = nullcontext()

_ARRAYS: Final = np.ndarray, np.generic

_CHANGEABLE: Final = np.ndarray, set, bytearray
"""What a caller may change in a result: each call returns its own."""


@overload
def capture(
    fn: Callable[P, R],
    /,
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = ...,
) -> Captured[P, R]: ...
@overload
def capture(
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = ...,
) -> Callable[[Callable[P, R]], Captured[P, R]]: ...
@hinted
def capture(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = types.MappingProxyType({}),
) -> Any:
    """A function that records what `fn` does at its first call, and from then on launches that as
    one program. The program may be a whole step, with gradients and an optimizer's update.

    It is a decorator, `@capture`, and with options one too, `@capture(fuse=False)`.

    Arguments are trees of tensors, of numpy arrays, which become tensors, and of anything else. An
    array of f64 is in the widest float of the call's tensors, where that is narrower. A call with
    tensors of other types, other values, or another Module records anew. So does a call after a
    change of anything that the function reaches by itself, such as an array, which is a constant of
    the program. Python numbers among the arguments and in fields of Modules and optimizers do so
    once, and from then on are inputs of the program, unless Python code needs to see the value.
    Tensors that the function reaches by itself are used where they lie, and updated in place.
    Random keys advance. Each call allocates its results in the current arena. Temporaries lie in
    scratch memory of the captured function's own; `plan` tells its size.

    With `fuse`, chains of elementwise ops run block by block, and intermediates within a chain need
    no memory. With `recompute`, cheap values are computed again for the backward pass, and not
    kept. With `hoist`, what depends on tensors alone that the function reaches and does not update,
    such as a weight in another dtype, is computed once, kept in an arena of its own, and computed
    again after anybody has written to one of these tensors; where that is before each call, in the
    step itself, by a second program. `plan.ahead` tells how many bytes what is kept takes: no value
    has more than four times those of the tensors that it is made of. None of these changes a bit of
    the result.

    With `replace`, `{pattern: name}`, the host function of that name is called where the function
    computes the pattern, a Python function of tensors such as `lambda x, w, b: ml.gelu(x @ w + b)`.
    It takes the pattern's operands and pushes its results. `step.replaced` tells where; a
    `ReplacementWarning` names a pattern that fits nowhere. See docs/functions.md.

    The function may rebind a Module's field to another tensor of the same type. Then each call
    rebinds it, to a tensor in the arena of the one before.

    Warns with `RecompilationWarning`, once, when it records its 8th program, and says what changed;
    with `FrozenWarning` for a line that reads a clock or draws from numpy's generators.
    Raises `CaptureError` if the function reaches what may change unseen, such as an iterator. Also
    raises it, with the line, if the function reads a tensor's value, computes on another VM, calls
    an op whose result's shape depends on values, or keeps a tensor of its own in any place but its
    result or such a field. Raises `GradientError` inside a differentiated function,
    `AttributeRefused` for an option that is no bool and a `replace` that is no such mapping, and
    whatever the function raises.

        >>> step = ml.capture(lambda x: ml.sum(x * x))
        >>> step(ml.ones(3)), step(ml.zeros(3))
        (Tensor(3., f32[]), Tensor(0., f32[]))
    """
    _require_bools("capture", fuse=fuse, recompute=recompute, hoist=hoist)
    if fn is None:
        return partial(capture, fuse=fuse, recompute=recompute, hoist=hoist, replace=replace)
    if not callable(fn):
        raise CaptureError(f"capture takes a function, not {fn!r}")
    return Captured(fn, fuse=fuse, recompute=recompute, hoist=hoist, replace=replace)


def _require_bools(name: str, **options: object) -> None:
    for option, value in options.items():
        if not isinstance(value, bool):
            raise AttributeRefused(f"{name}: {option} is True or False, not {brief(value)}")


def _hoist(recorded: RecordedCall, vm: VMProtocol) -> Hoist | None:
    """What may be computed ahead: what depends on no number that each call copies in anew."""
    if is_shared(vm):
        return None
    states, numbers = recorded.record.states, map(id, recorded.numbers.tensors.values())
    fed = set(numbers)
    return Hoist(len(states), {i for i, x in enumerate(states) if id(x) in fed})


class Measured(NamedTuple):
    """The memory that one call of a function needs: `arena` is the capacity in bytes of an arena
    that it runs in eagerly, `plan` is the plan of the captured function.

        >>> measured = ml.measure(lambda x: ml.sum(ml.sort(x)), ml.TensorType("f32", [1000]))
        >>> measured
        eagerly, in an arena: 4,096 bytes
        captured: 4,032 bytes, lower bound 4,032 (1.00), unfused 4,032, by size
        >>> measured.arena, measured.plan.nbytes
        (4096, 4032)
    """

    arena: int
    plan: Plan

    def __repr__(self) -> str:
        return f"eagerly, in an arena: {self.arena:,} bytes\ncaptured: {self.plan}"


def measure(
    fn: Callable[..., Any],
    *args: Any,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    **kwargs: Any,
) -> Measured:
    """What a call of the function needs besides its arguments and what it reaches by itself,
    without running it or allocating anything.

    Arguments are as the function takes them, with a `TensorType` where a tensor would be, or the
    tensor itself. Raises what `capture` raises, `AttributeRefused` for an option that is no bool,
    and `CaptureError` for a type given as text.

        >>> ml.measure(lambda x: ml.sum(ml.sort(x)), ml.zeros(1000)).plan.nbytes
        4032
    """
    _require_bools("measure", fuse=fuse, recompute=recompute, hoist=hoist)
    recorder.refuse_captured("a function is measured")
    recorded, _ = recorded_call(fn, args, kwargs)
    arena = current_arena()
    policy = policy_of(arena.vm)
    ahead = _hoist(recorded, arena.vm) if hoist else None
    plan = compile_flow(
        recorded.flow, fuse=fuse, recompute=recompute, policy=policy, hoist=ahead
    ).plan
    return Measured(recorded.record.needed, plan)


def as_code(x: object) -> str | None:
    """What to write for a type given as text, such as "f32[2,4]"; None for anything else."""
    with suppress(DTypeError, ShapeError):
        type = TensorType.parse(x) if isinstance(x, str) else None
        return type and f'ml.TensorType("{type.dtype}", {type.shape})'
    return None


def recorded_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[RecordedCall, Signature]:
    """What a call of the function would do, and the signature of its arguments, as `measure` takes
    them. Raises what `capture` raises."""
    for _, x in flatten((args, kwargs), None, ends=_at_texts)[0]:
        write = as_code(x)
        if write is not None:
            raise CaptureError(f"for the type {x!r} write {write}")
    captured, arena = Captured(fn, fuse=False, recompute=False, hoist=False), current_arena()
    while True:
        signature, _ = captured._signature(arena.vm, args, kwargs)
        try:
            return _recorded(fn, args, kwargs, arena, signature, ()), signature
        except recorder.MustMove as error:
            make_exclusive(error.x)


def _pattern(fn: Callable[..., Any], operands: Types) -> Pattern:
    """Record a pattern of `replace` for operands of these types. Raises what `capture` raises."""
    recorded, _ = recorded_call(fn, operands, {})
    uses = [use for _, use in recorded.named_results()]
    return Pattern.of(recorded.flow, uses, operands, recorded.record.states)


def _recorded(
    fn: Any, args: Any, kwargs: Any, arena: Arena, signature: Signature, free: Sequence[int]
) -> RecordedCall:
    """Call the function with a recorder on. Fields that it rebinds get their old values back. Those
    of the signature's numbers that are `free` are recorded too."""
    prepare_constants(arena.vm)
    random.prepare(arena.vm)
    around = Surroundings(signature.look)
    numbers = Numbers([signature.numbers[i] for i in free], arena.vm)
    with (
        recorder.recording_of(arena.vm, signature.inputs) as record,
        numbers.recording() as stand_ins,
    ):
        lent: list[Any] = [*signature.numbers]
        for i in reversed(free):
            lent[i] = stand_ins.pop()
        around.lend(signature.look.numbers, lent)
        arguments = lent[len(signature.look.numbers) :][::-1]
        del lent

        def stand_in(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x if signature.is_reached(x) else record.stand_in(x)
            if isinstance(x, TensorType):
                return record.stand_in_of(x)
            return arguments.pop() if type(x) in (int, float) else x

        try:
            for field, x in signature.fields:
                field.set(stand_in(x))
            given = [
                replace(stand_in, each, (Tensor, TensorType, int, float)) for each in (args, kwargs)
            ]
            before = replace(lambda x: x, given)
            tree = fn(*given[0], **given[1])
            _require_same(before, given)
            del given, before
            replace(_refuse_later, tree, (Iterator, Awaitable))
            for field, x in signature.fields:
                if field.value is stand_in(x):  # it was not rebound
                    field.set(x)
            outcome = _Outcome(record, signature)
            tree = replace(outcome.leaf, tree)
            tree = replace(lambda x: _Computed(x.place) if x.recorded else plain(x), tree, Number)
            rebound = outcome.fields(around)
        except BaseException:
            around.put_back(failed=True)
            raise
        around.put_back(failed=False)
        numbers.see_kept()
        flow = Flow(record.calls, outcome.values)
        found = RecordedCall(
            record, flow, tree, outcome.results, outcome.outputs, rebound, numbers, free
        )
        del outcome
        _refuse_kept(record, around)
    return found


class _Outcome:
    """What a function leaves: the tensors that it returns, and those that it rebinds fields to."""

    def __init__(self, record: recorder.Recorder, signature: Signature) -> None:
        self.results: list[_Result] = []
        self.values: list[Value] = []
        self.outputs: list[_Output] = []
        self._record = record
        self._signature = signature
        self._given = {id(record.stand_in(x)): i for i, x in enumerate(signature.tensors)}
        self._leaves: dict[int, tuple[_Leaf, Tensor]] = {}  # by the id of the tensor

    def leaf(self, x: Tensor, field: Field | None = None) -> _Leaf:
        """The leaf for a tensor. Raises `CaptureError` for one that no launch can make."""
        if id(x) not in self._leaves:
            self._leaves[id(x)] = _Leaf(len(self.results)), x
            self.results.append(self._result(x, field))
        return self._leaves[id(x)][0]

    def fields(self, around: Surroundings) -> list[tuple[Field, int]]:
        """The fields that were rebound, with the numbers of the results that they are to name."""
        return [(field, self.leaf(x, field).number) for field, x in around.rebound()]

    def _result(self, x: Tensor, field: Field | None) -> _Result:
        if x.handle == STALE:
            raise CaptureError(f"a captured function returns what has ended: {x.stale()}")
        value = self._record.value_of(x)
        self.values.append(value)
        home = value.home
        if home is not None and (home.role == "element" or home in self._record.ahead_homes):
            raise CaptureError(
                f"a captured function returns a {x.type} that lies in a queue's slot; "
                f"return copy(x)"
            )
        if home is None or home.role == "scratch":
            home = value.home = home or Home("output", 0, x.root.type)
            home.role, home.index = "output", len(self.outputs)
            self.outputs.append(_Output(x.root.type, field))
        elif home.role == "output" and field is not None:
            output = self.outputs[home.index]
            self.outputs[home.index] = output._replace(field=output.field or field)
        reached = x if self._signature.is_reached(x) else None
        return _Result(home, x.type, x.base is not None, self._given.get(id(x)), reached)


def _refuse_kept(record: recorder.Recorder, around: Surroundings) -> None:
    """Raise `CaptureError` if a tensor that the function has made or was given is kept somewhere:
    later calls would put no other there. Names that keep one get their old values back."""
    for _ in range(2):  # once a gradient's tape is collected, what it had is garbage, too
        if record.made():
            collect()
    kept = record.made()
    if not kept:
        return
    x, where = around.find(kept) or (kept[0], "some other place")
    line = record.line_of(x)
    if x.arena not in (record.arena, record.arguments):
        where = f"arena {x.arena.name!r}"
    what = f"{line}: a {x.type} made inside" if line else f"a {x.type} given to"
    raise CaptureError(
        f"{what} a captured function is kept in {where}, where later calls would put no other; "
        f"return it, and keep it outside, or rebind a Module's field that holds a {x.type}"
    )


def _require_same(before: Sequence[Any], given: Sequence[Any]) -> None:
    """Raise `CaptureError` if the function has changed a list or dict in its arguments or keyword
    arguments: it got copies of them, and later calls would change none."""
    (args, kwargs), (args_now, kwargs_now) = before, given
    was = {**dict(enumerate(args)), **kwargs}
    now = {**dict(enumerate(args_now)), **kwargs_now}
    for name, argument in was.items():
        if not _is_same(argument, now[name]):
            raise CaptureError(
                f"a captured function changes the {type(argument).__name__} that it was given as "
                f"argument {name!r}, which no later call would do; return what is new instead"
            )


def _is_same(before: Any, given: Any) -> bool:
    """Whether two trees have the same leaves at the same places."""
    if type(before) is not type(given) or not isinstance(before, (dict, list, tuple)):
        return before is given
    if isinstance(before, dict):
        alike = before.keys() == given.keys()
        return alike and all(_is_same(x, given[name]) for name, x in before.items())
    return len(before) == len(given) and all(map(_is_same, before, given))


def _refuse_later(result: object) -> NoReturn:
    raise CaptureError(
        f"a captured function returns a {type(result).__name__}, which runs after the call, and "
        f"for one call alone; return a list or tuple"
    )


def _listed(known: _KnownProgram) -> str:
    """The fields that this call, or an earlier one of the same function, rebinds."""
    fields = known.fields or [field for field, _ in known.rebound]
    return ", ".join(f"{each.name!r} of {type(each.owner).__name__}" for each in fields)


def _at_leaves(part: Any) -> bool | None:
    return isinstance(part, _Leaf) or (None if isinstance(part, (dict, list, tuple)) else False)


def _at_texts(part: Any) -> bool | None:
    return isinstance(part, str) or (None if isinstance(part, (dict, list, tuple)) else False)


def _at_arrays(part: Any) -> bool | None:
    if part.__class__ is Tensor:  # most parts are
        return False
    return isinstance(part, _ARRAYS) or (None if isinstance(part, (dict, list, tuple)) else False)


def _name_line(planned: Planned, error: Exception) -> None:
    """Note on an error of a planned program which line of Python the failing call is from."""
    function, pc = getattr(error, "function", None), getattr(error, "pc", None)
    line = planned.lines.get((str(function), pc)) if isinstance(pc, int) else None
    if line is not None:
        layer = getattr(line, "layer", None)  # that of a saved step has none
        error.add_note(f"recorded at {line}" + (f", in {layer}" if layer else ""))
