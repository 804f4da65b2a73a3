"""`data_parallel(..., shard=...)`, and gradients that are averaged in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, GradientError, ShapeError
from mlvm.core.types import Array
from mlvm.eager import Tensor, nn
from mlvm.eager.parallel import shards
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.membership import Shard, sharding
from tests.brief import Patch, cases, refuses
from tests.trees import bits

pytest.importorskip("threadpoolctl")
pytestmark = pytest.mark.local(reason="a group's members have VMs of their own process")

Optimizers = dict[str, Callable[[nn.Module], ml.optim.Optimizer]]

NO_DECAY = [(lambda path, x: x.ndim < 2, {"weight_decay": 0.0})]
OPTIMIZERS: Optimizers = {
    "sgd": lambda model: ml.optim.SGD(model, 0.1),
    "momentum": lambda model: ml.optim.SGD(
        model, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "rmsprop": lambda model: ml.optim.RMSProp(model, 1e-3, centered=True, momentum=0.5),
    "adamw": lambda model: ml.optim.AdamW(
        model, ml.optim.cosine(1e-2, 10, warmup_steps=2), weight_decay=0.1, groups=NO_DECAY
    ),
    "lion": lambda model: ml.optim.Lion(
        model, 1e-3, weight_decay=0.1, groups=[("*bias", {"betas": (0.8, 0.9)})]
    ),
}


class Net(nn.Module):
    """Sizes that no number of members divides, a list, a buffer, maybe a tensor under two paths."""

    def __init__(self, *, tied: bool = False) -> None:
        self.first = nn.Linear(5, 7, key=ml.random.key(1))
        self.scales = [ml.full((7,), 1.5), ml.ones((1,))]
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 7, key=ml.random.key(2))
        self.last = self.middle.kernel if tied else ml.full((7, 7), 0.1)
        self.counter = nn.buffer(ml.zeros(()))
        self.head = nn.Linear(7, 3, key=ml.random.key(3))

    def num_parameters(self) -> int:  # a model's own methods stay
        return -1

    def __call__(self, x: Tensor) -> Tensor:
        scale, factor = self.scales
        x = ml.tanh(self.first(x) * scale)
        x = x + self.middle(self.norm(x)) @ self.last
        return self.head(x * factor)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(x), y))


def batches(rows: int = 12, steps: int = 3) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((rows, 5), np.float32), rng.integers(3, size=rows))
        for _ in range(steps)
    ]


class Trained:
    """Losses, the state of model and optimizer at the end, and each member's bytes of it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.state: dict[str, Array] = {}
        self.states: list[dict[str, Array]] = []
        self.nbytes: list[int] = []


def train(
    members: int,
    optimizer_of: Callable[[nn.Module], ml.optim.Optimizer],
    *,
    shard: Shard | None = None,
    captured: bool = False,
    clip: float | None = None,
    plainly: bool = False,
    model_of: Callable[[], nn.Module] = Net,
    start: dict[str, Array] | None = None,
    steps: int = 3,
) -> Trained:
    trained = Trained()

    def make_step(vm: VM) -> Callable[..., Any]:
        weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
        with weights.allocating():
            model = model_of()
            optimizer = optimizer_of(model)
        value_and_grad: Any = ml.value_and_grad if plainly else ml.parallel.value_and_grad
        if start is not None:
            for part, prefix in ((model, "model/"), (optimizer, "optimizer/")):
                part.load_state(
                    {k.removeprefix(prefix): x for k, x in start.items() if k.startswith(prefix)}
                )

        def improve(x: Tensor, y: Tensor) -> Tensor:
            loss, grads = value_and_grad(loss_of)(model, x, y)
            if plainly:
                ml.parallel.all_reduce((loss, grads), "mean")
            if clip is not None:
                grads = ml.optim.clip_by_global_norm(grads, clip)
            optimizer.update(grads)
            return loss

        step_of = ml.capture(improve) if captured else improve

        def step(x: Array, y: Array, last: bool = False) -> Any:
            with batch:
                if not last:
                    return float(step_of(ml.asarray(x), ml.asarray(y)))
                trained.nbytes.append(weights.used)
                assert model.num_parameters() == (-1 if isinstance(model, Net) else 8994)
                state = {f"model/{k}": t.numpy() for k, t in model.state().items()}
                state |= {f"optimizer/{k}": t.numpy() for k, t in optimizer.state().items()}
                trained.states.append(state)
                return state

        return step

    with ml.parallel.Group(members) as group:
        step = ml.parallel.data_parallel(make_step, group, shard=shard)
        trained.losses = [step(x, y) for x, y in batches(steps=steps)]
        trained.state = step(*batches()[0], last=True)
    return trained


