"""The functions derived from the op table, and their stub."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.eager import public, stub
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


def test_no_name_is_public_twice() -> None:
    names: list[str] = vars(ml)["__all__"]
    assert len(set(names)) == len(names)


def test_the_stub_has_every_function_with_its_signature() -> None:
    defined = {
        n.name: n for n in ast.parse(stub.functions()).body if isinstance(n, ast.FunctionDef)
    }
    assert defined.keys() == OPS.keys()
    assert ast.unparse(defined["sum"].args).startswith("x: Tensor, /, axis: ")
    assert (
        ast.unparse(defined["add"].args) == "x: Operand, y: Operand, /, *, out: Tensor | None=None"
    )
    assert ast.get_docstring(defined["exp"]) == "e to the power x."


def test_an_axis_may_follow_by_position() -> None:
    x = ml.asarray(X)
    for fn in (ml.sum, ml.softmax, ml.sort, ml.argmax, ml.any, ml.cumulative_sum):
        by_position, by_keyword = fn(x, 0), fn(x, axis=0)
        assert by_position.type is by_keyword.type
        np.testing.assert_array_equal(by_position.numpy(), by_keyword.numpy())
    assert ml.max(x, -1, keepdims=True).tolist() == [[2], [5]]


def test_attributes_are_keywords_with_defaults() -> None:
    x = ml.asarray(X)
    np.testing.assert_array_equal(ml.sum(x).numpy(), X.sum())
    np.testing.assert_array_equal(ml.sum(x, axis=1, keepdims=True).numpy(), X.sum(1)[:, None])
    assert ml.sum(x, dtype=ml.float64).dtype is ml.float64


def test_a_number_beside_a_tensor_adopts_its_dtype() -> None:
    x = ml.asarray([1, 5], dtype=ml.uint8)
    assert ml.maximum(x, 3).numpy().tolist() == [3, 5]
    assert ml.subtract(9, x).type is x.type
    assert untyped.maximum(x, np.int64(3)).type is x.type


def test_out_is_written_and_returned() -> None:
    x = ml.asarray(X)
    out = ml.zeros((2, 3))
    assert ml.multiply(x, x, out=out) is out
    np.testing.assert_array_equal(out.numpy(), X * X)
    ml.add(out, 1.0, out=out)
    np.testing.assert_array_equal(out.numpy(), X * X + 1)


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
