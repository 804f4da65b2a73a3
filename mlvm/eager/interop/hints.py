"""Hints for names of numpy, PyTorch and JAX that differ here: `ml.cat` reports "use ml.concat".

`hints.txt` contains the names and the hints. A method that a tensor lacks is a descriptor, because
`__getattr__` would slow down every other attribute. A module has a `__getattr__`, which Python
calls only for missing names. `dir` omits all of these names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature, getattr_static, signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

from mlvm.core.errors import did_you_mean, with_article
from mlvm.core.memo import memoized
from mlvm.core.types import TensorType, u64
from mlvm.eager.functions.indexing import Places
from mlvm.eager.tensor import wrapper
from mlvm.eager.tensor.tensor import Tensor

_KEY: Final = TensorType(u64, (2,))


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield owner, name and hint of each row of the table.

    Code in a hint is in backticks."""
    owners = ""
    for line in Path(__file__).with_name("hints.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            owners = line.strip("[]")
        elif line and line[0] != "#":
            names, _, text = line.partition(": ")
            for owner in owners.split():
                yield from ((owner, name, text) for name in names.split())


@cache
def hints() -> Mapping[str, Mapping[str, str]]:
    """Return the hints by owner and name. The table is read at the first call."""
    table = defaultdict[str, dict[str, str]](dict)
    for owner, name, text in rows():
        table[owner][name] = text.replace("`", "")
    return table


Hint: TypeAlias = str | Callable[[], Callable[..., Any]]


class Elsewhere:
    """Descriptor for a name of other libraries.

    Reading it raises `AttributeError` with the hint. If the hint is a function, it returns a
    function of `ml`, and the error contains a call of this function. `help` also shows the hint."""

    def __init__(self, name: str, hint: Hint) -> None:
        self.name = name
        self.hint = hint
        self.__doc__ = f"There is none; {hint if isinstance(hint, str) else f'use ml.{name}'}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        hint = self.hint
        if not isinstance(hint, str):
            hint = f"use ml.{_call(self.name, hint())}"
        name = owner.__name__
        # chosen by how the first letter is pronounced: an LSTM
        vowels = "AEFHILMNORSX" if name.isupper() else "AEIOU"
        article = "an" if name[0] in vowels else "a"
        raise AttributeError(f"{article} {name} has no {self.name}; {hint}")


class Refused(Elsewhere):
    """Descriptor that also rejects an assignment, which would have no effect."""

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance, type(instance))


def _call(name: str, function: Callable[..., Any]) -> str:
    """Return the text of a call with all required arguments."""
    arguments = []
    for each in signature(function).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            arguments.append(f"*{each.name}")
        elif each.default is Parameter.empty and each.kind is not each.VAR_KEYWORD:
            arguments.append(f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name)
    return f"{name}({', '.join(arguments)})"


_UNUSED: Final = {"requires_grad", "trainable"}
"""Fields of other libraries' layers that would have no effect here."""


def hint_at(owner: type, texts: Mapping[str, Hint], listing: Callable[..., list[str]]) -> None:
    """Add a hint to the class for each of these names that it lacks.

    `listing` becomes the `dir` of instances."""
    own = set(dir(owner))
    for name, text in texts.items():
        if name not in own or isinstance(getattr_static(owner, name), Elsewhere):
            is_refused = name in _UNUSED or "__dict__" not in own
            setattr(owner, name, (Refused if is_refused else Elsewhere)(name, text))
    owner.__dir__ = listing  # type: ignore[method-assign]


def refuse_assignment(owner: type) -> None:
    """Let an assignment of these properties raise `AttributeError` with the hint."""

    def refuse(name: str) -> Callable[[object, object], NoReturn]:
        def setter(instance: object, value: object) -> NoReturn:
            text = (
                f"the {name} of {with_article(owner.__name__)} is not assigned; "
                f"{hints()['assigned'][name]}"
            )
            raise AttributeError(text)

        return setter

    for name in hints()["assigned"]:
        setattr(owner, name, getattr_static(owner, name).setter(refuse(name)))


