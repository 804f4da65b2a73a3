"""Memory for the tests of captured functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mlvm.eager as ml


@pytest.fixture
def weights() -> Iterator[ml.Arena]:
    arena = ml.Arena(ml.VM("weights"), "weights")
    with arena.allocating():
        yield arena


@pytest.fixture
def vm(weights: ml.Arena) -> Any:
    return weights.vm


@pytest.fixture
def batch(vm: Any) -> ml.Arena:
    return ml.Arena(vm, "batch")
