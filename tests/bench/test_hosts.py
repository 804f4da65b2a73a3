"""Two hosts, as two network namespaces with a slow link between them: training over MPI takes no
less time than the lower bound of `bench.cost`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from bench.cost import Link, step_time
from tests.brief import ROOT

RATE: Final = 100e6 / 8  # bytes a second
WITHOUT_HEADERS: Final = 1448 / 1514  # of a frame of Ethernet with TCP

OWN_MEMORY: Final = "mount -t tmpfs tmpfs /dev/shm"  # which ends with the members

LAUNCHER: Final = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in 10.77.0.1) host={names[0]};; *) host={names[1]};; esac
shift
exec ip netns exec $host sh -c "{memory} && $*"
"""

SCRIPT: Final = """
import json, statistics, sys, time
import numpy as np
import mlvm.eager as ml

@ml.parallel.value_and_grad
def loss_and_grads(model, x):
    return ml.mean(ml.square(model(x)))

def make_step(vm):
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = ml.nn.Sequential(*[ml.nn.Linear(512, 512, key=ml.random.key(i)) for i in range(3)])
        optimizer = ml.optim.SGD(model, 0.1)

    @ml.capture
    def improve(x):
        loss, grads = loss_and_grads(model, x)
        optimizer.update(grads)
        return loss

    def step(x):
        with batch:
            return float(improve(ml.asarray(x)))

    return step

def timed(group):
    step = ml.parallel.data_parallel(make_step, group)
    x = np.ones((32 * group.size, 512), np.float32)
    losses, seconds = [], []
    for _ in range(7):
        began = time.perf_counter()
        losses.append(step(x))
        seconds.append(time.perf_counter() - began)
    return losses, statistics.median(seconds[1:])

with ml.parallel.Group(1) as alone:
    _, compute = timed(alone)
group = ml.parallel.MpiGroup()
losses, seconds = timed(group)
if group.rank == 0:
    print(json.dumps([losses, compute, seconds]))
"""


class Hosts(NamedTuple):
    """Two namespaces, and the latency that is set between them."""

    names: tuple[str, str]
    latency: float


def tried(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """The namespaces; the test is skipped where the system cannot make them."""
    if not all(map(shutil.which, ("ip", "tc"))) or os.geteuid():
        pytest.skip("network namespaces need iproute2 and root")
    names = f"mlvm{os.getpid()}a", f"mlvm{os.getpid()}b"
    latency = 1e-3
    try:
        if not all(tried("ip", "netns", "add", name) for name in names):
            pytest.skip("this system makes no network namespace")
        pair = ["ip", "link", "add", "v", "netns", names[0], "type", "veth"]
        if not tried(*pair, "peer", "name", "v", "netns", names[1]):
            pytest.skip("this system makes no link between namespaces")
        for number, name in enumerate(names, 1):
            assert tried("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "v")
            assert tried("ip", "-n", name, "link", "set", "v", "addrgenmode", "none")  # no IPv6
            assert tried("ip", "-n", name, "link", "set", "v", "up")
            assert tried("ip", "-n", name, "link", "set", "lo", "up")
            root = ["tc", "-n", name, "qdisc", "add", "dev", "v", "root"]
            if not tried(*root, "netem", "delay", "1ms", "rate", "100mbit", "limit", "10000"):
                latency = 50e-6  # a kernel without delays: a slow link, at least
                if not tried(*root, "tbf", "rate", "100mbit", "burst", "32k", "latency", "400ms"):
                    pytest.skip("this system does not slow a link down")
        yield Hosts(names, latency)
    finally:
        for name in names:
            tried("ip", "netns", "del", name)


def test_training_between_hosts_takes_no_less_time_than_the_model_says(
    hosts: Hosts, tmp_path: Path
) -> None:
    pytest.importorskip("threadpoolctl")
    pytest.importorskip("mpi4py")
    folder = str(Path(sys.executable).parent)
    launch = shutil.which("mpiexec", path=folder) or shutil.which("mpiexec")
    help_text = subprocess.run(
        [launch or "false", "--version"], capture_output=True, text=True, check=False
    )
    if launch is None or "HYDRA" not in help_text.stdout:
        pytest.skip("only MPICH's mpiexec takes a launcher of one's own")
    launcher, script = tmp_path / "launcher", tmp_path / "script.py"
    launcher.write_text(LAUNCHER.format(names=hosts.names, memory=OWN_MEMORY))
    launcher.chmod(0o700)
    script.write_text(SCRIPT)
    options = ["-launcher", "ssh", "-launcher-exec", str(launcher), "-localhost", "10.77.0.1"]
    members = ["-hosts", "10.77.0.1,10.77.0.2", "-ppn", "1", "-n", "2"]
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "v", "MPIR_CVAR_NOLOCAL": "1"}
    inside = ["ip", "netns", "exec", hosts.names[0], "sh", "-c", f'{OWN_MEMORY} && exec "$@"', "sh"]
    for _ in range(5):
        done = subprocess.run(
            [*inside, launch, *options, *members, sys.executable, str(script)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OPENBLAS_NUM_THREADS": "1",
                "UCX_LOG_LEVEL": "error",
                **network,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if "Destination is unreachable" not in done.stderr:
            break  # as UCX finds now and then, before anything has run
    assert done.returncode == 0, done.stderr
    losses, compute, seconds = json.loads(done.stdout)
    assert losses == sorted(losses, reverse=True)
    link = Link(RATE * WITHOUT_HEADERS, hosts.latency)
    nbytes = 3 * 4 * (512 * 512 + 512)
    expected = step_time(compute, nbytes, 2, link.bandwidth, link.latency)
    print(compute, seconds, expected)
    assert seconds > 0.9 * expected  # the link holds a few frames before it limits the rate
