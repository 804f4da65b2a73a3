"""Table of a model's layers: parameters, bytes, and outputs for given inputs."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.tables import table
from mlvm.core.types import TensorType, f32
from mlvm.eager.functions import creation
from mlvm.eager.nn.module import Module
from mlvm.eager.recording.recorder import recording_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import among_others, flatten, named_nodes, named_tensors, replace, unflatten
from mlvm.machines.dry import DryVM
from mlvm.show import html

_HEAD: Final = "parameters", "bytes", "output bytes", "output", "layer"


Outputs: TypeAlias = dict[str, list[tuple[TensorType, ...]]]
"""Types that each call of a layer has returned, by the path of the layer."""


class Row(NamedTuple):
    """A layer: path, class, number of parameters, bytes, and the output types of calls.

    The bytes include parameters and buffers."""

    path: str
    layer: str
    parameters: int
    nbytes: int
    outputs: tuple[tuple[TensorType, ...], ...]


class Summary:
    """Table of the layers of a model; `rows` contains the numbers.

    `needed` is the capacity in bytes of an arena for the call, without parameters and inputs."""

    def __init__(self, rows: list[Row], needed: int | None) -> None:
        self.rows = rows
        self.needed = needed

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        above: list[str] = []
        for row in self.rows:
            while above and not row.path.startswith(above[-1]):
                above.pop()
            name = row.path.removeprefix(above[-1] if above else "")
            label = "  " * len(above) + (f"{name}: {row.layer}" if name else row.layer)
            above.append(f"{row.path}/" if row.path else "")
            calls = len(row.outputs)
            types = ", ".join(map(str, row.outputs[-1])) if calls else ""
            nbytes = sum(x.nbytes for types in row.outputs for x in types)
            output_bytes = f"{nbytes:,}" if calls else ""
            output = f"{types} in {calls} calls" if calls > 1 else types
            cells.append((f"{row.parameters:,}", f"{row.nbytes:,}", output_bytes, output, label))
        return cells

    def _shown(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], int]:
        """Return the head, the rows, and the number of numeric columns."""
        if self.needed is not None:
            return _HEAD, self._cells(), 3
        return (*_HEAD[:2], _HEAD[4]), [(*row[:2], row[4]) for row in self._cells()], 2

    def _last(self) -> list[str]:
        return [] if self.needed is None else [f"a call needs {self.needed:,} additional bytes"]

    def __repr__(self) -> str:
        head, rows, numbers = self._shown()
        return "\n".join([*table([head, *rows], right=numbers), *self._last()])

    def _repr_html_(self) -> str:
        head, rows, numbers = self._shown()
        return html.table(head, rows, right=numbers) + "".join(map(html.block, self._last()))


def summary(model: Module, *inputs: Any, **named: Any) -> Summary:
    """Return a table of the layers in order: parameters, and bytes of parameters and buffers.

    With `inputs` for a call of the model, the table contains the type of each layer's output.

    The inputs are tensors, arrays or `TensorType`s, possibly in lists and dicts; a single tuple of
    ints is the shape of an f32 tensor. No value is computed and no memory is allocated: the call of
    a copy of the model is traced, as by `ml.measure`. Raises the errors of the call, and
    `CaptureError` if it reads values.

        >>> model = ml.nn.Sequential(ml.nn.Linear(3, 8), ml.gelu, ml.nn.Linear(8, 2))
        >>> model.summary(ml.TensorType("f32", [5, 3]))
        parameters  bytes  output bytes  output    layer
                50    200            40  f32[5,2]  Sequential
                32    128           160  f32[5,8]    layers_0: Linear
                18     72            40  f32[5,2]    layers_2: Linear
        a call needs 448 additional bytes

    Invalid calls:
        ml.nn.Sequential(lambda x: x * x.item()).summary(ml.ones(()))  # CaptureError
    """
    outputs: Outputs = {}
    match inputs:  # the shape of x, as in torchinfo
        case ((int(), *_) as shape,) if all(type(n) is int for n in shape):
            inputs = (TensorType(f32, shape),)
    needed = _run(model, inputs, named, outputs) if inputs or named else None
    rows = [
        Row(
            path,
            type(part).__name__,
            part.num_parameters(),
            sum(x.nbytes for x in named_tensors(part, buffers=True).values()),
            tuple(outputs.get(path, ())),
        )
        for path, part in named_nodes(model)
        if isinstance(part, Module)
    ]
    return Summary(rows, needed)


def _run(model: Module, inputs: Any, named: Any, outputs: Outputs) -> int:
    """Trace a call of a copy of the model on a dry VM, and collect the output types."""
    vm = DryVM("summary")
    with Arena(vm, "given").allocating():
        leaves, structure = flatten(model, None, ends=among_others, buffers=True)
        once = {id(x): _dry(x) for _, x in leaves}
        dry = unflatten(structure, [once[id(x)] for _, x in leaves])
        args, kwargs = replace(_dry, [inputs, named], (Tensor, TensorType, np.ndarray, np.generic))
    for path, part in named_nodes(dry):
        part.__class__ = _noting(type(part), outputs.setdefault(path, []))
    with recording_of(vm) as record:
        dry(*args, **kwargs)
    return record.high_water


def _dry(x: Any) -> Tensor:
    type = x if isinstance(x, TensorType) else x.type if isinstance(x, Tensor) else TensorType.of(x)
    return creation.empty(type.shape, dtype=type.dtype)


def _noting(kind: Any, outputs: list[tuple[TensorType, ...]]) -> Any:
    """Return a subclass: calls of instances append the result types to `outputs`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        leaves, _ = flatten(result, None, ends=among_others)
        outputs.append(tuple([x.type for _, x in leaves]))
        return result

    home = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**home, "__call__": call})


Module.summary = summary
