"""Models that published wheels have inside, beside ONNX Runtime."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.onnx import Model, load

NAMES: Final = [
    "magika",
    "rapidocr",
    "rapidocr-onnxruntime",
    "silero-vad",
    "basic-pitch",
    "nudenet",
    "ddddocr",
]
"""The wheels, by the names under which they are published."""

SHAPES: Final = {
    "nmp.onnx": (1, 43844, 1),
    "common.onnx": (1, 1, 64, 160),
    "common_old.onnx": (1, 1, 64, 160),
    "common_det.onnx": (1, 3, 416, 416),
    "320n.onnx": (1, 3, 320, 320),
    "_det_": (1, 3, 320, 320),
    "_cls_": (1, 3, 48, 192),
    "_rec_": (1, 3, 48, 320),
    "_16k_sequence": (50, 576),
}
"""The shape of a model's images or sounds, by a part of its file's name."""

EIGHT_BITS: Final = ("common_old.onnx",)
"""Models whose operands are rounded to eight bits at each step, where one place decides another."""

TOLERANCE: Final = 1e-4
TOLERANCE_OF_EIGHT_BITS: Final = 2e-2


def models(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The ONNX files in the wheels of a folder, by name."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".onnx"):
                    yield (
                        f"{wheel.name.partition('-')[0]}/{name.rpartition('/')[2]}",
                        archive.read(name),
                    )


def operands(name: str, session: Any) -> dict[str, Any]:
    """Inputs for a model, drawn at random."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for each in session.get_inputs():
        if each.name == "sr":
            found[each.name] = np.asarray(16000, np.int64)
            continue
        shape = [n if isinstance(n, int) else None for n in each.shape]
        if None in shape:
            known = [size for part, size in SHAPES.items() if part in name]
            if each.name in ("state", "h", "c"):
                shape = [2 if each.name == "state" else 1, 1, 128]
            elif known:
                shape = [*known[0]]
            else:
                shape = [1, 2048] if each.name == "bytes" else [1, 576]
        if "int" in each.type:
            kind = np.int32 if "32" in each.type else np.int64
            found[each.name] = rng.integers(0, 256, shape).astype(kind)
        else:
            found[each.name] = rng.standard_normal(shape).astype(np.float32)
    return found


def given(model: Model, feed: dict[str, Any]) -> dict[str, Any]:
    """The inputs as a model of mlvm is called with them: numbers, where shapes depend on them."""
    return {k: v.item() if v.ndim == 0 else ml.asarray(v) for k, v in feed.items()}


def difference(made: Any, expected: list[Any]) -> float:
    """The largest difference, of the largest element."""
    results = made if isinstance(made, tuple) else (made,)
    worst = 0.0
    for y, wanted in zip(results, expected, strict=True):
        array = np.asarray(y)
        if array.shape != wanted.shape:
            return np.inf
        size = max(float(np.abs(wanted).max(initial=0.0)), 1e-30)
        worst = max(worst, float(np.abs(array - wanted).max(initial=0.0)) / size)
    return worst


def compare(folder: Path, pattern: str) -> int:
    """Run each model eagerly and captured, and say by how much it differs. The exit status."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    status = count = 0
    for name, data in models(folder):
        if pattern not in name:
            continue
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        feed = operands(name, session)
        expected = session.run(None, feed)
        model = load(data)
        inputs = given(model, feed)
        eager, captured = model(**inputs), ml.capture(model)(**inputs)
        off = difference(eager, expected)
        ours = [np.asarray(y) for y in (captured if isinstance(captured, tuple) else (captured,))]
        apart = difference(eager, ours)
        most = TOLERANCE_OF_EIGHT_BITS if name.endswith(EIGHT_BITS) else TOLERANCE
        verdict = "as it should be" if off <= most and apart == 0.0 else "WRONG"
        status |= verdict == "WRONG"
        count += 1
        print(
            f"{name}: off by {off:.1e} of the largest, captured by {apart:.1e}: {verdict}",
            flush=True,
        )
    if not count:
        print(f"there are no models: pip download --no-deps -d {folder} {' '.join(NAMES)}")
    return status or not count
