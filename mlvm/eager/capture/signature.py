"""What decides which of a captured function's programs a call gets: its signature.

A program holds for arguments of certain types, and for what the function found around it when it
was recorded. Whatever of that is another one now makes another signature.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError
from mlvm.eager.capture.surroundings import Field
from mlvm.eager.optim import Optimizer
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import Node

NO_FIELDS: Final[Mapping[int, set[str]]] = {}

CALLED: Final = frozenset({"__call__"})
"""What is called without being named."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES: Final = frozenset({__name__.partition(".")[0], "numpy", *sys.stdlib_module_names})


class Signature:
    """The structure of a call's arguments, the types of their tensors, and all else by value, or
    where that cannot be compared, by identity.

    What the function reaches by itself is part of it: variables around it, globals, and defaults;
    of a Module every field, of other objects, classes and modules those that the code names.
    So is what is reached by functions among them that are its own methods, or of the same file.
    `names` are those in all that code; a signature made with fewer of them has not seen it all.

    `tensors` are the arguments' tensors, each once; others, as those in Modules, are known by
    identity. But a field of a Module that is among `rebound`, which has names by the id of the
    Module, is as an argument: `fields` are those. `inputs` are the first of the tensors over each
    memory: here inputs get their numbers. `held` keeps alive what is known by identity.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: frozenset[str],
        rebound: Mapping[int, set[str]] = NO_FIELDS,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.fields: list[tuple[Field, Tensor]] = []
        self.held: list[Any] = []
        self.names = names
        self._globals = getattr(_unwrapped(fn), "__globals__", None)
        self._rebound = rebound
        self._numbers: dict[int, int] = {}
        self._roots: dict[int, int] = {}
        self._seen: set[int] = set()
        self.function = self.of(fn, walked=True)

    def of_argument(self, value: Any) -> Any:
        """Of an argument. Raises `CaptureError` for a tensor of a scratch pad."""
        if isinstance(value, Tensor):
            if isinstance(value.arena, ScratchPad):
                raise CaptureError(
                    f"a captured function was given a {value.type} of scratch pad "
                    f"{value.arena.name!r}, which may lie over other tensors; give it a copy"
                )
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            place = self._roots.setdefault(id(value.root), len(self.inputs))
            if place == len(self.inputs):
                self.inputs.append(value)
            return Tensor, value.type, number, place, value.base is None
        kind = value.__class__
        if isinstance(value, (list, tuple)):
            return kind, tuple([self.of_argument(each) for each in value])
        if isinstance(value, dict):
            return kind, tuple([(key, self.of_argument(each)) for key, each in value.items()])
        return self.of(value, walked=True)

    def of(self, value: Any, *, walked: bool = False) -> Any:
        """Of what the function reaches. A function is looked into if it is `walked`, or of the
        same file as the captured one."""
        kind = value.__class__
        if kind in _PLAIN:
            return kind, repr(value) if kind in (float, complex) else value
        self.held.append(value)
        if kind is Tensor or id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))
        if isinstance(value, (list, tuple)):
            return kind, tuple([self.of(each, walked=walked) for each in value])
        if isinstance(value, dict):
            return kind, tuple([(key, self.of(each, walked=walked)) for key, each in value.items()])
        if isinstance(value, types.FunctionType):
            if value.__globals__ is self._globals or (walked and not _is_library(value)):
                return id(value), tuple(self._around(value))
            return id(value)
        if isinstance(value, types.MethodType):
            return self.of(value.__self__), self.of(value.__func__, walked=True)
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            return tuple([self.of(part, walked=True) for part in parts])
        return id(value), tuple(self._within(value))

    def _around(self, fn: types.FunctionType) -> Iterator[Any]:
        """Of what a function reaches: its defaults, the variables around it, its globals."""
        names = _names(fn.__code__)
        if not names <= self.names:
            self.names |= names
        yield self.of(fn.__defaults__, walked=True)
        yield self.of(fn.__kwdefaults__, walked=True)
        for cell in fn.__closure__ or ():
            try:
                yield self.of(cell.cell_contents, walked=True)
            except ValueError:  # a variable that has no value yet
                yield None
        for name in names:
            if name in fn.__globals__:
                yield name, self.of(fn.__globals__[name])

    def _within(self, value: Any) -> Iterator[Any]:
        """Of what an object, class or module has."""
        fields = getattr(value, "__dict__", {})
        if isinstance(value, Node):
            rebound = self._rebound.get(id(value), ())
            for name, field in fields.items():
                if name in rebound and isinstance(field, Tensor):
                    self.fields.append((Field(value, name), field))
                    yield name, self.of_argument(field)
                else:
                    yield name, self.of(field)
        elif isinstance(value, Optimizer):
            for name, field in fields.items():
                if not isinstance(field, dict):  # which are of what it updates, always the same
                    yield name, self.of(field)
        elif not _is_library(value):
            for name in sorted(self.names & fields.keys()):
                yield name, self.of(_function_of(fields[name]), walked=True)
            for name in sorted(self.names & set(getattr(value, "__slots__", ()))):
                yield name, self.of(getattr(value, name, None), walked=True)
        elif "__wrapped__" in fields:
            yield self.of(fields["__wrapped__"], walked=True)
        for kind in value.__bases__ if isinstance(value, type) else (value.__class__,):
            if not _is_library(kind):
                yield self.of(kind)


def _function_of(field: Any) -> Any:
    """A class's property or method as the function that it is made of."""
    if isinstance(field, property):
        return field.fget
    return field.__func__ if isinstance(field, (staticmethod, classmethod)) else field


def _unwrapped(fn: Any) -> Any:
    """The function itself of a method or a partial call."""
    while isinstance(fn, (types.MethodType, functools.partial)):
        fn = fn.__func__ if isinstance(fn, types.MethodType) else fn.func
    return fn


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that code names, with those of the code inside of it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_library(value: Any) -> bool:
    """Whether a function, class, module or object is of a library, which no step changes."""
    name = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(name).partition(".")[0] in _LIBRARIES
