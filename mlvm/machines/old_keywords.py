"""Old keyword arguments, which still work: see `mlvm.renamed`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from mlvm.core.errors import ArgumentError
from mlvm.renamed import KEYWORDS, warn_of_old_name

P = ParamSpec("P")
R = TypeVar("R")


def old_keywords(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for the function of that name, which also accepts its old keywords.

    Raises `ArgumentError` in a call that has an old keyword and the new one.
    """
    renamed = KEYWORDS[name]

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def function(*args: P.args, **keywords: P.kwargs) -> R:
            for old in renamed.keys() & keywords.keys():
                new = renamed[old]
                if new in keywords:
                    raise ArgumentError(
                        f"{name}(): got {new}= and {old}=, which is its old name; remove {old}="
                    )
                warn_of_old_name(f"{old}= of {name}", f"{new}=")
                keywords[new] = keywords.pop(old)
            return fn(*args, **keywords)

        return function

    return decorate
