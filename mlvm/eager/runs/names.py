"""Names of the tensors that a function reads: the paths by which Python code accesses them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count
from types import CodeType
from typing import Any, Final

from mlvm.arena.arena import Allocation
from mlvm.eager.tensor.values import module_of

KEYS: Final = "random keys"
"""The name of the global random keys of a VM."""

_ENDS: Final = (str, bytes, int, float, complex, bool, type(None), type)


def names_of_tensors(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> dict[int, str]:
    """Return a path such as `model.blocks[0].kernel` for each tensor that the function reaches.

    The function reaches tensors from arguments, variables and globals. The keys are the ids of the
    tensors' roots. For several paths to a tensor, the shortest of public attributes is used, or
    else the shortest.
    """
    names: dict[int, str] = {}
    for path, x in tensors_below(_roots(fn, args, kwargs)):
        names.setdefault(id(x.root), path)
    return names


def tensors_below(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Allocation]]:
    """Yield the tensors that these objects reach, with paths.

    Paths of public attributes come first, then the shortest. The walk visits at most 100,000
    objects.
    """
    visited: set[int] = set()
    public, private = deque(roots), deque[tuple[str, Any]]()
    while (queue := public or private) and len(visited) < 100_000:
        path, value = queue.popleft()
        if isinstance(value, Allocation):
            yield path, value
        elif not isinstance(value, _ENDS) and id(value) not in visited:
            visited.add(id(value))
            for part, each in _parts(path, value):
                is_private = queue is private or part.startswith(f"{path}._")
                (private if is_private else public).append((part, each))


def _roots(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        yield from inspect.signature(fn).bind(*args, **kwargs).arguments.items()
    except (TypeError, ValueError):
        yield from ((f"argument {i}", x) for i, x in enumerate(args))
        yield from kwargs.items()
    yield "self", getattr(fn, "__self__", None)
    fn = getattr(fn, "__func__", fn)
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    code = getattr(fn, "__code__", None)
    if code is None:
        yield "self", fn
        return
    yield from _closure_of(fn)
    for name in _names_in(code):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _closure_of(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of enclosing functions that a function reads and that have a value."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, then those that the functions in it read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items or fields of an object with paths."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", each) for key, each in [*value.items()])
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{i}]", each) for i, each in enumerate(value))
    elif inspect.isfunction(value):
        yield from _closure_of(value)
    elif not (inspect.ismodule(value) or _is_internal(type(value))):
        yield from ((f"{path}.{name}", each) for name, each in vars_of(value).items())


def _is_internal(kind: type) -> bool:
    """Return whether a class belongs to mlvm, so that users do not read fields of the class."""
    home = module_of(kind)
    return home.startswith("mlvm.") and not home.startswith(("mlvm.eager.nn.", "mlvm.eager.optim."))


def unused_name(name: str, used: Container[str]) -> str:
    """Return the name, with a number such as `x (2)` if the name is used already."""
    numbered = (f"{name} ({number})" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in used)


def vars_of(value: Any) -> dict[str, Any]:
    """Return a copy of the fields of an object, empty if it has no `__dict__`."""
    fields = getattr(value, "__dict__", None)
    return dict(fields) if isinstance(fields, dict) else {}
