"""The functions that are methods of a tensor too."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import stub
from mlvm.eager.functions.methods import METHODS, PROPERTIES
from mlvm.eager.tensor.operators import OPERATORS
from tests.cases.tables import FUNCTIONS

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5

P, Q = X / 40 + 0.5, X[::-1] / 40 + 0.25
OF_TWO = """add atan2 copysign divide floor_divide greater greater_equal hypot less less_equal
    logaddexp maximum minimum multiply not_equal pow remainder subtract"""
OF_BOOLS = "logical_and logical_or logical_xor"
OF_INTEGERS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor"
ARGUMENTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    **dict.fromkeys(OF_TWO.split(), ((Q,), (P, Q))),
    **dict.fromkeys(OF_BOOLS.split(), ((Q > 0.5,), (P > 0.6, Q > 0.5))),
    "logical_not": ((), (P > 0.6,)),
    **{name: (([1, 2, 3, 0],), (X.astype(int), [1, 2, 3, 0])) for name in OF_INTEGERS.split()},
    "acosh": ((), (P + 1,)),
    "broadcast_to": (((2, 2, 3, 4),), (P, (2, 2, 3, 4))),
    "flip": ((0,), (P, 0)),
    "matmul": ((Q.mT,), (P, Q.mT)),
    "moveaxis": ((0, -1), (P, 0, -1)),
    "outer": ((Q[0, 0],), (P[0, 0], Q[0, 0])),
    "roll": ((1, 2), (P, 1, 2)),
}
"""What a method is given, and what numpy's function of its name, unless that is P alone."""
OF_ROWS = {name for row in FUNCTIONS for name in re.findall(r"\b[a-z]_[\d_]*\)?\.(\w+)", row.call)}
OTHERS = sorted(METHODS.keys() - OF_ROWS)
"""Methods that no row of tests/cases/functions.txt has."""


def test_every_property_has_a_row() -> None:
    assert OF_ROWS | {"at"} > PROPERTIES.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_does_what_the_function_of_its_name_does_in_numpy(name: str) -> None:
    args, theirs = ARGUMENTS.get(name, ((), (P,)))
    got = getattr(ml.asarray(theirs[0]), name)(*args)
    expected = getattr(np, name)(*theirs)
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=1e-6)
    assert got.shape == expected.shape


def test_most_methods_are_the_functions() -> None:
    """So that they cost no more, and take and say the same."""
    own = {"mean", "repeat", "reshape", "std", "var"}  # take more than the functions do
    for name in METHODS:
        if hasattr(ml, name) and name not in own:
            method = getattr(ml.Tensor, name)
            assert inspect.unwrap(getattr(ml, name)) is inspect.unwrap(method), name
            assert getattr(ml.ones(3), name).__doc__ == getattr(ml, name).__doc__


def test_numpys_functions_take_the_methods() -> None:
    x: Any = ml.asarray(X)
    reducing: list[Any] = [np.sum, np.mean, np.std, np.var, np.max, np.prod, np.any, np.transpose]
    for fn in reducing:
        np.testing.assert_allclose(np.asarray(fn(x)), fn(X), rtol=1e-5)
    others: list[Any] = [np.round, np.argsort, np.cumsum, np.sort, np.median]
    for fn in others:
        np.testing.assert_allclose(np.asarray(fn(x)), fn(X), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(np.std(x, axis=0, ddof=1)), np.std(X, 0, ddof=1), 1e-6)
    np.testing.assert_array_equal(np.asarray(np.repeat(x[0, 0], 2)), np.repeat(X[0, 0], 2))


def test_a_gradient_goes_through_methods() -> None:
    x = ml.asarray(X[0])
    by_methods = ml.grad(lambda x: (x.reshape(-1).std() * x.T.mean(0)).sum())(x)
    by_functions = ml.grad(lambda x: ml.sum(ml.std(x) * ml.mean(x, axis=1)))(x)
    np.testing.assert_allclose(by_methods.numpy(), by_functions.numpy(), rtol=1e-6)


def test_the_stub_has_every_method_and_operator() -> None:
    [owner] = [n for n in ast.parse(stub.methods()).body if isinstance(n, ast.ClassDef)]
    defined = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
    assert defined.keys() == {*METHODS, *PROPERTIES, *OPERATORS}
    assert ast.unparse(defined["__add__"]).startswith(
        "def __add__(self, other: Operand) -> Tensor:"
    )
    assert ast.unparse(defined["mT"]).startswith("@property\ndef mT(self) -> Tensor:")
