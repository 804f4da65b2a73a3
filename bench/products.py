"""Matrix products of f32 beside numpy, PyTorch and JAX: 24 shapes, all transposes, one thread.

`TN 512x1568x2048` is a product of 512 rows, each the sum of 1568 terms, with 2048 columns, whose
first operand lies transposed in memory. `us` is the time of one, `error` the largest difference
from f64's, in units of 1e-7 of the largest element. The shapes are layers, and their gradients, of
a recurrent network, of BERT, of Mixers and of a convolutional network, from one row to 12544.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.environment import has_avx512
from bench.harness import Contender, Contest, Prepare, Round, Suite, microseconds

Array = NDArray[Any]
Multiply = Callable[[], object]
"""The product, in a library's own arrays."""


class Shape(NamedTuple):
    """`rows` x `inner` by `inner` x `columns`; which operands lie transposed in memory."""

    transposed: str
    rows: int
    inner: int
    columns: int

    @property
    def operands(self) -> tuple[Array, Array]:
        """Both as they lie in memory: noise, always the same."""
        rng = np.random.default_rng(0)
        m, k, n = self[1:]
        x = (k, m) if self.transposed[0] == "T" else (m, k)
        y = (n, k) if self.transposed[1] == "T" else (k, n)
        return rng.standard_normal(x, np.float32), rng.standard_normal(y, np.float32)

    def turned(self, x: Any, y: Any) -> tuple[Any, Any]:
        """The factors, of what lies in memory."""
        return (x.T if self.transposed[0] == "T" else x, y.T if self.transposed[1] == "T" else y)


SHAPES: Final = (
    *(Shape("NN", 1, 512, 2048), Shape("NT", 1, 512, 2048), Shape("NN", 1, 304, 750)),
    *(Shape("NN", 13, 768, 768), Shape("NN", 13, 768, 3072), Shape("NT", 13, 3072, 768)),
    *(Shape("NN", 16, 64, 32), Shape("NN", 32, 64, 10), Shape("TN", 64, 32, 10)),
    *(Shape("NN", 48, 768, 3072), Shape("NN", 128, 768, 768), Shape("NT", 128, 3072, 768)),
    *(Shape("NN", 512, 64, 128), Shape("TN", 64, 512, 128), Shape("NT", 512, 128, 64)),
    *(Shape("TN", 256, 196, 512), Shape("TT", 512, 512, 512)),
    *(Shape("NN", 1568, 512, 2048), Shape("TN", 512, 1568, 2048), Shape("NT", 1568, 2048, 512)),
    *(Shape("NN", 4096, 128, 512), Shape("NN", 12544, 147, 64)),
    *(Shape("TN", 576, 12544, 64), Shape("NT", 12544, 64, 576)),
)
CASES: Final = {f"{each.transposed} {each[1]}x{each[2]}x{each[3]}": each for each in SHAPES}
ROUND_US: Final = 2e4
"""What a round takes, roughly, at 50 flops a nanosecond."""


def preparing(make: Callable[[Shape], tuple[Multiply, Callable[[Any], Array]]]) -> Prepare:
    """A `prepare` of all shapes, with `quick` of the small ones. `make` gives the product, and what
    makes an array of it."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        @lru_cache(maxsize=1)
        def made(case: str) -> tuple[Multiply, float]:
            shape = CASES[case]
            multiply, array = make(shape)
            return multiply, error_of(shape, array(multiply()))

        def timed(case: str) -> Mapping[str, float]:
            multiply, error = made(case)
            us = 1 + 2 * math.prod(CASES[case][1:]) / 5e4
            times = range(max(1, round(ROUND_US / us / (20 if quick else 1))))
            elapsed = microseconds(lambda: [multiply() for _ in times])
            return {"us": elapsed / len(times), "error": error}

        small = [case for case in CASES if not quick or math.prod(CASES[case][1:]) < 1e6]
        return {case: partial(timed, case) for case in small}

    return prepare


def error_of(shape: Shape, product: Array) -> float:
    """How far off the product is, in units of 1e-7 of its largest element."""
    x, y = shape.turned(*[operand.astype(np.float64) for operand in shape.operands])
    exact = x @ y
    return float(np.abs(product - exact).max() / np.abs(exact).max() * 1e7)


def in_mlvm(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import mlvm.eager as ml

    x, y = map(ml.asarray, shape.operands)
    turns: dict[str, Any] = {
        f"transpose_{name}": t == "T" for name, t in zip("xy", shape.transposed, strict=True)
    }
    return partial(ml.matmul, x, y, **turns), lambda product: product.numpy()


def in_numpy(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    x, y = shape.turned(*shape.operands)
    out = np.empty((shape.rows, shape.columns), np.float32)
    return partial(np.matmul, x, y, out=out), np.asarray


def in_torch(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import torch

    x, y = shape.turned(*map(torch.from_numpy, shape.operands))
    out = torch.empty(shape.rows, shape.columns)
    return torch.inference_mode()(partial(torch.mm, x, y, out=out)), lambda product: product.numpy()


def in_jax(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import jax
    import jax.numpy as jnp

    operands = [*map(jnp.asarray, shape.operands)]
    multiply = jax.jit(lambda x, y: jnp.matmul(*shape.turned(x, y)))
    return lambda: multiply(*operands).block_until_ready(), np.asarray


SUITE = Suite(
    module="bench.products",
    contenders=(
        Contender("mlvm", "mlvm", preparing(in_mlvm)),
        Contender("numpy", "numpy", preparing(in_numpy)),
        Contender("torch", "torch", preparing(in_torch)),
        Contender("jax", "jax", preparing(in_jax)),
    ),
    units={"us": "us", "error": "1e-7"},
    contests=(
        Contest(
            "products",
            "us",
            ours=("mlvm",),
            theirs=("numpy", "torch"),
            targets=dict.fromkeys(CASES, 0.8 if has_avx512() else 0.85),
            mean=1.0,
        ),
    ),
    rounds=15,
    quick_rounds=1,
)
