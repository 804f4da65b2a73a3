"""Progress of long work: a bar on a terminal where tqdm is installed, else a line each epoch."""

from __future__ import annotations

import sys
import time
from typing import Any

from mlvm.machines.terminal import say


class Progress:
    """Display of a training's progress; empty if `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._epochs = 0
        self._began = 0.0

    def say(self, text: str) -> None:
        """Print a message before the work begins."""
        if not self._quiet:
            say(text)

    def begin(self, epochs: int, steps: int, done: int = 0) -> None:
        """Begin the work, of `epochs` epochs and `steps` steps, of which `done` are done."""
        self._epochs, self._began = epochs, time.perf_counter()
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar(steps, done)

    def step(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.update()

    def epoch(self, number: int, loss: float, accuracy: float) -> None:
        """Show a finished epoch with its mean loss and test accuracy."""
        state = f"loss {loss:.4f}  test accuracy {100 * accuracy:5.2f} %"
        if self._bar is not None:
            self._bar.set_postfix_str(state)
        elif not self._quiet:
            seconds = time.perf_counter() - self._began
            width = len(str(self._epochs))
            print(f"epoch {number:{width}}/{self._epochs}  {state}  {seconds:6.1f} s", flush=True)

    def end(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(steps: int, done: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
