"""Training on lengths as they come, and what a new length costs.

A round is two epochs: each batch has another length, in random order. `first_ms` is an epoch that
begins without any program, so that traces and compilations count; `epoch_ms` is the one after.
`extra_ms` is the median of what the first call of a length takes above a repeated one, in the
second half of the first epoch; `traces` is the number of programs.

`mlvm` is one trace with open lengths, `mlvm-by-shape` a program for each length. JAX pads to powers
of two, as is usual there. Losses of `mlvm` are those of eager calls to the bit, or it fails.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Round, Suite

Step = Callable[[NDArray[Any]], float]
"""Trains on a batch of tokens i64[batch, time], and returns the loss."""


class Size(NamedTuple):
    """A model of tokens, a batch, and the number and bound of lengths."""

    model: str
    width: int
    layers: int
    batch: int = 2
    lengths: int = 200
    longest: int = 128
    symbols: int = 64


CASES: Final = {
    "gpt tiny": Size("gpt", 64, 4),
    "gpt 10M": Size("gpt", 384, 6, lengths=40),
    "bert": Size("bert", 64, 4),
    "lstm": Size("lstm", 64, 1),
}
QUICK: Final = {
    name: size._replace(width=16, layers=1, lengths=4, longest=24) for name, size in CASES.items()
}
HEADS: Final = 4
RATE: Final = 1e-3
CHECKED: Final = 8


def batches_of(size: Size) -> list[NDArray[Any]]:
    """Return an epoch's batches, each of another length as far as there are enough lengths."""
    random = np.random.default_rng(0)
    lengths = np.resize(random.permutation(np.arange(4, size.longest + 1)), size.lengths)
    shape: Any = partial(random.integers, size.symbols)
    return [shape(size=(size.batch, int(length))) for length in random.permutation(lengths)]


