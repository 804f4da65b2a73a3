"""Plain numpy, and arrays, for the rows of `functions.txt` that numpy has no function for."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np

from mlvm.core.types import Array

inf, nan = math.inf, math.nan
_RNG = np.random.default_rng(12)

HOLES: Final = np.where(_RNG.random((4, 5)) < 0.3, nan, _RNG.normal(size=(4, 5)))
HOLES[2] = nan
RISING: Final = np.array([-1.0, 0.0, 0.5, 2.0, 3.5])
FALLING: Final = RISING[::-1].copy()
NAN_FALLING: Final = np.append(nan, FALLING)
EDGES: Final = np.array([1.0, 1.0, inf, -inf, nan, 0.0, 2.0])
NEAR_EDGES: Final = np.array([1 + 1e-6, 1.1, inf, inf, nan, 1e-9, 2.5])
COMPLEX_EDGES: Final = np.array([complex(1, nan), complex(inf, -2), complex(nan, inf)])
MANY_INF: Final = np.array([inf, inf, 1.0, inf])
DIVIDENDS, DIVISORS = np.array([1.0, -1.0, inf, 5.0, -0.0]), np.array([inf, -inf, 2.0, 0.0, 3.0])
STEPS: Final = np.array([1.3, -2.1, 0.7, -0.9, 3.0])
ZEROS, OF_ZEROS = np.array([0.0, 0.0, 0.0, 2.0, 0.0]), np.array([0.0, inf, -1.0, 0.0, nan])
SHARES: Final = np.array([[0.01, 0.4], [0.9, 0.99]])
LABELS: Final = np.array([2, 0, 1, 2])
SOME_LABELS: Final = np.array([2, -1, 1, -1])
ONES: Final = np.eye(3)[LABELS]
SIGNS: Final = np.where(_RNG.normal(size=(4, 3)) > 0, 1.0, -1.0)
BITS: Final = np.where(SIGNS > 0, 1.0, 0.0)
COUNTS: Final = _RNG.poisson(2.0, size=(4, 3)).astype(np.float64)
WORDS, WORD_COUNTS = np.array([[1, 1, 2], [4, 3, 9], [1, 2, 3]]), np.array([3, 2, 0])
STEP_COUNTS: Final = np.array([5, 3, 4])
GRID: Final = _RNG.uniform(-1.7, 1.7, (2, 3, 3, 2))
GRID_3: Final = _RNG.uniform(-1.7, 1.7, (2, 2, 3, 2, 3))
BAGS, LINE, OFFSETS = (
    np.array([[0, 3, 3], [2, 1, 0]]),
    np.array([4, 0, 3, 3, 1]),
    np.array([0, 2, 2, 3]),
)
PARTS: Final = [LINE[:2], LINE[2:2], LINE[2:3], LINE[3:]]
SELU_SCALE, SELU_SLOPE = 1.0507009873554805, 1.0507009873554805 * 1.6732632423543772


# --- losses ------------------------------------------------------------------------------


def reduced(losses: Any, how: str) -> Any:
    of: dict[str, Any] = {"none": np.asarray, "mean": np.mean, "sum": np.sum}
    return of[how](losses)


def huber(x: Array, y: Array, delta: float = 1.0) -> Any:
    d = abs(x - y)
    return np.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))


def binary(x: Array, target: Any, weight: Any = 1.0) -> Any:
    return weight * target * np.log1p(np.exp(-x)) + (1 - target) * np.log1p(np.exp(x))


def log_softmax(x: Array) -> Any:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(log_p: Array, targets: Array) -> Any:
    return np.where(targets > 0, targets * (np.log(targets) - log_p), 0).sum(-1)


def smoothed(target: Array, smoothing: float) -> Any:
    return (1 - smoothing) * target + smoothing / target.shape[-1]


def cross_entropy(x: Array, target: Array, weight: Any = 1.0) -> Any:
    return -(log_softmax(x) * target * weight).sum(-1)


def size(x: Array, p: float = 2.0) -> Any:
    return (np.abs(x) ** p).sum(-1) ** (1 / p)


def cosine(x: Array, y: Array) -> Any:
    return (x * y).sum(-1) / size(x) / size(y)


def stirling(n: Array) -> Any:
    many = np.maximum(n, 1)
    return np.where(n > 1, n * np.log(many) - n + np.log(2 * np.pi * many) / 2, 0)


def ctc(steps: Array) -> Any:
    """The probability of each sequence's labels: of all strings of classes, those that say them."""
    losses = []
    for i, (length, count) in enumerate(zip(STEP_COUNTS, WORD_COUNTS, strict=True)):
        total = sum(
            np.exp(sum(steps[time, i, c] for time, c in enumerate(string)))
            for string in itertools.product(range(5), repeat=length)
            if [c for c, _ in itertools.groupby(string) if c != 0] == WORDS[i, :count].tolist()
        )
        losses.append(-np.log(total))
    return np.array(losses)


