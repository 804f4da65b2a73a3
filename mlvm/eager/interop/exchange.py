"""Exchange of tensors with other libraries: DLPack, arrays, copies and pickles.

A VM of this process lends the memory of a tensor: numpy or PyTorch gets a read-only array over the
same bytes. The array counts as a view: an update of the tensor moves it, and the array keeps the
old values. The array may outlive the tensor, a reset of its arena, and the arena. Values from other
libraries are copied, because they may be written to.

DLPack: https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import STALE
from mlvm.arena.lending import Loan, can_lend
from mlvm.core.errors import (
    CaptureError,
    CopyError,
    DLPackError,
    DTypeError,
    ExchangeError,
    GradientError,
    HandleError,
    brief,
    with_article,
)
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, bf16
from mlvm.eager.functions.creation import asarray, placed
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.context import arena_on
from mlvm.eager.tensor.copying import LeafMemo
from mlvm.eager.tensor.pickling import public_name
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor, is_tracked
from mlvm.eager.tensor.wrapper import hinted

_CPU: Final = (1, 0)  # kDLCPU


class _Lent:
    """Base object of arrays over a tensor's memory and their views; it owns the loan."""

    def __init__(self, memory: Array, view: Tensor, loan: Loan) -> None:
        address, _ = memory.__array_interface__["data"]
        self.__array_interface__ = {**memory.__array_interface__, "data": (address, True)}
        self._keepalive = memory, view
        self._loan = loan

    def __del__(self) -> None:
        self._loan.end()


def lent(x: Tensor) -> Array | None:
    """Return a read-only array over the bytes of x; None if they are not accessible.

    They are not accessible on a remote VM or a VM without bytes, in a trace, and if the memory does
    not belong to the tensor. Raises `StaleTensorError` if x was freed."""
    if x.handle == STALE:
        raise x.stale()
    borrow = getattr(x.arena.vm, "borrow", None)
    if borrow is None or not can_lend(x):
        return None
    view = stop_gradient(x)  # an update of x does not move this alias
    loan = Loan(view)
    try:
        return np.asarray(_Lent(borrow(view.handle), view, loan))
    except HandleError:
        loan.end()
        if view.root.region is None:
            raise view.stale() from None
        return None
    except BaseException:
        loan.end()
        raise


def _refuse_copy(x: Tensor, why: str) -> CopyError:
    return CopyError(
        f"{x.type} on {x.arena.vm.name} {why}, and copy=False forbids to copy it; omit copy=False"
    )


def _require_untracked(x: Tensor) -> None:
    """Raise `GradientError` if a gradient flows through x.

    A different library would compute with the values, and the gradient would be incomplete."""
    if is_tracked(x):
        raise GradientError(
            f"another library cannot compute gradients, and a gradient flows through this "
            f"{x.type}: use functions of ml, or pass stop_gradient(x) or x.numpy() as a constant"
        )


def as_array(x: Tensor, dtype: Any = None, copy: bool | None = None) -> Array:
    """Implement `numpy.asarray(x)`: a read-only copy, since a write to it would not reach x.

    The default dtype for bf16 is f32. `numpy.array(x)`, with `copy=True`, returns a writable array;
    `copy=False` returns a read-only array over the bytes of x. Raises `CopyError` if they are not
    accessible; `GradientError` if a gradient flows through x; `StaleTensorError` if x was freed."""
    if x.tape is not None:
        _require_untracked(x)
    if copy is not False:
        is_own = dtype is not None and x.dtype is bf16 and np.dtype(dtype) == bf16.numpy
        array = values_of(x) if is_own else x.numpy()
        array = array if dtype is None else array.astype(dtype, copy=False)
        if copy is None:
            array.flags.writeable = False  # faster than `setflags`
        return array
    if x.dtype is bf16:
        raise _refuse_copy(x, "has a dtype that numpy lacks")
    if dtype is not None and np.dtype(dtype) != x.dtype.numpy:
        raise _refuse_copy(x, f"does not have dtype {np.dtype(dtype)}")
    memory = lent(x)
    if memory is None:
        raise _refuse_copy(x, "has no memory in this process that can be shared")
    return memory


