"""Write the tables of measurements in README.md and docs/performance.md.

    python -m bench mixer --json mixer.json
    python -m docs.figures mixer.json

The suites with tables are `mixer`, `dispatch`, `eager` and `science`. A report replaces the
previous report of its suite in `docs/figures.json`. Both pages are written from that file, so their
figures agree. `python -m docs.figures` without reports writes the pages again. A table is written
between the comments `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
DATA: Final = ROOT / "docs" / "figures.json"
PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_TABLE: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_HALVES: Final = ("bf16", "autocast")
_LIBRARIES: Final = ("mlvm", "torch", "jax")
_MINIMA: Final = ("eager", "science")

Numbers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Medians by case, metric and contender; minima of the suites in `_MINIMA`."""

Figures = Mapping[str, Mapping[str, Any]]
"""For each suite the environment of its report, and its numbers."""


def collect(report: Mapping[str, Any]) -> Figures:
    """Return the figures in a report of `python -m bench SUITE --json`."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    statistic = "min" if report["benchmark"] in _MINIMA else "median"
    for each in report["records"]:
        by_metric = table.setdefault(each["case"], {}).setdefault(each["metric"], {})
        by_metric[each["contender"]] = float(f"{each[statistic]:.4g}")
    return {report["benchmark"]: {"environment": report["environment"], "numbers": table}}


def text_of(figures: Figures) -> str:
    """Return the figures as JSON, with a line for each case."""
    suites = [
        f'"{suite}": {{"environment": {json.dumps(each["environment"])}, "numbers": {{\n'
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in each["numbers"].items())
        + "\n}}"
        for suite, each in figures.items()
    ]
    return "{\n" + ",\n".join(suites) + "\n}\n"


def best(row: Mapping[str, float], library: str) -> float:
    """Return the smallest median of a library's contenders in f32."""
    return min(
        median
        for contender, median in row.items()
        if contender.split("-")[0] == library and not any(half in contender for half in _HALVES)
    )


def _row(title: str, ours: float, *others: float) -> str:
    """Return one line of a table, with the ratio of the fastest other to ours."""
    cells = [f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (ours, *others)]
    return f"| {title} | {' | '.join(cells)} | {min(others) / ours:.2f} |"


def training(figures: Figures) -> str:
    """Return the table of training steps in f32 and one eager call."""
    steps, calls = figures["mixer"]["numbers"], figures["dispatch"]["numbers"]
    rows = [
        _row(
            f"Mixer step, {case}, ms",
            *(best(steps[case]["step_ms"], name) for name in _LIBRARIES),
        )
        for case in ("tiny", "cifar", "s16")
    ]
    call = _row("eager `a + b`, us", *(calls["add"]["us_per_op"][x] for x in _LIBRARIES))
    return "\n".join([_HEAD, *rows, call])


def machine(figures: Figures) -> str:
    """Return a line about the processor and the libraries of the training steps."""
    return f"Medians on {_machine(figures, 'mixer')}; the best of one and two threads."


def _machine(figures: Figures, suite: str) -> str:
    facts = figures[suite]["environment"]
    versions = {name.split("-")[0]: version for name, version in facts["contenders"].items()}
    peers = f"PyTorch {versions['torch']}, JAX {versions['jax']}, numpy {facts['numpy']}"
    return f"{facts['cpu']}, {facts['cores']} cores ({facts['kernels']}); {peers}"


_MODES: Final = {"repeated_us": "repeated", "types_us": "100 types", "new_us": "new numbers"}
_PEERS: Final = {"torch": "PyTorch", "numpy": "numpy", "jax": "JAX"}


def eager(figures: Figures) -> str:
    """Return the table of eager calls: ratios in each mode for each library, then each call."""
    numbers: Numbers = figures["eager"]["numbers"]
    summary = [
        _summary(mode, peer, numbers)
        for mode in _MODES
        for peer in _PEERS
        if any(mode in row and peer in row[mode] for row in numbers.values())
    ]
    return "\n".join(
        [
            f"Minima of interleaved rounds on {_machine(figures, 'eager')}; one thread.\n",
            "| peer / mlvm | calls | geometric mean | least | calls below 1 |",
            "|---|---|---|---|---|",
            *summary,
            f"\n| us | mlvm | {' | '.join(_PEERS.values())} | PyTorch / mlvm | with 100 types |",
            "|---|---|---|---|---|---|---|",
            *[_call(name, row) for name, row in numbers.items()],
        ]
    )


def _summary(mode: str, peer: str, numbers: Numbers) -> str:
    """Return the line of the ratios of a library in a mode."""
    pairs = [row[mode] for row in numbers.values() if mode in row and peer in row[mode]]
    ratios = [each[peer] / each["mlvm"] for each in pairs]
    mean, below = statistics.geometric_mean(ratios), sum(each < 1 for each in ratios)
    title = f"{_PEERS[peer]}, {_MODES[mode]}"
    return f"| {title} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {below} |"


def _call(name: str, row: Mapping[str, Mapping[str, float]]) -> str:
    """Return the line of a call: its times, repeated or with new numbers."""
    usual = row.get("repeated_us") or row["new_us"]
    times = [f"{usual[each]:.3g}" if each in usual else "" for each in ("mlvm", *_PEERS)]
    ratios = [
        f"{each['torch'] / each['mlvm']:.2f}" if "torch" in each else ""
        for each in (usual, row.get("types_us", {}))
    ]
    return f"| `{name}` | {' | '.join([*times, *ratios])} |"


def science(figures: Figures) -> str:
    """Return the table of numerical programs: a captured call of each, and ratios of peers."""
    numbers: Numbers = figures["science"]["numbers"]
    rows, ratios = [], []
    for case, metrics in numbers.items():
        times = {name.split("-")[0]: time / 1000 for name, time in metrics["us"].items()}
        ratios.append([times[peer] / times["mlvm"] if peer in times else None for peer in _PEERS])
        cells = [f"{ratio:.2f}" if ratio else "" for ratio in ratios[-1]]
        rows.append(f"| {case} | {times['mlvm']:.3g} | {' | '.join(cells)} |")
    means = [
        f"{statistics.geometric_mean([ratio for ratio in column if ratio]):.2f}"
        for column in zip(*ratios, strict=True)
    ]
    return "\n".join(
        [
            f"Minima of interleaved rounds on {_machine(figures, 'science')}; f64, one thread.\n",
            f"| program | mlvm, ms | {' | '.join(f'{peer} / mlvm' for peer in _PEERS.values())} |",
            "|---|---|---|---|---|",
            *rows,
            f"| geometric mean | | {' | '.join(means)} |",
        ]
    )


_HEAD: Final = "| | mlvm | PyTorch | JAX | best peer / mlvm |\n|---|---|---|---|---|"
TABLES: Final[Mapping[str, Callable[[Figures], str]]] = {
    "training": training,
    "machine": machine,
    "eager": eager,
    "science": science,
}


def written(page: str, figures: Figures) -> str:
    """Return the page with its tables as the figures have them."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]](figures)}\n{match[3]}", page)


def main(reports: Sequence[str]) -> None:
    """Collect the reports, and write both pages."""
    figures = json.loads(DATA.read_text())
    for report in reports:
        figures |= collect(json.loads(Path(report).read_text()))
    DATA.write_text(text_of(figures))
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8"), figures), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
