"""Programs as bytes: they come back as they were, and other bytes are refused."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import DTypeError, EncodingError, MlvmError, ProgramError
from mlvm.core.op import MAX_NESTING
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.program.program import STAR, Function, Program
from mlvm.core.types import DType, TensorType, f32
from mlvm.core.vm import VM
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.program.test_assembly import programs
from tests.core.programs import code, f32s
from tests.fuzz.mutations import assert_well_refused, framed

HEADER = 16

# --- what a program may hold ---------------------------------------------------------

texts = st.text(st.characters(), max_size=8)  # lone surrogates too
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        texts,
        st.sampled_from(list(DType.all.values())),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
    ),
    max_leaves=6,
)


# --- there and back ------------------------------------------------------------------


@given(programs())
def test_a_program_comes_back_as_it_was(program: Program) -> None:
    data = program.to_bytes()
    again = Program.from_bytes(data)
    assert again == program
    assert again.to_bytes() == data
    assert repr(list(again.functions.values())) == repr(list(program.functions.values()))


@given(values)
def test_a_value_comes_back_with_its_kind(value: Any) -> None:
    again = there_and_back(value)
    assert again == value
    assert repr(again) == repr(value)


def test_arrays_come_back_in_memory_of_their_own() -> None:
    writer = Writer()
    writer.array(np.arange(6, dtype=np.int16).reshape(2, 3).T)
    _, reader = open_message(writer.message(Kind.answer), Kind.answer)
    array = reader.array()
    np.testing.assert_array_equal(array, [[0, 3], [1, 4], [2, 5]])
    assert array.dtype == np.int16
    assert array.flags.c_contiguous
    array[...] = 0  # writeable


def there_and_back(value: Any) -> Any:
    writer = Writer()
    writer.value(value)
    _, reader = open_message(writer.message(Kind.answer), Kind.answer)
    again = reader.value()
    reader.end()
    return again


# --- what has no encoding ------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_the_deepest_value() -> None:
    assert there_and_back(nested(MAX_NESTING)) == nested(MAX_NESTING)


def test_fields_refuse_other_values() -> None:
    with pytest.raises(EncodingError, match="expected an integer, got 'x'"):
        Writer().integer("x")  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="expected a tensor type, got 'f32'"):
        Writer().type("f32")  # type: ignore[arg-type]
    refuses(
        EncodingError, r"expected fewer than 2\*\*32 items or bytes", lambda: Writer().count(2**32)
    )
    refuses(DTypeError, "no dtype for dtype", lambda: Writer().array(np.zeros(2, np.longdouble)))


# --- bytes that are no program -------------------------------------------------------

MAIN = code(("load_arg", 0), ("push_str", "sum"))
MAIN += code(("cfunc", 1, 1, {"axis": (0, None), "keepdims": True}), ("jump_if_false", 0))
MAIN += code(("push_const", "c"), "halt")
DOUBLE = Function("double", 1, 1, code(("get", -1), ("return", 1)))
CONSTANTS = {"c": f32s(1, 2), "mask": np.array([True, False])}
PROGRAM = Program([DOUBLE, Function("main", 0, STAR, MAIN)], CONSTANTS)
DATA = PROGRAM.to_bytes()


def with_header(payload: bytes, magic: bytes = b"MLVM", version: int = 1, kind: int = 1) -> bytes:
    return struct.pack("<4sHHQ", magic, version, kind, len(payload)) + payload


def text(string: str) -> bytes:
    return struct.pack("<I", len(string)) + string.encode()


def of_code(code: bytes) -> bytes:
    """A program that is one `main` with these bytes as its code."""
    return with_header(b"\1\0\0\0" + text("main") + b"\1\0" + b"s" + text("*") + code + bytes(4))


def of_constant(array: bytes) -> bytes:
    main = text("main") + b"\1\0" + b"i\1\0" + bytes(4)
    return with_header(b"\1\0\0\0" + main + b"\1\0\0\0" + text("c") + array)


@cases("data", None, "MLVM", 3, [77])
def test_what_is_no_bytes(data: Any) -> None:
    refuses(EncodingError, "expected bytes, got ", Program.from_bytes, data)


def test_every_beginning_is_refused() -> None:
    for n in range(len(DATA)):
        refuses(EncodingError, "", Program.from_bytes, DATA[:n])
        refuses(EncodingError, "", Program.from_bytes, with_header(DATA[HEADER : max(n, HEADER)]))


@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1))
def test_changed_bytes_are_refused_or_a_program(changes: list[tuple[int, int]]) -> None:
    """Never another error, and what is read can be verified and launched or refused."""
    data = bytearray(DATA)
    for at, byte in changes:
        data[at] = byte
    check(bytes(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_a_program(payload: bytes) -> None:
    check(with_header(payload))


def test_mutations() -> None:
    parts = [(DATA, bytes), (DATA[HEADER:], framed(Kind.program))]
    assert_well_refused(parts, Program.from_bytes, (EncodingError, ProgramError))


def check(data: bytes) -> None:
    try:
        program = Program.from_bytes(data)
    except (EncodingError, ProgramError):
        return
    assert Program.from_bytes(program.to_bytes()).to_bytes() == program.to_bytes()
    vm = VM()
    with contextlib.suppress(MlvmError):
        vm.launch(program, [vm.alloc_tensor(TensorType(f32, (2,)))], max_steps=100)


test_rows = claims("encoding", globals())
