"""Eager tensors, and how a call on them becomes a launch.

One `a + b` runs through `Tensor.__add__`, `apply`, `VM.launch`, `machine.run` and the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.arena.arena import STALE, Allocation, Arena, exchange, scope, stale_of
from mlvm.arena.fields import CallFields
from mlvm.core.errors import (
    CaptureError,
    DTypeError,
    HandleError,
    MlvmError,
    NoLength,
    NoTranspose,
    OperandValueError,
    OpError,
    ShapeError,
    brief,
)
from mlvm.core.op import OPS, Attributes, Op
from mlvm.core.ops import half
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import require
from mlvm.core.types import (
    Array,
    DType,
    Shape,
    TensorType,
    bf16,
    bool_,
    c64,
    f32,
    i64,
    promote,
    u64,
)
from mlvm.eager.tensor.context import Tape, current_arena, current_capture, current_tape
from mlvm.eager.tensor.methods import Methods
from mlvm.eager.tensor.number import Number, plain
from mlvm.machines.native.extension import EXTENSION

Scalar: TypeAlias = bool | int | float | complex
Operand: TypeAlias = "Tensor | Scalar | Array | list[Any] | tuple[Any, ...]"


_REMEMBERED: Final = 4096  # calls, and types of one call: x[i] for many i makes many calls


class OneOp(CallFields):
    """An op with its attributes: the programs to launch, and the result types seen so far."""

    __slots__ = ("attributes", "fresh", "into", "op", "templates", "types")

    def __init__(self, op: Op, attributes: Attributes) -> None:
        self.op = op
        self.attributes = attributes
        self.types: dict[tuple[TensorType, ...], TensorType | None] = {}
        self.into: dict[int, Program] = {}
        self.fresh: dict[int, Program] = {}
        self.templates: dict[Any, Any] = {}  # filled by the tape

    def infer(self, types: tuple[TensorType, ...]) -> TensorType | None:
        """The result's type; None if only running tells. Raises an `OpError`, which does not show
        that the caller looked into `types` first."""
        try:
            result = self.op.infer(types, self.attributes)
        except OpError as error:
            error.__suppress_context__ = True
            error.__traceback__ = None
            raise
        if len(self.types) >= _REMEMBERED:
            self.types.clear()
            self.templates.clear()
        n = len(types)
        if self.op.dynamic:
            if n not in self.fresh:
                self.fresh[n] = Program.of_op(self.op.name, n, self.attributes, 1)
        elif n + 1 not in self.into:
            self.into[n + 1] = Program.of_op(f"{self.op.name}.out", n + 1, self.attributes, 0)
        self.types[types] = result  # last: a thread that finds it relies on the rest
        return result

    def __repr__(self) -> str:
        return f"<OneOp {self.op.name} {dict(self.attributes)}>"


_BY_SPELLING: dict[Any, OneOp] = {}
_BY_MEANING: dict[Any, OneOp] = {}


def _key(value: Any) -> Any:
    """A key that is equal for equal values only: 1, True, 1.0 differ, and so do 0.0 and -0.0."""
    kind = value.__class__
    if isinstance(value, tuple):
        return kind, tuple([_key(each) for each in value])
    return kind, repr(value) if isinstance(value, (float, complex, np.inexact)) else value


def one_op(name: str, **attributes: Any) -> OneOp:
    """The one `OneOp` of that name and these attributes. Raises `AttributeRefused`."""
    spelling: Any = (name, *[(attribute, _key(value)) for attribute, value in attributes.items()])
    try:
        return _BY_SPELLING[spelling]
    except KeyError:
        pass
    except TypeError:  # a list is not hashable, but `bind` may take it
        spelling = None
    given = OPS[name].bind(attributes)
    bound = plain(given)
    if bound is not given:
        spelling = None
    meaning = (name, *map(_key, bound.values()))
    if len(_BY_MEANING) >= _REMEMBERED:
        _BY_MEANING.clear()
        _BY_SPELLING.clear()
    call = _BY_MEANING.setdefault(meaning, OneOp(OPS[name], bound))
    if spelling is not None:
        _BY_SPELLING[spelling] = call
    return call


def apply_in_python(call: OneOp, *operands: Tensor) -> Tensor:
    """Run one op on tensors: infer the type, allocate the result, launch, record. Where the C
    extension is here, `apply` does this in C for the common case, and calls this for all others.

    Raises an `OpError` for operands the op refuses, `StaleTensor` for one that has ended,
    `ArenaOverflow` when the result does not fit; nothing is allocated or recorded then.
    """
    pair = len(operands) == 2  # spelled out for speed, here and below
    if pair:
        x, y = operands
        types: tuple[TensorType, ...] = (x.type, y.type)
    else:
        types = tuple([x.type for x in operands])
    try:
        type = call.types[types]
    except KeyError:
        type = call.infer(types)
    arena = scope.get() or current_arena()
    if type is None:
        return _apply_dynamic(call, arena, operands, types)
    out = arena.alloc(type, Tensor)
    if pair:
        handles: tuple[int, ...] = (out.handle, x.handle, y.handle)
        program = call.into[3]
    else:
        handles = (out.handle, *[x.handle for x in operands])
        program = call.into[len(handles)]
    try:
        arena.vm.launch(program, handles)
    except HandleError as error:
        raise explain(error, arena.vm, (*operands, out)) from None
    ended = not (x.handle and y.handle) if pair else STALE in [x.handle for x in operands]
    if ended:  # maybe before the launch, which then read another tensor of the same handle
        raise next(x.stale() for x in operands if x.handle == STALE)
    out.tape = None
    tape = current_tape.get()
    if tape is not None:
        tape.record(call, operands, types, out)
    return out


_COPY: Final = one_op("copy")

apply: Final[Callable[..., Tensor]] = apply_in_python if EXTENSION is None else EXTENSION.apply


def plan_for(call: OneOp, types: tuple[TensorType, ...], door: Any) -> tuple[Any, Any]:
    """What `apply` in C runs for operands of these types, or the number of the program that it
    launches elsewhere, and the type of the result; two Nones where it leaves them to Python."""
    out = call.types.get(types)
    if out is None:
        return None, None
    program = call.into[len(types) + 1]
    return door.plan(program, call.op.name, (out, *types), call.attributes), out


def raise_stale(x: Tensor) -> NoReturn:
    """Raise the error for a tensor that has ended while it was used."""
    raise x.stale()


def apply_into(out: Tensor, call: OneOp, *operands: Tensor) -> Tensor:
    """Run one op and give its result to the tensor `out`, whose type must fit exactly.

    The result is written over the bytes of `out`, where nobody else needs them. Where a view or a
    tape needs the old value, or the op cannot write over its operand, `out` moves to new memory of
    its arena, and what needs the old value keeps the old memory.

    Raises `ShapeError` or `DTypeError` for a result of another type, and what `apply` raises.
    """
    types = tuple([x.type for x in operands])
    type = call.types[types] if types in call.types else call.infer(types)
    if type is not out.type:
        refused = DTypeError if type is not None and type.dtype is not out.dtype else ShapeError
        raise refused(f"the result is {type} and does not fit into out={out.type}").at(
            call.op.name, types
        )
    region = out.region
    if live_tapes or region is None or region.views or _reads(call, operands, out):
        _update(out, call, operands, types)
    else:
        overwrite(out, call, *operands)
    return out


def _update(
    out: Tensor, call: OneOp, operands: tuple[Tensor, ...], types: tuple[TensorType, ...]
) -> None:
    """`apply_into` for a result whose type fits, where somebody may need the old value."""
    if out.handle == STALE:
        raise out.stale()
    on, tape = current_capture.get(), current_tape.get()
    tapes = [each for each in live_tapes.copy() if each.within is on]
    tracked = tape is not None and any(x.tape is tape for x in (out, *operands))
    if on is not None and tape is not None and tracked:
        on.require_own_tape(out, tape)
    if (
        _is_shared(out, tapes)
        or _reads(call, operands, out)
        or (tape is not None and tracked and tape.needs_operand(call, operands, types, out))
    ):
        if on is not None:
            on.update(call, operands, types, out, tapes)
            return
        with (out.arena if out.arena.__class__ is Arena else current_arena()).hosting():
            new = apply(call, *operands)
        exchange(out, new)
        out.tape, new.tape = new.tape, out.tape
        out.node, new.node = getattr(new, "node", 0), getattr(out, "node", 0)
        for each in tapes:
            each.exchange({id(out): new, id(new): out}, new)
    else:
        overwrite(out, call, *operands)
        if tape is not None and tracked:
            tape.record(call, operands, types, out)
        else:
            out.tape = None


def _is_shared(x: Tensor, tapes: Iterable[Tape]) -> bool:
    """Whether somebody else needs the bytes of x: it is a view, there are views of it, or one of
    the tapes keeps its value."""
    region = x.region
    return region is None or bool(region.views) or any(tape.keeps(x) for tape in tapes)


def _reads(call: OneOp, operands: tuple[Tensor, ...], out: Tensor) -> bool:
    """Whether the op reads `out` in another way than it may while it writes over it."""
    return any(x is out for x in operands[call.op.in_place :])


def make_exclusive(x: Allocation) -> None:
    """See to it that nobody else needs the bytes of x, which moves where somebody does: for what
    changes them by its handle. Raises `StaleTensor`."""
    if x.handle == STALE:
        raise x.stale()
    on = current_capture.get()
    if isinstance(x, Tensor) and _is_shared(
        x, [each for each in live_tapes.copy() if each.within is on]
    ):
        apply_into(x, _COPY, x)


def overwrite(out: Tensor, call: OneOp, *operands: Tensor) -> None:
    """`apply_into` for a result whose type fits, over bytes that nobody else needs."""
    used = (out, *operands)
    if len(used) not in call.into:
        call.infer(tuple([x.type for x in operands]))
    try:
        out.arena.vm.launch(call.into[len(used)], [x.handle for x in used])
    except HandleError as error:
        raise explain(error, out.arena.vm, used) from None


def alias(call: OneOp, x: Tensor, type: TensorType) -> Tensor:
    """The bytes of `x` under another type, recorded as the op `call`; nothing is copied."""
    out = x.arena.view(x, type, Tensor)
    out.tape = None
    tape = current_tape.get()
    if tape is not None:
        tape.record(call, (x,), (x.type,), out)
    return out


def is_tracked(x: Tensor) -> bool:
    """Whether a gradient that is being taken goes through x."""
    return x.tape is not None and x.tape is current_tape.get()


def alias_of(x: Tensor) -> Tensor:
    """Another tensor with the value of x; nothing is copied, until one of them is updated."""
    return alias(_COPY, x, x.type)


def positive(x: Tensor, /) -> Tensor:
    """+x: another tensor over the bytes of x.

    x: [...], any dtype but bool, and so is the result. Raises `DTypeError` for bools.

        >>> ml.positive(ml.asarray([1.0, -2.0]))
        Tensor([ 1., -2.], f32[2])
    """
    _require_tensor("positive", x)
    try:
        require("numeric", x.type)
    except DTypeError as error:
        raise error.at("positive", (x.type,)) from None
    return alias_of(x)


def stop_gradient(x: Tensor) -> Tensor:
    """The same value, through which no cotangent flows; nothing is copied.

    x: [...], any dtype -> [...], in x's dtype. Raises `DTypeError` for what is no tensor, array or
    list.

        >>> ml.grad(lambda x: x * ml.stop_gradient(x))(ml.asarray(3.0))
        Tensor(3., f32[])
    """
    _require_tensor("stop_gradient", x)
    out = x.arena.view(x, x.type, Tensor)
    out.tape = None
    return out


def _require_tensor(function: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(f"takes a tensor, not {brief(x)}; see asarray").at(function, ())


def _apply_dynamic(
    call: OneOp, arena: Arena, operands: tuple[Tensor, ...], types: tuple[TensorType, ...]
) -> Tensor:
    """Run an op whose result's shape only running tells: the result comes back by value."""
    [array] = launch_for_values(call.fresh[len(operands)], arena.vm, operands)
    out = from_array(array)
    tape = current_tape.get()
    if tape is not None:
        tape.record(call, operands, types, out)
    return out


