"""Memory of a VM's tensors: allocation, copies and comparison of arrays.

`HOST` is the memory of this process, with numpy arrays. The memory of a device is a subclass with a
different array class; for this class, numpy's functions call the functions of the device.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from typing_extensions import TypeIs

from mlvm.core.types import Array, TensorType, aligned_array, aligned_copy, aligned_zeros, root


class Memory:
    """Memory of this process. The memory of a `device` overrides each method."""

    device: str = "cpu"

    def zeros(self, nbytes: int) -> Array:
        """Allocate a u8 array of zeros, aligned to 64 bytes. Raises `MemoryError`."""
        return aligned_zeros(nbytes)

    def new(self, type: TensorType) -> Array:
        """Allocate an array of zeros. Raises `MemoryError`."""
        return aligned_array(type)

    def copy(self, array: Array) -> Array:
        """Return a packed copy of an array of any layout, in this memory or on the host."""
        return aligned_copy(array)

    def constant(self, array: Array) -> Array:
        """Return a program's constant, which is stored on the host, as an array of this memory."""
        return array

    def read(self, array: Array) -> Array:
        """Return a copy of the array on the host."""
        return array.copy()

    def write(self, array: Array, values: Array) -> None:
        """Copy host values into an array of the same type."""
        np.copyto(array, values)

    def forget(self, memory: Array) -> None:
        """Handle the end of the storage with that memory."""

    def root(self, array: Array) -> int:
        """Return the number of the memory that contains the array, unique while it exists."""
        return id(root(array))

    def is_array(self, value: object) -> TypeIs[Array]:
        """Return whether the value is an array of this memory or the host."""
        return isinstance(value, np.ndarray)

    def writable(self, array: Array) -> bool:
        """Return whether the array may be written to; a constant may not."""
        return array.flags.writeable


HOST: Final = Memory()


def address(x: Any) -> int:
    """Return the address of the first byte of an array in this memory."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.address
