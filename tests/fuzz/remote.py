"""Bytes that no client sends, and clients that are killed, at a real server.

    python -m tests.fuzz remote --messages 100000 --seed 0
    python -m tests.fuzz remote --killed 1000
    python -m tests.fuzz remote --attacks 20
    python -m tests.fuzz remote --attacks 1000 --only coming_and_going

With `--messages`: valid calls and posts, mutated, cut off, in any order, and random bytes, on many
connections. Whatever comes, the server may only answer, with a result or an `MlvmError`, or end
that connection. Meanwhile a witness keeps a tensor. In the end there are no bytes but those of the
witness, no threads, and no error of the server's own in its log.

With `--killed`: clients that compute and write are killed by SIGKILL at random moments, while four
others train. In the end the server holds no byte, and the others have had the same bits all along.

With `--attacks`: attacks on a server (`tests/fuzz/attacks.py`), that many times as large as in the
suite; 1000 times `coming_and_going` are 100,000 connections.

Prints what was tried and what came of it. What should not be is printed, and the exit status is 1.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import random
import select
import signal
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core import errors
from mlvm.core.errors import MlvmError
from mlvm.core.program.assembly import assemble
from mlvm.core.program.encoding import HEADER, Kind, Reader
from mlvm.core.types import TensorType
from mlvm.machines.remote.connect import Observer, connect
from mlvm.machines.remote.handshake import Greeting, pack
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.server import Server
from mlvm.machines.wire import encode_call
from tests.brief import start_python
from tests.core.programs import put
from tests.fuzz.attacks import ATTACKS, attack
from tests.fuzz.command import Wrong, parser_of
from tests.fuzz.making import VALID
from tests.fuzz.mutations import framed, mutated
from tests.threads import start, wait_for

SECRET: Final = "a secret for fuzzing"
PATIENCE: Final = 30.0
"""Seconds after which something hangs."""

_BATCH: Final = 40  # messages of a connection
_KNOWN: Final = {name for name in vars(errors) if isinstance(getattr(errors, name), type)}
_LIMITS: Final = Limits(
    message_bytes=1 << 20,
    held_bytes=1 << 22,
    launch_bytes=1 << 22,
    launch_steps=10_000,
    launch_seconds=2.0,
    handshake_seconds=2.0,
    handles=1000,
)


# --- messages -------------------------------------------------------------------------


def fuzz(messages: int, seed: int) -> tuple[Counter[str], str | None]:
    """Throw the given number of messages at a server. Returns what came of them, and what went
    wrong."""
    outcomes: Counter[str] = Counter()
    log = io.StringIO()
    before = threading.active_count()
    with (
        Server("127.0.0.1:0", secret=SECRET, limits=_LIMITS, log=Log("json", log)) as server,
        connect(str(server.address), secret=SECRET) as witness,
    ):
        handle = put(witness, np.arange(8, dtype=np.float32))
        sent = number = 0
        while sent < messages:
            choices = random.Random(f"{seed}/{number}")
            number += 1
            count = min(_BATCH, messages - sent)
            try:
                if choices.random() < 0.1:
                    count = _stranger(server, choices, outcomes)
                else:
                    _connection(server, choices, count, outcomes)
                if number % 20 == 0 and witness.read(handle).tolist() != list(range(8)):
                    raise Wrong("the witness's tensor has changed")
            except Wrong as error:
                return outcomes, f"connection {number - 1}: {error}"
            sent += count
        failure = _left_over(server, 32, log)
    wait_for(lambda: threading.active_count() <= before, PATIENCE)
    return outcomes, failure


def _left_over(server: Server, nbytes: int, log: io.StringIO) -> str | None:
    """Return what is left of clients that have gone, if anything is."""
    wait_for(lambda: len(server.status()["clients"]) == 1, PATIENCE)
    if server.status()["bytes"] != nbytes:
        return f"the server holds {server.status()['bytes']} bytes, not {nbytes}"
    return _wrong_in(log.getvalue().splitlines())


def _stranger(server: Server, choices: random.Random, outcomes: Counter[str]) -> int:
    """One message from who has proved nothing."""
    body = struct.pack("<I", 32) + choices.randbytes(32) + b"t" + 3 * b"\x02\0\0\0vm"
    data = mutated(pack(Greeting.hello, body), choices)
    with _socket(server) as sock:
        answer = _exchange(sock, data)
    kinds = [kind for kind, _ in _messages(answer)]
    if not set(kinds) <= {Greeting.challenge.value, Greeting.refused.value}:
        raise Wrong(f"{data!r} was answered by {answer!r}")
    outcomes["stranger: " + ("answered" if kinds else "closed")] += 1
    return 1


@contextmanager
def _socket(server: Server) -> Iterator[socket.socket]:
    host, port = str(server.address).split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
        yield sock


def _connection(server: Server, choices: random.Random, count: int, outcomes: Counter[str]) -> None:
    """Send `count` messages from a client that was let in."""
    vm = connect(str(server.address), secret=SECRET)
    try:
        types = ["f32[2,3]", "i64[4]", "f32[]", "bool[2]"]
        handles = [vm.alloc_tensor(TensorType.parse(text)) for text in types]
        storage = vm.alloc_storage(256)
        program, _ = choices.choice(VALID)
        with suppress(MlvmError):
            vm.launch(program, handles)
        with suppress(MlvmError):
            vm.synchronize()
        batch = b"".join(_message(choices, handles, storage) for _ in range(count))
        answer = _exchange(vm._stream.socket, batch)
    finally:
        vm.close()
    for kind, body in _messages(answer):
        if kind == Kind.error.value:
            name = Reader(body, 0).text()
            if name not in _KNOWN:
                raise Wrong(f"an error of class {name}: {body!r}")
            outcomes[name] += 1
        elif kind == Kind.answer.value:
            outcomes["answered"] += 1
        else:
            raise Wrong(f"a message of kind {kind} came back")


def _message(choices: random.Random, handles: list[int], storage: int) -> bytes:
    """A message, most often damaged."""
    if choices.random() < 0.004:
        return choices.randbytes(choices.randint(1, 60))
    if choices.random() < 0.1:
        numbers = [choices.choice([0, 1, 2, 2**63, *handles]) for _ in range(choices.randint(0, 4))]
        body = struct.pack(f"<{len(numbers)}Q", *numbers)
        return framed(Kind.launch)(mutated(body, choices) if choices.random() < 0.5 else body)
    x = choices.choice(handles)
    calls: list[tuple[str, list[Any]]] = [
        ("name", []), ("alloc_tensor", [TensorType("f32", (choices.randint(0, 5), 3))]),
        ("alloc_storage", [choices.choice([0, 64, 1 << 16, 1 << 40])]),
        ("tensor_from_storage", [storage, TensorType("f32", (4,)), 4 * choices.randint(0, 70)]),
        ("read", [x]), ("write", [x, np.ones((2, 3), np.float32)]),
        ("swap", [x, choices.choice(handles)]), ("dealloc_tensor", [x]),
        ("dealloc_storage", [storage]),
        ("load_program", [choices.randint(0, 3), choices.choice(VALID)[0]]),
        ("drop_program", [choices.randint(0, 3)]),
        ("launch", [choices.randint(0, 3), handles[: choices.randint(0, 4)], 1000]),
        ("estimate", [1, [TensorType("f32", (2, 3))]]), ("consumed_size_in_mib", []),
    ]  # fmt: skip
    message = encode_call(*choices.choice(calls))
    body = message[HEADER.size :]
    if choices.random() < 0.45:
        body = mutated(body, choices)
    if choices.random() < 0.004:
        return mutated(message, choices)
    return framed(choices.choice([Kind.call, Kind.call, Kind.post]))(body)


def _exchange(sock: socket.socket, data: bytes) -> bytes:
    """Send, read meanwhile, and go on reading till the other end closes. Raises `Wrong` if it
    hangs."""
    deadline = time.monotonic() + PATIENCE
    sock.setblocking(False)
    rest, answer = memoryview(data), bytearray()
    while True:
        if time.monotonic() > deadline:
            raise Wrong(f"nothing comes after {bytes(answer[-100:])!r}")
        readable, writable, _ = select.select([sock], [sock] if rest else [], [], 1.0)
        try:
            if writable:
                rest = rest[sock.send(rest) :]
                if not rest:
                    sock.shutdown(socket.SHUT_WR)
            if readable:
                piece = sock.recv(1 << 16)
                if not piece:
                    return bytes(answer)
                answer += piece
        except BlockingIOError:
            continue
        except OSError:  # the connection was ended before all was sent
            return bytes(answer)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The kinds and bodies of whole messages; the last one may be cut off."""
    at = 0
    while at + HEADER.size <= len(data):
        magic, _, kind, length = HEADER.unpack_from(data, at)
        if magic != b"MLVM":
            raise Wrong(f"no message came back: {data[at : at + 50]!r}")
        at += HEADER.size + length
        if at <= len(data):
            yield kind, data[at - length : at]


