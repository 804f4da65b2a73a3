"""The command line. What `run` computes is tested with the programs of `examples/`."""

from __future__ import annotations

import html
import json
import os
import random
import re
import shlex
import signal
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm
import mlvm.eager as ml
from bench.plan import rectangle
from mlvm.__main__ import BadInput, main, read_argument
from mlvm.core.op import OPS, Op
from mlvm.core.program.assembly import assemble, disassemble
from mlvm.core.program.program import Function, Instruction, Opcode, Program
from mlvm.core.types import DType
from mlvm.machines.native import extension
from mlvm.step.saved import SavedStep
from tests.brief import Capsys, Patch, cases, line_of, refuses, start_python, with_long
from tests.drawn import SVG, parse
from tests.fuzz.mutations import assert_well_refused, mutated, parts_of_npy
from tests.threads import wait_for

ADD = """
.func main 0 *
    load_arg 0
    load_arg 1
    push_str "add"
    cfunc 2 1
    load_arg 0
    halt
"""
ENDLESS = """
.func main 0 *
again:
    jump again
"""


def file_of(op: Op) -> str:
    return op.kernel.__module__.rpartition(".")[2]


def test_ops_lists_every_op_once_under_its_room(capsys: Capsys) -> None:
    assert main(["ops"]) == 0
    listing, errors = capsys.readouterr()
    lines = listing.splitlines()
    assert errors == ""
    for op in OPS.values():
        place = lines.index(f"  {op.signature}")
        assert lines[place + 1].strip() == op.doc.splitlines()[0]
        rooms = [line for line in lines[:place] if not line.startswith(" ")]
        assert rooms[-1] == f"{file_of(op)}:"
    assert len(lines) == 2 * len(OPS) + len({*map(file_of, OPS.values())})


def test_ops_documents_the_named_ones(capsys: Capsys) -> None:
    assert main(["ops", "clip", "sum"]) == 0
    text = capsys.readouterr().out
    for name in ("clip", "sum"):
        assert f"{OPS[name].signature}\n\n{OPS[name].doc}\n" in text
    assert text.index("clip(") < text.index("sum(")


@cases(
    "name, text",
    ("multiplt", "error: no function 'multiplt' (did you mean 'multiply'?)"),
    ("add.out", "error: 'add.out' is a variant of an op"),
)
def test_an_unknown_op_is_one_message_and_status_1(name: str, text: str, capsys: Capsys) -> None:
    assert fails(capsys, f"ops {name}").startswith(text)


def test_info_shows_version_dtypes_and_instructions(capsys: Capsys) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"mlvm {mlvm.__version__}," in text
    assert f"kernels: {extension.status()}\n" in text
    assert f"{len(OPS)} ops; dtypes {' '.join(DType.all)}; for storage i4 u4 i2" in text
    lines = text.splitlines()
    for opcode in Opcode:
        [line] = [line for line in lines if line.split()[:1] == [opcode.text]]
        assert line.endswith(opcode.meaning)
        assert f" {opcode.effect} " in line


def test_info_shows_the_instruction_sets(capsys: Capsys, monkeypatch: Patch) -> None:
    for sets, line in (
        ({"avx512": False, "avx2": True}, "avx512 (this processor lacks it), avx2"),
        ({}, "those of numpy"),
    ):
        monkeypatch.setattr(extension, "simd_sets", lambda sets=sets: sets)
        monkeypatch.delenv("MLVM_SIMD", raising=False)
        assert main(["info"]) == 0
        assert f"\ninstruction sets: {line}\n" in capsys.readouterr().out


