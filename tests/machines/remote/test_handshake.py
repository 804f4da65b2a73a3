"""Admission of clients: secrets, both ways, and attacks on them."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlvm.core.errors import (
    AccessDeniedError,
    AddressError,
    ConnectionLostError,
    MachineError,
    MlvmError,
)
from mlvm.core.program.encoding import HEADER, VERSION
from mlvm.machines.remote import handshake
from mlvm.machines.remote.command import table
from mlvm.machines.remote.connect import Observer, connect
from mlvm.machines.remote.handshake import (
    NONCE,
    Greeting,
    Hello,
    admit,
    greet,
    pack,
    plain,
    receive,
    refusal,
)
from mlvm.machines.remote.secret import find_secret, make_secret, read_secret
from mlvm.machines.remote.server import Server
from tests.brief import Patch, cases, refuses
from tests.core.programs import put
from tests.fuzz.mutations import mutated
from tests.machines.remote.serving import (
    CERTIFICATE,
    OTHER_CERTIFICATE,
    SECRET,
    Served,
    connected,
    limits,
)
from tests.threads import PATIENCE, start, within

KEY = SECRET.encode()


def soon() -> float:
    return time.monotonic() + 2.0


@contextmanager
def admitting(secret: bytes | None = KEY, *, trusted: bool = False) -> Iterator[Any]:
    """One end of a connection to a server that admits; what it says at the end is in `.said`."""
    here, there = socket.socketpair()

    class End:
        sock = here
        answer: object = None

    def serve() -> None:
        try:
            users = None if secret is None else {"": secret}
            admit(there, users, trusted=trusted, decide=lambda hello: {"x": 1}, deadline=soon())
            End.answer = "welcome"
        except MlvmError as error:
            End.answer = error
        finally:
            there.close()

    serving = start(serve)
    try:
        yield End
    finally:
        here.close()
        serving.result(PATIENCE)


def test_no_secret_is_refused_but_for_the_own_user() -> None:
    with admitting() as end, pytest.raises(AccessDeniedError, match="a secret is required"):
        greet(end.sock, None, Hello(), soon())
    with admitting(trusted=True) as end:
        assert greet(end.sock, None, Hello(), soon()) == {"x": 1}
    with (
        admitting(None, trusted=True) as end,
        pytest.raises(AccessDeniedError, match="has no secret"),
    ):
        greet(end.sock, KEY, Hello(), soon())


def test_the_secret_is_never_sent() -> None:
    sent = passed_on()
    assert [kind for _, kind, _ in sent] == ["hello", "challenge", "proof", "welcome"]
    assert not any(KEY in message for _, _, message in sent)


def passed_on(
    change: Callable[[str, bytes], bytes] = lambda kind, message: message,
    secret: bytes | None = KEY,
) -> list[tuple[str, str, bytes]]:
    """Run a handshake with a man in the middle, who may change each message. Returns what passed.
    Raises what the client raises, or what the server does."""
    passed: list[tuple[str, str, bytes]] = []
    with admitting() as end:
        here, between = socket.socketpair()

        def relay() -> None:
            try:
                for source, sink, side in 2 * ((between, end.sock, "c"), (end.sock, between, "s")):
                    _, kind, message = receive(source, soon())
                    name = Greeting(kind).name
                    passed.append((side, name, message))
                    sink.sendall(change(name, message))
            except (MlvmError, OSError):
                pass
            finally:
                between.close()

        relaying = start(relay)
        try:
            greet(here, secret, Hello(), soon())
        finally:
            here.close()
            relaying.result(PATIENCE)
    return passed


def test_every_byte_that_matters_is_proved() -> None:
    """A changed bit anywhere is noticed by one side or the other."""
    random = Random(0)
    honest = passed_on()
    for _, name, message in honest:
        for _ in range(6):
            at = random.randrange(4, len(message))
            if HEADER.size - 8 <= at < HEADER.size:
                continue  # a length: the receiver waits for more, till its time is up

            def change(kind: str, data: bytes, name: str = name, at: int = at) -> bytes:
                if kind != name:
                    return data
                return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]

            refuses((AccessDeniedError, ConnectionLostError), "", passed_on, change)


def test_what_was_heard_is_of_no_use_again() -> None:
    heard = {name: message for _, name, message in passed_on()}
    with admitting() as end:
        end.sock.sendall(heard["hello"])
        _, kind, challenge = receive(end.sock, soon())
        assert challenge != heard["challenge"]
        end.sock.sendall(heard["proof"])
        _, kind, _ = receive(end.sock, soon())
        assert kind == Greeting.refused.value
    assert isinstance(end.answer, AccessDeniedError)


def test_a_servers_messages_are_of_no_use_to_a_false_server() -> None:
    """One that replays a server's part, or sends the client's own proof back, is found out."""
    heard = {name: message for _, name, message in passed_on()}

    def replayed(kind: str, message: bytes) -> bytes:
        return heard[kind] if kind in ("challenge", "welcome") else message

    refuses(AccessDeniedError, "", passed_on, replayed)
    proofs: list[bytes] = []

    def reflected(kind: str, message: bytes) -> bytes:
        if kind == "proof":
            proofs.append(message[HEADER.size :])
        if kind == "welcome":
            return message.replace(message[HEADER.size + 4 :][:NONCE], proofs[0])
        return message

    refuses(AccessDeniedError, "does not know the secret", passed_on, reflected)


def test_a_client_cannot_be_talked_out_of_its_secret() -> None:
    """A man in the middle who says that the client has none is found out; so is one who plays a
    server that asks for none."""

    def without(kind: str, message: bytes) -> bytes:
        return message.replace(b"t", b"f", 1) if kind == "hello" else message

    refuses(AccessDeniedError, "", passed_on, without)
    with (
        admitting(b"not the secret that is", trusted=True) as end,
        pytest.raises(AccessDeniedError),
    ):
        greet(end.sock, KEY, Hello(), soon())


@cases("version", 0, VERSION - 1, VERSION + 1, 60000)
def test_a_client_of_another_version_hears_both(version: int) -> None:
    with admitting() as end:
        end.sock.sendall(pack(Greeting.hello, b"of another layout", version))
        _, kind, message = receive(end.sock, soon())
    assert kind == Greeting.refused.value
    assert f"version {version} ".encode() in message
    assert f"version {VERSION}".encode() in message


def test_a_server_of_other_kernels_is_refused_unless_they_may_differ() -> None:
    with Server("127.0.0.1:0", secret=SECRET, about={"versions": "mlvm 0, odd kernels"}) as server:
        address = str(server.address)
        text = "the server has mlvm 0, odd kernels, but this client has mlvm .*; .* mixed=True"
        refuses(AccessDeniedError, text, connect, address, secret=SECRET)
        connect(address, secret=SECRET, mixed=True).close()


def test_a_server_of_another_version_is_named() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(pack(Greeting.challenge, b"whatever", 9))
        with pytest.raises(AccessDeniedError, match=rf"server uses version 9 .* version {VERSION}"):
            greet(here, KEY, Hello(), soon())
    here, there = socket.socketpair()
    with here, there:  # a refusal is understood whatever its version
        message = refusal("of the future")
        there.sendall(message[:4] + b"\x09" + message[5:])
        refuses(AccessDeniedError, "of the future", greet, here, KEY, Hello(), soon())


def test_mutated_handshakes_let_nobody_in() -> None:
    random = Random(1)
    hello = {name: message for _, name, message in passed_on()}["hello"]
    for _ in range(60):
        damaged = mutated(hello, random)
        with admitting() as end:
            end.sock.sendall(damaged)
            end.sock.shutdown(socket.SHUT_WR)
        assert isinstance(end.answer, MlvmError), (damaged, end.answer)


def test_a_silent_and_a_slow_client_are_given_up() -> None:
    with Served(limits=limits(handshake_seconds=0.3)) as server:
        with within(3), connected(server, timeout=5) as silent, connected(server) as slow:
            for each in b"MLVM\x01":
                slow.sendall(bytes([each]))
                time.sleep(0.05)
            assert silent.recv(1) == b""
            slow.settimeout(5)
            assert slow.recv(1) == b""
            server.vm().close()  # others come and go meanwhile
        assert len(server.events("refused", 2)) == 2


def test_who_speaks_something_else_is_refused_quickly() -> None:
    with Served() as server:
        with connected(server, timeout=5) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert sock.recv(100) == b""
        refuses((AccessDeniedError, ConnectionLostError), "TLS", server.vm, tls=CERTIFICATE)


# --- secrets and their files -----------------------------------------------------------


def test_a_server_without_secret_or_with_a_short_one_is_refused(tmp_path: Path) -> None:
    refuses(AccessDeniedError, "needs a secret", Server, "127.0.0.1:0")
    refuses(AccessDeniedError, "at least 16 bytes", Server, "127.0.0.1:0", secret="short")
    with Server(f"unix:{tmp_path}/s") as server:
        connect(str(server.address)).close()
        refuses(AccessDeniedError, "has no secret", connect, str(server.address), secret=SECRET)


def test_a_secret_file_has_to_be_private(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "secret"
    path.write_text(make_secret() + "\n")
    path.chmod(0o640)
    refuses(AccessDeniedError, "chmod 600", read_secret, path)
    path.chmod(0o600)
    assert read_secret(path) == path.read_bytes().strip()
    refuses(AccessDeniedError, "got both", find_secret, "x" * 20, path)
    monkeypatch.setenv("MLVM_SECRET_FILE", str(path))
    assert find_secret(None, None) == path.read_bytes().strip()
    with Served(secret=read_secret(path)) as server:
        server.vm(secret=None, secret_file=str(path)).close()
        server.vm(secret=None).close()
        monkeypatch.delenv("MLVM_SECRET_FILE")
        refuses(AccessDeniedError, "a secret is required", server.vm, secret=None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_private_file_has_no_secret(tmp_path: Path, monkeypatch: Patch) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / "secret"
    os.mkfifo(pipe, 0o600)
    refuses(AccessDeniedError, "chmod 600", read_secret, pipe)  # and is not waited for
    path.write_bytes(b"x" * 65_500 + b"y" * 37)
    path.chmod(0o600)
    for nothing in (bytes(32), b" \0" * 16, b"a" + b" " * 30 + b"b", b"ab" * 16):
        path.write_bytes(nothing)
        refuses(AccessDeniedError, "at least 5 of them different|at least 16", read_secret, path)
        refuses(
            AccessDeniedError,
            "at least 5 of them different|at least 16",
            Server,
            "127.0.0.1:0",
            secret=nothing,
        )
    path.write_text(make_secret())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refuses(AccessDeniedError, "must belong to you", read_secret, path)
    refuses(AccessDeniedError, "must belong to you", Served, certificate=CERTIFICATE)
    monkeypatch.undo()
    copy = tmp_path / "key.pem"
    copy.write_bytes(Path(CERTIFICATE).read_bytes())
    copy.chmod(0o640)
    refuses(
        AccessDeniedError,
        "the file of a key must belong to you.*chmod 600",
        Served,
        certificate=str(copy),
    )


def test_a_reason_is_short_and_no_terminal_obeys_it() -> None:
    names = [f"{n:03}\x1b[31m{'x' * 190}" for n in range(200)]
    with Served(shared=names) as server:
        caught = refuses(AccessDeniedError, "unknown shared VM", server.vm, vm="other")
        assert len(str(caught)) < 1000
        assert str(caught).isprintable()
        with Observer(str(server.address), secret=SECRET) as observer:
            shown = table(observer.status(), lambda _: 0.0)
            assert all(line.isprintable() for line in shown.splitlines())
            assert len(shown.splitlines()) == 202
        with connected(server) as sock:
            hello = Hello(name="y" * 201)
            refuses((AccessDeniedError, ConnectionLostError), "", greet, sock, KEY, hello, soon())
    assert plain("\x1b[2Jred\n" + "z" * 600) == "?[2Jred?" + "z" * 492 + "..."
    refuses(MachineError, "1 to 200 characters", Served, shared=["x" * 201])


def test_no_secret_is_ever_logged() -> None:
    with Served() as server:
        server.vm().close()
        refuses(AccessDeniedError, "", server.vm, secret="another secret of mine")
    text = server.stream.getvalue()
    assert "refused" in text
    assert SECRET not in text
    assert "another secret of mine" not in text


# --- TLS ---------------------------------------------------------------------------------


def test_tls_carries_calls_and_large_arrays() -> None:
    import numpy as np

    with Served(certificate=CERTIFICATE) as server:
        address = str(server.address).replace("127.0.0.1", "localhost")
        for tls in (CERTIFICATE, ssl.create_default_context(cafile=CERTIFICATE)):
            with connect(address, secret=SECRET, tls=tls) as vm:
                x = np.arange(300_000, dtype=np.float32)
                assert np.array_equal(vm.read(put(vm, x)), x)
        with Observer(address, secret=SECRET, tls=CERTIFICATE) as observer:
            assert observer.ping() < 5


def test_a_certificate_that_is_not_trusted_is_refused() -> None:
    with Served(certificate=CERTIFICATE) as server:
        for tls in (True, OTHER_CERTIFICATE):
            refuses(AccessDeniedError, "certificate", server.vm, tls=tls)
        refuses(AddressError, "cannot read trusted certificates", server.vm, tls="/no/such/file")
    with pytest.raises(AddressError, match=r"cannot read a certificate and key in [^,]*: "):
        Served(certificate=OTHER_CERTIFICATE)  # has no key


def test_an_unencrypted_client_on_a_tls_port_is_told_so_quickly() -> None:
    with Served(certificate=CERTIFICATE) as server:
        with within(2):
            refuses(AccessDeniedError, "requires TLS", server.vm, tls=False)
        assert "requires TLS" in server.events("refused", 1)[0]["reason"]


@cases("alert", b"", bytes.fromhex("15030300020100"))
def test_a_server_that_closes_the_tls_handshake_is_tried_again(alert: bytes) -> None:
    """A busy server closes connections, with the alert close_notify or without."""
    tries = 0

    def close_each() -> None:
        nonlocal tries
        with contextlib.suppress(OSError):  # the socket is closed at the end
            while True:
                sock, _ = listener.accept()
                with sock:
                    tries += 1
                    sock.recv(4096)
                    sock.sendall(alert)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        start(close_each)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        refuses(ConnectionLostError, "cannot use TLS", connect, address, secret=SECRET, tls=True)
        listener.shutdown(socket.SHUT_RDWR)
    assert tries == 10


def test_the_proof_is_bound_to_the_channel(monkeypatch: Patch) -> None:
    """A man in the middle of two TLS connections, with a certificate that the client trusts, cannot
    pass the proof on: it is of the other connection."""
    with Served(certificate=CERTIFICATE) as server:
        server.vm().close()
        channel = handshake._channel
        here = threading.get_ident()

        def of_another(sock: socket.socket) -> bytes:
            return b"another" if threading.get_ident() == here else channel(sock)

        monkeypatch.setattr(handshake, "_channel", of_another)
        refuses(AccessDeniedError, "the secret is wrong", server.vm)
