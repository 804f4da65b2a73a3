"""Cost of transformations of functions, beside `torch.func` and JAX.

The function is the loss of a classifier of dense layers. The cases:

    per-example gradients   `vmap(grad(loss))`: a gradient of the parameters for each example
    hvp                     `jvp(grad(loss))`: the Hessian of a batch's loss times a vector
    influence               how much each example of a batch has moved the loss of a test example
                            (Koh and Liang, Understanding black-box predictions via influence
                            functions, 2017): a damped inverse Hessian times the test's gradient, by
                            a loop of such products, which `linearize` makes of the gradient, and
                            the losses' derivatives in that direction

All contenders have the same weights and examples. None is timed before its results are those of
numpy in f64, for the loop by the others' formula. `us` is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Prepare, Round, Suite, rounds_of

Array = NDArray[Any]
Run = Callable[[], Any]
"""Computes the results, and waits for them."""


class Size(NamedTuple):
    """The widths of the layers, and how many examples there are, and turns of the loop."""

    widths: tuple[int, ...] = (64, 128, 128, 10)
    batch: int = 32
    turns: int = 10


QUICK: Final = Size((5, 7, 3), 4, 3)
CASES: Final = ("per-example gradients", "hvp", "influence")
RUNS: Final = 5
DAMPING: Final = 0.1
SCALE: Final = 0.05
TOLERANCE: Final = 1e-3


def data(size: Size) -> tuple[list[Array], list[Array], Array, Array]:
    """Weights and biases, a vector like them, examples and labels."""
    random = np.random.default_rng(0)

    def noise(*shape: int, scale: float = 1.0) -> Array:
        return np.asarray(random.standard_normal(shape) * scale, np.float32)

    params: list[Array] = []
    for inner, outer in zip(size.widths, size.widths[1:], strict=False):
        params += [noise(inner, outer, scale=inner**-0.5), noise(outer, scale=0.1)]
    vector = [noise(*p.shape, scale=0.1) for p in params]
    xs = noise(size.batch, size.widths[0])
    labels = random.integers(0, size.widths[-1], size.batch)
    return params, vector, xs, labels


# --- what comes out, by numpy ------------------------------------------------------------


def forward(params: list[Array], ts: list[Array], xs: Array, labels: Array) -> Any:
    """Return losses of the examples and their gradients one by one, along a complex step: the
    imaginary parts are derivatives in the direction of `ts` (Squire and Trapp, SIAM Review 40,
    1998)."""
    h = 1e-30
    ps = [p.astype(np.complex128) + 1j * h * t for p, t in zip(params, ts, strict=True)]
    inputs, x = [], xs.astype(np.complex128)
    layers = len(ps) // 2
    for i in range(layers):
        inputs.append(x)
        x = x @ ps[2 * i] + ps[2 * i + 1]
        x = np.tanh(x) if i < layers - 1 else x
    e = np.exp(x - x.real.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    rows = np.arange(len(xs))
    losses = -np.log(p[rows, labels])
    g = p.copy()
    g[rows, labels] -= 1
    gradients: list[Array] = []
    for i in reversed(range(layers)):
        gradients[:0] = [inputs[i][:, :, None] * g[:, None, :], g]
        if i:
            g = (g @ ps[2 * i].T) * (1 - inputs[i] ** 2)
    return losses, gradients, h


def product(params: list[Array], v: list[Array], xs: Array, labels: Array) -> list[Array]:
    _, gradients, h = forward(params, v, xs, labels)
    return [g.mean(axis=0).imag / h for g in gradients]


def turned(start: list[Any], s: list[Any], moved: list[Any]) -> list[Any]:
    """Return the estimate after one more turn of the loop."""
    return [a + (1 - DAMPING) * b - SCALE * c for a, b, c in zip(start, s, moved, strict=True)]


@lru_cache(maxsize=6)
def reference(case: str, size: Size) -> list[Array]:
    params, vector, xs, labels = data(size)
    none = [np.zeros_like(p) for p in params]
    if case == "per-example gradients":
        return [g.real for g in forward(params, none, xs, labels)[1]]
    if case == "hvp":
        return product(params, vector, xs, labels)
    start = [g.real[0] for g in forward(params, none, xs[:1], labels[:1])[1]]
    s = start
    for _ in range(size.turns):
        s = turned(start, s, product(params, s, xs, labels))
    losses, _, h = forward(params, s, xs, labels)
    return [losses.imag / h]


def check(results: list[Array], expected: list[Array]) -> None:
    """Raise `ValueError` unless these are the expected results."""
    for i, (got, reference_value) in enumerate(zip(results, expected, strict=True)):
        error = float(np.abs(got - reference_value).max() / np.abs(reference_value).max())
        if got.shape != reference_value.shape or not error <= TOLERANCE:
            raise ValueError(
                f"result {i}: {got.shape}, off by {error:.1e} of {reference_value.shape}"
            )


# --- contenders ------------------------------------------------------------------------


def mlvm(case: str, size: Size) -> Run:
    import mlvm.eager as ml

    params, vector, xs, labels = [
        [*map(ml.asarray, x)] if isinstance(x, list) else ml.asarray(x) for x in data(size)
    ]

    def losses(ps: Any, xs: Any, labels: Any) -> Any:
        for i in range(0, len(ps) - 2, 2):
            xs = ml.tanh(xs @ ps[i] + ps[i + 1])
        return ml.softmax_cross_entropy(xs @ ps[-2] + ps[-1], labels)

    def loss(ps: Any, xs: Any, labels: Any) -> Any:
        return ml.mean(losses(ps, xs, labels))

    def per_example(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        return ml.vmap(ml.grad(losses), in_axes=(None, 0, 0))(ps, xs, labels)

    def hvp(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        return ml.hvp(loss, (ps, xs, labels), (v, None, None))

    def influence(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        start = ml.grad(loss)(ps, xs[:1], labels[:1])
        _, times = ml.linearize(lambda ps: ml.grad(loss)(ps, xs, labels), ps)

        s = ml.fori_loop(0, size.turns, lambda _, s: turned(start, s, times(s)), start)
        return [ml.jvp(lambda ps: losses(ps, xs, labels), (ps,), (s,))[1]]

    fn = {"per-example gradients": per_example, "hvp": hvp, "influence": influence}[case]
    run = ml.capture(fn)
    return lambda: run(params, vector, xs, labels)


def torch(case: str, size: Size) -> Run:
    import torch
    from torch.func import grad, jvp, vmap
    from torch.nn.functional import cross_entropy

    params, vector, xs, labels = [
        [*map(torch.tensor, x)] if isinstance(x, list) else torch.tensor(x) for x in data(size)
    ]

    def logits(ps: Any, xs: Any) -> Any:
        for i in range(0, len(ps) - 2, 2):
            xs = torch.tanh(xs @ ps[i] + ps[i + 1])
        return xs @ ps[-2] + ps[-1]

    def loss(ps: Any, xs: Any, labels: Any) -> Any:
        return cross_entropy(logits(ps, xs), labels)

    def per_example() -> Any:
        return vmap(grad(loss), in_dims=(None, 0, 0))(params, xs, labels)

    def hvp(v: Any) -> Any:
        return jvp(lambda ps: grad(loss)(ps, xs, labels), (params,), (v,))[1]

    def influence() -> Any:
        start = grad(loss)(params, xs[:1], labels[:1])
        s = start
        for _ in range(size.turns):
            s = turned(start, s, hvp(s))

        def losses(ps: Any) -> Any:
            return cross_entropy(logits(ps, xs), labels, reduction="none")

        return [jvp(losses, (params,), (s,))[1]]

    return {
        "per-example gradients": per_example,
        "hvp": lambda: hvp(vector),
        "influence": influence,
    }[case]


def jax(case: str, size: Size) -> Run:
    import jax
    import jax.numpy as jnp

    params, vector, xs, labels = [
        [*map(jnp.asarray, x)] if isinstance(x, list) else jnp.asarray(x) for x in data(size)
    ]

    def losses(ps: Any, xs: Any, labels: Any) -> Any:
        for i in range(0, len(ps) - 2, 2):
            xs = jnp.tanh(xs @ ps[i] + ps[i + 1])
        scores = jax.nn.log_softmax(xs @ ps[-2] + ps[-1])
        return -jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]

    def loss(ps: Any, xs: Any, labels: Any) -> Any:
        return jnp.mean(losses(ps, xs, labels))

    def per_example(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        return jax.vmap(jax.grad(losses), in_axes=(None, 0, 0))(ps, xs, labels)

    def hvp(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        return jax.jvp(lambda ps: jax.grad(loss)(ps, xs, labels), (ps,), (v,))[1]

    def influence(ps: Any, v: Any, xs: Any, labels: Any) -> Any:
        start = jax.grad(loss)(ps, xs[:1], labels[:1])
        _, times = jax.linearize(lambda ps: jax.grad(loss)(ps, xs, labels), ps)

        s = jax.lax.fori_loop(0, size.turns, lambda _, s: turned(start, s, times(s)), start)
        return [jax.jvp(lambda ps: losses(ps, xs, labels), (ps,), (s,))[1]]

    fn = {"per-example gradients": per_example, "hvp": hvp, "influence": influence}[case]
    run = jax.jit(fn)
    return lambda: jax.block_until_ready(run(params, vector, xs, labels))


def preparing(make: Callable[[str, Size], Run]) -> Prepare:
    def prepare(quick: bool) -> Mapping[str, Round]:
        size = QUICK if quick else Size()

        def run_of(case: str) -> Run:
            run = make(case, size)
            check([np.asarray(y) for y in run()], reference(case, size))
            return run

        return rounds_of(run_of, dict.fromkeys(CASES, RUNS), "us")

    return prepare


SUITE = Suite(
    module="bench.transformations",
    contenders=(
        Contender("mlvm-captured", "mlvm", preparing(mlvm)),
        Contender("torch-func", "torch", preparing(torch)),
        Contender("jax-jit", "jax", preparing(jax)),
    ),
    units={"us": "us"},
    ours=("mlvm-captured",),
    targets={
        (case, "us", "mlvm-captured", theirs): 1.0
        for theirs in ("torch-func", "jax-jit")
        for case in CASES
    },
    rounds=11,
)