def require_same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert one.state.keys() == other.state.keys()
    for path, x in one.state.items():
        np.testing.assert_array_equal(other.state[path], x, strict=True, err_msg=path)


# --- whole replicas ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_several_vms_train_as_one_does(name: str) -> None:
    one = train(1, OPTIMIZERS[name], plainly=True)
    assert one.losses[-1] != one.losses[0]
    for vms in (2, 3):
        several = train(vms, OPTIMIZERS[name], plainly=True)
        np.testing.assert_allclose(several.losses, one.losses, rtol=1e-5)
        for path, x in one.state.items() if name == "momentum" else ():
            # Adam makes steps of full length of gradients that are rounding errors.
            np.testing.assert_allclose(several.state[path], x, rtol=1e-4, atol=1e-6, err_msg=path)


def test_replicas_stay_equal_bit_for_bit_and_so_do_runs() -> None:
    first, second = (train(3, OPTIMIZERS["adamw"], plainly=True) for _ in range(2))
    require_same(first, second)
    for state in (*first.states, *second.states):
        assert bits(state) == bits(first.state)


def make_step(vm: VM) -> Callable[..., tuple[float, list[float]]]:
    """At the top of a module, for members in other processes."""
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model)

    @ml.capture
    def improve(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = ml.parallel.value_and_grad(loss_of)(model, x, y)
        optimizer.update(ml.optim.clip_by_global_norm(grads, 0.5))
        return loss

    def step(x: Array, y: Array) -> tuple[float, list[float]]:
        with batch:
            loss = float(improve(ml.asarray(x), ml.asarray(y)))
            return loss, [float(ml.sum(x)) for x in model.state().values()]

    return step


def test_threads_and_processes_train_with_the_same_bits() -> None:
    histories: dict[Any, list[list[Any]]] = {}
    for text in ("threads:2", "processes:2"):
        with ml.parallel.group(text) as group:
            for shard in (None, "all"):
                step = ml.parallel.data_parallel(make_step, group, shard=shard)
                histories.setdefault(shard, []).append([step(*each) for each in batches()])
    for threads, processes in histories.values():
        assert threads == processes
    assert histories[None][0][0] == histories["all"][0][0]  # where nothing is clipped yet
    losses, of_parts = ([loss for loss, _ in histories[shard][0]] for shard in (None, "all"))
    np.testing.assert_allclose(of_parts, losses, rtol=1e-5)


# --- buckets -------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("nbytes", [1, 200, 1 << 20])
def test_buckets_have_the_bits_of_one_all_reduce(
    monkeypatch: Patch, nbytes: int, captured: bool
) -> None:
    monkeypatch.setattr(shards, "BUCKET_NBYTES", nbytes)
    plain = train(2, OPTIMIZERS["adamw"], plainly=True)
    require_same(plain, train(2, OPTIMIZERS["adamw"], captured=captured))


# --- state in parts ------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_train_as_the_whole_does(name: str) -> None:
    whole = train(3, OPTIMIZERS[name])
    require_same(whole, train(3, OPTIMIZERS[name], shard="optimizer", captured=name == "adamw"))
    require_same(whole, train(3, OPTIMIZERS[name], shard="all", captured=name == "momentum"))


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_clipping_is_by_the_norm_of_the_whole(shard: Shard) -> None:
    whole = train(3, OPTIMIZERS["momentum"], clip=0.1)
    for captured in (False, True):
        parts = train(3, OPTIMIZERS["momentum"], shard=shard, clip=0.1, captured=captured)
        np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-6)
        for path, x in whole.state.items():
            np.testing.assert_allclose(parts.state[path], x, rtol=1e-4, atol=1e-6, err_msg=path)
    unclipped = train(3, OPTIMIZERS["momentum"])
    assert abs(unclipped.losses[-1] - whole.losses[-1]) > 1e-3


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_a_tensor_under_two_paths(shard: Shard) -> None:
    tied = partial(Net, tied=True)
    whole = train(2, OPTIMIZERS["adamw"], model_of=tied)
    parts = train(2, OPTIMIZERS["adamw"], model_of=tied, shard=shard)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-6)
    assert parts.state.keys() == whole.state.keys()
    assert "model/last" not in parts.state


