"""Activations, convolutions, pooling and windows, a row each: beside plain numpy and PyTorch, with
their gradients, captured, and of halves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from tests.brief import cases, refuses
from tests.eager.functions.rows import CHECKS, Row, channels_first, normal, t

# --- plain numpy ------------------------------------------------------------------------


def sides(padding: Any, span: Any, stride: Any, size: Any) -> list[tuple[int, int]]:
    if padding == "SAME":
        missing = [
            max((math.ceil(n / s) - 1) * s + k - n, 0)
            for n, s, k in zip(size, stride, span, strict=True)
        ]
        return [(m // 2, m - m // 2) for m in missing]
    return [(0, 0)] * len(size) if padding == "VALID" else padding


def placed(x: Array, window: Any, stride: Any, dilation: Any, padding: Any, value: float) -> Any:
    """The padded x, and for each window its place in the grid and the places of its elements."""
    span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    pads = sides(padding, span, stride, x.shape[1:-1])
    x = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=value)
    grid = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:-1], span, stride, strict=True)]
    places = [
        (
            place,
            np.ix_(
                *[
                    np.arange(k) * d + i * s
                    for i, k, d, s in zip(place, window, dilation, stride, strict=True)
                ]
            ),
        )
        for place in itertools.product(*map(range, grid))
    ]
    return x, grid, places


def pool(
    x: Array,
    window: Any,
    reduce: Any,
    stride: Any = None,
    padding: Any = "VALID",
    value: Any = 0.0,
    dilation: int = 1,
) -> Array:
    dilations = [dilation] * len(window)
    x, grid, places = placed(x, window, stride or window, dilations, padding, value)
    y = np.zeros((len(x), *grid, x.shape[-1]))
    for place, at in places:
        y[(slice(None), *place)] = reduce(x[(slice(None), *at)], axis=tuple(range(1, x.ndim - 1)))
    return y


def convolve(
    x: Array, kernel: Array, stride: Any, dilation: Any, padding: Any = "VALID", groups: int = 1
) -> Array:
    *window, inputs, outputs = kernel.shape
    x, grid, places = placed(x, window, stride, dilation, padding, 0.0)
    y = np.zeros((len(x), *grid, outputs))
    for place, at in places:
        part = x[(slice(None), *at)]
        for o in range(outputs):
            first = o // (outputs // groups) * inputs
            product = part[..., first : first + inputs] * kernel[..., o]
            y[(slice(None), *place, o)] = product.sum(axis=tuple(range(1, x.ndim)))
    return y


def transposed(
    x: Array, kernel: Array, stride: Any, dilation: Any, padding: Any = "VALID", groups: int = 1
) -> Array:
    """Each element adds the kernel, times itself, to a window; what falls on the padding goes."""
    *window, per_group, inputs = kernel.shape
    size = [n * s for n, s in zip(x.shape[1:-1], stride, strict=True)]
    span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    pads = sides(padding, span, stride, size)
    whole = [
        max((n - 1) * s + k, n * s + sum(pad))
        for n, s, k, pad in zip(x.shape[1:-1], stride, span, pads, strict=True)
    ]
    y = np.zeros((len(x), *whole, per_group * groups))
    for place in np.ndindex(*x.shape[1:-1]):
        for at in np.ndindex(*window):
            to = [i * s + j * d for i, j, s, d in zip(place, at, stride, dilation, strict=True)]
            for c in range(inputs):
                g = c // (inputs // groups)
                out = slice(g * per_group, (g + 1) * per_group)
                y[(slice(None), *to, out)] += np.outer(
                    x[(slice(None), *place, c)], kernel[(*at, slice(None), c)]
                )
    ends = [
        pad[0] + (n * s if padding == "SAME" else (n - 1) * s + k - sum(pad))
        for n, s, k, pad in zip(x.shape[1:-1], stride, span, pads, strict=True)
    ]
    return y[(slice(None), *[slice(pad[0], end) for pad, end in zip(pads, ends, strict=True)])]


def adapted(x: Array, size: Any, reduce: Any) -> Array:
    y = np.zeros((len(x), *size, x.shape[-1]))
    for place in np.ndindex(*size):
        window = [
            slice(i * n // k, math.ceil((i + 1) * n / k))
            for i, k, n in zip(place, size, x.shape[1:-1], strict=True)
        ]
        y[(slice(None), *place)] = reduce(
            x[(slice(None), *window)], axis=tuple(range(1, x.ndim - 1))
        )
    return y


def unfolded(x: Array, window: Any, stride: Any, dilation: Any, padding: Any) -> Array:
    x, grid, places = placed(x, window, stride, dilation, padding, 0.0)
    y = np.zeros((len(x), *grid, *window, x.shape[-1]))
    for place, at in places:
        y[(slice(None), *place)] = x[(slice(None), *at)]
    return y


# --- the rows ---------------------------------------------------------------------------

X = normal(3, 6) * 3
LAST = 1.0507009873554805 * 1.6732632423543772


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


ROWS: dict[str, Row] = {
    "celu": Row(
        lambda x: ml.celu(x, 1.5),
        (X,),
        lambda x: np.maximum(x, 0) + np.minimum(0, 1.5 * np.expm1(x / 1.5)),
        lambda F, x: F.celu(x, 1.5),
    ),
    "selu": Row(
        ml.selu,
        (X,),
        lambda x: np.where(x > 0, 1.0507009873554805 * x, LAST * np.expm1(x)),
        lambda F, x: F.selu(x),
    ),
    "mish": Row(ml.mish, (X,), lambda x: x * np.tanh(softplus(x)), lambda F, x: F.mish(x)),
    "glu": Row(ml.glu, (X,), lambda x: x[:, :3] / (1 + np.exp(-x[:, 3:])), lambda F, x: F.glu(x)),
    "glu, axis 0": Row(lambda x: ml.glu(x, 0), (X[:2],), lambda x: x[:1] / (1 + np.exp(-x[1:]))),
    "prelu": Row(
        ml.prelu,
        (X, normal(6)),
        lambda x, slope: np.where(x > 0, x, slope * x),
        lambda F, x, slope: F.prelu(x, slope),
    ),
    "prelu, one slope": Row(
        ml.prelu, (X, normal()), lambda x, slope: np.where(x > 0, x, slope * x)
    ),
    "relu6": Row(
        ml.relu6, (X * 3,), lambda x: np.minimum(np.maximum(x, 0), 6), lambda F, x: F.relu6(x)
    ),
    "hard_sigmoid": Row(
        ml.hard_sigmoid, (X,), lambda x: np.clip(x / 6 + 0.5, 0, 1), lambda F, x: F.hardsigmoid(x)
    ),
    "hard_swish": Row(
        ml.hard_swish, (X,), lambda x: x * np.clip(x / 6 + 0.5, 0, 1), lambda F, x: F.hardswish(x)
    ),
    "hard_tanh": Row(
        lambda x: ml.hard_tanh(x, -2.0, 1.5),
        (X,),
        lambda x: np.minimum(np.maximum(x, -2), 1.5),
        lambda F, x: F.hardtanh(x, -2.0, 1.5),
    ),
    "log_sigmoid": Row(
        ml.log_sigmoid, (X,), lambda x: -np.log1p(np.exp(-x)), lambda F, x: F.logsigmoid(x)
    ),
    "soft_sign": Row(ml.soft_sign, (X,), lambda x: x / (1 + np.abs(x)), lambda F, x: F.softsign(x)),
    "tanhshrink": Row(ml.tanhshrink, (X,), lambda x: x - np.tanh(x), lambda F, x: F.tanhshrink(x)),
    "softshrink": Row(
        lambda x: ml.softshrink(x, 0.75),
        (X,),
        lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.75, 0),
        lambda F, x: F.softshrink(x, 0.75),
    ),
    "hardshrink": Row(
        ml.hardshrink, (X,), lambda x: x * (np.abs(x) > 0.5), lambda F, x: F.hardshrink(x)
    ),
}

CONVOLUTIONS: list[tuple[Any, Any, dict[str, Any], Any]] = [
    # the lengths of x, the kernel, options, and padding as PyTorch has it, where it can
    ((7,), (3, 2, 4), {"dilation": 2}, 0),
    ((7,), (2, 1, 4), {"dilation": 3, "groups": 2, "stride": 2, "padding": (1, 1)}, 1),
    ((6, 5), (2, 2, 2, 3), {"dilation": 2}, 0),
    ((5, 6), (3, 2, 2, 3), {"dilation": (1, 3), "stride": 2, "padding": ((1, 1), (2, 2))}, (1, 2)),
    ((5, 6), (2, 2, 1, 4), {"dilation": (2, 1), "groups": 2, "padding": "SAME"}, None),
    ((4, 3, 5), (2, 2, 3, 2, 3), {}, 0),
    ((4, 3, 5), (2, 3, 2, 1, 2), {"groups": 2, "stride": (2, 1, 2), "padding": "SAME"}, None),
    ((5, 4, 3), (2, 2, 2, 2, 3), {"dilation": (2, 1, 2), "padding": ((1, 1),) * 3}, 1),
]

TRANSPOSES: list[tuple[Any, Any, dict[str, Any], Any]] = [
    ((3,), (3, 4, 2), {"stride": 2, "padding": (1, 1)}, 1),
    ((4,), (2, 1, 2), {"groups": 2, "dilation": 3, "stride": 2}, 0),
    ((2, 3), (2, 3, 2, 4), {"groups": 2, "stride": (2, 1)}, 0),
    ((2, 3), (2, 2, 3, 2), {"dilation": (2, 3), "stride": 2, "padding": ((1, 1),) * 2}, 1),
    ((2, 3), (2, 2, 3, 2), {"dilation": 2, "padding": "SAME"}, None),
    ((2, 2), (1, 2, 1, 2), {"dilation": (2, 1), "stride": 3, "padding": "SAME"}, None),
    ((2, 2, 3), (2, 1, 2, 3, 2), {}, 0),
    (
        (2, 3, 2),
        (2, 2, 2, 1, 2),
        {"groups": 2, "stride": (2, 1, 2), "dilation": (1, 2, 1), "padding": ((1, 1),) * 3},
        1,
    ),
]


def convolution(
    name: str, oracle: Any, size: Any, shape: Any, options: dict[str, Any], theirs: Any
) -> Row:
    axes = len(size)
    groups = options.get("groups", 1)
    inputs = shape[-1] if "transpose" in name else shape[-2] * groups
    ours = getattr(ml, f"{name}{axes}d")

    def each(option: str) -> list[int]:
        value = options.get(option, 1)
        return [value] * axes if isinstance(value, int) else value

    padding = options.get("padding", "VALID")
    if axes == 1 and not isinstance(padding, str):
        padding = [padding]

    def in_torch(F: Any, x: Any, kernel: Any) -> Any:
        others = {k: v for k, v in options.items() if k != "padding"}
        weight = kernel.movedim((-1, -2), (0, 1))
        return getattr(F, f"{name}{axes}d")(x, weight, padding=theirs, **others)

    return Row(
        lambda x, kernel: ours(x, kernel, **options),
        (normal(2, *size, inputs), normal(*shape)),
        lambda x, kernel: oracle(x, kernel, each("stride"), each("dilation"), padding, groups),
        None if theirs is None else channels_first(in_torch),
    )


for i, row in enumerate(CONVOLUTIONS):
    ROWS[f"conv {i}"] = convolution("conv", convolve, *row)
for i, row in enumerate(TRANSPOSES):
    ROWS[f"conv_transpose {i}"] = convolution("conv_transpose", transposed, *row)

for axes, (size, window, stride) in {
    1: ((7,), (3,), (2,)),
    2: ((5, 6), (2, 3), (2, 2)),
    3: ((4, 5, 3), (2, 3, 2), (1, 2, 1)),
}.items():
    options: dict[str, Any] = {"stride": stride if axes > 1 else stride[0]}
    both = [(1, 1)] * axes
    max_of, avg_of = (getattr(ml, f"{kind}_pool{axes}d") for kind in ("max", "avg"))
    pads_of_case = tuple(both) if axes > 1 else both[0]
    width = window if axes > 1 else window[0]
    ROWS[f"max_pool{axes}d"] = Row(
        lambda x, of=max_of, w=width, o=options, p=pads_of_case: of(x, w, padding=p, **o),
        (normal(2, *size, 2),),
        lambda x, w=window, s=stride, p=both: pool(x, w, np.max, s, p, -np.inf),
        channels_first(
            lambda F, x, n=axes, w=width, o=options: getattr(F, f"max_pool{n}d")(
                x, w, padding=1, **o
            )
        ),
    )
    ROWS[f"avg_pool{axes}d"] = Row(
        lambda x, of=avg_of, w=width, o=options, p=pads_of_case: of(x, w, padding=p, **o),
        (normal(2, *size, 2),),
        lambda x, w=window, s=stride, p=both: pool(x, w, np.mean, s, p),
        channels_first(
            lambda F, x, n=axes, w=width, o=options: getattr(F, f"avg_pool{n}d")(
                x, w, padding=1, **o
            )
        ),
    )
    ROWS[f"avg_pool{axes}d, SAME"] = Row(
        lambda x, of=avg_of, w=width: of(x, w, padding="SAME"),
        (normal(2, *size, 2),),
        lambda x, w=window: pool(x, w, np.mean, None, "SAME"),
    )
    for kind, reduce in (("avg", np.mean), ("max", np.max)):
        ROWS[f"{kind}_pool{axes}d, apart"] = Row(
            lambda x, k=kind, n=axes: getattr(ml, f"{k}_pool{n}d")(x, 2, stride=1, dilation=2),
            (normal(2, *size, 2),),
            lambda x, r=reduce, n=axes: pool(x, [2] * n, r, [1] * n, dilation=2),
            channels_first(
                lambda F, x, n=axes: getattr(F, f"max_pool{n}d")(x, 2, stride=1, dilation=2)
            )
            if kind == "max"
            else None,
        )
        ROWS[f"adaptive_{kind}_pool {axes}"] = Row(
            lambda x, k=kind, w=window: getattr(ml, f"adaptive_{k}_pool")(x, w),
            (normal(2, *size, 2),),
            lambda x, w=window, r=reduce: adapted(x, w, r),
            channels_first(
                lambda F, x, k=kind, n=axes, w=window: getattr(F, f"adaptive_{k}_pool{n}d")(x, w)
            ),
        )

for i, (window, stride, dilation, padding, whole) in enumerate(
    [
        ((2, 2), (1, 1), (1, 1), "VALID", (0, 0)),
        ((2, 3), (2, 1), (1, 1), ((1, 1), (0, 0)), (1, 0)),
        ((2, 2), (2, 1), (2, 3), ((1, 1), (2, 2)), (1, 2)),
        ((3, 2), (1, 2), (1, 2), "SAME", None),
    ]
):
    how: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding}
    image = normal(2, 5, 6, 2)
    windows = unfolded(image, window, stride, dilation, padding)
    plain = {"stride": stride, "dilation": dilation, "padding": whole}
    ROWS[f"unfold {i}"] = Row(
        lambda x, w=window, how=how: ml.unfold(x, w, **how),
        (image,),
        lambda x, w=window, s=stride, d=dilation, p=padding: unfolded(x, w, s, d, p),
        None
        if whole is None
        else lambda F, x, w=window, how=plain, shape=windows.shape: (
            F.unfold(x.movedim(-1, 1), w, **how)
            .reshape(shape[0], shape[5], *shape[3:5], *shape[1:3])
            .permute(0, 4, 5, 2, 3, 1)
        ),
    )

    def sums(windows: Array, w: Any, s: Any, d: Any, p: Any) -> Array:
        """Add up the windows' elements at the places that they came from."""
        numbers = np.arange(1, 5 * 6 + 1).reshape(1, 5, 6, 1)
        at = unfolded(numbers, w, s, d, p)[0, ..., 0].astype(int)
        y = np.zeros((len(windows), 31, windows.shape[-1]))
        for image, part in zip(y, windows, strict=True):
            np.add.at(image, at, part)
        return y[:, 1:].reshape(-1, 5, 6, windows.shape[-1])

    ROWS[f"fold {i}"] = Row(
        lambda x, how=how: ml.fold(x, (5, 6), **how),
        (normal(*windows.shape),),
        lambda x, w=window, s=stride, d=dilation, p=padding, f=sums: f(x, w, s, d, p),
    )


