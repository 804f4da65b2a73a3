"""Image data sets: `load("digits")`, `load("mnist:DIR")` and the others of `SPECS`."""

from __future__ import annotations

from pathlib import Path

from models.data import cifar10, digits, folder, mnist, npz
from models.data.dataset import DataError as DataError
from models.data.dataset import DataSet as DataSet

READERS = {
    "mnist:DIR": mnist.load,
    "cifar10:DIR": cifar10.load,
    "images:DIR": folder.load,
    "npz:FILE": npz.load,
}
SPECS = ["digits", *READERS]


def parse(spec: str) -> tuple[str, Path | None]:
    """The form of `SPECS` that a text is of, and the path in it unless the data is shipped.

    Raises `DataError` for any other text.
    """
    name, _, path = spec.partition(":")
    for form in SPECS:
        if spec == form == "digits":
            return form, None
        if path and form.partition(":")[0] == name and form in READERS:
            return form, Path(path)
    raise DataError(f"no data set {spec!r}; there are {', '.join(SPECS)}")


def load(spec: str, *, seed: int = 0) -> DataSet:
    """The data set that `spec` names. `seed` decides which digits are held out for the test.

    Raises `DataError` for an unknown name, and for a file that is missing or corrupt.
    """
    form, path = parse(spec)
    return digits.load(seed) if path is None else READERS[form](path)
