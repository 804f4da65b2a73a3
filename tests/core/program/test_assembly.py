"""The text of programs, instructions and constants."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import AssemblyError, ProgramError
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.ops.half import cast, shown
from mlvm.core.program.assembly import assemble, disassemble, format_constant, format_instruction
from mlvm.core.program.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.types import Array, DType, TensorType, bf16, bool_, f32
from tests.brief import cases, refuses
from tests.core.programs import f32s, instruction, straight


@cases(
    "words, text",
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
)
def test_every_instruction(words: tuple[Any, ...], text: str) -> None:
    assert format_instruction(instruction(*words)) == text


def test_every_instruction_is_tested_above() -> None:
    [mark] = test_every_instruction.pytestmark
    assert {words[0] for words, _ in mark.args[1]} == {opcode.text for opcode in Opcode}


@cases(
    "attributes, text",
    ({"axis": None, "keepdims": False}, '{"axis": null, "keepdims": false}'),
    ({"axis": (0, 1)}, '{"axis": [0, 1]}'),
    ({"eps": 1e-05}, '{"eps": 1e-05}'),
    ({"value": float("-inf")}, '{"value": -Infinity}'),
    ({"axis": np.int64(2), "eps": np.float32(0.5)}, '{"axis": 2, "eps": 0.5}'),
    ({"dtype": f32}, '{"dtype": "f32"}'),
    ({}, "{}"),
)
def test_attributes(attributes: dict[str, Any], text: str) -> None:
    assert format_instruction(instruction("cfunc", 1, 1, attributes)) == f"cfunc 1 1 {text}"


@cases(
    "array, text",
    (np.array([[True], [False]]), "bool[2,1] true false"),
    (np.array(-7, np.int64), "i64[] -7"),
    (np.array([0, 2**64 - 1], np.uint64), "u64[2] 0 18446744073709551615"),
    (np.zeros((0, 3), np.float32), "f32[0,3]"),
    (f32s(0.0, -0.0, 1, 2.5, np.nan, np.inf, -np.inf), "f32[7] 0 -0 1 2.5 nan inf -inf"),
    (f32s(0.1, 16777216, 1e-45, 3.4028235e38), "f32[4] 0.1 16777216 1e-45 3.4028235e+38"),
    (np.array([0.1, 1e-300]), "f64[2] 0.1 1e-300"),
    (np.arange(4, dtype=np.int8).reshape(2, 2).T, "i8[2,2] 0 2 1 3"),
    (np.array([0.1, -0.0, np.inf], np.float16), "f16[3] 0.1 -0 inf"),
    (cast(f32s(0.1, -0.0, np.nan, 1e38), bf16), "bf16[4] 0.100097656 -0 nan 9.96921e+37"),
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


@pytest.mark.parametrize("digits", [19, 200, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_int_of_any_size_has_a_short_text(digits: int, sign: int) -> None:
    n = sign * 10**digits
    for opcode in Opcode:
        if opcode.immediates:
            immediates = (*[n] * (len(opcode.immediates) - 1), {"x": n})
            text = format_instruction(Instruction(opcode, immediates))
            assert text.startswith(opcode.text)
            assert len(text) < 500
            assert len(format_instruction(Instruction(opcode, (n,)))) < 400
    code = (instruction("push_int", n), instruction("halt"))
    assert len(disassemble(Program([Function("main", n, n, code)]))) < 500


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


# --- reading it back ------------------------------------------------------------------

words = st.from_regex(r"[A-Za-z_][\w.]{0,5}", fullmatch=True)
ints = st.one_of(st.integers(-3, 3), st.integers())
scalars = st.one_of(st.none(), st.booleans(), ints, st.floats(allow_nan=False), st.text(max_size=4))
attribute_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)


def constants_of(dtype: DType) -> st.SearchStrategy[Array]:
    """Arrays of the dtype, made of any bytes: nan of every kind, infinities, -0.0, no elements."""
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return shapes.map(lambda shape: TensorType(dtype, shape)).flatmap(
        lambda type: st.binary(min_size=type.nbytes, max_size=type.nbytes).map(
            lambda data: (
                np.frombuffer(bytes(b & 1 for b in data) if dtype is bool_ else data, dtype.numpy)
                .reshape(type.shape)
                .copy()
            )
        )
    )


@st.composite
def functions(draw: st.DrawFn, name: str, names: list[str], constants: list[str]) -> Function:
    """Well-formed to look at; whether it makes sense is the verifier's question."""
    length = draw(st.integers(0, 8))
    counts: st.SearchStrategy[Count] = st.one_of(st.integers(0, 4), st.just(STAR))

    def immediate(kind: str) -> Any:
        match kind:
            case "n" | "i":
                return draw(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)))
            case "s":
                return draw(st.text(max_size=6))
            case "name":
                return draw(st.sampled_from(constants)) if constants else draw(words)
            case "func":
                return draw(st.sampled_from(names))
            case "label":
                return draw(st.integers(0, length - 1))
            case "attrs?":
                return draw(st.dictionaries(st.text(max_size=4), attribute_values, max_size=3))
            case _:
                return draw(counts)

    code = []
    for _ in range(length):
        opcode = draw(st.sampled_from(list(Opcode)))
        kinds = opcode.immediates
        if kinds and kinds[-1].endswith("?") and draw(st.booleans()):
            kinds = kinds[:-1]
        code.append(Instruction(opcode, tuple(map(immediate, kinds))))
    return Function(name, draw(st.integers(0, 4)), draw(counts), tuple(code))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    names = ["main", *draw(st.lists(words.filter(lambda w: w != "main"), unique=True, max_size=2))]
    draw(st.randoms()).shuffle(names)
    arrays = st.sampled_from(list(DType.all.values())).flatmap(constants_of)
    constants = draw(st.dictionaries(words, arrays, max_size=3))
    return Program([draw(functions(name, names, list(constants))) for name in names], constants)


