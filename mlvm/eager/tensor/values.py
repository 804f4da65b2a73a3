"""Arrays from values of Python and other libraries: numbers, nested lists, buffers, tensors."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from mlvm.core.errors import DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.ops import few
from mlvm.core.rules import bounds
from mlvm.core.types import MAX_NDIM, Array, DType, bf16

_PROTOCOLS: Final = ("__array__", "__array_interface__", "__dlpack__")
_NUMBERS: Final = (int, float, complex, np.number)
_UNREADABLE: Final = (TypeError, ValueError, RuntimeError, BufferError)


def in_memory(obj: Any) -> Array | None:
    """Return an array over the values of an array-like object or a buffer; otherwise None."""
    if type(obj) is np.ndarray or any(hasattr(obj, protocol) for protocol in _PROTOCOLS):
        return array_of(obj)
    try:
        return array_of(memoryview(obj))
    except (TypeError, ValueError, BufferError):
        return None


def array_of(obj: Any) -> Array:
    """Return an array over the values of an array-like object.

    Raises `DTypeError` if numpy cannot read them."""
    if type(obj) is np.ndarray and obj.dtype.isbuiltin == 1:
        return obj
    _require_no_mask(obj)
    try:
        only_dlpack = hasattr(obj, "__dlpack__") and not hasattr(obj, "__array__")
        array = np.from_dlpack(obj) if only_dlpack else np.asarray(_readable(obj))
    except _UNREADABLE as error:
        raise DTypeError(f"the values of this {kind_of(obj)} cannot be read: {error}") from None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    is_bf16 = array.dtype.isbuiltin == 2 and array.dtype.name == "bfloat16"  # of ml_dtypes
    return array.view(bf16.numpy) if is_bf16 else array


def zeros_and_ones(array: Array) -> Array:
    """Return a bool array with bytes 0 or 1, as kernels expect; other arrays are unchanged.

    A view of integers as bool, or a different library, may have other bytes, which mean True."""
    if array.dtype != np.bool_:
        return array
    normalized: Array = array.view(np.uint8) != 0
    return normalized


def _require_no_mask(obj: object) -> None:
    """Raise `DTypeError` for a masked array of numpy, which would lose the mask."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(obj, masked.MaskedArray):
        raise DTypeError("a masked array would lose its mask; fill it: x.filled(0)")


def _readable(obj: Any) -> Any:
    """Convert a PyTorch tensor for numpy: without the gradient, and bfloat16 as raw bits."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return obj
    value = obj.detach().resolve_conj().resolve_neg()
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy(force=True).view(bf16.numpy)
    return value


def of_numbers(obj: object, dtype: DType | None = None) -> Array:
    """Return an array of a Python number or nested lists of them, for a tensor of the dtype.

    Ints that no integer dtype represents become floats if the dtype or another number is one."""
    if isinstance(obj, (list, tuple)):
        for each in obj:
            _require_no_mask(each)
    try:
        array = np.array(obj)
    except ValueError:
        raise ShapeError(f"expected nested lists of equal lengths, got {_ragged(obj)}") from None
    except (TypeError, RuntimeError) as error:  # an object that PyTorch does not convert
        raise DTypeError(
            f"the values of this {kind_of(obj)} cannot be read: {error}; join the tensors first, "
            f"as torch.stack does"
        ) from None
    kind: Any = None
    if array.size and array.dtype.kind in "Of" and all(isinstance(x, int) for x in leaves(obj)):
        kind = np.float64 if dtype is not None and dtype.is_inexact else np.uint64
    elif array.dtype.kind == "O" and all(isinstance(x, _NUMBERS) for x in leaves(obj)):
        kind = np.result_type(float, *{type(x) for x in leaves(obj) if not isinstance(x, int)})
    try:
        array = array if kind is None else np.array(obj, kind)
    except OverflowError:
        limit = "any integer dtype; write it as a float" if kind is np.uint64 else "f64"
        most = brief(max([x for x in leaves(obj) if isinstance(x, int)], key=abs))
        most += " with the other numbers" * (array.size > 1)
        raise OperandValueError(f"the int {most} does not fit into {limit}") from None
    if array.dtype.kind not in "biufc":
        many = isinstance(obj, Iterable) and not isinstance(obj, (list, tuple, str, bytes, dict))
        of_list = next((x for x in leaves(obj) if not isinstance(x, (int, float, complex))), obj)
        raise DTypeError(
            f"expected numbers, arrays, or nested lists of them, got {brief(of_list)}"
            + (f"; convert the {kind_of(obj)} with list(x)" if many else "")
        )
    return array


def _ragged(values: object) -> str:
    """Describe the first level of nested lists with items of different lengths."""
    level: list[Any] = [values]
    for depth in range(MAX_NDIM):
        lengths = [
            len(x) if isinstance(x, (list, tuple)) or getattr(x, "shape", None) else None
            for x in level
        ]
        texts = ["a number" if n is None else f"length {n}" for n in dict.fromkeys(lengths)]
        if len(texts) > 1:
            return f"{texts[0]} and {texts[1]} at depth {depth}"
        if None in lengths:
            break
        level = [each for x in level for each in x]
    return "items that numpy does not join"


def members_of(value: Any) -> Iterator[Any]:
    """Return the items of a list or tuple in order, without calling methods of a subclass."""
    return list.__iter__(value) if issubclass(type(value), list) else tuple.__iter__(value)


def items_of(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict in order, without calling methods of a subclass."""
    return (OrderedDict if isinstance(value, OrderedDict) else dict).items(value)


