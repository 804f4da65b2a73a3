"""Composite functions in half precision: computed in f32 and rounded once, like a single op."""

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
    """Convert x to f32 if it has half precision."""
    return op.astype(x, dtype=f32) if x.dtype.is_half else x


def rounded(x: Tensor, dtype: DType) -> Tensor:
    """Convert x to that dtype."""
    return x if x.dtype is dtype else op.astype(x, dtype=dtype)


def _as_it_is(fn: Callable[P, R]) -> Callable[P, R]:
    return fn


checkpoint: Callable[..., Callable[..., Any]] = _as_it_is
"""`mlvm.eager.control.checkpoint`; that package assigns it when it is imported."""


def in_f32(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that half-precision operands are converted to f32.

    The f32 result is rounded to the operands' dtype. It stays f32 if a different operand is a wider
    float, or under `autocast`. Use this wrapper for functions that sum, or contain `exp`.

    The f32 intermediates are recomputed in the backward pass, not saved."""
    return _widening(fn, lambda: autocast_dtype() is None)


def through_f32(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function like `in_f32`, but also round under `autocast`.

    Use this wrapper for functions that preserve magnitudes."""
    return _widening(fn, lambda: True)


def of_products(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that `autocast` casts the operands like those of a matrix product."""

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        cast_args: Any = in_half(args)
        return fn(*cast_args, **keywords)

    return function


def _widening(fn: Callable[P, R], rounds: Callable[[], bool]) -> Callable[P, R]:
    @wraps(fn)
    def widening(*args: P.args, **keywords: P.kwargs) -> R:
        tensors = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
        dtypes = {x.dtype for x in tensors if x.dtype.is_float}
        wide: dict[int, Any] = {id(x): widened(x) for x in tensors}
        wide_args: Any = [wide.get(id(x), x) for x in args]
        named: Any = {name: wide.get(id(x), x) for name, x in keywords.items()}
        try:
            result = fn(*wide_args, **named)
        except OpError as error:  # report the original operand types
            own: dict[object, object] = {wide[id(x)].type: x.type for x in tensors}
            if not error.late:
                error.operands = tuple([own.get(each, each) for each in error.operands])
            raise
        is_rounded = len(dtypes) == 1 and isinstance(result, Tensor) and result.dtype is f32
        if is_rounded and rounds():
            return rounded(result, dtypes.pop())  # type: ignore[arg-type, return-value]
        return result

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        for x in (*args, *keywords.values()):
            if isinstance(x, Tensor) and x.dtype.is_half:
                return checkpoint(widening)(*args, **keywords)  # type: ignore[no-any-return]
        return fn(*args, **keywords)

    return function
