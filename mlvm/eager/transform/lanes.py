"""What calls do with values that have lanes: the meaning of a trace under `vmap`.

A value is batched if it may differ between lanes; all else stays as it is, and is computed once.
Ops have a batching rule each (`mlvm.eager.autodiff.rules_batching`). Control flow by a value with
lanes is run for those lanes that take part, which are `live`: both branches run, and a choice is
made; a loop turns until its last lane is done, and keeps what a lane had when it was. What a lane
does not do it cannot be refused for: ops get the values of a live lane in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from mlvm.core.errors import AttributeRefused, CaptureError, GradientError, OperandValueError, brief
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.rules_batching import (
    BATCHING,
    REFUSING,
    Lanes,
    aligned,
    elementwise,
    looped,
    whole,
)
from mlvm.eager.control import blocks, branches, functions, loops
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.checking import check
from mlvm.eager.control.state import as_condition
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray, full, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import moveaxis, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, apply
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor, is_tracked
from mlvm.eager.transform.custom import Custom
from mlvm.eager.transform.trace import OUTSIDE, run, traced
from mlvm.machines.checks import CHECK
from mlvm.machines.residuals import ADD, PUSH, READ, READ_ROWS
from mlvm.step.flow import Call, Procedure

Values: TypeAlias = list[Lanes]
Flags: TypeAlias = list[bool]
Branch: TypeAlias = Callable[..., Values]
"""A branch, which may be given a function for the values that it reads from outside."""

_axes: ContextVar[Mapping[str, tuple[int, Tensor]]] = ContextVar(
    "axes", default=MappingProxyType({})
)
"""The axes of lanes by name: how many lanes there are, and the number of this one, i64[]."""

_NOTHING: Final = cast(Tensor, None)
"""What a value has while it is only asked which values are batched."""


@contextmanager
def lanes_named(axis_name: str | None, n: int, rank: Tensor | None) -> Iterator[None]:
    """Inside the block, the lanes of a function that is traced have that name."""
    token = _axes.set(_axes.get() if rank is None else {**_axes.get(), str(axis_name): (n, rank)})
    try:
        yield
    finally:
        _axes.reset(token)


def lanes_of(axis_name: str) -> tuple[int, Tensor]:
    """How many lanes of that name there are, and the number of this one, i64[]. Raises
    `AttributeRefused` where no `vmap` around has that name."""
    if axis_name not in _axes.get():
        known = ", ".join(map(repr, _axes.get())) or "none"
        raise AttributeRefused(
            f"no vmap around has axis_name {brief(axis_name)}; there are: {known}"
        )
    return _axes.get()[axis_name]


class Batched:
    """The meaning of calls on values of n lanes. See `mlvm.eager.transform.trace.Meaning`.

    `live` says in which lanes the calls take part, None for all. While `is_dry`, nothing is
    computed: values only tell whether they are batched. `records` are those of the residuals, where
    they are no program's.
    """

    def __init__(self, n: int, axis_name: str | None = None) -> None:
        self.n = n
        self.axis_name = axis_name
        self.live: Tensor | None = None
        self.is_dry = False
        self.records: list[Tensors] = []

    # --- values -----------------------------------------------------------------------

    def constant(self, x: Tensor) -> Lanes:
        return Lanes(x, False)

    def key(self) -> Lanes:
        return Lanes(random.split(random.next_key(), self.n), True)

    def seen_as(self, x: Lanes, type: TensorType) -> Lanes:
        shape = (self.n, *type.shape) if x.batched else type.shape
        if self.is_dry or x.x.shape == shape:
            return x
        return Lanes(reshape(x.x, shape), x.batched)

    def stopped(self, x: Lanes) -> Lanes:
        return x if self.is_dry else Lanes(stop_gradient(x.x), x.batched)

    def whole(self, v: Lanes) -> Tensor:
        """The value with an axis of lanes."""
        return whole(v, self.n)

    def op(self, call: OneOp, xs: Sequence[Lanes]) -> Lanes:
        name = call.op.name
        batched = any(v.batched for v in xs)
        if self.axis_name is not None and call.attributes.get("axis_name") == self.axis_name:
            return self._among_lanes(call, xs[0])
        if self.is_dry:
            return Lanes(_NOTHING, batched)
        if not batched:
            return Lanes(apply(call, *[v.x for v in xs]), False)
        if self.live is not None and name in REFUSING:
            xs = self._as_live(xs)
        rule = BATCHING.get(name, elementwise if call.op.elementwise else None)
        if rule is None:
            raise no_rule(name)
        if rule is looped and blocks.is_recorded():
            return Lanes(self._mapped(call, xs), True)
        try:
            return Lanes(rule(call, self.n, *xs), True)
        except OperandValueError:
            if blocks.is_recorded():
                raise
        return Lanes(looped(call, self.n, *xs), True)  # its error names the operands of one lane

    def _among_lanes(self, call: OneOp, v: Lanes) -> Lanes:
        """What the lanes tell each other, which all of them know then."""
        if self.is_dry:
            return Lanes(_NOTHING, False)
        if self.live is not None:
            raise CaptureError(
                f"lanes of axis {self.axis_name!r} meet in a branch or loop that not all of them "
                f"take; let them meet outside of it"
            )
        if call.op.name == "gather_lanes":
            return Lanes(self.whole(v), False)
        if not v.batched:
            return Lanes(apply(call, v.x), False)
        return Lanes(op.sum(v.x, axis=0, dtype=v.x.dtype), False)

    def _as_live(self, xs: Sequence[Lanes]) -> Values:
        """The values, where lanes that take no part have those of the first that does."""
        live = cast(Tensor, self.live)
        lanes = op.arange(start=0, stop=self.n, step=1, dtype=i64)
        if not self.n:
            return list(xs)
        from_ = op.where(live, lanes, op.argmax(op.astype(live, dtype=i64)))
        return [Lanes(op.take(v.x, from_, axis=0), True) if v.batched else v for v in xs]

    def _mapped(self, call: OneOp, xs: Sequence[Lanes]) -> Tensor:
        """One lane after the other, by a loop of the program."""

        def lane(rows: Tensors) -> Tensor:
            given = iter(rows)
            return apply(call, *[next(given) if v.batched else v.x for v in xs])

        made: Tensor = loops.map(lane, [v.x for v in xs if v.batched])
        return made

    # --- which values are batched -----------------------------------------------------

    @contextmanager
    def _dry(self) -> Iterator[None]:
        before, self.is_dry = self.is_dry, True
        try:
            yield
        finally:
            self.is_dry = before

    @contextmanager
    def _living(self, live: Tensor | None) -> Iterator[None]:
        """Inside, calls take part in these lanes."""
        before, self.live = self.live, live
        try:
            yield
        finally:
            self.live = before

    def _settled(self, turn: Callable[[Values], Flags], state: Values) -> Flags:
        """Which parts of a loop's state are batched in any turn. `turn` tells it for the next."""
        flags = [v.batched for v in state]
        with self._dry():
            while True:
                after = turn([Lanes(_NOTHING, flag) for flag in flags])
                after = [one or other for one, other in zip(flags, after, strict=True)]
                if after == flags:
                    return flags
                flags = after

    def _physical(self, values: Sequence[Lanes], flags: Flags) -> Tensors:
        """Tensors for the values, those that are flagged with lanes."""
        return [self.whole(v) if flag else v.x for v, flag in zip(values, flags, strict=True)]

    def _among_live(self, mask: Tensor) -> Tensor:
        """The lanes of the mask that take part."""
        return mask if self.live is None else op.logical_and(mask, self.live)

    def _chosen(self, mask: Tensor, v: Lanes, other: Lanes) -> Lanes:
        """The first value in lanes of the mask, the second in others."""
        return Lanes(op.where(aligned(Lanes(mask, True), v.ndim), v.x, other.x), True)

    # --- control flow -----------------------------------------------------------------

    def cond(self, pred: Lanes, ways: Sequence[Branch]) -> Values:
        if pred.batched and not self.is_dry:
            return self._choice(reshape(as_condition(pred.x), (self.n,)), ways)
        if not (self.is_dry or blocks.is_recorded()):
            return ways[0 if bool(pred.x) else 1]()
        with self._dry():
            made = zip(*[way() for way in ways], strict=True)
            flags = [pred.batched or a.batched or b.batched for a, b in made]
        if self.is_dry:
            return _dry_lanes(flags)
        physical = [lambda way=way: self._physical(way(), flags) for way in ways]
        return _lanes(branches.cond(pred.x, *physical), flags)

    def _choice(self, pred: Tensor, ways: Sequence[Branch]) -> Values:
        """What each lane finds in its branch."""
        masks = [self._among_live(pred), self._among_live(op.logical_not(pred))]
        made: list[Values] = []
        types: list[TensorType] = []
        unknown: blocks.Unknown | None = None
        for mask, way in zip(masks, ways, strict=True):
            try:
                found = self._taken(mask, way, types)
            except blocks.Unknown as error:  # the other tells what the function makes
                unknown = error
                continue
            if found is not None:
                made.append(found)
        if not made:
            if unknown is not None:
                raise unknown
            with self._living(masks[0]):
                made.append(ways[0]())  # there are no lanes
        if len(made) == 1:
            return [Lanes(self.whole(v), True) for v in made[0]]
        return [self._chosen(pred, a, b) for a, b in zip(*made, strict=True)]

    def _taken(self, mask: Tensor, branch: Branch, types: list[TensorType]) -> Values | None:
        """What the branch makes for these lanes. It is skipped if there are none: then it is None
        or, in a program, zeros of the `types` of the first."""

        def entering(v: Lanes) -> Lanes:
            if not v.batched or self.is_dry or not v.x.dtype.is_inexact or not self.n:
                return v
            row = stop_gradient(op.take(v.x, op.argmax(op.astype(mask, dtype=i64)), axis=0))
            return self._chosen(mask, v, Lanes(row, False))

        with self._living(mask):
            if not blocks.is_recorded():
                return branch(entering) if bool(op.any(mask)) else None
            with self._dry():
                flags = [v.batched for v in branch()]

            def taken() -> Tensors:
                made = branch(entering)
                types[:] = [v.x.type.with_shape(v.shape) for v in made]
                return self._physical(made, flags)

            def skipped() -> Tensors:
                return [
                    zeros((self.n, *type.shape) if flag else type.shape, dtype=type.dtype)
                    for type, flag in zip(types, flags, strict=True)
                ]

            return _lanes(branches.cond(op.any(mask), taken, skipped), flags)

    def while_loop(
        self, test: Callable[[Values], Lanes], body: Callable[[Values], Values], state: Values
    ) -> Values:
        by_lane = False

        def turn(now: Values) -> Flags:
            nonlocal by_lane
            by_lane |= test(now).batched
            return [by_lane or v.batched for v in body(now)]

        flags = self._settled(turn, state)
        if self.is_dry:
            return [Lanes(_NOTHING, flag) for flag in flags]

        def going(now: Values) -> Tensor:
            """The lanes that go on, or whether all do."""
            pred = test(now)
            pred = pred._replace(x=as_condition(pred.x))
            if by_lane:
                return self._among_live(reshape(self.whole(pred), (self.n,)))
            one = reshape(pred.x, ())
            return one if self.live is None else op.logical_and(one, op.any(self.live))

        def next_turn(both: tuple[Tensor, Tensors]) -> tuple[Tensor, Tensors]:
            on, xs = both
            before = _lanes(xs, flags)
            with self._living(on if by_lane else self.live):
                after = body(before)
                if by_lane:
                    after = [self._chosen(on, a, b) for a, b in zip(after, before, strict=True)]
                return going(after), self._physical(after, flags)

        first = _lanes(self._physical(state, flags), flags)
        start = going(first), [v.x for v in first]
        _, made = loops.while_loop(lambda both: op.any(both[0]), next_turn, start)
        return _lanes(made, flags)

    def scan(
        self,
        body: Callable[[Lanes, Values, Values], tuple[Values, Values]],
        state: Values,
        xs: Values,
        turns: Lanes | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[Values, Values]:
        by_lane = isinstance(turns, Lanes) and turns.batched
        made_flags: Flags = []
        dry_rows = [Lanes(_NOTHING, v.batched) for v in xs]

        def dry_turn(now: Values) -> Flags:
            after, made = body(Lanes(_NOTHING, False), now, dry_rows)
            made_flags[:] = [by_lane or v.batched for v in made]
            return [by_lane or v.batched for v in after]

        flags = self._settled(dry_turn, state)
        if self.is_dry:
            return _dry_lanes(flags), _dry_lanes(made_flags)
        xflags = [v.batched for v in xs]
        counts = None
        if isinstance(turns, Lanes):
            count = turns.x
            if by_lane:
                counts = reshape(count, (self.n,))
                if self.live is not None:
                    counts = op.where(self.live, counts, constant(0, counts.dtype))
                none = zeros(1, dtype=counts.dtype)
                count = op.max(op.concat(none, counts, axis=0))
            elif self.live is not None:
                count = op.where(op.any(self.live), count, constant(0, count.dtype))
            turns_: Tensor | int = count
        else:
            turns_ = turns

        def turn(i: Tensor, now: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
            before = _lanes(now, flags)
            on = None if counts is None else op.less(i, counts)
            with self._living(self.live if on is None else on):
                after, made = body(Lanes(i, False), before, _lanes(rows, xflags))
                if on is not None:
                    after = [self._chosen(on, a, b) for a, b in zip(after, before, strict=True)]
                    made = [
                        self._chosen(on, y, Lanes(zeros(y.shape, dtype=y.x.dtype), False))
                        for y in made
                    ]
            return self._physical(after, flags), self._physical(made, made_flags)

        first = self._physical(state, flags)
        rows = [moveaxis(v.x, 1, 0) if v.batched else v.x for v in xs]
        after, stacks = loops.counted(turn, first, rows, turns_, total, reverse=reverse)
        stacks = [moveaxis(y, 1, 0) if f else y for y, f in zip(stacks, made_flags, strict=True)]
        return _lanes(after, flags), _lanes(stacks, made_flags)

    def function(
        self,
        procedure: Procedure,
        body: Callable[[Values], Values],
        args: Values,
        types: Sequence[TensorType],
    ) -> Values:
        """It runs if it takes part in any lane: so recursion ends."""
        if self.is_dry:
            return _dry_lanes([True] * len(types))
        flags, live = [v.batched for v in args], self.live
        operands = [v.x for v in args] + ([] if live is None else [live])

        def run(given: Tensors) -> Tensors:
            own = None if live is None else given[-1]
            with self._living(own):
                return [self.whole(v) for v in body(_lanes(given[: len(args)], flags))]

        def skipped() -> Tensors:
            return [zeros((self.n, *type.shape), dtype=type.dtype) for type in types]

        if not blocks.is_recorded():
            runs = live is None or bool(op.any(live))
            return _lanes(run(operands) if runs else skipped(), [True] * len(types))
        key = self, procedure, tuple(flags), live is None
        called = partial(functions.called, key, procedure.name, operands, run)
        made = called() if live is None else branches.cond(op.any(live), called, skipped)
        return _lanes(made, [True] * len(types))

    def custom(
        self,
        rule: Custom,
        body: Callable[[Values], Values],
        args: Values,
        types: Sequence[TensorType],
    ) -> Values:
        """A function of all lanes, whose rule is that of one lane, in all of them. What a cotangent
        says of a value that is the same in all lanes is added up."""
        flags = [v.batched for v in args]
        if self.is_dry:
            return _dry_lanes([True] * len(types))
        n, what = self.n, f"the rule of {rule.name}"
        own: Any = rule  # which has fwd and bwd, or jvp

        def in_lanes(fn: Callable[..., Any], xs: Sequence[Tensor | None], flags: Flags) -> Any:
            there = [x is not None for x in xs]
            given = [Lanes(x, flag) for x, flag in zip(xs, flags, strict=True) if x is not None]

            def lane(*rows: Tensor) -> Any:
                rest = iter(rows)
                return fn([next(rest) if is_there else None for is_there in there])

            trace = traced(lane, [v.x.type.with_shape(v.shape) for v in given], what)
            meaning = Batched(n)
            made = [meaning.whole(v) for v in run(trace, meaning, given)]
            return trace.with_results(made)

        def fn(xs: Tensors) -> Tensors:
            return [self.whole(v) for v in body(_lanes(xs, flags))]

        def fwd(xs: Tensors) -> tuple[Tensors, Tensors]:
            made: tuple[Tensors, Tensors] = in_lanes(own.fwd, xs, flags)
            return made

        def bwd(res: Tensors, gs: list[Tensor | None]) -> list[Tensor | None]:
            def lane(both: list[Tensor]) -> Any:
                return own.bwd(both[: len(res)], both[len(res) :])

            parts = in_lanes(lane, [*res, *gs], [True] * (len(res) + len(gs)))
            return [
                g if g is None or flag else op.sum(g, axis=0)
                for g, flag in zip(parts, flags, strict=True)
            ]

        def jvp(xs: Tensors, ts: list[Tensor | None]) -> Any:
            def lane(both: list[Tensor]) -> Any:
                return own.jvp(both[: len(xs)], both[len(xs) :])

            return in_lanes(lane, [*xs, *ts], [*flags, *flags])

        if rule.jvp is None:
            made = Custom(rule.name, fn, fwd=fwd, bwd=bwd)
        else:
            made = Custom(rule.name, fn, jvp=jvp)
        return _lanes(made([v.x for v in args]), [True] * len(types))

    # --- host functions ---------------------------------------------------------------

    def other(self, call: Call, xs: Sequence[Lanes]) -> Values:
        types = tuple([use.type for use in call.outs])
        reads = call.name in (READ, READ_ROWS)
        if self.is_dry:
            flag = reads or (call.name == ADD and any(v.batched for v in xs))
            return _dry_lanes([flag] * len(call.outs))
        if call.name == CHECK:
            [condition] = xs
            holds = condition.x
            if self.live is not None:
                idle = aligned(Lanes(op.logical_not(self.live), True), condition.ndim)
                holds = op.logical_or(self.whole(condition), idle)
            check(holds, call.attributes["message"])
            return []
        if call.name == PUSH:
            return [Lanes(self._pushed([self.whole(v) for v in xs]), False)]
        if call.name == OUTSIDE:
            return [self.constant(x) for x in call.attributes["read"](xs[0].x)]
        if reads:
            types = tuple([type.with_shape((self.n, *type.shape)) for type in types])
            [number] = xs
            if number.batched or call.name == READ_ROWS:
                number = Lanes(self.whole(number), True)
                if self.live is not None:
                    number = self._chosen(self.live, number, Lanes(constant(0, i64), False))
            return _lanes(self._pulled(number.x, types), [True] * len(types))
        if call.name == ADD:
            flag = any(v.batched for v in xs)
            both = self._physical(xs, [flag, flag])
            return [Lanes(self._summed(*both), flag)]
        raise no_rule(call.name, call.line)

    def _pushed(self, xs: Tensors) -> Tensor:
        """The number of a record of the values."""
        if blocks.is_recorded():
            if any(map(is_tracked, xs)):
                raise GradientError(
                    "a captured function takes a gradient through vmap of the gradient of a loop "
                    "whose length is known at run time only, or of an ml.function; take both "
                    "gradients inside of vmap, or capture less"
                )
            return blocks.recorder().push(xs)
        self.records.append(xs)
        return full((), len(self.records), dtype=i64)

    def _pulled(self, number: Tensor, types: Sequence[TensorType]) -> Tensors:
        """What was kept in the record of that number, or each lane in its own."""
        if blocks.is_recorded():
            return blocks.recorder().pull(number, types)
        found = [zeros(type.shape, dtype=type.dtype) for type in types]
        for other in sorted({*_numbers(number)} - {0}):
            pairs = zip(self.records[other - 1], found, strict=False)
            mask = op.equal(number, constant(other, i64))
            found = [
                op.where(reshape(mask, (*mask.shape, *[1] * (x.ndim - mask.ndim))), x, y)
                if mask.ndim
                else x
                for x, y in pairs
            ]
        return found

    def _summed(self, number: Tensor, other: Tensor) -> Tensor:
        """The numbers of the sums of records, and of those that they name."""
        if blocks.is_recorded():
            return blocks.recorder().summed(number, other)
        sums: dict[tuple[int, int], int] = {}
        pairs = [*zip(_numbers(number), _numbers(other), strict=True)]
        for p, q in pairs:
            if p and q and (p, q) not in sums:
                both = zip(self.records[p - 1], self.records[q - 1], strict=True)
                total = [self._summed(x, y) if x.dtype is i64 else x + y for x, y in both]
                sums[p, q] = int(self._pushed(total))
        found = [sums.get(pair, pair[0] or pair[1]) for pair in pairs]
        return reshape(asarray(found, dtype=i64), number.shape)


def _numbers(x: Tensor) -> list[int]:
    return [int(number) for number in x.numpy().reshape(-1)]


def _lanes(xs: Sequence[Tensor], flags: Sequence[bool]) -> Values:
    return [Lanes(x, flag) for x, flag in zip(xs, flags, strict=True)]


def _dry_lanes(flags: Sequence[bool]) -> Values:
    return [Lanes(_NOTHING, flag) for flag in flags]


def no_rule(name: str, line: str | None = None) -> CaptureError:
    """The error for a call that cannot be run for all lanes at once."""
    return CaptureError(
        f"{f'{line}: ' if line else ''}vmap has no rule for {name}; call it outside of the "
        f"function, for the whole batch, or take ml.map in place of vmap: it goes lane by lane"
    )
