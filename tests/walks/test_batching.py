"""The batching rules: each op for lanes at once, beside the same op for one lane after the other.

The examples are those that the kernels are checked with. Lanes have other values of the same kind.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.core.types import Array
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.transform import batching
from mlvm.step.batch_rules import BATCHING
from tests.brief import with_long
from tests.cases import CASES, Case

LANES = 3
_WITHOUT_OPERANDS = {name for name, op in OPS.items() if not op.inputs}
_DYNAMIC = {name for name, op in OPS.items() if op.dynamic}
_ELEMENTWISE = {name for name, op in OPS.items() if op.elementwise and name != "broadcast_to"}


ROUNDED = {"batch_contract", "layer_norm_scale_vjp", "logaddexp", "quantized_matmul"}
"""Ops outside of the contract of docs/determinism.md, or whose rule computes otherwise."""


def _is_exact(name: str, case: Case, batched: tuple[bool, ...]) -> bool:
    """Return whether a lane has the bits of its operands alone; in a product, x needs lanes."""
    if name == "matmul":
        is_complex = any(x.dtype.kind == "c" for x in case.inputs)
        return batched[0] and not (is_complex or case.attributes.get("transpose_x"))
    return name not in ROUNDED


def test_every_op_broadcasts_or_has_a_rule_or_cannot_have_one() -> None:
    assert OPS.keys() - BATCHING.keys() == _WITHOUT_OPERANDS | _DYNAMIC | _ELEMENTWISE
    assert OPS.keys() >= BATCHING.keys()


def _lane(x: Array, i: int) -> Array:
    """Other elements of the same kind: numbers are scaled, indices and masks in another order."""
    if x.dtype == np.uint64 and x.shape == (2,):
        return x + np.uint64(i)
    if x.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            return (x * [1.0, 0.5, 0.75][i]).astype(x.dtype)
    return np.roll(x, i)


def _is_a_lane_few_bits(name: str, each: list[list[Tensor]], batched: tuple[bool, ...]) -> bool:
    """Return whether lanes have or get a dtype of few bits, which nothing stacks."""
    is_few_bits = any(b and x[0].dtype.is_storage for x, b in zip(each, batched, strict=True))
    return is_few_bits or name == "pack"


def _choices(count: int, *, few: bool) -> list[tuple[bool, ...]]:
    """Return choices of batched operands: any, and of more than four all, one, or all but one; or
    all and one."""
    every = product([True, False], repeat=count)
    sizes = {1, count} if few else {1, count - 1, count} if count > 4 else range(1, count + 1)
    return [batched for batched in every if sum(batched) in sizes]


def _run(name: str, case: Case, xs: list[Tensor]) -> Tensor:
    return apply(one_op(name, **case.attributes), *xs)


@pytest.mark.filterwarnings("ignore::mlvm.eager.tensor.precision.PrecisionWarning")
@pytest.mark.parametrize("name", sorted(OPS.keys() - _WITHOUT_OPERANDS - _DYNAMIC))
def test_lanes_at_once_are_lanes_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first case with any choice of batched operands, with `--long` each. An error
    of a batching rule fails the test; `vmap` would fall back to one lane after the other."""
    refused = f"the batching rule of {name} raised OperandValueError"
    monkeypatch.setattr(batching, "_lane_by_lane", lambda *_: pytest.fail(refused))
    for number, case in enumerate(CASES[name][: 1 if name in _ELEMENTWISE else None]):
        each = [[from_array(_lane(x, i)) for i in range(LANES)] for x in case.inputs]
        first = _run(name, case, [x[0] for x in each]).numpy()
        for batched in _choices(len(each), few=with_long(number > 0, False)):
            if _is_a_lane_few_bits(name, each, batched):
                continue
            axes = tuple([0 if b else None for b in batched])
            xs = [ml.stack(x) if b else x[0] for x, b in zip(each, batched, strict=True)]
            results = ml.vmap(lambda *xs, case=case: _run(name, case, [*xs]), axes)(*xs).numpy()
            for i, one in enumerate(results):
                lane = [x[i if b else 0] for x, b in zip(each, batched, strict=True)]
                expected = _run(name, case, lane).numpy() if i else first
                assert one.dtype == expected.dtype
                assert one.shape == expected.shape
                if _is_exact(name, case, batched):
                    assert one.tobytes() == expected.tobytes()
                elif one.dtype.kind in "fc":
                    eps = np.finfo(one.dtype).eps
                    np.testing.assert_allclose(one, expected, 60 * eps, 60 * eps)
                else:
                    np.testing.assert_array_equal(one, expected)
