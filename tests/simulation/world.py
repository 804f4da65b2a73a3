"""A simulated world: processes on hosts, their threads, clocks and connections, in one thread.

Threads are greenlets. The world resumes them one at a time, in virtual time, in an order that its
seed chooses. A connection is two pipes. Each has a latency, a bandwidth and a buffer; bytes arrive
in order, and pipes overtake each other. A process can be killed, stopped or cut off at any event.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import itertools
import random
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from greenlet import GreenletExit, getcurrent, greenlet

from mlvm.machines.remote.address import Address, TcpAddress
from mlvm.machines.remote.system import System

MOST_EVENTS: Final = 200_000
_MOST_POLLS: Final = 100
"""Looks at sockets without a wait after which time passes, as it does in a busy loop."""
_EVER: Final = float("inf")
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Thread:
    """A thread of a process. `turn` counts its waits, so that a late wake-up wakes no later one."""

    def __init__(self, world: World, process: Process, run: Callable[[], object]) -> None:
        self.process = process
        self.turn = 0
        self.error: BaseException | None = None
        self.interrupt: type[BaseException] | None = None
        self._run = run
        self.greenlet = greenlet(self._main, parent=world.hub)

    def _main(self, _: bool) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._run = _nothing

    def is_alive(self) -> bool:
        return not self.greenlet.dead


def _nothing() -> None:
    pass


class Process:
    """A process: a host of its own, its threads and sockets."""

    def __init__(self, world: World, name: str, host: str, number: int) -> None:
        self.name = name
        self.number = number
        self.host = host
        self.system = SimulatedSystem(world, self)
        self.threads: list[Thread] = []
        self.sockets: set[Socket] = set()
        self.is_dead = False
        self.stopped_until = 0.0
        self.cut_until = 0.0
        """Time until which nothing reaches the host, or leaves it."""
        self.offset = world.random.uniform(0, 1e6)  # of its clock


class World:
    """Processes, virtual time, and the events to come."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hub = getcurrent()
        self.now = 0.0
        self.events = 0
        self.processes: list[Process] = []
        self.listeners: dict[tuple[str, int], Socket] = {}
        self.buffer = self.random.choice((1_500, 10_000, 200_000))
        self.latency = self.random.choice(
            (1e-5, 1e-3) if self.buffer < 5_000 else (1e-5, 1e-3, 0.02)
        )
        self.bandwidth = self.random.choice((1e5, 1e7, 1e9))  # bytes a second
        self.at_event: dict[int, Callable[[], None]] = {}
        self._trace: list[tuple[int, float]] = []
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._current: Thread | None = None

    def process(self, name: str, host: str) -> Process:
        process = Process(self, name, host, len(self.processes))
        self.processes.append(process)
        return process

    # --- threads ---

    def start(self, process: Process, run: Callable[[], object]) -> Thread:
        thread = Thread(self, process, run)
        process.threads.append(thread)
        self.wake(thread, thread.turn)
        return thread

    @property
    def current(self) -> Thread:
        assert self._current is not None  # the world's own code does not wait
        return self._current

    def wait(self, until: float = _EVER, *sockets: Socket) -> bool:
        """Wait until something happens to one of the sockets. Return False at the time `until`."""
        thread = self.current
        if thread.process.is_dead:
            raise GreenletExit
        thread.turn += 1
        turn = thread.turn
        for each in sockets:
            each.watchers.append((thread, turn))
        if until < _EVER:
            until = max(until, self.now + 1e-6)  # a clock's resolution
            self.at(until, lambda: self._resume(thread, turn, False))
        woken: bool = self.hub.switch()
        if thread.interrupt is not None:
            kind, thread.interrupt = thread.interrupt, None
            raise kind
        return woken

    def wake(self, thread: Thread, turn: int) -> None:
        delay = self.random.random() ** 4 * 1e-3  # of the scheduler: mostly short
        self.at(self.now + delay, lambda: self._resume(thread, turn, True))

    def _resume(self, thread: Thread, turn: int, woken: bool) -> None:
        process = thread.process
        if thread.turn != turn or process.is_dead or thread.greenlet.dead:
            return
        if process.stopped_until > self.now:
            if process.stopped_until < _EVER:
                self.at(process.stopped_until, lambda: self._resume(thread, turn, woken))
            return
        self._trace.append((process.number, self.now))
        thread.turn += 1
        self._current = thread
        try:
            thread.greenlet.switch(woken)
        finally:
            self._current = None

    # --- events ---

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._numbers), event))

    def run(self, until: float) -> None:
        """Perform events until none is left, or the time comes."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, event = heapq.heappop(self._queue)
            self.events += 1
            if self.events > MOST_EVENTS:
                raise RuntimeError("the members are busy without end")
            if (fault := self.at_event.pop(self.events, None)) is not None:
                fault()
            event()

    def digest(self) -> str:
        """Return a digest of what was performed, and when."""
        return hashlib.blake2b(repr(self._trace).encode(), digest_size=8).hexdigest()

    # --- faults ---

    def kill(self, process: Process) -> None:
        """Kill a process: its system closes its connections."""
        process.is_dead = True
        for each in sorted(process.sockets, key=lambda each: each.number):
            each.close()

    def strike(self, process: Process, fault: str, at: int, pause: float) -> None:
        """Have a fault strike a process at an event. One that ends does after at most `pause`
        seconds."""

        def stop(seconds: float) -> None:
            process.stopped_until = self.now + seconds

        def cut(seconds: float) -> None:
            process.cut_until = self.now + seconds

        faults: dict[str, Callable[[], None]] = {
            "killed": lambda: self.kill(process),
            "stopped": lambda: stop(_EVER),
            "paused": lambda: stop(self.random.uniform(0, pause)),
            "cut": lambda: cut(_EVER),
            "healed": lambda: cut(self.random.uniform(0, pause)),
        }
        if fault in faults:
            self.at_event[at] = faults[fault]

    def end(self) -> None:
        """Unwind the threads that are left, which reach nobody any more."""
        for process in self.processes:
            process.is_dead = True
        for process in self.processes:
            for thread in process.threads:
                self._current = thread
                while not thread.greenlet.dead:
                    thread.greenlet.throw(GreenletExit)
        self._current = None
        self._queue.clear()


class Pipe:
    """One direction of a connection: bytes on their way, and those that have arrived."""

    def __init__(self, world: World, source: Socket, target: Socket) -> None:
        self.world = world
        self.source, self.target = source, target
        self.arrived = bytearray()
        self.flying: deque[bytes] = deque()
        self.in_flight = 0
        self.is_over = False  # nothing more will arrive
        self.is_broken = False  # by a reset
        self._last = 0.0

    def room(self) -> int:
        return self.world.buffer - len(self.arrived) - self.in_flight

    def put(self, data: bytes) -> None:
        """Send bytes; none is the end."""
        world = self.world
        self.flying.append(data)
        self.in_flight += len(data)
        delay = world.latency * world.random.choice((1, 1, 1, 2, 20)) + len(data) / world.bandwidth
        self._last = max(self._last, world.now + delay)
        world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        cut = max(self.source.process.cut_until, self.target.process.cut_until)
        if cut > self.world.now:  # it is sent again when it can arrive
            if cut < _EVER:
                self.world.at(cut + self.world.latency, self._arrive)
            return
        if not self.flying:  # a reset has discarded it
            return
        data = self.flying.popleft()
        self.in_flight -= len(data)
        if self.target.is_closed and data:  # nobody reads it: the answer is a reset
            self.target.reset()
        elif data:
            self.arrived += data
        else:
            self.is_over = True
        self.target.notify()


class Socket(socket.socket):
    """A socket of a simulated process, without a descriptor."""

    def __init__(self, world: World, process: Process, name: tuple[str, int]) -> None:
        self.world = world
        self.process = process
        self.number = next(world._numbers)
        self.name = name
        self.peer: Socket | None = None
        self.incoming: Pipe | None = None
        self.outgoing: Pipe | None = None
        self.backlog: deque[Socket] | None = None
        self.watchers: list[tuple[Thread, int]] = []
        self.is_closed = self.is_shut = False
        self.seconds: float | None = None
        process.sockets.add(self)

    def __repr__(self) -> str:
        return f"<socket of {self.process.name}>"

    family = socket.AF_INET

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    # --- readiness ---

    def notify(self) -> None:
        """Wake the threads that wait for this socket."""
        watchers, self.watchers = self.watchers, []
        for thread, turn in watchers:
            self.world.wake(thread, turn)

    def is_readable(self) -> bool:
        if self.backlog is not None:
            return bool(self.backlog) or self.is_closed
        pipe = self.incoming
        return pipe is None or bool(pipe.arrived) or pipe.is_over or pipe.is_broken

    def is_writable(self) -> bool:
        pipe = self.outgoing
        return pipe is None or pipe.room() > 0 or pipe.is_broken or self.is_shut

    def _await(self, ready: Callable[[], bool], flags: int = 0) -> None:
        self._require_open()
        if ready():
            return
        if self.seconds == 0 or flags & socket.MSG_DONTWAIT:
            raise BlockingIOError(errno.EAGAIN, "it would wait")
        until = _EVER if self.seconds is None else self.world.now + self.seconds
        while not ready():
            if not self.world.wait(until, self) and not ready():
                raise TimeoutError("timed out")
            self._require_open()

    def _require_open(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "the socket is closed")

    # --- reading ---

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        self._await(self.is_readable, flags)
        pipe = self.incoming
        if pipe is None:
            raise OSError(errno.ENOTCONN, "not connected")
        data = bytes(pipe.arrived[:bufsize])
        if not data and pipe.is_broken:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
        if not flags & socket.MSG_PEEK:
            del pipe.arrived[: len(data)]
            pipe.source.notify()  # there is room again
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        data = self.recv(nbytes or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    # --- writing ---

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return self.send(b"".join(buffers))

    def send(self, data: Any, flags: int = 0, /) -> int:
        self._await(self.is_writable, flags)
        pipe = self.outgoing
        if pipe is None or pipe.is_broken or self.is_shut:
            raise BrokenPipeError(errno.EPIPE, "the connection is broken")
        data = bytes(data)[: pipe.room()]
        pipe.put(data)
        return len(data)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        data = bytes(data)
        while data:
            data = data[self.send(data, flags) :]

    # --- the rest ---

    def accept(self) -> tuple[socket.socket, Any]:
        self._await(self.is_readable)
        assert self.backlog is not None
        if not self.backlog:
            raise OSError(errno.EINVAL, "the listener was shut")
        return self.backlog.popleft(), None

    def settimeout(self, value: float | None, /) -> None:
        self.seconds = value

    def setblocking(self, flag: bool, /) -> None:
        self.seconds = None if flag else 0

    def setsockopt(self, *_: Any) -> None:
        pass

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.name

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def fileno(self) -> int:
        return -1 if self.is_closed else self.number

    def shutdown(self, how: int, /) -> None:
        if self.backlog is not None:
            self.close()
            return
        if self.outgoing is None or self.incoming is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if how != socket.SHUT_RD and not self.is_shut:
            self.is_shut = True
            self.outgoing.put(b"")
        if how != socket.SHUT_WR:
            self.incoming.is_over = True
        self.notify()

    def reset(self) -> None:
        """Have the peer's calls fail, what it has not read excepted."""
        if self.outgoing is not None and self.incoming is not None:
            self.outgoing.flying.clear()
            self.outgoing.in_flight = 0
            for pipe in (self.outgoing, self.incoming):
                pipe.is_broken = True
            self.incoming.source.notify()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.process.sockets.discard(self)
        for each in self.backlog or ():
            each.close()
        self.world.listeners.pop(self.name, None) if self.backlog is not None else None
        if self.outgoing is not None and self.incoming is not None:
            if self.incoming.arrived and not self.is_cut:
                self.reset()
            elif not self.is_shut:
                self.outgoing.put(b"")
        self.notify()

    @property
    def is_cut(self) -> bool:
        """True if no reset can arrive."""
        ends = (self, self.peer) if self.peer is not None else (self,)
        return any(each.process.cut_until > self.world.now for each in ends)


