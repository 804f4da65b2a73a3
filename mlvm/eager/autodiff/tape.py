"""Tape of reverse-mode differentiation: a list of nodes that is processed in reverse order.

While a tape records, every call on a tensor that depends on a watched tensor adds a node. A node
contains the vjps to apply, the nodes that receive the cotangents of the operands, and the saved
values that the vjps need. The backward pass visits each node once, without recursion, and deletes
it. Vjps are ordinary eager code: an outer tape records them, so gradients can be nested to any
order. Each thread has a separate tape.

The method and its terms: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, TypeAlias

from mlvm.arena.arena import view_logs
from mlvm.arena.context import current
from mlvm.core.errors import GradientError
from mlvm.core.op import Op
from mlvm.core.types import DType, TensorType, interned_type
from mlvm.eager.autodiff.op_rules import Rule, Sparse, dense
from mlvm.eager.autodiff.rules import VJPS
from mlvm.eager.functions.random import with_keys
from mlvm.eager.functions.sums import sum_to
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import (
    OneOp,
    Tensors,
    Types,
    alias_in_python,
    alias_of,
    apply_in_python,
    launch,
    plan_for,
    raise_stale,
)
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.constants import is_constant
from mlvm.eager.tensor.context import default_arena, own_arenas
from mlvm.eager.tensor.template_kernels import chains_of
from mlvm.eager.tensor.templates import call
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into_in_python, live_tapes
from mlvm.machines.native.extension import install

RESULT: Final = -1
_WORTH_UPDATING: Final = 32768
"""Size in bytes; below this, copying a tensor is cheaper than launching an update in place."""


class OperandVjp(NamedTuple):
    """Vjp for one operand: the operand's cotangent is `rule(g, *saved[needs])`.

    type: the operand's type, which is the type of the cotangent.
    is_reused: whether later nodes have the same rule object, which is therefore called by a
    template.
    """

    type: TensorType
    rule: Rule
    needs: tuple[int, ...]
    is_reused: bool = False


class Template(NamedTuple):
    """Node template of a call for one set of tracked operands.

    tracked: the positions of these operands. vjps: one per tracked operand. saves: positions of the
    operands that the vjps need; -1 is the result.
    """

    tracked: tuple[int, ...]
    vjps: tuple[OperandVjp, ...]
    saves: tuple[int, ...]


_NOTHING: Final = Template((), (), ())
_NO_KEYWORDS: Final[dict[str, Any]] = {}


@dataclass(frozen=True, eq=False)
class MultiOutputVjp:
    """Vjp of a call with several results, such as a loop, for all operands together.

    Attributes:
        types: the operand types.
        apply: `apply(g, saved, sums)` returns the new sum of each operand's cotangents.
        effect: True if the call changed shared state. In blocks the backward pass then visits the
        node even if no result has a cotangent.
    """

    types: Sequence[TensorType]
    apply: Callable[[Any, Sequence[Tensor], Sequence[Any]], Sequence[Any]]
    effect: bool = False


Node: TypeAlias = tuple[
    tuple[OperandVjp, ...] | MultiOutputVjp, tuple[int, ...], tuple[Tensor, ...]
]
"""Tape node: vjps, the numbers of the nodes that receive cotangents, and saved values."""


def has_effect(node: Node) -> bool:
    """Return whether a node has an effect (see `MultiOutputVjp`)."""
    return isinstance(node[0], MultiOutputVjp) and node[0].effect


class Tracked(NamedTuple):
    """Tape entry of a tensor, which may be updated afterwards."""

    type: TensorType
    tape: object
    node: int


class Conditional:
    """Cotangent that exists only where a condition holds; elsewhere the value is undefined.

    Captured branches and loops produce such cotangents. In eager code None corresponds to an absent
    cotangent.

    x: the value. present: the condition, a bool[]; for the stack of a loop, one bool per row.
    is_clean: True if x is zero where the condition does not hold.
    """

    __slots__ = ("is_clean", "present", "type", "x")

    added: ClassVar[Callable[[Any, Any], Any]]
    """Add cotangents, at least one of which is conditional; `control.branches` assigns this
    function."""
    cleaned: ClassVar[Callable[[Conditional], Tensor]]
    """Return the value, with zeros where absent; `control.branches` assigns this function."""

    def __init__(self, x: Any, present: Tensor, *, is_clean: bool = False) -> None:
        self.x, self.present, self.is_clean = x, present, is_clean
        self.type: TensorType = x.type

    def through(self, rule: Rule, saved: Sequence[Tensor], total: Any) -> Any:
        """Apply a vjp's rule to the value; only a part for a total may be `Sparse`."""
        part = rule(self.x, *saved)
        if not isinstance(part, (Tensor, Sparse)):
            # one of several results: the common node receives the cotangent
            return rule(self)
        if self.present.shape:  # the result and the part have different rows
            return rule(Conditional.cleaned(self), *saved)
        return Conditional(dense(part) if total is None else part, self.present)


