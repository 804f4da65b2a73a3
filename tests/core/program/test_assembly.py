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
from mlvm.core.ops.half import shown
from mlvm.core.program.assembly import assemble, disassemble, format_constant, format_instruction
from mlvm.core.program.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.types import Array, DType, TensorType, bool_
from tests.brief import cases
from tests.cases.claim_tests import claims
from tests.cases.tables import sections
from tests.core.programs import code, f32s, instruction


@cases("dtype", "f32", "f64")
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
    double = code(("get", -1), ("get", -1), ("push_str", "add"), ("cfunc", 2, 1), ("return", 1))
    main = code(("load_arg", 0), ("jump_if_false", 4), ("push_const", "c"), ("call", "double"))
    main += code("halt", ("jump", 0))
    functions = [Function("double", 1, 1, double), Function("main", 0, "*", main)]
    text = (
        ".const c f32[2] 1 2|.const n i64[] 3|.func double 1 1|\tget -1|\tget -1|"
        '\tpush_str "add"|\tcfunc 2 1|\treturn 1|.func main 0 *|L0:|\tload_arg 0|'
        "\tjump_if_false L4|\tpush_const c|\tcall double|L4:|\thalt|\tjump L0|"
    )
    program = Program(functions, {"c": f32s(1, 2), "n": np.array(3)})
    assert disassemble(program) == text.replace("|", "\n").replace("\t", "    ")


@cases("digits", 19, 200, 5000)
@cases("sign", 1, -1)
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


@cases("value", float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e308)
def test_floats_at_the_edges_are_read_back(value: float) -> None:
    with np.errstate(over="ignore"):
        constants = {"c": np.array([value]), "d": np.array(value).astype(np.float32)}
    program = Program([Program.of_op("f", 0, {"x": value}, 0).main], constants)
    again = assemble(disassemble(program))
    assert disassemble(again) == disassemble(program)
    for name, array in constants.items():
        assert again.constants[name].tobytes() == array.tobytes()


def test_a_label_may_stand_at_the_end() -> None:
    program = assemble(".func main 0 *\njump end\nend:")
    assert program.main.code == (instruction("jump", 1),)
    with pytest.raises(ProgramError, match="expected label as a pc below 1, got 1"):
        verify(program, FunctionTable())


MAIN = ".func main 0 *\n"


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


test_rows = claims("assembly", globals())


def test_every_instruction_has_a_row() -> None:
    [first, *_] = sections("claims/assembly.txt")
    assert {row.split('"')[1] for row in first.lines} == {opcode.text for opcode in Opcode}


def assembled(text: str) -> Program:
    """Assemble the text. An error says its line and column in its parts, too."""
    try:
        return assemble(text)
    except AssemblyError as error:
        place = f"line {error.line}, column {error.column}: "
        raise error if str(error).startswith(place) else AssertionError(place) from error


def main(text: str) -> Program:
    return assembled(MAIN + text)
