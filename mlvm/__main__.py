"""Command line of mlvm: `python -m mlvm COMMAND`.

The docstring of the function that runs a command is its help text.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import shlex
import stat
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.lib import format as npy

from mlvm import __version__, migrate
from mlvm.build.targets import OPTIONS, TARGETS
from mlvm.core import ops as _fill_the_op_table  # noqa: F401
from mlvm.core.errors import (
    AssemblyError,
    DTypeError,
    LimitExceededError,
    MlvmError,
    OpError,
    UnknownFunctionError,
    counted,
)
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.link import nargs_of
from mlvm.core.machine.verify import Verdict, verify
from mlvm.core.op import OPS
from mlvm.core.program.assembly import (
    assemble,
    disassemble,
    format_constant,
    format_instruction,
    parse_constant,
)
from mlvm.core.program.encoding import KIND_AT, MAGIC, Kind
from mlvm.core.program.program import OPCODES, Program
from mlvm.core.types import Array, DType, TensorType, f64
from mlvm.eager.runs import commands as recordings
from mlvm.eager.runs.debugger import Debugger
from mlvm.eager.runs.diff import diff
from mlvm.eager.runs.execution import Execution
from mlvm.eager.runs.log import is_log
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.page import comparison_page, recording_page
from mlvm.eager.runs.replay import Replay, open_run
from mlvm.eager.runs.repro import Repro
from mlvm.eager.runs.run import LOG
from mlvm.eager.runs.source import use_recorded
from mlvm.eager.tensor.number import open_lengths
from mlvm.fixed_step import about_fixed_step
from mlvm.machines import printing
from mlvm.machines.files import (
    format_of,
    require_suffix,
    require_writable,
    write_array,
    write_file,
)
from mlvm.machines.gpu import tiles
from mlvm.machines.gpu.devices import devices, why_not
from mlvm.machines.local import LocalVM
from mlvm.machines.native import extension
from mlvm.machines.remote import command as remote
from mlvm.machines.terminal import (
    REPEATED,
    CommandParser,
    OptionError,
    add_command,
    count,
    one_line,
    say,
    whole_number,
)
from mlvm.machines.versions import cause_of_other_bits
from mlvm.parallel.launch import launch, mpirun
from mlvm.show import plan_command
from mlvm.show.memory_report import plan_of, show_peak, show_plan, show_script, show_step
from mlvm.show.page import Step, session_page, step_page
from mlvm.show.script import ScriptFailed, run_script
from mlvm.show.session import all_recorded
from mlvm.show.vm_trace import profile
from mlvm.step.compile import Planned, on_planned
from mlvm.step.saved import LoadedStep, SavedStep

A_STEP: Final = (
    "expected a captured step: a file of Captured.save, or for an ONNX model of "
    "`python -m mlvm onnx MODEL.onnx --save step.mlvm`"
)


class BadInput(MlvmError):
    """Error for an invalid file or argument of a command; the text names it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns the exit status: 0, 1 for an error, 130 after Ctrl-C, or the status of a failed script.

    An error is one line on stderr. Raises `SystemExit`, with status 2, for bad usage.
    """
    return parser().run(argv)


def _mlvm(_: argparse.Namespace) -> None:
    """Run, inspect and compare programs of mlvm.

    `python -m mlvm COMMAND --help` describes a command and shows an example.

    Example:
        python -m mlvm info
    """


def parser() -> CommandParser:
    """Return the parser of all commands."""
    top = CommandParser(_mlvm, prog="python -m mlvm")
    top.set_defaults(version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add = add_command(commands, "run", run).add_argument
    formats = "assembly, such as examples/newton.mlasm, or a captured step, such as step.mlvm"
    add("file", metavar="FILE", help=formats)
    argument = "next argument: a .npy file, or a tensor such as 'f32[2] 1.5 2'"
    add("--arg", **REPEATED, metavar="X", help=argument)
    add("--out", type=Path, metavar="DIR", help="write DIR/0.npy, DIR/1.npy, ...")
    add("--print", action="store_true", help="also print the elements of the outputs")
    steps = "fail after N instructions, for endless loops"
    add("--max-steps", type=count, metavar="N", help=steps)
    add("--trace", metavar="JSON", help="write a trace of the run, for Perfetto")

    add = add_command(commands, "debug", debug).add_argument
    text = "a file of Captured.save_repro or Captured.save, or the folder of a recording"
    add("file", metavar="FILE", help=text)
    text = "the step of a recording, from 0 (default: the first one)"
    add("--step", type=count, metavar="N", help=text)
    argument = "next input of a saved step, as in run; not for a repro"
    add("--arg", **REPEATED, metavar="X", help=argument)
    add("--browser", action="store_true", help="show a page in a browser, which reads commands")
    command = "run this command, such as 'b any(isnan(q))', instead of reading commands from stdin"
    add("--command", dest="commands", **REPEATED, metavar="COMMAND", help=command)

    add = add_command(commands, "check", check).add_argument
    add("file", metavar="FILE", help="a program or a captured step, as in run")
    argument = (
        "type of the next argument, such as f32[2,3]; without types, operands are not checked"
    )
    add("--type", **REPEATED, metavar="T", help=argument)

    add = add_command(commands, "build", build).add_argument
    text = "a file of Captured.save, or of `onnx MODEL.onnx --save STEP.mlvm`"
    add("file", metavar="STEP.mlvm", help=text)
    add("-o", dest="folder", type=Path, required=True, metavar="DIR", help="the folder to write")
    add("--target", default="host", metavar="T", help=f"one of {', '.join(TARGETS)}")
    sets = ("auto", *OPTIONS)
    text = "instruction sets of the kernels; auto: all sets of the target; a run uses the best set"
    add("--simd", choices=sets, default="auto", help=text)
    where = "store weights in the program, or in DIR/weights.bin"
    add("--weights", choices=("embed", "file"), default="file", help=where)
    most = "maximum number of threads"
    add("--threads", type=whole_number, default=1, metavar="N", help=most)
    deep = "maximum depth of recursive calls"
    add("--depth", type=count, default=64, metavar="N", help=deep)
    records = "memory for residuals of loops of unknown length, and for rows of ml.auto_batch"
    add("--records", type=count, default=1 << 20, metavar="BYTES", help=records)

    add = add_command(commands, "disasm", disasm).add_argument
    add("file", metavar="FILE", help="a program or a captured step, as in run")

    add = add_command(
        commands,
        "memory",
        memory,
        has_script=True,
        usage="python -m mlvm memory [-h] [--arg X] [--budget SIZE] [--out DIR] FILE "
        "[-- ARGUMENT ...]",
    ).add_argument
    add("file", metavar="FILE", help="a .py file, which is run, or a program")
    argument = "next argument of the program as in run, or a type such as 'f32[2]' for zeros"
    add("--arg", **REPEATED, metavar="X", help=argument)
    budget = "such as 64M: show the largest values at the peaks of captured steps, and alternative "
    budget += "programs that fit, and plot them by memory and time"
    add("--budget", type=whole_number, metavar="SIZE", help=budget)
    add(
        "--out", type=Path, metavar="DIR", help="folder for the plots (default: the folder of FILE)"
    )

    plan_command.add_options(add_command(commands, "plan", plan).add_argument)

    add = add_command(
        commands,
        "show",
        show,
        has_script=True,
        usage="python -m mlvm show [-h] [-o HTML] [--open] FILE [DIR] [-- ARGUMENT ...]",
    ).add_argument
    text = "a file of Captured.save, a .py file, or the folder of a recording"
    add("file", metavar="FILE", help=text)
    add("other", metavar="DIR", nargs="?", help="a second recording, which is compared")
    page = "the page to write (default: FILE.html)"
    add("-o", dest="page", type=Path, metavar="HTML", help=page)
    add("--open", action="store_true", help="show the page in a browser")

    add = add_command(commands, "onnx", run_onnx).add_argument
    add("file", metavar="MODEL", help="an .onnx file")
    text = "next input: a .npy file, a tensor, or a type for zeros, as in memory"
    add("--input", **REPEATED, metavar="X", help=text)
    add("--time", action="store_true", help="measure calls, and the ops of a call")
    add("--plan", action="store_true", help="print and plot the memory plan")
    add("--save", type=Path, metavar="STEP", help="write the planned step, for `run`")
    add("--out", type=Path, metavar="DIR", help="folder for results and plots")

    add = add_command(commands, "launch", launch_members).add_argument
    add("--members", type=whole_number, required=True, metavar="N", help="processes on this host")
    again = "maximum restarts of all processes after a failure"
    add("--restarts", type=count, default=0, metavar="K", help=again)
    hosts = "number of hosts; each host runs this command"
    add("--nodes", type=whole_number, default=1, metavar="N", help=hosts)
    add("--node", type=count, default=0, metavar="I", help="number of this host, from 0")
    first = "an address of the first host, to which all members connect"
    add("--address", metavar="HOST:PORT", help=first)
    _add_script(add)

    add = add_command(commands, "mpirun", launch_mpi).add_argument
    text = "number of processes"
    add("-n", dest="processes", type=whole_number, required=True, metavar="N", help=text)
    _add_script(add)

    add = add_command(commands, "ops", print_ops).add_argument
    add("names", nargs="*", metavar="OP", help="an op to document in full")
    add = add_command(commands, "tune", print_tuning).add_argument
    add("device", metavar="DEVICE", help="such as opencl:0; `info` lists the devices")
    add_command(commands, "info", print_info)
    add = add_command(commands, "migrate", migrate.migrate).add_argument
    what = f"a file, or a folder with {', '.join(migrate.SUFFIXES)} files"
    add("files", nargs="+", type=Path, metavar="FILE", help=what)
    text = "only list old names; exit with status 1 if a file would change"
    add("--check", action="store_true", help=text)
    add("--diff", action="store_true", help="only print the changes, as a unified diff")
    add("--no-backup", action="store_true", help="do not keep the old text as FILE.orig")
    recordings.add_to(commands)
    remote.add_to(commands)
    return top


def _add_script(add: Callable[..., object]) -> None:
    """Add a script or a module with arguments as the rest of the command line."""
    rest: Any = {"nargs": argparse.REMAINDER}
    add("-m", dest="module", **rest, metavar="MODULE", help="a module and arguments")
    add("script", **rest, metavar="SCRIPT", help="a .py file and arguments; -- may precede it")


def _command(options: argparse.Namespace) -> list[str]:
    """Return the arguments with which Python runs the script or module."""
    if options.module:
        return ["-m", *options.module]
    script: list[str] = options.script[options.script[:1] == ["--"] :]
    if not script:
        raise OptionError("expected a script, or -m and a module")
    return script


# --- programs and arguments ------------------------------------------------------------


_MOST_PIPED: Final = 1 << 28


def read_bytes(file: str) -> bytes:
    """The bytes of a file.

    Raises `BadInput` for a pipe or a device that does not end within 256 MiB, and `OSError`.
    """
    if is_log(Path(file) / LOG):
        raise BadInput(f"{file}: it is a recording: use mlvm replay, debug, diff, verify or show")
    with open(file, "rb") as stream:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return stream.read()
        data = stream.read(_MOST_PIPED + 1)
    if len(data) > _MOST_PIPED:
        raise BadInput(
            f"{file}: expected at most {_MOST_PIPED >> 20} MiB from a pipe or device; "
            "save it in a file first"
        )
    return data


_MESSAGES: Final[Mapping[bytes, Callable[[bytes], Program | SavedStep | OpProgram | Repro]]] = {
    Kind.step.value.to_bytes(2, "little"): SavedStep.from_bytes,
    Kind.ops.value.to_bytes(2, "little"): OpProgram.from_bytes,
    Kind.repro.value.to_bytes(2, "little"): Repro.from_bytes,
}
"""Decoders of files that are not programs, by the bytes of the kind."""


def read_file(file: str) -> Program | SavedStep:
    """Read a program, or the captured step in a file or repro. Raises the errors of `read_any`."""
    return _runnable(read_any(file))


def _runnable(loaded: Program | SavedStep | OpProgram | Repro) -> Program | SavedStep:
    loaded = loaded.program if isinstance(loaded, Repro) else loaded
    return loaded.step if isinstance(loaded, OpProgram) else loaded


def read_any(file: str) -> Program | SavedStep | OpProgram | Repro:
    """Read a program, a captured step or a repro from a file.

    A program is a file of assembly, the bytes of `Program.to_bytes`, or a program op by op.
    `Captured.save` writes a captured step, `Captured.save_repro` a repro.

    Raises `BadInput` for any other file, with line and column for text; and `OSError`.
    """
    data = read_bytes(file)
    try:
        if not data.startswith(MAGIC):
            return assemble(data.decode())
        return _MESSAGES.get(data[KIND_AT : KIND_AT + 2], Program.from_bytes)(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        text = format_of(data[:4096]) or f"line {line}: not UTF-8 text; save the file as UTF-8"
    except MlvmError as error:
        text = str(error)
        if file.endswith(".py"):
            text = f"it is a Python script: use python {file}, or mlvm memory or show {file}"
    is_binary = b"\0" in data or (file.endswith(".mlvm") and not data)
    if is_binary and file.endswith(".mlvm") and not data.startswith(MAGIC):
        text = f"expected {MAGIC!r} or assembly at the beginning, got {data[:4]!r}"
    raise _invalid(file, text, has_binary=is_binary)


def _invalid(file: str, text: str, *, has_binary: bool) -> BadInput:
    """Return the error for a file; a file that mlvm has written may be damaged."""
    is_known = not has_binary or "damaged" in text or "version" in text
    remedy = "" if is_known else "; the file may be damaged: write or send it again"
    return BadInput(f"{file}: {text}{remedy}")


def _verified(
    file: str, loaded: Program | SavedStep, types: Sequence[TensorType] | None = None
) -> Verdict:
    """Verify the program of a file. Raises `BadInput` with the file's name if it is invalid."""
    try:
        return verify(program_of(loaded), _functions(), types)
    except MlvmError as error:
        raise _invalid(file, one_line(error), has_binary=isinstance(loaded, SavedStep)) from None


