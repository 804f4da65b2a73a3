"""Scalars of a training on disk: as CSV, and as the event files that TensorBoard reads.

An event file is a row of records (TensorFlow's TFRecord: length, checksum, bytes, checksum), each a
protobuf message `Event` of tensorflow/core/util/event.proto. Only the parts that scalars need are
written here: TensorBoard itself is a hundred times as large.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import socket
import struct
import time
from collections.abc import Iterable
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Final, SupportsFloat, SupportsIndex

from mlvm.core.errors import ArgumentError, brief
from mlvm.core.program.encoding import damaged, varint
from mlvm.machines.closing import Closing
from mlvm.machines.files import write_file

_numbers = count()


class ScalarLog(Closing):
    """Log of scalars in a folder, as CSV files and as an event file for TensorBoard.

    The scalars of each group are rows of GROUP.csv. In TensorBoard they are named `group/name`.

        with ml.ScalarLog("runs/1") as log:
            for step, (x, y) in enumerate(batches, 1):
                log.add("train", step, loss=train_step(x, y), rate=optimizer.learning_rate)

    and then `tensorboard --logdir runs`. A row is on disk when `add` returns. Rows of earlier logs
    in the folder stay, except from step `purge_step` on: a resumed training writes these again.

    Raises `OSError`, `EncodingError` for a damaged file of rows, and `ArgumentError` for a
    purge_step that is no int from 0 on.

        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ml.ScalarLog(folder) as log:
        ...         log.add("train", 1, loss=ml.asarray(0.5), rate=0.25)
        ...     print((pathlib.Path(folder) / "train.csv").read_text(), end="")
        step,loss,rate
        1,0.5,0.25

    Invalid calls:
        ml.ScalarLog("nowhere", purge_step=-1)  # ArgumentError
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        self.folder = Path(folder)
        self._names: dict[str, list[str]] = {}  # names by group
        purged = None if purge_step is None else _step(purge_step)
        self.folder.mkdir(parents=True, exist_ok=True)
        if purged is not None:
            for file in self.folder.glob("*.csv"):
                _purge(file, purged)
        host = socket.gethostname()
        name = f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_numbers)}"
        self._events = (self.folder / name).open("xb", buffering=0)
        self._write(_text(3, "brain.Event:2"))
        if purged is not None:  # a session starts at this step
            self._write(_integer(2, purged) + _bytes(7, _integer(1, 1)))

    def add(self, group: str, step: SupportsIndex, /, **scalars: SupportsFloat) -> None:
        """Write numbers, or tensors with one element, of that step.

        A group has the same names in each row, in any order.

        Raises `ArgumentError` for other names, none, a step that is no int from 0 on, and a
        group that is no file's name. Raises `OSError`, `EncodingError` for a damaged file of rows,
        and `ValueError` after `close`.

        Invalid calls:
            ml.ScalarLog.add(None, "train", -1, loss=1.0)  # ArgumentError
        """
        number = _step(step)
        if not scalars:
            raise ArgumentError(
                f"add: expected at least one scalar for {group!r} in step {number}, got none"
            )
        values = {name: _number(name, scalar) for name, scalar in scalars.items()}
        names = self._names.get(group) or self._header(group, list(scalars))
        if names != list(scalars) and sorted(names) != sorted(scalars):
            raise ArgumentError(
                f"add: the rows of {group!r} have {', '.join(names)}; got {', '.join(scalars)}"
            )
        parts = [_bytes(1, _text(1, f"{group}/{name}") + _float(2, values[name])) for name in names]
        self._write(_integer(2, number) + _bytes(5, b"".join(parts)))
        with self._file(group).open("ab", buffering=0) as file:
            _append(file, _lines([number, *[repr(values[name]) for name in names]]))

    def close(self) -> None:
        """End the event file. Idempotent."""
        self._events.close()

    def _file(self, group: str) -> Path:
        return self.folder / f"{group}.csv"

    def _header(self, group: str, names: list[str]) -> list[str]:
        """Return the columns of a group: those of the file, or `names` for a new file."""
        if not isinstance(group, str) or group in ("", "..") or group != Path(group).name:
            raise _invalid_name(group)
        for name in (group, *names):
            if "\0" in name or any("\ud800" <= each <= "\udfff" for each in name):
                raise _invalid_name(name)
        file = self._file(group)
        rows = _rows(file) if file.exists() else []
        if not rows:
            write_file(file, _lines(["step", *names]))
        self._names[group] = rows[0][1:] if rows else names
        return self._names[group]

    def _write(self, event: bytes) -> None:
        """Write an `Event` with the time and these fields."""
        data = _key(1, 1) + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(data))
        _append(self._events, length + _checksum(length) + data + _checksum(data))


def _invalid_name(name: object) -> ArgumentError:
    return ArgumentError(f"add: expected a group that is a valid file name, got {brief(name)}")


def _step(step: object) -> int:
    if isinstance(step, SupportsIndex) and not isinstance(step, bool) and step.__index__() >= 0:
        return step.__index__()
    raise ArgumentError(f"expected step as an int >= 0, got {brief(step)}")


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"add: {name}: expected a number, got {brief(value)}: {error}"
        ) from None


# --- CSV -----------------------------------------------------------------------------


def _rows(file: Path) -> list[list[str]]:
    """Return the rows of a file.

    The start of a row that a killed process was writing is deleted from the file.
    """
    whole, _, rest = file.read_bytes().rpartition(b"\n")
    if rest and whole:
        write_file(file, whole + b"\n")
    try:
        text = io.StringIO((whole or rest).decode("utf-8"), newline="")
        return [row for row in csv.reader(text) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(f"{file}: expected comma-separated text: {error}") from None


def _lines(*rows: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8")


def _append(file: FileIO, data: bytes) -> None:
    """Append to an open file: all of the data or, if the disk is full, nothing."""
    before = os.fstat(file.fileno()).st_size
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
    except BaseException:
        file.truncate(before)
        raise


def _purge(file: Path, step: int) -> None:
    """Delete the rows from that step on.

    Rows and files without steps belong to other programs.
    """
    if not re.match(rb'[\r\n]*("?)step\1([,\r\n]|$)', file.read_bytes()):
        return
    header, *rows = _rows(file)
    earlier = [x for x in rows if not re.fullmatch("[0-9]{1,4300}", x[0]) or int(x[0]) < step]
    if earlier:
        write_file(file, _lines(header, *earlier))
    else:
        file.unlink()


# --- protobuf ------------------------------------------------------------------------


def _key(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)


def _integer(field: int, number: int) -> bytes:
    return _key(field, 0) + varint(number)


def _float(field: int, number: float) -> bytes:
    try:
        return _key(field, 5) + struct.pack("<f", number)
    except OverflowError:  # out of range of f32
        return _key(field, 5) + struct.pack("<f", float("inf") if number > 0 else float("-inf"))


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


# --- checksums -----------------------------------------------------------------------


def _table() -> list[int]:
    """Return the table of CRC-32C (Castagnoli), which zlib does not have."""
    entries = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        entries.append(number)
    return entries


_TABLE: Final = _table()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C, masked as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
