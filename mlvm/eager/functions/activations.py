"""Activations composed of ops, with JAX's names, or PyTorch's if JAX has no such function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from mlvm.core.errors import ShapeError
from mlvm.core.rules import require
from mlvm.eager.functions.arguments import type_of
from mlvm.eager.functions.elements import where
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.shapes import split
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public
from mlvm.renamed import old_names

P = ParamSpec("P")


def _activation(fn: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Declare an activation: a public function that rounds only once in half precision."""
    return public(through_f32(fn))


@_activation
def silu(x: Tensor, /) -> Tensor:
    """Compute x sigmoid(x), also called swish.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex.

        >>> ml.silu(ml.asarray([-1.0, 1.0]))
        Tensor([-0.26894143,  0.7310586 ], f32[2])
    """
    return x * op.sigmoid(x)


@_activation
def leaky_relu(x: Tensor, /, negative_slope: float = 0.01) -> Tensor:
    """Compute x where x > 0, else negative_slope x.

    Maas et al., Rectifier Nonlinearities Improve Neural Network Acoustic Models, 2013.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex.

        >>> ml.leaky_relu(ml.asarray([-1.0, 2.0]))
        Tensor([-0.01,  2.  ], f32[2])

    Invalid calls:
        ml.leaky_relu("text")  # DTypeError
    """
    return where(op.greater(x, 0.0), x, op.multiply(x, negative_slope))


@_activation
def elu(x: Tensor, /, alpha: float = 1.0) -> Tensor:
    """Compute x where x > 0, else alpha (exp(x) - 1) (Clevert et al., arXiv 1511.07289).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex.

        >>> ml.elu(ml.asarray([-1.0, 2.0]))
        Tensor([-0.63212055,  2.        ], f32[2])

    Invalid calls:
        ml.elu("text")  # DTypeError
    """
    positive = op.greater(x, 0.0)
    return where(positive, x, op.expm1(where(positive, 0.0, x)) * alpha)


@_activation
def softplus(x: Tensor, /) -> Tensor:
    """Compute log(1 + exp(x)) as `logaddexp(x, 0)`, which does not overflow.

    All derivatives are correct at 0 (Dugas et al., Incorporating Second-Order Functional
    Knowledge, 2001).

    x: [...], integers or floats; the result: [...], the same, or f32 for integers. Raises
    `DTypeError` if an operand is bool or complex.

        >>> ml.softplus(ml.asarray([0.0, 1000.0]))
        Tensor([6.931472e-01, 1.000000e+03], f32[2])
    """
    require("real", type_of(x))
    return op.logaddexp(x, 0.0)


@_activation
def celu(x: Tensor, /, alpha: float = 1.0) -> Tensor:
    """Compute x where x > 0, else alpha (exp(x / alpha) - 1).

    It is an `elu` with a continuous slope for every alpha (Barron, arXiv 1704.07483).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.celu(ml.asarray([-1.0, 2.0]))
        Tensor([-0.63212055,  2.        ], f32[2])
    """
    positive = op.greater(_floats(x), 0.0)
    return where(positive, x, op.expm1(where(positive, 0.0, x) / alpha) * alpha)


@_activation
def selu(x: Tensor, /) -> Tensor:
    """Compute 1.0507 elu(x, 1.6733).

    The constants preserve mean 0 and variance 1 from layer to layer (Klambauer et al., arXiv
    1706.02515).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.selu(ml.asarray([-1.0, 2.0]))
        Tensor([-1.1113307,  2.101402 ], f32[2])
    """
    return elu(_floats(x), 1.6732632423543772) * 1.0507009873554805


@_activation
def mish(x: Tensor, /) -> Tensor:
    """Compute x tanh(softplus(x)) (Misra, arXiv 1908.08681).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.mish(ml.asarray([-1.0, 2.0]))
        Tensor([-0.30340144,  1.9439589 ], f32[2])
    """
    return x * op.tanh(softplus(_floats(x)))


@_activation
def glu(x: Tensor, /, axis: int = -1) -> Tensor:
    """Compute a sigmoid(b), where a and b are the two halves of x along `axis`.

    Dauphin et al., arXiv 1612.08083.

    x: f[..., 2 n] -> f[..., n]. Raises `ShapeError` if the length is odd; `AxisError` if x has no
    such axis; `DTypeError` if x is not of floats.

        >>> ml.glu(ml.asarray([1.0, 2.0, 0.0, 100.0]))
        Tensor([0.5, 2. ], f32[2])
    """
    values, gates = split(_floats(x), 2, axis=axis)
    return values * op.sigmoid(gates)


