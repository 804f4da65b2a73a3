"""Host functions in C: the machine's side of `mlvm.h`, through ctypes.

C gets the address of a struct, its frame. By that address the callbacks find the frame's Python
side. Of the pointers that C hands over, only the shape of a new tensor and the text of a name, a
message or a Str are read. An exception in a callback is kept until C has returned, and raised
then: it never unwinds through C.

The native machine's loop calls C without ctypes, with a frame of its own (`machine/host.c`).
What goes wrong there is raised from here, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import AttributeRefused, HostFunctionError, LibraryError, MlvmError
from mlvm.core.machine.callee import UserFunction, Value
from mlvm.core.op import NO_ATTRIBUTES, Attributes, canonical
from mlvm.core.types import (
    MAX_NDIM,
    Array,
    Shape,
    TensorType,
    aligned_array,
    bf16,
    bool_,
    c64,
    c128,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)

ABI_VERSION: Final = 2
DTYPES: Final = (bool_, u8, i8, i16, i32, i64, u16, u32, u64, f32, f64, c64, c128, f16, bf16)
"""The dtypes by their codes in `mlvm.h`."""

_CODES: Final = {dtype.numpy: code for code, dtype in enumerate(DTYPES)}
_TENSOR, _INT, _STR = range(3)


def include_dir() -> str:
    """The folder of `mlvm.h`, for a compiler's `-I`."""
    return str(Path(__file__).parent)


# --- the structs of mlvm.h -----------------------------------------------------------

_CALLBACKS: Final = {
    "number": CFUNCTYPE(c_int, c_void_p, c_char_p, POINTER(c_double)),
    "new_tensor": CFUNCTYPE(c_void_p, c_void_p, c_int32, c_int32, POINTER(c_int64)),
    "push": CFUNCTYPE(c_int, c_void_p, c_void_p),
    "push_int": CFUNCTYPE(c_int, c_void_p, c_int64),
    "push_str": CFUNCTYPE(c_int, c_void_p, c_char_p),
    "error": CFUNCTYPE(c_int, c_void_p, c_char_p),
}
_FUNCTION: Final = CFUNCTYPE(c_int, c_void_p)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("nbytes", c_int64),
        ("size", c_int64),
        ("shape", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
    )


class _Value(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("integer", c_int64),
        ("string", c_char_p),
        ("kind", c_int32),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("nparams", c_int64),
        ("params", c_void_p),
        ("attributes", c_char_p),
        *_CALLBACKS.items(),
    )


class _Entry(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("function", c_void_p),
        ("nparams", c_int32),
        ("nresults", c_int32),
    )


_VALUE: Final = struct.Struct("PqqPiiqPi")
"""The fields of a `_Value`. To pack all of them is several times as fast as to set one by one."""

_VALUE_SIZE: Final = ctypes.sizeof(_Value)


class _Layout(NamedTuple):
    """The fields of a `_Tensor` except its data. `shape` is the address of `lengths`."""

    nbytes: int
    size: int
    shape: int
    dtype: int
    ndim: int
    lengths: object


@lru_cache(1024)
def _layout(dtype: np.dtype[Any], shape: Shape) -> _Layout:
    type = TensorType(dtype, shape)
    lengths = (c_int64 * max(type.ndim, 1))(*shape)
    address = ctypes.addressof(lengths)
    return _Layout(type.nbytes, type.size, address, _CODES[dtype], type.ndim, lengths)


# --- a call --------------------------------------------------------------------------


