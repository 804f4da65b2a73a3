"""Directions: what a function does to tangents, by `jvp` and `linearize`.

The function's trace is run with pairs of a value and its tangent. A tangent that is zero is None,
and makes no work. So a loop has tangents for those parts of its state alone that get one in any
turn: they are found before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast, overload

from mlvm.core.errors import CaptureError, DTypeError, GradientError, ShapeError, brief
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.forward import tangent_of
from mlvm.eager.autodiff.grad import as_pair
from mlvm.eager.control import blocks, branches, functions, loops, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.checking import check
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray, full, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import concat, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, alias_of, apply
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.custom import Custom
from mlvm.eager.transform.trace import OUTSIDE, begun, run, traced
from mlvm.eager.tree import (
    Buffer,
    Node,
    Structure,
    Tree,
    as_dicts,
    at_operands,
    copied,
    flatten,
    partners,
)
from mlvm.machines import residuals
from mlvm.machines.checks import CHECK
from mlvm.step.flow import Call, Procedure


class Refused(NamedTuple):
    """Stands for a tangent that an op without a rule would have made. It is an error where a result
    has it: an integer that is made of it has none."""

    error: GradientError


Tangent: TypeAlias = "Tensor | Refused | None"


class Dual(NamedTuple):
    """A value, and its tangent: None is zero."""

    x: Tensor
    t: Tangent


Duals: TypeAlias = list[Dual]
Kind: TypeAlias = "bool | Refused"
Kinds: TypeAlias = tuple[Kind, ...]
"""Of several values, whether they have a tangent."""


def _kind(dual: Dual) -> Kind:
    return dual.t if isinstance(dual.t, Refused) else dual.t is not None


def _kinds(duals: Sequence[Dual]) -> Kinds:
    return tuple(map(_kind, duals))


def _joined(*kinds: Kind) -> Kind:
    """Of a value that may be any of these."""
    return next((kind for kind in kinds if isinstance(kind, Refused)), any(kinds))


def _tangent(dual: Dual) -> Tensor:
    """The tangent, as a tensor. Raises the error of one that is refused."""
    if isinstance(dual.t, Refused):
        raise dual.t.error
    return full(dual.x.shape, 0, dtype=dual.x.dtype) if dual.t is None else dual.t


def _packed(duals: Sequence[Dual], kinds: Kinds) -> Tensors:
    """The values, and then the tangents of those that have one."""
    pairs = zip(duals, kinds, strict=True)
    return [*[d.x for d in duals], *[_tangent(d) for d, kind in pairs if kind is True]]


def _unpacked(xs: Sequence[Tensor], kinds: Kinds) -> Duals:
    """What `_packed` was given."""
    ts = iter(xs[len(kinds) :])
    return [
        Dual(x, next(ts) if kind is True else kind or None)
        for x, kind in zip(xs, kinds, strict=False)
    ]


def _tried(fn: Callable[[], Duals]) -> Kinds | None:
    """What the function makes, without a run; None if that is not known yet."""
    found: list[Kinds] = []
    try:
        blocks.unrun(lambda: found.append(_kinds(fn())))
    except blocks.Unknown:
        return None
    return found[-1]


class Directional:
    """What calls do with pairs of a value and its tangent.

    `records` are those of the residuals, where they are no program's; `pushed` tells, for the types
    of a record, which of its tensors have tangents. If it is not
    `moving`, there are none: the calls are run as they are.
    """

    def __init__(self, *, moving: bool = True) -> None:
        self.moving = moving
        self.records: list[Duals] = []
        self.pushed: dict[tuple[TensorType, ...], Kinds] = {}

    def constant(self, x: Tensor) -> Dual:
        return Dual(x, None)

    def key(self) -> Dual:
        return Dual(random.next_key(), None)

    def seen_as(self, x: Dual, type: TensorType) -> Dual:
        if x.x.type is type:
            return x
        t = reshape(x.t, type.shape) if isinstance(x.t, Tensor) else x.t
        return Dual(reshape(x.x, type.shape), t)

    def stopped(self, x: Dual) -> Dual:
        return Dual(stop_gradient(x.x), None)

    def op(self, call: OneOp, xs: Sequence[Dual]) -> Dual:
        operands = tuple([x.x for x in xs])
        out = apply(call, *operands)
        kind = _joined(*_kinds(xs))
        if not kind or not out.dtype.is_inexact:
            return Dual(out, None)
        if isinstance(kind, Refused):
            return Dual(out, kind)
        ts = [x.t if isinstance(x.t, Tensor) else None for x in xs]
        try:
            return Dual(out, tangent_of(call, operands, ts, out))
        except GradientError as error:
            return Dual(out, Refused(error))

    # --- control flow -----------------------------------------------------------------

    def cond(self, pred: Dual, ways: Sequence[Callable[[], Duals]]) -> Duals:
        if not blocks.is_recorded():
            return ways[0 if bool(pred.x) else 1]()
        each = [found for found in map(_tried, ways) if found is not None]
        if not each:
            raise blocks.Unknown
        kinds = tuple([_joined(*column) for column in zip(*each, strict=True)])

        def packed(way: Callable[[], Duals]) -> Callable[[], Tensors]:
            return lambda: _packed(way(), kinds)

        return _unpacked(branches.cond(pred.x, *map(packed, ways)), kinds)

    def while_loop(
        self, test: Callable[[Duals], Dual], body: Callable[[Duals], Duals], state: Duals
    ) -> Duals:
        kinds, _ = self._fixed(lambda now: (body(now), []), state)

        def more(xs: Tensors) -> Tensor:
            return test([Dual(x, None) for x in xs[: len(state)]]).x

        def turn(xs: Tensors) -> Tensors:
            return _packed(body(_unpacked(xs, kinds)), kinds)

        return _unpacked(loops.while_loop(more, turn, _packed(state, kinds)), kinds)

    def scan(
        self,
        body: Callable[[Dual, Duals, Duals], tuple[Duals, Duals]],
        state: Duals,
        xs: Duals,
        turns: Dual | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[Duals, Duals]:
        of_rows = _kinds(xs)
        zero = asarray(0)

        def tried(now: Duals) -> tuple[Duals, Duals]:
            rows = [op.take(x, zero, axis=0) for x in _packed(xs, of_rows)]
            return body(Dual(zero, None), now, _unpacked(rows, of_rows))

        kinds, of_made = self._fixed(tried, state)

        def turn(i: Tensor, now: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
            after, made = body(Dual(i, None), _unpacked(now, kinds), _unpacked(rows, of_rows))
            return _packed(after, kinds), _packed(made, of_made or (False,) * len(made))

        after, rows = loops.counted(
            turn,
            _packed(state, kinds),
            _packed(xs, of_rows),
            turns if isinstance(turns, int) else turns.x,
            total,
            reverse=reverse,
        )
        return _unpacked(after, kinds), _unpacked(rows, of_made or (False,) * len(rows))

    def _fixed(
        self, turn: Callable[[Duals], tuple[Duals, Duals]], state: Duals
    ) -> tuple[Kinds, Kinds]:
        """Which parts of a loop's state have a tangent after any number of turns; and which rows
        that a turn makes."""
        kinds = _kinds(state)
        while self.moving:

            def tried(kinds: Kinds = kinds) -> Duals:
                after, made = turn(_unpacked(_packed(state, kinds), kinds))
                return [*after, *made]

            found = _tried(tried)
            if found is None:
                break
            more = tuple([_joined(was, now) for was, now in zip(kinds, found, strict=False)])
            if [*map(type, more), *more] == [*map(type, kinds), *kinds]:
                return kinds, found[len(state) :]
            kinds = more
        return kinds, ()

    def function(
        self,
        procedure: Procedure,
        body: Callable[[Duals], Duals],
        args: Duals,
        types: Sequence[TensorType],
    ) -> Duals:
        """Recorded it stays a function, all of whose floats have tangents."""
        if not blocks.is_recorded():
            return body(args)
        kinds = _kinds(args)
        made = tuple([self.moving and type.dtype.is_inexact for type in types])

        def called(xs: Tensors) -> Tensors:
            return _packed(body(_unpacked(xs, kinds)), made)

        key = id(self), id(procedure), tuple([kind is True for kind in kinds])
        given = _packed(args, kinds)
        return _unpacked(functions.called(key, procedure.name, given, called), made)

    def custom(
        self,
        rule: Custom,
        body: Callable[[Duals], Duals],
        args: Duals,
        types: Sequence[TensorType],
    ) -> Duals:
        """The rule makes the tangents, if there are any."""
        kinds = _kinds(args)
        refused = next((kind for kind in kinds if isinstance(kind, Refused)), None)
        found = _tried(lambda: body([Dual(each.x, None) for each in args])) or ()
        if any(found):
            raise rule.closes_over("tensor")
        xs = [each.x for each in args]
        if True in kinds and rule.jvp is not None and refused is None:
            ys, ts = rule.jvp(xs, [each.t for each in args if not isinstance(each.t, Refused)])
            return [Dual(y, t) for y, t in zip(ys, ts, strict=True)]
        again = rule.again(lambda xs: [each.x for each in body([Dual(x, None) for x in xs])])
        kind = refused or (Refused(rule.refused()) if any(kinds) else None)
        return [Dual(y, kind if _moves(y) else None) for y in again(xs)]

    # --- host functions ---------------------------------------------------------------

    def other(self, call: Call, xs: Sequence[Dual]) -> Duals:
        if call.name == CHECK:
            check(xs[0].x, call.attributes["message"])
            return []
        if call.name == residuals.PUSH:
            return [self._push(list(xs))]
        if call.name in (residuals.READ, residuals.READ_ROWS):
            return self._read(xs[0], tuple([use.type for use in call.outs]))
        if call.name == OUTSIDE:
            return [self.constant(x) for x in call.attributes["read"](xs[0].x)]
        if call.name == residuals.ADD:
            [number, other] = [x.x for x in xs]
            return [Dual(self._summed(number, other), None)]
        raise CaptureError(
            f"{call.line or 'here'}: {call.name} is called in a function of jvp, which knows no "
            f"tangent for it; call it outside"
        )

    def _push(self, xs: Duals) -> Dual:
        """Keep a record. In a program a tangent follows each float: records of one loop are read
        alike, also before it is known which of them have any."""
        types = tuple([x.x.type for x in xs])
        before = self.pushed.get(types, (False,) * len(xs))
        self.pushed[types] = tuple(map(_joined, before, _kinds(xs)))
        if blocks.is_recorded():
            pairs = [(x, Dual(x.x, x.t if isinstance(x.t, Tensor) else None)) for x in xs]
            each = [(x.x, _tangent(d)) if self._follows(x.x.type) else (x.x,) for x, d in pairs]
            return Dual(records.push([x for part in each for x in part]), None)
        self.records.append(xs)
        return Dual(asarray(len(self.records)), None)

    def _read(self, number: Dual, types: tuple[TensorType, ...]) -> Duals:
        if not blocks.is_recorded():
            if not number.x.ndim:
                k = int(number.x)
                none = [Dual(zeros(type.shape, dtype=type.dtype), None) for type in types]
                return self.records[k - 1][: len(types)] if k else none
            return [
                self._rows(cast(Any, number.x.tolist()), i, type) for i, type in enumerate(types)
            ]
        known = [kinds for key, kinds in self.pushed.items() if key[: len(types)] == types]
        each = [(type,) * (1 + self._follows(type)) for type in types]
        found = iter(records.pull(number.x, [type for part in each for type in part]))
        duals = []
        for i, part in enumerate(each):
            x, *ts = [next(found) for _ in part]
            kind = _joined(*[kinds[i] for kinds in known])
            duals.append(Dual(x, ts[0] if kind is True else kind or None))
        return duals

    def _rows(self, numbers: list[int], which: int, type: TensorType) -> Dual:
        """Rows of a tensor, each from a record of its own; that of number 0 has zeros."""
        none = Dual(zeros(type.shape, dtype=type.dtype), None)
        found = [self.records[k - 1][which] if k else none for k in numbers]
        kind = _joined(*_kinds(found))
        xs = concat([each.x[i : i + 1] for i, each in enumerate(found)])
        if kind is not True:
            return Dual(xs, kind or None)
        return Dual(xs, concat([_tangent(each)[i : i + 1] for i, each in enumerate(found)]))

    def _summed(self, number: Tensor, other: Tensor) -> Tensor:
        """The numbers of the sums of records, and of those that they name."""
        if blocks.is_recorded():
            return blocks.recorder().summed(number, other)
        pairs = zip(
            *[cast(Any, x.numpy()).reshape(-1).tolist() for x in (number, other)], strict=True
        )
        found = [self._sum(p, q) if p and q else p or q for p, q in pairs]
        return reshape(asarray(found, dtype=i64), number.shape)

    def _sum(self, p: int, q: int) -> int:
        """The number of the sum of two records."""
        total: Duals = []
        for one, two in zip(self.records[p - 1], self.records[q - 1], strict=True):
            if one.x.dtype is i64:
                total.append(Dual(self._summed(one.x, two.x), None))
                continue
            kind = _joined(_kind(one), _kind(two))
            t = _tangent(one) + _tangent(two) if kind is True else kind or None
            total.append(Dual(one.x + two.x, t))
        return int(self._push(total).x)

    def _follows(self, type: TensorType) -> bool:
        """Whether a tensor of a record is followed by its tangent."""
        return self.moving and type.dtype.is_inexact


# --- functions -----------------------------------------------------------------------


class Traced:
    """A function of these arguments, recorded once. `xs` are their tensors."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Tree], what: str, has_aux: bool
    ) -> None:
        if not callable(fn):
            raise GradientError(f"{what} is of a function, not of {brief(fn)}")
        self.what = what
        flat = [flatten(each, ends=at_operands) for each in args]
        self.structures = [structure for _, structure in flat]
        self.paths = [path for found, _ in flat for path, _ in found]
        self.xs = [as_operand(x) for found, _ in flat for _, x in found]
        self._buffers: list[tuple[Node, str]] = []

        def called(*xs: Tensor) -> Tree:
            rest, copies = iter(xs), list[tuple[Node, Node]]()
            given = [
                copied(s, [next(rest) for _ in range(s.size)], copies) for s in self.structures
            ]
            result = fn(*given)
            result, aux = as_pair(result) if has_aux else (result, None)
            moved = [
                (module, name, vars(copy)[name])
                for module, copy in copies
                for name in copy._buffers
                if vars(copy)[name] is not vars(module).get(name)
            ]
            self._buffers = [(module, name) for module, name, _ in moved]
            return result, aux, [value for *_, value in moved]

        self.trace = traced(called, [x.type for x in self.xs], f"a function of {what}")

    def tangents(self, trees: Sequence[Tree]) -> list[Tensor | None]:
        """The tensors of tangents with the structures of the arguments."""
        found: list[Any] = []
        for structure, tree in zip(self.structures, trees, strict=True):
            nothing = [None] * structure.size
            found += (
                nothing if tree is None else partners(structure, tree, _are_alike, self._differ)
            )
        paired = zip(found, self.xs, self.paths, strict=True)
        return [self._checked(t, x, path) for t, x, path in paired]

    def _checked(self, t: Any, x: Tensor, path: str) -> Tensor | None:
        """The tangent of x. Raises `DTypeError` or `ShapeError` for what is none."""
        if t is None:
            return None
        where = f" at {path}" if path else ""
        if not x.dtype.is_inexact:
            raise DTypeError(f"{self.what}: the tangent of {x.type}{where}, no float, is None")
        if not isinstance(t, (Tensor, dict, tuple)):
            t = asarray(t, dtype=x.dtype)
        if not isinstance(t, Tensor) or t.dtype is not x.dtype:
            given = t.type if isinstance(t, Tensor) else brief(t)
            raise DTypeError(f"{self.what}: the tangent of {x.type}{where} cannot be {given}")
        if t.type is not x.type:
            raise ShapeError(f"{self.what}: the tangent of {x.type}{where} cannot be {t.type}")
        return t

    def _differ(self, path: str, tree: Tree, other: Tree) -> NoReturn:
        where = f" at {path}" if path else ""
        raise DTypeError(
            f"{self.what}: a tangent has the structure of its primal, "
            f"a {type(tree).__name__}{where}, not a {type(other).__name__}"
        )

    def results(self, made: Duals) -> tuple[Tree, Tree, Tree]:
        """The value, its tangent, and what is beside it. Buffers get what was assigned to them."""
        value, aux, buffers = self.trace.with_results([alias_of(each.x) for each in made])
        for (module, name), each in zip(self._buffers, buffers, strict=True):
            setattr(module, name, Buffer(each))
        found, structure = flatten(value, buffers=True)
        ts = [alias_of(_tangent(d)) if _moves(d.x) else None for d in made[: len(found)]]
        return value, as_dicts(structure, ts), aux