class Begun(Conditional):
    """Partial sum of cotangents over the iterations of a loop, possibly of no iteration yet.

    x is always valid: it is zeros if there was no cotangent. Another cotangent is added to it as to
    an absent one. A branch or an inner loop that adds to it only in some cases therefore leaves it
    `Begun`. If a sum is still `Begun` at the end of an iteration, the loop is recorded again, with
    a condition.
    """

    __slots__ = ()

    def at(self, x: Tensor) -> Begun:
        """Return a later value of the sum."""
        return Begun(x, self.present, is_clean=True)


def added(total: Any, part: Any) -> Any:
    """Add two cotangents, or add an update of some elements to a cotangent."""
    if isinstance(total, Conditional) or isinstance(part, Conditional):
        return Conditional.added(total, part)
    if isinstance(part, Sparse) and isinstance(total, Tensor):
        return part.added(total, *part.operands)
    return total + part


class CotangentAccumulator(dict[int, Any]):
    """Cotangents of the backward pass, by the number of the node that receives them."""

    __slots__ = ("_owned", "_recorded")

    def __init__(self) -> None:
        self._owned: set[int] = set()  # cotangents to which only this accumulator refers
        self._recorded = current().tape is not None

    def apply_vjps(self, node: Node, g: Any, targets: Container[int] | None = None) -> None:
        """Accumulate the cotangents of a node's operands, or only of the `targets`."""
        vjps, origins, saved = node
        if not isinstance(vjps, tuple):
            sums = vjps.apply(g, saved, [self.get(origin) for origin in origins])
            for origin, total in zip(origins, sums, strict=True):
                if total is not None:
                    self[origin] = total
                    self._owned.discard(origin)
            return
        is_conditional = isinstance(g, Conditional)
        for i, (type, rule, needs, is_reused) in enumerate(vjps):  # a strict zip would be slower
            origin = origins[i]
            if targets is not None and origin not in targets:
                continue
            total = self.get(origin)
            part: Any
            if is_conditional:
                part = g.through(rule, [saved[k] for k in needs], total)
            elif is_reused:
                part = call(rule, (g, *[saved[k] for k in needs]), _NO_KEYWORDS)
            else:
                part = rule(g, *[saved[k] for k in needs])
            if part.type is not type:
                part = sum_to(part, type)
            is_sparse = isinstance(part, Sparse)
            if total is None:
                self[origin] = dense(part) if is_sparse else part
            elif (
                is_sparse
                and not self._recorded
                and origin in self._owned
                and isinstance(total, Tensor)
                and total.type.nbytes >= _WORTH_UPDATING
            ):  # an outer tape, which has no node for the update, would reject it
                part.add_to(total)
            else:
                self[origin] = added(total, part)
            if is_sparse or total is not None:
                self._owned.add(origin)
            del part, total

    @NO_AUTOCAST
    def walk(
        self,
        nodes: Sequence[Node | None],
        start: int,
        now: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """Run the backward pass over nodes that are numbered from `start`.

        `now` maps saved values to current values.
        """
        for number, node in reversed([*enumerate(nodes, start)]):
            if node is None:
                continue
            g = self.pop(number, {} if has_effect(node) else None)
            if g is not None:
                vjps, origins, saved = node
                self.apply_vjps((vjps, origins, tuple([now(x) for x in saved])), g)

    def share(self, g: Tensor) -> bool:
        """Return whether a cotangent is stored in the memory of g."""
        root = g.root
        return any(isinstance(other, Tensor) and other.root is root for other in self.values())


class Tape:
    """Tape: the recorded nodes, in order.

    Attributes:
        nodes: the `node` of a tracked tensor is an index into this list. The entry of a watched
            tensor is None.
        saved_roots: ids of the roots of all saved values.
        within: the recorder whose launches the tape differentiates.
        sessions: the number of differentiations that share the tape.
        read_at: the first line that reads values of a tracked tensor.
        has_lost: whether a call on a tracked tensor had a result without a gradient, such as a
        comparison, and no value of the result has been read since.
    """

    def __init__(self) -> None:
        self.within: object = current().recorder
        self.nodes: list[Node | None] = []
        self.saved_roots: set[int] = set()
        self.sessions = 0
        self.read_at: str | None = None
        self.has_lost = False
        live_tapes.add(self)

    def watch(self, x: Tensor) -> Tensor:
        """Return an alias of x that is tracked from now on."""
        variable = alias_of(x)
        if variable.tape is not self:
            variable.tape, variable.node = self, len(self.nodes)
            self.nodes.append(None)
        return variable

    def record(self, call: OneOp, operands: Tensors, types: Types, out: Tensor) -> None:
        """Add a node for a call if an operand is tracked and the result is inexact.

        If the call has overwritten an operand with `out`, the operand's node refers to the old
        value.
        """
        mask = tuple([x.tape is self for x in operands])
        tracked, vjps, saves = self.template(call, types, out.type, mask)
        origins = tuple([operands[i].node for i in tracked])
        out.tape = None
        if tracked:
            saved = tuple([out if i == RESULT else operands[i] for i in saves])
            self.add_node(out, vjps, origins, saved)
        elif True in mask:
            self.has_lost = True

    def needs_operand(self, call: OneOp, operands: Tensors, types: Types, out: Tensor) -> bool:
        """Return whether the node of a call would save an operand that `out` overwrites."""
        mask = tuple([x.tape is self for x in operands])
        saves = self.template(call, types, out.type, mask).saves
        return any(i != RESULT and operands[i].root is out.root for i in saves)

    def template(
        self, call: OneOp, types: Types, out: TensorType, mask: tuple[bool, ...]
    ) -> Template:
        """Return the node template of a call for the tracked operands in the mask."""
        template = call.templates.get((types, mask))
        if template is None:
            template = template_of(call, types, out, mask)
            if not (out.is_open or any(type.is_open for type in types)):
                call.templates[types, mask] = template
        return template

    def add_node(
        self, out: Tensor, vjps: tuple[OperandVjp, ...], origins: tuple[int, ...], saved: Tensors
    ) -> None:
        """Add a node for the result `out`, with a vjp for each node of `origins`."""
        out.tape = self
        out.node = len(self.nodes)
        for y in saved:
            self.saved_roots.add(id(y if y.base is None else y.base))
        self.nodes.append((vjps, origins, saved))

    def keeps(self, x: Tensor, stop: int | None = None) -> bool:
        """Return whether a node before `stop` has saved a value in the memory of x."""
        root = x.root
        if id(root) not in self.saved_roots:
            return False
        nodes = self.nodes[self._first_use(x) : stop]
        return any(y.root is root for node in nodes if node is not None for y in node[2])

    def exchange(self, others: Mapping[int, Tensor], x: Tensor) -> None:
        """Replace saved tensors, by id, after an update: `x` is then the tensor with the old value.

        Another thread may remove nodes meanwhile.
        """
        if self.saved_roots.isdisjoint([*others, id(x.root)]):
            return
        self.saved_roots.update(others)
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
                    nodes[i] = new  # a single assignment is atomic

    def _first_use(self, x: Tensor) -> int:
        """Return a node number such that no earlier node has saved the value of x."""
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
        final: Callable[[int, Tensor | None, CotangentAccumulator], None] | None = None,
    ) -> list[Tensor | None]:
        """Run the backward pass from `outs` with cotangents `seeds` to the `watched` nodes.

        Only nodes from `start` on are visited; they are deleted unless `keep`. A watched tensor on
        which no result depends gets None. `final(number, cotangent, others)` receives each
        cotangent once it is complete, and the accumulator of the remaining cotangents; then the
        result is empty. Raises `GradientError` for an op without a rule, and for deleted nodes.
        """
        pending = CotangentAccumulator()
        for out, seed in zip(outs, seeds, strict=True):
            if out.tape is not self:
                continue
            if out.node >= len(self.nodes):
                raise GradientError(
                    f"cannot differentiate this {out.type}: its tape was deleted when the "
                    f"enclosing gradient finished; differentiate it inside"
                )
            total = pending.get(out.node)
            pending[out.node] = seed if total is None else total + seed
        if not pending:
            if final is not None:
                for number in dict.fromkeys(watched):
                    final(number, None, CotangentAccumulator())
            return [None] * len(watched)

        def whole(g: Any) -> Tensor | None:
            return Conditional.cleaned(g) if isinstance(g, Conditional) else g

        targets = self._dependents(watched, start) if keep else None
        last = {} if final is None else self._last_uses(watched, start)
        nodes, take, apply_vjps = self.nodes, pending.pop, pending.apply_vjps
        for index in range(len(nodes) - 1, start - 1, -1):
            node = nodes[index] if keep else nodes.pop()
            if node is not None and (g := take(index, None)) is not None:
                apply_vjps(node, g, targets)
            if final is not None and index in last:
                for number in last.pop(index):
                    final(number, whole(pending.pop(number, None)), pending)
        if final is not None:
            for number in last.pop(-1):
                final(number, whole(pending.pop(number, None)), pending)
            return []
        return [whole(pending.get(origin)) for origin in watched]

    def _last_uses(self, watched: Sequence[int], start: int) -> dict[int, list[int]]:
        """Group watched nodes by the last node of the backward pass that adds to them, or -1."""
        unused = dict.fromkeys(watched)
        last: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes[start:], start):
            for origin in () if node is None else node[1]:
                if origin in unused:
                    del unused[origin]
                    last.setdefault(index, []).append(origin)
        last[-1] = list(unused)
        return last

    def _dependents(self, watched: Sequence[int], start: int) -> set[int]:
        """Return the watched nodes and all nodes from `start` on that depend on them."""
        dependents = set(watched)
        for index, node in enumerate(self.nodes[start:], start):
            if node is not None and not dependents.isdisjoint(node[1]):
                dependents.add(index)
        return dependents


