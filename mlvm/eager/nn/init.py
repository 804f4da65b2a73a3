"""Initialisers of parameters, for `kernel_init=`, `bias_init=` and `embedding_init=` of layers.

An initialiser is a function of a shape, `init(shape, key=..., dtype=...)`, such as
`ml.random.normal` or the functions of this module. Called without a shape, a function of this
module returns an initialiser with the given options: `kernel_init=ml.nn.init.normal(std=0.02)`. The
same key results in the same values.

A kernel is [*window, channels in, channels out]. The fan in is the product of the window and the
channels in, the fan out the product of the window and the channels out. The names are those that
JAX and PyTorch share. As in PyTorch, normal distributions are not truncated, except
`truncated_normal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, TypeAlias

from mlvm.core.errors import ArgumentError
from mlvm.core.types import f32
from mlvm.eager.functions import creation, elements, linalg, random, shapes
from mlvm.eager.functions.arguments import Ints, integers
from mlvm.eager.nn.parameters import number, require_float
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor import wrapper
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import names_of, public

Fan: TypeAlias = Literal["fan_in", "fan_out"]


def _initialiser(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """Wrap a function so that without a shape it returns an initialiser with the given options."""
    fn = public(fn)
    place = [*signature(fn).parameters].index("shape")

    @wraps(fn)
    def function(*args: Any, **options: Any) -> Any:
        if len(args) > place or "shape" in options:
            return fn(*args, **options)
        try:
            signature(fn).bind_partial(*args, **options)
        except TypeError as error:
            text = wrapper.hint(fn.__name__, args, options, signature(fn).parameters)
            raise ArgumentError(text or f"{fn.__name__}(): {error}") from None
        return partial(fn, *args, **options)

    return function


@_initialiser
def zeros(shape: Ints, *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Return zeros; the key is not used.

    The result: f[*shape]. Raises `ShapeError` if a length is negative; `DTypeError` if `dtype` is
    not a float.

        >>> ml.nn.Linear(2, 3, kernel_init=ml.nn.init.zeros).kernel
        Tensor([[0., 0., 0.],
                [0., 0., 0.]], f32[2,3])

    Invalid calls:
        ml.nn.init.zeros(-2)  # ShapeError
        ml.nn.init.zeros(2, dtype="i64")  # DTypeError
    """
    return creation.zeros(shape, dtype=require_float("zeros", dtype))


