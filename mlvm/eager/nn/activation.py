"""Activations as layers for a Sequential, with PyTorch's names.

A function is also a layer: `Sequential(Linear(3, 4), relu)`.
"""

from __future__ import annotations

from collections.abc import Callable

from mlvm.core.errors import ArgumentError
from mlvm.eager.functions import activations, creation
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import matched, number, require_float, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor


class _Activation(Module):
    """Base class of activations without options, which apply `_function` to x."""

    _function: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return type(self)._function(x)


class _AlongAxis(Module):
    """Base class of activations that apply `_function` to x along an axis."""

    _function: Callable[..., Tensor]

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        return type(self)._function(x, axis=self.axis)


class ReLU(_Activation):
    """Rectified linear unit: max(x, 0).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.ReLU()(ml.asarray([-1.0, 2.0]))
        Tensor([0., 2.], f32[2])
    """

    _function = staticmethod(op.relu)


class LeakyReLU(Module):
    """Leaky ReLU: x where x > 0, else negative_slope x; see `leaky_relu`.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex; `ArgumentError` if the slope is not a number.

        >>> ml.nn.LeakyReLU()(ml.asarray([-1.0]))
        Tensor([-0.01], f32[1])

    Invalid calls:
        ml.nn.LeakyReLU("1")  # ArgumentError
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = number("LeakyReLU: negative_slope", negative_slope)

    def __call__(self, x: Tensor) -> Tensor:
        return activations.leaky_relu(x, self.negative_slope)


class ELU(Module):
    """Exponential linear unit: x where x > 0, else alpha (exp(x) - 1); see `elu`.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex; `ArgumentError` if alpha is not a number.

        >>> ml.nn.ELU()(ml.asarray([2.0]))
        Tensor([2.], f32[1])

    Invalid calls:
        ml.nn.ELU("1")  # ArgumentError
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = number("ELU: alpha", alpha)

    def __call__(self, x: Tensor) -> Tensor:
        return activations.elu(x, self.alpha)


class GELU(Module):
    """Gaussian error linear unit: x Phi(x), by the tanh formula if `approximate`; see `gelu`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.GELU()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    def __init__(self, *, approximate: bool = True) -> None:
        self.approximate = bool(approximate)

    def __call__(self, x: Tensor) -> Tensor:
        return op.gelu(x, approximate=self.approximate)


class SiLU(_Activation):
    """Sigmoid linear unit (swish): x sigmoid(x).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex.

        >>> ml.nn.SiLU()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    _function = staticmethod(activations.silu)


class Sigmoid(_Activation):
    """Logistic function: 1 / (1 + exp(-x)).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` if an operand is complex.

        >>> ml.nn.Sigmoid()(ml.asarray([0.0]))
        Tensor([0.5], f32[1])
    """

    _function = staticmethod(op.sigmoid)


class Tanh(_Activation):
    """Hyperbolic tangent of x.

    x: [...], any dtype; the result: [...], the same, or f32 for integers and bools.

        >>> ml.nn.Tanh()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    _function = staticmethod(op.tanh)


class Softplus(_Activation):
    """Softplus function: log(1 + exp(x)).

    x: [...], integers or floats; the result: [...], the same, or f32 for integers. Raises
    `DTypeError` if an operand is bool or complex.

        >>> ml.nn.Softplus()(ml.asarray([1000.0]))
        Tensor([1000.], f32[1])
    """

    _function = staticmethod(activations.softplus)


class Softmax(_AlongAxis):
    """Softmax along an axis: exp(x) / sum(exp(x)).

    x: f[...] -> f[...]. Raises `AxisError` if x has no such axis; `DTypeError` if x is not of
    floats.

        >>> ml.nn.Softmax()(ml.asarray([0.0, 0.0]))
        Tensor([0.5, 0.5], f32[2])

    Invalid calls:
        ml.nn.Softmax(9)(v)  # AxisError
    """

    _function = staticmethod(op.softmax)


class CELU(Module):
    """Continuously differentiable ELU: x where x > 0, else alpha (exp(x / alpha) - 1); see `celu`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats; `ArgumentError` if alpha is 0
    or not a number.

        >>> ml.nn.CELU()(ml.asarray([2.0]))
        Tensor([2.], f32[1])

    Invalid calls:
        ml.nn.CELU(0.0)  # ArgumentError
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = number("CELU: alpha", alpha)
        if not self.alpha:
            raise ArgumentError("CELU: expected alpha as a number other than 0, got 0")

    def __call__(self, x: Tensor) -> Tensor:
        return activations.celu(x, self.alpha)


class SELU(_Activation):
    """Scaled ELU: 1.0507 elu(x, 1.6733); see `selu`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.SELU()(ml.asarray([2.0]))
        Tensor([2.101402], f32[1])
    """

    _function = staticmethod(activations.selu)


class Mish(_Activation):
    """Mish function: x tanh(softplus(x)); see `mish`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.Mish()(ml.asarray([2.0]))
        Tensor([1.9439589], f32[1])
    """

    _function = staticmethod(activations.mish)


class GLU(_AlongAxis):
    """Gated linear unit: a sigmoid(b), where a and b are the halves of x along an axis; see `glu`.

    x: f[..., 2 n] -> f[..., n]. Raises `ShapeError` if the length is odd; `AxisError` if x has no
    such axis; `DTypeError` if x is not of floats.

        >>> ml.nn.GLU()(ml.asarray([1.0, 0.0]))
        Tensor([0.5], f32[1])

    Invalid calls:
        ml.nn.GLU(9)(v)  # AxisError
    """

    _function = staticmethod(activations.glu)


