"""Kernels of ops for a GPU, by CuPy's functions: those of which numpy's own do not run there.

CuPy's arrays answer numpy's protocols, so that most reference kernels run on them as they are. The
others are here: those which make arrays of the host, work in blocks of a processor's cache, read
values, or call what CuPy has not (reductions by ufuncs other than `add` and `multiply`, `initial`,
`out` of `argmax` and of transforms, `take(mode=)`, `vecdot`, `as_strided`). Two round otherwise in
CuPy, floor(x / y) and its remainder, and are made of `fmod` as numpy makes them.

What is done in which order depends on shapes alone, so that the same values give the same bits in
every run: sums by index are made by sorting, not by atomic additions. Draws of random numbers have
the processor's bits. Sums and elementary functions round as CUDA does, products as cuBLAS does.

Kernels that check values do so by `mlvm.machines.gpu_checks`. Those in `WAITS` read a value on the
host whatever the caller does, and cannot be part of a CUDA graph. CuPy's arrays are `Any` here: it
has no types that could be checked.

    kernels = gpu_kernels(cupy)
    kernels["softmax"](out, x, axis=-1)  # instead of OPS["softmax"].kernel
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import LinAlgError
from mlvm.core.machine.callee import Kernels
from mlvm.core.op import OPS, Kernel, Op
from mlvm.core.ops.decompositions import adjoint, finite, hermitian, strange, write
from mlvm.core.ops.half import truncate
from mlvm.core.ops.random import FOLD, SPLIT
from mlvm.core.rules import Axis, normalize_axes, normalize_axis, reduced_shape
from mlvm.core.types import Shape
from mlvm.machines import gpu_random
from mlvm.machines.gpu_checks import Note, check

Sides = tuple[tuple[int, int], ...]

_TABLE: dict[str, Callable[..., Any]] = {}

_ON_HOST: Final = frozenset(
    [
        *("eig", "eigvals", "permutation", "gamma", "poisson", "binomial", "multinomial"),
        *("lu", "solve_triangular", "expm"),
    ]
)
"""Ops whose operands go to the host and back. CuPy's `eig` needs a newer cuSOLVER than that of
CUDA 12.0; a permutation is made by exchanges, one after the other; other draws reject numbers, each
as many as it happens to; factors and substitutions go by blocks, of which each is small."""

_FACTORS: Final = {
    "cholesky": "a matrix is not positive definite",
    **dict.fromkeys(("inv", "solve"), "a matrix is singular"),
    **dict.fromkeys(
        ("det_vjp", "eigh", "eigvalsh", "svd", "svdvals", "pinv"),
        "the iteration does not converge, as with inf or nan in a matrix",
    ),
}
"""Ops for which there may be no result, and what is wrong then: cuSOLVER's verdict is read."""

WAITS: Final = frozenset({"nonzero_indices", "boolean_index", *_ON_HOST, *_FACTORS})
"""Ops that read values on the host: shapes that depend on values, and those above. `normal` does
so too for other dtypes than f32. What cuBLAS and cuSOLVER compute waits for nothing else, but CuPy
14 refuses to have it recorded, with a NotImplementedError."""

TRANSFORMS: Final[frozenset[str]] = frozenset({"fft", "ifft", "rfft", "irfft"})
"""Ops by cuFFT, which could be recorded and must not be: CuPy keeps the plans of 16 kinds of them a
thread (`cupy/fft/_cache.pyx`), and a plan takes with it the memory that its graph works in."""

_MOST_COLUMNS: Final = 1 << 26
"""Elements of the windows that a convolution lays out at a time."""


