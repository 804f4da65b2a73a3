"""The VM protocol as bytes, and `WireVM`, which uses these bytes to call a different VM.

A `WireVM` encodes each call as one message. A `WireServer` decodes the message, calls a VM, and
encodes the answer or the error. Only bytes pass between the two; `mlvm.machines.remote` sends them
over a socket. `CALLS` is the complete protocol; docs/wire.md specifies the layout.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core import errors
from mlvm.core.errors import (
    EncodingError,
    HandleError,
    LimitExceededError,
    MlvmError,
    ProgramError,
    brief,
    with_article,
)
from mlvm.core.locks import cached_property
from mlvm.core.machine.verify import verify
from mlvm.core.program.encoding import Kind, Reader, Writer, open_message
from mlvm.core.program.program import Program
from mlvm.core.protocol import Estimate, StorageHandle, TensorHandle, VMIdentity
from mlvm.core.types import MAX_NBYTES, Array, TensorType, check_out
from mlvm.core.vm import VM
from mlvm.renamed import NAMES

NATIVE: Final = "machine.native"
"""Host function that returns whether a VM is native: ( -- n ), 1 or 0 as an i64[]."""

_ASK_NATIVE: Final = Program.of_op(NATIVE, 0, {}, 1)


class WireField(NamedTuple):
    """Parameter or result on the wire: the name in docs/wire.md, a writer and a reader."""

    name: str
    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]


def _write_handle(writer: Writer, handle: TensorHandle | StorageHandle) -> None:
    if not isinstance(handle, (int, np.integer)):  # callers may have no type checker
        raise HandleError(f"a handle: expected an integer, got {brief(handle)}")
    try:
        writer.integer(handle)
    except EncodingError:  # exceeds 64 bits
        raise HandleError(
            f"handle {brief(handle)} does not exist: it was never created; use a handle of this VM"
        ) from None


def _write_type(writer: Writer, type: TensorType) -> None:
    if not isinstance(type, TensorType):
        raise errors.ShapeError(f"expected a TensorType, got {brief(type)}")
    writer.type(type)


def _write_nbytes(writer: Writer, nbytes: int) -> None:
    if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_NBYTES:
        raise errors.ShapeError(
            f"alloc_storage: expected a size of 0 to {MAX_NBYTES} bytes, got {brief(nbytes)}"
        )
    writer.integer(nbytes)


def _write_array(writer: Writer, array: Array) -> None:
    if not isinstance(array, (np.ndarray, np.generic)):
        raise errors.DTypeError(f"expected an array, got {with_article(array.__class__.__name__)}")
    writer.array(array)


def _write_program(writer: Writer, program: Program | bytes) -> None:
    """Write the program, or the bytes of the program if the caller has encoded it."""
    writer.blob(program if isinstance(program, bytes) else program.to_bytes())


def _read_limit(reader: Reader) -> int | None:
    limit = reader.value()
    if limit is not None and not isinstance(limit, int):
        raise reader.error(f"a limit: expected an integer or none, got {limit!r}")
    return limit


def _read_estimate(reader: Reader) -> Estimate:
    numbers, count = reader.sequence(Reader.integer), len(Estimate._fields)
    if len(numbers) != count:
        raise reader.error(f"an estimate: expected {count} numbers, got {len(numbers)}")
    return Estimate(*numbers)


def _several(field: WireField) -> WireField:
    """Return the field for a sequence of these values."""
    _, write, read = field
    return WireField(
        f"{field.name}s",
        lambda writer, values: writer.sequence(values, write),
        lambda reader: reader.sequence(read),
    )


HANDLE: Final = WireField("handle", _write_handle, Reader.integer)
HANDLES: Final = _several(HANDLE)
INTEGER: Final = WireField("integer", Writer.integer, Reader.integer)
TRUTH: Final = WireField("truth", Writer.integer, lambda reader: reader.integer() != 0)
NBYTES: Final = WireField("integer", _write_nbytes, Reader.integer)
LIMIT: Final = WireField("limit", Writer.value, _read_limit)
F64: Final = WireField("f64", Writer.f64, Reader.f64)
TEXT: Final = WireField("text", Writer.text, Reader.text)
TYPE: Final = WireField("type", _write_type, Reader.type)
TYPES: Final = _several(TYPE)
ARRAY: Final = WireField("array", _write_array, Reader.array)
ARRAYS: Final = _several(ARRAY)
PROGRAM: Final = WireField(
    "program", _write_program, lambda reader: Program.from_bytes(reader.blob(), reader.allowance)
)
ESTIMATE: Final = WireField(
    "estimate", lambda writer, estimate: writer.sequence(estimate, Writer.integer), _read_estimate
)
NOTHING: Final = WireField("nothing", lambda writer, _: None, lambda reader: None)


class WireProcedure(NamedTuple):
    """Call of the protocol: the parameters by name, in order, and the result."""

    parameters: dict[str, WireField]
    result: WireField


CALLS: Final[dict[str, WireProcedure]] = {
    "name": WireProcedure({}, TEXT),
    "alloc_tensor": WireProcedure({"type": TYPE}, HANDLE),
    "dealloc_tensor": WireProcedure({"handle": HANDLE}, NOTHING),
    "read": WireProcedure({"handle": HANDLE}, ARRAY),
    "write": WireProcedure({"handle": HANDLE, "array": ARRAY}, NOTHING),
    "load_program": WireProcedure({"number": INTEGER, "program": PROGRAM}, TRUTH),
    "drop_program": WireProcedure({"number": INTEGER}, NOTHING),
    "launch": WireProcedure({"number": INTEGER, "args": HANDLES, "max_steps": LIMIT}, ARRAYS),
    "estimate": WireProcedure({"number": INTEGER, "arg_types": TYPES}, ESTIMATE),
    "consumed_size_in_mib": WireProcedure({}, F64),
    "alloc_storage": WireProcedure({"nbytes": NBYTES}, HANDLE),
    "dealloc_storage": WireProcedure({"handle": HANDLE}, NOTHING),
    "tensor_from_storage": WireProcedure(
        {"storage": HANDLE, "type": TYPE, "offset": INTEGER}, HANDLE
    ),
    "swap": WireProcedure({"h1": HANDLE, "h2": HANDLE}, NOTHING),
    "synchronize": WireProcedure({}, NOTHING),
    "limit_memory": WireProcedure({"nbytes": INTEGER}, NOTHING),
}
"""Every call by name. A program is loaded once under a number that the client chooses, and launched
and estimated by this number. The client drops the program when it is no longer needed. The answer
to `load_program` states whether a launch may return outputs; otherwise the client need not wait."""


# --- messages ------------------------------------------------------------------------


def write_call(writer: Writer, name: str, args: Sequence[Any]) -> None:
    """Write a call.

    Raises `EncodingError`, `HandleError`, `DTypeError` or `ShapeError` for an argument that has no
    encoding.
    """
    writer.text(name)
    for field, value in zip(CALLS[name].parameters.values(), args, strict=True):
        field.write(writer, value)


def read_name(reader: Reader) -> str:
    """Read the name of a call, which precedes the arguments."""
    name = reader.text()
    if name not in CALLS:
        raise EncodingError(f"unknown call {brief(name)}; expected one of {', '.join(CALLS)}")
    return name


def read_args(reader: Reader, name: str) -> list[Any]:
    """Read the arguments of a call by name. Raises `EncodingError` or `ProgramError`."""
    args = [field.read(reader) for field in CALLS[name].parameters.values()]
    reader.end()
    return args


def encode_call(name: str, args: Sequence[Any]) -> bytes:
    """Encode a call as a message. Raises what `write_call` raises.

    >>> from mlvm.machines.wire import decode_call, encode_call
    >>> decode_call(encode_call("alloc_storage", [64]))
    ('alloc_storage', [64])
    """
    writer = Writer()
    write_call(writer, name, args)
    return writer.message(Kind.call)


def decode_call(message: bytes) -> tuple[str, list[Any]]:
    """Decode the name and arguments of a call. Raises `EncodingError` or `ProgramError`."""
    _, reader = open_message(message, Kind.call)
    name = read_name(reader)
    return name, read_args(reader, name)


def encode_answer(name: str, result: Any) -> bytes:
    """Encode the result of a call as a message.

    >>> from mlvm.machines.wire import decode_answer, encode_answer
    >>> decode_answer("alloc_tensor", encode_answer("alloc_tensor", 7))
    7
    """
    writer = Writer()
    CALLS[name].result.write(writer, result)
    return writer.message(Kind.answer)


def decode_answer(name: str, message: bytes) -> Any:
    """Decode the result of a call. Raises the error if the message is an error."""
    return read_answer(*open_message(message, Kind.answer, Kind.error), name)


def read_answer(kind: Kind, reader: Reader, name: str) -> Any:
    """Read the result of a call from a message of a kind.

    Raises the error if the message is an error.
    """
    if kind is Kind.error:
        raise read_error(reader)  # a variable would create a cycle with the traceback
    result = CALLS[name].result.read(reader)
    reader.end()
    return result


# --- errors --------------------------------------------------------------------------

_BUILT_IN: Final[tuple[type[Exception], ...]] = (
    *(ArithmeticError, AssertionError, AttributeError, Exception, IndexError, KeyError),
    *(LookupError, MemoryError, NotImplementedError, OSError, OverflowError, RecursionError),
    *(RuntimeError, TypeError, ValueError, ZeroDivisionError),
)
_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (*_BUILT_IN, *vars(errors).values())
    if isinstance(each, type) and issubclass(each, Exception)
}
"""Error classes that the wire preserves: mlvm's, and common errors of host functions."""
_ERRORS.update((old, _ERRORS[new]) for old, new in NAMES["ml.errors"].items())