def test_members_keep_their_part_and_no_more() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 999, key=ml.random.key(0)), nn.Linear(999, 3))

    bytes_of = {}
    for shard in (None, "optimizer", "all"):
        training = train(4, OPTIMIZERS["adamw"], model_of=wide, shard=shard, steps=1)
        assert len(training.nbytes) == 4
        bytes_of[shard] = max(training.nbytes)
    parameters = 4 * (5 * 999 + 999 + 999 * 3 + 3)
    assert bytes_of[None] == pytest.approx(3 * parameters, rel=0.02)
    assert bytes_of["optimizer"] == pytest.approx((1 + 2 / 4) * parameters, rel=0.03)
    assert bytes_of["all"] == pytest.approx(3 / 4 * parameters, rel=0.05)


@pytest.mark.parametrize("written", [(None, 2), ("optimizer", 3), ("all", 4)])
def test_a_state_loads_with_other_members(written: tuple[Shard | None, int]) -> None:
    wrote, n = written
    saved = train(n, OPTIMIZERS["adamw"], shard=wrote, steps=1).state
    reads: list[tuple[Shard | None, int]] = [(None, 1), ("optimizer", 4), ("all", 3)]
    for shard, m in reads:
        loaded = train(m, OPTIMIZERS["adamw"], shard=shard, start=saved, steps=0).state
        assert loaded.keys() == saved.keys()
        for path, x in saved.items():
            np.testing.assert_array_equal(loaded[path], x, strict=True, err_msg=path)


