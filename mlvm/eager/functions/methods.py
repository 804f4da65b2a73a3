"""The functions that are also methods of a tensor.

A method is here if numpy's ndarray has it, or PyTorch's or JAX's, and it means the same there; the
name is theirs. Most are the functions themselves, so that a call costs no more. Methods with
another meaning or name here have a hint in `interop/hints.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final

from mlvm.core.errors import ArgumentError, TransposeError
from mlvm.core.rules import Axis, normalize_axes
from mlvm.eager.functions import elements, shapes, sorting, sums
from mlvm.eager.functions.arguments import integer
from mlvm.eager.functions.indexing import At
from mlvm.eager.functions.shapes import transposed
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.methods import Methods
from mlvm.eager.tensor.templates import call
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


def reshape(x: Tensor, /, *shape: int | Sequence[int], copy: bool | None = None) -> Tensor:
    """Reshape x: `x.reshape(2, -1)` or `x.reshape((2, -1))`."""
    return shapes.reshape(x, _one_tuple(shape), copy=copy)


def ravel(x: Tensor, /) -> Tensor:
    """Flatten x to a vector, in row-major order."""
    return shapes.reshape(x, -1)


def permute(x: Tensor, /, *axes: int | Sequence[int]) -> Tensor:
    """Permute axes with PyTorch's signature: `x.permute(0, 2, 1)`."""
    return shapes.permute_dims(x, _one_tuple(axes))


@public
def transpose(x: Tensor, /, *axes: int | Sequence[int] | None) -> Tensor:
    """Permute axes with numpy's signature: `x.transpose(0, 2, 1)`; without axes, reverse them.

    `x.transpose(0, 1)` of a matrix is rejected as ambiguous: numpy returns x itself, PyTorch x.T.
    Only numpy accepts the tuple `x.transpose((0, 1))`, which returns x.
    """
    if axes in ((), (None,)):
        return shapes.permute_dims(x, tuple(reversed(range(x.ndim))))
    order = _one_tuple(axes)
    if isinstance(order, Sequence) and len(order) == 2 != x.ndim:
        raise ArgumentError(
            "expected all axes in their new order, as in numpy; use swapaxes to swap two axes"
        ).at("transpose", (x.type, *order))
    if len(axes) == 2 == x.ndim and _axes(x, *axes) == [0, 1]:
        raise ArgumentError(
            "ambiguous: numpy would return x, and PyTorch its transpose; use x.T, or "
            "permute_dims(x, (0, 1))"
        ).at("transpose", (x.type, *axes))
    return shapes.permute_dims(x, order)


@public
def repeat(x: Tensor, /, *repeats: object, axis: object = ...) -> Tensor:
    """Repeat elements with numpy's signature: `x.repeat(2, axis=1)`.

    `x.repeat(2, 1)`, and `x.repeat(2)` of a vector, are rejected as ambiguous: numpy repeats each
    element, PyTorch repeats the whole tensor.
    """
    if len(repeats) != 1 or (axis is ... and x.ndim == 1 and isinstance(repeats[0], int)):
        raise ArgumentError(
            "ambiguous: numpy repeats each element, PyTorch the tensor; use x.repeat(n, axis=...), "
            f"or ml.tile(x, {repeats})"
        ).at("repeat", (x.type, *repeats))
    count: Any = repeats[0]
    along: Any = None if axis is ... else axis
    return shapes.repeat(x, count, axis=along)


@public
def mean(
    x: Tensor,
    /,
    axis: Axis = None,
    dtype: object = None,
    out: Tensor | None = None,
    *,
    keepdims: bool = False,
    where: Tensor | None = None,
) -> Tensor:
    """Compute the mean with numpy's keywords; `numpy.mean(x)` calls it."""
    if axis is None and out is None and not keepdims and where is None:
        return op.mean(_cast(x, dtype))
    return op.mean(_cast(x, dtype), axis, keepdims=keepdims, out=out, where=where)


@public
def var(
    x: Tensor,
    /,
    axis: Axis = None,
    dtype: object = None,
    out: Tensor | None = None,
    ddof: float = 0.0,
    *,
    correction: float | None = None,
    keepdims: bool = False,
    where: Tensor | None = None,
) -> Tensor:
    """Compute the variance with numpy's keywords; `numpy.var(x)` calls it.

    `ddof` is numpy's name for `correction`."""
    by = _correction(ddof, correction)
    return sums.var(_cast(x, dtype), axis, correction=by, keepdims=keepdims, out=out, where=where)


