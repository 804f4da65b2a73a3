"""Context of the calls of a thread or task: arena, tape, recorder, dtypes and keys.

All of it is one frozen value in one `ContextVar`. Python reads `current().tape`, and
`with context(tape=...)` sets a field inside a block. C reads the same value: `present_context` in
native/src/language/dispatch.c. Packages above define what the fields contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array, DType, TensorType, f32


class Tape(Protocol):
    """Tape of reverse-mode differentiation; `eager.autodiff.tape` has the class.

    `call` is a `OneOp`; operands and results are Tensors. `within` is the recorder that was current
    when the tape was created.
    """

    within: object
    has_lost: bool

    @property
    def nodes(self) -> Sequence[Any]: ...

    def record(
        self, call: Any, operands: tuple[Any, ...], types: tuple[TensorType, ...], out: Any
    ) -> None: ...
    def needs_operand(
        self, call: Any, operands: tuple[Any, ...], types: tuple[TensorType, ...], out: Any
    ) -> bool: ...
    def keeps(self, x: Any, stop: int | None = None) -> bool: ...
    def exchange(self, others: Mapping[int, Any], x: Any) -> None: ...


class Capture(Protocol):
    """Recorder of a trace; `eager.recording.recorder` has the class.

    outer: tapes from outside of a block or function, each with the number of nodes at the start. A
    tensor of one of these nodes is replaced by the `lifted` tensor.
    """

    outer: Mapping[Tape, int]

    def lifted(self, xs: tuple[Any, ...]) -> tuple[Any, ...]: ...
    def stopped(self, x: Any) -> Any: ...
    def update(
        self,
        call: Any,
        operands: tuple[Any, ...],
        types: tuple[TensorType, ...],
        out: Any,
        tapes: Sequence[Tape],
    ) -> None: ...
    def require_own_tape(self, x: Any, tape: Tape) -> None: ...
    def read(self, handle: TensorHandle) -> Array: ...
    def accept_text(self) -> None: ...
    def forget_read(self) -> None: ...


class Context(NamedTuple):
    """Everything other than arguments that a call in this thread or task depends on.

    The first eight fields are read in C, by position: `ContextField` in dispatch.h and templates.c
    has the same order.

    `arena`: Arena of the innermost block, in which results are allocated; None for the thread's
        own.
    `arena_blocks`: open `with arena:` blocks, the innermost last.
    `vms`: open `ml.use` blocks, each with the VM, the innermost last.
    `tape`: tape that records differentiable calls.
    `default_dtype`: dtype of floats that neither an argument nor an operand determines.
    `autocast_dtype`: half-precision dtype of matrix products, set by the innermost `autocast`.
    `key_source`: source of random keys that replaces the VM's source.
    `key_state`: state of random keys that replaces the VM's state, in captured functions only.
    `recorder`: recorder of the captured function that is traced.
    `default_dtypes`, `autocast_dtypes`: values set by open blocks, the innermost last; the first
        entry is the value outside of all blocks. `eager.tensor.context_blocks` sets them.
    `numbers`: computation on Python numbers that is recorded.
    `line`: line of the traced call that an interpreter runs.
    `reword`: changes the error of a position that is out of range.
    `functions`: functions whose bodies are traced, outermost first.
    `axes`: named axes of `vmap`: for each name the size, and the element's index, i64[].
    """

    arena: Any = None
    arena_blocks: tuple[Any, ...] = ()
    vms: tuple[tuple[object, VMProtocol], ...] = ()
    tape: Tape | None = None
    default_dtype: DType = f32
    autocast_dtype: DType | None = None
    key_source: Callable[[], Any] | None = None
    key_state: Any = None
    recorder: Capture | None = None
    default_dtypes: tuple[tuple[Any, DType], ...] = ((None, f32),)
    autocast_dtypes: tuple[tuple[Any, DType | None], ...] = ((None, None),)
    numbers: Any = None
    line: Any = None
    reword: Callable[[Any], None] | None = None
    functions: tuple[Any, ...] = ()
    axes: Mapping[str, tuple[int, Any]] = MappingProxyType({})


_context: Final[ContextVar[Context]] = ContextVar("context", default=Context())  # noqa: B039
_POSITIONS: Final = {name: i for i, name in enumerate(Context._fields)}

current: Final[Callable[[], Context]] = _context.get
"""Return the context of this thread or task."""


def set_context(**fields: Any) -> None:
    """Set these fields of the context from now on; the other fields do not change."""
    _context.set(_replace(current(), fields))


def set_arena(arena: Any, blocks: tuple[Any, ...]) -> None:
    """Set the first two fields: `set_context` for blocks of arenas, but faster."""
    _context.set(tuple.__new__(Context, (arena, blocks, *current()[2:])))


@contextmanager
def context(**fields: Any) -> Iterator[None]:
    """Set these fields of the context inside the block, and restore the previous values after it.

    Blocks of different fields need not be nested: a block restores only the fields that it has set.
    Blocks of the same field must be nested, so users only open a `ContextBlock`, `with arena:` or
    `use`, which keep lists of the open blocks.
    """
    before = current()
    inside = _replace(before, fields)
    try:  # an interrupt may come as soon as it is set
        _context.set(inside)
        yield
    finally:
        try:
            if current() is inside:
                _context.set(before)
            else:
                _restore(before, fields)
        except BaseException:  # an interrupt
            _restore(before, fields)
            raise


def _restore(before: Context, fields: Mapping[str, Any]) -> None:
    _context.set(_replace(current(), {name: getattr(before, name) for name in fields}))


def _replace(now: Context, fields: Mapping[str, Any]) -> Context:
    """Return the context with these values of fields: `_replace` of tuples, but faster."""
    values: list[Any] = []
    for name, value in fields.items():
        i = _POSITIONS[name]
        if now[i] is not value:
            values = values or [*now]
            values[i] = value
    return tuple.__new__(Context, values) if values else now
