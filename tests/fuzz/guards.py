"""Programs that read state, which then changes: a captured call must see it, or refuse it.

    python -m tests.fuzz guards --programs 10000

A program is a number in a chain of holders (objects, containers, classes, functions, objects of
mlvm), a place from which a function reaches the chain (a variable, a default, an argument, a rule
of a gradient), and a way to read the number. Between calls the number changes, or a part of the
chain is replaced. The captured function must compute what the eager one does, and its programs must
be those of another trace (`ml.capture(check=1)`), or the first call raises `CaptureError`.

The same is done with each field of objects of mlvm that hold state: `FIELDS`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import functools
import operator
import os
import random
import string
import sys
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, MlvmError, StaleProgramError
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

Fn = Callable[..., Any]
X: Final = (1.0, 2.0)


# --- holders ------------------------------------------------------------------------------


class Plain:
    """An object with one field."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Slotted:
    __slots__ = ("__weakref__", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@dataclasses.dataclass(eq=False)
class Record:
    inner: Any


class Hooked:
    """Objects whose special methods read a field that no other code names."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["hidden"] = inner

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["hidden"]

    def __getitem__(self, i: int) -> Any:
        return self.hidden

    def __iter__(self) -> Iterator[Any]:
        yield self.hidden

    def __call__(self) -> Any:
        return self.hidden


class Special:
    """Objects whose special methods read a field."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __len__(self) -> int:
        return int(self.number)

    def __bool__(self) -> bool:
        return self.number > 2.5

    def __contains__(self, number: object) -> bool:
        return number == self.number

    def __eq__(self, other: object) -> bool:
        return other == self.number

    def __lt__(self, other: float) -> bool:
        return self.number < other

    def __hash__(self) -> int:
        return int(self.number)

    def __float__(self) -> float:
        return self.number

    def __index__(self) -> int:
        return int(self.number)

    def __str__(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return f"{self.number}"

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __enter__(self) -> float:
        return self.number

    def __exit__(self, *_: object) -> None:
        pass

    def __rmul__(self, other: float) -> float:
        return other * self.number

    def __reversed__(self) -> Iterator[float]:
        yield self.number


def _hashed(c: Any) -> int:
    """Return the hash of a number. Refuse an object whose hash is its address, which may change."""
    if not isinstance(c, Special):
        raise TypeError(f"expected a number, got a {type(c).__name__}")
    return hash(c)


def _entered(c: Any) -> float:
    with c as number:
        return float(number)


def _matched(c: Any) -> float:
    match c:
        case Rated(number=3.0):
            return 1.0
        case _:
            return 2.0


class Descriptor:
    def __init__(self, inner: Any) -> None:
        self.held = inner

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.held


class Attributes(dict[str, Any]):
    """A dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def value(self) -> Any:
        return self["inner"]


class Pair(typing.NamedTuple):
    """A named tuple with methods."""

    inner: Any
    other: Any = 0

    def value(self) -> Any:
        return self.inner

    @property
    def first(self) -> Any:
        return self[0]


class Layer(ml.nn.Module):
    def __init__(self, inner: Any) -> None:
        self.inner, self.unread = inner, None

    def __call__(self, x: Any) -> Any:
        return x


class Holder(NamedTuple):
    """Something that holds a value: how to make, read and change it."""

    make: Fn
    read: Fn
    put: Fn | None


def _attribute(make: Fn) -> Holder:
    return Holder(make, lambda c: c.inner, lambda c, value: setattr(c, "inner", value))


def _item(make: Fn, key: Any = "inner") -> Holder:
    return Holder(make, lambda c: c[key], lambda c, value: operator.setitem(c, key, value))


def _cell(inner: Any) -> Any:
    return lambda: inner


def _put_cell(c: Any, value: Any) -> None:
    c.__closure__[0].cell_contents = value


def _function(inner: Any) -> Any:
    def fn(value: Any = inner) -> Any:
        return value

    return fn


def _function_with(inner: Any) -> Any:
    fn = _function(0)
    fn.inner = inner
    return fn


def _custom(inner: Any) -> Any:
    fn: Any = ml.custom_vjp(lambda x: x * 1.0)
    fn.defvjp(lambda x: (x, None), lambda _, g: (g,))
    fn.inner = inner
    return fn


def _class_of(**fields: Any) -> Any:
    return type("Kind", (type("Base", (), fields),), {})


def _module(inner: Any) -> Any:
    module = types.ModuleType("fuzzed")
    module.inner = inner  # type: ignore[attr-defined]
    return module


def _partial(inner: Any) -> Any:
    return functools.partial(lambda value: value, value=inner)


HOLDERS: Final[dict[str, Holder]] = {
    "object": _attribute(Plain),
    "slots": _attribute(Slotted),
    "dataclass": _attribute(Record),
    "namespace": _attribute(lambda x: types.SimpleNamespace(inner=x)),
    "Module": _attribute(Layer),
    "module": _attribute(_module),
    "function attribute": _attribute(_function_with),
    "class attribute": Holder(
        lambda x: _class_of(inner=x), lambda c: c.inner,
        lambda c, value: setattr(c.__bases__[0], "inner", value)),
    "custom_vjp": _attribute(_custom),
    "dict": _item(lambda x: {"inner": x}),
    "list": _item(lambda x: [0, x], 1),
    "ordered dict": _item(lambda x: collections.OrderedDict(inner=x)),
    "default dict": _item(lambda x: collections.defaultdict(int, inner=x)),
    "user dict": _item(lambda x: collections.UserDict(inner=x)),
    "user list": _item(lambda x: collections.UserList([x]), 0),
    "chain map": _item(lambda x: collections.ChainMap({}, {"inner": x})),
    "deque": _item(lambda x: collections.deque([x]), 0),
    "attribute dict": Holder(
        lambda x: Attributes(inner=x), lambda c: c.inner,
        lambda c, value: operator.setitem(c, "inner", value)),
    "method of a dict": Holder(
        lambda x: Attributes(inner=x), lambda c: c.value(),
        lambda c, value: operator.setitem(c, "inner", value)),
    "proxy": Holder(
        lambda x: types.MappingProxyType({"inner": [x]}), lambda c: c["inner"][0],
        lambda c, value: operator.setitem(c["inner"], 0, value)),
    "tuple": Holder(
        lambda x: ([x], 0), lambda c: c[0][0], lambda c, value: operator.setitem(c[0], 0, value)),
    "named tuple": Holder(Pair, lambda c: c.value(), None),
    "property of a named tuple": Holder(Pair, lambda c: c.first, None),
    "variable": Holder(_cell, lambda c: c(), _put_cell),
    "default": Holder(
        _function, lambda c: c(), lambda c, value: setattr(c, "__defaults__", (value,))),
    "partial": Holder(
        _partial, lambda c: c(), lambda c, value: c.keywords.update(value=value)),
    "getattr": Holder(Hooked, lambda c: c.anything, lambda c, x: c.__dict__.update(hidden=x)),
    "getitem": Holder(Hooked, lambda c: c[0], lambda c, x: c.__dict__.update(hidden=x)),
    "iter": Holder(Hooked, lambda c: next(iter(c)), lambda c, x: c.__dict__.update(hidden=x)),
    "call": Holder(Hooked, lambda c: c(), lambda c, x: c.__dict__.update(hidden=x)),
    "property": Holder(
        lambda x: type("Kind", (), {"held": x, "inner": property(lambda self: self.held)})(),
        lambda c: c.inner, lambda c, value: setattr(type(c), "held", value)),
    "descriptor": Holder(
        lambda x: type("Kind", (), {"inner": Descriptor(x)})(), lambda c: c.inner,
        lambda c, value: setattr(vars(type(c))["inner"], "held", value)),
    "weak reference": Holder(
        lambda x: (lambda c: (c, weakref.ref(c)))(Plain(x)), lambda c: c[1]().inner,
        lambda c, value: setattr(c[0], "inner", value)),
    "field by a computed name": Holder(
        Plain, lambda c: getattr(c, "".join(("in", "ner"))),
        lambda c, value: setattr(c, "inner", value)),
    "fields by vars": Holder(
        Plain, lambda c: next(iter(vars(c).values())),
        lambda c, value: setattr(c, "inner", value)),
    "attrgetter": Holder(
        Plain, operator.attrgetter("in" + "ner"), lambda c, value: setattr(c, "inner", value)),
    "copy": Holder(
        Plain, lambda c: next(iter(copy.copy(c).__dict__.values())),
        lambda c, value: setattr(c, "inner", value)),
}  # fmt: skip


# --- numbers: how the innermost one is read ---------------------------------------------------

FORMAT: Final = "{0.number}"


class Rated:
    """A number in a field."""

    def __init__(self, number: float) -> None:
        self.number = number


@typing.runtime_checkable
class HasRate(typing.Protocol):
    rated: float


def _format_of(default: str = "{c.number}") -> Fn:
    return lambda c, text=default: float(text.format(c=c))


def _sets_number(c: Any, value: float) -> None:
    c.number = value


def _marks(c: Any, value: float) -> None:
    c.rated = value


def _sets_environment(x: float) -> Any:
    os.environ["FUZZED"] = str(x)
    return types


def _puts_environment(_: Any, x: float) -> None:
    _sets_environment(x)


LEAVES: Final[dict[str, Holder]] = {
    "number": Holder(float, lambda c: c, None),
    "field": Holder(Rated, lambda c: c.number, _sets_number),
    "format": Holder(Rated, lambda c: float(f"{c.number}"), _sets_number),
    "format of a global": Holder(Rated, lambda c: float(FORMAT.format(c)), _sets_number),
    "format of a default": Holder(Rated, _format_of(), _sets_number),
    "Formatter": Holder(
        Rated, lambda c: float(string.Formatter().format(FORMAT, c)), _sets_number),
    "str.format": Holder(Rated, lambda c: float(str.format(FORMAT, c)), _sets_number),
    "format of a mapping": Holder(
        Rated, lambda c: float(FORMAT.replace("0", "c").format_map({"c": c})), _sets_number),
    "protocol": Holder(
        lambda x: Rated(x), lambda c: 2.0 if isinstance(c, HasRate) else 1.0, _marks),
    "class pattern": Holder(Rated, _matched, _sets_number),
    "getenv": Holder(
        _sets_environment, lambda _: float(os.getenv("FUZZED", "1")), _puts_environment),
    "expandvars": Holder(
        _sets_environment, lambda _: float(os.path.expandvars("$FUZZED")), _puts_environment),
    "environment": Holder(
        _sets_environment, lambda _: float(os.environ.get("FUZZED", 1)), _puts_environment),
    **{
        f"special {name}": Holder(Special, read, _sets_number)
        for name, read in {
            "len": len, "bool": lambda c: 2.0 if c else 1.0, "in": lambda c: 1.0 + (3.0 in c),
            "eq": lambda c: 1.0 + (c == 3.0), "lt": lambda c: 1.0 + (c < 2.5), "hash": _hashed,
            "float": float, "index": lambda c: [5.0, 6.0, 7.0, 8.0, 9.0, 10.0][c],
            "str": lambda c: float(str(c)), "repr": lambda c: float(repr(c)),
            "format": lambda c: float(f"{c:.2f}"), "with": _entered, "rmul": lambda c: 2.0 * c,
            "reversed": lambda c: next(reversed(c)), "ascii": lambda c: float(ascii(c)),
            "percent": lambda c: float("%s" % c), "sorted": lambda c: 1.0 * sorted([4, c])[0],  # noqa: UP031
            "join": lambda c: float("".join(map(str, [c]))), "set": lambda c: 1.0 + (c in {3.0}),
        }.items()
    },
    "array": Holder(
        lambda x: np.array([x]), lambda c: float(c[0]), lambda c, x: operator.setitem(c, 0, x)),
    "array of Python": Holder(
        lambda x: array.array("d", [x]), lambda c: c[0], lambda c, x: operator.setitem(c, 0, x)),
    "set": Holder(
        lambda x: {x}, lambda c: max(c), lambda c, x: (c.clear(), c.add(x))),
    "tensor": Holder(
        lambda x: types.SimpleNamespace(t=ml.asarray(x)), lambda c: c.t,
        lambda c, x: setattr(c, "t", ml.asarray(x))),
    "tensor of a Module": Holder(
        lambda x: Layer(ml.asarray(x)), lambda c: c.inner,
        lambda c, x: setattr(c, "inner", ml.asarray(x))),
    "tree of a Module": Holder(
        lambda x: Layer(ml.asarray(x)), lambda c: ml.tree.leaves(c)[0],
        lambda c, x: setattr(c, "inner", ml.asarray(x))),
    "schedule": Holder(
        lambda x: (lambda c: (c, ml.optim.warmup(lambda n: n * 0.0 + c.number, 1)))(Rated(x)),
        lambda c: c[1](5), lambda c, x: _sets_number(c[0], x)),
    "gradient": Holder(
        lambda x: (lambda c: (c, _reversal(c)))(Rated(x)),
        lambda c: ml.grad(c[1])(ml.asarray(1.0)), lambda c, x: _sets_number(c[0], x)),
    "plateau": Holder(
        lambda x: ml.optim.Plateau(x), lambda c: c(0),
        lambda c, x: setattr(c, "rate", ml.asarray(x))),
}  # fmt: skip


def _reversal(c: Any) -> Any:
    fn: Any = ml.custom_vjp(lambda x: x * 1.0)
    fn.defvjp(lambda x: (x * c.number, None), lambda _, g: (g * c.number,))
    return fn


# --- places -----------------------------------------------------------------------------------


def _of_global(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    module: Any = types.ModuleType("fuzzed_global")
    module.root, module.read = root, read
    exec("def f(x): return x * read(root)", vars(module))
    return module.f, ()


def _of_other_file(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    module: Any = types.ModuleType("fuzzed_other")
    sys.modules["fuzzed_other"] = module
    module.root, module.read = root, read
    exec("def f(x):\n    import fuzzed_other\n    return x * read(fuzzed_other.root)", vars(module))
    return module.f, ()


def _of_named_file(root: Any, read: Fn, name: str = "this") -> tuple[Fn, tuple[Any, ...]]:
    top = name.partition(".")[0]
    package: Any = types.ModuleType(top)
    package.__file__ = f"/home/user/{top}.py"
    sys.modules[top] = package
    module: Any = types.ModuleType(name)
    module.root, module.read = root, read
    exec("class Scale:\n    def of(self, x): return x * read(root)", vars(module))
    exec("def f(x): return Scale().of(x)", vars(module))
    return module.f, ()


def _of_method(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    class Trainer:
        def __init__(self) -> None:
            self.root = root

        def step(self, x: Any) -> Any:
            return x * read(self.root)

    return Trainer().step, ()


def _of_module(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    class Model(ml.nn.Module):
        def __init__(self) -> None:
            self.root = root

        def __call__(self, x: Any) -> Any:
            return x * read(self.root)

    return Model(), ()


def _of_rule(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    fn: Any = ml.custom_vjp(lambda x: x * 1.0)
    fn.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * read(root),))
    return lambda x: ml.grad(lambda x: ml.sum(fn(x)))(x), ()


def _of_tangent(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    fn = ml.custom_jvp(lambda x: x * 1.0)
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * read(root)))
    return lambda x: ml.jvp(fn, (x,), (x,))[1], ()


def _of_schedule(root: Any, read: Fn) -> tuple[Fn, tuple[Any, ...]]:
    w = ml.asarray([0.0, 0.0])
    optimizer = ml.optim.MultiSteps(ml.optim.SGD([w], lambda n: n * 0.0 + read(root)), every=1)

    def step(x: Any) -> Any:
        w[...] = 0.0
        optimizer.update([x])
        return w * 1.0

    return step, ()


PLACES: Final[dict[str, Fn]] = {
    "variable": lambda root, read: ((lambda x: x * read(root)), ()),
    "default": lambda root, read: ((lambda x, c=root: x * read(c)), ()),
    "keyword default": lambda root, read: ((lambda x, *, c=root: x * read(c)), ()),
    "global": _of_global,
    "imported module": _of_other_file,
    "file named as a standard module": _of_named_file,
    "package named as a standard one": functools.partial(_of_named_file, name="test.fuzzed"),
    "argument": lambda root, read: ((lambda x, c: x * read(c)), (root,)),
    "argument in a list": lambda root, read: ((lambda x, c: x * read(c[1])), ([0, root],)),
    "argument in a dict": lambda root, read: ((lambda x, c: x * read(c["c"])), ({"c": root},)),
    "argument in a named tuple": lambda root, read: (
        (lambda x, c: x * read(c.value())), (Pair(root),)),
    "argument in an attribute dict": lambda root, read: (
        (lambda x, c: x * read(c.inner)), (Attributes(inner=root),)),
    "partial": lambda root, read: (functools.partial(lambda c, x: x * read(c), root), ()),
    "method": _of_method,
    "Module": _of_module,
    "rule of custom_vjp": _of_rule,
    "rule of custom_jvp": _of_tangent,
    "schedule": _of_schedule,
    "gradient": lambda root, read: (
        (lambda g: lambda x: g(x))(ml.grad(lambda x: ml.sum(x * x * read(root)))), ()),
    "vmap": lambda root, read: ((lambda g: lambda x: g(x))(ml.vmap(lambda x: x * read(root))), ()),
    "function": lambda root, read: (
        (lambda g: lambda x: g(x))(ml.subroutine(lambda x: x * read(root))), ()),
    "checkpoint": lambda root, read: (
        (lambda g: lambda x: ml.grad(lambda x: ml.sum(g(x)))(x))(
            ml.checkpoint(lambda x: x * x * read(root))), ()),
    "captured function": lambda root, read: (
        (lambda g: lambda x: g(x))(ml.capture(lambda x: x * read(root))), ()),
    "scan": lambda root, read: (
        (lambda x: ml.scan(lambda c, _: (c * read(root), None), x, ml.ones(2))[0]), ()),
    "branch": lambda root, read: (
        (lambda x: ml.cond(x[0] > 0.0, lambda: x * read(root), lambda: x)), ()),
    "wrapper": lambda root, read: (
        functools.wraps(_of_global)(lambda x: x * read(root)), ()),
}  # fmt: skip


class Program(NamedTuple):
    """A program, by the names of its parts; `changes` are the depths of the changes."""

    place: str
    holders: tuple[str, ...]
    leaf: str
    changes: tuple[int, ...]

    def __str__(self) -> str:
        chain = " of ".join([self.leaf, *reversed(self.holders)])
        return f"{chain}, from {self.place}; changes at depths {self.changes}"


class Chain:
    """The state of a program: the root, the value at each depth, and the function that reads it."""

    def __init__(self, program: Program, value: float) -> None:
        self.holders = [HOLDERS[name] for name in program.holders] + [LEAVES[program.leaf]]
        self.values = [self.build(len(self.holders) - 1, value)]
        while len(self.values) < len(self.holders):
            self.values.insert(0, self.holders[-len(self.values) - 1].make(self.values[0]))
        self.root = self.values[0]

    def build(self, depth: int, value: float) -> Any:
        """Return new state from that depth on."""
        part = self.holders[-1].make(value)
        for holder in reversed(self.holders[depth:-1]):
            part = holder.make(part)
        return part

    def change(self, depth: int, value: float) -> bool:
        """Give the number another value: in place, or by other state below that depth."""
        holder = self.holders[depth]
        if holder.put is None:
            return False
        if depth == len(self.holders) - 1:
            holder.put(self.values[depth], value)
        else:
            holder.put(self.values[depth], self.build(depth + 1, value))
            for below in range(depth + 1, len(self.holders)):
                self.values[below] = self.holders[below - 1].read(self.values[below - 1])
        return True

    def reader(self) -> Fn:
        reads = tuple([holder.read for holder in self.holders])

        def read(root: Any) -> Any:
            for each in reads:
                root = each(root)
            return root

        return read


def singles() -> dict[str, Program]:
    """Return a program for each holder, each way to read a number, and each place, by its name."""
    programs = {name: Program("variable", (name,), "number", (0,)) for name in HOLDERS}
    programs |= {f"read by {name}": Program("variable", (), name, (0,)) for name in LEAVES}
    programs |= {f"from {name}": Program(name, ("list",), "number", (0,)) for name in PLACES}
    return {name: each for name, each in programs.items() if _first(each).put is not None}


def _first(program: Program) -> Holder:
    """Return the holder at depth 0."""
    return HOLDERS[program.holders[0]] if program.holders else LEAVES[program.leaf]


def built(program: Program) -> tuple[Any, ...]:
    """Return the function of a program, a change of its number, and its arguments besides x."""
    chain = Chain(program, 2.0)
    fn, args = PLACES[program.place](chain.root, chain.reader())
    return fn, lambda: chain.change(0, 3.0), *args


def drawn(draw: random.Random) -> Program:
    """Draw a program."""
    depth = draw.choice([0, 1, 1, 2, 2, 3])
    holders = tuple([draw.choice([*HOLDERS]) for _ in range(depth)])
    changes = tuple([draw.randrange(depth + 1) for _ in range(3)])
    return Program(draw.choice([*PLACES]), holders, draw.choice([*LEAVES]), changes)


def results_of(program: Program, wrap: Fn) -> list[Any]:
    """Return the results of the calls of a program, between which its state changes."""
    chain = Chain(program, 2.0)
    fn, args = PLACES[program.place](chain.root, chain.reader())
    call, x, results = wrap(fn), ml.asarray(X), []
    for value, depth in zip((3.0, 5.0, 2.0), program.changes, strict=True):
        results += [call(x, *args).tolist() for _ in range(2)]
        chain.change(depth, value)
    return [*results, call(x, *args).tolist()]


def try_program(program: Program) -> str:
    """Run a program eagerly and captured. Raise `Wrong` if a captured call has other results, an
    old program, or an error that no eager call has."""
    modules = sys.modules.copy()
    try:
        return _try_program(program)
    finally:
        for name in sys.modules.keys() - modules.keys():
            del sys.modules[name]


def _try_program(program: Program) -> str:
    try:
        expected = results_of(program, lambda fn: fn)
    except Exception as error:
        return f"invalid: {type(error).__name__}: {str(error)[:40]}"
    for name, wrap in CAPTURES.items():
        try:
            actual = results_of(program, wrap)
        except StaleProgramError as error:
            raise Wrong(f"{program}: {error}") from error
        except CaptureError as error:
            if any(text in str(error) for text in REFUSED):
                return "refused"
            raise Wrong(f"{program}: {name}: {error}") from error
        except MlvmError as error:
            raise Wrong(f"{program}: {name}: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise Wrong(f"{program}: {name}: raw {error!r}") from error
        if actual != expected:
            raise Wrong(f"{program}: {name}: got {actual}, expected {expected}")
    return "changed" if len({*map(str, expected)}) > 1 else "unchanged"


REFUSED: Final = "a captured function reaches", "cannot read a tensor's value inside"
"""Texts of errors of functions that are refused before they have a program."""

CAPTURES: Final[dict[str, Fn]] = {
    "captured": ml.capture,
    "check=1": functools.partial(ml.capture, check=1),
}


# --- fields of mlvm's objects -------------------------------------------------------------------


def _weights() -> Any:
    return ml.nn.Linear(2, 1, key=ml.random.key(0), kernel_init=ml.nn.init.constant(1.0))


def _ones(model: Any) -> Any:
    return ml.tree.map(lambda w: w * 0.0 + 1.0, {"kernel": model.kernel, "bias": model.bias})


def _updating(make: Fn) -> Fn:
    """Return what builds an optimizer, and a function that updates by it."""

    def build() -> Any:
        model = _weights()
        optimizer = make(model)

        def step(x: Any) -> Any:
            optimizer.update(_ones(model))
            return model.kernel * x[0]

        return optimizer, step

    return build


def _averaging(kind: Any = ml.optim.EMA) -> Any:
    model = _weights()
    average = kind(model, 0.5)

    def step(x: Any) -> Any:
        average.update()
        return average.state()["average/kernel"] * x[0]

    model.kernel += 4.0
    return average, step


def _scaling() -> Any:
    scale, model = ml.optim.LossScale(8.0, growth_interval=2), _weights()
    optimizer = ml.optim.SGD(model, 0.25)

    def step(x: Any) -> Any:
        scale.update(optimizer, scale.unscale(_ones(model)))
        return scale.value * x[0], model.kernel * 1.0

    return scale, step


def _falling() -> Any:
    rate = ml.optim.Plateau(1.0, factor=0.5, patience=0)

    def step(x: Any) -> Any:
        rate.update(x[0])
        return rate(0) * x[1]

    return rate, step


def _custom_rule() -> Any:
    fn = ml.custom_vjp(lambda x: x * 2.0)
    fn.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 3.0,))
    return fn, lambda x: ml.value_and_grad(lambda x: ml.sum(fn(x)))(x)


def _custom_tangent() -> Any:
    fn = ml.custom_jvp(lambda x: x * 2.0)
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * 3.0))
    return fn, lambda x: ml.jvp(fn, (x,), (x,))


def _under(amp: Any, x: Any) -> Any:
    with amp:
        y = ml.matmul(x, x)
    return ml.astype(y, ml.float32) + float(y.dtype is ml.bfloat16)


def _layer(make: Fn) -> Fn:
    def build() -> Any:
        layer = make()
        return layer, lambda x: layer(ml.reshape(x, (1, 2)))

    return build


FIELDS: Final[dict[str, Fn]] = {
    "SGD": _updating(lambda m: ml.optim.SGD(m, 0.5, momentum=0.5)),
    "AdamW": _updating(lambda m: ml.optim.AdamW(m, 0.5)),
    "MultiSteps": _updating(lambda m: ml.optim.MultiSteps(ml.optim.SGD(m, 0.5), every=2)),
    "optimizer of MultiSteps": lambda: (lambda o, f: (o.optimizer, f))(
        *_updating(lambda m: ml.optim.MultiSteps(ml.optim.SGD(m, 0.5), every=2))()),
    "EMA": _averaging,
    "subclass of EMA": lambda: _averaging(type("Average", (ml.optim.EMA,), {})),
    "LossScale": _scaling,
    "Plateau": _falling,
    "custom_vjp": _custom_rule,
    "custom_jvp": _custom_tangent,
    "function": lambda: (lambda f: (f, lambda x: f(x)))(ml.subroutine(lambda x: x * 2.0)),
    "autocast": lambda: (lambda amp: (amp, lambda x: _under(amp, x)))(ml.autocast("bfloat16")),
    "batch": lambda: (lambda f: (f, lambda x: f(x)))(ml.auto_batch(lambda x: x * 2.0)),
    "Linear": _layer(_weights),
    "Dropout": _layer(lambda: ml.nn.Dropout(0.5).eval()),
    "LayerNorm": _layer(lambda: ml.nn.LayerNorm(2)),
    "BatchNorm": _layer(lambda: ml.nn.BatchNorm(2).eval()),
    "GELU": _layer(lambda: ml.nn.LeakyReLU(0.5)),
    "Sequential": _layer(lambda: ml.nn.Sequential(_weights(), ml.nn.Tanh())),
}  # fmt: skip


def _other(value: Any) -> Any:
    """Return another value for a field; the same where none is likely to fit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return type(value)(value * 0.75) if isinstance(value, float) else value + 1
    if isinstance(value, ml.Tensor):
        return value * 0.0 + 3.0
    if value is ml.bfloat16:
        return None
    if isinstance(value, ml.nn.Linear):
        other = _weights()
        other.kernel *= 2.0
        return other
    if isinstance(value, types.FunctionType):
        return _OTHERS.get(value.__code__.co_argcount, value)
    return value


_OTHERS: Final[dict[int, Fn]] = {
    1: lambda x: x * 5.0,
    2: lambda a, b: (b * 7.0,) if isinstance(b, ml.Tensor) else (a[0], b[0] * 7.0),
}


def fields_of(name: str) -> list[str]:
    """Return the fields of an object of the table that may have another value."""
    owner, _ = FIELDS[name]()
    named = [each for each in vars(owner) if each[:1] != "_"]
    return [each for each in named if _other(vars(owner)[each]) is not vars(owner)[each]]


def try_field(name: str, field: str) -> str:
    """Run a function of an object of mlvm, assign the field, and run it again."""

    def results(wrap: Fn) -> list[Any]:
        ml.random.seed(0)
        owner, fn = FIELDS[name]()
        call, x, found = wrap(fn), ml.asarray(X), []
        for i in range(5):
            if i == 2:
                setattr(owner, field, _other(vars(owner)[field]))
            try:
                found.append(_plain(call(x)))
            except StaleProgramError:
                raise
            except MlvmError as error:
                found.append(type(error).__name__)
        return found

    expected = results(lambda fn: fn)
    for how, wrap in CAPTURES.items():
        try:
            actual = results(wrap)
        except Exception as error:
            raise Wrong(f"{name}.{field}: {how}: {error!r}") from error
        if actual != expected:
            raise Wrong(f"{name}.{field}: {how}: got {actual}, expected {expected}")
    return "field"


def _plain(tree: Any) -> Any:
    return [leaf.tolist() for leaf in ml.tree.leaves(tree)]


def fuzz(
    programs: int, seed: int, first: int, *, until: str | None = None
) -> tuple[Outcomes, str | None]:
    """Try programs by their numbers, and once each field of `FIELDS`. Return how often each outcome
    was, and what is wrong with one, if one is."""

    def attempt(number: int) -> str:
        return try_program(drawn(random.Random(f"{seed} {number}")))

    with warnings.catch_warnings(action="ignore"), contextlib.suppress(KeyError):
        cases = [(name, field) for name in FIELDS for field in fields_of(name)] if not first else []
        outcomes, wrong = outcomes_of(range(len(cases)), lambda i: try_field(*cases[i]))
        more, also = outcomes_of(range(first, first + programs), attempt, until)
    failures = [text for text in (wrong, also) if text]
    outcomes.update(more)
    return outcomes, "\n".join(failures) or None
