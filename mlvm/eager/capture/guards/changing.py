"""Causes of retraces as text: the guards and arguments that differ between traces.

`GuardChecker` is fast, but reports only that some guard does not hold. This module is slow, and
reports which.
"""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import brief, user_line, with_article
from mlvm.core.protocol import VMProtocol
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.eager.capture.guards.readable import PLAIN, SMALL, content_of
from mlvm.eager.capture.guards.rebinding import contents
from mlvm.eager.recording import debug
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import items_of, members_of
from mlvm.eager.tensor.warn import warn_at
from mlvm.parallel.membership import place_of, sharding_here

_ARGUMENT: Final = "argument "
_TYPE: Final = re.compile(r"[a-z]+\d*\[[\d,]*\]")
"""The text of a tensor type."""


class Description(dict[Any, tuple[str, str]]):
    """The values to which a trace is specialised, as text: by key, a name and the value.

    parts: the parts of the guards' key, which also contains values without a text.
    """

    def __init__(self, guards: GuardSet) -> None:
        super().__init__(words_of(guards))
        self.parts = guards.parts


_REMEDIES: Final = {
    "type": "Open the axis by name, ml.capture(step, dynamic_axes={'x': {0: 'n'}}), or pad it "
    "to one of a few lengths: ml.Pipeline(data, n, pad=0, pad_to=[64, 128])",
    "identity": "Write new values into the tensor, as in x[...] = y, or give it as an argument",
    "value": "Pass values that change as tensors, or keep them constant",
}

_PINNED: Final = (
    "{} needs the value of a size, so each size gets its own program: write the loop as "
    "ml.fori_loop or ml.scan, or pad to one of a few sizes: ml.Pipeline(data, n, pad=0, "
    "pad_to=[64, 128])"
)

Words: TypeAlias = Iterator[tuple[Any, tuple[str, str]]]
"""Pairs of a key and two texts: a name and a value."""


class RecompilationWarning(UserWarning):
    """Warning for a captured function that was compiled many times because a value changes.

    The text names the value, to which each program is specialised.

        >>> import warnings
        >>> step = ml.capture(lambda x, name: x + len(name))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     for n in range(8): _ = step(ml.ones(2), "x" * n)
        >>> caught[0].category.__name__
        'RecompilationWarning'
    """


class Retrace(NamedTuple):
    """One trace after the first: the number, the line of the call, and the differences."""

    number: int
    line: str | None
    changes: str

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"trace {self.number}{where}: {self.changes}"


class Changing:
    """Descriptions of the traces of a function.

    Each trace after the first has causes: the values that differ from the most similar of the last
    `LIMITS.warning` traces. At this number of traces one warning is issued. `failure` is the error
    of the last trace, "" if it was compiled. `pinned` is the first line that needs the value of a
    dynamic size."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        code = fn.__code__ if type(fn) is types.FunctionType else None
        self._names = code.co_varnames[: code.co_argcount] if code is not None else ()
        self._recordings: deque[Description] = deque(maxlen=LIMITS.warning)
        self._retraces: deque[Retrace] = deque(maxlen=LIMITS.warning)
        self._count = 0
        self.failure = ""
        self.pinned = ""

    def describe(self, vm: VMProtocol, guards: GuardSet, args: Any, kwargs: Any) -> Description:
        """Return the values to which a trace is specialised, as text, before it changes any."""
        names = [*self._names, *range(len(self._names), len(args))]
        words = Description(guards)
        words.update(_of_context(vm))
        tensors: list[tuple[str, Tensor]] = []
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            words.update(_of_tree(f"{_ARGUMENT}{name!r}", value, tensors))
        words.update(_of_memory(guards, tensors))
        return words

    def add(self, description: Description, name: str, guards: GuardSet) -> None:
        """Add a trace with these guards that was compiled into a program.

        Issue `RecompilationWarning` at the user's line if the named function now has `MANY`
        programs.
        """
        self._count += 1
        self.failure = ""
        if self._recordings:
            recordings = [*self._recordings.copy()]  # other threads may append meanwhile
            recent = [(_changes([each, description]), each) for each in reversed(recordings)]
            changes, nearest = min(recent, key=lambda pair: len(pair[0]))
            texts = [
                f"{where} {_verb(where)[0]} {f', and {_verb(where)[1]} '.join(whats)}"
                for where, whats in changes
            ]
            other = None if texts else guards.path_of_difference(nearest.parts)
            texts += [] if other is None else [f"{other} was changed"]
            self._retraces.append(Retrace(self._count, user_line(), _joined(texts)))
        self._recordings.append(description)
        if self._count == LIMITS.warning:
            self._warn(name)

    def explain(self, name: str) -> str:
        """Return the causes of the named function's last retraces, one per line, oldest first."""
        lines = [*map(str, self._retraces.copy())]
        if self._count or not self.failure:
            times = {0: "was not called yet", 1: "was traced once"}
            lines.insert(0, f"{name!r} {times.get(self._count, f'was traced {self._count} times')}")
        lines += [_PINNED.format(self.pinned)] if self.pinned else []
        if self.failure:
            lines.append(f"the last trace of {name!r} raised {self.failure}")
        return "\n".join(lines)

    def _warn(self, name: str) -> None:
        changes = sorted(_changes(self._recordings), key=lambda x: -len(x[1]))
        text = _joined(
            [f"{where} {_verb(where)[0]} {', '.join(whats)}" for where, whats in changes]
        )
        kinds = {_kind_of(whats) for _, whats in changes} or {"value"}
        of_types = {"type": _PINNED.format(self.pinned)} if self.pinned else {}
        remedies = [text for kind, text in (_REMEDIES | of_types).items() if kind in kinds]
        message = (
            f"{name!r} has recorded its {LIMITS.warning}th program, which takes time and memory: "
            f"{text}. {'. '.join(remedies)}."
        )
        warn_at(user_line(), message, RecompilationWarning)


