"""Eager calls beside a thread that ends what they use, and gives its place to another tensor."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import ArenaError, StaleTensorError
from mlvm.eager.capture.capture import Captured
from mlvm.eager.tensor.apply import apply_in_python
from mlvm.eager.tensor.reading import launch_for_values, values_of, write
from mlvm.eager.tensor.update import apply_into_in_python
from mlvm.eager.tree import load
from tests.interrupting import with_each_line_interrupted

SEVENS = np.full(8, 7.0)


class Race(NamedTuple):
    """A function of eager code, and a call that comes to it; `x` are sevens in arena `shared`,
    and what the call returns is an array, or None."""

    function: Callable[..., Any]
    call: Callable[[ml.Tensor], Any]
    result: Any


captured = ml.capture(lambda x: x * x - x)


def update(x: ml.Tensor) -> None:
    x += x


def update_another(x: ml.Tensor) -> Any:
    y = ml.ones(8, dtype=ml.float64)
    y += x
    return y.numpy()


@ml.capture
def doubled(x: ml.Tensor) -> None:
    x += x


READS = {
    "a pair": Race(apply_in_python, lambda x: (x + x).numpy(), 2 * SEVENS),
    "three operands": Race(apply_in_python, lambda x: ml.where(x > x, x, x).numpy(), SEVENS),
    "a result of unknown shape": Race(
        launch_for_values, lambda x: ml.nonzero(x)[0].numpy(), np.arange(8)
    ),
    "a read": Race(values_of, lambda x: x.numpy(), SEVENS),
    "a copy": Race(Arena.keep, lambda x: KEEPS[-1].keep(x).numpy(), SEVENS),
}
CALLS = {
    **READS,
    "an update": Race(apply_into_in_python, update, None),
    "an update from it": Race(apply_into_in_python, update_another, 1 + SEVENS),
    "a write": Race(write, lambda x: load({"x": x}, {"x": 5 * SEVENS}, "state"), None),
    "a replay": Race(Captured._launch, lambda x: captured(x).numpy(), SEVENS**2 - SEVENS),
    "an update in a replay": Race(Captured._launch, doubled, None),
}
KEEPS: list[Arena] = []

ENDS: dict[str, Callable[[Arena, ml.Tensor, Any], None]] = {
    "freed": lambda arena, x, mark: arena.free(x),
    "reset": lambda arena, x, mark: arena.reset(),
    "rewound": lambda arena, x, mark: arena.rewind(mark),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("race", READS)
def test_a_call_sees_its_own_tensors_and_changes_no_other(race: str, how: str) -> None:
    function, call, expected = READS[race]
    outcomes: list[str] = []

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        vm = ml.VM(native=False)
        shared, mine = ml.Arena(vm, "shared"), ml.Arena(vm, "mine")
        KEEPS[:] = [mine]
        mark = shared.mark()
        with shared.allocating():
            x = ml.asarray(SEVENS)
        with mine.allocating():
            call(ml.asarray(SEVENS))  # what is captured is recorded
        others: list[ml.Tensor] = []

        def run() -> None:
            try:
                with mine.allocating():
                    result = call(x)
            except StaleTensorError as error:
                outcomes.append(str(error))
            else:
                np.testing.assert_array_equal(result, expected)
                outcomes.append("right")
            for other in others:
                np.testing.assert_array_equal(other.numpy(), np.full(8, 9.0))

        def interrupt() -> None:
            ENDS[how](shared, x, mark)
            with shared.allocating():
                others.append(ml.asarray(np.full(8, 9.0)))
            assert others[0].region is not None
            assert others[0].region.offset == 0  # it has the place of x

        return run, interrupt

    assert with_each_line_interrupted(function, make) >= 4
    assert outcomes[-1] == "right"  # nothing comes in between
    [text] = {*outcomes} - {"right"}
    assert re.search(
        rf"f64\[8\] of arena 'shared' was freed: .* {how}( it)?; copy it out first, for example ",
        text,
    )


@pytest.mark.filterwarnings("ignore:.*8th program")  # so often it is interrupted
@pytest.mark.parametrize("race", CALLS)
def test_a_call_beside_a_close_is_right_or_says_so(race: str) -> None:
    function, call, expected = CALLS[race]

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        vm = ml.VM(native=False)
        shared = ml.Arena(vm, "shared")
        KEEPS[:] = [shared]
        with shared.allocating():
            x = ml.asarray(SEVENS)
            call(ml.asarray(SEVENS))

        def run() -> None:
            with contextlib.suppress(StaleTensorError, ArenaError), shared.allocating():
                np.testing.assert_array_equal(call(x), expected)

        return run, shared.close

    assert with_each_line_interrupted(function, make) >= 3
