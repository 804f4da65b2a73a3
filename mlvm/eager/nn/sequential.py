"""Layers one after the other, and what stands between them."""

from __future__ import annotations

import math
from collections.abc import Callable

from mlvm.core.errors import AttributeRefused, ShapeError
from mlvm.eager.functions.arguments import integer
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor.tensor import Tensor


class Sequential(Module):
    """The layers one after the other; each is a Module or a function of one tensor.

    x: what the first takes; the result has the shape that the last makes. Raises what they raise.

        >>> model = ml.nn.Sequential(ml.nn.Linear(3, 8), ml.gelu, ml.nn.Linear(8, 2))
        >>> model(ml.ones((5, 3))).type
        f32[5,2]
    """

    layers: tuple[Callable[..., Tensor], ...]

    def __init__(self, *layers: Callable[..., Tensor]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise AttributeRefused(
                    f"Sequential: layer {i} must be callable, given a {type(layer).__name__}"
                )
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Flatten(Module):
    """The axes from `start` on as one, in row-major order: [N, ...] -> [N, n]. As channels are
    last, they are so in the result; PyTorch's have the places of a channel together.

    Raises `ShapeError` for fewer axes than `start`, `AttributeRefused` for a start below 0.

        >>> ml.nn.Flatten()(ml.ones((2, 4, 4, 3))).type
        f32[2,48]
    """

    def __init__(self, start: int = 1) -> None:
        self.start = integer(start, "Flatten: start")
        if self.start < 0:
            raise AttributeRefused(f"Flatten: start is an int >= 0, not {self.start}")

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim < self.start:
            raise ShapeError(f"Flatten: x must have {self.start} axes or more, given {x.type}")
        kept = x.shape[: self.start]
        return reshape(x, (*kept, math.prod(x.shape[self.start :])))


class Identity(Module):
    """x itself: what stands where a layer is not wanted.

    x: [...], any dtype -> the same.

        >>> ml.nn.Identity()(ml.ones(2))
        Tensor([1., 1.], f32[2])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x
