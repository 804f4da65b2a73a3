"""Garbage that one thread waits for is collected, whatever other threads do."""

from __future__ import annotations

import threading

import mlvm.eager as ml


def test_threads_that_record_functions_with_cycles_do_not_disturb_each_other() -> None:
    x, vm = ml.ones((4,)), ml.ones((1,)).arena.vm
    errors: list[BaseException] = []

    def loss(w: ml.Tensor) -> ml.Tensor:
        def power(n: int) -> ml.Tensor:  # keeps itself alive, and w
            return x if n == 0 else ml.tanh(power(n - 1) * w)

        return ml.sum(power(4))

    def call(number: int) -> None:
        with ml.Arena(vm, f"thread {number}").allocating():
            try:
                for _ in range(8):
                    ml.capture(ml.grad(loss))(x)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
