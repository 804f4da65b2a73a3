"""Functions that stay functions in a captured program: `function`.

Eagerly such a function is the function itself. In a captured function it is recorded once, as a
procedure that `call` runs with a frame of its own. So it may call itself. Its way back is a
procedure too. What that needs of a call is kept in a record of the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

from mlvm.core.errors import CaptureError, GradientError
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.joint import Cotangents, Held, Saved, leave, or_zeros, seed
from mlvm.eager.autodiff.tape import Pending, Tape, taping
from mlvm.eager.control import blocks, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.state import aliased, as_tree, copied, tensors
from mlvm.eager.tensor.apply import untracked
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, replace, with_leaves
from mlvm.step.flow import Block, Procedure, Use

P = ParamSpec("P")
R = TypeVar("R")

_Run: TypeAlias = Callable[[Tensors], Tree]


class Function(Generic[P, R]):
    """A function of trees of tensors that `function` made."""

    __name__: str

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given = as_tree((args, kwargs))
        if not blocks.is_recorded():
            args, kwargs = aliased(given)
            return copied(as_tree(self.fn(*args, **kwargs)))  # type: ignore[no-any-return]

        def run(params: Tensors) -> Tree:
            rest = iter(params)
            args, kwargs = replace(lambda _: next(rest), given)
            return as_tree(self.fn(*args, **kwargs))

        operands: Tensors = []
        replace(operands.append, given)
        key = id(self), _spelled(given)
        return called(key, self.__name__, operands, run)  # type: ignore[no-any-return]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: a method."""
        return self if instance is None else MethodType(self, instance)


def function(fn: Callable[P, R]) -> Function[P, R]:
    """A function that stays one in a captured program, where `call` runs it, with a frame of its
    own: so it may call itself, as deep as values say, with a `cond` that ends it. Eagerly it is
    the function itself.

    Tensors in dicts, lists and tuples among its arguments are the parameters; numbers and arrays
    become tensors. Modules and other arguments are what they are. It may use tensors from outside,
    such as weights, but not update them in place, nor draw from the global random keys: in a
    captured function that raises `CaptureError`. While it is recorded it is called twice if it
    calls itself: once to see what it makes.

        >>> half = ml.function(lambda n: ml.cond(n < 1.0, lambda n: n, lambda n: half(n / 2.0), n))
        >>> half(ml.asarray(5.0))
        Tensor(0.625, f32[])
    """
    return Function(fn)


def _spelled(tree: Any) -> Any:
    """Equal for arguments of one structure, with tensors of the same types and, besides, the same
    strings and objects."""
    if isinstance(tree, Tensor):
        return tree.type
    if isinstance(tree, dict):
        return type(tree), tuple([(name, _spelled(part)) for name, part in tree.items()])
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple([_spelled(part) for part in tree])
    return tree if isinstance(tree, (str, bytes)) else id(tree)


# --- recorded ------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A function that was recorded and not called: what it is, what it calls, and what it makes."""

    procedure: Procedure
    callees: list[Procedure]
    results: list[Use]


def recorded(name: str, types: Sequence[TensorType], run: Callable[[Tensors], Tensors]) -> Recorded:
    """A function of tensors of these types, recorded with all functions that it calls. As those, it
    may read what lies outside of it."""
    record, opened = blocks.recorder(), _Open(object(), name)
    before = len(record.callees)
    token = _opened.set((*_opened.get(), opened))
    try:
        with record.function(opened.procedure):
            places = [record.parameter(type) for type in types]
            results = [record.use(y) for y in run(places)]
            opened.procedure.params = [record.home_of(x) for x in places]
        return Recorded(opened.procedure, record.callees[before:], results)
    finally:
        _opened.reset(token)
        del record.callees[before:]


class _Open:
    """A function while it is recorded. By its `key` it is known again. It makes a `tree`, whose
    types are the `results`, once these are known. If it has a way back, it also makes the number of
    a record. It `is_guess` if it calls itself before its results are known. One that `is_back` is a
    way back. It `takes_record` where it also gets the number of cotangents of the record."""

    def __init__(
        self,
        key: object,
        name: str,
        results: list[TensorType] | None = None,
        *,
        is_back: bool = False,
        takes_record: bool = False,
    ) -> None:
        self.key = key
        self.name = name
        self.procedure = Procedure(name, Block())
        self.results = results
        self.is_back = is_back
        self.takes_record = takes_record
        self.tree: Tree = None
        self.is_guess = False
        self.way: _Way | None = None


