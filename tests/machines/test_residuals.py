"""Records of residuals: the stack in C, and the reference one, do the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import HostFunctionError, OutOfMemoryError
from mlvm.core.ops.half import cast, shown
from mlvm.core.program.assembly import assemble
from mlvm.core.types import DType
from mlvm.machines import residuals
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.watchdog import Watchdog
from tests.core.programs import put
from tests.machines.libraries import MACHINES

pytestmark = pytest.mark.parametrize("native", MACHINES)
TURNS = 600  # more than a chunk has room for


def program(*calls: tuple[str, ...]) -> Any:
    """Calls of residuals' functions on arguments, given by their numbers."""
    lines = [".func main 0 *"]
    for name, *arguments in calls:
        lines += [f"    load_arg {i}" for i in arguments]
        lines += [f'    push_str "residuals.{name}"', f"    cfunc {len(arguments)} 0"]
    return assemble("\n".join([*lines, "    halt"]))


def launched(vm: LocalVM, arrays: list[Any], *calls: tuple[str, ...]) -> list[Any]:
    handles = [put(vm, array) for array in arrays]
    vm.launch(program(*calls), handles)
    return [vm.read(handle) for handle in handles]


def test_what_is_pushed_is_read(native: bool) -> None:
    operands = [np.asarray(0), np.arange(6, dtype=np.float32).reshape(2, 3), np.asarray(True)]
    operands += [np.zeros((0, 2)), np.asarray(5 + 1j), *[np.full_like(x, 1) for x in operands[1:]]]
    operands += [np.zeros((0, 2)), np.asarray(0j), np.asarray(0)]
    outputs = launched(
        LocalVM(native=native), operands,
        ("begin",), ("push", "0", "1"), ("push", "0", "1", "2", "3", "4"),
        ("read", "5", "6", "7", "8", "0"), ("read", "1", "9"), ("end",),
    )  # fmt: skip
    assert int(outputs[0]) == 2  # the second record
    assert [x.tolist() for x in outputs[5:9]] == [x.tolist() for x in operands[1:5]]
    assert not outputs[1].any()  # number 0 is a record of zeros


def test_sums_of_records_are_those_of_all_that_they_name(native: bool) -> None:
    """Chains: each record has the number of the one before. The second is shorter."""
    number, zero = np.asarray(0), np.asarray(0)
    chain = [("push", "0", "0", "2")] * TURNS, [("push", "1", "1", "3")] * (TURNS - 1)
    reads = [("read", "4", "5", "4")] * TURNS
    operands = [number, zero, np.asarray(1.5), np.asarray([2.0]), zero, np.asarray(0.0)]
    operands[3] = np.asarray(0.25)
    calls: list[Any] = [("begin",), *chain[0], *chain[1], ("add", "4", "0", "1")]
    vm = LocalVM(native=native)
    first = launched(vm, operands, *calls, ("read", "4", "5", "4"), ("end",))
    last = launched(vm, operands, *calls, *reads, ("end",))
    assert (float(first[5]), float(last[5]), int(last[4])) == (1.75, 1.5, 0)
    assert residuals.stack_bytes(vm) > 1 << 16


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_sums_of_records_are_those_of_add(dtype: str, native: bool) -> None:
    """Three records, two of which are summed first; each names another, which has a vector."""
    kind = DType.named(dtype)
    parts = [cast(np.asarray([1.001, -2.5, 6e4, np.nan]) * k, kind) for k in (1.0, 0.7, -0.3)]
    numbers = [np.asarray(0) for _ in range(7)]
    push: list[tuple[str, ...]] = [("push", str(i), str(7 + i)) for i in range(3)]
    push += [("push", str(3 + i), str(i), str(7 + i)) for i in range(3)]
    sums = ("add", "6", "3", "4"), ("add", "6", "6", "5")
    read = ("read", "0", "10", "6"), ("read", "11", "0")
    out = [np.zeros_like(parts[0]), np.zeros_like(parts[0])]
    vm = LocalVM(native=native)
    calls = ("begin",), *push, *sums, *read, ("end",)
    with np.errstate(all="ignore"):
        *_, own, named = launched(vm, [*numbers, *parts, *out], *calls)
        total = cast(shown(parts[0]) + shown(parts[1]), kind)
        total = cast(shown(total) + shown(parts[2]), kind)
    assert own.tobytes() == named.tobytes() == total.tobytes()


