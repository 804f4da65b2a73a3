"""Control flow of captured functions: branches and loops as blocks of the program.

A function is called once for each block, with stand-ins for what goes round; what it does is
recorded into the block. Under a gradient the tape's nodes of a block are taken off the tape: they
are the block's way back, a block of its own, which runs in control flow of the same kind. What the
way back needs of each turn is kept in a stack, a row for each turn; that is a result like any
other, so there are gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from mlvm.core.errors import CaptureError, GradientError, ShapeError
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.autodiff import Pending, Tape, taping
from mlvm.eager.autodiff.joint import closures_of, leave, or_zeros, seed
from mlvm.eager.autodiff.rules import Sparse
from mlvm.eager.control.state import tensors
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.recording.recorder import Recorder, Shared, SharedAround, recorder, recording_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias, one_op
from mlvm.eager.tensor.constants import constant, prepare_constants
from mlvm.eager.tensor.context import current_arena, recording
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive, overwrite
from mlvm.eager.tree import Tree, with_leaves
from mlvm.step.flow import Block, Procedure

Tensors: TypeAlias = list[Tensor]
Turn: TypeAlias = Callable[[Tensor, Tensors, Tensors], tuple[Tensors, Tensors]]
"""A body: from the number of a turn, the state and a row of each of xs to the state, and a row of
each result."""

P = ParamSpec("P")
R = TypeVar("R")

_ADD: Final = one_op("add")
_COPY: Final = one_op("copy")
_REPLACE_ROW: Final = one_op("dynamic_update", axis=0)
_ROW: Final = one_op("take", axis=0)


def is_recorded() -> bool:
    """Whether this is called in a captured function, while it is recorded."""
    return recorder.get() is not None


def unrun(fn: Callable[[], Tree]) -> Tree:
    """What a function of tensors makes, which is recorded and not run: tensors that have ended,
    whose types tell what they would be."""
    vm = current_arena().vm
    prepare_constants(vm)
    random.prepare(vm)
    while True:
        try:
            with recording_of(vm), _untaped(), random.drawing_nowhere():
                return fn()
        except Shared as shared:
            make_exclusive(shared.x)


def _with_moves(record_blocks: Callable[P, R]) -> Callable[P, R]:
    """What records blocks, which does so again once tensors have moved that the blocks update."""

    @wraps(record_blocks)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        record, tape, around = _recorder(), taping(), _opened.get()
        lists: list[list[Any]] = [record.calls]
        lists += [tape.nodes] if tape is not None else []
        lists += [around[0].inner] if around else []
        lengths = [len(each) for each in lists]
        while True:
            try:
                return record_blocks(*args, **kwargs)
            except SharedAround as shared:
                if shared.depth != record.depth:
                    raise
                for each, length in zip(lists, lengths, strict=True):
                    del each[length:]
                record.own(shared.x)
                lengths[0] = len(record.calls)

    return recorded


# --- loops ---------------------------------------------------------------------------


def scan(
    body: Turn,
    init: Tensors,
    xs: Tensors,
    turns: Tensor | int,
    total: int | None,
    *,
    reverse: bool = False,
    stacked: bool = True,
) -> tuple[Tensors, Tensors]:
    """So many turns with a state, through the rows of `xs`, in a recorded loop. There are no more
    turns than `total`, if that is known; so many rows the results have. A body that is not
    `stacked` makes no rows. Turns and rows are those that there are at first, whatever a body
    does to `xs` and `turns`."""
    xs = _twins(xs)
    turns = stop_gradient(turns) if isinstance(turns, Tensor) else turns
    count = turns if isinstance(turns, Tensor) else constant(turns, i64)  # an i64[]
    with _untaped():
        first = count - 1 if reverse else constant(0, i64)

    def more(i: Tensor, _: Tensors) -> Tensor:
        return i >= 0 if reverse else i < count

    return _loop(more, body, init, xs, first, turns, total, reverse, stacked)


def while_loop(
    test: Callable[[Tensors], Tensor], body: Callable[[Tensors], Tensors], init: Tensors
) -> Tensors:
    """The state when the test is false, in a recorded loop."""
    zero = constant(0, i64)
    finals, _ = _loop(
        lambda i, state: test(state),
        lambda i, state, rows: (body(state), []),
        init,
        [],
        zero,
        None,
        None,
        reverse=False,
        stacked=False,
    )
    return finals


@_with_moves
def _loop(
    more: Callable[[Tensor, Tensors], Tensor],
    body: Turn,
    init: Tensors,
    xs: Tensors,
    first: Tensor,
    turns: Tensor | int | None,
    total: int | None,
    reverse: bool,
    stacked: bool,
) -> tuple[Tensors, Tensors]:
    """Turns numbered from `first` on for as long as there are `more`. Without `turns` it counts
    them itself."""
    record, tape = _recorder(), taping()
    with _untaped():
        state = [_initialized(record, x) for x in init]
        i = _initialized(record, first)
        last = None
        if tape is not None and total is None:
            last = _initialized(record, constant(-1, i64))
    with record.block() as test, _untaped():
        test.result = record.use(more(i, [stop_gradient(x) for x in state]))
    start = 0 if tape is None else len(tape.nodes)
    is_known = True
    kept: Tensors = []  # what the way back needs of each turn
    stacks: Tensors = []  # that it is kept in, if these have a known length
    with record.block() as block:
        with _untaped():
            now = stop_gradient(i)
            params, rows = [stop_gradient(x) for x in state], [_row(x, i) for x in xs]
        if tape is not None:
            params, rows = _watched(tape, params), _watched(tape, rows)
            if total is not None:
                kept = [*params]  # those that are not needed are not kept in the end
                stacks = [_stacked(record, x, i, total) for x in kept]
        try:
            after, made = body(now, _twins(params), _twins(rows))
        except _Unknown:  # a loop of no turns tells what the function makes
            if stacked:
                raise
            is_known = False
            after, made = params, []
        segment = None
        if tape is not None:
            segment = _Segment(record, tape, start, [*after, *made], [i, *state, *rows])
            if segment.is_constant([*init, *xs]):
                segment = None
            elif last is None:
                kept += segment.inside
                stacks += [_stacked(record, x, i, _known(total)) for x in segment.inside]
            else:
                kept = [x for x in params if segment.needs(x)] + segment.inside
                with _untaped():
                    overwrite(last, _COPY, record.push([last, *kept]))
        results = [_stacked(record, y, i, _known(total)) for y in made]
        with _untaped():
            _assign(record, state, after)
            overwrite(i, _ADD, i, constant(-1 if reverse else 1, i64))
    if not is_known:
        return _released(record, state), []
    for stack in results if isinstance(turns, Tensor) else []:
        overwrite(stack, _COPY, zeros(stack.shape, dtype=stack.dtype))
    record.control("while", [test, block])
    finals, results = _released(record, state), _released(record, results)
    stacks = _released(record, stacks)
    if tape is not None and segment is not None:
        count = record.released(i) if turns is None else turns
        number = [] if last is None else [record.released(last)]
        back = _Back(segment, params, rows, i, after, made, kept, count, total, reverse)
        saved = [*xs, *stacks, *number, *segment.outside]
        if isinstance(count, Tensor):
            saved.append(count)
        outs = [*finals, *results, *stacks]
        leave(tape, outs, [*init, *xs], segment.closures, saved, partial(_pull_loop, back))
    return finals, results


class _Back(NamedTuple):
    """What the way back through a loop needs to know of the way there. `kept` are those tensors of
    its body that are kept for each turn: in stacks of `total` rows or, where that is None, in a
    record, which also has the number of the record before."""

    segment: _Segment
    params: Tensors
    rows: Tensors
    i: Tensor
    after: Tensors
    made: Tensors
    kept: Tensors
    turns: Tensor | int
    total: int | None
    reverse: bool


def _pull_loop(
    back: _Back,
    cotangents: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    held: Sequence[Any],
) -> Sequence[Any]:
    """The cotangents of a loop's initial state, its xs, and what its body reaches besides. Of the
    latter so much is `held` before."""
    segment, turns = back.segment, back.turns
    if back.total is None:
        _refuse_outer_tape("a loop whose length is known at run time only")
    if isinstance(turns, Tensor):
        *saved, turns = saved
    nstate, nrows = len(back.params), len(back.rows)
    nstacks = len(back.kept) if back.total is not None else 1
    xs, stacks, outside = _split(saved, nrows, nstacks)
    of_state, of_made, of_kept = _split(cotangents, nstate, len(back.made))
    active = [k for k, x in enumerate(back.params) if x.dtype.is_inexact]
    tracked = [k for k, x in enumerate(back.rows) if x.dtype.is_inexact]
    given = [(y, g) for y, g in zip([*back.made, *back.kept], [*of_made, *of_kept], strict=False)]
    given = [(y, g) for y, g in given if g is not None]
    init = [or_zeros(of_state[k], back.params[k].type) for k in active]
    cells, closures = _parted(segment.closures, held)
    init += [or_zeros(h, segment.closures[number]) for number, h in closures.items()]
    if back.total is None:
        init += stacks
        stacks = []

    def turn(i: Tensor, state: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
        xrows, kept, seeds = _split(rows, nrows, len(stacks))
        parts, totals, number = _split(state, len(active), len(closures))
        if number:
            number, kept = _split(
                _recorder().pull(number[0], [TensorType(i64), *[x.root.type for x in back.kept]]), 1
            )
        inside = {id(x.root): row for x, row in zip(back.kept, kept, strict=True)}
        inside |= {id(x.root): row for x, row in zip(back.rows, xrows, strict=True)}
        inside[id(back.i)] = i
        pending = Pending()
        pending.update(cells)
        pending.update(zip(closures, totals, strict=True))
        seed(pending, segment.tape, [back.after[k] for k in active], parts)
        seed(pending, segment.tape, [y for y, _ in given], seeds)
        segment.walk(pending, inside, outside)
        after = [or_zeros(pending.get(back.params[k].node), back.params[k].type) for k in active]
        after += [pending[number] for number in closures]
        of_rows = [pending.get(back.rows[k].node) for k in tracked]
        of_xs = list(map(or_zeros, of_rows, [back.rows[k].type for k in tracked]))
        return [*after, *number], of_xs

    finals, of_xs = scan(
        turn,
        init,
        [*xs, *stacks, *[g for _, g in given]],
        turns,
        back.total,
        reverse=not back.reverse,
    )
    parts: list[Tensor | None] = [None] * (nstate + nrows)
    for k, g in zip(active, finals, strict=False):
        parts[k] = g
    for k, g in zip(tracked, of_xs, strict=True):
        parts[nstate + k] = g
    totals = {**cells, **dict(zip(closures, finals[len(active) :], strict=False))}
    return [*parts, *[totals[number] for number in segment.closures]]


# --- branches ------------------------------------------------------------------------


@_with_moves
def cond(pred: Tensor, branches: Sequence[Callable[[], Tensors]]) -> Tensors:
    """What the first or the second of two branches makes, in recorded control flow."""
    record, tape = _recorder(), taping()
    start = 0 if tape is None else len(tape.nodes)
    blocks: list[Block] = []
    results: Tensors = []
    sides: list[_Side] = []
    unknown: _Unknown | None = None
    for branch in branches:
        with record.block() as block:
            try:
                made = branch()
            except _Unknown as error:  # the other tells what the function makes
                unknown = error
                continue
            results = results or [record.variable(y.type, outside=True) for y in made]
            kept: Tensors = []
            if tape is not None:
                segment = _Segment(record, tape, start, made, [])
                with _untaped():
                    kept = [record.variable(x.type, outside=True) for x in segment.inside]
                    for place, x in zip(kept, segment.inside, strict=True):
                        overwrite(place, _COPY, x)
                sides.append(_Side(segment, made, kept))
            with _untaped():
                for place, y in zip(results, made, strict=True):
                    overwrite(place, _COPY, y)
        blocks.append(block)
    if unknown is not None:
        if tape is not None:
            del tape.nodes[start:]
        if not blocks:
            raise unknown
        return _released(record, results)
    record.control("cond", blocks, pred)
    finals = _released(record, results)
    closures = {number: type for side in sides for number, type in side.segment.closures.items()}
    if tape is not None and closures:
        sides = [side._replace(kept=_released(record, side.kept)) for side in sides]
        saved = [pred, *[x for side in sides for x in (*side.kept, *side.segment.outside)]]
        outs = [*finals, *[x for side in sides for x in side.kept]]
        pull = partial(_pull_cond, sides, closures)
        leave(tape, outs, [], closures, saved, pull)
    return finals


class _Side(NamedTuple):
    """What the way back through a branch needs to know of the way there."""

    segment: _Segment
    made: Tensors
    kept: Tensors


def _pull_cond(
    sides: Sequence[_Side],
    closures: dict[int, TensorType],
    cotangents: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    held: Sequence[Any],
) -> Sequence[Any]:
    """The cotangents of what the branches reach, of which so much is `held` before."""
    [pred], rest = _split(saved, 1)
    of_made, of_kept = _split(cotangents, len(sides[0].made))
    cells, others = _parted(closures, held)
    before = {number: or_zeros(h, closures[number]) for number, h in others.items()}

    def back(
        side: _Side, kept: Tensors, outside: Tensors, of_kept: Sequence[Tensor | None]
    ) -> Tensors:
        segment = side.segment
        inside = {id(x.root): y for x, y in zip(segment.inside, kept, strict=True)}
        pending = Pending()
        pending.update({**cells, **before})
        seed(pending, segment.tape, [*side.made, *segment.inside], [*of_made, *of_kept])
        segment.walk(pending, inside, outside)
        return [pending[number] for number in before]

    ways: list[Callable[[], Tensors]] = []
    for side in sides:
        kept, outside, rest = _split(rest, len(side.kept), len(side.segment.outside))
        own, of_kept = _split(of_kept, len(side.kept))
        ways.append(partial(back, side, kept, outside, own))
    totals = {**cells, **dict(zip(before, cond(pred, ways), strict=True))}
    return [totals[number] for number in closures]


def _parted(
    closures: dict[int, TensorType], held: Sequence[Any]
) -> tuple[dict[int, _Cell], dict[int, Tensor | None]]:
    """What is held of closures, by their numbers: the cells, and the others."""
    pairs = list(zip(closures, held, strict=True))
    cells = {number: h for number, h in pairs if isinstance(h, _Cell)}
    return cells, {number: h for number, h in pairs if not isinstance(h, _Cell)}


# --- functions -----------------------------------------------------------------------


class _Unknown(Exception):
    """A function calls itself before it is known what it makes."""


class _Open:
    """A function while it is recorded: by its `key` it is known again. `results` are the types of
    what it makes, a `tree`, once they are known. If it has a way back, it also makes the number of
    a record. `inner` are the functions that it calls, if it is called from outside."""

    def __init__(self, key: object, name: str, results: list[TensorType] | None = None) -> None:
        self.key = key
        self.name = name
        self.procedure = Procedure(name, Block())
        self.inner: list[Procedure] = []
        self.results = results
        self.tree: Tree = None
        self.is_guess = False
        self.way: _Way | None = None


class _Way(NamedTuple):
    """What the way back through a function needs to know of the way there. `kept` is what each call
    has kept in a record. `back` has the way back while that is recorded."""

    segment: _Segment
    params: Tensors
    made: Tensors
    kept: Tensors
    back: list[_Open]


_MOST_OPEN: Final = 16
"""Functions of one name, each called by the one before, while they are recorded."""

_opened: ContextVar[tuple[_Open, ...]] = ContextVar("opened", default=())


def call(key: object, name: str, args: Tensors, run: Callable[[Tensors], Tree]) -> Tree:
    """What `run(args)` makes, as a function of the program. While it is recorded it is known again
    by its key: then it calls itself.

    Raises `CaptureError` for a function that calls itself in any case, or each time as another.
    """
    tape = taping()
    known = next((each for each in _opened.get() if each.key == (key, tape is None)), None)
    if known is None:
        if sum(each.name == name for each in _opened.get()) > _MOST_OPEN:
            raise CaptureError(
                f"{name} calls itself each time with arguments of other types, or other objects "
                f"among them, such as a Module that is made for the call"
            )
        opened = _Open((key, tape is None), name)
        made = _call_new(opened, args, run)
        way = opened.way
        if tape is not None and way is not None:
            number = made.pop()
            if not way.segment.is_constant(args):
                pull = partial(_pull_call, way, name)
                saved = [number, *way.segment.outside]
                leave(tape, made, args, way.segment.closures, saved, pull)
        return with_leaves(opened.tree, iter(made))
    if known.results is None:
        known.is_guess = True
        raise _Unknown
    made = _recorder().call(known.procedure, _results_of(known, tape), args)
    if tape is not None:
        number = made.pop()
        leave(tape, made, args, {}, [number], partial(_pull_again, known, args))
    return with_leaves(known.tree, iter(made))


def _results_of(opened: _Open, tape: Tape | None) -> list[TensorType]:
    return [*(opened.results or []), *([] if tape is None else [TensorType(i64)])]


@_with_moves
def _call_new(opened: _Open, args: Tensors, run: Callable[[Tensors], Tree]) -> Tensors:
    """Record a function, and call it. If it calls itself before its results are known, those that
    do not depend on that are taken for them, and it is recorded anew."""
    record, tape, around = _recorder(), taping(), _opened.get()
    outermost = around[0] if around else opened
    before = len(outermost.inner) if around else 0
    for _ in range(2):
        del outermost.inner[before:]
        opened.is_guess = False
        start = 0 if tape is None else len(tape.nodes)
        token = _opened.set((*around, opened))
        try:
            _record_function(record, tape, start, opened, args, run)
        except _Unknown:
            if tape is not None:
                del tape.nodes[start:]
            if opened.is_guess and not any(each.is_guess for each in around):
                raise CaptureError(
                    f"{opened.name} calls itself in any case: what it makes is known by a branch "
                    f"of a cond, or a loop of no turns, in which it does not"
                ) from None
            raise
        finally:
            _opened.reset(token)
        if not opened.is_guess:
            break
    results = _results_of(opened, tape)
    if not around:
        return record.call_from_outside([opened.procedure, *opened.inner], results, args)
    outermost.inner.append(opened.procedure)
    return record.call(opened.procedure, results, args)


def _record_function(
    record: Recorder,
    tape: Tape | None,
    start: int,
    opened: _Open,
    args: Tensors,
    run: Callable[[Tensors], Tree],
) -> None:
    procedure = opened.procedure = Procedure(opened.name, Block())
    with record.function(procedure):
        places = [record.parameter(x.type) for x in args]
        with _untaped():
            params = [stop_gradient(x) for x in places]
        if tape is not None:
            params = _watched(tape, params)
        tree = run(_twins(params))
        made = tensors(tree)
        results = list(made)
        with _untaped():
            if tape is not None:
                segment = _Segment(record, tape, start, made, places)
                kept = [x for x in params if segment.needs(x)] + segment.inside
                results.append(record.push(kept))
                opened.way = _Way(segment, params, made, kept, [])
            outs = [record.parameter(y.type) for y in results]
            for out, y in zip(outs, results, strict=True):
                overwrite(out, _COPY, y)
        procedure.params = [record.home_of(x) for x in (*outs, *places)]
    opened.tree, opened.results = tree, [y.type for y in made]


class _Cell:
    """A cotangent that functions add to where it lies: they share it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.type = x.type

    def __add__(self, part: Tensor | Sparse) -> _Cell:
        call, operands = (
            (part.added, part.operands) if isinstance(part, Sparse) else (_ADD, (part,))
        )
        overwrite(self.x, call, self.x, *operands)
        return self


