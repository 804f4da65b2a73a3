"""Ops of mlvm expressed by ops of ONNX, for `save`.

A body is a small function of a `OnnxBody`, which contains the operand types and the attributes. It
returns the name of the result. A body of a single node with unchanged operands is written as this
node. Any other body becomes a function of the file, named like the op. Ops without a body cannot be
saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import ModelError
from mlvm.core.op import Attributes
from mlvm.core.ops import few
from mlvm.core.rules import common_dtype
from mlvm.core.types import (
    DType,
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from mlvm.eager.tensor.number import is_free, is_open
from mlvm.onnx.arrays import DTYPES, NAMES
from mlvm.onnx.ops.elementwise import PAIRS

OPSET: Final = 20
"""Opset of the written files (https://onnx.ai/onnx/operators)."""

BODIES: Final[dict[str, Callable[[OnnxBody], str]]] = {}
"""Bodies by op name."""

_Rule: TypeAlias = "Callable[[OnnxBody], str]"


_CAST: Final = {
    **dict.fromkeys((bool_, i8, i16, u8, u16), i32),
    **dict.fromkeys((u32, u64), i64),
    **dict.fromkeys((f16, f64), f32),
}
"""Dtype of a node's computation if ONNX or onnxruntime does not support the operand dtype. The low
bits of integers are preserved; the order of u64 is not."""

_LACKS: Final = {
    op: frozenset(map(DType.named, dtypes.split()))
    for ops, dtypes in (
        ("Neg", "u8 u16 u32 u64"),
        ("Pow", "i8 i16 u8 u16 u32 u64"),
        ("Max Min", "i16 u16 bool"),
        ("Pad", "i16 u16 bool"),
        ("Where", "i16 u16 u64 bool"),
        ("Trilu", "i8 i16 u8 u16 u32 u64"),
        ("ReduceMax ReduceMin", "i16 u16 u32 u64 bool"),
        ("ReduceSum ReduceProd CumSum", "i8 i16 u8 u16 u32 u64"),
        ("ArgMax ArgMin", "i16 u16 u32 u64 bool"),
        ("TopK", "u16 u32 u64 bool"),
        ("MatMul", "i8 i16 u8 u16"),
        ("ScatterND ScatterElements", "f16"),
        ("Acos Acosh Asin Asinh Atan Atanh Cosh Det Erf Gelu Sinh Tan ConvTranspose", "f64"),
    )
    for op in ops.split()
}
"""Dtypes of the first operand for which an op computes in the dtype of `_CAST`."""
_ORDERS: Final = ("Pow", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK")
_RESULTS: Final = {
    **dict.fromkeys(["Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"], bool_),
    **dict.fromkeys(["And", "Or", "Xor", "Not", "IsNaN", "IsInf"], bool_),
    **dict.fromkeys(["ArgMax", "ArgMin"], i64),
    **dict.fromkeys(["MatMulInteger", "ConvInteger"], i32),
}
"""Dtypes of results that differ from the dtype of the first operand."""
_FLOATING: Final = (
    *("rsqrt", "erfc", "expm1", "log1p", "log2", "log10", "atan2", "copysign", "var", "gelu"),
    "gelu_slope",
)
"""Ops that compute in the result dtype."""


class OnnxBody:
    """Nodes that compute an op of operands named x0, x1, ... with given types.

    sizes: further operands: formulas of sizes, which are lists of integers or a number.

    Other runtimes have no kernels for bf16. If the op computes in bf16, operands are cast to f32
    and the result is cast back, as in the op itself; `takes` are the original operands."""

    def __init__(
        self, name: str, types: Sequence[TensorType], out: TensorType, attributes: Attributes
    ) -> None:
        def wide(type: TensorType) -> TensorType:
            dtype = type.dtype
            if name in _FLOATING and not dtype.is_inexact:
                dtype = out.dtype
            narrow = name not in CASTS and dtype is bf16
            return TensorType(f32 if narrow else dtype, type.shape)

        self.types, self.out, self.attributes = tuple(map(wide, types)), wide(out), attributes
        self.names = [f"x{i}" for i in range(len(types))]
        self.takes: list[str] = []
        self.nodes: list[dict[str, Any]] = []
        self.sizes: dict[str, tuple[Any, DType]] = {}
        self._dtypes: dict[str, DType] = {}
        for x, operand_type, type in zip(self.names, types, self.types, strict=True):
            self.takes.append(x if operand_type is type else f"{x}.{operand_type.dtype.name}")
            self._dtypes[self.takes[-1]] = operand_type.dtype
            if operand_type is not type:
                self._add("Cast", self.takes[-1:], [x], to=NAMES[type.dtype])
        self._gives = out.dtype

    def __getattr__(self, name: str) -> Any:
        try:
            return self.attributes[name]
        except KeyError:
            raise AttributeError(name) from None

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of the result."""
        return self.several(1, op, *inputs, **attributes)[0]

    def several(self, count: int, op: str, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with `count` results; return the names."""
        first = int(op == "Where")  # the other operands have the same dtype, or a fixed dtype
        dtype = self._dtypes[inputs[first]] if inputs else bool_
        if dtype in _LACKS.get(op, ()) and attributes.get("reduction") != "none":
            if dtype is u64 and op in _ORDERS:
                raise ModelError(f"{op} of u64")
            cast = [
                self.cast(x, _CAST[dtype]) if i >= first and self._dtypes.get(x) is dtype else x
                for i, x in enumerate(inputs)
            ]
            results = self.several(count, op, *cast, **attributes)
            return [
                y if self._dtypes[y] is each else self.cast(y, each)
                for y, each in zip(results, self._results(op, dtype, count), strict=True)
            ]
        outputs = [f"y{len(self.nodes)}" + f".{i}" * (count > 1) for i in range(count)]
        self._add(op, inputs, outputs, **attributes)
        return outputs

    def _results(self, op: str, dtype: DType, count: int) -> list[DType]:
        """Return the result dtypes of a node, given the dtype of the first operand."""
        own = _RESULTS.get(op, dtype)
        return [i64 if op == "TopK" and i else own for i in range(count)]

    def _add(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> None:
        if op == "Constant":
            dtype = DType.of(attributes["value"].dtype)
        elif op == "Cast":
            dtype = DTYPES[attributes["to"]]
        else:
            dtype = self._dtypes[inputs[int(op == "Where")]]
        self._dtypes |= zip(outputs, self._results(op, dtype, len(outputs)), strict=True)
        node = {"input": list(inputs), "output": list(outputs), "attributes": attributes}
        self.nodes.append({"op_type": op, **node})

    def result(self, x: str) -> str:
        """Return a rule's result in the dtype of the op; an operand passes through `Identity`."""
        if self._gives is not self.out.dtype:
            return self.cast(x, self._gives)
        return self("Identity", x) if x in self.takes else x

    def _size(self, value: Any, dtype: DType) -> str:
        """Add an operand for a formula of sizes."""
        name = f"n{len(self.sizes)}"
        self.sizes[name], self._dtypes[name] = (value, dtype), dtype
        return name

    def counted(self, n: int) -> str:
        """Add 0 .. n - 1."""
        if not is_open(n):
            return self.array(range(n))
        return self("Range", self.array(0), self.array(n), self.array(1))

    def array(self, value: Any, dtype: DType = i64) -> str:
        """Add a constant, or sizes."""
        if is_open(value) or (isinstance(value, list) and any(map(is_open, value))):
            return self._size(value, dtype)
        value = np.asarray(value, dtype.numpy)
        return self("Constant", value=value)

    def number(self, value: float, dtype: DType | None = None) -> str:
        """Add a scalar constant (default dtype: the result dtype)."""
        from mlvm.core.ops import half

        dtype = dtype or self.out.dtype
        if is_free(value):
            return self._size(value, dtype)
        return self("Constant", value=half.cast(np.asarray(value, np.float64), dtype))

    def cast(self, x: str, dtype: DType) -> str:
        return self("Cast", x, to=NAMES[dtype])

    def operand(self, i: int, dtype: DType | None) -> str:
        """Return an operand, cast to a dtype."""
        x = self.names[i]
        return x if dtype is None or self.types[i].dtype is dtype else self.cast(x, dtype)

    def operands(self, dtype: DType | None = None) -> list[str]:
        """Return the operands, cast to one dtype (default: the result dtype)."""
        return [self.operand(i, dtype or self.out.dtype) for i in range(len(self.types))]

    def positions(self, i: int) -> str:
        """Return an operand of positions, in a dtype that ONNX supports."""
        return self.operand(i, None if self.types[i].dtype in (i32, i64) else i64)

    def is_negative(self, x: str) -> str:
        """Compute the sign bit, including the sign of -0.0 and -inf."""
        zero = self.number(0.0, self.types[0].dtype)
        return self("Or", self("Less", x, zero), self("Less", self("Reciprocal", x), zero))

    def reduced(self, op: str, x: str, axes: Sequence[int], keepdims: bool) -> str:
        if not axes:
            return self("Identity", x)
        return self(op, x, self.array(list(axes)), keepdims=int(keepdims))

    def sliced(
        self, x: str, start: Sequence[int], length: Sequence[int], step: Sequence[int]
    ) -> str:
        """Slice x: `length` elements of each axis, starting at `start`, `step` apart."""
        ends = [
            end if (end := a + n * s) >= 0 else -(2**62)
            for a, n, s in zip(start, length, step, strict=True)
        ]
        starts = [a if n else 0 for a, n in zip(start, length, strict=True)]
        ends = [end if n else 0 for end, n in zip(ends, length, strict=True)]
        rows = starts, ends, list(range(len(starts))), list(step)
        return self("Slice", x, *[self.array(list(row)) for row in rows]) if rows[0] else x

    def turned(self, x: str, shape: Sequence[int], axes: Sequence[int]) -> str:
        """Reverse x along some axes."""
        start = [n - 1 if i in axes else 0 for i, n in enumerate(shape)]
        return self.sliced(x, start, shape, [-1 if i in axes else 1 for i in range(len(shape))])

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        return self("Reshape", x, self.array(list(shape)), allowzero=1)

    def embedded(
        self,
        x: str,
        within: Sequence[int],
        shape: Sequence[int],
        start: Sequence[int],
        step: Sequence[int],
    ) -> str:
        """Write x, of the shape `within`, into zeros of `shape`.

        It is written to the elements that a slice with `start` and `step` reads.
        """
        turned = [i for i, s in enumerate(step) if s < 0]
        if turned:
            x = self.turned(x, within, turned)
        first = [
            a + s * (n - 1) if s < 0 else a for a, s, n in zip(start, step, within, strict=True)
        ]
        strides = [abs(s) for s in step]
        if any(s > 1 for s in strides):  # zeros between the elements
            spread = [m for n in within for m in (n, 1)]
            wide = [m for n, s in zip(within, strides, strict=True) for m in (n, s)]
            zeros = [(0, b - a) for a, b in zip(spread, wide, strict=True)]
            x = self.padded(self.reshaped(x, spread), zeros)
            wide = [n * s for n, s in zip(within, strides, strict=True)]
            whole = [
                max((n - 1) * s + 1, 0) if n else 0 for n, s in zip(within, strides, strict=True)
            ]
            x = self.sliced(self.reshaped(x, wide), [0] * len(wide), whole, [1] * len(wide))
            within = whole
        widths = [(a, m - a - n) for a, m, n in zip(first, shape, within, strict=True)]
        return self.padded(x, widths)

    def padded(self, x: str, widths: Sequence[tuple[int, int]], value: float = 0.0) -> str:
        if not any(is_open(n) or n for pair in widths for n in pair):
            return x
        pads = self.array([a for a, _ in widths] + [b for _, b in widths])
        return self("Pad", x, pads, self.number(value))


def axes_of(axis: int | Iterable[int] | None, ndim: int) -> list[int]:
    """Return the axes, counted from the front."""
    listed = range(ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    return [n % ndim if ndim else n for n in listed]


def body(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a body under the names of ops."""

    def enter(rule: _Rule) -> _Rule:
        BODIES.update(dict.fromkeys(names, rule))
        return rule

    return enter


# --- one node -----------------------------------------------------------------------------


_FORMS: Final[dict[str, Callable[[OnnxBody, str], str]]] = {
    "result": lambda b, op: b(op, *b.operands()),
    "floats": lambda b, op: b(op if b.out.dtype.is_inexact else "Identity", *b.operands()),
    "operands": lambda b, op: b(op, *b.operands(common_dtype(b.types))),
    "bool": lambda b, op: b(op, *b.operands(bool_)),
    "bits": lambda b, op: b(
        op.removeprefix("Bitwise") if b.out.dtype is bool_ else op, *b.operands()
    ),
}
"""Nodes of ops with one counterpart, by the form of the row in `PAIRS`."""


def _pair(form: str, op: str) -> _Rule:
    return lambda b: _FORMS[form](b, op)


for _each in PAIRS:
    if _each.form != "load":
        BODIES[_each.function] = _pair(_each.form, _each.name)

for _name, _op in (
    *(("maximum", "Max"), ("minimum", "Min"), ("pow", "Pow"), ("relu", "Relu")),
    *(("real", "Identity"), ("conj", "Identity")),
):
    BODIES[_name] = _pair("result", _op)


@body("bitwise_left_shift")
def _left_shift(b: OnnxBody) -> str:
    unsigned = DType.named(f"u{b.out.dtype.itemsize * 8}")
    shifted = b("BitShift", *[b.cast(x, unsigned) for x in b.names], direction="LEFT")
    return b.cast(shifted, b.out.dtype)


@body("isnan")
def _isnan(b: OnnxBody) -> str:
    return b("IsNaN", b.operand(0, None if b.types[0].dtype.is_inexact else f32))


@body("isinf")
def _isinf(b: OnnxBody) -> str:
    return b("IsInf", b.operand(0, None if b.types[0].dtype in (f32, f64) else f32))


CASTS: Final = "astype", "unpack"


@body("astype")
def _astype(b: OnnxBody) -> str:
    """Convert to a different dtype; a float out of range becomes the nearest limit.

    ONNX leaves that case undefined.
    """
    dtype = b.types[0].dtype
    if not (dtype.kind == "float" and b.out.dtype.is_integer):
        return b.cast("x0", b.out.dtype)
    bits = 8 * b.out.dtype.itemsize
    wide = f32 if bits < 32 and dtype is not f64 else f64
    limits = np.iinfo(str(b.out.dtype.numpy))
    low, high = limits.min, limits.max
    if bits < 64:  # bounds that floats represent exactly
        return b.cast(
            b("Clip", b.operand(0, wide), b.number(low, wide), b.number(high, wide)), b.out.dtype
        )
    x = b("Max", b.operand(0, wide), b.number(low, wide))
    y = b.cast(x, b.out.dtype)
    if b.out.dtype is u64:
        return y
    return b("Where", b("GreaterOrEqual", x, b.number(2.0**63, wide)), b.array(high), y)


BODIES.update(
    {
        "copy": lambda b: b("Identity", "x0"),
        "not_equal": lambda b: b("Not", b("Equal", *b.operands(common_dtype(b.types)))),
        "logical_not": lambda b: b("Not", b.operand(0, bool_)),
        "bitwise_invert": lambda b: b("Not" if b.out.dtype is bool_ else "BitwiseNot", "x0"),
        "divide": lambda b: b("Div", *b.operands()),
        "where": lambda b: b(
            "Where", b.operand(0, bool_), b.operand(1, b.out.dtype), b.operand(2, b.out.dtype)
        ),
        "isfinite": lambda b: b("Not", b("Or", _isnan(b), _isinf(b))),
        "unpack": lambda b: b.cast("x0", b.out.dtype),
        "gelu": lambda b: b("Gelu", "x0", approximate="tanh" if b.approximate else "none"),
        "square": lambda b: b("Mul", "x0", "x0"),
        "rsqrt": lambda b: b("Reciprocal", b("Sqrt", "x0")),
        "erfc": lambda b: b("Sub", b.number(1.0), b("Erf", "x0")),
        "log1p": lambda b: _log1p_of(b, "x0"),
        "log2": lambda b: b("Div", b("Log", "x0"), b.number(math.log(2))),
        "log10": lambda b: b("Div", b("Log", "x0"), b.number(math.log(10))),
        "signbit": lambda b: b.is_negative("x0"),
        "remainder": lambda b: _remainder_of(b, *b.operands()),
        "reshape": lambda b: b.reshaped("x0", b.out.shape),
        "broadcast_to": lambda b: b("Expand", "x0", b.array(list(b.out.shape))),
        "full": lambda b: b("Expand", "x0", b.array(list(b.out.shape))),
        "permute_dims": lambda b: b("Transpose", "x0", perm=axes_of(b.axes, b.out.ndim)),
        "concat": lambda b: b("Concat", *b.operands(), axis=b.axis),
        "flip": lambda b: b.turned("x0", b.out.shape, axes_of(b.axis, b.out.ndim)),
        "slice": lambda b: b.sliced("x0", b.start, b.length, b.step),
        "embed": lambda b: b.embedded("x0", b.types[0].shape, b.shape, b.start, b.step),
        "pad": lambda b: b.padded("x0", b.widths, b.value),
        "take": lambda b: b("Gather", "x0", b.positions(1), axis=b.axis),
        "scatter_add": lambda b: _scattered(
            b, _zeros(b), "x0", 1, axes_of(b.axis, b.out.ndim)[0], "add"
        ),
        "index_add": lambda b: _scattered(b, "x0", "x1", 2, axes_of(b.axis, b.out.ndim)[0], "add"),
        "cumulative_sum": lambda b: b("CumSum", b.operand(0, b.out.dtype), b.array(b.axis or 0)),
        "cumulative_prod": lambda b: _running_product(b),
        "layer_norm": lambda b: b("LayerNormalization", *b.names, axis=-1, epsilon=float(b.eps)),
        "layer_norm_normalize": lambda b: _normalized(b, "x0")[0],
        "conv2d": lambda b: _images(b, "Conv", _filters(b), group=b.groups),
        "max_pool2d": lambda b: _images(b, "MaxPool", kernel_shape=list(b.window)),
        "avg_pool2d": lambda b: _images(
            b, "AveragePool", kernel_shape=list(b.window), count_include_pad=1
        ),
        "dequantize": lambda b: _dequantized(b, "x0", "x1", b.types[0].shape, b.types[1].shape),
        "integer_matmul": lambda b: b("MatMulInteger", "x0", b("Transpose", "x1", perm=[1, 0])),
        "det": lambda b: b("Det", "x0"),
        "softmax": lambda b: b("Softmax", "x0", axis=b.axis),
        "log_softmax": lambda b: b("LogSoftmax", "x0", axis=b.axis),
        "tril": lambda b: b("Trilu", "x0", b.array(b.k), upper=0),
        "triu": lambda b: b("Trilu", "x0", b.array(b.k), upper=1),
        "argmax": lambda b: _extreme(b, "ArgMax"),
        "argmin": lambda b: _extreme(b, "ArgMin"),
        "zeros": lambda b: _zeros(b),
        "sort": lambda b: _sorted(b, 0),
        "argsort": lambda b: _sorted(b, 1),
        "top_indices": lambda b: _sorted(b, 1),
    }
)
"""Ops that are one expression."""


# --- elementwise --------------------------------------------------------------------------


@body("multiply_add")
def _multiply_add(b: OnnxBody) -> str:
    x, y, z = b.operands()
    return b("Add", b("Mul", x, y), z)


@body("clip")
def _clip(b: OnnxBody) -> str:
    x, lower, upper = b.operands()
    return b("Min", b("Max", x, lower), upper)


@body("trunc")
def _trunc(b: OnnxBody) -> str:
    if not b.out.dtype.is_inexact:
        return b("Identity", "x0")
    return b("Mul", b("Sign", "x0"), b("Floor", b("Abs", "x0")))


@body("expm1")
def _expm1(b: OnnxBody) -> str:
    """tanh(x / 2) (exp(x) + 1), which is accurate near 0."""
    near = b("Tanh", b("Mul", "x0", b.number(0.5)))
    return b("Mul", near, b("Add", b("Exp", "x0"), b.number(1.0)))


def _log1p_of(b: OnnxBody, x: str) -> str:
    """log(u) x / (u - 1) for u = 1 + x (Higham, Accuracy and Stability, 1.14.1)."""
    one = b.number(1.0)
    u = b("Add", x, one)
    rest = b("Sub", u, one)
    plain = b("Or", b("Equal", rest, b.number(0.0)), b("IsInf", rest))
    exact = b("Mul", b("Log", u), b("Div", x, b("Where", plain, one, rest)))
    return b("Where", plain, b("Where", b("IsInf", rest), b("Log", u), x), exact)


@body("logaddexp")
def _logaddexp(b: OnnxBody) -> str:
    x, y = b.operands()
    distance = b("Neg", b("Abs", b("Sub", x, y)))
    most = b("Add", b("Max", x, y), _log1p_of(b, b("Exp", distance)))
    return b("Where", b("Equal", x, y), b("Add", x, b.number(math.log(2))), most)


@body("hypot")
def _hypot(b: OnnxBody) -> str:
    """Scale by the larger operand, because squares of large numbers overflow."""
    sides = [b("Abs", x) for x in b.operands()]
    most, infinite = b("Max", *sides), b("Or", *[b("IsInf", x) for x in sides])
    divisor = b("Where", b("Equal", most, b.number(0.0)), b.number(1.0), most)
    ratio = b("Div", b("Min", *sides), divisor)
    result = b("Mul", most, b("Sqrt", b("Add", b("Mul", ratio, ratio), b.number(1.0))))
    return b("Where", infinite, b.number(math.inf), result)  # also if the other operand is nan


@body("copysign")
def _copysign(b: OnnxBody) -> str:
    size = b("Abs", "x0")
    return b("Where", b.is_negative("x1"), b("Neg", size), size)


@body("atan2")
def _atan2(b: OnnxBody) -> str:
    y, x = b("Abs", "x0"), b("Abs", "x1")
    alike = b("Where", b("Equal", y, b.number(0.0)), b.number(0.0), b.number(1.0))
    ratio = b("Where", b("Equal", x, y), alike, b("Div", y, x))
    angle = b("Atan", ratio)
    angle = b("Where", b.is_negative("x1"), b("Sub", b.number(math.pi), angle), angle)
    return b("Where", b.is_negative("x0"), b("Neg", angle), angle)


def _not_zero(b: OnnxBody, y: str) -> tuple[str, str]:
    """Return a mask of the zeros of an integer divisor, and the divisor with 1 instead of 0."""
    is_zero = b("Equal", y, b.number(0))
    return is_zero, b("Where", is_zero, b.number(1), y)


def _remainder_of(b: OnnxBody, x: str, y: str) -> str:
    if not b.out.dtype.is_inexact:
        is_zero, by = _not_zero(b, y)
        return b("Where", is_zero, b.number(0), b("Mod", x, by))
    zero, remainder = b.number(0.0), b("Mod", x, y, fmod=1)
    differs_in_sign = b("Xor", b("Less", remainder, zero), b("Less", y, zero))
    differs_in_sign = b("And", differs_in_sign, b("Not", b("Equal", remainder, zero)))
    return b("Where", differs_in_sign, b("Add", remainder, y), remainder)


@body("floor_divide")
def _floor_divide(b: OnnxBody) -> str:
    x, y = b.operands()
    rest = b("Sub", x, _remainder_of(b, x, y))
    if b.out.dtype.is_inexact:
        return b("Round", b("Div", rest, y))
    is_zero, by = _not_zero(b, y)
    return b("Where", is_zero, b.number(0), b("Div", rest, by))


@body("gelu_slope")
def _gelu_slope(b: OnnxBody) -> str:
    half, one = b.number(0.5), b.number(1.0)
    x = b("Clip", "x0", b.number(-1e4), b.number(1e4))
    square = b("Mul", x, x)
    if b.approximate:
        root = math.sqrt(2 / math.pi)
        cubic = b("Add", b.number(root), b("Mul", square, b.number(root * 0.044715)))
        t = b("Tanh", b("Mul", x, cubic))
        slope = b("Add", b.number(root), b("Mul", square, b.number(3 * root * 0.044715)))
        rest = b("Mul", b("Mul", b("Mul", x, slope), b("Sub", one, b("Mul", t, t))), half)
        return b("Add", b("Mul", b("Add", one, t), half), rest)
    phi = b("Exp", b("Mul", square, b.number(-0.5)))
    phi = b("Mul", b("Mul", phi, x), b.number(1 / math.sqrt(2 * math.pi)))
    erf = b("Erf", b("Mul", x, b.number(math.sqrt(0.5))))
    return b("Add", b("Mul", b("Add", one, erf), half), phi)


# --- shapes -------------------------------------------------------------------------------


@body("roll")
def _roll(b: OnnxBody) -> str:
    shape = (b.out.size,) if b.axis is None else b.out.shape
    x = b.reshaped("x0", shape) if b.axis is None else "x0"
    axes = [0] if b.axis is None else axes_of(b.axis, b.out.ndim)
    shifts = [b.shift] * len(axes) if isinstance(b.shift, int) else b.shift
    for axis, shift in zip(axes, shifts, strict=False):
        n = shape[axis]
        first = -shift % n if n else 0
        rows = (first, n, axis), (0, first, axis)
        parts = [b("Slice", x, *[b.array([each]) for each in row]) for row in rows]
        x = b("Concat", *parts, axis=axis)
    return b.reshaped(x, b.out.shape) if b.axis is None else x


@body("slice_add")
def _slice_add(b: OnnxBody) -> str:
    return b("Add", "x0", b.embedded("x1", b.types[1].shape, b.out.shape, b.start, b.step))


@body("slice_set")
def _slice_set(b: OnnxBody) -> str:
    values, ones = (
        b("Expand", x, b.array(list(b.length))) for x in (b.operand(1, b.out.dtype), b.number(1))
    )
    placed = b.embedded(values, b.length, b.out.shape, b.start, b.step)
    if all(m == n for m, n in zip(b.length, b.out.shape, strict=True)):
        return placed
    inside = b.embedded(ones, b.length, b.out.shape, b.start, b.step)
    return b("Where", b.cast(inside, bool_), placed, "x0")


# --- positions ----------------------------------------------------------------------------


@body("arange")
def _arange(b: OnnxBody) -> str:
    """Compute start + i step, in f64 or i64, rounded once."""
    wide = f64 if b.out.dtype.is_float else i64
    steps = b("Mul", b.cast(b.counted(b.out.shape[0]), wide), b.number(b.step, wide))
    return b.cast(b("Add", steps, b.number(b.start, wide)), b.out.dtype)


@body("linspace")
def _linspace(b: OnnxBody) -> str:
    places, intervals = b.counted(b.num), b.num - 1 if b.endpoint else b.num
    steps = b("Mul", b.cast(places, f64), b.number((b.stop - b.start) / intervals, f64))
    y = b("Add", steps, b.number(b.start, f64))
    if b.endpoint:
        y = b("Where", b("Equal", places, b.array(intervals)), b.number(b.stop, f64), y)
    return b.cast(y, b.out.dtype)


@body("eye")
def _eye(b: OnnxBody) -> str:
    rows = b("Add", b("Unsqueeze", b.counted(b.rows), b.array([1])), b.array(b.k))
    return b.cast(b("Equal", rows, b.counted(b.columns)), b.out.dtype)


@body("take_along_axis")
def _take_along_axis(b: OnnxBody) -> str:
    x, indices, axis = b.types[0], b.types[1], axes_of(b.axis, b.out.ndim)[0]
    shape = [
        m if i == axis else max(n, m)
        for i, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True))
    ]
    places = b.positions(1)
    if shape != [*indices.shape]:
        places = b("Expand", places, b.array(shape))
    data, wide = "x0", [n if i == axis else shape[i] for i, n in enumerate(x.shape)]
    if wide != [*x.shape]:
        data = b("Expand", data, b.array(wide))
    return b("GatherElements", data, places, axis=axis)


@body("one_hot")
def _one_hot(b: OnnxBody) -> str:
    places = b("Unsqueeze", b.operand(0, i64), b.array([-1]))
    return b.cast(b("Equal", places, b.counted(b.num_classes)), b.out.dtype)


def _rows_first(b: OnnxBody, x: str, axis: int, count: int, ndim: int) -> str:
    """Move `count` axes, starting at `axis`, to the front."""
    perm = [*range(axis, axis + count), *range(axis), *range(axis + count, ndim)]
    return x if perm == [*range(ndim)] else b("Transpose", x, perm=perm)


def _scattered(
    b: OnnxBody, data: str, updates: str, indices: int, axis: int, how: str, n: int | None = None
) -> str:
    """Replace rows of `data` along `axis`, or combine them with the updates.

    The rows are at the indices in operand `indices`; `data` has n axes.
    """
    places, n = b("Unsqueeze", b.operand(indices, i64), b.array([-1])), n or b.out.ndim
    count = b.types[indices].ndim
    rows = _rows_first(b, data, axis, 1, n)
    update_rows = _rows_first(b, updates, axis, count, n - 1 + count)
    updated = b("ScatterND", rows, places, update_rows, reduction=how)
    back = [*range(1, axis + 1), 0, *range(axis + 1, n)]
    return updated if back == [*range(n)] else b("Transpose", updated, perm=back)


def _zeros(b: OnnxBody) -> str:
    return b("Expand", b.number(0.0), b.array(list(b.out.shape)))


@body("index_reduce")
def _index_reduce(b: OnnxBody) -> str:
    by = {"multiply": "mul", "minimum": "min", "maximum": "max"}[b.by]
    return _scattered(b, "x0", "x1", 2, 0, by)


@body("flat_indices")
def _flat_indices(b: OnnxBody) -> str:
    zero, one, flat = b.array(0), b.array(1), ""
    for i, length in enumerate(b.lengths):  # Gather rejects an index out of range
        numbers, n = b("Range", zero, b.array(length), one), b.array(length)
        place = b("Gather", numbers, b.positions(i), axis=0)
        flat = b("Add", b("Mul", flat, n), place) if flat else place
    return flat


@body("index_set")
def _index_set(b: OnnxBody) -> str:
    shape, axis = b.out.shape, axes_of(b.axis, b.out.ndim)[0]
    before, behind = shape[:axis], shape[axis + b.axes :]
    places = b.types[2]
    values = b("Expand", b.operand(1, b.out.dtype), b.array([*before, *places.shape, *behind]))
    flat = [*before, math.prod(shape[axis : axis + b.axes]), *behind]
    x = b.reshaped("x0", flat) if b.axes != 1 else "x0"
    updated = _scattered(b, x, values, 2, axis, "none", len(flat))
    return b.reshaped(updated, shape) if b.axes != 1 else updated


@body("scatter_add_along_axis")
def _scatter_add_along_axis(b: OnnxBody) -> str:
    updates, indices, axis = b.types[0], b.types[1], axes_of(b.axis, b.out.ndim)[0]
    places = b.operand(1, i64)
    if updates.shape != indices.shape:
        places = b("Expand", places, b.array(list(updates.shape)))
    return b("ScatterElements", _zeros(b), places, "x0", axis=axis, reduction="add")


@body("dynamic_update")
def _dynamic_update(b: OnnxBody) -> str:
    axis, (n, m) = axes_of(b.axis, b.out.ndim)[0], (b.out.shape[b.axis], b.types[1].shape[b.axis])
    start = b.reshaped(b.operand(2, i64), [1])
    start = b("Where", b("Less", start, b.array([0])), b("Add", start, b.array([n])), start)
    places = b("Sub", b.counted(n), start)
    inside = b("And", b("GreaterOrEqual", places, b.array([0])), b("Less", places, b.array([m])))
    rows = b("Gather", "x1", b("Clip", places, b.array(0), b.array(max(m - 1, 0))), axis=axis)
    return b("Where", b.reshaped(inside, [n, *[1] * (b.out.ndim - axis - 1)]), rows, "x0")


# --- reductions ---------------------------------------------------------------------------

for _name in ("sum", "mean", "max", "min", "prod", "all", "any"):

    def _reduce(
        b: OnnxBody, op: str = {"all": "Min", "any": "Max"}.get(_name, _name.title())
    ) -> str:
        axes = axes_of(b.axis, b.types[0].ndim)
        return b.reduced(f"Reduce{op}", b.operand(0, b.out.dtype), axes, b.keepdims)

    BODIES[_name] = _reduce


@body("logsumexp")
def _logsumexp(b: OnnxBody) -> str:
    axes = axes_of(b.axis, b.types[0].ndim)
    most = b.reduced("ReduceMax", "x0", axes, True)
    most = b("Where", b("IsInf", most), b.number(0.0), most)
    total = b("Log", b.reduced("ReduceSum", b("Exp", b("Sub", "x0", most)), axes, True))
    return b.reshaped(b("Add", total, most), b.out.shape)


@body("var")
def _var(b: OnnxBody) -> str:
    axes = axes_of(b.axis, b.types[0].ndim)
    deviation = b("Sub", "x0", b.reduced("ReduceMean", "x0", axes, True))
    count = math.prod(b.types[0].shape[i] for i in axes)
    total = b.reduced("ReduceSum", b("Mul", deviation, deviation), axes, b.keepdims)
    return b("Div", total, b.number(count - b.correction))


def _extreme(b: OnnxBody, op: str) -> str:
    flat = b.reshaped("x0", [b.types[0].size]) if b.axis is None else "x0"
    index = b(op, flat, axis=b.axis or 0, keepdims=int(b.keepdims and b.axis is not None))
    return b.reshaped(index, b.out.shape) if b.axis is None else index


def _sorted(b: OnnxBody, which: int) -> str:
    n = b.array([b.out.shape[b.axis]])
    return b.several(2, "TopK", "x0", n, axis=b.axis, largest=int(b.descending))[which]


def _running_product(b: OnnxBody) -> str:
    """Multiply elements by the ones 1, 2, 4, ... before them: log2(n) products."""
    x, shape = b.operand(0, b.out.dtype), b.out.shape
    [axis], step = axes_of(b.axis or 0, len(shape)), 1
    if is_open(shape[axis]):
        raise ModelError("along an axis of dynamic size")
    while step < shape[axis]:
        widths = [(step * (i == axis), 0) for i in range(len(shape))]
        longer = b.padded(x, widths, 1.0)
        x = b("Mul", x, b.sliced(longer, [0] * len(shape), shape, [1] * len(shape)))
        step = 2 * step
    return x


@body("searchsorted")
def _searchsorted(b: OnnxBody) -> str:
    """Count the edges before each element."""
    ndim = b.types[0].ndim
    edges = b("Unsqueeze", "x0", b.array([ndim - 1]))
    x = b("Unsqueeze", "x1", b.array([ndim]))

    def less(x: str, y: str) -> str:
        if not b.types[0].dtype.is_float:
            return b("Less", x, y)
        last = b("And", b("IsNaN", y), b("Not", b("IsNaN", x)))
        return b("Or", b("Less", x, y), last)

    before = b("Not", less(x, edges)) if b.right else less(edges, x)
    return b.reduced("ReduceSum", b.cast(before, i64), [ndim], False)


# --- products and networks ----------------------------------------------------------------


def _swapped(b: OnnxBody, i: int, transpose: bool) -> str:
    x, ndim = b.operand(i, b.out.dtype), b.types[i].ndim
    if not transpose:
        return x
    return b("Transpose", x, perm=[*range(ndim - 2), ndim - 1, ndim - 2])


@body("matmul")
def _matmul(b: OnnxBody) -> str:
    """Do not transpose if an operand is a vector: ONNX Runtime would ignore the transpose."""
    if 1 in (b.types[0].ndim, b.types[1].ndim) and (b.transpose_x or b.transpose_y):
        return b("MatMul", b.operand(1, b.out.dtype), b.operand(0, b.out.dtype))
    return b("MatMul", _swapped(b, 0, b.transpose_x), _swapped(b, 1, b.transpose_y))


@body("batch_contract")
def _batch_contract(b: OnnxBody) -> str:
    return b.reduced("ReduceSum", _matmul(b), range(b.types[0].ndim - 2), False)


def _normalized(b: OnnxBody, x: str) -> tuple[str, str]:
    """Normalise x over the last axis; return the result and 1 / sqrt(var + eps)."""
    centered = b("Sub", x, b.reduced("ReduceMean", x, [-1], True))
    variance = b.reduced("ReduceMean", b("Mul", centered, centered), [-1], True)
    inverse = b("Reciprocal", b("Sqrt", b("Add", variance, b.number(b.eps))))
    return b("Mul", centered, inverse), inverse


@body("layer_norm_scale_vjp")
def _layer_norm_scale_vjp(b: OnnxBody) -> str:
    product = b("Mul", "x0", _normalized(b, "x1")[0])
    return b.reduced("ReduceSum", product, range(b.types[1].ndim - 1), False)


@body("layer_norm_vjp")
def _layer_norm_vjp(b: OnnxBody) -> str:
    normal, inverse = _normalized(b, "x1")
    h = b("Mul", "x0", "x2")
    along = b("Mul", normal, b.reduced("ReduceMean", b("Mul", h, normal), [-1], True))
    rest = b("Sub", b("Sub", h, b.reduced("ReduceMean", h, [-1], True)), along)
    return b("Mul", rest, inverse)


@body("softmax_cross_entropy")
def _cross_entropy(b: OnnxBody) -> str:
    labels = b("Unsqueeze", b.operand(1, i64), b.array([-1]))
    picked = b("GatherElements", b("LogSoftmax", "x0", axis=-1), labels, axis=-1)
    return b("Neg", b.reshaped(picked, b.out.shape))


@body("softmax_cross_entropy_vjp")
def _cross_entropy_vjp(b: OnnxBody) -> str:
    labels = b("Unsqueeze", b.operand(2, i64), b.array([-1]))
    hot = b.cast(b("Equal", labels, b.counted(b.out.shape[-1])), b.out.dtype)
    difference = b("Sub", b("Softmax", "x1", axis=-1), hot)
    return b("Mul", difference, b("Unsqueeze", "x0", b.array([-1])))


def _sliding(b: OnnxBody) -> dict[str, list[int]]:
    """Return padding, strides and dilation in the form of ONNX."""
    how = {"pads": [side[i] for i in (0, 1) for side in b.padding], "strides": list(b.stride)}
    return how | ({"dilations": list(b.dilation)} if max(b.dilation) > 1 else {})


def _images(b: OnnxBody, op: str, *more: str, **attributes: Any) -> str:
    """Apply an op of ONNX to channels-last images."""
    n = b.out.ndim
    x = b("Transpose", "x0", perm=[0, n - 1, *range(1, n - 1)])
    return b("Transpose", b(op, x, *more, **_sliding(b), **attributes), perm=[0, *range(2, n), 1])


def _filters(b: OnnxBody) -> str:
    """Transpose the kernel from [..., I, O] to [O, I, ...]."""
    axes = b.types[1].ndim - 2
    return b("Transpose", "x1", perm=[axes + 1, axes, *range(axes)])


@body("conv_transpose2d")
def _conv_transpose2d(b: OnnxBody) -> str:
    rest = [  # rows that no window covers
        n + sum(side) - (count - 1) * step - (k - 1) * dilation - 1
        for n, side, count, step, k, dilation in zip(
            b.shape[1:-1], b.padding, b.types[0].shape[1:-1], b.stride, b.types[1].shape,
            b.dilation, strict=False
        )
    ]  # fmt: skip
    more = {"output_padding": rest} if any(rest) else {}
    return _images(b, "ConvTranspose", _filters(b), group=b.groups, **more)


@body("conv2d_kernel_vjp")
def _conv2d_kernel_vjp(b: OnnxBody) -> str:
    """Convolve x by g, with the batch as channels: the stride of g is the dilation."""
    n, *places, channels = b.types[1].shape
    axes, each = range(len(places)), channels // b.groups
    x = b.reshaped("x1", [n, *places, b.groups, each])
    order = [len(places) + 2, len(places) + 1, 0, *(i + 1 for i in axes)]
    x = b.reshaped(b("Transpose", x, perm=order), [each, b.groups * n, *places])
    g = b("Transpose", "x0", perm=[len(places) + 1, 0, *(i + 1 for i in axes)])
    how = _sliding(b) | {"strides": list(b.dilation), "dilations": list(b.stride)}
    y = b("Transpose", b("Conv", x, g, group=b.groups, **how), perm=[*(i + 2 for i in axes), 0, 1])
    return b.sliced(y, [0] * b.out.ndim, b.out.shape, [1] * b.out.ndim)


class _WindowElement(NamedTuple):
    """Element of a window, and the slice of the padded images that reads it for all windows."""

    i: int
    j: int
    start: Sequence[int]
    length: Sequence[int]
    step: Sequence[int]


def _window_places(
    b: OnnxBody, shape: Sequence[int], grid: Sequence[int], window: Sequence[int]
) -> list[_WindowElement]:
    length, step, (down, along) = (shape[0], *grid, shape[3]), (1, *b.stride, 1), b.dilation
    return [
        _WindowElement(i, j, (0, i * down, j * along, 0), length, step)
        for i in range(window[0])
        for j in range(window[1])
    ]


def _added_up(b: OnnxBody, parts: Iterable[tuple[_WindowElement, str]]) -> str:
    """Add all elements of the windows to the images, and remove the padding."""
    shape = [n + sum(p) for n, p in zip(b.out.shape, [(0, 0), *b.padding, (0, 0)], strict=True)]
    placed = [b.embedded(x, at.length, shape, at.start, at.step) for at, x in parts]
    (pad_top, _), (pad_left, _) = b.padding
    total = b("Sum", *placed) if len(placed) > 1 else placed[0]
    return b.sliced(total, (0, pad_top, pad_left, 0), b.out.shape, (1, 1, 1, 1))


@body("max_pool2d_vjp")
def _max_pool2d_vjp(b: OnnxBody) -> str:
    x = b.padded("x1", [(0, 0), *b.padding, (0, 0)], -math.inf)
    places = _window_places(b, b.out.shape, b.types[0].shape[1:3], b.window)
    parts = [b.sliced(x, at.start, at.length, at.step) for at in places]
    most = b("Max", *parts)
    framed = b.padded("x1", [(0, 0), *b.padding, (0, 0)], math.nan)  # nan is not equal to anything
    parts = [b.sliced(framed, at.start, at.length, at.step) for at in places]
    chosen = [b.cast(b("Equal", part, most), b.out.dtype) for part in parts]
    share = b("Div", "x0", b("Sum", *chosen))
    return _added_up(b, [(at, b("Mul", x, share)) for at, x in zip(places, chosen, strict=True)])


@body("patches")
def _patches(b: OnnxBody) -> str:
    x = b.padded("x0", [(0, 0), *b.padding, (0, 0)], b.pad_value)
    places = _window_places(b, b.types[0].shape, b.out.shape[1:3], b.out.shape[3:5])
    parts = [b.sliced(x, at.start, at.length, at.step) for at in places]
    whole = b("Concat", *parts, axis=3) if len(parts) > 1 else parts[0]
    return b.reshaped(whole, b.out.shape)


@body("unpatches")
def _unpatches(b: OnnxBody) -> str:
    def part(at: _WindowElement) -> str:
        first, length = [0, 0, 0, at.i, at.j, 0], [*at.length[:3], 1, 1, at.length[3]]
        return b.reshaped(b.sliced("x0", first, length, [1] * 6), at.length)

    places = _window_places(b, b.shape, b.types[0].shape[1:3], b.types[0].shape[3:5])
    return _added_up(b, [(at, part(at)) for at in places])


@body("weighted_take")
def _weighted_take(b: OnnxBody) -> str:
    if b.types[1].shape[0] == 1:
        rows = b("Gather", "x0", b.reshaped(b.positions(1), b.types[1].shape[1:]), axis=1)
    else:
        rows = b("GatherND", "x0", b("Unsqueeze", b.operand(1, i64), b.array([-1])), batch_dims=1)
    weights, zero = b("Unsqueeze", "x2", b.array([-1])), b.number(0.0)
    terms = b("Where", b("Equal", weights, zero), zero, b("Mul", rows, weights))
    return b.reduced("ReduceSum", terms, [2], False)


# --- weights of bytes ---------------------------------------------------------------------


def _dequantized(
    b: OnnxBody, x: str, scale: str, shape: Sequence[int], scales: Sequence[int]
) -> str:
    """Dequantise x to f32 by the scale of each group."""
    pairs = scales if len(scales) > len(shape) else [*scales, 1]
    scale, groups = b.reshaped(scale, pairs), pairs[-2]
    y = b.reshaped(b.cast(x, f32), [*shape[:-1], groups, shape[-1] // groups])
    if pairs[-1] == 1:
        return b.reshaped(b("Mul", y, scale), shape)
    scale, offset = b.several(2, "Split", scale, axis=-1, num_outputs=2)
    return b.reshaped(b("Add", b("Mul", y, scale), offset), shape)


@body("dequantize_rows")
def _dequantize_rows(b: OnnxBody) -> str:
    # few runtimes gather 4-bit elements
    table = b.cast("x1", f32) if b.types[1].dtype.is_storage else "x1"
    rows, scale = (b("Gather", x, b.positions(0), axis=0) for x in (table, "x2"))
    scales = (*b.types[0].shape, *b.types[2].shape[1:])
    return _dequantized(b, rows, scale, b.out.shape, scales)


@body("quantized_matmul")
def _quantized_matmul(b: OnnxBody) -> str:
    weights = _dequantized(b, "x1", "x2", b.types[1].shape, b.types[2].shape)
    return b("MatMul", "x0", b("Transpose", weights, perm=[1, 0]))


@body("integer_conv2d")
def _integer_conv2d(b: OnnxBody) -> str:
    kernel = b("Transpose", "x1", perm=[0, 3, 1, 2])
    zeros = [b.reshaped(each, []) for each in ("x2", "x3")]
    return _images(b, "ConvInteger", kernel, *zeros, group=b.groups)


@body("quantize_linear")
def _quantize_linear(b: OnnxBody) -> str:
    whole = b("Round", b("Div", "x0", "x1"))
    y, low, high = b("Add", whole, b.cast("x2", f32)), *few.limits(b.out.dtype)
    y = b("Where", b("IsNaN", y), b.number(0.0, f32), y)
    return b.cast(b("Clip", y, b.number(low, f32), b.number(high, f32)), b.out.dtype)


@body("dequantize_linear")
def _dequantize_linear(b: OnnxBody) -> str:
    x, zero = (b.cast(each, i32) for each in ("x0", "x2"))
    return b("Mul", b.cast(b("Sub", x, zero), f32), "x1")
