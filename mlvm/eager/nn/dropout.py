"""Dropout layers."""

from __future__ import annotations

from mlvm.core.errors import ArgumentError, ShapeError, brief
from mlvm.core.rules import is_real
from mlvm.eager.functions import creation, neural
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor.tensor import Tensor


class Dropout(Module):
    """Dropout: in training, zero each element of x with probability `rate`, and scale the rest.

    The remaining elements are multiplied by 1 / (1 - rate). Unless `training`, the layer returns x
    itself (Srivastava et al., JMLR 15, 2014). Each call draws with `key`, or with the next global
    key.

    x: f[...] -> f[...]. Raises `ArgumentError` unless 0 <= rate < 1; `DTypeError` if x is not of
    floats.

        >>> ml.nn.Dropout(0.5).eval()(ml.ones(3))
        Tensor([1., 1., 1.], f32[3])

    Invalid calls:
        ml.nn.Dropout(1.0)  # ArgumentError
        ml.nn.Dropout(0.5)(ml.ones((4, 4), dtype="bool"))  # DTypeError
    """

    def __init__(self, rate: float) -> None:
        if not (is_real(rate) and 0 <= rate < 1):
            raise ArgumentError(
                f"{type(self).__name__}: expected rate in [0, 1), got {brief(rate)}"
            )
        self.rate = float(rate)

    def __call__(self, x: Tensor, *, key: Tensor | None = None) -> Tensor:
        return neural.dropout(x, self.rate, key=key) if self.training else x


class _OfChannels(Dropout):
    """Base class of layers that drop whole channels, for inputs with `_axes` position axes."""

    _axes: int

    def __call__(self, x: Tensor, *, key: Tensor | None = None) -> Tensor:
        if x.ndim != self._axes + 2:
            name = type(self).__name__
            raise ShapeError(f"{name}: expected {self._axes + 2} dimensions, got {x.type}")
        if not self.training:
            return x
        mask = creation.ones((x.shape[0], *[1] * self._axes, x.shape[-1]), dtype=x.dtype)
        return x * neural.dropout(mask, self.rate, key=key)


class Dropout1d(_OfChannels):
    """Channel dropout for sequences: in training, zero each channel with probability `rate`.

    The remaining channels are multiplied by 1 / (1 - rate). Unless `training`, the layer returns x
    itself (Tompson et al., CVPR 2015).

    x: f[N, L, C] -> f[N, L, C]. Raises `ArgumentError` unless 0 <= rate < 1; `ShapeError` if x does
    not have 3 axes; `DTypeError` if x is not of floats.

        >>> ml.nn.Dropout1d(0.5).eval()(ml.ones((1, 4, 3))).shape
        (1, 4, 3)

    Invalid calls:
        ml.nn.Dropout1d(1.0)  # ArgumentError
        ml.nn.Dropout1d(0.5)(images)  # ShapeError
        ml.nn.Dropout1d(0.5)(sequences > 0.0)  # DTypeError
    """

    _axes = 1


class Dropout2d(_OfChannels):
    """Channel dropout for images: in training, zero each channel with probability `rate`.

    The remaining channels are multiplied by 1 / (1 - rate). Unless `training`, the layer returns x
    itself (Tompson et al., CVPR 2015).

    x: f[N, H, W, C] -> f[N, H, W, C]. Raises `ArgumentError` unless 0 <= rate < 1; `ShapeError` if
    x does not have 4 axes; `DTypeError` if x is not of floats.

        >>> ml.nn.Dropout2d(0.5).eval()(ml.ones((1, 4, 4, 3))).shape
        (1, 4, 4, 3)

    Invalid calls:
        ml.nn.Dropout2d(1.0)  # ArgumentError
        ml.nn.Dropout2d(0.5)(sequences)  # ShapeError
        ml.nn.Dropout2d(0.5)(images > 0.0)  # DTypeError
    """

    _axes = 2


class Dropout3d(_OfChannels):
    """Channel dropout for volumes: in training, zero each channel with probability `rate`.

    The remaining channels are multiplied by 1 / (1 - rate). Unless `training`, the layer returns x
    itself (Tompson et al., CVPR 2015).

    x: f[N, D, H, W, C] -> f[N, D, H, W, C]. Raises `ArgumentError` unless 0 <= rate < 1;
    `ShapeError` if x does not have 5 axes; `DTypeError` if x is not of floats.

        >>> ml.nn.Dropout3d(0.5).eval()(ml.ones((1, 4, 4, 4, 3))).shape
        (1, 4, 4, 4, 3)

    Invalid calls:
        ml.nn.Dropout3d(1.0)  # ArgumentError
        ml.nn.Dropout3d(0.5)(images)  # ShapeError
        ml.nn.Dropout3d(0.5)(volumes > 0.0)  # DTypeError
    """

    _axes = 3
