"""Tensors of Python numbers and small tables, which each VM stores only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from mlvm.arena.arena import Arena, scope
from mlvm.core.errors import DTypeError, OperandValueError, brief
from mlvm.core.memo import Memo, bits_of
from mlvm.core.ops import half
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, DType, TensorType, c64, promote
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.default import KINDS, default_of
from mlvm.eager.tensor.number import Number, plain
from mlvm.eager.tensor.templates import pause
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.machines.native.extension import EXTENSION

Scalar: TypeAlias = bool | int | float | complex

_KIND_ORDER: Final = {"bool": 0, "unsigned": 1, "signed": 2, "float": 3, "complex": 4}
_LOWEST: Final = {bool: "bool", int: "unsigned", float: "float", complex: "complex"}
"""Lowest kind of dtype that a class of Python's numbers may have."""


def is_same_kind(source: DType, target: DType) -> bool:
    """Return whether values of `source` may be assigned to elements of `target`.

    The rule is numpy's casting="same_kind": values may lose range or precision, but the kind does
    not change.
    """
    if source.is_storage or target.is_storage:
        return source is target
    return _KIND_ORDER[source.kind] <= _KIND_ORDER[target.kind]


class Constants:
    """Python scalars used with tensors of a VM, each written once, at the second use.

    used_once: the keys of scalars that were used once.
    """

    def __init__(self, vm: VMProtocol) -> None:
        self.arena = Arena(vm, "constants")
        self.tensors: Memo[Any, Tensor] = Memo(4096, "eager.tensor.constants")
        self.used_once: Memo[Any, None] = Memo(4096, "eager.tensor.constants used once")
        self.tables: Memo[Any, Tensor] = Memo(256, "eager.tensor.constants tables")


def prepare_constants(vm: VMProtocol) -> Constants:
    """Return the VM's constants."""
    return vm.attached(Constants)


def is_constant(x: Tensor) -> bool:
    """Return whether x is the tensor of a Python scalar or a table, which no call changes."""
    return x.arena is prepare_constants(x.arena.vm).arena


def constant(value: Scalar | Number, dtype: DType) -> Tensor:
    """Return a Python scalar as a 0-d tensor of that dtype on the current VM.

    Raises `DTypeError` for a dtype of a lower kind, such as an integer dtype for a float, and
    `OperandValueError` for an integer out of range.
    """
    pool = prepare_constants((scope() or current_arena()).vm)
    if type(value) is Number:
        return _constant_of_call(value, dtype, pool)
    key = dtype, value.__class__, bits_of(value) if isinstance(value, (float, complex)) else value
    tensor = pool.tensors.entries.get(key)
    if tensor is not None:
        return tensor
    if EXTENSION is not None:
        number: Tensor | None = EXTENSION.number(pool.arena, TensorType(dtype), value)
        if (
            number is not None and key not in pool.used_once.entries
        ):  # at the first use, do not cache the tensor
            pool.used_once[key] = None
            return number
        tensor = number
    if tensor is None:
        tensor = _written(scalar_array(value, dtype), pool)
    pool.tensors[key] = tensor
    return tensor


def table(make: Callable[..., Array], *key: Any) -> Tensor:
    """Return the tensor of the array `make(*key)`, such as positions that depend only on sizes.

    A small tensor is written once per VM; no caller may change it.
    """
    pool = prepare_constants((scope() or current_arena()).vm)
    tensor = pool.tables.entries.get((make, key))
    if tensor is not None:
        return tensor
    array = make(*key)
    if array.nbytes > (1 << 14):  # maximum size of a table that is kept
        return from_array(array)
    tensor = pool.tables[make, key] = _written(array, pool)
    return tensor


def _written(array: Array, pool: Constants) -> Tensor:
    """Write a constant; the write is not recorded as a step of a template."""
    before = pause(True)
    try:
        with pool.arena.hosting():
            return from_array(array)
    finally:
        pause(before)


def scalar_array(value: Scalar | Number, dtype: DType) -> Array:
    """Return the value of `constant`, with the same errors."""
    kind = next(each for each in KINDS if isinstance(value, each))
    if _KIND_ORDER.get(dtype.kind, -1) < _KIND_ORDER[_LOWEST[kind]]:
        raise DTypeError(
            f"expected a number for {dtype.name}, got the {kind.__name__} {brief(value)}; "
            "convert the tensor"
        )
    try:
        return half.number_array(value, dtype)
    except OverflowError:
        raise OperandValueError(
            f"the int {brief(value)} does not fit into {dtype.name}; convert the tensor to a "
            "wider dtype"
        ) from None


def _constant_of_call(value: Number, dtype: DType, pool: Constants) -> Tensor:
    """Return a 0-d tensor with the number's value in each call of the traced function."""
    numbers = value.recorded
    if numbers is None or numbers.vm is not pool.arena.vm:
        return constant(plain(value), dtype)
    key = value.place, dtype
    if key not in numbers.tensors:
        numbers.tensors[key] = _written(scalar_array(numbers.values[value.place], dtype), pool)
    return numbers.tensors[key]  # type: ignore[no-any-return]


def scalar_kind(kind: type) -> type | None:
    """Return Python's number class of a class, such as int for an IntEnum; None for others."""
    return kind if kind in KINDS else next((x for x in KINDS if issubclass(kind, x)), None)


def dtype_beside(kind: type, dtype: DType) -> DType:
    """Return the dtype of a Python scalar of that class combined with a tensor of that dtype.

    It is the dtype of the tensor, unless the scalar has a higher kind: 1j with f64 is c128, and 1.5
    with i64 has the default float dtype."""
    kind = scalar_kind(kind) or kind
    if dtype.is_integer if kind is int else kind is float and dtype.is_inexact:
        return dtype
    return promote(c64 if kind is complex and dtype.is_inexact else default_of(kind), dtype)
