"""A server as a service: its metrics, systemd, and files that are read again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from mlvm.__main__ import parser
from mlvm.core.errors import AccessDeniedError, AddressError, LimitExceededError, OutOfMemoryError
from mlvm.machines.remote import metrics as page_of_metrics
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.metrics import BUCKETS, Metrics, MetricsPage
from mlvm.machines.remote.notify import inherited_socket, notify
from tests.brief import ROOT, Patch, cases, refuses, start_python
from tests.machines.remote.serving import (
    CERTIFICATE,
    FOR_EVER,
    RENEWED_CERTIFICATE,
    SECRET,
    Served,
    connected,
    limits,
)
from tests.threads import wait_for

# --- metrics -----------------------------------------------------------------------------


def read(page: MetricsPage, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{page.address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def values_of(text: str) -> dict[str, float]:
    """The samples of a page, each line of which is a sample or tells about one."""
    lines = text.splitlines()
    comments = [line for line in lines if re.fullmatch(r"# (HELP|TYPE) mlvm_[a-z_]+ .+", line)]
    samples = [
        re.fullmatch(r'(mlvm_[a-z_]+(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")?\})?) (\S+)', x)
        for x in lines
    ]
    values = {match[1]: float(match[2]) for match in samples if match is not None}
    assert len(comments) + len(values) == len(lines)
    return values


@cases("processes", 0, 2)
def test_what_a_server_does_is_on_a_page(processes: int) -> None:
    tight = limits(held_bytes=1000)
    with Served(limits=tight, processes=processes) as server, MetricsPage(server, ":0") as page:
        assert read(page, "/healthz") == (200, "ok\n")
        assert read(page, "/")[0] == 404
        vm, second = server.vm(), server.vm()
        refuses(AccessDeniedError, "", server.vm, secret="another secret than that")
        for _ in range(3):
            refuses(LimitExceededError, "", second.launch, FOR_EVER, max_steps=10)
        second.close()
        refuses(OutOfMemoryError, "", vm.alloc_storage, 2000)
        vm.alloc_storage(100)
        wait_for(lambda: len(server.status()["clients"]) == 1)
        status, text = read(page, "/metrics")
        values = values_of(text)
        assert status == 200
        expected = {
            "mlvm_clients": 1, "mlvm_held_bytes": 100, "mlvm_admitted_total": 2,
            "mlvm_refused_total": 1, 'mlvm_limits_hit_total{error="LimitExceededError"}': 3,
            'mlvm_limits_hit_total{error="OutOfMemoryError"}': 1,
            'mlvm_seconds_count{of="handshake"}': 2,
        }  # fmt: skip
        assert {name: values.get(name) for name in expected} == expected
        for of in ("handshake", "call"):
            counts = [values[f'mlvm_seconds_bucket{{of="{of}",le="{each}"}}'] for each in BUCKETS]
            assert counts == sorted(counts)
            assert counts[-1] == values[f'mlvm_seconds_bucket{{of="{of}",le="+Inf"}}'] > 0
            assert values[f'mlvm_seconds_count{{of="{of}"}}'] == counts[-1]
            assert 0 < values[f'mlvm_seconds_sum{{of="{of}"}}'] < 10
        server.close()
        assert read(page, "/healthz") == (503, "draining\n")


def test_what_two_have_counted_is_added() -> None:
    one, two = Metrics(), Metrics()
    for metrics, seconds in ((one, 1e-6), (one, 0.5), (two, 0.5), (two, 1e3)):
        metrics.observe("call", seconds)
        metrics.limits["OutOfMemoryError"] += 1
    one.add(json.loads(json.dumps(two.to_json())))
    assert one.limits == {"OutOfMemoryError": 4}
    assert one.seconds["call"] == [pytest.approx(1001.000001), 1, 0, 0, 0, 0, 2, 0, 0, 1]
    assert two.seconds["call"][1] == 0


def test_metrics_are_of_this_host_alone() -> None:
    with Served() as server:
        refuses(AddressError, "--insecure", MetricsPage, server, "0.0.0.0:0")
        MetricsPage(server, "0.0.0.0:0", public=True).close()


def test_readers_of_metrics_have_a_share_of_places(monkeypatch: Patch) -> None:
    """Those that say nothing keep out neither other readers nor clients."""
    monkeypatch.setattr(page_of_metrics, "_PATIENCE", 60.0)

    def comes_through() -> bool:
        with suppress(OSError, HTTPException):  # refused, as all others are new: it comes again
            return read(page, "/healthz") == (200, "ok\n")
        return False

    with Served() as server, MetricsPage(server, ":0") as page, ExitStack() as strangers:
        before = threading.active_count()
        for _ in range(300):
            strangers.enter_context(connected(page))
        wait_for(comes_through)
        wait_for(lambda: threading.active_count() <= before + FIXED.strangers_of_peer)
        assert server.vm().consumed_size_in_mib() == 0


def test_readers_of_metrics_have_a_time(monkeypatch: Patch) -> None:
    """Also one that always says a little more."""
    monkeypatch.setattr(page_of_metrics, "_PATIENCE", 0.5)

    def is_ended() -> bool:
        try:
            slow.sendall(b"G")
            return not slow.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    with Served() as server, MetricsPage(server, ":0") as page, connected(page) as slow:
        wait_for(is_ended)


# --- systemd -----------------------------------------------------------------------------


@contextmanager
def notify_socket(path: Path) -> Iterator[socket.socket]:
    """A socket that a service tells what it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(20)
        yield sock


