"""Every refusal of every op, on the reference machine and over the wire."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.op import OPS
from mlvm.core.types import TensorType
from tests.brief import refuses
from tests.cases.refusals import REFUSALS, Refusal
from tests.walks.crossing import crossed
from tests.walks.test_machines import MACHINES


@pytest.mark.parametrize("machine", ["reference", "wire"])
@crossed(cases=REFUSALS)
def test_an_op_refuses(name: str, case: Refusal, machine: str) -> None:
    types = [TensorType.parse(each) for each in case.types]
    operands = [np.zeros(each.array_shape, each.dtype.numpy) for each in types]
    error = refuses(case.error, "", MACHINES[machine], name, *operands, **case.attributes)
    assert case.message in str(error)
    assert str(error).startswith(f"{name}(")


def test_every_refusal_is_of_an_op() -> None:
    assert REFUSALS.keys() <= OPS.keys()
