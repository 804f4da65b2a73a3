"""Every command and option has a help text, and examples that run; errors suggest names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import bench.__main__ as bench_command
import bench.cost as cost_command
import mlvm.__main__ as mlvm_command
import mlvm.eager as ml
from models import generate, mlp_mixer, predict, vit
from models.training import train
from tests.brief import ROOT, Capsys, Patch, cases, line_of, output_of, refuses, start_python

PROGRAMS: Final = (
    mlvm_command,
    bench_command,
    cost_command,
    generate,
    predict,
    train,
    mlp_mixer,
    vit,
)
TRAIN: Final = """
import sys
import mlvm.eager as ml

ml.random.seed(0)
model = ml.nn.Linear(4, 2)
optimizer = ml.optim.SGD(model, 0.1)

@ml.capture
def step(x):
    def loss(model):
        h = model(x)
        return ml.mean(h * h)
    value, grads = ml.value_and_grad(loss)(model)
    optimizer.update(grads)
    return value

x = ml.ones((3, 4))
if len(sys.argv) == 2:
    with ml.runs.record(sys.argv[1]):
        step(x)
step(x)
step.save("step.mlvm")
step.save_repro("bug.mlvm", x)
"""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


ALL: Final = {each.prog: each for program in PROGRAMS for each in parsers(program.parser())}


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """The commands after `python -m` in a parser's examples."""
    head, *lines = str(parser.epilog).splitlines()
    assert head == ("example:" if len(lines) == 1 else "examples:")
    assert all(line.startswith("    python -m ") for line in lines)
    return [line.removeprefix("    python -m ") for line in lines]


@pytest.mark.parametrize("parser", ALL.values(), ids=[*ALL])
def test_help_describes_everything(parser: argparse.ArgumentParser) -> None:
    assert str(parser.description).partition("\n\n")[0].endswith(".")
    for action in parser._actions:
        assert action.help or action.dest == "command", action
        if isinstance(action, argparse._SubParsersAction):
            assert {x.dest for x in action._choices_actions if x.help} == {*action.choices}
    for line in examples(parser):
        words = shlex.split(line)
        top = ALL[f"python -m {words[0]}"]
        assert top.parse_args(words[1:]).parser in (parser, ALL["python -m mlvm info"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples name."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "train.py").write_text(TRAIN)
    for name in ("before", "after"):
        output_of("train.py", name, cwd=folder)
    (folder / "buffers.csv").write_text("id,lower,upper,size\na,0,2,64\nb,1,3,64\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    layer = ml.nn.Linear(16, 2, key=ml.random.key(0))
    ml.onnx.save(lambda rows: layer(rows), [ml.ones((8, 16))], folder / "model.onnx")
    return folder


UNSUITABLE: Final = {
    *("bench", "mlvm tune", "mlvm mpirun", "mlvm serve", "mlvm ping", "mlvm top"),
    *("models.predict", "models.generate"),
}
"""Examples that need a device, MPI, another process, minutes, or trained weights."""


@pytest.mark.parametrize("prog", [x for x in ALL if x.removeprefix("python -m ") not in UNSUITABLE])
def test_examples_run(prog: str, folder: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of members of a group
    for line in examples(ALL[prog]):
        program, *words = shlex.split(line)
        assert ALL[f"python -m {program}"].run(words) == 0  # type: ignore[attr-defined]
    assert "error" not in capsys.readouterr().err


@cases(
    "line, hint",
    ("mlvm memroy", "unknown value 'memroy' (did you mean 'memory'?); expected one of run, "),
    ("mlvm run x --prnt", "unrecognized arguments: --prnt (did you mean '--print'?)"),
    ("mlvm build x -o y --simd=avx22", "unknown value 'avx22' (did you mean 'avx2'?)"),
    ("bench dispach", "unknown value 'dispach' (did you mean 'dispatch'?); expected one of"),
    ("models.train --model mlp_mixr", "unknown value 'mlp_mixr' (did you mean 'mlp_mixer'?)"),
    ("models.train --data digit", "unknown data set 'digit' (did you mean 'digits'?)"),
    ("models.train --opochs 3", "unrecognized arguments: --opochs 3 (did you mean '--epochs'?)"),
    ("mlvm show x.py 3", "unrecognized arguments: 3; write python -m mlvm show x.py -- 3"),
    ("mlvm launch --members 2", "launch: error: expected a script, or -m and a module"),
)
def test_misspelled_words_are_suggested(line: str, hint: str, capsys: Capsys) -> None:
    program, *words = line.split()
    parser: Any = ALL[f"python -m {program}"]
    assert refuses(SystemExit, "", parser.run, words).code == 2
    assert hint in capsys.readouterr().err


def test_examples_of_servers_run(folder: Path) -> None:
    [serve], [ping], [top] = (
        examples(ALL[f"python -m mlvm {x}"]) for x in ("serve", "ping", "top")
    )
    words = shlex.split(serve.replace(":7000", "localhost:0"))
    with start_python("-m", *words, cwd=folder) as server:
        secret = line_of(server).split()[1]
        (folder / "secret").write_text(secret)
        (folder / "secret").chmod(0o600)
        assert server.stderr is not None
        address = server.stderr.readline().split("address=")[1].split()[0]
        for line in (ping, top):
            output_of("-m", *shlex.split(line.replace("localhost:7000", address)), cwd=folder)
        server.terminate()
