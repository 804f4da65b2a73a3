"""Writing of functions as ONNX files: `save`.

The function is traced, not run. Each call of an op becomes a node, branches become `If` and loops
`Loop`. The metadata of a node contains the op of mlvm with its attributes. `load` replays this op;
other runtimes run the ONNX op of the node.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.errors import ArgumentError, DTypeError, MlvmError, ModelError, brief, with_article
from mlvm.core.types import Array, DType, TensorType, bool_, i64
from mlvm.eager import Tensor
from mlvm.eager.capture.capture import Captured
from mlvm.eager.capture.dynamic_axes import Axis, OpenLength
from mlvm.eager.capture.guards.guard_set import ASKS_CLASS
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.capture.trace import Output, TracedCall, code_for_type, trace_once
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.rnn import step_by_step
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.tensor.context import bound, current_arena
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tree import flatten, named_nodes, named_tensors, unflatten, within_containers
from mlvm.machines.files import destination, replacing
from mlvm.onnx.arrays import NAMES, STORED
from mlvm.onnx.bodies import BODIES, OPSET, OnnxBody
from mlvm.onnx.encode import Parts, encode, size_of
from mlvm.onnx.lengths import AxisNames, Lengths, OpenAxes, Sizes, open_axes, resized, samples_of
from mlvm.onnx.model import Model
from mlvm.onnx.own import DOMAIN, encode_op
from mlvm.step.blocks import without_dead_calls
from mlvm.step.flow import Block, Call, Flow, Home, Procedure, Use, Value
from mlvm.step.templates import frozen, places

_IR: Final = 10, 13  # IR versions of opset 21 and later opsets
_ELSEWHERE: Final = {
    **dict.fromkeys(("opset", "opset_version"), f"the ops are those of opset {OPSET}"),
    "input_names": "inputs have the names of the parameters, or of a loaded model's inputs",
    "output_names": "outputs have names if the function returns a dict or is a loaded model",
    "dynamic_shapes": "write dynamic_axes={'x': ('batch', None)}",
    "external_data": "write external=True",
}
"""Arguments of PyTorch's `export` and other functions, and the counterparts here."""
_TRAINING: Final = "; a Module that is being trained is saved after model.eval()"
_KINDS: Final[tuple[tuple[Any, str, int], ...]] = (
    *((float, "f", 1), ((int, np.integer), "i", 2), (str, "s", 3)),
    *((np.ndarray, "t", 4), (dict, "g", 5)),
)
"""Fields and numbers of attributes, by type of the value; all other values are int sequences."""


