"""`ml.fft` beside numpy, finite differences and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from mlvm.core.types import Array
from tests.brief import cases
from tests.slopes import check_slopes

fft: Any = ml.fft
RNG = np.random.default_rng(41)
NORMS = ["backward", "ortho", "forward"]


def operand(*shape: int, real: bool = False, dtype: str = "d") -> Array:
    x = RNG.standard_normal(shape)
    return x.astype(dtype) if real else (x + 1j * RNG.standard_normal(shape)).astype(dtype.upper())


def assert_like(result: Any, expected: Array) -> None:
    """Equal dtypes, shapes and, nearly, values."""
    array = np.asarray(result)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    tolerance = 1e-5 if array.dtype.char in "fF" else 1e-12
    np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_one_axis_as_numpy(name: str, norm: str) -> None:
    for dtype in "fd":
        for real in (True, False):
            if name in ("rfft", "ihfft") and not real:
                continue
            x = operand(3, 4, 2, real=real, dtype=dtype)
            for n in (None, 1, 3, 4, 7):
                for axis in (1, -3):
                    expected = getattr(np.fft, name)(x, n, axis, norm)
                    assert_like(getattr(fft, name)(ml.asarray(x), n, axis, norm), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_several_axes_as_numpy(name: str, norm: str) -> None:
    x = operand(3, 4, 2, real=name == "rfftn")
    for s, axes in (
        (None, None),
        (None, (0,)),
        (None, [2, 0]),
        ((2, 5), (0, 1)),
        ((-1, 6), (1, 2)),
        ([5, 3, 4], [-1, 0, 1]),
    ):
        expected = getattr(np.fft, name)(x, s, axes, norm)
        assert_like(getattr(fft, name)(ml.asarray(x), s=s, axes=axes, norm=norm), expected)


def test_a_last_length_of_minus_one_is_what_the_axis_has() -> None:
    """Of the result: twice what there is, less two."""
    x = operand(3, 4)
    assert_like(fft.irfftn(ml.asarray(x), s=(3, -1), axes=(0, 1)), np.fft.irfftn(x))
    assert_like(fft.irfftn(ml.asarray(x), s=-1, axes=1), np.fft.irfft(x))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_one_length_and_axis_need_no_tuple(name: str) -> None:
    transform = getattr(fft, name)
    x = ml.asarray(operand(3, 4)) if name == "irfftn" else ml.ones((3, 4))
    result, expected = transform(x, s=2, axes=1), transform(x, s=(2,), axes=(1,))
    assert result.tolist() == expected.tolist()


def test_there_and_back() -> None:
    x, y = ml.asarray(operand(2, 5)), ml.asarray(operand(2, 5, real=True))
    for norm in NORMS:
        for there, back, value, how in (
            (fft.fftn, fft.ifftn, x, {}),
            (fft.rfftn, fft.irfftn, y, {"s": (2, 5), "axes": (0, 1)}),
            (fft.ihfft, fft.hfft, y, {"n": 5}),
        ):
            assert_like(back(there(value, norm=norm), norm=norm, **how), value.numpy())


def test_integers_become_the_default_float() -> None:
    assert_like(fft.rfft(ml.asarray([1, 2, 3])), np.fft.rfft([1, 2, 3]).astype("F"))
    assert fft.fft(ml.asarray([True, False])).dtype is ml.complex64


def test_frequencies() -> None:
    for n in (1, 2, 5, 8):
        for name in ("fftfreq", "rfftfreq"):
            expected = getattr(np.fft, name)(n, 0.3)
            assert_like(getattr(fft, name)(n, d=0.3, dtype=ml.float64), expected)
            assert_like(getattr(fft, name)(n, d=0.3), expected.astype("f"))


def test_shifts() -> None:
    x = operand(3, 4)
    for axes in (None, 0, (0, 1), (-1,)):
        assert_like(fft.fftshift(ml.asarray(x), axes=axes), np.fft.fftshift(x, axes))
        assert_like(fft.ifftshift(ml.asarray(x), axes=axes), np.fft.ifftshift(x, axes))
    assert fft.fftshift(ml.asarray(2.0)).item() == 2.0


# --- gradients -------------------------------------------------------------------------


GRADIENTS: list[tuple[str, Callable[..., Any]]] = [
    ("fft", lambda x: fft.fft(x, 3)),
    ("ifft", lambda x: fft.ifft(x, 5, norm="ortho")),
    ("fftn", lambda x: fft.fftn(x, norm="forward")),
    ("irfft", lambda x: fft.irfft(x)),
    ("irfft, odd", lambda x: fft.irfft(x, 5, axis=0)),
    ("irfftn", lambda x: fft.irfftn(x, norm="ortho")),
    ("hfft", lambda x: fft.hfft(x, norm="forward")),
]


@pytest.mark.parametrize(("name", "function"), GRADIENTS, ids=[each[0] for each in GRADIENTS])
def test_gradients(name: str, function: Callable[..., Any]) -> None:
    check_slopes(function, ml.asarray(operand(2, 4)), order=2)


@pytest.mark.parametrize("n", [4, 5])
def test_gradients_of_real_operands(n: int) -> None:
    x = ml.asarray(operand(2, n, real=True))

    def function(x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return fft.rfft(x), fft.fftn(x), fft.ihfft(x, norm="ortho"), fft.irfft(x)

    check_slopes(function, x, order=2)


@pytest.mark.parametrize("name", ["fft", "irfft", "hfft"])
def test_gradients_are_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = operand(3, 4)
    theirs = torch.tensor(x, requires_grad=True)
    torch.sum(torch.abs(getattr(torch.fft, name)(theirs))).backward()
    ours = ml.grad(lambda x: ml.sum(ml.abs(getattr(fft, name)(x))))(ml.asarray(x))
    np.testing.assert_allclose(
        ours.numpy(), theirs.grad.resolve_conj().numpy(), rtol=1e-9, atol=1e-9
    )


def test_captured_is_eager_bit_for_bit() -> None:
    def filtered(x: ml.Tensor) -> Any:
        return fft.irfft(fft.rfft(x) * fft.rfftfreq(x.shape[-1]), x.shape[-1])

    x, step = ml.asarray(operand(3, 8, real=True)), ml.capture(filtered)
    for _ in range(2):
        np.testing.assert_array_equal(step(x).numpy(), filtered(x).numpy())


# --- refused ---------------------------------------------------------------------------

x, z = ml.ones((2, 3)), ml.ones((2, 3)) * 1j


@cases(
    "call, error, text",
    (lambda: fft.rfft(z), DTypeError, r"rfft\(c64\[2,3\]\): expected real numbers; fft takes"),
    (lambda: fft.ihfft(z), DTypeError, "ihfft.*expected real numbers"),
    (lambda: fft.fft(x, 0), ShapeError, "fft.*1 element or more along axis 1, got 0"),
    (lambda: fft.irfft(z[:, :1]), ShapeError, "irfft.*1 element or more along axis 1, got 0"),
    (lambda: fft.fft(ml.ones((2, 0))), ShapeError, "1 element or more"),
    (lambda: fft.fft(x, axis=2), ArgumentError, "fft.*axis 2 is out of range"),
    (lambda: fft.fft(ml.asarray(1.0)), ArgumentError, "out of range for 0 dimensions"),
    (lambda: fft.fft(x, 2.5), ArgumentError, "expected n as an int, got 2.5"),
    (lambda: fft.fftn(x, (2, 2)), ArgumentError, "expected axes for the lengths s"),
    (lambda: fft.fftn(x, (2, 2), (0,)), ArgumentError, "expected 1 lengths, one an axis, got 2"),
    (lambda: fft.fftn(x, axes=(0, 0)), ArgumentError, "names an axis twice"),
    (lambda: fft.rfftn(x, axes=()), ArgumentError, "expected one axis or more"),
    (lambda: fft.fft(x, norm="unitary"), ArgumentError, "norm"),
    (lambda: fft.hfft(z, norm="unitary"), ArgumentError, "expected norm as one of backward, ortho"),
    (lambda: fft.fftfreq(0), ArgumentError, "expected n >= 1 and d other than 0"),
    (lambda: fft.fftfreq(4, d=0.0), ArgumentError, "expected n >= 1"),
    (lambda: fft.rfftfreq(4, dtype=ml.int64), DTypeError, "expected a real float dtype, got i64"),
    (lambda: fft.fft("1.5"), DTypeError, "fft.*expected a tensor, got"),
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
