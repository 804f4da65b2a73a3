"""Dynamic sizes of a saved file: formulas of a trace as ONNX shape arithmetic.

In: the argument `dynamic_axes`, and the numbers of a trace in which these axes are dynamic. Out:
nodes that compute sizes and scalars from the input shapes. A decision that depends on a size, as
in `x[:100]`, must have the same outcome at several sizes, because a file has no guards.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, ModelError
from mlvm.core.types import Array, DType, TensorType, f64, i64
from mlvm.eager.tensor.number import Numbers, is_open
from mlvm.onnx.arrays import NAMES

_NAMED: Final = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)")
_OPERATORS: Final[Mapping[Callable[..., Any], str]] = {
    operator.add: "Add",
    operator.sub: "Sub",
    operator.mul: "Mul",
    operator.truediv: "Div",
    operator.pow: "Pow",
    operator.mod: "Mod",
    operator.neg: "Neg",
    operator.pos: "Identity",
    abs: "Abs",
}

Sizes = Mapping[str, int]


class OpenAxis(NamedTuple):
    """Dynamic axis: the size is `times` the named size."""

    name: str
    times: int

    def __str__(self) -> str:
        return self.name if self.times == 1 else f"{self.times}*{self.name}"


AxisNames: TypeAlias = Mapping[int, str] | tuple[str | None, ...]
"""Names of an input's axes: by axis, or a name or None for each axis."""

OpenAxes = dict[str, dict[int, OpenAxis]]
"""Dynamic axes by input name and axis."""


def open_axes(dynamic_axes: Mapping[str, AxisNames], inputs: Mapping[str, TensorType]) -> OpenAxes:
    """Parse the argument `dynamic_axes` of `save`.

    Raises `ArgumentError` if it is invalid.
    """

    def refuse(reason: str) -> ArgumentError:
        return ArgumentError(f"dynamic_axes: {reason}").at("save", ())

    if not isinstance(dynamic_axes, Mapping):
        raise refuse(f"expected a dict such as {{'x': ('batch', None)}}, got {dynamic_axes!r:.100}")
    axes_of_inputs: OpenAxes = {}
    for name, axes in dynamic_axes.items():
        if name not in inputs:
            raise refuse(f"unknown input {name!r}; the inputs are {', '.join(inputs)}")
        shape = inputs[name].shape
        if isinstance(axes, tuple) and len(axes) == len(shape):
            axes = {axis: text for axis, text in enumerate(axes) if text is not None}
        if not isinstance(axes, Mapping):
            raise refuse(
                f"expected a name or None for each axis of {name}, {inputs[name]}, as in "
                f"{{'x': ('batch', None)}}, got {axes!r:.100}"
            )
        for axis, text in axes.items():
            match = _NAMED.fullmatch(text) if isinstance(text, str) else None
            if match is None or int(match[1] or 1) < 1:
                raise refuse(f"{text!r} is not a name of a length, such as 'batch' or '8*width'")
            if type(axis) is not int or not -len(shape) <= axis < len(shape):
                raise refuse(f"expected an axis of {name}, {inputs[name]}, got {axis!r}")
            axis %= len(shape)
            length = OpenAxis(match[2], int(match[1] or 1))
            if shape[axis] % length.times:
                raise refuse(
                    f"expected a multiple of {length.times} for {length}, got axis {axis} of "
                    f"{name}, which is {shape[axis]}"
                )
            axes_of_inputs.setdefault(name, {})[axis] = length
    return axes_of_inputs


def sources_of(axes: OpenAxes) -> dict[str, tuple[str, int, int]]:
    """Return, for each named size, an input, an axis with this size, and a factor."""
    sources: dict[str, tuple[str, int, int]] = {}
    for input, own in axes.items():
        for axis, each in own.items():
            sources.setdefault(each.name, (input, axis, each.times))
    return sources


