"""Warning for f64 data combined with narrower weights, which would make all results f64."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

from mlvm.core.errors import user_line
from mlvm.core.types import TensorType, f64
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.warn import warn_at

_WALK: Final = "cotangents"
"""Method of a tape that runs the backward pass with the precision of the forward products."""

_warned: set[str | None] = set()  # lines that have been reported


class PrecisionWarning(UserWarning):
    """Warning for a product of f64 with f32 or less, which computes in f64.

    All results computed from it are then also f64. numpy and pandas return f64 by default. The text
    names both operands; each line is reported once.

        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     _ = ml.ones((2, 3), dtype=ml.float64) @ ml.ones(3)
        >>> caught[0].category.__name__, str(caught[0].message).partition(",")[0]
        ('PrecisionWarning', 'matmul(f64[2')
    """


def warn_of_mixed(op: str, types: tuple[TensorType, ...]) -> None:
    """Issue a `PrecisionWarning` at the user's line for a product of f64 and narrower floats.

    Convolutions reject such operands."""
    if op != "matmul":
        return
    parts = {type.dtype.real for type in types if type.dtype.is_inexact}
    if f64 not in parts or len(parts) == 1 or _goes_back():
        return
    line = user_line()
    if line not in _warned:
        source = "which numpy and pandas give by themselves"
        if default_float() is f64:
            source = "the default dtype here"
        warn_at(
            line,
            f"{op}({', '.join(map(str, types))}) computes in f64, {source}; write "
            f"ml.astype(x, ml.float32) for that operand, or model.astype(ml.float64) where f64 is "
            f"meant",
            PrecisionWarning,
        )
        _warned.add(line)


def _goes_back() -> bool:
    """Return whether the product is computed by a backward pass rather than by a user's line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != _WALK:
        frame = frame.f_back
    return frame is not None
