"""The function table: what `cfunc` finds by name, and how each kind of function is called.

Every op is there twice: `add` ( x y -- z ) makes its result, `add.out` ( z x y -- ) writes
into z. A host function in Python reads its parameters and leaves its results through a
`Frame`. A linked program holds on to a name's `Slot`, so a call looks nothing up, and still
sees a later registration or removal.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    MachineError,
    OpError,
    ShapeError,
    UnknownFunction,
    brief,
)
from mlvm.core.machine import fused
from mlvm.core.op import OPS, Attributes, Kernel, Op
from mlvm.core.types import Array, TensorType, aligned_array

Value = Array | int | str
OUT: Final = ".out"


class Callee(Protocol):
    """A function of the table.

    `nresults` is how many values it leaves, None if that varies. `kernel`, where there is one,
    does all that `call` does when it is called with the parameters themselves.
    """

    nresults: int | None
    kernel: Kernel | None

    def bind(self, attributes: Attributes) -> Attributes:
        """The attributes as `call` takes them. Raises `AttributeRefused`."""

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> Sequence[TensorType | None] | None:
        """The results' types, None for each and all that only running tells.

        Raises an `OpError` for operands that the function refuses.
        """

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        """Bytes of the results it makes, and floating-point operations, as far as known."""

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        """Run on parameters that `infer` accepts, and return the results."""


class WritesInto:
    """What functions have in common that leave no results, but write to their first parameters."""

    nresults: int | None = 0

    def writes(self, attributes: Attributes) -> int:
        """How many parameters are written."""
        raise NotImplementedError

    def check_apart(self, params: Sequence[Array], attributes: Attributes) -> None:
        """Raise `MachineError` if a result would overwrite what is still read, or another."""
        raise NotImplementedError


class OpInto(WritesInto):
    """The form of an op that writes into its first parameter."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.bind = op.bind
        self.kernel: Kernel | None = op.kernel

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> Sequence[TensorType | None]:
        name = self.op.name + OUT
        if not operands:
            raise ShapeError("takes the tensor to write to first").at(name, operands)
        out, inferred = operands[0], self.op.infer(operands[1:], attributes)
        if out is not inferred:
            refused = ShapeError if inferred is None or out.dtype is inferred.dtype else DTypeError
            raise refused(f"the result is {inferred} and does not fit into {out}").at(
                name, operands
            )
        return ()

    def writes(self, attributes: Attributes) -> int:
        return 1

    def check_apart(self, params: Sequence[Array], attributes: Attributes) -> None:
        """Raise `MachineError` if the result would overwrite an operand that is still read.

        Elementwise ops may write over an operand of the result's own layout.
        """
        out = params[0]
        for x in params[1:]:
            if not np.may_share_memory(out, x):
                continue
            if not self.op.in_place or not same_place(out, x):
                raise MachineError(
                    f"{self.op.name}{OUT} would write over an operand while it reads it"
                )

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        return 0, self.op.flops(operands[1:], operands[0], attributes)

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        self.op.kernel(*params, **attributes)
        return ()


def same_place(x: Array, y: Array) -> bool:
    """Whether two arrays have the same elements, at most under another dtype: their shapes may
    differ in leading axes of length 1."""
    ndim = min(x.ndim, y.ndim)
    return (
        x.ctypes.data == y.ctypes.data
        and (x.size, x.itemsize) == (y.size, y.itemsize)
        and x.shape[x.ndim - ndim :] == y.shape[y.ndim - ndim :]
    )


