"""The native machine beside the reference one: each program runs on both, and all must be the same.

That is: outputs, arguments and globals afterwards, the bytes held, and the error with its class,
text, place and notes. Floats may differ by rounding. The native machine runs each program on one
thread and shared among three, to the bit; so do the raw machine and one with workers what has no
error.
"""

from __future__ import annotations

import itertools
import random
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core import store
from mlvm.core.errors import ArgumentError, MlvmError, ProgramError, UnknownFunctionError, notes_of
from mlvm.core.program.assembly import disassemble
from mlvm.core.program.program import Program
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from tests.fuzz.command import Outcomes
from tests.fuzz.making import Case, make_case
from tests.fuzz.trying import MAX_STEPS, Found, Table, computes, launch, new_vm, time_limit

SPECIAL: Final = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 1e-40, 5e-324, 1.0, -1.0, 0.5, 88.8)
TOLERANCE: Final = {4: 1e-4, 8: 1e-10}
"""By a float's bytes; of the largest one of its tensor."""

UNREACHED: Final = (ProgramError, UnknownFunctionError, ArgumentError)
"""Errors in a part that is never reached, which the raw machine does not know."""

SECONDS: Final = 20  # for one program; more counts as a hang

_FIRST_HANDLE: Final = 10**9
"""So that a handle in a text is known for one."""


class Outcome(NamedTuple):
    """Outcome of a launch: outputs, arguments and globals; and the error that it raised."""

    outputs: list[Array]
    after: list[Array]
    error: tuple[Any, ...] | None


@contextmanager
def all_is_shared() -> Iterator[None]:
    """VMs made inside share the work of every kernel among their threads, however short it is."""
    before = extension.pool

    def pool(threads: int, pinned: bool) -> Any:
        assert extension.EXTENSION is not None
        return extension.EXTENSION.Pool(threads, pinned, worth_sharing=0)

    extension.pool = pool
    try:
        yield
    finally:
        extension.pool = before


def new_machines() -> dict[str, VM]:
    """Make the machines to compare, whose handles are known in a text: native ones where there are
    such."""
    if next(store._handles) < _FIRST_HANDLE:
        store._handles = itertools.count(_FIRST_HANDLE)
    machines = {"reference machine": new_vm(native=False)}
    if extension.EXTENSION is not None:
        with all_is_shared():
            machines["native machine"] = new_vm(native=True)
            machines["native machine with 3 threads"] = new_vm(native=True, threads=3)
    return machines


def outcome(vm: VM, program: Program, arrays: tuple[Array, ...], max_steps: int | None) -> Outcome:
    """Run the program on the VM. Raises `Found` for bytes lost."""
    outputs, after, error, handles = launch(vm, program, arrays, max_steps)
    if error is None:
        return Outcome(outputs, after, None)
    place = [getattr(error, name, None) for name in ("function", "pc", "step")]
    texts = [_without_handles(text, handles) for text in (str(error), *notes_of(error))]
    return Outcome(outputs, after, (type(error), *place, *texts))


def _without_handles(text: str, handles: list[int]) -> str:
    for i, handle in enumerate(handles):
        text = text.replace(str(handle), f"<global {i}>")
    return re.sub(r"\b10000\d{5,}\b", "<handle>", text)


def require_same(name: str, actual: Outcome, expected: Outcome, *, bits: bool) -> None:
    """Raise `Found` unless two outcomes are equal; floats to the bit, if so wanted."""
    if actual.error != expected.error:
        raise Found(f"the {name} raises\n{actual.error}\nnot\n{expected.error}")
    for what in ("outputs", "after"):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        if len(ours) != len(theirs):
            raise Found(f"the {name} leaves {len(ours)} {what}, not {len(theirs)}")
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if not (same_bits(x, y) if bits else is_close(x, y)):
                raise Found(f"the {name}, {what} {i}:\n{x!r}\nnot\n{y!r}")


