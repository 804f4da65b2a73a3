"""Checkpointing: recompute functions in the backward pass instead of saving activations.

Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final, NoReturn, ParamSpec, TypeAlias, TypeVar

from mlvm.arena.context import context, current
from mlvm.core.errors import ArgumentError, GradientError, brief
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, closures_of, seed
from mlvm.eager.autodiff.tape import (
    CotangentAccumulator,
    MultiOutputVjp,
    Node,
    Tape,
    has_effect,
    taping,
)
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import halves, random
from mlvm.eager.recording.recorder import current_recorder, entries_kept, recomputing
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.autocast import in_present_precision
from mlvm.eager.tensor.context import lifted, overriding
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import replace

P = ParamSpec("P")
R = TypeVar("R")
Ends: TypeAlias = list[int | None]  # nodes at which a backward pass stops
Reached: TypeAlias = Sequence[tuple[Tensor, int | None]]  # captured tensors with tape nodes


@hinted
def checkpoint(fn: Callable[P, R]) -> Callable[P, R]:
    """Recompute `fn` in the backward pass instead of saving its activations.

    The first run saves only the arguments and the result.

    Arguments:

    - `fn`: a function of any arguments. The tensors in dicts, lists and tuples among the arguments
      are saved. It may also use other tensors, such as weights; these must not be updated in place
      before the gradient is taken.

    `fn` runs twice, so any other side effect happens twice. Random keys are drawn only once. A
    gradient through a tensor that `fn` has created but not returned raises `GradientError`. Raises
    `ArgumentError` if `fn` is not a function.

        >>> ml.grad(lambda x: ml.sum(ml.checkpoint(ml.tanh)(x)))(ml.zeros(2))
        Tensor([1., 1.], f32[2])

    Invalid calls:
        ml.grad(lambda x: ml.checkpoint(leaky)(x) + ml.sum(leaked[-1]))(v)  # GradientError
        ml.checkpoint(v)  # ArgumentError
    """
    if not callable(fn):
        raise ArgumentError(f"expected a function, got {brief(fn)}")

    @wraps(fn)
    def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        tape = taping()
        arguments: Any = args, kwargs
        if tape is None:
            args, kwargs = replace(alias_of, arguments)
            return fn(*args, **kwargs)
        operands: list[Tensor] = []
        replace(operands.append, arguments)
        start, keys, record = len(tape.nodes), list[Tensor](), current_recorder()
        ncalls = 0 if record is None else len(record.calls)
        with random.drawing(keys):
            result, origins = _run(fn, arguments, operands, tape)
        outs = [y for y in tensors(result) if y.tape is tape and y.node >= start]
        closures = closures_of(tape, _live(_from(tape, start, origins), start, outs), start, outs)
        tape.nodes[start:] = [_LEFT] * (len(tape.nodes) - start)
        captured = [] if record is None else _reached(record.read_in_blocks(ncalls), tape, start)
        reached = [(x, x.node if x.tape is tape else None) for x in captured]
        saved = [*operands, *captured, *keys]
        again = partial(_run, in_present_precision(fn), arguments)
        vjp = partial(_vjp, again, tape, start, closures, len(operands), reached)
        add_node(tape, outs, operands, closures, saved, vjp)
        return result  # type: ignore[no-any-return]

    return checkpointed


def _refuse(*_: object) -> NoReturn:
    raise GradientError("cannot use a tensor of a checkpointed function outside of it; return it")


_LEFT: Final[Node] = MultiOutputVjp((), _refuse), (), ()
"""Placeholder for a node that was removed from the tape."""


def _run(
    fn: Callable[..., Any], arguments: Any, operands: Sequence[Tensor], tape: Tape
) -> tuple[Any, Ends]:
    """Call `fn` on aliases of the operands.

    Returns the result, and for each alias the tape node, or None if it is not tracked.
    """
    operands_now = [tape.watch(x) if x.dtype.is_inexact else alias_of(x) for x in operands]
    origins = [x.node if x.tape is tape else None for x in operands_now]  # before `fn` updates them
    rest = iter(operands_now)
    args, kwargs = replace(lambda _: next(rest), arguments)
    return as_tree(fn(*args, **kwargs)), origins


def _from(tape: Tape, start: int, origins: Sequence[int | None]) -> list[Node | None]:
    """Return the tape's nodes from index `start` on, with None where the backward pass stops."""
    nodes = tape.nodes[start:]
    for origin in origins:
        if origin is not None:
            nodes[origin - start] = None
    return nodes