class Lock:
    """A lock of simulated threads."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: list[tuple[Thread, int]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = _EVER if timeout < 0 else self._world.now + timeout
        while self._held:
            if not blocking:
                return False
            thread = self._world.current
            self._waiting.append((thread, thread.turn + 1))
            if not self._world.wait(until) and self._held:
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        waiting, self._waiting = self._waiting, []
        for thread, turn in waiting:
            self._world.wake(thread, turn)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """A condition of simulated threads; its lock is never held while one of them waits."""

    def notify_all(self) -> None:
        self.release()
        self._held = True

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = _EVER if timeout is None else self._world.now + timeout
        while not (result := predicate()) and self._world.now < until:
            self.release()
            thread = self._world.current
            self._waiting.append((thread, thread.turn + 1))
            self._world.wait(until)
            self._held = True
        return result


class Selector(selectors.BaseSelector):
    """Sockets that a thread waits for together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[Socket, selectors.SelectorKey] = {}
        self._polls = 0  # one after the other that found nothing

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    modify = register

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        until = _EVER if timeout is None else self._world.now + timeout
        while True:
            ready = []
            for sock, key in self._keys.items():
                events = key.events
                if events & _READ and not sock.is_readable():
                    events &= ~_READ
                if events & _WRITE and not sock.is_writable():
                    events &= ~_WRITE
                if events:
                    ready.append((key, events))
            if not ready and self._world.now >= until:
                self._polls += 1
                if self._polls > _MOST_POLLS:
                    self._polls = 0
                    self._world.wait(self._world.now + 0.1)
                return ready
            if ready or not self._world.wait(until, *self._keys):
                self._polls = 0
                self._world.random.shuffle(ready)
                return ready

    def get_map(self) -> Any:
        return {}


