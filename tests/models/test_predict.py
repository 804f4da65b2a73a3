"""Images are classified, with names, pictures and typed errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.show.svg import width_of
from models import weights
from models.mlp_mixer import MlpMixer
from models.predict import Classifier, Guess, drawn, main, read_classes
from tests.brief import Capsys, output_of, refuses
from tests.drawn import parse, texts

PIL = pytest.importorskip("PIL.Image")
NAMES = ["red", "green", "blue"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Mixer that tells red, green and blue 4 x 4 images apart: each patch of one pixel is its
    colour, which only its norm and its head change."""
    model = MlpMixer((4, 4, 3), 3, 1, 3, 1, 2, 2, key=ml.random.key(0))
    state = {name: np.zeros(x.shape, "f4") for name, x in model.state().items()}
    state["stem/kernel"] = np.eye(3, dtype="f4").reshape(1, 1, 3, 3)
    state["pre_head_layer_norm/scale"] += 1
    state["head/kernel"] = 3 * np.eye(3, dtype="f4")
    ml.save(tmp_path / "weights", state, weights.described((4, 4, 3), NAMES))
    return tmp_path / "weights"


def image(folder: Path, color: int, size: tuple[int, int] = (9, 6)) -> Path:
    pixels: NDArray[Any] = np.full((*size, 3), 20, np.uint8)
    pixels[..., color] = 230
    path = folder / f"{NAMES[color]}.png"
    PIL.fromarray(pixels).save(path)
    return path


