"""Exceptions cross to another process with their message, whether they have a pickle or not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mlvm.core.errors import PipelineError
from mlvm.machines.failure import Failure


class TwoArguments(Exception):
    """Cannot be unpickled: its pickle has one argument."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__(f"file {name} is broken at {at}")


class WithFunction(Exception):
    """Cannot be pickled."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__(f"file {name} is broken at {at}")
        self.function: Any = lambda: 0


@pytest.mark.parametrize("kind", [TwoArguments, WithFunction])
def test_an_exception_without_a_pickle_keeps_its_message(kind: Any) -> None:
    error = kind("x", 17)
    error.add_note("at sample 3\nof epoch 0")
    failure = pickle.loads(pickle.dumps(Failure.of(error)))
    received = failure.error("a worker process", PipelineError)
    assert type(received) is PipelineError
    assert str(received).endswith(f"{kind.__name__}: file x is broken at 17")
    [note] = received.__notes__
    assert note.startswith("in a worker process:")
    assert "at sample 3" in note


def test_another_exception_is_itself() -> None:
    error = ValueError("x")
    error.add_note("at sample 3")
    received = Failure.of(error).error("a worker process", PipelineError)
    assert (type(received), str(received)) == (ValueError, "x")
    assert received.__notes__[0] == "at sample 3"
