"""A builder of programs: all kernels are compiled once in a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def native_set() -> Iterator[None]:
    """Have Python's native kernels be of the set that programs are built for."""
    native = pytest.importorskip("mlvm.machines.native._native")
    from tests.build.making import SET

    used = native.simd()
    native.choose_simd(SET)
    yield
    native.choose_simd(used)


@pytest.fixture(scope="session")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that builds a step in a folder and returns its program."""
    from tests.build.making import SET, Kernels

    return Kernels(tmp_path_factory.mktemp("kernels"), SET, "-O0").build
