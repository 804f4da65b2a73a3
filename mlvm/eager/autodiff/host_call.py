"""Calls of host functions of the VM, in Python or C, with gradient rules on a tape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from mlvm.core.dynamic_sizes import Length
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    GradientError,
    ShapeError,
    counted,
    with_article,
)
from mlvm.core.machine.callee import misfit
from mlvm.core.memo import Memo, exact_repr
from mlvm.core.op import OPS, Attributes, canonical
from mlvm.core.program.program import STAR, Program
from mlvm.core.rules import broadcast_shapes
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.tape import OperandVjp, Tape, taping
from mlvm.eager.functions.creation import full
from mlvm.eager.recording.recorder import current_recorder
from mlvm.eager.tensor.apply import Tensors, Types
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import has_open_lengths, plain
from mlvm.eager.tensor.reading import launch_for_values, values_of
from mlvm.eager.tensor.tensor import Tensor, from_array

Vjp: TypeAlias = Callable[..., Tensor]

_programs: Final = Memo[Any, Program](4096, "eager.autodiff.host_call")


def call_host(
    name: str,
    operands: Sequence[Tensor],
    vjp: Vjp | Sequence[Vjp | None] | None,
    attributes: Attributes,
) -> tuple[Tensor, ...]:
    """Call a host function, and record the gradient rules on the tape; see `ml.host_call`."""
    rules = rules_of(name, vjp, len(operands))
    results = run(name, operands, attributes, result_types(name, operands, attributes))
    tape = taping()
    if tape is not None:
        _record(tape, name, rules, tuple(operands), results)
    return results


def run(
    name: str,
    operands: Sequence[Tensor],
    attributes: Attributes,
    types: Types | None,
) -> tuple[Tensor, ...]:
    """Run a host function, or record the call; the results must have these types.

    With None, the results may have any types."""
    on = current_recorder()
    if on is not None and types is not None:
        _key(name, [*attributes.values()])  # rejects other attributes
        return tuple(on.call_user(name, _attributes(attributes), types, operands))
    program = _program(name, len(operands), attributes)
    tape, before = taping(), {}
    if tape is not None and on is None:
        before = {i: values_of(x) for i, x in enumerate(operands) if x.tape is tape}
    arrays = launch_for_values(program, current_arena().vm, operands)
    for i, values in before.items():
        if values_of(operands[i]).tobytes() != values.tobytes():
            raise GradientError(
                f"{name} has overwritten operand {i}, {operands[i].type}, which needs a gradient; "
                f"push a result instead"
            )
    return tuple([from_array(array) for array in arrays])


def result_types(
    name: str, operands: Sequence[Tensor], attributes: Attributes
) -> tuple[TensorType, ...] | None:
    """Return the types of a host function's results by the type rule; None if it has no rule."""
    on = current_recorder()
    vm = current_arena().vm if on is None else on.recorders[-1].vm
    rule = getattr(vm, "result_types", None)  # a VM of this process
    if rule is None:
        return None
    types = [x.type for x in operands]
    if has_open_lengths() and any(isinstance(n, Length) for type in types for n in type.shape):
        raise CaptureError(
            f"{name}: a host function cannot receive dynamic sizes; capture with dynamic_axes=False"
        )  # each size is traced
    return rule(name, types, attributes)  # type: ignore[no-any-return]


def _program(name: str, nparams: int, attributes: Attributes) -> Program:
    """Return the program of this single call; equal calls share it."""
    key = name, nparams, tuple([(k, _key(name, value)) for k, value in attributes.items()])

    def make() -> Program:
        if name.endswith(".out") and name[:-4] in OPS:
            text = f"expected a function that returns results; use ml.{name[:-4]} with out="
            raise ArgumentError(text).at(name, ())
        return Program.of_op(name, nparams, _attributes(attributes), STAR)

    return _programs.get(key, make)


def _attributes(attributes: Attributes) -> dict[str, Any]:
    """Return attributes in the form that a program stores."""
    return {attribute: plain(canonical(value)) for attribute, value in attributes.items()}


