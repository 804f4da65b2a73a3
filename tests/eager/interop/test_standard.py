"""The namespace as the Array API standard sees it, and devices."""

from __future__ import annotations

from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError
from tests.brief import refuses


def test_info() -> None:
    info = ml.__array_namespace_info__()
    vm = ml.VM("other")
    with ml.Arena(vm, "here"):
        assert info.default_device() is vm
        assert info.devices() == [vm, ml.default_vm()]
    assert info.devices() == [ml.default_vm()]
    assert info.dtypes()["bool"] is ml.bool
    assert set(info.dtypes(kind="real floating", device=vm)) == {"float32", "float64"}
    assert set(info.dtypes(kind=("bool", "signed integer"))) == {
        *("bool", "int8", "int16", "int32", "int64")
    }
    assert info.default_dtypes()["indexing"] is ml.int64
    assert info.capabilities()["boolean indexing"]
    refuses(ArgumentError, "expected a VM as device", info.dtypes, device=0)  # type: ignore[arg-type]


MADE: dict[str, Any] = {
    "zeros": lambda device: ml.zeros(3, device=device),
    "ones": lambda device: ml.ones((3,), device=device),
    "empty": lambda device: ml.empty(3, device=device),
    "full": lambda device: ml.full(3, 2, device=device),
    "zeros_like": lambda device: ml.zeros_like(ml.ones(3), device=device),
    "full_like": lambda device: ml.full_like(ml.ones(3), 1, device=device),
    "arange": lambda device: ml.arange(3, device=device),
    "linspace": lambda device: ml.linspace(0, 1, 3, device=device),
    "eye": lambda device: ml.reshape(ml.eye(1, 3, device=device), 3),
    "asarray": lambda device: ml.asarray([1, 2, 3], device=device),
    "tensor": lambda device: ml.asarray(ml.ones(3), device=device),
    "to_device": lambda device: ml.ones(3).to_device(device),
}


@pytest.mark.parametrize("name", MADE)
def test_a_device_is_a_vm(name: str) -> None:
    vm = ml.VM("other")
    x = MADE[name](vm)
    assert x.device is vm
    assert x.arena is MADE[name](vm).arena
    assert x.shape == (3,)
    if "like" not in name:
        with ml.Arena(vm, "mine") as arena:
            assert MADE[name](vm).arena is arena
    refuses(ArgumentError, "expected a VM as device", MADE[name], "cuda:0")