class _Way(NamedTuple):
    """What the way back through a function needs to know of the way there. `kept` is what each call
    has kept in a record, of which those `used` are of the way to a gradient of the gradient. `back`
    has the way back while that is recorded."""

    segment: blocks.Segment
    params: Tensors
    made: Tensors
    kept: Tensors
    used: set[int]
    back: list[_Open]

    def tracked(self, xs: Tensors) -> list[tuple[int, Tensor]]:
        """Those of its tensors that are tracked, with their numbers."""
        return [(k, x) for k, x in enumerate(xs) if x.tape is self.segment.tape]


_MOST_OPEN: Final = 16
"""Functions of one name, each called by the one before, while they are recorded."""


_opened: ContextVar[tuple[_Open, ...]] = ContextVar("opened", default=())


def called(key: object, name: str, args: Tensors, run: _Run) -> Tree:
    """What `run(args)` makes, as a function of the program. If its key is that of a function that
    is being recorded, that function calls itself.

    Raises `CaptureError` for a function that calls itself in any case, or each time as another.
    """
    tape = taping()
    if any(x.tape is not None and x.tape is tape and not x.dtype.is_inexact for x in args):
        raise GradientError(
            f"a gradient through a direction of a gradient of {name} is not supported in a "
            f"captured function; a direction of the gradient of its gradient is"
        )
    key = key, tape is None, autocast_dtype()
    known = next((each for each in _opened.get() if each.key == key), None)
    if known is None:
        if sum(each.name == name for each in _opened.get()) > _MOST_OPEN:
            raise CaptureError(
                f"{name} calls itself each time with arguments of other types, or other objects "
                f"among them, such as a Module that is made for the call"
            )
        opened = _Open(key, name)
        made = _call_new(opened, args, run, [], [])
        return with_leaves(opened.tree, iter(made))
    if known.results is None:
        known.is_guess = True
        raise blocks.Unknown
    return with_leaves(known.tree, iter(_call_again(known, args)))


def _call_new(
    opened: _Open, args: Tensors, run: _Run, cells: list[blocks.Cell], held: Sequence[Any]
) -> Tensors:
    """Record a function, and call it. A way back adds to the `cells`, of closures of which so much
    is `held` before. Returns what it makes, and the totals of cells that are its own."""
    record, tape = blocks.recorder(), taping()
    made, way = _record_and_call(opened, args, run), opened.way
    own = [(c, h) for c, h in zip(cells, held, strict=True) if c is not h]
    totals = [record.released(cell.x) for cell, _ in own]
    if tape is not None and way is not None:
        number = made.pop()
        before = [h for _, h in own if h is not None]
        operands, closures = [*args, *before], way.segment.closures
        if not way.segment.is_constant(operands):
            results = blocks.if_tracked(tape, made, way.made)
            results.append(number if way.tracked(way.kept) else None)
            pull = partial(_pull, way, opened.name, len(args), own)
            saved, adds = [number, *way.segment.outside], len(own) < len(cells)
            leave(tape, [*results, *totals], operands, closures, saved, pull, effect=adds)
    return [*made, *totals]


def _call_again(known: _Open, args: Tensors) -> Tensors:
    """Call a function that is being recorded."""
    tape = taping()
    made = blocks.recorder().call(known.procedure, _results_of(known, tape), args)
    if tape is not None:
        number = made.pop()
        results = [y if y.dtype.is_inexact or known.is_back else None for y in made]
        pull = partial(_pull_again, known, args)
        leave(tape, [*results, number], args, {}, [number], pull, effect=known.is_back)
    return made


def _results_of(opened: _Open, tape: Tape | None) -> list[TensorType]:
    return [*(opened.results or []), *([] if tape is None else [TensorType(i64)])]


@blocks.recorded_again
def _record_and_call(opened: _Open, args: Tensors, run: _Run) -> Tensors:
    """Record a function, and call it. It may call itself before its results are known. Then the
    results of a branch that does not do so are taken for them, and it is recorded anew."""
    record, tape, around = blocks.recorder(), taping(), _opened.get()
    before = len(record.callees)
    for _ in range(2):
        del record.callees[before:]
        opened.is_guess = False
        start = 0 if tape is None else len(tape.nodes)
        token = _opened.set((*around, opened))
        try:
            _record_function(start, opened, args, run)
        except blocks.Unknown:
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
        procedures = [opened.procedure, *record.callees]
        record.callees.clear()
        return record.call_from_outside(procedures, results, args)
    record.callees.append(opened.procedure)
    return record.call(opened.procedure, results, args)


