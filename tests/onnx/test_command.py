"""`python -m mlvm onnx`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from tests.brief import Capsys, cases, refuses


@pytest.fixture
def file(folder: Path) -> Path:
    """A small model, in the current folder."""
    layer = ml.nn.Linear(3, 2, key=ml.random.key(0))
    ml.onnx.save(lambda rows: ml.tanh(layer(rows)) @ ml.ones((2, 2)), [ml.ones((4, 3))], "it.onnx")
    return folder / "it.onnx"


def test_it_says_what_a_file_is(file: Path, capsys: Capsys) -> None:
    assert main(["onnx", "it.onnx"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("it.onnx: ")
    assert lines[1:] == ["input    rows: f32[4,3]", "output   output: f32[4,2]"]


def test_it_times_plans_and_saves(file: Path, capsys: Capsys) -> None:
    rows = np.arange(12, dtype="f4").reshape(4, 3) / 12
    np.save("rows.npy", rows)
    words = ["--input", "rows.npy", "--time", "--plan", "--save", "it.mlvm", "--out", "out"]
    assert main(["onnx", "it.onnx", *words]) == 0
    output = capsys.readouterr().out
    for each in (
        "result 0: f32[4,2]",
        " calls: best ",
        "share  calls  op, one by one",
        "%         launch and copies",
        "planned: ",
        "picture  out/it.plan.svg",
        "saved    it.mlvm, ",
    ):
        assert each in output
    y = np.load("out/0.npy")
    assert np.array_equal(y, ml.onnx.load("it.onnx")(rows))
    assert main(["run", "it.mlvm", "--arg", "rows.npy", "--out", "again"]) == 0
    assert np.array_equal(np.load("again/0.npy"), y)


def test_an_array_of_f64_is_taken_as_f32_everywhere(file: Path) -> None:
    model = ml.onnx.load("it.onnx")
    rows = np.arange(12).reshape(4, 3) / 12
    expected = model(rows.astype("f4")).tolist()
    assert model(rows).tolist() == model(rows=rows).tolist() == ml.capture(model)(rows).tolist()
    assert model(rows).tolist() == expected
    np.save("rows.npy", rows)
    words = ["--input", "rows.npy", "--time", "--save", "it.mlvm", "--out", "out"]
    assert main(["onnx", "it.onnx", *words]) == 0
    assert main(["run", "it.mlvm", "--arg", "rows.npy", "--out", "again"]) == 0
    assert np.load("out/0.npy").tolist() == np.load("again/0.npy").tolist() == expected
    message = (
        r"expected the input 'rows' as f32\[4,3\], got f64\[4,3\]; write ml.astype\(x, ml.float32\)"
    )
    refuses(ml.errors.DTypeError, message, model, ml.asarray(rows))


@cases(
    "words, text",
    (["none.onnx"], "none.onnx"),
    (["damaged.onnx"], "error: damaged.onnx: "),
    (["it.onnx", "--input", "f32[9,9]"], "expected the input 'rows' as f32[4,3], got f32[9,9]"),
    (["it.onnx", "--input", "f32[4,3]", "--input", "f32[2]"], "got 2 inputs; expected {'rows'"),
    (["it.onnx", "--input", "what.npy"], "what.npy"),
    (["it.onnx", "--save", "there/is/none.mlvm"], "there/is/none.mlvm"),
)
def test_an_error_is_one_line(words: list[str], text: str, file: Path, capsys: Capsys) -> None:
    Path("damaged.onnx").write_bytes(b"none")
    assert main(["onnx", *words]) == 1
    output = capsys.readouterr().err
    assert text in output
    assert output.startswith("error: ")
    assert output.count("\n") == 1
