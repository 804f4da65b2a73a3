"""Metadata of a node that names the op of mlvm, which `save` writes and `load` runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS, Attributes
from mlvm.core.op import Op as CoreOp
from mlvm.core.types import DType, TensorType
from mlvm.eager import Tensor
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.autocast import in_precision
from mlvm.onnx.table import NodeCall, OnnxOp
from mlvm.onnx.wire import ProtoMessage

DOMAIN: Final = "mlvm"
"""Domain of the functions in a file, and the key of the metadata that names an op."""


def encode_op(op: CoreOp, attributes: Attributes, types: Sequence[TensorType]) -> str:
    """Encode an op as text: name, attributes, and low-bit dtypes of operands.

    The dtypes of all operands are included if one has a low-bit dtype.
    """
    fields: dict[str, Any] = {"op": op.name, "attributes": dict(attributes)}
    if any(type.dtype.is_storage for type in types):
        fields["dtypes"] = [type.dtype.name for type in types]
    return json.dumps(fields)


def own_op(node: ProtoMessage) -> tuple[OnnxOp, list[tuple[str, DType | None]]] | None:
    """Decode the op of mlvm that `save` stored in a node, with operands and low-bit dtypes.

    Further inputs of the node are sizes for other runtimes. Return None for a node of a different
    tool or version.
    """
    for each in node.metadata_props:
        if each.key == DOMAIN:
            try:
                fields = json.loads(each.value)
                name, attributes = fields["op"], fields["attributes"]
                if name not in OPS or OPS[name].dynamic or len(node.output) != 1:
                    return None
                count = None if OPS[name].variadic else len(OPS[name].inputs)
                one_op(name, **attributes)  # raises for unknown attributes
                op = OnnxOp(partial(_run, OPS[name], attributes), "tensors", (), {}, 0, None, {})
                inputs = list(node.input)[:count]
                dtypes = [DType.storage.get(x) for x in fields.get("dtypes", [""] * len(inputs))]
                return op, list(zip(inputs, dtypes, strict=True))
            except (ValueError, TypeError, KeyError, RecursionError, MlvmError):
                return None
    return None


def _run(op: CoreOp, attributes: dict[str, Any], _: NodeCall, *operands: Tensor) -> Any:
    """Run the op as the public function does under `autocast`."""
    cast, cast_attributes = in_precision(op, operands, attributes)
    return apply(one_op(op.name, **cast_attributes), *cast)
