"""Cost of a call of a captured function that computes next to nothing.

`add` is `x + x` on f32[3]. `tree` adds two of 54 tensors, f32[3] each, that are given as a dict.
`momentum` and `adamw` are steps of an optimizer on 60 parameters, f32[4] each, whose gradients are
given. The others are JAX's `jit`, whose optimizers are written out and whose arguments are donated,
and PyTorch's `compile`, and its optimizers, `foreach` where there is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.harness import Contender, Round, Suite, microseconds

LEAVES = 54
PARAMETERS = 60
RATE, MOMENTUM = 0.1, 0.9
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01


def rounds(quick: bool, **calls: Callable[[], object]) -> Mapping[str, Round]:
    """Return a round for each call, which has run before."""
    times = 20 if quick else 4000

    def round_of(call: Callable[[], object]) -> Round:
        for _ in range(4):
            call()

        def timed() -> Mapping[str, float]:
            return {
                "us_per_call": microseconds(lambda: deque((call() for _ in range(times)), maxlen=1))
                / times
            }

        return timed

    return {name: round_of(call) for name, call in calls.items()}


def arrays(n: int, size: int) -> dict[str, Any]:
    return {f"x{i}": np.full(size, 1.0, np.float32) for i in range(n)}


def prepare_mlvm(quick: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml
    from mlvm.eager import optim

    def tensors(n: int, size: int) -> dict[str, Any]:
        return {name: ml.asarray(x) for name, x in arrays(n, size).items()}

    x, tree, grads = ml.ones(3), tensors(LEAVES, 3), tensors(PARAMETERS, 4)
    add = ml.capture(lambda x: x + x)
    of_tree = ml.capture(lambda tree: tree["x0"] + tree["x1"])
    sgd = optim.SGD(tensors(PARAMETERS, 4), RATE, momentum=MOMENTUM)
    adamw = optim.AdamW(tensors(PARAMETERS, 4), RATE, weight_decay=DECAY)
    steps = [ml.capture(each.update) for each in (sgd, adamw)]
    return rounds(
        quick,
        add=lambda: add(x),
        tree=lambda: of_tree(tree),
        momentum=lambda: steps[0](grads),
        adamw=lambda: steps[1](grads),
    )


def prepare_jax(quick: bool) -> Mapping[str, Round]:
    import jax
    import jax.numpy as jnp

    def tensors(n: int, size: int) -> Any:
        return jax.tree.map(jnp.asarray, arrays(n, size))

    def momentum(params: Any, velocity: Any, grads: Any) -> Any:
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity

    def adamw(params: Any, m: Any, v: Any, t: Any, grads: Any) -> Any:
        t = t + 1
        m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
        v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)

        def updated(p: Any, m: Any, v: Any) -> Any:
            scaled = (m / (1 - BETAS[0] ** t)) / (jnp.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
            return p - RATE * (scaled + DECAY * p)

        return jax.tree.map(updated, params, m, v), m, v, t

    x, tree, grads = jnp.ones(3), tensors(LEAVES, 3), tensors(PARAMETERS, 4)
    add, of_tree = jax.jit(lambda x: x + x), jax.jit(lambda tree: tree["x0"] + tree["x1"])
    steps = jax.jit(momentum, donate_argnums=(0, 1)), jax.jit(adamw, donate_argnums=(0, 1, 2, 3))
    states: list[Any] = [
        [tensors(PARAMETERS, 4) for _ in range(2)],
        [*[tensors(PARAMETERS, 4) for _ in range(3)], jnp.zeros(())],
    ]

    def step(i: int) -> None:
        states[i] = jax.block_until_ready(steps[i](*states[i], grads))

    return rounds(
        quick,
        add=lambda: jax.block_until_ready(add(x)),
        tree=lambda: jax.block_until_ready(of_tree(tree)),
        momentum=lambda: step(0),
        adamw=lambda: step(1),
    )


def prepare_torch(quick: bool) -> Mapping[str, Round]:
    import torch

    def tensors(n: int, size: int) -> dict[str, Any]:
        return {name: torch.from_numpy(x) for name, x in arrays(n, size).items()}

    x, tree = torch.ones(3), tensors(LEAVES, 3)
    add = torch.compile(lambda x: x + x)
    of_tree = torch.compile(lambda tree: tree["x0"] + tree["x1"])

    def step_of(kind: Any, **options: Any) -> Callable[[], object]:
        params = [x.requires_grad_() for x in tensors(PARAMETERS, 4).values()]
        for p in params:
            p.grad = torch.ones_like(p)
        step: Callable[[], object] = kind(params, lr=RATE, foreach=True, **options).step
        return step

    return rounds(
        quick,
        add=lambda: add(x),
        tree=lambda: of_tree(tree),
        momentum=step_of(torch.optim.SGD, momentum=MOMENTUM),
        adamw=step_of(torch.optim.AdamW, weight_decay=DECAY),
    )


SUITE = Suite(
    module="bench.calls",
    contenders=(
        Contender("mlvm", "mlvm", prepare_mlvm),
        Contender("jax", "jax", prepare_jax),
        Contender("torch", "torch", prepare_torch),
    ),
    units={"us_per_call": "us"},
    ours=("mlvm",),
    targets={
        ("add", "us_per_call", "mlvm", "jax"): 1.25,
        ("tree", "us_per_call", "mlvm", "jax"): 1.4,
        ("momentum", "us_per_call", "mlvm", "jax"): 10.0,
    },
    rounds=15,
    quick_rounds=1,
)
