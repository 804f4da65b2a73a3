"""Tensor types: pairs of a dtype and a shape, interned as `TensorType`.

Because types are interned, they are compared with `is`, and a dictionary lookup costs one pointer
comparison. They print as in assembly: `f32[32,64]`, `bool[]`.
"""

from __future__ import annotations

import math
import operator
import re
import weakref
from _weakref import _remove_dead_weakref  # type: ignore[attr-defined]
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, TypeAlias, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlvm.core.dynamic_sizes import open_length
from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, did_you_mean, with_article
from mlvm.core.sizes import MAX_TERM

Array: TypeAlias = NDArray[Any]
Kind = Literal["bool", "unsigned", "signed", "float", "complex", "storage"]


@final
class DType:
    """Element type of a tensor: one of the fifteen dtypes in `all`, or a packed low-bit dtype.

    Packed dtypes such as i4 can only be stored and converted. Create a dtype with `f32`,
    `DType.named("f32")` or `DType.of(np.float32)`. A dtype is equal to everything that `of`
    converts to it, although the hashes may differ, as for numpy's dtypes.
    """

    __slots__ = ("is_half", "itemsize", "kind", "name", "numpy", "per_byte")
    all: ClassVar[dict[str, DType]] = {}
    storage: ClassVar[dict[str, DType]] = {}
    __call__: ClassVar[Callable[..., Any]]  # creates a tensor; `mlvm.eager` sets it

    def __init__(self, name: str, kind: Kind, numpy: DTypeLike, per_byte: int = 1) -> None:
        self.name = name
        self.kind: Kind = kind
        self.numpy: np.dtype[np.generic] = np.dtype(numpy)
        self.itemsize: int = self.numpy.itemsize
        self.per_byte = per_byte  # elements per byte of the numpy array: 2 for i4
        self.is_half = name in ("f16", "bf16")  # see `mlvm.core.ops.half`
        (DType.storage if kind == "storage" else DType.all)[name] = self

    @staticmethod
    def named(name: str) -> DType:
        """Return the dtype with that short name. Raises `DTypeError` for any other name."""
        try:
            return DType.all.get(name) or DType.storage[name]
        except (KeyError, TypeError):
            raise _unknown(repr(name)) from None

    @staticmethod
    def of(dtype: object, *, in_bits: bool = False) -> DType:
        """Return the dtype for a `DType`, a short name, or an argument of `np.dtype` except None.

        Raises `DTypeError` for anything else, such as a dtype of the other byte order. The name
        "i8", which means 8 bytes in numpy, is also an error unless names are `in_bits`.
        """
        if not in_bits and dtype.__class__ is str and dtype == "i8":
            raise DTypeError(
                "'i8' has two meanings: 8 bits here, and 8 bytes (int64) in numpy; write ml.int8 "
                "or ml.int64"
            )
        match = DType._matching(dtype)
        if match is None:
            raise _unknown(f"for {dtype!r}")
        return match

    @staticmethod
    def _matching(dtype: object) -> DType | None:
        if dtype is None or isinstance(dtype, DType):
            return dtype
        if isinstance(dtype, np.dtype) and (match := _OF_NUMPY.get(dtype)) is not None:
            return match
        if isinstance(dtype, str) and (dtype in DType.all or dtype in DType.storage):
            return DType.named(dtype)
        with suppress(KeyError, TypeError, ValueError, SyntaxError):  # np.dtype raises these
            if not hasattr(type(dtype), "__array__"):  # numpy would use the array's dtype
                return _OF_NUMPY[np.dtype(dtype)]  # type: ignore[call-overload]
        name = str(getattr(dtype, "__name__", dtype))
        if type(dtype).__module__ == "torch" and name.startswith("torch."):
            return DType._matching(name.removeprefix("torch."))
        return _LONG_NAMES.get(name)  # names that numpy does not have

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self is other
        match = DType._matching(other)
        return NotImplemented if match is None else match is self

    __hash__ = object.__hash__

    @property
    def __numpy_dtype__(self) -> np.dtype[np.generic]:
        """Return the numpy dtype; numpy 2.4 and later calls this.

        Raises `AttributeError` for bf16 and packed dtypes, because numpy would truncate numbers to
        integers before the conversion.
        """
        if self in _LONG_NAMES.values():
            raise AttributeError(
                f"numpy has no {self.long_name}; convert with astype(x, 'float32')"
            )
        return self.numpy

    @property
    def is_storage(self) -> bool:
        """True for a packed dtype: elements can only be stored, converted and multiplied.

        See `mlvm.core.ops.few`.
        """
        return self.kind == "storage"

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("signed", "unsigned")

    @property
    def is_inexact(self) -> bool:
        """True for float and complex dtypes, which have gradients."""
        return self.kind in ("float", "complex")

    @property
    def long_name(self) -> str:
        """The name in the eager language: f32 is `ml.float32`."""
        own = (name for name, dtype in _LONG_NAMES.items() if dtype is self)
        return next(own, self.numpy.name)

    @property
    def real(self) -> DType:
        """The dtype of the real part: f32 for c64; other dtypes are unchanged."""
        return _PARTS.get(self, self)

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        """Return the long name, because other libraries test for parts of it, such as "int".

        Types, programs and messages use the short `name`.
        """
        return self.long_name

    def __reduce__(self) -> tuple[object, ...]:
        return DType.named, (self.name,)


