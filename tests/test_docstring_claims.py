"""Claims of docstrings of public names about shapes and errors, held against the functions.

A docstring about tensors says their shapes, and names the classes of `ml.errors` that its function
raises. Its block `Invalid calls` lists invalid calls. Valid calls with a different operand are
invalid, too. Each must raise an error that the docstring names, and each error that it names must
come from an invalid call. The docstring of `mlvm.eager` names errors of all functions, which this
file does not check.

    python -m pytest tests/test_docstring_claims.py -k conv2d  # the `Invalid calls` of conv2d
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from pathlib import Path
from threading import Event, Thread
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS
from mlvm.core.program.assembly import assemble
from mlvm.core.types import DType, TensorType
from mlvm.eager.tensor import primitives
from mlvm.machines.wire import WireVM
from mlvm.show import picture as _picture  # noqa: F401 (these add methods, once imported)
from mlvm.show import report as _report  # noqa: F401
from mlvm.show import vm_trace as _trace  # noqa: F401
from tests.brief import cases, refuses
from tests.cases import CASES
from tests.test_docstrings import public

BRACKETS_OR_WORD = re.compile(r"\w*\[[^\]`\"]*\]|\bshapes?\b")
TENSORS = re.compile(r"\b(Tensor|Operand|Tree)\b")
INVALID = re.compile(r"^ *Invalid calls:\n(?:^ +\S.*\n?)+", re.MULTILINE)
CALL = re.compile(r"(\S.*?)  # (\w+)$", re.MULTILINE | re.DOTALL)
PARSER = doctest.DocTestParser()
EXAMPLE = re.compile(r"^ *>>> .*\n?(?:^.*\S.*\n?)*", re.MULTILINE)
AS = re.compile(
    r"(?:what|the errors of) `([\w.]+)`(?:(?:, `([\w.]+)`)? and `([\w.]+)`)?(?: raises?)?"
)

BASES = {"nn.Module", "optim.Group"}
"""Classes of tensors of any shapes."""

ERRORS = {name: getattr(ml.errors, name) for name in dir(ml.errors)}

GROUPS = "Group MpiGroup ProcessGroup RayGroup TcpGroup"
UNSEEN = {
    ("connect", "CallTimeoutError"): "it takes a launch that goes on, see tests/machines/remote",
    ("connect", "OutOfMemoryError"): "a later allocation raises it, see tests/machines/remote",
    ("QueueTensor", "MachineError"): "it takes a VM that was closed, see tests/input",
    ("RemoteVM", "ConnectionLostError"): "it takes a server that ends, see tests/machines/remote",
    ("ScalarLog", "EncodingError"): "for a damaged file, see tests/show/test_scalars.py",
    ("VM", "MissingExtraError"): "where the native machine was built",
    ("parallel.MpiGroup", "GroupError"): "it takes an MPI library of another kind",
    ("parallel.MpiGroup", "GroupTimeoutError"): "it takes a second process",
    ("parallel.RayGroup", "GroupTimeoutError"): "it takes Ray",
    **{
        (f"parallel.{group}", "MissingExtraError"): "where it is installed"
        for group in GROUPS.split()
    },
    ("linalg.eigh", "LinAlgError"): "no matrix is known for which LAPACK does not converge",
}
"""Errors that docstrings name and no cheap call raises, with the reason."""

PREFIXES = "Eig Eigh LU LUFactor Lstsq QR SVD Slogdet"
RESULTS = [f"linalg.{each}Result" for each in PREFIXES.split()]
WARNINGS = [name for name in dir(ml) if name.endswith("Warning")]
ALONE = ["default_arena", "default_vm", "devices", "random.next_key", "random.state"]
NEVER = {
    "Dataset": "a protocol",
    "Transform": "a protocol",
    **dict.fromkeys(["CurvePoint", "PipelineState", "PipelineStats", "parallel.Parts"], "a result"),
    **dict.fromkeys(RESULTS, "a result"),
    **dict.fromkeys(WARNINGS, "a warning"),
    **dict.fromkeys(ALONE, "it takes nothing"),
    **{f"unique_{part}": "a tensor has values" for part in ("all", "counts", "inverse", "values")},
    "Recording": "a result; `record` makes it",
    "SampleRandom": "its draws raise, and say so",
    "nn.Identity": "it gives back what it is given",
    "nn.Module": "what is made of it raises, and its methods",
    "nn.Sequential": "its layers raise",
    "nn.Tanh": "every tensor has one",
    "optim.Group": "its optimizer makes it",
    "parallel.AnyGroup": "an interface, of which `run` raises, and says so",
    "parallel.barrier": "what the other members do is told by `Group.run`",
}
"""Functions and classes whose docstrings name no error, and why."""


def named() -> dict[str, Any]:
    """Build the tensors that `Invalid calls` blocks name, see the docstring of `mlvm.eager`."""
    bools, ints, v = ml.asarray([True, False]), ml.asarray([0, 1]), ml.asarray([1.0, 2.0])
    x, half = ml.eye(4) * 4.0, ml.full((4, 4), 0.5)
    images, sequences = ml.ones((1, 4, 4, 2)), ml.ones((1, 4, 2))
    volumes, quantized = ml.ones((1, 2, 2, 2, 2)), ml.quantize_groups(half)
    key = ml.random.key(0)
    return {"ml": ml, "np": np, **locals()}


def prepared() -> dict[str, Any]:
    """Build the other objects that wrong calls use."""
    local: Any = ml.default_vm()
    local.register("doubled", lambda frame: frame.push(frame.param(0) * 2))
    with ml.Arena(ml.VM("mine"), "ended"):
        stale = ml.ones(2)
    vm, leaked = ml.VM("other"), list[ml.Tensor]()
    tight = ml.Arena(vm, "tight", capacity=0)
    busy = ml.Arena(vm, "busy")
    begun, in_busy = busy.mark(), busy.alloc(ml.TensorType("f32", (2,)))
    inside = Event()
    stays = (busy.__enter__, inside.set, Event().wait)
    Thread(target=lambda: [each() for each in stays], daemon=True).start()
    inside.wait()

    @ml.subroutine
    def deeper(x: ml.Tensor) -> ml.Tensor:
        return ml.cond(x < 0.0, lambda: x, lambda: deeper(x + 1.0))

    def leaky(x: ml.Tensor) -> ml.Tensor:
        leaked.append(x * 2.0)
        return ml.sum(x)

    endless: list[Any] = []
    endless.append(endless)
    group = ml.parallel.Group(2)
    members = group.run

    def two() -> tuple[ml.Tensor, ml.Tensor]:
        return ml.ones(2), ml.ones(2)

    return {"nans": ml.full((2, 2), ml.nan), **locals()}


def callables() -> dict[str, Callable[..., Any]]:
    """Return the public functions and classes by their first names, except errors."""
    named = {
        name: value
        for name, value in public().items()
        if not (inspect.isclass(value) and issubclass(value, MlvmError))
    }
    own = {id(value): name for name, value in named.items() if name == value.__name__}
    return {name: value for name, value in named.items() if own.get(id(value), name) == name}


def prose(value: object) -> str:
    """Return the docstring without examples and refusals."""
    doc = inspect.getdoc(value) or ""
    return " ".join(EXAMPLE.sub("", INVALID.sub("", doc)).split())


def errors_in(text: str) -> set[str]:
    return {word for word in re.findall(r"`(\w+)`", text) if word in ERRORS}


def claimed(name: str) -> set[str]:
    """Return the errors that a docstring names, and those of the names that it refers to."""
    value, room = attrgetter(name)(ml), name.rpartition(".")[0]
    claims = errors_in(prose(value))
    for other in filter(None, chain.from_iterable(AS.findall(prose(value)))):
        if other in inspect.signature(value).parameters:
            continue
        try:
            claims |= claimed(f"{room}.{other}" if room else other)
        except AttributeError:
            claims |= claimed(other.removeprefix("ml."))
    return claims


def about_tensors(name: str, value: Callable[..., Any]) -> bool:
    if inspect.isclass(value):
        return name.startswith(("nn.", "optim.", "linalg.")) and name not in BASES
    signature = inspect.signature(value)
    hints = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    return any(TENSORS.search(str(hint)) for hint in hints)


def refusals(value: object) -> list[tuple[str, str]]:
    """Return the wrong calls in the `Invalid calls` block of a docstring, each with its error."""
    block = INVALID.search(inspect.getdoc(value) or "")
    text = block[0].partition("\n")[2] if block is not None else ""
    if rest := CALL.sub("", text).strip():
        raise ValueError(f"expected two spaces before '# Error' in Invalid calls, got {rest}")
    return [(call.strip(), error) for call, error in CALL.findall(text)]


def assert_refused(value: object, claims: set[str], names: dict[str, Any]) -> set[str]:
    """Run the `Invalid calls` block: each call raises its error, which the prose names."""
    for call, error in refusals(value):
        assert is_named(error, claims), f"the docstring with {call} does not name {error}"
        got = raised(lambda: eval(call, names))  # noqa: B023 - called at once
        assert issubclass(got or object, ERRORS[error]), (call, got)
    return {error for _, error in refusals(value)}


def variants(x: ml.Tensor) -> Iterator[ml.Tensor]:
    """Tensors of other dtypes, and of other shapes."""
    yield from (ml.ones(x.shape, dtype=dtype) for dtype in ("bool", "i64", "f32", "c64"))
    for shape in ((), (0,), (5, 3), (2, 3, 5), (1, 2, 2, 2, 2)):
        if x.dtype.is_storage:
            shape = (*shape, 4)  # which fill bytes
            yield ml.astype(ml.ones(shape), x.dtype)
        else:
            yield ml.ones(shape, dtype=x.dtype)


def wrong(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments with another tensor in place of one of them, also of a list of them; all of
    them bools; and two of dtypes that do not promote."""
    for i, arg in enumerate(args):
        if isinstance(arg, ml.Tensor):
            yield from ((*args[:i], other, *args[i + 1 :]) for other in variants(arg))
        elif isinstance(arg, list) and arg and isinstance(arg[0], ml.Tensor):
            first, *rest = arg
            yield from ((*args[:i], [other, *rest], *args[i + 1 :]) for other in variants(first))
    if len(args) > 1 and all(isinstance(arg, ml.Tensor) for arg in args):
        yield tuple(ml.ones(arg.shape, dtype="bool") for arg in args)
        dtypes = ["u64", *["i64"] * (len(args) - 1)]
        yield tuple(ml.ones(x.shape, dtype=d) for x, d in zip(args, dtypes, strict=True))


