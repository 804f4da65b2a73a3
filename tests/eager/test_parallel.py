"""`ml.parallel`: collectives on trees of tensors, and data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    GradientError,
    GroupError,
    ShapeError,
    StaleTensor,
)
from mlvm.core.types import Array
from mlvm.eager import Tensor, nn
from mlvm.machines.local import LocalVM as VM
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer

pytest.importorskip("threadpoolctl")


def run(size: int, fn: Callable[[int], Any]) -> list[Any]:
    with ml.parallel.Group(size) as group:
        return group.run(lambda rank, vm: fn(rank))


# --- collectives ---------------------------------------------------------------------


class Pair(nn.Module):
    first: Tensor
    second: Tensor

    def __init__(self, first: Tensor) -> None:
        self.first = first
        self.second = first


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_overwrites_a_tree(size: int) -> None:
    def step(rank: int) -> list[Array]:
        x = ml.full((2, 3), float(rank))
        tree = {
            "a": [x, ml.asarray([rank, 1])],
            "none": None,
            "pair": Pair(x),
            "scalar": ml.ones(()),
        }
        ml.parallel.all_reduce(tree)
        return [y.numpy() for y in (*tree["a"], tree["scalar"])]  # type: ignore[misc]

    total = sum(range(size))
    for a, b, scalar in run(size, step):
        np.testing.assert_array_equal(a, np.full((2, 3), total, np.float32), strict=True)
        np.testing.assert_array_equal(b, np.array([total, size]), strict=True)
        np.testing.assert_array_equal(scalar, np.float32(size))


class Counted(nn.Module):
    weight: Tensor
    mean: Tensor

    def __init__(self, value: float) -> None:
        self.weight = ml.full((2,), value)
        self.mean = nn.buffer(ml.full((2,), value))


def test_buffers_are_of_the_tree_and_can_be_brought_together_alone() -> None:
    def step(rank: int) -> list[list[float]]:
        model = Counted(1.0 + rank)
        ml.parallel.all_reduce(model.named_buffers(), "mean")
        before = model.weight.tolist(), model.mean.tolist()
        ml.parallel.broadcast(model, root=1)
        return [*before, model.weight.tolist(), model.mean.tolist()]

    first, second = run(2, step)
    assert first == [[1, 1], [1.5, 1.5], [2, 2], [1.5, 1.5]]
    assert second == [[2, 2], [1.5, 1.5], [2, 2], [1.5, 1.5]]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([(), (0,), (3,), (5, 7), (129, 128), (300, 301)]), max_size=6))
def test_all_reduce_of_many(shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes for dtype in "fd"]
        for _ in range(2)
    ]

    def step(rank: int) -> list[Array]:
        tensors = list(map(ml.asarray, arrays[rank]))
        ml.parallel.all_reduce(tensors, "mean")
        return [y.numpy() for y in tensors]

    for results in run(2, step):
        for y, x0, x1 in zip(results, *arrays, strict=True):
            np.testing.assert_array_equal(y, (x0 + x1) / 2, strict=True)


def test_the_other_collectives() -> None:
    def step(rank: int) -> list[Any]:
        x = ml.asarray([rank, 10 * rank])
        gathered = ml.parallel.all_gather(x)
        scattered = ml.parallel.reduce_scatter(gathered, "max")
        chosen = ml.copy(x)
        ml.parallel.broadcast({"x": chosen}, root=1)
        ml.parallel.barrier()
        if rank == ml.parallel.rank() == 0:
            ml.parallel.send(x + 5, to=1)
            received = x
        else:
            received = ml.parallel.recv(2, source=0, dtype=ml.int64)
        scalars = ml.parallel.all_gather(ml.full((), float(rank)))
        results = [gathered, scattered, chosen, received, scalars]
        return [*(y.tolist() for y in results), ml.parallel.size()]

    assert run(2, step) == [
        [[0, 0, 1, 10], [0, 0], [1, 10], [0, 0], [0.0, 1.0], 2],
        [[0, 0, 1, 10], [1, 10], [1, 10], [5, 5], [0.0, 1.0], 2],
    ]


@pytest.mark.parametrize("in_group", [False, True])
def test_alone_they_change_nothing(in_group: bool) -> None:
    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0])
        assert (ml.parallel.rank(), ml.parallel.size()) == (0, 1)
        ml.parallel.all_reduce({"x": x}, "mean")
        ml.parallel.broadcast(x)
        assert x.tolist() == [1.0, 2.0]
        assert ml.parallel.all_gather(x) is x
        assert ml.parallel.reduce_scatter(x) is x
        assert ml.parallel.all_gather(ml.ones(())).tolist() == [1.0]
        ml.parallel.barrier()
        with pytest.raises(DTypeError, match="a mean is of floats"):
            ml.parallel.all_reduce(ml.asarray([1]), "mean")
        with pytest.raises(AttributeRefused, match="another of 1 members"):
            ml.parallel.send(x, to=0)
        with pytest.raises(AttributeRefused, match="another of 1 members"):
            ml.parallel.recv(2, source=0, dtype=ml.float32)

    if in_group:
        run(1, step)
    else:
        step(0)


def test_what_they_refuse() -> None:
    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0, 3.0])
        with pytest.raises(AttributeRefused, match="median"):
            ml.parallel.all_reduce(x, "median")  # type: ignore[arg-type]
        with pytest.raises(AttributeRefused, match="True"):
            ml.parallel.broadcast(x, root=True)
        with pytest.raises(ShapeError, match=r"reduce_scatter\(f32\[3\]\): axis 0"):
            ml.parallel.reduce_scatter(x)
        with pytest.raises(DTypeError, match="a tree has tensors as leaves, not a float"):
            ml.parallel.all_reduce([1.0])
        with pytest.raises(DTypeError, match="takes a tensor, not a float"):
            ml.parallel.all_gather(1.0)  # type: ignore[arg-type]
        with pytest.raises(AttributeRefused, match="shares its bytes"):
            ml.parallel.all_reduce(ml.reshape(x, (3, 1)))
        with ml.Arena(ml.default_arena().vm, "over"):
            over = ml.ones((2,))
        with pytest.raises(StaleTensor):
            ml.parallel.all_reduce([x, over])
        with pytest.raises(AttributeRefused, match="to must be the rank of another"):
            ml.parallel.send(x, to=rank)

    run(2, step)


def test_a_gradient_through_one_is_refused() -> None:
    def through(collective: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        y = x * x
        return ml.sum(collective(y) or y)

    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0])
        for collective in (ml.parallel.all_gather, ml.parallel.reduce_scatter):
            with pytest.raises(GradientError, match="has no gradient; call it on what"):
                ml.grad(partial(through, collective))(x)
        for in_place in (ml.parallel.all_reduce, ml.parallel.broadcast):
            with pytest.raises(GradientError, match="cannot be updated in place"):
                ml.grad(partial(through, in_place))(x)
        constant = ml.grad(lambda x: ml.sum(x * ml.parallel.all_gather(ml.stop_gradient(x))[:2]))
        assert constant(x).tolist() == [1.0, 2.0]

    run(2, step)


# --- data parallelism ----------------------------------------------------------------

Model = Callable[[], nn.Module]

MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    "mlp": (lambda: Mlp((4, 4, 1), 3, key=ml.random.key(1)), (4, 4, 1)),
    "mixer": (
        lambda: MlpMixer((8, 8, 1), 3, 4, 16, 2, 8, 32, key=ml.random.key(1)),
        (8, 8, 1),
    ),
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
    """What `train` gave: the losses, and each replica's parameters and state at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.replicas: list[dict[str, Array]] = []


