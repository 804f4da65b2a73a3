"""Queue tensors, input pipelines and scratch pads of eager tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from typing_extensions import TypeVar

from mlvm.arena import scratch_pad
from mlvm.arena.arena import Allocation
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType
from mlvm.eager.functions.random import prepare
from mlvm.eager.recording.recorder import current_recorder, refuse_captured
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted, require_arguments
from mlvm.input import pipeline, queue
from mlvm.show import html

A = TypeVar("A", bound=Allocation, default=Tensor)


class QueueTensor(queue.QueueTensor):
    __doc__ = queue.QueueTensor.__doc__

    def get(self, timeout: float | None = None, kind: type[A] = Tensor) -> tuple[A, ...]:  # type: ignore[assignment]
        active = current_recorder()
        if active is not None:  # each launch of the captured function will take an element
            return active.take(self)  # type: ignore[return-value]
        return self.arena.lend(self.next_slot(timeout), kind)

    def get_nowait(self, kind: type[A] = Tensor) -> tuple[A, ...]:  # type: ignore[assignment]
        refuse_captured("take an element without waiting")
        return super().get_nowait(kind)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        refuse_captured("iterate over a queue")
        return cast(Iterator[tuple[Tensor, ...]], super().__iter__())

    def _repr_html_(self) -> str:
        rows = [
            ("types", " ".join(map(str, self.types))),
            ("slots", f"{self.maxsize}"),
            ("free", f"{self.arena.free_slots()}"),
            ("waiting", f"{self.qsize()}"),
            *[(name, f"{value:g}") for name, value in self.stats()._asdict().items()],
        ]
        return html.table(("QueueTensor", self.name), rows, right=0)

    get.__doc__ = queue.QueueTensor.get.__doc__
    get_nowait.__doc__ = queue.QueueTensor.get_nowait.__doc__


class Pipeline(pipeline.Pipeline[Tensor]):
    __doc__ = pipeline.Pipeline.__doc__
    _kind = Tensor

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        require_arguments(cls, args, keywords)
        return super().__new__(cls)

    def _default_vm(self) -> VMProtocol:
        return current_arena().vm

    def _default_seed(self) -> int:
        return prepare(self._vm).seed

    if not TYPE_CHECKING:  # otherwise a type checker would treat it as an iterator

        def __next__(self) -> NoReturn:
            raise TypeError(
                "a Pipeline is not an iterator: pipeline.get() returns the next batch, "
                "pipeline.peek() returns it without removing it, and `for batch in pipeline` "
                "iterates over an epoch"
            )

    def _repr_html_(self) -> str:
        stats = [(name, f"{value:g}") for name, value in self.stats()._asdict().items()]
        return html.table(("Pipeline", self.name), [*self._facts().items(), *stats], right=0)


class ScratchPad(scratch_pad.ScratchPad):
    __doc__ = scratch_pad.ScratchPad.__doc__

    def tensor(self, type: TensorType | str, offset: int, kind: type[A] = Tensor) -> A:  # type: ignore[assignment]
        return super().tensor(type, offset, kind)

    tensor.__doc__ = scratch_pad.ScratchPad.tensor.__doc__


for _class in (QueueTensor, ScratchPad):
    _class.__init__ = hinted(_class.__init__)  # type: ignore[method-assign]
