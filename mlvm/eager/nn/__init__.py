"""Layers: Modules that contain parameters and are called on tensors.

The fields of a Module are its parameters, submodules and buffers, assigned in `__init__`; the
annotations in the class body list them. Modules are trees, so they can be passed to
`value_and_grad` and to the optimizers.

Parameters are allocated in the current arena. They are drawn with `key`, a u64[2] of
`mlvm.eager.random`, or with the next global key if `key` is None. `kernel_init=`, `bias_init=` and
similar options set their initial values; they are functions as in `mlvm.eager.nn.init`. Invalid
hyperparameters raise `ArgumentError`, and a `dtype` that is not a float raises `DTypeError`. An x
that is wider than half-precision weights also raises `DTypeError`; a half-precision x is converted
to f32 for f32 weights.
"""

from mlvm.eager.nn import init
from mlvm.eager.nn import layer as _names_the_layer_in_errors  # noqa: F401
from mlvm.eager.nn import summary as _gives_modules_summary  # noqa: F401
from mlvm.eager.nn.activation import CELU as CELU
from mlvm.eager.nn.activation import ELU as ELU
from mlvm.eager.nn.activation import GELU as GELU
from mlvm.eager.nn.activation import GLU as GLU
from mlvm.eager.nn.activation import SELU as SELU
from mlvm.eager.nn.activation import Hardshrink as Hardshrink
from mlvm.eager.nn.activation import Hardsigmoid as Hardsigmoid
from mlvm.eager.nn.activation import Hardswish as Hardswish
from mlvm.eager.nn.activation import Hardtanh as Hardtanh
from mlvm.eager.nn.activation import LeakyReLU as LeakyReLU
from mlvm.eager.nn.activation import LogSigmoid as LogSigmoid
from mlvm.eager.nn.activation import LogSoftmax as LogSoftmax
from mlvm.eager.nn.activation import Mish as Mish
from mlvm.eager.nn.activation import PReLU as PReLU
from mlvm.eager.nn.activation import ReLU as ReLU
from mlvm.eager.nn.activation import ReLU6 as ReLU6
from mlvm.eager.nn.activation import Sigmoid as Sigmoid
from mlvm.eager.nn.activation import SiLU as SiLU
from mlvm.eager.nn.activation import Softmax as Softmax
from mlvm.eager.nn.activation import Softplus as Softplus
from mlvm.eager.nn.activation import Softshrink as Softshrink
from mlvm.eager.nn.activation import Softsign as Softsign
from mlvm.eager.nn.activation import Tanh as Tanh
from mlvm.eager.nn.activation import Tanhshrink as Tanhshrink
from mlvm.eager.nn.attention import MultiHeadAttention as MultiHeadAttention
from mlvm.eager.nn.convolution import Conv1d as Conv1d
from mlvm.eager.nn.convolution import Conv2d as Conv2d
from mlvm.eager.nn.convolution import Conv3d as Conv3d
from mlvm.eager.nn.convolution import ConvTranspose1d as ConvTranspose1d
from mlvm.eager.nn.convolution import ConvTranspose2d as ConvTranspose2d
from mlvm.eager.nn.convolution import ConvTranspose3d as ConvTranspose3d
from mlvm.eager.nn.dropout import Dropout as Dropout
from mlvm.eager.nn.dropout import Dropout1d as Dropout1d
from mlvm.eager.nn.dropout import Dropout2d as Dropout2d
from mlvm.eager.nn.dropout import Dropout3d as Dropout3d
from mlvm.eager.nn.linear import Bilinear as Bilinear
from mlvm.eager.nn.linear import Embedding as Embedding
from mlvm.eager.nn.linear import EmbeddingBag as EmbeddingBag
from mlvm.eager.nn.linear import Linear as Linear
from mlvm.eager.nn.module import Module as Module
from mlvm.eager.nn.module import buffer as buffer
from mlvm.eager.nn.norm import BatchNorm as BatchNorm
from mlvm.eager.nn.norm import GroupNorm as GroupNorm
from mlvm.eager.nn.norm import InstanceNorm as InstanceNorm
from mlvm.eager.nn.norm import LayerNorm as LayerNorm
from mlvm.eager.nn.norm import RMSNorm as RMSNorm
from mlvm.eager.nn.pooling import AdaptiveAvgPool as AdaptiveAvgPool
from mlvm.eager.nn.pooling import AdaptiveMaxPool as AdaptiveMaxPool
from mlvm.eager.nn.pooling import AvgPool1d as AvgPool1d
from mlvm.eager.nn.pooling import AvgPool2d as AvgPool2d
from mlvm.eager.nn.pooling import AvgPool3d as AvgPool3d
from mlvm.eager.nn.pooling import GlobalAvgPool as GlobalAvgPool
from mlvm.eager.nn.pooling import GlobalMaxPool as GlobalMaxPool
from mlvm.eager.nn.pooling import MaxPool1d as MaxPool1d
from mlvm.eager.nn.pooling import MaxPool2d as MaxPool2d
from mlvm.eager.nn.pooling import MaxPool3d as MaxPool3d
from mlvm.eager.nn.quantization import QuantizedEmbedding as QuantizedEmbedding
from mlvm.eager.nn.quantization import QuantizedLinear as QuantizedLinear
from mlvm.eager.nn.rnn import GRU as GRU
from mlvm.eager.nn.rnn import LSTM as LSTM
from mlvm.eager.nn.rnn import RNN as RNN
from mlvm.eager.nn.rnn import GRUCell as GRUCell
from mlvm.eager.nn.rnn import LSTMCell as LSTMCell
from mlvm.eager.nn.rnn import RNNCell as RNNCell
from mlvm.eager.nn.sequential import Sequential as Sequential
from mlvm.eager.nn.shapes import Flatten as Flatten
from mlvm.eager.nn.shapes import Identity as Identity
from mlvm.eager.nn.shapes import PixelShuffle as PixelShuffle
from mlvm.eager.nn.shapes import PixelUnshuffle as PixelUnshuffle
from mlvm.eager.nn.shapes import Upsample as Upsample
from mlvm.eager.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
from mlvm.eager.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer
from mlvm.eager.tensor.wrapper import names_shown as _names_shown

__all__ = ["init", *_names_shown(globals())]
