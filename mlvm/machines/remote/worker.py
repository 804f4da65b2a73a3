"""The other side of `processes`: a nursery, and the processes of clients that are forked from it.

    python -m mlvm.machines.remote.worker DESCRIPTOR

The nursery has one thread and no client, so it may fork at any time, and what it forks has imported
all already. A forked process is a `Server` that listens nowhere: clients come to it, already let
in, through its channel. It ends with its channel, thus with the server.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, Final

from mlvm.machines.local import LocalVM
from mlvm.machines.remote.channel import Channel, Told
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.server import Server

_GRACE: Final = 1.0  # seconds

_FIRST_TO_GO: Final = 500
"""What the system adds to a process's badness when it has no memory left: the server stays."""


def main() -> None:
    """Fork a process for each socket that comes, until the server is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server says when to end
        signal.signal(number, signal.SIG_IGN)
    server = Channel(socket.socket(fileno=int(sys.argv[1])))
    settings = server.listen()
    if settings is None:
        return
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    LocalVM("sample", native=settings.facts["options"].get("native")).close()  # imports the rest
    gc.freeze()  # what is there now stays one copy for all
    children: dict[int, Channel] = {}
    poll = select.poll()
    poll.register(server.socket, select.POLLIN)
    poll.register(woken, select.POLLIN)
    server.tell({"ready": os.getpid()})
    while True:
        ready = dict(poll.poll())
        if woken in ready:
            os.read(woken, 4096)
            _bury(children)
        if server.socket.fileno() not in ready:
            continue
        if not server.receive():
            break
        while server.has_message() and (asked := server.listen()) is not None:
            channel = Channel(asked.sockets[0])
            child = _fork(channel)
            if child is None:
                continue
            if child:
                children[child] = channel
                continue
            for each in (server, *children.values()):
                each.abandon()
            os.close(woken)
            os.close(wakes)
            _be_process(channel, settings.facts, asked.facts)
    _end(children)


def _fork(channel: Channel) -> int | None:
    """As `os.fork`; None where the system has no more processes, which the channel is told."""
    try:
        return os.fork()
    except OSError as error:
        channel.tell({"ended": error.strerror})
        channel.close()
        return None


def _bury(children: dict[int, Channel]) -> None:
    """Tell the server of each child that has ended: after all that it has told itself."""
    for child, channel in list(children.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            channel.tell({"ended": os.waitstatus_to_exitcode(status)})
            channel.close()
            del children[child]


def _end(children: dict[int, Channel]) -> None:
    """Wait for the children, which end with the server, and kill those that are too busy to."""
    deadline = time.monotonic() + _GRACE
    while children and time.monotonic() < deadline:
        _bury(children)
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_process(channel: Channel, settings: dict[str, Any], asked: dict[str, Any]) -> None:
    """The life of a forked process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limits = Limits(**settings["limits"])
        os.nice(asked["nice"])
        _bound_memory(limits.process_bytes)
        _Process(channel, limits, settings, asked).run()
        status = 0
    except BaseException as error:
        channel.tell({"event": "error", "facts": {"vm": asked["name"], "error": repr(error)}})
    finally:
        os._exit(status)


def _bound_memory(most: int) -> None:
    """Let this process have so many bytes more than it has now, and be the first to go where the
    system has none."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_FIRST_TO_GO))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # refused above what is set already


class _Process:
    """Serves one VM: to one client, whose own it is, or to all that come."""

    def __init__(
        self,
        channel: Channel,
        limits: Limits,
        settings: dict[str, Any],
        asked: dict[str, Any],
    ) -> None:
        self._channel = channel
        name = asked["name"]
        self._shared = asked["shared"]
        self._server = Server(
            None,
            limits=limits,
            shared=[name] * self._shared,
            libraries=settings["libraries"],
            options=settings["options"],
            log=_ToldLog(channel),
        )
        self._vm = self._server.shared.get(name) or self._server.make_vm(name)

    def run(self) -> None:
        """Do what the server tells, until the channel ends, or the client whose VM this is goes."""
        while (told := self._channel.listen()) is not None:
            match told.facts.pop("do"):
                case "serve":
                    threading.Thread(target=self._serve, args=(told,), daemon=True).start()
                case "status":
                    self._channel.tell({"status": self._server.status()})
                case "resume":
                    self._server.resume(told.facts["client"], told.sockets[0])
                case "refuse":
                    self._server.refuse(**told.facts)
                case "interrupt":
                    self._server.interrupt(**told.facts)
                case "drain":
                    self._server.drain()
                case "stop":
                    self._server.stop(told.facts["reason"])

    def _serve(self, told: Told) -> None:
        launches, seconds = self._server.lend(told.sockets[0], self._vm, **told.facts)
        gone = {"gone": told.facts["client"], "launches": launches, "seconds": seconds}
        self._channel.tell({**gone, "metrics": self._server.status()["metrics"]})
        if not self._shared:
            os._exit(0)


class _ToldLog(Log):
    """A log that the server writes."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def event(self, event: str, /, **facts: object) -> None:
        told = {
            name: fact if isinstance(fact, (str, int, float)) else str(fact)
            for name, fact in facts.items()
        }
        self._channel.tell({"event": event, "facts": told})


if __name__ == "__main__":
    main()