def raised(call: Callable[[], Any]) -> type[BaseException] | None:
    try:
        call()
    except MlvmError as error:
        return type(error)
    return None


RightCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def call_in_example(name: str, value: Any) -> RightCall | None:
    """Return the first call of the function, or of a layer of the class, in the examples."""
    names: dict[str, Any] = {"ml": ml, "_call": lambda f, *args, **options: (f, args, options)}
    for example in PARSER.get_examples(inspect.getdoc(value) or ""):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"ml.{name}":
                call = _evaluated(node, names)
                if call is not None and not inspect.isclass(value):
                    return call
            elif isinstance(node, ast.Call) and inspect.isclass(value):
                function = ast.unparse(node.func)
                if function in names or re.match(rf"ml\.{name}\(", function):
                    call = _evaluated(node, names)
                    if call is not None and isinstance(call[0], value):
                        return call
        exec(example.source, names)
    return None


def _evaluated(node: ast.Call, names: dict[str, Any]) -> RightCall | None:
    whole = ast.Call(ast.Name("_call"), [node.func, *node.args], node.keywords)
    try:
        call: RightCall = eval(ast.unparse(whole), names)
    except NameError:
        return None  # a parameter of a lambda
    return call


def right_calls() -> dict[str, RightCall]:
    """Return a right call of each public function and layer of tensors: of the first case of an
    op, of an example, or of matrices."""
    calls: dict[str, RightCall] = {}
    x = named()["x"]
    for name, value in callables().items():
        if inspect.isclass(value) and not name.startswith("nn."):
            continue
        if not inspect.isclass(value):
            case = next(iter(CASES.get(name.rpartition(".")[2], ())), None)
            if case is not None:
                args = tuple(map(ml.asarray, case.inputs))
                if takes(value, *args, **case.attributes):
                    calls[name] = value, args, case.attributes
                    continue
        call = call_in_example(name, value) if about_tensors(name, value) else None
        if call is not None and takes(call[0], *call[1], **call[2]):
            calls[name] = call
        elif not inspect.isclass(value):
            parameters = inspect.signature(value).parameters.values()
            needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
            if needed and all(map(is_tensor, needed)):
                args = (x,) * sum(1 + (each.kind == each.VAR_POSITIONAL) for each in needed)
                if takes(value, *args):
                    calls[name] = value, args, {}
    return calls


