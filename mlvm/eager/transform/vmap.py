"""`vmap`: a function of one example as a function of a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlvm.core.types import TensorType
from mlvm.eager.control import loops
from mlvm.eager.functions import random
from mlvm.eager.functions.shapes import broadcast_to, moveaxis, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, alias_of, apply, one_op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.trace import run, traced
from mlvm.eager.tree import replace
from mlvm.step.flow import Call


class Lanes(NamedTuple):
    """The values of all lanes: x[lane], or the same x in each."""

    x: Tensor
    batched: bool


class Batched:
    def __init__(self, n: int) -> None:
        self.n = n

    def constant(self, x):
        return Lanes(x, False)

    def key(self):
        return Lanes(random.split(random.next_key(), self.n), True)

    def seen_as(self, v, type):
        shape = (self.n, *type.shape) if v.batched else type.shape
        return v if v.x.shape == shape else Lanes(reshape(v.x, shape), v.batched)

    def whole(self, v):
        return v.x if v.batched else broadcast_to(v.x, (self.n, *v.x.shape))

    def op(self, call, xs):
        if not any(v.batched for v in xs):
            return Lanes(apply(call, *[v.x for v in xs]), False)
        name = call.op.name
        if call.op.elementwise and name != "broadcast_to":
            ndim = max(v.x.ndim - v.batched for v in xs)
            args = []
            for v in xs:
                x = v.x
                if v.batched and x.ndim - 1 < ndim:
                    x = reshape(x, (self.n, *[1] * (ndim + 1 - x.ndim), *x.shape[1:]))
                args.append(x)
            return Lanes(apply(call, *args), True)
        if name in ("sum", "mean", "max"):
            x = xs[0].x
            a = dict(call.attributes)
            axis = a["axis"]
            nd = x.ndim - 1
            axes = range(nd) if axis is None else (axis,) if isinstance(axis, int) else axis
            a["axis"] = tuple(i % nd + 1 for i in axes)
            return Lanes(apply(one_op(name, **a), x), True)
        if name == "matmul" and all(v.x.ndim - v.batched == 2 for v in xs):
            return Lanes(apply(call, *[self.whole(v) for v in xs]), True)
        if name == "broadcast_to":
            shape = call.attributes["shape"]
            x = xs[0].x
            x = reshape(x, (self.n, *[1] * (len(shape) - x.ndim + 1), *x.shape[1:]))
            return Lanes(apply(one_op(name, shape=(self.n, *shape)), x), True)
        # slow: a loop
        rows = [apply(call, *[v.x[i] if v.batched else v.x for v in xs]) for i in range(self.n)]
        return Lanes(op.concat(*[reshape(r, (1, *r.shape)) for r in rows], axis=0), True)

    def select(self, pred, a, b):
        m = reshape(pred.x, (self.n, *[1] * (a.x.ndim - a.batched)))
        return Lanes(op.where(m, self.whole(a), self.whole(b)), True)

    def cond(self, pred, branches):
        if not pred.batched:
            raise NotImplementedError
        a, b = [branch() for branch in branches]
        return [self.select(pred, x, y) for x, y in zip(a, b)]

    def while_loop(self, test, body, state):
        state = [Lanes(self.whole(v), True) for v in state]
        lanes = lambda xs: [Lanes(x, True) for x in xs]

        def more(xs):
            return op.any(test(lanes(xs)).x)

        def turn(xs):
            p = test(lanes(xs))
            after = body(lanes(xs))
            return [self.select(p, a, Lanes(x, True)).x for a, x in zip(after, xs)]

        return lanes(loops.while_loop(more, turn, [v.x for v in state]))

    def scan(self, body, state, xs, turns, total, reverse):
        lanes = lambda xs: [Lanes(x, True) for x in xs]

        def turn(i, state, rows):
            after, made = body(Lanes(i, False), lanes(state), lanes(rows))
            return [self.whole(v) for v in after], [self.whole(v) for v in made]

        xs = [moveaxis(self.whole(v), 1, 0) for v in xs]
        turns = turns if isinstance(turns, int) else turns.x
        after, rows = loops.counted(
            turn, [self.whole(v) for v in state], xs, turns, total, reverse=reverse
        )
        return lanes(after), lanes([moveaxis(r, 1, 0) for r in rows])

    def function(self, procedure, body, args):
        return body(args)

    def other(self, call, xs):
        raise NotImplementedError(call.name)


def vmap(fn):
    def batched(*args):
        flat = []
        replace(lambda x: flat.append(x), args)
        n = flat[0].shape[0]
        given = replace(lambda x: TensorType(x.dtype, x.shape[1:]), args)
        trace = traced(fn, given, "a function of vmap")
        meaning = Batched(n)
        made = run(trace, meaning, [Lanes(x, True) for x in flat])
        return trace.with_results([alias_of(meaning.whole(v)) for v in made])

    return batched