def hint(
    function: str,
    args: Sequence[object],
    keywords: Mapping[str, object],
    names: Mapping[str, object],
) -> str | None:
    """Return the remedy for arguments of a different library's function with that name.

    These are arguments with a different meaning by position, and replacements of unknown keywords.
    If the arguments do not fit the parameters for a different reason, list the parameters. Return
    None if they fit."""
    if function == "__call__":
        function = type(args[0]).__name__
    text = _of_places(function, args, keywords, names)
    remedies = [text] if text else []
    kind = "no_keyword.layer" if function[0].isupper() else "no_keyword"
    none = {**hints()["no_keyword"], **hints()[kind], **hints()[f"no_keyword.{function}"]}
    for name in keywords:
        if name in names:
            continue
        here = hints()["keyword"].get(name)
        if name in none:
            remedies.append(f"{name}= is not supported; {none[name]}")
        elif here in names:
            also = ", 1 for True" if name == "unbiased" else ""
            remedies.append(f"{name}= is not supported; use {here}={also}")
    parameters = [x for x in names.values() if isinstance(x, Parameter)]
    if not remedies and (parameters or isinstance(names, MappingProxyType)):  # except ops
        try:
            Signature(parameters).bind_partial(*args, **keywords)  # report too many arguments first
            Signature(parameters).bind(*args, **keywords)
        except TypeError as error:
            named = [x.name for x in parameters if x.kind is not x.POSITIONAL_ONLY]
            unknown = [name for name in keywords if name not in named]
            hint = did_you_mean(unknown[0], named) if unknown else ""
            remedies = [f"{error}{hint}; expected {_listed(parameters)}"]
    return f"{function}(): {'; '.join(remedies)}" if remedies else None


def _listed(parameters: Iterable[Parameter]) -> str:
    """List arguments by name: positional arguments first."""
    named = [each for each in parameters if each.name != "self"]
    by_name = [each.name for each in named if each.kind is each.KEYWORD_ONLY]
    by_place = [each.name for each in named if each.kind < each.KEYWORD_ONLY]
    return ", ".join(by_place or ["none"]) + (f", by name {', '.join(by_name)}" if by_name else "")


_OF_ONE_TUPLE: Final = {"broadcast_to", "permute_dims", "reshape", "tile"}
_OF_ONE_LIST: Final = {"concat", "hstack", "stack", "vstack"}


def _of_places(
    function: str, args: Sequence[object], keywords: Mapping[str, object], names: Collection[str]
) -> str | None:
    first = next(iter(names), None)
    bounds = ", low=..., high=..." if "low" in names else ""
    ints = [x for x in args if isinstance(x, int)]
    missing_bounds = function == "randint" and not keywords.keys() & {"low", "high"}
    has_dtype = "dtype" in keywords
    if function == "autocast" and ("device_type" in keywords or bool(args) is has_dtype):
        return 'takes a dtype, and is for any device: ml.autocast("bfloat16")'
    if function in ("empty", "ones", "zeros") and 1 < len(ints) == len(args):
        return f"the shape is one argument: write {function}({(*ints,)})"
    if function in _OF_ONE_TUPLE and 1 < len(ints) == len(args) - 1:
        return f"these numbers are one argument: write {function}(x, {(*ints,)})"
    if function in _OF_ONE_LIST and args and all(isinstance(x, Tensor) for x in args[:2]):
        return f"the tensors are one argument: write {function}([x, y])"
    if "groups" in names and args and _is_of_groups(args[0]):
        return 'takes the model, and groups=[("*bias", {"learning_rate": 0.1})] beside it'
    if function.startswith("Conv") and len(args) > 3 and "window" in names:
        return f"stride= and padding= are given by name: {function}(in, out, window, stride=...)"
    if function.startswith(("MaxPool", "AvgPool")) and len(args) > 1 and "window" in names:
        return f"stride= and padding= are given by name: {function}(window, stride=...)"
    if "memory" in names and len(args) > 3:
        return "keys and values are both of memory: layer(x) or layer(x, memory), with mask="
    if function in ("gelu", "GELU") and isinstance(keywords.get("approximate"), str):
        return 'approximate=True is PyTorch\'s "tanh", and False its "none"'
    if function == "where" and len(args) == 1:
        return "takes a condition, x and y; the positions are ml.nonzero(condition)"
    if "key" in names and first != "key" and any(getattr(x, "type", None) is _KEY for x in args):
        return f"the key is given by name: {function}({first}{bounds}, key=key)"
    if function == "layer_norm" and "eps" not in keywords:
        return "takes scale, bias and eps: layer_norm(x, ml.ones(n), ml.zeros(n), eps=1e-5)"
    if function == "normal" and len(args) > 1:
        return "takes a shape: write normal((2, 3)), or loc + scale * ml.random.normal(shape)"
    if missing_bounds or (function in ("randint", "uniform") and len(args) > 1):
        return f"takes low= and high= by name: {function}({first}{bounds})"
    return None