class Fused(WritesInto):
    """The host function `fused`: a chain of ops, run block by block (`mlvm.core.machine.fused`)."""

    name: Final = "fused"
    kernel: Kernel | None = staticmethod(fused.run)

    def bind(self, attributes: Attributes) -> Attributes:
        """`{"chain": Chain}`. Raises `AttributeRefused` for a chain that makes no sense."""
        if isinstance(attributes.get("chain"), fused.Chain):
            return attributes
        try:
            return {"chain": fused.parse(attributes)}
        except AttributeRefused as error:
            raise AttributeRefused(str(error)).at(self.name, ()) from error.__cause__

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> Sequence[TensorType | None]:
        try:
            attributes["chain"].infer(operands)
        except OpError as error:  # of the chain, or of an op in it, which it names
            raise error.__class__(str(error)).at(self.name, operands) from None
        return ()

    def writes(self, attributes: Attributes) -> int:
        outputs: int = attributes["chain"].outputs
        return outputs

    def check_apart(self, params: Sequence[Array], attributes: Attributes) -> None:
        chain: fused.Chain = attributes["chain"]
        for i, out in enumerate(params[: chain.outputs]):
            for j, x in enumerate(params):
                if j == i or not np.may_share_memory(out, x):
                    continue
                if j < chain.outputs or not same_place(out, x) or not chain.may_replace(i, j):
                    raise MachineError(
                        f"{self.name} would write parameter {i} over {j} while it is in use"
                    )

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        chain: fused.Chain = attributes["chain"]
        known = chain.infer(operands)
        return 0, sum(
            op.flops([known[source] for source in sources], known[target], given)
            for op, target, sources, given in chain.links
        )

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        fused.run(*params, **attributes)  # type: ignore[arg-type]
        return ()


class OpFresh:
    """The form of an op that makes its result."""

    nresults: int | None = 1
    kernel: Kernel | None = None

    def __init__(self, op: Op) -> None:
        self.op = op
        self.bind = op.bind

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> Sequence[TensorType | None]:
        return (self.op.infer(operands, attributes),)

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        out = self.op.infer(operands, attributes)
        return (0, 0) if out is None else (out.nbytes, self.op.flops(operands, out, attributes))

    def call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        type = self.op.infer([TensorType.of(x) for x in params], attributes)
        if type is None:  # a dynamic op makes the array itself
            result: Array = self.op.kernel(*params, **attributes)
            out = aligned_array(TensorType.of(result))
            np.copyto(out, result)
            return (out,)
        out = aligned_array(type)
        self.op.kernel(out, *params, **attributes)
        return (out,)


class Frame:
    """What a host function sees of the machine: its parameters, and where results go."""

    __slots__ = ("_lent", "_name", "_params", "attributes", "results")

    def __init__(self, name: str, params: Sequence[Value], attributes: Attributes) -> None:
        self._name = name
        self._params = params
        self._lent: list[Array] = []
        self.attributes = attributes
        self.results: list[Value] = []

    @property
    def nparams(self) -> int:
        """How many parameters the call has."""
        return len(self._params)

    def param(self, i: int) -> Value:
        """Parameter i, from 0: an array (the tensor's own memory), an int or a str.

        Raises `MachineError` when there is none of that number.
        """
        if not isinstance(i, int) or not 0 <= i < len(self._params):
            raise MachineError(f"{self._name}: no parameter {i!r}; the call has {self.nparams}")
        value = self._params[i]
        if isinstance(value, np.ndarray):
            value = value.view()  # the shape of this one is the caller's to change
            self._lent.append(value)
        return value

    def new_tensor(self, type: TensorType) -> Array:
        """A tensor of zeros, which is a result once it is pushed."""
        if not isinstance(type, TensorType):
            raise MachineError(f"{self._name}: a tensor is of a TensorType, not {type!r}")
        array = aligned_array(type)
        self._lent.append(array)
        return array

    def push(self, value: Value) -> None:
        """Leave a result. A parameter or new tensor is pushed as it is, any other array copied.

        Raises `MachineError` for what is no array, int or str.
        """
        if isinstance(value, np.generic):  # what numpy makes of arithmetic on scalars
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            if any(value is lent for lent in self._lent) and value.flags.c_contiguous:
                value = value.view()
            else:
                value, given = aligned_array(TensorType.of(value)), value
                np.copyto(value, given)
        elif isinstance(value, bool) or not isinstance(value, (int, str)):
            raise MachineError(
                f"{self._name}: a result is an array, an int or a str, not a {type(value).__name__}"
            )
        self.results.append(value)

    def lend(self, array: Array) -> None:
        """Leave a result that is not copied: its memory must last as long as the array does.

        Raises `MachineError` for an array that the machine cannot use as it is.
        """
        if not isinstance(array, np.ndarray) or not array.flags.carray:
            raise MachineError(f"{self._name}: only a writable, contiguous array is lent")
        TensorType.of(array)
        self.results.append(array)


