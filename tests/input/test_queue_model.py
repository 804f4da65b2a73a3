"""A queue tensor against a model of a deque and a few sets, with and without locks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlvm.arena.arena import Allocation, Arena
from mlvm.core.errors import QueueClosedError, QueueEmptyError, QueueFullError, StaleTensorError
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.input.queue import QueueTensor, Reservation
from mlvm.machines.wire import WireVM
from tests.brief import refuses, with_long

IMAGES, LABELS = TensorType("f32", (2, 3)), TensorType("i64", (2,))
FLAT = TensorType("f32", (6,))


def element(value: int) -> tuple[Array, Array]:
    return np.full(IMAGES.shape, value, np.float32), np.full(LABELS.shape, value)


@dataclass
class Got:
    """Result of a get, as far as it is still alive, and the value that it shows."""

    value: int
    tensors: list[Allocation]
    scoped: bool


class QueueAgainstModel(RuleBasedStateMachine):
    @initialize(
        maxsize=st.integers(1, 4), elsewhere=st.booleans(),
        options=st.fixed_dictionaries({"single_threaded": st.booleans(), "shared": st.booleans()}),
    )  # fmt: skip
    def make(self, maxsize: int, elsewhere: bool, options: Any) -> None:
        self.vm: Any = WireVM(VM()) if elsewhere else VM()
        self.step = Arena(self.vm, "step")
        self.queue = QueueTensor(self.vm, [IMAGES, LABELS], maxsize, **options)
        self.waiting: deque[int] = deque()
        self.reserved: list[tuple[int, Reservation]] = []
        self.got: list[Got] = []
        self.closed = False
        self.values = 0
        self.put_count = self.got_count = 0

    def next_value(self) -> int:
        self.values += 1
        return self.values

    @property
    def free(self) -> int:
        in_use = len(self.waiting) + len(self.reserved) + len(self.got)
        return self.queue.maxsize - in_use

    @rule()
    def put(self) -> None:
        value = self.next_value()
        if self.closed:
            refuses(QueueClosedError, "", self.queue.put_nowait, element(value))
        elif not self.free:
            refuses(QueueFullError, "", self.queue.put_nowait, element(value))
        else:
            self.queue.put_nowait(element(value))
            self.waiting.append(value)
            self.put_count += 1

    @rule()
    def reserve(self) -> None:
        if self.closed or not self.free:
            refuses(QueueClosedError if self.closed else QueueFullError, "", self.queue.reserve, 0)
            return
        reservation = self.queue.reserve(0)
        value = self.next_value()
        for slot, array in zip(reservation.arrays, element(value), strict=True):
            slot[...] = array
        self.reserved.append((value, reservation))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), how=st.sampled_from(["commit", "cancel", "drop"]))
    def end_reservation(self, data: st.DataObject, how: str) -> None:
        value, reservation = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if how == "commit" and self.closed:
            refuses(QueueClosedError, "", reservation.commit)
        elif how == "commit":
            reservation.commit()
            self.waiting.append(value)
            self.put_count += 1
        elif how == "cancel":
            reservation.cancel()
            reservation.cancel()

    @rule(scoped=st.booleans())
    def get(self, scoped: bool) -> None:
        if not self.waiting:
            refuses(QueueClosedError if self.closed else QueueEmptyError, "", self.queue.get_nowait)
            return
        if scoped:
            with self.step.allocating():
                tensors = self.queue.get_nowait()
        else:
            tensors = self.queue.get_nowait()
        self.got.append(Got(self.waiting.popleft(), list(tensors), scoped))
        self.got_count += 1

    @precondition(lambda self: self.got)
    @rule(data=st.data(), how=st.sampled_from(["drop", "drop one", "view", "free"]))
    def use(self, data: st.DataObject, how: str) -> None:
        i = data.draw(st.integers(0, len(self.got) - 1))
        got = self.got[i]
        if how == "view":
            for k, tensor in enumerate(got.tensors):
                if tensor.type is IMAGES:
                    got.tensors[k] = self.queue.arena.view(tensor, FLAT)
        elif how == "drop one":
            got.tensors.pop()
        elif how == "free":
            ended = got.tensors[:]
            while got.tensors:
                self.queue.arena.free(got.tensors.pop().root)
            assert [x.handle for x in ended] == [0] * len(ended)
        else:
            got.tensors.clear()
        if not got.tensors:
            self.got.pop(i)

    @rule()
    def reset(self) -> None:
        ended = [x for got in self.got if got.scoped for x in got.tensors]
        self.got = [got for got in self.got if not got.scoped]
        self.step.reset()
        for tensor in ended:
            assert tensor.handle == 0
            assert isinstance(tensor.stale(), StaleTensorError)

    @rule()
    def close(self) -> None:
        if self.values % 5 == 4:  # not too often: little happens afterwards
            self.queue.close()
            self.closed = True

    @invariant()
    def the_counts_agree(self) -> None:
        queue = self.queue
        assert queue.qsize() == len(self.waiting)
        assert queue.empty() == (not self.waiting)
        assert queue.full() == (not self.free)
        assert queue.closed == self.closed
        assert queue.stats()[:2] == (self.put_count, self.got_count)
        assert len(queue.arena.live()) >= len(self.got)

    @invariant()
    def every_tensor_shows_its_value(self) -> None:
        for got in self.got:
            for tensor in got.tensors:
                assert (self.vm.read(tensor.handle) == got.value).all()


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(
    max_examples=with_long(25, 60), stateful_step_count=40, deadline=None
)
