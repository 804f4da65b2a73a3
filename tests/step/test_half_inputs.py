"""Row functions that read a half as it is, and where its f32 stays."""

from __future__ import annotations

from collections.abc import Callable

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.step import compile as compiling
from mlvm.step.flow import Call, Flow
from mlvm.step.half_inputs import in_halves
from tests.brief import Patch, cases
from tests.machines.native.planners import POOLS as _POOLS  # noqa: F401 (skips without them)

KEY = ml.random.key(0)
X, W = (ml.random.normal(shape, key=KEY) for shape in ((6, 8), (8, 8)))


def loss(model: ml.nn.Module, x: Tensor, *, also: bool) -> Tensor:
    """Of a LayerNorm of a half, whose f32 something else may read, too."""
    x = ml.astype(ml.gelu(x @ W), ml.float32)
    y = ml.sum(model(x) @ W)
    return y + ml.sum(x) if also else y


def gradients(model: ml.nn.Module, x: Tensor, *, also: bool) -> list[Tensor]:
    value, grads = ml.value_and_grad(loss, argnums=(0, 1))(model, x, also=also)
    return [value, grads[0]["scale"], grads[0]["bias"], grads[1]]


@cases("also", False, True)
@cases("half", "bfloat16", "float16")
def test_a_captured_layer_norm_reads_halves_with_the_bits_of_the_eager_one(
    half: str, also: bool
) -> None:
    model, captured = ml.nn.LayerNorm(8), ml.capture(gradients)
    with ml.autocast(half):
        for y, z in zip(gradients(model, X, also=also), captured(model, X, also=also), strict=True):
            assert y.dtype is z.dtype
            assert ml.array_equal(y, z)


def test_the_copy_in_f32_is_gone_unless_something_else_reads_it(monkeypatch: Patch) -> None:
    removed: list[int] = []

    def counted(flow: Flow) -> list[Call]:
        result = in_halves(flow)
        removed.append(len(flow.calls) - len(result))
        return result

    monkeypatch.setattr(compiling, "in_halves", counted)
    with ml.autocast("bfloat16"):
        for also, expected in ((False, 2), (True, 0)):
            ml.capture(gradients)(ml.nn.LayerNorm(8), X, also=also)
            assert max(removed) == expected  # the cast there, and that of the gradient
            removed.clear()


def test_a_half_beside_f32_is_widened_in_every_transformation() -> None:
    x, scale, bias = ml.astype(X, ml.bfloat16), W[0], W[1]

    def f(x: Tensor, scale: Tensor) -> Tensor:
        return ml.sum(ml.sin(ml.layer_norm(x, scale, bias, eps=1e-5)))

    def wide(x: Tensor, scale: Tensor) -> Tensor:
        return f(ml.astype(x, ml.float32), scale)

    wrappings: tuple[Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor], ...] = (
        lambda f: f(x, scale),
        lambda f: ml.grad(f)(x, scale),
        lambda f: ml.jvp(f, (x, scale), (x, scale))[1],
        lambda f: ml.vmap(lambda scale: f(x, scale))(W),
        lambda f: ml.grad(lambda x: ml.sum(ml.astype(ml.grad(f)(x, scale), ml.float32)))(x),
    )
    for through in wrappings:
        y, z = through(f), through(wide)
        assert y.dtype is z.dtype
        assert ml.array_equal(y, z)
