"""The ops of ONNX by what they do: importing them fills the table."""

from mlvm.onnx.ops import (  # noqa: F401
    attention,
    control,
    elementwise,
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
