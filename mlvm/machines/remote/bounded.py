"""VM of a server's client: a `LocalVM` with limits."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from mlvm.core.errors import LimitExceededError, OutOfMemoryError
from mlvm.core.machine.callee import OpFresh, Value, is_tensor
from mlvm.core.machine.decode import decode
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.store import Entry, FreeStore, Handle, Storage
from mlvm.core.types import Array, TensorType, root
from mlvm.machines.bad_bytes import Careful
from mlvm.machines.local import LocalVM
from mlvm.machines.native import extension
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.watchdog import Watchdog

_PER_ARRAY: Final = 224  # bytes per array, in addition to the elements
_PER_HANDLE: Final = 440  # bytes per tensor or storage, including the entry in the store
_PER_VALUE: Final = 56  # bytes per stack value
_PER_FRAME: Final = 128
_LOOK: Final = 0.05  # seconds between checks for a disconnected client


class BoundedVM(LocalVM):
    """VM with `limits`.

    A call that exceeds a limit raises `OutOfMemoryError` or `LimitExceededError`, and the VM
    remains usable.

    limits: limits of the client
    launches: number of launches, including failed launches
    client.is_gone: per thread, whether the client has disconnected, which ends launches
    """

    def __init__(
        self, name: str | None, limits: Limits, watchdog: Watchdog, **options: Any
    ) -> None:
        self.limits = limits
        self.launches = 0
        self.client = _Client()
        self._watchdog = watchdog
        self._careful: Careful | None = None
        super().__init__(name, checked=True, **options)
        self.fast_path = None  # the fast path of eager calls ignores the limits
        most = limits.launch_bytes // _PER_VALUE
        self.functions.max_results = min(self.functions.max_results, most)
        self._live = _LiveBytes(limits.launch_bytes, native=self.native)
        assert isinstance(self._store, _BoundedStore)
        self._store.live = self._live
        for name in list(self.functions):
            callee = self.functions.binding(name).callee
            if isinstance(callee, OpFresh):
                self.functions.register(name, _BoundedFresh(callee, self._live))
        self._unbounded = self._run
        self._run = self._bounded

    def allow_several_clients(self) -> None:
        """Share the VM among several clients, each in a separate thread."""
        self._lock = Turns(self._lock, self.client)  # type: ignore[assignment]

    def _new_store(self) -> FreeStore:
        return _BoundedStore(self.limits, self._watchdog)

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        """Launch as `LocalVM.launch` does.

        Also raises `LimitExceededError` if the launch needs too much time or too many instructions,
        and `OutOfMemoryError` if the results are too large.
        """
        self.launches += 1
        most = self.limits.launch_steps
        if max_steps is None or (isinstance(max_steps, int) and max_steps > most):
            max_steps = most
        if self._careful is None:
            return super().launch(program, args, max_steps=max_steps)
        with self._lock:
            if not self._needs_care(program, args):
                return super().launch(program, args, max_steps=max_steps)
            scheduler, self._scheduler = self._scheduler, self._careful
            self._linked.pop(id(program), None)
            try:
                return super().launch(program, args, max_steps=max_steps)
            finally:
                self._scheduler = scheduler
                self._linked.pop(id(program), None)  # it was linked for this scheduler

    # --- tensors without a valid value ---

    def spoil(self, handle: TensorHandle, error: Exception) -> None:
        """Make reads of the tensor raise this error until the tensor is written again.

        The error prevented the tensor from being written. Raises `HandleError`.
        """
        with self._lock:
            array = self._store.entry(handle).array
            if self._careful is None:
                self._careful = Careful()
            self._careful.spoil(array, error)
            self._store.clear_caches()  # cached launches are not checked

    def _needs_care(self, program: Program, args: Sequence[TensorHandle]) -> bool:
        """Return whether the launch may read a spoiled tensor."""
        if self._careful is None or not self._careful.is_needed():
            self._careful = None
            return False
        if self._careful.meets([self._store.entry(handle).array for handle in args]):
            return True
        codes = decode(program).values()
        return any(x.kind == "load_global" for code in codes for x in code.instructions())

    def array_of(self, handle: TensorHandle) -> Array:
        array = super().array_of(handle)
        if self._careful is not None:
            self._careful.wait([array])
        return array

    def write(self, handle: TensorHandle, array: Array) -> None:
        super().write(handle, array)
        self._heal([handle])

    def make_writable(self, handles: Sequence[TensorHandle]) -> None:
        super().make_writable(handles)
        self._heal(handles)

    def _heal(self, handles: Sequence[TensorHandle]) -> None:
        if self._careful is not None:
            with self._lock:
                for handle in handles:
                    self._careful.overwrite(self._store.entry(handle).array)

    # --- limits ---

    def _bind(self, program: Program, args: tuple[TensorHandle, ...]) -> Any:
        """Bind as `VM` does, under the watchdog, because verification may take a long time."""
        if self.depth > 1:
            return super()._bind(program, args)
        with self._watchdog.watch(self.limits.launch_seconds, self.client.is_gone):
            return super()._bind(program, args)

    def _bounded(self, *args: Any) -> list[Value]:
        """Run the machine's loop under the watchdog, unless it is nested in a watched launch."""
        if self.depth > 1:
            return self._unbounded(*args)
        with self._watchdog.watch(self.limits.launch_seconds, self.client.is_gone):
            try:
                self._live.begin()
                return self._unbounded(*args)
            finally:
                self._live.end()

    def keep(self, nbytes: int) -> None:
        self._live.keep(nbytes)

    def _outputs(self, stack: list[Value]) -> list[Array]:
        nbytes = sum(x.nbytes + _PER_ARRAY for x in filter(is_tensor, stack))
        if nbytes > self.limits.launch_bytes:
            most = self.limits.launch_bytes
            raise OutOfMemoryError(
                f"the launch returns {nbytes:,} bytes; the limit is {most:,} "
                "(--launch-bytes of the server); return fewer tensors"
            )
        return super()._outputs(stack)