def save(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    dynamic_axes: Mapping[str, AxisNames] | None = None,
    external: bool | None = None,
    **kwargs: Any,
) -> None:
    """Save `fn(*args, **kwargs)` as an ONNX file for other runtimes; `load` restores it exactly.

    The function is called once, on abstract tensors, which have types but no values.

    `args` are the function's arguments: trees of tensors, numpy arrays and types (`TensorType`).
    These become the inputs of the graph, in the same order, under the names of the parameters; the
    inputs of a loaded `Model` have the original names. Any other value, such as a number, is a
    constant of the graph. Other tensors that the function reads, such as the weights of a Module,
    become initializers with the current values. The results are the outputs. The function may be a
    captured function or a gradient. Branches become `If`, loops `Loop`, and functions of
    `ml.subroutine` are inlined.

    Shapes are taken from `args`, except for `dynamic_axes`. It contains a name or None for each
    axis of an input, `{"x": ("batch", None)}`, or names by axis, `{"x": {0: "batch"}}`. The same
    name is the same size, and `"8*width"` is a multiple of a size. The function is traced as by
    `capture(dynamic_axes=)`, at sizes slightly above the sizes of `args`. The file computes the
    formulas of sizes, and has no guards. Therefore a decision that depends on a size must have the
    same outcome at these sizes and at slightly larger sizes. For each name, the outcome must also
    be the same at a size that is larger by a thousand. At other sizes the outcome does not change.

    The ops belong to opset 20. Low-bit weights need a later opset: the first that can cast them. An
    op that needs several nodes of ONNX is a function of the file, in the domain "mlvm". With
    `external` the weights are stored in a separate file, `path` + ".data": by default if a file
    would have more than 2 GB. An existing file is replaced when the new file is complete.

    Raises `ModelError`, with the line of Python, for an op without an ONNX equivalent: random
    numbers, decompositions, checks and complex numbers. Also raises it for a function that returns
    no tensor, or that updates a tensor from outside, as Modules do before `model.eval()`. Raises
    the errors of `capture`, and `OSError`. https://onnx.ai/onnx/repo-docs/IR.html

        >>> layer = ml.nn.Linear(3, 2, key=ml.random.key(0))
        >>> ml.onnx.save(layer, [ml.TensorType("f32", [4, 3])], "layer.onnx")
        >>> ml.onnx.load("layer.onnx").outputs
        {'output': 'f32[4,2]'}
        >>> rows = {"x": ("batch", None)}
        >>> ml.onnx.save(layer, [ml.ones((4, 3))], "layer.onnx", dynamic_axes=rows)
        >>> ml.onnx.load("layer.onnx").outputs
        {'output': 'f32[batch,2]'}
    """
    refuse_captured("write a file", ". Write it outside")
    if isinstance(fn, Captured):
        fn = fn.fn
    if not callable(fn) or not isinstance(args, (list, tuple)):
        raise _refused_arguments(args)
    for name in kwargs.keys() & _ELSEWHERE.keys():
        if name not in _parameters(fn):
            raise ArgumentError(f"unknown argument {name}=: {_ELSEWHERE[name]}").at("save", ())
    try:
        target = Path(os.fspath(path))
    except TypeError:
        reason = f"expected a text or a path of a file, got {brief(path)}: save(fn, args, path)"
        raise ArgumentError(reason).at("save", ()) from None
    destination(target)  # fail early, not after a long trace
    model = _Model(fn, list(args), kwargs, {}, {})
    if dynamic_axes:
        axes = open_axes(dynamic_axes, model.inputs)
        samples = samples_of(axes, model.inputs)
        model = _Model(fn, list(args), kwargs, axes, samples[0])
        decided = model.lengths.decided(samples)
        if decided is not None:  # may only affect removed calls
            for sizes in samples[1:]:
                other = _Model(fn, list(args), kwargs, axes, sizes)
                if model.parts(False, "") != other.parts(False, ""):
                    raise model.lengths.refused(decided)
    parts, data = model.parts(external, f"{target.name}.data")
    with ExitStack() as stack:  # the data file is replaced before the model file
        for file, content in ((target, parts), (target.with_name(f"{target.name}.data"), data)):
            if content:
                stream = stack.enter_context(replacing(file))
                stream.writelines(content)
                stream.flush()


def _refused_arguments(args: Any) -> ArgumentError:
    message = "save expects a function, and the arguments as a list"
    write = code_for_type(args)
    if write is not None:
        message += f": for {args!r} write [{write}]"
    elif isinstance(args, (Tensor, TensorType, np.ndarray)):
        message += ", [x] for one"
    return ArgumentError(message).at("save", ())


_is_input: Final = within_containers((TensorType, Tensor, np.ndarray, np.generic))


