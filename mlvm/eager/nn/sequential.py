"""Layers that run one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, overload

from mlvm.core.errors import ArgumentError, IndexingError, with_article
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor.tensor import Tensor


class Sequential(Module):
    """Layers in sequence, as arguments or in one list: Modules or functions of a single tensor.

    x: the shape that the first layer expects. Returns the result of the last layer. Raises the
    errors of the layers.

        >>> model = ml.nn.Sequential(ml.nn.Linear(3, 8), ml.gelu, ml.nn.Linear(8, 2))
        >>> model(ml.ones((5, 3))).type
        f32[5,2]
        >>> model[1] = ml.relu
        >>> model[0].kernel.type, len(model[:2]), [type(each).__name__ for each in model[1:]]
        (f32[3,8], 2, ['function', 'Linear'])
    """

    layers: tuple[Callable[..., Tensor], ...]

    def __init__(self, *layers: Callable[..., Tensor] | Sequence[Callable[..., Tensor]]) -> None:
        only = layers[0] if len(layers) == 1 else None
        self._set((*only,) if isinstance(only, (list, tuple)) else layers)

    def _set(self, layers: tuple[Any, ...]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise ArgumentError(
                    f"Sequential: expected a callable as layer {i}, got "
                    f"{with_article(type(layer).__name__)}"
                )
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        return iter(self.layers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return the layer with that index; for a slice, a new Sequential of these layers."""
        if isinstance(index, slice):
            part = copy.copy(self)
            part._set(self.layers[index])
            return part
        return self.layers[self._number(index)]

    def __setitem__(self, index: int, layer: Callable[..., Tensor]) -> None:
        """Replace a layer.

        Create an optimizer after this call, not before."""
        i = self._number(index)
        self._set((*self.layers[:i], layer, *self.layers[i:][1:]))

    def _number(self, index: int) -> int:
        """Return the index from the front.

        Raises `IndexingError` if there is no such layer."""
        try:
            return range(len(self.layers))[index]
        except (IndexError, TypeError):
            n = len(self.layers)
            raise IndexingError(f"Sequential: expected an index below {n}, got {index!r}") from None
