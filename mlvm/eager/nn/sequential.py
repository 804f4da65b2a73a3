"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable

from mlvm.core.errors import AttributeRefused
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
