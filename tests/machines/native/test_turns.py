"""Loops of short kernel calls, which run without steps of the loop in C (`plan/turns.c`)."""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import OperandValueError
from mlvm.core.program.assembly import assemble
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from tests.alarms import require_interruptible
from tests.brief import cases, refuses
from tests.core.programs import put
from tests.machines.native.test_loop import both

if extension.EXTENSION is None:
    pytest.skip(extension.REASON, allow_module_level=True)

CONDITION = 'load_arg 3\nload_arg 0\nload_arg 2\npush_str "less.out"\ncfunc 3 0\n'
COUNT = 'load_arg 0\nload_arg 0\nload_arg 1\npush_str "add.out"\ncfunc 3 0\n'
BODIES = {
    "one op": "",
    "a chain": """
        load_arg 4
        load_arg 4
        load_arg 5
        push_str "fused"
        cfunc 3 0 {"chain": [["sin", -1, 1], ["floor_divide", -2, 2, -1], ["add", 0, 1, -2]],
                   "outputs": 1}
        """.replace("\n                   ", " "),
    "rows": """
        load_arg 4
        load_arg 6
        load_arg 0
        push_str "take.out"
        cfunc 3 0 {"axis": 0}
        load_arg 6
        load_arg 6
        load_arg 5
        load_arg 0
        push_str "dynamic_update.out"
        cfunc 4 0 {"axis": 0}
        """,
    "a vector": 'load_arg 6\nload_arg 6\nload_arg 4\npush_str "multiply.out"\ncfunc 3 0\n',
    "a loop": """
        load_arg 7
        load_arg 2
        push_str "copy.out"
        cfunc 2 0
        inner:
        load_arg 8
        load_arg 0
        load_arg 7
        push_str "less.out"
        cfunc 3 0
        load_arg 8
        jump_if_false behind
        load_arg 7
        load_arg 7
        load_arg 1
        push_str "subtract.out"
        cfunc 3 0
        jump inner
        behind:
        """,
}


def loop(body: str) -> str:
    return (
        f"again:\n{CONDITION}load_arg 3\njump_if_false leave\n{body}{COUNT}jump again\nleave:\nhalt"
    )


AT_INDEX = {  # 4: index, 5: position in a matrix, 6: rows, 7: a row, 8: the second index
    "take": ("7 6 4", 'take.out {"axis": 0}'),
    "dynamic_update": ("6 6 7 4", 'dynamic_update.out {"axis": 0}'),
    "index_set": ("6 6 7 4", 'index_set.out {"axis": 0, "axes": 1}'),
    "flat_indices": ("5 4 8", 'flat_indices.out {"lengths": [5, 7]}'),
    "three indices": ("5 8 4 8", 'flat_indices.out {"lengths": [7, 5, 7]}'),
    "take at two": (
        "5 4 8",
        'flat_indices.out {"lengths": [5, 7]}',
        "7 6 5",
        'take.out {"axis": 0}',
    ),
    "set at two": (
        *("5 4 8", 'flat_indices.out {"lengths": [5, 7]}'),
        *("6 6 7 5", 'index_set.out {"axis": 0, "axes": 1}'),
    ),
}


def calls(*words: str) -> str:
    """The calls of pairs of parameters and an op with its attributes."""
    text = ""
    for parameters, op in zip(words[::2], words[1::2], strict=True):
        name, _, attributes = op.partition(" ")
        loads = "".join([f"load_arg {i}\n" for i in parameters.split()])
        text += f'{loads}push_str "{name}"\ncfunc {len(parameters.split())} 0 {attributes}\n'
    return text


def window(start: int) -> str:
    return f'{{"start": [{start}], "length": [1], "step": [1]}}'


def operands(turns: int, rows: int = 50) -> list[Array]:
    integers = [np.array(n) for n in (0, 1, turns)]
    floats = [np.array(0.75), np.array(1.5), np.linspace(-1, 1, rows)]
    return [*integers, np.array(True), *floats, np.array(0), np.array(True)]


@cases("body", *BODIES)
@cases("turns", 0, 1, 2, 7, 40)
@cases("max_steps", None, 100)
def test_turns_have_the_results_of_the_steps(body: str, turns: int, max_steps: int | None) -> None:
    both(loop(BODIES[body]), *operands(turns), max_steps=max_steps)


@cases("rows", 1, 2, 20)
def test_a_turn_that_a_kernel_rejects_fails_in_its_step(rows: int) -> None:
    both(loop(BODIES["a chain"] + BODIES["rows"]), *operands(40, rows))


