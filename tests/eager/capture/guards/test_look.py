"""State that a captured function reaches by itself: a change of it is seen, or it is refused.

Each case makes a function and a change that the function's results depend on. Eagerly and captured
they must agree before and after, or the first captured call must raise.
"""

from __future__ import annotations

import abc
import argparse
import array
import builtins
import collections
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import inspect
import io
import ipaddress
import itertools
import json
import logging
import numbers
import operator
import os
import random
import re
import sys
import textwrap
import threading
import types
import unittest.mock
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn, optim

Fn = Callable[[ml.Tensor], Any]
Case = Callable[[], tuple[Fn, Callable[[], object]]]
T = TypeVar("T")

SEEN: list[Case] = []
REFUSED: list[Case] = []


def noticed(case: Case) -> Case:
    """A case whose change is seen."""
    SEEN.append(case)
    return case


def refused(case: Case) -> Case:
    """A case that cannot be captured."""
    REFUSED.append(case)
    return case


@pytest.fixture(autouse=True)
def weights() -> Iterator[ml.Arena]:
    arena = ml.Arena(ml.VM("signature"), "weights")
    with arena.allocating():
        yield arena


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.__name__)
def test_a_change_is_seen(case: Case) -> None:
    fn, change = case()
    captured, x = ml.capture(fn), ml.ones((2,))
    before = fn(x).tolist()
    for _ in range(3):
        assert captured(x).tolist() == before
    assert captured.signatures == 1
    change()
    after = fn(x).tolist()
    assert after != before
    for _ in range(3):
        assert captured(x).tolist() == after
    assert captured.signatures == 2


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_cannot_be_seen_is_refused(case: Case) -> None:
    fn, _ = case()
    captured = ml.capture(fn)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"a captured function reaches .*\.py:\d+"):
            captured(ml.ones((2,)))
    assert captured.signatures == 0


class Plain:
    """An object with the fields that it is given."""

    def __init__(self, **fields: Any) -> None:
        for name, field in fields.items():
            setattr(self, name, field)


def plain(**fields: Any) -> Any:
    return Plain(**fields)


@pytest.fixture(autouse=True)
def no_module_stays() -> Iterator[None]:
    """Else whoever asks all modules for their `__file__`, as hypothesis does, gets their errors."""
    before = sys.modules.copy()
    yield
    for name in sys.modules.keys() - before.keys():
        if name.startswith("signature_"):
            del sys.modules[name]


