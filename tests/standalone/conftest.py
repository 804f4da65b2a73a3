"""A builder of programs: all kernels are compiled once in a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that builds a step in a folder and returns its program."""
    from tests.standalone.making import SET, Kernels

    return Kernels(tmp_path_factory.mktemp("kernels"), SET, "-O0").build
