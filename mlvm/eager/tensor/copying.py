"""Templates: copies of objects with leaves instead of tensors and numbers.

A captured function creates the object that each call returns from a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


class LeafMemo(dict[Any, Any]):
    """Memo of `copy.deepcopy` that replaces tensors, number placeholders and leaves by `leaf(x)`.

    `outside` maps the ids of other objects to replacements; `used` lists the used replacements."""

    def __init__(
        self, leaf: Callable[[Any], Any], outside: Mapping[int, Any] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.leaf, self._outside = leaf, outside
        self.used: list[Any] = []

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self or key not in self._outside:
            return super().get(key, default)
        self.used.append(self._outside[key])
        return self.used[-1]


class Leaf:
    """Part of a template that represents a value of each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.leaf(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class ResultLeaf(Leaf):
    """Leaf for the result with that number."""


class NumberLeaf(Leaf):
    """Leaf for the Python number with that index among a call's values."""


class OutsideLeaf(Leaf):
    """Leaf for that object, which exists outside of the function."""


class ArgumentLeaf(Leaf):
    """Leaf for the container at that path in the arguments of a call."""
