"""What branches, loops and functions share while they are recorded as blocks of a program.

A function is called once for each block, with stand-ins for what goes round. What it does is
recorded into the block. Under a gradient, the tape's nodes of a block are taken off the tape, as a
`Segment`. They are the block's way back: a block of its own, which runs in control flow of the same
kind. What the way back needs of the way there is kept as a result like any other. So there are
gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import islice
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from mlvm.core.errors import GradientError
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import closures_of
from mlvm.eager.autodiff.rows import Sparse
from mlvm.eager.autodiff.tape import Pending, Tape, taping
from mlvm.eager.functions import random
from mlvm.eager.recording.recorder import MustMove, Recorder, current_capture, recording_of
from mlvm.eager.tensor.apply import COPY, alias, one_op, untracked
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import current_arena, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive, overwrite
from mlvm.eager.tree import Tree

Tensors: TypeAlias = list[Tensor]

P = ParamSpec("P")
R = TypeVar("R")

_ADD: Final = one_op("add")


class Unknown(Exception):
    """A function calls itself before it is known what it makes."""


def is_recorded() -> bool:
    """Whether this is called in a captured function, while it is recorded."""
    return current_capture.get() is not None


def recorder() -> Recorder:
    """The recorder that is on."""
    record = current_capture.get()
    assert record is not None  # see `is_recorded`
    return record


def unrun(fn: Callable[[], Tree]) -> Tree:
    """What a function makes that is recorded and not run: tensors that have ended. Their types
    tell what it would make."""
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        try:
            with recording_of(vm), taped(None), random.drawing_nowhere():
                return fn()
        except MustMove as error:
            make_exclusive(error.x)


def recorded_again(record_blocks: Callable[P, R]) -> Callable[P, R]:
    """The function, which records blocks. It does so again whenever the blocks update a tensor that
    must move first. Each turn then finds what the one before has left."""

    @wraps(record_blocks)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        record, tape = recorder(), taping()
        nodes: list[Any] = [] if tape is None else tape.nodes
        lists: list[list[Any]] = [record.calls, record.callees, nodes]
        lengths = [len(each) for each in lists]
        while True:
            try:
                return record_blocks(*args, **kwargs)
            except MustMove as error:
                if error.depth != record.depth or not isinstance(error.x, Tensor):
                    raise
                for each, length in zip(lists, lengths, strict=True):
                    del each[length:]
                record.make_exclusive(error.x)
                lengths[0] = len(record.calls)

    return recorded


# --- the way back --------------------------------------------------------------------


class Segment:
    """The nodes that a block has left, taken off the tape.

    `closures` are the nodes before the block that cotangents go to, and their types. The nodes need
    tensors: `inside` has those of the block, but for what is `known` in another way. `outside` has
    the others.
    """

    def __init__(
        self, record: Recorder, tape: Tape, start: int, results: Tensors, known: Tensors
    ) -> None:
        self.tape, self.start = tape, start
        self.nodes = tape.nodes[start:]
        del tape.nodes[start:]
        self.closures = closures_of(tape, self.nodes, start, results)
        inside: dict[int, Tensor] = {}
        outside: dict[int, Tensor] = {}
        ids = {id(x.root) for x in known}
        for node in self.nodes:
            for x in node[2] if node is not None else ():
                root = x.root
                if id(root) in ids:
                    continue
                if isinstance(root, Tensor) and record.is_inside(root):
                    inside[id(root)] = root
                else:
                    outside[id(x)] = self._from_outside(x)
        self.inside, self.outside = list(inside.values()), list(outside.values())
        self._seen = [*outside]

    def _from_outside(self, x: Tensor) -> Tensor:
        """The tensor. If the block has made x, a view, its node is off the tape. Then this is
        another view of the same bytes. It has the node before the block that the cotangent of x
        goes to."""
        node, type = x.node if x.tape is self.tape else -1, x.type
        while node >= self.start:
            left = self.nodes[node - self.start]
            if left is None:
                return untracked(x)
            pulls, origins, _ = left
            if not isinstance(pulls, tuple) or pulls[0].type.nbytes != x.nbytes:
                return x
            [(type, _, _)], [node] = pulls, origins
        if node < 0 or node == x.node:
            return x
        other = x.arena.view(x, type, Tensor)
        other.tape, other.node = self.tape, node
        return other

    def needs(self, x: Tensor) -> bool:
        """Whether the nodes need the tensor, which is known in another way."""
        return any(y.root is x.root for node in self.nodes if node is not None for y in node[2])

    def is_constant(self, operands: Sequence[Tensor]) -> bool:
        """Whether no gradient goes through it, nor to these operands of its control flow."""
        return not self.closures and not any(x.tape is self.tape for x in operands)

    def reached(self, ends: Sequence[int]) -> set[int]:
        """The numbers of the nodes that cotangents go to from these."""
        numbers = set(ends)
        for number, node in reversed([*enumerate(self.nodes, self.start)]):
            if node is not None and number in numbers:
                numbers.update(node[1])
        return numbers

    def walk(self, pending: Pending, inside: dict[int, Tensor], outside: Sequence[Tensor]) -> None:
        """Go back through the nodes. `inside` has what stands for tensors of the block now, by
        their ids. `outside` has what stands for the segment's own."""
        given = dict(zip(self._seen, outside, strict=True))

        def now(x: Tensor) -> Tensor:
            y = given[id(x)] if id(x) in given else inside[id(x.root)]
            return y if y.type is x.type else seen_as(y, x.type)

        pending.walk(self.nodes, self.start, now)


