"""`ml.check`: conditions that hold or raise, eagerly, in programs and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CheckError
from mlvm.eager import Tensor
from mlvm.machines.local import LocalVM
from tests.brief import cases, line_with, refuses
from tests.machines.remote.serving import VM_KINDS, vm_of, waited


@pytest.fixture(params=VM_KINDS)
def vm(request: pytest.FixtureRequest) -> Iterator[Any]:
    with vm_of(request.param) as vm:
        yield vm


def test_a_condition_holds_or_raises(vm: Any) -> None:
    with ml.use(vm):
        x = ml.asarray([[1.0, 2.0], [-3.0, -4.0]])
        ml.check(x < 5.0, "x is small")
        ml.check(ml.all(x < 5.0), "x is small")
        ml.check(ml.ones(0) > 1.0, "of none all hold")
        with pytest.raises(CheckError) as raised, waited(vm):
            ml.check(x > 0.0, "x is positive")  # eager
        assert str(raised.value) == "x is positive: 2 of 4 are False, the first at [1, 0]"
        assert isinstance(raised.value, AssertionError)
        assert any(line_with("# eager", __file__) in note for note in raised.value.__notes__)
        with pytest.raises(CheckError, match="all are"), waited(vm):
            ml.check(ml.all(x > 0.0), "all are")
        ml.check(x < 5.0, "x is small")


@pytest.mark.local(reason="arrays are no operands elsewhere")
def test_an_array_may_be_a_condition() -> None:
    refuses(CheckError, "1 of 2 are False", ml.check, np.asarray([True, False]), "holds")  # type: ignore[arg-type]


def test_a_captured_step_raises_before_it_updates(vm: Any) -> None:
    with ml.use(vm):
        w = ml.ones(3)
        optimizer = ml.optim.AdamW({"w": w}, 0.1)

        @ml.capture
        def step(x: Tensor) -> Tensor:
            g = ml.exp(x) * 2.0
            ml.check(x < 5.0, "x is small")  # captured
            optimizer.update({"w": g})
            return ml.sum(w)

        state = {**optimizer.state(), "w": w}
        for _ in range(3):
            step(ml.ones(3))
            before = {path: x.tolist() for path, x in state.items()}
            match = r"x is small: 1 of 3 are False, .* at \[1\]"
            with pytest.raises(CheckError, match=match) as e, waited(vm):
                step(ml.asarray([1.0, 5.0, 1.0]))
            assert any(line_with("# captured", __file__) in note for note in e.value.__notes__)
            assert {path: x.tolist() for path, x in state.items()} == before
        assert optimizer.count.item() == 3
        assert step.signatures == 1


def doubled(x: Tensor) -> Tensor:
    ml.check(x < 9.0, "small")
    return x * 2.0


def doubled_twice(x: Tensor) -> Tensor:
    double = ml.subroutine(doubled)
    return double(double(x))


@pytest.mark.parametrize("fuse", [False, True])
@cases(
    "fn, fails",
    (lambda x: ml.cond(ml.sum(x) > 0.0, doubled, lambda x: x, x), [9.5, 1.0]),
    (lambda x: ml.while_loop(lambda s: ml.sum(s) < 8.0, doubled, x), [9.5, -9.4]),
    (lambda x: ml.scan(lambda s, row: (s + doubled(row), s), ml.zeros(()), x)[0], [1.0, 9.5]),
    (lambda x: ml.map(doubled, x), [1.0, 9.5]),
    (doubled_twice, [1.0, 5.0]),
    ids=["cond", "while", "scan", "map", "function"],
)
def test_in_control_flow(fn: Callable[[Tensor], Tensor], fails: list[float], fuse: bool) -> None:
    x, bad = ml.asarray([1.0, 2.0]), ml.asarray(fails)
    captured = ml.capture(fn, fuse=fuse)
    assert captured(x).tolist() == fn(x).tolist()
    for each in (fn, captured):
        refuses(CheckError, "small", each, bad)
    assert captured(x).tolist() == fn(x).tolist()


def test_a_gradient_goes_by_and_a_check_in_a_branch_guards() -> None:
    w = ml.ones(2)

    @ml.capture
    def step(x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            y = w * x
            ml.check(y < 9.0, "small")
            return ml.sum(y * y)

        g = ml.grad(loss)(w)
        ml.cond(x[0] > 0.0, lambda: ml.check(x[1] > 0.0, "both are"), lambda: None)
        ml.subtract(w, g, out=w)
        return g

    assert step(ml.asarray([0.5, 0.5])).tolist() == [0.5, 0.5]
    for bad in ([1.0, -1.0], [90.0, 1.0]):
        before = w.tolist()
        refuses(CheckError, "", step, ml.asarray(bad))
        assert w.tolist() == before


def test_the_loop_in_c_goes_on() -> None:
    """A check is a call of Python in the native loop, which is not left for it."""
    vm = LocalVM("native")
    if not vm.native:
        pytest.skip("there is no native machine")
    from mlvm.core.machine import run as reference

    with ml.use(vm):
        step = ml.capture(lambda x: (ml.check(x > 0.0, "positive"), x * 2.0)[1])
        x = ml.ones(3)
        step(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "run", None)
            assert step(x).tolist() == [2.0] * 3
