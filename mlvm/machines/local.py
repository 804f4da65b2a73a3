"""A VM of this process, put together from what its options ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from mlvm.core.errors import MachineError
from mlvm.core.machine.callee import NO_KERNELS, Kernels
from mlvm.core.vm import VM
from mlvm.machines.c_functions import load_library
from mlvm.machines.workers import Workers


class LocalVM(VM):
    """One machine, serving one processor. The eager language calls it `ml.VM`.

    With `workers`, so many threads run ops beside the program. The program waits only where it
    needs a value. `checked=False` is the raw machine: programs are not verified, arrays written
    are not compared with the tensor's type, and a mistake does whatever numpy makes of it.
    `kernels`, by op name, take the place of the reference ones. Raises `UnknownFunction` for a
    kernel of no op.
    """

    trace: ClassVar[Callable[..., AbstractContextManager[None]]]
    """`vm.trace(path)`; see `mlvm.show.trace`, which adds it."""

    def __init__(
        self,
        name: str | None = None,
        *,
        checked: bool = True,
        workers: int = 0,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        if not isinstance(workers, int) or workers < 0:
            raise MachineError(f"a VM has workers >= 0, not {workers!r}")
        super().__init__(name, checked=checked, kernels=kernels)
        if workers:
            self._scheduler = Workers(workers, self.name)

    def register_library(self, path: str | os.PathLike[str]) -> list[str]:
        """Register the C functions that a shared library lists, and return their names.

        `mlvm.h` says how a library lists them. If it raises `LibraryError`, none is registered.
        """
        functions = load_library(path)
        self.register_callees({function.name: function for function in functions})
        return [function.name for function in functions]
