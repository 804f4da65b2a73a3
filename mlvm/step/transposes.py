"""Matrix products with transposed factors, instead of transposed copies.

`x @ w.T` is recorded as a transposition and a product, and the gradient of w as a product and a
transposition. But a product accepts transposed factors, with the same bits, and `(x @ y).T` is `y.T
@ x.T`. A product with a single column adds in a different order, so it is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from mlvm.core.op import OPS
from mlvm.step.flow import Call, Flow, Home, Use, Value, readers_of

_MATMUL, _CONTRACT = OPS["matmul"], OPS["batch_contract"]
_SIDE: Final = 16
"""A result with fewer rows or columns is slower if these are exchanged."""


def without_transposes(flow: Flow) -> list[Call]:
    """Return the calls without transpositions that only serve matrix products.

    A transposed factor is passed to the product, and a transposed product is computed transposed.
    """
    order = None
    for rewrite in (_beside_casts, _of_factors, _of_results):
        if not any(map(_swaps, flow.calls)):
            break
        order = order or _Order(flow)
        changed = rewrite(flow, order)
        if changed:
            calls = [new for call in flow.calls if (new := changed.get(call, call)) is not None]
            flow, order = Flow(calls, flow.results), None
    return flow.calls


class _Order:
    """Calls in order, with the readers of values and the writes to homes."""

    def __init__(self, flow: Flow) -> None:
        self._live_out = flow.live_out()
        self._place = {call: i for i, call in enumerate(flow.calls)}
        self._readers = readers_of(flow.calls)
        self._writes: dict[Home, list[int]] = {}
        for i, call in enumerate(flow.calls):
            for use in call.outs:
                if use.value.home is not None:
                    self._writes.setdefault(use.value.home, []).append(i)

    def readers(self, use: Use) -> Sequence[Call]:
        """Return all readers of the value; none if it is live at the end or has a home."""
        if use.value.home is not None or use.value in self._live_out:
            return ()
        return self._readers.get(use.value, ())

    def stay(self, ins: Sequence[Use], first: Call, last: Call) -> bool:
        """Return whether no call overwrites the operands of `first` before `last`."""
        homes = [use.value.home for use in ins if use.value.home is not None]
        begin, end = self._place[first], self._place[last]
        return not any(begin < i <= end for home in homes for i in self._writes.get(home, ()))


def _beside_casts(flow: Flow, order: _Order) -> dict[Call, Call | None]:
    """Transpose matrices with fewer bytes: after a narrowing cast, and before a widening cast.

    `ml.autocast` adds such casts around matrix products.
    """
    producers = {call.outs[0].value: call for call in flow.calls if _swaps(call) or _casts(call)}
    changed: dict[Call, Call | None] = {}
    for second in producers.values():
        first = producers.get(second.ins[0].value)
        if first is None or second.op is None or _swaps(first) is _swaps(second):
            continue
        if first in changed:
            continue
        [source], [middle], [result] = first.ins, first.outs, second.outs
        if second.ins != [middle] or len(order.readers(middle)) != 1:
            continue
        narrows = result.type.nbytes < source.type.nbytes
        type = second.op.infer([source.type], second.attributes)
        if narrows is _swaps(first) and type is not None:
            between = Use(Value(type.nbytes), type)
            changed[first] = replace(second, outs=[between], ins=[source])
            changed[second] = replace(first, outs=[result], ins=[between])
    return changed


def _of_factors(flow: Flow, order: _Order) -> dict[Call, Call | None]:
    """Replace transposed copies of factors by products with transposed factors."""
    changed: dict[Call, Call | None] = {}
    for swap in filter(_swaps, flow.calls):
        [factor], [source] = swap.outs, swap.ins
        readers = order.readers(factor)
        # Maximum number of products that read a transposed matrix in place as fast as a copy. These
        # are a product and one gradient. More products share the copy.
        if not 1 <= len(readers) <= 2:
            continue
        if not all(
            _may_take(call, factor) and order.stay([source], swap, call) for call in readers
        ):
            continue
        changed[swap] = None
        for call in readers:
            product = changed.get(call) or call
            flips = [use == factor for use in product.ins]
            ins = [source if use == factor else use for use in product.ins]
            changed[call] = _with(product, ins, _transposed(product), flips)
    return changed


def _of_results(flow: Flow, order: _Order) -> dict[Call, Call | None]:
    """Replace products that are only transposed by products that compute the transposed result."""
    producers = {call.outs[0].value: call for call in flow.calls if _multiplies(call)}
    changed: dict[Call, Call | None] = {}
    for swap in filter(_swaps, flow.calls):
        [result] = swap.ins
        product = producers.get(result.value)
        if product is None or product.outs != [result] or len(order.readers(result)) != 1:
            continue
        x, y = product.ins
        if x.type.ndim != y.type.ndim or min(result.type.shape[-2:]) < _SIDE:
            continue
        if order.stay([x, y], product, swap):
            changed[product] = None
            swapped = replace(product, outs=swap.outs)
            changed[swap] = _with(swapped, [y, x], _transposed(product)[::-1], [True, True])
    return changed


def _swaps(call: Call) -> bool:
    """Return whether the call swaps the last two axes, and no other axes."""
    if call.op is None or call.op.name != "permute_dims" or call.ins[0].type.ndim < 2:
        return False
    *rows, i, j = range(call.ins[0].type.ndim)
    return bool(call.attributes["axes"] == (*rows, j, i))


def _casts(call: Call) -> bool:
    return call.op is not None and call.op.name == "astype"


def _multiplies(call: Call) -> bool:
    """Return whether the call is a product with a kernel that accepts transposed factors."""
    if call.op not in (_MATMUL, _CONTRACT):
        return False
    x, y = call.ins
    return x.type.dtype.is_float and x.type.dtype is y.type.dtype


def _may_take(call: Call, factor: Use) -> bool:
    """Return whether the call is a product that accepts this factor transposed.

    A batch times one matrix is a single product if the batch is not transposed; otherwise it is one
    product per matrix.
    """
    if not _multiplies(call) or call.op is not _MATMUL:
        return False
    if {use for use in call.ins if use.value is factor.value} != {factor}:
        return False
    x, y = call.ins
    if x != factor:
        return True
    one_column = y.type.ndim < 2 or call.outs[0].type.shape[-1] == 1
    return not one_column and (x.type.ndim == 2 or y.type.ndim > 2)


def _transposed(product: Call) -> list[bool]:
    """Return for each factor whether it is transposed."""
    return [product.attributes["transpose_x"], product.attributes["transpose_y"]]


def _with(call: Call, ins: list[Use], transposed: list[bool], flips: list[bool]) -> Call:
    """Return the product of these factors, with the transposition of `flips` inverted."""
    x, y = (is_set is not flip for is_set, flip in zip(transposed, flips, strict=True))
    return replace(call, ins=ins, attributes={"transpose_x": x, "transpose_y": y})