def train(name: str, optimizer_of: Callable[[nn.Module], ml.optim.Optimizer], vms: int) -> Trained:
    model_of, shape = MODELS[name]
    held: list[dict[str, Tensor]] = []

    def make_step(vm: VM) -> Callable[[Array, Array], float]:
        weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
        with weights.allocating():
            model = model_of()
            optimizer = optimizer_of(model)
        held.append({**model.named_parameters(), **optimizer.state()})

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
        trained.replicas = [{path: x.numpy() for path, x in each.items()} for each in held]
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


def test_rows_are_shared_out_in_order_and_keywords_go_to_all() -> None:
    seen: dict[str, Any] = {}

    def make_step(vm: VM) -> Callable[..., str]:
        def step(x: Array, y: Array, scale: float = 1.0) -> str:
            seen[vm.name] = (x.tolist(), y.tolist(), scale)
            return vm.name

        return step

    with ml.parallel.Group([VM("a"), VM("b")]) as group:
        step = ml.parallel.data_parallel(make_step, group)
        assert step(np.arange(4), [[1], [2], [3], [4]], scale=2.0) == "a"
    assert seen == {"a": ([0, 1], [[1], [2]], 2.0), "b": ([2, 3], [[3], [4]], 2.0)}


@pytest.mark.parametrize(
    "batch",
    [
        (np.zeros(3),),
        (np.zeros(4), np.zeros(2)),
        (np.zeros(()),),
        (np.zeros((4, 2)), 1.0),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(batch: tuple[Any, ...]) -> None:
    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(lambda vm: lambda *batch: None, group)
        with pytest.raises(ShapeError, match="a batch for 2 members is of arrays with one number"):
            step(*batch)


def test_an_error_of_one_replica_reaches_the_caller() -> None:
    def make_step(vm: VM) -> Callable[[Array], None]:
        def step(labels: Array) -> None:
            logits = ml.zeros((len(labels), 3))
            ml.parallel.all_reduce(ml.softmax_cross_entropy(logits, ml.asarray(labels)))

        return step

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        with pytest.raises(ml.errors.OperandValueError, match="label 7") as caught:
            step(np.array([0, 1, 2, 7]))
        assert "raised by member 1 (vm1) of a group of 2" in caught.value.__notes__
        step(np.array([0, 1, 2, 2]))


def test_replicas_that_differ_can_be_made_equal() -> None:
    def step(rank: int) -> list[float]:
        model = nn.Linear(2, 2, key=ml.random.key(rank))
        ml.parallel.broadcast(model)
        found: list[float] = model.kernel.tolist()
        return found

    first, second = run(2, step)
    assert first == second


def test_a_member_that_skips_a_collective_is_named() -> None:
    def step(rank: int) -> None:
        if rank == 0:
            ml.parallel.all_reduce(ml.ones((2,)))

    with pytest.raises(GroupError, match=r"member 1 \(vm1\) has ended"):
        run(2, step)
