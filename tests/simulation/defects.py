"""Defects that groups and servers once had, or might have, for the simulation to find.

Each is a change of one function: the text that it replaces, and the new one.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from mlvm.machines.remote.lender import Lender
from mlvm.parallel.board import BoardCommunicator
from mlvm.parallel.messages import MessageCommunicator, MessageGroup, Transport
from mlvm.parallel.rendezvous import Rendezvous
from mlvm.parallel.tcp import TcpTransport, _Meeting

DEFECTS: Final[dict[str, tuple[Any, str, str, str]]] = {
    "raises while it sends": (
        MessageCommunicator,
        "_send_all",
        "self._tell_waits(call, wait, late[0])",
        "[self.miss(call, rank) for rank in call.ranks if rank in self._inbox.outcomes]",
    ),
    "no timeout of a result": (
        MessageCommunicator,
        "conclude",
        "waited >= timeout:",
        "waited >= timeout and missing:",
    ),
    "no timeout of sending": (
        MessageCommunicator,
        "_send_all",
        "call.timeout is not None and",
        "False and",
    ),
    "does not answer": (MessageCommunicator, "_tell_waits", "asks or inbox.is_asked", "asks"),
    "leaves without a reason": (
        MessageGroup,
        "_each",
        "self._leave(reason)",
        "self._leave(None)",
    ),
    "loses last words": (
        TcpTransport,
        "has_last_words",
        "return bool(self._links)",
        "return any(link.unsent for link in self._links.values())",
    ),
    "starts before all are here": (
        _Meeting,
        "_step",
        "elif len(self._here) == self.size - 1:",
        "else:",
    ),
    "leaks connections": (_Meeting, "_put", "connection[1].socket.close()", "pass"),
    "does not tell who failed": (
        _Meeting,
        "_leave",
        "tell(link, self._failure)",
        "pass",
    ),
    "bits": (
        MessageCommunicator,
        "_tell_all",
        "received[(i - me) % n]",
        "received[i]",
    ),
    "describes once for all": (
        Transport,
        "tell_round",
        "self._last_sent.get(rank) != message.digest",
        "message.digest not in self._last_sent.values()",
    ),
    "a board without timeout": (
        BoardCommunicator,
        "_sleep",
        "self._now() >= until",
        "False",
    ),
    "threads that wait for ever": (
        Rendezvous,
        "_break",
        "self._gates[rank].release()",
        "pass",
    ),
    "a server keeps memory": (Lender, "_clear_up", "session.close()", "pass"),
    "a server waits for ever": (
        Lender,
        "_lend",
        "limits.idle_seconds, limits.send_seconds",
        "0.0, 0.0",
    ),
}


@contextmanager
def having(name: str) -> Iterator[None]:
    """Have the defect in the block."""
    owner, method, old, new = DEFECTS[name]
    function = vars(owner)[method]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name}: {old!r} occurs {source.count(old)} times"
    scope: dict[str, Any] = {}
    module = vars(sys.modules[owner.__module__])
    exec(
        compile(f"from __future__ import annotations\n{source.replace(old, new)}", name, "exec"),
        module,
        scope,
    )
    with patch.object(owner, method, scope[method]):
        yield
