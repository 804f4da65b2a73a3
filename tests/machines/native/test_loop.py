"""The loop in C, where programs, host functions and signals are hostile."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from mlvm.core import store
from mlvm.core.errors import OutOfMemoryError, notes_of
from mlvm.core.machine.frame import Frame
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.types import Array, TensorType
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.watchdog import Watchdog
from tests.alarms import require_interruptible
from tests.brief import Patch, cases, refuses, replace_op
from tests.cases.claim_tests import claims
from tests.core.programs import NEGATIVE, asm, f32s, put
from tests.fuzz.machines import Outcome, new_machines, outcome, require_same
from tests.fuzz.trying import new_vm

if extension.EXTENSION is None:
    pytest.skip(extension.REASON, allow_module_level=True)

from mlvm.machines.native import _native
from mlvm.machines.native.loop import Helper
from mlvm.machines.native.types import Type, native_type

MATMUL = 'load_arg 0\nload_arg 1\nload_arg 1\npush_str "matmul.out"\ncfunc 3 0\n'


def both(
    body: str,
    *operands: Array,
    max_steps: int | None = None,
    prepare: Callable[[VM], Any] = lambda vm: None,
) -> Outcome:
    """Run a program, given by the body of main, on all machines; return its outcome, which must be
    the same."""
    program = assemble(body if ".func" in body else f".func main 0 *\n{body}\nhalt\n")
    outcomes = []
    for vm in new_machines().values():
        prepare(vm)
        outcomes.append(outcome(vm, program, operands, max_steps))
    reference, *others = outcomes
    for other in others:
        require_same("native machine", other, reference, bits=False)
    return reference


# --- calls ---------------------------------------------------------------------------


@cases("counts", (3, 2, 3), (2, 3, 2), (8, 1, 9, 8))
def test_a_call_of_any_number_of_parameters_tells_them_by_their_number(counts: Any) -> None:
    def prepare(vm: VM) -> None:
        remaining = [*counts]

        def some(frame: Frame) -> None:
            for i in range(remaining.pop(0)):
                frame.push(f32s(i, i + 1))

        vm.register("some", some)

    calls = "call f\n" * len(counts)
    both(
        f"""
        .func f 0 *
            push_str "some"
            cfunc 0 *
            push_str "concat"
            cfunc * 1 {{"axis": 0}}
            return 1
        .func main 0 *
            {calls}
            halt
        """,
        prepare=prepare,
    )


def test_a_call_that_meets_ever_new_types_keeps_few_plans() -> None:
    program = asm(
        '.func main 0 * | push_str "some" | cfunc 0 1 | push_str "negative" | cfunc 1 1 | halt'
    )
    vm, sizes = VM(native=True), [0]

    def some(frame: Frame) -> None:
        sizes[0] = sizes[0] % 20 + 1
        frame.push(np.ones(sizes[0], np.float32))

    vm.register("some", some)
    for _ in range(100):
        [result] = vm.launch(program)
        assert result.tolist() == [-1.0] * sizes[0]
    code, _ = vm._bind(program, ())
    [plans] = [x for x in gc.get_referents(code.prepared.program) if isinstance(x, list)]
    assert len(plans) < 10


# --- interrupts ----------------------------------------------------------------------


@cases("kind", "empty", "products", "globals", "straight", "hosts", "calls")
def test_an_interrupt_ends_a_launch_soon(kind: str) -> None:
    vm = VM(native=True)
    x = np.ones((400, 400), np.float32)
    handles = [put(vm, x), put(vm, x)]
    vm.register("nothing", lambda frame: None, nparams=0, nresults=0)
    body = {
        "empty": "",
        "products": MATMUL,
        "globals": f"push_int {put(vm, f32s(1))}\nload_global\npop 1\n",
        "straight": "",
        "hosts": 'push_str "nothing"\ncfunc 0 0\n',
        "calls": "call f\n",
    }[kind]
    loop = f"again:\n{body}push_int 0\njump_if_false again\nhalt\n"
    if kind == "straight":
        loop = MATMUL * 6000 + "halt\n"
    program = assemble(f".func f 0 0\nreturn 0\n.func main 0 *\n{loop}")
    vm.launch(Program.of_op("matmul.out", 3, {}, 0), [handles[0], handles[1], handles[1]])
    seconds = 1.5 if kind == "straight" else 0.2  # it is long, and linked in Python
    require_interruptible(seconds, vm.launch, program, handles)
    assert vm.launch(Program.of_op("negative", 1, {}, 1), [put(vm, f32s(1))])[0] == [-1]


# --- what hosts do meanwhile ---------------------------------------------------------


HOSTILE = """
.func main 0 *
    load_arg 0
    push_str "negative"
    cfunc 1 1
    push_str "hostile"
    cfunc 0 0
    push_str "negative"
    cfunc 1 1
    load_arg 0
    load_arg 0
    push_str "negative.out"
    cfunc 2 0
    load_arg 0
    halt
