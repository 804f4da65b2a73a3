"""Function table, in which `cfunc` looks up functions by name.

A linked program keeps the `Binding` of each name. A call needs no lookup, but uses the function of
a later registration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import MachineError, UnknownFunctionError, did_you_mean, with_article
from mlvm.core.machine.callee import (
    NO_KERNELS,
    OUT,
    Callee,
    Fused,
    Kernels,
    OpFresh,
    OpInto,
    UserFunction,
    Value,
    WritesInto,
    describe,
    is_tensor,
)
from mlvm.core.machine.frame import Frame
from mlvm.core.memory import HOST, Memory
from mlvm.core.op import OPS, Attributes, Kernel
from mlvm.core.types import TensorType


class Instrument(Protocol):
    """Hook around each function call, for a tracer, a debugger or a fake."""

    def before(
        self, name: str, params: Sequence[Value], attributes: Attributes
    ) -> Sequence[Value] | None:
        """Called before the function. A result other than None replaces the call's results."""

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        """Called after the function has returned."""


class Binding:
    """Binding of a name to the current function.

    `call` and `kernel` run the callee, wrapped in the instrument, if any. If the callee has no
    kernel, `kernel` runs `call`, because linked programs may use the kernel of the function that it
    replaced.
    """

    __slots__ = ("call", "callee", "instrument", "kernel", "name")

    def __init__(self, name: str, callee: Callee, instrument: Instrument | None = None) -> None:
        self.name = name
        self.instrument = instrument
        self.fill(callee)

    def fill(self, callee: Callee) -> None:
        """Bind a different function to the name, also for programs that are already linked."""
        self.callee = callee
        self.kernel: Kernel = (
            self._call_without_results if callee.kernel is None else self.watched(callee.kernel)
        )
        self.call = callee.call if self.instrument is None else self._watched_call

    def watch(self, instrument: Instrument | None) -> None:
        """Wrap the function in the instrument; None removes the instrument."""
        self.instrument = instrument
        self.fill(self.callee)

    def watched(self, kernel: Kernel) -> Kernel:
        """Return the kernel, wrapped in the instrument, if any."""
        instrument = self.instrument
        if instrument is None:
            return kernel

        def watched(*params: Value, **attributes: Any) -> None:
            if instrument.before(self.name, params, attributes) is None:
                kernel(*params, **attributes)
                instrument.after(self.name, params, attributes, ())

        return watched

    def _call_without_results(self, *params: Value, **attributes: Any) -> None:
        """Call the function, which must return no results.

        Raises `MachineError` if it returns some.
        """
        self.check(params, attributes)
        results = self.call(params, attributes)
        if results:
            raise MachineError(f"{self.name}: the call expects 0 results, got {len(results)}")

    def _watched_call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        instrument = self.instrument
        assert instrument is not None  # without an instrument, `call` is the callee's method
        replacements = instrument.before(self.name, params, attributes)
        if replacements is not None:
            return self._replacements(replacements, params, attributes)
        results = self.callee.call(params, attributes)
        instrument.after(self.name, params, attributes, results)
        return results

    def _replacements(
        self, replacements: Sequence[Value], params: Sequence[Any], attributes: Attributes
    ) -> Sequence[Value]:
        """Check the types of an instrument's replacements for a call's results, and return them."""
        frame = Frame(self.name, params, attributes, self.callee.memory)
        for value in replacements:
            frame.push(value)
        if isinstance(self.callee, OpFresh):
            [expected] = self.callee.infer([TensorType.of(x) for x in params], attributes)
            types = [TensorType.of(x) for x in frame.results if is_tensor(x)]
            if len(frame.results) != 1 or (expected is not None and types != [expected]):
                raise MachineError(
                    f"{self.name}: expected the instrument to return {with_article(expected)}, got "
                    f"({describe(frame.results)})"
                )
        return frame.results

    def check(self, params: Sequence[Any], attributes: Attributes, *, types: bool = True) -> None:
        """Check that no result overwrites an operand, and with `types` the parameters' types.

        Raises an `OpError`, or `MachineError` for an Int or Str instead of a Tensor.
        """
        if isinstance(self.callee, UserFunction):
            self.callee.check_count(len(params))
            return
        if types:
            if not all(map(is_tensor, params)):
                raise MachineError(f"{self.name}: expected Tensors, got ({describe(params)})")
            self.callee.infer([TensorType.of(x) for x in params], attributes)
        if isinstance(self.callee, WritesInto):
            written = params[: self.callee.writes(attributes)]
            if not all(map(self.callee.memory.writable, written)):
                raise MachineError(f"{self.name}: cannot write to a constant; pass a copy")
            self.callee.check_aliasing(params, attributes)


