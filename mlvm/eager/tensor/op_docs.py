"""Sentences of op docstrings derived from type rules: shapes and dtypes, and errors."""

from __future__ import annotations

import re
import textwrap
from typing import Final

from mlvm.core.errors import DTypeError
from mlvm.core.op import REQUIRED, Op
from mlvm.core.types import TensorType

_WIDTH: Final = 96
_TYPES: Final = {
    kind: TensorType(name)
    for kind, name in {"b": "bool", "u": "u8", "i": "i64", "f": "f32", "c": "c64"}.items()
}
"""One type for each kind of dtype that type rules distinguish."""

_ANY: Final = "any dtype"
_ALLOWED: Final = {
    "buifc": _ANY,
    "buif": "any dtype but complex",
    "uifc": "any dtype but bool",
    "uif": "integers or floats",
    "bui": "integers or bools",
    "ui": "integers",
    "fc": "floats or complex numbers",
    "f": "floats",
    "b": "bools",
}
_RESULTS: Final = {
    "": "in {its} dtype",
    "bui": "in {its} dtype; integers and bools give f32",
    "c": "in {its} dtype; complex numbers give that of their parts",
}
"""Text of the result's dtype, by the kinds of dtype for which it differs from the operands' dtype.
"""


WITH_WHERE: Final = frozenset(["sum", "mean", "prod", "max", "min", "any", "all", "logsumexp"])
"""Reductions that accept `where=`, a bool tensor that selects elements."""

_WHERE: Final = "With `where`, only elements count at which that bool tensor is True. "


def described(op: Op) -> str:
    """Return the op's docstring with the shapes, dtypes and errors of the type rule."""
    if any(each.default is REQUIRED for each in op.attributes.values()):
        return op.doc
    if op.reduces and "keepdims" in op.attributes:
        types = _of_reduction(op)
    elif op.elementwise and len(op.inputs) == 1:
        types = _of_one(op)
    elif op.elementwise and len(op.inputs) == 2:
        types = _of_two(op)
    else:
        return op.doc
    prose, *examples = re.split(r"\n\n(?= *>>>|Invalid calls:)", op.doc)
    examples = [each if each.startswith("Invalid calls:") else _indented(each) for each in examples]
    return "\n\n".join([prose, textwrap.fill(types, _WIDTH), *examples])


def _indented(example: str) -> str:
    return textwrap.indent(textwrap.dedent(example), "    ")


def _of_one(op: Op) -> str:
    allowed, result = _dtypes(op, "x's")
    return f"x: [...], {allowed} -> [...]{result}. Raises {_dtype_error(allowed)}."


def _of_two(op: Op) -> str:
    allowed, result = _dtypes(op, "that")
    dtypes = allowed if allowed == "bools" else f"dtypes that promote to {allowed}"
    return (
        f"x, y: shapes that broadcast to [...], {dtypes} -> [...]{result}. Raises `ShapeError` or "
        "`DTypeError` for others."
    )


def _of_reduction(op: Op) -> str:
    allowed, result = _dtypes(op, "x's")
    axes = "the axis" if op.attributes["axis"].hint == int | None else "the axes in"
    where = _WHERE if op.name in WITH_WHERE else ""
    return (
        f"{where}x: [...], {allowed} -> the shape of x without {axes} `axis` (None: all axes; kept "
        f"with length 1 if `keepdims`){result}. Raises `AxisError` for an axis that x does not "
        f"have, {_dtype_error(allowed)}."
    )


def _dtype_error(allowed: str) -> str:
    wrong = "x is not a tensor, array or list" if allowed == _ANY else "x has another dtype"
    return f"`DTypeError` if {wrong}"


def _dtypes(op: Op, its: str) -> tuple[str, str]:
    """Return a text for the dtypes that the op accepts, and a text for the result's dtype.

    The second text follows a comma; it is empty if the dtype has no simple description. `its` names
    the operand that the result dtype may come from."""
    results = {}
    attributes = op.bind({})
    for kind, type in _TYPES.items():
        try:
            out = op.infer([type] * len(op.inputs), attributes)
        except DTypeError:
            continue
        if out is not None:
            results[kind] = out.dtype
    changed = {kind: dtype for kind, dtype in results.items() if dtype is not _TYPES[kind].dtype}
    allowed, text = _ALLOWED["".join(results)], _RESULTS.get("".join(changed))
    if len(set(results.values())) == 1 and (text is None or allowed == "bools"):
        text = next(iter(results.values())).name
    return allowed, f", {text.format(its=its)}" if text is not None else ""
