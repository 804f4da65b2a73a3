"""Forward mode: `jvp` and `linearize`.

In: the trace of a function, primals and tangents. Out: values and tangents, by `interpret` with
pairs (`Dual`).

Invariant: a zero tangent is None and has no cost. A loop therefore has tangents only for the
parts of the state that get a tangent in some iteration; a dry run finds them first
(`_tangent_fixed_point`).

Callers: users; `jacobians`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

from mlvm.core.errors import (
    CaptureError,
    DTypeError,
    GradientError,
    ShapeError,
    brief,
    with_article,
)
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.forward import tangent_of
from mlvm.eager.autodiff.grad import are_alike, as_pair
from mlvm.eager.autodiff.host_call import run
from mlvm.eager.autodiff.joint import or_zeros
from mlvm.eager.autodiff.tape import Conditional, count_derivative
from mlvm.eager.control import blocks, branches, functions, loops, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.checking import check
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray, full, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import concat, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, alias_of, apply
from mlvm.eager.tensor.context import overriding
from mlvm.eager.tensor.operands import as_operand
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.custom import CustomRule
from mlvm.eager.transform.trace import (
    OUTSIDE,
    Body,
    ScanBody,
    Types,
    interpret,
    partial_eval,
    trace_function,
)
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


class NoTangent(NamedTuple):
    """Tangent of a value computed by an op that has no forward rule.

    It raises `error` if a float of the result depends on it. An integer computed from it has no
    tangent.
    """

    error: GradientError


Tangent: TypeAlias = "Tensor | Conditional | NoTangent | None"


class Dual(NamedTuple):
    """Pair of a value x and a tangent t.

    None means zero. After a captured branch a tangent may be `Conditional`: eager code has None in
    the other branch.
    """

    x: Tensor
    t: Tangent


Duals: TypeAlias = list[Dual]
Kind: TypeAlias = "bool | NoTangent"
Kinds: TypeAlias = tuple[Kind, ...]
"""For each of several values, whether it has a tangent."""


def _kind(dual: Dual) -> Kind:
    return dual.t if isinstance(dual.t, NoTangent) else dual.t is not None


def _kinds(duals: Sequence[Dual]) -> Kinds:
    return tuple(map(_kind, duals))


def _joined(*kinds: Kind) -> Kind:
    """Return the kind of a value that may be any of these."""
    return next((kind for kind in kinds if isinstance(kind, NoTangent)), any(kinds))


def _tangent(dual: Dual) -> Tensor:
    """Return the tangent as a tensor. Raises the error of `NoTangent`."""
    if isinstance(dual.t, NoTangent):
        raise dual.t.error
    return or_zeros(dual.t, dual.x.type)


def _settled(dual: Dual) -> Dual:
    """Replace a conditional tangent by a tangent with zeros where it is absent."""
    return Dual(dual.x, _tangent(dual)) if isinstance(dual.t, Conditional) else dual


def _packed(duals: Sequence[Dual], kinds: Kinds) -> Tensors:
    """Return the values, then the tangents that exist."""
    pairs = zip(duals, kinds, strict=True)
    return [*[d.x for d in duals], *[_tangent(d) for d, kind in pairs if kind is True]]


def _unpacked(xs: Sequence[Tensor], kinds: Kinds) -> Duals:
    """Invert `_packed`."""
    ts = iter(xs[len(kinds) :])
    return [
        Dual(x, next(ts) if kind is True else kind or None)
        for x, kind in zip(xs, kinds, strict=False)
    ]


def _placeholders(types: Sequence[TensorType], kinds: Kinds) -> Duals:
    """Return zeros of these types, with tangents of these kinds."""
    moving = [type for type, kind in zip(types, kinds, strict=True) if kind is True]
    return _unpacked([zeros(type.shape, dtype=type.dtype) for type in (*types, *moving)], kinds)


class _Abstract(NamedTuple):
    """Result of a function that was not run, as far as tangents depend on it.

    kinds, types: the results' types. partly: the positions of conditional tangents.
    """

    kinds: Kinds
    partly: set[int]
    types: tuple[TensorType, ...]


class JvpInterpreter:
    """Interpreter of pairs of value and tangent.

    Attributes:
        has_tangents: False if all tangents are zero.
        is_dry: True while it only determines which values have tangents.
        records: the records of residuals, in an eager interpretation.
        record_kinds: for the types of a record, which tensors have tangents.
    """

    def __init__(self, *, has_tangents: bool = True) -> None:
        self.has_tangents = has_tangents
        self.is_dry = False
        self.records: list[Duals] = []
        self.record_kinds: dict[tuple[TensorType, ...], Kinds] = {}

    def constant(self, x: Tensor) -> Dual:
        return Dual(x, None)

    def key(self) -> Dual:
        return Dual(random.next_key(), None)

    def reshape(self, x: Dual, type: TensorType) -> Dual:
        if x.x.type is type:
            return x
        t = x.t
        if isinstance(t, Conditional):
            t = Conditional(reshape(t.x, type.shape), t.present, is_clean=t.is_clean)
        elif isinstance(t, Tensor):
            t = reshape(t, type.shape)
        return Dual(reshape(x.x, type.shape), t)

    def stop_gradient(self, x: Dual) -> Dual:
        return Dual(stop_gradient(x.x), None)

    def op(self, call: OneOp, xs: Sequence[Dual]) -> Dual:
        operands = tuple([x.x for x in xs])
        out = apply(call, *operands)
        kind = _joined(*_kinds(xs))
        if not kind or not out.dtype.is_inexact:
            return Dual(out, None)
        if isinstance(kind, NoTangent):
            return Dual(out, kind)
        ts = [None if isinstance(x.t, NoTangent) else x.t for x in xs]
        try:
            return Dual(out, tangent_of(call, operands, ts, out))
        except GradientError as error:
            return Dual(out, NoTangent(error))

    # --- control flow -----------------------------------------------------------------

    def cond(self, pred: Dual, branch_fns: Sequence[Callable[[], Duals]]) -> Duals:
        if not blocks.is_recorded():
            return branch_fns[0 if bool(pred.x) else 1]()
        each = [results for results in map(self._dry_run, branch_fns) if results is not None]
        if not each:
            raise blocks.UnknownResults
        columns = [*zip(*[results.kinds for results in each], strict=True)]
        kinds = tuple([_joined(*column) for column in columns])
        partly = {k for results in each for k in results.partly}
        conditional = sorted(k for k in partly if kinds[k] is True)
        flags: dict[int, Tensor] = {}
        if not all(map(all, columns)) and not self.is_dry:
            pair = branches.complements(pred.x)
            for k, column in enumerate(columns):
                if kinds[k] is True and k not in partly and not all(column):
                    flags[k] = pair[not column[0]]

        def packed(branch: Callable[[], Duals]) -> Tensors:
            duals = branch()
            conditions = [branches.present(duals[k].t) for k in conditional]
            return [*conditions, *_packed(duals, kinds)]

        if self.is_dry:
            flags = {
                k: branches.complements(pred.x)[0]
                for k, column in enumerate(columns)
                if kinds[k] is True and (k in partly or not all(column))
            }
            duals = _placeholders(each[0].types, kinds)
        else:
            xs = branches.cond(pred.x, *[partial(packed, branch) for branch in branch_fns])
            flags |= dict(zip(conditional, xs, strict=False))
            duals = _unpacked(xs[len(conditional) :], kinds)
        for k, condition in flags.items():
            duals[k] = Dual(duals[k].x, Conditional(duals[k].t, condition, is_clean=True))
        return duals

    def _dry_run(self, fn: Callable[[], Duals]) -> _Abstract | None:
        """Describe the function's results without running it; None if they are not known yet.

        A branch inside it runs once."""
        results: list[_Abstract] = []

        def run() -> None:
            duals = fn()
            partly = {k for k, each in enumerate(duals) if isinstance(each.t, Conditional)}
            results.append(_Abstract(_kinds(duals), partly, tuple([each.x.type for each in duals])))

        try:
            with overriding(self, "is_dry", True):
                blocks.abstract_eval(run)
        except blocks.UnknownResults:
            return None
        return results[-1]

    def while_loop(self, test: Callable[[Duals], Dual], body: Body[Dual], state: Duals) -> Duals:
        kinds, _, _ = self._tangent_fixed_point(lambda now: (body(now), []), state)
        if self.is_dry:
            return _placeholders([each.x.type for each in state], kinds)

        def more(xs: Tensors) -> Tensor:
            return test([Dual(x, None) for x in xs[: len(state)]]).x

        def iterate(xs: Tensors) -> Tensors:
            return _packed(body(_unpacked(xs, kinds)), kinds)

        return _unpacked(loops.while_loop(more, iterate, _packed(state, kinds)), kinds)

    def scan(
        self,
        body: ScanBody[Dual],
        state: Duals,
        xs: Duals,
        trip_count: Dual | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[Duals, Duals]:
        of_rows = _kinds(xs)
        zero = asarray(0)

        def try_iteration(now: Duals) -> tuple[Duals, Duals]:
            slices = [op.take(x, zero, axis=0) for x in _packed(xs, of_rows)]
            return body(Dual(zero, None), now, _unpacked(slices, of_rows))

        kinds, of_results, row_types = self._tangent_fixed_point(try_iteration, state)
        if self.is_dry:
            types = [each.x.type for each in state]
            types += [TensorType(type.dtype, (total or 0, *type.shape)) for type in row_types]
            duals = _placeholders(types, (*kinds, *of_results))
            return duals[: len(state)], duals[len(state) :]

        def iterate(i: Tensor, now: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
            after, results = body(Dual(i, None), _unpacked(now, kinds), _unpacked(rows, of_rows))
            return _packed(after, kinds), _packed(results, of_results or (False,) * len(results))

        after, rows = loops.counted_loop(
            iterate,
            _packed(state, kinds),
            _packed(xs, of_rows),
            trip_count if isinstance(trip_count, int) else trip_count.x,
            total,
            reverse=reverse,
        )
        return _unpacked(after, kinds), _unpacked(rows, of_results or (False,) * len(rows))

    def _tangent_fixed_point(
        self, iterate: Callable[[Duals], tuple[Duals, Duals]], state: Duals
    ) -> tuple[Kinds, Kinds, Sequence[TensorType]]:
        """Return which parts of a loop's state, and which rows, may have a tangent.

        Also return the types of a row. A dry run skips the rest of the loop, because nested
        loops would need quadratic work."""
        kinds = _kinds(state)
        while self.has_tangents or self.is_dry:

            def try_iteration(kinds: Kinds = kinds) -> Duals:
                after, rows = iterate(_unpacked(_packed(state, kinds), kinds))
                return [*after, *rows]

            results = self._dry_run(try_iteration)
            if results is None:
                if self.is_dry:
                    raise blocks.UnknownResults
                break
            after = results.kinds
            more = tuple([_joined(was, now) for was, now in zip(kinds, after, strict=False)])
            if [*map(type, more), *more] == [*map(type, kinds), *kinds]:
                return kinds, after[len(state) :], results.types[len(state) :]
            kinds = more
        return kinds, (), ()

    def function(self, procedure: Procedure, body: Body[Dual], args: Duals, types: Types) -> Duals:
        """Call the function, or record it with tangents for all floats."""
        if not blocks.is_recorded():
            return body(args)
        kinds = _kinds(args)
        kinds_of_results = tuple([self.has_tangents and type.dtype.is_inexact for type in types])

        def called(xs: Tensors) -> Tensors:
            return _packed(body(_unpacked(xs, kinds)), kinds_of_results)

        key = id(self), id(procedure), tuple([kind is True for kind in kinds])
        operands = _packed(args, kinds)
        return _unpacked(functions.called(key, procedure.name, operands, called), kinds_of_results)

    def custom(self, rule: CustomRule, body: Body[Dual], args: Duals, types: Types) -> Duals:
        """Compute the tangents by the rule, if there are any."""
        kinds = _kinds(args)
        refused = next((kind for kind in kinds if isinstance(kind, NoTangent)), None)
        args = [*map(_settled, args)]
        nothing = [Dual(each.x, None) for each in args]
        captured = self._dry_run(lambda: body(nothing))
        if captured is not None and any(captured.kinds):
            raise rule.captured_error("tensor")
        xs = [each.x for each in args]
        if True in kinds and rule.jvp is not None and refused is None:
            tangents: list[Any] = [x.t for x in args if not isinstance(x.t, NoTangent)]
            ys, ts = rule.jvp(xs, tangents)
            return [Dual(y, t) for y, t in zip(ys, ts, strict=True)]
        inner_rule = rule.with_fn(lambda xs: [each.x for each in body([Dual(x, None) for x in xs])])
        kind = refused or (NoTangent(rule.no_tangent_error()) if any(kinds) else None)
        return [Dual(y, kind if _is_float(y) else None) for y in inner_rule(xs)]

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
            return [Dual(records.summed(number, other, self._sum), None)]
        if call.pushes:  # called in the body of a custom rule, which defines the tangents
            types = tuple([use.type for use in call.outs])
            results = run(call.name, [x.x for x in xs], call.attributes, types)
            return [Dual(y, None) for y in results]
        raise CaptureError(
            f"{call.line or 'here'}: jvp has no rule for {call.name}; "
            f"call it outside of the function"
        )

    def _push(self, xs: Duals) -> Dual:
        """Push a record.

        In a program each float is followed by a tangent. All records of a loop are read in the
        same way, even before it is known which floats have a tangent.
        """
        types = tuple([x.x.type for x in xs])
        before = self.record_kinds.get(types, (False,) * len(xs))
        self.record_kinds[types] = tuple(map(_joined, before, _kinds(xs)))
        if blocks.is_recorded():
            pairs = [(x, Dual(x.x, None) if isinstance(x.t, NoTangent) else x) for x in xs]
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
            numbers = records.numbers(number.x)
            return [self._rows(numbers, i, type) for i, type in enumerate(types)]
        pushed = [kinds for key, kinds in self.record_kinds.items() if key[: len(types)] == types]
        each = [(type,) * (1 + self._follows(type)) for type in types]
        values = iter(records.pull(number.x, [type for part in each for type in part]))
        duals = []
        for i, part in enumerate(each):
            x, *ts = [next(values) for _ in part]
            kind = _joined(*[kinds[i] for kinds in pushed])
            duals.append(Dual(x, ts[0] if kind is True else kind or None))
        return duals

    def _rows(self, numbers: list[int], which: int, type: TensorType) -> Dual:
        """Return rows of a tensor, each from a different record; record number 0 contains zeros."""
        none = Dual(zeros(type.shape, dtype=type.dtype), None)
        records = [self.records[k - 1][which] if k else none for k in numbers]
        kind = _joined(*_kinds(records))
        xs = concat([each.x[i : i + 1] for i, each in enumerate(records)])
        if kind is not True:
            return Dual(xs, kind or None)
        return Dual(xs, concat([_tangent(each)[i : i + 1] for i, each in enumerate(records)]))

    def _sum(self, p: int, q: int) -> int:
        """Return the number of the sum of two records."""
        total: Duals = []
        for one, two in zip(self.records[p - 1], self.records[q - 1], strict=True):
            if one.x.dtype is i64:
                total.append(Dual(records.summed(one.x, two.x, self._sum), None))
                continue
            kind = _joined(_kind(one), _kind(two))
            t = _tangent(one) + _tangent(two) if kind is True else kind or None
            total.append(Dual(one.x + two.x, t))
        return int(self._push(total).x)

    def _follows(self, type: TensorType) -> bool:
        """Return whether a tensor of a record is followed by a tangent."""
        return self.has_tangents and type.dtype.is_inexact


# --- functions -----------------------------------------------------------------------


class TracedFunction:
    """Function of these arguments, traced once; `xs` are the tensors of the arguments."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Tree], what: str, has_aux: bool
    ) -> None:
        if not callable(fn):
            raise GradientError(f"{what}: expected a function, got {brief(fn)}")
        self.what = what
        count_derivative()
        flat = [flatten(each, ends=at_operands) for each in args]
        self.structures = [structure for _, structure in flat]
        self.paths = [path for leaves, _ in flat for path, _ in leaves]
        self.xs = [as_operand(x) for leaves, _ in flat for _, x in leaves]
        self._buffers: list[tuple[Node, str]] = []

        def called(*xs: Tensor) -> Tree:
            rest, copies = iter(xs), list[tuple[Node, Node]]()
            trees = [
                copied(s, [next(rest) for _ in range(s.size)], copies) for s in self.structures
            ]
            result = fn(*trees)
            result, aux = as_pair(result) if has_aux else (result, None)
            moved = [
                (module, name, vars(copy)[name])
                for module, copy in copies
                for name in copy._buffers
                if vars(copy)[name] is not vars(module).get(name)
            ]
            self._buffers = [(module, name) for module, name, _ in moved]
            return result, aux, [value for *_, value in moved]

        self.trace = trace_function(called, [x.type for x in self.xs], f"a function of {what}")

    def tangents(self, trees: Sequence[Tree]) -> list[Tensor | None]:
        """Return the tensors of tangents with the structures of the arguments."""
        leaves: list[Any] = []
        for structure, tree in zip(self.structures, trees, strict=True):
            if tree is None:
                leaves += [None] * structure.size
            else:
                leaves += partners(structure, tree, are_alike, self._differ)
        return [self._checked(*each) for each in zip(leaves, self.xs, self.paths, strict=True)]

    def _checked(self, t: Any, x: Tensor, path: str) -> Tensor | None:
        """Return the tangent of x. Raises `DTypeError` or `ShapeError` for a wrong type."""
        if t is None:
            return None
        where = f" at {path}" if path else ""
        if not x.dtype.is_inexact:
            raise DTypeError(
                f"{self.what}: expected None as the tangent of {x.type}{where}, which is not a "
                f"float"
            )
        if not isinstance(t, (Tensor, dict, tuple)):
            t = asarray(t, dtype=x.dtype)
        if not isinstance(t, Tensor) or t.type is not x.type:
            refused = ShapeError if isinstance(t, Tensor) and t.dtype is x.dtype else DTypeError
            raise refused(f"{self.what}: expected a tangent {x.type}{where}, got {described(t)}")
        return t

    def _differ(self, path: str, tree: Tree, other: Tree) -> NoReturn:
        where = f" at {path}" if path else ""
        raise DTypeError(
            f"{self.what}: expected a tangent with the structure of the primal, "
            f"{with_article(type(tree).__name__)}{where}, got {with_article(type(other).__name__)}"
        )

    def results(self, duals: Duals) -> tuple[Tree, Tree, Tree]:
        """Return the value, the tangent, and aux; assign new values to buffers."""
        value, aux, buffers = self.trace.with_results([alias_of(each.x) for each in duals])
        for (module, name), each in zip(self._buffers, buffers, strict=True):
            setattr(module, name, Buffer(each))
        leaves, structure = flatten(value, buffers=True)
        ts = [alias_of(_tangent(d)) if _is_float(d.x) else None for d in duals[: len(leaves)]]
        return value, as_dicts(structure, ts), aux


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
@hinted
def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    has_aux: bool = False,
) -> Any:
    """Return `fn(*primals)` and the derivative in the direction of the tangents.

    The derivative is the product of the Jacobian with the tangents. The primals are trees of
    tensors, arrays and numbers of any shapes. Each tangent is a tree of the same structure and
    types, in which None represents zeros, also for a subtree. The tangent of integers and bools
    is None. `fn` returns a tree of tensors. The tangent of this tree has floats for floats, and
    None elsewhere. With `has_aux`, `fn` returns a pair of this tree and a second tree of tensors,
    which is the third result.

    An op without a gradient has no tangent: `GradientError` is raised where a float of the result
    depends on one. A tangent costs as much as the op, and is computed in the same pass, without
    saved activations (Griewank and Walther, Evaluating Derivatives, 2nd ed., 2008, section 3.1).

    Raises `DTypeError` or `ShapeError` for tangents of other structures, dtypes or shapes than the
    primals, `CaptureError` where `fn` reads a value, and the errors of `fn`.

        >>> ml.jvp(ml.sin, (ml.asarray([0.0]),), (ml.asarray([2.0]),))
        (Tensor([0.], f32[1]), Tensor([2.], f32[1]))
        >>> ml.jvp(lambda x, y: x * y, (2.0, 3.0), (1.0, None))
        (Tensor(6., f32[]), Tensor(3., f32[]))

    Invalid calls:
        ml.jvp(ml.sin, (v,), (x, x))  # DTypeError
        ml.jvp(ml.sin, (v,), (v[:1],))  # ShapeError
        ml.jvp(ml.floor, (v,), (v,))  # GradientError
        ml.jvp(lambda x: x * float(x[0]), (v,), (v,))  # CaptureError
    """
    for name, trees in (("primals", primals), ("tangents", tangents)):
        if not isinstance(trees, (tuple, list)):
            raise DTypeError(f"jvp: expected a tuple of {name}, got {brief(trees)}")
    if len(primals) != len(tangents):
        raise DTypeError(
            f"jvp: expected one tangent per primal, got {len(primals)} primals and "
            f"{len(tangents)} tangents"
        )
    traced_fn = TracedFunction(fn, primals, "jvp", has_aux)
    ts = traced_fn.tangents(tangents)
    duals = [Dual(x, t) for x, t in zip(traced_fn.xs, ts, strict=True)]
    value, tangent, aux = traced_fn.results(interpret(traced_fn.trace, JvpInterpreter(), duals))
    return (value, tangent, aux) if has_aux else (value, tangent)


