"""Hints for methods that a tensor does not have: `x.sum()` says "use ml.sum(x)".

Each name has a descriptor; `__getattr__` would slow every other attribute down. `dir` of a tensor
leaves these names out.
"""

from __future__ import annotations

from inspect import getattr_static, isfunction
from types import ModuleType
from typing import Final, NoReturn

_OTHER_LIBRARIES: Final = {
    "backward": "see ml.grad",
    "grad": "see ml.grad",
    "requires_grad": "see ml.grad",
    "detach": "use ml.stop_gradient(x)",
    "clone": "use ml.copy(x)",
    "cpu": "use x.numpy()",
    "to": "use ml.astype(x, dtype)",
    "numel": "use x.size",
    "view": "use ml.reshape(x, shape)",
    "flatten": "use ml.reshape(x, -1)",
    "ravel": "use ml.reshape(x, -1)",
    "permute": "use ml.permute_dims(x, axes)",
    "transpose": "use ml.permute_dims(x, axes)",
    "unsqueeze": "use ml.expand_dims(x, axis=...)",
}


class Elsewhere:
    """A name that a class does not have. Raises `AttributeError` with the hint."""

    def __init__(self, name: str, hint: str) -> None:
        self.name = name
        self.hint = hint

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"a {owner.__name__} has no {self.name}; {self.hint}")


def hint_at(owner: type, *modules: ModuleType) -> None:
    """Give the class a hint for each of these modules' functions, and for other libraries' methods.
    `dir` of its instances lists only what they have."""
    functions = {name for each in modules for name in each.__all__ if isfunction(vars(each)[name])}
    hints = {name: f"use ml.{name}(x)" for name in functions} | _OTHER_LIBRARIES
    for name in hints.keys() - set(dir(owner)):
        setattr(owner, name, Elsewhere(name, hints[name]))
    owner.__dir__ = _existing  # type: ignore[assignment]


def _existing(instance: object) -> list[str]:
    """The names that an instance has. No property is evaluated for it."""
    owner = type(instance)
    return [
        name
        for name in object.__dir__(instance)
        if isinstance(getattr_static(owner, name), property) or hasattr(instance, name)
    ]