def launch_for_values(
    program: Program, vm: VMProtocol, operands: tuple[Tensor, ...]
) -> list[Array]:
    """What the program leaves for these operands. Raises `StaleTensor` for one that has ended."""
    try:
        found = vm.launch(program, [x.handle for x in operands])
    except HandleError as error:
        raise explain(error, vm, operands) from None
    stale = stale_of(operands)
    if stale is not None:
        raise stale
    return found


def from_array(array: Array) -> Tensor:
    """A new tensor in the current arena with a copy of the array."""
    arena = current_arena()
    out = arena.alloc(TensorType.of(array), Tensor)
    write(out, array)
    out.tape = None
    return out


def write(x: Tensor, array: Array) -> None:
    """Copy an array of the tensor's own type over it. Raises `StaleTensor`."""
    vm = x.arena.vm
    try:
        vm.write(x.handle, array)
    except HandleError as error:
        raise explain(error, vm, (x,)) from None


def values_of(x: Tensor) -> Array:
    """A copy of the values, in the tensor's own dtype. Raises `StaleTensor`."""
    try:
        array = x.arena.vm.read(x.handle)
    except HandleError as error:
        raise explain(error, x.arena.vm, (x,)) from None
    if x.handle == STALE:  # ended by another thread
        raise x.stale()
    return array


