"""Plot of the loss of a training run, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlvm.show.svg import Scale, axes, document, fitted, text

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 84, 56  # margins around the plotting area
_PALE, _BLUE, _ORANGE = "#9dbfdc", "#225ea8", "#c2410c"

_STYLE = """
text { fill: #222 }
.right { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: #ddd }
.axis { stroke: #222; fill: none }
"""


def loss_curve(
    title: str,
    step_losses: Sequence[float],
    epoch_losses: Sequence[float],
    test_losses: Mapping[int, float] | None = None,
) -> str:
    """Draw the training loss of each step, the mean of each epoch and the test losses.

    The mean of an epoch is a horizontal line over the steps of the epoch. A test loss, keyed by the
    number of the preceding epoch, is drawn at the end of this epoch. At least one step and one
    epoch must have a finite loss; losses that are not finite are omitted.
    """
    epochs, steps = len(epoch_losses), len(step_losses)
    x = Scale(0, epochs, _LEFT, _WIDTH - _RIGHT)
    finite = [(i, loss) for i, loss in enumerate(step_losses) if math.isfinite(loss)]
    tests = [(i, each) for i, each in (test_losses or {}).items() if math.isfinite(each)]
    highest = max(loss for _, loss in finite + tests)
    y = Scale(0, 1.06 * highest or 1, _HEIGHT - _BOTTOM, _TOP)
    each = [(x((i + 0.5) * epochs / steps), y(loss)) for i, loss in finite]
    means = [(x(i + side), y(loss)) for i, loss in enumerate(epoch_losses) for side in (0, 1)]
    measured = [(x(i), y(loss)) for i, loss in tests]
    points = [
        _point(x(i + 0.5), y(loss), _BLUE, f"epoch {i + 1}: {loss:.4g}")
        for i, loss in enumerate(epoch_losses)
    ]
    points += [
        _point(x(i), y(loss), _ORANGE, f"test after epoch {i}: {loss:.4g}") for i, loss in tests
    ]
    legend = {"one step": _PALE, "mean of an epoch": _BLUE}
    if tests:
        legend["test after an epoch"] = _ORANGE
    return document(
        _WIDTH,
        _HEIGHT,
        _STYLE,
        text(_LEFT, 32, fitted(title, _WIDTH - _LEFT, 18), attributes='font-size="18"'),
        axes(x, y, "epochs", "loss" if tests else "training loss"),
        _path(each, _PALE, 1),
        _path(means, _BLUE, 2),
        *([_path(measured, _ORANGE, 2)] if tests else []),
        *points,
        _legend(legend),
    )


# --- the parts -----------------------------------------------------------------------


def _path(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-linejoin="round"/>'
    )


def _point(x: float, y: float, color: str, hover: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{hover}</title></circle>'
    )


def _legend(colors: Mapping[str, str]) -> str:
    """Draw the legend, a row of coloured squares with texts, below the title."""
    parts, x = [], float(_LEFT)
    for label, color in colors.items():
        parts.append(f'<rect x="{x:.1f}" y="49" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 17, 60, label))
        x += 36 + 6.8 * len(label)
    return "\n".join(parts)
