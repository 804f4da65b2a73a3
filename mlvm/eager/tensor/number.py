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

_recording: ContextVar[Numbers | None] = ContextVar("numbers", default=None)


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
        token = _recording.set(self)
        try:
            yield [self._number(place) for place in range(self.given)]
        finally:
            self.closed = True
            _recording.reset(token)

    def see_kept(self) -> None:
        """Count as seen what somebody still has: later calls would not give him theirs."""
        if any(reference() is not None for reference in self._made):
            collect()
        for kept in [reference() for reference in self._made]:
            if kept is not None:
                self.seen[kept.place] = None

    def fixed(self) -> set[int]:
        """Which of the given numbers Python has seen the very value of, or what it is part of."""
        found = {place for place in self.seen if type(self.values[place]) in (int, float)}
        for place, _, operands in reversed(self.steps):
            if place in found:
                found.update(operands)
        return {place for place in found if place < self.given}

    def again(self, given: Sequence[float]) -> list[Any] | None:
        """All values for other numbers; None if Python would see something else."""
        values = self.values.copy()
        values[: self.given] = given
        try:
            for place, fn, operands in self.steps:
                value = values[place] = fn(*[values[each] for each in operands])
                if type(value) is not type(self.values[place]):
                    return None
        except Exception:  # the eager call raises it; so does the one that is recorded anew
            return None
        if all(is_same(values[place], self.values[place]) for place in self.seen):
            return values
        return None

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
        key = type(operand), repr(operand)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(operand)
        return self._places[key]

    def _number(self, place: int) -> Number:
        made = Number(self, place)
        self._made.append(weakref.ref(made))
        return made


def is_same(x: Any, y: Any) -> bool:
    """Whether two Python numbers are the same: 1, True and 1.0 are not, nor are 0.0 and -0.0."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if type(x) is not float:
        return bool(x == y) if type(x) in _COMPUTED else repr(x) == repr(y)
    return (x == y and math.copysign(1, x) == math.copysign(1, y)) or (x != x and y != y)


def compute(fn: Callable[..., Any], *operands: Any) -> Any:
    """fn(*operands) for Python numbers, where any may be a `Number`. A function in C that is called
    itself, as math.log(x), sees the value."""
    for each in operands:
        own = each.recorded if type(each) is Number else None
        if own is not None:
            return own.compute(fn, operands)
    return fn(*map(plain, operands))


def plain(tree: Any) -> Any:
    """The nested lists, tuples and dicts with Python's numbers where there is a `Number`; the very
    same where there is none."""
    if type(tree) is Number:
        return tree._seen()
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
        return fn(self._seen(), other) if isinstance(other, numbers.Number) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        if type(other) in _COMPUTED:
            return compute(fn, other, self)
        return fn(other, self._seen()) if isinstance(other, numbers.Number) else NotImplemented

    return forward, reflected


def _unary(fn: Callable[[Any], Any]) -> Callable[[Number], Any]:
    return lambda self: compute(fn, self)


def _of_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A method that needs the value itself."""
    return lambda self, *given: fn(self._seen(), *map(plain, given))


class Number:
    """Stands for a Python number while a function is recorded. For `isinstance` it is of the class
    of the number, and it has and does all that the number does."""

    __slots__ = ("__weakref__", "_numbers", "_place", "_value")

    def __init__(self, numbers: Numbers, place: int) -> None:
        self._numbers = numbers
        self._place = place
        self._value = numbers.values[place]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._value)

    @property
    def recorded(self) -> Numbers | None:
        """The numbers that it is one of, while they are recorded here. After that, and elsewhere as
        on another thread, it is as its value, which counts as seen."""
        own = self._numbers
        return own if _recording.get() is own and not own.closed else None

    @property
    def place(self) -> int:
        """Its place among the values of its numbers."""
        return self._place

    def _seen(self) -> Any:
        """The value itself, which Python sees."""
        if not self._numbers.closed:
            self._numbers.seen[self._place] = None
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
    __lt__ = _binary(operator.lt)[0]
    __le__ = _binary(operator.le)[0]
    __gt__ = _binary(operator.gt)[0]
    __ge__ = _binary(operator.ge)[0]
    __eq__ = _binary(operator.eq)[0]
    __ne__ = _binary(operator.ne)[0]
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __bool__ = _unary(operator.truth)
    __hash__ = _of_value(hash)
    __float__ = _of_value(float)
    __int__ = _of_value(int)
    __index__ = _of_value(operator.index)
    __complex__ = _of_value(complex)
    __round__ = _of_value(round)
    __trunc__ = _of_value(math.trunc)
    __floor__ = _of_value(math.floor)
    __ceil__ = _of_value(math.ceil)
    __repr__ = _of_value(repr)
    __str__ = _of_value(str)
    __format__ = _of_value(format)
    __reduce_ex__ = _of_value(lambda value, protocol: value.__reduce_ex__(protocol))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._seen(), dtype)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        self._seen()
        return found

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
