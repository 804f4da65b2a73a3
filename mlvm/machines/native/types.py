"""Tensor types as the loop in C has them."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import numpy as np

from mlvm.core.types import Array, DType, TensorType, aligned_array
from mlvm.machines.native import _native

_CODES: Final = {DType.named(name.lower()): code for name, code in _native.dtypes().items()}
DTYPES: Final = tuple(sorted(_CODES, key=_CODES.__getitem__))
"""The dtypes by their codes in `mlvm.h`."""


class Type(_native.Type):
    """A `TensorType` for the loop. There is one of each as long as a program refers to it."""

    def array_over(self, memory: object) -> Array:
        """The array in memory that the loop has allocated."""
        type: TensorType = self.tensor_type
        if not type.nbytes:
            return aligned_array(type)
        return np.frombuffer(memory, type.dtype.numpy).reshape(type.array_shape)  # type: ignore[call-overload,no-any-return]


_types: WeakValueDictionary[TensorType, Type] = WeakValueDictionary()


def native_type(type: TensorType) -> Type:
    known = _types.get(type)
    if known is None:
        known = _types[type] = Type(type, type.nbytes, type.size, _CODES[type.dtype], type.shape)
    return known
