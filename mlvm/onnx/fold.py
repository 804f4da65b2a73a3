"""Nodes that are computed with fewer: what is added to and multiplied by a convolution's results
becomes part of its weights."""

from __future__ import annotations

import numpy as np

from mlvm.core.types import Array
from mlvm.onnx.graph import Graph, Node, is_array


def folded(graph: Graph) -> None:
    """Fold into convolutions what follows them, in the graph and in those in it."""
    for each in graph.all():
        _fold_convolutions(each)


def _uses(graph: Graph) -> dict[str, int]:
    """How often each name is asked for."""
    counts: dict[str, int] = {}
    for name in graph.outputs:
        counts[name] = counts.get(name, 0) + 1
    for inner in graph.all():
        names = [x for node in inner.nodes for x in node.inputs if type(x) is str]
        for name in names + (inner.outputs if inner is not graph else []):
            counts[name] = counts.get(name, 0) + 1
    return counts


def _fold_convolutions(graph: Graph) -> None:
    uses = _uses(graph)
    made_by: dict[str, Node] = {}
    kept = []
    for node in graph.nodes:
        before = (
            made_by.get(node.inputs[0]) if node.inputs and type(node.inputs[0]) is str else None
        )
        position = 0
        if before is None and node.type in ("Add", "Mul") and type(node.inputs[1]) is str:
            before, position = made_by.get(node.inputs[1]), 1
        if (
            before is not None
            and uses[before.outputs[0]] == 1
            and (line := _line(node, position, before)) is not None
        ):
            scale, shift = line
            weight = first = before.inputs[1]
            bias = (
                before.inputs[2] if len(before.inputs) > 2 and is_array(before.inputs[2]) else None
            )
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
            rest = node.inputs[2:3]
            grouped = node.type == "ConvTranspose" and node.attributes.get("group", 1) != 1
            if (
                node.inputs[1].dtype.kind == "f"
                and not grouped
                and (
                    not rest or rest[0] == ""
                    if not rest or type(rest[0]) is str
                    else is_array(rest[0])
                )
            ):
                made_by[node.outputs[0]] = node
        kept.append(node)
    graph.nodes = kept


def _line(node: Node, position: int, conv: Node) -> tuple[Array, Array] | None:
    """Scale and shift of each channel by which the node goes on from a convolution's result; None
    for all else."""
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
