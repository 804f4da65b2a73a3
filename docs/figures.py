"""Write the tables of measurements in README.md and docs/performance.md.

    python -m bench mixer --json mixer.json
    python -m bench dispatch --json dispatch.json
    python -m docs.figures mixer.json dispatch.json

The reports are kept in `docs/figures.json`, and both pages are written from there, so their figures
agree. `python -m docs.figures` alone writes the pages again. A table stands between the comments
`<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
DATA: Final = ROOT / "docs" / "figures.json"
PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_TABLE: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_FIELDS: Final = ("case", "contender", "metric", "median", "min", "max", "runs")
_HALVES: Final = ("bf16", "autocast")
_LIBRARIES: Final = ("mlvm", "torch", "jax")

Medians = Mapping[tuple[str, str], Mapping[str, float]]
"""Medians by case and metric, of each contender."""


def collect(reports: Sequence[Path]) -> dict[str, Any]:
    """Return the environment of the last report and the records of all, which `python -m bench
    --json` wrote."""
    loaded = [json.loads(report.read_text()) for report in reports]
    records = [{f: each[f] for f in _FIELDS} for one in loaded for each in one["records"]]
    return {"environment": loaded[-1]["environment"], "records": records}


def medians(data: Mapping[str, Any]) -> Medians:
    """Return the medians by case and metric."""
    table: dict[tuple[str, str], dict[str, float]] = {}
    for each in data["records"]:
        table.setdefault((each["case"], each["metric"]), {})[each["contender"]] = each["median"]
    return table


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


def training(data: Mapping[str, Any]) -> str:
    """Return the table of training steps in f32 and of one eager call."""
    table = medians(data)
    steps = [
        _row(
            f"Mixer step, {case}, ms",
            *(best(table[case, "step_ms"], name) for name in _LIBRARIES),
        )
        for case in ("tiny", "cifar", "s16")
    ]
    call = _row("eager `a + b`, us", *(table["add", "us_per_op"][x] for x in _LIBRARIES))
    return "\n".join([_HEAD, *steps, call])


def machine(data: Mapping[str, Any]) -> str:
    """Return a line about the processor and the libraries."""
    facts = data["environment"]
    versions = {name.split("-")[0]: version for name, version in facts["contenders"].items()}
    cores = f"{facts['cpu']}, {facts['cores']} cores ({facts['kernels']})"
    peers = f"PyTorch {versions['torch']}, JAX {versions['jax']}, numpy {facts['numpy']}"
    return f"Medians on {cores}, the best of one and two threads; {peers}."


_HEAD: Final = "| | mlvm | PyTorch | JAX | best peer / mlvm |\n|---|---|---|---|---|"
TABLES: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "training": training,
    "machine": machine,
}


def written(page: str, data: Mapping[str, Any]) -> str:
    """Return the page with its tables as the data has them."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]](data)}\n{match[3]}", page)


def main(reports: Sequence[str]) -> None:
    """Collect the reports, if there are any, and write both pages."""
    if reports:
        data = collect([Path(report) for report in reports])
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(DATA.read_text())
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8"), data), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
