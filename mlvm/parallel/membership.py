"""Rank of a VM in a group, and sharding of the current `with` block.

Every captured step depends on both. Unlike groups, this file imports no processes or sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from mlvm.core.protocol import VMProtocol

if TYPE_CHECKING:
    from mlvm.parallel.collectives import Member

Shard: TypeAlias = Literal["optimizer", "all"]
"""Sharded state: only the optimizer's, or also the weights."""

_sharding: ContextVar[Shard | None] = ContextVar("shard", default=None)

sharding_here: Final = _sharding.get
"""Return the sharding of the `with` block that this thread or task is in."""


@contextmanager
def sharding(shard: Shard | None) -> Iterator[None]:
    """Shard the state of optimizers created inside the block, and average gradients for them."""
    before = _sharding.set(shard)
    try:
        yield
    finally:
        _sharding.reset(before)


class Membership:
    """Membership of a VM in a group. `member` is None if the VM is in no group."""

    def __init__(self, vm: VMProtocol) -> None:
        self.member: Member | None = None


def member_of(vm: VMProtocol) -> Member | None:
    """Return the VM's membership in a group, or None if it is not in a group."""
    return vm.attached(Membership).member


def place_of(vm: VMProtocol) -> tuple[int, int]:
    """Return the VM's rank and the size of the group; (0, 1) if it is not in a group."""
    member = member_of(vm)
    return (member.rank, member.size) if member is not None else (0, 1)