def _unknown(name: str) -> DTypeError:
    names = [*DType.all, *DType.storage]
    hint = did_you_mean(name.strip("'"), names)
    return DTypeError(f"no dtype {name}{hint}; expected one of {', '.join(names)}")


bool_ = DType("bool", "bool", np.bool_)
u8 = DType("u8", "unsigned", np.uint8)
i8 = DType("i8", "signed", np.int8)
i16 = DType("i16", "signed", np.int16)
i32 = DType("i32", "signed", np.int32)
i64 = DType("i64", "signed", np.int64)
u16 = DType("u16", "unsigned", np.uint16)
u32 = DType("u32", "unsigned", np.uint32)
u64 = DType("u64", "unsigned", np.uint64)
f32 = DType("f32", "float", np.float32)
f64 = DType("f64", "float", np.float64)
f16 = DType("f16", "float", np.float16)
bf16 = DType("bf16", "float", [("bf16", np.uint16)])  # numpy can only store it
c64 = DType("c64", "complex", np.complex64)
c128 = DType("c128", "complex", np.complex128)
_PER_BYTE = {"i4": 2, "u4": 2, "i2": 4, "u2": 4, "f8e4m3": 1, "f8e5m2": 1, "f4e2m1": 2}
i4, u4, i2, u2, f8e4m3, f8e5m2, f4e2m1 = (
    DType(name, "storage", [(name, np.uint8)], n) for name, n in _PER_BYTE.items()
)

_OF_NUMPY = {dtype.numpy: dtype for dtype in (*DType.all.values(), *DType.storage.values())}
_LONG_NAMES = {
    "bfloat16": bf16,
    "int4": i4,
    "uint4": u4,
    "int2": i2,
    "uint2": u2,
    "float8_e4m3fn": f8e4m3,
    "float8_e5m2": f8e5m2,
    "float4_e2m1fn": f4e2m1,
}

_PARTS = {c64: f32, c128: f64}
_LEVELS = {"bool": 0, "unsigned": 1, "signed": 1, "float": 2, "complex": 3}


@cache
def promote(x: DType, y: DType) -> DType:
    """Promote two dtypes as the Python Array API standard (2025.12) does.

    If the standard does not define the result, the higher kind of bool, integer, float and complex
    wins, as in PyTorch and JAX: i64 with f32 is f32. Raises `DTypeError` for u64 with a signed
    integer, and for packed dtypes.
    """
    for dtype in (x, y):
        if dtype.is_storage:
            raise DTypeError(
                f"{dtype.name} can only be stored and converted; convert with astype(x, ...)"
            )
    low, high = sorted((x, y), key=lambda dtype: _LEVELS[dtype.kind])
    if _LEVELS[low.kind] != _LEVELS[high.kind] and low is not f64:
        return high
    if x is not y and (x.is_half or y.is_half):  # f32 holds every f16 and bf16 value
        return f32 if x.itemsize == y.itemsize else max(x, y, key=lambda d: d.itemsize)
    both = _OF_NUMPY[np.promote_types(x.numpy, y.numpy)]
    if both.is_float and x.is_integer:
        raise DTypeError(
            f"{x.name} and {y.name} do not promote; convert one to {y.name} or {x.name} with astype"
        )
    return both