"""


def forgets_the_program(vm: VM, program: Program, handles: list[int]) -> None:
    vm._forget_links()
    vm._linked.clear()
    gc.collect()


def launches_twice(vm: VM, program: Program, handles: list[int]) -> None:
    vm.register("hostile", lambda frame: None, nresults=0)
    vm.launch(program, handles)
    vm.launch(program, [put(vm, f32s(5, 6, 7))])


def calls_for_ever(vm: VM, program: Program, handles: list[int]) -> None:
    vm.register("hostile", lambda frame: calls_for_ever(vm, program, handles), nresults=0)
    vm.launch(program, handles)


def negates(frame: Frame) -> None:
    frame.push(f32s(9, 9))


ACTS: dict[str, Callable[[VM, Program, list[int]], object]] = {
    "frees the argument": lambda vm, _, handles: vm.dealloc_tensor(handles.pop()),
    "launches the program": lambda vm, program, _: vm.launch(program, [put(vm, f32s(5, 6, 7))]),
    "launches another": lambda vm, _, handles: vm.launch(NEGATIVE, handles),
    "registers": lambda vm, *_: replace_op(vm, "negative", negates, nresults=1),
    "removes itself": lambda vm, *_: vm.remove("hostile"),
    "removes what follows": lambda vm, *_: vm.remove("negative.out"),
    "collects": lambda *_: gc.collect(),
    "raises": lambda *_: int("no"),
    "replaces itself and launches": launches_twice,
    "forgets the program": forgets_the_program,
    "calls for ever": calls_for_ever,
}


@pytest.mark.parametrize("does", ACTS.values(), ids=ACTS)
def test_a_host_function_that_changes_what_runs(does: Any) -> None:
    outcomes = []
    for native in (False, True):
        vm = VM(native=native)
        program = assemble(HOSTILE)
        handles = [put(vm, f32s(1, 2))]
        depth = [0]

        def hostile(
            frame: Frame,
            vm: VM = vm,
            program: Program = program,
            handles: list[int] = handles,
            depth: list[int] = depth,
        ) -> None:
            depth[0] += 1
            if depth[0] < 3:
                does(vm, program, handles)

        vm.register("hostile", hostile, nresults=0)
        lines: list[Any] = []
        for _ in range(3):
            depth[0] = 0
            try:
                lines += [x.tolist() for x in vm.launch(program, [*handles])]
            except Exception as error:
                places = [getattr(error, name, None) for name in ("function", "pc", "step")]
                lines.append((type(error), str(error), *places))
        outcomes.append(lines)
    assert outcomes[0] == outcomes[1]


def test_a_vm_that_its_host_functions_refer_to_is_collected() -> None:
    for native in (False, True):
        vm = VM(native=native)

        def host(frame: Frame, vm: VM = vm) -> None:
            frame.push(1)

        vm.register("host", host)
        program = assemble('.func main 0 *\npush_str "host"\ncfunc 0 *\nhalt\n')
        vm.launch(program)
        alive = weakref.ref(vm)
        host.__defaults__ = None
        host.vm = vm  # type: ignore[attr-defined]
        del vm, host
        gc.collect()
        assert alive() is None


# --- memory --------------------------------------------------------------------------


def resident() -> int:
    """The bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="says nothing of memory")
@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="what is freed stays for a while")
def test_launches_leave_no_memory() -> None:
    vm = VM(native=True)
    vm.register("same", lambda frame: frame.push(frame.param(0)))
    program = asm(
        '.func main 0 * | load_arg 0 | push_str "negative" | cfunc 1 1 | push_str "same" | '
        'cfunc 1 1 | push_str "exp" | cfunc 1 1 | halt'
    )
    handle = put(vm, np.ones(1000, np.float32))

    def launches(n: int) -> None:
        for _ in range(n):
            vm.launch(program, [handle])

    launches(500)
    before = resident()
    launches(5000)
    assert resident() - before < 4 << 20  # each launch makes 12 kB


def test_the_memory_of_a_result_outlives_an_array_that_fails(monkeypatch: Patch) -> None:
    memories: list[Any] = []

    def fail(_: object, memory: object) -> NoReturn:
        memories.append(memory)
        raise ValueError("no array")

    monkeypatch.setattr(Type, "array_over", fail)
    vm = VM(native=True)
    program = asm('.func main 0 * | load_arg 0 | push_str "negative" | cfunc 1 1 | halt')
    refuses(ValueError, "no array", vm.launch, program, [put(vm, f32s(1, 2))])
    assert np.frombuffer(memories[0], np.float32).tolist() == [-1, -2]


def test_results_beyond_the_limit_of_a_launch_are_an_error_that_says_so() -> None:
    limits = Limits(launch_bytes=1 << 18, launch_seconds=60.0)
    vm = BoundedVM("bounded", limits, Watchdog(), native=True)

    def many(frame: Frame) -> None:
        for i in range(20_000):
            frame.push(i)

    vm.register("many", many)
    program = asm('.func main 0 * | push_str "many" | cfunc 0 * | halt')
    refuses(OutOfMemoryError, "the launch has too many values", vm.launch, program)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer needs memory itself")
