"""The kernels as CUDA C: NVRTC compiles them to PTX where its wheel is installed, without a GPU.

pip install nvidia-cuda-nvrtc-cu12
python -m tests.machines.gpu.test_cuda      # each source, for each architecture
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import mlvm.machines.gpu.queue  # noqa: F401  (all kernels are declared)
from mlvm.core.errors import OpError
from mlvm.core.op import OPS
from mlvm.core.types import DType, TensorType, f32, f64
from mlvm.machines.gpu.kernels import KERNELS, Facts
from tests.cases import CASES
from tests.machines.gpu.larger import LARGER

ARCHITECTURES = ("compute_70", "compute_75", "compute_80", "compute_86", "compute_89", "compute_90")
_GPU = Facts("a GPU", True, False, 100, 48 << 10, 1024)
_HASH = re.compile(r"(?<=^chain)_.*")
_NAMES = re.compile(r"^#define (\w+)", re.MULTILINE)


def library() -> ctypes.CDLL | None:
    """NVRTC of the wheel."""
    if importlib.util.find_spec("nvidia") is None:
        return None
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder, "lib").glob("libnvrtc.so*"):
            return ctypes.CDLL(str(path))
    return None


def compiled(nvrtc: ctypes.CDLL, text: str, architecture: str) -> str:
    """The PTX. Raises `AssertionError` with what the compiler says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    reference = ctypes.byref(program)
    assert nvrtc.nvrtcCreateProgram(reference, text.encode(), b"kernels.cu", 0, None, None) == 0
    options = (f"--gpu-architecture={architecture}", "--std=c++14", "--fmad=false", "-w")
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    kind = "ProgramLog" if result else "PTX"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
    nvrtc.nvrtcDestroyProgram(reference)
    assert result == 0, buffer.value.decode()
    return buffer.value.decode()


def together(texts: Iterable[str]) -> str:
    """Sources as one, each in a namespace."""
    parts = []
    for i, text in enumerate(texts):
        plain = text.replace('extern "C" ', "")
        ends = "".join(f"#undef {name}\n" for name in set(_NAMES.findall(text)))
        parts.append(f"namespace of_{i} {{\n{plain}\n}}\n{ends}")
    return "".join(parts)


def sources(*dtypes: str) -> dict[str, str]:
    """Return a GPU's sources for the cases of all ops, with floats of these dtypes: entries by
    source."""
    texts: dict[str, str] = {}
    pairs = [(name, case) for name, cases in CASES.items() for case in cases]
    for name, case in [*pairs, *LARGER]:
        if name not in KERNELS:
            continue
        attributes = OPS[name].bind(case.attributes)
        for dtype in map(DType.named, dtypes):
            types = [TensorType.of(np.asarray(x)) for x in case.inputs]
            types = [x.with_dtype(dtype) if x.dtype in (f32, f64) else x for x in types]
            try:
                out = OPS[name].infer(types, attributes)
            except OpError:
                continue
            if out is not None and out.size:
                calls = KERNELS[name].make(_GPU, (out, *types), **attributes)
                texts.update({call.source: _HASH.sub("", call.entry) for call in calls or ()})
    return texts


def of_each_kind(texts: dict[str, str], most: int) -> list[str]:
    """Return at most `most` sources of each entry, spread over all."""
    by_entry: dict[str, list[str]] = {}
    for text, entry in texts.items():
        by_entry.setdefault(entry, []).append(text)
    return [text for of in by_entry.values() for text in of[:: max(len(of) // most, 1)][:most]]


def test_kernels_compile_for_cuda() -> None:
    nvrtc = library()
    if nvrtc is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    texts = of_each_kind(sources("f32"), 1)
    ptx = compiled(nvrtc, together(texts), "compute_70")
    assert ".target sm_70" in ptx
    assert ptx.count(".entry") >= len(texts) > 25
    with pytest.raises(AssertionError, match="undefined"):
        compiled(nvrtc, "KERNEL void broken() { undefined = 1; }", "compute_70")


def main() -> int:
    nvrtc = library()
    if nvrtc is None:
        print("there is no NVRTC here: pip install nvidia-cuda-nvrtc-cu12")
        return 2
    texts = sources("f32", "f64", "f16", "bf16")
    for architecture in ARCHITECTURES:
        start = time.monotonic()
        ptx = compiled(nvrtc, together(texts), architecture)
        seconds = time.monotonic() - start
        print(
            f"{architecture}: {len(texts)} sources, {ptx.count('.entry')} kernels, {seconds:.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
