"""Normalisation layers."""

from __future__ import annotations

import math

from mlvm.core.errors import ArgumentError, ShapeError, brief, counted
from mlvm.core.types import DType, f32
from mlvm.eager.functions import creation, shapes
from mlvm.eager.functions.elements import astype, stop_gradient
from mlvm.eager.functions.halves import in_f32, rounded, widened
from mlvm.eager.functions.sums import over_batch
from mlvm.eager.nn.module import Module, buffer
from mlvm.eager.nn.parameters import matched, require_float, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.templates import call
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


class LayerNorm(Module):
    """Layer normalisation: y = (x - mean) / sqrt(var + eps) * scale + bias over the last axis.

    The axis has length `features` (Ba et al., arXiv 1607.06450). The scale is initialised to one,
    the bias to zero.

    [..., features] -> the same. Raises `ShapeError` if x has a different number of features;
    `DTypeError` if x is not of floats, or is wider than half-precision weights; `ArgumentError` if
    `features` is below 1 or eps <= 0.

        >>> ml.nn.LayerNorm(3)(ml.asarray([[1.0, 2.0, 3.0]]))
        Tensor([[-1.224744,  0.      ,  1.224744]], f32[1,3])

    Invalid calls:
        ml.nn.LayerNorm(4, eps=0.0)  # ArgumentError
    """

    scale: Tensor  # [features]
    bias: Tensor  # [features]

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: object = None) -> None:
        shape, self.eps, kind = _checked("LayerNorm", features, eps, dtype)
        self.scale = creation.ones(shape, dtype=kind)
        self.bias = creation.zeros(shape, dtype=kind)

    def __call__(self, x: Tensor) -> Tensor:
        x = matched("LayerNorm", x, self.scale)
        return op.layer_norm(x, self.scale, self.bias, eps=self.eps)


class RMSNorm(Module):
    """RMS normalisation: y = x / sqrt(mean(x^2) + eps) * scale over the last axis.

    The axis has length `features` (Zhang and Sennrich, arXiv 1910.07467). The scale is initialised
    to one.

    [..., features] -> the same. Raises `ShapeError` if x has a different number of features;
    `DTypeError` if an operand is bool; `ArgumentError` if `features` is below 1 or eps <= 0.

        >>> ml.nn.RMSNorm(2)(ml.asarray([[1.0, 1.0]]))
        Tensor([[0.9999995, 0.9999995]], f32[1,2])

    Invalid calls:
        ml.nn.RMSNorm(4, eps=0.0)  # ArgumentError
    """

    scale: Tensor  # [features]

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: object = None) -> None:
        shape, self.eps, kind = _checked("RMSNorm", features, eps, dtype)
        self.scale = creation.ones(shape, dtype=kind)

    def __call__(self, x: Tensor) -> Tensor:
        x = matched("RMSNorm", x, self.scale)
        _require_features("RMSNorm", x, self.scale)
        return _rms_norm(x, self.scale, self.eps)


class GroupNorm(Module):
    """Group normalisation: y = (x - mean) / sqrt(var + eps) * scale + bias.

    Mean and variance are computed over a group of channels and all positions of a sample (Wu and
    He, arXiv 1803.08494): [N, ..., channels] -> the same. `channels` must be a multiple of
    `groups`; with one group per channel it is an `InstanceNorm`. The scale is initialised to one,
    the bias to zero.

    Raises `ShapeError` if x has a different number of channels or fewer than two axes;
    `ArgumentError` if `channels` is not a multiple of `groups` or eps <= 0.

        >>> ml.nn.GroupNorm(2, 4)(ml.ones((1, 3, 3, 4))).type
        f32[1,3,3,4]

    Invalid calls:
        ml.nn.GroupNorm(3, 4)  # ArgumentError
    """

    scale: Tensor  # [channels]
    bias: Tensor  # [channels]

    def __init__(
        self, groups: int, channels: int, *, eps: float = 1e-5, dtype: object = None
    ) -> None:
        shape, self.eps, kind = _checked(type(self).__name__, channels, eps, dtype, "channels")
        [self.groups] = sizes("GroupNorm", groups=groups)
        if shape[0] % self.groups:
            raise ArgumentError(
                f"GroupNorm: expected groups that divide channels, got {self.groups} of {shape[0]}"
            )
        self.scale = creation.ones(shape, dtype=kind)
        self.bias = creation.zeros(shape, dtype=kind)

    @public
    def __call__(self, x: Tensor) -> Tensor:
        x = matched(type(self).__name__, x, self.scale)
        _require_features(type(self).__name__, x, self.scale, least=2)
        args = x, self.scale, self.bias, self.groups, self.eps
        return call(_group_norm, args, {})  # type: ignore[no-any-return]


