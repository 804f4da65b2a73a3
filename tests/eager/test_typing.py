"""A strict type checker accepts a user's program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.brief import ROOT, run_python

pytestmark = pytest.mark.local(reason="types are checked, and nothing runs")


PROGRAM: Final = """
from typing import Any

import mlvm.eager as ml
from mlvm.eager import nn


class Mlp(nn.Module):
    def __init__(self, key: ml.Tensor) -> None:
        first, second = ml.random.split(key)
        self.layers = [nn.Linear(2, 8, key=first), nn.Linear(8, 3, key=second)]

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.layers[1](ml.relu(self.layers[0](x)))


model = Mlp(ml.random.key(0))
model.layers[0] = nn.buffer(model.layers[0])
optimizer = ml.optim.AdamW(model, ml.optim.cosine(1e-3, total_steps=10), where="layers_1")


def loss_of(model: Mlp, x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
    return ml.softmax_cross_entropy(model(x), y, reduction="mean")


def with_logits(model: Mlp, x: ml.Tensor, y: ml.Tensor) -> tuple[ml.Tensor, list[ml.Tensor]]:
    logits = model(x)
    return ml.softmax_cross_entropy(logits, y, reduction="mean"), [logits]


@ml.capture
def step(x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
    loss, grads = ml.value_and_grad(loss_of, where=lambda path, x: x.ndim > 1)(model, x, y)
    optimizer.update(ml.optim.clip_by_global_norm(grads, 1.0))
    return loss


def step_with_aux(x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
    (loss, aux), grads = ml.value_and_grad(with_logits, has_aux=True)(model, x, y)
    optimizer.update(grads)
    grads, same = ml.grad(with_logits, has_aux=True)(model, x, y)
    (loss, aux), grads = ml.parallel.value_and_grad(with_logits, has_aux=True)(model, x, y)
    return loss + ml.sum(aux[0] + same[0])


def square(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(x * x)


training: dict[str, Any] = {"model": model.freeze("layers_0"), "optimizer": optimizer, "step": 1}
ml.save("training", training, where="model")
training["step"] = ml.load("training", into=training)["step"] + 1
layers = nn.Sequential(nn.Linear(2, 3), ml.gelu)
layers[1] = ml.relu
x = ml.ones(1)

reveal_type(ml.value_and_grad(square)(ml.ones(3)))  # tuple[Tensor, Any]
reveal_type(ml.value_and_grad(lambda x: ml.sum(x * x))(ml.ones(3)))  # tuple[Tensor, Any]
reveal_type(ml.grad(loss_of))  # def (model: Mlp, x: Tensor, y: Tensor) -> Any
reveal_type(ml.grad(with_logits, has_aux=True)(model, x, x))  # tuple[Any, list[Tensor]]
reveal_type(step(ml.ones((1, 2)), ml.asarray([1])))  # Tensor
reveal_type(ml.load("x", into=model))  # Mlp
reveal_type(ml.load("x"))  # Loaded
reveal_type(layers[1:])  # Sequential
reveal_type(ml.grad(ml.grad(square))(ml.ones(3)))  # Any

ml.value_and_grad(loss_of)(model, 3, ml.ones(1))  # error: arg-type
ml.value_and_grad(loss_of)(model, ml.ones(1))  # error: call-arg
ml.value_and_grad(with_logits)(model, ml.ones(1), ml.ones(1))  # error: arg-type
ml.value_and_grad(loss_of, has_aux=True)(model, ml.ones(1), ml.ones(1))  # error: call-overload
"""


def test_a_strict_type_checker_accepts_the_canonical_step(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    if not (ROOT / "mlvm" / "eager" / "names.pyi").exists():
        pytest.skip("the stubs are written where the package is installed in place")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    options = ["--strict", "--cache-dir", str(tmp_path / "cache"), str(file)]
    run = run_python("-m", "mypy", *options, timeout=600)
    assert not run.stderr, run.stderr
    messages: dict[int, str] = {}
    for line in run.stdout.splitlines():
        if match := re.match(r".*?program\.py:(\d+): (.*)", line):
            text = re.sub(r"\b(mlvm|program)[\w.]*\.(?=[A-Z])", "", match[2])
            text = re.sub(r'note: Revealed type is "(.*)"', r"\1", text)
            text = re.sub(r"error: .*\[([\w-]+)\]$", r"error: \1", text)
            messages.setdefault(int(match[1]), text)  # notes follow an error
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "  # " in line
    }
    assert messages == expected
