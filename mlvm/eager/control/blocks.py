"""Blocks: shared code for recording branches, loops and functions.

In: Python functions of tensors. Each is called once per block, with placeholders for the state, and
the launches are recorded into the block. Out: blocks of a `Flow`, and a `Segment` for each block
through which a gradient flows.

Invariant: after a block, the tape contains no node of it. The segment owns these nodes, and the
control flow as a whole adds one node to the tape (`autodiff.joint.add_node`).

Backward pass: it processes the nodes of the segment in reverse order, inside a block of the same
kind of control flow. Residuals are ordinary results of the forward block, so gradients can be
nested to any order.

Callers: `branches`, `loops`, `functions`; `transform.batch` uses cells and retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from mlvm.arena.context import context
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import Saved, Sums, closures_of, plus
from mlvm.eager.autodiff.op_rules import Sparse, dense
from mlvm.eager.autodiff.tape import CotangentAccumulator, MultiOutputVjp, Tape, has_effect, taping
from mlvm.eager.functions import random
from mlvm.eager.recording.recorder import (
    Recorder,
    RetryAfterCopy,
    RetryWithCarry,
    current_recorder,
    entries_kept,
    recording_of,
)
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY, alias, one_op, untracked
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.tensor import Tensor, is_tracked
from mlvm.eager.tensor.update import apply_into, make_exclusive, overwrite
from mlvm.eager.tree import Tree, put_back
from mlvm.step.flow import VISIBLE, Block

Tensors: TypeAlias = list[Tensor]

P = ParamSpec("P")
R = TypeVar("R")

_ADD: Final = partial(op.add)


class UnknownResults(Exception):
    """Raised when the results of a recursive function are needed before they are known."""


class RetryBlocks(Exception):
    """Raised to record blocks again, with facts that the first recording has found."""


def is_recorded() -> bool:
    """Return True while a captured function is being recorded."""
    return current_recorder() is not None


def recorder() -> Recorder:
    """Return the current recorder."""
    record = current_recorder()
    assert record is not None  # see `is_recorded`
    return record


def abstract_eval(fn: Callable[[], Tree]) -> Tree:
    """Record `fn` without running it; return its result as invalidated tensors of the right types.

    Tensors, fields of Modules and random keys do not change.
    """
    while True:
        try:
            with _recorded_apart():
                return fn()
        except RetryAfterCopy as error:
            make_exclusive(error.x)


@contextmanager
def _recorded_apart() -> Iterator[tuple[Recorder, list[Any]]]:
    """Record the block without running it, and restore everything that it changes.

    Yield the recorder, and the Nodes with fields that the block assigns."""
    with (
        recording_of(current_arena().vm) as record,
        record.tapes_kept(),
        context(tape=None),
        random.keys_from(None),
        put_back() as assigned,
    ):
        yield record, assigned


def has_effects(fn: Callable[[], object]) -> bool:
    """Return whether a function updates tensors from outside or assigns fields.

    The function is recorded without running it. Return True if it cannot be recorded."""
    try:
        with _recorded_apart() as (record, assigned):
            fn()
            homes = [use.value.home for call in record.calls for use in call.outs]
            return bool(assigned) or any(home and home.role in VISIBLE for home in homes)
    except Exception:  # any error of the function, including errors that occur only in a recording
        return True


@contextmanager
def suppressed(*errors: type[Exception]) -> Iterator[None]:
    """Suppress these errors in the block, including the error of a read of a value."""
    try:
        yield
    except errors:
        if is_recorded():
            recorder().forget_read()


def retry_blocks(
    record_blocks: Callable[P, R], reason: type[Exception] = RetryBlocks
) -> Callable[P, R]:
    """Decorate a function that records blocks: call it again while it raises the exception.

    It is also called again if a block updates a tensor that must first move to other memory.
    Changes that a recording makes to arguments such as `carried` are kept for the next recording.
    """

    @wraps(record_blocks)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        record, tape = recorder(), taping()
        nodes: list[Any] = [] if tape is None else tape.nodes
        lists: list[list[Any]] = [record.calls, record.scopes.callees, nodes]
        lengths = [len(each) for each in lists]
        while True:
            moved: Tensor | None = None
            try:
                return record_blocks(*args, **kwargs)
            except RetryAfterCopy as error:
                if error.depth != record.depth or not isinstance(error.x, Tensor):
                    raise
                moved = error.x
            except reason:
                pass
            for each, length in zip(lists, lengths, strict=True):
                del each[length:]
            if moved is not None:
                record.make_exclusive(moved)
                lengths[0] = len(record.calls)

    return recorded


@contextmanager
def carrying(carried: Tensors) -> Iterator[Block]:
    """Record a block with these outer tensors as additional state.

    If the block updates a different outer tensor through which a gradient flows, this tensor is
    added to `carried`, and `RetryBlocks` is raised. Afterwards the tape entries of the tensors are
    restored.
    """
    record = recorder()
    try:
        with entries_kept(carried), record.block(carried) as block:
            yield block
    except RetryWithCarry as error:
        if error.depth != record.depth:
            raise
        carried.append(error.x)
        raise RetryBlocks from None


def block_outputs(carried: Sequence[Tensor], outputs: Tensors) -> Tensors:
    """Return the outputs of a block as tensors that are distinct from the carried tensors.

    A block may return a carried tensor; the tape entry of this tensor is restored after the block.
    """
    return aliases(outputs) if carried else outputs


def assign_carried(carried: Tensors, values: Tensors) -> None:
    """Update the carried tensors after the control flow."""
    for x, value in zip(carried, values, strict=True):
        apply_into(x, COPY, value)


# --- backward pass -------------------------------------------------------------------


class Segment:
    """Tape segment: the nodes that a block has recorded, removed from the tape.

    `closures`: nodes before the block that receive cotangents, with types. `inside`: tensors
    of the block that the nodes need, except those in `available`. `outside`: tensors from before
    the block that the nodes need.
    """

    def __init__(
        self,
        record: Recorder,
        tape: Tape,
        start: int,
        results: Tensors,
        available: Tensors,
        carried: Sequence[Tensor] = (),
    ) -> None:
        self.tape, self.start, self.stack = tape, start, record.stack
        self.nodes = tape.nodes[start:]
        del tape.nodes[start:]
        self.closures = closures_of(tape, self.nodes, start, results)
        inside: dict[int, Tensor] = {}
        outside: dict[int, Tensor] = {}
        ids = {id(x.root) for x in available}
        self._saved = [x for node in self.nodes if node is not None for x in node[2]]
        for x in self._saved:
            root = x.root
            if id(root) in ids:
                continue
            if isinstance(root, Tensor) and record.is_inside(root):
                inside[id(root)] = root
            else:
                outside[id(x)] = self._from_outside(x)
        self.inside, self.outside = block_outputs(carried, [*inside.values()]), [*outside.values()]
        self._outside_ids = [*outside]
        self._keys = dict(zip(map(id, self.inside), inside, strict=True))
        self._keys.update((id(x), id(x.root)) for x in self._saved)

    def _from_outside(self, x: Tensor) -> Tensor:
        """Return the tensor; for a view created in the block, return a new view of the same bytes.

        The node of the original view was removed from the tape. The new view refers to the node
        before the block that receives the cotangent of x.
        """
        node, type = x.node if x.tape is self.tape else -1, x.type
        while node >= self.start:
            node_before = self.nodes[node - self.start]
            if node_before is None:
                return untracked(x)
            vjps, origins, _ = node_before
            if not isinstance(vjps, tuple) or vjps[0].type.nbytes != x.nbytes:
                return x
            [vjp], [node] = vjps, origins
            type = vjp[0]
        if node < 0 or node == x.node:
            return x
        other = x.arena.view(x, type, Tensor)
        other.tape, other.node = self.tape, node
        return other

    def key(self, x: Tensor) -> int:
        """Return the identity of the memory of x during the block; x may have moved since."""
        return self._keys.get(id(x), id(x.root))

    def needs(self, x: Tensor) -> bool:
        """Return whether a node needs the tensor."""
        return any(y.root is x.root for y in self._saved)

    def is_constant(self, operands: Sequence[Tensor]) -> bool:
        """Return whether no gradient flows through the segment or to these operands."""
        return not self.closures and not any(x.tape is self.tape for x in operands)

    @property
    def has_effect(self) -> bool:
        """True if a node has an effect (see `MultiOutputVjp`)."""
        return any(node is not None and has_effect(node) for node in self.nodes)

    def reached(self, ends: Sequence[int]) -> set[int]:
        """Return the indices of the nodes that receive cotangents if the nodes `ends` do."""
        numbers = set(ends)
        for number, node in reversed([*enumerate(self.nodes, self.start)]):
            if node is not None and (number in numbers or has_effect(node)):
                numbers.update(node[1])
        return numbers

    def walk(
        self, pending: CotangentAccumulator, inside: dict[int, Tensor], outside: Sequence[Tensor]
    ) -> None:
        """Run the backward pass over the nodes.

        `inside` maps the keys of the block's tensors to current values. `outside` lists the
        current values of the segment's outer tensors.
        """
        outside_now = dict(zip(self._outside_ids, outside, strict=True))

        def now(x: Tensor) -> Tensor:
            y = outside_now[id(x)] if id(x) in outside_now else inside[self.key(x)]
            return y if y.type is x.type else reshape_view(y, x.type)

        pending.walk(self.nodes, self.start, now)


class Cell:
    """Cotangent accumulator in fixed memory that several functions share.

    x: the sum so far. cotangent: in a gradient of the gradient, the cotangent of the final sum.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.type = x.type
        self.cotangent: Tensor | None = None

    def __add__(self, part: Tensor | Sparse) -> Cell:
        tape = taping()
        if tape is not None:
            alone = dense(part)
            if is_tracked(alone):
                vjp = MultiOutputVjp([alone.type], self._vjp, effect=True)
                tape.nodes.append((vjp, (alone.node,), ()))
        sparse = part if isinstance(part, Sparse) else Sparse(part.type, (part,), _ADD, _ADD)
        sparse.add_to(self.x)
        return self

    def _vjp(self, _: object, saved: Saved, sums: Sums) -> Sums:
        """Return the cotangent of an added part, which is the cotangent of the final sum."""
        [before], g = sums, self.cotangent
        return [before if g is None else g if before is None else plus(before, g)]


