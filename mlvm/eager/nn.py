"""Layers: Modules that hold parameters and are called on tensors.

A Module's fields are its parameters and submodules, assigned in `__init__`; annotations on
the class head are the inventory. Modules are trees, so `value_and_grad` and the optimizers
take them as they are.

Parameters are allocated in the current arena. They are drawn with `key`, a u64[2] of
`mlvm.eager.random`, or with the next global key where that is None. Bad hyperparameters raise
`AttributeRefused`, and a `dtype` that is no float `DTypeError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlvm.core.errors import AttributeRefused, DTypeError
from mlvm.core.types import DType, f32
from mlvm.eager import creation, random
from mlvm.eager import functions as fn
from mlvm.eager import primitives as op
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import Node, Tree, children, fields, holds_tensors, load, map_tree
from mlvm.eager.tree import named_tensors as _named_tensors

Pair = int | tuple[int, int]


class Module(Node):
    """Base of all layers and models: a tree of parameters with a `__call__`.

    class Mlp(Module):
        hidden: Linear
        head: Linear

        def __init__(self, features: int, classes: int) -> None:
            self.hidden = Linear(features, 64)
            self.head = Linear(64, classes)

        def __call__(self, x: Tensor) -> Tensor:
            return self.head(gelu(self.hidden(x)))
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def parameters(self) -> dict[str, Tree]:
        """The tensors as nested dicts by field name; a list field `Dense` as `Dense_0`, ..."""
        found: dict[str, Tree] = map_tree(lambda x: x, self)
        return found

    def named_parameters(self) -> dict[str, Tensor]:
        """The tensors by path, `block_0/token_mixing/kernel`; one that is shared only once."""
        return _named_tensors(self)

    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(x.size for x in self.named_parameters().values())

    def load_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over the parameters, in place, by the paths of `named_parameters`.

        Nothing is written unless all fit: raises `DTypeError` for paths that are missing or
        unknown and for a wrong dtype, `ShapeError` for a wrong shape.
        """
        load(self.named_parameters(), arrays, "parameter")

    def __repr__(self) -> str:
        return "\n".join(_describe(self))


def _describe(part: Tree) -> Iterator[str]:
    """A line for a part of a Module, and an indented one for each part of it."""
    if isinstance(part, Tensor):
        yield repr(part.type)
        return
    named = dict(fields(part)) if isinstance(part, Node) else children(part)
    plain = [
        f"{name}={getattr(value, '__name__', None) or repr(value)}"
        for name, value in named.items()
        if not holds_tensors(value)
    ]
    yield type(part).__name__ + (f"({', '.join(plain)})" if plain else "")
    for name, value in named.items():
        if holds_tensors(value):
            head, *rest = _describe(value)
            yield f"  {name}: {head}"
            yield from (f"  {line}" for line in rest)


class Linear(Module):
    """y = x kernel + bias along the last axis: [..., in_features] -> [..., out_features].

    With axis=-2 the map is along the second to last axis, y = kernel^T x + bias[:, None]:
    [..., in_features, n] -> [..., out_features, n]; nothing is transposed in memory for it.
    The kernel is LeCun normal, the bias zero.
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
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        _require_sizes("Linear", in_features=in_features, out_features=out_features)
        if axis not in (-1, -2):
            raise AttributeRefused(f"Linear: axis must be -1 or -2, given {axis!r}")
        self.axis = axis
        self.kernel = _lecun_normal("Linear", (in_features, out_features), in_features, key, dtype)
        self.bias = creation.zeros((out_features,), dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.axis == -1:
            y = op.matmul(x, self.kernel)
            return y if self.bias is None else y + self.bias
        y = op.matmul(self.kernel, x, transpose_x=True)
        return y if self.bias is None else y + fn.expand_dims(self.bias, axis=-1)


class LayerNorm(Module):
    """y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis, of length `features`
    (Ba et al., arXiv 1607.06450). The scale begins at one, the bias at zero."""

    scale: Tensor  # [features]
    bias: Tensor  # [features]

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: object = f32) -> None:
        _require_sizes("LayerNorm", features=features)
        if not eps > 0:
            raise AttributeRefused(f"LayerNorm: eps must be positive, given {eps}")
        dtype = _require_float("LayerNorm", dtype)
        self.eps = eps
        self.scale = creation.ones((features,), dtype=dtype)
        self.bias = creation.zeros((features,), dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return op.layer_norm(x, self.scale, self.bias, eps=self.eps)


class Conv2d(Module):
    """y = x * kernel + bias, cross-correlated: [N, H, W, in_channels] -> [N, OH, OW, out_channels].

    `window` and `stride` are numbers, or (vertical, horizontal). `padding` is "SAME", "VALID" or
    ((top, bottom), (left, right)) zeros. The kernel is LeCun normal, the bias zero.
    """

    kernel: Tensor  # [window height, window width, in_channels, out_channels]
    bias: Tensor | None  # [out_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Pair,
        *,
        stride: Pair = 1,
        padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME",
        bias: bool = True,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        _require_sizes("Conv2d", in_channels=in_channels, out_channels=out_channels)
        height, width = _pair("window", window)
        self.stride = _pair("stride", stride)
        if isinstance(padding, str) and padding not in ("SAME", "VALID"):
            raise AttributeRefused(
                f'Conv2d: padding must be "SAME", "VALID" or ((top, bottom), (left, right)), '
                f"given {padding!r}"
            )
        self.padding = padding
        shape = (height, width, in_channels, out_channels)
        self.kernel = _lecun_normal("Conv2d", shape, height * width * in_channels, key, dtype)
        self.bias = creation.zeros((out_channels,), dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = fn.conv2d(x, self.kernel, stride=self.stride, padding=self.padding)
        return y if self.bias is None else y + self.bias


class Dropout(Module):
    """Each element of x with probability 1 - rate, times 1 / (1 - rate), else 0, when `train`;
    x itself when not (Srivastava et al., JMLR 15, 2014). Each call draws with `key`, or with
    the next global key."""

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise AttributeRefused(f"Dropout: rate must be in [0, 1), given {rate}")
        self.rate = float(rate)

    def __call__(self, x: Tensor, *, train: bool, key: Tensor | None = None) -> Tensor:
        return fn.dropout(x, self.rate, key=key) if train else x


class Embedding(Module):
    """A row of `embedding` for each integer: i[...] -> [..., features]. The rows are normal of
    variance 1 / features. Raises `OperandValueError` for an integer that has no row."""

    embedding: Tensor  # [num_embeddings, features]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        _require_sizes("Embedding", num_embeddings=num_embeddings, features=features)
        shape = (num_embeddings, features)
        self.embedding = _lecun_normal("Embedding", shape, features, key, dtype)

    def __call__(self, indices: Tensor) -> Tensor:
        return op.take(self.embedding, indices, axis=0)


class Sequential(Module):
    """The layers one after the other; each is a Module or a function of one tensor."""

    layers: tuple[Callable[[Tensor], Tensor], ...]

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise AttributeRefused(
                    f"Sequential: layer {i} must be callable, given a {type(layer).__name__}"
                )
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _lecun_normal(
    layer: str, shape: tuple[int, ...], fan_in: int, key: Tensor | None, dtype: object
) -> Tensor:
    """Normal values of variance 1 / fan_in (LeCun et al., Efficient BackProp, 1998)."""
    kernel = random.normal(shape, key=key, dtype=_require_float(layer, dtype))
    kernel *= 1 / math.sqrt(fan_in)
    return kernel


def _require_float(layer: str, dtype: object) -> DType:
    dtype = DType.of(dtype)
    if not dtype.is_float:
        raise DTypeError(f"{layer}: dtype must be a float, given {dtype}")
    return dtype


def _require_sizes(layer: str, **sizes: object) -> None:
    for name, size in sizes.items():
        if not _is_size(size):
            raise AttributeRefused(f"{layer}: {name} must be an integer >= 1, given {size!r}")


def _pair(name: str, value: Pair) -> tuple[int, int]:
    """(vertical, horizontal) of Conv2d, where one number stands for both."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or not all(map(_is_size, pair)):
        raise AttributeRefused(f"Conv2d: {name} must be one or two integers >= 1, given {value!r}")
    return pair


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
