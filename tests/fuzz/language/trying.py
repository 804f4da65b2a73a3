"""The checks of a program: a captured step is the eager one, to the bit.

A program's step runs eagerly, and captured with fusion and recomputation on and off, each time in
a separate world that begins in the same state. After each step all must be as in the first run:
results, arguments, state and the global random key, to the bit; which of these share memory or are
one tensor; what can be updated in place; the class of the error, if one is raised. When everything
is dropped no byte is left. A fused plan is no larger than the unfused one.

On the native machine, the step also runs shared among three threads, eagerly and captured, where it
must do the same to the bit; and on the reference machine, where floats may differ by rounding.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.arena.arena import STALE
from mlvm.core.errors import ArgumentError, CaptureError, GradientError, MlvmError
from mlvm.core.types import i64
from mlvm.eager.tensor.constants import constant
from mlvm.machines import residuals
from tests.fuzz import machines
from tests.fuzz.language import world
from tests.fuzz.language.world import World, walked

Kind = Literal["values", "roles", "errors", "ends", "bytes", "plans", "machines"]
"""What a captured step may have otherwise than the eager one: values or structure; what shares
memory, or can be updated in place; the error raised; what the arena's reset ends; bytes left when
all is dropped; a larger plan with fusion than without; another machine that does otherwise."""

EXPECTED: Final = {
    "a second gradient": r"a gradient through the gradient of a (loop whose|function that)",
    "a function calls others": r"calls itself with different argument types",
    "a function in a function": r"use a tensor of an ml.subroutine in another that it calls",
    "tracked by way of another branch": r"has no gradient for",
    "a gradient goes outside": r"that updates a .* from outside",
    "a body updates a view from outside": r"a branch or an ml.subroutine outside of it",
    "a function updates": r"update a tensor from outside of an ml.subroutine .* in place",
    "a value is read": r"cannot read a tensor's value inside a captured function",
    "a shape depends on values": r"whose result types depend on values",
}
"""Why a captured program may be refused."""


class Found(Exception):
    """A captured step does otherwise than the eager one."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NoProgram(Exception):
    """A program does what no test is about, such as naming a variable that there is not."""


# --- what is seen of a run ------------------------------------------------------------------


class Leaf(NamedTuple):
    """A tensor, by its value and its number among the different ones, or the text of what is
    none. Whose bytes it shares makes no difference: an update changes no other value."""

    value: Any
    same: int = -1


Leaves: TypeAlias = dict[str, Leaf]


@dataclass
class Seen:
    """Observations of one step: the error that it raised, or all that was there after it; which
    results could be updated in place, and all that was there after that; what the reset has
    ended."""

    error: MlvmError | None = None
    leaves: Leaves = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    updated: Leaves = field(default_factory=dict)
    ended: dict[str, bool] = field(default_factory=dict)


def observed(trees: dict[str, Any]) -> Leaves:
    """All that is in the trees, by path. A tensor that has ended has the value None."""
    leaves: Leaves = {}
    numbers: dict[int, int] = {}
    for name, tree in trees.items():
        for path, x in walked(name, tree):
            if isinstance(x, ml.Tensor):
                same = numbers.setdefault(id(x), len(numbers))
                value = None if x.handle == STALE else x.numpy()
                leaves[path] = Leaf(value, same)
            else:
                leaves[path] = Leaf(x if isinstance(x, np.ndarray) else repr(x))
    return leaves


_OPPOSITE: Final[dict[str, Callable[..., Any]]] = {
    "bool": ml.logical_not, "unsigned": ml.bitwise_invert, "signed": ml.negative,
    "float": ml.negative,
}  # fmt: skip


def updated_in_place(results: Any) -> dict[str, str]:
    """Negate every tensor of the results in place: what that raised, by path."""
    outcomes = {}
    for path, x in walked("result", results):
        if isinstance(x, ml.Tensor) and x.handle != STALE:
            try:
                _OPPOSITE[x.dtype.kind](x, out=x)
            except MlvmError as error:
                outcomes[path] = type(error).__name__
            else:
                outcomes[path] = "updated"
    return outcomes


How: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"
"""What makes of a step the function to call."""


