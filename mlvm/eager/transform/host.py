"""`call`: host functions of the VM, in Python or C, as a part of eager code.

Within a transformation a call is a function with a user-defined derivative (`custom`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mlvm.arena.context import current
from mlvm.core.errors import DTypeError, GradientError, UnknownFunctionError, with_article
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.host_call import (
    Vjp,
    call_host,
    pull,
    result_types,
    rules_of,
    run,
)
from mlvm.eager.functions.creation import zeros_like
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.custom import CustomRule, Maybe, Tensors
from mlvm.eager.transform.trace import Tracer
from mlvm.renamed import old_names


def host_call(
    name: str,
    /,
    *operands: Tensor,
    vjp: Vjp | Sequence[Vjp | None] | None = None,
    **attributes: Any,
) -> Any:
    """Call the current VM's host function with that name, added by `vm.register`.

    `vm.register_library` adds C functions. The results are copied into the current arena: a tensor,
    a tuple of several tensors, or None. The function determines the shapes.

    Arguments:

    - `name`: the name of the host function.

    - `operands`: tensors; the function must not write to them.

    - `vjp`: the gradient rule, `vjp(g, *operands, out)`: from the cotangent g of the result it
      computes the cotangent of the operand, the product of g with the Jacobian. For several
      operands it is a tuple with one rule per operand, None where there is no gradient. For several
      results `g` and `out` are tuples; g contains zeros for unused results, and None for results
      that are not floats.

    - `attributes`: None, bools, numbers or strings, or nested lists of these.

        ml.host_call("softclip", x, vjp=lambda g, x, out: g * (1.0 - out * out))

    Raises `UnknownFunctionError`, `ArgumentError`, `DTypeError` for an operand that is not a
    tensor, `StaleTensorError`, and errors of the function. A gradient through a call without a
    rule raises `GradientError`, and a captured call of a function without a type rule raises
    `CaptureError`.

    A function that was registered with a type rule, `vm.register(name, fn, result=rule)`, may be
    called in captured functions and transformations. `vmap` calls it for each row. Results with
    types other than the rule's types are rejected.

        >>> import numpy as np
        >>> vm = ml.VM("mine")
        >>> vm.register("softclip", lambda frame: frame.push(np.tanh(frame.param(0))))
        >>> with ml.use(vm): ml.host_call("softclip", ml.zeros(2))
        Tensor([0., 0.], f32[2])

    Invalid calls:
        ml.host_call("doubled", v, how=object())  # ArgumentError
        ml.capture(lambda x: ml.host_call("doubled", x))(v)  # CaptureError
        ml.host_call("doubled", 1.0)  # DTypeError
        ml.grad(lambda x: ml.sum(ml.host_call("doubled", x)))(v)  # GradientError
        ml.host_call("doubled", stale)  # StaleTensorError
        ml.host_call("nothing")  # UnknownFunctionError
    """
    if not issubclass(type(name), str):
        raise UnknownFunctionError(f"host_call: expected a function's name, a str, got {name!r}")
    for x in operands:
        if not issubclass(type(x), Tensor):
            raise DTypeError(
                f"expected tensors, got {with_article(type(x).__name__)}; convert with ml.asarray"
            ).at(name, ())
    types = None
    if isinstance(current().recorder, Tracer):
        types = result_types(name, operands, attributes)
    if types is None:
        results = call_host(name, operands, vjp, attributes)
    else:
        results = _call_traced(name, operands, vjp, attributes, types)
    return results[0] if len(results) == 1 else results or None


def _call_traced(
    name: str,
    operands: Sequence[Tensor],
    vjp: Vjp | Sequence[Vjp | None] | None,
    attributes: Attributes,
    types: tuple[TensorType, ...],
) -> tuple[Tensor, ...]:
    """Call the function, and use the gradient rules like those of a `custom_vjp`."""
    rules, count = rules_of(name, vjp, len(operands)), len(operands)

    def fn(xs: Tensors) -> Tensors:
        return [*run(name, xs, attributes, types)]

    def fwd(xs: Tensors) -> tuple[Tensors, Tensors]:
        results = fn(xs)
        return results, [*xs, *results]

    def bwd(saved: Tensors, gs: Maybe) -> Maybe:
        g: Any
        out: Any
        xs, results = saved[:count], saved[count:]
        if len(results) == 1:
            [g], out = gs, results[0]
        else:
            g, out = tuple(gs), tuple(results)
        parts: Maybe = []
        for x, rule in zip(xs, rules, strict=True):
            if not x.dtype.is_inexact:
                parts.append(None)
            else:  # the node that rejects a gradient then receives zeros
                parts.append(zeros_like(x) if rule is None else pull(name, rule, g, xs, out))
        return parts

    inputs = [
        _without_gradient(name, i, x) if rule is None and x.dtype.is_inexact else x
        for i, (x, rule) in enumerate(zip(operands, rules, strict=True))
    ]
    return tuple(CustomRule(name, fn, fwd=fwd, bwd=bwd)(inputs))


def _without_gradient(name: str, position: int, x: Tensor) -> Tensor:
    """Return the tensor with a node that raises `GradientError` for a gradient."""

    def refuse(*_: Any) -> NoReturn:
        raise GradientError(
            f"{name} has no gradient for operand {position}, {with_article(x.type)}: pass vjp= to "
            f"ml.host_call, or use stop_gradient(x)"
        )

    [y] = CustomRule(name, _aliased, fwd=lambda xs: (_aliased(xs), []), bwd=refuse)([x])
    return y


def _aliased(xs: Tensors) -> Tensors:
    return [alias_of(x) for x in xs]


if not TYPE_CHECKING:  # otherwise type checkers would allow any name
    __getattr__ = old_names(__name__, "ml", globals())