def test_a_layer_in_parts_is_gathered_when_it_is_read_and_once_more_in_a_checkpoint() -> None:
    def step(rank: int, vm: VM) -> tuple[Any, ...]:
        with sharding("all"):
            layer = nn.Linear(3, 5, key=ml.random.key(0))
            whole = layer.kernel
            x = ml.ones((2, 3)) * (1.0 + rank)
            expected = ml.grad(lambda layer: ml.sum(ml.square(layer(x))))(layer)
            ml.parallel.all_reduce(expected, "mean")
            ml.optim.SGD(layer, 0.1)
            assert type(layer).__name__ == "Linear"
            assert isinstance(layer, nn.Linear)
            assert layer.num_parameters() == 20
            assert layer.kernel.tolist() == whole.tolist()
            assert layer.parameters()["kernel"].shape == (8,)
            gathered = []
            for fn in (lambda layer: ml.sum(ml.square(layer(x))), checkpointed(x)):
                grads = ml.grad(fn)(layer)
                assert isinstance(grads, ml.parallel.Parts)
                types = {"kernel": whole.type, "bias": expected["bias"].type}
                gathered.append(shards.gathered_by_path(grads, types))
            norms = [float(ml.optim.global_norm(each)) for each in (expected, grads)]
            arrays = [{k: x.numpy() for k, x in each.items()} for each in (expected, *gathered)]
            return norms, *arrays

    def checkpointed(x: Tensor) -> Callable[[nn.Module], Tensor]:
        return lambda layer: ml.sum(ml.square(ml.checkpoint(lambda x: layer(x))(x)))

    with ml.parallel.Group(2) as group:
        for norms, expected, *gradients in group.run(step):
            for grads in gradients:
                for name in ("kernel", "bias"):
                    np.testing.assert_allclose(grads[name], expected[name], rtol=1e-6)
            assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_gradients_of_several_batches_in_parts() -> None:
    def make(vm: VM) -> Callable[[Tensor], dict[str, Any]]:
        layer = nn.Linear(5, 3, key=ml.random.key(1))
        optimizer = ml.optim.MultiSteps(ml.optim.AdamW(layer, 0.1), 2)
        loss_and_grads = ml.parallel.value_and_grad(lambda layer, x: ml.mean(layer(x) ** 2))
        update = ml.capture(lambda x: optimizer.update(loss_and_grads(layer, x)[1]))

        def step(x: Tensor) -> dict[str, Any]:
            update(x)
            state = {path: x.numpy() for path, x in optimizer.state().items()}
            optimizer.load_state(state)
            return state | {path: x.numpy() for path, x in layer.state().items()}

        return step

    runs = []
    xs = np.random.default_rng(0).standard_normal((4, 8, 5)).astype("f")
    for shard in (None, "optimizer", "all"):
        with ml.parallel.Group(2) as group:
            step = ml.parallel.data_parallel(make, group, shard=shard)
            runs.append([step(ml.asarray(x)) for x in xs])
    for steps in runs[1:]:
        for state, expected in zip(steps, runs[0], strict=True):
            assert state.keys() == expected.keys()
            for path, x in expected.items():
                np.testing.assert_array_equal(state[path], x, err_msg=path)
    assert runs[0][0]["kernel"].tolist() == nn.Linear(5, 3, key=ml.random.key(1)).kernel.tolist()
    assert runs[0][1]["kernel"].tolist() != runs[0][0]["kernel"].tolist()


# --- what is refused -----------------------------------------------------------------


def run(fn: Callable[[], Any], members: int = 2) -> None:
    with ml.parallel.Group(members) as group:
        group.run(lambda rank, vm: fn())


def test_what_is_refused() -> None:
    with (
        ml.parallel.Group(1) as group,
        pytest.raises(
            ArgumentError, match="expected shard as None, 'optimizer' or 'all', got 'half'"
        ),
    ):
        ml.parallel.data_parallel(lambda vm: lambda: None, group, shard="half")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"expected a Group, .*, got 2"):
        ml.parallel.data_parallel(lambda vm: lambda: None, 2)  # type: ignore[arg-type]

    def step() -> None:
        x = {"x": ml.ones((3,))}
        for shard in ("optimizer", "all"):
            layer = nn.Linear(3, 5, key=ml.random.key(0))
            for make in (ml.optim.Lamb, ml.optim.Adafactor, ml.optim.Muon, ml.optim.LBFGS):
                message = f"{make.__name__} needs whole parameters, .* shard='{shard}'"
                with sharding(shard), pytest.raises(ArgumentError, match=message):
                    make(layer, 0.1)
            assert layer.kernel.shape == (3, 5)
        with sharding("all"), pytest.raises(ArgumentError, match="expected a Module"):
            ml.optim.SGD(x, 0.1)
        with sharding("optimizer"):
            optimizer = ml.optim.SGD(x, 0.1)
            _, parts = ml.parallel.value_and_grad(lambda x: ml.sum(x["x"]))(x)
        with pytest.raises(ShapeError, match=r"gradient 'x': expected f32\[2\], got f32\[3\]"):
            optimizer.update(ml.parallel.Parts(x=ml.ones((3,))))
        optimizer.update(parts)
        optimizer.update({"x": ml.ones((3,))})
        np.testing.assert_allclose(x["x"], 0.8, rtol=1e-6)
        with sharding("all"):
            layer = nn.Linear(3, 5, key=ml.random.key(0))
            ml.optim.SGD(layer, 0.1)
            refuses(ArgumentError, "EMA: cannot average sharded weights", ml.optim.EMA, layer)
        with pytest.raises(ArgumentError, match=r"Linear.kernel is sharded"):
            layer.kernel = ml.ones((3, 5))
        with pytest.raises(ShapeError, match=r"'kernel': expected f32\[3,5\], got f32\[8\]"):
            layer.load_parameters({"kernel": np.zeros(8, "f"), "bias": np.zeros(5, "f")})

    run(step)


