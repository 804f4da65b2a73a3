"""What docstrings of public names say of shapes and errors, held against what the names do.

A docstring that is about tensors says their shapes. The classes of `ml.errors` that it names are
those that its function raises: every wrong call below must raise one that the docstring names, and
every class that it names must come from some wrong call. Said once, for all functions (in the
docstring of `mlvm.eager`), and not looked for here, are the errors of what is no tensor, of an
argument of a wrong kind, of an unknown dtype, and of memory that has ended or does not suffice.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from threading import Event, Thread
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS
from mlvm.core.program.assembly import assemble
from mlvm.core.types import DType, TensorType
from mlvm.eager.tensor import primitives
from mlvm.machines.wire import WireVM
from mlvm.show import picture as _picture  # noqa: F401 (these add methods, once imported)
from mlvm.show import report as _report  # noqa: F401
from mlvm.show import trace as _trace  # noqa: F401
from tests.brief import refuses
from tests.cases import CASES
from tests.test_docstrings import public

BRACKETS_OR_WORD = re.compile(r"\w*\[[^\]`\"]*\]|\bshapes?\b")
TENSORS = re.compile(r"\b(Tensor|Operand|Tree)\b")
EXAMPLE = re.compile(r"^ *>>> .*\n?(?:^.*\S.*\n?)*", re.MULTILINE)
AS = re.compile(r"what `([\w.]+)`(?:(?:, `([\w.]+)`)? and `([\w.]+)`)? raises?")

BASES = {"nn.Module", "optim.Group"}
"""Classes of tensors of any shapes."""

ERRORS = {name: getattr(ml.errors, name) for name in dir(ml.errors)}

GOOD = """
ml.adaptive_avg_pool(images, 2)
ml.adaptive_max_pool(images, 2)
ml.astype(x, "f32")
ml.avg_pool1d(sequences, 2)
ml.avg_pool3d(volumes, 2)
ml.binary_cross_entropy(half, half)
ml.average(v, weights=v)
ml.binary_cross_entropy_with_logits(x, half)
ml.bincount(ints, v)
ml.cdist(x, x)
ml.clip(v, v, v)
ml.concat([v, v])
ml.conv1d(sequences, ml.ones((2, 2, 3)))
ml.conv3d(volumes, ml.ones((2, 2, 2, 2, 3)))
ml.conv_transpose1d(sequences, ml.ones((2, 3, 2)))
ml.conv_transpose2d(images, ml.ones((2, 2, 3, 2)))
ml.conv_transpose3d(volumes, ml.ones((2, 2, 2, 3, 2)))
ml.cosine_embedding(x, half, v[0] * ml.ones(4))
ml.cosine_similarity(x, half)
ml.ctc(ml.log(ml.full((4, 2, 3), 0.5)), ml.asarray([[1], [2]]), ints + 3, ml.asarray([1, 1]))
ml.cov(v, v)
ml.cross(ml.ones(3), ml.ones(3))
ml.cummax(v)
ml.cummin(v)
ml.cumulative_prod(v)
ml.digitize(v, v)
ml.dropout(x, 0.5)
ml.einsum("ij,jk->ik", x, x)
ml.embedding_bag(x, ints)
ml.expand_dims(x, 0)
ml.fold(ml.ones((1, 2, 2, 2, 2, 1)), 3)
ml.full_like(v, 1.0)
ml.gaussian_nll(x, half, half)
ml.grid_sample(images, ml.ones((1, 2, 2, 2)))
ml.hinge(x, half)
ml.interpolate(images, 2)
ml.kl_divergence(x, half)
ml.margin_ranking(x, half, half)
ml.max_pool1d(sequences, 2)
ml.max_pool3d(volumes, 2)
ml.histogram(v, 3, weights=v)
ml.interp(v, v, v)
ml.istft(ml.ones((2, 3), dtype="c64"), 2, window=v)
ml.kl_divergence(x, half)
ml.lerp(v, v, v)
ml.logcumsumexp(v)
ml.meshgrid(v, v)
ml.moveaxis(x, 0, 1)
ml.nll(x, ml.asarray([0, 1, 2, 3]))
ml.one_hot(ints, 3)
ml.outer(v, v)
ml.pixel_shuffle(ml.ones((1, 2, 2, 4)), 2)
ml.pixel_unshuffle(images, 2)
ml.poisson_nll(x, half)
ml.prelu(x, ml.ones(4))
ml.percentile(v, v)
ml.polygamma(1, v)
ml.quantile(v, v / 9.0)
ml.repeat(v, 2)
ml.rotary_encoding(x)
ml.scatter_add(v, 0, v[0])
ml.searchsorted(v, v)
ml.segment_max(v, ints)
ml.segment_mean(v, ints)
ml.segment_min(v, ints)
ml.segment_prod(v, ints)
ml.segment_sum(v, ints, 2)
ml.sinusoidal_encoding(ints, 4)
ml.smooth_l1(x, half)
ml.softmax_cross_entropy(x, ml.asarray([0, 1, 2, 3]))
ml.split(ml.arange(4), 2)
ml.squeeze(ml.ones((1, 2)), 0)
ml.stack([v, v])
ml.take_along_axis(v, ints)
ml.stft(v, 2, window=v)
ml.tile(v, 2)
ml.topk(v, 1)
ml.triplet_margin(x, half, half)
ml.unfold(images, 2)
ml.trapezoid(v, v)
ml.vdot(v, v)
ml.vecdot(v, v)
ml.linalg.cross(ml.ones(3), ml.ones(3))
ml.linalg.lu_solve(ml.linalg.lu_factor(x), x)
ml.linalg.matrix_power(x, 2)
ml.linalg.outer(v, v)
ml.linalg.vecdot(v, v)
ml.random.bernoulli(2, half[0, :2])
ml.random.beta(v, v)
ml.random.binomial(ints, half[0, :2])
ml.random.categorical(v)
ml.random.dirichlet(v)
ml.random.gamma(v)
ml.random.multinomial(ints[0], v)
ml.random.choice(v)
ml.random.permutation(v)
ml.random.set_state(key)
ml.random.poisson(v)
ml.random.split(key)
ml.random.student_t(v)
"""
"""Right calls of functions of tensors, but for those that take two matrices of 4 by 4, or what the
first case of an op has. From each are made wrong ones: with another dtype or shape of an operand,
and with an axis that there is not."""

LAYERS = """
ml.nn.AdaptiveAvgPool(2) of images
ml.nn.AdaptiveMaxPool(2) of images
ml.nn.AvgPool1d(2) of sequences
ml.nn.AvgPool2d(2) of images
ml.nn.AvgPool3d(2) of volumes
ml.nn.BatchNorm(4) of x
ml.nn.CELU() of x
ml.nn.Conv1d(2, 3, 2) of sequences
ml.nn.Conv2d(2, 3, 2) of images
ml.nn.Conv3d(2, 3, 2) of volumes
ml.nn.ConvTranspose1d(2, 3, 2) of sequences
ml.nn.ConvTranspose2d(2, 3, 2) of images
ml.nn.ConvTranspose3d(2, 3, 2) of volumes
ml.nn.Dropout(0.5) of x
ml.nn.ELU() of x
ml.nn.Embedding(5, 3) of ints
ml.nn.EmbeddingBag(5, 3) of ints
ml.nn.Flatten(1) of x
ml.nn.GELU() of x
ml.nn.GLU() of x
ml.nn.GRU(2, 8) of sequences
ml.nn.GRUCell(4, 8) of x
ml.nn.GlobalAvgPool() of images
ml.nn.GlobalMaxPool() of images
ml.nn.GroupNorm(1, 2) of images
ml.nn.Hardshrink() of x
ml.nn.Hardsigmoid() of x
ml.nn.Hardswish() of x
ml.nn.Hardtanh() of x
ml.nn.Identity() of x
ml.nn.InstanceNorm(2) of images
ml.nn.LSTM(2, 8) of sequences
ml.nn.LSTMCell(4, 8) of x
ml.nn.LayerNorm(4) of x
ml.nn.LeakyReLU() of x
ml.nn.Linear(4, 2) of x
ml.nn.LogSigmoid() of x
ml.nn.LogSoftmax() of x
ml.nn.MaxPool1d(2) of sequences
ml.nn.MaxPool2d(2) of images
ml.nn.MaxPool3d(2) of volumes
ml.nn.Mish() of x
ml.nn.MultiHeadAttention(2, 1) of sequences
ml.nn.PixelShuffle(1) of images
ml.nn.PixelUnshuffle(2) of images
ml.nn.PReLU(4) of x
ml.nn.RMSNorm(4) of x
ml.nn.RNN(2, 8) of sequences
ml.nn.RNNCell(4, 8) of x
ml.nn.ReLU() of x
ml.nn.ReLU6() of x
ml.nn.SELU() of x
ml.nn.Sequential(ml.tanh) of x
ml.nn.SiLU() of x
ml.nn.Sigmoid() of x
ml.nn.Softmax() of x
ml.nn.Softplus() of x
ml.nn.Softshrink() of x
ml.nn.Softsign() of x
ml.nn.Tanh() of x
ml.nn.Tanhshrink() of x
ml.nn.TransformerEncoderLayer(2, 1) of sequences
ml.nn.Upsample(2) of images
"""
"""A layer of each kind, and what it takes: likewise."""

WRONG = """
ArenaError ml.Arena(vm, "a", capacity=-1)
ArenaError ml.Arena(5, "a")
ArgumentError ml.binary_cross_entropy(half, half, reduction="most")
ArgumentError ml.cosine_embedding(x, half, ml.ones(4), reduction="most")
ArgumentError ml.cosine_similarity(x, half, eps=0.0)
ArgumentError ml.ctc(ml.zeros((4, 1, 2)), [[1]], [3], [1], blank=2)
PositionRefused ml.ctc(ml.zeros((4, 1, 2)), [[5]], [3], [1])
PositionRefused ml.embedding_bag(ml.ones((1, 2)), ints)
ArgumentError ml.embedding_bag(x, ints, mode="most")
DTypeError ml.embedding_bag(x, x)
ArgumentError ml.gaussian_nll(x, half, half, eps=0.0)
ArgumentError ml.grid_sample(images, ml.ones((1, 2, 2, 2)), mode="most")
ArgumentError ml.hinge(x, half, reduction="most")
ArgumentError ml.interpolate(images)
ArgumentError ml.margin_ranking(x, half, half, reduction="most")
ArgumentError ml.nll(x, ml.asarray([0, 1, 2, 3]), reduction="most")
OperandValueError ml.nll(x, ml.asarray([0, 1, 2, 9]))
ArgumentError ml.pixel_shuffle(images, 0)
ArgumentError ml.pixel_unshuffle(images, 0)
ArgumentError ml.poisson_nll(x, half, reduction="most")
ArgumentError ml.smooth_l1(x, half, beta=0.0)
ArgumentError ml.triplet_margin(x, half, half, p=0.0)
ArenaBusy Arena: busy.mark()
ArenaOverflow Arena: tight.alloc(x.type)
OutOfMemory ml.Arena(vm, "a", capacity=2**60)
HandleError DryVM: ml.DryVM().read(5)
PipelineError ml.Pipeline([1.0], 0)
ShutDown Pipeline: list(ml.Pipeline([1.0], 1, epochs=0))
ArenaError ml.QueueTensor(vm, ["f32[2]"], 0)
DTypeError ml.QueueTensor(vm, ["f99[2]"], 1)
OutOfMemory ml.QueueTensor(vm, ["f32[1125899906842624]"], 4)
ShapeError ml.QueueTensor(vm, ["f32[-2]"], 1)
ArenaError ml.ScratchPad(vm, -1)
OutOfMemory ml.ScratchPad(vm, 2**60)
ArgumentError ml.nn.Bilinear(0, 2, 3)
DTypeError ml.nn.Bilinear(4, 4, 2, dtype=ml.float16)(x, x)
ShapeError ml.nn.Bilinear(4, 4, 3)(v, v)
ArgumentError ml.nn.EmbeddingBag(0, 3)
PositionRefused ml.nn.EmbeddingBag(1, 3)(ints)
ShapeError ml.nn.EmbeddingBag(5, 3)(ints[0])
ArgumentError ml.nn.Flatten(-1)
ArgumentError ml.nn.init.constant("1", 2)
ShapeError ml.nn.init.constant(1.0, -2)
DTypeError ml.nn.init.constant(1.0, 2, dtype="i64")
DTypeError ml.nn.init.kaiming_normal((2, 2), dtype="i64")
ShapeError ml.nn.init.kaiming_normal((2, 2), key=v)
ArgumentError ml.nn.init.kaiming_normal(2)
DTypeError ml.nn.init.kaiming_uniform((2, 2), dtype="i64")
ShapeError ml.nn.init.kaiming_uniform((2, 2), key=v)
ArgumentError ml.nn.init.kaiming_uniform(2)
DTypeError ml.nn.init.lecun_normal((2, 2), dtype="i64")
ShapeError ml.nn.init.lecun_normal((2, 2), key=v)
ArgumentError ml.nn.init.lecun_normal(2)
DTypeError ml.nn.init.lecun_uniform((2, 2), dtype="i64")
ShapeError ml.nn.init.lecun_uniform((2, 2), key=v)
ArgumentError ml.nn.init.lecun_uniform(2)
DTypeError ml.nn.init.normal(2, dtype="i64")
ShapeError ml.nn.init.normal(2, key=v)
ArgumentError ml.nn.init.normal(2, std="1")
ShapeError ml.nn.init.ones(-2)
DTypeError ml.nn.init.ones(2, dtype="i64")
DTypeError ml.nn.init.orthogonal((2, 2), dtype="i64")
ShapeError ml.nn.init.orthogonal((2, 2), key=v)
ArgumentError ml.nn.init.orthogonal(2)
DTypeError ml.nn.init.truncated_normal(2, dtype="i64")
ShapeError ml.nn.init.truncated_normal(2, key=v)
ArgumentError ml.nn.init.truncated_normal(2, lower=3.0)
DTypeError ml.nn.init.uniform(2, dtype="i64")
ShapeError ml.nn.init.uniform(2, key=v)
ArgumentError ml.nn.init.uniform(2, low=2.0)
DTypeError ml.nn.init.xavier_normal((2, 2), dtype="i64")
ShapeError ml.nn.init.xavier_normal((2, 2), key=v)
ArgumentError ml.nn.init.xavier_normal(2)
DTypeError ml.nn.init.xavier_uniform((2, 2), dtype="i64")
ShapeError ml.nn.init.xavier_uniform((2, 2), key=v)
ArgumentError ml.nn.init.xavier_uniform(2)
ShapeError ml.nn.init.zeros(-2)
DTypeError ml.nn.init.zeros(2, dtype="i64")
ArgumentError ml.nn.InstanceNorm(0)
ArgumentError ml.nn.PixelShuffle(0)
ShapeError ml.nn.PixelShuffle(2)(images)
ArgumentError ml.nn.PixelUnshuffle(0)
DTypeError ml.nn.TransformerDecoderLayer(2, 1)(ml.ones((1, 4, 2), dtype="c64"), sequences)
ShapeError ml.nn.TransformerDecoderLayer(4, 2)(x, x)
ArgumentError ml.nn.TransformerDecoderLayer(4, 3)
ArgumentError ml.nn.TransformerEncoderLayer(4, 3)
ArgumentError ml.nn.Upsample()
StaleTensor Tensor: stale + 1.0
DTypeError ml.TensorType("f99")
ShapeError ml.TensorType("f32", (-1,))
MachineError ml.VM(threads=2, native=False)
UnknownFunction ml.VM(kernels={"nothing": None})
ArgumentError ml.adaptive_avg_pool(images, 0)
ArgumentError ml.adaptive_max_pool(images, 0)
ArgumentError ml.arange(0, 3, 0)
ArgumentError ml.arange(300, dtype="u8")
DTypeError ml.arange(3, dtype="bool")
CopyRefused ml.asarray([1.0], copy=False)
DTypeError ml.asarray("text")
OperandValueError ml.asarray([300], dtype="u8")
ShapeError ml.asarray([[1.0], [1.0, 2.0]])
ArgumentError ml.avg_pool1d(sequences, 0)
ArgumentError ml.avg_pool2d(images, 0)
ArgumentError ml.avg_pool3d(volumes, 0)
ArgumentError ml.batch(ml.sin)([v], 1)
CaptureError batch: ml.batch(lambda x: float(x))([ml.ones(())])
DTypeError batch: ml.batch(ml.sin)([v, ml.arange(3)])
GradientError batch: ml.grad(lambda v: ml.grad(lambda v: ml.batch(ml.sin)([v[0]])[0])(v)[0])(v)
LimitExceeded batch: ml.batch(deeper)([ml.ones(())])
ShapeError batch: ml.batch(ml.sin)([ml.ones((1, 2)), ml.ones((1, 3))])
ArgumentError ml.binary_cross_entropy_with_logits(x, half, reduction="most")
ShapeError ml.broadcast_shapes((2,), (3,))
ArgumentError ml.bincount(ints, minlength=-1)
PositionRefused ml.bincount(ints, length=1)
ArgumentError ml.call("doubled", v, how=object())
ArgumentError ml.cdist(x, x, -1.0)
DTypeError ml.call("doubled", 1.0)
GradientError call: ml.grad(lambda x: ml.sum(ml.call("doubled", x)))(v)
StaleTensor ml.call("doubled", stale)
UnknownFunction ml.call("nothing")
DTypeError ml.can_cast(ml.float32, "f99")
ArgumentError ml.capture(hoist="no")
CaptureError ml.capture(lambda x: float(x))(ml.ones(()))
GradientError capture: ml.grad(ml.capture(ml.sum))(v)
ArgumentError ml.ScalarLog("nowhere", purge_step=-1)
ArgumentError ml.check(True, 3)
CheckFailed ml.check(False, "never")
DTypeError ml.check(v, "floats")
GradientError checkpoint: ml.grad(lambda x: ml.checkpoint(leaky)(x) + ml.sum(leaked[-1]))(v)
AxisRefused ml.quantize_linear(v, v, axis=3)
DTypeError ml.quantize_linear(v, ml.ones(()), dtype="f32")
ShapeError ml.quantize_linear(v, ml.ones(7), axis=0)
AxisRefused ml.dequantize_linear(v, v, axis=3)
DTypeError ml.dequantize_linear(ml.ones(3, dtype="c64"), ml.ones(()))
ShapeError ml.dequantize_linear(v, ml.ones(7), axis=0)
DTypeError ml.dynamic_quantize_linear(ml.ones(2, dtype="c64"))
ShapeError ml.dynamic_quantize_linear(ml.ones(0))
DTypeError ml.quantize_groups(v, "f32")
ShapeError ml.quantize_groups(ml.ones(6), group=4)
OperandValueError ml.dequantize_rows(ml.asarray([9]), *few)
ShapeError ml.dequantize_rows(ml.asarray([0]), ml.ones(4, dtype="i8"), ml.ones(1))
DTypeError ml.dequantize_rows(ml.asarray([0.0]), *few)
ArgumentError ml.quantize(ml.nn.LayerNorm(3))
DTypeError ml.quantize(ml.nn.Linear(2, 3), "f32")
ShapeError ml.quantize(ml.nn.Linear(6, 3), group=4)
ArgumentError ml.quantization_errors(ml.nn.Linear(2, 3), ml.nn.Linear(2, 3))
ShapeError ml.nn.QuantizedLinear(v, v)
DTypeError nn.QuantizedLinear: ml.nn.QuantizedLinear(few[1], few[1], dynamic=True)
OperandValueError nn.QuantizedEmbedding: ml.nn.QuantizedEmbedding(*few)([5])
DTypeError ml.concat([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])
DTypeError ml.cond(True, 1, 2)
ShapeError ml.cond(v, ml.sin, ml.cos, v)
AccessRefused ml.connect(":1", secret="short")
AddressError ml.connect("nowhere")
ConnectionLost ml.connect("unix:nowhere")
ArgumentError ml.conv1d(sequences, ml.ones((2, 2, 3)), stride=0)
ArgumentError ml.conv2d(images, ml.ones((2, 2, 2, 3)), groups=0)
ArgumentError ml.conv3d(volumes, ml.ones((2, 2, 2, 2, 3)), dilation=0)
ArgumentError ml.conv_transpose1d(sequences, ml.ones((2, 3, 2)), stride=0)
ArgumentError ml.conv_transpose2d(images, ml.ones((2, 2, 3, 2)), padding="most")
ArgumentError ml.conv_transpose2d(images, ml.ones((2, 2, 3, 2)), padding=((1, 1),))
ArgumentError ml.conv_transpose3d(volumes, ml.ones((2, 2, 2, 3, 2)), stride=0)
DTypeError ml.cumulative_prod(v, dtype="bool")
DTypeError ml.cumulative_sum(v, dtype="bool")
ArgumentError ml.diff(v, n=-1)
ShapeError ml.diff(v, prepend=x)
ArgumentError ml.dropout(v, 1.0)
ShapeError ml.dropout(v, 0.5, key=v)
OperandValueError ml.dynamic_update(v, ml.ones(()), 9)
ArgumentError ml.einsum("ij,jk->ik", x)
DTypeError ml.einsum("i,i->", bools, bools)
DTypeError ml.elu("text")
DTypeError ml.empty(2, dtype="f99")
ShapeError ml.empty(-2)
DTypeError ml.empty_like(v, dtype="f99")
DTypeError ml.eye(2, dtype="f99")
ShapeError ml.eye(-2)
DTypeError ml.autocast("float32")
ArgumentError ml.autocast("bfloat16")(ml.nn.Linear)
DTypeError ml.finfo(ml.int64)
ArgumentError ml.fold(ml.ones((1, 2, 2, 2, 2, 1)), 0)
DTypeError ml.fori_loop(0.0, 3, lambda i, x: x, v)
ShapeError ml.fori_loop(0, 3, lambda i, x: ml.sum(x), v)
CopyRefused ml.from_dlpack(np.ones(2), copy=False)
NoExchange ml.from_dlpack(5)
DTypeError ml.full(2, 1.5, dtype="i64")
OperandValueError ml.full(2, 300, dtype="u8")
ShapeError ml.full(-2, 1.0)
DTypeError ml.full_like(ints, 1.5)
OperandValueError ml.full_like(ml.ones(2, dtype="u8"), 300)
ShapeError ml.full_like(v, v)
CaptureError function: ml.capture(lambda x: ml.function(lambda x: x * ml.random.normal())(x))(v)
ArgumentError ml.histogram(v, 0)
ShapeError ml.histogram(v, ml.ones(1))
ArgumentError ml.hamming(-1)
DTypeError ml.hamming(2, dtype="i64")
ArgumentError ml.hanning(-1)
DTypeError ml.hanning(2, dtype="i64")
ArgumentError ml.huber(x, half, delta=0.0)
DTypeError ml.iinfo(ml.float32)
ArgumentError ml.isdtype(ml.float32, "odd")
DTypeError ml.isdtype("f99", "bool")
DTypeError ml.isin(1, 2)
ArgumentError ml.istft(x * 1j, 0)
DTypeError ml.istft(x, 4)
ArgumentError ml.kl_divergence(x, half, reduction="most")
ArgumentError ml.l1(x, half, reduction="most")
DTypeError ml.leaky_relu("text")
ArgumentError ml.linspace(0.0, 1.0, -1)
ArgumentError ml.linspace(0.0, 1j, 3, dtype="f32")
DTypeError ml.linspace(0.0, 1.0, 3, dtype="i64")
DTypeError ml.load("layer", into=ml.nn.Linear(2, 3, dtype="f64"))
PathError ml.load("layer", into=ml.nn.Dropout(0.5))
ShapeError ml.load("layer", into=ml.nn.Linear(2, 4))
WeightsError ml.load("damaged")
ArgumentError ml.max_pool1d(sequences, 0)
ArgumentError ml.max_pool2d(images, 0)
ArgumentError ml.max_pool3d(volumes, 0)
ArgumentError ml.mean_squared_error(x, half, reduction="most")
ArgumentError ml.measure(ml.sum, v, fuse="no")
CaptureError ml.measure(lambda x: float(x), ml.TensorType("f32"))
ArgumentError ml.meshgrid(v, indexing="yx")
ArgumentError ml.moveaxis(x, (0, 1), (0,))
ArgumentError ml.one_hot(ints, -1)
PositionRefused ml.one_hot(ints, 1)
DTypeError ml.ones(2, dtype="f99")
ShapeError ml.ones(-2)
DTypeError ml.ones_like(v, dtype="f99")
ArgumentError ml.pad(x, (1, 2, 3))
ArgumentError ml.pad(ints, 1, 0.5)
ArgumentError ml.pad(x, 1, mode="odd")
ShapeError ml.pad(x[:0], 1, mode="edge")
ArgumentError ml.permute_dims(x, (0,))
DTypeError ml.positive("text")
ArgumentError ml.polygamma(-1, v)
OperandValueError ml.pow(ints, ml.asarray([-1, 1]))
ArgumentError ml.percentile(v, 101.0)
ProgramError ml.program_of(ml.nonzero, v)
ArgumentError ml.quantile(v, 1.5)
ArgumentError ml.repeat(v, -1)
DTypeError ml.repeat(v, v)
ShapeError ml.repeat(v, ml.asarray([1, 2, 3]))
DTypeError ml.result_type(ml.uint64, ml.int64)
ArgumentError ml.roll(v, (1, 2), 0)
ArgumentError ml.rot90(x, 1, (0,))
ArgumentError ml.rotary_encoding(ml.ones((5, 3)))
DTypeError ml.rotary_encoding(ml.ones((5, 4), dtype="i64"))
DTypeError ml.save("x", {"x": len})
ArgumentError ml.save("x", {"x": ml.ones(1)}, where="y")
PathError ml.save("x", {"x/y": 1, "x": {"y": ml.ones(1), "z": 1}})
StaleTensor ml.save("x", {"x": stale})
WeightsError ml.save("x", {"x": ml.ones(2, dtype="c128")})
ArgumentError ml.scaled_dot_product_attention(x, x, x, dropout=2.0)
DTypeError ml.scaled_dot_product_attention(x, x, x, x)
CaptureError ml.scan(lambda s, x: (s, x * float(x)), v, v[:0])
DTypeError ml.scan(lambda s, x: (s > 0, x), v, v)
OperandValueError ml.scan(lambda s, x: (s, x), v, v, length=ml.asarray(9))
ShapeError ml.scan(lambda s, x: (s, x), v, v, length=3)
IndexRefused ml.scatter_add(v, 9, 1.0)
DTypeError ml.scatter_add(v, 0, 1j)
PositionRefused ml.scatter_add(v, [9], 1.0)
ArgumentError ml.searchsorted(v, v, side="mid")
ArgumentError ml.segment_sum(v, ints, -1)
PositionRefused ml.segment_sum(v, ints, 1)
PositionRefused ml.searchsorted(v, v, sorter=ml.full(v.size, 9))
ShapeError ml.searchsorted(v, v, sorter=ml.arange(v.size + 1))
ProgramError ml.disassemble(5)
AxisRefused ml.diagonal(x, 0, 0, 5)
ArgumentError ml.sinusoidal_encoding(ints, 3)
ArgumentError ml.sinusoidal_encoding(ints, 4, base="x")
DTypeError ml.sinusoidal_encoding(ints, 4, dtype="i64")
ArgumentError ml.softmax_cross_entropy(x, ml.asarray([0, 1, 2, 3]), label_smoothing=2.0)
OperandValueError ml.softmax_cross_entropy(x, ml.asarray([0, 1, 2, 9]))
ShapeError ml.split(v, 3)
DTypeError ml.stack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])
ArgumentError ml.stft(v, 0)
DTypeError ml.stop_gradient("text")
ArgumentError ml.switch(0, [])
DTypeError ml.switch(0.5, [ml.sin], v)
ArgumentError ml.take(x, ints)
AxisRefused ml.tensordot(x, x, axes=((5,), (0,)))
ArgumentError ml.tile(v, -1)
ArgumentError ml.topk(v, 9)
ArgumentError ml.unfold(images, 0)
AxisRefused ml.trace(x, 0, 0, 5)
DTypeError ml.trace(x, dtype="bool")
ArgumentError ml.tril_indices(-1)
ArgumentError ml.triu_indices(2, 0, -1)
DTypeError ml.unique(x * 1j, axis=0)
MachineError ml.use("cpu")
ArgumentError ml.value_and_grad(ml.sum, where="w")(x)
DTypeError ml.value_and_grad(ml.sum)(ints)
GradientError ml.value_and_grad(lambda x: x)(v)
GradientError ml.custom_jvp(3)
GradientError ml.custom_vjp(3)
GradientError ml.custom_jvp(lambda x: x)(v)
GradientError ml.custom_vjp(lambda x: x)(v)
DTypeError ml.jacfwd(ml.sin)(ints)
GradientError ml.jacfwd(ml.floor)(v)
DTypeError ml.jacrev(lambda x: x + 0j)(v)
GradientError ml.jacrev(ml.floor)(v)
DTypeError ml.hessian(ml.sin)(ints)
GradientError ml.hvp(ml.sin, (v,), (v,))
DTypeError ml.jvp(ml.sin, (v,), (x, x))
ShapeError ml.jvp(ml.sin, (v,), (v[:1],))
GradientError ml.jvp(ml.floor, (v,), (v,))
CaptureError ml.jvp(lambda x: x * float(x[0]), (v,), (v,))
GradientError ml.linearize(ml.floor, v)
DTypeError ml.vjp(ml.sin, ints)
GradientError ml.vjp(ml.sin, v)[1](x)
DTypeError ml.while_loop(lambda x: True, lambda x: x > 0.0, v)
ShapeError ml.while_loop(lambda x: x > 0.0, lambda x: x, v)
DTypeError ml.zeros(2, dtype="f99")
ShapeError ml.zeros(-2)
DTypeError ml.zeros_like(v, dtype="f99")
ArgumentError ml.flatten(x, 1, 0)
AxisRefused ml.flatten(x, 9)
DTypeError ml.hstack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])
DTypeError ml.round(ints, 1)
AxisRefused ml.swapaxes(x, 0, 9)
DTypeError ml.unravel_index(v, (2, 3))
DTypeError ml.vstack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])
ArgumentError ml.fft.fft(v, norm="none")
ArgumentError ml.fft.fftfreq(0)
ArgumentError ml.fft.fftfreq(4, "x")
DTypeError ml.fft.fftfreq(4, dtype="i64")
ArgumentError ml.fft.fftn(x, s=(1,), axes=(0, 1))
ArgumentError ml.fft.hfft(v, norm="none")
ArgumentError ml.fft.ifft(v, norm="none")
ArgumentError ml.fft.ifftn(x, s=(1,), axes=(0, 1))
ArgumentError ml.fft.ihfft(v, norm="none")
ArgumentError ml.fft.irfft(v, norm="none")
ArgumentError ml.fft.irfftn(x, s=(1,), axes=(0, 1))
ArgumentError ml.fft.rfft(v, norm="none")
ArgumentError ml.fft.rfftfreq(4, 0.0)
DTypeError ml.fft.rfftfreq(4, dtype="i64")
ArgumentError ml.fft.rfftn(x, s=(1,), axes=(0, 1))
LinAlgError ml.linalg.cholesky(ml.zeros((2, 2)))
LinAlgError ml.linalg.cholesky_solve(ml.zeros((2, 2)), v)
LinAlgError linalg.det: ml.grad(lambda x: ml.sum(ml.grad(ml.linalg.det)(x)))(ml.zeros((2, 2)))
LinAlgError ml.linalg.lu_solve(ml.linalg.lu_factor(ml.ones((2, 2))), v)
LinAlgError ml.linalg.lstsq(nans, ml.ones(2))
ArgumentError ml.linalg.matrix_norm(x, ord=3)
LinAlgError ml.linalg.matrix_norm(nans, ord="nuc")
LinAlgError ml.linalg.matrix_power(ml.zeros((2, 2)), -1)
LinAlgError ml.linalg.matrix_rank(nans)
ArgumentError ml.linalg.norm(x, ord=3)
ShapeError ml.linalg.norm(ml.ones((2, 2, 2)), ord=2)
LinAlgError ml.linalg.pinv(nans)
ShapeError ml.linalg.pinv(x, rtol=v)
ArgumentError ml.linalg.qr(x, mode="r")
LinAlgError ml.linalg.solve(ml.zeros((4, 4)), x)
LinAlgError ml.linalg.solve_triangular(ml.zeros((2, 2)), v)
LinAlgError ml.linalg.svd(nans)
LinAlgError ml.linalg.svdvals(nans)
AxisRefused ml.linalg.tensordot(x, x, axes=((5,), (0,)))
DTypeError ml.linalg.trace(x, dtype="bool")
ArgumentError ml.linalg.vector_norm(v, ord="nuc")
ArgumentError ml.nn.AdaptiveAvgPool(0)
ArgumentError ml.nn.AdaptiveMaxPool(0)
ArgumentError ml.nn.AvgPool1d(0)
ArgumentError ml.nn.AvgPool2d(0)
ArgumentError ml.nn.AvgPool3d(0)
ArgumentError ml.nn.BatchNorm(0)
ArgumentError ml.nn.CELU(0.0)
ArgumentError ml.nn.Conv3d(2, 3, 0)
ArgumentError ml.nn.ConvTranspose1d(2, 3, 0)
ArgumentError ml.nn.ConvTranspose3d(2, 3, 0)
AxisRefused ml.nn.GLU(9)(v)
ArgumentError ml.nn.Hardshrink("1")
ArgumentError ml.nn.Hardtanh("1")
ArgumentError ml.nn.LeakyReLU("1")
ArgumentError ml.nn.Conv1d(2, 3, 2, groups=5)
ArgumentError ml.nn.Conv2d(2, 3, 2, groups=5)
ArgumentError ml.nn.ConvTranspose2d(2, 3, 0)
ArgumentError ml.nn.Dropout(1.0)
ArgumentError ml.nn.ELU("1")
ArgumentError ml.nn.Embedding(0, 3)
PositionRefused ml.nn.Embedding(1, 3)(ints)
ArgumentError ml.nn.GRU(2, 0)
ArgumentError ml.nn.GRUCell(0, 8)
ArgumentError ml.nn.GroupNorm(3, 4)
ArgumentError ml.nn.LSTM(2, 8, dropout=1.0)
ArgumentError ml.nn.LSTMCell(0, 8)
ArgumentError ml.nn.LayerNorm(4, eps=0.0)
ArgumentError ml.nn.Linear(0, 2)
DTypeError ml.nn.Linear(4, 2, dtype=ml.float16)(ml.ones(4))
AxisRefused ml.nn.LogSoftmax(9)(v)
ArgumentError ml.nn.MaxPool1d(0)
ArgumentError ml.nn.MaxPool2d(0)
ArgumentError ml.nn.MaxPool3d(0)
ArgumentError ml.nn.MultiHeadAttention(4, 3)
ArgumentError ml.nn.PReLU(0)
ArgumentError ml.nn.RMSNorm(4, eps=0.0)
ArgumentError ml.nn.RNN(2, 8, num_layers=0)
ArgumentError ml.nn.RNNCell(0, 8)
DTypeError ml.nn.RNNCell(4, 8)(x, ml.ones((4, 8), dtype="i64"))
AxisRefused ml.nn.Softmax(9)(v)
ArgumentError ml.nn.Softshrink("1")
DTypeError ml.nn.buffer(5)
ArgumentError ml.optim.Adadelta(v, -1.0)
ArgumentError ml.optim.Adafactor(v, -1.0)
ArgumentError ml.optim.Adagrad(v, -1.0)
ArgumentError ml.optim.Adam(v, -1.0)
ArgumentError ml.optim.AdamW(v, -1.0)
ArgumentError ml.optim.Adamax(v, -1.0)
ArgumentError ml.optim.EMA({})
ArgumentError ml.optim.LBFGS(v, -1.0)
ArgumentError ml.optim.Lamb(v, -1.0)
ArgumentError ml.optim.Lion(v, -1.0)
ArgumentError ml.optim.LossScale(0.5)
ArgumentError ml.optim.MultiSteps(None, 2)
ArgumentError ml.optim.Muon(v, -1.0)
ArgumentError ml.optim.NAdam(v, -1.0)
ArgumentError optim.Optimizer: ml.optim.SGD(v, 0.1, groups=[("w", {})])
DTypeError optim.Optimizer: ml.optim.SGD(ints, 0.1)
HandleError optim.Optimizer: ml.optim.SGD([v, ml.ones(2, device=vm)], 0.1)
ArgumentError ml.optim.Plateau(-1.0)
ArgumentError ml.optim.RAdam(v, -1.0)
ArgumentError ml.optim.RMSProp(v, -1.0)
ArgumentError ml.optim.SGD(v, -1.0)
DTypeError ml.optim.all_finite({"w": 5})
ArgumentError ml.optim.clip_by_global_norm({"w": v}, 0.0)
ArgumentError ml.optim.constant(-1.0)
ArgumentError ml.optim.cosine(1.0, 0)
ArgumentError ml.optim.cosine_restarts(1.0, 0)
ArgumentError ml.optim.exponential(1.0, -1.0)
DTypeError ml.optim.global_norm({"w": 5})
ArgumentError ml.optim.one_cycle(1.0, 0)
ArgumentError ml.optim.step(1.0, 0.5, 0)
ArgumentError ml.optim.warmup(1.0, 0)
GroupError ml.parallel.Group(0)
GroupError ml.parallel.ProcessGroup(0)
GroupError ml.parallel.RayGroup(0)
GroupError ml.parallel.TcpGroup(2, 2, ":1")
AccessRefused ml.parallel.TcpGroup(0, 2, ":1", secret="short")
AddressError ml.parallel.TcpGroup(0, 2, "unix:x")
GroupError parallel.all_gather_wait: members(lambda *_: ml.parallel.all_gather_wait(*two()))
GroupError parallel.reduce_scatter_wait: members(lambda *_: ml.parallel.reduce_scatter_wait(*two()))
GroupError parallel.all_gather: members(lambda rank, vm: ml.parallel.all_gather(ml.ones(2 + rank)))
ArgumentError ml.parallel.all_reduce(v, "most")
DTypeError ml.parallel.all_reduce(bools)
ArgumentError ml.parallel.rank("nobody")
ArgumentError ml.parallel.size("nobody")
ShapeError vmap: ml.vmap(ml.add)(v, v[:1])
AxisRefused vmap: ml.vmap(ml.abs, 5)(v)
ArgumentError vmap: ml.vmap(ml.abs, None)(v)
CaptureError vmap: ml.vmap(float)(v)
GradientError parallel.all_reduce: ml.grad(lambda x: [x * x, ml.parallel.all_reduce(x)])(v)
StaleTensor ml.parallel.all_reduce(stale)
GroupError parallel.all_reduce_wait: members(lambda *_: ml.parallel.all_reduce_wait(ml.ones(2)))
ArgumentError ml.parallel.broadcast(v, root=5)
ArgumentError ml.parallel.data_parallel(lambda vm: None, None, shard="most")
ShapeError parallel.data_parallel: ml.parallel.data_parallel(lambda vm: None, group)(ml.ones(3))
GroupError ml.parallel.group("friends")
ArgumentError ml.parallel.recv(2, source=0, dtype="f32")
ShapeError ml.parallel.reduce_scatter(ml.ones(()))
ShapeError parallel.reduce_scatter: members(lambda rank, vm: ml.parallel.reduce_scatter(ml.ones(3)))
ArgumentError ml.parallel.send(v, to=0)
GradientError ml.parallel.value_and_grad(lambda x: x)(v)
OperandValueError ml.random.bernoulli(3, 2.0)
OperandValueError ml.random.beta(-1.0, 1.0)
DTypeError ml.random.beta(1.0, 1.0, dtype="i64")
ShapeError ml.random.beta(v, 1.0, 3)
OperandValueError ml.random.binomial(-1, 0.5)
DTypeError ml.random.binomial(1, 0.5, dtype="f32")
DTypeError ml.random.cauchy(2, dtype="i64")
ShapeError ml.random.cauchy(-2)
OperandValueError ml.random.choice(2, 2, p=-v)
ArgumentError ml.random.choice(0, 2)
ArgumentError ml.random.choice(v, 1, axis="x")
AxisRefused ml.random.choice(v, 2, axis=1)
DTypeError ml.random.choice(2, 2, p=ints)
ShapeError ml.random.choice(3, 2, p=v)
OperandValueError ml.random.dirichlet(v * 0.0)
DTypeError ml.random.exponential(2, dtype="i64")
ShapeError ml.random.exponential(-2)
DTypeError ml.random.fold_in(key, 1.5)
OperandValueError ml.random.gamma(-1.0)
DTypeError ml.random.gamma(1.0, dtype="i64")
ShapeError ml.random.gamma(v, 3)
DTypeError ml.random.gumbel(2, dtype="i64")
ShapeError ml.random.gumbel(-2)
OperandValueError ml.random.key(-1)
DTypeError ml.random.laplace(2, dtype="i64")
ShapeError ml.random.laplace(-2)
OperandValueError ml.random.multinomial(-1, v)
DTypeError ml.random.multinomial(1, v, dtype="f32")
DTypeError ml.random.normal(2, dtype="i64")
ShapeError ml.random.normal(2, key=v)
ArgumentError ml.random.permutation(-1)
OperandValueError ml.random.poisson(-1.0)
DTypeError ml.random.poisson(1.0, dtype="f32")
ShapeError ml.random.poisson(v, 3)
DTypeError ml.random.rademacher(2, dtype="u8")
ShapeError ml.random.rademacher(-2)
ArgumentError ml.random.randint(2, low=3, high=1)
DTypeError ml.random.randint(2, low=0, high=2, dtype="f32")
ShapeError ml.random.randint(-2, low=0, high=2)
OperandValueError ml.random.seed(-1)
ShapeError ml.random.set_state(np.zeros(3))
ArgumentError ml.random.split(key, -1)
OperandValueError ml.random.student_t(-1.0)
DTypeError ml.random.student_t(1.0, dtype="i64")
ShapeError ml.random.student_t(v, 3)
ArgumentError ml.random.truncated_normal(1.0, -1.0, 2)
DTypeError ml.random.truncated_normal(-1.0, 1.0, 2, dtype="i64")
ShapeError ml.random.truncated_normal(v, 3.0, 3)
ArgumentError ml.random.uniform(2, low=2.0, high=1.0)
DTypeError ml.random.uniform(2, dtype="i64")
ShapeError ml.random.uniform(-2)
ArgumentError ml.testing.check_gradients(ml.sum, v, order=0)
GradientError ml.testing.check_gradients(ml.sum, ints)
GradientMismatch ml.testing.check_gradients(ml.relu, ml.zeros(1))
ArgumentError ml.testing.replacement(ml.relu, "relu", 3)
CheckFailed ml.testing.replacement(ml.exp, "sin", ml.TensorType("f32", (2,)))
UnknownFunction ml.testing.replacement(ml.relu, "none", ml.TensorType("f32", (2,)))
DTypeError ml.tree.leaves(endless)
DTypeError ml.tree.map(ml.add, [v], [v, v])
"""
"""More wrong calls, and what they raise."""

UNSEEN = {
    ("connect", "CallTimeout"): "it takes a launch that goes on, see tests/machines/remote",
    ("RemoteVM", "ConnectionLost"): "it takes a server that ends, see tests/machines/remote",
    ("VM", "MissingExtra"): "where the native machine was built",
    ("parallel.Group", "MissingExtra"): "where the package is installed",
    ("parallel.MpiGroup", "GroupError"): "it takes an MPI library of another kind",
    ("parallel.MpiGroup", "MissingExtra"): "where the packages are installed",
    ("parallel.ProcessGroup", "MissingExtra"): "where the package is installed",
    ("parallel.RayGroup", "MissingExtra"): "where the package is installed",
    ("parallel.TcpGroup", "MissingExtra"): "where the package is installed",
    (
        "linalg.eigh",
        "LinAlgError",
    ): "LAPACK may fail to converge; no matrix is known for which it does",
}
"""Errors that docstrings name and no cheap call raises, and why."""

NEVER = {
    "Dataset": "a protocol",
    "Measured": "a result",
    "PipelineState": "a result",
    "PipelineStats": "a result",
    "FrozenWarning": "a warning",
    "PrecisionWarning": "a warning",
    "RecompilationWarning": "a warning",
    "NoEffectWarning": "a warning",
    "ReplacementWarning": "a warning",
    "Recording": "a result; `record` makes it",
    "SampleRandom": "its draws raise, and say so",
    "Transform": "a protocol",
    "nn.Identity": "it gives back what it is given",
    "nn.Module": "what is made of it raises, and its methods",
    "nn.Sequential": "its layers raise",
    "nn.Tanh": "every tensor has one",
    "optim.Group": "its optimizer makes it",
    "parallel.AnyGroup": "an interface, of which `run` raises, and says so",
    "parallel.Parts": "a result",
    **{
        f"linalg.{name}Result": "a result"
        for name in ("Eig", "Eigh", "LU", "LUFactor", "Lstsq", "QR", "SVD", "Slogdet")
    },
    "default_arena": "it takes nothing",
    "default_vm": "it takes nothing",
    "devices": "it takes nothing",
    "record": "every arena can be recorded, also a closed one",
    "unique_all": "every tensor has values",
    "unique_counts": "every tensor has values",
    "unique_inverse": "every tensor has values",
    "unique_values": "every tensor has values",
    "random.next_key": "it takes nothing",
    "random.state": "it takes nothing",
    "parallel.barrier": "what the other members do is told by `Group.run`",
}
"""Functions and classes whose docstrings name no error, and why."""


def named() -> dict[str, Any]:
    """Numbers, tensors and modules that the calls use."""
    bools, ints, v = ml.asarray([True, False]), ml.asarray([0, 1]), ml.asarray([1.0, 2.0])
    x, half = ml.eye(4) * 4.0, ml.full((4, 4), 0.5)
    images, sequences = ml.ones((1, 4, 4, 2)), ml.ones((1, 4, 2))
    volumes, few = ml.ones((1, 2, 2, 2, 2)), ml.quantize_groups(half)
    key = ml.random.key(0)
    return {"ml": ml, "np": np, **locals()}


def prepared() -> dict[str, Any]:
    """What else wrong calls use."""
    local: Any = ml.default_vm()
    local.register("doubled", lambda frame: frame.push(frame.param(0) * 2))
    with ml.Arena(ml.VM("mine"), "ended"):
        stale = ml.ones(2)
    vm, leaked = ml.VM("other"), list[ml.Tensor]()
    tight = ml.Arena(vm, "tight", capacity=0)
    busy = ml.Arena(vm, "busy")
    begun, in_busy = busy.mark(), busy.alloc(ml.TensorType("f32", (2,)))
    inside = Event()
    stays = (busy.__enter__, inside.set, Event().wait)
    Thread(target=lambda: [each() for each in stays], daemon=True).start()
    inside.wait()

    @ml.function
    def deeper(x: ml.Tensor) -> ml.Tensor:
        found: ml.Tensor = ml.cond(x < 0.0, lambda: x, lambda: deeper(x + 1.0))
        return found

    def leaky(x: ml.Tensor) -> ml.Tensor:
        leaked.append(x * 2.0)
        return ml.sum(x)

    endless: list[Any] = []
    endless.append(endless)
    group = ml.parallel.Group(2)
    members = group.run

    def two() -> tuple[ml.Tensor, ml.Tensor]:
        return ml.ones(2), ml.ones(2)

    return {"nans": ml.full((2, 2), ml.nan), **locals()}


def callables() -> dict[str, Callable[..., Any]]:
    """The functions and classes. An error is what is raised."""
    return {
        name: value
        for name, value in public().items()
        if not (inspect.isclass(value) and issubclass(value, MlvmError))
    }


def prose(value: object) -> str:
    """The docstring without examples."""
    return " ".join(EXAMPLE.sub("", inspect.getdoc(value) or "").split())


def errors_in(text: str) -> set[str]:
    return {word for word in re.findall(r"`(\w+)`", text) if word in ERRORS}


def claimed(name: str) -> set[str]:
    """The errors that a docstring names, and those of the names that it refers to."""
    value, room = attrgetter(name)(ml), name.rpartition(".")[0]
    found = errors_in(prose(value))
    for other in filter(None, chain.from_iterable(AS.findall(prose(value)))):
        if other in inspect.signature(value).parameters:
            continue
        try:
            found |= claimed(f"{room}.{other}" if room else other)
        except AttributeError:
            found |= claimed(other.removeprefix("ml."))
    return found


def about_tensors(name: str, value: Callable[..., Any]) -> bool:
    if inspect.isclass(value):
        return name.startswith(("nn.", "optim.", "linalg.")) and name not in BASES
    signature = inspect.signature(value)
    hints = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    return any(TENSORS.search(str(hint)) for hint in hints)


def calls(lines: str) -> Iterator[tuple[str, str, str]]:
    """The error, the function's name, and the call, of lines such as `ShapeError ml.zeros(-2)`
    and `GradientError capture: ml.grad(ml.capture(ml.sum))(v)`."""
    for line in lines.strip().splitlines():
        error, _, call = line.partition(" ")
        name, said, rest = call.partition(": ")
        if said and re.fullmatch(r"[\w.]+", name):
            yield error, name, rest
        else:
            yield error, call[len("ml.") : call.index("(")], call


def variants(x: ml.Tensor) -> Iterator[ml.Tensor]:
    """Tensors of other dtypes, and of other shapes."""
    yield from (ml.ones(x.shape, dtype=dtype) for dtype in ("bool", "i64", "f32", "c64"))
    for shape in ((), (0,), (5, 3), (2, 3, 5), (1, 2, 2, 2, 2)):
        if x.dtype.is_storage:
            shape = (*shape, 4)  # which fill bytes
            yield ml.astype(ml.ones(shape), x.dtype)
        else:
            yield ml.ones(shape, dtype=x.dtype)


def wrong(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments with another tensor in place of one of them, also of a list of them; all of
    them bools; and two of dtypes that do not promote."""
    for i, arg in enumerate(args):
        if isinstance(arg, ml.Tensor):
            yield from ((*args[:i], other, *args[i + 1 :]) for other in variants(arg))
        elif isinstance(arg, list):
            first, *rest = arg
            yield from ((*args[:i], [other, *rest], *args[i + 1 :]) for other in variants(first))
    if len(args) > 1 and all(isinstance(arg, ml.Tensor) for arg in args):
        yield tuple(ml.ones(arg.shape, dtype="bool") for arg in args)
        dtypes = ["u64", *["i64"] * (len(args) - 1)]
        yield tuple(ml.ones(x.shape, dtype=d) for x, d in zip(args, dtypes, strict=True))