class CFrame:
    """A frame: the struct at `address` that C sees, and the objects that Python keeps during a
    call.

    A frame serves one call after the other. Its methods from `number` to `error` are the
    callbacks, which `mlvm.h` documents. They raise `HostFunctionError` when they are misused.
    """

    params: Sequence[Value]
    attributes: Attributes
    results: list[Value]
    made: dict[int, tuple[Array, _Tensor]]
    kept: list[object]
    failure: BaseException | None

    def __init__(self) -> None:
        self.struct = _Frame(**_ANSWERS)
        self.address = ctypes.addressof(self.struct)
        self.values = (_Value * 4)()
        self.struct.params = ctypes.addressof(self.values)
        self.leave()
        _frames[self.address] = self

    def enter(self, params: Sequence[Value], attributes: Attributes, text: bytes) -> None:
        """Write a call into the struct. Raises `HostFunctionError` for an Int or Str that C cannot
        hold."""
        self.running = True
        self.params = params
        self.attributes = attributes
        if len(params) > len(self.values):
            self.values = (_Value * len(params))()
            self.struct.params = ctypes.addressof(self.values)
        for i, value in enumerate(params):
            if isinstance(value, np.ndarray):
                layout = _layout(value.dtype, value.shape)
                self.kept.append(layout)
                data, fields = value.ctypes.data, (*layout[:5], 0, 0, _TENSOR)
            elif isinstance(value, int):
                if not -(1 << 63) <= value < 1 << 63:
                    raise HostFunctionError(f"parameter {i}, {value}, is no 64-bit integer")
                data, fields = 0, (0, 0, 0, 0, 0, value, 0, _INT)
            else:
                string = c_char_p(_encoded(value, f"parameter {i}"))
                self.kept.append(string)
                address = ctypes.cast(string, c_void_p).value or 0
                data, fields = 0, (0, 0, 0, 0, 0, 0, address, _STR)
            _VALUE.pack_into(self.values, i * _VALUE_SIZE, data, *fields)
        self.struct.nparams = len(params)
        self.struct.attributes = text

    def leave(self) -> None:
        """Forget the call, and with it the tensors that were made and not pushed."""
        self.running = False
        self.failure = None
        self.params = ()
        self.attributes = NO_ATTRIBUTES
        self.results = []
        self.made = {}
        self.kept = []

    def number(self, name: bytes | None, value: Any) -> int:
        found = number(self.attributes, name, bool(value))
        if found is not None:
            value[0] = found
        return 0

    def new_tensor(self, dtype: int, ndim: int, shape: Any) -> int:
        type = type_asked_for(dtype, ndim, shape)
        try:
            array = aligned_array(type)
        except (MemoryError, ValueError):  # the latter is numpy's, for more than any machine has
            raise no_memory(type) from None
        layout = _layout(array.dtype, array.shape)
        self.kept.append(layout)
        tensor = _Tensor(array.ctypes.data, *layout[:5])
        address = ctypes.addressof(tensor)
        self.made[address] = array, tensor
        return address

    def push(self, tensor: int | None) -> int:
        known = self.made.get(tensor or 0)
        if known is not None:
            self.results.append(known[0])
            return 0
        i, inside = divmod((tensor or 0) - self.struct.params, _VALUE_SIZE)
        if inside or not 0 <= i < len(self.params) or not isinstance(self.params[i], np.ndarray):
            raise no_tensor()
        self.results.append(self.params[i])
        return 0

    def push_int(self, value: int) -> int:
        self.results.append(value)
        return 0

    def push_str(self, value: bytes | None) -> int:
        self.results.append(decoded(value))
        return 0

    def error(self, message: bytes | None) -> int:
        raise reported(message)


_frames: Final[dict[int, CFrame]] = {}
_idle: Final[list[CFrame]] = []


def _answer(method: Callable[..., int], failed: int | None) -> Callable[..., int | None]:
    """The callback for a method of a frame. It raises no exception, and keeps the first."""

    def answer(address: int | None, *args: Any) -> int | None:
        frame = _frames.get(address or 0)
        if frame is None or not frame.running:
            return failed
        try:
            return method(frame, *args)
        except BaseException as error:
            if frame.failure is None:
                frame.failure = error
            return failed

    return answer


_ANSWERS: Final = {
    name: prototype(_answer(getattr(CFrame, name), None if name == "new_tensor" else 1))
    for name, prototype in _CALLBACKS.items()
}


