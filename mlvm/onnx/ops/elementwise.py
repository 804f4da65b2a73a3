"""Ops that compute each element by itself."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.ops import half
from mlvm.core.types import DType, bool_
from mlvm.onnx.arrays import DTYPES, FLOATS, INTEGERS, dtype_of
from mlvm.onnx.few import rounded, wrapped
from mlvm.onnx.table import TABLE, Call, Op, op
from mlvm.onnx.values import PermutedTensor, Value, tensor

_SAME: Final = """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Neg:negative
    Not:logical_not Round Sign Sin Sinh Sqrt Tan Tanh IsNaN:isnan BitwiseNot:bitwise_invert
    Add Sub:subtract Mul:multiply And:logical_and Or:logical_or Xor:logical_xor Equal:equal
    Greater:greater GreaterOrEqual:greater_equal Less:less LessOrEqual:less_equal
    BitwiseAnd:bitwise_and BitwiseOr:bitwise_or BitwiseXor:bitwise_xor Where:where Reciprocal
    Sigmoid Mish Softsign:soft_sign"""
"""Ops that the standard or `mlvm.eager` has, and their names there."""


_OF_TWO: Final = """
    Add Sub Mul And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual
    BitwiseAnd BitwiseOr BitwiseXor
"""
"""Those of two operands."""


def _enter(name: str, function: str) -> None:
    def run(at: Call, *xs: Any) -> Any:
        return getattr(at.xp, function)(*xs)

    least = 3 if name == "Where" else 2 if name in _OF_TWO.split() else 1
    TABLE[name] = Op(run, "elementwise", (), {}, least)


for _each in _SAME.split():
    _name, _, _function = _each.partition(":")
    _enter(_name, _function or _name.lower())


def is_float(x: Any) -> bool:
    """Return whether an operand has a float dtype."""
    return DType.of(x.dtype).is_float if hasattr(x, "dtype") else isinstance(x, float)


@op("Div", "elementwise")
def div(at: Call, x: Any, y: Any) -> Any:
    if is_float(x) and is_float(y):
        return at.xp.divide(x, y)
    xp, quotient = at.xp, at.xp.floor_divide(x, y)  # of integers, towards 0
    if DType.of(x.dtype).kind == "unsigned":
        return quotient
    is_cut = xp.not_equal(quotient * y, x)
    negative = xp.not_equal(xp.less(x, 0), xp.less(y, 0))
    return quotient + xp.astype(xp.logical_and(is_cut, negative), quotient.dtype)


@op("Relu", "elementwise")
def relu(at: Call, x: Any) -> Any:
    return np.maximum(x, 0).astype(x.dtype) if at.is_host else ml.relu(x)


@op("Mod", "elementwise")
def mod(at: Call, x: Any, y: Any) -> Any:
    return at.xp.fmod(x, y) if at.get("fmod", 0) else at.xp.remainder(x, y)


@op("Pow", "elementwise")
def pow(at: Call, x: Any, y: Any) -> Any:
    if isinstance(y, (np.generic, np.ndarray)) and y.ndim == 0 and not at.is_host and is_float(x):
        if y == 2:
            return ml.square(x)
        if y == 0.5:
            return ml.sqrt(x)
        return ml.pow(x, float(y))
    if DType.of(x.dtype) is DType.of(y.dtype):
        return at.xp.pow(x, y)
    if is_float(y) and not is_float(x):
        return at.xp.astype(at.xp.pow(at.xp.astype(x, y.dtype), y), x.dtype)
    return at.xp.pow(x, at.xp.astype(at.xp.asarray(y), x.dtype))


@op("BitShift", "elementwise")
def bit_shift(at: Call, x: Any, y: Any) -> Any:
    is_left = at["direction"] == "LEFT"
    return (at.xp.bitwise_left_shift if is_left else at.xp.bitwise_right_shift)(x, y)


@op("Max", "elementwise")
def maximum(at: Call, x: Any, *xs: Any) -> Any:
    return reduce(at.xp.maximum, xs, x)


@op("Min", "elementwise")
def minimum(at: Call, x: Any, *xs: Any) -> Any:
    return reduce(at.xp.minimum, xs, x)


@op("Sum", "elementwise")
def sum(at: Call, *xs: Any) -> Any:
    return reduce(at.xp.add, xs)


@op("Mean", "elementwise")
def mean(at: Call, *xs: Any) -> Any:
    return reduce(at.xp.add, xs) / len(xs)


@op("Clip", "elementwise")
def clip(at: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    low = at.get("min") if low is None else low
    high = at.get("max") if high is None else high
    if not hasattr(x, "dtype"):
        return x
    return x if low is None and high is None else at.xp.clip(x, low, high)


@op("IsInf", "elementwise")
def is_inf(at: Call, x: Any) -> Any:
    xp = at.xp
    up, down = at.get("detect_positive", 1), at.get("detect_negative", 1)
    if up and down:
        return xp.isinf(x)
    if not up and not down:
        return xp.astype(xp.zeros_like(x), xp.bool if xp is np else bool_)
    return xp.logical_and(xp.isinf(x), xp.greater(x, 0) if up else xp.less(x, 0))


# --- activations --------------------------------------------------------------------------


@op("LeakyRelu", "elementwise")
def leaky_relu(at: Call, x: Any) -> Any:
    return ml.leaky_relu(tensor(x), at.get("alpha", 0.01))


@op("Elu", "elementwise")
def elu(at: Call, x: Any) -> Any:
    return ml.elu(tensor(x), at.get("alpha", 1.0))


@op("Celu", "elementwise")
def celu(at: Call, x: Any) -> Any:
    return ml.celu(tensor(x), at.get("alpha", 1.0))


@op("Selu", "elementwise")
def selu(at: Call, x: Any) -> Any:
    alpha, gamma = at.get("alpha", 1.6732632423543772), at.get("gamma", 1.0507009873554805)
    return ml.elu(tensor(x), alpha) * gamma


@op("ThresholdedRelu", "elementwise")
def thresholded_relu(at: Call, x: Any) -> Any:
    return at.xp.where(at.xp.greater(x, at.get("alpha", 1.0)), x, at.xp.zeros_like(x))


@op("HardSigmoid", "elementwise")
def hard_sigmoid(at: Call, x: Any) -> Any:
    line = x * at.get("alpha", 0.2) + at.get("beta", 0.5)
    return _same(at, at.xp.clip(line, 0.0, 1.0), x)


@op("HardSwish", "elementwise")
def hard_swish(at: Call, x: Any) -> Any:
    return x * _same(at, at.xp.clip(x * (1 / 6) + 0.5, 0.0, 1.0), x)


@op("Swish com.microsoft.QuickGelu", "elementwise")
def swish(at: Call, x: Any) -> Any:
    x, alpha = tensor(x), at.get("alpha", 1.702 if "Gelu" in at.node.type else 1.0)
    return ml.silu(x) if alpha == 1.0 else x * ml.sigmoid(x * alpha)


@op("SwiGLU", "tensors")
def swiglu(at: Call, *xs: Any) -> Any:
    if len(xs) == 1 or xs[1] is None:
        gate, up = ml.split(xs[0], 2, axis=at.get("axis", -1))
    else:
        gate, up = xs[:2]
    alpha = at.get("alpha", 1.0)
    return (ml.silu(gate) if alpha == 1.0 else gate * ml.sigmoid(gate * alpha)) * up


@op("Softplus", "elementwise")
def softplus(at: Call, x: Any) -> Any:
    return ml.softplus(tensor(x))


@op("Gelu com.microsoft.Gelu", "elementwise")
def gelu(at: Call, x: Any) -> Any:
    return ml.gelu(tensor(x), approximate=at.get("approximate", "none") == "tanh")


@op("com.microsoft.FastGelu com.microsoft.BiasGelu", "elementwise")
def fast_gelu(at: Call, x: Any, bias: Any = None) -> Any:
    x = tensor(x) if bias is None else tensor(x) + bias
    return ml.gelu(x, approximate="Fast" in at.node.type)


@op("Shrink", "elementwise")
def shrink(at: Call, x: Any) -> Any:
    xp, bias, limit = at.xp, at.get("bias", 0.0), at.get("lambd", 0.5)
    above = xp.where(xp.greater(x, limit), x - bias, xp.zeros_like(x))
    return _same(at, xp.where(xp.less(x, -limit), x + bias, above), x)


@op("PRelu", "elementwise")
def prelu(at: Call, x: Any, slope: Any) -> Any:
    return at.xp.where(at.xp.less(x, 0), x * slope, x)


def _same(at: Call, y: Any, x: Any) -> Any:
    return y if y.dtype == x.dtype else at.xp.astype(y, x.dtype)


# --- dtypes -------------------------------------------------------------------------------


@op("Cast", "elementwise")
def cast(at: Call, x: Any) -> Any:
    return converted(at, x, at["to"])


@op("CastLike", "raw")
def cast_like(at: Call, x: Value, like: Value) -> Value:
    number = at.node.numbers[1]
    if not number:
        number = next(k for k, dtype in DTYPES.items() if dtype is DType.of(like.dtype))
    xp = np if isinstance(x, np.ndarray) else ml
    inner = Call(at.node, xp, at.graph, at.scope)
    if isinstance(x, PermutedTensor):
        return PermutedTensor(converted(inner, x.x, number), x.axes)
    return converted(inner, x, number)


def converted(at: Call, x: Any, number: int) -> Any:
    """Convert x to a `TensorProto.DataType`, rounded to it if a wider dtype holds it."""
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


def _dtype(at: Call, name: str) -> Any:
    dtype = DType.named(name)
    return dtype.numpy if at.is_host else dtype


@op("BitCast", host=[0])
def bit_cast(at: Call, x: Any) -> Any:
    return x.view(dtype_of(at["to"], "it").numpy)
