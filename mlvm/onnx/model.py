"""Loading of ONNX files as Modules: `load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    EncodingError,
    MlvmError,
    ModelError,
    ShapeError,
    brief,
    user_line,
)
from mlvm.core.types import Array, DType, bf16, f64
from mlvm.eager import Tensor
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.tensor.operands import as_operand, is_whole, widest_of
from mlvm.eager.tensor.tensor import from_array
from mlvm.eager.tensor.warn import warn_at
from mlvm.eager.tree import Tree
from mlvm.machines.terminal import escaped
from mlvm.onnx import ops as _fill_the_table  # noqa: F401
from mlvm.onnx.arrays import NAMES, Files, dtype_of, is_array
from mlvm.onnx.fold import folded
from mlvm.onnx.graph import REFUSALS, Builder, Graph, GraphFrame, GraphNode, ValueKind
from mlvm.onnx.limits import Limit
from mlvm.onnx.table import Pack
from mlvm.onnx.values import Value, Weight, tensor
from mlvm.onnx.wire import decode
from mlvm.renamed import OldAttribute

_FEW: Final = 64  # maximum elements of a potential shape
_LEAST: Final = 1 << 28, 1 << 32  # minimum limits of bytes for folding and for a call
_TIMES: Final = 16, 1 << 10  # or this multiple of the files, or of weights and inputs


class Model(ml.nn.Module):
    """Module of an ONNX file, called with inputs in order or by name.

    `weights` are the parameters, and `constants` are large integer tables.

    An optional input may be None. For a captured function, numbers and lists of numbers are
    constants and part of the signature, so lengths and shapes of the graph may depend on them. A
    single result is returned as a tensor, several results as a tuple of tensors in the order of
    `outputs`.

    A call raises `OutOfMemoryError` if it needs more than `limit` bytes (default: 4 GiB, or 1,024
    times the bytes of the weights and inputs if that is more). Set a larger limit for a file that
    you trust.
    """

    limit: int = _LEAST[1]

    def __init__(
        self, graph: Graph, arrays: Mapping[str, Callable[[], Array]], files: Files
    ) -> None:
        self.graph = graph
        self.weights: dict[str, Tensor] = {}
        constants: dict[str, Tensor] = {}
        for name, make in arrays.items():
            x = from_array(make())
            (self.weights if x.dtype.is_inexact else constants)[name] = x
            files.forget(x.type.nbytes)
        self.constants: Any = ml.nn.buffer(constants) if constants else {}

    @property
    def static_inputs(self) -> frozenset[str]:
        """Inputs on which a shape, a length or a branch may depend.

        Pass them as numbers to a captured function.
        """
        return self.graph.static_names & {*self.graph.inputs}

    if not TYPE_CHECKING:
        asked = OldAttribute("Model", "asked")

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs of the graph by name, with types such as `f32[N,3,224,224]`."""
        return {name: _described(self.graph.kinds[name]) for name in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, str]:
        """Outputs of the graph by name, with types."""
        return {name: _described(self.graph.kinds[name]) for name in self.graph.names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self.graph
        values = dict(zip(graph.inputs, args, strict=False))
        twice = sorted(kwargs.keys() & values.keys())
        if twice or len(args) > len(graph.inputs):
            reason = f"got the input {twice[0]!r} twice" if twice else f"got {len(args)} inputs"
            raise ArgumentError(f"{reason}; expected {self.inputs}").at("Model", ())
        values |= kwargs
        for name in values.keys() ^ {*graph.inputs}:
            if name in values or graph.kinds[name].container != "optional":
                reason = "unknown input" if name in values else "missing input"
                raise ArgumentError(f"{reason} {name!r}; expected {self.inputs}").at("Model", ())
            values[name] = None
        values = self._narrowed(values)
        operands = {name: self._operand(name, x, graph.kinds[name]) for name, x in values.items()}
        weights, most = {**self.weights, **self.constants}, Limit("a call", self.limit, _TIMES[1])
        tensors = (*weights.values(), *operands.values())
        most.enter(sum(x.type.nbytes for x in tensors if isinstance(x, Tensor)))
        with most.holding():
            outputs = graph.run(operands, GraphFrame(weights, {}))
        results = tuple(_result(x) for x in outputs)
        return results[0] if len(results) == 1 else results

    def _narrowed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs with f64 arrays converted to the float dtype of the tensors.

        A captured function converts its inputs in the same way.
        """
        kinds = self.graph.kinds
        wide = {
            name: x
            for name, x in values.items()
            if is_whole(x) and x.dtype == np.float64 and kinds[name].number != NAMES[f64]
        }
        widest = widest_of([*values.values(), *self.weights.values()]) if wide else None
        return values | {name: as_operand(x, widest) for name, x in wide.items()}

    def _operand(self, name: str, value: Any, kind: ValueKind) -> Value:
        if value is None:
            return None
        if kind.container in ("sequence", "optional") and isinstance(value, (list, tuple)):
            return [self._operand(name, x, kind._replace(container="")) for x in value]
        if not isinstance(value, Tensor):
            value = self._array(name, value, kind)
            if value.size > _FEW or name not in self.graph.static_names:
                value = ml.asarray(value)
        dtype = dtype_of(kind.number, name) if kind.number else value.dtype
        if DType.of(value.dtype) is not dtype:
            message = f"expected the input {name!r} as {_described(kind)}, got {_type(value)}"
            raise DTypeError(f"{message}; write ml.astype(x, ml.{dtype.long_name})")
        declared = value.shape if kind.shape is None else kind.shape
        pairs = zip(declared, value.shape, strict=False)
        fits = [n if isinstance(n, int) and n else m for n, m in pairs] == [*value.shape]
        if len(declared) != value.ndim or not fits:
            raise ShapeError(
                f"expected the input {name!r} as {_described(kind)}, got {_type(value)}"
            )
        return value

    def _array(self, name: str, value: Any, kind: ValueKind) -> Any:
        """Convert numbers to an array; Python numbers get the dtype that the graph declares."""
        if isinstance(value, (np.ndarray, np.generic)):
            return np.asarray(value)
        if not isinstance(value, (list, tuple, bool, int, float)):
            return np.asarray(ml.asarray(value))
        dtype = dtype_of(kind.number, name) if kind.number else None
        try:
            return np.asarray(value, None if dtype in (None, bf16) else dtype.numpy)
        except (TypeError, ValueError, OverflowError) as error:
            raise DTypeError(f"the input {name!r} is {_described(kind)}: {error}") from None


def _type(value: Any) -> str:
    return f"{DType.of(value.dtype).name}{list(value.shape)}".replace(" ", "")


def _described(kind: ValueKind) -> str:
    dtype = dtype_of(kind.number, "it").name if kind.number else "any"
    shape = "" if kind.shape is None else f"[{','.join(str(n or '?') for n in kind.shape)}]"
    text = f"{dtype}{shape}"
    return f"{kind.container} of {text}" if kind.container else text


def _result(value: Value) -> Tree:
    if isinstance(value, list):
        return [_result(x) for x in value]
    return None if value is None else tensor(value)


def load(file: str | os.PathLike[str] | bytes) -> Model:
    """Load an ONNX file, or its bytes, as a Module that can be called and trained on any VM.

    It may be called eagerly or captured. The weights are copied into the current arena.

    The file is mapped into memory. Constant parts of the graph are computed when it is loaded.
    Batch norms and scales are folded into the preceding convolutions. Supported are opsets from 7
    on, and the ops of the domain `com.microsoft` that exporters and quantizers write. Tensors in
    external files are read from the folder of the file. Floats of 8 and 4 bits become f32, integers
    of 4 and 2 bits i8 and u8. A call accepts inputs in order or by name. Inputs that are passed as
    numbers are constants of a captured function; pass lengths and shapes in this way. A file with
    active dropout, which was saved before `model.eval()`, is loaded with a warning.

        model = ml.onnx.load("resnet50.onnx")
        predict = ml.capture(model)
        logits = predict(images)

    Raises `OSError` for a file that cannot be read; `ModelError`, which names the node, for a file
    that is not an ONNX file or is damaged, and for ops that mlvm does not support, such as ops on
    strings; `ArgumentError` for an argument that is neither a name nor bytes. A call raises an
    error for inputs that the file does not declare. https://onnx.ai/onnx/repo-docs/IR.html

        >>> relu = "3a2b0a0c0a0178120179220452656c755a100a0178120b0a09080112050a0312016e62090a0179"
        >>> model = ml.onnx.load(bytes.fromhex(relu + "12040a02080142021015"))
        >>> model.inputs, model(ml.asarray([1.0, -1.0]))
        ({'x': 'f32[n]'}, Tensor([1., 0.], f32[2]))
    """
    refuse_captured("load a file", ". Load it outside")
    if isinstance(file, (bytes, bytearray, memoryview)):
        return _loaded(memoryview(file).cast("B"), Files(None), "the bytes")
    try:
        path = Path(os.fspath(file))
    except TypeError:
        text = f"expected a file name or the bytes of a file, got {brief(file)}"
        raise ArgumentError(text).at("load", ()) from None
    files = Files(path)
    return _loaded(files.mapped(path), files, str(path))


def _loaded(data: memoryview, files: Files, what: str) -> Model:
    try:
        with uncollected():
            message = decode(data)
            if message.graph is None or not message.opset_import:
                raise ModelError("expected an ONNX file, got a message without a graph or an opset")
            most = Limit("loading", _LEAST[0], _TIMES[0])
            most.enter(len(data))
            with most.holding():
                graph = Builder(message, files).graph(message.graph, {}, frozenset())
            del message  # avoid garbage collections, which would traverse ten thousand objects
            folded(graph)
            for each in graph.all():
                each.settle()
            graph.static_names = _static_names(graph)
            _warn_of_training(graph, what)
            return Model(graph, _placed(graph), files)
    except EncodingError as error:
        raise ModelError(escaped(f"{what}: not an ONNX file, or damaged: {error}")) from None
    except MlvmError as error:
        refusal = ModelError(escaped(f"{what}: {error}"))
        for note in getattr(error, "__notes__", ()):
            refusal.add_note(note)
        raise refusal from None
    except RecursionError:
        raise ModelError(
            f"{what}: the graphs are nested too deeply; use fewer nested graphs"
        ) from None
    except REFUSALS as error:  # such as an attribute of a wrong kind
        reason = escaped(f"{type(error).__name__}: {error}")
        raise ModelError(f"{what}: invalid: {reason}; check it with onnx.checker") from error


def _warn_of_training(graph: Graph, what: str) -> None:
    """Warn about nodes in training mode, which drop elements or use batch statistics."""

    def is_training(node: GraphNode) -> bool:
        flag = node.inputs[2:3] if node.type == "Dropout" else ()
        mode = node.attributes.get("training_mode", 0)
        return bool(mode) or any(is_array(x) and x.any() for x in flag)

    nodes = [node for each in graph.all() for node in each.nodes if is_training(node)]
    if nodes:
        message = f"{what}: written in training mode: {nodes[0]}, {len(nodes)} nodes in total"
        warn_at(user_line(), f"{message}; export it after model.eval()", UserWarning)


def _static_names(graph: Graph) -> frozenset[str]:
    """Return the names of values that may determine a length, a shape or a branch."""
    names: set[str] = set()

    def look(graph: Graph) -> None:
        for node in reversed(graph.nodes):
            every = not names.isdisjoint(node.outputs) and node.type not in ("Shape", "Size")
            for inner in node.graphs:
                names.update(inner.outputs if every else ())
                look(inner)
            for i, x in enumerate(node.inputs):
                if type(x) is str and (every or i in node.op.host or node.graphs):
                    names.add(x)

    look(graph)
    return frozenset(names)


def _as_packed(x: Array, pack: Pack | None, node: GraphNode) -> Array:
    try:
        return x if pack is None else np.ascontiguousarray(pack(np, node, x))
    except REFUSALS as error:
        raise ModelError(f"{node}: {error}") from error


def _form(node: GraphNode, i: int) -> str:
    """Describe what determines the layout of a packed operand: equal weights are packed once."""
    flags = {name: x for name, x in node.attributes.items() if isinstance(x, (int, str))}
    return f"{node.type} {i} {flags} {[is_array(x) or bool(x) for x in node.inputs]}"


def _placed(graph: Graph) -> dict[str, Callable[[], Array]]:
    """Move large arrays of the nodes to the Module.

    For each array, return a function that creates it, by the name that the nodes now read. Numbers,
    and arrays that may determine a shape, stay in the nodes.
    """
    arrays: dict[str, Callable[[], Array]] = {}
    names: dict[tuple[int, str], Weight] = {}
    for inner in graph.all():
        for node in inner.nodes:
            small = _FEW if {*node.outputs} & graph.static_names else 1
            for i, x in enumerate(node.inputs):
                if not is_array(x) or i in node.op.host:
                    continue
                pack = node.op.packed.get(i)
                if pack is None and (x.size <= small or (x.dtype.kind in "iub" and x.size < 4096)):
                    continue
                key = id(x), "" if pack is None else _form(node, i)
                if key not in names:
                    _, base = graph.labels.get(id(x)) or (x, f"{node.name or node.type}.{i}")
                    name = base = base.replace("/", ".").strip(".") or "weight"
                    while name in arrays:
                        name = f"{base}_{len(arrays)}"
                    names[key] = Weight(name)
                    arrays[name] = partial(_as_packed, x, pack, node)
                node.inputs[i] = names[key]
    graph.labels.clear()
    return arrays
