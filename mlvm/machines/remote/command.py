"""The commands `python -m mlvm serve | ping | top`."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from types import FrameType
from typing import Any, Final

from mlvm.core.errors import MlvmError
from mlvm.core.sizes import size_text
from mlvm.machines.remote.address import UnixAddress, parse_address
from mlvm.machines.remote.connect import Observer
from mlvm.machines.remote.handshake import plain
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import STYLES, Log
from mlvm.machines.remote.metrics import MetricsPage
from mlvm.machines.remote.notify import LISTEN, inherited_socket, notify
from mlvm.machines.remote.secret import VARIABLE, find_secret, make_secret
from mlvm.machines.remote.server import Server
from mlvm.machines.terminal import REPEATED, add_command, whole_number

_PINGS: Final = 1000
_LOOK: Final = 0.05  # seconds between checks for signals


def add_to(commands: Any) -> None:
    """Add the three commands to a parser's subparsers."""
    _add_serve(commands)
    for work in (ping, top):
        add = add_command(commands, work.__name__, work).add_argument
        add("address", metavar="ADDRESS", help="HOST:PORT or unix:PATH")
        add(
            "--secret-file",
            metavar="FILE",
            help=f"file with the server's secret (default: the file in {VARIABLE})",
        )
        tls = "encrypt; PEM: trusted certificates (default: the system's)"
        add("--tls", nargs="?", const=True, default=False, metavar="PEM", help=tls)
        add("--timeout", **_SECONDS, default=10.0, help="maximum seconds to wait")
        if work is top:
            add("--once", action="store_true", help="print once and exit")
            add("--json", action="store_true", help="print JSON, one object per line")
            add("--every", **_SECONDS, default=1.0, help="seconds between updates")


