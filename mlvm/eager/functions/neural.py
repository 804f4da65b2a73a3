"""Public functions of neural networks that no other file is about: dropout."""

from __future__ import annotations

from mlvm.eager.functions.random import next_key
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def dropout(x: Tensor, rate: float, *, key: Tensor | None = None) -> Tensor:
    """Each element of x with probability 1 - rate, times 1 / (1 - rate), else 0.

    Without a `key` the next global one decides. A rate of 0 changes and copies
    nothing.

    x: f[...], and so is the result. Raises `AttributeRefused` unless 0 <= rate < 1, `DTypeError`
    for other than floats, `ShapeError` for what is no key.

        >>> ml.dropout(ml.ones(3), 0.0)
        Tensor([1., 1., 1.], f32[3])
    """
    if rate == 0:
        return alias_of(x)
    return op.dropout(x, next_key() if key is None else key, rate=rate)
