"""Layers that normalise."""

from __future__ import annotations

from mlvm.core.errors import AttributeRefused
from mlvm.core.types import f32
from mlvm.eager import creation
from mlvm.eager import primitives as op
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import require_float, sizes
from mlvm.eager.tensor import Tensor


class LayerNorm(Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis, of length `features`
    (Ba et al., arXiv 1607.06450). The scale begins at one, the bias at zero."""

    scale: Tensor  # [features]
    bias: Tensor  # [features]

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: object = f32) -> None:
        shape = sizes("LayerNorm", features=features)
        if not eps > 0:
            raise AttributeRefused(f"LayerNorm: eps must be positive, given {eps}")
        dtype = require_float("LayerNorm", dtype)
        self.eps = eps
        self.scale = creation.ones(shape, dtype=dtype)
        self.bias = creation.zeros(shape, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return op.layer_norm(x, self.scale, self.bias, eps=self.eps)
