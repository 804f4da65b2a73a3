"""Tensors from Python: values copied in, and tensors made from a description.

Signatures are those of the Python Array API standard (2025.12). The default dtypes are f32,
i64 and bool. Every dtype may be a `DType`, its name, or what numpy understands.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from mlvm.core.errors import (
    AttributeRefused,
    CopyRefused,
    DTypeError,
    GradientError,
    OperandValueError,
    OpError,
    ShapeError,
    brief,
)
from mlvm.core.ops.half import cast, shown
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import MAX_NDIM, Array, DType, TensorType, bf16, bool_, f32, i64
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.context import arena_on, current_arena
from mlvm.eager.tensor.tensor import (
    DEFAULTS,
    Scalar,
    Tensor,
    alias_of,
    constant,
    dtype_beside,
    from_array,
    is_tracked,
    one_op,
    operand,
    values_of,
)

_CONCAT: Final = one_op("concat")
_WAYS: Final = ("__array__", "__array_interface__", "__dlpack__")
_UNREADABLE: Final = (TypeError, ValueError, RuntimeError, BufferError)


def type_of(x: Tensor, function: str | None = None) -> TensorType:
    """The tensor's type. Raises `DTypeError`, which names the function, for anything else."""
    if not isinstance(x, Tensor):
        error = DTypeError(f"takes a tensor, not {_kind(x)}; make one with asarray")
        raise error.at(function, ()) if function else error
    return x.type


def integer(value: int, name: str, function: str) -> int:
    """An int. Raises `AttributeRefused`, which names the value and the function, for anything else
    and for one of more than 64 bits."""
    try:
        if -(2**63) <= (n := operator.index(value)) < 2**63:
            return n
    except TypeError:
        pass
    raise AttributeRefused(f"{name} is an int, not {brief(value)}").at(function, ())


def integers(value: int | Sequence[int], name: str, function: str | None = None) -> tuple[int, ...]:
    """An int, or a sequence of ints, as a tuple. Raises `AttributeRefused` for anything else, and
    for an int of more than 64 bits. The error names the value and the function."""
    try:
        several = value if isinstance(value, (tuple, list)) else (value,)
        ints = tuple(map(operator.index, several))
        if all(-(2**63) <= n < 2**63 for n in ints):
            return ints
    except TypeError:
        pass
    error = AttributeRefused(f"{name} is an int or a tuple of ints, not {brief(value)}")
    raise error.at(function, ()) if function else error


# --- where ---------------------------------------------------------------------------


def placed(
    device: VMProtocol | None, function: str | None = None
) -> AbstractContextManager[object]:
    """Inside the block results are made on that VM, in the arena that `arena_on` names; for None
    where they are made anyway. Raises `AttributeRefused`, which names the function, for no VM."""
    if device is None:
        return nullcontext()
    if not callable(getattr(device, "launch", None)):
        error = AttributeRefused(
            'a device is a VM, such as x.device, default_vm() or ml.VM(device="cuda:0"), not '
            f"{brief(device)}"
        )
        raise error.at(function, ()) if function else error
    arena = arena_on(device)
    return nullcontext() if arena is current_arena() else arena.hosting()


def reused(x: Tensor, device: VMProtocol) -> Tensor:
    """A new tensor with the value of x: over the same bytes, or where x is not on that VM, a copy
    through this machine. Raises `GradientError` for a copy that a gradient would flow through."""
    if x.arena.vm.is_same(device):
        return alias_of(x)
    if is_tracked(x):
        raise GradientError(
            f"no gradient flows from {x.arena.vm.name} to {device.name}; move stop_gradient(x)"
        )
    return from_array(values_of(x))


# --- values copied in ----------------------------------------------------------------


