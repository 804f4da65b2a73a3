"""Images of another size and read elsewhere, and bags of embeddings, a row each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.brief import cases, refuses
from tests.eager.functions.rows import CHECKS, RNG, Row, channels_first, normal, t
from tests.eager.nn.checks import check, f64, randomized

# --- plain numpy --------------------------------------------------------------------------


def cubic(d: float) -> float:
    """Keys' kernel, a = -3/4."""
    a, d = -0.75, abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def kernel(mode: str, d: float) -> float:
    return cubic(d) if "cubic" in mode else max(1 - abs(d), 0.0)


def matrix(n: int, count: int, mode: str, align: bool, ratio: float) -> Array:
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
            weights[i, min(max(j, 0), n - 1)] += kernel(mode, at - j)
    return weights


def resized(x: Array, counts: Any, mode: str, align: bool = False, scales: Any = None) -> Array:
    for axis, count in enumerate(counts, 1):
        n = x.shape[axis]
        ratio = 1 / scales[axis - 1] if scales else n / count
        weights = matrix(n, count, mode, align, ratio)
        x = np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)
    return x


def bounced(at: float, low: float, high: float) -> float:
    if high <= low:
        return 0.0
    while not low <= at <= high:
        at = 2 * low - at if at < low else 2 * high - at
    return at


def sampled(x: Array, grid: Array, mode: str, padding: str, align: bool) -> Array:
    _, *size, channels = x.shape
    y = np.zeros((*grid.shape[:3], channels))

    def inside(at: float, length: int) -> float:
        if padding == "reflection":
            at = bounced(at, 0 if align else -0.5, length - (1 if align else 0.5))
        return at if padding == "zeros" else min(max(at, 0), length - 1)

    for place in np.ndindex(grid.shape[:3]):
        sides: list[dict[int, float]] = []
        for v, length in zip(grid[place][::-1], size, strict=True):
            at = (v + 1) / 2 * (length - 1) if align else ((v + 1) * length - 1) / 2
            if mode != "bicubic":
                at = inside(at, length)
            near = round(at) if mode == "nearest" else math.floor(at)
            weights: dict[int, float] = {}
            for j in [near] if mode == "nearest" else range(near - 1, near + 3):
                to = round(inside(j, length)) if mode == "bicubic" else j
                weight = 1.0 if mode == "nearest" else kernel(mode, at - j)
                if 0 <= to < length:
                    weights[to] = weights.get(to, 0.0) + weight
            sides.append(weights)
        for row, down in sides[0].items():
            for column, right in sides[1].items():
                y[place] += down * right * x[place[0], row, column]
    return y


# --- the rows -----------------------------------------------------------------------------

ROWS: dict[str, Row] = {}

IMAGE, SEQUENCE, VOLUME = normal(2, 4, 3, 2), normal(2, 5, 2), normal(1, 2, 3, 2, 2)

for mode, size, align in [
    ("nearest", (7, 2), False),
    ("nearest-exact", (7, 2), False),
    ("bilinear", (7, 2), False),
    ("bilinear", (7, 1), True),
    ("bicubic", (6, 2), False),
    ("bicubic", (6, 4), True),
    ("area", (3, 2), False),
]:
    ROWS[f"interpolate {mode} {align}"] = Row(
        lambda x, m=mode, s=size, a=align: ml.interpolate(x, s, mode=m, align_corners=a),
        (IMAGE,),
        lambda x, m=mode, s=size, a=align: resized(x, s, m, a),
        channels_first(
            lambda F, x, m=mode, s=size, a=align: F.interpolate(
                x, s, mode=m, align_corners=a if m[:2] == "bi" else None
            )
        ),
    )
