"""Reverse-mode differentiation: a tape of what ran, walked backwards.

While a tape is on, every call on a tensor that depends on a watched one leaves a node: the
rules to apply, where the operands' cotangents go, and only those values that the rules name.
Backward, each node is visited once, without recursion, and dropped. Rules are ordinary eager
code, so an outer tape records them, and gradients nest to any order.

The method and its terms: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final, NamedTuple

from mlvm.core.errors import DTypeError, GradientError
from mlvm.core.types import TensorType
from mlvm.eager.context import recording
from mlvm.eager.functions import full, sum_to
from mlvm.eager.tensor import OneOp, Tensor, alias, live_tapes, one_op
from mlvm.eager.tree import Tree, leaves, map_tree, substitute
from mlvm.eager.vjps import NON_DIFFERENTIABLE, VJPS

_UNTRACKED: Final = -1
_RESULT: Final = -1


class Pull(NamedTuple):
    """How one operand's cotangent comes from the result's: `rule(g, *saved[needs])`.

    `position` and `type` are the operand's; broadcasting and promotion are reversed after.
    """

    position: int
    type: TensorType
    rule: Callable[..., Tensor]
    needs: tuple[int, ...]


class Recipe(NamedTuple):
    """The pulls of one call for one set of tracked operands, and which values they need:
    numbers of operands, -1 for the result. `refusal` is the error if there is no rule."""

    pulls: tuple[Pull, ...]
    saves: tuple[int, ...]
    refusal: str | None = None


class _Node(NamedTuple):
    recipe: Recipe
    slots: tuple[int, ...]
    saved: tuple[Tensor, ...]


class Tape:
    """What ran, in order. A tracked tensor's `slot` is the number of the node that made it;
    a watched tensor's node is None."""

    def __init__(self) -> None:
        self.nodes: list[_Node | None] = []
        live_tapes.add(self)

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Track these tensors from here on."""
        for x in tensors:
            x.tape = self
            x.slot = len(self.nodes)
            self.nodes.append(None)

    def record(
        self,
        call: OneOp,
        operands: tuple[Tensor, ...],
        types: tuple[TensorType, ...],
        out: Tensor,
    ) -> None:
        """Leave a node for a call, if any operand is tracked and the result is a float."""
        slots = tuple([x.slot if x.tape is self else _UNTRACKED for x in operands])
        if max(slots, default=_UNTRACKED) < 0 or not out.type.dtype.is_float:
            return
        key = types, tuple([slot < 0 for slot in slots])
        recipe = call.recipes.get(key)
        if recipe is None:
            recipe = call.recipes[key] = _recipe(call, types, out.type, slots)
        saved = tuple([out if i == _RESULT else operands[i] for i in recipe.saves])
        out.tape = self
        out.slot = len(self.nodes)
        self.nodes.append(_Node(recipe, slots, saved))

    def refuse_write(self, call: OneOp, x: Tensor) -> None:
        """Raise `GradientError` if an update of `x` in place would change what is recorded."""
        root = x.base or x
        needed = x.tape is self or any(
            (saved.base or saved) is root
            for node in self.nodes
            if node is not None
            for saved in node.saved
        )
        if needed and self.nodes:
            raise GradientError(
                f"{call.op.name}: {x.type} cannot be updated in place while a tape needs its "
                f"old value; update it after the gradient is taken"
            )

    def cotangents(
        self, out: Tensor, seed: Tensor, watched: Sequence[int], start: int, *, keep: bool
    ) -> list[Tensor | None]:
        """Walk back from `out` with cotangent `seed` to the nodes numbered `watched`.

        Only nodes from `start` on are visited; they are dropped on the way unless `keep`.
        A watched tensor that `out` does not depend on gets None.
        """
        if out.tape is not self:
            return [None] * len(watched)
        pending: dict[int, Tensor] = {out.slot: seed}
        wanted = self._dependents(watched, start) if keep else None
        for index in range(len(self.nodes) - 1, start - 1, -1):
            node = self.nodes[index] if keep else self.nodes.pop()
            if node is None or (g := pending.pop(index, None)) is None:
                continue
            recipe, slots, saved = node
            if recipe.refusal is not None:
                raise GradientError(recipe.refusal)
            for position, type, rule, needs in recipe.pulls:
                slot = slots[position]
                if wanted is not None and slot not in wanted:
                    continue
                part = rule(g, *[saved[i] for i in needs])
                if part.type is not type:
                    part = sum_to(part, type)
                held = pending.get(slot)
                pending[slot] = part if held is None else held + part
                del part, held
        return [pending.get(slot) for slot in watched]

    def _dependents(self, watched: Sequence[int], start: int) -> set[int]:
        """The nodes from `start` on that depend on the watched ones, and these."""
        found = set(watched)
        for index, node in enumerate(self.nodes[start:], start):
            if node is not None and not found.isdisjoint(node.slots):
                found.add(index)
        return found


def _recipe(
    call: OneOp, types: tuple[TensorType, ...], out: TensorType, slots: tuple[int, ...]
) -> Recipe:
    """Look the rules of a call up, and bind all they take but values."""
    op = call.op
    place = f"{op.name}({', '.join(map(str, types))})"
    rules = VJPS[op.name]
    if rules is NON_DIFFERENTIABLE:
        return Recipe((), (), f"{place} is not differentiable; see stop_gradient")
    few = len(op.inputs) - op.variadic
    names = [*op.inputs[:few], *[op.inputs[-1]] * (len(types) - few)]
    saves: list[int] = []
    pulls = []
    for position, slot in enumerate(slots):
        if slot < 0:
            continue
        rule = rules.get(names[position])
        if rule is None:
            return Recipe((), (), f"{place} has no gradient with respect to {names[position]}")
        known: dict[str, Any] = {
            **call.attributes,
            **{f"{name}_type": type for name, type in zip(op.inputs, types, strict=False)},
            "types": types,
            "out_type": out,
            "position": position,
        }
        bound, needs = {}, []
        for name in inspect.signature(rule).parameters:
            if name in known:
                bound[name] = known[name]
            elif name != "g":
                value = _RESULT if name == "out" else op.inputs.index(name)
                if value not in saves:
                    saves.append(value)
                needs.append(saves.index(value))
        pulls.append(
            Pull(position, types[position], partial(rule, **bound) if bound else rule, tuple(needs))
        )
    return Recipe(tuple(pulls), tuple(saves))


_IDENTITY: Final = one_op("copy")


def stop_gradient(x: Tensor) -> Tensor:
    """The same value, through which no cotangent flows; nothing is copied."""
    out = x.arena.view(x, x.type, Tensor)
    out.tape = None
    return out


class _Session:
    """One differentiation: watched leaves, and the stretch of tape that a function filled."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        self.outer = recording.get()
        self.tape = self.outer or Tape()
        self.trees = list(trees)
        if self.outer is not None:  # the outer tape may know these very tensors: watch twins
            self.trees = [
                substitute(lambda x: alias(_IDENTITY, x, x.type), tree) for tree in trees
            ]
        found = [leaf for tree in self.trees for leaf in leaves(tree)]
        for path, x in found:
            if not x.dtype.is_float:
                raise DTypeError(
                    f"a gradient is with respect to floats; {path or 'the argument'} is {x.type}"
                )
        unique = {id(x): x for _, x in found}.values()
        self.tape.watch([x for x in unique if x.tape is not self.tape])
        self.start = len(self.tape.nodes)
        self.slots = [x.slot for _, x in found]

    def run(self, fn: Callable[[], Any]) -> Any:
        before = recording.set(self.tape)
        try:
            return fn()
        finally:
            recording.reset(before)

    def pull(self, out: Tensor, seed: Tensor, *, keep: bool) -> list[Tree]:
        """The cotangents as trees like the arguments; zeros where nothing depends."""
        found = self.tape.cotangents(
            out, seed, self.slots, self.start, keep=keep or self.outer is not None
        )
        rest = iter(found)

        def next_leaf(x: Tensor) -> Tensor:
            g = next(rest)
            return full(x.shape, 0.0, dtype=x.dtype) if g is None else g

        return [map_tree(next_leaf, tree) for tree in self.trees]

    def close(self) -> None:
        if self.outer is None:
            self.tape.nodes.clear()
            live_tapes.discard(self.tape)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns `fn`'s value and its gradient with respect to `argnums`.

    `fn` returns a float tensor of shape (); with `has_aux` a pair of it and anything else,
    which comes back as `((value, aux), gradient)`. The arguments named by `argnums` are trees of
    float tensors; a gradient has its argument's structure, with dicts for Modules.

    Raises `GradientError` when the value is no scalar, or depends on an argument through an op
    that has no gradient; `DTypeError` when an argument holds other than float tensors.
    """
    several = isinstance(argnums, tuple)
    numbers: tuple[int, ...] = argnums if isinstance(argnums, tuple) else (argnums,)

    @wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        for i in numbers:
            if not 0 <= i < len(args):
                raise GradientError(f"argnums names argument {i}; there are {len(args)}")
        session = _Session([args[i] for i in numbers])
        try:
            given = list(args)
            for i, tree in zip(numbers, session.trees, strict=True):
                given[i] = tree
            result = session.run(lambda: fn(*given, **kwargs))
            value = result[0] if has_aux else result
            _require_scalar(value)
            gradients = session.pull(value, full((), 1.0, dtype=value.dtype), keep=False)
        finally:
            session.close()
        return result, tuple(gradients) if several else gradients[0]

    return differentiated


def grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns the gradient of `fn`; see `value_and_grad`.

    With `has_aux` it returns `(gradient, aux)`.
    """
    differentiated = value_and_grad(fn, argnums, has_aux=has_aux)

    @wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, gradients = differentiated(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return gradient


def vjp(fn: Callable[..., Tensor], *primals: Tree) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """`fn(*primals)`, and a function from a cotangent of it to those of the primals, in a tuple.

    That function may be called any number of times; until it is dropped, what it needs cannot
    be updated in place. Raises what `value_and_grad` raises, and `GradientError` for a
    cotangent of another type than the value.
    """
    session = _Session(primals)
    try:
        value = session.run(lambda: fn(*session.trees))
        if not isinstance(value, Tensor):
            raise GradientError(f"vjp needs a tensor, not {type(value).__name__}")
    except BaseException:
        session.close()
        raise

    def pullback(cotangent: Tensor) -> Any:
        if cotangent.type is not value.type:
            raise GradientError(f"the cotangent of {value.type} cannot be {cotangent.type}")
        return tuple(session.pull(value, cotangent, keep=True))

    return value, pullback


def _require_scalar(value: object) -> None:
    if not isinstance(value, Tensor):
        raise GradientError(f"a gradient is of a tensor, not of {type(value).__name__}")
    if value.shape != () or not value.dtype.is_float:
        raise GradientError(f"a gradient is of a float scalar, not of {value.type}; reduce it first")
