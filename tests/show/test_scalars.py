"""Scalars on disk: read back by a parser of the test's own, and by TensorBoard where it is."""

from __future__ import annotations

import csv
import math
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, EncodingError
from mlvm.show import scalars
from tests.brief import Patch, cases, refuses


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((((crc >> 15) | (crc << 17)) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def records(file: Path) -> list[bytes]:
    """Return the records of a TFRecord file, with every checksum compared."""
    data, payloads = file.read_bytes(), []
    while data:
        length, of_length = struct.unpack("<QI", data[:12])
        assert of_length == masked(data[:8])
        payloads.append(data[12 : 12 + length])
        [of_record] = struct.unpack("<I", data[12 + length : 16 + length])
        assert of_record == masked(payloads[-1])
        data = data[16 + length :]
    return payloads


def fields(message: bytes) -> dict[int, list[Any]]:
    """A protobuf message by the numbers of its fields."""
    by_number: dict[int, list[Any]] = {}

    def varint() -> int:
        nonlocal message
        number = shift = 0
        while True:
            byte, message = message[0], message[1:]
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while message:
        key = varint()
        value: Any
        match key & 7:
            case 0:
                value = varint()
            case 1:
                [value], message = struct.unpack("<d", message[:8]), message[8:]
            case 2:
                length = varint()
                value, message = message[:length], message[length:]
            case 5:
                [value], message = struct.unpack("<f", message[:4]), message[4:]
            case wire:
                raise AssertionError(wire)
        by_number.setdefault(key >> 3, []).append(value)
    return by_number


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Step, tag and value of each scalar, of all files in order."""
    entries = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        first, *rest = [fields(each) for each in records(file)]
        assert first[3] == [b"brain.Event:2"]
        for event in [first, *rest]:
            assert abs(event[1][0] - time.time()) < 600
        for event in rest:
            for summary in event.get(5, []):
                for value in fields(summary)[1]:
                    of = fields(value)
                    entries.append((event[2][0], of[1][0].decode(), of[2][0]))
    return entries


def rows(file: Path) -> list[list[str]]:
    with file.open(newline="") as text:
        return list(csv.reader(text))


def test_crc32c() -> None:
    """Of RFC 3720, B.4, and of the ASCII digits, as every CRC is checked."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    for data in (b"", b"123456789", bytes(range(256))):
        assert scalars._checksum(data) == struct.pack("<I", masked(data))


def test_scalars_are_read_back(tmp_path: Path) -> None:
    with ml.ScalarLog(tmp_path / "runs" / "1") as log:
        log.add("train", 1, loss=ml.asarray(0.5), rate=0.25)
        assert rows(log.folder / "train.csv") == [["step", "loss", "rate"], ["1", "0.5", "0.25"]]
        log.add("train", 300, rate=1e-3, loss=math.nan)
        log.add("test, held out", 300, accuracy=1e300)
        log.add("train", 2**40, loss=-math.inf, rate=0.1)
    assert rows(log.folder / "train.csv")[2:] == [
        ["300", "nan", "0.001"],
        [str(2**40), "-inf", "0.1"],
    ]
    assert rows(log.folder / "test, held out.csv") == [["step", "accuracy"], ["300", "1e+300"]]
    entries = events(log.folder)
    assert [(step, tag) for step, tag, _ in entries] == [
        *((1, "train/loss"), (1, "train/rate"), (300, "train/loss"), (300, "train/rate")),
        *((300, "test, held out/accuracy"), (2**40, "train/loss"), (2**40, "train/rate")),
    ]
    values = [value for _, _, value in entries]
    assert values[:2] == [0.5, 0.25]
    assert math.isnan(values[2])
    assert values[3] == pytest.approx(1e-3, rel=1e-7)
    assert values[4:6] == [math.inf, -math.inf]
    refuses(ValueError, "closed", log.add, "train", 3, loss=0.0, rate=0.0)


def test_a_later_log_goes_on_or_writes_rows_again(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("mine,and not a log's\n1,2")
    for first, purge in ((1, None), (4, None), (3, 3)):
        with ml.ScalarLog(tmp_path, purge_step=purge) as log:
            for step in range(first, first + 3):
                log.add("train", step, loss=step + 0.5 * first)
    steps = [row[:2] for row in rows(tmp_path / "train.csv")[1:]]
    assert steps == [["1", "1.5"], ["2", "2.5"], ["3", "4.5"], ["4", "5.5"], ["5", "6.5"]]
    assert (tmp_path / "notes.csv").read_text() == "mine,and not a log's\n1,2"
    begun = [fields(each) for file in sorted(tmp_path.glob("events*")) for each in records(file)]
    assert [(e[2], fields(e[7][0])) for e in begun if 7 in e] == [([3], {1: [1]})]
    with ml.ScalarLog(tmp_path, purge_step=0):
        assert not (tmp_path / "train.csv").exists()


@cases(
    "before, step, after",
    (f"step,a\n{10**18},1.0\n", 10**18 + 1, f"step,a\n{10**18},1.0\n"),
    (f"step,a\n3,1.0\n{10**18 + 1},1.0\n", 10**18, "step,a\n3,1.0\n"),
    (f"step,a\nmean,1.0\n{'9' * 5000},1.0\n7,2.0\n", 5, f"step,a\nmean,1.0\n{'9' * 5000},1.0\n"),
    ('"step","a"\n1,1.0\n2,1.0\n', 2, "step,a\n1,1.0\n"),
    ('"steps","a"\n1,1.0\n2,1.0\n', 2, '"steps","a"\n1,1.0\n2,1.0\n'),
)
def test_rows_before_a_step_and_without_steps_stay(
    before: str, step: int, after: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(before)
    ml.ScalarLog(tmp_path, purge_step=step).close()
    assert (tmp_path / "t.csv").read_text() == after


@cases(
    "add, message",
    (lambda log: log.add("train", 2, accuracy=1), "'train' have loss; got accuracy"),
    (lambda log: log.add("train", 2, loss=1, rate=1), "'train' have loss; got loss, rate"),
    (lambda log: log.add("train", -1, loss=1), "expected step as an int >= 0, got -1"),
    (lambda log: log.add("train", 1.5, loss=1), "expected step as an int >= 0, got 1.5"),
    (lambda log: log.add("train", 2), "expected at least one scalar for 'train' in step 2"),
    (
        lambda log: log.add("a/b", 1, loss=1),
        "expected a group that is a valid file name, got 'a/b'",
    ),
    *(
        (
            lambda log, name=name: log.add(name, 1, loss=1),
            rf"expected a group that is a valid file name, got {re.escape(repr(name))}",
        )
        for name in ("", "..", "a\0", "\ud800")
    ),
    (lambda log: ml.ScalarLog(log.folder, purge_step=-1), "expected step as an int >= 0, got -1"),
)
def test_what_is_refused(add: Any, message: str, tmp_path: Path) -> None:
    with ml.ScalarLog(tmp_path) as log:
        log.add("train", 1, loss=1.0)
        refuses(ArgumentError, message, add, log)
        log.add("train", 2, loss=1.0)
    assert len(rows(tmp_path / "train.csv")) == 3
    assert len(events(tmp_path)) == 2
    (tmp_path / "train.csv").write_bytes(b"step,\xff\n")
    refuses(EncodingError, "train.csv: expected comma", ml.ScalarLog, tmp_path, purge_step=0)


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for purge in (None, 2):
        with ml.ScalarLog(tmp_path, purge_step=purge) as log:
            for step in range(purge or 0, 4):
                log.add("train", step, loss=step + (purge or 0) / 4)
    accumulator = accumulators.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert accumulator.Tags()["scalars"] == ["train/loss"]
    scalars = [(each.step, each.value) for each in accumulator.Scalars("train/loss")]
    assert scalars == [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5)]


def test_a_log_that_ends_while_it_purges_has_lost_no_row(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with ml.ScalarLog(tmp_path) as log:
        for step in range(3):
            log.add("train", step, loss=1.0)
    before = rows(tmp_path / "train.csv")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    refuses(KeyboardInterrupt, "", ml.ScalarLog, tmp_path, purge_step=2)
    assert rows(tmp_path / "train.csv") == before


def test_half_a_row_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    with ml.ScalarLog(tmp_path) as log:
        log.add("train", 1, loss=0.25)
    file = tmp_path / "train.csv"
    with file.open("a") as stream:
        stream.write("2,0.1")
    with ml.ScalarLog(tmp_path) as log:
        log.add("train", 2, loss=0.125)
    assert file.read_text() == "step,loss\n1,0.25\n2,0.125\n"


@cases("value", np.ones(2), "text", None, 1j)
def test_add_takes_single_numbers(value: Any, tmp_path: Path) -> None:
    with ml.ScalarLog(tmp_path) as log:
        refuses(ArgumentError, "add: x: expected a number", log.add, "train", 1, x=value)
    assert not [*tmp_path.glob("*.csv")]