for name, x, mode, scale, counts in [
    ("scale of all", SEQUENCE, "linear", 2.0, (10,)),
    ("scale of a sequence", SEQUENCE, "nearest", 1.7, (8,)),
    ("scale of each", IMAGE, "bilinear", (1.5, 0.7), (6, 2)),
    ("scale of a volume", VOLUME, "trilinear", 2.5, (5, 7, 5)),
    ("scale of a volume, nearest", VOLUME, "nearest", 2, (4, 6, 4)),
]:
    scales = scale if isinstance(scale, tuple) else (scale,) * len(counts)
    ROWS[f"interpolate, {name}"] = Row(
        lambda x, m=mode, s=scale: ml.interpolate(x, scale=s, mode=m),
        (x,),
        lambda x, m=mode, c=counts, s=scales: resized(x, c, m, scales=s),
        channels_first(
            lambda F, x, m=mode, s=scales: F.interpolate(
                x, scale_factor=tuple(map(float, s)), mode=m
            )
        ),
    )

GRID = RNG.uniform(-1.7, 1.7, (2, 3, 3, 2))
for mode in ("nearest", "bilinear", "bicubic"):
    for padding in ("zeros", "border", "reflection"):
        for align in (False, True):
            ROWS[f"grid_sample {mode} {padding} {align}"] = Row(
                lambda x, grid, m=mode, p=padding, a=align: ml.grid_sample(
                    x, grid, mode=m, padding=p, align_corners=a
                ),
                (IMAGE, GRID),
                lambda x, grid, m=mode, p=padding, a=align: sampled(x, grid, m, p, a),
                channels_first(
                    lambda F, x, grid, m=mode, p=padding, a=align: F.grid_sample(
                        x, grid, mode=m, padding_mode=p, align_corners=a
                    )
                ),
            )


def sampled_volume(x: Any, grid: Any) -> Any:
    """Images of its layers, and between them a line."""
    depth = x.shape[1]
    at = np.clip((grid[..., 2] + 1) / 2 * (depth - 1), 0, depth - 1)
    flat = grid[..., :2].reshape(len(grid), -1, grid.shape[3], 2)
    layers = np.stack([sampled(x[:, i], flat, "bilinear", "border", True) for i in range(depth)])
    weights = np.maximum(1 - abs(at - np.arange(depth).reshape(-1, 1, 1, 1, 1)), 0)
    return (layers.reshape(depth, *grid.shape[:-1], -1) * weights[..., None]).sum(0)


ROWS["grid_sample of volumes"] = Row(
    lambda x, grid: ml.grid_sample(x, grid, padding="border", align_corners=True),
    (normal(2, 3, 4, 2, 2), RNG.uniform(-1.7, 1.7, (2, 2, 3, 2, 3))),
    sampled_volume,
    channels_first(
        lambda F, x, grid: F.grid_sample(x, grid, padding_mode="border", align_corners=True)
    ),
)

