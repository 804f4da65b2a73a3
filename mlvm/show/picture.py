"""An arena's recording as an SVG picture: address against time, a rectangle for each tensor."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from mlvm.arena.arena import Arena
from mlvm.arena.recording import Lifetime, Recording
from mlvm.machines.files import require_suffix, write_file
from mlvm.show import html
from mlvm.show.record import snapshot
from mlvm.show.report import forgotten_of, report, short
from mlvm.show.svg import COLOURS, Scale, axes, colours_of, document, fitted, px, text, width_of

MOST_RECTANGLES: Final = 4000
"""Number of rectangles that browsers scroll smoothly, in a file below a megabyte."""

_WIDTH, _HEIGHT = 1200, 680
_DENSE: Final = 2  # pixels per event below which rectangles have no edges
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 214, 92, 62  # margins around the plotting area
_RIGHT_END, _GROUND = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
_WIDEST_LEGEND: Final = 420


_LABELLED: Final = 5  # number of labelled tensors at the peak

_OTHER: Final = "#a0a4aa"

_STYLE: Final = "\n" + Path(__file__).with_name("picture.css").read_text("utf-8")


def timeline(recording: Recording, *, title: str | None = None, now: int | None = None) -> str:
    """Return the recording as SVG text, with a line at the moment `now`.

    A tensor is a rectangle. It extends from left to right over the tensor's moments, and upwards
    over the bytes. The colour shows the op that wrote the tensor first, or the type if that op is
    unknown. Under the pointer the rectangle shows op, type, bytes, moments and the line of Python
    that created the tensor. The thin line is the number of bytes in use. One dashed line is the
    most bytes in use at any moment, which is a lower bound for any placement; the other is the
    highest address. If there are too many tensors, only the largest are drawn.
    """
    used = recording.used()
    bound = max(used)
    top = max((each.offset + each.nbytes for each in recording.lifetimes), default=0)
    unit, name = _unit(max(top, bound))
    x = Scale(recording.first, recording.moments, _LEFT, _RIGHT_END, whole=True)
    y = Scale(0, 1.07 * max(top, bound, 1), _GROUND, _TOP)
    peaks, stretch = _envelope([round(y(nbytes)) for nbytes in used])
    drawn = _largest(recording.lifetimes)
    colours = _colours(drawn)
    count, total = len(drawn), len(recording.lifetimes)
    part = "" if count == total else f"the largest {count:,} of "
    ratio = f", {top / bound:.2f} times the lower bound" if bound else ""
    abouts = [
        f"{part}{total:,} tensors; the arena holds {recording.capacity:,} bytes; peak use "
        f"{max(bound, recording.high_before):,}; highest address {top:,}{ratio}"
    ]
    if recording.forgotten:
        abouts.append(forgotten_of(recording))
    first = 66 - 8 * len(abouts)  # the first line; the axis label is below the texts
    heading = fitted(title or f"Arena {recording.arena}", _WIDTH - _LEFT, 20)
    times, addresses = "time (allocation and free events)", f"address, {name}"
    width = _RIGHT_END + _legend_width(drawn, colours)
    return document(
        width,
        _HEIGHT,
        _STYLE,
        text(_LEFT, first - 24, heading, attributes='font-size="20"'),
        *(
            text(_LEFT, first + 16 * i, fitted(about, _WIDTH - _LEFT), "soft")
            for i, about in enumerate(abouts)
        ),
        axes(x, Scale(0, y.high / unit, y.start, y.stop), times, addresses),
        _tensors(drawn, colours, x, y),
        _resets(recording, x),
        _used(peaks, stretch, recording.first, x),
        _level(y(top), "top", f"highest address: {top:,} bytes", -6),
        _level(y(bound), "bound", f"lower bound: {bound:,} bytes live at the same time", 16),
        _peak(recording, x, y),
        "" if now is None else _marked(x(now + 0.5), "now"),
        _legend(drawn, colours, width, "bytes in use" if stretch == 1 else "peaks of bytes in use"),
    )


def _unit(nbytes: int) -> tuple[int, str]:
    """Return a unit for a number of bytes, and the unit's name."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2 << power:
            return 1 << power, name
    return 1, "bytes"


