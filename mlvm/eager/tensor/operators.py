"""Operators of tensors: Python's name of each operator, and the op."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from sys import _getframe, getrefcount
from typing import Final, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, MlvmError, OperandValueError
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.autocast import in_single
from mlvm.eager.tensor.methods import Methods
from mlvm.eager.tensor.operands import Operand, is_array, operand
from mlvm.eager.tensor.parts import warn_of_part
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.warn import LOCAL_OPERATOR
from mlvm.eager.tensor.wrapper import annotate_error

Binary: TypeAlias = "Callable[[Tensor, Operand], Tensor]"

_DIVIDE: Final = one_op("divide")
_POW: Final = one_op("pow")
_SQUARE: Final = one_op("square")


def _of_two(op: str) -> Binary:
    call = one_op(op)

    def operator(self: Tensor, other: Operand) -> Tensor:
        try:
            return apply(call, self, other if type(other) is Tensor else operand(other, self))
        except MlvmError as error:
            annotate_error(error, op, (self, other))
            raise

    return operator


def _reflected(op: str) -> Binary:
    call = one_op(op)

    def operator(self: Tensor, other: Operand) -> Tensor:
        try:
            return apply(call, operand(other, self), self)
        except MlvmError as error:
            annotate_error(error, op, (other, self))
            raise

    return operator


def _without_zero(op: str, operator: Binary) -> Binary:
    """Decorate `//` or `%`: integers divided by the number 0 raise `OperandValueError`.

    Divisors in a tensor are not checked: a quotient by 0 is 0 there."""

    def checked(self: Tensor, other: Operand) -> Tensor:
        if other.__class__ is int and other == 0 and self.dtype.is_integer:
            text = f"integer division by zero; ml.{op}(x, 0) returns 0 instead of raising"
            raise OperandValueError(text).at(op, (self.type, 0))
        return operator(self, other)

    return checked


def _over(self: Tensor, other: Operand) -> Tensor:
    """Return other / self.

    `autocast` treats it as a power of self, like `reciprocal`."""
    try:
        self = in_single(self)
        return apply(_DIVIDE, operand(other, self), self)
    except MlvmError as error:
        annotate_error(error, "divide", (other, self))
        raise


def _of_function(op: str, *, reflected: bool = False) -> Binary:
    """Return the operator of an op if the op's function casts operands under `autocast`."""
    function: Callable[..., Tensor] = getattr(primitives, op)

    def operator(self: Tensor, other: Operand) -> Tensor:
        try:
            other = operand(other, self)
            return function(other, self) if reflected else function(self, other)
        except MlvmError as error:
            annotate_error(error, op, (other, self) if reflected else (self, other))
            raise

    return operator


def _in_place(op: str) -> Binary:
    call = one_op(op)

    def operator(self: Tensor, other: Operand) -> Tensor:
        if self.is_part and (holders := getrefcount(self) - LOCAL_OPERATOR) >= 0:
            warn_of_part(_getframe(1), self, holders - 2 * (other is self))
        try:
            return apply_into(self, call, self, operand(other, self))
        except MlvmError as error:
            annotate_error(error, op, (self, other))
            raise

    return operator


def _noticing_parts(operator: Binary) -> Binary:
    """Decorate an operator in place: warn like `_in_place`."""

    def in_place(self: Tensor, other: Operand) -> Tensor:
        if self.is_part and (holders := getrefcount(self) - LOCAL_OPERATOR) >= 0:
            warn_of_part(_getframe(1), self, holders - 2 * (other is self))
        return operator(self, other)

    return in_place


def _of_one(op: str) -> Callable[[Tensor], Tensor]:
    call = one_op(op)

    def operator(self: Tensor) -> Tensor:
        try:
            return apply(call, self)
        except MlvmError as error:
            annotate_error(error, op, (self,))
            raise

    return operator


def _comparison(op: str) -> Binary:
    """Return the operator `==` or `!=`.

    For an operand that is neither a number nor an array, Python compares identities."""
    call = one_op(op)

    def operator(self: Tensor, other: Operand) -> Tensor:
        is_number = isinstance(other, (Tensor, bool, int, float, complex, np.generic))
        if not is_number and not is_array(other):
            return NotImplemented  # type: ignore[no-any-return]
        try:
            return apply(call, self, operand(other, self))
        except MlvmError as error:
            annotate_error(error, op, (self, other))
            raise

    return operator


def _power(self: Tensor, other: Operand, modulus: object = None) -> Tensor:
    """Return x ** other.

    x ** 2 is `square(x)`: a multiplication is much cheaper than a power."""
    try:
        if modulus is not None:
            raise ArgumentError("a tensor has no power with a modulus; write x ** y % modulus")
        if other.__class__ is int and other == 2:
            return primitives.square(self)
        is_number = other.__class__ is float or other.__class__ is int  # part of a template's key
        return primitives.pow(self, other if is_number else operand(other, self))
    except MlvmError as error:
        annotate_error(error, "pow", (self, other))
        raise


@_noticing_parts
def _power_in_place(self: Tensor, other: Operand) -> Tensor:
    try:
        if other.__class__ is int and other == 2:
            return apply_into(self, _SQUARE, self)
        return apply_into(self, _POW, self, operand(other, self))
    except MlvmError as error:
        annotate_error(error, "pow", (self, other))
        raise


vars(_power)["__signature__"] = signature(_power_in_place)  # without a modulus, which it rejects

_OF_TWO: Final = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
"""Binary operators; each also exists reflected, `__radd__`, and in place, `__iadd__`."""

OPERATORS: Final[dict[str, Callable[..., Tensor]]] = {
    **{f"__{name}__": _of_two(op) for name, op in _OF_TWO.items()},
    **{f"__r{name}__": _reflected(op) for name, op in _OF_TWO.items()},
    **{f"__i{name}__": _in_place(op) for name, op in _OF_TWO.items()},
    **{
        f"__{name}__": _without_zero(_OF_TWO[name], _of_two(_OF_TWO[name]))
        for name in ("floordiv", "mod")
    },
    **{
        f"__i{name}__": _noticing_parts(_without_zero(_OF_TWO[name], _in_place(_OF_TWO[name])))
        for name in ("floordiv", "mod")
    },
    "__matmul__": _of_function("matmul"),
    "__rmatmul__": _of_function("matmul", reflected=True),
    "__rtruediv__": _over,
    "__rpow__": _of_function("pow", reflected=True),
    "__pow__": _power,
    "__ipow__": _power_in_place,
    "__lt__": _of_two("less"),
    "__le__": _of_two("less_equal"),
    "__gt__": _of_two("greater"),
    "__ge__": _of_two("greater_equal"),
    "__eq__": _comparison("equal"),
    "__ne__": _comparison("not_equal"),
    "__neg__": _of_one("negative"),
    "__abs__": _of_one("abs"),
    "__invert__": _of_one("bitwise_invert"),
}
"""Operators by Python's names.

They become methods of `Methods`; `methods.pyi` contains their types."""

for _name, _operator in OPERATORS.items():
    setattr(Methods, _name, _operator)
