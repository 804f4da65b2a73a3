"""Wrapper of every public function of tensors.

It converts arrays and lists to tensors. Errors get the name of the function and the operands, and
tracebacks end at the caller's line. A keyword of a different library raises an error with mlvm's
name.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import Any, Final, ParamSpec, TypeVar

from mlvm.core.errors import ArgumentError, DTypeError, MlvmError, OpError, brief
from mlvm.eager.tensor.operands import NUMBERS, as_operand, is_array, is_whole, widest_of
from mlvm.eager.tensor.refusing import named, refusal, require_values
from mlvm.eager.tensor.templates import call
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of, module_of

P = ParamSpec("P")
R = TypeVar("R")

_PUBLIC: Final = "is_public"  # attribute of public functions


def _no_hint(*_: object) -> None:
    return None


hint: Callable[[str, Sequence[object], Mapping[str, object], Mapping[str, object]], str | None] = (
    _no_hint
)
"""Return a remedy for the arguments of a failed call, or None.

The arguments are the function's name, the arguments by position and by keyword, and the parameters.
`mlvm.eager.interop.hints` sets it.
"""


def annotate_error(error: MlvmError, function: str, operands: Iterable[object]) -> None:
    """Name the function and the operands in an error that names none, and drop the inner frames.

    The innermost frame of the traceback is then the caller's line: a bare `raise` after this adds
    no frame for the function that raises. A successful call has no overhead.
    """
    if isinstance(error, OpError):
        values = [*operands]
        has_arrays = any(issubclass(type(x), Tensor) or is_array(x) for x in values)
        error.at(function, [_text(x) for x in values] if has_arrays else ())
    error.__traceback__ = None


def _text(x: Any) -> object:
    if issubclass(type(x), Tensor):
        return x.type
    return brief(x) if isinstance(x, (bool, int, float, complex)) else kind_of(x)


def public(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function for users.

    The operands are the parameters with an annotation that begins with `Tensor` or `Operand`,
    except `out`, which is written. A list that is passed for an `Operand` gets the dtype of the
    other operands, or of the first tensor; a list for a `Tensor` may also contain indices. The
    first operand may be a number if the annotation is exactly `Tensor`.
    """
    signature = inspect.signature(fn)
    parameters = [*signature.parameters.values()]
    operands = [each for each in parameters if _is("Tensor", each) or _is("Operand", each)]
    by_keyword = [each.name for each in operands if each.kind is not each.POSITIONAL_ONLY]
    rest = any(each.kind is each.VAR_POSITIONAL for each in operands)
    leads = bool(operands) and operands[0].annotation == "Tensor"
    is_method = fn.__name__ == "__call__"  # the class names it
    places = [*map(parameters.index, operands)]
    first, end = min(places, default=0), None if rest else 1 + max(places, default=-1)

    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            values = args[first:end]
            if keywords and by_keyword:
                values += tuple([keywords[name] for name in by_keyword if name in keywords])
            for x in values:
                if type(x) is not Tensor and is_array(x):
                    break
            else:
                if not (leads and values and isinstance(values[0], NUMBERS)):
                    return fn(*args, **keywords)
            bound = None
            with suppress(TypeError):
                bound = signature.bind(*args, **keywords)
            if bound is not None:  # otherwise the call below raises Python's error
                _convert_arrays(bound.arguments, operands)
                args, keywords = bound.args, bound.kwargs  # type: ignore[assignment]
            return fn(*args, **keywords)
        except MlvmError as error:
            if error.late:
                raise
            require_values(fn, args, keywords, error)
            text = hint(fn.__name__, args, keywords, signature.parameters)
            if text is not None:
                kind = DTypeError if isinstance(error, DTypeError) else ArgumentError
                raise kind(text) from None
            if not is_method:
                if isinstance(error, OpError) and error.op != fn.__name__:
                    error.op = None  # an inner op, which the caller has not called
                annotate_error(error, fn.__name__, _operands(signature, args, keywords))
            raise
        except Exception as error:
            _refuse(fn, signature.parameters, args, keywords, error)
            raise

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return call(checked, args, keywords)  # type: ignore[no-any-return]
        except MlvmError as error:
            if not error.late:
                error.__traceback__ = None
            raise

    vars(function)[_PUBLIC] = True
    return function


def hinted(fn: Callable[P, R], *, names: bool = True) -> Callable[P, R]:
    """Wrap a function or constructor so that invalid arguments raise a typed error with a remedy.

    Unless `names` is False, the function's name is added to errors that the function raises, and
    inner frames are removed from tracebacks.
    """

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return fn(*args, **keywords)
        except MlvmError as error:
            if not error.late:
                require_values(fn, args, keywords, error)
            if names:
                named(_name_of(fn, args), error)
                error.__traceback__ = None
            raise
        except Exception as error:
            _refuse(fn, inspect.signature(fn).parameters, args, keywords, error)
            raise

    return function


def _refuse(
    fn: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    args: Sequence[object],
    keywords: Mapping[str, object],
    error: Exception,
) -> None:
    """Raise the typed error for arguments that caused an error of Python or numpy."""
    require_values(fn, args, keywords, error)
    name = _name_of(fn, args)
    text = hint(name, args, keywords, parameters) if isinstance(error, TypeError) else None
    if text is not None:
        raise ArgumentError(text) from None
    refused = refusal(name, fn, args, keywords, error)
    if refused is not None:
        raise refused from error


def _name_of(fn: Callable[..., Any], args: Sequence[object]) -> str:
    """Return the name that users call: the class name for a constructor or a call of a layer."""
    if fn.__name__ not in ("__init__", "__call__"):
        return fn.__name__
    name = type(args[0]).__name__.removeprefix("_Process")  # the class of the default VM
    return name.removeprefix("Local")  # users call LocalVM as ml.VM