ROWS["pixel_shuffle"] = Row(
    lambda x: ml.pixel_shuffle(x, 2),
    (normal(2, 3, 2, 8),),
    lambda x: np.array(
        [
            [
                [
                    [image[i // 2, j // 2, c * 4 + i % 2 * 2 + j % 2] for c in range(2)]
                    for j in range(4)
                ]
                for i in range(6)
            ]
            for image in x
        ]
    ),
    channels_first(lambda F, x: F.pixel_shuffle(x, 2)),
)
ROWS["pixel_unshuffle"] = Row(
    lambda x: ml.pixel_unshuffle(x, 2),
    (normal(2, 4, 6, 3),),
    lambda x: np.stack(
        [x[:, i::2, j::2, c] for c in range(3) for i in range(2) for j in range(2)], axis=-1
    ),
    channels_first(lambda F, x: F.pixel_unshuffle(x, 2)),
)

BAGS = np.array([[0, 3, 3], [2, 1, 0]])
LINE, OFFSETS = np.array([4, 0, 3, 3, 1]), np.array([0, 2, 2, 3])
T_BAGS, T_LINE, T_OFFSETS = t(BAGS), t(LINE), t(OFFSETS)
PARTS = [LINE[:2], LINE[2:2], LINE[2:3], LINE[3:]]
for mode, reduce in (("sum", np.sum), ("mean", np.mean), ("max", np.max)):
    ROWS[f"embedding_bag {mode}"] = Row(
        lambda rows, m=mode: ml.embedding_bag(rows, T_BAGS, mode=m),
        (normal(5, 4),),
        lambda rows, r=reduce: np.stack([r(rows[bag], axis=0) for bag in BAGS]),
        lambda F, rows, m=mode: F.embedding_bag(_torch(BAGS), rows, mode=m),
    )
    if mode != "max":
        ROWS[f"embedding_bag {mode}, weights"] = Row(
            lambda rows, w, m=mode: ml.embedding_bag(rows, T_BAGS, mode=m, weights=w),
            (normal(5, 4), normal(2, 3)),
            lambda rows, w, r=reduce: np.stack(
                [r(rows[bag] * v[:, None], axis=0) for bag, v in zip(BAGS, w, strict=True)]
            ),
        )
        ROWS[f"embedding_bag {mode}, offsets"] = Row(
            lambda rows, m=mode: ml.embedding_bag(rows, T_LINE, T_OFFSETS, mode=m),
            (normal(5, 4),),
            lambda rows, m=mode: np.stack(
                [rows[p].sum(0) / (max(len(p), 1) if m == "mean" else 1) for p in PARTS]
            ),
            lambda F, rows, m=mode: F.embedding_bag(_torch(LINE), rows, _torch(OFFSETS), mode=m),
        )


def _torch(x: Array) -> Any:
    return pytest.importorskip("torch").tensor(x)


@cases("check", *CHECKS)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, check: Any) -> None:
    check(ROWS[name])


# --- layers and edges -----------------------------------------------------------------------


def test_upsampled_and_shuffled_images() -> None:
    x = t(IMAGE)
    layer = nn.Upsample(scale=2, mode="bicubic", align_corners=True)
    expected = ml.interpolate(x, scale=2, mode="bicubic", align_corners=True)
    np.testing.assert_array_equal(layer(x).numpy(), expected.numpy())
    np.testing.assert_array_equal(nn.Upsample((3, 5))(x).numpy(), ml.interpolate(x, (3, 5)).numpy())
    x = t(normal(2, 3, 3, 8))
    np.testing.assert_array_equal(nn.PixelUnshuffle(2)(nn.PixelShuffle(2)(x)).numpy(), x.numpy())


def test_flattened_and_identical() -> None:
    x = t(IMAGE)
    np.testing.assert_array_equal(nn.Flatten()(x).numpy(), IMAGE.reshape(2, -1))
    np.testing.assert_array_equal(nn.Flatten(0)(x).numpy(), IMAGE.ravel())
    assert nn.Flatten()(ml.ones((0, 2, 3))).shape == (0, 6)
    assert nn.Flatten(2)(ml.ones((2, 3))).shape == (2, 3, 1)
    assert nn.Identity()(x) is x


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias: bool) -> None:
    layer = nn.Bilinear(3, 4, 2, bias=bias, dtype="f64")
    w, x, y = randomized(layer), normal(5, 3), normal(5, 4)
    expected = np.array(
        [
            [a @ w["kernel"][:, :, k] @ b + (w["bias"][k] if bias else 0) for k in range(2)]
            for a, b in zip(x, y, strict=True)
        ]
    )
    np.testing.assert_allclose(layer(t(x), t(y)).numpy(), expected, rtol=1e-11)
    check(lambda layer, x, y: layer(x, y), layer, f64(2, 3), f64(2, 4))
    half = nn.Bilinear(3, 4, 2, dtype=ml.bfloat16)
    assert half(ml.ones((5, 3), dtype=ml.bfloat16), ml.ones((5, 4), dtype=ml.bfloat16)).type == (
        ml.TensorType("bf16", (5, 2))
    )


def test_instance_norm() -> None:
    layer = nn.InstanceNorm(3, eps=1e-3, dtype="f64")
    w, x = randomized(layer), normal(2, 4, 5, 3)
    mean, var = (f(x, axis=(1, 2), keepdims=True) for f in (np.mean, np.var))
    expected = (x - mean) / np.sqrt(var + 1e-3) * w["scale"] + w["bias"]
    np.testing.assert_allclose(layer(t(x)).numpy(), expected, rtol=1e-10, atol=1e-12)
    check(lambda layer, x: layer(x), layer, f64(2, 3, 3))
    torch = pytest.importorskip("torch")
    theirs = torch.nn.functional.instance_norm(
        torch.tensor(x).movedim(-1, 1),
        weight=torch.tensor(w["scale"]),
        bias=torch.tensor(w["bias"]),
        eps=1e-3,
    )
    np.testing.assert_allclose(layer(t(x)).numpy(), theirs.movedim(1, -1), rtol=1e-9, atol=1e-11)