@public
def std(
    x: Tensor,
    /,
    axis: Axis = None,
    dtype: object = None,
    out: Tensor | None = None,
    ddof: float = 0.0,
    *,
    correction: float | None = None,
    keepdims: bool = False,
    where: Tensor | None = None,
) -> Tensor:
    """Compute the standard deviation with numpy's keywords; `numpy.std(x)` calls it.

    `ddof` is numpy's name for `correction`."""
    by = _correction(ddof, correction)
    if out is None:
        return sums.std(_cast(x, dtype), axis, correction=by, keepdims=keepdims, where=where)
    return op.sqrt(var(x, axis, dtype, correction=by, keepdims=keepdims, where=where), out=out)


def _axes(x: Tensor, *axes: Any) -> list[int]:
    """Normalise axes to ints counted from the front."""
    return [normalize_axes(integer(axis, "axis"), x.ndim)[0] for axis in axes]


def _cast(x: Tensor, dtype: object) -> Tensor:
    return x if dtype is None else elements.astype(x, dtype)


def _correction(ddof: float, correction: float | None) -> float:
    if correction is None:
        return float(ddof)
    if ddof:
        raise ArgumentError("ddof and correction are synonyms; pass only one")
    return correction


def _one_tuple(args: tuple[Any, ...]) -> Any:
    """Return ints that are passed separately or as one sequence."""
    return args[0] if len(args) == 1 else args


class _OfOp:
    """Method of an op, created at the first access."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: Tensor | None, owner: type | None = None) -> Callable[..., Tensor]:
        function = getattr(op, self.name)
        setattr(Methods, self.name, function)
        return function if x is None else partial(function, x)


_OF_OPS: Final = """abs acos acosh add all any argmax argmin asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil conj copy copysign cos cosh
    divide erf exp expm1 flip floor floor_divide greater greater_equal hypot isfinite isinf isnan
    less less_equal log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or
    logical_xor logsumexp matmul max maximum min minimum multiply negative not_equal pow prod
    reciprocal relu remainder rsqrt sigmoid sign signbit sin sinh softmax sqrt square subtract
    sum tan tanh trunc"""
_OF_FUNCTIONS: Final[dict[Any, str]] = {
    elements: "astype clip count_nonzero nonzero round take",
    shapes: "broadcast_to flatten moveaxis roll squeeze swapaxes tril triu",
    sorting: "argsort topk",
    sums: "diff outer",
}
METHODS: Final[dict[str, Callable[..., Any] | _OfOp]] = {
    **{name: _OfOp(name) for name in _OF_OPS.split()},
    **{
        name: getattr(room, name) for room, words in _OF_FUNCTIONS.items() for name in words.split()
    },
    **{
        each.__name__: each for each in (reshape, ravel, permute, repeat, transpose, mean, var, std)
    },
}


_SWAP: Final = one_op("permute_dims", axes=(1, 0))


def _transposed(x: Tensor) -> Tensor:
    """Transpose a matrix. Raises `TransposeError` unless x has two dimensions.

    Invalid calls:
        v.T  # TransposeError
    """
    type = x.type
    if type.ndim != 2:
        raise TransposeError(
            f"expected 2 dimensions for T, got {type.ndim}; use mT to swap the last two axes"
        ).at("T", (type,))
    return call(transposed, (x,), {}) if 1 in type.shape else apply(_SWAP, x)


def _by_template(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a getter that calls the function by a template, if one exists."""

    @wraps(function)
    def getter(x: Tensor) -> Tensor:
        return call(function, (x,), {})  # type: ignore[no-any-return]

    return getter


def _at(x: Tensor) -> At:
    """Update elements of x at x.at[key] out of place: `x.at[key].add(values)`."""
    return At(x)


PROPERTIES: Final[dict[str, Callable[..., Any]]] = {
    "T": _transposed,
    "at": _at,
    "imag": op.imag,
    "mT": _by_template(transposed),
    "real": op.real,
}

for _name, _function in METHODS.items():
    setattr(Methods, _name, _function)
for _name, _function in PROPERTIES.items():
    setattr(Methods, _name, property(_function))