@given(programs())
def test_reading_back_gives_an_equal_program(program: Program) -> None:
    text = disassemble(program)
    again = assemble(text)
    assert disassemble(again) == text
    pairs = zip(program.constants.values(), again.constants.values(), strict=True)
    for ours, read in ((shown(x), shown(y)) for x, y in pairs):
        np.testing.assert_array_equal(ours, read, strict=True)  # a nan's payload is not written
        for part, again_part in ((ours.real, read.real), (ours.imag, read.imag)):
            same = np.signbit(part).tolist() == np.signbit(again_part).tolist()
            assert same or np.isnan(ours).any()
    if not any(np.isnan(shown(x)).any() for x in program.constants.values()):
        assert again == program


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e308])
def test_floats_at_the_edges_are_read_back(value: float) -> None:
    with np.errstate(over="ignore"):
        constants = {"c": np.array([value]), "d": np.array(value).astype(np.float32)}
    program = Program([Program.of_op("f", 0, {"x": value}, 0).main], constants)
    again = assemble(disassemble(program))
    assert disassemble(again) == disassemble(program)
    for name, array in constants.items():
        assert again.constants[name].tobytes() == array.tobytes()


def test_layout_is_free() -> None:
    """Comments, blank lines, indentation, tabs, label names, and `;` inside of strings."""
    assert assemble(
        "; a comment\n"
        "\n"
        ".const c\tf32[2,1] +1.50 -1e1   ; the elements\n"
        ".func   main 0 *;entry\n"
        "go->1:\n"
        'push_str "a;b"; "c"\n'
        "  \tcfunc 0 * {}\n"
        "jump go->1\n"
        "\r\n"
    ) == Program(
        [
            Function(
                "main",
                0,
                "*",
                (
                    instruction("push_str", "a;b"),
                    instruction("cfunc", 0, "*", {}),
                    instruction("jump", 0),
                ),
            )
        ],
        {"c": f32s(1.5, -10).reshape(2, 1)},
    )