def _pull_call(
    way: _Way,
    name: str,
    cotangents: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    held: Sequence[Any],
) -> Sequence[Any]:
    """The cotangents of a function's arguments, and of what it reaches besides."""
    _refuse_outer_tape("a function that may call itself")
    record, segment = _recorder(), way.segment
    number, *outside = saved
    types = segment.closures.values()
    cells = [
        h
        if isinstance(h, _Cell)
        else _Cell(record.as_cell(_initialized(record, or_zeros(h, type))))
        for h, type in zip(held, types, strict=True)
    ]

    def run(args: Tensors) -> Tensors:
        *parts, number = args
        kept = record.pull(number, [x.root.type for x in way.kept])
        inside = {id(x.root): y for x, y in zip(way.kept, kept, strict=True)}
        pending = Pending()
        pending.update(zip(segment.closures, cells, strict=True))
        seed(pending, segment.tape, [y for y in way.made if y.dtype.is_inexact], parts)
        segment.walk(pending, inside, outside)
        return [or_zeros(pending.get(x.node), x.type) for x in way.params if x.dtype.is_inexact]

    results = [x.type for x in way.params if x.dtype.is_inexact]
    opened = _Open(way, f"{name}_back", results)
    way.back.append(opened)
    try:
        made = iter(_call_new(opened, [*_of_floats(way.made, cotangents), number], run))
    finally:
        way.back.clear()
    parts = [next(made) if x.dtype.is_inexact else None for x in way.params]
    totals = [
        h if isinstance(h, _Cell) else record.released(cell.x)
        for h, cell in zip(held, cells, strict=True)
    ]
    return [*parts, *totals]


