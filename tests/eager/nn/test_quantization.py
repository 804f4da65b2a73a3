"""Models whose weights are of few bits, and what these cost."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, DTypeError, OperandValueError, ShapeError
from tests.brief import cases, refuses

WORST = {"i8": 0.01, "i4": 0.13, "u8": 0.01, "u4": 0.11, "i2": 1, "u2": 0.6}
WORST |= {"f8e4m3": 0.04, "f8e5m2": 0.08, "f4e2m1": 0.15}


@pytest.fixture(scope="module")
def model() -> ml.nn.Sequential:
    keys = ml.random.split(ml.random.key(1), 2)
    return ml.nn.Sequential(
        ml.nn.Linear(64, 96, key=keys[0]), ml.gelu, ml.nn.Linear(96, 32, key=keys[1])
    )


@pytest.fixture(scope="module")
def x() -> ml.Tensor:
    return ml.random.normal((5, 64), key=ml.random.key(0))


@pytest.mark.parametrize("dtype", WORST)
def test_errors_are_told_layer_by_layer(dtype: str, model: ml.nn.Sequential, x: ml.Tensor) -> None:
    small = ml.quantize(model, dtype, group=32)
    report = ml.quantization_errors(model, small, x)
    for row, layer in zip(report.rows, (0, 2), strict=True):
        kernel = model[layer].kernel.numpy().T.astype(float)
        deviation = ml.dequantize(small[layer].weight, small[layer].scale).numpy() - kernel
        assert row.weight_error == pytest.approx(
            np.linalg.norm(deviation) / np.linalg.norm(kernel), rel=1e-4
        )
        assert 0 < row.weight_error < WORST[dtype]
        assert row.output_error is not None
        assert 0 < row.output_error < 1.5 * WORST[dtype]
        assert row.nbytes < row.nbytes_before
    assert "layers_2" in repr(report)
    assert dtype in repr(report)
    captured = ml.capture(lambda x: small(x))
    assert (captured(x).numpy() == small(x).numpy()).all()
    dense = ml.nn.Sequential(*(copy.copy(each) for each in model))
    for layer in (0, 2):
        weight = ml.dequantize(small[layer].weight, small[layer].scale)
        dense[layer].kernel = ml.copy(weight.mT)
    np.testing.assert_allclose(small(x).numpy(), dense(x).numpy(), rtol=1e-5, atol=1e-5)


def test_what_stays_as_it_is_is_told_with_the_reason() -> None:
    layers = ml.nn.Embedding(8, 4), ml.nn.Linear(4, 4), ml.nn.LayerNorm(4), ml.nn.LayerNorm(4)
    model = ml.nn.Sequential(*layers, ml.nn.GRUCell(4, 4), ml.nn.Linear(4, 2), ml.nn.Linear(2, 2))
    model[6].axis = -2
    small = ml.quantize(model, "i8", where="layers_1")
    report = ml.quantization_errors(model, small)
    owners = [
        (row.path, row.layer, row.nbytes) for row in report.unquantized if row.layer != "GRUCell"
    ]
    assert owners[:2] == [("layers_0", "Embedding", 128), ("layers_2", "LayerNorm", 32)]
    assert sum(each.nbytes for each in report.unquantized) == sum(
        x.nbytes for path, x in model.state().items() if not path.startswith("layers_1/")
    )
    lines = repr(report).splitlines()[2:]
    assert "not quantized: 128 bytes of Embedding, a lookup, see nn.QuantizedEmbedding" in lines
    assert "not quantized: 64 bytes of LayerNorm, not a Linear" in lines
    assert "not quantized: 40 bytes of Linear, not selected by where=" in lines
    assert "not quantized: 24 bytes of Linear, axis other than -1" in lines


def test_rows_are_quantised_as_they_come(model: ml.nn.Sequential, x: ml.Tensor) -> None:
    layer, small = model[0], ml.quantize(model, "i8", dynamic=True)[0]
    rows, kernel = x.numpy(), layer.kernel.numpy().T
    scales = [np.abs(each).max(1, keepdims=True) / np.float32(127) for each in (rows, kernel)]
    codes = [np.round(each / scale) for each, scale in zip((rows, kernel), scales, strict=True)]
    expected = codes[0] @ codes[1].T * scales[0] * scales[1].T
    np.testing.assert_allclose(small(x).numpy(), expected, rtol=1e-6, atol=1e-5)
    assert ml.quantization_errors(layer, small, x).rows[0].weight_error < 0.02


def test_gradients_go_through_weights_of_few_bits(model: ml.nn.Sequential, x: ml.Tensor) -> None:
    small = ml.quantize(model, "i4", group=32)
    gradient = ml.grad(lambda x: ml.sum(ml.square(small[0](x))))(x).numpy()
    weight = ml.dequantize(small[0].weight, small[0].scale).numpy()
    np.testing.assert_allclose(gradient, 2 * small[0](x).numpy() @ weight, rtol=1e-4, atol=1e-5)
    assert not small.named_parameters()


def test_a_model_of_few_bits_is_copied_and_pickled(model: ml.nn.Sequential, x: ml.Tensor) -> None:
    small = ml.quantize(model, "u4", group=32, where="layers_0")
    assert type(small[2]) is ml.nn.Linear
    assert small[2].kernel is model[2].kernel
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert (other(x).numpy() == small(x).numpy()).all()


def test_what_is_refused(model: ml.nn.Sequential, x: ml.Tensor) -> None:
    refuses(DTypeError, r"expected a quantized dtype, i8, .*, got f32", ml.quantize, model, "f32")
    refuses(
        ShapeError,
        "divides the 64 input features of layers_0, got 48",
        ml.quantize,
        model,
        "i4",
        group=48,
    )
    refuses(
        ArgumentError,
        "expected dtype i8 with dynamic=True, got i4",
        ml.quantize,
        model,
        "i4",
        dynamic=True,
    )
    refuses(ArgumentError, "no Linear layer matches", ml.quantize, model, where="head")
    refuses(ArgumentError, "got LayerNorm; see ml.q", ml.quantize, ml.nn.LayerNorm(2))
    lookup, text = ml.nn.Embedding(4, 2), r"Embedding write (ml\.nn.*\))$"
    error = refuses(ArgumentError, text, ml.quantize, lookup)
    match = re.search(text, str(error))
    assert match is not None
    small = eval(match[1], {"ml": ml, "layer": lookup})
    third = ml.asarray([3])
    np.testing.assert_allclose(small(third).numpy(), lookup(third).numpy(), atol=0.05)
    for model_like in cast(Any, (ml.ones((2, 2)), lambda x: x)):
        refuses(ArgumentError, "expected a Module", ml.quantize, model_like)
    for group in ("a", 32.0, 0):
        refuses(ArgumentError, "as an int >= 1", ml.quantize, model, group=cast(Any, group))
    refuses(ArgumentError, "group as an int", ml.quantize_groups, x, group=cast(Any, "a"))
    refuses(ArgumentError, "the result of quantize", ml.quantization_errors, model, model)
    x = ml.astype(ml.zeros((2, 4)), "i4")
    for wrong in (lambda: x + x, lambda: x[0], lambda: ml.sum(x), lambda: x @ x.numpy()):
        refuses(DTypeError, "astype", wrong)
    refuses(ShapeError, "2 elements of i4 fill a byte", ml.astype, ml.zeros(3), "i4")
    refuses(ShapeError, "expected scale of shape", ml.dequantize, x, ml.ones((2, 3)))
    refuses(
        DTypeError, "x of f32", ml.quantized_matmul, ml.ones(4, dtype="f16"), x, ml.ones((2, 1))
    )


@cases("dtype, k, group", ("i4", 64, 32), ("u8", 200, 200), ("u2", 4096, 256))
def test_a_row_has_the_same_bits_among_many(dtype: str, k: int, group: int) -> None:
    """Weights may be laid out for all rows, or read by each."""
    keys = ml.random.split(ml.random.key(4), 2)
    x, w = (ml.random.normal((n, k), key=key) for n, key in zip((70, 37), keys, strict=True))
    q, scale = ml.quantize_groups(w, dtype, group=group)
    among = ml.quantized_matmul(x, q, scale).numpy()
    for rows in (slice(1), slice(2, 7), slice(40, 58), slice(69, 70)):
        assert (ml.quantized_matmul(x[rows], q, scale).numpy() == among[rows]).all()


def test_layers_of_few_bits_stand_beside_others_in_a_half(
    model: ml.nn.Sequential, x: ml.Tensor
) -> None:
    """Under `autocast`, where the layer before may give a half, and by itself."""
    for small in (ml.quantize(model, "i4", group=32), ml.quantize(model, "i8", dynamic=True)):
        mixed = ml.nn.Sequential(model[0], small[2])
        with ml.autocast("bfloat16"):
            half = model[0](x)
            result, captured = mixed(x), ml.capture(lambda x, mixed=mixed: mixed(x))(x)
            again = ml.quantized_matmul(half, small[2].weight, small[2].scale)
        assert half.dtype == ml.bfloat16
        assert result.dtype == captured.dtype == again.dtype == ml.float32
        assert (result.numpy() == captured.numpy()).all()
        assert (result.numpy() == small[2](half).numpy()).all()


@pytest.mark.parametrize("dtype", [d for d in WORST if d not in ("i8", "u8")])
def test_few_bits_are_made_from_a_description(dtype: str) -> None:
    tensors = [ml.zeros((2, 4), dtype), ml.ones((2, 4), dtype), ml.full((2, 4), 1, dtype)]
    tensors += [ml.zeros_like(tensors[1]), ml.full_like(tensors[0], ml.asarray(1.0))]
    for y, value in zip(tensors, (0, 1, 1, 0, 1), strict=True):
        assert y.dtype == dtype
        assert (y.numpy() == value).all()
    if dtype[0] != "f":
        refuses(OperandValueError, "out of range", ml.full, (4,), 16, dtype)
        refuses(ShapeError, r"shape is \(3,\)", ml.zeros, 3, dtype)
        refuses(ShapeError, "a scalar cannot have this dtype", ml.zeros, (), dtype)


def test_what_floats_of_few_bits_do_not_hold() -> None:
    """As OCP's standards and ml_dtypes have it, but that nan is 0 where there is none."""
    x = ml.asarray([1e6, -1e6, np.inf, np.nan])
    expected = {
        "f8e4m3": [np.nan] * 4,
        "f8e5m2": [np.inf, -np.inf, np.inf, np.nan],
        "f4e2m1": [6, -6, 6, 0],
    }
    for dtype, values in expected.items():
        np.testing.assert_array_equal(ml.astype(x, dtype).numpy(), values)