def test_averaged_gradients_have_no_gradient() -> None:
    def inner(x: Tensor) -> Tensor:
        _, g = ml.parallel.value_and_grad(lambda y: ml.sum(y * y))(x)
        return ml.sum(g)

    def step() -> None:
        refuses(GradientError, "a group has averaged", lambda: ml.grad(inner)(ml.ones((2,))))

    run(step)
    assert ml.grad(inner)(ml.ones((2,))).tolist() == [2.0, 2.0]


# --- where the memory of a gradient is somebody else's too ---------------------------


def same_cotangent(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.sum(p["a"] + p["b"]) * w  # both get the same tensor


def passed_on(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.sum((p["a"] * w + p["b"]) * w)  # b's is on its way to a


def reshaped(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.sum((ml.reshape(ml.reshape(p["a"], (2, 2)) * w, (4,)) + p["b"]) * w)


def saved(p: dict[str, Tensor], w: float) -> Tensor:
    y = ml.exp(p["a"] * w)
    return ml.sum(ml.multiply(y, p["b"]) * w)  # a's rule needs y, after b's is there


def unused(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.sum(p["a"]) * w


def constant(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.full((), w)


def identity(p: dict[str, Tensor], w: float) -> Tensor:
    return ml.reshape(p["scalar"], ())


@cases("fn", same_cotangent, passed_on, reshaped, saved, unused, constant, identity)
def test_each_gradient_is_averaged_alone(
    monkeypatch: Patch, fn: Callable[[Any, float], Tensor]
) -> None:
    monkeypatch.setattr(shards, "BUCKET_NBYTES", 1)

    def step(rank: int, vm: VM) -> None:
        p = {"a": ml.arange(4.0), "b": ml.ones((4,)), "scalar": ml.ones((1,))}
        weight = 1.0 + rank
        loss, grads = ml.value_and_grad(fn)(p, weight)
        ml.parallel.all_reduce((loss, grads), "mean")
        averaged = ml.parallel.value_and_grad(fn)
        for each in (averaged, ml.capture(averaged)):
            value, parts = each(p, weight)
            assert value.tolist() == loss.tolist()
            for name, g in grads.items():
                assert parts[name].tolist() == g.tolist(), name
                parts[name] += 1.0  # it has memory of its own
            assert p["scalar"].tolist() == [1.0]

    with ml.parallel.Group(2) as group:
        group.run(step)


def multiply(frame: Any) -> None:
    frame.push(frame.param(0) * frame.param(1))


def test_a_saved_value_that_is_a_gradient_too_is_left_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shards, "BUCKET_NBYTES", 1)

    def loss(p: dict[str, Tensor], w: float) -> Tensor:
        h = ml.exp(p["a"] * w)
        rules = (lambda g, h, b, out: g * b, lambda g, h, b, out: h)  # for a g of ones
        return ml.sum(ml.host_call("times", h, p["b"], vjp=rules))

    def step(rank: int, vm: VM) -> None:
        vm.register("times", multiply)
        p = {"a": ml.arange(4.0), "b": ml.ones((4,))}
        weight = 1.0 + rank
        expected = ml.grad(loss)(p, weight)
        ml.parallel.all_reduce(expected, "mean")
        _, gradients = ml.parallel.value_and_grad(loss)(p, weight)
        for name, g in expected.items():
            assert gradients[name].tolist() == g.tolist(), name

    with ml.parallel.Group(2) as group:
        group.run(step)
