"""Mixed precision: products in a half, what would lose by one in f32, and weights as they are.

What an op is computed in is a fact of the op (`precision` in `mlvm.core.op`). A cast is a call as
all others: a tape records it, so that the gradient of a product in a half is made of such products.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator, suppress
from contextvars import ContextVar
from typing import Any, Final

from mlvm.core.errors import DTypeError, brief
from mlvm.core.op import Op
from mlvm.core.types import DType, f32
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import Tensor

_entered: ContextVar[tuple[DType | None, ...]] = ContextVar("autocast", default=(None,))
"""The blocks that this thread or task is in, the last one at the end."""


class autocast(ContextDecorator):
    """Inside the block products are computed in a half, `float16` or `bfloat16`, from f32 operands
    that stay f32 themselves; None, or `enabled=False`, leaves an outer block.

    `matmul` and convolutions, and what is made of them, such as `Linear` and attention, cast their
    operands that are f32 or another half, and give that half. Softmax, norms, losses, sums and what
    grows fast, such as `exp`, cast operands that are halves to f32, and give f32. All else takes
    what comes; f64 is never cast, nor what is written into `out=`. A gradient is made in the dtypes
    of the way there, also outside of the block, and reaches an f32 tensor in f32. Under float16 it
    wants an `ml.optim.LossScale`.

    A thread that starts inside begins outside of all blocks. A captured function has one program
    for each dtype that it is called under. Also a decorator: `@ml.autocast("bfloat16")`. Raises
    `DTypeError` for another dtype.

        >>> layer, x = ml.nn.Linear(3, 2), ml.ones((1, 3))
        >>> with ml.autocast("bfloat16"):
        ...     y = layer(x)
        ...     y.dtype, ml.softmax(y).dtype, layer.kernel.dtype
        (bf16, f32, f32)
    """

    def __init__(self, dtype: object, enabled: bool = True) -> None:
        half = None
        if dtype is not None:
            with suppress(DTypeError):
                half = DType.of(dtype)
            if half is None or not half.is_half:
                raise DTypeError(
                    f'autocast: products are computed in "float16" or "bfloat16"; None leaves a '
                    f"block; given {brief(dtype)}"
                )
        self.dtype: DType | None = half if enabled else None

    def __enter__(self) -> None:
        _entered.set((*_entered.get(), self.dtype))

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])


def autocast_dtype() -> DType | None:
    """The half that products are computed in here, if any."""
    return _entered.get()[-1]


NO_AUTOCAST: Final = autocast(None)
"""A block in which ops compute in what they are given: that of the rules of ops."""


def in_precision(
    op: Op, operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The operands of an op that has a precision, and its attributes, as `autocast` casts them."""
    half = autocast_dtype()
    if half is None:
        return operands, attributes
    if op.precision == "half":
        floats = [x.dtype for x in operands if x.dtype.is_inexact]
        if all(dtype is f32 or dtype.is_half for dtype in floats):
            operands = [_cast(x, half) if x.dtype.is_inexact else x for x in operands]
    elif any(x.dtype.is_half for x in operands):
        if "dtype" in op.attributes:  # it reads halves, and sums them in f32
            attributes = {**attributes, "dtype": attributes.get("dtype") or f32.name}
        else:
            operands = [_cast(x, f32) if x.dtype.is_half else x for x in operands]
    return operands, attributes


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype is dtype else apply(one_op("astype", dtype=dtype.name), x)