HostFunction = Callable[[Frame], None]


class UserFunction:
    """A host function that is no op: it takes values of any kind and has no type rule. `nparams`
    and `nresults` are what it announces, None for any number."""

    kernel: Kernel | None = None

    def __init__(self, name: str, nparams: int | None, nresults: int | None) -> None:
        self.name = name
        self.nparams = nparams
        self.nresults = nresults

    def bind(self, attributes: Attributes) -> Attributes:
        return attributes

    def infer(
        self, operands: Sequence[TensorType], attributes: Attributes
    ) -> Sequence[TensorType | None] | None:
        self.check_count(len(operands))
        return None

    def cost(self, operands: Sequence[TensorType], attributes: Attributes) -> tuple[int, int]:
        return 0, 0

    def check_count(self, given: int) -> None:
        """Raise `MachineError` unless the function takes so many parameters."""
        if self.nparams not in (None, given):
            raise MachineError(f"{self.name} takes {self.nparams} parameters, was given {given}")

    def check_results(self, left: int) -> None:
        """Raise `MachineError` unless the function has left as many results as it announces."""
        if self.nresults not in (None, left):
            raise MachineError(f"{self.name}: announced {self.nresults} results, left {left}")

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        raise NotImplementedError


class PythonFunction(UserFunction):
    """A host function in Python, which works on a `Frame`."""

    def __init__(
        self, name: str, fn: HostFunction, nparams: int | None, nresults: int | None
    ) -> None:
        super().__init__(name, nparams, nresults)
        self.fn = fn

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        frame = Frame(self.name, params, attributes)
        self.fn(frame)
        self.check_results(len(frame.results))
        return frame.results


class Instrument(Protocol):
    """Something to call around each function: a trace, a debugger, a fake."""

    def before(
        self, name: str, params: Sequence[Value], attributes: Attributes
    ) -> Sequence[Value] | None:
        """Called first. None goes on; anything else is taken for the results, and the function
        is skipped."""

    def after(
        self,
        name: str,
        params: Sequence[Value],
        attributes: Attributes,
        results: Sequence[Value],
    ) -> None:
        """Called when the function has run without an error."""


