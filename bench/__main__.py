"""`python -m bench`: mlvm compared with numpy, PyTorch, JAX and others."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import describe, environment
from bench.harness import SIMD, BenchError, Record, Suite, outcomes, ratios, run, say, table
from bench.plan import INSTANCES, MINIMALLOC
from mlvm.machines.terminal import CommandParser, OptionError

SUITES = {
    "batches": "bench.batches",
    "budget": "bench.budget",
    "calls": "bench.calls",
    "cold": "bench.cold",
    "convolutions": "bench.convolutions",
    "dispatch": "bench.dispatch",
    "dynamic": "bench.dynamic",
    "eager": "bench.eager",
    "generate": "bench.generate",
    "gpu": "bench.gpu",
    "inference": "bench.inference",
    "lengths": "bench.lengths",
    "machine": "bench.machine",
    "memory": "bench.memory",
    "mixer": "bench.mixer",
    "onnx": "bench.onnx",
    "peak": "bench.peak",
    "plan": "bench.plan",
    "products": "bench.products",
    "queue": "bench.queue",
    "remote": "bench.remote",
    "runs": "bench.runs",
    "scaling": "bench.scaling",
    "science": "bench.science",
    "transformations": "bench.transformations",
}


def main() -> int:
    """Run the command; see `CommandParser.run`."""
    return parser().run()


def parser() -> CommandParser:
    """Return the parser of the command."""
    command = CommandParser(_run, prog="python -m bench")
    add = command.add_argument
    text = f"one of {', '.join(SUITES)}; or all"
    add("benchmark", choices=[*SUITES, "all"], metavar="BENCHMARK", help=text)
    add("--quick", action="store_true", help="few and short rounds")
    text = "only the cases whose names contain one of these"
    add("--case", nargs="+", default=[], metavar="PART", help=text)
    text = "limit all contenders to this instruction set, except for onnxruntime"
    add("--simd", choices=["avx2"], help=text)
    add("--json", type=Path, metavar="FILE", help="write the measurements to this file")
    text = "plan: also plan the buffers of each CSV file in this folder"
    add("--instances", type=Path, metavar="DIR", help=text)
    text = "plan: compare with this executable of minimalloc"
    add("--minimalloc", type=Path, metavar="PATH", help=text)
    return command


def _run(options: argparse.Namespace) -> int:
    """Run a benchmark, or all: mlvm compared with numpy, PyTorch, JAX and others.

    The last lines compare each ratio with its target. docs/performance.md contains the results, and
    docs/measuring.md the method. The exit status is 1 if a contender failed. Results that were
    measured before a failure or Ctrl-C are printed and written.

    Example:
        python -m bench dispatch --quick --json dispatch.json
    """
    if options.instances and not options.instances.is_dir():
        raise OptionError(f"--instances: the folder {options.instances} does not exist")
    if options.minimalloc and not os.access(options.minimalloc, os.X_OK):
        raise OptionError(f"--minimalloc: {options.minimalloc} is not an executable file")
    if options.json and not options.json.resolve().parent.is_dir():
        raise OptionError(f"--json: the folder {options.json.parent} does not exist")

    if options.simd:
        os.environ[SIMD] = options.simd  # before suites are imported: targets depend on it
    for name, path in ((INSTANCES, options.instances), (MINIMALLOC, options.minimalloc)):
        if path:
            os.environ[name] = str(path.resolve())
    names = SUITES if options.benchmark == "all" else [options.benchmark]
    suites: list[Suite] = [importlib.import_module(SUITES[name]).SUITE for name in names]
    report: dict[str, Any] = {
        "benchmark": options.benchmark,
        "environment": environment(c for suite in suites for c in suite.contenders),
        "records": [],
        "ratios": [],
        "contests": [],
    }
    print(describe(report["environment"]), flush=True)
    status = 0
    try:
        for suite in suites:
            records: list[Record] = []
            try:
                run(suite, quick=options.quick, records=records, only=options.case)
            finally:
                tell(suite, records, report)
    except (BenchError, OSError) as error:
        say(f"error: {error}")
        status = 1
    except KeyboardInterrupt:
        say("interrupted: what was measured till then is told")
        status = 130
    if options.case and not report["records"] and not status:
        return 2  # each suite has said which cases it has
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return status


def tell(suite: Suite, records: Sequence[Record], report: dict[str, Any]) -> None:
    """Print the suite's table, and put what it has into the report."""
    if records:  # else each contender has said why it measured nothing
        print(f"\n{suite.name}\n{table(suite, records)}", flush=True)
    report["records"] += map(dataclasses.asdict, records)
    report["ratios"] += map(dataclasses.asdict, ratios(suite, records))
    report["contests"] += map(dataclasses.asdict, outcomes(suite, records))


if __name__ == "__main__":
    sys.exit(main())
