"""A process for each client, so that none can take the memory or the interpreter of another.

The server lets a client in, and hands the connection on to a process that was forked for it, or for
the shared VM that it wants; the bytes of a plain connection then never pass through the server. A
process may have so much memory and no more, and if it ends, whyever, its clients are told.

The state of a TLS connection cannot be handed on. So the server decrypts, and relays the bytes.
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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mlvm.core.errors import AccessRefused, MachineError
from mlvm.machines.remote.channel import Channel
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.metrics import Metrics

_ROOT: Final = Path(__file__).resolve().parents[3]
_PATIENCE: Final = 20.0  # seconds that the nursery may take to start
_MOMENT: Final = 0.1  # seconds in which the processes say what they are doing
_ROOM: Final = 1 << 18


class Process:
    """A process of one client, or of a shared VM. `status` is what it has said of itself last."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        self.status: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.asked = False
        self.ended: str | None = None
        self._lock = threading.Lock()
        self._serving: dict[int, _Serving] = {}

    def tell(self, do: str, *sockets: socket.socket, **facts: Any) -> bool:
        """Have it do something. Returns whether it is still there."""
        return self.channel.tell({"do": do, **facts}, *sockets)

    def begin(self, number: int, sock: socket.socket, facts: Mapping[str, Any]) -> None:
        """Hand a connection to it."""
        with self._lock:
            self._serving[number] = _Serving()
        self.tell("serve", sock, client=number, **facts)

    def wait(self, number: int) -> tuple[int, float, str | None]:
        """Wait till it has served that client. Returns how many launches there were, their seconds,
        and why the process has ended if it could not serve it to the end."""
        with self._lock:
            serving = self._serving[number]
            if self.ended is not None:
                serving.over.set()
        serving.over.wait()
        with self._lock:
            del self._serving[number]
        if serving.told is None:
            return 0, 0.0, self.ended or "its process has ended"
        return (*serving.told, None)

    def served(self, number: int, launches: int, seconds: float) -> None:
        """A client has gone."""
        with self._lock:
            serving = self._serving[number]
            serving.told = launches, seconds
            serving.over.set()

    def end(self, reason: str) -> None:
        """The process is no more."""
        with self._lock:
            self.ended = self.ended or reason
            for each in self._serving.values():
                each.over.set()
        self.channel.close()


