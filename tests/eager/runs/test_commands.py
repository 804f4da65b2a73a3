"""`python -m mlvm diff | replay | verify`, and recordings of earlier releases."""

from __future__ import annotations

import re
import shutil
from base64 import b64decode
from html import unescape
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.errors import MachineError
from mlvm.eager import Tensor
from mlvm.eager.runs.commands import summary
from mlvm.eager.runs.log import VERSION
from mlvm.eager.runs.replay import Replay, open_run
from mlvm.machines.versions import cause_of_other_bits, versions
from tests.brief import Capsys, line_with
from tests.eager.runs.recorded import STEPS, train

VERSIONS = sorted(Path(__file__).parent.glob("recordings/version_*"))
"""Recordings of earlier releases, which every later one reads."""


def output(capsys: Capsys, *words: object) -> tuple[int, str]:
    status = main([*map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_equal_runs_are_one_line(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    train(folder / "b", captured=False)
    assert output(capsys, "diff", "a", "b") == (0, f"equal: {STEPS} steps\n")


def test_a_run_that_was_cut_is_named(folder: Path, capsys: Capsys) -> None:
    for name in "ab":
        train(folder / name)
    log = folder / "b" / "log"
    log.write_bytes(log.read_bytes()[:-1])  # the last frame, which closes the log, is torn
    assert output(capsys, "diff", "a", "b") == (0, f"equal: {STEPS} steps; b was not closed\n")
    log.write_bytes(log.read_bytes()[:20])
    assert output(capsys, "diff", "a", "b") == (1, "A has 10 steps, B has 0; b was not closed\n")


def test_a_difference_has_lines_and_operands(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    train(folder / "b", square=lambda x: x**2 + 0.25)
    text = output(capsys, "diff", "a", "b")[1]
    assert "step 0: the programs differ; the first op whose result differs is" in text
    assert "square=lambda x: x**2 + 0.25" in text
    assert re.search(r"operand 0: f32\[8,2\], result of square", text)
    assert re.search(r"B: %\d+ = add\(%\d+, 0.25\)", text)


def test_a_replay_reports_equal_bits(folder: Path, capsys: Capsys) -> None:
    run = train(folder / "a")
    status, text = output(capsys, "replay", "a", "--step", 7)
    assert (status, text.endswith(f"result {run.losses[7]}\nequal bits\n")) == (0, True)
    assert output(capsys, "replay", "a")[1].startswith(f"step {STEPS - 1} of")
    assert repr(run.steps[7]) == f"<step 7 of train.<locals>.step, result {run.losses[7]}>"
    assert re.match("<before step 7 of .*: inputs x, y; state .* and 5 more>$", repr(run.at(7)))


def test_the_debugger_shows_the_recorded_source(folder: Path, capsys: Capsys) -> None:
    source = folder / "doubled.py"
    source.write_text("import mlvm.eager as ml\nstep = ml.capture(lambda x: x * 2.0)\n")
    with ml.runs.record("a"):
        run_path(str(source))["step"](ml.ones(2))
    source.write_text("import os\n" + source.read_text())
    status, text = output(capsys, "debug", "a", "--command", "l")
    assert (status, "1    import mlvm.eager as ml\n    2 -> step" in text) == (0, True)


def test_the_tensors_of_a_line(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    place = line_with("d = model(dropout(x)) - y", str(Path(__file__).parent / "recorded.py"))
    status, text = output(capsys, "replay", "a", "--step", 2, "--at", place, "--save", "out")
    assert status == 0
    assert re.search(r"^%\d+ d = subtract: f32\[8,2\], ", text, re.MULTILINE)
    [saved] = (folder / "out").glob("*-d.npy")
    assert np.load(saved).shape == (8, 2)
    status, text = output(capsys, "replay", "a", "--step", 2, "--at", "recorded.py:1")
    assert (status, text.count("no op of step 2")) == (1, 1)
    assert re.search(r"; there are ops at \S*recorded\.py:\d+, ", text)
    for option in ((), ("--nan",)):
        status, text = output(capsys, "replay", "a", "--step", 99, *option)
        assert status == 1
        assert f"replay: expected a step from 0 to {STEPS - 1}, got 99" in text
    status, text = output(capsys, "debug", "a", "--step", 99)
    assert (status, f"debug: expected a step from 0 to {STEPS - 1}, got 99" in text) == (1, True)
    words = ["debug", "a", "--step", 3, "--command", "b d", "--command", "c", "--command", "p d"]
    assert "d = model(dropout(x)) - y" in output(capsys, *words)[1]


def test_the_state_and_inputs_of_a_step_are_saved(folder: Path, capsys: Capsys) -> None:
    run = train(folder / "a")
    assert output(capsys, "replay", "a", "--step", 5, "--save", "out")[0] == 0
    moment = run.at(5)
    np.testing.assert_array_equal(np.load("out/x.npy"), moment.inputs["x"])
    state = ml.load("out/state.safetensors")
    np.testing.assert_array_equal(state["model.kernel"].numpy(), moment.state["model.kernel"])
    assert output(capsys, "replay", "a", "--at", f"recorded.py:{'9' * 5000}")[0] == 1
    with ml.runs.record(folder / "b"):
        ml.capture(lambda x: x["a/b"] + x["a_b"])({"a/b": ml.ones(1), "a_b": ml.zeros(1)})
    assert output(capsys, "replay", "b", "--save", "of b")[0] == 0
    arrays = {file.name: np.load(file).tolist() for file in Path("of b").glob("*.npy")}
    assert arrays == {"x__a_b__.npy": [1.0], "x__a_b___.npy": [0.0]}


def test_the_first_nan_is_found(folder: Path, capsys: Capsys) -> None:
    w = ml.ones(3)

    @ml.capture
    def step(x: Tensor) -> Tensor:
        nonlocal w
        y = ml.sqrt(x)
        w += y
        return ml.sum(w)

    with ml.runs.record(folder / "a"):
        for i in range(6):
            step(ml.full(3, 3.0 - i))
    status, text = output(capsys, "replay", "a", "--nan")
    assert status == 1
    assert "step 4: the result of sqrt is nan at [0]; the operands are finite" in text
    assert "operand 0: f32[3], input 'x'" in text
    assert text.rstrip().endswith("y = ml.sqrt(x)")
    assert output(capsys, "replay", "a", "--nan", "--step", 3)[0] == 0
    train(folder / "b")
    assert output(capsys, "replay", "b", "--nan") == (
        0,
        f"no nan and no infinity in {STEPS} steps\n",
    )


ORIGINS = {
    "input": "step 2: the input 'x', f32[3], is nan at [1]; the result of multiply is nan at [1]",
    "view": "step 2: the input 'x', f32[3], is nan at [1]; the result of multiply is nan at [1, 0]",
    "state": "step 2: the state w, f32[3], is nan at [1]; the result of multiply is nan at [1]",
    "constant": "step 0: the constant, f32[3], is nan at [1]; the result of multiply is nan at [1]",
    "mask": "step 2: the input 'x', f32[3], is inf at [1]; the result of multiply is nan at [1]",
    "copy": "step 2: the input 'x', f32[3], is nan at [1]; no op computes a nan from it",
    "where": "step 0: the constant nan, f32[], is nan at []; the result of where is nan at [1]",
    "infinity": "step 2: the state w, f32[3], is inf at [1]; the result of multiply is inf at [1]",
}


@pytest.mark.parametrize("where", ORIGINS)
def test_the_origin_of_a_nan_is_named(folder: Path, capsys: Capsys, where: str) -> None:
    written = {"state": np.nan, "infinity": np.inf}
    w, known = ml.full(3, float(where != "mask")), np.array([1.0, np.nan, 1.0], np.float32)

    @ml.capture
    def step(x: Tensor) -> Tensor:
        x = ml.reshape(x, (3, 1)) if where == "view" else x
        if where == "where":
            return ml.where(ml.arange(3) == 1, ml.nan, x)
        return ml.flip(x) if where == "copy" else x * (known if where == "constant" else w)

    with ml.runs.record(folder / "a"):
        for i in range(4):
            x = np.ones(3, np.float32)
            x[1] = (np.inf if where == "mask" else np.nan) if i == 2 and where not in written else 1
            if i == 2 and where in written:
                w[1] = written[where]
            step(ml.asarray(x))
    status, text = output(capsys, "replay", "a", "--nan")
    assert (status, text.startswith(ORIGINS[where])) == (1, True)


def test_a_nan_from_an_infinity_is_printed_with_the_op_that_reads_the_infinity(
    folder: Path, capsys: Capsys
) -> None:
    @ml.capture
    def step(x: Tensor, mask: Tensor) -> Tensor:
        return ml.softmax(ml.where(mask, x, -ml.inf))

    with ml.runs.record(folder / "a"):
        for mask in ([True, False], [False, False]):
            step(ml.ones(2), ml.asarray(mask))
    assert output(capsys, "replay", "a", "--nan", "--step", 0)[0] == 0
    status, text = output(capsys, "replay", "a", "--nan")
    assert status == 1
    assert text.startswith("step 1: the constant -inf, f32[], is -inf at []; the result of where")
    assert "\nfrom it: the result of softmax is nan at [0]\n" in text


def test_steps_without_a_program_are_not_searched(folder: Path, capsys: Capsys) -> None:
    @ml.runs.step
    def step(x: Tensor) -> Tensor:
        return ml.log(x) * float(ml.sum(x))

    with ml.runs.record(folder / "a"):
        for _ in range(3):
            step(ml.full(2, -1.0))
    status, text = output(capsys, "replay", "a", "--nan")
    assert (status, "no nan" in text) == (1, False)
    assert "step 0 not computed: no step has a program" in output(capsys, "verify", "a")[1]
    assert re.match(r"3 steps cannot be searched: \S*step has no program: CaptureError: ", text)
    with ml.runs.record(folder / "b"):
        step(ml.full((), -1.0))
    assert output(capsys, "replay", "b", "--nan")[1].startswith(
        "step 0: the result is nan\n1 step c"
    )
    status, text = output(capsys, "run", "a")
    assert (status, text.startswith("error: a: it is a recording: use mlvm replay")) == (1, True)
    assert output(capsys, "replay", "a", "--save", "a") == (
        1,
        "error: replay: --save a is a recording; name another folder\n",
    )


def test_verify_names_what_is_wrong(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    status, text = output(capsys, "verify", "a", "--steps", 4, "--seed", 7)
    assert status == 0
    assert text.startswith(f"a matches: {STEPS} steps, computed again:")
    data = folder / "a" / "data"
    data.write_bytes(bytes([*data.read_bytes()[:-1], 99]))
    status, text = output(capsys, "verify", "a", "--steps", 0)
    assert status == 1
    assert "input 'y' of step 9 differs from the recorded input" in text


def test_other_versions_are_named_with_a_mismatch(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    run = open_run(folder / "a")
    assert run.versions == versions()
    assert cause_of_other_bits(run.versions) == cause_of_other_bits("") == ""
    theirs = versions().replace("numpy", "other numpy")
    with patch("mlvm.eager.runs.record.versions", lambda: theirs):
        train(folder / "b")
    compute = Replay.compute

    def other_bits(replay: Replay, step: Any, operands: Any) -> list[Any]:
        return [array + array for array in compute(replay, step, operands)]

    with patch.object(Replay, "compute", other_bits):
        for command in (["verify"], ["replay", "--step", 0], ["replay", "--nan"]):
            mine, other = [output(capsys, *command, name)[1] for name in "ab"]
            assert "it was recorded with other numpy " in other, command
            assert "it was recorded with" not in mine, command


def test_an_incomplete_recording_is_no_mismatch(folder: Path, capsys: Capsys) -> None:
    train(folder / "a", options={"inputs": "none"})
    status, text = output(capsys, "verify", "a")
    assert (status, f"a is incomplete: {STEPS} steps, computed again: none" in text) == (1, True)
    assert "ml.runs.Replay(run, inputs=batch_of)" in text
    train(folder / "b")
    log = folder / "b" / "log"
    log.write_bytes(log.read_bytes()[:-1])  # the last frame is torn, as by a kill
    status, text = output(capsys, "verify", "b")
    assert (status, text.startswith("the recording was not closed")) == (1, True)
    assert f"b is incomplete: {STEPS} steps, computed again: " in text


def test_a_recording_without_steps_is_neither_equal_nor_complete(
    folder: Path, capsys: Capsys
) -> None:
    for name in "ab":
        with ml.runs.record(name):
            pass
    assert output(capsys, "diff", "a", "b") == (
        1,
        "error: diff: expected recordings with steps, b has none\n",
    )
    status, text = output(capsys, "verify", "a")
    assert (status, text.startswith("the recording has no steps\na is incomplete")) == (1, True)


def test_missing_contents_are_named(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    (folder / "a" / "data").unlink()
    source = next((folder / "a" / "sources").iterdir())
    source.unlink()
    missing = "a/data: No such file or directory"
    status, text = output(capsys, "verify", "a")
    assert (status, text.count(f"problem: {missing}"), "a does not match" in text) == (1, 1, True)
    assert f"problem: a/sources/{source.name}: the file is missing" in text
    assert f"error: {missing}" in output(capsys, "replay", "a", "--step", 9)[1]
    with patch("mlvm.eager.runs.verification.silent_vm", side_effect=MachineError("no kernels")):
        assert output(capsys, "verify", "a") == (1, "error: no kernels\n")


def test_options_that_replay_refuses(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    for words in (["--at", "recorded.py:1"], ["--save", "out"]):
        assert "--nan accepts only --step" in output(capsys, "replay", "a", "--nan", *words)[1]


def test_printed_values_have_the_digits_of_their_type() -> None:
    assert summary(np.array([0.1], np.float32)).endswith(": 0.1")
    assert summary(np.array([0.1, 1 / 3])).endswith(": 0.1, 0.3333333333333333")
    assert "mean 1.5 of the finite elements, nans 0" in summary(np.array([1.0, 2.0, np.inf]))


def test_a_page_shows_losses_digests_and_the_difference(folder: Path, capsys: Capsys) -> None:
    a = train(folder / "a")
    train(folder / "b", order=[0, 1, 2, 3, 4, 6, 5, 7, 8, 9])
    assert output(capsys, "show", "a", "b") == (0, "page  a.html\n")
    page = (folder / "a.html").read_text("utf-8")
    assert "step 5: the inputs differ: x, y" in page
    rows = re.findall(r"<tr>(.*?)</tr>", page)[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [row[:2] for row in cells] == [[str(n), "=" if n < 5 else "≠"] for n in range(STEPS)]
    assert [float(row[3]) for row in cells] == pytest.approx(a.losses)
    for row in cells:
        equal = [row[i] == row[i + 1] for i in (5, 7, 9)]
        assert equal == [row[0] not in "56", row[1] == "=", row[1] == "="]
    [picture] = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', page)
    assert "step 5" in b64decode(picture).decode()


def test_a_page_of_equal_runs_of_other_lengths(folder: Path, capsys: Capsys) -> None:
    train(folder / "a")
    train(folder / "b", order=[], captured=False)
    assert output(capsys, "show", "a", "b", "-o", "c.html") == (0, "page  c.html\n")
    assert "A has 10 steps, B has 0" in (folder / "c.html").read_text("utf-8")


def test_a_page_of_one_run_lists_its_steps(folder: Path, capsys: Capsys) -> None:
    run = train(folder / "a")
    assert output(capsys, "show", "a") == (0, "page  a.html\n")
    rows = re.findall(r"<tr>(.*?)</tr>", (folder / "a.html").read_text("utf-8"))[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [row[0] for row in cells] == [str(n) for n in range(STEPS)]
    assert {unescape(row[1]) for row in cells} == {x.table.function for x in run.steps}
    assert [float(row[2]) for row in cells] == pytest.approx(run.losses)


@pytest.mark.parametrize(
    "words", [["diff", "a", "b"], ["replay", "a"], ["verify", "a"], ["show", "a", "b"]]
)
def test_a_folder_without_a_recording_is_one_line(
    folder: Path, capsys: Capsys, words: list[Any]
) -> None:
    status, text = output(capsys, *words)
    assert (status, text.count("\n")) == (1, 1)
    assert "a is not a recording" in text
    (folder / "a").mkdir()
    (folder / "a" / "log").write_bytes(b"not a log, but longer")
    status, text = output(capsys, *words)
    assert (status, text.count("\n")) == (1, 1)


@pytest.mark.parametrize("recording", VERSIONS, ids=lambda path: path.name)
def test_recordings_of_earlier_releases(recording: Path, folder: Path, capsys: Capsys) -> None:
    shutil.copytree(recording, folder / "a")
    run = open_run(folder / "a")
    assert len(run.steps) == 6
    assert [Replay(run).replay(n) for n in (4, 0, 2)] == [[]] * 3
    status, text = output(capsys, "verify", "a")
    assert status == 0
    assert "3 steps without a program cannot be computed again" in text
    assert "scores = x @ w" in "\n".join(run.source("small.py"))


def test_repros_of_earlier_releases(capsys: Capsys) -> None:
    for repro in sorted(Path(__file__).parent.glob("recordings/repro_*.mlvm")):
        status, text = output(capsys, "run", repro)
        expected = "verified: the recorded digests of 1 output and 1 state"
        assert (status, expected in text) == (0, True)
        assert "tanh" in output(capsys, "debug", repro, "--command", "b tanh", "--command", "c")[1]
        assert (
            "--step selects a step of a recording" in output(capsys, "debug", repro, "--step", 0)[1]
        )


def test_there_is_a_recording_of_each_version() -> None:
    assert {int(path.name.split("_")[1]) for path in VERSIONS} == {*range(1, VERSION + 1)}
