"""What stands around every function of tensors that a user calls: arrays and lists become tensors,
an error names the function and its operands and ends at the caller's line, and where an argument is
called otherwise here, it says how."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from mlvm.core.errors import ArgumentError, DTypeError, MlvmError, OpError, brief
from mlvm.eager.tensor.operands import NUMBERS, as_operand, is_array, is_whole, widest_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of

P = ParamSpec("P")
R = TypeVar("R")

_PUBLIC: Final = "is_public"  # what marks a function that is


def _no_hint(*_: object) -> None:
    return None


hint: Callable[[str, Sequence[object], Mapping[str, object], Collection[str]], str | None] = (
    _no_hint
)
"""What to write instead of the arguments of a call, or None: by the name of the function, what was
given by position, and by keyword, and the names of its parameters.
`mlvm.eager.interop.hints` puts its own here."""


def told(error: MlvmError, function: str, operands: Iterable[object]) -> None:
    """Name the function and its operands in an error that names none, and drop the frames beneath.

    A traceback is to end at the caller's line: a bare `raise` after this adds no frame for the
    function it stands in. All that costs nothing until there is an error.
    """
    if isinstance(error, OpError):
        given = [*operands]
        some = any(isinstance(x, Tensor) or is_array(x) for x in given)
        error.at(function, [_text(x) for x in given] if some else ())
    error.__traceback__ = None


def _text(x: object) -> object:
    if isinstance(x, Tensor):
        return x.type
    return brief(x) if isinstance(x, (bool, int, float, complex)) else kind_of(x)


def public(fn: Callable[P, R]) -> Callable[P, R]:
    """The function as users have it. Its operands are the parameters whose annotation begins with
    `Tensor` or `Operand`, but for `out`, which is written. A list for an `Operand` is beside the
    other operands, or else beside the first tensor; one for a `Tensor` may also be of indices. The
    first may be a number where it is a `Tensor` and nothing else."""
    signature = inspect.signature(fn)
    parameters = [*signature.parameters.values()]
    wanted = [each for each in parameters if _is("Tensor", each) or _is("Operand", each)]
    by_keyword = [each.name for each in wanted if each.kind is not each.POSITIONAL_ONLY]
    rest = any(each.kind is each.VAR_POSITIONAL for each in wanted)
    leads = bool(wanted) and wanted[0].annotation == "Tensor"
    is_method = fn.__name__ == "__call__"  # whose class says what it is
    end = None if rest else 1 + max(map(parameters.index, wanted), default=-1)

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            given = args[:end]
            if keywords and by_keyword:
                given += tuple([keywords[name] for name in by_keyword if name in keywords])
            for x in given:
                if x.__class__ is not Tensor and is_array(x):
                    break
            else:
                if not (leads and given and isinstance(given[0], NUMBERS)):
                    return fn(*args, **keywords)
            bound = None
            with suppress(TypeError):
                bound = signature.bind(*args, **keywords)
            if bound is not None:  # else Python says below what does not fit
                _take_arrays(bound.arguments, wanted)
                args, keywords = bound.args, bound.kwargs  # type: ignore[assignment]
            return fn(*args, **keywords)
        except MlvmError as error:
            if error.late:
                raise
            text = hint(fn.__name__, args, keywords, signature.parameters)
            if text is not None:
                kind = DTypeError if isinstance(error, DTypeError) else ArgumentError
                raise kind(text) from None
            if not is_method:
                if isinstance(error, OpError) and error.op != fn.__name__:
                    error.op = None  # of what it is composed of the caller knows nothing
                told(error, fn.__name__, _operands(signature, args, keywords))
            error.__traceback__ = None
            raise
        except TypeError:
            text = hint(fn.__name__, args, keywords, signature.parameters)
            if text is not None:
                raise ArgumentError(text) from None
            raise

    vars(function)[_PUBLIC] = True
    return function


def hinted(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, which says what to write where it is called as another library's."""

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return fn(*args, **keywords)
        except TypeError:
            text = hint(fn.__name__, args, keywords, inspect.signature(fn).parameters)
            if text is not None:
                raise ArgumentError(text) from None
            raise

    return function


def names_of(space: Mapping[str, Any]) -> list[str]:
    """The public names that a module defines itself: functions that are `public`, and classes."""
    own = {name: x for name, x in space.items() if getattr(x, "__module__", 0) == space["__name__"]}
    found = [name for name, x in own.items() if inspect.isclass(x) or hasattr(x, _PUBLIC)]
    return sorted(name for name in found if name[0] != "_")


def _is(annotation: str, parameter: inspect.Parameter) -> bool:
    return parameter.name != "out" and str(parameter.annotation).startswith(annotation)


def _take_arrays(arguments: dict[str, Any], wanted: Sequence[inspect.Parameter]) -> None:
    """Put tensors in place of the arrays, which are beside the tensor of the widest float, one of
    a layer's own too, and then of the lists, which are beside the first of all."""
    given: dict[inspect.Parameter, list[Any]] = {}
    for each in wanted:
        if each.name in arguments:
            value = arguments[each.name]
            given[each] = [*value] if each.kind is each.VAR_POSITIONAL else [value]
    own: Mapping[str, Tensor] = getattr(arguments.get("self"), "named_parameters", dict)()
    widest = widest_of([*itertools.chain(*given.values()), *own.values()])
    for each, values in given.items():
        if each.annotation == "Tensor":
            values = [as_operand(x) if isinstance(x, NUMBERS) else x for x in values]
        given[each] = [as_operand(x, widest) if is_whole(x) else x for x in values]
    in_turn = sorted(given, key=lambda each: not _is("Operand", each))
    beside = next((x for each in in_turn for x in given[each] if isinstance(x, Tensor)), None)
    for each, values in given.items():
        or_index = not _is("Operand", each)
        xs = [as_operand(x, beside, or_index=or_index) if _is_list(x) else x for x in values]
        arguments[each.name] = tuple(xs) if each.kind is each.VAR_POSITIONAL else xs[0]


def _is_list(x: object) -> bool:
    return isinstance(x, (list, tuple))


def _operands(
    signature: inspect.Signature, args: Sequence[object], keywords: Mapping[str, object]
) -> list[object]:
    """What was given for operands and for lists of tensors; nothing if one of them is none."""
    try:
        arguments = signature.bind_partial(*args, **keywords).arguments
    except TypeError:
        return []
    given: list[object] = []
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        if _is("Iterable[Tensor]", parameter) or parameter.kind is parameter.VAR_POSITIONAL:
            given += value if _is_list(value) else ()
        elif value is not None and (_is("Tensor", parameter) or _is("Operand", parameter)):
            given.append(value)
    known = all(isinstance(x, (Tensor, int, float, complex)) or is_array(x) for x in given)
    return given if known else []


def require_arguments(owner: type, args: Sequence[object], given: Mapping[str, object]) -> None:
    """Refuse arguments that a constructor of mlvm does not take. Raises `ArgumentError` with the
    remedy for a keyword of another library, and `TypeError` with the name of the class if the
    constructor is that of a private base."""
    constructor = getattr(owner, "__init__")  # noqa: B009  mypy knows no such field of a type
    if not str(getattr(constructor, "__module__", None)).startswith("mlvm."):
        return
    if not given and not constructor.__qualname__.startswith("_"):
        return
    signature = inspect.signature(constructor)
    text = hint(owner.__name__, args, given, signature.parameters)
    if text is not None:
        raise ArgumentError(text)
    if constructor.__qualname__.startswith("_"):
        try:
            signature.bind(None, *args, **given)
        except TypeError as error:
            raise TypeError(f"{owner.__name__}(): {error}") from None
