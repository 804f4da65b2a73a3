"""Resizing and sampling of images."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.rules import normalize_axis
from mlvm.core.types import Array, DType
from mlvm.eager.tensor import primitives
from mlvm.onnx.ops.convnets import channels_last, channels_second, steps_of
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, bounded, in_memory, permuted, tensor


@op("Resize Upsample", "raw", host=[1, 2, 3], absent=[1, 2, 3], older={1: "scales"})
def resize(at: NodeCall, x: Value, *operands: Any) -> Value:
    if at.node.type == "Upsample" or (len(operands) == 1 and at.opset < 11):
        operands = None, *operands
    roi, scales, sizes = [*operands, None, None, None][:3]
    axes = at.get("axes")
    which = [*range(x.ndim)] if axes is None else [normalize_axis(n, x.ndim) for n in axes]
    mode = at.get("mode", "nearest")
    by = [np.float32(1.0)] * x.ndim  # rounded as in other runtimes: 3.3f * 10 is 33
    counts = [*x.shape]
    if sizes is not None and len(sizes):
        lengths = sizes.reshape(-1).tolist()
        ratios = [
            np.float32(n) / np.float32(x.shape[i]) for n, i in zip(lengths, which, strict=True)
        ]
        policy = at.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(ratios)
            ratios = [one] * len(ratios)
            lengths = [math.floor(one * np.float32(x.shape[axis]) + 0.5) for axis in which]
        for axis, n, ratio in zip(which, lengths, ratios, strict=True):
            counts[axis], by[axis] = n, ratio
    elif scales is not None and len(scales):
        for axis, ratio in zip(which, np.asarray(scales, np.float32), strict=True):
            by[axis] = ratio
            counts[axis] = math.floor(np.float32(x.shape[axis]) * ratio)
    else:
        raise ModelError("expected scales or sizes, got neither")
    if min(counts) < 0 or math.prod(counts) > 1 << 40:
        raise ModelError(f"expected a result of at most 2**40 elements, got the shape {counts}")
    is_cropped = at.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if is_cropped and (roi is None or not len(roi)):
        roi = [0.0] * len(which) + [1.0] * len(which)  # the whole image
    if counts == [*x.shape] and not is_cropped:
        return x
    y, order = in_memory(x)
    is_nearest = mode == "nearest"
    own, wide = y.dtype, _wide(y.dtype)
    y = y if is_nearest else ml.astype(y, wide)
    for place, axis in enumerate(which):
        n, k = x.shape[axis], counts[axis]
        stored, region = order[axis], None
        if is_cropped:
            region = float(roi[place]), float(roi[place + len(which)])
        if k == n and region is None and (by[axis] == 1.0 or at.get("antialias", 0)):
            continue
        matrix = weights(at, n, k, by[axis], region)
        if is_nearest or (
            (np.count_nonzero(matrix, axis=1) == 1).all() and (matrix.max(1) == 1).all()
        ):
            source = matrix.argmax(1)
            repeats = k // n if n and k % n == 0 else 0
            if repeats and np.array_equal(source, np.arange(k) // repeats):
                y = ml.repeat(y, repeats, axis=stored)
            else:
                y = ml.take(y, ml.asarray(source), axis=stored)
        else:
            y = _weighted(y, matrix, stored)
    if is_cropped:
        y = _outside(at, y, x.shape, counts, which, roi, order)
    if y.dtype != own:
        if not own.is_float:  # onnxruntime truncates only linear weights
            is_cut = mode == "linear" and not at.get("antialias", 0)
            y = ml.clip(y if is_cut else ml.round(y), *_range(own))
        y = ml.astype(y, own)
    return permuted(y, order)


def _wide(dtype: DType) -> DType:
    """Return the dtype in which elements are weighted; the result is rounded once."""
    is_wide = dtype == ml.float64 or (dtype.is_integer and dtype.itemsize > 2)
    return ml.float64 if is_wide else ml.float32


def _range(dtype: DType) -> tuple[float, float]:
    info = np.iinfo(str(dtype.numpy))
    return float(info.min), float(info.max)


def _weighted(x: Any, matrix: Array, axis: int) -> Any:
    """Sum a few weighted positions of x for each position of the result."""
    most = int(np.count_nonzero(matrix, axis=1).max(initial=1))
    top = np.sort(np.argsort(-np.abs(matrix), axis=1, kind="stable")[:, :most], axis=1)
    share = np.take_along_axis(matrix, top, axis=1)
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    rows = ml.reshape(x, (math.prod(before), x.shape[axis], math.prod(behind)))
    weights = ml.asarray(share[None], dtype=x.dtype)
    y = primitives.weighted_take(rows, ml.asarray(top[None]), weights)
    return ml.reshape(y, (*before, len(matrix), *behind))


def weights(at: NodeCall, n: int, k: int, scale: Any, region: tuple[float, float] | None) -> Array:
    """Return the weight of each of n positions in each of k positions of the result.

    Positions and scale are in f32, as in other runtimes, because the rounding determines the
    nearest position.
    """
    mode, how = at.get("mode", "nearest"), at.get("coordinate_transformation_mode", "half_pixel")
    bounded((k, n))
    is_old = at.node.type == "Upsample" or at.opset < 11
    out, half = np.arange(k, dtype=np.float32), np.float32(0.5)
    low, high = region or (0.0, 1.0)
    places: dict[str, Any] = {
        "asymmetric": lambda: out / scale,
        "align_corners": lambda: out * (n - 1) / max(k - 1, 1),
        "pytorch_half_pixel": lambda: (out + half) / scale - half if k > 1 else out,
        "half_pixel_symmetric": lambda: (
            n / 2 * (1 - np.float32(k) / (scale * np.float32(n)))
            + (np.arange(k) + 0.5) / scale
            - 0.5
        ),
        "tf_crop_and_resize": lambda: _cropped(n, k, low, high),
        "tf_half_pixel_for_nn": lambda: (out + half) / scale,
        "half_pixel": lambda: (out + half) / scale - half,
    }
    if how not in places:
        raise ModelError(f"the coordinate transformation {how!r} is unknown; use half_pixel")
    place = np.asarray(places["asymmetric" if is_old else how](), np.float32)
    matrix = np.zeros((k, n))
    rows = np.arange(k)
    if mode == "nearest":
        rule = at.get("nearest_mode", "round_prefer_floor")
        if is_old:
            rule = "ceil" if scale < 1 else "floor"
        rules: dict[str, Any] = {
            "round_prefer_floor": lambda p: np.ceil(p - 0.5),
            "round_prefer_ceil": lambda p: np.floor(p + 0.5),
            "floor": np.floor,
            "ceil": np.ceil,
        }
        matrix[rows, np.clip(rules[rule](place), 0, n - 1).astype(int)] = 1.0
        return matrix
    first = np.floor(place)
    t = place - first
    a = at.get("cubic_coeff_a", -0.75)
    if mode == "linear":
        taps = [(0, 1 - t), (1, t)]
        if at.get("antialias", 0) and scale < 1:
            return _antialiased(at, place, n, scale, lambda d: np.maximum(1 - np.abs(d), 0), 1)
    else:

        def cubic(d: Array) -> Array:
            d = np.abs(d)
            near = ((a + 2) * d - (a + 3)) * d * d + 1
            far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

        if at.get("antialias", 0) and scale < 1:
            return _antialiased(at, place, n, scale, cubic, 2)
        taps = [(j, cubic(t - j)) for j in (-1, 0, 1, 2)]
        if at.get("exclude_outside", 0):
            inside = [((first + j >= 0) & (first + j < n)) * share for j, share in taps]
            whole = np.sum(inside, axis=0)
            taps = [(j, share / whole) for (j, _), share in zip(taps, inside, strict=True)]
    for j, share in taps:
        np.add.at(matrix, (rows, np.clip(first + j, 0, n - 1).astype(int)), share)
    return matrix


def _cropped(n: int, k: int, low: float, high: float) -> Array:
    """Return the positions that a region from `low` to `high` of the image reads."""
    if k == 1:
        return np.full(1, 0.5 * (low + high) * (n - 1))
    return low * (n - 1) + np.arange(k) * (high - low) * (n - 1) / (k - 1)


def _antialiased(at: NodeCall, place: Array, n: int, scale: Any, kernel: Any, reach: int) -> Array:
    places = np.arange(math.floor(-reach / scale) - 1, n + math.ceil(reach / scale) + 1)
    share = kernel((places[None, :] - place[:, None]) * scale)
    if at.get("exclude_outside", 0):
        share = share * ((places >= 0) & (places < n))
    share = share / share.sum(1, keepdims=True)
    matrix = np.zeros((len(place), n))
    for column, where in zip(share.T, np.clip(places, 0, n - 1), strict=True):
        matrix[:, where] += column
    return matrix


def _outside(
    at: NodeCall, y: Any, shape: Any, counts: Any, which: Any, roi: Any, order: Any
) -> Any:
    """Replace positions outside of the image by the extrapolation value."""
    beyond = np.zeros(1, bool)
    for i, axis in enumerate(which):
        n, k = shape[axis], counts[axis]
        low, high = float(roi[i]), float(roi[i + len(which)])
        place = _cropped(n, k, low, high)
        stored = order[axis]
        outside = (place < 0) | (place > n - 1)
        beyond = beyond | outside.reshape([-1 if j == stored else 1 for j in range(len(shape))])
    value = at.get("extrapolation_value", 0.0)
    return ml.where(ml.asarray(beyond), ml.full((), value, dtype=y.dtype), y)


# --- sampling -----------------------------------------------------------------------------


@op("GridSample com.microsoft.GridSample", "raw")
def grid_sample(at: NodeCall, x: Value, grid: Value) -> Value:
    mode, image = at.get("mode", "linear"), channels_last(x)
    y = ml.grid_sample(
        image,
        ml.astype(tensor(grid), image.dtype),
        mode={"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
        padding=at.get("padding_mode", "zeros"),
        align_corners=bool(at.get("align_corners", 0)),
    )
    return channels_second(y)


@op("AffineGrid", "tensors", host=[1])
def affine_grid(at: NodeCall, theta: Any, size: Any) -> Any:
    places = [int(n) for n in size[2:]]
    bounded((*places, len(places) + 1))
    lines = [(2 * np.arange(n) + 1) / n - 1 for n in places]
    if at.get("align_corners", 0):
        # a side of length 1 is at 1, as in onnxruntime
        lines = [np.linspace(-1, 1, n) if n > 1 else np.ones(n) for n in places]
    grid = np.meshgrid(*lines, indexing="ij")[::-1]
    points = np.stack([*grid, np.ones(places)], axis=-1).reshape(-1, len(places) + 1)
    rows = ml.asarray(points.astype(np.float32), dtype=theta.dtype)
    y = ml.matmul(rows, ml.matrix_transpose(theta))
    return ml.reshape(y, (theta.shape[0], *places, len(places)))


@op("RoiAlign", "raw", host=[1, 2])
def roi_align(at: NodeCall, x: Value, rois: Any, batch: Any) -> Value:
    x = channels_last(x)
    _, height, width, c = x.shape
    ph, pw = at.get("output_height", 1), at.get("output_width", 1)
    ratio, scale = at.get("sampling_ratio", 0), at.get("spatial_scale", 1.0)
    mode = at.get(
        "coordinate_transformation_mode", "half_pixel" if at.opset >= 16 else "output_half_pixel"
    )
    shift = 0.5 if mode == "half_pixel" else 0.0
    is_max = at.get("mode", "avg") == "max"
    combined, over_cells = (ml.maximum, ml.max) if is_max else (ml.add, ml.mean)
    regions = []
    for roi, image in zip(rois.astype(np.float64), batch.reshape(-1), strict=True):
        x1, y1, x2, y2 = roi * scale - shift
        w, h = x2 - x1, y2 - y1
        if mode != "half_pixel":
            w, h = max(w, 1.0), max(h, 1.0)
        rows, columns = (ratio, ratio) if ratio > 0 else (math.ceil(h / ph), math.ceil(w / pw))
        if rows < 1 or columns < 1:  # an empty region
            regions.append(ml.zeros((ph, pw, c), dtype=x.dtype))
            continue
        ys = y1 + (np.arange(ph * rows) + 0.5) * h / (ph * rows)
        xs = x1 + (np.arange(pw * columns) + 0.5) * w / (pw * columns)
        picture = x[int(image)]
        parts = []
        for (r, a), (q, b) in ((p, k) for p in _pair(ys, height) for k in _pair(xs, width)):
            share = (a[:, None] * b[None, :])[..., None].astype(np.float32)
            part = ml.take(ml.take(picture, ml.asarray(r), axis=0), ml.asarray(q), axis=1)
            parts.append(part * ml.asarray(share, dtype=x.dtype))
        cells = ml.reshape(reduce(combined, parts), (ph, rows, pw, columns, c))
        regions.append(over_cells(cells, axis=(1, 3)))
    if not regions:
        return channels_second(ml.zeros((0, ph, pw, c), dtype=x.dtype))
    return channels_second(ml.stack(regions))


def _pair(at: Array, n: int) -> list[tuple[Array, Array]]:
    """Return the two neighbours of each position, and the weights.

    The weights are 0 outside of the image.
    """
    inside = (at >= -1.0) & (at <= n)
    place = np.maximum(at, 0.0)
    low = np.minimum(np.floor(place).astype(int), n - 1)
    place = np.where(low >= n - 1, float(n - 1), place)
    high = np.minimum(low + 1, n - 1)
    t = place - low
    return [(low, (1 - t) * inside), (high, t * inside)]


@op("Col2Im", "tensors", host=[1, 2])
def col2im(at: NodeCall, x: Any, image: Any, block: Any) -> Any:
    size, window = [int(n) for n in image], [int(n) for n in block]
    axes = len(size)
    strides, dilation, span = steps_of(at, window)
    pads = at.get("pads") or [0] * (2 * axes)
    n, c = x.shape[0], x.shape[1] // math.prod(window)
    whole = [size[i] + pads[i] + pads[i + axes] for i in range(axes)]
    bounded(whole)
    counts = [(whole[i] - span[i]) // strides[i] + 1 for i in range(axes)]
    places: Any = 0
    for i in range(axes):
        line = np.add.outer(np.arange(window[i]) * dilation[i], np.arange(counts[i]) * strides[i])
        shape = [1] * (2 * axes)
        shape[i], shape[axes + i] = line.shape
        places = places * whole[i] + line.reshape(shape)
    rows = ml.permute_dims(ml.reshape(x, (n * c, math.prod(x.shape[1:]) // max(c, 1))), (1, 0))
    zeros = ml.zeros((math.prod(whole), n * c), dtype=x.dtype)
    total = primitives.index_add(zeros, rows, ml.asarray(np.ravel(places)), axis=0)
    images = ml.reshape(ml.permute_dims(total, (1, 0)), (n, c, *whole))
    return images[(..., *(slice(pads[i], pads[i] + size[i]) for i in range(axes)))]


@op("DeformConv", "tensors")
def deform_conv(at: NodeCall, x: Any, w: Any, offset: Any, b: Any = None, mask: Any = None) -> Any:
    n, c, height, width = x.shape
    o, _, kh, kw = w.shape
    strides, dilation = at.get("strides") or [1, 1], at.get("dilations") or [1, 1]
    pads, groups, parts = at.get("pads") or [0] * 4, at.get("group", 1), at.get("offset_group", 1)
    oh, ow = offset.shape[2:]
    moved = ml.reshape(offset, (n, parts, kh * kw, 2, oh, ow))
    rows = np.arange(oh)[:, None] * strides[0] - pads[0] + np.zeros((1, ow))
    columns = np.arange(ow)[None, :] * strides[1] - pads[1] + np.zeros((oh, 1))
    image = ml.reshape(
        ml.permute_dims(ml.reshape(x, (n * parts, c // parts, height, width)), (0, 2, 3, 1)),
        (n * parts, height, width, c // parts),
    )
    taps = []
    for k in range(kh * kw):
        base = rows + k // kw * dilation[0], columns + k % kw * dilation[1]
        at_y = moved[:, :, k, 0] + ml.asarray(base[0].astype(np.float32), dtype=x.dtype)
        at_x = moved[:, :, k, 1] + ml.asarray(base[1].astype(np.float32), dtype=x.dtype)
        pairs = (at_x, width), (at_y, height)
        grid = ml.stack([v * (2.0 / max(m - 1, 1)) - 1.0 for v, m in pairs], axis=-1)
        part = ml.grid_sample(image, ml.reshape(grid, (n * parts, oh, ow, 2)), align_corners=True)
        if mask is not None:
            share = ml.reshape(mask, (n, parts, kh * kw, oh, ow))[:, :, k]
            part = part * ml.reshape(share, (n * parts, oh, ow, 1))
        part = ml.permute_dims(ml.reshape(part, (n, parts, oh, ow, c // parts)), (0, 2, 3, 1, 4))
        taps.append(ml.reshape(part, (n, oh, ow, c)))
    kernel = ml.reshape(ml.permute_dims(w, (2, 3, 1, 0)), (kh * kw, c // groups, o))
    total: Any = None
    for k, tap in enumerate(taps):
        y = ml.conv2d(tap, ml.reshape(kernel[k], (1, 1, c // groups, o)), groups=groups)
        total = y if total is None else total + y
    total = total if b is None else total + b
    return ml.permute_dims(total, (0, 3, 1, 2))