# --- windows -----------------------------------------------------------------------------


def _each(value: Any, count: int) -> Any:
    return [value] * count if isinstance(value, int) else value


def _sides(padding: Any, span: Any, stride: Any, lengths: Any) -> list[tuple[int, int]]:
    if padding == "SAME":
        spans = zip(lengths, stride, span, strict=True)
        missing = [max((math.ceil(n / s) - 1) * s + k - n, 0) for n, s, k in spans]
        return [(m // 2, m - m // 2) for m in missing]
    if isinstance(padding, int | str):
        n = 0 if padding == "VALID" else int(padding)
        return [(n, n)] * len(lengths)
    return [padding] if isinstance(padding[0], int) else list(padding)


def _placed(x: Array, window: Any, stride: Any, dilation: Any, padding: Any, value: float) -> Any:
    """The padded x, and for each window its place in the grid and the places of its elements."""
    span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    pads = _sides(padding, span, stride, x.shape[1:-1])
    x = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=value)
    grid = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:-1], span, stride, strict=True)]
    places = []
    for place in np.ndindex(*grid):
        steps = zip(place, window, dilation, stride, strict=True)
        places.append((place, np.ix_(*[np.arange(k) * d + i * s for i, k, d, s in steps])))
    return x, grid, places


def unfold(
    x: Array, window: Any, stride: Any = 1, dilation: Any = 1, padding: Any = 0, value: float = 0.0
) -> Any:
    n = len(window)
    x, grid, places = _placed(x, window, _each(stride, n), _each(dilation, n), padding, value)
    y = np.zeros((len(x), *grid, *window, x.shape[-1]))
    for place, at in places:
        y[(slice(None), *place)] = x[(slice(None), *at)]
    return y


def fold(windows: Array, lengths: Any, **how: Any) -> Any:
    """Add up the windows' elements at the places that they came from."""
    count = math.prod(lengths)
    numbers = np.arange(1, count + 1).reshape(1, *lengths, 1)
    n = len(lengths)
    at = unfold(numbers, windows.shape[1 + n : -1], **how)[0, ..., 0].astype(int)
    y = np.zeros((len(windows), count + 1, windows.shape[-1]))
    for image, part in zip(y, windows, strict=True):
        np.add.at(image, at, part)
    return y[:, 1:].reshape(-1, *lengths, windows.shape[-1])


def pool(x: Array, window: Any, kind: str, stride: Any = None, **how: Any) -> Any:
    of: dict[str, Any] = {"max": (-inf, np.max), "avg": (0.0, np.mean)}
    value, reduce = of[kind]
    n = x.ndim - 2
    window = _each(window, n)
    windows = unfold(x, window, window if stride is None else stride, value=value, **how)
    return reduce(windows, axis=tuple(range(n + 1, 2 * n + 1)))


