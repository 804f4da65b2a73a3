"""Running one op without a machine around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core import ops as ops  # fills OPS
from mlvm.core.op import OPS
from mlvm.core.types import Array, TensorType
from tests.brief import output_of


def evaluate(name: str, *inputs: Any, **attributes: Any) -> Array:
    """The op's result for these arrays: read-only, C-contiguous inputs, and an `out` full of
    0xFF bytes, so that what a kernel leaves unwritten shows."""
    op = OPS[name]
    bound = op.bind(attributes)
    operands = [np.array(x, order="C") for x in inputs]
    for operand in operands:
        operand.flags.writeable = False
    result = op.infer([TensorType.of(x) for x in operands], bound)
    with np.errstate(all="ignore"):
        if result is None:
            return op.kernel(*operands, **bound)
        out: Array = np.empty(result.array_shape, result.dtype.numpy)
        out.reshape(-1).view(np.uint8)[...] = 0xFF
        op.kernel(out, *operands, **bound)
    return out


def printed_on_threads(script: str) -> set[str]:
    """Return the outputs of the script with one BLAS thread, and with four."""
    return {output_of("-c", script, OPENBLAS_NUM_THREADS=threads) for threads in ("1", "4")}
