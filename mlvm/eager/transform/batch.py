"""`auto_batch`: run a recursive function for many inputs together.

The function is recorded once, for the types of one lane, and lowered to code that a VM runs for all
lanes (`mlvm.step.lane_programs`, `mlvm.machines.lane_runs`). A lane is the run of an input: rows
with a frame and a program counter. The backward pass is code of the same kind: the function and its
backward pass in one program, which also runs for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.arena.context import context
from mlvm.core.errors import ArgumentError, DTypeError, GradientError, ShapeError, brief
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import (
    Closures,
    Cotangents,
    Saved,
    Sums,
    add_node,
    closures_of,
    or_zeros,
    seed,
)
from mlvm.eager.autodiff.tape import CotangentAccumulator, Tape, added, taping
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Cell, Tensors
from mlvm.eager.control.functions import Recorded, trace_callee
from mlvm.eager.control.loops import scan
from mlvm.eager.control.state import as_index, as_like, as_tree, require_integer, tensors
from mlvm.eager.functions.creation import asarray, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import concat, stack, unstack
from mlvm.eager.recording.recorder import RetryAfterCopy, recording_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.context import bound, current_arena, overriding
from mlvm.eager.tensor.number import has_open_lengths
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, with_leaves
from mlvm.machines import lane_runs
from mlvm.machines.lane_link import LaneProgram
from mlvm.renamed import old_names
from mlvm.step.blocks import free_variables
from mlvm.step.flow import Use, Value
from mlvm.step.fusion import FusionPolicy, policy_of
from mlvm.step.lane_function import LaneFunction
from mlvm.step.lane_programs import lanes_of
from mlvm.step.open_lanes import OpenLanes

_Body: TypeAlias = Callable[[Tensors], Tensors]


class Batch:
    """Function of many inputs, created by `auto_batch`."""

    __name__: str

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())
        self.__name__ = getattr(fn, "__name__", "function")

    def __call__(self, inputs: Any, count: Tensor | int | None = None) -> Any:
        if not isinstance(inputs, list):
            return self._of_rows(as_tree(inputs), count)
        if count is not None:
            raise ArgumentError("auto_batch: count is not supported for a list; omit it")
        if not inputs:
            return []
        stacked = self._of_rows(_stack_inputs(inputs), None)
        columns = [unstack(x) for x in tensors(stacked)]
        return [
            with_leaves(stacked, iter([rows[i] for rows in columns])) for i in range(len(inputs))
        ]

    def _of_rows(self, inputs: Tree, count: Tensor | int | None) -> Tree:
        """Apply the function to each row of the inputs; stack the results."""
        if count is not None:
            require_integer("auto_batch takes one tree of inputs; count", count)
        args = tensors(inputs)
        lengths = [x.shape[:1] for x in args] or [()]
        if () in lengths or any(each != lengths[0] for each in lengths):
            types = ", ".join(str(x.type) for x in args) or "no tensors"
            raise ShapeError(
                f"auto_batch: expected inputs with equal numbers of rows, got {types}; a list has "
                "an input in each item"
            )
        [total] = lengths[0]
        if _inside.get():
            return scan(lambda _, x: (None, self.fn(x)), None, inputs, count)[1]
        trees: list[Tree] = []

        def run(params: Tensors) -> Tensors:
            trees.append(as_tree(self.fn(with_leaves(inputs, iter(params)))))
            inside = blocks.recorder().is_inside
            return [y if inside(y) else op.copy(y) for y in tensors(trees[-1])]

        number = as_index(total if count is None else count)
        results = _run(self.__name__, number, args, run)
        return with_leaves(trees[-1], iter(results))


@hinted
def auto_batch(fn: Callable[[Any], Any]) -> Batch:
    """Return a function that applies `fn` to many inputs together.

    `fn` maps one tree of tensors to a result. It may be an `ml.subroutine`, and call itself. Each
    input follows a separate path through `cond`, `while_loop`, `scan` and recursion. All inputs
    that wait at the same instruction run together, so weights are read once. A result has the same
    bits as `fn` of only this input.

    If `inputs` is a list, `auto_batch(fn)(inputs)` returns the list of results. The items must have
    the same structure and types, except for the sizes of first axes. Shorter items are padded with
    rows of zeros to the longest. `fn` therefore needs the length as a part of the input, for
    `scan(..., length)` or a `cond`.

    Any other `inputs` is a tree of tensors [n, ...] of which each row is an input, as for `map`;
    the results are stacked: [n, ...]. `count` is then the number of inputs (the first rows), and
    may be known only at run time. The remaining rows of results are zeros.

    Each eager call calls `fn` once or twice, to trace it for one lane. A captured call is about
    thirty times as fast: `ml.capture(ml.auto_batch(fn))`. `fn` may use tensors from outside, such
    as weights, but must not update them, or draw from the global random keys. Gradients flow to the
    inputs, and to tensors from outside; the backward pass runs the lanes again. The contributions
    of lanes to the gradient of a weight are added lane by lane, in the order of separate calls.

    Raises `ShapeError` or `DTypeError` for inputs that do not match, and `ArgumentError` for a
    count together with a list. Raises `CaptureError` like a captured function, `LimitExceededError`
    if the recursion is too deep, and `GradientError` for a gradient of a gradient.

    Source: Radul et al., Automatically Batching Control-Intensive Programs, arXiv 1910.11141.

        >>> logs = ml.subroutine(lambda x: ml.cond(x < 1.0, lambda: 0, lambda: 1 + logs(x / 2)))
        >>> ml.auto_batch(logs)([ml.asarray(1.0), ml.asarray(100.0)])
        [Tensor(1, i64[]), Tensor(7, i64[])]
        >>> captured = ml.capture(ml.auto_batch(logs))
        >>> captured(ml.asarray([1.0, 100.0])), captured
        (Tensor([1, 7], i64[2]), <captured <lambda>, 1 program>)

    Invalid calls:
        ml.auto_batch(ml.sin)([v], 1)  # ArgumentError
        ml.auto_batch(lambda x: float(x))([ml.ones(())])  # CaptureError
        ml.auto_batch(ml.sin)([v, ml.arange(3)])  # DTypeError
        ml.grad(ml.grad(lambda v: ml.auto_batch(ml.sin)([v])[0]))(v[0])  # GradientError
        ml.auto_batch(deeper)([ml.ones(())])  # LimitExceededError
        ml.auto_batch(ml.sin)([ml.ones((1, 2)), ml.ones((1, 3))])  # ShapeError
    """
    if not callable(fn):
        raise DTypeError(f"auto_batch: expected a function, got {brief(fn)}")
    return Batch(fn)


_inside: ContextVar[bool] = ContextVar("inside", default=False)
"""True while a function is recorded for a lane.