@hinted
def linearize(fn: Callable[..., Any], *primals: Tree, has_aux: bool = False) -> Any:
    """Return `fn(*primals)` and the linear function from tangents to the tangent of the value.

    Values that do not depend on tangents are computed once, here. A loop or branch that tangents go
    through is run again by each call.

    The primals are trees of tensors of any shapes; the tangents have the same. Raises the errors of
    `jvp`.

        >>> y, forward = ml.linearize(ml.sin, ml.asarray([0.0]))
        >>> forward(ml.asarray([2.0]))
        Tensor([2.], f32[1])

    Invalid calls:
        ml.linearize(ml.floor, v)  # GradientError
    """
    traced_fn = TracedFunction(fn, primals, "linearize", has_aux)
    value, aux, structure, linear = linearized(traced_fn)

    def forward(*tangents: Tree) -> Tree:
        if len(tangents) != len(primals):
            raise DTypeError(
                f"linearize: expected one tangent per primal, got {len(tangents)} "
                f"for {len(primals)}"
            )
        pairs = zip(traced_fn.xs, traced_fn.tangents(tangents), strict=True)
        return as_dicts(structure, linear([_tangent(Dual(x, t)) for x, t in pairs if _is_float(x)]))

    return (value, forward, aux) if has_aux else (value, forward)


