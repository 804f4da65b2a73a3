"""Layers: Modules that hold parameters and are called on tensors.

A Module's fields are its parameters, submodules and buffers, assigned in `__init__`; annotations
on the class head are the inventory. Modules are trees, so `value_and_grad` and the optimizers
take them as they are.

Parameters are allocated in the current arena. They are drawn with `key`, a u64[2] of
`mlvm.eager.random`, or with the next global key if that is None. Their initial values come from
`kernel_init=`, `bias_init=` and the like, functions as in `mlvm.eager.nn.init`. Bad hyperparameters
raise `ArgumentError`, and a `dtype` that is no float `DTypeError`. So does an x that is wider
than half-precision weights; a half-precision x is widened to f32 weights.
"""

from mlvm.eager.nn import init
from mlvm.eager.nn import layer as _names_the_layer_in_errors  # noqa: F401
from mlvm.eager.nn import summary as _gives_modules_summary  # noqa: F401
from mlvm.eager.nn.activation import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
)
from mlvm.eager.nn.attention import MultiHeadAttention
from mlvm.eager.nn.convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.linear import Bilinear, Embedding, EmbeddingBag, Linear
from mlvm.eager.nn.module import Module, buffer
from mlvm.eager.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from mlvm.eager.nn.pooling import (
    AdaptiveAvgPool,
    AdaptiveMaxPool,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    GlobalAvgPool,
    GlobalMaxPool,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from mlvm.eager.nn.quantized import QuantizedEmbedding, QuantizedLinear
from mlvm.eager.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from mlvm.eager.nn.sequential import Sequential
from mlvm.eager.nn.shapes import Flatten, Identity, PixelShuffle, PixelUnshuffle, Upsample
from mlvm.eager.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "GRU",
    "LSTM",
    "RNN",
    "SELU",
    "AdaptiveAvgPool",
    "AdaptiveMaxPool",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "Flatten",
    "GRUCell",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "Identity",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "Module",
    "MultiHeadAttention",
    "PReLU",
    "PixelShuffle",
    "PixelUnshuffle",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "ReLU6",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "Upsample",
    "buffer",
    "init",
]
