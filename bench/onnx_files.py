"""ONNX models that published wheels have inside, and inputs for them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.core.types import DType
from mlvm.onnx.arrays import dtype_of
from mlvm.onnx.graph import kind_of
from mlvm.onnx.wire import decode

NAMES: Final = "magika rapidocr rapidocr-onnxruntime silero-vad basic-pitch nudenet ddddocr"
"""The wheels, by the names under which they are published."""

FOLDER: Final = Path(os.environ.get("ONNX_WHEELS", "build/wheels"))
"""Where they lie."""

_IMAGES: Final = {
    "nmp.onnx": (1, 43844, 1),
    "common.onnx": (1, 1, 64, 160),
    "common_old.onnx": (1, 1, 64, 160),
    "common_det.onnx": (1, 3, 416, 416),
    "320n.onnx": (1, 3, 320, 320),
    "_det_": (1, 3, 320, 320),
    "_cls_": (1, 3, 48, 192),
    "_rec_": (1, 3, 48, 320),
    "_16k_sequence": (50, 576),
    "magika": (1, 2048),
}
"""The shape of a model's images or sounds, by a part of its file's name."""
_STATES: Final = {"state": (2, 1, 128), "h": (1, 1, 128), "c": (1, 1, 128)}


def places(folder: Path = FOLDER) -> dict[str, tuple[Path, str]]:
    """Return the wheel of each ONNX file in a folder's wheels, and its name there."""
    by_name = {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".onnx"):
                    short = f"{wheel.name.partition('-')[0]}/{name.rpartition('/')[2]}"
                    by_name[short] = wheel, name
    return by_name


def read(place: tuple[Path, str]) -> bytes:
    """Return the bytes of a file in a wheel."""
    with zipfile.ZipFile(place[0]) as archive:
        return archive.read(place[1])


def models(folder: Path = FOLDER) -> Iterator[tuple[str, bytes]]:
    """Yield the ONNX files in the wheels of a folder, by name."""
    for name, place in places(folder).items():
        yield name, read(place)


def how_to_get(folder: Path = FOLDER) -> str:
    """Return a hint for a folder without models."""
    return f"there are no models: pip download --no-deps -d {folder} {NAMES}"


def operands(name: str, data: bytes) -> dict[str, Any]:
    """Inputs for a model, drawn at random. The sampling rate is 16 kHz."""
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    graph = decode(memoryview(data)).graph
    for each in graph.input:
        if each.name in {constant.name for constant in graph.initializer}:
            continue
        kind = kind_of(each)
        shape: Any = kind.shape or ()
        if each.name == "sr":
            inputs[each.name] = np.asarray(16000, np.int64)
            continue
        if not all(isinstance(n, int) for n in shape):
            sizes = [size for part, size in _IMAGES.items() if part in name]
            shape = _STATES.get(each.name) or (sizes[0] if sizes else (1, 576))
        dtype: DType = dtype_of(kind.number, each.name)
        if dtype.is_integer:
            inputs[each.name] = rng.integers(0, 256, shape).astype(dtype.numpy)
        else:
            inputs[each.name] = rng.standard_normal(shape).astype(np.float32)
    return inputs