def raised(call: Callable[[], Any]) -> type[BaseException] | None:
    try:
        call()
    except MlvmError as error:
        return type(error)
    return None


def given(*args: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, keywords


def right_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """By name, what is called, and what with."""
    names: dict[str, Any] = {**named(), "given": given}
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}
    for line in LAYERS.strip().splitlines():
        layer, _, operand = line.partition(" of ")
        found[layer[len("ml.") : layer.index("(")]] = eval(layer, names), (names[operand],), {}
    for line in GOOD.strip().splitlines():
        name, opening, rest = line.removeprefix("ml.").partition("(")
        found[name] = (callables()[name], *eval(f"given{opening}{rest}", names))
    for name, value in callables().items():
        if name in found or inspect.isclass(value):
            continue
        parameters = inspect.signature(value).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        if not needed:
            continue
        if all(is_tensor(parameter) for parameter in needed):
            many = [parameter.kind == parameter.VAR_POSITIONAL for parameter in needed]
            found[name] = value, (names["x"],) * (len(many) + builtins.sum(many)), {}
        for case in CASES.get(name.rpartition(".")[2], [])[:1]:
            args = tuple(map(ml.asarray, case.inputs))
            fits = takes(value, *args, **case.attributes)
            if fits and not (name in found and takes(value, *found[name][1])):
                found[name] = value, args, case.attributes
    return found


