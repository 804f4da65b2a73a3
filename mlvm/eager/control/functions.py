"""Recursive functions: `subroutine`.

Eagerly such a function is the Python function itself. In a captured function it is recorded once,
as a procedure with a frame, so it may call itself.

In: a function, operands, and a key that identifies a recursive call. Out: a `Procedure` of the
flow, and a call of it.

Backward pass: a second procedure. The residuals of a call are saved in a record
(`control.records`). The record's number is a hidden result of the call.

Callers: `Subroutine.__call__`, and `transform` for functions in traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

from mlvm.arena.context import context, current
from mlvm.core.errors import ArgumentError, CaptureError, GradientError, brief
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, or_zeros, seed
from mlvm.eager.autodiff.tape import Conditional, CotangentAccumulator, Tape, taping
from mlvm.eager.control import blocks, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.state import aliased, as_tree, copied, tensors
from mlvm.eager.tensor.apply import untracked
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, replace, with_leaves
from mlvm.renamed import old_names
from mlvm.step.flow import Block, Procedure, Use

P = ParamSpec("P")
R = TypeVar("R")

_Run: TypeAlias = Callable[[Tensors], Tree]


class Subroutine(Generic[P, R]):
    """Recursive function of trees of tensors, created by `function`."""

    __name__: str

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = as_tree((args, kwargs))
        if not blocks.is_recorded():
            args, kwargs = aliased(arguments)
            return copied(as_tree(self.fn(*args, **kwargs)))  # type: ignore[no-any-return]

        def run(params: Tensors) -> Tree:
            rest = iter(params)
            args, kwargs = replace(lambda _: next(rest), arguments)
            return as_tree(self.fn(*args, **kwargs))

        operands: Tensors = []
        replace(operands.append, arguments)
        key = id(self), _signature(arguments)
        return called(key, self.__name__, operands, run)  # type: ignore[no-any-return]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind the function as a method."""
        return self if instance is None else MethodType(self, instance)


@hinted
def subroutine(fn: Callable[P, R]) -> Subroutine[P, R]:
    """Record `fn` as a subroutine of the captured program, so that it may call itself.

    The depth of the recursion may depend on values; a `cond` must end the recursion. Eagerly the
    result is `fn` itself.

    The parameters are the tensors in dicts, lists and tuples among the arguments; numbers and
    arrays are converted to tensors. Modules and other arguments are passed unchanged. `fn` may use
    tensors from outside, such as weights. In a captured function it must not update them in place
    or draw from the global random keys; either raises `CaptureError`. If `fn` calls itself, it is
    called twice while it is recorded: the first call determines the result types. Raises
    `ArgumentError` if `fn` is not a function.

        >>> half = ml.subroutine(lambda n: ml.cond(n < 1, lambda n: n, lambda n: half(n / 2), n))
        >>> half(ml.asarray(5.0))
        Tensor(0.625, f32[])

    Invalid calls:
        ml.capture(lambda x: ml.subroutine(lambda x: x * ml.random.normal())(x))(v)  # CaptureError
        ml.subroutine(v)  # ArgumentError
    """
    if not callable(fn):
        raise ArgumentError(f"expected a function, got {brief(fn)}")
    return Subroutine(fn)


def _signature(tree: Any) -> Any:
    """Return a cache key for a tree.

    Keys are equal if the structure, the types of tensors and the strings are equal and all other
    objects are identical."""
    if isinstance(tree, Tensor):
        return tree.type
    if isinstance(tree, dict):
        return type(tree), tuple([(name, _signature(part)) for name, part in tree.items()])
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple([_signature(part) for part in tree])
    return tree if isinstance(tree, (str, bytes)) else id(tree)


# --- recorded ------------------------------------------------------------------------


class Recorded(NamedTuple):
    """Function that was recorded but not called: the procedure, callees and results."""

    procedure: Procedure
    callees: list[Procedure]
    results: list[Use]


