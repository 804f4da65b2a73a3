"""What eager code launches, listed and as one program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import HandleError, ProgramError
from mlvm.core.program.program import Function, Program
from mlvm.core.vm import VM
from mlvm.eager.capture.listing import Launch, concatenate, launches, program_of
from tests.core.programs import ADD_INTO, f32s, instruction, put, straight

NEGATE = Program.of_op("negative", 1, {}, 1)

# --- listing --------------------------------------------------------------------------


def test_launches_are_listed_in_order_and_run() -> None:
    vm = VM()
    x, y = put(vm, f32s(1)), put(vm, f32s(2))
    with launches(vm) as found:
        vm.launch(ADD_INTO, [x, x, y])
        assert vm.launch(NEGATE, (x,)) == [-3]
    vm.launch(NEGATE, [y])
    assert found == [(ADD_INTO, (x, x, y)), (NEGATE, (x,))]


def test_listing_ends_with_the_block_however_it_ends() -> None:
    vm = VM()
    x = put(vm, f32s(1))
    with pytest.raises(HandleError), launches(vm) as found:
        vm.launch(NEGATE, [0])
    vm.launch(NEGATE, [x])
    assert len(found) <= 1
    assert "launch" not in vars(vm)


def test_listings_nest() -> None:
    vm = VM()
    x = put(vm, f32s(1))
    with launches(vm) as outer:
        with launches(vm) as inner:
            vm.launch(NEGATE, [x])
        vm.launch(ADD_INTO, [x, x, x])
    assert inner == [(NEGATE, (x,))]
    assert outer == [(NEGATE, (x,)), (ADD_INTO, (x, x, x))]
    vm.launch(NEGATE, [x])
    assert len(outer) == 2


def test_only_the_given_vm_is_listed() -> None:
    vm, other = VM(), VM()
    with launches(vm) as found:
        other.launch(NEGATE, [put(other, f32s(1))])
    assert found == []


# --- one program ----------------------------------------------------------------------

one_op = st.tuples(
    st.sampled_from(["add.out", "multiply.out", "negative.out"]),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)


@given(st.lists(one_op, max_size=8))
def test_the_program_does_what_the_launches_did(ops: list[tuple[str, list[int]]]) -> None:
    """Launched on the old contents, it leaves the same tensors."""
    vm = VM()
    contents = [f32s(i, 2 * i + 1) for i in range(4)]
    handles = [put(vm, x) for x in contents]
    with launches(vm) as found:
        for name, operands in ops:
            arity = 2 if "negative" in name else 3
            program = Program.of_op(name, arity, {}, 0)
            assert vm.launch(program, [handles[i] for i in operands[:arity]]) == []
    after = [vm.read(handle) for handle in handles]
    for handle, content in zip(handles, contents, strict=True):
        vm.write(handle, content)
    assert vm.launch(concatenate(found)) == []
    np.testing.assert_array_equal([vm.read(handle) for handle in handles], after)


def test_the_program_loads_each_argument_by_its_handle() -> None:
    assert concatenate([(ADD_INTO, (7, 8, 7))]) == straight(
        ("push_int", 7),
        "load_global",
        ("push_int", 8),
        "load_global",
        ("push_int", 7),
        "load_global",
        ("push_str", "add.out"),
        ("cfunc", 3, 0),
        "halt",
    )
    assert concatenate([]) == straight("halt")


def test_nothing_after_a_halt_is_taken() -> None:
    program = straight(("push_int", 1), "halt", ("push_int", 2))
    assert concatenate([(program, ()), (program, ())]) == straight(
        ("push_int", 1), ("push_int", 1), "halt"
    )


HALT = instruction("halt")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (Program([Function("main", 0, 0, (HALT,)), Function("f", 0, 0, ())]), "straight programs"),
        (Program([Function("main", 0, 0, (HALT,))], {"c": f32s(1)}), "without constants"),
        (straight(("push_str", "add"), ("cfunc", "*", 1), "halt"), r"cfunc \*"),
        (straight(("push_str", "one"), ("cfunc", 0, 1), "halt"), "returns values"),
        (straight(("push_str", "some"), ("cfunc", 0, "*"), "halt"), "returns values"),
    ],
)
def test_what_cannot_be_concatenated(program: Program, text: str) -> None:
    found: list[Launch] = [(program, ())]
    with pytest.raises(ProgramError, match=text):
        concatenate(found)


def test_the_program_of_a_function_computes_it_again() -> None:
    vm = VM()
    with ml.Arena(vm, "step").allocating():
        x, y = ml.asarray(f32s(1, 2)), ml.asarray(f32s(3, 4))
        kept: list[Any] = []
        program = program_of(lambda x, y: kept.append(ml.tanh(x * y) + y), x, y)
        [result] = kept
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


def test_a_result_whose_shape_depends_on_values_is_refused() -> None:
    x = ml.asarray([1.0, -1.0])
    with pytest.raises(ProgramError, match="returns values"):
        ml.program_of(lambda x: x[x > 0], x)
