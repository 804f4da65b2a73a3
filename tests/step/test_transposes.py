"""Products of matrices that are transposed only for them, and copies that stay."""

from __future__ import annotations

from collections.abc import Callable

import mlvm.eager as ml
from mlvm.core.program.assembly import disassemble
from mlvm.eager import Tensor
from mlvm.step import compile as compiling
from mlvm.step.compile import Planned
from tests.brief import Patch, cases
from tests.machines.native.planners import POOLS as _POOLS  # noqa: F401 (skips without them)

KEY = ml.random.key(0)
X, W, V = (ml.random.normal(shape, key=KEY) for shape in ((20, 24), (32, 24), (24, 24)))
BATCH = ml.random.normal((2, 20, 24), key=KEY)


def turned(monkeypatch: Patch, f: Callable[..., object], *args: object) -> int:
    """Count the matrices that the captured function transposes. Its results have the eager bits."""
    planned: list[Planned] = []
    monkeypatch.setattr(compiling, "on_planned", [planned.append])
    captured = ml.capture(f, hoist=False)
    for y, z in zip(ml.tree.leaves(f(*args)), ml.tree.leaves(captured(*args)), strict=True):
        assert y.dtype is z.dtype
        assert ml.array_equal(y, z)
    return disassemble(planned[0].program).count("permute_dims")


def loss(x: Tensor, w: Tensor) -> Tensor:
    return ml.sum(ml.tanh(x @ w.T))


def in_a_loop(x: Tensor, w: Tensor) -> Tensor:
    def turn(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = ml.tanh(row[None] + h @ w.T)
        return h, h[0]

    return ml.scan(turn, x[:1], x)[1]


@cases("count, f, args",
    (0, lambda x, w: x @ w.T, (X, W)), (0, ml.value_and_grad(loss, argnums=(0, 1)), (X, W)),
    (0, ml.value_and_grad(loss, argnums=(0, 1)), (BATCH, W)),
    (0, lambda x, y: x @ y.mT, (BATCH, BATCH)), (0, lambda x: x.T @ x, (X,)),
    (0, lambda x: x.T @ x.T, (V,)), (0, lambda x, w: (w @ x.T).T, (X, W)), (0, in_a_loop, (X, V)),
    (1, lambda x, w: (x @ w.T, w.T), (X, W)),
    (1, lambda x, w: [x @ (t := w.T), 2 * x @ t, 3 * x @ t], (X, W)),
    (1, lambda x, w: x.mT @ w, (BATCH, W[:20])), (1, lambda x: x.T @ x[:, 0], (X,)),
    (1, lambda x, w: (x[:3] @ w.T).T, (X, W)),
    (1, lambda x, w: (y := x @ w.T).T + ml.sum(y), (X, W)),
)  # fmt: skip
def test_products_take_matrices_as_they_lie(
    count: int, f: Callable[..., object], args: tuple[Tensor, ...], monkeypatch: Patch
) -> None:
    assert turned(monkeypatch, f, *args) == count


def test_casts_around_products_change_places(monkeypatch: Patch) -> None:
    def step(x: Tensor, w: Tensor) -> object:
        return ml.value_and_grad(loss, argnums=(0, 1))(x, w)

    with ml.autocast("bfloat16"):
        assert turned(monkeypatch, step, X, W) == 0
        assert turned(monkeypatch, lambda x: ml.astype(x.T, ml.bfloat16), X) == 1


def test_a_matrix_that_is_written_meanwhile_was_copied(monkeypatch: Patch) -> None:
    w = ml.asarray(V.numpy().copy())

    @ml.capture
    def step(x: Tensor) -> Tensor:
        t = w.T
        w[...] = w + x.T @ x
        return x @ t

    before = w.numpy().copy()
    assert ml.array_equal(step(X), X @ ml.asarray(before.T.copy()))
