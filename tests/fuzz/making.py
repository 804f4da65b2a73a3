"""Programs to try: made at random, and valid ones changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.core.program.assembly import assemble, disassemble
from mlvm.core.program.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.types import Array
from tests.cases import CASES
from tests.core.programs import FACTORIAL, HALVE, PARITY, SUM_TO, f32s
from tests.fuzz import mutations

GLOBALS: Final = (10**15, 10**15 + 1)
"""What stands for handles in a program, until a VM has given its own."""

ARGS: Final[tuple[Array, ...]] = (
    f32s(1, -2), f32s(3, 0.5), np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(2.0, np.float32), np.array([1, 0, 2]), np.array(3), np.array([True, False]),
    np.zeros((0, 2), np.float64), np.arange(4, dtype=np.uint8),
)  # fmt: skip
CONSTANTS: Final = {"c": f32s(5, 6), "n": np.array(1), "none": np.zeros((2, 0), np.int8)}


@dataclass
class Case:
    """A program to launch and what on; `kind` says how it was made. `make` may raise."""

    kind: str
    make: Callable[[], Program]
    args: tuple[Array, ...] = ARGS


HOST: Final = ("host.all", "host.any", "host.names", "host.fail", "host.change")
"""Functions that the VM of a launch has beside the ops."""


def junk(rng: random.Random) -> Any:
    """An immediate that is most likely wrong."""
    return rng.choice(
        [
            *(-1, 0, 1, 2, 7, 2**40, -(2**70), STAR, "", "c", "add", "f"),
            *(None, True, 1.5, [1], b"x", np.arange(2), *GLOBALS),
            *({"axis": 0}, {"axis": [0, 1], "keepdims": True}, {"no": {"such": None}}, {5: 6}),
        ]
    )


def random_instruction(rng: random.Random) -> Instruction:
    opcode = rng.choice(list(Opcode))
    count = max(0, len(opcode.immediates) - rng.randrange(2) * rng.randrange(2))
    return Instruction(opcode, tuple(junk(rng) for _ in range(count)))


def random_code(rng: random.Random, nparams: int, nresults: Any, main: bool) -> list[Instruction]:
    """Instructions that keep an eye on the height of the stack, most of the time."""
    code: list[Instruction] = []
    height = 0

    def emit(opcode: Opcode, *immediates: Any) -> None:
        code.append(Instruction(opcode, immediates))

    def emit_call(name: str, arity: int, nresults: Any, attributes: dict[str, Any]) -> None:
        nonlocal height
        while height < arity:
            emit(Opcode.load_arg, rng.choice([0, 0, 1, rng.randrange(len(ARGS))]))
            height += 1
        emit(Opcode.push_str, name)
        emit(Opcode.cfunc, STAR if rng.random() < 0.1 else arity, nresults, attributes)
        height += (nresults if nresults != STAR else 1) - arity

    for _ in range(rng.randint(1, 14)):
        roll = rng.random()
        if roll < 0.2:
            emit(Opcode.load_arg, rng.randrange(len(ARGS)))
            height += 1
        elif roll < 0.3:
            emit(Opcode.push_const, rng.choice(list(CONSTANTS)))
            height += 1
        elif roll < 0.35:
            emit(Opcode.push_int, rng.randint(-1, 3))
            height += 1
        elif roll < 0.6:
            name = rng.choice(["add", "multiply", "negative", "concat", "sum", *CASES])
            case = rng.choice(CASES[name]) if CASES[name] else None
            into = rng.random() < 0.3
            emit_call(
                name + ".out" * into,
                (len(case.inputs) if case else 1) + into,
                rng.choice([1 - into, 1 - into, STAR]),
                dict(case.attributes) if case else {},
            )
        elif roll < 0.68:
            emit_call(rng.choice(HOST), rng.randint(0, 2), rng.choice([0, 1, 1, 2, STAR]), {})
        elif roll < 0.76 and height + nparams:
            emit(Opcode.get, rng.randrange(-nparams, height))
            height += 1
        elif roll < 0.8 and height > 1:
            emit(Opcode.set, rng.randrange(-nparams, height - 1))
            height -= 1
        elif roll < 0.84 and height:
            n = rng.randint(0, height)
            emit(Opcode.pop, n)
            height -= n
        elif roll < 0.9:
            emit(Opcode.push_int, rng.choice(GLOBALS))
            if height and rng.random() < 0.5:
                emit(Opcode.store_global)
                height -= 1
            else:
                emit(Opcode.load_global)
                height += 1
        elif roll < 0.94:
            emit(Opcode.call, rng.choice("fg"))
        elif roll < 0.98:
            emit(Opcode.push_int, rng.randint(0, 1))
            emit(Opcode.jump_if_false, rng.randrange(len(code) + 2))
        else:
            code.append(random_instruction(rng))
    if main:
        emit(Opcode.halt)
    else:
        for _ in range(nresults if nresults != STAR else 1):
            emit(Opcode.get, -1) if nparams else emit(Opcode.push_int, 0)
        emit(Opcode.return_, nresults if nresults != STAR else 1)
    if rng.random() < 0.1:
        emit(Opcode.jump, rng.randrange(len(code)))
    return code


def random_program(rng: random.Random) -> Program:
    functions = [Function("main", 0, STAR, tuple(random_code(rng, 0, STAR, main=True)))]
    for name in "fg":
        nparams = rng.randint(0, 2)
        nresults: Count = rng.choice((0, 1, 2, STAR))
        code = random_code(rng, nparams, nresults, main=False)
        functions.append(Function(name, nparams, nresults, tuple(code)))
    return Program(functions, CONSTANTS)


def changed_attribute(rng: random.Random, instruction: Instruction) -> Instruction:
    """A `cfunc` with another value for one of its attributes."""
    opcode, immediates = instruction
    if opcode is not Opcode.cfunc or not isinstance(immediates[-1], Mapping) or not immediates[-1]:
        return instruction
    attributes = dict(immediates[-1])
    name = rng.choice(list(attributes))
    value = attributes[name]
    if isinstance(value, tuple) and value and rng.random() < 0.6:
        i = rng.randrange(len(value))
        attributes[name] = (*value[:i], junk(rng), *value[i + rng.randrange(2) :])
    elif isinstance(value, int) and rng.random() < 0.6:
        attributes[name] = rng.choice([-1, 1]) * value + rng.choice([-1, 1])
    else:
        others = [(), (0, 0), (1, -1), 0, 1, 2, -3, 2**62, float("nan"), 1e300, "f64", None]
        attributes[name] = rng.choice([junk(rng), *others])
    return Instruction(opcode, (*immediates[:-1], attributes))


def with_changed_attributes(rng: random.Random, program: Program) -> Program:
    return Program(
        [
            f._replace(code=tuple([changed_attribute(rng, i) for i in f.code]))
            for f in program.functions.values()
        ],
        program.constants,
    )


def changed_args(rng: random.Random, args: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arguments, with one for another now and then."""
    if not args or rng.random() < 0.6:
        return args
    i = rng.randrange(len(args))
    return (*args[:i], rng.choice([*ARGS, *(rng.choice(VALID)[1] or ARGS)]), *args[i + 1 :])


