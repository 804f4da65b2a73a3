"""The class of eager tensors.

Methods that need higher layers are assigned there: operators (`operators.py`), functions that are
also methods (`functions/methods.py`), indexing (`functions/indexing.py`) and exchange with other
libraries (`interop/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Final, NoReturn

import numpy as np

from mlvm.arena.arena import STALE, Allocation
from mlvm.arena.context import Tape, current
from mlvm.core.errors import (
    CaptureError,
    DTypeError,
    GradientError,
    HandleError,
    LengthError,
    ShapeError,
    brief,
)
from mlvm.core.ops import half
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, DType, Shape, TensorType
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.methods import Methods
from mlvm.eager.tensor.number import Size
from mlvm.eager.tensor.reading import closed_vm_of, note_read, values_of, write
from mlvm.machines.native.extension import EXTENSION


def _unread(_: Tensor) -> None:
    return None


_scalar: Final[Callable[[Tensor], bool | int | float | None]] = (
    _unread if EXTENSION is None else EXTENSION.scalar
)
"""Function that reads the only element of an untracked tensor without a launch; returns None if
`item` must read it."""

_array: Final[Callable[[Tensor, Callable[..., Array]], Array | None]] = (
    (lambda *_: None) if EXTENSION is None else EXTENSION.array
)
"""Function that reads the elements of an untracked tensor like `numpy`, or returns None."""

_nested: Final[Callable[[Tensor], Any]] = _unread if EXTENSION is None else EXTENSION.nested
"""Function that reads the elements of a small untracked tensor like `tolist`, or returns None."""


class Tensor(Methods, Allocation):
    """An n-dimensional value on a VM, with the operators of the Array API standard.

    `asarray`, the creation functions, and every op return tensors. The bytes belong to an arena.
    They are freed when Python drops the last reference, or when the arena is reset; using the
    tensor after a reset raises `StaleTensorError`.

    `x[i] = v`, `x += y` and `out=x` update x in place and never a different value. If a gradient, a
    view or a capture still needs the old value, the old value stays in place and x moves to new
    memory (copy on write). Functions that change only the shape therefore copy no bytes: the result
    shares the bytes of x until one of the two is updated.

    Properties: `shape dtype type ndim size nbytes itemsize device`. Memory: `arena handle base
    views is_part`. Values: `item tolist numpy`. Copies and views: `T mT real imag`, `to_device
    astype copy clip conj round abs`, `reshape flatten ravel permute transpose swapaxes`, `squeeze
    repeat roll flip moveaxis broadcast_to tril triu`, `take nonzero argsort topk at`. Reductions:
    `sum mean var std prod min max argmin argmax`, `all any logsumexp count_nonzero`. Elementwise:
    `exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal pow`. Trigonometry: `sin cos tan
    asin acos atan atan2 sinh cosh tanh asinh acosh atanh hypot`. Neural: `sigmoid relu softmax
    log_softmax erf logaddexp`. Rounding and tests: `floor ceil trunc sign signbit copysign maximum
    minimum isnan isinf isfinite`. Operators by name: `add subtract multiply divide floor_divide
    remainder negative matmul outer diff`. Comparisons: `less less_equal greater greater_equal
    not_equal`. Logic: `logical_and logical_or logical_xor logical_not`. Bits: `bitwise_and
    bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift`. Other functions are only in
    `ml`.

        >>> x = ml.asarray([[1.0, 2.0]])
        >>> x.shape, x.dtype, x.sum()
        ((1, 2), f32, Tensor(3., f32[]))

    Invalid calls:
        stale + 1.0  # StaleTensorError
    """

    __slots__ = ()

    tape: Tape | None
    node: int

    def __init__(self, *_: object, **__: object) -> None:  # an arena creates tensors with __new__
        raise TypeError("Tensor() cannot be called; create a tensor with ml.asarray or ml.zeros")

    def prepare(self) -> None:
        self.tape = None

    @property
    def shape(self) -> Shape:
        """The length of each axis, outermost first; () for a scalar."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements, such as `ml.float32`."""
        return self.type.dtype

    @property
    def __numpy_dtype__(self) -> np.dtype[np.generic]:
        """The numpy dtype that `numpy.result_type(x)` uses, in numpy 2.4 and later."""
        return self.dtype.__numpy_dtype__

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.type.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        size = self.type.size
        return Size(size) if type(size) is int else size  # a dynamic size is returned unchanged

    @property
    def nbytes(self) -> int:
        """The total size of the elements in bytes."""
        type = self.type
        return type.size * type.dtype.itemsize if type.is_open else type.nbytes

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self.dtype.itemsize

    @property
    def device(self) -> VMProtocol:
        """The VM that stores it."""
        vm: VMProtocol = self.arena.vm.stands_for
        return vm

    # --- values ---

    def numpy(self) -> Array:
        """Return a copy as a numpy array.

        bf16, which numpy does not support, becomes f32, and low-bit dtypes become i8, u8 or f32.
        Raises `StaleTensorError` after the tensor was freed.

        Invalid calls:
            stale.numpy()  # StaleTensorError
        """
        array = _array(self, np.empty)
        if array is not None:
            return array
        note_read(self)
        return half.shown(values_of(self))

    def item(self) -> Any:
        """Return the only element as a Python scalar.

        Raises `ShapeError` unless there is exactly one element, and `GradientError` if a gradient
        flows through x.

        Invalid calls:
            v.item()  # ShapeError
            ml.grad(lambda x: x * x.item())(ml.asarray(1.0))  # GradientError
        """
        return self._number("item")

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python scalars; for a 0-d tensor only the scalar.

        Raises `GradientError` if a gradient flows through x.

        Invalid calls:
            ml.grad(lambda x: ml.sum(x * x.tolist()))(v)  # GradientError
        """
        values = _nested(self)
        if values is not None:
            return values
        array = self.numpy()
        self._require_untracked()
        return array.tolist()

    def _number(self, function: str) -> Any:
        """Return the only element as a Python scalar, for `function`, which errors name."""
        number = _scalar(self)
        if number is not None:
            return number
        self._require_one(function, "only one element is a scalar; take x.tolist()")
        array = self.numpy()
        self._require_untracked()
        return array.item()

    def _require_untracked(self) -> None:
        """Raise `GradientError` if a gradient flows through x: Python numbers are constants.

        `repr` and `format` do not call this method."""
        if is_tracked(self):
            raise GradientError(
                f"Python numbers are constants, but a gradient flows through this {self.type}: use "
                f"functions of ml, such as ml.sqrt(x), or convert ml.stop_gradient(x); with "
                f"has_aux=True the function can return values in addition to the loss"
            )

    __array_namespace__: ClassVar[Callable[..., ModuleType]]
    __array_ufunc__: ClassVar[Callable[..., Tensor]]
    __array__: ClassVar[Callable[..., Array]]
    __dlpack__: ClassVar[Callable[..., Any]]
    __dlpack_device__: ClassVar[Callable[[Tensor], tuple[int, int]]]
    __copy__: ClassVar[Callable[[Tensor], Tensor]]
    _repr_html_: ClassVar[Callable[[Tensor], str]]
    __deepcopy__: ClassVar[Callable[[Tensor, object], Tensor]]
    to_device: ClassVar[Callable[..., Tensor]]
    """Conversions to other libraries and notebooks, copies and pickles: `mlvm.eager.interop` adds
    them."""

    __pos__: ClassVar[Callable[[Tensor], Tensor]]
    __getitem__: ClassVar[Callable[[Tensor, Any], Tensor]]
    __setitem__: ClassVar[Callable[[Tensor, Any, Any], None]]
    __delitem__: ClassVar[Callable[[Tensor, Any], NoReturn]]
    """+x, x[key] and x[key] = values: `mlvm.eager.functions` adds them."""

    __hash__ = Allocation.__hash__

    def __bool__(self) -> bool:
        number = _scalar(self)
        if number is not None:
            return bool(number)
        self._require_one(
            "bool",
            "only one element is true or false; take ml.all(x) or ml.any(x), or write &, | and ~ "
            "instead of and, or and not",
        )
        return bool(self._number("bool"))

    def __int__(self) -> int:
        return int(self._number("int"))

    def __float__(self) -> float:
        return float(self._number("float"))

    def __complex__(self) -> complex:
        return complex(self._number("complex"))

    def __round__(self, ndigits: int | None = None) -> Any:
        self._require_one("round", "takes one element; write ml.round(x, decimals)")
        return round(self._number("round"), ndigits)

    def __trunc__(self) -> int:
        return int(self._number("trunc"))

    def __format__(self, spec: str) -> str:
        """Format the tensor like `str`; with a format such as `.4f`, format the only element."""
        if not spec:
            return str(self)
        text = 'takes one element; write f"{x}", or numpy.array2string(x.numpy(), precision=3)'
        self._require_one("format", text)
        return format(self.numpy().item(), spec)

    def _require_one(self, function: str, reason: str) -> None:
        if self.type.size != 1:
            raise ShapeError(reason).at(function, (self.type,))

    def __bytes__(self) -> bytes:
        return self.numpy().tobytes()

    def __contains__(self, value: Any) -> bool:
        equal: object = self == value
        return isinstance(equal, Tensor) and bool(equal.numpy().any())

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise DTypeError(
                f"expected an integer tensor as an index, got {self.type}; convert with astype(x, "
                "'int64')"
            ).at("index", (self.type,))
        return int(self._number("index"))

    def __len__(self) -> int:
        if not self.shape:
            raise LengthError("a scalar tensor has no length; use x.size").at("len", (self.type,))
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise LengthError(
                "a scalar tensor has no rows to iterate over; for a number of iterations, use "
                "range(x), or ml.fori_loop in a captured function"
            ).at("iter", (self.type,))
        # neither a variable nor the generator refers to a row while a loop uses it
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        if self.handle == STALE:
            return f"<{str(self.stale()).partition(': ')[2].partition(';')[0]}>"
        where = "" if self.arena.name == "default" else f", arena={self.arena.name!r}"
        try:
            values = self.numpy()
        except HandleError:
            closed = closed_vm_of(self)
            if closed is not None:
                return f"<{self.type}{where}: {closed}>"
            return f"<dry {self.type}{where}>"  # the tensor is alive, but a dry VM has no values
        except CaptureError:  # no value exists before the launch of the program
            recorder = current().recorder
            if recorder is not None:
                recorder.accept_text()
            return f"<captured {self.type}>"
        body = np.array2string(values, prefix="Tensor(", separator=", ", threshold=200)
        return f"Tensor({body}, {self.type}{where})"


def is_tracked(x: Tensor) -> bool:
    """Return whether the current tape tracks x."""
    return x.tape is not None and x.tape is current().tape


def untracked(x: Tensor) -> Tensor:
    """Return a new tensor over the bytes of x that no tape tracks."""
    out: Tensor | None = None if EXTENSION is None else EXTENSION.view_as(x, x.type)
    if out is None:
        out = x.arena.view(x, x.type, Tensor)
        out.tape = None
    return out


def described(x: object) -> str:
    """Describe an argument in a message: a tensor by type, any other object by value."""
    return str(x.type) if isinstance(x, Tensor) else brief(x)


def from_array(array: Array) -> Tensor:
    """Return a new tensor in the current arena with a copy of the array."""
    type = TensorType.of(array)
    copied: Tensor | None = None if EXTENSION is None else EXTENSION.copied(type, array)
    if copied is not None:
        return copied
    out = current_arena().alloc(type, Tensor)
    write(out, array)
    out.tape = None
    return out
