"""Dynamic part of a saved step: sizes, and the formulas that depend on them.

In: a planned template with the formulas of the trace, and the values of these in the call before
    saving.
Out: the step for inputs of other sizes, in the memory of the plan; and fields for a file. In a
    file the index of a value is the mapping `{"": index}`, a type with indices is `{"": (dtype,
    shape)}`, and a function of lanes `{"": fields}`; no attribute has an empty name.
Callers: `SavedStep`. Formulas use only the functions in `FUNCTIONS`, on small integers, since files
    may be untrusted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mlvm.core.dynamic_sizes import Length
from mlvm.core.errors import ShapeError, brief
from mlvm.core.memo import exact_repr
from mlvm.core.program.encoding import Reader, Writer
from mlvm.core.types import DType, TensorType
from mlvm.step.compile import Planned
from mlvm.step.open_lanes import OpenLanes
from mlvm.step.templates import OpenType, Place, PlannedTemplate, at, mapped

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    fn.__name__: fn
    for fn in (
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
        *(operator.mod, operator.pow, operator.lshift, operator.rshift, operator.and_),
        *(operator.or_, operator.xor, operator.neg, operator.pos, operator.invert, operator.abs),
        *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
        *(operator.truth, abs, divmod, math.log),
    )
}
"""Functions of formulas by name."""

_NUMBERS: Final = frozenset({bool, int, float})


class StepLength(NamedTuple):
    """Length of a saved step.

    name, at_most: as in `capture`.
    place: index of the value.
    axes: the axes with this size, as numbers of an input and an axis.
    """

    name: str
    at_most: int
    place: int
    axes: tuple[tuple[int, int], ...]


class OpenStep(NamedTuple):
    """Dynamic part of a saved step.

    `lengths`: the dynamic sizes.
    `values`: the values of all formulas in the call before saving.
    `steps`: the computation: index of a result, a function's name, indices of its operands.
    `guards`: indices of values that must be the same as in that call, each with the line of Python
        that needed the value, or "".
    `scalars`: numbers of states that are computed from sizes, each with the index of its value.
    `inputs`, `outputs`, `results`: types with indices, in the order of the step.
    `template`: the program.
    """

    lengths: tuple[StepLength, ...]
    values: tuple[Any, ...]
    steps: tuple[tuple[int, str, tuple[int, ...]], ...]
    guards: tuple[tuple[int, str], ...]
    scalars: tuple[tuple[int, int], ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    results: tuple[Any, ...]
    template: PlannedTemplate

    def __str__(self) -> str:
        """Return the sizes, as in `time = 12, at most 64`."""
        return "; ".join(
            [f"{x.name} = {self.values[x.place]}, at most {x.at_most}" for x in self.lengths]
        )

    def input_types(self) -> list[str]:
        """Return the types of inputs, with the names of sizes."""
        names = {(i, axis): each.name for each in self.lengths for i, axis in each.axes}
        present = [at(each, self.values) for each in self.inputs]
        shapes = [
            ",".join(str(names.get((i, k), n)) for k, n in enumerate(type.shape))
            for i, type in enumerate(present)
        ]
        return [f"{type.dtype.name}[{shape}]" for type, shape in zip(present, shapes, strict=True)]

    def values_at(self, types: Sequence[TensorType]) -> list[Any]:
        """Return the values of all formulas for inputs of these types.

        Raises `ShapeError` if a name has two sizes, and as `values_of`.
        """
        sizes: dict[str, int] = {}
        for each in self.lengths:
            first = None
            for i, axis in each.axes:
                type = types[i]
                if len(type.shape) != len(self.inputs[i].shape):
                    raise ShapeError(
                        f"step: expected input {i} as {self.input_types()[i]}, got {type}"
                    )
                n, where = type.shape[axis], f"axis {axis} of input {i}"
                first = first or (n, where)
                if n != first[0]:
                    raise ShapeError(
                        f"step: {each.name!r} is {first[0]} at {first[1]}, and {n} at {where}: "
                        f"axes of one name have one size"
                    )
                sizes[each.name] = n
        return self.values_of(sizes)

    def values_of(self, sizes: Mapping[str, int]) -> list[Any]:
        """Return the values of all formulas for these sizes; other sizes are unchanged.

        Other sizes are those of the call before saving. Raises `ShapeError` for an unknown name,
        for a size of 0 or above the bound, and for sizes with which the function would execute
        other branches than in that call.
        """
        values = [*self.values]
        names = {each.name: each for each in self.lengths}
        for name, n in sizes.items():
            if name not in names:
                raise ShapeError(f"step: expected a length of {', '.join(names)}, got {name!r}")
            if not 1 <= n <= names[name].at_most:
                axes = " and ".join([f"axis {axis} of input {i}" for i, axis in names[name].axes])
                raise ShapeError(
                    f"step: {axes} is {name!r} = {n}, expected 1 to {names[name].at_most}"
                )
            values[names[name].place] = n
        line = self._compute(values)
        if line is not None:
            is_short = any(values[each.place] < 2 for each in self.lengths)
            how = (
                "captured with dynamic_axes=False" if is_short else "after a call at these lengths"
            )
            raise ShapeError(
                f"step: at {self.sizes(values)} the function takes other branches than at "
                f"{self.sizes(self.values)}{line and f', in {line}'}; save a second step, {how}"
            )
        return values

    def symbols(self, values: Sequence[Any], placeholders: Sequence[Any]) -> list[Any]:
        """Return the values of all formulas with placeholders for the sizes.

        Values that are derived from sizes are derived from the placeholders. Guards are also
        evaluated, so that the placeholders record them.
        """
        symbols = [*values]
        for length, placeholder in zip(self.lengths, placeholders, strict=True):
            symbols[length.place] = placeholder
        for place, name, operands in self.steps:
            symbols[place] = FUNCTIONS[name](*[symbols[each] for each in operands])
        for place, _ in self.guards:
            if isinstance(symbols[place], Length):
                symbols[place].see()
        return symbols

    def sizes(self, values: Sequence[Any]) -> str:
        """Return the sizes among these values, as in `time = 12`."""
        return ", ".join([f"{each.name} = {values[each.place]}" for each in self.lengths])

    def _compute(self, values: list[Any]) -> str | None:
        """Compute all values from the first ones; return None if all guards hold.

        Otherwise return the line of the first guard that fails, or "". A formula with a large power
        or a huge integer fails, too, before it needs much time.
        """
        try:
            for place, name, operands in self.steps:
                arguments = [values[each] for each in operands]
                if not _NUMBERS.issuperset(map(type, arguments)):
                    return ""
                if name in ("pow", "lshift") and abs(arguments[1]) > 64:
                    return ""
                value = values[place] = FUNCTIONS[name](*arguments)
                if type(value) is not type(self.values[place]):
                    return ""
                if type(value) is int and value.bit_length() > 2000:
                    return ""
        except (ArithmeticError, ValueError):  # the eager call would raise it
            return ""
        fails = [
            line for i, line in self.guards if exact_repr(values[i]) != exact_repr(self.values[i])
        ]
        return next(filter(None, fails), "") if fails else None

    def planned_at(self, values: Sequence[Any]) -> Planned:
        """Return the program for these values.

        Raises `ShapeError` if a temporary is larger than in the plan.
        """
        planned = self.template.at(values)
        if planned is None:
            raise ShapeError(
                f"step: at {self.sizes(values)} a temporary is larger than at the bounds of "
                "lengths; "
                "save a step for larger sizes"
            )
        return planned

    def write(self, writer: Writer) -> None:
        """Write all parts; `read` is the inverse."""
        template = self.template
        writer.sequence([tuple(each) for each in self.lengths])
        for row in (self.values, self.steps, self.guards, self.scalars):
            writer.sequence(row)
        for types in (self.inputs, self.outputs, self.results):
            writer.sequence([_closed(each) for each in types])
        arguments = template.types.items()
        writer.sequence([(i, _closed(x), template.sizes.get(i, -1)) for i, x in arguments])
        writer.sequence([(*place, _closed(x)) for place, x in template.code.items()])
        writer.sequence([(i, _closed(x)) for i, x in template.lifetimes.items()])

    @staticmethod
    def read(reader: Reader, planned: Planned) -> OpenStep:
        """Read the dynamic part of a step with this program.

        The caller checks that it belongs to the step. Raises `EncodingError` for invalid fields.
        """
        rows: list[tuple[Any, ...]] = [tuple(reader.sequence()) for _ in range(11)]
        try:
            if not rows[0]:
                raise ValueError("expected at least one length, got none")
            lengths = tuple([StepLength(*each) for each in rows[0]])
            for name, at_most, _, axes in lengths:
                if type(name) is not str or type(at_most) is not int or not axes:
                    raise ValueError(
                        f"expected a length with a name, a bound and axes, got {brief(name)}"
                    )
            for _, place in rows[4]:
                if place not in range(len(rows[1])) or type(rows[1][place]) not in _NUMBERS:
                    text = f"expected the index of a number in the state, got {brief(place)}"
                    raise ValueError(text)
            guards = tuple([each if type(each) is tuple else (each, "") for each in rows[3]])
            for place, line in guards:
                if type(place) is not int or type(line) is not str:
                    raise ValueError(
                        f"expected a guard as an index and a source line, got "
                        f"{brief((place, line))}"
                    )
            inputs, outputs, results = [tuple(map(_opened, row)) for row in rows[5:8]]
            types = {i: _opened(type) for i, type, _ in rows[8]}
            sizes = {i: nbytes for i, _, nbytes in rows[8] if nbytes >= 0}
            code = {(name, pc): _opened(immediates) for name, pc, immediates in rows[9]}
            stays = {i: _opened(type) for i, type in rows[10]}
            template = PlannedTemplate(planned, code, types, sizes, stays)
            parts = *rows[1:3], guards, rows[4], inputs, outputs, results
            return OpenStep._make((lengths, *parts, template))
        except (TypeError, ValueError) as error:
            raise reader.error(f"expected the lengths of a step: {error}") from None


def _closed(part: Any) -> Any:
    """Return a frozen part as values for a file."""
    if type(part) is Place:
        return {"": part.number}
    if type(part) is OpenType:
        return {"": (part.dtype, mapped(_closed, part.shape))}
    if type(part) is OpenLanes:
        return {"": part.fields(_closed)}
    return mapped(_closed, part)


def _opened(part: Any) -> Any:
    """Return the part from the values of `_closed`."""
    if type(part) is dict and "" in part:
        match part[""]:
            case int() as place:
                return Place(place)
            case (DType() as dtype, tuple() as shape):
                return OpenType(dtype, mapped(_opened, shape))
            case (*fields,) if len(fields) == OpenLanes.NFIELDS:
                return OpenLanes.read(fields, _opened)
            case other:
                raise ValueError(f"expected the index of a value, got {brief(other)}")
    return mapped(_opened, part)