def trace_callee(name: str, types: list[TensorType], run: Callable[[Tensors], Tensors]) -> Recorded:
    """Record a function of tensors of these types, and all functions that it calls.

    All of them may read tensors from outside.
    """
    record, opened = blocks.recorder(), _Open(object(), name)
    before = len(record.scopes.callees)
    try:
        with context(functions=(*current().functions, opened)), record.function(opened.procedure):
            places = [record.parameter(type) for type in types]
            results = [record.use(y) for y in run(places)]
            opened.procedure.params = [record.home_of(x) for x in places]
        return Recorded(opened.procedure, record.scopes.callees[before:], results)
    finally:
        del record.scopes.callees[before:]


@dataclass(eq=False)
class _Open:
    """Function that is being recorded.

    Attributes:
        key: identifies recursive calls.
        tree: the result; `results` are the types, once they are known.
        is_guess: True if the function calls itself before the results are known.
        is_back: True for a backward pass.
        takes_record: True for a backward pass that also needs the number of a record of cotangents.
        vjp: the backward pass; with one, the function also returns the number of a record.
    """

    key: object
    name: str
    results: list[TensorType] | None = None
    is_back: bool = False
    takes_record: bool = False
    procedure: Procedure = field(init=False)
    tree: Tree = None
    is_guess: bool = False
    vjp: _FunctionVjp | None = None

    def __post_init__(self) -> None:
        self.procedure = Procedure(self.name, Block())


class _FunctionVjp(NamedTuple):
    """Vjp of a function.

    `residuals`: tensors that each call saves in a record. `used`: the indices of the residuals that
    have cotangents in a gradient of the gradient. `open_backward`: the backward pass while it is
    being recorded.
    """

    segment: blocks.Segment
    params: Tensors
    outputs: Tensors
    residuals: Tensors
    used: set[int]
    open_backward: list[_Open]

    def tracked(self, xs: Tensors) -> list[tuple[int, Tensor]]:
        """Return the tracked tensors among xs, with positions."""
        return [(k, x) for k, x in enumerate(xs) if x.tape is self.segment.tape]


def called(key: object, name: str, args: Tensors, run: _Run) -> Tree:
    """Call `run(args)` as a subroutine of the program.

    If the key belongs to a function that is being recorded, the call is recursive. Raises
    `CaptureError` for recursion without a base case, or with a new key in each call.
    """
    tape = taping()
    if any(x.tape is not None and x.tape is tape and not x.dtype.is_inexact for x in args):
        raise GradientError(
            f"reverse mode over forward mode over reverse mode of {name} is not supported in a "
            f"captured function; use forward mode over two gradients"
        )
    key = key, tape is None, autocast_dtype(), default_float()
    callee = next((each for each in current().functions if each.key == key), None)
    if callee is None:
        # Maximum number of nested recordings of functions with the same name.
        if sum(each.name == name for each in current().functions) > 16:
            raise CaptureError(
                f"{name} calls itself with different argument types, or different objects such as "
                f"a new Module, in each call; create the objects once, outside of it"
            )
        opened = _Open(key, name)
        outputs = _call_new(opened, args, run, [], [])
        return with_leaves(opened.tree, iter(outputs))
    if callee.results is None:
        callee.is_guess = True
        raise blocks.UnknownResults
    return with_leaves(callee.tree, iter(_call_again(callee, args)))


