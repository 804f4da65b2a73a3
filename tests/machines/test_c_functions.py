"""Host functions in C: what they see, what they leave, and what they get wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import (
    ArgumentError,
    HostFunctionError,
    LibraryError,
    MachineError,
    ProgramError,
    UnknownFunctionError,
)
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import STAR, Program
from mlvm.core.types import Array, f32
from mlvm.machines.c_functions import include_dir, load_library
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from tests.core.programs import f32s, put
from tests.machines.libraries import (
    EXAMPLE,
    FUNCTIONS,
    MACHINES,
    compile_c,
    compile_text,
    needs_compiler,
)
from tests.threads import in_threads

if extension.EXTENSION is None:
    pytest.skip(extension.REASON, allow_module_level=True)

from mlvm.machines.native import types
from mlvm.machines.native._native import MLVM_ABI_VERSION
from mlvm.machines.native.host import CFunction
from mlvm.machines.native.types import DTYPES
from tests.brief import ROOT, Patch, cases, output_of, refuses

pytestmark = needs_compiler
HEADER = Path(include_dir()) / "mlvm.h"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_text(FUNCTIONS, tmp_path_factory.mktemp("clib"), "functions")


@pytest.fixture(params=MACHINES)
def new_vm(request: pytest.FixtureRequest) -> Callable[[], VM]:
    """Makes VMs of one kind."""
    return partial(VM, native=request.param)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(EXAMPLE, tmp_path_factory.mktemp("example") / "example_c.so", "-std=c99")


@pytest.fixture
def vm(library: Path, example: Path, new_vm: Callable[[], VM]) -> VM:
    vm = new_vm()
    for each in (library, example):
        vm.register_library(each)
    return vm


@pytest.fixture(scope="module")
def call(library: Path) -> Callable[..., Any]:
    """The results of the library's function of that name, past the machine."""
    functions = {function.name: function for function in load_library(library)}

    return lambda name, *params, **attributes: functions[name].call(params, attributes)


def wrong(case: int) -> Program:
    return assemble(
        f'.func main 0 *\n load_arg 0\n push_int {case}\n push_str "wrong"\n cfunc 2 *\n halt'
    )


# --- the header ----------------------------------------------------------------------


def test_the_header_has_the_codes_and_the_version_of_the_machine() -> None:
    text = HEADER.read_text()
    [listed] = re.findall(r"#define MLVM_DTYPES\(X\)((?:.*\\\n)+.*\n)", text)
    codes = {name.lower(): int(code) for name, code in re.findall(r"X\((\w+), (\d+)\)", listed)}
    assert codes == {dtype.name: code for code, dtype in enumerate(DTYPES)}
    assert f"#define MLVM_ABI_VERSION {MLVM_ABI_VERSION}\n" in text


def test_the_headers_own_example_works(tmp_path: Path, new_vm: Callable[[], VM]) -> None:
    comment = HEADER.read_text().split("*/")[0]
    lines = [line[3:] for line in comment.splitlines() if line.startswith(" *     ")]
    vm = new_vm()
    vm.register_library(compile_text("\n".join(lines), tmp_path, "twice"))
    [y] = vm.launch(Program.of_op("twice", 1, {}, 1), [put(vm, np.array([1, -2]))])
    assert y.tolist() == [2, -4]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_example_compiles_as_cpp(tmp_path: Path) -> None:
    source = tmp_path / "functions.cpp"
    source.write_text(EXAMPLE.read_text())
    library = compile_c(source, tmp_path / "cpp.so", "-std=c++11", compiler="c++")
    assert VM().register_library(library) == ["softclip", "min_max", "dense", "nothing"]


# --- what a function sees and leaves -------------------------------------------------


def test_values_of_every_kind_come_and_go(call: Callable[..., Any]) -> None:
    x = f32s(1, 2)
    values = [x, -(1 << 63), (1 << 63) - 1, "grüße", "", *range(20)]
    echoed = call("echo", *values)
    assert echoed[0] is x
    assert echoed[1:] == values[1:]
    assert call("echo") == []


def test_attributes_are_json(vm: VM) -> None:
    attrs = {"axis": [0, (1, 2)], "name": 'a"ü', "eps": np.float32(0.5), "dtype": f32, "no": None}
    [text] = vm.launch(Program.of_op("attributes", 0, attrs, 1))
    assert json.loads(text.tobytes()) == attrs | {"axis": [0, [1, 2]], "dtype": "f32", "eps": 0.5}
    [text] = vm.launch(Program.of_op("attributes", 0, {}, 1))
    assert text.tobytes() == b"{}"


