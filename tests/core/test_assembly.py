"""The text of programs, instructions and constants."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.assembly import disassemble, format_constant, format_instruction
from mlvm.core.program import Function, Opcode, Program
from mlvm.core.types import DType, f32
from tests.core.programs import f32s, instruction, straight


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("halt",), "halt"),
        (("push_int", -5), "push_int -5"),
        (("push_str", "mean"), 'push_str "mean"'),
        (("push_str", 'a "b"\n; é'), r'push_str "a \"b\"\n; \u00e9"'),
        (("push_const", "two"), "push_const two"),
        (("load_arg", 3), "load_arg 3"),
        (("load_global",), "load_global"),
        (("store_global",), "store_global"),
        (("get", -1), "get -1"),
        (("set", 2), "set 2"),
        (("pop", 1), "pop 1"),
        (("cfunc", 2, 1), "cfunc 2 1"),
        (("cfunc", "*", "*"), "cfunc * *"),
        (("call", "square"), "call square"),
        (("return", 1), "return 1"),
        (("jump", 7), "jump L7"),
        (("jump_if_false", 0), "jump_if_false L0"),
    ],
)
def test_every_instruction(words: tuple[Any, ...], text: str) -> None:
    assert format_instruction(instruction(*words)) == text


def test_every_instruction_is_tested_above() -> None:
    [mark] = test_every_instruction.pytestmark
    assert {words[0] for words, _ in mark.args[1]} == {opcode.text for opcode in Opcode}


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"axis": None, "keepdims": False}, '{"axis": null, "keepdims": false}'),
        ({"axis": (0, 1)}, '{"axis": [0, 1]}'),
        ({"eps": 1e-05}, '{"eps": 1e-05}'),
        ({"value": float("-inf")}, '{"value": -Infinity}'),
        ({"axis": np.int64(2), "eps": np.float32(0.5)}, '{"axis": 2, "eps": 0.5}'),
        ({"dtype": f32}, '{"dtype": "f32"}'),
        ({}, "{}"),
    ],
)
def test_attributes(attributes: dict[str, Any], text: str) -> None:
    assert format_instruction(instruction("cfunc", 1, 1, attributes)) == f"cfunc 1 1 {text}"


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([[True], [False]]), "bool[2,1] true false"),
        (np.array(-7, np.int64), "i64[] -7"),
        (np.array([0, 2**64 - 1], np.uint64), "u64[2] 0 18446744073709551615"),
        (np.zeros((0, 3), np.float32), "f32[0,3]"),
        (f32s(0.0, -0.0, 1, 2.5, np.nan, np.inf, -np.inf), "f32[7] 0 -0 1 2.5 nan inf -inf"),
        (f32s(0.1, 16777216, 1e-45, 3.4028235e38), "f32[4] 0.1 16777216 1e-45 3.4028235e+38"),
        (np.array([0.1, 1e-300]), "f64[2] 0.1 1e-300"),
        (np.arange(4, dtype=np.int8).reshape(2, 2).T, "i8[2,2] 0 2 1 3"),
    ],
)
def test_constants(array: Any, text: str) -> None:
    assert format_constant(array) == text


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@given(data=st.data())
def test_a_float_is_written_with_the_fewest_digits_that_read_back(
    dtype: str, data: st.DataObject
) -> None:
    kind = DType.named(dtype).numpy.type
    value: Any = kind(data.draw(st.floats(width=32 if dtype == "f32" else 64, allow_nan=False)))
    text = format_constant(value.reshape(1)).split()[1]
    assert kind(text).tobytes() == value.tobytes()
    assert len(text) <= 24 + len("-e+308")
    if np.isfinite(value):
        digits = len(Decimal(text).normalize().as_tuple().digits)
        assert digits == len(Decimal(str(value)).normalize().as_tuple().digits)


def test_a_program() -> None:
    double = Function(
        "double",
        1,
        1,
        (
            instruction("get", -1),
            instruction("get", -1),
            instruction("push_str", "add"),
            instruction("cfunc", 2, 1),
            instruction("return", 1),
        ),
    )
    main = Function(
        "main",
        0,
        "*",
        (
            instruction("load_arg", 0),
            instruction("jump_if_false", 4),
            instruction("push_const", "c"),
            instruction("call", "double"),
            instruction("halt"),
            instruction("jump", 0),
        ),
    )
    assert disassemble(Program([double, main], {"c": f32s(1, 2), "n": np.array(3)})) == (
        "\n".join(
            [
                ".const c f32[2] 1 2",
                ".const n i64[] 3",
                ".func double 1 1",
                "    get -1",
                "    get -1",
                '    push_str "add"',
                "    cfunc 2 1",
                "    return 1",
                ".func main 0 *",
                "L0:",
                "    load_arg 0",
                "    jump_if_false L4",
                "    push_const c",
                "    call double",
                "L4:",
                "    halt",
                "    jump L0",
                "",
            ]
        )
    )


def test_programs_that_differ_have_different_text() -> None:
    programs = [
        straight("halt"),
        straight(("push_int", 1), "halt"),
        straight(("push_str", "1"), "halt"),
        Program([Function("main", 0, 0, (instruction("halt"),))]),
        Program([straight("halt").main], {"c": f32s(0.0)}),
        Program([straight("halt").main], {"c": f32s(-0.0)}),
    ]
    assert len(set(map(disassemble, programs))) == len(programs)