Shape: TypeAlias = tuple[int, ...]
_INT: Final = frozenset({int})
MAX_NDIM: Final = 64  # the limit of numpy
MAX_NBYTES: Final = MAX_TERM  # a sum of two sizes fits into 64 bits
_MOST_UNCHECKED: Final = MAX_NBYTES // 16
"""Largest number of elements that fits in `MAX_NBYTES` bytes for every dtype."""
ALIGNMENT: Final = 64  # in bytes, of a tensor's address
_TYPE_TEXT = re.compile(r"([a-z]\w*)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]")


class NamedType(NamedTuple):
    """Type with a dtype and a shape that contains names of sizes.

    `TensorType("f32", ("batch", 784))` returns one.

    >>> type = ml.TensorType("f32", ("batch", 784))
    >>> type, type.at({"batch": 32})
    (f32[batch,784], f32[32,784])
    """

    dtype: DType
    shape: tuple[int | str, ...]

    @staticmethod
    def of(dtype: DType, shape: Sequence[int | str]) -> NamedType:
        """Return the type after a check of the shape and the names. Raises `ShapeError`."""
        _as_shape([0 if _is_name(n) else n for n in shape])  # type: ignore[misc]
        return NamedType(dtype, tuple(shape))

    @property
    def names(self) -> set[str]:
        """The names in the shape."""
        return {n for n in self.shape if isinstance(n, str)}

    def at(self, sizes: Mapping[str, int]) -> TensorType:
        """Return the type with these sizes in place of the names."""
        return TensorType(self.dtype, [sizes[n] if isinstance(n, str) else n for n in self.shape])

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class _Reference(weakref.ref["TensorType"]):
    """Weak reference to a type that `_interned` has under `key`."""

    __slots__ = ("key",)

    key: tuple[DType, Shape]


_interned: Final[dict[tuple[DType, Shape], _Reference]] = {}
"""Every type. A `WeakValueDictionary` would need three times as long for a new type."""


def _forget(
    reference: _Reference, *, types: Any = _interned, remove: Any = _remove_dead_weakref
) -> None:
    """Remove the type, unless another thread has created it again.

    A `WeakValueDictionary` does the same. The defaults exist even while the interpreter exits.
    """
    remove(types, reference.key)