class Slot:
    """A name's place in the table; `call` and `kernel` are its callee's, one lookup nearer,
    with the instrument around them while there is one. Where the callee has no kernel, `kernel`
    calls it: a program that was linked to a kernel may find another function in its place."""

    __slots__ = ("call", "callee", "instrument", "kernel", "name")

    callee: Callee
    kernel: Kernel
    call: Callable[[Sequence[Any], Attributes], Sequence[Value]]

    def __init__(self, name: str, callee: Callee, instrument: Instrument | None = None) -> None:
        self.name = name
        self.instrument = instrument
        self.fill(callee)

    def fill(self, callee: Callee) -> None:
        """Make this the function of that name, also for programs already linked."""
        self.callee = callee
        self.kernel = self._call_for_none if callee.kernel is None else self.watched(callee.kernel)
        self.call = callee.call if self.instrument is None else self._watched_call

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

    def _call_for_none(self, *params: Value, **attributes: Any) -> None:
        """Call the function where no results are announced. Raises `MachineError` if it leaves
        some."""
        self.check(params, attributes)
        results = self.call(params, attributes)
        if results:
            raise MachineError(f"{self.name} left {len(results)} results where 0 are announced")

    def _watched_call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        instrument = self.instrument
        assert instrument is not None  # else `call` is the callee's own
        given = instrument.before(self.name, params, attributes)
        if given is not None:
            return self._replacements(given, params, attributes)
        results = self.callee.call(params, attributes)
        instrument.after(self.name, params, attributes, results)
        return results

    def _replacements(
        self, given: Sequence[Value], params: Sequence[Any], attributes: Attributes
    ) -> Sequence[Value]:
        """What an instrument gave in place of results, if they are of the types these have."""
        frame = Frame(self.name, params, attributes)
        for value in given:
            frame.push(value)
        if isinstance(self.callee, OpFresh):
            [wanted] = self.callee.infer([TensorType.of(x) for x in params], attributes)
            types = [TensorType.of(x) for x in frame.results if isinstance(x, np.ndarray)]
            if len(frame.results) != 1 or (wanted is not None and types != [wanted]):
                raise MachineError(
                    f"{self.name}: the instrument gave ({describe(frame.results)}) for a {wanted}"
                )
        return frame.results

    def check(self, params: Sequence[Any], attributes: Attributes, *, types: bool = True) -> None:
        """What the verifier could not: that results are not written over operands, and with
        `types` the kinds and types of the parameters.

        Raises an `OpError`, or `MachineError` for an Int or Str where a Tensor is wanted.
        """
        if isinstance(self.callee, UserFunction):
            self.callee.check_count(len(params))
            return
        if types:
            if not all(isinstance(x, np.ndarray) for x in params):
                raise MachineError(f"{self.name} takes Tensors, not ({describe(params)})")
            self.callee.infer([TensorType.of(x) for x in params], attributes)
        if isinstance(self.callee, WritesInto):
            if not all(x.flags.writeable for x in params[: self.callee.writes(attributes)]):
                raise MachineError(f"{self.name} would write to a constant")
            self.callee.check_apart(params, attributes)


def describe(values: Sequence[Value]) -> str:
    """The values by type, as errors show them: `f32[2,3], Int 4, Str "x"`."""
    return ", ".join(
        str(TensorType.of(x))
        if isinstance(x, np.ndarray)
        else f"{'Str' if isinstance(x, str) else 'Int'} {brief(x)}"
        for x in values
    )


class FunctionTable:
    """Functions by name; it starts with all ops, and `fused`."""

    def __init__(self) -> None:
        self.instrument: Instrument | None = None
        self._slots: dict[str, Slot] = {}
        for name, op in OPS.items():
            self._slots[name] = Slot(name, OpFresh(op))
            if not op.dynamic:
                self._slots[name + OUT] = Slot(name + OUT, OpInto(op))
        self._slots[Fused.name] = Slot(Fused.name, Fused())

    def register(self, name: str, callee: Callee) -> None:
        """Make `callee` the function of that name, which may be new."""
        if name in self._slots:
            self._slots[name].fill(callee)
        else:
            self._slots[name] = Slot(name, callee, self.instrument)

    def remove(self, name: str) -> None:
        """Take the function of that name out, also from under programs that are running.

        Raises `UnknownFunction`.
        """
        slot = self.slot(name)
        del self._slots[name]
        slot.fill(_Removed(name))

    def watch(self, instrument: Instrument | None) -> None:
        """Put the instrument around every function, or with None take it away."""
        self.instrument = instrument
        for slot in self._slots.values():
            slot.instrument = instrument
            slot.fill(slot.callee)

    def slot(self, name: str) -> Slot:
        """The slot of that name. Raises `UnknownFunction`, which offers names like it."""
        try:
            return self._slots[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._slots, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UnknownFunction(f"no function {name!r}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)


class _Removed(PythonFunction):
    """What a removed function's slot holds: calling it is an error."""

    def __init__(self, name: str) -> None:
        def refuse(frame: Frame) -> None:
            raise UnknownFunction(f"function {name!r} was removed")

        super().__init__(name, refuse, None, None)