def explain(error: HandleError, vm: VMProtocol, operands: Sequence[Allocation]) -> MlvmError:
    """The error for a handle that the VM does not know: which operand it is, and why."""
    stale = stale_of(operands)
    if stale is not None:
        return stale
    for x in operands:
        if not x.arena.vm.is_same(vm):
            return HandleError(
                f"an operand {x.type} lives on {x.arena.vm.name}, the call runs on {vm.name}; "
                f"call it inside `with arena:` of an arena on {x.arena.vm.name}, or move the "
                f"operand with asarray(numpy.asarray(x))"
            )
    return error


live_tapes: set[Tape] = set()
"""Tapes that may still be walked. An update in place asks each whether it needs the value."""

_CONSTANTS_LIMIT: Final = 4096

DEFAULTS: Final[dict[type, DType]] = {bool: bool_, int: i64, float: f32, complex: c64}
"""The dtypes that Python's numbers have alone."""

_ADOPTED_BY: Final[dict[type, tuple[str, ...]]] = {
    bool: ("bool", "unsigned", "signed", "float", "complex"),
    int: ("unsigned", "signed", "float", "complex"),
    float: ("float", "complex"),
    complex: ("complex",),
}


class Constants:
    """The Python scalars used with tensors of one VM, each written once."""

    def __init__(self, vm: VMProtocol) -> None:
        self.arena = Arena(vm, "constants")
        self.tensors: dict[Any, Tensor] = {}


