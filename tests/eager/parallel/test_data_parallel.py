"""`ml.parallel`: data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ShapeError, StaleTensorError
from mlvm.core.types import Array
from mlvm.eager import Tensor, nn
from mlvm.eager.parallel import shards
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel import membership
from tests.brief import Patch, cases, refuses
from tests.eager.parallel.test_collectives import run

pytest.importorskip("threadpoolctl")
pytestmark = pytest.mark.local(reason="a group's members have VMs of their own process")


@pytest.mark.local(reason="a group is given VMs of this process")
def test_rows_are_shared_out_in_order_and_keywords_go_to_all() -> None:
    shares: dict[str, Any] = {}

    def make_step(vm: VM) -> Callable[..., str]:
        def step(x: Array, y: Array, scale: float = 1.0) -> str:
            shares[vm.name] = (x.tolist(), y.tolist(), scale)
            return vm.name

        return step

    with ml.parallel.Group([VM("a"), VM("b")]) as group:
        step = ml.parallel.data_parallel(make_step, group)
        assert step(np.arange(4), [[1], [2], [3], [4]], scale=2.0) == "a"
    assert shares == {"a": ([0, 1], [[1], [2]], 2.0), "b": ([2, 3], [[3], [4]], 2.0)}


@cases(
    "batch", (np.zeros(3),), (np.zeros(4), np.zeros(2)), (np.zeros(()),), (np.zeros((4, 2)), 1.0)
)
def test_a_batch_that_does_not_divide_is_refused(batch: tuple[Any, ...]) -> None:
    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(lambda vm: lambda *batch: None, group)
        refuses(ShapeError, "expected arrays with equal numbers of rows", step, *batch)


def test_an_error_of_one_replica_reaches_the_caller() -> None:
    def make_step(vm: VM) -> Callable[[Array], None]:
        def step(labels: Array) -> None:
            logits = ml.zeros((len(labels), 3))
            ml.parallel.all_reduce(ml.softmax_cross_entropy(logits, ml.asarray(labels)))

        return step

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        caught = refuses(ml.errors.OperandValueError, "label 7", step, np.array([0, 1, 2, 7]))
        assert "raised by member 1 (vm1) of a group of 2" in caught.__notes__
        step(np.array([0, 1, 2, 2]))


# --- where members meet --------------------------------------------------------------


@pytest.mark.local(reason="rows are lent as views of the VM's memory")
def test_the_rows_of_a_tensor_are_views_of_its_memory() -> None:
    rows: list[Array] = []

    def make_step(vm: VM) -> Callable[..., None]:
        def step(x: Array) -> None:
            rows.append(x)

        return step

    here = VM("here")
    arena = ml.Arena(here, "batch")
    with arena.allocating():
        x = ml.asarray(np.arange(6.0))
    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        step(x)
        memory = here.borrow(x.handle)
        assert sorted(map(tuple, rows)) == [(0, 1, 2), (3, 4, 5)]
        for each in rows:
            assert np.shares_memory(each, memory)
            assert not each.flags.writeable
        arena.reset()
        refuses(StaleTensorError, "", step, x)


def calls_of_a_captured_step(*names: str, shard: ml.parallel.Shard | None = None) -> list[str]:
    """Return the calls of these functions by the step of a member, in order."""

    def step(rank: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(4, 4, key=ml.random.key(i)) for i in range(3)])
        optimizer = ml.optim.SGD(model, 0.1)

        @ml.capture
        def improve(x: Tensor) -> Tensor:
            loss, grads = ml.parallel.value_and_grad(lambda m, x: ml.sum(ml.square(m(x))))(model, x)
            optimizer.update(grads)
            return loss

        improve(ml.ones((2, 4)))
        text = ml.disassemble(improve.program)
        return [name for line in text.splitlines() for name in names if f'"{name}' in line]

    def sharding(rank: int) -> list[str]:
        with membership.sharding(shard):
            return step(rank)

    return run(2, sharding)[0]


def test_a_captured_step_starts_a_bucket_before_the_way_back_is_over(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shards, "BUCKET_NBYTES", 1)
    calls = calls_of_a_captured_step("all_reduce.start", "all_reduce.wait", "matmul")
    starts = [i for i, name in enumerate(calls) if name == "all_reduce.start"]
    products = [i for i, name in enumerate(calls) if name == "matmul"]
    waits = [i for i, name in enumerate(calls) if name == "all_reduce.wait"]
    assert len(starts) == len(waits) == 7  # the loss, and of each layer two tensors
    assert products[3] < starts[2] < starts[4] < products[-1] < starts[6] < waits[0]


def test_a_captured_step_scatters_a_bucket_beside_the_way_back(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shards, "BUCKET_NBYTES", 1)
    names = ("reduce_scatter.start", "reduce_scatter.wait", "matmul")
    calls = calls_of_a_captured_step(*names, shard="optimizer")
    starts, waits, products = (
        [i for i, each in enumerate(calls) if each == name] for name in names
    )
    assert len(starts) == len(waits) == 6  # of each layer two tensors
    overlaps = [any(a < i < b for i in products) for a, b in zip(starts, waits, strict=True)]
    assert any(overlaps)
    assert all(a < b for a, b in zip(starts[1:], waits, strict=False))  # one more is under way


def test_a_captured_step_is_of_its_place() -> None:
    """Recorded alone, it does not average; later members must not run that program."""

    @ml.capture
    def summed(x: Tensor) -> Tensor:
        y = x + 1.0
        ml.parallel.all_reduce(y)
        return y

    def total(rank: int, vm: VM) -> list[float]:
        with ml.Arena(vm, "x").allocating():
            return summed(ml.ones((1,))).tolist()

    vms = [VM(name) for name in "abc"]
    for size in (1, 2, 3, 2):
        with ml.parallel.Group(vms[:size]) as group:
            assert group.run(total) == [[2.0 * size]] * size
    assert total(0, vms[0]) == [2.0]
    assert summed.signatures == 1 + 2 + 3
