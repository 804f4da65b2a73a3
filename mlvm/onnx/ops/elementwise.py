"""Elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.ops import half
from mlvm.core.types import DType
from mlvm.onnx.arrays import DTYPES, FLOATS, INTEGERS, dtype_of
from mlvm.onnx.few import rounded, wrapped
from mlvm.onnx.table import TABLE, NodeCall, OnnxOp, enter_all, op
from mlvm.onnx.values import PermutedTensor, Value, tensor

_PAIRS: Final = """
result 1: Abs Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Log Neg:negative Reciprocal Sigmoid
    Sign Sin Sinh Sqrt Tan Tanh
result 2: Add Sub:subtract Mul:multiply
floats 1: Ceil Floor Round
operands 2: Equal Greater GreaterOrEqual:greater_equal Less LessOrEqual:less_equal
bool 2: And:logical_and Or:logical_or Xor:logical_xor
bits 2: BitwiseAnd:bitwise_and BitwiseOr:bitwise_or BitwiseXor:bitwise_xor
load 1: BitwiseNot:bitwise_invert IsNaN:isnan Mish Not:logical_not Softsign:soft_sign
load 3: Where
"""


class Pair(NamedTuple):
    """Op of ONNX that corresponds to one op of mlvm.

    `name`: name in ONNX.
    `function`: name in mlvm.
    `least`: number of operands.
    `form`: dtype in which `save` writes the operands, or "load" if `save` writes the op
    differently.
    """

    name: str
    function: str
    least: int
    form: str


def _pairs() -> Iterator[Pair]:
    for line in _PAIRS.replace("\n    ", " ").strip().split("\n"):
        head, _, names = line.partition(": ")
        form, count = head.split()
        for name, _, function in (each.partition(":") for each in names.split()):
            yield Pair(name, function or name.lower(), int(count), form)


PAIRS: Final = tuple(_pairs())
"""Ops with one counterpart: `load` and `save` read the same rows."""


def _enter(function: str) -> Callable[..., Any]:
    return lambda at, *xs: getattr(at.xp, function)(*xs)


for _each in PAIRS:
    TABLE[_each.name] = OnnxOp(
        _enter(_each.function), "elementwise", (), {}, _each.least, _each.least, {}
    )


def is_float(x: Any) -> bool:
    """Return whether an operand has a float dtype."""
    return DType.of(x.dtype).is_float if hasattr(x, "dtype") else isinstance(x, float)


@op("Div", "elementwise")
def div(at: NodeCall, x: Any, y: Any) -> Any:
    if is_float(x) and is_float(y):
        return at.xp.divide(x, y)
    xp, quotient = at.xp, at.xp.floor_divide(x, y)  # integer division rounds towards 0
    if DType.of(x.dtype).kind == "unsigned":
        return quotient
    is_cut = xp.not_equal(quotient * y, x)
    negative = xp.not_equal(xp.less(x, 0), xp.less(y, 0))
    return quotient + xp.astype(xp.logical_and(is_cut, negative), quotient.dtype)


@op("Pow", "elementwise")
def pow(at: NodeCall, x: Any, y: Any) -> Any:
    if isinstance(y, (np.generic, np.ndarray)) and y.ndim == 0 and not at.is_host and is_float(x):
        if y == 2:
            return ml.square(x)
        return ml.pow(x, float(y))
    if DType.of(x.dtype) is DType.of(y.dtype):
        return at.xp.pow(x, y)
    if is_float(y) and not is_float(x):
        return at.xp.astype(at.xp.pow(at.xp.astype(x, y.dtype), y), x.dtype)
    return at.xp.pow(x, at.xp.astype(at.xp.asarray(y), x.dtype))


@op("BitShift", "elementwise")
def bit_shift(at: NodeCall, x: Any, y: Any) -> Any:
    is_left = at["direction"] == "LEFT"
    return (at.xp.bitwise_left_shift if is_left else at.xp.bitwise_right_shift)(x, y)


@op("Max Min Sum Mean", "elementwise")
def combine(at: NodeCall, x: Any, *xs: Any) -> Any:
    names = {"Max": at.xp.maximum, "Min": at.xp.minimum}
    total = reduce(names.get(at.node.type, at.xp.add), xs, x)
    return total / (1 + len(xs)) if at.node.type == "Mean" else total


@op("Clip", "elementwise")
def clip(at: NodeCall, x: Any, low: Any = None, high: Any = None) -> Any:
    low = at.get("min") if low is None else low
    high = at.get("max") if high is None else high
    if not hasattr(x, "dtype"):
        return x
    return x if low is None and high is None else at.xp.clip(x, low, high)


@op("IsInf", "elementwise")
def is_inf(at: NodeCall, x: Any) -> Any:
    xp = at.xp
    up, down = at.get("detect_positive", 1), at.get("detect_negative", 1)
    if up and down:
        return xp.isinf(x)
    if not up and not down:
        return xp.astype(xp.zeros_like(x), xp.bool)
    return xp.logical_and(xp.isinf(x), xp.greater(x, 0) if up else xp.less(x, 0))


# --- activations --------------------------------------------------------------------------


ACTIVATIONS: Final[dict[str, tuple[Callable[..., Any], tuple[float, ...]]]] = {
    "Affine": (lambda x, a, b: x * a + b, (1.0, 0.0)),
    "Celu": (ml.celu, (1.0,)),
    "Clip": (ml.clip, (-math.inf, math.inf)),
    "Elu": (ml.elu, (1.0,)),
    "HardSigmoid": (lambda x, a, b: ml.clip(x * a + b, 0.0, 1.0), (0.2, 0.5)),
    "LeakyRelu": (ml.leaky_relu, (0.01,)),
    "Relu": (ml.relu, ()),
    "Selu": (lambda x, a, gamma: ml.elu(x, a) * gamma, (1.6732632423543772, 1.0507009873554805)),
    "ScaledTanh": (lambda x, a, b: ml.tanh(x * b) * a, (1.0, 1.0)),
    "Sigmoid": (ml.sigmoid, ()),
    "Softplus": (ml.softplus, ()),
    "Softsign": (ml.soft_sign, ()),
    "Tanh": (ml.tanh, ()),
    "ThresholdedRelu": (lambda x, a: ml.where(ml.greater(x, a), x, ml.zeros_like(x)), (1.0,)),
}
"""Activations by ONNX name, and the defaults of the parameters alpha and beta, or gamma of Selu."""


def activation(name: str, params: Sequence[float] = ()) -> Callable[[Any], Any]:
    """Return an activation with its parameters; missing parameters have the defaults."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"the activation {name!r} is unknown; expected one of {', '.join(ACTIVATIONS)}"
        )
    function, defaults = ACTIVATIONS[name]
    return lambda x: function(x, *params, *defaults[len(params) :])