def test_attributes_are_encoded_once_and_the_memory_of_it_is_bounded(library: Path) -> None:
    function = next(f for f in load_library(library) if f.name == "attributes")
    attributes = {"a": 1}
    assert function.host(attributes).text is function.host(attributes).text
    for i in range(1000):
        [text] = function.call([], {"i": i})
        assert isinstance(text, np.ndarray)
        assert json.loads(text.tobytes()) == {"i": i}
    assert len(function._callers) <= function._callers.limit


def test_a_function_keeps_few_of_the_types_it_has_met(library: Path) -> None:
    [describe] = [f for f in load_library(library) if f.name == "describe"]
    before = len(types._types)
    for n in range(3000):
        describe.call([np.ones(n, np.int8)], {})
    assert len(types._types) - before < 1100


@cases("attributes, expected",
    ({}, -1.0), ({"value": 2}, 2.0), ({"value": True}, 1.0), ({"value": -0.5}, -0.5),
)  # fmt: skip
def test_a_number_among_the_attributes(vm: VM, attributes: dict[str, Any], expected: float) -> None:
    [y] = vm.launch(Program.of_op("number", 0, attributes, 1))
    assert y == expected


@cases("value, error, text",
    ("two", HostFunctionError, "number: attribute 'value': expected a number, got"),
    (None, HostFunctionError, "number: attribute 'value': expected a number, got"),
    ([1], HostFunctionError, "number: attribute 'value': expected a number, got"),
    (10**400, HostFunctionError, "number: attribute 'value' is too large"),
    ({1}, ArgumentError, r"^number\(\): the attributes are not JSON: .*set"),
)  # fmt: skip
def test_an_attribute_that_is_no_number(vm: VM, value: Any, error: Any, text: str) -> None:
    refuses(error, text, vm.launch, Program.of_op("number", 0, {"value": value}, 1))


# --- what goes wrong -----------------------------------------------------------------

_LINES = Path(__file__).with_name("wrong.txt").read_text("utf-8").splitlines()
MISTAKES = [line.split(" | ") for line in _LINES if line and line[0] != "#"]
WRONG = {int(row[0]): row[1] for row in MISTAKES if len(row) == 2}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_typed_and_leaves_the_vm_as_it_was(vm: VM, case: int) -> None:
    x = put(vm, f32s(1))
    before = vm.consumed_size_in_mib()
    caught = refuses(HostFunctionError, "", vm.launch, wrong(case), [x])
    assert str(caught) == f"wrong: {WRONG[case]}"
    assert "cfunc 2 * of 'wrong'; stack: f32[1], Int" in caught.__notes__[0]
    assert vm.consumed_size_in_mib() == before
    assert vm.launch(wrong(99), [x]) == []


def test_no_place_for_a_number(call: Callable[..., Any]) -> None:
    with pytest.raises(
        HostFunctionError,
        match=r"^wrong: number: the pointer for 'value' is NULL; pass the address",
    ):
        call("wrong", 31, value=1)


@cases("value", 1 << 63, -(1 << 63) - 1, "nul\0", "\ud800")
def test_values_that_c_does_not_have(call: Callable[..., Any], value: int | str) -> None:
    refuses(HostFunctionError, r"^echo: parameter 1, .*, is no", call, "echo", 0, value)


def test_calls_are_held_to_the_counts_of_the_table(vm: VM) -> None:
    with pytest.raises(MachineError, match="describe: expected 1 parameter, got 0"):
        vm.launch(Program.of_op("describe", 0, {}, 1))
    with pytest.raises(ProgramError, match="describe returns 1 result, the call expects 2"):
        vm.launch(Program.of_op("describe", 1, {}, 2), [put(vm, f32s(1))])
    with pytest.raises(MachineError, match="liar: expected 1 result, got 0"):
        vm.launch(Program.of_op("liar", 0, {}, 1))


# --- threads -------------------------------------------------------------------------


def test_the_gil_is_released_while_c_runs(vm: VM) -> None:
    flag = put(vm, np.array(0))
    memory = vm.borrow(flag)
    timer = threading.Timer(0.05, lambda: memory.fill(1))
    timer.start()
    vm.launch(Program.of_op("wait_for", 1, {}, 0), [flag])
    timer.join()


def test_several_vms_call_one_function_at_once(library: Path) -> None:
    [describe] = [f for f in load_library(library) if f.name == "describe"]

    def work(n: int) -> None:
        x = np.ones((n, 3), np.float32)
        for _ in range(500):
            [y] = describe.call([x], {})
            assert isinstance(y, np.ndarray)
            assert y[5] == n

    in_threads(work, range(4))


# --- libraries -----------------------------------------------------------------------


