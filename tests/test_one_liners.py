"""Habits of the first week work, or the error says what to write, which works when it is done."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.brief import cases
from tests.one_liners.__main__ import Row, judge, require_words, rows

ROWS = rows()


pytestmark = pytest.mark.usefixtures("folder_of_file")


@pytest.mark.parametrize("row", ROWS, ids=[row.lines[0] for row in ROWS])
def test_one_liner(row: Row) -> None:
    assert judge(row) == ("works" if len(row.lines) == 1 else "refused")


def test_most_of_them_work() -> None:
    lines = Counter(row.lines[0] for row in ROWS)
    assert set(lines.values()) == {1}
    assert {row.habit for row in ROWS} == {"np", "torch", "jax", "keras"}
    working = [row for row in ROWS if len(row.lines) == 1]
    assert len(ROWS) >= 700
    assert len(working) >= max(240, len(ROWS) * 2 / 3)


@cases("lines, value, text",
    (["x + 1"], "x", "Mismatched elements"),
    (["x.sum(0)"], "x.sum(0, keepdims=True)", "it gives"),
    (["x > 0"], "(x > 0) * 1.0", "it gives"),
    (["x.shape"], "(3, 2)", "it gives"),
    (["ml.random.normal(3)"], "f32[2]", "it gives"),
    (["x + 1", "x + 2"], "x + 2", "not refused"),
    (["ml.zeros(2, 3)", "ml.nothing((2, 3))"], "x", "lacks {'nothing'}"),
    (["x.view(6)", "x.reshape(5)"], "x", "f32"),
    (["ml.cat([x])", "ml.concat([x])"], "y", "Mismatched elements"),
)  # fmt: skip
def test_a_wrong_row_is_found(lines: list[str], value: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        judge(Row("", "np", tuple(lines), value))


def test_an_error_of_python_alone_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        judge(Row("", "np", ("x + 1 / 0", "x"), "x"))
    with pytest.raises(AssertionError, match="no attribute"):
        require_words("'int' object has no attribute 'sum'", "x.size.sum()", "x")
