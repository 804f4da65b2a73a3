"""One process per client, so clients share neither memory nor the interpreter lock.

The server admits a client, and passes the connection to a process that was forked for the client or
for a shared VM. The bytes of a connection without TLS then never pass through the server. The
memory of a process is limited. If a process dies, the clients receive the reason.

The state of a TLS connection cannot be passed to a process. Therefore the server decrypts the
connection and relays the bytes.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mlvm.core.errors import AccessDeniedError, MachineError
from mlvm.machines.failure import killed_by
from mlvm.machines.remote.channel import Channel
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.metrics import Metrics

_ROOT: Final = Path(__file__).resolve().parents[3]
_PATIENCE: Final = 20.0  # seconds that the nursery may need to start
_MOMENT: Final = 0.1  # seconds to wait for the status of the processes
_ROOM: Final = 1 << 18


class Process:
    """Process of a client or a shared VM.

    `name`: name of the VM.
    `channel`: the server's end of the channel.
    `status`: last answer to "status", as `Lender.status`.
    `metrics`: last counters, as `Metrics.to_json`.
    `status_pending`: a request for the status is not answered.
    `ended`: the reason why the process has exited, or None.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self.status: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.status_pending = False
        self.ended: str | None = None
        self._lock = threading.Lock()
        self._serving: dict[int, Future[tuple[int, float]]] = {}  # number and seconds of launches

    def send(self, do: str, *sockets: socket.socket, **facts: Any) -> bool:
        """Send a request to the process. Return False if it has exited."""
        return self.channel.send({"do": do, **facts}, *sockets)

    def begin(self, number: int, sock: socket.socket, facts: Mapping[str, Any]) -> None:
        """Pass a client's connection to the process."""
        with self._lock:
            self._serving[number] = Future()
        self.send("serve", sock, client=number, **facts)

    def wait(self, number: int) -> tuple[int, float, str | None]:
        """Wait until the process has served a client.

        Return the number and the seconds of launches, and the reason if the process has exited
        before the client.
        """
        with self._lock:
            serving = self._serving[number]
            if self.ended is not None:
                serving.cancel()
        try:
            return (*serving.result(), None)
        except CancelledError:
            return 0, 0.0, self.ended or "its process has ended"
        finally:
            with self._lock:
                del self._serving[number]

    def served(self, number: int, launches: int, seconds: float) -> None:
        """Record that a client has left, with the number and seconds of launches."""
        with self._lock:
            self._serving[number].set_result((launches, seconds))

    def end(self, reason: str) -> None:
        """Record that the process has exited."""
        with self._lock:
            self.ended = self.ended or reason
            for each in self._serving.values():
                each.cancel()
        self.channel.close()


