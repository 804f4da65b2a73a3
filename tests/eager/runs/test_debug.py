"""`ml.debug.print` and `ml.debug.watch`: what they show, and what they leave as it is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import Capsys, cases, refuses
from tests.trees import bits
from tests.wired import connect_to

X = ml.asarray(np.random.default_rng(0).normal(size=(2, 3)), dtype="f32")

pytestmark = pytest.mark.local(reason="only a VM of this process prints")


def plain(x: ml.Tensor) -> ml.Tensor:
    y = ml.tanh(x) * 2.0
    z = ml.fori_loop(0, 3, lambda i, a: a * y + 1.0, y)
    return ml.sum(ml.cond(ml.sum(z) > 100.0, lambda z: z, lambda z: z * 2.0, z))


def shown(x: ml.Tensor) -> ml.Tensor:
    y = ml.tanh(x) * 2.0
    ml.debug.print("y {:.3f}", ml.sum(y))
    ml.debug.watch(y, "y")

    def body(i: ml.Tensor, a: ml.Tensor) -> ml.Tensor:
        ml.debug.print("turn {i}", i=i)
        ml.debug.watch(a, "a")
        return a * y + 1.0

    def right(z: ml.Tensor) -> ml.Tensor:
        ml.debug.print("right {}", 7)
        return z * 2.0

    def wrong(z: ml.Tensor) -> ml.Tensor:
        ml.debug.print("never")
        return z

    z = ml.fori_loop(0, 3, body, y)
    return ml.sum(ml.cond(ml.sum(z) > 100.0, wrong, right, z))


def lines(capsys: Capsys) -> list[str]:
    text = capsys.readouterr().out
    assert all(re.match(r".*test_debug.py:\d+: ", line) for line in text.splitlines())
    return [line.partition(": ")[2] for line in text.splitlines()]


def expected() -> list[str]:
    total = float(ml.sum(ml.tanh(X) * 2.0))
    return [f"y {total:.3f}", "turn 0", "turn 1", "turn 2", "right 7"]


WRAPPED: dict[str, Any] = {
    "eager": lambda fn: fn,
    "captured": ml.capture,
    "gradient": lambda fn: ml.capture(ml.grad(fn)),
    "value and gradient": lambda fn: ml.capture(ml.value_and_grad(fn)),
    "jvp": lambda fn: lambda x: ml.jvp(fn, (x,), (x,)),
    "captured jvp": lambda fn: ml.capture(lambda x: ml.jvp(fn, (x,), (x,))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_every_launch_prints_and_bits_stay(name: str, capsys: Capsys) -> None:
    want, step = WRAPPED[name](plain), WRAPPED[name](shown)
    value = bits(want(X))
    for _ in range(4):
        assert bits(step(X)) == value
        assert lines(capsys) == expected()
    ml.debug.watched("a", clear=True)
    ml.debug.watched("y", clear=True)


def test_watched_values_are_those_of_eager_code() -> None:
    for name in ("a", "y"):
        ml.debug.watched(name, clear=True)
    shown(X)
    eagerly = [ml.debug.watched(name, clear=True) for name in ("a", "y")]
    ml.capture(shown)(X)
    captured = [ml.debug.watched(name, clear=True) for name in ("a", "y")]
    assert [len(series) for series in eagerly] == [3, 1]
    assert [[x.tobytes() for x in series] for series in captured] == [
        [x.tobytes() for x in series] for series in eagerly
    ]
    assert ml.debug.watched("a") == []


def test_a_series_keeps_the_latest_values() -> None:
    def body(i: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
        ml.debug.watch(i, "i")
        return x

    step = ml.capture(lambda x: ml.fori_loop(0, 10_050, body, x))
    step(ml.ones(()))
    series = ml.debug.watched("i", clear=True)
    assert [int(series[0]), int(series[-1]), len(series)] == [50, 10_049, 10_000]


def test_vmap_prints_each_row(capsys: Capsys) -> None:
    def fn(x: ml.Tensor) -> ml.Tensor:
        ml.debug.print("row {}", x)
        return x * 2.0

    x = ml.asarray([1.0, 2.0, 3.0])
    for mapped in (ml.vmap(fn), ml.capture(ml.vmap(fn))):
        assert mapped(x).tolist() == [2.0, 4.0, 6.0]
        assert lines(capsys) == ["row 1.0", "row 2.0", "row 3.0"]


def test_formats(capsys: Capsys) -> None:
    ml.debug.print(
        "{} {:.1f} {n:04d} {{}}", ml.asarray([1, 2]), ml.asarray([0.25, 1.0]), n=ml.asarray(7)
    )
    assert lines(capsys) == ["[1 2] [0.2 1.0] 0007 {}"]


@cases(
    "format, values, text",
    ("{} {}", (X,), "got '{} {}': it refers to more than 1 positional value"),
    ("hello", (X,), "each value needs a placeholder {}"),
    ("{1!r}", (X, X), "each value needs a placeholder {}"),
    ("{:d}", (X,), ""),
    ("{name}", (X,), "no value is named 'name'"),
    ("{", (X,), ""),
    ("{0.shape}", (X,), "without an index or attribute"),
    ("{[0]}", (X,), "without an index or attribute"),
    ("{}", ("text",), ""),
    (X, (), ""),
)
def test_wrong_formats_are_refused(format: Any, values: Any, text: str) -> None:
    pattern = f"^debug.print: .*{re.escape(text)}"
    refuses(ml.errors.ArgumentError, pattern, ml.debug.print, format, *values)
    step = ml.capture(lambda: ml.debug.print(format, *values))
    refuses(ml.errors.ArgumentError, r"debug.print: ", step)


def test_a_vm_elsewhere_is_refused() -> None:
    vm = connect_to(ml.VM("server"))
    try:
        with ml.use(vm):
            refuses(ml.errors.MachineError, "expected a VM of this process", ml.debug.print, "x")
    finally:
        vm.close()
