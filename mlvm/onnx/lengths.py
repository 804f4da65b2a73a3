"""Lengths that a saved file leaves open.

A function is traced at several sizes. Parts that agree in all its graphs are written once. A number
that differs must be a sum of products of the lengths. It is fitted to the first sizes and checked
against the others, and the file computes it from the shapes of its inputs. Any other difference is
refused, with its op and line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from mlvm.core.errors import ArgumentError, ModelError
from mlvm.core.types import Array, DType, TensorType, bool_, f64, i64
from mlvm.eager import Tensor
from mlvm.eager.tensor.reading import values_of
from mlvm.onnx.arrays import NAMES

_DTYPES: Final = {code: dtype for dtype, code in NAMES.items()}
_NAMED: Final = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)")
_MOST: Final = 4  # names: the recordings double with each
_LARGE: Final = 1000  # what is decided by a length, as by x[:100], is seen up to there
_EXACT: Final = 1 << 53  # up to which f64 has all integers

Sizes = Mapping[str, int]
Formula = tuple[tuple[tuple[str, ...], int], ...]
"""The terms of a sum: the lengths of a product, and its factor."""
Node = dict[str, Any]


class OpenAxis(NamedTuple):
    """Open axis: its length is `times` the named one."""

    name: str
    times: int

    def __str__(self) -> str:
        return self.name if self.times == 1 else f"{self.times}*{self.name}"


OpenAxes = dict[str, dict[int, OpenAxis]]
"""Open axes by the name of an input and the axis."""


def open_axes(
    dynamic_axes: Mapping[str, Mapping[int, str]], inputs: Mapping[str, TensorType]
) -> OpenAxes:
    """Parse the argument `dynamic_axes` of `save`. Raises `ArgumentError` if it names no axis of an
    input."""

    def refuse(reason: str) -> ArgumentError:
        return ArgumentError(f"dynamic_axes: {reason}").at("save", ())

    axes_of_inputs: OpenAxes = {}
    for name, axes in (
        dynamic_axes.items() if isinstance(dynamic_axes, Mapping) else [("", dynamic_axes)]
    ):
        if not isinstance(axes, Mapping):
            raise refuse("it is a dict such as {'x': {0: 'batch'}}")
        if name not in inputs:
            raise refuse(f"there is no input {name!r} among {', '.join(inputs)}")
        shape = inputs[name].shape
        for axis, text in axes.items():
            match = _NAMED.fullmatch(text) if isinstance(text, str) else None
            if match is None or int(match[1] or 1) < 1:
                raise refuse(f"{text!r} is no name of a length, such as 'batch' or '8*width'")
            if type(axis) is not int or not -len(shape) <= axis < len(shape):
                raise refuse(f"{name} is {inputs[name]}, it has no axis {axis!r}")
            axis %= len(shape)
            length = OpenAxis(match[2], int(match[1] or 1))
            if shape[axis] % length.times:
                raise refuse(f"axis {axis} of {name} is {shape[axis]}, which is no {length}")
            axes_of_inputs.setdefault(name, {})[axis] = length
    if len({each.name for axes in axes_of_inputs.values() for each in axes.values()}) > _MOST:
        raise refuse(f"there are more than {_MOST} names")
    return axes_of_inputs


def samples_of(axes: OpenAxes, inputs: Mapping[str, TensorType]) -> list[Sizes]:
    """Choose the sizes at which a function is traced. No two lengths are equal, so that no number
    fits two of them."""
    sizes: dict[str, int] = {}
    for name, own in axes.items():
        for axis, each in own.items():
            sizes.setdefault(each.name, inputs[name].shape[axis] // each.times)
    used = {n for x in inputs.values() for n in x.shape}
    first: dict[str, int] = {}
    for name, size in sizes.items():
        n = max(size, 1) + 1
        while used & {n, n + 1}:
            n += 1
        used |= {n, n + 1}
        first[name] = n
    corners = itertools.product((0, 1), repeat=len(first))
    samples: list[Sizes] = [
        {name: first[name] + more for name, more in zip(first, c, strict=True)} for c in corners
    ]
    for i, (slope, more) in enumerate(((1, 3), (3, 7))):
        samples.append(
            {name: slope * n + more + i + j for j, (name, n) in enumerate(first.items())}
        )
    samples += [{**samples[-1], name: samples[-1][name] + _LARGE} for name in first]
    return samples


def resized(type: TensorType, axes: Mapping[int, OpenAxis], sizes: Sizes) -> TensorType:
    """Return the type with its open axes at these sizes."""
    shape = [
        axes[i].times * sizes[axes[i].name] if i in axes else n for i, n in enumerate(type.shape)
    ]
    return TensorType(type.dtype, shape)


class Recorded(Protocol):
    """Graph of a function at certain sizes."""

    inputs: dict[str, TensorType]
    initializers: dict[str, Array | Tensor]
    functions: dict[Any, tuple[str, dict[str, Any]]]
    message: dict[str, Any]

    def constant(self, value: Array, type: TensorType) -> str: ...

    def name(self, stem: str) -> str: ...

    def new_node(
        self, op: str, inputs: Sequence[str], output: str, attributes: Mapping[str, Any]
    ) -> Node: ...


def merge(models: Sequence[Recorded], samples: Sequence[Sizes], axes: OpenAxes) -> None:
    """Generalise the first model to all sizes. Raises `ModelError`."""
    _Merge(models, samples, axes).run()


class _Merge:
    def __init__(
        self, models: Sequence[Recorded], samples: Sequence[Sizes], axes: OpenAxes
    ) -> None:
        self.models, self.samples, self.axes = models, samples, axes
        self.model = models[0]
        self.length_nodes: list[Node] = []
        self.functions = [dict(each.functions.values()) for each in models]
        self.more: dict[str, list[str]] = {}  # by function: what is passed to it behind the rest
        self.done: set[str] = set()  # initializers
        self.names = list(samples[0])
        self._formulas: dict[Formula, str] = {}
        products = [
            each
            for k in range(len(self.names) + 1)
            for each in itertools.combinations(self.names, k)
        ]
        self._products = products
        self._table = [[int(np.prod([s[x] for x in p])) for p in products] for s in samples]

    def run(self) -> None:
        message = self._graph([each.message for each in self.models])
        for value in message["input"]:
            dims = value["type"]["tensor_type"]["shape"]["dim"]
            for axis, each in self.axes.get(value["name"], {}).items():
                dims[axis] = {"dim_param": str(each)}
        message["node"] = self.length_nodes + message["node"]
        self.model.message = message

    # --- graphs -------------------------------------------------------------------------

    def _graph(self, graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        merged = dict(graphs[0])
        for side in ("input", "output"):
            merged[side] = [self._value(each) for each in self._rows(graphs, side, "the graph")]
        merged["node"] = [self._node(each) for each in self._nodes(graphs)]
        return merged

    def _nodes(self, graphs: Sequence[dict[str, Any]]) -> Iterable[tuple[Node, ...]]:
        """Yield corresponding nodes. Graphs with more nodes than others are refused at the first
        extra one."""
        rows = [each["node"] for each in graphs]
        yield from zip(*rows, strict=False)
        if len({*map(len, rows)}) > 1:
            longest = max(rows, key=len)
            raise self._differs(_where(longest[min(map(len, rows))]))

    def _rows(self, parts: Sequence[dict[str, Any]], field: str, where: str) -> Iterable[Any]:
        rows = [each[field] for each in parts]
        if len({*map(len, rows)}) > 1:
            raise self._differs(where)
        return zip(*rows, strict=True)

    def _value(self, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        types = [each["type"]["tensor_type"] for each in values]
        dims: list[dict[str, Any]] = []
        for each in self._rows([type["shape"] for type in types], "dim", values[0]["name"]):
            lengths = [dim["dim_value"] for dim in each]
            formula = self._fitted(lengths)
            if formula is None:
                dims.append({})
            elif len({*lengths}) == 1:
                dims.append(each[0])
            else:
                dims.append({"dim_param": _text(formula)})
        type = types[0] | {"shape": {"dim": dims}}
        return values[0] | {"type": {"tensor_type": type}}

    def _node(self, nodes: Sequence[Node]) -> Node:
        node = dict(nodes[0])
        where = _where(next((each for each in nodes if "doc_string" in each), node))
        op = node["op_type"]
        for field in ("op_type", "domain", "input", "output"):
            if any(each.get(field) != node.get(field) for each in nodes):
                raise self._differs(where)
        for name in node["input"]:
            self._initializer(name, where)
        merged = []
        for each in self._rows([n | {"attribute": n.get("attribute", [])} for n in nodes],
                               "attribute", where):  # fmt: skip
            if "g" in each[0]:
                merged.append(each[0] | {"g": self._graph([x["g"] for x in each])})
            elif any(x != each[0] for x in each):
                raise self._differs(where, f"its {each[0]['name']}")
            else:
                merged.append(each[0])
        if merged:
            node["attribute"] = merged
        if any(each.get("metadata_props") != node.get("metadata_props") for each in nodes):
            del node["metadata_props"]  # it is another call at each size
        if op in self.functions[0] and "domain" in node:
            node["input"] = [*node["input"], *self._function(op, where)]
        return node

    def _function(self, name: str, where: str) -> list[str]:
        """Turn constants of a function that differ into parameters; return their values' names."""
        if name in self.more:
            return self.more[name]
        bodies = [each[name] for each in self.functions]
        function, common, passed = bodies[0], [], self.more.setdefault(name, [])
        for nodes in self._rows(bodies, "node", where):
            first = nodes[0]
            if all(each == first for each in nodes):
                common.append(first)
                continue
            if any(each["op_type"] != "Constant" for each in nodes):
                raise self._differs(where)
            values = [_array(each["attribute"][0]["t"]) for each in nodes]
            function["input"] = [*function["input"], *first["output"]]
            passed.append(self._computed(values, where))
        function["node"] = common
        return passed

    def _initializer(self, name: str, where: str) -> None:
        """Compute the initializer from the lengths if it differs."""
        first = self.model.initializers.get(name)
        if first is None or name in self.done:
            return
        self.done.add(name)
        initializers = [
            each.initializers[name] for each in self.models if name in each.initializers
        ]
        if len(initializers) < len(self.models):
            raise self._differs(where)
        roots = {id(x.root) if isinstance(x, Tensor) else None for x in initializers}
        if isinstance(first, Tensor) and roots == {id(first.root)}:
            return
        values = [values_of(x) if isinstance(x, Tensor) else x for x in initializers]
        if not all(_same(x, values[0]) for x in values):
            computed = self._computed(values, where)
            del self.model.initializers[name]
            self._add("Identity", computed, into=name)

    def _differs(self, where: str, what: str = "what is done") -> ModelError:
        return ModelError(
            f"{where} has no form for other lengths: {what} differs, and by no sum of products of "
            f"{', '.join(self.names)}; leave fewer open, or name multiples such as '8*n'"
        )

    # --- values -------------------------------------------------------------------------

    def _fitted(self, values: Sequence[int]) -> Formula | None:
        """Fit a sum of products to values, one for each size; None if there is none."""
        if len({*values}) == 1:
            return (((), values[0]),)
        if max(map(abs, values)) > _EXACT:
            return None
        count = len(self._products)
        solution = np.linalg.solve(
            np.array(self._table[:count], float), np.array(values[:count], float)
        )
        terms = [round(x) for x in solution.tolist()]
        for row, value in zip(self._table, values, strict=True):
            if sum(a * b for a, b in zip(row, terms, strict=True)) != value:
                return None
        return tuple((p, n) for p, n in zip(self._products, terms, strict=True) if n)

    def _add(self, op: str, *inputs: str, into: str | None = None, **attributes: Any) -> str:
        name = into or self.model.name("length")
        self.length_nodes.append(self.model.new_node(op, inputs, name, attributes))
        return name

    def _constant(self, values: Any, dtype: DType = i64) -> str:
        array = np.asarray(values, dtype.numpy)
        return self.model.constant(array, TensorType(dtype, array.shape))

    def _length(self, name: str) -> str:
        """Add nodes that compute a named length, i64[1]."""
        formula: Formula = (((name,), 1),)
        if formula not in self._formulas:
            source, axis, each = next(
                (input, axis, each)
                for input, own in self.axes.items()
                for axis, each in own.items()
                if each.name == name
            )
            length = self._add("Shape", source, start=axis, end=axis + 1)
            if each.times > 1:
                length = self._add("Div", length, self._constant([each.times]))
            self._formulas[formula] = length
        return self._formulas[formula]

    def _number(self, formula: Formula) -> str:
        """Add nodes that compute a formula, i64[1]."""
        if formula not in self._formulas:
            total = ""
            for product, times in formula:
                factors = [self._length(name) for name in product]
                if times != 1 or not factors:
                    factors.append(self._constant([times]))
                term = factors[0]
                for factor in factors[1:]:
                    term = self._add("Mul", term, factor)
                total = self._add("Add", total, term) if total else term
            self._formulas[formula] = total or self._constant([0])
        return self._formulas[formula]

    def _numbers(self, rows: Sequence[Sequence[int]]) -> str | None:
        """Add nodes that compute rows of numbers, one row for each size: i64[n]; None if a number
        has no formula."""
        formulas = [self._fitted(each) for each in zip(*rows, strict=True)]
        if any(each is None for each in formulas):
            return None
        parts = [self._number(each) for each in formulas if each is not None]
        return self._add("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def _computed(self, values: Sequence[Array], where: str) -> str:
        """Add nodes that compute a constant with these values, one for each size; return its
        name."""
        dtype, shapes = DType.of(values[0].dtype), [x.shape for x in values]
        name = None
        if len({*map(len, shapes)}) == 1 and dtype.kind != "complex":
            if len({*shapes}) > 1:
                name = self._uniform(values, dtype) or self._counted(values, dtype)
            elif dtype.is_integer:
                name = self._numbers([x.reshape(-1).tolist() for x in values])
            elif dtype.is_float and values[0].size == 1 and not dtype.is_half:
                name = self._ratio(values)
        if name is None:
            raise self._differs(where, "a constant")
        if len({*shapes}) == 1:
            if dtype is not i64:
                name = self._add("Cast", name, to=NAMES[dtype])
            if len(shapes[0]) != 1:
                name = self._add("Reshape", name, self._constant(shapes[0]))
        return name

    def _uniform(self, values: Sequence[Array], dtype: DType) -> str | None:
        """Compute a constant of one number whose shape differs."""
        if any(
            not x.size or not _same(x, np.broadcast_to(values[0].flat[0], x.shape)) for x in values
        ):
            return None
        shape = self._numbers([x.shape for x in values])
        return shape and self._add("Expand", self._constant(values[0].flat[0], dtype), shape)

    def _counted(self, values: Sequence[Array], dtype: DType) -> str | None:
        """Compute a constant of integers with a fixed step between them, along one axis."""
        if values[0].ndim != 1 or values[0].size < 2 or dtype.is_half or dtype is bool_:
            return None
        step = float(values[0][1]) - float(values[0][0])
        if step == 0 or not step.is_integer():
            return None
        first = [int(x[0]) if x.size and np.isfinite(x[0]) else 0 for x in values]
        steps = [
            np.arange(a, a + x.size * int(step), int(step))
            for a, x in zip(first, values, strict=True)
        ]
        if not all(map(np.array_equal, steps, values)):
            return None
        ends = self._numbers(
            [[a, a + x.size * int(step)] for a, x in zip(first, values, strict=True)]
        )
        if ends is None:
            return None
        start, stop = (
            self._add("Reshape", self._add("Gather", ends, self._constant([i])), self._constant([]))
            for i in (0, 1)
        )
        numbers = self._add("Range", start, stop, self._constant(int(step)))
        return numbers if dtype is i64 else self._add("Cast", numbers, to=NAMES[dtype])

    def _ratio(self, values: Sequence[Array]) -> str | None:
        """Compute a constant that is an integer or the reciprocal of one: f64[1]."""
        scalars = [x.item() for x in values]
        if all(x == int(x) for x in scalars if np.isfinite(x)) and np.isfinite(scalars).all():
            name = self._numbers([[int(x)] for x in scalars])
            return name and self._add("Cast", name, to=NAMES[f64])
        below = [round(1 / x) if np.isfinite(x) and abs(x) * _EXACT > 1 else 0 for x in scalars]
        if all(n and values[0].dtype.type(1 / n) == x for n, x in zip(below, scalars, strict=True)):
            name = self._numbers([[n] for n in below])
            if name:
                whole = self._add("Cast", name, to=NAMES[f64])
                return self._add("Div", self._constant([1.0], f64), whole)
        return None


def _where(node: Node) -> str:
    """Describe a node by its line of Python and its op."""
    line, op = node.get("doc_string"), node["op_type"]
    return f"{line}: {op}" if line else f"the node {node['name']}"


def _same(x: Array, y: Array) -> bool:
    """Return whether two arrays are equal to the bit."""
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _array(tensor: Mapping[str, Any]) -> Array:
    """Return the values of a tensor's message."""
    data = np.frombuffer(tensor["raw_data"], _DTYPES[tensor["data_type"]].numpy)
    return data.reshape(tensor["dims"])


def _text(formula: Formula) -> str:
    """Format a formula, as `2*batch*width + 1`."""
    terms = [
        "*".join([*([str(n)] if n != 1 or not product else []), *product]) for product, n in formula
    ]
    return " + ".join(terms[::-1]).replace("+ -", "- ")