def _changes(descriptions: Iterable[Description]) -> list[tuple[str, list[str]]]:
    """Return the names with values that differ between descriptions, and the values in order."""
    descriptions = [*descriptions]
    changes = []
    for key in dict.fromkeys(key for each in descriptions for key in each):
        pairs = [each.get(key) for each in descriptions]
        if type(key) is _Shared:  # present only in a call with shared tensors
            two = key.words, "two"
            pairs = [
                pair or (two if key.places <= each.keys() else None)
                for pair, each in zip(pairs, descriptions, strict=True)
            ]
        where = next(pair[0] for pair in pairs if pair is not None)
        if type(key) is _Name:
            missing = where, _MISSING
            pairs = [
                pair or (missing if key._replace(name=_Name) in each else None)
                for pair, each in zip(pairs, descriptions, strict=True)
            ]
        whats = dict.fromkeys(pair[1] for pair in pairs if pair is not None)
        if not whats.keys() <= {_PRESENT, _MISSING}:
            whats.pop(_PRESENT, None)
        if type(key) is str and None in pairs and len(pairs) == 2:  # an argument
            whats = dict.fromkeys(pair[1] if pair is not None else "not given" for pair in pairs)
        if len(whats) > 1:
            changes.append((where, [*whats]))
    return changes


def _kind_of(whats: Iterable[str]) -> str:
    """Return the kind of difference: the `type` or `identity` of tensors, or a `value`."""
    if all(map(_TYPE.fullmatch, whats)):
        return "type"
    return "identity" if all(_TYPE.match(what) and " at " in what for what in whats) else "value"


def _verb(where: str) -> tuple[str, str]:
    """Return the verb for a name, in the past and in the present tense."""
    return ("were", "are") if where.startswith("arguments ") else ("was", "is")


def _joined(texts: Sequence[str]) -> str:
    if not texts:
        return "none of the values that are described here changed"
    first, rest = texts[:3], texts[3:]
    return "; ".join(first) + (f"; and {len(rest)} more changed" if rest else "")


def words_of(guards: GuardSet) -> Words:
    """Yield the present value of each guarded name, as text."""
    names: dict[int, str] = {}
    shown: type = type
    for kind, owner, name, value in guards.guards:
        if kind == "class" and issubclass(type(owner), type):
            shown = owner  # the next guards are about the dict of this class
        if type(owner) is types.MappingProxyType:
            owner = shown
        place, text = guards.places.get(id(owner), ({}, ""))
        names.setdefault(id(value), text.format(name))
        if kind == "keys":
            yield _Name(id(owner), _Name), ("", "")
            for each in value:
                where = text.format(each) if text else f"{each!r} of {_what(owner)}"
                yield _Name(id(owner), each), (where, _PRESENT)
        if kind in ("item", "number", "unread", "plain", "tensor") and text:
            now = _which(place[name]) if name in place else _MISSING
            yield _Name(id(place), name), (text.format(name), now)
        elif kind in ("values", "items", "attribute") and text:
            for each, now in contents(place).items():
                yield _Name(id(place), each), (text.format(each), _which(now))
            if kind == "items":
                yield (id(place), "length"), ("the length of a list", str(len(place)))
        elif name in ("__defaults__", "__kwdefaults__"):
            for each, now in _defaults(owner, name):
                where = f"the default of {each!r} in {owner.__qualname__}"
                yield (id(owner), each), (where, _which(now))
        elif kind == "equal" and owner is None:
            yield name, ("the number of classes registered with abstract classes", str(value[0]))
        elif kind == "equal" and name is not content_of:
            text = f"the setting that {getattr(owner, '__name__', None) or _what(owner)} reads"
            yield (id(owner), name), (text, _what(value) if type(value) in PLAIN else brief(value))
        elif kind == "equal":
            where, array = names.get(id(owner)) or _what(owner), np.asarray(owner)
            is_large = array.nbytes > SMALL
            values = f"of digest {value[2][:4].hex()}" if is_large else brief(array.tolist())
            text = f"{array.dtype}{[*array.shape]} {values}"
            yield id(owner), (f"the content of {where}", text)
        elif kind == "items":
            yield id(owner), (f"the content of {_what(owner)}", ", ".join(map(_what, value)))
        elif kind in ("attribute", "entry", "class", "slot"):
            name = getattr(name, "__name__", name) or kind
            yield _Name(id(owner), name), (f"{name!r} of {_what(owner)}", _what(value))


