"""`ml.capture`: compile a function of tensors into one planned, fused program.

    step = capture(train_step)
    for images, labels in batches:
        with batch:
            loss = step(images, labels)

In: a Python function and the arguments of a call. Out: the result, in the current arena.

A call passes through these modules: `call` matches it in C. If that fails, the guards' `Signatures`
and `cache` look up the program in Python. On a miss, `trace` runs the function on placeholders, and
`step.compile` compiles the recorded calls. `launch` launches the program, and `trace.CallOutcome`
builds the result.

Invariant: a replay computes the same bits as the eager call, or raises. Other side effects of the
Python code are not repeated.

Callers: users, from any thread. The scratch memory is locked while a launch is prepared and sent.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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
    Protocol,
    TypeVar,
    overload,
)

from mlvm.arena.arena import Allocation, Arena, scope
from mlvm.arena.context import current
from mlvm.arena.planner import Plan, check_effort
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    GradientError,
    QueueClosedError,
    StaleProgramError,
    brief,
)
from mlvm.core.program.program import Program
from mlvm.core.sizes import parse_size
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.capture.cache import CacheEntries, CacheEntry, free_numbers
from mlvm.eager.capture.call import KnownCall, as_tensors, known_call
from mlvm.eager.capture.comparing import open_sources_of, require_same, sources_of
from mlvm.eager.capture.dynamic_axes import LengthSpec, OpenLength
from mlvm.eager.capture.guards.changing import Changing
from mlvm.eager.capture.guards.frozen import refuse_draws, warn_of_frozen
from mlvm.eager.capture.guards.guard_set import ASKS_CLASS, GuardSet
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.capture.hoisted import is_shared
from mlvm.eager.capture.launch import Launch, ScalarInputs, Scratch, ScratchMemories
from mlvm.eager.capture.opened import CallFamilies, OpenTrace, without_sizes
from mlvm.eager.capture.replacing import check_replace, replace_patterns
from mlvm.eager.capture.trace import TracedCall, Undone, always, if_failed, if_refused, trace
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
from mlvm.machines.old_keywords import old_keywords
from mlvm.show import html
from mlvm.show.picture import timeline
from mlvm.step.blocks import with_blocks
from mlvm.step.compile import Planned, compile_flow, no_loop
from mlvm.step.fusion import policy_of
from mlvm.step.hoist import Hoist
from mlvm.step.open_step import OpenStep
from mlvm.step.replacement import Replaced
from mlvm.step.saved import SavedStep

P = ParamSpec("P")
R = TypeVar("R")


class _Miss(NamedTuple):
    """A call that has no matching program, with the signature and the key in the cache."""

    arena: Arena
    args: Any
    kwargs: Any
    signature: Signature
    key: Any
    undone: Undone | None

    def trace(
        self,
        fn: Any,
        free: Sequence[int],
        lengths: Sequence[OpenLength] = (),
        undone: Undone = if_failed,
    ) -> TracedCall:
        """Trace the call.

        Raises `CaptureError` if the call needs the value of an argument that is a type."""
        args, kwargs, signature = self.args, self.kwargs, self.signature
        undone = self.undone or undone
        observer = step_observer()
        with nullcontext() if observer is None else observer.noting() as notes:
            call = trace(fn, args, kwargs, self.arena, signature, free, lengths, undone)
        call = call._replace(notes=notes)
        types = call.record.placeholders.types
        calls = with_blocks(call.flow.calls if types else ())
        uses = [x for each in calls for x in (*each.ins, *each.outs)]
        for home in [*[x.value.home for x in uses], *[x.home for x in call.outcome.results]]:
            if home is not None and home.role == "input" and home.index in types:
                raise CaptureError(
                    f"a captured function: expected tensors, got the type {home.type}; types are "
                    f"for ml.measure, as in ml.measure(step, x)"
                )
        return call


class ProgramMatch(NamedTuple):
    """The program that matches a call, with the inputs for it.

    Attributes:
        entry, scalars: the program, and the numbers that the call passes to it.
        signature: the call's signature.
        args, kwargs: the arguments, with numpy arrays converted to tensors.
        is_known: whether the program existed before the call.
        named: the dynamic sizes that the user has named for this call.
    """

    entry: CacheEntry
    scalars: ScalarInputs
    signature: Signature
    args: Any
    kwargs: Any
    is_known: bool
    named: Sequence[OpenLength]


class StepObserver(Protocol):
    """Observer of the calls of captured functions and eager steps."""

    def observe(self, captured: Any, args: Any, kwargs: Any, fn: Any = None) -> Any:
        """Run a captured function, or `fn` if it is given; return the result."""

    def noting(self) -> AbstractContextManager[object]:
        """Return the block around a trace, with the notes for the `TracedCall`."""


step_observers: Final[list[StepObserver]] = []
"""The active observer, if there is one."""


def step_observer() -> StepObserver | None:
    """Return the active observer, which another thread may remove at any time."""
    return next(iter(step_observers), None)


class LaunchObserver(Protocol):
    """Function that runs the launch of a call, and returns the result.

    It gets the program, the inputs, the Python numbers, and the match unless C matched the call.
    """

    def __call__(
        self,
        entry: CacheEntry,
        inputs: Sequence[Tensor],
        numbers: Sequence[float],
        match: ProgramMatch | None,
        launch: Callable[[], Any],
    ) -> Any: ...


class Captured(Generic[P, R]):
    """A captured function: each call launches a compiled program; `capture` returns it.

    `signatures` is the number of programs. `program` and `plan` describe the last call. Several
    threads may share a captured function: launches on one VM, and `close`, run one after the other.

    A call raises the errors of `capture`.

        >>> step = ml.capture(lambda x: x * x)
        >>> step(ml.ones(3)), step
        (Tensor([1., 1., 1.], f32[3]), <captured <lambda>, 1 program>)
    """

    save_repro: ClassVar[Callable[..., None]]
    """Save a program that reproduces this call: see `mlvm.eager.runs.captured`, which adds the
    method."""

    debug: ClassVar[Callable[..., None]]
    """Debug this call step by step: see `mlvm.eager.runs.captured`, which adds the method."""

    @old_keywords("Captured")
    def __init__(
        self,
        fn: Callable[P, R],
        *,
        fuse: bool,
        recompute: bool,
        hoist: bool = True,
        replace: Mapping[Callable[..., Any], str] = types.MappingProxyType({}),
        dynamic_axes: Mapping[str, Any] | Literal[False] | None = None,
        max_sizes: Mapping[str, int] | None = None,
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
        self._unchecked = 0  # calls since the last compared call
        self._replace = check_replace(replace)
        self._options: dict[str, Any] = {
            "fuse": fuse,
            "recompute": recompute,
            "hoist": hoist,
            "replace": dict(replace),
            "dynamic_axes": dynamic_axes,
            "max_sizes": max_sizes,
            "check": check,
            "memory": memory,
            "effort": effort,
        }
        self.budget = memory
        self.spec = LengthSpec(fn, dynamic_axes, max_sizes)
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
        if current().recorder is not None:  # called inside an outer captured function
            return self._fn(*args, **kwargs)
        if step_observers and (observer := step_observer()) is not None:
            return observer.observe(self, args, kwargs)  # type: ignore[no-any-return]
        return self.run(args, kwargs)  # type: ignore[no-any-return]

    def drain(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the program until the queue is closed and drained.

        The VM executes the loop and returns the result of the last iteration. It waits without
        holding the VM's lock, so the thread that fills the queue may launch programs on the same
        VM.

        Raises `QueueClosedError` if the queue has no element, and `ProgramError` unless the
        function takes exactly one element from one queue, before anything else.

        Invalid calls:
            drained.drain()  # QueueClosedError
            ml.capture(ml.sum).drain(v)  # ProgramError
        """
        return self.run(args, kwargs, loop=True)  # type: ignore[no-any-return]

    def run(
        self, args: Any, kwargs: Any, *, loop: bool = False, around: LaunchObserver | None = None
    ) -> Any:
        """Run a call; `around` runs the launch, after the trace if the call is traced."""
        now = current()
        if now.tape is not None and taping() is not None:
            raise GradientError(
                f"{self!r} cannot be differentiated: capture the function that takes the gradient"
            )
        arena = now.arena or default_arena()
        entries = self._entries.matchers
        for matcher in () if loop else entries:
            bound = matcher.match(arena.vm, args, kwargs)
            if bound is not None:
                entry = matcher.entry
                if entry is self._last and matcher is not entries[0]:  # entries do not alternate
                    self._entries.know(matcher)
                self._last = entry
                launch = entry.variants.select()
                if around is not None:
                    run = partial(self._launch, entry, launch, arena, matcher.scratch, *bound)
                    return around(entry, bound[2], bound[0].args, None, run)
                return self._launch(entry, launch, arena, matcher.scratch, *bound)
        now = entries = matcher = bound = None  # type: ignore[assignment]  # they keep state alive
        arrays = args
        args, kwargs = as_tensors(self._signatures, arena.vm, args, kwargs)
        if args is not arrays:
            return self.run(args, kwargs, loop=loop, around=around)  # the call may match now
        match = self._match(arena, args, kwargs)
        entry, scalars, signature, _, _, is_known, named = match
        is_repeated, self._last = self._last is entry, entry
        if loop:
            result = self._launch_in_loop(entry, arena, scalars, signature)
            return entry.outcome.with_arguments(result, args, kwargs)
        launch, tensors, inputs = entry.variants.select(), signature.tensors, signature.inputs
        scratch = self._scratch.of(arena.vm)
        run = partial(self._launch, entry, launch, arena, scratch, scalars, tensors, inputs)
        if entry.outcome.returns_arguments:
            run = partial(_with_arguments, run, entry, args, kwargs)
        result = run() if around is None else around(entry, inputs, signature.numbers, match, run)
        may_repeat = is_known and (is_repeated or not named)
        if EXTENSION is not None and may_repeat and self.check is None:
            learnt = known_call(entry, signature, args, kwargs, scratch)
            if learnt is not None:
                self._entries.know(learnt)
        return result

    def match(self, args: Any, kwargs: Any) -> ProgramMatch:
        """Return the program that a call with these arguments would launch; compile it if needed.

        No program is launched, and changes that a trace makes are undone. Raises the errors that a
        call raises before the launch.
        """
        arena = scope() or default_arena()
        args, kwargs = as_tensors(self._signatures, arena.vm, args, kwargs)
        return self._match(arena, args, kwargs, undone=always)

    def _match(
        self, arena: Arena, args: Any, kwargs: Any, undone: Undone | None = None
    ) -> ProgramMatch:
        while True:
            signature, key = self._signatures.of(arena.vm, args, kwargs)
            named = self.spec.axes(signature, args, kwargs) if self.spec.names else []
            match = self._entries.find(key, signature) or self._find_open(signature, key)
            if match is None:
                try:
                    with uncollected():
                        miss = _Miss(arena, args, kwargs, signature, key, undone)
                        entry = self._compile(miss, named)
                except recorder.RetryAfterCopy as error:
                    make_exclusive(error.x)
                    continue
                except Exception as error:
                    self._changing.failure = f"{type(error).__name__}: {error}"
                    raise
                scalars = entry.bind_numbers(signature.numbers) or entry.scalars
            else:
                entry, scalars = match
                if self._is_checked() and self._differs(entry, arena, args, kwargs, signature):
                    continue
            if not (entry.launch.updates and entry.make_exclusive(signature.inputs)):
                return ProgramMatch(
                    entry, scalars, signature, args, kwargs, match is not None, named
                )

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
        """Launch an entry's program with the tensors of a call; return the value of the call."""
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
        if single is not None:  # faster than the general case below
            return outputs[single]
        if outcome.row is not None:
            return type(outcome.tree)([outputs[i] for i in outcome.row])
        return entry.value_of_call(arena.vm, scalars, tensors, inputs, outputs)

    def _launch_in_loop(
        self, entry: CacheEntry, arena: Arena, scalars: ScalarInputs, signature: Signature
    ) -> Any:
        """Launch an entry's program repeatedly until the queue is drained."""
        launch = entry.variants.select(in_loop=True)
        if entry.outcome.rebound:
            raise CaptureError(
                f"drain: {self!r} rebinds {entry.rebound_names()}, which a loop of the VM cannot "
                f"repeat; update it in place"
            )
        if len(launch.queues) > 1:
            raise no_loop(len(launch.queues))
        looped = None if launch.queues else launch.looped()
        outputs = [output.alloc(arena) for output in entry.outcome.outputs]
        run = partial(launch.run, self._scratch.of(arena.vm), scalars, arena.vm)
        run(signature.inputs, outputs)
        with suppress(QueueClosedError):
            while True:
                run(signature.inputs, outputs, program=looped)
        inputs, tensors = signature.inputs, signature.tensors
        return entry.value_of_call(arena.vm, scalars, tensors, inputs, outputs)

    def _is_checked(self) -> bool:
        """Return whether `check=` applies to this call, so that the function is traced again."""
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
        """Trace a call again, and raise `StaleProgramError` if the program is out of date.

        Return True if the signature of the call may have changed."""

        def again(free: Sequence[int], lengths: Sequence[OpenLength] = ()) -> TracedCall:
            return trace(self.fn, args, kwargs, arena, signature, free, lengths, always)

        try:
            assert entry.sources is not None  # set by `check=` for each entry
            require_same(self.fn, self._name, *entry.sources(signature, again))
        except recorder.RetryAfterCopy as error:
            make_exclusive(error.x)
            return True
        except CaptureError:
            raise
        except Exception as error:
            raise StaleProgramError(
                f"capture(check={self.check}): the program of {self._name!r} is out of date: the "
                f"function now raises {type(error).__name__}: {error}; capture it again"
            ) from error
        return False

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return a bound method; each instance of the class gets separate programs."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        return self._name

    @property
    def fn(self) -> Callable[P, R]:
        """The original Python function."""
        return self._fn

    @property
    def signatures(self) -> int:
        """The number of compiled programs: one per traced signature."""
        return self._entries.closed + self._families.traces

    def explain(self) -> str:
        """Return why recent calls were retraced, as one line per retrace, oldest first.

        Each line contains the line of the call, and the difference to the most similar earlier
        trace.

            >>> step = ml.capture(lambda x, mode: x * len(mode))
            >>> for mode in ("a", "a", "abc"): _ = step(ml.ones(2), mode)
            >>> print(step.explain().partition("argument")[2])
             'mode' was 'a', and is 'abc'
        """
        return self._changing.explain(self._name)

    def __reduce__(self) -> Any:
        """Copy or pickle the function and the options, without the programs.

        A copy traces the function at the first call."""
        owner: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in self._name.split("."):
            owner = getattr(owner, name, None)
        return self._name if owner is self else (partial(Captured, **self._options), (self.fn,))

    @property
    def planned(self) -> Planned:
        """The program of the last call, with the plan.

        Raises `CaptureError` before the first call.

        Invalid calls:
            ml.capture(ml.sum).planned  # CaptureError
        """
        return self._last_entry().variants.last.planned

    @property
    def program(self) -> Program:
        """The program of the last call.

        Raises `CaptureError` before the first call.

        Invalid calls:
            ml.capture(ml.sum).program  # CaptureError
        """
        return self.planned.program

    @property
    def plan(self) -> Plan:
        """The memory plan of the last call: offsets of intermediates, and sizes in bytes.

        With dynamic sizes it is the plan for the bounds, and `used` is the number of bytes in
        use at the last sizes. Raises `CaptureError` before the first call.

        Invalid calls:
            ml.capture(ml.sum).plan  # CaptureError
        """
        planned = self.planned
        if self._last_entry().open_part is None:
            return planned.plan
        return planned.plan._replace(used=planned.recording().high_water)

    @property
    def replaced(self) -> dict[str, list[Replaced]]:
        """Calls of host functions that `replace` inserted into the last call's program, by name.

        Each name maps to a list of calls. Raises `CaptureError` before the first call.

        Invalid calls:
            ml.capture(ml.sum).replaced  # CaptureError
        """
        return {name: list(places) for name, places in self._last_entry().replaced.items()}

    @property
    def residuals(self) -> int:
        """The size in bytes of the current VM's residual stack.

        The VM saves residuals on this stack for functions, and for loops with an unknown number of
        iterations (see `mlvm.machines.residuals`)."""
        return residuals.stack_bytes(current_arena().vm)

    @old_keywords("Captured.plot")
    def plot(self, path: str | os.PathLike[str], *, sizes: Mapping[str, int] | None = None) -> None:
        """Draw the scratch memory of the last call's program as SVG: offsets and live ranges.

        With `sizes`, a dict of sizes by name, the plan for the bounds is drawn as it is used at
        these sizes.

        Raises `CaptureError` before the first call, and if the program does not have these dynamic
        sizes; `ShapeError` for sizes that the program does not support; `ArgumentError` for a
        file name that does not end in .svg; and `OSError`.

        Invalid calls:
            ml.capture(ml.sum).plot("step.svg")  # CaptureError
            ml.capture(ml.sum).plot("step.png")  # ArgumentError
            bounded.plot("step.svg", sizes={"n": 10})  # ShapeError
        """
        require_suffix(path, ".svg", "plot")
        title = f"Memory plan of {self._title.strip('_<>') or 'a captured function'}"
        planned = self.planned
        if sizes is not None and not isinstance(sizes, Mapping):
            raise ArgumentError(
                f'plot: expected sizes by name, such as {{"time": 12}}, got {brief(sizes)}'
            )
        if sizes:
            opened = self._open_part(self._last_entry(), planned)
            planned = opened.planned_at(opened.values_of(sizes))
            title += f" at {', '.join(f'{name} = {n}' for name, n in sizes.items())}"
        write_file(path, timeline(planned.recording(), title=title))

    def _repr_html_(self) -> str:
        """Return the plan of the last call as HTML with a picture, for notebooks."""
        if self._last is None:
            return html.block(repr(self))
        planned = self.planned
        text = f"{self!r}: {self.plan}"
        picture = timeline(planned.recording(), title=repr(self))
        return html.picture(picture, text) + html.block(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last call's program, its plan and the current state to a file.

        `python -m mlvm run` runs such a file. The file contains the program with hoisted values. If
        the function was captured with `dynamic_axes` and `max_sizes`, the file supports all sizes
        that the trace of the last call supports.

        Raises `CaptureError` before the first call, for a size without a bound, and if the
        program of the last call is valid only for the sizes of that call; `ArgumentError` for a
        file name with the suffix ".onnx" or ".safetensors"; and `OSError`.

        Invalid calls:
            ml.capture(ml.sum).save("step.mlvm")  # CaptureError
            ml.capture(ml.sum).save("step.onnx")  # ArgumentError
        """
        if Path(path).suffix in (".onnx", ".safetensors"):
            raise ArgumentError(
                f"Captured.save: expected a file name such as step.mlvm, got {path}; "
                "ml.onnx.save writes ONNX files, and ml.save the tensors of a model"
            )
        entry = self._last_entry()
        launch, outcome = entry.launch, entry.outcome
        planned = launch.planned
        if launch.queues or planned.takes:
            raise CaptureError(
                f"Captured.save: {self!r} reads from a queue, which cannot be saved; pass "
                "the batch as an argument"
            )
        if entry.fields or outcome.rebound:
            raise CaptureError(
                f"Captured.save: {self!r} rebinds {entry.rebound_names()}, which cannot "
                "be saved; update it in place"
            )
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
        opened = self._open_part(entry, planned, states) if self.spec.names else None
        step = SavedStep(planned, entry.input_types, outputs, tuple(results), values, opened)
        write_file(path, step.to_bytes())

    def _open_part(
        self, entry: CacheEntry, planned: Planned, states: Sequence[Allocation] = ()
    ) -> OpenStep:
        """Return the part of a saved step that depends on sizes, with these states.

        Raises `CaptureError` if the program has no dynamic sizes."""
        if entry.open_part is None:
            types = ", ".join(map(str, entry.input_types))
            if not self.spec.names:
                why = 'name open axes, as in ml.capture(step, dynamic_axes={"x": ("n",)})'
            elif self._replace or debug.is_watched(entry.vm):
                used = "replace= is" if self._replace else "ml.debug is"
                why = f"{used} used; capture it without, or with dynamic_axes=False"
            elif any(n < 2 for type in entry.input_types for n in type.shape):
                why = "sizes of 0 and 1 have programs by themselves; call it at other lengths"
            else:
                why = (
                    "the compiler needed their values, or a tensor is larger than at the bounds; "
                    "call it at other lengths, or capture it with dynamic_axes=False"
                )
            raise CaptureError(
                f"the last program of {self!r}, for ({types}), is valid only for its own "
                f"lengths: {why}"
            )
        opened = entry.open_part(entry, planned, states)
        closed = self.spec.lengths - {each.name for each in opened.lengths}
        if closed:
            raise CaptureError(
                f"the last program of {self!r} has constant sizes for {', '.join(sorted(closed))}: "
                f"a size is constant at 0 and 1, if Python code needs its value, and if two "
                f"arguments share memory; call it with sizes of 2 or more, and compute with tensors"
            )
        empty = [each.name for each in opened.lengths if not opened.values[each.place]]
        if empty:
            raise CaptureError(
                f"the last call of {self!r} has length 0 for {', '.join(empty)}; call it with "
                f"longer inputs"
            )
        return opened

    def close(self) -> None:
        """Wait for running calls, free the scratch memory, and forget the programs.

        A later call traces the function again."""
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
            failure = self._changing.failure
            raise CaptureError(
                f"{self!r} has no program: its trace raised {failure}"
                if failure
                else f"{self!r} has not been called yet: call it once, or use ml.measure(f, *args)"
            )
        return self._last

    def _compile(self, miss: _Miss, named: Sequence[OpenLength]) -> CacheEntry:
        """Trace the call, with dynamic sizes if it has some, and compile a program.

        The program is added to the cache, unless the function has changed the signature of this
        call; in that case later calls trace again."""
        guards = miss.signature.guards
        self._forget_lapsed(guards)
        if miss.undone is not None:  # no call, which would warn
            refuse_draws(guards, self._name)
            return self._compile_open(miss, named) or self._compile_closed(miss)
        recording = self._changing.describe(miss.arena.vm, guards, miss.args, miss.kwargs)
        entry = self._compile_open(miss, named) or self._compile_closed(miss)
        warn_of_frozen(guards, self._name)
        self._changing.add(recording, self._name, guards)
        return entry

    def _forget_lapsed(self, guards: GuardSet) -> None:
        """Forget programs with state that was deleted.

        Only a call that traces does this."""
        self._signatures.keep_only(guards)
        self._entries.release_known()
        lapsed = self._entries.forget_lapsed()
        if lapsed:
            self._signatures.forget_modules()
            self._drop(lapsed)

    def _compile_closed(self, miss: _Miss) -> CacheEntry:
        """Trace the call with constant sizes, and compile a program.

        Numbers that have changed between calls become inputs of the program."""
        changes = self._entries.changes_of(miss.key, miss.signature)
        free = free_numbers(changes, miss.signature)
        try:
            call = miss.trace(self.fn, free, (), if_failed if free else if_refused)
        except Exception:
            if not free:
                raise
            changes.specialised.update(free)  # an op may reject a traced number
            call = miss.trace(self.fn, (), (), if_refused)
        changes.specialised.update([free[i] for i in call.numbers.fixed()])
        entry = self._entry(call, miss.signature)
        key = self._steady_key(call, miss)
        if key is not None:
            self._drop(self._entries.add(key, miss.signature, entry))
        return entry

    def _compile_open(self, miss: _Miss, named: Sequence[OpenLength]) -> CacheEntry | None:
        """Trace the call with dynamic sizes, if it has some, and compile a program."""
        signature, key = miss.signature, miss.key
        if not self.spec.is_allowed or ASKS_CLASS in signature.guards.names:
            return None
        lengths = self._families.note(key, signature, named)
        if not lengths:
            return None
        changes = self._entries.changes_of(without_sizes(key), signature)
        changes.changed.update(self._families.changed_numbers(key, signature))
        free = free_numbers(changes, signature)
        try:
            call = miss.trace(self.fn, free, lengths)
        # Python code that rejects a traced size; the plain trace raises any other error again
        except Exception:
            self._families.close(key, (axis for each in lengths for axis in each.axes))
            changes.specialised.update(free)
            return None
        changes.specialised.update([free[i] for i in call.numbers.fixed()])
        opened = OpenTrace(call, lengths, signature)
        self._changing.pinned = self._changing.pinned or opened.pinned_line()
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
        """Return the key for later calls of a traced program, or None.

        It is None if the trace has changed the signature of the call. From now on, fields that
        the call rebinds are treated as arguments, and children of Modules that it did not read are
        ignored."""
        if call.outcome.rebound:
            self._signatures.count_as_arguments(field for field, _ in call.outcome.rebound)
            self._entries.matchers = []
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
        """Compile recorded calls, after replacing patterns by host functions."""
        sources = partial(sources_of, call)
        traced = call if step_observers and self.check is None else None
        replaced: dict[str, list[Replaced]] = {}
        if self._replace:
            states = call.record.outside.states
            flow, replaced = replace_patterns(self._replace, call.flow, states, self._name)
            call = call._replace(flow=flow)
        compiler, hoist = self.compiler(call)
        compiled = partial(compiler, call.flow)
        entry = CacheEntry(compiled(hoist=hoist), call, signature, self._title, compiled)
        entry.replaced, entry.traced = replaced, traced
        if self.check is not None:
            entry.sources = partial(sources, entry)
        return entry

    def compiler(self, call: TracedCall) -> tuple[Callable[..., Planned], Hoist | None]:
        """Return the function that compiles flows for the call's VM, and the limits of hoisting."""
        is_plain = debug.is_watched(call.record.vm)  # a watched VM checks each call
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
        """Free the handles of evicted programs."""
        for each in forgotten:
            each.variants.drop(self._scratch.of(each.vm), each.vm)

    def _find_open(self, signature: Signature, key: Any) -> tuple[CacheEntry, ScalarInputs] | None:
        """Return a new entry of a trace with dynamic sizes for the call, if a trace is valid."""
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
        """Compile the entry for a call with these sizes; return None if a guard does not hold."""
        entry = self._make_entry_at(opened, signature, lengths)
        if entry is not None:
            entry.opened = opened
            values = opened.values(signature, lengths) if step_observers else None
            if values is not None:
                call = opened.call.at(values, opened.template.flow(values))
                entry.traced = call._replace(notes=None)  # of the flow without these sizes
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
            compiler, hoist = self.compiler(call)
            plans = opened.plans(lengths, values)
            if not plans:
                opened.plan(lengths, values, partial(compiler, hoist=hoist))
                values = opened.values(signature, lengths)
                if values is None:
                    return None
                plans = opened.plans(lengths, values)

            def compile_unhoisted(reserved: int) -> Planned:
                return compiler(template.flow(values), reserved=reserved)

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


@overload
def capture(
    fn: Callable[P, R],
    /,
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = ...,
    dynamic_axes: Mapping[str, Any] | Literal[False] | None = ...,
    max_sizes: Mapping[str, int] | None = ...,
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
    dynamic_axes: Mapping[str, Any] | Literal[False] | None = ...,
    max_sizes: Mapping[str, int] | None = ...,
    check: int | None = ...,
    memory: int | str | None = ...,
    effort: int = ...,
) -> Callable[[Callable[P, R]], Captured[P, R]]: ...
@hinted
@old_keywords("capture")
def capture(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    fuse: bool = True,
    recompute: bool = True,
    hoist: bool = True,
    replace: Mapping[Callable[..., Any], str] = types.MappingProxyType({}),
    dynamic_axes: Mapping[str, Any] | Literal[False] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    check: int | None = None,
    memory: int | str | None = None,
    effort: int = 1,
) -> Any:
    """Compile `fn` into one program at the first call; later calls replay the program.

    The function may be a whole training step, with gradients and an optimizer's update. `capture`
    is also a decorator: `@capture`, or with options `@capture(fuse=False)`.

    Arguments of the captured function are trees of tensors, numpy arrays and any other objects.
    Numpy arrays are converted to tensors. An f64 array is converted to the widest float dtype of
    the call's tensors, if that is narrower.

    A call is traced again if the type of a tensor, another value or a Module matches no earlier
    call, and if state that the function reads has changed. For example, a numpy array that the
    function reads is a constant of the program. The first change of a Python number, as an argument
    or in a field of a Module or an optimizer, also causes a retrace. From then on the number is an
    input of the program, unless Python code needs its value.

    Tensors that the function reads from the environment are used without a copy, and updated in
    place. Random keys advance. Each call allocates results in the current arena; a result that
    is assigned to a field is allocated in the arena of that field. Temporaries are allocated in
    scratch memory that belongs to the captured function; `plan` contains its size.

    Arguments:

    - `fn`: the function. Without it, `capture` returns a decorator.

    - `fuse`: run chains of elementwise ops block by block, so that intermediates within a chain
      need no memory. Default: True.

    - `recompute`: compute cheap values again in the backward pass instead of saving them. Default:
      True.

    - `hoist`: compute values only once that depend only on tensors which the step does not update,
      such as a weight in a different dtype. These hoisted values are kept in an arena and computed
      again after any write to such a tensor. If such a tensor is written before each call, a second
      program computes the values in the step. `plan.hoisted_nbytes` is the size of the values in
      bytes, at most four times the size of the tensors that they depend on. Default: True.

    - `replace`: a dict `{pattern: name}`. Where the function computes the pattern, a Python
      function of tensors such as `lambda x, w, b: ml.gelu(x @ w + b)`, the program calls the host
      function of that name. The host function pops the operands of the pattern and pushes the
      results. `step.replaced` lists these calls; a `ReplacementWarning` names a pattern that
      matches no part of the function. See docs/functions.md.

    - `dynamic_axes`: names of dynamic axes: a name or None for each axis of a parameter's tensors,
      as in `{"tokens": (None, "time")}`, or names by axis, `{"tokens": {1: "time"}}`. One trace and
      one plan serve all sizes of a named axis. An axis without a name becomes dynamic at the third
      size that calls have; with `dynamic_axes=False` each size gets a separate program. Python code
      may compute with a size as with any number. A comparison, as in an `if`, becomes a guard.
      Where Python needs the value itself, each value gets a separate program. See docs/lengths.md.

    - `max_sizes`: upper bounds of sizes by name. Memory is planned for these bounds. Without a
      bound, the planned size doubles when a call exceeds it.

    - `check`: with `check=n`, every n-th call that has a program traces the function again, and
      compares the trace with the program. If they differ, an error names the line and
      the value that changed. Use `check=1` first when results seem outdated: it finds each read
      that no guard compares, at the cost of one trace per call. Default: None, at no cost.

    - `memory`: a budget such as `"64 MiB"`, or a number of bytes, for `step.plan.nbytes +
      step.plan.hoisted_nbytes`. To meet the budget, the compiler recomputes values, beginning with
      those that it estimates to be fastest to recompute. A larger budget never results in a program
      with a longer estimated time. With dynamic sizes the budget applies to the bounds. Code
      inside loops and branches is not changed. See docs/budgets.md.

    - `effort`: with `effort=n`, the planner of scratch memory may visit n times the number of nodes
      to find a smaller plan, which needs up to n times the planning time. It stops when
      `plan.nbytes` equals `plan.lower_bound`. Default: 1.

    The options `fuse`, `recompute`, `hoist`, `memory` and `effort` do not change any bit of the
    result.

    The function may assign a new tensor of the same type to a field of a Module. Then each call
    assigns a new tensor, in the same arena as the previous one.

    Warns with `RecompilationWarning`, once, at the 8th program, and states what changed; with
    `FrozenWarning` for a line that reads a clock or uses numpy's random generators.

    Raises:

    - `CaptureError`: if the function cannot be captured. It may read neither objects with hidden
      state, such as iterators, nor tensor values. It may not compute on a different VM, or call an
      op with a result shape that depends on values. It may store tensors only in the result and in
      such fields.

    - `GradientError`: if it is called inside a differentiated function.

    - `ArgumentError`: if an option is not a bool, `replace` is not such a mapping, `memory` is not
      a size, or `effort` is not an int from 1 to 2**32.

    - `BudgetError`: before anything runs, if no program within the `memory` budget is found.

    - `ShapeError`: for a size above the bound, and for different sizes with the same name.

    A call also raises any error of the function.

        >>> step = ml.capture(lambda x: ml.sum(x * x))
        >>> step(ml.ones(3)), step(ml.zeros(3))
        (Tensor(3., f32[]), Tensor(0., f32[]))

    Invalid calls:
        ml.capture(hoist="no")  # ArgumentError
        ml.capture(memory="64 blocks")  # ArgumentError
        ml.capture(lambda x: ml.sum(ml.sort(x)), memory=1)(v)  # BudgetError
        ml.capture(effort=0)  # ArgumentError
        ml.capture(lambda x: float(x))(ml.ones(()))  # CaptureError
        ml.grad(ml.capture(ml.sum))(v)  # GradientError
        ml.capture(ml.sum, dynamic_axes={"x": ("n",)}, max_sizes={"n": 1})(v)  # ShapeError
    """
    require_bools("capture", fuse=fuse, recompute=recompute, hoist=hoist)
    is_count = isinstance(check, Integral) and not isinstance(check, bool) and check > 0
    if check is not None and not is_count:
        raise ArgumentError(
            f"capture: expected check=n with an int n of 1 or more, got {brief(check)}; check=1 "
            f"compares the program at every call, and check=None never"
        )
    check_effort(effort, "capture", ArgumentError)
    options: Any = {"fuse": fuse, "recompute": recompute, "hoist": hoist, "replace": replace}
    options |= {"dynamic_axes": dynamic_axes, "max_sizes": max_sizes}
    options |= {"check": check and int(check)}
    budget = None if memory is None else parse_size(memory, "capture(memory=)")
    options |= {"memory": budget, "effort": effort}
    if fn is None:
        return partial(capture, **options)
    if not callable(fn):
        raise CaptureError(f"capture: expected a function, got {brief(fn)}")
    return Captured(fn, **options)


def _with_arguments(run: Callable[[], Any], entry: CacheEntry, args: Any, kwargs: Any) -> Any:
    return entry.outcome.with_arguments(run(), args, kwargs)


def require_bools(name: str, **options: object) -> None:
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}: expected a bool as {option}, got {brief(value)}")


def hoist_of(call: TracedCall) -> Hoist | None:
    """Return the limits of hoisting: values that depend on a call's numbers are not hoisted."""
    if is_shared(call.record.vm):
        return None
    scalars = {id(x) for x in call.numbers.tensors.values()}
    states = call.record.outside.states
    return Hoist(len(states), {i for i, x in enumerate(states) if id(x) in scalars})
