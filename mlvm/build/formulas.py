"""Formulas of sizes of a built step, evaluated simultaneously at all sizes within the bounds.

In: a step with types and attributes that are formulas. Out: tables of formulas in C, the largest
value of each, and the sizes at which guards hold. The functions of a step are planned at some
sizes and are valid wherever the guards of that planning hold: a `BuiltVariant`. More variants are
planned until every combination of sizes has a valid variant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle, product
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mlvm.build.literals import integer, real
from mlvm.build.targets import CannotBuild
from mlvm.core.dynamic_sizes import Length
from mlvm.core.errors import ShapeError
from mlvm.core.memo import exact_repr
from mlvm.core.sizes import MAX_EXACT, MAX_TERM
from mlvm.core.types import DType, TensorType, f32, f64, i32, i64
from mlvm.step.open_step import OpenStep, StepLength
from mlvm.step.saved import SavedStep

_OF_INTS: Final = frozenset({"floordiv", "mod"})
_BOOLS: Final = frozenset({"truth", "lt", "le", "eq", "ne", "gt", "ge"})

Column = npt.NDArray[Any]


Guard: TypeAlias = tuple[int, Any]
"""The number of a formula, and the value that it must have."""


class Formulas:
    """Formulas of sizes, evaluated at all combinations of sizes.

    sizes: the combinations, a row each.
    rows: operator and operands of each number, as `plan/formulas.h` has them; a constant's value.
    """

    def __init__(self, lengths: Sequence[StepLength]) -> None:
        bounds = [each.at_most for each in lengths]
        count = int(np.prod(bounds, dtype=object))
        most = 1 << 16  # rows of each formula's table
        if count > most:
            names = ", ".join([f"{each.name!r} to {each.at_most}" for each in lengths])
            raise CannotBuild(
                f"lengths: expected at most {most:,} combinations, got {count:,} "
                f"({names}); capture the step with lower bounds, max_sizes="
            )
        rows = list(product(*[range(1, n + 1) for n in bounds]))
        self.sizes: npt.NDArray[np.int64] = np.array(rows, np.int64).reshape(count, len(bounds))
        self.rows: list[tuple[str, Any, Any]] = []
        self._columns: list[tuple[Column, Column | bool]] = []
        self._numbers: dict[Any, int] = {}
        self._inputs = cycle(range(len(bounds)))
        for i in range(len(bounds)):
            self._add(("INPUT", i, 0), self.sizes[:, i])

    def _add(
        self, row: tuple[str, Any, Any], values: Column, is_defined: Column | bool = True
    ) -> int:
        key = row[0], exact_repr(row[1]), row[2]
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
            self._columns.append((values, is_defined))
        return self._numbers[key]

    def input(self) -> int:
        """Return the number of the next size; after the last comes the first."""
        return next(self._inputs)

    def constant(self, value: float) -> int:
        """Add a constant; return the number."""
        constant = float(value) if isinstance(value, float) else int(value)
        if isinstance(constant, int) and abs(constant) > MAX_TERM:
            raise OverflowError
        return self._add(("CONSTANT", constant, 0), np.asarray(constant))

    def step(self, name: str, a: int, b: int) -> int:
        """Add an operator's result; return the number.

        Raises `CannotBuild` for operators that C has not.
        """
        (x, x_defined), (y, y_defined) = self._columns[a], self._columns[b]
        is_defined = np.logical_and(x_defined, y_defined)
        fn = getattr(operator, name, None)
        is_real = x.dtype.kind == "f" or y.dtype.kind == "f"
        if fn is None or name not in _OPERATORS or (is_real and name in _OF_INTS):
            raise CannotBuild(
                f"lengths: the operation {name} is not supported; compute it with tensors"
            )
        if name in ("floordiv", "mod", "truediv"):
            is_defined = np.logical_and(is_defined, y != 0)
            y = np.where(y != 0, y, 1)
        if name == "truediv" and not is_real:
            is_defined = np.logical_and(is_defined, np.maximum(abs(x), abs(y)) <= MAX_EXACT)
        may_wrap = name in ("add", "sub", "mul") and not is_real
        if may_wrap and np.max(abs(fn(x * 1.0, y * 1.0))) > MAX_TERM:
            exact = fn(x.astype(object), y.astype(object))
            is_defined = np.logical_and(is_defined, (exact >= -1 << 63) & (exact < 1 << 63))
        if name == "truth":
            values = x != 0
        elif name in ("neg", "pos", "abs"):
            values = fn(x)
        else:
            values = fn(x, y)
        values = np.asarray(values).astype(np.int64) if name in _BOOLS else np.asarray(values)
        return self._add((name, a, b), values, is_defined)

    def largest(self, formula: int) -> int:
        """Return the largest value of an integer."""
        values, is_defined = self._columns[formula]
        return int(np.max(np.where(is_defined, values, 0)))

    def bound(self, n: Any) -> int:
        """Return the largest value of a size."""
        return self.largest(n.formula()) if issubclass(type(n), Length) else int(n)

    def holds(self, guard: Guard) -> Column:
        """Return at which combinations a number has that value."""
        values, is_defined = self._columns[guard[0]]
        same_kind = (values.dtype.kind == "f") == isinstance(guard[1], float)
        same = np.logical_and(is_defined, values == guard[1]) & same_kind
        return np.broadcast_to(same, len(self.sizes))

    def number_of(self, value: Any) -> int:
        """Return the number of a formula or a constant."""
        return value.formula() if issubclass(type(value), Length) else self.constant(value)

    def fits(self, formula: int, dtype: DType) -> Column:
        """Return at which combinations a number is defined, and one of that dtype."""
        values, is_defined = self._columns[formula]
        if dtype.is_integer:
            is_defined = np.logical_and(is_defined, values == values.astype(dtype.numpy))
        return np.broadcast_to(is_defined, len(self.sizes))

    def numbered(self, used: Iterable[int]) -> dict[int, int]:
        """Number the sizes, and the formulas that these are computed of, in C."""
        needed = {*used}
        for i in reversed(range(len(self.rows))):
            name, a, b = self.rows[i]
            if i in needed and name not in ("INPUT", "CONSTANT"):
                needed.update((a, b))
        lengths = range(self.sizes.shape[1])
        return {n: i for i, n in enumerate([*lengths, *sorted(needed.difference(lengths))])}

    def tables(self, numbered: Mapping[int, int]) -> tuple[list[str], list[str]]:
        """Return the rows of formulas and constants in C."""
        formulas, constants = [], []
        for i in numbered:
            name, a, b = self.rows[i]
            is_constant = name == "CONSTANT"
            constants.append(number(a) if is_constant else "{UNDEFINED, 0, 0}")
            is_operator = name in _OPERATORS
            operands = f"{numbered[a]}, {numbered[b]}" if is_operator else "0, 0"
            formulas.append(f"{{{'AS_' * is_operator}{name}, {operands}}}")
        return formulas, constants


def number(value: Any) -> str:
    """Write a number of formulas in C."""
    if isinstance(value, float):
        return f"{{REAL, 0, {real(value)}}}"
    return f"{{INTEGRAL, {integer(int(value))}, 0}}"


_OPERATORS: Final = _OF_INTS | _BOOLS | {"add", "sub", "mul", "truediv", "neg", "pos", "abs"}


OpenLengths: TypeAlias = Callable[
    [Sequence[int], Formulas],
    AbstractContextManager[tuple[list[Any], Callable[[], Sequence[Guard]]]],
]
"""Makes placeholders for lengths of these sizes, whose computation the formulas record; and a
function that returns the guards of what was computed so far."""

Functions = TypeVar("Functions")


class BuiltVariant(NamedTuple, Generic[Functions]):
    """Functions of a step for some sizes.

    guards: hold at the sizes for which the functions are valid.
    scalars: the formulas of states that are computed from sizes, by number.
    """

    functions: Functions
    guards: Sequence[Guard] = ()
    scalars: Mapping[int, int] = MappingProxyType({})


def variants(
    step: SavedStep,
    opened: OpenStep,
    formulas: Formulas,
    open_lengths: OpenLengths,
    plan: Callable[[SavedStep, SavedStep], Functions],
) -> Iterator[BuiltVariant[Functions]]:
    """Yield variants until all sizes of the step have one; begin with the call before saving.

    `plan` makes the functions of a step at some sizes, given the same step with placeholders.
    Raises `CannotBuild` for too many variants, and for states that C does not compute.
    """
    dtypes = {number: TensorType.of(step.states[number]).dtype for number, _ in opened.scalars}
    for dtype in dtypes.values():
        if dtype not in (f32, f64, i32, i64):
            raise CannotBuild(
                f"lengths: expected numbers of f32, f64, i32 or i64, got {dtype.name}, "
                f"computed from a length; convert the tensor after the computation"
            )
    all_sizes = [tuple(map(int, sizes)) for sizes in formulas.sizes]
    sizes = tuple([opened.values[each.place] for each in opened.lengths])
    valid = {x: values for x in all_sizes if (values := _values_at(opened, x)) is not None}
    if sizes not in valid:
        raise CannotBuild(
            f"lengths: expected the lengths of the last call before saving, got {sizes}"
        )
    saved = all_sizes.index(sizes)
    is_valid = np.array([x in valid for x in all_sizes])
    remaining = is_valid.copy()
    for count in range(256):
        if not remaining.any():
            return
        index = int(np.flatnonzero(remaining)[0]) if count else saved
        sizes = all_sizes[index]
        try:
            with open_lengths(sizes, formulas) as (placeholders, guards_so_far):
                symbols = opened.symbols(valid[sizes], placeholders)
                functions = plan(step.at_values(valid[sizes]), step.at_values(symbols))
                guards = [*dict.fromkeys(guards_so_far())]
                scalars = {i: formulas.number_of(symbols[place]) for i, place in opened.scalars}
        except OverflowError:
            raise CannotBuild(
                "lengths: expected numbers below 2**62, got a larger number, computed from "
                "lengths; compute it with tensors"
            ) from None
        masks = [formulas.holds(guard) for guard in guards]
        fits = [formulas.fits(formula, dtypes[number]) for number, formula in scalars.items()]
        holds = np.logical_and.reduce([np.ones(len(remaining), bool), *masks, *fits])
        remaining &= np.logical_and.reduce([remaining, *fits])
        if (holds & ~is_valid).any() or not holds[index]:
            raise CannotBuild(
                f"lengths: at {sizes}, the code of the step depends on the lengths in a way that a "
                "build does not support; capture the step without dynamic axes"
            )
        used = [guard for guard, mask in zip(guards, masks, strict=True) if not mask.all()]
        yield BuiltVariant(functions, used, scalars)
        remaining &= ~holds
    raise CannotBuild(
        "lengths: expected at most 256 variants, got more; capture the step "
        "with lower bounds, max_sizes="
    )


def _values_at(opened: OpenStep, sizes: Sequence[int]) -> list[Any] | None:
    """Return the values of all formulas at these sizes; None if the step is not for them."""
    names = [each.name for each in opened.lengths]
    try:
        values = opened.values_of(dict(zip(names, sizes, strict=True)))
    except ShapeError:
        return None
    return values if opened.template.fits(values) else None


def axes_of(opened: OpenStep) -> dict[tuple[int, int], int]:
    """Return the number of the size of each axis of an input, by input and axis.

    Raises `CannotBuild` for an axis of two sizes.
    """
    names = [each.name for each in opened.lengths]
    axes: dict[tuple[int, int], int] = {}
    for k, each in enumerate(opened.lengths):
        for place in each.axes:
            if axes.setdefault(place, k) != k:
                raise CannotBuild(
                    f"lengths: {names[axes[place]]!r} and {each.name!r} name the same axis of one "
                    f"tensor; use one name"
                )
    return axes
