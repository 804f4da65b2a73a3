"""Mixed precision: matrix products in half precision, sums and exponentials in f32.

The dtype of weights does not change. The dtype in which an op computes is a property of the op
(`precision` in `mlvm.core.op`). A cast is an ordinary call: a tape records it, so the gradient of a
product in half precision is also such a product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from mlvm.arena.context import current
from mlvm.core.errors import DTypeError, brief
from mlvm.core.op import Op
from mlvm.core.types import DType, f32
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.context_blocks import ContextBlock
from mlvm.eager.tensor.default import default_dtype, default_float
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import require_arguments

F = TypeVar("F", bound=Callable[..., Any])


def autocast_dtype() -> DType | None:
    """Return the half-precision dtype of matrix products in the current block, or None."""
    return current().autocast_dtype


class autocast(ContextBlock):
    """Context manager and decorator for mixed precision: matrix products run in half precision.

    The dtype is `float16` or `bfloat16`. The f32 operands themselves do not change. None, or
    `enabled=False`, disables an outer block.

    Products are `matmul`, convolutions and functions of them, such as `einsum`, `Linear` and
    attention. They cast f32 and half-precision operands to that dtype, which is the dtype of the
    result. Sums, such as `mean`, `softmax`, norms and losses, and exponentials, logarithms and
    powers, such as `x ** 2`, cast half precision to f32, which is the dtype of the result. All
    other functions, such as activations, do not cast. f64 is never cast, and neither is a result
    for `out=`. The backward pass computes in the dtypes of the forward pass, even outside of the
    block; the gradient of an f32 tensor is f32. With float16 use an `ml.optim.LossScale`.

    Tasks of a group run in the blocks of the caller. Any other thread that starts inside a block
    starts outside of all blocks. A captured function compiles one program for each dtype under
    which it is called. As a decorator, `@ml.autocast("bfloat16")` also accepts generators and
    `async def`; a block inside a generator also applies to the code that iterates over it. Raises
    `DTypeError` for a different dtype, `ArgumentError` for a decorated class or asynchronous
    generator.

        >>> layer, x = ml.nn.Linear(3, 2), ml.ones((1, 3))
        >>> with ml.autocast("bfloat16"):
        ...     y = layer(x)
        ...     y.dtype, ml.softmax(y).dtype, layer.kernel.dtype
        (bf16, f32, f32)

    Invalid calls:
        ml.autocast("float32")  # DTypeError
        ml.autocast("bfloat16")(ml.nn.Linear)  # ArgumentError
    """

    _field = "autocast_dtype"

    def __new__(cls, *args: object, **keywords: object) -> autocast:
        if keywords or len(args) != 1:
            require_arguments(cls, args, keywords)
        return super().__new__(cls)

    def __init__(self, dtype: object, enabled: bool = True) -> None:
        half = None
        if dtype is not None:
            with suppress(DTypeError):
                half = DType.of(dtype)
            if half is None or not half.is_half:
                raise DTypeError(
                    'autocast: expected "float16", "bfloat16" or None as the dtype of matrix '
                    f"products, got {brief(dtype)}"
                    + ("; write @ml.autocast('bfloat16')" if inspect.isfunction(dtype) else "")
                )
        self.dtype: DType | None = half if enabled else None

    def __reduce__(self) -> tuple[type[autocast], tuple[DType | None]]:
        return autocast, (self.dtype,)

    def __repr__(self) -> str:
        return f"autocast({self.dtype and self.dtype.long_name!r})"

    def __enter__(self) -> None:
        if len(current().autocast_dtypes) > 1 or self.dtype is not None:  # otherwise no change
            super().__enter__()


NO_AUTOCAST: Final = autocast(None)
"""Block in which ops cast nothing, used for gradient rules."""


def in_precision(
    op: Op, operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Cast the operands and attributes of an op with a precision as `autocast` requires."""
    if autocast_dtype() is None:
        # half precision together with f32
        if op.name == "layer_norm" and f32 in [x.dtype for x in operands]:
            operands = [_cast(x, f32) if x.dtype.is_half else x for x in operands]
        return operands, attributes
    if op.traits.precision == "half":
        operands = in_half(operands)
    elif any(x.dtype.is_half for x in operands):
        if "dtype" in op.attributes:  # the op reads half precision, and sums in f32
            attributes = {**attributes, "dtype": attributes.get("dtype") or f32.name}
        else:
            operands = [in_single(x) for x in operands]
    return operands, attributes


def in_half(operands: Sequence[Any]) -> Sequence[Any]:
    """Cast the operands of a product as `autocast` requires."""
    half = autocast_dtype()
    if half is not None:
        floats = [x.dtype for x in operands if x.dtype.is_inexact]
        if all(dtype is f32 or dtype.is_half for dtype in floats):
            return [_cast(x, half) if x.dtype.is_inexact else x for x in operands]
    return operands


def in_single(x: Tensor) -> Tensor:
    """Cast an operand of an op that is inaccurate in half precision as `autocast` requires."""
    return x if autocast_dtype() is None or not x.dtype.is_half else _cast(x, f32)


def in_present_precision(fn: F) -> F:
    """Return a function that runs `fn` under the present `autocast` and default dtype."""
    return default_dtype(default_float())(autocast(autocast_dtype())(fn))


def carried(task: Callable[..., Any]) -> Callable[..., Any]:
    """Return a group's task that runs under the `autocast` and the default dtype of the caller."""
    half, default = autocast_dtype(), default_float()
    if half is None and default is f32:
        return task
    return partial(_in_block, half and half.name, default.name, task)


def _in_block(
    half: str | None, default: str, task: Callable[..., Any], rank: int, vm: object
) -> Any:
    with autocast(half), default_dtype(default):
        return task(rank, vm)


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype is dtype else apply(one_op("astype", dtype=dtype.name), x)
