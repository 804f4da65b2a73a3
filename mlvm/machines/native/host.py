"""Host functions in C: descriptions of calls for the extension (`machine/host.c`), and callbacks.

A C function receives the address of a frame, a struct that handles common requests without Python.
Rare requests and all errors are handled here. An exception in a callback is stored and raised after
C has returned, so it never unwinds through C.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlvm.core.errors import (
    ArgumentError,
    HostFunctionError,
    MachineError,
    MlvmError,
    OutOfMemoryError,
)
from mlvm.core.machine.callee import UserFunction, Value
from mlvm.core.machine.functions import Binding
from mlvm.core.machine.link import CallDetails
from mlvm.core.machine.run import Call, miscounted
from mlvm.core.memo import Memo
from mlvm.core.op import NO_ATTRIBUTES, Attributes, canonical
from mlvm.core.program.program import STAR
from mlvm.core.types import MAX_NDIM, Array, TensorType
from mlvm.machines.native._native import MLVM_ANY, Caller
from mlvm.machines.native.types import DTYPES, Type, native_type


class Host(NamedTuple):
    """Description of a call of a host function, for `machine/host.h`.

    `address` is 0 for a function in Python; `call` is None for a call from Python.
    """

    call: Call | None
    attributes: Attributes
    python_side: HostCall
    nparams: int
    nresults: int
    address: int = 0
    text: bytes = b"{}"
    numbers: tuple[tuple[bytes, float | None], ...] = ()
    owner: int = 0


class CFunction(UserFunction):
    """Host function in C; `library` contains the code.

    Functions of the extension work on an object of the extension, the `owner`.
    """

    def __init__(
        self,
        name: str,
        address: int,
        nparams: int | None,
        nresults: int | None,
        library: Any,
        owner: object = None,
        reads: slice | None = None,
    ) -> None:
        super().__init__(name, nparams, nresults, reads)
        self.address = address
        self.library = library
        self.owner = owner
        # Keyed by the id of the attributes, which an entry keeps alive.
        self._callers = Memo[int, tuple[Host, Caller]](256, "machines.native.host")

    def bind(self, attributes: Attributes) -> Attributes:
        """Return the attributes, unchanged.

        Raises `ArgumentError` for a value that JSON cannot represent.
        """
        self.host(attributes)
        return attributes

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        """Run the function without the GIL.

        Raises `HostFunctionError` if the function reports an error, by message or status, or
        misuses the frame.
        """
        results: list[Value] = self._entry(attributes)[1](params)
        return results

    def host(self, attributes: Attributes) -> Host:
        """Describe a call with these attributes for the extension; cached per mapping."""
        return self._entry(attributes)[0]

    def _entry(self, attributes: Attributes) -> tuple[Host, Caller]:
        attributes = attributes or NO_ATTRIBUTES

        def make() -> tuple[Host, Caller]:
            host = self._host(attributes)
            return host, Caller(host)

        return self._callers.get(id(attributes), make)

    def _host(self, attributes: Attributes) -> Host:
        announced = UserFunction(self.name, self.nparams, self.nresults)  # not self: avoid a cycle
        try:
            plain = {name: canonical(value) for name, value in attributes.items()}
            text = json.dumps(plain).encode()
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"the attributes are not JSON: {error}; use numbers, strings and lists"
            ).at(self.name, ()) from None
        python_side = HostCall(announced, attributes)
        nresults = MLVM_ANY if self.nresults is None else self.nresults
        by_name = _numbers(attributes)
        owner = 0 if self.owner is None else id(self.owner)
        return Host(
            None, attributes, python_side, MLVM_ANY, nresults, self.address, text, by_name, owner
        )


def host_of(binding: Binding, details: CallDetails) -> Host | None:
    """Describe the call for the loop, or return None.

    The loop supports host functions whose counts it can check. `nparams` is MLVM_ANY if the
    verifier has proven it.
    """
    callee = binding.callee
    if not isinstance(callee, UserFunction) or details.may_alias:
        return None
    nresults = MLVM_ANY if callee.nresults is None else callee.nresults
    if details.nresults != STAR:
        if nresults not in (MLVM_ANY, details.nresults) or details.nresults < 0:
            return None
        nresults = details.nresults
    nparams = callee.nparams if details.unproven else None
    nparams = MLVM_ANY if nparams is None else nparams
    python_side = HostCall(
        callee, details.attributes, lambda count: miscounted(binding, count, details)
    )
    if not isinstance(callee, CFunction):
        return Host(binding.call, details.attributes, python_side, nparams, nresults)
    return callee.host(details.attributes)._replace(
        call=binding.call, python_side=python_side, nparams=nparams, nresults=nresults
    )


def _numbers(attributes: Attributes) -> tuple[tuple[bytes, float | None], ...]:
    """Return the numeric attributes by UTF-8 name, with None for other attributes."""
    numbers: list[tuple[bytes, float | None]] = []
    for name in attributes:
        encoded = _encoded(name)
        if encoded is not None:
            try:
                numbers.append((encoded, number(attributes, encoded, place=True)))
            except MlvmError:
                numbers.append((encoded, None))
    return tuple(numbers)


def _encoded(text: str) -> bytes | None:
    """Encode text as a C string in UTF-8, or return None if this is impossible."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return None
    return None if b"\0" in encoded else encoded