A nested batch then runs input by input."""


def _stack_inputs(inputs: Sequence[Any]) -> Tree:
    """Stack a list of trees, padding shorter tensors with rows of zeros."""
    first, *others = [as_tree(x) for x in inputs]
    what = "inputs must have the types of the first input: expected"
    alike = [as_like(first, each, what, _differ_in_length) for each in others]
    columns = zip(*[tensors(x) for x in (first, *alike)], strict=True)
    return with_leaves(first, iter([_stacked(column) for column in columns]))


def _differ_in_length(x: TensorType, y: TensorType) -> bool:
    """Return whether two types are equal except for the first axis."""
    return x.dtype is y.dtype and x.ndim == y.ndim and x.shape[1:] == y.shape[1:]


def _stacked(xs: Sequence[Tensor]) -> Tensor:
    """Stack tensors with first axes that may differ, padding with zeros."""
    if all(x.type is xs[0].type for x in xs):
        return stack(xs)
    lengths = [x.shape[0] for x in xs]
    nothing = zeros((1, *xs[0].shape[1:]), dtype=xs[0].dtype)
    numbers = np.full((len(xs), max(lengths)), sum(lengths))
    for row, first, length in zip(numbers, np.cumsum([0, *lengths]), lengths, strict=False):
        row[:length] = np.arange(first, first + length)
    return op.take(concat([*xs, nothing]), asarray(numbers), axis=0)


# --- recorded ------------------------------------------------------------------------


class _Code(NamedTuple):
    """Code of a function for lanes.

    program: the argument of `lanes.run`. types: the types of a lane's results. lane_sums: the types
    of sums over lanes. shared: tensors that it reads from outside.
    """

    program: LaneProgram | OpenLanes
    types: list[TensorType]
    lane_sums: list[TensorType]
    shared: Tensors

    def run(self, number: Tensor, operands: Tensors) -> Tensors:
        """Run the code for the given number of lanes; return stacked results, then sums."""
        total = operands[0].shape[0]
        rows = [type.with_shape((total, *type.shape)) for type in self.types]
        types, attributes = [*rows, *self.lane_sums], {"program": self.program}
        operands_and_shared = [number, *operands, *self.shared]
        if blocks.is_recorded():
            record = blocks.recorder()
            return record.host_call(
                lane_runs.RUN, attributes, types, [record.use(x) for x in operands_and_shared]
            )
        arena = current_arena()
        outputs = [arena.alloc(type, Tensor) for type in types]
        for x in outputs:
            x.tape = None
        everything = [*outputs, *operands_and_shared]
        program = Program.of_op(lane_runs.RUN, len(everything), attributes, 0)
        arena.vm.launch(program, [x.handle for x in everything])
        return outputs


class _BatchVjp(NamedTuple):
    """Vjp of a batch: a function of a lane's arguments and the cotangents of the results."""

    code: _Code
    closures: Closures