def _record_function(start: int, opened: _Open, args: Tensors, run: _Run) -> None:
    record, tape = blocks.recorder(), taping()
    procedure = opened.procedure = Procedure(opened.name, Block())
    with record.function(procedure):
        places = [record.parameter(x.type) for x in args]
        with taped(None):
            params = [untracked(x) for x in places]
        if tape is not None:
            are_tracked = [x.dtype.is_inexact or opened.is_back for x in params]
            params = blocks.watched(tape, params, are_tracked)
        tree = run(blocks.aliases(params))
        made = tensors(tree)
        results = list(made)
        with taped(None):
            if tape is not None:
                segment = blocks.Segment(record, tape, start, made, places)
                kept = [x for x in params if segment.needs(x)] + segment.inside
                results.append(record.push(kept))
                opened.way = _Way(segment, params, made, kept, set(), [])
            outs = [record.parameter(y.type) for y in results]
            blocks.write(outs, results)
        procedure.params = [record.home_of(x) for x in (*outs, *places)]
    opened.tree, opened.results = tree, [y.type for y in made]


def _pull(
    way: _Way,
    name: str,
    nargs: int,
    own: Sequence[tuple[blocks.Cell, Any]],
    cotangents: Cotangents,
    saved: Saved,
    held: Held,
) -> Held:
    """The cotangents of a function's arguments, of what its `own` cells held before, and of what it
    reaches besides."""
    record, segment = blocks.recorder(), way.segment
    number, *outside = saved
    _, [of_number], of_totals = blocks.split(cotangents, len(way.made), 1)
    for (cell, _), g in zip(own, of_totals, strict=True):
        cell.cotangent = None if g is None else blocks.in_functions(record, g)
    closures = segment.closures.items()
    cells = [
        h if isinstance(h, blocks.Cell) else blocks.new_cell(record, or_zeros(h, type))
        for h, (_, type) in zip(held, closures, strict=True)
    ]
    kept = way.tracked(way.kept)
    made, params = way.tracked(way.made), way.tracked(way.params)
    opened = _Open(
        way,
        f"{name}_back",
        [x.type for _, x in params],
        is_back=True,
        takes_record=of_number is not None,
    )

    def run(args: Tensors) -> Tensors:
        parts, [number], of_record = blocks.split(args, len(made), 1)
        are_tracked = [x.tape is segment.tape for x in way.kept]
        types = [x.root.type for x in way.kept]
        now = records.pull(number, types, are_tracked, way.used, segment.stack)
        inside = {segment.key(x): y for x, y in zip(way.kept, now, strict=True)}
        pending = Pending()
        pending.update(zip(segment.closures, cells, strict=True))
        seed(pending, segment.tape, [y for _, y in made], parts)
        of_kept = [g for each in of_record for g in records.pull(each, [x.type for _, x in kept])]
        for (k, x), g in zip(kept, of_kept, strict=False):
            seed(pending, segment.tape, [x], [g if k in way.used else None])
        segment.walk(pending, inside, outside)
        return [or_zeros(pending.get(x.node), x.type) for _, x in params]

    way.back.append(opened)
    try:
        found = _call_new(opened, _given(way, opened, cotangents, number), run, cells, held)
    finally:
        way.back.clear()
    of_params, totals = blocks.split(found, len(params))
    parts: list[Any] = [None] * nargs
    for (k, _), g in zip(params, of_params, strict=True):
        parts[k] = g
    rest = iter(totals)
    ends = [h if isinstance(h, blocks.Cell) else next(rest) for h in held]
    of_before = [g for (_, h), g in zip(own, of_totals, strict=True) if h is not None]
    return [*parts, *of_before, *ends]


def _pull_again(
    known: _Open, args: Tensors, cotangents: Cotangents, saved: Saved, held: Held
) -> Held:
    """The cotangents of the arguments of a function that has called itself."""
    way = known.way
    if way is None or not way.back:
        raise GradientError(
            f"{known.name} takes a gradient of itself, which a captured function cannot"
        )
    [back] = way.back
    made = _call_again(back, _given(way, back, cotangents, saved[0]))
    parts: list[Tensor | None] = [None] * len(args)
    for (k, _), g in zip(way.tracked(way.params), made, strict=True):
        parts[k] = g
    return parts


def _given(way: _Way, back: _Open, cotangents: Cotangents, number: Tensor) -> Tensors:
    """What a way back is called with: cotangents of what is tracked, the number of the record, and
    that of its cotangents."""
    given = [or_zeros(cotangents[k], y.type) for k, y in way.tracked(way.made)]
    of_record = cotangents[len(way.made)]
    return [*given, number, *([or_zeros(of_record, number.type)] if back.takes_record else [])]
