"""Rows of tests/cases/claims/ops.txt hold by the reference and native kernels, and rows of
op_types.txt over the wire, too."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.ops.block_memory import BLOCK_SIZE as BLOCK_SIZE
from mlvm.core.ops.windows import resolve_padding as resolve_padding
from mlvm.core.types import Array, TensorType
from mlvm.machines.native import extension
from tests.brief import Fn
from tests.cases.claim_tests import claims
from tests.cases.evaluate import evaluate
from tests.walks.test_machines import wired

KEY: Final = np.array([42, 0], np.uint64)
OF_NOTHING = {"sum": 0.0, "prod": 1.0, "mean": np.nan}
OF_NOTHING |= {"var": np.nan, "logsumexp": -np.inf, "all": True, "any": False}
OF_A_SCALAR: Final[dict[str, Any]] = {
    "flip": {}, "roll": {"shift": 1}, "pad": {"widths": ()}, "slice": {"start": (), "length": ()},
    "embed": {"shape": (), "start": ()},
}  # fmt: skip
OF_A_SCALAR["slice"]["step"] = OF_A_SCALAR["embed"]["step"] = ()
MACHINES: dict[str, Fn] = {"reference": evaluate, "wire": wired}
if extension.EXTENSION is not None:
    from tests.machines.native.planners import native, planned

    def natively(name: str, *inputs: Any, **attributes: Any) -> Array:
        arrays = [np.asarray(x) for x in inputs]
        run = native if planned(name, *arrays, **attributes) else evaluate
        return run(name, *arrays, **attributes)

    MACHINES["native"] = natively


class Ops:
    """The ops of a machine, as functions of arrays."""

    def __init__(self, machine: str) -> None:
        self.run = MACHINES[machine]

    def __getattr__(self, name: str) -> Fn:
        return partial(self.run, name)


def of(types: str) -> list[Array]:
    """Zeros of these types."""
    parsed = map(TensorType.parse, types.split())
    return [np.zeros(each.array_shape, each.dtype.numpy) for each in parsed]


def f32(*shape: int) -> Array:
    return np.random.default_rng(11).standard_normal(shape).astype(np.float32)


def out(name: str, *types: str, **attributes: Any) -> str:
    """The type of the op's result."""
    return str(OPS[name].infer([TensorType.parse(x) for x in types], OPS[name].bind(attributes)))


def flops(name: str, *types: str, **attributes: Any) -> int:
    operands, bound = [TensorType.parse(x) for x in types], OPS[name].bind(attributes)
    result = OPS[name].infer(operands, bound)
    assert result is not None
    return OPS[name].flops(operands, result, bound)


test_the_reference_refuses = claims("op_types", globals() | {"f": Ops("reference")})
test_the_wire_refuses = claims("op_types", globals() | {"f": Ops("wire")})
test_the_reference_kernels = claims("ops", globals() | {"f": Ops("reference")})
if "native" in MACHINES:
    test_the_native_kernels = claims("ops", globals() | {"f": Ops("native")})