def test_info_refuses_a_setting_that_says_nothing_known(capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MLVM_THREADS", "2")
    assert main(["info"]) == 0
    message = f"\nthreads of the default VM: 2 of {os.cpu_count()} (set MLVM_THREADS to change)\n"
    assert message in capsys.readouterr().out
    monkeypatch.setenv("MLVM_THREADS", "all")
    assert main(["info"]) == 1
    text = "error: MLVM_THREADS: expected a number from 1 to 256, got 'all'\n"
    assert capsys.readouterr().err == text
    monkeypatch.setenv("MLVM_NATIVE", "2")
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "error: MLVM_NATIVE: expected 0 or 1, got '2'\n"


@cases(
    "argv",
    [],
    ["nosuch"],
    ["info", "extra"],
    ["--nosuch"],
    ["run"],
    ["run", "x.mlasm", "--max-steps", "-1"],
    ["run", "x.mlasm", "--max-steps", "many"],
    ["check"],
    ["disasm", "a", "b"],
)
def test_bad_usage_is_status_2(argv: list[str], capsys: Capsys) -> None:
    assert refuses(SystemExit, "", main, argv).code == 2
    assert "usage: python -m mlvm" in capsys.readouterr().err


def test_as_a_process_whose_reader_has_seen_enough() -> None:
    """As in `python -m mlvm info | head -1`: no complaint, also not from the flush at exit."""
    with start_python("-m", "mlvm", "info", env={"PYTHONUNBUFFERED": ""}) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 0


# --- run, check and disasm -------------------------------------------------------------


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working folder, with a program that adds and argument files for it."""
    Path("add.mlasm").write_text(ADD)
    np.save("x.npy", np.array([[1, 2], [3, 4]], np.float32))
    np.save("y.npy", np.array([10, 20], np.float32))
    return folder


def command_line(text: str) -> int:
    return main(shlex.split(text))


def fails(capsys: Capsys, command: str) -> str:
    """The one line that a command ends with, which has written nothing else."""
    assert command_line(command) == 1
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n"), errors[-1:]) == ("", 1, "\n")
    assert errors.startswith("error: ")
    return errors


def test_run_prints_a_line_and_writes_a_file_for_each_output(folder: Path, capsys: Capsys) -> None:
    assert command_line("run add.mlasm --arg x.npy --arg y.npy --out a/b --trace trace.json") == 0
    assert capsys.readouterr().out == "output 0: f32[2,2]\noutput 1: f32[2,2]\n"
    np.testing.assert_array_equal(np.load("a/b/0.npy"), [[11, 22], [13, 24]])
    np.testing.assert_array_equal(np.load("a/b/1.npy"), [[1, 2], [3, 4]])
    assert np.load("a/b/0.npy").dtype == np.float32
    assert len(list(Path("a/b").iterdir())) == 2
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["add"]


def test_run_prints_elements_on_request_as_arguments_are_written(
    folder: Path, capsys: Capsys
) -> None:
    command = ["run", "add.mlasm", "--arg", "f64[2] 0.5 -inf", "--arg", "f64[] 1", "--print"]
    assert main(command) == 0
    assert capsys.readouterr().out == "output 0: f64[2] 1.5 -inf\noutput 1: f64[2] 0.5 -inf\n"


@cases(
    "array",
    np.arange(6, dtype=">f4").reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=">i8").reshape(2, 3)),
    np.arange(12, dtype=np.uint16).reshape(2, 6)[:, ::2],
    np.float64(3.5),
    np.zeros((0, 3), bool),
)
def test_files_of_any_byte_order_and_layout_are_arguments(
    array: Any, folder: Path, capsys: Capsys
) -> None:
    Path("same.mlasm").write_text(".func main 0 *\n    load_arg 0\n    halt\n")
    np.save("any.npy", array)
    assert command_line("run same.mlasm --arg any.npy --out out") == 0
    result = np.load("out/0.npy")
    np.testing.assert_array_equal(result, array)
    assert result.shape == np.shape(array)
    assert result.dtype == np.asarray(array).dtype.newbyteorder("=")


def write_bad_files() -> None:
    Path("label.mlasm").write_text(".func main 0 *\n    jump nowhere\n")
    Path("latin.mlasm").write_bytes(b".func main 0 *\n; caf\xe9\n    halt\n")
    Path("unknown.mlasm").write_text(ADD.replace('"add"', '"ad"'))
    Path("underflow.mlasm").write_text(".func main 0 *\n    pop 1\n    halt\n")
    Path("endless.mlasm").write_text(ENDLESS)
    Path("cut.mlvm").write_bytes(assemble(ADD).to_bytes()[:40])
    Path("start.mlvm").write_bytes(b"E" + assemble(ADD).to_bytes()[1:])
    Path("text.npy").write_text("1 2 3")
    Path("empty.npy").write_bytes(b"")
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:-1])
    Path("header.npy").write_bytes(Path("x.npy").read_bytes().replace(b"descr", b"d\xe9'cr"))
    np.savez("zip.npy", x=np.zeros(3))
    Path("zip.npy.npz").rename("zip.npy")
    np.save("pickle.npy", np.array([{}], object), allow_pickle=True)
    np.save("long.npy", np.zeros(2, np.longdouble))
    np.save("three.npy", np.zeros(3, np.float32))
    np.save("f64.npy", np.zeros(2))
    np.save("i64.npy", np.zeros(2, np.int64))
    np.save("u64.npy", np.zeros(2, np.uint64))
    Path("long.mlasm").write_text(f".const x f32[{'9' * 5000}] 1\n")
    Path("file").write_text("")
    Path("taken/0.npy").mkdir(parents=True)
    Path("large.mlasm").write_text(LARGE)


LARGE = """
.const x f32[] 1
.func main 0 *
    push_const x
    push_str "full"
    cfunc 1 1 {"shape": [1048576, 1048576, 32768]}
    halt
"""


@cases(
    "command, message",
    ("run nosuch.mlasm", "nosuch.mlasm: No such file or directory"),
    ("run .", ".: Is a directory"),
    ("disasm nosuch", "nosuch: No such file or directory"),
    ("check label.mlasm", "label.mlasm: line 2, column 10: main: expected a label"),
    ("run long.mlasm", "long.mlasm: line 1, column 10: expected lengths below 2**63 in f32[...]"),
    ("run latin.mlasm", "latin.mlasm: line 2: not UTF-8 text"),
    ("disasm cut.mlvm", "cut.mlvm: expected"),
    ("disasm start.mlvm", "start.mlvm: expected b'MLVM' or assembly at the beginning, got b'ELVM'"),
    ("disasm start.mlvm", "the file may be damaged"),
    ("run underflow.mlasm", "underflow.mlasm: main, pc 0"),
    ("check unknown.mlasm", "no function 'ad' (did you mean"),
    ("check unknown.mlasm", "at main, pc 3: cfunc 2 1"),
    ("run underflow.mlasm", "main, pc 0: pop 1: expected 1 value above base, got 0"),
    ("run add.mlasm", "the program needs 2 arguments, got 0 --arg"),
    ("run add.mlasm --arg x.npy", "needs 2 arguments, got 1 --arg"),
    ("run add.mlasm" + 3 * " --arg x.npy", "needs 2 arguments, got 3 --arg"),
    ("check add.mlasm --type f32[2]", "needs 2 arguments, got 1 --type"),
    ("check add.mlasm --type f32[2] --type f32", "argument 1: 'f32' is not a type"),
    ("check add.mlasm --type f32[2] --type f32[3]", "add(f32[2], f32[3]): shapes do not"),
    ("run add.mlasm --arg x.npy --arg three.npy", "at main, pc 3: cfunc 2 1"),
    ("run add.mlasm --arg u64.npy --arg i64.npy", "add(u64[2], i64[2]): u64 and i64 do not"),
    ("run add.mlasm --arg x.npy --arg nosuch.npy", "1, nosuch.npy: No such file or directory; exp"),
    ("run add.mlasm --arg x.npy --arg .", ".: Is a directory"),
    ("run add.mlasm --arg x.npy --arg text.npy", "argument 1, text.npy: expected a .npy file"),
    ("run add.mlasm --arg x.npy --arg empty.npy", "argument 1, empty.npy: expected a .npy file"),
    ("run add.mlasm --arg x.npy --arg cut.npy", "argument 1, cut.npy: expected a .npy file"),
    ("run add.mlasm --arg x.npy --arg header.npy", "argument 1, header.npy: expected a .npy file"),
    ("run add.mlasm --arg x.npy --arg zip.npy", "argument 1, zip.npy: expected a .npy file"),
    ("run add.mlasm --arg pickle.npy --arg x.npy", "argument 0, pickle.npy: expected a .npy file"),
    ("run add.mlasm --arg long.npy --arg x.npy", "long.npy: no dtype for"),
    ("run add.mlasm --arg x.npy --arg f32[1]", "f32[1]: line 1, column 1: f32[1] expects 1 el"),
    ("run add.mlasm --arg x.npy --arg f8[0]", "line 1, column 1: no dtype 'f8'"),
    ("run add.mlasm --arg x.npy --arg y.npy --out file", "file: File exists"),
    ("run large.mlasm", "at main, pc 2: cfunc 1 1"),
    ("run add.mlasm --arg x.npy --arg y.npy --out taken", "error: taken/0.npy: Is a directory"),
    ("run add.mlasm --arg x.npy --arg y.npy --out file/in", "file/in: Not a directory"),
    ("run add.mlasm --arg x.npy --arg y.npy --trace no/t", "no/t: No such file or directory"),
    ("run endless.mlasm --max-steps 1000", "exceeded its limit of instructions; raise --max-steps"),
    ("run endless.mlasm --max-steps 1000", "at main, pc 0: jump L0; stack: empty"),
)
def test_what_is_wrong_is_one_line_that_names_the_place_and_status_1(
    command: str, message: str, folder: Path, capsys: Capsys
) -> None:
    write_bad_files()
    assert message in fails(capsys, command)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_that_does_not_end_is_an_error(
    folder: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("mlvm.__main__._MOST_PIPED", 1 << 20)
    for command in ("run /dev/zero", "run add.mlasm --arg /dev/zero --arg y.npy"):
        message = "error: /dev/zero: expected at most 1 MiB from a pipe or device; save it in a"
        assert fails(capsys, command) == f"{message} file first\n"


def test_check_says_how_large_the_program_is_and_what_it_leaves_to_the_run(
    folder: Path, capsys: Capsys
) -> None:
    Path("add.mlasm").write_text(ADD + '    push_str "x"\n    halt\n')
    assert main(["check", "add.mlasm"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok: 1 function, 8 instructions",
        "checked when it runs: main, pc 3: cfunc 2 1",
        'never reached: main, pc 6: push_str "x"',
        "never reached: main, pc 7: halt",
    ]
    assert main(["check", "add.mlasm", "--type", "f32[2,2]", "--type", "f32[2]"]) == 0
    assert "checked when it runs" not in capsys.readouterr().out


def test_disasm_reads_text_and_bytes(folder: Path, capsys: Capsys) -> None:
    program = assemble(ADD + ENDLESS.replace("main", "other"))
    Path("add.mlvm").write_bytes(program.to_bytes())
    Path("add.mlasm").write_text(disassemble(program))
    for name in ("add.mlvm", "add.mlasm"):
        assert main(["disasm", name]) == 0
        text = capsys.readouterr().out
        assert text == disassemble(program)
        assert assemble(text) == program
    assert command_line("run add.mlvm --arg x.npy --arg y.npy") == 0


def test_a_program_that_text_cannot_spell_is_shown_as_far_as_it_goes(
    folder: Path, capsys: Capsys
) -> None:
    """Only bytes can say these; the verifier refuses them, and disasm shows what is there."""
    code = (
        Instruction(Opcode.jump),
        Instruction(Opcode.jump, ({},)),
        Instruction(Opcode.load_arg, ("x",)),
        Instruction(Opcode.halt),
    )
    program = Program([Function("main", 0, 0, code)])
    Path("odd.mlvm").write_bytes(program.to_bytes())
    assert main(["disasm", "odd.mlvm"]) == 0
    assert "    load_arg x\n" in capsys.readouterr().out
    for command in ("run", "check"):
        assert (
            fails(capsys, f"{command} odd.mlvm")
            == "error: odd.mlvm: main, pc 0: jump: expected the immediates label, got 0\n"
        )


# --- memory ------------------------------------------------------------------------------


SCRIPT = """
import sys
import mlvm.eager as ml
from beside import N

vm = ml.VM("second")
weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "a batch/1")
with weights.allocating():
    w = ml.ones((N, N))
