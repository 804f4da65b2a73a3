"""The program of eager code: `program_of` lists the launches of a call."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.vm import VM
from mlvm.eager.recording.listing import program_of
from tests.core.programs import f32s


def test_the_program_of_a_function_computes_it_again() -> None:
    vm = VM()
    with ml.Arena(vm, "step").allocating():
        x, y = ml.asarray(f32s(1, 2)), ml.asarray(f32s(3, 4))
        results: list[Any] = []
        program = program_of(lambda x, y: results.append(ml.tanh(x * y) + y), x, y)
        [result] = results
        expected = result.numpy()
        vm.write(result.handle, f32s(0, 0))
        assert vm.launch(program) == []
        np.testing.assert_array_equal(result.numpy(), expected)
        vm.write(x.handle, f32s(0, 0))
        vm.launch(program)
        np.testing.assert_array_equal(result.numpy(), [3, 4])
    names = [i.immediates[0] for i in program.main.code if i.opcode.text == "push_str"]
    assert names == ["multiply.out", "tanh.out", "add.out"]


def test_launching_it_again_overwrites_nobody_elses_tensors() -> None:
    w = ml.ones((4, 2))
    program = ml.program_of(lambda w: ml.mean(ml.exp(w) * 2.0), w)
    others = [ml.full((4, 2), 7.0), ml.full((), 7.0)]
    w.arena.vm.launch(program)
    assert all(np.all(x.numpy() == 7.0) for x in others)


def test_its_memory_ends_with_it() -> None:
    vm = VM()
    with Arena(vm, "batch").allocating():
        w = ml.ones((4, 2))
        before = vm.consumed_size_in_mib()
        program = ml.program_of(lambda w: ml.exp(w) * 2.0, w)
        assert vm.consumed_size_in_mib() > before
        del program
        assert vm.consumed_size_in_mib() == before