def _call_new(
    opened: _Open, args: Tensors, run: _Run, cells: list[blocks.Cell], sums: Sequence[Any]
) -> Tensors:
    """Record a function, and call it; return its outputs and the totals of the cells that it owns.

    A backward pass adds to the `cells` of closures, which continue the partial sums `sums`.
    """
    record, tape = blocks.recorder(), taping()
    outputs, vjp = _record_and_call(opened, args, run), opened.vjp
    own = [(c, h) for c, h in zip(cells, sums, strict=True) if c is not h]
    totals = [record.released(cell.x) for cell, _ in own]
    if tape is not None and vjp is not None:
        number = outputs.pop()
        before = [h for _, h in own if h is not None]
        operands, closures = [*args, *before], vjp.segment.closures
        if not vjp.segment.is_constant(operands):
            results = blocks.tracked_results(tape, outputs, vjp.outputs)
            results.append(number if vjp.tracked(vjp.residuals) else None)
            vjp_fn = partial(_vjp, vjp, opened.name, len(args), own)
            saved, adds = [number, *vjp.segment.outside], len(own) < len(cells)
            add_node(tape, [*results, *totals], operands, closures, saved, vjp_fn, effect=adds)
    return [*outputs, *totals]


def _call_again(callee: _Open, args: Tensors) -> Tensors:
    """Call a function that is being recorded."""
    tape = taping()
    outputs = blocks.recorder().call(callee.procedure, _results_of(callee, tape), args)
    if tape is not None:
        number = outputs.pop()
        results = [y if y.dtype.is_inexact or callee.is_back else None for y in outputs]
        vjp_fn = partial(_recursive_vjp, callee, args)
        add_node(tape, [*results, number], args, {}, [number], vjp_fn, effect=callee.is_back)
    return outputs


def _results_of(opened: _Open, tape: Tape | None) -> list[TensorType]:
    return [*(opened.results or []), *([] if tape is None else [TensorType(i64)])]


@blocks.retry_blocks
def _record_and_call(opened: _Open, args: Tensors, run: _Run) -> Tensors:
    """Record a function, and call it.

    If the function calls itself before the results are known, the result types of a different
    branch are used, and the function is recorded a second time.
    """
    record, tape, around = blocks.recorder(), taping(), current().functions
    before = len(record.scopes.callees)
    for _ in range(2):
        del record.scopes.callees[before:]
        opened.is_guess = False
        start = 0 if tape is None else len(tape.nodes)
        try:
            with context(functions=(*around, opened)):
                _record_function(start, opened, args, run)
        except blocks.UnknownResults:
            if tape is not None:
                del tape.nodes[start:]
            if opened.is_guess and not any(each.is_guess for each in around):
                raise CaptureError(
                    f"{opened.name} calls itself unconditionally, so its result types are "
                    f"unknown; end the recursion in a branch of ml.cond"
                ) from None
            raise
        if not opened.is_guess:
            break
    results = _results_of(opened, tape)
    if not around:
        procedures = [opened.procedure, *record.scopes.callees]
        record.scopes.callees.clear()
        return record.call_from_outside(procedures, results, args)
    record.scopes.callees.append(opened.procedure)
    return record.call(opened.procedure, results, args)


def _record_function(start: int, opened: _Open, args: Tensors, run: _Run) -> None:
    record, tape = blocks.recorder(), taping()
    procedure = opened.procedure = Procedure(opened.name, Block())
    with record.function(procedure):
        places = [record.parameter(x.type) for x in args]
        with context(tape=None):
            params = [untracked(x) for x in places]
        if tape is not None:
            are_tracked = [x.dtype.is_inexact or opened.is_back for x in params]
            params = blocks.watch_tracked(tape, params, are_tracked)
        tree = run(blocks.aliases(params))
        outputs = tensors(tree)
        results = list(outputs)
        with context(tape=None):
            if tape is not None:
                segment = blocks.Segment(record, tape, start, outputs, places)
                residuals = [x for x in params if segment.needs(x)] + segment.inside
                results.append(record.push(residuals))
                opened.vjp = _FunctionVjp(segment, params, outputs, residuals, set(), [])
            outs = [record.parameter(y.type) for y in results]
            blocks.write(outs, results)
        procedure.params = [record.home_of(x) for x in (*outs, *places)]
    opened.tree, opened.results = tree, [y.type for y in outputs]


