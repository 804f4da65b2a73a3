"""Pickles refer to public names, so that they can be loaded after a definition has moved."""

from __future__ import annotations

import operator
import sys
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, Final

from mlvm.core.memo import memoized
from mlvm.eager.tensor.values import module_of

_LANGUAGE: Final = __name__.rpartition(".tensor.")[0]


class Public:
    """Reference in a pickle to a public object by path, such as "mlvm.eager:asarray".

    Loading resolves it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *args: Any) -> Any:
        return resolve_name(self.path)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_name, (self.path,)


@memoized(1024)
def public_name(x: Any) -> Any:
    """Return a reference to a function or class by public name; without one, the object."""
    home, name = module_of(x), x.__qualname__
    if home.startswith(f"{_LANGUAGE}."):
        for room in (".".join(home.split(".")[:3]), _LANGUAGE):
            if getattr(sys.modules.get(room), name, None) is x:
                return Public(f"{room}:{name}")
    return x


def with_public_names(fields: Any) -> Any:
    """Return an object's fields for a pickle, with public names for functions of mlvm."""
    if isinstance(fields, FunctionType):
        return public_name(fields)
    if type(fields) not in (list, tuple, dict):
        return fields
    items = [*fields.values()] if type(fields) is dict else fields
    named = [with_public_names(x) for x in items]
    if all(map(operator.is_, named, items)):
        return fields  # pickle stores the same object only once
    return dict(zip(fields, named, strict=True)) if type(fields) is dict else type(fields)(named)


def reduced(x: Any) -> tuple[Any, ...]:
    """Return the value of `__reduce__` for an object with state only in fields."""
    kind: Any = type(x)
    return object.__new__, (public_name(kind),), with_public_names(x.__getstate__())
