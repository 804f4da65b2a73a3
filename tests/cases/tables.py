"""Tables of calls as text, a row a line: `functions.txt`, `refused_calls.txt`, and the sections of
`claims/*.txt`."""

from __future__ import annotations

import ast
import builtins
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.types import Array
from tests.brief import ROOT, refuses
from tests.cases import oracles

_CHOICE: Final = re.compile(r"<((?:[^<>]|->)*\|(?:[^<>]|->)*)(?<!-)>")
_OPERAND: Final = re.compile(r"\b([a-z])_((?:\d+(?:_\d+)*)?)\b")
_VALUED: Final = re.compile("(.*?)  ([=~]>)  (.*)")
_TOLERANCE: Final = {"f2": 2e-3, "f4": 1e-5, "c8": 1e-5}
_CONSTANTS: Final = {k: v for k, v in vars(oracles).items() if isinstance(v, np.ndarray)}
_SPACE: dict[str, Any] = {"ml": ml, "np": np, "math": math, **vars(oracles)}


def _hermitian(x: ml.Tensor) -> ml.Tensor:
    return x @ ml.conj(x).mT + ml.eye(x.shape[-1], dtype=x.dtype)


def _phaseless(vectors: ml.Tensor) -> ml.Tensor:
    """The projectors onto the columns, whatever their phases."""
    columns = ml.expand_dims(vectors.mT, axis=-1)
    return columns @ ml.conj(columns).mT


def _complete(x: ml.Tensor) -> ml.Tensor:
    """The projector onto what no column of x reaches, from the last columns of a full U."""
    u = ml.linalg.svd(x).U[:, 1:]
    return u @ u.mT


_SPACE |= {"hermitian": _hermitian, "phaseless": _phaseless, "complete": _complete}


class Line(str):
    """Line of a table, with a value for each of its choices `<a|b>`.

    place: file and number of the line, `tests/cases/functions.txt:41`
    is_first: whether the values are the first of all choices
    """

    place: str
    is_first: bool


def lines(name: str) -> Iterator[Line]:
    """Yield the lines of a table: one of the file for each combination of its choices."""
    file = Path(__file__).parent / name
    for number, text in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not text.strip() or text.startswith("#"):
            continue
        choices = [*dict.fromkeys(_CHOICE.findall(text))]
        for i, values in enumerate(product(*[choice.split("|") for choice in choices])):
            row = text
            for choice, value in zip(choices, values, strict=True):
                row = row.replace(f"<{choice}>", value)
            line = Line(row)
            line.place, line.is_first = f"{file.relative_to(ROOT)}:{number}", i == 0
            yield line


def _operand(letter: str, lengths: str) -> Array:
    shape = tuple(map(int, lengths.split("_"))) if lengths else ()
    rng = np.random.default_rng([ord(letter), *shape])
    x = rng.standard_normal(shape)
    if letter == "z":
        return np.asarray(x + 1j * rng.standard_normal(shape))
    if letter == "h":
        return np.asarray(x @ x.swapaxes(-1, -2) + np.eye(shape[-1]))
    if letter in "de":
        return rng.dirichlet(np.ones(shape[-1]), shape[:-1])
    if letter == "w":
        return np.asarray(3 * x)
    low, high = {"u": (0.1, 2.0), "p": (0.02, 0.98), "q": (0.05, 0.95)}.get(letter, (0.0, 0.0))
    return np.asarray(rng.uniform(low, high, shape) if high else x)


WORDS: Final = {"", "flat", "twice", "wide", "f32", "f64", "dynamic", "composed", "slopes"}
"""Words of the rows of `functions.txt`, which explains them."""


class Row:
    """A line of `functions.txt`: a call, its value in numpy, and words."""

    def __init__(self, line: Line) -> None:
        text, _, words = line.partition("  # ")
        self.call, _, self.value = text.partition("  =>  ")
        self.words, self.first, self.place = {*words.split(", ")}, line.is_first, line.place
        if unknown := self.words - WORDS:
            raise ValueError(f"{line.place}: expected words of {sorted(WORDS)}, got {unknown}")

    @cached_property
    def operands(self) -> dict[str, Array]:
        """The arrays that the call names."""
        drawn = {match[0]: _operand(*match.groups()) for match in _OPERAND.finditer(self.call)}
        constants = {n: x for n, x in _CONSTANTS.items() if re.search(rf"\b{n}\b", self.call)}
        return drawn | (constants if "asarray(" not in self.call else {})

    def _function(self, code: str, module: Any) -> Callable[..., Any]:
        """The code as a function of the operands, with that module for `f`."""
        text = f"lambda {', '.join(self.operands)}: ({code})"
        return eval(compile(text, self.call, "eval"), {**_SPACE, "f": module})

    @cached_property
    def ours(self) -> Callable[..., Any]:
        return self._function(self.call, ml)

    def expected(self, *arrays: Array) -> list[Array]:
        """What numpy has for the operands."""
        with np.errstate(all="ignore"):
            return flat(self._function(self.value or self.call, np)(*arrays))


