"""The tape of reverse-mode differentiation: what ran, in order, to be walked backwards.

While a tape is on, every call on a tensor that depends on a watched one leaves a node. The node
has the rules to apply, the nodes that the operands' cotangents go to, and only those values that
the rules name. On the way back each node is visited once, without recursion, and dropped. Rules
are ordinary eager code: an outer tape records them, and gradients nest to any order. Each thread
has a tape of its own.

The method and its terms: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from mlvm.arena.arena import scope
from mlvm.core.errors import GradientError
from mlvm.core.op import Op
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.rows import Rule, Sparse
from mlvm.eager.autodiff.rules import HOLOMORPHIC, VJPS
from mlvm.eager.functions.sums import sum_to
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import (
    OneOp,
    Tensors,
    Types,
    alias_of,
    apply,
    apply_in_python,
    plan_for,
    raise_stale,
)
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.context import current_capture, current_tape, default_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes, overwrite
from mlvm.machines.native.extension import EXTENSION

RESULT: Final = -1
_WORTH_UPDATING: Final = 32768
"""Bytes; fewer are copied sooner than an update in place, in Python, is launched."""


class Pull(NamedTuple):
    """How one operand's cotangent comes from the result's: `rule(g, *saved[needs])`.

    `type` is the operand's. Broadcasting and promotion are reversed after the rule.
    """

    type: TensorType
    rule: Rule
    needs: tuple[int, ...]


class Template(NamedTuple):
    """The node that a call leaves for one set of tracked operands: their numbers, a pull for
    each, and the numbers of the operands that the pulls need (-1 for the result)."""

    tracked: tuple[int, ...]
    pulls: tuple[Pull, ...]
    saves: tuple[int, ...]


_NOTHING: Final = Template((), (), ())


@dataclass(frozen=True, eq=False)
class Joint:
    """The pulls of a call with several results, such as a loop, all at once: to operands of these
    types. `pull(g, saved, held)` makes each operand's cotangent, if so much is `held` before. One
    with an `effect` has changed what others share: in blocks a way back goes through it even where
    no cotangent of its results is there."""

    types: Sequence[TensorType]
    pull: Callable[[Any, Sequence[Tensor], Sequence[Any]], Sequence[Any]]
    effect: bool = False


Node: TypeAlias = tuple[tuple[Pull, ...] | Joint, tuple[int, ...], tuple[Tensor, ...]]
"""What a call leaves: its pulls, for each the number of the node that its cotangent goes to, and
the saved values."""


def has_effect(node: Node) -> bool:
    """See `Joint`."""
    return isinstance(node[0], Joint) and node[0].effect


class Tracked(NamedTuple):
    """What a tape knows of a tensor, which may be updated afterwards."""

    type: TensorType
    tape: object
    node: int


class Pending(dict[int, Any]):
    """Cotangents on their way back, by the number of the node they go to."""

    __slots__ = ("_owned", "_recorded")

    def __init__(self) -> None:
        self._owned: set[int] = set()  # those that were made here: nobody else has them
        self._recorded = current_tape.get() is not None

    def go_back(self, node: Node, g: Any, wanted: Container[int] | None = None) -> None:
        """Pull the cotangent of a node's result to its operands, or to those `wanted` of them."""
        pulls, origins, saved = node
        if not isinstance(pulls, tuple):
            totals = pulls.pull(g, saved, [self.get(origin) for origin in origins])
            for origin, total in zip(origins, totals, strict=True):
                if total is not None:
                    self[origin] = total
                    self._owned.discard(origin)
            return
        for (type, rule, needs), origin in zip(pulls, origins, strict=True):
            if wanted is not None and origin not in wanted:
                continue
            part = rule(g, *map(saved.__getitem__, needs))
            held = self.get(origin)
            if isinstance(part, Sparse):
                if held is None:
                    self[origin] = apply(part.alone, *part.operands)
                elif not isinstance(held, Tensor):
                    self[origin] = held + part
                elif self._recorded or origin not in self._owned or held.nbytes < _WORTH_UPDATING:
                    self[origin] = apply(part.added, held, *part.operands)
                else:  # which an outer tape, that has no node for it, would refuse
                    overwrite(held, part.added, held, *part.operands)
                self._owned.add(origin)
            else:
                if part.type is not type:
                    part = sum_to(part, type)
                if held is None:
                    self[origin] = part
                else:
                    self[origin] = held + part
                    self._owned.add(origin)
            del part, held

    @NO_AUTOCAST
    def walk(
        self,
        nodes: Sequence[Node | None],
        start: int,
        now: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """Go back through nodes that begin with the number `start`. `now` is what stands for a
        saved value."""
        for number, node in reversed([*enumerate(nodes, start)]):
            if node is None:
                continue
            g = self.pop(number, {} if has_effect(node) else None)
            if g is not None:
                pulls, origins, saved = node
                self.go_back((pulls, origins, tuple([now(x) for x in saved])), g)

    def share(self, g: Tensor) -> bool:
        """Whether one of the cotangents lies in the memory of g."""
        root = g.root
        return any(isinstance(other, Tensor) and other.root is root for other in self.values())


class Tape:
    """What ran, in order. A tracked tensor's `node` is a number in `nodes`; a watched tensor's
    entry there is None. `kept` are the ids of the roots of all values saved so far. `within` is the
    recorder that was on when the tape was made: it differentiates what that records."""

    def __init__(self) -> None:
        self.within: object = current_capture.get()
        self.nodes: list[Node | None] = []
        self.kept: set[int] = set()
        self.sessions = 0  # differentiations that share the tape, so far
        live_tapes.add(self)

    def watch(self, x: Tensor) -> Tensor:
        """Another tensor over the bytes of x, which is tracked from here on."""
        variable = alias_of(x)
        if variable.tape is not self:
            variable.tape, variable.node = self, len(self.nodes)
            self.nodes.append(None)
        return variable

    def record(self, call: OneOp, operands: Tensors, types: Types, out: Tensor) -> None:
        """Leave a node for a call, if any operand is tracked and the result is a float, or complex.
        The call may have written over `out`, an operand, whose node was that of its old value."""
        tracked, pulls, saves = self._template(call, operands, types, out)
        origins = tuple([operands[i].node for i in tracked])
        out.tape = None
        if tracked:
            saved = tuple([out if i == RESULT else operands[i] for i in saves])
            self.leave(out, pulls, origins, saved)

    def needs_operand(self, call: OneOp, operands: Tensors, types: Types, out: Tensor) -> bool:
        """Whether the node of a call would keep an operand over whose bytes `out` is written."""
        saves = self._template(call, operands, types, out).saves
        return any(i != RESULT and operands[i].root is out.root for i in saves)

    def _template(self, call: OneOp, operands: Tensors, types: Types, out: Tensor) -> Template:
        mask = tuple([x.tape is self for x in operands])
        template = call.templates.get((types, mask))
        if template is None:
            template = call.templates[types, mask] = template_of(call, types, out.type, mask)
        return template

    def leave(
        self, out: Tensor, pulls: tuple[Pull, ...], origins: tuple[int, ...], saved: Tensors
    ) -> None:
        """Make a node for the result `out`, with a pull for each node of `origins`, and the values
        that the pulls need."""
        out.tape = self
        out.node = len(self.nodes)
        for y in saved:
            self.kept.add(id(y if y.base is None else y.base))
        self.nodes.append((pulls, origins, saved))

    def keeps(self, x: Tensor, stop: int | None = None) -> bool:
        """Whether a value that a node, one before `stop`, has saved lies in the memory of x."""
        root = x.root
        if id(root) not in self.kept:
            return False
        nodes = self.nodes[self._first_use(x) : stop]
        return any(y.root is root for node in nodes if node is not None for y in node[2])

    def exchange(self, others: Mapping[int, Tensor], x: Tensor) -> None:
        """Let nodes have saved other objects in place of those with these ids: after an update `x`
        has the old value. Another thread may take nodes off meanwhile."""
        if self.kept.isdisjoint([*others, id(x.root)]):
            return
        self.kept.update(others)
        nodes = self.nodes
        for i in range(self._first_use(x), len(nodes)):
            try:
                node = nodes[i]
            except IndexError:
                break
            if node is not None and not others.keys().isdisjoint(map(id, node[2])):
                saved = tuple([others.get(id(y), y) for y in node[2]])
                new = (node[0], node[1], saved)
                if i < len(nodes) and nodes[i] is node:
                    nodes[i] = new  # at once

    def _first_use(self, x: Tensor) -> int:
        """A node before which none has saved the value of x."""
        return x.node if x.tape is self else 0

    @NO_AUTOCAST
    def cotangents(
        self,
        outs: Sequence[Tensor | Tracked],
        seeds: Sequence[Tensor],
        watched: Sequence[int],
        start: int,
        *,
        keep: bool,
        final: Callable[[int, Tensor | None, Pending], None] | None = None,
    ) -> list[Tensor | None]:
        """Walk back from results with their cotangents, `seeds`, to the nodes numbered `watched`.

        Only nodes from `start` on are visited; they are dropped on the way unless `keep`.
        A watched tensor that no result depends on gets None. `final(number, cotangent, others)`
        takes each cotangent as soon as nothing will be added to it, beside all others that are
        on their way; nothing is returned then. Raises `GradientError` for a
        node whose op has no rule, and when the nodes have been dropped already.
        """
        pending = Pending()
        for out, seed in zip(outs, seeds, strict=True):
            if out.tape is not self:
                continue
            if out.node >= len(self.nodes):
                raise GradientError(
                    f"what led to this {out.type} was dropped when the gradient around it was taken"
                )
            held = pending.get(out.node)
            pending[out.node] = seed if held is None else held + seed
        if not pending:
            if final is not None:
                for number in dict.fromkeys(watched):
                    final(number, None, Pending())
            return [None] * len(watched)
        wanted = self._dependents(watched, start) if keep else None
        last = {} if final is None else self._last_uses(watched, start)
        for index in range(len(self.nodes) - 1, start - 1, -1):
            node = self.nodes[index] if keep else self.nodes.pop()
            if node is not None and (g := pending.pop(index, None)) is not None:
                pending.go_back(node, g, wanted)
            if final is not None and index in last:
                for number in last.pop(index):
                    final(number, pending.pop(number, None), pending)
        if final is not None:
            for number in last.pop(-1):
                final(number, pending.pop(number, None), pending)
            return []
        return [pending.get(origin) for origin in watched]

    def _last_uses(self, watched: Sequence[int], start: int) -> dict[int, list[int]]:
        """By the node that is the last on the way back to add to them: the watched nodes. Those
        that no node adds to are under -1."""
        left = dict.fromkeys(watched)
        found: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes[start:], start):
            for origin in () if node is None else node[1]:
                if origin in left:
                    del left[origin]
                    found.setdefault(index, []).append(origin)
        found[-1] = list(left)
        return found

    def _dependents(self, watched: Sequence[int], start: int) -> set[int]:
        """The watched nodes, and those from `start` on that depend on them."""
        found = set(watched)
        for index, node in enumerate(self.nodes[start:], start):
            if node is not None and not found.isdisjoint(node[1]):
                found.add(index)
        return found