class Run:
    """The steps of a program in a separate world."""

    def __init__(self, build: Callable[[], World], vm: ml.VM, how: How) -> None:
        self.steps: list[Seen] = []
        self.plans: list[int] = []
        self._wait = getattr(vm, "synchronize", lambda: None)
        weights, results = ml.Arena(vm, "weights"), ml.Arena(vm, "results")
        try:
            cycles = self._run(build, how, weights, results)
            for arena in (weights, results):
                if arena.used and cycles:
                    gc.collect()
                if arena.used:
                    holders = [str(holder) for holder in arena.holders()]
                    raise Found("bytes", f"{arena} when all was dropped: {holders}")
        finally:
            weights.close()
            results.close()

    def _run(
        self, build: Callable[[], World], how: How, weights: ml.Arena, results: ml.Arena
    ) -> bool:
        """Run all steps; whether they leave cycles, as a recording is."""
        with weights.allocating():
            ml.random.seed(0)
            world = build()
        step = how(world.step)
        for i in range(world.steps):
            with results if world.resets else results.allocating():
                arguments = world.arguments(i)
                record, returned = self._step(step, arguments, world)
            record.ended = {
                path: x.handle == STALE
                for path, x in walked("", [returned, arguments, world.state()])
                if isinstance(x, ml.Tensor)
            }
            self.steps.append(record)
            if record.error is not None:
                break
        return world.cycles or isinstance(step, ml.Captured)

    def _step(self, step: Callable[..., Any], arguments: Any, world: World) -> tuple[Seen, Any]:
        """Call the step and see what there is then."""

        def all_there(returned: Any) -> Leaves:
            random = ml.random.state()
            there = {"result": returned, "argument": arguments, "state": world.state()}
            return observed({**there, "random": random})

        record = Seen()
        before = all_there(None)
        try:
            returned = step(*arguments)
            self._wait()  # for errors of a device, which come late
        except MlvmError as error:
            record.error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None  # which hold what the step has made
            if isinstance(error, CaptureError):
                require_equal("after a CaptureError", all_there(None), before, same_bits)
            return record, None
        if isinstance(step, ml.Captured):
            self.plans.append(step.plan.nbytes)
        record.leaves = all_there(returned)
        record.updates = updated_in_place(returned)
        record.updated = all_there(returned)
        return record, returned


# --- what must be equal ---------------------------------------------------------------------


Same: TypeAlias = "Callable[[Any, Any], bool]"
"""Whether two values are as equal as they must be."""


def require_equal(when: str, leaves: Leaves, expected: Leaves, same: Same) -> None:
    """Raise `Found` unless two sets of leaves have the same values, with the same tensors at the
    same places."""
    if leaves.keys() != expected.keys():
        raise Found("values", f"{when}: there are {[*leaves]}, not {[*expected]}")
    for path, leaf in leaves.items():
        if not same(leaf.value, expected[path].value):
            raise Found(
                "values", f"{when}: {path} is\n{leaf.value!r}\nnot\n{expected[path].value!r}"
            )
    for path, leaf in leaves.items():
        if leaf[1:] != expected[path][1:]:
            raise Found("roles", f"{when}: {path} is {leaf}, not {expected[path]}")


def same_bits(x: Any, y: Any) -> bool:
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return type(x) is type(y) and bool(x == y)
    return machines.same_bits(x, y)


def same_numbers(x: Any, y: Any) -> bool:
    """Return whether two values are equal up to the rounding of floats."""
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return same_bits(x, y)
    # An f64 may come from f32, and what should be 0 from values about 1.
    return machines.is_close(x, y, machines.TOLERANCE[4], least=1.0)


def require_same_step(when: str, got: Seen, expected: Seen, same: Same = same_bits) -> str | None:
    """Raise `Found` unless a step was as the eager one. The reason for which it was refused, if
    it may be."""
    if type(got.error) is not type(expected.error):
        reason = None
        if isinstance(got.error, (CaptureError, GradientError, ArgumentError)):
            reasons = [key for key, text in EXPECTED.items() if re.search(text, str(got.error))]
            reason = reasons[0] if reasons else None
        if reason is None:
            raise Found("errors", f"{when}: raises {got.error!r}, where eagerly {expected.error!r}")
        return reason
    require_equal(when, got.leaves, expected.leaves, same)
    if got.updates != expected.updates:
        raise Found("roles", f"{when}: in place {got.updates}, not {expected.updates}")
    require_equal(f"{when}, updated in place", got.updated, expected.updated, same)
    for path, ended in got.ended.items():
        # What a view, or an old value, has moved to lies in the arena of what it was of; a captured
        # call allocates all its results in the current one.
        copied = ended and path.startswith("[0]")
        if ended is not expected.ended.get(path) and not copied:
            raise Found("ends", f"{when}: ended {got.ended}, not {expected.ended}")
    return None


MODES: Final = {
    f"captured, fuse={fuse}, recompute={recompute}": (fuse, recompute)
    for fuse in (False, True)
    for recompute in (False, True)
}