@cases("dtype", "f8e4m3", "f8e5m2")
def test_a_scalar_of_eight_bits_is_read_printed_and_cast(dtype: str) -> None:
    def cast(x: ml.Tensor) -> ml.Tensor:
        return ml.astype(x, "f32")

    for native in (True, False):
        with ml.use(ml.VM(native=native)):
            x = ml.astype(ml.asarray(-1.5), dtype)
            assert (x.item(), x.numpy().shape, repr(x)) == (-1.5, (), f"Tensor(-1.5, {dtype}[])")
            assert cast(x).item() == ml.capture(cast)(x).item() == -1.5


def test_onnx_formulas() -> None:
    x = np.linspace(-3, 7, 24, dtype=np.float32).reshape(4, 6)
    scale, zero = np.array([0.1, 0.5, 1, 2], "f"), np.array([3, 128, 0, 255], np.uint8)
    by_axis = [each[:, np.newaxis] for each in (scale, zero.astype("f"))]
    expected = np.clip(np.round(x / by_axis[0]) + by_axis[1], 0, 255)
    quantized = ml.quantize_linear(ml.asarray(x), ml.asarray(scale), ml.asarray(zero), axis=0)
    assert quantized.dtype == ml.uint8
    assert (quantized.numpy() == expected).all()
    back = ml.dequantize_linear(quantized, ml.asarray(scale), ml.asarray(zero), axis=0)
    assert (back.numpy() == (expected - by_axis[1]) * by_axis[0]).all()
    blocks = ml.dequantize_linear(quantized, ml.asarray(np.tile(scale[:, None], 2)), axis=1)
    assert (blocks.numpy() == expected * by_axis[0]).all()
    slope = ml.grad(
        lambda s: ml.sum(2.0 * ml.dequantize_linear(quantized, s, ml.asarray(zero), axis=0))
    )
    exact = 2 * (expected - by_axis[1]).sum(1)
    np.testing.assert_allclose(slope(ml.asarray(scale)).numpy(), exact, rtol=1e-6)
    codes, step, middle = ml.dynamic_quantize_linear(ml.asarray(x))
    assert float(step) == pytest.approx(10 / 255)
    assert int(middle) == round(3 / (10 / 255))
    assert np.abs((codes.numpy() - float(middle)) * float(step) - x).max() <= float(step)


def test_a_product_of_bytes_without_columns_begins_a_chain() -> None:
    x, y = ml.zeros((40, 5), dtype="int8"), ml.zeros((0, 5), dtype="int8")
    scaled = ml.capture(lambda x, y: ml.astype(ml.integer_matmul(x, y), ml.float32) * 2.0)
    assert scaled(x, y).shape == (40, 0)