def _defaults(fn: types.FunctionType, name: str) -> Iterable[tuple[str, Any]]:
    """Return the parameters of a function with the defaults in this attribute."""
    if name == "__kwdefaults__":
        return [*(fn.__kwdefaults__ or {}).items()]
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return [*zip(names[len(names) - len(defaults) :], defaults, strict=False)]


class _Name(NamedTuple):
    """Key for a name in a dict or a class, by id; with the name `_Name`, for the owner itself."""

    owner: int
    name: Any


_PRESENT: Final = "defined"
"""The value of a name whose value does not matter."""
_MISSING: Final = "not defined"


class _Shared(NamedTuple):
    """Key for two arguments that are the same tensor, or views of the same memory."""

    first: str
    second: str

    @property
    def places(self) -> set[tuple[str, str]]:
        """The keys that a description with both tensors contains."""
        return {(self.first, "memory"), (self.second, "memory")}

    @property
    def words(self) -> str:
        return f"arguments {self.first.removeprefix(_ARGUMENT)} and " + self.second.removeprefix(
            _ARGUMENT
        )


def _of_memory(guards: GuardSet, tensors: Iterable[tuple[str, Tensor]]) -> Words:
    """Yield which tensors of the arguments are identical, views, or state of the function."""
    firsts: dict[int, tuple[str, Tensor]] = {}
    for where, x in tensors:
        owner = "a tensor that the function also uses itself" if id(x) in guards.tensors else ""
        view = "a view" if x.base is not None else "not a view"
        yield (where, "memory"), (where, owner or view)
        first, other = firsts.setdefault(id(x.root), (where, x))
        if first != where:
            what = "one tensor" if x is other else "views of one tensor"
            key = _Shared(first, where)
            yield key, (key.words, what)


def _of_context(vm: VMProtocol) -> Words:
    """Yield the global state of mlvm that programs depend on, see `context_of`."""
    half, shard = autocast_dtype(), sharding_here()
    rank, size = place_of(vm)
    for where, what in {
        "the VM": vm.name,
        "the default dtype": default_float().name,
        "autocast": half.name if half is not None else "off",
        "ml.debug": "on" if debug.is_watched(vm) else "off",
        "the rank": f"{rank} of {size}",
        "the sharding": _what(shard) if shard is not None else "off",
    }.items():
        yield ("context", where), (where, what)


def _of_tree(where: str, tree: Any, tensors: list[tuple[str, Tensor]], depth: int = 0) -> Words:
    """Yield the values of a tree of arguments, and add the tensors of the tree to `tensors`."""
    key: Any = where if depth == 0 else (where, "part")  # an omitted part is not mentioned
    if issubclass(type(tree), Tensor):
        tensors.append((where, tree))
    if issubclass(type(tree), (list, tuple)):
        members = [*members_of(tree)]
        yield key, (where, f"{with_article(type(tree).__name__)} of {len(members)}")
        for i, each in enumerate(members):
            yield from _of_tree(f"{where}[{i}]", each, tensors, depth + 1)
    elif issubclass(type(tree), dict):
        yield key, (where, with_article(type(tree).__name__))
        items = [*items_of(tree)]
        names = ", ".join([repr(name) for name, _ in items])
        yield (where, "keys"), (f"the keys of {where}", brief(names))
        for name, each in items:
            yield from _of_tree(f"{where}[{name!r}]", each, tensors, depth + 1)
    else:
        yield key, (where, _what(tree))


def _which(value: Any) -> str:
    """Return a value as text.

    Tensors of the state are identified, not printed."""
    return f"{_what(value)} at {id(value):#x}" if type(value) is Tensor else _what(value)


def _what(value: Any) -> str:
    kind = type(value)  # isinstance might run user code
    if kind is Tensor:
        return str(value.type)
    if kind in PLAIN:
        return brief(value)
    if kind in (list, tuple, dict, set):
        return f"{with_article(kind.__name__)} of {len(value)}"
    named = kind is types.FunctionType or issubclass(kind, type)
    return f"{value.__qualname__ if named else with_article(kind.__qualname__)} at {id(value):#x}"