# --- clients that are killed ------------------------------------------------------------


def train(vm: ml.RemoteVM, steps: int = 30) -> str:
    """A few steps of a small net; the weights' digest."""
    with ml.Arena(vm, "weights"):
        w = ml.random.normal((8, 4), key=ml.random.key(7))
        x = ml.random.normal((16, 8), key=ml.random.key(8))
        for _ in range(steps):
            w -= 0.1 * ml.grad(lambda w: ml.mean(ml.square(ml.tanh(x @ w))))(w)
        return hashlib.sha256(w.numpy().tobytes()).hexdigest()


_SPIN: Final = assemble(".func main 0 *\nagain:\n    jump again\n    halt\n")


def be_killed(address: str, seed: str) -> None:
    """Work as a client until it is killed."""
    choices = random.Random(seed)
    vm = connect(address)
    handles = []
    while True:
        handles.append(vm.alloc_tensor(TensorType("f32", (1 << choices.randint(0, 16),))))
        handle = choices.choice(handles)
        vm.write(handle, np.zeros(vm.read(handle).shape, np.float32))
        if choices.random() < 0.05:
            vm.launch(_SPIN)


def kill(number: int, seed: int) -> str | None:
    """Kill the given number of clients of a new server. Returns what went wrong."""
    if not hasattr(os, "fork"):
        return "clients are forked, which this system cannot do"
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/s"
        command = "-m", "mlvm", "serve", "--listen", address, "--log", "json"
        with start_python(*command, stdout=None) as server:
            assert server.stderr is not None
            if '"listening"' not in server.stderr.readline():
                return "the server does not start"
            log: list[str] = []
            reader = threading.Thread(target=log.extend, args=(server.stderr,))
            killed = os.fork()
            if not killed:
                _kill_clients(address, number, seed)
                os._exit(0)
            reader.start()
            try:
                return _train_meanwhile(address, killed, number) or _wrong_in(log)
            finally:
                server.terminate()
                server.wait(PATIENCE)
                reader.join(PATIENCE)


