"""Logs that were cut off by a kill, and logs that were changed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import EncodingError
from mlvm.eager.runs.log import LogReader, LogWriter
from mlvm.eager.runs.replay import Replay
from mlvm.eager.runs.run import Run
from tests.brief import refuses, with_long
from tests.eager.runs.recorded import train

VALUES: list[Any] = [("run", 1), ("text", "x" * 100), [], ("numbers", [1, -(2**130), 2.5])]


def written(path: Path) -> bytes:
    log = LogWriter(path)
    for value in VALUES:
        log.append(value)
    log.close()
    return path.read_bytes()


def test_a_log_cut_at_any_byte_has_its_whole_frames(tmp_path: Path) -> None:
    data = written(tmp_path / "log")
    counts = []
    for end in range(len(data) + 1):
        log = LogReader(data[:end])
        assert log.values == VALUES[: len(log.values)]
        counts.append(len(log.values))
    assert sorted(set(counts)) == [0, 1, 2, 3, 4]
    assert counts == sorted(counts)
    assert log.torn == 0


def test_a_changed_bit_is_detected(tmp_path: Path) -> None:
    data = written(tmp_path / "log")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncodingError):
            LogReader(bytes(changed))


def test_a_frame_that_was_taken_out_or_exchanged_is_detected(folder: Path) -> None:
    train(folder / "a")
    train(folder / "b", rate=0.125)
    logs = [(folder / name / "log").read_bytes() for name in "ab"]
    half = len(logs[0]) // 2
    for damaged in (logs[0][:200] + logs[0][300:], logs[0][:half] + logs[1][half:]):
        with pytest.raises(EncodingError):
            LogReader(damaged)


def test_later_versions_are_refused(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path / "log"))
    data[8] = 99
    refuses(EncodingError, "a version up to 2 of .*, got 99", lambda: LogReader(bytes(data)))


def test_a_cut_recording_has_all_steps_but_the_last(folder: Path) -> None:
    """As after a kill: files have their first bytes, in the order in which they were written."""
    run = train(folder / "a")
    data = (folder / "a" / "log").read_bytes()
    rng = random.Random(0)
    ends = [*rng.choices(range(len(data)), k=with_long(20, 2000)), 0, len(data)]
    shutil.copytree(folder / "a", folder / "b")
    for end in ends:
        (folder / "b" / "log").write_bytes(data[:end])
        cut = Run(folder / "b")
        n = len(cut.steps)
        assert [step.after for step in cut.steps] == [step.after for step in run.steps[:n]]
        assert cut.is_closed == (end == len(data))
        assert (ml.runs.diff(run, cut) is None) == (n > 0)
        if n and rng.random() < 0.1:  # it takes longer than all else
            assert Replay(cut).replay(rng.randrange(n)) == []
        if rng.random() < 0.1:
            assert ml.runs.verify(Replay(cut)).is_accepted == cut.is_closed