class _Serving:
    """A client that a process serves; its launches and their seconds, once it has gone."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.told: tuple[int, float] | None = None


class Processes:
    """The processes of a server: `most` of clients, and one for each `shared` VM. `log` is told of
    what happens there.

    Raises `MachineError` for what cannot be told to a process, or if none can be started.
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
            raise MachineError("processes need a POSIX system")
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
        self._told = threading.Condition()
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

    def of(self, shared: str, name: str, nice: int) -> Process:
        """The process of that shared VM, or a new one for a client whose VM has the `name`, which
        is so `nice` to others. Raises `AccessRefused`."""
        with self._lock:
            if shared:
                if self._shared[shared].ended is not None:
                    self._shared[shared] = self._fork(shared, shared=True)
                return self._shared[shared]
            count = sum(each.name not in self._shared for each in self._living)
            if count >= self._most:
                raise AccessRefused(f"{count} processes of clients run, the most that may be")
            try:
                return self._fork(name, shared=False, nice=nice)
            except MachineError as error:
                raise AccessRefused(str(error)) from None

    def _fork(self, name: str, *, shared: bool, nice: int = 0) -> Process:
        ours, theirs = Channel.pair()
        process = Process(name, ours)
        with self._lock:
            self._start_nursery()
            assert self._to_nursery is not None
            self._living.append(process)
            self._selector.register(ours.socket, selectors.EVENT_READ, process)
            asked = {"name": name, "shared": shared, "nice": nice}
            self._to_nursery.tell(asked, theirs.socket)
        theirs.abandon()
        return process

    def _start_nursery(self) -> None:
        """Start the process that all others are forked from, if it is not there."""
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
            raise MachineError(f"no process can be started: {error.strerror}") from None
        finally:
            theirs.abandon()
        self._to_nursery.socket.settimeout(_PATIENCE)
        try:
            started = self._to_nursery.tell(self._settings) and self._to_nursery.listen()
        except TypeError as error:
            raise MachineError(f"options that no process can be told: {error}") from None
        if not started:
            raise MachineError("the process that others are forked from does not start")
        self._to_nursery.socket.settimeout(None)

    # --- what they say ---

    def _listen(self) -> None:
        """Hear all processes, until the last one is gone after `close`."""
        while not self._closed or self._living:
            for key, _ in self._selector.select(_MOMENT):
                process: Process = key.data
                alive = process.channel.receive()
                while process.channel.has_message() and (told := process.channel.listen()):
                    self._heed(process, told.facts)
                if not alive:
                    self._bury(process)
        self._selector.close()

    def _heed(self, process: Process, facts: dict[str, Any]) -> None:
        if "event" in facts:
            self._log(facts["event"], **facts["facts"])
        elif "gone" in facts:
            process.metrics = facts["metrics"]
            process.served(facts["gone"], facts["launches"], facts["seconds"])
        elif "status" in facts:
            with self._told:
                process.status, process.asked = facts["status"], False
                process.metrics = process.status["metrics"]
                self._told.notify_all()
        elif "ended" in facts:
            process.ended = how_it_ended(facts["ended"])

    def _bury(self, process: Process) -> None:
        self._selector.unregister(process.channel.socket)
        with self._lock:
            self._living.remove(process)
            if process.metrics:
                self._ended.add(process.metrics)
        process.end("its process has ended")

    def metrics(self) -> dict[str, Any]:
        """What happened in all processes, also in those that have ended."""
        with self._lock:
            metrics = Metrics()
            for told in (self._ended.told(), *[each.metrics for each in self._living]):
                if told:
                    metrics.add(told)
        return metrics.told()

    def statuses(self) -> list[dict[str, Any]]:
        """What each process is doing, as `Server.status` says it. One that is too busy to say has
        its last words repeated."""
        with self._lock:
            living = list(self._living)
        for each in living:
            if not each.asked:
                each.asked = True
                each.tell("status")
        with self._told:
            self._told.wait_for(lambda: not any(each.asked for each in living), _MOMENT)
        return [each.status for each in living if each.status]

    # --- the end ---

    def tell(self, do: str, **facts: Any) -> None:
        """Have all processes do something."""
        with self._lock:
            living = list(self._living)
        for each in living:
            each.tell(do, **facts)

    def close(self) -> None:
        """End all processes, and wait for them."""
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
    """Why a process has ended, by its exit status, or the error that kept it from starting."""
    if isinstance(status, str):
        return f"no process can be started for it: {status}"
    if status >= 0:
        return f"its process has ended with status {status}"
    name = str(-status)
    with suppress(ValueError):
        name = signal.Signals(-status).name
    why = ", as the system does where memory ends" if -status == signal.SIGKILL else ""
    return f"its process was killed by {name}{why}"


# --- TLS --------------------------------------------------------------------------------


def relay(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Pass the bytes of each to the other until one of them ends. At the end of `plain` all that it
    said has been passed on; when the client hangs up, what the process has not read is dropped."""
    secure.setblocking(False)
    plain.setblocking(False)
    hung_up = getattr(select, "POLLRDHUP", 0)
    rooms = bytearray(_ROOM), bytearray(_ROOM)
    inward, outward = _Direction(secure, plain, rooms[0]), _Direction(plain, secure, rooms[1])
    while True:
        moved = inward.move() | outward.move()
        if inward.ended or (outward.ended and not outward.left):
            return
        if moved:
            continue
        full = bool(inward.left)
        to_client = bool(outward.left) * select.POLLOUT
        poll = select.poll()
        poll.register(secure, (hung_up if full else select.POLLIN) | to_client)
        if not outward.ended:  # it would always be ready
            poll.register(plain, full * select.POLLOUT | (not to_client) * select.POLLIN)
        for number, events in poll.poll():
            if number == secure.fileno() and full and events & (hung_up | select.POLLHUP):
                return


_WAITS: Final = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


class _Direction:
    """Bytes on their way from one socket to another."""

    def __init__(self, source: socket.socket, sink: socket.socket, room: bytearray) -> None:
        self._source = source
        self._sink = sink
        self._room = memoryview(room)
        self.left = memoryview(b"")
        self.ended = False

    def move(self) -> bool:
        """Pass on what can be without waiting. Returns whether there was anything."""
        moved = False
        with suppress(*_WAITS):
            if not self.left and not self.ended:
                try:
                    count = self._source.recv_into(self._room)
                except _WAITS:
                    raise
                except OSError:
                    count = 0
                self.left, self.ended, moved = self._room[:count], not count, True
            while self.left:
                self.left = self.left[self._send() :]
                moved = True
        return moved

    def _send(self) -> int:
        """How many bytes were taken: all, where nobody is there to take them."""
        try:
            return self._sink.send(self.left)
        except _WAITS:
            raise
        except OSError:
            return len(self.left)
