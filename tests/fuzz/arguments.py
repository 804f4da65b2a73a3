"""Call every public function and method with wrong values for each argument:

    python -m tests.fuzz arguments
    python -m tests.fuzz arguments --only conv2d

The right calls are those of docstrings' examples. One argument of each is replaced by a string,
None, a huge or negative integer, a float, a nested list, an array, a complex number and the like.
The call may succeed, or raise an `MlvmError` that names the function. Anything else is a fault: an
error of Python or numpy, an error without the name, and a call that does not return in seconds.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import os
import signal
import tempfile
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from tests.fuzz.command import limit_memory, parser_of, require_known
from tests.test_docstrings import public

SECONDS: Final = 3

WRONG: Final[dict[str, Callable[[], Any]]] = {
    "a string": lambda: "wrong",
    "None": lambda: None,
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "2**40": lambda: 2**40,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "a complex number": lambda: 1j,
    "True": lambda: True,
    "bytes": lambda: b"wrong",
    "a nested list": lambda: [[1, 2], [3, 4]],
    "a ragged list": lambda: [[1], [2, 3]],
    "a list of strings": lambda: ["wrong"],
    "an empty tuple": tuple,
    "a tuple of floats": lambda: (1.5, 2.5),
    "a dict": lambda: {"wrong": 1},
    "an array": lambda: np.ones((2, 3)),
    "an array of strings": lambda: np.array(["wrong"]),
    "an array of objects": lambda: np.array([None, {}]),
    "a tensor": lambda: ml.ones((2, 3)),
    "a tensor of complex numbers": lambda: ml.ones(2, dtype="c64"),
    "an object": object,
    "a mock of a tensor": lambda: unittest.mock.Mock(spec=ml.Tensor),
    "an imitation of a tensor": lambda: Imitation(ml.Tensor),
    "an imitation of a list": lambda: Imitation(list),
    "an imitation of a float": lambda: Imitation(float),
    "a mock of an array": lambda: unittest.mock.MagicMock(spec=np.ndarray),
    "a class": lambda: int,
}

NOT_CALLED: Final = {
    **dict.fromkeys(("connect", "RemoteVM"), "it connects"),
    **dict.fromkeys(
        [f"parallel.{each}Group" for each in ("", "Process", "Tcp", "Mpi", "Ray")],
        "it starts processes",
    ),
    "fori_loop": "it takes as many steps as it is told",
    "TensorType": "its errors are those of dtypes and shapes",
    "measure": "its arguments are those of a user's function",
    "host_call": "its arguments are those of a user's function",
}
"""Public names that are not called here, with the reason."""


class Imitation:
    """Object whose `__class__` is a class that it is not."""

    def __init__(self, imitated: type) -> None:
        self.imitated = imitated

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.imitated


class Call(NamedTuple):
    """A right call: the function's name, and code whose value is its arguments."""

    name: str
    function: str
    arguments: ast.Call
    before: list[ast.stmt]


class _TooLong(BaseException):
    """A call did not return in time."""


def targets() -> dict[str, Any]:
    """Return the public functions, classes and methods, by the names that users write."""
    found = {}
    for name, value in public().items():
        if name in NOT_CALLED or (inspect.isclass(value) and issubclass(value, BaseException)):
            continue
        found[name] = value
        if inspect.isclass(value) and value.__module__.startswith("mlvm.eager"):
            for each, method in vars(value).items():
                is_public = each == "__call__" or not each.startswith("_")
                if inspect.isroutine(method) and is_public and ">>>" in (method.__doc__ or ""):
                    found[f"{name}.{each}"] = method
    return found


def right_calls() -> Iterator[Call]:
    """Yield the calls of each target in its own docstring's examples."""
    for name, value in targets().items():
        last = name.rpartition(".")[2]
        text = "".join(x.source for x in doctest.DocTestParser().get_examples(value.__doc__ or ""))
        before: list[ast.stmt] = []
        for statement in ast.parse(text).body:
            for node in ast.walk(statement):
                if not isinstance(node, ast.Call):
                    continue
                function = ast.unparse(node.func)
                is_it = function in (f"ml.{name}", f"x.{last}") or (
                    last == "__call__" or ("." in name and function.endswith(f".{last}"))
                )
                if is_it:
                    yield Call(name, function, node, [*before])
            before.append(statement)


def _signature_of(function: Any) -> inspect.Signature:
    """Return the signature; of a Module that of `__init__`, which Python before 3.11.5 misses."""
    if inspect.isclass(function) and issubclass(function, ml.nn.Module):
        return inspect.signature(partial(function.__init__, None))
    return inspect.signature(function)


