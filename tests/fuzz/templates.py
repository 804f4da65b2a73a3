"""Random chains of public calls, with the cache of composed calls and without it.

    python -m tests.fuzz templates --programs 20000 --seed 0

A chain is a few lines of Python: rows of `tests/cases/functions.txt`, public functions with drawn
arguments, operators, indexing, layers and optimizers. Lines are repeated with the same and with
different numbers, types and shapes. They run plainly, under tapes, tangents, `vmap`, `autocast`,
captures and listings, in arenas that are reset, and on a second VM. A fifth of the chains runs on
three threads. Some calls are interrupted first by Ctrl-C, at a random place.

Two processes run each chain, one of them with `MLVM_TEMPLATES=0`. Each line must have the same
result to the bit, the same error with the same text, and the same warnings. At the end of a chain
its tensors must hold the same bits. The first chain that differs is cut down and printed with the
numbers that make it again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib import import_module
from inspect import Parameter, isfunction, signature
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, NamedTuple, Self

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError, notes_of
from mlvm.eager.tensor.reading import values_of
from mlvm.machines.native.extension import EXTENSION
from tests.brief import ROOT
from tests.cases import tables
from tests.cases.tables import FUNCTIONS
from tests.fuzz.command import Outcomes, Wrong
from tests.interrupting import interrupted
from tests.threads import in_threads, taking_turns

PROGRAMS: Final = 20_000
"""Number of chains of a whole run."""

SECONDS: Final = 120
"""Longest time for one chain; more counts as a hang."""

CUTTING_SECONDS: Final = 120
"""Longest time for cutting one chain down."""

DISABLED: Final = {"MLVM_TEMPLATES": "0"}
"""The variables of environment without the cache."""

THREADS: Final = 3

_AHEAD: Final = 4
"""Number of chains that a process has yet to run, so that neither waits for the other."""

ARRAYS: Final[dict[str, Any]] = {
    name: np.random.default_rng(i).standard_normal(shape).astype(dtype)
    for i, (name, dtype, shape) in enumerate(
        [
            ("a", "f4", (4, 6)), ("b", "f4", (4, 6)), ("c", "f4", (6,)), ("d", "f8", (4, 6)),
            ("e", "f4", (2, 3, 4)), ("g", "f4", (3, 3)), ("s", "f4", ()), ("z", "c8", (4, 6)),
            ("u", "f4", (4, 5)), ("n", "f4", (0, 6)), ("w", "f4", (50, 6)),
        ]
    )
} | {
    "i": np.array([2, 0, 1, 2]), "k": np.array([[1, 3], [0, 2]], "i4"),
    "m": np.arange(24).reshape(4, 6) % 3 > 0,
}  # fmt: skip
"""The tensors that a chain begins with."""

HALVES: Final = {"h": "a", "hc": "c"}
"""Tensors in bf16, and whose values they have."""

TENSORS: Final = [*("a", "b", "c", "d", "e", "g", "s", "u", "n", "h", "hc", "w") * 3, *"zikmo"]
"""Names to draw from; `o` is a tensor of the second VM."""


# --- chains ---------------------------------------------------------------------------------


class Step(NamedTuple):
    """A line of a chain: an expression whose result is compared, or a statement."""

    code: str
    is_statement: bool = False


class Chain(NamedTuple):
    """Lines, which run on that number of threads."""

    steps: list[Step]
    threads: int


SCALARS: Final = [
    *("0", "1", "2", "3", "-1", "-2", "5", "1.0", "0.0", "-0.0", "0.5", "2.5", "-1.5", "True"),
    *("False", "None", "np.int64(1)", "np.int64(2)", "np.float32(1)", "np.float32(0.5)", "'1'"),
    *("np.float64(2)", "np.bool_(True)", "1j", "float('nan')", "float('inf')", "2**63", "1e300"),
]
"""Numbers that are often equal as keys of a dictionary, and mean something else."""

PIECES: Final[list[str]] = [
    *("{t}[{n}]", "{t}[{n}:{n}]", "{t}[{n}:]", "{t}[:{n}]", "{t}[::{n}]", "{t}[..., {n}]"),
    *("{t}[{n}, {n}]", "{t}[:, {n}:{n}]", "{t}[..., None]", "{t}[None, {n}]", "{t}[i]"),
    *("{t}[m]", "{t}[i, i]", "{t}[:, i]", "{t}[[{n}, {n}]]", "{t}[{x}]", "[row for row in {t}]"),
    *("{t} + {t}", "{t} * {x}", "{x} - {t}", "{t} / {t}", "{t} ** {x}", "{t} // {x}", "{t} @ {t}"),
    *("-{t}", "abs({t})", "{t} > {x}", "{t} == {t}", "~{t}", "{t} % {x}", "{t} & {t}"),
    *("{t}.T", "{t}.mT", "{t}.sum()", "{t}.mean({n})", "{t}.reshape(-1)", "{t}.reshape({n}, -1)"),
    *("{t}.astype({d})", "{t}.max(axis={n})", "{t}.std()", "{t}.tolist()", "{t}.numpy()"),
    *("float({t}[{n}, {n}])", "bool({t}[{n}])", "int({t}[{n}])", "len({t})", "{t}.item()"),
    *("ml.zeros(({n}, {n}))", "ml.zeros({n}, dtype={d})", "ml.full({n}, {x})", "ml.arange({n})"),
    *("ml.arange({n}, {n}, {n})", "ml.arange({x})", "ml.linspace({x}, {x}, {n})"),
    "ml.eye({n}, k={n})",
    *("ml.ones_like({t})", "ml.asarray({x})", "ml.asarray([{x}, {x}])", "ml.asarray({t}.numpy())"),
    *("ml.concat([{t}, {t}], axis={n})", "ml.concat([{t}[:{n}], {t}[:1]])", "ml.stack([{t}, {t}])"),
    *("ml.split({t}, {n}, axis={n})", "ml.roll({t}, {n}, axis={n})", "ml.tile({t}, ({n}, {n}))"),
    *("ml.pad({t}, {n})", "ml.pad({t}, (({n}, {n}), (0, {n})))", "ml.clip({t}, {x}, {x})"),
    *("ml.reshape({t}, ({n}, {n}))", "ml.broadcast_to({t}, ({n}, 4, 6))", "ml.sum({t}[:{n}])"),
    *("ml.where({t} > {x}, {t}, {x})", "ml.expand_dims({t}, axis={n})", "ml.repeat({t}, {n})"),
    *("ml.einsum('ij,kj->ik', {t}, {t})", "ml.einsum('ij->ji', {t})", "ml.one_hot(i, {n})"),
    *("ml.random.normal(({n}, {n}))", "ml.random.uniform({n}, high={x})", "ml.dropout({t}, {x})"),
    *("ml.random.normal({n}, key=key)", "ml.dropout({t}, 0.5, key=key)", "ml.random.next_key()"),
    *("ml.softmax({t}, axis={n})", "ml.softmax_cross_entropy({t}, i, reduction='mean')"),
    *("ml.gelu(linear({t}))", "linear({t})", "layer_norm({t})", "batch_norm({t})", "dropout({t})"),
    *("embedding(k)", "mlp({t})", "cell({t}, (state, state))", "attention(e)"),
    *("(sgd.update(slopes_of(mlp, {t})), mlp)", "(adamw.update(slopes_of(mlp, {t})), mlp)"),
    *("ml.add({t}, {t}, out=a)", "ml.exp({t}, out=b)"),
    "ml.optim.clip_by_global_norm([{t}, {t}], {x})",
    *("ml.random.normal((2, 3))", "ml.random.uniform((4, 6))", "ml.dropout(a, 0.5)") * 2,
]  # fmt: skip
"""Expressions of tensors {t}, integers {n}, numbers {x} and dtypes {d}."""

STATEMENTS: Final[list[str]] = [
    *("{t}[{n}] = {x}", "{t}[{n}:{n}] = {x}", "{t}[:, {n}] = {x}", "{t}[i] = {x}", "{t}[m] = {x}"),
    *("{t}[{n}] = c", "{t}[{x}] = {x}", "{t} += {t}", "{t} *= {x}", "{t} -= {t}[{n}]"),
    "{t}[:] = {t}",
    *("{t} @= {t}", "{t}[{n}] += {x}", "arena.reset()", "ml.random.seed({n})"),
]  # fmt: skip

WRAPPERS: Final[list[str]] = [
    *("graded({f}, {v})",) * 4, *("swept({f}, {v})",) * 3, "pushed({f}, {v})", "mapped({f}, {v})",
    "captured({f}, {v})",
    *("listed({f}, {v})", "within(ml.autocast('bfloat16'), {e})"),
    "within(ml.autocast('float16'), {e})",
    *("within(arena, {e})",) * 2, *("within(arena.allocating(), {e}, kept=True)",) * 2,
    *("within(ml.use(other), {e})", "within(ml.use(other), {e}, kept=True)"),
    "within(ml.autocast('bfloat16'), lambda: graded({f}, {v}))",
]  # fmt: skip
"""Places that a call {e}, `lambda: ...`, runs in; {f} is a function of its tensors {v}."""

INTERRUPTED: Final = ["interrupted_first({e}, {n})", "signalled_first({e}, {n})"]

DTYPES: Final = [
    *("ml.float64", "ml.int32", "'f32'", "float", "bool", "ml.bfloat16", "None", "'c64'", "int")
]

ARGUMENTS: Final[dict[str, Sequence[str]]] = {
    "Reduction": ["'mean'", "'sum'", "'none'", "'all'"],
    "object": DTYPES, "bool": ["True", "False"], "int": ["{n}"], "float": ["{x}"],
    "Ints": ["{n}", "({n}, {n})"], "Axis": ["{n}", "({n}, {n})", "None"],
    "Window": ["{n}", "({n}, {n})"], "Volume": ["{n}"],
    "Sides": ["'SAME'", "'VALID'", "({n}, {n})"],
    "Tree": ["[{t}, {t}]", "{t}"], "Iterable[Tensor]": ["[{t}, {t}]"], "Sequence[Tree]": ["[{t}]"],
    "complex": ["{x}"], "tuple[int, ...]": ["({n}, {n})"], "Sequence[int]": ["[{n}, {n}]"],
    "Operand": ["{t}", "{t}", "{x}", "[{x}, {x}]"], "Scalar": ["{x}"],
    "Tensor": ["{t}", "{t}", "{t}", "{t}", "{x}", "{t}.numpy()"],
    "int | Sequence[Any]": ["{n}", "(({n}, {n}), (0, {n}))"], "str | Pair": ["'full'"],
}  # fmt: skip
"""Expressions for a parameter, by a word of its annotation."""

NOT_CALLED: Final = {"save", "call", "check", "call_host", "set_state", "from_dlpack"}
"""Functions with tensors that read files or call Python."""

_OPERANDS: Final = re.compile(r"operand\('(\w+)', '(\w+)'\)")
_NUMBER: Final = re.compile(r"(?<![\w.\"'])\d+(?![\w.\"'])")
_NAME: Final = re.compile(rf"\b(?:{'|'.join(TENSORS)}|r\d)\b")


@cache
def public_functions() -> list[tuple[str, list[tuple[Parameter, Sequence[str]]]]]:
    """Return the public functions whose required parameters can be drawn, with expressions for
    each parameter."""
    found = []
    modules: dict[str, Any] = {"ml": ml, "ml.linalg": ml.linalg, "ml.fft": ml.fft}
    for place, module in (modules | {"ml.random": ml.random, "ml.optim": ml.optim}).items():
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not isfunction(function) or name in NOT_CALLED:
                continue
            drawn = [(p, expressions_for(p)) for p in signature(function).parameters.values()]
            if all(each or p.default is not p.empty for p, each in drawn) and drawn:
                found.append((f"{place}.{name}", [(p, each) for p, each in drawn if each]))
    return found


def expressions_for(parameter: Parameter) -> Sequence[str]:
    """Return expressions for an argument; none if the annotation is unknown."""
    if parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
        return []
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = text.replace("mlvm.eager.tensor.tensor.", "")
    if "Callable" in text or "Body" in text:
        return []
    for name, each in ARGUMENTS.items():
        if text == name:
            return each
    words = re.split(r" \| ", text)
    return next((ARGUMENTS[word] for word in words if word in ARGUMENTS), [])


class Drawing:
    """Draws the lines of one chain."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.results = 0
        self.is_threaded = rng.random() < 0.2

    def chain(self) -> Chain:
        steps: list[Step] = []
        while len(steps) < 14:
            steps += self.few_alike()
        return Chain(steps, THREADS if self.is_threaded else 1)

    def few_alike(self) -> Iterator[Step]:
        """Draw a call, and a few like it: the same one, with other numbers, or with other
        tensors."""
        rng = self.rng
        roll = rng.random()
        make = self.row if roll < 0.25 else self.public if roll < 0.45 else self.piece
        is_statement = roll > 0.85
        template = rng.choice(STATEMENTS) if is_statement else make()
        wrapper = None if is_statement or rng.random() < 0.55 else rng.choice(WRAPPERS)
        if wrapper is None and not is_statement and not self.is_threaded and rng.random() < 0.15:
            wrapper = rng.choice(INTERRUPTED)
        code = self.filled(template)
        for _ in range(rng.choice([1, 2, 2, 3])):
            again = rng.random()
            if again < 0.4:
                code = self.filled(template)
            elif again < 0.5:
                code = self.renumbered(code)
            if self.is_threaded and re.search(r"random\.(?!key)|dropout|seed|out=", code):
                continue  # threads share the global keys
            if self.is_threaded and wrapper is not None and "listed" in wrapper:
                continue  # a listing has the launches of all threads
            yield self.wrapped(code, wrapper, is_statement)

    def wrapped(self, code: str, wrapper: str | None, is_statement: bool) -> Step:
        """Return a step that runs the code in the place of the wrapper."""
        names = ", ".join(dict.fromkeys(_NAME.findall(code)))
        if wrapper is not None and (names or "{v}" not in wrapper):
            number = self.rng.choice([2, 5, 10, 20, 50, 150])
            if "swept" in wrapper:
                names, code = f"{names}, q", self.swept(code)
            function = f"lambda {names}: {code}" if names else f"lambda: {code}"
            names = names.removesuffix(", q")
            code = wrapper.format(f=function, v=names, e=f"lambda: {code}", n=number)
        elif not is_statement and self.rng.random() < 0.4:
            self.results = (self.results + 1) % 4
            return Step(f"r{self.results} = {code}", is_statement=True)
        return Step(code, is_statement)

    def row(self) -> str:
        """Return the call of a row of functions.txt, on operands in some dtype; at times with other
        shapes."""
        row = self.rng.choice(FUNCTIONS)
        dtype = self.rng.choice(["f32", "f32", "f64", "bf16"])
        longer, constants = self.rng.random() < 0.15, tables._CONSTANTS
        names = [
            re.sub("[2-8]", lambda d: str(int(d[0]) + 1), n) if longer and n not in constants else n
            for n in row.operands
        ]
        operands = [f"operand({n!r}, {dtype!r})" for n in names]
        braced = row.call.replace("{", "{{").replace("}", "}}")
        return f"(lambda {', '.join(row.operands)}: ({braced}))({', '.join(operands)})"

    def public(self) -> str:
        """Return a call of a public function."""
        rng = self.rng
        name, parameters = rng.choice(public_functions())
        arguments: list[str] = []
        for parameter, expressions in parameters:
            if parameter.default is not parameter.empty and rng.random() < 0.7:
                continue
            is_keyword = parameter.kind == parameter.KEYWORD_ONLY or (
                parameter.default is not parameter.empty
                and parameter.kind != parameter.POSITIONAL_ONLY
            )
            prefix = f"{parameter.name}=" * is_keyword
            if parameter.kind == parameter.POSITIONAL_ONLY and len(arguments) > 3:
                continue
            value = "key" if parameter.name == "key" else rng.choice(expressions)
            arguments.append(prefix + value)
        return f"{name}({', '.join(arguments)})"

    def piece(self) -> str:
        return self.rng.choice(PIECES)

    def filled(self, template: str) -> str:
        """Replace each of {t}, {n}, {x} and {d} by something of its kind."""
        rng = self.rng
        fills: dict[str, Callable[[], str]] = {
            "{t}": self.tensor, "{n}": self.integer, "{x}": lambda: rng.choice(SCALARS),
            "{d}": lambda: rng.choice(DTYPES),
        }  # fmt: skip
        code = re.sub(r"(?<!\{)\{[tnxd]\}(?!\})", lambda match: fills[match[0]](), template)
        return code.replace("{{", "{").replace("}}", "}")

    def tensor(self) -> str:
        if self.results and self.rng.random() < 0.2:
            return f"r{self.results}"
        return self.rng.choice(["a", "a", *TENSORS])

    def integer(self) -> str:
        rng = self.rng
        if rng.random() < 0.8:
            return str(rng.choice([0, 1, 2, 3, 4, -1, -2, rng.randrange(7, 40)]))
        return rng.choice(["True", "None", "np.int64(1)", "2**63", "-2**63", "1.0", "(1,)"])

    def swept(self, code: str) -> str:
        """Add `q` to one number of the code, wherever it occurs."""
        places = [match for match in _NUMBER.finditer(code) if len(match[0]) < 3]
        if not places:
            return code
        number = self.rng.choice(places)[0]
        return _NUMBER.sub(lambda m: f"({number} + q)" if m[0] == number else m[0], code)

    def renumbered(self, code: str) -> str:
        """Change one number of the code by one."""
        places = [match for match in _NUMBER.finditer(code) if len(match[0]) < 3]
        if not places or "**" in code or "<<" in code:
            return code
        match = self.rng.choice(places)
        number = max(0, int(match[0]) + self.rng.choice([-1, 1]))
        return f"{code[: match.start()]}{number}{code[match.end() :]}"


