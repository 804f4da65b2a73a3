"""Sizes, weights, inputs and reference results of each family of the suite `dynamic`.

Weights and inputs are noise, always the same, under names that all contenders read. A dense map is
x @ kernel + bias with a kernel [in, out]. `REFERENCES` compute by numpy alone, in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Weights = Mapping[str, Array]

EPS: Final = 1e-6  # of every layer norm


class LstmSize(NamedTuple):
    """Sentences of these lengths, one after the other, through an LSTM: its last state."""

    features: int
    hidden: int
    layers: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class TreeSize(NamedTuple):
    """Random binary trees with these numbers of words, through a Tree-LSTM: the root's state."""

    features: int
    hidden: int
    leaves: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.leaves)


class BertSize(NamedTuple):
    """Sentences of these lengths, through BERT's encoder: all its outputs."""

    layers: int
    width: int
    heads: int
    mlp: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class LstmTrainingSize(NamedTuple):
    """A training step of an LSTM that classifies sequences: its loss."""

    features: int
    hidden: int
    classes: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class TransformerSize(NamedTuple):
    """A training step of a decoder-only transformer that guesses the next byte: its loss."""

    layers: int
    width: int
    heads: int
    symbols: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class GenerationSize(NamedTuple):
    """Symbols that such a transformer makes, one by one, after a prompt."""

    layers: int
    width: int
    heads: int
    symbols: int
    prompt: int
    new_symbols: int

    @property
    def tokens(self) -> int:
        return self.new_symbols

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.prompt + self.new_symbols


Size = LstmSize | TreeSize | BertSize | LstmTrainingSize | TransformerSize | GenerationSize

SENTENCES: Final = (5, 8, 11, 15, 19, 24, 28, 33, 38, 44, 50)
CASES: Final[dict[str, Size]] = {
    "lstm 1 layer": LstmSize(300, 512, 1, SENTENCES),
    "lstm 2 layers": LstmSize(300, 512, 2, SENTENCES),
    "tree-lstm": TreeSize(300, 150, (5, 9, 14, 20, 27, 35, 42, 50)),
    "bert": BertSize(12, 768, 12, 3072, (8, 13, 24, 37, 64, 91, 128)),
    "lstm training": LstmTrainingSize(28, 64, 10, 28, 32),
    "transformer training": TransformerSize(4, 128, 4, 256, 64, 16),
    "generation": GenerationSize(4, 128, 4, 256, 16, 240),
}
QUICK: Final[dict[str, Size]] = {
    "lstm 1 layer": LstmSize(6, 8, 1, (5, 3, 9)),
    "lstm 2 layers": LstmSize(6, 8, 2, (5, 3, 9)),
    "tree-lstm": TreeSize(6, 5, (5, 2, 9)),
    "bert": BertSize(2, 16, 2, 32, (8, 5, 12)),
    "lstm training": LstmTrainingSize(6, 8, 3, 5, 4),
    "transformer training": TransformerSize(2, 16, 2, 11, 8, 3),
    "generation": GenerationSize(2, 16, 2, 11, 3, 9),
}
"""The same families, small enough for a test."""
TEMPERATURE: Final = 0.8
TOP_K: Final = 8
CHECKED: Final = 3  # inputs of a family
CHECKED_SYMBOLS: Final = 32


# --- weights and inputs --------------------------------------------------------------