for _ in range(3):
    with batch:
        loss = ml.sum(w @ w)
print("arguments:", sys.argv)
"""


@pytest.fixture
def script(folder: Path) -> Path:
    Path("scripts").mkdir()
    Path("scripts/train.py").write_text(SCRIPT)
    Path("scripts/beside.py").write_text("N = 8\n")
    return folder / "scripts"


def test_memory_runs_a_script_and_reports_and_draws_its_arenas(
    script: Path, capsys: Capsys
) -> None:
    before = list(sys.path)
    assert command_line("memory scripts/train.py --out pictures") == 0
    output, errors = capsys.readouterr()
    assert (errors, sys.path) == ("", before)
    assert output.startswith(
        "arguments: ['scripts/train.py']\narena       weights\non          second"
    )
    rows = [line.split() for line in output.splitlines()]
    assert ["256", "1", "f32[8,8]", "full", "scripts/train.py:9"] in rows
    assert ["256", "1", "f32[8,8]", "matmul", "scripts/train.py:12"] in rows
    names = ["train.a_batch_1.svg", "train.constants.svg", "train.weights.svg"]
    assert sorted(path.name for path in Path("pictures").iterdir()) == names
    for name in names:
        assert f"picture  {Path('pictures') / name}" in output
    root = parse(Path("pictures/train.a_batch_1.svg").read_text("utf-8"))
    hovers = [e.text or "" for e in root.iter(f"{SVG}title")]
    assert sum(hover.startswith("matmul: f32[8,8]\n256 bytes at 0\n") for hover in hovers) == 3
    assert command_line("memory scripts/train.py") == 0
    assert (script / "train.weights.svg").exists()


MAKES_X = """import mlvm.eager as ml
with ml.Arena(ml.VM("v"), "a").allocating():
    x = ml.ones(3)
