"""mlvm's side of the suite `dynamic`: one program for all inputs of a family, whatever their length.

Inputs are padded to the longest, and a tensor says how long each one is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from bench.dynamic_sizes import (
    EPS,
    TEMPERATURE,
    TOP_K,
    BertSize,
    GenerationSize,
    LstmSize,
    LstmTrainingSize,
    Size,
    TransformerSize,
    TreeSize,
    Weights,
    inputs_of,
    weights_of,
)
from bench.sizes import LEARNING_RATE, MOMENTUM
from mlvm.eager import Tensor, nn
from models.tree_lstm import TreeLstm

Array = NDArray[Any]
Outputs = list[Array]
Run = Callable[[], Outputs]

BLOCK = 8  # words whose part of an LSTM's gates is one product
BUCKETS = (8, 16, 32, 48, 64, 96, 128)  # lengths that BERT has a branch for


class Family:
    """Inputs that one function takes, on a VM of its own."""

    def __init__(self, size: Size, *, captured: bool, greedy: bool, fuse: bool) -> None:
        self.size = size
        self.vm = ml.VM("bench")
        self.weights = ml.Arena(self.vm, "weights")
        self.batch = ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            self.function, self.inputs, self.real = _prepared(size, greedy)
        self.captured = ml.capture(self.function, fuse=fuse) if captured else None

    def run(self) -> Outputs:
        """What comes out of each input."""
        call = self.captured or self.function
        outputs = []
        for arguments, real in zip(self.inputs, self.real, strict=True):
            with self.batch:
                output = call(*arguments).numpy()
            outputs.append(real(output))
        if self.captured is not None and self.captured.signatures != 1:
            raise ValueError(f"{self.captured.signatures} programs where one is to serve all")
        return outputs


def running(size: Size, *, captured: bool, greedy: bool = False, fuse: bool = True) -> Run:
    """What a round of that size runs. `greedy` generation takes the likeliest symbols."""
    return Family(size, captured=captured, greedy=greedy, fuse=fuse).run


Prepared = tuple[Callable[..., Tensor], list[tuple[Any, ...]], list[Callable[[Array], Array]]]
"""A function, its arguments for each input, and what of its result is no padding."""


def _prepared(size: Size, greedy: bool) -> Prepared:
    inputs = inputs_of(size)
    match size:
        case LstmSize():
            longest = -(-max(size.lengths) // BLOCK) * BLOCK
            sentences = [
                _padded(xs, longest).reshape(-1, BLOCK, size.features) for xs in inputs
            ]
            arguments = [
                (ml.asarray(xs), ml.asarray(length))
                for xs, length in zip(sentences, size.lengths, strict=True)
            ]
            return Lstm(size), arguments, [_whole] * len(inputs)
        case TreeSize():
            most = max(size.leaves)
            arguments = [
                (ml.asarray(_padded(tree.words, most)), ml.asarray(_padded(tree.nodes, 2 * most)))
                for tree in inputs
            ]
            encoder = tree_lstm_of(size)
            return lambda *tree: encoder(*tree)[0], arguments, [_whole] * len(inputs)
        case BertSize():
            longest = max(size.lengths)
            arguments = [
                (ml.asarray(_padded(xs, longest)), ml.asarray(len(xs))) for xs in inputs
            ]
            return Encoder(size, longest), arguments, [_first(length) for length in size.lengths]
        case LstmTrainingSize() | TransformerSize():
            model = lstm_of(size) if isinstance(size, LstmTrainingSize) else transformer_of(size)
            [batch] = inputs
            return Training(model), [tuple(map(ml.asarray, batch))], [_whole]
        case GenerationSize():
            return _generating(size, greedy=greedy)


def _padded(rows: Array, length: int) -> Array:
    """The rows, and zeros to make them so many."""
    return np.pad(rows, ((0, length - len(rows)), *[(0, 0)] * (rows.ndim - 1)))


def _whole(result: Array) -> Array:
    return result


def _first(length: int) -> Callable[[Array], Array]:
    return lambda result: result[:length]


# --- the models, with the weights of all contenders ------------------------------------


class Lstm(nn.Module):
    """Words f[blocks, BLOCK, features], of which so many count -> the last layer's state
    f[hidden]."""

    def __init__(self, size: LstmSize) -> None:
        weights = weights_of(size)
        self.cell = [
            cell_of(weights, i, size.hidden if i else size.features, size.hidden)
            for i in range(size.layers)
        ]

    def __call__(self, words: Tensor, length: Tensor) -> Tensor:
        def block(k: Tensor, states: list[Any]) -> list[Any]:
            rows, count = words[k], ml.minimum(length - k * BLOCK, BLOCK)
            after = []
            for cell, state in zip(self.cell, states, strict=True):

                def turn(state: Any, x: Tensor, cell: Any = cell) -> tuple[Any, Tensor]:
                    state = cell.step(x, state)
                    return state, state[0][0]

                projected = ml.expand_dims(cell.project(rows), axis=1)
                state, rows = ml.scan(turn, state, projected, count)
                after.append(state)
            return after

        states = [cell.initial_state(1) for cell in self.cell]
        states = ml.fori_loop(0, (length + BLOCK - 1) // BLOCK, block, states)
        last: Tensor = states[-1][0][0]
        return last


def cell_of(weights: Weights, i: int, features: int, hidden: int) -> nn.LSTMCell:
    cell = nn.LSTMCell(features, hidden)
    cell.load_parameters(_lstm_weights(weights, i))
    return cell


def _lstm_weights(weights: Weights, i: int, prefix: str = "") -> dict[str, Array]:
    names = {"input_kernel": "input", "hidden_kernel": "recurrent", "bias": "bias"}
    return {f"{prefix}{ours}": weights[f"lstm_{i}/{name}"] for ours, name in names.items()}


def tree_lstm_of(size: TreeSize) -> TreeLstm:
    model = TreeLstm(size.features, size.hidden)
    model.load_parameters(weights_of(size))
    return model
