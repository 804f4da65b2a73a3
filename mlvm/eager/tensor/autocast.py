"""Mixed precision: products in a half, what would lose by one in f32, and weights as they are.

What an op is computed in is a fact of the op (`precision` in `mlvm.core.op`). A cast is a call as
all others: a tape records it, so that the gradient of a product in a half is made of such products.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import ContextDecorator, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final, TypeVar

from mlvm.core.errors import ArgumentError, DTypeError, brief
from mlvm.core.op import Op
from mlvm.core.types import DType, f32
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import require_arguments

F = TypeVar("F", bound=Callable[..., Any])

_entered: ContextVar[tuple[autocast, ...]] = ContextVar("autocast", default=())
"""The blocks that this thread or task is in, the last one at the end."""


class autocast(ContextDecorator):
    """Inside the block products are computed in a half, `float16` or `bfloat16`, from f32 operands
    that stay f32 themselves; None, or `enabled=False`, leaves an outer block.

    Products, which are `matmul`, convolutions and what is made of them, such as `einsum`, `Linear`
    and attention, cast their operands that are f32 or another half, and give that half. What sums,
    such as `mean`, `softmax`, norms and losses, and exponentials, logarithms and powers, such as
    `x ** 2`, cast operands that are halves to f32, and give f32. All else, such as activations,
    takes what comes; f64 is never cast, nor what is written into `out=`. A gradient is made in the
    dtypes of the way there, also outside of the block, and reaches an f32 tensor in f32. Under
    float16 it wants an `ml.optim.LossScale`.

    What a group runs is in the blocks of its caller. Any other thread that starts inside begins
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

    def __new__(cls, *args: object, **given: object) -> autocast:
        require_arguments(cls, args, given)
        return super().__new__(cls)

    def __init__(self, dtype: object, enabled: bool = True) -> None:
        half = None
        if dtype is not None:
            with suppress(DTypeError):
                half = DType.of(dtype)
            if half is None or not half.is_half:
                raise DTypeError(
                    'autocast: products are computed in "float16" or "bfloat16", on any device; '
                    f"None leaves a block; given {brief(dtype)}"
                )
        self.dtype: DType | None = half if enabled else None

    def __repr__(self) -> str:
        return f"autocast({self.dtype and self.dtype.long_name!r})"

    def __enter__(self) -> None:
        _entered.set((*_entered.get(), self))

    def __exit__(self, *_: object) -> None:
        """Leave this block, whichever was entered last: generators leave theirs when they end."""
        entered = _entered.get()
        last = max([i for i, block in enumerate(entered) if block is self], default=len(entered))
        _entered.set(entered[:last] + entered[last + 1 :])

    def __call__(self, func: F) -> F:
        """The function, which runs in such a block."""
        if inspect.isclass(func) or inspect.isasyncgenfunction(func):
            raise ArgumentError(
                "autocast: decorates functions and generators, not "
                f"{'a class: decorate its __call__' if inspect.isclass(func) else brief(func)}"
            )
        result: Any = super().__call__(func)
        if inspect.isgeneratorfunction(func):

            @wraps(func)
            def result(*args: Any, **keywords: Any) -> Any:
                return (yield from _turns(self, func(*args, **keywords)))

        elif inspect.iscoroutinefunction(func):

            @wraps(func)
            async def result(*args: Any, **keywords: Any) -> Any:
                with self:
                    return await func(*args, **keywords)

        return result  # type: ignore[no-any-return]


def _turns(block: autocast, inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """The generator, each turn of which is in the block; what its reader does is not."""
    turn = partial(next, inner)
    while True:
        with block:
            try:
                made = turn()
            except StopIteration as end:
                return end.value
        try:
            turn = partial(inner.send, (yield made))
        except GeneratorExit:
            with block:
                inner.close()
            raise
        except BaseException as error:  # of the reader's `throw`
            turn = partial(inner.throw, error)


def autocast_dtype() -> DType | None:
    """The half that products are computed in here, if any."""
    entered = _entered.get()
    return entered[-1].dtype if entered else None


NO_AUTOCAST: Final = autocast(None)
"""A block in which ops compute in what they are given: that of the rules of ops."""


def in_precision(
    op: Op, operands: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The operands of an op that has a precision, and its attributes, as `autocast` casts them."""
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
    """The operands of a product as `autocast` casts them."""
    half = autocast_dtype()
    if half is not None:
        floats = [x.dtype for x in operands if x.dtype.is_inexact]
        if all(dtype is f32 or dtype.is_half for dtype in floats):
            return [_cast(x, half) if x.dtype.is_inexact else x for x in operands]
    return operands


def in_single(x: Tensor) -> Tensor:
    """An operand of what would lose by a half as `autocast` casts it."""
    return x if autocast_dtype() is None or not x.dtype.is_half else _cast(x, f32)


def carried(task: Callable[..., Any]) -> Callable[..., Any]:
    """What a group runs, in the block of its caller."""
    dtype = autocast_dtype()
    return task if dtype is None else partial(_in_block, dtype.name, task)


def _in_block(dtype: str, task: Callable[..., Any], rank: int, vm: object) -> Any:
    with autocast(dtype):
        return task(rank, vm)


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype is dtype else apply(one_op("astype", dtype=dtype.name), x)
