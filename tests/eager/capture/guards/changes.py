"""Changes of what a function reaches, apart from those of the fuzzer `guards`.

A row of `OBJECTS` is the object, a function of it that returns the function, and the change, which
makes the function compute another result.
"""

from __future__ import annotations

import abc
import argparse
import array
import builtins
import collections
import dataclasses
import functools
import json
import numbers
import sys
import textwrap
import types
import typing
import unittest.mock
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

import mlvm.eager as ml
from tests.fuzz import guards

Fn = Callable[..., Any]
Row = tuple[Callable[[], Any], Callable[[Any], Fn], Callable[[Any], object]]
T = TypeVar("T")
GENERIC: Any = Generic


class Plain:
    """An object with the given fields."""

    def __init__(self, **fields: Any) -> None:
        for name, field in fields.items():
            setattr(self, name, field)

    def rate(self) -> float:
        return 1.0


class Other(Plain):
    def rate(self) -> float:
        return 2.0


class Tagged(Plain):
    def __str__(self) -> str:
        return str(vars(self)["tag"])


class Slotted:
    __slots__ = ("__weakref__", "lr", "more")

    def __init__(self, **fields: Any) -> None:
        for name, field in fields.items():
            setattr(self, name, field)


@dataclasses.dataclass(order=True)
class Config:
    lr: float = 2.0


class Proxy:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Values(list[float]):
    factor = 2.0


class Size(int):
    rate = 2.0


class Unpacked:
    scale = "rate"

    def keys(self) -> list[str]:
        return [self.scale]

    def __getitem__(self, name: str) -> float:
        return {"rate": 2.0, "other": 3.0}[name]


def plain(**fields: Any) -> Any:
    return Plain(**fields)


def sets(**fields: Any) -> Callable[[Any], None]:
    """Return the change that sets the fields of an object."""

    def change(c: Any) -> None:
        for name, field in fields.items():
            setattr(c, name, field)

    return change


def special(**methods: Any) -> Callable[[], Any]:
    """Return what builds an object with these special methods and a field that they alone read."""
    fields = {f"__{name}__": method for name, method in methods.items()}

    def build() -> Any:
        c = type("Special", (), fields)()
        c.hidden = 2.0
        return c

    return build


hides = sets(hidden=3.0)


def class_of(**fields: Any) -> Callable[[], Any]:
    """Return what builds an object of a new class with these attributes, of a new base."""
    return lambda: type("Derived", (type("Base", (Plain,), dict(fields)),), {})()


def sets_base(**fields: Any) -> Callable[[Any], None]:
    """Return the change that sets attributes of the base class of an object's class."""
    return lambda c: sets(**fields)(type(c).__bases__[0])


def module_of(name: str, code: str) -> Any:
    """Return a module of that code, which can be imported in the same test."""
    module = types.ModuleType(name)
    module.__file__ = f"/home/user/{name}.py"
    sys.modules[name] = module
    exec(compile(textwrap.dedent(code), f"{name}.py", "exec"), vars(module))
    return module


def put_into_builtins(**values: Any) -> None:
    vars(builtins).update(values)


def of_builtins(value: str, **values: Any) -> Callable[[], Any]:
    """Return what puts values into the builtins, and builds a module whose `f` reads them."""

    def build() -> Any:
        put_into_builtins(**values)
        return module_of("signature_builtins", f"def f(x): return x * {value}")

    return build


def rated(rate: float) -> Callable[[Any], float]:
    return lambda self: rate


def function_of_code(rate: float = 2.0, *, more: float = 1.0) -> Any:
    """Return a new function, whose code, defaults and fields may change."""

    return lambda by=rate, *, more=more: by * more


FORMAT = "{0.lr}"


def reversal(c: Any) -> Any:
    fn = ml.custom_vjp(lambda x: x * 1.0)
    fn.defvjp(lambda x: (x, None), lambda _, g: (g * c.lr,))
    return fn


def matched(point: Any) -> Fn:
    def fn(x: ml.Tensor) -> Any:
        match point:
            case Config(2.0):
                return x
            case _:
                return x * 2

    return fn


def scaled(x: ml.Tensor, *, rate: float = 1.0, other: float = 1.0) -> ml.Tensor:
    return x * rate + other


def of_factor(make: Callable[[list[float]], Any]) -> Callable[[], Any]:
    """Return what builds a list of one factor, and what `make` builds of it."""

    def build() -> Any:
        factor = [2.0]
        return factor, make(factor)

    return build


