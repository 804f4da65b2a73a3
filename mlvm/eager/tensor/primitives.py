"""The public function of every op, derived from the op table.

`add(x, y, /, *, out=None)` takes tensors (or, beside a tensor, Python scalars) by position,
attributes by keyword, and optionally the tensor to write into. An `axis` may follow the tensors by
position, `sum(x, 0)`. An array is taken as `asarray` makes a tensor of it, a list of numbers as one
number.
`primitives.pyi` tells editors and type checkers the same; `mlvm.eager.stub` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

from mlvm.core.errors import AttributeRefused, DTypeError, MlvmError, ShapeError, brief
from mlvm.core.op import OPS, Attribute, Op
from mlvm.core.types import DType
from mlvm.eager.hints import keyword_hint
from mlvm.eager.tensor.op_docs import described
from mlvm.eager.tensor.tensor import OneOp, Tensor, apply, apply_into, is_array, one_op, operand

WITHOUT_FUNCTION: Final = {
    "batch_contract",
    "boolean_index",
    "embed",
    "index_add",
    "index_set",
    "layer_norm_normalize",
    "mask_scatter",
    "mask_set",
    "multiply_add",
    "nonzero_indices",
    "patches",
    "scatter_add",
    "scatter_add_along_axis",
    "slice_add",
    "slice_set",
    "unpatches",
}
"""Ops that only the eager layer itself calls."""

WITH_ANOTHER: Final = {
    "arange",
    "argsort",
    "astype",
    "avg_pool2d",
    "broadcast_to",
    "clip",
    "concat",
    "conv2d",
    "cumulative_sum",
    "dropout",
    "dynamic_update",
    "eye",
    "full",
    "linspace",
    "max_pool2d",
    "one_hot",
    "pad",
    "permute_dims",
    "reshape",
    "roll",
    "softmax_cross_entropy",
    "sort",
    "take",
    "take_along_axis",
    "where",
    "zeros",
}
"""Ops whose public function, in `creation`, `functions` or `losses`, has a signature of its own."""

ELSEWHERE: Final = {"random", "decompositions", "fft"}
"""Rooms whose public functions are in a module of their own: `random`, `linalg`, `fft`."""


def _derive(op: Op) -> Callable[..., Tensor]:
    bare = None if op.attributes else one_op(op.name)
    takes_dtype = "dtype" in op.attributes
    last = len(op.inputs) if _takes_axis(op) else None

    def function(*operands: Any, out: Tensor | None = None, **attributes: Any) -> Tensor:
        try:
            if last is not None and len(operands) == last + 1:
                if "axis" in attributes:
                    given = [x.type if isinstance(x, Tensor) else brief(x) for x in operands[:last]]
                    raise AttributeRefused("axis is given twice").at(op.name, given)
                attributes["axis"] = operands[last]
                operands = operands[:last]
            if takes_dtype and attributes.get("dtype") is not None:
                attributes["dtype"] = _dtype(op, attributes["dtype"])
            call = bare if bare is not None and not attributes else one_op(op.name, **attributes)
            for x in operands:
                if x.__class__ is not Tensor:
                    operands = _tensors(call, operands)
                    break
            if out is None:
                return apply(call, *operands)
            _check_out(call, operands, out)
            return apply_into(out, call, *operands)
        except MlvmError as error:
            hint = keyword_hint(attributes, op.attributes)
            if hint:
                raise AttributeRefused(hint).at(op.name, ()) from None
            error.__traceback__ = None  # no frame of ours, as in `tensor`
            raise

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = described(op) if op.name in __all__ else op.doc
    function.__signature__ = _signature(op)  # type: ignore[attr-defined]
    return function


def _takes_axis(op: Op) -> bool:
    """Whether an axis may follow the operands by position."""
    return not op.variadic and next(iter(op.attributes), None) == "axis"


def _dtype(op: Op, given: object) -> str:
    try:
        return DType.of(given).name
    except DTypeError as error:
        raise error.at(op.name, ()) from None


def _tensors(call: OneOp, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The operands, with tensors of the first tensor's dtype for Python scalars, and tensors of
    the values of arrays."""
    most = len(call.op.inputs)
    if len(operands) > most and call.op.attributes and not call.op.variadic:
        also = " and axis" if _takes_axis(call.op) else ""
        raise ShapeError(
            f"takes {most}{also} by position, was given {len(operands)}; by keyword it takes "
            f"{', '.join(call.op.attributes)}"
        ).at(call.op.name, [x.type if isinstance(x, Tensor) else brief(x) for x in operands])
    beside = next((x for x in operands if isinstance(x, Tensor)), None)
    if beside is None:
        arrays = [x for x in operands if is_array(x)]  # the lists last: they heed the others
        arrays.sort(key=lambda x: isinstance(x, (list, tuple)))
        if arrays:
            beside = Tensor._taken(arrays[0], call)
            operands = tuple([beside if x is arrays[0] else x for x in operands])
    if beside is None:
        given = ", ".join(type(x).__name__ for x in operands)
        raise DTypeError(f"takes tensors or arrays, at least one, not {given}; see asarray").at(
            call.op.name, ()
        )
    place = next(i for i, x in enumerate(operands) if x is beside)
    return tuple(operand(x, beside, call, first=i < place) for i, x in enumerate(operands))


def _check_out(call: OneOp, operands: tuple[Tensor, ...], out: object) -> None:
    types = [x.type for x in operands]
    if not isinstance(out, Tensor):
        raise DTypeError(f"out must be a tensor, not {type(out).__name__}").at(call.op.name, types)
    if call.op.dynamic:
        raise AttributeRefused("only running tells the result's shape, so there is no out").at(
            call.op.name, types
        )


def _signature(op: Op) -> Signature:
    """The Python signature of the op's public function."""
    scalars = op.room == "elementwise" and len(op.inputs) > 1
    tensor: Any = "Operand" if scalars else Tensor
    parameters = [Parameter(x, Parameter.POSITIONAL_ONLY, annotation=tensor) for x in op.inputs]
    if op.variadic:
        parameters[-1] = parameters[-1].replace(kind=Parameter.VAR_POSITIONAL)
    parameters += [_keyword(attribute) for attribute in op.attributes.values()]
    if _takes_axis(op):
        axis = len(op.inputs)
        parameters[axis] = parameters[axis].replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
    if not op.dynamic:
        out = Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
        parameters.append(out)
    return Signature(parameters, return_annotation=Tensor)


def _keyword(attribute: Attribute) -> Parameter:
    hint = object if attribute.name == "dtype" else attribute.hint
    return Parameter(
        attribute.name, Parameter.KEYWORD_ONLY, default=attribute.default, annotation=hint
    )


def public_names() -> list[str]:
    """The ops whose function here is the public one."""
    hidden = WITHOUT_FUNCTION | WITH_ANOTHER
    return sorted(
        name
        for name, op in OPS.items()
        if name not in hidden and op.room not in ELSEWHERE and not name.endswith("_vjp")
    )


__all__ = public_names()
globals().update({name: _derive(op) for name, op in OPS.items()})
