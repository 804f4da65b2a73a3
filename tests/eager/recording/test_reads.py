"""Errors for values that a captured function reads: the expression, and what to write instead."""

from __future__ import annotations

import heapq
import linecache
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, StaleTensorError
from tests.brief import refuses
from tests.trees import bits

READS = """
if x[0] > 0: pass => Select with ml.where(x[0] > 0, x, y), or branch with ml.cond
if x[0] > 0 and (not x[1] > 0): pass => Select with ml.where((x[0] > 0) & ~(x[1] > 0), x, y), or branch with ml.cond
if x[0]: pass => Select with ml.where(x[0] != 0, x, y), or branch with ml.cond
x if x[0] else -x => Write ml.where(x[0] != 0, x, -x), or ml.cond
x if 0 < float(x[0]) < 3 else -x => Write ml.where((0 < x[0]) & (x[0] < 3), x, -x), or ml.cond
while x[0] > 0: pass => Use ml.while_loop, with the variables that its body changes as the state
while ml.sum(x) < 9 and n < 5: x, n = x * 2, n + 1 => Write ml.while_loop(lambda state: (ml.sum(state[0]) < 9) & (state[1] < 5), body, (x, n))
n or 5 => Write ml.where(n != 0, n, 5)
n and 5 => Write ml.where(n != 0, 5, n)
n and x => Select with ml.where, or branch with ml.cond
n > 1 and 2 or 3 => Select with ml.where, or branch with ml.cond
'a' if n else 'b' => Select with ml.where(n != 0, x, y), or branch with ml.cond
if n > 0 and shown: pass => Select with ml.where, or branch with ml.cond
while ml.sum(x).item() > 1: x = x / 2 => Write ml.while_loop(lambda x: ml.sum(x) > 1, body, x)
assert ml.all(x > 0) => Write ml.check(ml.all(x > 0), "message")
not ml.any(x) => Write ~ml.any(x)
not ml.sum(x) => Write ~(ml.sum(x) != 0)
not x[0] > 0 => Write ~(x[0] > 0)
x[0] > 0 or x[1] => Write ml.where(x[0] > 0, x[0] > 0, x[1])
x[0] > 0 or x[1] > 0 => Write (x[0] > 0) | (x[1] > 0)
0 < x[0] < 3 => Write (0 < x[0]) & (x[0] < 3)
float(x[0]) => Write ml.astype(x[0], ml.float32)
math.sqrt(x[0]) => Write ml.sqrt(x[0])
np.clip(x, 0, 1) => Write ml.clip(x, 0, 1)
max(x[0], x[1]) => Write ml.maximum(x[0], x[1])
max(x[0], x[1], n) => Write ml.maximum(ml.maximum(x[0], x[1]), n)
max(x, key=abs) => Use ml.max
sorted(x, reverse=True) => Use ml.sort
any(x > 0) => Write ml.any(x > 0)
any((v > 0 for v in x)) => Use ml.any
range(n) => Write ml.fori_loop(0, n, body, state)
range(1, n) => Write ml.fori_loop(1, n, body, state)
range(0, n, 2) => Compute with the tensor, or return it and read its value outside
print('loss', [float(ml.sum(x))]) => Write ml.debug.print("{}", x), which prints at every call
x[n:n + 2] => Write ml.dynamic_slice(x, n, 2)
x[None][..., n:n + 2] => Write ml.dynamic_slice(x[None], n, 2, axis=-1)
x[None][:, n:n + 2] => Write ml.dynamic_slice(x[None], n, 2, axis=1)
x[:n] => No shape may depend on a tensor's value: use ml.dynamic_slice for a fixed length, or ml.where with a mask of ml.arange
x[None][0, :n] => No shape may depend on a tensor's value: use ml.dynamic_slice for a fixed length, or ml.where with a mask of ml.arange
x[None][n - 1:n, :2] => No shape may depend on a tensor's value: use ml.dynamic_slice for a fixed length, or ml.where with a mask of ml.arange
x[:n] = 0 => Select the new value with ml.where and a mask of ml.arange, or pass a Python number as index
shown[n] = 0 => Select the new value with ml.where and a mask of ml.arange, or pass a Python number as index
del shown[n] => Select the new value with ml.where and a mask of ml.arange, or pass a Python number as index
shown[n] => Write ml.dynamic_slice(x, start, length) for a slice; index with ml.stack(xs)[i] if all items have one shape, or branch with ml.switch
'abc'[n] => Write ml.dynamic_slice(x, start, length) for a slice; index with ml.stack(xs)[i] if all items have one shape, or branch with ml.switch
np.ones(3)[n] => Write ml.asarray(np.ones(3))[n]
np.ones(3)[x > 1] => Write ml.dynamic_slice(x, start, length) for a slice; index with ml.stack(xs)[i] if all items have one shape, or branch with ml.switch
n in range(5) => Use ml.isin, with a tensor of all elements
n not in [2, 3] => Write ~ml.isin(n, [2, 3])
x[0] in x => Write ml.any(x == x[0])
math.isclose(n, n + 1) => Use ml.isclose with rtol=1e-9 and atol=0, the defaults of math.isclose
np.zeros(n) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call ml.zeros outside
arr[1] = n => Make the array a tensor, for example with ml.asarray
math.trunc(x[0]) => Write ml.trunc(x[0])
np.unique(x) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call ml.unique outside
np.take(x[None], 0) => Use ml.take: expected an axis for x of 2 dimensions, got None
np.apply_along_axis(np.sum, 0, x) => Use ml.vmap
[1, 2][n] => Write ml.stack([1, 2])[n]
x[0] in [x[1]] => Write ml.isin(x[0], [x[1]])
f'{x[0]:.2f}' => Write ml.debug.print("{}", x), which prints at every call
np.stack([x, x]) => Write ml.stack([x, x])
alias.linalg.norm(x, axis=0) => Write ml.linalg.norm(x, axis=0)
dot(x, x) => Write ml.dot(x, x)
np.vander(x) => Adapt this: x[:, None] ** ml.arange(n - 1, -1, -1)
np.ravel([x]) => Use ml.reshape
heapq.nsmallest(1, x) => Compute with the tensor, or return it and read its value outside
x.numpy() => Compute with the tensor, or return it and read its value outside
np.asarray(x) => Compute with the tensor, or return it and read its value outside
np.array([x[0], x[1]]) => Write ml.stack([x[0], x[1]])
np.asarray([[x[0]], [x[1]]]) => Write ml.asarray([[x[0]], [x[1]]])
ml.linspace(0.0, 1.0, n) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
x.sum(axis=n) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
ml.concat([x, x], axis=n) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
if 0 < float(x[0]) * 2 < 3 and shown: pass => Select with ml.where, or branch with ml.cond
ml.interp(x, x, x, period=n) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
ml.nn.Linear(n, 2) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
ml.zeros((n,)) => No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], or int(n) for an argument n of NumPy, or call it outside
"""  # noqa: E501


