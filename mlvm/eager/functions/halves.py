"""Functions of several ops that compute with halves as one op does: in f32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from mlvm.core.errors import OpError
from mlvm.core.types import DType, f32
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import autocast_dtype, in_half
from mlvm.eager.tensor.tensor import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def widened(x: Tensor) -> Tensor:
    """x, in f32 if it is of halves."""
    return op.astype(x, dtype=f32) if x.dtype.is_half else x


def rounded(x: Tensor, dtype: DType) -> Tensor:
    """x in that dtype."""
    return x if x.dtype is dtype else op.astype(x, dtype=dtype)


def _as_it_is(fn: Callable[P, R]) -> Callable[P, R]:
    return fn


checkpoint: Callable[..., Callable[..., Any]] = _as_it_is
"""`mlvm.eager.control.checkpoint`, which puts itself here."""


def in_f32(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, which gets f32 for its operands that are halves. A result in f32 is rounded to
    the half that they were of; beside other floats they promote to f32, and nothing is rounded. Nor
    is it under `autocast`: so are functions that sum, and those that `exp` is in.

    What it makes in f32 is not kept for a gradient, but made again."""
    return _widening(fn, lambda: autocast_dtype() is None)


def through_f32(fn: Callable[P, R]) -> Callable[P, R]:
    """As `in_f32`, and rounded under `autocast`, too: a function that gives what it is given."""
    return _widening(fn, lambda: True)


def of_products(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, whose operands `autocast` casts as those of a product."""

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        given: Any = in_half(args)
        return fn(*given, **keywords)

    return function


def _widening(fn: Callable[P, R], rounds: Callable[[], bool]) -> Callable[P, R]:
    @wraps(fn)
    def widening(*args: P.args, **keywords: P.kwargs) -> R:
        tensors = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
        dtypes = {x.dtype for x in tensors if x.dtype.is_float}
        wide: dict[int, Any] = {id(x): widened(x) for x in tensors}
        given: Any = [wide.get(id(x), x) for x in args]
        named: Any = {name: wide.get(id(x), x) for name, x in keywords.items()}
        try:
            result = fn(*given, **named)
        except OpError as error:  # it is of what was given
            own: dict[object, object] = {wide[id(x)].type: x.type for x in tensors}
            if not error.late:
                error.operands = tuple([own.get(each, each) for each in error.operands])
            raise
        made = len(dtypes) == 1 and isinstance(result, Tensor) and result.dtype is f32
        if made and rounds():
            return rounded(result, dtypes.pop())  # type: ignore[arg-type, return-value]
        return result

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        for x in (*args, *keywords.values()):
            if isinstance(x, Tensor) and x.dtype.is_half:
                return checkpoint(widening)(*args, **keywords)  # type: ignore[no-any-return]
        return fn(*args, **keywords)

    return function
