"""Loops: `while_loop`, `fori_loop`, `scan` and `map`.

Eagerly they are Python's own loops over eager calls. In a captured function test and body are
recorded once, each as a block, and the program goes round.

What the way back needs of each turn is kept: in a stack, a row for each turn, where the number of
turns is known, else in a record of the residuals, which has the number of the record before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError, DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.joint import Cotangents, Held, Saved, leave, or_zeros, seed
from mlvm.eager.autodiff.tape import Pending, taping
from mlvm.eager.control import blocks, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.checkpoint import checkpoint as checkpointed
from mlvm.eager.control.state import (
    Body,
    aliased,
    as_index,
    as_like,
    as_tree,
    copied,
    integer,
    require_integer,
    tensors,
)
from mlvm.eager.functions.creation import arange, asarray, zeros
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import concat, expand_dims
from mlvm.eager.recording.recorder import Recorder
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY, alias_of, one_op, untracked
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.number import is_free
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import overwrite
from mlvm.eager.tree import Tree, named_leaves, replace, with_leaves
from mlvm.step.flow import Turns

Turn: TypeAlias = Callable[[Tensor, Tensors, Tensors], tuple[Tensors, Tensors]]
"""A body: from the number of a turn, the state and a row of each of xs to the state, and a row of
each result."""

_ADD: Final = one_op("add")
_REPLACE_ROW: Final = one_op("dynamic_update", axis=0)


def while_loop(cond_fun: Body, body_fun: Body, init_val: Tree, *, checkpoint: bool = False) -> Tree:
    """The state when `cond_fun(state)` is false for the first time: `init_val` at first, then
    `body_fun(state)` again and again.

    Under a gradient, what the body needs for its way back is kept for each turn; with `checkpoint`
    only the state is, and the body runs again (see `mlvm.eager.control.checkpoint`).

    The state: a tree of tensors of any shapes, which stay as they are. Raises `ShapeError` or
    `DTypeError` where the body changes a type, or the structure, and for a condition of more
    elements than one.

        >>> ml.while_loop(lambda x: x < 100.0, lambda x: x * 3.0, ml.asarray(1.0))
        Tensor(243., f32[])
    """
    state = as_tree(init_val)
    body_fun = checkpointed(body_fun) if checkpoint else body_fun
    if blocks.is_recorded():

        def more(_: Tensor, xs: Tensors) -> Tensor:
            return _condition(cond_fun(with_leaves(state, iter(xs))))

        def turn(_: Tensor, xs: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
            return tensors(next_state(state, body_fun(with_leaves(state, iter(xs))))), []

        final, _ = _loop(more, turn, tensors(state), [], constant(0, i64))
        return with_leaves(state, iter(final))
    state = copied(state)

    def goes_on() -> bool:
        with taped(None):
            return bool(_condition(cond_fun(aliased(state))))

    given = state
    while goes_on():
        given = _apart(state, given)
        state = next_state(state, body_fun(given))
    return copied(state)


def fori_loop(
    lower: Tensor | int,
    upper: Tensor | int,
    body_fun: Body,
    init_val: Tree,
    *,
    checkpoint: bool = False,
) -> Tree:
    """The state after `state = body_fun(i, state)` for each i of `lower` .. `upper - 1`, from
    `init_val` on. `i` is an i64[]. For `checkpoint` see `while_loop`.

    Raises `DTypeError` for bounds that are no integers, and what `while_loop` raises.

        >>> ml.fori_loop(0, 3, lambda i, x: x * 2.0, ml.ones(2))
        Tensor([8., 8.], f32[2])
    """
    state = as_tree(init_val)
    body_fun = checkpointed(body_fun) if checkpoint else body_fun
    require_integer("lower", lower)
    require_integer("upper", upper)
    if blocks.is_recorded():
        given = [each for each in (lower, upper) if isinstance(each, Tensor) or is_free(each)]
        first = None if type(lower) is int and lower == 0 else as_index(lower)
        turns: Tensor | int
        if given:
            turns = as_index(upper) if first is None else as_index(upper) - first
        else:
            turns = max(int(upper) - int(lower), 0)

        def turn(i: Tensor, xs: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
            number = i if first is None else first + i
            after = body_fun(number, with_leaves(state, iter(xs)))
            return tensors(next_state(state, after)), []

        total = turns if isinstance(turns, int) else None
        final, _ = _scan(turn, tensors(state), [], turns, total, stacked=False)
        return with_leaves(state, iter(final))
    given = state = copied(state)
    for i in range(integer("lower", lower), integer("upper", upper)):
        given = _apart(state, given)
        state = next_state(state, body_fun(asarray(i), given))
    return copied(state)


def scan(
    f: Body,
    init: Tree,
    xs: Tree = None,
    length: Tensor | int | None = None,
    *,
    reverse: bool = False,
    checkpoint: bool = False,
) -> tuple[Tree, Tree]:
    """Go through the rows of `xs` with a state: `state, y = f(state, x)` for each row x, from
    `init` on. Returns the last state, and all y, stacked along a new first axis.

    `xs` is a tree of tensors of equally many rows, and x the tree of one row of each. Without `xs`,
    x is None, and `length` says how many turns there are. Beside `xs` it says how many rows there
    are or, as a tensor, how many of them, from the first, to go through: that may be known at run
    time only. Rows of the result that no turn makes are zeros. If there is no turn, `f` is recorded
    and not run, to find the types of its results. With `reverse` the last row comes
    first. For `checkpoint` see `while_loop`.

    The rows: [n, ...] -> [n, ...], where `n` is the length. Raises `ShapeError` for rows that are
    not equally many, or are not `length`, `OperandValueError` for a `length` that is no number of
    rows, `CaptureError` without a turn for an `f` that cannot be recorded, and what `while_loop`
    raises.

        >>> xs = ml.asarray([1.0, 2.0, 3.0])
        >>> ml.scan(lambda total, x: (total + x, total), ml.asarray(0.0), xs)
        (Tensor(6., f32[]), Tensor([0., 1., 3.], f32[3]))
    """
    state, rows = as_tree(init), as_tree(xs)
    f = checkpointed(f) if checkpoint else f
    total = _rows(rows, length)
    if blocks.is_recorded():
        return _recorded_scan(f, state, rows, length, total, reverse)
    turns = total or 0
    if isinstance(length, Tensor):
        turns = max(integer("length", length), 0)
        if total is not None and turns > total:
            raise OperandValueError(f"length is 0 to {total}, the number of rows, not {turns}")
    rows = aliased(rows)  # whose gradient is added up by itself, as it is in a captured function
    given = state = copied(state)
    made: list[Tree] = []
    for i in reversed(range(turns)) if reverse else range(turns):
        row = with_leaves(rows, iter([getitem(x, i) for x in tensors(rows)]))
        given = _apart(state, given)
        state, y = _turn(f, given, row)
        made.append(copied(as_like(made[0], y, "a turn makes another row") if made else y))
    if reverse:
        made.reverse()

    def of_zeros() -> Tree:
        none = [zeros(x.shape[1:], dtype=x.dtype) for x in tensors(rows)]
        try:
            return _turn(f, aliased(state), with_leaves(rows, iter(none)))[1]
        except CaptureError as error:
            told = "a scan of no rows records its body to find the types of its results"
            raise CaptureError(f"{told}, and that is as in a captured function: {error}") from None

    like = made[0] if made else blocks.unrun(of_zeros)
    if total is None:
        _require_no_rows(like)

    def stacked(type: TensorType, parts: Tensors) -> Tensor:
        missing = zeros(((total or 0) - len(parts), *type.shape), dtype=type.dtype)
        return concat([*[expand_dims(x, axis=0) for x in parts], missing])

    columns = [tensors(y) for y in made]
    results = [stacked(x.type, [each[k] for each in columns]) for k, x in enumerate(tensors(like))]
    return copied(state), with_leaves(like, iter(results))


def map(f: Body, xs: Tree) -> Tree:
    """`f(x)` for each row x of `xs`, stacked: a `scan` without a state.

    The rows: [n, ...] -> [n, ...]. Raises what `scan` raises.

        >>> ml.map(lambda row: ml.sum(row), ml.asarray([[1.0, 2.0], [3.0, 4.0]]))
        Tensor([3., 7.], f32[2])
    """
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def counted(
    body: Turn,
    init: Tensors,
    xs: Tensors,
    turns: Tensor | int,
    total: int | None,
    *,
    reverse: bool = False,
) -> tuple[Tensors, Tensors]:
    """So many turns `body(i, state, rows)`: the last state, and what they make in stacks of `total`
    rows."""
    if blocks.is_recorded():
        stacked, continued = total is not None, len(xs)
        xs = tensors(aliased(xs))  # whose gradient is added up by itself, as it is outside of one
        return _scan(
            body, init, xs, turns, total, reverse=reverse, stacked=stacked, continued=continued
        )
    if total is None:
        count = integer("length", turns)

        def turn(i: Tensor, state: Tensors) -> Tensors:
            return body(count - 1 - i if reverse else i, state, [])[0]

        return fori_loop(0, count, turn, init), []

    def f(state: Tensors, row: tuple[Tensor, Tensors]) -> tuple[Tensors, Tensors]:
        return body(row[0], state, row[1])

    return scan(f, init, (arange(total), xs), turns, reverse=reverse)


def next_state(before: Tree, after: Any) -> Tree:
    """What a turn has made of the state. Raises `ShapeError` or `DTypeError` if it is of another
    structure, or other types."""
    return as_like(before, as_tree(after), "a body makes another state than it is given")


def _apart(state: Tree, given: Tree) -> Tree:
    """The state for a turn. What is none of the tensors that the turn before was `given` may be
    somebody else's, such as a weight: an update of it is the state's alone. With a gradient each is
    added up by itself, as it is in a captured function."""
    own = {id(x) for x in tensors(given)} if taping() is None else set[int]()

    def part(x: Tensor) -> Tensor:
        if id(x) not in own:
            return alias_of(x)
        own.remove(id(x))  # it may be there twice
        return x

    return replace(part, state)


def _turn(f: Body, state: Tree, x: Tree) -> tuple[Tree, Tree]:
    result = f(state, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DTypeError(f"the body of a scan returns a pair (state, y), not {brief(result)}")
    return next_state(state, result[0]), as_tree(result[1])


def _rows(xs: Tree, length: Tensor | int | None) -> int | None:
    """How many rows there are to stack; None if only running tells."""
    lengths = {path: x.shape[:1] for path, x in named_leaves(xs, buffers=True)}
    if not lengths and length is None:
        raise ShapeError("a scan without xs takes a length")
    if len(set(lengths.values())) > 1 or () in lengths.values():
        named = ", ".join(f"{path or 'xs'} {list(rows)}" for path, rows in lengths.items())
        raise ShapeError(f"the tensors of xs have equally many rows, not {named}")
    [total] = next(iter(lengths.values()), (None,))
    if length is not None:
        require_integer("length", length)
    if isinstance(length, Tensor) or length is None:
        return total
    given = integer("length", length)
    if given < 0:
        raise ShapeError(f"length is 0 or more, not {given}")
    if total is not None and total != given:
        raise ShapeError(f"xs has {total} rows, and length is {given}")
    return given


def _require_no_rows(y: Tree) -> None:
    if any(named_leaves(y)):
        raise ShapeError("a scan without xs, of a length known at run time, cannot stack results")


def _condition(value: Any) -> Tensor:
    condition = as_tree(value)
    if not isinstance(condition, Tensor) or condition.size != 1:
        given = condition.type if isinstance(condition, Tensor) else brief(value)
        raise ShapeError(f"a condition is one element, not {given}")
    return condition


# --- recorded ------------------------------------------------------------------------


def _recorded_scan(
    f: Body, state: Tree, xs: Tree, length: Tensor | int | None, total: int | None, reverse: bool
) -> tuple[Tree, Tree]:
    """A scan of a captured function."""
    made: list[Tree] = []

    def turn(_: Tensor, flat: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
        after, y = _turn(f, with_leaves(state, iter(flat)), with_leaves(xs, iter(rows)))
        if total is None:
            _require_no_rows(y)
        made.append(y)
        return tensors(after), tensors(y)

    turns = as_index(length) if isinstance(length, Tensor) else total or 0
    final, rows = counted(turn, tensors(state), tensors(xs), turns, total, reverse=reverse)
    return with_leaves(state, iter(final)), with_leaves(made[0], iter(rows))


def _scan(
    body: Turn,
    init: Tensors,
    xs: Tensors,
    turns: Tensor | int,
    total: int | None,
    *,
    reverse: bool = False,
    stacked: bool = True,
    continued: int = 0,
) -> tuple[Tensors, Tensors]:
    """So many turns with a state, through the rows of `xs`. Results have `total` rows, if that is
    known, and there are no more turns. Turns and rows are those that there are at first, whatever a
    body does to `xs` and `turns`. The way back adds to the cotangents of so many of `xs` row by
    row, as the turns do outside of a captured function; to the others it adds what it makes."""
    xs = blocks.aliases(xs)
    turns = untracked(turns) if isinstance(turns, Tensor) else turns
    count = turns if isinstance(turns, Tensor) else constant(turns, i64)  # an i64[]
    with taped(None):
        first = count - 1 if reverse else constant(0, i64)

    def more(i: Tensor, _: Tensors) -> Tensor:
        return i >= 0 if reverse else i < count

    return _loop(more, body, init, xs, first, turns, total, reverse, stacked, continued)


def _loop(
    more: Callable[[Tensor, Tensors], Tensor],
    body: Turn,
    init: Tensors,
    xs: Tensors,
    first: Tensor,
    turns: Tensor | int | None = None,
    total: int | None = None,
    reverse: bool = False,
    stacked: bool = False,
    continued: int = 0,
) -> tuple[Tensors, Tensors]:
    """Turns numbered from `first` on for as long as there are `more`. Without `turns` it counts
    them itself. A body that is not `stacked` makes no rows."""
    tape = taping()
    tracked = [tape is not None and x.tape is tape for x in init]
    rest = (first, turns, total, reverse, stacked, continued)
    return _recorded_loop(tracked, [], more, body, init, xs, *rest)


@blocks.recorded_again
def _recorded_loop(
    tracked: list[bool],
    carried: Tensors,
    more: Callable[[Tensor, Tensors], Tensor],
    body: Turn,
    init: Tensors,
    xs: Tensors,
    first: Tensor,
    turns: Tensor | int | None,
    total: int | None,
    reverse: bool,
    stacked: bool,
    continued: int,
) -> tuple[Tensors, Tensors]:
    """The loop. `tracked` are the parts of the state that are tracked in some turn, as far as that
    is known: those that are so at first, and in a later recording those that a turn makes. What is
    `carried` is the rest of the state (see `blocks.carrying`)."""
    record, tape = blocks.recorder(), taping()
    nown, init = len(init), [*init, *carried]
    tracked += [tape is not None and x.tape is tape for x in init[len(tracked) :]]
    with taped(None):
        state = [blocks.initialized(record, x) for x in init]
        i = blocks.initialized(record, first)
        last = None  # the number of the last record
        if tape is not None and total is None:
            last = blocks.initialized(record, constant(0, i64))
    length = record.use(turns) if isinstance(turns, Tensor) else turns
    of_xs = [record.use(x) for x in xs]
    with record.block() as test, taped(None):
        test.result = record.use(more(i, [untracked(x) for x in state]))
    start = 0 if tape is None else len(tape.nodes)
    is_known = True
    kept: Tensors = []  # what the way back needs of each turn
    stacks: Tensors = []  # that it is kept in, if these have a known length
    with blocks.carrying(carried) as block:
        with taped(None):
            now = untracked(i)
            params, rows = [untracked(x) for x in state], [op.take(x, i, axis=0) for x in xs]
            counted, taken = record.use(now), [record.value_of(x) for x in rows]
        if tape is not None:
            params = blocks.watched(tape, params, tracked)
            rows = blocks.watched(tape, rows, [x.tape is tape for x in xs])
            if total is not None:
                kept = [*params]  # those that are not needed are not kept in the end
                stacks = [_stack(record, x, i, total) for x in kept]
        lent = blocks.aliases(params)
        blocks.assign(carried, lent[nown:])
        try:
            after, made = body(now, lent[:nown], blocks.aliases(rows))
            after, made = blocks.left(carried, [*after, *carried]), blocks.left(carried, made)
        except blocks.Unknown:  # a loop of no turns tells what the function makes
            if stacked:
                raise
            is_known = False
            after, made = params, []
        segment = None
        if tape is not None:
            if not all(x or y.tape is not tape for x, y in zip(tracked, after, strict=True)):
                tracked[:] = [x or y.tape is tape for x, y in zip(tracked, after, strict=True)]
                raise blocks.Again
            known, ends = [i, *state, *rows], [*after, *made]
            segment = blocks.Segment(record, tape, start, ends, known, carried)
            if segment.is_constant([*init, *xs]):
                segment = None
            elif last is None:
                kept += segment.inside
                stacks += [_stack(record, x, i, total) for x in segment.inside]
            else:
                kept = [x for x in params if segment.needs(x)] + segment.inside
                with taped(None):
                    overwrite(last, COPY, record.push([last, *kept]))
        results = [_stack(record, y, i, total) for y in made]
        homes = [record.home_of(x) for x in (*results, *stacks)]
        stacked_rows = [(h, record.use(x)) for h, x in zip(homes, [*made, *kept], strict=False)]
        with taped(None):
            _assign(state, after)
            overwrite(i, _ADD, i, constant(-1 if reverse else 1, i64))
    if not is_known:
        return blocks.released(record, state)[:nown], []
    for stack in results if isinstance(turns, Tensor) else []:
        overwrite(stack, COPY, zeros(stack.shape, dtype=stack.dtype))
    record.control("while", [test, block])
    if length is not None:
        record.calls[-1].turns = Turns(counted, length, total, reverse, of_xs, taken, stacked_rows)
    finals, results = blocks.released(record, state), blocks.released(record, results)
    stacks = blocks.released(record, stacks)
    if tape is not None and segment is not None:
        count = record.released(i) if turns is None else turns
        number = [] if last is None else [record.released(last)]
        ncontinued = 0 if isinstance(count, Tensor) else continued  # a turn for each row
        way = _Way(segment, params, rows, i, after, made, kept, set(), count, total, reverse)
        saved = [*xs, *stacks, *number, *segment.outside]
        if isinstance(count, Tensor):
            saved.append(count)
        outs = blocks.if_tracked(tape, [*finals, *results], [*params, *made])
        if last is None:
            outs += blocks.if_tracked(tape, stacks, kept)
        else:
            outs += number if any(x.tape is tape for x in kept) else [None]
        pull, effect = partial(_pull, way), segment.has_effect
        rows_of = range(len(init), len(init) + ncontinued)
        leave(tape, outs, [*init, *xs], segment.closures, saved, pull, rows_of, effect=effect)
    blocks.assign(carried, finals[nown:])
    return finals[:nown], results


class _Way(NamedTuple):
    """What the way back through a loop needs to know of the way there. `kept` are those tensors of
    its body that are kept for each turn: in stacks of `total` rows or, where that is None, in a
    record that has the number of the one before, first. Those of its tensors that are `used` are of
    the way to a gradient of the gradient."""

    segment: blocks.Segment
    params: Tensors
    rows: Tensors
    i: Tensor
    after: Tensors
    made: Tensors
    kept: Tensors
    used: set[int]
    turns: Tensor | int
    total: int | None
    reverse: bool


def _pull(way: _Way, cotangents: Cotangents, saved: Saved, held: Held) -> Held:
    """The cotangents of a loop's initial state, its xs, and what its body reaches besides. Of the
    latter so much is `held` before; after that, of the xs that are continued (see `_scan`)."""
    segment, turns = way.segment, way.turns
    held, so_far = blocks.split(held, len(segment.closures))
    if isinstance(turns, Tensor):
        *saved, turns = saved
    nstate, nrows = len(way.params), len(way.rows)
    nstacks = len(way.kept) if way.total is not None else 1
    xs, stacks, outside = blocks.split(saved, nrows, nstacks)
    of_state, of_made, of_kept = blocks.split(cotangents, nstate, len(way.made))
    tape = segment.tape
    if way.total is None:
        numbers, of_kept, of_record = stacks, [], [g for g in of_kept if g is not None]
        numbers += of_record
        stacks = []
    else:
        numbers, of_record = [], []
    made = [y for y, g in zip(way.made, of_made, strict=True) if g is not None]
    stacked = [y for y, g in zip(way.kept, of_kept, strict=False) if g is not None]
    are_tracked = [x.tape is tape for x in way.kept]
    recorded = [(k, x) for k, x in enumerate(way.kept, 1) if x.tape is tape and of_record]
    ends = [*made, *stacked, *[x for k, x in recorded if k in way.used]]
    active, reached = _reached(way, [k for k, g in enumerate(of_state) if g is not None], ends)
    tracked = [k for k, x in enumerate(way.rows) if x.tape is tape and x.node in reached]
    continued = {k: g for k, g in enumerate(so_far) if g is not None and k in tracked}
    init = [or_zeros(of_state[k], way.params[k].type) for k in active]
    cells, closures = blocks.parted(segment.closures, held)
    closures = {n: h for n, h in closures.items() if h is not None or n in reached}
    init += [or_zeros(h, segment.closures[number]) for number, h in closures.items()]
    init += numbers

    def turn(i: Tensor, state: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
        xrows, kept, of_made, of_stacked, before = blocks.split(
            rows, nrows, len(stacks), len(made), len(stacked)
        )
        parts, totals, places = blocks.split(state, len(active), len(closures))
        of_recorded: Tensors = []
        if places:
            types = [records.NUMBER, *[x.root.type for x in way.kept]]
            places[0], *kept = records.pull(
                places[0], types, [True, *are_tracked], way.used, segment.stack
            )
        if of_record:
            types = [records.NUMBER, *[x.type for _, x in recorded]]
            places[1], *of_recorded = records.pull(places[1], types)
        inside = {segment.key(x): row for x, row in zip(way.kept, kept, strict=True)}
        inside |= {segment.key(x): row for x, row in zip(way.rows, xrows, strict=True)}
        inside[id(way.i)] = i
        pending = Pending()
        pending.update(cells)
        pending.update(zip(closures, totals, strict=True))
        pending.update((way.rows[k].node, g) for k, g in zip(continued, before, strict=True))
        ends = [*made, *[way.after[k] for k in active], *stacked, *[x for _, x in recorded]]
        gs = [g if k in way.used else None for (k, _), g in zip(recorded, of_recorded, strict=True)]
        seed(pending, segment.tape, ends, [*of_made, *parts, *of_stacked, *gs])
        segment.walk(pending, inside, outside)
        after = [or_zeros(pending.get(way.params[k].node), way.params[k].type) for k in active]
        after += [pending[number] for number in closures]
        of_rows = [or_zeros(pending.get(way.rows[k].node), way.rows[k].type) for k in tracked]
        return [*after, *places], of_rows

    reverse = not way.reverse
    rows = [*xs, *stacks, *[g for g in (*of_made, *of_kept) if g is not None], *continued.values()]
    nown = nrows + len(stacks)
    finals, of_xs = _scan(turn, init, rows, turns, way.total, reverse=reverse, continued=nown)
    parts: list[Tensor | None] = [None] * (nstate + nrows)
    for k, g in zip(active, finals, strict=False):
        parts[k] = g
    for k, g in zip(tracked, of_xs, strict=True):
        parts[nstate + k] = g
    totals = {**cells, **dict(zip(closures, finals[len(active) :], strict=False))}
    return [*parts, *[totals.get(number) for number in segment.closures]]


def _reached(way: _Way, active: list[int], made: Tensors) -> tuple[list[int], set[int]]:
    """The numbers of those parts of the state that a cotangent goes to in any turn, at first these
    `active` ones; and the nodes of a turn, of which it goes to what that has `made`. The others
    have none, as outside of a program: a rule might make nan of zeros."""
    while True:
        ends = [*made, *[way.after[k] for k in active]]
        reached = way.segment.reached([y.node for y in ends if y.tape is way.segment.tape])
        more = [
            k
            for k, x in enumerate(way.params)
            if x.tape is way.segment.tape and (k in active or x.node in reached)
        ]
        if more == active:
            return active, reached
        active = more


def _assign(variables: Tensors, values: Tensors) -> None:
    """Give the variables new values, all at once."""
    roots = {id(x) for x in variables}
    pairs = [(x, y) for x, y in zip(variables, values, strict=True) if y.root is not x]
    moved = [op.copy(y) if id(y.root) in roots else y for _, y in pairs]
    blocks.write([x for x, _ in pairs], moved)


def _stack(record: Recorder, row: Tensor, i: Tensor, total: int | None) -> Tensor:
    """A variable of `total` rows, of which a turn writes that row. Raises `ShapeError` without a
    total."""
    if total is None:
        raise ShapeError("a loop of a length known at run time only cannot stack results")
    with taped(None):
        stack = record.variable(_with_axis(row.type, total), outside=True)
        if total:
            overwrite(stack, _REPLACE_ROW, stack, blocks.seen_as(row, _with_axis(row.type, 1)), i)
        else:
            overwrite(stack, COPY, zeros(stack.shape, dtype=stack.dtype))
    return stack


def _with_axis(type: TensorType, length: int) -> TensorType:
    return type.with_shape((length, *type.shape))