@cases("check", *CHECKS)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, check: Any) -> None:
    check(ROWS[name])


# --- at the edges -------------------------------------------------------------------------


def test_activations_far_from_zero_neither_overflow_nor_lose_their_slopes() -> None:
    x = t(np.array([-1e4, -100.0, 100.0, 1e4], np.float32))
    for function, ends in (
        (ml.log_sigmoid, [-1e4, -100, 0, 0]),
        (ml.mish, [0, 0, 100, 1e4]),
        (ml.selu, [-LAST, -LAST, 105.07009873554805, 10507.009873554805]),
        (ml.hard_swish, [0, 0, 100, 1e4]),
        (ml.soft_sign, [-1, -100 / 101, 100 / 101, 1]),
    ):
        value, slope = ml.vjp(function, x)
        np.testing.assert_allclose(value.numpy(), ends, rtol=1e-3, atol=1e-30)
        assert np.isfinite(slope(ml.ones(4))[0].numpy()).all()


images, sequences, volumes = ml.ones((1, 5, 5, 2)), ml.ones((1, 5, 2)), ml.ones((1, 4, 4, 4, 2))
untyped: Any = ml


@cases(
    "error, text, call",
    (ml.errors.ShapeError, "one slope", lambda: ml.prelu(images, ml.ones(5))),
    (ml.errors.ShapeError, "glu.*equal sections", lambda: ml.glu(ml.ones(3))),
    (ml.errors.DTypeError, "relu6.*float", lambda: ml.relu6(ml.arange(3))),
    (
        ml.errors.ShapeError,
        "conv2d.*a window spans 7 x 7, larger than the padded image, which is 5 x 5",
        lambda: ml.conv2d(images, ml.ones((3, 3, 2, 1)), dilation=3),
    ),
    (
        ml.errors.ArgumentError,
        "expected dilation as one or two integers >= 1, got 0",
        lambda: ml.conv2d(images, ml.ones((3, 3, 2, 1)), dilation=0),
    ),
    (
        ml.errors.ArgumentError,
        r'"SAME", "VALID", a number or \(\(front, back\), \(top, bottom\), \(left, right\)\)',
        lambda: ml.conv3d(volumes, ml.ones((2, 2, 2, 2, 1)), padding=((1, 1), (1, 1))),
    ),
    (
        ml.errors.ArgumentError,
        "expected stride as an integer >= 1, got",
        lambda: untyped.conv1d(sequences, ml.ones((2, 2, 1)), stride=(1, 2)),
    ),
    (
        ml.errors.ShapeError,
        "expected a kernel of 5 axes",
        lambda: ml.conv3d(volumes, ml.ones((2, 2, 2, 1))),
    ),
    (
        ml.errors.ShapeError,
        r"2 channels in 2 groups is \[\*window, channels out / 2, 2\], not \[2, 3, 3\]",
        lambda: ml.conv_transpose1d(sequences, ml.ones((2, 3, 3)), groups=2),
    ),
    (
        ml.errors.ArgumentError,
        r"or \(\(top, bottom\), \(left, right\)\), got \(1, 2, 3\)",
        lambda: untyped.conv2d(images, ml.ones((3, 3, 2, 1)), padding=(1, 2, 3)),
    ),
    (ml.errors.ShapeError, "a volume of 5 axes", lambda: ml.max_pool3d(images, 2)),
    (ml.errors.ShapeError, "the window is 1 x 6", lambda: ml.avg_pool1d(sequences, 6)),
    (ml.errors.ShapeError, "with places between", lambda: ml.adaptive_avg_pool(ml.ones((2, 3)), 1)),
    (
        ml.errors.ArgumentError,
        "expected size as one or two integers >= 1",
        lambda: ml.adaptive_max_pool(images, (1, 2, 3)),
    ),
    (
        ml.errors.ShapeError,
        r"images of \(5, 5\) have \(4, 4\) windows, not \(2, 2\)",
        lambda: ml.fold(ml.ones((1, 2, 2, 2, 2, 1)), 5),
    ),
    (ml.errors.ShapeError, "expected windows of 6 axes", lambda: ml.fold(images, 5)),
)
def test_refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    refuses(error, text, call)


@pytest.mark.parametrize("function", ["hardshrink", "softshrink", "tanhshrink", "hard_tanh"])
def test_a_nan_is_not_shrunk_away(function: str) -> None:
    assert np.isnan(getattr(ml, function)(ml.asarray([np.nan])).numpy()).all()
