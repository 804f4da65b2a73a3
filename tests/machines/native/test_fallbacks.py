"""Ops whose types no kernel takes are computed in other dtypes."""

from __future__ import annotations

import pytest

from mlvm.core.op import OPS
from mlvm.core.types import TensorType
from mlvm.machines.native import extension
from tests.brief import cases

if extension.EXTENSION is None:
    pytest.skip("there are no native kernels", allow_module_level=True)
from mlvm.machines.native.fallbacks import fallback


@cases(
    "name, types, wide",
    ("sum", "i32 i32", "i64 i32"),
    ("sum", "u64 u64", "i64 u64"),
    ("matmul", "i8 i8 i8", "i64 i8 i8"),
    ("matmul", "i64 i8 i8", "i64 i64 i64"),
    ("matmul", "f32 f32 i32", "f32 f32 f32"),
    ("add", "bf16 bf16 i8", "f32 f32 i8"),
    ("add", "f64 f32 f64", "f64 f64 f64"),
    ("less", "bool f16 f16", "bool f32 f32"),
    ("less", "bool f16 f64", "bool f32 f64"),
    ("less", "bool f32 f64", "bool f64 f64"),
    ("add", "bf16 bf16 i32", ""),
    ("nextafter", "f16 f16 f16", ""),
    ("add", "f32 f32 f32", ""),
)
def test_the_types_in_which_an_op_is_computed(name: str, types: str, wide: str) -> None:
    found = fallback(OPS[name], [TensorType(each, (2, 2)) for each in types.split()], {})
    assert " ".join([each.dtype.name for each in found.types] if found else []) == wide


def test_the_attributes_of_an_op_that_is_computed_in_another_dtype() -> None:
    small, large = TensorType("f16", (2,)), TensorType("f64", (2,))
    named = fallback(OPS["sum"], [TensorType("f16"), large], {"dtype": "f16"})
    assert named is not None
    assert (named.types[0].dtype.name, named.attributes) == ("f64", {"dtype": "f64"})
    filled = fallback(OPS["pad"], [small, small], {"value": 1e-9})
    assert filled is not None
    assert filled.attributes["value"] == 0
