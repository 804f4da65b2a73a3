"""A device for these tests: the one that MLVM_DEVICE names, such as cuda:0, or the first of OpenCL
on which a kernel compiles.

Drivers compile without optimization here, which is most of the time of a test on PoCL;
`python -m tests.machines.gpu.against` has all cases with it.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.machines.gpu.devices import devices, why_not
from mlvm.machines.gpu.vm import GpuVM


@cache
def _find_device() -> tuple[str, str]:
    """The device's name, or why there is none."""
    os.environ.setdefault("PYOPENCL_BUILD_OPTIONS", "-cl-opt-disable")
    if "MLVM_DEVICE" in os.environ:
        return os.environ["MLVM_DEVICE"], ""
    why = why_not("opencl")
    for name in [each.name for each in devices() if each.name.startswith("opencl")]:
        try:
            with ml.use(ml.VM(device=name)):
                assert np.all((ml.ones(2) + 1.0).numpy() == 2)
        except MlvmError as error:  # PoCL's wheel does not know each processor
            why = str(error)
        else:
            return name, ""
    return "", why


@pytest.fixture(scope="session")
def device() -> str:
    name, why = _find_device()
    if not name:
        pytest.skip(f"no OpenCL device: {why:.200}")
    return name


@pytest.fixture
def vm(device: str) -> GpuVM:
    machine = ml.VM("gpu0", device=device)
    assert isinstance(machine, GpuVM)
    return machine
