"""What pictures share: the SVG document, texts, scales with round ticks, and axes.

The elements have classes, and each picture's style sheet says how these look. `axis` and `grid` are
lines, and `soft` is a number or label of an axis. `middle` and `right` name the point of a text
that lies at its coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """The linear map from values `low` .. `high` to pixels `start` .. `stop`."""

    low: float
    high: float
    start: float
    stop: float
    whole: bool = False
    """Whether only whole numbers are ticks."""

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / self._span * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Four to eleven round values, multiples of 1, 2 or 5 times 10^n; fewer if only whole
        numbers are ticks."""
        power = 10.0 ** math.floor(math.log10(self._span / 4))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= self._span / 4)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        ticks = [i * step for i in range(first, last + 1)]
        return [tick for tick in ticks if tick == int(tick)] if self.whole else ticks

    def label(self, tick: float) -> str:
        return f"{tick:,.0f}" if self.whole else f"{tick:g}"

    @property
    def _span(self) -> float:
        return (self.high - self.low) or 1


def document(width: int, height: int, style: str, *parts: str) -> str:
    """A picture of that size in pixels, its parts painted one over another."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
    )
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>\n"])


def px(value: float) -> str:
    """A number of pixels, to one decimal place, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, kind: str = "", attributes: str = "") -> str:
    """A text of that class or those classes, with further attributes as they stand in SVG."""
    named = f' class="{kind}"' if kind else ""
    more = f" {attributes}" if attributes else ""
    place = f'x="{px(x)}" y="{px(y)}"'
    return f"<text {place}{named}{more}>{escape(content, quote=False)}</text>"


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Grid lines across with the numbers of `y`, ticks below with those of `x`, and the labels.

    The plotting area lies between the scales' `start` and `stop`; `y` starts at its bottom.
    """
    left, right, bottom = px(x.start), px(x.stop), px(y.start)
    parts = []
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{left} {px(y(tick))}H{right}"/>')
        parts.append(text(x.start - 9, y(tick) + 4, y.label(tick), "right soft"))
    for tick in x.ticks():
        parts.append(f'<path class="axis" d="M{px(x(tick))} {bottom}v5"/>')
        parts.append(text(x(tick), y.start + 20, x.label(tick), "middle soft"))
    middle, height = (x.start + x.stop) / 2, px((y.start + y.stop) / 2)
    parts.append(text(middle, y.start + 44, x_label, "middle soft"))
    turned = f'transform="translate(23 {height}) rotate(-90)"'
    parts.append(text(0, 0, y_label, "middle soft", turned))
    parts.append(f'<path class="axis" d="M{left} {px(y.stop)}V{bottom}H{right}"/>')
    return "\n".join(parts)
