"""Call the C functions of `functions.c`: from a program, from assembly text, from eager code with a
gradient, and in the place of what a captured step computes.

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
    return ml.sum(ml.host_call("softclip", x, limit=LIMIT, vjp=clip_vjp))


def layer(x: ml.Tensor, w: ml.Tensor, b: ml.Tensor) -> ml.Tensor:
    """Return the pattern that `dense` of the library replaces."""
    return ml.relu(x @ w + b)


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
    print("ml.host_call:  ", ml.host_call("softclip", x, limit=LIMIT).numpy().round(3))
    print("gradient: ", ml.grad(loss)(x).numpy().round(3))

types = [ml.TensorType("f32", shape) for shape in ((8, 16), (16, 32), (32,))]
with ml.Arena(vm, "weights").allocating():
    ml.testing.replacement(layer, "dense", *types)
    first, second = (
        ml.nn.Linear(16, 32, key=ml.random.key(0)),
        ml.nn.Linear(32, 4, key=ml.random.key(1)),
    )
    x = ml.random.normal((8, 16), key=ml.random.key(2))

    def step(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.relu(second(ml.relu(first(x)))))

    replaced = ml.capture(step, replace={layer: "dense"})
    close = ml.allclose(replaced(x), step(x), rtol=1e-5)
    print("replaced: ", len(replaced.replaced["dense"]), "calls of dense, as eager:", bool(close))
