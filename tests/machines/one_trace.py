"""A captured function of any number of rows, on VMs elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ShapeError
from tests.brief import refuses
from tests.trees import bits


def assert_one_trace_serves_all_lengths(vm: Any) -> None:
    """Check that at each length the bits are those of eager calls, values and gradients."""

    def fn(x: ml.Tensor) -> Any:
        n = x.shape[0]
        after, _ = ml.scan(lambda s, row: (ml.tanh(s + row), None), ml.zeros(3), x)
        slope = ml.grad(lambda x: ml.mean(ml.tanh(x @ ml.ones((3, 5)) + 1.0) ** 2))(x)
        return ml.concat([ml.softmax(x[: n // 2] / n, axis=0), after[None]]), slope

    plans = set()
    step = ml.capture(fn, dynamic_axes={"x": ("n", None)}, max_sizes={"n": 12})
    with ml.use(vm):
        for n in (5, 12, 2, 9, 5):
            x = ml.asarray(np.random.default_rng(n).standard_normal((n, 3), np.float32))
            assert bits(step(x)) == bits(fn(x))
            plans.add(step.plan.nbytes)
        assert len(plans) == step.signatures == 1
        refuses(
            ShapeError,
            "at most 12 as 'n' \\(axis 0 of x\\), got 13",
            lambda: step(ml.ones((13, 3))),
        )
