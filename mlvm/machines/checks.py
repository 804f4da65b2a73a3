"""Host function that raises an error if a condition is False.

machine.check {"message": m}    ( c -- )    raises `CheckError` with m where c, a bool, is False
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlvm.core.errors import CheckError
from mlvm.core.machine.callee import is_tensor
from mlvm.core.machine.frame import Frame, PythonFunction
from mlvm.core.types import Array
from mlvm.core.vm import VM

CHECK: Final = "machine.check"


def register(vm: VM) -> None:
    """Register the host function on the VM."""
    read = vm.memory.read

    def check(frame: Frame) -> None:
        [condition] = map(read, filter(is_tensor, [frame.param(0)]))
        if not condition.all():
            raise CheckError(f"{frame.attributes['message']}{_where(condition)}")

    vm.register_callees({CHECK: PythonFunction(CHECK, check, 1, 0, slice(None))})


def _where(condition: Array) -> str:
    """Describe the count of False elements and the index of the first; empty for one element."""
    if condition.size == 1:
        return ""
    first = [int(i) for i in np.unravel_index(np.argmin(condition), condition.shape)]
    count = condition.size - np.count_nonzero(condition)
    return f": {count} of {condition.size} are False, the first at {first}"
