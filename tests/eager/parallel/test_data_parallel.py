"""`ml.parallel`: data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GroupError, ShapeError, StaleTensor
from mlvm.core.types import Array
from mlvm.eager import Tensor, nn
from mlvm.eager.parallel import shards
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel import membership
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from tests.brief import Patch, cases, refuses
from tests.eager.parallel.test_collectives import run

pytest.importorskip("threadpoolctl")
pytestmark = pytest.mark.local(reason="a group's members have VMs of their own process")


# --- data parallelism ----------------------------------------------------------------

Model = Callable[[], nn.Module]

MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    "mlp": (lambda: Mlp((4, 4, 1), 3, key=ml.random.key(1)), (4, 4, 1)),
    "mixer": (lambda: MlpMixer((8, 8, 1), 3, 4, 16, 2, 8, 32, key=ml.random.key(1)), (8, 8, 1)),
}


def batches(shape: tuple[int, ...], rows: int = 12) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((rows, *shape), np.float32), rng.integers(3, size=rows))
        for _ in range(4)
    ]


@ml.value_and_grad
def loss_and_grads(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))


def adam(model: nn.Module) -> ml.optim.Optimizer:
    return ml.optim.AdamW(model, ml.optim.cosine(1e-2, 10, warmup_steps=2))


def sgd(model: nn.Module) -> ml.optim.Optimizer:
    return ml.optim.SGD(model, 0.1, momentum=0.9)


class Trained:
    """Results of `train`: the losses, and each replica's parameters and state at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.replicas: list[dict[str, Array]] = []


def train(name: str, optimizer_of: Callable[[nn.Module], ml.optim.Optimizer], vms: int) -> Trained:
    model_of, shape = MODELS[name]
    states: list[dict[str, Tensor]] = []

    def make_step(vm: VM) -> Callable[[Array, Array], float]:
        weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
        with weights.allocating():
            model = model_of()
            optimizer = optimizer_of(model)
        states.append({**model.named_parameters(), **optimizer.state()})

        def step(images: Array, labels: Array) -> float:
            with batch:
                loss, grads = loss_and_grads(model, ml.asarray(images), ml.asarray(labels))
                ml.parallel.all_reduce((loss, grads), "mean")
                optimizer.update(grads)
                return float(loss)

        return step

    trained = Trained()
    with ml.parallel.Group(vms) as group:
        step = ml.parallel.data_parallel(make_step, group)
        trained.losses = [step(images, labels) for images, labels in batches(shape)]
        trained.replicas = [{path: x.numpy() for path, x in each.items()} for each in states]
    return trained


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer_of", [sgd, adam])
def test_several_vms_train_as_one_does(
    name: str, optimizer_of: Callable[[nn.Module], ml.optim.Optimizer]
) -> None:
    one = train(name, optimizer_of, 1)
    assert one.losses[-1] != one.losses[0]
    for vms in (2, 3):
        several = train(name, optimizer_of, vms)
        np.testing.assert_allclose(several.losses, one.losses, rtol=1e-5)
        for path, x in one.replicas[0].items() if optimizer_of is sgd else ():
            # Adam makes steps of full length of gradients that are rounding errors.
            y = several.replicas[0][path]
            np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-6, err_msg=path)


def test_replicas_stay_equal_bit_for_bit_and_so_do_runs() -> None:
    first, second = train("mixer", adam, 3), train("mixer", adam, 3)
    assert first.losses == second.losses
    for one, other in pairwise([*first.replicas, *second.replicas]):
        assert one.keys() == other.keys()
        for path, x in one.items():
            assert x.tobytes() == other[path].tobytes(), path


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
        refuses(ShapeError, "a batch for 2 members is of arrays with one number", step, *batch)


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


def test_replicas_that_differ_can_be_made_equal() -> None:
    def step(rank: int) -> list[float]:
        model = nn.Linear(2, 2, key=ml.random.key(rank))
        ml.parallel.broadcast(model)
        values: list[float] = model.kernel.tolist()
        return values

    first, second = run(2, step)
    assert first == second


def test_a_member_that_skips_a_collective_is_named() -> None:
    def step(rank: int) -> None:
        if rank == 0:
            ml.parallel.all_reduce(ml.ones((2,)))

    refuses(GroupError, r"member 1 \(vm1\) has ended", run, 2, step)


# --- where members meet --------------------------------------------------------------


def make_mlp(vm: VM) -> Callable[..., tuple[float, list[float]]]:
    """At the top of a module, for members in other processes."""
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = Mlp((4, 4, 1), 3, key=ml.random.key(1))
        optimizer = adam(model)

    @ml.capture
    def improve(images: Tensor, labels: Tensor) -> Tensor:
        loss, grads = averaged(model, images, labels)
        optimizer.update(ml.optim.clip_by_global_norm(grads, 0.5))
        return loss

    def step(images: Array, labels: Array) -> tuple[float, list[float]]:
        with batch:
            loss = float(improve(ml.asarray(images), ml.asarray(labels)))
            state = [float(ml.sum(x)) for x in model.state().values()]
            return loss, state

    return step


@ml.parallel.value_and_grad
def averaged(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))


def test_threads_and_processes_train_with_the_same_bits() -> None:
    histories: dict[Any, list[list[Any]]] = {}
    for text in ("threads:2", "processes:2"):
        with ml.parallel.group(text) as group:
            for shard in (None, "all"):
                step = ml.parallel.data_parallel(make_mlp, group, shard=shard)
                histories.setdefault(shard, []).append([step(*each) for each in batches((4, 4, 1))])
    for threads, processes in histories.values():
        assert threads == processes
    assert histories[None][0][0] == histories["all"][0][0]  # where nothing is clipped yet
    losses = [loss for loss, _ in histories[None][0]]
    np.testing.assert_allclose([loss for loss, _ in histories["all"][0]], losses, rtol=1e-5)


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
        refuses(StaleTensor, "", step, x)


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

    calls: list[str] = run(2, sharding)[0]
    return calls


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
            values: list[float] = summed(ml.ones((1,))).tolist()
            return values

    vms = [VM(name) for name in "abc"]
    for size in (1, 2, 3, 2):
        with ml.parallel.Group(vms[:size]) as group:
            assert group.run(total) == [[2.0 * size]] * size
    assert total(0, vms[0]) == [2.0]
    assert summed.signatures == 1 + 2 + 3
