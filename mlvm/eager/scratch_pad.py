"""`ml.ScratchPad`: a scratch pad whose tensors have operators."""

from __future__ import annotations

from typing_extensions import TypeVar

from mlvm.arena import scratch_pad
from mlvm.arena.arena import Allocation
from mlvm.core.types import TensorType
from mlvm.eager.tensor import Tensor

A = TypeVar("A", bound=Allocation, default=Tensor)


class ScratchPad(scratch_pad.ScratchPad):
    __doc__ = scratch_pad.ScratchPad.__doc__

    def tensor(self, type: TensorType | str, offset: int, kind: type[A] = Tensor) -> A:  # type: ignore[assignment]
        return super().tensor(type, offset, kind)

    tensor.__doc__ = scratch_pad.ScratchPad.tensor.__doc__
