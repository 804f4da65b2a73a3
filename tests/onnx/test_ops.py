"""Ops of ONNX at their edges, called and folded, and the scopes of functions and subgraphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.onnx import load
from mlvm.onnx.wire import ProtoMessage
from tests.brief import cases
from tests.cases.claim_tests import claims
from tests.onnx.making import (
    called,
    computed,  # noqa: F401  (the rows call it)
    constant,
    encoded,
    graph,
    model,
    node,
    value,
)

EMPTY = np.zeros((0, 3, 4), np.float32)
ONES = np.ones(3, np.float32)
SQUARE = np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
CUBE = np.arange(27, dtype=np.float32).reshape(3, 3, 3) / 9 - 1
PARTS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
PLACES = np.zeros((2, 2, 2), np.int64)
HALVES = np.array([[300, 400]], np.float16)
TURNS = np.ones((10, 4), np.float32)
ROWS = np.array([[[1, 2, 3, 4]]], np.float32)
SHARES = np.repeat(1 / (1 + np.exp(np.array([-5, -25], np.float32) / np.float32(2) ** 0.5)), 2)
"""The share of a single key, with a score of 0 beside it that has no value."""


def folded(type: str, *operands: Any, opset: int = 21, **attributes: Any) -> Any:
    """Return the result of a node whose operands are all constants."""
    names = [f"k{i}" for i in range(len(operands))]
    constants = [constant(name, x) for name, x in zip(names, operands, strict=True)]
    nodes = [node(type, " ".join(names), "y", **attributes)]
    return np.asarray(load(model(graph(nodes, [], "y", constants), opset))())


def inserted(position: int) -> Any:
    nodes = [
        node("SequenceConstruct", "x x x", "s"),
        node("SequenceInsert", "s x p", "t"),
        node("ConcatFromSequence", "t", "y", axis=0),
    ]
    body = graph(nodes, [value("x", 1, [2])], "y", [constant("p", np.int64(position))])
    return called(model(body), np.array([1, 2], np.float32))


test_rows = claims("onnx", globals())


# --- scopes -------------------------------------------------------------------------------


def _function(
    nodes: list[ProtoMessage], opset: int = 17, overload: str = "", *names: str
) -> ProtoMessage:
    return ProtoMessage(
        "Function",
        name="f",
        domain="l",
        overload=overload,
        input=["x", "c"][: 2 if names else 1],
        output=["y"],
        attribute=[x for x in names if x],
        node=nodes,
        opset_import=[ProtoMessage("OperatorSet", version=opset)],
    )


def _calling(function: list[ProtoMessage], call: ProtoMessage, **more: Any) -> bytes:
    body = graph([call], [value("x", 1, None)], "y", [constant("c", np.array(True))])
    opsets = [
        ProtoMessage("OperatorSet", version=17),
        ProtoMessage("OperatorSet", domain="l", version=1),
    ]
    whole = ProtoMessage(
        "Model", ir_version=10, graph=body, opset_import=opsets, functions=function
    )
    return encoded(whole)


def test_a_subgraph_of_a_function_has_its_attributes_and_its_opset() -> None:
    slope = ProtoMessage("Attribute", name="alpha", type=1, ref_attr_name="slope")
    leaky = ProtoMessage("Node", op_type="LeakyRelu", input=["x"], output=["a"], attribute=[slope])
    other = graph([node("Neg", "x", "b")], [], "b")
    branch = node("If", "c", "y", then_branch=graph([leaky], [], "a"), else_branch=other)
    data = _calling(
        [_function([branch], 17, "", "slope")], node("f", "x c", "y", "", "l", slope=0.5)
    )
    x = np.array([-2, -1, 3], np.float32)
    np.testing.assert_array_equal(called(data, x), np.array([-1, -0.5, 3], np.float32))
    flat = node("If", "c", "y", then_branch=graph([node("Softmax", "x", "a")], [], "a"),
                else_branch=other)  # fmt: skip
    data = _calling([_function([flat], 11, "", "")], node("f", "x c", "y", "", "l"))
    y = called(data, np.zeros((2, 3, 4), np.float32))
    np.testing.assert_allclose(y, np.full((2, 3, 4), 1 / 12), rtol=1e-6)


@cases("overload, expected", ("a", -1.0), ("b", np.e))
def test_overloads_of_a_function_are_told_apart(overload: str, expected: float) -> None:
    functions = [
        _function([node("Neg", "x", "y")], 17, "a"),
        _function([node("Exp", "x", "y")], 17, "b"),
    ]
    call = ProtoMessage(
        "Node", op_type="f", domain="l", overload=overload, input=["x"], output=["y"]
    )
    y = called(_calling(functions, call), np.ones(1, np.float32))
    np.testing.assert_allclose(y, [expected], rtol=1e-6)


@pytest.mark.parametrize("name", ["v", "i"])
def test_an_inner_name_hides_an_outer_one(name: str) -> None:
    """The outer `v` or `i` is an Identity, which is not computed."""
    body = graph(
        [node("Cast", "i", "f", to=1), node("Add", "v f", "vo"), node("Identity", "ci", "co")],
        [value("i", 7, []), value("ci", 9, []), value("v")],
        "co vo",
    )
    nodes = [
        node("Identity", "x", name),
        node("Exp", "x", "e"),
        node("Loop", "n - e", "y", body=body),
        node("Add", f"{name} y", "z"),
    ]
    whole = graph(nodes, [value("x", 1, [1])], "z", [constant("n", np.int64(3))])
    z = called(model(whole, 17), np.array([2], np.float32))
    np.testing.assert_allclose(z, [2 + np.exp(2) + 3], rtol=1e-6)


# --- external data ------------------------------------------------------------------------


def _with_external(length: int) -> tuple[bytes, bytes, Any]:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    pairs = {"location": "model.onnx_data", "offset": "0", "length": str(length)}
    data = [ProtoMessage("Pair", key=key, value=text) for key, text in pairs.items()]
    tensor = constant("w", w, raw_data=None, data_location=1, external_data=data)
    body = graph([node("MatMul", "x w", "y")], [value("x", 1, [1, 2])], "y", [tensor])
    return model(body), w.tobytes(), w


@pytest.mark.parametrize("length", [24, 0])
def test_data_of_a_linked_model_are_read(length: int, tmp_path: Path) -> None:
    """A cache of files links names to contents; a length of 0 means all of the file."""
    data, raw, w = _with_external(length)
    blobs, names, linked = (tmp_path / name for name in ("blobs", "names", "linked"))
    for folder in (blobs, names, linked):
        folder.mkdir()
    (blobs / "11").write_bytes(data)
    (blobs / "22").write_bytes(raw)
    os.symlink("../blobs/11", names / "model.onnx")
    os.symlink("../blobs/22", names / "model.onnx_data")
    (blobs / "model.onnx_data").write_bytes(raw)
    os.symlink("../blobs/11", linked / "m.onnx")
    x = np.array([[1, 2]], np.float32)
    for file in (names / "model.onnx", linked / "m.onnx"):
        np.testing.assert_array_equal(np.asarray(load(file)(x)), x @ w)
