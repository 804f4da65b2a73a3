"""Errors of posts: what was to be made by them, or by what was passed over, has no value."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import PositionError
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.vm import VM
from mlvm.machines.accesses import uses_of
from tests.brief import cases, refuses
from tests.core.programs import f32s, put
from tests.machines.remote.serving import F32X3, Served

BAD = "take(i64[3], i64[1]): index 7 at position [0] is out of range for length 3"


@cases("native", None, False)
@cases("captured", False, True)
def test_what_was_passed_over_has_no_value(native: bool | None, captured: bool) -> None:
    def more(x: ml.Tensor) -> Any:
        return ml.fori_loop(0, 3, lambda i, y: y + 1, x + 1)

    def plus(z: ml.Tensor) -> object:
        return (z + total[0]).numpy()

    with (
        Served(options={"native": native}) as server,
        server.vm() as vm,
        ml.Arena(vm, "a").allocating(),
    ):
        x, step = ml.asarray([1, 4, 9]), ml.capture(more) if captured else more
        w, total = ml.asarray([1, 2, 3]), ml.zeros(3)
        for index in (0, 0, 0, 7):  # when programs and memory are there, nothing waits
            y = z = lost = at = None  # and it is the same memory
            at = ml.asarray([index])
            y = ml.take(x, at)
            z = step(x)
            w += 1
            if not index:
                assert z.tolist() == [5, 8, 13]
                continue
            refuses(PositionError, r"index 7", vm.synchronize)
            for lost in (y, z, z[1:]):
                for _ in range(2):
                    caught = refuses(PositionError, r"index 7", lost.numpy)
                    assert str(caught) == BAD
                    assert caught.__notes__[-1].startswith(f"called from {__file__}:")
            refuses(PositionError, r"index 7", partial(plus, z))
            assert "index 7" in str(refuses(PositionError, "", repr, z))
            assert x.tolist() == [1, 4, 9]
            assert w.tolist() == [4, 5, 6]  # what was to be updated is as it was
            y = z = lost = None
            assert step(x).tolist() == [5, 8, 13]  # and what is written again has a value
            assert total.tolist() == [0, 0, 0]


def test_what_a_launch_updates_keeps_its_value_and_what_it_makes_has_none() -> None:
    take, add = Program.of_op("take.out", 3, {"axis": 0}, 0), Program.of_op("add.out", 3, {}, 0)
    with Served() as server, server.vm() as vm:
        y, out = (vm.alloc_tensor(F32X3) for _ in range(2))
        x, index = put(vm, f32s(1, 1, 1)), put(vm, np.full(3, 9))
        for late in (
            lambda: vm.write(out, np.ones(3, np.float32)),
            lambda: vm.launch(add, [out, x, x]),
        ):
            vm.loaded(add)
            vm.loaded(take)
            vm.launch(take, [y, x, index])
            late()
            refuses(PositionError, "index 9", vm.synchronize)
            refuses(PositionError, "index 9", vm.read, out)
            refuses(PositionError, "index 9", vm.read, y)
            for handle in (x, out):
                vm.write(handle, np.ones(3, np.float32))
                assert vm.read(handle).tolist() == [1, 1, 1]


CALLED = """.func f 2 0
    get -2
    get -1
    push_str "negative.out"
    cfunc 2 0
    return 0
.func main 0 *
    load_arg 3
    jump_if_false end
    load_arg 0
    load_arg 1
    call f
    load_arg 2
    load_arg 0
    call f
end:
    load_arg 1
    load_arg 1
    load_arg 2
    push_str "add.out"
    cfunc 3 0
    halt
"""


def test_what_a_program_makes_is_known_through_jumps_and_calls() -> None:
    uses = uses_of(assemble(CALLED), VM().functions, 4)
    assert uses.makes == {0, 2}
    assert uses.reads == {1, 3}
    unknown = assemble(".func main 0 *\n    load_arg 1\n    load_arg 0\n    cfunc 1 0\n    halt\n")
    assert uses_of(unknown, VM().functions, 2).makes == {0, 1}  # it cannot be verified
