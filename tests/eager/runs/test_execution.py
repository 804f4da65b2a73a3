"""Captured calls op by op: the bits of the call, forwards and backwards, and on paper."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.program.assembly import assemble as assembled
from mlvm.core.types import bf16
from mlvm.eager.capture.capture import Captured
from mlvm.eager.runs.execution import Execution, Ref, vm_like
from mlvm.eager.runs.ops import OpProgram, op_program
from mlvm.machines.digest import digest
from tests.brief import cases
from tests.eager.capture.test_models import MODELS, Run


def execution_of(step: Any, *args: Any) -> Execution:
    program, inputs = op_program(step, args, {})
    return Execution(program, inputs, vm=vm_like(ml.default_vm(), program))


def digests(arrays: Any) -> list[bytes]:
    return [digest(np.asarray(x)) for x in arrays]


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_have_the_bits_of_captured_ones(name: str) -> None:
    """Dropout, random draws, gradients, and updates of parameters and of optimizer state."""
    run = Run(name, ml.capture)
    draws = np.random.default_rng(0)
    for _ in range(3):
        images = draws.standard_normal((8, 8, 8, 1)).astype(np.float32)
        labels = draws.integers(0, 10, 8)
        with run.batch:
            args = ml.asarray(images), ml.asarray(labels)
            program, inputs = op_program(run.step, args, {})
            execution = Execution(program, inputs)
            execution.run()
            results = run.step(*args)
            assert digests(execution.results()) == digests([x.numpy() for x in results])
            after, _ = op_program(run.step, args, {})
            assert after.states == program.states
            assert digests(execution.states()) == digests(after.step.states)
            assert digests(program.step.states) != digests(after.step.states)


w = ml.asarray(np.random.default_rng(0).normal(size=(3, 3)), dtype="f32")


def looped(x: ml.Tensor, n: ml.Tensor) -> Any:
    def loss(x: ml.Tensor) -> ml.Tensor:
        def body(state: Any) -> Any:
            i, a = state
            q = ml.tanh(a @ w)
            return i + 1, q

        _, a = ml.while_loop(lambda state: state[0] < n, body, (ml.asarray(0), x))
        return ml.sum(a)

    return ml.value_and_grad(loss)(x)


@ml.subroutine
def wasteful(n: ml.Tensor) -> ml.Tensor:
    y = n * 2.0
    _ = n + 3.0  # its memory ends with the function
    return y


def captured(fn: Callable[..., Any]) -> Captured[..., Any]:
    return ml.capture(fn)


@ml.subroutine
def factorial(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n <= 1, ml.ones_like, lambda n: n * factorial(n - 1), n)


def scanned(x: ml.Tensor) -> Any:
    return ml.scan(lambda carry, row: (carry * 0.5 + row, carry), ml.zeros(3), x)


def drawn(x: ml.Tensor) -> ml.Tensor:
    return ml.dropout(x, 0.5) + ml.random.normal(x.shape, key=ml.random.key(3))


STEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "while_loop and its gradient": (looped, (ml.ones((3, 3)), ml.asarray(4))),
    "recursion": (lambda n: factorial(n), (ml.asarray(5.0),)),
    "a function whose last result is not used": (lambda n: wasteful(n), (ml.asarray(5.0),)),
    "scan": (scanned, (ml.asarray(np.arange(12.0).reshape(4, 3), dtype="f32"),)),
    "random keys": (drawn, (ml.ones((4, 3)),)),
    "switch": (
        lambda i, x: ml.switch(i, [ml.sin, ml.cos, ml.exp], x),
        (ml.asarray(1), ml.asarray([0.5])),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_back_and_forth_have_equal_bits(name: str) -> None:
    fn, args = STEPS[name]
    step = ml.capture(fn)
    execution = execution_of(step, *args)
    seen: list[list[bytes]] = []
    while (op := execution.step()) is not None:
        seen.append(digests(execution.value(ref) for ref in op.results))
    assert execution.is_finished
    assert execution.position == execution.length == len(seen)
    draw = random.Random(0)
    for _ in range(100):
        position = draw.randrange(len(seen) + 1)
        assert execution.run(position) == execution.position == position
        if position:
            op = execution.op_at(position - 1)
            assert op is not None
            assert digests(execution.value(ref) for ref in op.results) == seen[position - 1]
    execution.run()
    value = step(*args)
    leaves = [x.numpy() for x in value] if isinstance(value, tuple) else [value.numpy()]
    assert digests(execution.results()) == digests(leaves)


def test_many_ops_need_few_snapshots() -> None:
    step = ml.capture(lambda x: ml.fori_loop(0, 500, lambda i, x: x * 0.5 + 1.0, x))
    execution = execution_of(step, ml.ones(2))
    execution.run()
    last = execution.position
    assert last > 2000
    assert len(execution._snapshots) <= 33
    execution.run(last - 1)
    assert execution.position == last - 1


def test_a_value_of_another_time_is_computed_again() -> None:
    step = ml.capture(lambda x: ml.sum(ml.exp(ml.sin(x))))
    execution = execution_of(step, ml.asarray([0.5, 1.0]))
    first = execution.value(Ref("result", 0))  # the position stays at 0
    assert execution.position == 0
    assert digest(first) == digest(ml.sin(ml.asarray([0.5, 1.0])).numpy())
    execution.run()
    assert digest(execution.value(Ref("result", 0))) == digest(first)
    assert execution.is_finished
    assert np.array_equal(execution.value(Ref("input", 0)), np.array([0.5, 1.0], np.float32))


def test_an_op_that_raises_leaves_the_position() -> None:
    def step(x: ml.Tensor) -> ml.Tensor:
        ml.check(ml.all(x > 0.0), "x is positive")
        return x + 1.0

    execution = execution_of(ml.capture(step), ml.asarray([-1.0]))
    with pytest.raises(ml.errors.CheckError) as failed:
        execution.run()
    position = execution.position
    assert not execution.is_finished
    assert any("test_execution.py" in note for note in failed.value.__notes__)
    op = execution.next_op()
    assert op is not None
    assert op.name == "machine.check"
    execution.run(0)
    with pytest.raises(ml.errors.CheckError):
        execution.run()
    assert execution.position == position


@pytest.mark.local(reason="executions run on a VM of this process")
def test_a_users_function_is_called() -> None:
    vm = ml.VM("mine")
    vm.register("twice", lambda frame: frame.push(frame.param(0) * 2), result=lambda x: x)
    with ml.use(vm):
        step = ml.capture(lambda x: ml.host_call("twice", x) + 1.0)
        x = ml.asarray([1.0, 2.0])
        program, inputs = op_program(step, (x,), {})
        execution = Execution(program, inputs, vm=vm_like(vm, program))
        execution.run()
        assert digests(execution.results()) == digests([step(x).numpy()])


def test_ops_know_their_lines_names_and_loops() -> None:
    def step(x: ml.Tensor) -> ml.Tensor:
        q = ml.tanh(x @ w)

        def body(i: ml.Tensor, a: ml.Tensor) -> ml.Tensor:
            b: ml.Tensor = a * 2.0
            return b + 1.0

        return ml.fori_loop(0, 3, body, q)

    execution = execution_of(ml.capture(step), ml.ones((3, 3)))
    execution.run()
    named: dict[str, list[Any]] = {}
    for op in execution.executed:
        for name in op.names:
            named.setdefault(name, []).append(op)
    assert [op.name for op in named["q"]] == ["tanh"]
    assert [op.path[-1].turn for op in named["b"]] == [0, 1, 2]
    line = named["b"][0].line
    assert line is not None
    assert (line.text, line.function.rpartition(".")[2]) == ("b: ml.Tensor = a * 2.0", "body")
    assert execution.program.inputs == ("x",)
    assert "w" in execution.program.states


def test_arrays_are_taken_as_a_call_takes_them() -> None:
    step = ml.capture(lambda x: x @ w)
    x = np.random.default_rng(0).normal(size=(2, 3))  # f64
    execution = execution_of(step, x)
    execution.run()
    assert digests(execution.results()) == digests([step(x).numpy()])


def test_names_of_states_are_paths() -> None:
    model = ml.nn.Linear(3, 2)
    optimizer = ml.optim.SGD(model, 0.1, momentum=0.9)

    def step(x: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(lambda model: ml.sum(model(x)))(model)
        optimizer.update(gradients)
        return loss

    program, _ = op_program(ml.capture(step), (ml.ones((4, 3)),), {})
    assert {"model.kernel", "model.bias"} <= {*program.states}


# --- digests and files -----------------------------------------------------------------------


@cases(
    "x, y",
    (np.array([1.0], np.float32), np.array([1.0], np.float64)),
    (np.array([1.0], np.float32), np.array([[1.0]], np.float32)),
    (np.array([0.0], np.float32), np.array([-0.0], np.float32)),
    (np.array([1], np.int32), np.array([1], np.uint32)),
    (np.zeros((0, 2), np.int8), np.zeros((2, 0), np.int8)),
)
def test_different_tensors_have_different_digests(x: Any, y: Any) -> None:
    assert digest(x) != digest(y)


@cases(
    "x, y",
    (np.array([np.nan, 1.0], np.float32), np.array([-np.nan, 1.0], np.float32)),
    (np.float64(np.nan), -np.float64(np.nan)),
    (np.array([np.nan], np.float16), -np.array([np.nan], np.float16)),
    (
        np.array([0x7FC1, 0x3F80], np.uint16).view(bf16.numpy),
        np.array([0xFFC0, 0x3F80], np.uint16).view(bf16.numpy),
    ),
    (
        np.array([complex(1.0, np.nan)], np.complex64),
        np.array([complex(1.0, -np.nan)], np.complex64),
    ),
    (np.arange(6.0).reshape(2, 3).T, np.ascontiguousarray(np.arange(6.0).reshape(2, 3).T)),
)
def test_equal_tensors_have_equal_digests(x: Any, y: Any) -> None:
    assert digest(np.asarray(x)) == digest(np.asarray(y))


def program_of_loop() -> OpProgram:
    fn, args = STEPS["while_loop and its gradient"]
    return op_program(ml.capture(fn), args, {})[0]


def test_a_program_is_read_back() -> None:
    program = program_of_loop()
    again = OpProgram.from_bytes(program.to_bytes())
    assert again.to_bytes() == program.to_bytes()
    assert (again.lines, again.values) == (program.lines, program.values)


def test_damaged_programs_raise_typed_errors() -> None:
    data, draw = program_of_loop().to_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(data))] = draw.randrange(256)
        cut = damaged[: draw.randrange(len(data))] if draw.random() < 0.2 else damaged
        with suppress(ml.errors.MlvmError):
            OpProgram.from_bytes(bytes(cut))


@cases(
    "text, error",
    ("again:\n jump again", "an op within 1,000,000 instructions"),
    ("call f\n halt\n.func f 0 0\n call f\n return 0", "call depth of at most"),
    ("push_int 3\n load_global\n pop 1\n halt", "expected a captured step"),
    ("get 7\n halt", "slot"),
)
def test_programs_that_no_step_has_are_refused(text: str, error: str) -> None:
    program, _ = op_program(captured(lambda: ml.ones(2)), (), {})
    planned = program.step.planned
    other = replace(planned, program=assembled(f".func main 0 *\n {text}"), arguments=())
    with pytest.raises(ml.errors.MlvmError, match=error):
        Execution(program._replace(step=program.step._replace(planned=other)), [])


def test_wrong_uses_are_refused() -> None:
    program, inputs = op_program(captured(lambda x: x + 1.0), (ml.ones(2),), {})
    with pytest.raises(ml.errors.ProgramError, match="expected 1 inputs, got 0"):
        Execution(program, [])
    with pytest.raises(ml.errors.ShapeError, match=r"expected input 0 as f32\[2\]"):
        Execution(program, [np.ones(3, np.float32)])
    execution = Execution(program, inputs)
    for call in (
        lambda: execution.run(-1),
        lambda: execution.op_at(-1),
        lambda: execution.value(Ref("result", 99)),
        lambda: execution.value(Ref("result", 0, 7)),
        lambda: execution.value(Ref("state", 99)),
        lambda: execution.value(Ref("nothing", 0)),
    ):
        with pytest.raises(ml.errors.ArgumentError):
            call()
    with pytest.raises(ml.errors.EncodingError):
        OpProgram.from_bytes(b"nothing")
    with pytest.raises(ml.errors.CaptureError):
        op_program(captured(lambda x: float(x)), (ml.ones(()),), {})