def _encoded(text: str, what: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise HostFunctionError(f"{what}, {text!r}, is no C string in UTF-8")
    return encoded


# --- what callbacks do, and raise, on any machine ------------------------------------


def number(attributes: Attributes, name: bytes | None, place: bool) -> float | None:
    """The attribute of that name, None if there is none. `place`: whether C has one for it."""
    key = decoded(name)
    if not place:
        raise HostFunctionError(f"number: the place for {key!r} is NULL")
    if key not in attributes:
        return None
    given = canonical(attributes[key])
    if not isinstance(given, (bool, int, float)):
        raise HostFunctionError(f"attribute {key!r} is a number, not {given!r}")
    try:
        return float(given)
    except OverflowError:
        raise HostFunctionError(f"attribute {key!r} is too large: {given}") from None


def type_asked_for(dtype: int, ndim: int, shape: Any) -> TensorType:
    """The type of a new tensor. `shape` has ndim lengths, or is false if C gave none."""
    if not 0 <= dtype < len(DTYPES):
        raise HostFunctionError(f"new_tensor: no dtype has the code {dtype}")
    if not 0 <= ndim <= MAX_NDIM:
        raise HostFunctionError(f"new_tensor: ndim is 0 to {MAX_NDIM}, not {ndim}")
    if ndim and not shape:
        raise HostFunctionError(f"new_tensor: the shape of {ndim} lengths is NULL")
    return TensorType(DTYPES[dtype], shape[:ndim] if ndim else ())


def decoded(text: bytes | None) -> str:
    """A string of C's."""
    if text is None:
        raise HostFunctionError("a string is NULL")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise HostFunctionError(f"a string is not in UTF-8: {text!r}") from None


def no_memory(type: TensorType) -> HostFunctionError:
    return HostFunctionError(f"new_tensor: no memory for {type}")


def no_tensor() -> HostFunctionError:
    return HostFunctionError("push: the pointer is no tensor of this frame")


def reported(message: bytes | None) -> HostFunctionError:
    """What the function says itself."""
    return HostFunctionError((message or b"an error without a message").decode(errors="replace"))


def check_end(failure: BaseException | None, status: int) -> None:
    """Raise what a call has failed with, if it has: in a callback, or else by its status."""
    if failure is not None:
        raise failure
    if status != 0:
        raise HostFunctionError(f"status {status}")


# --- functions and libraries ---------------------------------------------------------

_TEXTS_LIMIT: Final = 256


class CFunction(UserFunction):
    """A host function in C. Its code lies in `library`."""

    def __init__(
        self,
        name: str,
        address: int,
        nparams: int | None,
        nresults: int | None,
        library: ctypes.CDLL,
    ) -> None:
        super().__init__(name, nparams, nresults)
        self.address = address
        self.function = _FUNCTION(address)
        self.library = library
        # By the id of the attributes, which an entry keeps alive.
        self._texts: dict[int, tuple[Attributes, bytes]] = {}

    def bind(self, attributes: Attributes) -> Attributes:
        """The attributes, unchanged. Raises `AttributeRefused` for one that JSON cannot express."""
        self.text(attributes)
        return attributes

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        """Run the function, without the GIL. Raises `HostFunctionError` for an error that it
        reports, by message or status, and for misuse of its frame."""
        try:
            frame = _idle.pop()
        except IndexError:
            frame = CFrame()
        try:
            frame.enter(params, attributes, self.text(attributes) if attributes else b"{}")
            status = self.function(frame.address)
            check_end(frame.failure, status)
            results = frame.results
        except MlvmError as error:
            raise self.named(error) from None
        finally:
            frame.leave()
            _idle.append(frame)
        self.check_results(len(results))
        return results

    def named(self, error: MlvmError) -> HostFunctionError:
        """The error of a call, with the function's name before it."""
        return HostFunctionError(f"{self.name}: {error}")

    def text(self, attributes: Attributes) -> bytes:
        """The attributes as JSON, encoded once for each mapping."""
        known = self._texts.get(id(attributes))
        if known is not None:
            return known[1]
        try:
            given = {name: canonical(value) for name, value in attributes.items()}
            text = json.dumps(given).encode()
        except (TypeError, ValueError) as error:
            raise AttributeRefused(f"the attributes are not JSON: {error}").at(
                self.name, ()
            ) from None
        if len(self._texts) >= _TEXTS_LIMIT:
            self._texts.clear()
        self._texts[id(attributes)] = attributes, text
        return text


def load_library(path: str | os.PathLike[str]) -> list[CFunction]:
    """The functions that a shared library lists, in order. The library stays loaded.

    Raises `LibraryError` for a file that is missing or no library, that lists no functions or
    impossible ones, or that was built for another version of `mlvm.h`.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise LibraryError(f"no library at {file}")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise LibraryError(f"{file} is not loaded: {error}") from None
    try:
        version = c_int32.in_dll(library, "mlvm_abi_version").value
        address = ctypes.addressof(_Entry.in_dll(library, "mlvm_functions"))
    except ValueError:
        raise LibraryError(f"{file} lists no functions; MLVM_FUNCTIONS does so") from None
    if version != ABI_VERSION:
        raise LibraryError(
            f"{file} was built for version {version} of mlvm.h; this is version {ABI_VERSION}"
        )
    functions: dict[str, CFunction] = {}
    while (entry := _Entry.from_address(address)).name is not None:
        function = _function(entry, library, file)
        if functions.setdefault(function.name, function) is not function:
            raise LibraryError(f"{file} lists {function.name!r} twice")
        address += ctypes.sizeof(_Entry)
    return list(functions.values())


def _function(entry: _Entry, library: ctypes.CDLL, file: Path) -> CFunction:
    name = entry.name.decode(errors="backslashreplace")
    counts = [None if n == -1 else n for n in (entry.nparams, entry.nresults)]
    if not name or not entry.function or any(n is not None and n < 0 for n in counts):
        raise LibraryError(
            f"{file} lists an impossible function: name {name!r}, address "
            f"{entry.function or 0:#x}, {entry.nparams} parameters, {entry.nresults} results"
        )
    return CFunction(name, entry.function, counts[0], counts[1], library)
