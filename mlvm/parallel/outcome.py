"""Outcomes of tasks, for transport to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mlvm.core.errors import GroupError


class AnyFailure(Protocol):
    """An exception on its way: `mlvm.machines.failure.Failure`, or one without a pickle."""

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception: ...


class Outcome(NamedTuple):
    """Result of a task, or its error. `first`: the error was not caused by another member's."""

    value: Any
    failure: AnyFailure | None = None
    first: bool = False


def results_of(outcomes: Mapping[int, Outcome], names: Sequence[str]) -> list[Any]:
    """Return the results by rank. Raises the first error of a member."""
    failed = [rank for rank, outcome in outcomes.items() if outcome.failure is not None]
    failed.sort(key=lambda rank: not outcomes[rank].first)
    for rank in failed:
        failure = outcomes[rank].failure
        assert failure is not None
        error = failure.error(names[rank], GroupError)
        error.add_note(f"raised by {names[rank]} of a group of {len(names)}")
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return [outcomes[rank].value for rank in range(len(names))]
