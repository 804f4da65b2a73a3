"""Batches of recursions: `batch`.

The function is recorded once, for the types of one lane, and becomes code that a VM runs for all
lanes at once (`mlvm.step.lanes`, `mlvm.machines.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Final, NamedTuple

from mlvm.core.errors import CaptureError, DTypeError, ShapeError
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, i64
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.functions import Recorded, recorded
from mlvm.eager.control.loops import map as map_rows
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray
from mlvm.eager.functions.shapes import expand_dims, pad, stack, unstack
from mlvm.eager.recording.recorder import MustMove, Recorder, current_capture, recording_of
from mlvm.eager.tensor.constants import constant, prepare_constants
from mlvm.eager.tensor.context import current_arena, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tree import Tree, with_leaves
from mlvm.machines import lanes
from mlvm.step.blocks import free
from mlvm.step.flow import Home, Use
from mlvm.step.fusion import policy_of
from mlvm.step.lanes import lanes_of


class Batch:
    """A function over many inputs at once, which `batch` made."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())

    def __call__(self, inputs: Any, count: Tensor | int | None = None) -> Any:
        if not isinstance(inputs, list):
            return self._stacked(as_tree(inputs), count)
        if not inputs:
            return []
        each = [as_tree(x) for x in inputs]
        made = self._stacked(_together(each), None)
        rows = [unstack(x) for x in tensors(made)]
        return [with_leaves(made, iter(row)) for row in zip(*rows, strict=True)]

    def _stacked(self, inputs: Tree, count: Tensor | int | None) -> Tree:
        args = tensors(inputs)
        [total] = {x.shape[:1] for x in args} or {()}
        number = asarray(total[0] if count is None else count, dtype=i64)
        tree: list[Tree] = []

        def run(params: Tensors) -> Tensors:
            result = as_tree(self.fn(with_leaves(inputs, iter(params))))
            tree[:] = [result]
            return tensors(result)

        types = [x.type.with_shape(x.shape[1:]) for x in args]
        made = _run(self.__name__, number, total[0], args, types, run)
        return with_leaves(tree[0], iter(made))


def batch(fn: Callable[[Any], Any]) -> Batch:
    return Batch(fn)


def _together(inputs: Sequence[Tree]) -> Tree:
    first = tensors(inputs[0])
    columns = list(zip(*[tensors(x) for x in inputs], strict=True))
    return with_leaves(inputs[0], iter([_one(column) for column in columns]))


def _one(column: Sequence[Tensor]) -> Tensor:
    longest = max(x.shape[0] for x in column) if column[0].ndim else 0

    def padded(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] == longest:
            return x
        return pad(x, ((0, longest - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))

    return stack([padded(x) for x in column])


def _run(name: str, number: Tensor, total: int, args: Tensors, types: list[TensorType], run: Callable[[Tensors], Tensors]) -> Tensors:
    vm = current_arena().vm
    if blocks.is_recorded():
        return _recorded_run(name, number, total, args, types, run)
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        try:
            with recording_of(vm) as record, taped(None):
                found = recorded(name, types, run)
                shared = _shared(found)
                code = lanes_of(found.procedure, found.callees, found.results, shared, {}, policy_of(vm))
                states = [(record.states[use.value.home.index], use.type) for use in shared]
            break
        except MustMove as error:
            make_exclusive(error.x)
    arena = current_arena()
    outs = [arena.alloc(use.type.with_shape((total, *use.type.shape)), Tensor) for use in found.results]
    for out in outs:
        out.tape = None
    operands = [number, *outs, *args, *[x.root if x.root.type is type else x.arena.view(x.root, type) for x, type in states]]
    program = Program.of_op(lanes.RUN, len(operands), {"code": code}, 0)
    vm.launch(program, [x.handle for x in operands])
    return outs


def _shared(found: Recorded) -> list[Use]:
    uses: dict[Any, Use] = {}
    for use in free([found.procedure.block, *[each.block for each in found.callees]]):
        uses.setdefault(use.value, use)
    return list(uses.values())
