"""Building blocks of programs in the eager language. Only public names of `mlvm.eager` are used:
the programs run in any checkout of mlvm (`tests.same_programs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml


class Box(ml.nn.Module):
    """A Module with the fields that it is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class World(NamedTuple):
    """A step, the arguments of the i-th call, and what the step reaches by itself. With `cycles` it
    leaves functions that know themselves, and so all that they reach."""

    step: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    state: Callable[[], Any]
    steps: int = 3
    resets: bool = False
    cycles: bool = False


factor = 1.0
"""Of all random values: near 1, to see how much rounding matters to a program."""


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> ml.Tensor:
    """A tensor of small random values."""
    return ml.asarray(values(dtype, shape, seed))


def values(dtype: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("f"):
        array = rng.normal(size=shape) * factor
        return array.astype({"f32": np.float32, "f64": np.float64}[dtype])
    return rng.integers(0 if dtype[0] == "u" else -4, 5, shape).astype(
        ml.TensorType(dtype).dtype.numpy
    )


def walked(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and other values of a tree, by path."""
    if isinstance(tree, ml.optim.Optimizer):
        tree = tree.state()
    if isinstance(tree, ml.nn.Module):
        tree = vars(tree)
    if isinstance(tree, dict):
        for name, each in tree.items():
            yield from walked(f"{path}[{name!r}]", each)
    elif isinstance(tree, (list, tuple)):
        yield f"type({path})", type(tree).__name__
        for i, each in enumerate(tree):
            yield from walked(f"{path}[{i}]", each)
    else:
        yield path, tree