class PReLU(Module):
    """Parametric ReLU: x where x > 0, else slope x, with a learned slope; see `prelu`.

    The slope is a scalar, or a vector with one element per channel if `channels` is given. It is
    initialised to 0.25.

    x: f[..., channels] -> f[..., channels]. Raises `ShapeError` if x has a different number of
    channels; `DTypeError` if x is not of floats; `ArgumentError` if `channels` is below 1.

        >>> ml.nn.PReLU(2)(ml.asarray([-1.0, 2.0]))
        Tensor([-0.25,  2.  ], f32[2])

    Invalid calls:
        ml.nn.PReLU(0)  # ArgumentError
    """

    slope: Tensor  # [] or [channels]

    def __init__(self, channels: int | None = None, *, dtype: object = None) -> None:
        shape = () if channels is None else sizes("PReLU", channels=channels)
        self.slope = creation.full(shape, 0.25, dtype=require_float("PReLU", dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return activations.prelu(matched("PReLU", x, self.slope), self.slope)


class ReLU6(_Activation):
    """Limited ReLU: min(max(x, 0), 6).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.ReLU6()(ml.asarray([-1.0, 9.0]))
        Tensor([0., 6.], f32[2])
    """

    _function = staticmethod(activations.relu6)


class Hardsigmoid(_Activation):
    """Piecewise linear sigmoid: min(max(x + 3, 0), 6) / 6; see `hard_sigmoid`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.Hardsigmoid()(ml.asarray([0.0, 9.0]))
        Tensor([0.5, 1. ], f32[2])
    """

    _function = staticmethod(activations.hard_sigmoid)


class Hardswish(_Activation):
    """Piecewise approximation of swish: x min(max(x + 3, 0), 6) / 6; see `hard_swish`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.Hardswish()(ml.asarray([1.5, 9.0]))
        Tensor([1.125, 9.   ], f32[2])
    """

    _function = staticmethod(activations.hard_swish)


class Hardtanh(Module):
    """Limited identity: x, limited to min <= x <= max.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats; `ArgumentError` if a limit is
    not a number.

        >>> ml.nn.Hardtanh()(ml.asarray([-3.0, 0.5]))
        Tensor([-1. ,  0.5], f32[2])

    Invalid calls:
        ml.nn.Hardtanh("1")  # ArgumentError
    """

    def __init__(self, min: float = -1.0, max: float = 1.0) -> None:
        self.min, self.max = number("Hardtanh: min", min), number("Hardtanh: max", max)

    def __call__(self, x: Tensor) -> Tensor:
        return activations.hard_tanh(x, self.min, self.max)


class LogSigmoid(_Activation):
    """Logarithm of the sigmoid: log(1 / (1 + exp(-x))); see `log_sigmoid`.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.LogSigmoid()(ml.asarray([-1000.0]))
        Tensor([-1000.], f32[1])
    """

    _function = staticmethod(activations.log_sigmoid)


class LogSoftmax(_AlongAxis):
    """Logarithm of the softmax along an axis: x - log(sum(exp(x))).

    x: f[...] -> f[...]. Raises `AxisError` if x has no such axis; `DTypeError` if x is not of
    floats.

        >>> ml.nn.LogSoftmax()(ml.asarray([0.0, 0.0]))
        Tensor([-0.6931472, -0.6931472], f32[2])

    Invalid calls:
        ml.nn.LogSoftmax(9)(v)  # AxisError
    """

    _function = staticmethod(op.log_softmax)


class Softsign(_Activation):
    """Softsign function: x / (1 + |x|).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.Softsign()(ml.asarray([3.0]))
        Tensor([0.75], f32[1])
    """

    _function = staticmethod(activations.soft_sign)


class Tanhshrink(_Activation):
    """Tanhshrink function: x - tanh(x).

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.nn.Tanhshrink()(ml.asarray([1.0]))
        Tensor([0.23840582], f32[1])
    """

    _function = staticmethod(activations.tanh_shrink)


class Softshrink(Module):
    """Soft shrinkage: x moved towards 0 by `limit`, and 0 where |x| <= limit.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats; `ArgumentError` if a limit is
    not a number.

        >>> ml.nn.Softshrink()(ml.asarray([2.0]))
        Tensor([1.5], f32[1])

    Invalid calls:
        ml.nn.Softshrink("1")  # ArgumentError
    """

    def __init__(self, limit: float = 0.5) -> None:
        self.limit = number("Softshrink: limit", limit)

    def __call__(self, x: Tensor) -> Tensor:
        return activations.soft_shrink(x, self.limit)


class Hardshrink(Module):
    """Hard shrinkage: x where |x| > limit, else 0.

    x: f[...] -> f[...]. Raises `DTypeError` if x is not of floats; `ArgumentError` if a limit is
    not a number.

        >>> ml.nn.Hardshrink()(ml.asarray([2.0]))
        Tensor([2.], f32[1])

    Invalid calls:
        ml.nn.Hardshrink("1")  # ArgumentError
    """

    def __init__(self, limit: float = 0.5) -> None:
        self.limit = number("Hardshrink: limit", limit)

    def __call__(self, x: Tensor) -> Tensor:
        return activations.hard_shrink(x, self.limit)
