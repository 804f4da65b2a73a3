"""PyTorch's side of the suite `dynamic`: the same networks, as its users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

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

Array = NDArray[Any]
Outputs = list[Array]
Run = Callable[[], Outputs]
"""Computes what comes out of each input, one after the other."""


def running(
    size: Size, *, greedy: bool = False, compiled: bool = False, cells: bool = False
) -> Run:
    """Return a round's function for that size. `greedy` generation takes the likeliest symbols.
    With `cells` an LSTM is a loop over `nn.LSTMCell`."""
    torch.manual_seed(0)
    match size:
        case LstmSize():
            return _lstm(size, compiled=compiled, cells=cells or compiled)
        case TreeSize():
            return _tree(size, compiled=compiled)
        case BertSize():
            return _bert(size, compiled=compiled)
        case LstmTrainingSize():
            return _training(size, LstmClassifier(size, cells=cells or compiled), compiled=compiled)
        case TransformerSize():
            return _training(size, Transformer(size), compiled=compiled)
        case GenerationSize():
            return _generating(size, compiled=compiled, greedy=greedy)


def _each(forward: Callable[[Any], Tensor], inputs: Iterable[Any]) -> Run:
    """Return the forward pass of each input, without gradients."""

    def run() -> Outputs:
        with torch.inference_mode():
            return [forward(each).numpy() for each in inputs]

    return run


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


# --- LSTM ------------------------------------------------------------------------------


def _lstm(size: LstmSize, *, compiled: bool, cells: bool) -> Run:
    weights, sentences = weights_of(size), list(map(_tensor, inputs_of(size)))
    if not cells:
        model = nn.LSTM(size.features, size.hidden, size.layers)
        load_lstm(model, weights)
        return _each(lambda xs: model(xs)[1][0][-1], sentences)
    stack = [cell_of(weights, f"lstm_{i}") for i in range(size.layers)]
    steps = [torch.compile(cell) if compiled else cell for cell in stack]

    def last_state(xs: Tensor) -> Tensor:
        states = [(xs.new_zeros(1, size.hidden), xs.new_zeros(1, size.hidden)) for _ in steps]
        for x in xs.unsqueeze(1):
            for i, step in enumerate(steps):
                states[i] = step(x, states[i])
                x = states[i][0]
        return states[-1][0][0]

    return _each(last_state, sentences)


def load_lstm(model: nn.LSTM, weights: Weights) -> None:
    state = {}
    for i in range(model.num_layers):
        state[f"weight_ih_l{i}"] = _tensor(weights[f"lstm_{i}/input"].T)
        state[f"weight_hh_l{i}"] = _tensor(weights[f"lstm_{i}/recurrent"].T)
        state[f"bias_ih_l{i}"] = _tensor(weights[f"lstm_{i}/bias"])
        state[f"bias_hh_l{i}"] = torch.zeros_like(state[f"bias_ih_l{i}"])
    model.load_state_dict(state)


def cell_of(weights: Weights, name: str) -> nn.LSTMCell:
    features, gates = weights[f"{name}/input"].shape
    cell = nn.LSTMCell(features, gates // 4)
    bias = _tensor(weights[f"{name}/bias"])
    cell.load_state_dict(
        {
            "weight_ih": _tensor(weights[f"{name}/input"].T),
            "weight_hh": _tensor(weights[f"{name}/recurrent"].T),
            "bias_ih": bias,
            "bias_hh": torch.zeros_like(bias),
        }
    )
    return cell


class LstmClassifier(nn.Module):
    """Sequences [N,T,features] -> logits [N,classes], from the last state."""

    def __init__(self, size: LstmTrainingSize, *, cells: bool) -> None:
        super().__init__()
        weights = weights_of(size)
        if cells:
            self.cell = cell_of(weights, "lstm_0")
        else:
            self.lstm = nn.LSTM(size.features, size.hidden, batch_first=True)
            load_lstm(self.lstm, weights)
        self.head = dense_of(weights, "head")
        self.hidden, self.cells = size.hidden, cells
        for name, parameter in self.named_parameters():
            if "bias_hh" in name:  # a second bias, which would learn what the first one does
                parameter.requires_grad_(False)

    def forward(self, xs: Tensor) -> Tensor:
        if not self.cells:
            return self.head(self.lstm(xs)[1][0][-1])
        h = c = xs.new_zeros(len(xs), self.hidden)
        for x in xs.unbind(1):
            h, c = self.cell(x, (h, c))
        return self.head(h)


# --- Tree-LSTM -------------------------------------------------------------------------


class TreeLstm(nn.Module):
    def __init__(self, size: TreeSize) -> None:
        super().__init__()
        weights = weights_of(size)
        self.leaf, self.node = dense_of(weights, "leaf"), dense_of(weights, "node")

    def at_leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.leaf(x).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def at_node(
        self, h_left: Tensor, c_left: Tensor, h_right: Tensor, c_right: Tensor
    ) -> tuple[Tensor, Tensor]:
        i, f_left, f_right, o, u = self.node(torch.cat([h_left, h_right])).chunk(5)
        c = torch.sigmoid(i) * torch.tanh(u)
        c = c + torch.sigmoid(f_left) * c_left + torch.sigmoid(f_right) * c_right
        return torch.sigmoid(o) * torch.tanh(c), c


def _tree(size: TreeSize, *, compiled: bool) -> Run:
    """Compute the root's state: the tree is in Python's lists, and the recursion is Python's, as
    usual."""
    model = TreeLstm(size)
    at_leaf, at_node = model.at_leaf, model.at_node
    if compiled:
        at_leaf, at_node = torch.compile(at_leaf), torch.compile(at_node)
    trees = [(list(_tensor(tree.words)), tree.nodes.tolist()) for tree in inputs_of(size)]

    def root(tree: tuple[list[Tensor], list[list[int]]]) -> Tensor:
        words, nodes = tree

        def state(node: int) -> tuple[Tensor, Tensor]:
            word, left, right = nodes[node]
            return at_leaf(words[word]) if left < 0 else at_node(*state(left), *state(right))

        return state(0)[0]

    return _each(root, trees)


# --- BERT ------------------------------------------------------------------------------


def dense_of(weights: Weights, *names: str) -> nn.Linear:
    """Return the dense maps of these names side by side, as one."""
    kernel = np.concatenate([weights[f"{name}/kernel"] for name in names], axis=1)
    bias = np.concatenate([weights[f"{name}/bias"] for name in names])
    layer = nn.Linear(*kernel.shape)
    layer.load_state_dict({"weight": _tensor(kernel.T), "bias": _tensor(bias)})
    return layer


def norm_of(weights: Weights, name: str) -> nn.LayerNorm:
    scale, bias = weights[f"{name}/scale"], weights[f"{name}/bias"]
    layer = nn.LayerNorm(len(scale), eps=EPS)
    layer.load_state_dict({"weight": _tensor(scale), "bias": _tensor(bias)})
    return layer


class Block(nn.Module):
    """Attention and a perceptron over [N,T,width]. `before` has norms before both, with the gelu
    of GPT-2; else they come after the sums, with BERT's."""

    def __init__(self, weights: Weights, name: str, heads: int, *, before: bool) -> None:
        super().__init__()
        self.heads, self.before = heads, before
        self.qkv = dense_of(weights, *(f"{name}/{part}" for part in ("query", "key", "value")))
        self.out = dense_of(weights, f"{name}/out")
        self.mlp = nn.Sequential(
            dense_of(weights, f"{name}/mlp_0"),
            nn.GELU(approximate="tanh" if before else "none"),
            dense_of(weights, f"{name}/mlp_1"),
        )
        self.norm_0, self.norm_1 = (norm_of(weights, f"{name}/norm_{i}") for i in range(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [N,heads,T,width / heads] each."""
        n, t, width = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        return query, key, value

    def join(self, mixed: Tensor) -> Tensor:
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            mixed = F.scaled_dot_product_attention(*self.split(self.norm_0(x)), is_causal=True)
            x = x + self.join(mixed)
            return x + self.mlp(self.norm_1(x))
        x = self.norm_0(x + self.join(F.scaled_dot_product_attention(*self.split(x))))
        return self.norm_1(x + self.mlp(x))


def _bert(size: BertSize, *, compiled: bool) -> Run:
    weights = weights_of(size)
    blocks = [Block(weights, f"block_{i}", size.heads, before=False) for i in range(size.layers)]
    model = nn.Sequential(*blocks).eval()
    forward = torch.compile(model) if compiled else model
    sentences = [_tensor(xs)[None] for xs in inputs_of(size)]
    return _each(lambda xs: forward(xs)[0], sentences)


# --- decoder-only transformer ------------------------------------------------------------


class Transformer(nn.Module):
    """Symbols [N,T] -> logits [N,T,symbols]."""

    def __init__(self, size: TransformerSize | GenerationSize) -> None:
        super().__init__()
        weights = weights_of(size)
        self.tokens = nn.Embedding.from_pretrained(_tensor(weights["tokens"]), freeze=False)
        self.positions = nn.Parameter(_tensor(weights["positions"]))
        self.blocks = nn.ModuleList(
            Block(weights, f"block_{i}", size.heads, before=True) for i in range(size.layers)
        )
        self.norm, self.head = norm_of(weights, "norm"), dense_of(weights, "head")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def prefill(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the logits [symbols] after a prompt [1,T], whose keys and values go into the
        cache."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions[:length]
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            query, key, value = block.split(block.norm_0(x))
            keys[:, :, :length], values[:, :, :length] = key, value
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + block.join(mixed)
            x = x + block.mlp(block.norm_1(x))
        return self.head(self.norm(x[:, -1]))[0]

    def step(self, token: Tensor, cache: list[tuple[Tensor, Tensor]], position: int) -> Tensor:
        """Return the logits [symbols] after one more symbol [1,1], which is at that position."""
        x = self.tokens(token) + self.positions[position]
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            query, key, value = block.split(block.norm_0(x))
            keys[:, :, position], values[:, :, position] = key[:, :, 0], value[:, :, 0]
            past = keys[:, :, : position + 1], values[:, :, : position + 1]
            x = x + block.join(F.scaled_dot_product_attention(query, *past))
            x = x + block.mlp(block.norm_1(x))
        return self.head(self.norm(x[:, -1]))[0]

    def masked_step(
        self, token: Tensor, cache: list[tuple[Tensor, Tensor]], position: Tensor
    ) -> Tensor:
        """Compute `step` for a position [1] with shapes that never change: one compilation for
        all."""
        x = self.tokens(token) + self.positions[position]
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            query, key, value = block.split(block.norm_0(x))
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            mask = (torch.arange(keys.shape[2]) <= position)[None]
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = x + block.join(mixed)
            x = x + block.mlp(block.norm_1(x))
        return self.head(self.norm(x[:, -1]))[0]


def _generating(size: GenerationSize, *, compiled: bool, greedy: bool) -> Run:
    """Return symbols after the prompt, one at a time, with keys and values kept; the likeliest ones
    with `greedy`, else drawn among the `TOP_K` likeliest."""
    model = Transformer(size).eval()
    shape = (1, size.heads, size.length, size.width // size.heads)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(size.layers)]
    [prompt] = inputs_of(size)
    prompt = _tensor(prompt)[None]

    def choose(logits: Tensor) -> Tensor:
        if greedy:
            return logits.argmax(keepdim=True)
        likely, symbols = torch.topk(logits, TOP_K)
        drawn = torch.multinomial(torch.softmax(likely / TEMPERATURE, dim=0), 1)
        return symbols[drawn]

    step = torch.compile(model.masked_step) if compiled else model.step

    def run() -> Outputs:
        with torch.inference_mode():
            symbols = [choose(model.prefill(prompt, cache))]
            for i in range(size.prompt, size.length - 1):
                position: Any = torch.tensor([i]) if compiled else i
                symbols.append(choose(step(symbols[-1][None], cache, position)))
            return [torch.cat(symbols).numpy()]

    return run


# --- training ----------------------------------------------------------------------------


def _training(size: LstmTrainingSize | TransformerSize, model: nn.Module, *, compiled: bool) -> Run:
    """Return one step of SGD with momentum, and the loss before."""
    [(samples, labels)] = inputs_of(size)
    samples, labels = _tensor(samples), _tensor(labels)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, foreach=True)
    forward = torch.compile(model) if compiled else model

    def run() -> Outputs:
        optimizer.zero_grad(set_to_none=True)
        logits = forward(samples)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return [np.asarray(loss.item())]

    return run
