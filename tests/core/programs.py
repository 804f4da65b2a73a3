"""Short ways to write programs and to fill tensors, for the tests of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.program import Instruction, Opcode, Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM

ADD_INTO = Program.of_op("add.out", 3, {}, 0)
"""Arguments z, x, y: z = x + y."""


def instruction(opcode: str, *immediates: Any) -> Instruction:
    """`instruction("cfunc", 2, 1)`."""
    return Instruction(next(o for o in Opcode if o.text == opcode), immediates)


def straight(*code: tuple[Any, ...] | str) -> Program:
    """`straight(("load_arg", 0), ("push_str", "negative"), ("cfunc", 1, 1), "halt")`."""
    return Program.straight([instruction(*([x] if isinstance(x, str) else x)) for x in code])


def f32s(*values: float) -> Array:
    return np.array(values, np.float32)


def put(vm: VM, array: Array) -> TensorHandle:
    """A new tensor of the VM with a copy of the array."""
    handle = vm.alloc_tensor(TensorType.of(array))
    vm.write(handle, array)
    return handle
