"""What an eager call finds around it: the arena for its result, and the tape, if any.

Interactive use needs no arena of its own: results then live in the default VM's `default`
arena for as long as Python refers to them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any, Protocol

from mlvm.arena.arena import Arena, scope
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM


class Tape(Protocol):
    """What eager calls are recorded on while a gradient is taken; `mlvm.eager.autodiff` has one.

    `call` is a `OneOp`; operands and results are Tensors.
    """

    def record(
        self, call: Any, operands: tuple[Any, ...], types: tuple[TensorType, ...], out: Any
    ) -> None: ...
    def refuse_write(self, call: Any, x: Any, operands: Sequence[Any] = ()) -> None: ...


recording: ContextVar[Tape | None] = ContextVar("recording", default=None)
"""The tape that differentiable calls are recorded on, for each thread or task."""


_lock = threading.Lock()


@cache
def _make_default_vm() -> VMProtocol:
    return LocalVM("default")


def default_vm() -> VMProtocol:
    """The VM that eager calls run on outside of any arena, made when first needed."""
    with _lock:
        return _make_default_vm()


class _Default(threading.local):
    """A thread's own arena: an arena serves one thread at a time."""

    @cached_property
    def arena(self) -> Arena:
        return Arena(default_vm(), "default", trims=True)


_default = _Default()


def default_arena() -> Arena:
    """The arena of interactive use, on the default VM; each thread has one."""
    return _default.arena


def current_arena() -> Arena:
    """The arena that results are allocated in now."""
    return scope.get() or default_arena()