def at_indices(body: str, turns: int, first: Array, second: Array, rows: Array) -> None:
    """Run turns in which the first index grows by one."""
    change = calls("4 4 9", "add.out") if first.dtype.kind in "iu" else ""
    state = [first, np.array(0), rows, np.array(rows[3]), second, np.ones((), first.dtype)]
    integers = [np.array(n) for n in (0, 1, turns)]
    both(loop(calls(*AT_INDEX[body]) + change), *integers, np.array(True), *state)


@cases("dtype", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
@cases("body", *AT_INDEX)
@cases("turns", 3, 9)
def test_an_index_of_any_dtype_until_it_is_out_of_range(body: str, turns: int, dtype: str) -> None:
    size = 35 if "two" in body else 5
    firsts = (0, 2) if dtype[0] == "u" else (-5, -1, 2, -6)
    for first in firsts:
        index, second = np.array(first, dtype), np.array(6 - (first < 0) * 7, dtype)
        at_indices(body, turns, index, second, np.arange(size) * 1.5)


@cases("second", 7, -8, 1 << 40, -(1 << 63))
@cases("body", "flat_indices", "three indices", "take at two", "set at two")
def test_a_second_index_out_of_range(body: str, second: int) -> None:
    at_indices(body, 3, np.array(1), np.array(second), np.arange(35.0))


def test_an_index_beyond_the_signed_integers_is_out_of_range() -> None:
    for body in ("take", "dynamic_update", "index_set", "flat_indices"):
        index = np.array((1 << 64) - 2, "u8")
        at_indices(body, 3, index, np.array(1), np.arange(5.0))


@cases("dtype", "?", "i1", "i2", "i4", "f4", "f8")
@cases("shape", (), (1,), (3,), (2, 5), (0,))
@cases("body", "take", "dynamic_update", "index_set")
def test_rows_of_any_size_at_an_index(body: str, shape: tuple[int, ...], dtype: str) -> None:
    rows = (np.arange(5 * int(np.prod(shape))).reshape(5, *shape) % 3).astype(dtype)
    for turns in (4, 9):
        at_indices(body, turns, np.array(-3), np.array(0), rows)


@cases("dtype", "?", "i1", "i2", "i4", "f8")
@cases("shape", (), (1,))
def test_windows_of_one_run_are_copied(shape: tuple[int, ...], dtype: str) -> None:
    x, value = (np.arange(5) % 3).astype(dtype), np.ones(shape, dtype)
    body = calls(*("4 5", f"slice.out {window(2)}", "5 5 4", f"slice_set.out {window(4)}"))
    body += calls(*("6 5", "copy.out", "6 6 7", f"slice_set.out {window(1)}"))
    integers = [np.array(n) for n in (0, 1, 4)]
    both(loop(body), *integers, np.array(True), np.zeros(1, dtype), x, x.copy(), value)


def test_a_condition_of_another_dtype_is_computed_by_steps() -> None:
    ones = [np.array(1.0), np.array(5.0), np.array(1.0)]
    copy = 'load_arg 2\nload_arg 1\npush_str "copy.out"\ncfunc 2 0\n'
    less = 'load_arg 1\nload_arg 1\nload_arg 0\npush_str "subtract.out"\ncfunc 3 0\n'
    both(f"again:\n{copy}load_arg 2\njump_if_false leave\n{less}jump again\nleave:\nhalt", *ones)


@cases("kind", "one op", "a chain", "a vector")
def test_an_interrupt_ends_the_turns_soon(kind: str) -> None:
    vm = VM(native=True)
    handles = [put(vm, x) for x in operands(1 << 60)]
    program = assemble(f".func main 0 *\n{loop(BODIES[kind])}\n")
    require_interruptible(0.2, vm.launch, program, handles)
    assert int(vm.read(handles[0])) > 1000


def test_replays_of_a_loop_see_new_values_and_raise_its_errors() -> None:
    def rows(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
        return ml.fori_loop(0, n, lambda i, total: 0.5 * total + ml.sin(x[i]), ml.zeros(()))

    captured = ml.capture(rows)
    x, n = ml.arange(8.0), ml.asarray(0)
    for turns in (8, 3, 0, 5, 8, 9, 6, 9, 2):
        n[...] = turns
        if turns > len(x):
            refuses(OperandValueError, "", captured, x, n)
        else:
            assert float(captured(x, n)) == float(rows(x, n))
