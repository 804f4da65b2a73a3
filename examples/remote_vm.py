"""A training on a remote machine: the program is here, tensors and steps are there.

`python -m mlvm serve` lends VMs; here it is started on this host, on a free port, with
a secret. Only the lines that connect differ from a local training. A captured step is one small
message, so the distance of the machine does not matter.

    python examples/remote_vm.py
"""

import json
import secrets
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


@contextmanager
def served(secret_file):
    """Return the address of a server that ends with the block."""
    command = [sys.executable, "-m", "mlvm", "serve", "--listen", "127.0.0.1:0"]
    command += ["--secret-file", secret_file, "--log", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stderr.readline())["address"]
        finally:
            server.terminate()
            server.communicate()


def train(vm, steps):
    """Return the losses, and the weights, of training on that VM."""
    rng = np.random.default_rng(0)
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        first = nn.Linear(8, 32, key=ml.random.key(0))
        last = nn.Linear(32, 1, key=ml.random.key(1))
        model = nn.Sequential(first, ml.tanh, last)
        optimizer = ml.optim.Adam(model, 1e-2)

    def loss_of(model, x, y):
        return ml.mean_squared_error(model(x), y)

    @ml.capture
    def train_step(x, y):
        loss, gradients = ml.value_and_grad(loss_of)(model, x, y)
        optimizer.update(gradients)
        return loss

    losses = []
    for _ in range(steps):
        x = rng.standard_normal((64, 8), np.float32)
        with batch:
            losses.append(float(train_step(x, np.sin(x.sum(axis=1, keepdims=True)))))
    return losses, {name: x.numpy() for name, x in model.state().items()}


def main(steps=300):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "secret"
        file.touch(mode=0o600)  # nobody else may read it
        file.write_text(secrets.token_urlsafe(32))
        with served(file) as address, ml.connect(address, secret_file=file) as vm:
            print(f"{vm}")
            there, weights_there = train(vm, steps)
    here, weights_here = train(ml.VM(), steps)
    same = all(np.array_equal(weights_here[name], weights_there[name]) for name in weights_here)
    print(f"there: loss {there[0]:.3f} -> {there[-1]:.3f}")
    print(f"here the same losses, {here == there}, and the same weights to the bit, {same}")
    return there, here, same


if __name__ == "__main__":
    main()