def function_of(code: str) -> Any:
    """Return a function with this line as its body, in a file that only linecache knows."""
    lines = ["def step(x, n):\n", f"    {code}\n", "    return x\n"]
    linecache.cache["<reads>"] = len("".join(lines)), None, lines, "<reads>"
    names: dict[str, Any] = {"ml": ml, "np": np, "alias": np, "dot": np.dot, "math": math}
    names |= {
        "heapq": heapq,
        "logging": logging,
        "w": ml.ones(3),
        "shown": [None],
        "arr": np.zeros(3),
        "Failure": Failure,
    }
    exec(compile("".join(lines), "<reads>", "exec"), names)
    return names["step"]


@pytest.mark.parametrize("row", READS.strip().splitlines())
def test_an_error_names_the_read_and_a_remedy(row: str) -> None:
    code, remedy = row.split(" => ")
    step = ml.capture(function_of(code))
    error = refuses(CaptureError, "", step, ml.ones(3), ml.asarray(1))
    assert "<reads>:2: cannot read a tensor's value inside a captured function, which " in str(
        error
    )
    read = re.split(r": (?=pass|x)| = |^del ", code)
    assert f"`{read[1] if code.startswith('del') else read[0]}` needs" in str(error)
    assert str(error).endswith(f"this value. {remedy}")


