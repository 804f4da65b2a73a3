"""Training on lengths as they come, and the cost of a new length.

Each contender trains two epochs, in which nearly each batch has another length, in random order.
`first_ms` is the mean of a batch in the first epoch, traces and compilations included; `epoch_ms`
is that of the second. `step_ms` is the geometric mean of a step at a few lengths, the same for all
contenders. `extra_ms` is the median, over new lengths in the second half of the first epoch, of the
first call less 1.2 times a repeated one. `traces` counts programs. `growth_mib` is how much more
memory is resident at the end than after the longest batch. `unequal` counts losses and weights that
differ from those of eager calls by a bit.

`mlvm` is one trace with open lengths. `mlvm-by-shape` has a program for each length: it trains on
the few lengths of `step_ms` alone, as `lengths` says. JAX pads to powers of two. A Tree-LSTM's
length is the number of its nodes, two for each level.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Contest, Round, Suite

Step = Callable[[NDArray[Any]], float]
"""Trains on tokens i64[batch, time], or on trees i64[batch, nodes, 3]; returns the loss."""


class Trainer(NamedTuple):
    """Training step, its number of programs, and the number of losses and weights that differ from
    those of eager calls, if they were compared."""

    step: Step
    traces: Callable[[], int]
    unequal: int | None = None


class Size(NamedTuple):
    """A model, a batch, the number of batches in an epoch, and the bound of lengths."""

    model: str
    width: int
    layers: int
    batch: int = 2
    lengths: int = 200
    longest: int = 128
    symbols: int = 64
    sample: int = 6


CASES: Final = {
    "gpt tiny": Size("gpt", 64, 4),
    "gpt 10M": Size("gpt", 384, 6, lengths=40),
    "bert": Size("bert", 64, 4),
    "lstm": Size("lstm", 64, 1),
    "tree-lstm": Size("tree", 64, 1, lengths=60, longest=129),
}
QUICK: Final = {
    name: size._replace(width=16, layers=1, lengths=8, longest=16, sample=3)
    for name, size in CASES.items()
    if name != "gpt 10M"  # it would be the tiny one
}
HEADS: Final = 4
RATE: Final = 1e-3
REPEATED: Final = 12  # lengths at which the first call is compared with a repeated one


def batches_of(size: Size) -> list[NDArray[Any]]:
    """Return an epoch's batches, each of another length as far as there are enough lengths."""
    random = np.random.default_rng(0)
    possible = (
        np.arange(5, size.longest + 1, 2)
        if size.model == "tree"
        else np.arange(4, size.longest + 1)
    )
    lengths = random.permutation(np.resize(random.permutation(possible), size.lengths))
    shape: Any = partial(random.integers, size.symbols)
    if size.model == "tree":
        return [trees(shape(size=(size.batch, int(n)))) for n in lengths]
    return [shape(size=(size.batch, int(n))) for n in lengths]


def trees(words: NDArray[Any]) -> NDArray[Any]:
    """Return a tree of each row of words, a row (word, left, right) for each node: of two children
    the left one is a leaf."""
    n = words.shape[1]
    left = np.where(np.arange(n) % 2, -1, np.arange(n) + 1)
    left[-1] = -1
    right = np.where(left < 0, -1, left + 1)
    return np.stack([words, *np.broadcast_arrays(left, right, words)[:2]], axis=-1)


def sampled(batches: Sequence[NDArray[Any]], count: int) -> list[NDArray[Any]]:
    """Return that many batches, whose lengths lie evenly among all."""
    ordered = sorted(batches, key=lambda x: x.shape[1])
    return [ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count)]


