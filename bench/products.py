"""Matrix products of f32 beside numpy, PyTorch and JAX: 24 shapes, all transposes, one thread.

`TN 512x1568x2048` is a product of 512 rows, each the sum of 1568 terms, with 2048 columns, whose
first operand lies transposed in memory. `us` is the time of one, `error` the largest difference
from f64's, in units of 1e-7 of the largest element. The shapes are layers, and their gradients, of
a recurrent network, of BERT, of Mixers and of a convolutional network, from one row to 12544.

`mlvm` is an eager call, which allocates its result, as JAX's does; numpy and PyTorch write into the
same array each time. So does `mlvm-machine`, a program of many products launched once, as in a
captured step. The better of the two counts in the contest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.environment import has_avx512
from bench.harness import Contender, Contest, Prepare, Round, Suite, microseconds

if TYPE_CHECKING:
    from mlvm.core.program.program import Program

Array = NDArray[Any]
Multiply = Callable[[int], object]
"""The product so many times, in a library's own arrays, and the last result."""


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

    @property
    def turns(self) -> dict[str, Any]:
        """The same as attributes of `matmul`."""
        return {
            f"transpose_{name}": t == "T" for name, t in zip("xy", self.transposed, strict=True)
        }

    def turned(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the factors, of what lies in memory."""
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
"""Rough time of a round at 50 flops a nanosecond."""


def preparing(make: Callable[[Shape], tuple[Multiply, Callable[[Any], Array]]]) -> Prepare:
    """Return a `prepare` of all shapes, with `quick` of the small ones. `make` gives the product,
    and what makes an array of it."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        @lru_cache(maxsize=1)
        def prepared(case: str) -> tuple[Multiply, float]:
            shape = CASES[case]
            multiply, array = make(shape)
            return multiply, error_of(shape, array(multiply(1)))

        def timed(case: str) -> Mapping[str, float]:
            multiply, error = prepared(case)
            us = 1 + 2 * math.prod(CASES[case][1:]) / 5e4
            times = max(1, round(ROUND_US / us / (20 if quick else 1)))
            return {"us": microseconds(lambda: multiply(times)) / times, "error": error}

        small = [case for case in CASES if not quick or math.prod(CASES[case][1:]) < 1e6]
        return {case: partial(timed, case) for case in small}

    return prepare


def error_of(shape: Shape, product: Array) -> float:
    """Return the error of the product, in units of 1e-7 of its largest element."""
    x, y = shape.turned(*[operand.astype(np.float64) for operand in shape.operands])
    exact = x @ y
    return float(np.abs(product - exact).max() / np.abs(exact).max() * 1e7)


def repeated(multiply: Callable[[], object]) -> Multiply:
    """Return one product after the other, each a call from Python."""

    def repeat(times: int) -> object:
        for _ in range(times - 1):
            multiply()
        return multiply()

    return repeat


def in_mlvm(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import mlvm.eager as ml

    x, y = map(ml.asarray, shape.operands)
    return repeated(partial(ml.matmul, x, y, **shape.turns)), lambda product: product.numpy()


def in_machine(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    from mlvm.arena.arena import Arena
    from mlvm.core.program.assembly import assemble
    from mlvm.core.types import TensorType
    from mlvm.machines.local import LocalVM

    vm = LocalVM()
    arena = Arena(vm, "products")
    x, y = shape.operands
    out, *factors = [
        arena.alloc(TensorType("f32", each))
        for each in ((shape.rows, shape.columns), x.shape, y.shape)
    ]
    for factor, values in zip(factors, (x, y), strict=True):
        vm.write(factor.handle, values)
    turns = json.dumps(shape.turns)
    product = f'load_arg 0\nload_arg 1\nload_arg 2\npush_str "matmul.out"\ncfunc 3 0 {turns}\n'

    @cache
    def program(times: int) -> Program:
        return assemble(f".func main 0 *\n{product * times}halt\n")

    def multiply(times: int) -> object:
        vm.launch(program(times), [out.handle, *[factor.handle for factor in factors]])
        return out

    return multiply, lambda out: vm.read(out.handle)


def in_numpy(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    x, y = shape.turned(*shape.operands)
    out = np.empty((shape.rows, shape.columns), np.float32)
    return repeated(partial(np.matmul, x, y, out=out)), np.asarray


def in_torch(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import torch

    x, y = shape.turned(*map(torch.from_numpy, shape.operands))
    out = torch.empty(shape.rows, shape.columns)
    multiply = torch.inference_mode()(repeated(partial(torch.mm, x, y, out=out)))
    return multiply, lambda product: product.numpy()


def in_jax(shape: Shape) -> tuple[Multiply, Callable[[Any], Array]]:
    import jax
    import jax.numpy as jnp

    operands = [*map(jnp.asarray, shape.operands)]
    multiply = jax.jit(lambda x, y: jnp.matmul(*shape.turned(x, y)))
    return repeated(lambda: multiply(*operands).block_until_ready()), np.asarray


SUITE = Suite(
    module="bench.products",
    contenders=(
        Contender("mlvm", "mlvm", preparing(in_mlvm)),
        Contender("mlvm-machine", "mlvm", preparing(in_machine)),
        Contender("numpy", "numpy", preparing(in_numpy)),
        Contender("torch", "torch", preparing(in_torch)),
        Contender("jax", "jax", preparing(in_jax)),
    ),
    units={"us": "us", "error": "1e-7"},
    contests=(
        Contest(
            "products",
            "us",
            ours=("mlvm", "mlvm-machine"),
            theirs=("numpy", "torch"),
            targets=dict.fromkeys(CASES, 0.8 if has_avx512() else 0.85),
            mean=1.0,
        ),
    ),
    rounds=15,
    quick_rounds=1,
)
