"""Ops of ONNX by kind; importing these modules fills the table."""

from mlvm.onnx.ops import (  # noqa: F401
    attention,
    control,
    elementwise,
    ensembles,
    experts,
    images,
    layout,
    linear,
    neural,
    picking,
    quantized,
    random,
    recurrent,
    reductions,
    signal,
    training,
)
