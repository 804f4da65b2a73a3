"""f16 and bf16 in the eager language: shown, read in, differentiated, captured, sent and saved; and
training in them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.ops import half
from mlvm.core.types import Array, DType
from mlvm.core.vm import VM
from mlvm.eager import nn
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.reading import values_of
from mlvm.machines.wire import WireVM
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from tests.brief import cases, refuses

HALVES = (ml.float16, ml.bfloat16)
both = pytest.mark.parametrize("dtype", HALVES, ids=str)
VALUES = [[0.1, -0.0, 300.0], [1e5, 1e-7, float("nan")]]


def words(x: ml.Tensor) -> list[int]:
    """The bits of a tensor of halves."""
    return values_of(x).view(np.uint16).ravel().tolist()


# --- values in and out ---------------------------------------------------------------


@both
def test_what_is_seen_of_a_half_is_its_value(dtype: DType) -> None:
    x = ml.asarray(VALUES, dtype=dtype)
    value = x.numpy()
    assert value.dtype == (np.float16 if dtype is ml.float16 else np.float32)
    np.testing.assert_array_equal(value, ml.astype(x, ml.float64).numpy())
    np.testing.assert_array_equal(np.asarray(x), value)
    np.testing.assert_array_equal(np.asarray(x, np.float64), value)
    assert x[0].tolist() == value[0].tolist()
    assert x[0, 2].item() == float(x[0, 2]) == 300.0
    assert str(x[0, 0]) in ("Tensor(0.1, f16[])", "Tensor(0.10009766, bf16[])")
    assert f"{x[0, 0]:.3f}" == "0.100"
    assert (x.itemsize, x.nbytes) == (2, 12)
    assert not ml.asarray(-0.0, dtype=dtype)


@both
def test_copies_and_pickles_keep_the_bits(dtype: DType) -> None:
    x = ml.asarray(VALUES, dtype=dtype)
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), x.to_device(VM("other"))):
        assert y.type is x.type
        assert words(y) == words(x)


@both
@pytest.mark.local(reason="a wire to a VM of this process")
def test_halves_go_over_a_wire(dtype: DType) -> None:
    x = ml.asarray(VALUES, dtype=dtype)
    twice = words(x + x)
    with ml.Arena(WireVM(VM("behind")), "far").allocating():
        far = ml.asarray(VALUES, dtype=dtype)
        assert words(far + far) == twice
        assert words(pickle.loads(pickle.dumps(far))) == words(x)
        assert words(far[0]) == words(x)[:3]


def test_memory_of_halves_is_read_as_it_is() -> None:
    x = ml.asarray(VALUES, dtype=ml.bfloat16)
    assert words(ml.asarray(values_of(x))) == words(x)
    assert words(ml.asarray(VALUES, dtype="bfloat16")) == words(x)
    assert ml.asarray(np.array([1.5], np.float16)).dtype is ml.float16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = np.asarray(VALUES).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ml.asarray(theirs).numpy(), x.numpy())


@pytest.mark.local(reason="only a VM of this process lends memory")
def test_other_libraries() -> None:
    h, b = (ml.asarray([[1.5, -2.0]], dtype=dtype) for dtype in HALVES)
    assert np.from_dlpack(h).tolist() == [[1.5, -2.0]]
    refuses(ml.errors.ExchangeError, r"bf16\[1,2\]: .*astype\(x, float32\)", b.__dlpack__)
    refuses(ml.errors.CopyError, "a dtype that numpy lacks", np.asarray, b, copy=False)
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(h).dtype is torch.float16
    for dtype, theirs in zip(HALVES, (torch.float16, torch.bfloat16), strict=True):
        source = torch.tensor([[0.1, 3.0]], dtype=theirs).mT
        for read in (ml.asarray, ml.from_dlpack):
            x = read(source)
            assert (x.dtype, x.shape) == (dtype, (2, 1))
            assert x.numpy().ravel().tolist() == source.float().ravel().tolist()
        assert ml.zeros(1, dtype=theirs).dtype is dtype
    refuses(ml.errors.DTypeError, "no dtype", ml.zeros, 1, dtype=torch.sparse_coo)

    with pytest.raises(ml.errors.DTypeError, match=r"this list cannot be read: .*torch\.stack"):
        ml.asarray([torch.tensor(1.0, dtype=torch.bfloat16)])


# --- dtypes --------------------------------------------------------------------------


@both
def test_a_number_takes_the_half(dtype: DType) -> None:
    x = ml.asarray([1.0, 2.0], dtype=dtype)
    for y in (x + 1, 2.5 * x, x**2, x / 3, x + True, ml.where(x > 1, x, 0.0)):
        assert y.dtype is dtype
    assert (x * 1j).dtype is ml.complex64
    assert (x * ml.arange(2)).dtype is dtype
    assert (x * ml.ones(2)).dtype is ml.float32
    assert ml.result_type(dtype, 1.5) is dtype
    assert ml.sum(x, dtype=ml.float32).dtype is ml.float32
    assert ml.mean(x).dtype is ml.std(x).dtype is dtype
    assert ml.random.normal((2,), dtype=dtype).dtype is dtype


@both
def test_choices_are_those_of_f32(dtype: DType) -> None:
    """Noise that is a half is so coarse that the first of many places would be chosen."""
    key = ml.random.key(0)
    p = ml.asarray([0.5, 0.25, 4.0, 0.125], dtype=dtype)
    wide = ml.astype(p, ml.float32)
    for x, y in ((ml.zeros(4096, dtype=dtype), ml.zeros(4096)), (p, wide)):
        drawn, expected = (ml.random.categorical(z, shape=(50,), key=key) for z in (x, y))
        assert drawn.tolist() == expected.tolist()
    for replace in (True, False):
        drawn, expected = (ml.random.choice(4, 4, p=z, replace=replace, key=key) for z in (p, wide))
        assert drawn.tolist() == expected.tolist()


@both
def test_draws_between_bounds_are_those_of_f32_rounded(dtype: DType) -> None:
    key = ml.random.key(1)
    drawn, wide = (
        ml.random.uniform(50, low=-6e4, high=6e4, key=key, dtype=each)
        for each in (dtype, ml.float32)
    )
    assert words(drawn) == words(ml.astype(wide, dtype))
    drawn, wide = (
        ml.random.truncated_normal(-1.5, 2.0, 50, key=key, dtype=each)
        for each in (dtype, ml.float32)
    )
    assert words(drawn) == words(ml.astype(wide, dtype))
    low = ml.asarray([0.1], dtype=dtype)
    assert float(ml.min(ml.random.truncated_normal(low, 0.11, 50, key=key, dtype=dtype))) >= low


@both
@pytest.mark.parametrize("native", [True, False])
def test_the_next_half_also_in_a_chain(dtype: DType, native: bool) -> None:
    with ml.Arena(ml.VM(native=native), "here").allocating():
        x = ml.asarray([1.0, 0.0], dtype=dtype)
        result = ml.capture(lambda x: -ml.nextafter(x + 0.0, 3.0))(x)
    assert words(result) == ([0xBC01, 0x8001] if dtype is ml.float16 else [0xBF81, 0x8001])


# --- gradients -----------------------------------------------------------------------


@both
def test_a_cotangent_is_of_its_operands_dtype(dtype: DType) -> None:
    w, x = ml.asarray([[0.5, -1.0], [2.0, 0.25]], dtype=dtype), ml.asarray([[1.0, 3.0]])

    def loss(w: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.tanh(x @ w) ** 2)

    gw, gx = ml.grad(loss, argnums=(0, 1))(w, x)
    assert (gw.dtype, gx.dtype) == (dtype, ml.float32)
    wide, _ = ml.grad(loss, argnums=(0, 1))(ml.astype(w, ml.float32), x)
    assert words(gw) == words(ml.astype(wide, dtype))
    gw = ml.grad(lambda w: loss(w, ml.astype(x, dtype)))(w)
    assert gw.dtype is dtype
    np.testing.assert_allclose(gw.numpy(), wide.numpy(), rtol=0.05, atol=1e-3)


# --- captured, saved, on other machines ----------------------------------------------


def training(dtype: DType, wrap: Callable[..., Any], native: bool) -> list[Any]:
    """Losses and weights of some steps of a small Mixer in that dtype."""
    vm = ml.VM(native=native)
    with ml.Arena(vm, "weights").allocating():
        model = MlpMixer((4, 4, 1), 3, 2, 8, 1, 4, 8, key=ml.random.key(0))
        optimizer = ml.optim.AdamW(model, 1e-2)
        scale = ml.optim.LossScale(2.0**20, growth_interval=3)

    def loss_of(model: nn.Module, x: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        logits = ml.astype(model.astype(dtype)(ml.astype(x, dtype)), ml.float32)
        return scale.scale(ml.softmax_cross_entropy(logits, labels, reduction="mean"))

    def step(x: ml.Tensor, labels: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        loss, grads = scale.unscale(ml.value_and_grad(loss_of)(model, x, labels))
        return loss, scale.update(optimizer, grads)

    run, history = wrap(step), []
    rng = np.random.default_rng(1)
    with ml.Arena(vm, "batch") as arena, arena.allocating():
        for _ in range(6):
            x = ml.asarray(rng.normal(size=(3, 4, 4, 1)).astype(np.float32))
            loss, applied = run(x, ml.asarray(rng.integers(0, 3, 3)))
            history.append((float(loss), bool(applied), float(scale.value)))
    return [*history, *[x.numpy().tobytes() for x in model.state().values()]]


@both
@pytest.mark.parametrize("native", [True, False])
def test_a_captured_step_has_the_bits_of_the_eager_one(dtype: DType, native: bool) -> None:
    if native and not ml.VM().native:
        pytest.skip("the native machine was not built")
    eager = training(dtype, lambda step: step, native)
    assert training(dtype, ml.capture, native) == eager
    applied = [each[1] for each in eager[:6]]
    assert all(applied) if dtype is ml.bfloat16 else not applied[0] and applied[-1]


@pytest.mark.local(reason="a step is saved from a VM of this process")
def test_a_saved_step_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = ml.asarray([[0.1, 2.0], [-3.0, 0.5]], dtype=ml.bfloat16)
    captured = ml.capture(lambda x: ml.tanh(x @ w) + 1)
    x = ml.asarray([[1.0, 0.3]], dtype=ml.bfloat16)
    expected = words(captured(x))
    captured.save(tmp_path / "step.mlvm")
    np.save(tmp_path / "x.npy", values_of(x))
    for argument in (str(tmp_path / "x.npy"), "bf16[1,2] 1 0.3"):
        command = ["run", str(tmp_path / "step.mlvm"), "--arg", argument, "--out", str(tmp_path)]
        assert main(command) == 0
        assert capsys.readouterr().out == "output 0: bf16[1,2]\n"
        result: Array = np.load(tmp_path / "0.npy")
        assert result.view(np.uint16).ravel().tolist() == expected


@both
def test_members_reduce_in_f32(dtype: DType) -> None:
    pytest.importorskip("threadpoolctl")

    def step(rank: int, vm: Any) -> Any:
        x = ml.asarray([256.0, 1.0 + rank], dtype=dtype)
        one = ml.asarray([1.0 if rank else 256.0], dtype=dtype)
        ml.parallel.all_reduce(x, "mean")
        ml.parallel.all_reduce(one)
        gathered = ml.parallel.all_gather(ml.asarray([float(rank)], dtype=dtype))
        return x.tolist(), one.tolist(), gathered.tolist(), gathered.dtype

    with ml.parallel.Group(3) as group:
        for x, one, gathered, kind in group.run(step):
            assert x == [256.0, 2.0]
            assert one == [258.0]  # and not 256, the sum of two at a time in bf16
            assert (gathered, kind) == ([0.0, 1.0, 2.0], dtype)


@both
def test_a_pipeline_brings_halves(dtype: DType) -> None:
    rows = half.cast(np.arange(12.0).reshape(6, 2), dtype)

    with ml.Pipeline((rows,), 2) as pipeline:
        batches = [ml.astype(x, ml.float32).tolist() for (x,) in pipeline]
    assert batches == np.arange(12.0).reshape(3, 2, 2).tolist()


# --- modules and files ---------------------------------------------------------------


def test_a_module_in_another_dtype_shares_its_buffers() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            self.inner = nn.Linear(2, 2, key=ml.random.key(0))
            self.again = self.inner
            self.norm = nn.BatchNorm(2)

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return self.norm(self.again(self.inner(x)))

    model = Both()
    twin = model.astype(ml.float16)
    assert type(twin) is Both
    assert twin.again is twin.inner is not model.inner
    assert {x.dtype for x in twin.named_parameters().values()} == {ml.float16}
    assert {x.dtype for x in model.named_parameters().values()} == {ml.float32}
    assert twin.norm.mean is model.norm.mean
    before = model.norm.mean.tolist()
    assert twin(ml.ones((3, 2), dtype=ml.float16)).dtype is ml.float16
    assert model.norm.mean.tolist() != before
    grads = ml.grad(lambda model: ml.sum(model.astype("f16").inner.kernel * 3.0))(model)
    assert grads["inner"]["kernel"].type == model.inner.kernel.type
    assert grads["inner"]["kernel"].tolist() == [[3.0, 3.0]] * 2


@both
def test_weights_in_halves(dtype: DType, tmp_path: Path) -> None:
    model = nn.Linear(2, 3, key=ml.random.key(0), dtype=dtype)
    file = tmp_path / "half"
    ml.save(file, model)
    other = ml.load(file, into=nn.Linear(2, 3, dtype=dtype))
    assert words(other.kernel) == words(model.kernel)
    wide = ml.load(file, into=nn.Linear(2, 3))
    assert wide.kernel.tolist() == model.kernel.tolist()
    assert ml.load(file)["kernel"].dtype is ml.float32
    assert words(ml.load(file, keep_halves=True)["kernel"]) == words(model.kernel)
    other.load_state({path: x.numpy() for path, x in model.state().items()})
    assert words(other.kernel) == words(model.kernel)
    inexact = {**{path: x.numpy() for path, x in model.state().items()}, "bias": np.full(3, 0.1)}
    ml.save(tmp_path / "wide", nn.Linear(2, 3))
    refuses(ml.errors.DTypeError, r"ml.astype\(x, ml.", ml.load, tmp_path / "wide", into=other)
    refuses(ml.errors.DTypeError, f"bias.* expected {dtype.name}", other.load_state, inexact)


# --- composed of several ops ---------------------------------------------------------


@both
@cases("function", ml.silu, ml.softplus, ml.elu, ml.leaky_relu, ids=lambda f: str(f.__name__))
def test_an_activation_rounds_once(function: Callable[..., ml.Tensor], dtype: DType) -> None:
    x = ml.asarray(np.linspace(-4, 4, 33), dtype=dtype)
    expected = function(ml.astype(x, ml.float32))
    assert words(function(x)) == words(ml.astype(expected, dtype))
    g = ml.grad(lambda x: ml.sum(ml.astype(function(x), ml.float32)))(x)
    wide = ml.grad(lambda x: ml.sum(function(x)))(ml.astype(x, ml.float32))
    assert words(g) == words(ml.astype(wide, dtype))


@pytest.mark.local(reason="it is measured on a dry VM")
def test_what_is_made_in_f32_is_not_kept_for_a_gradient() -> None:
    def loss(x: ml.Tensor) -> ml.Tensor:
        for _ in range(12):
            x = ml.silu(x)
        return ml.sum(ml.astype(x, ml.float32))

    captured = ml.capture(lambda x: ml.grad(loss)(x))
    nbytes = ml.measure(captured, ml.ones(512, dtype=ml.bfloat16)).plan.nbytes
    assert nbytes < 0.6 * 12 * 512 * 4


def test_attention_rounds_once() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (ml.asarray(rng.normal(size=(2, 5, 4)), dtype=ml.bfloat16) for _ in range(3))
    wide = [ml.astype(x, ml.float32) for x in (q, k, v)]
    result = ml.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = ml.scaled_dot_product_attention(*wide, is_causal=True)
    assert words(result) == words(ml.astype(expected, ml.bfloat16))
    assert words(ml.rotary_encoding(q)) == words(
        ml.astype(ml.rotary_encoding(wide[0]), ml.bfloat16)
    )


@cases(
    "shape, window, stride",
    ((2, 8, 8, 3), (4, 4, 3, 6), 4),
    ((2, 9, 10, 3), (4, 4, 3, 6), 4),  # with a rest that no window has
    ((2, 5, 6, 8), (1, 1, 8, 5), 1),
    ((2, 3, 4, 5, 8), (1, 1, 1, 8, 5), 1),
    ((2, 9, 3), (3, 3, 6), 3),
)
def test_windows_of_bf16_without_a_common_pixel_are_a_product(
    shape: tuple[int, ...], window: tuple[int, ...], stride: int
) -> None:
    conv = {3: ml.conv1d, 4: ml.conv2d, 5: ml.conv3d}[len(shape)]
    rng = np.random.default_rng(0)
    wide = [ml.asarray(rng.integers(-9, 9, size) / 8, dtype=ml.float32) for size in (shape, window)]
    short = [ml.astype(x, ml.bfloat16) for x in wide]

    def loss(x: ml.Tensor, kernel: ml.Tensor) -> ml.Tensor:
        return ml.sum(conv(x, kernel, stride=stride), dtype=ml.float32)

    with mock.patch.object(primitives, "conv2d", side_effect=AssertionError):
        y = conv(*short, stride=stride)
        grads = ml.grad(loss, argnums=(0, 1))(*short)
        captured = ml.capture(ml.grad(loss, argnums=(0, 1)))(*short)
    assert ml.array_equal(y, ml.astype(conv(*wide, stride=stride), ml.bfloat16))
    for grad, again, exact in zip(grads, captured, ml.grad(loss, (0, 1))(*wide), strict=True):
        assert words(grad) == words(again)
        assert words(grad) == words(ml.astype(exact, ml.bfloat16))


# --- layers --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.RMSNorm(16), nn.GroupNorm(2, 16), nn.BatchNorm(16)])
def test_a_normalisation_of_large_halves(layer: Any) -> None:
    values = (np.random.default_rng(0).normal(size=(8, 16)) * 1000).astype(np.float16)
    twin, x = layer.astype(ml.float16), ml.asarray(values)
    for mode in (True, False):
        expected = twin.train(mode) and layer.train(mode)(ml.astype(x, ml.float32))
        result = twin(x)
        assert result.dtype is ml.float16
        if mode or not isinstance(layer, nn.BatchNorm):
            assert words(result) == words(ml.astype(expected, ml.float16))
        np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), rtol=0.2)
    if isinstance(layer, nn.BatchNorm):
        assert bool(ml.all(ml.isfinite(layer.var)))
        assert layer.var.dtype is ml.float32
        assert nn.BatchNorm(4, dtype=ml.bfloat16).var.dtype is ml.float32


def test_a_buffer_assigned_in_another_dtype_is_the_models() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            self.scale = ml.ones(2)
            self.mean = nn.buffer(ml.zeros(2))

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            mean = ml.stop_gradient(ml.astype(ml.mean(x, axis=0), ml.float32))
            self.mean = 0.5 * self.mean + 0.5 * mean
            return ml.sum(ml.astype(x * self.scale, ml.float32))

    model, x = Running(), ml.ones((3, 2), dtype=ml.bfloat16)

    def step(x: ml.Tensor) -> Any:
        return ml.value_and_grad(lambda model: model.astype(ml.bfloat16)(x))(model)

    model.astype(ml.bfloat16)(x)
    assert model.mean.tolist() == [0.5, 0.5]
    for run in (step, ml.capture(step)):
        run(x)
    assert model.mean.tolist() == [0.875, 0.875]
    twin = model.astype(ml.float16)
    other = copy.deepcopy(twin)
    other.mean = ml.zeros(2)
    assert model.mean.tolist() == [0.875, 0.875]
    assert "origin" not in repr(twin)
    assert list(twin.state()) == ["scale", "mean"]


# --- loss scaling --------------------------------------------------------------------


def test_a_scale_shrinks_with_an_overflow_and_grows_after_a_while() -> None:
    w = ml.ones(2)
    optimizer = ml.optim.Adam({"w": w}, 0.5)
    scale = ml.optim.LossScale(16.0, growth_interval=2)
    good, bad = {"w": ml.ones(2)}, {"w": ml.asarray([1.0, ml.inf])}
    history = []
    for grads in (good, bad, good, good, good, good, {"w": ml.full(2, ml.nan)}):
        before = w.tolist(), float(optimizer.count)
        applied = bool(scale.update(optimizer, grads))
        assert (before != (w.tolist(), float(optimizer.count))) == applied
        history.append((applied, float(scale.value)))
    values = [16.0, 8.0, 8.0, 16.0, 16.0, 32.0, 16.0]
    assert history == list(zip([True, False, True, True, True, True, False], values, strict=True))
    assert float(optimizer.count) == 5
    assert repr(scale) == "<LossScale: Tensor(16., f32[])>"
    again = ml.optim.LossScale()
    again.load_state({name: x.numpy() for name, x in scale.state().items()})
    assert (float(again.value), float(again.good_steps)) == (16.0, 0.0)


def test_a_scale_stays_within_its_limits() -> None:
    optimizer = ml.optim.SGD({"w": ml.ones(1)}, 0.0)
    low, high = ml.optim.LossScale(1.0), ml.optim.LossScale(2.0**125.5, growth_interval=1)
    for _ in range(2):
        low.update(optimizer, {"w": ml.full(1, ml.inf)})
        high.update(optimizer, {"w": ml.ones(1)})
    assert (float(low.value), float(high.value)) == (1.0, 2.0**126)


def test_members_skip_an_update_together() -> None:
    """Each has a piece of the gradients, and one of them has the infinity."""
    pytest.importorskip("threadpoolctl")

    def make(vm: Any) -> Callable[..., Any]:
        weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
        with weights.allocating():
            model = Mlp((2, 2, 1), 2, key=ml.random.key(1))
            optimizer = ml.optim.Adam(model, 0.1)
            scale = ml.optim.LossScale(4.0)
        grad = ml.parallel.value_and_grad(
            lambda model, x: scale.scale(ml.sum(ml.square(model(x) - 1.0)))
        )

        @ml.capture
        def improve(x: ml.Tensor) -> ml.Tensor:
            _, grads = grad(model, x)
            return scale.update(optimizer, scale.unscale(grads))

        def step(x: Array) -> tuple[bool, float, float]:
            with batch:
                return bool(improve(ml.asarray(x))), float(scale.value), float(optimizer.count)

        return step

    x = np.ones((2, 2, 2, 1), np.float32)
    bad = x.copy()
    bad[0, 0, 0] = np.inf
    with ml.parallel.group("threads:2") as group:
        for shard in (None, "optimizer"):
            step = ml.parallel.data_parallel(make, group, shard=shard)
            assert [step(each) for each in (x, bad, x)] == [
                (True, 4.0, 1.0),
                (False, 2.0, 1.0),
                (True, 2.0, 2.0),
            ]


@both
def test_members_with_weights_in_parts_have_the_same_bits(dtype: DType) -> None:
    """The mean of gradients that are halves is not rounded to one."""
    pytest.importorskip("threadpoolctl")

    def make(vm: Any) -> Callable[..., Any]:
        with ml.Arena(vm, "weights").allocating():
            model = nn.Linear(3, 3, key=ml.random.key(1))
            optimizer = ml.optim.SGD(model, 0.1)

        def loss_of(model: nn.Module, x: ml.Tensor) -> ml.Tensor:
            output = model.astype(dtype)(ml.astype(x, dtype))
            return ml.sum(ml.square(ml.astype(output, ml.float32)))

        grad = ml.parallel.value_and_grad(loss_of)

        def step(x: Array) -> list[float]:
            optimizer.update(grad(model, ml.asarray(x))[1])
            return model.state()["kernel"].tolist()

        return step

    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with ml.parallel.group("threads:2") as group:
        whole, parts = (
            ml.parallel.data_parallel(make, group, shard=shard)(x) for shard in (None, "all")
        )
    assert parts == whole
