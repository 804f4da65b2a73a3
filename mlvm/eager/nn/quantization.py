"""Layers with low-bit weights, and `quantize`, which replaces a model's Linear layers by them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.tables import table
from mlvm.core.types import TensorType, f32, i8
from mlvm.eager.functions import elements, quantization, shapes
from mlvm.eager.nn.linear import Embedding, Linear
from mlvm.eager.nn.module import Module, buffer
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted, public
from mlvm.eager.tree import Where, fits, holds_tensors, named_leaves, named_nodes, no_match
from mlvm.renamed import OldAttribute

M = TypeVar("M", bound=Module)

_A_LOOKUP: Final = "a lookup, see nn.QuantizedEmbedding"


class QuantizedLinear(Module):
    """Linear layer with low-bit weights: y = x dequantize(weight, scale)^T + bias.

    f32[..., in_features] -> f32[..., out_features], by `quantized_matmul`. All tensors are buffers;
    gradients flow to x. A half-precision x is converted to f32.

    If `dynamic`, each row of x is also quantized to i8. The scale follows from the largest absolute
    value in the row. The layer computes an integer matrix product (`integer_matmul`). This requires
    i8 weights with one scale per row.

    Raises `DTypeError` and `ShapeError` for tensors that do not fit together.

        >>> q, scale = ml.quantize_groups(ml.asarray([[1.0, 2.0], [3.0, -1.0]]))
        >>> ml.nn.QuantizedLinear(q, scale)(ml.ones((1, 2))).shape
        (1, 2)

    Invalid calls:
        ml.nn.QuantizedLinear(v, v)  # ShapeError
        ml.nn.QuantizedLinear(quantized[1], quantized[1], dynamic=True)  # DTypeError
    """

    weight: Tensor  # [out_features, in_features]
    scale: Tensor  # f32[out_features, groups], or f32[out_features, groups, 2]
    bias: Tensor | None  # [out_features]

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
    ) -> None:
        shape = weight.shape[:1]
        if weight.ndim != 2 or scale.shape[:1] != shape or scale.ndim not in (2, 3):
            raise ShapeError(
                "QuantizedLinear: expected a weight [out, in] and its scale [out, groups] or "
                f"[out, groups, 2], got {weight.type} and {scale.type}"
            )
        if bias is not None and bias.shape != shape:
            raise ShapeError(f"QuantizedLinear: expected a bias {[*shape]}, got {bias.type}")
        if dynamic and (weight.dtype is not i8 or scale.type.shape[1:] != (1,)):
            raise DTypeError(
                "QuantizedLinear: dynamic: expected weights of i8 with one scale per row, got "
                f"{weight.type} with {scale.type}: quantize(model, 'i8', dynamic=True)"
            )
        self.weight, self.scale, self.dynamic = buffer(weight), buffer(scale), dynamic
        self.bias = None if bias is None else buffer(bias)

    @public
    def __call__(self, x: Tensor) -> Tensor:
        x = elements.astype(x, f32) if x.dtype.is_half else x
        if self.dynamic:
            rows, scale = quantization.quantize_groups(x)
            y = elements.astype(op.integer_matmul(rows, self.weight), f32)
            y = y * scale * shapes.reshape(self.scale, (-1,))
        else:
            y = op.quantized_matmul(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


class QuantizedEmbedding(Module):
    """Embedding with low-bit weights: a row of dequantize(embedding, scale) for each integer.

    i[...] -> f32[..., features], by `dequantize_rows`. Raises `OperandValueError` if an integer is
    out of range, `DTypeError` for indices that are not integers.

        >>> q, scale = ml.quantize_groups(ml.asarray([[1.0, 2.0], [3.0, -1.0]]))
        >>> ml.nn.QuantizedEmbedding(q, scale)(ml.asarray([1, 1, 0])).shape
        (3, 2)

    Invalid calls:
        ml.nn.QuantizedEmbedding(*quantized)([5])  # OperandValueError
        ml.nn.QuantizedEmbedding(*quantized)([0.5])  # DTypeError
    """

    embedding: Tensor  # [num_embeddings, features]
    scale: Tensor

    def __init__(self, embedding: Tensor, scale: Tensor) -> None:
        self.embedding, self.scale = buffer(embedding), buffer(scale)

    @public
    def __call__(self, indices: Tensor) -> Tensor:
        return op.dequantize_rows(indices, self.embedding, self.scale)


@public
def quantize(
    model: M,
    dtype: object = i8,
    *,
    group: int | None = None,
    dynamic: bool = False,
    where: Where | None = None,
) -> M:
    """Return a copy of a model in which Linear layers are replaced by QuantizedLinear layers.

    All other layers are shared with the model, which does not change: embeddings, norms,
    convolutions, recurrent layers and layers of custom classes. `quantization_errors` measures the
    error, and lists the layers that were not quantized.

    Arguments:

    - `dtype`: the dtype of the weights. Default: i8.

    - `group`: the number of elements per group (`quantize_groups`). Default: a whole row.

    - `dynamic`: also quantize rows of x to i8. Default: False.

    - `where`: selects the Linear layers, as in `Module.freeze`. Default: all.

    Raises `DTypeError` if `dtype` is not a low-bit or 8-bit type; `ShapeError` if the length of a
    row is not a multiple of `group`; `ArgumentError` if no Linear is selected, `group` is not a
    number of elements, or `dynamic` is combined with groups.

        >>> model = ml.nn.Sequential(ml.nn.Linear(64, 32), ml.gelu, ml.nn.Linear(32, 4))
        >>> small = ml.quantize(model, "i4", group=32)
        >>> small.layers[0].weight.type, small(ml.ones((1, 64))).shape
        (i4[32,64], (1, 4))

    Invalid calls:
        ml.quantize(ml.nn.LayerNorm(3))  # ArgumentError
        ml.quantize(ml.nn.Linear(2, 3), "f32")  # DTypeError
        ml.quantize(ml.nn.Linear(6, 3), group=4)  # ShapeError
    """
    target = quantization.require_quantized(dtype)
    if dynamic and target is not i8:
        raise ArgumentError(f"expected dtype i8 with dynamic=True, got {target.name}")
    if dynamic and group is not None:
        raise ArgumentError("dynamic=True uses one scale per row: omit group=")
    if not isinstance(model, (Module, list, tuple, dict)):
        raise ArgumentError(f"expected a Module, or a list or dict of Modules, got {brief(model)}")
    if group is not None and (type(group) is not int or group < 1):
        raise ArgumentError(
            f"expected group, the number of elements per scale, as an int >= 1, got {group!r}"
        )
    layers = dict(_linear_layers(model))
    if not layers:
        classes = dict.fromkeys(each.layer for each in _unquantized(model))
        raise ArgumentError(_no_linear([*classes]))
    chosen = {
        id(layer): path
        for path, layer in layers.items()
        if where is None or fits(where, path, layer.kernel)
    }
    if not chosen:
        raise no_match("*" if where is None else where, layers, "Linear layer")

    @cache
    def quantized(layer: Linear) -> QuantizedLinear:
        weight = elements.astype(shapes.permute_dims(layer.kernel, (1, 0)), f32)
        if group is not None and weight.shape[-1] % group:
            path = chosen[id(layer)]
            raise ShapeError(
                f"expected a group that divides the {weight.shape[-1]} input features of {path}, "
                f"got {group}"
            )
        q, scale = quantization.quantize_groups(weight, dtype, group=group)
        return QuantizedLinear(q, scale, layer.bias, dynamic=dynamic)

    quantized_model: M = _with_layers(model, quantized, chosen)
    return quantized_model


def _no_linear(classes: list[str]) -> str:
    """Return the reason why a tree of such layers contains nothing to quantize, and a remedy."""
    there = f"expected a model with Linear layers, got {', '.join(classes) or 'no layers'}"
    if "Embedding" in classes:
        remedy = "ml.nn.QuantizedEmbedding(*ml.quantize_groups(layer.embedding))"
        return f"{there}; for an Embedding write {remedy}"
    return f"{there}; see ml.quantize_groups for a tensor"


class Row(NamedTuple):
    """Layer with low-bit weights.

    Attributes:
        path: path in the model.
        weight: type of the weights.
        nbytes: bytes of weights and scales.
        nbytes_before: bytes of the Linear.
        weight_error: relative root mean square error of the weights.
        output_error: relative root mean square error of the outputs of all calls; None if the layer
            was not called.
    """

    path: str
    weight: TensorType
    nbytes: int
    nbytes_before: int
    weight_error: float
    output_error: float | None


class UnquantizedLayer(NamedTuple):
    """Layer that was not quantized: path, class, bytes of floats, and the reason."""

    path: str
    layer: str
    nbytes: int
    why: str


class QuantizationErrors:
    """Table of the layers that `quantize` has replaced; `rows` contains the numbers.

    `unquantized` lists the layers that were not quantized."""

    def __init__(self, rows: list[Row], unquantized: list[UnquantizedLayer]) -> None:
        self.rows = rows
        self.unquantized = unquantized

    if not TYPE_CHECKING:
        left = OldAttribute("QuantizationErrors", "left")

    def __repr__(self) -> str:
        head = ("bytes", "before", "weight error", "output error", "weight", "layer")
        cells = [
            (
                f"{row.nbytes:,}",
                f"{row.nbytes_before:,}",
                f"{row.weight_error:.2e}",
                "" if row.output_error is None else f"{row.output_error:.2e}",
                str(row.weight),
                row.path,
            )
            for row in self.rows
        ]
        return "\n".join([*table([head, *cells], right=4), *self._stays()])

    def _stays(self) -> list[str]:
        """Return one line for each class of unquantized layers and reason."""
        nbytes: dict[tuple[str, str], int] = {}
        for each in self.unquantized:
            kind = each.layer, each.why
            nbytes[kind] = nbytes.get(kind, 0) + each.nbytes
        largest = sorted(nbytes.items(), key=lambda item: -item[1])
        return [f"not quantized: {n:,} bytes of {layer}, {why}" for (layer, why), n in largest]


class _Compared(Module):
    """Linear layer that accumulates the errors of the quantized layer's outputs."""

    def __init__(self, layer: Linear, quantized: QuantizedLinear) -> None:
        self.layer, self.quantized = layer, quantized
        self.sums = [0.0, 0.0]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        error = y - self.quantized(x)
        self.sums[0] += float(op.sum(op.square(error)))
        self.sums[1] += float(op.sum(op.square(y)))
        return y


