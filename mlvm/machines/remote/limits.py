"""Limits of a client of a server: bytes, steps, time, connections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

from mlvm.core.errors import MachineError

_GIB: Final = 1 << 30


def _limit(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server; each is an option of `python -m mlvm serve`. Raises `MachineError`
    for a value that is not a number above 0."""

    message_bytes: int = _limit(_GIB, "a message, such as one array that is written")
    program_bytes: int = _limit(_GIB // 4, "all programs that a client has loaded, as bytes")
    held_bytes: int = _limit(16 * _GIB, "the tensors and storages of a VM")
    process_bytes: int = _limit(24 * _GIB, "the process of a client, with --processes")
    handles: int = _limit(1 << 20, "the tensors and storages of a VM, by number")
    launch_bytes: int = _limit(4 * _GIB, "what a launch makes and holds at once, or returns")
    launch_steps: int = _limit(10**11, "the instructions of a launch")
    launch_seconds: float = _limit(600.0, "the time of a launch")
    connections: int = _limit(64, "clients at once")
    user_connections: int = _limit(1 << 20, "clients of one user at once")
    user_bytes: int = _limit(1 << 50, "the tensors and storages of all VMs of a user")
    user_launches: int = _limit(10**15, "launches of a user in an hour")
    user_seconds: float = _limit(1e9, "a processor's time for a user in an hour")
    lease_seconds: float = _limit(60.0, "the time that a lost client may come again in, by retry=")
    idle_seconds: float = _limit(3600.0, "the time till a client's next message is whole")
    send_seconds: float = _limit(60.0, "the time till a client has taken its answer")
    handshake_seconds: float = _limit(10.0, "the time till a new client has proved who it is")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = isinstance(each.default, int)
            kinds = int if whole else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                expected = "an integer" if whole else "a number"
                raise MachineError(f"{each.name}: expected {expected} above 0, got {value!r}")
