"""What the Python Array API standard asks of a namespace as a whole: its version, and what it can.

A tensor names its namespace, `mlvm.eager`, in `x.__array_namespace__()`. A device is a VM.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

from mlvm.core.errors import AttributeRefused, brief
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import MAX_NDIM, DType, f32, i64
from mlvm.eager.functions.creation import placed, reused
from mlvm.eager.tensor.context import current_arena, default_vm
from mlvm.eager.tensor.dtypes import isdtype
from mlvm.eager.tensor.tensor import Tensor

VERSION: Final = "2025.12"
_VERSIONS: Final = ("2021.12", "2022.12", "2023.12", "2024.12", VERSION)


class Info:
    """What `__array_namespace_info__()` gives: devices, dtypes, and what depends on values.

    Each `device` is a VM, which a function of another raises `AttributeRefused` for. All VMs have
    the same dtypes.
    """

    def capabilities(self) -> dict[str, Any]:
        """Masks and shapes that depend on values work; a tensor has at most 64 dimensions."""
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": MAX_NDIM,
        }

    def default_device(self) -> VMProtocol:
        """The VM on which results are made now."""
        vm: VMProtocol = current_arena().vm.stands_for
        return vm

    def devices(self) -> tuple[VMProtocol, ...]:
        """The VMs that are at hand: the one of the arena around the call, and the default VM."""
        here, default = self.default_device(), default_vm()
        return (here,) if here is default else (here, default)

    def default_dtypes(self, *, device: VMProtocol | None = None) -> dict[str, DType]:
        """The dtypes that functions choose where none is named, by what they are for."""
        with placed(device):
            found = {"real floating": f32, "integral": i64, "indexing": i64}
        complex_ = DType.all.get("c64")
        return found if complex_ is None else {**found, "complex floating": complex_}

    def dtypes(
        self, *, device: VMProtocol | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """The standard's dtypes, by its names; those of a `kind` (see `isdtype`), or of one of
        several kinds. Raises `AttributeRefused` for another kind."""
        with placed(device):
            every = [dtype for dtype in DType.all.values() if not dtype.is_half]
            names = {dtype.numpy.name: dtype for dtype in every}
        if kind is None:
            return names
        return {name: dtype for name, dtype in names.items() if isdtype(dtype, kind)}


def array_namespace(x: Tensor, /, *, api_version: str | None = None) -> ModuleType:
    """The module with the functions for x. Raises `AttributeRefused` for a version of the standard
    that it does not know."""
    if api_version is not None and api_version not in _VERSIONS:
        raise AttributeRefused(
            f"versions of the standard are {', '.join(_VERSIONS)}, not {brief(api_version)}"
        ).at("__array_namespace__", (x.type,))
    return sys.modules["mlvm.eager"]


def to_device(x: Tensor, device: VMProtocol, /, *, stream: None = None) -> Tensor:
    """x on a VM. If it is there already, a tensor over the same bytes; else a copy through this
    machine, in that VM's current arena, through which no gradient can flow.

    Raises `AttributeRefused` for what is no VM, and for a stream: a VM has none; `GradientError`
    for a copy inside a gradient that x is part of.
    """
    if stream is not None:
        raise AttributeRefused(f"a VM has no streams, such as {brief(stream)}").at(
            "to_device", (x.type,)
        )
    with placed(device):
        return reused(x, device)


Tensor.__array_namespace__ = array_namespace
Tensor.to_device = to_device
