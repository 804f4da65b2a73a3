"""Lines of source code, each unchanged or with two adjacent words exchanged.

A model classifies which form it sees. Every line occurs in both forms, with the same words in a
different order. Therefore a model that only counts words or letters is correct in half of the
cases. Some pairs have no defined order, such as the names of an import, so no model is always
correct.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from models.data.dataset import Array, DataError, DataSet, Indices, Labels
from models.data.text import NUM_BYTES, standard_library

LENGTH: Final = 48  # bytes per line; shorter lines are padded with zeros
SHORTEST: Final = 16
MOST: Final = 1 << 22  # bytes of the text that contains the lines
NUM_LINES: Final = 14_000
HELD_OUT: Final = 2_000
_WORD: Final = re.compile(r"\w+")


def load(seed: int = 0) -> DataSet:
    """Load lines in both forms; label 1 marks exchanged words.

    `seed` selects the lines that are held out, and the words that are exchanged. Raises `DataError`
    if Python has no sources.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    text = standard_library(MOST).decode(errors="ignore").splitlines()
    lines = list(dict.fromkeys(line.strip() for line in text))
    originals = set(lines)
    pairs = []
    for i in random.permutation(len(lines)):
        line = lines[i]
        if SHORTEST <= len(line) <= LENGTH and line.isascii() and not line.startswith("#"):
            twin = exchanged(line, random)
            if twin is not None and twin not in originals:
                pairs.append((line, twin))
        if len(pairs) == NUM_LINES:
            break
    if len(pairs) <= HELD_OUT:
        raise DataError(f"the standard library of this Python has too few lines: {len(pairs)}")
    return DataSet(
        "lines",
        Lines(pairs[:-HELD_OUT]),
        Lines(pairs[-HELD_OUT:]),
        (LENGTH,),
        2,
        None,
        "sequences",
        NUM_BYTES,
    )


def exchanged(line: str, random: np.random.Generator) -> str | None:
    """Exchange two adjacent words, chosen at random; return None if all words are equal."""
    words = list(_WORD.finditer(line))
    different = [i for i in range(len(words) - 1) if words[i][0] != words[i + 1][0]]
    if not different:
        return None
    i = different[int(random.integers(len(different)))]
    one, two = words[i], words[i + 1]
    between = line[one.end() : two.start()]
    return line[: one.start()] + two[0] + between + one[0] + line[two.end() :]


class Lines:
    """Both forms of each line as bytes, padded with zeros: i64[B, LENGTH]."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        texts = [form.encode().ljust(LENGTH, b"\0") for pair in pairs for form in pair]
        self._tokens = np.frombuffer(b"".join(texts), np.uint8).reshape(-1, LENGTH)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, indices: Indices) -> tuple[Array, Labels]:
        return self._tokens[indices].astype(np.int64), indices % 2
