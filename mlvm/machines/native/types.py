"""Tensor types for the loop in C."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import numpy as np

from mlvm.core.types import Array, DType, TensorType, aligned_array
from mlvm.machines.native import _native

_CODES: Final = {DType.named(name.lower()): code for name, code in _native.dtypes().items()}
DTYPES: Final = tuple(sorted(_CODES, key=_CODES.__getitem__))
"""Dtypes by code in `mlvm.h`."""


class Type(_native.Type):
    """`TensorType` for the loop; unique while a program refers to it."""

    def array_over(self, memory: object) -> Array:
        """Create an array over memory that the loop has allocated."""
        type: TensorType = self.tensor_type
        if not type.nbytes:
            return aligned_array(type)
        return np.frombuffer(memory, type.dtype.numpy).reshape(type.array_shape)  # type: ignore[call-overload,no-any-return]


_types: WeakValueDictionary[TensorType, Type] = WeakValueDictionary()


def native_type(type: TensorType) -> Type:
    native = _types.get(type)
    if native is None:
        native = _types[type] = Type(type, type.nbytes, type.size, _CODES[type.dtype], type.shape)
    return native
