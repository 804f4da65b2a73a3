"""Ops on one element that run once, and those that may not be merged."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.core.types import TensorType, f32
from mlvm.eager import Tensor
from mlvm.step.flow import Call, Flow, Use, Value
from mlvm.step.repeats import without_repeats


def names(flow: Flow) -> list[str]:
    return [call.name.removesuffix(".out") for call in flow.calls]


def call(name: str, *ins: Use, shape: tuple[int, ...] = (), **attributes: Any) -> Call:
    type, op = TensorType(f32, shape), OPS[name]
    out = Use(Value(type.nbytes), type)
    return Call(f"{name}.out", op, op.bind(attributes), [out], list(ins))


def test_a_loop_computes_each_position_once() -> None:
    def ring(a: Tensor) -> Any:
        def body(k: Tensor, a: Tensor) -> Tensor:
            i, j = k // 5 % 5, k % 5
            a[i, j] = a[i - 1, j - 1] + a[i - 1, j] + a[i, j - 1]
            return a

        return ml.fori_loop(0, 25, body, ml.copy(a))

    x = np.random.default_rng(0).random((5, 5))
    step = ml.capture(ring)
    assert step(ml.asarray(x)).numpy().tobytes() == ring(ml.asarray(x)).numpy().tobytes()
    text = ml.disassemble(step.program)
    assert text.count("subtract") == 2
    assert text.count("remainder") == 2


def test_equal_operands_and_attributes() -> None:
    x = Use(Value(4), TensorType(f32, ()))
    first, second = call("tanh", x), call("tanh", x)
    sums = call("add", first.outs[0], x), call("add", second.outs[0], x)
    last = call("multiply", *[each.outs[0] for each in sums])
    flow = Flow([first, second, *sums, last], [last.outs[0].value])
    assert names(without_repeats(flow)) == ["tanh", "add", "multiply"]
    other = call("add", x, first.outs[0])  # the operands have an order
    flow = Flow([first, sums[0], other], [sums[0].outs[0].value, other.outs[0].value])
    assert without_repeats(flow) is flow


def test_zeros_of_both_signs_and_nans_are_different_attributes() -> None:
    other_nan = float(np.array([0x7FF8000000000001]).view(np.float64)[0])
    x = Use(Value(16), TensorType(f32, (4,)))
    for values in ((0.0, -0.0), (float("nan"), other_nan)):
        calls = [call("var", x, correction=value) for value in values]
        last = call("add", *[each.outs[0] for each in calls])
        flow = Flow([*calls, last], [last.outs[0].value])
        assert without_repeats(flow) is flow


def test_results_and_large_values_stay() -> None:
    x, y = Use(Value(4), TensorType(f32, ())), Use(Value(8), TensorType(f32, (2,)))
    results = [call("tanh", x), call("tanh", x)]
    flow = Flow(results, [each.outs[0].value for each in results])
    assert without_repeats(flow) is flow
    large = [call("tanh", y, shape=(2,)), call("tanh", y, shape=(2,))]
    last = call("add", *[each.outs[0] for each in large], shape=(2,))
    flow = Flow([*large, last], [last.outs[0].value])
    assert without_repeats(flow) is flow
