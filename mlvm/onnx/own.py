"""What `save` notes of a node, and `load` makes of it: the very op of the language."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from mlvm.core.errors import ArgumentError
from mlvm.core.op import OPS, Attributes
from mlvm.core.op import Op as CoreOp
from mlvm.core.types import DType, TensorType
from mlvm.eager import Tensor
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.autocast import in_precision
from mlvm.onnx.table import Call, Op
from mlvm.onnx.wire import Message

DOMAIN: Final = "mlvm"
"""Of the functions in a file, and the name of the metadata that says what an op was."""


def told(op: CoreOp, attributes: Attributes, types: Sequence[TensorType]) -> str:
    """The op with its attributes as text, and which operands are of few bits."""
    known: dict[str, Any] = {"op": op.name, "attributes": dict(attributes)}
    if any(type.dtype.is_storage for type in types):
        known["dtypes"] = [type.dtype.name for type in types]
    return json.dumps(known)


def own_op(node: Message) -> tuple[Op, list[tuple[str, DType | None]]] | None:
    """The op that a node was saved of, and what it takes, with dtypes of few bits, as behind it may
    stand lengths for other runtimes; None for a node of another tool, or of another version."""
    for each in node.metadata_props:
        if each.key == DOMAIN:
            try:
                found = json.loads(each.value)
                name, attributes = found["op"], found["attributes"]
                if name not in OPS or OPS[name].dynamic or len(node.output) != 1:
                    return None
                count = None if OPS[name].variadic else len(OPS[name].inputs)
                one_op(name, **attributes)  # which refuses those that it does not have
                op = Op(partial(_run, OPS[name], attributes), "tensors", (), {}, 0)
                inputs = list(node.input)[:count]
                dtypes = [DType.storage.get(x) for x in found.get("dtypes", [""] * len(inputs))]
                return op, list(zip(inputs, dtypes, strict=True))
            except (ValueError, TypeError, KeyError, ArgumentError):
                return None
    return None


def _run(op: CoreOp, attributes: dict[str, Any], _: Call, *operands: Tensor) -> Any:
    """The op, as its public function computes it under `autocast`."""
    cast, given = in_precision(op, operands, attributes)
    return apply(one_op(op.name, **given), *cast)