def _vjp(
    vjp: _FunctionVjp,
    name: str,
    nargs: int,
    own: Sequence[tuple[blocks.Cell, Any]],
    gs: Cotangents,
    saved: Saved,
    sums: Sums,
) -> Sums:
    """Return the cotangents of the arguments, the cells' earlier contents and the closures.

    `own` lists the cells that the function owns.
    """
    record, segment = blocks.recorder(), vjp.segment
    number, *outside = saved
    _, [of_number], of_totals = blocks.split(gs, len(vjp.outputs), 1)
    for (cell, _), g in zip(own, of_totals, strict=True):
        cell.cotangent = None if g is None else blocks.as_shared_cell(record, g)
    sums = [Conditional.cleaned(h) if isinstance(h, Conditional) else h for h in sums]
    cells = [
        h if isinstance(h, blocks.Cell) else blocks.new_cell(record, or_zeros(h, type))
        for h, type in zip(sums, segment.closures.values(), strict=True)
    ]
    tracked_residuals = vjp.tracked(vjp.residuals)
    outputs, params = vjp.tracked(vjp.outputs), vjp.tracked(vjp.params)
    opened = _Open(
        vjp,
        f"{name}_back",
        [x.type for _, x in params],
        is_back=True,
        takes_record=of_number is not None,
    )

    def run(args: Tensors) -> Tensors:
        parts, [number], record_g = blocks.split(args, len(outputs), 1)
        are_tracked = [x.tape is segment.tape for x in vjp.residuals]
        types = [x.root.type for x in vjp.residuals]
        now = records.pull(number, types, are_tracked, vjp.used, segment.stack)
        inside = {segment.key(x): y for x, y in zip(vjp.residuals, now, strict=True)}
        pending = CotangentAccumulator()
        pending.update(zip(segment.closures, cells, strict=True))
        seed(pending, segment.tape, [y for _, y in outputs], parts)
        residual_gs = [
            g
            for each in record_g
            for g in records.pull_cotangents(each, [x.type for _, x in tracked_residuals])
        ]
        for (k, x), g in zip(tracked_residuals, residual_gs, strict=False):
            seed(pending, segment.tape, [x], [g if k in vjp.used else None])
        segment.walk(pending, inside, outside)
        return [or_zeros(pending.get(x.node), x.type) for _, x in params]

    vjp.open_backward.append(opened)
    try:
        results = _call_new(opened, _vjp_operands(vjp, opened, gs, number), run, cells, sums)
    finally:
        vjp.open_backward.clear()
    of_params, totals = blocks.split(results, len(params))
    parts: list[Any] = [None] * nargs
    for (k, _), g in zip(params, of_params, strict=True):
        parts[k] = g
    rest = iter(totals)
    ends = [h if isinstance(h, blocks.Cell) else next(rest) for h in sums]
    of_before = [g for (_, h), g in zip(own, of_totals, strict=True) if h is not None]
    return [*parts, *of_before, *ends]


def _recursive_vjp(callee: _Open, args: Tensors, gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
    """Return the cotangents of the arguments of a recursive call."""
    vjp = callee.vjp
    if vjp is None or not vjp.open_backward:
        raise GradientError(
            f"{callee.name} differentiates itself, which capture does not support; call it eagerly"
        )
    [backward] = vjp.open_backward
    results = _call_again(backward, _vjp_operands(vjp, backward, gs, saved[0]))
    parts: list[Tensor | None] = [None] * len(args)
    for (k, _), g in zip(vjp.tracked(vjp.params), results, strict=True):
        parts[k] = g
    return parts


def _vjp_operands(vjp: _FunctionVjp, backward: _Open, gs: Cotangents, number: Tensor) -> Tensors:
    """Return the operands of a backward pass.

    These are the cotangents of the tracked outputs, the number of the record and, if needed, the
    number of the record of cotangents.
    """
    operands = [or_zeros(gs[k], y.type) for k, y in vjp.tracked(vjp.outputs)]
    record_g = [or_zeros(gs[len(vjp.outputs)], number.type)] if backward.takes_record else []
    return [*operands, number, *record_g]


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
