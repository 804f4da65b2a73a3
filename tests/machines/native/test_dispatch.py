"""Eager calls by the short way in C: what `apply_in_python` gives, it gives too."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    HandleError,
    MachineError,
    MlvmError,
    OperandValueError,
    StaleTensorError,
)
from mlvm.core.observe import observed
from mlvm.eager.autodiff.tape import Tape
from mlvm.eager.tensor import templates
from mlvm.eager.tensor.apply import apply, apply_in_python, one_op
from mlvm.eager.tensor.update import apply_into
from mlvm.machines.native import loop
from mlvm.machines.native.extension import EXTENSION
from tests.brief import Before, Patch, cases, refuses, replace_op
from tests.threads import PATIENCE, in_threads, start

if EXTENSION is None:
    pytest.skip("the native machine was not built", allow_module_level=True)


@pytest.fixture
def vm() -> ml.VM:
    return ml.VM(native=True)


@pytest.fixture
def arena(vm: ml.VM) -> Iterator[ml.Arena]:
    arena = ml.Arena(vm, "arena")
    with arena.allocating():
        yield arena


@pytest.fixture
def x(arena: ml.Arena) -> ml.Tensor:
    """A tensor whose sum with itself goes by the short way."""
    x = ml.ones(4)
    for _ in range(3):
        x + x
    return x


def launches(vm: Any, work: Callable[[], object]) -> int:
    """Count the launches that the work makes by the slow path."""
    count = 0
    launch = vm.launch

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return launch(*args, **options)

    vm.launch = counted  # not `observed`, which closes the short way
    try:
        work()
    finally:
        del vm.launch
    return count


CALLS: dict[str, Callable[[ml.Tensor], ml.Tensor]] = {
    "unary": lambda x: ml.tanh(x), "binary": lambda x: x + x, "a scalar": lambda x: 2 * x - 1,
    "broadcast": lambda x: x * x[:1], "comparison": lambda x: x < 0.5,
    "three operands": lambda x: ml.where(x > 0, x, -x), "reduction": lambda x: ml.sum(x, axis=0),
    "product": lambda x: x @ x.mT,
}  # fmt: skip


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("name", CALLS)
def test_the_short_way_gives_what_the_long_one_gives(vm: ml.VM, name: str) -> None:
    x = ml.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    expected = CALLS[name](x).numpy()
    CALLS[name](x)  # has learnt the types, and finds regions
    assert launches(vm, lambda: CALLS[name](x)) == 0
    np.testing.assert_array_equal(CALLS[name](x).numpy(), expected)


@pytest.mark.usefixtures("arena")
@cases("covered", 0, 1, 2)
def test_a_mask_chooses_without_a_launch(vm: ml.VM, covered: int) -> None:
    rng = np.random.default_rng(5)
    for dtype in ("?", "i2", "f4", "c8", "c16"):
        x = rng.integers(0, 9, (5, 3, 2)).astype(dtype)
        tensor = ml.asarray(x)
        for share in (0.0, 0.5, 1.0):
            mask = np.asarray(rng.random(x.shape[:covered]) < share)
            key, chosen = ml.asarray(mask), list[ml.Tensor]()
            assert launches(vm, lambda: chosen.append(tensor[key])) == 0  # noqa: B023
            np.testing.assert_array_equal(chosen[0].numpy(), x[mask], strict=True)


@pytest.mark.usefixtures("arena")
def test_the_shape_that_a_mask_chooses_is_not_remembered() -> None:
    x = ml.asarray(np.arange(6.0))

    def chosen_by(x: ml.Tensor, mask: ml.Tensor) -> ml.Tensor:
        return x[mask]

    for least in (3, 1, 5, 1):
        chosen = templates.call(chosen_by, (x, x >= least), {})
        np.testing.assert_array_equal(chosen.numpy(), np.arange(least, 6.0))
        gradient = ml.grad(lambda x: ml.sum(x[x >= least] * 2))(x)  # noqa: B023
        np.testing.assert_array_equal(gradient.numpy(), (np.arange(6) >= least) * 2.0)


@pytest.mark.usefixtures("arena")
def test_an_update_learns_types_that_no_call_had_before(vm: ml.VM) -> None:
    x, indices = ml.zeros((9, 7)), ml.asarray(np.array([8, 0]))
    value, call = ml.ones(()), one_op("index_set", axis=0, axes=1)
    assert launches(vm, lambda: apply_into(x, call, x, value, indices)) == 0
    assert ml.sum(x).item() == 14


def test_the_arena_counts_alike(vm: ml.VM) -> None:
    call = one_op("add")
    counts: list[list[int]] = []
    for implementation in (apply_in_python, apply):
        arena = ml.Arena(vm, "counted")
        with arena.allocating():
            x = ml.ones((5, 7))
            implementation(call, x, x)
            results = [implementation(call, x, x) for _ in range(3)]
            counts.append([arena.used, arena.high_water, len(arena.live())])
            del results
            gc.collect()
            counts[-1].append(arena.used)
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("arena")
def test_refusals_are_the_same_errors() -> None:
    x, y = ml.ones((2, 3)), ml.ones((3, 2))
    labels = ml.asarray(np.array([0, 9]))
    calls: list[Callable[[], object]] = [
        lambda: x + y,
        lambda: ml.softmax_cross_entropy(x, labels),
        lambda: ml.take(x, labels, axis=1),
    ]
    for call in calls:
        texts = []
        for _ in range(3):
            caught = refuses(MlvmError, "", call)
            texts.append((type(caught), str(caught).splitlines()[0]))
        assert len({*texts}) == 1


@pytest.mark.usefixtures("arena")
def test_a_value_refused_after_one_accepted_leaves_nothing(arena: ml.Arena) -> None:
    x = ml.ones((2, 3))
    for _ in range(3):
        ml.take(x, ml.asarray(np.array([0, 2])), axis=1)
    used = arena.used
    refuses(OperandValueError, "index 3", lambda: ml.take(x, ml.asarray(np.array([0, 3])), axis=1))
    gc.collect()
    assert arena.used == used


def test_a_stale_operand_is_refused(vm: ml.VM) -> None:
    batch, lasting = ml.Arena(vm, "batch"), ml.Arena(vm, "kept")
    with batch.allocating():
        x = ml.ones(4)
    with lasting.allocating():
        for _ in range(3):
            x + x
        batch.reset()
        with pytest.raises(StaleTensorError, match="was reset"):
            x + x


def test_an_observer_sees_every_launch(vm: ml.VM, x: ml.Tensor) -> None:
    args_seen = []

    def launch(proceed: Any, *args: Any, **options: Any) -> Any:
        args_seen.append(args)
        return proceed(*args, **options)

    with observed(vm, launch=launch):
        x + x
    x + x
    assert len(args_seen) == 1


def test_an_instrument_sees_every_call(vm: ml.VM, x: ml.Tensor) -> None:
    names: list[str] = []
    with vm.instrumented(Before(lambda name, _: names.append(name))):
        x + x
    x + x
    assert names == ["add.out"]


def test_a_function_registered_under_the_name_is_called(vm: ml.VM, x: ml.Tensor) -> None:
    called = []
    replace_op(vm, "add.out", lambda frame: called.append(frame.nparams))
    x + x
    assert called == [3]


@pytest.mark.usefixtures("arena")
def test_memory_that_moves_is_found(vm: ml.VM) -> None:
    x, y = ml.asarray(np.arange(4.0)), ml.asarray(np.arange(4.0) + 10)
    for _ in range(3):
        x + x, y + y
    vm.swap(x.handle, y.handle)
    np.testing.assert_array_equal((x + x).numpy(), 2 * (np.arange(4.0) + 10))
    np.testing.assert_array_equal((y + y).numpy(), 2 * np.arange(4.0))


@pytest.mark.usefixtures("arena")
def test_gradients_are_those_of_the_long_way() -> None:
    def loss(x: ml.Tensor, w: ml.Tensor) -> ml.Tensor:
        h = ml.tanh(x @ w)
        return ml.mean(h * h - 2 * h)

    x = ml.asarray(np.linspace(-1, 1, 12).reshape(3, 4))
    w = ml.asarray(np.linspace(-2, 1, 20).reshape(4, 5))
    gradients = [ml.grad(loss, (0, 1))(x, w) for _ in range(3)]
    for later in gradients[1:]:
        for g, expected in zip(later, gradients[0], strict=True):
            np.testing.assert_array_equal(g.numpy(), expected.numpy())
    hessian = [ml.grad(lambda y: ml.sum(ml.grad(loss)(y, w) ** 2))(x).numpy() for _ in range(3)]
    np.testing.assert_array_equal(hessian[0], hessian[2])


def test_two_vms_share_no_way() -> None:
    x = {}
    for name in ("first", "second"):
        with ml.Arena(ml.VM(name, native=True), name).allocating():
            x[name] = ml.full(4, 3.0)
            for _ in range(3):
                x[name] + x[name]
    with x["first"].arena.allocating(), pytest.raises(MlvmError, match="is on the VM second"):
        x["first"] + x["second"]


def test_threads_on_one_vm_see_their_own_values() -> None:
    """The threads of its pool, too."""
    vm = ml.VM(native=True, threads=2)

    def work(number: int) -> set[float]:
        with ml.Arena(vm, f"arena {number}").allocating():
            x = ml.full((100, 100), float(number))
            return {float(ml.max((x + x) @ x - x)) for _ in range(300)}

    assert in_threads(work, range(1, 5)) == [{200 * n * n - n} for n in range(1, 5)]


@pytest.mark.usefixtures("arena")
@cases("count", 100, 400)  # of 400 types some are planned again
def test_a_call_of_many_types_needs_no_launch(vm: ml.VM, count: int) -> None:
    xs = [ml.full((n + 1,), n) for n in range(count)]

    def sums() -> list[ml.Tensor]:
        return [x + x for x in xs]

    for _ in range(2):
        sums()
    assert launches(vm, sums) == 0
    assert all((y == 2 * n).numpy().all() for n, y in enumerate(sums()))


# --- what Python does in the middle of a call ------------------------------------------------


@pytest.mark.usefixtures("arena")
def test_a_function_registered_while_a_call_is_learned_is_called(
    vm: ml.VM, monkeypatch: Patch
) -> None:
    x, called = ml.ones(4), list[int]()
    call_of = loop.call_of

    def registering(*args: Any) -> Any:
        call = call_of(*args)
        if sys._getframe(1).f_code.co_name == "prepare":  # before the launch
            replace_op(vm, "add.out", lambda frame: called.append(frame.nparams))
        return call

    monkeypatch.setattr(loop, "call_of", registering)
    x + x
    assert called == [3]
    x + x
    assert called == [3, 3]


def place_of(*operands: ml.Tensor) -> int:
    """Return the cache position of operands of these types: `entry_of` in language/dispatch.c."""
    number = 0
    for x in operands:
        number = number * 31 + (id(x.type) >> 5)
    return (number ^ number % 2**64 >> 7) % 32


def test_types_learned_while_a_tape_makes_a_template_get_their_own(monkeypatch: Patch) -> None:
    x, y = ml.ones(7), ml.full(7, 2.0)
    small = ml.full(1, 3.0)
    wide = next(z for z in map(ml.ones, range(8, 1000)) if place_of(small, z) == place_of(x, y))

    def loss(a: ml.Tensor, b: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.logaddexp(a, b))

    def others() -> None:
        for _ in range(2):
            ml.logaddexp(small, wide)

    def record(tape: Tape, *args: Any) -> None:
        recorded(tape, *args)
        start(others).result(PATIENCE)

    ml.grad(loss)(x, y)
    recorded = Tape.record
    monkeypatch.setattr(Tape, "record", record)
    ml.grad(loss)(x, y)
    monkeypatch.undo()
    assert [ml.grad(loss)(small, wide).shape for _ in range(3)] == [(1,)] * 3


CALLS_AFTER_CLOSE = {
    "add": lambda x: x + x,
    "number": lambda x: x * 3.0,
    "update": lambda x: x.__iadd__(x),
    "recorded": ml.softmax,
    "item": lambda x: x[0, 0].item(),
    "creation": lambda x: ml.zeros(100),
    "assignment": lambda x: x.__setitem__(0, 1.0),
    "copy": lambda x: x[:, 1:3],
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("call", CALLS_AFTER_CLOSE.values(), ids=[*CALLS_AFTER_CLOSE])
def test_no_call_reaches_the_memory_of_a_closed_vm(call: Callable[[ml.Tensor], Any]) -> None:
    vm = ml.VM("gone")
    with ml.use(vm):
        for _ in range(4):  # until C runs it
            x = ml.reshape(ml.ones(100), (2, 50)) * 2.0
            call(x)
        x = ml.reshape(ml.ones(100), (2, 50)) * 2.0  # it has an address, but no handle yet
        freed = ml.ones(100)
        del freed
        vm.close()
        foreign = [np.zeros(nbytes, "u1") for nbytes in (400, 1 << 16, (1 << 16) + 64) * 8]
        refuses((HandleError, MachineError), "gone' was closed", call, x)
    assert not any(each.any() for each in foreign)


@pytest.mark.parametrize(("least", "step"), [(1000, 7), (300_000, 1000)])
def test_tensors_of_growing_sizes_share_regions(vm: ml.VM, least: int, step: int) -> None:
    arena, storages = ml.Arena(vm, "default", trims=True), set[int]()
    with arena.allocating():
        for n in range(least, 3 * least, step):
            assert float(ml.sum(ml.ones(n))) == n
            assert arena.used <= 8 * n
            storages.update(chunk.storage for chunk in arena.chunks())
    assert len(arena._regions()) <= 24
    assert len(storages) <= 72
