"""Time of a training step of an MLP-Mixer, at the sizes of `bench.sizes`, beside others.

`step_ms` is the time of one step: forward, cross-entropy, backward, SGD with momentum. All
contenders compute the same numbers. `matmuls-alone` is the floor: only the step's products, by
numpy's BLAS, into memory that is allocated beforehand. `mlvm-replay-2t` is one VM whose kernels
share two threads, `mlvm-replay-2vm` a group of two VMs, each with half of the batch. Contenders
whose names have `bf16` or `autocast` compute in bf16, with weights, momentum and loss in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.environment import has_avx512
from bench.harness import (
    Contender,
    Contest,
    Prepare,
    Round,
    Suite,
    if_native,
    rounds_of,
    say,
)
from bench.sizes import MIXERS, STEPS, MixerSize

Step = Callable[[], object]
Array = NDArray[np.float32]
Product = tuple[Array, Array, Array]  # the factors, and where their product goes


def preparing(make: Callable[[MixerSize], Step]) -> Prepare:
    """Return a `prepare` of all sizes, with `quick` of the smallest. `make` gives a step of a
    size."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        steps = {"tiny": 2} if quick else {case: STEPS[case] for case in MIXERS}
        return rounds_of(lambda case: make(MIXERS[case]), steps, "step_ms", lambda case: 1e3)

    return prepare


def mlvm_eager(size: MixerSize) -> Step:
    from bench.mlvm_training import Training

    return Training(size).eager


def mlvm_replay(size: MixerSize, threads: int = 1, dtype: str = "float32") -> Step:
    import mlvm.eager as ml
    from bench.mlvm_training import Training, vm_of

    return Training(size, vm_of(threads), getattr(ml, dtype)).replay


def mlvm_autocast(size: MixerSize, threads: int = 1) -> Step:
    import mlvm.eager as ml

    return ml.autocast("bfloat16")(mlvm_replay(size, threads))


def mlvm_replay_2vm(size: MixerSize) -> Step:
    from bench.mlvm_training import training_on

    return training_on(2, size, captured=True)


def torch_eager(size: MixerSize, *, bf16: bool = False) -> Step:
    from bench.torch_training import model_of, training

    return training(size, model_of(size), bf16=bf16)


def prepare_torch_compile(quick: bool, *, bf16: bool = False) -> Mapping[str, Round]:
    from bench.torch_training import compiles, model_of, training

    if not compiles():
        say("mixer: torch.compile finds no compiler that works, skipped")
        return {}
    make = partial(training, compiled=True, bf16=bf16)
    return preparing(lambda size: make(size, model_of(size)))(quick)


def jax_jit(size: MixerSize, dtype: str = "float32") -> Step:
    from bench.jax_training import training
    from bench.mlvm_training import model_of, parameters_of

    return training(size, parameters_of(model_of(size)), dtype)


IN_BF16 = (
    Contender("mlvm-bf16", "mlvm", preparing(partial(mlvm_replay, dtype="bfloat16"))),
    Contender(
        "mlvm-bf16-2t",
        "mlvm",
        if_native(preparing(partial(mlvm_replay, threads=2, dtype="bfloat16"))),
    ),
    Contender("mlvm-autocast", "mlvm", preparing(mlvm_autocast)),
    Contender("mlvm-autocast-2t", "mlvm", if_native(preparing(partial(mlvm_autocast, threads=2)))),
    Contender("torch-autocast", "torch", preparing(partial(torch_eager, bf16=True))),
    Contender("torch-autocast-2t", "torch", preparing(partial(torch_eager, bf16=True)), threads=2),
    Contender("torch-autocast-compile", "torch", partial(prepare_torch_compile, bf16=True)),
    Contender(
        "torch-autocast-compile-2t", "torch", partial(prepare_torch_compile, bf16=True), threads=2
    ),
    Contender("jax-bf16", "jax", preparing(partial(jax_jit, dtype="bfloat16"))),
    Contender("jax-bf16-2t", "jax", preparing(partial(jax_jit, dtype="bfloat16")), threads=2),
)
BF16 = {
    "": {"tiny": 3.0, "cifar": 1.5, "s16": 1.4},
    "-2t": {"tiny": 2.5, "cifar": 1.4, "s16": 1.3},
}
"""What is asked for in bf16 of processors that multiply it, on one thread and on two."""


def matmuls(size: MixerSize) -> Step:
    products = products_of(size)
    return lambda: [np.matmul(x, y, out=out) for x, y, out in products]


