"""Adapters for the expressions of `names.txt`: PyTorch's arguments in the words of mlvm.

Images and sequences have their channels last here, and second there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import mlvm.eager as ml


def axes(dim: Any) -> Any:
    """The axes of a reduction: of none, PyTorch reduces all."""
    return None if dim in (None, (), []) else tuple(dim) if isinstance(dim, list) else dim


def lengths(items: Sequence[Any]) -> Any:
    """The ints of `reshape(x, 2, 3)` or `reshape(x, (2, 3))`."""
    return tuple(items[0]) if len(items) == 1 and isinstance(items[0], (tuple, list)) else items


def several(items: Sequence[Any]) -> Any:
    """The tensors of `f(x, y)` or `f([x, y])`."""
    return items[0] if len(items) == 1 and isinstance(items[0], (tuple, list)) else items


def number(x: Any) -> Any:
    """The number of a tensor without dimensions."""
    return x.item() if isinstance(x, ml.Tensor) else x


def factor(value: Any, x: Any) -> Any:
    """A number beside integers or bools, which PyTorch makes one of them."""
    if isinstance(value, ml.Tensor) or x.dtype.is_inexact:
        return value
    return bool(value) if x.dtype.kind == "bool" else int(value)


def ends(start: Any, end: Any) -> tuple[Any, Any]:
    """Both ends of a range of which one may be left out."""
    return (0, start) if end is None else (start, end)


def several_of(function: Callable[[Any], Any], items: Sequence[Any]) -> Any:
    """The function of one tensor, or of each of several."""
    xs = several(items)
    return function(xs[0]) if xs is items and len(xs) == 1 else [function(x) for x in xs]


def wide(*xs: Any) -> list[Any]:
    """The operands in f64, or in c128 if one of them is complex."""
    kinds = [x.dtype.kind if isinstance(x, ml.Tensor) else type(x).__name__ for x in xs]
    dtype = ml.complex128 if "complex" in kinds else ml.float64
    return [x.astype(dtype) if isinstance(x, ml.Tensor) else x for x in xs]


def product(xs: Sequence[Any]) -> Any:
    """x @ y @ ..., of as many as there are."""
    return functools.reduce(ml.matmul, xs)


def booleans(*xs: Any) -> Any:
    """Return which elements are not zero."""
    return [x.astype(ml.bool) if isinstance(x, ml.Tensor) else bool(x) for x in xs]


def rounded_division(x: Any, y: Any, mode: str | None) -> Any:
    if mode is None:
        return ml.divide(x, y)
    return ml.floor_divide(x, y) if mode == "floor" else ml.trunc(ml.divide(x, y)).astype(x.dtype)


def converted(x: Any, *kinds: Any) -> Any:
    """x in the dtype that stands among the arguments of `to`, if there is one."""
    for kind in kinds:
        if isinstance(kind, ml.Tensor):
            return x.astype(kind.dtype)
        if not isinstance(kind, (str, bool)) and kind is not None:
            return x.astype(kind)
    return x


def joined(xs: Any) -> Any:
    """The tensors of `cat`, which leaves out empty vectors."""
    return [x for x in xs if x.shape != (0,)] or xs[:1]


def widths(x: Any, pad: Sequence[int]) -> Any:
    """The widths of a border, which PyTorch counts from the last axis."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


PADS: Final = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def expanded(x: Any, shape: Sequence[Any]) -> Any:
    """The shape of `expand`, where -1 keeps a length."""
    sizes = lengths(shape)
    own = (1,) * (len(sizes) - x.ndim) + x.shape
    return tuple(n if n != -1 else m for n, m in zip(sizes, own, strict=True))


def cuts(x: Any, sizes: Any, dim: int) -> Any:
    """Return the positions where `split` by sizes cuts."""
    if isinstance(sizes, int):
        return tuple(range(sizes, x.shape[dim], sizes))
    return tuple(sum(sizes[:i]) for i in range(1, len(sizes)))


def of_length_1(x: Any, dim: Any) -> Any:
    """The axes that `squeeze` drops: those of another length stay."""
    if dim is None:
        return None
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(i for i in dims if x.ndim and x.shape[i] == 1)


