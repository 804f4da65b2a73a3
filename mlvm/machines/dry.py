"""VM with types but without memory, to measure a model before allocating it.

It verifies programs and counts bytes like a real VM. Therefore you can build a model that is too
large for this computer, and query the parameters and the memory of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlvm.core.errors import HandleError
from mlvm.core.machine.verify import verify
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle
from mlvm.core.store import FreeStore, Storage
from mlvm.core.types import Array, TensorType, check_array
from mlvm.machines.local import LocalVM


class DryVM(LocalVM):
    """VM without memory: launches are verified but not run, and reading raises `HandleError`.

    >>> with ml.Arena(ml.DryVM("dry"), "weights").allocating(): x = ml.ones((100_000, 1_000))
    >>> x.nbytes
    400000000

    Invalid calls:
        ml.DryVM().read(5)  # HandleError
    """

    has_bytes = False

    def _new_store(self) -> FreeStore:
        return _DryStore()

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        """Verify the program for the arguments' types.

        Raises `HandleError` for a program with outputs, because their values are unknown.

        Invalid calls:
            dry.launch(returning, [dry.alloc_tensor(v.type)])  # HandleError
        """
        with self._lock:
            handles = tuple(args)
            self._bind(program, handles)
            types = [self.type_of(handle) for handle in handles]
            if verify(program, self.functions, types).outputs:
                raise HandleError(
                    f"{self.name} is a dry VM, which computes no values to return; use ml.VM()"
                )
            return []

    def launch_cache(self) -> None:
        """Return None: a dry VM runs no launches."""

    def read(self, handle: TensorHandle, out: Array | None = None) -> Array:
        """Raise `HandleError`: a dry VM has no values to read.

        Invalid calls:
            dry.borrow(99)  # HandleError
            dry.read(dry.alloc_tensor(v.type))  # HandleError
        """
        raise HandleError(
            f"{self.name} is a dry VM: {self.type_of(handle)} has no values to read; use ml.VM()"
        )

    borrow = read

    def storage_over(self, memory: Array) -> StorageHandle:
        """Raise `HandleError`: a dry VM has no memory.

        Invalid calls:
            dry.storage_over(bytes_of_vm)  # HandleError
        """
        raise HandleError(f"{self.name} is a dry VM, which cannot store values; use ml.VM()")

    def write(self, handle: TensorHandle, array: Array) -> None:
        """Check the array against the tensor's type, and drop it."""
        type = self.type_of(handle)
        check_array(array, type, f"write to {type}")


class _DryStorage(Storage):
    def view(self, type: TensorType, offset: int) -> Array:
        return np.broadcast_to(np.zeros((), type.dtype.numpy), type.array_shape)


class _DryStore(FreeStore):
    def new_storage(self, nbytes: int) -> Storage:
        return _DryStorage(nbytes, np.zeros(0, np.uint8))
