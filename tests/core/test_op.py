"""Declaring ops: what is read off a kernel, how attributes are bound, how errors are worded."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest

from mlvm.core import op as op_module
from mlvm.core import ops as ops  # fills OPS
from mlvm.core.errors import ShapeError
from mlvm.core.op import OPS, Op, op
from mlvm.core.types import Array, TensorType, f32, i32
from tests.brief import Patch, refuses
from tests.cases.claim_tests import claims


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
    "axis": None, "mode": "down", "eps": 1e-5, "keep": False, "size": (1, 1), "dtype": "f32",
}  # fmt: skip


# --- declaring ------------------------------------------------------------------------


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


def test_declaring_lists_the_op_once(monkeypatch: Patch) -> None:
    table: dict[str, Op] = {}
    monkeypatch.setattr(op_module, "OPS", table)
    declared = op(infer=same)(plain)
    assert table == {"plain": declared}
    refuses(ValueError, "an op named 'plain' exists already", op(infer=same), plain)
    assert table == {"plain": declared}


# --- attributes -----------------------------------------------------------------------


def test_bound_attributes_of_an_op_without_any_cannot_be_changed() -> None:
    bound: Any = Op(plain, same).bind({})
    with pytest.raises(TypeError):
        bound["axis"] = 1


# --- inference ------------------------------------------------------------------------


def test_infer_names_the_op_and_the_operands_of_the_innermost_rule() -> None:
    def never(*operands: TensorType) -> TensorType:
        raise ShapeError("never")

    inner = Op(plain, never)

    def delegates(x: TensorType, y: TensorType) -> TensorType:
        inner.infer([y, x], {})
        return x

    x, y = TensorType(f32), TensorType(i32, (3,))
    caught = refuses(ShapeError, "", lambda: Op(plain, delegates).infer([x, y], {}))
    assert (caught.op, caught.operands) == ("plain", (y, x))
    assert str(caught) == "plain(i32[3], f32[]): never"
    assert caught.reason == "never"


test_rows = claims("op", globals())


def bound(name: str, value: Any) -> Any:
    """The attribute of that value as the op takes it; bound again, it stays."""
    result = ATTRIBUTED.bind({"axis": None, name: value})
    assert ATTRIBUTED.bind(result) == result
    return result[name]
