"""Mixed precision: what is cast, where, and that a gradient and a capture follow."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import Tensor
from tests.brief import refuses
from tests.precision import curves

KEY = ml.random.key(0)
X, W = (ml.random.normal(shape, key=KEY) for shape in ((4, 8), (8, 8)))
IMAGES, KERNEL = (ml.random.normal(shape, key=KEY) for shape in ((1, 6, 6, 2), (3, 3, 2, 5)))
HEADS = ml.random.normal((1, 2, 5, 4), key=KEY)
HALF, ROWS = ml.astype(X, ml.float16), X.tolist()
TURNS = 3


def _recurrent(x: Tensor) -> Tensor:
    return ml.scan(lambda c, _: (c + ml.tanh(c @ W), None), x, None, length=TURNS)[0]


CASES: list[tuple[str, Callable[[], Tensor]]] = [
    ("half", lambda: X @ W),
    ("half", lambda: ml.matmul(ROWS, W)),
    ("half", lambda: HALF @ W),
    ("half", lambda: ml.matmul(X, W, transpose_y=True)),
    ("half", lambda: ml.einsum("ij,kj->ik", X, W)),
    ("half", lambda: ml.tensordot(X, W, axes=1)),
    ("half", lambda: ml.vecdot(X, X)),
    ("half", lambda: ml.linalg.matrix_power(W, 2)),
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
    ("f32", lambda: HALF**2),
    ("f32", lambda: ml.square(HALF)),
    ("f32", lambda: ml.sqrt(ml.abs(HALF))),
    ("f32", lambda: 3**HALF),
    ("f32", lambda: 3.3 / HALF),
    ("f32", lambda: ml.reciprocal(HALF)),
    ("f32", lambda: ml.asin(ml.tanh(HALF))),
    ("f32", lambda: ml.erfinv(ml.tanh(HALF))),
    ("f32", lambda: ml.cumulative_prod(HALF, axis=0)),
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
    ("f16", lambda: HALF * HALF / HALF),
    ("f16", lambda: ml.silu(HALF)),
    ("f16", lambda: ml.softplus(HALF)),
    ("f16", lambda: ml.glu(HALF)),
    ("f16", lambda: ml.rotary_encoding(HALF)),
    ("f16", lambda: ml.lerp(HALF, HALF, 0.5)),
    ("f16", lambda: ml.einsum("ij,ij->ij", HALF, HALF)),
    ("f64", lambda: ml.astype(X, ml.float64) @ ml.astype(W, ml.float64)),
    ("i64", lambda: ml.ones((2, 2), dtype=ml.int64) @ ml.ones((2, 2), dtype=ml.int64)),
]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_are_of_halves_and_what_would_lose_of_f32(half: str) -> None:
    def compute() -> list[Tensor]:
        return [make() for _, make in CASES]

    with ml.autocast(half):
        eager = compute()
        captured = ml.capture(compute)() if half == "bfloat16" else eager
    named = {"half": {"bfloat16": "bf16", "float16": "f16"}[half]}
    for number, ((dtype_name, _), y, z) in enumerate(zip(CASES, eager, captured, strict=True)):
        assert y.dtype.name == named.get(dtype_name, dtype_name), number
        assert z.dtype is y.dtype, number
        assert ml.array_equal(z, y, equal_nan=True), number


def test_solutions_of_f32_are_computed_in_f32() -> None:
    factors = ml.linalg.lu_factor(W)
    for solve in (lambda: ml.linalg.lstsq(W, X.mT), lambda: [ml.linalg.lu_solve(factors, X.mT)]):
        expected = [each.tolist() for each in solve()]
        with ml.autocast("float16"):
            assert [each.tolist() for each in solve()] == expected


def _loss(w: Tensor, x: Tensor) -> Tensor:
    y = ml.checkpoint(lambda y: ml.silu(y @ w))(ml.gelu(x @ w))
    with ml.autocast(None):
        z = y @ w  # in f32, there and back
    return ml.sum(z * z) + ml.sum(ml.square(_recurrent(x)))


def _by_hand(w: Tensor, x: Tensor) -> Tensor:
    """The same, with each cast written."""
    half = ml.bfloat16
    h = ml.gelu(ml.astype(x, half) @ ml.astype(w, half)) @ ml.astype(w, half)
    z = ml.astype(ml.silu(h), ml.float32) @ w
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
    value, others = ml.value_and_grad(_by_hand, argnums=(0, 1))(W, X)
    assert float(loss) == float(value)
    for g, other in zip(grads, others, strict=True):
        assert g.dtype is ml.float32
        assert np.array_equal(g.numpy(), other.numpy())


def test_a_captured_function_has_a_program_for_each_dtype() -> None:
    fn = ml.capture(lambda x: x @ W)
    dtypes = []
    for dtype in (None, "bfloat16", None, "bfloat16", "float16", "bfloat16"):
        with ml.autocast(dtype):
            dtypes.append(fn(X).dtype.name)
    assert dtypes == ["f32", "bf16", "f32", "bf16", "f16", "bf16"]
    assert fn.signatures == 3


def _dtype() -> str:
    return (X @ W).dtype.name


def test_blocks_nest_and_are_of_one_thread() -> None:
    block = ml.autocast("bfloat16")
    with block, block:
        with ml.autocast("float16"), ml.autocast("bfloat16", enabled=False):
            assert _dtype() == "f32"
        with pytest.raises(ZeroDivisionError), ml.autocast("float16"):
            raise ZeroDivisionError
        assert _dtype() == "bf16"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(_dtype).result() == "f32"
    assert _dtype() == "f32"
    assert block(_dtype)() == "bf16"


def test_a_decorated_generator_is_in_its_block_and_its_reader_is_not() -> None:
    @ml.autocast("bfloat16")
    def turns(ends: list[str]) -> Generator[str, int, None]:
        try:
            sent = yield _dtype()
            yield f"{sent} {_dtype()}"
        except ValueError:
            yield f"thrown {_dtype()}"
        finally:
            ends.append(_dtype())

    @ml.default_dtype("f64")
    def zeros() -> Generator[Tensor]:
        while True:
            yield ml.zeros(1)

    double = zeros()
    assert [next(double).dtype, ml.zeros(1).dtype, next(double).dtype] == ["f64", "f32", "f64"]
    ends: list[str] = []
    sending, throwing, closing = turns(ends), turns(ends), turns(ends)
    assert [next(sending), _dtype(), sending.send(1), _dtype()] == ["bf16", "f32", "1 bf16", "f32"]
    assert next(throwing) == "bf16"
    assert [throwing.throw(ValueError()), _dtype()] == ["thrown bf16", "f32"]
    assert next(closing) == "bf16"
    closing.close()
    assert [_dtype(), *sending] == ["f32"]
    assert ends == ["bf16", "bf16"]


def test_a_decorated_coroutine_is_in_its_block() -> None:
    @ml.autocast("bfloat16")
    async def inside() -> str:
        await asyncio.sleep(0)
        return _dtype()

    async def outside() -> str:
        return _dtype()

    async def both() -> list[str]:
        return list(await asyncio.gather(inside(), outside()))

    assert asyncio.run(both()) == ["bf16", "f32"]


def test_what_it_cannot_decorate_is_refused() -> None:
    async def endless() -> AsyncIterator[None]:
        yield

    for wrong, text in ((ml.nn.Linear, "got a class: decorate its __call__"), (endless, "endless")):
        refuses(ml.errors.ArgumentError, text, ml.autocast("bfloat16"), wrong)


def test_members_of_a_group_are_in_the_block_of_their_caller() -> None:
    def product_dtype(rank: int, vm: ml.VM) -> str:
        return (ml.ones((2, 2)) @ ml.ones((2, 2))).dtype.name

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(lambda vm: lambda x: product_dtype(0, vm), group)
        x = np.ones((2, 3), np.float32)
        with ml.autocast("bfloat16"):
            dtypes = *group.run(product_dtype), step(x)
        assert dtypes == ("bf16", "bf16", "bf16")
        assert (*group.run(product_dtype), step(x)) == ("f32", "f32", "f32")


def test_a_state_that_autocast_makes_a_half_is_refused_with_what_to_write() -> None:
    text = r"products are bf16 under autocast: write ml.astype\(x, ml.float32\)"
    x = W[0]
    with ml.autocast("bfloat16"):
        refuses(ml.errors.DTypeError, text, ml.scan, lambda c, _: (c @ W, c), x, None, 2)
        refuses(ml.errors.DTypeError, text, ml.while_loop, lambda c: c[0] < 9, lambda c: c @ W, x)
        branches = ml.capture(lambda p: ml.cond(p, lambda: x, lambda: x @ W))
        refuses(ml.errors.DTypeError, text, branches, ml.asarray(True))


def test_a_device_is_none_of_its_arguments() -> None:
    untyped: Any = ml.autocast
    message = re.escape('autocast(): takes a dtype, and is for any device: ml.autocast("bfloat16")')
    refuses(TypeError, message, lambda: untyped("cuda", dtype=ml.bfloat16))
    refuses(TypeError, message, lambda: untyped(device_type="cuda", dtype=ml.bfloat16))


def test_a_recursion_under_another_dtype_is_another_function() -> None:
    def halved(x: Tensor) -> Tensor:
        def deeper() -> Tensor:
            with ml.autocast("bfloat16"):
                return ml.astype(again(x / 2) @ W, ml.float32)

        return ml.cond(ml.max(x) < 1, lambda: ml.astype(x @ W, ml.float32), deeper)

    again = ml.subroutine(halved)
    x = 3 * X
    assert ml.all(ml.capture(again)(x) == again(x))


def test_digits_are_learned_as_in_f32() -> None:
    final_losses = {precision: losses[-1] for precision, losses in curves("mlp", 1, 5e-3)}
    assert final_losses["f32"] not in (final_losses["bf16"], final_losses["autocast"])
    assert 1 < final_losses["f32"] < 2
    assert final_losses["bf16"] == pytest.approx(final_losses["f32"], rel=0.01)
    assert final_losses["autocast"] == pytest.approx(final_losses["f32"], rel=0.01)