def test_each_row_is_read_from_its_own_record(native: bool) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    numbers = np.asarray([2, 0, 1])
    outputs = launched(
        LocalVM(native=native), [np.asarray(0), x, 10 * x, numbers, np.ones_like(x)],
        ("begin",), ("push", "0", "1"), ("push", "0", "2"), ("read_rows", "4", "3"), ("end",),
    )  # fmt: skip
    assert outputs[4].tolist() == [[0, 10], [0, 0], [4, 5]]


def test_a_record_that_names_itself_has_no_sum(native: bool) -> None:
    numbers = [np.asarray(0), np.asarray(0), np.asarray(1), np.asarray(2), np.asarray(0)]
    calls = ("push", "0", "2"), ("push", "1", "3"), ("add", "4", "0", "1")
    with pytest.raises(HostFunctionError, match=r"residuals\.add: "):
        launched(LocalVM(native=native), numbers, ("begin",), *calls, ("end",))


def test_records_end_with_their_program_and_memory_is_kept(native: bool) -> None:
    vm, x = LocalVM(native=native), np.zeros(1000)
    calls = ("begin",), *[("push", "0", "1")] * 20, ("end",)
    assert int(launched(vm, [np.asarray(0), x], *calls)[0]) == 20
    nbytes = residuals.stack_bytes(vm)
    assert int(launched(vm, [np.asarray(0), x], *calls)[0]) == 20  # counted anew
    assert residuals.stack_bytes(vm) == nbytes > 160_000
    message = r"residuals.read: unknown record 20 of 1 tensors"
    with pytest.raises(HostFunctionError, match=message):
        launched(vm, [np.asarray(20), x], ("begin",), ("read", "1", "0"), ("end",))


def test_records_beyond_the_limit_of_a_vm_are_an_error(native: bool) -> None:
    vm = BoundedVM("bounded", Limits(held_bytes=1 << 20), Watchdog(), native=native)
    calls = ("begin",), *[("push", "0", "1")] * 20, ("end",)
    with pytest.raises(OutOfMemoryError, match="the limit is 1,048,576"):
        launched(vm, [np.asarray(0), np.zeros(10_000)], *calls)
    assert int(launched(vm, [np.asarray(0), np.zeros(10)], *calls)[0]) == 20


WRONG = {
    "another shape": ([np.asarray(0), np.zeros(2), np.zeros((2, 1))], ("read", "2", "0"), "of 1 "),
    "another dtype": ([np.asarray(0), np.zeros(2), np.zeros(2, int)], ("read", "2", "0"), "of 1 "),
    "too many": (
        [np.asarray(0), np.zeros(2), np.zeros(2)],
        ("read", "2", "2", "0"),
        "of 2 tensors",
    ),
    "no number": ([np.asarray(0), np.zeros(2), np.zeros(2)], ("read", "0", "2"), "and an i64"),
    "nothing": ([np.asarray(0), np.zeros(2)], ("push",), "(takes|expected) tensors"),
    "another number of rows": (
        [np.asarray(0), np.zeros(2), np.zeros((2, 2)), np.zeros(3, int)],
        ("read_rows", "2", "3"),
        "a row of each",
    ),
    "negative": (
        [np.asarray(0), np.zeros(2), np.asarray(-1)],
        ("read", "1", "2"),
        "unknown record -1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(name: str, native: bool) -> None:
    arrays, call, message = WRONG[name]
    with pytest.raises(HostFunctionError, match=rf"residuals.{call[0]}: .*{message}"):
        launched(LocalVM(native=native), arrays, ("begin",), ("push", "0", "1"), call, ("end",))