if EXTENSION is not None:  # what calls in C need: see native/src/language/dispatch.c
    EXTENSION.install(
        tensor=Tensor,
        tape=Tape,
        apply=apply_in_python,
        scope=scope.get,
        current_tape=current_tape.get,
        default_arena=default_arena,
        resolve=plan_for,
        stale=raise_stale,
        reference=weakref.ref,
    )


def taping() -> Tape | None:
    """The tape that is on, for this thread or task."""
    tape = current_tape.get()
    return tape if isinstance(tape, Tape) else None


def template_of(call: OneOp, types: Types, out: TensorType, mask: tuple[bool, ...]) -> Template:
    """Look up the rules of a call for the operands in the mask, and bind all that they take except
    values. A result that is neither float nor complex leaves no node.

    Where the result is complex, the rule of a holomorphic op is conjugated: that of g is the
    conjugate of what the rule makes of g's conjugate."""
    if not out.dtype.is_inexact:
        return _NOTHING
    tracked = tuple(i for i, is_tracked in enumerate(mask) if is_tracked)
    saves: list[int] = []
    pulls = []
    for position in tracked:
        name = operand_name(call.op, position)
        rule = VJPS[call.op.name].get(name) or refusal(call, types, name)
        bare, values = bound_rule(call, types, rule, position)
        saves += [value for value in values if value not in saves]
        if out.dtype.kind == "complex" and call.op.name in HOLOMORPHIC:
            bare = partial(_conjugated, bare)
        needs = tuple([saves.index(value) for value in values])
        pulls.append(Pull(types[position], bare, needs))
    return Template(tracked, tuple(pulls), tuple(saves))