def _kill_clients(address: str, number: int, seed: int) -> None:
    """Fork clients, a few at a time, and kill them. In a process without threads."""
    choices = random.Random(seed)
    living: list[int] = []
    for each in range(number):
        client = os.fork()
        if not client:
            with suppress(BaseException):
                be_killed(address, f"{seed}/{each}")
            os._exit(0)
        living.append(client)
        time.sleep(choices.random() * 0.02)
        if len(living) == 4:
            victim = living.pop(choices.randrange(4))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    for client in living:
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)


def _train_meanwhile(address: str, killed: int, number: int) -> str | None:
    with connect(address) as vm:
        expected = train(vm)
    wrong: list[str] = []
    over = threading.Event()

    def trainer() -> None:
        with connect(address, name="trainer") as vm:
            while not over.is_set():
                if train(vm) != expected:
                    wrong.append("a trainer has other bits")

    trainers = [start(trainer) for _ in range(4)]
    os.waitpid(killed, 0)
    over.set()
    errors = [each.exception(PATIENCE) for each in trainers]
    wrong += [f"a trainer: {error!r}" for error in errors if error is not None]
    gc.collect()
    with Observer(address) as observer:
        wait_for(lambda: not observer.status()["clients"], PATIENCE)
        status = observer.status()
    if status["bytes"]:
        wrong.append(f"the server holds {status['bytes']} bytes")
    if status["admitted"] < 5 + number // 4:
        wrong.append(f"only {status['admitted']} clients were there")
    return "; ".join(wrong) or None


def _wrong_in(log: list[str]) -> str | None:
    events = [json.loads(line) for line in log]
    wrong = [each for each in events if each["event"] == "error" or each.get("left")]
    return f"the log has {wrong[0]}" if wrong else None


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--messages", type=int, default=0, help="how many")
    parser.add_argument("--killed", type=int, default=0, help="how many clients")
    parser.add_argument("--attacks", type=int, default=0, help="of how large a scale")
    names = [each.__name__ for each in ATTACKS]
    parser.add_argument("--only", action="append", default=[], choices=names, help="an attack")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    failures = []
    if options.messages:
        outcomes, failure = fuzz(options.messages, options.seed)
        for name, n in outcomes.most_common():
            print(f"{n:8}  {name}")
        print(f"{options.messages} messages")
        failures += [failure] if failure else []
    if options.killed:
        failure = kill(options.killed, options.seed)
        print(f"{options.killed} clients killed")
        failures += [failure] if failure else []
    if options.attacks:
        failures += attack(options.attacks, options.only)
    for each in failures:
        print(each)
    return int(bool(failures))
