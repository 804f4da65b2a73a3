"""Programs that are bound once for all lengths: kernel integers are formulas.

In: a planned template, the numbers of the template, and a VM with the loop in C. Out: a
`PatchedProgram`, which returns a `Variant` for the values of a launch. The integers of a variant
are written into the program when it runs. Only programs of native kernels and jumps support this;
any other program is verified and bound separately for each size. A call site has alternatives:
kernel calls, each with the guards under which the planner chooses it.

Callers: `OpenTrace`, which holds the lock of the trace; `NativeLoop`, which holds the lock of the
VM.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from mlvm.core.machine.functions import FunctionTable
from mlvm.core.memo import exact_repr
from mlvm.core.program.program import Program, Variant
from mlvm.core.types import TensorType
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.recording.families import open_call
from mlvm.eager.tensor.number import Numbers
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.templates import PlannedTemplate, Site


class _Alternative(NamedTuple):
    """A kernel call, and the guards under which it is valid: formula numbers and values."""

    guards: tuple[float, ...]
    call: Any


class _Choice(NamedTuple):
    """The kernel calls chosen for a size, and all guards of these alternatives.

    calls: the kernel call of each site. ordered: the same, in program order.
    """

    guards: tuple[float, ...]
    calls: list[Any]
    ordered: list[Any]


class NotPatched(Exception):
    """Raised for a program that must be bound separately for each size."""


class PatchedProgram:
    """Program of a template on one VM.

    inputs: the positions of the values that the formulas need. written: as in `Program.written`.
    """

    def __init__(
        self, template: PlannedTemplate, numbers: Numbers, values: Sequence[Any], vm: Any
    ) -> None:
        steps = template.steps()
        if EXTENSION is None or steps is None or not getattr(vm, "_pool", None):
            raise NotPatched
        from mlvm.machines.native.types import native_type

        sites = [step for step in steps if isinstance(step, Site)]
        self._template = template
        self._functions: FunctionTable = vm.functions
        self._version = int(vm.functions.version)
        self._formulas = EXTENSION.Formulas()
        self._numbers, self.inputs = numbers.fork_for(self._formulas)
        self.written = template.planned.program.written
        self._sites: list[tuple[Site, list[_Alternative]]] = []
        self._order: list[int] = []  # for each call, the number of the call site
        numbered: dict[Any, int] = {}
        for site in sites:
            key = site.name, exact_repr(site.attributes), site.types
            if key not in numbered:
                numbered[key] = len(self._sites)
                self._sites.append((site, []))
            self._order.append(numbered[key])
        self._choices: list[_Choice] = []  # newest first
        self._active: weakref.ref[object] | None = None
        self.busy = False  # True from `activate` until the launch has finished
        codes, arguments = EXTENSION.steps(), template.planned.arguments
        rows = [
            (codes["RUN"], 0, step.arguments)
            if isinstance(step, Site)
            else (codes[step.code], step.number, ())
            for step in steps
        ]
        types = [] if len(sites) == len(steps) else [native_type(each.type) for each in arguments]
        self._program = EXTENSION.open_program(
            rows, len(arguments), tuple(types), vm.functions.version
        )
        for site, alternatives in self._sites:
            self._add(site, alternatives, values)

    def variant(self, values: Sequence[Any]) -> Variant | None:
        """Return the program for these formula values, or None.

        It is None if a tensor would exceed the planned size."""
        if not self._template.fits(values):
            return None
        inputs = [values[place] for place in self.inputs]
        return Variant(partial(self._full, [*values]), self, (inputs, values))

    def _full(self, values: Sequence[Any]) -> tuple[Program, Sequence[TensorType]]:
        planned = self._template.at(values)
        assert planned is not None
        return planned.program, [each.type for each in planned.arguments]

    def activate(self, patched: Any, version: int) -> Any:
        """Write the integers and array addresses of a variant; return the program in C.

        Returns None if no planner can plan one of the calls, or if a size exceeds 64 bits. The
        caller holds the VM's lock, and is not inside a launch of this program (`busy`)."""
        if version != self._version:
            return None
        if self._active is not None and self._active() is patched:
            return self._program
        self._active = None
        try:
            choice = self._choice(*patched.variant.values)
        except (NotPatched, OverflowError):
            return None
        self._formulas.write(choice.calls)
        self._program.activate(choice.ordered, patched.operands)
        self._active = weakref.ref(patched, partial(_release, weakref.ref(self)))
        return self._program

    def _choice(self, inputs: Sequence[Any], values: Sequence[Any]) -> _Choice:
        """Return the kernel call of each site.

        Raises `NotPatched`, and `OverflowError` for an integer of more than 64 bits."""
        formulas = self._formulas
        formulas.evaluate(inputs)
        hold = formulas.hold
        for choice in self._choices:
            if hold(choice.guards):
                return choice
        guards: dict[tuple[float, float], None] = {}
        calls = []
        for site, alternatives in self._sites:
            match = next((each for each in alternatives if hold(each.guards)), None)
            if match is None:
                match = self._add(site, alternatives, values)
                formulas.evaluate(inputs)
            guards.update(dict.fromkeys(zip(match.guards[::2], match.guards[1::2], strict=True)))
            calls.append(match.call)
        flat = tuple([x for pair in guards for x in pair])
        choice = _Choice(flat, calls, [calls[i] for i in self._order])
        self._choices = [choice, *self._choices[: LIMITS.choices - 1]]
        return choice

    def _add(
        self, site: Site, alternatives: list[_Alternative], values: Sequence[Any]
    ) -> _Alternative:
        """Plan the call of a site with these values as formulas.

        Raises `NotPatched`."""
        numbers = self._numbers.fork(values)
        call = None
        with suppress(Exception), numbers.planning_kernels() as placeholders:
            call = open_call(self._functions, site.name, site.types, site.attributes, placeholders)
            guards = numbers.guards()
        if call is None:
            raise NotPatched
        if len(alternatives) >= LIMITS.site_calls:
            alternatives.clear()
        alternatives.insert(0, _Alternative(tuple([x for pair in guards for x in pair]), call))
        return alternatives[0]


def _release(owner: weakref.ref[PatchedProgram], ended: weakref.ref[object]) -> None:
    """Release the arrays of a launch once the tensors may be freed."""
    program = owner()
    if program is not None and program._active is ended:
        program._program.activate([], ())
