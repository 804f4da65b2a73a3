"""Models that published wheels have inside, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from bench.onnx_files import how_to_get, models, operands
from mlvm.onnx import load

TOLERANCE: Final = 1e-4
NEAR: Final = (1e-7, -1e-7, 2e-7)


def difference(results: Any, expected: Any) -> float:
    """The largest difference of results, of their largest elements."""
    worst = 0.0
    for y, reference in zip(results, expected, strict=True):
        if y.shape != reference.shape:
            return np.inf
        size = max(float(np.abs(reference).max(initial=0.0)), 1e-30)
        worst = max(worst, float(np.abs(y - reference).max(initial=0.0)) / size)
    return worst


def compare(folder: Path, pattern: str) -> int:
    """Run each model eagerly and captured, and say by how much it differs from ONNX Runtime. It may
    differ as much as ONNX Runtime does from itself, unoptimised or with inputs that differ in their
    last bits: where operands are rounded to integers, these decide. The exit status."""
    import onnxruntime

    status = count = 0
    for name, data in models(folder):
        if pattern not in name:
            continue
        feed = operands(name, data)

        def theirs(level: Any, by: float = 0.0, data: bytes = data, feed: Any = feed) -> Any:
            options = onnxruntime.SessionOptions()
            options.log_severity_level, options.graph_optimization_level = 3, level
            session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )
            moved = {k: v if v.dtype.kind == "i" else v + v * by for k, v in feed.items()}
            return session.run(None, {k: v.astype(feed[k].dtype) for k, v in moved.items()})

        levels = onnxruntime.GraphOptimizationLevel
        expected = theirs(levels.ORT_ENABLE_ALL)
        others = [
            theirs(levels.ORT_DISABLE_ALL),
            *(theirs(levels.ORT_ENABLE_ALL, by) for by in NEAR),
        ]
        most = max([TOLERANCE, *(difference(each, expected) for each in others)])
        model = load(data)
        inputs = {k: v.item() if v.ndim == 0 else ml.asarray(v) for k, v in feed.items()}
        ours = [
            [np.asarray(y) for y in (result if isinstance(result, tuple) else (result,))]
            for result in (model(**inputs), ml.capture(model)(**inputs))
        ]
        off, captured_off = difference(ours[0], expected), difference(*ours)
        verdict = "as it should be" if off <= most and captured_off == 0.0 else "WRONG"
        status |= verdict == "WRONG"
        count += 1
        summary = f"off by {off:.1e} of the largest (of {most:.1e}), captured by {captured_off:.1e}"
        print(f"{name}: {summary}: {verdict}", flush=True)
    if not count:
        print(how_to_get(folder))
    return int(status or not count)
