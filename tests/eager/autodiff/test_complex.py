"""Complex numbers in the eager language: made, computed with, differentiated, captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.brief import cases, refuses
from tests.slopes import check_slopes

Z = np.array([[1 + 2j, -0.5j, 3], [0.25 - 1j, 2j, -1 - 1j]])
R = np.array([0.5, -1.5, 2.0])


def same(result: ml.Tensor, expected: Any) -> None:
    expected = np.asarray(expected)
    assert result.type == ml.asarray(expected).type
    np.testing.assert_array_equal(result.numpy(), expected)


def test_made_of_pythons_numbers() -> None:
    same(ml.asarray(1 + 2j), np.complex64(1 + 2j))
    same(ml.asarray([[1, 2.5], [True, -1j]]), np.array([[1, 2.5], [1, -1j]], "c8"))
    same(ml.asarray([1, 2], dtype="c128"), np.array([1, 2], "c16"))
    same(ml.full(2, 1j), np.full(2, 1j, "c8"))
    same(ml.full_like(ml.asarray(Z), 2.5), np.full_like(Z, 2.5))
    same(ml.ones((2, 2), dtype=ml.complex64), np.ones((2, 2), "c8"))
    same(ml.eye(2, dtype="c128"), np.eye(2, dtype="c16"))
    same(ml.pad(ml.asarray(Z), 1, 1 - 2j), np.pad(Z, 1, constant_values=1 - 2j))
    assert ml.asarray(Z).tolist() == Z.tolist()
    assert repr(ml.asarray([1 + 2j])) == "Tensor([1.+2.j], c64[1])"
    assert complex(ml.asarray(Z[0, 0])) == 1 + 2j


def test_indexed_and_updated() -> None:
    for dtype in ("c8", "c16"):
        z, expected = ml.asarray(Z.astype(dtype)), Z.astype(dtype)
        same(z[:, ::-2], expected[:, ::-2])
        same(z[ml.asarray([1, 0]), 2], expected[[1, 0], 2])
        same(z[ml.abs(z) > 1], expected[abs(expected) > 1])
        z += 1j
        z *= 2
        same(z, (expected + 1j) * 2)
        same(ml.unique_values(ml.concat([z, z])), np.unique((expected + 1j) * 2))


@cases(
    "call, error, text",
    (lambda z: ml.astype(z, "f32"), ml.errors.DTypeError, "take the real or imag part"),
    (lambda z: ml.sum(z, dtype="f64"), ml.errors.DTypeError, "take the real or imag part"),
    (lambda z: ml.asarray([1j], dtype="f32"), ml.errors.DTypeError, "do not become f32"),
    (lambda z: ml.asarray(Z, dtype="i64"), ml.errors.DTypeError, "real"),
    (lambda z: z < z, ml.errors.DTypeError, "it must be real"),
    (lambda z: z // 1, ml.errors.DTypeError, "it must be real"),
    (lambda z: ml.max(z), ml.errors.DTypeError, "it must be real"),
    (lambda z: ml.softmax(z, axis=0), ml.errors.DTypeError, "it must be float"),
    (lambda z: float(z[0, 0]), TypeError, "complex"),
    (lambda z: ml.optim.SGD({"z": z}, 0.1), ml.errors.DTypeError, "expected a float parameter"),
    (lambda z: ml.grad(lambda z: ml.sum(z))(z), ml.errors.GradientError, "take the real"),
    (lambda z: ml.grad(lambda z: ml.abs(ml.sum(ml.sign(z))))(z), ml.errors.GradientError, "sign"),
)
def test_refused(call: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    z = ml.asarray(Z)
    refuses(error, text, call, z)


def loss(z: Any, r: Any, f: Any = ml) -> Any:
    """A real number, through products, functions, parts and both kinds of operands."""
    y = f.exp(z * 0.3) * r + f.conj(z) / (2.0 + r * r) - f.sqrt(z * z + 9.0)
    y = y @ f.permute_dims(y, (1, 0)) + f.tanh(z[:, :2])
    return f.sum(f.abs(y)) + f.sum(f.real(y) * f.imag(y)) + f.sum(f.real(f.log(z + 5.0) * 1j))


def test_gradients_are_the_slopes() -> None:
    check_slopes(loss, ml.asarray(Z), ml.asarray(R), order=2)


def test_where_a_slope_is_infinite_or_turns_the_gradient_is_zero() -> None:
    """As of real numbers, and in PyTorch for `abs`."""
    root = ml.grad(lambda z: ml.real(ml.sum(ml.sqrt(z))))
    assert root(ml.asarray([0j, 4.0])).tolist() == [0, 0.25]
    size = ml.grad(lambda z: ml.sum(ml.abs(z)))
    for part in (ml.real, ml.imag):
        assert ml.grad(lambda z, part=part: ml.sum(part(size(z))))(ml.asarray([0j])).tolist() == [0]


def test_a_negative_number_to_a_complex_power() -> None:
    x, y = np.asarray([-2.0, 3.0]), np.asarray([1 + 1j, 0.5j])
    gradient = ml.grad(lambda y: ml.real(ml.sum(ml.asarray(x) ** y)))(ml.asarray(y))
    z = x.astype(complex)
    np.testing.assert_allclose(gradient.numpy(), np.conj(z**y * np.log(z)), rtol=1e-12)


def test_a_step_against_the_gradient_descends() -> None:
    z, goal = ml.asarray(Z), ml.asarray(Z[::-1].copy())
    for _ in range(60):
        z = z - 0.2 * ml.grad(lambda z: ml.sum(ml.square(ml.abs(z - goal))))(z)
    np.testing.assert_allclose(z.numpy(), goal.numpy(), atol=1e-10)


def test_control_flow_and_checkpoints_carry_complex_gradients() -> None:
    def power(z: Any) -> Any:
        return ml.fori_loop(0, 3, lambda i, y: y * z, z)

    def chosen(z: Any) -> Any:
        return ml.cond(ml.real(z[0]) > 0.0, lambda z: z * z, ml.conj, z)

    z = ml.asarray(Z[0])
    plain = ml.grad(lambda z: ml.real(ml.sum(z * z * z * z)))(z).numpy()
    for fn in (power, ml.checkpoint(power)):
        gradient: Any = ml.grad(lambda z, fn=fn: ml.real(ml.sum(fn(z))))  # type: ignore[misc]
        np.testing.assert_allclose(gradient(z).numpy(), plain, rtol=1e-12)
        np.testing.assert_allclose(ml.capture(gradient)(z).numpy(), plain, rtol=1e-12)
    check_slopes(chosen, z)
    gradient = ml.grad(lambda z: ml.imag(ml.sum(chosen(z))))  # type: ignore[misc]
    np.testing.assert_array_equal(ml.capture(gradient)(z).numpy(), gradient(z).numpy())


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
