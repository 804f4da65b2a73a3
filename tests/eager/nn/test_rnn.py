"""Recurrent layers, beside loops in numpy and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from mlvm.eager.nn.rnn import step_by_step
from mlvm.machines.native import extension
from tests.eager.nn.checks import check, f64, normal, randomized
from tests.trees import arrays, assert_close

CELLS: dict[str, Any] = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
LAYERS: dict[str, Any] = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
KINDS = pytest.mark.parametrize("kind", CELLS)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def stepped(kind: str, w: dict[str, Array], x: Array, state: list[Array]) -> list[Array]:
    """A step in numpy, from the documentation of PyTorch."""
    p, q = x @ w["input_kernel"] + w["bias"], state[0] @ w["hidden_kernel"]
    if kind == "RNN":
        return [np.tanh(p + q)]
    if kind == "LSTM":
        i, f, g, o = np.split(p + q, 4, axis=-1)
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    (p_r, p_z, p_n), (q_r, q_z, q_n) = np.split(p, 3, axis=-1), np.split(q, 3, axis=-1)
    r, z = sigmoid(p_r + q_r), sigmoid(p_z + q_z)
    n = np.tanh(p_n + r * (q_n + w["hidden_bias"]))
    return [(1 - z) * n + z * state[0]]


def as_state(arrays: list[Array]) -> Any:
    tensors = tuple(map(ml.asarray, arrays))
    return tensors if len(tensors) > 1 else tensors[0]


@KINDS
def test_a_cell(kind: str) -> None:
    cell = CELLS[kind](3, 4, dtype="f64")
    w, x = randomized(cell), normal(2, 3)
    state = [normal(2, 4) for _ in range(cell.STATES)]
    expected = stepped(kind, w, x, state)
    assert_close(cell(ml.asarray(x), as_state(state)), expected, 1e-11)
    zeros = [np.zeros((2, 4))] * cell.STATES
    np.testing.assert_allclose(arrays(cell(ml.asarray(x))), stepped(kind, w, x, zeros), rtol=1e-11)
    check(lambda cell, *args: cell(*args), cell, ml.asarray(x), as_state(state))


@KINDS
def test_a_layer_is_its_cell_step_by_step_and_lengths_end_it(kind: str) -> None:
    layer = LAYERS[kind](3, 4, bidirectional=True, dtype="f64")
    w, x, lengths = randomized(layer), normal(5, 3, 3), [5, 2, 0]
    count = layer.forward[0].STATES
    begin = [normal(2, 3, 4) for _ in range(count)]
    y, end = layer(ml.asarray(x), as_state(begin), lengths=ml.asarray(lengths))
    expected, last = np.zeros((5, 3, 8)), [part.copy() for part in begin]
    for b, length in enumerate(lengths):
        for direction, name in enumerate(("forward_0", "backward_0")):
            weights = {key.split("/")[1]: v for key, v in w.items() if key.startswith(name)}
            state = [part[direction, b : b + 1] for part in begin]
            for t in range(length)[:: 1 - 2 * direction]:
                state = stepped(kind, weights, x[t, b : b + 1], state)
                expected[t, b, 4 * direction : 4 * direction + 4] = state[0][0]
            for part, value in zip(last, state, strict=True):
                part[direction, b] = value[0]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(arrays(end), last, rtol=1e-10)


@KINDS
def test_a_second_layer_reads_the_outputs_of_the_first(kind: str) -> None:
    both = LAYERS[kind](3, 4, num_layers=2, bidirectional=True, dtype="f64")
    layers = [LAYERS[kind](n, 4, bidirectional=True, dtype="f64") for n in (3, 8)]
    w, x, lengths = randomized(both), ml.asarray(normal(5, 3, 3)), ml.asarray([5, 3, 1])
    expected, ends = x, []
    for i, layer in enumerate(layers):
        layer.load_parameters(
            {k.replace(f"_{i}/", "_0/"): v for k, v in w.items() if f"_{i}/" in k}
        )
        expected, end = layer(expected, lengths=lengths)
        ends.append(arrays(end))
    y, end = both(x, lengths=lengths)
    np.testing.assert_array_equal(y.numpy(), expected.numpy())
    for part, of_layers in zip(arrays(end), zip(*ends, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.concatenate(of_layers))


@KINDS
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_have_gradients(kind: str, bidirectional: bool) -> None:
    hidden = 1 if bidirectional else 2  # each weight takes two calls
    layer = LAYERS[kind](2, hidden, num_layers=2, bidirectional=bidirectional, dtype="f64")
    lengths = ml.asarray([2, 1])
    check(lambda layer, x: layer(x, lengths=lengths), layer, f64(2, 2, 2))


def test_kernels_are_drawn_with_the_key_and_are_all_that_a_layer_has() -> None:
    layer = nn.LSTM(100, 64, num_layers=2, key=ml.random.key(1))
    shapes = {path: x.shape for path, x in layer.named_parameters().items()}
    assert shapes == {
        "forward_0/input_kernel": (100, 256),
        "forward_0/hidden_kernel": (64, 256),
        "forward_0/bias": (256,),
        "forward_1/input_kernel": (64, 256),
        "forward_1/hidden_kernel": (64, 256),
        "forward_1/bias": (256,),
    }
    again = nn.LSTM(100, 64, num_layers=2, key=ml.random.key(1)).named_parameters()
    drawn = {path: x.numpy() for path, x in layer.named_parameters().items()}
    for path, x in drawn.items():
        np.testing.assert_array_equal(x, again[path].numpy())
        if "kernel" in path:
            assert x.dtype == np.float32
            assert 0.12 < abs(x).max() <= 1 / 8
            assert abs(x.var() * 64 * 3 - 1) < 0.05
        else:
            assert not x.any()
    kernels = [x for path, x in drawn.items() if "hidden_kernel" in path]
    assert (kernels[0] != kernels[1]).any()


def test_an_activation_of_ones_own() -> None:
    layer = nn.RNN(2, 3, activation=ml.relu, dtype="f64")
    w, x = randomized(layer), normal(1, 4, 2)
    expected = np.maximum(x[0] @ w["forward_0/input_kernel"] + w["forward_0/bias"], 0)
    np.testing.assert_allclose(layer(ml.asarray(x))[0].numpy()[0], expected, rtol=1e-12)
    assert "activation=relu" in repr(layer)


def test_outputs_between_layers_are_dropped_while_training() -> None:
    layer = nn.GRU(2, 8, num_layers=2, dropout=0.5)
    x = ml.ones((4, 3, 2))
    assert (layer(x)[0].numpy() != layer(x)[0].numpy()).any()
    layer.eval()
    np.testing.assert_array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())


def test_lengths_are_an_argument_of_a_captured_layer() -> None:
    """Of more steps than are projected at once, and of none."""
    layer = nn.LSTM(2, 3, dtype="f64")
    step, x = ml.capture(lambda x, lengths: layer(x, lengths=lengths)), f64(11, 2, 2)
    whole = layer(x)[0].numpy()
    for lengths in ([4, 1], [2, 11], [0, 0], [-1, 8], [9, 99]):
        length_tensor = ml.asarray(lengths)
        eager = arrays(layer(x, lengths=length_tensor))
        assert_close(step(x, length_tensor), eager, 1e-12)
        counts = np.arange(11)[:, None, None] < np.array(lengths)[:, None]
        np.testing.assert_allclose(eager[0], np.where(counts, whole, 0), rtol=1e-12)
    assert "1 program>" in repr(step)


def test_steps_behind_the_longest_sequence_are_not_made() -> None:
    """They may be anything: here they are nan."""
    layer = nn.GRU(2, 3, bidirectional=True, dtype="f64")
    x = normal(20, 2, 2)
    expected = arrays(layer(ml.asarray(x[:5]), lengths=ml.asarray([5, 2])))
    x[5:] = np.nan
    results = arrays(layer(ml.asarray(x), lengths=ml.asarray([5, 2])))
    np.testing.assert_allclose(results[0][:5], expected[0], rtol=1e-12)
    np.testing.assert_allclose(results[1], expected[1], rtol=1e-12)
    assert not results[0][5:].any()


@KINDS
def test_one_call_has_the_bits_of_the_loop_and_of_two_threads(kind: str) -> None:
    """The hidden size is one for which threads meet after each step."""
    original, x = LAYERS[kind](4, 384, bidirectional=True), normal(5, 1, 4).astype("f")
    weights = {path: each.numpy() for path, each in original.named_parameters().items()}
    outputs = []
    most = 2 if extension.EXTENSION is not None else 1
    for threads, loop in ((1, False), (1, True), (most, False)):
        token = step_by_step.set(loop)
        try:
            vm = ml.VM("bits", threads=threads, native=extension.EXTENSION is not None)
            with ml.Arena(vm, "bits"):
                layer = LAYERS[kind](4, 384, bidirectional=True)
                layer.load_parameters(weights)
                y, _ = layer(ml.asarray(x), lengths=ml.asarray([4]))
                outputs.append(y.numpy().tobytes())
        finally:
            step_by_step.reset(token)
    assert len(set(outputs)) == 1


@pytest.mark.skipif(extension.EXTENSION is None, reason="h is rounded to the kernel's dtype there")
@pytest.mark.parametrize("hidden", [3, 9, 17, 40, 384])
def test_a_kernel_of_bf16_is_read_as_it_is(hidden: int) -> None:
    """The bits are those of the same kernel in f32, for one thread and where two share a step."""
    x = normal(3, 2, 4).astype("f")
    original = ml.nn.LSTM(4, hidden)
    kernel = ml.astype(original.forward[0].hidden_kernel, ml.bfloat16)
    weights = {path: each.numpy() for path, each in original.named_parameters().items()}
    narrow = kernel.numpy()
    outputs = []
    for dtype, threads in ((ml.float32, 1), (ml.bfloat16, 1), (ml.bfloat16, 2)):
        with ml.Arena(ml.VM("bits", threads=threads, native=True), "bits"):
            layer = ml.nn.LSTM(4, hidden)
            layer.load_parameters(weights)
            layer.forward[0].hidden_kernel = ml.astype(ml.asarray(narrow, dtype=ml.bfloat16), dtype)
            outputs.append(layer(ml.asarray(x))[0].numpy().tobytes())
    assert len(set(outputs)) == 1
