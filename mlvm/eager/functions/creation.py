"""Creation of tensors: from Python values, or from a shape and a fill value.

Signatures follow the Python Array API standard (2025.12). The default dtypes are i64, bool,
and the float dtype that `set_default_dtype` sets (initially f32). A dtype may be given as a
`DType`, a name, or any object that numpy accepts as a dtype.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    CopyError,
    DTypeError,
    GradientError,
    OperandValueError,
    brief,
    with_article,
)
from mlvm.core.ops import few
from mlvm.core.ops.half import cast, shown
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import require_representable
from mlvm.core.types import DType, TensorType, bool_, f32, f64, i64
from mlvm.eager.functions.arguments import Ints, integer, integers, type_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.constants import Scalar, constant, scalar_kind
from mlvm.eager.tensor.context import arena_on, current_arena
from mlvm.eager.tensor.default import default_of, float_dtype
from mlvm.eager.tensor.dtypes import result_type
from mlvm.eager.tensor.number import is_open
from mlvm.eager.tensor.operands import as_operand, tensor_of
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor, from_array, is_tracked
from mlvm.eager.tensor.values import kind_of, values_for
from mlvm.eager.tensor.wrapper import public
from mlvm.machines.native.extension import EXTENSION

Device: TypeAlias = VMProtocol | None
"""VM of a result; None means the current VM, or the VM of the operand."""

# --- where ---------------------------------------------------------------------------


def placed(device: Device) -> AbstractContextManager[object]:
    """Allocate results on that VM inside the block, in the arena that `arena_on` returns.

    None has no effect. Raises `ArgumentError` if the device is not a VM."""
    if device is None:
        return nullcontext()
    if not callable(getattr(device, "launch", None)):
        raise ArgumentError(
            'expected a VM as device, such as x.device, default_vm() or ml.VM(device="opencl:0"), '
            f"got {brief(device)}"
        )
    arena = arena_on(device)
    return nullcontext() if arena is current_arena() else arena.hosting()


def reused(x: Tensor, device: VMProtocol) -> Tensor:
    """Return a new tensor with the value of x, if possible over the same bytes.

    If x is on a different VM, it is copied through this machine. Raises `GradientError` if a
    gradient would flow through the copy."""
    if x.arena.vm.is_same(device):
        return alias_of(x)
    if is_tracked(x):
        raise GradientError(
            f"no gradient flows from {x.arena.vm.name} to {device.name}; move stop_gradient(x)"
        )
    return from_array(values_of(x))


# --- values copied in ----------------------------------------------------------------


@public
def asarray(
    obj: object, /, dtype: object = None, *, device: Device = None, copy: bool | None = None
) -> Tensor:
    """Convert `obj` to a tensor, in the current arena or on the VM `device`.

    - A Tensor with that dtype and VM results in a new Tensor over the same bytes, unless `copy` is
      True. Everything else is copied, or rejected if `copy` is False.

    - Python numbers and nested lists of them become bool, i64, f32 or c64; after
      `set_default_dtype(float64)` f64 or c128. Tensors in nested lists are joined, and the dtypes
      promote, as do the dtypes of numpy scalars and arrays in lists.

    - Numpy arrays, and objects with `__array__`, `__dlpack__` or a buffer, keep the dtype,
      including the bfloat16 of ml_dtypes and PyTorch. For a PyTorch tensor that requires a
      gradient, only the value is used.

    - With a `dtype`, arrays and tensors are cast as by `astype`, and Python numbers must be
      representable: 1.0 is valid for i64, and 1.5 is not. The name "i8" is rejected: it means 8
      bits here and 8 bytes in numpy.

    Raises `DTypeError` if the values or the dtype are not supported, and for a masked array;
    `OperandValueError` if an int is out of range; `ShapeError` if rows have different lengths, or
    nest more than 64 deep; `CopyError` if `copy` is False and the values must be copied. The
    result has the shape of `obj`: [n, m] for a list of n lists of m.

        >>> ml.asarray([1.0, 2.0])
        Tensor([1., 2.], f32[2])
        >>> ml.asarray([1, 2], dtype=ml.float32)
        Tensor([1., 2.], f32[2])

    Invalid calls:
        ml.asarray([1.0], copy=False)  # CopyError
        ml.asarray("text")  # DTypeError
        ml.asarray(np.array([300]), dtype="i8")  # DTypeError
        ml.asarray(np.ma.array([1.0, 2.0], mask=[0, 1]))  # DTypeError
        ml.asarray([300], dtype="u8")  # OperandValueError
        ml.asarray([[1.0], [1.0, 2.0]])  # ShapeError
    """
    target = None if dtype is None else DType.of(dtype)
    with placed(device):
        if issubclass(type(obj), Tensor):
            return _of_tensor(obj, target, device, copy)  # type: ignore[arg-type]
        if copy is False:
            raise CopyError(
                f"asarray: the values of {with_article(kind_of(obj))} must be copied into "
                f"a VM; omit "
                f"copy=False"
            )
        return tensor_of(obj, target)


def _of_tensor(x: Tensor, dtype: DType | None, device: Device, copy: bool | None) -> Tensor:
    """Convert a tensor as `asarray` does; results are allocated on `device`."""
    same_dtype = dtype is None or dtype is x.dtype
    elsewhere = None if device is None or x.arena.vm.is_same(device) else device
    if copy is False and not (elsewhere is None and same_dtype):
        target = elsewhere.name if elsewhere and same_dtype else dtype and dtype.name
        raise CopyError(f"asarray: {x.type} as {target} needs a copy; omit copy=False")
    if elsewhere is not None:
        x = reused(x, elsewhere)
    if dtype is not None and not same_dtype:
        return _converted(x, dtype)
    if elsewhere is not None:
        return x
    return op.copy(x) if copy else alias_of(x)


def _converted(x: Tensor, dtype: DType) -> Tensor:
    """Convert x as `astype` does; the ops `pack` and `unpack` convert storage dtypes."""
    if x.dtype.is_storage:
        x = op.unpack(x)
    elif dtype.is_storage and x.dtype.is_half:
        x = op.astype(x, dtype=f32)
    if dtype.is_storage:
        return op.pack(x, dtype=dtype)
    return x if x.dtype is dtype else op.astype(x, dtype=dtype)


# --- made from a description ---------------------------------------------------------


@public
def full(
    shape: Ints, fill_value: Scalar | Tensor, dtype: object = None, *, device: Device = None
) -> Tensor:
    """Return a tensor of that shape filled with `fill_value`, a number or a scalar tensor.

    The result: [*shape]. Without a dtype, it has the dtype of `asarray(fill_value)`. Raises
    `ShapeError` if a length is negative, or `fill_value` is a tensor but not a scalar; `DTypeError`
    if the value is of a higher kind than the dtype, such as 1.5 for integers; `OperandValueError`
    if an int is out of range for the dtype.

        >>> ml.full((2, 2), 7.0)
        Tensor([[7., 7.],
                [7., 7.]], f32[2,2])

    Invalid calls:
        ml.full(2, 1.5, dtype="i64")  # DTypeError
        ml.full(2, 300, dtype="u8")  # OperandValueError
        ml.full(-2, 1.0)  # ShapeError
    """
    return _filled(shape, fill_value, dtype, device)


def _filled(shape: Ints, fill_value: Scalar | Tensor, dtype: object, device: Device) -> Tensor:
    """Fill a tensor as `full` does; errors name the public caller."""
    if device is not None:
        with placed(device):
            return _filled(shape, fill_value, dtype, None)
    lengths = integers(shape, "shape")
    if dtype is None and isinstance(fill_value, np.generic):
        dtype = fill_value.dtype
    target = None if dtype is None else DType.of(dtype)
    if target is not None and target.is_storage:
        return _filled_few(TensorType(target, lengths), fill_value)
    if isinstance(fill_value, Tensor):
        return op.full(asarray(fill_value, dtype=target), shape=lengths)
    value = fill_value.item() if isinstance(fill_value, np.generic) else fill_value
    kind = scalar_kind(value.__class__)  # for a `Number`, the kind of the value
    if kind is None:
        raise DTypeError(f"expected fill_value as a number or scalar tensor, got {kind_of(value)}")
    target = target or default_of(kind)
    if kind is not complex and (target is bool_ or (kind is float and target.is_integer)):
        value = values_for(target, np.asarray(value), value).astype(target.numpy).item()
    filling, type_ = constant(value, target), TensorType(target, lengths)
    out: Tensor | None = None if EXTENSION is None else EXTENSION.filled(filling, type_)
    return op.full(filling, shape=type_.shape) if out is None else out


def _filled_few(type: TensorType, fill_value: Scalar | Tensor) -> Tensor:
    """Fill a tensor of a low-bit dtype: fill one of a wider dtype, and convert it."""
    if type.dtype not in few.FLOATS and isinstance(fill_value, (int, np.integer)):
        low, high = few.limits(type.dtype)
        if not low <= fill_value <= high:
            raise OperandValueError(
                f"the int {fill_value} is out of range for {type.dtype.name}; use a wider dtype"
            )
    whole = _filled(type.shape, fill_value, few.unpacked_dtype(type.dtype), None)
    return _converted(whole, type.dtype)


@public
def zeros(shape: Ints, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return a tensor of zeros (False for bool).

    The result: [*shape], f32 unless a dtype is given or `set_default_dtype` was called. Raises
    `ShapeError` if a length is negative or the tensor would have too many bytes; `DTypeError` if
    the dtype is unknown.

        >>> ml.zeros((2, 2), dtype=ml.int64)
        Tensor([[0, 0],
                [0, 0]], i64[2,2])

    Invalid calls:
        ml.zeros(2, dtype="f99")  # DTypeError
        ml.zeros(-2)  # ShapeError
    """
    return _described(shape, 0, dtype, device)


