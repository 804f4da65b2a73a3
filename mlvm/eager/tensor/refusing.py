"""Typed errors that replace errors of Python and numpy, for arguments of public functions.

Functions convert arguments where they use them. If such a conversion fails in mlvm's own code
with a `TypeError` or a similar error, the wrappers of public functions call `refusal`. It compares
the arguments with the annotations, and names the first argument that does not fit. A call that
succeeds has no overhead. Errors raised by a user's function are not changed.
"""

from __future__ import annotations

import collections.abc
import inspect
import operator
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, TracebackType, UnionType
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import tracer_of
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    MlvmError,
    OpError,
    OutOfMemoryError,
    PositionError,
    brief,
    counted,
    is_ours,
    takes,
    with_article,
)
from mlvm.core.rules import is_real
from mlvm.eager.tensor.number import Number, class_of
from mlvm.eager.tensor.operands import NUMBERS, is_array
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import members_of

_REFUSED: Final = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
)
"""Errors of Python that wrong arguments cause."""

_LIBRARY: Final = os.path.dirname(os.__file__)


def refusal(
    name: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    error: Exception,
) -> MlvmError | None:
    """Return the typed error for an error of Python that wrong arguments have caused.

    Return None if a user's function raised the error, or if it has a different class."""
    if isinstance(error, MlvmError) or is_of_user(error):
        return None
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{name}: the host has no memory for that: {error}")
    if not isinstance(error, _REFUSED):
        return None
    try:
        arguments = inspect.signature(fn).bind(*args, **keywords).arguments
    except (TypeError, ValueError):
        return None
    for parameter_name, value in arguments.items():
        imitated = _imitated(value)
        if imitated is not None:
            return DTypeError(
                f"expected {parameter_name} as {with_article(imitated.__class__.__name__)}, got "
                f"{with_article(type(imitated).__name__)} whose __class__ is that class; pass a "
                f"real one"
            ).at(name, ())
    for strict in (False, True):
        for parameter in inspect.signature(fn).parameters.values():
            wrong = _misfit(parameter, arguments, _hints(fn).get(parameter.name, Any), strict)
            if wrong is not None:
                return wrong.at(name, ())
    for parameter_name, value in arguments.items():
        if str(error).startswith(f"{getattr(value, '__qualname__', None)}()"):
            reason = f"{parameter_name} is called with other arguments than it takes: {error}"
            return ArgumentError(reason).at(name, ())
    return ArgumentError(f"an argument is not supported: {error}").at(name, ())


def require_values(
    fn: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    error: Exception | None = None,
) -> None:
    """Raise `CaptureError`, as for any read, if an option of a failed call is an abstract tensor.

    Options are arguments whose annotation allows numbers, strings or bools, but no tensor. A typed
    error that does not name the option has a different cause."""
    if all(_traced(value) is None for value in (*args, *keywords.values())):
        return
    try:
        signature = inspect.signature(fn)
        arguments = signature.bind_partial(*args, **keywords).arguments
    except (TypeError, ValueError):
        return
    for name, value in arguments.items():
        text = _text(_hints(fn).get(name, signature.parameters[name].annotation))
        traced = _traced(value)
        is_cause = not isinstance(error, MlvmError) or re.search(rf"\b{name}\b", str(error))
        if traced is not None and is_cause and _OPTION.search(text) and not _OPERAND.search(text):
            values_of(traced)


_OPTION: Final = re.compile(r"\b(int|number|string|True|float|bool)s?\b")
_OPERAND: Final = re.compile("[Tt]ensor|Operand")
"""Words of annotations for options and operands, as `_text` describes them or as in the code."""


def _traced(value: Any, depth: int = 3) -> Tensor | None:
    """Return an abstract tensor that is the value, or is contained in this list or tuple."""
    kind = class_of(value)
    if issubclass(kind, (list, tuple)) and depth:
        parts = members_of(value)
        return next((x for y in parts if (x := _traced(y, depth - 1)) is not None), None)
    return value if issubclass(kind, Tensor) and tracer_of(value) else None


def _imitated(value: Any, depth: int = 4) -> Any:
    """Return an object in the value whose `__class__` is not its class, as for mocks, or None."""
    if isinstance(value, (list, tuple, dict)) and type(value) is value.__class__ and depth:
        parts: Any = dict.values(value) if isinstance(value, dict) else members_of(value)
        return next(
            (x for x in (_imitated(part, depth - 1) for part in parts) if x is not None), None
        )
    return value if value.__class__ is not type(value) and type(value) is not Number else None


def _misfit(
    parameter: inspect.Parameter, arguments: Mapping[str, Any], hint: Any, strict: bool
) -> OpError | None:
    """Return the error for the arguments of a parameter, or None if they fit the annotation.

    With `strict`, a number is not a tensor."""
    if parameter.name not in arguments or parameter.name == "self":
        return None
    value, each = arguments[parameter.name], ""
    values = [value]
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        values, each = [*(value.values() if isinstance(value, dict) else value)], "each of "
    wrong = [x for x in values if not _fits(x, hint, strict)]
    if not wrong:
        return None
    is_operand = str(parameter.annotation).startswith(("Tensor", "Operand"))
    kind = DTypeError if is_operand else ArgumentError
    return kind(f"expected {each}{parameter.name} as {_text(hint)}, got {brief(wrong[0])}")


