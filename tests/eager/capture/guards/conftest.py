"""Tests of guards leave modules and builtins as they were."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def names_stay() -> Iterator[None]:
    """Else whoever asks all modules for their `__file__`, as hypothesis does, gets their errors."""
    modules, names = sys.modules.copy(), vars(builtins).copy()
    yield
    vars(builtins).update(names)
    for name in vars(builtins).keys() - names.keys():
        delattr(builtins, name)
    for name in sys.modules.keys() - modules.keys():
        if name.startswith("signature_"):
            del sys.modules[name]