def prepare_constants(vm: VMProtocol) -> Constants:
    """The VM's constants, made if there are none yet."""
    return vm.attached(Constants)


def constant(value: Scalar | Number, dtype: DType) -> Tensor:
    """A Python scalar as a 0-d tensor of that dtype on the current VM.

    Raises `DTypeError` for a dtype of a lower kind, such as an integer one for a float,
    `OperandValueError` for an integer out of range.
    """
    pool = prepare_constants((scope.get() or current_arena()).vm)
    if type(value) is Number:
        return _constant_of_call(value, dtype, pool)
    key = dtype, value.__class__, repr(value) if isinstance(value, (float, complex)) else value
    known = pool.tensors.get(key)
    if known is not None:
        return known
    array = scalar_array(value, dtype)
    with pool.arena.hosting():
        tensor = from_array(array)
    if len(pool.tensors) >= _CONSTANTS_LIMIT:
        pool.tensors.clear()
    pool.tensors[key] = tensor
    return tensor


def scalar_array(value: Scalar | Number, dtype: DType) -> Array:
    """The value of `constant`. Raises what that raises."""
    kind = next(each for each in _ADOPTED_BY if isinstance(value, each))
    if dtype.kind not in _ADOPTED_BY[kind]:
        raise DTypeError(f"the {kind.__name__} {brief(value)} does not become a {dtype}")
    try:
        with np.errstate(over="ignore"):  # a float too large is inf
            if dtype is bf16:
                return half.cast(np.array(value, np.float64), bf16)
            return np.array(value, dtype.numpy)
    except OverflowError:
        raise OperandValueError(f"the int {brief(value)} does not fit into {dtype}") from None


def _constant_of_call(value: Number, dtype: DType, pool: Constants) -> Tensor:
    """A 0-d tensor that has the number's value of each call of the function that is recorded."""
    numbers = value.recorded
    if numbers is None or numbers.vm is not pool.arena.vm:
        return constant(plain(value), dtype)
    key = value.place, dtype
    if key not in numbers.tensors:
        array = scalar_array(numbers.values[value.place], dtype)
        with pool.arena.hosting():
            numbers.tensors[key] = from_array(array)
    return numbers.tensors[key]  # type: ignore[no-any-return]


