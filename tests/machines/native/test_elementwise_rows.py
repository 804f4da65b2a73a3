"""Rows of elementwise ops: the file that C includes is generated from them."""

from __future__ import annotations

from mlvm.core.op import OPS
from mlvm.machines.native.elementwise_rows import FILE, KINDS, SECTIONS, native_rows


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