@_initialiser
def ones(shape: Ints, *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Return ones; the key is not used.

    The result: f[*shape]. Raises `ShapeError` if a length is negative; `DTypeError` if `dtype` is
    not a float.

        >>> ml.nn.Linear(2, 3, bias_init=ml.nn.init.ones).bias
        Tensor([1., 1., 1.], f32[3])

    Invalid calls:
        ml.nn.init.ones(-2)  # ShapeError
        ml.nn.init.ones(2, dtype="i64")  # DTypeError
    """
    return creation.ones(shape, dtype=require_float("ones", dtype))


@_initialiser
def constant(
    value: float, shape: Ints, *, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Return a tensor filled with the value; the key is not used.

    The result: f[*shape]. Raises `ShapeError` if a length is negative; `DTypeError` if `dtype` is
    not a float; `ArgumentError` if the value is not a number.

        >>> ml.nn.Linear(2, 3, bias_init=ml.nn.init.constant(0.5)).bias
        Tensor([0.5, 0.5, 0.5], f32[3])

    Invalid calls:
        ml.nn.init.constant("1", 2)  # ArgumentError
        ml.nn.init.constant(1.0, -2)  # ShapeError
        ml.nn.init.constant(1.0, 2, dtype="i64")  # DTypeError
    """
    return creation.full(shape, number("value", value), dtype=require_float("constant", dtype))


@_initialiser
def normal(
    shape: Ints,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw normal values with that mean and standard deviation.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if mean or std is not a number.

        >>> ml.nn.Linear(2, 3, kernel_init=ml.nn.init.normal(std=0.02)).kernel.type
        f32[2,3]

    Invalid calls:
        ml.nn.init.normal(2, dtype="i64")  # DTypeError
        ml.nn.init.normal(2, key=v)  # ShapeError
        ml.nn.init.normal(2, std="1")  # ArgumentError
    """
    drawn = random.normal(shape, key=key, dtype=require_float("normal", dtype))
    return _moved(drawn, mean, std)


@_initialiser
def uniform(
    shape: Ints,
    *,
    low: float = 0.0,
    high: float = 1.0,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw uniform values, low <= x < high.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` unless low < high.

        >>> ml.nn.Linear(2, 3, kernel_init=ml.nn.init.uniform(low=-0.1, high=0.1)).kernel.type
        f32[2,3]

    Invalid calls:
        ml.nn.init.uniform(2, dtype="i64")  # DTypeError
        ml.nn.init.uniform(2, key=v)  # ShapeError
        ml.nn.init.uniform(2, low=2.0)  # ArgumentError
    """
    kind = require_float("uniform", dtype)
    return random.uniform(shape, low=low, high=high, key=key, dtype=kind)


@_initialiser
def truncated_normal(
    shape: Ints,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    lower: float = -2.0,
    upper: float = 2.0,
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw mean + std x for standard normal x with lower <= x <= upper, as in JAX.

    PyTorch's bounds apply to the result instead.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` unless lower < upper or if mean or
    std is not a number.

        >>> narrow = ml.nn.init.truncated_normal(std=0.02)
        >>> ml.max(ml.abs(ml.nn.Embedding(5, 3, embedding_init=narrow).embedding)) <= 0.04
        Tensor(True, bool[])

    Invalid calls:
        ml.nn.init.truncated_normal(2, dtype="i64")  # DTypeError
        ml.nn.init.truncated_normal(2, key=v)  # ShapeError
        ml.nn.init.truncated_normal(2, lower=3.0)  # ArgumentError
    """
    kind = require_float("truncated_normal", dtype)
    return _moved(random.truncated_normal(lower, upper, shape, key=key, dtype=kind), mean, std)


@_initialiser
def lecun_normal(shape: Ints, *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw normal values with variance 1 / fan in, the default initialiser of layers.

    LeCun et al., Efficient BackProp, 1998.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes.

        >>> ml.nn.init.lecun_normal((2, 3)).type
        f32[2,3]

    Invalid calls:
        ml.nn.init.lecun_normal((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.lecun_normal((2, 2), key=v)  # ShapeError
        ml.nn.init.lecun_normal(2)  # ArgumentError
    """
    return _of_variance("lecun_normal", shape, 1 / _fans(shape)[0], key, dtype)


@_initialiser
def lecun_uniform(shape: Ints, *, key: Tensor | None = None, dtype: object = None) -> Tensor:
    """Draw uniform values around 0 with variance 1 / fan in, like `lecun_normal`.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes.

        >>> ml.nn.init.lecun_uniform((2, 3)).type
        f32[2,3]

    Invalid calls:
        ml.nn.init.lecun_uniform((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.lecun_uniform((2, 2), key=v)  # ShapeError
        ml.nn.init.lecun_uniform(2)  # ArgumentError
    """
    return _of_variance("lecun_uniform", shape, 1 / _fans(shape)[0], key, dtype)


@_initialiser
def xavier_normal(
    shape: Ints, *, gain: float = 1.0, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Draw normal values with variance 2 gain^2 / (fan in + fan out), like JAX's glorot_normal.

    Glorot and Bengio, AISTATS 2010.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes or
    the gain is not a number.

        >>> ml.nn.init.xavier_normal((2, 3)).type
        f32[2,3]

    Invalid calls:
        ml.nn.init.xavier_normal((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.xavier_normal((2, 2), key=v)  # ShapeError
        ml.nn.init.xavier_normal(2)  # ArgumentError
    """
    variance = 2 * number("gain", gain) ** 2 / sum(_fans(shape))
    return _of_variance("xavier_normal", shape, variance, key, dtype)


@_initialiser
def xavier_uniform(
    shape: Ints, *, gain: float = 1.0, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Draw uniform values around 0 with the variance of `xavier_normal`; JAX's glorot_uniform.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes or
    the gain is not a number.

        >>> ml.nn.init.xavier_uniform((2, 3)).type
        f32[2,3]

    Invalid calls:
        ml.nn.init.xavier_uniform((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.xavier_uniform((2, 2), key=v)  # ShapeError
        ml.nn.init.xavier_uniform(2)  # ArgumentError
    """
    variance = 2 * number("gain", gain) ** 2 / sum(_fans(shape))
    return _of_variance("xavier_uniform", shape, variance, key, dtype)


@_initialiser
def kaiming_normal(
    shape: Ints,
    *,
    negative_slope: float = 0.0,
    mode: Fan = "fan_in",
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw normal values with variance 2 / ((1 + negative_slope^2) fan); JAX's he_normal.

    Use it for layers followed by a `relu`, or by a `leaky_relu` with that slope (He et al., arXiv
    1502.01852).

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes, the
    slope is not a number, or the mode is unknown.

        >>> ml.nn.Conv2d(3, 8, 3, kernel_init=ml.nn.init.kaiming_normal).kernel.type
        f32[3,3,3,8]

    Invalid calls:
        ml.nn.init.kaiming_normal((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.kaiming_normal((2, 2), key=v)  # ShapeError
        ml.nn.init.kaiming_normal(2)  # ArgumentError
    """
    variance = _kaiming(shape, negative_slope, mode)
    return _of_variance("kaiming_normal", shape, variance, key, dtype)


@_initialiser
def kaiming_uniform(
    shape: Ints,
    *,
    negative_slope: float = 0.0,
    mode: Fan = "fan_in",
    key: Tensor | None = None,
    dtype: object = None,
) -> Tensor:
    """Draw uniform values around 0 with the variance of `kaiming_normal`; JAX's he_uniform.

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes, the
    slope is not a number, or the mode is unknown.

        >>> ml.nn.Linear(2, 3, kernel_init=ml.nn.init.kaiming_uniform(mode="fan_out")).kernel.type
        f32[2,3]

    Invalid calls:
        ml.nn.init.kaiming_uniform((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.kaiming_uniform((2, 2), key=v)  # ShapeError
        ml.nn.init.kaiming_uniform(2)  # ArgumentError
    """
    variance = _kaiming(shape, negative_slope, mode)
    return _of_variance("kaiming_uniform", shape, variance, key, dtype)


@_initialiser
def orthogonal(
    shape: Ints, *, gain: float = 1.0, key: Tensor | None = None, dtype: object = None
) -> Tensor:
    """Draw `gain` times a uniformly distributed orthogonal matrix.

    The matrix is [window and channels in, channels out]; the columns, or the rows if there are
    fewer, are orthonormal (Saxe et al., arXiv 1312.6120).

    The result: f[*shape]. Raises `ShapeError` if a length is negative or `key` is not a u64[2];
    `DTypeError` if `dtype` is not a float; `ArgumentError` if there are fewer than two axes or
    the gain is not a number.

        >>> q = ml.nn.init.orthogonal((3, 2))
        >>> ml.all(ml.abs(q.T @ q - ml.eye(2)) < 1e-5)
        Tensor(True, bool[])

    Invalid calls:
        ml.nn.init.orthogonal((2, 2), dtype="i64")  # DTypeError
        ml.nn.init.orthogonal((2, 2), key=v)  # ShapeError
        ml.nn.init.orthogonal(2)  # ArgumentError
    """
    kind, lengths = require_float("orthogonal", dtype), _kernel(shape)
    rows, columns = math.prod(lengths[:-1]), lengths[-1]
    drawn = random.normal(
        (max(rows, columns), min(rows, columns)), key=key, dtype=f32 if kind.is_half else kind
    )
    q, r = linalg.qr(drawn)
    q = elements.where(op.less(linalg.diagonal(r), 0.0), -q, q)  # make the diagonal of r positive
    q = q if rows >= columns else shapes.permute_dims(q, (1, 0))
    q = op.astype(q * number("gain", gain), dtype=kind)
    return shapes.reshape(q, lengths)


def _kaiming(shape: Ints, negative_slope: float, mode: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"expected mode as 'fan_in' or 'fan_out', got {mode!r}")
    fan = _fans(shape)[mode == "fan_out"]
    return 2 / ((1 + number("negative_slope", negative_slope) ** 2) * fan)


def _kernel(shape: Ints) -> tuple[int, ...]:
    """Return the shape. Raises `ArgumentError` unless it is the shape of a kernel."""
    lengths = integers(shape, "shape")
    if len(lengths) < 2:
        raise ArgumentError(
            f"expected a kernel of two axes or more, [*window, in, out], got {shape}"
        )
    return lengths


def _fans(shape: Ints) -> tuple[int, int]:
    """Return fan in and fan out, at least 1."""
    *window, inputs, outputs = _kernel(shape)
    places = math.prod(window)
    return max(places * inputs, 1), max(places * outputs, 1)


def _of_variance(
    name: str, shape: Ints, variance: float, key: Tensor | None, dtype: object
) -> Tensor:
    """Draw values with that variance, normal or uniform depending on the suffix of the name."""
    kind = require_float(name, dtype)
    if name.endswith("normal"):
        return _moved(random.normal(shape, key=key, dtype=kind), 0.0, math.sqrt(variance))
    bound = math.sqrt(3 * variance)
    if not bound:
        return creation.zeros(shape, dtype=kind)
    return random.uniform(shape, low=-bound, high=bound, key=key, dtype=kind)


def _moved(x: Tensor, mean: float, std: float) -> Tensor:
    """Compute mean + std x in place."""
    if number("std", std) != 1.0:
        x *= float(std)
    if number("mean", mean):
        x += float(mean)
    return x


__all__ = names_of(globals())
