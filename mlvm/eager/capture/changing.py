"""What changed between the recordings of one function, in words."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from mlvm.core.errors import brief, line_of, user_place
from mlvm.eager.capture.guards.layout import PLAIN
from mlvm.eager.capture.guards.reads import ALL, reads_of
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.capture.guards.surroundings import names_of
from mlvm.eager.optim.optimizer import Group, Optimizer
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Node

MANY: Final = 8
"""The program at which the warning is issued."""

_MOST_NAMED: Final = 3


class RecompilationWarning(UserWarning):
    """A captured function has recorded many programs, as something that a program is for changes
    from call to call. The text says what.

        >>> import warnings
        >>> step = ml.capture(lambda x: x + x)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     for n in range(1, 9): _ = step(ml.ones(n))
        >>> caught[0].category.__name__
        'RecompilationWarning'
    """


class Changing:
    """What each recording of a function was for, until there are so many that a warning says what
    differs between them; it is issued once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._recordings: list[dict[Any, tuple[str, str]]] = []
        self._warned = False

    def note(self, signature: Signature, args: Any, kwargs: Any) -> None:
        """Note what a recording is for, before it changes anything."""
        if not self._warned:
            self._recordings.append(
                {**dict(_of_arguments(self._fn, args, kwargs)), **dict(_of_function(signature))}
            )

    def warn(self, name: str) -> None:
        """Issue `RecompilationWarning` if the function of that name has now been recorded often."""
        if self._warned or len(self._recordings) < MANY:
            return
        recordings, self._recordings, self._warned = self._recordings, [], True
        found = list(_differences(recordings))
        found.sort(key=lambda each: -len(each[1]))
        text = "; ".join(
            f"{label} was {', '.join(values)}" for label, values in found[:_MOST_NAMED]
        )
        if len(found) > _MOST_NAMED:
            text += f"; and {len(found) - _MOST_NAMED} more changed"
        _warn(
            f"{name} has recorded its {MANY}th program, which takes time and memory: "
            f"{text or 'what is the same tensor, or a view of one, changed'}. "
            f"Give what changes as a tensor, or keep it the same."
        )


def _warn(text: str) -> None:
    """Issue the warning about the line of Python outside of mlvm that led here."""
    place = user_place()
    file, _, line = line_of(place).rpartition(":") if place is not None else (__file__, "", "1")
    warnings.warn_explicit(text, RecompilationWarning, file, int(line))


def _differences(
    recordings: list[dict[Any, tuple[str, str]]],
) -> Iterator[tuple[str, list[str]]]:
    """What was not the same in all recordings, with what it was."""
    for key in dict.fromkeys(key for each in recordings for key in each):
        seen = [each[key] for each in recordings if key in each]
        values = list(dict.fromkeys(value for _, value in seen))
        if len(values) > 1:
            yield seen[0][0], values


def _of_arguments(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> Iterator[tuple[Any, tuple[str, str]]]:
    """What the arguments hold: a key, and in words where and what."""
    code = getattr(fn, "__code__", None) if type(fn) is types.FunctionType else None
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    for i, value in enumerate(args):
        name = repr(names[i]) if i < len(names) else str(i)
        yield from _of_tree(f"argument {name}", value)
    for name, value in kwargs.items():
        yield from _of_tree(f"argument {name!r}", value)


def _of_tree(label: str, tree: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
    if isinstance(tree, (list, tuple)):
        yield label, (f"the length of {label}", str(len(tree)))
        for i, each in enumerate(tree):
            yield from _of_tree(f"{label}[{i}]", each)
    elif isinstance(tree, dict):
        yield label, (f"the keys of {label}", brief(", ".join(map(repr, tree))))
        for name, each in tree.items():
            yield from _of_tree(f"{label}[{name!r}]", each)
    else:
        yield label, (label, _text(tree))


def _of_function(signature: Signature) -> Iterator[tuple[Any, tuple[str, str]]]:
    """What the function reaches by itself, by the names that its code may read."""
    every = ALL in signature.names
    for value in signature.held:
        for names in names_of(value):
            read = None if every else signature.names
            if isinstance(value, types.FunctionType) and names.owner is value.__globals__:
                read = frozenset(reads_of(value.__code__).globals)
            elif issubclass(type(value), (dict, list, types.FunctionType, Node, Optimizer, Group)):
                read = None
            for name, each in names.read().items():
                if read is None or name in read:
                    yield (id(names.owner), name), (names.text.format(name), _text(each))


def _text(value: Any) -> str:
    kind = type(value)  # isinstance might call what is looked into
    if kind is Tensor:
        return str(value.type)
    if kind in PLAIN:
        return brief(value)
    if kind in (list, tuple, dict, set):
        return f"a {kind.__name__} of {len(value)}"
    named = kind is types.FunctionType or issubclass(kind, type)
    return f"{value.__qualname__ if named else f'a {kind.__qualname__}'} at {id(value):#x}"
