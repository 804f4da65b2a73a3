"""Optional packages: the module itself, or an error that names what to install."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlvm.core.errors import MissingExtraError
from mlvm.core.extras import extra
from tests.brief import Patch, refuses


def test_an_installed_module_is_returned() -> None:
    assert extra("json", "any") is json


def test_a_missing_package_names_the_command() -> None:
    refuses(
        MissingExtraError, r'pip install "mlvm\[images\]"', extra, "mlvm_no_such_package", "images"
    )


def test_a_package_that_is_not_whole_says_what_it_misses(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "mlvm_needy.py").write_text("import mlvm_no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    text = "mlvm_needy is installed, but cannot be imported: No module named 'mlvm_no_such_package'"
    refuses(MissingExtraError, text, extra, "mlvm_needy", "images")
    assert "mlvm_needy" not in sys.modules