def is_array(value: object) -> bool:
    """Whether an operand that is neither a tensor nor a number may have an array's values."""
    if isinstance(value, (Tensor, np.generic, bool, int, float, complex)):
        return False
    return (
        isinstance(value, (list, tuple))
        or hasattr(value, "__array__")
        or hasattr(value, "__dlpack__")
    )


def dtype_beside(kind: type, dtype: DType) -> DType:
    """The dtype of a Python scalar of that class beside a tensor of that dtype. It is the tensor's,
    unless the scalar is of a higher kind: 1.5 beside i64 is f32, 1j beside f64 is c128."""
    if kind not in DEFAULTS:  # such as an IntEnum
        kind = next(each for each in DEFAULTS if issubclass(kind, each))
    adopted = dtype.is_integer if kind is int else kind is float and dtype.is_float
    return dtype if adopted else promote(DEFAULTS[kind], dtype)


def operand(value: object, beside: Tensor, call: OneOp, *, first: bool = False) -> Tensor:
    """An operand as a tensor: itself, a Python scalar beside a tensor, or the values of an array.
    An error names it as the `first` of the two, or the second.

    The scalar takes the tensor's dtype, as in the Array API. One of a higher kind (`dtype_beside`)
    has the dtype in which the two compute. So do the numbers of a list. An array keeps its own, as
    in `asarray`. Raises `DTypeError` for anything else.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float, complex)):
        kinds = (beside.type, value.__class__.__name__)
        try:
            if is_array(value):
                return Tensor._taken(value, beside=beside)
            raise DTypeError(
                f"{kinds[1]} is no operand; tensors, numbers, and arrays or lists of numbers are"
            )
        except OpError as error:
            raise error.at(call.op.name, kinds[::-1] if first else kinds) from None
    try:
        return constant(value, dtype_beside(value.__class__, beside.dtype))
    except (DTypeError, OperandValueError) as error:
        both = (beside.type, brief(value))
        if isinstance(error, OperandValueError) and beside.dtype.is_integer:
            fits = beside.dtype is not u64 and -(2**63) <= value < 2**63  # type: ignore[operator]
            wider = "ml.int64" if fits else "ml.float64"
            error = OperandValueError(f"{error.reason}; write ml.astype(x, {wider}) for the tensor")
        raise error.at(call.op.name, both[::-1] if first else both) from None


Forward: TypeAlias = "Callable[[Tensor, Operand], Tensor]"


# A traceback is to end at the caller's line. Setting it to None drops the frames beneath; a bare
# `raise` adds none for the frame it is in. All that costs nothing until there is an error.


def _binary(name: str) -> tuple[Forward, Forward]:
    """The operator of that op, and the reflected one."""
    call = one_op(name)

    def forward(self: Tensor, other: Operand) -> Tensor:
        try:
            if other.__class__ is not Tensor:
                other = operand(other, self, call)
            return apply(call, self, other)
        except MlvmError as error:
            error.__traceback__ = None
            raise

    def reflected(self: Tensor, other: Operand) -> Tensor:
        try:
            return apply(call, operand(other, self, call, first=True), self)
        except MlvmError as error:
            error.__traceback__ = None
            raise

    return forward, reflected


def _comparison(name: str) -> Forward:
    """`==` or `!=`. With what is neither number nor array, Python compares identities."""
    call = one_op(name)

    def compare(self: Tensor, other: Operand) -> Any:
        known = isinstance(other, (Tensor, bool, int, float, complex, np.generic))
        if not known and not is_array(other):
            return NotImplemented
        try:
            return apply(call, self, operand(other, self, call))
        except MlvmError as error:
            error.__traceback__ = None
            raise

    return compare


def _in_place(name: str) -> Forward:
    call = one_op(name)

    def update(self: Tensor, other: Operand) -> Tensor:
        try:
            return apply_into(self, call, self, operand(other, self, call))
        except MlvmError as error:
            error.__traceback__ = None
            raise

    return update


def _unary(name: str) -> Callable[[Tensor], Tensor]:
    call = one_op(name)

    def operator(self: Tensor) -> Tensor:
        try:
            return apply(call, self)
        except MlvmError as error:
            error.__traceback__ = None
            raise

    return operator


_SQUARE: Final = one_op("square")


class Tensor(Methods, Allocation):
    """An n-dimensional value on a VM, with the operators of the Array API standard.

    Made by `asarray`, the creation functions, and every op. Its bytes belong to an arena. They
    return to it when Python drops the last reference, or when the arena is reset; using the tensor
    after a reset raises `StaleTensor`.

    `x[i] = v`, `x += y` and `out=x` update x in place and never another value. Where a gradient, a
    view or a capture still needs the old value, it keeps the old memory and x moves to new memory
    (copy on write). So a function that changes only the shape, or nothing, copies nothing: its
    result shares the bytes of x until one of the two is updated.

    What it is: `shape dtype type ndim size nbytes itemsize device`, and where: `arena handle base
    views`. Its values here: `item tolist numpy`. Itself in another way: `T mT real imag`,
    `to_device astype copy clip conj round abs`, `reshape flatten ravel permute transpose swapaxes
    squeeze repeat take nonzero argsort`. What is left of it along an axis: `sum mean var std prod
    min max argmin argmax all any`. All other functions are those of `ml` alone.

        >>> x = ml.asarray([[1.0, 2.0]])
        >>> x.shape, x.dtype, x.sum()
        ((1, 2), f32, Tensor(3., f32[]))
    """

    __slots__ = ()

    tape: Tape | None
    node: int

    __array_ufunc__: ClassVar[Callable[..., Tensor]]
    """`numpy.exp(x)`; see `mlvm.eager.functions.operands`, which adds it."""

    _taken: ClassVar[Callable[..., Tensor]]
    """The tensor for an array's values; see `mlvm.eager.functions.operands`, which adds it."""

    def __init__(self) -> None:  # an arena makes tensors with object.__new__
        raise TypeError("a Tensor is made by asarray, zeros and the like, not by Tensor()")

    def prepare(self) -> None:
        self.tape = None

    @property
    def shape(self) -> Shape:
        """The length of each axis, outermost first; () of a scalar."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """What its elements are, such as `ml.float32`."""
        return self.type.dtype

    @property
    def __numpy_dtype__(self) -> np.dtype[np.generic]:
        """What `numpy.result_type(x)` takes for x, in numpy 2.4 and later; see `DType`."""
        return self.dtype.__numpy_dtype__

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.type.ndim

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.type.size

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.type.nbytes

    @property
    def itemsize(self) -> int:
        """How many bytes one element takes."""
        return self.dtype.itemsize

    @property
    def device(self) -> VMProtocol:
        """The VM that it lives on."""
        vm: VMProtocol = self.arena.vm.stands_for
        return vm

    to_device: ClassVar[Callable[..., Tensor]]
    """`x.to_device(vm)`; see `mlvm.eager.interop.standard`, which adds it."""

    __array_namespace__: ClassVar[Callable[..., ModuleType]]

    # --- values ---

    def numpy(self) -> Array:
        """A copy as a numpy array; of bf16, which numpy does not have, in f32. Raises
        `StaleTensor`."""
        array = values_of(self)
        return half.shown(array) if self.type.dtype is bf16 else array

    def item(self) -> Any:
        """The one element as a Python scalar. Raises `ShapeError` for more or fewer."""
        if self.type.size != 1:
            raise ShapeError("only a tensor of one element is a scalar").at("item", (self.type,))
        return self.numpy().item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python scalars; of a 0-d tensor the scalar alone."""
        return self.numpy().tolist()

    __array__: ClassVar[Callable[..., Array]]
    __dlpack__: ClassVar[Callable[..., Any]]
    __dlpack_device__: ClassVar[Callable[[Tensor], tuple[int, int]]]
    __copy__: ClassVar[Callable[[Tensor], Tensor]]
    __deepcopy__: ClassVar[Callable[[Tensor, object], Tensor]]
    """Ways to other libraries, copies and pickles: `mlvm.eager.interop.exchange` adds them."""

    def __bool__(self) -> bool:
        if self.type.size != 1:
            raise ShapeError("only one element is true or false; take ml.all(x) or ml.any(x)").at(
                "bool", (self.type,)
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.item(), ndigits)

    def __format__(self, spec: str) -> str:
        """As `str`; with a format such as `.4f`, the one element in that format."""
        return format(self.item(), spec) if spec else str(self)

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise DTypeError("only an integer tensor is an index").at("index", (self.type,))
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise NoLength("a tensor without dimensions has no length").at("len", (self.type,))
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise NoLength("a tensor without dimensions has no length, and no rows").at(
                "iter", (self.type,)
            )
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        if self.handle == STALE:
            return f"<{self.stale()}>"
        where = "" if self.arena.name == "default" else f", arena={self.arena.name!r}"
        try:
            values = self.numpy()
        except HandleError:  # alive, but on a VM without bytes
            return f"<dry {self.type}{where}>"
        except CaptureError:  # it has no value before the recorded program is launched
            return f"<captured {self.type}>"
        body = np.array2string(values, prefix="Tensor(", separator=", ", threshold=200)
        return f"Tensor({body}, {self.type}{where})"

    # --- operators ---

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    _pow, __rpow__ = _binary("pow")
    __matmul__, __rmatmul__ = _binary("matmul")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("bitwise_left_shift")
    __rshift__, __rrshift__ = _binary("bitwise_right_shift")
    __lt__ = _binary("less")[0]
    __le__ = _binary("less_equal")[0]
    __gt__ = _binary("greater")[0]
    __ge__ = _binary("greater_equal")[0]
    __eq__ = _comparison("equal")  # type: ignore[assignment]
    __ne__ = _comparison("not_equal")  # type: ignore[assignment]
    __hash__ = Allocation.__hash__
    __neg__ = _unary("negative")
    __abs__ = _unary("abs")
    __invert__ = _unary("bitwise_invert")
    __iadd__ = _in_place("add")
    __isub__ = _in_place("subtract")
    __imul__ = _in_place("multiply")
    __itruediv__ = _in_place("divide")
    __ifloordiv__ = _in_place("floor_divide")
    __imod__ = _in_place("remainder")
    _pow_in_place = _in_place("pow")
    __imatmul__ = _in_place("matmul")
    __iand__ = _in_place("bitwise_and")
    __ior__ = _in_place("bitwise_or")
    __ixor__ = _in_place("bitwise_xor")
    __ilshift__ = _in_place("bitwise_left_shift")
    __irshift__ = _in_place("bitwise_right_shift")

    def __pow__(self, exponent: Operand) -> Tensor:
        """x ** 2 is `square(x)`: a power by multiplication is far cheaper."""
        try:
            if exponent.__class__ is int and exponent == 2:
                return apply(_SQUARE, self)
            return self._pow(exponent)
        except MlvmError as error:
            error.__traceback__ = None
            raise

    def __ipow__(self, exponent: Operand) -> Tensor:
        try:
            if exponent.__class__ is int and exponent == 2:
                return apply_into(self, _SQUARE, self)
            return self._pow_in_place(exponent)
        except MlvmError as error:
            error.__traceback__ = None
            raise

    def __pos__(self) -> Tensor:
        return positive(self)

    __getitem__: ClassVar[Callable[[Tensor, Any], Tensor]]
    """`x[key]`; see `mlvm.eager.functions.indexing`, which adds it."""

    __setitem__: ClassVar[Callable[[Tensor, Any, Any], None]]
    """`x[key] = values`; see `mlvm.eager.functions.indexing`, which adds it."""

    def __delitem__(self, key: Any) -> NoReturn:
        raise TypeError("a Tensor does not support item deletion: its shape never changes")

    @property
    def T(self) -> Tensor:
        """A two-dimensional tensor, transposed. Raises `NoTranspose` for any other."""
        if self.ndim != 2:
            raise NoTranspose("T is for 2 dimensions; mT swaps the last two").at("T", (self.type,))
        return self.mT

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped; a view if one of them has length 1.

        Raises `NoTranspose` for fewer than two dimensions.
        """
        shape, ndim = self.type.shape, self.type.ndim
        if ndim < 2:
            raise NoTranspose("mT is for 2 dimensions or more").at("mT", (self.type,))
        *rest, rows, columns = shape
        if rows == columns == 1:
            return alias_of(self)
        if 1 in (rows, columns):
            swapped = self.type.with_shape((*rest, columns, rows))
            return alias(one_op("reshape", shape=swapped.shape), self, swapped)
        axes = (*range(ndim - 2), ndim - 1, ndim - 2)
        return apply(one_op("permute_dims", axes=axes), self)