def program_of(loaded: Program | SavedStep) -> Program:
    """Return the program, or the planned program of a saved step."""
    return loaded.planned.program if isinstance(loaded, SavedStep) else loaded


def _functions() -> FunctionTable:
    """Return the host functions that a program may call; `ml.debug` functions print nothing."""
    vm = LocalVM()
    printing.register_silent(vm)
    return vm.functions


_TENSOR_TEXT: Final = re.compile(r"\s*\w+\[[^]]*\](\s|$)")
_TYPE_ALONE: Final = re.compile(r"\s*\w+\[[^]]*\]\s*")


def read_argument(number: int, text: str) -> Array:
    """Return argument `number` of a launch: a tensor as text, or the contents of a .npy file.

    Raises `BadInput` if the text or the file is not a tensor, and `OSError`.
    """
    try:
        if _TENSOR_TEXT.match(text):
            return parse_constant(text)
        array = _read_npy(read_bytes(text))
        TensorType.of(array)
        return array
    except FileNotFoundError as error:
        remedy = "expected a .npy file, or a tensor such as 'f32[2] 1.5 2'"
        raise BadInput(f"argument {number}, {text}: {error.strerror}; {remedy}") from None
    except (OSError, BadInput):
        raise
    except (AssemblyError, DTypeError) as error:
        remedy = "; write values, as in 'f32[2] 1.5 2'" if _TYPE_ALONE.fullmatch(text) else ""
        raise BadInput(f"argument {number}, {text}: {error}{remedy}") from None
    except Exception as error:  # numpy raises many classes for a broken header
        raise BadInput(
            f"argument {number}, {text}: expected a .npy file, as numpy.save writes it: {error}"
        ) from None


