"""Batches of recursions: `batch`.

The function is recorded once, for the types of one lane, and becomes code that a VM runs for all
lanes at once (`mlvm.step.lanes`, `mlvm.machines.lanes`). Its way back is code of the same kind: of
the function and its way back, once more for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import AttributeRefused, DTypeError, GradientError, ShapeError, brief
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.joint import (
    Closures,
    Cotangents,
    Held,
    Saved,
    closures_of,
    leave,
    or_zeros,
    seed,
)
from mlvm.eager.autodiff.tape import Pending, Tape, taping
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Cell, Tensors
from mlvm.eager.control.functions import Recorded, recorded
from mlvm.eager.control.loops import scan
from mlvm.eager.control.state import as_index, as_like, as_tree, require_integer, tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import concat, stack, unstack
from mlvm.eager.recording.recorder import MustMove, current_capture, recording_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant, prepare_constants
from mlvm.eager.tensor.context import current_arena, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.eager.tree import Tree, with_leaves
from mlvm.machines import lanes
from mlvm.step.blocks import free
from mlvm.step.flow import Use, Value
from mlvm.step.fusion import FusionPolicy, policy_of
from mlvm.step.lanes import lanes_of

_Body: TypeAlias = Callable[[Tensors], Tensors]


class Batch:
    """A function over many inputs at once, which `batch` made."""

    __name__: str

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())
        self.__name__ = getattr(fn, "__name__", "function")

    def __call__(self, inputs: Any, count: Tensor | int | None = None) -> Any:
        if not isinstance(inputs, list):
            return self._of_rows(as_tree(inputs), count)
        if count is not None:
            raise AttributeRefused("a list says itself how many inputs there are; leave count out")
        if not inputs:
            return []
        made = self._of_rows(_together(inputs), None)
        columns = [unstack(x) for x in tensors(made)]
        return [with_leaves(made, iter([rows[i] for rows in columns])) for i in range(len(inputs))]

    def _of_rows(self, inputs: Tree, count: Tensor | int | None) -> Tree:
        """What the function makes of each row of the inputs, stacked."""
        if count is not None:
            require_integer("batch takes one tree of inputs; count, beside it,", count)
        args = tensors(inputs)
        lengths = {x.shape[:1] for x in args} or {()}
        if len(lengths) > 1 or () in lengths:
            given = ", ".join(str(x.type) for x in args) or "no tensors"
            raise ShapeError(
                f"inputs have as many rows as there are lanes, not {given}; a list has an input in "
                "each item"
            )
        [(total,)] = lengths
        if _inside.get():
            return scan(lambda _, x: (None, self.fn(x)), None, inputs, count)[1]
        trees: list[Tree] = []

        def run(params: Tensors) -> Tensors:
            trees.append(as_tree(self.fn(with_leaves(inputs, iter(params)))))
            inside = blocks.recorder().is_inside
            return [y if inside(y) else op.copy(y) for y in tensors(trees[-1])]

        number = constant(total, i64) if count is None else as_index(count)
        made = _run(self.__name__, number, args, run)
        return with_leaves(trees[-1], iter(made))


def batch(fn: Callable[[Any], Any]) -> Batch:
    """A function of many inputs that does for each what `fn` does for one, for all at once.

    `fn` takes one tree of tensors. It may be an `ml.function`, and call itself; each input goes its
    own way through `cond`, `while_loop`, `scan` and recursion, and all that wait at one place run
    together: weights are read once. A result has the bits that `fn` makes of its input alone.

    `batch(fn)(inputs)` of a list gives the list of results. Its inputs have one structure and the
    same types, but for the sizes of first axes: where these differ, `fn` is given as many rows as
    the longest input has, zeros after its own. So it takes their number as a part of its input, for
    `scan(..., length)` or a `cond`. Of anything else, a tree of tensors [n, ...], each row is an
    input, as for `map`, and results are stacked: [n, ...]; `count` says how many of these there
    are, the first, and may be known at run time only. The other rows of results are zeros.

    `fn` is called once or twice, to be recorded for one lane. It may use tensors from outside, such
    as weights, but not update them, nor draw from the global random keys. Gradients go to the
    inputs, and to what it uses from outside: the way back runs the lanes again, there and back.
    What lanes add to the gradient of a weight is added up lane by lane, in the order in which calls
    run one by one.

    Raises `ShapeError` or `DTypeError` for inputs that differ, `AttributeRefused` for a count
    beside a list, `CaptureError` for what a captured function may not do, `LimitExceeded` for calls
    too deep, `GradientError` for a gradient of a gradient.

    Source: Radul et al., Automatically Batching Control-Intensive Programs, arXiv 1910.11141.

        >>> logs = ml.function(lambda x: ml.cond(x < 1.0, lambda: 0, lambda: 1 + logs(x / 2)))
        >>> ml.batch(logs)([ml.asarray(1.0), ml.asarray(100.0)])
        [Tensor(1, i64[]), Tensor(7, i64[])]
    """
    if not callable(fn):
        raise DTypeError(f"batch takes a function, not {brief(fn)}")
    return Batch(fn)


_inside: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether a function is being recorded for a lane: a batch in it goes input by input."""