def weights_of(size: Size) -> dict[str, Array]:
    """Return the weights that a model of that size begins with, f32 by name."""
    random = np.random.default_rng(0)
    weights: dict[str, Array] = {}

    def noise(name: str, *shape: int, scale: float) -> None:
        weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)

    def dense(name: str, inner: int, outer: int) -> None:
        noise(f"{name}/kernel", inner, outer, scale=inner**-0.5)
        noise(f"{name}/bias", outer, scale=0.1)

    def norm(name: str, width: int) -> None:
        noise(f"{name}/scale", width, scale=0.1)
        weights[f"{name}/scale"] += 1
        noise(f"{name}/bias", width, scale=0.1)

    def lstm(name: str, features: int, hidden: int) -> None:
        noise(f"{name}/input", features, 4 * hidden, scale=features**-0.5)
        noise(f"{name}/recurrent", hidden, 4 * hidden, scale=hidden**-0.5)
        noise(f"{name}/bias", 4 * hidden, scale=0.1)

    match size:
        case LstmSize():
            for i in range(size.layers):
                lstm(f"lstm_{i}", size.hidden if i else size.features, size.hidden)
        case TreeSize():
            dense("leaf", size.features, 3 * size.hidden)
            dense("node", 2 * size.hidden, 5 * size.hidden)
        case LstmTrainingSize():
            lstm("lstm_0", size.features, size.hidden)
            dense("head", size.hidden, size.classes)
        case BertSize() | TransformerSize() | GenerationSize():
            width = size.width
            if not isinstance(size, BertSize):
                noise("tokens", size.symbols, width, scale=1.0)
                noise("positions", size.length, width, scale=1.0)
                norm("norm", width)
                dense("head", width, size.symbols)
            mlp = size.mlp if isinstance(size, BertSize) else 4 * width
            for i in range(size.layers):
                for name in ("query", "key", "value", "out"):
                    dense(f"block_{i}/{name}", width, width)
                dense(f"block_{i}/mlp_0", width, mlp)
                dense(f"block_{i}/mlp_1", mlp, width)
                norm(f"block_{i}/norm_0", width)
                norm(f"block_{i}/norm_1", width)
    return weights


class Tree(NamedTuple):
    """A binary tree over the rows of `words` f32[leaves, features]: `nodes` i64[2 leaves - 1, 3]
    has a row (word, left, right) for each node, the root first; a leaf's children are -1, the word
    of an inner node 0."""

    words: Array
    nodes: Array


def inputs_of(size: Size) -> list[Any]:
    """Return the inputs of a family: sentences f32[length, features], trees, a batch and its
    labels, or a prompt."""
    random = np.random.default_rng(1)

    def noise(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32)

    match size:
        case LstmSize():
            return [noise(length, size.features) for length in size.lengths]
        case BertSize():
            return [noise(length, size.width) for length in size.lengths]
        case TreeSize():
            return [Tree(noise(n, size.features), random_tree(n, random)) for n in size.leaves]
        case LstmTrainingSize():
            labels = random.integers(size.classes, size=size.batch)
            return [(noise(size.batch, size.length, size.features), labels)]
        case TransformerSize():
            tokens = random.integers(size.symbols, size=(size.batch, size.length + 1))
            return [(tokens[:, :-1], tokens[:, 1:])]
        case GenerationSize():
            return [random.integers(size.symbols, size=size.prompt)]


def random_tree(leaves: int, random: np.random.Generator) -> Array:
    """Return the nodes of a tree whose words are split at a random place, and again on either
    side."""
    rows: list[list[int]] = []

    def add(first: int, last: int) -> int:
        here = len(rows)
        rows.append([first, -1, -1])
        if last - first > 1:
            middle = int(random.integers(first + 1, last))
            rows[here] = [0, add(first, middle), add(middle, last)]
        return here

    add(0, leaves)
    return np.array(rows, np.int64)


# --- reference results ---------------------------------------------------------------


def reference(size: Size) -> list[Array]:
    """Compute the results of the first inputs. These are the last state, the root's state, all
    outputs, the loss before the first step, or the first symbols of greedy generation."""
    weights = {name: values.astype(np.float64) for name, values in weights_of(size).items()}
    compute: Callable[[Any, Weights, Any], Array] = REFERENCES[type(size)]
    return [compute(size, weights, each) for each in inputs_of(size)[:CHECKED]]


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _dense(weights: Weights, name: str, x: Array) -> Array:
    y: Array = x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]
    return y


def _norm(weights: Weights, name: str, x: Array) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
    y: Array = x * weights[f"{name}/scale"] + weights[f"{name}/bias"]
    return y


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = powers / powers.sum(axis=-1, keepdims=True)
    return y


def _lstm(weights: Weights, name: str, xs: Array) -> Array:
    """Compute all states [T, ..., hidden] of inputs [T, ..., features], from zeros on. The gates
    are input, forget, new and output, in this order."""
    hidden = weights[f"{name}/recurrent"].shape[0]
    h = c = np.zeros((*xs.shape[1:-1], hidden))
    states = []
    for x in xs:
        gates = x @ weights[f"{name}/input"] + h @ weights[f"{name}/recurrent"]
        i, f, g, o = np.split(gates + weights[f"{name}/bias"], 4, axis=-1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        h = _sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states)


def _last_state(size: LstmSize, weights: Weights, xs: Array) -> Array:
    for i in range(size.layers):
        xs = _lstm(weights, f"lstm_{i}", xs)
    last: Array = xs[-1]
    return last


