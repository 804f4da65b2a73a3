"""Calls of the tests of groups on each member: one collective, on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlvm.core.program.program import Program
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.group import Group
from tests.core.programs import put

Step = Callable[[int, VM], Any]

NO_RESULTS = ("all_reduce", "all_reduce.start", "all_reduce.wait", "broadcast", "send", "barrier")


def call(vm: VM, name: str, *arrays: Array, **attributes: Any) -> list[Array]:
    """Call one function on copies of the arrays; return its results or what it leaves in them. The
    VM holds no more after."""
    handles = [put(vm, array) for array in arrays]
    try:
        nresults = 0 if name in NO_RESULTS else 1
        program = Program.of_op(name, len(arrays), attributes, nresults)
        return vm.launch(program, handles) or [vm.read(handle) for handle in handles]
    finally:
        for handle in handles:
            vm.dealloc_tensor(handle)


def run(size: int, *steps: Step) -> list[Any]:
    """Return the results of each member's step, in a new group; a single step is every member's."""
    with Group(size) as group:
        return run_in(group, *steps)


def run_in(group: Group, *steps: Step) -> list[Any]:
    return group.run(lambda rank, vm: steps[rank % len(steps)](rank, vm))


def gathered(inputs: Sequence[Array], name: str, **attributes: Any) -> list[Array]:
    """The one result of a collective on each member, for that member's input."""
    return run(len(inputs), lambda rank, vm: call(vm, name, inputs[rank], **attributes)[0])
