"""Tiles of a device's matrix products.

There is a table by dtype. `python -m mlvm tune` finds faster tiles, and stores them in the user's
cache.

Tiles decide how fast a product is, and no bit of it: an element adds up its terms in one order.
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

    It has the rows, columns and depth of a group's step, the rows (`high`) and columns (`wide`) of
    a work item, and the lanes of a vector.
    """

    rows: int
    columns: int
    depth: int
    high: int
    wide: int
    lanes: int

    def defines(self) -> dict[str, int]:
        """The tile's sizes, as the text of a kernel names them."""
        return {name.upper(): size for name, size in self._asdict().items()}

    @property
    def items(self) -> int:
        return (self.rows // self.high) * (self.columns // self.wide)


_SMALL: Final = Tile(32, 32, 16, 2, 2, 1)
_LARGE: Final = Tile(64, 64, 16, 4, 4, 1)
_ON_CPU: Final = (8, 2, 64), (4, 2, 64), (12, 2, 64), (4, 4, 64), (8, 1, 64), (6, 2, 32), (4, 2, 16)
"""Rows of a processor's work item, number of adjacent vectors, and bytes of a vector."""
_POSITIONS: Final = 4 << 10  # additional bytes for positions in images; an upper bound
_ENOUGH: Final = 512 * 512  # elements of a result that keep a GPU busy in large tiles

Table = dict[str, dict[str, list[int]]]


def candidates(device: Facts, dtype: DType) -> list[Tile]:
    """The tiles that may suit the device, the usual one first."""
    if device.is_cpu and dtype.is_float:
        tiles = []
        for high, parts, nbytes in _ON_CPU:
            lanes = nbytes // dtype.itemsize
            tiles.append(Tile(8 * high, 64, 64, high, parts * lanes, lanes))
        fitting = [x for x in tiles if _fits(device, x, dtype)]
        return fitting or [tiles[0]._replace(depth=16)]  # OpenCL's least is 32 KiB
    cuts = [(64, 64, 16, 4, 4), (64, 64, 8, 4, 4), (128, 64, 16, 8, 4), (128, 128, 8, 8, 8)]
    tiles = [Tile(*cut, 1) for cut in cuts]
    return [x for x in tiles if x.items <= device.most_items and _fits(device, x, dtype)]


def _fits(device: Facts, tile: Tile, dtype: DType) -> bool:
    nbytes = (tile.rows + tile.columns) * tile.depth * dtype.itemsize
    return nbytes + _POSITIONS <= device.local_bytes


def tile(device: Facts, dtype: DType, m: int, n: int, batch: int) -> Tile:
    """The tile for products of that size: of few rows or columns, or few elements, a small one."""
    tuned = table().get(device.name, {}).get(dtype.name)
    large = Tile(*tuned) if tuned else candidates(device, dtype)[0]
    if device.is_cpu and dtype.is_float:
        return large
    return _SMALL if min(m, n) <= 32 or m * n * batch < _ENOUGH else large


def path() -> Path:
    """The file of tiles: `mlvm/tiles.json` in $XDG_CACHE_HOME, or in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home, "mlvm", "tiles.json")


@cache
def table() -> Table:
    """The tiles that were found, by device and dtype. A file that is none is passed over."""
    try:
        loaded: Any = json.loads(path().read_text(encoding="utf-8"))
        for tiles in loaded.values():
            for numbers in tiles.values():
                _require(Tile(*numbers))
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return {}
    return dict(loaded)


def _require(tile: Tile) -> None:
    """Raise `ValueError` for a tile that is none."""
    if not all(isinstance(each, int) and each > 0 for each in tile):
        raise ValueError(tile)
    if tile.rows % tile.high or tile.columns % tile.wide or tile.wide % tile.lanes:
        raise ValueError(tile)


def keep(device: Facts, dtype: DType, best: Tile) -> None:
    """Write the tile to the file. Products that are planned from now on use it."""
    changed = {name: dict(tiles) for name, tiles in table().items()}
    changed.setdefault(device.name, {})[dtype.name] = list(best)
    path().parent.mkdir(parents=True, exist_ok=True)
    write_file(path(), json.dumps(changed, indent=1) + "\n")
    table.cache_clear()