def module_of(name: str, code: str) -> Any:
    """A module of that code, which can be imported in the same test."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(textwrap.dedent(code), f"{name}.py", "exec"), vars(module))
    return module


# --- builtins ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def builtins_stay() -> Iterator[None]:
    before = vars(builtins).copy()
    yield
    vars(builtins).update(before)
    for name in vars(builtins).keys() - before.keys():
        delattr(builtins, name)


def put_into_builtins(**values: Any) -> None:
    vars(builtins).update(values)


@noticed
def a_number_in_builtins() -> Any:
    put_into_builtins(rate_of_builtins=2.0)
    module = module_of("signature_builtins", "def f(x): return x * rate_of_builtins")
    return module.f, lambda: put_into_builtins(rate_of_builtins=3.0)


@noticed
def a_field_of_an_object_in_builtins() -> Any:
    put_into_builtins(settings_of_builtins=plain(rate=2.0))
    module = module_of("signature_builtins", "def f(x): return x * settings_of_builtins.rate")
    return module.f, lambda: put_into_builtins(settings_of_builtins=plain(rate=3.0))


@noticed
def a_function_of_python_that_is_replaced() -> Any:
    module = module_of("signature_builtins", "def f(x): return x * divmod(5, 2)[0]")
    return module.f, lambda: put_into_builtins(divmod=lambda x, y: (3.0, 0.0))


@noticed
def a_global_that_hides_a_function_of_python() -> Any:
    module = module_of("signature_builtins", "def f(x): return x * divmod(5, 2)[0]")
    return module.f, lambda: setattr(module, "divmod", lambda x, y: (3.0, 0.0))


@refused
def a_generator_in_builtins() -> Any:
    put_into_builtins(batches_of_builtins=iter([2.0, 3.0]))
    module = module_of("signature_builtins", "def f(x): return x * next(batches_of_builtins)")
    return module.f, None


def test_a_tensor_kept_in_builtins_is_refused() -> None:
    put_into_builtins(last_of_builtins=None)
    module = module_of(
        "signature_builtins",
        """
        import builtins

        def f(x):
            builtins.last_of_builtins = y = x * 2.0
            return y if last_of_builtins is not None else x
        """,
    )
    with pytest.raises(CaptureError, match="kept in builtin 'last_of_builtins'"):
        ml.capture(module.f)(ml.ones((2,)))


# --- fields -----------------------------------------------------------------------------


@noticed
def a_namespace_of_argparse() -> Any:
    args = argparse.Namespace(lr=2.0)
    return lambda x: x * args.lr, lambda: setattr(args, "lr", 3.0)


class Tagged:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __str__(self) -> str:
        return self.tag


@noticed
def text_made_by_a_method_of_a_string() -> Any:
    c = Tagged("a")
    return lambda x: x * len("{}".format(c)), lambda: setattr(c, "tag", "abc")  # noqa: UP032


@noticed
def text_made_of_a_mapping() -> Any:
    c = Tagged("a")
    return lambda x: x * len("{c}".format_map({"c": c})), lambda: setattr(c, "tag", "abc")


@noticed
def a_special_method_of_a_list() -> Any:
    items = [1.0, 2.0]
    count = items.__len__
    return lambda x: x * count(), lambda: items.append(3.0)


@noticed
def what_finds_fields_of_an_object() -> Any:
    c = plain(lr=2.0)
    get = c.__getattribute__
    return lambda x: x * get("l" + "r"), lambda: setattr(c, "lr", 3.0)


@noticed
def an_object_as_one_of_its_base() -> Any:
    class Half(Plain):
        lr: float

        def rate(self) -> float:
            return self.lr / 2

    class Third(Half):
        def rate(self) -> float:
            return 0.0

    c = Third(lr=2.0)
    half: Any = super(Third, c)
    return lambda x: x * half.rate(), lambda: setattr(c, "lr", 3.0)


@noticed
def a_simple_namespace() -> Any:
    args = types.SimpleNamespace(inner=types.SimpleNamespace(lr=2.0))
    return lambda x: x * args.inner.lr, lambda: setattr(args.inner, "lr", 3.0)


@noticed
def two_simple_namespaces_compared() -> Any:
    a, b = types.SimpleNamespace(unnamed=1), types.SimpleNamespace(unnamed=1)
    return lambda x: x * (1.0 if a == b else 2.0), lambda: setattr(a, "unnamed", 2)


@noticed
def a_namespace_searched() -> Any:
    args, option = argparse.Namespace(), "".join(["fast", "er"])
    return lambda x: x * (1.0 if option in args else 2.0), lambda: setattr(args, option, 1)


@noticed
def a_constant_name_of_getattr() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * getattr(c, "lr"), lambda: setattr(c, "lr", 3.0)  # noqa: B009


@noticed
def a_default_of_getattr() -> Any:
    c, other = plain(inner=plain()), 5.0
    return lambda x: x * getattr(c.inner, "lr", other), lambda: setattr(c.inner, "lr", 3.0)


@noticed
def a_computed_name_of_getattr() -> Any:
    c, names = plain(rate_1=2.0, rate_2=3.0), ["rate"]

    def fn(x: ml.Tensor) -> Any:
        return x * sum(getattr(c, f"{names[0]}_{i}") for i in (1, 2))

    return fn, lambda: setattr(c, "rate_2", 4.0)


@noticed
def a_name_that_a_method_returns() -> Any:
    c = plain(which=lambda name: name + "r", lr=2.0)
    return lambda x: x * getattr(c, c.which("l"), 1.0), lambda: setattr(c, "lr", 3.0)


@noticed
def getattr_itself_as_a_value() -> Any:
    c, get = plain(lr=2.0), functools.partial(getattr)
    return lambda x: x * get(c, "".join("lr")), lambda: setattr(c, "lr", 3.0)


@noticed
def vars_of_an_object() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * sum(vars(c).values()), lambda: setattr(c, "lr", 3.0)


@noticed
def the_dict_of_an_object() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * sum(c.__dict__.values()), lambda: setattr(c, "lr", 3.0)


@noticed
def an_attrgetter() -> Any:
    c, get = plain(lr=2.0), operator.attrgetter("l" + "r")
    return lambda x: x * get(c), lambda: setattr(c, "lr", 3.0)


@noticed
def an_attrgetter_made_inside() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * operator.attrgetter("lr")(c), lambda: setattr(c, "lr", 3.0)


@noticed
def a_copy_and_its_fields() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * sum(copy.copy(c).__dict__.values()), lambda: setattr(c, "lr", 3.0)


@noticed
def a_format_of_a_field() -> Any:
    c = plain(lr=2.0)
    return lambda x: x * float("{0.lr}".format(c)), lambda: setattr(c, "lr", 3.0)  # noqa: UP030, UP032


@noticed
def a_library_that_looks_into_objects() -> Any:
    c = plain(lr=2.0)

    def fn(x: ml.Tensor) -> Any:
        return x * json.loads(json.dumps(c, default=lambda each: list(each.__dict__.values())))[0]

    return fn, lambda: setattr(c, "lr", 3.0)


@noticed
def a_class_pattern() -> Any:
    @dataclasses.dataclass
    class Point:
        left: float

    point = Point(2.0)

    def fn(x: ml.Tensor) -> Any:
        match point:
            case Point(2.0):
                return x
            case _:
                return x * 2

    return fn, lambda: setattr(point, "left", 3.0)


@noticed
def an_inherited_slot() -> Any:
    class Base:
        __slots__ = ("lr",)

    class Derived(Base):
        __slots__ = ("other",)

    c: Any = Derived()
    c.lr = 2.0
    return lambda x: x * c.lr, lambda: setattr(c, "lr", 3.0)


@noticed
def a_private_slot_and_a_single_one() -> Any:
    class Base:
        __slots__ = "__lr"

        def rate(self) -> float:
            return self.__lr

        def set(self, lr: float) -> None:
            self.__lr = lr

    c = Base()
    c.set(2.0)
    return lambda x: x * c.rate(), lambda: c.set(3.0)


@noticed
def an_object_within_an_object_without_a_dict() -> Any:
    class Pair:
        __slots__ = ("left", "right")

    pair: Any = Pair()
    inner = plain(lr=2.0)
    pair.left, pair.right = inner, [inner]
    return lambda x: x * pair.right[0].lr, lambda: setattr(inner, "lr", 3.0)


@noticed
def a_slot_that_gets_a_value() -> Any:
    class C:
        __slots__ = ("lr",)

    c = C()
    return lambda x: x * getattr(c, "lr", 2.0), lambda: setattr(c, "lr", 3.0)


@noticed
def a_field_of_a_dataclass() -> Any:
    @dataclasses.dataclass
    class Config:
        lr: float = 2.0

    config = Config()
    return lambda x: x * config.lr, lambda: setattr(config, "lr", 3.0)


@noticed
def two_dataclasses_compared() -> Any:
    @dataclasses.dataclass
    class Config:
        unnamed: float = 2.0

    a, b = Config(), Config()
    return lambda x: x * (1.0 if a == b else 2.0), lambda: setattr(a, "unnamed", 3.0)


@noticed
def a_dataclass_compared_with_a_new_one() -> Any:
    @dataclasses.dataclass(order=True)
    class Config:
        unnamed: float = 2.0

    a = Config()
    return lambda x: x * (2.0 if a > Config(2.5) else 1.0), lambda: setattr(a, "unnamed", 3.0)


@noticed
def a_dataclass_as_a_dict() -> Any:
    @dataclasses.dataclass
    class Config:
        unnamed: float = 2.0

    a = Config()
    return (lambda x: x * sum(dataclasses.asdict(a).values()), lambda: setattr(a, "unnamed", 3.0))


@noticed
def a_dataclass_as_text() -> Any:
    @dataclasses.dataclass
    class Config:
        unnamed: float = 2.0

    a = Config()
    return lambda x: x * float(f"{a}"[-4:-1]), lambda: setattr(a, "unnamed", 3.0)


@noticed
def a_simple_namespace_as_text() -> Any:
    a = types.SimpleNamespace(unnamed=2.0)
    return lambda x: x * float(repr(a)[-4:-1]), lambda: setattr(a, "unnamed", 3.0)


@noticed
def an_enum_that_is_replaced() -> Any:
    class Mode(enum.Enum):
        ON = 1
        OFF = 2

    c = plain(mode=Mode.ON)
    return lambda x: x * c.mode.value, lambda: setattr(c, "mode", Mode.OFF)


@noticed
def a_field_of_an_enum_member() -> Any:
    class Mode(enum.Enum):
        ON = 1

        @property
        def rate(self) -> float:
            return self._rate  # type: ignore[attr-defined, no-any-return]

    Mode.ON._rate = 2.0  # type: ignore[attr-defined]
    return lambda x: x * Mode.ON.rate, lambda: setattr(Mode.ON, "_rate", 3.0)


@noticed
def a_field_of_an_integer() -> Any:
    class Size(int):
        rate = 2.0

    size = Size(3)
    return lambda x: x * size * size.rate, lambda: setattr(size, "rate", 3.0)


@noticed
def an_object_becomes_one_of_another_class() -> Any:
    class One:
        def rate(self) -> float:
            return 1.0

    class Two:
        def rate(self) -> float:
            return 2.0

    c: Any = One()
    return lambda x: x * c.rate(), lambda: setattr(c, "__class__", Two)


# --- what Python calls by itself --------------------------------------------------------


def special(**methods: Any) -> Any:
    """An object with a hidden field and these special methods."""
    kind = type("Special", (), {f"__{name}__": method for name, method in methods.items()})
    c = kind()
    c.hidden = 2.0
    return c, lambda: setattr(c, "hidden", 3.0)


@noticed
def a_getitem() -> Any:
    c, change = special(getitem=lambda self, i: self.hidden)
    return lambda x: x * c[0], change


@noticed
def a_getattr() -> Any:
    c, change = special(getattr=lambda self, name: self.hidden)
    return lambda x: x * c.anything, change


@noticed
def a_getattribute() -> Any:
    c, change = special(getattribute=lambda self, name: object.__getattribute__(self, "hidden"))
    return lambda x: x * c.anything, change


@noticed
def a_getattr_that_delegates() -> Any:
    inner = plain(lr=2.0)

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    c = Proxy()
    return lambda x: x * c.lr, lambda: setattr(inner, "lr", 3.0)


@noticed
def an_iter() -> Any:
    c, change = special(iter=lambda self: iter([self.hidden]))
    return lambda x: x * sum(c), change


@noticed
def a_next() -> Any:
    class Once:
        def __init__(self) -> None:
            self.values = [2.0]

        def __iter__(self) -> Any:
            return (value for value in self.values)

    c = Once()
    return lambda x: x * sum(c), lambda: c.values.append(1.0)


@noticed
def a_len() -> Any:
    c, change = special(len=lambda self: int(self.hidden))
    return lambda x: x * len(c), change


@noticed
def a_bool() -> Any:
    c, change = special(bool=lambda self: self.hidden > 2)
    return lambda x: x * (2.0 if c else 1.0), change


@noticed
def a_call() -> Any:
    c, change = special(call=lambda self, x: x * self.hidden)
    return lambda x: c(x), change


@noticed
def an_operator() -> Any:
    c, change = special(rmul=lambda self, x: x * self.hidden, mul=lambda self, x: x * self.hidden)
    return lambda x: c * x, change


@noticed
def a_comparison() -> Any:
    c, change = special(lt=lambda self, other: self.hidden < other)
    return lambda x: x * (1.0 if c < 2.5 else 2.0), change


@noticed
def a_text() -> Any:
    c, change = special(str=lambda self: f"{self.hidden}")
    return lambda x: x * float(str(c)), change


@noticed
def a_format() -> Any:
    c, change = special(format=lambda self, spec: str(self.hidden))
    return lambda x: x * float(f"{c}"), change


@noticed
def a_context() -> Any:
    c, change = special(enter=lambda self: self.hidden, exit=lambda self, *_: None)

    def fn(x: ml.Tensor) -> Any:
        with c as rate:
            return x * rate

    return fn, change


@noticed
def a_mapping_unpacked() -> Any:
    class Options:
        scale = "rate"

        def keys(self) -> list[str]:
            return [self.scale]

        def __getitem__(self, name: str) -> float:
            return {"rate": 2.0, "other": 3.0}[name]

    def scaled(x: ml.Tensor, *, rate: float = 1.0, other: float = 1.0) -> ml.Tensor:
        return x * rate + other

    c = Options()
    return lambda x: scaled(x, **c), lambda: setattr(c, "scale", "other")


@noticed
def an_abstract_mapping() -> Any:
    class Options(Mapping[str, float]):
        def __init__(self) -> None:
            self.data = {"lr": 2.0}

        def __getitem__(self, name: str) -> float:
            return self.data[name]

        def __iter__(self) -> Iterator[str]:
            return iter(self.data)

        def __len__(self) -> int:
            return len(self.data)

    c = Options()
    return lambda x: x * sum(c.values()), lambda: c.data.update(lr=3.0)


@noticed
def a_dict_of_a_library_class() -> Any:
    c = collections.UserDict({"lr": 2.0})
    return lambda x: x * c["lr"], lambda: c.update(lr=3.0)


@noticed
def a_property_of_a_base() -> Any:
    class Base:
        @property
        def rate(self) -> float:
            return self._hidden

        _hidden = 2.0

    class Derived(Base):
        pass

    c = Derived()
    return lambda x: x * c.rate, lambda: setattr(Base, "_hidden", 3.0)


@noticed
def a_descriptor() -> Any:
    class Field:
        rate = 2.0

        def __get__(self, owner: Any, kind: Any) -> float:
            return self.rate

    class C:
        lr = Field()

    c, field = C(), vars(C)["lr"]
    return lambda x: x * c.lr, lambda: setattr(field, "rate", 3.0)


@noticed
def a_setter() -> Any:
    class C:
        factor = 2.0

        @property
        def rate(self) -> float:
            return self._rate

        @rate.setter
        def rate(self, value: float) -> None:
            self._rate = value * self.factor

    c = C()
    c.rate = 1.0

    def fn(x: ml.Tensor) -> Any:
        c.rate = 1.0
        return x * c.rate

    def change() -> None:
        C.factor = 3.0

    return fn, change


@noticed
def a_class_attribute() -> Any:
    class C:
        lr = 2.0

    c = C()
    return lambda x: x * c.lr, lambda: setattr(C, "lr", 3.0)


@noticed
def an_attribute_of_a_base_class() -> Any:
    class Base:
        lr = 2.0

    class Middle(Base): ...

    class C(Middle): ...

    return lambda x: x * C.lr, lambda: setattr(Base, "lr", 3.0)


@noticed
def a_class_made_inside() -> Any:
    factor = [2.0]

    class C:
        def __init__(self) -> None:
            self.lr = factor[0]

    return lambda x: x * C().lr, lambda: factor.append(factor.pop() + 1)


@noticed
def a_class_made_inside_of_an_object_s_type() -> Any:
    factor = [2.0]

    class C:
        def __init__(self) -> None:
            self.lr = factor[0]

    c = C()
    return lambda x: x * type(c)().lr, lambda: factor.append(factor.pop() + 1)


@noticed
def a_generic_class_made_inside() -> Any:
    factor = [2.0]

    class C(Generic[T]):
        def __init__(self) -> None:
            self.lr = factor[0]

    specialized = C[int]
    return lambda x: x * specialized().lr, lambda: factor.append(factor.pop() + 1)


@noticed
def an_attribute_of_a_metaclass() -> Any:
    class Meta(type):
        lr = 2.0

    class C(metaclass=Meta): ...

    return lambda x: x * C.lr, lambda: setattr(Meta, "lr", 3.0)


@noticed
def a_method_of_a_base_by_super() -> Any:
    class Base:
        def rate(self) -> float:
            return 2.0

    class C(Base):
        def rate(self) -> float:
            return super().rate() + 1

    c = C()
    return lambda x: x * c.rate(), lambda: setattr(Base, "rate", lambda self: 3.0)


@noticed
def what_a_class_made_inside_calls() -> Any:
    factor = [2.0]

    class Base:
        def __init_subclass__(cls) -> None:
            cls.rate = factor[0]  # type: ignore[attr-defined]

    def fn(x: ml.Tensor) -> Any:
        class Derived(Base): ...

        return x * Derived.rate  # type: ignore[attr-defined]

    return fn, lambda: factor.append(factor.pop() + 1)


@noticed
def a_method_that_is_replaced() -> Any:
    class C:
        def rate(self) -> float:
            return 2.0

    c = C()
    return lambda x: x * c.rate(), lambda: setattr(C, "rate", lambda self: 3.0)


@noticed
def the_code_of_a_function() -> Any:
    def rate() -> float:
        return 2.0

    def other() -> float:
        return 3.0

    return lambda x: x * rate(), lambda: setattr(rate, "__code__", other.__code__)


@noticed
def a_field_of_a_function() -> Any:
    def rate() -> float:
        return rate.value  # type: ignore[attr-defined, no-any-return]

    rate.value = 2.0  # type: ignore[attr-defined]
    return lambda x: x * rate(), lambda: setattr(rate, "value", 3.0)


@noticed
def a_default_that_is_changed() -> Any:
    def rate(options: Any = types.MappingProxyType({"lr": [2.0]})) -> float:
        return options["lr"][0]  # type: ignore[no-any-return]

    defaults: Any = rate.__defaults__
    return lambda x: x * rate(), lambda: defaults[0]["lr"].insert(0, 3.0)


# --- what is changed in place -----------------------------------------------------------


@noticed
def a_set() -> Any:
    c = {1, 2}
    return lambda x: x * len(c), lambda: c.add(3)


@noticed
def a_set_of_objects() -> Any:
    inner = plain(lr=2.0)
    c = {inner}
    return lambda x: x * sum(each.lr for each in c), lambda: setattr(inner, "lr", 3.0)


@noticed
def a_deque() -> Any:
    c = collections.deque([2.0, 3.0])
    return lambda x: x * c[0], lambda: c.rotate()


@noticed
def a_deque_of_another_length() -> Any:
    c = plain(last=collections.deque([2.0], 1))
    return (
        lambda x: x * (c.last.maxlen or 5),
        lambda: setattr(c, "last", collections.deque([2.0])),
    )


@noticed
def an_ordered_dict() -> Any:
    c = collections.OrderedDict(a=2.0, b=3.0)
    return lambda x: x * next(iter(c.values())), lambda: c.move_to_end("a")


@noticed
def a_default_dict() -> Any:
    c: Any = collections.defaultdict(lambda: 2.0)

    def change() -> None:
        c.default_factory = lambda: 3.0

    return lambda x: x * c.copy()["lr"], change


@noticed
def a_counter_and_a_chain() -> Any:
    c = collections.Counter("aab")
    chain = collections.ChainMap({}, c)
    return lambda x: x * chain["a"], lambda: c.update("a")


@noticed
def a_list_of_a_class_of_one_s_own() -> Any:
    class Values(list[float]):
        factor = 2.0

    c = Values([1.0])
    return lambda x: x * c[0] * c.factor, lambda: setattr(c, "factor", 3.0)


@noticed
def an_array_of_numpy() -> Any:
    c = np.ones(3)
    return lambda x: x * float(c[1]), lambda: c.__setitem__(1, 2.0)


@noticed
def an_array_of_objects() -> Any:
    inner = plain(lr=2.0)
    c = np.array([inner], dtype=object)
    return lambda x: x * c[0].lr, lambda: setattr(inner, "lr", 3.0)


@noticed
def an_array_of_bytes() -> Any:
    c = array.array("d", [2.0]), bytearray(b"a")
    return lambda x: x * c[0][0] * c[1][0], lambda: c[1].__setitem__(0, 0)


@noticed
def a_named_tuple_of_lists() -> Any:
    class Options(NamedTuple):
        rates: list[float]

    c = Options([2.0])
    return lambda x: x * c.rates[0], lambda: c.rates.insert(0, 3.0)


@noticed
def a_weak_reference() -> Any:
    inner = plain(lr=2.0)
    c = weakref.ref(inner)
    return lambda x: x * c().lr, lambda: setattr(inner, "lr", 3.0)  # type: ignore[union-attr]


@noticed
def a_bound_method_of_a_list() -> Any:
    c = [2.0, 3.0]
    get = c.__getitem__
    return lambda x: x * get(0), lambda: c.reverse()


@noticed
def a_partial_call() -> Any:
    c = {"lr": 2.0}
    get = functools.partial(c.get, "lr")
    return lambda x: x * get(), lambda: c.update(lr=3.0)


@noticed
def what_an_array_is_a_view_of() -> Any:
    whole = np.ones(3)
    part: Any = whole[:2]
    return lambda x: x * float(part.base[2]), lambda: whole.__setitem__(2, 2.0)


@noticed
def the_properties_of_a_class_of_one_s_own() -> Any:
    class Rate(property):
        pass

    factor = [2.0]

    class C:
        rate = Rate(lambda self: factor[0])

    c = C()
    return lambda x: x * c.rate, lambda: factor.insert(0, 3.0)


@noticed
def a_field_of_a_mock() -> Any:
    c = unittest.mock.MagicMock(lr=2.0)
    return lambda x: x * c.lr, lambda: setattr(c, "lr", 3.0)


@noticed
def a_class_that_an_abstract_one_registers() -> Any:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    c = plain()
    return lambda x: x * (2.0 if isinstance(c, Abstract) else 1.0), lambda: Abstract.register(Plain)


@noticed
def a_class_that_a_library_s_abstract_one_registers() -> Any:
    class C:
        pass

    c = C()
    return lambda x: x * (2.0 if isinstance(c, numbers.Number) else 1.0), (
        lambda: numbers.Number.register(C)
    )


# --- functions elsewhere ----------------------------------------------------------------


@noticed
def a_global_of_another_file() -> Any:
    helpers = module_of("signature_helpers", "SCALE = 2.0\ndef scaled(x): return x * SCALE")
    scaled = helpers.scaled
    return lambda x: scaled(x), lambda: setattr(helpers, "SCALE", 3.0)


@noticed
def a_global_of_a_file_that_another_file_imports() -> Any:
    inner = module_of("signature_inner", "SCALE = [2.0]\ndef scale(): return SCALE[0]")
    helpers = module_of(
        "signature_outer", "import signature_inner\ndef f(x): return x * signature_inner.scale()"
    )
    return lambda x: helpers.f(x), lambda: inner.SCALE.insert(0, 3.0)


@noticed
def a_module_imported_inside() -> Any:
    helpers = module_of("signature_late", "SCALE = 2.0")

    def fn(x: ml.Tensor) -> Any:
        import signature_late  # type: ignore[import-not-found]

        return x * signature_late.SCALE

    return fn, lambda: setattr(helpers, "SCALE", 3.0)


@noticed
def a_module_of_a_package_imported_inside() -> Any:
    package = module_of("signature_package", "")
    package.__path__ = []
    inner = module_of("signature_package.inner", "SCALE = 2.0")
    package.inner = inner
    helpers = module_of(
        "signature_package.helpers",
        """
        __package__ = "signature_package"
        def scale():
            from . import inner
            from .inner import SCALE
            return inner.SCALE + SCALE
        """,
    )
    return lambda x: x * helpers.scale(), lambda: setattr(inner, "SCALE", 3.0)


@noticed
def a_module_that_finds_its_names() -> Any:
    helpers = module_of(
        "signature_lazy", "TABLE = {'LR': 2.0}\ndef __getattr__(n): return TABLE[n]"
    )
    return lambda x: x * helpers.LR, lambda: helpers.TABLE.update(LR=3.0)


@noticed
def a_module_s_global_by_a_computed_name() -> Any:
    helpers = module_of("signature_named", "RATE_1 = 2.0")
    return lambda x: x * getattr(helpers, f"RATE_{1}"), lambda: setattr(helpers, "RATE_1", 3.0)


@noticed
def a_variable_around_a_function_of_another_file() -> Any:
    helpers = module_of(
        "signature_closure",
        """
        def make():
            scale = 2.0
            def set(value):
                nonlocal scale
                scale = value
            return lambda x: x * scale, set
        """,
    )
    scaled, change = helpers.make()
    return lambda x: scaled(x), lambda: change(3.0)


@noticed
def a_decorated_function_of_another_file() -> Any:
    helpers = module_of(
        "signature_decorated",
        """
        import contextlib, functools
        SCALE = 2.0
        @contextlib.contextmanager
        def scaling():
            yield SCALE
        """,
    )

    def fn(x: ml.Tensor) -> Any:
        with helpers.scaling() as scale:
            return x * scale

    return fn, lambda: setattr(helpers, "SCALE", 3.0)


@noticed
def a_captured_function_within() -> Any:
    c = plain(lr=2.0)
    inner = ml.capture(lambda x: x * c.lr)
    return lambda x: inner(x), lambda: setattr(c, "lr", 3.0)


@noticed
def a_differentiated_function_within() -> Any:
    c = plain(lr=2.0)
    gradient = ml.grad(lambda x: ml.sum(x * c.lr))
    return lambda x: gradient(x), lambda: setattr(c, "lr", 3.0)


@noticed
def a_variable_of_the_environment() -> Any:
    os.environ["SIGNATURE_RATE"] = "2.0"
    return (
        lambda x: x * float(os.environ["SIGNATURE_RATE"]),
        lambda: os.environ.update(SIGNATURE_RATE="3.0"),
    )


@noticed
def a_cached_function_of_arguments() -> Any:
    @functools.cache
    def doubled(rate: float) -> float:
        return 2 * rate

    c = plain(lr=2.0)
    return lambda x: x * doubled(c.lr), lambda: setattr(c, "lr", 3.0)


# --- of mlvm ----------------------------------------------------------------------------


@noticed
def a_plain_field_of_a_module() -> Any:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            self.inner = nn.LayerNorm(2)
            self.options = {"lr": [2.0]}

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return x * self.options["lr"][0]

    model = Scaled()
    return lambda x: model(x), lambda: model.options["lr"].insert(0, 3.0)


@noticed
def a_field_of_a_layer_that_only_mlvm_reads() -> Any:
    model = nn.LayerNorm(2)
    return lambda x: model(x * ml.arange(2.0)), lambda: setattr(model, "eps", 3.0)


@noticed
def a_hook_that_an_optimizer_calls() -> Any:
    class Boosted(optim.SGD):
        boost = 1.0

        def _step(self, hyper: Any, param: Any, g: Any, state: Any, scalars: Any) -> None:
            super()._step(hyper, param, g * self.boost, state, scalars)

    def stepped(x: ml.Tensor) -> ml.Tensor:
        w = ml.zeros((2,))
        w *= 0.0
        optimizer.update({"w": x})
        param = ml.copy(params["w"])
        params["w"] *= 0.0
        return param + w

    params = {"w": ml.zeros((2,))}
    optimizer = Boosted(params, 1.0)
    return stepped, lambda: setattr(optimizer, "boost", 2.0)


# --- what is refused --------------------------------------------------------------------


@refused
def a_view_of_bytes() -> Any:
    numbers = memoryview(bytearray([2, 3]))
    return lambda x: x * numbers[0], None


@refused
def a_module_found_by_name() -> Any:
    return lambda x: x * importlib.import_module("math").pi, None


@refused
def an_iterator() -> Any:
    numbers = itertools.count(2)
    return lambda x: x * next(numbers), None


@refused
def an_iterator_of_a_list() -> Any:
    numbers = plain(values=iter([2.0, 3.0]))
    return lambda x: x * next(numbers.values), None


@refused
def a_generator() -> Any:
    numbers = (each for each in range(2, 9))
    return lambda x: x * next(numbers), None


@refused
def random_numbers_of_numpy() -> Any:
    rng = np.random.default_rng(0)
    return lambda x: x * rng.random(), None


@refused
def random_numbers_of_python() -> Any:
    rng = random.Random(0)
    return lambda x: x * rng.random(), None


@refused
def random_numbers_of_python_s_own() -> Any:
    return lambda x: x * random.random(), None


@refused
def a_bound_method_of_random_numbers() -> Any:
    draw = np.random.default_rng(0).random
    return lambda x: x * draw(), None


@refused
def a_file() -> Any:
    file = io.StringIO("2\n3\n")
    return lambda x: x * float(file.readline()), None


@refused
def a_variable_of_the_context() -> Any:
    rate = contextvars.ContextVar("rate", default=2.0)
    return lambda x: x * rate.get(), None


@refused
def an_object_of_a_class_with_hidden_state() -> Any:
    class Numbers(itertools.count):  # type: ignore[type-arg]
        factor = 2.0

    numbers = Numbers(2)
    return lambda x: x * next(numbers), None


@refused
def a_number_of_ctypes() -> Any:
    number = ctypes.c_double(2.0)
    return lambda x: x * number.value, None


@refused
def a_structure_of_ctypes() -> Any:
    class Options(ctypes.Structure):
        _fields_ = (("lr", ctypes.c_double),)

    options = Options(2.0)
    return lambda x: x * options.lr, None


@refused
def a_pointer_and_an_array_of_ctypes() -> Any:
    array = (ctypes.c_double * 2)(1.0, 2.0)
    pointer = ctypes.pointer(array)
    return lambda x: x * pointer.contents[0], None


@refused
def the_names_of_a_dtype() -> Any:
    dtype = np.dtype([("a", "f4")])
    names: Any = dtype.names
    return lambda x: x * len(dtype.names or names), None


@refused
def the_names_of_the_items_of_a_dtype() -> Any:
    dtype = np.dtype(([("a", "f4")], (2,)))
    return lambda x: x * len(dtype.base.names or ()), None


@refused
def an_error_s_arguments() -> Any:
    error = ValueError(2.0)
    return lambda x: x * error.args[0], None


@refused
def a_view_of_a_dict() -> Any:
    values = {"lr": 2.0}.values()
    return lambda x: x * sum(values), None


@refused
def globals_by_name() -> Any:
    return lambda x: x * globals()["RATE"], None


@refused
def an_evaluated_text() -> Any:
    return lambda x: x * eval("RATE"), None


@refused
def a_cached_function_of_a_global() -> Any:
    @functools.cache
    def doubled() -> float:
        return 2 * RATE

    return lambda x: x * doubled(), None


@refused
def a_cached_function_of_another_s_variable() -> Any:
    rate = [2.0]

    @functools.lru_cache(maxsize=4)
    def doubled() -> float:
        return inner() * 2

    def inner() -> float:
        return rate[0]

    return lambda x: x * doubled(), None


@refused
def a_cached_function_of_options() -> Any:
    args = argparse.Namespace(lr=2.0)

    @functools.cache
    def doubled() -> float:
        return 2.0 * float(args.lr)

    return lambda x: x * doubled(), None


RATE = 2.0


def test_there_are_cases_enough() -> None:
    assert len(SEEN) >= 60
    assert len(REFUSED) >= 15


def test_a_refusal_says_what_and_where_and_what_to_do() -> None:
    trainer = plain(options={"rng": 1}, source=plain(numbers=iter([1.0])))

    def step(x: ml.Tensor) -> Any:
        return x * next(trainer.source.numbers)

    with pytest.raises(CaptureError) as caught:
        ml.capture(step)(ml.ones((2,)))
    line = step.__code__.co_firstlineno
    assert str(caught.value) == (
        "a captured function reaches an object of list_iterator, whose state is hidden, by "
        "'numbers' of 'source' of 'trainer' of "
        "test_a_refusal_says_what_and_where_and_what_to_do.<locals>.step "
        f"({Path(__file__).name}:{line}): use it outside, and give what comes of it as an argument"
    )


def test_an_argument_that_cannot_be_seen_is_refused() -> None:
    captured = ml.capture(lambda x, numbers: x * next(numbers))
    with pytest.raises(CaptureError, match="reaches an object of count, whose state is hidden"):
        captured(ml.ones((2,)), itertools.count())


# --- what no code reads is not looked at ------------------------------------------------


@dataclasses.dataclass
class State:
    """A training loop's own, of which a step reads two fields."""

    model: nn.Module
    optimizer: optim.Optimizer
    steps: int = 0
    history: list[float] = dataclasses.field(default_factory=list)