"""


@cases(
    "text, message",
    (f"{MAKES_X}x + ml.ones(4)", "line 4: ShapeError: add(f32[3], "),
    ("def f(", "line 1: SyntaxError: "),
    ("raise SystemExit(3)", "it exited with 3"),
    (f"{MAKES_X}import sys; sys.exit()", None),
)
def test_memory_says_where_a_script_failed(
    text: str, message: str | None, folder: Path, capsys: Capsys
) -> None:
    """What it has made until then is shown."""
    Path("bad.py").write_text(text)
    status = command_line("memory bad.py")
    output, errors = capsys.readouterr()
    if message is None:
        assert (status, errors) == (0, "")
    else:
        assert (status, errors.count("\n")) == (3 if "Exit(3)" in text else 1, 1)
        assert errors.startswith(f"error: bad.py: {message}")
    for part in ("f32[3]  full  bad.py:3", "picture  bad.a.svg"):
        assert (part in output) == (MAKES_X in text)
    assert Path("bad.a.svg").exists() == (MAKES_X in text)


CHAIN = """
.func main 0 *
    load_arg 0
    push_str "exp"
    cfunc 1 1
    push_str "negative"
    cfunc 1 1
    load_arg 0
    push_str "add"
    cfunc 2 1
    halt
"""


def test_memory_plans_the_intermediates_of_a_program(folder: Path, capsys: Capsys) -> None:
    Path("chain.mlasm").write_text(CHAIN)
    assert main(["memory", "chain.mlasm", "--arg", "f32[100]"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    lines = output.splitlines()
    assert lines[0] == "3 intermediates, 1,344 bytes side by side"
    assert lines[1].startswith("planned: 896 bytes, lower bound 896 (1.00), by ")
    rows = [line.split() for line in lines[3:7]]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("448", "exp"),
        ("448", "negative"),
        ("448", "add"),
    ]
    assert lines[-1] == "picture  chain.plan.svg"
    assert "Memory plan of chain.mlasm" in Path("chain.plan.svg").read_text("utf-8")


# --- show --------------------------------------------------------------------------------


def test_show_runs_a_script_with_its_arguments(script: Path, capsys: Capsys) -> None:
    assert command_line("show scripts/train.py -- --epochs 2 -o x") == 0
    page = script / "train.py.html"
    output, errors = capsys.readouterr()
    arguments = "arguments: ['scripts/train.py', '--epochs', '2', '-o', 'x']"
    assert (output, errors) == (f"{arguments}\npage  {page.relative_to(script.parent)}\n", "")
    text = page.read_text("utf-8")
    for part in ("a batch/1 on second", "VM second", "scripts/train.py:12", "loss = ml.sum(w @ w)"):
        assert part in text


def test_memory_runs_a_script_with_its_arguments(folder: Path, capsys: Capsys) -> None:
    Path("script.py").write_text(f"import sys\nprint('got', sys.argv[1:])\n{MAKES_X}")
    assert main(["memory", "script.py", "--", "--epochs", "2"]) == 0
    assert capsys.readouterr().out.startswith("got ['--epochs', '2']\n")
    Path("add.mlasm").write_text(ADD)
    assert main(["memory", "add.mlasm", "--", "x"]) == 1
    assert "--arg" in capsys.readouterr().err
    assert main(["memory", "script.py", "--budget", "1M"]) == 1
    assert "no captured function was called in script.py" in capsys.readouterr().err
    Path("script.py").write_text("")
    assert main(["memory", "script.py"]) == 0
    assert capsys.readouterr() == ("script.py: the script created no tensors\n", "")


def test_show_opens_a_browser_if_told(step: Any, monkeypatch: Patch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert command_line("show step.mlvm -o page.html") == 0
    assert opened == []
    assert command_line("show step.mlvm --open") == 0
    assert opened == [Path("step.mlvm.html").resolve().as_uri()]
    page = Path("page.html").read_text("utf-8")
    assert page == Path("step.mlvm.html").read_text("utf-8")
    assert "def loss_of" not in page
    assert "ml.tanh(x @ params" in page


@cases(
    "command, message",
    ("memory nosuch.py", "nosuch.py: the file does not exist"),
    ("memory nosuch.mlasm", "nosuch.mlasm: No such file or directory"),
    ("memory scripts/train.py --arg f32[2]", "--arg is only for programs"),
    ("memory add.mlasm --arg x.npy", "the program needs 2 arguments, got 1 --arg"),
    ("memory add.mlasm --arg x.npy --arg f32[-1]", "argument 1: 'f32[-1]' is not a type"),
    ("memory add.mlasm --arg x.npy --arg f32[3]", "add(f32[2,2], f32[3]): shapes do not"),
    ("memory add.mlasm --arg x.npy --arg y.npy --out x.npy", "x.npy: File exists"),
    ("show nosuch.py", "error: nosuch.py: the file does not exist"),
    ("show nosuch.mlvm", "error: nosuch.mlvm: No such file or directory"),
    ("show add.mlasm", "error: add.mlasm is a program; expected a file of Captured.save"),
    ("show x.npy", "x.npy: it is numpy's: use ml.asarray(numpy.load(file)), or a value of numpy"),
    ("memory s.gguf", "s.gguf: it is a GGUF file: use ml.load(file)"),
    ("show a.svg", "; expected a file of Captured.save, or "),
    (
        "show add.mlasm -- --epochs 2",
        "error: arguments after -- are only for scripts, not for captured steps",
    ),
    ("show ''", "error: '' is not a file; show reads a file of Captured.save"),
    ("show ends.py -o scripts", "error: scripts: Is a directory"),
    ("show ends.py -o no/x.html", "error: no/x.html: No such file or directory"),
)
def test_what_memory_and_show_cannot_do_is_one_line(
    command: str, message: str, script: Path, capsys: Capsys
) -> None:
    Path("ends.py").write_text("raise SystemExit('it ran, and only then was the page refused')")
    Path("a.svg").write_text("<svg></svg>")
    Path("s.gguf").write_bytes(b"GGUF\3\0\0\0\xff")
    assert message in fails(capsys, command)


@cases(
    "last, status, start, reason",
    (
        "x + ml.ones(4)",
        1,
        "mlvm.core.errors.ShapeError: add(f32[3], f32[4]): ",
        "line 5: ShapeError: add(",
    ),
    ("raise SystemExit(3)", 3, "", "it exited with 3"),
    ("raise SystemExit('all wrong')", 1, "all wrong\n", "it exited with 'all wrong'"),
    (
        "import signal; signal.raise_signal(signal.SIGINT)",
        130,
        "KeyboardInterrupt\n",
        "the script was interrupted",
    ),
)
def test_show_writes_what_a_script_did_until_it_failed(
    last: str, status: int, start: str, reason: str, folder: Path, capsys: Capsys
) -> None:
    """Exit status and traceback are the script's; the page has the error at its top."""
    Path("in").mkdir()
    Path("bad.py").write_text(f"{MAKES_X}import os; os.chdir('in')\n{last}\n")
    assert command_line("show bad.py") == status
    output, errors = capsys.readouterr()
    assert output == "page  bad.py.html, until the failure of the script\n"
    if "Exit" not in last:
        head, place, errors = errors.split("\n", 2)
        assert (head, place) == (
            "Traceback (most recent call last):",
            '  File "bad.py", line 5, in <module>',
        )
        errors = errors.splitlines(keepends=True)[-1]
    assert errors.startswith(start)
    assert bool(errors) == bool(start)
    page = Path("bad.py.html").read_text("utf-8")
    assert "x = ml.ones(3)" in page
    [at_the_top] = re.findall('<p id="failed" role="alert">(.*)</p>', page)
    assert html.unescape(at_the_top).startswith(f"bad.py: {reason}")
    assert '<p id="nothing"' not in page