@hinted
def quantization_errors(model: Module, quantized: Module, *inputs: Any) -> QuantizationErrors:
    """Measure the error of each quantized layer compared with the original Linear.

    The error of the weights is always measured; with `inputs`, also the error of the outputs in a
    call of the model. Each layer gets inputs from the unquantized model, so that no error is
    counted twice. The table also lists the layers that were not quantized, with bytes and the
    reason.

    Raises `ArgumentError` if `quantized` is not a result of `quantize` for the model.

        >>> model = ml.nn.Linear(64, 4)
        >>> ml.quantization_errors(model, ml.quantize(model, "i8"), ml.ones((1, 64))).rows[0].weight
        i8[4,64]

    Invalid calls:
        ml.quantization_errors(ml.nn.Linear(2, 3), ml.nn.Linear(2, 3))  # ArgumentError
    """
    before, pairs = dict(_linear_layers(model)), {}
    for path, layer in named_nodes(quantized):
        if isinstance(layer, QuantizedLinear) and path in before:
            pairs[path] = (before[path], layer)
    if not pairs:
        raise ArgumentError(
            "quantization_errors: expected a model and the result of quantize(model), "
            "got Modules without a common quantized layer"
        )
    compared = {id(layer): _Compared(layer, other) for layer, other in pairs.values()}
    if inputs:
        chosen = {id(layer): path for path, (layer, _) in pairs.items()}
        _with_layers(model, lambda layer: compared[id(layer)], chosen)(*inputs)
    return QuantizationErrors(
        [
            Row(
                path,
                other.weight.type,
                other.weight.nbytes + other.scale.nbytes,
                layer.kernel.nbytes,
                _share(op.dequantize(other.weight, other.scale), layer.kernel.mT),
                _root(*compared[id(layer)].sums) if compared[id(layer)].sums[1] else None,
            )
            for path, (layer, other) in pairs.items()
        ],
        list(_unquantized(quantized)),
    )


