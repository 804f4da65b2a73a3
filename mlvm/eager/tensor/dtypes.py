"""Functions on dtypes from the Python Array API standard.

A dtype is a `DType` (`float32`, or `x.dtype`), or any value that `DType.of` converts to one.
"""

from __future__ import annotations

from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError
from mlvm.core.types import DType, bf16, promote
from mlvm.eager.tensor.constants import dtype_beside, scalar_kind
from mlvm.eager.tensor.default import default_of
from mlvm.eager.tensor.operands import array_beside, widest_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted

_KINDS: Final = {
    "bool": ("bool",),
    "signed integer": ("signed",),
    "unsigned integer": ("unsigned",),
    "integral": ("signed", "unsigned"),
    "real floating": ("float",),
    "complex floating": ("complex",),
    "numeric": ("signed", "unsigned", "float", "complex"),
}


class FloatInfo(NamedTuple):
    """Limits of a float dtype, as Python floats; for a complex dtype, the limits of the parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType

    @property
    def tiny(self) -> float:
        """`smallest_normal`, as numpy and PyTorch also call it."""
        return self.smallest_normal


class IntInfo(NamedTuple):
    """Limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


@hinted
def isdtype(dtype: object, kind: object) -> bool:
    """Return whether a dtype is of a kind.

    A kind is a dtype, one of the standard's names for several dtypes ("bool", "integral", "real
    floating", "numeric", ...), or a tuple of these. Raises `ArgumentError` for an unknown name,
    `DTypeError` if `dtype` is not a dtype.

        >>> ml.isdtype(ml.float32, "real floating")
        True

    Invalid calls:
        ml.isdtype(ml.float32, "odd")  # ArgumentError
        ml.isdtype("f99", "bool")  # DTypeError
    """
    source = DType.of(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(source, each) for each in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return source.kind in _KINDS[kind]
    try:
        return source is DType.of(kind)
    except DTypeError:
        raise ArgumentError(
            f"expected kind as a dtype or one of {', '.join(_KINDS)}, got {kind!r}"
        ).at("isdtype", ()) from None


@hinted
def result_type(*arrays_and_dtypes: object) -> DType:
    """Return the dtype to which tensors, dtypes and Python numbers promote together.

    Python numbers get the dtype of the other operands unless they have a higher kind. An f64 array
    is treated as in a call with a tensor.

    Raises `DTypeError` if there is no such dtype, and without arguments.

        >>> ml.result_type(ml.int64, ml.float32)
        f32

    Invalid calls:
        ml.result_type(ml.uint64, ml.int64)  # DTypeError
    """
    if not arrays_and_dtypes:
        raise DTypeError("result_type: expected at least 1 tensor or dtype, got none")
    kinds = [scalar_kind(x.__class__) for x in arrays_and_dtypes]
    numbers = [kind for kind in kinds if kind]
    widest = widest_of(arrays_and_dtypes)
    dtypes = [
        array_beside(_dtype_of(x), widest.dtype)
        if widest is not None and isinstance(x, (np.ndarray, np.generic))
        else _dtype_of(x)
        for x, kind in zip(arrays_and_dtypes, kinds, strict=True)
        if kind is None
    ]
    result = reduce(promote, dtypes or [default_of(kind) for kind in numbers])
    for kind in numbers:
        result = dtype_beside(kind, result)
    return result


@hinted
def can_cast(source: object, to: object, /) -> bool:
    """Return whether a tensor or dtype promotes to the dtype `to` itself.

    Raises `DTypeError` if `to` is not a dtype.

        >>> ml.can_cast(ml.int64, ml.float32)
        True

    Invalid calls:
        ml.can_cast(ml.float32, "f99")  # DTypeError
    """
    target = DType.of(to)
    try:
        return promote(_dtype_of(source), target) is target
    except DTypeError:
        return False


@hinted
def finfo(type: object, /) -> FloatInfo:
    """Return the limits of a float dtype or the dtype of a tensor.

    For a complex dtype they are the limits of the real and imaginary parts, and `dtype` is the
    dtype of these. Raises `DTypeError` for an integer dtype or bool.

        >>> ml.finfo(ml.float32).eps
        1.1920928955078125e-07

    Invalid calls:
        ml.finfo(ml.int64)  # DTypeError
    """
    dtype = _dtype_of(type)
    if not dtype.is_inexact:
        raise DTypeError(f"finfo: expected a float or complex dtype, got {dtype.name}")
    if dtype is bf16:  # f32 without the lower half
        most = 2.0**128 - 2.0**120
        return FloatInfo(16, 2.0**-7, most, -most, 2.0**-126, bf16)
    info = np.finfo(dtype.real.numpy)  # type: ignore[type-var]
    eps, high, low = float(info.eps), float(info.max), float(info.min)
    return FloatInfo(info.bits, eps, high, low, float(info.smallest_normal), dtype.real)


@hinted
def iinfo(type: object, /) -> IntInfo:
    """Return the limits of an integer dtype or the dtype of a tensor.

    Raises `DTypeError` for any other dtype.

    >>> ml.iinfo(ml.int64).max
    9223372036854775807

    Invalid calls:
        ml.iinfo(ml.float32)  # DTypeError
    """
    dtype = _dtype_of(type)
    if not dtype.is_integer:
        raise DTypeError(f"iinfo: expected an integer dtype, got {dtype.name}")
    info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    return IntInfo(info.bits, int(info.max), int(info.min), dtype)


def _dtype_of(x: object) -> DType:
    if isinstance(x, Tensor):
        return x.dtype
    return DType.of(x.dtype if isinstance(x, (np.ndarray, np.generic)) else x)
