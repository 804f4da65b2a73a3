"""Executable graph: the nodes that remain after constant folding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import MlvmError, ModelError, OpError, OutOfMemoryError, counted
from mlvm.core.ops import few
from mlvm.core.types import Array, DType, TensorType
from mlvm.onnx.arrays import FLOATS, INTEGERS, Files, array_of, is_array
from mlvm.onnx.limits import limit
from mlvm.onnx.own import DOMAIN, own_op
from mlvm.onnx.table import TABLE, OnnxOp, call
from mlvm.onnx.values import Value, Weight, are_known, bounded
from mlvm.onnx.wire import FIELDS, ProtoMessage

_OURS: Final = ("", "ai.onnx")
_NEWEST: Final = 1000  # larger numbers are not valid opsets
_PLAIN: Final = {1: "f", 2: "i", 13: "tp"}  # fields of attributes by kind
REFUSALS: Final = (
    *(MlvmError, TypeError, ValueError, AttributeError, LookupError),
    *(ArithmeticError, MemoryError),
)
"""Errors that an op raises for invalid operands and attributes."""
_DRAWS: Final = (
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"),
    *("Multinomial", "Bernoulli", "Dropout"),
)


@dataclass(eq=False, repr=False)
class GraphNode:
    """Call of an op.

    opset: version of the op's domain.
    inputs: names of operands, `Weight`s, or arrays.
    outputs: names of the results.
    numbers: `TensorProto.DataType` of each operand that is stored in a wider dtype, otherwise 0.
    last: names whose last use is this node.
    """

    name: str
    type: str
    op: OnnxOp
    opset: int
    inputs: list[Any]
    outputs: list[str]
    attributes: dict[str, Any]

    def __post_init__(self) -> None:
        self.graphs = [x for x in self.attributes.values() if isinstance(x, Graph)]
        self.numbers = [0] * len(self.inputs)
        self.last: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "op"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, op=TABLE[state["type"]])

    def __str__(self) -> str:
        return f"{self.type} {self.name!r}" if self.name else self.type

    def reads(self) -> list[str]:
        """Return the names that the node and its subgraphs read."""
        own = [x for x in self.inputs if type(x) is str and x]
        return own + [name for graph in self.graphs for name in graph.free]


class ValueKind(NamedTuple):
    """Declared type of a value.

    container: "", "sequence" or "optional".
    number: `TensorProto.DataType` of the elements, 0 if undeclared.
    shape: sizes; a name or None for a dynamic size.
    """

    container: str
    number: int
    shape: tuple[int | str | None, ...] | None


@dataclass(eq=False, repr=False)
class Graph:
    """Nodes in the order in which they run.

    constants: outputs whose values are constant, by name.
    kinds: declared types of inputs and outputs.
    labels: arrays and names in the file, by identity.

    free: names of the enclosing graph that the nodes read.
    names: names of the outputs in the file.

    static_names: names whose values may decide a size, a shape or a branch.
    quantized: arrays, and the nodes that dequantised them, by identity.
    """

    nodes: list[GraphNode]
    inputs: list[str]
    outputs: list[str]
    constants: dict[str, Array]
    kinds: dict[str, ValueKind]
    labels: dict[int, tuple[Array, str]]

    def __post_init__(self) -> None:
        self.free: list[str] = []
        self.names = list(self.outputs)
        self.static_names: frozenset[str] = frozenset()
        self.quantized: dict[int, tuple[Array, GraphNode]] = {}

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes)"

    def names_read(self) -> list[str]:
        """Return the names that the nodes and the outputs read, excluding subgraphs."""
        return [*self.outputs, *(x for node in self.nodes for x in node.inputs if type(x) is str)]

    def all(self) -> list[Graph]:
        """Return all subgraphs, the innermost first, and finally this graph."""
        inner = [graph for node in self.nodes for graph in node.graphs]
        return [*(each for graph in inner for each in graph.all()), self]

    def settle(self) -> None:
        """Compute `free`, and `last` of each node. The subgraphs must already be settled."""
        own = {*self.inputs, *self.constants}.union(*[node.outputs for node in self.nodes])
        reads = list(self.outputs)
        for node in reversed(self.nodes):
            reads += node.reads()
        self.free = [name for name in dict.fromkeys(reads) if name not in own and name]
        used_later = {*self.outputs}
        for node in reversed(self.nodes):
            names = {*node.reads(), *filter(None, node.outputs)}
            node.last = [name for name in names if name not in used_later]
            used_later |= names

    def run(self, operands: Mapping[str, Value], frame: GraphFrame) -> list[Value]:
        """Run the nodes on operands; return the outputs.

        The operands include the values of the free names.
        """
        scope: dict[str, Value] = {**self.constants, **operands}
        inner = GraphFrame(frame.weights, scope)
        for node in self.nodes:
            inputs = [
                (scope[x] if x else None)
                if type(x) is str
                else frame.weights[x]
                if type(x) is Weight
                else x
                for x in node.inputs
            ]
            results = run(node, inputs, inner)
            scope.update(zip(node.outputs, results, strict=False))
            for name in node.outputs[len(results) :]:
                if name and name not in node.last:
                    raise ModelError(
                        f"{node}: expected at most {counted(len(results), 'result')}, but the "
                        f"graph uses {name!r}; remove the use"
                    )
            for name in node.last:
                scope.pop(name, None)
        return [scope[name] for name in self.outputs]


class GraphFrame(NamedTuple):
    """Values that a running graph can read: weights by name, and the values computed so far."""

    weights: Mapping[str, Value]
    scope: Mapping[str, Value]

    def call(self, graph: Graph, operands: Iterable[Value] = ()) -> list[Value]:
        """Run a subgraph on operands."""
        values = {name: self.scope[name] for name in graph.free}
        values.update(zip(graph.inputs, operands, strict=True))
        return graph.run(values, self)


def run(node: GraphNode, operands: list[Value], frame: GraphFrame | None) -> tuple[Value, ...]:
    """Run a node; errors name the node."""
    try:
        results = call(node, operands, frame)
    except REFUSALS as error:
        note = f"in the node {node}"
        if not isinstance(error, MlvmError):
            raise ModelError(f"{node}: {error}") from error
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        if isinstance(error, OpError):
            error.at(str(node), ())
        raise
    return results if isinstance(results, tuple) else (results,)


class Scope(NamedTuple):
    """Context of the nodes of a graph: the model, or a call of a function.

    opsets: versions of the domains.
    attributes: attributes of the function's call, to which nodes may refer.
    depth: number of enclosing functions.
    """

    opsets: Mapping[str, int]
    attributes: Mapping[str, ProtoMessage]
    depth: int


# --- built from messages ------------------------------------------------------------------


class Builder:
    """Builder of graphs from messages, which folds constants.

    Raises `ModelError` for a malformed graph and for unsupported ops.
    """

    def __init__(self, model: ProtoMessage, files: Files) -> None:
        self.files = files
        self.opsets = _opsets(model.opset_import)
        self.functions = {(f.domain, f.name, f.overload or ""): f for f in model.functions}
        self.labels: dict[int, tuple[Array, str]] = {}
        self._numbers: dict[str, int] = {}
        self._packed: dict[tuple[str, DType], Array] = {}
        self._count = 0
        for domain, version in self.opsets.items():
            if domain in _OURS and not 1 <= version < _NEWEST:
                raise ModelError(
                    f"expected an opset from 1 to {_NEWEST - 1}, got {version}; "
                    "convert with onnx.version_converter"
                )

    def graph(
        self,
        message: ProtoMessage,
        constants: Mapping[str, Array],
        names: frozenset[str],
        within: Scope | None = None,
    ) -> Graph:
        """Build a graph, given the constants, the names and the scope of the enclosing graph."""
        within = Scope(self.opsets, {}, 0) if within is None else within
        own: dict[str, Array] = {}
        for each in message.initializer:
            if each.name in own:
                raise ModelError(
                    f"expected unique names of initializers, got {each.name!r} twice; rename one"
                )
            own[each.name] = array_of(each, self.files)
            self.labels[id(own[each.name])] = own[each.name], each.name
            self._numbers[each.name] = each.data_type
        for each in message.sparse_initializer:
            own[each.values.name] = dense(each, self.files)
        inputs = [each.name for each in message.input if each.name not in own]
        outputs = [each.name for each in message.output]
        defined = {*names, *constants, *own, *inputs}
        if len(set(inputs)) != len(inputs):
            twice = next(name for name in inputs if inputs.count(name) > 1)
            raise ModelError(
                f"expected inputs with different names, got {twice!r} twice; rename one"
            )
        kinds = {each.name: kind_of(each) for each in (*message.input, *message.output)}
        graph = Graph([], inputs, outputs, {}, kinds, self.labels)
        self._numbers |= {name: kind.number for name, kind in kinds.items()}
        here = {name: x for name, x in constants.items() if name not in inputs} | own
        renamed: dict[str, str] = {}
        for node in self._nodes(message.node, here, defined, within):
            node.inputs = [
                here.get(x, renamed.get(x, x)) if type(x) is str else x for x in node.inputs
            ]
            plain = node.type == "Identity" and len(node.outputs) == 1
            if plain and type(node.inputs[0]) is str and node.inputs[0]:
                renamed[node.outputs[0]] = node.inputs[0]
                graph.nodes.append(node)
                continue
            arrays = _computed(node)
            if arrays is None:
                graph.nodes.append(node)
            else:
                here.update(zip(node.outputs, arrays, strict=False))
                if node.type == "DequantizeLinear":
                    graph.quantized[id(arrays[0])] = arrays[0], node
        inside = {x for inner in graph.all()[:-1] for x in inner.names_read()}
        unread = renamed.keys() - inside
        graph.nodes = [x for x in graph.nodes if x.type != "Identity" or x.outputs[0] not in unread]
        graph.outputs = [renamed.get(name, name) for name in outputs]
        graph.constants = {name: here[name] for name in graph.outputs if name in here}
        missing = [x for x in outputs if x not in defined]
        if missing:
            raise ModelError(
                f"the output {missing[0]!r} is not computed by any node; check it with onnx.checker"
            )
        return graph

    def _nodes(
        self,
        messages: Iterable[ProtoMessage],
        constants: dict[str, Array],
        defined: set[str],
        within: Scope,
    ) -> Any:
        """Yield the nodes of a graph; calls of functions are replaced by the function bodies."""
        most = 100_000  # a small file may call nested functions often
        for message in messages:
            self._count += 1
            if self._count > most:
                raise ModelError(f"expected at most {most} nodes, got more")
            what = f"{message.op_type} {message.name!r}"
            for name in message.input:
                if name and name not in defined:
                    raise ModelError(
                        f"{what} reads {name!r}, which no earlier node computes; "
                        "check it with onnx.checker"
                    )
            for name in message.output:
                if name and name in defined:
                    raise ModelError(
                        f"{what} computes {name!r}, which is already defined; rename one"
                    )
                defined.add(name)
            own = own_op(message)
            if own is not None:
                known_op, operands = own
                inputs = [self._stored(constants, name, dtype) for name, dtype in operands]
                type, outputs = f"{DOMAIN}.{message.op_type}", list(message.output)
                yield GraphNode(message.name, type, known_op, 1, inputs, outputs, {})
                continue
            key = message.domain, message.op_type, message.overload or ""
            body = self.functions.get(key)
            if body is not None:
                if within.depth > 50:
                    raise ModelError(f"the function {message.op_type} calls itself; use a Loop")
                yield from self._called(body, message, constants, defined, within)
                continue
            opsets = within.opsets
            version = opsets.get(message.domain, opsets.get("", opsets.get("ai.onnx", 1)))
            prefix = "" if message.domain in _OURS else f"{message.domain}."
            type = f"{prefix}{message.op_type}"
            op = TABLE.get(type)
            if op is None:
                remedy = "replace the node"
                if message.domain == "com.microsoft.nchwc":  # weights are in blocks of a processor
                    remedy = "save the optimized model with ORT_ENABLE_EXTENDED, not ORT_ENABLE_ALL"
                raise ModelError(
                    f"the node {message.name!r}: the op {type} is not supported; {remedy}"
                )
            values = {
                name: self._value(attribute, constants, defined, what, within)
                for name, attribute in _resolved(message, within.attributes).items()
            }
            inputs = _operands(message, op, values)
            if len(inputs) < op.least:
                count = len(inputs)
                raise ModelError(f"{what}: expected at least {op.least} operands, got {count}")
            for i in op.required(len(inputs)):
                if not (is_array(inputs[i]) or inputs[i]):
                    raise ModelError(f"{what}: operand {i} is required, got none; pass it")
            for i, name in enumerate(message.input[op.most :] if op.most is not None else ()):
                if name:
                    number = (op.most or 0) + i
                    raise ModelError(
                        f"{what}: operand {number}, {name!r}, is not supported; omit it"
                    )
            for name, value in op.only.items():
                if values.get(name, value) != value:
                    got = values[name]
                    raise ModelError(f"{what}: expected {name}={value!r}, got {got!r}")
            node = GraphNode(message.name, type, op, version, inputs, [*message.output], values)
            node.numbers = [0 if is_array(x) else self._numbers.get(x, 0) for x in inputs]
            node.numbers = [n if n in FLOATS or n in INTEGERS else 0 for n in node.numbers]
            if number := self._number(node, message):
                self._numbers.update(dict.fromkeys(node.outputs, number))
            yield node

    def _stored(self, constants: Mapping[str, Array], name: str, dtype: DType | None) -> Any:
        """Return the operand of an mlvm op; a low-bit constant is packed once."""
        array = constants.get(name)
        if dtype is None or array is None or DType.of(array.dtype) is not few.unpacked_dtype(dtype):
            return name
        if (name, dtype) not in self._packed:
            packed = np.empty(TensorType(dtype, array.shape).array_shape, dtype.numpy)
            few.pack(packed, array)
            self._packed[name, dtype] = packed
            self.labels[id(packed)] = packed, name
        return self._packed[name, dtype]

    def _number(self, node: GraphNode, message: ProtoMessage) -> int:
        """Return the `TensorProto.DataType` of a node's results.

        Return 0 if no attribute or operand determines it.
        """
        if node.type == "Constant":
            return max((a.t.data_type for a in message.attribute if a.t is not None), default=0)
        own = node.attributes.get("to") or node.attributes.get("output_dtype")
        place = {"CastLike": 1, "QuantizeLinear": 2}.get(node.type, 0)
        if own is None and node.type != "DequantizeLinear" and place < len(node.numbers):
            own = node.numbers[place]
        return own if isinstance(own, int) else 0

    def _called(
        self,
        body: ProtoMessage,
        node: ProtoMessage,
        constants: dict[str, Array],
        defined: set[str],
        within: Scope,
    ) -> Any:
        """Yield the nodes of a function, renamed for one call."""
        prefix = f"{node.name or node.op_type}:{self._count}:"
        names = dict(zip(body.input, [*node.input, *[""] * len(body.input)], strict=False))
        results = [x or f"{prefix}{i}" for i, x in enumerate(node.output)]
        names |= zip(body.output, results, strict=False)
        defined.difference_update(node.output)
        attributes = {each.name: each for each in body.attribute_proto}
        attributes |= _resolved(node, within.attributes)
        inner = [_renamed(each, names, prefix) for each in body.node]
        own = Scope(_opsets(body.opset_import), attributes, within.depth + 1)
        yield from self._nodes(inner, constants, defined, own)

    def _value(
        self,
        attribute: ProtoMessage,
        constants: dict[str, Array],
        defined: set[str],
        what: str,
        within: Scope,
    ) -> Any:
        """Return the value of an attribute."""
        kind = attribute.type
        if kind in _PLAIN:
            return getattr(attribute, _PLAIN[kind])
        if kind == 3:
            return bytes(attribute.s).decode("utf-8", "replace")
        if kind == 4 and attribute.t is not None:
            return array_of(attribute.t, self.files)
        if kind == 5 and attribute.g is not None:
            return self.graph(attribute.g, constants, frozenset(defined), within)
        if kind == 6:
            return [float(x) for x in attribute.floats]
        if kind == 7:
            return [int(x) for x in attribute.ints]
        if kind == 8:
            return [bytes(x).decode("utf-8", "replace") for x in attribute.strings]
        if kind == 11 and attribute.sparse_tensor is not None:
            return dense(attribute.sparse_tensor, self.files)
        raise ModelError(
            f"{what} has the attribute {attribute.name!r} of an unknown kind, {kind}; remove it"
        )


def _computed(node: GraphNode) -> tuple[Array, ...] | None:
    """Fold a node with constant operands.

    Return None if a call must compute it. Such a node reads a value of the call, draws random
    numbers, has no numpy form, or exceeds the limit of memory.
    """
    is_open = any(not is_array(x) and x for x in node.inputs)
    if is_open or node.graphs or node.type in _DRAWS or node.op.kind == "tensors":
        return None
    operands = [x if is_array(x) else None for x in node.inputs]
    if node.op.kind == "raw" and not are_known(operands):
        return None
    try:
        results = run(node, operands, None)
    except OutOfMemoryError:
        return None
    if len(results) < len(node.outputs) or not all(is_array(x) for x in results):
        return None
    if (most := limit.get()) is not None:
        most.remaining -= sum(x.nbytes for x in results if x.base is None)
    return results


def _operands(message: ProtoMessage, op: OnnxOp, values: Mapping[str, Any]) -> list[Any]:
    """Return the operands of a node in the form of the newest opset.

    An absent operand that was an attribute in older opsets becomes an array.
    """
    operands: list[Any] = [*message.input]
    for i, names in op.older.items():
        operands += [""] * (i + 1 - len(operands))
        own = [values[name] for name in names.split() if name in values]
        if own and not operands[i]:
            operands[i] = np.asarray(own[0])
    return operands


def _resolved(node: ProtoMessage, outer: Mapping[str, ProtoMessage]) -> dict[str, ProtoMessage]:
    """Return the attributes of a node by name.

    A reference to an attribute of the enclosing function is replaced by the value, or omitted if
    the function's call lacks the attribute.
    """
    own = {x.name: outer.get(x.ref_attr_name) if x.ref_attr_name else x for x in node.attribute}
    return {name: attribute for name, attribute in own.items() if attribute is not None}


def _opsets(imports: Iterable[ProtoMessage]) -> dict[str, int]:
    return {each.domain: int(each.version) for each in imports}


def _renamed(node: ProtoMessage, names: dict[str, str], prefix: str) -> ProtoMessage:
    """Return the node of a function, renamed for one call."""

    def name(old: str) -> str:
        return names.setdefault(old, f"{prefix}{old}") if old else ""

    fields = {**vars(node)}
    fields["input"] = [name(x) for x in node.input]
    fields["output"] = [name(x) for x in node.output]
    fields["attribute"] = [_with_graph(each, names, prefix) for each in node.attribute]
    return ProtoMessage("Node", **fields)


def _with_graph(attribute: ProtoMessage, names: dict[str, str], prefix: str) -> ProtoMessage:
    if attribute.g is None:
        return attribute
    graph, inner = attribute.g, dict(names)
    for each in (*graph.input, *graph.initializer):
        inner[each.name] = each.name
    nodes = [_renamed(each, inner, prefix) for each in graph.node]
    outputs = [
        ProtoMessage("Value", name=inner.get(x.name, x.name), type=x.type) for x in graph.output
    ]
    inside = ProtoMessage("Graph", **(vars(graph) | {"node": nodes, "output": outputs}))
    return ProtoMessage("Attribute", **(vars(attribute) | {"g": inside}))


def dense(sparse: ProtoMessage, files: Files) -> Array:
    """Return a sparse tensor as a dense array. Raises `ModelError`."""
    values, indices = array_of(sparse.values, files), array_of(sparse.indices, files)
    shape = tuple(int(n) for n in sparse.dims)
    try:
        array = np.zeros(bounded(shape), values.dtype)
        places = indices.T if indices.ndim == 2 else np.unravel_index(indices, shape)
        array[tuple(places)] = values
    except (ValueError, IndexError, MemoryError) as error:
        raise ModelError(
            f"a sparse tensor of shape {list(shape)} is invalid: {error}; use a dense tensor"
        ) from None
    return array


def _is_open(type: ProtoMessage) -> bool:
    """Return whether a type declares neither dtype nor shape."""
    return all(getattr(type, field.name) is None for field in FIELDS["Type"].values())


def kind_of(value: ProtoMessage) -> ValueKind:
    """Return the declared type of a value."""
    type, container = value.type, ""
    for _ in range(8):
        if type is None or type.tensor_type is not None or _is_open(type):
            break
        if type.sequence_type is not None:
            type, container = type.sequence_type.elem_type, "sequence"
        elif type.optional_type is not None:
            type, container = type.optional_type.elem_type, container or "optional"
        else:
            raise ModelError(
                f"{value.name!r} is a map or a sparse tensor, which is not supported; convert "
                'models of scikit-learn with options={"zipmap": False}'
            )
    if type is None or type.tensor_type is None:
        return ValueKind(container, 0, None)
    declared = type.tensor_type
    if declared.elem_type == 8:
        raise ModelError(f"{value.name!r} has strings, which are not supported; use numbers")
    shape = None
    if declared.shape is not None:
        shape = tuple(
            x.dim_value if x.dim_value is not None and x.dim_value >= 0 else x.dim_param or None
            for x in declared.shape.dim
        )
    return ValueKind(container, declared.elem_type, shape)
