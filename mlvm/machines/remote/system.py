"""Clock, threads and network of the operating system, as a parameter of servers and groups.

`SYSTEM` is the real system. Tests pass a system with virtual time and simulated connections, in
which a seed determines every delay, loss and killed process (`tests/simulation`).
"""

from __future__ import annotations

import ctypes
import random
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mlvm.machines.remote import address as addresses

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]


class System:
    """Services of the operating system that block, or that depend on time or on other hosts."""

    spins: bool = True
    """Whether a waiting thread polls for some microseconds before it sleeps."""

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    uniform: Callable[[float, float], float] = staticmethod(random.uniform)
    lock: Callable[[], Any] = staticmethod(threading.Lock)
    condition: Callable[[], Any] = staticmethod(threading.Condition)
    selector: Callable[[], selectors.BaseSelector] = staticmethod(selectors.DefaultSelector)
    connect: Callable[[addresses.Address, float], socket.socket] = staticmethod(addresses.connect)

    ident: Callable[[], int] = staticmethod(threading.get_ident)

    def interrupt(self, ident: int, kind: type[BaseException]) -> None:
        """Raise an exception in a different thread, between two bytecodes of that thread."""
        _raise_in(ident, kind)

    def start(self, name: str, target: Callable[..., object], *args: object) -> Any:
        """Start a daemon thread. Raises `RuntimeError` if the system has no more threads."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def listen(self, address: addresses.Address, *, public: bool) -> socket.socket:
        """Open a socket that listens at the address: see `mlvm.machines.remote.address.listen`."""
        return addresses.listen(address, public=public)

    def listen_everywhere(self, port: int) -> socket.socket:
        """Open a socket that listens on all networks of this host. Raises `OSError`."""
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))

    def has_come(self, sock: socket.socket, seconds: float) -> bool:
        """Wait until bytes or a connection can be received, at most `seconds`.

        Return whether they can.
        """
        poll = select.poll()  # select.select supports no descriptor above 1023
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(max(seconds, 0.0) * 1e3))

    def has_hung_up(self, sock: socket.socket) -> bool:
        """Return whether the peer has closed the connection."""
        try:
            poll = select.poll()
            poll.register(sock, getattr(select, "POLLRDHUP", 0))
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed on this side
            return True


SYSTEM: Final = System()
