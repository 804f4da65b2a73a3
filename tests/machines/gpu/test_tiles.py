"""The tiles of products: what is kept of them, and that they change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlvm.__main__ import main
from mlvm.core.errors import MachineError
from mlvm.core.types import DType, f16, f32, f64
from mlvm.machines.gpu import tiles, tune
from mlvm.machines.gpu.devices import devices
from mlvm.machines.gpu.kernels import Facts
from mlvm.machines.gpu.tiles import Tile
from mlvm.machines.gpu.vm import GpuVM
from mlvm.machines.local import LocalVM
from tests.brief import Capsys, Patch, cases, refuses
from tests.machines.gpu.against import launched
from tests.machines.gpu.larger import LARGER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    monkeypatch.setattr(tiles, "path", lambda: tmp_path / "mlvm" / "tiles.json")
    tiles.table.cache_clear()
    yield tmp_path / "mlvm" / "tiles.json"
    tiles.table.cache_clear()


def test_a_tile_changes_no_bit(device: str) -> None:
    case = next(case for name, case in LARGER if name == "matmul")
    vm = GpuVM(device=device)
    before = launched(vm, "matmul", case)
    tiles.keep(vm.memory.driver.facts, f32, Tile(16, 16, 8, 4, 4, 4))
    other = GpuVM(device=device)
    assert launched(other, "matmul", case).tobytes() == before.tobytes()


@cases("is_cpu", True, False)
@cases("dtype", f16, f32, f64)
def test_tiles_fit_in_the_least_local_memory(is_cpu: bool, dtype: DType) -> None:
    """With room for the places of a convolution: 32 KiB, which OpenCL asks of a device."""
    device = Facts("a device", True, is_cpu, 1, 32 << 10, 1024)
    for tile in tiles.candidates(device, dtype):
        nbytes = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
        assert nbytes + 24 * (tile.depth + tile.rows) <= 32 << 10


def test_the_fastest_is_kept(device: str, cache: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    original = tiles.candidates
    monkeypatch.setattr(tiles, "candidates", lambda *of: original(*of)[:1])
    monkeypatch.setattr(tune, "_TIMES", 1)
    assert main(["tune", device]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = GpuVM(device=device).memory.driver.facts
    assert tiles.table()[facts.name]["f32"] == list(original(facts, f32)[0])
    assert lines[0].startswith("f32 ")
    assert lines[-1].endswith(str(cache))


def test_a_processor_is_a_device_without_tiles_to_find(capsys: Capsys) -> None:
    first = devices()[0]
    assert (first.name, first.nbytes > 0, bool(first.model)) == ("cpu", True, True)
    assert LocalVM("mine", device=first.name).on_host
    assert main(["tune", "cpu"]) == 1
    assert "got 'cpu', whose tiles are fixed" in capsys.readouterr().err
    names = {"opencl:0": "opencl:0", "cuda:1": "cuda:1", "gpu": "opencl:0", "cuda": "cuda:0"}
    for name, suggestion in names.items():
        refuses(
            MachineError,
            rf'expected a name of a VM, got the device .*: write VM\(device="{suggestion}"\)',
            LocalVM,
            name,
        )


@cases("text", "", "[]", '{"a": {"f32": [1, 2]}}', '{"a": {"f32": [4, 4, 4, 3, 4, 1]}}', '{"a": 3}')
def test_a_file_that_is_none_is_passed_over(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert tiles.table() == {}
