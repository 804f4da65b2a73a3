"""Ops that raise for some values of their operands: `may_raise` at `@op`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mlvm.core.errors import OperandValueError
from mlvm.core.op import OPS
from mlvm.core.types import Array
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import from_array
from tests.cases import CASES

SELDOM = {"det_vjp", "eig", "eigh", "eigvals", "eigvalsh"}
"""Ops that raise only where LAPACK's iteration does not converge."""


def extremes(x: Array) -> Iterator[Array]:
    """Yield operands of the same type that have one extreme value throughout."""
    if x.dtype.kind in "fc":
        values: tuple[float, ...] = (np.nan, np.inf, -np.inf, -1.0, 0.0, 1e30)
    elif x.dtype.kind in "iu":
        limits = np.iinfo(x.dtype)
        values = (0, limits.min, limits.max, max(limits.min, -1))
    else:
        values = (False, True) if x.dtype.kind == "b" else ()
    for value in values:
        with np.errstate(all="ignore"):
            yield np.full_like(x, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OPS.keys() - SELDOM))
def test_an_op_raises_for_some_values_if_it_says_so(name: str) -> None:
    raised = []
    for case in CASES[name]:
        for i, x in enumerate(case.inputs):
            for extreme in extremes(x):
                operands = [*case.inputs[:i], extreme, *case.inputs[i + 1 :]]
                try:
                    apply(one_op(name, **case.attributes), *map(from_array, operands))
                except OperandValueError as error:
                    raised.append(str(error))
    assert bool(raised) == OPS[name].may_raise, raised[:1]
