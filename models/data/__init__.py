"""Image data sets: `load("digits")`, `load("mnist:DIR")`, `load("cifar10:DIR")`."""

from __future__ import annotations

from pathlib import Path

from models.data import cifar10, digits, mnist
from models.data.dataset import DataError as DataError
from models.data.dataset import Dataset as Dataset

FOLDERS = {"mnist": mnist.load, "cifar10": cifar10.load}
SPECS = ["digits", *(f"{name}:DIR" for name in FOLDERS)]


def parse(spec: str) -> tuple[str, Path | None]:
    """The name of a data set, and the folder it is in unless it is shipped.

    Raises `DataError` for any text that is not of one of the forms of `SPECS`.
    """
    name, _, folder = spec.partition(":")
    if spec == "digits":
        return name, None
    if name in FOLDERS and folder:
        return name, Path(folder)
    raise DataError(f"no data set {spec!r}; there are {', '.join(SPECS)}")


def load(spec: str, *, seed: int = 0) -> Dataset:
    """The data set that `spec` names. `seed` decides which digits are held out for the test.

    Raises `DataError` for an unknown name, and for a file that is missing or corrupt.
    """
    name, folder = parse(spec)
    return digits.load(seed) if folder is None else FOLDERS[name](folder)
