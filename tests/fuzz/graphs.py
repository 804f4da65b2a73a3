"""ONNX graphs of many ops beside ONNX Runtime: the same dtypes, shapes and values, eagerly and
captured.

What rounds up or down, and what picks the largest, is given only values that both compute to the
bit: those of `is_exact`. All others may differ by as much as ONNX Runtime differs from itself where
its operands differ in their last bits.
"""

from __future__ import annotations

import collections
import math
import random
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.types import DType
from mlvm.onnx import load
from mlvm.onnx.arrays import NAMES
from tests.onnx.making import constant, graph, model, node, value

OPSETS: Final = range(13, 22)
MOST: Final = 400  # elements of a value
NODES: Final = 150
OUTPUTS: Final = 16
CLOSE: Final = 2e-4


class Value(NamedTuple):
    """A value of a graph: its name, the dtype as numpy has it, the shape, and whether every runtime
    computes the same bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_exact: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Graph(NamedTuple):
    """A file, and operands for its inputs; those in `smooth` may be moved a little."""

    data: bytes
    operands: dict[str, Any]
    smooth: list[str]
    ops: list[str]


class Unfit(Exception):
    """No value of the graph suits an op."""


OPS: dict[str, Callable[[Maker], None]] = {}


def op(weight: int = 1) -> Callable[[Callable[[Maker], None]], Callable[[Maker], None]]:
    """Enter a function that adds nodes."""

    def enter(fn: Callable[[Maker], None]) -> Callable[[Maker], None]:
        for i in range(weight):
            OPS[f"{fn.__name__}{i}"] = fn
        return fn

    return enter


class Maker:
    """A graph in the making."""

    def __init__(self, seed: int, nodes: int = NODES) -> None:
        self.draw = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.opset = self.draw.choice(OPSETS)
        self.values: list[Value] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.operands: dict[str, Any] = {}
        self.used: set[str] = set()
        for i in range(6):
            shape = tuple(self.draw.choices([1, 2, 3, 4, 5], k=[4, 2, 3, 1, 4, 2][i]))
            dtype = ["f4", "f4", "f4", "f4", "f4", "i8"][i]
            is_exact = i > 2
            array = self.array(shape, dtype, is_exact)
            self.operands[f"in{i}"] = array
            self.values.append(Value(f"in{i}", dtype, shape, is_exact))
        makers = list(OPS.values())
        while len(self.nodes) < nodes:
            try:
                self.draw.choice(makers)(self)
            except Unfit:
                continue

    def array(self, shape: tuple[int, ...], dtype: str, is_exact: bool) -> Any:
        """Random numbers; quarters where they are exact."""
        if dtype == "?":
            return self.rng.integers(0, 2, shape).astype("?")
        if dtype[0] in "iu":
            return self.rng.integers(0 if dtype[0] == "u" else -4, 5, shape).astype(dtype)
        if is_exact:
            return (self.rng.integers(-12, 13, shape) / 4).astype(dtype)
        return self.rng.standard_normal(shape).astype(dtype)

    def pick(
        self, dtypes: str = "f4", ndim: int | range | None = None, *, exact: bool = False,
        fits: Callable[[Value], bool] = lambda x: True
    ) -> Value:  # fmt: skip
        """A value of these dtypes and numbers of axes, mostly a late one."""
        ndims = range(9) if ndim is None else ndim if isinstance(ndim, range) else (ndim,)
        suited = [
            x
            for x in self.values
            if x.dtype in dtypes.split()
            and x.ndim in ndims
            and (x.is_exact or not exact)
            and 0 not in x.shape
            and fits(x)
        ]
        if not suited:
            raise Unfit
        at = max(self.draw.randrange(len(suited)), self.draw.randrange(len(suited)))
        self.used.add(suited[at].name)
        return suited[at]

    def const(self, array: Any) -> str:
        """An initializer."""
        name = f"c{len(self.constants)}"
        self.constants.append(constant(name, np.asarray(array)))
        return name

    def ints(self, numbers: Any) -> str:
        return self.const(np.asarray(numbers, np.int64))

    def axes(self, numbers: list[int], since: int, **attributes: Any) -> tuple[str, dict[str, Any]]:
        """Axes as an operand, from that opset on, or as an attribute."""
        if self.opset >= since:
            return " " + self.ints(numbers), attributes
        return "", attributes | {"axes": numbers}

    def add(
        self, type: str, inputs: str, shape: Any, dtype: str, is_exact: bool, **attributes: Any
    ) -> Value:
        """A node of one result."""
        return self.several(type, inputs, [(shape, dtype, is_exact)], **attributes)[0]

    def several(self, type: str, inputs: str, results: Any, **attributes: Any) -> list[Value]:
        """A node and its results."""
        for shape, _, _ in results:
            if math.prod(shape) > MOST or len(shape) > 5 or 0 in shape:
                raise Unfit
        values = [
            Value(f"v{len(self.values) + i}", dtype, tuple(map(int, shape)), is_exact)
            for i, (shape, dtype, is_exact) in enumerate(results)
        ]
        names = " ".join(x.name for x in values)
        self.nodes.append(node(type, inputs, names, f"n{len(self.nodes)}", **attributes))
        self.values += values
        return values

    def clipped(self, x: Value, most: float) -> Value:
        """The value within bounds: of a larger operand, its last bit decides."""
        bounds = self.const(np.float32(-most)), self.const(np.float32(most))
        y = self.add("Clip", " ".join([x.name, *bounds]), x.shape, "f4", x.is_exact)
        self.used.add(y.name)
        return y

    def graph(self, *, everything: bool = False) -> Graph:
        """The file: its outputs are what nothing asks for, and more."""
        unused = [x for x in self.values if x.name not in self.operands]
        chosen = unused
        if not everything:
            chosen = [x for x in unused if x.name not in self.used][-OUTPUTS:]
        inputs = [value(k, NAMES[DType.of(x.dtype)], x.shape) for k, x in self.operands.items()]
        names = " ".join(x.name for x in chosen)
        whole = graph(self.nodes, inputs, names, self.constants)
        vars(whole)["output"] = [value(x.name, NAMES[DType.of(np.dtype(x.dtype))]) for x in chosen]
        ops = [each.op_type for each in self.nodes]
        return Graph(model(whole, self.opset), self.operands, ["in0", "in1", "in2"], ops)


# --- elementwise --------------------------------------------------------------------------


@op(6)
def _smooth(m: Maker) -> None:
    x = m.pick()
    kinds: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("Tanh", "Sigmoid", "Erf", "Softplus", "Softsign", "Sin", "Cos")),
        *((name, {}) for name in ("Atan", "Asinh", "Exp", "Sinh", "Cosh", "HardSwish", "Mish")),
        ("Elu", {"alpha": 0.5}), ("Celu", {"alpha": 2.0}), ("Selu", {}), ("Gelu", {}),
        ("Gelu", {"approximate": "tanh"}), ("LeakyRelu", {"alpha": 0.25}),
        ("HardSigmoid", {"alpha": 0.25, "beta": 0.5}), ("ThresholdedRelu", {"alpha": 0.0}),
    ]  # fmt: skip
    name, attributes = m.draw.choice(kinds)
    if m.opset < {"HardSwish": 14, "Mish": 18, "Gelu": 20}.get(name, 0):
        raise Unfit
    most = {"Exp": 4, "Sinh": 4, "Cosh": 4, "Sin": 64, "Cos": 64}.get(name)
    if most is not None:
        x = m.clipped(x, most)
    m.add(name, x.name, x.shape, "f4", False, **attributes)


@op(3)
def _exact(m: Maker) -> None:
    x = m.pick()
    name = m.draw.choice(["Neg", "Abs", "Relu", "Identity", "Clip", "Dropout"])
    inputs = x.name
    if name == "Clip":
        low = m.draw.choice(["-", m.const(np.float32(-1.5))])
        inputs += f" {low} {m.const(np.float32(2.25))}"
    m.add(name, inputs, x.shape, "f4", x.is_exact)


@op(3)
def _rounding(m: Maker) -> None:
    x = m.pick(exact=True)
    m.add(m.draw.choice(["Floor", "Ceil", "Round", "Sign"]), x.name, x.shape, "f4", True)


@op(6)
def _pairs(m: Maker) -> None:
    dtype = m.draw.choice(["f4", "f4", "i8", "i4", "f8"])
    x = m.pick(dtype)
    name = m.draw.choice(["Add", "Sub", "Mul", "Max", "Min"])
    y = _neighbour(m, x)
    shape = np.broadcast_shapes(x.shape, y.shape)
    is_exact = x.is_exact and y.is_exact and (dtype[0] == "i" or name in ("Max", "Min"))
    m.add(name, f"{x.name} {y.name}", shape, dtype, is_exact)


def _neighbour(m: Maker, x: Value) -> Value:
    """A value, or a constant, that broadcasts with x."""

    def fits(y: Value) -> bool:
        try:
            np.broadcast_shapes(x.shape, y.shape)
        except ValueError:
            return False
        return True

    if m.draw.random() < 0.4:
        shape = tuple(m.draw.choice([n, 1]) for n in x.shape)[m.draw.randrange(x.ndim + 1) :]
        return Value(m.const(m.array(shape, x.dtype, x.is_exact)), x.dtype, shape, x.is_exact)
    return m.pick(x.dtype, fits=fits)


@op(2)
def _quotient(m: Maker) -> None:
    x = m.pick()
    by = m.add("Abs", m.pick(fits=lambda y: y.shape == x.shape).name, x.shape, "f4", False)
    by = m.add("Add", f"{by.name} {m.const(np.float32(0.5))}", x.shape, "f4", False)
    m.used |= {by.name, m.values[-2].name}
    name = m.draw.choice(["Div", "Sqrt", "Log", "Reciprocal", "Pow"])
    if name in ("Div", "Pow"):
        second = by.name if name == "Div" else m.const(np.float32(m.draw.choice([2, 0.5, 3, -1])))
        m.add(name, f"{x.name if name == 'Div' else by.name} {second}", x.shape, "f4", False)
    else:
        m.add(name, by.name, x.shape, "f4", False)


@op(2)
def _integers(m: Maker) -> None:
    x = m.pick("i8 i4")
    name = m.draw.choice(["Mod", "Div", "Neg", "Abs", "Sign"])
    if name in ("Mod", "Div"):
        by = m.const(np.asarray(m.draw.choice([2, 3, 5, -2] if name == "Mod" else [2, 3]), x.dtype))
        if name == "Div":  # which rounds as the machine likes below 0
            x = m.add("Abs", x.name, x.shape, x.dtype, True)
            m.used.add(x.name)
        m.add(name, f"{x.name} {by}", x.shape, x.dtype, True)
    else:
        m.add(name, x.name, x.shape, x.dtype, True)


@op(2)
def _comparison(m: Maker) -> None:
    x = m.pick("f4 i8 i4", exact=True)
    y = m.pick(x.dtype, exact=True, fits=lambda y: y.shape == x.shape)
    name = m.draw.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"])
    m.add(name, f"{x.name} {y.name}", x.shape, "?", True)


@op(2)
def _logic(m: Maker) -> None:
    x = m.pick("?")
    name = m.draw.choice(["And", "Or", "Xor", "Not"])
    y = x if name == "Not" else m.pick("?", fits=lambda y: y.shape == x.shape)
    m.add(name, x.name if name == "Not" else f"{x.name} {y.name}", x.shape, "?", True)


@op(2)
def _where(m: Maker) -> None:
    condition = m.pick("?")
    x = m.pick("f4 i8", fits=lambda y: y.shape == condition.shape)
    y = _neighbour(m, x)
    shape = np.broadcast_shapes(condition.shape, x.shape, y.shape)
    is_exact = x.is_exact and y.is_exact
    m.add("Where", f"{condition.name} {x.name} {y.name}", shape, x.dtype, is_exact)


@op(3)
def _cast(m: Maker) -> None:
    x = m.pick("f4 i8 i4 ? f8 u1")
    to = m.draw.choice(["f4", "i8", "i4", "?", "f8"])
    if x.dtype[0] == "f" and to[0] != "f":
        x = m.pick("f4", exact=True)
    is_exact = x.is_exact or to[0] in "i?"
    name = m.draw.choice(["Cast", "CastLike"]) if m.opset >= 15 else "Cast"
    if name == "Cast":
        m.add(name, x.name, x.shape, to, is_exact, to=NAMES[DType.of(np.dtype(to))])
    else:
        m.add(name, f"{x.name} {m.const(np.zeros(1, to))}", x.shape, to, is_exact)


@op()
def _variadic(m: Maker) -> None:
    x = m.pick()
    parts = [x, _neighbour(m, x)]
    shape = np.broadcast_shapes(*(y.shape for y in parts))
    name = m.draw.choice(["Sum", "Mean", "Max", "Min"])
    third = Value(m.const(m.array((), "f4", True)), "f4", (), True)
    names = " ".join(y.name for y in [*parts, third])
    is_exact = all(y.is_exact for y in parts) and name in ("Max", "Min")
    m.add(name, names, shape, "f4", is_exact)


@op()
def _prelu(m: Maker) -> None:
    x = m.pick(ndim=range(1, 5))
    m.add("PRelu", f"{x.name} {m.const(m.array(x.shape[-1:], 'f4', False))}", x.shape, "f4", False)


@op()
def _bits(m: Maker) -> None:
    if m.opset < 18:
        raise Unfit
    x = m.pick("i8 i4")
    y = m.pick(x.dtype, fits=lambda y: y.shape == x.shape)
    name = m.draw.choice(["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"])
    m.add(name, x.name if name == "BitwiseNot" else f"{x.name} {y.name}", x.shape, x.dtype, True)


# --- layout -------------------------------------------------------------------------------

_ANY: Final = "f4 i8 i4 ? f8"


@op(3)
def _transpose(m: Maker) -> None:
    x = m.pick(_ANY, range(2, 6))
    perm = m.draw.sample(range(x.ndim), x.ndim)
    m.add("Transpose", x.name, [x.shape[i] for i in perm], x.dtype, x.is_exact, perm=perm)


@op(3)
def _reshape(m: Maker) -> None:
    x = m.pick(_ANY)
    size = int(np.prod(x.shape, dtype=int))
    shape = [1]
    for n in _factors(size):
        shape[m.draw.randrange(len(shape))] *= n
        if m.draw.random() < 0.4 and len(shape) < 4:
            shape.insert(m.draw.randrange(len(shape) + 1), 1)
    lengths = list(shape)
    if m.draw.random() < 0.5:
        lengths[m.draw.randrange(len(lengths))] = -1
    m.add("Reshape", f"{x.name} {m.ints(lengths)}", shape, x.dtype, x.is_exact)


def _factors(n: int) -> list[int]:
    factors = []
    k = 2
    while n > 1:
        while n % k == 0:
            factors.append(k)
            n //= k
        k += 1
    return factors


@op(2)
def _squeeze(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    if ones and m.draw.random() < 0.6:
        axis = m.draw.choice(ones)
        shape = [n for i, n in enumerate(x.shape) if i != axis]
        axis -= m.draw.choice([0, x.ndim])
        m.add("Squeeze", f"{x.name} {m.ints([axis])}", shape, x.dtype, x.is_exact)
        return
    axis = m.draw.randrange(x.ndim + 1)
    shape = [*x.shape[:axis], 1, *x.shape[axis:]]
    m.add("Unsqueeze", f"{x.name} {m.ints([axis])}", shape, x.dtype, x.is_exact)


@op()
def _flatten(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    axis = m.draw.randrange(-x.ndim, x.ndim + 1)
    at = axis + x.ndim if axis < 0 else axis
    shape = np.prod(x.shape[:at], dtype=int), np.prod(x.shape[at:], dtype=int)
    m.add("Flatten", x.name, shape, x.dtype, x.is_exact, axis=axis)


@op(2)
def _concat(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis = m.draw.randrange(x.ndim)

    def fits(y: Value) -> bool:
        return all(
            i == axis or a == b for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True))
        )

    y = m.pick(x.dtype, x.ndim, fits=fits)
    shape = [n + (y.shape[axis] if i == axis else 0) for i, n in enumerate(x.shape)]
    at = axis - m.draw.choice([0, x.ndim])
    m.add("Concat", f"{x.name} {y.name}", shape, x.dtype, x.is_exact and y.is_exact, axis=at)


@op(2)
def _split(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5), fits=lambda x: max(x.shape) > 1)
    axis = m.draw.choice([i for i, n in enumerate(x.shape) if n > 1])
    n = x.shape[axis]
    at = m.draw.randrange(1, n)
    parts = [[*x.shape[:axis], k, *x.shape[axis + 1 :]] for k in (at, n - at)]
    results = [(shape, x.dtype, x.is_exact) for shape in parts]
    if m.opset >= 18 and at == -(-n // 2) and m.draw.random() < 0.7:
        m.several("Split", x.name, results, axis=axis, num_outputs=2)
    else:
        m.several("Split", f"{x.name} {m.ints([at, n - at])}", results, axis=axis - x.ndim)


@op(3)
def _slice(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis, step = m.draw.randrange(x.ndim), m.draw.choice([1, 1, 2, 3, -1, -2])
    n = x.shape[axis]
    start, end = m.draw.randrange(-n - 3, n + 3), m.draw.randrange(-n - 3, n + 3)
    if m.draw.random() < 0.2:
        end = (1 << 63) - 1 if step > 0 else -(1 << 63)
    low = start + n if start < 0 else start
    high = end + n if end < 0 else end
    if step > 0:
        places = range(min(max(low, 0), n), min(max(high, 0), n), step)
    else:
        places = range(min(max(low, 0), n - 1), min(max(high, -1), n - 1), step)
    shape = [*x.shape[:axis], len(places), *x.shape[axis + 1 :]]
    rows = [[start], [end], [axis - m.draw.choice([0, x.ndim])], [step]]
    m.add("Slice", " ".join([x.name, *map(m.ints, rows)]), shape, x.dtype, x.is_exact)


@op(2)
def _expand(m: Maker) -> None:
    x = m.pick(_ANY, range(4))
    shape = [m.draw.choice([2, 3]) if n == 1 else m.draw.choice([n, 1]) for n in x.shape]
    front = [2] * m.draw.randrange(2)
    if m.draw.random() < 0.5:
        whole = np.broadcast_shapes(x.shape, (*front, *shape))
        m.add("Expand", f"{x.name} {m.ints([*front, *shape])}", whole, x.dtype, x.is_exact)
        return
    times = [m.draw.choice([1, 2]) for _ in x.shape]
    if not times:
        raise Unfit
    whole = tuple(n * k for n, k in zip(x.shape, times, strict=True))
    m.add("Tile", f"{x.name} {m.ints(times)}", whole, x.dtype, x.is_exact)


@op(2)
def _pad(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5))
    mode = m.draw.choice(["constant", "reflect", "edge", *(["wrap"] if m.opset >= 19 else [])])
    widths = []
    for n in x.shape:
        most = min(n - 1, 2) if mode in ("reflect", "wrap") else 2
        low = -1 if mode == "constant" and n > 2 else 0
        widths.append((m.draw.randint(low, most), m.draw.randint(low, most)))
    shape = [n + a + b for n, (a, b) in zip(x.shape, widths, strict=True)]
    pads = [a for a, _ in widths] + [b for _, b in widths]
    inputs = f"{x.name} {m.ints(pads)}"
    if mode == "constant" and m.draw.random() < 0.6:
        inputs += " " + m.const(np.asarray(1.5 if x.dtype == "f4" else 2, x.dtype))
    m.add("Pad", inputs, shape, x.dtype, x.is_exact, mode=mode)


@op()
def _blocks(m: Maker) -> None:
    x = m.pick("f4", 4)
    n, c, h, w = x.shape
    if c % 4 == 0:
        shape, mode = (n, c // 4, h * 2, w * 2), m.draw.choice(["DCR", "CRD"])
        m.add("DepthToSpace", x.name, shape, "f4", x.is_exact, blocksize=2, mode=mode)
    elif h % 2 == 0 and w % 2 == 0:
        shape = n, c * 4, h // 2, w // 2
        m.add("SpaceToDepth", x.name, shape, "f4", x.is_exact, blocksize=2)
    else:
        raise Unfit


@op()
def _triangle(m: Maker) -> None:
    if m.opset < 14:
        raise Unfit
    x = m.pick("f4 i8", range(2, 5))
    k = m.const(np.asarray(m.draw.randint(-2, 2), np.int64))
    m.add("Trilu", f"{x.name} {k}", x.shape, x.dtype, x.is_exact, upper=m.draw.randrange(2))


@op()
def _crop(m: Maker) -> None:
    if m.opset < 18:
        raise Unfit
    x = m.pick("f4", range(1, 4))
    shape = [max(n + m.draw.randint(-2, 2), 1) for n in x.shape]
    m.add("CenterCropPad", f"{x.name} {m.ints(shape)}", shape, "f4", x.is_exact)


# --- picks --------------------------------------------------------------------------------


@op(2)
def _gather(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis = m.draw.randrange(x.ndim)
    n = x.shape[axis]
    places = m.rng.integers(-n, n, m.draw.choice([(), (2,), (3, 2)]))
    shape = (*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])
    at = axis - m.draw.choice([0, x.ndim])
    dtype = m.draw.choice([np.int64, np.int32])
    inputs = f"{x.name} {m.const(places.astype(dtype))}"
    m.add("Gather", inputs, shape, x.dtype, x.is_exact, axis=at)


@op()
def _gather_elements(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5))
    axis = m.draw.randrange(x.ndim)
    shape = [m.draw.randint(1, n) if i != axis else 3 for i, n in enumerate(x.shape)]
    places = m.rng.integers(-x.shape[axis], x.shape[axis], shape)
    m.add("GatherElements", f"{x.name} {m.const(places)}", shape, x.dtype, x.is_exact, axis=axis)


@op()
def _gather_nd(m: Maker) -> None:
    x = m.pick("f4 i8", range(2, 5))
    depth = m.draw.randint(1, x.ndim)
    places = np.stack([m.rng.integers(-n, n, 3) for n in x.shape[:depth]], axis=-1)
    shape = (3, *x.shape[depth:])
    m.add("GatherND", f"{x.name} {m.const(places)}", shape, x.dtype, x.is_exact)


@op(2)
def _scatter(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    how = m.draw.choice(["none"] + (["add", "mul"] if m.opset >= 16 else []))
    how = m.draw.choice([how, "max", "min"]) if m.opset >= 18 else how
    more: dict[str, Any] = {"reduction": how} if m.opset >= 16 else {}
    if m.draw.random() < 0.5:
        axis = m.draw.randrange(x.ndim)
        shape = [m.draw.randint(1, n) for n in x.shape]
        n = x.shape[axis]
        rows = np.stack(
            [m.rng.permutation(n)[: shape[axis]] for _ in range(np.prod(shape) // shape[axis])]
        )
        moved = [k for i, k in enumerate(shape) if i != axis]
        places = np.moveaxis(rows.reshape(*moved, shape[axis]), -1, axis)
        type, more = "ScatterElements", more | {"axis": axis}
    else:
        places = m.rng.permutation(x.shape[0])[:2].reshape(-1, 1)
        shape = [len(places), *x.shape[1:]]
        type = "ScatterND"
    updates = m.array(tuple(shape), "f4", True)
    is_exact = x.is_exact and how in ("none", "max", "min")
    inputs = f"{x.name} {m.const(places.astype(np.int64))} {m.const(updates)}"
    m.add(type, inputs, x.shape, "f4", is_exact, **more)


@op(2)
def _largest(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5), exact=True)
    axis = m.draw.randrange(x.ndim)
    keep = m.draw.randrange(2)
    shape = [1 if i == axis else n for i, n in enumerate(x.shape) if keep or i != axis]
    name = m.draw.choice(["ArgMax", "ArgMin", "TopK"])
    if name == "TopK":
        k = m.draw.randint(1, x.shape[axis])
        shape = [k if i == axis else n for i, n in enumerate(x.shape)]
        results = [(shape, x.dtype, True), (shape, "i8", True)]
        inputs = f"{x.name} {m.ints([k])}"
        m.several(name, inputs, results, axis=axis, largest=m.draw.randrange(2))
        return
    last = m.draw.randrange(2)
    m.add(name, x.name, shape, "i8", True, axis=axis, keepdims=keep, select_last_index=last)


@op()
def _one_hot(m: Maker) -> None:
    x = m.pick("i8", range(1, 3))
    inputs = f"{x.name} {m.ints([5])} {m.const(np.asarray([-1, 2], np.float32))}"
    axis = m.draw.randint(-x.ndim - 1, x.ndim)
    at = axis + x.ndim + 1 if axis < 0 else axis
    m.add("OneHot", inputs, (*x.shape[:at], 5, *x.shape[at:]), "f4", True, axis=axis)


@op()
def _along(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    axis = m.draw.randrange(-x.ndim, x.ndim)
    at = m.const(np.asarray(axis, np.int64))
    flags = {"exclusive": m.draw.randrange(2), "reverse": m.draw.randrange(2)}
    m.add("CumSum", f"{x.name} {at}", x.shape, "f4", False, **flags)


@op()
def _of_shape(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    if m.draw.random() < 0.5 and m.opset >= 15:
        start = m.draw.randrange(x.ndim)
        m.add("Shape", x.name, (x.ndim - start,), "i8", True, start=start)
    else:
        m.add("Shape", x.name, (x.ndim,), "i8", True)


# --- reductions ---------------------------------------------------------------------------


@op(4)
def _reduce(m: Maker) -> None:
    name = m.draw.choice(
        ["Sum", "Mean", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp", "Prod"]
    )
    dtypes = "f4 i8 i4" if name in ("Sum", "Mean", "Max", "Min") else "f4"
    x = m.pick(dtypes, range(1, 5))
    axes = sorted(m.draw.sample(range(x.ndim), m.draw.randint(1, x.ndim)))
    keep = m.draw.randrange(2)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
    numbers = [i - m.draw.choice([0, x.ndim]) for i in axes]
    more, attributes = m.axes(numbers, 13 if name == "Sum" else 18, keepdims=keep)
    is_exact = x.is_exact and (name in ("Max", "Min") or x.dtype[0] == "i")
    m.add(f"Reduce{name}", x.name + more, shape, x.dtype, is_exact, **attributes)


@op(2)
def _softmax(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    name = m.draw.choice(["Softmax", "LogSoftmax"])
    m.add(name, x.name, x.shape, "f4", False, axis=m.draw.randrange(-x.ndim, x.ndim))


@op(2)
def _normal(m: Maker) -> None:
    x = m.pick("f4", range(3, 5))
    c = x.shape[1]
    rows = [m.const(m.array((c,), "f4", False)) for _ in range(3)]
    name = m.draw.choice(["Batch", "Instance", "Layer", "LpNormalization", "LRN"])
    if name == "Batch":
        spread = m.const(np.abs(m.array((c,), "f4", False)) + np.float32(0.5))
        inputs = " ".join([x.name, *rows, spread])
        m.add("BatchNormalization", inputs, x.shape, "f4", False, epsilon=0.01)
    elif name == "Instance":
        inputs = " ".join([m.clipped(x, 8).name, *rows[:2]])
        m.add("InstanceNormalization", inputs, x.shape, "f4", False, epsilon=0.1)
    elif name == "Layer" and m.opset >= 17:
        axis = m.draw.randrange(1, x.ndim)
        rows = [m.const(m.array(x.shape[axis:], "f4", False)) for _ in range(2)]
        inputs = " ".join([x.name, *rows[: m.draw.randint(1, 2)]])
        m.add("LayerNormalization", inputs, x.shape, "f4", False, axis=axis, epsilon=0.1)
    elif name == "LRN" and x.ndim == 4:
        m.add("LRN", x.name, x.shape, "f4", False, size=3, alpha=0.1)
    else:
        raise Unfit


# --- products -----------------------------------------------------------------------------


@op(2)
def _matmul(m: Maker) -> None:
    x = m.pick("f4", range(2, 5))
    k = m.draw.randint(1, 4)
    if m.draw.random() < 0.6:
        w = m.array((x.shape[-1], k), "f4", False)
        m.add("MatMul", f"{x.name} {m.const(w)}", (*x.shape[:-1], k), "f4", False)
        return
    y = m.pick("f4", x.ndim, fits=lambda y: y.shape[:-1] == (*x.shape[:-2], x.shape[-1]))
    m.add("MatMul", f"{x.name} {y.name}", (*x.shape[:-1], y.shape[-1]), "f4", False)


@op(2)
def _gemm(m: Maker) -> None:
    x = m.pick("f4", 2)
    turned, other = m.draw.randrange(2), m.draw.randrange(2)
    rows, inner = x.shape[::-1] if turned else x.shape
    k = m.draw.randint(1, 4)
    w = m.array((k, inner) if other else (inner, k), "f4", False)
    bias = m.array(m.draw.choice([(k,), (1,), (), (rows, 1)]), "f4", False)
    flags = {"transA": turned, "transB": other, "alpha": 0.5, "beta": 2.0}
    m.add("Gemm", f"{x.name} {m.const(w)} {m.const(bias)}", (rows, k), "f4", False, **flags)


def _window(m: Maker, x: Value) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Window, strides, dilations, pads, and how many windows there are."""
    axes = x.ndim - 2
    window = [m.draw.randint(1, 3) for _ in range(axes)]
    strides = [m.draw.randint(1, 2) for _ in range(axes)]
    rates = [m.draw.choice([1, 1, 2]) for _ in range(axes)]
    pads = [m.draw.randint(0, window[i % axes] // 2) for i in range(2 * axes)]
    counts = [
        (n + pads[i] + pads[i + axes] - (window[i] - 1) * rates[i] - 1) // strides[i] + 1
        for i, n in enumerate(x.shape[2:])
    ]
    if min(counts) < 1:
        raise Unfit
    return window, strides, rates, pads, counts


@op(3)
def _conv(m: Maker) -> None:
    x = m.pick("f4", range(3, 6))
    n, c = x.shape[:2]
    window, strides, rates, pads, counts = _window(m, x)
    groups = m.draw.choice([k for k in (1, c) if c % k == 0])
    out = groups * m.draw.randint(1, 2)
    flags: dict[str, Any] = {"strides": strides, "dilations": rates, "group": groups, "pads": pads}
    if m.draw.random() < 0.3 and x.ndim < 5:
        w = m.array((c, out // groups, *window), "f4", False)
        shape = [
            (k - 1) * strides[i] + (window[i] - 1) * rates[i] + 1 - pads[i] - pads[i + len(window)]
            for i, k in enumerate(x.shape[2:])
        ]
        if min(shape) < 1:
            raise Unfit
        m.add("ConvTranspose", f"{x.name} {m.const(w)}", (n, out, *shape), "f4", False, **flags)
        return
    w = m.array((out, c // groups, *window), "f4", False)
    inputs = f"{x.name} {m.const(w)}"
    if m.draw.random() < 0.5:
        inputs += " " + m.const(m.array((out,), "f4", False))
    m.add("Conv", inputs, (n, out, *counts), "f4", False, **flags)


@op(3)
def _pool(m: Maker) -> None:
    x = m.pick("f4", range(3, 6))
    name = m.draw.choice(["MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"])
    if name.startswith("Global"):
        shape = (*x.shape[:2], *[1] * (x.ndim - 2))
        m.add(name, x.name, shape, "f4", x.is_exact and name == "GlobalMaxPool")
        return
    window, strides, rates, pads, counts = _window(m, x)
    flags: dict[str, Any] = {"kernel_shape": window, "strides": strides, "pads": pads}
    padded = name == "MaxPool" and any(pads)  # windows of padding alone differ by runtime
    if (name == "MaxPool" and not padded) or (name == "AveragePool" and m.opset >= 19):
        flags["dilations"] = rates
    elif max(rates) > 1 or name == "LpPool":
        rates = [1] * len(rates)
        counts = [
            (n + pads[i] + pads[i + len(window)] - window[i]) // strides[i] + 1
            for i, n in enumerate(x.shape[2:])
        ]
    if name == "AveragePool":
        flags["count_include_pad"] = m.draw.randrange(2)
    if name == "LpPool":
        flags["p"] = m.draw.choice([1, 2])
    shape = (*x.shape[:2], *counts)
    if name == "MaxPool" and x.is_exact and m.draw.random() < 0.3:
        results = [(shape, "f4", True), (shape, "i8", True)]
        m.several(name, x.name, results, **flags)
        return
    m.add(name, x.name, shape, "f4", x.is_exact and name == "MaxPool", **flags)


@op(2)
def _resize(m: Maker) -> None:
    x = m.pick("f4", 4)
    mode = m.draw.choice(["nearest", "linear", "cubic"])
    modes = ["half_pixel", "align_corners", "pytorch_half_pixel", "asymmetric"]
    transform = m.draw.choice(modes + (["half_pixel_symmetric"] if m.opset >= 19 else []))
    flags: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "nearest":
        flags["nearest_mode"] = m.draw.choice(["round_prefer_floor", "floor", "ceil"])
    elif m.opset >= 18 and m.draw.random() < 0.4:
        flags |= {"antialias": 1, "exclude_outside": m.draw.randrange(2)}
    scales = [1, 1, *m.draw.choices([0.5, 0.6, 0.75, 1, 1.25, 1.5, 2, 2.3, 3.3], k=2)]
    single = np.asarray(scales, np.float32)
    counts = np.floor(np.asarray(x.shape, np.float32) * single).astype(int).tolist()
    if 0 in counts:
        raise Unfit
    is_exact = x.is_exact and mode == "nearest"
    if m.draw.random() < 0.5:
        m.add("Resize", f"{x.name} - {m.const(single)}", counts, "f4", is_exact, **flags)
    else:
        m.add("Resize", f"{x.name} - - {m.ints(counts)}", counts, "f4", is_exact, **flags)


@op()
def _grid(m: Maker) -> None:
    if m.opset < 16:
        raise Unfit
    x = m.pick("f4", 4)
    grid = m.rng.uniform(-1.2, 1.2, (x.shape[0], 2, 3, 2)).astype(np.float32)
    mode = "bilinear" if m.opset < 20 else "linear"
    edge = m.draw.choice(["zeros", "border", "reflection"])
    flags: dict[str, Any] = {
        "mode": mode, "padding_mode": edge, "align_corners": m.draw.randrange(2),
    }  # fmt: skip
    shape = (*x.shape[:2], 2, 3)
    m.add("GridSample", f"{x.name} {m.const(grid)}", shape, "f4", False, **flags)


@op()
def _quantized(m: Maker) -> None:
    x = m.pick("f4", range(1, 5), exact=True)
    scale, zero = m.const(np.float32(0.25)), m.const(np.asarray(3, np.uint8))
    q = m.add("QuantizeLinear", f"{x.name} {scale} {zero}", x.shape, "u1", True)
    m.used.add(q.name)
    m.add("DequantizeLinear", f"{q.name} {scale} {zero}", x.shape, "f4", True)


@op()
def _integer_product(m: Maker) -> None:
    x = m.pick("f4", range(2, 4), exact=True)
    outputs = [(x.shape, "u1", True), ((), "f4", True), ((), "u1", True)]
    q, _scale, zero = m.several("DynamicQuantizeLinear", x.name, outputs)
    k = m.draw.randint(1, 4)
    w = m.const(m.rng.integers(-127, 128, (x.shape[-1], k)).astype(np.int8))
    inputs = f"{q.name} {w} {zero.name} {m.const(np.asarray(3, np.int8))}"
    m.used |= {q.name, zero.name}
    m.add("MatMulInteger", inputs, (*x.shape[:-1], k), "i4", True)


@op()
def _recurrent(m: Maker) -> None:
    x = m.pick("f4", 3)
    steps, batch, width = x.shape
    name, gates = m.draw.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    directions, hidden = m.draw.choice([("forward", 1), ("reverse", 1), ("bidirectional", 2)]), 2
    direction, count = directions
    w = m.const(m.array((count, gates * hidden, width), "f4", False))
    r = m.const(m.array((count, gates * hidden, hidden), "f4", False))
    b = m.const(m.array((count, 2 * gates * hidden), "f4", False))
    flags: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if name == "GRU":
        flags["linear_before_reset"] = m.draw.randrange(2)
    results = [((steps, count, batch, hidden), "f4", False), ((count, batch, hidden), "f4", False)]
    m.several(name, f"{x.name} {w} {r} {b}", results, **flags)


@op(2)
def _seldom(m: Maker) -> None:
    x = m.pick("f4", range(1, 5), exact=True)
    n, which = x.shape[0], m.draw.randrange(8)
    if which == 0:
        m.add("Hardmax", x.name, x.shape, "f4", True, axis=m.draw.randrange(-x.ndim, x.ndim))
    elif which == 1:
        m.add("Shrink", x.name, x.shape, "f4", True, lambd=0.5, bias=0.25)
    elif which == 2:
        m.add("Size", x.name, (), "i8", True)
    elif which == 3 and x.ndim > 1:
        lengths = m.ints(m.rng.integers(1, x.shape[0] + 1, x.shape[1]))
        inputs = f"{x.name} {lengths}"
        m.add("ReverseSequence", inputs, x.shape, "f4", True, time_axis=0, batch_axis=1)
    elif which == 4 and x.ndim == 2:
        m.add("EyeLike", x.name, x.shape, "f4", True, k=m.draw.randint(-1, 1))
    elif which == 5:
        mask = m.rng.integers(0, 2, n).astype(bool)
        mask[0] = True
        shape = (int(mask.sum()), *x.shape[1:])
        m.add("Compress", f"{x.name} {m.const(mask)}", shape, "f4", True, axis=0)
    elif which == 6:
        rows = m.ints(x.shape)
        m.add(
            "ConstantOfShape",
            rows,
            x.shape,
            "f4",
            True,
            value=constant("", np.asarray([1.5], np.float32)),
        )
    elif which == 7:
        bounds = [m.const(np.asarray(k)) for k in (m.draw.randint(-3, 3), 7, 2)]
        first = int(np.frombuffer(m.constants[-3].raw_data, np.int64)[0])
        m.add("Range", " ".join(bounds), (len(range(first, 7, 2)),), "i8", True)
    else:
        raise Unfit


@op()
def _einsum(m: Maker) -> None:
    x = m.pick("f4", 3)
    y = m.array((x.shape[-1], 2), "f4", False)
    a, b, _ = x.shape
    equation, shape = m.draw.choice([("abc,cd->dab", (2, a, b)), ("abc,cd->ad", (a, 2))])
    m.add("Einsum", f"{x.name} {m.const(y)}", shape, "f4", False, equation=equation)


@op()
def _branch(m: Maker) -> None:
    x = m.pick("f4", range(4))
    flag = m.add("ReduceMax", *_of_ints(m), (), "i8", True, keepdims=0)
    yes = m.add("Greater", f"{flag.name} {m.const(np.asarray(1))}", (), "?", True)
    m.used |= {flag.name, yes.name}
    at = len(m.values)
    first = graph([node("Tanh", x.name, f"t{at}")], [], f"t{at}")
    other = graph([node("Mul", f"{x.name} {x.name}", f"e{at}")], [], f"e{at}")
    m.add("If", yes.name, x.shape, "f4", False, then_branch=first, else_branch=other)


def _of_ints(m: Maker) -> tuple[str]:
    return (m.pick("i8", range(1, 5)).name,)


@op()
def _loop(m: Maker) -> None:
    x = m.pick("f4", range(4))
    at, turns = len(m.values), m.draw.randint(1, 6)
    body = graph(
        [
            node("Tanh", f"s{at}", f"a{at}"),
            node("Add", f"a{at} {x.name}", f"b{at}"),
            node("Identity", f"go{at}", f"on{at}"),
            node("Neg", f"a{at}", f"row{at}"),
        ],
        [value(f"i{at}", 7, ()), value(f"go{at}", 9, ()), value(f"s{at}", 1)],
        f"on{at} b{at} row{at}",
    )
    vars(body)["output"][0] = value(f"on{at}", 9, ())
    results = [(x.shape, "f4", False), ((turns, *x.shape), "f4", False)]
    count = m.const(np.asarray(turns, np.int64))
    m.several("Loop", f"{count} - {x.name}", results, body=body)


# --- tried --------------------------------------------------------------------------------


class Fuzz:
    """Runs so far: what came out, and how often each op was in a graph that ran."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.ops: collections.Counter[str] = collections.Counter()

    def report(self) -> str:
        """A line for each outcome."""
        lines = [f"{count:7}  {outcome}" for outcome, count in self.outcomes.most_common()]
        lines.append(f"{sum(self.ops.values()):,} nodes of {len(self.ops)} ops ran")
        return "\n".join(lines)


def session(data: bytes) -> Any:
    """ONNX Runtime's, on one thread; what it fuses otherwise ends the process at times."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def difference(case: Graph) -> str | None:
    """Return how mlvm differs from ONNX Runtime; None where it does not. Raises what is no
    `MlvmError`."""
    runtime = session(case.data)
    reference = runtime.run(None, case.operands)
    moved = {
        k: x + np.abs(x) * np.float32(3e-7) if k in case.smooth else x
        for k, x in case.operands.items()
    }
    other = runtime.run(None, moved)
    try:
        net = load(case.data)
        operands = {k: ml.asarray(x) for k, x in case.operands.items()}
        rows = [("eagerly", net(**operands)), ("captured", ml.capture(net)(**operands))]
    except MlvmError as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}; {notes}"
    for how, result in rows:
        results = result if isinstance(result, tuple) else (result,)
        for name, x, y, z in zip(net.outputs, results, reference, other, strict=True):
            message = _difference(np.asarray(x), y, z)
            if message:
                return f"{how}, {name}: {message}"
    return None


def _difference(x: Any, y: Any, z: Any) -> str | None:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"{x.dtype}{list(x.shape)} is not {y.dtype}{list(y.shape)}"
    if y.dtype.kind != "f":
        count = int((x != y).sum())
        return (
            f"{count} of {y.size} differ: {x.ravel()[:6]}, not {y.ravel()[:6]}" if count else None
        )
    same = np.isfinite(y) & np.isfinite(z)
    if not same.all():  # it overflows, there or nearby
        return None
    most = max(1.0, float(np.abs(y).max(initial=0)))
    by = float(np.abs(x.astype(float) - y).max(initial=0))
    allowed = CLOSE * most + 30 * float(np.abs(y.astype(float) - z).max(initial=0))
    if by <= allowed:
        return None
    return f"apart by {by:.2g} of {most:.2g}: {x.ravel()[:4]}, not {y.ravel()[:4]}"


def fuzz(programs: int, seed: int, first: int = 0, nodes: int = NODES) -> tuple[Fuzz, str | None]:
    """Try a number of graphs; what came out, and the first that differs."""
    runs = Fuzz()
    for number in range(first, first + programs):
        maker = Maker(seed << 32 | number, nodes)
        case = maker.graph()
        try:
            message = difference(case)
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            runs.outcomes["refused by ONNX Runtime"] += 1
            print(f"{number}: {str(error)[:300]}", file=sys.stderr)
            continue
        if message is not None:
            whole = _first_node(maker)
            return (
                runs,
                f"--graphs --seed {seed} --first {number}, opset {maker.opset}: {message}\n{whole}",
            )
        runs.outcomes["the same"] += 1
        runs.ops.update(case.ops)
    return runs, None


def _first_node(maker: Maker) -> str:
    """The first node whose result differs, where all values are outputs."""
    nodes, values = maker.nodes, maker.values
    for count in range(1, len(nodes) + 1):
        names = {name for each in nodes[:count] for name in each.output}
        maker.nodes = nodes[:count]
        maker.values = [x for x in values if x.name in names]
        message = difference(maker.graph(everything=True))
        maker.nodes, maker.values = nodes, values
        if message is not None:
            each = nodes[count - 1]
            types = [x for x in values if x.name in [*each.input, *each.output]]
            attributes = {a.name: a.ints or a.i or a.f or bytes(a.s) for a in each.attribute}
            constants = {c.name: (c.dims, bytes(c.raw_data)[:64]) for c in maker.constants
                     if c.name in each.input}  # fmt: skip
            call = f"{each.op_type}({each.input}) -> {each.output}, {attributes}"
            return f"{call}: {message}\n{types}\n{constants}"
    return "alone no node differs"
