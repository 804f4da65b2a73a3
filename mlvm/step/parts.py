"""Convolutional layers in parts of the batch, for memory budgets.

The images of a batch are independent, so a layer may run for a few images at a time. Then a budget
can save and recompute the activations of these images only. In: a flow. Out: the flow with several
calls in place of each call over images: first all calls of the first part, then of the second part,
and so on.

A row of a batch has the same bits for any other rows (docs/determinism.md). The gradient of a
kernel is summed over the batch, in blocks. Each part continues the sum of the previous parts, in
the same order, so the result has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from mlvm.core.machine.callee import OUT
from mlvm.core.op import OPS, Attributes
from mlvm.core.ops.windows import images_per_block, sums_in_blocks
from mlvm.core.rules import normalize_axes
from mlvm.core.types import TensorType, f32, f64
from mlvm.step.flow import Call, Flow, UnitTable, Use, Value

PARTS: Final = 8
"""Desired number of parts."""
_SUM: Final = "conv2d_kernel_vjp"


def in_parts(flow: Flow) -> Flow | None:
    """Return the flow with layers in parts of the batch; None if this is impossible or useless."""
    layers = [call for call in flow.calls if call.op is not None and call.op.images]
    if len(layers) < 2 or layers[0].outs[0].type.is_open:
        return None
    batch = layers[0].outs[0].type.shape[0]
    chosen = _chosen(flow, batch)
    step = _rows_per_part(batch, chosen)
    return None if step is None else _Parts(flow, chosen, batch, step).flow()


def _chosen(flow: Flow, batch: int) -> dict[Call, Sequence[bool]]:
    """Return the calls that run in parts, with the operands of which each part reads some rows.

    These are the calls over images, and calls that compute rows, or a kernel's gradient, from the
    results. If only these read the rows of a call with smaller operands, such as a broadcast, that
    call also runs in parts.
    """
    live_out, rows = flow.live_out(), set[Value]()
    chosen: dict[Call, Sequence[bool]] = {}
    for call in flow.calls:
        which = None if any(use.value in live_out for use in call.outs) else _rows(call, batch)
        if which is None or call.op is None:
            continue
        if _reads_all_rows(call, which, rows):
            continue
        if call.op.images or any(
            is_row and use.value in rows for use, is_row in zip(call.ins, which, strict=True)
        ):
            chosen[call] = which
            if call.op.name != _SUM:
                rows.add(call.outs[0].value)
    read_whole, read = live_out, set[Value]()
    for call in reversed(flow.calls):
        which = chosen.get(call)
        if which is None and any(use.value in read for use in call.outs):
            [out, *_] = call.outs
            nbytes = sum(use.value.nbytes for use in call.ins)
            if out.value not in read_whole and nbytes < out.value.nbytes:
                which = _rows(call, batch)
                if which is not None and _reads_all_rows(call, which, rows):
                    which = None
        if which is not None:
            chosen[call] = which
        for i, use in enumerate(call.ins):
            (read if which is not None and which[i] else read_whole).add(use.value)
    return chosen


def _reads_all_rows(call: Call, which: Sequence[bool], rows: set[Value]) -> bool:
    """Return whether each part of a call would read all rows of a value that is in parts."""
    return any(use.value in rows and not row for use, row in zip(call.ins, which, strict=True))


def _rows(call: Call, batch: int) -> Sequence[bool] | None:
    """Return which operands have a row for each row of the result, or None for other calls."""
    op, attributes = call.op, call.attributes
    if op is None or call.queue is not None or call.sized or call.may_raise or call.again:
        return None
    [out], ins = call.outs, [use.type for use in call.ins]
    if out.value.home is not None or any(type.is_open for type in (out.type, *ins)):
        return None
    if op.name == _SUM:
        is_float = out.type.dtype in (f32, f64)
        is_summed = is_float and sums_in_blocks(out.type, attributes["groups"])
        return (True, True) if is_summed and ins[0].shape[0] == batch else None
    if out.type.shape[:1] != (batch,):
        return None
    if op.images:
        return [i < op.images for i in range(len(ins))]
    if op.reduces:
        axes = normalize_axes(attributes["axis"], ins[0].ndim)
        return (True,) if ins[0].shape[0] == batch and axes and min(axes) > 0 else None
    if not op.elementwise:
        return None
    return [type.ndim == out.type.ndim and type.shape[0] == batch for type in ins]


def _rows_per_part(batch: int, calls: Iterable[Call]) -> int | None:
    """Return the number of images in each part but the last; None if one part is the batch."""
    together = 1  # a power of two, as all numbers of images per block
    for call in calls:
        if call.op is not None and call.op.name == _SUM:
            places = math.prod(call.ins[0].type.shape[1:-1])
            together = max(together, images_per_block(places))
    step = max(1, batch // (PARTS * together)) * together
    return step if step < batch else None


class _Parts:
    """Rewriting of a flow: `chosen` calls run for `step` of the `batch` rows at a time.

    `sizes`: the number of rows of each part.
    `rows`: the values of the parts in place of a value.
    """

    def __init__(
        self, flow: Flow, chosen: dict[Call, Sequence[bool]], batch: int, step: int
    ) -> None:
        self._flow, self._chosen, self._step = flow, chosen, step
        self._sizes = [min(step, batch - start) for start in range(0, batch, step)]
        self._calls: list[Call] = []
        self._rows: dict[Value, list[Value]] = {}
        others = [call for call in flow.calls if call not in chosen]
        self._read_whole = {use.value for call in others for use in call.ins}

    def flow(self) -> Flow:
        """Return the flow in parts.

        A region consists of chosen calls without dependent other calls between them; these follow
        the region. A gradient of a kernel is complete only after its region.
        """
        units = UnitTable()
        region: list[Call] = []
        later: list[Call] = []
        for call in self._flow.calls:
            unit = units[call]
            if call in self._chosen:
                complete = [*later, *[each for each in region if each.op is OPS[_SUM]]]
                if any(units[other].must_precede(unit) for other in complete):
                    self._emit(region, later)
                region.append(call)
            elif unit.updates or any(units[each].must_precede(unit) for each in region + later):
                later.append(call)  # earlier updates would prevent that layers are computed again
            else:
                self._calls.append(call)
        self._emit(region, later)
        return Flow(self._calls, self._flow.results)

    def _emit(self, region: list[Call], later: list[Call]) -> None:
        """Add the calls of a region, part by part, and the calls that follow it; clear both."""
        totals: dict[Call, Use] = {}
        for part in range(len(self._sizes)):
            slices: dict[Use, Use] = {}
            for call in region:
                ins = [
                    self._part(use, part, slices) if is_row else use
                    for use, is_row in zip(call.ins, self._chosen[call], strict=True)
                ]
                self._calls.append(self._call(call, ins, part, totals))
        for call in region:
            [out] = call.outs
            if out.value in self._rows and out.value in self._read_whole:
                ins = [
                    Use(value, self._type(out.type, part))
                    for part, value in enumerate(self._rows[out.value])
                ]
                self._calls.append(_moving("concat", out, ins, {"axis": 0}, call.line))
        self._calls += later
        region.clear()
        later.clear()

    def _call(self, call: Call, ins: list[Use], part: int, totals: dict[Call, Use]) -> Call:
        """Return the call for one part."""
        [out], attributes = call.outs, call.attributes
        assert call.op is not None
        if call.op.name == _SUM:
            if part + 1 < len(self._sizes):
                out = Use(Value(out.value.nbytes), out.type)
            before, totals[call] = totals.get(call), out
            if before is None:
                return replace(call, outs=[out], ins=ins)
            op = OPS[f"add_{_SUM}"]
            return replace(call, name=op.name + OUT, op=op, outs=[out], ins=[before, *ins])
        type = self._type(out.type, part)
        if "shape" in attributes:
            attributes = {**attributes, "shape": (type.shape[0], *attributes["shape"][1:])}
        rows = Use(Value(type.nbytes), type)
        self._rows.setdefault(out.value, []).append(rows.value)
        return replace(call, outs=[rows], ins=ins, attributes=attributes)

    def _part(self, use: Use, part: int, slices: dict[Use, Use]) -> Use:
        """Return the rows of an operand that a part reads: its own value, or a slice."""
        type = self._type(use.type, part)
        if use.value in self._rows:
            return Use(self._rows[use.value][part], type)
        if use not in slices:
            slices[use] = Use(Value(type.nbytes), type)
            begin = (part * self._step, *[0] * (type.ndim - 1))
            how = {"start": begin, "length": type.shape, "step": (1,) * type.ndim}
            self._calls.append(_moving("slice", slices[use], [use], how, None))
        return slices[use]

    def _type(self, type: TensorType, part: int) -> TensorType:
        return type.with_shape((self._sizes[part], *type.shape[1:]))


def _moving(name: str, out: Use, ins: list[Use], attributes: Attributes, line: Any) -> Call:
    """Return a call that moves rows."""
    return Call(name + OUT, OPS[name], attributes, [out], ins, line)
