"""Native row functions: numpy's bits, or the true values where numpy rounds elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import OpError
from mlvm.core.op import OPS
from mlvm.core.ops.half import widened
from mlvm.core.types import Array, DType, TensorType, bf16
from tests.brief import cases
from tests.machines.native.planners import assert_planned, native, planned, reference
from tests.ulp import FUNCTIONS, errors, limit

SIZES = (0, 1, 7, 17, 255, 1024, 1025, 4099)
FLOATS = ("f32", "f64")
_NUMPYS = (
    "asin acos atan atan2 hypot sinh cosh asinh acosh atanh nextafter imag erfc erfinv lgamma "
    "digamma erfcinv j0 j1 y0 y1 i1 gammainc gammaincc gamma_density gammainc_slope beta betainc "
    "beta_density betainc_slope"
)
EXACT = [
    op.name
    for op in OPS.values()
    if op.elementwise
    and op.in_place
    and op.name not in {*FUNCTIONS, "pow", "logaddexp", *_NUMPYS.split()}
]
REAL = [d for d in DType.all.values() if d.kind != "complex" and not d.is_half]
"""numpy computes with complex numbers. The cases of every op show that no kernel misreads them."""


def special(dtype: DType) -> Array:
    """Values where something is particular."""
    if dtype.is_float:
        info = np.finfo(dtype.numpy.name)
        small = [0.0, float(info.smallest_subnormal), float(info.tiny), float(info.eps)]
        large = [float(info.max), math.inf, math.nan, 2.0**24, 2.0**31, 2.0**53, 1e10]
        values = [*small, *large, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 100.0]
        return np.array([*values, *[-x for x in values]]).astype(dtype.numpy)
    if dtype.kind == "bool":
        return np.array([False, True])
    bounds = np.iinfo(dtype.numpy.name)
    values = [
        bounds.min, bounds.min + 1, 0, 1, 2, 3, 7, bounds.max // 2, bounds.max - 1, bounds.max,
    ]  # fmt: skip
    return np.array(values + ([-1, -2, -7] if bounds.min else []), dtype.numpy)


def pairs(dtype: DType, count: int) -> list[Array]:
    """All combinations of special values."""
    values = special(dtype)
    product = np.array([*itertools.product(values, repeat=min(count, 2))], values.dtype)
    columns = [np.ascontiguousarray(column) for column in product.T]
    return [*columns, *[np.roll(columns[0], 3)] * (count - len(columns))]


def assert_same(result: Array, expected: Array) -> None:
    """Equal bits, but for those of nans."""
    np.testing.assert_array_equal(result, expected)
    if result.dtype.kind == "f":
        real = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(result[real]), np.signbit(expected[real]))


def _maximum(x: Array, y: Array) -> Array:
    return np.where((x > y) | np.isnan(x), x, y)


def _minimum(x: Array, y: Array) -> Array:
    return np.where((x < y) | np.isnan(x), x, y)


ORDER: dict[str, Callable[..., Array]] = {
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": lambda x, lower, upper: _minimum(_maximum(x, lower), upper),
}
"""Of zeros of both signs the second one: numpy's choice is the processor's."""


def accepts(name: str, operands: list[Array]) -> bool:
    try:
        return OPS[name].infer([TensorType.of(x) for x in operands], {}) is not None
    except OpError:
        return False


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_has_numpys_bits_for_special_values(name: str, dtype: DType) -> None:
    operands = pairs(dtype, len(OPS[name].inputs))
    if name == "where":
        operands = [pairs(dtype, 2)[0] > pairs(dtype, 2)[1], *pairs(dtype, 2)]
    if not accepts(name, operands):
        return
    if dtype.is_integer and name in ("isnan", "isinf", "isfinite"):
        assert not planned(name, *operands)
        return
    assert_planned(name, *operands)
    ordered = ORDER.get(name) if dtype.is_float else None
    expected = reference(name, *operands) if ordered is None else ordered(*operands)
    assert_same(native(name, *operands), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_has_numpys_bits_for_any_size(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for dtype in REAL:
        drawn = np.clip(rng.standard_normal((3, size)) * 50, -100, 100)
        operands = [*drawn.astype(dtype.numpy)][: len(OPS[name].inputs)]
        if dtype.kind == "unsigned":
            operands = [*np.abs(drawn).astype(dtype.numpy)][: len(OPS[name].inputs)]
        if name == "where":
            operands[0] = operands[0] > 0
        if accepts(name, operands) and planned(name, *operands):
            assert_same(native(name, *operands), reference(name, *operands))


@cases("x, y", *itertools.product(REAL, repeat=2), ids=str)
def test_converts_as_the_reference(x: DType, y: DType) -> None:
    values = special(x)
    for operand in (values, np.resize(values, 1000)):
        assert_planned("astype", operand, dtype=y.name)
        result = native("astype", operand, dtype=y.name)
        assert_same(result, reference("astype", operand, dtype=y.name))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pow_is_cs(dtype: str) -> None:
    x, y = pairs(DType.named(dtype), 2)
    tolerance = 1e-6 if dtype == "f32" else 1e-15
    np.testing.assert_allclose(native("pow", x, y), reference("pow", x, y), rtol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@cases("name", "floor_divide", "remainder")
def test_divisions_have_numpys_bits(name: str, dtype: str) -> None:
    """At whole quotients of any size and beside them, and of special values: some are exact, some
    go the long way, alone and beside others in a block."""
    rng, of = np.random.default_rng(5), DType.named(dtype).numpy
    for digits in (0, 3, 12, 28):
        y = (rng.normal(size=2000) * 10.0 ** rng.uniform(-digits, digits, 2000)).astype(of)
        x = (y * np.round(rng.normal(size=2000) * 10.0 ** rng.uniform(0, 9, 2000))).astype(of)
        away = rng.normal(size=2000).astype(of)
        for dividend in (x, np.nextafter(x, y), np.nextafter(x, -y), away, x[::-1].copy()):
            assert_same(native(name, dividend, y), reference(name, dividend, y))
    # In a block with others, one that goes the long way takes all with it: here each is alone.
    x, y = pairs(DType.named(dtype), 2)
    expected = reference(name, x, y)
    quotients = [native(name, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    assert_same(np.concatenate(quotients), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_logaddexp_is_numpys(dtype: str) -> None:
    x, y = pairs(DType.named(dtype), 2)
    near = np.random.default_rng(3).normal(size=(2, 999)).astype(x.dtype) * 9
    for operands in ((x, y), tuple(near), (near[0], near[0]), (near[0][:9], near[1][:9])):
        assert_planned("logaddexp", *operands)
        tolerance = 8 * float(np.finfo(x.dtype).eps)
        expected = reference("logaddexp", *operands)
        result = native("logaddexp", *operands)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@cases("name", "add", "less", "maximum", "multiply")
def test_promotes_operands(name: str) -> None:
    for x, y in itertools.product(REAL, repeat=2):
        operands = [np.resize(special(x), 1500), np.resize(special(y), (3, 1))]
        operands[0] = operands[0].reshape(3, 500)
        if accepts(name, operands):
            assert_planned(name, *operands)
            assert_same(native(name, *operands), reference(name, *operands))


# --- elementary functions ------------------------------------------------------------


def test_f32_functions_are_as_accurate_as_promised() -> None:
    for name, (error, x) in zip(FUNCTIONS, errors([*FUNCTIONS], 4097, 0, 32), strict=True):
        assert error <= limit(name), (name, error, x)


def true_values(name: str, x: Array) -> Array:
    """In 80-bit arithmetic, or by C's erfc, rounded to f64."""
    wide = x.astype(np.longdouble)
    if name == "sigmoid":
        result = 1 / (1 + np.exp(-wide))
    elif name == "erf":
        result = np.array([math.erf(each) for each in x], np.longdouble)
    elif name == "gelu_erf":
        z = -wide / np.sqrt(np.longdouble(2))
        short = z.astype(np.float64)  # C's function takes no more digits
        slope = -2 / np.sqrt(np.longdouble(np.pi)) * np.exp(-(short.astype(np.longdouble) ** 2))
        tails = np.array([math.erfc(each) for each in short], np.longdouble)
        result = wide * (tails + (z - short) * slope) / 2
    elif name == "gelu_tanh":
        root = np.sqrt(2 / np.longdouble("3.14159265358979323846"))
        result = wide / (1 + np.exp(-2 * root * (wide + np.longdouble("0.044715") * wide**3)))
    else:
        result = getattr(np, name)(wide)
    return result


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "slope" not in name])
def test_f64_functions_are_within_4_ulp(name: str) -> None:
    if np.finfo(np.longdouble).nmant < 60:
        pytest.skip("no arithmetic of 80 bits here")
    rng = np.random.default_rng(1)
    signs = np.sign(rng.standard_normal(20000))
    sizes = signs * np.exp(rng.uniform(-40, 3, 20000))
    x = np.concatenate([sizes, rng.uniform(-2, 2, 20000), rng.uniform(-36, 20, 20000)])
    if name.startswith("log"):
        x = np.concatenate([np.abs(x), np.exp(rng.uniform(-700, 700, 20000)), [5e-324, 1e-310]])
    elif name in ("exp", "sigmoid", "expm1"):
        x = np.concatenate([x, rng.uniform(-740, 709, 20000)])
    elif name in ("sin", "cos", "tan"):  # the last is the f64 that is nearest to a zero of cos
        turns, huge = np.arange(1, 1_040_000, 97) * (np.pi / 4), np.exp(rng.uniform(10, 709, 5000))
        x = np.concatenate([x, turns, signs[:5000] * huge, [6381956970095103 * 2.0**797]])
    function = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        result, true = function(x), true_values(name, x)
        unit = np.spacing(np.maximum(np.abs(true.astype(np.float64)), np.finfo(np.float64).tiny))
        off = np.abs(result - true).astype(np.float64) / unit
    most = limit(name) + (4 if name == "gelu_erf" else 0)  # C's erfc has errors of its own
    off[np.isnan(true.astype(np.float64)) & np.isnan(result)] = 0
    worst = int(np.argmax(off))
    assert (off <= most).all(), (x[worst], off[worst])


