"""`ml.QueueTensor`: elements as eager tensors."""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml
from tests.threads import PATIENCE, start


def put(q: ml.QueueTensor, value: float) -> None:
    with q.reserve() as (x, y):
        x[...] = value
        y[...] = [0, 1]


@pytest.fixture
def q() -> ml.QueueTensor:
    return ml.QueueTensor(ml.default_vm(), ["f32[2,3]", "i64[2]"], 2)


def test_gradients_flow_through_what_was_got(q: ml.QueueTensor) -> None:
    put(q, 2.0)
    x, labels = q.get()
    w = ml.ones((3, 4))
    loss, gradient = ml.value_and_grad(lambda w: ml.sum(ml.softmax_cross_entropy(x @ w, labels)))(w)
    assert np.isfinite(float(loss))
    assert gradient.shape == (3, 4)
    put(q, 3.0)
    (x,) = q.get_nowait()[:1]
    np.testing.assert_array_equal(ml.grad(lambda x: ml.sum(x * x))(x).numpy(), np.full((2, 3), 6))


def test_a_loop_over_a_queue_in_an_arena(q: ml.QueueTensor) -> None:
    def produce() -> None:
        for i in range(10):
            put(q, i)
        q.close()

    producer = start(produce)
    batch = ml.Arena(ml.default_vm(), "batch")
    sums = []
    for x, _ in q:
        with batch:
            sums.append(float(ml.sum(x)))
    producer.result(PATIENCE)
    assert sums == [6.0 * i for i in range(10)]


def test_a_tensor_used_after_its_step_names_what_ended_it(q: ml.QueueTensor) -> None:
    batch = ml.Arena(ml.default_vm(), "batch")
    put(q, 1.0)
    with batch:
        x, y = q.get()
        flat = ml.reshape(x, (6,))
    for stale in (x, flat):
        with pytest.raises(
            ml.errors.StaleTensorError, match="of arena 'queue' was freed: the arena was"
        ):
            stale + 1.0
    assert y.handle == 0


def test_a_view_keeps_the_slot(q: ml.QueueTensor) -> None:
    put(q, 1.0)
    put(q, 2.0)
    flat = ml.reshape(q.get()[0], (6,))
    assert q.full()
    assert float(ml.sum(flat)) == 6.0
    del flat
    assert not q.full()