def number(attributes: Attributes, name: bytes | None, place: bool) -> float | None:
    """Return an attribute by name, or None. `place` is False if the pointer in C is NULL."""
    key = string(name)
    if not place:
        raise HostFunctionError(
            f"number: the pointer for {key!r} is NULL; pass the address of a variable"
        )
    if key not in attributes:
        return None
    value = canonical(attributes[key])
    if not isinstance(value, (bool, int, float)):
        raise HostFunctionError(f"attribute {key!r}: expected a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise HostFunctionError(f"attribute {key!r} is too large: {value}; use 64 bits") from None


def type_asked_for(dtype: int, ndim: int, shape: list[int] | None) -> TensorType:
    """Check the type that C requests for a new tensor. `shape` is None for NULL."""
    if not 0 <= dtype < len(DTYPES):
        raise HostFunctionError(f"new_tensor: unknown dtype code {dtype}; use a constant of mlvm.h")
    if not 0 <= ndim <= MAX_NDIM:
        raise HostFunctionError(f"new_tensor: expected ndim from 0 to {MAX_NDIM}, got {ndim}")
    if ndim and shape is None:
        raise HostFunctionError(f"new_tensor: the shape of {ndim} lengths is NULL; pass an array")
    return TensorType(DTYPES[dtype], shape or ())


def string(text: bytes | None) -> str:
    """Decode a string of C."""
    if text is None:
        raise HostFunctionError("a string is NULL; pass a text")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise HostFunctionError(f"a string is not in UTF-8: {text!r}; encode it as UTF-8") from None


class HostCall:
    """Python side of a call. An exception of a method makes the call fail."""

    __slots__ = ("_attributes", "_callee", "_miscounted")

    def __init__(
        self,
        callee: UserFunction,
        attributes: Attributes,
        miscounted: Callable[[int], MachineError] | None = None,
    ) -> None:
        self._callee = callee  # the current callee; later registrations do not affect the program
        self._attributes = attributes
        self._miscounted = miscounted

    def number(self, name: bytes | None, place: bool) -> None:
        """Raise the error of a request for an attribute, if any."""
        number(self._attributes, name, place)

    def new_tensor(self, dtype: int, ndim: int, shape: list[int] | None) -> Type:
        return native_type(type_asked_for(dtype, ndim, shape))

    def type_of(self, array: Array) -> Type:
        return native_type(TensorType.of(array))

    def no_memory(self, type: TensorType) -> None:
        raise HostFunctionError(f"new_tensor: no memory for {type}; free tensors")

    def no_tensor(self) -> None:
        raise HostFunctionError("push: expected a tensor of this frame, got another pointer")

    def string(self, text: bytes | None) -> str:
        return string(text)

    def error(self, message: bytes | None) -> None:
        """Raise the error that the function reports."""
        raise HostFunctionError((message or b"an error without a message").decode(errors="replace"))

    def refuse(self, params: Sequence[Value]) -> None:
        """Raise the error of a parameter that has no C type."""
        for i, value in enumerate(params):
            wrong = None
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                wrong = f"{value}, is not a 64-bit integer"
            elif isinstance(value, str) and _encoded(value) is None:
                wrong = f"{value!r}, is not a C string in UTF-8"
            if wrong is not None:
                raise HostFunctionError(f"{self._callee.name}: parameter {i}, {wrong}")
        raise MemoryError

    def end(self, failure: BaseException | None, status: int, nresults: int) -> None:
        """Raise the error of a failed call, an error status or a wrong number of results."""
        try:
            if failure is not None:
                raise failure
            if status != 0:
                raise HostFunctionError(
                    f"expected status 0, got {status}; report errors with frame->error"
                )
        except OutOfMemoryError:  # raised by the VM in a callback that allocates
            raise
        except MlvmError as error:
            raise HostFunctionError(f"{self._callee.name}: {error}") from None
        finally:
            del failure
        self._callee.check_results(nresults)
        if self._miscounted is not None:
            raise self._miscounted(nresults)
