"""Branches and loops.

Python evaluates a condition on the host; a tensor condition becomes a `cond`, a `while_loop` or a
`scan`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, DTypeError, ModelError, ShapeError
from mlvm.eager.control import blocks
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, tensor

T = TypeVar("T", bool, int)


def _element(value: Value, kind: type[T]) -> T | None:
    """Return the value of a condition or count, or None for a tensor of a traced function."""
    if not isinstance(value, np.ndarray):
        if blocks.is_recorded():
            return None
        value = np.asarray(tensor(value))
    return kind(value.reshape(-1)[0])


@op("If", "raw")
def if_(at: NodeCall, condition: Value) -> Value:
    frame, branches = at.scope, (at["then_branch"], at["else_branch"])
    decided = _element(condition, bool)
    if decided is not None:
        return tuple(frame.call(branches[0 if decided else 1]))
    pred = ml.reshape(tensor(condition), ())

    def branch(graph: Any) -> Any:
        return lambda: [tensor(x) for x in frame.call(graph)]

    return tuple(ml.cond(pred, branch(branches[0]), branch(branches[1])))


@op("Loop", "raw", absent=[0, 1])
def loop(at: NodeCall, most: Value = None, condition: Value = None, *state: Value) -> Value:
    frame, body = at.scope, at["body"]
    carried, stack_count = len(state), len(body.outputs) - 1 - len(state)
    count = None if most is None else _element(most, int)
    goes_on = True if condition is None else _element(condition, bool)
    fixed = body.outputs[0] in body.constants or body.outputs[0] == body.inputs[1]
    unknown = goes_on is None or (most is not None and count is None)
    if unknown or (blocks.is_recorded() and not fixed):
        return _recorded(at, most, condition, state, stack_count)
    # Maximum number of unrolled iterations.
    is_long = blocks.is_recorded() and count is not None and count > 4 and goes_on
    if is_long and not any(isinstance(x, (list, type(None))) for x in state):
        with blocks.suppressed(CaptureError, DTypeError, ShapeError):  # iterations differ
            return _scanned(at, count or 0, state, stack_count)
    rows: list[list[Value]] = [[] for _ in range(stack_count)]
    turn = 0
    values = [*state]
    while goes_on and (count is None or turn < count):
        results = frame.call(body, [np.asarray(turn, np.int64), np.asarray(True), *values])
        goes_on = _element(results[0], bool)
        if goes_on is None:
            raise CaptureError(
                "expected a loop state of constant shape, because the condition is a tensor; "
                "compute the condition from constants"
            )
        values = results[1 : 1 + carried]
        for column, value in zip(rows, results[1 + carried :], strict=True):
            column.append(value)
        turn += 1
    return (*values, *(_stacked(column, body, i + 1 + carried) for i, column in enumerate(rows)))


def _stacked(column: list[Value], body: Any, place: int) -> Value:
    if not column:
        from mlvm.onnx.arrays import dtype_of

        kind = body.kinds[body.names[place]]
        shape = [n if isinstance(n, int) else 0 for n in kind.shape or ()]
        return np.zeros((0, *shape), dtype_of(kind.number or 1, "a result").numpy)
    if all(isinstance(x, np.ndarray) for x in column):
        return np.stack(column)
    return ml.stack([tensor(x) for x in column])


def _scanned(at: NodeCall, count: int, state: Any, stack_count: int) -> Value:
    """Run a loop with a known trip count as a `scan`."""
    frame, body = at.scope, at["body"]

    def turn(values: Any, i: Any) -> Any:
        after = [tensor(x) for x in frame.call(body, [i, np.asarray(True), *values])[1:]]
        return after[: len(values)], after[len(values) :]

    final, rows = ml.scan(turn, [tensor(x) for x in state], ml.arange(count, dtype=ml.int64))
    return (*final, *rows)


def _recorded(at: NodeCall, most: Value, condition: Value, state: Any, stack_count: int) -> Value:
    """Run a loop with a tensor as trip count as a `while_loop`."""
    frame, body = at.scope, at["body"]
    if stack_count:
        raise CaptureError(
            "a loop that stacks results needs a number as trip count, got a tensor; "
            "make it a constant"
        )
    limit = tensor(np.asarray(2**31, np.int64) if most is None else most)
    start = tensor(np.asarray(True) if condition is None else condition)

    def more(values: Any) -> Any:
        return ml.logical_and(ml.less(values[0], ml.reshape(limit, ())), ml.reshape(values[1], ()))

    def turn(values: Any) -> Any:
        goes_on, *results = [tensor(x) for x in frame.call(body, values)]
        return [values[0] + 1, ml.reshape(goes_on, ()), *results]

    first = [ml.asarray(0, dtype=ml.int64), ml.reshape(start, ()), *(tensor(x) for x in state)]
    final: Any = ml.while_loop(more, turn, first)
    return tuple(final[2:])


@op("Scan", "raw", absent=[0])
def scan(at: NodeCall, *operands: Value) -> Value:
    return _batched(at, operands) if at.opset < 9 else _scan(at, operands)


def _scan(at: NodeCall, operands: Any) -> Value:
    frame, body, count = at.scope, at["body"], at["num_scan_inputs"]
    state, xs = [*operands[: len(operands) - count]], operands[len(operands) - count :]
    stack_count = len(body.outputs) - len(state)
    directions = at.get("scan_input_directions", at.get("directions")) or [0] * count
    axes = at.get("scan_input_axes") or [0] * count
    out_directions = at.get("scan_output_directions") or [0] * stack_count
    out_axes = at.get("scan_output_axes") or [0] * stack_count
    rows = []
    for x, is_reversed, axis in zip(xs, directions, axes, strict=True):
        row = ml.moveaxis(tensor(x), axis, 0)
        rows.append(ml.flip(row, axis=0) if is_reversed else row)

    def turn(values: Any, row: Any) -> Any:
        results = [tensor(x) for x in frame.call(body, [*values, *row])]
        return results[: len(values)], results[len(values) :]

    final, stacked = ml.scan(turn, [tensor(x) for x in state], rows)
    results = []
    for y, is_reversed, axis in zip(stacked, out_directions, out_axes, strict=True):
        y = ml.flip(y, axis=0) if is_reversed else y
        results.append(ml.moveaxis(y, 0, axis) if axis else y)
    return (*final, *results)


def _batched(at: NodeCall, operands: Any) -> Value:
    """Run a Scan of opset 8, in which sequences have a leading batch axis."""
    lengths, rest = operands[0], [tensor(x) for x in operands[1:]]
    if lengths is not None:
        raise ModelError(
            "lengths of sequences in a Scan of opset 8 are not supported; "
            "convert to opset 9 or later"
        )
    samples = [_scan(at, [x[i] for x in rest]) for i in range(rest[0].shape[0])]
    return tuple(ml.stack(column) for column in zip(*samples, strict=True))


@op("SequenceMap", "raw")
def sequence_map(at: NodeCall, xs: Value, *others: Value) -> Value:
    rows = []
    for i, x in enumerate(xs):
        operands = [other[i] if isinstance(other, list) else other for other in others]
        rows.append(at.scope.call(at["body"], [x, *operands]))
    if not rows:
        return tuple([] for _ in at.node.outputs)
    return tuple([*column] for column in zip(*rows, strict=True))