def asarray(
    obj: object,
    /,
    dtype: object = None,
    *,
    device: VMProtocol | None = None,
    copy: bool | None = None,
) -> Tensor:
    """A tensor of the values of `obj`, in the current arena or on the VM `device`.

    Of a Tensor of that dtype and on that VM it is a new Tensor over the same bytes, unless `copy`
    is True. Everything else is copied, and refused if `copy` is False. From Python numbers and
    nested lists of them bools become bool, ints i64, floats f32, complex numbers c64; tensors in
    nested lists are joined, and their dtypes promote; numpy arrays, and whatever has `__array__`,
    `__dlpack__` or a buffer, keep their dtype, also the bfloat16 of ml_dtypes and PyTorch. Of a
    PyTorch tensor that requires a gradient it is the value. With a `dtype`, arrays and tensors are
    cast as by `astype`, and Python numbers must be values of it.

    Raises `DTypeError` for other values and other dtypes, `OperandValueError` for an int that is
    out of range, `ShapeError` for rows of different lengths, or nested more than 64 deep,
    `CopyRefused` where `copy` is False. The result has the shape of `obj`: [n, m] for a list of n
    lists of m.

        >>> ml.asarray([1.0, 2.0])
        Tensor([1., 2.], f32[2])
        >>> ml.asarray([1, 2], dtype=ml.float32)
        Tensor([1., 2.], f32[2])
    """
    wanted = None if dtype is None else DType.of(dtype)
    if isinstance(obj, Tensor):
        with placed(device, "asarray"):
            return _of_tensor(obj, wanted, device, copy)
    if copy is False:
        raise CopyRefused(
            f"asarray: the values of a {_kind(obj)} are copied into a VM, which copy=False forbids"
        )
    in_memory = obj if any(hasattr(obj, way) for way in _WAYS) else _buffer(obj)
    if in_memory is not None:
        array = array_of(in_memory)
        own = DType.of(array.dtype)
        target = wanted or own
        if own.kind == "complex" and target.kind not in ("complex", "bool"):
            raise DTypeError(f"complex numbers do not become {target}; take real or imag")
    elif isinstance(obj, (list, tuple)) and (first := _first_tensor(obj)) is not None:
        with placed(device, "asarray"):
            joined = _joined(obj, first)
            return joined if wanted in (None, joined.dtype) else op.astype(joined, dtype=wanted)
    else:
        array = _of_numbers(obj)
        target = wanted or DEFAULTS[type(array.dtype.type(0).item())]
        _require_values(array, target)
    # a value out of range becomes what astype makes of it
    with np.errstate(all="ignore"), placed(device, "asarray"):
        return from_array(cast(array, target))


def listed_beside(values: object, dtype: DType) -> DType | None:
    """The dtype of a list of Python numbers beside a tensor of that dtype: as `dtype_beside` has it
    for the one of the highest kind. An empty list has the tensor's dtype. None for what is no list,
    and where there are arrays or tensors in it: these keep their own."""
    if not isinstance(values, (list, tuple)):
        return None
    kinds = set()
    for leaf in _leaves(values):
        number = leaf.item() if isinstance(leaf, np.generic) else leaf
        kind = next((kind for kind in DEFAULTS if isinstance(number, kind)), None)
        if kind is None:
            return None
        kinds.add(kind)
    highest = next((kind for kind in reversed(DEFAULTS) if kind in kinds), None)
    return dtype if highest is None else dtype_beside(highest, dtype)


def _of_tensor(
    x: Tensor, dtype: DType | None, device: VMProtocol | None, copy: bool | None
) -> Tensor:
    """`asarray` of a tensor, where results are made on that VM."""
    same_dtype = dtype in (None, x.dtype)
    elsewhere = None if device is None or x.arena.vm.is_same(device) else device
    if copy is False and not (elsewhere is None and same_dtype):
        target = dtype if not same_dtype else elsewhere and elsewhere.name
        raise CopyRefused(f"asarray: copy=False forbids what {x.type} as {target} takes")
    if elsewhere is not None:
        x = reused(x, elsewhere)
    if not same_dtype:
        return op.astype(x, dtype=dtype)
    if elsewhere is not None:
        return x
    return op.copy(x) if copy else alias_of(x)


def _buffer(obj: Any) -> memoryview | None:
    """The memory of an object that Python itself can look into, such as an `array.array`."""
    try:
        return memoryview(obj)
    except (TypeError, ValueError, BufferError):
        return None


def array_of(obj: Any) -> Array:
    """An array of the values of what has them in memory."""
    try:
        only_dlpack = hasattr(obj, "__dlpack__") and not hasattr(obj, "__array__")
        array = np.from_dlpack(obj) if only_dlpack else np.asarray(_readable(obj))
    except _UNREADABLE as error:
        raise DTypeError(f"the values of this {_kind(obj)} cannot be read: {error}") from None
    is_bf16 = array.dtype.name == "bfloat16"  # of ml_dtypes
    return array.view(bf16.numpy) if is_bf16 else array


