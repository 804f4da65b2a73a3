"""Loan of VMs to the clients that a server has admitted, until they disconnect."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mlvm.core import errors
from mlvm.core.errors import (
    ConnectionLostError,
    EncodingError,
    LimitExceededError,
    MlvmError,
    OutOfMemoryError,
)
from mlvm.core.program.encoding import Allowance, Kind
from mlvm.core.store import number_apart
from mlvm.machines.local import LocalVM
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import FIXED, Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.metrics import Metrics
from mlvm.machines.remote.processes import Process, Processes, relay
from mlvm.machines.remote.session import Session
from mlvm.machines.remote.stream import Buffer, Received, Stream
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.remote.users import Accounts
from mlvm.machines.remote.watchdog import Watchdog
from mlvm.machines.wire import encode_error

_MAKING: Final = "alloc_tensor", "alloc_storage", "load_program", "launch", "write"
_LOOK_AT_QUOTAS: Final = 0.5  # seconds between checks

_LAST_WORDS: Final = 0.2  # seconds between checks for exited processes
_INTERRUPTED: Final = "the client has ended this launch"
CLOSING: Final = "the server is shutting down; connect again later"


class LeasedConnection:
    """Connection of a client, which a new connection replaces if it is lost during a lease.

    leased: whether the client may reconnect within `seconds`.
    draining: whether the server closes the connection after the received messages.
    """

    def __init__(self, sock: socket.socket, seconds: float, system: System = SYSTEM) -> None:
        self.socket = sock
        self.leased = False
        self.draining = False
        self._system = system
        self._seconds = seconds
        self._change = system.condition()
        self._fresh: socket.socket | None = None
        self._lost: float | None = None  # time of `monotonic`
        self._over = False

    def drain(self) -> None:
        with self._change:
            self.draining = True
            self._change.notify_all()

    def replace(self, sock: socket.socket, *, waits: bool = True) -> bool:
        """Replace a lost connection, even if the server has not yet detected the loss.

        With `waits`, a thread takes the new connection in `comes_again`. Return False if the lease
        is over.
        """
        with self._change:
            if self._over or not self.leased:
                return False
            addresses.shut(self.socket)
            if not waits:
                self._take(sock)
            else:
                if self._fresh is not None:
                    self._fresh.close()
                self._fresh = sock
                self._change.notify_all()
            return True

    def _take(self, sock: socket.socket) -> None:
        self.socket.close()
        self.socket, self._fresh, self._lost = sock, None, None

    def comes_again(self) -> bool:
        """Wait for a new connection; return whether it was opened in time."""
        with self._change:
            if not self.draining:  # a client that is silent for too long is closed
                addresses.shut(self.socket)
            self._change.wait_for(lambda: self._fresh or self.draining, self._seconds)
            self._over = self._fresh is None
            if self._fresh is not None:
                self._take(self._fresh)
            return not self._over

    def end(self) -> None:
        """End the lease: refuse further connections."""
        with self._change:
            self._over = True
            if self._fresh is not None:
                self._fresh.close()

    def is_gone(self) -> bool:
        """Return whether the client has disconnected, and a lease does not continue.

        A connection that the server drains looks disconnected, but is not counted.
        """
        if self.draining or not self._system.has_hung_up(self.socket):
            return False
        if not self.leased or self._lost is None:
            self._lost = self._system.monotonic()
            return not self.leased
        return self._fresh is None and self._system.monotonic() - self._lost > self._seconds


class Client:
    """Client of a server; it has a number after admission, and a VM if requested.

    `resumes`: number of the client that this connection continues.
    `key`: secret with which this client can interrupt launches.
    """

    def __init__(self, peer: str, connection: LeasedConnection, since: float) -> None:
        self.peer = peer
        self.connection = connection
        self.since = since
        self.resumes = 0
        self._refusal: str | None = None
        self.number = 0
        self.name = ""
        self.key = ""
        self.vm: BoundedVM | None = None
        self.vm_name = ""
        self.process: Process | None = None
        self.user = ""
        self.launches = 0
        self.seconds = 0.0
        self.own = True
        self.session: BoundedSession | None = None
        self.reason = "it was not served"

    def drain(self) -> None:
        """Close the connection after all received messages are executed."""
        self.connection.drain()
        if self.process is None:
            addresses.shut(self.connection.socket, socket.SHUT_RD)

    def refuse(self, reason: str | None) -> None:
        """Refuse allocations and launches for a reason, or allow them (None)."""
        if reason == self._refusal:
            return
        self._refusal = reason
        if self.process is not None:
            self.process.send("refuse", client=self.number, reason=reason)
        elif self.session is not None:
            self.session.refusal = reason

    def interrupt(self, last: int) -> None:
        """Stop the launches of the messages up to number `last`."""
        if self.process is not None:
            self.process.send("interrupt", client=self.number, last=last)
        elif self.session is not None:
            self.session.last = max(self.session.last, last)

    def is_gone(self) -> bool | str:
        """Return whether the client has disconnected, or the reason for stopping the launch."""
        if self.session is not None and self.session.is_interrupted():
            return _INTERRUPTED
        return self.connection.is_gone()

    def status(self, now: float) -> dict[str, Any]:
        vm, session = self.vm, self.session
        return {
            "client": self.number,
            "pid": os.getpid(),
            "peer": self.peer,
            "name": self.name,
            "user": self.user,
            "vm": vm.name if vm is not None else self.vm_name,
            "bytes": _nbytes(vm) if vm is not None else 0,
            "launches": session.launches if session is not None else 0,
            "messages": session.messages if session is not None else 0,
            "program_bytes": session.program_bytes if session is not None else 0,
            "cpu_seconds": session.seconds if session is not None else 0.0,
            "busy": session is not None and session.busy,
            "seconds": now - self.since,
        }


class BoundedSession(Session):
    """Session with limits on the size of programs and on the time for verifying them."""

    def __init__(self, vm: BoundedVM, limits: Limits, watchdog: Watchdog, client: Client) -> None:
        super().__init__(vm, own=client.own)
        self._bounded = vm
        self._limits = limits
        self._watchdog = watchdog
        self._client = client
        self.metrics = Metrics()
        self.refusal: str | None = None
        """Reason for refusing allocations and launches, or None."""
        self._clock: int = time.pthread_getcpuclockid(threading.get_ident())
        self.last = 0
        """Number of the message up to which launches are stopped."""
        self._arriving = Allowance(0)  # allowance of the program that is being decoded
        self._sizes: dict[int, int] = {}  # bytes of the loaded programs by number
        self.program_bytes = 0  # sum of `_sizes`

    def heed(self, error: Exception) -> None:
        """Count exceeded limits.

        Close the connection if the process itself has run out of memory, because the state may be
        inconsistent.
        """
        if isinstance(error, (LimitExceededError, OutOfMemoryError)):
            self.metrics.limits[type(error).__name__] += 1
        if isinstance(error, MemoryError) and not isinstance(error, MlvmError):
            self.leased = False
            most = f"{self._limits.process_bytes:,}"
            raise ConnectionLostError(
                f"its process has run out of memory; the limit is {most} bytes"
            )

    @property
    def seconds(self) -> float:
        """Processor seconds of the thread that created this session and serves the client."""
        return time.clock_gettime(self._clock)

    def is_interrupted(self) -> bool:
        """Return whether the client has interrupted the launch of the current message."""
        return self.messages <= self.last

    def handle(self, kind: Kind, reader: Received) -> Sequence[Buffer] | None:
        if (self.last or self.refusal) and kind is not Kind.call:
            refusal = self.refusal
            if kind is Kind.launch and self.is_interrupted():
                refusal = _INTERRUPTED
            if refusal is not None:
                self._posts += 1  # this message counts as well
                self._fail(LimitExceededError(refusal))
                self._posts -= 1
        begun = time.perf_counter()
        try:
            return super().handle(kind, reader)
        finally:
            self.metrics.observe(kind._name_, time.perf_counter() - begun)

    def run_cached(self, stream: Stream) -> int:
        if self.messages < self.last or self.refusal is not None:
            return 0
        count = super().run_cached(stream)
        self._bounded.launches += count
        return count

    def _perform_from(self, reader: Any, name: str) -> Any:
        if self.refusal is not None and name in _MAKING:
            raise LimitExceededError(self.refusal)
        # Maximum bytes of Python objects per decoded message, without programs, elements and texts.
        reader.allowance = Allowance(1 << 26)
        if name not in ("load_program", "drop_program", "estimate"):
            return super()._perform_from(reader, name)
        size = reader.remaining if name == "load_program" else 0
        loaded, most = self.program_bytes, self._limits.program_bytes
        if loaded + size > most:
            usage = f"{loaded:,} are loaded, and the limit is {most:,}"
            raise LimitExceededError(f"cannot load {size:,} more bytes of programs: {usage}")
        if size:
            reader.allowance = self._arriving = Allowance(most - loaded - size)
        with self._watchdog.watch(self._limits.launch_seconds, self._client.is_gone):
            return super()._perform_from(reader, name)

    def _keep_from_reading(self, handle: int, error: Exception) -> None:
        self._bounded.spoil(handle, error)

    def perform(self, name: str, args: list[Any]) -> Any:
        result = super().perform(name, args)
        if name == "load_program":
            size = self._limits.program_bytes - self.program_bytes - self._arriving.remaining
            self.program_bytes += size - self._sizes.get(args[0], 0)
            self._sizes[args[0]] = size
        elif name == "drop_program":
            self.program_bytes -= self._sizes.pop(args[0], 0)
        return result


class Lender:
    """VMs for admitted clients, whose calls it executes.

    Each client has a private VM, or a VM of the `shared` names. When the connection is closed, the
    tensors and storages of the client are freed. A server lends VMs to the clients that it has
    admitted, and a process of a server to the clients that it receives.

    Attributes:
        clients: the admitted clients by number; `lock` is held while they change.
        names: the names of shared VMs, also of the VMs in other processes.
        processes: the processes of clients, if each client has one.
        draining: whether no more calls are accepted.
        accounts: the usage by user.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        shared: Sequence[str] = (),
        libraries: Sequence[str | os.PathLike[str]] = (),
        prepare: Callable[[LocalVM], object] | None = None,
        options: Mapping[str, Any] | None = None,
        log: Log | None = None,
        has_processes: bool = False,
        system: System = SYSTEM,
    ) -> None:
        self.limits = limits or Limits()
        self.log = log or Log("none")
        self.system = system
        self.lock = threading.Lock()
        self.clients: dict[int, Client] = {}
        self.draining = False
        self.accounts = Accounts(self.limits)
        self.processes: Processes | None = None
        self._recipe = dict(options or {}), libraries, prepare
        self._watchdog = Watchdog(system)
        self._launches = 0  # launches of disconnected clients
        self._metrics = Metrics()  # metrics of these clients and handshakes
        for name in shared:
            if not name or shared.count(name) > 1 or len(name) > FIXED.name:
                shown = errors.brief(list(shared))
                most = FIXED.name
                raise errors.MachineError(
                    f"shared=: expected distinct names of 1 to {most} characters, got {shown}"
                )
        number_apart()
        self.names = list(shared)
        self.shared = {} if has_processes else {name: self.make_vm(name) for name in shared}
        for vm in self.shared.values():
            vm.allow_several_clients()

    def make_vm(self, name: str) -> BoundedVM:
        options, libraries, prepare = self._recipe
        vm = BoundedVM(name, self.limits, self._watchdog, **options)
        for library in libraries:
            vm.register_library(library)
        if prepare is not None:
            prepare(vm)
        return vm

    def start_processes(self, count: int) -> None:
        """Use a separate process for each client and each shared VM, at most `count`."""
        options, libraries, prepare = self._recipe
        if prepare is not None:
            raise errors.MachineError("prepare= does not apply with processes=: use libraries=")
        rest = self.limits, libraries, options, self.log.event
        self.processes = Processes(count, self.names, *rest)

    # --- shutdown -------------------------------------------------------------------------

    def drain(self) -> None:
        """Close each connection after all received messages are executed."""
        with self.lock:
            self.draining = True
            clients = list(self.clients.values())
        for client in clients:
            client.drain()
        if self.processes is not None:
            self.processes.send_all("drain")

    def stop(self, reason: str) -> None:
        """Abort all launches, and later launches immediately."""
        self._watchdog.stop(reason)
        if self.processes is not None:
            self.processes.send_all("stop", reason=reason)

    def close(self) -> None:
        """Close the shared VMs and the processes, after all clients have left."""
        for vm in self.shared.values():
            vm.close()
        launches = self.status()["launches"]
        if self.processes is not None:
            self.processes.close()
        self.log.event("stopped", launches=launches)

    # --- clients --------------------------------------------------------------------------

    def observe_handshake(self, seconds: float) -> None:
        with self.lock:
            self._metrics.observe("handshake", seconds)

    def provide(self, client: Client, shared_name: str, nice: int) -> None:
        """Give an admitted client the shared VM of that name, or a private VM."""
        client.own = not shared_name
        client.vm_name = shared_name or f"vm{client.number}"
        if self.processes is not None:
            client.process = self.processes.process_for(shared_name, client.vm_name, nice)
        else:
            client.vm = self.shared[shared_name] if shared_name else self.make_vm(client.vm_name)

    def serve(
        self, client: Client, answer: Callable[[socket.socket], object] = addresses.shut
    ) -> None:
        """Serve an admitted client according to the request.

        `answer` serves the connection of a client that wants no VM.
        """
        try:
            if client.resumes:
                self.resume(client.resumes, client.connection.socket)
                return
            if client.process is not None:
                self._hand_on(client, client.process)
                return
            if client.vm is None:
                answer(client.connection.socket)
                return
            facts = {"client": client.number, "peer": client.peer, "vm": client.vm.name}
            self.log.event("connected", **facts, name=client.name)
            client.reason = self._lend(client, client.vm)
        except (MlvmError, OSError) as error:
            client.reason = text_of(error)
        except Exception as error:
            client.reason = "an error of the server"
            self.log_error(error, client.peer)

    def _hand_on(self, client: Client, process: Process) -> None:
        """Pass the client to the process, and wait until the process has served it."""
        facts = {"peer": client.peer, "name": client.name, "leased": client.connection.leased}
        _pass_on(client.connection.socket, lambda sock: process.begin(client.number, sock, facts))
        # All bytes of the process are relayed. If the process still runs, it waits for the client,
        # which must read the end of the connection. If the process has exited, the client receives
        # the reason.
        sock = client.connection.socket
        hears = threading.Timer(_LAST_WORDS, addresses.shut, (sock, socket.SHUT_WR))
        if isinstance(sock, ssl.SSLSocket):
            hears.start()
        client.launches, client.seconds, ended = process.wait(client.number)
        hears.cancel()
        if ended is not None:
            self.log.event("disconnected", client=client.number, reason=ended, left=0)
            client.connection.socket.settimeout(self.limits.send_seconds)
            self._part_from(Stream(client.connection.socket), ended)

    def interrupt(self, client: int, last: int) -> None:
        """Stop the launches of a client by number, up to the message `last`."""
        if (entry := self.clients.get(client)) is not None:
            entry.interrupt(last)

    def refuse(self, client: int, reason: str | None) -> None:
        """Refuse allocations and launches of a client for a reason, or allow them (None)."""
        if (entry := self.clients.get(client)) is not None:
            entry.refuse(reason)

    def resume(self, client: int, sock: socket.socket) -> None:
        """Replace the connection of a client, if the client is still connected."""
        entry = self.clients.get(client)
        if entry is None or not entry.connection.replace(sock, waits=entry.process is None):
            sock.close()
        elif entry.process is not None:
            process = entry.process
            _pass_on(sock, lambda passed: process.send("resume", passed, client=client))
            if isinstance(sock, ssl.SSLSocket):
                addresses.shut(sock, socket.SHUT_WR)

    def lend(
        self, sock: socket.socket, vm: BoundedVM, client: int, peer: str, name: str, leased: bool
    ) -> tuple[int, float]:
        """Serve a client that a different process has admitted.

        Return the number and the processor seconds of the client's launches.
        """
        connection = LeasedConnection(sock, self.limits.lease_seconds, self.system)
        connection.leased = leased
        lent = Client(peer, connection, self.system.monotonic())
        lent.number, lent.name = client, name
        lent.vm, lent.own = vm, vm.name not in self.shared
        with self.lock:
            self.clients[client] = lent
        try:
            self.serve(lent)
        finally:
            self.free(lent)
            part(connection.socket, self.system)
        return lent.launches, lent.seconds

    def _lend(self, client: Client, vm: BoundedVM) -> str:
        """Execute the client's calls until the connection is closed; return the reason."""
        limits = self.limits
        vm.client.is_gone = client.is_gone
        session = client.session = BoundedSession(vm, limits, self._watchdog, client)
        session.leased = client.connection.leased
        again = False
        try:
            while True:
                stream = Stream(client.connection.socket, limits.message_bytes, self.system)
                stream.set_timeouts(limits.idle_seconds, limits.send_seconds)
                try:
                    if again:
                        session.resume(stream)
                    session.serve(stream, lambda: self.draining)
                    return self._part_from(stream, CLOSING)
                except ConnectionLostError:
                    again = session.leased and client.connection.comes_again()
                    if not again:
                        raise
        except ConnectionLostError as error:
            return self._part_from(stream, CLOSING if self.draining else str(error))
        except (EncodingError, LimitExceededError) as error:  # the next message cannot be found
            with contextlib.suppress(MlvmError, OSError):
                stream.send([encode_error(error)])
            return text_of(error)
        finally:
            client.connection.end()
            vm.client.is_gone = lambda: False  # freeing must not be interrupted
            self._clear_up(vm, session)

    def _clear_up(self, vm: BoundedVM, session: Session) -> None:
        """Free a client's tensors, in a separate thread if a launch of another client runs."""
        if not vm._lock.acquire(blocking=False):
            self.system.start("mlvm clear up", session.close)
            return
        try:
            session.close()
        finally:
            vm._lock.release()

    def _part_from(self, stream: Stream, reason: str) -> str:
        """Send the reason for closing the connection to the client."""
        with contextlib.suppress(MlvmError, OSError):
            stream.send([encode_error(ConnectionLostError(reason))])
        return reason

    def free(self, client: Client) -> None:
        """Remove a client that has left, and close the private VM of the client."""
        if client.session is not None:
            client.launches, client.seconds = client.session.launches, client.session.seconds
        own = client.vm if client.own else None
        try:
            if own is not None:
                own.close()
        finally:
            with self.lock:
                del self.clients[client.number]
                self._launches += client.launches
                self.accounts.spend(client.user, client.number, client.launches, client.seconds)
                self.accounts.leave(client.number)
                if client.session is not None:
                    self._metrics.add(client.session.metrics.to_json())
        if client.process is not None:  # the process has already logged it
            if client.own:
                client.process.channel.end()
            return
        seconds = self.system.monotonic() - client.since
        nbytes = _nbytes(own) if own is not None else 0
        facts = {"client": client.number, "reason": client.reason, "seconds": seconds}
        self.log.event("disconnected", **facts, launches=client.launches, left=nbytes)

    def log_error(self, error: Exception, peer: str) -> None:
        """Log an unexpected error."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = [f"{each.filename}:{each.lineno}" for each in place]
        self.log.event("error", peer=peer, error=repr(error), at=" ".join(where))

    # --- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return totals, and a dictionary per client and shared VM."""
        now = self.system.monotonic()
        remote_statuses = [] if self.processes is None else self.processes.statuses()
        remote = {each["client"]: each for status in remote_statuses for each in status["clients"]}
        with self.lock:
            living = self.clients.values()
            clients = [
                {**each.status(now), **remote.get(each.number, {}), "user": each.user}
                for each in living
            ]
            launches = self._launches
            metrics = Metrics()
            for each in (self._metrics, *[each.session.metrics for each in living if each.session]):
                metrics.add(each.to_json())
        vms = self.shared.items()
        shared = [{"vm": n, "bytes": _nbytes(vm), "launches": vm.launches} for n, vm in vms]
        shared += [each for status in remote_statuses for each in status["shared"]]
        if self.processes is not None:
            metrics.add(self.processes.metrics())
        own = [each for each in clients if each["vm"] not in self.names]
        return {
            "bytes": sum(each["bytes"] for each in [*own, *shared]),
            "launches": launches + sum(each["launches"] for each in clients),
            "clients": clients,
            "shared": shared,
            "metrics": metrics.to_json(),
        }

    def watch_quotas(self) -> None:
        """Refuse calls of a client while the client's user exceeds a quota."""
        while not self.draining:
            status = self.status()
            nbytes: Counter[str] = Counter()
            with self.lock:
                for each in status["clients"]:
                    if each["client"] not in self.clients:  # the usage is already counted
                        continue
                    nbytes[each["user"]] += each["bytes"] * (each["vm"] not in self.names)
                    self.accounts.spend(
                        each["user"], each["client"], each["launches"], each["cpu_seconds"]
                    )
                self.accounts.set_bytes(nbytes)
                clients = list(self.clients.values())
                reasons = {each.user: self.accounts.over(each.user) for each in clients}
            for client in clients:
                client.refuse(reasons[client.user])
            self.system.sleep(_LOOK_AT_QUOTAS)


def _pass_on(sock: socket.socket, hand: Callable[[socket.socket], object]) -> None:
    """Pass a connection to a different process; under TLS, this process decrypts."""
    if not isinstance(sock, ssl.SSLSocket):
        hand(sock)
        return
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            hand(theirs)
        with contextlib.suppress(ValueError):  # a new connection has replaced this connection
            relay(sock, ours)


# --- sockets ----------------------------------------------------------------------------


def part(sock: socket.socket, system: System) -> None:
    """Close a connection after the peer can read the last bytes.

    Closing with unread bytes would discard them.
    """
    with contextlib.suppress(OSError, ValueError):
        addresses.shut(sock, socket.SHUT_WR)
        deadline = system.monotonic() + 0.5
        sock.settimeout(0.1)
        while system.monotonic() < deadline and sock.recv(1 << 16):
            pass
    sock.close()


def trim() -> None:
    """Return the memory of a disconnected client to the operating system.

    glibc keeps it in the arena of the thread that allocated it.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _nbytes(vm: LocalVM) -> int:
    return vm.memory_used()


def text_of(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__