def _unquantized(tree: Any) -> Iterator[UnquantizedLayer]:
    """Yield the layers with float tensors that are not quantized."""
    layers = dict(named_nodes(tree))
    nbytes = dict.fromkeys(layers, 0)
    for owner, x in named_leaves(tree, buffers=True):
        while owner and owner not in layers:
            owner = owner.rpartition("/")[0]
        if x.dtype.is_float and owner in layers:
            nbytes[owner] += x.nbytes
    for path, layer in layers.items():
        if nbytes[path] and not isinstance(layer, (QuantizedLinear, QuantizedEmbedding)):
            yield UnquantizedLayer(path, type(layer).__name__, nbytes[path], _why(layer))


def _why(layer: object) -> str:
    if type(layer) is Linear:
        return "not selected by where=" if layer.axis == -1 else "axis other than -1"
    return _A_LOOKUP if isinstance(layer, Embedding) else "not a Linear"


def _share(x: Tensor, y: Tensor) -> float:
    y = elements.astype(y, f32)
    return _root(float(op.sum(op.square(x - y))), float(op.sum(op.square(y))))


def _root(error: float, whole: float) -> float:
    return math.sqrt(error / whole) if whole else math.sqrt(error)


def _linear_layers(model: Any) -> Iterator[tuple[str, Linear]]:
    for path, layer in named_nodes(model):
        if type(layer) is Linear and layer.axis == -1 and layer.kernel.dtype.is_float:
            yield path, layer


def _with_layers(tree: Any, build: Callable[[Linear], Module], chosen: Mapping[int, str]) -> Any:
    """Replace the chosen layers of the tree by `build(layer)`; Modules are copied."""
    copies: dict[int, Any] = {}

    def of(part: Any) -> Any:
        if id(part) in chosen:
            return build(part)
        if isinstance(part, (list, tuple)) and type(part) in (list, tuple):
            return type(part)([of(each) for each in part])
        if type(part) is dict:
            return {name: of(each) for name, each in part.items()}
        if not isinstance(part, Module):
            return part
        if id(part) not in copies:
            copied = copies[id(part)] = copy.copy(part)
            for name, child in vars(part).items():
                if isinstance(child, (Module, list, tuple, dict)) and holds_tensors(child):
                    vars(copied)[name] = of(child)
        return copies[id(part)]

    return of(tree)