@final
class TensorType:
    """Type of a tensor: a dtype and a shape, interned, so `TensorType("f32", (2, 3))` is unique.

    `size` is the number of elements, `nbytes` the bytes of a packed row-major tensor. `array_shape`
    is the shape of the numpy array. It differs from `shape` for packed dtypes, because their arrays
    hold bytes: (2, 2) for i4[2,4]. With names in the shape, as in `TensorType("f32", ("batch",
    784))`, the result is a `NamedType`, which `ml.measure` accepts.

    Raises `DTypeError` for an unknown dtype. Raises `ShapeError` for a negative or non-integer
    size and for more than 64 dimensions. Also raises `ShapeError` for more than 2**62 bytes
    (sizes of 0 are ignored), and if rows of a packed dtype do not fill the last byte.

        >>> type = ml.TensorType("f32", (2, 3))
        >>> type, type.size, type.nbytes
        (f32[2,3], 6, 24)

    Invalid calls:
        ml.TensorType("f99")  # DTypeError
        ml.TensorType("f32", (-1,))  # ShapeError
    """

    __slots__ = ("__weakref__", "array_shape", "dtype", "nbytes", "ndim", "shape", "size")
    dtype: DType
    shape: Shape
    ndim: int
    size: int
    nbytes: int
    array_shape: Shape

    def __new__(cls, dtype: object, shape: Sequence[int | str] = ()) -> TensorType:
        dtype = dtype if dtype.__class__ is DType else DType.of(dtype, in_bits=True)
        if type(shape) is not tuple or not _INT.issuperset(map(type, shape)):
            kinds = [kind for kind in (tuple, list) if issubclass(type(shape), kind)]
            base: Any = kinds[0] if kinds else None
            shape = shape if base is None else (*base.__iter__(shape),)
            length = None if base is None else open_length(shape)
            if length is not None and dtype.per_byte == 1:
                return length.open_type(dtype, shape)  # type: ignore[no-any-return]
            if base is not None and any(map(_is_name, shape)):
                return NamedType.of(dtype, shape)  # type: ignore[return-value]
            shape = _as_shape(shape)  # type: ignore[arg-type]
        key = dtype, shape
        reference = _interned.get(key)
        interned = None if reference is None else reference()
        if interned is not None:
            return interned
        if shape and min(shape) < 0:
            _as_shape(shape)
        return interned_type(dtype, shape)

    @staticmethod
    def opened(dtype: DType, shape: Shape, sizes: Shape) -> TensorType:
        """Return a new type of a trace, with dynamic sizes in the shape.

        `sizes` are the sizes of the current call; only `nbytes` depends on them. Raises
        `ShapeError`.

        Invalid calls:
            ml.TensorType.opened(ml.float32, (2,), (-2,))  # ShapeError
        """
        self = object.__new__(TensorType)
        self.dtype, self.shape, self.ndim = dtype, shape, len(shape)
        self.size, self.array_shape = math.prod(shape), shape
        self.nbytes = TensorType(dtype, sizes).nbytes
        return self

    def over(self, memory: Array) -> Array:
        """Return the first bytes of a contiguous array as an array of this type."""
        data = memory.reshape(-1).view(np.uint8)[: self.nbytes]
        return data.view(self.dtype.numpy).reshape(self.array_shape)

    @property
    def is_open(self) -> bool:
        """True if a size of the shape is dynamic; such a type belongs to a trace."""
        # `size` may be 0 regardless of the dynamic sizes
        return not _INT.issuperset(map(type, self.shape))

    @staticmethod
    def of(array: Array) -> TensorType:
        """Return the type of a numpy array.

        Raises `DTypeError` for a dtype that mlvm does not have, and `ShapeError` for a packed dtype
        if the array has no dimensions.

        Invalid calls:
            ml.TensorType.of(np.asarray(["text"]))  # DTypeError
            ml.TensorType.of(np.zeros((), ml.int4.numpy))  # ShapeError
        """
        dtype, shape = _OF_NUMPY.get(array.dtype) or DType.of(array.dtype), array.shape
        if dtype.per_byte > 1 and shape:
            shape = (*shape[:-1], shape[-1] * dtype.per_byte)
        return TensorType(dtype, shape)

    @staticmethod
    def parse(text: str) -> TensorType:
        """Parse the text of a type, such as `f32[2,3]`. Raises `ShapeError` or `DTypeError`.

        Invalid calls:
            ml.TensorType.parse("f99[2]")  # DTypeError
            ml.TensorType.parse("f32[-2]")  # ShapeError
        """
        match = _TYPE_TEXT.fullmatch(text.strip())
        if match is None:
            raise ShapeError(f"{text!r} is not a type; write one like f32[2,3] or i64[]")
        name, lengths = match.groups()
        try:
            shape = [int(n) for n in lengths.split(",") if n.strip()]
        except ValueError:  # Python raises for thousands of digits
            raise ShapeError(
                f"expected lengths below 2**63 in {name}[...], got more digits"
            ) from None
        return TensorType(DType.named(name), shape)

    def __call__(self, *_: object) -> NoReturn:
        raise TypeError("x.type is not a function; write x.astype(dtype) to convert x")

    def with_shape(self, shape: Sequence[int]) -> TensorType:
        """Return the type with that shape and this dtype. Raises `ShapeError`.

        Invalid calls:
            v.type.with_shape((-2,))  # ShapeError
        """
        return TensorType(self.dtype, shape)

    def with_dtype(self, dtype: DType) -> TensorType:
        """Return the type with that dtype and this shape."""
        return TensorType(dtype, self.shape)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorType, (self.dtype, self.shape)