def mutated(rng: random.Random, program: Program, other: Program) -> Program:
    """The program with a few instructions, immediates or counts changed."""
    functions = list(program.functions.values())
    pool = [i for f in other.functions.values() for i in f.code] or [Instruction(Opcode.halt)]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(functions))
        function = functions[at]
        code = list(function.code)
        pc = rng.randrange(len(code) + 1)
        match rng.randrange(8):
            case 0:
                del code[pc : pc + 1]
            case 1:
                code.insert(pc, rng.choice(pool))
            case 2:
                code.insert(pc, random_instruction(rng))
            case 3 if len(code) > 1:
                x, y = rng.sample(range(len(code)), 2)
                code[x], code[y] = code[y], code[x]
            case 4 | 5 if pc < len(code) and code[pc].immediates:
                immediates = list(code[pc].immediates)
                i = rng.randrange(len(immediates))
                near = isinstance(immediates[i], int) and rng.random() < 0.7
                immediates[i] = immediates[i] + rng.choice([-1, 1]) if near else junk(rng)
                code[pc] = Instruction(code[pc].opcode, tuple(immediates))
            case 6:
                code[pc:pc] = rng.sample(pool, min(len(pool), 3))
            case _:
                count: Any = rng.choice([0, 1, 2, -1, STAR, None])
                if rng.random() < 0.5:
                    function = function._replace(nparams=count)
                else:
                    function = function._replace(nresults=count)
        functions[at] = function._replace(code=tuple(code))
    return Program(functions, program.constants)