def _readable(obj: Any) -> Any:
    """A tensor of PyTorch as something that numpy reads: without its gradient, bfloat16 by bits."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return obj
    value = obj.detach().resolve_conj().resolve_neg()
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy(force=True).view(bf16.numpy)
    return value


def _of_numbers(obj: object) -> Array:
    """A bool, integer or f64 array of a Python number or nested lists of them."""
    try:
        array = np.array(obj)
    except ValueError as error:
        raise ShapeError(f"these lists are no tensor: {error}") from None
    except (TypeError, RuntimeError) as error:  # of what PyTorch does not convert by itself
        raise DTypeError(
            f"the values of this {_kind(obj)} cannot be read: {error}; join its tensors first, as "
            f"torch.stack does"
        ) from None
    if array.dtype.kind == "O" and all(isinstance(x, int) for x in _leaves(obj)):
        most = max(_leaves(obj), key=abs)  # type: ignore[arg-type]
        raise OperandValueError(
            f"the int {brief(most)} does not fit into any integer dtype; write it as a float"
        )
    if array.dtype.kind not in "biufc":
        raise DTypeError(
            f"asarray takes arrays, and Python's numbers in nested lists, whose values "
            f"have a dtype in common; from this {_kind(obj)} numpy makes {array.dtype}"
        )
    if array.size and array.dtype.kind == "f" and all(isinstance(x, int) for x in _leaves(obj)):
        try:
            return np.array(obj, np.uint64)
        except OverflowError:
            raise OperandValueError(
                "no integer dtype holds ints of 2**63 and more beside negative ones"
            ) from None
    return array


def _first_tensor(obj: object) -> Tensor | None:
    return next((leaf for leaf in _leaves(obj) if isinstance(leaf, Tensor)), None)


def _joined(obj: object, beside: Tensor) -> Tensor:
    """Nested lists of tensors, and of numbers as they are beside a tensor, as one tensor."""
    if not isinstance(obj, (list, tuple)):
        return operand(obj, beside, _CONCAT)
    rows = [_joined(each, beside) for each in obj]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if len(shapes) != 1:
        raise ShapeError(f"these lists are no tensor: their rows have shapes {brief(shapes)}")
    return op.concat(*[op.reshape(row, shape=(1, *row.shape)) for row in rows], axis=0)


def _leaves(obj: object, depth: int = 0) -> Iterator[object]:
    if isinstance(obj, (list, tuple)):
        if depth == MAX_NDIM:
            raise ShapeError(f"lists nested more than {MAX_NDIM} deep are no tensor")
        for each in obj:
            yield from _leaves(each, depth + 1)
    else:
        yield obj


def _require_values(array: Array, dtype: DType) -> None:
    """Raise unless Python's numbers in `array` are values of the dtype, which rounds floats."""
    if array.dtype.kind == "c" and dtype.kind != "complex":
        raise DTypeError(f"complex numbers do not become {dtype}; take real or imag")
    if dtype.is_inexact or not array.size:
        return
    if array.dtype.kind == "f":
        raise DTypeError(f"floats do not become {dtype}; convert them with astype")
    low, high = (0, 1) if dtype is bool_ else _limits(dtype)
    for value in (int(array.min()), int(array.max())):
        if not low <= value <= high:
            raise OperandValueError(f"the int {value} does not fit into {dtype}: {low} .. {high}")


