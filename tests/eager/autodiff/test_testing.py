"""`check_gradients`: what it finds, and what it says of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager.autodiff.testing import check_gradients
from mlvm.eager.tensor.tensor import Tensor
from tests.brief import refuses

RNG = np.random.default_rng(4)


def normal(*shape: int, dtype: str = "f8") -> Tensor:
    return ml.asarray(RNG.standard_normal(shape).astype(dtype))


class Affine(ml.nn.Module):
    def __init__(self) -> None:
        self.kernel = normal(3, 2, dtype="f4")
        self.parts = {"bias": normal(2, dtype="f4"), "scale": normal(dtype="f4")}

    def __call__(self, x: Tensor) -> Tensor:
        return (x @ self.kernel + self.parts["bias"]) * self.parts["scale"]


def test_gradients_that_are_right_pass_at_any_order() -> None:
    check_gradients(ml.tanh, normal(2, 3), order=4)
    check_gradients(lambda x, y: {"a": x * y, "b": [ml.sum(x), ml.exp(y)]}, normal(3), normal())


def test_arguments_are_trees_and_what_holds_no_floats_is_constant() -> None:
    def loss(model: Affine, x: Tensor, labels: Tensor, power: int) -> Tensor:
        return ml.softmax_cross_entropy(model(x) ** power, labels)

    model, x = Affine(), normal(4, 3, dtype="f4")
    before = model.kernel.numpy()
    check_gradients(loss, model, x, ml.asarray([0, 1, 1, 0]), 3, order=2)
    np.testing.assert_array_equal(model.kernel.numpy(), before)


def test_a_tensor_that_occurs_twice_is_one_variable() -> None:
    x = normal(3)
    check_gradients(lambda tree: tree["a"] * tree["b"][0], {"a": x, "b": [x]})


def test_results_that_are_no_floats_or_stay_infinite_do_not_count() -> None:
    check_gradients(lambda x: (x * x, ml.argmax(x)), normal(3))
    check_gradients(lambda x: ml.concat([x, ml.full(1, -ml.inf, dtype="f8")]), normal(2))


def test_a_wrong_gradient_is_named_with_both_values() -> None:
    tree = {"w": [normal(2), ml.asarray(np.array([[1.0, 2.0], [3.0, -4.0]]))]}

    def half(tree: Any) -> list[Tensor]:
        first, second = tree["w"]
        return [first, ml.sum(second * ml.stop_gradient(second))]

    caught = refuses(AssertionError, "", check_gradients, half, tree)
    assert isinstance(caught, ml.errors.GradientMismatchError)
    match = re.fullmatch(
        r"order 1, argument 0 at w/1\[1,1\]: the gradient is (\S+), the difference quotient (\S+); "
        r"4 of 4 elements differ by more than \S+",
        str(caught),
    )
    assert match, str(caught)
    np.testing.assert_allclose(2 * float(match[1]), float(match[2]), rtol=1e-6)


def test_a_rule_that_is_wrong_from_the_second_order_on() -> None:
    def square(x: Tensor) -> Any:
        return ml.host_call("square", x, vjp=lambda g, x, out: g * 2.0 * ml.stop_gradient(x))

    check_gradients(square, normal(2))
    with pytest.raises(
        ml.errors.GradientMismatchError, match=r"^order 2, argument 0\[.\]: .* is 0,"
    ):
        check_gradients(square, normal(2), order=2)


def test_a_gradient_that_is_nan() -> None:
    with (
        np.errstate(all="ignore"),
        pytest.raises(ml.errors.GradientMismatchError, match="is nan, the"),
    ):
        check_gradients(lambda x: x + ml.sum(ml.log(x * 0.0)) * 0.0, ml.asarray(1.0))


def test_the_tolerance_is_relative_to_the_tensors_largest_slope() -> None:
    def nearly(x: Tensor) -> Tensor:
        return ml.sum(x * x) * 1.0001 - ml.stop_gradient(ml.sum(x * x)) * 0.0001

    check_gradients(nearly, normal(3), tolerance=1e-3)
    refuses(ml.errors.GradientMismatchError, "", check_gradients, nearly, normal(3))
