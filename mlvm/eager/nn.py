"""Layers: Modules that hold parameters and are called on tensors.

A Module's fields are its parameters, submodules and buffers, assigned in `__init__`; annotations
on the class head are the inventory. Modules are trees, so `value_and_grad` and the optimizers
take them as they are.

Parameters are allocated in the current arena. They are drawn with `key`, a u64[2] of
`mlvm.eager.random`, or with the next global key where that is None. Bad hyperparameters raise
`AttributeRefused`, and a `dtype` that is no float `DTypeError`.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self, TypeVar, cast

from mlvm.core.errors import AttributeRefused, DTypeError, brief
from mlvm.core.types import DType, f32
from mlvm.eager import creation, random
from mlvm.eager import functions as fn
from mlvm.eager import primitives as op
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import (
    Buffer,
    Node,
    Tree,
    children,
    fields,
    holds_tensors,
    leaves,
    load,
    map_tree,
)
from mlvm.eager.tree import named_tensors as _named_tensors

__all__ = [
    "Conv2d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Sequential",
    "buffer",
]

T = TypeVar("T")
Pair = int | tuple[int, int]


class Module(Node):
    """Base of all layers and models: a tree of parameters, and of buffers that `buffer` makes,
    with a `__call__`.

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
        """The parameters as nested dicts by field name; a list field `Dense` as `Dense_0`, ..."""
        found: dict[str, Tree] = map_tree(lambda x: x, self)
        return found

    def named_parameters(self) -> dict[str, Tensor]:
        """The parameters by path, `block_0/token_mixing/kernel`; a shared one occurs once."""
        return _named_tensors(self)

    def named_buffers(self) -> dict[str, Tensor]:
        """The tensors of the buffers by path; a shared one occurs once."""
        parameters = dict(leaves(self))
        return {path: x for path, x in self.state().items() if path not in parameters}

    def state(self) -> dict[str, Tensor]:
        """All tensors by path, parameters and buffers: what a model is saved as."""
        return _named_tensors(self, buffers=True)

    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(x.size for x in self.named_parameters().values())

    def load_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over the parameters, in place, by the paths of `named_parameters`.

        Nothing is written unless all fit: raises `PathError` for paths that are missing or
        unknown, `DTypeError` for a wrong dtype and for what is no mapping to arrays, `ShapeError`
        for a wrong shape.
        """
        load(self.named_parameters(), arrays, "parameter")

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over parameters and buffers, in place, by the paths of `state`; otherwise as
        `load_parameters`."""
        load(self.state(), arrays, "tensor")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another Module, with copies of parameters and buffers in the current arena."""
        for x in self.state().values():
            if id(x) not in memo:
                memo[id(x)] = op.copy(x)
        twin = memo[id(self)] = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Module cannot be pickled; keep its state() as numpy arrays, "
            "and load_state(arrays) into a new one"
        )

    def __repr__(self) -> str:
        return "\n".join(_describe(self, ()))


def buffer(x: T) -> T:
    """What to assign to a field of a Module for state that is kept with the model and not trained:
    a tensor of any dtype, a container of tensors, or a Module whose parameters stay as they are.

    class Centered(Module):
        def __init__(self, features: int) -> None:
            self.scale = ones(features)
            self.mean = buffer(zeros(features))

        def __call__(self, x: Tensor, *, train: bool) -> Tensor:
            if train:
                self.mean += 0.1 * (stop_gradient(mean(x, axis=0)) - self.mean)
            return (x - self.mean) * self.scale

    The field has x itself. Whatever is assigned to it later is a buffer too, until the field is
    deleted. A gradient takes a buffer for a constant, and an optimizer does not see it; `state` has
    it. A function being differentiated may assign to it, and the Module keeps the new value. Inside
    an arena that is reset after the step, update it in place as above.

    Raises `DTypeError` for what holds no tensor.
    """
    if not holds_tensors(x):
        raise DTypeError(f"a buffer holds a tensor or several, not {brief(x)}; see asarray")
    return cast(T, Buffer(x))  # to a type checker it is what the field will have


def _describe(part: Tree, above: tuple[Tree, ...]) -> Iterator[str]:
    """A line for a part of a Module, and an indented one for each part of it."""
    if isinstance(part, Tensor):
        yield repr(part.type)
        return
    if any(part is each for each in above):
        yield f"{type(part).__name__}(...)"
        return
    named = dict(fields(part, buffers=True)) if isinstance(part, Node) else children(part)
    buffers = named.keys() - dict(fields(part)).keys() if isinstance(part, Node) else ()
    plain = [
        f"{name}={getattr(value, '__name__', None) or repr(value)}"
        for name, value in named.items()
        if not holds_tensors(value)
    ]
    yield type(part).__name__ + (f"({', '.join(plain)})" if plain else "")
    for name, value in named.items():
        if holds_tensors(value):
            head, *rest = _describe(value, (*above, part))
            yield f"  {name}: {'buffer ' if name in buffers else ''}{head}"
            yield from (f"  {line}" for line in rest)


class Linear(Module):
    """y = x kernel + bias along the last axis: [..., in_features] -> [..., out_features].

    With axis=-2 the map is along the second to last axis, y = kernel^T x + bias[:, None]:
    [..., in_features, n] -> [..., out_features, n]; nothing is transposed in memory.
    The kernel is LeCun normal, or zero with `zeros`, which draws nothing; the bias is zero.
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
        shape = _sizes("Linear", in_features=in_features, out_features=out_features)
        if axis not in (-1, -2):
            raise AttributeRefused(f"Linear: axis must be -1 or -2, given {axis!r}")
        self.axis = axis
        self.kernel = (
            creation.zeros(shape, dtype=_require_float("Linear", dtype))
            if zeros
            else _lecun_normal("Linear", shape, shape[0], key, dtype)
        )
        self.bias = creation.zeros(shape[1:], dtype=dtype) if bias else None

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
        shape = _sizes("LayerNorm", features=features)
        if not eps > 0:
            raise AttributeRefused(f"LayerNorm: eps must be positive, given {eps}")
        dtype = _require_float("LayerNorm", dtype)
        self.eps = eps
        self.scale = creation.ones(shape, dtype=dtype)
        self.bias = creation.zeros(shape, dtype=dtype)

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
        channels = _sizes("Conv2d", in_channels=in_channels, out_channels=out_channels)
        height, width = fn.pair(window, "window", "Conv2d")
        self.stride = fn.pair(stride, "stride", "Conv2d")
        if isinstance(padding, str) and padding not in ("SAME", "VALID"):
            raise AttributeRefused(
                f'Conv2d: padding must be "SAME", "VALID" or ((top, bottom), (left, right)), '
                f"given {padding!r}"
            )
        self.padding = padding
        shape = (height, width, *channels)
        self.kernel = _lecun_normal("Conv2d", shape, math.prod(shape[:3]), key, dtype)
        self.bias = creation.zeros(channels[1:], dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = fn.conv2d(x, self.kernel, stride=self.stride, padding=self.padding)
        return y if self.bias is None else y + self.bias


class Dropout(Module):
    """With `train`, each element of x times 1 / (1 - rate) with probability 1 - rate, else 0;
    without, x itself (Srivastava et al., JMLR 15, 2014). Each call draws with `key`, or with the
    next global key."""

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise AttributeRefused(f"Dropout: rate must be in [0, 1), given {rate}")
        self.rate = float(rate)

    def __call__(self, x: Tensor, *, train: bool, key: Tensor | None = None) -> Tensor:
        return fn.dropout(x, self.rate, key=key) if train else x


class Embedding(Module):
    """A row of `embedding` for each integer: i[...] -> [..., features]. The rows are normal of
    variance 1 / features. As in an index, -1 is the last row. Raises `OperandValueError` for an
    integer out of range."""

    embedding: Tensor  # [num_embeddings, features]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        shape = _sizes("Embedding", num_embeddings=num_embeddings, features=features)
        self.embedding = _lecun_normal("Embedding", shape, shape[1], key, dtype)

    def __call__(self, indices: Tensor) -> Tensor:
        return op.take(self.embedding, indices, axis=0)


class Sequential(Module):
    """The layers one after the other; each is a Module or a function of one tensor.

    `train` is passed on to each Dropout and Sequential, with a key made of `key` and the layer's
    place. Without a `key` they take the next global ones.
    """

    layers: tuple[Callable[..., Tensor], ...]

    def __init__(self, *layers: Callable[..., Tensor]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise AttributeRefused(
                    f"Sequential: layer {i} must be callable, given a {type(layer).__name__}"
                )
        self.layers = layers

    def __call__(self, x: Tensor, *, train: bool = False, key: Tensor | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if train and isinstance(layer, (Dropout, Sequential)):
                x = layer(x, train=True, key=None if key is None else random.fold_in(key, i))
            elif isinstance(layer, Dropout):
                x = layer(x, train=False)
            else:
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


def _sizes(layer: str, **sizes: object) -> tuple[int, ...]:
    """The sizes as ints. Raises `AttributeRefused` for the first that is no integer >= 1."""
    for name, size in sizes.items():
        if not _size(size):
            raise AttributeRefused(f"{layer}: {name} must be an integer >= 1, given {size!r}")
    return tuple(map(_size, sizes.values()))


def _size(value: Any) -> int:
    """The value, of Python or numpy, as an int; 0 if it is no integer >= 1."""
    try:
        return 0 if isinstance(value, bool) else max(operator.index(value), 0)
    except TypeError:
        return 0