def _limits(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    return int(info.min), int(info.max)


def _kind(x: object) -> str:
    return type(x).__name__


# --- made from a description ---------------------------------------------------------


def full(
    shape: int | Sequence[int],
    fill_value: Scalar | Tensor,
    dtype: object = None,
    *,
    device: VMProtocol | None = None,
) -> Tensor:
    """A tensor of that shape, every element of it `fill_value`: a number, or a scalar tensor.

    The result: [*shape], f32, i64 or bool as the number is unless a dtype is named. Raises
    `ShapeError` for a negative length and a tensor that is no scalar, `DTypeError` for a value of a
    higher kind than the dtype, such as a float for integers, `OperandValueError` for an int out of
    its range.

        >>> ml.full((2, 2), 7.0)
        Tensor([[7., 7.],
                [7., 7.]], f32[2,2])
    """
    return _filled("full", shape, fill_value, dtype, device)


def _filled(
    name: str,
    shape: int | Sequence[int],
    fill_value: Scalar | Tensor,
    dtype: object,
    device: VMProtocol | None,
) -> Tensor:
    """`full` for the function of that name, which its errors name."""
    if device is not None:
        with placed(device, name):
            return _filled(name, shape, fill_value, dtype, None)
    lengths = integers(shape, "shape", name)
    wanted = None if dtype is None else DType.of(dtype)
    if isinstance(fill_value, Tensor):
        return op.full(asarray(fill_value, dtype=wanted), shape=lengths)
    value = fill_value.item() if isinstance(fill_value, np.generic) else fill_value
    kind = value.__class__  # of a `Number`, that of the number it stands for
    if kind not in DEFAULTS:
        raise DTypeError(f"fill_value must be a number or scalar tensor, not {_kind(value)}").at(
            name, ()
        )
    target = wanted or DEFAULTS[kind]
    try:
        filling, type_ = constant(value, target), TensorType(target, lengths)
    except OpError as error:
        raise error.at(name, ()) from None
    return op.full(filling, shape=type_.shape)


def zeros(
    shape: int | Sequence[int], dtype: object = None, *, device: VMProtocol | None = None
) -> Tensor:
    """A tensor of zeros, or of False; f32 unless another dtype is named.

    The result: [*shape]. Raises `ShapeError` for a negative length and for more bytes than a tensor
    can have, `DTypeError` for an unknown dtype.

        >>> ml.zeros((2, 2), dtype=ml.int64)
        Tensor([[0, 0],
                [0, 0]], i64[2,2])
    """
    return _described("zeros", shape, 0, dtype, device)


def ones(
    shape: int | Sequence[int], dtype: object = None, *, device: VMProtocol | None = None
) -> Tensor:
    """A tensor of ones, or of True; f32 unless another dtype is named.

    The result: [*shape]. Raises `ShapeError` for a negative length and for more bytes than a tensor
    can have, `DTypeError` for an unknown dtype.

        >>> ml.ones((2, 2))
        Tensor([[1., 1.],
                [1., 1.]], f32[2,2])
    """
    return _described("ones", shape, 1, dtype, device)


def empty(
    shape: int | Sequence[int], dtype: object = None, *, device: VMProtocol | None = None
) -> Tensor:
    """The same as `zeros`: values that nobody chose would differ from run to run.

    The result: [*shape]. Raises what `zeros` raises.

        >>> ml.empty((2, 3)).shape
        (2, 3)
    """
    return _described("empty", shape, 0, dtype, device)


def _described(
    name: str,
    shape: int | Sequence[int],
    value: int,
    dtype: object,
    device: VMProtocol | None,
) -> Tensor:
    """A tensor of zeros or ones of that dtype, f32 for None."""
    if dtype.__class__ is int:  # the next length of the shape, as in other libraries
        lengths = f"({', '.join(map(str, (*integers(shape, 'shape', name), dtype)))})"
        raise AttributeRefused(f"the shape is one argument: write {name}({lengths})").at(name, ())
    wanted = f32 if dtype is None else DType.of(dtype)
    number: Scalar = shown(cast(np.asarray(value), wanted)).item()
    return _filled(name, shape, number, wanted, device)


def full_like(
    x: Tensor,
    /,
    fill_value: Scalar | Tensor,
    dtype: object = None,
    *,
    device: VMProtocol | None = None,
) -> Tensor:
    """`full` with the shape of x, and its dtype and VM unless others are named.

    x: [...], and so is the result. Raises what `full` raises.

        >>> ml.full_like(ml.zeros(2), 7.0)
        Tensor([7., 7.], f32[2])
    """
    type, where = type_of(x), x.arena.vm if device is None else device
    wanted = type.dtype if dtype is None else dtype
    return _filled("full_like", type.shape, fill_value, wanted, where)


def zeros_like(x: Tensor, /, dtype: object = None, *, device: VMProtocol | None = None) -> Tensor:
    """Zeros with the shape of x, and its dtype and VM unless others are named.

    x: [...], and so is the result. Raises `DTypeError` for an unknown dtype.

        >>> ml.zeros_like(ml.ones(2))
        Tensor([0., 0.], f32[2])
    """
    return _like("zeros_like", x, 0, dtype, device)


def ones_like(x: Tensor, /, dtype: object = None, *, device: VMProtocol | None = None) -> Tensor:
    """Ones with the shape of x, and its dtype and VM unless others are named.

    x: [...], and so is the result. Raises `DTypeError` for an unknown dtype.

        >>> ml.ones_like(ml.zeros(2))
        Tensor([1., 1.], f32[2])
    """
    return _like("ones_like", x, 1, dtype, device)


def empty_like(x: Tensor, /, dtype: object = None, *, device: VMProtocol | None = None) -> Tensor:
    """The same as `zeros_like`.

    x: [...], and so is the result. Raises `DTypeError` for an unknown dtype.

        >>> ml.empty_like(ml.ones(3)).type
        f32[3]
    """
    return _like("empty_like", x, 0, dtype, device)


def _like(name: str, x: Tensor, value: int, dtype: object, device: VMProtocol | None) -> Tensor:
    type, where = type_of(x), x.arena.vm if device is None else device
    return _described(name, type.shape, value, type.dtype if dtype is None else dtype, where)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    dtype: object = None,
    *,
    device: VMProtocol | None = None,
) -> Tensor:
    """start, start + step, start + 2 step, ... below `stop`; with one number, 0, 1, 2, ... below
    that. The dtype is i64 for ints, f32 if there is a float.

    The result: [n]. Raises `AttributeRefused` for a step of 0 and for numbers that the dtype does
    not have, `DTypeError` for bool and complex dtypes.

        >>> ml.arange(3)
        Tensor([0, 1, 2], i64[3])
        >>> ml.arange(1.0, 2.0, 0.5)
        Tensor([1. , 1.5], f32[2])
    """
    first, end = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(value, (int, np.integer)) for value in (first, end, step))
    wanted = (i64 if whole else f32) if dtype is None else DType.of(dtype)
    with placed(device, "arange"):
        return op.arange(start=first, stop=end, step=step, dtype=wanted)


