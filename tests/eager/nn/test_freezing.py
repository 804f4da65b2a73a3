"""Parameters that stay as they are: frozen by path, or as buffers; and one way to say which."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, DTypeError
from mlvm.eager import nn
from mlvm.eager.tree import named_leaves
from tests.brief import cases, refuses
from tests.slopes import check_slopes
from tests.trees import assert_close


class Net(nn.Module):
    """Two blocks, a tied kernel, and tensors in a list and in a dict."""

    def __init__(self) -> None:
        keys = ml.random.split(ml.random.key(0), 2)
        self.blocks = [nn.Linear(2, 2, key=key, dtype=ml.float64) for key in keys]
        self.offsets = [ml.zeros(2, dtype=ml.float64), ml.ones(2, dtype=ml.float64)]
        self.scales = {"a": ml.ones(2, dtype=ml.float64), "b": ml.ones((), dtype=ml.float64)}
        self.tied = self.blocks[1].kernel
        self.steps = nn.buffer(ml.zeros((), dtype=ml.int64))

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        for block in self.blocks:
            x = ml.tanh(block(x))
        return (x @ self.tied + self.offsets[0] + self.offsets[1]) * self.scales["a"]


ALL = [
    *("blocks_0/kernel", "blocks_0/bias", "blocks_1/kernel", "blocks_1/bias"),
    *("offsets_0", "offsets_1", "scales/a", "scales/b"),
]
X = ml.asarray(np.random.default_rng(0).standard_normal((3, 2)))


@pytest.fixture
def model() -> Net:
    return Net()


def loss(model: Any, x: ml.Tensor = X) -> ml.Tensor:
    return ml.sum(ml.square(model(x)))


def paths(grads: Any) -> list[str]:
    return [path for path, _ in named_leaves(grads)]


# --- freeze and unfreeze -------------------------------------------------------------


@cases(
    "where, free",
    (None, []),
    ("blocks_0", ALL[2:]),
    ("blocks_*", ALL[4:]),
    ("*/bias", [ALL[0], ALL[2], *ALL[4:]]),
    ("offsets_1", [*ALL[:5], *ALL[6:]]),
    ("scales", ALL[:6]),
    ("tied", [*ALL[:2], *ALL[3:]]),
    (lambda path, x: x.ndim == 2, [ALL[1], *ALL[3:]]),
)
def test_a_model_is_frozen_by_path(model: Net, where: Any, free: list[str]) -> None:
    state, before = list(model.state()), {path: x.numpy() for path, x in model.state().items()}
    assert model.freeze(where) is model
    assert list(model.named_parameters()) == free
    assert list(model.state()) == state
    assert list(model.named_buffers()) == [path for path in state if path not in free]
    if free:
        _value, grads = ml.value_and_grad(loss)(model)
        assert list(dict.fromkeys(paths(grads))) == [*free, *["tied"] * (ALL[2] in free)]
        ml.optim.SGD(model, 0.1).update(grads)
        for path, x in model.state().items():
            assert (x.numpy() == before[path]).all() == (path not in free or path == "scales/b")
    assert model.unfreeze() is model
    assert list(model.named_parameters()) == ALL
    assert list(model.named_buffers()) == ["steps"]


def test_a_part_is_frozen_and_thawed_by_itself(model: Net) -> None:
    model.freeze()
    model.blocks[0].unfreeze("bias")
    assert list(model.named_parameters()) == ["blocks_0/bias"]
    model.unfreeze("offsets_*").freeze("offsets_0")
    assert list(model.named_parameters()) == ["blocks_0/bias", "offsets_1"]
    twin = copy.deepcopy(model)
    twin.unfreeze()
    assert list(twin.named_parameters()) == ALL
    assert list(model.named_parameters()) == ["blocks_0/bias", "offsets_1"]
    assert list(model.astype(ml.float32).named_parameters()) == ["blocks_0/bias", "offsets_1"]


def test_a_frozen_tensor_that_is_assigned_stays_frozen_until_the_field_is_deleted() -> None:
    layer = nn.Linear(2, 3).freeze()
    layer.kernel = ml.ones((2, 3))
    assert not layer.named_parameters()
    del layer.kernel
    layer.kernel = ml.ones((2, 3))
    assert list(layer.named_parameters()) == ["kernel"]


@cases(
    "where, text",
    ("head", "no tensor matches 'head'; expected: .*blocks_1/kernel"),
    ("blocks.0.*", "expected, with / between names: "),
    (lambda path, x: False, "no tensor matches this function"),
    (3, "a pattern of paths, or a function of path and tensor, got 3"),
    ("scales/a", "Net.scales: what a dict .* is frozen together, and alone: scales/a, scales/b"),
)
def test_what_cannot_be_frozen(model: Net, where: Any, text: str) -> None:
    refuses(ArgumentError, text, model.freeze, where)
    assert list(model.named_parameters()) == ALL


def test_a_captured_step_sees_what_is_frozen(model: Net) -> None:
    model.steps = nn.buffer(model.steps)
    step = ml.capture(lambda: ml.grad(loss)(model))
    for where, frozen in ((None, False), ("blocks_1", True), ("blocks_0", True), ("*", False)):
        (model.freeze if frozen else model.unfreeze)(where)
        captured, eager = step(), ml.grad(loss)(model)
        assert paths(captured) == paths(eager)
        assert_close(captured, eager)
    layer = nn.LayerNorm(2)
    layer.scale = nn.buffer(layer.scale)
    step = ml.capture(lambda: ml.grad(lambda layer: ml.sum(layer(ml.ones((1, 2)))))(layer))
    assert list(step()) == ["bias"]
    layer.scale, layer.bias = nn.buffer(layer.scale), nn.buffer(layer.bias)
    assert list(step()) == []


def test_an_optimizer_from_before_says_that_a_parameter_is_frozen(model: Net) -> None:
    optimizer = ml.optim.SGD(model, 0.1)
    model.freeze("blocks_0")
    with pytest.raises(DTypeError, match="'blocks_0/kernel' was frozen after the optimizer was"):
        optimizer.update(ml.grad(loss)(model))


@pytest.mark.local(reason="the members are here")
@cases("shard", "optimizer", "all")
@cases("frozen, where", (["blocks_0", "offsets_0"], None), ([], "blocks_1"), ([], "*bias"))
def test_weights_in_parts_may_be_frozen(frozen: list[str], where: Any, shard: Any) -> None:
    def make(vm: object) -> Any:
        model = Net()
        for each in frozen:
            model.freeze(each)
        optimizer = ml.optim.Adam(model, 0.1, where=where)

        def step(x: ml.Tensor) -> dict[str, Any]:
            _value, grads = ml.parallel.value_and_grad(loss, where=where)(model, x)
            optimizer.update(grads)
            _value, grads = ml.parallel.value_and_grad(loss, where=where)(model, x)
            optimizer.update(grads)
            return {path: x.numpy() for path, x in model.state().items()}

        return step

    alone = make(None)(X)
    with ml.parallel.Group(2) as group:
        both = ml.asarray(np.concatenate([X.numpy()] * 2))
        weights = ml.parallel.data_parallel(make, group, shard=shard)(both)
    for path, x in alone.items():
        np.testing.assert_allclose(weights[path], x, rtol=1e-9)


# --- buffers in lists ----------------------------------------------------------------


def test_a_module_in_a_list_may_be_a_buffer(model: Net) -> None:
    first = model.blocks[0]
    expected = model(X).numpy()
    model.blocks[0] = nn.buffer(first)
    assert list(model.named_parameters()) == ALL[2:]
    assert list(model.state()) == [*ALL, "steps"]
    np.testing.assert_array_equal(model(X).numpy(), expected)
    assert model.blocks[0].kernel is first.kernel
    assert list(first.named_parameters()) == ["kernel", "bias"]
    assert nn.buffer(model.blocks[0]) is model.blocks[0]
    assert list(ml.grad(loss)(model)["blocks_0"]) == []
    model.eval().train()
    assert not model.blocks[0].training
    assert model.blocks[1].training
    assert list(model.unfreeze().named_parameters()) == ALL[2:]
    twin = copy.deepcopy(model)
    assert list(twin.named_parameters()) == ALL[2:]
    assert twin.blocks[0].kernel is not first.kernel
    others: list[Any] = [twin, pickle.loads(pickle.dumps(model))]
    for other in others:
        assert list(other.named_parameters()) == ALL[2:]
        again = other.blocks[0]
        other.moved = again
        assert vars(other)["moved"] is again
        assert list(other.named_parameters()) == ALL[2:]
        np.testing.assert_array_equal(other(X).numpy(), expected)


def test_a_field_gets_the_module_itself_for_a_buffer() -> None:
    model, teacher = Net(), nn.Linear(2, 1)
    model.teacher = nn.buffer(teacher)  # type: ignore[attr-defined]
    assert vars(model)["teacher"] is teacher
    assert list(model.named_parameters()) == ALL
    model.other = model.blocks[0]  # type: ignore[attr-defined]
    model.parts = {"old": nn.buffer(teacher), "new": nn.Linear(1, 1)}  # type: ignore[attr-defined]
    assert list(model.named_parameters())[len(ALL) :] == ["parts/new/kernel", "parts/new/bias"]


def test_what_a_buffer_in_a_list_assigns_is_kept() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            self.calls = nn.buffer(ml.zeros(()))
            self.scale = ml.ones(())

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            self.calls = self.calls + 1.0
            return x * self.scale

    layer = Counting()
    model = nn.Sequential(nn.buffer(layer), nn.Linear(2, 2))
    ml.grad(lambda model: ml.sum(model(ml.ones((1, 2)))))(model)
    model(ml.ones((1, 2)))
    assert int(layer.calls) == int(model[0].calls) == 2


def test_a_tensor_in_a_list_is_no_buffer(model: Net) -> None:
    model.offsets[0] = nn.buffer(model.offsets[0])
    refuses(DTypeError, "got a Buffer at offsets_0; buffers are fields", model.state)


# --- where= --------------------------------------------------------------------------


@cases("where", "blocks_1", "*bias", lambda path, x: x.ndim == 2)
def test_a_gradient_of_some_is_that_part_of_the_whole_one(model: Net, where: Any) -> None:
    whole = dict(named_leaves(ml.grad(loss)(model)))
    value, some = ml.value_and_grad(loss, where=where)(model)
    assert 0 < len(paths(some)) < len(whole)
    assert float(value) == float(loss(model))
    for path, g in named_leaves(some):
        np.testing.assert_array_equal(g.numpy(), whole[path].numpy())
    captured = ml.capture(lambda: ml.grad(loss, where=where)(model))()
    assert paths(captured) == paths(some)
    optimizer = ml.optim.Adam(model, 0.1, where=where)
    before = {path: x.numpy() for path, x in model.state().items()}
    optimizer.update(some)
    for path, x in model.named_parameters().items():
        assert (x.numpy() != before[path]).any() == (path in paths(some))
    assert [path for path in optimizer.state() if path.startswith("momentum")] == [
        path for path in optimizer.state() if path.removeprefix("momentum/") in paths(some)
    ]


def test_a_tied_tensor_is_meant_by_either_of_its_paths(model: Net) -> None:
    tied = ml.grad(loss, where="tied")(model)
    kernel = ml.grad(loss, where="blocks_1/kernel")(model)
    assert paths(tied) == paths(kernel) == ["blocks_1/kernel", "tied"]


def test_two_optimizers_share_a_gradient() -> None:
    model, both, reference = Net(), Net(), Net()
    head = ml.optim.SGD(both, 0.1, where="blocks_*")
    rest = ml.optim.Adam(both, 0.1, where=lambda path, x: not path.startswith(("blocks", "tied")))
    grads = ml.grad(loss)(both)
    head.update(grads)
    rest.update(grads)
    ml.optim.SGD(model, 0.1).update(ml.grad(loss)(model))
    ml.optim.Adam(reference, 0.1).update(ml.grad(loss)(reference))
    for path, x in both.named_parameters().items():
        other = (model if path.startswith("blocks") else reference).named_parameters()[path]
        np.testing.assert_array_equal(x.numpy(), other.numpy())
    refuses(ArgumentError, "no tensor matches 'x'", ml.optim.SGD, model, 0.1, where="x")
    refuses(
        ArgumentError,
        "no parameter matches the group 'offsets_0'",
        ml.optim.SGD,
        model,
        0.1,
        where="blocks_0",
        groups=[("offsets_0", {})],
    )


@pytest.mark.local(reason="the members are here")
def test_gradients_averaged_by_members_may_be_of_some() -> None:
    mean = ml.parallel.value_and_grad(lambda p: ml.sum(p["a"] * p["b"]), where="a")

    def member(rank: int, vm: object) -> Any:
        _value, grads = mean({"a": ml.ones(2), "b": ml.ones(2) * rank})
        return {name: g.tolist() for name, g in grads.items()}

    with ml.parallel.Group(2) as group:
        assert group.run(member) == [{"a": [0.5, 0.5]}] * 2


# --- layers in order -----------------------------------------------------------------


class Lora(nn.Module):
    """A frozen Linear, and a product of two thin matrices beside it."""

    def __init__(self, inner: nn.Linear, rank: int, key: ml.Tensor) -> None:
        width, features = inner.kernel.shape
        self.inner = nn.buffer(inner)
        self.down = nn.Linear(width, rank, bias=False, key=key, dtype=inner.kernel.dtype)
        self.up = nn.Linear(
            rank, features, bias=False, kernel_init=nn.init.zeros, dtype=inner.kernel.dtype
        )

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.inner(x) + self.up(self.down(x))


@cases("rotary_base", None, 10.0)
def test_a_projection_of_attention_may_be_another_module(rotary_base: float | None) -> None:
    layer = nn.MultiHeadAttention(8, 2, rotary_base=rotary_base, dtype=ml.float64)
    x = ml.random.normal((2, 5, 8), dtype=ml.float64)
    expected = layer(x, is_causal=True).numpy()
    for i, name in enumerate(("query", "key", "value", "out")):
        setattr(layer, name, Lora(getattr(layer, name), 2, ml.random.key(i)))
    np.testing.assert_allclose(layer(x, is_causal=True).numpy(), expected, rtol=1e-12)
    assert all("down" in path or "up" in path for path in layer.named_parameters())
    cache = layer.init_cache(2, 5)
    y, _ = layer(x, cache=cache, position=0)
    assert cache[0].dtype is ml.float64
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12)

    adapted: Any = layer.query
    adapted.up.kernel += 0.1
    check_slopes(lambda layer: ml.sum(ml.square(layer(x, is_causal=True))), layer)
    refuses(ml.errors.ShapeError, r"expected x as \[batch, time, 8\]", layer, ml.ones((2, 5, 6)))
