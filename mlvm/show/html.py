"""HTML for notebooks: tables, folding trees and pictures, with escaped texts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape


def block(text: str) -> str:
    """Return preformatted text."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int) -> str:
    """Return a table; the first `right` columns are flush right."""
    whole = [_row("th", head, right), *[_row("td", row, right) for row in rows]]
    return f"<table>{''.join(whole)}</table>"


def _row(kind: str, cells: Sequence[str], right: int) -> str:
    styles = ["right" if i < right else "left" for i in range(len(cells))]
    parts = [
        f'<{kind} style="text-align:{style};white-space:pre;padding:0 .5em">{escape(cell)}</{kind}>'
        for cell, style in zip(cells, styles, strict=True)
    ]
    return f"<tr>{''.join(parts)}</tr>"


def folded(lines: Sequence[str]) -> str:
    """Return a folding outline of indented lines: a line folds the more indented ones below it.

    The first is open.
    """
    parts: list[str] = []
    depths: list[int] = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        depth, inner = _depth(line), _depth(below)
        while depths and depths[-1] >= depth:
            parts.append("</details>")
            depths.pop()
        text = f"<code>{escape(line.strip())}</code>"
        if below and inner > depth:
            start = "" if depths else " open"
            parts.append(f'<details{start} style="margin-left:1em"><summary>{text}</summary>')
            depths.append(depth)
        else:
            parts.append(f'<div style="margin-left:2em">{text}</div>')
    return "".join(parts) + "</details>" * len(depths)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def picture(svg: str, about: str) -> str:
    """Return an SVG picture as an image, so that the style sheet does not affect the page."""
    data = b64encode(svg.encode()).decode()
    return (
        f'<img style="max-width:100%" alt="{escape(about)}" src="data:image/svg+xml;base64,{data}">'
    )
