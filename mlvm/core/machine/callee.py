"""Functions in the function table: ops, `fused` and user functions.

Every op has two entries: `add` ( x y -- z ) allocates the result, `add.out` ( z x y -- ) writes it
to z. A table of kernels may replace the reference kernels of ops and `fused`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from typing_extensions import TypeIs

from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    MachineError,
    MlvmError,
    OpError,
    ShapeError,
    brief,
    counted,
)
from mlvm.core.machine import fused
from mlvm.core.memo import exact_repr
from mlvm.core.memory import HOST, Memory, address
from mlvm.core.op import Attributes, Kernel, Op
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType

Value = Array | int | str
Types: TypeAlias = Sequence[TensorType]
Inferred: TypeAlias = Sequence[TensorType | None]
ResultRule: TypeAlias = Callable[..., TensorType | tuple[TensorType, ...]]
"""Type rule of a user function.

The arguments are the operand types, and the attributes as keyword arguments.
"""
OUT: Final = ".out"

Kernels: TypeAlias = Mapping[str, Kernel]
"""Kernels by op name; each has the signature of the op's own kernel and replaces it on a machine.
"""

NO_KERNELS: Final[Kernels] = MappingProxyType({})


def is_tensor(value: Value) -> TypeIs[Array]:
    """Return whether a value is a Tensor in any memory, rather than an Int or a Str."""
    return not isinstance(value, (int, str))


class Callee(Protocol):
    """Function in the table.

    `nresults`: number of results, None if it varies.
    `kernel`: optional kernel that is called with the parameters and does all that `call` does.
    `memory`: memory of the tensors; the table sets it.
    """

    nresults: int | None
    memory: Memory

    @property
    def kernel(self) -> Kernel | None: ...

    def bind(self, attributes: Attributes) -> Attributes:
        """Return the attributes in the form that `call` expects. Raises `ArgumentError`."""

    def infer(self, operands: Types, attributes: Attributes) -> Inferred | None:
        """Return the results' types; None for one type, or for all types, that depends on values.

        Raises an `OpError` for invalid operands.
        """

    def cost(self, operands: Types, attributes: Attributes) -> tuple[int, int]:
        """Return the bytes of allocated results and the floating-point operations, if known."""

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        """Run the function on parameters that `infer` accepts, and return the results."""


class WritesInto:
    """Base class of functions that return None and write to the first parameters."""

    nresults: int | None = 0
    memory = HOST
    kernel: Kernel

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        self.kernel(*params, **attributes)
        return ()

    def writes(self, attributes: Attributes) -> int:
        """Return the number of parameters that a call writes to; they come first."""
        raise NotImplementedError

    def check_aliasing(self, params: Sequence[Array], attributes: Attributes) -> None:
        """Raise `MachineError` if a result would overwrite an operand in use or a result."""
        raise NotImplementedError


class OpInto(WritesInto):
    """Variant of an op that writes to the first parameter."""

    def __init__(self, op: Op, kernel: Kernel | None = None) -> None:
        self.op = op
        self.bind = op.bind
        self.kernel = kernel or op.kernel

    def call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        half.suited(self.op, self.kernel, params)(*params, **attributes)
        return ()

    def infer(self, operands: Types, attributes: Attributes) -> Inferred:
        name = self.op.name + OUT
        if not operands:
            raise ShapeError(
                "expected the tensor to write to as the first operand, got no operands"
            ).at(name, operands)
        out, inferred = operands[0], self.op.infer(operands[1:], attributes)
        if out is not inferred:
            refused = ShapeError if inferred is None or out.dtype is inferred.dtype else DTypeError
            message = f"expected an output of the result's type {inferred}, got {out}"
            raise refused(message).at(name, operands)
        return ()

    def writes(self, attributes: Attributes) -> int:
        return 1

    def check_aliasing(self, params: Sequence[Array], attributes: Attributes) -> None:
        """Check the result, which may overwrite some operands with the result's layout.

        Raises `MachineError`.
        """
        out = params[0]
        for i, x in enumerate(params[1:]):
            if np.may_share_memory(out, x) and (i >= self.op.in_place or not same_place(out, x)):
                raise MachineError(
                    f"{self.op.name}{OUT}: the result overlaps an operand that is still read"
                )

    def cost(self, operands: Types, attributes: Attributes) -> tuple[int, int]:
        return 0, self.op.flops(operands[1:], operands[0], attributes)


def same_place(x: Array, y: Array) -> bool:
    """Return whether two arrays have the same memory for each element, whatever the dtypes.

    The shapes may differ in leading axes of length 1.
    """
    ndim = min(x.ndim, y.ndim)
    return (
        address(x) == address(y)
        and (x.size, x.itemsize) == (y.size, y.itemsize)
        and x.shape[x.ndim - ndim :] == y.shape[y.ndim - ndim :]
    )


class Fused(WritesInto):
    """Host function `fused`: a chain of ops, run block by block (`mlvm.core.machine.fused`)."""

    name: Final = "fused"

    def __init__(self, kernels: Kernels = NO_KERNELS) -> None:
        self.kernel = kernels.get(self.name, fused.run)
        self.kernels = kernels
        self._chains: WeakValueDictionary[str, fused.Chain] = WeakValueDictionary()

    def bind(self, attributes: Attributes) -> Attributes:
        """Return `{"chain": Chain}`, with one shared chain for equal attributes.

        A model with equal layers has many of them. Raises `ArgumentError` for an invalid chain.
        """
        if isinstance(attributes.get("chain"), fused.Chain):
            return attributes
        key = exact_repr(attributes)
        try:
            chain = self._chains.get(key) or fused.parse(attributes, self.kernels)
            return {"chain": self._chains.setdefault(key, chain)}
        except ArgumentError as error:
            raise ArgumentError(str(error)).at(self.name, ()) from error.__cause__

    def infer(self, operands: Types, attributes: Attributes) -> Inferred:
        try:
            attributes["chain"].infer(operands)
        # raised by the chain, or by an op of the chain, which the text names
        except OpError as error:
            raise error.__class__(str(error)).at(self.name, operands) from None
        return ()

    def writes(self, attributes: Attributes) -> int:
        outputs: int = attributes["chain"].outputs
        return outputs

    def check_aliasing(self, params: Sequence[Array], attributes: Attributes) -> None:
        chain: fused.Chain = attributes["chain"]
        for i, out in enumerate(params[: chain.outputs]):
            for j, x in enumerate(params):
                if j == i or not np.may_share_memory(out, x):
                    continue
                if j < chain.outputs or not same_place(out, x) or not chain.may_replace(i, j):
                    raise MachineError(
                        f"{self.name}: parameter {i}, a result, overlaps parameter {j}, which is "
                        f"still in use; pass a different tensor"
                    )

    def cost(self, operands: Types, attributes: Attributes) -> tuple[int, int]:
        chain: fused.Chain = attributes["chain"]
        types = chain.infer(operands)
        return 0, sum(
            op.flops([types[source] for source in sources], types[target], how)
            for op, target, sources, how in chain.links
        )


class OpFresh:
    """Variant of an op that allocates the result."""

    nresults: int | None = 1
    memory = HOST
    kernel: Kernel | None = None

    def __init__(self, op: Op, kernel: Kernel | None = None) -> None:
        self.op = op
        self.bind = op.bind
        self.fill = kernel or op.kernel

    def infer(self, operands: Types, attributes: Attributes) -> Inferred:
        return (self.op.infer(operands, attributes),)

    def cost(self, operands: Types, attributes: Attributes) -> tuple[int, int]:
        out = self.op.infer(operands, attributes)
        return (0, 0) if out is None else (out.nbytes, self.op.flops(operands, out, attributes))

    def call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        type = self.op.infer([TensorType.of(x) for x in params], attributes)
        if type is None:  # an op with a dynamic shape allocates the array
            fill = half.suited(self.op, self.fill, params)
            return (self.memory.copy(fill(*params, **attributes)),)
        out = self.memory.new(type)
        half.suited(self.op, self.fill, (out, *params))(out, *params, **attributes)
        return (out,)


class UserFunction:
    """Host function other than an op: operands may have any kind, and a type rule is optional.

    nparams, nresults: declared numbers of parameters and results, None for any number.
    reads: slice of the tensors that it only reads; None if it may write to any of them.
    """

    memory = HOST
    kernel: Kernel | None = None
    result: ResultRule | None = None
    """Type rule for eager code, from the operands' types and the attributes to the results' types.
    """

    def __init__(
        self, name: str, nparams: int | None, nresults: int | None, reads: slice | None = None
    ) -> None:
        self.name, self.nparams, self.nresults, self.reads = name, nparams, nresults, reads

    def bind(self, attributes: Attributes) -> Attributes:
        return attributes

    def infer(self, operands: Types, attributes: Attributes) -> Inferred | None:
        self.check_count(len(operands))
        return None

    def cost(self, operands: Types, attributes: Attributes) -> tuple[int, int]:
        return 0, 0

    def check_count(self, nparams: int) -> None:
        """Raise `MachineError` unless the function accepts that number of parameters."""
        if self.nparams is not None and self.nparams != nparams:
            raise MachineError(
                f"{self.name}: expected {counted(self.nparams, 'parameter')}, got {nparams}"
            )

    def check_results(self, nresults: int) -> None:
        """Raise `MachineError` unless the function returned the declared number of results."""
        if self.nresults is not None and self.nresults != nresults:
            raise MachineError(
                f"{self.name}: expected {counted(self.nresults, 'result')}, got {nresults}"
            )

    def result_types(
        self, operands: Types, attributes: Attributes
    ) -> tuple[TensorType, ...] | None:
        """Return the results' types by the type rule; None if it has no rule.

        Raises `MachineError` if the rule fails or returns something else.
        """
        rule = self.result
        if rule is None:
            return None
        self.check_count(len(operands))
        try:
            types = rule(*operands, **attributes)
        except MlvmError:
            raise
        except Exception as error:
            raise MachineError(
                misfit(f"{self.name}: its type rule", rule, operands, attributes)
                or f"{self.name}: its type rule raised {type(error).__name__}: {error}"
            ) from error
        results = (types,) if isinstance(types, TensorType) else types
        if not isinstance(results, (tuple, list)) or any(
            not isinstance(each, TensorType) for each in results
        ):
            raise MachineError(
                f"{self.name}: expected its type rule to return a TensorType or a tuple of them, "
                f"got {brief(types)}"
            )
        if self.nresults is not None and self.nresults != len(results):
            raise MachineError(
                f"{self.name}: expected its type rule to return {counted(self.nresults, 'type')} "
                f"(nresults=), got {counted(len(results), 'type')}"
            )
        return tuple(results)

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        raise NotImplementedError


def misfit(
    what: str, fn: Callable[..., object], args: Sequence[object], keywords: Attributes
) -> str | None:
    """Describe how a call's arguments differ from the signature of a user's function.

    Return None if they match, or if the function has no readable signature.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        named = ", ".join(keywords)
        extra = f" and attributes {named}" if named else ""
        return f"{what} takes {signature}, the call has {counted(len(args), 'operand')}{extra}"
    return None


def describe(values: Sequence[Value]) -> str:
    """Return the types of the values as text for errors: `f32[2,3], Int 4, Str "x"`."""
    return ", ".join(
        str(TensorType.of(x))
        if is_tensor(x)
        else f"{'Str' if isinstance(x, str) else 'Int'} {brief(x)}"
        for x in values
    )
