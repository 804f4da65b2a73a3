"""Arrays and lists of numbers as operands and as indices: taken as `asarray` takes them; but the
numbers of a list beside a tensor have the dtype that one such number has there. And numpy's
functions of elements, which compute with tensors by ours.

Only where that is a copy within this process. To a VM elsewhere values go by `asarray` alone, so
that a line which sends them shows it; and in a captured function, whose later calls would all get
the values of the first, it is refused as `asarray` is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

from mlvm.core.errors import DTypeError, MlvmError, OpError
from mlvm.core.types import DType, bool_
from mlvm.eager.functions.creation import asarray, listed_beside
from mlvm.eager.hints import keyword_hint
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.tensor import OneOp, Tensor, is_array

P = ParamSpec("P")
R = TypeVar("R")


def taken(array: object, call: OneOp | None = None, *, beside: Tensor | None = None) -> Tensor:
    """A tensor of an array's values, or of a list's, in the current arena: an operand of `call`.
    A list of numbers `beside` a tensor has the dtype of `listed_beside`.

    Raises `DTypeError` on a VM elsewhere, and what `asarray` raises.
    """
    try:
        return _taken(array, None if beside is None else listed_beside(array, beside.dtype))
    except OpError as error:
        if call is None:
            raise
        raise error.at(call.op.name, (type(array).__name__,)) from None


def _taken(array: object, dtype: DType | None) -> Tensor:
    vm = current_arena().vm.stands_for
    if not getattr(vm, "on_host", False):
        raise DTypeError(
            f"the values of this {type(array).__name__} are here and {vm.name} is elsewhere; "
            f"send them with asarray"
        )
    return asarray(array, dtype)


def takes_arrays(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, with tensors in place of the arrays and lists that it is given for a parameter
    whose annotation begins with `Tensor` or `Operand`.

    A list of numbers for an `Operand` is beside the other operands, or else beside the first
    tensor. One for a `Tensor` may also be of indices: only its floats heed the tensor, and are as
    wide.
    """
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
    operands = {each.name for each in wanted if str(each.annotation).startswith("Operand")}
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
        several = bound.arguments.pop(names[-1], ()) if rest else ()
        single = [name for name in names if name in bound.arguments]
        named = [(name, bound.arguments[name]) for name in single]
        named += [(names[-1], x) for x in several]
        try:
            xs = _together(named, operands)
        except OpError as error:
            raise error.at(fn.__name__, [_text(x) for _, x in named]) from None
        bound.arguments.update(zip(single, xs, strict=False))
        if rest:
            bound.arguments[names[-1]] = tuple(xs[len(single) :])
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
    if name == "randint" and len(args) > 1:
        raise TypeError(
            "randint() takes low= and high= by name: randint(shape, low=..., high=...)"
        ) from None
    hint = keyword_hint(keywords, signature.parameters)
    if hint:
        raise TypeError(f"{name}(): {hint}") from None


def _together(given: list[tuple[str, object]], operands: set[str]) -> list[object]:
    """The arguments, by name, with tensors for the arrays, and then for the lists beside them.
    `operands` are the names of those that are operands of one op together."""
    xs = [taken(x) if is_array(x) and not isinstance(x, (list, tuple)) else x for _, x in given]
    order = sorted(zip(given, xs, strict=True), key=lambda each: each[0][0] not in operands)
    beside = next((x for _, x in order if isinstance(x, Tensor)), None)
    for i, (name, x) in enumerate(given):
        if isinstance(x, (list, tuple)):
            xs[i] = taken(x, beside=beside) if name in operands else _as_wide(x, beside)
    return xs


def _as_wide(values: object, beside: Tensor | None) -> Tensor:
    """A tensor of a list, whose floats are as wide as the tensor's."""
    dtype = None if beside is None else listed_beside(values, beside.dtype)
    own = listed_beside(values, bool_)
    if dtype is None or own is None or not own.is_inexact:
        return taken(values)
    return _taken(values, dtype.real if own.is_float else dtype)


def _text(x: object) -> object:
    return x.type if isinstance(x, Tensor) else type(x).__name__


_OURS: Final = {
    "absolute": "abs",
    "conjugate": "conj",
    "expit": "sigmoid",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
    "rint": "round",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "tan2", "sinh", "cosh", "tanh")},
}
"""What numpy's ufuncs, and SciPy's, are called here, where it is something else."""


def array_ufunc(x: Tensor, ufunc: Any, method: str, /, *inputs: Any, **options: Any) -> Tensor:
    """`numpy.exp(x)` is `exp(x)`, a tensor, and `a + x` of an array a is `add(a, x)`.

    Raises `DTypeError` for a ufunc that there is no function for, for one of its methods such as
    `reduce`, and for its options: a tensor is not written into an array.
    """
    name = _OURS.get(ufunc.__name__, ufunc.__name__)
    function = getattr(op, name, None)
    if method == "__call__" and not options and function is not None:
        return cast(Tensor, function(*inputs))
    call = f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
    if options:
        call += f"({', '.join(f'{option}=' for option in options)})"
    raise DTypeError(f"{call} takes no tensor; give it x.numpy(), or use functions of mlvm.eager")


Tensor.__array_ufunc__ = array_ufunc
Tensor._taken = staticmethod(taken)