def products_of(size: MixerSize) -> list[Product]:
    """Return the products of a step; a weight's gradient is one product over the whole batch."""
    tokens, hidden = size.patches, size.hidden_dim
    rows = size.batch * tokens
    stem, stem_gradient, _ = dense(rows, size.patch_features, hidden)  # images need no gradient
    products = [stem, stem_gradient, *dense(size.batch, hidden, size.num_classes)]
    for _ in range(size.num_blocks):
        products += along_tokens(size.batch, tokens, size.tokens_mlp_dim, hidden)
        products += along_tokens(size.batch, size.tokens_mlp_dim, tokens, hidden)
        products += dense(rows, hidden, size.channels_mlp_dim)
        products += dense(rows, size.channels_mlp_dim, hidden)
    return products


def dense(rows: int, inner: int, outer: int) -> list[Product]:
    """Return x @ w, and the gradients of w and of x."""
    x, w, y = noise(rows, inner), noise(inner, outer), noise(rows, outer)
    return [(x, w, y), (x.T, y, np.empty_like(w)), (y, w.T, np.empty_like(x))]


def along_tokens(batch: int, inner: int, outer: int, hidden: int) -> list[Product]:
    """w.T @ x for each image, and the gradients of w and of x."""
    w, x, y = noise(inner, outer), noise(batch, inner, hidden), noise(batch, outer, hidden)
    columns = noise(inner, batch * hidden), noise(batch * hidden, outer)
    return [(w.T, x, y), (*columns, np.empty_like(w)), (w, y, np.empty_like(x))]


def noise(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


# What BLAS and PyTorch reach, and so what is asked for, differs with the instruction set.
if has_avx512():
    EAGER = {"tiny": 1.8, "cifar": 1.9, "s16": 2.0}
    TWO_CORES = {"tiny": 2.5, "cifar": 2.0, "s16": 2.0}
else:
    EAGER = {"tiny": 1.8, "cifar": 1.3, "s16": 1.15}
    TWO_CORES = {"tiny": 3.0, "cifar": 1.3, "s16": 1.25}

SUITE = Suite(
    module="bench.mixer",
    contenders=(
        Contender("mlvm-eager", "mlvm", preparing(mlvm_eager)),
        Contender("mlvm-replay", "mlvm", preparing(mlvm_replay)),
        Contender("mlvm-replay-2t", "mlvm", if_native(preparing(partial(mlvm_replay, threads=2)))),
        Contender("mlvm-replay-2vm", "threadpoolctl", preparing(mlvm_replay_2vm)),
        Contender("torch-eager-1t", "torch", preparing(torch_eager)),
        Contender("torch-eager-2t", "torch", preparing(torch_eager), threads=2),
        Contender("torch-compile-2t", "torch", prepare_torch_compile, threads=2),
        Contender("jax-jit", "jax", preparing(jax_jit), threads=2),
        Contender("matmuls-alone", "numpy", preparing(matmuls)),
        Contender("matmuls-alone-2t", "numpy", preparing(matmuls), threads=2),
        *IN_BF16,
    ),
    units={"step_ms": "ms"},
    ours=("mlvm-eager", "mlvm-replay", "mlvm-replay-2t", "mlvm-replay-2vm"),
    targets={
        (case, "step_ms", ours, theirs): target
        for ours, theirs, targets in (
            ("mlvm-eager", "torch-eager-1t", EAGER),
            ("mlvm-replay", "matmuls-alone", {"tiny": 1 / 1.5, "cifar": 1 / 1.15, "s16": 1 / 1.06}),
        )
        for case, target in targets.items()
    },
    contests=(
        Contest(
            "two cores",
            "step_ms",
            ours=("mlvm-replay-2t", "mlvm-replay-2vm"),
            theirs=("torch-eager-2t", "torch-compile-2t", "jax-jit"),
            targets=TWO_CORES,
        ),
        *(
            Contest(
                f"bf16{threads}",
                "step_ms",
                ours=(f"mlvm-bf16{threads}", f"mlvm-autocast{threads}"),
                theirs=tuple(
                    f"{peer}{threads}"
                    for peer in ("torch-autocast", "torch-autocast-compile", "jax-bf16")
                ),
                targets=targets,
            )
            for threads, targets in BF16.items()
        ),
    ),
    rounds=11,
    timeout=600,  # torch.compile takes its time
    quick_rounds=1,
)