def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: object = None,
    device: VMProtocol | None = None,
    endpoint: bool = True,
) -> Tensor:
    """`num` evenly spaced numbers from `start` up to `stop`, which is left out without `endpoint`.
    The dtype is f32, or c64 if one of the two is complex, unless another is named.

    The result: [num]. Raises `AttributeRefused` for a negative `num` and for complex bounds of
    floats, `DTypeError` for a dtype of integers or bools.

        >>> ml.linspace(0.0, 1.0, 5)
        Tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], f32[5])
    """
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    wanted = DEFAULTS[complex if is_complex else float] if dtype is None else DType.of(dtype)
    with placed(device, "linspace"):
        if wanted.kind != "complex":
            return _spaced(start, stop, num, endpoint, wanted)
        first, last = complex(start), complex(stop)
        real = _spaced(first.real, last.real, num, endpoint, wanted.real)
        imag = _spaced(first.imag, last.imag, num, endpoint, wanted.real)
        return op.astype(real, dtype=wanted) + op.astype(imag, dtype=wanted) * 1j


def _spaced(start: Any, stop: Any, num: int, endpoint: bool, dtype: DType) -> Tensor:
    return op.linspace(start=start, stop=stop, num=num, endpoint=endpoint, dtype=dtype)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: object = None,
    device: VMProtocol | None = None,
) -> Tensor:
    """A matrix, square unless `n_cols` is given, of ones on the k-th diagonal and zeros; f32 unless
    another dtype is named.

    The result: [n_rows, n_cols]. Raises `ShapeError` for a negative length, `DTypeError` for an
    unknown dtype.

        >>> ml.eye(2)
        Tensor([[1., 0.],
                [0., 1.]], f32[2,2])
    """
    n_rows = integer(n_rows, "n_rows", "eye")
    columns = n_rows if n_cols is None else integer(n_cols, "n_cols", "eye")
    wanted = f32 if dtype is None else DType.of(dtype)
    if isinstance(k, int):
        k = max(-n_rows, min(k, columns))  # a diagonal beyond is empty, however far
    with placed(device, "eye"):
        return op.eye(rows=n_rows, columns=columns, k=k, dtype=wanted)


pi: Final = math.pi
e: Final = math.e
inf: Final = math.inf
nan: Final = math.nan
newaxis: Final = None
