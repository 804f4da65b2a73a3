"""One example of an op: what goes in, and what must come out by an independent computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlvm.core.types import Array


@dataclass(frozen=True)
class Case:
    """`expected(*inputs, **attributes)` is plain numpy and knows nothing of the kernel."""

    inputs: tuple[Array, ...]
    expected: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)