@op("Celu Elu HardSigmoid LeakyRelu Selu Softplus ThresholdedRelu", "elementwise")
def activated(at: NodeCall, x: Any) -> Any:
    return activated_as(at, at.node.type, x, "alpha", "beta", "gamma")


def activated_as(at: NodeCall, name: str, x: Any, alpha: str, beta: str, gamma: str) -> Any:
    """Return the activation of x, with the parameters in the attributes of these names."""
    names = alpha, gamma if name == "Selu" else beta
    defaults = ACTIVATIONS[name][1] if name in ACTIVATIONS else ()
    return activation(name, [*map(at.get, names, defaults)])(tensor(x))


@op("Swish com.microsoft.QuickGelu", "elementwise")
def swish(at: NodeCall, x: Any) -> Any:
    x, alpha = tensor(x), at.get("alpha", 1.702 if "Gelu" in at.node.type else 1.0)
    return ml.silu(x) if alpha == 1.0 else x * ml.sigmoid(x * alpha)


@op("SwiGLU", "tensors")
def swiglu(at: NodeCall, *xs: Any) -> Any:
    if len(xs) == 1 or xs[1] is None:
        gate, up = ml.split(xs[0], 2, axis=at.get("axis", -1))
    else:
        gate, up = xs[:2]
    return gated(gate, up, at.get("alpha", 1.0))


def gated(gate: Any, up: Any, alpha: float, beta: float = 0.0, limit: float = math.inf) -> Any:
    """Compute gate * sigmoid(alpha * gate) * (up + beta), of values within the limit."""
    if limit < math.inf:
        gate, up = ml.clip(gate, None, limit), ml.clip(up, -limit, limit)
    up = up + beta if beta else up
    return (ml.silu(gate) if alpha == 1.0 else gate * ml.sigmoid(gate * alpha)) * up