def names_of(space: Mapping[str, Any]) -> list[str]:
    """Return the public names that a module defines itself: `public` functions, and classes."""
    own = {name: x for name, x in space.items() if getattr(x, "__module__", 0) == space["__name__"]}
    names = [name for name, x in own.items() if inspect.isclass(x) or hasattr(x, _PUBLIC)]
    return sorted(name for name in names if name[0] != "_")


def names_shown(space: Mapping[str, Any]) -> list[str]:
    """Return the public names that the `__init__` of a folder imports for users."""
    return sorted(name for name, x in space.items() if name[0] != "_" and not inspect.ismodule(x))


def _is(annotation: str, parameter: inspect.Parameter) -> bool:
    return parameter.name != "out" and str(parameter.annotation).startswith(annotation)


def _convert_arrays(arguments: dict[str, Any], operands: Sequence[inspect.Parameter]) -> None:
    """Convert arrays to tensors, then lists.

    Arrays are converted like the tensor of the widest float dtype among the operands and a layer's
    parameters, lists like the first tensor.
    """
    by_parameter: dict[inspect.Parameter, list[Any]] = {}
    for each in operands:
        if each.name in arguments:
            value = arguments[each.name]
            by_parameter[each] = [*value] if each.kind is each.VAR_POSITIONAL else [value]
    own: Mapping[str, Tensor] = getattr(arguments.get("self"), "named_parameters", dict)()
    widest = widest_of([*itertools.chain(*by_parameter.values()), *own.values()])
    for each, values in by_parameter.items():
        if each.annotation == "Tensor":
            values = [as_operand(x) if isinstance(x, NUMBERS) else x for x in values]
        by_parameter[each] = [as_operand(x, widest) if is_whole(x) else x for x in values]
    in_order = sorted(by_parameter, key=lambda each: not _is("Operand", each))
    like = next((x for each in in_order for x in by_parameter[each] if isinstance(x, Tensor)), None)
    for each, values in by_parameter.items():
        or_index = not _is("Operand", each)
        xs = [as_operand(x, like, or_index=or_index) if _is_list(x) else x for x in values]
        arguments[each.name] = tuple(xs) if each.kind is each.VAR_POSITIONAL else xs[0]


def _is_list(x: object) -> bool:
    return isinstance(x, (list, tuple))


def _operands(
    signature: inspect.Signature, args: Sequence[object], keywords: Mapping[str, object]
) -> list[object]:
    """Return the arguments for operands and lists of tensors; empty if one is invalid."""
    try:
        arguments = signature.bind_partial(*args, **keywords).arguments
    except TypeError:
        return []
    values: list[object] = []
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        if _is("Iterable[Tensor]", parameter) or parameter.kind is parameter.VAR_POSITIONAL:
            values += value if _is_list(value) else ()
        elif value is not None and (_is("Tensor", parameter) or _is("Operand", parameter)):
            values.append(value)
    are_operands = all(isinstance(x, (Tensor, int, float, complex)) or is_array(x) for x in values)
    return values if are_operands else []


def require_arguments(owner: type, args: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Raise `ArgumentError` for arguments that a constructor of mlvm does not accept.

    The error states the remedy for a keyword of a different library; for other keywords it lists
    the accepted arguments.
    """
    constructor = getattr(owner, "__init__")  # noqa: B009  mypy knows no such field of a type
    if not module_of(constructor).startswith("mlvm."):
        return
    text = hint(owner.__name__, args, keywords, _parameters(constructor))
    if text is not None:
        raise ArgumentError(text)


def require_options(owner: type, args: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Raise `ArgumentError` for a tensor or an array where a layer's constructor expects an option.

    Constructors that users define accept any arguments."""
    values = [x for x in (*args, *keywords.values()) if _has_values(x)]
    constructor = getattr(owner, "__init__")  # noqa: B009  mypy knows no such field of a type
    is_default = constructor is object.__init__
    if not values or not (is_default or module_of(constructor).startswith("mlvm.")):
        return
    parameters = {} if is_default else _parameters(constructor)
    options: Mapping[str, object] = {"": values[0]}
    with suppress(TypeError):  # too many arguments
        signature = inspect.Signature([*parameters.values()])
        options = signature.bind_partial(*args, **keywords).arguments
    if "" in options and not is_default and not keywords.keys() <= parameters.keys():
        return  # `require_arguments` finds the meant keyword
    for option, value in options.items():
        hint = str(parameters[option].annotation) if option else ""
        if not _has_values(value) or re.search(r"\bTensor\b", re.sub(r"\[.*\]", "", hint)):
            continue
        if not getattr(value, "ndim", 1):
            require_values(constructor, (None, *args), keywords)
        name = ("nn." if module_of(owner).startswith("mlvm.") else "") + owner.__name__
        is_complete = all(x.default is not x.empty for x in parameters.values())
        call = f"{name}()(x)" if is_complete else f"{name}(...)(x)"
        function = getattr(owner, "_function", None)
        remedy = call if function is None else f"{call} or ml.{function.__name__}(x)"
        expected = f"{option} as {hint}" if option else "no argument"
        raise ArgumentError(
            f"expected {expected}, got a tensor; create the layer before you call it: {remedy}"
        ).at(name, [_text(value)])


def _has_values(x: object) -> bool:
    return isinstance(x, Tensor) or (hasattr(x, "__array__") and not isinstance(x, NUMBERS))


@cache
def _parameters(constructor: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a constructor, without self."""
    _, *parameters = inspect.signature(constructor).parameters.items()
    return dict(parameters)
