"""Planned steps: the bits of the calls one by one, whatever was fused, moved, or made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlvm.arena import dataflow, fusion
from mlvm.arena.planned import Planned, compile_flow
from mlvm.core import fused
from mlvm.core.assembly import assemble, disassemble
from mlvm.core.types import ALIGNMENT, TensorType
from tests.arena.flows import Step, assert_same_bits, run, steps

BLOCK = 8


@contextmanager
def eager_to_change() -> Iterator[None]:
    """Blocks are small, chains short, and what is cheap is made again at once."""
    with (
        mock.patch.object(fused, "BLOCK", BLOCK),
        mock.patch.object(fusion, "BLOCK", BLOCK),
        mock.patch.object(fusion, "SHORTEST", 2),
        mock.patch.object(dataflow, "FAR", 2),
    ):
        yield


@given(steps(), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_a_plan_leaves_what_the_calls_leave_one_by_one(
    step: Step, fuse: bool, recompute: bool
) -> None:
    with eager_to_change():
        planned = compile_flow(step.flow, fuse=fuse, recompute=recompute)
        outputs = [TensorType.of(array) for array in step.expected("output")]
        inputs, states, results = run(planned, step.inputs, step.states, outputs)
    assert_same_bits(inputs, step.expected("input"))
    assert_same_bits(states, step.expected("state"))
    assert_same_bits(results, step.expected("output"))