class _Model:
    """ONNX file of a function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        axes: OpenAxes,
        sizes: Sizes,
    ) -> None:
        def type_of(x: Any) -> TensorType:
            if isinstance(x, TensorType):
                return x
            return x.type if isinstance(x, Tensor) else TensorType.of(np.asarray(x))

        self.used_names: set[str] = set()
        leaves, structure = flatten([_by_name(fn, args), kwargs], ends=_is_input)
        named = [(self.name(_shown(path)), type_of(x)) for path, x in leaves]
        types = {name: resized(x, axes.get(name, {}), sizes) for name, x in named}
        for name, type in types.items():
            if type.dtype.is_storage:
                raise ModelError(
                    f"the input {name!r} is {type}; only weights can have a low-bit dtype"
                )
        recorded, signature = _recorded(fn, structure, types, axes, sizes)
        if signature.fields or recorded.outcome.rebound or recorded.record.outside.queues:
            raise ModelError(
                "a function that rebinds a field, or reads from a queue, cannot be saved; "
                "update the field in place, and pass the batch as an argument"
            )
        self.states: list[Any] = [x.root for x in recorded.record.outside.states]
        self.initializers: dict[str, Array | Tensor] = {}
        self.functions: dict[Any, dict[str, Any]] = {}
        self._state_names: dict[int, str] = {}
        self._paths = _paths(fn, args, kwargs)
        numbers = recorded.numbers
        self.lengths = Lengths(numbers, axes, self)
        self._scalars = {id(x): place for (place, _), x in numbers.tensors.items()}
        with numbers.planning_kernels() as placeholders:
            self.inputs = {
                name: resized(x, axes.get(name, {}), dict(zip(sizes, placeholders, strict=False)))
                for name, x in types.items()
            }
            self.types: dict[str, TensorType] = dict(self.inputs)
            self.input_names = list(self.inputs)
            if recorded.template is not None:
                recorded = recorded.at(placeholders, recorded.template.flow(placeholders))
            self._write(fn, recorded)

    def _write(self, fn: Callable[..., Any], recorded: TracedCall) -> None:
        """Write the graph of a trace."""
        results = recorded.named_results()
        if not results:
            raise ModelError(
                "expected a function that returns a tensor, got no tensors in the result"
            )
        flow = recorded.flow
        calls = without_dead_calls(Flow(flow.calls, flow.results))
        shown = [_shown(path) or "output" for path, _ in results]
        if isinstance(fn, Model) and len(fn.graph.names) == len(shown):
            shown = fn.graph.names
        names = [self.name(each) for each in shown]
        outputs: dict[str, TensorType] = {}
        graph = _Graph(self)
        graph.calls(calls)
        for name, (_, use) in zip(names, results, strict=True):
            graph.node("Identity", [graph.read(use)], {name: use.type})
            outputs[name] = use.type
        message = graph.message("main", self.inputs, outputs)
        self.message = message | {"node": self.lengths.nodes + message["node"]}

    def name(self, stem: str) -> str:
        """Return a new name in the graph: `stem`, or `stem` with a number appended."""
        name, count = stem, 1
        while name in self.used_names or not name:
            count += 1
            name = f"{stem}_{count}"
        self.used_names.add(name)
        return name

    def state(self, index: int) -> str:
        """Return the name of the initializer for a tensor that the function reads from outside."""
        if index not in self._state_names:
            x = self.states[index]
            if id(x) in self._scalars:
                name = self.lengths.scalar(self._scalars[id(x)], x.dtype)
            else:
                name = self.name(self._paths.get(id(x)) or "constant")
                self.initializers[name] = x
            self._state_names[index], self.types[name] = name, x.type
        return self._state_names[index]

    def constant(self, value: Array, type: TensorType) -> str:
        """Add an initializer with these values; return the name."""
        name = self.name("constant")
        self.initializers[name], self.types[name] = value, type
        return name

    def function(self, op: str, key: Any, body: OnnxBody, result: str) -> str:
        """Add a function with a body to the file, once; return the name."""
        if key not in self.functions:
            self.functions[key] = {
                "name": self.name(f"{DOMAIN}.{op}").removeprefix(f"{DOMAIN}."),
                "input": [*body.takes, *body.sizes],
                "output": [result],
                "node": [_node(each) for each in body.nodes],
                "domain": DOMAIN,
            }
        return str(self.functions[key]["name"])

    def new_node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Iterable[str],
        attributes: Mapping[str, Any],
        **more: Any,
    ) -> dict[str, Any]:
        """Return the message of a node of ONNX."""
        ins, outs = list(inputs), list(outputs)
        node = {"op_type": op, "input": ins, "output": outs, "attributes": attributes}
        return _node(node) | {"name": self.name(f"{op}/{[*outs, 'node'][0]}"), **more}

    def parts(self, external: bool | None, data_name: str) -> tuple[Parts, Parts]:
        """Return the bytes of the file, and the bytes of the weights in a separate file."""
        nbytes = sum(x.nbytes for x in self.initializers.values())
        most = (1 << 31) - (1 << 24)  # bytes of a protobuf message, with some margin
        data_parts: Parts = []
        place = 0
        tensors = []
        for name, value in self.initializers.items():
            array = values_of(value) if isinstance(value, Tensor) else value
            tensor: dict[str, Any] = {
                "dims": list(self.types[name].shape),
                "data_type": _number(self.types[name].dtype, name),
                "name": name,
            }
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            outside = external if external is not None else nbytes > most
            # Minimum bytes of a weight in an external file.
            if outside and array.nbytes >= (1 << 10):
                data_parts += [bytes(-place % 64), data]
                place += -place % 64
                pairs = {"location": data_name, "offset": str(place), "length": str(len(data))}
                tensor["external_data"] = [{"key": k, "value": v} for k, v in pairs.items()]
                tensor["data_location"] = 1
                place += len(data)
            else:
                tensor["raw_data"] = data
            tensors.append(tensor)
        graph = self.message | {"initializer": tensors}
        opset = max(OPSET, *(STORED.get(x.dtype, [0, 0])[1] for x in self.types.values()))
        imported = {"domain": "", "version": opset}
        own = [{"domain": DOMAIN, "version": 1}] if self.functions else []
        model = {
            "ir_version": _IR[opset > 21],
            "producer_name": "mlvm",
            "graph": graph,
            "opset_import": [imported, *own],
            "functions": [x | {"opset_import": [imported]} for x in self.functions.values()],
        }
        parts = encode("Model", model)
        if size_of(parts) > most:
            raise ModelError(
                f"a file of {size_of(parts):,} bytes exceeds protobuf's limit of 2 GiB; write "
                "external=True, which stores the weights in a separate file"
            )
        return parts, data_parts


class _Graph:
    """Writer of a graph: the nodes so far, and the names of the values."""

    def __init__(self, model: _Model, around: _Graph | None = None) -> None:
        self.model = model
        self.nodes: list[dict[str, Any]] = []
        self._names: dict[Value, str] = dict(around._names) if around else {}
        self._homes: dict[Home, str] = dict(around._homes) if around else {}
        self._open: tuple[Procedure, ...] = around._open if around else ()

    def message(
        self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, TensorType]
    ) -> dict[str, Any]:
        return {
            "node": self.nodes,
            "name": name,
            "input": list(map(self._value, inputs, inputs.values())),
            "output": list(map(self._value, outputs, outputs.values())),
        }

    def _value(self, name: str, type: TensorType) -> dict[str, Any]:
        shape = {"dim": list(map(self.model.lengths.dim, type.shape))}
        number = _number(type.dtype, name)
        return {"name": name, "type": {"tensor_type": {"elem_type": number, "shape": shape}}}

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Mapping[str, TensorType],
        line: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add a node with results of these names and types."""
        self.model.types.update(outputs)
        more |= {"doc_string": str(line)} if line else {}
        self.nodes.append(self.model.new_node(op, inputs, outputs, attributes or {}, **more))

    # --- values -------------------------------------------------------------------------

    def read(self, use: Use) -> str:
        """Return the name of a value, viewed as a type."""
        home = use.value.home
        if home is None:
            name = self._names[use.value]
        elif home in self._homes:
            name = self._homes[home]
        elif home.role == "state":
            name = self.model.state(home.index)
        elif home.role == "input":
            name = self.model.input_names[home.index]
        else:  # it was never written
            zero = self.model.constant(np.zeros((), use.type.dtype.numpy), use.type.with_shape(()))
            name = self.model.name("zeros")
            self.node("Expand", [zero, self.model.lengths.vector(use.type.shape)], {name: use.type})
        return self._seen_as(name, use.type)

    def _seen_as(self, name: str, type: TensorType) -> str:
        here = self.model.types[name]
        if here is type:
            return name
        if here.dtype is not type.dtype:
            raise ModelError(
                f"a {here} viewed as {type} cannot be expressed in ONNX; convert with astype"
            )
        ins, reshaped = [name, self.model.lengths.vector(type.shape)], self.model.name("reshape")
        self.node("Reshape", ins, {reshaped: type}, attributes={"allowzero": 1})
        return reshaped

    def write(self, use: Use, name: str, line: str | None = None) -> None:
        """Bind a value to a name for the following nodes."""
        home = use.value.home
        if home is None:
            self._names[use.value] = name
            return
        if home.role in ("input", "state", "element"):
            what = "an argument" if home.role == "input" else "a tensor from outside"
            raise ModelError(
                f"{line or 'here'}: {with_article(home.type)} is updated in place, {what} "
                f"of the function; an "
                f"ONNX file has no state: return the new value{_TRAINING}"
            )
        self._homes[home] = name

    # --- calls --------------------------------------------------------------------------

    def calls(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if call.callee is not None:
                self._called(call)
            elif call.name == "cond":
                self._cond(call)
            elif call.name == "while":
                self._while(call)
            elif call.op is None:
                raise _refused(call.name, call.line)
            elif call.op.name == "copy" and call.ins[0].type is call.outs[0].type:
                self.write(call.outs[0], self.read(call.ins[0]), call.line)
            else:
                self._op(call)
            name = call.op.name if call.op else call.name
            self.model.lengths.locate(f"{call.line or 'here'}: {name}")

    def _op(self, call: Call) -> None:
        """Write a call of an op."""
        assert call.op is not None
        op, [out] = call.op, call.outs
        types = [use.type for use in call.ins]
        if out.type.dtype.is_storage and op.name != "copy":
            raise _refused(
                f"{op.name} to {out.type.dtype.name}",
                call.line,
                "; convert outside of the function",
            )
        for type in (*types, out.type):
            if not _is_written(type.dtype):
                raise _refused(
                    f"{op.name} of {type.dtype.name}", call.line, "; convert with astype"
                )
        if not call.ins and not places(frozen((call.attributes, out.type))):
            value = np.zeros(out.type.shape, out.type.dtype.numpy)
            op.kernel(value, **call.attributes)
            self.write(out, self.model.constant(value, out.type), call.line)
            return
        rule = BODIES.get(op.name)
        if rule is None:
            draws = op.kernel.__module__.endswith(".random")
            raise _refused(op.name, call.line, _TRAINING if draws else "")
        body = OnnxBody(op.name, types, out.type, call.attributes)
        try:
            result = body.result(rule(body))
        except ModelError as error:
            raise _refused(f"{op.name}, {error},", call.line) from None
        attributes, more = frozen(call.attributes), dict[str, Any]()
        text = repr(attributes) if places(attributes) else encode_op(op, attributes, types)
        if op.name != "unpack" and not places(attributes):  # `load` unpacks implicitly
            more = {"metadata_props": [{"key": DOMAIN, "value": text}]}
        name, ins = self.model.name(op.name), [self.read(use) for use in call.ins]
        ins += [self.model.lengths.written(*each) for each in body.sizes.values()]
        attributes = {}
        first, operands = body.nodes[0], [*body.takes, *body.sizes]
        if len(body.nodes) == 1 and first["input"] == operands and first["output"] == [result]:
            node, attributes = first["op_type"], first["attributes"]
        else:
            node = self.model.function(op.name, (text, out.type, *types), body, result)
            more["domain"] = DOMAIN
        self.node(node, ins, {name: out.type}, call.line, attributes, **more)
        self.write(out, name, call.line)

    def _condition(self, use: Use) -> str:
        """Convert a tensor with one element to a condition of ONNX, bool[]."""
        name, type = self.read(use), TensorType(bool_, ())
        if use.type.shape:
            name = self._seen_as(name, TensorType(use.type.dtype, ()))
        if use.type.dtype is not bool_:
            cast = self.model.name("condition")
            self.node("Cast", [name], {cast: type}, attributes={"to": NAMES[bool_]})
            name = cast
        return name

    def _cond(self, call: Call) -> None:
        condition, graphs = self._condition(call.ins[0]), {}
        for key, block in zip(("then_branch", "else_branch"), call.blocks, strict=True):
            inner = _Graph(self.model, self)
            inner.calls(block.calls)
            graphs[key] = inner.message(key, {}, inner.block_results(call.outs))
        results = {self.model.name("branch"): use.type for use in call.outs}
        self.node("If", [condition], results, call.line, graphs)
        for use, name in zip(call.outs, results, strict=True):
            self.write(use, name, call.line)

    def block_results(self, uses: Sequence[Use]) -> dict[str, TensorType]:
        """Write the results of a block; return the names and types."""
        names = [self.read(use) for use in uses]
        results: dict[str, TensorType] = {}
        for name, use in zip(names, uses, strict=True):
            new = self.model.name("left")
            self.node("Identity", [name], {new: use.type})
            results[new] = use.type
        return results

    def _while(self, call: Call) -> None:
        """Write a loop: the test runs before the loop and at the end of each iteration."""
        test, body = call.blocks
        before = [self.read(use) for use in call.outs]
        begins = self._tested(_Graph(self.model, self), test, self.nodes)
        inner = _Graph(self.model, self)
        turn = self.model.name("turn"), self.model.name("goes_on")
        carried = {self.model.name("carried"): use.type for use in call.outs}
        for use, name in zip(call.outs, carried, strict=True):
            inner.write(use, name, call.line)
        self.model.types.update(carried)
        inner.calls(body.calls)
        goes_on = self._tested(inner, test, inner.nodes)
        last = self.model.name("goes_on")
        inner.node("Identity", [goes_on], {last: TensorType(bool_, ())})
        ins = {turn[0]: TensorType(i64, ()), turn[1]: TensorType(bool_, ()), **carried}
        outs = {last: TensorType(bool_, ()), **inner.block_results(call.outs)}
        results = {self.model.name("loop"): use.type for use in call.outs}
        graph = {"body": inner.message("body", ins, outs)}
        self.node("Loop", ["", begins, *before], results, call.line, graph)
        for use, name in zip(call.outs, results, strict=True):
            self.write(use, name, call.line)

    def _tested(self, graph: _Graph, test: Block, nodes: list[dict[str, Any]]) -> str:
        """Write a loop's test to these nodes; return the name of the condition."""
        graph.nodes = nodes
        graph.calls(test.calls)
        assert test.result is not None
        return graph._condition(test.result)

    def _called(self, call: Call) -> None:
        """Write the calls of a function inline."""
        callee = call.callee
        assert callee is not None
        if callee in self._open:
            raise _refused(
                f"the function {callee.name!r}, which calls itself,",
                call.line,
                "; use ml.while_loop",
            )
        inner = _Graph(self.model, self)
        inner.nodes, inner._open = self.nodes, (*self._open, callee)
        for home, use in zip(callee.params, call.passed, strict=True):
            if use not in call.outs:
                inner._homes[home] = self.read(use)
        inner.calls(callee.block.calls)
        params = dict(zip(call.passed, callee.params, strict=True))
        for use in call.outs:
            if use in params:
                self.write(use, inner._seen_as(inner._homes[params[use]], use.type), call.line)


def _recorded(
    fn: Callable[..., Any],
    structure: Any,
    types: Mapping[str, TensorType],
    axes: OpenAxes,
    sizes: Sizes,
) -> tuple[TracedCall, Signature]:
    """Trace a function of inputs of these types; a note on its errors names the sizes of open axes.
    Raises `ModelError` for a function that sees a length's class."""
    arena = Arena(current_arena().vm, "saved")
    operands: dict[str, Any] = dict(types)
    operands |= {name: Output(types[name], None).alloc(arena) for name in axes}

    def lengths(signature: Signature) -> list[OpenLength]:
        if ASKS_CLASS in signature.guards.names:
            raise ModelError(
                "a function that inspects the class of a length, as type(n) does, is not valid "
                "for other lengths: write isinstance(n, int)"
            )
        tensors = [id(x) for x in signature.tensors]
        by_name: dict[str, list[Axis]] = {name: [] for name in sizes}
        for input, own in axes.items():
            for axis, each in own.items():
                place = Axis(tensors.index(id(operands[input])), axis, each.times)
                by_name[each.name].append(place)
        return [OpenLength(tuple(each), name) for name, each in by_name.items()]

    arguments, named = unflatten(structure, operands.values())
    try:  # ONNX supports a loop with all states
        with bound(step_by_step, True), closing(arena):
            return trace_once(fn, [*arguments.values()], named, lengths)
    except MlvmError as error:
        if sizes:
            shown = ", ".join(f"{name} = {n}" for name, n in sizes.items())
            error.add_note(f"traced with dynamic_axes at {shown}")
        raise


def _refused(what: str, line: str | None, remedy: str = "") -> ModelError:
    return ModelError(f"{line or 'here'}: {what} cannot be expressed in ONNX{remedy}")


def _is_written(dtype: DType) -> bool:
    return (dtype in NAMES and dtype.kind != "complex") or dtype in STORED


def _number(dtype: DType, name: str) -> int:
    if not _is_written(dtype):
        raise ModelError(f"{name} is of {dtype.name}, which is not supported; convert with astype")
    return STORED[dtype][0] if dtype in STORED else NAMES[dtype]


# --- names --------------------------------------------------------------------------------


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def _by_name(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments by parameter name, or by input name for a loaded model."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in _parameters(fn).items() if each.kind in plain]
    if isinstance(fn, Model):
        names = [*fn.graph.inputs]
    names += [f"input_{i}" for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False))


def _shown(path: str) -> str:
    """Return the path of a leaf, without the leading 0 of `args` or 1 of `kwargs`."""
    head, _, rest = path.partition("/")
    return rest if head in ("0", "1") and rest else path


def _paths(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, str]:
    """Return names for the tensors that a function reads, by id, if they have a path."""
    owner = getattr(fn, "__self__", fn)
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    around = dict(zip(getattr(code, "co_freevars", ()), cells, strict=False))
    names: dict[int, str] = {}
    trees = [("", owner), *((str(i), x) for i, x in enumerate(args)), *kwargs.items()]
    trees += [(name, cell.cell_contents) for name, cell in around.items()]
    trees += [
        (name, fn.__globals__[name])
        for name in getattr(code, "co_names", ())
        if name in getattr(fn, "__globals__", {})
    ]
    for prefix, tree in trees:
        for path, node in named_nodes(tree) if isinstance(tree, Module) else ():
            if isinstance(node, Model):  # the tensors of a Model have the names in the file
                for name, x in {**node.weights, **node.constants}.items():
                    names.setdefault(id(x.root), "/".join(filter(None, (prefix, path, name))))
        with suppress(DTypeError):
            for path, x in named_tensors(tree, buffers=True).items():
                names.setdefault(id(x.root), "/".join(filter(None, (prefix, path))))
    return names


# --- messages -----------------------------------------------------------------------------


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of a node with attributes as Python values."""
    fields = {name: value for name, value in node.items() if name != "attributes"}
    attributes = [_attribute(*each) for each in node["attributes"].items()]
    return fields | ({"attribute": attributes} if attributes else {})


def _attribute(name: str, value: Any) -> dict[str, Any]:
    kinds = ((field, kind) for each, field, kind in _KINDS if isinstance(value, each))
    field, kind = next(kinds, ("ints", 7))
    if field == "t":
        number, raw = NAMES[DType.of(value.dtype)], np.ascontiguousarray(value).tobytes()
        value = {"dims": list(value.shape), "data_type": number, "raw_data": raw}
    return {"name": name, field: value, "type": kind}