def _together(inputs: Sequence[Any]) -> Tree:
    """One tree for a list of them, whose tensors have a row for each; shorter ones end in zeros."""
    first, *others = [as_tree(x) for x in inputs]
    what = "an input is of another type than the first"
    alike = [as_like(first, each, what, _differ_in_length) for each in others]
    columns = zip(*[tensors(x) for x in (first, *alike)], strict=True)
    return with_leaves(first, iter([_stacked(column) for column in columns]))


def _differ_in_length(x: TensorType, y: TensorType) -> bool:
    """Whether two types are the same but for the first axis."""
    return x.dtype is y.dtype and x.ndim == y.ndim and x.shape[1:] == y.shape[1:]


def _stacked(xs: Sequence[Tensor]) -> Tensor:
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
    """The code of a function: the types that it makes in each lane, and of sums over lanes; what it
    reads from outside."""

    text: str
    types: list[TensorType]
    sums: list[TensorType]
    shared: Tensors

    def run(self, number: Tensor, operands: Tensors) -> Tensors:
        """Run it for so many lanes: results with a row for each, and sums."""
        total = operands[0].shape[0]
        rows = [type.with_shape((total, *type.shape)) for type in self.types]
        types, attributes = [*rows, *self.sums], {"program": self.text}
        given = [number, *operands, *self.shared]
        if blocks.is_recorded():
            record = blocks.recorder()
            return record.host_call(lanes.RUN, attributes, types, [record.use(x) for x in given])
        arena = current_arena()
        made = [arena.alloc(type, Tensor) for type in types]
        for x in made:
            x.tape = None
        everything = [*made, *given]
        program = Program.of_op(lanes.RUN, len(everything), attributes, 0)
        arena.vm.launch(program, [x.handle for x in everything])
        return made


class _Way(NamedTuple):
    """The way back: a function of a lane's arguments and cotangents of its results, and what it
    reaches besides."""

    code: _Code
    closures: Closures


def _run(name: str, number: Tensor, args: Tensors, run: _Body) -> Tensors:
    """What a function of tensors makes in each lane, of rows of the arguments."""
    tape = taping()
    types = [x.type.with_shape(x.shape[1:]) for x in args]
    code, way = _recorded(name, types, run, tape)
    made = code.run(number, args)
    if tape is not None and way is not None and (way.closures or any(x.tape is tape for x in args)):
        saved = [number, *args, *way.code.shared]
        pull = partial(_pull, way, [y.type for y in made], len(args))
        leave(tape, made, args, way.closures, saved, pull)
    return made


