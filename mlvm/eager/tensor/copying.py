"""Templates: copies of objects with leaves in the place of tensors and numbers.

A captured function makes the object that each call returns from its template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


class LeafMemo(dict[Any, Any]):
    """Memo of `copy.deepcopy` that puts `leaf(x)` in the place of a tensor, a placeholder of a
    number, and a leaf. `outside` has what to put in the place of other objects, by their ids."""

    def __init__(
        self, leaf: Callable[[Any], Any], outside: Mapping[int, Any] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.leaf, self._outside = leaf, outside

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else self._outside.get(key, default)


class Leaf:
    """Part of a template that stands for a value of each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.leaf(self)


class ResultLeaf(Leaf):
    """Stands for the result of that number."""


class NumberLeaf(Leaf):
    """Stands for the Python number at that place of a call's values."""


class OutsideLeaf(Leaf):
    """Stands for that object, which exists outside of the function."""


class ArgumentLeaf(Leaf):
    """Stands for the container at that path in the arguments of a call."""
