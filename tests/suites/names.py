"""What plugins share: a module that stands for another library's, and f64 in tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager.interop.exchange import OURS


class Names(ModuleType):
    """A module with the names of some modules, of which numpy gives classes and constants alone. A
    test that calls a name that none has is skipped."""

    def __init__(self, name: str, *spaces: Any, **own: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.spaces = spaces
        vars(self).update(own)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        for space in self.spaces:
            value = getattr(space, name, None) or getattr(space, OURS.get(name, name), None)
            if value is not None and not (
                space is np and callable(value) and type(value) is not type
            ):
                return value
        return lambda *_, **__: pytest.skip(f"mlvm has no {name}", allow_module_level=True)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Compute in f64 where a test names no dtype, as with NumPy; SciPy has PyTorch do so, too."""
    with ml.default_dtype(ml.float64):
        yield