@cases(
    "text, reason",
    ("", ""),
    ("import mlvm.eager as ml", ""),
    ("x = = 3", "line 1: SyntaxError: "),
    ("\nimport nosuch", "line 2: ModuleNotFoundError: No module named 'nosuch'"),
)
def test_show_says_on_its_page_that_nothing_ran(text: str, reason: str, folder: Path) -> None:
    Path("none.py").write_text(text)
    assert command_line("show none.py") == bool(reason)
    page = html.unescape(Path("none.py.html").read_text("utf-8"))
    assert '<p id="nothing" role="alert">nothing of mlvm ran</p>' in page
    assert ('<p id="failed" role="alert">none.py: ' + reason in page) == bool(reason)


def test_show_says_where_arguments_of_a_script_go(script: Path, capsys: Capsys) -> None:
    end = refuses(SystemExit, "", command_line, "show scripts/train.py raise --epochs")
    assert end.code == 2
    assert capsys.readouterr().err.endswith(
        "unrecognized arguments: --epochs; those of a script follow --: "
        "python -m mlvm show scripts/train.py -- raise --epochs\n"
    )


def test_show_takes_a_script_whose_name_is_no_text(folder: Path, capsys: Capsys) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    try:
        Path(name).write_text(MAKES_X)
    except OSError:
        pytest.skip("this file system has names of text only")
    assert main(["show", name]) == 0
    assert "<title>caf\\udce9.py</title>" in Path(f"{name}.html").read_text("utf-8")
    assert main(["memory", name]) == 0
    picture = Path(f"{Path(name).stem}.a.svg").read_text("utf-8")
    assert "Arena a of caf\ufffd.py" in picture
    assert capsys.readouterr().err == ""


# --- captured steps ------------------------------------------------------------------------


@pytest.fixture
def step(folder: Path) -> Any:
    """`step.mlvm`, a step that trains `w` on pairs, was saved after one call."""
    with ml.Arena(ml.VM("saving"), "weights").allocating():
        params = {"w": ml.ones((2, 2))}
        optimizer = ml.optim.SGD(params, 0.5, momentum=0.9)

        @ml.capture
        def train(x: ml.Tensor, y: ml.Tensor) -> Any:
            def loss_of(params: Any) -> ml.Tensor:
                return ml.mean((ml.tanh(x @ params["w"]) * 2 - y + 1) ** 2)

            loss, grads = ml.value_and_grad(loss_of)(params)
            optimizer.update(grads)
            return {"loss": loss, "w": params["w"], "x": x}

        train(*map(ml.asarray, pair(0)))
        train.save("step.mlvm")
        yield train
        train.close()


def pair(seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(2, 2)).astype(np.float32) for _ in "xy"]


def test_run_goes_on_from_where_a_step_was_saved(step: Any, capsys: Capsys) -> None:
    for name, array in zip("xy", pair(1), strict=True):
        np.save(f"{name}.npy", array)
    expected = step(*map(ml.asarray, pair(1)))
    for _ in range(2):  # the file stays as it is
        assert command_line("run step.mlvm --arg x.npy --arg y.npy --out out") == 0
        lines = ["output 0: f32[]", "output 1: f32[2,2]", "output 2: f32[2,2]"]
        assert capsys.readouterr().out.splitlines() == lines
        for number, name in enumerate(["loss", "w", "x"]):
            result = np.load(f"out/{number}.npy")
            assert result.tobytes() == expected[name].numpy().tobytes()


def test_run_notes_arguments_that_are_rounded(step: Any, capsys: Capsys) -> None:
    x, y = "f64[2,2] 1 2 3 4", "f32[2,2] 1 2 3 4"
    assert main(["run", "step.mlvm", "--arg", x, "--arg", y]) == 0
    assert capsys.readouterr().err == "note: argument 0 is rounded from f64 to f32\n"


