"""The place of a VM in its group, and the sharding of the block that a thread or task is in.

Every captured step depends on both. Groups import processes and sockets, and this file does not.
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
"""Sharded state: the optimizer's, or the weights, too."""

_sharding: ContextVar[Shard | None] = ContextVar("shard", default=None)

sharding_here: Final = _sharding.get
"""Return the sharding of the block that this thread or task is in, in a group of any size."""


@contextmanager
def sharding(shard: Shard | None) -> Iterator[None]:
    """Shard the state of optimizers created inside the block, and average gradients for them."""
    before = _sharding.set(shard)
    try:
        yield
    finally:
        _sharding.reset(before)


class Membership:
    """The place of one VM in its group, None while it is in none."""

    def __init__(self, vm: VMProtocol) -> None:
        self.member: Member | None = None


def member_of(vm: VMProtocol) -> Member | None:
    """Return the VM's membership in a group; None without a group."""
    return vm.attached(Membership).member


def place_of(vm: VMProtocol) -> tuple[int, int]:
    """Return the VM's rank, and the size of its group."""
    member = member_of(vm)
    return (member.rank, member.size) if member is not None else (0, 1)
