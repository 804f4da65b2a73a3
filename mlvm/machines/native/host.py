"""Calls of host functions by the loop in C: what it knows of each, and what it asks.

The loop calls a C function itself, and its frame (`machine/host.c`) answers what functions commonly
ask. All that is out of the ordinary, and every error, comes from here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlvm.core.errors import MlvmError
from mlvm.core.machine.callee import UserFunction
from mlvm.core.machine.functions import Binding
from mlvm.core.machine.link import CallDetails
from mlvm.core.machine.run import Call, miscounted
from mlvm.core.op import Attributes
from mlvm.core.program.program import STAR
from mlvm.core.types import TensorType
from mlvm.machines import c_functions
from mlvm.machines.c_functions import CFunction
from mlvm.machines.native.types import Type, native_type

_ANY = -1


class Host(NamedTuple):
    """A call of a host function, as `machine/host.h` has it. The address is 0 for one in Python."""

    call: Call
    attributes: Attributes
    asked: HostCall
    nparams: int
    nresults: int
    address: int = 0
    text: bytes = b"{}"
    numbers: tuple[tuple[bytes, float | None], ...] = ()


def host_of(binding: Binding, details: CallDetails) -> Host | None:
    """What the loop needs to call the function, if it is a host function that it can hold to its
    counts. `nparams` is what the loop has to check."""
    callee = binding.callee
    if not isinstance(callee, UserFunction) or details.apart:
        return None
    nresults = _ANY if callee.nresults is None else callee.nresults
    if details.nresults != STAR:
        if nresults not in (_ANY, details.nresults) or details.nresults < 0:
            return None
        nresults = details.nresults
    nparams = callee.nparams if details.unproven else None
    host = Host(
        binding.call,
        details.attributes,
        HostCall(binding, details),
        _ANY if nparams is None else nparams,
        nresults,
    )
    if not isinstance(callee, CFunction):
        return host
    text, numbers = callee.text(details.attributes), _numbers(details.attributes)
    return host._replace(address=callee.address, text=text, numbers=numbers)


def _numbers(attributes: Attributes) -> tuple[tuple[bytes, float | None], ...]:
    """The attributes by the names that C may ask for, with None for what is no number."""
    found: list[tuple[bytes, float | None]] = []
    for name in attributes:
        try:
            encoded = name.encode()
        except UnicodeEncodeError:
            continue
        if b"\0" in encoded:
            continue
        try:
            found.append((encoded, c_functions.number(attributes, encoded, place=True)))
        except MlvmError:
            found.append((encoded, None))
    return tuple(found)


class HostCall:
    """The Python side of a call. What a method raises, the call fails with."""

    __slots__ = ("_binding", "_callee", "_details")

    def __init__(self, binding: Binding, details: CallDetails) -> None:
        self._binding = binding
        self._callee: Any = binding.callee  # as of now: a program runs none that came later
        self._details = details

    def number(self, name: bytes | None, place: bool) -> None:
        """Raise what is wrong with what was asked for, if anything is."""
        c_functions.number(self._details.attributes, name, place)

    def new_tensor(self, dtype: int, ndim: int, shape: list[int] | None) -> Type:
        return native_type(c_functions.type_asked_for(dtype, ndim, shape))

    def no_memory(self, type: TensorType) -> None:
        raise c_functions.no_memory(type)

    def no_tensor(self) -> None:
        raise c_functions.no_tensor()

    def string(self, text: bytes | None) -> str:
        return c_functions.decoded(text)

    def error(self, message: bytes | None) -> None:
        raise c_functions.reported(message)

    def end(self, failure: BaseException | None, status: int, left: int) -> None:
        """Raise what is wrong with a call that has ended so and left so many results."""
        try:
            c_functions.check_end(failure, status)
        except MlvmError as error:
            raise self._callee.named(error) from None
        finally:
            del failure
        self._callee.check_results(left)
        raise miscounted(self._binding, left, self._details)
