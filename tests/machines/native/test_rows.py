"""Native softmax, cross-entropy and layer normalisation: rows of any length, special values, labels
of any dtype, and the same bits on any number of threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import OperandValueError
from mlvm.core.ops import half
from mlvm.core.types import Array, DType, bf16, f16
from tests.brief import cases, refuses
from tests.machines.native.planners import assert_near, native, on_threads, planned, reference

INF, NAN = np.inf, np.nan
LENGTHS = [1, 2, 3, 7, 8, 10, 15, 17, 31, 33, 64, 65, 100, 255, 512, 1000, 1023, 1025, 2048, 4099]
AXES: list[tuple[tuple[int, ...], int]] = [
    ((7,), 0), ((1, 1), 0), ((5, 1), 1), ((3, 10), 0), ((100, 300), 0), ((2, 3, 5), 1),
    ((4, 40, 129), -2), ((200, 2, 3), 0), ((3, 70_001), 1), ((3, 70_001), 0),
]  # fmt: skip
FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SOFTMAXES = pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return np.random.default_rng([math.prod(shape), seed]).standard_normal(shape).astype(dtype)


def check(name: str, *inputs: Array, tolerance: float = 2e-6, **attributes: Any) -> None:
    """Against the reference kernel of f64, and on any number of threads the same bits."""
    tolerance *= 1 if inputs[0].dtype == np.float32 else 1e-6
    assert_near(name, *inputs, rtol=tolerance, atol=tolerance, threads=(1, 2, 3, 5), **attributes)


# --- softmax --------------------------------------------------------------------------


@SOFTMAXES
@FLOATS
def test_softmax_of_rows_of_any_length(name: str, dtype: Any) -> None:
    for n in LENGTHS:
        for rows in (1, 3, 200):
            check(name, 5 * random((rows, n), dtype), axis=-1)


@SOFTMAXES
@FLOATS
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_softmax_along_any_axis(name: str, dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    check(name, random(shape, dtype), axis=axis)


def test_logsumexp_along_several_axes() -> None:
    x = random((3, 4, 5), np.float32)
    for axis in (None, (0, 1), (1, 2)):
        check("logsumexp", x, axis=axis)
    assert not planned("logsumexp", x, axis=(0, 2))


@SOFTMAXES
@FLOATS
@cases("n", 1, 2, 10, 100, 5000)
def test_special_rows(name: str, dtype: Any, n: int) -> None:
    special = [[-INF], [INF], [NAN], [-INF, 1], [INF, 1], [NAN, INF], [1e30, -1e30], [-104.5, 0]]
    rows = np.array([np.resize(row, n) for row in special], dtype)
    for x, axis in [(rows, 1), (rows.T.copy(), 0), (np.repeat(rows, 200, 0), 1)]:
        with np.errstate(all="ignore"):
            expected = reference(name, x, axis=axis)
        np.testing.assert_allclose(native(name, x, axis=axis), expected, rtol=2e-6)


# --- cross-entropy --------------------------------------------------------------------


@FLOATS
def test_cross_entropy_of_rows_of_any_length(dtype: Any) -> None:
    for n in LENGTHS:
        for rows in (1, 3, 200):
            logits = 5 * random((rows, n), dtype)
            labels = np.random.default_rng(n).integers(0, n, rows)
            check("softmax_cross_entropy", logits, labels)
            check("softmax_cross_entropy_vjp", random((rows,), dtype), logits, labels)


@pytest.mark.parametrize("dtype", [d for d in DType.all.values() if d.is_integer], ids=str)
def test_labels_of_any_dtype(dtype: DType) -> None:
    logits, g = random((3, 120), np.float32), random((3,), np.float32)
    for labels in ([0, 119, 60], [0, 127, 1], [120, 1, 1], [-1, 0, 1], [-128, 0, 0]):
        if dtype.kind == "unsigned" and min(labels) < 0:
            labels = [np.iinfo(dtype.numpy.name).max, 0, 0]
        label_array = np.array(labels, dtype.numpy)
        if min(labels) >= 0 and max(labels) < 120:
            check("softmax_cross_entropy", logits, label_array)
            check("softmax_cross_entropy_vjp", g, logits, label_array)
        else:
            name, text = "softmax_cross_entropy", f"label {labels[0]}|label {labels[1]}"
            refuses(OperandValueError, text, native, name, logits, label_array)
            refuses(OperandValueError, text, native, f"{name}_vjp", g, logits, label_array)


SPECIAL_LOGITS = [[-INF, 0, 1], [INF, 0, 1], [NAN, 0, 1], [-INF] * 3, [200, 0, -200]]


@pytest.mark.parametrize("row", SPECIAL_LOGITS)
def test_special_logits(row: list[float]) -> None:
    logits = np.array([row] * 3, np.float32)
    labels, g = np.array([0, 1, 2]), np.array([1, -2, 0.5], np.float32)
    for name, inputs in [
        ("softmax_cross_entropy", (logits, labels)),
        ("softmax_cross_entropy_vjp", (g, logits, labels)),
    ]:
        np.testing.assert_allclose(native(name, *inputs), reference(name, *inputs), 2e-6, 1e-7)


# --- layer normalisation --------------------------------------------------------------


@FLOATS
@cases("rows", 1, 3, 5, 130, 1001)
def test_layer_norm_of_rows_of_any_length(dtype: Any, rows: int) -> None:
    for n in LENGTHS[1:] if rows < 1000 else LENGTHS[1:12]:
        x, g = random((rows, n), dtype) + 3, random((rows, n), dtype, 1)
        scale, bias = random((n,), dtype, 2), random((n,), dtype, 3)
        eps, tolerance = 0.1, 5e-6
        check("layer_norm", x, scale, bias, eps=eps, tolerance=tolerance)
        check("layer_norm_normalize", x, eps=eps, tolerance=tolerance)
        check("layer_norm_vjp", g, x, scale, eps=eps, tolerance=tolerance)
        check("layer_norm_scale_vjp", g, x, eps=eps, tolerance=tolerance * math.sqrt(rows))


@cases("value", NAN, INF, -INF)
def test_one_special_element_spoils_its_row_only(value: float) -> None:
    x, g = random((3, 40), np.float64), random((3, 40), np.float64, 1)
    x[1, 5] = value
    ones = np.ones(40)
    for name, inputs in [
        ("layer_norm", (x, ones, ones)), ("layer_norm_normalize", (x,)),
        ("layer_norm_vjp", (g, x, ones)), ("layer_norm_scale_vjp", (g, x)),
    ]:  # fmt: skip
        expected = reference(name, *inputs, eps=1e-6)
        np.testing.assert_allclose(native(name, *inputs, eps=1e-6), expected, 1e-9, 1e-12)


def test_layer_norm_of_a_large_offset_keeps_its_digits() -> None:
    x = random((5, 700), np.float64) + 1e6
    expected = (x - 1e6) - (x - 1e6).mean(-1, keepdims=True)
    expected /= np.sqrt(np.square(expected).mean(-1, keepdims=True))
    np.testing.assert_allclose(native("layer_norm_normalize", x, eps=0.0), expected, 1e-7, 1e-7)


# --- halves ---------------------------------------------------------------------------


@cases("dtype", f16, bf16, ids=str)
def test_halves_have_the_bits_of_f32_rounded(dtype: DType) -> None:
    """They are widened for some rows at a time: of few and of many, short and long."""
    for rows, n in ((1, 5), (7, 2), (300, 33), (40, 1000), (3, 5000)):
        g, x, scale, bias = (
            half.cast(random(s, np.float32), dtype) for s in ((rows, n),) * 2 + ((n,),) * 2
        )
        one, labels = half.cast(random((rows,), np.float32), dtype), np.arange(rows) % n
        calls: list[tuple[str, tuple[Array, ...], dict[str, Any]]] = [
            *((name, (x,), {"axis": -1}) for name in ("softmax", "log_softmax", "logsumexp")),
            ("softmax_cross_entropy", (x, labels), {}),
            ("softmax_cross_entropy_vjp", (one, x, labels), {}),
            ("layer_norm", (x, scale, bias), {"eps": 1e-5}),
            ("layer_norm_normalize", (x,), {"eps": 1e-5}),
            ("layer_norm_vjp", (g, x, scale), {"eps": 1e-5}),
            ("layer_norm_scale_vjp", (g, x), {"eps": 1e-5}),
        ]
        if dtype is bf16:
            calls += [(name, (x,), {"axis": axis}) for name in ("sum", "mean") for axis in (0, 1)]
        for name, inputs, attributes in calls:
            wide = [half.widened(each) if half.is_half(each) else each for each in inputs]
            expected = half.cast(native(name, *wide, **attributes), dtype)
            result = on_threads(name, *inputs, **attributes)
            assert result.tobytes() == expected.tobytes(), (name, rows, n)


def test_a_label_that_is_none_is_refused_beside_halves() -> None:
    x = half.cast(random((3, 4), np.float32), bf16)
    refuses(OperandValueError, "", lambda: native("softmax_cross_entropy", x, np.array([0, 4, 1])))


@cases("dtype", f16, bf16, ids=str)
def test_a_half_beside_f32_is_widened_as_it_is_read(dtype: DType) -> None:
    for rows, n in ((1, 5), (7, 2), (300, 33), (40, 1000), (3, 5000)):
        g, x = random((rows, n), np.float32), half.cast(random((rows, n), np.float32, 1), dtype)
        scale, bias = random((n,), np.float32, 2), random((n,), np.float32, 3)
        wide, eps = half.widened(x), 1e-5
        expected = {
            "layer_norm": native("layer_norm", wide, scale, bias, eps=eps),
            "layer_norm_vjp": half.cast(native("layer_norm_vjp", g, wide, scale, eps=eps), dtype),
            "layer_norm_scale_vjp": native("layer_norm_scale_vjp", g, wide, eps=eps),
        }
        operands = (x, scale, bias), (g, x, scale), (g, x)
        for (name, value), inputs in zip(expected.items(), operands, strict=True):
            result = on_threads(name, *inputs, eps=eps)
            assert result.dtype == value.dtype
            assert result.tobytes() == value.tobytes(), (name, rows, n)
