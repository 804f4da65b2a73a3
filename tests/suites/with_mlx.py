"""Plugin of pytest that runs tests of MLX, in a checkout, on mlvm: `import mlx.core as mx` gives
the module below."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from tests.fuzz.command import limit_memory
from tests.suites.names import Names

limit_memory(8 << 30)  # a test makes a range of 2^31 numbers


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


def vjp(fn: Any, primals: Any, cotangents: Any) -> Any:
    value, pullback = ml.vjp(lambda *x: _one(fn(*x)), *primals)
    return _list(value), _list(pullback(_one(cotangents)))


def jvp(fn: Any, primals: Any, tangents: Any) -> Any:
    values = ml.jvp(lambda *x: _one(fn(*x)), tuple(primals), tuple(tangents))
    return tuple(map(_list, values))


def _one(values: Any) -> Any:
    return values[0] if isinstance(values, (tuple, list)) and len(values) == 1 else values


def _list(values: Any) -> list[Any]:
    return [*values] if isinstance(values, (tuple, list)) else [values]


def convolution(rank: int) -> Any:
    """Return MLX's convolution, whose kernels begin with the output channels."""

    def call(
        x: Any, w: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        sides = (padding,) * rank if isinstance(padding, int) else padding
        return getattr(ml, f"conv{rank}d")(
            x,
            ml.moveaxis(w, 0, -1),
            stride=stride,
            padding=tuple([(n, n) for n in sides]),
            dilation=dilation,
            groups=groups,
        )

    return call


def without_stream(name: str) -> Any:
    """Return the function of `linalg`, which takes `stream=`, too."""
    return lambda *args, stream=None, **how: getattr(ml.linalg, name)(*args, **how)


def randint(low: Any, high: Any, shape: Any = (), dtype: Any = ml.int32, key: Any = None) -> Any:
    return ml.random.randint(tuple(shape), low=low, high=high, dtype=dtype, key=key)


def pad(x: Any, pad_width: Any, mode: Any = "constant", constant_values: Any = 0) -> Any:
    return ml.pad(x, pad_width, constant_values, mode=mode)


core = Names(
    "mlx.core",
    ml,
    ml.linalg,
    np,
    array=array,
    grad=grad,
    vjp=vjp,
    jvp=jvp,
    pad=pad,
    conv1d=convolution(1),
    conv2d=convolution(2),
    conv3d=convolution(3),
    bool_=ml.bool,
    concatenate=ml.concat,
    transpose=lambda x, axes=None: ml.permute_dims(x, axes or [*range(x.ndim)][::-1]),
    cumsum=ml.cumulative_sum,
    cumprod=ml.cumulative_prod,
    **dict.fromkeys(
        ("eval", "async_eval", "clear_streams", "default_device", "set_default_device"), nothing
    ),
    **dict.fromkeys(("default_stream", "new_stream", "synchronize", "clear_cache"), nothing),
    is_available=lambda _: False,
    cpu=None,
    gpu=None,
    metal=Names("mlx.core.metal", is_available=lambda: False),
    cuda=Names("mlx.core.cuda", is_available=lambda: False),
    linalg=Names("mlx.core.linalg", **{x: without_stream(x) for x in ml.linalg.__all__}),
    fft=ml.fft,
    random=Names("mlx.core.random", ml.random, randint=randint),
)
Names("mlx", core=core)
for name in ("nn", "optimizers", "utils"):
    Names(f"mlx.{name}")
