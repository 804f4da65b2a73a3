"""Garbage that one thread waits for is collected, whatever other threads do."""

from __future__ import annotations

import mlvm.eager as ml
from tests.threads import in_threads


def test_threads_that_record_functions_with_cycles_do_not_disturb_each_other() -> None:
    x, vm = ml.ones((4,)), ml.ones((1,)).arena.vm

    def loss(w: ml.Tensor) -> ml.Tensor:
        def power(n: int) -> ml.Tensor:  # keeps itself alive, and w
            return x if n == 0 else ml.tanh(power(n - 1) * w)

        return ml.sum(power(4))

    def call(number: int) -> None:
        with ml.Arena(vm, f"thread {number}").allocating():
            for _ in range(8):
                ml.capture(ml.grad(loss))(x)

    in_threads(call, range(6))