def test_a_label_may_stand_at_the_end() -> None:
    program = assemble(".func main 0 *\njump end\nend:")
    assert program.main.code == (instruction("jump", 1),)
    with pytest.raises(ProgramError, match="label must be a pc below 1, not 1"):
        verify(program, FunctionTable())


MAIN = ".func main 0 *\n"


@cases(
    "text, line, column, reason",
    ("", 1, 1, "there is no .func"),
    ("; nothing\n\n", 3, 1, "there is no .func"),
    (".const c f32[] 1", 2, 1, "there is no .func"),
    (".func f 0 0\nhalt", 1, 1, "no function 'main' among f"),
    ("halt\n" + MAIN, 1, 1, "halt stands before the first .func"),
    ("  go:\n" + MAIN, 1, 3, "go: stands before the first .func"),
    (".data\n" + MAIN, 1, 1, ".data stands before the first .func"),
    # .func
    ("  .func main 0", 1, 3, "write .func NAME PARAMETERS RESULTS"),
    (".func main 0 * 1", 1, 1, "write .func NAME PARAMETERS RESULTS"),
    (".func 1main 0 *", 1, 7, "expected a name, got 1main"),
    ('.func "main" 0 *', 1, 7, 'expected a name, got "main"'),
    (".func main -1 *", 1, 12, "expected an integer >= 0, got -1"),
    (".func main * *", 1, 12, "expected an integer, got *"),
    (".func main 0 x", 1, 14, "expected an integer, got x"),
    (".func main 0 -2", 1, 14, "expected an integer >= 0, got -2"),
    (MAIN + "halt\n" + MAIN, 3, 1, "function 'main' is defined twice"),
    # .const
    (".const", 1, 1, "write .const NAME TYPE ELEMENTS..."),
    (".const c", 1, 1, "write .const NAME TYPE ELEMENTS..."),
    (".const 5 f32[] 1", 1, 8, "expected a name, got 5"),
    (".const c f32 1", 1, 10, "'f32' is not a type; write one like f32[2,3] or i64[]"),
    (".const c f8[] 1", 1, 10, "no dtype 'f8'; there are bool, u8"),
    (".const c f32[-1]", 1, 10, "'f32[-1]' is not a type"),
    (".const c f32[2] 1", 1, 10, "f32[2] has 2 elements, got 1"),
    (".const c f32[] 1 2", 1, 10, "f32[] has 1 elements, got 2"),
    (".const c f32[99999999999999999999] 1", 1, 10, "f32 of shape (99999999999999999999,) is"),
    (".const c f32[] x", 1, 16, "x is no f32"),
    (".const c f16[] abc", 1, 16, "abc is no f16"),
    (".const c i8[2] 1 128", 1, 18, "128 is no i8"),
    (".const c u8[] -1", 1, 15, "-1 is no u8"),
    (".const c i32[] 1.5", 1, 16, "1.5 is no i32"),
    (".const c bool[] 1", 1, 17, "1 is no bool"),
    ('.const c f32[] "1"', 1, 16, '"1" is no f32'),
    (".const c f32[] 1\n.const c f32[] 2\n" + MAIN, 2, 1, "constant 'c' is defined twice"),
    # labels
    (MAIN + "go: halt", 2, 5, "expected a label alone on its line"),
    (MAIN + "go:\nhalt\n go:", 4, 2, "label 'go' is defined twice"),
    (MAIN + "jump go", 2, 6, "no label 'go' in function 'main'"),
    (MAIN + "jump go\n.func f 0 0\ngo:\nreturn 0", 2, 6, "no label 'go' in function 'main'"),
    (MAIN + "push_int 0\n jump_if_false 1", 3, 16, "no label '1' in function 'main'"),
    # instructions
    (MAIN + "hlat", 2, 1, "no instruction 'hlat'; did you mean halt?"),
    (MAIN + '"halt"', 2, 1, "no instruction '\"halt\"'"),
    (MAIN + "return_ 1", 2, 1, "no instruction 'return_'; did you mean return?"),
    (MAIN + "  halt 1", 2, 3, "expected halt, got 1 immediates"),
    (MAIN + "push_int", 2, 1, "expected push_int n, got 0 immediates"),
    (MAIN + "cfunc 1", 2, 1, "expected cfunc nparams nresults attrs?, got 1 immediates"),
    (MAIN + "cfunc 1 1 {} {}", 2, 1, "expected cfunc nparams nresults attrs?, got 4 immediates"),
    (MAIN + "push_int x", 2, 10, "expected an integer, got x"),
    (MAIN + 'push_int "1"', 2, 10, 'expected an integer, got "1"'),
    (MAIN + "get 1.0", 2, 5, "expected an integer, got 1.0"),
    (MAIN + f"push_int {2**63}", 2, 10, "expected an integer of 64 bits, got 92233720368"),
    (MAIN + f"push_int {-(2**63) - 1}", 2, 10, "expected an integer of 64 bits, got -92"),
    (MAIN + "halt\n push_int " + "9" * 5000, 3, 11, "expected an integer of 64 bits, got 9999"),
    (MAIN + "push_str add", 2, 10, 'expected a string such as "add", got add'),
    (MAIN + "push_str {}", 2, 10, 'expected a string such as "add", got {}'),
    (MAIN + "push_const 5", 2, 12, "expected a name, got 5"),
    (MAIN + 'call "f"', 2, 6, 'expected a name, got "f"'),
    (MAIN + "cfunc -1 1", 2, 7, "expected an integer >= 0, got -1"),
    (MAIN + "cfunc 1 x", 2, 9, "expected an integer, got x"),
    (MAIN + "cfunc 1 1 5", 2, 11, 'attributes are a JSON object, such as {"axis": 0}, not 5'),
    (MAIN + 'cfunc 1 1 "x"', 2, 11, "attributes are a JSON object"),
    # JSON
    (MAIN + ' push_str "add', 2, 11, "not JSON: Unterminated string starting at"),
    (MAIN + 'push_str "\\x"', 2, 11, "not JSON: Invalid \\escape"),
    (MAIN + 'cfunc 1 1 {"axis" 0}', 2, 19, "not JSON: Expecting ':' delimiter"),
    (MAIN + "cfunc 1 1 {axis: 0}", 2, 12, "not JSON: Expecting property name"),
    (MAIN + 'cfunc 1 1 {"axis": 0', 2, 21, "not JSON: Expecting ',' delimiter"),
    (MAIN + 'cfunc 1 1 {"axis": ' + "[" * 100_000, 2, 11, "not JSON: maximum recursion depth"),
    (MAIN + 'cfunc 1 1 {"axis": ' + "1" * 5000 + "}", 2, 11, "not JSON: Exceeds the limit"),
)
def test_what_is_no_assembly_is_refused_with_line_and_column(
    text: str, line: int, column: int, reason: str
) -> None:
    caught = refuses(AssemblyError, "", assemble, text)
    assert (caught.line, caught.column) == (line, column)
    assert str(caught).startswith(f"line {line}, column {column}: {reason}")


@given(
    st.text(
        alphabet=st.sampled_from(' \t\n\r\x0c\x1c\x85\u2028";:{}[]*.-+0123eainfhltjmpux\\'),
        max_size=60,
    )
)
def test_any_text_is_a_program_or_refused_with_its_place(text: str) -> None:
    for source in (text, MAIN + text, ".const c f32[2] " + text):
        try:
            program = assemble(source)
        except AssemblyError as error:
            place = error.line, error.column
        else:
            place = 1, 1
            assert disassemble(assemble(disassemble(program))) == disassemble(program)
        assert min(place) >= 1
