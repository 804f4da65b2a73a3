"""`call`: host functions of the VM, in Python or C, as part of eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from mlvm.core.errors import ArgumentError, DTypeError, GradientError, ShapeError, UnknownFunction
from mlvm.core.op import OPS, Attributes, canonical
from mlvm.core.program.program import STAR, Program
from mlvm.core.rules import broadcast_shapes
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.tape import OperandVjp, Tape, taping
from mlvm.eager.functions.creation import full
from mlvm.eager.tensor.apply import Tensors, Types
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import plain
from mlvm.eager.tensor.reading import launch_for_values
from mlvm.eager.tensor.tensor import Tensor, from_array

Vjp: TypeAlias = Callable[..., Tensor]

_PROGRAMS_LIMIT: Final = 4096
_programs: Final[dict[Any, Program]] = {}


def call(
    name: str,
    /,
    *operands: Tensor,
    vjp: Vjp | Sequence[Vjp | None] | None = None,
    **attributes: Any,
) -> Any:
    """Call the current VM's host function of that name, which `vm.register` or
    `vm.register_library` has added.

    Its results are copied into the current arena: a tensor, a tuple of several, or None. An
    attribute is None, a bool, number or string, or nested lists of these. The function must not
    write to its operands.

    `vjp` is the gradient rule, `vjp(g, *operands, out)`: from the cotangent g of the result it
    computes that of the operand, the product of g with the Jacobian. For several operands it is a
    tuple with a rule for each, None where there is no gradient. For several results `g` and `out`
    are tuples; g has zeros for results that do not matter, None for those that are no floats.

        ml.call("softclip", x, vjp=lambda g, x, out: g * (1.0 - out * out))

    Raises `UnknownFunction`, `ArgumentError`, `DTypeError` for an operand that is no tensor,
    `StaleTensor`, and what the function raises; a gradient through it without a rule raises
    `GradientError`.

    The function decides their shapes.

        >>> import numpy as np
        >>> vm = ml.VM("mine")
        >>> vm.register("softclip", lambda frame: frame.push(np.tanh(frame.param(0))))
        >>> with ml.use(vm): ml.call("softclip", ml.zeros(2))
        Tensor([0., 0.], f32[2])

    Refuses:
        ml.call("doubled", v, how=object())  # ArgumentError
        ml.call("doubled", 1.0)  # DTypeError
        ml.grad(lambda x: ml.sum(ml.call("doubled", x)))(v)  # GradientError
        ml.call("doubled", stale)  # StaleTensor
        ml.call("nothing")  # UnknownFunction
    """
    if not isinstance(name, str):
        raise UnknownFunction(f"call: expected a function's name, a str, got {name!r}")
    for x in operands:
        if not isinstance(x, Tensor):
            raise DTypeError(f"takes tensors, not a {type(x).__name__}; see asarray").at(name, ())
    rules = _rules(name, vjp, len(operands))
    program = _program(name, len(operands), attributes)
    arrays = launch_for_values(program, current_arena().vm, operands)
    results = tuple([from_array(array) for array in arrays])
    tape = taping()
    if tape is not None:
        _record(tape, name, rules, operands, results)
    if len(results) == 1:
        return results[0]
    return results or None


def _program(name: str, nparams: int, attributes: Attributes) -> Program:
    """Return the one-op program of that call; equal calls share it."""
    key = name, nparams, tuple([(k, _key(name, value)) for k, value in attributes.items()])
    program = _programs.get(key)
    if program is not None:
        return program
    if name.endswith(".out") and name[:-4] in OPS:
        raise ArgumentError(f"it writes to an operand; use ml.{name[:-4]} with out=").at(name, ())
    if len(_programs) >= _PROGRAMS_LIMIT:
        _programs.clear()
    values = {attribute: plain(canonical(value)) for attribute, value in attributes.items()}
    return _programs.setdefault(key, Program.of_op(name, nparams, values, STAR))


def _key(name: str, value: object) -> Any:
    """Return a key that only equal attributes share: 1, True, 1.0 differ, as 0.0 and -0.0 do."""
    value = canonical(value)
    if isinstance(value, tuple):
        return tuple([_key(name, each) for each in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.__class__, repr(value)
    raise ArgumentError(
        f"an attribute is None, a bool, number or string, or lists of these, "
        f"not a {type(value).__name__}"
    ).at(name, ())


# --- gradients -----------------------------------------------------------------------


def _rules(
    name: str, vjp: Vjp | Sequence[Vjp | None] | None, noperands: int
) -> tuple[Vjp | None, ...]:
    """Return a rule or None for each operand. Raises `GradientError` for any other `vjp`."""
    if vjp is None:
        return (None,) * noperands
    rules = (vjp,) if callable(vjp) else tuple(vjp) if isinstance(vjp, (tuple, list)) else (vjp,)
    if len(rules) != noperands or not all(rule is None or callable(rule) for rule in rules):
        raise GradientError(
            f"{name}: expected a function as vjp, or for {noperands} operands a tuple of "
            f"{noperands} functions or Nones, got {vjp!r}"
        )
    return rules


def _record(
    tape: Tape, name: str, rules: tuple[Vjp | None, ...], operands: Tensors, results: Tensors
) -> None:
    """Add a node for each float result, with a vjp for each tracked operand.

    Cotangents add up: the vjps of a result's node take the other results' cotangents as zeros.
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
    """Return the rule of the operand at `position`, for the cotangent of result `number` alone. It
    takes the saved values: the operands, then the results."""

    def pulled(g: Tensor, *saved: Tensor) -> Tensor:
        if rule is None:
            raise GradientError(
                f"{name} has no gradient for operand {position}, a {type}: give ml.call a vjp; "
                f"stop_gradient makes a constant of it"
            )
        operands, outs = saved[: -len(results)], saved[-len(results) :]
        if len(results) == 1:
            part = rule(g, *operands, *outs)
        else:
            part = rule(_with_zeros(g, number, results), *operands, outs)
        if not isinstance(part, Tensor) or not _fits(part, type):
            kind = part.type if isinstance(part, Tensor) else f"a {part.__class__.__name__}"
            raise GradientError(
                f"{name}: the vjp for operand {position}, a {type}, returned {kind}"
            )
        return part

    return pulled


def _with_zeros(g: Tensor, number: int, types: Types) -> tuple[Tensor | None, ...]:
    """Return cotangents of all results: g at that number, else zeros; None for other dtypes."""
    zeros = [full(t.shape, 0.0, dtype=t.dtype) if t.dtype.is_inexact else None for t in types]
    return (*zeros[:number], g, *zeros[number + 1 :])


def _fits(part: Tensor, type: TensorType) -> bool:
    """Return whether sums over axes make a cotangent of that type of the part."""
    try:
        return part.dtype.is_inexact and broadcast_shapes(type.shape, part.shape) == part.shape
    except ShapeError:
        return False
