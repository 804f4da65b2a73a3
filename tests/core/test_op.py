"""Declaring ops: what is read off a kernel, how attributes are bound, how errors are worded."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import numpy as np
import pytest

from mlvm.core import op as op_module
from mlvm.core import ops as ops  # fills OPS
from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.op import OPS, Op, op
from mlvm.core.types import Array, TensorType, f32, i32
from tests.brief import cases, refuses


def plain(out: Array, x: Array, y: Array) -> None:
    """Two inputs.

    And more.
    """


def joined(out: Array, first: Array, *more: Array, axis: int = 0) -> None:
    """Any number of inputs."""


def chosen(x: Array) -> Array:
    """No `out`: the shape is known after running."""
    return x


def attributed(
    out: Array,
    x: Array,
    *,
    axis: int | tuple[int, ...] | None,
    mode: Literal["down", "up"] = "down",
    eps: float = 1e-5,
    keep: bool = False,
    size: tuple[int, int] = (1, 1),
    dtype: str = "f32",
) -> None:
    """Attributes of every kind."""


def same(*operands: TensorType, **_: Any) -> TensorType:
    return operands[0]


ATTRIBUTED = Op(attributed, same)
DEFAULTS = {
    "axis": None,
    "mode": "down",
    "eps": 1e-5,
    "keep": False,
    "size": (1, 1),
    "dtype": "f32",
}


# --- declaring ------------------------------------------------------------------------


def test_an_op_is_read_off_its_kernel() -> None:
    declared = Op(plain, same)
    assert (declared.name, declared.inputs, declared.attributes) == ("plain", ("x", "y"), {})
    assert declared.doc == "Two inputs.\n\nAnd more."
    assert not declared.variadic
    assert not declared.dynamic
    assert declared.signature == "plain(x, y)"
    assert repr(declared) == "<op plain(x, y)>"


def test_a_variadic_op() -> None:
    declared = Op(joined, same)
    assert declared.variadic
    assert declared.inputs == ("first", "more")
    assert declared.signature == "joined(first, *more, axis: int = 0)"


def test_a_dynamic_op_has_no_out() -> None:
    declared = Op(chosen, lambda x: None)
    assert declared.dynamic
    assert declared.inputs == ("x",)
    assert declared.infer([TensorType(f32)], {}) is None


def test_the_signature_shows_attributes_with_their_kind_and_default() -> None:
    assert ATTRIBUTED.signature == (
        "attributed(x, *, axis: int | tuple[int, ...] | None, mode: Literal['down', 'up'] = 'down',"
        " eps: float = 1e-05, keep: bool = False, size: tuple[int, int] = (1, 1),"
        " dtype: str = 'f32')"
    )


@pytest.mark.parametrize("name", OPS)
def test_a_signature_says_what_the_kernel_takes(name: str) -> None:
    """Read as Python, it has the kernel's parameters and defaults."""
    space: dict[str, Any] = {"Literal": Literal}
    exec(f"def {OPS[name].signature}: ...".replace(f"def {name}", "def read"), space)
    read = list(inspect.signature(space["read"]).parameters.values())
    kernel = list(inspect.signature(OPS[name].kernel).parameters.values())
    if not OPS[name].dynamic:
        del kernel[0]
    assert [(p.name, p.default) for p in read] == [(p.name, p.default) for p in kernel]


def test_declaring_lists_the_op_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Op] = {}
    monkeypatch.setattr(op_module, "OPS", table)
    declared = op(infer=same)(plain)
    assert table == {"plain": declared}
    refuses(ValueError, "an op named 'plain' exists already", op(infer=same), plain)
    assert table == {"plain": declared}


# --- attributes -----------------------------------------------------------------------


def test_bind_fills_in_defaults_in_the_ops_order() -> None:
    bound = ATTRIBUTED.bind({"keep": True, "axis": None})
    assert list(bound.items()) == list({**DEFAULTS, "keep": True}.items())


@cases(
    "name, value, bound",
    ("axis", [0, 1], (0, 1)),
    ("axis", np.int64(2), 2),
    ("axis", [np.int8(1)], (1,)),
    ("axis", (), ()),
    ("mode", "up", "up"),
    ("eps", 1, 1.0),
    ("eps", np.float32(0.5), 0.5),
    ("keep", np.True_, True),
    ("size", [3, 4], (3, 4)),
    ("dtype", i32, "i32"),
)
def test_bind_makes_values_plain(name: str, value: Any, bound: Any) -> None:
    result = ATTRIBUTED.bind({"axis": None, name: value})
    assert result[name] == bound
    assert result[name].__class__ is bound.__class__
    assert ATTRIBUTED.bind(result) == result


@cases(
    "name, value",
    ("axis", True),
    ("axis", 1.0),
    ("axis", "0"),
    ("axis", (0, None)),
    ("axis", (0, True)),
    ("mode", "sideways"),
    ("mode", None),
    ("eps", "1"),
    ("eps", False),
    ("eps", 10**400),
    ("eps", None),
    ("keep", 1),
    ("size", (1,)),
    ("size", (1, 2, 3)),
    ("size", (1, 2.0)),
    ("size", 1),
    ("dtype", np.float32),
    ("dtype", np.zeros(2)),
)
def test_bind_refuses_the_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"expected attribute {name}: .*, got"):
        ATTRIBUTED.bind({"axis": None, name: value})


def test_bind_refuses_unknown_and_missing_attributes() -> None:
    with pytest.raises(ArgumentError, match=r"no attribute 'colour'; there are: axis: int .*"):
        ATTRIBUTED.bind({"axis": None, "colour": 3})
    with pytest.raises(ArgumentError, match=r"plain\(\): no attribute 'axis'; there are: none"):
        Op(plain, same).bind({"axis": 1})
    refuses(ArgumentError, "attribute 'axis' is missing", ATTRIBUTED.bind, {})


def test_bound_attributes_of_an_op_without_any_cannot_be_changed() -> None:
    bound: Any = Op(plain, same).bind({})
    with pytest.raises(TypeError):
        bound["axis"] = 1


# --- inference ------------------------------------------------------------------------


def test_infer_counts_the_operands() -> None:
    x = TensorType(f32, (2,))
    with pytest.raises(ShapeError, match=r"^plain\(f32\[2\]\): takes 2 tensors, got 1$"):
        Op(plain, same).infer([x], {})
    refuses(ShapeError, "takes 2 tensors, got 3", lambda: Op(plain, same).infer([x, x, x], {}))
    with pytest.raises(ShapeError, match=r"^joined\(\): takes 1 or more tensors, got 0$"):
        Op(joined, same).infer([], {})
    assert Op(joined, same).infer([x, x, x], {"axis": 0}) is x


def test_infer_names_the_op_and_the_operands_of_the_innermost_rule() -> None:
    def refuses(*operands: TensorType) -> TensorType:
        raise ShapeError("never")

    inner = Op(plain, refuses)

    def delegates(x: TensorType, y: TensorType) -> TensorType:
        inner.infer([y, x], {})
        return x

    x, y = TensorType(f32), TensorType(i32, (3,))
    with pytest.raises(ShapeError) as caught:
        Op(plain, delegates).infer([x, y], {})
    assert (caught.value.op, caught.value.operands) == ("plain", (y, x))
    assert str(caught.value) == "plain(i32[3], f32[]): never"
    assert caught.value.reason == "never"


def test_an_attribute_that_contains_itself_is_refused() -> None:
    widths: list[object] = []
    widths.append(widths)
    refuses(ArgumentError, "nests deeper than 64", OPS["pad"].bind, {"widths": widths})