def adapted(x: Array, counts: Any, kind: str) -> Any:
    reduce: Any = {"max": np.max, "avg": np.mean}[kind]
    y = np.zeros((len(x), *counts, x.shape[-1]))
    for place in np.ndindex(*counts):
        ends = zip(place, counts, x.shape[1:-1], strict=True)
        window = [slice(i * n // k, math.ceil((i + 1) * n / k)) for i, k, n in ends]
        axes = tuple(range(1, x.ndim - 1))
        y[(slice(None), *place)] = reduce(x[(slice(None), *window)], axis=axes)
    return y


def conv(x: Array, kernel: Array, groups: int = 1, **how: Any) -> Any:
    *window, inputs, outputs = kernel.shape
    n = len(window)
    windows = unfold(x, window, **how)
    parts = []
    for o in range(outputs):
        first = o // (outputs // groups) * inputs
        product = windows[..., first : first + inputs] * kernel[..., o]
        parts.append(product.sum(axis=tuple(range(n + 1, 2 * n + 2))))
    return np.stack(parts, axis=-1)


def conv_transpose(
    x: Array,
    kernel: Array,
    groups: int = 1,
    stride: Any = 1,
    dilation: Any = 1,
    padding: Any = 0,
) -> Any:
    """Each element adds the kernel, times itself, to a window; what falls on the padding goes."""
    *window, per_group, inputs = kernel.shape
    stride, dilation = _each(stride, len(window)), _each(dilation, len(window))
    lengths = [n * s for n, s in zip(x.shape[1:-1], stride, strict=True)]
    span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    pads = _sides(padding, span, stride, lengths)
    by_axis = [*zip(x.shape[1:-1], stride, span, pads, strict=True)]
    whole = [max((n - 1) * s + k, n * s + sum(pad)) for n, s, k, pad in by_axis]
    y = np.zeros((len(x), *whole, per_group * groups))
    for place, at in itertools.product(np.ndindex(*x.shape[1:-1]), np.ndindex(*window)):
        to = [i * s + j * d for i, j, s, d in zip(place, at, stride, dilation, strict=True)]
        for c in range(inputs):
            g = c // (inputs // groups)
            out = slice(g * per_group, (g + 1) * per_group)
            product = np.outer(x[(slice(None), *place, c)], kernel[(*at, slice(None), c)])
            y[(slice(None), *to, out)] += product
    ends = [
        pad[0] + (n * s if padding == "SAME" else (n - 1) * s + k - sum(pad))
        for n, s, k, pad in by_axis
    ]
    return y[(slice(None), *[slice(pad[0], end) for pad, end in zip(pads, ends, strict=True)])]


# --- images ------------------------------------------------------------------------------


def _kernel(mode: str, d: float) -> float:
    """A line, or Keys' kernel, a = -3/4."""
    a, d = -0.75, abs(d)
    if "cubic" not in mode:
        return max(1 - d, 0.0)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def _weights(n: int, count: int, mode: str, align: bool, ratio: float) -> Array:
    """Return the weights by which each of `count` places reads each of n elements."""
    weights = np.zeros((count, n))
    for i in range(count):
        if mode == "area":
            first, end = i * n // count, math.ceil((i + 1) * n / count)
            weights[i, first:end] = 1 / (end - first)
            continue
        at = i * (n - 1) / max(count - 1, 1) if align else (i + 0.5) * ratio - 0.5
        if mode.startswith("nearest"):
            at = math.floor(i * ratio + 1e-9) if mode == "nearest" else math.floor(at + 0.5)
            weights[i, min(max(at, 0), n - 1)] = 1
            continue
        if "linear" in mode:
            at = min(max(at, 0), n - 1)
        for j in range(math.floor(at) - 2, math.floor(at) + 4):
            weights[i, min(max(j, 0), n - 1)] += _kernel(mode, at - j)
    return weights


def resized(x: Array, counts: Any, mode: str, align: bool = False, scales: Any = None) -> Any:
    for axis, count in enumerate(counts, 1):
        n = x.shape[axis]
        ratio = (
            1 / (scales[axis - 1] if isinstance(scales, tuple) else scales) if scales else n / count
        )
        weights = _weights(n, count, mode, align, ratio)
        x = np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)
    return x


def _bounced(at: float, low: float, high: float) -> float:
    if high <= low:
        return 0.0
    while not low <= at <= high:
        at = 2 * low - at if at < low else 2 * high - at
    return at


def sampled(x: Array, grid: Array, mode: str, padding: str, align: bool) -> Any:
    _, *lengths, channels = x.shape
    y = np.zeros((*grid.shape[:3], channels))

    def inside(at: float, length: int) -> float:
        if padding == "reflection":
            at = _bounced(at, 0 if align else -0.5, length - (1 if align else 0.5))
        return at if padding == "zeros" else min(max(at, 0), length - 1)

    for place in np.ndindex(grid.shape[:3]):
        by_side: list[dict[int, float]] = []
        for v, length in zip(grid[place][::-1], lengths, strict=True):
            at = (v + 1) / 2 * (length - 1) if align else ((v + 1) * length - 1) / 2
            if mode != "bicubic":
                at = inside(at, length)
            near = round(at) if mode == "nearest" else math.floor(at)
            weights: dict[int, float] = {}
            for j in [near] if mode == "nearest" else range(near - 1, near + 3):
                to = round(inside(j, length)) if mode == "bicubic" else j
                weight = 1.0 if mode == "nearest" else _kernel(mode, at - j)
                if 0 <= to < length:
                    weights[to] = weights.get(to, 0.0) + weight
            by_side.append(weights)
        for (row, down), (column, right) in itertools.product(*[w.items() for w in by_side]):
            y[place] += down * right * x[place[0], row, column]
    return y


def sampled_volume(x: Array, grid: Array) -> Any:
    """Images of its layers, and between them a line."""
    depth = x.shape[1]
    at = np.clip((grid[..., 2] + 1) / 2 * (depth - 1), 0, depth - 1)
    flat = grid[..., :2].reshape(len(grid), -1, grid.shape[3], 2)
    layers = np.stack([sampled(x[:, i], flat, "bilinear", "border", True) for i in range(depth)])
    weights = np.maximum(1 - abs(at - np.arange(depth).reshape(-1, 1, 1, 1, 1)), 0)
    return (layers.reshape(depth, *grid.shape[:-1], -1) * weights[..., None]).sum(0)


def shuffled(x: Array, r: int) -> Any:
    """The element at (i, j) of channel c comes from channel (c r + i % r) r + j % r."""
    y = np.zeros((len(x), x.shape[1] * r, x.shape[2] * r, x.shape[3] // r**2))
    for i, j, c in np.ndindex(y.shape[1:]):
        y[:, i, j, c] = x[:, i // r, j // r, (c * r + i % r) * r + j % r]
    return y


def unshuffled(x: Array, r: int) -> Any:
    channels, parts = range(x.shape[-1]), range(r)
    places = itertools.product(channels, parts, parts)
    return np.stack([x[:, i::r, j::r, c] for c, i, j in places], axis=-1)


def bags(rows: Array, of: Any, kind: str, weights: Any = None) -> Any:
    reduce: Any = {"sum": np.sum, "mean": np.mean, "max": np.max}[kind]
    weights = np.ones((len(of), 3)) if weights is None else weights
    values = [rows[bag] * w[: len(bag), None] for bag, w in zip(of, weights, strict=True)]
    return np.stack([reduce(v, axis=0) if len(v) else np.zeros(rows.shape[1]) for v in values])


# --- other -------------------------------------------------------------------------------


def distances(x: Array, y: Array, p: float) -> Any:
    return np.linalg.norm(x[..., :, None, :] - y[..., None, :, :], ord=p, axis=-1)


def take_triangle(x: Array, lower: bool, unit: bool) -> Any:
    n = x.shape[-1]
    triangle = np.tril if lower else np.triu
    return triangle(x, -1 if lower else 1) + np.eye(n) if unit else triangle(x)


def expm(x: Array) -> Any:
    values, vectors = np.linalg.eig(x)
    result = vectors * np.exp(values)[..., None, :] @ np.linalg.inv(vectors)
    return result if np.iscomplexobj(x) else result.real