def _run(name: str, number: Tensor, args: Tensors, run: _Body) -> Tensors:
    """Apply a function of tensors to each row of the arguments, and add a tape node."""
    tape = taping()
    types = [x.type.with_shape(x.shape[1:]) for x in args]
    code, vjp = _trace_code(name, types, run, tape)
    outputs = code.run(number, args)
    if tape is not None and vjp is not None and (vjp.closures or any(x.tape is tape for x in args)):
        saved = [number, *args, *vjp.code.shared]
        vjp_fn = partial(_vjp, vjp, [y.type for y in outputs], len(args))
        add_node(tape, outputs, args, vjp.closures, saved, vjp_fn)
    return outputs


def _trace_code(
    name: str, types: list[TensorType], run: _Body, tape: Tape | None
) -> tuple[_Code, _BatchVjp | None]:
    """Return the code of a function and, under a tape, the code of the backward pass."""
    if blocks.is_recorded():
        return _codes(name, types, run, tape)
    while True:
        try:
            with (
                recording_of(current_arena().vm) as record,
                nullcontext() if tape is None else overriding(tape, "within", record),
            ):
                return _codes(name, types, run, tape)
        except RetryAfterCopy as error:
            make_exclusive(error.x)


@blocks.retry_blocks
def _codes(
    name: str, types: list[TensorType], run: _Body, tape: Tape | None
) -> tuple[_Code, _BatchVjp | None]:
    closures: Closures = {}
    cells: dict[int, Cell] = {}

    def back(params: Tensors) -> Tensors:
        assert tape is not None  # otherwise there is no backward pass
        start, record = len(tape.nodes), blocks.recorder()
        places, cotangents = params[: len(types)], params[len(types) :]
        with context(tape=None):
            xs = [stop_gradient(x) for x in places]
        xs = blocks.watch_tracked(tape, xs, [x.dtype.is_inexact for x in xs])
        outputs = run(blocks.aliases(xs))
        nodes = tape.nodes[start:]
        del tape.nodes[start:]
        closures.update(closures_of(tape, nodes, start, outputs))
        with context(tape=None):
            for n, type in closures.items():
                cells[n] = Cell(record.as_cell(record.variable(type, outside=True)))
            pending = CotangentAccumulator()
            pending.update(cells)
            seed(pending, tape, [y for y in outputs if y.dtype.is_inexact], cotangents)
            pending.walk(nodes, start)
            return [or_zeros(pending.get(x.node), x.type) for x in xs if x.dtype.is_inexact]

    with bound(_inside, True), overriding(blocks.recorder(), "what", "a function of ml.auto_batch"):
        with context(tape=None):
            forward = trace_callee(name, types, run)
        code = _build_code(forward, [])
        if tape is None:
            return code, None
        gradients = [use.type for use in forward.results if use.type.dtype.is_inexact]
        forward_and_backward = trace_callee(f"{name}_back", [*types, *gradients], back)
        backward = _build_code(forward_and_backward, [*cells.values()])
        return code, _BatchVjp(backward, closures)


def _build_code(recorded: Recorded, cells: list[Cell]) -> _Code:
    record = blocks.recorder()
    lane_sums = {record.home_of(cell.x): i for i, cell in enumerate(cells)}
    uses: dict[Value, Use] = {}
    for use in free_variables(
        [recorded.procedure.block, *[each.block for each in recorded.callees]]
    ):
        if use.value.home is None or use.value.home not in lane_sums:
            uses.setdefault(use.value, use)
    function = LaneFunction(
        recorded.procedure,
        recorded.callees,
        recorded.results,
        list(uses.values()),
        lane_sums,
        _policy(),
    )
    opened = OpenLanes.of(function) if has_open_lengths() else None
    program = opened or lanes_of(function)
    types = [use.type for use in recorded.results]
    shared = [record.holder_of(value) for value in uses]
    return _Code(program, types, [cell.type for cell in cells], shared)


def _policy() -> FusionPolicy:
    """Return the VM's fusion policy, without recording the query."""
    vm = blocks.recorder().vm
    with context(recorder=None):
        return policy_of(vm)


def _vjp(
    vjp: _BatchVjp, types: list[TensorType], nargs: int, gs: Cotangents, saved: Saved, sums: Sums
) -> Sums:
    """Return the cotangents of the arguments and the closures."""
    if taping() is not None:
        raise GradientError("a second gradient through ml.auto_batch is not supported; use vmap")
    number, *rest = saved
    args, shared = rest[:nargs], rest[nargs:]
    pairs = zip(gs, types, strict=True)
    seeds = [or_zeros(g, type) for g, type in pairs if type.dtype.is_inexact]
    results = iter(vjp.code._replace(shared=shared).run(number, [*args, *seeds]))
    parts = [next(results) if x.dtype.is_inexact else None for x in args]
    lane_sums = [g if h is None else added(h, g) for g, h in zip(results, sums, strict=True)]
    return [*parts, *lane_sums]


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
