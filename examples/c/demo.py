"""Call the C functions of `functions.c`: from a program, from assembly text, and from eager
code with a gradient.

make example-c
python examples/c/demo.py [LIBRARY]
"""

from __future__ import annotations

import sys

import numpy as np

import mlvm.eager as ml
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import STAR, Program
from mlvm.core.types import TensorType

RANGE = """
.func main 0 *                  ; the greatest minus the least element of argument 0
    load_arg 0
    push_str "min_max"
    cfunc 1 2
    get 1
    get 0
    push_str "subtract"
    cfunc 2 1
    set 0
    pop 1
    halt
"""
LIMIT = 2.0


def clip_vjp(g: ml.Tensor, x: ml.Tensor, out: ml.Tensor) -> ml.Tensor:
    """The derivative of limit tanh(x / limit) is 1 - tanh(x / limit)**2."""
    return g * (1.0 - (out / LIMIT) ** 2)


def loss(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.call("softclip", x, limit=LIMIT, vjp=clip_vjp))


vm = ml.VM()
print("registered:", *vm.register_library(sys.argv[1] if sys.argv[1:] else "build/example_c.so"))

numbers = np.array([3, -4, 7, 0])
handle = vm.alloc_tensor(TensorType.of(numbers))
vm.write(handle, numbers)
least, greatest = vm.launch(Program.of_op("min_max", 1, {}, STAR), [handle])
print("program:   least", least, "greatest", greatest)
[width] = vm.launch(assemble(RANGE), [handle])
print("assembly:  range", width)

with ml.Arena(vm, "demo"):
    x = ml.asarray([-8.0, 0.0, 1.0])
    print("ml.call:  ", ml.call("softclip", x, limit=LIMIT).numpy().round(3))
    print("gradient: ", ml.grad(loss)(x).numpy().round(3))
