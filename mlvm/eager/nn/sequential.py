"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Callable

from mlvm.core.errors import AttributeRefused
from mlvm.eager import random
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor import Tensor


class Sequential(Module):
    """The layers one after the other; each is a Module or a function of one tensor.

    `train` is passed on to each Dropout and Sequential, with a key made of `key` and the layer's
    place. Without a `key` they take the next global ones.
    """

    layers: tuple[Callable[..., Tensor], ...]

    def __init__(self, *layers: Callable[..., Tensor]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise AttributeRefused(
                    f"Sequential: layer {i} must be callable, given a {type(layer).__name__}"
                )
        self.layers = layers

    def __call__(self, x: Tensor, *, train: bool = False, key: Tensor | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if train and isinstance(layer, (Dropout, Sequential)):
                x = layer(x, train=True, key=None if key is None else random.fold_in(key, i))
            elif isinstance(layer, Dropout):
                x = layer(x, train=False)
            else:
                x = layer(x)
        return x
