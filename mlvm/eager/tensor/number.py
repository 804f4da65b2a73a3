"""Python numbers that a captured program takes anew at each call.

While a function is recorded, a `Number` stands for a Python number. What Python computes with it is
noted down, and done again for each call's own number: by Python, in its double precision, so that
the result is that of the eager call to the bit. What Python sees of it is noted down too: the truth
of `x > 0`, the value where it is turned into text or an index. A call to which Python would show
something else needs another program.
"""

from __future__ import annotations

import copy
import math
import numbers
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn, Self

import numpy as np

from mlvm.core.errors import ShapeError, user_line
from mlvm.core.lengths import Length
from mlvm.core.types import DType, TensorType
from mlvm.eager.tensor.garbage import collect
from mlvm.eager.tensor.polynomials import (
    Polynomial,
    added,
    atom,
    constant_of,
    divided,
    multiplied,
    polynomial,
)

_COMPARED: Final = frozenset(
    {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)

_current: ContextVar[Numbers | None] = ContextVar("numbers", default=None)


class Size(int):
    """How many elements a tensor has. PyTorch's size is a method: a call says what to write."""

    __slots__ = ()

    def __call__(self, *_: object) -> NoReturn:
        raise TypeError("size is a number here; write x.shape, or x.shape[i] for one axis")


_COMPUTED: Final = frozenset({bool, int, float, Size})
"""Python computes with these as it does with the number itself."""


class Pinned(Exception):
    """Raised where Python has seen the value of an open length, which a plan is not to depend
    on."""


class Numbers:
    """What was done with the numbers `given` to a function, and with the open `lengths` of its
    tensors, while it was recorded.

    `values` begins with these; then come constants and what was computed of them. `steps` say how:
    the place of the result, the function, the places of its operands. `seen` are the places of what
    Python saw. `tensors` has those that ops got for a value in some dtype; `vm` is theirs. `pins`
    are the lines of Python that saw the value of a length, by its place.
    """

    def __init__(
        self, given: Sequence[float], vm: object = None, lengths: Sequence[int] = ()
    ) -> None:
        self.values: list[Any] = [*given, *lengths]
        self.given = len(self.values)
        self.lengths = len(lengths)
        self.present: tuple[int, ...] = ()  # the lengths, where these are given
        self.largest: list[Any] | None = None  # the values at the bounds, while types are planned
        self.types: dict[Any, TensorType] = {}
        self.pins: dict[int, str | None] = {}
        self._polynomials: dict[int, Polynomial] = {}
        self._by_polynomial: dict[Polynomial, int] = {}
        for place in range(len(given), self.given):
            self._polynomials[place] = atom(place)
            self._by_polynomial[atom(place)] = place
        self.steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.seen: dict[int, None] = {}
        self.tensors: dict[tuple[int, Any], Any] = {}
        self.vm = vm
        self.closed = False
        self.formulas: Any = None  # of the native machine, in a fork
        self._numbers_of: dict[int, int] = {}  # the formulas' numbers, by place
        self._constants: set[int] = set()
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
        return {place for place in self.sources(found) if place < self.given - self.lengths}

    def sources(self, places: set[int]) -> set[int]:
        """Return the places, and those of all that they are computed of."""
        found = set(places)
        for place, _, operands in reversed(self.steps):
            if place in found:
                found.update(operands)
        return found

    def prune(self, used: set[int]) -> None:
        """Forget the steps that neither guards nor tensors nor the `used` places depend on."""
        used = self.sources({*used, *self.seen, *[place for place, _ in self.tensors]})
        self.steps = [step for step in self.steps if step[0] in used]
        used.update(range(self.given), self._constants)
        self._polynomials = {k: v for k, v in self._polynomials.items() if k in used}
        self._by_polynomial = {k: v for k, v in self._by_polynomial.items() if v in used}
        self._places = {}

    def at(self, values: Sequence[Any]) -> Numbers:
        """Return the numbers of calls with the open lengths of these values: what depends on
        lengths alone is constant."""
        other = copy.copy(self)
        first = self.given - self.lengths
        other.values, other.lengths = [*values], self.lengths
        other.present = tuple(values[first : self.given])
        varies = set(range(first))
        other.steps = []
        for step in self.steps:
            if not varies.isdisjoint(step[2]):
                varies.add(step[0])
                other.steps.append(step)
        other.seen = {place: None for place in self.seen if place in varies}
        return other

    def again(self, given: Sequence[float]) -> list[Any] | None:
        """Return all values for other numbers; None if Python would see something else."""
        values = [*given, *self.present, *self.values[len(given) + len(self.present) :]]
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
        if place is None and self.lengths:
            known, result = self._by_algebra(fn, places)
            if known:
                return result
        if place is None:
            value = fn(*[self.values[each] for each in places])
            place = self._places[fn, places] = len(self.values)
            self.values.append(value)
            self.steps.append((place, fn, places))
        if type(self.values[place]) in (int, float):
            return self._number(place)
        self.seen[place] = None  # a truth, or a complex number
        return self.values[place]

    def _by_algebra(self, fn: Callable[..., Any], places: Sequence[int]) -> tuple[bool, Any]:
        """Return whether the polynomials of the operands tell the result, and it: a constant, the
        number of the same polynomial or, for a sum or product that is new, that number."""
        terms = [self._polynomial(place) for place in places]
        p, q = terms if len(terms) == 2 else (terms[0], None)
        if p is None or (q is None and len(terms) == 2):
            return False, None
        result: Polynomial | None = None
        if q is None:
            result = added((), p, -1) if fn is operator.neg else None
        elif fn in _COMPARED:
            difference = added(p, q, -1)
            constant = None if difference is None else constant_of(difference)
            return constant is not None, constant is not None and fn(constant, 0)
        elif fn is operator.add or fn is operator.sub:
            result = added(p, q, 1 if fn is operator.add else -1)
        elif fn is operator.mul:
            result = multiplied(p, q)
        elif fn is operator.floordiv and constant_of(q) != 0:
            result = divided(p, q)
            if result is not None and constant_of(q) is None:
                self.compute(operator.ne, (self._number(places[1]), 0))
        if result is None:
            return False, None
        constant = constant_of(result)
        if constant is not None:
            return True, constant
        place = self._by_polynomial.get(result)
        if place is None:
            value = fn(*[self.values[each] for each in places])
            place = len(self.values)
            self.values.append(value)
            self.steps.append((place, fn, tuple(places)))
            self._polynomials[place], self._by_polynomial[result] = result, place
        return True, self._number(place)

    def _polynomial(self, place: int) -> Polynomial | None:
        """Return the polynomial of an int, an atom where it is neither constant nor a sum or
        product; None for another value."""
        value = self.values[place]
        if type(value) is not int:
            return None
        found = self._polynomials.get(place)
        if found is None:
            found = polynomial(value) if self._is_constant(place) else atom(place)
            self._polynomials[place] = found
            self._by_polynomial.setdefault(found, place)
        return found

    def _is_constant(self, place: int) -> bool:
        return place in self._constants

    def type_of(self, dtype: DType, shape: Sequence[Any]) -> TensorType:
        """Return the one type of that dtype and shape, some of whose lengths are open. Raises
        `ShapeError` for a negative length."""
        lengths: list[Any] = []
        key: list[Any] = [dtype]
        for n in shape:
            n = n if type(n) is Number and n.is_open() else operator.index(n)
            if n < 0:
                raise ShapeError(f"a shape is a tuple of integers >= 0, not {plain(tuple(shape))}")
            lengths.append(n)
            key.append((n.place,) if type(n) is Number else n)
        known = self.types.get(tuple(key))
        if known is None:
            values = self.values if self.largest is None else self._largest()
            sizes = tuple([values[n.place] if type(n) is Number else n for n in lengths])
            known = self.types[tuple(key)] = TensorType.opened(dtype, tuple(lengths), sizes)
            if self.formulas is not None:
                known.nbytes = known.size * dtype.itemsize
        return known

    @contextmanager
    def planning(
        self, bounds: Sequence[int], present: Sequence[Any]
    ) -> Iterator[tuple[list[Any], dict[int, Any]]]:
        """Inside the block, the lengths are recorded again with the `present` values, and types
        have the bytes that they have at these bounds of all lengths. It gets what stands for the
        values and, after the block, the guards: what Python has seen there, by place. Raises
        `Pinned` after a block that has seen a length itself; nothing of it is kept then."""
        before = len(self.values), len(self.steps), dict(self.seen), dict(self.pins)
        guards: dict[int, Any] = {}
        token = _current.set(self)
        self.values = [*present]
        self.closed = False
        first = self.given - self.lengths
        self.largest = [*self.values[:first], *bounds, *self.values[self.given :]]
        self._evaluated = 0
        self._places = {}
        try:
            self._largest()
            stand_ins = [
                self._number(place) if type(value) is int else value
                for place, value in enumerate(self.values)
            ]
            self.seen = {}
            yield stand_ins, guards
            if len(self.pins) > len(before[3]):
                raise Pinned
            guards.update((place, self.values[place]) for place in self.seen)
            self.seen = before[2]
        except BaseException:
            self.values[before[0] :] = []
            self.steps[before[1] :] = []
            self.seen, self.pins = before[2:]
            self._polynomials = {k: v for k, v in self._polynomials.items() if k < before[0]}
            self._by_polynomial = {k: v for k, v in self._by_polynomial.items() if v < before[0]}
            raise
        finally:
            self.closed, self.largest, self._places = True, None, {}
            self.types.clear()
            self._made.clear()
            _current.reset(token)

    def fork(self, values: Sequence[Any] | None = None) -> Numbers:
        """Return numbers that begin with these, and record what is computed of them apart."""
        other = copy.copy(self)
        other.values = [*(values or self.values)[: len(self.values)]]
        steps = {(fn, operands): place for place, fn, operands in self.steps}
        known = {key: place for key, place in steps.items() if type(other.values[place]) is int}
        other._places = known | {k: n for k, n in self._places.items() if n < len(other.values)}
        other.steps, other.seen, other.pins, other.types, other._made = [], {}, {}, {}, []
        other._constants, other._numbers_of = {*self._constants}, {**self._numbers_of}
        other._polynomials = {**self._polynomials}
        other._by_polynomial = {**self._by_polynomial}
        return other

    def fork_for(self, formulas: Any) -> tuple[Numbers, list[int]]:
        """Return a fork in which these formulas compute what kernels need, and the places of the
        formulas' inputs."""
        computed = {place for place, _, _ in self.steps} | {*range(self.given)}
        inputs = [place for place in sorted(computed) if type(self.values[place]) is int]
        other = self.fork()
        other.formulas = formulas
        other._numbers_of = {place: formulas.input() for place in inputs}
        return other, inputs

    @contextmanager
    def planning_kernels(self) -> Iterator[list[Any]]:
        """Inside the block, a fork records. It gets what stands for the values."""
        token = _current.set(self)
        self.closed = False
        try:
            yield [self._number(i) if type(x) is int else x for i, x in enumerate(self.values)]
        finally:
            self.closed = True
            self.types.clear()
            _current.reset(token)

    def formula(self, place: int) -> int:
        """Return the formulas' number for what is at that place."""
        number = self._numbers_of.get(place)
        if number is None:
            if place in self._constants:
                value = self.values[place]
                most = 1 << 62
                value = max(-most, min(value, most)) if isinstance(value, int) else value
                number = self.formulas.constant(value)
            else:
                fn, operands = next((f, x) for n, f, x in self.steps if n == place)
                numbers = [self.formula(each) for each in operands]
                number = self.formulas.step(fn.__name__, numbers[0], numbers[-1])
            self._numbers_of[place] = number
        return number

    def at_bounds(self) -> list[Any]:
        """Return the values at the bounds, while types are planned."""
        return list(self._largest())

    def _largest(self) -> list[Any]:
        """Return the values at the bounds."""
        values = self.largest
        assert values is not None
        values += self.values[len(values) :]
        for place, fn, operands in self.steps[self._evaluated :]:
            values[place] = fn(*[values[each] for each in operands])
        self._evaluated = len(self.steps)
        return values

    def _place(self, operand: Any) -> int:
        if type(operand) is Number:
            return operand.place
        if type(operand) is Size:
            operand = int(operand)
        place = self._places.setdefault((type(operand), repr(operand)), len(self.values))
        if place == len(self.values):
            self.values.append(operand)
            self._constants.add(place)
        return place

    def _number(self, place: int) -> Number:
        made = Number(self, place)
        self._made.append(weakref.ref(made))
        return made


def is_same(x: Any, y: Any) -> bool:
    """Return whether two Python numbers are the same: 1, True and 1.0 are not, nor are 0.0 and
    -0.0."""
    if x is y or type(x) is not type(y):
        return x is y
    return bool(x == y) if isinstance(x, int) else repr(x) == repr(y)


def index_of(value: Any) -> int:
    """Return the int that `operator.index` makes of the value, or an open length as it is."""
    if type(value) is Number and value.is_open():
        return value  # type: ignore[return-value]
    return operator.index(value)


def is_open(value: Any) -> bool:
    """Return whether it is an open length, or computed of some."""
    return type(value) is Number and value.is_open()


def is_free(value: Any) -> bool:
    """Return whether it stands for a Python number that may be another one in each call."""
    return type(value) is Number and value.recorded is not None


def compute(fn: Callable[..., Any], *operands: Any) -> Any:
    """fn(*operands) for Python numbers, where any may be a `Number`. A function in C that is called
    itself, as math.log(x), sees the value."""
    for each in operands:
        if type(each) is Number and each.recorded is not None:
            return each.recorded.compute(fn, operands)
    return fn(*map(plain, operands))


def plain(tree: Any) -> Any:
    """Return the nested lists, tuples and dicts with Python's numbers where there is a `Number`;
    the very same where there is none."""
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
    """Return the operator, and the reflected one. With anything but a Python number, such as a
    Tensor, it is the other's to know what to do."""

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


class Number(Length):
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

    def is_open(self) -> bool:
        is_length = self._numbers.lengths > 0 and type(self._value) is int
        return is_length and self.recorded is not None

    @property
    def present(self) -> Any:
        return self._value

    def formula(self) -> int:
        return self._numbers.formula(self.place)

    def open_type(self, dtype: DType, shape: Sequence[int]) -> TensorType:
        return self._numbers.type_of(dtype, shape)

    def see(self) -> Any:
        """Return the value itself, which Python sees."""
        own = self._numbers
        if not own.closed and self.place not in own.seen:
            own.seen[self.place] = None
            if own.lengths:
                own.pins[self.place] = user_line()
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
