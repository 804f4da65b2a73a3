"""Members that meet by TCP, each on a thread of this process: what `Group` does, over sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from mlvm.core.errors import GroupError
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.tcp import TcpGroup

SECRET = "between the members alone"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Joined:
    """As many `TcpGroup`s as members, of which each has one."""

    def __init__(self, size: int, *, timeout: float | None = None) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        address = free_address()
        self.members: list[TcpGroup] = self._all(
            [
                partial(TcpGroup, rank, size, address, secret=SECRET, timeout=timeout)
                for rank in range(size)
            ]
        )

    def run(self, fn: Callable[[int, VM], Any]) -> list[Any]:
        """The results by rank, of which each member has to have all; or the first one's error."""
        first, *others = self._all([partial(each.run, fn) for each in self.members])
        assert all(map(len, [first, *others]))
        return list(first)

    def keep(self, fn: Callable[[int, VM], Any]) -> Callable[..., list[Any]]:
        functions = self._all([partial(each.keep, fn) for each in self.members])

        def call(*args: Sequence[Any], **common: Any) -> list[Any]:
            return list(self._all([partial(each, *args, **common) for each in functions])[0])

        return call

    def _all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        done = [self._pool.submit(each) for each in calls]
        errors = [each.exception(30) for each in done]
        failed = [error for error in errors if error is not None]
        if failed:
            own = [error for error in failed if not isinstance(error, GroupError)]
            raise [*own, *failed][0]
        return [each.result() for each in done]

    def close(self) -> None:
        self._all([each.close for each in self.members])
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