def _live(nodes: Sequence[Node | None], start: int, results: Sequence[Tensor]) -> list[Node | None]:
    """Remove nodes that receive no cotangent from the results.

    A removed node passes on no cotangent, not even zeros. The first node has the number `start`.
    """
    live, live_numbers = list(nodes), {y.node for y in results}
    for number in reversed(range(len(live))):
        node = live[number]
        if node is not None and (start + number in live_numbers or has_effect(node)):
            live_numbers.update(node[1])
        else:
            live[number] = None
    return live


def _reached(roots: Sequence[Tensor], tape: Tape, start: int) -> list[Tensor]:
    """Return the tracked tensors among the roots and the views of roots."""
    views = [x for root in roots for x in root.views() if isinstance(x, Tensor)]
    return [*roots, *[x for x in views if x.tape is tape and x.node < start]]


@contextmanager
def _substituting(reached: Reached, now: Sequence[Tensor], tape: Tape) -> Iterator[dict[int, int]]:
    """Substitute saved values for captured tensors while a function runs again.

    Yields the node of the substitute for each tracked node.
    """
    record = current_recorder()
    if record is None:
        yield {}
        return
    ends: dict[int, int] = {}
    pairs = [(x, y) for (x, _), y in zip(reached, now, strict=True)]
    with entries_kept([x for x, _ in reached]):
        for (x, node), y in zip(reached, now, strict=True):
            if node is not None:
                if node not in ends:
                    ends[node] = tape.watch(y).node
                x.tape, x.node = tape, ends[node]
        with record.substituting([(x, y) for x, y in pairs if x.base is None]):
            yield ends


def _exchange(tape: Tape, start: int, reached: Reached, now: Sequence[Tensor]) -> None:
    """Replace captured tensors by substitutes in the saved values of new nodes."""
    others = {id(x): y for (x, _), y in zip(reached, now, strict=True) if x.base is None}

    def other(x: Tensor) -> Tensor:
        if id(x.root) not in others:
            return x
        y = others[id(x.root)]
        view = y.arena.view(y, x.type, Tensor)
        view.tape, view.node = x.tape, getattr(x, "node", 0)
        return view

    for number, node in enumerate(tape.nodes[start:], start):
        if others and node is not None:
            vjps, origins, saved = node[0], node[1], tuple([other(x) for x in node[2]])
            tape.nodes[number] = vjps, origins, saved
            tape.saved_roots.update(id(x.root) for x in saved)


def _vjp(
    rerun: Callable[..., tuple[Any, Ends]],
    tape: Tape,
    first: int,
    closures: dict[int, TensorType],
    noperands: int,
    reached: Reached,
    cotangents: Cotangents,
    saved: Saved,
    sums: Sums,
) -> Sums:
    """Run the function again, and run the backward pass over the new nodes.

    In the first run the nodes started at the number `first`. Returns the cotangents of the
    operands, then the sums for the closures.
    """
    saved = lifted(tuple(saved))
    length = len(tape.nodes)
    # Nodes of an enclosing function may have been removed from the tape. The new nodes get
    # different numbers.
    tape.nodes += [None] * (first - length)
    start = len(tape.nodes)
    end = noperands + len(reached)
    with (
        overriding(tape, "within", current_recorder()),
        context(tape=tape),
        random.replaying(saved[end:]),
        recomputing(),
        _substituting(reached, saved[noperands:end], tape) as ends,
    ):
        result, origins = rerun(saved[:noperands], tape)
        _exchange(tape, start, reached, saved[noperands:end])
    nodes = _from(tape, start, [*origins, *ends.values()])
    if current().tape is not tape:  # otherwise they are needed for an outer gradient
        del tape.nodes[length:]
    pending = CotangentAccumulator()
    destinations = [ends.get(n, n) for n in closures]
    pending.update((n, h) for n, h in zip(destinations, sums, strict=True) if h is not None)
    outs = [y for y in tensors(result) if y.tape is tape and y.node >= start]
    seed(pending, tape, outs, cotangents)
    pending.walk(nodes, start)
    parts = [None if origin is None else pending.get(origin) for origin in origins]
    return [*parts, *[pending.get(number) for number in destinations]]


halves.checkpoint = checkpoint
