"""The functions that are methods of a tensor too."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import stub
from mlvm.eager.functions.methods import METHODS, PROPERTIES
from mlvm.eager.tensor.operators import OPERATORS
from tests.brief import cases

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5

untyped: Any = ml

SAME: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x.all(1),
    "any": lambda x: x.any(axis=(0, 2)),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(axis=0),
    "argsort": lambda x: x.argsort(1),
    "astype": lambda x: x.astype("int32"),
    "clip": lambda x: x.clip(-2, 3),
    "conj": lambda x: (x * 1j).conj(),
    "copy": lambda x: x.copy(),
    "flatten": lambda x: x.flatten(),
    "imag": lambda x: (x * 1j).imag,
    "mT": lambda x: x.mT,
    "T": lambda x: x[0].T,
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(1, keepdims=True),
    "mean in another dtype": lambda x: x.mean(dtype="float64"),
    "min": lambda x: x.min(axis=(1, 2)),
    "nonzero": lambda x: x.nonzero()[1],
    "prod": lambda x: x.prod(2),
    "ravel": lambda x: x.ravel(),
    "real": lambda x: (x - 1j * x).real,
    "repeat": lambda x: x.repeat(2, axis=1),
    "reshape": lambda x: x.reshape(4, -1),
    "reshape to a tuple": lambda x: x.reshape((6, 4)),
    "round": lambda x: x.round(),
    "squeeze": lambda x: x[:1].squeeze(0),
    "std": lambda x: x.std(0, ddof=1),
    "sum": lambda x: x.sum(),
    "sum of an axis": lambda x: x.sum(0, keepdims=True),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "take": lambda x: x.take(np.array([2, 0]), axis=1),
    "transpose": lambda x: x.transpose(0, 2, 1),
    "transpose by a tuple": lambda x: x.transpose((2, 0, 1)),
    "transpose a matrix": lambda x: x[0].transpose(1, 0),
    "transpose a matrix by a tuple": lambda x: x[0].transpose((0, 1)),
    "transpose all": lambda x: x.transpose(),
    "var": lambda x: x.var(axis=1, ddof=1),
}


@pytest.mark.parametrize("name", SAME)
def test_a_method_does_what_numpys_does(name: str) -> None:
    expected = SAME[name](X)
    got = SAME[name](ml.asarray(X))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    assert got.shape == expected.shape


def test_methods_that_numpy_does_not_have() -> None:
    x = ml.asarray(X)
    np.testing.assert_array_equal(x.abs().numpy(), abs(X))
    np.testing.assert_array_equal(x.permute(2, 0, 1).numpy(), X.transpose(2, 0, 1))
    np.testing.assert_array_equal(x.flatten(1).numpy(), X.reshape(2, 12))
    np.testing.assert_array_equal(x.flatten(0, 1).numpy(), X.reshape(6, 4))
    assert x.sum().flatten().shape == (1,)
    assert x.at[1, 2, 3].add(0.25).sum().item() == x.sum().item() + 0.25
    np.testing.assert_allclose(x.var(1, correction=1).numpy(), X.var(1, ddof=1), rtol=1e-6)


P, Q = X / 40 + 0.5, X[::-1] / 40 + 0.25
OF_PYTORCH: dict[str, tuple[Callable[[Any], Any], np.ndarray[Any, Any]]] = {
    "erf": (lambda x: x.erf(), np.vectorize(math.erf)(P)),
    "log_softmax": (lambda x: x.log_softmax(1), P - np.log(np.exp(P).sum(1, keepdims=True))),
    "logsumexp": (lambda x: x.logsumexp(1), np.log(np.exp(P).sum(1))),
    "relu": (lambda x: (x - 0.5).relu(), np.maximum(P - 0.5, 0)),
    "rsqrt": (lambda x: x.rsqrt(), P**-0.5),
    "sigmoid": (lambda x: x.sigmoid(), 1 / (1 + np.exp(-P))),
    "softmax": (lambda x: x.softmax(-1), np.exp(P) / np.exp(P).sum(-1, keepdims=True)),
    "topk": (lambda x: x.topk(2)[0], np.sort(P)[..., :-3:-1]),
}
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
OTHERS = sorted(
    METHODS.keys() - {name.split()[0] for name in SAME} - OF_PYTORCH.keys() - {"abs", "permute"}
)


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_does_what_the_function_of_its_name_does_in_numpy(name: str) -> None:
    args, theirs = ARGUMENTS.get(name, ((), (P,)))
    got = getattr(ml.asarray(theirs[0]), name)(*args)
    expected = getattr(np, name)(*theirs)
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=1e-6)
    assert got.shape == expected.shape


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_a_method_does_what_pytorchs_does(name: str) -> None:
    call, expected = OF_PYTORCH[name]
    np.testing.assert_allclose(call(ml.asarray(P)).numpy(), expected, rtol=1e-5)


def test_every_property_is_tried() -> None:
    assert {name.split()[0] for name in SAME} | {"at"} > PROPERTIES.keys()


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


def test_a_result_is_written_to_out() -> None:
    x, out = ml.asarray(X), ml.zeros((3, 4))
    assert x.std(0, out=out) is out
    np.testing.assert_allclose(out.numpy(), X.std(0), rtol=1e-6)
    assert x.mean(0, out=out) is out
    np.testing.assert_allclose(out.numpy(), X.mean(0), rtol=1e-6)


x = ml.asarray(X)


@cases(
    "call, text",
    (lambda: x.transpose(0, 1), r"transpose\(f32\[2,3,4\], 0, 1\): .* swapaxes"),
    (lambda: x[0].transpose(0, 1), r"transpose\(f32\[3,4\], 0, 1\): .* x\.T, or permute_dims"),
    (lambda: x.repeat(2, 1), r"repeat\(f32\[2,3,4\], 2, 1\): .* ml\.tile\(x, \(2, 1\)\)$"),
    (lambda: x.repeat(1, 2, 3), r"ml\.tile\(x, \(1, 2, 3\)\)$"),
    (lambda: x[0, 0].repeat(2), r"PyTorch the whole: take x\.repeat\(n, axis=\.\.\.\)"),
    (lambda: x[0].transpose(-2, -1), r"transpose\(f32\[3,4\], -2, -1\): .* x\.T"),
    (lambda: x.flatten(2, 1), r"flatten\(f32\[2,3,4\]\): axis 1 is before axis 2"),
    (lambda: x.flatten(3), r"flatten\(f32\[2,3,4\]\): .*axis 3"),
    (lambda: x.swapaxes(0, 3), r"swapaxes\(f32\[2,3,4\]\): .*axis 3"),
    (lambda: x.std(0, ddof=1, correction=2), r"std\(f32\[2,3,4\]\): ddof and correction"),
    (lambda: x.reshape(5, -1), r"reshape\(f32\[2,3,4\]\): no length for -1"),
)
def test_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ml.errors.OpError, match=text):
        call()


def test_the_stub_has_every_method_and_operator() -> None:
    [owner] = [n for n in ast.parse(stub.methods()).body if isinstance(n, ast.ClassDef)]
    defined = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
    assert defined.keys() == {*METHODS, *PROPERTIES, *OPERATORS}
    assert ast.unparse(defined["__add__"]).startswith(
        "def __add__(self, other: Operand) -> Tensor:"
    )
    assert ast.unparse(defined["mT"]).startswith("@property\ndef mT(self) -> Tensor:")
