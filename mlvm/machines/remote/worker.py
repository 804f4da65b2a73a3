"""Child side of `processes`: a nursery process, and the client processes that it forks.

    python -m mlvm.machines.remote.worker DESCRIPTOR

The nursery has one thread and no clients, so it may fork at any time, and a forked process has
already imported all modules. A forked process is a `Server` that does not listen: it receives
admitted clients over a channel. It exits when the channel is closed, and therefore together with
the server.
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
from mlvm.machines.remote.channel import Channel, Message
from mlvm.machines.remote.lender import Lender
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log

_GRACE: Final = 1.0  # seconds

_FIRST_TO_GO: Final = 500
"""oom_score_adj of a client process: when out of memory, the system kills it before the server."""


def main() -> None:
    """Fork a process for each socket that the server sends, until the server exits."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server stops this process
        signal.signal(number, signal.SIG_IGN)
    server = Channel(socket.socket(fileno=int(sys.argv[1])))
    settings = server.listen()
    if settings is None:
        return
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # imports the remaining modules
    LocalVM("sample", native=settings.facts["options"].get("native")).close()
    gc.freeze()  # existing objects stay shared by all processes
    children: dict[int, Channel] = {}
    poll = select.poll()
    poll.register(server.socket, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    server.send({"ready": os.getpid()})
    while True:
        ready = dict(poll.poll())
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ended(children)
        if server.socket.fileno() not in ready:
            continue
        if not server.receive():
            break
        while server.has_message() and (request := server.listen()) is not None:
            channel = Channel(request.sockets[0])
            child = _fork(channel)
            if child is None:
                continue
            if child:
                children[child] = channel
                continue
            for each in (server, *children.values()):
                each.abandon()
            os.close(wake_read)
            os.close(wake_write)
            _run_process(channel, settings.facts, request.facts)
    _end(children)


def _fork(channel: Channel) -> int | None:
    """Fork like `os.fork`; if the system refuses, send a message to the channel and return None."""
    try:
        return os.fork()
    except OSError as error:
        channel.send({"ended": error.strerror})
        channel.close()
        return None


def _report_ended(children: dict[int, Channel]) -> None:
    """Report each exited child to the server, after all messages of the child."""
    for child, channel in list(children.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            channel.send({"ended": os.waitstatus_to_exitcode(status)})
            channel.close()
            del children[child]


def _end(children: dict[int, Channel]) -> None:
    """Wait for the children, which exit together with the server, and kill busy children."""
    deadline = time.monotonic() + _GRACE
    while children and time.monotonic() < deadline:
        _report_ended(children)
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_process(channel: Channel, settings: dict[str, Any], request: dict[str, Any]) -> None:
    """Run a forked process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.nice(request["nice"])
        _bound_memory(settings["limits"]["process_bytes"])
        _handle_requests(channel, settings, request["name"], shared=request["shared"])
        status = 0
    except BaseException as error:
        channel.send({"event": "error", "facts": {"vm": request["name"], "error": repr(error)}})
    finally:
        os._exit(status)


def _bound_memory(most: int) -> None:
    """Limit this process to `most` bytes in addition to the current size.

    When the system runs out of memory, it kills this process first.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_FIRST_TO_GO))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # raises above the current hard limit


def _handle_requests(
    channel: Channel, settings: dict[str, Any], name: str, *, shared: bool
) -> None:
    """Serve one VM, private to a client or shared, until the channel closes.

    A private VM is also closed when the client leaves.
    """
    lender = Lender(
        limits=Limits(**settings["limits"]),
        shared=[name] * shared,
        libraries=settings["libraries"],
        options=settings["options"],
        log=_ChannelLog(channel),
    )
    vm = lender.shared.get(name) or lender.make_vm(name)

    def serve(message: Message) -> None:
        launches, seconds = lender.lend(message.sockets[0], vm, **message.facts)
        result = {"gone": message.facts["client"], "launches": launches, "seconds": seconds}
        channel.send({**result, "metrics": lender.status()["metrics"]})
        if not shared:
            os._exit(0)

    while (message := channel.listen()) is not None:
        match message.facts.pop("do"):
            case "serve":
                threading.Thread(target=serve, args=(message,), daemon=True).start()
            case "status":
                channel.send({"status": lender.status()})
            case "resume":
                lender.resume(message.facts["client"], message.sockets[0])
            case ("refuse" | "interrupt" | "drain" | "stop") as do:
                getattr(lender, do)(**message.facts)


class _ChannelLog(Log):
    """Log that sends all events to the server."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def event(self, event: str, /, **facts: object) -> None:
        plain = {
            name: fact if isinstance(fact, (str, int, float)) else str(fact)
            for name, fact in facts.items()
        }
        self._channel.send({"event": event, "facts": plain})


if __name__ == "__main__":
    main()
