"""Gradients beside slopes in random directions, which move all elements at once.

A wrong element shows in any direction, and the number of calls does not grow with the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.eager.tree import among_others, flatten, named_leaves, substitute

DIRECTIONS: Final = 2
"""Directions of the arguments, and of the results. Two tell a second derivative from its
transpose."""


def check_slopes(
    fn: Callable[..., Any], *args: Any, order: int = 1, tolerance: float = 1e-6
) -> None:
    """Raise `GradientMismatchError` unless gradients of `fn` up to the order are its slopes.

    The arguments are those of `ml.testing.check_gradients`, which looks at each element of a
    function that fails, for its place.
    """
    rng = np.random.default_rng(0)
    wide = [substitute(_widened, arg) for arg in args]
    tensors = [x for arg in wide for _, x in flatten(arg, None, ends=among_others)[0]]
    directions = {id(x): _drawn(rng, x) for x in tensors if x.dtype.is_inexact}
    if not directions:
        raise ml.errors.GradientError("check_slopes: no argument has a float tensor")
    values = [y for _, y in named_leaves(fn(*wide)) if y.dtype.is_inexact]
    weights = [_drawn(rng, y) for y in values]
    infinite = [ml.isinf(y) if np.isinf(y.numpy()).any() else None for y in values]

    def along(t: ml.Tensor) -> ml.Tensor:
        def move(x: ml.Tensor) -> ml.Tensor:
            if id(x) not in directions:
                return x
            step = t.astype(x.dtype) @ directions[id(x)]
            return x + ml.reshape(step, x.shape)

        results = [y for _, y in named_leaves(fn(*[substitute(move, arg) for arg in wide]))]
        results = [y for y in results if y.dtype.is_inexact]
        results = [
            y if none is None else ml.where(none, 0.0, y)
            for y, none in zip(results, infinite, strict=True)
        ]
        sums = [w @ ml.reshape(y, -1) for w, y in zip(weights, results, strict=True)]
        return ml.sum(ml.stack([ml.real(each) for each in sums]), axis=0)

    try:
        start = ml.zeros(DIRECTIONS, dtype=ml.float64)
        ml.testing.check_gradients(along, start, order=order, tolerance=tolerance)
    except ml.errors.GradientMismatchError:
        ml.testing.check_gradients(fn, *args, order=order, tolerance=tolerance)
        raise


def _widened(x: ml.Tensor) -> ml.Tensor:
    if not x.dtype.is_inexact:
        return x
    return ml.astype(x, ml.float64 if x.dtype.is_float else ml.complex128)


def _drawn(rng: np.random.Generator, x: ml.Tensor) -> ml.Tensor:
    """Return random numbers for each direction and element of x."""
    drawn = rng.standard_normal((DIRECTIONS, x.size))
    return ml.asarray(drawn if x.dtype.is_float else drawn + 1j * rng.standard_normal(drawn.shape))
