"""Layers: Modules that hold parameters and are called on tensors.

A Module's fields are its parameters, submodules and buffers, assigned in `__init__`; annotations
on the class head are the inventory. Modules are trees, so `value_and_grad` and the optimizers
take them as they are.

Parameters are allocated in the current arena. They are drawn with `key`, a u64[2] of
`mlvm.eager.random`, or with the next global key where that is None. Bad hyperparameters raise
`AttributeRefused`, and a `dtype` that is no float `DTypeError`. So does an x of another float
beside weights that are halves; beside f32 weights, an x of halves is widened.
"""

from mlvm.eager.nn import layer as _names_the_layer_in_errors  # noqa: F401
from mlvm.eager.nn import summary as _gives_modules_summary  # noqa: F401
from mlvm.eager.nn.activation import (
    ELU,
    GELU,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from mlvm.eager.nn.attention import MultiHeadAttention
from mlvm.eager.nn.convolution import Conv1d, Conv2d, ConvTranspose2d
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.linear import Embedding, Linear
from mlvm.eager.nn.module import Module, buffer
from mlvm.eager.nn.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from mlvm.eager.nn.pooling import AvgPool2d, GlobalAvgPool, MaxPool2d
from mlvm.eager.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from mlvm.eager.nn.sequential import Sequential

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "LSTM",
    "RNN",
    "AvgPool2d",
    "BatchNorm",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GRUCell",
    "GlobalAvgPool",
    "GroupNorm",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "Module",
    "MultiHeadAttention",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "buffer",
]