def flat(result: Any) -> list[Any]:
    """The parts of tuples and lists."""
    if not isinstance(result, tuple | list):
        return [result]
    return [x for part in result for x in flat(part)]


class WrongCall(NamedTuple):
    """A row `call  # Error: text`: a call, the error that it raises and a pattern of its text."""

    call: str
    error_name: str
    text: str
    place: str

    @staticmethod
    def of(line: Line) -> WrongCall | None:
        """Parse a line; None for one without an error. Raises `ValueError` for a mere comment."""
        call, is_wrong, rest = line.partition("  # ")
        if not is_wrong and " # " in line:
            raise ValueError(f"expected two spaces before '# Error: text', got {line}")
        error_name, _, text = rest.partition(":")
        return WrongCall(call, error_name, text[1:], line.place) if is_wrong else None

    def error(self, names: dict[str, Any]) -> type[Exception]:
        """Find the class: of these names, of `ml.errors`, or built in."""
        return eval(self.error_name, {**vars(builtins), **vars(ml.errors), **names})


class Section(NamedTuple):
    """A part of a table: its title, and lines.

    Lines are rows, and the statements that they need, one after the other: what one changes, the
    next sees.

        expression  =>  value                # words: signs (of zeros, too), a tolerance
        expression  ~>  value                up to rounding, by dtype
        call  # Error: pattern of its text
    """

    title: str
    lines: list[Line]

    def check(self, names: dict[str, Any]) -> None:
        """Run the statements and check the rows, with these names for both."""
        names = {"np": np, "math": math, "inf": math.inf, "nan": math.nan, **names}
        for line in self.lines:
            try:
                _check(line, names)
            except BaseException as error:
                error.add_note(f"{line.place}: {line}")
                raise


def sections(name: str) -> list[Section]:
    """Return the sections of a table, which begin with `== title ==`."""
    parts: list[Section] = []
    for line in lines(name):
        if line.startswith("== "):
            parts.append(Section(line.strip("= "), []))
        elif parts:
            parts[-1].lines.append(line)
        else:
            raise ValueError(f"{line.place}: expected `== title ==` before the rows, got {line}")
    return parts


def _check(line: Line, names: dict[str, Any]) -> None:
    row, _, words = line.partition("  # ")
    valued, wrong = _VALUED.fullmatch(row), WrongCall.of(line)
    if valued is not None:
        actual, expected = eval(valued[1], names), eval(valued[3], names)
        _require_same(actual, expected, is_exact=valued[2] == "=>", words=words.split())
    elif wrong is not None:
        refuses(wrong.error(names), wrong.text, exec, wrong.call, names)
    else:
        last = ast.parse(line).body[-1]
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Compare):
            raise ValueError("nothing looks at this: expected `call  =>  value`, two spaces apart")
        exec(line, names)


def _require_same(actual: Any, expected: Any, *, is_exact: bool, words: Sequence[str]) -> None:
    """Assert equal values. Tensors and arrays also have the type of an expected tensor or array,
    and Python's values have one class, but for a float that is an int."""
    if isinstance(actual, ml.Tensor):
        if isinstance(expected, ml.Tensor | np.ndarray | np.generic):
            assert actual.type == ml.asarray(expected).type
        actual, expected = actual.numpy(), np.asarray(expected)
        assert actual.shape == expected.shape
    elif isinstance(actual, np.ndarray | np.generic):
        if isinstance(expected, np.ndarray | np.generic):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    elif isinstance(actual, tuple | list):
        assert type(actual) is type(expected) or not isinstance(actual, list)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _require_same(one, other, is_exact=is_exact, words=words)
        return
    elif isinstance(actual, float):
        assert isinstance(expected, float | int)
        assert not isinstance(expected, bool)
    elif not hasattr(actual, "dtype"):
        assert isinstance(actual, type(expected)) or isinstance(expected, type | str)
        assert isinstance(actual, bool) == isinstance(expected, bool)
    if not isinstance(actual, np.ndarray | np.generic | float | complex):
        assert actual == expected
        return
    tolerance = 0.0 if is_exact else _TOLERANCE.get(np.asarray(actual).dtype.str[1:], 1e-11)
    tolerance = next((float(each) for each in words if each != "signs"), tolerance)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)
    if "signs" in words:
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


FUNCTIONS: Final = [*map(Row, lines("functions.txt"))]
