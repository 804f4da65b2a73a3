"""Text as bytes, cut into windows: by default the sources of Python's standard library.

These sources are part of every Python installation, so no download is necessary. They differ
slightly between versions of Python.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import numpy as np

import mlvm.eager as ml
from models.data.dataset import NO_LABEL, Array, Bytes, DataError, DataSet, Indices, Labels
from models.data.files import opened

LENGTH: Final = 128  # bytes in a window
MOST: Final = 1 << 20  # bytes of the standard library's text
NUM_BYTES: Final = 256
MASK: Final = NUM_BYTES  # symbol of a masked byte
MASKED: Final = round(0.15 * LENGTH)  # masked bytes per window, as in BERT
HELD_OUT: Final = 0.05  # share of the text that is the test set, at the end


def load(file: Path | None = None) -> DataSet:
    """Load windows of the text; the label of a byte is the following byte.

    Raises `DataError` for a file that is missing or too short.
    """
    train, test = (Windows(part) for part in _parts(file))
    return DataSet("text", train, test, (LENGTH,), NUM_BYTES, None, "text", NUM_BYTES)


def load_masked(file: Path | None = None) -> DataSet:
    """Load windows of the text with masked bytes; the label of a masked byte is the byte.

    Raises the errors of `load`.
    """
    train, test = _parts(file)
    return DataSet(
        "masked",
        Windows(train),
        Hidden(Windows(test)),
        (LENGTH,),
        NUM_BYTES,
        hide,
        "masked text",
        NUM_BYTES + 1,
    )


def standard_library(most: int = MOST) -> bytes:
    """Read the single-file modules of the standard library, up to `most` bytes.

    They are sorted by name; names with a leading underscore are omitted.

    Raises `DataError` if the interpreter has no sources.
    """
    text = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        if len(text) < most:
            text += file.read_bytes()
    if not text:
        raise DataError("this Python lacks the sources of the standard library; use text:FILE")
    return text[:most]


def _parts(file: Path | None) -> tuple[Bytes, Bytes]:
    """Return the text to train on and the text to test on."""
    text = standard_library() if file is None else _content(file)
    held_out = round(len(text) * HELD_OUT)
    if held_out <= LENGTH:
        raise DataError(f"{file} needs over {round(LENGTH / HELD_OUT)} bytes, got {len(text)}")
    tokens = np.frombuffer(text, np.uint8)
    return tokens[:-held_out], tokens[-held_out:]


def _content(file: Path) -> bytes:
    try:
        with opened(file) as stream:
            return stream.read()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


class Windows:
    """Return the consecutive windows of a text: i64[B, LENGTH].

    Each window is paired with the window one byte later.
    """

    def __init__(self, tokens: Bytes) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, indices: Indices) -> tuple[Array, Labels]:
        places = indices[:, None] * LENGTH + np.arange(LENGTH + 1)
        tokens = self._tokens[places].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]


class Hidden:
    """Windows masked by `hide`; a window always has the same mask."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, indices: Indices) -> tuple[Array, Labels]:
        samples, labels = hide(self._windows[indices], ml.SampleRandom(0, 0, indices))
        return samples, labels


def hide(arrays: tuple[Array, ...], random: ml.SampleRandom) -> tuple[Array, ...]:
    """Mask `MASKED` bytes per window: of ten, 8 become `MASK`, 1 is random, 1 is unchanged.

    The label of a selected byte is the original byte. All other bytes have `NO_LABEL` (Devlin et
    al., arXiv 1810.04805, 3.1).
    """
    tokens, _ = arrays
    order = np.argsort(random.uniform(shape=(tokens.shape[1],)), axis=1)
    chosen = order < MASKED
    fate = random.uniform(shape=(tokens.shape[1],))
    others = random.integers(0, NUM_BYTES, (tokens.shape[1],))
    shown = np.where(fate < 0.8, MASK, np.where(fate < 0.9, others, tokens))
    return np.where(chosen, shown, tokens), np.where(chosen, tokens, NO_LABEL)