def leaves(obj: Any, depth: int = 0) -> Iterator[object]:
    if issubclass(type(obj), (list, tuple)):  # isinstance might run user code
        if depth == MAX_NDIM:
            raise ShapeError(f"expected lists nested at most {MAX_NDIM} deep, got deeper lists")
        for each in members_of(obj):
            yield from leaves(each, depth + 1)
    else:
        yield obj


def values_for(dtype: DType, array: Array, numbers: object) -> Array:
    """Return the array of Python numbers for a dtype; raise unless they are values of the dtype.

    Integral floats become integers for an integer dtype. Float dtypes round."""
    if array.dtype.kind == "c" and dtype.kind != "complex":
        raise DTypeError(f"cannot convert complex numbers to {dtype.name}; use real or imag")
    if dtype.is_inexact or not array.size or dtype in few.FLOATS:
        return array
    if array.dtype.kind == "f":
        array = _whole(array, numbers, dtype)
    if dtype.is_storage:
        own = few.integers(dtype)
        low, high = own[0], own[-1]
    else:
        low, high = bounds(dtype)
    for value in (int(array.min()), int(array.max())):
        if not low <= value <= high:
            raise OperandValueError(
                f"the int {brief(value)} does not fit into {dtype.name}: {low} .. {high}; "
                "use a wider dtype"
            )
    return (
        array.astype(np.int64 if high < 2**63 else np.uint64) if array.dtype.kind == "O" else array
    )


def _whole(array: Array, numbers: object, dtype: DType) -> Array:
    """Return floats and integers as integers.

    Raises `DTypeError` for a fraction, inf or nan."""
    is_whole = np.isfinite(array) & (array == np.trunc(array))
    if not is_whole.all():
        raise DTypeError(
            f"the float {array[~is_whole][0]} is not a value of {dtype.name}; write "
            f"ml.asarray(values).astype(ml.{dtype.long_name}), which truncates"
        )
    if np.abs(array).max() < 2.0**53:
        return array.astype(np.int64)
    exact = [int(x) for x in leaves(numbers)]  # type: ignore[call-overload]  # f64 rounds them
    return np.array(exact, object).reshape(array.shape)


def kind_of(x: object) -> str:
    return "None" if x is None else type(x).__name__


def module_of(value: object) -> str:
    """Return the name of the module that defines a class or a function.

    It is "" if `__module__` is not a string, for example a property of the class."""
    is_class = issubclass(type(value), type)
    try:
        name = _MODULE.__get__(value) if is_class else getattr(value, "__module__", None)
    except Exception:  # a user's __getattr__
        return ""
    return name if isinstance(name, str) else ""


_MODULE: Final[Any] = vars(type)["__module__"]