class Loop:
    """A training loop with all that such loops carry around."""

    def __init__(self, kind: str) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), ml.gelu, nn.Dropout(0.5), nn.Linear(8, 1))
        optimizers: dict[str, Callable[[], optim.Optimizer]] = {
            "sgd": lambda: optim.SGD(self.model, 0.1, momentum=0.9),
            "adam": lambda: optim.Adam(self.model, optim.cosine(0.1, 20, warmup_steps=2)),
            "adamw": lambda: optim.AdamW(self.model, optim.one_cycle(0.1, 20)),
        }
        self.optimizer = optimizers[kind]()
        self.state = State(self.model, self.optimizer)
        self.log = logging.getLogger("signature")
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(0)
        self.file = io.StringIO()
        self.batches = iter(range(100))
        self.steps = 0
        self.cache: dict[int, float] = {}
        self.clip = 1.0
        self.progress = types.SimpleNamespace(done=0, clip=1.0)

    def loss(self, model: nn.Module, x: ml.Tensor) -> ml.Tensor:
        return ml.mean(model(x) ** 2 + 0.0 * ml.random.normal((1,)))

    def step(self, x: ml.Tensor) -> ml.Tensor:
        with self.lock:
            self.log.debug("a step")
            if x.shape[-1] != 4:
                raise ValueError(f"{self.state} has no use for {x.type}")
            clip = getattr(self, "clip", None) or self.progress.clip
            loss, grads = ml.value_and_grad(self.loss)(self.state.model, x)
            self.state.optimizer.update(optim.clip_by_global_norm(grads, clip))
        return loss

    def after(self, loss: float) -> None:
        """Do the other work of a training loop."""
        self.steps += 1
        self.state.steps += 1
        self.state.history.append(loss)
        self.cache[self.steps] = loss
        self.progress.done += 1
        self.log.info("loss %s", loss)
        self.log.setLevel(logging.INFO if self.steps % 2 else logging.WARNING)
        self.file.write(str(loss))
        self.rng.normal()
        next(self.batches)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_training_step_is_recorded_once(kind: str, weights: ml.Arena) -> None:
    losses: list[list[float]] = []
    for wrap in (ml.capture, lambda fn: fn):
        ml.random.seed(0)
        loop = Loop(kind)
        step: Any = wrap(loop.step)
        batch = ml.Arena(weights.vm, "batch")
        losses.append([])
        for i in range(10):
            with batch:
                losses[-1].append(float(step(ml.full((2, 4), float(i)))))
            loop.after(losses[-1][-1])
        if wrap is ml.capture:
            assert step.signatures == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "value",
    [
        *(decimal.Decimal(2), fractions.Fraction(2), datetime.date(2, 2, 2), uuid.UUID(int=2)),
        *(Path("2"), ipaddress.ip_address(2), re.compile("2"), re.IGNORECASE, np.dtype("f2")),
        *(np.float32(2), inspect.signature(plain), plain.__code__, list[int], int | None, T, ...),
        *(operator.itemgetter(0), np.add, np.mean, dict.fromkeys, str.join, NotImplemented),
        *(logging.getLogger("2"), threading.Lock(), ml.float32, sys.float_info, np.dtype("V2")),
    ],
    ids=lambda value: type(value).__qualname__,
)
def test_what_cannot_change_is_not_refused(value: Any) -> None:
    captured = ml.capture(lambda x: x * len(repr((value, 2))) * 0 + 2)
    for _ in range(3):
        assert captured(ml.ones((1,))).tolist() == [2]
    assert captured.signatures == 1


