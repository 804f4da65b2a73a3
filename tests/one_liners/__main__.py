"""The one-liners of a first week, and what they give: `python -m tests.one_liners` counts them.

`table.txt` has a row a line: whose habit it is, what is typed, with `ml` in place of their module,
and what it gives, `line  =>  value`; or, where it is refused, `line  ->  remedy  =>  value`, where
the remedy may be refused in its turn. The value is an expression of numpy, in which `x` and the
like are arrays of f64; a type such as `f32[2,3]` of what is drawn; or the name of a class.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import json
import math
import os
import pickle
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import einops
import numpy as np

import mlvm
import mlvm.eager as ml

TABLE: Final = Path(__file__).with_name("table.txt")

_TYPE: Final = re.compile(r"(bool|[iufc]\d+)\[[\d,]*\]")
_WORDS: Final = re.compile(r"[A-Za-z_]\w*")
_TEXTS: Final = re.compile(r"\"[^\"]*\"")
_FILE: Final = re.compile(r"\bpath\b|\.(npy|pt|safetensors)\b")
_GIVEN: Final = {"None", "True", "for", "in", "is", "lambda", "not", "np", "pass"}


@dataclass(frozen=True)
class Row:
    """One habit: the line typed, its replacement where that is refused, and its value."""

    group: str
    habit: str
    lines: tuple[str, ...]
    value: str


def rows() -> list[Row]:
    """The rows of the table."""
    table, group = [], ""
    for text in TABLE.read_text("utf-8").splitlines():
        if text.startswith("== "):
            group = text[3:]
        else:
            habit, rest = text.split(maxsplit=1)
            typed, value = rest.rsplit("  =>  ", 1)
            table.append(Row(group, habit, tuple(typed.split("  ->  ")), value))
    return table


ARRAYS: Final = {
    "x": np.array([[1.0, -2.0, 3.0], [4.0, 0.5, -6.0]]),
    "y": np.array([[0.5, 2.0, -1.0], [3.0, 1.5, 2.5]]),
    "a": np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]]),
    "v": np.array([3.0, 1.0, 2.0]),
    "w": np.array([0.5, -1.0, 2.0]),
    "gaps": np.array([1.0, np.nan, 3.0]),
    "z": np.array([1 + 2j, 3 - 1j]),
    "i": np.array([1, 0]),
    "mask": np.array([[True, False, True], [False, False, True]]),
    "logits": np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0], [1.0, 1.0, 0.0], [2.0, 0.0, 1.0]]),
    "labels": np.array([1, 2, 0, 0]),
    "images": np.arange(384.0).reshape(2, 8, 8, 3) % 11 / 4,
    "seq": np.arange(30.0).reshape(5, 2, 3) / 30,
    "heads": np.arange(24.0).reshape(2, 1, 3, 4) / 24,
    "kernel": np.array([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]]),
    "bias": np.array([1.0, -1.0]),
}
_PLAIN: Final = {"np": np, "math": math, "data": ARRAYS["x"]}
_NARROW: Final = {"float64": ml.float32, "complex128": ml.complex64}


def ours(line: str) -> dict[str, Any]:
    """Return the names of a line: tensors, a model and its optimizer. Write the files in the
    current folder if it reads one."""
    names: dict[str, Any] = {
        name: ml.asarray(array, dtype=_NARROW.get(array.dtype.name))
        for name, array in ARRAYS.items()
    }
    model = ml.nn.Linear(3, 2)
    model.load_state({name: names[name].numpy() for name in ("kernel", "bias")})
    if _FILE.search(line):
        ml.save("saved.safetensors", model)
        np.save("x.npy", ARRAYS["x"])
        with zipfile.ZipFile("model.pt", "w") as archive:
            archive.writestr("model/data.pkl", b"")
    return {
        **names,
        **_PLAIN,
        "copy": copy,
        "einops": einops,
        "f": lambda v: (v * v).sum(),
        "json": json,
        "gradients": {"kernel": ml.ones((3, 2)), "bias": ml.ones(2)},
        "key": ml.random.key(0),
        "loss": ml.asarray(0.5),
        "loss_of": lambda model: model(names["x"]).sum(),
        "ml": ml,
        "mlvm": mlvm,
        "model": model,
        "net": ml.nn.Sequential(ml.nn.Linear(3, 4), ml.nn.ReLU(), ml.nn.Linear(4, 1)),
        "optimizer": ml.optim.SGD(model, 0.1),
        "path": "saved.safetensors",
        "pickle": pickle,
        "vm": ml.default_vm(),
    }


def theirs() -> dict[str, Any]:
    """Return the names of an expected value: the same as arrays."""
    logits, labels = ARRAYS["logits"], ARRAYS["labels"]
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), labels]
    return {**ARRAYS, **_PLAIN, "nll": nll}


def run(code: str, names: dict[str, Any]) -> Any:
    """Run the code and return its last expression's value; None of statements."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()):
        exec(compile(ast.Module(body, []), code, "exec"), names)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), code, "eval"), names)
    return None