class Processes:
    """Processes of a server: at most `most` for clients, and one per `shared` VM.

    The processes write events to `log`.

    Raises `MachineError` for options that are not JSON, or if no process can be started.
    """

    def __init__(
        self,
        most: int,
        shared: Sequence[str],
        limits: Limits,
        libraries: Sequence[str | os.PathLike[str]],
        options: Mapping[str, Any],
        log: Callable[..., None],
    ) -> None:
        if os.name != "posix" or not hasattr(os, "fork"):
            raise MachineError("processes need a POSIX system; omit processes=")
        self._most = most
        self._settings = {
            "limits": asdict(limits),
            "libraries": [os.fspath(each) for each in libraries],
            "options": dict(options),
        }
        self._log = log
        self._lock = threading.RLock()
        self._living: list[Process] = []
        self._ended = Metrics()
        self._status_received = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._closed = False
        self._nursery: subprocess.Popen[bytes] | None = None
        self._to_nursery: Channel | None = None
        self._shared: dict[str, Process] = {}
        threading.Thread(target=self._listen, name="mlvm processes", daemon=True).start()
        try:
            for name in shared:
                self._shared[name] = self._fork(name, shared=True)
            self._start_nursery()
        except BaseException:
            self.close()
            raise

    # --- start ---

    def process_for(self, shared: str, name: str, nice: int) -> Process:
        """Return the process of a shared VM, or fork one for a client.

        The client's VM has the `name`; `nice` is the niceness. Raises `AccessDeniedError`.
        """
        with self._lock:
            if shared:
                if self._shared[shared].ended is not None:
                    self._shared[shared] = self._fork(shared, shared=True)
                return self._shared[shared]
            count = sum(each.name not in self._shared for each in self._living)
            if count >= self._most:
                raise AccessDeniedError(
                    f"the server has reached its limit of {count} client processes; "
                    "connect again later"
                )
            try:
                return self._fork(name, shared=False, nice=nice)
            except MachineError as error:
                raise AccessDeniedError(str(error)) from None

    def _fork(self, name: str, *, shared: bool, nice: int = 0) -> Process:
        ours, theirs = Channel.pair()
        process = Process(name, ours)
        with self._lock:
            self._start_nursery()
            assert self._to_nursery is not None
            self._living.append(process)
            self._selector.register(ours.socket, selectors.EVENT_READ, process)
            self._to_nursery.send({"name": name, "shared": shared, "nice": nice}, theirs.socket)
        theirs.abandon()
        return process

    def _start_nursery(self) -> None:
        """Start the process from which all other processes are forked, if it is not running."""
        if self._nursery is not None and self._nursery.poll() is None:
            return
        if self._to_nursery is not None:
            self._to_nursery.close()
        self._to_nursery, theirs = Channel.pair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        number = theirs.socket.fileno()
        module = "mlvm.machines.remote.worker"
        try:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", module, str(number)],
                pass_fds=[number],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise MachineError(
                f"cannot start a process: {error.strerror}; free memory, or end processes"
            ) from None
        finally:
            theirs.abandon()
        self._to_nursery.socket.settimeout(_PATIENCE)
        try:
            started = self._to_nursery.send(self._settings) and self._to_nursery.listen()
        except TypeError as error:
            raise MachineError(f"options of a VM in a process: expected JSON: {error}") from None
        if not started:
            raise MachineError(
                "the process that forks client processes cannot be started; restart the server"
            )
        self._to_nursery.socket.settimeout(None)

    # --- messages of the processes ---

    def _listen(self) -> None:
        """Handle messages of all processes until `close` is called and all have exited."""
        while not self._closed or self._living:
            for key, _ in self._selector.select(_MOMENT):
                process: Process = key.data
                alive = process.channel.receive()
                while process.channel.has_message() and (message := process.channel.listen()):
                    self._handle(process, message.facts)
                if not alive:
                    self._remove(process)
        self._selector.close()

    def _handle(self, process: Process, facts: dict[str, Any]) -> None:
        if "event" in facts:
            self._log(facts["event"], **facts["facts"])
        elif "gone" in facts:
            process.metrics = facts["metrics"]
            process.served(facts["gone"], facts["launches"], facts["seconds"])
        elif "status" in facts:
            with self._status_received:
                process.status, process.status_pending = facts["status"], False
                process.metrics = process.status["metrics"]
                self._status_received.notify_all()
        elif "ended" in facts:
            process.ended = how_it_ended(facts["ended"])

    def _remove(self, process: Process) -> None:
        self._selector.unregister(process.channel.socket)
        with self._lock:
            self._living.remove(process)
            if process.metrics:
                self._ended.add(process.metrics)
        process.end("its process has ended")

    def metrics(self) -> dict[str, Any]:
        """Add up the metrics of all processes, including exited processes."""
        with self._lock:
            metrics = Metrics()
            for counts in (self._ended.to_json(), *[each.metrics for each in self._living]):
                if counts:
                    metrics.add(counts)
        return metrics.to_json()

    def statuses(self) -> list[dict[str, Any]]:
        """Return the status of each process, as in `Lender.status`.

        The status of a busy process is the previous status.
        """
        living = self._living.copy()
        for each in living:
            if not each.status_pending:
                each.status_pending = True
                each.send("status")
        with self._status_received:
            self._status_received.wait_for(
                lambda: not any(each.status_pending for each in living), _MOMENT
            )
        return [each.status for each in living if each.status]

    # --- the end ---

    def send_all(self, do: str, **facts: Any) -> None:
        """Send a request to all processes."""
        for each in self._living.copy():  # without the lock: copying is atomic
            each.send(do, **facts)

    def close(self) -> None:
        """Stop all processes and wait for them."""
        with self._lock:
            self._closed = True
            living = list(self._living)
        for each in living:
            each.channel.end()
        if self._to_nursery is not None:
            self._to_nursery.close()
        if self._nursery is not None:
            try:
                self._nursery.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()


def how_it_ended(status: int | str) -> str:
    """Describe why a process has exited, by exit status or start error."""
    if isinstance(status, str):
        return f"a process cannot be started for it: {status}"
    if status >= 0:
        return f"its process has ended with status {status}"
    why = ", as the system does when memory is exhausted" if -status == signal.SIGKILL else ""
    return f"its process {killed_by(status)}{why}"


# --- TLS --------------------------------------------------------------------------------


def relay(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Relay the bytes of each socket to the other until one is closed.

    When `plain` is closed, all bytes have been relayed. When the client disconnects, bytes that the
    process has not read are dropped.
    """
    secure.setblocking(False)
    plain.setblocking(False)
    hung_up = getattr(select, "POLLRDHUP", 0)
    rooms = bytearray(_ROOM), bytearray(_ROOM)
    inward, outward = _Direction(secure, plain, rooms[0]), _Direction(plain, secure, rooms[1])
    while True:
        moved = inward.move() | outward.move()
        if inward.ended or (outward.ended and not outward.pending):
            return
        if moved:
            continue
        full = bool(inward.pending)
        to_client = bool(outward.pending) * select.POLLOUT
        poll = select.poll()
        poll.register(secure, (hung_up if full else select.POLLIN) | to_client)
        if not outward.ended:  # a closed channel would always be ready
            poll.register(plain, full * select.POLLOUT | (not to_client) * select.POLLIN)
        for number, events in poll.poll():
            if number == secure.fileno() and full and events & (hung_up | select.POLLHUP):
                return


_WAITS: Final = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


class _Direction:
    """Relay of bytes from one socket to another."""

    def __init__(self, source: socket.socket, sink: socket.socket, room: bytearray) -> None:
        self._source = source
        self._sink = sink
        self._room = memoryview(room)
        self.pending = memoryview(b"")
        self.ended = False

    def move(self) -> bool:
        """Relay bytes without waiting; return whether any were relayed."""
        moved = False
        with suppress(*_WAITS):
            if not self.pending and not self.ended:
                try:
                    count = self._source.recv_into(self._room)
                except _WAITS:
                    raise
                except OSError:
                    count = 0
                self.pending, self.ended, moved = self._room[:count], not count, True
            while self.pending:
                self.pending = self.pending[self._send() :]
                moved = True
        return moved

    def _send(self) -> int:
        """Send pending bytes; return the number sent (all bytes if the receiver has closed)."""
        try:
            return self._sink.send(self.pending)
        except _WAITS:
            raise
        except OSError:
            return len(self.pending)
