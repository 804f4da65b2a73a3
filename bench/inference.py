"""Time of a captured forward pass of an MLP-Mixer, beside PyTorch and ONNX Runtime.

`pass_ms` is the time from images to logits. All contenders have the same weights, and none is timed
before its logits are those of `reference`. ONNX Runtime runs what `torch.onnx` exports.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.harness import (
    Contender,
    Prepare,
    Round,
    Suite,
    if_native,
    installed_version,
    rounds_of,
    say,
)
from bench.sizes import MIXERS, MixerSize, batch_of

Array = NDArray[Any]
Params = Mapping[str, Array]
Forward = Callable[[], Array]
"""The logits of the batch, in memory of this processor."""

CASES: Final[dict[str, MixerSize]] = {
    f"{name} batch {batch}": MIXERS[name]._replace(batch=batch)
    for name, batch in (("tiny", 1), ("cifar", 1), ("s16", 1), ("s16", 8))
}
PASSES: Final = dict(zip(CASES, (200, 20, 2, 1), strict=True))
"""How many forward passes are one round."""
TOLERANCE: Final = 1e-4


def preparing(make: Callable[[MixerSize, Params], Forward]) -> Prepare:
    """Return a `prepare` of all cases, with `quick` of the smallest."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        def forward_of(case: str) -> Forward:
            size = CASES[case]
            params = params_of(size)
            forward = make(size, params)
            check(forward(), reference(size, params, batch_of(size)[0]))
            return forward

        passes = dict.fromkeys([*CASES][:1], 2) if quick else {x: PASSES[x] for x in CASES}
        return rounds_of(forward_of, passes, "pass_ms", lambda case: 1e3)

    return prepare


def check(logits: Array, expected: Array) -> None:
    """Raise `ValueError` unless the logits are the expected ones."""
    if logits.shape != expected.shape:
        raise ValueError(f"logits {logits.shape} in place of {expected.shape}")
    error = float(np.abs(logits - expected).max() / np.abs(expected).max())
    if not error <= TOLERANCE:
        raise ValueError(f"a logit is off by {error:.1e} of the largest, {TOLERANCE:g} is accepted")


def params_of(size: MixerSize) -> dict[str, Array]:
    """Weights under the names of `models.mlp_mixer`: its first ones, and some noise on all, for
    the head and all biases begin with zeros."""
    from bench.mlvm_training import model_of, parameters_of

    rng = np.random.default_rng(0)
    return {
        name: values + 0.02 * rng.standard_normal(values.shape, np.float32)
        for name, values in sorted(parameters_of(model_of(size)).items())
    }


def reference(size: MixerSize, params: Params, images: Array) -> Array:
    """Return the logits by numpy alone, in f64."""
    weights = {name: values.astype(np.float64) for name, values in params.items()}
    patch, grid = size.patch_size, size.image_shape[0] // size.patch_size

    def dense(name: str, x: Array) -> Array:
        kernel = weights[f"{name}/kernel"]
        y: Array = x @ kernel.reshape(-1, kernel.shape[-1]) + weights[f"{name}/bias"]
        return y

    def mlp(name: str, x: Array) -> Array:
        x = dense(f"{name}/Dense_0", x)
        x = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return dense(f"{name}/Dense_1", x)

    def layer_norm(name: str, x: Array) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        y: Array = x * weights[f"{name}/scale"] + weights[f"{name}/bias"]
        return y

    patches = images.reshape(size.batch, grid, patch, -1, patch, size.image_shape[2])
    x = dense("stem", patches.swapaxes(2, 3).reshape(size.batch, size.patches, -1))
    for i in range(size.num_blocks):
        name = f"MixerBlock_{i}"
        y = layer_norm(f"{name}/LayerNorm_0", x).swapaxes(1, 2)
        x = x + mlp(f"{name}/token_mixing", y).swapaxes(1, 2)
        x = x + mlp(f"{name}/channel_mixing", layer_norm(f"{name}/LayerNorm_1", x))
    return dense("head", layer_norm("pre_head_layer_norm", x).mean(axis=1))


def mlvm_forward(size: MixerSize, params: Params, threads: int) -> Forward:
    import mlvm.eager as ml
    from bench.mlvm_training import model_of, vm_of

    vm = vm_of(threads)
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = model_of(size)
        model.load_state(params)
        images = ml.asarray(batch_of(size)[0])
    captured = ml.capture(lambda images: model(images))

    def forward() -> Array:
        with batch:
            logits: Array = captured(images).numpy()
        return logits

    return forward


def torch_model(size: MixerSize, params: Params) -> tuple[Any, Any]:
    """PyTorch's model and the images, as it wants them."""
    import torch

    from bench.torch_training import load_mixer, model_of

    model = model_of(size).eval()
    load_mixer(model, params)
    images = torch.from_numpy(batch_of(size)[0])
    return model, images.permute(0, 3, 1, 2).contiguous()


def torch_forward(size: MixerSize, params: Params) -> Forward:
    import torch

    model, images = torch_model(size, params)

    def forward() -> Array:
        with torch.inference_mode():
            logits: Array = model(images).numpy()
        return logits

    return forward


def onnx_forward(size: MixerSize, params: Params, threads: int) -> Forward:
    import onnxruntime
    import torch

    model, images = torch_model(size, params)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mixer.onnx"
        torch.onnx.export(model, (images,), file, input_names=["images"], verbose=False)
        session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    feed = {"images": images.numpy()}
    return lambda: session.run(None, feed)[0]


def prepare_onnx(threads: int) -> Prepare:
    def prepare(quick: bool) -> Mapping[str, Round]:
        needed = ("torch", "onnx", "onnxscript")
        missing = [package for package in needed if installed_version(package) is None]
        if missing:
            say(f"inference: {', '.join(missing)} not installed: no model for onnxruntime, skipped")
            return {}
        return preparing(partial(onnx_forward, threads=threads))(quick)

    return prepare


SUITE = Suite(
    module="bench.inference",
    contenders=(
        Contender("mlvm-1t", "mlvm", preparing(partial(mlvm_forward, threads=1))),
        Contender("mlvm-2t", "mlvm", if_native(preparing(partial(mlvm_forward, threads=2)))),
        Contender("torch-1t", "torch", preparing(torch_forward)),
        Contender("torch-2t", "torch", preparing(torch_forward), threads=2),
        Contender("onnxruntime-1t", "onnxruntime", prepare_onnx(1)),
        Contender("onnxruntime-2t", "onnxruntime", prepare_onnx(2), threads=2),
    ),
    units={"pass_ms": "ms"},
    ours=("mlvm-1t", "mlvm-2t"),
    targets={
        (case, "pass_ms", f"mlvm-{threads}t", f"onnxruntime-{threads}t"): 1.0
        for case in CASES
        for threads in (1, 2)
    },
    rounds=15,
    timeout=300,
    quick_rounds=1,
)