def padded(tokens: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return tokens padded to a power of two, and the weights of the labels, 0 for padding."""
    length = tokens.shape[1]
    more = (1 << (length - 1).bit_length()) - length
    weights = np.pad(np.ones((len(tokens), length - 1), np.float32), ((0, 0), (0, more)))
    return np.pad(tokens, ((0, 0), (0, more))), weights


def prepared(
    make: Callable[[Size], tuple[Step, Callable[[], int]]], quick: bool
) -> Mapping[str, Round]:
    """Return a round for each case: a new step trains two epochs, and each length once more."""

    def timed(size: Size) -> Mapping[str, float]:
        step, traces = make(size)
        batches = batches_of(size)
        lengths: set[int] = set()
        first: list[tuple[NDArray[Any], float]] = []
        begin = time.perf_counter()
        for tokens in batches:
            is_new = tokens.shape[1] not in lengths
            lengths.add(tokens.shape[1])
            start = time.perf_counter()
            step(tokens)
            if is_new:
                first.append((tokens, time.perf_counter() - start))
        cold = time.perf_counter() - begin
        warm = seconds(lambda: [step(tokens) for tokens in batches])
        extra = []
        for tokens, took in first[len(first) // 2 :]:
            step(tokens)
            extra.append(took - min(seconds(lambda x=tokens: step(x)) for _ in range(3)))  # type: ignore[misc]
        return {
            "first_ms": cold * 1e3,
            "epoch_ms": warm * 1e3,
            "extra_ms": max(0.0, statistics.median(extra) * 1e3),
            "traces": traces(),
        }

    return {name: partial(timed, size) for name, size in (QUICK if quick else CASES).items()}


def seconds(work: Callable[[], object]) -> float:
    """Return how long the call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- mlvm ----------------------------------------------------------------------------


def mlvm(size: Size, *, lengths: Any) -> tuple[Step, Callable[[], int]]:
    import mlvm.eager as ml

    vm = ml.VM("bench")
    with ml.Arena(vm, "weights").allocating():
        eager, captured = _training(size), _training(size)
    named = {"time": size.longest} if lengths else None
    step: Any = ml.capture(captured, lengths=lengths, at_most=named)
    memory = ml.Arena(vm, "batch")

    def run(tokens: NDArray[Any]) -> float:
        with memory:
            return float(step(ml.asarray(tokens)))

    for tokens in batches_of(size)[:CHECKED] if lengths is not False else ():
        loss = run(tokens)
        with memory:
            expected = float(eager(ml.asarray(tokens)))
        if loss != expected:
            raise ValueError(f"another loss than eagerly at length {tokens.shape[1]}")
    step.close()
    return run, lambda: step.signatures


def _training(size: Size) -> Callable[[Any], Any]:
    """Return mlvm's training step of a model that is the same each time."""
    import mlvm.eager as ml
    from mlvm.eager import nn

    ml.random.seed(0)
    embedding, head = nn.Embedding(size.symbols, size.width), nn.Linear(size.width, size.symbols)
    layers: Sequence[Any]
    if size.model == "lstm":
        layers = [nn.LSTM(size.width, size.width)]
    else:
        layers = [
            nn.TransformerEncoderLayer(size.width, HEADS, rotary_base=10000.0, pre_norm=True)
            for _ in range(size.layers)
        ]
    model = nn.Sequential(embedding, *layers, head)
    optimizer = ml.optim.AdamW(model, RATE)

    def loss_of(model: Any, tokens: Any) -> Any:
        x = model[0](tokens[:, :-1])
        if size.model == "lstm":
            x = ml.permute_dims(model[1](ml.permute_dims(x, (1, 0, 2)))[0], (1, 0, 2))
        else:
            for layer in model[1:-1]:
                x = layer(x, is_causal=size.model == "gpt")
        return ml.softmax_cross_entropy(model[-1](x), tokens[:, 1:], reduction="mean")

    def train(tokens: Any) -> Any:
        loss, gradients = ml.value_and_grad(loss_of)(model, tokens)
        optimizer.update(gradients)
        return loss

    return train


# --- PyTorch and JAX -------------------------------------------------------------------


def torch(size: Size, *, compiled: bool) -> tuple[Step, Callable[[], int]]:
    import torch as pt
    from torch.nn import functional as F

    pt.manual_seed(0)
    width = size.width
    body: Any
    if size.model == "lstm":
        body = pt.nn.LSTM(width, width, batch_first=True)
    else:
        layer = pt.nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        body = pt.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
    parts = [pt.nn.Embedding(size.symbols, width), body, pt.nn.Linear(width, size.symbols)]
    model = pt.nn.ModuleList(parts)
    optimizer = pt.optim.AdamW(model.parameters(), RATE)

    def forward(tokens: Any) -> Any:
        x = model[0](tokens[:, :-1])
        if size.model == "lstm":
            x = model[1](x)[0]
        elif size.model == "gpt":
            mask = pt.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            x = model[1](x, mask=mask, is_causal=True)
        else:
            x = model[1](x)
        return F.cross_entropy(model[2](x).flatten(0, 1), tokens[:, 1:].flatten())

    call = pt.compile(forward, dynamic=True) if compiled else forward

    def run(tokens: NDArray[Any]) -> float:
        optimizer.zero_grad()
        loss = call(pt.from_numpy(tokens))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return run, lambda: 1


def jax(size: Size) -> tuple[Step, Callable[[], int]]:
    import jax as jx
    import jax.numpy as jnp

    random, width = np.random.default_rng(0), size.width

    def dense(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)

    params: Any = {"tokens": dense(size.symbols, width), "head": dense(width, size.symbols)}
    if size.model == "lstm":
        params["cell"] = dense(2 * width, 4 * width)
    else:
        params["layers"] = [
            (dense(width, 3 * width), dense(width, width), dense(width, 4 * width),
             dense(4 * width, width))
            for _ in range(size.layers)
        ]  # fmt: skip

    def forward(params: Any, tokens: Any) -> Any:
        x = params["tokens"][tokens]
        if size.model == "lstm":
            zeros = jnp.zeros((len(tokens), width))

            def turn(state: Any, row: Any) -> Any:
                gates = jnp.concatenate([row, state[0]], axis=-1) @ params["cell"]
                i, f, g, o = jnp.split(gates, 4, axis=-1)
                c = jx.nn.sigmoid(f) * state[1] + jx.nn.sigmoid(i) * jnp.tanh(g)
                h = jx.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            x = jx.lax.scan(turn, (zeros, zeros), x.swapaxes(0, 1))[1].swapaxes(0, 1)
        for qkv, out, up, down in params.get("layers", ()):
            y = jx.nn.standardize(x) @ qkv
            heads = y.reshape(*y.shape[:2], 3, HEADS, width // HEADS)
            y = jx.nn.dot_product_attention(
                *jnp.moveaxis(heads, 2, 0), is_causal=size.model == "gpt"
            )
            x = x + y.reshape(x.shape) @ out
            x = x + jx.nn.gelu(jx.nn.standardize(x) @ up) @ down
        return jx.nn.standardize(x) @ params["head"]

    def loss_of(params: Any, tokens: Any, weights: Any) -> Any:
        logs = jx.nn.log_softmax(forward(params, tokens[:, :-1]))
        chosen = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=2)[..., 0]
        return -jnp.sum(chosen * weights) / jnp.sum(weights)

    @partial(jx.jit, donate_argnums=0)
    def update(state: Any, tokens: Any, weights: Any) -> Any:
        params, m, v, t = state
        loss, g = jx.value_and_grad(loss_of)(params, tokens, weights)
        m = jx.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jx.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        a, b = 1 - 0.9 ** (t + 1), 1 - 0.999 ** (t + 1)
        params = jx.tree.map(
            lambda p, m, v: p * (1 - 0.01 * RATE) - RATE * (m / a) / (jnp.sqrt(v / b) + 1e-8),
            params, m, v,
        )  # fmt: skip
        return (params, m, v, t + 1), loss

    zeros = partial(jx.tree.map, jnp.zeros_like)
    states: list[Any] = [(params, zeros(params), zeros(params), jnp.zeros(()))]

    def run(tokens: NDArray[Any]) -> float:
        states[0], loss = update(states[0], *padded(tokens))
        return float(loss)

    return run, lambda: int(update._cache_size())


SUITE: Final = Suite(
    module=__name__,
    contenders=(
        Contender(
            "mlvm", "mlvm", partial(prepared, partial(mlvm, lengths={"tokens": (None, "time")}))
        ),
        Contender("mlvm-unnamed", "mlvm", partial(prepared, partial(mlvm, lengths=None))),
        Contender("mlvm-by-shape", "mlvm", partial(prepared, partial(mlvm, lengths=False))),
        Contender("torch", "torch", partial(prepared, partial(torch, compiled=False))),
        Contender("torch-compiled", "torch", partial(prepared, partial(torch, compiled=True))),
        Contender("jax", "jax", partial(prepared, jax)),
    ),
    units={"first_ms": "ms", "epoch_ms": "ms", "extra_ms": "ms", "traces": "programs"},
    rounds=3,
    quick_rounds=1,
    warm_up_rounds=0,
    timeout=1800.0,
)
