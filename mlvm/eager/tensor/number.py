"""Python numbers that a captured program takes anew at each call.

While a function is recorded, a `Number` stands for a Python number. What Python computes with it is
noted down, and done again for each call's own number: by Python, in its double precision, so that
the result is that of the eager call to the bit. What Python sees of it is noted down too: the truth
of `x > 0`, the value where it is turned into text or an index. A call to which Python would show
something else needs another program.
"""

from __future__ import annotations

import math
import numbers
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self

import numpy as np

from mlvm.eager.tensor.garbage import collect

_COMPUTED: Final = frozenset({bool, int, float})
"""Python computes with these as it does with the number itself."""

_current: ContextVar[Numbers | None] = ContextVar("numbers", default=None)


class Numbers:
    """What was done with the numbers `given` to a function while it was recorded.

    `values` begins with these; then come constants and what was computed of them. `steps` say how:
    the place of the result, the function, the places of its operands. `seen` are the places of what
    Python saw. `tensors` has those that ops got for a value in some dtype; `vm` is theirs.
    """

    def __init__(self, given: Sequence[float], vm: object = None) -> None:
        self.values: list[Any] = list(given)
        self.given = len(given)
        self.steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.seen: dict[int, None] = {}
        self.tensors: dict[tuple[int, Any], Any] = {}
        self.vm = vm
        self.closed = False
        self._places: dict[Any, int] = {}  # of constants and results, by what they are
        self._made: list[weakref.ref[Number]] = []

    @contextmanager
    def recording(self) -> Iterator[list[Number]]:
        """Inside the block, the numbers are recorded; it gets what stands for those given. After it
        each is as the number that it stands for."""
        token = _current.set(self)
        try:
            yield [self._number(place) for place in range(self.given)]
        finally:
            self.closed = True
            _current.reset(token)

    def see_kept(self) -> None:
        """Count as seen what somebody still has: later calls would not give him theirs."""
        if any(reference() is not None for reference in self._made):
            collect()
        kept = [each for reference in self._made if (each := reference()) is not None]
        self.seen.update(dict.fromkeys(each.place for each in kept))

    def fixed(self) -> set[int]:
        """Which of the given numbers Python has seen the very value of, or what it is part of."""
        found = {place for place in self.seen if type(self.values[place]) in (int, float)}
        for place, _, operands in reversed(self.steps):
            if place in found:
                found.update(operands)
        return {place for place in found if place < self.given}

    def again(self, given: Sequence[float]) -> list[Any] | None:
        """All values for other numbers; None if Python would see something else."""
        values = [*given, *self.values[self.given :]]
        try:
            for place, fn, operands in self.steps:
                value = values[place] = fn(*[values[each] for each in operands])
                if type(value) is not type(self.values[place]):
                    return None
        except Exception:  # the eager call raises it; so does the one that is recorded anew
            return None
        same = all(is_same(values[place], self.values[place]) for place in self.seen)
        return values if same else None

    def compute(self, fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """fn(*operands) for Python numbers, some of which are ours."""
        places = tuple([self._place(each) for each in operands])
        place = self._places.get((fn, places))
        if place is None:
            value = fn(*[self.values[each] for each in places])
            place = self._places[fn, places] = len(self.values)
            self.values.append(value)
            self.steps.append((place, fn, places))
        if type(self.values[place]) in (int, float):
            return self._number(place)
        self.seen[place] = None  # a truth, or a complex number
        return self.values[place]

    def _place(self, operand: Any) -> int:
        if type(operand) is Number:
            return operand.place
        place = self._places.setdefault((type(operand), repr(operand)), len(self.values))
        if place == len(self.values):
            self.values.append(operand)
        return place

    def _number(self, place: int) -> Number:
        made = Number(self, place)
        self._made.append(weakref.ref(made))
        return made


def is_same(x: Any, y: Any) -> bool:
    """Whether two Python numbers are the same: 1, True and 1.0 are not, nor are 0.0 and -0.0."""
    if x is y or type(x) is not type(y):
        return x is y
    return bool(x == y) if isinstance(x, int) else repr(x) == repr(y)


def is_free(value: Any) -> bool:
    """Whether it stands for a Python number that may be another one in each call."""
    return type(value) is Number and value.recorded is not None


def compute(fn: Callable[..., Any], *operands: Any) -> Any:
    """fn(*operands) for Python numbers, where any may be a `Number`. A function in C that is called
    itself, as math.log(x), sees the value."""
    for each in operands:
        if type(each) is Number and each.recorded is not None:
            return each.recorded.compute(fn, operands)
    return fn(*map(plain, operands))


def plain(tree: Any) -> Any:
    """The nested lists, tuples and dicts with Python's numbers where there is a `Number`; the very
    same where there is none."""
    if type(tree) is Number:
        return tree.see()
    if isinstance(tree, dict):
        named = {name: plain(each) for name, each in tree.items()}
        return tree if all(map(operator.is_, named.values(), tree.values())) else named
    if isinstance(tree, (list, tuple)):
        items = [plain(each) for each in tree]
        return tree if all(map(operator.is_, items, tree)) else type(tree)(items)
    return tree


def _binary(fn: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator, and the reflected one. With anything but a Python number, such as a Tensor, it
    is the other's to know what to do."""

    def forward(self: Number, other: Any) -> Any:
        if type(other) is Number or type(other) in _COMPUTED:
            return compute(fn, self, other)
        return fn(self.see(), other) if isinstance(other, numbers.Number) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        if type(other) in _COMPUTED:
            return compute(fn, other, self)
        return fn(other, self.see()) if isinstance(other, numbers.Number) else NotImplemented

    return forward, reflected


def _compared(*fns: Callable[..., Any]) -> list[Any]:
    return [_binary(fn)[0] for fn in fns]


def _unary(*fns: Callable[..., Any]) -> list[Any]:
    return [lambda self, fn=fn: compute(fn, self) for fn in fns]


def _by_value(*fns: Callable[..., Any]) -> list[Any]:
    """Methods that need the value itself."""
    return [lambda self, *given, fn=fn: fn(self.see(), *map(plain, given)) for fn in fns]


class Number:
    """Stands for a Python number while a function is recorded. For `isinstance` it is of the class
    of the number, and it has and does all that the number does."""

    __slots__ = ("__weakref__", "_numbers", "_value", "place")

    def __init__(self, numbers: Numbers, place: int) -> None:
        self._numbers = numbers
        self._value = numbers.values[place]
        self.place = place  # among the values of its numbers

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._value)

    @property
    def recorded(self) -> Numbers | None:
        """The numbers that it is one of, while they are recorded here. After that, and elsewhere as
        on another thread, it is as its value, which counts as seen."""
        own = self._numbers
        return own if _current.get() is own and not own.closed else None

    def see(self) -> Any:
        """The value itself, which Python sees."""
        if not self._numbers.closed:
            self._numbers.seen[self.place] = None
        return self._value

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow)
    __divmod__, __rdivmod__ = _binary(divmod)
    __and__, __rand__ = _binary(operator.and_)
    __or__, __ror__ = _binary(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift)
    __lt__, __le__ = _compared(operator.lt, operator.le)
    __gt__, __ge__ = _compared(operator.gt, operator.ge)
    __eq__, __ne__ = _compared(operator.eq, operator.ne)
    __neg__, __pos__, __invert__ = _unary(operator.neg, operator.pos, operator.invert)
    __abs__, __bool__ = _unary(abs, operator.truth)
    __hash__, __complex__, __float__, __int__ = _by_value(hash, complex, float, int)
    __index__, __round__, __trunc__ = _by_value(operator.index, round, math.trunc)
    __floor__, __ceil__ = _by_value(math.floor, math.ceil)
    __repr__, __str__, __format__ = _by_value(repr, str, format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.see().__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.see(), dtype)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        self.see()
        return found

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
