"""Ops of ONNX by kind; importing these modules fills the table."""

from mlvm.onnx.ops import (  # noqa: F401
    control,
    convnets,
    elementwise,
    ensembles,
    experts,
    images,
    linear,
    moves,
    picking,
    qlinear,
    random,
    reductions,
    rnn,
    signal,
    training,
    transformers,
)