@op("com.microsoft.SwiGLU", "tensors", round_activation=0)
def swiglu_of_microsoft(at: NodeCall, gate: Any, up: Any = None) -> Any:
    dtype = gate.dtype
    gate, up = ml.split(gate, 2, axis=-1) if up is None else (gate, up)
    gate, up = ml.astype(gate, ml.float32), ml.astype(up, ml.float32)
    alpha, beta = at.get("activation_alpha", 1.0), at.get("activation_beta", 0.0)
    limit = at.get("limit", 0.0)
    limit = limit if limit > 0 else math.inf
    return ml.astype(gated(gate, up, alpha, beta, limit), dtype)


@op("com.microsoft.FastGelu com.microsoft.BiasGelu", "elementwise")
def fast_gelu(at: NodeCall, x: Any, bias: Any = None) -> Any:
    x = tensor(x) if bias is None else tensor(x) + bias
    return ml.gelu(x, approximate="Fast" in at.node.type)


@op("com.microsoft.GemmFastGelu", "tensors")
def gemm_fast_gelu(at: NodeCall, x: Any, w: Any, bias: Any = None) -> Any:
    y = ml.matmul(x, w)
    return ml.gelu(y if bias is None else y + bias, approximate=True)


@op("com.microsoft.BiasSplitGelu", "tensors")
def bias_split_gelu(at: NodeCall, x: Any, bias: Any) -> Any:
    y, gate = ml.split(x + bias, 2, axis=-1)
    return y * ml.gelu(gate, approximate=False)


@op("Shrink", "elementwise")
def shrink(at: NodeCall, x: Any) -> Any:
    xp, bias, limit = at.xp, at.get("bias", 0.0), at.get("lambd", 0.5)
    above = xp.where(xp.greater(x, limit), x - bias, xp.zeros_like(x))
    return _same(at, xp.where(xp.less(x, -limit), x + bias, above), x)


def _same(at: NodeCall, y: Any, x: Any) -> Any:
    return y if y.dtype == x.dtype else at.xp.astype(y, x.dtype)


enter_all(
    "elementwise",
    {
        "Relu": lambda at, x: ml.relu(x) if is_float(x) and not at.is_host else at.xp.maximum(x, 0),
        "Mod": lambda at, x, y: at.xp.fmod(x, y) if at.get("fmod", 0) else at.xp.remainder(x, y),
        "com.microsoft.BiasAdd": lambda at, x, bias, skip: x + bias + skip,
        "HardSwish": lambda at, x: x * _same(at, at.xp.clip(x * (1 / 6) + 0.5, 0.0, 1.0), x),
        "Gelu com.microsoft.Gelu": lambda at, x: ml.gelu(
            tensor(x), approximate=at.get("approximate", "none") == "tanh"
        ),
        "PRelu": lambda at, x, slope: at.xp.where(at.xp.less(x, 0), x * slope, x),
        "Cast": lambda at, x: converted(at, x, at["to"]),
    },
)


# --- dtypes -------------------------------------------------------------------------------


@op("CastLike", "raw")
def cast_like(at: NodeCall, x: Value, like: Value) -> Value:
    number = at.node.numbers[1]
    if not number:
        number = next(k for k, dtype in DTYPES.items() if dtype is DType.of(like.dtype))
    xp = np if isinstance(x, np.ndarray) else ml
    inner = NodeCall(at.node, xp, at.scope)
    if isinstance(x, PermutedTensor):
        return PermutedTensor(converted(inner, x.x, number), x.axes)
    return converted(inner, x, number)


def converted(at: NodeCall, x: Any, number: int) -> Any:
    """Convert x to a `TensorProto.DataType`; round x if it is stored in a wider dtype."""
    dtype = dtype_of(number, str(at.node))
    if number in FLOATS:
        x = x if DType.of(x.dtype).name == "f32" else at.xp.astype(x, _dtype(at, "f32"))
        saturate, up = bool(at.get("saturate", 1)), at.get("round_mode", "up")
        return rounded(at.xp, x, number, saturate, up)
    if number in INTEGERS:
        return wrapped(at.xp, x, number)
    if at.is_host and dtype.name == "bf16":
        return half.cast(np.asarray(x), dtype)
    x = at.xp.asarray(x)
    return x if DType.of(x.dtype) is dtype else at.xp.astype(x, _dtype(at, dtype.name))


def _dtype(at: NodeCall, name: str) -> Any:
    dtype = DType.named(name)
    return dtype.numpy if at.is_host else dtype


@op("BitCast", host=[0])
def bit_cast(at: NodeCall, x: Any) -> Any:
    return x.view(dtype_of(at["to"], "it").numpy)
