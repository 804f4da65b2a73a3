"""Python numbers and dynamic sizes as inputs of a captured program.

In a trace, a `Number` is the placeholder of a Python number. Python's arithmetic on it is recorded
(`steps`), and repeated at each call with the number of that call. Python repeats it in double
precision, so the result has the bits of the eager call. Values that Python code needs become guards
(`guarded`): the truth of `x > 0`, the value in a text or as an index. A call with other values
needs a different program. Numbers belong to one trace, and so to one thread.
"""

from __future__ import annotations

import copy
import math
import numbers
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn, Self

import numpy as np

from mlvm.arena.context import context, current
from mlvm.core.dynamic_sizes import Length
from mlvm.core.errors import ShapeError, user_line
from mlvm.core.memo import bits_of, exact_repr
from mlvm.core.sizes import MAX_TERM
from mlvm.core.types import DType, TensorType
from mlvm.eager.tensor.copying import LeafMemo
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


class Size(int):
    """Number of elements of a tensor.

    In PyTorch, `size` is a method: calling it raises an error with the remedy."""

    __slots__ = ()

    def __call__(self, *_: object) -> NoReturn:
        raise TypeError("size is a number here; write x.shape, or x.shape[i] for one axis")


_COMPUTED: Final = frozenset({bool, int, float, Size})
"""Names of methods that compute with the placeholder as with the number itself."""


class Pinned(Exception):
    """Raised if Python code needs the value of a dynamic size, which a plan must not use."""


