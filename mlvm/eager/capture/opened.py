"""Traces with dynamic sizes, and the programs that are compiled from them.

In: a call for which the cache has no program. Out: the `OpenTrace`s of calls that differ only in
sizes.

Such a trace is a template: types and attributes are formulas of sizes. It is valid for a call
with the same constant sizes if all guards on sizes hold. The program is planned once, for bounds
of the sizes, and then instantiated for the sizes of each call. An axis without a name becomes
dynamic at the third size. If Python code has read the size of an axis, the axis is closed: each
size gets a separate trace.

Callers: `Captured`. Each trace has a lock, which is held while a program is instantiated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mlvm.arena.planner import Plan
from mlvm.core.errors import BudgetError, CaptureError
from mlvm.core.locks import new_lock
from mlvm.core.memo import Memo
from mlvm.core.types import TensorType
from mlvm.eager.capture.cache import CacheEntry
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.dynamic_axes import Axis, OpenLength, may_open, sizes_of
from mlvm.eager.capture.guards.changing import RecompilationWarning
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.capture.launch import Launch, operands_of
from mlvm.eager.capture.patched import NotPatched, PatchedProgram
from mlvm.eager.capture.trace import TracedCall
from mlvm.eager.recording.lines import user_line
from mlvm.eager.tensor.number import Numbers, is_same
from mlvm.eager.tensor.warn import warn_at
from mlvm.step.compile import Planned
from mlvm.step.flow import Flow
from mlvm.step.open_step import FUNCTIONS, OpenStep, StepLength
from mlvm.step.templates import OpenType, Place, PlannedTemplate, at


class _BoundPlan:
    """A planned template, the bounds of the sizes, and the guards: values by formula index.

    entry: the entry of the first call, which was bound like any program. patched: creates the
    programs of later calls; None if each is bound separately. owner: the launch that provides the
    temporaries.
    """

    def __init__(
        self, template: PlannedTemplate, bounds: tuple[int, ...], guards: Mapping[int, Any]
    ) -> None:
        self.template, self.bounds, self.guards = template, bounds, guards
        self.entry: CacheEntry | None = None
        self.patched: PatchedProgram | None = None
        self.owner: Launch | None = None
        types = [template.type_of(i) for i in range(len(template.planned.arguments))]
        self.operands = operands_of(template.planned, types)
        self._varying = [i for i, x in enumerate(self.operands) if type(x[2]) is OpenType]

    def begin(self, entry: CacheEntry, numbers: Numbers, values: Sequence[Any]) -> None:
        """Store the entry of the first call, and prepare the entries of later calls."""
        self.entry = entry
        with suppress(NotPatched):
            self.patched = PatchedProgram(self.template, numbers, values, entry.vm)
            self.owner = entry.launch.with_program(self.template.planned)

    def at(
        self,
        values: Sequence[Any],
        call: TracedCall,
        signature: Signature,
        compile_unhoisted: Callable[..., Planned],
    ) -> CacheEntry | None:
        """Return the entry of a call with these values; None if it must be bound separately."""
        entry, patched = self.entry, self.patched
        program = None if patched is None else patched.variant(values)
        if program is None or entry is None or self.owner is None:
            return None
        operands = [*self.operands]
        for i in self._varying:
            k, place, type = operands[i]
            operands[i] = k, place, at(type, values)
        make = partial(self.template.at, values)
        launch = entry.launch.variant(program, operands, self.owner, make)
        return entry.at(call.at(values), signature, launch, compile_unhoisted)


class OpenTrace:
    """A trace with dynamic sizes.

    `call`: the result of the traced call, with placeholders for everything that depends on sizes.
    `template`: the flow of the trace.
    `open`: the dynamic sizes.
    `present`: the values of the sizes in the traced call.
    `args`: the Python numbers of the traced call.
    `keepalive`: objects that the key of the calls identifies by `id`.
    `lock`: held while a program is instantiated.
    """

    def __init__(
        self, call: TracedCall, lengths: Sequence[OpenLength], signature: Signature
    ) -> None:
        assert call.template is not None
        self.call, self.template = call, call.template
        self.keepalive = [*signature.guards.identities()]  # the key contains the ids of these
        self.present = tuple([each.size_in(signature) for each in lengths])
        self.args = signature.numbers
        self.lock = new_lock()
        self.open = tuple(lengths)
        numbers_of_inputs = {id(x): i for i, x in enumerate(signature.inputs)}
        self._axes = [
            tuple([(numbers_of_inputs[id(signature.tensors[i])], axis) for i, axis, _ in each.axes])
            for each in lengths
        ]
        self.numbers = call.numbers
        self._plans: list[_BoundPlan] = []
        self._bounds = (0,) * len(lengths)
        self._is_pinned = False
        free = set(call.free)
        self._closed_numbers = [(i, x) for i, x in enumerate(signature.numbers) if i not in free]
        opened = {axis for each in lengths for axis in each.axes}
        sizes = sizes_of(signature).items()
        self._closed_sizes = [(axis, n) for axis, n in sizes if axis not in opened]

    def lengths(self, signature: Signature) -> tuple[int, ...] | None:
        """Return the sizes of a call; None if the template does not fit them or the numbers."""
        if any(axis.size_in(signature) != n for axis, n in self._closed_sizes):
            return None
        if not all(is_same(signature.numbers[i], x) for i, x in self._closed_numbers):
            return None
        lengths = []
        for each in self.open:
            n = each.size_in(signature)
            if any(axis.size_in(signature) != n for axis in each.axes):
                return None
            lengths.append(n)
        return tuple(lengths)

    def values(self, signature: Signature, lengths: tuple[int, ...]) -> list[Any] | None:
        """Return the values of all formulas at these sizes; None if a guard does not hold."""
        return self.numbers.again([*[signature.numbers[i] for i in self.call.free], *lengths])

    def plans(self, lengths: Sequence[int], values: Sequence[Any]) -> list[_BoundPlan]:
        """Return the plans that are valid for these values."""
        return [
            each
            for each in self._plans
            if all(n <= most for n, most in zip(lengths, each.bounds, strict=True))
            and all(is_same(values[place], value) for place, value in each.guards.items())
        ]

    def plan(
        self, lengths: Sequence[int], values: Sequence[Any], compiled: Callable[[Flow], Planned]
    ) -> None:
        """Plan the program for bounds of these sizes.

        The guards of the plan are the comparisons of sizes that the compiler has made. If the
        compiler needs the value of a size, no such plan is created."""
        if self._is_pinned or len(self._plans) >= LIMITS.plans:
            return
        powers = [1 << (n - 1).bit_length() for n in lengths]  # of two, not less than the sizes
        axes = zip(self.open, powers, self._bounds, strict=True)
        bounds = tuple([each.at_most or max(power, most) for each, power, most in axes])
        try:
            with self.numbers.planning(bounds, values) as (placeholders, guards):
                planned = PlannedTemplate.of(compiled(self.template.flow(placeholders)))
                planned.fix([*self.numbers.at_bounds()])
        except BudgetError:  # the budget applies to the bounds
            raise
        except Exception:  # if the error is real, compiling with plain ints raises it again
            self._is_pinned = True
            return
        if bounds != self._bounds:
            self._bounds, self._plans = bounds, []
        self._plans.insert(0, _BoundPlan(planned, bounds, guards))
        used = self.template.places | self.call.places()
        for each in self._plans:
            used |= each.template.places | each.guards.keys()
            used.update(() if each.patched is None else each.patched.inputs)
        self.numbers.prune(used)

    def measured(self, signature: Signature, compiled: Callable[[Flow], Planned]) -> Plan | None:
        """Return the plan for the bounds, with the bytes that the traced call uses.

        Return None if each size has a separate program."""
        values = self.values(signature, self.present)
        if values is not None:
            self.plan(self.present, values, compiled)
            values = self.values(signature, self.present)
        if values is not None:
            for each in self.plans(self.present, values):
                planned = each.template.at(values)
                if planned is not None:
                    return planned.plan._replace(used=planned.recording().high_water)
        return None

    def open_part(
        self,
        template: PlannedTemplate,
        guards: Iterable[int],
        entry: CacheEntry,
        planned: Planned,
        states: Sequence[Any],
    ) -> OpenStep:
        """Return the part of a saved step that depends on sizes, for this program and states.

        Raises `CaptureError` for a size without a bound, and for a function of sizes that a
        file cannot store."""
        numbers, values = self.numbers, entry.scalars.values
        first = numbers.first_length
        lengths: list[StepLength] = []
        inputs: list[Any] = [*entry.input_types]
        for place, (each, axes) in enumerate(zip(self.open, self._axes, strict=True), first):
            if each.name is None:
                i, axis = axes[0]
                raise CaptureError(
                    f"axis {axis} of input {i}, {entry.input_types[i]}, became dynamic "
                    f"automatically; to save the step, name the axis in dynamic_axes=, with a "
                    f"bound in max_sizes="
                )
            if each.at_most is None:
                unbounded = {x.name: 512 for x in self.open if x.name and x.at_most is None}
                raise CaptureError(
                    f"a step with dynamic axes needs bounds for "
                    f"{', '.join(map(repr, unbounded))}, got none; capture it with "
                    f"max_sizes={unbounded}"
                )
            lengths.append(StepLength(each.name, each.at_most, place, axes))
            for i, axis in axes:
                shape = inputs[i].shape
                shape = (*shape[:axis], Place(place), *shape[axis + 1 :])
                inputs[i] = OpenType(inputs[i].dtype, shape)
        for pin, line in numbers.pins.items():
            for length in lengths:
                if length.place in numbers.sources({pin}):
                    raise CaptureError(
                        f"{line or 'the function'} needs the value of {length.name!r}, so each "
                        f"size gets its own program; compute with tensors, or with x.shape "
                        f"directly"
                    )
        outcome, by_id = self.call.outcome, {id(x): i for i, x in enumerate(states)}
        tensors = numbers.tensors.items()
        scalars = [(by_id[id(x)], place) for (place, _), x in tensors if id(x) in by_id]
        lines = dict.fromkeys(guards, "") | {i: x or "" for i, x in numbers.guarded.items()}
        used = template.places | self.call.places() | {*lines, *[place for _, place in scalars]}
        used = numbers.sources(used) | {length.place for length in lengths}
        steps = []
        for place, fn, operands in numbers.steps:
            if place in used:
                if FUNCTIONS.get(fn.__name__) is not fn:
                    raise CaptureError(
                        f"a file cannot contain {fn.__name__} of a dynamic size; compute it "
                        "with tensors"
                    )
                steps.append((place, fn.__name__, operands))
        return OpenStep(
            tuple(lengths),
            tuple([x if place in used else None for place, x in enumerate(values)]),
            tuple(steps),
            tuple(sorted(lines.items())),
            tuple(scalars),
            tuple(inputs),
            tuple([each.type for each in outcome.outputs]),
            tuple([outcome.results[number].type for _, number in outcome.named_results()]),
            template.with_planned(planned),
        )

    def pinned(self) -> list[Axis]:
        """Return the axes with an exact size that Python code has read."""
        places = self.numbers.sources(set(self.numbers.pins))
        opened = enumerate(self.open, self.numbers.first_length)
        return [axis for place, each in opened if place in places for axis in each.axes]

    def pinned_line(self) -> str:
        """Return the first line of Python that needs the value of a size, or ""."""
        return next(filter(None, self.numbers.pins.values()), "")

    def warn_of_pins(self, name: str, named: Container[Axis]) -> None:
        """Warn of the first Python line that read the value of a size which the user has named.

        An axis that became dynamic automatically is closed instead."""
        numbers = self.numbers
        first = numbers.first_length
        for place, line in numbers.pins.items():
            for each in numbers.sources({place}):
                if each < first or each >= numbers.inputs:
                    continue
                length = self.open[each - first]
                if any(axis in named for axis in length.axes):
                    message = (
                        f"{name!r} sees the value of {length.name!r}, {numbers.values[each]}, "
                        f"where Python needs an int: each size gets a program of its own. Compute "
                        f"with tensors, or with sizes as they are, or pad to one size."
                    )
                    warn_at(line or user_line(), message, RecompilationWarning)
                    return


class _CallFamily:
    """Calls that differ only in sizes: the sizes of the axes, and the traces, newest first."""

    def __init__(self) -> None:
        self.traces: tuple[OpenTrace, ...] = ()
        self.closed: set[Axis] = set()
        self._sizes: dict[Axis, dict[int, None]] = {}
        self._equal: dict[Axis, set[Axis]] = {}  # axes that had equal sizes in all calls

    def note(self, signature: Signature) -> None:
        """Record the sizes of a call without a program."""
        sizes = sizes_of(signature)
        for axis, n in sizes.items():
            sizes_so_far = self._sizes.setdefault(axis, {})
            if len(sizes_so_far) < LIMITS.sizes:
                sizes_so_far[n] = None
            equal = {other for other, m in sizes.items() if m == n}
            self._equal[axis] = self._equal.get(axis, equal) & equal

    def lengths(self, signature: Signature, named: Sequence[OpenLength]) -> list[OpenLength]:
        """Return the sizes that become dynamic in the trace of a call.

        These are the named sizes, and those of axes whose size has changed often. Unnamed axes
        that always had equal sizes share one size."""

        def opens(axis: Axis) -> bool:
            # Minimum dynamic size: the type rules treat 0 and 1 differently.
            is_open = axis.size_in(signature) >= 2 and axis not in self.closed
            return is_open and may_open(signature, axis.tensor)

        by_name = [each._replace(axes=tuple(filter(opens, each.axes))) for each in named]
        has_name = {axis for each in named for axis in each.axes}
        by_size: dict[frozenset[Axis], list[Axis]] = {}
        for axis, sizes in self._sizes.items():
            if len(sizes) >= LIMITS.sizes and axis not in has_name and opens(axis):
                by_size.setdefault(frozenset(self._equal[axis]), []).append(axis)
        others = [OpenLength(tuple(axes)) for axes in by_size.values()]
        return [each for each in (*by_name, *others) if each.axes]


class CallFamilies:
    """Families of calls that differ only in sizes, by key without sizes."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._dropped: list[OpenTrace] = []
        self._families = Memo[Any, _CallFamily](
            LIMITS.families,
            "capture: families of calls",
            lambda family: self._dropped.extend(family.traces),
        )

    @property
    def traces(self) -> int:
        """The number of traces with dynamic sizes."""
        return sum(len(family.traces) for family in list(self._families.entries.values()))

    def of(self, key: Sequence[Any]) -> tuple[OpenTrace, ...]:
        """Return the traces that may be valid for calls with this key."""
        families = self._families.entries
        family = families.get(without_sizes(key)) if families else None
        return () if family is None else family.traces

    def note(
        self, key: Sequence[Any], signature: Signature, named: Sequence[OpenLength]
    ) -> list[OpenLength]:
        """Record the sizes of a call without a program; return the sizes to make dynamic."""
        with self._lock:
            family = self._families.get(without_sizes(key), _CallFamily)
            family.note(signature)
            return family.lengths(signature, named)

    def changed_numbers(self, key: Sequence[Any], signature: Signature) -> list[int]:
        """Return the Python numbers of a call that differ from the last trace's numbers."""
        for trace in self.of(key)[:1]:
            pairs = enumerate(zip(signature.numbers, trace.args, strict=True))
            return [i for i, (x, y) in pairs if not is_same(x, y)]
        return []

    def close(self, key: Sequence[Any], axes: Iterable[Axis]) -> None:
        """Never treat these axes as dynamic again."""
        with self._lock:
            family = self._families.entries.get(without_sizes(key))
            if family is not None:
                family.closed.update(axes)

    def move(self, key: Sequence[Any], to: Sequence[Any]) -> None:
        """Assign the key of the family's future calls to the family."""
        with self._lock:
            family = self._families.pop(without_sizes(key))
            shared = family and self._families.get(without_sizes(to), lambda: family)
            if family is not None and shared is not family:
                self._dropped += family.traces

    def add(self, key: Sequence[Any], trace: OpenTrace) -> None:
        """Add a trace."""
        self.close(key, trace.pinned())
        with self._lock:
            family = self._families.entries.get(without_sizes(key))
            if family is not None:
                self._dropped += family.traces[LIMITS.traces - 1 :]
                family.traces = (trace, *family.traces[: LIMITS.traces - 1])

    def take_dropped(self) -> list[OpenTrace]:
        """Return the traces that were evicted since the last call, whose programs can be freed."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def clear(self) -> None:
        with self._lock:
            self._families.clear()


def without_sizes(key: Sequence[Any]) -> Any:
    """Return the key of a call without the tensor sizes."""
    return tuple(
        [
            (part[0].dtype, part[0].ndim, *part[1:])
            if type(part) is tuple and part and type(part[0]) is TensorType
            else part
            for part in key
        ]
    )
