"""Queue tensors whose elements are eager tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from typing_extensions import TypeVar

from mlvm.arena.arena import Allocation
from mlvm.eager.capture.recorder import recorder, refuse_captured
from mlvm.eager.tensor import Tensor
from mlvm.input import queue

A = TypeVar("A", bound=Allocation, default=Tensor)


class QueueTensor(queue.QueueTensor):
    __doc__ = queue.QueueTensor.__doc__

    def get(self, timeout: float | None = None, kind: type[A] = Tensor) -> tuple[A, ...]:  # type: ignore[assignment]
        on = recorder.get()
        if on is not None:  # of a captured function, whose launches will each take an element
            return on.take(self)  # type: ignore[return-value]
        return self.arena.lend(self.next_slot(timeout), kind)

    def get_nowait(self, kind: type[A] = Tensor) -> tuple[A, ...]:  # type: ignore[assignment]
        refuse_captured("an element is taken without waiting")
        return super().get_nowait(kind)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        refuse_captured("a queue is iterated over")
        return cast(Iterator[tuple[Tensor, ...]], super().__iter__())

    get.__doc__ = queue.QueueTensor.get.__doc__
    get_nowait.__doc__ = queue.QueueTensor.get_nowait.__doc__
