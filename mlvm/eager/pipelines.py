"""Input pipelines whose batches are eager tensors."""

from __future__ import annotations

from mlvm.core.protocol import VMProtocol
from mlvm.eager.context import current_arena
from mlvm.eager.tensor import Tensor
from mlvm.input import pipeline


class Pipeline(pipeline.Pipeline[Tensor]):
    __doc__ = pipeline.Pipeline.__doc__
    _kind = Tensor

    def _default_vm(self) -> VMProtocol:
        return current_arena().vm