def linearized(
    traced_fn: TracedFunction,
) -> tuple[Tree, Tree, Structure, Callable[[Sequence[Tensor]], list[Tensor | None]]]:
    """Trace tangents through a function.

    Returns the value, aux, the structure of the value, and the linear function from tangents of the
    float arguments to tangents of the value's leaves.
    """
    floats = [_is_float(x) for x in traced_fn.xs]

    def both(*ts: Tensor) -> Tree:
        tangents = iter(ts)
        pairs = zip(traced_fn.xs, floats, strict=True)
        duals = interpret(
            traced_fn.trace,
            JvpInterpreter(),
            [Dual(x, next(tangents) if m else None) for x, m in pairs],
        )
        return [d.x for d in duals], [_tangent(d) if _is_float(d.x) else None for d in duals]

    types = [x.type for x in traced_fn.xs if _is_float(x)]
    finished = partial_eval(
        trace_function(both, types, traced_fn.trace.what), JvpInterpreter(has_tangents=False)
    )
    count = len(traced_fn.trace.results)
    zeros = [Dual(full(type.shape, 0, dtype=type.dtype), None) for type in types]
    value, _, aux = traced_fn.results(finished(zeros)[:count])
    leaves, structure = flatten(value, buffers=True)
    have_tangents = [_is_float(y) for _, y in leaves]

    def linear(ts: Sequence[Tensor]) -> list[Tensor | None]:
        after = iter(finished([Dual(t, None) for t in ts])[count:])
        return [alias_of(next(after).x) if m else None for m in have_tangents]

    return value, aux, structure, linear


def _is_float(x: Tensor) -> bool:
    """Return whether x may have a tangent."""
    return x.dtype.is_inexact