def takes(function: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    try:
        return raised(lambda: function(*args, **keywords)) is None
    except TypeError:
        return False


def is_tensor(parameter: inspect.Parameter) -> bool:
    return "Tensor" in str(parameter.annotation) or "Operand" in str(parameter.annotation)


@pytest.fixture(scope="module")
def raised_by_name() -> dict[str, dict[str, str]]:
    """Return the errors that wrong operands raise, by function, each with such a call."""
    by_name: dict[str, dict[str, str]] = {name: {} for name in callables()}
    for name, (function, args, keywords) in right_calls().items():
        tried = [(other, keywords) for other in wrong(args)]
        signature = inspect.signature(function)
        for axis in {"axis", "axes"} & set(signature.parameters):
            bound = signature.bind(*args, **keywords)
            bound.arguments[axis] = 99
            tried.append((bound.args, bound.kwargs))
        for others, options in tried:
            with warnings.catch_warnings(action="ignore", category=ml.PrecisionWarning):
                error = raised(lambda: function(*others, **options))  # noqa: B023 - called at once
            if error is not None:
                shown = [getattr(each, "type", each) for each in others]
                by_name[name].setdefault(error.__name__, f"{name}({shown}, {options})")
    return by_name


def is_named(error: str, claims: set[str]) -> bool:
    return any(issubclass(ERRORS[error], ERRORS[claim]) for claim in claims)


def test_docstrings_about_tensors_say_shapes() -> None:
    texts = {
        name: prose(value) for name, value in callables().items() if about_tensors(name, value)
    }
    assert len(texts) > 250
    assert [name for name, text in texts.items() if not BRACKETS_OR_WORD.search(text)] == []


def test_docstrings_name_the_errors_that_wrong_operands_raise(
    raised_by_name: dict[str, dict[str, str]],
) -> None:
    unnamed = {
        call: error
        for name, errors in raised_by_name.items()
        for error, call in errors.items()
        if not is_named(error, claimed(name)) and name != "nn.Sequential"  # its layers raise
    }
    assert unnamed == {}


@pytest.fixture(scope="module")
def block_names(folder_of_file: Path) -> Iterator[dict[str, Any]]:
    """The names that calls in `Invalid calls` blocks use, and in the working folder their files."""
    (folder_of_file / "damaged").write_bytes(b"none")
    ml.save("layer", ml.nn.Linear(2, 3))
    names = {**named(), **prepared()}
    with names["group"]:
        yield names


@cases("function", *[name for name, value in callables().items() if refusals(value)])
def test_a_refuses_block_raises_what_it_says(function: str, block_names: dict[str, Any]) -> None:
    assert_refused(attrgetter(function)(ml), claimed(function), block_names)


def test_every_error_that_a_docstring_names_is_raised(
    raised_by_name: dict[str, dict[str, str]],
) -> None:
    errors = {
        name: {*raised_by_name[name], *(error for _, error in refusals(value))}
        for name, value in callables().items()
    }
    for name, (function, args, keywords) in right_calls().items():
        if re.search(r"is (not a|no) tensor(,| or) array", prose(function)):
            refuses(ml.errors.DTypeError, "", function, object(), *args[1:], **keywords)
            errors[name].add("DTypeError")
    unseen = {
        (name, claim)
        for name, value in callables().items()
        for claim in errors_in(prose(value))
        if not any(issubclass(ERRORS[error], ERRORS[claim]) for error in errors[name])
    }
    assert unseen == set(UNSEEN)


def test_functions_that_name_no_error_are_listed() -> None:
    assert {name for name in callables() if not claimed(name)} == set(NEVER)


# --- ops -------------------------------------------------------------------------------

KINDS = {
    "any dtype": "bool unsigned signed float complex",
    "any dtype but complex": "bool unsigned signed float",
    "any dtype but bool": "unsigned signed float complex",
    "integers or floats": "unsigned signed float",
    "integers or bools": "bool unsigned signed",
    "integers": "unsigned signed",
    "floats": "float",
    "bools": "bool",
}


SAID = re.compile(r"\[\.\.\.\], (?:dtypes that promote to )?([a-z ]+) -> ((?:\[\.\.\.\]|[^.])*)\.")
"""Which dtypes an op takes, and what the result is."""


@pytest.mark.parametrize("dtype", DType.all.values(), ids=str)
def test_ops_take_and_give_the_dtypes_that_docstrings_say(dtype: DType) -> None:
    tried = 0
    for name in primitives.__all__:
        match = SAID.search(prose(getattr(primitives, name)))
        if match is None:
            continue
        op, (kinds, result) = OPS[name], match.groups()
        types = [TensorType(dtype, (2,))] * len(op.inputs)
        if dtype.kind not in KINDS[kinds].split():
            refuses(ml.errors.DTypeError, "", op.infer, types, op.bind({}))
            continue
        out = op.infer(types, op.bind({}))
        assert out is not None
        tried += 1
        if "integers and bools give f32" in result and not dtype.is_inexact:
            assert out.dtype is ml.float32, name
        elif "that of their parts" in result and dtype.kind == "complex":
            assert out.dtype is ml.finfo(dtype).dtype, name
        elif re.search(", in (x's|that) dtype", result):
            assert out.dtype is dtype, name
        elif not name.startswith(("sum", "prod")):  # which tell it in other words
            assert result.endswith(f", {out.dtype.name}"), name
    assert tried > 8


# --- methods ---------------------------------------------------------------------------


UNSEEN_OF_METHODS = {
    ("QueueTensor.emit", "QueueClosedError"): "the program raises it, see tests/input",
    ("Pipeline.from_ray", "MissingExtraError"): "it takes Ray's datasets",
    ("Arena.plot", "ArgumentError"): "for a name of another format, see tests/arena",
    ("ScalarLog.add", "EncodingError"): "for a damaged file, see tests/show/test_scalars.py",
    ("VM.limit_memory", "ArgumentError"): "for a shared VM, see tests/machines/remote",
    (
        "VM.result_types",
        "MachineError",
    ): "a rule of the user fails, see tests/eager/autodiff/test_host_call.py",
}
"""As `UNSEEN`. What has the docstring of a function of `ml` is tried there."""


def built() -> dict[str, Any]:
    """Build the objects whose methods the `Invalid calls` blocks call."""
    vm, dry, array = ml.VM("built"), ml.DryVM(), np.ones(2, np.float32)
    vm_arena, closed = ml.Arena(vm, "a"), ml.Arena(vm, "closed")
    closed_mark, freed = closed.mark(), vm_arena.alloc(ml.TensorType("f32"))
    vm_arena.free(freed)
    closed.close()
    with ml.Arena(ml.default_vm(), "here"):
        stale_here = ml.ones(2)
    queue, full, shut = (ml.QueueTensor(vm, ["f32[2]"], 1) for _ in range(3))
    last = ml.QueueTensor(ml.default_vm(), ["f32[2]"], 1)
    full.put([array])
    shut.close()
    last.close()
    far = ml.QueueTensor(WireVM(ml.VM("far")), ["f32[2]"], 1)
    drained = ml.capture(lambda: ml.sum(last.get()[0]))
    bounded = ml.capture(ml.sum, dynamic_axes={"x": ("n",)}, max_sizes={"n": 9})
    bounded(ml.ones(2))
    numbers = (np.arange(100),)
    batches, greedy = ml.Pipeline(numbers, 50, vm=vm), ml.Pipeline(numbers, 1, vm=vm)
    batches.close()
    gate, calls = Event(), list[Any]()

    def waiting(arrays: Any, random: Any) -> Any:
        calls.append(arrays)
        if len(calls) > 1:  # the first is calls for its types
            gate.wait()
        return arrays

    slow = ml.Pipeline(numbers, 1, vm=vm, workers=1, transform=waiting)
    draws = ml.SampleRandom(0, 0, np.asarray([1]))
    pad, memory = ml.ScratchPad(vm, 64), np.zeros(128, np.uint8)
    bytes_of_vm = memory[-memory.ctypes.data % 64 :][:64]  # aligned
    vm.storage_over(bytes_of_vm)
    returning = assemble(".func main 0 *\n    load_arg 0\n    halt")
    endless_program = assemble(".func main 0 *\nagain:\n    jump again")
    model, bias = ml.nn.Linear(2, 3), np.ones(3, np.float32)
    sgd, changed = (ml.optim.SGD({"w": ml.ones(2)}, 0.1) for _ in range(2))
    changed.momentum = 0.9
    swapped = ml.optim.EMA({"w": ml.ones(2)})
    cell, closed_vm = ml.nn.GRUCell(4, 2), ml.VM("closed")
    closed_vm.close()
    tight_here = ml.Arena(ml.default_vm(), "tight", capacity=0)

    def within(context: Any, do: Callable[[], Any]) -> None:
        with context:
            do()

    return dict(locals())


def methods() -> dict[str, Any]:
    """Return the public methods and properties of the public classes, each under one class."""
    by_owner: dict[tuple[type, str], tuple[str, Any]] = {}
    classes = {name: value for name, value in callables().items() if inspect.isclass(value)}
    for name in sorted(classes, key=lambda name: (len(classes[name].__mro__), name != "VM")):
        value = classes[name]
        for method in dir(value):
            owner = next((each for each in value.__mro__ if method in vars(each)), object)
            kind = vars(owner).get(method)
            ours = owner.__module__.startswith("mlvm.") and not method.startswith("_")
            if ours and isinstance(kind, (FunctionType, property, classmethod, staticmethod)):
                by_owner.setdefault((owner, method), (f"{name}.{method}", getattr(value, method)))
    return dict(sorted(by_owner.values()))


def test_methods_have_docstrings() -> None:
    assert len(methods()) > 150
    assert [name for name, value in methods().items() if not inspect.getdoc(value)] == []


def test_methods_raise_what_they_say() -> None:
    names = {**named(), **prepared(), **built()}
    unseen = set()
    with names["group"], ExitStack() as stack:
        stack.callback(names["gate"].set)
        for name, value in methods().items():
            claims = errors_in(prose(value))
            doc = inspect.getdoc(getattr(ml, name.rpartition(".")[2], None))
            if name.startswith("RemoteVM.") or inspect.getdoc(value) == doc:
                continue  # docstrings of VM and of functions
            tried = assert_refused(value, claims, names)
            unseen |= {
                (name, claim)
                for claim in claims
                if not any(issubclass(ERRORS[error], ERRORS[claim]) for error in tried)
            }
    assert unseen == set(UNSEEN_OF_METHODS)


def test_the_docstring_of_tensors_names_all_that_they_have() -> None:
    text = prose(ml.Tensor)
    has = [name for name in dir(ml.ones(1)) if not name.startswith("_")]
    assert [name for name in has if not re.search(rf"\b{name}\b", text)] == []