def compare(result: Any, value: str) -> None:
    """Raise `AssertionError` unless a line gave what its row says."""
    if _TYPE.fullmatch(value):
        _require(str(result.type) == value, result)
    elif value.isidentifier() and value[0].isupper() and value not in ("True", "False", "None"):
        _require(value in [each.__name__ for each in type(result).__mro__], result)
    else:
        _compare(result, run(value, theirs()))


def _compare(result: Any, reference: Any) -> None:
    if isinstance(result, (ml.Tensor, np.ndarray)):
        array, expected = np.asarray(result), np.asarray(reference)
        _require(array.shape == expected.shape and array.dtype.kind == expected.dtype.kind, result)
        np.testing.assert_allclose(array, expected, rtol=2e-5, atol=1e-6)
    elif isinstance(reference, Mapping):
        _require(result.keys() == reference.keys(), result)
        for name, each in reference.items():
            _compare(result[name], each)
    elif isinstance(reference, list):
        for x, y in zip(result, reference, strict=True):
            _compare(x, y)
    elif isinstance(reference, float):
        np.testing.assert_allclose(result, reference, rtol=2e-5)
    else:
        _require(result == reference, result)


def _require(fits: bool, result: object) -> None:
    if not fits:
        raise AssertionError(f"it gives {result!r}")


def judge(row: Row) -> str:
    """ "works", or "refused" by words that are followed. Raises `AssertionError` where a value is
    another, where a line is not refused by us, and where a refusal lacks words of the remedy."""
    for line, remedy in pairwise(row.lines):
        try:
            run(line, ours(line))
        except (ml.errors.MlvmError, AttributeError, ImportError, TypeError) as error:
            require_words(str(error), line, remedy)
        else:
            raise AssertionError(f"{line} is not refused")
    compare(run(row.lines[-1], ours(row.lines[-1])), row.value)
    return "works" if len(row.lines) == 1 else "refused"


def require_words(text: str, line: str, remedy: str) -> None:
    """Raise `AssertionError` unless a refusal says what is new in the remedy; if nothing is, that
    the value is itself the result, or that the line is to be left out."""
    words, remedy_words = {*_WORDS.findall(text)}, {*_WORDS.findall(_TEXTS.sub("", remedy))}
    lacking = remedy_words - words - {*_WORDS.findall(line)} - _GIVEN
    assert not lacking, f"{text!r} lacks {lacking}"
    new = remedy_words - {*_WORDS.findall(line)}
    assert new or words & {*_WORDS.findall(remedy)} or re.search("itself|leave it out", text), text


def main() -> int:
    """Print how many lines of each group work, and those that are wrong."""
    argparse.ArgumentParser("python -m tests.one_liners", description=__doc__).parse_args()
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for row in rows():
            try:
                kind = judge(row)
            except Exception as error:
                kind = "wrong"
                print(f"{row.habit:6} {row.lines[0]}\n       {type(error).__name__}: {error}")
            for group in (row.group, "in all"):
                counts.setdefault(group, Counter())[kind] += 1
        os.chdir("/")
    kinds = "works", "refused", "wrong"
    print(f"{'':28}" + "".join(f"{kind:>8}" for kind in kinds))
    counts["in all"] = counts.pop("in all")
    for group, count in counts.items():
        numbers = "".join(f"{count[kind]:8}" for kind in kinds)
        print(f"{group:28}{numbers}{count['works'] / count.total():6.0%}")
    return int(counts["in all"]["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
