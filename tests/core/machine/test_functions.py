"""The function table: every op under its two names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, UnknownFunctionError
from mlvm.core.machine import functions
from mlvm.core.machine.functions import Binding, FunctionTable
from mlvm.core.op import NO_ATTRIBUTES, OPS
from mlvm.core.types import Array, TensorType, f32
from tests.brief import Before, Patch, refuses
from tests.core.programs import f32s

TABLE = FunctionTable()
VECTOR = TensorType(f32, (2,))


def test_every_op_is_there_twice_unless_its_shape_depends_on_values() -> None:
    forms = set(OPS) | {f"{name}.out" for name, op in OPS.items() if not op.dynamic}
    assert set(TABLE) == forms | {"fused"}


def test_a_function_is_watched_that_another_thread_asks_for_meanwhile(monkeypatch: Patch) -> None:
    table, instrument = FunctionTable(), Before(lambda name, params: None)

    class Late(Binding):
        """One that is made while another thread puts an instrument around every function."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            table.watch(instrument)

    monkeypatch.setattr(functions, "Binding", Late)
    assert table.binding("add").instrument is instrument
    monkeypatch.undo()
    table.watch(None)
    assert table.binding("add").instrument is None


def test_an_unknown_name_offers_names_like_it() -> None:
    with pytest.raises(
        UnknownFunctionError, match=r"^no function 'multiplt' \(did you mean 'multiply'"
    ):
        TABLE.binding("multiplt")
    refuses(UnknownFunctionError, r"^no function '☃'$", TABLE.binding, "☃")


def test_the_form_that_writes_wants_a_tensor_of_the_results_type() -> None:
    slot = TABLE.binding("add.out").callee
    assert slot.infer([VECTOR, VECTOR, TensorType(f32)], {}) == ()
    refuses(
        ShapeError,
        r"^add.out\(\): expected the tensor to write to as the first operand, got no operands$",
        slot.infer,
        [],
        {},
    )
    with pytest.raises(ShapeError, match=r"of the result's type f32\[2\], got f32\[\]"):
        slot.infer([TensorType(f32), VECTOR, VECTOR], {})
    with pytest.raises(DTypeError, match="got f64"):
        slot.infer([TensorType("f64", (2,)), VECTOR, VECTOR], {})
    refuses(ShapeError, r"expected 2 tensors, got 1", slot.infer, [VECTOR, VECTOR], {})


def test_the_form_that_makes_its_result_refuses_operands_when_called() -> None:
    with pytest.raises(DTypeError, match=r"add\(u64\[2\], i64\[2\]\): u64 and i64 do not promote"):
        TABLE.binding("add").call([np.array([1, 2], np.uint64), np.array([1, 2])], {})


def test_attributes_are_bound_as_the_op_binds_them() -> None:
    assert TABLE.binding("add.out").callee.bind({}) is NO_ATTRIBUTES
    assert TABLE.binding("sum.out").callee.bind({"axis": [0]})["axis"] == (0,)
    refuses(ArgumentError, "no attribute 'colour'", TABLE.binding("sum").callee.bind, {"colour": 1})


def test_tables_are_independent() -> None:
    assert FunctionTable().binding("add") is not TABLE.binding("add")


def test_a_kernel_of_no_op_is_refused() -> None:
    with pytest.raises(UnknownFunctionError, match=r"no op 'addd' \(did you mean 'add'"):
        FunctionTable({"addd": OPS["add"].kernel})


def test_kernels_replace_those_of_both_forms_and_of_chains() -> None:
    calls: list[str] = []

    def add(out: Array, x: Array, y: Array) -> None:
        calls.append("add")
        np.add(x, y, out)

    table = FunctionTable({"add": add})
    x = f32s(1, 2)
    [y] = table.binding("add").call([x, x], NO_ATTRIBUTES)
    out = np.zeros_like(x)
    table.binding("add.out").kernel(out, x, x)
    fused = table.binding("fused")
    chain = fused.callee.bind({"chain": (("add", -1, 1, 1), ("negative", 0, -1)), "outputs": 1})
    third = np.zeros_like(x)
    fused.kernel(third, x, **chain)
    assert calls == ["add"] * 3
    np.testing.assert_array_equal([y, out, -third], [[2, 4]] * 3)


def test_an_op_that_nobody_has_asked_for_may_be_removed_and_come_back() -> None:
    table = FunctionTable()
    add = TABLE.binding("add").callee
    table.remove("add")
    assert "add" not in {*table}
    refuses(UnknownFunctionError, "no function 'add'", table.binding, "add")
    table.register("add", add)
    assert table.binding("add").callee is add
    assert {*table} == {*TABLE}
    assert table.binding("add.out") is table.binding("add.out")
