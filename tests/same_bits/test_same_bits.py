"""A part of `python -m tests.same_bits`, and the digest of the fixed step."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.types import bf16
from mlvm.fixed_step import EXPECTED
from mlvm.machines.digest import digest
from mlvm.machines.native import extension
from tests.brief import ROOT, cases, output_of, with_long
from tests.same_bits.__main__ import differences, main, sets
from tests.same_bits.values import Value

SETS = [name for name, here in extension.simd_sets().items() if here]
EXACT = {
    *("view", "nonzero_indices", "boolean_index", "broadcast_to", "real", "imag", "conj"),
    *("pack", "unpack", "gather_lanes", "sum_lanes", "nextafter", "dequantize", "dequantize_rows"),
    *("astype", "gelu", "gelu_slope"),
}
"""Ops without a kernel of their name, whose results are exact or made by other native kernels."""
STEP = "from mlvm.fixed_step import fixed_step; print(fixed_step())"


@pytest.mark.skipif(len(sets()) < 2, reason="there is one instruction set")
def test_instruction_sets_give_the_same_bits(capfd: pytest.CaptureFixture[str]) -> None:
    few = with_long([], ["--every", "23", "--step", "lstm"])
    assert main(few) == 0, capfd.readouterr().out
    steps = with_long(66, 12)
    assert f", of {steps} steps, with {', '.join(sets())}\n0 differ\n" in capfd.readouterr().out


@cases("simd", *SETS)
def test_the_fixed_step_has_its_digest_with_each_set(simd: str) -> None:
    assert output_of("-c", STEP, MLVM_SIMD=simd, MLVM_NATIVE="1").strip() == EXPECTED


def test_the_first_difference_of_each_op_is_named() -> None:
    one = [
        Value("call 0", "sin(f32[3])", "a"),
        Value("call 1", "sin(f32[4])", "b"),
        Value("call 2", "exp(f32[3])", "c"),
        Value("mlp", "matmul.out(f32[2,2])", "d"),
    ]
    other = [*one[:1], one[1]._replace(digest="-"), one[2], one[3]._replace(digest="-")]
    assert [*differences(one, one)] == []
    expected = [("sin", "sin(f32[4])"), ("mlp", "matmul.out(f32[2,2])")]
    assert [*differences(one, other)] == expected


@cases("dtype", "f2", "f4", "f8", "c8", "c16", "bf16")
def test_all_nans_of_a_dtype_have_one_digest(dtype: str) -> None:
    def of(*values: float) -> bytes:
        x = np.array(values, np.float32)
        return digest(half.cast(x, bf16) if dtype == "bf16" else x.astype(dtype))

    assert of(1, np.nan, np.inf) == of(1, -np.nan, np.inf)
    digests = {of(1, x, np.inf) for x in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0)}
    assert len(digests) == 7


@pytest.mark.skipif(not SETS, reason="there are no native kernels")
def test_the_page_names_the_ops_that_numpy_computes() -> None:
    from mlvm.machines.native import _native
    from mlvm.machines.native import kernels as _fill_the_table  # noqa: F401
    from mlvm.machines.native.planner import PLANNERS

    rows = {row.rpartition("_")[0] for row in _native.rows()}
    by_numpy = {name for name, op in OPS.items() if name not in (rows if op.links else PLANNERS)}
    page = (ROOT / "docs" / "determinism.md").read_text("utf-8")
    table = page.partition("These ops are exceptions:")[2].partition("## Rows of a batch")[0]
    assert by_numpy > EXACT
    assert not [name for name in by_numpy - EXACT if f"`{name}`" not in table]