def _are_alike(tree: Tree, other: Tree) -> bool:
    return type(tree) is type(other) or (isinstance(tree, Node) and isinstance(other, dict))


@overload
def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    has_aux: Literal[False] = False,
) -> tuple[Any, Any]: ...
@overload
def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    has_aux: Literal[True],
) -> tuple[Any, Any, Any]: ...
def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    has_aux: bool = False,
) -> Any:
    """`fn(*primals)`, and its derivative in the direction of the tangents: the product of the
    Jacobian with them.

    The primals are trees of tensors, arrays and numbers of any shapes; each tangent is a tree of
    the same structure and types, in which None stands for zeros, also for a whole tree. Integers
    and bools have no tangent but None. `fn` returns a tree of tensors; its tangent has floats where
    it has floats, and None where it has others. With `has_aux`, `fn` returns a pair of it and
    another tree of tensors, which is the third result.

    Ops that have no gradient have no tangent either: `GradientError` says so where a float of the
    result depends on one. A tangent costs what its op costs, and is made in the same pass: no
    values are kept, as for a gradient (Griewank and Walther, Evaluating Derivatives, 2nd ed.,
    2008, section 3.1).

    Raises `DTypeError` or `ShapeError` for tangents of other structures, dtypes or shapes than the
    primals, `CaptureError` where `fn` reads a value, and what `fn` raises.

        >>> ml.jvp(ml.sin, (ml.asarray([0.0]),), (ml.asarray([2.0]),))
        (Tensor([0.], f32[1]), Tensor([2.], f32[1]))
        >>> ml.jvp(lambda x, y: x * y, (2.0, 3.0), (1.0, None))
        (Tensor(6., f32[]), Tensor(3., f32[]))
    """
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise DTypeError(f"jvp: {name} are a tuple, one for each argument, not {brief(given)}")
    if len(primals) != len(tangents):
        raise DTypeError(
            f"jvp: a tangent belongs to each primal, given {len(primals)} primals and "
            f"{len(tangents)} tangents"
        )
    made = Traced(fn, primals, "jvp", has_aux)
    ts = made.tangents(tangents)
    duals = [Dual(x, t) for x, t in zip(made.xs, ts, strict=True)]
    value, tangent, aux = made.results(run(made.trace, Directional(), duals))
    return (value, tangent, aux) if has_aux else (value, tangent)


