"""Cases of windows and convolutions, spelt out as loops."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case, Draws

_draws = Draws(6)
_f64, _f32, _distinct = _draws.f64, _draws.f32, _draws.distinct


def _places(
    shape: Any, window: Any, padding: Any, stride: Any = (1, 1), dilation: Any = (1, 1)
) -> Any:
    """Of each place in each window: that of the window, that in it, and that in the image, or None
    where it is padding."""
    sizes = [
        (n + sum(pad) - (k - 1) * spread - 1) // step + 1
        for n, pad, k, spread, step in zip(shape, padding, window, dilation, stride, strict=True)
    ]
    for at in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, window)):
            place = tuple(
                i * step + j * spread - before
                for i, j, step, spread, (before, _) in zip(
                    at, tap, stride, dilation, padding, strict=True
                )
            )
            inside = all(0 <= i < n for i, n in zip(place, shape, strict=True))
            yield at, tap, place if inside else None


def _grid(places: Any) -> Any:
    return tuple(n + 1 for n in max(at for at, _, _ in places))


def _patches(x: Array, window: Any, pad_value: float = 0.0, **how: Any) -> Any:
    places = list(_places(x.shape[1:-1], window, **how))
    out = np.empty((len(x), *_grid(places), *window, x.shape[-1]))
    for at, tap, place in places:
        index = (slice(None), *at, *tap)
        out[index] = pad_value if place is None else x[(slice(None), *place)]
    return out


def _unpatches(x: Array, shape: Any, **how: Any) -> Any:
    out = np.zeros(shape)
    for at, tap, place in _places(shape[1:-1], x.shape[3:5], **how):
        if place is not None:
            out[(slice(None), *place)] += x[(slice(None), *at, *tap)]
    return out


def _each_product(image: Any, kernel: Any, groups: int, **how: Any) -> Any:
    """(window, place in the kernel, place in the images), each with its channels, whose product is
    a term of a convolution."""
    inputs, outputs = kernel[-2], kernel[-1] // groups
    for at, tap, place in _places(image[1:-1], kernel[:-2], **how):
        if place is not None:
            for group, i, o in itertools.product(range(groups), range(inputs), range(outputs)):
                result = group * outputs + o
                yield (*at, result), (*tap, i, result), (*place, group * inputs + i)


def _conv2d(x: Array, kernel: Array, groups: int = 1, **how: Any) -> Any:
    grid = _grid(list(_places(x.shape[1:-1], kernel.shape[:-2], **how)))
    out = np.zeros((len(x), *grid, kernel.shape[-1]))
    for at, tap, place in _each_product(x.shape, kernel.shape, groups, **how):
        out[(slice(None), *at)] += x[(slice(None), *place)] * kernel[tap]
    return out


def _conv_transpose2d(x: Array, kernel: Array, shape: Any, groups: int = 1, **how: Any) -> Any:
    out = np.zeros(shape)
    for at, tap, place in _each_product(shape, kernel.shape, groups, **how):
        out[(slice(None), *place)] += x[(slice(None), *at)] * kernel[tap]
    return out


def _conv2d_kernel_vjp(g: Array, x: Array, window: Any, groups: int = 1, **how: Any) -> Any:
    out = np.zeros((*window, x.shape[-1] // groups, g.shape[-1]))
    for at, tap, place in _each_product(x.shape, out.shape, groups, **how):
        out[tap] += np.sum(g[(slice(None), *at)] * x[(slice(None), *place)])
    return out


def _max_pool(x: Array, **how: Any) -> Any:
    return _patches(x, pad_value=-np.inf, **how).max((3, 4))


def _max_pool_vjp(g: Array, x: Array, window: Any, **how: Any) -> Any:
    windows = _patches(x, window, -np.inf, **how)
    chosen = windows == windows.max((3, 4), keepdims=True)
    shares = g[:, :, :, None, None] * chosen / chosen.sum((3, 4), keepdims=True)
    return _unpatches(shares, x.shape, **how)


def _avg_pool(x: Array, window: Any, **how: Any) -> Any:
    return _patches(x, window, **how).sum((3, 4)) / (window[0] * window[1])


# --- the cases ------------------------------------------------------------------------

_NONE = ((0, 0), (0, 0))
_UNEVEN = ((1, 0), (2, 1))
_SLIDING = {"window": (3, 2), "stride": (2, 1), "padding": _UNEVEN}
_APART = {"window": (2, 3), "stride": (1, 2), "padding": ((2, 1), (1, 2)), "dilation": (3, 2)}
_TILES = {"window": (2, 2), "stride": (2, 2), "padding": _NONE}


def _but_window(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name != "window"}


_VOLUMES = {"stride": (1, 1, 1), "padding": ((1, 0), (0, 1), (1, 1)), "dilation": (2, 1, 1)}

_CONVOLUTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 5, 4, 3), (3, 2, 3, 4), {"padding": _UNEVEN}),
    ((2, 5, 4, 3), (3, 3, 3, 2), {"stride": (2, 1), "padding": _NONE}),
    ((1, 5, 5, 4), (2, 3, 2, 6), {"padding": _UNEVEN, "groups": 2, "dilation": (2, 1)}),
    ((1, 6, 7, 5), (3, 2, 1, 5), {"padding": _UNEVEN, "groups": 5}),
    ((1, 6, 7, 3), (3, 2, 1, 3), {**_but_window(_APART), "stride": (3, 2), "groups": 3}),
    ((1, 4, 4, 2), (2, 2, 1, 4), {"padding": _NONE, "stride": (2, 1), "groups": 2}),
    ((1, 4, 3, 5, 2), (2, 3, 2, 1, 4), {**_VOLUMES, "groups": 2}),
    ((1, 3, 3, 4, 2), (1, 2, 2, 2, 3), {**_VOLUMES, "stride": (2, 1, 2)}),
]
_IN_F32: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 4, 6, 3), (2, 2, 3, 5), {"stride": (2, 2), "padding": _NONE}),
    ((2, 3, 3, 4), (1, 1, 4, 2), {"padding": _NONE}),
    ((2, 3, 3, 6), (1, 1, 3, 4), {"padding": _NONE, "groups": 2}),
    ((1, 5, 9, 21), (3, 3, 1, 21), {"padding": ((1, 1), (1, 1)), "groups": 21}),
    ((1, 5, 5, 8), (3, 3, 4, 6), {"padding": ((1, 1), (1, 1)), "groups": 2}),
    ((1, 3, 9, 16), (2, 3, 4, 16), {"padding": ((1, 0), (1, 1)), "groups": 4}),
    ((1, 2, 6, 32), (1, 3, 16, 32), {"padding": ((0, 0), (1, 2)), "groups": 2}),
    ((1, 2, 3, 16), (2, 2, 8, 16), {"padding": ((0, 0), (1, 0)), "stride": (1, 2), "groups": 2}),
]


def _made_of(x: Any, kernel: Any, how: dict[str, Any]) -> Any:
    """The shape of the result."""
    how = {name: value for name, value in how.items() if name != "groups"}
    return (x[0], *_grid(list(_places(x[1:-1], kernel[:-2], **how))), kernel[-1])


def _convolutions(build: Any) -> list[Any]:
    """Cases of one of three: `made` is given the arrays of a convolution, x, kernel and a
    cotangent, and its attributes."""
    return [
        build(draw(*x), draw(*kernel), draw(*_made_of(x, kernel, how)), how)
        for draw, every in ((_f64, _CONVOLUTIONS), (_f32, _IN_F32))
        for x, kernel, how in every
    ]


CASES: dict[str, list[Case]] = {
    "patches": [
        Case((_f64(2, 5, 4, 3),), _patches, _SLIDING),
        Case((_f64(2, 5, 4, 3),), _patches, {**_SLIDING, "pad_value": -2.5}),
        Case((_f32(1, 4, 6, 2),), _patches, _TILES),
        Case((_f64(2, 5, 6, 2),), _patches, _APART),
        Case((_f64(1, 5, 6, 2),), _patches, {**_APART, "padding": _NONE}),
    ],
    "unpatches": [
        Case(
            (_f64(2, 2, 6, 3, 2, 3),),
            _unpatches,
            {"shape": (2, 5, 4, 3), "stride": (2, 1), "padding": _UNEVEN},
        ),
        Case(
            (_f32(1, 2, 3, 2, 2, 2),),
            _unpatches,
            {"shape": (1, 4, 7, 2), "stride": (2, 2), "padding": _NONE},
        ),
        Case((_f64(2, 5, 3, 2, 3, 2),), _unpatches, {"shape": (2, 5, 6, 2), **_but_window(_APART)}),
    ],
    "conv2d": _convolutions(lambda x, kernel, g, how: Case((x, kernel), _conv2d, how)),
    "conv_transpose2d": _convolutions(
        lambda x, kernel, g, how: Case((g, kernel), _conv_transpose2d, {**how, "shape": x.shape})
    ),
    "conv2d_kernel_vjp": _convolutions(
        lambda x, kernel, g, how: Case(
            (g, x), _conv2d_kernel_vjp, {**how, "window": kernel.shape[:-2]}
        )
    ),
    "add_conv2d_kernel_vjp": [
        Case((kernel, *xs), lambda kernel, *xs, **how: kernel + _conv2d_kernel_vjp(*xs, **how), how)
        for kernel, *xs, how in _convolutions(
            lambda x, kernel, g, how: (kernel, g, x, {**how, "window": kernel.shape[:-2]})
        )
        if "groups" not in how
    ],
    "max_pool2d": [
        Case((_distinct(2, 5, 4, 3),), _max_pool, _SLIDING),
        Case((_f32(1, 4, 6, 2),), _max_pool, _TILES),
        Case((_distinct(2, 5, 6, 2),), _max_pool, _APART),
    ],
    "max_pool2d_vjp": [
        Case((_f64(2, 2, 6, 3), _distinct(2, 5, 4, 3)), _max_pool_vjp, _SLIDING),
        Case((_f32(1, 2, 3, 2), np.round(_f32(1, 4, 6, 2))), _max_pool_vjp, _TILES),
        Case((_f64(2, 5, 3, 2), _distinct(2, 5, 6, 2)), _max_pool_vjp, _APART),
        Case((_f32(1, 2, 3, 70), np.round(_f32(1, 4, 6, 70))), _max_pool_vjp, _TILES),
    ],
    "avg_pool2d": [
        Case((_f64(2, 5, 4, 3),), _avg_pool, _SLIDING),
        Case((_f32(1, 4, 6, 2),), _avg_pool, _TILES),
        Case((_f64(2, 5, 6, 2),), _avg_pool, _APART),
    ],
}