def chain_of(seed: int, number: int) -> Chain:
    """Return the chain of that number, always the same one for the same seed."""
    return Drawing(random.Random(f"{seed}:{number}")).chain()


# --- running them ---------------------------------------------------------------------------


def shown(x: Any) -> str:
    """Return a text that is equal for results of equal bits, dtypes, devices and structures."""
    if isinstance(x, ml.Tensor):
        place = "" if x.device is ml.default_vm() else f" on {x.device.name}"
        return f"{x.type}{place} {_hash(values_of(x).tobytes())}"
    if isinstance(x, ml.nn.Module):
        return f"{type(x).__name__}{shown(ml.tree.leaves(x))}"
    if isinstance(x, np.ndarray | np.generic):
        return f"{type(x).__name__} {x.dtype} {x.shape} {_hash(x.tobytes())}"
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({', '.join(map(shown, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{k!r}: {shown(v)}' for k, v in x.items())}}}"
    return f"{type(x).__name__} {re.sub('0x[0-9a-f]+', '0x', repr(x))}"


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()[:12]


def raised(error: BaseException) -> str:
    """Return the class, text and notes of an error."""
    text = re.sub("0x[0-9a-f]+", "0x", " / ".join([str(error), *notes_of(error)]))
    text = re.sub(r"the VM holds [\d,]+", "the VM holds n", text)  # which depends on garbage
    return f"{type(error).__name__}: {text[:300]} {_hash(text.encode())}"


@cache
def operand(name: str, dtype: str) -> ml.Tensor:
    """Return an operand of `functions.txt`, its floats in that dtype. No chain changes it."""
    drawn = re.fullmatch(r"([a-z])_([\d_]*)", name)
    array = tables._operand(*drawn.groups()) if drawn else tables._CONSTANTS[name]
    if array.dtype.kind not in "fc":
        return ml.asarray(array)
    narrow = {"f": dtype, "c": "c128" if dtype == "f64" else "c64"}
    return ml.asarray(array).astype(narrow[array.dtype.kind])


@cache
def other_vm() -> ml.VM:
    return ml.VM("other")


def inexact(*xs: Any) -> list[int]:
    return [i for i, x in enumerate(xs) if x.dtype.is_inexact]


def graded(function: Callable[..., Any], *xs: ml.Tensor) -> Any:
    """Return the values of the function, and the gradient of a weighted sum of them."""
    values: list[ml.Tensor] = []

    def loss(chosen: list[ml.Tensor]) -> ml.Tensor:
        arguments = [*xs]
        for i, x in zip(places, chosen, strict=True):
            arguments[i] = x
        result = function(*arguments)
        leaves = [x for x in ml.tree.leaves(result) if isinstance(x, ml.Tensor)]
        values[:] = [ml.stop_gradient(x) for x in leaves]
        parts = [ml.sum(ml.cos(ml.real(x))) for x in leaves if x.dtype.is_inexact]
        return sum(parts, ml.asarray(0.0)).astype("f32")

    places = inexact(*xs)
    _, gradients = ml.value_and_grad(loss)([xs[i] for i in places])
    return values, gradients


def swept(function: Callable[..., Any], *xs: ml.Tensor) -> Any:
    """Return the values and gradients of all calls for the last argument 0 to 9."""
    return graded(lambda *xs: [function(*xs, q) for q in range(10)], *xs)


def pushed(function: Callable[..., Any], *xs: ml.Tensor) -> Any:
    """Return values and tangents."""
    return ml.jvp(function, xs, [ml.ones_like(x) for x in xs])


def mapped(function: Callable[..., Any], *xs: ml.Tensor) -> Any:
    return ml.vmap(function)(*xs)


def captured(function: Callable[..., Any], *xs: ml.Tensor) -> Any:
    """Return the results of two calls of the captured function."""
    step = ml.capture(function)
    return step(*xs), step(*xs)


def listed(function: Callable[..., Any], *xs: ml.Tensor) -> list[str]:
    """Return the names and attributes of the launches of the function. Handles are left out."""
    text = ml.disassemble(ml.program_of(function, *xs))
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(push_str|cfunc)", line)]


def within(
    block: AbstractContextManager[Any], function: Callable[[], Any], kept: bool = False
) -> Any:
    """Call the function in the block. A result that ends with the block is shown in it."""
    with block:
        return function() if kept else shown(function())


def slopes_of(mlp: Any, x: ml.Tensor) -> Any:
    return ml.grad(lambda mlp: ml.mean(mlp(x) ** 2))(mlp)


LAYERS: Final[dict[str, Callable[[World, Any], Any]]] = {
    "linear": lambda world, key: ml.nn.Linear(6, 6, key=key),
    "layer_norm": lambda world, key: ml.nn.LayerNorm(6),
    "batch_norm": lambda world, key: ml.nn.BatchNorm(6),
    "dropout": lambda world, key: ml.nn.Dropout(0.5),
    "embedding": lambda world, key: ml.nn.Embedding(4, 3, key=key),
    "state": lambda world, key: ml.zeros((4, 5)),
    "cell": lambda world, key: ml.nn.LSTMCell(6, 5, key=key),
    "attention": lambda world, key: ml.nn.MultiHeadAttention(4, 2, key=key),
    "mlp": lambda world, key: ml.nn.Sequential(
        ml.nn.Linear(6, 6, key=key), ml.relu, ml.nn.Linear(6, 6, key=key)
    ),
    "sgd": lambda world, key: ml.optim.SGD(world.names["mlp"], 0.1),
    "adamw": lambda world, key: ml.optim.AdamW(world.names["mlp"], 0.1),
}
"""Layers, states and optimizers of a chain, made of its other names and a key."""


class World:
    """The names of a chain on one thread."""

    def __init__(self, chain: Chain, number: int) -> None:
        self.number = number
        self.used = {*re.findall(r"\w+", " ".join(step.code for step in chain.steps))}
        self.names: dict[str, Any] = {
            **tables._SPACE, **vars(_HELPERS), "f": ml, "other": other_vm(),
            "arena": ml.Arena(ml.default_vm(), "batch"), "key": ml.random.key(7),
            "interrupted_first": self.interrupted_first, "signalled_first": self.signalled_first,
        }  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Create the tensors, layers and optimizers that the chain uses, as they are at first."""
        ml.random.seed(self.number)
        ml.set_default_dtype(ml.float32)  # a chain may have set it
        names = self.names
        names |= {name: ml.asarray(x) for name, x in ARRAYS.items() if name in self.used}
        names |= {
            name: ml.asarray(ARRAYS[of]).astype("bf16")
            for name, of in HALVES.items()
            if name in self.used
        }
        if "o" in self.used:
            with ml.use(other_vm()):
                names["o"] = ml.asarray(ARRAYS["a"])
        for i, (name, make) in enumerate(LAYERS.items()):
            if name in self.used:
                names[name] = make(self, ml.random.key(i))

    def interrupted_first(self, function: Callable[[], Any], n: int) -> Any:
        """Call the function with Ctrl-C at its n-th call or return, and again."""
        with suppress(Exception, KeyboardInterrupt):
            interrupted(function, n)
        self.begin()
        return function()

    def signalled_first(self, function: Callable[[], Any], n: int) -> Any:
        """Call the function with Ctrl-C after n steps of 10 microseconds, and again."""
        is_armed = True

        def stop(*_: object) -> None:
            if is_armed:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, n * 1e-5)
            until = time.monotonic() + n * 2e-5
            while time.monotonic() < until:
                with suppress(Exception):
                    function()
        except KeyboardInterrupt:
            pass
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        self.begin()
        return function()

    def run(self, step: Step) -> str:
        """Return what the step results in, or raises."""
        try:
            if step.is_statement:
                exec(step.code, self.names)
                name, is_result, _ = step.code.partition(" = ")
                result = self.names.get(name) if is_result and name.isidentifier() else None
                return shown(result)
            return shown(eval(step.code, self.names))
        except Exception as error:
            return raised(error)

    def end(self) -> list[str]:
        """Return the tensors of the chain, and close its arena."""
        names = [*dict.fromkeys(TENSORS), *[f"r{i}" for i in range(4)]]
        lines = [f"{name}: {self.run(Step(name))}" for name in names if name in self.names]
        with suppress(MlvmError):
            self.names["arena"].close()
        return lines


_HELPERS: Final = types.SimpleNamespace(
    operand=operand, graded=graded, swept=swept, pushed=pushed, mapped=mapped, captured=captured,
    listed=listed, within=within, slopes_of=slopes_of, shown=shown,
)  # fmt: skip


def lines_of(chain: Chain, number: int) -> list[str]:
    """Run a chain; return a line for each step and each tensor at its end, thread by thread."""
    for step in chain.steps:  # outside of arenas and other VMs, and on this thread
        for name, dtype in _OPERANDS.findall(step.code):
            operand(name, dtype)
    if chain.threads == 1:
        return _lines_with_warnings(chain, number)
    lines: list[list[str]] = [[] for _ in range(chain.threads)]

    def work(mine: list[str]) -> None:
        world = World(chain, number)
        barrier.wait()
        mine += [world.run(step) for step in chain.steps]
        mine += world.end()

    barrier = threading.Barrier(chain.threads)
    with taking_turns(1e-5), warnings.catch_warnings(action="ignore"):
        in_threads(work, lines)
    return [*itertools.chain(*lines)]


def _lines_with_warnings(chain: Chain, number: int) -> list[str]:
    lines, world = [], World(chain, number)
    for step in chain.steps:
        with warnings.catch_warnings(record=True, action="always") as caught:
            # A process warns once of each pair of types, and this one may have done so before.
            warnings.simplefilter("ignore", ml.PrecisionWarning)
            text = world.run(step)
        told = [f"{each.category.__name__}: {each.message}" for each in caught]
        lines.append("; ".join([text, *told]))
    return [*lines, *world.end()]


def prepare() -> None:
    """Import what names import at their first access: an interrupt may not end an import."""
    names: list[str] = vars(ml)["__all__"]
    for name in names:
        getattr(ml, name)
    public_functions()
    import_module("mlvm.eager.recording.families")
    if EXTENSION is not None:
        EXTENSION.chain_after(0)
        EXTENSION.open_after(2)  # so that more calls run by what others have shown
    sys.unraisablehook = lambda _: None  # an interrupt of a finalizer is only reported


# --- players --------------------------------------------------------------------------------

Chosen = list[tuple[int, int]]
"""Steps to run: the number of a chain, and the number of one of its steps."""


def answer(chains: list[tuple[int, Chain]]) -> list[str]:
    """Run chains with these numbers, one after the other."""
    return [*itertools.chain(*[lines_of(chain, number) for number, chain in chains])]


def serve(connection: Connection, *, pristine: bool = False) -> None:
    """Answer requests until the other side closes the connection. A `pristine` server answers each
    in a process that has run no chain before."""
    prepare()
    with suppress(EOFError, BrokenPipeError):
        while True:
            request = connection.recv()
            if not pristine:
                connection.send(answer(request))
                continue
            if not (process := os.fork()):
                connection.send(answer(request))
                os._exit(0)
            if os.waitpid(process, 0)[1]:
                connection.send(["the process crashed"])


class Player:
    """A process that runs chains."""

    def __init__(self, connection: Connection, wait: Callable[[], int]) -> None:
        self.connection = connection
        self.wait = wait

    @classmethod
    def forked(cls, *, pristine: bool = False) -> Player:
        """Start a copy of this process."""
        ours, theirs = Pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            process = os.fork()
        if process:
            theirs.close()
            return cls(ours, lambda: os.waitpid(process, 0)[1])
        status = 1
        try:
            ours.close()
            serve(theirs, pristine=pristine)
            status = 0
        finally:
            os._exit(status)

    @classmethod
    def started(cls, *, pristine: bool = False) -> Player:
        """Start a process without the cache."""
        ours, theirs = Pipe()
        command = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), str(int(pristine))]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | DISABLED, stdout=2, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        return cls(ours, process.wait)

    def ask(self, chains: list[tuple[int, Chain]]) -> None:
        self.connection.send(chains)

    def answered(self) -> list[str]:
        """Return the lines of the chain asked for. Raises `Wrong` for a hang or a crash."""
        if not self.connection.poll(SECONDS):
            raise Wrong(f"a chain ran for more than {SECONDS} s")
        try:
            lines: list[str] = self.connection.recv()
        except (EOFError, ConnectionError):
            raise Wrong(f"the process ended with status {self.wait()}") from None
        return lines

    def close(self) -> None:
        self.connection.close()
        with suppress(ChildProcessError):  # it has crashed, and `answered` has waited for it
            self.wait()


class Players:
    """A process without the cache, and a copy of this process. If they are `pristine`, they begin
    anew for each request."""

    def __init__(self, seed: int, *, pristine: bool = False) -> None:
        self.seed = seed
        self.players = Player.started(pristine=pristine), Player.forked(pristine=pristine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for player in reversed(self.players):  # the copy of this process has the other's pipe, too
            player.close()

    def ask(self, chosen: Chosen) -> None:
        """Let both processes run the chosen steps."""
        chains = self.chains(chosen)
        for player in self.players:
            player.ask(chains)

    def difference(self, chosen: Chosen) -> tuple[str, str] | None:
        """Run the chosen steps; return the first line that differs, as both processes have it."""
        self.ask(chosen)
        return self.answered()

    def answered(self) -> tuple[str, str] | None:
        """Return the first line that differs in the answers to the oldest request."""
        expected, got = [player.answered() for player in self.players]
        pairs = itertools.zip_longest(expected, got, fillvalue="nothing")
        return next(((x, y) for x, y in pairs if x != y), None)

    def chains(self, chosen: Chosen) -> list[tuple[int, Chain]]:
        """Return the chains of the chosen steps, with only these steps."""
        chains = []
        for number, pairs in itertools.groupby(chosen, lambda pair: pair[0]):
            chain = chain_of(self.seed, number)
            chains.append((number, chain._replace(steps=[chain.steps[i] for _, i in pairs])))
        return chains

    def steps(self, first: int, last: int) -> Chosen:
        """Choose all steps of some chains."""
        return [
            (number, i)
            for number in range(first, last + 1)
            for i in range(len(chain_of(self.seed, number).steps))
        ]

    def failure(self, first: int, number: int, found: tuple[str, str]) -> str:
        """Return a text with the smallest program that differs, and how to run it again."""
        chosen, note = self.cut_down(first, number), list[str]()
        if chosen:
            found = self.difference(chosen) or found
        else:
            note = ["# This does not differ in a new process, or not each time."]
            chosen = self.steps(number, number)
        lines = [
            line
            for n, chain in self.chains(chosen)
            for line in (
                f"# chain {n}, on {chain.threads} threads",
                *[step.code for step in chain.steps],
            )
        ]
        expected, got = (line if len(line) < 400 else line[:400] + "..." for line in found)
        begin = first if note else chosen[0][0]
        again = f"--seed {self.seed} --first {begin} --programs {number - begin + 1}"
        return "\n".join(
            [
                *note,
                *lines,
                f"# without the cache: {expected}",
                f"# with the cache:    {got}",
                f"Again: python -m tests.fuzz templates {again}",
            ]
        )

    def cut_down(self, first: int, number: int) -> Chosen:
        """Choose few steps that differ in a new process, from this chain alone, or else from this
        chain and some before it; none if all chains since the first do not differ there."""
        until = time.monotonic() + CUTTING_SECONDS

        def differs(chosen: Chosen) -> bool:
            return bool(chosen) and self.difference(chosen) is not None

        before = 0
        while not differs(chosen := self.steps(max(first, number - before), number)):
            if number - before <= first or time.monotonic() > until:
                return []
            before = 2 * before + 1
        size = len(chosen) // 2
        while size and time.monotonic() < until:
            starts = range(0, len(chosen), size)
            fewer = (chosen[:start] + chosen[start + size :] for start in starts)
            smaller = next(filter(differs, fewer), None)
            if smaller is None:
                size //= 2
            else:
                chosen = smaller
        return chosen


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Outcomes, str | None]:
    """Run chains; return how many there were on how many threads, and the first difference."""
    outcomes, number, numbers = Outcomes(), first, range(first, first + programs)
    try:
        with Players(seed) as players:
            for number in numbers[:_AHEAD]:
                players.ask(players.steps(number, number))
            for number in numbers:
                if number + _AHEAD in numbers:
                    players.ask(players.steps(number + _AHEAD, number + _AHEAD))
                found = players.answered()
                if found is not None:
                    break
                outcomes[f"chains on {chain_of(seed, number).threads} threads"] += 1
            else:
                return outcomes, None
        with Players(seed, pristine=True) as players:
            return outcomes, players.failure(first, number, found)
    except Wrong as error:
        again = f"python -m tests.fuzz templates --seed {seed} --first {number} --programs 1"
        return outcomes, f"{error}\nAgain: {again}"


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), pristine=bool(int(sys.argv[2])))