@pytest.mark.parametrize("dtype", FLOATS)
@cases("name", *FUNCTIONS)
def test_functions_have_numpys_special_values(name: str, dtype: str) -> None:
    x = special(DType.named(dtype))
    attributes: dict[str, Any] = {}
    op, inputs = name, [x]
    if name.startswith("gelu"):
        attributes = {"approximate": name.endswith("tanh")}
        op = "gelu_slope" if "slope" in name else "gelu"
    result, expected = native(op, *inputs, **attributes), reference(op, *inputs, **attributes)
    assert_planned(op, *inputs, **attributes)
    eps = float(np.finfo(x.dtype).eps)
    np.testing.assert_allclose(result, expected, rtol=64 * eps, atol=8 * eps)
    real = ~np.isnan(expected) & (np.abs(expected) > eps)
    np.testing.assert_array_equal(np.signbit(result[real]), np.signbit(expected[real]))


@cases("name", "exp", "expm1", "log1p", "tanh", "erf", "gelu_tanh", "gelu_erf", "sin", "tan")
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_element_has_the_same_bits_wherever_it_lies(name: str, dtype: str) -> None:
    function = FUNCTIONS[name]
    x = np.random.default_rng(2).standard_normal(100).astype(DType.named(dtype).numpy)
    x[::7] *= 1e7  # sin leaves some of these to the C library
    whole = function(x)
    for start, stop in ((0, 1), (1, 3), (3, 20), (20, 37), (37, 100)):
        assert function(x[start:stop].copy()).tobytes() == whole[start:stop].tobytes()


def test_f32_is_rounded_to_bf16_as_the_reference_does() -> None:
    """All upper halves, beside lower ones about the middle of two bf16."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        result, expected = (run("astype", x, dtype="bf16") for run in (native, reference))
        nans = np.isnan(x)
        assert result[~nans].tobytes() == expected[~nans].tobytes()
        assert np.isnan(widened(result[nans])).all()


@cases("name", "gelu", "gelu_slope")
def test_gelus_of_bf16_are_rounded_from_eight_digits_more(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits[widened(bits.view(bf16.numpy)) >= -10].view(bf16.numpy)
    with np.errstate(all="ignore"):
        true = native(name, widened(x).astype("f8"), approximate=True)
        result = widened(native(name, x, approximate=True))
        size = np.abs(true) if name == "gelu" else np.fmax(np.abs(true), 2.0**-4)
        off = np.abs(result - true) / np.fmax(size, 2.0**-126)
    off[result == true] = 0  # infinite
    assert float(np.nanmax(off)) <= 2.0**-8 * (1 + 2.0**-6)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(true))
