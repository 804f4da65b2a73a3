"""Dtypes, promotion, and interned tensor types."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import DTypeError
from mlvm.core.types import DType, TensorType, bf16, f16, f32, f64, promote
from tests.brief import refuses
from tests.cases.claim_tests import claims
from tests.threads import in_threads

DTYPES = list(DType.all.values())
shapes = st.lists(st.integers(0, 1000), max_size=5).map(tuple)
tensor_types = st.builds(TensorType, st.sampled_from(DTYPES), shapes)


# --- tensor types ---------------------------------------------------------------------


@given(tensor_types)
def test_str_and_parse_are_inverse(type: TensorType) -> None:
    assert TensorType.parse(str(type)) is type


@given(tensor_types)
def test_copies_and_pickles_are_the_same_object(type: TensorType) -> None:
    assert pickle.loads(pickle.dumps(type)) is type
    assert copy.deepcopy(type) is copy.copy(type) is type


@given(st.sampled_from(DTYPES), shapes)
def test_equal_types_are_the_same_object(dtype: DType, shape: tuple[int, ...]) -> None:
    type = TensorType(dtype, shape)
    assert TensorType(dtype.name, list(shape)) is type
    assert TensorType(dtype.numpy, np.array(shape, np.int64)) is type  # type: ignore[arg-type]
    assert type.with_shape((7,)).with_shape(shape) is type
    assert type.with_dtype(f32).with_dtype(dtype) is type


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4))
def test_a_type_counts_as_numpy_does(dtype: DType, shape: list[int]) -> None:
    array = np.zeros(shape, dtype.numpy)
    type = TensorType.of(array)
    assert type is TensorType(dtype, shape)
    assert (type.shape, type.ndim) == (array.shape, array.ndim)
    assert (type.size, type.nbytes) == (array.size, array.nbytes)


def test_threads_that_make_the_same_type_at_once_share_it() -> None:
    barrier = threading.Barrier(4)

    def make(n: int) -> TensorType:
        barrier.wait()
        return TensorType(f32, (n,))

    for n in range(10**6, 10**6 + 50):
        [first, *others] = in_threads(make, [n] * 4)
        assert all(type is first for type in others)


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_by_all_its_names(dtype: DType) -> None:
    names: list[Any] = [dtype.numpy.type, dtype.numpy.name]
    if dtype is bf16:  # which numpy does not have; other libraries name it so
        names = ["bfloat16", type("bfloat16", (), {})]
    for name in (dtype, dtype.name, dtype.numpy, *names):
        assert DType.of(name, in_bits=True) is dtype
    assert DType.named(dtype.name) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is copy.deepcopy(dtype) is dtype
    assert dtype.itemsize == dtype.numpy.itemsize
    assert dtype.is_float == (dtype.numpy.kind == "f" or dtype is bf16)
    assert dtype.is_integer == (dtype.numpy.kind in "iu")


# --- promotion ------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "y"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_promotion_is_numpys_but_an_integer_widens_no_float(x: DType, y: DType) -> None:
    """The Array API's table, and what it leaves open; u64 beside signed integers is refused."""
    if bf16 in (x, y):  # as f16, but beside that
        assert {x, y} != {f16, bf16} or promote(x, y) is promote(y, x) is f32
        if {x, y} == {f16, bf16}:
            return
        other = promote(*[f16 if each is bf16 else each for each in (x, y)])
        assert promote(x, y) is (bf16 if other is f16 else other)
        return
    joined = DType.of(np.result_type(x.numpy, y.numpy))
    if x.is_inexact and y.is_integer:
        assert promote(x, y) is promote(y, x) is x
    elif y.is_inexact and x.is_integer:
        assert promote(x, y) is promote(y, x) is y
    elif x.is_inexact or y.is_inexact or not joined.is_inexact:
        assert promote(x, y) is promote(y, x) is joined
    else:
        assert {x.kind, y.kind} == {"signed", "unsigned"}
        refuses(DTypeError, f"{x!r} and {y!r} do not promote; convert one", promote, x, y)


@given(st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3))
def test_promotion_is_associative_where_it_exists(dtypes: list[DType]) -> None:
    x, y, z = dtypes
    try:
        left, right = promote(promote(x, y), z), promote(x, promote(y, z))
    except DTypeError:
        return
    assert left is right


def test_a_dtype_equals_what_it_can_be_made_of() -> None:
    for same in (f32, "f32", "float32", np.float32, np.dtype("f4")):
        assert f32 == same
        assert same == f32
        assert not f32 != same  # noqa: SIM202
    for other in (f64, "f64", np.float64, float, None, 4, "word"):
        assert f32 != other
    assert {f32: 1}[DType.named("f32")] == 1


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.4.0", reason="numpy does not ask")
@pytest.mark.parametrize("dtype", [dtype for dtype in DType.all.values() if dtype is not bf16])
def test_numpy_takes_a_dtype_for_its_own(dtype: DType) -> None:
    untyped: Any = dtype
    assert np.dtype(untyped) == dtype.numpy
    assert np.zeros(2, untyped).dtype == dtype.numpy


test_rows = claims("types", globals())