def _add_serve(commands: Any) -> None:
    command = add_command(commands, "serve", serve)
    add = command.add_argument
    text = "HOST:PORT, :PORT (only this host; 0 is any free port), [IPV6]:PORT, unix:PATH, "
    text += f"or {LISTEN} for the socket of a .socket unit"
    add("--listen", required=True, metavar="ADDRESS", help=text)
    text = f"secret of the clients, in a file that only you can read (default: {VARIABLE}). "
    text += "Without a file, the server creates and prints a secret, except for a unix socket"
    add("--secret-file", metavar="FILE", help=text)
    add("--certificate", metavar="PEM", help="encrypt with TLS; the file may also contain the key")
    add("--key", metavar="PEM", help="the certificate's key")
    text = "accept other hosts without TLS, on a trusted network"
    add("--insecure", action="store_true", help=text)
    add("--threads", type=whole_number, default=1, metavar="N", help="threads of each VM")
    text = "use the kernels and the loop in C (default: if available), or in Python and numpy"
    add("--native", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "VM for several clients, ml.connect(..., vm=NAME); may be repeated"
    add("--shared", **REPEATED, metavar="NAME", help=text)
    text = "a process for each client, at most N, and for each shared VM: clients share neither "
    text += "memory nor the interpreter; 0: one process for all (default: --connections, or "
    text += "0 at a unix socket)"
    add("--processes", type=_processes, default=None, metavar="N", help=text)
    text = "address for HTTP: /metrics for Prometheus, and /healthz; only this host, unless "
    text += "--insecure, because HTTP has no secret"
    add("--metrics", metavar="ADDRESS", help=text)
    text = "shared library with functions in C for all VMs; may be repeated"
    add("--library", **REPEATED, metavar="SO", help=text)
    add(
        "--log", choices=STYLES, default="text", help="format of the events on stderr, one per line"
    )
    text = "seconds for launches to finish when the server stops"
    add("--grace", **_SECONDS, default=30.0, help=text)
    text = "per client, except for the number of connections; bytes also as 64M or 2G"
    limits = command.add_argument_group("limits", text)
    for each in fields(Limits):
        default: Any = each.default
        whole = isinstance(default, int)
        shown = size_text(default) if "bytes" in each.name else f"{default:,.0f}"
        name, text = each.name.replace("_", "-"), f"{each.metadata['help']} (default: {shown})"
        takes = {"type": whole_number, "metavar": "N"} if whole else _SECONDS
        limits.add_argument(f"--{name}", **takes, default=default, help=text)


def _processes(text: str) -> int:
    return 0 if text == "0" else whole_number(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


_OF_SERVER: Final = "certificate", "key", "insecure", "shared", "processes"
_SECONDS: Final[Any] = {"type": _seconds, "metavar": "S"}


# --- serve ------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Serve VMs to other processes and hosts, which use `ml.connect`.

    Each client has a separate VM until the connection is closed. After SIGTERM or Ctrl-C, launches
    may finish; a second signal stops immediately. SIGHUP reads the secret's and the
    certificate's file again.

    Example:
        python -m mlvm serve --listen :7000
    """
    log = Log(options.log)
    inherited = inherited_socket() if options.listen == LISTEN else None
    if inherited is not None:
        private = inherited.family == socket.AF_UNIX
    else:
        private = isinstance(parse_address(options.listen), UnixAddress)
    secret: str | bytes | None = find_secret(None, options.secret_file)
    is_new_secret = secret is None and not private
    if is_new_secret:
        secret = make_secret()
        print(f"secret: {secret}", flush=True)  # only on stdout, never in the log
    if options.processes is None:
        options.processes = 0 if private else options.connections
    signals: list[int] = []  # not an Event: the interrupted thread may hold its lock

    def on_signal(number: int, _: FrameType | None) -> None:
        signals.append(number)

    handled = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    before = {each: signal.signal(each, on_signal) for each in handled}
    try:
        limits = Limits(**{each.name: getattr(options, each.name) for each in fields(Limits)})
        with ExitStack() as stack:
            server = Server(
                inherited or options.listen,
                secret=secret,
                limits=limits,
                libraries=options.library,
                options={"threads": options.threads, "native": options.native},
                about={"version": options.version},
                log=log,
                **{each: vars(options)[each] for each in _OF_SERVER},
            )
            stack.callback(server.close)
            if options.metrics is not None:
                page = MetricsPage(server, options.metrics, public=options.insecure)
                stack.callback(page.close)
                log.event("metrics", address=page.address)
            notify("READY=1", f"STATUS=listens on {server.address}")
            while signal.SIGTERM not in signals and signal.SIGINT not in signals:
                if signals:
                    signals.clear()
                    _reload(server, log, secret if is_new_secret else None, options)
                time.sleep(_LOOK)
            notify("STOPPING=1")
            signals[:] = [each for each in signals if each != signal.SIGHUP]
            closing = threading.Thread(target=server.close, args=(options.grace,), daemon=True)
            closing.start()
            while closing.is_alive() and len(signals) < 2:
                time.sleep(_LOOK)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _reload(
    server: Server, log: Log, secret: str | bytes | None, options: argparse.Namespace
) -> None:
    """Read secret and certificate again. If either cannot be read, change nothing."""
    notify("RELOADING=1")
    try:
        server.reload(secret or find_secret(None, options.secret_file))
    except (MlvmError, OSError) as error:
        log.event("error", what="reload", error=error)
    notify("READY=1")


# --- ping and top -----------------------------------------------------------------------


def _observer(options: argparse.Namespace) -> Observer:
    return Observer(
        options.address, secret_file=options.secret_file, tls=options.tls, timeout=options.timeout
    )


def ping(options: argparse.Namespace) -> None:
    """Print a server's versions and the time of a message.

    Example:
        python -m mlvm ping localhost:7000 --secret-file secret
    """
    start = time.perf_counter()
    with _observer(options) as observer:
        connected = time.perf_counter() - start
        times = sorted(observer.ping() for _ in range(_PINGS))
    about = {name: plain(str(value)) for name, value in observer.about.items()}
    machine = "native" if observer.about.get("native") else "numpy"
    print(f"server: mlvm {about.get('version', 'unknown')}, format {about['format']}")
    print(f"client: mlvm {options.version}")
    print(f"machine: {machine}, {about.get('threads')} threads, pid {about.get('pid')}")
    print(f"connected in {connected * 1e3:.1f} ms")
    print(
        f"round trip: median {statistics.median(times) * 1e6:.0f} us, "
        f"minimum {times[0] * 1e6:.0f} us, 99 % {times[int(0.99 * _PINGS)] * 1e6:.0f} us"
    )


def top(options: argparse.Namespace) -> None:
    """Show the clients and load of a server, until interrupted.

    Example:
        python -m mlvm top localhost:7000 --secret-file secret --once
    """
    clear = sys.stdout.isatty() and not options.json and not options.once
    with _observer(options) as observer:
        before: dict[Any, tuple[float, int]] = {}
        while True:
            status = observer.status()
            rates = _rates(status, before, time.monotonic())
            if options.json:
                print(json.dumps({**status, "launches_per_second": rates(None)}), flush=True)
            else:
                print(("\x1b[H\x1b[2J" if clear else "") + table(status, rates), flush=True)
            if options.once:
                return
            time.sleep(options.every)


def _rates(
    status: Mapping[str, Any], before: dict[Any, tuple[float, int]], now: float
) -> Callable[[Any], float]:
    """Return a function from the number of a client to launches per second.

    The number None means all clients. The time starts at the previous status, or when the client
    connected. `before` contains the previous totals by client, and is updated.
    """
    totals = {None: (status["seconds"], status["launches"])}
    for each in status["clients"]:
        totals[each["client"]] = each["seconds"], each["launches"]
    rates: dict[Any, float] = {}
    for key, (seconds, launches) in totals.items():
        then, count = before.get(key, (now - seconds, 0))
        rates[key] = (launches - count) / max(now - then, 1e-9)
    before.clear()
    before.update({key: (now, launches) for key, (_, launches) in totals.items()})
    return rates.__getitem__


def table(status: Mapping[str, Any], rate: Callable[[Any], float]) -> str:
    """Format the status as text: a line of totals, then a line per client and shared VM."""
    lines = [
        f"up {status['seconds']:.0f} s, {len(status['clients'])} clients "
        f"({status['admitted']} admitted, {status['refused']} refused), "
        f"{_mib(status['bytes'])} MiB, {rate(None):.1f} launches/s",
        f"{'client':>6}  {'vm':<12} {'MiB':>10} {'launches/s':>10} {'launches':>10} "
        f"{'seconds':>8}  {'name':<12} peer",
    ]
    for each in status["clients"]:
        lines.append(
            f"{each['client']:>6}  {plain(each['vm']):<12.12} {_mib(each['bytes']):>10} "
            f"{rate(each['client']):>10.1f} {each['launches']:>10} {each['seconds']:>8.0f}  "
            f"{plain(each['name']):<12.12} {plain(each['peer'])}{' *' if each['busy'] else ''}"
        )
    for each in status["shared"]:
        lines.append(
            f"shared  {plain(each['vm']):<12.12} {_mib(each['bytes']):>10} {'':>10} "
            f"{each['launches']:>10}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