_CAPTURE: Final = "capture: "
"""Start of errors of the compiler, which other functions than `capture` also call."""


def named(name: str, error: MlvmError) -> None:
    """Prepend the function's name to the text of an mlvm error that does not contain it.

    It replaces the name of an inner function, which the user has not called."""
    if error.late or isinstance(error, AssertionError):
        return
    if re.search(rf"\b{re.escape(name)}", str(error), re.IGNORECASE):
        return
    inner_name = None if is_of_user(error) else vars(error).get("named", "")
    vars(error)["named"] = inner_name if inner_name is None else f"{name}: "
    if inner_name is None:
        return
    if isinstance(error, OpError):
        inner = error.reason if inner_name or isinstance(error, PositionError) else str(error)
        error.reason, error.op, error.operands = inner.removeprefix(_CAPTURE), name, ()
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        inner = error.args[0].removeprefix(_CAPTURE).removeprefix(inner_name)
        error.args = (f"{name}: {inner}",)


def is_of_user(error: BaseException) -> bool:
    """Return whether user code raised an error, or called the code that did.

    User code is any line outside of mlvm, numpy and Python's library, within the call that failed.
    """
    step: TracebackType | None = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not is_ours(file) and not is_standard_file(file):
            return True
        step = step.tb_next
    return False


def is_standard_file(file: str) -> bool:
    """Return whether a file belongs to Python's standard library."""
    return file.startswith((_LIBRARY, "<frozen ")) and "site-packages" not in file


@cache
def _hints(fn: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the evaluated annotations of a function; an empty dict if one cannot be evaluated."""
    try:
        return typing.get_type_hints(inspect.unwrap(fn))
    except Exception:  # a name that only a type checker imports
        return {}


def _fits(value: Any, hint: Any, strict: bool = False) -> bool:
    """Return whether a value fits an annotation, as far as the annotation determines it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, (typing.TypeVar, str)):
        return True
    if origin is typing.Annotated:
        return _fits(value, parts[0])
    if origin in (typing.Union, UnionType):
        return any(_fits(value, each, strict) for each in parts)
    if hint in (None, NoneType):
        return value is None
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in parts)
    if hint is Tensor:
        return isinstance(value, Tensor if strict else (Tensor, *NUMBERS)) or (
            is_array(value) and _has_numbers(value)
        )
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    if hint is int:
        return _is_index(value)
    if hint is float:
        return is_real(value) or _is_scalar(value)
    if hint is complex:
        return isinstance(value, (complex, np.number)) or is_real(value) or _is_scalar(value)
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        count = _count(parts)
        return callable(value) if count is None else takes(value, count)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if issubclass(kind, collections.abc.Iterable) and isinstance(value, (str, bytes)):
        return kind in (str, bytes) and isinstance(value, kind)
    if kind is tuple and isinstance(value, list):
        kind = list
    try:
        if not isinstance(value, kind):
            return False
    except TypeError:  # a protocol
        return True
    if isinstance(value, (tuple, list)) and parts and kind is not tuple:
        return all(_fits(each, parts[0]) for each in members_of(value))
    if isinstance(value, tuple) and parts and parts[-1] is not ...:
        return len(parts) == len(value) and all(map(_fits, value, parts))
    return True


def _count(parts: Sequence[Any]) -> int | None:
    """Return the number of arguments in an annotation `Callable`, if it is specified."""
    return len(parts[0]) if parts and isinstance(parts[0], list) else None


def _has_numbers(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "buifcV"
    except Exception:  # a ragged list, or an array of a different library
        return False


def _is_index(value: Any) -> bool:
    try:
        return -(2**63) <= operator.index(value) < 2**63
    except (TypeError, MlvmError):
        return False


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.ndim


def _text(hint: Any) -> str:
    """Return a description of an annotation."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        texts = dict.fromkeys(map(_text, parts))
        return " or ".join(texts)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is typing.Annotated:
        return _text(parts[0])
    words = {int: "an int", float: "a number", complex: "a number", str: "a string"}
    words |= {bool: "True or False", NoneType: "None", Tensor: "a tensor"}
    if hint in words:
        return words[hint]
    if origin is collections.abc.Callable:
        count = _count(parts)
        return "a function" + ("" if count is None else f" of {counted(count, 'argument')}")
    if origin is not None:
        kind = origin.__name__.lower()
        items = (
            f" of {_text(parts[0]).removeprefix('a').removeprefix('n').strip()}s" if parts else ""
        )
        return f"{with_article(kind)}{items}"
    return with_article(getattr(hint, "__name__", hint))
