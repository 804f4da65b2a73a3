"""Each line of tests/cases/refused_calls.txt raises its error, and leaves nothing allocated."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import refuses
from tests.cases.tables import WrongCall, wrong_calls

WRONG: Final = [*wrong_calls()]
INDEX: Final = (IndexError, ValueError)


@pytest.mark.parametrize("row", WRONG, ids=[row.call for row in WRONG])
def test_a_wrong_call_is_refused(row: WrongCall) -> None:
    names: dict[str, Any] = {"ml": ml, "np": np, "math": math}
    exec(row.setup, names)
    with ml.Arena(ml.default_vm(), "refused") as arena:
        error = refuses(row.error, row.text, exec, row.call, names)
        assert row.error not in INDEX or isinstance(error, ml.errors.MlvmError)
        del error
        assert arena.used == 0


def test_an_axis_out_of_range_is_all_that_libraries_expect() -> None:
    refused = refuses(ml.errors.AxisRefused, "", ml.stack, [ml.ones(2)], axis=9)
    assert all(isinstance(refused, each) for each in (IndexError, ValueError, TypeError))
