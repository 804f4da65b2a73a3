"""JAX's side of the training benchmarks: Mixers and transformers, a step under one `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.jax_dynamic import decoder_block, dense, encoder_block, norm
from bench.sizes import LEARNING_RATE, MOMENTUM, MixerSize, TextSize, batch_of

Params = dict[str, Any]


def training(
    size: MixerSize | TextSize,
    params: Params,
    dtype: Any = jnp.float32,
    policy: str | None = None,
) -> Callable[[], float]:
    """Return a function that trains on the batch once and returns the loss before. `params` are the
    first parameters, under the names of `models.mlp_mixer` or `bench.dynamic_sizes`; a Mixer
    computes in `dtype`. With a `policy` of `jax.checkpoint_policies`, each block is a
    checkpoint."""
    images, labels = map(jnp.asarray, batch_of(size))
    state = [jax.tree.map(jnp.array, params), jax.tree.map(jnp.zeros_like, params)]

    def loss_of(params: Params, images: Any, labels: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        if isinstance(size, TextSize):
            logits = text_logits(size, params, images, policy)
        else:
            logits = forward(size, params, images.astype(dtype), policy).astype(jnp.float32)
        chances = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(chances, labels[..., None], axis=-1))

    def update(params: Params, momentum: Params, images: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        momentum = jax.tree.map(lambda v, g: MOMENTUM * v + g, momentum, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, momentum)
        return params, momentum, loss

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> float:
        *state[:], loss = compiled(*state, images, labels)
        jax.block_until_ready(state)
        return float(loss)

    return step


def forward(size: MixerSize, params: Params, images: Any, policy: str | None = None) -> Any:
    """Images [N, height, width, channels] -> logits [N, num_classes]."""

    def mlp(params: Params, name: str, x: Any) -> Any:
        return dense(params, f"{name}/Dense_1", jax.nn.gelu(dense(params, f"{name}/Dense_0", x)))

    def block(params: Params, x: Any) -> Any:
        y = norm(params, "LayerNorm_0", x).swapaxes(1, 2)
        x += mlp(params, "token_mixing", y).swapaxes(1, 2)
        return x + mlp(params, "channel_mixing", norm(params, "LayerNorm_1", x))

    block = checkpointed(block, policy)
    x = jax.lax.conv_general_dilated(
        images,
        params["stem/kernel"],
        (size.patch_size, size.patch_size),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = x.reshape(len(x), -1, x.shape[-1]) + params["stem/bias"]
    for i in range(size.num_blocks):
        x = block(own(params, f"MixerBlock_{i}/"), x)
    return dense(params, "head", norm(params, "pre_head_layer_norm", x).mean(axis=1))


def text_logits(size: TextSize, params: Params, tokens: Any, policy: str | None = None) -> Any:
    """Symbols [N,T] -> logits [N,T,symbols]."""
    shape, is_bert = size.as_transformer, size.name == "Bert"
    half = shape.width // shape.heads // 2
    angles = jnp.arange(size.length)[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)

    def rotated(x: Any) -> Any:
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def block(params: Params, x: Any) -> Any:
        if is_bert:
            return encoder_block(shape, params, "own", x, rotated)
        return decoder_block(shape, params, "own", x)[0]

    block, x = checkpointed(block, policy), params["tokens"][tokens]
    x = norm(params, "norm", x) if is_bert else x + params["positions"]
    for i in range(shape.layers):
        x = block(own(params, f"block_{i}/", "own/"), x)
    return dense(params, "head", x if is_bert else norm(params, "norm", x))


def checkpointed(block: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    if policy is not None:
        block = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
    return block


def own(params: Params, prefix: str, new: str = "") -> Params:
    """Return the parameters with that prefix, which is replaced."""
    return {
        new + name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)
    }
