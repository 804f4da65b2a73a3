"""Errors for values that a captured function reads: the expression, and what to write instead."""

from __future__ import annotations

import linecache
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from tests.brief import refuses

READS = """
if x[0] > 0: pass => Select with ml.where(x[0] > 0, x, y), or branch with ml.cond
if x[0] > 0 and (not x[1] > 0): pass => Select with ml.where((x[0] > 0) & ~(x[1] > 0), x, y), or branch with ml.cond
x if 0 < x[0] < 3 else -x => Write ml.where((0 < x[0]) & (x[0] < 3), x, -x), or ml.cond
while x[0] > 0: pass => Write ml.while_loop(lambda state: x[0] > 0, body, state)
assert ml.all(x > 0) => Write ml.check(ml.all(x > 0), "message")
not ml.any(x) => Write ~ml.any(x)
x[0] > 0 or x[1] => Write (x[0] > 0) | x[1]
0 < x[0] < 3 => Write (0 < x[0]) & (x[0] < 3)
float(x[0]) => Write ml.astype(x[0], ml.float32)
math.sqrt(x[0]) => Write ml.sqrt(x[0])
np.clip(x, 0, 1) => Write ml.clip(x, 0, 1)
max(x[0], x[1]) => Write ml.maximum(x[0], x[1])
any(x > 0) => Write ml.any(x > 0)
range(n) => Write ml.fori_loop(0, n, body, state)
x[n:n + 2] => Write ml.dynamic_slice(x, n, 2)
x[:n] => Write ml.dynamic_slice(x, start, length)
[1, 2][n] => Write ml.stack([1, 2])[n]
x[0] in [x[1]] => Write ml.isin(x[0], [x[1]])
f'{x[0]:.2f}' => Write ml.debug.print("{}", x), which prints at every call
x.numpy() => Compute with the tensor, or return it and read its value outside
np.asarray(x) => Compute with the tensor, or return it and read its value outside
ml.zeros((n,)) => Pass a Python number, such as x.shape[0], or call it outside
"""  # noqa: E501


@pytest.mark.parametrize("row", READS.strip().splitlines())
def test_an_error_names_the_read_and_a_remedy(row: str) -> None:
    code, remedy = row.split(" => ")
    lines = ["def step(x, n):\n", f"    {code}\n", "    return x\n"]
    linecache.cache["<reads>"] = len("".join(lines)), None, lines, "<reads>"
    names: dict[str, Any] = {"ml": ml, "np": np, "math": math}
    exec(compile("".join(lines), "<reads>", "exec"), names)
    error = refuses(CaptureError, "", ml.capture(names["step"]), ml.ones(3), ml.asarray(1))
    assert "<reads>:2: cannot read a tensor's value inside a captured function, which " in str(
        error
    )
    assert f"`{code.removesuffix(': pass')}` needs" in str(error)
    assert str(error).endswith(f"this value. {remedy}")


CAUGHT = """
try: float(x[0])
except Exception: x = -x
=>
with suppress(Exception): x = -x if x[0] > 0 else x
=>
x = ml.fori_loop(0, 2, lambda i, s: -s if guessed(s) else s, x)
"""


def guessed(x: ml.Tensor) -> bool:
    try:
        return bool(x[0] > 0)
    except CaptureError:
        return False


@pytest.mark.parametrize("code", CAUGHT.strip().split("=>"))
@pytest.mark.parametrize("transform", [ml.capture, ml.vmap])
def test_a_caught_error_of_a_read_is_raised_at_the_end(transform: Any, code: str) -> None:
    names: dict[str, Any] = {"ml": ml, "suppress": suppress, "guessed": guessed}
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    exec(f"def step(x):\n{lines}    return x\n", names)
    x = ml.ones(3) if transform is ml.capture else ml.ones((3, 3))
    refuses(
        CaptureError, "The function caught this error and continued", transform(names["step"]), x
    )


def test_the_text_of_a_tensor_is_no_caught_read() -> None:
    weights = ml.ones(3)
    printed = ml.capture(lambda x: (x + weights, print(x, weights))[0])
    assert printed(ml.ones(3)).tolist() == [2, 2, 2]


def test_without_a_source_the_remedy_is_general() -> None:
    names: dict[str, Any] = {}
    exec(compile("def step(x):\n    return float(x)\n", "<nowhere>", "exec"), names)
    error = refuses(
        CaptureError, "inside a captured function: it is", ml.capture(names["step"]), ml.ones(())
    )
    assert str(error).endswith(
        "Return the tensor, or branch with ml.where, ml.cond or ml.while_loop"
    )