def test_bags_of_a_layer_are_those_of_the_function() -> None:
    layer = nn.EmbeddingBag(5, 4, mode="sum", dtype="f64")
    bags = layer(t(LINE), t(OFFSETS), weights=t(np.arange(5.0))).numpy()
    rows = layer.embedding.numpy()[LINE] * np.arange(5.0)[:, None]
    expected = [rows[:2].sum(0), np.zeros(4), rows[2], rows[3:].sum(0)]
    np.testing.assert_allclose(bags, np.stack(expected), rtol=1e-12)
    assert not layer(ml.zeros((2, 0), dtype="i64")).numpy().any()
    late = ml.embedding_bag(layer.embedding, t(LINE), t(np.array([3])), mode="sum").numpy()
    np.testing.assert_allclose(late, layer.embedding.numpy()[LINE[3:]].sum(0)[None], rtol=1e-12)


x4, rows = ml.ones((1, 3, 3, 4)), ml.ones((3, 2))
untyped: Any = ml


@cases(
    "error, text, call",
    (ml.errors.ArgumentError, "expected either a size or a scale", lambda: ml.interpolate(x4)),
    (ml.errors.ArgumentError, "either", lambda: ml.interpolate(x4, 2, scale=2.0)),
    (ml.errors.ArgumentError, "mode as one of", lambda: untyped.interpolate(x4, 2, mode="box")),
    (ml.errors.ArgumentError, "leaves nothing", lambda: ml.interpolate(x4, scale=0.1)),
    (ml.errors.ArgumentError, "one number > 0", lambda: ml.interpolate(x4, scale=(1.0,))),
    (
        ml.errors.ArgumentError,
        "align_corners: expected a linear or cubic mode, got nearest",
        lambda: ml.interpolate(x4, 2, align_corners=True),
    ),
    (ml.errors.ShapeError, "with places between", lambda: ml.interpolate(rows, 2)),
    (ml.errors.ShapeError, "grid.*OH, OW, 2", lambda: ml.grid_sample(x4, ml.ones((1, 2, 2, 3)))),
    (
        ml.errors.ArgumentError,
        "'nearest', 'bilinear' or 'bicubic', got 'area'",
        lambda: ml.grid_sample(x4, ml.ones((1, 2, 2, 2)), mode="area"),
    ),
    (ml.errors.ShapeError, "9 do not divide 4", lambda: ml.pixel_shuffle(x4, 3)),
    (ml.errors.ShapeError, "2 does not divide", lambda: ml.pixel_unshuffle(x4, 2)),
    (
        ml.errors.ArgumentError,
        "a max is of bags of one length",
        lambda: ml.embedding_bag(rows, T_LINE, T_OFFSETS, mode="max"),
    ),
    (
        ml.errors.ArgumentError,
        "not of a max",
        lambda: ml.embedding_bag(rows, T_OFFSETS, mode="max", weights=ml.ones(4)),
    ),
    (ml.errors.OperandValueError, "index 4", lambda: ml.embedding_bag(rows, T_LINE)),
    (ml.errors.ShapeError, "Bilinear: expected x and y", lambda: nn.Bilinear(2, 3, 4)(rows, rows)),
    (ml.errors.ShapeError, "Flatten: expected x of 1", lambda: nn.Flatten()(ml.ones(()))),
    (ml.errors.ArgumentError, "Upsample: expected", lambda: nn.Upsample()),
)
def test_refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    refuses(error, text, call)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_outside_of_an_image_are_zeros_whatever_its_border_has(mode: Any) -> None:
    x = ml.full((1, 2, 2, 1), math.inf)
    outside = ml.asarray([[[[9.0, 9.0], [-9.0, 0.0]]]])
    assert ml.grid_sample(x, outside, mode=mode).numpy().ravel().tolist() == [0.0, 0.0]
