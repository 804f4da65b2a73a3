"""JAX's side of the suite `dynamic`: each family under `jit`, with `scan` where there is a loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.dynamic_sizes import (
    EPS,
    TEMPERATURE,
    TOP_K,
    Array,
    BertSize,
    GenerationSize,
    LstmSize,
    LstmTrainingSize,
    Size,
    TransformerSize,
    Tree,
    TreeSize,
    inputs_of,
    weights_of,
)
from bench.sizes import LEARNING_RATE, MOMENTUM

Outputs = list[Array]
Run = Callable[[], Outputs]
Params = dict[str, Any]


def running(size: Size, *, greedy: bool = False) -> Run:
    """Return a round's function for that size. `greedy` generation takes the likeliest symbols."""
    match size:
        case LstmSize():
            return _each(size, partial(_last_state, size), inputs_of(size))
        case TreeSize():
            return _each(size, _root, [in_order(tree) for tree in inputs_of(size)])
        case BertSize():
            return _each(size, partial(_bert, size), inputs_of(size))
        case LstmTrainingSize():
            return _training(size, _classify)
        case TransformerSize():
            return _training(size, partial(_logits, size))
        case GenerationSize():
            return _generating(size, greedy=greedy)


def _each(size: Size, forward: Callable[..., Any], inputs: list[Any]) -> Run:
    """Return the forward pass of each input; each shape is compiled once."""
    params = jax.tree.map(jnp.asarray, weights_of(size))
    inputs = [jax.tree.map(jnp.asarray, each) for each in inputs]
    compiled = jax.jit(forward)
    return lambda: [np.asarray(compiled(params, each)) for each in inputs]


# --- LSTM ------------------------------------------------------------------------------