def _read_npy(content: bytes) -> Array:
    """Return the array of a .npy file, in new memory and this machine's byte order.

    numpy's reader allocates the size in the header before it checks the length of the file. Raises
    numpy's errors for any other file.
    """
    stream = io.BytesIO(content)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"expected version 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("expected numbers, got Python objects; save an array with a numeric dtype")
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    array: Array = np.ndarray(shape, dtype, content, stream.tell(), order=order)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("expected bools as 0 or 1, got a different byte")
    return array.astype(dtype.newbyteorder("="))


def read_argument_or_type(number: int, text: str) -> Array:
    """Read an argument like `read_argument`; a type without values is a tensor of zeros."""
    if _TYPE_ALONE.fullmatch(text):
        type = read_type(number, text)
        return np.zeros(type.shape, type.dtype.numpy)
    return read_argument(number, text)


def read_type(number: int, text: str) -> TensorType:
    """Parse the type of argument `number`. Raises `BadInput` for invalid text."""
    try:
        return TensorType.parse(text)
    except OpError as error:
        raise BadInput(f"argument {number}: {error}") from None


def _check_count(
    expected: int, count: int, option: str, types: Sequence[object] | None = None
) -> None:
    if count != expected:
        takes = f"; expected {', '.join(map(str, types))}" if types else ""
        arguments = counted(expected, "argument")
        raise BadInput(f"the program needs {arguments}, got {count} {option}{takes}")


