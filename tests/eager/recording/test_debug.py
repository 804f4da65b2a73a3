"""`ml.debug.nans`: the launch that makes a nan, eagerly, in a captured step, and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, MachineError, NonFiniteError
from mlvm.eager import Tensor, nn, optim
from mlvm.machines.local import LocalVM
from tests.brief import cases, line_with, refuses
from tests.machines.remote.serving import VM_KINDS, Served, vm_of, waited


@pytest.fixture(params=VM_KINDS)
def vm(request: pytest.FixtureRequest) -> Iterator[Any]:
    with vm_of(request.param) as vm:
        yield vm


# --- eagerly -------------------------------------------------------------------------


def test_a_block_says_what_it_is() -> None:
    block = ml.debug.nans(ml.default_vm())
    assert repr(block) == f"nans({ml.default_vm().name})"
    with block, block, pytest.raises(NonFiniteError):  # also within itself
        ml.log(ml.asarray([-1.0]))
    assert not np.isfinite(np.asarray(ml.log(ml.asarray([-1.0])))).any()
    assert repr(ml.autocast("bfloat16")) == "autocast('bfloat16')"


@cases(
    "make, message",
    (lambda x: ml.log(x), r"log\(f32\[3\]\): the result, f32\[3\], is nan at \[1\]; the operands"),
    (
        lambda x: 1.0 / (x - x),
        r"divide\(f32\[\], f32\[3\]\): the result, f32\[3\], is inf at \[0\]",
    ),
    (lambda x: ml.sum(x / 0.0 * 0.0), r"divide\(f32\[3\], f32\[\]\): .* is inf at \[0\]"),
    (lambda x: ml.exp(x * 100.0), r"exp\(f32\[3\]\): the result, f32\[3\], is inf at \[0\]"),
    (lambda x: ml.outer(x, x) ** 0.5, r"is nan at \[0, 1\]; the operands are finite"),
    (lambda x: x.astype(ml.float16) * 6e4 * 2.0, r"f16\[3\], is inf at \[0\]"),
    (lambda x: x.astype(ml.bfloat16) * 3e38, r"bf16\[3\], is inf at \[0\]"),
    (lambda x: ml.log((x - x).astype(ml.complex64)), r"c64\[3\], is \(-inf\+0j\) at \[0\]"),
    (lambda x: ml.full(3, ml.inf) - ml.full(3, ml.inf), r"is nan at \[0\]; operand 0 is inf at \["),
    (lambda x: ml.full(3, ml.nan) + 1.0, r"is nan at \[0\]; operand 0 is nan at \[0\]"),
    (
        lambda x: 7 // ml.asarray([1, 0]),
        r"floor_divide\(i64\[\], i64\[2\]\): integer division by 0 at index \[1\]",
    ),
    (
        lambda x: ml.capture(lambda n: n % ml.zeros_like(n))(ml.asarray([[5]])),
        r"remainder\(i64\[1,1\], i64\[1,1\]\): .* at index \[0, 0\]",
    ),
)
def test_the_launch_that_makes_it_raises(make: Callable[[Tensor], Tensor], message: str) -> None:
    x = ml.asarray([2.0, -1.0, 3.0])
    with ml.debug.nans(), pytest.raises(NonFiniteError, match=message) as raised:
        make(x)
    assert isinstance(raised.value, FloatingPointError)
    make(x)  # outside of the block it is as ever


@pytest.mark.local(reason="it serves a VM itself")
def test_bytes_that_are_no_bools_may_lie_where_a_result_is_made() -> None:
    with (
        Served() as server,
        server.vm() as vm,
        ml.debug.nans(vm),
        ml.Arena(vm, "batch", capacity=128),
    ):
        ml.full((128,), 7, dtype=ml.uint8)
        assert (ml.zeros(16) > 1.0).tolist() == [False] * 16


def test_what_is_no_defect() -> None:
    x = ml.asarray([2.0, -1.0, 3.0])
    with ml.debug.nans():
        masked = ml.where(x > 0.0, x, -ml.inf)
        np.testing.assert_allclose(ml.softmax(masked).numpy().sum(), 1.0, rtol=1e-6)
        assert ml.max(masked + ml.zeros(3)).item() == 3.0
        assert (ml.full(2, ml.inf) * 2.0).tolist() == [ml.inf] * 2
        assert ml.pad(x, 1, value=-ml.inf).tolist()[0] == -ml.inf
        assert ml.isnan(ml.full(2, ml.nan)).tolist() == [True, True]
        with ml.debug.nans():  # one more is none
            assert (x + 1.0).tolist() == [3.0, 0.0, 4.0]
        q = ml.random.normal((1, 2, 5, 4), key=ml.random.key(0))
        mask = ml.tril(ml.ones((5, 5))) > 0.0
        ml.scaled_dot_product_attention(q, q, q, mask)
        refuses(NonFiniteError, "", ml.log, x)


def test_elsewhere_and_in_a_gradient(vm: Any) -> None:
    with ml.use(vm):
        x = ml.asarray([4.0, 0.0])
        y = x * 1.0
        with ml.debug.nans(vm):
            assert ml.sqrt(x).tolist() == [2.0, 0.0]
            with pytest.raises(NonFiniteError, match=r"is inf at \[1\]") as raised, waited(vm):
                ml.grad(lambda x: ml.sum(x**0.5))(x)  # the gradient
            assert any(line_with("# the gradient", __file__) in x for x in raised.value.__notes__)
            with pytest.raises(NonFiniteError, match=r"divide.* is nan at"), waited(vm):
                y /= y
        assert y.tolist() == [4.0, 0.0]  # as it was before
        assert ml.log(x).tolist()[1] == -ml.inf


def test_other_vms_are_not_watched() -> None:
    with ml.debug.nans(LocalVM("other")):
        assert np.isnan(ml.log(ml.asarray(-1.0)).item())


@pytest.mark.local(reason="a VM elsewhere has no instrument")
def test_one_instrument_at_a_time(tmp_path: Any) -> None:
    vm = LocalVM("traced")
    with vm.profile(tmp_path / "t.json"):
        with pytest.raises(MachineError, match="already has an instrument"), ml.debug.nans(vm):
            pass
        with ml.use(vm):
            assert np.isnan(ml.log(ml.asarray(-1.0)).item())
    with ml.debug.nans(vm), ml.use(vm), pytest.raises(NonFiniteError):
        ml.log(ml.asarray(-1.0))


# --- captured ------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(3, 4, key=ml.random.key(0))
        self.norm = nn.BatchNorm(4)
        self.last = nn.Linear(4, 1, key=ml.random.key(1))

    def __call__(self, x: Tensor) -> Tensor:
        return self.last(ml.log(self.norm(self.first(x)) + 9.0))  # the logarithm


def values(*holders: Any) -> list[bytes]:
    return [x.numpy().tobytes() for each in holders for x in each.state().values()]


def test_a_captured_step_raises_and_changes_nothing(vm: Any) -> None:
    with ml.use(vm):
        model = Net()
        optimizer = optim.AdamW(model, optim.cosine(0.1, 100))

        def loss_of(model: Net, x: Tensor) -> Tensor:
            return ml.mean(ml.square(model(x + 0.0 * ml.random.normal((8, 3)))))

        @ml.capture
        def step(x: Tensor) -> Any:
            loss, grads = ml.value_and_grad(loss_of)(model, x)
            optimizer.update(grads)
            return loss

        good = ml.random.normal((8, 3), key=ml.random.key(3))
        bad = good * 1.0
        bad[2, 1] = 1e38
        bad *= 10.0
        step(good)
        with ml.debug.nans(vm):
            step(good)
            before = values(model, optimizer)
            for _ in range(2):
                raised = refuses(NonFiniteError, r"f32\[8", step, bad)
                assert any("recorded at" in note for note in raised.__notes__)
                assert values(model, optimizer) == before
            inside = step(good).item()
            after = values(model, optimizer)
        assert step.signatures == 2
        assert np.isfinite(inside)
        assert after != before
        step(bad)
        assert not np.isfinite(model.state()["last/kernel"].numpy()).all()


def test_the_line_is_that_of_the_recording(vm: Any) -> None:
    with ml.use(vm), ml.debug.nans(vm):
        w = ml.ones(3)

        @ml.capture
        def step(x: Tensor) -> Any:
            ml.add(w, x, out=w)

            def body(i: Tensor, s: Tensor) -> Tensor:
                return ml.sqrt(s - 1.0)  # the root

            return ml.fori_loop(0, 3, body, ml.cond(ml.sum(x) > 0.0, ml.negative, ml.abs, x))

        raised = refuses(
            NonFiniteError, r"sqrt\(f32\[3\]\): .* is nan at \[0\]", step, ml.full(3, 2.0)
        )
        assert any(line_with("# the root", __file__) in x for x in raised.__notes__)
        assert w.tolist() == [1.0, 1.0, 1.0]


def test_it_stands_around_a_captured_function() -> None:
    @ml.capture
    def step(x: Tensor) -> Tensor:
        with ml.debug.nans():
            return ml.log(x)

    refuses(CaptureError, r"cannot enter ml\.debug\.nans", lambda: step(ml.ones(2)))


def test_a_function_of_the_program(vm: Any) -> None:
    with ml.use(vm), ml.debug.nans(vm):

        @ml.subroutine
        def halved(x: Tensor, n: Tensor) -> Any:
            return ml.cond(n > 0, lambda: halved(ml.sqrt(x - 1.0), n - 1), lambda: x)

        step = ml.capture(lambda x, n: halved(x, n))
        assert step(ml.full(2, 26.0), ml.asarray(2)).tolist() == [2.0, 2.0]
        with pytest.raises(NonFiniteError, match=r"sqrt\(f32\[2\]\): .* is nan at \[0\]"):
            step(ml.full(2, 26.0), ml.asarray(6))


def test_a_step_that_takes_from_a_queue(vm: Any) -> None:
    with ml.use(vm):
        queue, total = ml.QueueTensor(vm, ["f32[2]"], 4), ml.zeros(2)

        @ml.capture
        def step() -> None:
            [x] = queue.get()
            ml.add(total, ml.log(x), out=total)

        def put(value: float) -> None:
            with queue.reserve() as [x]:
                x[...] = value

        with ml.debug.nans(vm):
            for value in (1.0, -1.0, 1.0):
                put(value)
            step()
            refuses(NonFiniteError, r"log\(f32\[2\]\)", step)
            assert total.tolist() == [0.0, 0.0]
            step()
            assert queue.empty()


@pytest.mark.local(reason="it looks at the VM's functions")
def test_outside_nothing_is_observed() -> None:
    vm = LocalVM("quiet")
    with ml.debug.nans(vm):
        assert vm.functions.instrument is not None
    assert vm.functions.instrument is None
    assert "launch" not in vars(vm)
    assert vm.fast_path is None or not vm.fast_path.instrumented
