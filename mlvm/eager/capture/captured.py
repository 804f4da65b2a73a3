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

import os
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from mlvm.arena.arena import STALE, Allocation, Arena, using
from mlvm.arena.planner import Plan
from mlvm.core.errors import CaptureError, GradientError, HandleError
from mlvm.core.program.program import Opcode, Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import TensorType
from mlvm.eager import random
from mlvm.eager.capture.recorder import Recorder, recorder, recording_of
from mlvm.eager.capture.signature import CALLED, Signature
from mlvm.eager.context import current_arena, recording
from mlvm.eager.creation import asarray
from mlvm.eager.tensor import Tensor, explain, prepare_constants
from mlvm.eager.tree import require_writable
from mlvm.show.picture import timeline
from mlvm.step.compile import Planned, compile_flow, looped
from mlvm.step.flow import Flow, Home, Value
from mlvm.step.saved import Result, SavedStep

P = ParamSpec("P")
R = TypeVar("R")

_MOST_SIGNATURES: Final = 64


# --- what was recorded ---------------------------------------------------------------


class _Result(NamedTuple):
    """A tensor that the function returned: the output, input or state of that number, as a type."""

    home: Home
    type: TensorType


class _Entry:
    """The program for one signature, and what to launch it with."""

    def __init__(
        self,
        planned: Planned,
        record: Recorder,
        result: Any,
        outputs: list[TensorType],
        held: list[Any],
    ) -> None:
        written = {use.value.home for call in record.calls for use in call.outs}
        self.updates = [
            (home.role, home.index) for home in written if home and home.role in ("input", "state")
        ]
        self.planned = planned
        self.result = result
        self.outputs = outputs
        self.held = [*held, *record.held]
        self.looped: Program | None = None
        self.inputs = tuple([x.type for x in record.inputs])
        self.same = {i: record.inputs[i] for i in record.same}
        self.roots = {id(x) for x in record.states}
        self.states = record.states
        given = planned.arguments
        self.takes_input = [(a.place, a.type) for a in given if a.role == "input"]
        self.takes_output = [(a.place, a.type) for a in given if a.role == "output"]
        self.takes_state = [
            _as_type(record.states[a.place], a.type) for a in given if a.role == "state"
        ]
        self.takes_scratch = [(a.place, a.type) for a in given if a.role == "scratch"]
        self.storage: StorageHandle | None = None
        self.scratch: tuple[TensorHandle, ...] = ()

    def updated(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Of these arguments and of the state, what a launch changes."""
        return [(tensors if role == "input" else self.states)[i] for role, i in self.updates]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether arguments are what the function reached otherwise just where they were then."""
        return all(tensors[i].root is x.root for i, x in self.same.items()) and not any(
            id(x.root) in self.roots for x in tensors
        )


def _as_type(x: Allocation, type: TensorType) -> Allocation:
    return x if x.type is type else x.arena.view(x, type)


class _Scratch:
    """The scratch memory of a captured function on one VM, as large as its largest plan."""

    def __init__(self, vm: VMProtocol) -> None:
        self.vm = vm
        self.lock = threading.RLock()
        self.nbytes = 0
        self.storage: StorageHandle | None = None

    def reserve(self, entry: _Entry) -> tuple[TensorHandle, ...]:
        """The handles of the tensors that the entry has there."""
        nbytes = entry.planned.plan.nbytes
        if self.storage is None or nbytes > self.nbytes:
            self.release()
            self.storage, self.nbytes = self.vm.alloc_storage(nbytes), nbytes
        if entry.storage != self.storage:
            entry.storage = self.storage
            entry.scratch = tuple(
                [
                    self.vm.tensor_from_storage(self.storage, type, offset)
                    for offset, type in entry.takes_scratch
                ]
            )
        return entry.scratch

    def release(self) -> None:
        if self.storage is not None:
            self.vm.dealloc_storage(self.storage)
            self.storage, self.nbytes = None, 0


class Captured(Generic[P, R]):
    """A function that runs as a program; `capture` makes it.

    `signatures` is how many programs there are. `program` and `plan` are those of the last call.
    """

    def __init__(self, fn: Callable[P, R], *, fuse: bool, recompute: bool) -> None:
        self.fn = fn
        self.fuse = fuse
        self.recompute = recompute
        self._entries: dict[Any, list[_Entry]] = {}
        self._scratch: weakref.WeakKeyDictionary[VMProtocol, _Scratch] = weakref.WeakKeyDictionary()
        self._last: _Entry | None = None
        self._names = CALLED
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if recorder.get() is not None:  # part of what is captured around it
            return self.fn(*args, **kwargs)
        return self._call(args, kwargs)  # type: ignore[no-any-return]

    def drain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it again and again, until the queue that it takes an element from is closed and
        drained, in a loop of the machine's own. The results are those of the last time.

        Raises `ShutDown` if not one element was left, and `ProgramError` unless the function
        begins by taking an element, and does so once.
        """
        return self._call(args, kwargs, loop=True)  # type: ignore[no-any-return]

    def _call(self, args: Any, kwargs: Any, *, loop: bool = False) -> Any:
        if recording.get() is not None:
            raise GradientError(
                f"{self!r} cannot be differentiated: capture the function that takes the gradient"
            )
        arena = current_arena()
        given, named = _with_tensors(args), _with_tensors(kwargs)
        signature, key = self._signature(arena.vm, given, named)
        tensors = _distinct(signature.tensors)
        entries = self._entries.get(key, ())
        entry = next((each for each in entries if each.fits(tensors)), None)
        if entry is None:
            entry = self._record(arena, given, named, [*signature.held, arena.vm])
            self._remember(key, entry)
        self._last = entry
        return self._replay(entry, arena, tensors, loop=loop)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: a method, captured for each instance."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def signatures(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def planned(self) -> Planned:
        """The last call's program with its plan. Raises `CaptureError` before the first call."""
        if self._last is None:
            raise CaptureError(f"{self!r} has not been called yet")
        return self._last.planned

    @property
    def program(self) -> Program:
        return self.planned.program

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the scratch memory of the last call's program as SVG: what lies where, and when.
        Raises `CaptureError` before the first call, and `OSError`."""
        title = f"Memory of {getattr(self.fn, '__name__', 'a captured function')}"
        Path(path).write_text(timeline(self.planned.recording(), title=title), encoding="utf-8")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last call's program, its plan and the state as it is now to a file, which
        `python -m mlvm run` takes. Raises `CaptureError` before the first call, and `OSError`."""
        planned, entry = self.planned, self._last
        assert entry is not None  # or there was no plan
        if any(instruction.opcode is Opcode.push_int for instruction in planned.program.main.code):
            raise CaptureError(f"{self!r} takes from a queue, which no file can hold")
        results = [Result(x.home.role, x.home.index, x.type) for x in _leaves(entry.result)]
        with using(entry.states):
            states = tuple([x.arena.vm.read(x.handle) for x in entry.states])
        step = SavedStep(planned, entry.inputs, tuple(entry.outputs), tuple(results), states)
        Path(path).write_bytes(step.to_bytes())

    def close(self) -> None:
        """Give the scratch memory back, and forget the programs. A later call records anew."""
        for scratch in self._scratch.values():
            scratch.release()
        self._scratch.clear()
        self._entries.clear()
        self._last = None

    def __del__(self) -> None:
        if hasattr(self, "_scratch"):
            self.close()

    def __repr__(self) -> str:
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        return f"<captured {name}, {self.signatures} program{'s' * (self.signatures != 1)}>"

    def _signature(self, vm: VMProtocol, args: Any, kwargs: Any) -> tuple[Signature, Any]:
        """The call's signature, and as the key that programs are kept by."""
        while True:
            signature = Signature(self.fn, self._names)
            key = (
                id(vm),
                signature.of_argument(args),
                signature.of_argument(kwargs),
                signature.function,
            )
            if signature.names == self._names:
                return signature, key
            self._names = signature.names

    def _remember(self, key: Any, entry: _Entry) -> None:
        if self.signatures >= _MOST_SIGNATURES:
            self._entries.clear()
        self._entries.setdefault(key, []).append(entry)

    def _record(self, arena: Arena, args: Any, kwargs: Any, held: list[Any]) -> _Entry:
        outputs: list[TensorType] = []
        record, flow, result = _recorded(self.fn, args, kwargs, arena, outputs)
        planned = compile_flow(flow, fuse=self.fuse, recompute=self.recompute)
        return _Entry(planned, record, result, outputs, held)

    def _replay(self, entry: _Entry, arena: Arena, tensors: Sequence[Tensor], *, loop: bool) -> Any:
        require_writable(entry.updated(tensors))
        programs = [entry.planned.program]
        if loop:
            entry.looped = entry.looped or looped(entry.planned.program)
            programs.append(entry.looped)
        scratch = self._scratch.get(arena.vm)
        if scratch is None:
            scratch = self._scratch.setdefault(arena.vm, _Scratch(arena.vm))
        outputs = []
        for type in entry.outputs:
            out = arena.alloc(type, Tensor)
            out.tape = None
            outputs.append(out)
        used = [
            *[_as_type(tensors[i], type) for i, type in entry.takes_input],
            *[_as_type(outputs[i], type) for i, type in entry.takes_output],
            *entry.takes_state,
        ]
        try:
            with scratch.lock, using(used):
                handles = (*[x.handle for x in used], *scratch.reserve(entry))
                for program in programs:
                    arena.vm.launch(program, handles)
        except HandleError as error:
            raise explain(error, arena.vm, used) from None
        except Exception as error:
            _name_line(error, entry.planned)
            raise

        def there(result: _Result) -> Tensor:
            home = result.home
            if home.role == "output":
                x: Any = outputs[home.index]
            else:
                x = (tensors if home.role == "input" else entry.states)[home.index]
            if x.type is not result.type:
                x = x.arena.view(x, result.type, Tensor)
                x.tape = None
            return x  # type: ignore[no-any-return]

        return _mapped(there, entry.result, _Result)


def capture(fn: Callable[P, R], *, fuse: bool = True, recompute: bool = True) -> Captured[P, R]:
    """The function as one that records what it does when it is first called, and from then on
    launches that as one program, in a step that includes gradients and an optimizer's update.

    Arguments are trees of tensors, of numpy arrays, which become tensors, and anything else. A
    call with tensors of other types, other values besides, or another Module records anew; so does
    one after anything else that the function reaches by itself was changed. Tensors reached so are
    used where they lie, and updated in place; random keys advance; what is returned is allocated in
    the current arena, anew by each call. Temporaries lie in scratch memory of the captured
    function's own, whose `plan` tells its size.

    With `fuse`, chains of elementwise ops run block by block, and what passes between them has no
    memory. With `recompute`, what is cheap is computed again for the backward pass rather than
    kept. Neither changes a bit of the result.

    Raises `CaptureError` where the function reaches what may change unseen, as an iterator does;
    `CaptureError`, which names the line, where the function reads a tensor's value, copies a
    Python value into one, calls an op whose result's shape depends on values, or keeps a tensor
    of its own otherwise than by returning it; `GradientError` inside a differentiated function;
    and whatever the function raises.
    """
    if not callable(fn):
        raise CaptureError(f"capture takes a function, not {fn!r}")
    return Captured(fn, fuse=fuse, recompute=recompute)


class Measured(NamedTuple):
    """What one call of a function needs, in bytes: `arena`, an arena of fixed capacity that it
    runs in eagerly; `plan`, captured."""

    arena: int
    plan: Plan


def measure(
    fn: Callable[..., Any], *args: Any, fuse: bool = True, recompute: bool = True, **kwargs: Any
) -> Measured:
    """What a call of the function needs besides its arguments and what it reaches by itself,
    without running it or allocating anything.

    Arguments are as the function takes them, with a `TensorType` where a tensor would be, or the
    tensor itself. Raises what `capture` raises.
    """
    outputs: list[TensorType] = []
    record, flow, _ = _recorded(fn, args, kwargs, current_arena(), outputs)
    return Measured(record.needed, compile_flow(flow, fuse=fuse, recompute=recompute).plan)


def _recorded(
    fn: Callable[..., Any], args: Any, kwargs: Any, arena: Arena, outputs: list[TensorType]
) -> tuple[Recorder, Flow, Any]:
    """Call the function with a recorder on: what was recorded, and the result with a `_Result` in
    each tensor's place. `outputs` gets the types of the tensors to be made for results."""
    prepare_constants(arena.vm)
    random.prepare(arena.vm)
    values: list[Value] = []
    with recording_of(arena.vm) as record:

        def stand_in(x: Tensor | TensorType) -> Tensor:
            return record.input(x) if isinstance(x, Tensor) else record.input_of(x)

        def result_of(x: Tensor) -> _Result:
            if x.handle == STALE:
                raise CaptureError(f"a captured function returns what has ended: {x.stale()}")
            value = record.value_of(x)
            values.append(value)
            if value.home is not None and value.home.role == "element":
                raise CaptureError(
                    f"a captured function returns a {x.type} that lies in a queue's slot; "
                    f"return copy(x)"
                )
            if value.home is None or value.home.role == "scratch":
                value.home = value.home or Home("output", 0, x.type)
                value.home.role, value.home.index = "output", len(outputs)
                outputs.append(x.type)
            return _Result(value.home, x.type)

        leaves = (Tensor, TensorType)
        result = fn(*_mapped(stand_in, args, leaves), **_mapped(stand_in, kwargs, leaves))
        result = _mapped(result_of, result)
        record.check_kept()
    return record, Flow(record.calls, values), result


def _mapped(fn: Callable[[Any], Any], tree: Any, leaf: Any = Tensor) -> Any:
    """The tree with `fn` of each leaf in its place; what is neither leaf nor container stays."""
    if isinstance(tree, leaf):
        return fn(tree)
    if isinstance(tree, dict):
        return {name: _mapped(fn, each, leaf) for name, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        mapped = [_mapped(fn, each, leaf) for each in tree]
        if isinstance(tree, list):
            return mapped
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    return tree


def _leaves(result: Any) -> list[_Result]:
    found: list[_Result] = []
    _mapped(found.append, result, _Result)
    return found


def _with_tensors(tree: Any) -> Any:
    """The tree with tensors in place of numpy arrays."""
    return _mapped(asarray, tree, (np.ndarray, np.generic))


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of those over the same bytes the first only."""
    return list({id(x.root): x for x in reversed(tensors)}.values())[::-1]


_AT: Final = re.compile(r"at main, pc (\d+):")


def _name_line(error: Exception, planned: Planned) -> None:
    """Say of an error in a planned program which line of Python the call is from."""
    for note in getattr(error, "__notes__", ()):
        found = _AT.match(note)
        if found and int(found[1]) in planned.lines:
            error.add_note(f"recorded at {planned.lines[int(found[1])]}")
            return
