"""The namespace as the Array API standard sees it, and devices."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, CopyRefused, GradientError
from tests.brief import refuses


def test_a_tensor_names_its_namespace() -> None:
    x = ml.ones(2)
    assert x.__array_namespace__() is sys.modules["mlvm.eager"]
    assert x.__array_namespace__(api_version="2023.12") is ml
    assert ml.__array_api_version__ == "2025.12"
    refuses(ArgumentError, r"not '2019\.12'", x.__array_namespace__, api_version="2019.12")


def test_info() -> None:
    info = ml.__array_namespace_info__()
    vm = ml.VM("other")
    with ml.Arena(vm, "here"):
        assert info.default_device() is vm
        assert info.devices() == (vm, ml.default_vm())
    assert info.devices() == (ml.default_vm(),)
    assert info.dtypes()["bool"] is ml.bool
    assert set(info.dtypes(kind="real floating", device=vm)) == {"float32", "float64"}
    assert set(info.dtypes(kind=("bool", "signed integer"))) == {
        *("bool", "int8", "int16", "int32", "int64")
    }
    assert info.default_dtypes()["indexing"] is ml.int64
    assert info.capabilities()["boolean indexing"]
    with pytest.raises(ArgumentError, match="expected a VM as device"):
        info.dtypes(device=0)  # type: ignore[arg-type]


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


def test_what_is_like_a_tensor_lies_beside_it() -> None:
    vm = ml.VM("other")
    x = ml.ones(3, device=vm)
    for y in (ml.zeros_like(x), ml.ones_like(x), ml.empty_like(x), ml.full_like(x, 1)):
        assert y.device is vm
    assert ml.asarray(x).device is vm


def test_to_device_keeps_the_bytes_where_they_are() -> None:
    x = ml.ones(3)
    y = x.to_device(x.device)
    assert y is not x
    assert y.handle == x.handle
    refuses(ArgumentError, "no streams", x.to_device, x.device, stream=1)
    refuses(CopyRefused, "copy=False", ml.asarray, x, device=ml.VM("other"), copy=False)


def test_no_gradient_flows_from_vm_to_vm() -> None:
    vm = ml.VM("other")

    def loss(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(x.to_device(vm))

    refuses(GradientError, "no gradient flows", ml.grad(loss), ml.ones(3))
    here = ml.grad(lambda x: ml.sum(x.to_device(x.device) * 2.0))(ml.ones(3))
    assert here.tolist() == [2, 2, 2]
