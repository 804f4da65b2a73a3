"""Public functions of neural networks that are composed of ops: activations, dropout, convolution,
pooling.

Sequences are [batch, length, channels], images NHWC. Names are PyTorch's and JAX's.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from mlvm.core.errors import AttributeRefused, ShapeError, brief
from mlvm.core.ops.neural import Padding, Pair, resolve_padding
from mlvm.core.types import TensorType
from mlvm.eager.functions.arguments import integers, pair, type_of
from mlvm.eager.functions.creation import zeros
from mlvm.eager.functions.elements import where
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.random import next_key
from mlvm.eager.functions.shapes import expand_dims, pad, permute_dims, reshape, squeeze, unstack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of, one_op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Window: TypeAlias = int | Pair
"""A window or a stride: (vertical, horizontal), or one int for both."""

Sides: TypeAlias = str | Padding
"""A padding: "SAME", "VALID" or ((top, bottom), (left, right))."""

# --- activations ---------------------------------------------------------------------


@public
@in_f32
def silu(x: Tensor, /) -> Tensor:
    """x sigmoid(x), also called swish.

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers.

        >>> ml.silu(ml.asarray([-1.0, 1.0]))
        Tensor([-0.26894143,  0.7310586 ], f32[2])
    """
    return x * op.sigmoid(x)


@public
@in_f32
def leaky_relu(x: Tensor, /, negative_slope: float = 0.01) -> Tensor:
    """x where x > 0, else negative_slope x (Maas et al., Rectifier Nonlinearities Improve Neural
    Network Acoustic Models, 2013).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers.

        >>> ml.leaky_relu(ml.asarray([-1.0, 2.0]))
        Tensor([-0.01,  2.  ], f32[2])
    """
    return where(op.greater(x, 0.0), x, op.multiply(x, negative_slope))


@public
@in_f32
def elu(x: Tensor, /, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1) (Clevert et al., arXiv 1511.07289).

    x: [...], any dtype but complex; the result: [...], the same, or f32 for integers and bools.
    Raises `DTypeError` for complex numbers.

        >>> ml.elu(ml.asarray([-1.0, 2.0]))
        Tensor([-0.63212055,  2.        ], f32[2])
    """
    positive = op.greater(x, 0.0)
    return where(positive, x, op.expm1(where(positive, 0.0, x)) * alpha)


@public
@in_f32
def softplus(x: Tensor, /) -> Tensor:
    """log(1 + exp(x)), computed as max(x, 0) + log(1 + exp(-|x|)) so that nothing overflows (Dugas
    et al., Incorporating Second-Order Functional Knowledge, 2001).

    x: [...], integers or floats; the result: [...], the same, or f32 for integers. Raises
    `DTypeError` for bools and complex numbers.

        >>> ml.softplus(ml.asarray([0.0, 1000.0]))
        Tensor([6.931472e-01, 1.000000e+03], f32[2])
    """
    return op.maximum(x, 0.0) + op.log1p(op.exp(-op.abs(x)))


@public
def dropout(x: Tensor, rate: float, *, key: Tensor | None = None) -> Tensor:
    """Each element of x with probability 1 - rate, times 1 / (1 - rate), else 0.

    Without a `key` the next global one decides. A rate of 0 changes and copies
    nothing.

    x: f[...], and so is the result. Raises `AttributeRefused` unless 0 <= rate < 1, `DTypeError`
    for other than floats, `ShapeError` for what is no key.

        >>> ml.dropout(ml.ones(3), 0.0)
        Tensor([1., 1., 1.], f32[3])
    """
    if rate == 0:
        return alias_of(x)
    return op.dropout(x, next_key() if key is None else key, rate=rate)


# --- convolution ---------------------------------------------------------------------


@public
def conv2d(
    x: Tensor, kernel: Tensor, *, stride: Window = 1, padding: Sides = "VALID", groups: int = 1
) -> Tensor:
    """Cross-correlation of NHWC images with an HWIO kernel, as deep learning's convolution is:
    f[N, H, W, I] with f[KH, KW, I / groups, O] -> f[N, OH, OW, O].

    `padding` is "VALID", "SAME" or ((top, bottom), (left, right)); it counts as zeros. The channels
    are cut into that many `groups`: each group of results sees only its group of x. With as many
    groups as channels the convolution is depthwise (Chollet, arXiv 1610.02357).

    Raises `ShapeError` for channels that do not fit the kernel, and for a kernel larger than the
    padded image, `AttributeRefused` for a stride, a padding or a number of groups that makes no
    sense, `DTypeError` unless both are floats of one dtype.

        >>> ml.conv2d(ml.ones((1, 4, 4, 3)), ml.ones((3, 3, 3, 8))).type
        f32[1,2,2,8]
    """
    _require_images(x)
    window = pair(type_of(kernel).shape[:2], "kernel")
    steps = pair(stride, "stride")
    sides = _padding(x, window, steps, padding)
    if groups == 1:
        return op.conv2d(x, kernel, stride=steps, padding=sides)
    grid = _grouped_grid(x, kernel, groups, steps, sides)
    if kernel.shape[2] == 1:
        return _depthwise(x, kernel, steps, sides, grid)
    return _group_by_group(x, kernel, groups, steps, sides)


