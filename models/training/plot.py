"""The loss of a training run as a picture, in SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 84, 56  # margins around the plotting area
_INK, _GRID, _PALE, _BLUE = "#222222", "#dddddd", "#9dbfdc", "#225ea8"


@dataclass(frozen=True)
class _Scale:
    """The linear map from values 0 .. `high` to pixels `start` .. `stop`."""

    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + value / self.high * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Five to eleven round values from 0 to `high`: multiples of 1, 2 or 5 times 10^n."""
        power = 10.0 ** math.floor(math.log10(self.high / 4))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= self.high / 4)
        return [i * step for i in range(math.floor(self.high / step) + 1)]


def _scales(width: float, height: float) -> tuple[_Scale, _Scale]:
    """The axes of a plot of that width, and with some room above that height."""
    across = _Scale(width or 1, _LEFT, _WIDTH - _RIGHT)
    upwards = _Scale(1.06 * height or 1, _HEIGHT - _BOTTOM, _TOP)
    return across, upwards


# --- the picture ---------------------------------------------------------------------


def loss_curve(title: str, step_losses: Sequence[float], epoch_losses: Sequence[float]) -> str:
    """The training loss of each step, a thin line, and the mean of each epoch, a thick one
    through the epochs' middles. There is at least one of each, and all are finite."""
    epochs, steps = len(epoch_losses), len(step_losses)
    x, y = _scales(epochs, max(step_losses))
    each = [(x((i + 0.5) * epochs / steps), y(loss)) for i, loss in enumerate(step_losses)]
    means = [(x(i + 0.5), y(loss)) for i, loss in enumerate(epoch_losses)]
    points = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{_BLUE}">'
        f"<title>epoch {i}: {loss:.4g}</title></circle>"
        for i, ((px, py), loss) in enumerate(zip(means, epoch_losses, strict=True), 1)
    ]
    return _svg(
        title,
        _axes(x, y, "epochs", "training loss"),
        _path(each, _PALE, 1),
        _path(means, _BLUE, 2),
        *points,
        _legend({"one step": _PALE, "mean of an epoch": _BLUE}),
    )


# --- the parts -----------------------------------------------------------------------


def _svg(title: str, *parts: str) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            _text(_LEFT, 32, title, 'font-size="18"'),
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, style: str = "", color: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" {style}>{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-linejoin="round"/>'
    )


def _axes(x: _Scale, y: _Scale, x_label: str, y_label: str) -> str:
    """Grid lines with numbers, and what they measure."""
    middle, right = 'text-anchor="middle"', 'text-anchor="end"'
    parts = []
    for value in y.ticks():
        parts.append(f'<path d="M{x.start} {y(value):.1f}H{x.stop}" stroke="{_GRID}"/>')
        parts.append(_text(x.start - 8, y(value) + 4, f"{value:g}", right))
    for value in x.ticks():
        parts.append(f'<path d="M{x(value):.1f} {y.start}v5" stroke="{_INK}"/>')
        parts.append(_text(x(value), y.start + 20, f"{value:g}", middle))
    height = (y.start + y.stop) / 2
    parts.append(_text((x.start + x.stop) / 2, y.start + 42, x_label, middle))
    parts.append(_text(22, height, y_label, f'{middle} transform="rotate(-90 22 {height})"'))
    parts.append(f'<path d="M{x.start} {y.stop}V{y.start}H{x.stop}" fill="none" stroke="{_INK}"/>')
    return "\n".join(parts)


def _legend(colors: Mapping[str, str]) -> str:
    """A row of coloured squares with their meaning, below the title."""
    parts, x = [], float(_LEFT)
    for label, color in colors.items():
        parts.append(f'<rect x="{x:.1f}" y="49" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 17, 60, label))
        x += 36 + 6.8 * len(label)
    return "\n".join(parts)
