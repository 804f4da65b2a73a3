"""Images of the user in an `.npz` file, which may be larger than memory.

The file contains `train_images` and `test_images`, u8 [N,H,W,C] from black to white or f32 from
-1 to 1, and `train_labels` and `test_labels`, integers [N]. Write it with `np.savez`.
"""

from __future__ import annotations

from pathlib import Path

from models.data.dataset import DataError, DataSet, LabelledImages
from models.data.mapped import open_npz

PARTS = ("train", "test")


def load(file: Path) -> DataSet:
    """Return the data set in the file. Raises `DataError` for a missing or corrupt file."""
    arrays = open_npz(file)
    missing = {f"{part}_{what}" for part in PARTS for what in ("images", "labels")} - set(arrays)
    if missing:
        names = ", ".join(arrays) or "none"
        raise DataError(f"{file} lacks the array {', '.join(sorted(missing))}; it contains {names}")
    num_classes = 1 + max(int(arrays[f"{part}_labels"][:].max(initial=0)) for part in PARTS)
    parts = []
    for part in PARTS:
        try:
            parts.append(
                LabelledImages(arrays[f"{part}_images"], arrays[f"{part}_labels"], num_classes)
            )
        except DataError as error:
            raise DataError(f"{file}, {part}: {error}") from None
    train, test = parts
    if train.image_shape != test.image_shape:
        raise DataError(f"{file}: image shapes differ: {train.image_shape} and {test.image_shape}")
    return DataSet("npz", train, test, train.image_shape, num_classes)
