"""Programs that nobody would write, thrown at the machine.

    python -m tests.fuzz --programs 100000 --seed 0

Random programs, valid ones with instructions, text or bytes changed, each launched with a
limit on its steps. Whatever they are, the VM may only run them or raise an `MlvmError`; it
loses no byte, keeps every tensor readable, and computes on. What it runs, the raw machine and
one with workers run to the same bits. Prints what was tried and what came out; the first program that does
anything else is printed with the numbers that make it again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.core.assembly import assemble, disassemble
from mlvm.core.errors import (
    AttributeRefused,
    MachineError,
    MlvmError,
    ProgramError,
    UnknownFunction,
)
from mlvm.core.functions import Frame, Value
from mlvm.core.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.types import Array
from mlvm.core.vm import VM
from tests.core.ops.cases import CASES
from tests.core.programs import ADD_INTO, FACTORIAL, HALVE, PARITY, SUM_TO, f32s, put

MAX_STEPS: Final = 100
SECONDS: Final = 20  # for one program; more counts as a hang
GLOBALS: Final = (10**15, 10**15 + 1)
"""What stands for handles in a program, until a VM has given its own."""

ARGS: Final[tuple[Array, ...]] = (
    f32s(1, -2),
    f32s(3, 0.5),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(2.0, np.float32),
    np.array([1, 0, 2]),
    np.array(3),
    np.array([True, False]),
    np.zeros((0, 2), np.float64),
    np.arange(4, dtype=np.uint8),
)
CONSTANTS: Final = {"c": f32s(5, 6), "n": np.array(1), "none": np.zeros((2, 0), np.int8)}


@dataclass
class Case:
    """A program to launch and what on; `kind` says how it was made. `make` may raise."""

    kind: str
    make: Callable[[], Program]
    args: tuple[Array, ...] = ARGS


class Found(Exception):
    """The machine did what it may not."""


class TimeIsUp(Exception):
    """A program that ran for too long."""


# --- host functions -------------------------------------------------------------------


def leave_all(frame: Frame) -> None:
    """As many results as parameters, in the other order."""
    for i in reversed(range(frame.nparams)):
        frame.push(frame.param(i))


def leave_one_of_any_kind(frame: Frame) -> None:
    values: list[Value] = [3, 0, "add", "host.all", "", f32s(1, 2), np.array(0)]
    frame.push(values[frame.nparams % len(values)])


def leave_names(frame: Frame) -> None:
    for name in ("negative", "sum", "add.out", "no such"):
        frame.push(name)


def fail(frame: Frame) -> None:
    raise MachineError("host.fail fails")


def new_vm(**options: Any) -> VM:
    vm = VM(**options)
    vm.register("host.all", leave_all)
    vm.register("host.any", leave_one_of_any_kind, nresults=1)
    vm.register("host.names", leave_names)
    vm.register("host.fail", fail, nparams=1, nresults=1)

    def change(frame: Frame) -> None:
        vm.register("negative", leave_all)
        vm.register("add", leave_one_of_any_kind, nresults=1)
        vm.attachments["changed"] = True

    vm.register("host.change", change, nresults=0)
    return vm


HOST: Final = ("host.all", "host.any", "host.names", "host.fail", "host.change")

# --- making programs ------------------------------------------------------------------


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
    if opcode is not Opcode.cfunc or len(immediates) < 3 or not immediates[2]:
        return instruction
    attributes = dict(immediates[2])
    name = rng.choice(list(attributes))
    value = attributes[name]
    if isinstance(value, tuple) and value and rng.random() < 0.6:
        i = rng.randrange(len(value))
        attributes[name] = (*value[:i], junk(rng), *value[i + rng.randrange(2) :])
    elif isinstance(value, int) and rng.random() < 0.6:
        attributes[name] = rng.choice([-1, 1]) * value + rng.choice([-1, 1])
    else:
        attributes[name] = rng.choice([junk(rng), (), (0, 0), float("nan"), 1e300, 2**62, "f64"])
    return Instruction(opcode, (*immediates[:2], attributes))


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
        match rng.randrange(11):
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
            case 7 | 8 | 9:
                code = [changed_attribute(rng, i) for i in code]
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


def mutated_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The bytes with some flipped, cut out, repeated, or taken from others."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                del changed[at : at + rng.randint(1, 8)]
            case 1:
                changed[at:at] = other[at : at + rng.randint(1, 8)]
            case 2:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case _:
                changed[at : at + 1] = bytes([rng.choice([0, 1, 127, 128, 255])])
    return bytes(changed)


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
    if roll < 0.5:
        return Case("random program", lambda: random_program(rng))
    if roll < 0.7:
        changed = changed_args(rng, args)
        return Case("changed program", lambda: mutated(rng, program, other), changed)
    if roll < 0.85:
        text = mutated_text(rng, disassemble(program), disassemble(other))
        return Case("changed text", lambda: assemble(text), args)
    data = mutated_bytes(rng, program.to_bytes(), other.to_bytes())
    return Case("changed bytes", lambda: Program.from_bytes(data), args)


# --- trying them ----------------------------------------------------------------------


def with_handles(program: Program, handles: list[TensorHandle]) -> Program:
    """The program with a VM's handles in place of `GLOBALS`."""
    names = dict(zip(GLOBALS, handles, strict=True))

    def replaced(instruction: Instruction) -> Instruction:
        if instruction.opcode is Opcode.push_int and instruction.immediates:
            n = instruction.immediates[0]
            if isinstance(n, int):
                return Instruction(Opcode.push_int, (names.get(n, n), *instruction.immediates[1:]))
        return instruction

    return Program(
        [
            f._replace(code=tuple(map(replaced, f.code))) if isinstance(f.code, tuple) else f
            for f in program.functions.values()
        ],
        program.constants,
    )


