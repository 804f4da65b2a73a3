"""Pickles: they hold what they were made of, and name nothing but what is public."""

from __future__ import annotations

import copy
import pickle
import pickletools
import re
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import nn


def names_in(content: bytes) -> set[str]:
    """The names of mlvm that a pickle has."""
    texts = {each for _, each, _ in pickletools.genops(content) if isinstance(each, str)}
    return {word for each in texts for word in each.split() if re.match(r"mlvm\b", word)}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", [ml.float32, ml.bfloat16, ml.bool, ml.complex128])
def test_a_tensor_is_pickled_by_a_public_name(protocol: int, dtype: Any) -> None:
    x = ml.asarray([[0.0, 1.0, 1.0]]).astype(dtype)
    content = pickle.dumps(x, protocol)
    assert names_in(content) == {"mlvm.eager:asarray"}
    again = pickle.loads(content)
    assert again.type is x.type
    np.testing.assert_array_equal(again.numpy(), x.numpy())


def test_modules_of_ours_are_pickled_by_public_names() -> None:
    layers = [nn.Linear(2, 3), ml.gelu, nn.LSTM(3, 3), nn.MultiHeadAttention(4, 2), nn.BatchNorm(2)]
    model = nn.Sequential(*layers, *[nn.buffer(nn.GELU()), ml.relu])  # type: ignore[arg-type]
    content = pickle.dumps(model)
    assert names_in(content) == {
        *("mlvm.eager:asarray", "mlvm.eager:gelu", "mlvm.eager:relu"),
        *(f"mlvm.eager.nn:{name}" for name in ("Sequential", "Linear", "LSTM", "LSTMCell", "GELU")),
        *(f"mlvm.eager.nn:{name}" for name in ("MultiHeadAttention", "Dropout", "BatchNorm")),
    }
    again = pickle.loads(content)
    assert again[1] is ml.gelu
    assert type(again[2]) is nn.LSTM
    assert repr(again) == repr(model)


class Remembering(nn.Module):
    """Its memory is no part of its pickle."""

    def __init__(self) -> None:
        self.weight = ml.ones(2)
        self.steps: list[Any] = [ml.relu, 1]
        self.same = self.steps
        self.memory = {"x": 3}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "memory": {}}


def test_a_module_says_what_its_state_is() -> None:
    again = pickle.loads(pickle.dumps(Remembering()))
    assert (again.memory, again.steps) == ({}, [ml.relu, 1])
    first = Remembering()
    first.steps[0] = len
    again = pickle.loads(pickle.dumps(first))
    assert again.same is again.steps


def test_an_optimizer_is_copied_and_pickled_with_its_model() -> None:
    model = nn.Linear(2, 3)
    optimizer = ml.optim.AdamW(model, 0.1, groups=[("bias", {"weight_decay": 0.5})])

    def step(model: nn.Linear, optimizer: ml.optim.Optimizer) -> np.ndarray[Any, Any]:
        optimizer.update(ml.grad(lambda m: ml.sum(ml.square(m(ml.ones((1, 2))))))(model))
        return model.kernel.numpy()

    step(model, optimizer)
    both = model, optimizer
    for twin, other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert repr(other) == repr(optimizer)
        assert other.groups[0].weight_decay == 0.5
        before = twin.kernel.numpy()
        np.testing.assert_array_equal(before, model.kernel.numpy())
        assert (step(twin, other) != before).any()
    losses = [step(*copy.deepcopy(both)), step(*pickle.loads(pickle.dumps(both))), step(*both)]
    np.testing.assert_array_equal(losses[0], losses[2])
    np.testing.assert_array_equal(losses[1], losses[2])