def test_a_numpy_scalar_and_an_array_are_known_by_value() -> None:
    c = plain(rate=np.float64(2.0), table=np.ones(3), options=frozenset({1}))
    captured = ml.capture(lambda x: x * float(c.rate) * float(c.table[0]) * len(c.options))
    for _ in range(3):
        captured(ml.ones((2,)))
        c.rate, c.table, c.options = np.float64(2.0), np.ones(3), frozenset({1})
    assert captured.signatures == 1


def test_an_unused_global_and_an_unnamed_field_are_not_looked_at() -> None:
    c = plain(used=2.0, numbers=iter([1]), other=0)
    captured = ml.capture(lambda x: x * c.used)
    for i in range(10):
        captured(ml.ones((2,)))
        c.other = i
    assert captured.signatures == 1


def test_a_bound_method_and_a_partial_call_are_known_by_what_they_are_of() -> None:
    c = plain(scaled=lambda x, scale: x * scale, lr=2.0)

    class Holder:
        def loss(self, x: ml.Tensor) -> Any:
            return x * c.lr

    holder = Holder()
    captured = ml.capture(lambda x, *fns: [fn(x) for fn in fns])
    for _ in range(3):
        captured(ml.ones((2,)), holder.loss, functools.partial(c.scaled, scale=2.0))
    assert captured.signatures == 1
    captured(ml.ones((2,)), holder.loss, functools.partial(c.scaled, scale=3.0))
    captured(ml.ones((2,)), Holder().loss, functools.partial(c.scaled, scale=3.0))
    assert captured.signatures == 3


