"""Exports by `torch.onnx` of PyTorch's modules and functions, beside PyTorch.

    python -m tests.onnx --exports

Each is exported, loaded, and called eagerly and captured. Where the file is not what the module
does, by ONNX Runtime's word, it is not held against mlvm.
"""

from __future__ import annotations

import collections
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.onnx import load

SLICED_BY_DATA: Final = ("EmbeddingBag(10, 4)",)
"""What runs eagerly alone: a loop whose slices begin where a tensor says."""

_LAYERS: Final = """
rows: ReLU(), ReLU6(), Sigmoid(), Tanh(), SiLU(), Mish(), Hardswish(), Hardsigmoid(), Hardtanh(), \
ELU(), SELU(), CELU(), GELU(), GELU('tanh'), LeakyReLU(), Softplus(), Softsign(), Tanhshrink(), \
LogSigmoid(), Softshrink(), Hardshrink(), Threshold(.1, 2.), GLU(), Linear(8, 5, bias=False), \
BatchNorm1d(8), Unflatten(1, (2, 4)), LSTMCell(8, 4), GRUCell(8, 4), RNNCell(8, 4), Dropout(.5)
text: Softmax(1), LogSoftmax(-1), Softmin(1), Linear(8, 5), LayerNorm(8), RMSNorm(8), LSTM(8, 5), \
LSTM(8, 5, num_layers=2, bidirectional=True, batch_first=True), GRU(8, 5, batch_first=True), \
GRU(8, 5, bidirectional=True), RNN(8, 5), RNN(8, 5, nonlinearity='relu', num_layers=2), \
TransformerEncoderLayer(8, 2, 16, batch_first=True), \
TransformerEncoderLayer(8, 2, 16, norm_first=True, activation='gelu'), \
TransformerEncoder(TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, \
enable_nested_tensor=False)
pair: Bilinear(8, 8, 3), CosineSimilarity(-1), PairwiseDistance(), MSELoss(), L1Loss(), \
SmoothL1Loss(), HuberLoss(), PoissonNLLLoss(), KLDivLoss(reduction='batchmean')
texts: TransformerDecoderLayer(8, 2, 16, batch_first=True), \
Transformer(8, 2, 1, 1, 16, batch_first=True), MultiheadAttention(8, 2, batch_first=True)
labels: CrossEntropyLoss(), NLLLoss(), CrossEntropyLoss(reduction='sum'), MultiMarginLoss()
flags: BCEWithLogitsLoss()
places: Embedding(10, 4), Embedding(10, 4, padding_idx=0), EmbeddingBag(10, 4)
wave: Conv1d(4, 6, 3, padding=1), Conv1d(4, 6, 3, padding='same', padding_mode='reflect'), \
ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1), InstanceNorm1d(4), \
MaxPool1d(3, 2), AvgPool1d(3, 2, 1), Upsample(scale_factor=.6, mode='linear'), LPPool1d(2, 2)
image: PReLU(4), Softmax2d(), Conv2d(4, 6, 3, stride=2, padding=1), \
Conv2d(4, 8, (3, 2), groups=2, dilation=(1, 2)), Conv2d(4, 4, 3, groups=4, padding='same'), \
Conv2d(4, 4, 3, padding=1, padding_mode='circular'), \
Conv2d(4, 4, 3, padding=1, padding_mode='replicate'), ConvTranspose2d(4, 6, 3, 2, groups=2), \
ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), BatchNorm2d(4), GroupNorm(2, 4), \
ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), InstanceNorm2d(4, affine=True), \
LayerNorm([8, 9]), LocalResponseNorm(3), MaxPool2d(3, 2, 1), MaxPool2d(3, 2, 1, ceil_mode=True), \
MaxPool2d(2, 1, dilation=2), MaxPool2d(2, return_indices=True), AvgPool2d(3, 2, 1), \
AvgPool2d(3, 2, 1, count_include_pad=False), AvgPool2d(3, 2, 1, ceil_mode=True), LPPool2d(2, 2), \
AdaptiveAvgPool2d(1), AdaptiveAvgPool2d((4, 3)), AdaptiveMaxPool2d((4, 3)), \
Upsample(scale_factor=2), Upsample(scale_factor=.7), Upsample(scale_factor=1.5, mode='nearest'), \
Upsample(scale_factor=2.3, mode='bilinear'), Upsample(size=(13, 7), mode='bicubic'), \
Upsample(scale_factor=1.7, mode='bilinear', align_corners=True), \
Upsample(size=(13, 7), mode='bicubic', align_corners=True), PixelShuffle(2), ChannelShuffle(2), \
Flatten(), Unfold(3, padding=1), ZeroPad2d((1, 2, 0, 1)), ReflectionPad2d(2), CircularPad2d(1), \
ReplicationPad2d((1, 2, 3, 0)), ConstantPad2d(1, 3.5), ZeroPad2d((-1, 2, 1, -2)), \
Sequential(Conv2d(4, 8, 3), BatchNorm2d(8), ReLU(), MaxPool2d(2), Flatten(), Linear(72, 5))
volume: Conv3d(2, 3, 3, padding=1, stride=2), ConvTranspose3d(2, 3, 2, stride=2), BatchNorm3d(2), \
MaxPool3d(2), AvgPool3d(2), Upsample(size=(3, 8, 9), mode='trilinear')
columns: Fold((4, 5), (2, 2))
"""
_FUNCTIONS: Final = """
x.topk(2, -1); x.sort(-1, descending=True); x.cumsum(-1); x.tril(); x.roll(2, -1); x.flip(0, 1)
x[:, [3, -1, 0]]; x.masked_fill(x > 0, -1); x.var(-1); x.std((0, 1)); x.norm(dim=-1)
x.logsumexp(-1); x.amax(-1); x.argmin(-1); torch.einsum('abc,adc->abd', x, x); x.chunk(3, 1)
x.unbind(1); torch.where(x > 0, x, x * 2); x.clamp(-.5); x.abs() ** 1.5; torch.atan2(x, x.flip(0))
(x * 3).fmod(2); (x * 3).remainder(2); torch.div(x, .3, rounding_mode='floor'); (x * 4).trunc()
(x * 4).round(); x.sign(); x.expm1(); x.abs().log1p(); torch.baddbmm(x, x, torch.ones(2, 8, 8))
x.scatter(-1, torch.zeros(2, 5, 1, dtype=torch.long), 9.); torch.stack([x, x]); x.repeat(2, 1, 1)
x.index_add(1, torch.tensor([0, 0]), x[:, :2]); x.repeat_interleave(2, 1); x[0].diagonal()
torch.meshgrid(x[0, 0], x[0, 1], indexing='ij'); torch.outer(x[0, 0], x[0, 1]); x.prod(-1)
(x > 0).any(-1); (x > -9).all(); x.isnan(); F.normalize(x); torch.det(x[:, :4, :4])
x.index_put((torch.tensor([0]),), torch.tensor(5.)); torch.view_as_real(torch.fft.rfft(x))
F.grid_sample(x[:, None], torch.tanh(x[:, :4, :4].reshape(2, 4, 2, 2)), align_corners=False)
torch.bucketize(x, torch.tensor([-1., 0., 1.])); x.mean((0, 2), keepdim=True)
F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
F.interpolate(x[:, None], size=(3, 4), mode='bilinear', antialias=True); (x * 10).int().sum()
"""


