"""`python -m mlvm serve | ping | top`, as a user or a script runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.errors import ConnectionLostError, LimitExceededError, MlvmError
from mlvm.core.sizes import size_text
from mlvm.machines.remote import command
from mlvm.machines.remote.connect import Observer, connect
from mlvm.machines.remote.limits import Limits
from mlvm.machines.terminal import whole_number
from tests.brief import Capsys, cases, refuses, start_python
from tests.machines.remote.serving import CERTIFICATE, FOR_EVER, SECRET, Served, is_launching
from tests.threads import PATIENCE, start, wait_for


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Start a server, which listens; yield it and its first event."""
    with start_python("-m", "mlvm", "serve", "--log", "json", *options) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            assert '"listening"' in line, line + server.stderr.read()
            yield server, json.loads(line)
        finally:
            server.kill()
            server.communicate(timeout=PATIENCE)  # until its processes have ended, too


def test_a_server_prints_its_secret_and_its_port() -> None:
    with serving("--listen", ":0", "--no-native") as (server, event):
        assert server.stdout is not None
        match = re.fullmatch(r"secret: (\S{40,})\n", server.stdout.readline())
        assert match is not None
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", event["address"])
        with connect(event["address"], secret=match[1]) as vm:
            vm.alloc_storage(100)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None
        log = server.stderr.read()
        events = [json.loads(line)["event"] for line in log.splitlines()]
        assert events[0] == "connected"
        assert events[-1] == "stopped"
        assert match[1] not in log


CALLS: list[Callable[[ml.Tensor, ml.Tensor], ml.Tensor]] = [
    lambda far, near: far + 0.0, lambda far, near: near + far, lambda far, near: ml.sum(far),
    lambda far, near: far[0], ml.capture(lambda far, near: near * far),
]  # fmt: skip


def test_a_tensor_of_a_server_names_nothing_in_this_process(tmp_path: Path) -> None:
    """Nor in another server. Both count handles from the same number."""
    a, b = (("--listen", f"unix:{tmp_path}/{n}", "--processes", n) for n in "02")
    with serving(*a) as (_, first), serving(*b) as (_, second), ExitStack() as clients:
        addresses = 2 * [first["address"], second["address"]]
        vms: list[Any] = [clients.enter_context(connect(each)) for each in addresses]
        for vm in vms[:2]:
            with ml.use(vm):
                far = ml.full((3,), 1.0)
            for where in {ml.default_vm(), *vms} - {vm}:
                with ml.use(where):
                    near = [ml.full((3,), 100.0) for _ in range(100)]
                    for call in CALLS:
                        with pytest.raises(MlvmError, match="is on the VM"):
                            call(far, near[0]).numpy()
                        assert near[0].tolist() == [100.0] * 3
            assert far.tolist() == [1.0] * 3


def status_of(address: str) -> dict[str, Any]:
    with Observer(address) as observer:
        return observer.status()


def test_a_second_signal_ends_a_server_at_once(tmp_path: Path) -> None:
    listen = ["--listen", f"unix:{tmp_path}/s", "--grace", "600"]
    with serving(*listen) as (server, event), connect(event["address"]) as vm:
        launching = start(partial(vm.launch, FOR_EVER, max_steps=10**15))
        wait_for(lambda: is_launching(status_of(event["address"])))
        server.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        refuses((ConnectionLostError, LimitExceededError), "", launching.result, PATIENCE)
    assert not (tmp_path / "s").exists()


def secret_file(folder: Path) -> str:
    path = folder / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


def test_ping_says_what_a_server_is(tmp_path: Path, capsys: Capsys) -> None:
    with Served(about={"version": "1.2.3"}, certificate=CERTIFICATE) as server:
        options = [str(server.address), "--secret-file", secret_file(tmp_path)]
        assert main(["ping", *options, "--tls", CERTIFICATE]) == 0
        printed, errors = capsys.readouterr()
        assert errors == ""
        assert printed.startswith("server: mlvm 1.2.3, format ")
        assert re.search(r"^round trip: median \d+ us, minimum \d+ us, 99 % \d+ us$", printed, re.M)
        assert main(["ping", *options]) == 1
        assert "requires TLS" in capsys.readouterr().err


def test_top_lists_clients_and_what_they_hold(tmp_path: Path, capsys: Capsys) -> None:
    with Served(shared=["weights"]) as server, server.vm(name="a\nb") as vm:
        vm.alloc_storage(3 << 20)
        options = [str(server.address), "--secret-file", secret_file(tmp_path), "--once"]
        assert main(["top", *options]) == 0
        table = capsys.readouterr().out.splitlines()
        assert main(["top", *options, "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
    assert "1 clients (1 admitted, 0 refused), 3.0 MiB" in table[0]
    assert re.fullmatch(r" +1  vm1 +3\.0 +0\.0 +0 +0  a\?b +127\.0\.0\.1:\d+", table[2])
    assert table[3].split() == ["shared", "weights", "0.0", "0"]
    assert status["clients"][0]["bytes"] == 3 << 20
    assert status["launches_per_second"] == 0


def test_launches_a_second_are_those_since_the_last_look() -> None:
    before: dict[object, tuple[float, int]] = {}

    def look(launches: int, now: float) -> float:
        client = {"client": 1, "seconds": 10.0, "launches": launches}
        status = {"seconds": 20.0, "launches": launches, "clients": [client]}
        return command._rates(status, before, now)(1)

    assert look(50, 100.0) == 5.0  # in its ten seconds
    assert look(80, 102.0) == 15.0
    assert look(80, 103.0) == 0.0


@cases(
    "arguments, message",
    (["serve", "--listen", "nowhere"], "an address: expected"),
    (["serve", "--listen", "0.0.0.0:0"], "--insecure"),
    (["serve", "--listen", ":0", "--secret-file", "/no/such"], "/no/such: No such file"),
    (["serve", "--listen", ":0", "--certificate", "/no/such"], "cannot read a certificate"),
    (["serve", "--listen", ":0", "--key", "key.pem"], "needs certificate="),
    (["serve", "--listen", ":0", "--library", "/no/such.so"], "/no/such.so"),
    (["ping", "unix:/no/such/socket"], "no server at unix:/no/such/socket"),
    (["top", "x"], "an address: expected"),
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: Capsys) -> None:
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@cases("option", ["--connections", "0"], ["--held-bytes", "1X"], ["--idle-seconds", "-1"])
def test_a_limit_that_makes_no_sense_is_bad_usage(option: list[str], capsys: Capsys) -> None:
    status = refuses(SystemExit, "", main, ["serve", "--listen", ":0", *option])
    assert status.code == 2
    assert option[0] in capsys.readouterr().err


def test_every_limit_is_an_option(capsys: Capsys) -> None:
    refuses(SystemExit, "", main, ["serve", "--help"])
    text = capsys.readouterr().out
    for name in Limits.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} " in text
    assert "--library SO shared library with functions in C" in " ".join(text.split())
    assert whole_number("64M") == 64 << 20
    assert whole_number("3") == 3
    assert size_text(1 << 31) == "2G"