def padded(tokens: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return tokens padded to a power of two, and the weights of the labels, 0 for padding."""
    length = tokens.shape[1]
    more = (1 << (length - 1).bit_length()) - length
    if tokens.ndim == 3:  # trees: leaves that no node has as a child
        return np.pad(tokens, ((0, 0), (0, more), (0, 0)), constant_values=-1), np.ones(len(tokens))
    weights = np.pad(np.ones((len(tokens), length - 1), np.float32), ((0, 0), (0, more)))
    return np.pad(tokens, ((0, 0), (0, more))), weights


def prepared(
    make: Callable[[Size], Trainer], quick: bool, *, by_shape: bool = False, models: str = ""
) -> Mapping[str, Round]:
    """Return a round for each case, or for those of some models: a new step trains two epochs."""

    def timed(size: Size) -> Mapping[str, float]:
        trainer = make(size)
        step, batches = trainer.step, batches_of(size)
        compared = sampled(batches, size.sample)
        epoch = compared if by_shape else batches
        longest = max(x.shape[1] for x in epoch)
        calls: dict[int, tuple[NDArray[Any], float]] = {}  # the first of each length
        first, resident = [], 0.0
        for x in epoch:
            first.append(seconds(lambda x=x: step(x)))  # type: ignore[misc]
            calls.setdefault(x.shape[1], (x, first[-1]))
            if x.shape[1] == longest:
                resident = resident_mib()
        later = seconds(lambda: [step(x) for x in epoch])
        growth = resident_mib() - resident
        extra = []
        for x, took in list(calls.values())[-min(REPEATED, len(calls) // 2) :]:
            extra.append(took - 1.2 * fastest(lambda x=x: step(x)))  # type: ignore[misc]
        steps = [fastest(lambda x=x: step(x)) for x in compared]  # type: ignore[misc]
        metrics = {
            "first_ms": statistics.mean(first) * 1e3,
            "epoch_ms": later / len(epoch) * 1e3,
            "step_ms": statistics.geometric_mean(steps) * 1e3,
            "extra_ms": statistics.median(extra) * 1e3,
            "traces": trainer.traces(),
            "lengths": len(calls),
            "growth_mib": growth,
        }
        return metrics | ({} if trainer.unequal is None else {"unequal": trainer.unequal})

    cases = (QUICK if quick else CASES).items()
    return {
        name: partial(timed, size) for name, size in cases if size.model in (models or size.model)
    }


def seconds(work: Callable[[], object]) -> float:
    """Return how long the call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fastest(work: Callable[[], object]) -> float:
    """Return how long the fastest of three calls takes, after another one."""
    work()
    return min(seconds(work) for _ in range(3))


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# --- mlvm ----------------------------------------------------------------------------


def mlvm(size: Size, *, lengths: Any) -> Trainer:
    import mlvm.eager as ml

    vm = ml.VM("bench")
    with ml.Arena(vm, "weights").allocating():
        (eager, expected), (captured, weights) = _training(size), _training(size)
    names = {"x": (None, "time", None)[: 3 if size.model == "tree" else 2]}
    bounds = {"time": size.longest} if lengths else None
    step: Any = ml.capture(captured, dynamic_axes=names if lengths else lengths, max_sizes=bounds)
    memory = ml.Arena(vm, "batch")

    def run(x: NDArray[Any]) -> float:
        with memory:
            return float(step(ml.asarray(x)))

    unequal = 0
    for x in batches_of(size) if lengths is not False else ():
        with memory:
            unequal += float(eager(ml.asarray(x))) != run(x)
    pairs = zip(weights(), expected(), strict=True)
    unequal += sum(x.tobytes() != y.tobytes() for x, y in pairs)
    step.close()
    return Trainer(run, lambda: step.signatures, None if lengths is False else unequal)


def _training(size: Size) -> tuple[Callable[[Any], Any], Callable[[], list[NDArray[Any]]]]:
    """Return mlvm's training step of a model that is the same each time, and what reads its
    weights."""
    import mlvm.eager as ml
    from mlvm.eager import nn
    from models.tree_lstm import TreeClassifier

    ml.random.seed(0)
    model: Any
    if size.model == "tree":
        model = TreeClassifier(size.symbols, size.symbols, size.width, size.width)
    else:
        embedding, head = (
            nn.Embedding(size.symbols, size.width),
            nn.Linear(size.width, size.symbols),
        )
        layers: Sequence[Any] = [nn.LSTM(size.width, size.width)]
        if size.model != "lstm":
            layers = [
                nn.TransformerEncoderLayer(size.width, HEADS, rotary_base=10000.0, pre_norm=True)
                for _ in range(size.layers)
            ]
        model = nn.Sequential(embedding, *layers, head)
    optimizer = ml.optim.AdamW(model, RATE)

    def loss_of(model: Any, tokens: Any) -> Any:
        if size.model == "tree":
            labels = tokens[:, 0, 0]  # the root's word, which no node reads
            return ml.softmax_cross_entropy(model(tokens), labels, reduction="mean")
        x = model[0](tokens[:, :-1])
        if size.model == "lstm":
            x = ml.permute_dims(model[1](ml.permute_dims(x, (1, 0, 2)))[0], (1, 0, 2))
        else:
            for layer in model[1:-1]:
                x = layer(x, is_causal=size.model == "gpt")
        return ml.softmax_cross_entropy(model[-1](x), tokens[:, 1:], reduction="mean")

    def train(x: Any) -> Any:
        loss, gradients = ml.value_and_grad(loss_of)(model, x)
        optimizer.update(gradients)
        return loss

    return train, lambda: [x.numpy() for x in ml.tree.leaves(model.parameters())]


# --- PyTorch and JAX -------------------------------------------------------------------


def torch(size: Size, *, compiled: bool) -> Trainer:
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
    if size.model == "tree":
        parts[1:2] = [pt.nn.Linear(width, 3 * width), pt.nn.Linear(2 * width, 5 * width)]
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

    def classify(trees: Any) -> Any:
        i, o, u = model[1](model[0].weight).chunk(3, dim=-1)  # of every symbol
        cells = i.sigmoid() * u.tanh()
        leaves = o.sigmoid() * cells.tanh(), cells

        def state(tree: Any, node: int) -> Any:
            word, left, right = tree[node]
            if left < 0:
                return leaves[0][word], leaves[1][word]
            (h, c), (other_h, other_c) = state(tree, left), state(tree, right)
            i, f, g, o, u = model[2](pt.cat([h, other_h])).chunk(5)
            c = i.sigmoid() * u.tanh() + f.sigmoid() * c + g.sigmoid() * other_c
            return o.sigmoid() * c.tanh(), c

        roots = pt.stack([state(tree, 0)[0] for tree in trees.tolist()])
        return F.cross_entropy(model[3](roots), trees[:, 0, 0])

    call: Any = classify if size.model == "tree" else forward
    if compiled:
        call = pt.compile(call, dynamic=True)

    def run(tokens: NDArray[Any]) -> float:
        optimizer.zero_grad()
        loss = call(pt.from_numpy(tokens))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return Trainer(run, lambda: 1)


def jax(size: Size) -> Trainer:
    import jax as jx
    import jax.numpy as jnp

    random, width = np.random.default_rng(0), size.width

    def dense(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)

    params: Any = {"tokens": dense(size.symbols, width), "head": dense(width, size.symbols)}
    if size.model == "lstm":
        params["cell"] = dense(2 * width, 4 * width)
    elif size.model == "tree":
        params |= {"leaf": dense(width, 3 * width), "node": dense(2 * width, 5 * width)}
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

    def root(params: Any, tree: Any) -> Any:
        n = len(tree)
        i, o, u = jnp.split(params["tokens"] @ params["leaf"], 3, axis=-1)
        cells = jx.nn.sigmoid(i) * jnp.tanh(u)
        leaves = jx.nn.sigmoid(o) * jnp.tanh(cells)

        def turn(k: Any, state: Any) -> Any:
            (h, c), node = state, n - 1 - k
            word, left, right = tree[node]
            both = jnp.concatenate([h[left], h[right]])
            i, f, g, o, u = jnp.split(both @ params["node"], 5)
            cell = jx.nn.sigmoid(i) * jnp.tanh(u) + jx.nn.sigmoid(f) * c[left]
            cell = cell + jx.nn.sigmoid(g) * c[right]
            cell = jnp.where(left < 0, cells[word], cell)
            out = jnp.where(left < 0, leaves[word], jx.nn.sigmoid(o) * jnp.tanh(cell))
            return h.at[node].set(out), c.at[node].set(cell)

        zeros = jnp.zeros((n, width))
        return jx.lax.fori_loop(0, n, turn, (zeros, zeros))[0][0]

    def loss_of(params: Any, tokens: Any, weights: Any) -> Any:
        if size.model == "tree":
            logits = jx.vmap(partial(root, params))(tokens) @ params["head"]
            logs = jx.nn.log_softmax(logits)
            return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 0, :1], axis=1))
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

    return Trainer(run, lambda: int(update._cache_size()))


