"""Products of bf16 in the tiles of AMX where there are any, and in emulated ones: the copying, the
blocks, their borders and the threads are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import MachineError
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType, aligned_array, bf16
from mlvm.machines.native import extension
from tests.brief import Patch, cases, refuses
from tests.cases.claim_tests import claims
from tests.machines.native.planners import POOLS, links, prepared

if not extension.simd_sets().get("amx_emulated"):
    pytest.skip("this build or processor does not emulate AMX", allow_module_level=True)

from mlvm.machines.native import _native
from mlvm.machines.native.kernels import native_kernels
from mlvm.machines.native.planners.linalg import headed_call

SETS = [name for name in ("amx", "amx_emulated") if extension.simd_sets().get(name)]


MATMUL_ADD = links(("matmul", -1, 1, 2), ("add", 0, -1, 3))


@pytest.fixture(params=SETS, autouse=True)
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    used = _native.simd()
    assert _native.choose_simd(request.param)
    yield request.param
    assert _native.choose_simd(used)


def _noise(*shape: int) -> Array:
    return half.cast(np.random.default_rng(shape[0]).standard_normal(shape, np.float32), bf16)


def _number(value: float) -> Array:
    return half.cast(np.asarray(value, np.float32), bf16)


def _product(name: str, x: Array, y: Array, threads: int = 1, **attributes: Any) -> Array:
    """By the kernel of AMX."""
    arrays, bound = prepared(name, x, y, **attributes)
    kernel = native_kernels(POOLS[threads])[name]
    call = kernel.call([TensorType.of(array) for array in arrays], bound)  # type: ignore[attr-defined]
    assert call is not None
    assert call.kernel == "matmul_bf16_amx"
    assert call.run(POOLS[threads], *arrays)
    return arrays[0]


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _fma(x: Array, y: Array, z: Array) -> Array:
    """In f32. A product of two bf16 is exact in f64; their sum is rounded twice, which alters none
    of the operands' that are here."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _defined(x: Array, y: Array) -> Array:
    """The f32 sums of steps of 32 products, as Intel's manual defines TDPBF16PS."""
    x, y = _flushed(half.widened(x)), _flushed(half.widened(y))
    total = np.zeros((len(x), y.shape[1]), np.float32)
    for first in range(0, x.shape[1], 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(first, min(first + 32, x.shape[1])):
            sums[k % 2] = _flushed(_fma(x[:, k : k + 1], y[k], sums[k % 2]))
        total = _flushed(total + _flushed(sums[0] + sums[1]))
    return total


@cases("small", False, True)
def test_the_instruction_does_what_the_manual_says(small: bool) -> None:
    """Subnormal numbers among operands, products and sums are zeros."""
    x, y = _noise(20, 70), _noise(70, 37)
    if small:
        x, y = (half.cast(half.widened(z) * np.float32(5e-20), bf16) for z in (x, y))
        x[::3, ::5] = _number(1e-39)
        y[:, ::7] = _number(1e38)
    expected = half.cast(_defined(x, y), bf16)
    assert _product("matmul", x, y).tobytes() == expected.tobytes()
    assert small == (half.widened(expected) == 0).any()


@pytest.mark.skipif("amx" not in SETS, reason="no AMX here")
def test_true_and_emulated_tiles_have_the_same_bits() -> None:
    x, y, bits = _noise(70, 1100), _noise(1100, 90), set()
    x[::3, ::5] = _number(1e-39)
    for each in SETS:
        assert _native.choose_simd(each)
        bits.add(_product("matmul", x, y, 2).tobytes())
    assert len(bits) == 1


SHAPES = [(1, 706, 300), (1, 37, 5), (5, 40, 33), (48, 32, 16), (50, 705, 129), (290, 1100, 530)]


@cases("tx", False, True)
@cases("ty", False, True)
def test_a_product_is_within_its_roundings_and_the_same_however_divided(tx: bool, ty: bool) -> None:
    for m, k, n in SHAPES:
        x, y = _noise(m, k), _noise(k, n)
        exact = half.widened(x).astype(np.float64) @ half.widened(y)
        size = np.abs(half.widened(x)).astype(np.float64) @ np.abs(half.widened(y))
        a, b = (np.ascontiguousarray(z.T if t else z) for z, t in ((x, tx), (y, ty)))
        options = {"transpose_x": tx, "transpose_y": ty}
        results = [_product("matmul", a, b, threads, **options) for threads in (1, 2, 3, 5)]
        assert len({result.tobytes() for result in results}) == 1
        result = half.widened(results[0])
        assert (np.abs(result - exact) <= np.abs(exact) * 2**-8 + size * 1e-6).all()
        rows = slice(m // 3, m // 3 + 1 + m // 40)
        part = np.ascontiguousarray(a[:, rows] if tx else a[rows])
        alone = _product("matmul", part, b, **options)
        assert alone.tobytes() == results[0][rows].tobytes()


@cases("tx", False, True)
@cases("ty", False, True)
def test_batches_and_sums_over_them(tx: bool, ty: bool) -> None:
    x, y = _noise(7, 40, 30), _noise(7, 30, 50)
    a, b = (np.ascontiguousarray(z.swapaxes(1, 2) if t else z) for z, t in ((x, tx), (y, ty)))
    options = {"transpose_x": tx, "transpose_y": ty}
    exact = half.widened(x).astype(np.float64) @ half.widened(y)
    for name, expected in (("matmul", exact), ("batch_contract", exact.sum(0))):
        results = [_product(name, a, b, threads, **options) for threads in (1, 3)]
        assert results[0].tobytes() == results[1].tobytes()
        np.testing.assert_allclose(half.widened(results[0]), expected, 2**-7, 0.01)


@cases("m, k, n", (50, 64, 40), (1, 33, 48), (300, 1100, 70))
def test_a_chain_on_a_product_has_the_bits_of_its_links(m: int, k: int, n: int) -> None:
    x, y, bias = _noise(m, k), _noise(k, n), _noise(n)
    product = _product("matmul", x, y)
    arrays, _ = prepared("add", product, bias)
    native_kernels(POOLS[1])["add"](*arrays)
    for threads in (1, 3):
        out = aligned_array(TensorType.of(product))
        call = headed_call(MATMUL_ADD, [TensorType.of(each) for each in (out, x, y, bias)])
        assert call is not None
        assert call.kernel == "matmul_chain_bf16_amx"
        assert call.run(POOLS[threads], out, x, y, bias)
        assert out.tobytes() == arrays[0].tobytes()


def test_a_chain_on_a_product_without_columns() -> None:
    x, y, bias = _noise(50, 13), _noise(13, 0), _noise(0)
    out = aligned_array(TensorType(bf16, (50, 0)))
    call = headed_call(MATMUL_ADD, [TensorType.of(each) for each in (out, x, y, bias)])
    assert call is None or call.run(POOLS[1], out, x, y, bias)


def test_a_system_that_refuses_the_registers_is_told_of(monkeypatch: Patch) -> None:
    monkeypatch.setattr(extension, "simd_sets", lambda: {"amx": False, "plain": True})
    monkeypatch.setattr(extension.EXTENSION, "simd_refused", lambda name: name == "amx")
    monkeypatch.setenv("MLVM_SIMD", "amx")
    text = "^MLVM_SIMD=amx: the operating system does not save its registers; available are plain$"
    refuses(MachineError, text, extension.is_native, None)
    assert not extension.is_native(False)


test_rows = claims("amx", globals())
