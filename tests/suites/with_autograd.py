"""Plugin of pytest that runs the tests of HIPS autograd, in a checkout, on mlvm.

`import autograd` gives the modules below: its numpy has functions of mlvm, which take arrays, and
`check_grads` compares gradients of every order with difference quotients.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.suites.names import Names

ml.set_default_dtype(ml.float64)


def tensors(tree: Any) -> Any:
    """Convert the numbers and arrays of nested lists and dicts to f64 and c128."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(tensors, tree))
    if isinstance(tree, dict):
        return {key: tensors(value) for key, value in tree.items()}
    return ml.asarray(np.asarray(tree, complex if np.iscomplexobj(tree) else float))


def of_tensors(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's form of a transformation: `grad(f, argnum)`, of arrays."""

    def transformed(fn: Any, argnum: Any = 0) -> Callable[..., Any]:
        return lambda *args, **options: transform(lambda *xs: fn(*xs, **options), argnums=argnum)(
            *map(tensors, args)
        )

    return transformed


def check_grads(fn: Any, modes: object = None, order: int = 2) -> Callable[..., None]:
    def check(*args: Any, **options: Any) -> None:
        ml.testing.check_gradients(
            lambda *xs: fn(*xs, **options), *map(tensors, args), order=order, tolerance=1e-4
        )

    return check


def combo_check(fn: Any, argnums: Any = (0,), **how: Any) -> Callable[..., None]:
    """Return a check of gradients for the arguments `argnums`, with each combination of values."""
    places = [argnums] if isinstance(argnums, int) else [*argnums]

    def check(*args: Any, **options: Any) -> None:
        for values in itertools.product(*args):
            for chosen in itertools.product(*options.values()):

                def of_places(
                    *xs: Any, values: Any = values, chosen: Any = chosen, **_: object
                ) -> Any:
                    given = dict(zip(places, xs, strict=True))
                    rest = [given.get(i, value) for i, value in enumerate(values)]
                    return fn(*rest, **dict(zip(options, chosen, strict=True)))

                check_grads(of_places, **how)(*[values[i] for i in places])

    return check


Names("autograd.numpy", ml, np)
Names("autograd.numpy.linalg", ml.linalg)
Names("autograd.numpy.fft", ml.fft)
sys.modules["autograd.numpy.random"] = np.random
util = Names("autograd.test_util")
util.check_grads, util.combo_check = check_grads, combo_check  # type: ignore[attr-defined]
util.scalar_close = np.isclose  # type: ignore[attr-defined]
for name in ("builtins", "core", "tracer", "extend", "util", "wrap_util", "misc", "scipy"):
    Names(f"autograd.{name}")
autograd: Any = Names("autograd")
autograd.numpy, autograd.grad = sys.modules["autograd.numpy"], of_tensors(ml.grad)
autograd.numpy.linalg = sys.modules["autograd.numpy.linalg"]
autograd.numpy.fft, autograd.numpy.random = sys.modules["autograd.numpy.fft"], np.random
autograd.deriv = autograd.elementwise_grad = autograd.grad
autograd.value_and_grad = of_tensors(ml.value_and_grad)
autograd.jacobian, autograd.hessian = of_tensors(ml.jacrev), of_tensors(ml.hessian)
autograd.tuple, autograd.list, autograd.dict, autograd.isinstance = tuple, list, dict, isinstance