def _lstm(params: Params, name: str, xs: Any) -> Any:
    """Return all states [T, ..., hidden] of inputs [T, ..., features]; what the inputs add to the
    gates is one product."""
    recurrent = params[f"{name}/recurrent"]
    added = xs @ params[f"{name}/input"] + params[f"{name}/bias"]

    def step(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x + h @ recurrent, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((*xs.shape[1:-1], recurrent.shape[0]))
    return lax.scan(step, (zeros, zeros), added)[1]


def _last_state(size: LstmSize, params: Params, xs: Any) -> Any:
    for i in range(size.layers):
        xs = _lstm(params, f"lstm_{i}", xs)
    return xs[-1]


def _classify(params: Params, xs: Any) -> Any:
    return dense(params, "head", _lstm(params, "lstm_0", xs.swapaxes(0, 1))[-1])


# --- Tree-LSTM -------------------------------------------------------------------------


def in_order(tree: Tree) -> tuple[Array, Array]:
    """Return the words, and where a row of states finds its two children: first the states of the
    words, then those of the inner nodes, each after its children."""
    leaves = len(tree.words)
    children: list[list[int]] = []

    def place(node: int) -> int:
        word, left, right = tree.nodes[node]
        if left < 0:
            return int(word)
        children.append([place(left), place(right)])
        return leaves + len(children) - 1

    place(0)
    return tree.words, np.array(children).reshape(-1, 2)


def _root(params: Params, tree: tuple[Any, Any]) -> Any:
    return _states(params, *tree)[0][-1]


def _states(params: Params, words: Any, children: Any) -> Any:
    """Compute the states of a tree: all leaves as one product, then the inner nodes in a loop."""
    i, o, u = jnp.split(dense(params, "leaf", words), 3, axis=-1)
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    more = ((0, len(children)), (0, 0))
    hs, cs = jnp.pad(h, more), jnp.pad(c, more)

    def merge(k: Any, states: Any) -> Any:
        hs, cs = states
        left, right = children[k]
        gates = dense(params, "node", jnp.concatenate([hs[left], hs[right]]))
        i, f_left, f_right, o, u = jnp.split(gates, 5)
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        c = c + jax.nn.sigmoid(f_left) * cs[left] + jax.nn.sigmoid(f_right) * cs[right]
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        row = len(words) + k
        return hs.at[row].set(h), cs.at[row].set(c)

    return lax.fori_loop(0, len(children), merge, (hs, cs))


def padded_together(size: Any) -> Run:
    """Return all inputs at once, by `vmap`, padded to the longest."""
    params = jax.tree.map(jnp.asarray, weights_of(size))
    inputs = inputs_of(size)

    def stacked(rows: list[Array]) -> Any:
        longest = max(map(len, rows))
        pads = [((0, longest - len(x)), *[(0, 0)] * (x.ndim - 1)) for x in rows]
        return jnp.asarray(np.stack([np.pad(x, pad) for x, pad in zip(rows, pads, strict=True)]))

    if isinstance(size, LstmSize):
        arguments = [stacked(inputs), jnp.asarray(size.lengths)]
        forward: Callable[..., Any] = _padded_last_state
    else:
        words, children = zip(*[in_order(tree) for tree in inputs], strict=True)
        most = max(map(len, words))
        # The states of inner nodes come after those of the most words that there are.
        moved = [
            np.where(each < len(leaves), each, each - len(leaves) + most)
            for leaves, each in zip(words, children, strict=True)
        ]
        arguments = [stacked(list(words)), stacked(moved), jnp.asarray(list(map(len, children)))]
        forward = _padded_root
    compiled = jax.jit(jax.vmap(forward, in_axes=(None, *[0] * len(arguments))))
    return lambda: list(np.asarray(compiled(params, *arguments)))


def _padded_last_state(params: Params, words: Any, length: Any) -> Any:
    return _lstm(params, "lstm_0", words)[length - 1]


def _padded_root(params: Params, words: Any, children: Any, count: Any) -> Any:
    hs, _ = _states(params, words, children)
    return hs[jnp.where(count > 0, len(words) + count - 1, 0)]


# --- transformers ----------------------------------------------------------------------


def dense(params: Params, name: str, x: Any) -> Any:
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def norm(params: Params, name: str, x: Any) -> Any:
    x = jax.nn.standardize(x, epsilon=EPS)
    return x * params[f"{name}/scale"] + params[f"{name}/bias"]


def _heads(size: Any, params: Params, name: str, x: Any) -> tuple[Any, Any, Any]:
    """Return queries, keys and values, [..., T, heads, width / heads] each."""
    shape = (*x.shape[:-1], size.heads, size.width // size.heads)
    query, key, value = (
        dense(params, f"{name}/{part}", x).reshape(shape) for part in ("query", "key", "value")
    )
    return query, key, value


def _mlp(params: Params, name: str, x: Any, *, approximate: bool) -> Any:
    hidden = jax.nn.gelu(dense(params, f"{name}/mlp_0", x), approximate=approximate)
    return dense(params, f"{name}/mlp_1", hidden)


def encoder_block(size: Any, params: Params, name: str, x: Any, turn: Any = lambda x: x) -> Any:
    """Apply a block of BERT. `turn` is applied to queries and keys."""
    query, key, value = _heads(size, params, name, x)
    mixed = jax.nn.dot_product_attention(turn(query), turn(key), value).reshape(x.shape)
    x = norm(params, f"{name}/norm_0", x + dense(params, f"{name}/out", mixed))
    return norm(params, f"{name}/norm_1", x + _mlp(params, name, x, approximate=False))


def decoder_block(size: Any, params: Params, name: str, x: Any) -> tuple[Any, Any]:
    """Apply a block of GPT-2. Return the result, and keys and values."""
    heads = _heads(size, params, name, norm(params, f"{name}/norm_0", x))
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
    x = x + dense(params, f"{name}/out", mixed)
    x = x + _mlp(params, name, norm(params, f"{name}/norm_1", x), approximate=True)
    return x, heads[1:]


def _bert(size: BertSize, params: Params, x: Any) -> Any:
    for i in range(size.layers):
        x = encoder_block(size, params, f"block_{i}", x)
    return x


def _logits(size: TransformerSize | GenerationSize, params: Params, tokens: Any) -> Any:
    return _decode(size, params, tokens)[0]


def _decode(
    size: TransformerSize | GenerationSize, params: Params, tokens: Any
) -> tuple[Any, list[Any]]:
    """Return symbols [...,T] -> logits [...,T,symbols], and keys and values of each block."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[-1]]
    cache = []
    for i in range(size.layers):
        x, heads = decoder_block(size, params, f"block_{i}", x)
        cache.append(heads)
    return dense(params, "head", norm(params, "norm", x)), cache


def _step(size: GenerationSize, params: Params, token: Any, cache: Any, position: Any) -> Any:
    """Return the logits [symbols] after one more symbol, and the cache with its keys and values."""
    x = (params["tokens"][token] + params["positions"][position])[None]
    mask = (jnp.arange(size.length) <= position)[None, None]
    after = []
    for i, (keys, values) in enumerate(cache):
        name = f"block_{i}"
        query, key, value = _heads(size, params, name, norm(params, f"{name}/norm_0", x))
        keys = lax.dynamic_update_slice_in_dim(keys, key, position, 0)
        values = lax.dynamic_update_slice_in_dim(values, value, position, 0)
        after.append((keys, values))
        mixed = jax.nn.dot_product_attention(query, keys, values, mask=mask).reshape(x.shape)
        x = x + dense(params, f"{name}/out", mixed)
        x = x + _mlp(params, name, norm(params, f"{name}/norm_1", x), approximate=True)
    return dense(params, "head", norm(params, "norm", x))[0], after


def _generating(size: GenerationSize, *, greedy: bool) -> Run:
    """Return symbols after the prompt, all in one program; the likeliest ones with `greedy`, else
    drawn among the `TOP_K` likeliest."""
    params = jax.tree.map(jnp.asarray, weights_of(size))
    [prompt] = inputs_of(size)
    state = [jax.random.key(0)]

    def choose(logits: Any, key: Any) -> Any:
        if greedy:
            return jnp.argmax(logits)
        likely, symbols = lax.top_k(logits, TOP_K)
        return symbols[jax.random.categorical(key, likely / TEMPERATURE)]

    def generate(params: Params, prompt: Any, key: Any) -> Any:
        logits, prompt_cache = _decode(size, params, prompt)
        more = ((0, size.new_symbols), (0, 0), (0, 0))
        cache = [(jnp.pad(keys, more), jnp.pad(values, more)) for keys, values in prompt_cache]
        following, key, first = jax.random.split(key, 3)

        def body(carry: Any, position: Any) -> Any:
            token, cache, key = carry
            key, draw = jax.random.split(key)
            logits, cache = _step(size, params, token, cache, position)
            token = choose(logits, draw).astype(token.dtype)
            return (token, cache, key), token

        token = choose(logits[-1], first)
        positions = jnp.arange(size.prompt, size.length - 1)
        _, tokens = lax.scan(body, (token, cache, key), positions)
        return jnp.concatenate([token[None], tokens]), following

    compiled = jax.jit(generate)

    def run() -> Outputs:
        tokens, state[0] = compiled(params, prompt, state[0])
        return [np.asarray(tokens)]

    return run


# --- training ----------------------------------------------------------------------------


def _training(size: LstmTrainingSize | TransformerSize, forward: Callable[..., Any]) -> Run:
    """Return one step of SGD with momentum, and the loss before."""
    [(samples, labels)] = inputs_of(size)
    samples, labels = jnp.asarray(samples), jnp.asarray(labels)
    params = jax.tree.map(jnp.asarray, weights_of(size))
    state = [params, jax.tree.map(jnp.zeros_like, params)]

    def loss_of(params: Params, samples: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(forward(params, samples))
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))

    def update(params: Params, momentum: Params, samples: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, samples, labels)
        momentum = jax.tree.map(lambda v, g: MOMENTUM * v + g, momentum, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, momentum)
        return params, momentum, loss

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def run() -> Outputs:
        *state[:], loss = compiled(*state, samples, labels)
        jax.block_until_ready(state)
        return [np.asarray(loss)]

    return run