@public
def conv1d(
    x: Tensor, kernel: Tensor, *, stride: int = 1, padding: str | Pair = "VALID", groups: int = 1
) -> Tensor:
    """Cross-correlation of sequences with a kernel: f[N, L, I] with f[K, I / groups, O] ->
    f[N, OL, O]. `padding` is "VALID", "SAME" or (before, after); otherwise as `conv2d`.

    Raises `ShapeError` for channels that do not fit the kernel, and for a kernel larger than the
    padded sequence, `AttributeRefused` for a stride, a padding or a number of groups that makes no
    sense, `DTypeError` unless both are floats of one dtype.

        >>> ml.conv1d(ml.ones((1, 4, 3)), ml.ones((3, 3, 8))).type
        f32[1,2,8]
    """
    type_of(x), type_of(kernel)
    if x.ndim != 3 or kernel.ndim != 3:
        raise ShapeError(
            "sequences have 3 axes (batch, length, channels), and their kernel has 3 (length, "
            f"channels in, channels out), not {x.ndim} and {kernel.ndim}"
        )
    [step] = integers(stride, "stride")
    sides = padding if isinstance(padding, str) else ((0, 0), pair(padding, "padding", least=0))
    images, window = expand_dims(x, axis=1), expand_dims(kernel, axis=0)
    y = conv2d(images, window, stride=(1, step), padding=sides, groups=groups)
    return squeeze(y, axis=1)


@public
@in_f32
def conv_transpose2d(
    x: Tensor, kernel: Tensor, *, stride: Window = 1, padding: Sides = "VALID"
) -> Tensor:
    """The transpose of `conv2d` as a linear map, as in PyTorch and TensorFlow: each element of x
    adds the kernel, times itself, to a window of the result (Dumoulin and Visin, arXiv 1603.07285,
    section 4). f[N, H, W, I] with f[KH, KW, O, I] -> f[N, OH, OW, O]: the kernel is that of the
    convolution from O to I channels.

    `padding` is that convolution's: what falls on it is dropped. OH is (H - 1) stride + KH less
    the padding's rows; with "SAME" it is H stride.

    Raises `ShapeError` for channels that do not fit the kernel, and where nothing is left,
    `AttributeRefused` for a stride or padding that makes no sense, `DTypeError` for complex
    numbers.

        >>> ml.conv_transpose2d(ml.ones((1, 4, 4, 3)), ml.ones((2, 2, 8, 3)), stride=2).type
        f32[1,8,8,8]
    """
    _require_images(x)
    type_of(kernel)
    if kernel.ndim != 4 or kernel.shape[3] != x.shape[3]:
        raise ShapeError(
            f"a kernel for {x.shape[3]} channels is [height, width, channels out, {x.shape[3]}], "
            f"not {list(kernel.shape)}"
        )
    window = pair(kernel.shape[:2], "kernel")
    steps = pair(stride, "stride")
    height, width = [n * step for n, step in zip(x.shape[1:3], steps, strict=True)]
    if isinstance(padding, str):
        sides = resolve_padding(padding, window, steps, (height, width))
    elif isinstance(padding, (tuple, list)) and [
        len(integers(side, "padding")) for side in padding
    ] == [2, 2]:
        sides = padding
    else:
        raise AttributeRefused(
            f'padding is "SAME", "VALID" or ((top, bottom), (left, right)), not {brief(padding)}'
        )
    if padding != "SAME":
        height, width = [
            (n - 1) * step + length - sum(side)
            for n, step, length, side in zip(x.shape[1:3], steps, window, sides, strict=True)
        ]
    if min(height, width) < 1:
        raise ShapeError(f"a padding of {padding} leaves nothing of the result")
    outputs, inputs = kernel.shape[2:]
    weights = reshape(kernel, (window[0] * window[1] * outputs, inputs))
    windows = op.matmul(x, weights, transpose_y=True)
    windows = reshape(windows, (*x.shape[:3], *window, outputs))
    shape = (x.shape[0], height, width, outputs)
    return op.unpatches(windows, shape=shape, stride=steps, padding=sides)