class Cell:
    """A cotangent that functions add to where it lies: they share it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.type = x.type

    def __add__(self, part: Tensor | Sparse) -> Cell:
        call, operands = (
            (part.added, part.operands) if isinstance(part, Sparse) else (_ADD, (part,))
        )
        overwrite(self.x, call, self.x, *operands)
        return self


def parted(
    closures: dict[int, TensorType], held: Sequence[Any]
) -> tuple[dict[int, Cell], dict[int, Tensor | None]]:
    """What is held of closures, by their numbers: the cells, and the others."""
    cells: dict[int, Cell] = {}
    others: dict[int, Tensor | None] = {}
    for number, h in zip(closures, held, strict=True):
        if isinstance(h, Cell):
            cells[number] = h
        else:
            others[number] = h
    return cells, others


def refuse_outer_tape(what: str) -> None:
    """Raise `GradientError` if a gradient is taken through this gradient."""
    if taping() is not None:
        raise GradientError(
            f"a gradient through the gradient of {what} is not supported in a captured function; "
            f"scan, fori_loop with ints, and cond have one"
        )


# --- pieces --------------------------------------------------------------------------


def initialized(record: Recorder, x: Tensor) -> Tensor:
    """A variable with the value of x."""
    variable = record.variable(x.type)
    overwrite(variable, COPY, x)
    return variable


def write(variables: Tensors, xs: Tensors) -> None:
    """Copy the values of xs into the variables."""
    for variable, x in zip(variables, xs, strict=True):
        overwrite(variable, COPY, x)


def released(record: Recorder, variables: Tensors) -> Tensors:
    """Other tensors for what the variables hold."""
    return [record.released(x) for x in variables]


def seen_as(x: Tensor, type: TensorType) -> Tensor:
    """The bytes of x under another type."""
    return alias(one_op("reshape", shape=type.shape), x, type)


def aliases(xs: Tensors) -> Tensors:
    """Other tensors over the same bytes, with the same nodes. An update moves them, and not xs."""
    others = []
    for x in xs:
        other = untracked(x)
        if x.tape is not None:
            other.tape, other.node = x.tape, x.node
        others.append(other)
    return others


def watched(tape: Tape, xs: Tensors) -> Tensors:
    """The floats among them as variables of the tape."""
    return [tape.watch(x) if x.dtype.is_inexact else x for x in xs]


def split(items: Sequence[Any], *lengths: int) -> Iterator[list[Any]]:
    """The items in lists of so many, and the rest."""
    rest = iter(items)
    for length in lengths:
        yield list(islice(rest, length))
    yield list(rest)
