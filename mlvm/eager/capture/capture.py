"""`ml.capture`: a function of tensors as one planned, fused program.

    step = capture(train_step)
    for images, labels in batches:
        with batch:
            loss = step(images, labels)

In: a Python function and the arguments of a call. Out: its result, in the current arena.
A call goes from room to room: `call` matches it in C; else the guards' `Signatures` and `cache`
look its program up in Python; else `trace` runs the function on placeholders, and `step.compile`
makes a program of the recorded calls. `launch` launches it, and `trace.Outcome` makes the result.
A replay has the bits of the eager call, or raises; nothing that Python did besides is repeated.
Callers: users, from any thread. While a launch is prepared and sent, its scratch memory is locked.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from numbers import Integral
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
    overload,
)

from mlvm.arena.arena import Allocation, Arena, scope
from mlvm.arena.context import current
from mlvm.arena.planner import MOST_EFFORT, Plan
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    GradientError,
    ShutDown,
    StaleProgramError,
    brief,
)
from mlvm.core.program.program import Program
from mlvm.core.sizes import parse_size
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.capture.cache import CacheEntries, CacheEntry, free_numbers
from mlvm.eager.capture.call import KnownCall, as_tensors, known_call
from mlvm.eager.capture.comparing import open_sources_of, require_same, sources_of
from mlvm.eager.capture.guards.changing import Changing
from mlvm.eager.capture.guards.frozen import warn_of_frozen
from mlvm.eager.capture.guards.guard_set import ASKS_CLASS, GuardSet
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.capture.hoisted import is_shared
from mlvm.eager.capture.launch import Launch, ScalarInputs, Scratch, ScratchMemories
from mlvm.eager.capture.lengths import LengthSpec, OpenLength
from mlvm.eager.capture.opened import CallFamilies, OpenTrace, without_sizes
from mlvm.eager.capture.replacing import check_replace, replace_patterns
from mlvm.eager.capture.trace import TracedCall, trace
from mlvm.eager.recording import debug, recorder
from mlvm.eager.tensor.context import current_arena, default_arena
from mlvm.eager.tensor.number import is_same
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.wrapper import hinted
from mlvm.machines import residuals
from mlvm.machines.files import require_suffix, write_file
from mlvm.machines.native.extension import EXTENSION
from mlvm.show import html
from mlvm.show.picture import timeline
from mlvm.step.compile import Planned, compile_flow, no_loop
from mlvm.step.fusion import policy_of
from mlvm.step.hoist import Hoist
from mlvm.step.open_step import OpenStep
from mlvm.step.replacement import Replaced
from mlvm.step.saved import SavedStep

P = ParamSpec("P")
R = TypeVar("R")


class _Miss(NamedTuple):
    """Call that no program is for, with its signature and its key in the cache."""

    arena: Arena
    args: Any
    kwargs: Any
    signature: Signature
    key: Any

    def trace(self, fn: Any, free: Sequence[int], lengths: Sequence[OpenLength] = ()) -> TracedCall:
        return trace(fn, self.args, self.kwargs, self.arena, self.signature, free, lengths)


class Match(NamedTuple):
    """Program of a call.

    Attributes:
        entry, scalars: the program, and the numbers that the call passes to it.
        signature: the call's signature.
        args, kwargs: its arguments, with tensors instead of arrays.
        is_known: whether the program existed before the call.
        named: the open lengths that the call names.
    """

    entry: CacheEntry
    scalars: ScalarInputs
    signature: Signature
    args: Any
    kwargs: Any
    is_known: bool
    named: Sequence[OpenLength]


StepObserver: TypeAlias = "Callable[[Captured[..., Any], Callable[[Any, Any], Any], Any, Any], Any]"
step_observers: Final[list[StepObserver]] = []
"""Functions around calls of captured functions, of which the last one is called. It gets the
captured function, a function that runs the call, and the arguments."""


class Captured(Generic[P, R]):
    """A captured function: each call launches a compiled program; `capture` returns it.

    `signatures` is the number of programs. `program` and `plan` are those of the last call.
    Threads may share it: launches on one VM, and `close`, happen one after the other.

    A call raises what `capture` raises.

        >>> step = ml.capture(lambda x: x * x)
        >>> step(ml.ones(3)), step
        (Tensor([1., 1., 1.], f32[3]), <captured <lambda>, 1 program>)
    """

    save_repro: ClassVar[Callable[..., None]]
    """`step.save_repro(path, *args)`; see `mlvm.eager.runs.captured`, which adds it."""

    debug: ClassVar[Callable[..., None]]
    """`step.debug(*args)`; see `mlvm.eager.runs.captured`, which adds it."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        fuse: bool,
        recompute: bool,
        hoist: bool = True,
        replace: Mapping[Callable[..., Any], str] = types.MappingProxyType({}),
        lengths: Mapping[str, Any] | Literal[False] | None = None,
        at_most: Mapping[str, int] | None = None,
        check: int | None = None,
        memory: int | None = None,
        effort: int = 1,
    ) -> None:
        self._fn = fn
        self.fuse = fuse
        self.recompute = recompute
        self.hoist = hoist
        self.check = check
        self.effort = effort
        self._unchecked = 0  # calls since the last one that was compared
        self._replace = check_replace(replace)
        self._options = {
            "fuse": fuse,
            "recompute": recompute,
            "hoist": hoist,
            "replace": dict(replace),
            "lengths": lengths,
            "at_most": at_most,
            "check": check,
            "memory": memory,
            "effort": effort,
        }
        self.budget = memory
        self._spec = LengthSpec(fn, lengths, at_most)
        self._families = CallFamilies()
        self._entries = CacheEntries[KnownCall]()
        self._signatures = Signatures(fn)
        self._scratch = ScratchMemories(self)
        self._last: CacheEntry | None = None
        self._changing = Changing(fn)
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._title = getattr(fn, "__name__", "a captured function")
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if current().recorder is not None:  # it is called inside another captured function
            return self._fn(*args, **kwargs)
        if step_observers:
            return step_observers[-1](self, self._call, args, kwargs)  # type: ignore[no-any-return]
        return self._call(args, kwargs)  # type: ignore[no-any-return]

    def drain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it until its queue is closed and drained. The loop is the machine's; the results
        are those of the last call. It waits without the VM's lock, so a thread that fills the queue
        may launch on the same VM.

        Raises `ShutDown` if the queue has no element, and `ProgramError` unless the function takes
        one element, first of all.

        Refuses:
            drained.drain()  # ShutDown
            ml.capture(ml.sum).drain(v)  # ProgramError
        """
        return self._call(args, kwargs, loop=True)  # type: ignore[no-any-return]

    def _call(self, args: Any, kwargs: Any, *, loop: bool = False) -> Any:
        now = current()
        if now.tape is not None and taping() is not None:
            raise GradientError(
                f"{self!r} cannot be differentiated: capture the function that takes the gradient"
            )
        arena = now.arena or default_arena()
        entries = self._entries.known
        for known in () if loop else entries:
            bound = known.match(arena.vm, args, kwargs)
            if bound is not None:
                entry = known.entry
                if entry is self._last and known is not entries[0]:  # not just in turn with others
                    self._entries.know(known)
                self._last = entry
                return self._launch(entry, entry.variants.select(), arena, known.scratch, *bound)
        now = entries = known = bound = None  # type: ignore[assignment]  # they keep state alive
        arrays = args
        args, kwargs = as_tensors(self._signatures, arena.vm, args, kwargs)
        if args is not arrays:
            return self._call(args, kwargs, loop=loop)  # it may be known with these
        entry, scalars, signature, _, _, is_known, named = self._match(arena, args, kwargs)
        is_repeated, self._last = self._last is entry, entry
        if loop:
            result = self._launch_in_loop(entry, arena, scalars, signature)
            return entry.outcome.with_arguments(result, args, kwargs)
        launch, tensors, inputs = entry.variants.select(), signature.tensors, signature.inputs
        scratch = self._scratch.of(arena.vm)
        result = self._launch(entry, launch, arena, scratch, scalars, tensors, inputs)
        if entry.outcome.returns_arguments:
            result = entry.outcome.with_arguments(result, args, kwargs)
        may_repeat = is_known and (is_repeated or not named)
        if EXTENSION is not None and may_repeat and self.check is None:
            learnt = known_call(entry, signature, args, kwargs, scratch)
            if learnt is not None:
                self._entries.know(learnt)
        return result

    def match(self, args: Any, kwargs: Any) -> Match:
        """Return the program that a call with these arguments would launch; compile a missing one.

        No program is launched. Raises the errors that a call raises before its launch.
        """
        arena = scope() or default_arena()
        return self._match(arena, *as_tensors(self._signatures, arena.vm, args, kwargs))

    def _match(self, arena: Arena, args: Any, kwargs: Any) -> Match:
        while True:
            signature, key = self._signatures.of(arena.vm, args, kwargs)
            named = self._spec.axes(signature, args, kwargs) if self._spec.names else []
            match = self._entries.find(key, signature) or self._find_open(signature, key)
            if match is None:
                try:
                    with uncollected():
                        entry = self._compile(_Miss(arena, args, kwargs, signature, key), named)
                except recorder.RetryAfterCopy as error:
                    make_exclusive(error.x)
                    continue
                scalars = entry.bind_numbers(signature.numbers) or entry.scalars
            else:
                entry, scalars = match
                if self._is_checked() and self._differs(entry, arena, args, kwargs, signature):
                    continue
            if not (entry.launch.updates and entry.make_exclusive(signature.inputs)):
                return Match(entry, scalars, signature, args, kwargs, match is not None, named)

    def _launch(
        self,
        entry: CacheEntry,
        launch: Launch,
        arena: Arena,
        scratch: Scratch,
        scalars: ScalarInputs,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> Any:
        """Launch an entry's program on a call's tensors. Return the value of the call."""
        if not arena.grows:
            needed = launch.planned.plan.nbytes + entry.outcome.nbytes
            arena.require_room(needed, self._name)
        outcome = entry.outcome
        single = outcome.single
        types = outcome.types if launch.replay is not None and not scalars.arrays else None
        outputs = None if types is None else launch.replayed(arena, inputs, types)
        if outputs is None:
            outputs = [output.alloc(arena) for output in outcome.outputs]
            learning = None if types is None else arena
            launch.run(scratch, scalars, arena.vm, inputs, outputs, arena=learning)
        if single is not None:  # as the value below, sooner
            return outputs[single]
        return entry.value_of_call(arena.vm, scalars, tensors, inputs, outputs)

    def _launch_in_loop(
        self, entry: CacheEntry, arena: Arena, scalars: ScalarInputs, signature: Signature
    ) -> Any:
        """Launch an entry's program until its queue is drained."""
        launch = entry.variants.select(in_loop=True)
        if entry.outcome.rebound:
            raise CaptureError(
                f"{self!r} rebinds {entry.rebound_names()}, which a loop of the machine cannot do; "
                f"update it in place"
            )
        if len(launch.queues) > 1:
            raise no_loop(len(launch.queues))
        looped = None if launch.queues else launch.looped()
        outputs = [output.alloc(arena) for output in entry.outcome.outputs]
        run = partial(launch.run, self._scratch.of(arena.vm), scalars, arena.vm)
        run(signature.inputs, outputs)
        with suppress(ShutDown):
            while True:
                run(signature.inputs, outputs, program=looped)
        inputs, tensors = signature.inputs, signature.tensors
        return entry.value_of_call(arena.vm, scalars, tensors, inputs, outputs)

    def _is_checked(self) -> bool:
        """Return whether a call is one of those that trace the function again."""
        if self.check is None:
            return False
        self._unchecked += 1
        if self._unchecked < self.check:
            return False
        self._unchecked = 0
        return True

    def _differs(
        self, entry: CacheEntry, arena: Arena, args: Any, kwargs: Any, signature: Signature
    ) -> bool:
        """Trace a call again, and raise `StaleProgramError` unless the entry's program is what the
        function computes. Return True if the call may have another signature now."""

        def again(free: Sequence[int], lengths: Sequence[OpenLength] = ()) -> TracedCall:
            return trace(self.fn, args, kwargs, arena, signature, free, lengths)

        try:
            assert entry.sources is not None  # which each entry has
            require_same(self.fn, self._name, *entry.sources(signature, again))
        except recorder.RetryAfterCopy as error:
            make_exclusive(error.x)
            return True
        except CaptureError:
            raise
        except Exception as error:
            raise StaleProgramError(
                f"capture(check={self.check}): the program of {self._name!r} is out of date: the "
                f"function now raises {type(error).__name__}: {error}"
            ) from error
        return False

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return a method of the instance, if the function is a class's: each instance has its
        programs."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        return self._name

    @property
    def fn(self) -> Callable[P, R]:
        """The function that was captured."""
        return self._fn

    @property
    def signatures(self) -> int:
        """The number of programs: one for each signature that was traced."""
        return self._entries.closed + self._families.traces

    def explain(self) -> str:
        """Return why recent calls retraced, the first retrace first: a line for each, with the line
        of the call, and what differed from the most similar trace before.

            >>> step = ml.capture(lambda x, mode: x * len(mode))
            >>> for mode in ("a", "a", "abc"): _ = step(ml.ones(2), mode)
            >>> print(step.explain().partition("argument")[2])
             'mode' was 'a', and is 'abc'
        """
        return self._changing.explain(self._name)

    def __reduce__(self) -> Any:
        """Copies and pickles have the function and the options. They trace it at their first
        call."""
        owner: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in self._name.split("."):
            owner = getattr(owner, name, None)
        return self._name if owner is self else (_captured, (self.fn, self._options))

    @property
    def planned(self) -> Planned:
        """The last call's program with its plan. Raises `CaptureError` before the first call.

        Refuses:
            ml.capture(ml.sum).planned  # CaptureError
        """
        return self._last_entry().variants.last.planned

    @property
    def program(self) -> Program:
        """The last call's program. Raises `CaptureError` before the first call.

        Refuses:
            ml.capture(ml.sum).program  # CaptureError
        """
        return self.planned.program

    @property
    def plan(self) -> Plan:
        """The last call's plan: offsets of intermediates, and their bytes. With open lengths it is
        that of the bounds, and `used` has the bytes in use at the last lengths. Raises
        `CaptureError` before the first call.

        Refuses:
            ml.capture(ml.sum).plan  # CaptureError
        """
        planned = self.planned
        if self._last_entry().open_part is None:
            return planned.plan
        return planned.plan._replace(used=planned.recording().high_water)

    @property
    def replaced(self) -> dict[str, list[Replaced]]:
        """Calls of host functions that `replace` has put into the last call's program: a list of
        places by name. Raises `CaptureError` before the first call.

        Refuses:
            ml.capture(ml.sum).replaced  # CaptureError
        """
        return {name: list(places) for name, places in self._last_entry().replaced.items()}

    @property
    def residuals(self) -> int:
        """Bytes of the stack on which the current VM saves residuals of loops of unknown length,
        and of functions (see `mlvm.machines.residuals`)."""
        return residuals.stack_bytes(current_arena().vm)

    def plot(
        self, path: str | os.PathLike[str], *, lengths: Mapping[str, int] | None = None
    ) -> None:
        """Draw the scratch memory of the last call's program as SVG: live ranges by offset. With
        `lengths`, sizes by name, it is drawn as at these lengths, in the plan of the bounds.

        Raises `CaptureError` before the first call, and as `save` for a program that has no such
        lengths; `ShapeError` for lengths that it is not for, `ArgumentError` for a name that does
        not end in .svg, and `OSError`.

        Refuses:
            ml.capture(ml.sum).plot("step.svg")  # CaptureError
            ml.capture(ml.sum).plot("step.png")  # ArgumentError
            bounded.plot("step.svg", lengths={"n": 10})  # ShapeError
        """
        require_suffix(path, ".svg", "plot")
        title = f"Memory of {self._title.strip('_<>') or 'a captured function'}"
        planned = self.planned
        if lengths is not None and not isinstance(lengths, Mapping):
            raise ArgumentError(
                f'plot: expected lengths by name, such as {{"time": 12}}, got {brief(lengths)}'
            )
        if lengths:
            opened = self._open_part(self._last_entry(), planned)
            planned = opened.planned_at(opened.values_of(lengths))
            title += f" at {', '.join(f'{name} = {n}' for name, n in lengths.items())}"
        write_file(path, timeline(planned.recording(), title=title))

    def _repr_html_(self) -> str:
        """Return the plan of the last call's program, and its picture, for notebooks."""
        if self._last is None:
            return html.block(repr(self))
        planned = self.planned
        text = f"{self!r}: {self.plan}"
        picture = timeline(planned.recording(), title=repr(self))
        return html.picture(picture, text) + html.block(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last call's program, its plan and the present state to a file, which
        `python -m mlvm run` takes. The program is the one with hoisted values. That of a function
        captured with `lengths` and `at_most` is for all lengths that the last call's trace serves.

        Raises `CaptureError` before the first call, for a length without a bound, and if the last
        call's program is for its lengths alone; `ArgumentError` for a name that ends in ".onnx" or
        ".safetensors", and `OSError`.

        Refuses:
            ml.capture(ml.sum).save("step.mlvm")  # CaptureError
            ml.capture(ml.sum).save("step.onnx")  # ArgumentError
        """
        if Path(path).suffix in (".onnx", ".safetensors"):
            raise ArgumentError(
                f"{path}: Captured.save writes a planned step, such as step.mlvm; a function as "
                "ONNX is written by ml.onnx.save, and a model's tensors by ml.save"
            )
        entry = self._last_entry()
        launch, outcome = entry.launch, entry.outcome
        planned = launch.planned
        if launch.queues or planned.takes:
            raise CaptureError(f"{self!r} takes from a queue, which no file can hold")
        if entry.fields or outcome.rebound:
            raise CaptureError(f"{self!r} rebinds {entry.rebound_names()}, which no file can hold")
        returned = [outcome.results[number] for _, number in outcome.named_results()]
        results = [x.home.location(x.type) for x in returned]
        states: list[Allocation] = list(launch.states)
        if launch.hoisted is not None:
            with launch.hoisted.vm.lock:
                launch.hoisted.refresh()
            planned, results, numbers = planned.with_states_used(results)
            states = [launch.states[number] for number in numbers]
        outputs = tuple([output.type for output in outcome.outputs])
        values = tuple(map(values_of, states))
        opened = self._open_part(entry, planned, states) if self._spec.names else None
        step = SavedStep(planned, entry.input_types, outputs, tuple(results), values, opened)
        write_file(path, step.to_bytes())

    def _open_part(
        self, entry: CacheEntry, planned: Planned, states: Sequence[Allocation] = ()
    ) -> OpenStep:
        """Return the open part of a step with these states. Raises `CaptureError` if it has
        none."""
        if entry.open_part is None:
            types = ", ".join(map(str, entry.input_types))
            if not self._spec.names:
                why = 'name open axes, as in ml.capture(step, lengths={"x": ("n",)})'
            elif self._replace or debug.is_watched(entry.vm):
                used = "replace= is" if self._replace else "ml.debug is"
                why = f"{used} used; capture it without, or with lengths=False"
            elif any(n < 2 for type in entry.input_types for n in type.shape):
                why = "sizes of 0 and 1 have programs by themselves; call it at other lengths"
            else:
                why = (
                    "the compiler needed their values, or a tensor is larger than at the bounds; "
                    "call it at other lengths, or capture it with lengths=False"
                )
            raise CaptureError(
                f"the last program of {self!r}, of ({types}), is for its lengths alone: {why}"
            )
        opened = entry.open_part(entry, planned, states)
        closed = self._spec.lengths - {each.name for each in opened.lengths}
        if closed:
            raise CaptureError(
                f"the last program of {self!r} has {', '.join(sorted(closed))} closed, as it is at "
                f"0 and 1, where Python code needs its value, and where two arguments share memory"
            )
        empty = [each.name for each in opened.lengths if not opened.values[each.place]]
        if empty:
            raise CaptureError(
                f"the last call of {self!r} has length 0 of {', '.join(empty)}; call it at others"
            )
        return opened

    def close(self) -> None:
        """Wait for a call that runs now, give the scratch memory back, and forget the programs. A
        later call traces again."""
        self._entries.clear()
        self._families.clear()
        self._signatures.clear()
        self._changing = Changing(self.fn)
        self._last = None
        self._scratch.release()

    def __repr__(self) -> str:
        n = self.signatures
        return f"<captured {self._name}, {n} program{'s' * (n != 1)}>"

    def _last_entry(self) -> CacheEntry:
        if self._last is None:
            raise CaptureError(f"{self!r} has not been called yet")
        return self._last

    def _compile(self, miss: _Miss, named: Sequence[OpenLength]) -> CacheEntry:
        """Trace the call and compile a program, with open lengths if it has some. Later calls find
        it too, unless the function has changed its own signature: then they trace again."""
        guards = miss.signature.guards
        self._forget_lapsed(guards)
        recording = self._changing.describe(miss.arena.vm, guards, miss.args, miss.kwargs)
        entry = self._compile_open(miss, named) or self._compile_closed(miss)
        warn_of_frozen(guards, self._name)
        self._changing.add(recording, self._name)
        return entry

    def _forget_lapsed(self, guards: GuardSet) -> None:
        """Forget programs of state that is gone. Only a call that traces does so."""
        self._signatures.keep_only(guards)
        self._entries.release_known()
        lapsed = self._entries.forget_lapsed()
        if lapsed:
            self._signatures.forget_modules()
            self._drop(lapsed)

    def _compile_closed(self, miss: _Miss) -> CacheEntry:
        """Trace the call and compile a program. Numbers that changed between calls are left
        free."""
        changes = self._entries.changes_of(miss.key, miss.signature)
        free = free_numbers(changes, miss.signature)
        try:
            call = miss.trace(self.fn, free)
        except Exception:
            if not free:
                raise
            changes.specialised.update(free)  # an op may take a placeholder for no number
            call = miss.trace(self.fn, ())
        changes.specialised.update([free[i] for i in call.numbers.fixed()])
        entry = self._entry(call, miss.signature)
        key = self._steady_key(call, miss)
        if key is not None:
            self._drop(self._entries.add(key, miss.signature, entry))
        return entry

    def _compile_open(self, miss: _Miss, named: Sequence[OpenLength]) -> CacheEntry | None:
        """Trace the call with open lengths, if it has some, and compile a program."""
        signature, key = miss.signature, miss.key
        if not self._spec.is_allowed or ASKS_CLASS in signature.guards.names:
            return None
        lengths = self._families.note(key, signature, named)
        if not lengths:
            return None
        changes = self._entries.changes_of(without_sizes(key), signature)
        changes.changed.update(self._families.changed_numbers(key, signature))
        free = free_numbers(changes, signature)
        try:
            call = miss.trace(self.fn, free, lengths)
        except Exception:  # what takes an open length for no int; the plain trace raises the rest
            self._families.close(key, (axis for each in lengths for axis in each.axes))
            changes.specialised.update(free)
            return None
        changes.specialised.update([free[i] for i in call.numbers.fixed()])
        opened = OpenTrace(call, lengths, signature)
        entry = self._entry_at(opened, signature, opened.present)
        if entry is None:
            return None
        steady = self._steady_key(call, miss)
        if steady is not None:
            self._families.move(key, steady)
            self._families.add(steady, opened)
            self._drop(self._entries.add(steady, signature, entry))
            self._drop(self._entries.forget_opened(self._families.take_dropped()))
        opened.warn_of_pins(self._name, {axis for each in named for axis in each.axes})
        return entry

    def _steady_key(self, call: TracedCall, miss: _Miss) -> Any:
        """Return the key of the calls that the program of a trace is for; None if the trace has
        changed the signature of its own call. Fields that it rebinds count as arguments from now
        on, and children of Modules that it has not read do not count any more."""
        if call.outcome.rebound:
            self._signatures.count_as_arguments(field for field, _ in call.outcome.rebound)
            self._entries.known = []
        before = miss.signature
        is_less = self._signatures.note_flattened(before.guards, call.flattened)

        def present(*, reduced: bool) -> tuple[Any, bool]:
            now, key = self._signatures.of(miss.arena.vm, miss.args, miss.kwargs, reduced=reduced)
            same = len(now.numbers) == len(before.numbers)
            same = same and all(map(is_same, now.numbers, before.numbers))
            return key, same and list(map(id, now.inputs)) == list(map(id, before.inputs))

        key, same = present(reduced=not is_less)
        if not same or key != miss.key:
            return None
        if is_less:
            key, same = present(reduced=True)
        return key if same else None

    def _entry(self, call: TracedCall, signature: Signature) -> CacheEntry:
        """Compile recorded calls, with host functions in place of patterns."""
        sources = partial(sources_of, call)
        replaced: dict[str, list[Replaced]] = {}
        if self._replace:
            states = call.record.outside.states
            flow, replaced = replace_patterns(self._replace, call.flow, states, self._name)
            call = call._replace(flow=flow)
        compiler, hoist = self._compiler(call)
        compiled = partial(compiler, call.flow)
        entry = CacheEntry(compiled(hoist=hoist), call, signature, self._title, compiled)
        entry.replaced = replaced
        if self.check is not None:
            entry.sources = partial(sources, entry)
        return entry

    def _compiler(self, call: TracedCall) -> tuple[Callable[..., Planned], Hoist | None]:
        """Return the function that compiles flows for the call's VM, and what it may hoist."""
        is_plain = debug.is_watched(call.record.vm)  # then each call is checked
        compiler = partial(
            compile_flow,
            fuse=self.fuse and not is_plain,
            recompute=self.recompute and not is_plain,
            policy=policy_of(call.record.vm),
            budget=self.budget,
            effort=self.effort,
        )
        return compiler, hoist_of(call) if self.hoist and not is_plain else None

    def _drop(self, forgotten: Sequence[CacheEntry]) -> None:
        """Give the handles of forgotten programs back."""
        for each in forgotten:
            each.variants.drop(self._scratch.of(each.vm), each.vm)

    def _find_open(self, signature: Signature, key: Any) -> tuple[CacheEntry, ScalarInputs] | None:
        """Return a new entry of a trace with open lengths that is valid for the call, if there is
        one."""
        for opened in self._families.of(key):
            lengths = opened.lengths(signature)
            if lengths is None:
                continue
            with uncollected(), opened.lock:
                entry = self._entry_at(opened, signature, lengths)
                scalars = None if entry is None else entry.bind(signature)
                if entry is None or scalars is None:
                    continue
            self._drop(self._entries.add(key, signature, entry))
            return entry, scalars
        return None

    def _entry_at(
        self, opened: OpenTrace, signature: Signature, lengths: tuple[int, ...]
    ) -> CacheEntry | None:
        """Make the entry for a call of these lengths; None where a guard does not hold."""
        entry = self._make_entry_at(opened, signature, lengths)
        if entry is not None:
            entry.opened = opened
            if self.check is not None:
                entry.sources = partial(open_sources_of, opened, lengths)
        return entry

    def _make_entry_at(
        self, opened: OpenTrace, signature: Signature, lengths: tuple[int, ...]
    ) -> CacheEntry | None:
        values = opened.values(signature, lengths)
        if values is None:
            return None
        call, template = opened.call, opened.template
        if not self._replace and not debug.is_watched(call.record.vm):
            compiler, hoist = self._compiler(call)
            plans = opened.plans(lengths, values)
            if not plans:
                opened.plan(lengths, values, partial(compiler, hoist=hoist))
                values = opened.values(signature, lengths)
                if values is None:
                    return None
                plans = opened.plans(lengths, values)

            def compile_unhoisted(ahead: int) -> Planned:
                return compiler(template.flow(values), ahead=ahead)

            for plan in plans:
                entry = plan.at(values, call, signature, compile_unhoisted)
                if entry is not None:
                    return entry
                planned = plan.template.at(values)
                if planned is not None:
                    parts = planned, call.at(values), signature, self._title, compile_unhoisted
                    entry = CacheEntry(*parts)
                    entry.open_part = partial(opened.open_part, plan.template, plan.guards)
                    if plan.entry is None:
                        plan.begin(entry, opened.numbers, values)
                    return entry
        return self._entry(call.at(values, template.flow(values)), signature)


def _captured(fn: Any, options: Any) -> Any:
    return Captured(fn, **options)


@overload
def capture(
    fn: Callable[P, R],
    /,
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = ...,
    lengths: Mapping[str, Any] | Literal[False] | None = ...,
    at_most: Mapping[str, int] | None = ...,
    check: int | None = ...,
    memory: int | str | None = ...,
    effort: int = ...,
) -> Captured[P, R]: ...
@overload
def capture(
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = ...,
    lengths: Mapping[str, Any] | Literal[False] | None = ...,
    at_most: Mapping[str, int] | None = ...,
    check: int | None = ...,
    memory: int | str | None = ...,
    effort: int = ...,
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
    lengths: Mapping[str, Any] | Literal[False] | None = None,
    at_most: Mapping[str, int] | None = None,
    check: int | None = None,
    memory: int | str | None = None,
    effort: int = 1,
) -> Any:
    """Compile `fn` into one program at its first call; later calls replay the program. It may be
    a whole step, with gradients and an optimizer's update.

    It is a decorator, `@capture`, and with options one too, `@capture(fuse=False)`.

    Arguments are trees of tensors, of numpy arrays, which become tensors, and of anything else. An
    array of f64 is in the widest float of the call's tensors, where that is narrower. A call
    retraces if a tensor's type, a non-tensor value or a Module matches no earlier call. So does a
    call after a change of state that the function reaches, such as an array, which is a constant
    of the program. A changed Python number among the arguments or in a field of a Module or an
    optimizer retraces once. From then on it is an input of the program, unless Python code needs
    its value. Tensors that the function reaches are used where they lie, and updated in place.
    Random keys advance. Each call allocates its results in the current arena, or in that of a
    field that it binds to them. Temporaries lie in scratch memory of the captured function; `plan`
    has its size.

    With `fuse`, chains of elementwise ops run block by block, and intermediates within a chain need
    no memory. With `recompute`, cheap values are computed again for the backward pass instead of
    being saved. With `hoist`, values that depend only on tensors that the step does not update,
    such as a weight in another dtype, are computed once and kept in an arena. They are computed
    again after any write to such a tensor; if one is written before each call, a second program
    computes them in the step. `plan.ahead` is their size in bytes: at most four times that of the
    tensors that they depend on. None of these options changes a bit of the result.

    With `replace`, `{pattern: name}`, the host function of that name is called where the function
    computes the pattern, a Python function of tensors such as `lambda x, w, b: ml.gelu(x @ w + b)`.
    It takes the pattern's operands and pushes its results. `step.replaced` has the places; a
    `ReplacementWarning` names a pattern that fits nowhere. See docs/functions.md.

    With `lengths`, a name or None for each axis of a parameter's tensors, as in
    `{"tokens": (None, "time")}`, one trace and one plan serve all lengths of a name. An axis
    without a name is opened at the third size that calls have; `lengths=False` has a program for
    each size. Python computes with a length as with any number. A comparison, as in an `if`, is a
    guard. Where Python needs the value itself, each value has its program. `at_most` has bounds of
    lengths by name: memory is planned for these, or else doubles. See docs/lengths.md.

    With `check=n`, every n-th call that has a program traces the function again, and compares it
    with the program that is about to run. Where they differ, an error names the line and the value
    that changed. Use `check=1` first when results look old: it finds any read that no guard
    compares, for the time of a trace. Without it, calls cost nothing more.

    With `memory`, a size such as `"64 MiB"` or a number of bytes, the plan with its hoisted values
    needs at most that: `step.plan.nbytes + step.plan.ahead`. Values are computed again instead of
    being saved for the backward pass, where that takes the least time by an estimate. The results
    have the same bits. A larger size never gives a slower program by the estimate. With open
    lengths it holds at the bounds. Code inside loops and branches is not changed. See
    docs/budgets.md.

    With `effort=n`, the planner of scratch memory may visit n times as many nodes of its search for
    a smaller plan, which needs up to n times its time. It stops when `plan.nbytes` is
    `plan.lower_bound`.

    The function may rebind a Module's field to another tensor of the same type. Then each call
    rebinds it, to a tensor in the arena of the one before.

    Warns with `RecompilationWarning`, once, when it records its 8th program, and says what changed;
    with `FrozenWarning` for a line that reads a clock or draws from numpy's generators.
    Raises `CaptureError` if the function reaches an object whose state is hidden, such as an
    iterator. Raises it, with the line, if the function reads a tensor's value, computes on another
    VM, or calls an op whose result's shape depends on values. Raises it also for a tensor of the
    trace that is kept in any place but the result or such a field.
    Raises `GradientError` inside a differentiated function, and `ArgumentError` for an option that
    is no bool and a `replace` that is no such mapping. It raises that also for a `memory` that is
    no size and an `effort` that is no int from 1 to 2**32. Raises `BudgetError` before anything
    runs if no program is found that needs so little memory. Raises `ShapeError` for a length above
    its bound and two sizes of one name, and any error of the function.

        >>> step = ml.capture(lambda x: ml.sum(x * x))
        >>> step(ml.ones(3)), step(ml.zeros(3))
        (Tensor(3., f32[]), Tensor(0., f32[]))

    Refuses:
        ml.capture(hoist="no")  # ArgumentError
        ml.capture(memory="64 blocks")  # ArgumentError
        ml.capture(lambda x: ml.sum(ml.sort(x)), memory=1)(v)  # BudgetError
        ml.capture(effort=0)  # ArgumentError
        ml.capture(lambda x: float(x))(ml.ones(()))  # CaptureError
        ml.grad(ml.capture(ml.sum))(v)  # GradientError
        ml.capture(ml.sum, lengths={"x": ("n",)}, at_most={"n": 1})(v)  # ShapeError
    """
    require_bools("capture", fuse=fuse, recompute=recompute, hoist=hoist)
    is_count = isinstance(check, Integral) and not isinstance(check, bool) and check > 0
    if check is not None and not is_count:
        raise ArgumentError(
            f"capture: expected check as an int of 1 or more, or None, got {brief(check)}"
        )
    if type(effort) is not int or not 1 <= effort <= MOST_EFFORT:
        raise ArgumentError(
            f"capture: expected effort as an int from 1 to {MOST_EFFORT}, got {brief(effort)}"
        )
    options: Any = {"fuse": fuse, "recompute": recompute, "hoist": hoist, "replace": replace}
    options |= {"lengths": lengths, "at_most": at_most, "check": check and int(check)}
    budget = None if memory is None else parse_size(memory, "capture(memory=)")
    options |= {"memory": budget, "effort": effort}
    if fn is None:
        return partial(capture, **options)
    if not callable(fn):
        raise CaptureError(f"capture: expected a function, got {fn!r}")
    return Captured(fn, **options)


def require_bools(name: str, **options: object) -> None:
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}: expected a bool as {option}, got {brief(value)}")


def hoist_of(call: TracedCall) -> Hoist | None:
    """Return the limits of hoisting: values that depend on a call's numbers may not be hoisted."""
    if is_shared(call.record.vm):
        return None
    scalars = {id(x) for x in call.numbers.tensors.values()}
    states = call.record.outside.states
    return Hoist(len(states), {i for i, x in enumerate(states) if id(x) in scalars})
