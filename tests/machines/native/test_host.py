"""Host functions called by the loop in C: all is as on the reference machine."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.machine.frame import Frame
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import STAR, Program
from mlvm.core.types import ALIGNMENT, Array, TensorType
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from tests.core.programs import f32s, put
from tests.machines.libraries import FUNCTIONS, compile_text, needs_compiler

if extension.EXTENSION is None:
    pytest.skip(extension.REASON, allow_module_level=True)

from mlvm.machines.native.host import CFunction
from mlvm.machines.native.types import DTYPES
from tests.brief import Patch, cases, refuses

pytestmark = needs_compiler

MORE = Path(__file__).with_name("host_functions.c").read_text("utf-8")


class Libraries(NamedTuple):
    functions: Path
    more: Path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("host")
    return Libraries(
        compile_text(FUNCTIONS, folder, "host_functions"),
        compile_text(MORE, folder, "host_more", "-pthread", "-D_POSIX_C_SOURCE=200809L"),
    )


class Outcome(NamedTuple):
    """Outcome of a launch: its stack, or the error's type, text and notes."""

    stack: list[Any]
    error: tuple[Any, ...] | None


class Machines:
    """The native and the reference machine, with the same functions."""

    def __init__(self, libraries: Libraries) -> None:
        self.native, self.reference = VM(native=True), VM(native=False)
        for vm in (self.native, self.reference):
            for library in libraries:
                vm.register_library(library)

    def both(
        self, program: Program | str, *operands: Array, prepare: Callable[[VM], Any] = lambda _: 0
    ) -> Outcome:
        """Run the program on both machines and return its outcome, which must be the same."""
        if isinstance(program, str):
            program = main_of(program)
        outcomes = []
        for vm in (self.native, self.reference):
            prepare(vm)
            outcomes.append(outcome(vm, program, operands))
        native, reference = outcomes
        assert native.error == reference.error
        assert same(native.stack) == same(reference.stack)
        return native


def outcome(vm: VM, program: Program, operands: Sequence[Array]) -> Outcome:
    before = vm.consumed_size_in_mib()
    handles = [put(vm, x) for x in operands]
    try:
        return Outcome(stack_of(vm, program, handles), None)
    except Exception as error:
        return Outcome([], (type(error), str(error), getattr(error, "__notes__", [])))
    finally:
        for handle in handles:
            vm.dealloc_tensor(handle)
        assert vm.consumed_size_in_mib() == before


def stack_of(vm: VM, program: Program, handles: Sequence[int]) -> list[Any]:
    """All that the program leaves, as it is; a launch returns copies of the Tensors."""
    code, operands = vm._bind(program, tuple(handles))
    with vm._lock:
        return vm._run(code, operands, vm._store, vm.functions, None, None)


def same(values: list[Any]) -> list[Any]:
    """The values in a form that compares, with the places of those that are one array."""
    return [
        (str(x.dtype), x.shape, x.tobytes(), next(i for i, y in enumerate(values) if y is x))
        if isinstance(x, np.ndarray)
        else x
        for x in values
    ]


@pytest.fixture
def machines(libraries: Libraries) -> Machines:
    return Machines(libraries)


@pytest.fixture(scope="module")
def lasting(libraries: Libraries) -> Machines:
    """For all examples of a test."""
    return Machines(libraries)


def main_of(body: str) -> Program:
    return assemble(".func main 0 *\n" + body.replace("|", "\n") + "\nhalt\n")


def called(name: str, *values: int | str, results: int | str = STAR) -> str:
    """Assembly of a call on these values."""
    pushes = [f'push_str "{x}"' if isinstance(x, str) else f"push_int {x}" for x in values]
    return " | ".join([*pushes, f'push_str "{name}"', f"cfunc {len(values)} {results}"])


# --- what is not asked of Python -----------------------------------------------------


