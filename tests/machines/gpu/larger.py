"""Cases of ops that take a device more than one step: trees of several levels, tiles with edges,
runs that are merged, draws that are refused. The reference machine says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases import Case
from tests.cases.evaluate import evaluate

_rng = np.random.default_rng(7)


def _f32(*shape: int) -> Array:
    return _rng.standard_normal(shape, np.float32)


def _ints(low: int, high: int, *shape: int) -> Array:
    return _rng.integers(low, high, shape)


_KEY = np.array([3, 5], np.uint64)
_LABELS = _ints(0, 100, 200)
_INDICES = _ints(-50, 50, 300)
_MASK = _rng.random((150, 2)) < 0.3


def _cases() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    row, columns, middle = _f32(2, 20_000), _f32(700, 3), _f32(5, 300, 40)
    for name in ("sum", "max", "argmin", "var", "logsumexp"):
        yield name, (row,), {"axis": 1}
        yield name, (columns,), {"axis": 0}
        yield name, (middle,), {"axis": 1}
    yield "mean", (_ints(-100, 100, 30_000),), {}
    yield "sum", (middle,), {"axis": (0, 2)}
    yield "cumulative_sum", (_ints(-9, 9, 3, 2000),), {"axis": 1}
    yield "cumulative_sum", (_ints(-9, 9, 40_000, 2),), {"axis": 0}
    yield "cumulative_prod", (2 * _ints(0, 2, 3, 2000) - 1,), {"axis": 1}
    rows = _f32(200, 100)
    scale = _f32(100)
    for axis in (0, 1):
        yield "softmax", (rows,), {"axis": axis}
        yield "log_softmax", (rows,), {"axis": axis}
    yield "softmax_cross_entropy", (rows, _LABELS), {}
    yield "softmax_cross_entropy_vjp", (_f32(200), rows, _LABELS), {}
    yield "layer_norm", (rows, scale, scale), {"eps": 1e-5}
    yield "layer_norm_vjp", (_f32(200, 100), rows, scale), {"eps": 1e-5}
    yield "layer_norm_scale_vjp", (_f32(200, 100), rows), {"eps": 1e-5}
    for m, n, k in ((70, 65, 130), (7, 9, 3000), (65, 40, 1100)):
        for transpose_x, transpose_y in ((False, False), (True, False), (False, True)):
            x = _f32(3, *((k, m) if transpose_x else (m, k)))
            y = _f32(3, *((n, k) if transpose_y else (k, n)))
            turned = {"transpose_x": transpose_x, "transpose_y": transpose_y}
            yield "matmul", (x, y), turned
            yield "batch_contract", (x, y), turned
    edges = {"stride": (2, 1), "padding": ((1, 2), (0, 1))}
    yield "conv2d", (_f32(2, 13, 17, 5), _f32(3, 2, 5, 70)), edges
    phases = {"stride": (2, 3), "dilation": (3, 2), "padding": ((1, 2), (0, 1)), "groups": 2}
    weights = _f32(3, 2, 4, 10)
    yield "conv_transpose2d", (_f32(2, 7, 9, 10), weights), {**phases, "shape": (2, 16, 26, 8)}
    yield "permute_dims", (_f32(3, 70, 5, 40),), {"axes": (2, 3, 0, 1)}
    yield "slice_add", (_f32(9, 90), _f32(4, 40)), {"start": (1, 2), "step": (2, 2)}
    for axis, descending in ((0, True), (1, False)):
        attributes = {"axis": axis, "descending": descending}
        yield "sort", (_f32(5, 300).round(1),), attributes
        yield "argsort", (_f32(70, 300).round(1),), attributes
    yield "scatter_add", (_f32(2, 300, 3), _INDICES), {"axis": 1, "length": 50}
    yield "index_add", (_f32(50, 3), _f32(300, 3), _INDICES), {"axis": 0}
    along = {"axis": 1, "length": 50}
    yield "scatter_add_along_axis", (_f32(3, 90, 4), _ints(-50, 50, 3, 90, 4)), along
    yield "index_set", (_f32(2, 50, 3), _f32(2, 300, 3), _INDICES), {"axis": 1, "axes": 1}
    count = int(_MASK.sum())
    yield "mask_set", (_f32(150, 2, 3), _f32(count, 1), _MASK), {}
    yield "mask_scatter", (_f32(count, 3), _MASK), {"shape": (150, 2, 3)}
    for low, high, dtype in ((0, 3 * 2**62, "u64"), (-5, 1000, "i32"), (0, 200, "u8")):
        yield "randint", (_KEY,), {"low": low, "high": high, "shape": (999,), "dtype": dtype}
    yield "normal", (_KEY,), {"shape": (30_001,), "dtype": "f32"}
    yield "uniform", (_KEY,), {"shape": (1001,), "dtype": "f32"}
    yield "dropout", (rows, _KEY), {"rate": 0.3}
    yield "bernoulli", (_KEY, _rng.random((3, 1))), {"shape": (2, 3, 500)}


def _reference(name: str) -> Any:
    """Return the reference machine's function; of products in f64, as BLAS adds up long sums in f32
    in an order of its processor."""

    def reference(*inputs: Any, **attributes: Any) -> Array:
        if name not in ("matmul", "batch_contract"):
            return evaluate(name, *inputs, **attributes)
        return evaluate(name, *[x.astype(np.float64) for x in inputs], **attributes).astype("f4")

    return reference


LARGER = [(name, Case(inputs, _reference(name), how)) for name, inputs, how in _cases()]


def as_gpu(vm: Any) -> None:
    """Have the VM's device, a processor, get the calls that a GPU gets."""
    vm.memory.driver.facts = vm.memory.driver.facts._replace(is_cpu=False)
