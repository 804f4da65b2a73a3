"""Checkpoints: functions whose intermediate values are not kept for the way back, but made again.

Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from mlvm.core.errors import GradientError
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.joint import Cotangents, Held, Saved, closures_of, leave, seed
from mlvm.eager.autodiff.tape import Joint, Node, Pending, Tape, has_effect, taping
from mlvm.eager.control.state import as_tree, tensors
from mlvm.eager.functions import halves, random
from mlvm.eager.recording.recorder import current_capture, made_again
from mlvm.eager.tensor.apply import alias_of, untracked
from mlvm.eager.tensor.autocast import autocast, autocast_dtype
from mlvm.eager.tensor.context import current_tape, lifted, taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import replace

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(fn: Callable[P, R]) -> Callable[P, R]:
    """A function that computes the same, and under a gradient runs a second time on the way back:
    of the first time only its arguments and its result are kept.

    Tensors in dicts, lists and tuples among its arguments are kept; it may use others, such as
    weights, which must not be updated in place until the gradient is taken. Random keys are drawn
    once. Whatever else the function does, it does twice. A gradient through a tensor that it has
    made and not returned raises `GradientError`.

        >>> ml.grad(lambda x: ml.sum(ml.checkpoint(ml.tanh)(x)))(ml.zeros(2))
        Tensor([1., 1.], f32[2])
    """

    @wraps(fn)
    def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        tape = taping()
        given: Any = args, kwargs
        if tape is None:
            args, kwargs = replace(alias_of, given)
            return fn(*args, **kwargs)
        operands: list[Tensor] = []
        replace(operands.append, given)
        start, keys, record = len(tape.nodes), list[Tensor](), current_capture.get()
        ncalls = 0 if record is None else len(record.calls)
        with random.drawing(keys):
            result, origins = _run(fn, given, operands, tape)
        outs = [y for y in tensors(result) if y.tape is tape and y.node >= start]
        closures = closures_of(tape, _live(_from(tape, start, origins), start, outs), start, outs)
        tape.nodes[start:] = [_LEFT] * (len(tape.nodes) - start)
        reached = [] if record is None else _reached(record.read_in_blocks(ncalls), tape, start)
        inner = {x.node for x in reached if x.tape is tape}
        inside = [x if x.tape is tape and x.node in closures else untracked(x) for x in reached]
        closures = {n: type for n, type in closures.items() if n not in inner}
        noperands = len(operands)
        saved = [*operands, *reached, *keys]
        operands += inside
        again = partial(_run, autocast(autocast_dtype())(fn), given)
        pull = partial(_pull, again, tape, start, closures, noperands, reached)
        leave(tape, outs, operands, closures, saved, pull)
        return result  # type: ignore[no-any-return]

    return checkpointed


def _refuse(*_: object) -> NoReturn:
    raise GradientError(
        "a tensor that a checkpointed function has made is used outside of it; return it"
    )


_LEFT: Final[Node] = Joint((), _refuse), (), ()
"""Stands for a node that has been taken off the tape."""


def _run(
    fn: Callable[..., Any], given: Any, operands: Sequence[Tensor], tape: Tape
) -> tuple[Any, list[int | None]]:
    """What the function makes of other tensors over the same bytes, and the nodes of those of them
    that are tracked."""
    given_now = [tape.watch(x) if x.dtype.is_inexact else alias_of(x) for x in operands]
    origins = [x.node if x.tape is tape else None for x in given_now]  # which it may update
    rest = iter(given_now)
    args, kwargs = replace(lambda _: next(rest), given)
    return as_tree(fn(*args, **kwargs)), origins


def _from(tape: Tape, start: int, origins: Sequence[int | None]) -> list[Node | None]:
    """The tape's nodes from that number on, on a way back that ends at these."""
    nodes = tape.nodes[start:]
    for origin in origins:
        if origin is not None:
            nodes[origin - start] = None
    return nodes