install(  # used by calls in C: see native/src/language/dispatch.c
    class_of_tensors=Tensor,
    class_of_tapes=Tape,
    slow_apply=apply_in_python,
    slow_update=apply_into_in_python,
    slow_launch=launch,
    slow_alias=alias_in_python,
    get_context=current,
    own_arenas=own_arenas,
    default_arena=default_arena,
    resolve=plan_for,
    raise_stale=raise_stale,
    weak_reference=weakref.ref,
    view_logs=view_logs,
    live_tapes=live_tapes,
    make_type=interned_type,
    is_constant=is_constant,
    dtype_class=DType,
    with_keys=with_keys,
    find_rows=chains_of,
)


def taping() -> Tape | None:
    """Return the current tape of this thread or task."""
    tape = current().tape
    return tape if isinstance(tape, Tape) else None


def count_derivative() -> None:
    """Count a differentiation in the current tape and in the tapes around the current trace."""
    recorder = current().recorder
    for tape in {taping(), *(() if recorder is None else recorder.outer)} - {None}:
        tape.sessions += 1


def template_of(call: OneOp, types: Types, out: TensorType, mask: tuple[bool, ...]) -> Template:
    """Return the node template of a call for the operands in the mask.

    The rules are bound to all arguments except values. A result that is not inexact has no
    node. For a complex result, the rule of a holomorphic op is conjugated: conj(rule(conj(g))).
    """
    if not out.dtype.is_inexact:
        return _NOTHING
    tracked = tuple(i for i, is_tracked in enumerate(mask) if is_tracked)
    saves: list[int] = []
    vjps = []
    for position in tracked:
        name = operand_name(call.op, position)
        rule = VJPS[call.op.name].get(name) or refusal(call, types, name)
        bare, values = bound_rule(call, types, rule, position)
        saves += [value for value in values if value not in saves]
        if out.dtype.kind == "complex" and call.op.traits.is_holomorphic:
            bare = partial(_conjugated, bare)
        needs = tuple([saves.index(value) for value in values])
        rule = partial(_of_type, types[position], bare)
        vjps.append(OperandVjp(types[position], rule, needs, is_reused=True))
    return Template(tracked, tuple(vjps), tuple(saves))


