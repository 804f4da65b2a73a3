"""Causes of retraces, in words: the guards and arguments that differ from trace to trace.

`GuardChecker` is fast and says only that some guard does not hold; this is slow and says which.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import brief, user_line
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.eager.capture.guards.layout import PLAIN, SMALL
from mlvm.eager.capture.guards.rebinding import contents
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.warn import warn_at

MANY: Final = 8
"""The program at which the warning is issued."""

_MOST_NAMED: Final = 3
_TYPE: Final = re.compile(r"[a-z]+\d*\[[\d,]*\]")
"""The text of a tensor's type."""

Words: TypeAlias = Iterator[tuple[Any, tuple[str, str]]]
"""Pairs of a key, and two texts: a place, and the value there."""


class RecompilationWarning(UserWarning):
    """A captured function has recorded many programs, as a value that programs are specialised on
    changes from call to call. The text names it.

        >>> import warnings
        >>> step = ml.capture(lambda x, name: x + len(name))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     for n in range(8): _ = step(ml.ones(2), "x" * n)
        >>> caught[0].category.__name__
        'RecompilationWarning'
    """


class Changing:
    """Descriptions of a function's traces, until there are `MANY`: then one warning names the
    values that differ between them."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        code = fn.__code__ if type(fn) is types.FunctionType else None
        self._names = code.co_varnames[: code.co_argcount] if code is not None else ()
        self._recordings: list[dict[Any, tuple[str, str]]] = []
        self._warned = False

    def describe(self, guards: GuardSet, args: Any, kwargs: Any) -> dict[Any, tuple[str, str]]:
        """Return the values that a trace is specialised on, in words, before it changes any."""
        if self._warned:
            return {}
        names = [*self._names, *range(len(self._names), len(args))]
        words = dict(words_of(guards))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            words.update(_of_tree(f"argument {name!r}", value))
        return words

    def add(self, description: dict[Any, tuple[str, str]], name: str) -> None:
        """Add a trace that has led to a program. Issue `RecompilationWarning` at the user's line if
        the function of that name now has `MANY`."""
        if not self._warned:
            self._recordings.append(description)
        if len(self._recordings) < MANY:
            return
        recordings, self._recordings, self._warned = self._recordings, [], True
        changes = []
        for key in dict.fromkeys(key for each in recordings for key in each):
            wheres, whats = zip(*[each[key] for each in recordings if key in each], strict=True)
            changes.append((wheres[0], list(dict.fromkeys(whats))))
        changes = sorted([each for each in changes if len(each[1]) > 1], key=lambda x: -len(x[1]))
        text = "; ".join(f"{where} was {', '.join(what)}" for where, what in changes[:_MOST_NAMED])
        if len(changes) > _MOST_NAMED:
            text += f"; and {len(changes) - _MOST_NAMED} more changed"
        tensors = [all(map(_TYPE.fullmatch, what)) for _, what in changes]
        remedies = [
            "Open the axis by name, ml.capture(step, lengths={'x': ('n', None)}), or pad it to one "
            "of a few lengths: ml.Pipeline(data, n, pad=0, pad_to=[64, 128])"
            if any(tensors)
            else "",
            "Give what changes as a tensor, or keep it the same"
            if not tensors or not all(tensors)
            else "",
        ]
        message = (
            f"{name!r} has recorded its {MANY}th program, which takes time and memory: "
            f"{text or 'the identity of tensors, or of the memory of views, changed'}. "
            f"{'. '.join(filter(None, remedies))}."
        )
        warn_at(user_line(), message, RecompilationWarning)


def words_of(guards: GuardSet) -> Words:
    """Yield the present value of each guarded name, in words."""
    names: dict[int, str] = {}
    for kind, owner, name, value in guards.guards:
        place, text = guards.places.get(id(owner), ({}, ""))
        names.setdefault(id(value), text.format(name))
        if kind in ("item", "number") and name in place:
            yield (id(place), name), (text.format(name), _what(place[name]))
        elif kind in ("values", "items", "attribute") and text:
            for each, now in contents(place).items():
                yield (id(place), each), (text.format(each), _what(now))
        elif kind == "equal" and owner is not None:
            where = names.get(id(owner)) or _what(owner)
            yield id(owner), (f"the content of {where}", _of_array(owner, value))
        elif kind in ("items", "equal"):
            yield id(owner), (f"the content of {_what(owner)}", ", ".join(map(_what, value)))
        elif kind in ("attribute", "entry", "class", "slot"):
            name = getattr(name, "__name__", name) or kind
            yield (id(owner), name), (f"{name!r} of {_what(owner)}", _what(value))


def _of_array(array: Any, content: Any) -> str:
    """Return an array's values or, of many, their digest."""
    array = np.asarray(array)
    values = f"of digest {content[2][:4].hex()}" if array.nbytes > SMALL else brief(array.tolist())
    return f"{array.dtype}{[*array.shape]} {values}"


def _of_tree(where: str, tree: Any) -> Words:
    if isinstance(tree, (list, tuple)):
        yield where, (f"the length of {where}", str(len(tree)))
        for i, each in enumerate(tree):
            yield from _of_tree(f"{where}[{i}]", each)
    elif isinstance(tree, dict):
        yield where, (f"the keys of {where}", brief(", ".join(map(repr, tree))))
        for name, each in tree.items():
            yield from _of_tree(f"{where}[{name!r}]", each)
    else:
        yield where, (where, _what(tree))


def _what(value: Any) -> str:
    kind = type(value)  # isinstance might call the value's own code
    if kind is Tensor:
        return str(value.type)
    if kind in PLAIN:
        return brief(value)
    if kind in (list, tuple, dict, set):
        return f"a {kind.__name__} of {len(value)}"
    named = kind is types.FunctionType or issubclass(kind, type)
    return f"{value.__qualname__ if named else f'a {kind.__qualname__}'} at {id(value):#x}"