def dlpack(
    x: Tensor,
    /,
    *,
    stream: None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Return a DLPack capsule in host memory.

    It refers to the bytes of x, read-only, if the VM lends them and the consumer's `max_version`
    supports it; otherwise to a copy.

    Raises `CopyError` if `copy` is False and a copy is needed; `ExchangeError` if a stream or
    a different device is given, or x is bf16 or has no values (on a dry VM, or in a captured
    function); `GradientError` if a gradient flows through x; `StaleTensorError` if x was freed.
    """
    _require_untracked(x)
    if x.dtype is bf16:
        raise ExchangeError(
            f"{x.type}: numpy, which creates the capsules, lacks bfloat16; pass astype(x, float32)"
        )
    if stream is not None:
        raise ExchangeError(f"{x.type}: expected stream=None, got {brief(stream)}")
    if dl_device is not None and tuple(map(int, dl_device)) != _CPU:
        raise ExchangeError(f"{x.type}: expected dl_device={_CPU}, the processor, got {dl_device}")
    if copy is not True:
        knows_read_only = max_version is not None and max_version >= (1, 0)
        array = lent(x) if knows_read_only else None
        if array is not None:
            return array.__dlpack__(max_version=max_version)
        if copy is False:
            why = (
                "has no memory in this process that can be shared"
                if knows_read_only
                else "can only be shared read-only"
            )
            raise _refuse_copy(x, why)
    try:
        source = lent(x)
        if source is None:
            source = values_of(x)
    except (HandleError, CaptureError) as error:
        raise ExchangeError(
            f"{x.type} cannot be exported, because its values are unknown: {error}"
        ) from None
    return source.__dlpack__(max_version=max_version, copy=True)


def dlpack_device(x: Tensor, /) -> tuple[int, int]:
    """Return (1, 0), the host: values on a remote VM are copied."""
    return _CPU


@hinted
def from_dlpack(
    x: object, /, *, device: VMProtocol | None = None, copy: bool | None = None
) -> Tensor:
    """Return a tensor with the values of x, an object of any library that supports DLPack.

    The tensor is allocated in the current arena or on the VM `device`. The values are copied,
    because x may change; a Tensor on that VM results in a new Tensor over the same bytes.

    The result: [...], the shape of x. Raises `DLPackError` if x does not support DLPack;
    `CopyError` if `copy` is False and a copy is needed; `DTypeError` if the dtype is not
    supported; and errors of the exporter.

        >>> import numpy as np
        >>> ml.from_dlpack(np.ones(2))
        Tensor([1., 1.], f64[2])

    Invalid calls:
        ml.from_dlpack(np.ones(2), copy=False)  # CopyError
        ml.from_dlpack(5)  # DLPackError
    """
    if isinstance(x, Tensor):
        return asarray(x, device=device, copy=copy)
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        text = f"expected an object with __dlpack__, got {with_article(type(x).__name__)}"
        raise DLPackError(f"{text}; use ml.asarray").at("from_dlpack", ())
    if copy is False:
        raise CopyError(
            f"from_dlpack: the values of {with_article(type(x).__name__)} are copied into "
            f"a VM, which "
            f"copy=False forbids; omit copy=False"
        )
    with placed(device):
        # PyTorch does not export tensors that it tracks; numpy cannot read bf16, and drops masks.
        is_masked = hasattr(x, "filled")
        if is_masked or hasattr(x, "detach") or "bfloat16" in str(getattr(x, "dtype", "")):
            return asarray(x)
        try:
            array = np.from_dlpack(x) if device is None else np.from_dlpack(x, device="cpu")
        except BufferError as error:
            raise ExchangeError(f"from_dlpack: {error}") from None
        return asarray(array)


def _copy(x: Tensor, memo: object = None, /) -> Any:
    """Copy x on the same VM, into the arena from `arena_on`; in a template it becomes a leaf."""
    if isinstance(memo, LeafMemo):
        return memo.leaf(x)
    with arena_on(x.arena.vm).hosting():
        return op.copy(x)


def _reduce(x: Tensor) -> tuple[Callable[[Array], Tensor], tuple[Array]]:
    """Pickle the values; unpickling allocates in the current arena."""
    return public_name(asarray), (values_of(x),)


def _shown(x: Tensor) -> str:
    """Return the representation in notebooks: a table for a small tensor, otherwise the text.

    A tensor is small if it has one or two short axes."""
    from mlvm.show import html  # imported here because many programs do not use it

    text = repr(x)
    # Maximum number of rows or columns of a table.
    is_small = 0 < x.ndim <= 2 and 0 < max(x.shape) <= 16 and x.size
    if not is_small or text.startswith("<"):  # the values are not available
        return html.block(text)
    rows = x.numpy().reshape(-1, x.shape[-1])
    cells = [[np.array2string(each) for each in row] for row in rows]
    head = [str(i) for i in range(x.shape[-1])]
    return html.table(head, cells, right=len(head)) + html.block(str(x.type))


OURS: Final = {
    "absolute": "abs",
    "conjugate": "conj",
    "degrees": "rad2deg",
    "fabs": "abs",
    "radians": "deg2rad",
    "expit": "sigmoid",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
    "rint": "round",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "tan2", "sinh", "cosh", "tanh")},
}
"""Names in mlvm of the ufuncs of numpy and SciPy that have a different name there."""


def array_ufunc(x: Tensor, ufunc: Any, method: str, /, *inputs: Any, **options: Any) -> Tensor:
    """Dispatch ufuncs to functions of `mlvm.eager`: `numpy.exp(x)` is `exp(x)`, a tensor.

    `a + x` with an array a is `add(a, x)`.

    Raises `DTypeError` if the ufunc has no function here, or is called by a method such as
    `reduce`, or with options other than `axis`. A result cannot be written to an array.
    """
    name = OURS.get(ufunc.__name__, ufunc.__name__)
    function, hint = None, ""
    try:
        function = getattr(sys.modules["mlvm.eager"], name)
    except AttributeError as error:
        hint = str(error).partition("; ")[2]
    if method == "__call__" and options.keys() <= {"axis"} and function is not None:
        return function(*inputs, **options)  # type: ignore[no-any-return]
    from mlvm.eager.recording.reads import read_here  # imported here because few programs use it

    read = read_here()
    if "out" not in options and read.remedy.startswith(("Write ml.", "Use ml.")):
        hint = read.remedy[0].lower() + read.remedy[1:]
    call = f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
    if options:
        call += f"({', '.join(f'{option}=' for option in options)})"
    raise DTypeError(
        f"{call} does not accept tensors; "
        f"{hint or 'pass x.numpy(), or use functions of mlvm.eager'}"
    )


Tensor.__array_ufunc__ = array_ufunc
Tensor.__array__ = as_array
Tensor.__dlpack__ = dlpack
Tensor.__dlpack_device__ = dlpack_device
Tensor.__copy__ = _copy
Tensor._repr_html_ = _shown
Tensor.__deepcopy__ = _copy
Tensor.__reduce__ = _reduce  # type: ignore[assignment]
