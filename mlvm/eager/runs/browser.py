"""Page of the debugger in a browser, which sends the commands of the terminal to this process.

`python -m mlvm debug FILE --browser` starts it. The server accepts connections from this host only,
and only to an address with a random token.
"""

from __future__ import annotations

import io
import json
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from mlvm.core.errors import MlvmError
from mlvm.core.sizes import parse_count
from mlvm.eager.runs.debugger import Debugger
from mlvm.show.page import filled, plain_page

_POLICY: Final = "script-src 'unsafe-inline'; connect-src 'self'; img-src 'self'"


class DebuggerServer(ThreadingHTTPServer):
    """HTTP server of a debugger, which runs one command at a time.

    url: the address of the page, which contains the token. has_ended: whether `q` was entered.
    """

    daemon_threads = True

    def __init__(self, debugger: Debugger, commands: Sequence[str], title: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._debugger, self._title = debugger, title
        self._lock = threading.Lock()
        self.has_ended = False
        self._transcript = self._output_of(debugger.do_w)
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{self.host}{self.path}"
        for command in commands:
            self.command(command)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the browser closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def page(self) -> str:
        """Return the page with all commands so far."""
        body = filled("debugger.html", {"TRANSCRIPT": escape(self._transcript)})
        return plain_page(self._title, body, policy=_POLICY)

    def command(self, line: str) -> dict[str, Any]:
        """Run a command; return the output and the panes."""

        def run(line: str) -> None:
            self.has_ended |= self._debugger.onecmd(line)

        with self._lock:
            text = self._output_of(run, line)
            self._transcript += f"(mlvm) {line}\n{text}"
        return {"text": text, **self.panes()}

    def panes(self) -> dict[str, Any]:
        """Return the present source, stack and memory."""
        with self._lock:
            debugger = self._debugger
            return {
                "source": self._output_of(debugger.do_l),
                "stack": self._output_of(debugger.do_bt),
                "arena": self._output_of(debugger.do_arena),
                "moment": debugger.values.moment(),
            }

    def picture(self) -> str:
        """Return the plan of scratch memory as SVG text."""
        with self._lock:
            return self._debugger.picture()

    def _output_of(self, do: Callable[[str], object], argument: str = "") -> str:
        """Return the text that a method of the debugger prints."""
        self._debugger.stdout = out = io.StringIO()
        with suppress(MlvmError):  # a pane is empty, for example if the op has no line
            do(argument)
        return out.getvalue()


class _Handler(BaseHTTPRequestHandler):
    server: DebuggerServer

    def do_GET(self) -> None:
        contents: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("text/html", self.server.page),
            "panes": ("application/json", lambda: json.dumps(self.server.panes())),
            "arena.svg": ("image/svg+xml", self.server.picture),
        }
        name = self._name()
        if name not in contents:
            self.send_error(404)
            return
        kind, content = contents[name]
        self._send(kind, content())

    def do_POST(self) -> None:
        length = parse_count(self.headers.get("Content-Length", ""))
        if self._name() != "command" or length is None or length > 1 << 16:
            self.send_error(404)
            return
        body = self.rfile.read(length)
        if len(body) < length:  # the connection was closed early
            self.send_error(400)
            return
        answer = self.server.command(body.decode("utf-8", "replace"))
        try:
            self._send("application/json", json.dumps(answer))
        finally:
            if self.server.has_ended:  # a different thread runs `serve_forever`
                self.server.shutdown()

    def _name(self) -> str | None:
        """Return the name after the token; None for another token or host."""
        path, _, _ = self.path.partition("?")
        start, name = path[: len(self.server.path)], path[len(self.server.path) :]
        is_token = secrets.compare_digest(start.encode(), self.server.path.encode())
        # DNS rebinding: a page of a different host sends the name of that host
        return name if is_token and self.headers.get("Host") == self.server.host else None

    def _send(self, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def debug_in_browser(debugger: Debugger, commands: Sequence[str], title: str) -> None:
    """Serve the page of a debugger until the command `q` or Ctrl-C, and open it in a browser."""
    with DebuggerServer(debugger, commands, title) as server:
        if not server.has_ended:
            print(f"page  {server.url}", flush=True)
            webbrowser.open(server.url)
            server.serve_forever()