class FunctionTable:
    """Functions by name, for tensors in `memory`; initially all ops and `fused`.

    `kernels` replace the ops' own kernels. `version` counts the changes. It is always in the same 8
    bytes, where the C loop reads it after each call, without the interpreter lock. `max_results`
    limits the results of all calls of a program that return more than a few, as counted by
    `verify`.
    """

    max_results = 1 << 22

    def __init__(self, kernels: Kernels = NO_KERNELS, memory: Memory = HOST) -> None:
        self.memory = memory
        self.version = np.zeros((), np.int64)
        self.instrument: Instrument | None = None
        self._bindings: dict[str, Binding] = {}  # bindings of names that were looked up
        for name in kernels:
            if name not in OPS and name != Fused.name:
                raise _unknown("op", name, OPS)
        self._kernels = kernels
        forms = [(name, name + OUT) if not op.dynamic else (name,) for name, op in OPS.items()]
        self._names = dict.fromkeys((*chain.from_iterable(forms), Fused.name))

    def register(self, name: str, callee: Callee) -> None:
        """Bind `callee` to the name, which may be new."""
        self.version += 1
        callee.memory = self.memory
        if name in self._names:
            self.binding(name).fill(callee)
        else:
            self._bindings[name] = Binding(name, callee, self.instrument)
            self._names[name] = None

    def remove(self, name: str) -> None:
        """Remove the function of that name, also for running programs.

        Raises `UnknownFunctionError`.
        """
        binding = self.binding(name)
        self.version += 1
        del self._names[name], self._bindings[name]
        binding.fill(_Removed(name, nparams=None, nresults=None))

    def watch(self, instrument: Instrument | None) -> None:
        """Wrap every function in the instrument; None removes the instrument."""
        self.version += 1
        self.instrument = instrument
        for binding in [*self._bindings.values()]:  # other threads may add bindings meanwhile
            binding.watch(instrument)

    def binding(self, name: str) -> Binding:
        """Return the binding of that name. Raises `UnknownFunctionError` with similar names."""
        try:
            return self._bindings[name]
        except KeyError:
            if name not in self._names:
                raise _unknown("function", name, self._names) from None
            new = Binding(name, self._own(name), self.instrument)
            binding = self._bindings.setdefault(name, new)
            # another thread has changed the instrument meanwhile
            if binding.instrument is not self.instrument:
                binding.watch(self.instrument)
            return binding

    def _own(self, name: str) -> Callee:
        """Build the default callee for the name of an op, or for `fused`."""
        op = OPS.get(name.removesuffix(OUT))
        if op is None:
            callee: Callee = Fused(self._kernels)
        else:
            form = OpInto if name.endswith(OUT) else OpFresh
            callee = form(op, self._kernels.get(op.name))
        callee.memory = self.memory
        return callee

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


class _Removed(UserFunction):
    """Callee of a removed function: every call raises `UnknownFunctionError`."""

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        raise UnknownFunctionError(f"function {self.name!r} was removed; register it again")


def _unknown(what: str, name: str, names: Iterable[str]) -> UnknownFunctionError:
    return UnknownFunctionError(f"no {what} {name!r}{did_you_mean(name, names)}")
