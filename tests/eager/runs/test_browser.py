"""The debugger's page: its commands, its panes, and requests that it refuses."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.eager.runs.browser import DebuggerServer
from mlvm.eager.runs.debugger import Debugger
from mlvm.eager.runs.execution import Execution
from mlvm.eager.runs.ops import op_program
from tests.brief import Capsys, Patch, cases
from tests.eager.runs.recorded import train

pytestmark = pytest.mark.local(reason="executions run on a VM of this process")


def step(x: ml.Tensor) -> ml.Tensor:
    y = x * 2.0
    z = ml.exp(y)
    return ml.sum(z)


@pytest.fixture
def server() -> Iterator[DebuggerServer]:
    program, inputs = op_program(ml.capture(step), (ml.ones(3),), {})
    with DebuggerServer(Debugger(Execution(program, inputs)), ["n"], "a <title>") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def requested(url: str, data: str | None = None, **headers: str) -> str:
    body = None if data is None else data.encode()
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def answered(server: DebuggerServer, command: str) -> dict[str, Any]:
    return json.loads(requested(f"{server.url}command", command))


def test_commands_and_panes(server: DebuggerServer) -> None:
    page = requested(server.url)
    assert "<h1>a &lt;title&gt;</h1>" in page
    assert "(mlvm) n\n[1] " in page
    answer = answered(server, "p y")
    assert "[2., 2., 2.]" in answer["text"]
    assert "-> " in answer["source"]
    assert "z = ml.exp(y)" in answer["source"]
    assert answer["arena"].startswith("moment 1: ")
    assert answered(server, "rs")["text"].startswith("[0] ")
    assert json.loads(requested(f"{server.url}panes"))["moment"] == 0
    assert "error: unknown command 'nothing'" in answered(server, "nothing")["text"]
    assert answered(server, "")["text"] == answered(server, "nothing")["text"]
    assert "error: unknown command" in requested(server.url)
    assert ">now</text>" in requested(f"{server.url}arena.svg?0")


def test_other_tokens_hosts_and_names_are_refused(server: DebuggerServer) -> None:
    host, url = f"http://{server.host}", server.url
    for bad, data, headers in (
        (f"{host}/", None, {}),
        (f"{host}/command", "n", {}),
        (f"{host}/{'x' * 22}/command", "n", {}),
        (f"{url}command", "n", {"Host": "example.com"}),
        (f"{url}command", "n" * 100_000, {}),
        (f"{url}nothing", None, {}),
        (f"{url}nothing", "n", {}),
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            requested(bad, data, **headers)
    assert server.panes()["moment"] == 1


def sent(server: DebuggerServer, length: str, body: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
    head = f"POST {server.path}command HTTP/1.1\r\nHost: {server.host}\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{body}".encode())
    return connection


@cases("length", "10", "9" * 5000, "65537", "-1", "x")
def test_an_incomplete_command_and_wrong_lengths_are_refused(
    server: DebuggerServer, length: str
) -> None:
    with sent(server, length, "q") as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile().readline()
    assert answer.split()[1] == ("400" if length == "10" else "404")
    assert not server.has_ended


def test_a_closed_connection_ends_the_server_without_a_traceback(capsys: Capsys) -> None:
    program, inputs = op_program(ml.capture(step), (ml.ones(3),), {})
    with DebuggerServer(Debugger(Execution(program, inputs)), [], "title") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with server._lock:
            connection = sent(server, "1", "q")
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            time.sleep(0.2)  # the handler has read the command
            connection.close()
        thread.join(20)
        has_ended = not thread.is_alive()
        server.shutdown()
    assert has_ended
    assert not capsys.readouterr().err


def test_the_command_serves_until_q(folder: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    train(folder / "a")
    threads: list[threading.Thread] = []

    def visit(url: str) -> None:
        threads.append(threading.Thread(target=requested, args=(f"{url}command", "q")))
        threads[0].start()

    monkeypatch.setattr(webbrowser, "open", visit)
    assert main(["debug", "a", "--step", "3", "--browser"]) == 0
    threads[0].join()
    assert capsys.readouterr().out.startswith("page  http://127.0.0.1:")
    assert main(["debug", "a", "--browser", "--command", "q"]) == 0
    assert not capsys.readouterr().out