def samples_of(axes: OpenAxes, inputs: Mapping[str, TensorType]) -> list[Sizes]:
    """Choose the sizes for tracing a function, and sizes at which all decisions must agree.

    All sizes are different, so the trace does not broadcast one size to another.
    """
    used = {n for x in inputs.values() for n in x.shape}
    first: dict[str, int] = {}
    for name, (input, axis, times) in sources_of(axes).items():
        n = max(inputs[input].shape[axis] // times, 1) + 1
        while used & {n, n + 1}:
            n += 1
        used |= {n, n + 1}
        first[name] = n
    samples: list[Sizes] = [first]
    for i, (slope, more) in enumerate(((1, 1), (1, 3), (3, 7))):
        samples.append({x: slope * n + more + i * j for j, (x, n) in enumerate(first.items())})
    # Limit of sizes for comparing decisions such as x[:100].
    samples += [{**first, name: n + more} for name, n in first.items() for more in (1, 1000)]
    return samples


def resized(type: TensorType, axes: Mapping[int, OpenAxis], sizes: Sizes) -> TensorType:
    """Return the type with dynamic axes replaced by these sizes."""
    shape = [
        axes[i].times * sizes[axes[i].name] if i in axes else n for i, n in enumerate(type.shape)
    ]
    return TensorType(type.dtype, shape)


class GraphWriter(Protocol):
    """Writer of a file."""

    def constant(self, value: Array, type: TensorType) -> str: ...

    def name(self, stem: str) -> str: ...

    def new_node(
        self, op: str, inputs: Sequence[str], outputs: Iterable[str], attributes: Mapping[str, Any]
    ) -> dict[str, Any]: ...


class Lengths:
    """Writer of the formulas of a trace; the first values are the sizes.

    nodes: compute the formulas that are in use.
    """

    def __init__(self, numbers: Numbers, axes: OpenAxes, writer: GraphWriter) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._numbers, self._writer = numbers, writer
        self._sources = list(sources_of(axes).items())
        self._steps: dict[int, tuple[Callable[..., Any], tuple[int, ...]]] = {}
        self._written: dict[int, str] = {}
        self._located = len(numbers.guarded)

    def vector(self, values: Sequence[int]) -> str:
        """Add nodes that compute the values, i64[n]; return the name of the result."""
        parts: list[str] = []
        for is_formula, group in itertools.groupby(values, is_open):
            sizes: list[Any] = [*group]
            parts += [self._value(n.place) for n in sizes] if is_formula else [self._ints(sizes)]
        parts = parts or [self._ints([])]
        return self._add("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def written(self, value: Any, dtype: DType) -> str:
        """Add nodes that compute a list of sizes, or a number of a dtype; return the name."""
        return self.vector(value) if isinstance(value, list) else self.scalar(value.place, dtype)

    def scalar(self, place: int, dtype: DType) -> str:
        """Add nodes that compute the value at a place in a dtype; return the name."""
        name = self._value(place)
        if dtype is not self._dtype(place):
            name = self._add("Cast", name, to=NAMES[dtype])
        return self._add("Reshape", name, self._ints([]))

    def dim(self, n: Any) -> dict[str, Any]:
        """Return the message of a size: an integer, or a formula as `2*batch*width + 1`."""
        return {"dim_param": self._text(n.place)} if is_open(n) else {"dim_value": n}

    # --- guards -------------------------------------------------------------------------

    def locate(self, where: str) -> None:
        """Set the location of the guards since the last call."""
        numbers = self._numbers
        for place in [*numbers.guarded][self._located :]:
            numbers.guarded[place] = where
        self._located = len(numbers.guarded)

    def decided(self, samples: Iterable[Sizes]) -> int | None:
        """Return the index of a used value that differs at some of these sizes.

        Return None if all values agree.
        """
        numbers = self._numbers
        for sizes in samples:
            values = numbers.computed([*sizes.values()])
            place = 0 if values is None else numbers.broken(values)
            if place is not None:
                return place
        return None

    def refused(self, place: int) -> ModelError:
        """Return the error for a file that depends on the value at a place."""
        sources = self._numbers.sources({place})
        names = [name for i, (name, _) in enumerate(self._sources) if i in sources]
        where = self._numbers.guarded.get(place) or "the function"
        return ModelError(
            f"{where} is not valid for other lengths: it depends on the value of "
            f"{', '.join(names)}; write x.shape[0] for len(x), compute without numpy, leave fewer "
            f"open, or name multiples such as '8*n'"
        )

    # --- formulas -----------------------------------------------------------------------

    def _value(self, place: int) -> str:
        """Add nodes that compute the value at a place, i64[1] or f64[1]; return the name."""
        for each in sorted(self._numbers.sources({place}) - self._written.keys()):
            self._written[each] = self._formula(each)
        return self._written[place]

    def _formula(self, place: int) -> str:
        """Add the node of a value; the operands are already written."""
        value, dtype = self._numbers.values[place], self._dtype(place)
        if place < len(self._sources):
            _, (input, axis, times) = self._sources[place]
            name = self._add("Shape", input, start=axis, end=axis + 1)
            return name if times == 1 else self._add("Div", name, self._ints([times]))
        step = self._step(place)
        if step is None:
            return self._writer.constant(np.array([value], dtype.numpy), TensorType(dtype, (1,)))
        fn, operands = step
        names = [self._written[each] for each in operands]
        if dtype is f64:
            names = [
                name if self._dtype(each) is f64 else self._add("Cast", name, to=NAMES[f64])
                for name, each in zip(names, operands, strict=True)
            ]
        if fn is operator.floordiv and dtype is i64:
            return self._add("Div", self._add("Sub", names[0], self._add("Mod", *names)), names[1])
        if fn not in _OPERATORS or (fn is operator.mod and dtype is f64):
            raise ModelError(
                f"{fn.__name__} of a length cannot be expressed in ONNX; compute it with tensors"
            )
        return self._add(_OPERATORS[fn], *names)

    def _step(self, place: int) -> tuple[Callable[..., Any], tuple[int, ...]] | None:
        """Return the function and the operands of a value; None for a constant."""
        self._steps |= {n: (fn, x) for n, fn, x in self._numbers.steps[len(self._steps) :]}
        return self._steps.get(place)

    def _dtype(self, place: int) -> DType:
        return f64 if type(self._numbers.values[place]) is float else i64

    def _add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = self._writer.name("length")
        self.nodes.append(self._writer.new_node(op, inputs, [name], attributes))
        return name

    def _ints(self, values: Iterable[int]) -> str:
        array = np.array([*values], np.int64)
        return self._writer.constant(array, TensorType(i64, array.shape))

    def _text(self, place: int) -> str:
        terms = []
        for atoms, times in reversed(self._numbers.polynomial_of(place) or ()):
            factors = [str(times)] if times != 1 or not atoms else []
            terms.append("*".join([*factors, *map(self._text_of_atom, atoms)]))
        return " + ".join(terms).replace("+ -", "- ")

    def _text_of_atom(self, place: int) -> str:
        if place < len(self._sources):
            return self._sources[place][0]
        fn, operands = self._step(place)  # type: ignore[misc]
        return f"{fn.__name__}({', '.join(map(self._text, operands))})"