def over(dim: Any) -> Any:
    """The axes of `var(x, dim)`, where `var(x, True)` is of all."""
    return None if isinstance(dim, bool) else axes(dim)


def corrected(dim: Any, unbiased: Any, correction: Any) -> float:
    """Return what `var` is to subtract from the count: 1 by default."""
    flag = dim if isinstance(dim, bool) else unbiased
    return float(flag) if flag is not None else 1.0 if correction is None else float(correction)


def from_end(x: Any, dim: int | None) -> Any:
    """An axis counted from the last; without one, the first of length 3, as in `cross`."""
    return (x.shape.index(3) if dim is None else dim % max(x.ndim, 1)) - x.ndim


def _extreme(either: Any, of_all: Any, place: Any, x: Any, y: Any, keepdim: bool) -> Any:
    """`max` in its three meanings: of two tensors, of all, along an axis (with positions)."""
    if isinstance(y, ml.Tensor):
        return either(x, y)
    if y is None:
        return of_all(x)
    return of_all(x, axis=y, keepdims=keepdim), place(x, axis=y, keepdims=keepdim)


largest: Final = functools.partial(_extreme, ml.maximum, ml.max, ml.argmax)
smallest: Final = functools.partial(_extreme, ml.minimum, ml.min, ml.argmin)


def axes_of(s: Any, dim: Any) -> Any:
    """The axes that lengths are of: the last ones, unless told otherwise."""
    return tuple(range(-len(s), 0)) if dim is None and s is not None else dim


def solve(x: Any, y: Any, left: bool) -> Any:
    """PyTorch takes y for a stack of vectors where the shapes allow it."""
    if y.ndim > 1 and y.shape == x.shape[:-1]:
        return solve(x, ml.expand_dims(y, axis=-1), left)[..., 0]
    return ml.linalg.solve(x, y) if left else ml.linalg.solve(x.mT, y.mT).mT


