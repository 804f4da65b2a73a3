"""The namespace as the Array API standard sees it, and devices."""

from __future__ import annotations

from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError
from tests.brief import refuses
from tests.rows import table


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


MADE: dict[str, Any] = table(globals(), "MADE")


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
