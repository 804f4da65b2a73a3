"""Availability of the C extension, and selection of the instruction set.

MLVM_NATIVE is the default of `native=`: `0` selects the numpy kernels, and `1` the native kernels
or an error. Otherwise the native kernels are used if they were built. MLVM_SIMD selects an
instruction set of the processor: `amx`, `avx512_bf16`, `avx512`, `avx2`, `plain`; and for tests
`amx_emulated`. If a checkout lacks the set, it is compiled. MLVM_THREADS is the number of threads
of the default VM. MLVM_MACHINE_CODE is `0` to generate no machine code for chains, or `1`, for
tests, to generate the code before the first run of a chain.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from mlvm.core.errors import MachineError, MissingExtraError, brief
from mlvm.machines import digest
from mlvm.machines.native.sources import sources_digest

if TYPE_CHECKING:
    from mlvm.machines.native._native import Pool

MOST_THREADS: Final = 256
_SETS: Final = ("amx", "avx512_bf16", "avx512", "avx2", "neon", "plain", "amx_emulated")
_FLAGS: Final = {
    "amx": "amx_tile",
    "avx512_bf16": "avx512_bf16",
    "avx512": "avx512f",
    "avx2": "avx2",
}
"""Flags of Linux by instruction set."""

_REMEDY: Final = (
    "installing mlvm compiles it if a C compiler exists: in a checkout, run `make native` "
    "or `pip install --force-reinstall .`"
)


_STALE: Final = "the extension was built from different C sources"


def _has(simd: str) -> bool:
    """Return whether the processor supports an instruction set, as far as the system lists it."""
    try:
        listed = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return _FLAGS.get(simd) is None or "flags" not in listed or _FLAGS[simd] in listed


def _compile(simd: str) -> str:
    """Compile a missing instruction set in a checkout.

    Return the cause of a failure.
    """
    native, checkout = Path(__file__).parent, Path(__file__).parents[3]
    library = next(native.glob("_native.*.so"), native / "_native.abi3.so")
    sources = native / "src" / "module.c"
    if simd not in _SETS or not all(x.exists() for x in (library, sources, checkout / "setup.py")):
        return ""
    if not _has(simd) or f"kernels of {simd}\0".encode() in library.read_bytes():
        return ""
    import subprocess  # a rare case

    print(f"mlvm: compiling kernels for MLVM_SIMD={simd}, once", file=sys.stderr, flush=True)
    environment = {**os.environ, "MLVM_NATIVE": "1", "MLVM_TARGETS": f"built,{simd}"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    # A compiler's own error is in the middle, Python's is the last line.
    error = next((x.strip() for x in lines if ": error: " in x or "fatal error" in x), lines[-1])
    remedy = f"`MLVM_NATIVE=1 MLVM_TARGETS=built,{simd} pip install -v -e {checkout}`"
    return f"{error}; {remedy} compiles it with a current setuptools and prints all output"


def _load() -> tuple[ModuleType | None, str]:
    """Import the extension; return it and the kernels in use, or None and the reason."""
    simd = os.environ.get("MLVM_SIMD", "")
    try:
        module = importlib.import_module("mlvm.machines.native._native")
    except ModuleNotFoundError:
        return None, "it was not built"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"
    folder = Path(__file__).parent / "src"
    if (folder / "module.c").exists():  # only in a checkout: a wheel has a part of the sources
        expected = f"sources {sources_digest(folder)}"
        if getattr(module, "sources", "") != expected:
            text = f"mlvm runs numpy kernels: {_STALE}; {_REMEDY}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None, _STALE
    if simd and not module.choose_simd(simd):
        return module, f"no {simd} kernels"
    after = {"0": 0, "1": 1}.get(os.environ.get("MLVM_MACHINE_CODE", ""))
    if after is not None:
        module.code_after(after)
    return module, f"{module.simd()} kernels"


def install(**objects: object) -> None:
    """Pass objects of Python to the extension, if it exists.

    Raises `ImportError` if the extension was built from older sources, which use other objects.
    """
    try:
        if EXTENSION is not None:
            EXTENSION.install(**objects)
    except TypeError as error:
        raise ImportError(f"{_STALE} ({error}); {_REMEDY}") from None


def is_native(native: bool | None) -> bool:
    """Return whether a VM with the option `native` runs natively.

    Raises `MissingExtraError` if the option is True and the extension is missing, and
    `MachineError` for invalid environment variables.
    """
    for name in ("MLVM_NATIVE", "MLVM_MACHINE_CODE"):
        setting = os.environ.get(name, "")
        if setting not in ("", "0", "1"):
            raise MachineError(f"{name}: expected 0 or 1, got {setting!r}")
    if native is None:
        native = {"0": False, "1": True}.get(os.environ.get("MLVM_NATIVE", ""))
    if native:
        require("the native machine is not available")
    native = EXTENSION is not None if native is None else bool(native)
    simd, here = os.environ.get("MLVM_SIMD", ""), [n for n, here in simd_sets().items() if here]
    if native and simd and simd not in here:
        lacking = "this build lacks the set" if _has(simd) else "this processor lacks it"
        lacking = why_lacking(simd) if simd in simd_sets() else lacking
        lacking += f", and compiling it failed: {_FAILURE}" if _FAILURE else ""
        raise MachineError(f"MLVM_SIMD={simd}: {lacking}; available are {' '.join(here)}")
    return native


def require(what: str) -> None:
    """Raise `MissingExtraError` without the extension; `what` names the feature that needs it."""
    if EXTENSION is None:
        raise MissingExtraError(f"{what}: {REASON}; {_REMEDY}")


def simd_sets() -> dict[str, bool]:
    """Return the instruction sets, best first, and whether this processor supports each.

    The result is empty if the extension is missing.
    """
    sets: dict[str, bool] = {} if EXTENSION is None else EXTENSION.simd_sets()
    return sets


def why_lacking(simd: str) -> str:
    """Explain why an instruction set of this build cannot be used."""
    assert EXTENSION is not None
    refused = EXTENSION.simd_refused(simd)
    return (
        "the operating system does not save its registers" if refused else "this processor lacks it"
    )


def pool(threads: int, pinned: bool) -> Pool:
    """Create a pool of threads, including the caller, that share the work of kernels."""
    assert EXTENSION is not None
    shared: Pool = EXTENSION.Pool(threads, pinned)
    return shared


def default_threads() -> int:
    """Return MLVM_THREADS, the threads of the default VM, or 1.

    Raises `MachineError` if it is not a valid number of threads.
    """
    setting = os.environ.get("MLVM_THREADS") or "1"
    if setting not in map(str, range(1, MOST_THREADS + 1)):
        raise MachineError(
            f"MLVM_THREADS: expected a number from 1 to {MOST_THREADS}, got {brief(setting)}"
        )
    return int(setting)


def why_not() -> str:
    """Explain why a VM has no native kernels."""
    if EXTENSION is None:
        return f"the native machine is not available: {REASON}"
    return "native=False" + " or MLVM_NATIVE=0" * (os.environ.get("MLVM_NATIVE") == "0")


def status() -> str:
    """Describe the kernels that VMs use by default, and the reason."""
    if EXTENSION is None:
        return f"numpy (the native machine is not available: {REASON}; {_REMEDY})"
    if not is_native(None):
        return f"numpy (MLVM_NATIVE=0; otherwise native, {REASON})"
    return f"native, {REASON}"


_FAILURE: Final = _compile(os.environ.get("MLVM_SIMD", ""))
EXTENSION, REASON = _load()
if EXTENSION is not None:
    digest.accumulate = EXTENSION.accumulate