def _grouped_grid(
    x: Tensor, kernel: Tensor, groups: object, stride: Pair, padding: Padding
) -> Pair:
    """How many windows there are, vertically and horizontally. Raises for what does not fit."""
    if not isinstance(groups, int) or groups < 1:
        raise AttributeRefused(f"groups must be an integer >= 1, given {groups!r}")
    inputs, outputs = x.shape[3], kernel.shape[-1]
    if kernel.ndim != 4 or kernel.shape[2] * groups != inputs or outputs % groups:
        raise ShapeError(
            f"a kernel for {groups} groups of {inputs} channels is [height, width, "
            f"{inputs} / {groups}, a multiple of {groups}], not {list(kernel.shape)}"
        )
    one = x.type.with_shape((*x.shape[:3], kernel.shape[2]))
    result = one_op("conv2d", stride=stride, padding=padding).infer((one, kernel.type))
    _, height, width, _ = cast(TensorType, result).shape
    return height, width


def _group_by_group(
    x: Tensor, kernel: Tensor, groups: int, stride: Pair, padding: Padding
) -> Tensor:
    """One product for each group, of its windows and its part of the kernel."""
    n, height, width, _ = x.shape
    rows, columns, inputs, outputs = kernel.shape
    apart = reshape(x, (n, height, width, groups, inputs))
    images = reshape(permute_dims(apart, (3, 0, 1, 2, 4)), (groups * n, height, width, inputs))
    windows = op.patches(images, window=(rows, columns), stride=stride, padding=padding)
    places, inner = n * windows.shape[1] * windows.shape[2], rows * columns * inputs
    weights = permute_dims(reshape(kernel, (inner, groups, outputs // groups)), (1, 0, 2))
    y = op.matmul(reshape(windows, (groups, places, inner)), weights)
    return reshape(permute_dims(y, (1, 0, 2)), (n, *windows.shape[1:3], outputs))


@in_f32
def _depthwise(x: Tensor, kernel: Tensor, stride: Pair, padding: Padding, grid: Pair) -> Tensor:
    """The sum over the places of a window: what lies there in all windows, times the kernel there.
    No window is copied: for 8 images of 32 x 32 x 64 it takes three quarters of the time that
    `patches` take, and a third of the memory."""
    rows, columns, _, outputs = kernel.shape
    n, channels = x.shape[0], x.shape[3]
    image = pad(x, ((0, 0), *padding, (0, 0)))
    weights = reshape(kernel, (rows * columns, channels, outputs // channels))
    y = zeros((n, *grid, *weights.shape[1:]), dtype=x.dtype)
    for place, weight in enumerate(unstack(weights)):
        start, step = (0, *divmod(place, columns), 0), (1, *stride, 1)
        part = op.slice(image, start=start, length=(n, *grid, channels), step=step)
        y = op.multiply_add(reshape(part, (*part.shape, 1)), weight, y)
    return reshape(y, (n, *grid, outputs))


# --- pooling -------------------------------------------------------------------------


@public
def max_pool2d(
    x: Tensor, window: Window, *, stride: Window | None = None, padding: Sides = "VALID"
) -> Tensor:
    """The largest element of each window of NHWC images. The stride is the window unless given;
    padding, as in `conv2d`, counts as -inf.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` for other than floats, `ShapeError` for
    other axes, and for a window larger than the padded image, `AttributeRefused` for a window,
    stride or padding that makes no sense.

        >>> ml.max_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[3.0]]]]
    """
    return op.max_pool2d(x, **_windows(x, window, stride, padding))


@public
def avg_pool2d(
    x: Tensor, window: Window, *, stride: Window | None = None, padding: Sides = "VALID"
) -> Tensor:
    """The mean of each window of NHWC images. The stride is the window unless given; padding, as in
    `conv2d`, counts as zeros.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` for other than floats, `ShapeError` for
    other axes, and for a window larger than the padded image, `AttributeRefused` for a window,
    stride or padding that makes no sense.

        >>> ml.avg_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[1.5]]]]
    """
    return op.avg_pool2d(x, **_windows(x, window, stride, padding))


def _windows(x: Tensor, window: Window, stride: Window | None, padding: Sides) -> dict[str, Any]:
    """What the ops of pooling are told."""
    _require_images(x)
    shape = pair(window, "window")
    steps = shape if stride is None else pair(stride, "stride")
    return {"window": shape, "stride": steps, "padding": _padding(x, shape, steps, padding)}


def _require_images(x: Tensor) -> None:
    if type_of(x).ndim != 4:
        raise ShapeError(f"an image has 4 axes (batch, height, width, channels), not {x.ndim}")


def _padding(x: Tensor, window: Pair, stride: Pair, padding: Sides) -> Padding:
    """The padding in zeros per side. Raises `AttributeRefused`."""
    return resolve_padding(padding, window, stride, (x.shape[1], x.shape[2]))