def constructed(factor: list[float], base: Any = object) -> Any:
    """Return a class whose objects take the factor for their rate."""

    class C(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.lr = factor[0]

    return C


def raised(c: Any) -> None:
    """Change the factor of `of_factor`."""
    c[0].insert(0, 3.0)


def constructs_by(build: Fn) -> Callable[[Any], Fn]:
    """Return a function of an object: one that constructs a class that reads it."""

    def use(c: Any) -> Fn:
        def __init__(self: Any) -> None:
            self.rate = c.lr

        kind = build("New", lambda fields: fields.update(__init__=__init__))
        return lambda x: x * kind().rate

    return use


OBJECTS: dict[str, Row] = {
    # fields
    "two simple namespaces compared": (
        lambda: [types.SimpleNamespace(unnamed=1), types.SimpleNamespace(unnamed=1)],
        lambda c: (lambda a, b: lambda x: x * (1.0 if a == b else 2.0))(*c),
        lambda c: setattr(c[0], "unnamed", 2)),
    "a namespace searched": (
        lambda: argparse.Namespace(),
        lambda c: (lambda name: lambda x: x * (1.0 if name in c else 2.0))("".join(["a", "b"])),
        sets(ab=1)),
    "a simple namespace as text": (
        lambda: types.SimpleNamespace(unnamed=2.0),
        lambda c: lambda x: x * float(repr(c)[-4:-1]), sets(unnamed=3.0)),
    "text of a mapping": (
        lambda: Tagged(tag="a"),
        lambda c: lambda x: x * len("{c}".format_map({"c": c})), sets(tag="abc")),
    "a format of a field": (
        lambda: plain(lr=2.0),
        lambda c: lambda x: x * float("{0.lr}".format(c)), sets(lr=3.0)),  # noqa: UP030, UP032
    "a format in a variable": (
        lambda: [plain(lr=2.0), "{0.lr}"], lambda c: lambda x: x * float(c[1].format(c[0])),
        lambda c: sets(lr=3.0)(c[0])),
    "a bound format": (
        lambda: plain(lr=2.0), lambda c: (lambda text: lambda x: x * float(text(c)))(FORMAT.format),
        sets(lr=3.0)),
    "a special method of a list": (
        lambda: [1.0, 2.0], lambda c: (lambda count: lambda x: x * count())(c.__len__),
        lambda c: c.append(3.0)),
    "the getattribute of an object": (
        lambda: plain(lr=2.0),
        lambda c: (lambda get: lambda x: x * get("l" + "r"))(c.__getattribute__), sets(lr=3.0)),
    "a default of getattr": (
        lambda: plain(inner=plain()),
        lambda c: (lambda other: lambda x: x * getattr(c.inner, "lr", other))(5.0),
        lambda c: setattr(c.inner, "lr", 3.0)),
    "getattr itself as a value": (
        lambda: plain(lr=2.0), lambda c: (lambda get: lambda x: x * get(c, "".join("lr")))(
            functools.partial(getattr)), sets(lr=3.0)),
    "a field that comes where another goes": (
        lambda: plain(unread=2.0), lambda c: lambda x: x * getattr(c, "lr", 1.0),
        lambda c: c.__dict__.update(lr=c.__dict__.pop("unread"))),
    "the dict": (
        lambda: plain(lr=2.0), lambda c: lambda x: x * sum(c.__dict__.values()), sets(lr=3.0)),
    "another dict": (
        lambda: plain(lr=2.0), lambda c: lambda x: x * c.lr, sets(__dict__={"lr": 3.0})),
    "a library that looks into objects": (
        lambda: plain(lr=2.0), lambda c: lambda x: x * json.loads(json.dumps(
            c, default=lambda each: list(each.__dict__.values())))[0], sets(lr=3.0)),
    "a slot that gets a value": (
        Slotted, lambda c: lambda x: x * getattr(c, "lr", 2.0), sets(lr=3.0)),
    "an inherited slot": (
        lambda: type("Derived", (Slotted,), {"__slots__": ("other",)})(lr=2.0),
        lambda c: lambda x: x * c.lr, sets(lr=3.0)),
    "an object within an object without a dict": (
        lambda: (lambda inner: Slotted(lr=inner, more=[inner]))(plain(lr=2.0)),
        lambda c: lambda x: x * c.more[0].lr, lambda c: setattr(c.lr, "lr", 3.0)),
    "a class pattern": (Config, matched, sets(lr=3.0)),
    "a dataclass compared with a new one": (
        Config, lambda c: lambda x: x * (2.0 if c > Config(2.5) else 1.0), sets(lr=3.0)),
    "a dataclass as a dict": (
        Config, lambda c: lambda x: x * sum(dataclasses.asdict(c).values()), sets(lr=3.0)),
    "a field of an integer": (
        lambda: Size(3), lambda c: lambda x: x * c * c.rate, sets(rate=3.0)),
    "a field of a mock": (
        lambda: unittest.mock.MagicMock(lr=2.0), lambda c: lambda x: x * c.lr, sets(lr=3.0)),
    # special methods
    "getattribute": (
        special(getattribute=lambda self, name: object.__getattribute__(self, "hidden")),
        lambda c: lambda x: x * c.anything, hides),
    "a getattr that delegates": (
        lambda: Proxy(plain(lr=2.0)), lambda c: lambda x: x * c.lr,
        lambda c: setattr(c.inner, "lr", 3.0)),
    "a generator of iter": (
        lambda: special(iter=lambda self: (each for each in self.values))(),
        lambda c: (sets(values=[2.0])(c), lambda x: x * sum(c))[1], lambda c: c.values.append(1.0)),
    "an operator": (
        special(rmul=lambda self, x: x * self.hidden, mul=lambda self, x: x * self.hidden),
        lambda c: lambda x: c * x, hides),
    "a mapping unpacked": (
        Unpacked, lambda c: lambda x: scaled(x, **c), sets(scale="other")),
    # mlvm's objects
    "a rule that is set again": (
        lambda: reversal(plain(lr=2.0)), lambda c: lambda x: ml.grad(lambda x: ml.sum(c(x)))(x),
        lambda c: c.defvjp(lambda x: (x, None), lambda _, g: (g * 9.0,))),
    # classes
    "another class": (plain, lambda c: lambda x: x * c.rate(), sets(__class__=Other)),
    "a property of a base": (
        class_of(_hidden=2.0, lr=property(lambda self: self._hidden)),
        lambda c: lambda x: x * c.lr, sets_base(_hidden=3.0)),
    "a class with a property for its module": (
        class_of(__module__=property(rated(1.0)), lr=2.0), lambda c: lambda x: x * c.lr,
        sets_base(lr=3.0)),
    "a method that is replaced": (
        class_of(rate=rated(2.0)), lambda c: lambda x: x * c.rate(), sets_base(rate=rated(3.0))),
    "a method that a class gets": (
        class_of(), lambda c: lambda x: x * c.rate(),
        lambda c: setattr(type(c), "rate", rated(3.0))),
    "another base": (
        class_of(rate=rated(3.0)), lambda c: lambda x: x * c.rate(),
        lambda c: setattr(type(c), "__bases__", (Other,))),
    "a class built inside": (
        of_factor(constructed), lambda c: (lambda kind: lambda x: x * kind().lr)(c[1]), raised),
    "a generic class built inside": (
        of_factor(lambda factor: constructed(factor, GENERIC[T])[int]),
        lambda c: (lambda kind: lambda x: x * kind().lr)(c[1]), raised),
    "an attribute of a metaclass": (
        lambda: type("Meta", (type,), {"lr": 2.0})("C", (), {}),
        lambda c: lambda x: x * c.lr, lambda c: setattr(type(c), "lr", 3.0)),
    "the properties of a class of one's own": (
        of_factor(lambda factor: type("C", (), {
            "rate": type("Rate", (property,), {})(lambda self: factor[0])})()),
        lambda c: (lambda each: lambda x: x * each.rate)(c[1]), raised),
    "a class that an abstract one registers": (
        lambda: (plain(), abc.ABCMeta("Abstract", (), {})),
        lambda c: (lambda each, kind: lambda x: x * (2.0 if isinstance(each, kind) else 1.0))(*c),
        lambda c: c[1].register(Plain)),
    "a class that a library's abstract one registers": (
        lambda: type("C", (), {})(),
        lambda c: lambda x: x * (2.0 if isinstance(c, numbers.Number) else 1.0),
        lambda c: numbers.Number.register(type(c))),
    # functions
    "the code of a function": (
        function_of_code, lambda c: lambda x: x * c(),
        sets(__code__=(lambda by=2.0, *, more=1.0: 3.0).__code__)),
    "the defaults of a function": (
        function_of_code, lambda c: lambda x: x * c(), sets(__kwdefaults__={"more": 4.0})),
    "the name of a function": (
        function_of_code, lambda c: lambda x: x * len(c.__name__), sets(__name__="longer")),
    "the annotations of a function": (
        function_of_code, lambda c: lambda x: x * len(typing.get_type_hints(c)),
        lambda c: c.__annotations__.update(more=int)),
    "the name of a class": (
        lambda: type("C", (), {})(), lambda c: lambda x: x * len(type(c).__name__),
        lambda c: sets(__name__="longer")(type(c))),
    "a default that is changed": (
        of_factor(lambda factor: lambda options=types.MappingProxyType({"lr": factor}): (
            options["lr"][0])),
        lambda c: (lambda rate: lambda x: x * rate())(c[1]), raised),
    "a partial call": (
        lambda: {"lr": 2.0},
        lambda c: (lambda get: lambda x: x * get())(functools.partial(c.get, "lr")),
        lambda c: c.update(lr=3.0)),
    "a cached function of arguments": (
        lambda: plain(lr=2.0),
        lambda c: (lambda doubled: lambda x: x * doubled(c.lr))(functools.cache(lambda r: 2 * r)),
        sets(lr=3.0)),
    # containers
    "a key of another name": (
        lambda: {"a": 1, "b": 1}, lambda c: lambda x: x * len("".join(c)),
        lambda c: c.update(cc=c.pop("b"))),
    "a set of objects": (
        lambda: {plain(lr=2.0)}, lambda c: lambda x: x * sum(each.lr for each in c),
        lambda c: setattr(next(iter(c)), "lr", 3.0)),
    "a deque of another length": (
        lambda: plain(last=collections.deque([2.0], 1)),
        lambda c: lambda x: x * (c.last.maxlen or 5), sets(last=collections.deque([2.0]))),
    "an ordered dict": (
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        lambda c: lambda x: x * next(iter(c.values())), lambda c: c.move_to_end("a")),
    "a default dict": (
        lambda: collections.defaultdict(lambda: 2.0), lambda c: lambda x: x * c.copy()["lr"],
        sets(default_factory=lambda: 3.0)),
    "a list of a class of one's own": (
        lambda: Values([1.0]), lambda c: lambda x: x * c[0] * c.factor, sets(factor=3.0)),
    "the base of a view": (
        lambda: np.ones(3), lambda c: (lambda part: lambda x: x * float(part.base[2]))(c[:2]),
        lambda c: c.__setitem__(2, 2.0)),
    "an array of objects": (
        lambda: np.array([plain(lr=2.0)], dtype=object), lambda c: lambda x: x * c[0].lr,
        lambda c: setattr(c[0], "lr", 3.0)),
    "the flags of an array": (
        lambda: np.ones(3), lambda c: lambda x: x * (2.0 if c.flags.writeable else 1.0),
        lambda c: sets(writeable=False)(c.flags)),
    "the size of an arena": (
        lambda: ml.Arena(ml.VM(), "grows"), lambda c: lambda x: x * c.high_water,
        lambda c: c.alloc(ml.TensorType("f32", [9]))),
    "an array of bytes": (
        lambda: (array.array("d", [2.0]), bytearray(b"a")),
        lambda c: lambda x: x * c[0][0] * c[1][0], lambda c: c[1].__setitem__(0, 0)),
    "what the constructor of a new class reads": (
        lambda: plain(lr=2.0),
        constructs_by(lambda name, body: types.new_class(name, (), {}, body)), sets(lr=3.0)),
    "what a method of a made dataclass reads": (
        lambda: plain(lr=2.0),
        lambda c: (
            lambda made: lambda x: x * made().rate()
        )(dataclasses.make_dataclass("Made", [], namespace={"rate": lambda self: c.lr})),
        sets(lr=3.0)),
    # modules
    "a number in builtins": (
        of_builtins("rate_of_builtins", rate_of_builtins=2.0), lambda m: m.f,
        lambda m: put_into_builtins(rate_of_builtins=3.0)),
    "a function of Python that is replaced": (
        of_builtins("divmod(5, 2)[0]"), lambda m: m.f,
        lambda m: put_into_builtins(divmod=lambda x, y: (3.0, 0.0))),
    "a global that hides a function of Python": (
        of_builtins("divmod(5, 2)[0]"), lambda m: m.f, sets(divmod=lambda x, y: (3.0, 0.0))),
    "a global of another file": (
        lambda: module_of("signature_helpers", "SCALE = 2.0\ndef scaled(x): return x * SCALE"),
        lambda m: (lambda scaled: lambda x: scaled(x))(m.scaled), sets(SCALE=3.0)),
    "a module that finds its names": (
        lambda: module_of(
            "signature_lazy", "TABLE = {'LR': 2.0}\ndef __getattr__(n): return TABLE[n]"),
        lambda m: lambda x: x * m.LR, lambda m: m.TABLE.update(LR=3.0)),
}  # fmt: skip


PARTS = guards.singles()
"""Programs of the fuzzer `guards`, one for each of its holders, ways to read and places."""


def built(name: str) -> tuple[Any, ...]:
    """Return the function and the change of a row of `OBJECTS` or `PARTS`, and more arguments."""
    if name in PARTS:
        return guards.built(PARTS[name])
    build, use, change = OBJECTS[name]
    c = build()
    return use(c), lambda: change(c)
