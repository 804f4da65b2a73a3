"""`capture(replace=)`: record patterns for the operand types that occur in a step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

from mlvm.core.errors import ArgumentError, CaptureError, MlvmError, brief
from mlvm.core.types import TensorType, bool_, f32, i64
from mlvm.eager.capture.trace import trace_once
from mlvm.eager.tensor.warn import warn_at
from mlvm.step.flow import Flow
from mlvm.step.replacement import Pattern, Replaced, Types, replaced

_DIMENSIONS: Final = 2, 1, 3, 4, 0


class ReplacementWarning(UserWarning):
    """Warning for a pattern of `capture(replace=)` that matches no part of the recorded step.

    >>> import warnings
    >>> step = ml.capture(lambda x: x + x, replace={lambda x: ml.exp(x): "my_exp"})
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     _ = step(ml.ones(3))
    >>> caught[0].category.__name__, step.replaced
    ('ReplacementWarning', {'my_exp': []})
    """


def check_replace(patterns: object) -> dict[Callable[..., Any], str]:
    """Return the patterns with the names of functions.

    Raises `ArgumentError`."""
    if not isinstance(patterns, Mapping):
        raise ArgumentError(
            f"capture: expected {{pattern: name}} as replace, got {brief(patterns)}"
        )
    for pattern, name in patterns.items():
        if not callable(pattern) or not isinstance(name, str) or not name:
            raise ArgumentError(
                f"capture: expected a function of tensors and a host function's name in replace, "
                f"got {brief(pattern)}: {brief(name)}"
            )
        if _arity(pattern) is None:
            raise ArgumentError(
                f"capture: expected a pattern of one or more tensors by position, "
                f"got {_named(pattern)}"
            )
    return dict(patterns)


def replace_patterns(
    patterns: Mapping[Callable[..., Any], str], flow: Flow, states: Sequence[object], name: str
) -> tuple[Flow, dict[str, list[Replaced]]]:
    """Return the flow with patterns replaced by host functions, and the replaced calls by name.

    `name` is the name of the captured function. Issues `ReplacementWarning` for a pattern that
    matches nothing."""
    flow, matches = replaced(flow, list(patterns.items()), cache(_instance), states)
    by_name: dict[str, list[Replaced]] = {}
    for (pattern, function), places in zip(patterns.items(), matches, strict=True):
        by_name.setdefault(function, []).extend(places)
        if not places:
            warn_at(
                _line(pattern),
                f"the pattern {_named(pattern)} fits nowhere in {name!r}: {function!r} is not "
                f"called for it; see capture(replace=) for what a pattern matches",
                ReplacementWarning,
            )
    return flow, by_name


def _instance(pattern: Callable[..., Any], types: Types | None) -> Any:
    """Return the pattern for operands of these types; None if it rejects them.

    Without types, return it for some types that it accepts."""
    if types is None:
        return _probes(pattern)
    with suppress(MlvmError):
        return _traced(pattern, types)
    return None


def _traced(pattern: Callable[..., Any], operands: Types) -> Pattern:
    """Trace a pattern for operands of these types.

    Raises the errors of `capture`."""
    call, _ = trace_once(pattern, operands, {})
    uses = [use for _, use in call.named_results()]
    return Pattern.of(call.flow, uses, operands, call.record.outside.states)


def _probes(pattern: Callable[..., Any]) -> list[Pattern]:
    """Return the pattern for small operands of various dtypes and ranks.

    It tries f32 of each rank, then integers and bools, and different ranks. Raises the first error
    if the pattern rejects all of them."""
    probes: list[Pattern] = []
    error: MlvmError | None = None
    arity = _arity(pattern) or 0
    for types in itertools.islice(_types(arity), 256):
        if probes and len({type.dtype for type in types} | {type.ndim for type in types}) > 2:
            break
        try:
            probes.append(_traced(pattern, types))
        except CaptureError as refused:
            raise CaptureError(f"{_named(pattern)}: {refused}") from None
        except MlvmError as refused:
            error = error or refused
    if not probes and error is not None:
        raise CaptureError(f"capture: the pattern {_named(pattern)} rejects all operands: {error}")
    return probes


def _types(arity: int) -> Iterator[Types]:
    """Yield types of operands, equal types first."""
    for dtypes in itertools.product((f32, i64, bool_), repeat=arity):
        for n in _DIMENSIONS:
            yield tuple([TensorType(dtype, (2,) * n) for dtype in dtypes])
    for dimensions in itertools.product(_DIMENSIONS, repeat=arity):
        yield tuple([TensorType(f32, (2,) * n) for n in dimensions])


def _arity(pattern: Callable[..., Any]) -> int | None:
    """Return the number of operands of the pattern; None if it is not certain."""
    try:
        parameters = inspect.signature(pattern).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = {each.kind for each in parameters}
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return len(parameters) or None if kinds <= by_position else None


def _named(pattern: Callable[..., Any]) -> str:
    line = _line(pattern)
    name = getattr(pattern, "__qualname__", type(pattern).__name__)
    return f"{name} ({line})" if line else name


def _line(pattern: Callable[..., Any]) -> str | None:
    code = getattr(pattern, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
