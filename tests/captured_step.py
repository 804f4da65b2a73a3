"""`python tests/captured_step.py`: a small captured training step on the native machine.

It tells whether a wheel works that was just built: `[tool.cibuildwheel]` and `test_packaging` run
it. It fails where the extension was not built.
"""

from __future__ import annotations

import mlvm.eager as ml
from mlvm.machines.native import extension

print(extension.status())
with ml.Arena(ml.VM(native=True, threads=2), "weights").allocating():
    model = ml.nn.Sequential(ml.nn.Linear(8, 32), ml.gelu, ml.nn.Linear(32, 1))
    optimizer = ml.optim.AdamW(model, 1e-2)
    inputs = ml.random.normal((16, 8), key=ml.random.key(0))
    targets = ml.sum(inputs, axis=1, keepdims=True)

    @ml.capture
    def train_step(inputs: ml.Tensor, targets: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(lambda model: ml.mean((model(inputs) - targets) ** 2))(
            model
        )
        optimizer.update(gradients)
        return loss

    losses = [float(train_step(inputs, targets)) for _ in range(20)]
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 2