def matrix_norm(x: Any, ord: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    x = ml.moveaxis(x if dtype is None else x.astype(dtype), tuple(dim), (-2, -1))
    norms = ml.linalg.matrix_norm(x, ord=ord)
    if not keepdim:
        return norms
    return ml.expand_dims(norms, axis=tuple(sorted(i % x.ndim for i in dim)))


def permutation(pivots: Any) -> Any:
    """LAPACK's exchanges of rows, one after the other, as the rows that come of them."""
    exchanges = pivots.numpy().astype(np.int64) - 1
    rows = np.broadcast_to(np.arange(exchanges.shape[-1]), exchanges.shape).copy()
    for place in np.ndindex(exchanges.shape[:-1]):
        for i, j in enumerate(exchanges[place]):
            rows[place][[i, j]] = rows[place][[j, i]]
    return ml.asarray(rows)


def spectral(x: Any, n_fft: int, win_length: int | None, onesided: bool | None) -> Any:
    """Return the arguments of `stft` and `istft`, where the half of a spectrum is that of real
    numbers."""
    real = x.dtype.is_float or (x.ndim > 1 and x.shape[-2] == n_fft // 2 + 1)
    longer = win_length is not None and win_length != n_fft
    return absent(x, win_length=longer, onesided=onesided is not None and onesided != real)


def norm(x: Any, p: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    x = x if dtype is None else x.astype(dtype)
    if p == "nuc":
        return matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim, None)
    order = 2 if p in ("fro", None) else p
    return ml.linalg.vector_norm(x, ord=order, axis=axes(dim), keepdims=keepdim)


def softplus(x: Any, beta: float, threshold: float) -> Any:
    return ml.where(x * beta > threshold, x, ml.softplus(x * beta) / beta)


def range_of(x: Any, low: float, high: float) -> Any:
    """The range of `histc`: that of x, where both ends are equal."""
    return (low, high) if low != high else (float(ml.min(x)), float(ml.max(x)))


def in_order(result: Any, inverse: bool, counts: bool) -> Any:
    return result if inverse or counts else (result[0] if isinstance(result, tuple) else result)


def counted(result: Any, x: Any) -> Any:
    """A histogram, whose counts are of the dtype of x."""
    return result[0].astype(x.dtype), result[1]


def along(axis: int, x: Any, index: Any) -> Any:
    """A key of `index` along one axis, and all of the others."""
    return (slice(None),) * (axis % max(x.ndim, 1)) + (index,)


def places(x: Any, axis: int, index: Any) -> Any:
    """The places that `scatter` writes to: of each element of `index`, on all axes."""
    grid = ml.meshgrid(*[ml.arange(n) for n in index.shape], indexing="ij")
    return tuple(index if i == axis % x.ndim else each for i, each in enumerate(grid))


# --- neural networks -----------------------------------------------------------------------


class NotHere(Exception):
    """PyTorch's function has an argument that ours lacks."""


def absent(value: Any, **arguments: Any) -> Any:
    """The value, if none of these arguments is given. Raises `NotHere`."""
    for name, argument in arguments.items():
        if argument is not None and argument is not False:
            raise NotHere(f"there is no {name}=")
    return value


def certain(x: Any, rate: float) -> Any:
    """x, if nothing is dropped. Raises `NotHere`."""
    if rate > 0:
        raise NotHere("what is dropped is random")
    return x


def last(x: Any, ndim: int | None = None) -> Any:
    """x with its channels last, and with a batch of one, if it has one axis less than `ndim`."""
    if ndim is not None and x.ndim == ndim - 1:
        x = ml.expand_dims(x)
    return x if x.ndim < 2 else ml.moveaxis(x, 1, -1)


def first(x: Any, of: Any = None) -> Any:
    """x with its channels second, and without a batch, if `of` has none."""
    x = x if x.ndim < 2 else ml.moveaxis(x, -1, 1)
    return x[0] if of is not None and of.ndim == x.ndim - 1 else x


def pooled_size(x: Any, size: Any, count: int) -> Any:
    """The size of an adaptive pooling, where None keeps a length."""
    sizes = [size] * count if isinstance(size, int) or size is None else size
    pairs = zip(sizes, x.shape[-count:], strict=True)
    return tuple(n if each is None else each for each, n in pairs)


def sides(padding: Any, count: int) -> Any:
    """A padding of both sides of each axis."""
    if isinstance(padding, str):
        return padding.upper()
    pads = [padding] * count if isinstance(padding, int) else [*padding] * (count // len(padding))
    pairs = tuple((n, n) for n in pads)
    return pairs[0] if count == 1 else pairs


def longer(both: Any, beyond: Any, count: int) -> Any:
    """A padding that takes less from the end, as PyTorch's `output_padding` does."""
    rest = [beyond] * count if isinstance(beyond, int) else beyond
    pairs = [both] if count == 1 else both
    ends = tuple((n, m - k) for (n, m), k in zip(pairs, rest, strict=True))
    absent(ends, output_padding=any(end < 0 for _, end in ends))
    return ends[0] if count == 1 else ends


def one(value: Any, count: int) -> Any:
    """An int where a window has one axis."""
    if not isinstance(value, (tuple, list)):
        return value
    return value[0] if count == 1 or len(value) == 1 else tuple(value)


def conv(
    function: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    output_padding: Any = 0,
) -> Any:
    count = weight.ndim - 2
    both = sides(padding, count)
    if output_padding:
        both = longer(both, output_padding, count)
    y = function(
        last(x, weight.ndim),
        ml.moveaxis(weight, (0, 1), (-1, -2)),
        stride=one(stride, count),
        padding=both,
        dilation=one(dilation, count),
        groups=groups,
    )
    return first(y if bias is None else y + bias, x)


def pool(
    function: Callable[..., Any],
    count: int,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    dilation: Any = 1,
    return_indices: bool = False,
) -> Any:
    """A pooling of means, or of the largest, whose last two arguments come by name."""
    padded, spread = (n if isinstance(n, int) else max(n) for n in (padding, dilation))
    absent(x, ceil_mode=ceil_mode, divisor_override=divisor_override, dilation=spread > 1)
    absent(x, count_include_pad=not count_include_pad and padded > 0)
    window = one(kernel_size, count)
    steps = one(stride, count) or window
    y = function(last(x, count + 2), window, stride=steps, padding=sides(padding, count))
    return first(y, x)


def columns(windows: Any, of: Any) -> Any:
    """Windows in PyTorch's order: [N, C KH KW, OH OW]."""
    n, height, width, rows, wide, channels = windows.shape
    y = ml.permute_dims(windows, (0, 5, 3, 4, 1, 2))
    y = y.reshape((n, channels * rows * wide, height * width))
    return y[0] if of.ndim == 3 else y


def flat(x: Any, shape: Any, weight: Any = None, bias: Any = None) -> tuple[Any, Any, Any]:
    """Return the operands of a normalisation of the last axes, as one axis; a scale of ones, a bias
    of 0."""
    count = math.prod(shape)
    rows = x.reshape((*x.shape[: x.ndim - len(shape)], count))
    scale = ml.ones(count, dtype=x.dtype) if weight is None else weight.reshape(count)
    return rows, scale, ml.zeros(count, dtype=x.dtype) if bias is None else bias.reshape(count)


def layer(module: Any, weight: Any, bias: Any) -> Any:
    """The layer with these parameters, those which are given."""
    if weight is not None:
        module.scale = weight.reshape(-1)
    if bias is not None:
        module.bias = bias
    return module


def batch_norm(
    kind: Any,
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if x.ndim < 2:
        raise NotHere("samples have channels")
    module = layer(kind(x.shape[1], eps=eps, dtype=x.dtype), weight, bias)
    if not training:
        module.eval()
        module.mean, module.var = ml.nn.buffer(mean), ml.nn.buffer(var)
    return first(module(last(x)))


def reduced(losses: Any, reduction: str) -> Any:
    if reduction == "batchmean":
        return ml.sum(losses) / losses.shape[0]
    return {"none": lambda x: x, "mean": ml.mean, "sum": ml.sum}[reduction](losses)


def ctc(
    function: Callable[..., Any],
    x: Any,
    labels: Any,
    lengths: Any,
    label_lengths: Any,
    blank: int,
    reduction: str,
    zero_infinity: bool,
) -> Any:
    """PyTorch's mean divides each loss by the number of its labels."""
    absent(x, targets_of_one_axis=labels.ndim == 1)
    counts = [
        ml.asarray(n) if isinstance(n, (list, tuple)) else n for n in (lengths, label_lengths)
    ]
    losses = function(x, labels, *counts, blank=blank)
    if zero_infinity:
        losses = ml.where(ml.isinf(losses), 0.0, losses)
    return reduced(losses / ml.maximum(counts[1], 1) if reduction == "mean" else losses, reduction)


def _singular(u: Any, s: Any) -> tuple[Any, Any]:
    """The sizes of the left singular vectors, without those of the null space, and the values."""
    return abs(u[..., : s.shape[-1]]), s


MODES: Final = ("bilinear", "nearest", "bicubic")
OUTSIDES: Final = ("zeros", "border", "reflection")

COMPARED: Final[dict[str, Callable[[Any], Any]]] = {
    "chosen": lambda r: r,
    "first": lambda r: r[0] if isinstance(r, (tuple, list)) else r,
    "eig": lambda r: r[0],
    "eigh": lambda r: (r[0], abs(r[1])),
    "of_lower": lambda r: (r[0], ml.tril(r[1]) if isinstance(r[1], ml.Tensor) else r[1].tril()),
    "of_upper": lambda r: (r[0], ml.triu(r[1]) if isinstance(r[1], ml.Tensor) else r[1].triu()),
    "hermitian_gradient": lambda r: (r[0] + r[0].mT.conj(), *r[1:]),
    "unique": lambda r: r,
    "svd": lambda r: (*_singular(r[0], r[1]), abs(r[2][..., : r[1].shape[-1], :])),
    "svd_of_old": lambda r: _singular(r[0], r[1]),
}
"""What of results is compared: signs of vectors, or which of equal elements it was, may differ, and
so may a basis of a null space."""