def _pull_again(
    known: _Open,
    args: Tensors,
    cotangents: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    held: Sequence[Any],
) -> Sequence[Any]:
    """The cotangents of the arguments of a function that has called itself."""
    if known.way is None or not known.way.back:
        raise GradientError(
            f"{known.name} takes a gradient of itself, which a captured function cannot"
        )
    [back] = known.way.back
    given = [*_of_floats(known.way.made, cotangents), *saved]
    made = iter(_recorder().call(back.procedure, back.results or [], given))
    return [next(made) if x.dtype.is_inexact else None for x in args]


def _of_floats(results: Tensors, cotangents: Sequence[Tensor | None]) -> Tensors:
    """Cotangents of those results that are floats."""
    pairs = zip(results, cotangents, strict=True)
    return [or_zeros(g, y.type) for y, g in pairs if y.dtype.is_inexact]


def _refuse_outer_tape(what: str) -> None:
    if taping() is not None:
        raise GradientError(
            f"a gradient through the gradient of {what} is not supported in a captured function; "
            f"scan, fori_loop with ints, and cond have one"
        )


# --- the way back --------------------------------------------------------------------


class _Segment:
    """The nodes that a block has left, taken off the tape.

    `closures` are the nodes before it that cotangents go to, and their types. Of what the nodes
    need, `inside` has what lies in the block, but for what is `known` in another way, and `outside`
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
        """The tensor; for a view that the block has made, another of the same bytes whose node is
        the one before the block that the view's cotangent goes to. Its own is off the tape."""
        node, type = x.node if x.tape is self.tape else -1, x.type
        while node >= self.start:
            left = self.nodes[node - self.start]
            if left is None:
                return stop_gradient(x)
            pulls, origins, _ = left
            if not isinstance(pulls, tuple) or pulls[0].type.nbytes != x.nbytes:
                return x
            [(type, _, _)], [node] = pulls, origins
        if node < 0 or node == x.node:
            return x
        twin = x.arena.view(x, type, Tensor)
        twin.tape, twin.node = self.tape, node
        return twin

    def needs(self, x: Tensor) -> bool:
        """Whether the nodes need the tensor, which is known in another way."""
        return any(y.root is x.root for node in self.nodes if node is not None for y in node[2])

    def is_constant(self, operands: Sequence[Tensor]) -> bool:
        """Whether no gradient goes through it, nor to these operands of its control flow."""
        return not self.closures and not any(x.tape is self.tape for x in operands)

    def walk(self, pending: Pending, inside: dict[int, Tensor], outside: Sequence[Tensor]) -> None:
        """Go back through the nodes. `inside` has what stands for tensors of the block now, by
        their ids, and `outside` what stands for the segment's own."""
        given = dict(zip(self._seen, outside, strict=True))

        def now(x: Tensor) -> Tensor:
            y = given[id(x)] if id(x) in given else inside[id(x.root)]
            return y if y.type is x.type else _seen_as(y, x.type)

        for number in reversed(range(self.start, self.start + len(self.nodes))):
            node = self.nodes[number - self.start]
            if node is not None and (g := pending.pop(number, None)) is not None:
                pulls, origins, saved = node
                pending.go_back((pulls, origins, tuple(map(now, saved))), g)