def test_whatever_allocation_fails_is_an_error_of_memory() -> None:
    """Each allocation of Python's fails in its turn. References are given back."""
    testing = pytest.importorskip("_testcapi")
    codes, version, x = _native.steps(), np.zeros(1, np.int64), f32s(1, 2)
    type, pool, helper = native_type(TensorType.of(x)), _native.Pool(1), Helper(VM()._store)
    copy = _native.KernelCall("copy", 2, [x.nbytes, 0, 0, 1])
    site = SimpleNamespace(resolve=lambda types: (None, None, ()), perform=lambda params: params)
    steps = [(codes["LOAD_ARG"], 0, 0, None), (codes["PUSH"], 0, x, type)]
    steps += [(codes["PUSH"], 0, 1 << 70, None), (codes["CALL"], 1, site, None)]
    steps += [(codes["CALL"], 2, site, None), (codes["HALT"], 0, None, None)]
    functions, run = [(steps, [0] * 6, [0] * 6)], (codes["RUN"], 0, (0, 1))
    lanes: Any = *[version] * 3, 1, *[version] * 2, [(version, 1, 1)], [], 1, *[version] * 2

    def everything() -> None:
        _native.KernelCall("chain", 2, [1], [1.0], 1, 0, 0, 0, [copy], ["exp_f32"], [0]).described()
        _native.Program(functions, (type,), version).run(pool, helper, (x,), -1)
        _native.open_program([run], 2, (type,), version).activate([copy], (x, x))
        _native.Lanes(*lanes)
        _native.Formulas().constant(1)
        _native.Records(np.zeros).begin()
        _native.simd_sets()

    def succeeds(n: int) -> bool:
        testing.set_nomemory(n, n + 1)
        try:
            everything()
        except MemoryError:
            return False
        finally:
            testing.remove_mem_hooks()
        return True

    objects = x, type, copy, version, helper, site
    before = [*map(sys.getrefcount, objects)]
    assert sum(map(succeeds, range(250))) < 200
    assert [*map(sys.getrefcount, objects)] == before


# --- the raw machine -----------------------------------------------------------------

NUMBERS = (0, 0, 1, 1, 2, 3, -1, -1, -2, -5, 40, 2**31 - 1, -(2**31), 2**31)


def raw_program(rng: random.Random, numbers: Sequence[int]) -> Program:
    """A main and another function of a few instructions each, whose numbers mean nothing."""
    functions = [
        Function(name, rng.choice(numbers), STAR, tuple(raw_code(rng, numbers)))
        for name in ("main", "f")
    ]
    return Program(functions, {"two": f32s(1, 2), "zero": f32s(0)})


def raw_code(rng: random.Random, numbers: Sequence[int]) -> Iterator[Instruction]:
    count = rng.randint(1, 7)
    for _ in range(count):
        opcode = rng.choice([*Opcode, Opcode.push_const, Opcode.push_int])
        name = rng.choice(["negative", "add", "add.out", "host.all", "host.any", "f"])
        if opcode is Opcode.cfunc:
            yield Instruction(Opcode.push_str, (name,))
        kinds: dict[str, Sequence[Any]] = {
            "s": [name], "name": ["two", "zero"], "func": ["f"], "label": range(count),
            "nparams": (*numbers, STAR), "nresults": (*numbers, STAR),
        }  # fmt: skip
        needed = [kind for kind in opcode.immediates if kind != "attrs?"]
        yield Instruction(opcode, tuple([rng.choice(kinds.get(kind, numbers)) for kind in needed]))
    if rng.random() < 0.8:
        yield Instruction(Opcode.halt)


def raw_outcome(vm: VM, seed: int) -> str:
    """Return a raw machine's outcome of a program: tensors, or an error of Python's."""
    args = [put(vm, f32s(1, 2)), put(vm, f32s(3, 4))]
    program = raw_program(random.Random(seed), (*NUMBERS, args[0]))
    try:
        result: Any = [(x.shape, x.tobytes()) for x in vm.launch(program, args, max_steps=50)]
    except Exception as error:
        result = type(error), str(error), notes_of(error)
    result = result, [vm.read(x).tobytes() for x in args], vm.consumed_size_in_mib()
    for handle in args:
        vm.dealloc_tensor(handle)
    return re.sub(r"\b\d{9,}\b|\b\d+(,\d{3}){3,}\b", "<handle>", repr(result))


def raw_fuzz(first: int, last: int) -> None:
    store._handles = itertools.count(10**9)  # so that none is among the numbers
    machines = [new_vm(native=native, checked=False) for native in (False, True)]
    for seed in range(first, last):
        print(seed, flush=True)
        reference, native = [raw_outcome(vm, seed) for vm in machines]
        assert native == reference, raw_program(random.Random(seed), (*NUMBERS, 10**9)).functions


test_rows = claims("loop", globals())