def operand_name(op: Op, position: int) -> str:
    """The name of that operand; the last stands for any number."""
    return op.inputs[min(position, len(op.inputs) - 1)]


def bound_rule(call: OneOp, types: Types, rule: Rule, position: int) -> tuple[Rule, list[int]]:
    """The rule of that operand with all that it takes except values. These are told by the numbers
    of operands, or -1 for the result."""
    inputs = call.op.inputs
    known: dict[str, Any] = {
        **call.attributes,
        **{f"{name}_type": type for name, type in zip(inputs, types, strict=False)},
        "attributes": call.attributes,
        "types": types,
        "position": position,
    }
    asked = list(inspect.signature(rule).parameters)[1:]
    bound = {name: known[name] for name in asked if name in known}
    values = [
        RESULT if name == "out" else inputs.index(name) for name in asked if name not in bound
    ]
    return (partial(rule, **bound) if bound else rule), values


def _conjugated(rule: Callable[..., Any], g: Tensor, *saved: Tensor) -> Tensor:
    return op.conj(rule(op.conj(g), *saved))


def refusal(call: OneOp, types: Types, operand: str) -> Rule:
    """The rule of an operand that has none."""

    def refuse(g: Tensor) -> NoReturn:
        raise GradientError(
            f"{call.op.name}({', '.join(map(str, types))}) has no gradient for {operand}; "
            f"stop_gradient makes a constant of it"
        )

    return refuse
