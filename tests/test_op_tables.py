"""The facts of an op are declared at `@op`; every other table by op name is listed here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import mlvm
from mlvm.core.op import OPS

TABLES = {
    "eager.autodiff.rules.VJPS",
    "eager.tensor.op_docs.WITH_WHERE",
    "machines.gpu.elementwise._BY_LANES",
    "machines.gpu.elementwise._IS",
    "machines.gpu.elementwise._VECTORS",
    "machines.gpu.elementwise._WRAPS",
    "machines.gpu.reductions._FOLDS",
    "machines.native.planners.rows._NS",
    "onnx.bodies.CASTS",
    "onnx.bodies._FLOATING",
    "step.batch_rules.BATCHING",
    "step.half_inputs._READ",
    "step.panels._RULES",
}
"""Tables of facts that belong to another layer: gradients, or the code of one machine."""

REGISTRIES = {
    "core.op.OPS",
    "machines.gpu.kernels.KERNELS",
    "machines.native.planner.HALVES",
    "machines.native.planner.PLANNERS",
    "onnx.bodies.BODIES",
}
"""Tables that decorators of functions fill."""

OTHERS = {
    "core.ops.indexing._BY",
    "eager.autodiff.rules_linalg.DECOMPOSITIONS",
    "eager.autodiff.rules_linalg.TRANSFORMS",
    "eager.tensor.apply._DYNAMIC_IN_C",
    "eager.tensor.primitives.__all__",
    "eager.tensor.update._SIGNS",
    "machines.gpu.elementwise.ELEMENTWISE",
    "parallel.communicator._UFUNCS",
    "step.batch_rules._EXACT",
}
"""Parts of these tables, names derived from them, signs of operators, and functions of numpy."""


def test_there_is_no_other_table_by_op_name() -> None:
    found = set()
    for info in pkgutil.walk_packages(mlvm.__path__, "mlvm."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            is_table = isinstance(value, (dict, set, frozenset, tuple, list)) and len(value) > 1
            if not is_table or not all(isinstance(key, str) and key in OPS for key in value):
                continue
            if re.search(rf"^{name}\b.*=", inspect.getsource(module), re.M):  # not imported
                found.add(f"{info.name.removeprefix('mlvm.')}.{name}")
    assert found == TABLES | REGISTRIES | OTHERS