def test_nothing_of_an_object_s_own_is_called_to_look_into_it() -> None:
    class Strict:
        lr = 2.0

        def __getattribute__(self, name: str) -> Any:
            assert name == "lr"
            return object.__getattribute__(self, name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        def __hash__(self) -> int:
            raise AssertionError

    c = Strict()
    captured = ml.capture(lambda x: x * c.lr)
    for _ in range(2):
        assert captured(ml.ones((2,))).tolist() == [2, 2]


def test_printing_and_the_standard_streams_are_no_reason_to_record_again() -> None:
    c = plain(steps=0, numbers=iter([1]))

    @ml.capture
    def step(x: ml.Tensor) -> Any:
        print("a step", file=sys.stderr)
        return x * (2.0 if os.path.exists(os.devnull) else c.scale)

    for _ in range(3):
        step(ml.ones((2,)))
        c.steps += 1
    assert step.signatures == 1


@pytest.mark.parametrize("make", [slice, range])
def test_equal_slices_and_ranges_are_one_value(make: Any) -> None:
    captured = ml.capture(lambda x, part: x[part.start : part.stop] * 2.0)
    x = ml.asarray([1.0, 2.0, 3.0])
    for _ in range(3):
        assert captured(x, make(0, 2)).tolist() == [2, 4]
    assert captured(x, make(1, 2)).tolist() == [4]
    assert captured.signatures == 2


@pytest.mark.parametrize("draw", [random.random, np.random.default_rng(0).random])
def test_a_generator_of_random_numbers_says_how_to_draw(draw: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"whose state is hidden.*: draw with ml\.random"):
        ml.capture(lambda x: x * draw())(ml.ones(2))
