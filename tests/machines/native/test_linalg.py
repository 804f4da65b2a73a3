"""Matrix products: against products in longer floats, and the same bits however divided."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType, aligned_array, bf16, f16
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import has_kernel, kernel_call
from mlvm.machines.native.planners.linalg import ProductChain, headed_call, matmul_chain
from tests.brief import cases
from tests.machines.native.planners import POOLS, links, native, on_threads, planned

DTYPES = ["float32", "float64"]
TRANSPOSITIONS = [(False, False), (False, True), (True, False), (True, True)]


def _noise(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def _swapped(x: Array, transpose: bool) -> Array:
    return x.swapaxes(-1, -2) if transpose else x


def _operands(
    m: int, k: int, n: int, tx: bool, ty: bool, dtype: str, batch: tuple[int, ...] = ()
) -> tuple[Array, Array, dict[str, Any]]:
    wide = "float32" if dtype == "bf16" else dtype
    x, y = _noise((*batch, m, k), wide), _noise((*batch, k, n), wide) + 1
    x, y = np.ascontiguousarray(_swapped(x, tx)), np.ascontiguousarray(_swapped(y, ty))
    if dtype == "bf16":
        x, y = half.cast(x, bf16), half.cast(y, bf16)
    return x, y, {"transpose_x": tx, "transpose_y": ty}


def _close(result: Array, x: Array, y: Array) -> None:
    """Within the error of a sum of k products, each rounded: about sqrt(k) roundings."""
    wide = np.longdouble if result.dtype == np.float64 else np.float64
    exact = x.astype(wide) @ y.astype(wide)
    size = np.abs(x.astype(wide)) @ np.abs(y.astype(wide))
    bound = size * float(np.finfo(result.dtype).eps) * (2 + np.sqrt(x.shape[-1]) / 2)
    assert result.shape == exact.shape
    assert (np.abs(result - exact) <= bound).all()


def _check(
    name: str, x: Array, y: Array, attributes: dict[str, Any], threads: tuple[int, ...] = (1,)
) -> None:
    result = on_threads(name, x, y, threads=threads, **attributes)
    x = _swapped(x, attributes["transpose_x"])
    y = _swapped(y, attributes["transpose_y"])
    if name == "batch_contract":
        batch = math.prod(x.shape[:-2])
        x = np.concatenate(x.reshape(batch, *x.shape[-2:]), axis=1)
        y = np.concatenate(y.reshape(batch, *y.shape[-2:]), axis=0)
    _close(result, x, y)


@cases("name", "matmul", "batch_contract")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
@given(
    batch=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    m=st.integers(1, 40),
    k=st.integers(0, 40),
    n=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_small(
    name: str, dtype: str, tx: bool, ty: bool, batch: list[int], m: int, k: int, n: int
) -> None:
    shape = tuple(batch if name == "batch_contract" else batch[1:])
    x, y, attributes = _operands(m, k, n, tx, ty, dtype, shape)
    _check(name, x, y, attributes)


LARGE = [
    (1, 700, 130), (130, 700, 1), (5, 353, 700), (300, 1000, 33), (49, 705, 260), (260, 31, 513),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
@pytest.mark.parametrize(("m", "k", "n"), LARGE)
def test_blocks(dtype: str, tx: bool, ty: bool, m: int, k: int, n: int) -> None:
    """Sums longer than a block, and more rows and columns than a strip and a panel have."""
    x, y, attributes = _operands(m, k, n, tx, ty, dtype)
    _check("matmul", x, y, attributes, (1, 2, 3, 5))


def test_more_than_is_copied_at_once() -> None:
    x, y, attributes = _operands(200, 1200, 3500, False, False, "float32")
    _check("matmul", x, y, attributes, (1, 2, 3, 5))
    x, y, attributes = _operands(100, 10000, 3, True, False, "float32")
    _check("matmul", x, y, attributes, (1, 2, 3, 5))


@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
@cases("x_batch, y_batch",
    ((3,), (3,)), ((), (3,)), ((3,), ()), ((1,), (4,)), ((2, 3), (2, 3)), ((2, 1), (3,)),
    ((2, 1, 4), (1, 3, 1)), ((2, 3), (1, 3)), ((0,), (0,)), ((5, 1), (0,)),
)  # fmt: skip
@cases("m, k, n", (5, 7, 19), (1, 9, 4), (6, 3, 1), (30, 0, 2))
def test_batches(tx: bool, ty: bool, x_batch: Any, y_batch: Any, m: int, k: int, n: int) -> None:
    x, _, attributes = _operands(m, k, n, tx, ty, "float32", x_batch)
    _, y, _ = _operands(m, k, n, tx, ty, "float32", y_batch)
    _check("matmul", x, y, attributes)


@cases("name", "matmul", "batch_contract")
@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
def test_a_batch_among_threads(name: str, tx: bool, ty: bool) -> None:
    for m, k, n in [(20, 30, 50), (60, 9, 31), (90, 8, 5), (1, 30, 600), (600, 30, 1), (90, 8, 1)]:
        x, y, attributes = _operands(m, k, n, tx, ty, "float32", (7,))
        _check(name, x, y, attributes, (1, 2, 3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@cases("x, y",
    ((9,), (9,)), ((9,), (9, 5)), ((5, 9), (9,)), ((2, 5, 9), (9,)), ((9,), (2, 9, 5)),
    ((0,), (0,)),
)  # fmt: skip
def test_vectors(x: tuple[int, ...], y: tuple[int, ...], dtype: str) -> None:
    a, b = _noise(x, dtype), _noise(y, dtype)
    assert planned("matmul", a, b)
    _close(native("matmul", a, b), a, b)


@cases("ty", False, True)
@pytest.mark.parametrize("dtype", DTYPES)
@cases("k, n", (40, 23), (720, 300), (64, 1))
def test_a_row_alone_has_the_bits_it_has_among_others(k: int, n: int, dtype: str, ty: bool) -> None:
    x, y, attributes = _operands(150, k, n, False, ty, dtype)
    whole = native("matmul", x, y, **attributes)
    for rows in (slice(3, 4), slice(7, 12), slice(20, 80)):
        assert native("matmul", x[rows], y, **attributes).tobytes() == whole[rows].tobytes()


@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
@cases("m, k, n", (7, 5, 9), (1, 9, 21), (21, 37, 1), (50, 17, 130))
@cases("value", np.nan, np.inf, -np.inf)
def test_what_is_not_finite_stays_in_its_row_and_column(
    tx: bool, ty: bool, m: int, k: int, n: int, value: float
) -> None:
    x, y, attributes = _operands(m, k, n, tx, ty, "float32")
    x, y = _swapped(x, tx).copy(), _swapped(y, ty).copy()
    x[m // 2, k - 1] = value
    y[k // 2, n - 1] = value
    with np.errstate(all="ignore"):
        expected = x @ y
    x, y = np.ascontiguousarray(_swapped(x, tx)), np.ascontiguousarray(_swapped(y, ty))
    np.testing.assert_allclose(native("matmul", x, y, **attributes), expected, 1e-4, 1e-4)


# --- chains ------------------------------------------------------------------------------


def _chained(x: Array, y: Array, out: bool, threads: int, **attributes: bool) -> list[Array]:
    """x @ y, each of whose rows a second product multiplies with the matrix `then`."""
    types = [TensorType.of(x), TensorType.of(y)]
    op = OPS["matmul"]
    product = op.infer(types, op.bind(attributes))
    assert product is not None
    n = product.shape[-1]
    rows = product.size // n
    # A child whose unit is a row: a product of rows by a matrix, 4 or 5 parameters.
    then = _noise((n, 3), str(x.dtype))
    result, scratch = np.full((rows, 3), np.nan, x.dtype), aligned_array(product)
    parameters = [result, x, y, then, *([scratch] if out else [])]
    where = 4
    child = _rows_times(rows, n, 3, where, 3, len(parameters) + (not out), str(x.dtype))
    chain = ProductChain(child, len(parameters), 1, 2, where if out else None)
    call = matmul_chain(types[0], types[1], op.bind(attributes), chain)
    assert call is not None
    assert call.run(POOLS[threads], *parameters)
    return [result, scratch] if out else [result]


def _rows_times(m: int, k: int, n: int, x: int, y: int, nparams: int, dtype: str) -> KernelCall:
    """matmul's own kernel as a child: a unit is one row."""
    suffix = {"float32": "f32", "float64": "f64"}[dtype]
    integers = {"m": m, "n": n, "k": k, "groups": 1, "block": max(k, 1), "x": x, "y": y}
    integers |= {"x_row": k, "x_k": 1, "y_k": n, "y_column": 1, "unit": 1, "copy_y": 1}
    integers |= {"rows_at_once": 12, "columns_at_once": 32, "blocks_at_once": 1}
    integers |= {"out_row": n, "out_product": m * n}
    scratch = 32 * max(k, 1) * 8
    call = kernel_call(f"matmul_{suffix}", nparams, m, 0, integers, scratch=scratch)
    assert call is not None
    return call


