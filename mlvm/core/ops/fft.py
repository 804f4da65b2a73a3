"""Discrete Fourier transforms along some axes; the kernels call numpy's pocketfft.

A transform has the lengths of the operand; `mlvm.eager.fft` truncates and pads before. Below, n is
the product of the lengths of all transformed axes. The result is divided by 1 ("backward"), sqrt(n)
("ortho") or n ("forward"); the result of an inverse transform by n, sqrt(n) or 1.

f32 and c64 are transformed in single precision. A transform of n elements counts as 5 n log2(n)
flops (Van Loan, Computational frameworks for the fast Fourier transform, 1992), a transform of real
elements as half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError, counted
from mlvm.core.op import internal
from mlvm.core.rules import normalize_axes, normalize_axis, require
from mlvm.core.types import Array, TensorType, c64, promote

Norm = Literal["backward", "ortho", "forward"]

OTHER_WAY: Final[dict[str, Norm]] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
"""Norm by the norm of a transform, such that the inverse transform has the same divisor."""

# --- type rules ----------------------------------------------------------------------


def _full(x: TensorType, axes: tuple[int, ...], norm: Norm) -> TensorType:
    require("inexact", x)
    for axis in normalize_axes(axes, x.ndim):
        _require_elements(x.shape[axis], axis)
    return x.with_dtype(promote(x.dtype, c64))


def _half(x: TensorType, axis: int, norm: Norm) -> TensorType:
    require("float", x)
    axis = normalize_axis(axis, x.ndim)
    _require_elements(x.shape[axis], axis)
    return _resized(x, axis, x.shape[axis] // 2 + 1).with_dtype(promote(x.dtype, c64))


def _whole(x: TensorType, n: int, axis: int, norm: Norm) -> TensorType:
    require("inexact", x)
    axis = normalize_axis(axis, x.ndim)
    if n < 1 or x.shape[axis] != n // 2 + 1:
        raise ArgumentError(
            f"expected {counted(n // 2 + 1, 'element')} on axis {axis} for {n} "
            f"real ones, got {x.shape[axis]}"
        )
    return _resized(x, axis, n).with_dtype(x.dtype.real)


def _resized(x: TensorType, axis: int, length: int) -> TensorType:
    return x.with_shape((*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _require_elements(length: int, axis: int) -> None:
    if length < 1:
        raise ShapeError(f"expected at least 1 element along axis {axis}, got {length}")


# --- how many operations -------------------------------------------------------------


def _butterflies(factor: float) -> Callable[..., int]:
    """Return a function that counts `factor` flops for each element and factor of two."""

    def flops(x: TensorType, n: int | None = None, **attributes: Any) -> int:
        axes = attributes["axes"] if "axes" in attributes else (attributes["axis"],)
        lengths = [x.shape[i] for i in axes] if n is None else [n]
        elements = x.size if n is None else x.size // x.shape[axes[0]] * n
        return round(factor * elements * math.log2(max(1, math.prod(lengths))))

    return flops


# --- kernels -------------------------------------------------------------------------


def _transform(
    function: Callable[..., Any], out: Array, x: Array, axes: tuple[int, ...], norm: Norm
) -> None:
    if axes:
        function(x, axes=axes, norm=norm, out=out)
    else:  # numpy would return x without writing to `out`
        np.copyto(out, x)


@internal(infer=_full, flops=_butterflies(5))
def fft(out: Array, x: Array, *, axes: tuple[int, ...] = (-1,), norm: Norm = "backward") -> None:
    """sum_j x_j exp(-2 pi i j k / n) for each k, along each of the axes: complex."""
    _transform(np.fft.fftn, out, x, axes, norm)


@internal(infer=_full, flops=_butterflies(5))
def ifft(out: Array, x: Array, *, axes: tuple[int, ...] = (-1,), norm: Norm = "backward") -> None:
    """sum_k x_k exp(2 pi i j k / n) / n for each j, along each of the axes: complex."""
    _transform(np.fft.ifftn, out, x, axes, norm)


@internal(infer=_half, flops=_butterflies(2.5))
def rfft(out: Array, x: Array, *, axis: int = -1, norm: Norm = "backward") -> None:
    """The first n // 2 + 1 elements of `fft` for n real elements along `axis`.

    The other elements are the conjugates of these in reverse order.
    """
    np.fft.rfft(x, axis=axis, norm=norm, out=out)


@internal(infer=_whole, flops=_butterflies(2.5))
def irfft(out: Array, x: Array, *, n: int, axis: int = -1, norm: Norm = "backward") -> None:
    """`ifft` of n elements with conjugate symmetry along `axis`: real.

    x has the first n // 2 + 1 elements; the others are the conjugates of these in reverse order.
    The imaginary parts of the first element, and for an even n of the last, are ignored.
    """
    np.fft.irfft(x, n, axis=axis, norm=norm, out=out)
