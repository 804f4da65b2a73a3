"""Time of a training step that is recorded, and the bytes of its record.

`mlvm-recorded` runs inside `ml.runs.record`, with a checkpoint every 100 steps. `log_bytes` is the
growth of the log in a step; checkpoints and inputs, which are stored once here, are not part of it.
`torch-hashed` is PyTorch in deterministic mode with a hash of all parameters after each step, as
its users compare runs today, and `torch` the same step without. `torch-debug` runs each step in
PyTorch's DebugMode, which logs a hash of the operands and results of each op.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import Contender, Prepare, Round, Suite, rounds_of
from bench.mixer import Step
from bench.sizes import MIXERS, STEPS, MixerSize


def preparing(make: Callable[[MixerSize], Step]) -> Prepare:
    """Return a `prepare` of the two smaller sizes, with `quick` of the smallest."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        steps = {"tiny": 2} if quick else {case: STEPS[case] for case in ("tiny", "cifar")}
        return rounds_of(lambda case: make(MIXERS[case]), steps, "step_ms", lambda case: 1e3)

    return prepare


def mlvm_plain(size: MixerSize) -> Step:
    from bench.mlvm_training import Training

    return Training(size).replay


def prepare_recorded(quick: bool) -> Mapping[str, Round]:
    """Prepare recorded steps. The recording is ended with the process."""
    import mlvm.eager as ml

    folder = tempfile.TemporaryDirectory()
    recording = ml.runs.record(Path(folder.name) / "run")
    recording.__enter__()
    rounds = preparing(mlvm_plain)(quick)
    log = Path(folder.name) / "run" / "log"

    def with_bytes(round: Round, steps: int) -> Mapping[str, float]:
        assert recording, folder  # they live as long as the rounds
        before = log.stat().st_size
        measured = round()
        return {**measured, "log_bytes": (log.stat().st_size - before) / steps}

    counts = {"tiny": 2} if quick else STEPS
    return {case: partial(with_bytes, each, counts[case]) for case, each in rounds.items()}


def torch_plain(size: MixerSize) -> Step:
    from bench.torch_training import model_of, training

    return training(size, model_of(size))


def torch_hashed(size: MixerSize) -> Step:
    import hashlib

    import torch

    from bench.torch_training import model_of, training

    torch.use_deterministic_algorithms(True)
    model = model_of(size)
    step = training(size, model)

    def hashed() -> object:
        result = step()
        state = hashlib.blake2b()
        for parameter in model.parameters():
            state.update(np.ascontiguousarray(parameter.detach().numpy()).data)
        state.hexdigest()
        return result

    return hashed


def torch_debug(size: MixerSize) -> Step:
    from torch.utils._debug_mode import DebugMode

    step = torch_plain(size)

    def logged() -> object:
        hashes = DebugMode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True)
        with DebugMode() as mode, hashes:
            result = step()
        mode.debug_string()  # the text that its users compare
        return result

    return logged


SUITE = Suite(
    module="bench.runs",
    contenders=(
        Contender("mlvm", "mlvm", preparing(mlvm_plain)),
        Contender("mlvm-recorded", "mlvm", prepare_recorded),
        Contender("torch", "torch", preparing(torch_plain)),
        Contender("torch-hashed", "torch", preparing(torch_hashed)),
        Contender("torch-debug", "torch", preparing(torch_debug)),
    ),
    units={"step_ms": "ms", "log_bytes": "bytes"},
    ours=("mlvm-recorded",),
    targets={("cifar", "step_ms", "mlvm-recorded", "mlvm"): 1 / 1.03},
    limits={(case, "log_bytes", "mlvm-recorded"): 1024 for case in ("tiny", "cifar")},
)
