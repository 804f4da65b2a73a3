"""Table of the ops of ONNX: small functions of a call and operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.types import DType
from mlvm.onnx.arrays import is_array
from mlvm.onnx.limits import limit
from mlvm.onnx.values import Value, Weight, alike, are_known, permuted, plain, tensor, to_host

Kind: TypeAlias = Literal["plain", "tensors", "elementwise", "raw"]
Function: TypeAlias = Callable[..., Value]
Pack: TypeAlias = Callable[[Any, Any, Any], Any]


class OnnxOp(NamedTuple):
    """Row of the table.

    `run`: function of a `NodeCall` and the operands.
    `kind`: form of the operands. "plain": axes in order, arrays if all are on the host. "tensors":
        always tensors. "elementwise": one permutation of axes for all. "raw": unchanged.
    `host`: positions of operands that are read to the host.
    `packed`: by position, a function of (numpy or `mlvm.eager`, node, weight) that converts the
    layout of a weight, when the model is loaded or in each call that computes the weight.
    `least`: smallest number of operands.
    `most`: largest number of operands, or None.
    `only`: attributes that have a single supported value.
    `absent`: positions of operands that may be absent, though `least` or a list includes them.
    `older`: by position, names of attributes of older opsets, from which an absent operand is made.
    """

    run: Function
    kind: Kind
    host: Collection[int]
    packed: dict[int, Pack]
    least: int
    most: int | None
    only: Mapping[str, Any]
    absent: Collection[int] = ()
    older: Mapping[int, str] = MappingProxyType({})

    def required(self, count: int) -> Iterator[int]:
        """Yield the positions of the required operands, of `count` operands."""
        for i in range(count if self.most is None else self.least):
            if i not in self.absent:
                yield i


TABLE: Final[dict[str, OnnxOp]] = {}
"""Ops by name; names outside of the ONNX domain begin with the domain and a dot."""


def op(
    names: str,
    kind: Kind = "plain",
    *,
    host: Collection[int] = (),
    packed: dict[int, Pack] | None = None,
    absent: Collection[int] = (),
    older: Mapping[int, str] = MappingProxyType({}),
    **only: Any,
) -> Callable[[Function], Function]:
    """Register a function by name. `only` contains the only supported values of attributes."""

    def enter(run: Function) -> Function:
        every = signature(run).parameters.values()
        kinds = [p for p in every if p.kind is not p.VAR_POSITIONAL]
        least = sum(p.default is p.empty for p in kinds) - 1
        most = len(kinds) - 1 if len(kinds) == len(every) else None
        for name in names.split():
            TABLE[name] = OnnxOp(run, kind, host, packed or {}, least, most, only, absent, older)
        return run

    return enter


def enter_all(kind: Kind, functions: Mapping[str, Function]) -> None:
    """Register functions of a kind by name."""
    for names, run in functions.items():
        op(names, kind)(run)


class NodeCall:
    """Context of an op's call: attributes, node, and `xp`.

    `xp` is numpy if all operands are on the host, otherwise `mlvm.eager`.
    """

    __slots__ = ("node", "scope", "xp")

    def __init__(self, node: Any, xp: Any, scope: Any) -> None:
        self.node, self.xp, self.scope = node, xp, scope

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default."""
        return self.node.attributes.get(name, default)

    def __getitem__(self, name: str) -> Any:
        """Return a required attribute. Raises `ModelError`."""
        try:
            return self.node.attributes[name]
        except KeyError:
            raise ModelError(f"the attribute {name!r} is missing; set it in the node") from None

    @property
    def opset(self) -> int:
        """Version of the op's domain in the model."""
        version: int = self.node.opset
        return version

    @property
    def is_host(self) -> bool:
        return self.xp is np


def call(node: Any, operands: list[Value], scope: Any) -> Value:
    """Run the op of a node on operands."""
    op: OnnxOp = node.op
    if op.host:
        operands = [
            to_host(plain(x), f"operand {i} of {node}") if i in op.host else x
            for i, x in enumerate(operands)
        ]
    is_large = _is_large(op, operands)
    if op.kind == "raw":
        if is_large:
            operands = [
                tensor(x) if is_array(x) and i not in (*op.host, *op.packed) else x
                for i, x in enumerate(operands)
            ]
        xp = np if are_known([x for x in operands if not isinstance(x, list)]) else ml
        for i, pack in op.packed.items():
            if i < len(operands) and type(node.inputs[i]) is not Weight:
                x = operands[i]
                by = np if isinstance(x, np.ndarray) else ml
                operands[i] = x if x is None else tensor(pack(by, node, plain(x)))
        return _arrays(op.run(NodeCall(node, xp, scope), *operands))
    if node.opset < 7 and operands[1:]:
        operands = _as_before_7(node, operands)
    rest = [x for i, x in enumerate(operands) if i not in op.host] if op.host else operands
    if op.kind != "tensors" and not is_large and are_known(rest):
        with np.errstate(all="ignore"):
            try:
                return _arrays(op.run(NodeCall(node, np, scope), *operands))
            except AttributeError as error:
                if getattr(error, "obj", None) is not np:
                    raise
    at = NodeCall(node, ml, scope)
    if op.kind == "elementwise":
        aligned, axes = alike(operands)
        dtypes = {x.dtype for x in aligned if type(x) is ml.Tensor}
        aligned = [x if i in op.host else _operand(x, dtypes) for i, x in enumerate(aligned)]
        result = op.run(at, *aligned)
        return result if axes is None else permuted(result, axes)
    operands = [x if x is None or i in op.host else tensor(x) for i, x in enumerate(operands)]
    return op.run(at, *operands)


def _is_large(op: OnnxOp, operands: list[Value]) -> bool:
    """Return whether a result of host arrays may exceed the limit.

    In this case a VM computes it, because a VM counts allocations.
    """
    most = limit.get()
    arrays = [x for i, x in enumerate(operands) if is_array(x) and i not in op.host]
    if most is None or len(arrays) < 2:
        return False
    size = math.prod(x.size for x in arrays if x.size)
    if op.kind == "elementwise":
        with suppress(ValueError):  # incompatible
            size = math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))
    return bool(size * max(x.itemsize for x in arrays) > most.remaining)


def _as_before_7(node: Any, operands: list[Value]) -> list[Value]:
    """Align a second operand with fewer axes, as in opsets before 7."""
    x, y = operands[:2]
    axis = node.attributes.get("axis") if "broadcast" in node.attributes else None
    if node.type == "PRelu" and y.ndim == 1:
        axis = 1
    if axis is None or node.op.kind != "elementwise":
        return operands
    xp = np if are_known([y]) else ml
    y = plain(y)
    return [x, xp.reshape(y, (*y.shape, *[1] * (x.ndim - axis - y.ndim))), *operands[2:]]


def _operand(x: Value, dtypes: Collection[DType]) -> Value:
    """Convert an operand for an op on tensors of these dtypes.

    A host scalar of one of these dtypes becomes a number, any other array a tensor.
    """
    if not isinstance(x, np.ndarray):
        return x
    is_number = x.ndim == 0 and x.dtype.kind != "V" and DType.of(x.dtype) in dtypes
    return x[()] if is_number else ml.asarray(x)


def _arrays(result: Any) -> Value:
    if isinstance(result, tuple):
        return tuple(_arrays(each) for each in result)
    return np.asarray(result) if isinstance(result, np.generic) else result