def _arguments(
    loaded: Program | SavedStep,
    texts: Sequence[str],
    read: Callable[[int, str], Array] = read_argument,
) -> list[Array]:
    """Read the arguments of a call. Raises `BadInput` for a wrong number, and errors of `read`."""
    types = None if isinstance(loaded, Program) else loaded.input_types
    expected = nargs_of(loaded) if isinstance(loaded, Program) else len(loaded.inputs)
    _check_count(expected, len(texts), "--arg", types)
    arrays = [read(number, text) for number, text in enumerate(texts)]
    if not isinstance(loaded, Program):
        for number, (array, type) in enumerate(zip(arrays, loaded.inputs, strict=True)):
            if array.dtype == np.float64 and type.dtype.is_float and type.dtype is not f64:
                say(f"note: argument {number} is rounded from f64 to {type.dtype.name}")
    return arrays


# --- the commands ----------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Run a program or a captured step, and print the types of the outputs.

    A file of Captured.save_repro contains the arguments and the digests of the outputs, which are
    verified.

    Example:
        python -m mlvm run examples/newton.mlasm --arg 'f64[3] 2 9 0.5' --print
    """
    opened = read_any(options.file)
    repro, loaded = opened if isinstance(opened, Repro) else None, _runnable(opened)
    _verified(options.file, loaded)
    vm = LocalVM()
    printing.register(vm)
    if repro is not None and options.arg:
        raise BadInput(f"{options.file}: a repro contains the inputs; omit --arg")
    arrays = [*repro.inputs] if repro is not None else _arguments(loaded, options.arg)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)  # fail early, not after a long run
    with profile(vm, options.trace) if options.trace is not None else nullcontext():
        try:
            if isinstance(loaded, SavedStep):
                step = LoadedStep(loaded, vm)
                outputs = step(*arrays, max_steps=options.max_steps)
            else:
                handles = [vm.alloc_tensor(TensorType.of(array)) for array in arrays]
                for handle, array in zip(handles, arrays, strict=True):
                    vm.write(handle, array)
                outputs = vm.launch(loaded, handles, max_steps=options.max_steps)
        except LimitExceededError as error:
            reason = one_line(error).replace("raise max_steps=", "raise --max-steps")
            raise BadInput(reason) from None
    for number, output in enumerate(outputs):
        if options.out is not None:
            write_array(options.out / f"{number}.npy", output)
        text = format_constant(output) if options.print else TensorType.of(output)
        print(f"output {number}: {text}")
    if repro is not None:
        differing = repro.differing([*outputs, *step.states()])
        if differing:
            cause = cause_of_other_bits(repro.versions) or "; the file may be damaged"
            raise BadInput(
                f"{options.file}: {', '.join(differing)} of the call: expected the recorded "
                f"digests, got different ones{cause}"
            )
        values = counted(len(outputs), "output")
        if nstates := len(repro.digests) - len(outputs):
            values += f" and {counted(nstates, 'state')}"
        print(f"verified: the recorded digests of {values}")


def debug(options: argparse.Namespace) -> int:
    """Step over the ops of a captured call, forwards and backwards.

    The debugger reads commands from stdin; h lists them. The exit status is 1 if a `--command`
    fails.

    Example:
        python -m mlvm debug bug.mlvm --command n --command 'p x'
    """
    debugger = Debugger(_execution(options))
    if options.browser:
        from mlvm.eager.runs.browser import debug_in_browser  # imports an HTTP server

        debug_in_browser(debugger, options.commands, f"mlvm debug {options.file}")
        return 0
    failed = debugger.run(options.commands or None)
    return int(failed > 0 and bool(options.commands))


def _execution(options: argparse.Namespace) -> Execution:
    """Return the execution of a recorded step, a repro, or a saved step with arguments."""
    if Path(options.file).is_dir():
        run = open_run(options.file)
        number = options.step or 0
        for file in run.step(number, "debug").table.sources:
            with suppress(MlvmError, OSError):  # without the file, only lines of ops are known
                use_recorded(file, run.source(file))
        return Replay(run).execution(number)
    if options.step is not None:
        raise BadInput(f"--step selects a step of a recording, and {options.file} is a file")
    try:
        loaded = read_any(options.file)
    except BadInput as error:
        if format_of(read_bytes(options.file)[:4096]) or options.file.endswith(".py"):
            raise
        raise BadInput(
            f"{options.file}: expected a file of Captured.save_repro or Captured.save, or the "
            f"folder of a recording, got a program"
        ) from error
    if isinstance(loaded, Program):
        raise BadInput(f"{options.file} is a program; {A_STEP}")
    if isinstance(loaded, Repro):
        _check_count(0, len(options.arg), "--arg")
        program, arrays = loaded.program, [*loaded.inputs]
    else:
        step = loaded.step if isinstance(loaded, OpProgram) else loaded
        arrays = _arguments(step, options.arg)
        step = step.at([*map(TensorType.of, arrays)])
        program = loaded if isinstance(loaded, OpProgram) else OpProgram.of_step(step)
    _verified(options.file, program.step)
    vm = LocalVM("debugger")
    printing.register(vm)
    return Execution(program, arrays, vm=vm)


def build(options: argparse.Namespace) -> None:
    """Write a captured step as C, which needs neither Python nor malloc.

    Example:
        python -m mlvm build step.mlvm -o build
    """
    extension.require("a build needs the native kernels")
    from mlvm.build import build as builder  # requires the extension

    loaded = _read_step(options.file, A_STEP)
    codes = [each.code for each in program_of(loaded).functions.values()]
    if any(x.immediates[:1] in ((printing.PRINT,), (printing.WATCH,)) for x in chain(*codes)):
        raise BadInput(
            f"{options.file}: expected a step without ml.debug.print and ml.debug.watch, which C "
            "does not have; remove them and save the step again"
        )
    step = builder.build(
        loaded,
        options.folder,
        open_lengths,
        target=options.target,
        simd=options.simd,
        embed=options.weights == "embed",
        threads=options.threads,
        depth=options.depth,
        records=options.records,
        title=f"{Path(options.file).name}, as a step in C.",
    )
    print(f"{options.folder}: {len(step.kernels)} kernels for {', '.join(step.sets)}")
    print(f"memory: {step.memory} bytes of tensors; weights: {step.weights} bytes")
    print(f"next: make -C {shlex.quote(str(options.folder))}")


def check(options: argparse.Namespace) -> None:
    """Verify a program without running it.

    The command lists calls with operands that only a run can check, and instructions that no path
    reaches.

    Example:
        python -m mlvm check examples/newton.mlasm --type 'f64[3]'
    """
    loaded = read_file(options.file)
    program = program_of(loaded)
    types = (
        [each.type for each in loaded.planned.arguments] if isinstance(loaded, SavedStep) else None
    )
    if options.type:
        _check_count(nargs_of(program), len(options.type), "--type")
        types = [read_type(number, text) for number, text in enumerate(options.type)]
    verdict = _verified(options.file, loaded, types)
    places = [
        (f.name, pc, instruction)
        for f in program.functions.values()
        for pc, instruction in enumerate(f.code)
    ]
    print(
        f"ok: {counted(len(program.functions), 'function')}, {counted(len(places), 'instruction')}"
    )
    for name, pc, instruction in places:
        if (name, pc) in verdict.unproven:
            print(f"checked when it runs: {name}, pc {pc}: {format_instruction(instruction)}")
        elif (name, pc) not in verdict.reached:
            print(f"never reached: {name}, pc {pc}: {format_instruction(instruction)}")


def disasm(options: argparse.Namespace) -> None:
    """Print a program as assembly.

    Example:
        python -m mlvm disasm step.mlvm
    """
    print(disassemble(program_of(read_file(options.file))), end="")


def memory(options: argparse.Namespace) -> int:
    """Report and plot the arenas of a script, or the plan for a program.

    Each plot shows the addresses and lifetimes of tensors. Arguments after -- are passed to the
    script. With --budget, the exit status is 1 if no program of a captured step in the script fits,
    or if the plan of FILE exceeds the budget.

    Example:
        python -m mlvm memory train.py -- --epochs 1
    """
    file = Path(options.file)
    out = options.out if options.out is not None else file.parent
    fits = True
    if file.suffix == ".py":
        if options.arg:
            raise BadInput("--arg is only for programs, not for scripts; omit it")
        if not file.is_file():
            raise BadInput(f"{file}: the file does not exist; check the path")
        out.mkdir(parents=True, exist_ok=True)
        planned = _planned() if options.budget is not None else nullcontext(list[Planned]())
        try:
            with planned as steps:
                has_tensors = show_script(file, out, options.arguments)
        finally:
            for number, step in enumerate(steps, 1):
                assert step.curve is not None  # observers get a curve
                path = str(out / f"{file.stem}.step-{number}")
                recording, points = step.recording(), step.curve()
                fits &= show_step(path, step.plan, recording, points, options.budget)
        if options.budget is not None and not steps:
            raise BadInput(f"no captured function was called in {file}; call one, or omit --budget")
        if not has_tensors:
            print(f"{file}: the script created no tensors")
        return int(not fits)
    if options.arguments:
        raise BadInput("arguments after -- are only for scripts; use --arg for a program")
    loaded = read_file(options.file)
    _verified(options.file, loaded)
    arguments: list[Array] = []
    if isinstance(loaded, SavedStep) and options.arg and loaded.open is None:
        raise BadInput("a captured step without dynamic sizes has one plan: omit --arg")
    if options.arg or not isinstance(loaded, SavedStep):
        arguments = _arguments(loaded, options.arg, read_argument_or_type)
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(loaded, SavedStep):
        loaded = loaded.at([*map(TensorType.of, arguments)]) if arguments else loaded
        if loaded.open is not None:
            print(f"lengths: {loaded.open}: {', '.join(loaded.open.input_types())}")
        memory_plan, recording = loaded.planned.plan, loaded.planned.recording()
    else:
        memory_plan, recording = plan_of(loaded, arguments)
    show_plan(memory_plan, recording, file, out)
    if options.budget is not None:
        fits = show_peak(memory_plan, options.budget, recording)
    return int(not fits)


@contextmanager
def _planned() -> Iterator[list[Planned]]:
    """Yield the list of the programs that captured functions plan in the block."""
    steps: list[Planned] = []
    on_planned.append(steps.append)
    try:
        yield steps
    finally:
        on_planned.remove(steps.append)


def plan(options: argparse.Namespace) -> None:
    """Plan offsets for buffers of known lifetimes, as for the scratch memory of a step.

    The columns of BUFFERS.csv are id, lower, upper and size in any order: a buffer of `size` bytes
    is in use in the moments lower .. upper - 1.

    Example:
        python -m mlvm plan buffers.csv --capacity 1M --out placed.csv --plot placed.svg
    """
    plan_command.plan_buffers(options, read_bytes(options.file))


def show(options: argparse.Namespace) -> int:
    """Write a page that shows a captured step, the run of a script, or one or two recordings.

    If a script fails, the page shows the run until the failure. Arguments after -- are passed to
    the script.

    Examples:
        python -m mlvm show train.py -- --epochs 1
        python -m mlvm show before after
    """
    file = Path(options.file)
    if not file.name:
        raise BadInput(f"{options.file!r} is not a file; show reads a file of Captured.save")
    if options.page is not None:
        require_suffix(options.page, ".html", "-o")
    page = options.page if options.page is not None else file.with_name(f"{file.name}.html")
    failed: ScriptFailed | None = None
    if options.other is not None and file.suffix == ".py":
        call = f"python -m mlvm show {shlex.join([options.file, '--', options.other])}"
        raise OptionError(f"unrecognized arguments: {options.other}; write {call}")
    if options.other is not None or file.is_dir():
        a = open_run(file)
        if options.other is None:
            html = recording_page(a)
        else:
            b = open_run(options.other)
            html = comparison_page(a, b, diff(a, b))
    elif file.suffix == ".py":
        if not file.is_file():
            raise BadInput(f"{file}: the file does not exist; check the path")
        require_writable(page)
        with _planned() as planned, all_recorded() as session:
            try:
                run_script(file, options.arguments)
            except ScriptFailed as error:
                failed = error
                print(error.output, end="", file=sys.stderr)
        steps = [_as_step(each) for each in planned]
        failure = str(failed) if failed is not None else None
        html = session_page(session, steps, file.name, failed=failure)
    else:
        if options.arguments:
            raise BadInput(
                "arguments after -- are only for scripts, not for captured steps; omit them"
            )
        expected = (
            "expected a file of Captured.save, or a Python script (.py); memory plans a program"
        )
        step = _read_step(options.file, expected)
        title = file.name if step.open is None else f"{file.name} at {step.open}"
        html = step_page(_as_step(step.planned), title, before=file.stat().st_mtime)
        if step.open is not None:
            print(f"lengths  {step.open}: {', '.join(step.open.input_types())}")
    write_file(page, html)
    print(f"page  {page}" + (", until the failure of the script" if failed else ""))
    if options.open:
        webbrowser.open(page.resolve().as_uri())
    return failed.status if failed is not None else 0


def _read_step(file: str, expected: str) -> SavedStep:
    """Read and verify the captured step in a file.

    Raises `BadInput`, with what was expected, for any other file; and `OSError`.
    """
    try:
        loaded = read_file(file)
    except BadInput as error:
        raise BadInput(f"{error}; {expected}") from None
    if not isinstance(loaded, SavedStep):
        raise BadInput(f"{file} is a program; {expected}")
    _verified(file, loaded)
    return loaded


def _as_step(planned: Planned) -> Step:
    """Return a planned program as text for a page."""
    arguments = [
        f"{role}{f' at {place:,}' if role == 'scratch' else f' {place}'}: {type}"
        for role, place, type in planned.arguments
    ]
    program, lines = planned.program, planned.lines
    return Step(program, planned.recording(), planned.moments, lines, arguments)


def run_onnx(options: argparse.Namespace) -> None:
    """Run an ONNX file; print inputs, outputs, times of ops and the memory plan.

    Example:
        python -m mlvm onnx model.onnx --input 'f32[8,16]' --time --save model.mlvm
    """
    from mlvm.onnx.command import run  # imported here because other commands do not need it

    arrays = [read_argument_or_type(number, text) for number, text in enumerate(options.input)]
    named = {each: vars(options)[each] for each in ("plan", "save", "out")}
    run(Path(options.file), arrays, times=options.time, **named)


def print_ops(options: argparse.Namespace) -> None:
    """List the tensor ops, or document the named ones.

    Example:
        python -m mlvm ops softmax
    """
    for name in options.names:
        if name not in OPS:
            FunctionTable().binding(name)  # raises an error with similar names
            raise UnknownFunctionError(
                f"{name!r} is a variant of an op; expected the name of an op"
            )
        print(f"{OPS[name].signature}\n\n{OPS[name].doc}\n")
    if options.names:
        return
    files = {name: op.kernel.__module__.rpartition(".")[2] for name, op in OPS.items()}
    for file in sorted({*files.values()}):
        print(f"{file}:")
        for op in [OPS[name] for name in sorted(OPS) if files[name] == file]:
            print(f"  {op.signature}\n      {op.doc.splitlines()[0]}")


def print_tuning(options: argparse.Namespace) -> None:
    """Find the fastest tiles for matrix products on a device, and store them.

    Example:
        python -m mlvm tune opencl:0
    """
    from mlvm.machines.gpu.tune import tune  # imports the GPU machine

    for dtype, tile, gflops in tune(options.device):
        print(f"{dtype.name}  {gflops:8.1f} GFLOP/s  {', '.join(map(str, tile))}", flush=True)
    print(f"the fastest tile per dtype is stored in {tiles.path()}")


def print_info(_: argparse.Namespace) -> None:
    """Print versions, kernels, dtypes and the instruction set.

    Example:
        python -m mlvm info
    """
    print(f"mlvm {__version__}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"kernels: {extension.status()}")
    sets = [
        name if here else f"{name} ({extension.why_lacking(name)})"
        for name, here in extension.simd_sets().items()
    ]
    print(f"instruction sets: {', '.join(sets) or 'those of numpy'}")
    print(f"digest of a fixed training step: {about_fixed_step()}")
    threads = extension.default_threads()
    print(f"threads of the default VM: {threads} of {os.cpu_count()} (set MLVM_THREADS to change)")
    available = [f"{x.name} {x.model}, {x.nbytes / 2**30:.0f} GiB" for x in devices()]
    missing = [f"no {kind} ({why})" for kind in ("opencl", "cuda") if (why := why_not(kind))]
    print(f"devices: {'; '.join([*available, *missing])}")
    print(f"{len(OPS)} ops; dtypes {' '.join(DType.all)}; for storage {' '.join(DType.storage)}")
    print("instructions:")
    for text, opcode in OPCODES.items():
        words = " ".join([text, *opcode.immediates])
        print(f"  {words:32} {opcode.effect:28} {opcode.meaning}")


def launch_members(options: argparse.Namespace) -> int:
    """Run a script in several processes, for ml.parallel.group("auto").

    The exit status is that of the first process that fails.

    Example:
        python -m mlvm launch --members 2 -- train.py --epochs 1
    """
    named = {each: vars(options)[each] for each in ("restarts", "nodes", "node", "address")}
    return launch(options.members, _command(options), **named)


def launch_mpi(options: argparse.Namespace) -> int:
    """Run a script in several processes, for ml.parallel.MpiGroup.

    Example:
        python -m mlvm mpirun -n 2 -- train.py --epochs 1
    """
    return mpirun(options.processes, _command(options))


if __name__ == "__main__":
    raise SystemExit(main())