def test_calls_go_past_python(libraries: Libraries, monkeypatch: Patch) -> None:
    """Also those with strings, and with types that are new."""

    def closed(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(CFunction, "call", closed)
    machines = Machines(libraries)
    program = main_of(f"{called('echo', 3, 'text')} | {called('many', 2)}")
    stack = stack_of(machines.native, program, [])
    assert stack[:2] == [3, "text"]
    assert [x.tolist() for x in stack[2:4]] == [[1], [2, 2]]
    refuses(AssertionError, "", stack_of, machines.reference, program, [])


def test_a_program_with_functions_in_c_is_worth_releasing_the_lock(machines: Machines) -> None:
    program = Program.of_op("keep", 0, {}, 0)
    machines.native.launch(program)
    code, _ = machines.native._bind(program, ())
    assert code.prepared.program.work > 0


# --- the library that misuses its frame ----------------------------------------------


def test_numbers(machines: Machines) -> None:
    attributes = {"a": 1, "b": 2.5, "café": True, "other": "text", "a\0b": 7, "\ud800": 8}
    result = machines.both(Program.of_op("numbers", 0, attributes, 5))
    assert [x.item() for x in result.stack] == [1, 2.5, 1, -1, -1]
    machines.both(Program.of_op("numbers", 0, {"a": "text"}, 5))
    machines.both(Program.of_op("numbers", 0, {"none": None}, 5))
    for name in ("a", "b", "c", ""):
        machines.both(called("number_named", name))


@cases(
    "name, message",
    ("no_name", "no_name: a string is not in UTF-8: b'\\xff'; encode it as UTF-8"),
    ("first_of_two", "first_of_two: the first"),
    ("thread_fails", "thread_fails: from a thread"),
)
def test_an_error_of_a_frame_is_told(machines: Machines, name: str, message: str) -> None:
    result = machines.both(called(name))
    assert result.error is not None
    assert result.error[1] == message


def test_a_forged_frame(machines: Machines) -> None:
    assert machines.both(called("forged")).stack == [6]


def test_a_frame_serves_nobody_after_its_call(machines: Machines, libraries: Libraries) -> None:
    library = ctypes.CDLL(str(libraries.functions))
    for vm in (machines.native, machines.reference):
        vm.launch(Program.of_op("keep", 0, {}, 0))
        assert library.use_kept() == 3  # each callback failed
    machines.both(called("echo", 5))


# --- values --------------------------------------------------------------------------


VALUES = st.one_of(
    st.integers(-(1 << 66), 1 << 66),
    st.integers(-9, 9),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
    st.sampled_from(["nul\0", "\ud800"]),
    st.builds(
        np.full,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.just(1),
        st.sampled_from([dtype.numpy for dtype in DTYPES if dtype.per_byte == 1]),
    ),
)


@given(st.lists(VALUES, max_size=12), st.sampled_from([STAR, 0, 1, 3]))
def test_values_come_and_go(lasting: Machines, values: list[Any], announced: int | str) -> None:
    lasting.both(
        f'push_str "these" | cfunc 0 {len(values)} | push_str "echo" | '
        f"cfunc {len(values)} {announced}",
        prepare=lambda vm: vm.register("these", pusher(values)),
    )


def pusher(values: Sequence[Any]) -> Callable[[Frame], None]:
    def push(frame: Frame) -> None:
        for value in values:
            frame.push(value)

    return push


def test_a_parameter_that_is_left_is_the_same_tensor(machines: Machines) -> None:
    for vm in (machines.native, machines.reference):
        program = assemble(
            '.func main 0 *\n load_arg 0\n get 0\n push_str "echo"\n cfunc 2 2\n halt'
        )
        handle = put(vm, f32s(1, 2))
        x, y = stack_of(vm, program, [handle])
        assert x is y
        assert np.shares_memory(x, vm.borrow(handle))
    twice = machines.both(called("one_of_two")).stack
    assert twice[0] is twice[1]


def _is_made(code: int, shape: tuple[int, ...]) -> bool:
    """Return whether the last axis fills bytes."""
    return DTYPES[code].per_byte == 1 or (bool(shape) and shape[-1] % 4 == 0)


NEW = [
    pytest.param(code, shape, id=f"{dtype}-{len(shape)}")
    for code, dtype in enumerate(DTYPES)
    for shape in [(), (0,), (3,), (2, 0, 5), (3, 8), (1,) * 64]
    if _is_made(code, shape)
]


@pytest.mark.parametrize(("code", "shape"), NEW)
def test_new_tensors(machines: Machines, code: int, shape: tuple[int, ...]) -> None:
    type = TensorType(DTYPES[code], shape)
    program = called("zeros", code, *shape)
    for _ in range(2):  # asked for, and remembered
        [x] = machines.both(f"{program} | {program} | pop 1").stack
        assert (x.dtype, x.shape) == (DTYPES[code].numpy, type.array_shape)
        assert not any(x.tobytes())
        assert not (x.size and x.ctypes.data % ALIGNMENT)
    for vm in (machines.native, machines.reference):
        [description] = stack_of(vm, main_of(f'{program} | push_str "describe" | cfunc 1 1'), [])
        askew = 0 if x.size else description[4]  # an empty one may lie anywhere
        assert description.tolist() == [code, len(shape), type.size, x.nbytes, askew, *shape]


def test_more_types_than_are_at_hand(machines: Machines) -> None:
    result = machines.both(f"{called('many', 300)} | {called('many', 200)}")
    assert len(result.stack) == 502
    assert result.stack[299].tolist() == [300] * 300


def test_results_outlive_program_and_vm(machines: Machines, libraries: Libraries) -> None:
    vm = VM(native=True)
    for library in libraries:
        vm.register_library(library)
    program = main_of(called("many", 3))
    stack = stack_of(vm, program, [])
    reference = weakref.ref(vm)
    del vm, program
    assert reference() is None
    assert [x.tolist() for x in stack[:3]] == [[1], [2, 2], [3, 3, 3]]


# --- counts --------------------------------------------------------------------------


@cases("checked", True, False)
@cases("program",
    called("echo", 1, 2, results=1), called("echo", 1, 2, results=2), called("echo", results=1),
    called("liar"), called("liar", results=1), called("keep", results=1), called("describe"),
    called("come_back", 1, 2),
    f"push_int 7 | {called('echo', 1, 2, results=0)}",
    f"{called('echo', 1, 2)} | push_str \"describe\" | cfunc * *",
)  # fmt: skip
def test_counts(libraries: Libraries, program: str, checked: bool) -> None:
    machines = Machines(libraries)
    if not checked and ("describe" in program or "come_back" in program):
        pytest.skip("a raw machine does whatever C makes of it")
    machines.native = VM(native=True, checked=checked)
    machines.reference = VM(native=False, checked=checked)
    for vm in (machines.native, machines.reference):
        vm.register_library(libraries.functions)
    machines.both(program)


# --- functions that come back --------------------------------------------------------


def come_back(fn: Callable[[], None]) -> tuple[str, Any]:
    """Assembly that calls it from within a function in C, and what to keep until then."""
    callback = ctypes.CFUNCTYPE(None)(fn)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return called("come_back", address), callback


def test_a_function_registered_during_a_call_in_c(machines: Machines) -> None:
    for vm in (machines.native, machines.reference):
        call, keepalive = come_back(lambda vm=vm: vm.register("echo", lambda f: f.push("new")))  # type: ignore[misc]
        text = f"{called('echo', 1)} | {call} | {called('echo', 1)}"
        program = main_of(text)
        assert stack_of(vm, program, []) == [1, "new"]
        del keepalive


def test_a_launch_within_a_call_in_c(machines: Machines) -> None:
    """The launch may be of the same program, too: each has a separate frame."""
    for vm in (machines.native, machines.reference):
        results: list[Any] = []
        programs: list[Program] = []

        def again(
            vm: VM = vm, results: list[Any] = results, programs: list[Program] = programs
        ) -> None:
            if len(results) < 3:
                i = len(results)
                results.append(None)
                results[i] = [x.tolist() for x in vm.launch(programs[0])]

        call, keepalive = come_back(again)
        programs.append(main_of(f"{called('many', 2)} | {call} | {called('zeros', 5, 1)}"))
        assert [x.tolist() for x in vm.launch(programs[0])] == [[1], [2, 2], [0]]
        assert results == [[[1], [2, 2], [0]]] * 3
        del keepalive


def test_callbacks_from_threads_of_the_call(machines: Machines) -> None:
    for vm in (machines.native, machines.reference):
        x = put(vm, f32s(1))
        for _ in range(3):
            program = assemble(
                ".func main 0 *\n load_arg 0\n"
                ' push_str "threads"\n cfunc 1 * {"value": 1000}\n halt'
            )
            stack = stack_of(vm, program, [x])
            assert len(stack) == 9 * 50 * 4
            assert sum(isinstance(v, str) for v in stack) == 9 * 50
            ints = sorted(v for v in stack if isinstance(v, int))
            assert ints == sorted([*range(1, 51)] * 9)
            arrays = [v for v in stack if isinstance(v, np.ndarray) and v.dtype == np.int64]
            assert sorted(v[-1] for v in arrays) == sorted([*range(1001, 1051)] * 9)
            assert all(not v[:-1].any() for v in arrays)


def test_an_interrupt_in_python_goes_through_c(machines: Machines, monkeypatch: Patch) -> None:
    """The type of a tensor is asked of Python, which a signal may interrupt."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlvm.machines.native.host.type_asked_for", interrupted)
    program = main_of(called("zeros", 9, 2, 3))
    for vm in (machines.native, machines.reference):
        refuses(KeyboardInterrupt, "", vm.launch, program)
    monkeypatch.undo()
    machines.both(program)
