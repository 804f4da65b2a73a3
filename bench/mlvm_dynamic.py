"""mlvm's side of the suite `dynamic`: one program for all inputs of a family, however long.

Inputs are padded to the longest, and a tensor says how long each one is.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from bench.dynamic_sizes import (
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
from bench.mlvm_training import loss_and_grads
from bench.sizes import LEARNING_RATE, MOMENTUM
from mlvm.eager import Tensor, nn
from models.bert import EncoderBlock
from models.transformer import Transformer, generate
from models.tree_lstm import TreeLstm

Array = NDArray[Any]
Outputs = list[Array]
Run = Callable[[], Outputs]

BUCKETS = tuple(range(8, 129, 8))  # lengths that BERT and trees have a branch for


class Family:
    """Function and inputs of a family, on a separate VM."""

    def __init__(self, size: Size, *, captured: bool, greedy: bool, fuse: bool) -> None:
        self.size = size
        self.vm = ml.VM("bench")
        self.weights = ml.Arena(self.vm, "weights")
        self.batch = ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            self.function, self.inputs, self.real = _prepared(size, greedy)
        self.captured = ml.capture(self.function, fuse=fuse) if captured else None

    def run(self) -> Outputs:
        """Compute the result of each input."""
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
    """Return a round's function for that size. `greedy` generation takes the likeliest symbols."""
    return Family(size, captured=captured, greedy=greedy, fuse=fuse).run


Prepared = tuple[Callable[..., Tensor], list[tuple[Any, ...]], list[Callable[[Array], Array]]]
"""A function, its arguments for each input, and what of its result is no padding."""


def _prepared(size: Size, greedy: bool) -> Prepared:
    inputs = inputs_of(size)
    arguments: list[tuple[Any, ...]]
    match size:
        case LstmSize():
            longest = max(size.lengths)
            arguments = [(ml.asarray(_padded(xs, longest)), ml.asarray(len(xs))) for xs in inputs]
            return Lstm(size), arguments, [_whole] * len(inputs)
        case TreeSize():
            most = max(size.leaves)
            padded = [
                (_padded(tree.words, most), len(tree.words), _padded(tree.nodes, 2 * most))
                for tree in inputs
            ]
            arguments = [tuple(map(ml.asarray, each)) for each in padded]
            return Trees(size), arguments, [_whole] * len(inputs)
        case BertSize():
            longest = max(size.lengths)
            arguments = [(ml.asarray(_padded(xs, longest)), ml.asarray(len(xs))) for xs in inputs]
            return Encoder(size, longest), arguments, [_first(length) for length in size.lengths]
        case LstmTrainingSize() | TransformerSize():
            model = LstmLast(size) if isinstance(size, LstmTrainingSize) else transformer_of(size)
            [batch] = inputs
            return Training(model), [tuple(map(ml.asarray, batch))], [_whole]
        case GenerationSize():
            return _generating(size, greedy=greedy)


def _padded(rows: Array, length: int) -> Array:
    """Pad rows with zeros to the given number."""
    return np.pad(rows, ((0, length - len(rows)), *[(0, 0)] * (rows.ndim - 1)))


def _whole(result: Array) -> Array:
    return result


def _first(length: int) -> Callable[[Array], Array]:
    return lambda result: result[:length]


def batched(size: TreeSize | LstmSize) -> Run:
    """Return a round's function that computes all inputs of a family as one batch."""
    vm = ml.VM("bench")
    weights, memory = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    make = _trees if isinstance(size, TreeSize) else _sentences
    with weights.allocating():
        fn, arguments = make(size)
        tensors = list(map(ml.asarray, arguments))
    captured = ml.capture(fn)

    def run() -> Outputs:
        with memory:
            return list(captured(*tensors).numpy())

    return run


Batched = tuple[Callable[[Tensor, Tensor], Tensor], list[Array]]
"""A function of all inputs at once, and its arguments."""


def _trees(size: Any) -> Batched:
    encoder, trees = tree_lstm_of(size), inputs_of(size)
    most, first = 2 * max(size.leaves), np.cumsum([0, *size.leaves])
    words = np.concatenate([tree.words for tree in trees])
    # The words of all trees are one list, in which a node finds its own by another number.
    nodes = [tree.nodes + np.array([k, 0, 0]) for tree, k in zip(trees, first, strict=False)]

    def roots(words: Tensor, trees: Tensor) -> Tensor:
        return encoder.at_roots(encoder.at_leaf(words), trees)[0]

    return roots, [words, np.stack([_padded(each, most) for each in nodes])]


def _sentences(size: Any) -> Batched:
    cell = cell_of(weights_of(size), 0, size.features, size.hidden)
    longest = max(size.lengths)

    def last(sentence: tuple[Tensor, Tensor]) -> Tensor:
        words, length = sentence

        def turn(state: Any, x: Tensor) -> tuple[Any, None]:
            return cell.step(cell.project(ml.expand_dims(x, axis=0)), state), None

        state: Any = ml.scan(turn, cell.initial_state(1), words, length)[0]
        h: Tensor = state[0][0]
        return h

    def lasts(words: Tensor, lengths: Tensor) -> Tensor:
        states: Tensor = ml.auto_batch(last)((words, lengths))
        return states

    return lasts, [
        np.stack([_padded(xs, longest) for xs in inputs_of(size)]),
        np.array(size.lengths),
    ]


# --- the models, with the weights of all contenders ------------------------------------