@_activation
def prelu(x: Tensor, slope: Tensor, /) -> Tensor:
    """Compute x where x > 0, else slope x, with a learned slope.

    The slope is a scalar, or a vector with one element per channel (last axis). He et al., arXiv
    1502.01852.

    x: f[..., C], slope: f[] or f[C] -> f[..., C]. Raises `ShapeError` if the shapes do not fit;
    `DTypeError` if x is not of floats.

        >>> ml.prelu(ml.asarray([[-1.0, -1.0]]), ml.asarray([0.25, 0.5]))
        Tensor([[-0.25, -0.5 ]], f32[1,2])
    """
    if _floats(slope).shape not in ((), _floats(x).shape[-1:]):
        raise ShapeError(
            f"expected a slope of shape [] or {list(x.shape[-1:])}, the channels of x, got "
            f"{list(slope.shape)}"
        )
    positive = op.greater(x, 0.0)
    return where(positive, x, slope * where(positive, 0.0, x))


@_activation
def relu6(x: Tensor, /) -> Tensor:
    """Compute min(max(x, 0), 6) (Howard et al., arXiv 1704.04861).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.relu6(ml.asarray([-1.0, 2.0, 9.0]))
        Tensor([0., 2., 6.], f32[3])
    """
    return op.clip(_floats(x), 0.0, 6.0)


@_activation
def hard_sigmoid(x: Tensor, /) -> Tensor:
    """Compute min(max(x + 3, 0), 6) / 6 (Howard et al., arXiv 1905.02244).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.hard_sigmoid(ml.asarray([-3.0, 0.0, 9.0]))
        Tensor([0. , 0.5, 1. ], f32[3])
    """
    return op.clip(_floats(x) + 3.0, 0.0, 6.0) / 6.0


@_activation
def hard_swish(x: Tensor, /) -> Tensor:
    """Compute x hard_sigmoid(x) (Howard et al., arXiv 1905.02244).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.hard_swish(ml.asarray([-3.0, 1.5, 9.0]))
        Tensor([-0.   ,  1.125,  9.   ], f32[3])
    """
    return x * hard_sigmoid(x)


@_activation
def hard_tanh(x: Tensor, /, min: float = -1.0, max: float = 1.0) -> Tensor:
    """Limit x to min <= x <= max.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.hard_tanh(ml.asarray([-3.0, 0.5, 9.0]))
        Tensor([-1. ,  0.5,  1. ], f32[3])
    """
    return op.clip(_floats(x), min, max)


@_activation
def log_sigmoid(x: Tensor, /) -> Tensor:
    """Compute log(1 / (1 + exp(-x))) as -softplus(-x), which does not overflow.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.log_sigmoid(ml.asarray([0.0, -1000.0]))
        Tensor([-6.931472e-01, -1.000000e+03], f32[2])
    """
    return -softplus(-_floats(x))


@_activation
def soft_sign(x: Tensor, /) -> Tensor:
    """Compute x / (1 + |x|).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.soft_sign(ml.asarray([-1.0, 3.0]))
        Tensor([-0.5 ,  0.75], f32[2])
    """
    most = float(finfo(_floats(x).dtype).max)
    x = op.clip(x, -most, most)  # the limits at infinity are 1 and -1
    return x / (1.0 + op.abs(x))


@_activation
def tanh_shrink(x: Tensor, /) -> Tensor:
    """Compute x - tanh(x).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.tanh_shrink(ml.asarray([1.0]))
        Tensor([0.23840582], f32[1])
    """
    return _floats(x) - op.tanh(x)


@_activation
def soft_shrink(x: Tensor, /, limit: float = 0.5) -> Tensor:
    """Move x towards 0 by `limit`, to 0 if |x| <= limit: the proximal operator of limit |x|.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.soft_shrink(ml.asarray([-2.0, 0.25, 1.0]))
        Tensor([-1.5,  0. ,  0.5], f32[3])
    """
    return _floats(x) - op.clip(x, -limit, limit)


@_activation
def hard_shrink(x: Tensor, /, limit: float = 0.5) -> Tensor:
    """Replace x by 0 where |x| <= limit.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.hard_shrink(ml.asarray([-2.0, 0.25, 1.0]))
        Tensor([-2.,  0.,  1.], f32[3])
    """
    return where(op.less_equal(op.abs(_floats(x)), limit), 0.0, x)


def _floats(x: Tensor) -> Tensor:
    """Return x.

    Raises `DTypeError` unless the dtype of x is a float."""
    require("float", type_of(x))
    return x


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
