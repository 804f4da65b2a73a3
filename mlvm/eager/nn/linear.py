"""Layers of one product or one lookup: Linear, Embedding."""

from __future__ import annotations

from mlvm.core.errors import AttributeRefused
from mlvm.core.types import f32
from mlvm.eager.functions import creation, shapes
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import lecun_normal, matched, require_float, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


class Linear(Module):
    """y = x kernel + bias along the last axis: [..., in_features] -> [..., out_features].

    With axis=-2 the map is along the second to last axis, y = kernel^T x + bias[:, None]:
    [..., in_features, n] -> [..., out_features, n]; nothing is transposed in memory.
    The kernel is LeCun normal, or zero with `zeros`, which draws nothing; the bias is zero.

    Raises `ShapeError` for other features, `DTypeError` for a wider x than weights that are halves,
    `AttributeRefused` for a size below 1.

        >>> layer = ml.nn.Linear(3, 2)
        >>> layer(ml.ones((5, 3))).type
        f32[5,2]
    """

    kernel: Tensor  # [in_features, out_features]
    bias: Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        axis: int = -1,
        zeros: bool = False,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        shape = sizes("Linear", in_features=in_features, out_features=out_features)
        if axis not in (-1, -2):
            raise AttributeRefused(f"Linear: axis must be -1 or -2, given {axis!r}")
        self.axis = axis
        if zeros:
            self.kernel = creation.zeros(shape, dtype=require_float("Linear", dtype))
        else:
            self.kernel = lecun_normal("Linear", shape, shape[0], key, dtype)
        self.bias = creation.zeros(shape[1:], dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        bias, x = self.bias, matched("Linear", x, self.kernel)
        if self.axis == -1:
            y = op.matmul(x, self.kernel)
            return y if bias is None else y + bias
        y = op.matmul(self.kernel, x, transpose_x=True)
        return y if bias is None else y + shapes.expand_dims(bias, axis=-1)


class Embedding(Module):
    """A row of `embedding` for each integer: i[...] -> [..., features]. The rows are normal of
    variance 1 / features. As in an index, -1 is the last row.

    Raises `OperandValueError` for an integer out of range, `DTypeError` for what is no integers,
    `AttributeRefused` for a size below 1.

        >>> ml.nn.Embedding(10, 4)(ml.asarray([[1, 2, 3]])).type
        f32[1,3,4]
    """

    embedding: Tensor  # [num_embeddings, features]

    def __init__(
        self, num_embeddings: int, features: int, *, key: Tensor | None = None, dtype: object = f32
    ) -> None:
        shape = sizes("Embedding", num_embeddings=num_embeddings, features=features)
        self.embedding = lecun_normal("Embedding", shape, shape[1], key, dtype)

    @public
    def __call__(self, indices: Tensor) -> Tensor:
        return op.take(self.embedding, indices, axis=0)