class Turns:
    """Lock of a shared VM: waiting ends with `LimitExceededError` if the client disconnects."""

    def __init__(self, lock: Any, client: _Client) -> None:
        self.acquire, self.release, self._is_owned = lock.acquire, lock.release, lock._is_owned
        self._client = client

    def __enter__(self) -> None:
        if not self.acquire(blocking=False):
            while not self.acquire(timeout=_LOOK):
                if self._client.is_gone():
                    raise LimitExceededError(
                        "the client of this call has disconnected; connect again"
                    )

    def __exit__(self, *_: object) -> None:
        self.release()


class _Client(threading.local):
    """Per thread: whether the client has disconnected."""

    def __init__(self) -> None:
        self.is_gone: Callable[[], bool | str] = lambda: False


class _BoundedStore(FreeStore):
    """Store with limits on bytes and handles; the watchdog does not interrupt it."""

    def __init__(self, limits: Limits, watchdog: Watchdog) -> None:
        super().__init__()
        self.live: _LiveBytes | None = None
        self._limits = limits
        self._watchdog = watchdog

    def hold_stack(self, values: int, frames: int) -> None:
        if self.live is not None:
            self.live.check(_PER_VALUE * values + _PER_FRAME * frames)

    def new_storage(self, nbytes: int) -> Storage:
        self._check(nbytes)
        return super().new_storage(nbytes)

    def replace(self, handle: Handle, array: Array) -> None:
        with self._watchdog.masked:
            self._check(0 if id(root(array)) in self._by_root else array.nbytes)
            super().replace(handle, array)

    def _check(self, nbytes: int) -> None:
        names = _PER_HANDLE * (len(self._entries) + len(self._storages))
        if self.consumed + names + nbytes > self._limits.held_bytes:
            total = self.consumed + names
            usage = f"the VM uses {total:,}, and the limit is {self._limits.held_bytes:,}"
            own = "" if self.limit is None else f", though memory= is {self.limit:,}"
            raise OutOfMemoryError(
                f"{nbytes:,} more bytes: {usage} (--held-bytes of the server){own}"
            )

    def _require_room(self, nbytes: int) -> None:
        if self.limit is not None and self.consumed + nbytes > self.limit:
            raise OutOfMemoryError(
                f"{nbytes:,} more bytes: the VM uses {self.consumed:,}, and the limit is "
                f"{self.limit:,} (memory= of ml.connect; --held-bytes of the server is "
                f"{self._limits.held_bytes:,}); free tensors, or connect with more"
            )

    def _name(self, entry: Entry) -> Handle:
        self._check_handles()
        return super()._name(entry)

    def _name_storage(self, storage: Storage) -> Handle:
        self._check_handles()
        return super()._name_storage(storage)

    def _check_handles(self) -> None:
        if len(self._entries) + len(self._storages) >= self._limits.handles:
            count = f"{self._limits.handles:,} tensors and storages"
            raise LimitExceededError(f"the VM has reached the limit of {count}; free some of them")
        self._check(_PER_HANDLE)


class _LiveBytes:
    """Counter of the bytes that a launch has allocated and that are alive.

    The loop in C counts separately.
    """

    def __init__(self, most: int, *, native: bool) -> None:
        self.most = most
        self._bytes = 0
        self._alive: dict[int, weakref.ref[Array]] = {}
        self._numbers = itertools.count()
        self._limit_native: Callable[[int | None], int] = lambda most: 0
        if native and extension.EXTENSION is not None:
            self._limit_native = extension.EXTENSION.limit_made

    def begin(self) -> None:
        self._bytes = 0
        self._alive.clear()
        self._limit_native(self.most)

    def end(self) -> None:
        self._limit_native(-1)

    def check(self, nbytes: int) -> None:
        """Raise `OutOfMemoryError` if `nbytes` more exceed the limit."""
        total = self._bytes + self._limit_native(None)
        if total + nbytes > self.most:
            usage = f"the launch uses {total:,}, and the limit is {self.most:,}"
            raise OutOfMemoryError(f"{nbytes:,} more bytes: {usage}")

    def keep(self, nbytes: int) -> None:
        """Count bytes that a host function retains, or releases if negative."""
        if nbytes > 0:
            self.check(nbytes)
        self._bytes = max(self._bytes + nbytes, 0)

    def add(self, array: Array) -> None:
        """Count a new array until it is freed."""
        memory, key = root(array), next(self._numbers)
        nbytes = memory.nbytes + _PER_ARRAY
        alive = self._alive

        def died(_: weakref.ref[Array]) -> None:
            if alive.pop(key, None) is not None:
                self._bytes -= nbytes

        alive[key] = weakref.ref(memory, died)
        self._bytes += nbytes


class _BoundedFresh(OpFresh):
    """Op that allocates a result within the launch's limit."""

    def __init__(self, callee: OpFresh, live: _LiveBytes) -> None:
        super().__init__(callee.op, callee.fill)
        self._live = live

    def call(self, params: Sequence[Any], attributes: Attributes) -> Sequence[Value]:
        type = self.op.infer([TensorType.of(x) for x in params], attributes)
        if type is None:  # at most an index of 8 bytes for each axis of each element
            nbytes = sum(max(x.nbytes, 8 * x.ndim * x.size) for x in params)
        else:
            nbytes = type.nbytes
        self._live.check(nbytes + _PER_ARRAY)
        results = super().call(params, attributes)
        for array in filter(is_tensor, results):
            self._live.add(array)
        return results
