"""Reverse-mode differentiation: a tape of what ran, walked backwards.

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
from functools import partial, wraps
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

from mlvm.arena.arena import scope
from mlvm.core.errors import DTypeError, GradientError
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.rules import HOLOMORPHIC, VJPS, Rule, Sparse
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.sums import sum_to
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, alias_of, apply, apply_in_python, plan_for, raise_stale
from mlvm.eager.tensor.context import capturing, default_arena, recording
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes, overwrite
from mlvm.eager.tree import Copies, Tree, map_to_dicts, named_leaves, rebind_buffers, substitute
from mlvm.machines.native.extension import EXTENSION

_RESULT: Final = -1
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


class Joint(Protocol):
    """The pulls of a call with several results, such as a loop, all at once: to operands of these
    types."""

    types: Sequence[TensorType]

    def __call__(self, g: Any, saved: Sequence[Tensor], held: Sequence[Any]) -> Sequence[Any]:
        """What each operand's cotangent is, if so much is `held` of it before."""


Node: TypeAlias = tuple[tuple[Pull, ...] | Joint, tuple[int, ...], tuple[Tensor, ...]]
"""What a call leaves: its pulls, for each the number of the node that its cotangent goes to, and
the saved values."""


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
        self._recorded = recording.get() is not None

    def go_back(self, node: Node, g: Any, wanted: Container[int] | None = None) -> None:
        """Pull the cotangent of a node's result to its operands, or to those `wanted` of them."""
        pulls, origins, saved = node
        if not isinstance(pulls, tuple):
            totals = pulls(g, saved, [self.get(origin) for origin in origins])
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

    def share(self, g: Tensor) -> bool:
        """Whether one of the cotangents lies in the memory of g."""
        root = g.root
        return any(isinstance(other, Tensor) and other.root is root for other in self.values())


class Collector(Protocol):
    """What takes gradients as soon as each is final, in the order of the way back."""

    def add(self, i: int, g: Tensor) -> None:
        """Take the gradient of variable number i, which has memory of its own."""

    def finish(self) -> tuple[Tensor, Mapping[int, Tensor]]:
        """What has become of the value, and of the gradients by number."""


Collect: TypeAlias = Callable[[Tensor, Sequence[Tree], Sequence[Tensor]], Collector]
"""Makes the collector for a value, arguments, and their variables, each once, in order."""


