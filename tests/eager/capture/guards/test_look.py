"""State that a captured function reaches by itself: a change of it is seen, or it is refused.

Each case makes a function and a change that the function's results depend on. Eagerly and captured
they must agree before and after, or the first captured call must raise. Most are rows of tables:
`PARTS` of the fuzzer `guards`, `OBJECTS` in changes.py, and `HIDDEN` below, of objects whose state
no guard can see.
"""

from __future__ import annotations

import argparse
import contextvars
import ctypes
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
import logging
import operator
import os
import random
import re
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn, optim
from tests.brief import Fn, Patch, cases, refuses
from tests.eager.capture.guards.changes import (
    OBJECTS,
    PARTS,
    Plain,
    T,
    built,
    module_of,
    of_builtins,
    plain,
    put_into_builtins,
)

Case = Callable[[], tuple[Fn, Callable[[], object]]]

pytestmark = pytest.mark.usefixtures("weights")
SEEN: dict[str, Case] = {}
RATE = 2.0


def noticed(case: Case) -> Case:
    """A case whose change is seen."""
    SEEN[case.__name__] = case
    return case


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Fn]]] = {
    "a view of bytes": (lambda: memoryview(bytearray([2, 3])), lambda c: lambda x: x * c[0]),
    "a module by name": (
        lambda: None, lambda _: lambda x: x * importlib.import_module("math").pi),
    "an iterator": (lambda: itertools.count(2), lambda c: lambda x: x * next(c)),
    "a generator": (lambda: (each for each in range(2, 9)), lambda c: lambda x: x * next(c)),
    "a generator in builtins": (
        of_builtins("next(batches_of_builtins)", batches_of_builtins=iter([2.0, 3.0])),
        lambda m: m.f),
    "random numbers of numpy": (
        lambda: np.random.default_rng(0), lambda c: lambda x: x * c.random()),
    "random numbers of Python": (lambda: random.Random(0), lambda c: lambda x: x * c.random()),
    "random numbers of Python's own": (lambda: None, lambda _: lambda x: x * random.random()),
    "a bound method of random numbers": (
        lambda: np.random.default_rng(0).random, lambda c: lambda x: x * c()),
    "a file": (lambda: io.StringIO("2\n3\n"), lambda c: lambda x: x * float(c.readline())),
    "a variable of the context": (
        lambda: contextvars.ContextVar("rate", default=2.0), lambda c: lambda x: x * c.get()),
    "an object of a class with hidden state": (
        lambda: type("Numbers", (itertools.count,), {"factor": 2.0})(2),
        lambda c: lambda x: x * next(c)),
    "a number of ctypes": (lambda: ctypes.c_double(2.0), lambda c: lambda x: x * c.value),
    "a pointer of ctypes": (
        lambda: ctypes.pointer((ctypes.c_double * 2)(1.0, 2.0)),
        lambda c: lambda x: x * c.contents[0]),
    "the names of a dtype": (
        lambda: np.dtype([("a", "f4")]),
        lambda c: (lambda names: lambda x: x * len(c.names or names))(c.names)),
    "the names of the items of a dtype": (
        lambda: np.dtype(([("a", "f4")], (2,))), lambda c: lambda x: x * len(c.base.names or ())),
    "an error's arguments": (lambda: ValueError(2.0), lambda c: lambda x: x * c.args[0]),
    "a view of a dict": (lambda: {"lr": 2.0}.values(), lambda c: lambda x: x * sum(c)),
    "globals by name": (lambda: None, lambda _: lambda x: x * globals()["RATE"]),
    "an evaluated text": (lambda: None, lambda _: lambda x: x * eval("RATE")),
    "a cached function of a global": (
        lambda: functools.cache(lambda: 2 * RATE), lambda c: lambda x: x * c()),
    "a cached function of another's variable": (
        lambda: (lambda rate: (lambda inner: functools.lru_cache(maxsize=4)(lambda: inner() * 2))(
            lambda: rate[0]))([2.0]),
        lambda c: lambda x: x * c()),
    "a cached function of options": (
        lambda: (lambda args: functools.cache(lambda: 2.0 * float(args.lr)))(
            argparse.Namespace(lr=2.0)),
        lambda c: lambda x: x * c()),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_be_seen_is_refused(name: str) -> None:
    build, use = HIDDEN[name]
    captured = ml.capture(use(build()))
    for _ in range(2):
        refuses(CaptureError, r"a captured function reaches .*\.py:\d+", captured, ml.ones((2,)))
    assert captured.signatures == 0


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
    refuses(
        CaptureError, "stored in builtin 'last_of_builtins'", ml.capture(module.f), ml.ones((2,))
    )


# --- fields -----------------------------------------------------------------------------


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
def a_field_of_an_enum_member() -> Any:
    class Mode(enum.Enum):
        ON = 1

        @property
        def rate(self) -> float:
            return self._rate  # type: ignore[attr-defined]

    Mode.ON._rate = 2.0  # type: ignore[attr-defined]
    return lambda x: x * Mode.ON.rate, lambda: setattr(Mode.ON, "_rate", 3.0)


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


# --- functions elsewhere ----------------------------------------------------------------


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


EXPLAINED = {
    "the defaults of a function": "the default of 'more' in .* was 1.0, and is 4.0",
    "another dict": "-> 'c' was changed",
    "a method that a class gets": "'rate' of Derived at 0x.* was not defined, and is rated",
    "a field that comes where another goes": "'unread' of Plain was defined, and is not defined",
    "a class that an abstract one registers": "number of classes registered with abstract classes",
    "a special method of a list": "the length of a list was 2, and is 3",
    "a key of another name": "item 'cc' of a dict was not defined, and is 1",
    "the base of a view": r"the content of an ndarray .*, and is float64\[3\] \[1.0, 1.0, 2.0\]",
    "a function of Python that is replaced": "builtin 'divmod' was",
}


@pytest.mark.parametrize("name", [*OBJECTS, *PARTS, *SEEN])
def test_a_change_is_seen(name: str) -> None:
    fn, change, *args = SEEN[name]() if name in SEEN else built(name)
    captured, x = ml.capture(fn), ml.ones((2,))
    before = fn(x, *args).tolist()
    for _ in range(3):
        assert captured(x, *args).tolist() == before
    assert captured.signatures == 1
    change()
    after = fn(x, *args).tolist()
    assert after != before
    for _ in range(3):
        assert captured(x, *args).tolist() == after
    assert captured.signatures in (1, 2)  # without the program of state that is gone
    explained = captured.explain().splitlines()[-1]
    assert re.search(EXPLAINED.get(name, "trace 2.* (was|were) "), explained)


def test_the_home_folder_is_seen(monkeypatch: Patch) -> None:
    fns = [lambda x: x * len(str(Path.home())), lambda x: x * len(str(Path("~").expanduser()))]
    steps = [ml.capture(fn) for fn in fns]
    for home in ("/a", "/a/b"):
        monkeypatch.setenv("HOME", home)
        assert [step(ml.ones(1)).tolist() for step in steps] == [[len(home)]] * 2


# --- what is refused --------------------------------------------------------------------


def test_a_refusal_says_what_and_where_and_what_to_do() -> None:
    trainer = plain(options={"rng": 1}, source=plain(numbers=iter([1.0])))

    def step(x: ml.Tensor) -> Any:
        return x * next(trainer.source.numbers)

    caught = refuses(CaptureError, "", lambda: ml.capture(step)(ml.ones((2,))))
    line = step.__code__.co_firstlineno
    assert str(caught) == (
        "a captured function reaches an object of list_iterator, whose state is hidden: "
        "test_a_refusal_says_what_and_where_and_what_to_do.<locals>.step "
        f"({Path(__file__).name}:{line}) -> 'trainer' -> 'source' -> 'numbers'; "
        "use it outside, and pass the result as an argument"
    )


# --- what no code reads is not looked at ------------------------------------------------


@cases(
    "value",
    *(decimal.Decimal(2), fractions.Fraction(2), datetime.date(2, 2, 2), uuid.UUID(int=2)),
    *(Path("2"), ipaddress.ip_address(2), re.compile("2"), re.IGNORECASE, np.dtype("f2")),
    *(np.float32(2), inspect.signature(plain), plain.__code__, list[int], int | None, T, ...),
    *(operator.itemgetter(0), np.add, np.mean, dict.fromkeys, str.join, NotImplemented),
    *(logging.getLogger("2"), threading.Lock(), ml.float32, sys.float_info, np.dtype("V2")),
    ids=lambda value: type(value).__qualname__,
)
def test_what_cannot_change_is_not_refused(value: Any) -> None:
    captured = ml.capture(lambda x: x * len(repr((value, 2))) * 0 + 2)
    for _ in range(3):
        assert captured(ml.ones((1,))).tolist() == [2]
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
        return x * (2.0 if os.path.isabs(os.devnull) else c.scale)

    for _ in range(3):
        step(ml.ones((2,)))
        c.steps += 1
    assert step.signatures == 1
