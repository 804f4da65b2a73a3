"""`stft` and `istft` against their definition, and PyTorch where it is installed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(8)
X = RNG.normal(size=(2, 50))
t = ml.asarray


def by_frames(x: Array, n: int, hop: int, window: Array, center: bool) -> Array:
    """A frame after the other."""
    if center:
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(n // 2, n // 2)], mode="reflect")
    before = (n - len(window)) // 2
    window = np.pad(window, (before, n - len(window) - before))
    transform: Any = np.fft.fft if np.iscomplexobj(x) else np.fft.rfft
    starts = range(0, x.shape[-1] - n + 1, hop)
    return np.stack([transform(x[..., i : i + n] * window) for i in starts], axis=-1)


SETTINGS = [
    (16, 4, 16, True),
    (16, 5, 16, False),
    (9, 3, 9, True),
    (16, 16, 10, True),
    (1, 1, 1, True),
    (50, 7, 33, False),
]


@cases("n, hop, width, center", *SETTINGS)
@pytest.mark.parametrize("complex", [False, True])
def test_stft(n: int, hop: int, width: int, center: bool, complex: bool) -> None:
    x = X + 1j * X[::-1] if complex else X
    window = RNG.uniform(0.1, 1, width)
    spectrum = ml.stft(t(x), n, hop, t(window), center=center)
    expected = by_frames(x, n, hop, window, center)
    assert spectrum.dtype is ml.complex128
    np.testing.assert_allclose(spectrum.numpy(), expected, atol=1e-12)
    scaled = ml.stft(t(x), n, hop, t(window), center=center, normalized=True)
    np.testing.assert_allclose(scaled.numpy() * math.sqrt(n), expected, atol=1e-12)
    plain = ml.stft(t(x[0]), n, hop, center=center)
    np.testing.assert_allclose(
        plain.numpy(), by_frames(x[:1], n, hop, np.ones(n), center)[0], atol=1e-12
    )


@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_istft_is_the_inverse(complex: bool, normalized: bool) -> None:
    x = X + 1j * X[::-1] if complex else X
    for n, hop, center in ((16, 4, True), (9, 4, True), (16, 6, True), (10, 5, False)):
        window = ml.hamming(n, periodic=True, dtype="f64")
        options: Any = {"center": center, "normalized": normalized}
        spectra = ml.stft(t(x), n, hop, window, **options)
        signal = ml.istft(spectra, n, hop, window, **options).numpy()
        np.testing.assert_allclose(signal, x[:, : signal.shape[-1]], atol=1e-12)
        assert signal.shape[-1] > 50 - n
        exact = ml.istft(spectra, n, hop, window, length=70, **options).numpy()
        assert exact.shape == (2, 70)
        np.testing.assert_array_equal(exact[:, : signal.shape[-1]], signal)
        np.testing.assert_array_equal(exact[:, 60:], 0)
