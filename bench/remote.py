"""Cost of a remote VM: the same work on a VM of this process, and on a server's VM on this host, by
a unix socket and by TCP.

`round trip` is a call that does nothing. `write` and `read` move a tensor of 64 MiB. `add` is one
eager `a + b` on f32[4,4], in a long row of them, the last of which is read. `mixer eager` and
`mixer captured` are steps of training MLP-Mixer at the size of CIFAR, whose losses are read.
"""

from __future__ import annotations

import atexit
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness import BenchError, Contender, Round, Suite, microseconds
from bench.sizes import MIXERS

MOVED: Final = 64 << 20
TRIPS: Final = 1000
ADDS: Final = 5000


def local() -> Any:
    import mlvm.eager as ml

    return ml.VM("local")


def elsewhere(listen: Callable[[Path], str]) -> Any:
    """Return a VM of a server that is started here, and ends with this process."""
    import mlvm.eager as ml

    folder = Path(tempfile.mkdtemp(prefix="mlvm-bench-"))
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_urlsafe(32))
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlvm", "serve", "--listen", listen(folder)),
            *("--secret-file", str(secret), "--log", "json"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    assert server.stderr is not None
    line = server.stderr.readline()
    if '"listening"' not in line:
        raise BenchError(f"the server does not listen: {line}{server.stderr.read()}")
    vm = ml.connect(json.loads(line)["address"], secret_file=secret)
    atexit.register(vm.close)
    return vm


def prepare(make: Callable[[], Any], quick: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml
    from bench.mlvm_training import Training
    from mlvm.core.types import TensorType

    vm = make()
    moved = np.random.default_rng(0).integers(255, size=MOVED, dtype=np.uint8)
    handle = vm.alloc_tensor(TensorType.of(moved))
    arena, batch = ml.Arena(vm, "operands"), ml.Arena(vm, "sums")
    with arena.allocating():
        a, b = ml.ones((4, 4)), ml.ones((4, 4))

    def write() -> None:
        vm.write(handle, moved)
        vm.consumed_size_in_mib()  # waits till it is there

    def trips() -> None:
        for _ in range(TRIPS):
            vm.consumed_size_in_mib()

    def adds() -> None:
        with batch:
            for _ in range(ADDS):
                a + b
            (a + b).numpy()

    gigabyte = 1e9 / MOVED
    training = Training(MIXERS["tiny" if quick else "cifar"], vm)
    steps = 1 if quick else 2

    def several(step: Callable[[], object]) -> Mapping[str, float]:
        return {"step_ms": microseconds(lambda: [step() for _ in range(steps)]) / steps / 1e3}

    return {
        "round trip": lambda: {"us": microseconds(trips) / TRIPS},
        "write": lambda: {"gb_s": 1e6 / (microseconds(write) * gigabyte)},
        "read": lambda: {"gb_s": 1e6 / (microseconds(lambda: vm.read(handle)) * gigabyte)},
        "add": lambda: {"us": microseconds(adds) / ADDS},
        "mixer eager": partial(several, training.eager),
        "mixer captured": partial(several, training.replay),
    }


SUITE = Suite(
    module="bench.remote",
    contenders=(
        Contender("local", "mlvm", partial(prepare, local)),
        Contender(
            "unix", "mlvm", partial(prepare, partial(elsewhere, lambda at: f"unix:{at}/server"))
        ),
        Contender("tcp", "mlvm", partial(prepare, partial(elsewhere, lambda _: "127.0.0.1:0"))),
    ),
    units={"us": "us", "gb_s": "GB/s", "step_ms": "ms"},
    rates=frozenset({"gb_s"}),
    ours=("unix", "tcp"),
    targets={
        (case, metric, ours, "local"): 1 / most
        for case, metric, most in (
            ("mixer eager", "step_ms", 1.15),
            ("mixer captured", "step_ms", 1.03),
            ("add", "us", 2.5),
        )
        for ours in ("unix", "tcp")
    },
    limits={("round trip", "us", "unix"): 40, ("round trip", "us", "tcp"): 60},
    rounds=11,
)