class Lstm(nn.Module):
    """Words f[longest, features], of which the first `length` count -> the last layer's state
    f[hidden]."""

    def __init__(self, size: LstmSize) -> None:
        weights = weights_of(size)
        self.lstm = nn.LSTM(size.features, size.hidden, num_layers=size.layers)
        layers = [_lstm_weights(weights, i, f"forward_{i}/") for i in range(size.layers)]
        self.lstm.load_parameters(ChainMap(*layers))

    def __call__(self, words: Tensor, length: Tensor) -> Tensor:
        _, (h, _) = self.lstm(ml.expand_dims(words, axis=1), lengths=ml.expand_dims(length, axis=0))
        last: Tensor = h[-1, 0]
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


class Trees(nn.Module):
    """Words f[longest, features], of which the first `length` count, and nodes i64[n,3] -> the
    root's state f[hidden]. The words are encoded in the smallest of the buckets that they fit
    into."""

    def __init__(self, size: TreeSize) -> None:
        self.encoder = tree_lstm_of(size)
        self.buckets = _buckets(max(size.leaves))

    def __call__(self, words: Tensor, length: Tensor, nodes: Tensor) -> Tensor:
        def bucket_state(bucket: int) -> Any:
            more = ((0, len(words) - bucket), (0, 0))
            return tuple(ml.pad(state, more) for state in self.encoder.at_leaf(words[:bucket]))

        root: Tensor = self.encoder.at_root(_bucketed(bucket_state, length, self.buckets), nodes)[0]
        return root


def _buckets(longest: int) -> list[int]:
    """Return the `BUCKETS` for at most `longest` words."""
    return [*(bucket for bucket in BUCKETS if bucket < longest), longest]


def _bucketed(run: Callable[[int], Any], length: Tensor, buckets: list[int]) -> Any:
    """Apply `run` to the smallest bucket that `length` words fit into."""
    index = sum(
        (ml.astype(length > bucket, ml.int64) for bucket in buckets[:-1]),
        ml.zeros((), dtype=ml.int64),
    )
    return ml.switch(index, [partial(run, bucket) for bucket in buckets])


class Encoder(nn.Module):
    """Words f[longest, width], of which the first `length` count -> f[longest, width]. They are
    encoded in the smallest of the `BUCKETS` that they fit into."""

    def __init__(self, size: BertSize, longest: int) -> None:
        weights = weights_of(size)
        self.block = [
            EncoderBlock(size.width, size.heads, size.mlp, key=ml.random.key(0))
            for _ in range(size.layers)
        ]
        for i, block in enumerate(self.block):
            _load_block(block, weights, i)
        self.buckets = _buckets(longest)

    def __call__(self, words: Tensor, length: Tensor) -> Tensor:
        def encoded(bucket: int) -> Tensor:
            x = ml.expand_dims(words[:bucket], axis=0)
            mask = ml.arange(bucket) < length
            for block in self.block:
                x = block(x, mask)
            return ml.pad(x[0], ((0, len(words) - bucket), (0, 0)))

        result: Tensor = _bucketed(encoded, length, self.buckets)
        return result


def _load_block(block: nn.Module, weights: Weights, i: int) -> None:
    """Give a block its weights; it has what belongs to attention below that name."""
    own = {}
    for name, values in weights.items():
        if name.startswith(f"block_{i}/"):
            _, part, kind = name.split("/")
            place = part if part.startswith(("mlp", "norm")) else f"attention/{part}"
            own[f"{place}/{kind}"] = values
    block.load_parameters(own)


def transformer_of(size: TransformerSize | GenerationSize) -> Transformer:
    weights = weights_of(size)
    model = Transformer(size.symbols, size.length, size.width, size.layers, size.heads)
    for i, block in enumerate(model.block):
        _load_block(block, weights, i)
    for part, name in ((model.norm, "norm"), (model.head, "head")):
        part.load_parameters({kind: weights[f"{name}/{kind}"] for kind in part.named_parameters()})
    model.tokens.load_parameters({"embedding": weights["tokens"]})
    model.positions.load_parameters({"embedding": weights["positions"]})
    return model


class LstmLast(nn.Module):
    """Sequences f[N, T, features] -> logits [N, classes], from the last state."""

    def __init__(self, size: LstmTrainingSize) -> None:
        weights = weights_of(size)
        self.lstm = nn.LSTM(size.features, size.hidden)
        self.lstm.load_parameters(_lstm_weights(weights, 0, "forward_0/"))
        self.head = nn.Linear(size.hidden, size.classes)
        self.head.load_parameters({kind: weights[f"head/{kind}"] for kind in ("kernel", "bias")})

    def __call__(self, xs: Tensor) -> Tensor:
        _, (h, _) = self.lstm(ml.permute_dims(xs, (1, 0, 2)))
        return self.head(h[-1])


# --- what is run -----------------------------------------------------------------------


class Training:
    """A step of SGD with momentum -> the loss before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = ml.optim.SGD(model, LEARNING_RATE, momentum=MOMENTUM)

    def __call__(self, samples: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        loss, grads = loss_and_grads(self.model, samples, labels)
        self.optimizer.update(grads)
        return loss


def _generating(size: GenerationSize, *, greedy: bool) -> Prepared:
    model = transformer_of(size)
    [prompt] = inputs_of(size)
    key, temperature = ml.random.key(0), ml.asarray(np.float32(TEMPERATURE))

    def symbols(prompt: Tensor, length: Tensor, end: Tensor) -> Tensor:
        return generate(
            model,
            prompt,
            length,
            key,
            temperature=temperature,
            end=end,
            top_k=1 if greedy else TOP_K,
        )[0]

    arguments = _padded(prompt, size.length), np.int64(size.prompt), np.int64(-1)
    return symbols, [tuple(map(ml.asarray, arguments))], [lambda tokens: tokens[size.prompt :]]
