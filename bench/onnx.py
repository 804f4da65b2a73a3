"""Time of a call of published ONNX models, beside ONNX Runtime, with one thread and with two.

`call_ms` is the time from inputs to outputs, `load_ms` that from a file's bytes to the first
results: loading, planning and one call. `peak_mib` is the growth of a process that does only this.
The models are those inside of wheels in the folder `ONNX_WHEELS`, by default `build/wheels`. No
contender is timed before its results are those of the first.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness import ROOT, Contender, Prepare, Round, Suite, if_native, microseconds, say
from bench.onnx_files import how_to_get, operands, places, read

Run = Callable[[], list[Any]]
_ROUND: Final = 0.05  # seconds that a round lasts at least


def ours(model: str | bytes, feed: Mapping[str, Any], threads: int) -> Run:
    """Return a model of mlvm, captured."""
    import mlvm.eager as ml

    vm = ml.VM("bench", threads=threads)
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        captured = ml.capture(ml.onnx.load(model))
        inputs = {k: v.item() if v.ndim == 0 else ml.asarray(v) for k, v in feed.items()}

    def run() -> list[Any]:
        with batch:
            outputs = captured(**inputs)
            return [np.asarray(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return run


def onnxruntime(model: str | bytes, feed: Mapping[str, Any], threads: int) -> Run:
    """Return a session of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(feed))


MAKERS: Final = {"mlvm": ours, "onnxruntime": onnxruntime}


def preparing(maker: str, threads: int) -> Prepare:
    """Return a `prepare` of all models, with `quick` of one."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        names = [*places()]
        if not names:
            say(how_to_get())
        return {name: partial(timed, name) for name in names[: 1 if quick else None]}

    @lru_cache(maxsize=1)  # prepared when a case's rounds begin; the case before is dropped
    def prepared(name: str) -> tuple[Run, int, dict[str, float]]:
        data = read(places()[name])
        feed = operands(name, data)
        _imported(maker)
        gc.collect()  # what earlier cases have left is not this one's
        start = time.perf_counter()
        run = MAKERS[maker](data, feed, threads)
        run()
        once = {"load_ms": (time.perf_counter() - start) * 1e3, "peak_mib": peak(name)}
        times = max(1, math.ceil(_ROUND / max(microseconds(run) / 1e6, 1e-6)))
        return run, times, once

    def timed(name: str) -> Mapping[str, float]:
        run, times, once = prepared(name)
        return {"call_ms": microseconds(lambda: [run() for _ in range(times)]) / times / 1e3} | once

    def peak(name: str) -> float:
        command = [sys.executable, "-m", "bench.onnx", maker, str(threads), name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, env=os.environ)
        return float(done.stdout)

    return prepare


def main() -> None:
    """Print by how many MiB a process grows that loads one model from its file, and calls it."""
    maker, threads, name = sys.argv[1:]
    _imported(maker)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(data := read(places()[name]))
        feed = operands(name, data)
        del data
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        MAKERS[maker](str(file), feed, int(threads))()
        print(_memory("VmHWM") - before)


def _imported(maker: str) -> None:
    importlib.import_module("mlvm.onnx" if maker == "mlvm" else maker)


def _memory(name: str) -> float:
    """Read a line of Linux's status of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s*(\d+) kB", status)[0]) / 1024


SUITE: Final = Suite(
    module="bench.onnx",
    contenders=(
        Contender("mlvm-1t", "mlvm", preparing("mlvm", 1)),
        Contender("onnxruntime-1t", "onnxruntime", preparing("onnxruntime", 1)),
        Contender("mlvm-2t", "mlvm", if_native(preparing("mlvm", 2)), threads=2),
        Contender("onnxruntime-2t", "onnxruntime", preparing("onnxruntime", 2), threads=2),
    ),
    units={"call_ms": "ms", "load_ms": "ms", "peak_mib": "MiB"},
    ours=("mlvm-1t", "mlvm-2t"),
    targets={(name, "call_ms", "mlvm-1t", "onnxruntime-1t"): 0.8 for name in places()},
    rounds=7,
    warm_up_rounds=1,
)

if __name__ == "__main__":
    main()
