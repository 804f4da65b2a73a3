"""Convolutions, forward and back: layers of ResNet, MobileNet, ConvNeXt and ResNeXt, one thread.

`us` is the time of one call, of the result or of both gradients, and `error` the largest error of
any of its elements, by the largest element, beside a computation in f64. A layer's name is its
window, image, channels and what else it has. `mlvm` runs a captured function, `torch` PyTorch's
operator on images with channels first, and `torch-last` with channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from bench.harness import Contender, Contest, Prepare, Round, Suite, microseconds
from mlvm.core.types import Array, Shape


class Layer(NamedTuple):
    """One convolution: of images, or of volumes."""

    image: Shape
    inputs: int
    outputs: int
    window: Shape
    stride: int = 1
    groups: int = 1
    dilation: int = 1

    @property
    def padding(self) -> tuple[int, ...]:
        """Zeros on each side of each axis, so that a stride of 1 keeps the size."""
        return tuple([(n - 1) * self.dilation // 2 for n in self.window])

    @property
    def kernel(self) -> Shape:
        return (*self.window, self.inputs // self.groups, self.outputs)

    @property
    def flops(self) -> int:
        places = math.prod([-(-n // self.stride) for n in self.image])
        return 2 * places * math.prod(self.kernel)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the op."""
        axes = len(self.window)
        return {
            "stride": (self.stride,) * axes,
            "padding": tuple([(n, n) for n in self.padding]),
            "dilation": (self.dilation,) * axes,
            "groups": self.groups,
        }


LAYERS: Final[dict[str, Layer]] = {
    "3x3 56 64": Layer((56, 56), 64, 64, (3, 3)),
    "3x3 28 128": Layer((28, 28), 128, 128, (3, 3)),
    "3x3 14 256": Layer((14, 14), 256, 256, (3, 3)),
    "3x3 7 512": Layer((7, 7), 512, 512, (3, 3)),
    "3x3/2 56 128": Layer((56, 56), 128, 128, (3, 3), stride=2),
    "1x1 56 64-256": Layer((56, 56), 64, 256, (1, 1)),
    "1x1 14 1024-256": Layer((14, 14), 1024, 256, (1, 1)),
    "stem 7x7/2 224 3-64": Layer((224, 224), 3, 64, (7, 7), stride=2),
    "stem 3x3/2 224 3-32": Layer((224, 224), 3, 32, (3, 3), stride=2),
    "3x3 28 256 apart 2": Layer((28, 28), 256, 256, (3, 3), dilation=2),
    "3x3 56 128 in 32": Layer((56, 56), 128, 128, (3, 3), groups=32),
    "3x3 14 512 in 32": Layer((14, 14), 512, 512, (3, 3), groups=32),
    "3x3x3 8x28 32": Layer((8, 28, 28), 32, 32, (3, 3, 3)),
    "depthwise 3x3 56 144": Layer((56, 56), 144, 144, (3, 3), groups=144),
    "depthwise 3x3/2 112 96": Layer((112, 112), 96, 96, (3, 3), stride=2, groups=96),
    "depthwise 3x3 14 576": Layer((14, 14), 576, 576, (3, 3), groups=576),
    "depthwise 5x5 14 672": Layer((14, 14), 672, 672, (5, 5), groups=672),
    "depthwise 7x7 56 96": Layer((56, 56), 96, 96, (7, 7), groups=96),
}
QUICK: Final = {
    "3x3 5 4 in 2": Layer((5, 5), 4, 4, (3, 3), groups=2),
    "depthwise 3x3/2 6 5": Layer((6, 6), 5, 5, (3, 3), stride=2, groups=5),
}

Work = Callable[[], Any]
"""Computes once."""
Read = Callable[[Any], tuple[Array, ...]]
"""What a `Work` has computed, channels last: the result, or the gradients for x and kernel."""
ROUND_US: Final = 3000
"""A round takes about so long."""


