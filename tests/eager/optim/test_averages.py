"""Averages of weights, and updates with the gradients of several batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, GradientError, PathError, ShapeError
from mlvm.eager import Tensor, nn, optim
from tests.brief import refuses

RNG = np.random.default_rng(5)


DATA = [
    (RNG.standard_normal((12, 4)).astype("f"), RNG.standard_normal((12, 2)).astype("f"))
    for _ in range(4)
]


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(4, 8, key=ml.random.key(1))
        self.norm = nn.BatchNorm(8)
        self.last = nn.Linear(8, 2, key=ml.random.key(2))

    def __call__(self, x: Tensor) -> Tensor:
        return self.last(ml.relu(self.first(x)))


def values(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {path: x.numpy() for path, x in tensors.items()}


def same(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[path].tobytes() == expected[path].tobytes() for path in actual
    )


# --- averages ------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
def test_averages_are_their_formula(warmup: bool, captured: bool) -> None:
    w = ml.asarray(RNG.standard_normal(3))
    average = optim.EMA({"w": w}, 0.75, warmup=warmup)
    expected = w.numpy()

    def step(g: Tensor) -> None:
        ml.subtract(w, g, out=w)
        average.update()

    run = ml.capture(step) if captured else step
    for t in range(20):
        run(ml.asarray(RNG.standard_normal(3)))
        decay = min(0.75, (1 + t) / (10 + t)) if warmup else 0.75
        expected = decay * expected + (1 - decay) * w.numpy()
    np.testing.assert_allclose(
        average.state()["average/w"].numpy(), expected, rtol=1e-6 if warmup else 1e-12
    )
    assert average.count.item() == 20


@pytest.mark.parametrize("captured", [False, True])
def test_a_model_has_the_averages_inside_the_block(captured: bool) -> None:
    model = Net()
    average = optim.EMA(model, 0.5)
    own = values(model.named_parameters())
    for x in model.named_parameters().values():
        x += 2.0
    average.update()
    x = ml.ones((1, 4))
    evaluate: Any = ml.capture(model.__call__) if captured else model
    before = evaluate(x)
    with average.swapped():
        for path, p in model.named_parameters().items():
            np.testing.assert_allclose(p.numpy(), own[path] + 1.0, rtol=1e-6)
        inside = evaluate(x)
        refuses(ArgumentError, r"EMA.update: inside swapped\(\)", average.update)
        refuses(ArgumentError, r"EMA.swapped: inside swapped\(\)", average.swapped().__enter__)
    assert inside.tolist() != before.tolist()
    assert evaluate(x).tolist() == before.tolist()
    with pytest.raises(ZeroDivisionError), average.swapped():
        raise ZeroDivisionError
    assert evaluate(x).tolist() == before.tolist()
    average.update()


def test_a_batch_that_ends_takes_no_weights_with_it() -> None:
    w, batch = ml.zeros(2), ml.Arena(ml.default_vm(), "batch")
    average = optim.EMA({"w": w}, 0.5)
    w += 4.0
    with batch.allocating():
        swapped = average.swapped()
        swapped.__enter__()
    with batch:
        assert (w + 1.0).tolist() == [1.0, 1.0]
    swapped.__exit__(None, None, None)
    assert w.tolist() == [4.0, 4.0]


def test_averages_of_halves_are_f32() -> None:
    w = ml.ones(2, dtype=ml.bfloat16)
    average = optim.EMA({"w": w, "n": ml.asarray([1])}, 0.999)
    for _ in range(3):
        average.update()
    w *= 2.0
    average.update()
    assert average.state()["average/w"].type == ml.TensorType("f32", [2])
    np.testing.assert_allclose(average.state()["average/w"].numpy(), 1.001, rtol=1e-6)
    with average.swapped():
        assert w.dtype is ml.bfloat16
        assert w.astype(ml.float32).tolist() == [1.0, 1.0]
    assert w.astype(ml.float32).tolist() == [2.0, 2.0]


def test_averages_are_saved_and_follow_a_replaced_parameter() -> None:
    params = {"w": ml.ones(2)}
    average = optim.EMA(params, 0.5)
    params["w"] = ml.full(2, 3.0)
    average.update()
    saved = values(average.state())
    assert list(saved) == ["count", "average/w"]
    again = optim.EMA({"w": ml.zeros(2)}, 0.5)
    again.load_state(saved)
    assert same(values(again.state()), saved)
    refuses(PathError, "missing state 'count'", again.load_state, {"average/w": saved["average/w"]})
    params["w"] = ml.ones(3)
    refuses(ShapeError, r"parameter 'w': expected f32\[2\], got f32\[3\]", average.update)
    assert repr(average) == "<EMA of 1 tensors: decay=0.5>"


def test_averages_have_no_gradient() -> None:
    w = ml.ones(())
    average = optim.EMA(w)
    optimizer = optim.MultiSteps(optim.SGD(w, 1.0), 2)

    def averaged(x: Tensor) -> Tensor:
        average.update()
        return x

    def stepped(x: Tensor) -> Tensor:
        optimizer.update(ml.ones(()))
        return x

    for fn in (averaged, stepped):
        refuses(GradientError, "outside of the differentiated function", ml.grad(fn), w)


# --- accumulation --------------------------------------------------------------------


def trained(every: int, *, captured: bool, tied: bool = False) -> dict[str, Any]:
    """Return the state after 4 updates, each with a batch of 12 in `every` parts."""
    model: Any = Net()
    if tied:
        model.again = model.last
    inner = optim.AdamW(model, optim.cosine(0.1, 10))
    optimizer = optim.MultiSteps(inner, every)
    loss_and_grads = ml.value_and_grad(lambda model, x, y: ml.mean_squared_error(model(x), y))

    def step(x: Tensor, y: Tensor) -> Tensor:
        _, grads = loss_and_grads(model, x, y)
        return optimizer.update(grads)

    run = ml.capture(step) if captured else step
    done = []
    for xs, ys in DATA:
        for x, y in zip(np.split(xs, every), np.split(ys, every), strict=True):
            done.append(bool(run(ml.asarray(x), ml.asarray(y))))
    assert done == ([False] * (every - 1) + [True]) * 4
    assert inner.count.item() == 4
    assert not captured or run.signatures == 1  # type: ignore[attr-defined]
    return values({**model.state(), **inner.state(), **optimizer.state()})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_parts_of_a_batch_are_the_batch(every: int, tied: bool) -> None:
    whole = trained(1, captured=False, tied=tied)
    parts = trained(every, captured=False, tied=tied)
    for path, x in whole.items():
        np.testing.assert_allclose(parts[path], x, rtol=2e-4, atol=2e-5, err_msg=path)
    assert same(trained(every, captured=True, tied=tied), parts)


def test_all_parts_in_one_captured_step() -> None:
    model = Net()
    optimizer = optim.MultiSteps(optim.AdamW(model, optim.cosine(0.1, 10)), 4)
    assert optimizer.learning_rate == optimizer.optimizer.learning_rate == np.float32(0.1)

    @ml.capture
    def step(x: Tensor, y: Tensor) -> Tensor:
        for part, of in zip(ml.split(x, 4), ml.split(y, 4), strict=True):
            grads = ml.grad(lambda m, part=part, of=of: ml.mean_squared_error(m(part), of))(model)
            done = optimizer.update(grads)
        return done

    for x, y in DATA:
        assert bool(step(ml.asarray(x), ml.asarray(y)))
    result, expected = values(model.state()), trained(4, captured=False)
    assert same(result, {path: expected[path] for path in result})


def test_sums_are_saved_and_forget_what_is_not_finite() -> None:
    w = ml.zeros(2)
    optimizer = optim.MultiSteps(optim.SGD({"w": w}, 1.0), 2)
    optimizer.update({"w": ml.ones(2)})
    saved = values(optimizer.state())
    assert {path: x.tolist() for path, x in saved.items()} == {
        "count": 0.0,
        "num_gradients": 1.0,
        "gradients/w": [0.5, 0.5],
    }
    other = ml.zeros(2)
    again = optim.MultiSteps(optim.SGD({"w": other}, 1.0), 2)
    again.load_state(saved)
    again.update({"w": ml.ones(2)})
    assert other.tolist() == [-1.0, -1.0]
    optimizer.update({"w": ml.asarray([ml.inf, ml.nan])})
    assert optimizer.state()["gradients/w"].tolist() == [0.0, 0.0]


def test_state_that_does_not_fit_changes_nothing() -> None:
    optimizer = optim.MultiSteps(optim.Adam({"w": ml.zeros(2)}, 1.0), 2)
    optimizer.update({"w": ml.ones(2)})
    before = values(optimizer.state())
    other = {path: x + 1 for path, x in before.items()}
    for path in other:
        wrong = {**other, path: np.ones(7, "f")}
        text = rf"state '{path}': expected f32\[.*\], got f32\[7\]"
        refuses(ShapeError, text, optimizer.load_state, wrong)
        refuses(
            PathError,
            "unknown state 'extra'",
            optimizer.load_state,
            {**other, "extra": wrong[path]},
        )
        with pytest.raises(PathError, match=f"missing state '{path}'"):
            optimizer.load_state({each: x for each, x in other.items() if each != path})
        assert same(values(optimizer.state()), before)


@pytest.mark.parametrize("captured", [False, True])
def test_steps_of_a_part_take_gradients_of_the_whole(captured: bool) -> None:
    """As the optimizer alone does: it leaves those of others alone."""
    model = {"a": ml.ones(2), "b": ml.ones(3)}
    steps = optim.MultiSteps(optim.SGD(model, 1.0, where="a"), 2)

    def step(x: Tensor) -> None:
        steps.update({"a": x[:2], "b": x})

    run = ml.capture(step) if captured else step
    for x in (ml.ones(3), 3.0 * ml.ones(3)):
        run(x)
    assert (model["a"].tolist(), model["b"].tolist()) == ([-1.0, -1.0], [1.0, 1.0, 1.0])