def new_cell(record: Recorder, x: Tensor) -> Cell:
    """Return a cell with the initial value x."""
    return Cell(record.as_cell(new_variable(record, x)))


def as_shared_cell(record: Recorder, x: Tensor) -> Tensor:
    """Copy x to memory that called functions can access."""
    if not record.scopes.frames:
        return x
    return _with_entry(record.as_cell(new_variable(record, x)), x)


def split_cells(
    closures: dict[int, TensorType], sums: Sequence[Any]
) -> tuple[dict[int, Cell], dict[int, Tensor | None]]:
    """Split sums of cotangents, by node number, into cells and other sums."""
    by_number = dict(zip(closures, sums, strict=True))
    cells = {number: h for number, h in by_number.items() if isinstance(h, Cell)}
    return cells, {number: h for number, h in by_number.items() if number not in cells}


# --- pieces --------------------------------------------------------------------------


def new_variable(record: Recorder, x: Tensor) -> Tensor:
    """Return a variable with the value of x."""
    variable = record.variable(x.type)
    overwrite(variable, COPY, x)
    return variable


def write(variables: Tensors, xs: Tensors) -> None:
    """Copy the values xs into the variables."""
    for variable, x in zip(variables, xs, strict=True):
        overwrite(variable, COPY, x)


def release(record: Recorder, variables: Tensors) -> Tensors:
    """Return tensors with the final contents of the variables."""
    return [record.released(x) for x in variables]