def linearize(fn: Callable[..., Any], *primals: Tree, has_aux: bool = False) -> Any:
    """`fn(*primals)`, and the function from tangents of the primals to that of the value, as `jvp`
    makes it. What does not depend on tangents is computed once, here, and kept.

    A loop, or a branch, that tangents go through is run again by each call, with its values: how
    often it turns is none of a tangent's business.

    The primals are trees of tensors of any shapes; the tangents have the same. Raises what `jvp`
    raises.

        >>> y, forward = ml.linearize(ml.sin, ml.asarray([0.0]))
        >>> forward(ml.asarray([2.0]))
        Tensor([2.], f32[1])
    """
    made = Traced(fn, primals, "linearize", has_aux)
    value, aux, structure, linear = linearized(made)

    def forward(*tangents: Tree) -> Tree:
        if len(tangents) != len(primals):
            raise DTypeError(
                f"linearize: a tangent belongs to each primal, given {len(tangents)} for "
                f"{len(primals)}"
            )
        pairs = zip(made.xs, made.tangents(tangents), strict=True)
        return as_dicts(structure, linear([_tangent(Dual(x, t)) for x, t in pairs if _moves(x)]))

    return (value, forward, aux) if has_aux else (value, forward)


def linearized(
    made: Traced,
) -> tuple[Tree, Tree, Structure, Callable[[Sequence[Tensor]], list[Tensor | None]]]:
    """The value and what is beside it, the value's structure, and the function from tangents of the
    floats among the arguments to those of the value's leaves."""
    floats = [_moves(x) for x in made.xs]

    def both(*ts: Tensor) -> Tree:
        given = iter(ts)
        pairs = zip(made.xs, floats, strict=True)
        duals = run(
            made.trace, Directional(), [Dual(x, next(given) if m else None) for x, m in pairs]
        )
        return [d.x for d in duals], [_tangent(d) if _moves(d.x) else None for d in duals]

    types = [x.type for x in made.xs if _moves(x)]
    finished = begun(traced(both, types, made.trace.what), Directional(moving=False))
    count = len(made.trace.results)
    zeros = [Dual(full(type.shape, 0, dtype=type.dtype), None) for type in types]
    value, _, aux = made.results(finished(zeros)[:count])
    found, structure = flatten(value, buffers=True)
    moving = [_moves(y) for _, y in found]

    def linear(ts: Sequence[Tensor]) -> list[Tensor | None]:
        after = iter(finished([Dual(t, None) for t in ts])[count:])
        return [alias_of(next(after).x) if m else None for m in moving]

    return value, aux, structure, linear


def _moves(x: Tensor) -> bool:
    """Whether it may have a tangent."""
    return x.dtype.is_inexact
