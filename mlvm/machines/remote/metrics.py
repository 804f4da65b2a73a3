"""Counters of a server in the text format of Prometheus, and an HTTP page with them.

The text format is 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from mlvm.machines.closing import Closing
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.log import Log

BUCKETS: Final = 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0
"""Upper bounds of histogram buckets in seconds; the last bucket is unbounded."""

_LOOK: Final = 0.05  # seconds between checks whether the page is closed
_PATIENCE: Final = 5.0  # maximum seconds for a reader of the page


class Metrics:
    """Counters and histograms. One thread at a time changes them.

    limits: number of calls that exceeded a limit, by error name.
    seconds: total seconds and number of events in each bucket, by kind of event.
    """

    def __init__(self) -> None:
        self.limits: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}

    def observe(self, what: str, seconds: float) -> None:
        """Add an event of `seconds` to the histogram of a kind."""
        histogram = self.seconds.get(what)
        if histogram is None:
            histogram = self.seconds[what] = [0.0] * (len(BUCKETS) + 2)
        histogram[0] += seconds
        histogram[1 + bisect_left(BUCKETS, seconds)] += 1

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the counts of a different `to_json`."""
        self.limits.update(snapshot["limits"])
        for what, counts in snapshot["seconds"].items():
            mine = self.seconds.get(what, [0.0] * len(counts))
            self.seconds[what] = [a + b for a, b in zip(mine, counts, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the counters as a JSON object."""
        return {"limits": dict(self.limits), "seconds": dict(self.seconds)}


def page_of(status: Mapping[str, Any]) -> str:
    """Format the status and the metrics of a server for Prometheus."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    for name, kind, text, value in (
        ("clients", "gauge", "clients that are connected or may reconnect", status["clients"]),
        ("strangers", "gauge", "connections that are not authenticated", "strangers"),
        ("held_bytes", "gauge", "bytes of tensors and storages", "bytes"),
        ("uptime_seconds", "gauge", "seconds since the server started", "seconds"),
        ("admitted_total", "counter", "connections that were admitted", "admitted"),
        ("refused_total", "counter", "connections that were refused", "refused"),
        ("launches_total", "counter", "launches of programs", "launches"),
    ):
        number = status[value] if isinstance(value, str) else len(value)
        yield from _head(name, kind, text)
        yield f"mlvm_{name} {number}"
    metrics = status["metrics"]
    yield from _head("limits_hit_total", "counter", "calls that exceeded a limit, by error")
    for name, count in sorted(metrics["limits"].items()):
        yield f'mlvm_limits_hit_total{{error="{name}"}} {count}'
    yield from _head("seconds", "histogram", "time of a handshake or message, by kind")
    for name, (total, *counts) in sorted(metrics["seconds"].items()):
        so_far = 0
        for bound, count in zip([*BUCKETS, "+Inf"], counts, strict=True):
            so_far += round(count)
            yield f'mlvm_seconds_bucket{{of="{name}",le="{bound}"}} {so_far}'
        yield f'mlvm_seconds_sum{{of="{name}"}} {total}'
        yield f'mlvm_seconds_count{{of="{name}"}} {so_far}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP mlvm_{name} {text}"
    yield f"# TYPE mlvm_{name} {kind}"


class Watched(Protocol):
    """Interface of a server to its metrics page."""

    def status(self) -> Mapping[str, Any]: ...
    def admits(self) -> bool: ...


class MetricsPage(Closing):
    """HTTP server of `/metrics` and `/healthz`, at a separate address; a `with` block closes it.

    Everyone who can connect to the address can read the pages without a secret. Therefore the
    address must be local to this host, unless `public`. The number of readers is limited like the
    number of strangers (see `admission`), and each reader has a few seconds. `/healthz` returns 200
    while the server admits clients, and 503 afterwards. Raises `AddressError`.
    """

    def __init__(self, server: Watched, address: str, *, public: bool = False) -> None:
        # imported here because the import is slow
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        readers = Admission(Log("none"), plain=False, seconds=_PATIENCE)

        class Page(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if readers.enter(request):
                    super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                readers.leave(request)
                super().shutdown_request(request)

            def service_actions(self) -> None:
                readers.sweep()

            def server_close(self) -> None:
                readers.sweep(last=True)
                super().server_close()

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE

            def do_GET(self) -> None:
                readers.note_first_bytes(self.connection)
                if self.path == "/metrics":
                    self.answer(200, page_of(server.status()), "; version=0.0.4")
                elif self.path == "/healthz":
                    healthy = server.admits()
                    self.answer(200 if healthy else 503, "ok\n" if healthy else "draining\n")
                else:
                    self.answer(404, "expected /metrics or /healthz\n")

            def answer(self, status: int, text: str, version: str = "") -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", f"text/plain{version}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "a reader"

            def log_message(self, *_: object) -> None:
                pass

        requested = addresses.parse_address(address)
        sock = addresses.listen(requested, public=public)
        self.address = addresses.address_of(sock, requested)
        self._http = Page(("", 0), Handler, bind_and_activate=False)
        self._http.socket.close()
        self._http.socket = sock
        serve = self._http.serve_forever
        threading.Thread(target=serve, args=(_LOOK,), name="mlvm metrics", daemon=True).start()

    def close(self) -> None:
        """Stop the server of the page."""
        self._http.shutdown()
        self._http.server_close()
