"""JAX's side of the training benchmarks: the Mixer, its whole step under one `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.sizes import LEARNING_RATE, MOMENTUM, MixerSize, batch_of

Params = dict[str, Any]


def training(
    size: MixerSize, params: Params, dtype: Any = jnp.float32, policy: str | None = None
) -> Callable[[], float]:
    """Return a function that trains on the batch once and returns the loss before. `params` are the
    first parameters, under the names of `models.mlp_mixer`; the model computes in `dtype`. With a
    `policy` of `jax.checkpoint_policies`, each block is a checkpoint."""
    images, labels = map(jnp.asarray, batch_of(size))
    state = [jax.tree.map(jnp.array, params), jax.tree.map(jnp.zeros_like, params)]

    def loss_of(params: Params, images: Any, labels: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = forward(size, params, images.astype(dtype), policy).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

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

    def dense(params: Params, name: str, x: Any) -> Any:
        return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]

    def mlp(params: Params, name: str, x: Any) -> Any:
        return dense(params, f"{name}/Dense_1", jax.nn.gelu(dense(params, f"{name}/Dense_0", x)))

    def layer_norm(params: Params, name: str, x: Any) -> Any:
        x = jax.nn.standardize(x, epsilon=1e-6)
        return x * params[f"{name}/scale"] + params[f"{name}/bias"]

    def block(params: Params, x: Any) -> Any:
        y = layer_norm(params, "LayerNorm_0", x).swapaxes(1, 2)
        x += mlp(params, "token_mixing", y).swapaxes(1, 2)
        return x + mlp(params, "channel_mixing", layer_norm(params, "LayerNorm_1", x))

    if policy is not None:
        block = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
    x = jax.lax.conv_general_dilated(
        images,
        params["stem/kernel"],
        (size.patch_size, size.patch_size),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = x.reshape(len(x), -1, x.shape[-1]) + params["stem/bias"]
    for i in range(size.num_blocks):
        of_block = f"MixerBlock_{i}/"
        own = {name: x for name, x in params.items() if name.startswith(of_block)}
        x = block({name.removeprefix(of_block): each for name, each in own.items()}, x)
    return dense(params, "head", layer_norm(params, "pre_head_layer_norm", x).mean(axis=1))