def encode_error(error: Exception) -> bytes:
    """Encode an error as a message: class name, arguments, parts and notes.

    An error of an unknown class is sent as the nearest known base class, with the same text. This
    never raises, even if parts of the error cannot be encoded.
    """
    try:
        return _encode_error(error)
    except Exception:
        return _encode_error(
            errors.MachineError(f"an error that cannot be encoded: {brief(error)}")
        )


def _encode_error(error: Exception) -> bytes:
    kind = next(each for each in type(error).__mro__ if _ERRORS.get(each.__name__) is each)
    args = error.args if kind is type(error) else (_text(error),)
    parts = {name: part for name, part in vars(error).items() if _may_be_part(kind, name)}
    writer = Writer()
    writer.text(kind.__name__)
    writer.sequence(args, _write_part)
    writer.mapping(parts, _write_part)
    writer.sequence(getattr(error, "__notes__", ()), Writer.text)
    return writer.message(Kind.error)


def _may_be_part(kind: type[Exception], name: str) -> bool:
    """Return whether errors of a class may have an attribute with this name.

    Methods and attributes of Python, such as `__notes__`, are excluded.
    """
    return not name.startswith("__") and not callable(getattr(kind, name, None))


def _write_part(writer: Writer, part: Any) -> None:
    """Write the part, or the text of a part that cannot be encoded."""
    try:
        Writer().value(part)
    except Exception:
        part = _text(part)
    writer.value(part)