def test_images_get_the_names_of_their_classes(tmp_path: Path, file: Path, capsys: Capsys) -> None:
    images = [image(tmp_path, color) for color in (2, 0)]
    plot = tmp_path / "plot.svg"
    assert main([str(file), *map(str, images), "--top", "2", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    assert err == f"{file}: mlp_mixer for images of 4 x 4 x 3 and 3 classes, in the mlvm layout\n"
    first, *lines = out.splitlines()
    assert (first, lines[2]) == tuple(map(str, images))
    assert [line.split()[-1] for line in lines if "%" in line][::2] == ["blue", "red"]
    assert len(lines) == 5
    percentages = [float(line.split()[0]) for line in lines if "%" in line]
    assert percentages[0] > 95 > 5 > percentages[1] > 0
    shown = texts(parse(plot.read_text("utf-8")))
    assert str(images[0]).endswith(shown[0].removeprefix("…"))
    assert shown[1:3] == ["blue", f"{percentages[0]:.2f} %"]
    assert plot.read_text().count("data:image/png;base64,") == 2


def test_classes_of_a_file_and_pictures_on_the_terminal(
    tmp_path: Path, file: Path, capsys: Capsys
) -> None:
    names = tmp_path / "names"
    names.write_text("rot\ngrün\nblau\n", "utf-8")
    options = [str(file), str(image(tmp_path, 1)), "--classes", str(names), "--top", "1"]
    assert main([*options, "--picture"]) == 0
    _, *picture, guess = capsys.readouterr().out.splitlines()
    assert guess.endswith("  grün")
    assert len(picture) == 20
    assert all(line.count("▀") == 40 and line.endswith("\x1b[0m") for line in picture)
    assert "\x1b[38;2;20;230;20m" in picture[0]


def test_a_file_of_classes_may_have_a_mark_and_any_character_but_the_end_of_a_line(
    tmp_path: Path,
) -> None:
    names = tmp_path / "names"
    names.write_bytes("\ufeffone\r\ntwo\u2028\vparts\n\nfour".encode())
    assert read_classes(names) == ["one", "two\u2028\vparts", "", "four"]
    names.write_bytes(b"")
    assert read_classes(names) == []


def test_names_are_no_commands_to_a_terminal(tmp_path: Path, file: Path, capsys: Capsys) -> None:
    names, plot = ["\x1b[2J", "\ud800", "grün"], tmp_path / "plot.svg"
    ml.save(file, ml.load(file), weights.described((4, 4, 3), names))
    image(tmp_path, 0).rename(tmp_path / "\x1b[31m.png")
    assert main([str(file), str(tmp_path / "\x1b[31m.png"), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in out[1:]] == ["\\x1b[2J", "\\ud800", "grün"]
    assert texts(parse(plot.read_text("utf-8")))[1::2] == ["\\x1b[2J", "\\ud800", "grün"]
    ml.save(file, {"\x1b[31m": np.zeros(1)})
    assert main([str(file), "x"]) == 1
    assert "got \\x1b[31m\n" in capsys.readouterr().err


def test_long_names_stay_on_the_picture(tmp_path: Path) -> None:
    guesses = [Guess("cat " * 99, 0.5), Guess("dog", 0.5)]
    content = drawn([("\x1b" + "x" * 500 + "cat.png", np.zeros((1, 4, 3), np.uint8), guesses)])
    path, cat, _, dog, _ = texts(parse(content))
    assert path.startswith("…")
    assert path.endswith("xcat.png")
    assert (cat[-1], dog) == ("…", "dog")
    assert 200 + width_of(path, 16) <= 720
    assert 208 + width_of(cat, 14) < 700 - width_of("100.00 %", 14)


def test_weights_that_are_no_numbers(tmp_path: Path, file: Path, capsys: Capsys) -> None:
    arrays = {**ml.load(file), "stem/bias": np.full(3, np.nan, "f4")}
    ml.save(file, arrays, weights.described((4, 4, 3), NAMES))
    assert main([str(file), str(image(tmp_path, 0))]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{file} computes NaN" in err


def test_images_of_another_size_than_square(tmp_path: Path, file: Path, capsys: Capsys) -> None:
    ml.save(file, ml.load(file))
    assert main([str(file), str(image(tmp_path, 0)), "--size", "2", "8"]) == 0
    assert "for images of 2 x 8 x 3 and" in capsys.readouterr().err
    assert main([str(file), str(image(tmp_path, 0)), "--size", "2", "7"]) == 1
    assert "do not match an image of 2 x 7 x 3" in capsys.readouterr().err


def test_the_brightness_is_scaled_as_told(file: Path) -> None:
    read = weights.read(file)
    grey = np.full((4, 4, 3), 128, np.uint8)
    [(name, _), *_] = Classifier(read, mean=(0.5, 0.5, 0.4))(grey, 3)
    assert name == "blue"
    [(name, _), *_] = Classifier(read, mean=(0.5,), std=(-1, 1, 1))(grey, 3)
    assert name != "red"


def test_errors_are_one_line(tmp_path: Path, file: Path, capsys: Capsys) -> None:
    red, names = str(image(tmp_path, 0)), tmp_path / "names"
    names.write_text("one\n")
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    for arguments, status, reason in (
        ([str(file), str(tmp_path / "none.png")], 1, "none.png cannot be read: No such file"),
        ([str(file), str(names)], 1, "names cannot be read: expected an image in one of"),
        ([red, red], 1, "red.png: expected a safetensors or .npz file"),
        ([str(tmp_path / "x"), red], 1, "No such file"),
        ([str(file), red, "--classes", str(tmp_path / "bad")], 1, "bad is corrupt"),
        ([str(file), red, "--plot", str(tmp_path / "no" / "p.svg")], 1, "No such file"),
        ([str(file), "none", "--plot", str(tmp_path / "no" / "p.svg")], 1, "p.svg"),
        ([str(file), red, "--heads", "2"], 1, "requires a ViT in timm's layout"),
        ([str(file), red, "--std", "nan"], 2, "mean and std must be finite numbers"),
        ([str(file), red, "--classes", str(names)], 2, "expected 3 names of classes, got 1"),
        ([str(file), red, "--mean", "1", "2"], 2, "expected 1 or 3 numbers"),
        ([str(file), red, "--std", "0"], 2, "std not 0"),
        ([str(file), red, "--top", "0"], 2, "must be >= 1"),
    ):
        if status == 2:
            refuses(SystemExit, "", main, arguments)
        else:
            assert main(arguments) == status
        err = capsys.readouterr().err
        assert reason in err, arguments
        assert "error: " in err
        assert "Traceback" not in err


def test_it_runs_as_a_command(tmp_path: Path, file: Path) -> None:
    output = output_of("-m", "models.predict", file, image(tmp_path, 0))
    assert output.splitlines()[1].endswith("  red")
