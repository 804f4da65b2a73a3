"""Names of the tensors that a function reads: the paths by which Python code accesses them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain, count
from types import CodeType, FrameType, FunctionType, MemberDescriptorType
from typing import Any, Final

from mlvm.arena.arena import Allocation
from mlvm.core.errors import brief
from mlvm.eager.capture.guards.guard_set import NUMBERS, Field
from mlvm.eager.capture.guards.readable import is_library
from mlvm.eager.optim.averages import MultiSteps
from mlvm.eager.optim.optimizer import Optimizer
from mlvm.eager.tensor.values import items_of, members_of, module_of

KEYS: Final = "random keys"
"""The name of the global random keys of a VM."""

_ENDS: Final = (str, bytes, int, float, complex, bool, type(None))


def names_of_objects(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], read: Container[str] = ()
) -> dict[int, str]:
    """Return a path such as `model.blocks[0].kernel` for each object that the function reaches.

    The function reaches objects from arguments, variables and globals. The keys are the ids of the
    objects, and of the tensors' roots. For several paths to a tensor, a path through a field in
    `read` is used, or else the shortest of public attributes, or else the shortest.
    """
    names: dict[int, str] = {}
    for path, x in _objects_below(_roots(fn, args, kwargs)):
        name = names.setdefault(id(x.root if isinstance(x, Allocation) else x), path)
        if _field_of(path) in read and _field_of(name) and _field_of(name) not in read:
            names[id(x.root)] = path
    return names


def _field_of(path: str) -> str:
    """Return the last field of a path; "" if it has none."""
    return path.rpartition(".")[2].partition("[")[0] if "." in path else ""


def names_of_numbers(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], fields: Iterable[Field]
) -> Iterator[str]:
    """Yield the names of a signature's Python numbers: those in fields, then in the arguments."""
    owners = names_of_objects(fn, args, kwargs)
    for field in fields:
        item = "" if field.item is None else f"[{field.item}]"
        yield f"{owners.get(id(field.owner), type(field.owner).__name__)}.{field.name}{item}"
    pending = [*arguments_of(fn, args), *kwargs.items()][::-1]
    while pending:
        path, value = pending.pop()
        if type(value) in NUMBERS:
            yield path
        elif isinstance(value, (dict, list, tuple)):
            pending += reversed([*_parts(path, value, {})])


def optimizers_of(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return kind and hyperparameters of each optimizer that a function reaches, by path.

    An optimizer in a `MultiSteps` is part of that text."""
    reached = [*_objects_below(_roots(fn, args, kwargs))]
    inner = {id(x.optimizer) for _, x in reached if isinstance(x, MultiSteps)}
    outer = [(path, x) for path, x in reached if isinstance(x, Optimizer | MultiSteps)]
    return {path: repr(x)[1:-1] for path, x in outer if id(x) not in inner}


def tensors_below(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Allocation]]:
    """Yield the tensors that these objects reach, with paths.

    Paths of public attributes come first, then the shortest. The walk visits at most 100,000
    objects.
    """
    return ((path, x) for path, x in _objects_below(roots) if isinstance(x, Allocation))


def tensors_of_frame(frame: FrameType) -> Iterator[tuple[str, Allocation]]:
    """Yield the tensors below the variables of a frame, and below the globals that it reads.

    The variables of functions among them, and private fields of mlvm, are not included."""
    named = frame.f_globals
    roots = {x: named[x] for x in frame.f_code.co_names if x in named} | frame.f_locals
    for root in roots.items():  # separately, since variables may share objects
        objects = _objects_below([root], limit=2_000, of_variables=True)
        yield from ((path, x) for path, x in objects if isinstance(x, Allocation))


def _objects_below(
    roots: Iterable[tuple[str, Any]], *, limit: int = 100_000, of_variables: bool = False
) -> Iterator[tuple[str, Any]]:
    visited, classes = set[int](), dict[int, dict[str, Any]]()
    public, private = deque(roots), deque[tuple[str, Any]]()
    while (queue := public or private) and len(visited) < limit:
        path, value = queue.popleft()
        if of_variables and inspect.isfunction(value):
            continue
        if isinstance(value, Allocation):
            yield path, value
        elif not isinstance(value, _ENDS) and id(value) not in visited:
            yield path, value
            visited.add(id(value))
            is_ours = of_variables and module_of(type(value)).startswith("mlvm.")
            for part, each in _parts(path, value, classes):
                is_private = queue is private or part.startswith(f"{path}._")
                if is_private and is_ours:
                    continue
                (private if is_private else public).append((part, each))


def arguments_of(fn: Callable[..., Any], args: Any) -> list[tuple[str, Any]]:
    """Return the positional arguments with the names of the parameters."""
    try:
        return [*inspect.signature(fn).bind_partial(*args).arguments.items()]
    except (TypeError, ValueError):
        return [(f"argument {i}", x) for i, x in enumerate(args)]


def _roots(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    yield from arguments_of(fn, args)
    yield from kwargs.items()
    yield "self", getattr(fn, "__self__", None)
    fn = getattr(fn, "__func__", fn)
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    yield from _variables(fn) if inspect.isfunction(fn) else [("self", fn)]


def _variables(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function reads: of enclosing functions, defaults and globals.

    A global module is represented by the attributes that the code names."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents
    defaults, parameters = fn.__defaults__ or (), fn.__code__.co_varnames
    first = fn.__code__.co_argcount - len(defaults)
    yield from zip(parameters[first:], defaults, strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    names = dict.fromkeys(_names_in(fn.__code__))
    for name in names:
        value = fn.__globals__.get(name)
        if not inspect.ismodule(value):
            yield name, value
        elif not is_library(value.__name__):
            yield from (
                (f"{name}.{each}", x) for each, x in vars_of(value).items() if each in names
            )


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, then those that the functions in it read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _parts(path: str, value: Any, classes: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the items or fields of an object with paths.

    `classes` keeps the fields of visited classes by id."""
    if isinstance(value, dict):
        yield from ((f"{path}[{_text_of_key(key)}]", each) for key, each in [*items_of(value)])
    elif isinstance(value, list | tuple | deque):
        items = deque.__iter__(value) if isinstance(value, deque) else members_of(value)
        yield from ((f"{path}[{i}]", each) for i, each in enumerate(items))
    elif inspect.isfunction(value):
        if not is_library(value.__module__ or ""):
            yield from _variables(value)
    elif isinstance(value, partial):
        yield from (
            (f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")
        )
    elif inspect.ismethod(value):
        yield f"{path}.__self__", value.__self__
    elif not (inspect.ismodule(value) or _is_internal(kind := type(value))):
        home = value if kind is type else kind
        if (of_class := classes.get(id(home))) is None:
            of_class = classes[id(home)] = _fields_of_class(home)
        for name, x in (of_class | vars_of(value)).items():
            is_slot = isinstance(x, MemberDescriptorType) and home is kind
            yield f"{path}.{name}", getattr(value, name, None) if is_slot else x


def _text_of_key(key: Any) -> str:
    """Return the text of a dict's key; the name of the class for an object of the user."""
    if isinstance(key, _ENDS):
        return repr(key)
    return brief(key) if isinstance(key, (tuple, Enum)) else type(key).__name__


def _fields_of_class(kind: type) -> dict[str, Any]:
    """Return the fields that a class defines and that may contain tensors, with the slots."""
    kinds = Allocation, dict, list, tuple, MemberDescriptorType
    fields = chain.from_iterable(vars(each).items() for each in kind.__mro__[-2::-1])
    return {name: x for name, x in fields if isinstance(x, kinds)}


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
