"""Mixed precision: products in a half dtype, sums and exponentials in f32, weights as they are.

The dtype of an op's computation is a fact of the op (`precision` in `mlvm.core.op`). A cast is a
call like any other: a tape records it, so the gradient of a product in a half is such a product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import ContextDecorator, suppress
from functools import partial, wraps
from typing import Any, Final, TypeVar

from mlvm.arena.context import current, set_context
from mlvm.core.errors import ArgumentError, DTypeError, brief
from mlvm.core.op import Op
from mlvm.core.types import DType, f32
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.context import without_last
from mlvm.eager.tensor.default import default_dtype, default_float
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import require_arguments

F = TypeVar("F", bound=Callable[..., Any])


def autocast_dtype() -> DType | None:
    """Return the half-precision dtype of matrix products in this thread or task, if any."""
    return current().autocast_dtype


class autocast(ContextDecorator):
    """Inside the block products are computed in a half, `float16` or `bfloat16`, from f32 operands
    that stay f32 themselves; None, or `enabled=False`, leaves an outer block.

    Products are `matmul`, convolutions and functions of them, such as `einsum`, `Linear` and
    attention. They cast f32 operands and other halves to that half, which is the result's dtype.
    Sums, such as `mean`, `softmax`, norms and losses, and exponentials, logarithms and powers, such
    as `x ** 2`, cast halves to f32, which is the result's dtype. All other functions, such as
    activations, cast nothing. f64 is never cast, nor is a result for `out=`. The backward pass
    computes in the dtypes of the forward pass, also outside of the block; the gradient of an f32
    tensor is f32. With float16 use an `ml.optim.LossScale`.

    Tasks of a group run in the blocks of their caller. Any other thread that starts inside begins
    outside of all blocks. A captured function has one program for each dtype that it is called
    under. Also a decorator, `@ml.autocast("bfloat16")`, of generators and `async def`, too: a
    block that stands in a generator also holds for its reader. Raises `DTypeError` for another
    dtype, `ArgumentError` for a decorated class or asynchronous generator.

        >>> layer, x = ml.nn.Linear(3, 2), ml.ones((1, 3))
        >>> with ml.autocast("bfloat16"):
        ...     y = layer(x)
        ...     y.dtype, ml.softmax(y).dtype, layer.kernel.dtype
        (bf16, f32, f32)

    Refuses:
        ml.autocast("float32")  # DTypeError
        ml.autocast("bfloat16")(ml.nn.Linear)  # ArgumentError
    """

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
                    'autocast: products are computed in "float16" or "bfloat16", on any device; '
                    f"None leaves a block; got {brief(dtype)}"
                    + ("; write @ml.autocast('bfloat16')" if inspect.isfunction(dtype) else "")
                )
        self.dtype: DType | None = half if enabled else None

    def __reduce__(self) -> tuple[type[autocast], tuple[DType | None]]:
        return autocast, (self.dtype,)

    def __repr__(self) -> str:
        return f"autocast({self.dtype and self.dtype.long_name!r})"

    def __enter__(self) -> None:
        blocks = current().autocast_blocks
        if blocks or self.dtype is not None:  # else it changes nothing
            self._enter((*blocks, self))

    def __exit__(self, *_: object) -> None:
        """Leave this block, whichever was entered last: generators leave theirs when they end."""
        blocks = current().autocast_blocks
        if blocks:
            self._enter(without_last(blocks, self))

    @staticmethod
    def _enter(blocks: tuple[autocast, ...]) -> None:
        dtype = blocks[-1].dtype if blocks else None
        set_context(autocast_blocks=blocks, autocast_dtype=dtype)

    def __call__(self, func: F) -> F:
        """Decorate a function, which then runs in such a block."""
        if inspect.isclass(func) or inspect.isasyncgenfunction(func):
            raise ArgumentError(
                "autocast: decorates functions and generators, not "
                f"{'a class: decorate its __call__' if inspect.isclass(func) else brief(func)}"
            )
        result: Any = super().__call__(func)
        if inspect.isgeneratorfunction(func):

            @wraps(func)
            def result(*args: Any, **keywords: Any) -> Any:
                return (yield from _run_in(self, func(*args, **keywords)))

        elif inspect.iscoroutinefunction(func):

            @wraps(func)
            async def result(*args: Any, **keywords: Any) -> Any:
                with self:
                    return await func(*args, **keywords)

        return result  # type: ignore[no-any-return]


def _run_in(block: autocast, inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator in the block, but not its reader."""
    resume = partial(next, inner)
    while True:
        with block:
            try:
                value = resume()
            except StopIteration as end:
                return end.value
        try:
            resume = partial(inner.send, (yield value))
        except GeneratorExit:
            with block:
                inner.close()
            raise
        except BaseException as error:  # of the reader's `throw`
            resume = partial(inner.throw, error)


NO_AUTOCAST: Final = autocast(None)
"""A block in which ops cast nothing: that of the gradient rules."""


def in_precision(
    op: Op, operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Cast the operands and attributes of an op with a precision as `autocast` asks."""
    if autocast_dtype() is None:
        if op.name == "layer_norm" and f32 in [x.dtype for x in operands]:  # a half beside f32
            operands = [_cast(x, f32) if x.dtype.is_half else x for x in operands]
        return operands, attributes
    if op.precision == "half":
        operands = in_half(operands)
    elif any(x.dtype.is_half for x in operands):
        if "dtype" in op.attributes:  # it reads halves, and sums them in f32
            attributes = {**attributes, "dtype": attributes.get("dtype") or f32.name}
        else:
            operands = [in_single(x) for x in operands]
    return operands, attributes


def in_half(operands: Sequence[Any]) -> Sequence[Any]:
    """Cast the operands of a product as `autocast` asks."""
    half = autocast_dtype()
    if half is not None:
        floats = [x.dtype for x in operands if x.dtype.is_inexact]
        if all(dtype is f32 or dtype.is_half for dtype in floats):
            return [_cast(x, half) if x.dtype.is_inexact else x for x in operands]
    return operands


def in_single(x: Tensor) -> Tensor:
    """Cast an operand of an op that is imprecise in a half as `autocast` asks."""
    return x if autocast_dtype() is None or not x.dtype.is_half else _cast(x, f32)


def in_present_precision(fn: F) -> F:
    """Return the function, which runs under the `autocast` and the default dtype of now, whenever
    it is called."""
    return default_dtype(default_float())(autocast(autocast_dtype())(fn))


def carried(task: Callable[..., Any]) -> Callable[..., Any]:
    """Return a group's task, which runs under the `autocast` and the default dtype of the
    caller."""
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
