"""Log of a server: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Final, Literal, TextIO

Style = Literal["text", "json", "none"]
STYLES: Final[tuple[Style, ...]] = ("text", "json", "none")


class Log:
    """Writer of events to a stream (default: stderr); each line is written immediately.

    A text line consists of a time, the event and `name=value` pairs. Values with blanks or quotes
    are written as JSON. A JSON line is an object with `time` (seconds since 1970) and `event`.
    """

    def __init__(self, style: Style = "text", stream: TextIO | None = None) -> None:
        self._style = style
        self._stream = stream
        self._lock = threading.Lock()

    def event(self, event: str, /, **facts: object) -> None:
        """Write one line. If the stream is closed, the line is dropped without an error."""
        if self._style == "none":
            return
        now = time.time()
        if self._style == "json":
            line = json.dumps({"time": round(now, 3), "event": event, **facts}, default=str)
        else:
            clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
            pairs = [f"{name}={_plain(value)}" for name, value in facts.items()]
            line = " ".join([clock, event, *pairs])
        with self._lock:
            try:
                print(line, file=self._stream or sys.stderr, flush=True)
            except (OSError, ValueError):
                self._style = "none"


def _plain(value: object) -> str:
    """Format a value on one line, in quotes if it contains blanks."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isascii() and text.isprintable() and not set(text) & set(' "='):
        return text
    return json.dumps(text)