def _is_of_groups(x: object) -> bool:
    """Return whether it is a list of parameter groups in the form of PyTorch's optimizers."""
    return type(x) is list and any(isinstance(each, dict) and "params" in each for each in x)


wrapper.hint = hint


_INNER: Final = {"prepare", "region", "root", "stale", "tape"}
"""Names of a tensor that are used only within mlvm."""


def existing(instance: object) -> list[str]:
    """Return the names of an instance, without the hints."""
    names = object.__dir__(instance)
    return [n for n in names if not isinstance(getattr_static(instance, n, None), Elsewhere)]


hint_at(Places, hints()["mlvm.eager.Places"], existing)


def of_users(instance: object) -> list[str]:
    """Return the public names of a tensor.

    Properties are not evaluated, except those that exist only for some shapes."""
    owner = type(instance)
    return [
        name
        for name in object.__dir__(instance)
        if name not in _INNER
        and not (name.startswith("_") and not name.startswith("__"))
        and (isinstance(getattr_static(owner, name), property) or hasattr(instance, name))
    ]


def is_slip(name: str, candidate: str) -> bool:
    """Return whether a name is a misspelling of the other name.

    It differs in case, or by one missing, additional or changed letter, or by two swapped letters.
    The difference is inside a name of five letters or more, or it doubles a letter: `glu` is not a
    misspelling of gelu, `image` not of imag and `savez` not of save, but `Addam` is one of Adam."""
    if name.lower().replace("_", "") == candidate.lower().replace("_", ""):
        return True
    start = _alike(name, candidate)
    x, y = name[start:], candidate[start:]
    end = _alike(x[::-1], y[::-1])
    x, y = x[: len(x) - end], y[: len(y) - end]
    swapped = len(x) == 2 and x == y[::-1]
    one = max(len(x), len(y)) == 1 and (end > 0 or len(x) == len(y))
    is_doubled = end > 0 and x + y == name[start - 1 : start]
    is_long = min(len(name), len(candidate)) >= 5
    return start > 0 and (is_doubled or (is_long and (swapped or one)))


def _alike(x: str, y: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(x, y, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(x), len(y)))


def missing(module: str, names: Iterable[str]) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__` that raises a remedy for names that the module lacks.

    `names` are the existing names."""
    names = list(names)

    @memoized(1024)  # libraries request the same names repeatedly
    def text(name: str) -> str:
        hint = hints()[module].get(name)
        if hint is None:
            candidate = next((each for each in names if is_slip(name, each)), None)
            hint = f"did you mean {candidate}?" if candidate else None
        return f"{module} has no {name}" + (f"; {hint}" if hint else "")

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(text(name), name=name)

    return __getattr__
