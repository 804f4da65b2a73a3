"""The functions derived from the op table, and their stub."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.eager import public
from mlvm.eager.tensor import primitives
from tests.brief import cases, refuses

X = np.arange(6, dtype=np.float32).reshape(2, 3)

ELSEWHERE = {"random": ml.random, "decompositions": ml.linalg, "fft": ml.fft}

untyped: Any = ml  # for calls that type checkers would refuse


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_function_with_its_documentation(name: str) -> None:
    op, function = OPS[name], getattr(primitives, name)
    parameters = inspect.signature(function).parameters
    assert function.__name__ == name
    assert (function.__doc__ or "").startswith(op.doc.partition("\n\n")[0])
    for shown in re.findall(r">>> .*", op.doc):
        assert shown in (function.__doc__ or "")
    assert list(parameters) == [*op.inputs, *op.attributes, *([] if op.dynamic else ["out"])]
    for attribute in op.attributes.values():
        assert parameters[attribute.name].default == attribute.default


@pytest.mark.parametrize("name", OPS)
def test_every_op_but_internal_ones_is_public(name: str) -> None:
    """It is public straight from the op table, or as a separate function."""
    op = OPS[name]
    if op.public:
        own = name in public.__all__  # which takes its arguments otherwise
        assert getattr(ml, name) is (public.PRESENT[name] if own else getattr(primitives, name))
        return
    assert getattr(ml, name, None) is not getattr(primitives, name)
    module = ELSEWHERE.get(op.kernel.__module__.rpartition(".")[2])
    internal = module is None or name in ("split_key", "next_key", "det_vjp")
    assert internal or hasattr(module, name)


x = ml.asarray(X)


@cases(
    "call, error, text",
    (
        lambda: untyped.add(1, "2"),
        ml.errors.DTypeError,
        r"add\(\): str is no operand; tensors, numbers, and arrays or lists of numbers are",
    ),
    (lambda: untyped.add(x), ml.errors.ShapeError, r"add\(f32\[2,3\]\): takes 2 tensors"),
    (lambda: untyped.exp(x, x), ml.errors.ShapeError, "takes 1 tensors, got 2"),
    (lambda: untyped.add(), ml.errors.ShapeError, "got 0"),
    (lambda: untyped.add(x, None), ml.errors.DTypeError, "NoneType"),
    (lambda: untyped.sum(x, axes=0), ml.errors.ArgumentError, "no attribute 'axes'; there are"),
    (
        lambda: untyped.sum(x, 1, True),
        ml.errors.ShapeError,
        r"sum\(f32\[2,3\], 1, True\): takes 1 and axis by position, got 3; by keyword it "
        "takes axis, keepdims",
    ),
    (
        lambda: untyped.sum(x, 1, axis=1),
        ml.errors.ArgumentError,
        r"sum\(f32\[2,3\]\): axis is given twice",
    ),
    (lambda: np.array(["a"]) - x, ml.errors.DTypeError, r"subtract\(ndarray, f32\[2,3\]\): .*<U1"),
    (lambda: untyped.sum(x, axis=1.0), ml.errors.ArgumentError, "got 1.0"),
    (lambda: untyped.slice(x, start=(0, 0)), ml.errors.ArgumentError, "'length' is missing"),
    (lambda: untyped.exp(x, out=X), ml.errors.DTypeError, "out must be a tensor, not ndarray"),
    (lambda: untyped.exp(x, out=ml.zeros(3)), ml.errors.ShapeError, r"out=f32\[3\]"),
    (
        lambda: cast(Any, primitives).nonzero_indices(x, out=ml.zeros((6, 2), dtype=ml.int64)),
        ml.errors.ArgumentError,
        "out= is not supported",
    ),
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with ml.Arena(ml.default_vm(), "refused") as arena:
        refuses(error, text, call)
        assert arena.used == 0
