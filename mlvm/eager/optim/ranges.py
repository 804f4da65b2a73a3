"""Ranges of hyperparameters: as annotations of an optimizer's fields, and as checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, get_args, get_origin

from mlvm.core.errors import ArgumentError, brief
from mlvm.eager.tensor.number import Number
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import load

Fraction: TypeAlias = Annotated[float, (0, 1)]
"""Number in [0, 1)."""

Positive: TypeAlias = Annotated[float, (0, math.inf)]
"""Number in [0, inf)."""

AtLeastOne: TypeAlias = Annotated[float, (1, math.inf)]
"""Number in [1, inf)."""

Count: TypeAlias = Annotated[int, 2**24]
"""Int from 1 to the number up to which f32 can count."""


def number_in(where: str, name: str, value: Any, low: float, below: float = math.inf) -> float:
    """Return the value as a float.

    Raises `ArgumentError` unless low <= value < below, or if it is a str or has axes."""
    try:
        is_number = not isinstance(value, (str, bytes)) and getattr(value, "shape", ()) == ()
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number < below:
        raise ArgumentError(f"{where}: expected {name} in [{low}, {below}), got {brief(value)}")
    return number


def numbers_in(where: str, low: float, **values: Any) -> list[float]:
    """Return the values as floats. Raises `ArgumentError` unless all are at least `low`."""
    return [number_in(where, name, value, low) for name, value in values.items()]


def checked(where: str, name: str, value: Any, kind: Any) -> Any:
    """Return the value of a field of that kind.

    Raises `ArgumentError` if it is invalid.

    The kinds are a `Fraction`, a `Positive`, a pair of these, a `Count`, and a bool."""
    if kind is bool:
        if not isinstance(value, bool):
            raise ArgumentError(f"{where}: expected {name} as True or False, got {value!r}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ArgumentError(f"{where}: expected {name} as two numbers, got {value!r}")
        pair = zip(value, get_args(kind), strict=True)
        return tuple([checked(where, f"{name}[{i}]", x, each) for i, (x, each) in enumerate(pair)])
    if kind == Count:
        [most] = kind.__metadata__
        if type(value) is not int or not 1 <= value <= most:
            text = f"expected {name} as an int from 1 to {most}, got {brief(value)}"
            raise ArgumentError(f"{where}: {text}")
        return value
    return number_in(where, name, value, *kind.__metadata__[0])


def checked_field(where: str, name: str, value: Any, kind: Any) -> Any:
    """Check an assigned field as `checked` does.

    Traced numbers are returned unchanged. Raises `ArgumentError` for a tensor and for a pair with a
    tensor, because reading a tensor's value is not possible in a captured function."""
    if type(value) is Number:
        return value
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, Tensor):
            raise ArgumentError(
                f"{where}: expected {name} as a Python value, got {part.type}; write float(x)"
            )
    return checked(where, name, value, kind)


class CheckedFields:
    """Base of classes with state that check the fields in `_kinds` whenever these are assigned."""

    _kinds: ClassVar[Mapping[str, Any]]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of state by path."""
        raise NotImplementedError

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays to the state, in place, by the paths of `state`.

        Raises as `Optimizer.load_state` does."""
        load(self.state(), arrays, "state")

    if not TYPE_CHECKING:  # otherwise a type checker would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self._kinds:
                value = self._checked_field(name, value)
            super().__setattr__(name, value)

    def _checked_field(self, name: str, value: Any) -> Any:
        return checked_field(type(self).__name__, name, value, self._kinds[name])
