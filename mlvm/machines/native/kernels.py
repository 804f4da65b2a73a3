"""The native kernels as the machine's table of kernels takes them: functions of arrays."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Final

from mlvm.core.machine.callee import Kernels
from mlvm.core.op import OPS, Attributes, Kernel
from mlvm.core.types import Array, TensorType
from mlvm.machines.native import twins
from mlvm.machines.native._native import Plan, Pool
from mlvm.machines.native.twin import TWINS, Twin, Types

for _room in pkgutil.iter_modules(twins.__path__):
    importlib.import_module(f"{twins.__name__}.{_room.name}")

_MOST_PLANS: Final = 4096


class NativeKernel:
    """A kernel that runs its twin's plan, or what it stands for where there is none.

    Values that the plan refuses go to the reference kernel, which says what is wrong with them.
    """

    def __init__(self, prepare: Twin, reference: Kernel, pool: Pool) -> None:
        self._prepare = prepare
        self._reference = reference
        self._pool = pool
        self._plans: dict[Any, Plan | None] = {}

    def plan(self, types: Types, attributes: Attributes) -> Plan | None:
        """The plan for a result and operands of these types; None if the reference kernel runs."""
        key = tuple(types), repr(attributes) if attributes else ""
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._prepare(types, attributes)
        return self._plans[key]

    def __call__(self, *arrays: Array, **attributes: Any) -> None:
        plan = self.plan([TensorType.of(x) for x in arrays], attributes)
        if plan is None or not plan.run(self._pool, *arrays):
            self._reference(*arrays, **attributes)


def native_kernels(pool: Pool) -> Kernels:
    """A native kernel for each op that has a twin. They share the pool's threads."""
    return {name: NativeKernel(prepare, OPS[name].kernel, pool) for name, prepare in TWINS.items()}