def _recorded(
    name: str, types: list[TensorType], run: _Body, tape: Tape | None
) -> tuple[_Code, _Way | None]:
    """The code of a function and, under a tape, of its way back."""
    if blocks.is_recorded():
        return _codes(name, types, run, tape)
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    within = None if tape is None else tape.within
    while True:
        try:
            with recording_of(vm) as record:
                record.what = "a function of ml.batch"
                if tape is not None:
                    tape.within = record
                return _codes(name, types, run, tape)
        except MustMove as error:
            make_exclusive(error.x)
        finally:
            if tape is not None:
                tape.within = within


@blocks.recorded_again
def _codes(
    name: str, types: list[TensorType], run: _Body, tape: Tape | None
) -> tuple[_Code, _Way | None]:
    token = _inside.set(True)
    try:
        return _codes_inside(name, types, run, tape)
    finally:
        _inside.reset(token)


def _codes_inside(
    name: str, types: list[TensorType], run: _Body, tape: Tape | None
) -> tuple[_Code, _Way | None]:
    with taped(None):
        there = recorded(name, types, run)
    code = _code(there, [])
    if tape is None:
        return code, None
    closures: Closures = {}
    cells: dict[int, Cell] = {}
    gradients = [use.type for use in there.results if use.type.dtype.is_inexact]

    def back(params: Tensors) -> Tensors:
        start, record = len(tape.nodes), blocks.recorder()
        places, cotangents = params[: len(types)], params[len(types) :]
        with taped(None):
            xs = [stop_gradient(x) for x in places]
        xs = blocks.watched(tape, xs)
        made = run(blocks.aliases(xs))
        nodes = tape.nodes[start:]
        del tape.nodes[start:]
        closures.update(closures_of(tape, nodes, start, made))
        with taped(None):
            for n, type in closures.items():
                cells[n] = Cell(record.as_cell(record.variable(type, outside=True)))
            pending = Pending()
            pending.update(cells)
            seed(pending, tape, [y for y in made if y.dtype.is_inexact], cotangents)
            pending.walk(nodes, start)
            return [or_zeros(pending.get(x.node), x.type) for x in xs if x.dtype.is_inexact]

    there_and_back = recorded(f"{name}_back", [*types, *gradients], back)
    return code, _Way(_code(there_and_back, list(cells.values())), closures)


def _code(found: Recorded, cells: list[Cell]) -> _Code:
    record = blocks.recorder()
    sums = {record.home_of(cell.x): i for i, cell in enumerate(cells)}
    uses: dict[Value, Use] = {}
    for use in free([found.procedure.block, *[each.block for each in found.callees]]):
        if use.value.home is None or use.value.home not in sums:
            uses.setdefault(use.value, use)
    text = lanes_of(
        found.procedure,
        found.callees,
        found.results,
        list(uses.values()),
        sums,
        _policy(),
    )
    types = [use.type for use in found.results]
    shared = [record.holder_of(value) for value in uses]
    return _Code(text, types, [cell.type for cell in cells], shared)


def _policy() -> FusionPolicy:
    """Which chains suit the VM, which may have to be asked that, and not the recorder."""
    vm = blocks.recorder().vm
    token = current_capture.set(None)
    try:
        return policy_of(vm)
    finally:
        current_capture.reset(token)


def _pull(
    way: _Way, made: list[TensorType], nargs: int, cotangents: Cotangents, saved: Saved, held: Held
) -> Held:
    """The cotangents of the arguments, and of what the function reaches besides."""
    if taping() is not None:
        raise GradientError("a gradient through the gradient of ml.batch is not supported")
    number, *rest = saved
    args, shared = rest[:nargs], rest[nargs:]
    pairs = zip(cotangents, made, strict=True)
    given = [or_zeros(g, type) for g, type in pairs if type.dtype.is_inexact]
    found = iter(way.code._replace(shared=shared).run(number, [*args, *given]))
    parts = [next(found) if x.dtype.is_inexact else None for x in args]
    sums = [part if h is None else h + part for part, h in zip(found, held, strict=True)]
    return [*parts, *sums]
