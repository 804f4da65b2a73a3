"""One call: an op on tensors becomes a launch of a one-op program, and an entry of the tape.

One `a + b` runs through `Tensor.__add__`, `apply`, `VM.launch`, `machine.run` and the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.arena.arena import STALE, Arena, scope
from mlvm.arena.context import current
from mlvm.arena.fields import CallFields
from mlvm.core.errors import HandleError, OpError
from mlvm.core.memo import Memo, bits_of
from mlvm.core.op import OPS, PLAIN, Attributes, Op
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32, i64
from mlvm.eager.tensor.context import current_arena, lifted
from mlvm.eager.tensor.default import default_float, follows_default
from mlvm.eager.tensor.number import Number, is_open, plain
from mlvm.eager.tensor.precision import warn_of_mixed
from mlvm.eager.tensor.reading import explain, launch_for_values
from mlvm.eager.tensor.templates import opaque
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.tensor import untracked as untracked
from mlvm.machines.native.extension import EXTENSION

Tensors: TypeAlias = tuple[Tensor, ...]
Types: TypeAlias = tuple[TensorType, ...]


class OneOp(CallFields):
    """An op with attributes: the programs to launch, and the result types seen so far."""

    __slots__ = ("attributes", "op", "programs", "templates", "types")

    def __init__(self, op: Op, attributes: Attributes) -> None:
        self.op = op
        self.attributes = attributes
        self.gives_part = op.is_view
        self.types: dict[tuple[TensorType, ...], TensorType | None] = {}
        self.programs: dict[int, Program] = {}  # by number of operands
        self.templates: dict[Any, Any] = {}  # filled by the tape

    def infer(self, types: tuple[TensorType, ...]) -> TensorType | None:
        """Return the result's type; None if it depends on values.

        Raises an `OpError` without the caller's failed lookup as exception context.
        """
        try:
            result = self.op.infer(types, self.attributes)
        except OpError as error:
            error.__suppress_context__ = True
            error.__traceback__ = None
            raise
        warn_of_mixed(self.op.name, types)
        if len(self.types) >= _by_meaning.limit:
            self.types.clear()
            self.templates.clear()
        if result is not None and (result.is_open or any(x.is_open for x in types)):
            return result  # valid only in one trace
        self.types[types] = result
        return result

    def program(self, noperands: int) -> Program:
        """Return the program that runs the op on this number of operands.

        It writes to the first argument, or pushes a result with a type that depends on values.
        Calls that C runs need no program.
        """
        program = self.programs.get(noperands)
        if program is None:
            name, written = self.op.name, int(not self.op.dynamic)
            name = f"{name}.out" if written else name
            new_program = Program.of_op(name, noperands + written, self.attributes, 1 - written)
            program = self.programs.setdefault(noperands, new_program)
        return program

    def __repr__(self) -> str:
        return f"<OneOp {self.op.name} {dict(self.attributes)}>"


_by_spelling: Final = Memo[Any, OneOp](4096, "eager.tensor.apply spellings")
_spellings: Final = _by_spelling.entries
_by_meaning: Final = Memo[Any, OneOp](4096, "eager.tensor.apply calls")


def _key(value: Any) -> Any:
    """Return a key that only identical values share: 1, True and 1.0 differ, as do 0.0 and -0.0.

    An open length has none that is hashable.
    """
    kind = value.__class__
    if type(value) is Number and value.is_open():
        return []
    if isinstance(value, tuple):
        for each in value:
            if type(each) is not int:
                return kind, tuple([_key(each) for each in value])
        return value
    return kind, bits_of(value) if isinstance(value, (float, complex, np.inexact)) else value


def _has_open(values: Iterable[Any]) -> bool:
    """Return whether a value, or one in a tuple or list among them, is an open length."""
    for each in values:
        kind = type(each)
        if is_open(each) or ((kind is tuple or kind is list) and _has_open(each)):
            return True
    return False


def one_op(name: str, **attributes: Any) -> OneOp:
    """Return the cached `OneOp` with this name and these attributes.

    Raises `ArgumentError` if the op does not take them.
    """
    spelling: Any = (name, *[(attribute, _key(value)) for attribute, value in attributes.items()])
    try:
        return _spellings[spelling]
    except KeyError:
        pass
    except TypeError:  # a list is not hashable, but `bind` may take it
        if _has_open(attributes.values()):  # valid only in one trace
            return OneOp(OPS[name], OPS[name].bind(attributes))
        spelling = None
    bound = values = OPS[name].bind(attributes)
    if not PLAIN.issuperset(map(type, values.values())):
        bound = plain(values)
    if bound is not values:
        spelling = None
    meaning = (name, *map(_key, bound.values()))
    call = _by_meaning.get(meaning, lambda: OneOp(OPS[name], bound))
    if spelling is not None:
        _by_spelling[spelling] = call
    return call


def apply_in_python(call: OneOp, *operands: Tensor) -> Tensor:
    """Run one op on tensors: infer the type, allocate the result, launch, record.

    With the C extension, `apply` handles the common case in C, and calls this function in all other
    cases.

    Raises an `OpError` for operands that the op rejects, `StaleTensorError` for a freed operand,
    and `ArenaOverflowError` if the result does not fit. In these cases nothing is allocated or
    recorded.
    """
    operands = lifted(operands)
    types = tuple([x.type for x in operands])
    try:
        type = call.types[types]
    except KeyError:
        type = call.infer(types)
    if follows_default(call.attributes, types, type) and default_float() is not f32:
        opaque()  # the casts are separate calls
        cast = one_op("astype", dtype=default_float().name)
        return apply(call, *[apply(cast, x) for x in operands])
    arena = scope() or current_arena()
    if type is None:
        return _apply_dynamic(call, arena, operands, types)
    out = arena.alloc(type, Tensor)
    launch(out, call, *operands)
    for x in operands:
        if x.handle == STALE:  # freed before the launch, which read another tensor with this handle
            raise x.stale()
    out.tape = None
    if call.gives_part:
        out.is_part = True
    tape = current().tape
    if tape is not None:
        tape.record(call, operands, types, out)
    return out


def launch(out: Tensor, call: OneOp, *operands: Tensor) -> None:
    """Run one op that writes to the new tensor `out`. C calls it for ops that numpy executes."""
    used, vm = (out, *operands), out.arena.vm
    try:
        vm.launch(call.program(len(operands)), [x.handle for x in used])
    except HandleError as error:
        raise explain(error, vm, (*operands, out)) from None


apply: Final[Callable[..., Tensor]] = apply_in_python if EXTENSION is None else EXTENSION.apply


def plan_for(call: OneOp, types: tuple[TensorType, ...], fast_path: Any) -> tuple[Any, Any]:
    """Return the prepared call for operands of these types, and the type of the result, for `apply`
    in C. On a VM elsewhere the call is a program's number. For a type that depends on values it is
    a function of the operands, which may return None. Returns two Nones for calls that C leaves to
    Python. Raises an `OpError` for operands that the op refuses."""
    out = call.types[types] if types in call.types else call.infer(types)
    if call.op.dynamic:
        return _DYNAMIC_IN_C.get(call.op.name), None
    if out is None or follows_default(call.attributes, types, out):
        return None, None
    program = partial(call.program, len(types))
    return fast_path.prepare(program, call.op.name, (out, *types), call.attributes), out


def raise_stale(x: Tensor) -> NoReturn:
    """Raise the error for a tensor that was freed while it was used."""
    raise x.stale()


_DYNAMIC_IN_C: Final[dict[str, Callable[..., Tensor | None]]] = (
    {}
    if EXTENSION is None
    else {
        "boolean_index": EXTENSION.chosen,
        "nonzero_indices": partial(EXTENSION.positions, i64),
    }
)


def _apply_dynamic(
    call: OneOp, arena: Arena, operands: tuple[Tensor, ...], types: tuple[TensorType, ...]
) -> Tensor:
    """Run an op with a result shape that depends on values.

    The result is returned by value, unless C can compute it.
    """
    in_c = _DYNAMIC_IN_C.get(call.op.name)
    out = None if in_c is None else in_c(*operands)
    if out is None:
        [array] = launch_for_values(call.program(len(operands)), arena.vm, operands)
        out = from_array(array)
    tape = current().tape
    if tape is not None:
        tape.record(call, operands, types, out)
    return out


COPY: Final = one_op("copy")


def alias_in_python(call: OneOp, x: Tensor, type: TensorType) -> Tensor:
    """Return a view of `x` with a different type, recorded as the op `call`, without a copy.

    With the C extension, `alias` handles the common case in C, and calls this function in all other
    cases.
    """
    [x] = lifted((x,))
    out = x.arena.view(x, type, Tensor)
    out.tape, out.is_part = None, True
    tape = current().tape
    if tape is not None:
        tape.record(call, (x,), (x.type,), out)
    return out


alias: Final[Callable[[OneOp, Tensor, TensorType], Tensor]] = (
    alias_in_python if EXTENSION is None else EXTENSION.alias
)


def alias_of(x: Tensor) -> Tensor:
    """Return a second tensor with the value of x, which is copied when either is updated."""
    return alias(COPY, x, x.type)