def test_the_status_of_memory_is_1_if_no_plan_fits(step: Any, capsys: Capsys) -> None:
    assert command_line("memory step.mlvm --budget 1M") == 0
    assert command_line("memory step.mlvm --budget 1") == 1
    assert "the plan exceeds the budget of 1 bytes" in capsys.readouterr().out


def test_run_takes_a_step_that_keeps_residuals(folder: Path, capsys: Capsys) -> None:
    @ml.capture
    @ml.grad
    def gradient(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.while_loop(lambda x: ml.max(x) > 0.1, lambda x: ml.sin(x) * 0.5, x))

    x = pair(0)[0]
    expected = gradient(ml.asarray(x)).numpy()
    gradient.save("gradient.mlvm")
    np.save("x.npy", x)
    assert command_line("run gradient.mlvm --arg x.npy --out out") == 0
    assert np.load("out/0.npy").tobytes() == expected.tobytes()
    for command in ("check", "disasm", "memory"):
        assert command_line(f"{command} gradient.mlvm") == 0


def test_a_step_with_lengths(folder: Path, capsys: Capsys) -> None:
    doubled = ml.capture(
        lambda x: ml.exp(x) / x.shape[0], dynamic_axes={"x": ("time", None)}, max_sizes={"time": 8}
    )
    doubled(ml.ones((3, 2)))
    doubled.save("step.mlvm")
    for n in (5, 8, 2):
        np.save("x.npy", np.full((n, 2), n, np.float32))
        assert command_line("run step.mlvm --arg x.npy --out out") == 0
        expected = doubled(ml.asarray(np.load("x.npy"))).numpy()
        assert np.load("out/0.npy").tobytes() == expected.tobytes()
    capsys.readouterr()
    for n in (9, 0):
        np.save("x.npy", np.ones((n, 2), np.float32))
        message = f"error: step: axis 0 of input 0 is 'time' = {n}, expected 1 to 8\n"
        assert fails(capsys, "run step.mlvm --arg x.npy") == message
    assert fails(capsys, "run step.mlvm").endswith("--arg; expected f32[time,2]\n")
    for command in ("memory", "show"):
        assert command_line(f"{command} step.mlvm") == 0
        assert "time = 3, at most 8: f32[time,2]" in capsys.readouterr().out
    assert "step.mlvm at time = 3, at most 8" in Path("step.mlvm.html").read_text("utf-8")
    assert command_line("check step.mlvm") == 0
    if extension.EXTENSION is not None:
        assert command_line("build step.mlvm -o built") == 0
        assert "int64_t time; /* 1 to 8 */" in Path("built/step.h").read_text()


def test_a_saved_step_is_a_program_to_look_at(step: Any, capsys: Capsys) -> None:
    assert command_line("disasm step.mlvm") == 0
    assert assemble(capsys.readouterr().out) == step.program
    assert command_line("check step.mlvm") == 0
    size = len(step.program.main.code)
    assert capsys.readouterr().out == f"ok: 1 function, {size} instructions\n"
    assert command_line("memory step.mlvm") == 0
    output = capsys.readouterr().out
    plan = step.plan
    assert f"planned: {plan.nbytes:,} bytes, lower bound {plan.lower_bound:,}" in output
    picture = Path("step.plan.svg").read_text("utf-8")
    parse(picture)
    assert "test_main.py:" in picture


