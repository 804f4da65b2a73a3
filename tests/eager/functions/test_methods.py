"""The functions that are methods of a tensor too."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.eager import stub
from mlvm.eager.functions.methods import METHODS, PROPERTIES
from mlvm.eager.tensor.operators import OPERATORS
from tests.cases.tables import FUNCTIONS

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5

OF_ROWS = {name for row in FUNCTIONS for name in re.findall(r"\b[a-z]_[\d_]*\)?\.(\w+)", row.call)}


OWN = {"mean", "repeat", "reshape", "std", "transpose", "var"}
"""Methods that take more than the functions of their names do."""


def test_every_property_and_method_of_its_own_has_a_row() -> None:
    own = OWN | {name for name in METHODS if not hasattr(ml, name)}
    assert OF_ROWS | {"at"} > PROPERTIES.keys() | own


def test_most_methods_are_the_functions() -> None:
    """So that they cost no more, and take and say the same."""
    for name in METHODS:
        if hasattr(ml, name) and name not in OWN:
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
