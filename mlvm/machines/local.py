"""VM of this process, configured by options."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import unwrap
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from mlvm.core.errors import ArgumentError, MachineError, brief, did_you_mean
from mlvm.core.locks import new_lock
from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import NO_KERNELS, Kernels
from mlvm.core.machine.run import Run
from mlvm.core.sizes import parse_size
from mlvm.core.vm import VM
from mlvm.machines import checks, lane_runs, residuals
from mlvm.machines.closing import Closing
from mlvm.machines.native import extension
from mlvm.machines.wire import NATIVE
from mlvm.renamed import OldAttribute

if TYPE_CHECKING:
    from mlvm.core.machine.functions import Instrument
    from mlvm.machines.native._native import FastPath, Pool
    from mlvm.machines.native.launch_cache import LaunchCache


_DEVICE: Final = re.compile(r"(opencl|cuda)(:\d+)*|gpu")


class LocalVM(Closing, VM):
    """Virtual machine that runs programs on one device. The eager language calls it `ml.VM`.

    `name`: name for messages (default: a new name).
    `workers`: number of threads that run ops asynchronously; the program waits only where it needs
        a value.
    `checked`: False skips checks. Programs are not verified, arrays are not compared with the
        tensor's type when they are written, and the effect of a mistake is undefined.
    `native`: True for the kernels and the loop in C, False for the reference kernels and loop in
        Python and numpy. None, the default, is True if mlvm was installed with C (see
        `mlvm.machines.native.extension`).
    `threads`: number of threads that share the work of a native kernel; it does not affect the bits
        of results.
    `pinned`: bind each thread to a processor.
    `kernels`: kernels by op name that replace all others.
    `memory`: limit of all storages of the VM together, as a size such as "1 GiB" or a number of
        bytes. It includes weights, arenas, and the scratch memory of captured functions.
    `device`: device such as "opencl:0"; it supports only the options `checked`, `kernels` and
        `memory`. See `mlvm.machines.gpu`.

    Raises `MissingExtraError` for a native machine that was not built. Raises `MachineError` for
    invalid numbers of workers and threads, several threads without a native machine, an unknown
    device, and a device instead of the name. Raises `UnknownFunctionError` if `kernels` names an
    unknown op, and `ArgumentError` for an invalid `memory`. An allocation beyond it raises
    `OutOfMemoryError`.

        >>> vm = ml.VM("mine")
        >>> ml.ones(2, device=vm).device.name
        'mine'

    Invalid calls:
        ml.VM(threads=2, native=False)  # MachineError
        ml.VM(kernels={"nothing": None})  # UnknownFunctionError
        ml.VM(memory="all")  # ArgumentError
        ml.zeros(1 << 20, device=ml.VM(memory="1 MiB"))  # OutOfMemoryError
    """

    has_bytes: ClassVar[bool] = True
    """Whether the tensors of this VM have memory, and therefore addresses."""

    fast_path: FastPath | None
    """The fast path of eager calls to a native VM: see `native.loop.open_fast_path`."""

    profile: ClassVar[Callable[..., AbstractContextManager[None]]]
    """`vm.profile(path)`; see `mlvm.show.vm_trace`, which adds it."""

    trace = OldAttribute("VM", "trace")

    _pool: Pool | None

    on_device: ClassVar[type[LocalVM]]
    """The VM of a device; see `mlvm.machines.gpu`, which adds it."""

    def __new__(cls, *args: Any, device: str = "cpu", **options: Any) -> LocalVM:
        allowed = {"name", *(unwrap(LocalVM.__init__).__kwdefaults__ or ())}
        if cls is LocalVM and (unknown := options.keys() - allowed):
            names = ", ".join(f"{name}={did_you_mean(name, allowed)}" for name in sorted(unknown))
            raise ArgumentError(
                f"VM(): unknown option {names}; expected one of {', '.join(sorted(allowed))}"
            )
        if cls is LocalVM and not (isinstance(device, str) and device == "cpu"):
            return super().__new__(cls.on_device)
        return super().__new__(cls)

    def __init__(
        self,
        name: str | None = None,
        *,
        device: str = "cpu",
        checked: bool = True,
        workers: int = 0,
        threads: int = 1,
        pinned: bool = False,
        native: bool | None = None,
        kernels: Kernels = NO_KERNELS,
        memory: int | str | None = None,
    ) -> None:
        if not isinstance(name, str | None):
            raise MachineError(
                f"VM: expected a name, got {brief(name)}; options are named: VM(threads=2)"
            )
        if name is not None and _DEVICE.fullmatch(name):
            kind = "cuda" if name.startswith("cuda") else "opencl"
            device = name if ":" in name else f"{kind}:0"
            raise MachineError(
                f'expected a name of a VM, got the device {name!r}: write VM(device="{device}")'
            )
        if device != "cpu":
            raise MachineError(
                f"{self.__class__.__name__}(): expected device='cpu', got {device!r}"
            )
        if not isinstance(workers, int) or workers < 0:
            raise MachineError(f"VM(): expected workers >= 0, got {workers!r}")
        if not isinstance(threads, int) or not 1 <= threads <= extension.MOST_THREADS:
            raise MachineError(
                f"VM(): expected 1 to {extension.MOST_THREADS} threads, got {threads!r}"
            )
        if native not in (None, True, False) or isinstance(threads, bool):
            raise MachineError(
                f"VM(): expected native True, False or None and a number of threads, "
                f"got {native!r} and {threads!r}"
            )
        limit = None if memory is None else parse_size(memory, "VM(memory=)")
        native = extension.is_native(native)
        run: Run = reference.run
        if native:
            from mlvm.machines.native.kernels import native_kernels
            from mlvm.machines.native.loop import NativeLoop, open_fast_path

            pool = extension.pool(threads, pinned)
            kernels = {**native_kernels(pool), **kernels}
            run = NativeLoop(pool)
        elif threads > 1:
            raise MachineError(
                f"VM(): threads={threads} needs native kernels, which are not available "
                f"({extension.why_not()}); for BLAS set OPENBLAS_NUM_THREADS"
            )
        super().__init__(name, checked=checked, kernels=kernels, run=run)
        self._store.limit = limit
        self._equip(native=native, threads=threads)
        if native and not workers:
            self._pool = pool
            if self.has_bytes:
                self.fast_path = open_fast_path(self, pool)
        if workers:
            from mlvm.machines.workers import Workers

            self._scheduler = Workers(workers, self.name)

    @property
    def memory_limit(self) -> int | None:
        """Limit of all storages of the VM together in bytes, or None."""
        return self._store.limit

    def _new_lock(self) -> threading.RLock:
        module = extension.EXTENSION
        return super()._new_lock() if module is None else new_lock(module.Lock)

    def limit_memory(self, nbytes: int) -> None:
        """Limit all storages of the VM together, as `memory=` does. Raises `ArgumentError`."""
        self._store.limit = parse_size(nbytes, "limit_memory")

    def _equip(self, *, native: bool, threads: int) -> None:
        """Set the attributes and register the host functions of every VM in this process."""
        self.native = native
        self.threads = threads
        self.fast_path = None
        self._pool = None
        residuals.register(self, native=native)
        lane_runs.register(self)
        checks.register(self)
        is_native = np.asarray(self.native, np.int64)
        self.register(NATIVE, lambda frame: frame.push(is_native), nparams=0, nresults=1)

    def __repr__(self) -> str:
        return f"<{self.__class__.__name__} {self.name!r}>"

    def launch_cache(self) -> LaunchCache | None:
        """Create the launch table of a client, for a native VM without workers."""
        if self._pool is None:
            return None
        from mlvm.machines.native.launch_cache import LaunchCache

        return LaunchCache(self, self._pool)

    def _forget_links(self) -> None:
        super()._forget_links()
        if self.fast_path is not None:
            self.fast_path.forget()

    def _watch(self, instrument: Instrument | None) -> None:
        super()._watch(instrument)
        if self.fast_path is not None:
            self.fast_path.instrumented = instrument is not None

    def register_library(self, path: str | os.PathLike[str]) -> list[str]:
        """Register the C functions that a shared library lists, and return their names.

        `mlvm.h` describes how a library lists them. If `LibraryError` is raised, no function is
        registered.

        Invalid calls:
            vm.register_library("none.so")  # LibraryError
        """
        from mlvm.machines.c_functions import load_library

        functions = load_library(path)
        self.register_callees({function.name: function for function in functions})
        return [function.name for function in functions]
