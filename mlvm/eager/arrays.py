"""Arrays and lists of numbers as operands and as indices: taken as `asarray` takes them.

Only where that is a copy within this process. To a VM elsewhere values go by `asarray` alone, so
that a line which sends them shows it; and in a captured function, whose later calls would all get
the values of the first, it is refused as `asarray` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from mlvm.core.errors import DTypeError, MlvmError, OpError
from mlvm.eager.context import current_arena
from mlvm.eager.creation import asarray
from mlvm.eager.elsewhere import keyword_hint
from mlvm.eager.tensor import OneOp, Tensor, is_array

P = ParamSpec("P")
R = TypeVar("R")


def taken(array: object, call: OneOp | None = None) -> Tensor:
    """A tensor of an array's values, or of a list's, in the current arena: an operand of `call`.

    Raises `DTypeError` on a VM elsewhere, and what `asarray` raises.
    """
    try:
        return _taken(array)
    except OpError as error:
        if call is None:
            raise
        raise error.at(call.op.name, (type(array).__name__,)) from None


def _taken(array: object) -> Tensor:
    vm = current_arena().vm.stands_for
    if not hasattr(vm, "storage_over"):  # of `LocalVMProtocol`, which takes long to be asked
        raise DTypeError(
            f"the values of this {type(array).__name__} are here and {vm.name} is elsewhere; "
            f"send them with asarray"
        )
    return asarray(array)


def takes_arrays(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, with tensors in place of the arrays and lists that it is given for a parameter
    whose annotation begins with `Tensor` or `Operand`."""
    signature = inspect.signature(fn)
    wanted = [
        parameter
        for parameter in signature.parameters.values()
        if str(parameter.annotation).startswith(("Tensor", "Operand"))
    ]
    if not wanted:
        lists = any("[Tensor]" in str(each.annotation) for each in signature.parameters.values())
        return telling(fn) if lists else fn
    names = [each.name for each in wanted]
    by_keyword = [each.name for each in wanted if each.kind is not each.POSITIONAL_ONLY]
    rest = any(each.kind is each.VAR_POSITIONAL for each in wanted)
    end = None if rest else 1 + list(signature.parameters).index(names[-1])

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        given = args[:end]
        if keywords and by_keyword:
            given += tuple([keywords[name] for name in by_keyword if name in keywords])
        for x in given:
            if x.__class__ is not Tensor and is_array(x):
                break
        else:
            try:
                return fn(*args, **keywords)
            except MlvmError as error:
                error.__traceback__ = None  # no frame of ours, as in `tensor`
                raise
            except TypeError:
                _tell(fn.__name__, signature, args, keywords)
                raise
        _tell(fn.__name__, signature, args, keywords)
        bound = signature.bind(*args, **keywords)
        for name in names:
            x = bound.arguments.get(name)
            if rest and name == names[-1]:
                bound.arguments[name] = tuple([taken(y) if is_array(y) else y for y in x or ()])
            elif is_array(x):
                bound.arguments[name] = taken(x)
        return fn(*bound.args, **bound.kwargs)

    return function


def telling(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, whose `TypeError` says what a keyword of another library is called here."""
    signature = inspect.signature(fn)

    @wraps(fn)
    def function(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return fn(*args, **keywords)
        except MlvmError as error:
            error.__traceback__ = None
            raise
        except TypeError:
            _tell(fn.__name__, signature, args, keywords)
            raise

    return function


def _tell(
    name: str, signature: inspect.Signature, args: Sequence[object], keywords: Iterable[str]
) -> None:
    """Raise `TypeError` with what to write, if the arguments are those of another library's
    function."""
    if name == "where" and len(args) == 1:
        raise TypeError(
            "where() takes a condition, x and y; the places are ml.nonzero(c)"
        ) from None
    hint = keyword_hint(keywords, signature.parameters)
    if hint:
        raise TypeError(f"{name}(): {hint}") from None


Tensor._taken = staticmethod(taken)