def require_same(build: Callable[[], World], *, device: str | None = None) -> str:
    """Raise `Found` unless the program does the same eagerly and captured, or on that device. What
    came of it: "same", the name of an error, or why it was refused.

    Raises `NoProgram` for one that raises eagerly what is no `MlvmError`.
    """
    vm = new_vm("fuzz")
    try:
        eager = Run(build, vm, lambda step: step)
    except Found:
        raise
    except Exception as error:
        raise NoProgram("it does not run eagerly") from error
    with ml.Arena(vm, "before").allocating():
        constant(0, i64)
    size = _bytes_of(vm)  # with constants, which stay
    outcome = next((type(record.error).__name__ for record in eager.steps if record.error), "same")
    if device is not None:
        _require_same_on_device(build, eager, on_device(device))
        return outcome
    if vm.native:
        _require_same_on_other_machines(build, eager)
    plans: dict[str, list[int]] = {}
    runs: dict[str, How] = {"eager again": lambda step: step}
    for name, (fuse, recompute) in MODES.items():
        runs[name] = partial(ml.capture, fuse=fuse, recompute=recompute)
    for name, how in runs.items():
        run = Run(build, vm, how)
        if _bytes_of(vm) != size:
            raise Found("bytes", f"{name}: {_bytes_of(vm)} MiB are left, not {size}")
        for i, (actual, expected) in enumerate(zip(run.steps, eager.steps, strict=False)):
            refused = require_same_step(f"{name}, step {i}", actual, expected)
            if refused is not None:
                outcome = f"refused: {refused}"
        plans[name] = run.plans
    _require_small_plans(plans)
    return outcome


def _bytes_of(vm: ml.VM) -> float:
    """Return the MiB in use on the VM, but for the stack of residuals, which it keeps."""
    return vm.consumed_size_in_mib() - residuals.stack_bytes(vm) / (1 << 20)


def _is_sensitive(build: Callable[[], World], vm: ml.VM) -> bool:
    """Return whether the program is ill-conditioned: a change in the last digits changes values by
    much."""
    plain = Run(build, vm, lambda step: step)
    for factor in (1 + 3e-7, 1 - 3e-7, 1 + 2e-6):
        world.factor = factor
        try:
            changed = Run(build, vm, lambda step: step)
        finally:
            world.factor = 1.0
        for actual, expected in zip(changed.steps, plain.steps, strict=False):
            try:
                require_same_step("changed a little", actual, expected, same_numbers)
            except Found:
                return True
    return False


def new_vm(name: str) -> ml.VM:
    """Return a new VM for runs: "fuzz", "reference", or "threads", which shares all its work."""
    if name == "threads":
        with machines.all_is_shared():
            return ml.VM(name, threads=3)
    return ml.VM(name, native=False if name == "reference" else None)


def _require_same_on_other_machines(build: Callable[[], World], eager: Run) -> None:
    """Raise `Found` unless three threads compute the same bits, eagerly and captured, and the
    reference machine the same but for rounding, if that does not matter much to the program."""
    others: list[tuple[str, str, How, Same]] = [
        ("3 threads", "threads", lambda step: step, same_bits),
        ("3 threads, captured", "threads", ml.capture, same_bits),
        ("reference machine", "reference", lambda step: step, same_numbers),
    ]
    for name, kind, how, same in others:
        vm = new_vm(kind)
        run = Run(build, vm, how)
        for i, (actual, expected) in enumerate(zip(run.steps, eager.steps, strict=False)):
            try:
                require_same_step(f"{name}, step {i}", actual, expected, same)
            except Found as failure:
                if kind == "reference" and _is_sensitive(build, vm):
                    return
                raise Found("machines", str(failure)) from None


@cache
def on_device(device: str) -> ml.VM:
    """The VM of a device: one for all programs, of which it keeps the kernels."""
    return ml.VM("device", device=device)


def _require_same_on_device(build: Callable[[], World], eager: Run, vm: ml.VM) -> None:
    """Raise `Found` unless the device does what the processor does but for rounding, if that does
    not matter much to the program, and captured what it does eagerly, to the bit."""
    there = Run(build, vm, lambda step: step)
    captured = Run(build, vm, ml.capture)
    for i, (actual, expected) in enumerate(zip(captured.steps, there.steps, strict=False)):
        require_same_step(f"{vm}, captured, step {i}", actual, expected)
    for i, (actual, expected) in enumerate(zip(there.steps, eager.steps, strict=False)):
        try:
            require_same_step(f"{vm}, step {i}", actual, expected, same_numbers)
        except Found as failure:
            if _is_sensitive(build, ml.VM("fuzz")):
                return
            raise Found("machines", str(failure)) from None


def _require_small_plans(plans: dict[str, list[int]]) -> None:
    """Raise `Found` for a plan that fusion has made larger."""
    for name, sizes in plans.items():
        plain = plans.get(name.replace("fuse=True", "fuse=False"), sizes)
        for i, (fused, unfused) in enumerate(zip(sizes, plain, strict=False)):
            if fused > unfused:
                raise Found("plans", f"{name}, step {i}: {fused} bytes, and {unfused} unfused")
