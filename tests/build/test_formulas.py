"""A step with lengths as C: at each length the bits of the saved step."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.errors import EncodingError
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM
from mlvm.machines.native import extension
from mlvm.step.saved import LoadedStep, SavedStep
from tests.brief import Capsys, refuses, with_long
from tests.build.test_build import COMPILER, FAST, Builder, compiled, saved
from tests.trees import bits

pytestmark = pytest.mark.skipif(extension.EXTENSION is None, reason="there are no native kernels")
if extension.EXTENSION is not None:
    from tests.build.making import SET


def run(program: Path, arrays: Sequence[Array], *options: str) -> tuple[list[Array], str]:
    """The results of one run, and the text of an error."""
    folder = program.parent
    for i, x in enumerate(arrays):
        np.save(folder / f"in{i}.npy", x)
    files = [f"in{i}.npy" for i in range(len(arrays))]
    command = [str(program), "--weights", "weights.bin", "--out", "out", *options, *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [], done.stderr
    return [np.load(folder / "out" / f"{i}.npy") for i in range(done.stdout.count("output"))], ""


def equals_at(step: SavedStep, program: Path, inputs: Any, sizes: Mapping[str, Any]) -> None:
    """Compare results at all combinations of lengths, bit for bit."""
    for lengths in itertools.product(*sizes.values()):
        arrays = inputs(*lengths)
        expected = LoadedStep(step, LocalVM(native=True))(*arrays)
        results, error = run(program, arrays)
        assert not error, lengths
        assert bits(results) == bits(expected), lengths


@compiled
def test_training_on_sentences(tmp_path: Path, program_of: Builder) -> None:
    """Two lengths, embeddings, causal attention, a mean over places, and an optimizer."""
    key = ml.random.key(0)
    block = ml.nn.TransformerEncoderLayer(8, 2, 16, key=key)
    model = ml.nn.Sequential(ml.nn.Embedding(7, 8, key=key), block, ml.nn.Linear(8, 7, key=key))
    optimizer = ml.optim.AdamW(model, 1e-2)

    def train(tokens: ml.Tensor, labels: ml.Tensor) -> Any:
        def loss_of(model: Any) -> ml.Tensor:
            return ml.mean(ml.softmax_cross_entropy(model(tokens), labels)) / tokens.shape[1]

        loss, gradients = ml.value_and_grad(loss_of)(model)
        optimizer.update(gradients)
        return loss, model(tokens)[:, tokens.shape[1] // 2 :]

    axes = ("batch", "time")
    names = {"tokens": axes, "labels": axes}
    step = ml.capture(train, dynamic_axes=names, max_sizes={"batch": 5, "time": 33})

    def inputs(batch: int, time: int) -> list[Array]:
        rng = np.random.default_rng(batch * 100 + time)
        return [rng.integers(0, 7, (batch, time)) for _ in range(2)]

    step(*map(ml.asarray, inputs(2, 9)))
    file = saved(tmp_path / "step.mlvm", step, *map(ml.asarray, inputs(3, 12)))
    program = program_of(file, tmp_path)
    sizes = {"batch": with_long((3, 5), (2, 3, 5)), "time": with_long((7, 33), (2, 7, 12, 16, 33))}
    equals_at(file, program, inputs, sizes)
    x, y = inputs(2, 4), inputs(2, 5)
    for arrays, text in (
        ([x[0], y[1]], "1 to 33 as in the inputs before, got shape (2, 5)"),
        ([x[0][:0], y[1]], "expected i64[batch,time] with batch 1 to 5, time 1 to 33"),
        (inputs(2, 34), "time = 34: expected 1 to 33"),
        (inputs(6, 3), "batch = 6: expected 1 to 5"),
        ([np.zeros((2, 4), np.int32), x[1]], "expected i64[batch,time], got elements of <i4"),
        ([x[0][None, None], x[1]], "got shape (1, 1, 2, 4)"),
    ):
        assert text in run(program, arrays)[1]
    (tmp_path / "in0.raw").write_bytes(x[0].tobytes())
    done = subprocess.run([program, "in0.raw", "in1.npy"], cwd=tmp_path, capture_output=True)
    assert b"expected a .npy file" in done.stderr


@compiled
def test_branches_on_lengths_and_numbers_of_them(tmp_path: Path, program_of: Builder) -> None:
    """A built step refuses lengths on the other side of a branch, and computes numbers of lengths;
    kernels that are chosen by size are those of each size."""

    def step(x: ml.Tensor) -> Any:
        n = x.shape[0]
        y = x * 2.0 if n > 4 else x
        z = ml.pad(y, ((1, 0), (0, 0)))[:-1] @ ml.ones((8, 3))
        return ml.sum(y) / n, ml.flip(z, axis=0), ml.arange(n) * n, ml.mean(x @ x.T, axis=0)

    capture = ml.capture(step, dynamic_axes={"x": ("n", None)}, max_sizes={"n": 70})
    file = saved(tmp_path / "step.mlvm", capture, ml.ones((9, 8)))
    program = program_of(file, tmp_path)

    def inputs(n: int) -> list[Array]:
        return [np.random.default_rng(n).normal(size=(n, 8)).astype(np.float32)]

    equals_at(file, program, inputs, {"n": (5, 6, 8, 15, 16, 17, 31, 33, 64, 70)})
    assert "at n = 4 the function takes other branches" in run(program, inputs(4))[1]
    stacked = np.stack([inputs(6)[0], inputs(6)[0] + 1])
    results, _ = run(program, [stacked], "--steps", "2")
    assert results[1].shape == (2, 6, 3)


@compiled
def test_loops_and_branches(tmp_path: Path, program_of: Builder) -> None:
    """The gradient of a scan, a loop of unknown length and a branch inside of another loop."""

    def loss_of(x: ml.Tensor) -> ml.Tensor:
        state, ys = ml.scan(lambda s, row: (ml.tanh(s + row), s * row), ml.zeros(4), x)
        return ml.sum(state) + ml.mean(ys)

    def larger(s: ml.Tensor, row: ml.Tensor) -> Any:
        return ml.cond(ml.sum(row) > ml.sum(s), lambda: (row, row * 0.5), lambda: (s, row))

    def step(x: ml.Tensor) -> Any:
        turns, y = ml.while_loop(
            lambda s: ml.logical_and(s[0] < x.shape[0], ml.sum(s[1]) < 3.0),
            lambda s: (s[0] + 1, s[1] * 1.1 + x[s[0]] ** 2),
            (0, x[-1]),
        )
        return ml.value_and_grad(loss_of)(x), turns, y, ml.scan(larger, x[0], x[: x.shape[0] // 2])

    capture = ml.capture(step, dynamic_axes={"x": ("n", None)}, max_sizes={"n": 40})
    file = saved(tmp_path / "step.mlvm", capture, ml.ones((9, 4)))
    program = program_of(file, tmp_path)

    def inputs(n: int) -> list[Array]:
        return [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) * 0.4]

    equals_at(file, program, inputs, {"n": (4, 5, 6, 8, 15, 16, 17, 31, 40)})


@compiled
def test_numbers_that_do_not_fit(tmp_path: Path, program_of: Builder) -> None:
    """Lengths are refused at which a number of them has too many bits for its dtype, or is none."""

    def step(x: ml.Tensor, i: ml.Tensor) -> Any:
        n = x.shape[0]
        return x * (n * n * n * n * n), i * (n * 100_000), x * (1 / (n - 4))

    names = {"x": ("n",), "i": ("n",)}
    capture = ml.capture(step, dynamic_axes=names, max_sizes={"n": 30_000})
    arguments = ml.ones(5), ml.ones(5, dtype=ml.int32)
    file = saved(tmp_path / "step.mlvm", capture, *arguments)
    program = program_of(file, tmp_path)

    def inputs(n: int) -> list[Array]:
        return [np.ones(n, np.float32), np.ones(n, np.int32)]

    equals_at(file, program, inputs, {"n": (2, 5, 6000)})
    for n in (4, 7000, 22_000):
        assert "takes other branches" in run(program, inputs(n))[1]


@compiled
def test_results_of_few_bits(tmp_path: Path, program_of: Builder) -> None:
    """A packed tensor is a result, as bytes."""
    few = ml.asarray([[1, -2, 3, 4], [5, 6, 7, -8]], dtype="i4")
    step = ml.capture(lambda x: (x + 1, few), dynamic_axes={"x": ("n",)}, max_sizes={"n": 5})
    file = saved(tmp_path / "step.mlvm", step, ml.ones(3))
    x, program = np.ones(5, np.float32), program_of(file, tmp_path)
    expected = LoadedStep(file, LocalVM())(x)[1]
    assert run(program, [x])[0][1].tobytes() == expected.tobytes()


def test_names_of_lengths_in_c(tmp_path: Path) -> None:
    """Members have no words of C or C++ as names, and no two have one name."""
    axes = ("namespace", "_Bool", "or", "a b", "a_b", "NULL")
    step = ml.capture(lambda x: x + 1, dynamic_axes={"x": axes}, max_sizes=dict.fromkeys(axes, 3))
    saved(tmp_path / "step.mlvm", step, ml.ones((2,) * 6))
    assert main(["build", str(tmp_path / "step.mlvm"), "-o", str(tmp_path)]) == 0
    fields = re.findall(r"int64_t (\w+); /\*", (tmp_path / "step.h").read_text())
    assert fields == ["n_namespace", "n__Bool", "n_or", "a_b", "n_a_b", "n_NULL"]


def test_damaged_lengths_are_refused(tmp_path: Path) -> None:
    """A file's lengths have names, bounds and axes, and numbers of states are numbers."""
    step = ml.capture(lambda x: x * x.shape[0], dynamic_axes={"x": ("n",)}, max_sizes={"n": 5})
    file = saved(tmp_path / "step.mlvm", step, ml.ones(3))
    assert file.open is not None
    first, (number, _) = file.open.lengths[0], file.open.scalars[0]
    nothing = {"values": (*file.open.values, None), "scalars": ((number, len(file.open.values)),)}
    for change in (
        {"lengths": (first._replace(name=3),)},  # type: ignore[arg-type]
        {"lengths": (first._replace(at_most=None),)},  # type: ignore[arg-type]
        {"lengths": (first._replace(axes=()),)},
        {"values": (4, *file.open.values[1:])},
        nothing,
    ):
        damaged = file._replace(open=file.open._replace(**change))
        refuses(EncodingError, "", SavedStep.from_bytes, damaged.to_bytes())


