"""Rows of elementwise ops: the file that C includes is generated from them."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.op import OPS
from mlvm.machines.native import elementwise_rows
from mlvm.machines.native.elementwise_rows import FILE, FLOAT, KINDS, SECTIONS, Row, native_rows
from tests.brief import Patch, refuses
from tests.machines.native.planners import assert_planned


def test_the_file_in_c_is_generated_from_the_rows() -> None:
    assert FILE.read_text("ascii") == native_rows()


def test_rows_name_ops_and_an_op_has_one_row_for_each_kind_and_form() -> None:
    rows = [
        (row.form, row.name, kind) for kinds, group in SECTIONS for row in group for kind in kinds
    ]
    internal = {"gelu_tanh", "gelu_erf", "gelu_tanh_slope", "gelu_erf_slope"}  # forms of `gelu`
    assert {name for _, name, _ in rows} - internal <= OPS.keys()
    assert len(set(rows)) == len(rows)
    assert {kind for *_, kind in rows} == {*KINDS}


def test_two_rows_of_an_op_for_one_kind_are_refused(monkeypatch: Patch) -> None:
    rows = [((FLOAT,), [Row("UNARY", "negative", "SIMPLE", "0 - x")])]
    monkeypatch.setattr(elementwise_rows, "SECTIONS", [*SECTIONS, *rows])
    refuses(ValueError, "expected one row of negative for float dtypes, got several", native_rows)


def test_a_missing_row_is_named() -> None:
    with pytest.raises(AssertionError, match="no native row of isnan for i64"):
        assert_planned("isnan", np.arange(3))