def _live(nodes: Sequence[Node | None], start: int, results: Sequence[Tensor]) -> list[Node | None]:
    """Those of the nodes, which begin with the number `start`, that a way back from the results
    comes to. No cotangent goes to what the others used, not even a zero."""
    live, wanted = list(nodes), {y.node for y in results}
    for number in reversed(range(len(live))):
        node = live[number]
        if node is not None and (start + number in wanted or has_effect(node)):
            wanted.update(node[1])
        else:
            live[number] = None
    return live


def _reached(roots: Sequence[Tensor], tape: Tape, start: int) -> list[Tensor]:
    """These tensors of blocks, and the views of them that are tracked."""
    views = [x for root in roots for x in root.views() if isinstance(x, Tensor)]
    return [*roots, *[x for x in views if x.tape is tape and x.node < start]]


@contextmanager
def _standing_in(
    reached: Sequence[Tensor], now: Sequence[Tensor], tape: Tape
) -> Iterator[list[int | None]]:
    """Inside the block, what a function reaches by itself is what it was when it first ran. It gets
    the nodes of what is tracked."""
    record = current_capture.get()
    if record is None:
        yield []
        return
    known = [(x.tape, getattr(x, "node", 0)) for x in reached]
    pairs = [*zip(reached, now, strict=True)]
    ends = [tape.watch(y).node if x.tape is tape else None for x, y in pairs]
    try:
        for x, end in zip(reached, ends, strict=True):
            x.node = getattr(x, "node", 0) if end is None else end
        with record.standing_in([(x, y) for x, y in pairs if x.base is None]):
            yield ends
    finally:
        for x, (on, node) in zip(reached, known, strict=True):
            x.tape, x.node = on, node


def _exchange(tape: Tape, start: int, reached: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """Let the nodes that a function has left save what has stood in for what it reaches."""
    others = {id(x): y for x, y in zip(reached, now, strict=True) if x.base is None}

    def other(x: Tensor) -> Tensor:
        if id(x.root) not in others:
            return x
        y = others[id(x.root)]
        view = y.arena.view(y, x.type, Tensor)
        view.tape, view.node = x.tape, getattr(x, "node", 0)
        return view

    for number, node in enumerate(tape.nodes[start:], start):
        if others and node is not None:
            pulls, origins, saved = node[0], node[1], tuple([other(x) for x in node[2]])
            tape.nodes[number] = pulls, origins, saved
            tape.kept.update(id(x.root) for x in saved)


def _pull(
    again: Callable[..., tuple[Any, list[int | None]]],
    tape: Tape,
    first: int,
    closures: dict[int, TensorType],
    noperands: int,
    reached: Sequence[Tensor],
    cotangents: Cotangents,
    saved: Saved,
    held: Held,
) -> Held:
    """Run the function again, whose nodes began with the number `first`, and go back through it.
    Returns cotangents of the operands, and what is then held of the closures."""
    saved = lifted(tuple(saved))
    length, within, tape.within = len(tape.nodes), tape.within, current_capture.get()
    # Nodes of a function around it may be off the tape: none of the new ones gets their numbers.
    tape.nodes += [None] * (first - length)
    start = len(tape.nodes)
    end = noperands + len(reached)
    with (
        taped(tape),
        random.replaying(saved[end:]),
        made_again(),
        _standing_in(reached, saved[noperands:end], tape) as ends,
    ):
        try:
            result, origins = again(saved[:noperands], tape)
        finally:
            tape.within = within
        _exchange(tape, start, reached, saved[noperands:end])
    origins += ends
    nodes = _from(tape, start, origins)
    if current_tape.get() is not tape:  # or these are part of what an outer gradient is taken of
        del tape.nodes[length:]
    pending = Pending()
    pending.update((n, h) for n, h in zip(closures, held, strict=True) if h is not None)
    outs = [y for y in tensors(result) if y.tape is tape and y.node >= start]
    seed(pending, tape, outs, cotangents)
    pending.walk(nodes, start)
    parts = [None if origin is None else pending.get(origin) for origin in origins]
    return [*parts, *[pending.get(number) for number in closures]]


halves.checkpoint = checkpoint
