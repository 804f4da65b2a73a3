"""A function of tensors as a row of a table, and what is checked of each: values beside plain numpy
and PyTorch, in all floats; gradients; that captured it has the bits of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from tests.slopes import check_slopes

RNG = np.random.default_rng(8)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape)


class Row(NamedTuple):
    """A function, its operands, what numpy gives for them, and what PyTorch does, which is given
    its `functional`."""

    ours: Callable[..., ml.Tensor]
    operands: tuple[Array, ...]
    numpy: Callable[..., Any]
    theirs: Callable[..., Any] | None = None


def channels_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of PyTorch's that takes x and gives its result with channels last."""
    return lambda F, x, *rest: function(F, x.movedim(-1, 1), *rest).movedim(1, -1)


def t(x: Array, dtype: Any = None) -> ml.Tensor:
    return ml.asarray(x, dtype=dtype)


def beside_numpy(row: Row) -> None:
    expected = row.numpy(*row.operands)
    result = row.ours(*map(t, row.operands))
    assert result.dtype is ml.float64
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-10, atol=1e-12)
    for dtype, tolerance in ((ml.float32, 2e-5), (ml.float16, 1e-3), (ml.bfloat16, 8e-3)):
        narrow = [t(x, dtype) for x in row.operands]
        result = row.ours(*narrow)
        expected = row.numpy(*[ml.astype(x, ml.float64).numpy() for x in narrow])
        assert (result.dtype, result.shape) == (dtype, expected.shape)
        np.testing.assert_allclose(
            ml.astype(result, ml.float64).numpy(),
            expected,
            rtol=tolerance,
            atol=tolerance / 20 * max(np.abs(expected).max(initial=0), 1),
        )


def gradients(row: Row) -> None:
    check_slopes(row.ours, *map(t, row.operands))


def captured_is_eager(row: Row) -> None:
    ours = row.ours  # a captured function looks at all that it reaches

    def step(*xs: ml.Tensor) -> Any:
        y, pullback = ml.vjp(ours, *xs)
        return y, pullback(ml.cos(y))

    for dtype, fuse in ((ml.float32, False), (ml.bfloat16, False), (ml.float64, True)):
        captured = ml.capture(step, fuse=fuse)
        for sign in (1, -1, 1):
            xs = [t(sign * x, dtype) for x in row.operands]
            (y, slopes), (again, same) = step(*xs), captured(*xs)
            for one, other in zip((y, *slopes), (again, *same), strict=True):
                near = {"rtol": 1e-11, "atol": 1e-13} if fuse else {"rtol": 0, "atol": 0}
                np.testing.assert_allclose(one.numpy(), other.numpy(), **near)


def beside_torch(row: Row) -> None:
    torch = pytest.importorskip("torch")
    if row.theirs is None:
        pytest.skip("PyTorch has none")
    leaves = [torch.tensor(x, requires_grad=True) for x in row.operands]
    y = row.theirs(torch.nn.functional, *leaves)
    ours, pullback = ml.vjp(row.ours, *map(t, row.operands))
    np.testing.assert_allclose(ours.numpy(), y.detach().numpy(), rtol=1e-10, atol=1e-12)
    cotangent = normal(*y.shape)
    y.backward(torch.tensor(cotangent))
    for slope, leaf in zip(pullback(t(cotangent)), leaves, strict=True):
        # 1/6 is an f32 in PyTorch's slope of hardsigmoid
        np.testing.assert_allclose(slope.numpy(), leaf.grad.numpy(), rtol=1e-7, atol=1e-11)


CHECKS = beside_numpy, gradients, captured_is_eager, beside_torch
