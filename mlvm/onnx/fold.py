"""Optimization of graphs to fewer nodes.

Sums and products after a convolution become part of the convolution weights, and a layer norm
becomes one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlvm.core.types import Array
from mlvm.onnx.arrays import is_array
from mlvm.onnx.graph import Graph, GraphNode
from mlvm.onnx.table import TABLE


def folded(graph: Graph) -> None:
    """Optimize the graph and its subgraphs.

    Products of quantized factors are merged, scales and shifts are folded into the preceding
    convolutions, and layer norms are fused.
    """
    for each in graph.all():
        _take_quantized(each)
        _fold_convolutions(each)
        _fuse_layer_norms(each)


def _uses(graph: Graph) -> Counter[str]:
    """Count the uses of each name."""
    counts: Counter[str] = Counter()
    for each in graph.all():
        counts.update(each.outputs)
        counts.update(x for node in each.nodes for x in node.inputs if _is_name(x))
    return counts


def _take_quantized(graph: Graph) -> None:
    """Compute a product of dequantized factors in integers.

    The second factor is a weight; the first has one scale and zero point.
    """
    made_by = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        if node.type not in ("Conv", "MatMul", "Gemm"):
            continue
        before = _producer(made_by, node, 0)
        _, weight = graph.quantized.get(id(node.inputs[1]), (None, None))
        if before is None or before.type != "DequantizeLinear" or weight is None:
            continue
        operands = [*before.inputs[:3], ""][:3] + [*weight.inputs[:3], ""][:3]
        x_scale, x_zero, _, scale, zero = operands[1:]
        channels = _channels(node, node.inputs[1])
        if (
            not all(is_array(x) and x.size == 1 for x in (x_scale, x_zero))
            or not x_zero.dtype.itemsize == operands[3].dtype.itemsize == 1
            or "block_size" in weight.attributes
            or not (scale.size == 1 or _lies_along(weight, channels))
            or node.attributes.get("alpha", 1.0) != 1
            or node.attributes.get("beta", 1.0) != 1
            or node.attributes.get("transA", 0)
        ):
            continue
        unit = x_scale.reshape(-1).astype(np.float32) * scale.reshape(-1).astype(np.float32)
        bias: Any = node.inputs[2] if len(node.inputs) > 2 else ""
        if is_array(bias):
            _, whole = graph.quantized.get(id(bias), (None, None))
            units = bias.reshape(-1).astype(np.float64) / unit
            if whole is None or np.abs(units).max(initial=0) >= 2**31 - 1:
                continue
            operands.append(np.round(units).astype(np.int32))
        elif bias:
            continue
        operands[5] = zero if is_array(zero) else ""
        node.inputs, node.type = operands, f"Quantized{node.type}"
        node.numbers = [0] * len(operands)
        node.op = TABLE[node.type]
    uses = _uses(graph)
    graph.nodes = [
        node
        for node in graph.nodes
        if node.type != "DequantizeLinear" or any(uses[name] for name in node.outputs)
    ]
    graph.quantized.clear()


def _channels(node: GraphNode, weight: Array) -> int:
    """Return the axis of a weight that becomes the channels of the result."""
    return 0 if node.type == "Conv" or node.attributes.get("transB", 0) else weight.ndim - 1


def _lies_along(weight: GraphNode, axis: int) -> bool:
    """Return whether a weight has a scale for each position along an axis."""
    q, scale = weight.inputs[:2]
    return bool(scale.ndim == 1 and weight.attributes.get("axis", 1) % q.ndim == axis)


def _fold_convolutions(graph: Graph) -> None:
    uses = _uses(graph)
    made_by: dict[str, GraphNode] = {}
    nodes = []
    for node in graph.nodes:
        before, position = _producer(made_by, node, 0), 0
        if before is None and node.type in ("Add", "Mul"):
            before, position = _producer(made_by, node, 1), 1
        if (
            before is not None
            and uses[before.outputs[0]] == 1
            and (line := _line(node, position, before)) is not None
        ):
            scale, shift = line
            weight = first = before.inputs[1]
            bias = next(filter(is_array, before.inputs[2:3]), None)
            axis = 0 if before.type == "Conv" else 1
            by = np.reshape(scale, [-1 if i == axis else 1 for i in range(weight.ndim)])
            dtype = weight.dtype
            if np.any(scale != 1):
                weight = (weight * by).astype(dtype)
            start = np.zeros(len(scale), dtype) if bias is None else bias
            before.inputs = [before.inputs[0], weight, (start * scale + shift).astype(dtype)]
            for old, new in zip((first, bias), before.inputs[1:], strict=True):
                if id(old) in graph.labels:
                    graph.labels[id(new)] = new, graph.labels[id(old)][1]
            before.outputs = list(node.outputs[:1])
            made_by[before.outputs[0]] = before
            continue
        if node.type in ("Conv", "ConvTranspose") and is_array(node.inputs[1]):
            grouped = node.type == "ConvTranspose" and node.attributes.get("group", 1) != 1
            if (
                node.inputs[1].dtype.kind == "f"
                and node.inputs[1].ndim > 2  # otherwise it is not a kernel
                and not grouped
                and all(is_array(bias) or bias == "" for bias in node.inputs[2:3])
            ):
                made_by[node.outputs[0]] = node
        nodes.append(node)
    graph.nodes = nodes


def _line(node: GraphNode, position: int, conv: GraphNode) -> tuple[Array, Array] | None:
    """Return the scale and shift per channel that the node applies to a convolution's result.

    Return None for any other node.
    """
    weight = conv.inputs[1]
    channels = weight.shape[0 if conv.type == "Conv" else 1]
    one, none = np.ones(channels, np.float64), np.zeros(channels, np.float64)
    if node.type == "BatchNormalization":
        arrays = node.inputs[1:5]
        if not all(is_array(x) and x.shape == (channels,) for x in arrays):
            return None
        if node.attributes.get("training_mode", 0) or any(node.outputs[1:]):
            return None
        gamma, beta, mean, var = (x.astype(np.float64) for x in arrays)
        scale = gamma / np.sqrt(var + node.attributes.get("epsilon", 1e-5))
        return scale, beta - mean * scale
    if node.type not in ("Add", "Sub", "Mul") or (node.type == "Sub" and position):
        return None
    other = node.inputs[1 - position]
    if not is_array(other) or other.dtype != weight.dtype:
        return None
    shape = (1,) * (weight.ndim - other.ndim) + other.shape
    if other.size not in (1, channels) or len(shape) != weight.ndim:
        return None
    if other.size > 1 and shape[1] != channels:
        return None
    values = np.broadcast_to(other.reshape(-1).astype(np.float64), channels)
    if node.type == "Mul":
        return values.copy(), none
    return one, values.copy() if node.type == "Add" else -values


def _fuse_layer_norms(graph: Graph) -> None:
    """Fuse the nodes of a layer norm, as exported before opset 17, into one node."""
    uses = _uses(graph)
    made_by = {name: node for node in graph.nodes for name in node.outputs}

    def producer(reader: GraphNode, i: int, type: str) -> GraphNode | None:
        node = _producer(made_by, reader, i)
        return node if node is not None and node.type == type else None

    def over_last(node: GraphNode | None) -> bool:
        if node is None or not node.attributes.get("keepdims", 1):
            return False
        axes = node.inputs[1]
        return is_array(axes) and axes.reshape(-1).tolist() == [-1]

    fused: set[int] = set()
    for end in graph.nodes:
        if end.type != "Div":
            continue
        root = producer(end, 1, "Sqrt")
        plus = producer(root, 0, "Add") if root else None
        spread = producer(plus, 0, "ReduceMean") if plus else None
        centered = producer(end, 0, "Sub")
        if root is None or plus is None or spread is None or centered is None:
            continue
        squares = producer(spread, 0, "Pow") or producer(spread, 0, "Mul")
        middle = producer(centered, 1, "ReduceMean")
        if squares is None or middle is None or not (over_last(spread) and over_last(middle)):
            continue
        eps, by, x = plus.inputs[1], squares.inputs[1], centered.inputs[0]
        is_square = by == squares.inputs[0] if _is_name(by) else is_array(by) and (by == 2).all()
        inner = (root, plus, spread, squares, middle)
        if (
            not is_square
            or squares.inputs[0] != centered.outputs[0]
            or middle.inputs[0] != x
            or not is_array(eps)
            or eps.size != 1
            or any(uses[node.outputs[0]] != 1 for node in inner)
            or uses[centered.outputs[0]] != (2 if squares.type == "Pow" else 3)
        ):
            continue
        fused |= {id(node) for node in (*inner, centered)}
        end.type, end.op = "Normalized", TABLE["Normalized"]
        end.inputs, end.attributes = [x], {"epsilon": float(eps.reshape(-1)[0])}
    graph.nodes = [node for node in graph.nodes if id(node) not in fused]


def _producer(made_by: Mapping[str, GraphNode], node: GraphNode, i: int) -> GraphNode | None:
    """Return the node that computes operand i of a node, or None."""
    x = node.inputs[i] if i < len(node.inputs) else ""
    return made_by.get(x) if _is_name(x) else None


def _is_name(x: Any) -> bool:
    """Return whether an operand is a name, not an array."""
    return type(x) is str
