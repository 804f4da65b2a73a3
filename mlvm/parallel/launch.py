"""`python -m mlvm launch`: the processes of a group, started again when one of them fails; and
`python -m mlvm mpirun`: processes for an `MpiGroup`."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from mlvm.core.errors import ConnectionLost, GroupError, MissingExtra
from mlvm.core.program.encoding import Kind, open_message
from mlvm.machines.remote.address import Address, TcpAddress, parse_address, shut
from mlvm.machines.remote.secret import VARIABLE
from mlvm.parallel.tcp import SECRET, Link, meet, secret_of, tell

_GRACE: Final = 3.0
"""Seconds that members have to end by themselves when one has failed."""
_START: Final = 300.0
"""Seconds that hosts wait for each other."""
_LOOK: Final = 0.05


def launch(
    members: int,
    command: Sequence[str],
    *,
    restarts: int = 0,
    nodes: int = 1,
    node: int = 0,
    address: str | None = None,
) -> int:
    """Run `processes` processes of this Python with these arguments, as members of one group, which
    `ml.parallel.group("auto")` creates. Return the exit status: 0 if all have succeeded.

    If one fails or is killed, all are ended and restarted, up to `restarts` times; a script resumes
    from its last checkpoint. With several `nodes`, each host runs this command with its number
    `node`. Then `address` is a HOST:PORT of the first host that all reach, where members meet; the
    commands meet at the port after it. The secret is in MLVM_SECRET or MLVM_SECRET_FILE. If a
    member fails on one host, the members of all hosts are restarted; also if a host is lost, once
    its command runs again.

    Raises `GroupError` if a number is invalid, or an address or a secret is missing.
    """
    if members < 1 or nodes < 1 or not 0 <= node < nodes:
        raise GroupError(
            f"a launch is of 1 or more members, on node 0 .. nodes - 1, not of {members} on node "
            f"{node} of {nodes}"
        )
    variables = dict(os.environ)
    if nodes > 1 and address is None:
        raise GroupError("members on several hosts meet at the first one: give --address HOST:PORT")
    if not variables.get(SECRET) and not variables.get(VARIABLE):
        if nodes > 1:
            raise GroupError(f"hosts share a secret: set {SECRET} or {VARIABLE} on each")
        variables[SECRET] = secrets.token_urlsafe(32)
    others = _Launchers(node, nodes, parse_address(address or ":0")) if nodes > 1 else None
    try:
        return _launch_all(members, command, restarts, (nodes, node), address, variables, others)
    finally:
        if others is not None:
            others.close()


def _launch_all(
    members: int,
    command: Sequence[str],
    restarts: int,
    where: tuple[int, int],
    address: str | None,
    variables: dict[str, str],
    others: _Launchers | None,
) -> int:
    """Run the members, and again if some fail. Return the exit status."""
    (nodes, node), attempt = where, 0
    while True:
        if others is not None:
            attempt = others.meet(attempt)
        place = _free_place() if address is None else parse_address(address)
        if not isinstance(place, TcpAddress):
            raise GroupError(f"members meet at HOST:PORT, not at {address}")
        variables |= {
            "WORLD_SIZE": str(members * nodes),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            "MLVM_RESTARTS": str(attempt),
        }
        status, why = _run(members, members * node, command, variables, others)
        if not status or attempt >= restarts:
            return status
        attempt += 1
        text = f"launch: {why}; all members are started again, {attempt} of {restarts} times"
        print(text, file=sys.stderr, flush=True)


def _free_place() -> TcpAddress:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return TcpAddress("127.0.0.1", server.getsockname()[1])


class _Launchers:
    """Connections to the same command on the other hosts: what fails on one restarts all."""

    def __init__(self, node: int, nodes: int, address: Address) -> None:
        if not isinstance(address, TcpAddress):
            raise GroupError(f"hosts meet at HOST:PORT, not at {address}")
        self._node = node
        self._nodes = nodes
        self._address = TcpAddress(address.host, address.port + 1)
        self._secret = secret_of(None, None)
        self._links: dict[int, Link] = {}
        self._done: set[int] = set()

    def meet(self, attempt: int) -> int:
        """Connect to all hosts. Return the number of earlier starts, which the first host counts.
        Raises what `TcpGroup` raises."""
        self.close()
        until = time.monotonic() + _START
        self._links = meet(self._node, self._nodes, self._address, self._secret, until)
        self._done = set()
        if self._node == 0:
            self._tell(("attempt", attempt))
            return attempt
        while True:
            for what, content in self._news(0):
                if what == "attempt":
                    return int(content)
            time.sleep(_LOOK)

    def _news(self, node: int) -> list[tuple[str, Any]]:
        """Return what a host has told. Raises `ConnectionLost` if nothing more can come."""
        link, lost = self._links[node], None
        try:
            link.flush()
            link.receive()
        except ConnectionLost as error:
            lost = error
        news = [open_message(head, Kind.answer)[1].value() for head, _ in link.inbox]
        link.inbox.clear()
        if lost is not None and not news:
            raise lost
        return news

    def failure(self) -> str | None:
        """Return why the members of another host have failed, or None."""
        for node in self._links:
            try:
                for what, content in self._news(node):
                    if what == "failed":
                        return f"node {node}: {content}"
                    self._done.add(node)
            except ConnectionLost as error:
                if node not in self._done:
                    return f"node {node} has left: {error}"
        return None

    def all_done(self) -> bool:
        return len(self._done) == len(self._links)

    def tell_end(self, failure: str) -> None:
        """Tell the others that the members of this host have failed, or have all succeeded."""
        self._tell(("failed", failure) if failure else ("done", None))

    def _tell(self, what: tuple[str, Any]) -> None:
        for link in self._links.values():
            tell(link, what)

    def close(self) -> None:
        for link in self._links.values():
            with suppress(ConnectionLost):
                link.flush()
            shut(link.socket, socket.SHUT_WR)
            link.socket.close()
        self._links = {}


def _run(
    members: int,
    first: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    others: _Launchers | None = None,
) -> tuple[int, str]:
    """Run the members until all have ended, or one has failed: its exit status, and what was."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    running: dict[int, subprocess.Popen[bytes]] = {}
    before = _heed_signals()
    try:
        for local in range(members):
            own = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            processes[first + local] = subprocess.Popen(
                [sys.executable, *command],
                env={**variables, **own, "LOCAL_WORLD_SIZE": str(members)},
            )
        running = dict(processes)
        while running or (others is not None and not others.all_done()):
            for rank, process in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[rank]
                if status:
                    as_of_a_shell = 128 - status if status < 0 else status
                    failure = f"member {rank} {_how(status)}"
                    if others is not None:
                        others.tell_end(failure)
                    return as_of_a_shell, failure
                if others is not None and not running:
                    others.tell_end("")
            if others is not None and (elsewhere := others.failure()) is not None:
                return 1, elsewhere
            time.sleep(_LOOK)
        return 0, ""
    finally:
        try:
            _end(list(processes.values()))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _heed_signals() -> dict[signal.Signals, Any]:
    """Raise `SystemExit` on signals that end this process, so that no member is left. Return the
    previous handlers, if this is the main thread."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
    return {
        number: signal.signal(number, end)
        for number in filter(None, heard)
        if signal.getsignal(number) is signal.SIG_DFL  # as nohup ignores SIGHUP
    }


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with status {code}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that run to end, after a moment in which they may say why they fail, and kill them
    where they do not."""
    for seconds, end in ((1.0, subprocess.Popen.terminate), (_GRACE, subprocess.Popen.kill)):
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(each.poll() is None for each in processes):
            time.sleep(_LOOK)
        for process in processes:
            if process.poll() is None:
                end(process)
    for process in processes:
        process.wait()


def mpirun(processes: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by an `mpiexec` that runs `processes` processes of this Python with
    these arguments.

    It is the one in this Python's folder, from the package mpich, or else the system's. Raises
    `GroupError` if `processes` is below 1, `MissingExtra` without mpi4py or any mpiexec.
    """
    if processes < 1:
        raise GroupError(f"mpirun: expected 1 or more processes, got {processes}")
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingExtra('mpi4py is not installed: pip install "mlvm[mpi]"')
    folder = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=folder) or shutil.which("mpiexec")
    if mpiexec is None:
        raise MissingExtra('there is no mpiexec: pip install "mlvm[mpi]"')
    sys.stdout.flush()
    os.execv(mpiexec, [mpiexec, "-n", str(processes), sys.executable, *command])
