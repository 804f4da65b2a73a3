"""Progress of a training: a tqdm bar on a terminal, otherwise one line per epoch."""

from __future__ import annotations

import sys
import time
from typing import Any

from mlvm.machines.terminal import say


class Progress:
    """Display of the training progress; shows nothing if `quiet`."""

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
        """Start the display for `epochs` epochs and `steps` steps, `done` of which are complete."""
        self._epochs, self._began = epochs, time.perf_counter()
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar(steps, done)

    def step(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.update()

    def epoch(self, number: int, loss: float, accuracy: float) -> None:
        """Show the mean loss and the test accuracy of a finished epoch."""
        state = f"loss {loss:.4f}  test accuracy {100 * accuracy:5.2f} %"
        if self._bar is not None:
            self._bar.set_postfix_str(state)
        elif not self._quiet:
            seconds = time.perf_counter() - self._began
            width = len(str(self._epochs))
            print(f"epoch {number:{width}}/{self._epochs}  {state}  {seconds:6.1f} s", flush=True)

    def end(self) -> None:
        """Close the display."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(steps: int, done: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
