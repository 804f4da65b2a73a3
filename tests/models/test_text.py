"""Text becomes windows, windows with hidden bytes, and lines with exchanged words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import mlvm.eager as ml
from models.data import DataError, lines, load, text
from models.data.dataset import NO_LABEL


def test_windows_tile_the_text_and_are_labelled_with_the_next_byte(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    content = bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8))
    file.write_bytes(content)
    data = load(f"text:{file}")
    assert (data.kind, data.shape, data.num_symbols, data.num_classes) == (
        "text",
        (text.LENGTH,),
        256,
        256,
    )
    for part, examples in ((content[:4750], data.train), (content[4750:], data.test)):
        assert len(examples) == (len(part) - 1) // text.LENGTH
        tokens, labels = examples[np.arange(len(examples))]
        assert tokens.dtype == labels.dtype == np.int64
        length = text.LENGTH * len(examples)
        assert bytes(tokens.astype(np.uint8)) == part[:length]
        assert bytes(labels.astype(np.uint8)) == part[1 : length + 1]


def test_a_text_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        load(f"text:{tmp_path / 'nowhere'}")
    (tmp_path / "short").write_bytes(bytes(2560))
    with pytest.raises(DataError, match=r"short needs over 2560 bytes, got 2560"):
        load(f"masked:{tmp_path / 'short'}")


def test_a_fixed_share_of_bytes_is_hidden() -> None:
    data = load("masked")
    assert (data.kind, data.num_symbols, data.num_classes) == ("masked text", 257, 256)
    assert data.augment is text.hide
    indices = np.arange(500)
    plain, _ = data.train[indices]
    shown, labels = text.hide(data.train[indices], ml.SampleRandom(3, 0, indices))
    chosen = labels != NO_LABEL
    assert (chosen.sum(axis=1) == text.MASKED).all()
    assert (shown == plain)[~chosen].all()
    assert (labels == plain)[chosen].all()
    shares = (shown[chosen] == text.MASK).mean(), (shown == plain)[chosen].mean()
    assert shares == pytest.approx((0.8, 0.1), abs=0.03)
    assert chosen.mean(axis=0).min() > 0.08  # at every place


def test_the_test_set_hides_the_same_bytes_every_time_and_in_any_batch() -> None:
    test = load("masked").test
    shown, labels = test[np.arange(9)]
    for i in range(9):
        again = test[np.array([i])]
        assert (again[0][0] == shown[i]).all()
        assert (again[1][0] == labels[i]).all()


def test_lines_come_in_both_forms_with_the_same_bytes() -> None:
    data = load("lines", seed=1)
    assert (data.kind, data.num_symbols, data.num_classes) == ("sequences", 256, 2)
    assert len(data.test) == 2 * lines.HELD_OUT
    tokens, labels = data.train[np.arange(400)]
    assert tokens.shape == (400, lines.LENGTH)
    for right, wrong in tokens.reshape(200, 2, -1):
        assert (right != wrong).any()
        assert Counter(right.tolist()) == Counter(wrong.tolist())
    assert labels.tolist() == [0, 1] * 200
    train, test = (
        {bytes(row) for row in each[np.arange(len(each))][0].astype(np.uint8)}
        for each in (data.train, data.test)
    )
    assert not train & test
