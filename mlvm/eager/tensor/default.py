"""Default float dtype, for results for which neither an argument nor an operand sets the dtype.

These results are Python floats, float results of integers, and created tensors. Each thread and
task has a separate default. Explicit dtypes and float operands are not affected.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from inspect import isfunction
from typing import Any, Final

from mlvm.arena.context import current
from mlvm.core.errors import CaptureError, DTypeError, brief
from mlvm.core.op import Attributes
from mlvm.core.types import DType, TensorType, bool_, c64, c128, f32, f64, i64
from mlvm.core.vm import live_vms
from mlvm.eager.tensor.context_blocks import ContextBlock


def default_float() -> DType:
    """Return the default float dtype of this thread or task."""
    return current().default_dtype


def set_default_dtype(dtype: object, /) -> None:
    """Set the default float dtype of this thread or task, initially f32.

    It applies to creation functions, Python floats that are not combined with a tensor, float
    results of integer tensors (such as the mean), random draws and layers. The default complex
    dtype follows: c128 for f64, else c64.

    Inside a `with ml.default_dtype(...)` block it applies to the rest of the block. Threads that
    start later begin with f32. Tasks of asyncio or of a group inherit the dtype of the creator.
    Raises `DTypeError` if the dtype is not a float, and `CaptureError` in a captured function,
    because later calls would not set it.

        >>> ml.set_default_dtype(ml.float64)
        >>> ml.asarray(0.1), ml.zeros(2).dtype
        (Tensor(0.1, f64[]), f64)
        >>> ml.set_default_dtype(ml.float32)

    Invalid calls:
        ml.set_default_dtype("i64")  # DTypeError
        ml.capture(lambda x: ml.set_default_dtype("f64"))(v)  # CaptureError
    """
    target = _checked(dtype, "set_default_dtype")
    _note(target)
    if current().recorder is not None:
        raise CaptureError(
            "set_default_dtype: a captured function is traced once, so its later calls would not "
            "set the dtype. Write `with ml.default_dtype(...):` inside, or call it outside"
        )
    default_dtype.set_innermost(target)


class default_dtype(ContextBlock):
    """Context manager and decorator that sets the default float dtype of this thread or task.

    See `set_default_dtype`. A captured function compiles one program for each default dtype under
    which it is called. It also decorates functions, generators and `async def`:
    `@ml.default_dtype("float64")`. Raises `DTypeError` if the dtype is not a float, `ArgumentError`
    for a decorated class or asynchronous generator.

        >>> with ml.default_dtype(ml.float64):
        ...     ml.linspace(0, 1, 3), 1 + ml.nn.Linear(2, 2).bias
        (Tensor([0. , 0.5, 1. ], f64[3]), Tensor([1., 1.], f64[2]))

    Invalid calls:
        ml.default_dtype("i64")  # DTypeError
        ml.default_dtype(lambda x: x)  # DTypeError
        ml.default_dtype("f64")(ml.nn.Linear)  # ArgumentError
    """

    _field = "default_dtype"

    def __init__(self, dtype: object, /) -> None:
        self.dtype = _checked(dtype, "default_dtype")

    def __reduce__(self) -> tuple[type[default_dtype], tuple[DType]]:
        return default_dtype, (self.dtype,)

    def __repr__(self) -> str:
        return f"default_dtype({self.dtype.long_name!r})"

    def __enter__(self) -> None:
        _note(self.dtype)
        super().__enter__()


def _checked(dtype: object, function: str) -> DType:
    target = None
    with suppress(DTypeError):
        target = DType.of(dtype)
    if target is None or not target.is_float:
        if target is not None:
            why = "the dtypes of Python's ints and bools are always i64 and bool"
        else:
            at = "@" if isfunction(dtype) else ""
            why = f"write {at}ml.{function}(ml.float64)"
        got = brief(dtype) if target is None else target.name
        raise DTypeError(
            f"{function}: expected a float dtype (f32, f64, f16, bf16), got {got}; {why}"
        )
    return target


_others: Final[set[DType]] = set()
"""The default dtypes other than f32 that this process has set."""


def _note(target: DType) -> None:
    """Record a default dtype, and forget the calls that C has prepared for earlier ones."""
    if target is f32 or target in _others:
        return
    _others.add(target)
    client: Any = sys.modules.get("mlvm.machines.remote.client")
    for vm in [*live_vms(), *(client.live_vms() if client is not None else ())]:
        fast_path: Any = getattr(vm, "fast_path", None)
        if fast_path is not None:
            fast_path.forget()


def follows_default(
    attributes: Attributes, types: tuple[TensorType, ...], result: TensorType | None
) -> bool:
    """Return whether the result of a call has the default dtype, and that may differ from f32.

    Such a result is a float computed from integers or bools, with a dtype that no attribute
    specifies."""
    return (
        bool(_others)
        and result is not None
        and result.dtype is f32
        and attributes.get("dtype") is None
        and bool(types)
        and all(x.dtype.is_integer or x.dtype is bool_ for x in types)
    )


def float_dtype(dtype: object) -> DType:
    """Return the dtype of an argument `dtype=`, or the default float dtype for None."""
    return current().default_dtype if dtype is None else DType.of(dtype)


def default_of(kind: type) -> DType:
    """Return the dtype of a Python number of this class (one of `KINDS`) without a tensor."""
    if kind is float:
        return current().default_dtype
    if kind is complex:
        return c128 if current().default_dtype is f64 else c64
    return bool_ if kind is bool else i64


KINDS: Final = (bool, int, float, complex)
"""The classes of Python's numbers, from the lowest to the highest kind."""
