"""Scratch pad: memory in which the caller chooses the offset of each tensor."""

from __future__ import annotations

from typing import Any, Self

from mlvm.arena.arena import A, Allocation, Arena
from mlvm.arena.placement import Chosen, Placement, Region
from mlvm.core.errors import ArenaError
from mlvm.core.protocol import VMProtocol
from mlvm.core.sizes import parse_size
from mlvm.core.types import TensorType


class ScratchPad(Arena):
    """Raw bytes of a VM, and typed tensors at any offset in them.

    vm: VM that provides the memory.
    nbytes: size, such as "64 KiB" or a number of bytes.
    name: name for messages.
    raw: leave checks of offsets to the VM.

        with ScratchPad(vm, 4096) as pad:
            words = pad.tensor("u32[16]", 0)
            floats = pad.tensor("f32[16]", 0)  # the same bytes

    Tensors may overlap, and several programs may share a pad. A write through one tensor changes
    every tensor over the same bytes. The tape does not detect it, so a gradient may be computed
    from a saved operand that has changed. A new tensor contains the current bytes, and freeing a
    tensor does not change them. A launch must not write a result over an operand that it still
    reads; this is an error, except on a VM with `checked=False`.

    A pad is an arena without a placement: results are not allocated in it, and leaving `with pad:`
    closes it. `used` counts bytes once for each live tensor over them. A tensor must be inside the
    pad, at a multiple of the element size. With `raw` only the VM checks that.

    Raises `ArenaError` for a negative size, `OutOfMemoryError` if the VM has less memory.

        >>> with ml.ScratchPad(ml.VM("mine"), 4096) as pad:
        ...     words, floats = pad.tensor("u32[2]", 0), pad.tensor("f32[2]", 0)
        ...     floats += ml.ones(2, device=pad.vm)
        ...     print(words.tolist())
        [1065353216, 1065353216]

    Invalid calls:
        ml.ScratchPad(vm, -1)  # ArenaError
        ml.ScratchPad(vm, 2**60)  # OutOfMemoryError
    """

    _placement: Chosen

    def __init__(
        self, vm: VMProtocol, nbytes: int | str, *, name: str = "scratch", raw: bool = False
    ) -> None:
        self.nbytes = parse_size(nbytes, f"scratch pad {name!r}", least=0, error=ArenaError)
        super().__init__(vm, name, capacity=self.nbytes)
        self.raw = raw

    def tensor(
        self,
        type: TensorType | str,
        offset: int,
        kind: type[A] = Allocation,  # type: ignore[assignment]
    ) -> A:
        """Create a tensor over the bytes from `offset` on.

        type: type of the tensor, or a text such as "f32[16]".
        offset: offset in bytes, a multiple of the element size.
        kind: class of the tensor.

        Raises `ArenaError` if it exceeds the pad or is not aligned, and after close; `ShapeError`
        or `DTypeError` for text that is not a type.

        Invalid calls:
            pad.tensor("f32[99]", 0)  # ArenaError
            pad.tensor("f99[2]", 0)  # DTypeError
            pad.tensor("f32[-2]", 0)  # ShapeError
        """
        if isinstance(type, str):
            type = TensorType.parse(type)
        if not self.raw:
            self._check(type, offset)
        with self._lock:
            if self.closed:
                raise ArenaError(f"scratch pad {self.name!r} is closed; create a new one")
            region = self._placement.at(offset, type.nbytes)
        tensor = self.alloc(type, kind, region)
        tensor.prepare()
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_placement(self) -> Placement:
        return Chosen()

    def _find(self, type: TensorType) -> Region:
        raise ArenaError(
            f"scratch pad {self.name!r} cannot choose an offset: call "
            f"tensor({str(type)!r}, offset), or allocate in an arena"
        ) from None

    def _check(self, type: TensorType, offset: Any) -> None:
        if not isinstance(type, TensorType):
            raise ArenaError(f"scratch pad {self.name!r}: expected a TensorType, got {type!r}")
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise ArenaError(f"scratch pad {self.name!r}: expected an int offset, got {offset!r}")
        if offset < 0 or offset + type.nbytes > self.nbytes:
            raise ArenaError(
                f"scratch pad {self.name!r}: {type} at offset {offset} ends at byte "
                f"{offset + type.nbytes}, but the pad has {self.nbytes} bytes; "
                "use a smaller offset, or a larger pad"
            )
        if offset % type.dtype.itemsize:
            raise ArenaError(
                f"scratch pad {self.name!r}: expected an offset of {type} that is a multiple of "
                f"its element size, {type.dtype.itemsize}, got {offset}"
            )
