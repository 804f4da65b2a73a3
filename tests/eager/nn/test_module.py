"""Layers against independent numpy, and what Modules tell about their parameters."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import DTypeError, PathError, ShapeError
from mlvm.eager import nn, optim, random
from mlvm.eager.autodiff.grad import grad
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tree import named_leaves
from mlvm.machines.dry import DryVM
from tests.brief import cases, refuses
from tests.eager.nn.checks import normal, randomized


class Block(nn.Module):
    norm: nn.LayerNorm
    Dense: list[nn.Linear]
    activation: Callable[[Tensor], Tensor]

    def __init__(self, features: int) -> None:
        self.norm = nn.LayerNorm(features)
        self.Dense = [nn.Linear(features, 2), nn.Linear(2, features, bias=False)]
        self.activation = op.relu

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.Dense[1](self.activation(self.Dense[0](self.norm(x))))


class Model(nn.Module):
    stem: nn.Linear
    Block: list[Block]

    def __init__(self) -> None:
        self.stem = nn.Linear(4, 3)
        self.Block = [Block(3), Block(3)]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.Block:
            x = block(x)
        return x


# --- layers --------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(), (2,), (2, 5)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_linear(bias: bool, batch: tuple[int, ...], axis: int) -> None:
    layer = nn.Linear(3, 4, axis=axis, bias=bias, dtype="f64")
    w, x = randomized(layer), normal(*batch, 7, 3)
    expected = np.einsum("...i,io->...o", x, w["kernel"]) + w.get("bias", 0)
    result = layer(from_array(x if axis == -1 else x.swapaxes(-1, -2))).numpy()
    result = result if axis == -1 else result.swapaxes(-1, -2)
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-15)


# --- parameters at the start ---------------------------------------------------------


def test_parameters_are_all_that_stays_in_the_arena() -> None:
    with Arena(random.key(0).arena.vm, "weights") as weights:
        model = Model()
        regions = [-(-x.type.nbytes // 64) * 64 for _, x in named_leaves(model)]
        assert weights.used == sum(regions)


def test_a_model_can_be_counted_without_memory() -> None:
    with Arena(DryVM("dry"), "weights"):
        assert nn.Linear(100_000, 1_000_000).num_parameters() == 100_001_000_000


# --- modules -------------------------------------------------------------------------

PATHS = [
    "stem/kernel",
    "stem/bias",
    *(
        f"Block_{i}/{name}"
        for i in (0, 1)
        for name in ("norm/scale", "norm/bias", "Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel")
    ),
]


def test_names_of_parameters() -> None:
    model = Model()
    assert list(model.named_parameters()) == PATHS
    parameters = model.parameters()
    assert list(parameters) == ["stem", "Block_0", "Block_1"]
    assert parameters["Block_1"]["Dense_0"]["kernel"] is model.Block[1].Dense[0].kernel
    assert model.num_parameters() == 15 + 2 * (6 + 8 + 6)


def test_a_shared_module_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.encoder = nn.Linear(3, 3)
            self.decoder = self.encoder

    tied = Tied()
    assert list(tied.named_parameters()) == ["encoder/kernel", "encoder/bias"]
    assert tied.num_parameters() == 12


@cases(
    "change, error, message",
    ({"bias": None}, PathError, "missing parameter 'bias'"),
    ({"scale": np.zeros(3)}, PathError, "unknown parameter 'scale'"),
    (
        {"bias": np.zeros(3)},
        DTypeError,
        "parameter 'bias': expected f32[3], got f64[3]; convert it with astype('float32')",
    ),
    ({"bias": np.zeros(2, np.float32)}, ShapeError, "'bias': expected f32[3], got f32[2]; create"),
)
def test_load_parameters_is_strict(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    layer = nn.Linear(2, 3)
    before = layer.kernel.numpy()
    arrays = {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)}
    arrays = {name: x for name, x in {**arrays, **change}.items() if x is not None}
    refuses(error, re.escape(message), layer.load_parameters, arrays)
    np.testing.assert_array_equal(layer.kernel.numpy(), before)


def test_repr_is_the_tree_with_types() -> None:
    model = nn.Sequential(Block(3), op.relu, nn.Sequential())
    assert repr(model).splitlines() == [
        "Sequential(layers_1=relu), 20 parameters",
        "  layers_0: Block(activation=relu), 20 parameters",
        "    norm: LayerNorm(eps=1e-06), 6 parameters",
        "      scale: f32[3]",
        "      bias: f32[3]",
        "    Dense_0: Linear(axis=-1), 8 parameters",
        "      kernel: f32[3,2]",
        "      bias: f32[2]",
        "    Dense_1: Linear(axis=-1, bias=None), 6 parameters",
        "      kernel: f32[2,3]",
        "  layers_2: Sequential(layers=())",
    ]


def pickled(model: Model) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_parameters_buffers_and_what_is_shared(copied: Callable[[Model], Any]) -> None:
    model = Model()
    vars(model).update(tied=model.stem, width=3)
    model.mean = nn.buffer(from_array(np.arange(3.0)))  # type: ignore[attr-defined]
    model.Block[0].freeze("norm")
    model.eval()
    twin = copied(model)
    assert isinstance(twin, Model)
    assert repr(twin) == repr(model)
    assert twin.stem is vars(twin)["tied"]
    assert twin.Block[1].activation is op.relu
    assert not twin.Block[0].training
    assert list(twin.named_parameters()) == list(model.named_parameters())
    before = {path: x.numpy() for path, x in model.state().items()}
    for path, x in twin.state().items():
        np.testing.assert_array_equal(x.numpy(), before[path])
        x += 1
        np.testing.assert_array_equal(model.state()[path].numpy(), before[path])


def test_a_pickle_is_read_to_where_tensors_are_made() -> None:
    model = Model()
    with Arena(ml.VM(), "elsewhere") as arena:
        assert pickled(model).stem.kernel.arena is arena


LAYERS = [x for x in vars(nn).values() if isinstance(x, type) and issubclass(x, nn.Module)]


@cases("layer", *LAYERS)
def test_a_layer_refuses_a_tensor_as_an_option(layer: type[nn.Module]) -> None:
    x, error, own = ml.ones(3), ml.errors.ArgumentError, layer.__init__
    options = [] if own is object.__init__ else [*inspect.signature(own).parameters.values()][1:]
    for option in options:
        if not (option.kind is option.VAR_POSITIONAL or option.annotation.startswith("Tensor")):
            text = rf"nn\.{layer.__name__}\(f32\[3\]\): expected {option.name} as .*, got a tensor"
            refuses(error, text, layer, **{option.name: x})
            refuses(error, "expected", layer, **{option.name: np.ones(3)})
    if not options:
        text = rf"expected no argument, got a tensor; .*: nn\.{layer.__name__}\(\)\(x\)"
        refuses(error, text, layer, x)


def test_a_module_without_call() -> None:
    class Empty(nn.Module):
        pass

    refuses(NotImplementedError, "Empty defines no __call__", lambda: Empty()(1))
    refuses(ml.errors.ArgumentError, r"Empty\(f32\[3\]\): .*: Empty\(\)\(x\)", Empty, ml.ones(3))
    assert Empty().parameters() == {}


# --- training and evaluation -----------------------------------------------------------


class Nested(nn.Module):
    """Modules in a dict and a list, one of them twice, and a frozen one in a buffer."""

    def __init__(self) -> None:
        self.linear = nn.Linear(2, 2)
        self.parts = {"a": [nn.Dropout(0.5), self.linear], "b": nn.Sequential(nn.Dropout(0.5))}
        self.teacher = nn.buffer(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)))

    def modules(self) -> list[Any]:
        parts: dict[str, Any] = self.parts
        return [self, self.linear, *parts["a"], parts["b"], *parts["b"].layers]


def test_train_and_eval_reach_all_parts() -> None:
    model = Nested()
    teacher: list[Any] = [model.teacher, *model.teacher.layers]
    assert all(part.training for part in [*model.modules(), *teacher])
    assert model.eval() is model
    assert not any(part.training for part in [*model.modules(), *teacher])
    assert model.train() is model
    assert all(part.training for part in model.modules())
    assert not any(part.training for part in teacher)  # it is frozen
    assert "training" not in repr(model)
    assert not copy.deepcopy(model.teacher).training


def test_a_gradient_and_a_captured_function_see_the_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    x = from_array(np.ones((2, 4), np.float32))

    def loss(model: nn.Sequential) -> Tensor:
        return op.mean(op.square(model(x)))

    step = ml.capture(lambda: (model(x), grad(loss)(model)["layers_0"]["bias"]))
    for _ in range(2):
        y, g = [each.numpy() for each in step()]
        assert 20 < np.count_nonzero(y == 0) < 108
        assert 0 < np.count_nonzero(g == 0) < 64
        model.eval()
        y, g = [each.numpy() for each in step()]
        np.testing.assert_array_equal(y, model.layers[0](x).numpy())
        assert np.count_nonzero(g == 0) == 0
        model.train()
    assert "2 programs" in repr(step)


# --- buffers -------------------------------------------------------------------------


class Centered(nn.Module):
    """Subtracts a running mean: `replaced` at each call, or updated in place."""

    def __init__(self, *, replaced: bool = False) -> None:
        self.scale = from_array(np.array([1.0, 2.0]))
        self.mean = nn.buffer(from_array(np.zeros(2)))
        self.calls = nn.buffer(from_array(np.array(0)))
        self.replaced = replaced

    def __call__(self, x: Tensor) -> Tensor:
        mean = op.mean(x, axis=0)
        if self.replaced:
            self.mean = self.mean * 0.5 + mean * 0.5
        else:
            self.mean += (stop_gradient(mean) - self.mean) * 0.5
        self.calls += 1
        return (x - self.mean) * self.scale


def test_buffers_are_kept_with_the_model_and_are_no_parameters() -> None:
    model = nn.Sequential(Centered(), nn.Linear(2, 1))
    paths = ["layers_0/scale", "layers_1/kernel", "layers_1/bias"]
    buffers = ["layers_0/mean", "layers_0/calls"]
    assert list(model.named_parameters()) == paths
    assert list(model.named_buffers()) == buffers
    assert list(model.state()) == [paths[0], *buffers, *paths[1:]]
    assert model.num_parameters() == 5
    assert set(model.parameters()["layers_0"]) == {"scale"}
    assert repr(model).splitlines()[1:5] == [
        "  layers_0: Centered(replaced=False), 2 parameters",
        "    scale: f64[2]",
        "    mean: buffer f64[2]",
        "    calls: buffer i64[]",
    ]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_gradient_takes_buffers_for_constants_and_keeps_what_they_become(replaced: bool) -> None:
    model, x = Centered(replaced=replaced), normal(4, 2)
    gradients = grad(lambda model: op.sum(op.square(model(from_array(x)))))(model)
    mean = x.mean(0) / 2
    np.testing.assert_allclose(model.mean.numpy(), mean, rtol=1e-12)
    assert int(model.calls) == 1
    assert list(gradients) == ["scale"]
    expected = 2 * np.array([1.0, 2.0]) * ((x - mean) ** 2).sum(0)
    np.testing.assert_allclose(gradients["scale"].numpy(), expected, rtol=1e-12)
    optim.SGD(model, 0.1).update(gradients)
    np.testing.assert_allclose(model.mean.numpy(), mean, rtol=1e-12)
    assert list(model.named_buffers()) == ["mean", "calls"]


def test_a_replaced_buffer_is_kept_through_gradients_within_each_other() -> None:
    model, x = Centered(replaced=True), from_array(normal(3, 2))

    def slope(model: Centered) -> Tensor:
        inner = grad(lambda model: op.sum(op.square(model(x))))(model)
        return op.sum(inner["scale"])

    grad(slope)(model)
    assert int(model.calls) == 1
    np.testing.assert_allclose(model.mean.numpy(), x.numpy().mean(0) / 2)
    model(x)
    assert int(model.calls) == 2


def test_a_gradient_does_not_go_through_a_buffer() -> None:
    model = Centered()
    model.mean = model.scale
    gradients = grad(lambda model: op.sum(model.mean * 3.0 + model.scale))(model)
    np.testing.assert_array_equal(gradients["scale"].numpy(), [1, 1])


def test_state_is_loaded_in_place_and_strictly() -> None:
    model, other = Centered(), Centered()
    model(from_array(normal(3, 2)))
    saved = {path: x.numpy() for path, x in model.state().items()}
    mean = other.mean
    other.load_state(saved)
    assert other.mean is mean
    np.testing.assert_array_equal(mean.numpy(), model.mean.numpy())
    assert int(other.calls) == 1
    with pytest.raises(PathError, match="missing tensor 'calls'"):
        other.load_state({path: x for path, x in saved.items() if path != "calls"})
    refuses(PathError, "unknown parameters 'mean', 'calls'", other.load_parameters, saved)


def test_an_integer_that_is_no_buffer_says_what_to_do() -> None:
    model = Centered()
    del model.calls
    model.calls = from_array(np.array(0))
    with pytest.raises(DTypeError, match=r"at calls; a constant in a Module is an nn.buffer"):
        grad(lambda model: op.sum(model.scale))(model)
