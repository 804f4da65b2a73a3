"""The table of ops: each is a small function of a call and its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from inspect import signature
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.types import Array, DType
from mlvm.onnx.arrays import is_array
from mlvm.onnx.limits import limit
from mlvm.onnx.values import Value, alike, are_known, known, lying, plain, tensor

Kind: TypeAlias = Literal["plain", "tensors", "elementwise", "raw"]
Function: TypeAlias = Callable[..., Value]


class Op(NamedTuple):
    """How an op is computed.

    "plain" operands lie in order, and are tensors unless all are known; those of "tensors" are
    tensors always. "elementwise" ones are computed with as they lie, "raw" ones are given as they
    are. Those in `host` are known arrays, however the others come. `packed` are weights that are
    laid out otherwise when a model is loaded, by their places.
    """

    run: Function
    kind: Kind
    host: Collection[int]
    packed: dict[int, Callable[[Any, Array], Array]]
    least: int
    """How many operands there must be."""


TABLE: Final[dict[str, Op]] = {}
"""By the name of an op; of domains other than ONNX's own with the domain and a dot."""


def op(
    names: str,
    kind: Kind = "plain",
    *,
    host: Collection[int] = (),
    packed: dict[int, Callable[[Any, Array], Array]] | None = None,
) -> Callable[[Function], Function]:
    """Enter a function under these names."""

    def enter(run: Function) -> Function:
        kinds = [p for p in signature(run).parameters.values() if p.kind is not p.VAR_POSITIONAL]
        least = sum(p.default is p.empty for p in kinds) - 1
        for name in names.split():
            TABLE[name] = Op(run, kind, host, packed or {}, least)
        return run

    return enter


class Call:
    """What an op may ask besides its operands: its attributes, its node, and `xp`, numpy where all
    operands are known, else `mlvm.eager`."""

    __slots__ = ("graph", "node", "scope", "xp")

    def __init__(self, node: Any, xp: Any, graph: Any, scope: Any) -> None:
        self.node, self.xp, self.graph, self.scope = node, xp, graph, scope

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or what is taken where there is none."""
        return self.node.attributes.get(name, default)

    def __getitem__(self, name: str) -> Any:
        """An attribute that there must be. Raises `ModelError`."""
        try:
            return self.node.attributes[name]
        except KeyError:
            raise ModelError(f"it has no attribute {name!r}") from None

    @property
    def opset(self) -> int:
        """The version of the op's domain that the model is written for."""
        version: int = self.node.opset
        return version

    @property
    def is_host(self) -> bool:
        return self.xp is np


def call(node: Any, operands: list[Value], graph: Any, scope: Any) -> Value:
    """What the op of a node makes of its operands."""
    op: Op = node.op
    if op.host:
        operands = [
            known(plain(x), f"operand {i} of {node}") if i in op.host else x
            for i, x in enumerate(operands)
        ]
    is_large = _is_large(op, operands)
    if op.kind == "raw":
        if is_large:
            operands = [
                tensor(x) if is_array(x) and i not in op.host else x for i, x in enumerate(operands)
            ]
        xp = np if are_known([x for x in operands if not isinstance(x, list)]) else ml
        made = op.run(Call(node, xp, graph, scope), *operands)
        return np.asarray(made) if isinstance(made, np.generic) else made
    if node.opset < 7 and operands[1:]:
        operands = _as_before_7(node, operands)
    rest = [x for i, x in enumerate(operands) if i not in op.host] if op.host else operands
    if op.kind != "tensors" and not is_large and are_known(rest):
        with np.errstate(all="ignore"):
            try:
                return _arrays(op.run(Call(node, np, graph, scope), *operands))
            except AttributeError as error:
                if getattr(error, "obj", None) is not np:
                    raise
    at = Call(node, ml, graph, scope)
    if op.kind == "elementwise":
        found, axes = alike(operands)
        dtypes = {x.dtype for x in found if type(x) is ml.Tensor}
        found = [x if i in op.host else _operand(x, dtypes) for i, x in enumerate(found)]
        made = op.run(at, *found)
        return made if axes is None else lying(made, axes)
    return op.run(
        at, *[x if x is None or i in op.host else tensor(x) for i, x in enumerate(operands)]
    )


def _is_large(op: Op, operands: list[Value]) -> bool:
    """Whether a result of known operands may be more than the limit: a VM, which counts what it
    allocates, then computes it."""
    most = limit.get()
    arrays = [x for i, x in enumerate(operands) if is_array(x) and i not in op.host]
    if most is None or len(arrays) < 2:
        return False
    size = math.prod(x.size for x in arrays if x.size)
    if op.kind == "elementwise":
        with suppress(ValueError):  # these do not go together
            size = math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))
    return bool(size * max(x.itemsize for x in arrays) > most.left)


def _as_before_7(node: Any, operands: list[Value]) -> list[Value]:
    """A second operand of fewer axes, put where opsets before 7 have it."""
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
    """What stands beside tensors of these dtypes: a known scalar of one of them as a number,
    anything else as a tensor."""
    if not isinstance(x, np.ndarray):
        return x
    is_number = x.ndim == 0 and x.dtype.kind != "V" and DType.of(x.dtype) in dtypes
    return x[()] if is_number else ml.asarray(x)


def _arrays(made: Any) -> Value:
    if isinstance(made, tuple):
        return tuple(_arrays(each) for each in made)
    return np.asarray(made) if isinstance(made, np.generic) else made
