"""Members on three hosts of a network of this computer: network namespaces, with IPv6 alone, 10
Mbit/s, hosts of other names, and partitions. Needs root and `ip` of iproute2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.brief import ROOT, line_of
from tests.parallel import places
from tests.parallel.joined import SECRET

SIZE = 3

PROGRAM = """
import json, socket, sys, time
from mlvm.core.errors import GroupError
from mlvm.parallel.tcp import TcpGroup
from tests.parallel import places
rank, timeout, rounds = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
with TcpGroup(rank, 3, "[fd00::1]:29500", timeout=timeout, start=60) as group:
    names = group.run(lambda rank, vm: socket.gethostname())
    print(json.dumps(names), flush=True)
    for number in range(rounds):
        try:
            digests = group.run(places.everything if number else places.reduce)
        except GroupError as error:
            print(json.dumps(str(error)), flush=True)
            break
    else:
        print(json.dumps(digests), flush=True)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """Hosts, which a bridge connects."""

    def __init__(self, mark: str) -> None:
        self.switch = f"mlvm-{mark}"
        self.hosts = [f"{self.switch}-{rank}" for rank in range(SIZE)]

    def set_up(self) -> None:
        for name in (self.switch, *self.hosts):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for rank, host in enumerate(self.hosts):
            port = f"port{rank}"
            peer = ["type", "veth", "peer", "name", "eth0", "netns", host]
            run("ip", "-n", self.switch, "link", "add", port, *peer)
            run("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            address = [f"fd00::{rank + 1}/64", "dev", "eth0", "nodad"]
            run("ip", "-n", host, "addr", "add", *address)
            run("ip", "-n", host, "link", "set", "eth0", "up")
            slow = ["rate", "10mbit", "burst", "32kbit", "latency", "400ms"]
            run("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", *slow)

    def plug(self, rank: int, state: str) -> None:
        run("ip", "-n", self.switch, "link", "set", f"port{rank}", state)

    def tear_down(self) -> None:
        for name in (*self.hosts, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(str(os.getpid()))
    try:
        network.set_up()
        yield network
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"namespaces need root and iproute2: {error}")
    finally:
        network.tear_down()


@contextmanager
def members(
    network: Network, folder: Path, timeout: float, rounds: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the members, on hosts of different names."""
    script = folder / "member.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "MLVM_SECRET": SECRET, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        started = []
        for rank, host in enumerate(network.hosts):
            inside = (
                f"hostname host{rank}; exec {sys.executable} {script} {rank} {timeout} {rounds}"
            )
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", inside],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


def test_a_partition_of_seconds_changes_no_bit(network: Network, tmp_path: Path) -> None:
    with members(network, tmp_path, timeout=60, rounds=2) as started:
        for process in started:
            assert json.loads(line_of(process)) == ["host0", "host1", "host2"]
        network.plug(2, "down")
        time.sleep(3)
        network.plug(2, "up")
        for rank, process in enumerate(started):
            out, errors = process.communicate(timeout=300)
            assert json.loads(out) == places.expected_of_everything(SIZE), (rank, errors)


def test_who_is_cut_off_is_named_within_the_timeout(network: Network, tmp_path: Path) -> None:
    with members(network, tmp_path, timeout=8, rounds=10**6) as started:
        for process in started:
            line_of(process)
        network.plug(1, "down")
        for rank in (0, 2):
            out, errors = started[rank].communicate(timeout=60)
            # In a collective, or at the end of a run that member 1 has not ended.
            assert re.search(r"has waited 8 s .*for (the end of )?member 1 \(vm1\)", out), errors
