"""The function table: what `cfunc` finds by name.

A linked program holds on to a name's `Binding`. So a call looks nothing up, and still sees a later
registration or removal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import MachineError, UnknownFunction
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
    """Something to call around each function: a trace, a debugger, a fake."""

    def before(
        self, name: str, params: Sequence[Value], attributes: Attributes
    ) -> Sequence[Value] | None:
        """Called first. If it returns None, the function runs; anything else replaces the results,
        and the function does not run."""

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        """Called when the function has run without an error."""


class Binding:
    """Binding of a name to its current function.

    `call` and `kernel` are the callee's, with the instrument, if any, around them. If the callee
    has no kernel, `kernel` uses `call`: it may have replaced a function that had one, for which a
    program was linked."""

    __slots__ = ("call", "callee", "instrument", "kernel", "name")

    def __init__(self, name: str, callee: Callee, instrument: Instrument | None = None) -> None:
        self.name = name
        self.instrument = instrument
        self.fill(callee)

    def fill(self, callee: Callee) -> None:
        """Make this the function of that name, also for programs already linked."""
        self.callee = callee
        self.kernel: Kernel = (
            self._call_without_results if callee.kernel is None else self.watched(callee.kernel)
        )
        self.call = callee.call if self.instrument is None else self._watched_call

    def watch(self, instrument: Instrument | None) -> None:
        """Put the instrument around it, or with None take it away."""
        self.instrument = instrument
        self.fill(self.callee)

    def watched(self, kernel: Kernel) -> Kernel:
        """The kernel with the instrument, if any, around it."""
        instrument = self.instrument
        if instrument is None:
            return kernel

        def watched(*params: Value, **attributes: Any) -> None:
            if instrument.before(self.name, params, attributes) is None:
                kernel(*params, **attributes)
                instrument.after(self.name, params, attributes, ())

        return watched

    def _call_without_results(self, *params: Value, **attributes: Any) -> None:
        """Call the function where no results are announced. Raises `MachineError` if it leaves
        some."""
        self.check(params, attributes)
        results = self.call(params, attributes)
        if results:
            raise MachineError(f"{self.name} left {len(results)} results where 0 are announced")

    def _watched_call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        instrument = self.instrument
        assert instrument is not None  # else `call` is the callee's own
        replacements = instrument.before(self.name, params, attributes)
        if replacements is not None:
            return self._replacements(replacements, params, attributes)
        results = self.callee.call(params, attributes)
        instrument.after(self.name, params, attributes, results)
        return results

    def _replacements(
        self, replacements: Sequence[Value], params: Sequence[Any], attributes: Attributes
    ) -> Sequence[Value]:
        """Return an instrument's replacements for a call's results, with their types checked."""
        frame = Frame(self.name, params, attributes, self.callee.memory)
        for value in replacements:
            frame.push(value)
        if isinstance(self.callee, OpFresh):
            [expected] = self.callee.infer([TensorType.of(x) for x in params], attributes)
            types = [TensorType.of(x) for x in frame.results if is_tensor(x)]
            if len(frame.results) != 1 or (expected is not None and types != [expected]):
                raise MachineError(
                    f"{self.name}: the instrument gave ({describe(frame.results)}) for a {expected}"
                )
        return frame.results

    def check(self, params: Sequence[Any], attributes: Attributes, *, types: bool = True) -> None:
        """Check that no result overwrites an operand, and with `types` the parameters' types, too.

        Raises an `OpError`, or `MachineError` for an Int or Str in place of a Tensor.
        """
        if isinstance(self.callee, UserFunction):
            self.callee.check_count(len(params))
            return
        if types:
            if not all(map(is_tensor, params)):
                raise MachineError(f"{self.name} takes Tensors, not ({describe(params)})")
            self.callee.infer([TensorType.of(x) for x in params], attributes)
        if isinstance(self.callee, WritesInto):
            written = params[: self.callee.writes(attributes)]
            if not all(map(self.callee.memory.writable, written)):
                raise MachineError(f"{self.name} would write to a constant")
            self.callee.check_aliasing(params, attributes)


class FunctionTable:
    """Functions by name, for tensors in `memory`: at first all ops and `fused`. `kernels` replace
    the ops' own.

    `version` counts the changes since, always in the same 8 bytes: a loop in C looks there after
    each call, without the interpreter lock.

    `max_results` bounds what `verify` follows: the results of all calls of a program that leave
    more than a few."""

    max_results = 1 << 22

    def __init__(self, kernels: Kernels = NO_KERNELS, memory: Memory = HOST) -> None:
        self.memory = memory
        self.version = np.zeros((), np.int64)
        self.instrument: Instrument | None = None
        self._bindings: dict[str, Binding] = {}  # of the functions that were asked for
        for name in kernels:
            if name not in OPS and name != Fused.name:
                raise _unknown("op", name, OPS)
        self._kernels = kernels
        forms = [(name, name + OUT) if not op.dynamic else (name,) for name, op in OPS.items()]
        self._names = dict.fromkeys((*chain.from_iterable(forms), Fused.name))

    def register(self, name: str, callee: Callee) -> None:
        """Make `callee` the function of that name, which may be new."""
        self.version += 1
        callee.memory = self.memory
        if name in self._names:
            self.binding(name).fill(callee)
        else:
            self._bindings[name] = Binding(name, callee, self.instrument)
            self._names[name] = None

    def remove(self, name: str) -> None:
        """Take that function out, also for running programs. Raises `UnknownFunction`."""
        binding = self.binding(name)
        self.version += 1
        del self._names[name], self._bindings[name]
        binding.fill(_Removed(name, nparams=None, nresults=None))

    def watch(self, instrument: Instrument | None) -> None:
        """Put the instrument around every function, or with None take it away."""
        self.version += 1
        self.instrument = instrument
        for binding in [*self._bindings.values()]:  # others may ask for more meanwhile
            binding.watch(instrument)

    def binding(self, name: str) -> Binding:
        """The binding of that name. Raises `UnknownFunction`, which offers names like it."""
        try:
            return self._bindings[name]
        except KeyError:
            if name not in self._names:
                raise _unknown("function", name, self._names) from None
            new = Binding(name, self._own(name), self.instrument)
            binding = self._bindings.setdefault(name, new)
            if binding.instrument is not self.instrument:  # another thread has watched meanwhile
                binding.watch(self.instrument)
            return binding

    def _own(self, name: str) -> Callee:
        """Build the callee of an op's name, or of `fused`, before any function replaces it."""
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
    """Callee of a removed function: every call raises `UnknownFunction`."""

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        raise UnknownFunction(f"function {self.name!r} was removed")


def _unknown(what: str, name: str, names: Iterable[str]) -> UnknownFunction:
    from difflib import get_close_matches  # only errors need it

    close = get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return UnknownFunction(f"no {what} {name!r}{hint}")
