"""Complex numbers in the eager language: made, computed with, differentiated, captured."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.slopes import check_slopes

Z = np.array([[1 + 2j, -0.5j, 3], [0.25 - 1j, 2j, -1 - 1j]])
R = np.array([0.5, -1.5, 2.0])


def same(result: ml.Tensor, expected: Any) -> None:
    expected = np.asarray(expected)
    assert result.type == ml.asarray(expected).type
    np.testing.assert_array_equal(result.numpy(), expected)


def loss(z: Any, r: Any, f: Any = ml) -> Any:
    """A real number, through products, functions, parts and both kinds of operands."""
    y = f.exp(z * 0.3) * r + f.conj(z) / (2.0 + r * r) - f.sqrt(z * z + 9.0)
    y = y @ f.permute_dims(y, (1, 0)) + f.tanh(z[:, :2])
    return f.sum(f.abs(y)) + f.sum(f.real(y) * f.imag(y)) + f.sum(f.real(f.log(z + 5.0) * 1j))


def test_gradients_are_the_slopes() -> None:
    check_slopes(loss, ml.asarray(Z), ml.asarray(R), order=2)


def test_a_captured_step_is_the_eager_one() -> None:
    """Chains of complex elements are fused, and run by numpy's kernels."""

    def step(z: Any, factor: complex) -> Any:
        y = (z * factor + 1.0) * ml.conj(z) - 2j
        return y, ml.sum(ml.where(ml.real(y) > 0.0, y, -y), axis=0), ml.abs(y).astype("f32")

    captured = ml.capture(step)
    for factor in (2.0, 1 + 0.5j, -1j):
        for _ in range(2):
            for x in (ml.asarray(Z), ml.asarray(Z.astype("c8"))):
                for ours, eager in zip(captured(x, factor), step(x, factor), strict=True):
                    same(ours, eager.numpy())
