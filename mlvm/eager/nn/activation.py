"""Activations as layers: what is between the others in a Sequential, by PyTorch's names.

A function is a layer too: `Sequential(Linear(3, 4), relu)`.
"""

from __future__ import annotations

from mlvm.core.errors import AttributeRefused, brief
from mlvm.core.rules import is_real
from mlvm.eager.functions import neural
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor


class ReLU(Module):
    """max(x, 0).

    x: f[...] -> f[...]. Raises `DTypeError` for other than floats.

        >>> ml.nn.ReLU()(ml.asarray([-1.0, 2.0]))
        Tensor([0., 2.], f32[2])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return op.relu(x)


class LeakyReLU(Module):
    """x where x > 0, else negative_slope x; see `leaky_relu`.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers, `AttributeRefused` for a slope that is no number.

        >>> ml.nn.LeakyReLU()(ml.asarray([-1.0]))
        Tensor([-0.01], f32[1])
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = _number("LeakyReLU: negative_slope", negative_slope)

    def __call__(self, x: Tensor) -> Tensor:
        return neural.leaky_relu(x, self.negative_slope)


class ELU(Module):
    """x where x > 0, else alpha (exp(x) - 1); see `elu`.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers, `AttributeRefused` for an alpha that is no number.

        >>> ml.nn.ELU()(ml.asarray([2.0]))
        Tensor([2.], f32[1])
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = _number("ELU: alpha", alpha)

    def __call__(self, x: Tensor) -> Tensor:
        return neural.elu(x, self.alpha)


class GELU(Module):
    """x Phi(x), with the tanh formula if `approximate`; see `gelu`.

    x: f[...] -> f[...]. Raises `DTypeError` for other than floats.

        >>> ml.nn.GELU()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    def __init__(self, *, approximate: bool = True) -> None:
        self.approximate = bool(approximate)

    def __call__(self, x: Tensor) -> Tensor:
        return op.gelu(x, approximate=self.approximate)


class SiLU(Module):
    """x sigmoid(x).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers.

        >>> ml.nn.SiLU()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return neural.silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x)).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers.

        >>> ml.nn.Sigmoid()(ml.asarray([0.0]))
        Tensor([0.5], f32[1])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return op.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent of x.

    x: [...], any dtype; the result: [...], the same, or f32 for integers and bools.

        >>> ml.nn.Tanh()(ml.asarray([0.0]))
        Tensor([0.], f32[1])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return op.tanh(x)


class Softplus(Module):
    """log(1 + exp(x)).

    x: [...], integers or floats; the result: [...], the same, or f32 for integers. Raises
    `DTypeError` for bools and complex numbers.

        >>> ml.nn.Softplus()(ml.asarray([1000.0]))
        Tensor([1000.], f32[1])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return neural.softplus(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along the axis.

    x: f[...] -> f[...]. Raises `AxisRefused` for an axis that x does not have, `DTypeError` for
    other than floats.

        >>> ml.nn.Softmax()(ml.asarray([0.0, 0.0]))
        Tensor([0.5, 0.5], f32[2])
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        return op.softmax(x, axis=self.axis)


def _number(what: str, value: float) -> float:
    if not is_real(value):
        raise AttributeRefused(f"{what} is a number, not {brief(value)}")
    return float(value)
