"""Several launches as one program."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.program.program import Program
from mlvm.core.vm import VM
from mlvm.step.concatenate import Launch, concatenate
from tests.cases.claim_tests import claims
from tests.core.programs import ADD_INTO, f32s, instruction, put, straight

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
    launches: list[Launch] = []
    for name, operands in ops:
        arity = 2 if "negative" in name else 3
        program = Program.of_op(name, arity, {}, 0)
        launches.append((program, tuple([handles[i] for i in operands[:arity]])))
        assert vm.launch(*launches[-1]) == []
    after = [vm.read(handle) for handle in handles]
    for handle, content in zip(handles, contents, strict=True):
        vm.write(handle, content)
    assert vm.launch(concatenate(launches)) == []
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


HALT = instruction("halt")


test_rows = claims("concatenate", globals())
