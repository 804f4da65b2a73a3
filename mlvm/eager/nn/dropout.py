"""Dropout."""

from __future__ import annotations

from mlvm.core.errors import ArgumentError, brief
from mlvm.eager.functions import neural
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor.tensor import Tensor


class Dropout(Module):
    """While `training`, multiply each element of x by 1 / (1 - rate) with probability 1 - rate,
    else by 0; otherwise return x itself (Srivastava et al., JMLR 15, 2014). Each call draws with
    `key`, or with the next global key.

    x: f[...] -> f[...]. Raises `ArgumentError` unless 0 <= rate < 1; `DTypeError` if x is not of
    floats.

        >>> ml.nn.Dropout(0.5).eval()(ml.ones(3))
        Tensor([1., 1., 1.], f32[3])

    Refuses:
        ml.nn.Dropout(1.0)  # ArgumentError
        ml.nn.Dropout(0.5)(ml.ones((4, 4), dtype="bool"))  # DTypeError
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ArgumentError(f"Dropout: expected rate in [0, 1), got {brief(rate)}")
        self.rate = float(rate)

    def __call__(self, x: Tensor, *, key: Tensor | None = None) -> Tensor:
        return neural.dropout(x, self.rate, key=key) if self.training else x