@cases(
    "command, message",
    ("run step.mlvm", "the program needs 2 arguments, got 0 --arg; expected f32[2,2], f32[2,2]"),
    ("run step.mlvm --arg x.npy --arg f32[3]", "argument 1"),
    ("run step.mlvm --arg x.npy --arg z.npy", "f32[2,2]"),
    ("run step.mlvm --arg x.npy --arg w.npy", "f32[2,2]"),
    ("run half.mlvm --arg x.npy --arg x.npy", "half.mlvm: "),
    ("check half.mlvm", "half.mlvm: "),
    ("disasm half.mlvm", "half.mlvm: "),
    ("memory half.mlvm", "half.mlvm: "),
    (
        "memory step.mlvm --arg f32[2,2]",
        "a captured step without dynamic sizes has one plan: omit --arg",
    ),
    ("run step.mlvm --arg f32[2,2] --arg f32[2,2]", "got 0; write values, as in 'f32[2] 1.5 2'"),
)
def test_what_a_saved_step_cannot_do_is_one_line(
    command: str, message: str, step: Any, capsys: Capsys
) -> None:
    np.save("x.npy", np.ones((2, 2), np.float32))
    np.save("z.npy", np.ones((3, 2), np.float32))
    np.save("w.npy", np.ones((2, 2), np.int64))
    data = Path("step.mlvm").read_bytes()
    Path("half.mlvm").write_bytes(data[: len(data) // 2])
    assert message in fails(capsys, command)


@cases(
    "role, place", ("element", 0), ("output", 9), ("state", -1), ("scratch", 1 << 40), ("nosuch", 0)
)
def test_a_step_whose_result_is_not_there_is_refused(
    role: Any, place: int, step: Any, capsys: Capsys
) -> None:
    saved = SavedStep.from_bytes(Path("step.mlvm").read_bytes())
    result = saved.results[0]._replace(role=role, place=place)
    Path("bad.mlvm").write_bytes(saved._replace(results=(result,)).to_bytes())
    assert fails(capsys, "check bad.mlvm").startswith("error: bad.mlvm: ")


def test_mutated_steps_never_end_in_a_traceback(step: Any) -> None:
    np.save("x.npy", np.ones((2, 2), np.float32))
    generator = random.Random(0)
    data = Path("step.mlvm").read_bytes()
    for _ in range(with_long(20, 60)):
        Path("mutated.mlvm").write_bytes(mutated(data, generator))
        assert command_line("check mutated.mlvm") in (0, 1)
        assert command_line("run mutated.mlvm --arg x.npy --arg x.npy --max-steps 1000") in (0, 1)
        assert command_line("memory mutated.mlvm") in (0, 1)
        assert command_line("show mutated.mlvm") in (0, 1)


def test_mutations_of_npy_arguments(folder: Path) -> None:
    np.save("x.npy", np.ones((2, 2), np.float32))
    file = folder / "x.npy"
    parts = parts_of_npy(file.read_bytes())
    assert_well_refused(parts, lambda _: read_argument(0, "x.npy"), BadInput, file=file)


# --- plan --------------------------------------------------------------------------------

BUFFERS = """size, id, note, upper, lower
64, a, "one, two", 3, 0

32, b, , 6, 2
64, c, , 6, 3
"""


def test_plan_adds_offsets_to_the_buffers_of_a_file(folder: Path, capsys: Capsys) -> None:
    Path("buffers.csv").write_text(BUFFERS, "utf-8-sig")
    line = "total 96 bytes, lower bound 96, ratio 1.0000, nodes 0\n"
    assert command_line("plan buffers.csv --capacity 96 --out placed.csv --plot plan.svg") == 0
    assert capsys.readouterr().out == line
    placed = [row.split(",") for row in Path("placed.csv").read_text().splitlines()]
    assert placed[0] == ["size", "id", "note", "upper", "lower", "offset"]
    offsets = {row[1].strip(): int(row[-1]) for row in placed[1:]}
    assert offsets["a"] == offsets["c"]
    assert sorted(offsets.values()) in ([0, 0, 64], [0, 32, 32])
    parse(Path("plan.svg").read_text("utf-8"))
    Path("placed.csv").rename("again.csv")
    for capacity in ("", "--capacity 1M", "--effort 1"):
        assert command_line(f"plan again.csv {capacity} --out placed.csv") == 0
        assert capsys.readouterr().out == line
        assert Path("placed.csv").read_text() == Path("again.csv").read_text()


def test_plan_searches_as_long_as_told(folder: Path, capsys: Capsys) -> None:
    """A rectangle that was cut into pieces is put together with enough effort alone."""
    blocks, smallest = rectangle(4, 300, pinwheels=True)
    rows = [f"{i},{each.start},{each.end},{each.nbytes}" for i, each in enumerate(blocks)]
    Path("pieces.csv").write_text("\n".join(["id,lower,upper,size", *rows]))
    error = fails(capsys, f"plan pieces.csv --capacity {smallest} --effort 1 --out placed.csv")
    assert re.search(r"no plan within 16,384 bytes by [\d,]+ search nodes; the smallest", error)
    assert error.rstrip().endswith(
        "the lower bound is 16,384. Allow more nodes, as with --effort 10"
    )
    assert not Path("placed.csv").exists()
    assert command_line(f"plan pieces.csv --capacity {smallest}") == 0
    assert "total 16,384 bytes, lower bound 16,384, ratio 1.0000" in capsys.readouterr().out


@cases(
    "content, message",
    ("", "expected a line with the columns id, lower, upper, size"),
    (
        "id,lower,upper\n",
        "line 1: expected the columns id, lower, upper, size, got no size in 'id,",
    ),
    ("id,lower,upper,size,id\n", "line 1: expected columns that differ, got 'id' twice"),
    ("HEAD\na,1,2\n", "line 2: expected 4 fields, id, lower, upper, size, got 3"),
    ("HEAD\na,1,2,3,4\n", "line 2: expected 4 fields, id, lower, upper, size, got 5"),
    ("HEAD\na,1,2,3\nb,1,x,3\n", "line 3: expected upper as an integer, got 'x'"),
    ("HEAD\na,1,2,1.5\n", "line 2: expected size as an integer, got '1.5'"),
    ("HEAD\na,,2,3\n", "line 2: expected lower as an integer, got ''"),
    ("HEAD\na,1,2,0\n", "line 2: expected a size of 1 byte or more, got 0"),
    ("HEAD\na,1,2,-8\n", "line 2: expected a size of 1 byte or more, got -8"),
    (
        "HEAD\na,1,2,9223372036854775809\n",
        "line 2: size is 9223372036854775809; the limit is 2**62",
    ),
    ("HEAD\na,1,99999999999999999999,1\n", "line 2: upper is 99999999999999999999; the limit is"),
    (f"HEAD\na,1,2,{'9' * 5000}\n", "line 2: expected size as an integer, got '9999"),
    (f"HEAD\na,1,2,{2**62}\nb,1,2,1\n", "line 3: the sizes together exceed the limit of 2**62"),
    ("HEAD\na,3,2,1\n", "line 2: expected upper >= lower, got lower 3, upper 2"),
    ("HEAD\na,1,2,1\n\na,1,2,1\n", "line 4: expected ids that differ, got 'a' as in line 2"),
    ("HEAD\n,1,2,1\n", "line 2: expected an id, got an empty field"),
    ('HEAD\n"a,1,2,1\n', "line 2: unexpected end of data"),
    ("HEAD\na\xff,1,2,1\n", "line 2: not UTF-8 text"),
    (f"HEAD\n{'a' * 200_000},1,2,1\n", "line 2: field larger than field limit"),
    ("HEAD\na,1,3,8\nb,2,4,9\n", "the capacity is 16 bytes, but 17 are in use at the same time"),
)
def test_damaged_buffers_are_one_line(
    content: str, message: str, folder: Path, capsys: Capsys
) -> None:
    text = content.replace("HEAD", "id,lower,upper,size")
    Path("buffers.csv").write_bytes(text.encode("latin-1"))
    error = fails(capsys, "plan buffers.csv --capacity 16 --out placed.csv")
    assert error.startswith("error: buffers.csv: ")
    assert message in error
    assert not Path("placed.csv").exists()


@cases(
    "command, message",
    ("nosuch.csv", "error: nosuch.csv: No such file or directory"),
    (".", "error: .: Is a directory"),
    ("/dev/zero", "error: /dev/zero: expected at most 256 MiB from a pipe or device"),
    ("buffers.csv --out no/x.csv", "error: no/x.csv: No such file or directory"),
    ("buffers.csv --plot no/x.svg", "error: no/x.svg: No such file or directory"),
    ("buffers.csv --plot x.png", "error: --plot: expected a name that ends in .svg"),
)
def test_what_plan_cannot_read_or_write(
    command: str, message: str, folder: Path, capsys: Capsys
) -> None:
    Path("buffers.csv").write_text(BUFFERS)
    assert fails(capsys, f"plan {command}").startswith(message)


@cases(
    "option, message",
    ("--capacity 64X", "--capacity: expected a whole number from 1 to 2**63 - 1, got '64X'"),
    ("--capacity -5", "--capacity: expected a whole number from 1 to 2**63 - 1, got '-5'"),
    ("--capacity 0", "--capacity: expected a whole number from 1 to 2**63 - 1, got '0'"),
    ("--capacity 9223372036854775808", "--capacity: expected a whole number from 1 to 2**63 - 1"),
    ("--capacity 1.5", "--capacity: expected a whole number from 1 to 2**63 - 1, got '1.5'"),
    ("--effort 0", "--effort: expected a whole number from 1 to 2**63 - 1, got '0'"),
    ("--effort 8G", "--effort: expected at most 4294967296, got 8G"),
)
def test_bad_options_of_plan(option: str, message: str, capsys: Capsys) -> None:
    assert refuses(SystemExit, "", command_line, f"plan buffers.csv {option}").code == 2
    assert message in capsys.readouterr().err


def test_a_buffer_that_is_never_in_use_must_fit(folder: Path, capsys: Capsys) -> None:
    Path("buffers.csv").write_text("id,lower,upper,size\na,0,5,40\nb,3,3,100\n")
    error = fails(capsys, "plan buffers.csv --capacity 50")
    assert "the capacity is 50 bytes, but buffer 'b' has 100" in error
    assert command_line("plan buffers.csv --capacity 100 --out placed.csv") == 0
    assert Path("placed.csv").read_text().splitlines()[1:] == ["a,0,5,40,0", "b,3,3,100,0"]


@cases("shift, first", (100, 100), (1 << 50, 1 << 50), (0, 0))
def test_a_picture_of_buffers_has_their_ids_and_moments(
    shift: int, first: int, folder: Path
) -> None:
    rows = [("weights", 0, 5, 40), ("x", 3, 7, 100), ("y", 8, 10, 60)]
    lines = [f"{name},{low + shift},{high + shift},{size}" for name, low, high, size in rows]
    Path("buffers.csv").write_text("\n".join(["id,lower,upper,size", *lines]))
    assert command_line("plan buffers.csv --plot plan.svg") == 0
    svg = Path("plan.svg").read_text()
    for name, low, high, _ in rows:
        assert f"{name}: u8" in svg
        assert f"events {low + first:,} to {high + first - 1:,}" in svg


def test_ctrl_c_ends_a_long_search(folder: Path) -> None:
    blocks = rectangle(2, 1500, pinwheels=True).blocks  # of which no plan is found for minutes
    rows = [f"{i},{each.start},{each.end},{each.nbytes}" for i, each in enumerate(blocks)]
    Path("buffers.csv").write_text("\n".join(["id,lower,upper,size", *rows]))
    code = (
        "import sys; from mlvm.__main__ import main; print('begun', flush=True);"
        "sys.exit(main(['plan', 'buffers.csv', '--effort', '4000000000', '--out', 'placed.csv']))"
    )
    with start_python("-c", code, cwd=folder) as process:
        assert line_of(process) == "begun\n"
        time.sleep(1.0)  # the search has begun; an earlier signal ends the command as well
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "interrupted\n"
    assert process.returncode == 130
    assert not Path("placed.csv").exists()


def test_mutated_buffers_never_end_in_a_traceback(folder: Path) -> None:
    generator = random.Random(0)
    for _ in range(with_long(100, 1000)):
        Path("buffers.csv").write_bytes(mutated(BUFFERS.encode(), generator))
        assert command_line("plan buffers.csv --effort 1") in (0, 1)


# --- as a process --------------------------------------------------------------------------


def test_ctrl_c_ends_an_endless_program_with_status_130(folder: Path) -> None:
    Path("endless.mlasm").write_text(ENDLESS)
    command = "-m", "mlvm", "run", "endless.mlasm", "--out", "begun"
    with start_python(*command, cwd=folder) as process:
        wait_for(Path("begun").exists, 30)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "interrupted\n"
    assert process.returncode == 130


def test_a_step_with_lengths_draws_its_plan_at_a_length(folder: Path, capsys: Capsys) -> None:
    names, bounds = {"x": ("n", None), "i": ()}, {"n": 8}
    step = ml.capture(
        lambda x, i: ml.take(x * 2.0, i, axis=0) @ x.T, dynamic_axes=names, max_sizes=bounds
    )
    for n in (4, 6):
        step(ml.ones((n, 4)), ml.asarray(0))
    step.save("step.mlvm")
    for n in (3, 8):
        assert main(["memory", "step.mlvm", "--arg", f"f32[{n},4]", "--arg", "i64[]"]) == 0
        assert f"f32[{n},4]" in capsys.readouterr().out
    assert "expected 1 to 8" in fails(capsys, "memory step.mlvm --arg f32[9,4] --arg i64[]")
    for wrong in ("f32[3,5]", "i64[3,4]"):
        errors = fails(capsys, f"memory step.mlvm --arg {wrong} --arg i64[]")
        assert f"expected input 0 as f32[n,4], got {wrong}" in errors
    errors = fails(capsys, "memory step.mlvm --arg i64[]")
    assert "2 arguments, got 1 --arg; expected f32[n,4], i64[]" in errors
    errors = fails(capsys, f"run step.mlvm --arg 'f32[3,4] {'1 ' * 12}' --arg 'i64[] 7'")
    assert re.search(r"index 7 .* recorded at .*test_main\.py:\d+$", errors)
