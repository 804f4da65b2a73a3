"""Linear, Bilinear, Embedding and EmbeddingBag layers."""

from __future__ import annotations

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.eager.functions import contraction, neural, shapes
from mlvm.eager.functions.creation import asarray
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import Init, bias_of, biased, kernel_of, matched, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


class Linear(Module):
    """Linear layer: y = x kernel + bias, [..., in_features] -> [..., out_features].

    With axis=-2 the map is applied along the second-to-last axis, y = kernel^T x + bias[:, None]:
    [..., in_features, n] -> [..., out_features, n]; the elements are not transposed in memory. By
    default the kernel is LeCun normal and the bias zero; `kernel_init` and `bias_init` replace
    them: see `ml.nn.init`.

    Raises `ShapeError` if x has a different number of features; `DTypeError` if x is wider than
    half-precision weights; `ArgumentError` if a size is below 1.

        >>> layer = ml.nn.Linear(3, 2)
        >>> layer(ml.ones((5, 3))).type
        f32[5,2]

    Invalid calls:
        ml.nn.Linear(0, 2)  # ArgumentError
        ml.nn.Linear(4, 2, dtype=ml.float16)(ml.ones(4))  # DTypeError
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
        kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        shape = sizes("Linear", in_features=in_features, out_features=out_features)
        if axis not in (-1, -2):
            raise ArgumentError(f"Linear: expected axis as -1 or -2, got {axis!r}")
        self.axis = axis
        self.kernel = kernel_of("Linear", kernel_init, shape, shape[0], key, dtype)
        self.bias = bias_of("Linear", bias_init, shape[1], key, dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        bias, x = self.bias, matched("Linear", x, self.kernel)
        try:
            if self.axis == -1:
                y = op.matmul(x, self.kernel)
                return biased(y, bias)
            y = op.matmul(self.kernel, x, transpose_x=True)
            return biased(y, None if bias is None else shapes.expand_dims(bias, axis=-1))
        except ShapeError:
            axis, features = self.axis, self.kernel.shape[0]
            if not isinstance(x, Tensor) or x.ndim < -axis or x.shape[axis] == features:
                raise  # the weights do not fit, or x is not a tensor
            actual = f"x has {x.shape[axis]} ({x.type}, axis {axis})"
            raise ShapeError(f"Linear: expected {features} features, {actual}") from None


class Bilinear(Module):
    """Bilinear layer: z_k = x kernel_k y + bias_k along the last axes.

    [..., in_features], [..., other_features] -> [..., out_features]. By default the kernel is LeCun
    normal and the bias zero; `kernel_init` and `bias_init` replace them: see `ml.nn.init`.

    Raises `ShapeError` if x or y has a different number of features; `DTypeError` if x is wider
    than half-precision weights; `ArgumentError` if a size is below 1.

        >>> ml.nn.Bilinear(3, 4, 2)(ml.ones((5, 3)), ml.ones((5, 4))).type
        f32[5,2]

    Invalid calls:
        ml.nn.Bilinear(0, 2, 3)  # ArgumentError
        ml.nn.Bilinear(4, 4, 2, dtype=ml.float16)(x, x)  # DTypeError
        ml.nn.Bilinear(4, 4, 3)(v, v)  # ShapeError
    """

    kernel: Tensor  # [in_features, other_features, out_features]
    bias: Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        other_features: int,
        out_features: int,
        *,
        bias: bool = True,
        kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        shape = sizes(
            "Bilinear",
            in_features=in_features,
            other_features=other_features,
            out_features=out_features,
        )
        self.kernel = kernel_of("Bilinear", kernel_init, shape, shape[0] * shape[1], key, dtype)
        self.bias = bias_of("Bilinear", bias_init, shape[2], key, dtype) if bias else None

    @public
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (matched("Bilinear", each, self.kernel) for each in (x, y))
        if (x.shape[-1:], y.shape[-1:]) != (self.kernel.shape[:1], self.kernel.shape[1:2]):
            raise ShapeError(
                f"Bilinear: expected x and y as [..., {self.kernel.shape[0]}] and [..., "
                f"{self.kernel.shape[1]}], got {x.type} and {y.type}"
            )
        return biased(contraction.einsum("...i,ijk,...j->...k", x, self.kernel, y), self.bias)


class Embedding(Module):
    """Embedding layer: one row of `embedding` per integer, i[...] -> [..., features].

    By default the rows are normal with variance 1 / features; `embedding_init` replaces them: see
    `ml.nn.init`. As in indexing, -1 is the last row.

    Raises `OperandValueError` if an integer is out of range; `DTypeError` if the indices are not
    integers; `ArgumentError` if a size is below 1.

        >>> ml.nn.Embedding(10, 4)(ml.asarray([[1, 2, 3]])).type
        f32[1,3,4]

    Invalid calls:
        ml.nn.Embedding(0, 3)  # ArgumentError
        ml.nn.Embedding(1, 3)(ints)  # PositionError
    """

    embedding: Tensor  # [num_embeddings, features]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        embedding_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name = type(self).__name__
        shape = sizes(name, num_embeddings=num_embeddings, features=features)
        self.embedding = kernel_of(
            name, embedding_init, shape, shape[1], key, dtype, name="embedding_init"
        )

    @public
    def __call__(self, indices: Tensor) -> Tensor:
        x = asarray(indices) if isinstance(indices, (int, np.integer)) else indices
        return op.take(self.embedding, x, axis=0)


class EmbeddingBag(Embedding):
    """Sum, mean or max of the rows of `embedding` for each bag of integers; see `embedding_bag`.

    Bags of equal length are i[..., L] -> [..., features]. Consecutive bags of different lengths are
    i[L] with offsets i[B] -> [B, features]. By default the rows are normal with variance 1 /
    features.

    Raises `PositionError` if an integer is out of range; `ShapeError` if the shapes do not fit;
    `DTypeError` if the indices are not integers; `ArgumentError` if a size is below 1 or
    `embedding_bag` rejects the arguments.

        >>> ml.nn.EmbeddingBag(10, 4)(ml.asarray([[1, 2, 3]])).type
        f32[1,4]

    Invalid calls:
        ml.nn.EmbeddingBag(0, 3)  # ArgumentError
        ml.nn.EmbeddingBag(1, 3)(ints)  # PositionError
        ml.nn.EmbeddingBag(5, 3)(ints[0])  # ShapeError
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        mode: neural.Reduction = "mean",
        embedding_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        super().__init__(
            num_embeddings, features, embedding_init=embedding_init, key=key, dtype=dtype
        )
        self.mode = mode

    @public
    def __call__(
        self, indices: Tensor, offsets: Tensor | None = None, *, weights: Tensor | None = None
    ) -> Tensor:
        return neural.embedding_bag(
            self.embedding, indices, offsets, mode=self.mode, weights=weights
        )
