"""A wrong call shows one error, which ends at the caller's line or close behind it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

import mlvm
import mlvm.eager as ml
from mlvm.core.errors import MlvmError

Calls: TypeAlias = dict[str, Callable[[], object]]

OURS: Final = str(Path(mlvm.__file__).parent)

untyped: Any = ml  # for calls that type checkers would refuse
matrix: Any = ml.ones((2, 3))
vector: Any = ml.ones((4,))
scalar: Any = ml.ones(())
integers: Any = ml.asarray([0, 1])
mask: Any = ml.asarray([True, False])
VIEW: Any = ml.reshape(matrix, -1)
with ml.Arena(ml.default_vm(), "gone"):
    stale: Any = ml.ones(3)


def add_in_place(x: Any, y: Any) -> None:
    x += y


def put(x: Any, y: Any) -> None:
    x[...] = y


# Operators and ops leave no frame of theirs.
DIRECT: Final[Calls] = {
    "+": lambda: matrix + vector,
    "+ of text": lambda: matrix + "a",
    "reflected +": lambda: None + integers,
    "add of a list": lambda: untyped.add([1, "a"], matrix),
    "==": lambda: matrix == vector,
    "@": lambda: matrix @ matrix,
    "-": lambda: -mask,
    "~": lambda: ~matrix,
    "** 2": lambda: mask**2,
    "** of shapes": lambda: matrix**vector,
    "+=": lambda: add_in_place(matrix, vector),
    "+= of a view": lambda: add_in_place(VIEW, vector),
    "[...] =": lambda: put(matrix, vector),
    "a stale operand": lambda: matrix + stale,
    "add": lambda: ml.add(matrix, vector),
    "add of nothing": lambda: untyped.add(),
    "add of no number": lambda: untyped.add(1, "2"),
    "an axis": lambda: ml.sum(matrix, axis=7),
    "an attribute": lambda: untyped.sum(matrix, axes=7),
    "an attribute's kind": lambda: untyped.sum(matrix, axis="a"),
    "a dtype": lambda: ml.sum(matrix, dtype="f99"),
    "out": lambda: ml.add(matrix, matrix, out=vector),
    "a captured op": lambda: ml.capture(lambda x: x + vector)(matrix),
}

# Others leave their own, and those of a helper that they share; the rest are lines of
# tests/cases/refused_calls.txt.
COMPOSED: Final[Calls] = {
    "a value": lambda: ml.softmax_cross_entropy(matrix, ml.asarray([7, 0])),
    "stale values": lambda: stale.numpy(),
    "len": lambda: len(scalar),
    "an index": lambda: [1, 2][matrix],
    "no method": lambda: matrix.sort(),
    "no function": lambda: untyped.cat(),
    "a cotangent": lambda: ml.vjp(ml.sum, matrix)[1](vector),
    "x[masks]": lambda: matrix[mask, mask],
    "x[a short mask]": lambda: matrix[mask[:1]],
    "iter": lambda: list(scalar),
    "bool": lambda: bool(matrix),
    "zeros_like": lambda: untyped.zeros_like("3"),
    "parameters": lambda: ml.nn.Linear(3, 4).load_parameters({}),
}


def full_arena() -> object:
    with ml.Arena(ml.default_vm(), "small", capacity=64):
        return [ml.ones(9), ml.ones(9)]


def closed_arena() -> object:
    arena = ml.Arena(ml.default_vm(), "closed")
    arena.close()
    with arena.allocating():
        return ml.ones(9)


# What allocates is called from several depths, and a VM may be behind several of its own.
DEEP: Final[Calls] = {
    "a full arena": full_arena,
    "a closed arena": closed_arena,
    "a handle": lambda: ml.VM("other").launch(ml.program_of(abs, matrix), [-1]),
    "call": lambda: ml.host_call("nobody registered this", matrix),
}


@pytest.mark.parametrize(
    ("call", "most"),
    [
        pytest.param(call, most, id=name)
        for calls, most in ((DIRECT, 0), (COMPOSED, 3), (DEEP, 7))
        for name, call in calls.items()
    ],
)
def test_an_error_stands_alone_and_ends_at_the_callers_line(
    call: Callable[[], object], most: int
) -> None:
    with pytest.raises((MlvmError, AttributeError)) as caught:
        call()
    assert_short(caught.value, most)


def assert_short(error: BaseException, most: int) -> None:
    """Check that an error has no other behind it, and at most so many frames of mlvm."""
    text = "".join(traceback.format_exception(error))
    assert "During handling" not in text
    assert "direct cause" not in text
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    callers = max(i for i, file in enumerate(files) if not file.startswith(OURS))
    assert len(files) - 1 - callers <= most, text
