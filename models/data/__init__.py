"""Data sets by name: `load("digits")`, `load("mnist:DIR")` and the other names in `SPECS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mlvm.machines.terminal import unknown
from models.data import cifar10, digits, folder, lines, listops, mnist, npz, text
from models.data.dataset import DataError as DataError
from models.data.dataset import DataSet as DataSet

READERS: Final[dict[str, Callable[[Path], DataSet]]] = {
    "mnist:DIR": mnist.load,
    "cifar10:DIR": cifar10.load,
    "images:DIR": folder.load,
    "npz:FILE": npz.load,
    "text:FILE": text.load,
    "masked:FILE": text.load_masked,
}
MAKERS: Final[dict[str, Callable[[int], DataSet]]] = {
    "digits": digits.load,
    "text": lambda _: text.load(),
    "masked": lambda _: text.load_masked(),
    "lines": lines.load,
    "listops": listops.load,
}
"""Data sets without a path: functions of a seed."""
SPECS = [*MAKERS, *READERS]


def parse(spec: str) -> tuple[str, Path | None]:
    """Match a text to a form of `SPECS`; return the form, and the path in the text, if any.

    Raises `DataError` if no form matches.
    """
    name, _, path = spec.partition(":")
    if spec in MAKERS:
        return spec, None
    for form in READERS:
        if path and form.partition(":")[0] == name:
            return form, Path(path)
    raise DataError(unknown("data set", spec, SPECS))


def load(spec: str, *, seed: int = 0, image_shape: tuple[int, int, int] | None = None) -> DataSet:
    """Load the data set that `spec` names.

    `seed` selects the digits and lines that are held out for the test, and generates the trees.
    Images of a folder are converted to `image_shape`, (height, width, channels); other data sets
    have a fixed shape.

    Raises `DataError` for an unknown name, and for a file that is missing or corrupt.
    """
    form, path = parse(spec)
    if path is not None and image_shape is not None and READERS[form] is folder.load:
        return folder.load(path, image_shape)
    return MAKERS[form](seed) if path is None else READERS[form](path)