@public
def ones(shape: Ints, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return a tensor of ones (True for bool).

    The result: [*shape], f32 unless a dtype is given or `set_default_dtype` was called. Raises
    `ShapeError` if a length is negative or the tensor would have too many bytes; `DTypeError` if
    the dtype is unknown.

        >>> ml.ones((2, 2))
        Tensor([[1., 1.],
                [1., 1.]], f32[2,2])

    Invalid calls:
        ml.ones(2, dtype="f99")  # DTypeError
        ml.ones(-2)  # ShapeError
    """
    return _described(shape, 1, dtype, device)


@public
def empty(shape: Ints, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return zeros, like `zeros`, because uninitialised values would differ between runs.

    The result: [*shape]. Raises the errors of `zeros`.

        >>> ml.empty((2, 3)).shape
        (2, 3)

    Invalid calls:
        ml.empty(2, dtype="f99")  # DTypeError
        ml.empty(-2)  # ShapeError
    """
    return _described(shape, 0, dtype, device)


def _described(shape: Ints, value: int, dtype: object, device: Device) -> Tensor:
    """Return a tensor of zeros or ones with that dtype; None is the default float dtype."""
    target = float_dtype(dtype)
    return _filled(shape, _number(value, target), target, device)


@cache
def _number(value: int, dtype: DType) -> Scalar:
    as_made = few.unpacked_dtype(dtype) if dtype.is_storage else dtype
    number: Scalar = shown(cast(np.asarray(value), as_made)).item()
    return number


@public
def full_like(
    x: Tensor, /, fill_value: Scalar | Tensor, dtype: object = None, *, device: Device = None
) -> Tensor:
    """Return a tensor with the shape of x, filled with `fill_value`.

    The defaults are x's dtype and VM. x: [...], and so is the result. Raises the errors of `full`.

        >>> ml.full_like(ml.zeros(2), 7.0)
        Tensor([7., 7.], f32[2])

    Invalid calls:
        ml.full_like(ints, 1.5)  # DTypeError
        ml.full_like(ml.ones(2, dtype="u8"), 300)  # OperandValueError
        ml.full_like(v, v)  # ShapeError
    """
    type, where = type_of(x), x.arena.vm if device is None else device
    return _filled(type.shape, fill_value, type.dtype if dtype is None else dtype, where)


@public
def zeros_like(x: Tensor, /, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return zeros with the shape of x, and by default the same dtype and VM.

    x: [...], and so is the result. Raises `DTypeError` if the dtype is unknown.

        >>> ml.zeros_like(ml.ones(2))
        Tensor([0., 0.], f32[2])

    Invalid calls:
        ml.zeros_like(v, dtype="f99")  # DTypeError
    """
    return _like(x, 0, dtype, device)


@public
def ones_like(x: Tensor, /, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return ones with the shape of x, and by default the same dtype and VM.

    x: [...], and so is the result. Raises `DTypeError` if the dtype is unknown.

        >>> ml.ones_like(ml.zeros(2))
        Tensor([1., 1.], f32[2])

    Invalid calls:
        ml.ones_like(v, dtype="f99")  # DTypeError
    """
    return _like(x, 1, dtype, device)


@public
def empty_like(x: Tensor, /, dtype: object = None, *, device: Device = None) -> Tensor:
    """Return zeros, like `zeros_like`.

    x: [...], and so is the result. Raises `DTypeError` if the dtype is unknown.

        >>> ml.empty_like(ml.ones(3)).type
        f32[3]

    Invalid calls:
        ml.empty_like(v, dtype="f99")  # DTypeError
    """
    return _like(x, 0, dtype, device)


def _like(x: Tensor, value: int, dtype: object, device: Device) -> Tensor:
    type, where = type_of(x), x.arena.vm if device is None else device
    return _described(type.shape, value, type.dtype if dtype is None else dtype, where)


@public
def arange(
    start: float | Tensor,
    /,
    stop: float | Tensor | None = None,
    step: float | Tensor = 1,
    dtype: object = None,
    *,
    device: Device = None,
) -> Tensor:
    """Return start, start + step, start + 2 step, ... below `stop`.

    With a single number, return 0, 1, 2, ... below that number. The dtype is i64 if all numbers are
    ints, else f32.

    The result: [n]. Raises `ArgumentError` if the step is 0, or the dtype cannot hold the numbers;
    `DTypeError` if the dtype is bool. The value of a 0-d tensor is read, as by `item`, because the
    length depends on it.

        >>> ml.arange(3)
        Tensor([0, 1, 2], i64[3])
        >>> ml.arange(1.0, 2.0, 0.5)
        Tensor([1. , 1.5], f32[2])

    Invalid calls:
        ml.arange(0, 3, 0)  # ArgumentError
        ml.arange(300, dtype="u8")  # ArgumentError
        ml.arange(3, dtype="bool")  # DTypeError
    """
    bounds: list[Any] = [0, start, step] if stop is None else [start, stop, step]
    bounds = [x.item() if isinstance(x, Tensor) else x for x in bounds]
    whole = all(isinstance(value, (int, np.integer)) for value in bounds)
    target = default_of(int if whole else float) if dtype is None else DType.of(dtype)
    if target.is_integer and not whole:
        bounds = [_as_int(value) for value in bounds]
    first, end, by = bounds
    own = (
        i64 if whole and any(map(is_open, bounds)) else target.real
    )  # a float length is a constant
    with placed(device):
        numbers = op.arange(start=first, stop=end, step=by, dtype=own)
        return numbers if own is target else op.astype(numbers, dtype=target)


def _as_int(x: Any) -> Any:
    """Return an integral float as an int, and any other value unchanged."""
    return int(x) if isinstance(x, (float, np.floating)) and float(x).is_integer() else x


@public
def linspace(
    start: Tensor | complex,
    stop: Tensor | complex,
    /,
    num: int,
    *,
    dtype: object = None,
    device: Device = None,
    endpoint: bool = True,
) -> Tensor:
    """Return `num` evenly spaced numbers from `start` to `stop`.

    `stop` is excluded if `endpoint` is False. The default dtype is f32, or c64 if one of the bounds
    is complex. For an integer dtype the numbers are rounded down, as in numpy.

    Each bound may be a tensor. The default dtype is then the dtype of a float operand, and
    gradients flow to the operands.

    The result: [num], or [num, *shape] of tensors that broadcast to `shape`. Raises
    `ArgumentError` if `num` is negative, the bounds are complex and the dtype is not, or an integer
    dtype does not hold the first or last number; `DTypeError` if the dtype is bool; `ShapeError` if
    tensors do not broadcast.

        >>> ml.linspace(0.0, 1.0, 5)
        Tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], f32[5])

    Invalid calls:
        ml.linspace(0.0, 1.0, -1)  # ArgumentError
        ml.linspace(0.0, 1j, 3, dtype="f32")  # ArgumentError
        ml.linspace(0.0, 300.0, 3, dtype="u8")  # ArgumentError
        ml.linspace(0.0, 1.0, 3, dtype="bool")  # DTypeError
        ml.linspace(ml.ones(3), ml.ones(2), 3)  # ShapeError
    """
    if isinstance(start, Tensor) or isinstance(stop, Tensor):
        with placed(device):
            return _between(start, stop, num, endpoint, dtype)
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    target = default_of(complex if is_complex else float) if dtype is None else DType.of(dtype)
    with placed(device):
        if target.is_integer:
            numbers = _spaced(start, stop, num, endpoint, f64)
            ends: list[Any] = [start, stop][: 2 if num > 1 else num]  # real: the op has checked it
            if not endpoint and num > 1:
                first, last = [x.item() if isinstance(x, np.generic) else x for x in ends]
                ends[1] = last - (last - first) / num
            for number in ends:
                require_representable(math.floor(number), target)
            return op.astype(op.floor(numbers), dtype=target)
        if target.kind != "complex":
            return _spaced(start, stop, num, endpoint, target)
        first, last = complex(start), complex(stop)
        real = _spaced(first.real, last.real, num, endpoint, target.real)
        imag = _spaced(first.imag, last.imag, num, endpoint, target.real)
        return op.astype(real, dtype=target) + op.astype(imag, dtype=target) * 1j


def _spaced(start: Any, stop: Any, num: int, endpoint: bool, dtype: DType) -> Tensor:
    return op.linspace(start=start, stop=stop, num=num, endpoint=endpoint, dtype=dtype)


def _between(start: Any, stop: Any, num: int, endpoint: bool, dtype: object) -> Tensor:
    """Return the numbers of `linspace` between tensors, computed in f64 and rounded once."""
    like = start if isinstance(start, Tensor) else stop
    bounds = [as_operand(x, like) for x in (start, stop)]
    result = result_type(start, stop)
    if not result.is_inexact:
        result = default_of(float)
    target = result if dtype is None else DType.of(dtype)
    if result.kind == "complex" and target.kind != "complex":
        raise ArgumentError(f"expected real bounds for {target.name}; use real or imag")
    if target is bool_ or target.is_storage:
        raise DTypeError(f"expected a float, complex or integer dtype, got {target.name}")
    wide = f64 if result.is_float else DType.named("c128")
    first, last = (op.astype(x, dtype=wide) for x in bounds)
    shares = _spaced(0.0, 1.0, num, endpoint, f64)
    shares = op.reshape(shares, shape=(num, *[1] * max(first.ndim, last.ndim)))
    # the last share is 1, so neither bound is rounded
    numbers = first * (1.0 - shares) + last * shares
    return op.astype(op.floor(numbers) if target.is_integer else numbers, dtype=target)


@public
def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: object = None,
    device: Device = None,
) -> Tensor:
    """Return a matrix with ones on the k-th diagonal and zeros elsewhere.

    The matrix is square unless `n_cols` is given, and f32 unless a dtype is given.

    The result: [n_rows, n_cols]. Raises `ShapeError` if a length is negative; `DTypeError` if the
    dtype is unknown.

        >>> ml.eye(2)
        Tensor([[1., 0.],
                [0., 1.]], f32[2,2])

    Invalid calls:
        ml.eye(2, dtype="f99")  # DTypeError
        ml.eye(-2)  # ShapeError
    """
    n_rows = integer(n_rows, "n_rows")
    columns = n_rows if n_cols is None else integer(n_cols, "n_cols")
    target = float_dtype(dtype)
    if isinstance(k, int):
        k = max(-n_rows, min(k, columns))  # any diagonal outside the matrix is empty
    with placed(device):
        return op.eye(rows=n_rows, columns=columns, k=k, dtype=target)


pi: Final = math.pi
e: Final = math.e
inf: Final = math.inf
nan: Final = math.nan
newaxis: Final = None


def _of_dtype(dtype: DType, values: object) -> Tensor:
    """Convert values when a dtype is called.

    `ml.float32(values)` is `asarray(values, dtype=ml.float32)`."""
    return asarray(values, dtype=dtype)


DType.__call__ = _of_dtype