_PEERS: Final = "torch", "torch-compiled", "jax"

SUITE: Final = Suite(
    module=__name__,
    contenders=(
        Contender("mlvm", "mlvm", partial(prepared, partial(mlvm, lengths=True))),
        Contender("mlvm-unnamed", "mlvm", partial(prepared, partial(mlvm, lengths=None))),
        Contender(
            "mlvm-by-shape",
            "mlvm",
            partial(prepared, partial(mlvm, lengths=False), by_shape=True),
        ),
        Contender("torch", "torch", partial(prepared, partial(torch, compiled=False))),
        Contender(
            "torch-compiled",
            "torch",
            partial(prepared, partial(torch, compiled=True), models="gpt bert lstm"),
        ),
        Contender("jax", "jax", partial(prepared, jax)),
    ),
    units={
        **dict.fromkeys(("first_ms", "epoch_ms", "step_ms", "extra_ms"), "ms"),
        **dict.fromkeys(("traces", "lengths", "unequal"), "count"),
        "growth_mib": "MiB",
    },
    limits={
        (case, metric, ours): limit
        for case in CASES
        for ours, most in (("mlvm", 1), ("mlvm-unnamed", 3))
        for metric, limit in (
            *(("traces", most), ("extra_ms", 0.3), ("growth_mib", 1.0), ("unequal", 0)),
        )
    },
    contests=(
        Contest(
            "epoch with traces over programs by shape",
            "first_ms",
            ("mlvm",),
            ("mlvm-by-shape",),
            dict.fromkeys(CASES, 3.0),
        ),
        Contest(
            "epoch with traces over peers",
            "first_ms",
            ("mlvm",),
            _PEERS,
            dict.fromkeys(CASES, 1.5),
        ),
        Contest(
            "step over a program by shape", "step_ms", ("mlvm",), ("mlvm-by-shape",), mean=1 / 1.1
        ),
    ),
    rounds=1,
    quick_rounds=1,
    warm_up_rounds=0,
    timeout=1800.0,
)