def operands(layer: Layer) -> tuple[Array, Array, Array]:
    """Return x, kernel and the cotangent of the result."""
    rng = np.random.default_rng(0)
    places = [-(-n // layer.stride) for n in layer.image]
    shapes = (1, *layer.image, layer.inputs), layer.kernel, (1, *places, layer.outputs)
    x, kernel, g = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, kernel, g


def reference(layer: Layer, back: bool) -> tuple[Array, ...]:
    """Return the same by numpy, in f64."""
    from mlvm.core.ops import windows

    x, kernel, g = (each.astype(np.float64) for each in operands(layer))
    how = layer.attributes()
    if not back:
        y = np.empty(g.shape)
        windows.conv2d.kernel(y, x, kernel, **how)
        return (y,)
    gx, gk = np.empty(x.shape), np.empty(kernel.shape)
    windows.conv_transpose2d.kernel(gx, g, kernel, shape=x.shape, **how)
    windows.conv2d_kernel_vjp.kernel(gk, g, x, window=layer.window, **how)
    return gx, gk


def preparing(make: Callable[[Layer, bool], tuple[Work, Read]]) -> Prepare:
    """Return a `prepare` of all cases."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        layers = QUICK if quick else LAYERS

        @lru_cache
        def ready(name: str, back: bool) -> tuple[Work, int, float]:
            work, read = make(layers[name], back)
            outputs = read(work())
            pairs = zip(outputs, reference(layers[name], back), strict=True)
            error = max(float(np.abs(y - z).max() / np.abs(z).max()) for y, z in pairs)
            once = min(microseconds(work) for _ in range(3))
            return work, max(1, round(ROUND_US / once)), error

        def timed(name: str, back: bool) -> Mapping[str, float]:
            work, times, error = ready(name, back)
            elapsed = microseconds(lambda: [work() for _ in range(times)])
            return {"us": elapsed / times, "error": error * 1e7}

        return {
            f"{name}, {'back' if back else 'forward'}": partial(timed, name, back)
            for name in layers
            for back in (False, True)
        }

    return prepare


def mlvm(layer: Layer, back: bool) -> tuple[Work, Read]:
    import mlvm.eager as ml
    from bench.mlvm_training import vm_of
    from mlvm.eager.tensor import primitives as op

    vm = vm_of(1)
    with ml.Arena(vm, "operands").allocating():
        x, kernel, g = map(ml.asarray, operands(layer))
    convolve = partial(op.conv2d, **layer.attributes())
    results = ml.Arena(vm, "results")

    def both(x: Any, kernel: Any, g: Any) -> Any:
        return ml.vjp(convolve, x, kernel)[1](g)

    captured: Any = ml.capture(both) if back else ml.capture(convolve)
    operand_list = (x, kernel, g) if back else (x, kernel)

    def work() -> Any:
        results.reset()
        with results.allocating():
            return captured(*operand_list)

    return work, lambda outputs: tuple([each.numpy() for each in (outputs if back else [outputs])])


def torch(layer: Layer, back: bool, last: bool) -> tuple[Work, Read]:
    import torch

    torch.set_num_threads(1)
    axes = len(layer.window)
    memory: Any = torch.contiguous_format
    if last:
        memory = torch.channels_last if axes == 2 else torch.channels_last_3d
    x, kernel, g = operands(layer)
    first, inner = (0, axes + 1, *range(1, axes + 1)), (axes + 1, axes, *range(axes))
    x, g = (np.ascontiguousarray(each.transpose(first)) for each in (x, g))
    tensors = [
        torch.from_numpy(each) for each in (x, np.ascontiguousarray(kernel.transpose(inner)), g)
    ]
    images, weights, cotangent = [each.contiguous(memory_format=memory) for each in tensors]
    places = [layer.stride] * axes, list(layer.padding), [layer.dilation] * axes
    rest = (False, [0] * axes, layer.groups)

    def work() -> Any:
        with torch.no_grad():
            if back:
                return torch.ops.aten.convolution_backward(
                    cotangent, images, weights, [0], *places, *rest, [True, True, False]
                )[:2]
            return [torch.ops.aten.convolution(images, weights, None, *places, *rest)]

    def read(results: Any) -> tuple[Array, ...]:
        images = np.moveaxis(results[0].numpy(), 1, -1)
        if not back:
            return (images,)
        kernels = results[1].numpy()
        return images, kernels.transpose(*range(2, axes + 2), 1, 0)

    return work, read


_EACH: Final = [f"{name}, {direction}" for name in LAYERS for direction in ("forward", "back")]
TARGETS: Final = {case: 1.2 if case.startswith("depthwise") else 0.95 for case in _EACH}

SUITE = Suite(
    module="bench.convolutions",
    contenders=(
        Contender("mlvm", "mlvm", preparing(mlvm)),
        Contender("torch", "torch", preparing(partial(torch, last=False))),
        Contender("torch-last", "torch", preparing(partial(torch, last=True))),
    ),
    units={"us": "us", "error": "1e-7"},
    contests=(Contest("the best layout", "us", ("mlvm",), ("torch", "torch-last"), TARGETS),),
    rounds=15,
    timeout=600,
)
