"""Small ONNX files, made of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.program.encoding import varint
from mlvm.core.types import DType
from mlvm.onnx import load
from mlvm.onnx.arrays import NAMES
from mlvm.onnx.wire import FIELDS, ProtoMessage


def encoded(message: ProtoMessage) -> bytes:
    """The bytes of a message, none for what is absent."""
    content = bytearray()
    for number, (name, kind, many, default) in FIELDS[message.kind].items():
        value = getattr(message, name)
        if value is default or (not many and value == default and kind != "int"):
            continue
        for each in value if many else [value]:
            if kind == "int":
                content += varint(number << 3) + varint(int(each))
            elif kind in ("float", "double"):
                wire, dtype = (5, "<f4") if kind == "float" else (1, "<f8")
                content += varint(number << 3 | wire) + np.array(each, dtype).tobytes()
            else:
                data = each.encode() if kind == "str" else each
                data = encoded(data) if isinstance(data, ProtoMessage) else bytes(data)
                content += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(content)


def constant(name: str, array: Any, **fields: Any) -> ProtoMessage:
    """An initializer."""
    array = np.asarray(array)
    number = NAMES[DType.of(array.dtype)]
    defaults = {"raw_data": array.tobytes(), "dims": array.shape, "data_type": number}
    return ProtoMessage("Tensor", name=name, **(defaults | fields))


def value(name: str, number: int = 1, shape: Sequence[int | str] | None = None) -> ProtoMessage:
    """Return the description of a graph's input or output."""
    dims = [
        ProtoMessage("Dimension", **({"dim_param": n} if isinstance(n, str) else {"dim_value": n}))
        for n in shape or ()
    ]
    own = None if shape is None else ProtoMessage("Shape", dim=dims)
    return ProtoMessage(
        "Value",
        name=name,
        type=ProtoMessage(
            "Type", tensor_type=ProtoMessage("TensorType", elem_type=number, shape=own)
        ),
    )


def attribute(name: str, setting: Any) -> ProtoMessage:
    """An attribute, of the kind of what is given."""
    if isinstance(setting, ProtoMessage):
        kind = {"Graph": (5, "g"), "Tensor": (4, "t")}[setting.kind]
    elif isinstance(setting, (list, tuple)):
        kind = {float: (6, "floats"), str: (8, "strings")}.get(type([*setting, 0][0]), (7, "ints"))
        setting = [x.encode() for x in setting] if kind[0] == 8 else setting
    else:
        kind = {int: (2, "i"), float: (1, "f"), str: (3, "s")}[type(setting)]
        setting = setting.encode() if isinstance(setting, str) else setting
    return ProtoMessage("Attribute", name=name, type=kind[0], **{kind[1]: setting})


def node(
    type: str, inputs: str, outputs: str, name: str = "", domain: str = "", **attributes: Any
) -> ProtoMessage:
    """A node: the names of its inputs and outputs between blanks, `-` for one that is left out."""
    return ProtoMessage(
        "Node",
        op_type=type,
        input=[x.replace("-", "") if x == "-" else x for x in inputs.split()],
        output=outputs.split(),
        name=name,
        domain=domain,
        attribute=[attribute(key, each) for key, each in attributes.items()],
    )


def graph(
    nodes: Sequence[ProtoMessage],
    inputs: Sequence[ProtoMessage],
    outputs: str,
    constants: Sequence[ProtoMessage] = (),
) -> ProtoMessage:
    """A graph."""
    outs = [value(name) for name in outputs.split()]
    return ProtoMessage(
        "Graph", name="it", node=nodes, input=inputs, output=outs, initializer=constants
    )


def model(body: ProtoMessage, opset: int = 21, **fields: Any) -> bytes:
    """The bytes of a file with that graph."""
    opsets = [
        ProtoMessage("OperatorSet", version=opset),
        ProtoMessage("OperatorSet", domain="com.microsoft", version=1),
        ProtoMessage("OperatorSet", domain="ai.onnx.ml", version=3),
    ]
    return encoded(ProtoMessage("Model", ir_version=10, graph=body, opset_import=opsets, **fields))


def called(data: bytes, x: Any) -> Any:
    """Return the result or results of a file for x, the same eagerly and captured."""
    net = load(data)
    eager, captured = (ml.tree.map(np.asarray, fn(ml.asarray(x))) for fn in (net, ml.capture(net)))
    np.testing.assert_equal(captured, eager)
    return eager


def computed(
    type: str, x: Any, *known: Any, outputs: int = 1, opset: int = 21, domain: str = "",
    **attributes: Any
) -> Any:  # fmt: skip
    """Return the result or results of one node, the same eagerly and captured. Its first operand
    is the input of the file, the others are constants; None is one that is left out."""
    x = np.asarray(x)
    operands = {f"k{i}": each for i, each in enumerate(known) if each is not None}
    names = " ".join(["x", *(f"k{i}" if f"k{i}" in operands else "-" for i in range(len(known)))])
    results = " ".join(f"y{i}" for i in range(outputs))
    body = graph(
        [node(type, names, results, domain=domain, **attributes)],
        [value("x", NAMES[DType.of(x.dtype)], x.shape)],
        results,
        [constant(name, each) for name, each in operands.items()],
    )
    return called(model(body, opset), x)
