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
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.state import aliased, as_tree, copied, tensors
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.recording.recorder import Recorder
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
        return _call(key, self.__name__, operands, run)  # type: ignore[no-any-return]

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
    a record. It `is_guess` if it calls itself before its results are known."""

    def __init__(self, key: object, name: str, results: list[TensorType] | None = None) -> None:
        self.key = key
        self.name = name
        self.procedure = Procedure(name, Block())
        self.results = results
        self.tree: Tree = None
        self.is_guess = False
        self.way: _Way | None = None


class _Way(NamedTuple):
    """What the way back through a function needs to know of the way there. `kept` is what each call
    has kept in a record. `back` has the way back while that is recorded."""

    segment: blocks.Segment
    params: Tensors
    made: Tensors
    kept: Tensors
    back: list[_Open]


_MOST_OPEN: Final = 16
"""Functions of one name, each called by the one before, while they are recorded."""


_opened: ContextVar[tuple[_Open, ...]] = ContextVar("opened", default=())


def _call(key: object, name: str, args: Tensors, run: _Run) -> Tree:
    """What `run(args)` makes, as a function of the program. If its key is that of a function that
    is being recorded, that function calls itself.

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
        made = _record_and_call(opened, args, run)
        way = opened.way
        if tape is not None and way is not None:
            number = made.pop()
            if not way.segment.is_constant(args):
                pull = partial(_pull, way, name)
                saved = [number, *way.segment.outside]
                leave(tape, made, args, way.segment.closures, saved, pull)
        return with_leaves(opened.tree, iter(made))
    if known.results is None:
        known.is_guess = True
        raise blocks.Unknown
    made = blocks.recorder().call(known.procedure, _results_of(known, tape), args)
    if tape is not None:
        number = made.pop()
        leave(tape, made, args, {}, [number], partial(_pull_again, known, args))
    return with_leaves(known.tree, iter(made))


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
            params = [stop_gradient(x) for x in places]
        if tape is not None:
            params = blocks.watched(tape, params)
        tree = run(blocks.aliases(params))
        made = tensors(tree)
        results = list(made)
        with taped(None):
            if tape is not None:
                segment = blocks.Segment(record, tape, start, made, places)
                kept = [x for x in params if segment.needs(x)] + segment.inside
                results.append(record.push(kept))
                opened.way = _Way(segment, params, made, kept, [])
            outs = [record.parameter(y.type) for y in results]
            blocks.write(outs, results)
        procedure.params = [record.home_of(x) for x in (*outs, *places)]
    opened.tree, opened.results = tree, [y.type for y in made]


def _pull(way: _Way, name: str, cotangents: Cotangents, saved: Saved, held: Held) -> Held:
    """The cotangents of a function's arguments, and of what it reaches besides."""
    blocks.refuse_outer_tape("a function that may call itself")
    record, segment = blocks.recorder(), way.segment
    number, *outside = saved
    types = segment.closures.values()
    cells = [
        h if isinstance(h, blocks.Cell) else _new_cell(record, or_zeros(h, type))
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
        made = iter(_record_and_call(opened, [*_of_floats(way.made, cotangents), number], run))
    finally:
        way.back.clear()
    parts = [next(made) if x.dtype.is_inexact else None for x in way.params]
    totals = [
        h if isinstance(h, blocks.Cell) else record.released(cell.x)
        for h, cell in zip(held, cells, strict=True)
    ]
    return [*parts, *totals]


def _new_cell(record: Recorder, x: Tensor) -> blocks.Cell:
    return blocks.Cell(record.as_cell(blocks.initialized(record, x)))


def _pull_again(
    known: _Open, args: Tensors, cotangents: Cotangents, saved: Saved, held: Held
) -> Held:
    """The cotangents of the arguments of a function that has called itself."""
    if known.way is None or not known.way.back:
        raise GradientError(
            f"{known.name} takes a gradient of itself, which a captured function cannot"
        )
    [back] = known.way.back
    given = [*_of_floats(known.way.made, cotangents), *saved]
    made = iter(blocks.recorder().call(back.procedure, back.results or [], given))
    return [next(made) if x.dtype.is_inexact else None for x in args]


def _of_floats(results: Tensors, cotangents: Cotangents) -> Tensors:
    """Cotangents of those results that are floats."""
    pairs = zip(results, cotangents, strict=True)
    return [or_zeros(g, y.type) for y, g in pairs if y.dtype.is_inexact]