def _largest(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """Return the lifetimes to draw: the largest, in the order they came."""
    if len(lifetimes) <= MOST_RECTANGLES:
        return list(lifetimes)
    by_area = sorted(lifetimes, key=_area, reverse=True)[:MOST_RECTANGLES]
    return sorted(by_area, key=lambda each: each.start)


def _area(lifetime: Lifetime) -> int:
    return lifetime.nbytes * (lifetime.end - lifetime.start)


def _kind(lifetime: Lifetime) -> str:
    """Return the kind that decides the colour: the op, or the type if no op is known."""
    return lifetime.op or str(lifetime.type)


def _colours(lifetimes: Sequence[Lifetime]) -> dict[str, str]:
    """Assign colours to the kinds with the largest areas of bytes times time.

    Other kinds are grey.
    """
    area: dict[str, int] = {}
    for each in lifetimes:
        area[_kind(each)] = area.get(_kind(each), 0) + _area(each)
    largest = sorted(area, key=lambda kind: area[kind], reverse=True)
    return dict.fromkeys(largest, _OTHER) | colours_of(largest)


# --- the parts -----------------------------------------------------------------------


def _tensors(lifetimes: Sequence[Lifetime], colours: dict[str, str], x: Scale, y: Scale) -> str:
    """Return a group of rectangles for each colour."""
    groups: dict[str, list[str]] = {colour: [] for colour in colours.values()}
    for each in lifetimes:
        left, above = max(x(each.start), _LEFT), y(each.offset + each.nbytes)
        groups[colours[_kind(each)]].append(
            f'<rect x="{px(left)}" y="{px(above)}" width="{px(max(x(each.end) - left, 0.3))}" '
            f'height="{px(max(y(each.offset) - above, 0.3))}"><title>{_hover(each)}</title></rect>'
        )
    drawn = [f'<g fill="{colour}">{"".join(inside)}</g>' for colour, inside in groups.items()]
    dense = " dense" * (x(1) - x(0) < _DENSE)  # edges would cover the colour
    return f'<g class="tensors{dense}">' + "\n".join(drawn) + "</g>"


def _hover(each: Lifetime) -> str:
    lines = [
        ": ".join(filter(None, [" ".join(filter(None, [each.op, each.path])), str(each.type)])),
        f"{each.nbytes:,} bytes at {each.offset:,}",
        f"events {each.start:,} to {each.end - 1:,}",
        *([short(each.line)] if each.place is not None else []),
    ]
    return escape("\n".join(lines), quote=False)


def _resets(recording: Recording, x: Scale) -> str:
    if len(recording.resets) > 100:  # the lines would hide the rectangles
        return ""
    lines = [
        f'<path class="reset" d="M{px(x(moment))} {_TOP}V{_GROUND}"><title>reset</title></path>'
        for moment in recording.resets
        if moment > recording.first
    ]
    return "\n".join(lines)


def _envelope(heights: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return the maximum of each stretch of the curve, and the length of a stretch.

    The length is 1, or large enough that the line does not hide the colours.
    """
    stretch = 1
    # times the height of the plot: a longer line up and down would hide the rectangles
    while sum(abs(a - b) for a, b in itertools.pairwise(heights)) > 20 * (_GROUND - _TOP):
        # y coordinates increase downwards
        heights = [min(heights[i : i + 2]) for i in range(0, len(heights), 2)]
        stretch *= 2
    return heights, stretch


def _used(heights: Sequence[int], stretch: int, first: int, x: Scale) -> str:
    """Return the bytes in use as a staircase, with the steps that are large enough to see."""
    steps: list[str] = []
    before = -1
    for i, height in enumerate(heights):
        if height != before:
            at = px(x(first + i * stretch))
            steps.append(f"H{at}V{height}" if steps else f"M{at} {height}")
            before = height
    return f'<path class="used" d="{"".join(steps)}H{_RIGHT_END}"/>'


def _level(y: float, kind: str, label: str, lower: float) -> str:
    """Return a dashed line across the plot, with a label `lower` pixels below it."""
    line = f'<path class="level {kind}" d="M{_LEFT} {px(y)}H{_RIGHT_END}"/>'
    at = _RIGHT_END - 6, y + lower, label
    return line + text(*at, "halo right") + text(*at, f"{kind} right")


def _peak(recording: Recording, x: Scale, y: Scale) -> str:
    """Return a line at the first moment of peak use, with labels of the largest tensors there."""
    if not recording.lifetimes:
        return ""
    moment, alive = recording.at_peak()
    at = x(moment + 0.5)
    largest = sorted(alive, key=lambda each: each.nbytes, reverse=True)[:_LABELLED]
    parts = [
        f'<path class="peak" d="M{px(at)} {_GROUND}V{_TOP}"/>',
        text(at, _TOP - 4, "peak use", "soft middle"),
    ]
    is_left = at > (_LEFT + _RIGHT_END) / 2
    for each in largest:
        label = f"{_kind(each)} {each.type} {Path(each.line).name}".rstrip()
        middle = y(each.offset + each.nbytes / 2) + 4
        room = at - _LEFT if is_left else _RIGHT_END - at
        where = at - 6 if is_left else at + 6, middle, fitted(label, room)
        side = " right" * is_left
        parts += [text(*where, f"halo{side}"), text(*where, f"label{side}")]
    return "".join(parts)


def _marked(at: float, label: str) -> str:
    """Return a dashed line up and down the plot, with a label above it."""
    line = f'<path class="level top" d="M{px(at)} {_GROUND}V{_TOP}"/>'
    return line + text(at, _TOP - 4, label, "top middle")


def curves(values: Mapping[str, Sequence[float]], title: str, *, mark: int | None = None) -> str:
    """Return an SVG picture of series of numbers by index, with a line at the index `mark`.

    Numbers that are not finite leave a gap. For a long series, only every n-th number is drawn.
    """
    longest = max(map(len, values.values()), default=0)
    finite = [each for series in values.values() for each in series if math.isfinite(each)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    x = Scale(0, max(longest - 1, 1), _LEFT, _RIGHT_END, whole=True)
    y = Scale(low, high if high > low else low + 1.0, _GROUND, _TOP)
    parts = []
    for i, (name, series) in enumerate(values.items()):
        stretch = -(-len(series) // 2000) or 1  # number of drawn points of a curve
        points = [
            f"{px(x(n))} {px(y(series[n]))}" if math.isfinite(series[n]) else ""
            for n in range(0, len(series), stretch)
        ]
        runs = [list(run) for drawn, run in itertools.groupby(points, bool) if drawn]
        path = "".join(f"M{'L'.join(run if len(run) > 1 else run * 2)}" for run in runs)
        style = f'stroke="{COLOURS[i]}" stroke-width="{3 - 2 * i}" stroke-linecap="round"'
        parts.append(f'<path fill="none" {style} d="{path}"/>')
        at = _TOP + 20 + 23 * i
        parts.append(f'<path {style} d="M{_RIGHT_END + 22} {at - 4}h20"/>')
        label = fitted(name, _RIGHT - 64)
        parts.append(text(_RIGHT_END + 48, at, label))
    return _plot(
        title,
        axes(x, y, "step", ""),
        *parts,
        "" if mark is None else _marked(x(mark), f"step {mark}"),
    )


def front(points: Sequence[tuple[int, float]], nbytes: int) -> str:
    """Return an SVG picture of bytes against estimated seconds.

    The points are sorted by time, and the time is relative to the first. The plan of `nbytes` bytes
    is marked.
    """
    unit, name = _unit(max(points, default=(nbytes, 0.0))[0])
    fastest = points[0][1] or 1.0  # the time of a step without calls is 0
    times = [seconds / fastest for _, seconds in points]
    x = Scale(0, 1.07 * max([nbytes, *[n for n, _ in points]]) / unit, _LEFT, _RIGHT_END)
    y = Scale(1, max(1.1, 1.02 * max(times)), _GROUND, _TOP)
    corners = [f"M{px(x(points[0][0] / unit))} {px(y(1))}"]
    dots = []
    for (each, _), time in zip(points, times, strict=True):
        corners.append(f"H{px(x(each / unit))}V{px(y(time))}")
        where = f'cx="{px(x(each / unit))}" cy="{px(y(time))}"'
        hover = f"<title>{each:,} bytes, {time:.3f} times the fastest program's time</title>"
        dots.append(f'<circle {where} r="4" fill="{COLOURS[0]}">{hover}</circle>')
    return _plot(
        "Memory and time of a captured step",
        axes(x, y, f"plan with hoisted values, {name}", "estimated time, relative to the fastest"),
        f'<path class="used" d="{"".join(corners)}"/>',
        *dots,
        _marked(x(nbytes / unit), f"this plan: {nbytes:,} bytes"),
    )


def _plot(title: str, *parts: str) -> str:
    heading = text(_LEFT, 42, fitted(title, _WIDTH - _LEFT, 20), attributes='font-size="20"')
    return document(_WIDTH, _HEIGHT, _STYLE, heading, *parts)


def _legend_width(lifetimes: Sequence[Lifetime], colours: dict[str, str]) -> int:
    """Return the width of the legend, which cuts only very long labels."""
    labels = [kind for kind, colour in colours.items() if colour != _OTHER]
    longest = max(map(width_of, labels), default=0) + width_of(f"{len(lifetimes):,}")
    return max(_RIGHT, min(round(longest) + 68, _WIDEST_LEGEND))


def _legend(lifetimes: Sequence[Lifetime], colours: dict[str, str], width: int, line: str) -> str:
    """Return a column of coloured squares, each with an op and the number of tensors."""
    counts = Counter(map(_kind, lifetimes))
    rows = [(colour, kind, counts[kind]) for kind, colour in colours.items() if colour != _OTHER]
    rest = [counts[kind] for kind, colour in colours.items() if colour == _OTHER]
    if rest:
        rows.append((_OTHER, f"{len(rest)} others", sum(rest)))
    left, parts = _RIGHT_END + 22, []
    for i, (colour, label, count) in enumerate(rows):
        top = _TOP + 8 + 23 * i
        parts.append(f'<rect x="{left}" y="{top}" width="13" height="13" rx="2" fill="{colour}"/>')
        number, end = f"{count:,}", width - 16
        room = end - width_of(number) - 8 - (left + 20)
        parts.append(text(left + 20, top + 11, fitted(label, room)))
        parts.append(text(end, top + 11, number, "soft right"))
    top = _TOP + 20 + 23 * len(rows)
    parts.append(f'<path class="used" d="M{left} {top}h13"/>')
    parts.append(text(left + 20, top + 4, line))
    return "\n".join(parts)


def plot(arena: Arena, path: str | Path, *, title: str | None = None) -> None:
    """Write an SVG picture: address against time, a rectangle for each tensor.

    It shows the arena's recording, finished or running; without a recording, the live tensors.
    Raises `ArgumentError` for a name that does not end in .svg, and `OSError`.
    """
    require_suffix(path, ".svg", "plot")
    recording = arena.recording.so_far() if arena.recording is not None else snapshot(arena)
    write_file(path, timeline(recording, title=title))


def _arena_html(arena: Arena) -> str:
    """Return the HTML of an arena for notebooks: the picture and the report."""
    recording = arena.recording.so_far() if arena.recording is not None else snapshot(arena)
    text = report(arena)
    drawn = html.picture(timeline(recording), text) if recording.lifetimes else ""
    return drawn + html.block(text)


Arena.plot = plot
Arena._repr_html_ = _arena_html