def interned_type(dtype: DType, shape: Shape) -> TensorType:
    """Return the type of a dtype and a tuple of integers >= 0, as C code does for each new number.

    Raises `ShapeError`."""
    key = dtype, shape
    reference = _interned.get(key)
    interned = None if reference is None else reference()
    if interned is not None:
        return interned
    size, per_byte = math.prod(shape), dtype.per_byte
    if not 0 < size <= _MOST_UNCHECKED or per_byte > 1 or len(shape) > MAX_NDIM:
        _check_shape(dtype, shape)
    self = object.__new__(TensorType)
    self.dtype = dtype
    self.shape = shape
    self.ndim = len(shape)
    self.size = size
    self.nbytes = size * dtype.itemsize // per_byte
    self.array_shape = shape if per_byte == 1 else (*shape[:-1], shape[-1] // per_byte)
    created = _Reference(self, _forget)
    created.key = key
    while True:  # `setdefault` is atomic: two threads must not both create the type
        interned = _interned.setdefault(key, created)()
        if interned is not None:
            return interned
        _remove_dead_weakref(_interned, key)


def _check_shape(dtype: DType, shape: Shape) -> None:
    """Raise `ShapeError` unless a tensor can have this dtype and shape."""
    if len(shape) > MAX_NDIM:
        raise ShapeError(f"expected at most {MAX_NDIM} dimensions, got {len(shape)}")
    if math.prod([n or 1 for n in shape]) * dtype.itemsize > MAX_NBYTES:
        raise ShapeError(
            f"expected at most {MAX_NBYTES} bytes, got {dtype.name} of shape {shape}; "
            f"use a smaller shape"
        )
    per_byte = dtype.per_byte
    if per_byte > 1 and not shape:
        raise ShapeError(
            f"{per_byte} elements of {dtype.name} fill a byte, so a scalar cannot have this "
            f"dtype: compute it in a different dtype, and convert the result with astype"
        )
    if per_byte > 1 and shape[-1] % per_byte:
        raise ShapeError(
            f"{per_byte} elements of {dtype.name} fill a byte: the last length must be a "
            f"multiple of {per_byte}, and the shape is {shape}; pad it"
        )


def _is_name(n: object) -> bool:
    """Return whether an entry of a shape is the name of a size."""
    return issubclass(type(n), str) and n.isidentifier()  # type: ignore[attr-defined]


def _as_shape(lengths: Sequence[int]) -> Shape:
    try:
        shape = tuple([int(operator.index(n)) for n in lengths])
    except TypeError:
        shape = (-1,)
    if shape and min(shape) < 0:
        raise ShapeError(f"expected a shape as a tuple of integers >= 0, got {lengths!r}")
    return shape


def check_array(array: Array, type: TensorType, where: str) -> None:
    """Raise `DTypeError` or `ShapeError`, prefixed with `where`, unless the array has that type."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise DTypeError(
            f"{where}: expected an array, got {with_article(array.__class__.__name__)}"
        )
    if array.dtype != type.dtype.numpy:
        raise DTypeError(
            f"{where}: expected an array of dtype {type.dtype.numpy}, got {array.dtype}"
        )
    if array.shape != type.array_shape:
        raise ShapeError(
            f"{where}: expected an array of shape {type.array_shape}, got {array.shape}"
        )


def check_out(out: Array, type: TensorType) -> None:
    """Raise an error unless a tensor of that type can be read into the caller's array.

    Raises `DTypeError`, `ShapeError` or `ArgumentError`.
    """
    where = f"read of {type} with out="
    if isinstance(out, np.generic):
        raise DTypeError(f"{where}: expected an array, got {with_article(out.__class__.__name__)}")
    check_array(out, type, where)
    if not out.flags.writeable:
        raise ArgumentError(f"{where}: the array is read-only; pass a copy")


def aligned_zeros(nbytes: int) -> Array:
    """Return a u8 array of zeros that starts at a multiple of 64 bytes."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.__array_interface__["data"][0] % ALIGNMENT  # faster than `ctypes`
    return raw[skip : skip + nbytes]


def aligned_array(type: TensorType) -> Array:
    """Return an array of zeros of that type that starts at a multiple of 64 bytes."""
    return aligned_zeros(type.nbytes).view(type.dtype.numpy).reshape(type.array_shape)


def aligned_copy(array: Array) -> Array:
    """Return a packed copy of an array of any layout that starts at a multiple of 64 bytes."""
    copy = aligned_array(TensorType.of(array))
    np.copyto(copy, array)
    return copy


def root(array: Array) -> Array:
    """Return the array that owns the memory of this view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
