"""Changes of what a function reaches: each row builds an object and a function that reads it.

A row is the object, a function of it that returns the function, and the change, which makes the
function compute another result.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import mlvm.eager as ml
from tests.rows import table

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
    __slots__ = ("lr", "more")

    def __init__(self, **fields: Any) -> None:
        for name, field in fields.items():
            setattr(self, name, field)


@dataclasses.dataclass(order=True)
class Config:
    lr: float = 2.0


class Options(NamedTuple):
    rates: list[float]


class Mode(enum.Enum):
    ON = 1
    OFF = 2


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


class Mapped(Mapping[str, float]):
    def __init__(self) -> None:
        self.data = {"lr": 2.0}

    def __getitem__(self, name: str) -> float:
        return self.data[name]

    def __iter__(self) -> Any:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


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


def matched(point: Any) -> Fn:
    def fn(x: ml.Tensor) -> Any:
        match point:
            case Config(2.0):
                return x
            case _:
                return x * 2

    return fn


def entered(c: Any) -> Fn:
    def fn(x: ml.Tensor) -> Any:
        with c as rate:
            return x * rate

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


OBJECTS: dict[str, Row] = table(globals(), "OBJECTS")


def built(name: str) -> tuple[Fn, Callable[[], object]]:
    """Return the function and the change of a row."""
    build, use, change = OBJECTS[name]
    c = build()
    return use(c), lambda: change(c)
