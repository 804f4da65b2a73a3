"""Plugin of pytest that runs tests of MLX, in a checkout, on mlvm: `import mlx.core as mx` gives
the module below."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.suites.names import Names


class _Arrays(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, ml.Tensor)


class array(metaclass=_Arrays):
    """MLX's class: it makes tensors, of int32 for Python's ints."""

    def __new__(cls, values: Any, dtype: Any = None) -> Any:
        x = ml.asarray(values, dtype=dtype)
        is_wide = dtype is None and not hasattr(values, "dtype") and x.dtype == ml.int64
        return ml.astype(x, ml.int32) if is_wide else x


def nothing(*_: object, **__: object) -> None:
    """Do what mlvm needs no call for: evaluation, streams, devices."""


def grad(fn: Any, argnums: Any = 0) -> Any:
    return ml.grad(fn, argnums=argnums)


core = Names(
    "mlx.core",
    ml,
    ml.linalg,
    np,
    array=array,
    grad=grad,
    bool_=ml.bool,
    concatenate=ml.concat,
    transpose=lambda x, axes=None: ml.permute_dims(x, axes or range(x.ndim)[::-1]),
    cumsum=ml.cumulative_sum,
    cumprod=ml.cumulative_prod,
    **dict.fromkeys(
        ("eval", "async_eval", "clear_streams", "default_device", "set_default_device"), nothing
    ),
    **dict.fromkeys(("default_stream", "new_stream", "synchronize", "clear_cache"), nothing),
    cpu=None,
    gpu=None,
    metal=Names("mlx.core.metal", is_available=lambda: False),
    cuda=Names("mlx.core.cuda", is_available=lambda: False),
    linalg=ml.linalg,
    fft=ml.fft,
    random=Names("mlx.core.random", ml.random),
)
Names("mlx", core=core)
for name in ("nn", "optimizers", "utils"):
    Names(f"mlx.{name}")
