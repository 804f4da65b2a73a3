"""Pipelines with worker processes: the same batches, and no hang whoever dies.

    KILLS=200 python -m pytest tests/input/test_pipeline_processes.py -k kill

kills as many workers, at any moment of their life.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlvm.core.errors import PipelineError, QueueEmptyError, WorkerDiedError
from mlvm.core.vm import VM
from mlvm.input.pipeline import Pipeline
from mlvm.machines.wire import WireVM
from tests.brief import cases, line_of, refuses, start_python
from tests.input import worker_code
from tests.input.datasets import Numbers, noisy
from tests.input.test_pipeline import digests
from tests.threads import wait_for

KILLS = int(os.environ.get("KILLS", "3"))

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals"),
    # What multiprocessing was pickling when a worker went away is, on Python 3.13, a cycle that
    # the collector takes apart in an order which io does not like.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <_io.BytesIO:pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No worker, thread, open file or shared memory is left when a test is over."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= before
    assert shared_memory() == []


def shared_memory() -> list[str]:
    """The shared memory of queues that this process maps."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return [line for line in maps.read_text().splitlines() if "mlvm" in line.split("/")[-1]]


def pipeline(dataset: Any, workers: int = 2, **options: Any) -> Pipeline[Any]:
    options = {"epochs": 1, **options}
    return Pipeline(dataset, 4, vm=VM(), workers=workers, processes=True, **options)


def test_processes_make_the_same_batches_and_go_on_from_a_state() -> None:
    options: dict[str, Any] = {"shuffle": True, "epochs": 2, "seed": 1, "transform": noisy}
    dataset = Numbers(41)
    with Pipeline(dataset, 4, vm=VM(), **options) as batches:
        whole = digests(batches)
    with pipeline(dataset, 3, **options) as batches:
        first = digests(batches, 7)
        state = batches.state()
    with pipeline(dataset, 1, **options) as batches:
        batches.restore(state)
        assert first + digests(batches) == whole
    with Pipeline(dataset, 4, vm=WireVM(VM()), workers=1, processes=True, **options) as batches:
        assert digests(batches) == whole


def test_a_look_at_the_first_batch_takes_none_of_the_epoch() -> None:
    with pipeline(Numbers(), epochs=2) as batches:
        next(iter(batches))
        assert len(list(map(len, batches))) == len(batches) == 6
        assert len(digests(batches)) == 6


def test_an_exception_comes_with_its_traceback_and_sample() -> None:
    transform = partial(worker_code.raising, ZeroDivisionError, ("seventeen",))
    with pipeline(Numbers(), transform=transform) as batches:
        assert len(digests(batches, 4)) == 4
        caught = refuses(ZeroDivisionError, "seventeen", batches.get, timeout=20)
    sample, remote = caught.__notes__
    assert sample == "at sample 17, position 17 of epoch 0"
    assert "in raising" in remote
    assert "worker_code.py" in remote


@cases("error, arguments, text",
    (worker_code.Odd, (1, 2), "1 and 2"), (worker_code.Gone, ("why",), "why"),
    (worker_code.Final, ("why",), "why"), (worker_code.Sealed, ("why",), "why"),
    (worker_code.Silent, (), "<exception str"), (worker_code.Local, ("why",), "why"),
)  # fmt: skip
def test_an_exception_that_cannot_travel_is_told_in_another(
    error: type[Exception], arguments: tuple[Any, ...], text: str
) -> None:
    transform = partial(worker_code.raising, error, arguments)
    with pipeline(Numbers(), 1, transform=transform) as batches:
        assert len(digests(batches, 4)) == 4
        caught = refuses(PipelineError, f"{error.__name__}: {text}", batches.get, timeout=20)
    assert "in raising" in caught.__notes__[-1]


def test_what_cannot_be_pickled_is_an_error_at_get() -> None:
    with (
        pipeline(Numbers(), transform=lambda arrays, random: arrays) as batches,
        pytest.raises(PipelineError, match="cannot be sent to a worker process"),
    ):
        batches.get(timeout=20)


def test_a_worker_that_exits_is_an_error() -> None:
    with pipeline(Numbers(), transform=worker_code.exiting) as batches:
        assert len(digests(batches, 4)) == 4
        with pytest.raises(
            WorkerDiedError, match=r"exited with code 3 .* positions 16 to 19 of epoch 0"
        ):
            batches.get(timeout=20)


def test_a_killed_worker_is_an_error_within_two_seconds() -> None:
    """At any moment: while it starts, while it works, and while it waits."""
    chance = random.Random(0)
    for _ in range(KILLS):
        with pipeline(Numbers(), 1, epochs=None, transform=worker_code.slow) as batches:
            if chance.random() < 0.7:
                digests(batches, 1 + int(chance.random() * 20))
            else:  # still in its start
                with suppress(QueueEmptyError):
                    batches.get(timeout=0.4 * chance.random())
            while not multiprocessing.active_children():
                time.sleep(0.001)
            time.sleep(0.01 * chance.random())
            for child in multiprocessing.active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
            killed = time.monotonic()
            refuses(WorkerDiedError, "exited with code -9", digests, batches)
            assert time.monotonic() - killed < 2


def test_a_worker_that_is_stuck_is_ended_by_close() -> None:
    with pipeline(Numbers(), transform=worker_code.stuck) as batches:
        refuses(QueueEmptyError, "", batches.get, timeout=0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 5


SCRIPT = """
import sys, time
import mlvm.eager as ml
from tests.input.datasets import Numbers

if __name__ == "__main__":
    pipeline = ml.Pipeline(Numbers(1000), 4, epochs=None, workers=1, processes=True)
    pipeline.get()
    print("ready", flush=True)
    if sys.argv[1] == "loop":
        with pipeline:
            while True:
                for _ in pipeline:
                    time.sleep(0.001)
"""


def start(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    child = start_python(tmp_path / "script.py", mode, start_new_session=True)
    assert line_of(child) == "ready\n"
    return child


def is_gone(group: int) -> bool:
    """Return whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_interrupt_of_the_terminal_ends_all_with_one_traceback(tmp_path: Path) -> None:
    child = start(tmp_path, "loop")
    os.killpg(child.pid, signal.SIGINT)  # as the terminal does, to the workers as well
    _, errors = child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_for(lambda: is_gone(child.pid))


def test_workers_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    child = start(tmp_path, "loop")
    child.kill()
    child.communicate(timeout=20)
    wait_for(lambda: is_gone(child.pid))


def test_a_program_may_end_without_closing(tmp_path: Path) -> None:
    child = start(tmp_path, "end")
    _, errors = child.communicate(timeout=20)
    assert (child.returncode, errors) == (0, "")
    wait_for(lambda: is_gone(child.pid))


def test_a_worker_has_a_data_set_of_its_own() -> None:
    dataset = Numbers(8)
    with pipeline(dataset, 1) as batches:
        digests(batches, 1)
        dataset.length = 0
        assert len(digests(batches)) == 1
