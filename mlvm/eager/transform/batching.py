"""Interpreter of batched values, for `vmap`.

In: a trace of the function for one element of the batch; arguments that are batched, with the batch
along axis 0, or equal for all elements (`Batched`). Out: the results for all elements, computed by
eager code: one call per op, with the rule of `mlvm.step.batch_rules`.

Invariant: an unbatched value is computed once.

Control flow on a batched value uses masks: both branches run, and `where` selects. A loop runs
until the last element is done, and keeps the state of elements that finished earlier. `live` is the
mask of the elements that take part. The other elements must not raise, for example for an index out
of range, so ops get the operands of a live element for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeAlias, cast

from mlvm.arena.context import context, current
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    GradientError,
    OperandValueError,
    PositionError,
    brief,
)
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.host_call import run
from mlvm.eager.control import blocks, branches, functions, loops, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.checking import check
from mlvm.eager.control.state import as_condition
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import full, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import broadcast_to, moveaxis, permute_dims, reshape
from mlvm.eager.recording.lines import standing_for, traced_line
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, alias_of, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.context import overriding
from mlvm.eager.tensor.tensor import Tensor, is_tracked
from mlvm.eager.transform.custom import CustomRule
from mlvm.eager.transform.trace import OUTSIDE, Body, ScanBody, Types, interpret, trace_function
from mlvm.machines.checks import CHECK
from mlvm.machines.residuals import ADD, PUSH, READ, READ_ROWS
from mlvm.step.batch_rules import (
    BATCHING,
    Batched,
    BatchedCall,
    BatchEmitter,
    elementwise,
    in_lane,
    one_by_one,
)
from mlvm.step.flow import Call, Procedure

Values: TypeAlias = list[Batched]
Flags: TypeAlias = list[bool]
Branch: TypeAlias = Callable[..., Values]
"""Branch of a condition; the optional argument is a function to apply to values from outside."""

_NOTHING: Final = cast(Tensor, None)
"""Placeholder of a value during a dry run."""


def named_axis(axis_name: str | None, n: int, rank: Tensor | None) -> AbstractContextManager[None]:
    """Name the batch axis while a function is traced."""
    axes = current().axes
    return context(axes=axes if rank is None else {**axes, str(axis_name): (n, rank)})


def axis_of(axis_name: str) -> tuple[int, Tensor]:
    """Return the size of a named axis and the element's index along it, i64[].

    Raises `ArgumentError` if no enclosing `vmap` has that name.
    """
    if axis_name not in current().axes:
        names = ", ".join(map(repr, current().axes)) or "none"
        raise ArgumentError(
            f"expected the axis_name of an enclosing vmap ({names}), got {brief(axis_name)}"
        )
    return current().axes[axis_name]


class BatchingInterpreter:
    """Interpreter of values with a batch of n elements (see `trace.Interpreter`).

    live: mask of the active elements, None for all. is_dry: True in a dry run, which
    computes only which values are batched. records: the records of residuals, in an eager
    interpretation.
    """

    def __init__(self, n: int, axis_name: str | None = None) -> None:
        self.n, self._batch = n, BatchEmitter(n, _EMITTER)
        self.as_batch: Callable[[Batched], Tensor] = self._batch.as_batch
        self.axis_name = axis_name
        self.live: Tensor | None = None
        self.is_dry = False
        self.records: list[Tensors] = []

    # --- values -----------------------------------------------------------------------

    def constant(self, x: Tensor) -> Batched:
        return Batched(x, False)

    def key(self) -> Batched:
        return Batched(random.split(random.next_key(), self.n), True)

    def reshape(self, x: Batched, type: TensorType) -> Batched:
        shape = (self.n, *type.shape) if x.is_batched else type.shape
        if self.is_dry or x.x.shape == shape:
            return x
        return Batched(reshape(x.x, shape), x.is_batched)

    def stop_gradient(self, x: Batched) -> Batched:
        return x if self.is_dry else Batched(stop_gradient(x.x), x.is_batched)

    def op(self, call: OneOp, xs: Sequence[Batched]) -> Batched:
        name = call.op.name
        batched = any(v.is_batched for v in xs)
        if self.axis_name is not None and call.attributes.get("axis_name") == self.axis_name:
            return self._collective(call, xs[0])
        if self.is_dry:
            return Batched(_NOTHING, batched)
        if not batched:
            return Batched(apply(call, *[v.x for v in xs]), False)
        if self.live is not None and call.op.may_raise:
            xs = self._with_live_values(xs)
        rule = BATCHING.get(name, elementwise if call.op.elementwise else None)
        if rule is None:
            raise no_rule(name)
        if rule is one_by_one and blocks.is_recorded():
            return Batched(self._map_rows(call, xs), True)
        batched_call = BatchedCall(call.op, call.attributes, self.n, _EMITTER)
        context: AbstractContextManager[object] = suppress(OperandValueError)
        if blocks.is_recorded():
            element_types = [v.x.type.with_shape(v.shape) for v in xs]
            named = standing_for(name, element_types, has_lanes=_has_lanes(call, xs))
            context = named if call.op.may_raise else nullcontext()
        with context:
            result = rule(batched_call, *xs)
            return Batched(_one_by_one(call, self.n, xs) if result is None else result, True)
        # the error names the operands of a single element
        return Batched(_lane_by_lane(call, self.n, xs), True)

    def _collective(self, call: OneOp, v: Batched) -> Batched:
        """Apply a collective along the batch axis; the result is the same for all elements."""
        if self.is_dry:
            return Batched(_NOTHING, False)
        if self.live is not None:
            raise CaptureError(
                f"a collective over axis {self.axis_name!r} in a branch or loop that not all "
                f"elements take; call it outside of the branch or loop"
            )
        if call.op.name == "gather_lanes":
            return Batched(self.as_batch(v), False)
        if not v.is_batched:
            return Batched(apply(call, v.x), False)
        return Batched(op.sum(v.x, axis=0, dtype=v.x.dtype), False)

    def _with_live_values(self, xs: Sequence[Batched]) -> Values:
        """Replace the values of inactive elements by the values of the first live element."""
        live = cast(Tensor, self.live)
        numbers = op.arange(start=0, stop=self.n, step=1, dtype=i64)
        if not self.n:
            return list(xs)
        from_ = op.where(live, numbers, op.argmax(op.astype(live, dtype=i64)))
        return [Batched(op.take(v.x, from_, axis=0), True) if v.is_batched else v for v in xs]

    def _map_rows(self, call: OneOp, xs: Sequence[Batched]) -> Tensor:
        """Apply the op to one element after the other, in a loop of the program."""

        def element(rows: Tensors) -> Tensor:
            row_values = iter(rows)
            return apply(call, *[next(row_values) if v.is_batched else v.x for v in xs])

        stacked: Tensor = loops.map(element, [v.x for v in xs if v.is_batched])
        return stacked

    # --- which values are batched -----------------------------------------------------

    def _dry(self) -> AbstractContextManager[None]:
        return overriding(self, "is_dry", True)

    def _running_for(self, live: Tensor | None) -> AbstractContextManager[None]:
        """Restrict calls inside the block to these live elements."""
        return overriding(self, "live", live)

    def _batched_fixed_point(self, iterate: Callable[[Values], Flags], state: Values) -> Flags:
        """Return which parts of a loop's state are batched in some iteration.

        `iterate` computes the flags after an iteration.
        """
        flags = [v.is_batched for v in state]
        with self._dry():
            while True:
                after = iterate([Batched(_NOTHING, flag) for flag in flags])
                after = [one or other for one, other in zip(flags, after, strict=True)]
                if after == flags:
                    return flags
                flags = after

    def _batches(self, values: Sequence[Batched], flags: Flags) -> Tensors:
        """Return tensors for the values, with a batch axis where flagged."""
        return [self.as_batch(v) if flag else v.x for v, flag in zip(values, flags, strict=True)]

    def _live_subset(self, mask: Tensor) -> Tensor:
        """Return the live elements of the mask."""
        return mask if self.live is None else op.logical_and(mask, self.live)

    def _select(self, mask: Tensor, v: Batched, other: Batched) -> Batched:
        """Select the first value where the mask is true, else the second."""
        return Batched(op.where(self._batch.align(Batched(mask, True), v.ndim), v.x, other.x), True)

    # --- control flow -----------------------------------------------------------------

    def cond(self, pred: Batched, branch_fns: Sequence[Branch]) -> Values:
        if pred.is_batched and not self.is_dry:
            return self._select_branches(reshape(as_condition(pred.x), (self.n,)), branch_fns)
        if not (self.is_dry or blocks.is_recorded()):
            return branch_fns[0 if bool(pred.x) else 1]()
        with self._dry():
            flag_pairs = zip(*[branch() for branch in branch_fns], strict=True)
            flags = [pred.is_batched or a.is_batched or b.is_batched for a, b in flag_pairs]
        if self.is_dry:
            return _dry_values(flags)
        physical = [lambda branch=branch: self._batches(branch(), flags) for branch in branch_fns]
        return _batched(branches.cond(pred.x, *physical), flags)

    def _select_branches(self, pred: Tensor, branch_fns: Sequence[Branch]) -> Values:
        """Run each branch for the elements that take it, and select the results."""
        masks = [self._live_subset(pred), self._live_subset(op.logical_not(pred))]
        results: list[Values] = []
        types: list[TensorType] = []
        unknown: blocks.UnknownResults | None = None
        for mask, branch in zip(masks, branch_fns, strict=True):
            try:
                result = self._run_masked(mask, branch, types)
            except blocks.UnknownResults as error:  # the other branch determines the result types
                unknown = error
                continue
            if result is not None:
                results.append(result)
        if not results:
            if unknown is not None:
                raise unknown
            with self._running_for(masks[0]):
                results.append(branch_fns[0]())  # the batch is empty
        if len(results) == 1:
            return [Batched(self.as_batch(v), True) for v in results[0]]
        return [self._select(pred, a, b) for a, b in zip(*results, strict=True)]

    def _run_masked(self, mask: Tensor, branch: Branch, types: list[TensorType]) -> Values | None:
        """Run a branch for the elements of the mask.

        It is skipped if there are none. The result is then None or, in a program, zeros of the
        `types` of the first branch.
        """

        def entering(v: Batched) -> Batched:
            if not v.is_batched or self.is_dry or not v.x.dtype.is_inexact or not self.n:
                return v
            row = stop_gradient(op.take(v.x, op.argmax(op.astype(mask, dtype=i64)), axis=0))
            return self._select(mask, v, Batched(row, False))

        with self._running_for(mask):
            if not blocks.is_recorded():
                return branch(entering) if bool(op.any(mask)) else None
            with self._dry():
                flags = [v.is_batched for v in branch()]

            def run_branch() -> Tensors:
                values = branch(entering)
                types[:] = [v.x.type.with_shape(v.shape) for v in values]
                return self._batches(values, flags)

            def skip_branch() -> Tensors:
                return [
                    zeros((self.n, *type.shape) if flag else type.shape, dtype=type.dtype)
                    for type, flag in zip(types, flags, strict=True)
                ]

            return _batched(branches.cond(op.any(mask), run_branch, skip_branch), flags)

    def while_loop(
        self, test: Callable[[Values], Batched], body: Body[Batched], state: Values
    ) -> Values:
        diverges = False

        def dry_iteration(now: Values) -> Flags:
            nonlocal diverges
            diverges |= test(now).is_batched
            return [diverges or v.is_batched for v in body(now)]

        flags = self._batched_fixed_point(dry_iteration, state)
        if self.is_dry:
            return [Batched(_NOTHING, flag) for flag in flags]

        def going(now: Values) -> Tensor:
            """Return the elements that continue, or one bool for all."""
            pred = test(now)
            pred = pred._replace(x=as_condition(pred.x))
            if diverges:
                return self._live_subset(reshape(self.as_batch(pred), (self.n,)))
            one = reshape(pred.x, ())
            return one if self.live is None else op.logical_and(one, op.any(self.live))

        def iterate(both: tuple[Tensor, Tensors]) -> tuple[Tensor, Tensors]:
            on, xs = both
            before = _batched(xs, flags)
            with self._running_for(on if diverges else self.live):
                after = body(before)
                if diverges:
                    after = [self._select(on, a, b) for a, b in zip(after, before, strict=True)]
                return going(after), self._batches(after, flags)

        first = _batched(self._batches(state, flags), flags)
        start = going(first), [v.x for v in first]
        _, final = loops.while_loop(lambda both: op.any(both[0]), iterate, start)
        return _batched(final, flags)

    def scan(
        self,
        body: ScanBody[Batched],
        state: Values,
        xs: Values,
        trip_count: Batched | int,
        total: int | None,
        reverse: bool,
    ) -> tuple[Values, Values]:
        diverges = isinstance(trip_count, Batched) and trip_count.is_batched
        row_flags: Flags = []
        dry_rows = [Batched(_NOTHING, v.is_batched) for v in xs]

        def dry_iteration(now: Values) -> Flags:
            after, rows_out = body(Batched(_NOTHING, False), now, dry_rows)
            row_flags[:] = [diverges or v.is_batched for v in rows_out]
            return [diverges or v.is_batched for v in after]

        flags = self._batched_fixed_point(dry_iteration, state)
        if self.is_dry:
            return _dry_values(flags), _dry_values(row_flags)
        xflags = [v.is_batched for v in xs]
        counts = None
        if isinstance(trip_count, Batched):
            count = trip_count.x
            if diverges:
                counts = reshape(count, (self.n,))
                if self.live is not None:
                    counts = op.where(self.live, counts, constant(0, counts.dtype))
                none = zeros(1, dtype=counts.dtype)
                count = op.max(op.concat(none, counts, axis=0))
            elif self.live is not None:
                count = op.where(op.any(self.live), count, constant(0, count.dtype))
            count_now: Tensor | int = count
        else:
            count_now = trip_count

        def iterate(i: Tensor, now: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
            before = _batched(now, flags)
            on = None if counts is None else op.less(i, counts)
            with self._running_for(self.live if on is None else on):
                after, rows_out = body(Batched(i, False), before, _batched(rows, xflags))
                if on is not None:
                    after = [self._select(on, a, b) for a, b in zip(after, before, strict=True)]
                    rows_out = [
                        self._select(on, y, Batched(zeros(y.shape, dtype=y.x.dtype), False))
                        for y in rows_out
                    ]
            return self._batches(after, flags), self._batches(rows_out, row_flags)

        first = self._batches(state, flags)
        rows = [moveaxis(v.x, 1, 0) if v.is_batched else v.x for v in xs]
        after, stacks = loops.counted_loop(iterate, first, rows, count_now, total, reverse=reverse)
        stacks = [moveaxis(y, 1, 0) if f else y for y, f in zip(stacks, row_flags, strict=True)]
        return _batched(after, flags), _batched(stacks, row_flags)

    def function(
        self, procedure: Procedure, body: Body[Batched], args: Values, types: Types
    ) -> Values:
        """Call the function if any element is active, so that the recursion terminates."""
        if self.is_dry:
            return _dry_values([True] * len(types))
        flags, live = [v.is_batched for v in args], self.live
        operands = [v.x for v in args] + ([] if live is None else [live])

        def run(xs: Tensors) -> Tensors:
            own = None if live is None else xs[-1]
            with self._running_for(own):
                return [self.as_batch(v) for v in body(_batched(xs[: len(args)], flags))]

        def skipped() -> Tensors:
            return [zeros((self.n, *type.shape), dtype=type.dtype) for type in types]

        if not blocks.is_recorded():
            runs = live is None or bool(op.any(live))
            if runs:  # the gradients are summed separately, as in a captured function
                results = map(alias_of, run([alias_of(x) for x in operands]))
            return _batched([*results] if runs else skipped(), [True] * len(types))
        key = self, procedure, tuple(flags), live is None
        called = partial(functions.called, key, procedure.name, operands, run)
        outputs = called() if live is None else branches.cond(op.any(live), called, skipped)
        return _batched(outputs, [True] * len(types))

    def custom(self, rule: CustomRule, body: Body[Batched], args: Values, types: Types) -> Values:
        """Call a function with a rule for the batch, applying the rule to each element.

        Cotangents of an unbatched argument are summed.
        """
        flags = [v.is_batched for v in args]
        if self.is_dry:
            return _dry_values([True] * len(types))
        n, what = self.n, f"the rule of {rule.name}"
        own: Any = rule  # the rule has fwd and bwd, or jvp

        def for_batch(fn: Callable[..., Any], xs: Sequence[Tensor | None], flags: Flags) -> Any:
            there = [x is not None for x in xs]
            values = [Batched(x, flag) for x, flag in zip(xs, flags, strict=True) if x is not None]

            def element(*rows: Tensor) -> Any:
                rest = iter(rows)
                return fn([next(rest) if is_there else None for is_there in there])

            trace = trace_function(element, [v.x.type.with_shape(v.shape) for v in values], what)
            interpreter = BatchingInterpreter(n)
            outputs = [interpreter.as_batch(v) for v in interpret(trace, interpreter, values)]
            return trace.with_results(outputs)

        def fn(xs: Tensors) -> Tensors:
            return [self.as_batch(v) for v in body(_batched(xs, flags))]

        def bwd(res: Tensors, gs: list[Tensor | None]) -> list[Tensor | None]:
            def element(both: list[Tensor]) -> Any:
                return own.bwd(both[: len(res)], both[len(res) :])

            parts = for_batch(element, [*res, *gs], [True] * (len(res) + len(gs)))
            return [
                g if g is None or flag else op.sum(g, axis=0)
                for g, flag in zip(parts, flags, strict=True)
            ]

        def jvp(xs: Tensors, ts: list[Tensor | None]) -> Any:
            def element(both: list[Tensor]) -> Any:
                return own.jvp(both[: len(xs)], both[len(xs) :])

            return for_batch(element, [*xs, *ts], [*flags, *flags])

        if rule.jvp is None:
            forward = partial(for_batch, own.fwd, flags=flags)
            batched_rule = CustomRule(rule.name, fn, fwd=forward, bwd=bwd)
        else:
            batched_rule = CustomRule(rule.name, fn, jvp=jvp)
        return _batched(batched_rule([v.x for v in args]), [True] * len(types))

    # --- host functions ---------------------------------------------------------------

    def other(self, call: Call, xs: Sequence[Batched]) -> Values:
        types = tuple([use.type for use in call.outs])
        reads = call.name in (READ, READ_ROWS)
        if self.is_dry:
            varies = call.pushes or call.name == ADD
            flag = reads or (varies and any(v.is_batched for v in xs))
            return _dry_values([flag] * len(call.outs))
        if call.name == CHECK:
            [condition] = xs
            holds = condition.x
            if self.live is not None:
                idle = self._batch.align(Batched(op.logical_not(self.live), True), condition.ndim)
                holds = op.logical_or(self.as_batch(condition), idle)
            check(holds, call.attributes["message"])
            return []
        if call.name == PUSH:
            return [Batched(self._push([self.as_batch(v) for v in xs]), False)]
        if call.name == OUTSIDE:
            return [self.constant(x) for x in call.attributes["read"](xs[0].x)]
        if reads:
            types = tuple([type.with_shape((self.n, *type.shape)) for type in types])
            [number] = xs
            if number.is_batched or call.name == READ_ROWS:
                number = Batched(self.as_batch(number), True)
                if self.live is not None:
                    number = self._select(self.live, number, Batched(constant(0, i64), False))
            return _batched(self._pull(number.x, types), [True] * len(types))
        if call.name == ADD:
            flag = any(v.is_batched for v in xs)
            one, two = self._batches(xs, [flag, flag])
            return [Batched(records.summed(one, two, self._sum), flag)]
        if call.pushes:
            return self._call_user(call, xs, types)
        raise no_rule(call.name, call.line)

    def _call_user(self, call: Call, xs: Sequence[Batched], types: Types) -> Values:
        """Call a user's host function once for each row."""

        def row(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return run(call.name, operands, call.attributes, tuple(types))

        batches = [v.x for v in xs if v.is_batched]
        if not batches:
            return _batched(row([v.x for v in xs]), [False] * len(types))
        if not self.n:
            rows = [zeros((0, *type.shape), dtype=type.dtype) for type in types]
            return _batched(rows, [True] * len(types))

        def fn(parts: list[Tensor]) -> tuple[Tensor, ...]:
            rest = iter(parts)
            return row([next(rest) if v.is_batched else v.x for v in xs])

        return _batched(loops.map(fn, batches), [True] * len(types))

    def _push(self, xs: Tensors) -> Tensor:
        """Push a record of the values; return the record's number."""
        if blocks.is_recorded():
            if any(map(is_tracked, xs)):
                raise GradientError(
                    "a captured function takes a gradient through vmap of the gradient of a loop "
                    "whose length is known at run time only, or of an ml.subroutine; take both "
                    "gradients inside of vmap, or capture less"
                )
            return blocks.recorder().push(xs)
        self.records.append(xs)
        return full((), len(self.records), dtype=i64)

    def _pull(self, number: Tensor, types: Sequence[TensorType]) -> Tensors:
        """Return the tensors of a record, or for each element those of the element's record."""
        if blocks.is_recorded():
            return blocks.recorder().pull(number, types)
        values = [zeros(type.shape, dtype=type.dtype) for type in types]
        for other in sorted({*records.numbers(number)} - {0}):
            pairs = zip(self.records[other - 1], values, strict=False)
            mask = op.equal(number, constant(other, i64))
            values = [
                op.where(reshape(mask, (*mask.shape, *[1] * (x.ndim - mask.ndim))), x, y)
                if mask.ndim
                else x
                for x, y in pairs
            ]
        return values

    def _sum(self, p: int, q: int) -> int:
        """Return the number of the sum of two records."""
        both = zip(self.records[p - 1], self.records[q - 1], strict=True)
        total = [records.summed(x, y, self._sum) if x.dtype is i64 else x + y for x, y in both]
        return int(self._push(total))


class _Emitter:
    """Emitter of batching rules that makes eager calls, which a capture records."""

    is_exact = False
    reshape = staticmethod(reshape)
    permute_dims = staticmethod(permute_dims)
    broadcast_to = staticmethod(broadcast_to)
    constant = staticmethod(constant)

    def op(self, name: str, /, *xs: Tensor, **attributes: Any) -> Tensor:
        return apply(one_op(name, **attributes), *xs)


_EMITTER: Final = _Emitter()


def _one_by_one(call: OneOp, n: int, xs: Sequence[Batched], *, in_lanes: bool = False) -> Tensor:
    """Apply the op to one element after the other, for example for random numbers by key.

    With `in_lanes`, an error names the element.
    """
    elements = []
    for i in range(n):
        operands = [getitem(v.x, i) if v.is_batched else v.x for v in xs]
        try:
            elements.append(apply(call, *operands))
        except PositionError as error:
            if in_lanes:
                line = traced_line()
                if line is not None and line.call is not None:  # a `vmap` nested in this one
                    error.op, error.operands = line.call
                in_lane(error, [i], 0 if line is None else line.naxes)
            raise
    if not elements:
        like = call.infer(tuple([v.x.type.with_shape(v.shape) for v in xs]))
        assert like is not None  # no op with a rule has a dynamic shape
        return zeros((0, *like.shape), dtype=like.dtype)
    return op.concat(*[reshape(x, (1, *x.shape)) for x in elements], axis=0)


def _lane_by_lane(call: OneOp, n: int, xs: Sequence[Batched]) -> Tensor:
    """Apply the op to one element after the other after a rule has raised; one raises again."""
    return _one_by_one(call, n, xs, in_lanes=_has_lanes(call, xs))


def _has_lanes(call: OneOp, xs: Sequence[Batched]) -> bool:
    """Return whether the operand with positions has one row per element."""
    named = zip(call.op.inputs, xs, strict=False)
    is_merged = call.op.name == "weighted_take"  # combined with the batch of images
    return not is_merged and any(v.is_batched for k, v in named if k in ("indices", "labels"))


def _batched(xs: Sequence[Tensor], flags: Sequence[bool]) -> Values:
    return [Batched(x, flag) for x, flag in zip(xs, flags, strict=True)]


def _dry_values(flags: Sequence[bool]) -> Values:
    return [Batched(_NOTHING, flag) for flag in flags]


def no_rule(name: str, line: str | None = None) -> CaptureError:
    """Return the error for a call that has no batching rule."""
    return CaptureError(
        f"{f'{line}: ' if line else ''}vmap has no rule for {name}; call it outside of the "
        f"function, for the whole batch, or take ml.map in place of vmap: it runs one by one"
    )
