"""`ml.parallel`: collectives on trees of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    GroupError,
    GroupTimeoutError,
    ShapeError,
    StaleTensorError,
)
from mlvm.core.types import Array
from mlvm.eager import Tensor, nn
from tests.brief import refuses

pytest.importorskip("threadpoolctl")


def run(size: int, fn: Callable[[int], Any]) -> list[Any]:
    with ml.parallel.Group(size) as group:
        return group.run(lambda rank, vm: fn(rank))


# --- collectives ---------------------------------------------------------------------


class Pair(nn.Module):
    first: Tensor
    second: Tensor

    def __init__(self, first: Tensor) -> None:
        self.first = first
        self.second = first


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_overwrites_a_tree(size: int) -> None:
    def step(rank: int) -> list[Array]:
        x = ml.full((2, 3), float(rank))
        tree = {
            "a": [x, ml.asarray([rank, 1])],
            "none": None,
            "pair": Pair(x),
            "scalar": ml.ones(()),
        }
        ml.parallel.all_reduce(tree)
        return [y.numpy() for y in (*tree["a"], tree["scalar"])]  # type: ignore[misc]

    total = sum(range(size))
    for a, b, scalar in run(size, step):
        np.testing.assert_array_equal(a, np.full((2, 3), total, np.float32), strict=True)
        np.testing.assert_array_equal(b, np.array([total, size]), strict=True)
        np.testing.assert_array_equal(scalar, np.float32(size))


class Counted(nn.Module):
    weight: Tensor
    mean: Tensor

    def __init__(self, value: float) -> None:
        self.weight = ml.full((2,), value)
        self.mean = nn.buffer(ml.full((2,), value))


def test_buffers_are_of_the_tree_and_can_be_brought_together_alone() -> None:
    def step(rank: int) -> list[list[float]]:
        model = Counted(1.0 + rank)
        ml.parallel.all_reduce(model.named_buffers(), "mean")
        before = model.weight.tolist(), model.mean.tolist()
        ml.parallel.broadcast(model, root=1)
        return [*before, model.weight.tolist(), model.mean.tolist()]

    first, second = run(2, step)
    assert first == [[1, 1], [1.5, 1.5], [2, 2], [1.5, 1.5]]
    assert second == [[2, 2], [1.5, 1.5], [2, 2], [1.5, 1.5]]


def test_the_other_collectives() -> None:
    def step(rank: int) -> list[Any]:
        x = ml.asarray([rank, 10 * rank])
        gathered = ml.parallel.all_gather(x)
        scattered = ml.parallel.reduce_scatter(gathered, "max")
        chosen = ml.copy(x)
        ml.parallel.broadcast({"x": chosen}, root=1)
        ml.parallel.barrier()
        if rank == ml.parallel.rank() == 0:
            ml.parallel.send(x + 5, to=1)
            received = x
        else:
            received = ml.parallel.recv(2, source=0, dtype=ml.int64)
        scalars = ml.parallel.all_gather(ml.full((), float(rank)))
        results = [gathered, scattered, chosen, received, scalars]
        return [*(y.tolist() for y in results), ml.parallel.size()]

    assert run(2, step) == [
        [[0, 0, 1, 10], [0, 0], [1, 10], [0, 0], [0.0, 1.0], 2],
        [[0, 0, 1, 10], [1, 10], [1, 10], [5, 5], [0.0, 1.0], 2],
    ]


@pytest.mark.parametrize("in_group", [False, True])
def test_alone_they_change_nothing(in_group: bool) -> None:
    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0])
        assert (ml.parallel.rank(), ml.parallel.size()) == (0, 1)
        ml.parallel.all_reduce({"x": x}, "mean")
        ml.parallel.all_reduce_start(x, "mean")
        ml.parallel.all_reduce_wait(x)
        ml.parallel.broadcast(x)
        assert x.tolist() == [1.0, 2.0]
        assert ml.parallel.all_gather(x).handle == x.handle
        assert ml.parallel.reduce_scatter(x).handle == x.handle
        assert ml.parallel.all_gather(ml.ones(())).tolist() == [1.0]
        ml.parallel.barrier()
        for reduce in (ml.parallel.all_reduce, ml.parallel.all_reduce_start):
            refuses(DTypeError, "a mean requires floats", reduce, ml.asarray([1]), "mean")
        refuses(ArgumentError, r"a different member \(of 1\)", ml.parallel.send, x, to=0)
        with pytest.raises(ArgumentError, match=r"a different member \(of 1\)"):
            ml.parallel.recv(2, source=0, dtype=ml.float32)

    if in_group:
        run(1, step)
    else:
        step(0)


def test_what_they_refuse() -> None:
    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0, 3.0])
        refuses(ArgumentError, "median", ml.parallel.all_reduce, x, "median")  # type: ignore[arg-type]
        refuses(ArgumentError, "True", ml.parallel.broadcast, x, root=True)
        refuses(ShapeError, r"reduce_scatter\(f32\[3\]\): .* axis 0", ml.parallel.reduce_scatter, x)
        with pytest.raises(DTypeError, match="expected a tensor as leaf, got a float"):
            ml.parallel.all_reduce([1.0])
        refuses(DTypeError, "expected a tensor, got a float", ml.parallel.all_gather, 1.0)  # type: ignore[arg-type]
        with ml.Arena(ml.default_arena().vm, "over"):
            over = ml.ones((2,))
        refuses(StaleTensorError, "", ml.parallel.all_reduce, [x, over])
        refuses(ArgumentError, "to must be the rank of a different", ml.parallel.send, x, to=rank)

    run(2, step)


def test_a_gradient_through_one_is_refused() -> None:
    def through(collective: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        y = x * x
        return ml.sum(collective(y) or y)

    def step(rank: int) -> None:
        x = ml.asarray([1.0, 2.0])
        for collective in (ml.parallel.all_gather, ml.parallel.reduce_scatter):
            with pytest.raises(GradientError, match="has no gradient; call it on the result"):
                ml.grad(partial(through, collective))(x)
        for in_place in (ml.parallel.all_reduce, ml.parallel.broadcast):
            with pytest.raises(GradientError, match="has no gradient; call it on the result"):
                ml.grad(partial(through, in_place))(x)
        constant = ml.grad(lambda x: ml.sum(x * ml.parallel.all_gather(ml.stop_gradient(x))[:2]))
        assert constant(x).tolist() == [1.0, 2.0]

    run(2, step)


def test_the_two_halves_of_an_all_reduce() -> None:
    def step(rank: int) -> list[Any]:
        first, second = ml.full((3,), 1.0 + rank), ml.full((70_000,), float(rank))
        ml.parallel.all_reduce_start({"x": first})
        ml.parallel.all_reduce_start([second], "mean")
        other = ml.asarray([rank])
        ml.parallel.all_reduce(other, "max")
        ml.parallel.all_reduce_wait([second])
        ml.parallel.all_reduce_wait({"x": first})
        with pytest.raises(
            GroupError, match=r"expected an earlier all_reduce\.start of these tensors"
        ):
            ml.parallel.all_reduce_wait(first)
        return [first.tolist(), float(ml.max(second)), other.tolist()]

    assert run(2, step) == [[[3.0, 3.0, 3.0], 0.5, [1]]] * 2


def test_tensors_without_elements_may_be_under_way_together() -> None:
    def step(rank: int) -> None:
        x = ml.ones((2,))
        ml.parallel.all_reduce_start(ml.ones((0,)))
        ml.parallel.all_reduce_start(ml.ones((0,)))
        ml.parallel.all_reduce_start(x)
        refuses(
            GroupError, "was started before; call its wait first", ml.parallel.all_reduce_start, x
        )
        ml.parallel.all_reduce_wait(x)
        assert x.tolist() == [2, 2]

    run(2, step)


HALVES: dict[str, list[Callable[..., Any]]] = {
    name: [getattr(ml.parallel, f"{name}{part}") for part in ("", "_start", "_wait")]
    for name in ("all_gather", "reduce_scatter")
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_two_halves_give_what_the_whole_gives(name: str, size: int) -> None:
    whole, start, wait = HALVES[name]

    def step(rank: int) -> None:
        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            y = start(x)
            other = whole(x + 1.0)  # after what was started, as in the program
            wait(y, x)
            return y, other

        captured = ml.capture(both)
        for length, dtype in ((6, "f32"), (60_000, "f32"), (6, "bf16"), (12, "f64")):
            x = ml.astype(ml.arange(float(length)) + rank, dtype)
            for results in (both(x), captured(x), captured(x)):
                for y, expected in zip(results, (whole(x), whole(x + 1.0)), strict=True):
                    np.testing.assert_array_equal(y.numpy(), expected.numpy(), strict=True)

    run(size, step)


@pytest.mark.parametrize("name", HALVES)
def test_halves_that_do_not_fit_are_refused(name: str) -> None:
    _, start, wait = HALVES[name]

    def step(rank: int) -> None:
        x = ml.ones((4,))
        y = start(x)
        refuses(GroupError, rf"expected an earlier {name}\.start of these tensors", wait, x, y)
        wait(y, x)
        refuses(GroupError, rf"expected an earlier {name}\.start of these tensors", wait, y, x)
        refuses(ArgumentError, "a number of seconds > 0, got 0", start, x, timeout=0.0)
        refuses(
            ShapeError, r"expected f32\[\d\] as the output", ml.host_call, f"{name}.start", x, x
        )

    run(2, step)


def test_who_does_not_come_in_time_is_named() -> None:
    def step(rank: int) -> None:
        if rank:
            time.sleep(0.2)
        ml.parallel.all_reduce(ml.ones(2), timeout=0.05)

    caught = refuses(GroupTimeoutError, "", run, 2, step)
    text = "member 0 (vm0) has waited 0.05 s in all_reduce(f32[2], op='sum') for member 1 (vm1)"
    assert text in str(caught)
    assert isinstance(caught, TimeoutError)


def test_a_captured_function_sends_an_input_that_is_a_view() -> None:
    def step(rank: int) -> list[float]:
        @ml.capture
        def pass_on(x: Tensor) -> Tensor:
            if rank == 0:
                ml.parallel.send(x, to=1)
                return x
            return ml.parallel.recv(3, source=0, dtype=ml.float32)

        whole = ml.arange(6.0)
        for _ in range(3):
            received = pass_on(whole[2:5])
        assert whole.tolist() == [0, 1, 2, 3, 4, 5]
        return list(received.tolist())

    assert run(2, step) == [[2, 3, 4]] * 2
