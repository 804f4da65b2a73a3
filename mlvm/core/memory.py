"""Memory of a VM's tensors: allocates, copies and compares their arrays.

`HOST` is the memory of this process, with numpy's arrays. The memory of a device derives from it;
its arrays are of another class, for which numpy's functions call those of the device.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from typing_extensions import TypeIs

from mlvm.core.types import Array, TensorType, aligned_array, aligned_copy, aligned_zeros, root


class Memory:
    """The memory of this process. That of a `device` overrides each method."""

    device: str = "cpu"

    def zeros(self, nbytes: int) -> Array:
        """A u8 array of zeros, aligned to 64 bytes. Raises `MemoryError`."""
        return aligned_zeros(nbytes)

    def new(self, type: TensorType) -> Array:
        """Allocate an array of zeros. Raises `MemoryError`."""
        return aligned_array(type)

    def copy(self, array: Array) -> Array:
        """A packed copy of an array of any layout, from here or from the host."""
        return aligned_copy(array)

    def constant(self, array: Array) -> Array:
        """A program's constant, which lies on the host, as it is here."""
        return array

    def read(self, array: Array) -> Array:
        """A copy for the host."""
        return array.copy()

    def write(self, array: Array, values: Array) -> None:
        """Copy values of the host into an array of the same type."""
        np.copyto(array, values)

    def forget(self, memory: Array) -> None:
        """The storage with that memory has ended."""

    def root(self, array: Array) -> int:
        """The number of the memory that the array lies in, unique while that lives."""
        return id(root(array))

    def is_array(self, value: object) -> TypeIs[Array]:
        """Return whether the value is an array of this memory or of the host."""
        return isinstance(value, np.ndarray)

    def writable(self, array: Array) -> bool:
        """Return whether the array may be written to; a constant may not."""
        return array.flags.writeable


HOST: Final = Memory()


def address(x: Any) -> int:
    """The first byte of an array, in the memory that it lies in."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.address
