"""Tests of guards leave modules and builtins as they were, and compare each program with another
trace: a read that no guard sees raises `StaleProgramError`."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from functools import partial

import pytest

import mlvm.eager as ml
from tests.brief import Patch


@pytest.fixture(autouse=True)
def programs_are_compared(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    if "freezes" not in request.keywords:
        monkeypatch.setattr(ml, "capture", partial(ml.capture, check=1))


@pytest.fixture(autouse=True)
def names_stay() -> Iterator[None]:
    """Else whoever asks all modules for their `__file__`, as hypothesis does, gets their errors."""
    modules, names = sys.modules.copy(), vars(builtins).copy()
    yield
    vars(builtins).update(names)
    for name in vars(builtins).keys() - names.keys():
        delattr(builtins, name)
    for name in sys.modules.keys() - modules.keys():
        if name.startswith("signature_") or name == "this":
            del sys.modules[name]
