"""What the expressions of `names.txt` are written with: PyTorch's arguments as they are said here.

Images and sequences have their channels last here, and second there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import mlvm.eager as ml


def axes(dim: Any) -> Any:
    """The axes of a reduction: of none, PyTorch reduces all."""
    return None if dim in (None, (), []) else tuple(dim) if isinstance(dim, list) else dim


def lengths(given: Sequence[Any]) -> Any:
    """The ints of `reshape(x, 2, 3)` or `reshape(x, (2, 3))`."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def several(given: Sequence[Any]) -> Any:
    """The tensors of `f(x, y)` or `f([x, y])`."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


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


def booleans(*xs: Any) -> Any:
    """Whether they are not zero."""
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


def padded(x: Any, pad: Sequence[int], mode: str, value: Any) -> Any:
    return ml.pad(x, widths(x, pad), value or 0.0)


def expanded(x: Any, shape: Sequence[Any]) -> Any:
    """The shape of `expand`, where -1 keeps a length."""
    wanted = lengths(shape)
    own = (1,) * (len(wanted) - x.ndim) + x.shape
    return tuple(n if n != -1 else m for n, m in zip(wanted, own, strict=True))


def cuts(x: Any, sizes: Any, dim: int) -> Any:
    """Where `split` by sizes cuts."""
    if isinstance(sizes, int):
        return tuple(range(sizes, x.shape[dim], sizes))
    return tuple(sum(sizes[:i]) for i in range(1, len(sizes)))


def of_length_1(x: Any, dim: Any) -> Any:
    """The axes that `squeeze` drops: those of another length stay."""
    if dim is None:
        return None
    given = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(i for i in given if x.ndim and x.shape[i] == 1)


def over(dim: Any) -> Any:
    """The axes of `var(x, dim)`, where `var(x, True)` is of all."""
    return None if isinstance(dim, bool) else axes(dim)


def corrected(dim: Any, unbiased: Any, correction: Any) -> float:
    """What `var` is to subtract from the count: 1, unless told otherwise."""
    told = dim if isinstance(dim, bool) else unbiased
    return float(told) if told is not None else 1.0 if correction is None else float(correction)


def from_end(x: Any, dim: int | None) -> int:
    """An axis counted from the last; without one, the first of length 3, as in `cross`."""
    return (x.shape.index(3) if dim is None else dim % max(x.ndim, 1)) - x.ndim


def largest(x: Any, y: Any, keepdim: bool) -> Any:
    """`max` in its three meanings: of two tensors, of all, along an axis (with positions)."""
    if isinstance(y, ml.Tensor):
        return ml.maximum(x, y)
    if y is None:
        return ml.max(x)
    return ml.max(x, axis=y, keepdims=keepdim), ml.argmax(x, axis=y, keepdims=keepdim)


def smallest(x: Any, y: Any, keepdim: bool) -> Any:
    if isinstance(y, ml.Tensor):
        return ml.minimum(x, y)
    if y is None:
        return ml.min(x)
    return ml.min(x, axis=y, keepdims=keepdim), ml.argmin(x, axis=y, keepdims=keepdim)


def last(s: Any, dim: Any) -> Any:
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


def matrix_rank(x: Any, tol: Any, atol: Any, rtol: Any) -> Any:
    return ml.linalg.matrix_rank(x, rtol=rtol)


def norm(x: Any, p: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    x = x if dtype is None else x.astype(dtype)
    if p == "nuc":
        return matrix_norm(x, p, (-2, -1) if dim is None else dim, keepdim, None)
    order = 2 if p in ("fro", None) else p
    return ml.linalg.vector_norm(x, ord=order, axis=axes(dim), keepdims=keepdim)


def softplus(x: Any, beta: float, threshold: float) -> Any:
    return ml.where(x * beta > threshold, x, ml.softplus(x * beta) / beta)


COMPARED: Final[dict[str, Callable[[Any], Any]]] = {
    "chosen": lambda r: r,
    "first": lambda r: r[0] if isinstance(r, (tuple, list)) else r,
    "eig": lambda r: r[0],
    "eigh": lambda r: (r[0], abs(r[1])),
    "hermitian_gradient": lambda r: (r[0] + r[0].mT.conj(), *r[1:]),
    "svd": lambda r: (abs(r[0]), r[1], abs(r[2])),
    "svd_of_old": lambda r: (abs(r[0]), r[1]),
}
"""What of results is compared: signs of vectors, or which of equal elements it was, may differ."""
