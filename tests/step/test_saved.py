"""Saved steps: what is no step is refused when it is read, not when it runs or is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import mlvm.eager as ml
from mlvm.core.errors import EncodingError, HandleError, MlvmError, OutOfMemoryError
from mlvm.core.program.encoding import HEADER, Kind, Writer
from mlvm.core.program.program import Opcode
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM
from mlvm.show.picture import timeline
from mlvm.step.compile import Planned, compile_flow
from mlvm.step.saved import LoadedStep, SavedStep
from tests.brief import cases, refuses
from tests.fuzz.mutations import assert_well_refused, framed
from tests.step.flows import Step, steps


def saved(folder: Path, fn: Callable[..., ml.Tensor], **options: Any) -> bytes:
    captured = ml.capture(fn, **options)
    captured(ml.ones((2, 2)), ml.ones((2, 2)))
    captured.save(folder / "step.mlvm")
    return (folder / "step.mlvm").read_bytes()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A step with a state, two inputs and scratch memory."""
    weight = ml.ones((2, 2))

    def step(x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
        z = ml.exp(x @ weight) @ y
        ml.parallel.all_reduce(weight)
        return ml.sum(z) + x

    return saved(tmp_path_factory.mktemp("step"), step)


@pytest.fixture(scope="module")
def open_data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A step with a length, of which a scalar, slices and types are formulas."""

    def step(x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
        n = x.shape[0]
        z = ml.exp(x[: n // 2]) / n
        return ml.concat([ml.reshape(z, -1), ml.sum(y)[None]]) if n > 1 else z

    names = {"x": ("n", None), "y": ("n", None)}
    return saved(tmp_path_factory.mktemp("step"), step, dynamic_axes=names, max_sizes={"n": 9})


@given(steps())
def test_a_step_comes_back_from_its_bytes_as_it_was(flow: Step) -> None:
    inputs, outputs = [
        tuple(TensorType.of(array) for array in arrays)
        for arrays in (flow.inputs, flow.expected("output"))
    ]
    step = SavedStep(compile_flow(flow.flow), inputs, outputs, (), tuple(flow.states))
    loaded = SavedStep.from_bytes(step.to_bytes())
    plan = step.planned.plan._replace(offsets=(), peak=())  # the arguments have the first
    assert loaded.planned == replace(step.planned, plan=plan)
    assert loaded.to_bytes() == step.to_bytes()


def test_a_file_from_before_moments_were_written_loads(data: bytes) -> None:
    step = SavedStep.from_bytes(data)
    moments = step.planned.moments
    assert moments
    encoded = Writer()
    encoded.sequence(moments, Writer.integer)
    size = len(encoded.message(Kind.step)) - HEADER.size
    older = SavedStep.from_bytes(framed(Kind.step)(data[HEADER.size : -size]))
    assert older == step._replace(planned=replace(step.planned, moments=()), states=older.states)
    assert older.planned.recording() == step.planned.recording()


def test_a_step_with_nan_as_a_number_loads(tmp_path: Path) -> None:
    data = saved(tmp_path, lambda x, y: ml.pad(x + y, ((1, 1), (1, 1)), value=ml.nan))
    assert SavedStep.from_bytes(data).to_bytes() == data


def test_moments_are_those_of_calls(data: bytes) -> None:
    planned = SavedStep.from_bytes(data).planned
    code = planned.program.main.code
    calls = [pc for pc, each in enumerate(code) if each.opcode is Opcode.cfunc]
    assert planned.moments == tuple(calls)
    for each in planned.lifetimes:
        name = code[planned.moments[each.start] - 1].immediates[0]
        assert name in ("fused", f"{each.op}.out")


def lifetime(**change: Any) -> Callable[[Planned], Planned]:
    """Return what changes the first lifetime of a plan."""

    def changed(planned: Planned) -> Planned:
        first, *others = planned.lifetimes
        return replace(planned, lifetimes=(replace(first, **change), *others))

    return changed


LIFETIME = r"expected a tensor within 128 bytes and 4 calls, got the result of exp at "
MOMENT = r"expected a pc below \d+, got -?1"
PLANS: list[dict[str, Any]] = [{"nbytes": 2**70}, {"nbytes": "9"}, {"lower_bound": -1}]
PLANS += [{"unfused": -1}, {"unfused": None}]
PLAN = r"expected a plan \(bytes, lower bound, bytes unfused and order\), got"


@cases(
    "change, message",
    *[(lifetime(end=end), LIFETIME) for end in (2**60, 30)],
    *[(lifetime(start=-1), LIFETIME), (lifetime(start=9, end=8), LIFETIME)],
    *[(lifetime(offset=offset), LIFETIME) for offset in (-64, 1 << 20)],
    *[(lifetime(nbytes=nbytes), LIFETIME) for nbytes in (1 << 20, -64)],
    *[(lambda p, pc=pc: replace(p, moments=(pc, *p.moments)), MOMENT) for pc in (-1, 10**9)],
    *[(lambda p, plan=plan: replace(p, plan=p.plan._replace(**plan)), PLAN) for plan in PLANS],
)
def test_what_is_no_plan_of_a_step_is_refused(
    data: bytes, change: Callable[[Planned], Planned], message: str
) -> None:
    step = SavedStep.from_bytes(data)
    damaged = step._replace(planned=change(step.planned)).to_bytes()
    refuses(EncodingError, message, SavedStep.from_bytes, damaged)


def run(step: SavedStep) -> None:
    """All that the command line does with a step."""
    str(step.planned.plan)
    timeline(step.planned.recording(), title="a step")
    with contextlib.suppress(MlvmError):
        loaded = LoadedStep(step, LocalVM())
        for n in (2, 3, 9):
            loaded(np.ones((n, 2), np.float32), np.ones((n, 2), np.float32), max_steps=1000)


def test_mutations(data: bytes) -> None:
    parts = [(data, bytes), (data[16:], framed(Kind.step))]
    assert_well_refused(parts, lambda data: run(SavedStep.from_bytes(data)), MlvmError)


def test_mutations_of_lengths(open_data: bytes) -> None:
    run(SavedStep.from_bytes(open_data))
    end = len(open_data) - len(SavedStep.from_bytes(open_data)._replace(open=None).to_bytes())
    head = open_data[HEADER.size : -end]
    parts = [(open_data[-end:], lambda tail: framed(Kind.step)(head + tail))]
    assert_well_refused(parts, lambda data: run(SavedStep.from_bytes(data)), MlvmError)


@cases(
    "change, message",
    (
        {"values": ()},
        "expected the lengths of a step: expected the index of a number in the state",
    ),
    ({"lengths": ()}, "expected the lengths of a step: expected at least one length"),
    ({"inputs": ()}, "the lengths do not match the step: "),
    ({"outputs": ()}, r"the lengths \(n = 2, at most 9\) do not match the step"),
    ({"steps": ((3, "__import__", (0, 0)),)}, "the lengths do not match the step: "),
    ({"scalars": ((99, 0),)}, "the lengths do not match the step: "),
)
def test_lengths_are_those_of_the_step(open_data: bytes, change: Any, message: str) -> None:
    step = SavedStep.from_bytes(open_data)
    assert step.open is not None
    with pytest.raises(EncodingError, match=message):
        SavedStep.from_bytes(step._replace(open=step.open._replace(**change)).to_bytes())


def test_powers_of_a_length_stay_small(open_data: bytes) -> None:
    step = SavedStep.from_bytes(open_data)
    assert step.open is not None
    [length] = step.open.lengths
    place = len(step.open.values)
    squares = tuple([(place + i, "mul", (place + i - 1,) * 2) for i in range(1, 60)])
    steps = (*step.open.steps, (place, "add", (length.place,) * 2), *squares)
    huge = step.open._replace(values=(*step.open.values, 4, *[4] * 60), steps=steps)
    with pytest.raises(EncodingError, match="takes other branches"):
        SavedStep.from_bytes(step._replace(open=huge).to_bytes())


@cases("operand", "%2000000000d", ("n",))
def test_formulas_are_of_numbers(open_data: bytes, operand: Any) -> None:
    """So that a small file takes no time and memory."""
    step = SavedStep.from_bytes(open_data)
    assert step.open is not None
    place = len(step.open.values)
    values = (*step.open.values, operand, 1 << 30, operand)
    for name in ("mod", "mul"):
        steps = ((place + 2, name, (place, place + 1)),)
        damaged = step._replace(open=step.open._replace(values=values, steps=steps))
        refuses(EncodingError, "takes other branches", SavedStep.from_bytes, damaged.to_bytes())


def test_a_closed_step_with_lengths_is_refused(open_data: bytes) -> None:
    loaded = LoadedStep(SavedStep.from_bytes(open_data), LocalVM("closed"))
    arrays = [np.zeros(type.shape, type.dtype.numpy) for type in loaded.step.inputs]
    loaded(*arrays)
    loaded.close()
    longer = [np.repeat(array, 2, axis=0) for array in arrays]
    for each in (arrays, longer):
        refuses(HandleError, "this one was closed", loaded, *each)
    assert loaded.vm.consumed_size_in_mib() == 0


def test_a_change_of_lengths_that_fails_is_made_by_the_next_call(open_data: bytes) -> None:
    step = SavedStep.from_bytes(open_data)
    vm = LocalVM("full")
    loaded = LoadedStep(step, vm)
    arrays = [np.ones(type.shape, type.dtype.numpy) for type in step.inputs]
    longer = [np.repeat(array, 2, axis=0) for array in arrays]
    expected = [x.tolist() for x in LoadedStep(step, LocalVM("other"))(*longer)]
    loaded(*arrays)
    alloc, vm.alloc_storage = vm.alloc_storage, no_memory  # type: ignore[method-assign]
    refuses(OutOfMemoryError, "", loaded, *longer)
    vm.alloc_storage = alloc  # type: ignore[method-assign]
    assert [x.tolist() for x in loaded(*longer)] == expected


def no_memory(nbytes: int) -> Any:
    raise OutOfMemoryError(f"{nbytes} bytes")