def takes(function: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    try:
        return raised(lambda: function(*args, **keywords)) is None
    except TypeError:
        return False


def is_tensor(parameter: inspect.Parameter) -> bool:
    return "Tensor" in str(parameter.annotation) or "Operand" in str(parameter.annotation)


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, str]]:
    """By function, the errors that wrong calls raise, and such a call."""
    found: dict[str, dict[str, str]] = {name: {} for name in callables()}
    for name, (function, args, keywords) in right_calls().items():
        function(*args, **keywords)
        tried = [(other, keywords) for other in wrong(args)]
        signature = inspect.signature(function)
        for axis in {"axis", "axes"} & set(signature.parameters):
            bound = signature.bind(*args, **keywords)
            bound.arguments[axis] = 99
            tried.append((bound.args, bound.kwargs))
        for others, options in tried:
            error = raised(lambda: function(*others, **options))  # noqa: B023 - called at once
            if error is not None:
                shown = [getattr(each, "type", each) for each in others]
                found[name].setdefault(error.__name__, f"{name}({shown}, {options})")
    return found


def is_named(error: str, claims: set[str]) -> bool:
    return any(issubclass(ERRORS[error], ERRORS[claim]) for claim in claims)


def test_docstrings_about_tensors_say_shapes() -> None:
    said = {name: prose(value) for name, value in callables().items() if about_tensors(name, value)}
    assert len(said) > 250
    assert [name for name, text in said.items() if not BRACKETS_OR_WORD.search(text)] == []