@cases("out", True, False)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
@cases("batch", (), (3,))
@cases("m, k, n",
    (5, 4, 3), (150, 20, 40), (70, 720, 300), (230, 1000, 280), (230, 1000, 289), (4, 0, 5),
)  # fmt: skip
def test_chain(
    out: bool, dtype: str, tx: bool, ty: bool, batch: tuple[int, ...], m: int, k: int, n: int
) -> None:
    x, y, attributes = _operands(m, k, n, tx, ty, dtype, batch)
    runs = [_chained(x, y, out, threads, **attributes) for threads in (1, 3)]
    product = native("matmul", x, y, **attributes)
    rows = product.reshape(-1, n)
    then = native("matmul", rows, _noise((n, 3), dtype))
    for run in runs:
        assert run[0].tobytes() == then.tobytes()
        assert not out or run[1].tobytes() == product.tobytes()


HALVES = [(1, 706, 300), (1, 37, 5), (3, 17, 1), (5, 40, 33), (50, 705, 129), (200, 720, 40)]


@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
def test_bf16_is_read_as_it_is_added_in_f32_and_rounded_once(tx: bool, ty: bool) -> None:
    """With whole pairs in a sum, and without."""
    for m, k, n in HALVES:
        x, y, attributes = _operands(m, k, n, tx, ty, "bf16")
        narrow = on_threads("matmul", x, y, threads=(1, 2, 3, 5), **attributes)
        a = _swapped(half.widened(x), tx).astype(np.float64)
        b = _swapped(half.widened(y), ty).astype(np.float64)
        exact, size, result = a @ b, np.abs(a) @ np.abs(b), half.widened(narrow)
        assert (np.abs(result - exact) <= np.abs(exact) * 2**-8 + size * 3e-6).all()
        rows = slice(m // 3, m // 3 + 1 + m // 4)
        part = np.ascontiguousarray(x[:, rows] if tx else x[rows])
        alone = native("matmul", part, y, **attributes)
        assert alone.tobytes() == narrow[rows].tobytes()


@pytest.mark.skipif(has_kernel("matmul_bf16_amx"), reason="tiles of AMX add in another order")
@cases("ty", False, True)
def test_a_row_of_bf16_has_the_bits_of_f32_rounded_once(ty: bool) -> None:
    """Columns are taken apart, as many as are loaded at once, and come together again."""
    for k in (1, 15, 37, 705):  # no whole pairs
        for n in (2, 7, 9, 15, 16, 17, 31, 33, 40, 63, 64, 65, 129, 300, 2100):
            x, y, attributes = _operands(1, k, n, False, ty, "bf16")
            wide = native("matmul", half.widened(x), half.widened(y), **attributes)
            result = on_threads("matmul", x, y, **attributes)
            assert result.tobytes() == half.cast(wide, bf16).tobytes()


ROUNDED = [(2, 1, 3), (5, 37, 33), (13, 15, 16), (31, 351, 65), (50, 705, 129), (210, 353, 40)]


@pytest.mark.skipif(has_kernel("matmul_bf16_amx"), reason="tiles of AMX add in another order")
@pytest.mark.parametrize(("tx", "ty"), TRANSPOSITIONS)
def test_products_of_bf16_are_those_of_f32_rounded_once(tx: bool, ty: bool) -> None:
    """In one block of k and in several, with an odd number of products: no whole pairs."""
    for m, k, n in ROUNDED:
        x, y, attributes = _operands(m, k, n, tx, ty, "bf16", (3,))
        x[0].flat[-1], y[1].flat[0] = half.cast(np.array([np.inf, np.nan]), bf16)
        for name in ("matmul", "batch_contract"):
            wide = native(name, half.widened(x), half.widened(y), **attributes)
            expected = half.cast(wide, bf16)
            result = on_threads(name, x, y, **attributes)
            nans = np.isnan(half.widened(expected))
            assert np.isnan(half.widened(result[nans])).all()
            assert result[~nans].tobytes() == expected[~nans].tobytes()


@cases("dtype", *DTYPES, "bf16")
@cases("tx", False, True)
def test_a_matrix_that_is_repeated_is_copied_once(tx: bool, dtype: str) -> None:
    """Each product of a batch has the bits that it has alone, also if it is of several strips."""
    for m, k, n in [(7, 20, 40), (32, 16, 300), (230, 16, 200), (230, 401, 20)]:
        (x, *_), y, attributes = _operands(m, k, n, tx, False, dtype, (4,))
        alone = [native("matmul", x, each, **attributes) for each in y]
        result = on_threads("matmul", x, y, threads=(1, 2, 3, 5), **attributes)
        assert result.tobytes() == np.stack(alone).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_has_the_same_bits_by_a_transposed_matrix(dtype: str) -> None:
    """So long that it is gone through in several spans."""
    x, y, attributes = _operands(1, 9001, 21, False, True, dtype)
    turned = native("matmul", x, np.ascontiguousarray(y.T), transpose_x=False, transpose_y=False)
    assert native("matmul", x, y, **attributes).tobytes() == turned.tobytes()


@cases("m, k, n", (20, 30, 50), (1, 17, 33), (33, 17, 1), (5, 0, 3))
def test_a_small_product_of_f16_is_that_of_f32_rounded_once(m: int, k: int, n: int) -> None:
    """One of f16 by f32 is f32."""
    for tx, ty in TRANSPOSITIONS:
        x, y, attributes = _operands(m, k, n, tx, ty, "float32", (3,))
        x, narrow = half.cast(x, f16), half.cast(y, f16)
        for name, z in (("matmul", narrow), ("batch_contract", narrow), ("matmul", y)):
            wide = half.widened(z) if z is narrow else z
            expected = native(name, half.widened(x), wide, **attributes)
            expected = half.cast(expected, f16) if z is narrow else expected
            assert on_threads(name, x, z, **attributes).tobytes() == expected.tobytes()


def test_a_chain_on_a_product_of_bf16_has_the_bits_of_its_links() -> None:
    x, y, _ = _operands(50, 64, 40, False, False, "bf16")
    bias = half.cast(_noise((40,)), bf16)
    product = native("matmul", x, y)
    out = aligned_array(TensorType.of(product))
    chain = links(("matmul", -1, 1, 2), ("add", 0, -1, 3))
    call = headed_call(chain, [TensorType.of(each) for each in (out, x, y, bias)])
    assert call is not None
    assert call.run(POOLS[2], out, x, y, bias)
    assert out.tobytes() == native("add", product, bias).tobytes()