def operand_name(op: Op, position: int) -> str:
    """Return the name of an operand; additional operands share the last name."""
    return op.inputs[min(position, len(op.inputs) - 1)]


def bound_rule(call: OneOp, types: Types, rule: Rule, position: int) -> tuple[Rule, list[int]]:
    """Bind a rule to all arguments except values.

    Also return the positions of these values: operands, or -1 for the result.
    """
    inputs = call.op.inputs
    arguments: dict[str, Any] = {
        **call.attributes,
        **{f"{name}_type": type for name, type in zip(inputs, types, strict=False)},
        "attributes": call.attributes,
        "types": types,
        "position": position,
    }
    names = list(inspect.signature(rule).parameters)[1:]
    bound = {name: arguments[name] for name in names if name in arguments}
    values = [
        RESULT if name == "out" else inputs.index(name) for name in names if name not in bound
    ]
    return (partial(rule, **bound) if bound else rule), values


def _of_type(type: TensorType, rule: Rule, g: Tensor, *saved: Tensor) -> Tensor | Sparse:
    """Apply a rule, and reverse the broadcasting and promotion of the operand."""
    part = rule(g, *saved)
    return part if isinstance(part, Sparse) or part.type is type else sum_to(part, type)


def _conjugated(rule: Callable[..., Any], g: Tensor, *saved: Tensor) -> Tensor:
    return op.conj(rule(op.conj(g), *saved))


def refusal(call: OneOp, types: Types, operand: str) -> Rule:
    """Return a rule that raises `GradientError`, for an operand without a gradient."""
    return partial(_refuse, call.op.name, types, operand)


def _refuse(name: str, types: Types, operand: str, g: Tensor) -> NoReturn:
    raise GradientError(
        f"{name}({', '.join(map(str, types))}) has no gradient for {operand}; "
        f"use stop_gradient(x) for a constant"
    )
