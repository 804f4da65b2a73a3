"""Activations as layers: what is between the others in a Sequential, by PyTorch's names.

A function is a layer too: `Sequential(Linear(3, 4), relu)`.
"""

from __future__ import annotations

from mlvm.eager import neural
from mlvm.eager import primitives as op
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor import Tensor


class ReLU(Module):
    """max(x, 0)."""

    def __call__(self, x: Tensor) -> Tensor:
        return op.relu(x)


class LeakyReLU(Module):
    """x where x > 0, else negative_slope x; see `leaky_relu`."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = float(negative_slope)

    def __call__(self, x: Tensor) -> Tensor:
        return neural.leaky_relu(x, self.negative_slope)


class ELU(Module):
    """x where x > 0, else alpha (exp(x) - 1); see `elu`."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = float(alpha)

    def __call__(self, x: Tensor) -> Tensor:
        return neural.elu(x, self.alpha)


class GELU(Module):
    """x Phi(x), with the tanh formula if `approximate`; see `gelu`."""

    def __init__(self, *, approximate: bool = True) -> None:
        self.approximate = bool(approximate)

    def __call__(self, x: Tensor) -> Tensor:
        return op.gelu(x, approximate=self.approximate)


class SiLU(Module):
    """x sigmoid(x)."""

    def __call__(self, x: Tensor) -> Tensor:
        return neural.silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def __call__(self, x: Tensor) -> Tensor:
        return op.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent of x."""

    def __call__(self, x: Tensor) -> Tensor:
        return op.tanh(x)


class Softplus(Module):
    """log(1 + exp(x))."""

    def __call__(self, x: Tensor) -> Tensor:
        return neural.softplus(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along the axis."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        return op.softmax(x, axis=self.axis)