@compiled
def test_the_functions_of_a_step_with_lengths(tmp_path: Path) -> None:
    """Lengths change between runs, a refused one changes nothing, and no byte behind the memory of
    the step is written."""
    weights = ml.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))

    def train(x: ml.Tensor) -> Any:
        weights[:] = weights - 0.1 * (x.T @ (x @ weights))
        return ml.sum(weights), x @ weights

    step = ml.capture(train, dynamic_axes={"x": ("int", None)}, max_sizes={"int": 9})
    saved(tmp_path / "step.mlvm", step, ml.ones((3, 4)))
    arguments = ["-o", str(tmp_path), "--simd", SET, "--weights", "embed"]
    assert main(["build", str(tmp_path / "step.mlvm"), *arguments]) == 0
    (tmp_path / "caller.c").write_text(_CALLER)
    subprocess.run(["make", *FAST, "libstep.a"], cwd=tmp_path, check=True)
    command = [COMPILER, "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", "caller", "caller.c"]
    subprocess.run([*command, "libstep.a", "-lm"], cwd=tmp_path, check=True)
    done = subprocess.run(["./caller"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines == [
        "0 2: 3 3", "-1 int = 10: expected 1 to 9", "-1 int = 0: expected 1 to 9",
        "-1 the lengths are NULL", "-1 -1", "0 2: 3 3", "0 2: 9 3", "the same",
    ]  # fmt: skip


_CALLER = Path(__file__).with_name("caller_of_lengths.c").read_text("utf-8")


def test_what_is_not_built(tmp_path: Path, capsys: Capsys) -> None:
    """Functions, other numbers of lengths, and too many combinations are refused by name."""

    @ml.subroutine
    def summed(x: ml.Tensor, i: ml.Tensor) -> Any:
        return ml.cond(i > 0, lambda: summed(x, i - 1) + 1.0, lambda: ml.sum(x))

    def called(x: ml.Tensor) -> Any:
        return summed(x, ml.asarray(2))

    def halved(x: ml.Tensor) -> Any:
        return ml.astype(x, ml.float16) / x.shape[0]

    def multiplied(x: ml.Tensor) -> Any:
        return x * (x.shape[0] * (1 << 63))

    for function, most, text in (
        (multiplied, 9, "expected numbers below 2**62"),
        (called, 9, "without functions, ml.auto_batch and gradients of loops of unknown"),
        (halved, 9, "expected numbers of f32, f64, i32 or i64, got f16"),
        (lambda x: x + 1, 1 << 17, "expected at most 65,536 combinations, got 131,072"),
    ):
        step = ml.capture(function, dynamic_axes={"x": ("n", None)}, max_sizes={"n": most})
        saved(tmp_path / "step.mlvm", step, ml.ones((3, 4)))
        assert main(["build", str(tmp_path / "step.mlvm"), "-o", str(tmp_path / "c")]) == 1
        assert text in capsys.readouterr().err
    names, x = {"x": ("n",), "y": ("m",)}, ml.ones(3)
    both = ml.capture(ml.add, dynamic_axes=names, max_sizes={"n": 9, "m": 9})
    saved(tmp_path / "step.mlvm", both, x, x)
    assert main(["build", str(tmp_path / "step.mlvm"), "-o", str(tmp_path / "c")]) == 1
    assert "'n' and 'm' name the same axis" in capsys.readouterr().err