def reshape_view(x: Tensor, type: TensorType) -> Tensor:
    """Return a view of x with a different type of the same size."""
    return alias(one_op("reshape", shape=type.shape), x, type)


def aliases(xs: Tensors) -> Tensors:
    """Return new tensors for the same bytes, with the same tape nodes.

    An update of an alias moves the alias, not x.
    """
    return [_with_entry(untracked(x), x) for x in xs]


def _with_entry(y: Tensor, x: Tensor) -> Tensor:
    """Give y the tape entry of x; return y."""
    if x.tape is not None:
        y.tape, y.node = x.tape, x.node
    return y


def watch_tracked(tape: Tape, xs: Tensors, are_tracked: Iterable[bool]) -> Tensors:
    """Watch those tensors on the tape that are tracked."""
    return [tape.watch(x) if tracked else x for x, tracked in zip(xs, are_tracked, strict=True)]


def tracked_results(tape: Tape, results: Tensors, outputs: Tensors) -> list[Tensor | None]:
    """Return each result, or None if the block's output is not tracked."""
    return [y if x.tape is tape else None for y, x in zip(results, outputs, strict=True)]


def split(items: Sequence[Any], *lengths: int) -> Iterator[list[Any]]:
    """Split items into lists of the given lengths, followed by a list of the rest."""
    rest = iter(items)
    for length in lengths:
        yield list(islice(rest, length))
    yield list(rest)
