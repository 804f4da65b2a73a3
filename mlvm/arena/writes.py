"""Watches: counters of writes to tensors from which other values were computed.

A `Watch` counts the writes to some tensors of a VM from any source: an eager update, another
captured function, a load, or a program launched by hand. All of them call the VM's `launch`,
`write`, `swap` or `borrow`, around which the first watch of a VM puts layers. The fast path of
eager calls writes only to new memory and to regions that are not `watched`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mlvm.arena.arena import Allocation, Region, regions
from mlvm.core.memo import Memo
from mlvm.core.observe import observe, of_updates
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program, Variant
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array
from mlvm.machines import residuals
from mlvm.machines.accesses import ALL, accesses, reads_by_name
from mlvm.machines.checks import CHECK


class Watch:
    """Counter of the writes to a VM's tensors, and of the tensors' moves, since `begin`.

    changes: the count. To use values computed from the tensors, hold the VM's `lock` while
        comparing it, so that no write can intervene.
    """

    def __init__(self, vm: VMProtocol) -> None:
        self.changes = 0
        self._writes = vm.attached(_Writes)

    def is_of(self, vm: VMProtocol) -> bool:
        """Return whether it watches tensors of this VM."""
        return vm.attached(_Writes) is self._writes

    def begin(self, tensors: Iterable[Allocation]) -> None:
        """Watch exactly these tensors, at the current addresses."""
        self._writes.watch(self, [x.root.region for x in tensors])


def may_count(vm: VMProtocol, program: Program, args: tuple[TensorHandle, ...]) -> bool:
    """Return whether a launch may write to a watched tensor. The caller holds the VM's lock."""
    if "launch" not in vars(vm):  # no watch was created
        return False
    writes = vm.attached(_Writes)
    return bool(writes._of) and writes._quiet.entries.get((id(program), args)) is not program


class _Writes:
    """Watches of a VM, by watched region."""

    def __init__(self, vm: VMProtocol) -> None:
        self._regions = regions(vm)
        self._watches: weakref.WeakKeyDictionary[Region, tuple[weakref.ref[Watch], ...]]
        self._watches = weakref.WeakKeyDictionary()
        self._of: weakref.WeakKeyDictionary[Watch, list[Region]] = weakref.WeakKeyDictionary()
        self._regions.on_moved = self._moved
        # launches that write to no watched region
        self._quiet = Memo[tuple[int, Sequence[TensorHandle]], object](64, "arena.writes")

        def launch(
            proceed: Callable[..., list[Array]],
            program: Program,
            args: Sequence[TensorHandle] = (),
            **options: Any,
        ) -> list[Array]:
            if not self._of:
                return proceed(program, args, **options)
            with vm.lock:
                try:
                    outputs = proceed(program, args, **options)
                    launched, owner = (id(program), tuple(args)), program
                    if isinstance(program, Variant) and program.written is not None:
                        owner = program.patched
                        launched = id(owner), tuple([args[i] for i in program.written])
                    is_quiet = self._quiet.entries.get(launched) is owner
                    if not is_quiet and self._launched(program, args):
                        self._quiet[launched] = owner
                except BaseException:  # an interrupt may occur anywhere
                    self._launched(program, args)
                    raise
                return outputs

        def touching(proceed: Callable[..., Any], *args: Any, **options: Any) -> Any:
            with vm.lock:
                try:
                    return proceed(*args, **options)
                finally:
                    self._written(args)

        others = [name for name in ("write", "swap", "borrow", "share") if hasattr(vm, name)]
        observe(vm, launch=of_updates(launch), **dict.fromkeys(others, touching))

    def watch(self, watch: Watch, watched: Iterable[Region | None]) -> None:
        now = [region for region in watched if region is not None]
        if self._of.get(watch) == now:
            return
        self._quiet.clear()
        before = self._of.pop(watch, ())
        self._of[watch] = now
        for region in {*before, *now}:  # a new set, as moves are counted without the lock
            others = [x for x in self._watches.get(region, ()) if x() not in (None, watch)]
            added = [weakref.ref(watch)] if region in now else []
            self._watches[region] = (*others, *added)
            region.watched = bool(self._watches[region])

    def _launched(self, program: Program, args: Sequence[TensorHandle]) -> bool:
        """Count the launch's writes; return whether it writes to no watched region."""
        if not isinstance(program, Program):  # the launch raised an error
            return False
        numbers = written(program)
        if numbers is None:
            for watch in list(self._of):
                watch.changes += 1
            return False
        return not self._written([args[i] for i in numbers if i < len(args)])

    def _written(self, handles: Iterable[object]) -> bool:
        """Count writes to these tensors; return whether one of them is watched."""
        by_handle, is_watched = self._regions.data, False  # most handles belong to no region
        for handle in handles:
            reference = by_handle.get(handle) if isinstance(handle, int) else None
            region = None if reference is None else reference()
            if region is not None and self._moved(region):
                is_watched = True
        return is_watched

    def _moved(self, region: Region) -> bool:
        """Count a write to the region or a move; return whether the region is watched."""
        watches = [x for x in [ref() for ref in self._watches.get(region, ())] if x is not None]
        for watch in watches:
            watch.changes += 1
        return bool(watches)


_READS_ONLY: Final = frozenset({CHECK, residuals.BEGIN, residuals.END})


def written(program: Program) -> frozenset[int] | None:
    """Return the numbers of the arguments that a launch may write to; None for any tensor.

    An unknown access counts as a write.
    """
    if not hasattr(program, "written"):
        numbers = frozenset[int | None]().union(*[x.writes for x in accesses(program, reads_of)])
        program.written = None if None in numbers else numbers  # type: ignore[assignment]
    return program.written


def leave_out(program: Program, numbers: Iterable[int]) -> None:
    """Mark arguments of the program in memory without arena tensors."""
    arguments = written(program)
    program.written = arguments if arguments is None else arguments.difference(numbers)


def reads_of(name: str, attributes: Attributes) -> slice | None:
    """Return which operands a host function only reads; None if it may write to any operand."""
    return ALL if name in _READS_ONLY else reads_by_name(name, attributes)