def test_registering_replaces_and_removing_takes_out(
    library: Path, new_vm: Callable[[], VM]
) -> None:
    vm = new_vm()
    vm.register("echo", lambda frame: frame.push("python"))
    assert "echo" in vm.register_library(library)
    assert isinstance(vm.functions.binding("echo").callee, CFunction)
    program = Program.of_op("echo", 1, {}, 1)
    x = put(vm, f32s(4))
    assert vm.launch(program, [x])[0].tolist() == [4]
    vm.register("echo", lambda frame: frame.push(f32s(5)))
    assert vm.launch(program, [x])[0].tolist() == [5]
    vm.remove("echo")
    refuses(UnknownFunctionError, "", vm.launch, program, [x])


def test_a_relative_path_is_found_from_the_working_directory(
    library: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(library.parent)
    assert VM().register_library(library.name)


def test_no_library(tmp_path: Path) -> None:
    register, text = VM().register_library, tmp_path / "text.so"
    text.write_text("this is no library")
    refuses(
        LibraryError,
        r"^expected a shared library, but .*missing\.so does not exist$",
        register,
        tmp_path / "missing.so",
    )
    refuses(LibraryError, r"^expected a shared library, but", register, tmp_path)
    refuses(LibraryError, r"text\.so cannot be loaded: ", register, text)


@cases("name, text, message", *[row for row in MISTAKES if len(row) == 3])
def test_a_library_that_does_not_list_its_functions_well(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    used = "static int f(mlvm_frame *frame) { return frame == NULL; }\n" if "f, " in text else ""
    library = compile_text(used + text, tmp_path, name)
    vm = VM()
    before = set(vm.functions)
    caught = refuses(LibraryError, message, vm.register_library, library)
    assert "\n" not in str(caught)
    assert set(vm.functions) == before


# --- the example ---------------------------------------------------------------------


def test_the_example_from_a_program(vm: VM) -> None:
    x = np.linspace(-5, 5, 12, dtype=np.float32).reshape(3, 4)
    for values in (x, x.astype(np.float64), x[:0], np.array(3.0)):
        [y] = vm.launch(Program.of_op("softclip", 1, {"limit": 2.5}, 1), [put(vm, values)])
        assert (y.dtype, y.shape) == (values.dtype, values.shape)
        np.testing.assert_allclose(y, 2.5 * np.tanh(values / 2.5), rtol=1e-6)
    least, greatest = vm.launch(
        Program.of_op("min_max", 1, {}, STAR), [put(vm, np.array([[3, -4], [7, 0]]))]
    )
    assert [least.item(), greatest.item()] == [-4, 7]
    assert vm.launch(Program.of_op("nothing", 1, {}, 0), [put(vm, x)]) == []


@cases(
    "name, operand, attributes, message",
    ("softclip", np.array([1]), {}, "softclip: takes a tensor of f32 or f64"),
    ("softclip", f32s(1), {"limit": 0}, "softclip: limit must be > 0"),
    (
        "softclip",
        f32s(1),
        {"limit": "a"},
        "softclip: attribute 'limit': expected a number, got 'a'",
    ),
    ("min_max", np.zeros(0, np.int64), {}, "min_max: takes a tensor of i64 that is not empty"),
)
def test_the_examples_errors(
    vm: VM, name: str, operand: Array, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HostFunctionError) as caught:
        vm.launch(Program.of_op(name, 1, attributes, STAR), [put(vm, operand)])
    assert str(caught.value) == message


def test_the_demo_prints_what_the_page_says(example: Path) -> None:
    """The demo calls the example from a program, from assembly and from `ml.host_call`."""
    page = (ROOT / "docs" / "functions.md").read_text()
    expected = page.split("```text\n")[-1].split("```")[0]
    assert output_of(ROOT / "examples" / "c" / "demo.py", example) == expected


def test_the_page_on_functions(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its Python runs in order and prints what it says, with its C function compiled by its
    command."""
    page = (ROOT / "docs" / "functions.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.S)
    [source] = [body for kind, body in blocks if kind == "c"]
    command = next(body for kind, body in blocks if kind == "sh")
    (tmp_path / "twice.c").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shell = f"""
        python() {{ "{sys.executable}" "$@"; }}
        cc() {{ command cc -Wall -Wextra -Wpedantic -Werror "$@"; }}
        {command}"""
    subprocess.run(["sh", "-ec", shell], check=True)
    script = "".join(body for kind, body in blocks if kind == "python")
    texts = [body for kind, body in blocks if kind == "text"]
    assert output_of("-c", script, cwd=tmp_path) == "".join(texts[:-1])