def test_a_service_of_systemd(tmp_path: Path) -> None:
    """It takes the socket that was opened for it, tells how it does, reads its files again, keeps
    those who are in, and stops."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    certificate = tmp_path / "certificate.pem"
    certificate.touch(0o600)
    certificate.write_text(Path(CERTIFICATE).read_text())
    start = """if True:
        import os, sys
        os.dup2(int(sys.argv[1]), 3)
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.execv(sys.executable, [sys.executable, "-m", "mlvm", *sys.argv[2:]])
    """
    with (
        notify_socket(tmp_path / "notify") as systemd,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        address = f"localhost:{listening.getsockname()[1]}"
        number = listening.fileno()
        command = ["-c", start, str(number), "serve", "--listen", "systemd"]
        command += ["--secret-file", str(secret), "--certificate", str(certificate)]
        command += ["--log", "json", "--processes", "2", "--metrics", f"unix:{tmp_path}/metrics"]
        about = {"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(tmp_path / "notify")}
        log = tmp_path / "log"
        with (
            log.open("w") as out,
            start_python(*command, env=about, pass_fds=[number], stderr=out) as server,
        ):
            try:
                run_as_service(server, systemd, address, secret, certificate)
            finally:
                server.kill()
        events = [json.loads(line) for line in log.read_text().splitlines()]
        names = [each["event"] for each in events]
        assert names.count("reloaded") == 1
        [error] = [each for each in events if each["event"] == "error"]
        assert "at least 16 bytes" in error["error"]
        assert names[-1] == "stopped"
        assert listening.fileno() == number


def run_as_service(
    server: subprocess.Popen[Any],
    systemd: socket.socket,
    address: str,
    secret: Path,
    certificate: Path,
) -> None:
    assert systemd.recv(4096).startswith(b"READY=1\nSTATUS=listens on 127.0.0.1:")
    with connect(address, secret=SECRET, tls=CERTIFICATE) as before:
        for text, trusted in (
            ("too short", CERTIFICATE),
            ("a new secret of mine", RENEWED_CERTIFICATE),
        ):
            secret.write_text(text)
            certificate.write_text(Path(trusted).read_text())
            server.send_signal(signal.SIGHUP)
            assert systemd.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert systemd.recv(4096).startswith(b"READY=1\n")
            current = SECRET if text == "too short" else text
            with connect(address, secret=current, tls=trusted) as vm:
                vm.alloc_storage(1)
        refuses(AccessDeniedError, "", connect, address, secret=SECRET, tls=RENEWED_CERTIFICATE)
        before.alloc_storage(1)
        server.send_signal(signal.SIGTERM)
        assert systemd.recv(4096).startswith(b"STOPPING=1")
    assert server.wait(20) == 0


def test_what_is_no_socket_of_systemd_is_refused(monkeypatch: Patch) -> None:
    for pid, count in (("", "1"), ("1", "1"), (str(os.getpid()), "2")):
        monkeypatch.setenv("LISTEN_PID", pid)
        monkeypatch.setenv("LISTEN_FDS", count)
        refuses(AddressError, "expected one socket", inherited_socket)
    with Served() as server:
        sock = socket.create_server(("0.0.0.0", 0))
        with sock:
            refuses(AddressError, "--insecure", Served, sock)
        assert server.admits()


def test_systemd_is_told_where_it_listens(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    with notify_socket(tmp_path / "here") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "here"))
        notify("READY=1", "STATUS=all is well")
        assert re.fullmatch(rb"READY=1\nSTATUS=all is well\nMONOTONIC_USEC=\d+", systemd.recv(99))


def test_a_certificate_that_is_none_changes_nothing(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.touch(0o600)
    certificate.write_text(Path(CERTIFICATE).read_text())
    with Served(certificate=str(certificate)) as server:
        certificate.write_text("nothing")
        refuses(
            AddressError, "cannot read a certificate", server.reload, "another secret than that"
        )
        refuses(AccessDeniedError, "needs a secret", server.reload, None)
        server.vm().close()


def test_the_unit_and_the_container_run_what_there_is() -> None:
    unit = (ROOT / "deploy" / "mlvm.service").read_text().replace("\\\n", " ")
    container = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")
    [started] = re.findall("^ExecStart=(.*)$", unit, re.M)
    entry, rest = (
        json.loads(x) for x in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", container, re.M)
    )
    for python, *words in (started.split(), [*entry, *rest]):
        assert python == "/opt/mlvm/bin/python"
        assert words[:3] == ["-m", "mlvm", "serve"]
        options = parser().parse_args(words[2:])
        assert options.metrics.startswith("127.0.0.1:")
        assert options.secret_file
        assert options.certificate