class InstanceNorm(GroupNorm):
    """Instance normalisation: y = (x - mean) / sqrt(var + eps) * scale + bias.

    Mean and variance of each channel are computed over all positions of a sample: [N, ...,
    channels] -> the same. It is a `GroupNorm` with one group per channel (Ulyanov et al., arXiv
    1607.08022). It corresponds to PyTorch's InstanceNorm1d, 2d and 3d, but expects channels last.
    The scale is initialised to one, the bias to zero.

    Raises `ShapeError` if x has a different number of channels or fewer than two axes;
    `ArgumentError` if eps <= 0.

        >>> ml.nn.InstanceNorm(4)(ml.ones((1, 3, 3, 4))).type
        f32[1,3,3,4]

    Invalid calls:
        ml.nn.InstanceNorm(0)  # ArgumentError
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, dtype: object = None) -> None:
        super().__init__(channels, channels, eps=eps, dtype=dtype)


class BatchNorm(Module):
    """Batch normalisation: y = (x - mean) / sqrt(var + eps) * scale + bias for each channel.

    [..., channels] -> the same (Ioffe and Szegedy, arXiv 1502.03167). It corresponds to PyTorch's
    BatchNorm1d and BatchNorm2d, but expects channels last. The scale is initialised to one, the
    bias to zero.

    While `training`, mean and variance are computed from x over all axes except the last. The
    running values are then updated as in PyTorch: running += momentum (new - running), with the
    unbiased variance. In other modes the running values are used. They are buffers, updated in
    place, and f32 for half-precision weights.

    Raises `ShapeError` if x has a different number of channels or a channel has only one value
    while `training`; `DTypeError` if an operand is complex; `ArgumentError` if `channels` is below
    1, or momentum or eps is out of range.

        >>> ml.nn.BatchNorm(3)(ml.ones((8, 3))).type
        f32[8,3]

    Invalid calls:
        ml.nn.BatchNorm(0)  # ArgumentError
    """

    scale: Tensor  # [channels]
    bias: Tensor  # [channels]
    mean: Tensor  # [channels], a buffer
    var: Tensor  # [channels], a buffer

    def __init__(
        self, channels: int, *, momentum: float = 0.1, eps: float = 1e-5, dtype: object = None
    ) -> None:
        shape, self.eps, kind = _checked("BatchNorm", channels, eps, dtype, "channels")
        if not 0 <= momentum <= 1:
            raise ArgumentError(f"BatchNorm: expected momentum in [0, 1], got {brief(momentum)}")
        self.momentum = float(momentum)
        self.scale = creation.ones(shape, dtype=kind)
        self.bias = creation.zeros(shape, dtype=kind)
        running = f32 if kind.is_half else kind
        self.mean = buffer(creation.zeros(shape, dtype=running))
        self.var = buffer(creation.ones(shape, dtype=running))

    @public
    def __call__(self, x: Tensor) -> Tensor:
        x = matched("BatchNorm", x, self.scale)
        _require_features("BatchNorm", x, self.scale)
        count = x.size // max(x.shape[-1], 1)
        if self.training and count < 2:
            raise ShapeError(
                f"BatchNorm: {widened(x).type} has {counted(count, 'value')} per channel, "
                f"too few for a variance; use eval() for single samples"
            )
        momentum = self.momentum if self.training else None
        args = x, self.scale, self.bias, self.mean, self.var, momentum, self.eps
        return call(_batch_norm, args, {})  # type: ignore[no-any-return]


@in_f32
def _group_norm(x: Tensor, scale: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    positions = shapes.reshape(x, (x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]))
    centered = positions - _over_groups(op.mean(positions, axis=1, keepdims=True), groups)
    variance = _over_groups(op.mean(op.square(centered), axis=1, keepdims=True), groups)
    y = centered * (op.rsqrt(variance + eps) * scale) + bias
    return shapes.reshape(y, x.shape)


def _over_groups(means: Tensor, groups: int) -> Tensor:
    """Replace means of channels, f[N, 1, channels], by group means.

    Reducing the positions first, and then the channels, is much faster than reducing both
    together."""
    shape = (means.shape[0], 1, groups, means.shape[2] // groups)
    grouped = shapes.reshape(means, shape)
    mean = op.mean(grouped, axis=3, keepdims=True)
    return shapes.reshape(shapes.broadcast_to(mean, shape), means.shape)


def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalise by running values; with a momentum, by values of x, and update running values.

    It is a function of tensors and numbers, so that a template may run it."""
    dtype, x, scale, bias = x.dtype, widened(x), widened(scale), widened(bias)
    if momentum is None:
        factor = scale * op.rsqrt(running_var + eps)
        y = x * factor + (bias - running_mean * factor)
        return rounded(y, dtype) if dtype.is_half else y
    axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    mean = over_batch(op.mean, x, axes)
    centered = x - mean
    variance = over_batch(op.mean, op.square(centered), axes)
    unbiased = stop_gradient(variance) * (count / (count - 1))
    for running, new in ((running_mean, stop_gradient(mean)), (running_var, unbiased)):
        running += momentum * (astype(new, running.dtype) - running)
    y = centered * (scale * op.rsqrt(variance + eps)) + bias
    return rounded(y, dtype) if dtype.is_half else y


@in_f32
def _rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * op.rsqrt(op.mean(op.square(x), axis=-1, keepdims=True) + eps) * scale


def _checked(
    layer: str, features: int, eps: float, dtype: object, name: str = "features"
) -> tuple[tuple[int, ...], float, DType]:
    """Check the arguments of a layer; return the shape of the scale, eps and dtype.

    Raises `ArgumentError` or `DTypeError`."""
    shape = sizes(layer, **{name: features})
    if not eps > 0:
        raise ArgumentError(f"{layer}: expected a positive eps, got {eps}")
    return shape, eps, require_float(layer, dtype)


def _require_features(layer: str, x: Tensor, scale: Tensor, least: int = 1) -> None:
    if x.ndim < least or x.shape[-1] != scale.size:
        before = "N, ..., " if least > 1 else "..., "
        raise ShapeError(f"{layer}: expected x as [{before}{scale.size}], got {x.type}")
