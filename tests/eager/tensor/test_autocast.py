"""Mixed precision: what is cast, where, and that a gradient and a capture follow."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.eager import Tensor
from tests.brief import refuses
from tests.precision import curves

KEY = ml.random.key(0)
X, W = (ml.random.normal(shape, key=KEY) for shape in ((4, 8), (8, 8)))
IMAGES, KERNEL = (ml.random.normal(shape, key=KEY) for shape in ((1, 6, 6, 2), (3, 3, 2, 5)))
HEADS = ml.random.normal((1, 2, 5, 4), key=KEY)
HALF, ROWS = ml.astype(X, ml.float16), X.tolist()
TURNS = 3


def _cell(c: Tensor, _: Any) -> tuple[Tensor, None]:
    return c + ml.tanh(c @ W), None


def _recurrent(x: Tensor) -> Tensor:
    y: Tensor = ml.scan(_cell, x, None, length=TURNS)[0]
    return y


CASES: list[tuple[str, Callable[[], Tensor]]] = [
    ("half", lambda: X @ W),
    ("half", lambda: ml.matmul(ROWS, W)),
    ("half", lambda: HALF @ W),
    ("half", lambda: ml.matmul(X, W, transpose_y=True)),
    ("half", lambda: ml.einsum("ij,kj->ik", X, W)),
    ("half", lambda: ml.tensordot(X, W, axes=1)),
    ("half", lambda: ml.conv2d(IMAGES, KERNEL)),
    ("half", lambda: ml.conv_transpose2d(IMAGES, ml.matrix_transpose(KERNEL), stride=2)),
    ("half", lambda: ml.nn.Linear(8, 3, key=KEY)(X)),
    ("half", lambda: ml.nn.Linear(4, 3, axis=-2, key=KEY)(X)),
    ("half", lambda: ml.nn.Linear(8, 3, key=KEY, dtype=ml.float16)(X)),
    ("half", lambda: ml.nn.Conv2d(2, 3, window=3, key=KEY)(IMAGES)),
    ("half", lambda: ml.nn.Bilinear(8, 8, 2, key=KEY)(X, X)),
    ("half", lambda: ml.gelu(X @ W)),
    ("half", lambda: ml.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True)),
    ("half", lambda: ml.vmap(ml.matmul)(HEADS[0], HEADS[0].mT)),
    ("half", lambda: ml.jvp(ml.matmul, (X, W), (X, W))[1]),
    ("half", lambda: ml.cond(X[0, 0] < 9, lambda: X @ W, lambda: W[:4] @ W)),
    ("f32", lambda: ml.softmax(HALF)),
    ("f32", lambda: ml.sum(HALF, 0)),
    ("f32", lambda: ml.mean(HALF)),
    ("f32", lambda: ml.std(HALF)),
    ("f32", lambda: ml.exp(HALF)),
    ("f32", lambda: HALF**3),
    ("f32", lambda: 3**HALF),
    ("f32", lambda: ml.nn.LayerNorm(8)(HALF)),
    ("f32", lambda: ml.nn.RMSNorm(8)(HALF)),
    ("f32", lambda: ml.nn.GroupNorm(2, 8)(HALF)),
    ("f32", lambda: ml.mean_squared_error(HALF, HALF)),
    ("f32", lambda: ml.softmax_cross_entropy(X @ W, ml.zeros(4, dtype=ml.int64))),
    ("f32", lambda: ml.cov(HALF)),
    ("f32", lambda: X + X @ W),
    ("f32", lambda: ml.matmul(X, W, out=ml.zeros((4, 8)))),
    ("f32", lambda: _recurrent(X)),
    ("f32", lambda: ml.nn.LSTM(8, 3, key=KEY)(X[None])[0]),
    ("f32", lambda: ml.nn.GRU(8, 3, key=KEY)(X[None])[0]),
    ("f16", lambda: ml.relu(HALF)),
    ("f64", lambda: ml.astype(X, ml.float64) @ ml.astype(W, ml.float64)),
    ("i64", lambda: ml.ones((2, 2), dtype=ml.int64) @ ml.ones((2, 2), dtype=ml.int64)),
]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_are_of_halves_and_what_would_lose_of_f32(half: str) -> None:
    for number, (wanted, made) in enumerate(CASES):
        with ml.autocast(half):
            y = made()
            captured = ml.capture(made)() if half == "bfloat16" else y
        name = {"bfloat16": "bf16", "float16": "f16"}[half] if wanted == "half" else wanted
        assert y.dtype.name == name, number
        assert captured.dtype is y.dtype, number
        assert ml.all(captured == y), number


def test_a_product_is_that_of_the_cast_operands() -> None:
    with ml.autocast("bfloat16"):
        y = X @ W
    assert ml.all(y == ml.astype(X, ml.bfloat16) @ ml.astype(W, ml.bfloat16))


def test_every_op_that_names_a_precision_is_public_and_takes_halves() -> None:
    named = {name: op for name, op in OPS.items() if op.precision}
    assert {op.precision for op in named.values()} == {"half", "f32"}
    assert all(op.public for op in named.values())


def _loss(w: Tensor, x: Tensor) -> Tensor:
    y = ml.checkpoint(lambda y: ml.silu(y @ w))(ml.gelu(x @ w))
    with ml.autocast(None):
        z = y @ w  # in f32, there and back
    return ml.sum(z * z) + ml.sum(ml.square(_recurrent(x)))


def _by_hand(w: Tensor, x: Tensor) -> Tensor:
    """The same, with each cast written."""
    half = ml.bfloat16
    h = ml.gelu(ml.astype(x, half) @ ml.astype(w, half)) @ ml.astype(w, half)
    z = ml.silu(ml.astype(h, ml.float32)) @ w
    for _ in range(TURNS):
        x = x + ml.tanh(ml.astype(x, half) @ ml.astype(W, half))
    return ml.sum(z * z) + ml.sum(ml.square(x))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["called outside", "called inside"])
def test_a_gradient_goes_back_as_it_came(*, captured: bool, inside: bool) -> None:
    fn = ml.value_and_grad(_loss if inside else ml.autocast("bfloat16")(_loss), argnums=(0, 1))
    fn = ml.capture(fn) if captured else fn
    with ml.autocast("bfloat16") if inside else nullcontext():
        loss, grads = fn(W, X)
    wanted, others = ml.value_and_grad(_by_hand, argnums=(0, 1))(W, X)
    assert float(loss) == float(wanted)
    for g, other in zip(grads, others, strict=True):
        assert g.dtype is ml.float32
        assert np.array_equal(g.numpy(), other.numpy())


def test_a_captured_function_has_a_program_for_each_dtype() -> None:
    fn = ml.capture(lambda x: x @ W)
    made = []
    for dtype in (None, "bfloat16", None, "bfloat16", "float16", "bfloat16"):
        with ml.autocast(dtype):
            made.append(fn(X).dtype.name)
    assert made == ["f32", "bf16", "f32", "bf16", "f16", "bf16"]
    assert fn.signatures == 3


def test_blocks_nest_and_are_of_one_thread() -> None:
    def dtype() -> str:
        return (X @ W).dtype.name

    block = ml.autocast("bfloat16")
    with block, block:
        with ml.autocast("float16"), ml.autocast("bfloat16", enabled=False):
            assert dtype() == "f32"
        with pytest.raises(ZeroDivisionError), ml.autocast("float16"):
            raise ZeroDivisionError
        assert dtype() == "bf16"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(dtype).result() == "f32"
    assert dtype() == "f32"
    assert block(dtype)() == "bf16"


def test_another_dtype_is_refused() -> None:
    for wrong in ("cpu", "float32", ml.int8, 3):
        refuses(ml.errors.DTypeError, "autocast: products are computed in", ml.autocast, wrong)


def test_a_recursion_under_another_dtype_is_another_function() -> None:
    def halved(x: Tensor) -> Tensor:
        def deeper() -> Tensor:
            with ml.autocast("bfloat16"):
                return ml.astype(again(x / 2) @ W, ml.float32)

        y: Tensor = ml.cond(ml.max(x) < 1, lambda: ml.astype(x @ W, ml.float32), deeper)
        return y

    again = ml.function(halved)
    x = 3 * X
    assert ml.all(ml.capture(again)(x) == again(x))


def test_digits_are_learned_as_in_f32() -> None:
    found = {way: losses[-1] for way, losses in curves("mlp", 1, 5e-3)}
    assert found["f32"] not in (found["bf16"], found["autocast"])
    assert 1 < found["f32"] < 2
    assert found["bf16"] == pytest.approx(found["f32"], rel=0.01)
    assert found["autocast"] == pytest.approx(found["f32"], rel=0.01)
