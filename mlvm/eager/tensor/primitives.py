"""The public function of every op, derived from the op table.

`add(x, y, /, *, out=None)` accepts operands by position (see `as_operand`), attributes by keyword,
and optionally the tensor to write to. An `axis` may follow the operands by position: `sum(x, 0)`.
`primitives.pyi` contains the same signatures for editors and type checkers; `mlvm.eager.stub`
writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from mlvm.core.errors import ArgumentError, DTypeError, MlvmError, ShapeError, with_article
from mlvm.core.op import OPS, Op
from mlvm.core.types import DType
from mlvm.eager.tensor import templates, wrapper
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.autocast import in_precision
from mlvm.eager.tensor.op_docs import WITH_WHERE, described
from mlvm.eager.tensor.operands import as_operands
from mlvm.eager.tensor.parts import warn_of_out
from mlvm.eager.tensor.refusing import refusal, require_values
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.wrapper import annotate_error


def reduce_where(name: str, x: Tensor, **attributes: Any) -> Tensor:
    """Reduce the elements at which the attribute `where` is True.

    `mlvm.eager.functions.sums` assigns this function."""
    raise NotImplementedError


def _derive(op: Op) -> Callable[..., Tensor]:
    takes_dtype, has_precision = "dtype" in op.attributes, op.traits.precision is not None
    last = len(op.inputs) if _takes_axis(op) else None
    takes_where = op.name in WITH_WHERE

    def checked(*operands: Any, out: Tensor | None = None, **attributes: Any) -> Tensor:
        try:
            if last is not None and len(operands) == last + 1:
                *operands, axis = operands
                if "axis" in attributes:
                    raise ArgumentError("got axis by position and by keyword; pass it once")
                if isinstance(axis, Tensor):
                    raise ArgumentError(
                        "expected one tensor, got two; use maximum or minimum for two tensors"
                    )
                attributes["axis"] = axis
            if takes_where and "where" in attributes:
                if attributes["where"] is None:
                    del attributes["where"]
                elif out is not None:
                    raise ArgumentError("out= cannot be combined with where=; omit out=")
                else:
                    return reduce_where(op.name, *as_operands(operands), **attributes)
            if takes_dtype and attributes.get("dtype") is not None:
                attributes["dtype"] = _name_of(attributes["dtype"], op)
            for x in operands:
                if type(x) is not Tensor:
                    _require_few(op, operands)
                    operands = as_operands(operands)
                    break
            if has_precision and out is None:
                operands, attributes = in_precision(op, operands, attributes)
            call = one_op(op.name, **attributes)
            if out is None:
                return apply(call, *operands)
            if not isinstance(out, Tensor):
                raise DTypeError(
                    f"expected a tensor as out=, got {with_article(type(out).__name__)}"
                )
            if op.dynamic:
                raise ArgumentError(
                    "out= is not supported, because the result shape depends on values; omit out="
                )
            if out.is_part:
                warn_of_out(sys._getframe(2), out)
            return apply_into(out, call, *operands)
        except MlvmError as error:
            if error.late:
                raise
            require_values(function, operands, attributes, error)
            text = wrapper.hint(op.name, (), attributes, op.attributes)
            if text is not None:
                raise ArgumentError(text) from None
            annotate_error(error, op.name, operands)
            raise
        except Exception as error:
            refused = refusal(op.name, function, operands, {"out": out, **attributes}, error)
            if refused is not None:
                raise refused from error
            raise

    def function(*operands: Any, **keywords: Any) -> Tensor:
        try:
            if "out" in keywords and getattr(keywords["out"], "is_part", False):
                return checked(*operands, **keywords)  # may warn
            return templates.call(checked, operands, keywords)  # type: ignore[no-any-return]
        except MlvmError as error:
            if not error.late:
                error.__traceback__ = None
            raise

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = described(op)
    function.__signature__ = _signature(op)  # type: ignore[attr-defined]
    return function


def _takes_axis(op: Op) -> bool:
    """Return whether an axis may follow the operands by position."""
    return not op.variadic and next(iter(op.attributes), None) == "axis"


def _name_of(dtype: object, op: Op) -> str:
    try:
        return DType.of(dtype).name
    except DTypeError as error:
        raise error.at(op.name, ()) from None


def _require_few(op: Op, operands: Sequence[object]) -> None:
    """Raise `ShapeError` for an attribute that is passed by position, like an operand."""
    most = len(op.inputs)
    if len(operands) > most and op.attributes and not op.variadic:
        also = " and axis" if _takes_axis(op) else ""
        raise ShapeError(
            f"expected {most} operand{'s'[: most != 1]}{also} by position, got {len(operands)} "
            f"arguments; pass {', '.join(op.attributes)} by keyword"
        )


def _signature(op: Op) -> Signature:
    """Return the Python signature of the op's public function."""
    scalars = op.elementwise and len(op.inputs) > 1
    tensor: Any = "Operand" if scalars else Tensor
    parameters = [Parameter(x, Parameter.POSITIONAL_ONLY, annotation=tensor) for x in op.inputs]
    if op.variadic:
        parameters[-1] = parameters[-1].replace(kind=Parameter.VAR_POSITIONAL)
    for name, attribute in op.attributes.items():
        hint = object if name == "dtype" else attribute.hint
        keyword = Parameter(
            name, Parameter.KEYWORD_ONLY, default=attribute.default, annotation=hint
        )
        parameters.append(keyword)
    if _takes_axis(op):
        axis = len(op.inputs)
        parameters[axis] = parameters[axis].replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
    out = Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
    if not op.dynamic:
        parameters.append(out)
    if op.name in WITH_WHERE:
        parameters.append(out.replace(name="where"))
    return Signature(parameters, return_annotation=Tensor)


__all__ = sorted(name for name, op in OPS.items() if op.traits.public)


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Return the function of an op, created at the first use."""
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    function = globals()[name] = _derive(OPS[name])
    return function
