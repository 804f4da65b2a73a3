"""A captured step as C: the same bits, in the caller's memory, and errors that say where."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.program.assembly import disassemble
from mlvm.core.types import DType
from mlvm.machines.native import extension
from mlvm.step.saved import SavedStep
from tests.brief import ROOT, Capsys, Patch, cases, line_with, refuses
from tests.step.test_parts import Training

pytestmark = pytest.mark.skipif(extension.EXTENSION is None, reason="there are no native kernels")
if extension.EXTENSION is not None:
    from tests.build.making import SET, difference

Builder: TypeAlias = Callable[..., Path]
COMPILER: Final = os.environ.get("CC", "gcc")
compiled = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C compiler")
FAST: Final = ["OPTIMIZE=-O0", f"CC={COMPILER}", "-j2", "-s"]

CALLER: Final = Path(__file__).with_name("caller.c").read_text("utf-8")


def saved(path: Path, step: Any, *arguments: Any) -> SavedStep:
    """The file of a captured function, after one call."""
    step(*arguments)
    step.save(path)
    return SavedStep.from_bytes(path.read_bytes())


def written(path: Path, function: Any, *arguments: Any, **options: Any) -> SavedStep:
    """The file of a function that is captured with these options."""
    return saved(path, ml.capture(function, **options), *arguments)


def build(folder: Path, step: str, *options: str) -> Path:
    """The folder of a build, and its program."""
    assert main(["build", str(folder / step), "-o", str(folder), "--simd", SET, *options]) == 0
    subprocess.run(["make", *FAST], cwd=folder, check=True)
    return folder / "step"


@ml.subroutine
def depth(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n <= 0, lambda n: n * 0, lambda n: depth(n - 1) + 1, n)


@ml.subroutine
def iterated(w: ml.Tensor, x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    """Return x after n layers."""
    return ml.cond(n <= 0, lambda: x, lambda: ml.tanh(w @ iterated(w, x, n - 1)))


@compiled
def test_lanes(tmp_path: Path, program_of: Builder) -> None:
    """A batch of calls of different depths, its gradient, which lanes sum up, a row that each takes
    by its index, and one that is not there. Lanes beyond their memory are an error."""
    w = ml.asarray(np.linspace(-0.5, 0.6, 9, dtype=np.float32).reshape(3, 3))

    def step(x: ml.Tensor, n: ml.Tensor) -> Any:
        def loss_of(w: ml.Tensor) -> Any:
            y = ml.auto_batch(lambda lane: iterated(w, *lane))((x, n))
            return ml.sum(y * y), y

        loss, gradient = ml.value_and_grad(loss_of, has_aux=True)(w)
        chosen = ml.auto_batch(
            lambda y: ml.cond(y[1] > 1, lambda: y[0][y[1]], lambda: y[0][0] * 2)
        )((x, n))
        return loss, gradient, chosen

    x = ml.asarray(np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3))
    n = np.array([0, 2, 1, 2, 0])
    saved = written(tmp_path / "step.mlvm", step, x, ml.asarray(n))
    program = program_of(saved, tmp_path, 200_000)
    assert difference(saved, program) is None
    np.save(tmp_path / "x.npy", x.numpy())
    for depth, text in ((3, "index 3 is out of range for length 3"), (9999, "than --records says")):
        np.save(tmp_path / "n.npy", n * depth // 2)
        files = ["--weights", "weights.bin", "x.npy", "n.npy"]
        done = subprocess.run([program, *files], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"lanes.run: {text}" in done.stderr or f"bytes {text}" in done.stderr


@compiled
def test_a_convnet_in_parts_of_the_batch(tmp_path: Path, program_of: Builder) -> None:
    """A memory budget computes the layers in parts, which continue the gradients of kernels."""
    training = Training(12, (21, 19, 2), ml.optim.AdamW, (5, 7))
    memory = ml.measure(training.step, training.x, training.y).plan.nbytes // 2
    file = tmp_path / "step.mlvm"
    step = written(file, training.step, training.x, training.y, memory=memory)
    assert b"add_conv2d_kernel_vjp" in file.read_bytes()
    assert difference(step, program_of(step, tmp_path)) is None


@compiled
def test_each_row_of_a_batch_reads_its_own_record(tmp_path: Path, program_of: Builder) -> None:
    """Gradients under vmap of a loop whose length each row decides, and of recursive functions."""

    def step(x: ml.Tensor, n: ml.Tensor) -> Any:
        def looped(x: ml.Tensor, n: ml.Tensor) -> Any:
            turn = lambda s: (ml.sin(s[0]) * x, s[1] + 1)  # noqa: E731
            return ml.sum(ml.while_loop(lambda s: s[1] < n, turn, (x, 0))[0])

        def called(x: ml.Tensor, n: ml.Tensor) -> Any:
            return ml.sum(ml.square(iterated(ml.ones((2, 2)) * x, x, n)))

        return [ml.vmap(ml.grad(fn))(x, n) for fn in (looped, called)]

    x = ml.asarray(np.linspace(0.1, 1, 8, dtype=np.float32).reshape(4, 2))
    saved = written(tmp_path / "step.mlvm", step, x, ml.asarray([0, 2, 1, 3]))
    assert "residuals.read_rows" in disassemble(saved.planned.program)
    assert difference(saved, program_of(saved, tmp_path)) is None


@compiled
def test_a_condition_of_any_dtype_holds_if_it_is_not_zero(
    tmp_path: Path, program_of: Builder
) -> None:
    """Of numbers and of zeros of both signs, in the program and in its lanes. Those of the `rest`
    are constants: C has no kernel that converts to these."""
    rest = ("c64", "c128", "f8e4m3", "f8e5m2")
    constants = [ml.astype(ml.asarray(x), dtype) for x in (-0.0, 1.0) for dtype in rest]
    dtypes = [dtype for name, dtype in DType.all.items() if name not in rest]

    def decided(x: ml.Tensor) -> Any:
        y = ml.where(x > 0.5, x, x * 0.0)
        turn = lambda s: (ml.full_like(s[0], -0.0), s[1] + 1)  # noqa: E731
        return [
            *[ml.cond(z, lambda: y, lambda: -1.0) for z in constants],
            *[ml.cond(ml.astype(y, dtype), lambda: 1, lambda: 0) for dtype in dtypes],
            *[
                ml.while_loop(lambda s, dtype=dtype: ml.astype(s[0], dtype), turn, (y, 0))[1]
                for dtype in dtypes
            ],
        ]

    def step(xs: ml.Tensor) -> Any:
        return ml.map(decided, xs), ml.auto_batch(decided)(xs)

    saved = written(tmp_path / "step.mlvm", step, ml.zeros(8), fuse=False)
    assert difference(saved, program_of(saved, tmp_path)) is None
    xs = ml.asarray(np.linspace(-1, 2, 8, dtype=np.float32))
    alone, lanes = ([x.numpy().tolist() for x in each] for each in step(xs))
    assert alone == lanes


@compiled
def test_all_that_a_program_may_do(tmp_path: Path) -> None:
    """Training with dropout, gradients of a loop of unknown length, recursion, f64, draws, tensors
    without elements, an LSTM in halves, and products of halves: built where Python's set has
    kernels for these, they are those of C's set."""
    model = ml.nn.Sequential(ml.nn.Linear(4, 8, key=ml.random.key(0)), ml.gelu)
    lstm = ml.nn.LSTM(4, 3, key=ml.random.key(1))
    optimizer = ml.optim.AdamW(model, 1e-2)
    key = ml.random.key(7)

    def loss_of(model: Any, x: ml.Tensor) -> ml.Tensor:
        y = ml.sum(ml.random.bernoulli((3, 8), p=0.5, key=key) * model(x), axis=1)
        y = ml.while_loop(lambda y: ml.sum(y * y) < 50, lambda y: y * 1.5 + ml.tanh(y), y)
        y, _ = ml.scan(lambda c, z: (c * 0.5 + z, c), y[0], y)
        return ml.sum(ml.astype(ml.astype(y, ml.bfloat16) * 2, ml.float32))

    def step(x: ml.Tensor, n: ml.Tensor) -> Any:
        loss, gradients = ml.value_and_grad(loss_of)(model, x)
        optimizer.update(gradients)
        half, wide = ml.astype(x, ml.bfloat16), ml.astype(x, ml.float64)
        products = half @ half.T, ml.relu(half @ half[0]), wide @ ml.asarray(np.ones(4))
        nothing = x[:, :0]
        bytes = ml.sum(ml.astype(x * 50, ml.uint8), axis=1, dtype=ml.int32)
        none = bytes, ml.sum(nothing), ml.max(nothing, axis=0), ml.argsort(nothing, axis=0)
        normal = ml.random.normal((3, 9), key=key)
        whole = ml.random.randint((7,), low=-3, high=1 << 40, key=key)
        doubles = ml.random.normal((5,), dtype=ml.float64, key=key)
        drawn = normal, whole, ml.random.permutation(11, key=key), doubles
        small = ml.astype(whole, ml.int32)
        mixed = (
            ml.concat([x[0] > 0, x[1]]), whole @ whole, x[:, :3] @ whole[:3],
            small @ ml.astype(whole, ml.int8),
        )  # fmt: skip
        with ml.autocast("float16"):
            recurrent = ml.grad(lambda lstm: ml.sum(lstm(x[:, None])[0]))(lstm)
        return loss, depth(n), ml.sort(x, axis=0), products, none, drawn, mixed, recurrent

    x = ml.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    saved = written(tmp_path / "step.mlvm", step, x, ml.asarray(5))
    assert difference(saved, build(tmp_path, "step.mlvm"), runs=3) is None


