"""An elementwise op is written in few places: all else derives from them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.brief import IGNORED, ROOT, copied, output_of
from tests.test_packaging import HAS_COMPILER, QUICK

OP: Final = '''

@pointwise(infer=float_)
def cubed(out: Array, x: Array) -> None:
    """x * x * x, elementwise.

    >>> ml.cubed([1.0, -2.0])
    Tensor([ 1., -8.], f32[2])
    """
    wide = x.astype(out.dtype)
    np.multiply(wide * wide, wide, out)
'''
FIRST_OP: Final = "\n\n@pointwise("

WRITTEN: Final = {
    "mlvm/core/ops/elementwise.py": (FIRST_OP, OP + FIRST_OP),
    "mlvm/eager/autodiff/rules.py": (
        '    "square": {',
        '    "cubed": {"x": lambda g, x: g * (3.0 * op.square(x))},\n    "square": {',
    ),
    "mlvm/machines/native/elementwise_rows.py": (
        '            *_of("UNARY", "SIMPLE", negative="-x"',
        '            *_of("UNARY", "SIMPLE", cubed="x * x * x"),\n'
        '            *_of("UNARY", "SIMPLE", negative="-x"',
    ),
    "tests/cases/elementwise.py": (
        '    "expm1": [',
        '    "cubed": [*_unary(lambda v: v**3, _away(3, 4))],\n    "expm1": [',
    ),
}
"""What to replace, the first time it stands there, and by what, in each file."""

TESTS: Final = (
    "tests/walks/test_machines.py",
    "tests/core/ops/test_elementwise.py",
    "tests/core/ops/test_half.py",
    "tests/core/machine/test_fused.py",
    "tests/eager/autodiff/test_rules.py",
    "tests/eager/tensor/test_primitives.py",
    "tests/machines/native/test_elementwise.py",
    "tests/test_docstrings.py",
)


def test_the_example_in_contributing_is_this_op() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name, (_, new) in WRITTEN.items():
        assert f"`{name}`" in page
        [added] = [part for part in new.split("\n\n") if "cubed" in part][:1] or [""]
        for line in added.strip("\n").splitlines():
            assert "cubed" not in line or line.strip() in page


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
def test_an_op_with_gradient_native_row_and_test_is_written_in_five_files(tmp_path: Path) -> None:
    copy = copied(ROOT, tmp_path / "checkout", ".git", *IGNORED)
    assert len(WRITTEN) <= 5
    for name, (old, new) in WRITTEN.items():
        text = (copy / name).read_text("utf-8")
        assert old in text, name
        (copy / name).write_text(text.replace(old, new, 1), "utf-8")

    def ran(*command: str) -> str:
        variables = {"PYTHONPATH": str(copy), "MLVM_NATIVE": "1", **QUICK}
        return output_of(*command, cwd=copy, timeout=900, **variables)

    ran("-m", "mlvm.machines.native.elementwise_rows")
    ran("setup.py", "-q", "build_ext", "--inplace")
    output = ran(
        "-m",
        "pytest",
        "-vv",
        "-p",
        "no:cacheprovider",
        *TESTS,
        "-k",
        "cubed or docstrings or every or each",
    )
    assert output.count("cubed") > 20
    ran("-c", "from tests.machines.gpu.against import ELEMENTWISE; assert 'cubed' in ELEMENTWISE")
    ran("-m", "mlvm.eager.stub")
    assert "def cubed(x: Tensor, /" in (copy / "mlvm/eager/tensor/primitives.pyi").read_text(
        "utf-8"
    )