def gpu_kernels(cp: Any) -> Kernels:
    """The kernels by op name, for the current device of `cp`, which is the module `cupy`."""
    kernels: dict[str, Kernel] = {name: partial(kernel, cp) for name, kernel in _TABLE.items()}
    kernels["normal"] = partial(_normal, cp, cp.asarray(gpu_random.ziggurat()))
    for name in _ON_HOST:
        kernels[name] = partial(_on_host, OPS[name].kernel)
    for name, reason in _FACTORS.items():
        kernels[name] = partial(_factor, kernels.get(name, OPS[name].kernel), reason)
    return kernels


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the kernel of that op. It takes CuPy before what the op's own kernel takes."""

    def declare(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _TABLE[name] = kernel
        return kernel

    return declare


def _on_host(kernel: Kernel, out: Any, *operands: Any, **attributes: Any) -> None:
    """Run the reference kernel on copies of the operands."""
    made = np.empty(out.shape, out.dtype)
    with np.errstate(all="ignore"):
        kernel(made, *[x.get() for x in operands], **attributes)
    out.set(made)


def _erf(x: Any, out: Any) -> None:
    importlib.import_module("cupyx.scipy.special").erf(x, out)


# --- checks --------------------------------------------------------------------------


class _Call(NamedTuple):
    """The call of a kernel that checks values, of which the reference kernel says what is wrong."""

    cp: Any
    op: Op
    operands: tuple[Any, ...]
    attributes: dict[str, Any]

    def notes_indices(self, indices: Any, lowest: int, length: int) -> bool:
        """Check that all are in lowest .. length - 1: read now, or (True) with other notes."""
        if not indices.size:
            return False
        bounds = self.cp.empty(2, np.int64)
        wide = _wide(self.cp, indices)
        wide.min(out=bounds[0])
        wide.max(out=bounds[1])

        def refuses(bounds: Sequence[int]) -> bool:
            return bounds[0] < lowest or bounds[1] >= length

        return check(Note(self.op, bounds, refuses, self.operands, indices, self.attributes))

    def notes_value(self, value: Any, refuses: Callable[[int], bool], judged: Any) -> bool:
        """Check one integer, or truth value, on the device. It was made of the operand `judged`."""
        values = value.astype(np.int64).reshape(1)

        def refused(found: Sequence[int]) -> bool:
            return refuses(found[0])

        return check(Note(self.op, values, refused, self.operands, judged, self.attributes))


def _checking(name: str) -> Callable[[Callable[..., None]], None]:
    """As `_kernel`, for a kernel that checks values: it takes its `_Call` behind CuPy."""

    def declare(kernel: Callable[..., None]) -> None:
        def called(cp: Any, out: Any, *operands: Any, **attributes: Any) -> None:
            call = _Call(cp, OPS[name], operands, attributes)
            kernel(cp, call, out, *operands, **attributes)

        _TABLE[name] = called

    return declare


def _wide(cp: Any, integers: Any) -> Any:
    """As i64. What does not fit is made the largest, which is out of any range, too."""
    if integers.dtype == np.uint64:
        integers = cp.minimum(integers, np.uint64(2**63 - 1))
    return integers.astype(np.int64, copy=False)


def _outside(cp: Any, indices: Any, length: int) -> Any:
    """Whether any index is out of range, on the device."""
    indices = _wide(cp, indices)
    return ((indices < -length) | (indices >= length)).any()


# --- creation ------------------------------------------------------------------------


@_kernel("arange")
def _arange(
    cp: Any, out: Any, *, start: int | float, stop: int | float, step: int | float, dtype: str
) -> None:
    if out.dtype.kind == "f":
        steps = cp.arange(out.size, dtype=np.float64)
        cp.add(cp.multiply(steps, float(step)), float(start), out)
    else:  # modulo 2^64, which is exact for every integer dtype
        steps = cp.arange(out.size, dtype=np.uint64) * np.uint64(int(step) % 2**64)
        cp.copyto(out, steps + np.uint64(int(start) % 2**64), casting="unsafe")


@_kernel("linspace")
def _linspace(
    cp: Any, out: Any, *, start: float, stop: float, num: int, endpoint: bool, dtype: str
) -> None:
    """As `numpy.linspace` computes it."""
    parts = num - 1 if endpoint else num
    step = (float(stop) - float(start)) / parts if parts > 0 else 0.0
    steps = cp.arange(num, dtype=np.float64)
    if step == 0 and parts > 0:  # also where it is less than any float
        steps = steps / float(parts) * (float(stop) - float(start))
    else:
        steps = steps * step
    cp.add(steps, float(start), out)
    if endpoint and num > 1:
        out[-1] = stop


@_kernel("eye")
def _eye(cp: Any, out: Any, *, rows: int, columns: int, k: int, dtype: str) -> None:
    k = max(-rows, min(k, columns))
    cp.copyto(out, cp.eye(rows, columns, k, out.dtype))


# --- elementwise ---------------------------------------------------------------------


@_kernel("multiply_add")
def _multiply_add(cp: Any, out: Any, x: Any, y: Any, z: Any) -> None:
    cp.add(cp.multiply(x, y, dtype=out.dtype), z, out, dtype=out.dtype)


@_kernel("floor_divide")
def _floor_divide(cp: Any, out: Any, x: Any, y: Any) -> None:
    if out.dtype.kind != "f":
        cp.floor_divide(x, y, out, dtype=out.dtype)
        return
    x, y = x.astype(out.dtype, copy=False), y.astype(out.dtype, copy=False)
    rest, quotient = cp.fmod(x, y), cp.divide(x, y)
    exact = cp.divide(x - rest, y) - _is_below(rest, y)
    floor = cp.floor(exact)
    floor += exact - floor > 0.5
    found = cp.where(exact != 0, floor, cp.copysign(0.0, quotient, dtype=out.dtype))
    infinite = cp.isinf(x) | cp.isinf(y) | (y == 0)
    cp.copyto(out, cp.where(infinite, quotient, found))


@_kernel("remainder")
def _remainder(cp: Any, out: Any, x: Any, y: Any) -> None:
    if out.dtype.kind != "f":
        cp.remainder(x, y, out, dtype=out.dtype)
        return
    x, y = x.astype(out.dtype, copy=False), y.astype(out.dtype, copy=False)
    rest = cp.fmod(x, y)
    signed = cp.where(rest != 0, rest, cp.copysign(rest, y))
    cp.copyto(out, cp.where(_is_below(rest, y), rest + y, signed))


def _is_below(rest: Any, y: Any) -> Any:
    """Where x / y is rounded towards 0 by `fmod`, and to the other side of it by `floor`."""
    return (rest != 0) & ((rest < 0) != (y < 0))


@_checking("pow")
def _pow(cp: Any, call: _Call, out: Any, x: Any, y: Any) -> None:
    if y.dtype.kind == "i" and out.dtype.kind == "i" and y.size:
        call.notes_value(y.min(), lambda least: least < 0, y)
    cp.power(x, y, out, dtype=out.dtype)


@_kernel("erf")
def _erf_kernel(cp: Any, out: Any, x: Any) -> None:
    _erf(x.astype(out.dtype, copy=False), out)


# --- shapes, order, dtype ------------------------------------------------------------


@_kernel("tril")
def _tril(cp: Any, out: Any, x: Any, *, k: int) -> None:
    cp.copyto(out, cp.where(_not_above(cp, k, x.shape), x, x.dtype.type(0)))


@_kernel("triu")
def _triu(cp: Any, out: Any, x: Any, *, k: int) -> None:
    cp.copyto(out, cp.where(_not_above(cp, k - 1, x.shape), x.dtype.type(0), x))


def _not_above(cp: Any, k: int, shape: Shape) -> Any:
    k = max(-shape[-2], min(k, shape[-1]))
    return cp.tri(shape[-2], shape[-1], k, np.bool_)


@_kernel("astype")
def _astype(cp: Any, out: Any, x: Any, *, dtype: str) -> None:
    if out.dtype.kind == "b":  # CuPy drops imaginary parts
        cp.not_equal(x, 0, out)
    elif x.dtype.kind == "f" and out.dtype.kind in "iu":
        truncate(cp, out, x)
    else:
        cp.copyto(out, x, casting="unsafe")


# --- products, factors, transforms ---------------------------------------------------


@_kernel("matmul")
def _matmul(cp: Any, out: Any, x: Any, y: Any, *, transpose_x: bool, transpose_y: bool) -> None:
    if x.ndim > 2 and y.ndim <= 2 and not transpose_x:
        rows = math.prod(x.shape[:-1])
        out = out.reshape(rows, *out.shape[x.ndim - 1 :])
        x = x.reshape(rows, x.shape[-1])
    x, y = x.astype(out.dtype, copy=False), y.astype(out.dtype, copy=False)
    cp.matmul(_swapped(x, transpose_x), _swapped(y, transpose_y), out=out)


@_kernel("batch_contract")
def _batch_contract(
    cp: Any, out: Any, x: Any, y: Any, *, transpose_x: bool, transpose_y: bool
) -> None:
    """One product: batch and inner axis are contracted together."""
    batch = math.prod(x.shape[:-2])
    x = _swapped(x.reshape(batch, *x.shape[-2:]), not transpose_x)  # [batch, inner, rows]
    y = _swapped(y.reshape(batch, *y.shape[-2:]), transpose_y)  # [batch, inner, columns]
    x, y = x.astype(out.dtype, copy=False), y.astype(out.dtype, copy=False)
    inner = batch * x.shape[1]
    cp.matmul(x.reshape(inner, x.shape[2]).T, y.reshape(inner, y.shape[2]), out=out)


def _swapped(x: Any, transpose: bool) -> Any:
    return x.swapaxes(-1, -2) if transpose else x


def _factor(kernel: Kernel, reason: str, out: Any, *operands: Any, **attributes: Any) -> None:
    """Run a kernel of `cupy.linalg` and read whether there is a result."""
    with importlib.import_module("cupyx").errstate(linalg="raise"):
        try:
            kernel(out, *operands, **attributes)
        except np.linalg.LinAlgError:
            raise LinAlgError(reason) from None


@_kernel("cholesky")
def _cholesky(cp: Any, out: Any, x: Any, *, upper: bool) -> None:
    lower = cp.linalg.cholesky(hermitian(x))
    cp.copyto(out, adjoint(lower) if upper else lower)


@_kernel("inv")
def _inv(cp: Any, out: Any, x: Any) -> None:
    cp.copyto(out, cp.linalg.inv(x))


@_kernel("solve")
def _solve(cp: Any, out: Any, x: Any, y: Any) -> None:
    """CuPy broadcasts no stacks of matrices."""
    if y.ndim == 1:
        columns = cp.broadcast_to(y[:, np.newaxis], (*x.shape[:-1], 1))
        cp.copyto(out, cp.linalg.solve(x, columns)[..., 0])
        return
    stack = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x = cp.broadcast_to(x, (*stack, *x.shape[-2:]))
    cp.copyto(out, cp.linalg.solve(x, cp.broadcast_to(y, (*stack, *y.shape[-2:]))))


@_kernel("det_vjp")
def _det_vjp(cp: Any, out: Any, g: Any, x: Any) -> None:
    u, s, vh = cp.linalg.svd(finite(x))
    n = s.shape[-1]
    others = cp.where(cp.eye(n, dtype=np.bool_), s.dtype.type(1), s[..., np.newaxis, :]).prod(-1)
    scale = g * (cp.linalg.det(u) * cp.linalg.det(vh)).conj()
    found = cp.matmul(u * others[..., np.newaxis, :] * scale[..., np.newaxis, np.newaxis], vh)
    cp.copyto(out, cp.where(strange(x)[..., np.newaxis, np.newaxis], x.dtype.type(np.nan), found))


@_kernel("eigh")
def _eigh(cp: Any, out: Any, x: Any) -> None:
    write(out, *cp.linalg.eigh(hermitian(finite(x))))
    out[strange(x)] = np.nan


@_kernel("eigvalsh")
def _eigvalsh(cp: Any, out: Any, x: Any) -> None:
    cp.copyto(out, cp.linalg.eigvalsh(hermitian(finite(x))))
    out[strange(x)] = np.nan


@_kernel("svdvals")
def _svdvals(cp: Any, out: Any, x: Any) -> None:
    cp.copyto(out, cp.linalg.svd(x, compute_uv=False))


@_kernel("pinv")
def _pinv(cp: Any, out: Any, x: Any, rtol: Any) -> None:
    if not x.size:
        out.fill(0)
        return
    u, s, vh = cp.linalg.svd(x, full_matrices=False)
    kept = s > s.max(-1, keepdims=True) * rtol[..., np.newaxis]
    one, zero = s.dtype.type(1), s.dtype.type(0)
    inverse = cp.where(kept, one / cp.where(kept, s, one), zero)
    cp.matmul(adjoint(vh), inverse[..., np.newaxis] * adjoint(u), out=out)


@_kernel("fft")
def _fft(cp: Any, out: Any, x: Any, *, axes: Shape, norm: str) -> None:
    cp.copyto(out, cp.fft.fftn(x, axes=axes, norm=norm) if axes else x)


@_kernel("ifft")
def _ifft(cp: Any, out: Any, x: Any, *, axes: Shape, norm: str) -> None:
    cp.copyto(out, cp.fft.ifftn(x, axes=axes, norm=norm) if axes else x)


@_kernel("rfft")
def _rfft(cp: Any, out: Any, x: Any, *, axis: int, norm: str) -> None:
    cp.copyto(out, cp.fft.rfft(x, axis=axis, norm=norm))


@_kernel("irfft")
def _irfft(cp: Any, out: Any, x: Any, *, n: int, axis: int, norm: str) -> None:
    """What is to be left out is made 0 first: of other inputs cuFFT says nothing."""
    whole = x.astype(np.promote_types(x.dtype, np.complex64), copy=True)
    ends = whole.swapaxes(axis, -1)
    ends[..., 0].imag = 0
    if n % 2 == 0:
        ends[..., -1].imag = 0
    cp.copyto(out, cp.fft.irfft(whole, n, axis=axis, norm=norm))


# --- reductions ----------------------------------------------------------------------


def _sum_into(cp: Any, out: Any, x: Any, axis: Axis, keepdims: bool) -> None:
    x.sum(axis=axis, dtype=out.dtype, out=out, keepdims=keepdims)


def _count(x: Any, axis: Axis) -> int:
    return math.prod(x.shape[i] for i in normalize_axes(axis, x.ndim))


@_kernel("sum")
def _sum(cp: Any, out: Any, x: Any, *, axis: Axis, keepdims: bool, dtype: str | None) -> None:
    _sum_into(cp, out, x, axis, keepdims)


@_kernel("mean")
def _mean(cp: Any, out: Any, x: Any, *, axis: Axis, keepdims: bool) -> None:
    total = out if x.dtype.kind in "fc" else cp.empty(out.shape, np.float64)
    _sum_into(cp, total, x, axis, keepdims)
    cp.divide(total, _count(x, axis), out, casting="same_kind")


@_kernel("var")
def _var(cp: Any, out: Any, x: Any, *, axis: Axis, keepdims: bool, correction: float) -> None:
    n, wide = _count(x, axis), out.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    mean = cp.empty(reduced_shape(x.shape, axis, True), wide)
    _sum_into(cp, mean, x, axis, True)
    cp.divide(mean, n, mean)
    squares = cp.square(cp.subtract(x, mean, dtype=wide))
    total = out if wide == out.dtype else cp.empty(out.shape, wide)
    _sum_into(cp, total, squares, axis, keepdims)
    cp.divide(total, n - correction if n > correction else 0, out, casting="same_kind")


@_kernel("logsumexp")
def _logsumexp(cp: Any, out: Any, x: Any, *, axis: Axis, keepdims: bool) -> None:
    if not x.size:
        out.fill(-np.inf)
        return
    peak = x.max(axis=axis, keepdims=True)
    peak = cp.where(cp.isfinite(peak), peak, x.dtype.type(0))
    _sum_into(cp, out, cp.exp(x - peak), axis, keepdims)
    cp.log(out, out)
    cp.add(out, peak.reshape(out.shape), out)


def _reduction(method: str) -> Callable[..., None]:
    """The kernel that is a method of the array. CuPy's functions would take `out` for a dtype."""

    def kernel(cp: Any, out: Any, x: Any, *, axis: Axis, keepdims: bool) -> None:
        getattr(x, method)(axis=axis, out=out, keepdims=keepdims)

    return kernel


for _method in ("max", "min", "argmax", "argmin", "all", "any"):
    _TABLE[_method] = _reduction(_method)


# --- by indices ----------------------------------------------------------------------


def _places(cp: Any, indices: Any, length: int) -> Any:
    """The indices counted from the front; those out of range wrap around."""
    return cp.remainder(indices, max(length, 1), dtype=np.int64)


@_checking("take")
def _take(cp: Any, call: _Call, out: Any, x: Any, indices: Any, *, axis: int) -> None:
    length = x.shape[axis]
    call.notes_indices(indices, -length, length)
    if x.size:
        cp.take(x, indices, axis=axis, out=out)
    else:
        out.fill(0)


@_checking("weighted_take")
def _weighted_take(cp: Any, call: _Call, out: Any, x: Any, indices: Any, weights: Any) -> None:
    call.notes_indices(indices, 0, x.shape[1])
    out.fill(0)
    rows = cp.arange(len(x))[:, None]
    for k in range(indices.shape[2] if x.size else 0):
        weight = weights[:, :, k, None]
        term = weight * x[rows, indices[:, :, k]]
        out += cp.where(weight == 0, x.dtype.type(0), term)


@_checking("take_along_axis")
def _take_along_axis(cp: Any, call: _Call, out: Any, x: Any, indices: Any, *, axis: int) -> None:
    n = x.shape[axis]
    call.notes_indices(indices, -n, n)
    if x.size:
        cp.copyto(out, cp.take_along_axis(x, _places(cp, indices, n), axis))
    else:
        out.fill(0)


@_checking("scatter_add")
def _scatter_add(
    cp: Any, call: _Call, out: Any, updates: Any, indices: Any, *, axis: int, length: int
) -> None:
    call.notes_indices(indices, -length, length)
    _sums_by_index(cp, out, updates, indices, normalize_axis(axis, out.ndim))


@_checking("index_add")
def _index_add(
    cp: Any, call: _Call, out: Any, x: Any, updates: Any, indices: Any, *, axis: int
) -> None:
    axis = normalize_axis(axis, out.ndim)
    length = out.shape[axis]
    noted = call.notes_indices(indices, -length, length)
    sums = cp.empty(out.shape, out.dtype)
    _sums_by_index(cp, sums, updates, indices, axis)
    if noted and cp.may_share_memory(out, x):
        sums = cp.where(_outside(cp, indices, length), out.dtype.type(0), sums)
    cp.add(x, sums, out)


@_checking("scatter_add_along_axis")
def _scatter_add_along_axis(
    cp: Any, call: _Call, out: Any, updates: Any, indices: Any, *, axis: int, length: int
) -> None:
    call.notes_indices(indices, -length, length)
    axis = normalize_axis(axis, out.ndim)
    before, behind = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    places = _places(cp, indices, length).reshape(before, indices.shape[axis], behind)
    rows = cp.arange(before).reshape(-1, 1, 1) * length + places
    flat = rows * behind + cp.arange(behind)
    _sums_by_index(cp, out.reshape(-1), updates.reshape(-1), flat.reshape(-1), 0)


def _sums_by_index(cp: Any, out: Any, updates: Any, indices: Any, axis: int) -> None:
    """Write the sums of the updates of each index along `axis`; 0 where there is none.

    The updates are sorted by index. Then each adds up those of its index that lie 1, 2, 4, ...
    before it (Hillis and Steele, CACM 29, 1986), after which the last of an index has the sum.
    """
    before, length = math.prod(out.shape[:axis]), out.shape[axis]
    behind, count = math.prod(out.shape[axis + 1 :]), indices.size
    if not (out.size and count):
        out.fill(0)
        return
    places = _places(cp, indices, length).reshape(-1)
    order = cp.argsort(places)
    places = places.take(order)
    rows = updates.reshape(before, count, behind)
    sums = cp.ascontiguousarray(rows.take(order, axis=1).swapaxes(0, 1))
    distance = 1
    while distance < count:
        same = (places[distance:] == places[:-distance]).reshape(-1, 1, 1)
        earlier = cp.where(same, sums[:-distance], out.dtype.type(0))
        sums[distance:] += earlier
        distance *= 2
    ends = cp.searchsorted(places, cp.arange(length), side="right") - 1
    found = sums.take(ends, axis=0)
    has = (places.take(ends) == cp.arange(length)).reshape(-1, 1, 1)
    total = cp.where(has, found, out.dtype.type(0)).swapaxes(0, 1)
    cp.copyto(out.reshape(before, length, behind), total)


@_checking("index_set")
def _index_set(
    cp: Any, call: _Call, out: Any, x: Any, values: Any, indices: Any, *, axis: int, axes: int
) -> None:
    """All values for one element are made the last of them, so that their order does not matter."""
    axis = normalize_axis(axis, max(x.ndim, 1))
    before, behind = x.shape[:axis], x.shape[axis + axes :]
    length = math.prod(x.shape[axis : axis + axes])
    noted = call.notes_indices(indices, -length, length)
    in_place = cp.may_share_memory(out, x)
    if not in_place:
        cp.copyto(out, x)
    if not (out.size and indices.size):
        return
    places = _places(cp, indices, length).reshape(-1)
    numbers = cp.arange(places.size)
    last = cp.zeros(length, np.int64)
    cp.maximum.at(last, places, numbers)
    shape = math.prod(before), places.size, math.prod(behind)
    given_values = cp.broadcast_to(values, before + indices.shape + behind).reshape(shape)
    chosen = given_values.take(last.take(places), axis=1)
    rows = out.reshape(shape[0], length, shape[2])
    if noted and in_place:
        chosen = cp.where(_outside(cp, indices, length), rows.take(places, axis=1), chosen)
    rows[:, places] = chosen


@_checking("dynamic_update")
def _dynamic_update(
    cp: Any, call: _Call, out: Any, x: Any, update: Any, start: Any, *, axis: int
) -> None:
    length, rows = x.shape[axis], update.shape[axis]

    def refuses(first: int) -> bool:
        return not 0 <= (first + length if first < 0 else first) <= length - rows

    first = _wide(cp, start)
    noted = call.notes_value(first, refuses, start)
    in_place = cp.may_share_memory(out, x)
    if not in_place:
        cp.copyto(out, x)
    if not update.size:
        return
    places = _places(cp, first + cp.arange(rows), length)
    axis = normalize_axis(axis, x.ndim)
    index = (slice(None),) * axis + (places,)
    if noted and in_place:
        front = cp.where(first < 0, first + length, first)
        bad = (front < 0) | (front > length - rows)
        update = cp.where(bad, out.take(places, axis=axis), update)
    out[index] = update


@_checking("one_hot")
def _one_hot(cp: Any, call: _Call, out: Any, indices: Any, *, num_classes: int, dtype: str) -> None:
    call.notes_indices(indices, 0, num_classes)
    cp.copyto(out, _hot(cp, indices, num_classes))


def _hot(cp: Any, indices: Any, classes: int) -> Any:
    """Where the index is the number of its class: bool[..., classes]."""
    wide = _wide(cp, indices)
    return wide[..., np.newaxis] == cp.arange(classes)


# --- by masks ------------------------------------------------------------------------


@_kernel("nonzero_indices")
def _nonzero_indices(cp: Any, x: Any) -> Any:
    return cp.ascontiguousarray(cp.argwhere(x))


@_kernel("boolean_index")
def _boolean_index(cp: Any, x: Any, mask: Any) -> Any:
    if not mask.size:  # of an axis of length 0, which chooses nothing
        return cp.empty((0, *x.shape[mask.ndim :]), x.dtype)
    return x[mask]


@_checking("mask_scatter")
def _mask_scatter(cp: Any, call: _Call, out: Any, updates: Any, mask: Any, *, shape: Shape) -> None:
    _set_masked(cp, call, out, None, updates, mask)


@_checking("mask_set")
def _mask_set(cp: Any, call: _Call, out: Any, x: Any, values: Any, mask: Any) -> None:
    _set_masked(cp, call, out, x, values, mask)


def _set_masked(cp: Any, call: _Call, out: Any, x: Any | None, values: Any, mask: Any) -> None:
    """x, or 0, with the values in order where the mask is True: each finds its value by the number
    of places before it."""
    count = len(values)
    true = cp.count_nonzero(mask)
    call.notes_value(true, lambda found: found != count, mask)
    if not (mask.size and values.size):
        if x is None:
            out.fill(0)
        elif not cp.may_share_memory(out, x):
            cp.copyto(out, x)
        return
    values = cp.broadcast_to(values, (count, *out.shape[mask.ndim :]))
    number = cp.cumsum(mask.reshape(-1), dtype=np.int64) - 1
    found = values.take(number, axis=0).reshape(out.shape)
    chosen = (mask & (true == count)).reshape(mask.shape + (1,) * (out.ndim - mask.ndim))
    cp.copyto(out, cp.where(chosen, found, out.dtype.type(0) if x is None else x))


# --- neural networks -----------------------------------------------------------------

_LINEAR: Final = math.sqrt(2 / math.pi)
_CUBIC: Final = 0.044715 * _LINEAR


def _tanh_of_cubic(cp: Any, out: Any, square: Any, x: Any) -> None:
    """tanh(sqrt(2 / pi) (x + 0.044715 x^3)). `square` is x^2, and may be `out`."""
    cp.multiply(square, _CUBIC, out)
    out += _LINEAR
    out *= x
    cp.tanh(out, out)


@_kernel("gelu")
def _gelu(cp: Any, out: Any, x: Any, *, approximate: bool) -> None:
    if approximate:
        cp.square(x, out)
        _tanh_of_cubic(cp, out, out, x)
    else:
        _erf(x * math.sqrt(0.5), out)
    out += 1
    out *= 0.5
    out *= x


@_kernel("gelu_vjp")
def _gelu_vjp(cp: Any, out: Any, g: Any, x: Any, *, approximate: bool) -> None:
    x = cp.clip(x, -64, 64)  # beyond, powers overflow and the slope is 0 or 1
    slope = cp.square(x)
    if approximate:  # with t = tanh(u): (1 + t) (1/2 + (1 - t) x u' / 2)
        _tanh_of_cubic(cp, out, slope, x)
        slope *= 1.5 * _CUBIC
        slope += _LINEAR / 2
        slope *= x
        slope *= 1 - out
        slope += 0.5
        out += 1
        out *= slope
    else:  # (1 + erf(x / sqrt(2)) + 2 x Phi'(x)) / 2
        _erf(x * math.sqrt(0.5), out)
        slope *= -0.5
        cp.exp(slope, slope)
        slope *= _LINEAR
        slope *= x
        out += 1
        out += slope
        out *= 0.5
    out *= g


@_kernel("dropout")
def _dropout(cp: Any, out: Any, x: Any, key: Any, *, rate: float) -> None:
    drawn = gpu_random.uniform(cp, key, x.size, np.float32).reshape(x.shape)
    cp.multiply(x, 1 / (1 - rate), out)
    cp.copyto(out, 0, where=drawn < rate)


@_kernel("softmax")
def _softmax(cp: Any, out: Any, x: Any, *, axis: int) -> None:
    if x.size:
        cp.subtract(x, x.max(axis=axis, keepdims=True), out)
        cp.exp(out, out)
        out /= out.sum(axis=axis, keepdims=True)


@_kernel("log_softmax")
def _log_softmax(cp: Any, out: Any, x: Any, *, axis: int) -> None:
    if x.size:
        cp.subtract(x, x.max(axis=axis, keepdims=True), out)
        out -= cp.log(cp.exp(out).sum(axis=axis, keepdims=True))


@_checking("softmax_cross_entropy")
def _softmax_cross_entropy(cp: Any, call: _Call, out: Any, logits: Any, labels: Any) -> None:
    classes = logits.shape[-1]
    call.notes_indices(labels, 0, classes)
    if not logits.size:
        out.fill(0)
        return
    shifted = logits - logits.max(axis=-1, keepdims=True)
    places = _places(cp, labels, classes)[..., np.newaxis]
    chosen = cp.take_along_axis(shifted, places, -1)[..., 0]
    cp.exp(shifted, shifted)
    shifted.sum(axis=-1, out=out)
    cp.log(out, out)
    out -= chosen


@_checking("softmax_cross_entropy_vjp")
def _softmax_cross_entropy_vjp(
    cp: Any, call: _Call, out: Any, g: Any, logits: Any, labels: Any
) -> None:
    classes = logits.shape[-1]
    call.notes_indices(labels, 0, classes)
    _softmax(cp, out, logits, axis=-1)
    cp.subtract(out, _hot(cp, labels, classes), out)
    out *= g[..., np.newaxis]


def _centered(x: Any, eps: float) -> tuple[Any, Any]:
    """x - mean(x) along the last axis, and 1 / sqrt(var + eps)."""
    length = x.shape[-1]
    centered = x - x.sum(axis=-1, keepdims=True) / length
    square = (centered * centered).sum(axis=-1, keepdims=True)
    return centered, 1 / np.sqrt(square / length + eps)


@_kernel("layer_norm")
def _layer_norm(cp: Any, out: Any, x: Any, scale: Any, bias: Any, *, eps: float) -> None:
    centered, inverse = _centered(x, eps)
    cp.multiply(centered, inverse, out)
    out *= scale
    out += bias


@_kernel("layer_norm_normalize")
def _layer_norm_normalize(cp: Any, out: Any, x: Any, *, eps: float) -> None:
    cp.multiply(*_centered(x, eps), out)


@_kernel("layer_norm_vjp")
def _layer_norm_vjp(cp: Any, out: Any, g: Any, x: Any, scale: Any, *, eps: float) -> None:
    length = x.shape[-1]
    centered, inverse = _centered(x, eps)
    cp.multiply(g, scale, out)
    together = (out * centered).sum(axis=-1, keepdims=True)
    centered *= together * np.square(inverse) / length
    centered += out.sum(axis=-1, keepdims=True) / length
    out -= centered
    out *= inverse


@_kernel("layer_norm_scale_vjp")
def _layer_norm_scale_vjp(cp: Any, out: Any, g: Any, x: Any, *, eps: float) -> None:
    centered, inverse = _centered(x, eps)
    centered *= inverse
    centered *= g
    centered.sum(axis=tuple(range(x.ndim - 1)), out=out)


# --- windows -------------------------------------------------------------------------


def _padded(cp: Any, x: Any, padding: Sides, value: float = 0) -> Any:
    """x inside a frame of `value`; x itself where the frame is empty."""
    if not any(map(any, padding)):
        return x
    lengths = [n + sum(side) for n, side in zip(x.shape[1:-1], padding, strict=True)]
    padded = cp.full((x.shape[0], *lengths, x.shape[-1]), value, x.dtype)
    padded[_inside(x.shape, padding)] = x
    return padded


def _inside(shape: Shape, padding: Sides) -> tuple[slice, ...]:
    """Where in its frame what has this shape lies."""
    pairs = zip(shape[1:-1], padding, strict=True)
    return (slice(None), *[slice(before, before + n) for n, (before, _) in pairs])


def _windows(
    cp: Any, padded: Any, grid: Shape, window: Shape, stride: Shape, dilation: Shape
) -> Any:
    """All windows, [N, *grid, *window, C], as a view of the padded images."""
    n, *axes, channel = padded.strides
    shape = (padded.shape[0], *grid, *window, padded.shape[-1])
    steps = [many * each for many, each in zip((*stride, *dilation), (*axes, *axes), strict=True)]
    return cp.lib.stride_tricks.as_strided(padded, shape, (n, *steps, channel))


def _window_elements(
    padded: Any, grid: Shape, window: Shape, stride: Shape, dilation: Shape
) -> Iterator[tuple[Shape, Any]]:
    """Each place in a window, and the elements of all windows there, a view."""
    for place in itertools.product(*map(range, window)):
        parts = [
            slice(i * apart, i * apart + (n - 1) * step + 1, step)
            for i, apart, n, step in zip(place, dilation, grid, stride, strict=True)
        ]
        yield place, padded[(slice(None), *parts)]


@_kernel("patches")
def _patches(
    cp: Any,
    out: Any,
    x: Any,
    *,
    window: Shape,
    stride: Shape,
    padding: Sides,
    pad_value: float,
    dilation: Shape,
) -> None:
    padded = _padded(cp, x, padding, pad_value)
    cp.copyto(out, _windows(cp, padded, out.shape[1:3], window, stride, dilation))


@_kernel("unpatches")
def _unpatches(
    cp: Any, out: Any, x: Any, *, shape: Shape, stride: Shape, padding: Sides, dilation: Shape
) -> None:
    """Windows that do not overlap are written at once, others place by place."""
    out.fill(0)
    padded = _padded(cp, out, padding)
    grid, window = x.shape[1:3], x.shape[3:5]
    span = [(n - 1) * apart for n, apart in zip(window, dilation, strict=True)]
    if stride[0] > span[0] and stride[1] > span[1]:
        _windows(cp, padded, grid, window, stride, dilation)[...] = x
    else:
        for (i, j), elements in _window_elements(padded, grid, window, stride, dilation):
            elements += x[:, :, :, i, j]
    if padded is not out:
        out[...] = padded[_inside(out.shape, padding)]


def _by_groups(cp: Any, windows: Any, axes: int, groups: int) -> Any:
    """[N, *grid, *window, C] -> [groups, places, elements of a window in a group]"""
    *places, channels = windows.shape
    apart = windows.reshape(*places, groups, channels // groups)
    shape = groups, math.prod(places[: axes + 1]), math.prod(places[axes + 1 :]) * apart.shape[-1]
    return cp.moveaxis(apart, -2, 0).reshape(shape)


def _weights(kernel: Any, groups: int) -> Any:
    """[*window, I / groups, O] -> [groups, elements of a window in a group, O / groups]"""
    inner, outputs = math.prod(kernel.shape[:-1]), kernel.shape[-1]
    return kernel.reshape(inner, groups, outputs // groups).transpose(1, 0, 2)


@_kernel("conv2d")
def _conv2d(
    cp: Any,
    out: Any,
    x: Any,
    kernel: Any,
    *,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
    groups: int,
) -> None:
    """The windows as rows of a matrix, of so many images at a time as memory is well spent on."""
    axes, weights = kernel.ndim - 2, _weights(kernel, groups)
    grid, window = out.shape[1:-1], kernel.shape[:-2]
    windows = _windows(cp, _padded(cp, x, padding), grid, window, stride, dilation)
    inner = weights.shape[1] * groups
    step = max(1, _MOST_COLUMNS // max(1, math.prod(grid) * inner))
    for i in range(0, len(out), step):
        part = out[i : i + step]
        made = cp.matmul(_by_groups(cp, windows[i : i + step], axes, groups), weights)
        part[...] = made.transpose(1, 0, 2).reshape(part.shape)


@_kernel("conv_transpose2d")
def _conv_transpose2d(
    cp: Any,
    out: Any,
    x: Any,
    kernel: Any,
    *,
    shape: Shape,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
    groups: int,
) -> None:
    """One product for each group, whose columns are added place by place."""
    *window, inputs, _ = kernel.shape
    out.fill(0)
    padded = _padded(cp, out, padding)
    rows, weights = _by_groups(cp, x, len(window), groups), _weights(kernel, groups)
    made = cp.matmul(rows, weights.transpose(0, 2, 1)).transpose(1, 0, 2)
    every = made.reshape(rows.shape[1], groups, math.prod(window), inputs)
    places = _window_elements(padded, x.shape[1:-1], tuple(window), stride, dilation)
    for i, (_, elements) in enumerate(places):
        elements += every[:, :, i].reshape(elements.shape)
    if padded is not out:
        out[...] = padded[_inside(out.shape, padding)]


@_kernel("conv2d_kernel_vjp")
def _conv2d_kernel_vjp(
    cp: Any,
    out: Any,
    g: Any,
    x: Any,
    *,
    window: Shape,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
    groups: int,
) -> None:
    padded = _padded(cp, x, padding)
    windows = _windows(cp, padded, g.shape[1:-1], window, stride, dilation)
    columns = _by_groups(cp, windows, len(window), groups).transpose(0, 2, 1)
    made = cp.matmul(columns, _by_groups(cp, g, len(window), groups))
    out[...] = made.transpose(1, 0, 2).reshape(out.shape)


@_kernel("max_pool2d")
def _max_pool2d(
    cp: Any, out: Any, x: Any, *, window: Shape, stride: Shape, padding: Sides, dilation: Shape
) -> None:
    padded = _padded(cp, x, padding, -np.inf)
    windows = _windows(cp, padded, out.shape[1:3], window, stride, dilation)
    windows.max(axis=(3, 4), out=out)


@_kernel("max_pool2d_vjp")
def _max_pool2d_vjp(
    cp: Any,
    out: Any,
    g: Any,
    x: Any,
    *,
    window: Shape,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
) -> None:
    frame = _padded(cp, cp.zeros(x.shape, x.dtype), padding)
    padded = _padded(cp, x, padding, -np.inf)
    windows = _windows(cp, padded, g.shape[1:3], window, stride, dilation)
    chosen = (windows == windows.max(axis=(3, 4), keepdims=True)).astype(g.dtype)
    shares = g / chosen.sum(axis=(3, 4))
    for (i, j), elements in _window_elements(frame, g.shape[1:3], window, stride, dilation):
        elements += chosen[:, :, :, i, j] * shares
    out[...] = frame[_inside(out.shape, padding)]


@_kernel("avg_pool2d")
def _avg_pool2d(
    cp: Any, out: Any, x: Any, *, window: Shape, stride: Shape, padding: Sides, dilation: Shape
) -> None:
    padded = _padded(cp, x, padding)
    windows = _windows(cp, padded, out.shape[1:3], window, stride, dilation)
    windows.sum(axis=(3, 4), out=out)
    out /= math.prod(window)


# --- random --------------------------------------------------------------------------


@_kernel("split_key")
def _split_key(cp: Any, out: Any, key: Any, *, n: int) -> None:
    cp.copyto(out, gpu_random.words(cp, key, 2 * n, SPLIT).reshape(n, 2))


@_kernel("fold_in")
def _fold_in(cp: Any, out: Any, key: Any, data: Any) -> None:
    cp.copyto(out, gpu_random.words(cp, key, 2, FOLD, data))


def _normal(cp: Any, table: Any, out: Any, key: Any, *, shape: Shape, dtype: str) -> None:
    """The processor's table for f64 is none that could be computed again."""
    if out.dtype == np.float32:
        cp.copyto(out, gpu_random.normal(cp, table, key, out.size).reshape(shape))
    else:
        _on_host(OPS["normal"].kernel, out, key, shape=shape, dtype=dtype)


@_kernel("uniform")
def _uniform(cp: Any, out: Any, key: Any, *, shape: Shape, dtype: str) -> None:
    cp.copyto(out, gpu_random.uniform(cp, key, out.size, out.dtype).reshape(shape))


@_checking("bernoulli")
def _bernoulli(cp: Any, call: _Call, out: Any, key: Any, p: Any, *, shape: Shape) -> None:
    bad = (~((p >= 0) & (p <= 1))).any()
    call.notes_value(bad, bool, p)
    drawn = gpu_random.uniform(cp, key, out.size, np.dtype(np.float64))
    cp.less(drawn.reshape(shape), p, out)


@_kernel("randint")
def _randint(cp: Any, out: Any, key: Any, *, low: int, high: int, shape: Shape, dtype: str) -> None:
    drawn = gpu_random.integers(cp, key, low, high, out.size, out.dtype)
    cp.copyto(out, drawn.reshape(shape), casting="unsafe")