def test_docstrings_name_the_errors_that_wrong_operands_raise(
    seen: dict[str, dict[str, str]],
) -> None:
    unnamed = {
        call: error
        for name, errors in seen.items()
        for error, call in errors.items()
        if not is_named(error, claimed(name))
    }
    assert unnamed == {}


def test_wrong_calls_raise_what_is_said(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").write_bytes(b"none")
    ml.save("layer", ml.nn.Linear(2, 3))
    names = {**named(), **prepared()}
    with names["group"]:
        for error, name, call in calls(WRONG):
            assert is_named(error, claimed(name)), f"{name} does not say that it raises {error}"
            got = raised(lambda: eval(call, names))  # noqa: B023 - called at once
            assert issubclass(got or object, ERRORS[error]), call


def test_every_error_that_a_docstring_names_is_raised(seen: dict[str, dict[str, str]]) -> None:
    found = {name: set(errors) for name, errors in seen.items()}
    for error, name, _ in calls(WRONG):
        found[name].add(error)
    for name, (function, args, keywords) in right_calls().items():
        if re.search(r"what is no tensor(,| or) array", prose(function)):
            refuses(ml.errors.DTypeError, "", function, object(), *args[1:], **keywords)
            found[name].add("DTypeError")
    unseen = {
        (name, claim)
        for name, value in callables().items()
        for claim in errors_in(prose(value))
        if not any(issubclass(ERRORS[error], ERRORS[claim]) for error in found[name])
    }
    assert unseen == set(UNSEEN)


def test_functions_that_name_no_error_are_listed() -> None:
    assert {name for name in callables() if not claimed(name)} == set(NEVER)


# --- ops -------------------------------------------------------------------------------

KINDS = {
    "any dtype": "bool unsigned signed float complex",
    "any dtype but complex": "bool unsigned signed float",
    "any dtype but bool": "unsigned signed float complex",
    "integers or floats": "unsigned signed float",
    "integers or bools": "bool unsigned signed",
    "integers": "unsigned signed",
    "floats": "float",
    "bools": "bool",
}


SAID = re.compile(r"\[\.\.\.\], (?:dtypes that promote to )?([a-z ]+) -> ((?:\[\.\.\.\]|[^.])*)\.")
"""Which dtypes an op takes, and what the result is."""


@pytest.mark.parametrize("dtype", DType.all.values(), ids=str)
def test_ops_take_and_give_the_dtypes_that_docstrings_say(dtype: DType) -> None:
    held = 0
    for name in primitives.__all__:
        said = SAID.search(prose(getattr(primitives, name)))
        if said is None:
            continue
        op, (kinds, result) = OPS[name], said.groups()
        types = [TensorType(dtype, (2,))] * len(op.inputs)
        if dtype.kind not in KINDS[kinds].split():
            refuses(ml.errors.DTypeError, "", op.infer, types, op.bind({}))
            continue
        out = op.infer(types, op.bind({}))
        assert out is not None
        held += 1
        if "integers and bools give f32" in result and not dtype.is_inexact:
            assert out.dtype is ml.float32, name
        elif "that of their parts" in result and dtype.kind == "complex":
            assert out.dtype is ml.finfo(dtype).dtype, name
        elif re.search(", in (x's|that) dtype", result):
            assert out.dtype is dtype, name
        elif not name.startswith(("sum", "prod")):  # which tell it in other words
            assert result.endswith(f", {out.dtype}"), name
    assert held > 8


# --- methods ---------------------------------------------------------------------------


WRONG_OF_METHODS = """
ArenaError Arena.alloc: closed.alloc(x.type)
ArenaOverflow Arena.alloc: tight.alloc(x.type)
ArenaBusy Arena.allocating: within(busy.allocating(), list)
ArenaBusy Arena.close: busy.close()
ArenaError Arena.free: vm_arena.free(v)
StaleTensor Arena.free: vm_arena.free(freed)
ArenaError Arena.keep: vm_arena.keep(v)
StaleTensor Arena.keep: vm_arena.keep(freed)
ArenaBusy Arena.keep: busy.keep(in_busy)
ArenaBusy Arena.mark: busy.mark()
ArenaBusy Arena.reset: busy.reset()
ArenaBusy Arena.rewind: busy.rewind(begun)
ArenaError Arena.rewind: vm_arena.rewind(closed_mark)
ArenaError Arena.view: v.arena.view(v, x.type)
StaleTensor Arena.view: stale.arena.view(stale, stale.type)
ShutDown Captured.drain: drained.drain()
ProgramError Captured.drain: ml.capture(ml.sum).drain(v)
CaptureError Captured.plan: ml.capture(ml.sum).plan
CaptureError Captured.planned: ml.capture(ml.sum).planned
CaptureError Captured.plot: ml.capture(ml.sum).plot("step.svg")
CaptureError Captured.program: ml.capture(ml.sum).program
CaptureError Captured.replaced: ml.capture(ml.sum).replaced
CaptureError Captured.save: ml.capture(ml.sum).save("step.mlvm")
ArgumentError Captured.save: ml.capture(ml.sum).save("step.onnx")
HandleError DryVM.borrow: dry.borrow(99)
HandleError DryVM.launch: dry.launch(returning, [dry.alloc_tensor(v.type)])
HandleError DryVM.read: dry.read(dry.alloc_tensor(v.type))
HandleError DryVM.storage_over: dry.storage_over(bytes_of_vm)
ShutDown Pipeline.get: batches.get()
QueueEmpty Pipeline.get: slow.get(timeout=0.0)
PipelineError Pipeline.get: [greedy.get() for _ in range(9)]
ShutDown Pipeline.peek: batches.peek()
PipelineError Pipeline.restore: greedy.restore({"epoch": 0})
ArenaError QueueTensor.cancel: queue.cancel("text")
ShutDown QueueTensor.close: shut.put([array])
ArenaError QueueTensor.emit: far.emit(None)
QueueEmpty QueueTensor.get: queue.get(timeout=0.0)
ShutDown QueueTensor.get: shut.get()
QueueEmpty QueueTensor.get_nowait: queue.get_nowait()
ArenaError QueueTensor.put: queue.put([array, array])
DTypeError QueueTensor.put: queue.put([array.astype(np.int64)])
ShapeError QueueTensor.put: queue.put([array[:1]])
QueueFull QueueTensor.put: full.put([array], timeout=0.0)
ShutDown QueueTensor.put: shut.put([array])
QueueFull QueueTensor.put_nowait: full.put_nowait([array])
ArgumentError SampleRandom.beta: draws.beta(2.0, 1.0)
ArgumentError SampleRandom.integers: draws.integers(2, 2)
ArgumentError SampleRandom.uniform: draws.uniform(1.0, 0.0)
ArenaError ScratchPad.tensor: pad.tensor("f32[99]", 0)
DTypeError ScratchPad.tensor: pad.tensor("f99[2]", 0)
ShapeError ScratchPad.tensor: pad.tensor("f32[-2]", 0)
NoTranspose Tensor.T: v.T
ShapeError Tensor.item: v.item()
GradientError Tensor.item: ml.grad(lambda x: x * x.item())(ml.asarray(1.0))
GradientError Tensor.tolist: ml.grad(lambda x: ml.sum(x * x.tolist()))(v)
NoTranspose Tensor.mT: v.mT
StaleTensor Tensor.numpy: stale.numpy()
ArgumentError Tensor.to_device: v.to_device("cpu")
GradientError Tensor.to_device: ml.grad(lambda x: ml.sum(x.to_device(vm)))(v)
DTypeError TensorType.of: ml.TensorType.of(np.asarray(["text"]))
ShapeError TensorType.of: ml.TensorType.of(np.zeros((), ml.int4.numpy))
DTypeError TensorType.parse: ml.TensorType.parse("f99[2]")
ShapeError TensorType.parse: ml.TensorType.parse("f32[-2]")
ShapeError TensorType.with_shape: v.type.with_shape((-2,))
HandleError VM.borrow: vm.borrow(99)
HandleError VM.dealloc_storage: vm.dealloc_storage(99)
HandleError VM.dealloc_tensor: vm.dealloc_tensor(99)
MachineError VM.instrumented: within(vm.instrumented(v), lambda: within(vm.instrumented(v), v.item))
HandleError VM.launch: vm.launch(returning, [99])
LimitExceeded VM.launch: vm.launch(endless_program, max_steps=9)
HandleError VM.make_writable: ml.VM(workers=1).make_writable([99])
ArgumentError VM.read: vm.read(vm.alloc_tensor(v.type), np.broadcast_to(array[:1], (2,)))
DTypeError VM.read: vm.read(vm.alloc_tensor(v.type), np.ones(2))
HandleError VM.read: vm.read(99)
ShapeError VM.read: vm.read(vm.alloc_tensor(v.type), array[:1])
LibraryError VM.register_library: vm.register_library("none.so")
UnknownFunction VM.remove: vm.remove("nothing")
HandleError VM.share: vm.share(99, dry)
DTypeError VM.storage_over: vm.storage_over(array)
HandleError VM.storage_over: vm.storage_over(bytes_of_vm)
ShapeError VM.storage_over: vm.storage_over(np.ones((2, 2), np.uint8))
HandleError VM.tensor_from_storage: vm.tensor_from_storage(99, v.type, 0)
ShapeError VM.tensor_from_storage: vm.tensor_from_storage(vm.alloc_storage(4), v.type, 0)
HandleError VM.type_of: vm.type_of(99)
ArgumentError VM.trace: vm.trace()
DTypeError VM.write: vm.write(vm.alloc_tensor(v.type), np.ones(2))
HandleError VM.write: vm.write(99, array)
ShapeError VM.write: vm.write(vm.alloc_tensor(v.type), array[:1])
DTypeError nn.Module.load_parameters: model.load_parameters({"kernel": np.eye(2), "bias": bias})
PathError nn.Module.load_parameters: model.load_parameters({"bias": bias})
ShapeError nn.Module.load_parameters: model.load_parameters({"kernel": bias, "bias": bias})
ArgumentError nn.Module.freeze: model.freeze("x")
CaptureError nn.Module.summary: ml.nn.Sequential(lambda x: x * x.item()).summary(ml.ones(()))
DTypeError nn.Module.astype: ml.nn.Linear(2, 2).astype(ml.int32)
ArgumentError ScalarLog.add: ml.ScalarLog.add(None, "train", -1, loss=1.0)
ArgumentError optim.EMA.update: within(swapped.swapped(), swapped.update)
GradientError optim.EMA.update: ml.grad(lambda x: (swapped.update(), x)[1])(ml.ones(()))
DTypeError optim.Optimizer.load_state: sgd.load_state({"count": np.ones(())})
PathError optim.Optimizer.load_state: sgd.load_state({})
DTypeError optim.LossScale.scale: ml.optim.LossScale().scale(1.0)
DTypeError optim.LossScale.update: ml.optim.LossScale().update(None, {})
DTypeError optim.LossScale.unscale: ml.optim.LossScale().unscale({"w": 1.0})
ShapeError optim.Optimizer.load_state: sgd.load_state({"count": array})
DTypeError optim.Optimizer.update: sgd.update({"w": ints})
GradientError optim.Optimizer.update: ml.grad(lambda x: sgd.update({"w": x}))(v)
PathError optim.Optimizer.update: sgd.update({"b": v})
ShapeError optim.Optimizer.update: sgd.update({"w": x})
StaleTensor optim.Optimizer.update: sgd.update({"w": stale_here})
ArenaOverflow optim.Optimizer.update: within(tight_here, lambda: sgd.update({"w": v}))
ArgumentError optim.Optimizer.update: changed.update({"w": v})
HandleError optim.Optimizer.update: within(vm_arena, lambda: sgd.update({"w": v}))
GroupError parallel.AnyGroup.run: members(lambda rank, vm: rank or ml.parallel.barrier())
"""
"""Wrong calls of methods, and what they raise."""

UNSEEN_OF_METHODS = {
    ("QueueTensor.emit", "ShutDown"): "the program raises it, see tests/input",
}
"""As `UNSEEN`. What has the docstring of a function of `ml` is tried there."""


class Numbers:
    """A data set."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, indices: Any) -> tuple[Any, ...]:
        return (indices,)


def built() -> dict[str, Any]:
    """What methods are called of."""
    vm, dry, array = ml.VM("built"), ml.DryVM(), np.ones(2, np.float32)
    vm_arena, closed = ml.Arena(vm, "a"), ml.Arena(vm, "closed")
    closed_mark, freed = closed.mark(), vm_arena.alloc(ml.TensorType("f32"))
    vm_arena.free(freed)
    closed.close()
    with ml.Arena(ml.default_vm(), "here"):
        stale_here = ml.ones(2)
    queue, full, shut = (ml.QueueTensor(vm, ["f32[2]"], 1) for _ in range(3))
    last = ml.QueueTensor(ml.default_vm(), ["f32[2]"], 1)
    full.put([array])
    shut.close()
    last.close()
    far = ml.QueueTensor(WireVM(ml.VM("far")), ["f32[2]"], 1)
    drained = ml.capture(lambda: ml.sum(last.get()[0]))
    batches, greedy = ml.Pipeline(Numbers(), 50, vm=vm), ml.Pipeline(Numbers(), 1, vm=vm)
    batches.close()
    gate, made = Event(), list[Any]()

    def waiting(arrays: Any, random: Any) -> Any:
        made.append(arrays)
        if len(made) > 1:  # the first is made for its types
            gate.wait()
        return arrays

    slow = ml.Pipeline(Numbers(), 1, vm=vm, workers=1, transform=waiting)
    draws = ml.SampleRandom(0, 0, np.asarray([1]))
    pad, memory = ml.ScratchPad(vm, 64), np.zeros(128, np.uint8)
    bytes_of_vm = memory[-memory.ctypes.data % 64 :][:64]  # aligned
    vm.storage_over(bytes_of_vm)
    returning = assemble(".func main 0 *\n    load_arg 0\n    halt")
    endless_program = assemble(".func main 0 *\nagain:\n    jump again")
    model, bias = ml.nn.Linear(2, 3), np.ones(3, np.float32)
    sgd, changed = (ml.optim.SGD({"w": ml.ones(2)}, 0.1) for _ in range(2))
    changed.momentum = 0.9
    swapped = ml.optim.EMA({"w": ml.ones(2)})
    tight_here = ml.Arena(ml.default_vm(), "tight", capacity=0)

    def within(context: Any, do: Callable[[], Any]) -> None:
        with context:
            do()

    return dict(locals())


def methods() -> dict[str, Any]:
    """The public methods and properties of the public classes, each under one class."""
    found: dict[tuple[type, str], tuple[str, Any]] = {}
    classes = {name: value for name, value in callables().items() if inspect.isclass(value)}
    for name in sorted(classes, key=lambda name: (len(classes[name].__mro__), name != "VM")):
        value = classes[name]
        for method in dir(value):
            owner = next((each for each in value.__mro__ if method in vars(each)), object)
            kind = vars(owner).get(method)
            ours = owner.__module__.startswith("mlvm.") and not method.startswith("_")
            if ours and isinstance(kind, (FunctionType, property, classmethod, staticmethod)):
                found.setdefault((owner, method), (f"{name}.{method}", getattr(value, method)))
    return dict(sorted(found.values()))


def test_methods_have_docstrings() -> None:
    assert len(methods()) > 150
    assert [name for name, value in methods().items() if not inspect.getdoc(value)] == []


def test_methods_raise_what_they_say() -> None:
    names = {**named(), **prepared(), **built()}
    found = methods()
    tried: dict[str, set[str]] = {name: set() for name in found}
    with names["group"], ExitStack() as stack:
        stack.callback(names["gate"].set)
        for error, name, call in calls(WRONG_OF_METHODS):
            assert is_named(error, errors_in(prose(found[name]))), (name, error)
            got = raised(lambda: eval(call, names))  # noqa: B023 - called at once
            assert issubclass(got or object, ERRORS[error]), call
            tried[name].add(error)
    unseen = {
        (name, claim)
        for name, value in found.items()
        for claim in errors_in(prose(value))
        if inspect.getdoc(value) != inspect.getdoc(getattr(ml, name.rpartition(".")[2], None))
        and not name.startswith("RemoteVM.")  # which has the docstrings of VM
        and not any(issubclass(ERRORS[error], ERRORS[claim]) for error in tried[name])
    }
    assert unseen == set(UNSEEN_OF_METHODS)


def test_the_docstring_of_tensors_names_all_that_they_have() -> None:
    text = prose(ml.Tensor)
    has = [name for name in dir(ml.ones(1)) if not name.startswith("_")]
    assert [name for name in has if not re.search(rf"\b{name}\b", text)] == []
