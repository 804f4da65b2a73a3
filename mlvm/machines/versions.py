"""Versions of everything that determines the bits of results, which processes compare."""

from __future__ import annotations

import hashlib
import sys
from functools import cache

import numpy as np

from mlvm.core.op import OPS
from mlvm.machines.native.extension import EXTENSION, is_native


def versions() -> str:
    """Return the versions of everything that determines the bits of results.

    These are mlvm's version, the default kernels, numpy's version, and a digest of the op table.
    """
    kernels = EXTENSION.simd() if EXTENSION is not None and is_native(None) else "numpy"
    mine = f"mlvm {sys.modules['mlvm'].__version__}, {kernels} kernels"
    return f"{mine}, numpy {np.__version__}, ops {_digest_of_ops()}"


@cache
def _digest_of_ops() -> str:
    ops = sorted(
        f"{name} {op.inputs} {[(each.name, each.default) for each in op.attributes.values()]}"
        for name, op in OPS.items()
        if op.kernel.__module__.startswith("mlvm.")
    )
    return hashlib.blake2b("\n".join(ops).encode(), digest_size=4).hexdigest()


def cause_of_other_bits(recorded: str) -> str:
    """Return a text for results that differ from recorded results of these versions.

    It names only what differs, and is empty if the versions are equal or unknown."""
    theirs, mine = recorded.split(", "), versions().split(", ")
    if not recorded or theirs == mine:
        return ""
    old, new = [
        ", ".join([x for x in one if x not in other])
        for one, other in ((theirs, mine), (mine, theirs))
    ]
    return f"; it was recorded with {old}, and this process has {new} (docs/determinism.md)"


def difference(theirs: object, they: str, we: str) -> str | None:
    """Describe version differences that may change results, or return None."""
    if theirs == versions():
        return None
    shown = theirs if isinstance(theirs, str) and theirs else "unknown versions"
    return (
        f"results may differ: {they} has {shown}, but {we} has {versions()}; "
        f"install the same versions, or allow it with mixed=True"
    )
