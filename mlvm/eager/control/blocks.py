"""What branches, loops and functions share while they are recorded as blocks of a program.

A function is called once for each block, with stand-ins for what goes round. What it does is
recorded into the block. Under a gradient, the tape's nodes of a block are taken off the tape, as a
`Segment`. They are the block's way back: a block of its own, which runs in control flow of the same
kind. What the way back needs of the way there is kept as a result like any other. So there are
gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import Held, Saved, closures_of, plus
from mlvm.eager.autodiff.rows import Sparse
from mlvm.eager.autodiff.tape import Joint, Pending, Tape, has_effect, taping
from mlvm.eager.functions import random
from mlvm.eager.recording.recorder import (
    MustCarry,
    MustMove,
    Recorder,
    current_capture,
    recording_of,
)
from mlvm.eager.tensor.apply import COPY, alias, apply, one_op, untracked
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import current_arena, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into, make_exclusive, overwrite
from mlvm.eager.tree import Tree, put_back
from mlvm.step.flow import Block

Tensors: TypeAlias = list[Tensor]

P = ParamSpec("P")
R = TypeVar("R")

_ADD: Final = one_op("add")


class Unknown(Exception):
    """A function calls itself before it is known what it makes."""


class Again(Exception):
    """Blocks are to be recorded again: something is known now that was not at first."""


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
    tell what it would make. It changes no tensor, nor a field of a Module, and draws no keys."""
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        try:
            with (
                recording_of(vm) as record,
                record.tapes_kept(),
                taped(None),
                random.drawing_nowhere(),
                put_back(),
            ):
                return fn()
        except MustMove as error:
            make_exclusive(error.x)


def recorded_again(record_blocks: Callable[P, R]) -> Callable[P, R]:
    """The function, which records blocks. It does so again whenever it raises `Again`, or they
    update a tensor that must move first. Each turn then finds what the one before has left."""

    @wraps(record_blocks)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        record, tape = recorder(), taping()
        nodes: list[Any] = [] if tape is None else tape.nodes
        lists: list[list[Any]] = [record.calls, record.callees, nodes]
        lengths = [len(each) for each in lists]
        while True:
            moved: Tensor | None = None
            try:
                return record_blocks(*args, **kwargs)
            except MustMove as error:
                if error.depth != record.depth or not isinstance(error.x, Tensor):
                    raise
                moved = error.x
            except Again:
                pass
            for each, length in zip(lists, lengths, strict=True):
                del each[length:]
            if moved is not None:
                record.make_exclusive(moved)
                lengths[0] = len(record.calls)

    return recorded


@contextmanager
def carrying(carried: Tensors) -> Iterator[Block]:
    """A block that carries these tensors from outside. Where it updates another through which a
    gradient goes, that is carried, too, in a recording that begins anew: it raises `Again`. After
    the block, tapes know the tensors as they did before."""
    record = recorder()
    before = [(x, x.tape, getattr(x, "node", 0)) for x in carried]
    try:
        with record.block(carried) as block:
            yield block
    except MustCarry as error:
        if error.depth != record.depth:
            raise
        carried.append(error.x)
        raise Again from None
    finally:
        for x, tape, node in before:
            x.tape, x.node = tape, node


def left(carried: Sequence[Tensor], made: Tensors) -> Tensors:
    """What a block has made. It may have returned tensors that it carries, which tapes then know as
    before: so these are others."""
    return aliases(made) if carried else made


def assign(carried: Tensors, values: Tensors) -> None:
    """Update the tensors that are carried."""
    for x, value in zip(carried, values, strict=True):
        apply_into(x, COPY, value)


# --- the way back --------------------------------------------------------------------