class Numbers:
    """Recorded computation on the Python numbers and the dynamic sizes of a traced call.

    Attributes:
        values: the inputs (numbers, then sizes), then constants and computed values.
        inputs: the number of inputs.
        first_length: the index of the first size among the inputs.
        steps: the computation: the index of a result, the function, the indices of its operands.
        guarded: the indices of values that Python code needed, with the lines of code in a trace
            with sizes.
        tensors: scalar tensors that ops used for a value, by index and dtype.
        vm: the VM of these tensors.
        types: dynamic types, by dtype and shape.
        pins: the lines of Python that needed the value of a size, by size index.
        present: the sizes of a call, in `at`.
        largest: the values at the bounds, while types are planned.
        closed: whether the trace has finished.
    """

    def __init__(
        self, numbers: Sequence[float], vm: object = None, lengths: Sequence[int] = ()
    ) -> None:
        self.values: list[Any] = [*numbers, *lengths]
        self.inputs, self.first_length = len(self.values), len(numbers)
        self.present: tuple[int, ...] = ()
        self.largest: list[Any] | None = None
        self.types: dict[Any, TensorType] = {}
        self.pins: dict[int, str | None] = {}
        self._polynomials: dict[int, Polynomial] = {}
        self._by_polynomial: dict[Polynomial, int] = {}
        for place in range(self.first_length, self.inputs):
            self._polynomials[place] = atom(place)
            self._by_polynomial[atom(place)] = place
        self.steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.guarded: dict[int, str | None] = {}
        self.tensors: dict[tuple[int, Any], Any] = {}
        self.vm = vm
        self.closed = False
        self.formulas: Any = None  # formulas of the native machine, set in a fork
        self._numbers_of: dict[int, int] = {}  # formula numbers by index
        self._constants: set[int] = set()
        # index of each constant by value, and of each result by computation
        self._places: dict[Any, int] = {}
        self._placeholders: list[weakref.ref[Number]] = []

    @property
    def has_lengths(self) -> bool:
        return self.first_length < self.inputs

    @contextmanager
    def recording(self) -> Iterator[list[Number]]:
        """Record computation on the inputs inside the block, and yield placeholders.

        After the block a placeholder behaves like the number."""
        try:
            with context(numbers=self):
                yield [self._number(place) for place in range(self.inputs)]
        finally:
            self.closed = True

    def see_kept(self) -> None:
        """Guard placeholders that are still alive, because later calls would not replace them."""
        if any(reference() is not None for reference in self._placeholders):
            collect()
        alive = [each for reference in self._placeholders if (each := reference()) is not None]
        self.guarded.update(dict.fromkeys(each.place for each in alive))

    def fixed(self) -> set[int]:
        """Return the indices of input numbers from which guarded numbers are computed."""
        guarded = {place for place in self.guarded if type(self.values[place]) in (int, float)}
        return {place for place in self.sources(guarded) if place < self.first_length}

    def sources(self, places: set[int]) -> set[int]:
        """Return the indices, and the indices of all values from which they are computed."""
        sources = set(places)
        for place, _, operands in reversed(self.steps):
            if place in sources:
                sources.update(operands)
        return sources

    def prune(self, used: set[int]) -> None:
        """Remove the steps on which neither guards nor tensors nor the `used` indices depend."""
        used = self.sources({*used, *self.guarded, *[place for place, _ in self.tensors]})
        self.steps = [step for step in self.steps if step[0] in used]
        used.update(range(self.inputs), self._constants)
        self._polynomials = {k: v for k, v in self._polynomials.items() if k in used}
        self._by_polynomial = {k: v for k, v in self._by_polynomial.items() if v in used}
        self._places = {}

    def at(self, values: Sequence[Any], used: Iterable[int]) -> Numbers:
        """Return the computation for calls with these values of the dynamic sizes.

        Results that depend only on sizes become constants. Numbers at the `used` indices, which
        types and attributes contain, are guarded."""
        other = copy.copy(self)
        other.values = [*values]
        other.present = tuple(values[self.first_length : self.inputs])
        varies = set(range(self.first_length))
        other.steps = []
        for step in self.steps:
            if not varies.isdisjoint(step[2]):
                varies.add(step[0])
                other.steps.append(step)
        other.guarded = {place: None for place in (*self.guarded, *used) if place in varies}
        return other

    def again(self, inputs: Sequence[float]) -> list[Any] | None:
        """Compute all values for other inputs; return None if a guard does not hold."""
        values = self.computed(inputs)
        return None if values is None or self.broken(values) is not None else values

    def computed(self, inputs: Sequence[float]) -> list[Any] | None:
        """Compute all values for other inputs; return None on an error or a changed class."""
        values = [*inputs, *self.present, *self.values[len(inputs) + len(self.present) :]]
        try:
            for place, fn, operands in self.steps:
                value = values[place] = fn(*[values[each] for each in operands])
                if type(value) is not type(self.values[place]):
                    return None
        except Exception:  # the eager call raises the same error, and so does a retrace
            return None
        return values

    def broken(self, values: Sequence[Any]) -> int | None:
        """Return the index of the first guard that does not hold for these values, or None."""
        for place in self.guarded:
            if not is_same(values[place], self.values[place]):
                return place
        return None

    def compute(self, fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Record and return fn(*operands), for Python numbers some of which are placeholders."""
        places = tuple([self._place(each) for each in operands])
        place = self._places.get((fn, places))
        if place is None and self.has_lengths:
            is_decided, result = self._by_algebra(fn, places)
            if is_decided:
                return result
        if place is None:
            place = self._places[fn, places] = self._add_step(fn, places)
        if type(self.values[place]) in (int, float):
            return self._number(place)
        if place not in self.guarded:  # a truth value, or a complex number
            is_trace = self.has_lengths and self.largest is None and self.formulas is None
            self.guarded[place] = user_line() if is_trace else None
        return self.values[place]

    def _add_step(self, fn: Callable[..., Any], places: tuple[int, ...]) -> int:
        """Record a computation; return the index of the result."""
        self.values.append(fn(*[self.values[each] for each in places]))
        self.steps.append((len(self.values) - 1, fn, places))
        return len(self.values) - 1

    def _by_algebra(self, fn: Callable[..., Any], places: tuple[int, ...]) -> tuple[bool, Any]:
        """Return whether the polynomials of the operands determine the result, and the result.

        The result is a constant, or the number of the result's polynomial."""
        terms = [self.polynomial_of(place) for place in places]
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
            place = self._add_step(fn, places)
            self._polynomials[place], self._by_polynomial[result] = result, place
        return True, self._number(place)

    def polynomial_of(self, place: int) -> Polynomial | None:
        """Return the polynomial of an int value; None for any other value.

        A value that is neither a constant nor a sum or product is an atom."""
        value = self.values[place]
        if type(value) is not int:
            return None
        p = self._polynomials.get(place)
        if p is None:
            p = polynomial(value) if place in self._constants else atom(place)
            self._polynomials[place] = p
            self._by_polynomial.setdefault(p, place)
        return p

    def type_of(self, dtype: DType, shape: Sequence[Any]) -> TensorType:
        """Return the unique type with that dtype and shape, which has dynamic sizes.

        Raises `ShapeError` for a negative size."""
        lengths: list[Any] = []
        key: list[Any] = [dtype]
        for n in shape:
            n = n if type(n) is Number and n.is_open() else operator.index(n)
            if n < 0:
                raise ShapeError(
                    f"expected a shape as a tuple of integers >= 0, got {plain(tuple(shape))}"
                )
            lengths.append(n)
            key.append((n.place,) if type(n) is Number else n)
        opened = self.types.get(tuple(key))
        if opened is None:
            values = self.values if self.largest is None else self.at_bounds()
            sizes = tuple([values[n.place] if type(n) is Number else n for n in lengths])
            opened = self.types[tuple(key)] = TensorType.opened(dtype, tuple(lengths), sizes)
            if self.formulas is not None:
                opened.nbytes = opened.size * dtype.itemsize
        return opened

    @contextmanager
    def planning(
        self, bounds: Sequence[int], present: Sequence[Any]
    ) -> Iterator[tuple[list[Any], dict[int, Any]]]:
        """Record computation on sizes again inside the block, with the `present` values.

        The byte sizes of types are those at these bounds of all sizes. Yields placeholders of the
        values and, at the end of the block, the guards by index. Raises `Pinned` after a block that
        needed the value of a size; the recorded computation is then discarded."""
        before = len(self.values), len(self.steps), dict(self.guarded), dict(self.pins)
        guards: dict[int, Any] = {}
        self.values = [*present]
        self.largest = [*self.values[: self.first_length], *bounds, *self.values[self.inputs :]]
        self.closed, self._places, self._evaluated = False, {}, 0
        try:
            self.at_bounds()
            placeholders = self._placeholders_of_values()
            self.guarded = {}
            with context(numbers=self):
                yield placeholders, guards
            if len(self.pins) > len(before[3]):
                raise Pinned
            guards.update((place, self.values[place]) for place in self.guarded)
            self.guarded = before[2]
        except BaseException:
            self.values[before[0] :] = []
            self.steps[before[1] :] = []
            self.guarded, self.pins = before[2:]
            self._polynomials = {k: v for k, v in self._polynomials.items() if k < before[0]}
            self._by_polynomial = {k: v for k, v in self._by_polynomial.items() if v < before[0]}
            raise
        finally:
            self.closed, self.largest, self._places = True, None, {}
            self.types.clear()
            self._placeholders.clear()

    def fork(self, values: Sequence[Any] | None = None) -> Numbers:
        """Return a copy that starts with these values and records further computation itself."""
        other = copy.copy(self)
        other.values = [*(values or self.values)[: len(self.values)]]
        steps = {(fn, operands): place for place, fn, operands in self.steps}
        ints = {key: place for key, place in steps.items() if type(other.values[place]) is int}
        other._places = ints | {k: n for k, n in self._places.items() if n < len(other.values)}
        other.steps, other._placeholders = [], []
        other.guarded, other.pins, other.types = {}, {}, {}
        other._constants, other._numbers_of = {*self._constants}, {**self._numbers_of}
        other._polynomials = {**self._polynomials}
        other._by_polynomial = {**self._by_polynomial}
        return other

    def fork_for(self, formulas: Any) -> tuple[Numbers, list[int]]:
        """Return a fork in which these formulas compute the integers of kernels.

        Also return the indices of the formulas' inputs."""
        computed = {place for place, _, _ in self.steps} | {*range(self.inputs)}
        inputs = [place for place in sorted(computed) if type(self.values[place]) is int]
        other = self.fork()
        other.formulas = formulas
        other._numbers_of = {place: formulas.input() for place in inputs}
        return other, inputs

    def fork_with_steps(self, formulas: Any, order: Sequence[int]) -> Numbers:
        """Return a fork in which these formulas compute all numbers from the inputs.

        The formulas have the inputs in this order."""
        other = self.fork()
        other.formulas, other.steps = formulas, [*self.steps]
        inputs = sorted((number, place) for place, number in enumerate(order))
        other._numbers_of = {place: formulas.input() for _, place in inputs}
        return other

    @contextmanager
    def planning_kernels(self) -> Iterator[list[Any]]:
        """Record computation in a fork inside the block, and yield placeholders of the values."""
        self.closed = False
        try:
            with context(numbers=self):
                yield self._placeholders_of_values()
        finally:
            self.closed = True
            self.types.clear()

    def _placeholders_of_values(self) -> list[Any]:
        return [self._number(i) if type(x) is int else x for i, x in enumerate(self.values)]

    def formula(self, place: int) -> int:
        """Return the formula number for the value at that index."""
        number = self._numbers_of.get(place)
        if number is None:
            if place in self._constants:
                value = self.values[place]
                if isinstance(value, int):
                    value = max(-MAX_TERM, min(value, MAX_TERM))
                number = self.formulas.constant(value)
            else:
                fn, operands = next((f, x) for n, f, x in self.steps if n == place)
                constants = [self.values[each] for each in operands if each in self._constants]
                if fn not in _COMPARED and any(abs(x) > MAX_TERM for x in constants):
                    raise OverflowError(f"expected integers of at most 64 bits, got {constants}")
                numbers = [self.formula(each) for each in operands]
                number = self.formulas.step(fn.__name__, numbers[0], numbers[-1])
            self._numbers_of[place] = number
        return number

    def guards(self) -> list[tuple[int, Any]]:
        """Return the guarded values: pairs of formula number and value."""
        return [(self.formula(place), self.values[place]) for place in self.guarded]

    def at_bounds(self) -> list[Any]:
        """Return the values at the bounds, while types are planned."""
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
        place = self._places.setdefault((type(operand), exact_repr(operand)), len(self.values))
        if place == len(self.values):
            self.values.append(operand)
            self._constants.add(place)
        return place

    def _number(self, place: int) -> Number:
        number = Number(self, place)
        self._placeholders.append(weakref.ref(number))
        return number


def is_same(x: Any, y: Any) -> bool:
    """Return whether two Python numbers are the same: 1, True and 1.0 differ, as 0.0 and -0.0."""
    if x is y or type(x) is not type(y):
        return x is y
    return bool(x == y) if isinstance(x, int) else bits_of(x) == bits_of(y)


def index_of(value: Any) -> int:
    """Return `operator.index` of the value; a dynamic size is returned unchanged."""
    if type(value) is Number and value.is_open():
        return value  # type: ignore[return-value]
    return operator.index(value)


def is_open(value: Any) -> bool:
    """Return whether a value is a dynamic size, or computed from dynamic sizes."""
    return type(value) is Number and value.is_open()


def has_open_lengths() -> bool:
    """Return whether a trace with dynamic sizes is active."""
    own: Numbers | None = current().numbers
    return own is not None and own.has_lengths


def is_length(value: Any) -> bool:
    """Return whether a value is computed only from dynamic sizes, and from no other number."""
    own = value.recorded if is_open(value) else None
    return own is not None and own.sources({value.place}).isdisjoint(range(own.first_length))


def is_free(value: Any) -> bool:
    """Return whether a value is the placeholder of a Python number in a trace."""
    return type(value) is Number and value.recorded is not None


def class_of(value: Any) -> type:
    """Return the class of a value; for a placeholder of a Python number, the class of the number.

    `isinstance` would also believe the `__class__` of a user's object, such as a mock."""
    kind = type(value)
    return value.__class__ if kind is Number else kind


def compute(fn: Callable[..., Any], *operands: Any) -> Any:
    """Return fn(*operands) for Python numbers, any of which may be a `Number`.

    A C function that user code calls directly, such as math.log(x), needs the value."""
    for each in operands:
        if type(each) is Number and each.recorded is not None:
            return each.recorded.compute(fn, operands)
    return fn(*map(plain, operands))


@contextmanager
def open_lengths(
    sizes: Sequence[int], formulas: Any
) -> Iterator[tuple[list[Any], Callable[[], list[tuple[int, Any]]]]]:
    """Record computation on dynamic sizes with these values as formulas inside the block.

    Yields placeholders for the sizes, and a function `guards` of the computation so far.
    """
    numbers, _ = Numbers((), None, sizes).fork_for(formulas)
    with numbers.planning_kernels() as placeholders:
        yield placeholders, numbers.guards


def plain(tree: Any) -> Any:
    """Return nested lists, tuples and dicts with `Number`s replaced by Python numbers.

    Objects without `Number`s are returned unchanged."""
    if type(tree) is Number:
        return tree.see()
    if isinstance(tree, dict):
        named = {name: plain(each) for name, each in tree.items()}
        return tree if all(map(operator.is_, named.values(), tree.values())) else named
    if isinstance(tree, (list, tuple)):
        items = [plain(each) for each in tree]
        make = list if isinstance(tree, list) else partial(tuple.__new__, type(tree))
        return tree if all(map(operator.is_, items, tree)) else make(items)
    return tree


def _binary(fn: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an operator and the reflected variant.

    For an operand that is not a Python number, such as a Tensor, they return NotImplemented, so
    that Python asks the operand."""

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
    """Return methods that need the value itself."""
    return [lambda self, *args, fn=fn: fn(self.see(), *map(plain, args)) for fn in fns]


class Number(Length):
    """Placeholder of a Python number in a trace.

    `isinstance` treats it as an instance of the number's class, and it has all methods of the
    number. `place` is the placeholder's index among the values."""

    __slots__ = ("__weakref__", "_numbers", "_value", "place")

    def __init__(self, numbers: Numbers, place: int) -> None:
        self._numbers = numbers
        self._value = numbers.values[place]
        self.place = place

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._value)

    @property
    def recorded(self) -> Numbers | None:
        """The computation to which it belongs, while it is recorded in this thread.

        Afterwards, and on a different thread, it behaves like the value, which is guarded."""
        own = self._numbers
        return own if current().numbers is own and not own.closed else None

    def is_open(self) -> bool:
        is_length = self._numbers.has_lengths and type(self._value) is int
        return is_length and self.recorded is not None

    @property
    def present(self) -> Any:
        return self._value

    def formula(self) -> int:
        return self._numbers.formula(self.place)

    def open_type(self, dtype: DType, shape: Sequence[int]) -> TensorType:
        return self._numbers.type_of(dtype, shape)

    def see(self) -> Any:
        """Return the value itself, and guard it."""
        own = self._numbers
        if not own.closed and self.place not in own.guarded:
            own.guarded[self.place] = None
            if own.has_lengths:
                own.guarded[self.place] = own.pins[self.place] = user_line()
        return self._value

    def keep(self) -> Any:
        """Return the value for a variable that later calls do not update, and guard it."""
        if not self._numbers.closed:
            self._numbers.guarded.setdefault(self.place, None)
        return self._value

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow)
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

    def __divmod__(self, other: Any) -> Any:
        quotient, remainder = self.__floordiv__(other), self.__mod__(other)
        return NotImplemented if quotient is NotImplemented else (quotient, remainder)

    def __rdivmod__(self, other: Any) -> Any:
        quotient, remainder = self.__rfloordiv__(other), self.__rmod__(other)
        return NotImplemented if quotient is NotImplemented else (quotient, remainder)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.see().__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.see(), dtype)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._value, name)
        self.see()
        return attribute

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return memo.leaf(self) if isinstance(memo, LeafMemo) else self
