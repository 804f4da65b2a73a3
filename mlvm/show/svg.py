"""Parts of pictures: the SVG document, texts, scales with round ticks, and axes.

The elements have classes, which the style sheet of each picture defines. `axis` and `grid` are
lines, and `soft` is a number or label of an axis. `middle` and `right` name the point of a text
that is drawn at its coordinates. Pictures use only features that browsers, editors and converters
draw
alike: they have a background, and no variables, media queries or transforms.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Final

_SIZE: Final = 13  # font size in pixels
_WIDEST: Final = 0.62
"""Average width of a letter in a wide font, DejaVu Sans, as a fraction of the font size."""

_NO_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not have (section 2.2)."""


# Ten colours of Tableau and two more, distinct on white and black, for these ops; twelve for other
# ops.
_COMMON: Final = (
    *("add", "parameter", "multiply", "matmul", "gelu", "relu"),
    *("layer_norm", "softmax", "conv2d", "batch_contract", "sum", "copied in"),
)
COLOURS: Final = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2"),
    *("#edc948", "#ff9da7", "#9c755f", "#d37295", "#8cd17d", "#499894"),
    *("#a0cbe8", "#ffbe7d", "#b6992d", "#8d7fc7", "#d7b5a6", "#e377c2"),
    *("#5fa37f", "#b5677a", "#d4a6c8", "#c7c15a", "#3aa6d0", "#b3541e"),
)
MOST_COLOURED: Final = len(COLOURS) - len(_COMMON)


def home_colour(kind: str) -> int:
    """Return the number of a kind's colour in all pictures.

    A common kind has a unique colour; other kinds may share a colour.
    """
    if kind in _COMMON:
        return _COMMON.index(kind)
    return len(_COMMON) + zlib.crc32(kind.encode(errors="replace")) % len(_COMMON)


def colours_of(ranked: Sequence[str]) -> dict[str, str]:
    """Return the colours of the first `MOST_COLOURED` kinds.

    If two kinds have the same colour, the later kind gets the next free colour.
    """
    colours: dict[str, str] = {}
    for kind in ranked[:MOST_COLOURED]:
        number = home_colour(kind)
        while COLOURS[number] in colours.values():
            number = len(_COMMON) + (number + 1) % len(_COMMON)
        colours[kind] = COLOURS[number]
    return colours


@dataclass(frozen=True)
class Scale:
    """The linear map from values `low` .. `high` to pixels `start` .. `stop`."""

    low: float
    high: float
    start: float
    stop: float
    whole: bool = False
    """True if only whole numbers are ticks."""

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / self._span * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return four to eleven round values, multiples of 1, 2 or 5 times 10^n.

        There are fewer if only whole numbers are allowed.
        """
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
    """Return a picture of that size in pixels, with the parts painted in order on white.

    Characters that XML does not have, such as control characters in names, become U+FFFD.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="{_SIZE}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    whole = "\n".join([head, f"<style>{style}</style>", paper, *parts, "</svg>\n"])
    return _NO_XML.sub("\ufffd", whole)


def px(value: float) -> str:
    """Return a number of pixels, to one decimal place, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")


def width_of(content: str, size: int = _SIZE) -> float:
    """Estimate the width of a text of that size, in pixels, from above."""
    return sum(map(_width, content)) * size


def _width(letter: str) -> float:
    """Return the width relative to the font size: 1 for East Asian wide letters.

    See Unicode Annex 11.
    """
    return 1.0 if unicodedata.east_asian_width(letter) in "WF" else _WIDEST


def fitted(content: str, width: float, size: int = _SIZE) -> str:
    """Cut the text to that width in pixels."""
    if width_of(content, size) <= width:
        return content
    ends = accumulate(map(_width, content), initial=_WIDEST)  # includes the width of the ellipsis
    letters = sum(end * size <= width for end in ends) - 1
    return f"{content[: max(letters, 0)]}…"


def text(x: float, y: float, content: str, kind: str = "", attributes: str = "") -> str:
    """Return a text element with classes and further attributes in SVG syntax."""
    named = f' class="{kind}"' if kind else ""
    more = f" {attributes}" if attributes else ""
    place = f'x="{px(x)}" y="{px(y)}"'
    return f"<text {place}{named}{more}>{escape(content, quote=False)}</text>"


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Draw the grid, the ticks and the labels of a plot.

    Horizontal grid lines have the numbers of `y`, ticks below have the numbers of `x`, and the
    label of `y` is at the top.

    The plotting area extends from the scales' `start` to `stop`; `y` starts at the bottom.
    """
    left, right, bottom = px(x.start), px(x.stop), px(y.start)
    parts = []
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{left} {px(y(tick))}H{right}"/>')
        parts.append(text(x.start - 9, y(tick) + 4, y.label(tick), "right soft"))
    for tick in x.ticks():
        parts.append(f'<path class="axis" d="M{px(x(tick))} {bottom}v5"/>')
        parts.append(text(x(tick), y.start + 20, x.label(tick), "middle soft"))
    parts.append(text((x.start + x.stop) / 2, y.start + 44, x_label, "middle soft"))
    parts.append(text(10, y.stop - 10, y_label, "soft"))
    parts.append(f'<path class="axis" d="M{left} {px(y.stop)}V{bottom}H{right}"/>')
    return "\n".join(parts)
