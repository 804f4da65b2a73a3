"""Tiles of a device's matrix products.

A table contains a tile per dtype. `python -m mlvm tune` finds faster tiles and stores them in the
user's cache.

Tiles affect only the speed of a product, not the bits: the order of each sum is fixed.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.core.types import DType
from mlvm.machines.files import write_file
from mlvm.machines.gpu.kernels import Facts


class Tile(NamedTuple):
    """Tile of a matrix product.

    It consists of the rows, columns and depth of a group's step, the rows (`high`) and columns
    (`wide`) of a work item, and the lanes of a vector.
    """

    rows: int
    columns: int
    depth: int
    high: int
    wide: int
    lanes: int

    def defines(self) -> dict[str, int]:
        """Return the sizes of the tile by macro name."""
        return {name.upper(): size for name, size in self._asdict().items()}

    @property
    def items(self) -> int:
        return (self.rows // self.high) * (self.columns // self.wide)


_SMALL: Final = Tile(32, 32, 16, 2, 2, 1)
_ON_CPU: Final = (8, 2, 64), (4, 2, 64), (12, 2, 64), (4, 4, 64), (8, 1, 64), (6, 2, 32), (4, 2, 16)
"""On a processor: rows of a work item, number of adjacent vectors, and bytes of a vector."""
_POSITIONS: Final = 4 << 10  # additional bytes for positions in images; an upper bound

Table = dict[str, dict[str, list[int]]]


def candidates(device: Facts, dtype: DType) -> list[Tile]:
    """Return candidate tiles for the device, the default tile first."""
    if device.is_cpu and dtype.is_float:
        tiles = []
        for high, parts, nbytes in _ON_CPU:
            lanes = nbytes // dtype.itemsize
            tiles.append(Tile(8 * high, 64, 64, high, parts * lanes, lanes))
        fitting = [x for x in tiles if _fits(device, x, dtype)]
        return fitting or [tiles[0]._replace(depth=16)]  # OpenCL guarantees 32 KiB
    cuts = [(64, 64, 16, 4, 4), (64, 64, 8, 4, 4), (128, 64, 16, 8, 4), (128, 128, 8, 8, 8)]
    tiles = [Tile(*cut, 1) for cut in cuts]
    return [x for x in tiles if x.items <= device.most_items and _fits(device, x, dtype)]


def _fits(device: Facts, tile: Tile, dtype: DType) -> bool:
    nbytes = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
    return nbytes + _POSITIONS <= device.local_bytes


def tile(device: Facts, dtype: DType, m: int, n: int, batch: int) -> Tile:
    """Return the tile for a product: a small tile for few rows, columns or elements."""
    tuned = table().get(device.name, {}).get(dtype.name)
    large = Tile(*tuned) if tuned else candidates(device, dtype)[0]
    if device.is_cpu and dtype.is_float:
        return large
    # elements of a result that keep a GPU busy in large tiles
    return _SMALL if min(m, n) <= 32 or m * n * batch < (512 * 512) else large


def path() -> Path:
    """Return the path of the tile file: `mlvm/tiles.json` in $XDG_CACHE_HOME, or in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home, "mlvm", "tiles.json")


@cache
def table() -> Table:
    """Return the tuned tiles by device and dtype. An invalid file is ignored."""
    try:
        loaded: Any = json.loads(path().read_text(encoding="utf-8"))
        for tiles in loaded.values():
            for numbers in tiles.values():
                _require(Tile(*numbers))
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return {}
    return dict(loaded)


def _require(tile: Tile) -> None:
    """Raise `ValueError` for an invalid tile."""
    if not all(isinstance(each, int) and each > 0 for each in tile):
        raise ValueError(tile)
    if tile.rows % tile.high or tile.columns % tile.wide or tile.wide % tile.lanes:
        raise ValueError(tile)


def keep(device: Facts, dtype: DType, best: Tile) -> None:
    """Write the tile to the file. Products that are planned later use it."""
    changed = {name: dict(tiles) for name, tiles in table().items()}
    changed.setdefault(device.name, {})[dtype.name] = list(best)
    path().parent.mkdir(parents=True, exist_ok=True)
    write_file(path(), json.dumps(changed, indent=1) + "\n")
    table.cache_clear()
