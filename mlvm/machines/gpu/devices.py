"""Devices by name, and the drivers of the available devices."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.core.errors import MachineError, MissingExtraError
from mlvm.core.sizes import physical_memory
from mlvm.machines.gpu import cuda, opencl
from mlvm.machines.gpu.memory import Driver

_NAME: Final = re.compile(r"(opencl|cuda):\d{1,4}(:\d{1,4})?")


class Device(NamedTuple):
    """Device: name for `ml.VM(device=)`, model name, and memory in bytes."""

    name: str
    model: str
    nbytes: int


_KINDS: Final[
    dict[str, tuple[Callable[[], list[tuple[str, str, int]]], Callable[[str], Driver]]]
] = {"opencl": (opencl.listed, opencl.OpenCL), "cuda": (cuda.listed, cuda.Cuda)}


def devices() -> list[Device]:
    """Return the devices of this machine: "cpu", OpenCL devices and CUDA devices.

    Devices of libraries that are not installed are omitted.

    >>> ml.devices()[0].name
    'cpu'
    """
    listing = [_processor()]
    for listed, _ in _KINDS.values():
        try:
            listing += [Device(*each) for each in listed()]
        except (MissingExtraError, MachineError):
            continue
    return listing


def _processor() -> Device:
    """Return the processor as a device, with the memory of this machine."""
    names = re.findall(r"^model name\s*:\s*(.+)", _text("/proc/cpuinfo"), re.MULTILINE)
    model = [*names, platform.processor(), platform.machine()]
    return Device("cpu", next(filter(None, model), ""), physical_memory())


def _text(file: str) -> str:
    with suppress(OSError):
        return Path(file).read_text()
    return ""


def why_not(kind: str) -> str:
    """Return the reason why no device of this kind is available; "" if one is available."""
    try:
        return "" if _KINDS[kind][0]() else f"{kind} finds no device"
    except (MissingExtraError, MachineError) as error:
        return str(error)


def driver_of(device: Any) -> Driver:
    """Return the driver of a device by name.

    Raises `MissingExtraError` if the package is missing, and `MachineError` if the device does not
    exist.
    """
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    names = ", ".join([each.name for each in devices()])
    if match is None:
        hint = 'write "opencl:0" for the first device of OpenCL, "cuda:0" for CUDA'
        raise MachineError(f"VM: unknown device {device!r}; available are {names}; {hint}")
    listed, driver = _KINDS[match[1]]
    if device not in [name for name, _, _ in listed()]:
        raise MachineError(f"VM: unknown device {device!r}; available are {names}")
    return driver(device)