def _text(value: object) -> str:
    """Return `str(value)`, or `brief(value)` if `str` fails."""
    try:
        return str(value)
    except Exception:
        return brief(value)


def read_error(reader: Reader) -> Exception:
    """Read the error of a message of kind error. Raises `EncodingError` for an invalid error."""
    name = reader.text()
    if name not in _ERRORS:
        raise reader.error(f"unknown error {brief(name)}")
    args, parts = reader.sequence(Reader.value), reader.mapping(Reader.value)
    notes = reader.sequence(Reader.text)
    reader.end()
    kind = _ERRORS[name]
    for part in parts:
        if not _may_be_part(kind, part):
            raise reader.error(f"{name}: unknown part {part!r}")
    try:
        error = kind(*args)
        vars(error).update(parts)
        vars(error).pop("__notes__", None)  # added while reading
        str(error)
    except Exception as refused:  # constructors of errors differ
        raise reader.error(
            f"{name} cannot be created from {brief((*args, parts))}: {refused}"
        ) from None
    for note in notes:
        error.add_note(note)
    return error


# --- client and server ------------------------------------------------------------------


class WireServer:
    """Server that decodes a client's messages and calls a VM."""

    def __init__(self, vm: VM) -> None:
        self.vm = vm
        self._programs: dict[int, Program] = {}

    def answer(self, message: bytes) -> bytes:
        """Answer a call with a message: the result, or the error."""
        try:
            name, args = decode_call(message)
            return encode_answer(name, self.perform(name, args))
        except Exception as error:
            return encode_error(error)

    def perform(self, name: str, args: list[Any]) -> Any:
        """Make the call and return the result."""
        if name == "name":
            return self.vm.name
        if name in ("load_program", "drop_program", "launch", "estimate"):
            return getattr(self, f"_{name}")(*args)
        return getattr(self.vm, name)(*args)

    def _load_program(self, number: int, program: Program) -> bool:
        outputs = True
        try:
            outputs = verify(program, self.vm.functions).outputs
        except LimitExceededError:  # the time limit was exceeded
            raise
        except MlvmError:
            pass  # the launch raises a better error, or the missing function exists by then
        except Exception as error:
            raise ProgramError(f"the program cannot be verified: {brief(error)}") from None
        self._programs[number] = program
        return outputs

    def _drop_program(self, number: int) -> None:
        self.program(number)
        del self._programs[number]

    def _launch(self, number: int, args: list[TensorHandle], max_steps: int | None) -> list[Array]:
        return self.vm.launch(self.program(number), args, max_steps=max_steps)

    def _estimate(self, number: int, arg_types: list[TensorType]) -> Estimate:
        return self.vm.estimate(self.program(number), arg_types)

    def program(self, number: int) -> Program:
        """Return the loaded program by number. Raises `HandleError`."""
        try:
            return self._programs[number]
        except KeyError:
            raise HandleError(f"program {number} is not loaded; load it again") from None