def attempts(call: Call) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a text and a function for each wrong argument of a call."""
    code = compile(ast.Module(call.before, []), "<example>", "exec")
    names: dict[str, Any] = {}

    def fresh() -> tuple[Any, inspect.BoundArguments]:
        names.clear()
        names["ml"] = ml
        with contextlib.redirect_stdout(None):
            exec(code, names)
        function = eval(call.function, names)
        given = "lambda *args, **keywords: (args, keywords)"
        ends = ast.unparse(
            ast.Call(ast.Name("_given"), call.arguments.args, call.arguments.keywords)
        )
        args, keywords = eval(ends, {**names, "_given": eval(given)})
        return function, _signature_of(function).bind(*args, **keywords)

    try:
        _, bound = fresh()
    except Exception:
        return
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for text, make in WRONG.items():

            def attempt(
                name: str = parameter.name, make: Any = make, kind: Any = parameter.kind
            ) -> Any:
                function, right = fresh()
                value = make()
                if kind is inspect.Parameter.VAR_POSITIONAL:
                    right.arguments[name] = (*right.arguments.get(name, ())[:-1], value)
                else:
                    right.arguments[name] = value
                    right = right.signature.bind(*_positional(right), **_named(right))
                signal.setitimer(signal.ITIMER_REAL, SECONDS, 0.1)
                try:
                    return function(*right.args, **right.kwargs)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)

            yield f"{call.function}({parameter.name}={text})", attempt


def _positional(bound: inspect.BoundArguments) -> list[Any]:
    """Return the arguments before the first that is not given."""
    values: list[Any] = []
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments or parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                values.append(parameter.default)
                continue
            break
        if parameter.kind is parameter.VAR_POSITIONAL:
            return [*values, *bound.arguments[name]]
        values.append(bound.arguments[name])
    return values


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    count = len(_positional(bound))
    names = [*bound.signature.parameters]
    rest = {name: x for name, x in bound.arguments.items() if name not in names[:count]}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest |= rest.pop(name, {})
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest.pop(name, None)
    return rest


def fault_of(call: Call, attempt: Callable[[], Any]) -> str | None:
    """Return what is wrong with the outcome of an attempt, or None."""
    name = call.name.split(".")[-2 if call.name.endswith("__call__") else -1]
    try:
        attempt()
    except ml.errors.OutOfMemoryError:  # the arguments are right, but too large for this machine
        return None
    except (
        OSError,
        ml.errors.GradientMismatchError,
        ml.errors.MissingExtraError,
    ):  # of files; what the function reports
        return None
    except ml.errors.MlvmError as error:
        text = str(error)
        if name.lower() in text.lower() or _is_of_example(error) or _calls_others(call, error):
            return None
        return (
            None if name in text else f"does not name the function: {type(error).__name__}: {text}"
        )
    except _TooLong:
        return f"does not return in {SECONDS} seconds"
    except Exception as error:
        if _is_of_example(error):
            return None
        return f"raises {type(error).__name__}: {error}"
    return None


def _calls_others(call: Call, error: ml.errors.MlvmError) -> bool:
    """Return whether an op of a function or a model that was given may have raised the error."""
    target = targets()[call.name]
    names = getattr(inspect.unwrap(target), "__globals__", {})  # of types such as `Body`
    annotations = [each.annotation for each in _signature_of(target).parameters.values()]
    takes_function = any("Callable" in str(names.get(each, each)) for each in annotations)
    return isinstance(error, ml.errors.OpError) and (
        takes_function or call.name.endswith(".summary")
    )


def _is_of_example(error: BaseException) -> bool:
    """Return whether a function of the example has raised it."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in ("<example>", "<string>"):
            return True
        step = step.tb_next
    return False


def faults(
    only: str = "", every: int = 1, first: int = 0, show: bool = False
) -> tuple[Counter[str], list[str]]:
    """Try the calls of the functions whose name has `only` in it; of these each `every`-th."""

    def ring(*_: object) -> None:
        raise _TooLong

    counts, found = Counter[str](), list[str]()
    before = signal.signal(signal.SIGALRM, ring)
    seen: set[str] = set()
    here = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore"),
        np.errstate(all="ignore"),
    ):
        os.chdir(folder)
        try:
            number = 0
            for call in right_calls():
                if only not in call.name:
                    continue
                for text, attempt in attempts(call):
                    key = f"{call.name} {text}"
                    if key in seen:
                        continue
                    seen.add(key)
                    number += 1
                    if (number + first) % every:
                        continue
                    counts[call.name] += 1
                    fault = fault_of(call, attempt)
                    if fault:
                        found.append(f"{text} {fault.splitlines()[0][:160]}")
                        if show:
                            print(found[-1], flush=True)
        finally:
            os.chdir(here)
            signal.signal(signal.SIGALRM, before)
    return counts, found


def main(argv: list[str] | None = None) -> int:
    """Print the faults, and return 1 if there are any."""
    parser = parser_of("arguments", __doc__)
    parser.add_argument("--only", default="", help="part of the functions' names")
    parser.add_argument("--memory", type=int, default=8, help="GiB of addresses for the process")
    options = parser.parse_args(argv)
    if options.only and not any(options.only in call.name for call in right_calls()):
        require_known(parser, [options.only], targets)
    limit_memory(options.memory << 30)
    counts, found = faults(options.only, show=True)
    print(f"{sum(counts.values())} calls of {len(counts)} functions, {len(found)} faults")
    if not options.only:
        print("without a right call:", *sorted(targets().keys() - counts.keys()))
    return int(bool(found))