def _root(size: TreeSize, weights: Weights, tree: Tree) -> Array:
    """Compute the root's state. The gates are input, output and new at a leaf; input, forget left,
    forget right, output and new at an inner node (Tai et al., arXiv 1503.00075, eqs. 9 to 14)."""

    def state(node: int) -> tuple[Array, Array]:
        word, left, right = tree.nodes[node]
        if left < 0:
            i, o, u = np.split(_dense(weights, "leaf", tree.words[word]), 3)
            c = _sigmoid(i) * np.tanh(u)
        else:
            (h_left, c_left), (h_right, c_right) = state(left), state(right)
            gates = _dense(weights, "node", np.concatenate([h_left, h_right]))
            i, f_left, f_right, o, u = np.split(gates, 5)
            c = _sigmoid(i) * np.tanh(u) + _sigmoid(f_left) * c_left + _sigmoid(f_right) * c_right
        return _sigmoid(o) * np.tanh(c), c

    return state(0)[0]


def _attention(size: Any, weights: Weights, name: str, x: Array, causal: bool) -> Array:
    def heads(part: str) -> Array:
        y = _dense(weights, f"{name}/{part}", x)
        y = y.reshape(*y.shape[:-1], size.heads, size.width // size.heads)
        return y.swapaxes(-2, -3)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(size.width // size.heads)
    if causal:
        length = x.shape[-2]
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    mixed = (_softmax(scores) @ value).swapaxes(-2, -3).reshape(x.shape)
    return _dense(weights, f"{name}/out", mixed)


def _bert(size: BertSize, weights: Weights, x: Array) -> Array:
    """Norms come after the sums, the gelu is the exact one (Devlin et al., arXiv 1810.04805)."""
    for i in range(size.layers):
        block = f"block_{i}"
        x = _norm(weights, f"{block}/norm_0", x + _attention(size, weights, block, x, False))
        x = _norm(weights, f"{block}/norm_1", x + _mlp(weights, block, x, _gelu))
    return x


def _mlp(weights: Weights, name: str, x: Array, gelu: Callable[[Array], Array]) -> Array:
    return _dense(weights, f"{name}/mlp_1", gelu(_dense(weights, f"{name}/mlp_0", x)))


_erf: Final = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    y: Array = x / 2 * (1 + _erf(x / np.sqrt(2)))
    return y


def _gelu_tanh(x: Array) -> Array:
    """Apply the GELU of GPT-2."""
    y: Array = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def _logits(size: TransformerSize | GenerationSize, weights: Weights, tokens: Array) -> Array:
    """Norms come before attention and perceptron (Radford et al., GPT-2, 2019)."""
    x = weights["tokens"][tokens] + weights["positions"][: tokens.shape[-1]]
    for i in range(size.layers):
        block = f"block_{i}"
        x = x + _attention(size, weights, block, _norm(weights, f"{block}/norm_0", x), True)
        x = x + _mlp(weights, block, _norm(weights, f"{block}/norm_1", x), _gelu_tanh)
    return _dense(weights, "head", _norm(weights, "norm", x))


def _cross_entropy(logits: Array, labels: Array) -> Array:
    logits = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return np.asarray((np.log(np.exp(logits).sum(axis=-1)) - chosen).mean())


def _lstm_loss(size: LstmTrainingSize, weights: Weights, batch: Sequence[Array]) -> Array:
    sequences, labels = batch
    last = _lstm(weights, "lstm_0", sequences.swapaxes(0, 1))[-1]
    return _cross_entropy(_dense(weights, "head", last), labels)


def _transformer_loss(size: TransformerSize, weights: Weights, batch: Sequence[Array]) -> Array:
    tokens, labels = batch
    return _cross_entropy(_logits(size, weights, tokens), labels)


def _greedy(size: GenerationSize, weights: Weights, prompt: Array) -> Array:
    tokens = prompt
    for _ in range(min(size.new_symbols, CHECKED_SYMBOLS)):
        best = np.argmax(_logits(size, weights, tokens)[-1])
        tokens = np.append(tokens, best)
    return tokens[size.prompt :]


REFERENCES: Final[dict[type, Any]] = {
    LstmSize: _last_state,
    TreeSize: _root,
    BertSize: _bert,
    LstmTrainingSize: _lstm_loss,
    TransformerSize: _transformer_loss,
    GenerationSize: _greedy,
}