@compiled
def test_weights_of_few_bits(tmp_path: Path, program_of: Builder) -> None:
    model = ml.quantize(ml.nn.Linear(64, 8, key=ml.random.key(0)), "i4", group=32)
    saved = written(tmp_path / "step.mlvm", model, ml.random.normal((3, 64), key=ml.random.key(1)))
    assert difference(saved, program_of(saved, tmp_path), runs=1) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that trains a table of 8 rows, built with its weights."""
    folder = tmp_path_factory.mktemp("table")
    table = ml.asarray(np.arange(32, dtype=np.float32).reshape(8, 4))

    def step(x: ml.Tensor, i: ml.Tensor) -> ml.Tensor:
        loss, gradient = ml.value_and_grad(lambda t: ml.sum(ml.take(t, i, axis=0) * x[:4]))(table)
        table[...] -= 0.1 * gradient
        return loss

    written(folder / "step.mlvm", step, ml.asarray(np.ones(8, np.float32)), ml.asarray(1))
    build(folder, "step.mlvm", "--weights", "embed")
    return folder


@compiled
def test_a_program_of_the_callers(folder: Path) -> None:
    (folder / "caller.c").write_text(CALLER)
    wrapped = ["-Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc"]
    files = ["caller.c", "libstep.a", "-lm", "-o", "caller"]
    subprocess.run([COMPILER, "-std=c11", "-I.", *files, *wrapped], cwd=folder, check=True)
    done = subprocess.run([folder / "caller"], capture_output=True, text=True)
    here = line_with("x[:4]))(table)", __file__)
    assert done.stdout.splitlines() == [
        "-1 expected memory at a multiple of 64 bytes",
        "-1 expected weights that begin with MLVMSTEP",
        "-1 the step was not built for this processor and mmx", "3 runs, 0 allocations", "the same",
        f"-1 take: an operand has an invalid value, at build/{here}",
        "-1 input 0 is NULL", "0 ",
    ]  # fmt: skip
    assert done.returncode == 0


@compiled
def test_the_command_line(folder: Path) -> None:
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.save(folder / "x.npy", x[0])
    np.save(folder / "two.npy", x)
    np.save(folder / "i.npy", np.array(0))
    np.save(folder / "columns.npy", np.asfortranarray(x))
    np.save(folder / "wide.npy", x.astype(np.float64))
    np.save(folder / "along.npy", x.reshape(16))
    np.save(folder / "turned.npy", np.ascontiguousarray(x.T))
    np.save(folder / "deep.npy", x[None])
    (folder / "short").write_bytes(b"abc")

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [folder / "step", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    def outputs() -> Any:
        return np.load(folder / "0.npy").tolist()

    assert run("--out", ".", "x.npy", "i.npy") == (0, "output 0: f32[]\n")
    assert outputs() == 14
    (folder / "zero").write_bytes(bytes(8))
    assert run("--steps", "3", "--out", ".", "--save", "state", "two.npy", "zero")[0] == 0
    assert [round(x, 3) for x in outputs()] == [14, 55.8, 6.4]
    assert run("--weights", "state", "--out", ".", "two.npy", "i.npy")[0] == 0
    assert round(outputs(), 3) == 5.0
    inside = "--steps", "2", "--out", "made/deeper", "--save", "made/deeper/state"
    assert run(*inside, "along.npy", "zero")[0] == 0
    assert np.load(folder / "made/deeper/0.npy").shape == (2,)
    before = (folder / "state").read_bytes()
    assert run("--save", "state", "x.npy", "turned.npy")[0] == 1  # before anything is written
    assert (folder / "state").read_bytes() == before
    for arguments, status, message in (
        (["--help"], 0, "INPUT is a .npy file"),
        ([], 1, "expected f32[8], i64[]"),
        (["columns.npy", "zero"], 1, "expected C order, got Fortran order"),
        (["wide.npy", "zero"], 1, "wide.npy: expected f32[8], got elements of <f8"),
        (["short", "zero"], 1, "not a multiple of the input's size"),
        (["absent", "zero"], 1, "absent: No such file"),
        (["--steps", "none", "x.npy"], 2, "--steps: expected a known option with a valid number"),
        (["--weights", "short", "x.npy", "zero"], 1, "too few bytes"),
        (["--threads", "2", "x.npy"], 2, "--threads"),
        (["turned.npy", "zero"], 1, "turned.npy: expected f32[8] or several stacked"),
        (["deep.npy", "zero"], 1, "got shape (1, 2, 8)"),
        (["x.npy", "x.npy"], 1, "x.npy: expected i64[], got elements of <f4"),
        (
            ["--steps", "9" * 20, "x.npy", "zero"],
            2,
            "--steps: expected a known option with a valid number",
        ),
        (["--save", "absent/state", "--steps", "99999999999", "x.npy", "zero"], 1, "absent/state"),
        (["--save", ".", "--steps", "99999999999", "x.npy", "zero"], 1, ".: Is a directory"),
        (["--out", "x.npy", "x.npy", "zero"], 1, "x.npy/0.npy: Not a directory"),
    ):
        code, text = run(*arguments)
        assert (code, message in text) == (status, True), (arguments, text)


def test_what_needs_python_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    """By op and line."""
    key, x = ml.random.key(0), ml.asarray(np.ones(3, np.float32))
    written(tmp_path / "drawn.mlvm", lambda x: ml.random.gamma(x, key=key), x)
    written(tmp_path / "lanes.mlvm", lambda x: ml.sum(x), x)
    (tmp_path / "cut.mlvm").write_bytes((tmp_path / "lanes.mlvm").read_bytes()[:100])
    (tmp_path / "x.onnx").write_bytes(b"\x08\x08\x12\x07pytorch:\xff\x10")
    here = f"{Path(__file__)}:{test_what_needs_python_is_refused.__code__.co_firstlineno + 3}"
    out = ["-o", str(tmp_path / "out")]
    of_arm = "--target=aarch64 --simd=avx2"
    for file, message, options in (
        (
            "drawn.mlvm",
            f"gamma, at {here}, cannot be built: expected an op with a kernel in C for",
            "",
        ),
        ("lanes.mlvm", "aarch64: expected instruction sets of neon, plain, got avx2", of_arm),
        ("lanes.mlvm", "expected threads from 1 to 1024, got 1025", "--threads=1025"),
        ("lanes.mlvm", "expected depth from 0 to 1048576, got", f"--depth={1 << 59}"),
        ("lanes.mlvm", "expected a target of host, x86_64", "--target=vax"),
        ("program.mlasm", "is a program; expected a captured step: ", ""),
        ("x.onnx", "it may be an ONNX file: use ml.onnx.load(file), or python -m mlvm", ""),
        ("cut.mlvm", "got 84; the data is damaged", ""),
    ):
        (tmp_path / "program.mlasm").write_text(".func main 0 *\n    halt\n")
        assert main(["build", str(tmp_path / file), *out, *options.split()]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "Makefile").write_text("all:\n")
    assert main(["build", str(tmp_path / "lanes.mlvm"), "-o", str(tmp_path / "mine")]) == 1
    assert "mine has a Makefile that mlvm did not write" in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["Makefile"]
    refuses(SystemExit, "", main, ["build", str(tmp_path / "drawn.mlvm")])
    refuses(SystemExit, "", main, ["build", str(tmp_path / "lanes.mlvm"), *out, "--threads=0"])
    assert "expected a whole number from 1 to 2**63 - 1, got '0'" in capsys.readouterr().err


@compiled
def test_a_string_is_one_literal_whatever_is_in_it(tmp_path: Path) -> None:
    """Nothing in it ends the literal: not a line that is joined to the next, nor a trigraph."""
    from mlvm.build.literals import string

    strings = ['x\\\n", "', 'a\nb\r"', "??/", "\x1b7\t1", "caf\u00e9"]
    rows = ", ".join(map(string, strings))
    text = f"#include <stdio.h>\nstatic const char *const s[] = {{{rows}}};\nint main(void) {{\n"
    text += 'for (int i = 0; i < (int)(sizeof s / sizeof *s); i++) printf("%s%c", s[i], 1);}'
    (tmp_path / "s.c").write_text(text)
    subprocess.run([COMPILER, "-std=c11", "-o", "s", "s.c"], cwd=tmp_path, check=True)
    output = subprocess.run([tmp_path / "s"], capture_output=True, check=True).stdout
    assert output.decode().split("\1")[:-1] == [*strings[:-1], "caf\\xe9"]


def test_a_host_function_is_refused(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    from mlvm.build import steps

    def doubled(x: ml.Tensor) -> ml.Tensor:
        result: ml.Tensor = ml.while_loop(lambda x: ml.sum(x) < 9, lambda x: x * 2, x)
        return ml.sum(result)

    written(tmp_path / "step.mlvm", ml.value_and_grad(doubled), ml.asarray(np.ones(3)))
    monkeypatch.delitem(steps.RECORDS, "residuals.push")
    assert main(["build", str(tmp_path / "step.mlvm"), "-o", str(tmp_path / "out")]) == 1
    assert "a host function runs in Python" in capsys.readouterr().err


@compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links without the kernels")
@cases("example, step", ("anomaly", "learn"), ("digits", "train"))
def test_the_memory_that_examples_need(
    example: str, step: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The plan's, the state's, and at most 40 KiB: kernels work where the plan has nothing."""
    file = ROOT / "examples" / "embedded" / f"{example}.py"
    monkeypatch.setattr(sys, "argv", [file.name, str(tmp_path)])
    runpy.run_path(str(file), run_name="__main__")
    assert main(["build", str(tmp_path / f"{step}.mlvm"), "-o", str(tmp_path / "c")]) == 0
    text = '#include "step.h"\n#include <stdio.h>\nint main(void) { printf("%zu", step_memory()); }'
    (tmp_path / "c" / "memory.c").write_text(text)
    files = ["memory.c", "tables.c", "mlvm/build/src/step.c"]
    plan = "loop", "bound", "records", "processor"
    files += [f"mlvm/machines/native/src/plan/{name}.c" for name in plan]
    options = ["-std=c11", "-I.", "-Wl,--unresolved-symbols=ignore-all", "-o", "memory"]
    subprocess.run([COMPILER, *files, *options], cwd=tmp_path / "c", check=True)
    output = subprocess.run([tmp_path / "c" / "memory"], capture_output=True, check=True).stdout
    saved = SavedStep.from_bytes((tmp_path / f"{step}.mlvm").read_bytes())
    ours = int(output) - saved.planned.plan.nbytes - sum([state.nbytes for state in saved.states])
    assert 0 < ours <= 40 << 10
