"""`--wire`: run the tests on VMs behind the protocol's byte encoding.

    python -m pytest --wire tests/eager tests/arena

Every `VM(...)` and `DryVM(...)` that a test or the eager layer makes is then a `WireVM` in
front of one. tests/machines/test_wire.py runs these two folders so.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from mlvm.core import vm
from mlvm.core.vm import VM
from mlvm.machines import dry
from mlvm.machines.dry import DryVM
from mlvm.machines.wire import WireVM


class WiredVM(WireVM):
    """A `WireVM` made like the VM behind it. A test may look at its tensors in place,
    register functions, lend it memory and end its workers, which no call of the protocol does."""

    behind: type[VM] = VM

    def __init__(self, *args: Any, **options: Any) -> None:
        local = self.behind(*args, **options)
        super().__init__(local)
        self.borrow = local.borrow
        self.register = local.register
        self.register_library = local.register_library
        self.storage_over = local.storage_over
        self.make_writable = local.make_writable
        self.quiesce = local.quiesce
        self.synchronize = local.synchronize
        self.close = local.close


class WiredDryVM(WiredVM):
    """The same in front of a `DryVM`."""

    behind = DryVM


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wire", action="store_true", help="run on VMs behind the protocol's byte encoding"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give examples all the time they take; with `--wire` replace the classes, before a test or
    the eager layer imports them."""
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if config.getoption("--wire"):
        vm.VM = WiredVM  # type: ignore[assignment,misc]
        dry.DryVM = WiredDryVM  # type: ignore[assignment,misc]
