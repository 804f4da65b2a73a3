"""Collectives against numpy: for groups of 1 to 3, in all dtypes, of all lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core import errors
from mlvm.core.ops.half import cast
from mlvm.core.program.assembly import assemble, disassemble
from mlvm.core.program.program import Function, Instruction, Opcode, Program
from mlvm.core.types import Array, DType, TensorType
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.group import Group
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import put
from tests.parallel.members import call, gathered, run
from tests.parallel.places import reduced

pytest.importorskip("threadpoolctl")


def inputs(size: int, shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    drawn = [np.asarray(100 * rng.standard_normal(shape)) for _ in range(size)]
    with np.errstate(invalid="ignore"):
        return [cast(x, DType.named(dtype)) for x in drawn]


@pytest.mark.parametrize("dtype", list(DType.all))
def test_all_reduce_takes_every_dtype(dtype: str) -> None:
    xs = inputs(3, (9,), dtype)
    ops = {"bool": ["max"], "c64": ["sum", "mean"], "c128": ["sum", "mean"]}
    for op in ops.get(dtype, ["sum", "max", "min"]):
        for y in gathered(xs, "all_reduce", op=op):
            np.testing.assert_array_equal(y, reduced(xs, op), strict=True)


def test_a_barrier_is_passed_when_all_are_there() -> None:
    here: list[int] = []

    def step(rank: int, vm: VM) -> int:
        here.append(rank)
        call(vm, "barrier")
        return len(here)

    assert run(3, step) == [3, 3, 3]


def test_programs_contain_collectives() -> None:
    text = """
    ; the sum of squares over all members, in place of argument 0
    .func main 0 *
        load_arg 0
        load_arg 0
        load_arg 0
        push_str "multiply.out"
        cfunc 3 0
        load_arg 0
        push_str "all_reduce"
        cfunc 1 0 {"op": "sum"}
        push_str "barrier"
        cfunc 0 0
        load_arg 0
        push_str "all_gather"
        cfunc 1 1
        halt
    """
    program = assemble(text)
    assert assemble(disassemble(program)) == program
    xs = inputs(2, (6,))
    total = reduced([x * x for x in xs], "sum")
    for [y] in run(2, lambda rank, vm: vm.launch(program, [put(vm, xs[rank])])):
        np.testing.assert_array_equal(y, np.concatenate([total, total]), strict=True)


def test_a_launch_costs_no_memory() -> None:
    def step(rank: int, vm: VM) -> float:
        before = vm.consumed_size_in_mib()
        for _ in range(3):
            call(vm, "all_gather", np.ones(1000, np.float32))
        return vm.consumed_size_in_mib() - before

    assert run(2, step) == [0, 0]


def test_a_vm_with_workers_takes_part() -> None:
    with Group([VM("a", workers=1), VM("b", workers=2)]) as group:
        xs = inputs(2, (1000,))
        for y in group.run(lambda rank, vm: call(vm, "all_reduce", xs[rank])[0]):
            np.testing.assert_array_equal(y, reduced(xs, "sum"))
        for vm in group.vms:
            vm.close()


def test_programs_with_collectives_are_verified() -> None:
    with Group(2) as group:
        program = Program.of_op("all_gather.out", 2, {}, 0)
        with pytest.raises(errors.ShapeError, match=r"the result.s type f32\[6\]"):
            group.vms[0].estimate(program, [TensorType("f32", (3,)), TensorType("f32", (3,))])
        with pytest.raises(errors.ProgramError, match="returns 1 result, the call expects 2"):
            group.vms[0].estimate(Program.of_op("all_gather", 1, {}, 2), [TensorType("f32", (3,))])


def test_a_result_that_overlaps_an_operand_is_refused() -> None:
    def step(rank: int, vm: VM) -> None:
        storage = vm.alloc_storage(64)
        x = vm.tensor_from_storage(storage, TensorType("f32", (4,)), 0)
        y = vm.tensor_from_storage(storage, TensorType("f32", (2,)), 8)
        vm.launch(Program.of_op("reduce_scatter.out", 2, {}, 0), (y, x))

    refuses(errors.MachineError, "would overwrite an operand while reading it", run, 2, step)


@cases("name", "all_reduce", "broadcast")
def test_a_constant_is_not_overwritten(name: str) -> None:
    x = Instruction(Opcode.push_const, ("x",))
    *_, push, cfunc, halt = Program.of_op(name, 1, {}, 0).main.code
    main = Function("main", 0, "*", (x, push, cfunc, halt))
    program = Program([main], {"x": np.ones(2)})
    with pytest.raises(errors.MachineError, match=f"{name} would write to a constant"):
        run(2, lambda rank, vm: vm.launch(program))


def test_a_collective_outside_of_a_run_says_so() -> None:
    with (
        Group(2) as group,
        pytest.raises(errors.GroupError, match=r"vm0\) is not in a run of its group"),
    ):
        call(group.vms[0], "all_reduce", np.ones(3))


test_rows = claims("collectives", globals())


def met(name: str, x: Array, **attributes: Any) -> None:
    """Call a collective of two in vain: the error says who raised it."""
    error = refuses(errors.MlvmError, "", run, 2, lambda rank, vm: call(vm, name, x, **attributes))
    assert any("raised by member" in note for note in error.__notes__)
    raise error