def launch(
    vm: VM, program: Program, arrays: tuple[Array, ...]
) -> tuple[list[Array], MlvmError | None]:
    """Outputs, arguments and globals afterwards; and the error, if it raised one.

    Raises `Found` for bytes lost, or a tensor that cannot be read.
    """
    if vm.consumed_size_in_mib():
        raise Found("there are bytes before the launch")
    args = [put(vm, array) for array in arrays]
    others = [put(vm, array) for array in (f32s(7, 8), np.array(2))]
    before, outputs, failed = vm.consumed_size_in_mib(), [], None
    program = with_handles(program, others)
    try:
        outputs = vm.launch(program, args, max_steps=MAX_STEPS)
    except MlvmError as error:
        failed = error
        str(error)
    stores = any(
        i.opcode is Opcode.store_global for f in program.functions.values() for i in f.code
    )
    if vm.consumed_size_in_mib() != before and not stores:
        raise Found(f"{before} MiB before and {vm.consumed_size_in_mib()} after")
    after = [vm.read(handle) for handle in [*args, *others]]
    for handle in [*args, *others]:
        vm.dealloc_tensor(handle)
    if vm.consumed_size_in_mib():
        raise Found(f"{vm.consumed_size_in_mib()} MiB are held by nobody")
    return outputs + after, failed


def computes(vm: VM) -> bool:
    handles = [put(vm, f32s(i, 2 * i)) for i in range(3)]
    vm.launch(ADD_INTO, handles)
    left: list[float] = vm.read(handles[0]).tolist()
    for handle in handles:
        vm.dealloc_tensor(handle)
    return left == [3, 6]


class Fuzz:
    """Tries cases and counts what comes out, by the case's kind."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.vm = new_vm()
        self.others = {
            "raw machine": new_vm(checked=False),
            "machine with workers": new_vm(workers=2),
        }

    def run(self, case: Case) -> None:
        """Raises whatever the machine may not raise, and `Found`."""
        try:
            program = case.make()
        except MlvmError as error:
            self.counts[case.kind, f"not made: {type(error).__name__}"] += 1
            return
        left, failed = launch(self.vm, program, case.args)
        if not computes(self.vm):
            raise Found("the VM computes wrong results")
        outcome = "ran" if failed is None else type(failed).__name__
        self.counts[case.kind, outcome] += 1
        if "changed" in self.vm.attachments:  # the table is not what it was
            self.vm = new_vm()
        elif failed is None:
            for name in self.others:
                self.compare(name, program, case.args, left)

    def compare(
        self, name: str, program: Program, args: tuple[Array, ...], left: list[Array]
    ) -> None:
        """Raise `Found` unless another VM leaves the same bits."""
        again, failed = launch(self.others[name], program, args)
        if isinstance(failed, ProgramError | UnknownFunction | AttributeRefused):
            return  # in a part that is never reached, which the raw machine does not know
        if failed is not None:
            raise Found(f"the {name} refuses it: {failed!r}")
        for ours, theirs in zip(left, again, strict=True):
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                raise Found(f"the {name} leaves tensors of other types")
            if ours.tobytes() != theirs.tobytes():
                raise Found(f"the {name} computes {theirs}, not {ours}")

    def report(self) -> str:
        """What was tried and what came out, a line each."""
        totals: Counter[str] = Counter()
        for (kind, _), n in self.counts.items():
            totals[kind] += n
        lines = []
        for kind, total in sorted(totals.items()):
            lines.append(f"{kind}: {total}")
            outcomes = Counter({out: n for (k, out), n in self.counts.items() if k == kind})
            lines += [f"  {n:8d}  {outcome}" for outcome, n in outcomes.most_common()]
        return "\n".join(lines)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after so long, where the system can."""

    def stop(*_: object) -> None:
        raise TimeIsUp(f"it ran for more than {seconds} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def listing(case: Case) -> str:
    """The case's program as text, or as a value when assembly cannot write it."""
    try:
        program = case.make()
    except Exception:
        return "(it could not even be made)"
    try:
        return disassemble(program)
    except Exception:
        return repr([*program.functions.values()])


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Fuzz, str | None]:
    """Try so many cases; with what came out, how the machine failed, if it did."""
    runs = Fuzz()
    for number in range(first, first + programs):
        try:
            with time_limit(SECONDS):
                runs.run(make_case(seed, number))
        except Exception as error:
            place = f"python -m tests.fuzz --seed {seed} --first {number} --programs 1"
            text = listing(make_case(seed, number))
            trace = "".join(traceback.format_exception(error))
            return runs, f"{text}\n{trace}\nThe program above did this. Again: {place}"
    return runs, None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    options = parser.parse_args(argv)
    runs, failure = fuzz(options.programs, options.seed, options.first)
    print(runs.report())
    if failure is not None:
        print(failure)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
