"""A module that refuses what CuPy refuses, with numpy underneath; for tests without a GPU.

    fake = install(monkeypatch)          # also as `import cupy`, `cupyx`, until the test ends
    x = fake.cupy.asarray(numpy_array)   # fake.counts.to_device == 1

What CuPy has is read from `cupy_api.json`, which `make_cupy_api.py` made from CuPy 14.2: functions
and methods with their parameters, and the loops of ufuncs. What is not there is an AttributeError
here, and a parameter that is not there a TypeError. Beyond the table, from CuPy's sources
(`_core/core.pyx`, `_kernel.pyx`, `_routines_indexing.pyx`):

- Arrays are no numpy arrays and do not become them (`__array__` raises). Host arrays are refused as
  operands; lists and host arrays as indices, and `asarray`, are transfers.
- A numpy ufunc or function of an array calls CuPy's of that name with the same arguments, through
  `__array_ufunc__` and `__array_function__`. There is no `where=`; `reduce` is for `add` and
  `multiply`, without `initial`.
- A result that does not fit `out` by "same_kind" is refused; sums and the like take any `out`.
- Indices out of range wrap around. Of several values for one element some other one than numpy's
  stays, and `add.at` adds in some other order.
- Masks as indices, `nonzero`, `argwhere`, `unique`, `bool(x)`, `x.item()`, `x.get()` wait.
- Arrays of another device than the current one are refused (as without peer access).

All that computes goes through `fake_cuda.Machine.launch`: a call of CuPy is one launch here, also
where CuPy needs several kernels. Functions that no kernel of mlvm needs are refused by name.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

from tests.machines import fake_cuda
from tests.machines.fake_cuda import MemoryPointer

TABLE = json.loads((Path(__file__).parent / "cupy_api.json").read_text())
np: Any = numpy  # its types are too fine for what is done here
_SCALARS = (bool, int, float, complex, np.generic)


def words(text: str) -> list[str]:
    return text.split()


@cache
def signature(parameters: str) -> inspect.Signature:
    """The signature of `a, axis=, *, dtype=`."""
    source = ", ".join(
        each + "None" if each.endswith("=") else each for each in parameters.split(", ")
    )
    arguments = ast.parse(f"def f({source}): pass").body[0].args  # type: ignore[attr-defined]
    found: list[inspect.Parameter] = []
    P = inspect.Parameter
    required = len(arguments.args) - len(arguments.defaults)
    for i, each in enumerate(arguments.args):
        default = P.empty if i < required else None
        found.append(P(each.arg, P.POSITIONAL_OR_KEYWORD, default=default))
    if arguments.vararg:
        found.append(P(arguments.vararg.arg, P.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(P(each.arg, P.KEYWORD_ONLY, default=None if default else P.empty))
    if arguments.kwarg:
        found.append(P(arguments.kwarg.arg, P.VAR_KEYWORD))
    return inspect.Signature(found)


# --- computing -----------------------------------------------------------------------


def host(x: Any) -> Any:
    """What numpy computes with: a view of the array's memory, or the scalar itself.

    Raises TypeError for a host array, ValueError for an array of another device."""
    if isinstance(x, ndarray):
        current = fake_cuda.machine.device
        if x.data.device_id != current:
            raise ValueError(
                f"The device where the array resides ({x.data.device_id}) is different from the "
                f"current device ({current}). Peer access is unavailable between these devices."
            )
        return x._host
    if x is None or isinstance(x, _SCALARS):
        return x
    raise TypeError(f"Unsupported type {type(x)}")


def hosts(x: Any) -> Any:
    """The same of all that lies in lists, tuples and dicts; what is no array stays."""
    if isinstance(x, (list, tuple)):
        return type(x)([hosts(each) for each in x])
    if isinstance(x, dict):
        return {name: hosts(each) for name, each in x.items()}
    return host(x) if isinstance(x, (ndarray, np.ndarray)) else x


def compute(
    run: Callable[[], Any], out: ndarray | None = None, casting: str = "same_kind"
) -> ndarray:
    """An array of what `run` gives once the stream comes to it, or `out` with that. Now `run` only
    tells the type."""
    with np.errstate(all="ignore"):
        value = np.asarray(run())
    if out is None:
        out = ndarray(value.shape, value.dtype)
    elif not isinstance(out, ndarray):
        raise TypeError("Output arguments type must be cupy.ndarray")
    target = host(out)
    if np.broadcast_shapes(value.shape, out.shape) != out.shape:
        raise ValueError("Out shape is mismatched")
    if not np.can_cast(value.dtype, out.dtype, casting):
        raise TypeError(f"output operand: Cannot cast {value.dtype} to {out.dtype} by {casting}")
    if target.size:
        fake_cuda.machine.launch(lambda: _write(target, run()))
    return out


def _write(target: Any, value: Any) -> None:
    with np.errstate(all="ignore"):
        target[...] = np.asarray(value).astype(target.dtype, copy=False)


def to_device(x: Any, dtype: Any = None) -> ndarray:
    """`cupy.array` of what lies on the host."""
    found = np.array(x, dtype)
    array = ndarray(found.shape, found.dtype)
    target = array._host
    fake_cuda.machine.transfer("to_device", lambda: target.__setitem__(..., found))
    return array


def _by_library(name: str) -> None:
    """CuPy refuses to have a library's work recorded (cublas.pyx, cusolver.pyx: `setStream`)."""
    if fake_cuda.machine.stream.nodes is not None:
        raise NotImplementedError(
            f"calling {name} API during stream capture is currently unsupported"
        )