class LoadedProgram(NamedTuple):
    """Program loaded on the server.

    `number`: number on the server.
    `digest`: digest of the bytes.
    `outputs`: whether a launch may return outputs.
    `alive`: the client's programs with these bytes, by id; the server drops the program when all of
    them are deleted.
    """

    number: int
    digest: bytes
    outputs: bool
    alive: dict[int, weakref.ref[Program]]


class WireVM(VMIdentity):
    """VM that encodes every call of `vm` and every result as bytes.

    It implements `VMProtocol`. Errors preserve class, text, notes and attributes, such as the op,
    operands and reason of an `OpError`. An argument that cannot be encoded raises an error before
    anything is sent. Attributes in `attached` are not encoded.

        >>> from mlvm.machines.wire import WireVM
        >>> with ml.use(WireVM(ml.VM("far"))): ml.ones(2) + 1.0
        Tensor([2., 2.], f32[2])
    """

    def __init__(self, vm: VM) -> None:
        self._send = WireServer(vm).answer
        self._close = vm.close
        self._require_open = vm.require_open
        self._begin()
        self.name: str = self._call("name")

    def _begin(self) -> None:
        VMIdentity.__init__(self)
        self._loaded: dict[int, LoadedProgram] = {}  # by id of the program
        self._by_digest: dict[bytes, LoadedProgram] = {}
        self._dead: deque[tuple[int, LoadedProgram]] = deque()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Lock that excludes calls of other threads."""
        return self._lock

    @cached_property
    def native(self) -> bool:
        """Return whether the remote VM is native, so steps are fused by the native policy."""
        try:
            [answer] = self.launch(_ASK_NATIVE)
        # a reference VM, or a dry VM, which has no values
        except (errors.UnknownFunctionError, HandleError):
            return False
        return bool(answer)

    def _call(self, name: str, *args: Any) -> Any:
        """Make a call and wait for the result."""
        message = self._send(encode_call(name, args))
        try:
            return decode_answer(name, message)
        except Exception as error:
            raise error.with_traceback(None) from None

    def _post(self, name: str, *args: Any) -> None:
        """Make a call without a result."""
        self._call(name, *args)

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        return int(self._call("alloc_tensor", type))

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        self._post("dealloc_tensor", handle)

    def read(self, handle: TensorHandle, out: Array | None = None) -> Array:
        array: Array = self._call("read", handle)
        if out is None:
            return array
        check_out(out, TensorType.of(array))
        np.copyto(out, array)
        return out

    def write(self, handle: TensorHandle, array: Array) -> None:
        self._post("write", handle, array)

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        try:
            handles = tuple(args)
        except TypeError:
            raise HandleError(f"launch: expected tensor handles, got {brief(args)}") from None
        return list(self._call("launch", self.loaded(program).number, handles, max_steps))

    def estimate(self, program: Program, arg_types: Sequence[TensorType] = ()) -> Estimate:
        return Estimate(*self._call("estimate", self.loaded(program).number, arg_types))

    def consumed_size_in_mib(self) -> float:
        return float(self._call("consumed_size_in_mib"))

    def alloc_storage(self, nbytes: int) -> StorageHandle:
        return int(self._call("alloc_storage", nbytes))

    def dealloc_storage(self, handle: StorageHandle) -> None:
        self._post("dealloc_storage", handle)

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        return int(self._call("tensor_from_storage", storage, type, offset))

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        self._post("swap", h1, h2)

    def synchronize(self) -> None:
        """Wait until all calls are complete. Raises the error of a failed call."""
        self._call("synchronize")

    def require_open(self) -> None:
        """Raise `MachineError` if the VM was closed."""
        self._require_open()

    def close(self) -> None:
        """Close the VM and free everything that was created on it. Idempotent."""
        self._close()
        self._close_attached(f"VM {self.name!r} was closed")

    # --- programs ---

    def loaded(self, program: Program) -> LoadedProgram:
        """Return the server's entry of the program; first send the program if it is new."""
        if self._dead:
            self._drop_programs()
        return self._loaded.get(id(program)) or self._load(program)

    def _load(self, program: Program) -> LoadedProgram:
        """Send the program, unless a program with the same bytes was sent."""
        if not isinstance(program, Program):
            raise errors.ProgramError(f"launch: expected a Program, got {brief(program)}")
        data = program.to_bytes()
        digest = hashlib.sha256(data).digest()
        with self._lock:
            key, me = id(program), weakref.ref(self)
            if key in self._loaded:
                return self._loaded[key]
            loaded = self._by_digest.get(digest)
            if loaded is None:
                number = next(self._numbers)
                loaded = LoadedProgram(number, digest, self._call("load_program", number, data), {})
                self._by_digest[digest] = loaded

            def forget(_: weakref.ref[Program]) -> None:
                vm = me()
                if vm is not None:  # may be called at any point
                    vm._dead.append((key, vm._loaded.pop(key)))

            loaded.alive[key] = weakref.ref(program, forget)
            self._loaded[key] = loaded
            return loaded

    def _drop_programs(self) -> None:
        """Drop programs on the server that the client has deleted."""
        with self._lock:
            while self._dead:
                key, loaded = self._dead.popleft()
                reference = loaded.alive.get(key)
                if reference is not None and reference() is None:
                    del loaded.alive[key]
                    if not loaded.alive:
                        del self._by_digest[loaded.digest]
                        self._post("drop_program", loaded.number)


for _call in (
    *("alloc_storage", "alloc_tensor", "consumed_size_in_mib", "dealloc_storage"),
    *("dealloc_tensor", "estimate", "launch", "read", "swap", "tensor_from_storage", "write"),
):  # VM contains the docstrings
    vars(WireVM)[_call].__doc__ = vars(VM)[_call].__doc__
