"""Commands that start the processes of a group: `python -m mlvm launch` and `mpirun`.

`launch` restarts all processes when one of them fails. `mpirun` starts processes for an `MpiGroup`.
"""

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

from mlvm.core.errors import ConnectionLostError, GroupError, MissingExtraError
from mlvm.core.program.encoding import Kind, open_message
from mlvm.machines.failure import killed_by
from mlvm.machines.remote.address import Address, TcpAddress, parse_address, shut
from mlvm.machines.remote.secret import VARIABLE
from mlvm.parallel.tcp import SECRET, TcpLink, meet, secret_of, tell

_GRACE: Final = 3.0
"""Seconds after the failure of a member in which the other members may exit by themselves."""
_START: Final = 300.0
"""Seconds that the hosts wait for each other."""
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
    """Run processes of this Python as the members of a group, and return the exit status.

    The status is 0 if all members have succeeded. Each member creates the group by
    `ml.parallel.group("auto")`. If a member fails or is killed, all members are stopped and
    restarted. A script resumes from the last checkpoint.

    With several `nodes`, each host runs this command with a different number `node`. If a member
    fails on one host, the members of all hosts are restarted. If a host is lost, they are restarted
    when the command runs on that host again. The secret is in MLVM_SECRET or MLVM_SECRET_FILE.

    Arguments:
        members: the number of processes on this host.
        command: the arguments of each process: a script or `-m` and a module, and its arguments.
        restarts: the largest number of restarts.
        nodes: the number of hosts.
        node: the number of this host, 0 .. nodes - 1.
        address: HOST:PORT of the first host, where the members meet. The commands meet at the next
            port.

    Raises `GroupError` if a number is invalid, or the address or the secret is missing.
    """
    if members < 1 or nodes < 1 or not 0 <= node < nodes:
        raise GroupError(
            f"launch: expected members >= 1 and a node of 0 .. nodes - 1, got {members} members "
            f"and node {node} of {nodes}"
        )
    variables = dict(os.environ)
    if nodes > 1 and address is None:
        raise GroupError("launch on several hosts needs --address HOST:PORT of the first host")
    if not variables.get(SECRET) and not variables.get(VARIABLE):
        if nodes > 1:
            raise GroupError(f"launch on several hosts needs a secret: set {SECRET} or {VARIABLE}")
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
    """Run the members until all succeed or no restart is left. Return the exit status."""
    (nodes, node), attempt = where, 0
    while True:
        if others is not None:
            attempt = others.meet(attempt)
        place = _free_place() if address is None else parse_address(address)
        if not isinstance(place, TcpAddress):
            raise GroupError(f"launch: expected the address HOST:PORT, got {address}")
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
    """Connections to the same command on the other hosts, which report failures to each other."""

    def __init__(self, node: int, nodes: int, address: Address) -> None:
        if not isinstance(address, TcpAddress):
            raise GroupError(f"launch: expected the address HOST:PORT, got {address}")
        if address.port > 65534:  # the commands meet at the next port
            raise GroupError(f"launch: expected a port below 65535, got {address.port}")
        self._node = node
        self._nodes = nodes
        self._address = TcpAddress(address.host, address.port + 1)
        self._secret = secret_of(None, None)
        self._links: dict[int, TcpLink] = {}
        self._done: set[int] = set()

    def meet(self, attempt: int) -> int:
        """Connect to all hosts. Return the number of earlier starts, which the first host counts.

        Raises what `TcpGroup` raises.
        """
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
        """Return the messages of a host. Raises `ConnectionLostError` if no message can arrive."""
        link, lost = self._links[node], None
        try:
            link.flush()
            link.receive()
        except ConnectionLostError as error:
            lost = error
        news = [open_message(head, Kind.answer)[1].value() for head, _ in link.inbox]
        link.inbox.clear()
        if lost is not None and not news:
            raise lost
        return news

    def failure(self) -> str | None:
        """Return why the members of another host have failed, or None if they have not."""
        for node in self._links:
            try:
                for what, content in self._news(node):
                    if what == "failed":
                        return f"node {node}: {content}"
                    self._done.add(node)
            except ConnectionLostError as error:
                if node not in self._done:
                    return f"node {node} has left: {error}"
        return None

    def all_done(self) -> bool:
        return len(self._done) == len(self._links)

    def tell_end(self, failure: str) -> None:
        """Tell the other hosts that the members of this host have failed, or have all succeeded."""
        self._tell(("failed", failure) if failure else ("done", None))

    def _tell(self, what: tuple[str, Any]) -> None:
        for link in self._links.values():
            tell(link, what)

    def close(self) -> None:
        for link in self._links.values():
            with suppress(ConnectionLostError):
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
    """Run the members until all have exited or one has failed; return the status and a text."""
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
                    how = killed_by(status) if status < 0 else f"has exited with status {status}"
                    failure = f"member {rank} {how}"
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
    """Raise `SystemExit` on SIGTERM and SIGHUP, so that all members are stopped.

    Return the previous handlers, or no handlers if this is not the main thread.
    """

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
    return {
        number: signal.signal(number, end)
        for number in filter(None, heard)
        if signal.getsignal(number) is signal.SIG_DFL  # for example, nohup ignores SIGHUP
    }


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes that still run, and kill those that do not exit.

    They first have a moment to print errors.
    """
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
    """Replace this process by an `mpiexec` that runs this Python with these arguments.

    It runs `processes` processes. The `mpiexec` in this Python's folder, from the package mpich, is
    preferred to the system's. Raises `GroupError` if `processes` is below 1; `MissingExtraError`
    without mpi4py or any mpiexec.
    """
    if processes < 1:
        raise GroupError(f"mpirun: expected 1 or more processes, got {processes}")
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingExtraError('mpi4py is not installed: pip install "mlvm[mpi]"')
    folder = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=folder) or shutil.which("mpiexec")
    if mpiexec is None:
        raise MissingExtraError('mpiexec is not installed: pip install "mlvm[mpi]"')
    sys.stdout.flush()
    os.execv(mpiexec, [mpiexec, "-n", str(processes), sys.executable, *command])