class SimulatedSystem(System):
    """The services that a simulated process has."""

    spins = False

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._ports = itertools.count(40_000)
        self.monotonic = lambda: world.now + process.offset
        self.sleep = self._sleep
        self.uniform = world.random.uniform
        self.lock = lambda: Lock(world)
        self.condition = lambda: Condition(world)
        self.selector = lambda: Selector(world)
        self.connect = self._connect
        self.ident = lambda: id(world.current)

    def _sleep(self, seconds: float) -> None:
        self._world.wait(self._world.now + seconds)

    def start(self, name: str, target: Callable[..., object], *args: object) -> Thread:
        return self._world.start(self._process, lambda: target(*args))

    def interrupt(self, ident: int, kind: type[BaseException]) -> None:
        """Raise in another thread as it goes on, or in this one."""
        if ident == self.ident():
            raise kind
        for thread in self._process.threads:
            if id(thread) == ident:
                thread.interrupt = kind
                self._world.wake(thread, thread.turn)

    def listen(self, address: Address, *, public: bool) -> socket.socket:
        assert isinstance(address, TcpAddress)
        return self.listen_everywhere(address.port)

    def listen_everywhere(self, port: int) -> socket.socket:
        name = self._process.host, port or next(self._ports)
        if name in self._world.listeners:
            raise OSError(errno.EADDRINUSE, "the address is in use")
        sock = self._world.listeners[name] = Socket(self._world, self._process, name)
        sock.backlog = deque()
        return sock

    def _connect(self, address: Address, timeout: float) -> socket.socket:
        assert isinstance(address, TcpAddress)
        world, until = self._world, self._world.now + timeout
        self.sleep(2 * world.latency)
        listener = world.listeners.get((address.host, address.port))
        while listener is not None and self._is_cut(listener):
            if world.now >= until:
                raise TimeoutError("timed out")
            self.sleep(min(0.2, until - world.now))
        if listener is None or listener.backlog is None or listener.is_closed:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        ours = Socket(world, self._process, (self._process.host, next(self._ports)))
        theirs = Socket(world, listener.process, listener.name)
        ours.peer, theirs.peer = theirs, ours
        ours.outgoing = theirs.incoming = Pipe(world, ours, theirs)
        theirs.outgoing = ours.incoming = Pipe(world, theirs, ours)
        ours.seconds = timeout
        listener.backlog.append(theirs)
        listener.notify()
        return ours

    def _is_cut(self, listener: Socket) -> bool:
        ends = self._process, listener.process
        return any(each.cut_until > self._world.now for each in ends)

    def has_come(self, sock: socket.socket, seconds: float) -> bool:
        assert isinstance(sock, Socket)
        until = self._world.now + max(seconds, 0)
        while not sock.is_readable():
            if self._world.now >= until or not self._world.wait(until, sock):
                return sock.is_readable()
        return True

    def has_hung_up(self, sock: socket.socket) -> bool:
        assert isinstance(sock, Socket)
        pipe = sock.incoming
        return sock.is_closed or pipe is None or pipe.is_over or pipe.is_broken


class Bells:
    """What wakes the members of a board."""

    def __init__(self, world: World, size: int) -> None:
        self._world = world
        self._rung = [False] * size
        self._waiting: list[tuple[Thread, int] | None] = [None] * size

    def ring(self, rank: int) -> None:
        self._rung[rank] = True
        if (waiting := self._waiting[rank]) is not None:
            self._world.wake(*waiting)

    def wait(self, rank: int, seconds: float) -> bool:
        if not self._rung[rank]:
            thread = self._world.current
            self._waiting[rank] = thread, thread.turn + 1
            self._world.wait(self._world.now + seconds)
            self._waiting[rank] = None
        woken, self._rung[rank] = self._rung[rank], False
        return woken


def living(processes: Sequence[Process]) -> list[Process]:
    return [each for each in processes if not each.is_dead]
