"""The loss of a training run as a picture, in SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlvm.show.svg import Scale, axes, document, fitted, text

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 84, 56  # margins around the plotting area
_PALE, _BLUE = "#9dbfdc", "#225ea8"

_STYLE = """
text { fill: #222 }
.right { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: #ddd }
.axis { stroke: #222; fill: none }
"""


def loss_curve(title: str, step_losses: Sequence[float], epoch_losses: Sequence[float]) -> str:
    """The training loss of each step, a thin line, and the mean of each epoch, a thick one
    through the epochs' middles. There is a finite one of each; steps whose loss is not are left
    out."""
    epochs, steps = len(epoch_losses), len(step_losses)
    x = Scale(0, epochs, _LEFT, _WIDTH - _RIGHT)
    finite = [(i, loss) for i, loss in enumerate(step_losses) if math.isfinite(loss)]
    y = Scale(0, 1.06 * max(loss for _, loss in finite) or 1, _HEIGHT - _BOTTOM, _TOP)
    each = [(x((i + 0.5) * epochs / steps), y(loss)) for i, loss in finite]
    means = [(x(i + 0.5), y(loss)) for i, loss in enumerate(epoch_losses)]
    points = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{_BLUE}">'
        f"<title>epoch {i}: {loss:.4g}</title></circle>"
        for i, ((px, py), loss) in enumerate(zip(means, epoch_losses, strict=True), 1)
    ]
    return document(
        _WIDTH,
        _HEIGHT,
        _STYLE,
        text(_LEFT, 32, fitted(title, _WIDTH - _LEFT, 18), attributes='font-size="18"'),
        axes(x, y, "epochs", "training loss"),
        _path(each, _PALE, 1),
        _path(means, _BLUE, 2),
        *points,
        _legend({"one step": _PALE, "mean of an epoch": _BLUE}),
    )


# --- the parts -----------------------------------------------------------------------


def _path(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-linejoin="round"/>'
    )


def _legend(colors: Mapping[str, str]) -> str:
    """A row of coloured squares with their meaning, below the title."""
    parts, x = [], float(_LEFT)
    for label, color in colors.items():
        parts.append(f'<rect x="{x:.1f}" y="49" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 17, 60, label))
        x += 36 + 6.8 * len(label)
    return "\n".join(parts)