# --- pieces --------------------------------------------------------------------------


def _recorder() -> Recorder:
    record = recorder.get()
    assert record is not None  # see `is_recorded`
    return record


@contextmanager
def _untaped() -> Iterator[None]:
    """Inside, no tape is on."""
    before = recording.set(None)
    try:
        yield
    finally:
        recording.reset(before)


def _initialized(record: Recorder, x: Tensor) -> Tensor:
    variable = record.variable(x.type)
    overwrite(variable, _COPY, x)
    return variable


def _assign(record: Recorder, variables: Tensors, values: Tensors) -> None:
    """Give the variables new values, all at once."""
    roots = {id(x) for x in variables}
    pairs = [(x, y) for x, y in zip(variables, values, strict=True) if y.root is not x]
    moved = [(x, op.copy(y) if id(y.root) in roots else y) for x, y in pairs]
    for x, y in moved:
        overwrite(x, _COPY, y)


def _row(x: Tensor, i: Tensor) -> Tensor:
    return op.take(x, i, axis=0)


def _stacked(record: Recorder, row: Tensor, i: Tensor, total: int) -> Tensor:
    """A variable, of which a turn writes that row."""
    with _untaped():
        stack = record.variable(_with_axis(row.type, total), outside=True)
        if total:
            overwrite(stack, _REPLACE_ROW, stack, _seen_as(row, _with_axis(row.type, 1)), i)
        else:
            overwrite(stack, _COPY, zeros(stack.shape, dtype=stack.dtype))
    return stack


def _with_axis(type: TensorType, length: int) -> TensorType:
    return type.with_shape((length, *type.shape))


def _seen_as(x: Tensor, type: TensorType) -> Tensor:
    return alias(one_op("reshape", shape=type.shape), x, type)


def _twins(xs: Tensors) -> Tensors:
    """Other tensors over the same bytes, with the same nodes: an update moves them."""
    twins = []
    for x in xs:
        twin = stop_gradient(x)
        if x.tape is not None:
            twin.tape, twin.node = x.tape, x.node
        twins.append(twin)
    return twins


def _watched(tape: Tape, xs: Tensors) -> Tensors:
    return [tape.watch(x) if x.dtype.is_inexact else x for x in xs]


def _released(record: Recorder, variables: Tensors) -> Tensors:
    return [record.released(x) for x in variables]


def _known(total: int | None) -> int:
    if total is None:
        raise ShapeError("a loop of a length known at run time only cannot stack results")
    return total


def _split(items: Sequence[Any], *lengths: int) -> Iterator[list[Any]]:
    """The items in lists of so many, and the rest."""
    first = 0
    for length in lengths:
        yield list(items[first : first + length])
        first += length
    yield list(items[first:])