def mutated_text(rng: random.Random, text: str, other: str) -> str:
    """The text with characters, words or lines changed."""
    for _ in range(rng.randint(1, 3)):
        lines = text.splitlines() or [""]
        i = rng.randrange(len(lines))
        line = lines[i]
        match rng.randrange(6):
            case 0:
                lines.pop(i)
            case 1:
                lines.insert(i, rng.choice(other.splitlines() or [""]))
            case 2:
                lines.insert(i, lines.pop(rng.randrange(len(lines))))
            case 3:
                at = rng.randrange(len(line) + 1)
                lines[i] = line[:at] + line[at + 1 :]
            case 4:
                at = rng.randrange(len(line) + 1)
                lines[i] = line[:at] + rng.choice('09-."\\{}[]:;*,xé\0\x0c\u2028') + line[at:]
            case _:
                words = [*line.split(" "), *other.split()]
                lines[i] = line.replace(rng.choice(line.split() or [" "]), rng.choice(words), 1)
        text = "\n".join(lines)
    return text


def valid_programs() -> list[tuple[Program, tuple[Array, ...]]]:
    """Programs that run, with arguments for them."""
    texts = [FACTORIAL, PARITY, SUM_TO, HALVE]
    args: list[tuple[Array, ...]] = [(np.array(x),) for x in (3, 3, 3, np.float32(20))]
    for path in sorted((Path(__file__).parent.parent / "examples").glob("*.mlasm")):
        texts.append(path.read_text("utf-8"))
        args.append(ARGS)
    valid = [(assemble(text), arrays) for text, arrays in zip(texts, args, strict=True)]
    for name, cases in CASES.items():
        for case in cases:
            inputs = tuple(np.ascontiguousarray(x) for x in case.inputs)
            if sum(x.nbytes for x in inputs) < 2000:
                valid.append((Program.of_op(name, len(inputs), case.attributes, 1), inputs))
    return valid


VALID: Final = valid_programs()


def make_case(seed: int, number: int) -> Case:
    """The case of that number, always the same for the same seed."""
    rng = random.Random(f"{seed}:{number}")
    program, args = rng.choice(VALID) if rng.random() < 0.8 else VALID[rng.randrange(10)]
    other, _ = rng.choice(VALID)
    roll = rng.random()
    if roll < 0.4:
        return Case("random program", lambda: random_program(rng))
    if roll < 0.55:
        inputs = changed_args(rng, args)
        return Case("changed attributes", lambda: with_changed_attributes(rng, program), inputs)
    if roll < 0.7:
        changed = changed_args(rng, args)
        return Case("changed program", lambda: mutated(rng, program, other), changed)
    if roll < 0.85:
        text = mutated_text(rng, disassemble(program), disassemble(other))
        return Case("changed text", lambda: assemble(text), args)
    data = mutations.mutated(program.to_bytes(), rng)
    return Case("changed bytes", lambda: Program.from_bytes(data), args)
