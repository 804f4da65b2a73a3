"""Updates of parts of tensors: those that are lost warn, and others do not."""

from __future__ import annotations

import inspect
import re
import tarfile
import types
import warnings
from types import SimpleNamespace
from typing import Any, Final

import pytest

import mlvm.eager as ml
from mlvm.eager.tensor import parts
from tests.brief import ROOT

ROWS: Final = [
    f"{line[:4]} | {code}"
    for line in (ROOT / "tests/cases/updates.txt").read_text("utf-8").splitlines()
    for code in line[7:].split(" || ")
    if line[0] != "#"
]
UPDATES: Final = ("{} += 1.0", "{} **= 2", "{} //= 2.0", "{}[0] = 1.0", "{0}[:1] += {0}[-1]")


def change(a: Any, by: float = 1.0) -> None:
    for i in range(a.shape[0]):
        a[i] = a[i] + by


def change_by_itself(a: Any) -> None:
    a *= a


def changed(a: Any) -> Any:
    a += 1.0
    return a


def change_items(rows: Any, numbers: Any) -> None:
    for a, b in zip(rows, numbers, strict=True):
        a += b
    a = rows[0]
    a += 1.0


def write_to(a: Any) -> None:
    ml.exp(ml.ones((3, 3)), out=a)


def change_and_keep(a: Any) -> None:
    a += 1.0
    KEPT.append(a)


def change_in_a_closure(a: Any) -> None:
    a[0] = 2.0
    assert (lambda: a)() is a


KEPT: Final[list[Any]] = []


def run(code: str, **variables: Any) -> list[str]:
    """Run the body of a function twice; return the warnings of the second call."""
    lines = "".join(f"\n    {line}" for line in code.split(" / "))
    space = {**globals(), "pick": lambda x: x[1]}
    exec(f"def function(x, box, held):{lines}", space)
    for _ in range(2):
        with warnings.catch_warnings(record=True, action="always") as told:
            parts._sites.clear()
            space["function"](**variables)
    assert {each.category for each in told} <= {ml.NoEffectWarning}
    return [str(each.message) for each in told]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("update", UPDATES)
def test_updates_that_are_lost_warn(row: str, update: str) -> None:
    kind, code = row.split(" | ", 1)
    code = re.sub("{(.*?)}", lambda match: update.format(match[1]), code)
    x = ml.zeros((2, 3, 3))
    held = [x[0], x[1]]
    box = SimpleNamespace(x=x, held=x[1], part=lambda: x[0], parts=lambda: held)
    told = run(code, x=x, box=box, held=held)
    assert bool(told) == (kind == "lost")
    assert all("its update changes no other tensor" in text for text in told)
    assert not ml.any(x).item()


@pytest.mark.parametrize("call", ["x[:, i:]", "ml.split(x, [i], 1)[1]", "ml.roll(x, i)[i:]"])
def test_results_of_recorded_calls_are_parts(call: str) -> None:
    for i in (1, 2, 3, 1, 2, 3, 1, 2):
        for shape in ((8, 8), (9, 7), (16, 16), (4, 5)):
            x = ml.zeros(shape)
            assert eval(call, {"x": x, "i": i, "ml": ml}).is_part


def test_modules_warn_if_the_whole_is_read_later() -> None:
    def told(code: str) -> int:
        with warnings.catch_warnings(record=True, action="always") as caught:
            exec(compile(code, "module.py", "exec"), {"ml": ml, "x": ml.zeros((2, 3))})
        return len(caught)

    assert told("a = x[0]\na += 1.0\nprint(x.sum())") == 1
    loop = "for a in x: a += 1.0\n"
    assert told(loop) == told(loop + "ml.nn.ReLU().eval()") == 2
    assert told(loop + "vars()") == 0
    assert told("".join([f"v{i} = {i}\n" for i in range(300)]) + loop) == 2  # EXTENDED_ARG
    assert told("a = x[0]\na += 1.0") == 0  # another cell of a notebook may read a
    assert told("class A:\n    a = ml.zeros((2, 3))[0]\n    a += 1.0") == 0


def test_each_instruction_is_analysed() -> None:
    codes, count = [compile(inspect.getsource(tarfile), "tarfile", "exec")], 0
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        flow = parts._Liveness(code)
        for x in flow.updates.values():
            flow.is_read(x.name, x.end), flow.whole_read_later(x.name, x.end, {})
            count += not flow.sources_of(x.name)[0]
    assert count > 20