def matched(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    match n:
        case 1 | 2:
            return x
    return -x


def paired(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    match [n, 1]:
        case [2, 1]:
            return x
    return -x


def found(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    table = {0: x, 1: -x}
    return table[n]  # type: ignore[index]


def appended(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    kept: list[ml.Tensor] = []
    ml.fori_loop(0, 3, lambda i, s: kept.append(s) or s * 2, x)  # type: ignore[func-returns-value]
    return ml.stack(kept)


@pytest.mark.parametrize(
    ("fn", "remedy", "write"),
    [
        (matched, "ml.where(n == 1, x, ", lambda x, n: ml.where(n == 1, x, -x)),
        (paired, "Select with ml.where, or", lambda x, n: ml.where(n == 2, x, -x)),
        (found, "ml.stack([*table.values()])[n]", lambda x, n: ml.stack([x, -x])[n]),
        (
            appended,
            "ml.scan(lambda s, i: (s * 2, s), x, ml.arange(3))",
            lambda x, n: ml.scan(lambda s, i: (s * 2, s), x, ml.arange(3))[1],
        ),
    ],
)
def test_a_remedy_has_the_value_of_the_eager_call(fn: Any, remedy: str, write: Any) -> None:
    x, n = ml.asarray([1.0, 2.0, 3.0]), ml.asarray(1)
    error = refuses(CaptureError, r"test_reads.py:\d+: ", ml.capture(fn), x, n)
    assert remedy in str(error)
    expected = -x if fn is found else fn(x, n)  # eager dicts do not compare values either
    assert bits(ml.capture(write)(x, n)) == bits(expected)


_VALUED = [
    row.split(" => Write ")
    for row in READS.splitlines()
    if " => Write " in row and "Write ml.dynamic_slice(x, start" not in row
]


@pytest.mark.parametrize(("code", "remedy"), _VALUED)
def test_a_written_remedy_runs_and_has_the_eager_value(code: str, remedy: str) -> None:
    remedy = remedy.split(", or ml.")[0].split(", which")[0]
    if code.startswith(("while", "assert", "range", "print", "f'", "np.vander")):
        return  # statements; and recipes whose names are those of the caller
    x, n = ml.asarray([0.5, 0.25, 0.75]), ml.asarray(1)
    eager = function_of(f"return {code}")(x, n)
    written = ml.capture(function_of(f"return {remedy}"))(x, n)
    np.testing.assert_allclose(np.asarray(written, float), np.asarray(eager, float), rtol=1e-6)


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


TEXTS = """
str(x)
repr(x)
format(x)
ascii(x)
f'{x}'
f'a {x!r}'
'%s' % x
'{}'.format(x)
str([x])
f'{x + x}'
"""
USES = """
if {} == 'a': x = -x
x = x * len({})
x = {{{}: x}}.get('a', x)
return x, {}
shown[0] = {}
shown.append({})
for each in {}: x = x + 1
assert {} != 'a'
y = lambda: {}; x = x * len(y())
text = {}; x = x * len(text)
text = {}; shown.append(text)
"""
SHOWN = """
print({})
print('a', {}, sep='')
x = (x + w, print({}))[0]
logging.info({})
logging.info('%s', {})
if len(x) > 3: raise ValueError({})
assert len(x), {}
text = {}; print('a', text)
if len(x) > 3: text = {}; raise ValueError(text)
if len(x) > 3: raise Failure(x, {})
"""


@pytest.mark.parametrize("use", USES.strip().splitlines())
@pytest.mark.parametrize("text", TEXTS.strip().splitlines())
def test_a_program_cannot_depend_on_the_text_of_a_tensor(text: str, use: str) -> None:
    step = ml.capture(function_of(use.format(text)))
    error = refuses(CaptureError, "", step, ml.ones(3), ml.asarray(1))
    assert "<reads>:2: cannot read a tensor's value inside a captured " in str(error)
    assert f"`{text}` needs" in str(error)
    assert "Compare the tensor itself" in str(error)


@pytest.mark.parametrize("use", SHOWN.strip().splitlines())
@pytest.mark.parametrize("text", TEXTS.strip().splitlines())
def test_the_text_of_a_tensor_may_be_printed_logged_and_raised(text: str, use: str) -> None:
    fn = function_of(use.format(text))
    step = ml.capture(fn)
    for x in (ml.ones(3), ml.asarray([1.0, 2.0, 3.0])):
        assert bits(step(x, 1)) == bits(fn(x, 1))
    if "raise" in use:
        refuses(ValueError, "captured f32", step, ml.ones(4), 1)


class Failure(ValueError):
    def __init__(self, *parts: object) -> None:
        self.text = f"{parts}"
        super().__init__(self.text)


class Box:
    def __init__(self, x: ml.Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"Box({self.x})"


def test_a_text_within_the_text_of_an_object_is_used_where_the_object_is() -> None:
    step = ml.capture(lambda x: (x + 1, print(Box(x)))[0])
    assert step(ml.ones(3)).tolist() == [2, 2, 2]
    refuses(
        CaptureError, r"`str\(Box\(x\)\)`", ml.capture(lambda x: x * len(str(Box(x)))), ml.ones(3)
    )


def failure(fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
def test_each_function_of_numpy_that_mlvm_has_is_named() -> None:
    named = 0
    for space in ("", "linalg.", "fft."):
        for name in dir(resolve_name(f"numpy:{space[:-1]}") if space else np):
            with suppress(AttributeError):
                resolve_name(f"mlvm.eager:{space}{name}")
                step = ml.capture(function_of(f"return np.{space}{name}(x[:, None] + x)"))
                error = failure(step, ml.ones(3), 1)
                if "cannot read" in error and name not in ("asarray", "save"):
                    assert f" ml.{space}{name}" in error
                    named += 1
    assert named > 70


@pytest.mark.parametrize("key", [id, hash])
def test_an_argument_is_not_looked_up_by_id(key: Any) -> None:
    x, known = ml.ones(3), ml.zeros(3)
    scales = {key(known): 2.0, 1 << 40: 3.0}
    step = ml.capture(lambda x: x * scales.get(key(x), 1.0))
    for _ in range(3):
        assert step(x).tolist() == [1, 1, 1]
        refuses(CaptureError, "use the tensor itself as the key", step, known)
    cache: dict[int, int] = {}
    storing = ml.capture(lambda x: x * cache.setdefault(key(x), 1))
    refuses(CaptureError, r"stores the id or hash .* item 'id\(x\)'", storing, x)
    assert not cache
    seen = ml.capture(lambda x: x * len({key(y) for y in (x, x, x + 1)}))
    assert seen(x).tolist() == [2, 2, 2]


def test_tensors_of_a_trace_are_only_for_the_trace_and_its_thread() -> None:
    kept, w = [], ml.ones(3)

    def leaking(x: ml.Tensor) -> None:
        kept.append(lambda: x + 1)
        raise KeyError

    def threaded(x: ml.Tensor, *, is_placeholder: bool) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(ml.add, x if is_placeholder else w, 1.0).result() + x

    refuses(KeyError, "", ml.capture(leaking), w)
    refuses(StaleTensorError, "trace of a captured function, which has finished; return", kept[0])
    step = ml.capture(threaded)
    refuses(CaptureError, "different thread: .* in that thread", step, w * 1, is_placeholder=True)
    refuses(CaptureError, "a different thread has computed", step, w * 1, is_placeholder=False)


def test_without_a_source_the_remedy_is_general() -> None:
    names: dict[str, Any] = {}
    exec(compile("def step(x):\n    return float(x)\n", "<nowhere>", "exec"), names)
    error = refuses(
        CaptureError, "inside a captured function: it is", ml.capture(names["step"]), ml.ones(())
    )
    assert str(error).endswith(
        "Return the tensor, or branch with ml.where, ml.cond or ml.while_loop"
    )