def _key(name: str, value: object) -> Any:
    """Return a key that only equal attributes share: 1, True and 1.0 differ, and 0.0 and -0.0."""
    value = canonical(value)
    if isinstance(value, tuple):
        return tuple([_key(name, each) for each in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.__class__, exact_repr(value)
    raise ArgumentError(
        f"expected attributes of None, bools, numbers, strings, or lists of these, "
        f"got {with_article(type(value).__name__)}"
    ).at(name, ())


# --- gradients -----------------------------------------------------------------------


def rules_of(
    name: str, vjp: Vjp | Sequence[Vjp | None] | None, noperands: int
) -> tuple[Vjp | None, ...]:
    """Return a rule or None for each operand. Raises `GradientError` for any other `vjp`."""
    if vjp is None:
        return (None,) * noperands
    rules = (vjp,) if callable(vjp) else tuple(vjp) if isinstance(vjp, (tuple, list)) else (vjp,)
    if len(rules) != noperands or not all(rule is None or callable(rule) for rule in rules):
        raise GradientError(
            f"{name}: expected a function as vjp, or for {counted(noperands, 'operand')} a tuple "
            f"of {noperands} functions or Nones, got {vjp!r}"
        )
    return rules


def _record(
    tape: Tape, name: str, rules: tuple[Vjp | None, ...], operands: Tensors, results: Tensors
) -> None:
    """Add a node for each float result, with a vjp for each tracked operand.

    Cotangents are summed: the vjps of a result's node treat the cotangents of the other results as
    zeros.
    """
    tracked = [i for i, x in enumerate(operands) if x.tape is tape]
    if not tracked:
        return
    origins = tuple([operands[i].node for i in tracked])
    saved = (*operands, *results) if any(rules[i] is not None for i in tracked) else ()
    types = tuple([y.type for y in results])
    for number, out in enumerate(results):
        if out.dtype.is_inexact:
            vjps = [
                OperandVjp(
                    operands[i].type,
                    _rule_for_one_result(name, rules[i], i, operands[i].type, number, types),
                    tuple(range(len(saved))),
                )
                for i in tracked
            ]
            tape.add_node(out, tuple(vjps), origins, saved)


def _rule_for_one_result(
    name: str, rule: Vjp | None, position: int, type: TensorType, number: int, results: Types
) -> Vjp:
    """Return the rule of the operand at `position`, for the cotangent of only result `number`.

    The arguments are the saved values: the operands, then the results."""

    def pulled(g: Tensor, *saved: Tensor) -> Tensor:
        if rule is None:
            raise GradientError(
                f"{name} has no gradient for operand {position}, {with_article(type)}: "
                f"pass vjp= to "
                f"ml.host_call, or use stop_gradient(x)"
            )
        operands, outs = saved[: -len(results)], saved[-len(results) :]
        if len(results) == 1:
            part = pull(name, rule, g, operands, outs[0])
        else:
            part = pull(name, rule, _with_zeros(g, number, results), operands, outs)
        if not isinstance(part, Tensor) or not _fits(part, type):
            kind = part.type if isinstance(part, Tensor) else with_article(part.__class__.__name__)
            raise GradientError(
                f"{name}: expected the vjp for operand {position} to return "
                f"{with_article(type)}, got {kind}"
            )
        return part

    return pulled


def pull(name: str, rule: Vjp, g: Any, operands: Sequence[Tensor], out: Any) -> Tensor:
    """Call a gradient rule of a host function.

    Raises `GradientError` if the rule does not accept these arguments."""
    try:
        return rule(g, *operands, out)
    except TypeError as error:
        if misfit("", rule, (g, *operands, out), {}) is None:
            raise
        raise GradientError(
            f"{name}: expected vjp to take (g, *operands, out), {len(operands) + 2} arguments, got "
            f"a function of {inspect.signature(rule)}"
        ) from error


def _with_zeros(g: Tensor, number: int, types: Types) -> tuple[Tensor | None, ...]:
    """Return cotangents of all results: g at that number, else zeros; None for other dtypes."""
    zeros = [full(t.shape, 0.0, dtype=t.dtype) if t.dtype.is_inexact else None for t in types]
    return (*zeros[:number], g, *zeros[number + 1 :])


def _fits(part: Tensor, type: TensorType) -> bool:
    """Return whether sums over axes convert the part to a cotangent of that type."""
    try:
        return part.dtype.is_inexact and broadcast_shapes(type.shape, part.shape) == part.shape
    except ShapeError:
        return False