def cases() -> Iterator[tuple[str, Callable[[], Any], tuple[Any, ...]]]:
    """The names of modules, what makes them, and their operands."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Of(nn.Module):  # type: ignore[misc]
        """A function as a module."""

        def __init__(self, fn: Callable[..., Any]) -> None:
            super().__init__()
            self.fn = fn

        def forward(self, x: Any) -> Any:
            return self.fn(x)

    rows, text = torch.randn(3, 8), torch.randn(2, 5, 8)
    operands: dict[str, tuple[Any, ...]] = {
        "rows": (rows,),
        "text": (text,),
        "pair": (rows, torch.softmax(rows.flip(0), -1)),
        "texts": (text, text.flip(1)),
        "labels": (rows, torch.tensor([1, 7, 0])),
        "flags": (rows, (rows > 0).float()),
        "places": (torch.randint(0, 10, (2, 6)),),
        "wave": (torch.randn(2, 4, 12),),
        "image": (torch.randn(2, 4, 8, 9),),
        "volume": (torch.randn(1, 2, 5, 6, 7),),
        "columns": (torch.randn(1, 12, 12),),
    }
    around = {"torch": torch, "F": nn.functional, **vars(nn)}
    for line in _LAYERS.strip().splitlines():
        kind, _, calls = line.partition(": ")
        for call in re.findall(r"\w+\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", calls):
            inputs = operands[kind] * (3 if call.startswith("Multihead") else 1)
            yield call, partial(eval, call, around), inputs[:3]
    for call in _FUNCTIONS.strip().replace("\n", "; ").split("; "):
        yield call, partial(eval, f"Of(lambda x: {call})", around | {"Of": Of}), (text,)


def leaves(tree: Any) -> list[Any]:
    """The tensors of nested tuples and lists."""
    if isinstance(tree, (tuple, list)):
        return [x for each in tree for x in leaves(each)]
    return [] if tree is None else [tree]


def difference(make: Callable[[], Any], operands: tuple[Any, ...], captured: bool) -> str | None:
    """Return how the loaded file differs from the module; None where it does not. Raises
    `ImportError` without onnxscript, and what the export raises."""
    import torch

    module: Any = make().eval()
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        expected = [x.numpy() for x in leaves(module(*operands))]
        export: Any = torch.onnx.export(module, operands, dynamo=True, verbose=False)
    data, arrays = export.model_proto.SerializeToString(), [x.numpy() for x in operands]
    net, message = load(data), None
    functions: list[Any] = [net, *([ml.capture(net)] if captured else [])]
    for fn in functions:
        try:
            results = [np.asarray(x) for x in leaves(fn(*arrays[: len(net.inputs)]))]
        except ml.errors.MlvmError as error:
            message = f"{type(error).__name__}: {error}"
        else:
            message = message or _difference(results, expected)
    if message and not _is_right(data, arrays, expected):
        return None
    return message


def _difference(results: list[Any], expected: list[Any]) -> str | None:
    for x, y in zip(results, expected, strict=True):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{x.dtype}{list(x.shape)} is not {y.dtype}{list(y.shape)}"
        if not np.allclose(x, y, rtol=2e-4, atol=2e-5, equal_nan=True):
            return f"apart by {np.abs(x.astype(float) - y).max():.2g}"
    return None


def _is_right(data: bytes, arrays: list[Any], expected: list[Any]) -> bool:
    """Return whether ONNX Runtime's results of the file are the module's."""
    from tests.fuzz.graphs import session

    try:
        runtime = session(data)
        names = [each.name for each in runtime.get_inputs()]
        results = runtime.run(None, dict(zip(names, arrays, strict=False)))
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        return False
    return _difference(results, expected) is None


def run(pattern: str = "") -> int:
    """Compare all whose name has the pattern; print what differs. The exit status."""
    logging.disable(logging.CRITICAL)
    outcomes: collections.Counter[str] = collections.Counter()
    for name, make, operands in cases():
        if not re.search(pattern, name):
            continue
        try:
            message = difference(make, operands, name not in SLICED_BY_DATA)
        except Exception as error:
            if "Conversion" not in type(error).__name__ and "Export" not in type(error).__name__:
                raise
            message = None
            outcomes["not exported"] += 1
            print(f"{name}: not exported, {type(error).__name__}")
        else:
            outcomes["WRONG" if message else "the same"] += 1
        if message:
            print(f"{name}: {message}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return int(bool(outcomes["WRONG"]))