def _wait() -> None:
    """As for a value that is read, but that is not counted."""
    if fake_cuda.machine.stream.nodes is not None:
        fake_cuda.machine.transfer("to_host", lambda: None)  # which refuses
    fake_cuda.machine.wait(fake_cuda.machine.stream)


def _axis(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


# --- ufuncs --------------------------------------------------------------------------


class ufunc:
    """`cupy.ufunc`, with the loops that CuPy has, chosen as it does."""

    def __init__(self, name: str, nin: int, nout: int, loops: str, able: str, made: str) -> None:
        self.__name__ = self.name = name
        self.nin, self.nout = nin, nout
        self.types = loops.split()
        self._with_dtype = made.split() or self.types
        self._able = able.split()
        self._numpy = getattr(np, name, None) or np.vectorize(getattr(math, name))
        if name == "power":
            self._numpy = _power

    def __repr__(self) -> str:
        return f"<ufunc 'cupy_{self.name}'>"

    def _loop(self, operands: Any, dtype: Any) -> tuple[str, str]:
        fits = _fitting(operands, "qQ->?" in self.types)
        for types in self.types if dtype is None else self._with_dtype:
            given, made = types.split("->")
            if fits(given) if dtype is None else all(np.dtype(t) == dtype for t in made):
                return given, made
        asked = dtype or tuple([getattr(x, "dtype", type(x)) for x in operands])
        raise TypeError(f"Wrong type ({asked}) of arguments for {self.name}")

    def __call__(self, *args: Any, **options: Any) -> ndarray:
        out = options.pop("out", None)
        where = options.pop("_where", None)
        dtype = options.pop("dtype", None)
        casting = options.pop("casting", "same_kind")
        if options:
            raise TypeError(f"Wrong arguments {options}")
        if not self.nin <= len(args) <= self.nin + self.nout:
            raise TypeError(f"Wrong number of arguments for {self.name!r}")
        if len(args) > self.nin:
            if out is not None:
                raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
            out = args[self.nin]
        if isinstance(out, tuple):
            (out,) = out
        operands = [host(x) for x in args[: self.nin]]
        if self.nout != 1:
            raise NotImplementedError(f"the fake has no ufuncs of several results: {self.name}")
        given, made = self._loop(operands, None if dtype is None else np.dtype(dtype))

        def run() -> Any:
            cast = [_cast(x, t) for x, t in zip(operands, given, strict=True)]
            return np.asarray(self._numpy(*cast)).astype(made)

        if where is None:
            return compute(run, out, casting)
        target = host(out)
        return compute(lambda: np.where(host(where), run(), target), out, "unsafe")

    def _refuse(self, method: str) -> None:
        if method not in self._able:
            raise NotImplementedError(f"`{self.name}.{method}` is not supported yet")

    def reduce(
        self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        self._refuse("reduce")
        made: ndarray = (array.sum if self.name == "add" else array.prod)(
            axis, dtype, out, keepdims
        )
        return made

    def accumulate(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None) -> ndarray:
        self._refuse("accumulate")
        made: ndarray = (array.cumsum if self.name == "add" else array.cumprod)(axis, dtype, out)
        return made

    def reduceat(
        self, array: Any, indices: Any, axis: Any = 0, dtype: Any = None, out: Any = None
    ) -> ndarray:
        self._refuse("reduceat")
        x, at = host(array), host(indices)
        return compute(lambda: np.add.reduceat(x, at, axis, dtype), out)

    def at(self, a: ndarray, indices: Any, b: Any = None) -> None:
        self._refuse("at")
        if a.dtype.char not in "ilqILQefd":
            raise TypeError(f"cupy.{self.name}.at does not support {a.dtype}")
        index, _ = _index(a, indices)
        value = host(b)

        def run() -> None:
            places = np.arange(a.size).reshape(a.shape)[_wrapped(a, index)]
            values = np.broadcast_to(value, places.shape).reshape(-1)[::-1]
            target = a._host.ravel()
            self._numpy.at(target, places.reshape(-1)[::-1], values)
            a._host[...] = target.reshape(a.shape)

        fake_cuda.machine.launch(run)

    def outer(self, A: Any, B: Any, **options: Any) -> ndarray:
        return self(A.reshape(A.shape + (1,) * B.ndim), B, **options)


def _power(x: Any, y: Any) -> Any:
    """Negative powers of integers are 0, but for those of 1 and -1."""
    if y.dtype.kind != "i":
        return np.power(x, y)
    units = np.where(x == 1, 1, np.where(x == -1, 1 - 2 * (y & 1), 0))
    return np.where(y < 0, units, np.power(x, np.maximum(y, 0)))


_WEAK = {int: np.int64, float: np.float64, complex: np.complex128}


def _kind(dtype: Any) -> int:
    return 0 if dtype.kind == "b" else 1 if dtype.kind in "iu" else 2


def _fitting(operands: Any, compares: bool) -> Callable[[str], bool]:
    """Whether a loop takes these operands. Python's numbers do not widen the arrays beside them,
    unless they are of a higher kind (`_kernel.pyx`, `_check_should_use_weak_scalar`)."""
    arrays: list[int] = []
    weak: list[int] = []
    types: list[tuple[Any, Any]] = []
    for x in operands:
        python = type(x) if type(x) in _WEAK else None
        wide = np.uint64 if python is int and x >= 2**63 else _WEAK.get(type(x))
        dtype = np.dtype(wide) if python else np.asarray(x).dtype
        (weak if python else arrays).append(_kind(dtype))
        types.append((dtype, python))
    is_weak = bool(arrays and weak) and max(arrays) >= max(weak)
    if compares and max([*arrays, *weak]) == 1:
        is_weak = False  # integers are compared as they are

    def fits(loop: str) -> bool:
        return all(
            np.can_cast(dtype, t)
            or (is_weak and python and np.result_type(python(0), np.dtype(t)) == np.dtype(t))
            for (dtype, python), t in zip(types, loop, strict=True)
        )

    return fits


def _cast(x: Any, type: str) -> Any:
    """An operand in the loop's type. OverflowError for a Python integer that it does not hold."""
    return np.asarray(x).astype(type) if isinstance(x, np.ndarray) else np.array(x, type)


# --- arrays --------------------------------------------------------------------------


class Flags:
    """`cupy.ndarray.flags`: there is no `writeable`."""

    def __init__(self, x: ndarray) -> None:
        self.c_contiguous = x._host.flags.c_contiguous
        self.f_contiguous = x._host.flags.f_contiguous
        self.owndata = x.base is None
        self.forc = self.c_contiguous or self.f_contiguous
        self.fnc = self.f_contiguous and not self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        known = ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA")
        if name not in known:
            raise KeyError(f"{name} is not defined for cupy.ndarray.flags")
        return bool(getattr(self, name.lower()))


class ndarray:
    """`cupy.ndarray`"""

    __array_priority__ = 100
    _host: Any
    base: ndarray | None

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.kind not in "biufcV":  # of structured ones it has the bytes, and no arithmetic
            raise ValueError(f"Unsupported dtype {dtype}")
        if any(n < 0 for n in shape):
            raise ValueError("Negative dimensions are not allowed")
        size = math.prod(shape) * dtype.itemsize
        self.data = fake_cuda.alloc(size) if memptr is None else memptr
        self.base = None
        flat = self.data.mem.bytes[self.data.offset :]
        if memptr is not None and strides is None:
            flat = self.data.bytes(size)
        if flat.size == 0:
            flat = np.zeros(1, np.uint8)
        if math.prod(shape) == 0:
            self._host = np.zeros(shape, dtype)
        else:
            self._host = np.ndarray(shape, dtype, flat.data, 0, strides, order)

    def _view(self, found: Any) -> ndarray:
        """An array over a view that numpy made of this one's memory."""
        view = object.__new__(ndarray)
        view._host = found
        offset = found.ctypes.data - self.data.mem.bytes.ctypes.data if found.size else 0
        view.data = MemoryPointer(self.data.mem, offset if found.size else self.data.offset)
        view.base = self.base if self.base is not None else self
        return view

    def _shaped(self, found: Any, run: Callable[[], Any]) -> ndarray:
        """A view if numpy could make one, else a copy."""
        if found.size == 0 or np.may_share_memory(found, self._host):
            return self._view(found)
        return compute(run)

    # what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._host.shape)

    @property
    def dtype(self) -> Any:
        return self._host.dtype

    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    T = property(lambda self: self.transpose())
    mT = property(lambda self: self.swapaxes(-1, -2))
    flags = property(Flags)
    device = property(lambda self: self.data.device)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    __hash__ = None  # type: ignore[assignment]

    # to and from the host

    def __array__(self, dtype: Any = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
            if out.dtype != self.dtype:
                raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
            if out.shape != self.shape:
                raise ValueError(f"Shape mismatch. Expected {self.shape}, actual {out.shape}")
        elif not self.size:
            return np.empty(self.shape, self.dtype)
        stream = stream or fake_cuda.get_current_stream(self.data.device_id)
        target = np.empty(self.shape, self.dtype, order) if out is None else out
        source = self._host
        fake_cuda.machine.transfer("to_host", lambda: target.__setitem__(..., source), stream)
        if blocking:
            fake_cuda.machine.wait(stream)
        return target

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        target, source = self._host, fake_cuda.sent(arr)
        fake_cuda.machine.transfer("to_device", lambda: target.__setitem__(..., source), stream)

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is "
                "ambiguous. Use a.any() or a.all()"
            )
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    # views and copies

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        if dtype is not None and not self.ndim and np.dtype(dtype).itemsize != self.itemsize:
            raise ValueError("Changing the dtype of a 0d array is only supported if ...")
        return self._view(self._host.view() if dtype is None else self._host.view(dtype))

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> ndarray:
        if len(shape) == 1 and not isinstance(shape[0], int):
            (shape,) = shape
        return self._shaped(
            self._host.reshape(shape, order=order), lambda: self._host.reshape(shape, order=order)
        )

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> ndarray:
        return compute(lambda: self._host.flatten(order))

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._view(self._host.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._view(self._host.squeeze(axis))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ndarray:
        return self._view(self._host.diagonal(offset, axis1, axis2))

    def astype(
        self,
        dtype: Any,
        order: str = "K",
        casting: Any = None,
        subok: Any = None,
        copy: bool = True,
    ) -> ndarray:
        if casting is not None:
            raise ValueError("casting is not supported yet")
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return compute(lambda: self._host.astype(dtype))

    def copy(self, order: str = "C") -> ndarray:
        return compute(lambda: self._host.copy())

    @property
    def real(self) -> ndarray:
        return self._view(self._host.real) if self.dtype.kind == "c" else self

    @real.setter
    def real(self, value: Any) -> None:
        self.real[...] = value

    @property
    def imag(self) -> ndarray:
        if self.dtype.kind == "c":
            return self._view(self._host.imag)
        return compute(lambda: np.zeros(self.shape, self.dtype))

    @imag.setter
    def imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise TypeError("cupy.ndarray does not have imaginary part to set")
        self._view(self._host.imag)[...] = value

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            if value.ndim:
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            source = host(value)
        else:
            source = np.asarray(value, self.dtype)
            if source.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        target = host(self)
        if self.size:
            fake_cuda.machine.launch(lambda: _write(target, source))

    # indexing

    def __getitem__(self, index: Any) -> ndarray:
        index, arrays = _index(self, index)
        if not arrays:
            return self._view(self._host[_as_view(index)])
        if any(x.dtype.kind == "b" for x in arrays):
            _wait()
        return compute(lambda: self._host[_wrapped(self, index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        index, arrays = _index(self, index)
        if not arrays:
            target = self._view(self._host[_as_view(index)])
            if not isinstance(value, ndarray):
                target.fill(value)
            elif target.size and not _is_same(target, value):
                _copy(target, value)
            return
        if any(x.dtype.kind == "b" for x in arrays):
            _wait()
        if not isinstance(value, (ndarray, *_SCALARS)):
            value = to_device(value, self.dtype)
        source, target = host(value), host(self)

        def run() -> None:
            at = np.arange(target.size).reshape(target.shape)[_wrapped(self, index)]
            values = np.broadcast_to(source, at.shape).astype(target.dtype)
            target.flat[at.reshape(-1)[::-1]] = values.reshape(-1)[::-1]

        with np.errstate(all="ignore"):
            np.broadcast_shapes(np.shape(source), self._host[_wrapped(self, index)].shape)
        fake_cuda.machine.launch(run)

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
        if isinstance(indices, (list, tuple, np.ndarray)):
            indices = to_device(indices, int)
        x, at = host(self), host(indices)
        if out is not None and out.dtype != self.dtype:
            raise TypeError("Output dtype mismatch")
        if not self.size and np.size(at):
            raise IndexError("cannot do a non-empty take from an empty axes.")
        n = max(x.size if axis is None else x.shape[axis], 1)
        made = compute(lambda: np.take(x, np.int64(at) % n, axis), out)
        if made.shape != np.take(np.empty(x.shape, "?"), np.zeros_like(at), axis).shape:
            raise ValueError("Output shape mismatch")
        return made

    def repeat(self, repeats: Any, axis: Any = None) -> ndarray:
        if not isinstance(repeats, (int, list, tuple)):
            raise ValueError('"repeats" should be int or sequence')
        return compute(lambda: np.repeat(self._host, repeats, axis))

    def nonzero(self) -> tuple[ndarray, ...]:
        _wait()
        return tuple(
            [compute(partial(lambda i: self._host.nonzero()[i], i)) for i in range(self.ndim)]
        )

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        if not self.ndim:
            raise np.exceptions.AxisError("Sorting arrays with the rank of zero is not supported")
        if not self.flags.c_contiguous:
            raise NotImplementedError("Sorting non-contiguous array is not supported.")
        compute(lambda: np.sort(self._host, axis, kind="stable"), self)

    def argsort(self, axis: Any = -1, kind: Any = None) -> ndarray:
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        return compute(lambda: np.argsort(np.atleast_1d(self._host), axis, kind="stable"))

    # reductions: any `out` of the right shape is written

    def _reduce(self, run: Callable[..., Any], out: Any, **given: Any) -> ndarray:
        x = host(self)
        made = {name: value for name, value in given.items() if value is not None}
        shape = np.asarray(
            np.sum(np.empty(x.shape, "?"), given["axis"], keepdims=bool(given["keepdims"]))
        )
        if out is not None and out.shape != shape.shape:
            raise ValueError("Output shape mismatch")
        return compute(lambda: run(x, **made), out, "unsafe")

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._reduce(np.sum, out, axis=axis, dtype=dtype, keepdims=keepdims)

    def prod(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._reduce(np.prod, out, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._reduce(np.mean, out, axis=axis, dtype=dtype, keepdims=keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(np.max, out, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(np.min, out, axis=axis, keepdims=keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(np.all, out, axis=axis, keepdims=keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce(np.any, out, axis=axis, keepdims=keepdims)

    def argmax(
        self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._arg(np.argmax, axis, out, dtype, keepdims)

    def argmin(
        self, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._arg(np.argmin, axis, out, dtype, keepdims)

    def _arg(self, run: Any, axis: Any, out: Any, dtype: Any, keepdims: bool) -> ndarray:
        if dtype is not None:
            np.dtype(dtype)  # TypeError for what is no dtype
        return self._reduce(run, out, axis=axis, keepdims=keepdims)

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
        x = host(self)
        return compute(lambda: np.cumsum(x, axis, dtype), out)

    def cumprod(self, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
        x = host(self)
        return compute(lambda: np.cumprod(x, axis, dtype), out)

    def round(self, decimals: int = 0, out: Any = None) -> ndarray:
        x = host(self)
        return compute(lambda: np.round(x, decimals), out)

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> ndarray:
        x, low, high = host(self), host(min), host(max)
        return compute(lambda: np.clip(x, low, high), out)

    def dot(self, b: Any, out: Any = None) -> ndarray:
        _by_library("cuBLAS")
        x, y = host(self), host(b)
        return compute(lambda: np.dot(x, y), out)

    def conj(self) -> ndarray:
        return functions["conjugate"](self) if self.dtype.kind == "c" else self

    conjugate = conj

    # numpy's protocols

    def __array_ufunc__(self, ufunc_: Any, method: str, *inputs: Any, **options: Any) -> Any:
        operands = inputs
        if "out" in options:
            out = options["out"]
            if len(out) != 1:
                raise ValueError("The 'out' parameter must have exactly one array value")
            operands += out
            options["out"] = out[0]
        if method not in ("__call__", "outer", "at", "reduce", "accumulate", "reduceat"):
            return NotImplemented
        found = functions.get(ufunc_.__name__) or functions.get(f"special.{ufunc_.__name__}")
        if method != "__call__":
            found = getattr(found, method, None)
        if found is None:
            return NotImplemented
        for x in operands:
            if not isinstance(x, (ndarray, np.ndarray, *_SCALARS)):
                return NotImplemented
        if ufunc_.__name__ in _COMPARISONS:
            inputs = tuple(
                [x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs]
            )
        return found(*inputs, **options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        module = ".".join(func.__module__.split(".")[1:])
        name = f"{module}.{func.__name__}" if module else func.__name__
        if name not in functions:
            if name in TABLE["functions"]:
                raise NotImplementedError(f"the fake has no {name} yet")
            return NotImplemented
        if not all(issubclass(each, (ndarray, np.ndarray)) for each in types):
            return NotImplemented
        return functions[name](*args, **options)


_COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "matmul": "matmul",
}


def _operator(name: str, swapped: bool, in_place: bool) -> Any:
    def operate(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, *_SCALARS)):
            return NotImplemented
        if in_place:
            return functions[name](self, other, out=self)
        return functions[name](other, self) if swapped else functions[name](self, other)

    return operate


for _short, _name in _OPERATORS.items():
    setattr(ndarray, f"__{_short}__", _operator(_name, False, False))
    setattr(ndarray, f"__r{_short}__", _operator(_name, True, False))
    if _short != "matmul":
        setattr(ndarray, f"__i{_short}__", _operator(_name, False, True))
for _short, _name in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}.items():
    setattr(ndarray, f"__{_short}__", _operator(_name, False, False))
for _short, _name in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_short}__", lambda self, name=_name: functions[name](self))


def _index(x: ndarray, index: Any) -> tuple[tuple[Any, ...], list[ndarray]]:
    """The index with all arrays on the device, and those arrays."""
    items, arrays = [], []
    for each in index if isinstance(index, tuple) else (index,):
        plain = each is None or each is Ellipsis or isinstance(each, (slice, ndarray))
        if not plain and (not np.isscalar(each) or isinstance(each, (bool, np.bool_))):
            each = to_device(each)
            if not each.size:
                each = each.astype(np.int32)
        if isinstance(each, ndarray):
            host(each)
            if each.dtype.kind not in "biu":
                raise IndexError("arrays used as indices must be of integer or boolean type")
            arrays.append(each)
        items.append(each)
    return tuple(items), arrays


def _as_view(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with an ellipsis: numpy's result is then an array, not a scalar."""
    return index if any(each is Ellipsis for each in index) else (*index, Ellipsis)


def _wrapped(x: ndarray, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """numpy's index for it, with positions out of range wrapped around."""
    taken = sum(
        (each.ndim if each.dtype.kind == "b" else 1) if isinstance(each, ndarray) else 1
        for each in index
        if each is not None and each is not Ellipsis
    )
    axis, items = 0, []
    for each in index:
        if each is Ellipsis:
            axis += x.ndim - taken
        elif isinstance(each, ndarray):
            found = each._host
            if found.dtype.kind == "b":
                axis += found.ndim
            else:
                found = found.astype(np.int64) % max(x.shape[axis], 1)
                axis += 1
            each = found
        elif each is not None:
            axis += 1
        items.append(each)
    return tuple(items)


def _is_same(x: ndarray, y: ndarray) -> bool:
    """Whether there is nothing to copy, as after `x[i] += y`."""
    return (x.data.ptr, x.shape, x.strides) == (y.data.ptr, y.shape, y.strides)


def _copy(target: ndarray, value: Any) -> None:
    """Elements of an array into another, of any dtype."""
    source = host(value)
    while source.ndim > target.ndim and source.shape[0] == 1:
        source = source[0]
    compute(lambda: source, target, "unsafe")


# --- functions -----------------------------------------------------------------------

functions: dict[str, Any] = {
    name: ufunc(name.rpartition(".")[2], *given) for name, given in TABLE["ufuncs"].items()
}


def _function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the function as CuPy's of that name: its arguments are checked by the table."""
    bound = signature(TABLE["functions"][name])

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **options: Any) -> Any:
            bound.bind(*args, **options)
            return run(*args, **options)

        checked.__name__ = name.rpartition(".")[2]
        functions[name] = checked
        return run

    return declare


def _as_numpy(name: str, waits: bool = False, library: str = "") -> None:
    """Declare a function that does what numpy's of that name does, for the same arguments."""
    run = np
    for part in name.split("."):
        run = getattr(run, part)
    names = list(signature(TABLE["functions"][name]).parameters)
    place = names.index("out") if "out" in names else len(names)

    @_function(name)
    def call(*args: Any, **options: Any) -> Any:
        options |= zip(names[place:], args[place:], strict=False)
        out = options.pop("out", None)
        if waits:
            _wait()
        if library:
            _by_library(library)
        found, options = hosts(args[:place]), hosts(options)
        return compute(lambda: run(*found, **options), out)


class Plan:
    """cuFFT's plan of a transform, with the memory that it works in."""

    alive = True


def _transform(name: str) -> None:
    """Declare a transform. A thread keeps the plans of the last 16 kinds (`cupy/fft/_cache.pyx`);
    a graph keeps none."""
    run = getattr(np.fft, name)

    @_function(f"fft.{name}")
    def call(a: Any, *args: Any, **options: Any) -> Any:
        x, machine = host(a), fake_cuda.machine
        plans: dict[str, Plan] = machine.local.__dict__.setdefault("plans", {})
        kind = repr((name, x.shape, x.dtype, args, options))
        plan = plans[kind] = plans.pop(kind) if kind in plans else Plan()
        if len(plans) > 16:
            plans.pop(next(iter(plans))).alive = False
        recorded = machine.stream.nodes is not None

        def transformed() -> Any:
            if recorded and not plan.alive:
                raise fake_cuda.CUDARuntimeError(700)
            return run(x, *args, **options)

        return compute(transformed)


def _as_method(name: str) -> None:
    @_function(name)
    def call(a: Any, *args: Any, **options: Any) -> Any:
        host(a)
        if not isinstance(a, ndarray):
            raise AttributeError(f"{type(a).__name__!r} object has no attribute {name!r}")
        given = signature(TABLE["functions"][name]).bind(a, *args, **options).arguments
        given.pop("a")
        return getattr(a, name)(**given)


for _name in words(
    "where zeros_like tile expand_dims count_nonzero cross outer "
    "searchsorted kron diff tril triu trace isclose "
    "flip roll rot90 broadcast_to moveaxis linalg.norm "
    "nan_to_num angle real imag var std"
):
    _as_numpy(_name)
for _name in words("fftn ifftn rfft irfft fft ifft"):
    _transform(_name)
for _name in ("einsum", "tensordot", "vdot"):
    _as_numpy(_name, library="cuBLAS")
for _name in ("linalg.det", "linalg.pinv"):
    _as_numpy(_name, library="cuSOLVER")
for _name in ("argwhere", "unique", "array_equal", "allclose", "linalg.matrix_rank", "bincount"):
    _as_numpy(_name, waits=True)
for _name in words(
    "sum prod mean argmax argmin cumsum cumprod all any take repeat ravel transpose swapaxes "
    "squeeze diagonal dot round nonzero"
):
    _as_method(_name)


def _views(name: str) -> None:
    """Functions whose results are views of their operand."""
    run = getattr(np, name)

    @_function(name)
    def call(a: Any, *args: Any, **options: Any) -> Any:
        return a._view(run(host(a), *args, **options))


for _name in ("flip", "broadcast_to", "moveaxis", "expand_dims"):
    _views(_name)


@_function("concatenate")
def _concatenate(
    tup: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> Any:
    """Of more than 8 arrays the addresses are sent (`_routines_manipulation.pyx`), and where the
    arrays are not alike, their places and strides."""
    parts = [host(x) for x in tup]
    made = out.dtype if out is not None else dtype or np.result_type(*[x.dtype for x in parts])
    small = sum(x.nbytes for x in parts) < (len(parts) << 21)
    if len(parts) > 8 and all(x.dtype == made for x in parts) and small:
        alike = all(x.flags.c_contiguous and x.shape == parts[0].shape for x in parts)
        for _ in range(1 if alike else 3):
            to_device(range(len(parts)))
    return compute(lambda: np.concatenate(parts, axis, dtype=dtype, casting=casting), out)


@_function("stack")
def _stack(
    tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> Any:
    views = [x._view(np.expand_dims(host(x), axis)) for x in tup]
    return _concatenate(views, axis, out, dtype=dtype, casting=casting)


@_function("take_along_axis")
def _take_along_axis(a: Any, indices: Any, axis: int) -> Any:
    x, at = host(a), host(indices)
    return compute(lambda: np.take_along_axis(x, at % max(x.shape[axis], 1), axis))


@_function("reshape")
def _reshape(a: Any, newshape: Any, order: str = "C", *, copy: Any = None) -> Any:
    return a.reshape(newshape, order=order)


@_function("amax")
def _amax(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return a.max(axis, out, keepdims)


@_function("amin")
def _amin(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return a.min(axis, out, keepdims)


functions["max"], functions["min"] = functions["amax"], functions["amin"]


@_function("sort")
def _sort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
    made = a.copy()
    made.sort(axis, kind)
    return made


@_function("argsort")
def _argsort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
    return a.argsort(axis, kind)


@_function("clip")
def _clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None) -> Any:
    return a.clip(a_min, a_max, out)


@_function("around")
def _around(a: Any, decimals: int = 0, out: Any = None) -> Any:
    return a.round(decimals, out)


@_function("copyto")
def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    if isinstance(src, np.ndarray):
        if src.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
        src = src.reshape(())[()]
    if type(src) in (bool, int, float, complex):
        np.copyto(np.empty((), dst.dtype), src, casting=casting)
    elif not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    target, source = host(dst), host(src)
    if isinstance(src, ndarray):
        while source.ndim > target.ndim and source.shape[0] == 1:
            source = source[0]
    if where is None:
        compute(lambda: source, dst, "unsafe")
    else:
        mask = host(where)
        if mask.dtype != np.bool_:
            raise TypeError(f"Cannot cast array data from {mask.dtype!r} to bool")
        compute(lambda: np.where(mask, source, target), dst, "unsafe")


@_function("may_share_memory")
def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    if not (isinstance(a, ndarray) and isinstance(b, ndarray)):
        raise TypeError("Argument has incorrect type (expected cupy.ndarray)")
    return a.data.mem.ptr == b.data.mem.ptr and bool(np.may_share_memory(a._host, b._host))


@_function("shares_memory")
def _shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    _wait()
    return _may_share_memory(a, b) and bool(np.shares_memory(a._host, b._host))


@_function("matmul")
def _matmul(
    *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind", **options: Any
) -> Any:
    if options:
        raise NotImplementedError(f"the fake has no matmul with {options}")
    _by_library("cuBLAS")
    if len(args) != 2:
        raise ValueError(f"`func` requires 2 arguments, but {len(args)} given")
    x, y = map(host, args)
    made = np.promote_types(x.dtype, y.dtype)
    dtype = made if dtype is None else np.dtype(dtype)
    if out is not None and not np.can_cast(dtype, out.dtype, casting):
        raise TypeError(f"Cannot cast {dtype} to {out.dtype}")
    if (
        out is not None
        and out.shape != np.matmul(np.empty(x.shape, "?"), np.empty(y.shape, "?")).shape
    ):
        raise ValueError("Output operand 0 has invalid shape")
    return compute(lambda: np.matmul(x.astype(made), y.astype(made)).astype(dtype), out, casting)


@_function("asarray")
def _asarray(a: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False) -> Any:
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    return to_device(a, dtype)


@_function("array")
def _array(
    obj: Any,
    dtype: Any = None,
    copy: Any = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    **_: Any,
) -> Any:
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=bool(copy))
    return to_device(obj, dtype)


@_function("ascontiguousarray")
def _ascontiguousarray(a: Any, dtype: Any = None) -> Any:
    if not isinstance(a, ndarray):
        return to_device(a, dtype)
    a = a if dtype is None else a.astype(dtype, copy=False)
    return a if a.flags.c_contiguous else a.copy()


@_function("asnumpy")
def _asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> Any:
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a)


@_function("atleast_1d")
def _atleast_1d(*arys: Any) -> Any:
    found = [x.reshape(1) if not x.ndim else x for x in arys]
    return found[0] if len(found) == 1 else found


@_function("empty")
def _empty(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    return ndarray(shape, dtype)


@_function("empty_like")
def _empty_like(
    prototype: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> Any:
    host(prototype)
    return ndarray(prototype.shape if shape is None else shape, dtype or prototype.dtype)


def _filled(name: str, value: int) -> None:
    @_function(name)
    def call(shape: Any, dtype: Any = float, order: str = "C") -> Any:
        return compute(lambda: np.full(shape, value, dtype))

    @_function(f"{name}_like")
    def like(
        a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
    ) -> Any:
        host(a)
        return call(a.shape if shape is None else shape, dtype or a.dtype)


_filled("zeros", 0)
_filled("ones", 1)


@_function("full")
def _full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> Any:
    value = host(fill_value)
    return compute(lambda: np.full(shape, value, dtype))


@_function("arange")
def _arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
    if any(isinstance(x, ndarray) for x in (start, stop, step)):
        _wait()
    return compute(
        lambda: (
            np.arange(start, stop, step, dtype)
            if stop is not None
            else np.arange(0, start, step, dtype)
        )
    )


@_function("linspace")
def _linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
) -> Any:
    return compute(lambda: np.linspace(start, stop, num, endpoint, dtype=dtype))


@_function("eye")
def _eye(N: int, M: Any = None, k: int = 0, dtype: Any = float, order: str = "C") -> Any:
    return compute(lambda: np.eye(N, M, k, dtype))


@_function("tri")
def _tri(N: int, M: Any = None, k: int = 0, dtype: Any = float) -> Any:
    return compute(lambda: np.tri(N, M, k, dtype))


@_function("lib.stride_tricks.as_strided")
def _as_strided(x: Any, shape: Any = None, strides: Any = None) -> Any:
    return x._view(np.lib.stride_tricks.as_strided(host(x), shape, strides))


_config = SimpleNamespace(linalg="ignore")


@contextmanager
def errstate(*, linalg: str | None = None, **_: Any) -> Iterator[None]:
    """`cupyx.errstate`: what becomes of a verdict of cuSOLVER's, "ignore" or "raise"."""
    before, _config.linalg = _config.linalg, linalg or _config.linalg
    try:
        yield
    finally:
        _config.linalg = before


def _judged(name: str) -> Callable[..., Any]:
    """numpy's function as cuSOLVER computes it: without a wait, a matrix that has no result gives
    nan in its place."""
    run = getattr(np.linalg, name)

    def call(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        except np.linalg.LinAlgError:
            if _config.linalg == "raise":
                raise
            return np.full(args[-1].shape, np.nan, args[-1].dtype)

    return call


def _verdict() -> None:
    _by_library("cuSOLVER")
    if _config.linalg == "raise":
        _wait()


for _name in ("inv", "cholesky", "eigvalsh"):

    @_function(f"linalg.{_name}")
    def _of_matrix(a: Any, *args: Any, name: str = _name, **options: Any) -> Any:
        _verdict()
        x = host(a)
        return compute(lambda: _judged(name)(x, *args, **options))


@_function("linalg.solve")
def _solve(a: Any, b: Any) -> Any:
    if b.ndim != 1 and a.shape[:-1] != b.shape[:-1]:
        raise ValueError("a must have (..., M, M) shape and b must have (..., M, K)")
    _verdict()
    x, y = host(a), host(b)
    return compute(lambda: _judged("solve")(x, y))


def _several(name: str) -> None:
    """Functions with several results, which the fake computes anew for each."""
    run = _judged(name)

    @_function(f"linalg.{name}")
    def call(a: Any, *args: Any, **options: Any) -> Any:
        _by_library("cuSOLVER")
        if name in ("svd", "eigh", "qr"):
            _verdict()
        x = host(a)
        if options.get("compute_uv") is False:
            return compute(lambda: run(x, *args, **options))
        count = len(run(x, *args, **options))
        return tuple(
            [compute(partial(lambda i: run(x, *args, **options)[i], i)) for i in range(count)]
        )


for _name in ("svd", "eigh", "qr", "slogdet"):
    _several(_name)


# --- the module ----------------------------------------------------------------------


class _Module(ModuleType):
    """A module that says which of CuPy's names the fake has not."""

    def __getattr__(self, name: str) -> Any:
        room = self.__name__.partition(".")[2]
        if f"{room}.{name}".lstrip(".") in TABLE["functions"]:
            raise NotImplementedError(f"the fake has no {name} yet")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _modules() -> dict[str, ModuleType]:
    """A fake of each module, by name."""
    made: dict[str, ModuleType] = {}
    for name in words(
        "cupy cupy.linalg cupy.fft cupy.lib cupy.lib.stride_tricks cupy.cuda cupy.cuda.memory "
        "cupy.cuda.runtime cupyx cupyx.scipy cupyx.scipy.special"
    ):
        made[name] = _Module(name)
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, made[name])
    for name, found in functions.items():
        room, _, last = name.rpartition(".")
        home = "cupyx.scipy.special" if room == "special" else f"cupy.{room}".rstrip(".")
        setattr(made[home], last, found)
    cupy, cuda = made["cupy"], made["cupy.cuda"]
    made["cupyx"].errstate = errstate  # type: ignore[attr-defined]
    for name in words(
        "Device Stream Event Graph Memory MemoryPointer MemoryPool PinnedMemoryPool "
        "PinnedMemoryPointer alloc alloc_pinned_memory get_allocator set_allocator "
        "using_allocator get_current_stream"
    ):
        setattr(cuda, name, getattr(fake_cuda, name))
    for name in ("OutOfMemoryError", "MemoryPool", "MemoryPointer", "Memory", "alloc"):
        setattr(made["cupy.cuda.memory"], name, getattr(fake_cuda, name))
    for name in dir(fake_cuda.runtime):
        if not name.startswith("_"):
            setattr(made["cupy.cuda.runtime"], name, getattr(fake_cuda.runtime, name))
    for name in words(
        "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
        "complex64 complex128 dtype inf nan pi e newaxis intp result_type promote_types can_cast "
        "finfo iinfo s_"
    ):
        setattr(cupy, name, getattr(np, name))
    cupy.ndarray, cupy.ufunc, cupy.__version__ = ndarray, ufunc, TABLE["version"]  # type: ignore[attr-defined]
    cupy.get_default_memory_pool = lambda: fake_cuda.machine.pool  # type: ignore[attr-defined]
    cupy.get_default_pinned_memory_pool = fake_cuda.PinnedMemoryPool  # type: ignore[attr-defined]
    return made


class Fake(SimpleNamespace):
    """`cupy`: the module. `counts`: what happened. `machine`: the devices."""

    cupy: Any
    counts: fake_cuda.Counts
    machine: fake_cuda.Machine


def install(monkeypatch: Any = None, devices: int = 1, nbytes: int = 1 << 34) -> Fake:
    """New devices with so many bytes each. With a monkeypatch, `import cupy` finds the fake until
    it is undone, and then there are the devices that there were."""
    if monkeypatch is not None:
        monkeypatch.setattr(fake_cuda, "machine", None, raising=False)
    machine = fake_cuda.start(devices, nbytes)
    made = _modules()
    if monkeypatch is not None:
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
    return Fake(cupy=made["cupy"], counts=machine.counts, machine=machine)
