"""Protocol of VMs, the only interface to machines for the layers above.

Every call behaves like an RPC: values are copied in and out, handles are opaque integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from mlvm.core.machine.callee import ResultRule
from mlvm.core.machine.frame import HostFunction
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.store import Handle
from mlvm.core.types import Array, TensorType

T = TypeVar("T")

TensorHandle = Handle
StorageHandle = Handle


class Estimate(NamedTuple):
    """Estimated cost of a program: bytes of allocated tensors, and floating-point operations."""

    bytes: int
    flops: int


class VMIdentity:
    """Identity of a VM, and the objects that layers above attach to it."""

    def __init__(self) -> None:
        self._attached: dict[Callable[[Any], Any], Any] = {}

    def attached(self, kind: Callable[[VMProtocol], T]) -> T:
        """Return the `kind(vm)` of this VM, created at the first call; it is freed with the VM."""
        attachment: T | None = self._attached.get(kind)
        return self._attached.setdefault(kind, kind(self)) if attachment is None else attachment  # type: ignore[arg-type]

    def _close_attached(self, why: str) -> None:
        """Call `vm_closed(why)` of attached objects. The caller must not hold a lock of the VM."""
        for attachment in list(self._attached.values()):
            vm_closed = getattr(attachment, "vm_closed", None)
            if vm_closed is not None:
                vm_closed(why)

    @property
    def stands_for(self) -> Any:
        """Return the VM that owns these handles: itself, or the VM that a recorder records."""
        return self

    def is_same(self, other: VMProtocol) -> bool:
        """Return whether handles of the other VM are valid on this VM."""
        return other.stands_for is self.stands_for

    @property
    def memory_limit(self) -> int | None:
        """Return the limit of all storages and tensors of the VM in bytes, or None."""
        return None

    def memory_used(self: VMProtocol) -> int:
        """Return the number of bytes of all storages and tensors of the VM.

        >>> vm = ml.VM()
        >>> x = ml.zeros(256, device=vm)
        >>> vm.memory_used() >= x.nbytes
        True
        """
        return round(self.consumed_size_in_mib() * 2**20)


class VMProtocol(Protocol):
    """Protocol of every VM, local or remote. `mlvm.core.vm.VM` documents each call."""

    @property
    def name(self) -> str: ...
    @property
    def stands_for(self) -> VMProtocol: ...
    def is_same(self, other: VMProtocol) -> bool: ...
    def require_open(self) -> None: ...
    def attached(self, kind: Callable[[VMProtocol], T]) -> T: ...
    @property
    def memory_limit(self) -> int | None: ...
    @property
    def lock(self) -> AbstractContextManager[object]: ...

    def alloc_tensor(self, type: TensorType) -> TensorHandle: ...
    def dealloc_tensor(self, handle: TensorHandle) -> None: ...
    def read(self, handle: TensorHandle, out: Array | None = None) -> Array: ...
    def write(self, handle: TensorHandle, array: Array) -> None: ...
    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]: ...
    def consumed_size_in_mib(self) -> float: ...

    def alloc_storage(self, nbytes: int) -> StorageHandle: ...
    def dealloc_storage(self, handle: StorageHandle) -> None: ...
    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle: ...

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None: ...
    def synchronize(self) -> None: ...
    def estimate(self, program: Program, arg_types: Sequence[TensorType] = ()) -> Estimate: ...


@runtime_checkable
class LocalVMProtocol(VMProtocol, Protocol):
    """Protocol of a VM of this process: calls functions and uses memory of the process."""

    def register(
        self,
        name: str,
        fn: HostFunction,
        *,
        nparams: int | None = None,
        nresults: int | None = None,
        result: ResultRule | None = None,
    ) -> None: ...
    def result_types(
        self, name: str, operands: Sequence[TensorType], attributes: Attributes
    ) -> tuple[TensorType, ...] | None: ...
    @property
    def on_host(self) -> bool: ...
    def storage_over(self, memory: Array) -> StorageHandle: ...
    def make_writable(self, handles: Sequence[TensorHandle]) -> None: ...
    def quiesce(self) -> None: ...