class Segment:
    """The nodes that a block has left, taken off the tape.

    `closures` are the nodes before the block that cotangents go to, and their types. The nodes need
    tensors: `inside` has those of the block, but for what is `known` in another way. `outside` has
    the others.
    """

    def __init__(
        self,
        record: Recorder,
        tape: Tape,
        start: int,
        results: Tensors,
        known: Tensors,
        carried: Sequence[Tensor] = (),
    ) -> None:
        self.tape, self.start, self.stack = tape, start, record.stack
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
        self.inside, self.outside = left(carried, [*inside.values()]), [*outside.values()]
        self._seen = [*outside]
        self._keys = dict(zip(map(id, self.inside), inside, strict=True))
        for node in self.nodes:
            self._keys.update((id(x), id(x.root)) for x in (node[2] if node is not None else ()))

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

    def key(self, x: Tensor) -> int:
        """What memory of the block the tensor was in, which may have moved since then."""
        return self._keys.get(id(x), id(x.root))

    def needs(self, x: Tensor) -> bool:
        """Whether the nodes need the tensor, which is known in another way."""
        return any(y.root is x.root for node in self.nodes if node is not None for y in node[2])

    def is_constant(self, operands: Sequence[Tensor]) -> bool:
        """Whether no gradient goes through it, nor to these operands of its control flow."""
        return not self.closures and not any(x.tape is self.tape for x in operands)

    @property
    def has_effect(self) -> bool:
        """Whether a node has an effect (see `Joint`)."""
        return any(node is not None and has_effect(node) for node in self.nodes)

    def reached(self, ends: Sequence[int]) -> set[int]:
        """The numbers of the nodes that cotangents go to from these."""
        numbers = set(ends)
        for number, node in reversed([*enumerate(self.nodes, self.start)]):
            if node is not None and (number in numbers or has_effect(node)):
                numbers.update(node[1])
        return numbers

    def walk(self, pending: Pending, inside: dict[int, Tensor], outside: Sequence[Tensor]) -> None:
        """Go back through the nodes. `inside` has what stands for tensors of the block now, by
        their keys. `outside` has what stands for the segment's own."""
        given = dict(zip(self._seen, outside, strict=True))

        def now(x: Tensor) -> Tensor:
            y = given[id(x)] if id(x) in given else inside[self.key(x)]
            return y if y.type is x.type else seen_as(y, x.type)

        pending.walk(self.nodes, self.start, now)


class Cell:
    """A cotangent that functions add to where it lies: they share it. On the way to a gradient of
    the gradient, `cotangent` is that of what the cell holds in the end."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.type = x.type
        self.cotangent: Tensor | None = None

    def __add__(self, part: Tensor | Sparse) -> Cell:
        tape = taping()
        if tape is not None and isinstance(part, Sparse):
            part = apply(part.alone, *part.operands)
        if tape is not None and isinstance(part, Tensor) and is_tracked(part, tape):
            tape.nodes.append((Joint([part.type], self._pull, effect=True), (part.node,), ()))
        call, operands = (
            (part.added, part.operands) if isinstance(part, Sparse) else (_ADD, (part,))
        )
        overwrite(self.x, call, self.x, *operands)
        return self

    def _pull(self, _: object, saved: Saved, held: Held) -> Held:
        """The cotangent of what was added: that of the whole."""
        [before], g = held, self.cotangent
        return [before if g is None else g if before is None else plus(before, g)]


def new_cell(record: Recorder, x: Tensor) -> Cell:
    """A cell that holds the value of x."""
    return Cell(record.as_cell(initialized(record, x)))


def in_functions(record: Recorder, x: Tensor) -> Tensor:
    """The tensor, in a place where functions reach it that are called from here."""
    if not record.frames:
        return x
    place = record.as_cell(initialized(record, x))
    if x.tape is not None:
        place.tape, place.node = x.tape, x.node
    return place


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


def is_tracked(x: Tensor, tape: Tape) -> bool:
    return x.tape is tape


def watched(tape: Tape, xs: Tensors, are_tracked: Iterable[bool] | None = None) -> Tensors:
    """Those that are tracked as variables of the tape; without a word on that, the floats."""
    if are_tracked is None:
        are_tracked = [x.dtype.is_inexact for x in xs]
    return [tape.watch(x) if tracked else x for x, tracked in zip(xs, are_tracked, strict=True)]


def if_tracked(tape: Tape, results: Tensors, made: Tensors) -> list[Tensor | None]:
    """Those results of control flow of which a block has made a tensor that is tracked, for
    `leave`."""
    return [y if x.tape is tape else None for y, x in zip(results, made, strict=True)]


def split(items: Sequence[Any], *lengths: int) -> Iterator[list[Any]]:
    """The items in lists of so many, and the rest."""
    rest = iter(items)
    for length in lengths:
        yield list(islice(rest, length))
    yield list(rest)
