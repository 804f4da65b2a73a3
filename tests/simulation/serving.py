"""A server and its clients in a simulated world.

Each client computes on its VM, with arrays of all sizes. One fault may strike one client, or the
server: it is killed, stops, is cut off, leaves in the middle, or has another secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from mlvm.core.errors import AccessDeniedError, CallTimeoutError, ConnectionLostError, MlvmError
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.server import Server
from tests.core.programs import ADD_INTO, NEGATIVE, put
from tests.simulation.world import World

_SECRET: Final = "between you and me"
_ADDRESS: Final = "10.0.0.1:29500"
_PATIENCE: Final = 3.0  # seconds of a call, and of a silent client

FAULTS: Final = (
    "none", "none", "killed", "killed", "stopped", "paused", "cut", "healed", "secret", "leaves",
    "full", "server killed", "server stopped", "server closes",
)  # fmt: skip


class Serving:
    """A server and clients in a world, and what becomes of each."""

    longest: Final = 200.0
    """Virtual seconds after which a client that still runs hangs."""

    def __init__(self, world: World) -> None:
        draw = world.random
        self.world = world
        self.fault = draw.choice(FAULTS)
        world.bandwidth = 1e9 if world.bandwidth < 1e6 else world.bandwidth  # see `FIXED.speed`
        world.buffer, world.latency = max(world.buffer, 5_000), min(world.latency, 1e-4)
        if self.fault == "full":
            world.buffer, world.latency = 2_000, 1e-5
        self.count = draw.randint(1, 4)
        self.victim = draw.randrange(self.count)
        self.works = [
            [draw.choice((1, 100, 3_000, 70_000)) for _ in range(draw.randint(1, 4))]
            for _ in range(self.count)
        ]
        self.completed = [0] * self.count
        self.errors: list[BaseException | None] = [None] * self.count
        self.ended = [False] * self.count
        self.vms: list[RemoteVM] = []
        self.left: dict[str, Any] = {}
        self.host = world.process("server", "10.0.0.1")
        self.processes = [world.process(f"c{i}", f"10.0.1.{i}") for i in range(self.count)]
        self.server: Server | None = None
        self.leaves_after = draw.randrange(4)
        self.is_shared = draw.random() < 0.3  # all clients compute on one VM
        self._strike()
        world.start(self.host, self._serve)
        for i, process in enumerate(self.processes):
            world.start(process, lambda i=i: self._client(i))  # type: ignore[misc]

    def _strike(self) -> None:
        world, draw = self.world, self.world.random
        at = int(10 ** draw.uniform(0.5, 3.0))
        struck = self.host if self.fault.startswith("server") else self.processes[self.victim]
        world.strike(struck, self.fault.removeprefix("server "), at, _PATIENCE / 3)
        if self.fault == "server closes":
            world.at_event[at] = self._start_to_close

    def _start_to_close(self) -> None:
        self.world.start(self.host, self._close)

    # --- the programs ---

    def _serve(self) -> None:
        limits = Limits(idle_seconds=_PATIENCE, send_seconds=_PATIENCE, handshake_seconds=_PATIENCE)
        self.server = Server(
            _ADDRESS,
            secret=_SECRET,
            insecure=True,
            limits=limits,
            shared=["shared"] * self.is_shared,
            system=self.host.system,
        )
        self.host.system.sleep(100.0)
        self.left = self.server.status()
        self._close()

    def _close(self) -> None:
        if self.server is not None:
            self.server.close()

    def _client(self, i: int) -> None:
        system = self.processes[i].system
        system.sleep(system.uniform(0.05, 0.06))
        secret = _SECRET + "!" * (self.fault == "secret" and i == self.victim)
        try:
            vm = connect(
                _ADDRESS,
                secret=secret,
                vm="shared" if self.is_shared else None,
                timeout=10.0,
                call_timeout=_PATIENCE,
                system=system,
            )
            self.vms.append(vm)
            with vm:
                for n in self.works[i]:
                    if (
                        self.fault == "leaves"
                        and i == self.victim
                        and self.completed[i] >= self.leaves_after
                    ):
                        vm._stream.close()  # in the middle of whatever goes on
                        return
                    self._compute(vm, n)
                    self.completed[i] += 1
        except MlvmError as error:
            self.errors[i] = error
        finally:
            self.ended[i] = not self.processes[i].is_dead

    def _compute(self, vm: RemoteVM, n: int) -> None:
        x = np.random.default_rng(n).random(n, np.float32)
        a, b = put(vm, x), put(vm, x)
        for _ in range(3):
            vm.launch(ADD_INTO, [a, a, b])
        [y] = vm.launch(NEGATIVE, [a])
        z = vm.read(a)
        vm.dealloc_tensor(b)
        wanted = ((x + x) + x) + x
        if y.tobytes() != (-wanted).tobytes() or z.tobytes() != wanted.tobytes():
            raise AssertionError(f"wrong bits of {n} elements")

    def close(self) -> None:
        for vm in self.vms:
            vm._end("the world has ended")
        if self.server is not None:
            for client in list(self.server.lender.clients.values()):
                if client.vm is not None:
                    client.vm.close()

    # --- what must be ---

    def __str__(self) -> str:
        of = " of one VM" * self.is_shared
        return f"a server with {self.count} clients{of}, {self.fault} member {self.victim}"

    def wrong(self) -> Iterator[str]:
        """Yield what should not be."""
        of_server = self.fault.startswith("server")
        for i, process in enumerate(self.processes):
            if process.is_dead or process.stopped_until == float("inf"):
                continue
            for thread in process.threads:
                if thread.error is not None:
                    yield f"client {i}: {thread.error!r}"
            if not self.ended[i]:
                yield f"client {i} hangs"
                continue
            if process.sockets:
                yield f"client {i} leaves {len(process.sockets)} sockets"
            error = self.errors[i]
            text = f"{type(error).__name__}: {error}"
            is_well = error is None and self.completed[i] == len(self.works[i])
            if is_well or (self.fault == "leaves" and i == self.victim):
                continue
            if self.fault == "secret" and i == self.victim:
                if not isinstance(error, AccessDeniedError):
                    yield f"client {i} with another secret: {text}"
            elif not of_server and (i != self.victim or self.fault not in ("cut",)):
                yield f"client {i} without a fault: {text}"
            elif not isinstance(error, (ConnectionLostError, CallTimeoutError, AccessDeniedError)):
                yield f"client {i}: {text}"
        if self.host.is_dead or self.host.stopped_until == float("inf"):
            return
        for thread in self.host.threads:
            if thread.error is not None:
                yield f"server: {thread.error!r}"
            elif thread.is_alive():
                yield "a thread of the server is left"
        if self.left and (self.left["bytes"] or self.left["clients"]):
            yield f"the server holds {self.left['bytes']} bytes of {self.left['clients']}"
        if self.host.sockets:
            yield f"the server leaves {len(self.host.sockets)} sockets"
