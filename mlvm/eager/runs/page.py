"""Pages of recordings: losses and digests of steps; of two recordings also the first difference.

`python -m mlvm show A` and `show A B` write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import nan
from typing import Final

from mlvm.eager.runs.diff import Difference, equality
from mlvm.eager.runs.log import digest_of
from mlvm.eager.runs.run import RecordedStep, Run
from mlvm.show.html import block, picture, table
from mlvm.show.page import plain_page
from mlvm.show.picture import curves

_AROUND: Final = 20  # rows before and after the first difference
_DIGITS: Final = 12  # displayed digits of a digest
_LISTED: Final = 1000  # listed steps at the start and at the end of a recording


def recording_page(run: Run) -> str:
    """Return the page of one recording: the losses by function, and the steps."""
    functions = dict.fromkeys(step.table.function for step in run.steps)
    losses = {
        name: [nan if x.loss is None or x.table.function != name else x.loss for x in run.steps]
        for name in functions
    }
    numbered = [*enumerate(run.steps)]
    if len(numbered) > 2 * _LISTED:
        numbered = numbered[:_LISTED] + numbered[-_LISTED:]
    rows = [[str(n), x.table.function, _loss(x), *_digests(x)] for n, x in numbered]
    head = ["step", "function", "loss", "inputs", "results", "state after"]
    return _page(str(run.folder), [], losses, head, rows)


def comparison_page(a: Run, b: Run, difference: Difference | None) -> str:
    """Return the page of two recordings and the difference that `diff` has found."""
    mark = difference.step if difference is not None else None
    count = min(len(a.steps), len(b.steps))
    summary = str(difference) if difference is not None else equality(a, b)
    losses = {
        f"{name}: {run.folder.name}": [nan if x.loss is None else x.loss for x in run.steps]
        for name, run in (("A", a), ("B", b))
    }
    middle = count if mark is None else mark
    first, end = max(middle - _AROUND, 0), middle + _AROUND + 1
    pairs = [*zip_longest(a.steps[first:end], b.steps[first:end])]
    rows = [[str(n), *_row(*pair, is_equal=n < middle)] for n, pair in enumerate(pairs, first)]
    head = ["step", "", "function", "loss A", "loss B"]
    head += [f"{what} {name}" for what in ("inputs", "results", "state after") for name in "AB"]
    return _page(f"{a.folder} and {b.folder}", [block(summary)], losses, head, rows, mark)


def _page(
    title: str,
    summary: list[str],
    losses: Mapping[str, Sequence[float]],
    head: list[str],
    rows: list[list[str]],
    mark: int | None = None,
) -> str:
    """Return a page with the summary, the curves of the losses, and a table of steps."""
    drawn = picture(curves(losses, "Losses", mark=mark), "losses by step")
    parts = *summary, drawn, f"<h2>Digests</h2>{table(head, rows, right=1)}"
    return plain_page(title, "".join(f"<section>{part}</section>\n" for part in parts))


def _loss(x: RecordedStep | None) -> str:
    return "" if x is None or x.loss is None else f"{x.loss:.9g}"


def _row(x: RecordedStep | None, y: RecordedStep | None, *, is_equal: bool) -> list[str]:
    """Return the cells of a step in both runs: whether it is equal, and the digests.

    Steps before the first difference are equal, even if only one run has additional state."""
    steps = x, y
    digests = [[""] * 3 if each is None else _digests(each) for each in steps]
    is_equal |= digests[0][1:] == digests[1][1:]
    names = dict.fromkeys(each.table.function for each in steps if each is not None)
    cells = [cell for pair in zip(*digests, strict=True) for cell in pair]
    return ["=" if is_equal else "≠", ", ".join(names), *map(_loss, steps), *cells]


def _digests(step: RecordedStep) -> list[str]:
    """Return short digests of the inputs, the results and the state after a step."""
    texts = [repr([*step.inputs]), repr([*step.results]), repr(step.after)]
    return [digest_of(text.encode()).hex()[:_DIGITS] for text in texts]
