"""Deprecated keyword arguments, which still work: see `mlvm.renamed`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from mlvm.core.errors import ArgumentError
from mlvm.renamed import KEYWORDS, warn_of_old_name

P = ParamSpec("P")
R = TypeVar("R")


def old_keywords(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a function also accept deprecated keywords.

    A call with both an old and the new keyword raises `ArgumentError`.
    """
    renamed = KEYWORDS[name]

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def function(*args: P.args, **keywords: P.kwargs) -> R:
            used = renamed.keys() & keywords.keys()
            for old in used:
                new = renamed[old]
                if new in keywords:
                    raise ArgumentError(
                        f"{name}(): got both {new}= and the old name {old}=; remove {old}="
                    )
                keywords[new] = keywords.pop(old)
            if used:
                with suppress(TypeError):  # do not warn about an invalid call
                    signature(fn).bind(*args, **keywords)
                    for old in used:
                        warn_of_old_name(f"{old}= of {name}", f"{renamed[old]}=")
            return fn(*args, **keywords)

        return function

    return decorate