def same_bits(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def is_close(x: Array, y: Array, tolerance: float | None = None, least: float = 0.0) -> bool:
    """Return whether two arrays are of one type and equal; floats up to rounding, or to a tolerance
    of the largest, or of `least`."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype.kind != "f":
        return x.tobytes() == y.tobytes()
    tolerance = TOLERANCE[x.dtype.itemsize] if tolerance is None else tolerance
    finite = np.abs(y[np.isfinite(y)])
    largest = float(finite.max(initial=least))
    with np.errstate(all="ignore"):
        return bool(
            np.allclose(x, y, rtol=tolerance, atol=tolerance * min(largest, 1e30), equal_nan=True)
        )


def with_special_values(rng: random.Random, array: Array) -> Array:
    """The array with some of its floats replaced by those that are odd."""
    if array.dtype.kind != "f" or not array.size or rng.random() < 0.5:
        return array
    changed = array.copy().reshape(-1)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(changed.size)] = rng.choice(SPECIAL)
    return changed.reshape(array.shape)


class Machines:
    """Tries cases on all machines, and counts kinds and outcomes."""

    def __init__(self) -> None:
        self.counts = Outcomes()
        self.renew()

    def renew(self) -> None:
        """Make new machines, whose function tables no program has changed."""
        self.vms = new_machines()
        native = len(self.vms) > 1
        self.others = {
            "raw machine": new_vm(native=native, checked=False),
            "machine with workers": new_vm(native=native, workers=2),
        }

    def run(self, case: Case) -> None:
        """Raises whatever no machine may raise, and `Found`."""
        try:
            program = case.make()
        except MlvmError as error:
            self.counts[f"{case.kind}: not made: {type(error).__name__}"] += 1
            return
        rng = random.Random(repr(case.kind) + str(len(program.functions)) + str(len(case.args)))
        max_steps = rng.choice([MAX_STEPS, MAX_STEPS, rng.randint(1, 12)])
        rng = random.Random(max_steps)
        args = tuple([with_special_values(rng, array) for array in case.args])
        outcomes = [outcome(vm, program, args, max_steps) for vm in self.vms.values()]
        reference, first = outcomes[0], outcomes[:2][-1]
        failed = reference.error
        self.counts[f"{case.kind}: {failed[0].__name__ if failed else 'ran'}"] += 1
        changed = {vm.attached(Table).changed for vm in self.vms.values()}
        if len(changed) > 1:
            raise Found("not all machines have changed their function tables")
        names = [*self.vms]
        require_same(names[:2][-1], first, reference, bits=False)
        for name, each in zip(names[2:], outcomes[2:], strict=True):
            require_same(name, each, first, bits=True)
        if True in changed:
            self.renew()
        elif not all(map(computes, self.vms.values())):
            raise Found("a VM computes wrong results")
        elif failed is None:
            for name, vm in self.others.items():
                other = outcome(vm, program, args, max_steps)
                if other.error is None or not issubclass(other.error[0], UNREACHED):
                    require_same(name, other, first, bits=True)


def listing(case: Case) -> str:
    """The case's program as text, or as a value when assembly cannot write it."""
    try:
        program = case.make()
    except Exception:
        return "(it could not even be made)"
    try:
        return disassemble(program)
    except Exception:
        return repr([*program.functions.values()])


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Outcomes, str | None]:
    """Try the given number of cases; return the outcomes, and how the machine failed, if it did."""
    runs = Machines()
    for number in range(first, first + programs):
        try:
            with time_limit(SECONDS):
                runs.run(make_case(seed, number))
        except Exception as error:
            place = f"python -m tests.fuzz machines --seed {seed} --first {number} --programs 1"
            text = listing(make_case(seed, number))
            trace = "".join(traceback.format_exception(error))
            return runs.counts, f"{text}\n{trace}\nThe program above did this. Again: {place}"
    return runs.counts, None
