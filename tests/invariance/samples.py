"""Samples of the walk: the cases of all ops, and shapes that take kernels' loops to their ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.types import Array
from tests.cases import CASES
from tests.invariance.walk import Sample, rows_of

LENGTHS: Final = (1, 2, 3, 7, 16, 33, 100, 1025, 5000)
_COLUMNS: Final = ((5, 3), (300, 16), (40, 129), (7, 1025), (300, 1), (1, 7))
"""Lengths and what lies behind them."""
_PRODUCTS: Final = (
    *((1, 1), (1, 5), (7, 1), (17, 3), (40, 23), (64, 1), (353, 16), (720, 1), (720, 300)),
    *((33, 513), (4100, 2), (5000, 1)),
)
"""k and n."""
_REDUCTIONS: Final = ("sum", "mean", "var", "prod", "max", "min", "all", "any", "logsumexp")
_RUNNING: Final = ("cumulative_sum", "cumulative_prod")
_SQUARES: Final = ("inv", "expm", "det", "slogdet", "eigvals", "eigvalsh", "eigh", "eig", "lu")


def _noise(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype("f")


def _of(op: str, *shapes: tuple[int, ...], **attributes: Any) -> Sample:
    return Sample(op, tuple([_noise(*shape) for shape in shapes]), attributes)


def _products() -> Iterator[Sample]:
    for (k, n), tx, ty in itertools.product(_PRODUCTS, (False, True), (False, True)):
        how = {"transpose_x": tx, "transpose_y": ty}
        x, y = (k, 3) if tx else (3, k), (n, k) if ty else (k, n)
        yield _of("matmul", x, y, **how)
        if k * n < 1000:
            yield _of("matmul", (2, *x), y, **how)
            yield _of("matmul", (2, *x), (2, *y), **how)
            yield _of("matmul", x, (2, *y), **how)
            yield _of("batch_contract", (2, *x), (2, *y), **how)
        if n == 1 and not ty:
            yield _of("matmul", x, (k,), transpose_x=tx)
        if not tx and k * n < 1000:
            yield _of("matmul", (k,), (2, *y), transpose_y=ty)


def _rows() -> Iterator[Sample]:
    for n in LENGTHS:
        for op in ("softmax", "log_softmax"):
            yield _of(op, (3, n))
        for op in (*_RUNNING, "argmax", "argmin", *_REDUCTIONS):
            yield _of(op, (3, n), axis=1)
        for op in ("sum", "prod", *_RUNNING):
            yield _of(op, (3, n), axis=1, dtype="f64")
        yield Sample("mean", (np.arange(3 * n).reshape(3, n),), {"axis": 1})
        yield _of("layer_norm", (3, n), (n,), (n,), eps=1e-5)
        yield _of("layer_norm_normalize", (3, n), eps=1e-5)
        if n > 2:  # else all results are nearly 0
            yield _of("layer_norm_vjp", (3, n), (3, n), (n,), eps=1e-5)
        logits, labels = _noise(3, n), np.arange(3) % n
        yield Sample("softmax_cross_entropy", (logits, labels))
        yield Sample("softmax_cross_entropy_vjp", (_noise(3), logits, labels))
        for op, descending in itertools.product(("sort", "argsort"), (False, True)):
            yield _of(op, (3, n), descending=descending)
        yield _of("take", (3, n), axis=1).with_integers(np.arange(5) % n)
        yield _of("take", (n, 3), axis=0).with_integers(np.arange(5) % n)
        yield _of("take_along_axis", (3, n), axis=1).with_integers(np.arange(6).reshape(3, 2) % n)
    for n, inner in _COLUMNS:
        for op in ("softmax", "log_softmax", *_RUNNING, "sort", "argsort"):
            yield _of(op, (3, n, inner), axis=1)
        for op in ("argmax", "argmin", *_REDUCTIONS):
            yield _of(op, (3, n, inner), axis=1)


def _reductions() -> Iterator[Sample]:
    """Yield reductions of enough elements that a single one is divided among threads."""
    for op in ("argmax", *_REDUCTIONS):
        for shape in ((3, 20_000), (2, 70_000), (2, 300, 100), (2, 9000, 3), (2, 17, 1500)):
            yield _of(op, shape, axis=1)
    for op in _REDUCTIONS:
        yield _of(op, (3, 5, 6, 7), axis=(1, 3))
        yield _of(op, (3, 5, 6, 7), axis=(1, 2))
        yield _of(op, (2, 60, 3, 200), axis=(1, 3))


def _images() -> Iterator[Sample]:
    pads = ((0, 0), (0, 0)), ((1, 2), (0, 1))
    for stride, padding in itertools.product(((1, 1), (2, 3)), pads):
        how: dict[str, Any] = {"stride": stride, "padding": padding}
        for window in ((1, 1), (3, 2)):
            for channels in (1, 5, 40):
                yield _of("conv2d", (3, 7, 6, 5), (*window, 5, channels), **how)
            for channels in (5, 40):
                yield _of(
                    "conv2d", (3, 7, 6, channels), (*window, 1, channels), groups=channels, **how
                )
            for op in ("max_pool2d", "avg_pool2d", "patches"):
                yield _of(op, (3, 7, 6, 5), window=window, **how)


def _matrices() -> Iterator[Sample]:
    for n in (1, 2, 5, 33):
        for op in _SQUARES:
            yield _of(op, (3, n, n))
        yield _of("svdvals", (3, n, 4))
        yield Sample("pinv", (_noise(3, n, 4), np.full(3, 1e-6, np.float32)))
        yield _of("qr", (3, n, 4), mode="reduced")
        yield _of("svd", (3, n, 4), full_matrices=False)
        if n > 1:
            yield _of("solve", (3, n, n), (3, n, 2))
        x = _noise(3, n, n)
        yield Sample("cholesky", (x @ x.swapaxes(1, 2) + n * np.eye(n, dtype="f"),))
    for n in (1, 2, 7, 16, 60, 97, 1000):
        yield _of("fft", (3, n))
        yield _of("rfft", (3, n))
        yield _of("irfft", (3, n // 2 + 1), n=n)
        yield _of("fft", (3, n, 2), axes=(1,))
    yield _of("reshape", (3, 4, 5), shape=(3, 20))


def _cases() -> Iterator[Sample]:
    """Those of each op; of elementwise ones, with axes of other lengths, too."""
    for op, cases in CASES.items():
        if OPS[op].dynamic:
            continue
        for case in cases:
            sample = Sample(op, case.inputs, case.attributes)
            yield sample
            if OPS[op].links:
                for i, rows in enumerate(rows_of(sample)):
                    yield rows.of(sample, np.arange(LENGTHS[i % len(LENGTHS)]))


def samples() -> Iterator[Sample]:
    """All calls, in the dtypes of their cases, the others in f32."""
    for room in (_cases, _products, _rows, _reductions, _images, _matrices):
        yield from room()
