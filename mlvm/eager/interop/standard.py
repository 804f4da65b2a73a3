"""Namespace of the Python Array API standard: version and capabilities.

`x.__array_namespace__()` returns the namespace of a tensor, `mlvm.eager`. A device is a VM.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

from mlvm.core.errors import ArgumentError, brief
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import MAX_NDIM, DType, i64
from mlvm.eager.functions.creation import placed, reused
from mlvm.eager.tensor.context import current_arena, default_vm
from mlvm.eager.tensor.default import default_of
from mlvm.eager.tensor.dtypes import isdtype
from mlvm.eager.tensor.tensor import Tensor

VERSION: Final = "2025.12"
_VERSIONS: Final = ("2021.12", "2022.12", "2023.12", "2024.12", VERSION)


class Info:
    """Result of `__array_namespace_info__()`: devices, dtypes, and capabilities.

    Each `device` is a VM; any other value raises `ArgumentError`. All VMs support the same dtypes.
    """

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities: boolean masks, data-dependent shapes, at most 64 dimensions."""
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": MAX_NDIM,
        }

    def default_device(self) -> VMProtocol:
        """Return the VM of new results."""
        vm: VMProtocol = current_arena().vm.stands_for
        return vm

    def devices(self) -> list[VMProtocol]:
        """Return the VMs of the current arena, and the default VM."""
        here, default = self.default_device(), default_vm()
        return [here] if here is default else [here, default]

    def default_dtypes(self, *, device: VMProtocol | None = None) -> dict[str, DType]:
        """Return the default dtypes by kind."""
        with placed(device):
            return {
                "real floating": default_of(float),
                "complex floating": default_of(complex),
                "integral": i64,
                "indexing": i64,
            }

    def dtypes(
        self, *, device: VMProtocol | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """Return the standard's dtypes by name; with `kind` only those of one or several kinds.

        For the kinds see `isdtype`. Raises `ArgumentError` if the kind is unknown."""
        with placed(device):
            every = [dtype for dtype in DType.all.values() if not dtype.is_half]
            names = {dtype.numpy.name: dtype for dtype in every}
        if kind is None:
            return names
        return {name: dtype for name, dtype in names.items() if isdtype(dtype, kind)}


def array_namespace(x: Tensor, /, *, api_version: str | None = None) -> ModuleType:
    """Return the module with the functions for x.

    Raises `ArgumentError` if it does not implement that version of the standard."""
    if api_version is not None and api_version not in _VERSIONS:
        raise ArgumentError(
            f"expected api_version as one of {', '.join(_VERSIONS)}, got {brief(api_version)}"
        ).at("__array_namespace__", (x.type,))
    return sys.modules["mlvm.eager"]


def to_device(x: Tensor, device: VMProtocol, /, *, stream: None = None) -> Tensor:
    """Move x to a VM; if it is there already, return a tensor over the same bytes.

    Otherwise x is copied through this machine to that VM's current arena; no gradient flows through
    the copy.

    Raises `ArgumentError` if the device is not a VM, or a stream is given: VMs have none;
    `GradientError` if a gradient would flow through a copy.

    Invalid calls:
        v.to_device("cpu")  # ArgumentError
        ml.grad(lambda x: ml.sum(x.to_device(vm)))(v)  # GradientError
    """
    if stream is not None:
        raise ArgumentError(
            f"expected stream=None, because a VM has no streams, got {brief(stream)}"
        ).at("to_device", (x.type,))
    with placed(device):
        return reused(x, device)


Tensor.__array_namespace__ = array_namespace
Tensor.to_device = to_device
