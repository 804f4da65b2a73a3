"""Each row of tests/cases/functions.txt: values beside numpy in all floats, gradients beside
slopes, and that captured it has the bits of eager calls.

Halves have the bits of f32 rounded once, and arrays those of tensors."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array, DType
from mlvm.eager.tensor.reading import values_of
from tests.brief import with_long
from tests.cases.tables import FUNCTIONS, Row, flat
from tests.slopes import check_slopes
from tests.trees import assert_close

TOLERANCE: Final = {"f64": 1e-11, "f32": 3e-5, "f16": 2e-3, "bf16": 1.6e-2}
WAYS: Final = [("f32", False), ("bf16", False), ("f64", True)]
"""Dtypes and `fuse` in which a row is captured: in one of them, with `--long` in each."""

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def chosen(*words: str, first: bool = False, made: bool = False) -> pytest.MarkDecorator:
    """Rows without these words, those with operands or also those `made` of none; of each line
    all, or the first."""
    suited = [row for row in FUNCTIONS if (row.operands or made) and not row.words & {*words}]
    suited = [row for row in suited if row.first or not first]
    return pytest.mark.parametrize("row", suited, ids=[row.call for row in suited])


def dtypes(row: Row) -> list[str]:
    if not row.operands:
        return ["f32"]
    alone = row.words & {"f32", "f64"}
    if alone:
        return [*alone]
    is_wide = "wide" in row.words or any(x.dtype.kind == "c" for x in row.operands.values())
    return ["f64", "f32"] if is_wide else [*TOLERANCE]


def operands(row: Row, dtype: str, then: str | None = None) -> list[ml.Tensor]:
    """The operands with their floats in that dtype, and those `then` in another."""
    narrow = {"f": dtype, "c": "c128" if dtype == "f64" else "c64"}
    xs = [ml.asarray(x).astype(narrow.get(x.dtype.kind, x.dtype)) for x in row.operands.values()]
    return [x.astype(then) if then and x.dtype.is_half else x for x in xs]


def words(x: Any) -> Any:
    return (x.type, values_of(x).tobytes()) if isinstance(x, ml.Tensor) else x


def kind(expected: Array, row: Row, dtype: str) -> Any:
    """Return the dtype of a result: that of the floats, but of what has none."""
    if expected.dtype.kind not in "fc" or not row.operands or expected.dtype == np.float32:
        return expected.dtype
    if expected.dtype.kind == "c":
        return np.dtype("c16" if dtype == "f64" else "c8")
    return DType.named(dtype).numpy


@chosen("slopes", made=True)
@quiet
def test_values_are_numpys(row: Row) -> None:
    few = None if row.first else with_long(2, None)  # halves for the first choice of a line
    for dtype in dtypes(row)[:few]:
        tensors = operands(row, dtype)
        wide = [x.numpy() for x in tensors]
        wide = [
            x.astype({"f": "f8", "V": "f8", "c": "c16"}.get(x.dtype.kind, x.dtype)) for x in wide
        ]
        results = flat(row.ours(*tensors))
        if dtype in ("f16", "bf16") and "composed" not in row.words:
            for result, x in zip(
                results, flat(row.ours(*operands(row, dtype, "f32"))), strict=True
            ):
                is_wide = getattr(x, "dtype", None) is ml.float32
                assert words(result) == words(x.astype(dtype) if is_wide else x)
            continue
        if dtype == "f32" and row.first and row.call.startswith(("f.", "ml.")):
            for result, again in zip(
                results, flat(row.ours(*[x.numpy() for x in tensors])), strict=True
            ):
                assert words(result) == words(again)
        pairs = zip(results, row.expected(*wide), strict=True)
        for result, reference in pairs:
            expected = np.asarray(reference)
            values = result.numpy() if isinstance(result, ml.Tensor) else np.asarray(result)
            own = result.dtype.numpy if isinstance(result, ml.Tensor) else values.dtype
            assert (own, values.shape) == (kind(expected, row, dtype), expected.shape)
            if expected.dtype.kind not in "fc":
                np.testing.assert_array_equal(values, expected)
                continue
            finite = np.abs(expected[np.isfinite(expected)])
            size = max(1.0, finite.max(initial=0.0)) * TOLERANCE[dtype]
            wider = values.astype("c16" if values.dtype.kind == "c" else "f8")
            np.testing.assert_allclose(wider, expected, rtol=TOLERANCE[dtype], atol=size / 10)


@chosen("flat", "dynamic", "f32")
def test_gradients_are_slopes(row: Row) -> None:
    order = 2 if "twice" in row.words else 1
    check_slopes(row.ours, *operands(row, "f64"), order=order, tolerance=1e-5)


@chosen("dynamic", first=with_long(True, False))
@quiet
def test_captured_it_has_the_bits_of_eager_calls(row: Row) -> None:
    ours, smooth = row.ours, not row.words & {"flat", "f32"}

    def step(*xs: ml.Tensor) -> Any:
        if not smooth:
            return flat(ours(*xs))
        ys, pullback = ml.vjp(lambda *xs: [y for y in flat(ours(*xs)) if y.dtype.is_inexact], *xs)
        return *ys, *pullback([ml.cos(y) for y in ys])

    usual = [each for each in WAYS if each[0] in dtypes(row)]
    for dtype, fuse in with_long([usual[len(row.call) % len(usual)]], usual):
        captured = ml.capture(step, fuse=fuse)
        for _ in range(2):
            xs = operands(row, dtype)
            assert_close(step(*xs), captured(*xs), 1e-11 * fuse, 1e-13 * fuse)