class Tape:
    """What ran, in order. A tracked tensor's `node` is a number in `nodes`; a watched tensor's
    entry there is None. `kept` are the ids of the roots of all values saved so far. `within` is the
    recorder that was on when it was made: its values are those of a captured function."""

    def __init__(self) -> None:
        self.within: object = capturing.get()
        self.nodes: list[Node | None] = []
        self.kept: set[int] = set()
        live_tapes.add(self)

    def watch(self, x: Tensor) -> Tensor:
        """A twin of x, over the same bytes, that is tracked from here on."""
        twin = alias_of(x)
        if twin.tape is not self:
            twin.tape, twin.node = self, len(self.nodes)
            self.nodes.append(None)
        return twin

    def record(
        self,
        call: OneOp,
        operands: tuple[Tensor, ...],
        types: tuple[TensorType, ...],
        out: Tensor,
    ) -> None:
        """Leave a node for a call, if any operand is tracked and the result is a float, or complex.
        The call may have written over `out`, an operand, whose node was that of its old value."""
        tracked, pulls, saves = self._template(call, operands, types, out)
        origins = tuple([operands[i].node for i in tracked])
        out.tape = None
        if tracked:
            saved = tuple([out if i == _RESULT else operands[i] for i in saves])
            self.leave(out, pulls, origins, saved)

    def needs_operand(
        self,
        call: OneOp,
        operands: tuple[Tensor, ...],
        types: tuple[TensorType, ...],
        out: Tensor,
    ) -> bool:
        """Whether the node of a call would keep an operand over whose bytes `out` is written."""
        saves = self._template(call, operands, types, out).saves
        return any(i != _RESULT and operands[i].root is out.root for i in saves)

    def _template(
        self,
        call: OneOp,
        operands: tuple[Tensor, ...],
        types: tuple[TensorType, ...],
        out: Tensor,
    ) -> Template:
        mask = tuple([x.tape is self for x in operands])
        template = call.templates.get((types, mask))
        if template is None:
            template = call.templates[types, mask] = _template(call, types, out.type, mask)
        return template

    def leave(
        self,
        out: Tensor,
        pulls: tuple[Pull, ...],
        origins: tuple[int, ...],
        saved: tuple[Tensor, ...],
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

    def cotangents(
        self,
        out: Tensor | Tracked,
        seed: Tensor,
        watched: Sequence[int],
        start: int,
        *,
        keep: bool,
        final: Callable[[int, Tensor | None, Pending], None] | None = None,
    ) -> list[Tensor | None]:
        """Walk back from `out` with cotangent `seed` to the nodes numbered `watched`.

        Only nodes from `start` on are visited; they are dropped on the way unless `keep`.
        A watched tensor that `out` does not depend on gets None. `final(number, cotangent, others)`
        takes each cotangent as soon as nothing will be added to it, beside all others that are
        on their way; nothing is returned then. Raises `GradientError` for a
        node whose op has no rule, and when the nodes have been dropped already.
        """
        if out.tape is not self:
            if final is not None:
                for number in dict.fromkeys(watched):
                    final(number, None, Pending())
            return [None] * len(watched)
        if out.node >= len(self.nodes):
            raise GradientError(
                f"what led to this {out.type} was dropped when the gradient around it was taken"
            )
        pending = Pending()
        pending[out.node] = seed
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


if EXTENSION is not None:  # what calls in C need of the language: see language/dispatch.c
    EXTENSION.install(
        tensor=Tensor,
        tape=Tape,
        apply=apply_in_python,
        scope=scope.get,
        recording=recording.get,
        default_arena=default_arena,
        resolve=plan_for,
        stale=raise_stale,
        reference=weakref.ref,
    )


def taping() -> Tape | None:
    """The tape that is on, for this thread or task."""
    tape = recording.get()
    return tape if isinstance(tape, Tape) else None


def _template(
    call: OneOp, types: tuple[TensorType, ...], out: TensorType, mask: tuple[bool, ...]
) -> Template:
    """Look up the rules of a call for the operands in the mask, and bind all that they take except
    values. A result that is neither float nor complex leaves no node.

    Where the result is complex, the rule of a holomorphic op is conjugated: that of g is the
    conjugate of what the rule makes of g's conjugate."""
    if not out.dtype.is_inexact:
        return _NOTHING
    inputs = call.op.inputs
    known: dict[str, Any] = {
        **call.attributes,
        **{f"{name}_type": type for name, type in zip(inputs, types, strict=False)},
        "types": types,
    }
    tracked = tuple(i for i, is_tracked in enumerate(mask) if is_tracked)
    saves: list[int] = []
    pulls = []
    for position in tracked:
        name = inputs[min(position, len(inputs) - 1)]  # the last stands for any number
        rule = VJPS[call.op.name].get(name) or _refusal(call, types, name)
        bound, needs = {}, []
        for parameter in list(inspect.signature(rule).parameters)[1:]:
            if parameter == "position":
                bound[parameter] = position
            elif parameter in known:
                bound[parameter] = known[parameter]
            else:
                value = _RESULT if parameter == "out" else inputs.index(parameter)
                if value not in saves:
                    saves.append(value)
                needs.append(saves.index(value))
        bare = partial(rule, **bound) if bound else rule
        if out.dtype.kind == "complex" and call.op.name in HOLOMORPHIC:
            bare = partial(_conjugated, bare)
        pulls.append(Pull(types[position], bare, tuple(needs)))
    return Template(tracked, tuple(pulls), tuple(saves))


def _conjugated(rule: Callable[..., Any], g: Tensor, *saved: Tensor) -> Tensor:
    return op.conj(rule(op.conj(g), *saved))


def _refusal(call: OneOp, types: tuple[TensorType, ...], operand: str) -> Rule:
    """The rule of an operand that has none."""

    def refuse(g: Tensor) -> NoReturn:
        raise GradientError(
            f"{call.op.name}({', '.join(map(str, types))}) has no gradient for {operand}; "
            f"stop_gradient makes a constant of it"
        )

    return refuse


class _Session:
    """One differentiation: the arguments to call a function with, and the tape it fills.

    The function gets twins of the arguments. So threads may share tensors, an update of one inside
    is none of the caller's, and a tensor that the function reaches in another way is a constant. A
    tensor that occurs twice in one argument is one variable; in two arguments it is two.
    """

    def __init__(self, arguments: Sequence[Tree]) -> None:
        self.outer = taping()
        self.tape = self.outer or Tape()
        for argument in arguments:
            for path, x in named_leaves(argument):
                if not x.dtype.is_inexact:
                    where = f" at {path}" if path else ""
                    raise DTypeError(
                        f"a gradient is with respect to floats and complex numbers, not "
                        f"{x.type}{where}; a constant in a Module is an nn.buffer"
                    )
        self.variables: list[Tensor] = []
        self.origins: list[int] = []  # their nodes, as the function may update them
        self.copies: Copies = []
        self.arguments = [substitute(self._watch, each, self.copies) for each in arguments]
        self.start = len(self.tape.nodes)

    def _watch(self, x: Tensor) -> Tensor:
        twin = self.tape.watch(x)
        self.variables.append(twin)
        self.origins.append(twin.node)
        return twin

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = recording.set(self.tape)
        try:
            result = fn(*args, **kwargs)
        finally:
            recording.reset(before)
        rebind_buffers(self.copies)
        return result

    def pull(self, out: Tensor | Tracked, seed: Tensor, *, keep: bool) -> list[Tree]:
        """The cotangents as trees like the arguments; zeros for what `out` does not depend on.

        Each has memory of its own: an update in place of one must not change another. A variable
        that occurs twice has the same cotangent in both places.
        """
        keep = keep or self.outer is not None
        cotangents = self.tape.cotangents(out, seed, self.origins, self.start, keep=keep)
        taken = {id(seed)}
        made: dict[int, Tensor] = {}
        for x, origin, g in zip(self.variables, self.origins, cotangents, strict=True):
            if origin in made:
                continue
            if g is None:
                g = full(x.shape, 0.0, dtype=x.dtype)
            elif g.base is not None or id(g) in taken:
                g = op.copy(g)
            taken.add(id(g))
            made[origin] = g
        numbers = self._numbers()
        return [map_to_dicts(lambda x: made[numbers[id(x)]], each) for each in self.arguments]

    def _numbers(self) -> dict[int, int]:
        """The nodes of the variables, by their ids."""
        return dict(zip(map(id, self.variables), self.origins, strict=True))

    def pull_into(self, out: Tensor, seed: Tensor, collect: Collect) -> tuple[Tensor, list[Tree]]:
        """The value and what `pull` returns, as the collector makes them."""
        collector = collect(op.copy(out), self.arguments, self.variables)
        numbers = {origin: i for i, origin in reversed([*enumerate(self.origins)])}

        def final(number: int, g: Tensor | None, others: Pending) -> None:
            x = self.variables[numbers[number]]
            if g is None:
                g = full(x.shape, 0.0, dtype=x.dtype)
            elif self.tape.keeps(g) or others.share(g):
                g = op.copy(g)
            collector.add(numbers[number], g if g.base is None else op.copy(g))

        self.tape.cotangents(out, seed, self.origins, self.start, keep=False, final=final)
        value, made = collector.finish()
        nodes = self._numbers()
        return value, [
            map_to_dicts(lambda x: made[numbers[nodes[id(x)]]], each) for each in self.arguments
        ]

    def close(self) -> None:
        """Drop what the tape keeps alive, unless the tape belongs to an outer differentiation."""
        if self.outer is None:
            self.tape.nodes.clear()
            self.tape.kept.clear()
            self.tape.within = None  # what is updated in it may outlive it
            live_tapes.discard(self.tape)

    def __del__(self) -> None:
        self.close()


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns `fn`'s value and its gradient with respect to `argnums`.

    `fn` returns a float tensor of shape (); with `has_aux` a pair of it and anything else,
    which comes back as `((value, aux), gradient)`. The arguments named by `argnums` are trees of
    float or complex tensors; a gradient has its argument's structure, with dicts for Modules, and
    zeros where the value does not depend on a tensor. A tensor that occurs twice in one argument
    is one variable, with one gradient in both places.

    The gradient with respect to a complex z = x + iy is dL/dx + i dL/dy, as in PyTorch: the
    direction of steepest ascent (Kreutz-Delgado, The Complex Gradient Operator and the
    CR-Calculus, 2009).

    All else is a constant: no gradient flows through it, and no error is raised. Constants are the
    tensors that `fn` reaches without these arguments, such as a parameter it closes over, and
    results that are no floats, such as those of a comparison, `argmax`, or a cast to integers, even
    if it is cast back. Ops with float results that are constant in pieces (`floor`, `round`,
    `sign`, ...) have no gradient; `stop_gradient` makes constants of them.

    Raises `GradientError` when the value is no scalar, or depends on an argument through an op
    that has no gradient; `DTypeError` when an argument holds tensors of other dtypes.

        >>> ml.value_and_grad(lambda x: ml.sum(x**2))(ml.asarray([1.0, 2.0]))
        (Tensor(5., f32[]), Tensor([2., 4.], f32[2]))
    """
    return collecting(fn, argnums, has_aux=has_aux)


def collecting(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...],
    *,
    has_aux: bool,
    collect: Collect | None = None,
) -> Callable[..., Any]:
    """`value_and_grad`; with `collect` the gradients are what the collector makes of them, and
    there is no gradient of these."""
    several = isinstance(argnums, tuple)
    numbers: tuple[int, ...] = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(isinstance(i, int) and i >= 0 for i in numbers) or len(set(numbers)) < len(numbers):
        raise GradientError(f"argnums is an int >= 0 or a tuple of different ones, not {argnums}")

    @wraps(fn, updated=())
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        if max(numbers, default=-1) >= len(args):
            raise GradientError(
                f"argnums names argument {max(numbers)}; {len(args)} were given by position"
            )
        session = _Session([args[i] for i in numbers])
        try:
            twins = dict(zip(numbers, session.arguments, strict=True))
            given = [twins.get(i, arg) for i, arg in enumerate(args)]
            result = session.run(fn, *given, **kwargs)
            value = _scalar(result, has_aux)
            one = full((), 1.0, dtype=value.dtype)
            if collect is None:
                gradients = session.pull(value, one, keep=False)
            elif session.outer is not None:
                raise GradientError("there is no gradient of gradients that members have averaged")
            else:
                value, gradients = session.pull_into(value, one, collect)
        finally:
            session.close()
        if value.tape is not session.tape:  # it may be one that the function reaches
            value = alias_of(value)
        primal = (value, result[1]) if has_aux else value
        return primal, tuple(gradients) if several else gradients[0]

    return differentiated


def grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns the gradient of `fn`, as `value_and_grad` describes it.

    With `has_aux` it returns `(gradient, aux)`.

    Raises what `value_and_grad` raises.

        >>> ml.grad(lambda x: ml.sum(x**3))(ml.asarray([1.0, 2.0]))
        Tensor([ 3., 12.], f32[2])
    """
    differentiated = value_and_grad(fn, argnums, has_aux=has_aux)

    @wraps(fn, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, gradients = differentiated(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return gradient


def vjp(fn: Callable[..., Tensor], *primals: Tree) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """`fn(*primals)`, and a function from its cotangent to a tuple of the primals' cotangents.

    That function may be called any number of times. Until it is dropped, it keeps the values that
    it needs: an update in place moves the tensor to other memory.

    The value: [...], floats; its cotangent too. Raises what `value_and_grad` raises, and
    `GradientError` for a cotangent of another type than the value.

        >>> y, pull = ml.vjp(ml.sin, ml.asarray([0.0]))
        >>> pull(ml.ones(1))
        (Tensor([1.], f32[1]),)
    """
    session = _Session(primals)
    try:
        value = session.run(fn, *session.arguments)
        if not isinstance(value, Tensor) or not value.dtype.is_inexact:
            raise GradientError(
                f"vjp is of a function to one float or complex tensor, not to {_kind(value)}"
            )
    except BaseException:
        session.close()
        raise

    if value.tape is not session.tape:
        value = alias_of(value)
    known = Tracked(value.type, value.tape, getattr(value, "node", 0))

    def pullback(cotangent: Tensor) -> Any:
        if not isinstance(cotangent, Tensor) or cotangent.type is not known.type:
            raise GradientError(f"the cotangent of {known.type} cannot be {_kind(cotangent)}")
        return tuple(session.pull(known, cotangent, keep=True))

    return value, pullback


def _scalar(result: object, has_aux: bool) -> Tensor:
    """The value to differentiate, out of what a function returned. Raises `GradientError`."""
    value = result
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradientError(f"with has_aux a function returns a pair, not {_kind(result)}")
        value = result[0]
    if not isinstance(value, Tensor) or value.shape != () or not value.dtype.is_float:
        hint = ""
        if isinstance(value, Tensor) and value.dtype.kind == "complex":
            hint = "; take the real part, or the absolute value"
        raise GradientError(f"a gradient is of a float scalar, not of {_kind(value)}{hint}")
    return value


def _kind(value: object) -> str:
    return str(value.type) if isinstance(value, Tensor) else f"a {type(value).__name__}"
