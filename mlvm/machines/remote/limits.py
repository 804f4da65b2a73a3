"""Limits of a client of a server: bytes, steps, time, connections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from mlvm.core.errors import MachineError

_GIB: Final = 1 << 30


class FixedLimits(NamedTuple):
    """Limits that apply before a peer is authenticated, or to what a client stores itself."""

    strangers: int = 96  # unauthenticated connections
    strangers_of_peer: int = 64
    refused: int = 256  # refused connections that may still read the reason
    observers: int = 64  # connections that receive the status
    name: int = 200  # characters in the name of a client or VM
    reason: int = 500  # characters of a text from a peer
    handshake_bytes: int = 4096  # of a message from an unauthenticated peer
    secret: int = 16  # minimum bytes: an eavesdropper of a handshake could try all shorter secrets
    distinct: int = 5  # minimum number of different bytes in a secret
    arguments: int = (1 << 16) - 1  # of a launch
    posts: int = 1 << 13  # unconfirmed posts with stored lines; then the client waits
    unconfirmed: int = 1 << 26  # bytes that a client with a lease stores
    speed: int = 1 << 20  # minimum bytes per second of a large message


FIXED: Final = FixedLimits()


def _limit(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server; each is an option of `python -m mlvm serve`. Raises `MachineError`
    for a value that is not a number above 0."""

    message_bytes: int = _limit(_GIB, "size of a message, for example an array that is written")
    program_bytes: int = _limit(_GIB // 4, "size of all programs that a client has loaded")
    held_bytes: int = _limit(16 * _GIB, "size of all tensors and storages of a VM")
    process_bytes: int = _limit(24 * _GIB, "size of a client's process, with --processes")
    handles: int = _limit(1 << 20, "number of tensors and storages of a VM")
    launch_bytes: int = _limit(4 * _GIB, "memory that a launch allocates at any time, or returns")
    launch_steps: int = _limit(10**11, "instructions of a launch")
    launch_seconds: float = _limit(600.0, "time of a launch")
    connections: int = _limit(64, "simultaneous clients")
    user_connections: int = _limit(1 << 20, "simultaneous clients of a user")
    user_bytes: int = _limit(1 << 50, "size of the tensors and storages in all VMs of a user")
    user_launches: int = _limit(10**15, "launches of a user per hour")
    user_seconds: float = _limit(1e9, "processor time of a user per hour")
    lease_seconds: float = _limit(60.0, "time in which a lost client may reconnect, with retry=")
    idle_seconds: float = _limit(3600.0, "time until a client's next message is complete")
    send_seconds: float = _limit(60.0, "time until a client has received an answer")
    handshake_seconds: float = _limit(10.0, "time until a new client is authenticated")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = isinstance(each.default, int)
            kinds = int if whole else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                expected = "an integer" if whole else "a number"
                raise MachineError(f"{each.name}: expected {expected} above 0, got {value!r}")
