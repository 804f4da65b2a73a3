"""VMs run natively or not: what was built, what is asked for, and the messages about it."""

from __future__ import annotations

import importlib
import subprocess
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mlvm.core.errors import MachineError, MissingExtraError
from mlvm.eager.tensor.context import _make_default_vm
from mlvm.machines.local import LocalVM
from mlvm.machines.native import extension
from tests.brief import Patch, cases, output_of, refuses

needs_extension = pytest.mark.skipif(extension.EXTENSION is None, reason="it was not built")


@pytest.fixture(autouse=True)
def unset(monkeypatch: Patch) -> None:
    for name in ("MLVM_NATIVE", "MLVM_SIMD", "MLVM_THREADS", "MLVM_MACHINE_CODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def not_built(monkeypatch: Patch) -> None:
    monkeypatch.setattr(extension, "EXTENSION", None)
    monkeypatch.setattr(extension, "REASON", "it was not built")


@needs_extension
@cases("setting, option, native",
    ("", None, True), ("0", None, False), ("1", None, True), ("0", True, True),
    ("1", False, False),
)  # fmt: skip
def test_the_option_comes_before_the_environment_and_that_before_what_was_built(
    setting: str, option: bool | None, native: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("MLVM_NATIVE", setting)
    assert LocalVM(native=option).native is native


@needs_extension
def test_the_status_says_what_is_in_use_and_why(monkeypatch: Patch) -> None:
    assert extension.status() == f"native, {extension.REASON}"
    monkeypatch.setenv("MLVM_NATIVE", "0")
    assert extension.status() == f"numpy (MLVM_NATIVE=0; otherwise native, {extension.REASON})"


@needs_extension
def test_the_sets_are_those_that_can_be_chosen(monkeypatch: Patch) -> None:
    sets = extension.simd_sets()
    assert sets["plain"]
    for name, here in sets.items():
        monkeypatch.setenv("MLVM_SIMD", name)
        if here:
            assert extension.is_native(None)
        else:
            refuses(
                MachineError, f"MLVM_SIMD={name}: .*; available are ", extension.is_native, None
            )
            assert not extension.is_native(False)


@needs_extension
def test_the_first_set_that_the_processor_has_is_in_use_and_never_an_emulated_one() -> None:
    """`avx512_bf16` was left unused on Zen 4."""
    sets = extension.simd_sets()
    code = "from mlvm.machines.native import _native; print(_native.simd())"
    simd = output_of("-c", code).strip()
    assert simd == next(name for name, here in sets.items() if here)
    assert simd != "amx_emulated"


@needs_extension
def test_an_unknown_set_is_refused_and_not_compiled(monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(subprocess, "run", refuse)
    for simd in ("", "avx3", "all", "x" * 5000):
        assert extension._compile(simd) == ""
    monkeypatch.setenv("MLVM_SIMD", "avx3")
    text = "^MLVM_SIMD=avx3: this build lacks the set; available are .*plain"
    refuses(MachineError, text, extension.is_native, None)


def test_without_the_extension_numpy_runs(not_built: None) -> None:
    vm = LocalVM()
    assert not vm.native
    assert extension.simd_sets() == {}
    assert extension.status().startswith(
        "numpy (the native machine is not available: it was not built;"
    )


def test_without_the_extension_what_needs_it_is_refused(
    not_built: None, monkeypatch: Patch
) -> None:
    message = (
        "^functions in C need the native machine, which is not installed: it was not built; "
        "installing mlvm compiles it"
    )
    refuses(MissingExtraError, message, LocalVM().register_library, "any.so")
    refuses(
        MissingExtraError, "it was not built; installing mlvm compiles it", LocalVM, native=True
    )
    refuses(MachineError, "threads=2 needs native kernels", LocalVM, threads=2)
    monkeypatch.setenv("MLVM_THREADS", "2")
    refuses(MachineError, "threads=2 needs native", _make_default_vm)
    monkeypatch.setenv("MLVM_NATIVE", "1")
    refuses(MissingExtraError, "", LocalVM)


@needs_extension
def test_the_default_vm_has_the_threads_that_the_environment_says(monkeypatch: Patch) -> None:
    """It had one, whatever was set."""
    for setting, threads in (("", 1), ("1", 1), ("3", 3)):
        monkeypatch.setenv("MLVM_THREADS", setting)
        vm: Any = _make_default_vm()
        assert vm.threads == threads
    code = "import mlvm.eager as ml; print(ml.ones(2).device.threads, ml.VM().threads)"
    assert output_of("-c", code, MLVM_THREADS="3") == "3 1\n"


@cases("setting", "0", "257", "-1", "1.5", "two", " 2", "9" * 5000)
def test_what_is_no_number_of_threads_is_refused(setting: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MLVM_THREADS", setting)
    text = "MLVM_THREADS: expected a number from 1 to 256, got '"
    error = refuses(MachineError, text, _make_default_vm)
    assert len(str(error)) < 200


def test_a_setting_that_says_nothing_known_is_refused(monkeypatch: Patch) -> None:
    for name in ("MLVM_MACHINE_CODE", "MLVM_NATIVE"):
        monkeypatch.setenv(name, "yes")
        refuses(MachineError, f"{name}: expected 0 or 1, got 'yes'", LocalVM)
        monkeypatch.delenv(name)


def test_a_set_that_the_processor_lacks_is_not_compiled(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : sse2 avx2")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("compiles"))
    for simd in ("amx", "avx512"):
        assert not extension._has(simd)
        assert extension._compile(simd) == ""
    assert extension._has("avx2")
    assert extension._has("plain")


@cases(
    "error, reason",
    (ModuleNotFoundError("no module"), "it was not built"),
    (ImportError("undefined symbol"), "it cannot be loaded: undefined symbol"),
)
def test_why_there_is_none(error: ImportError, reason: str, monkeypatch: Patch) -> None:
    def fail(name: str) -> NoReturn:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert extension._load() == (None, reason)


@pytest.mark.skipif(
    not Path(extension.__file__).with_name("src").joinpath("module.c").exists(),
    reason="only a checkout has all C sources",
)
def test_an_extension_of_other_sources_is_named(monkeypatch: Patch) -> None:
    older = types.SimpleNamespace(sources="sources 0", install=lambda: None)
    reason = "the extension was built from different C sources"
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", lambda name: older)
        with pytest.warns(RuntimeWarning, match=f"^mlvm runs numpy kernels: {reason}.*make native"):
            assert extension._load() == (None, reason)
    monkeypatch.setattr(extension, "EXTENSION", older)
    refuses(ImportError, f"^{reason} .*unexpected keyword.*make native", extension.install, x=1)
