"""ONNX graphs of many ops beside ONNX Runtime: the same dtypes, shapes and values, eagerly and
captured.

What rounds up or down, and what picks the largest, is given only values that both compute to the
bit: those of `is_exact`. All others may differ by as much as ONNX Runtime differs from itself where
its operands differ in their last bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.types import DType
from mlvm.onnx import load
from mlvm.onnx.arrays import NAMES
from mlvm.onnx.wire import ProtoMessage
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.onnx.making import constant, graph, model, node, value

OPSETS: Final = range(13, 22)
MOST: Final = 400  # elements of a value
NODES: Final = 150
OUTPUTS: Final = 16
CLOSE: Final = 2e-4


_EXACT: Final = """
    Abs CenterCropPad Ceil Clip Cast CastLike Compress Concat ConstantOfShape DepthToSpace
    DequantizeLinear Dropout Expand EyeLike Flatten Floor Gather GatherElements GatherND
    GlobalMaxPool Hardmax Identity Max MaxPool Min Neg OneHot Pad ReduceMax ReduceMin Relu Reshape
    Resize ReverseSequence Round ScatterElements ScatterND Shrink Sign Slice SpaceToDepth Split
    Squeeze Tile TopK Transpose Trilu Unsqueeze Where DynamicQuantizeLinear
"""
EXACT: Final = {*_EXACT.split()}
"""Types of nodes whose floats have the same bits in every runtime where those of their operands
do, without a mode that computes."""


class Value(NamedTuple):
    """A value of a graph: its name, what ONNX Runtime has for it, and whether every runtime
    computes the same bits."""

    name: str
    array: Any
    is_exact: bool

    @property
    def dtype(self) -> str:
        return "?" if self.array.dtype == bool else str(self.array.dtype.str[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def described(self) -> ProtoMessage:
        """The value as an input of a graph."""
        return value(self.name, NAMES[DType.of(self.array.dtype)], self.shape)


class Graph(NamedTuple):
    """A file, and operands for its inputs; those in `smooth` may be moved a little."""

    data: bytes
    operands: dict[str, Any]
    smooth: list[str]


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
    """A graph in the making. ONNX Runtime computes each node as it is added, which tells the types
    of its results."""

    def __init__(self, seed: int, nodes: int = NODES) -> None:
        self.draw = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.opset = self.draw.choice(OPSETS)
        self.values: list[Value] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.used: set[str] = set()
        for i in range(6):
            shape = tuple(self.draw.choices([1, 2, 3, 4, 5], k=[4, 2, 3, 1, 4, 2][i]))
            dtype = ["f4", "f4", "f4", "f4", "f4", "i8"][i]
            is_exact = i > 2
            self.values.append(Value(f"in{i}", self.array(shape, dtype, is_exact), is_exact))
        self.inputs = tuple(self.values)
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
            and fits(x)
        ]
        if not suited:
            raise Unfit
        return suited[max(self.draw.randrange(len(suited)), self.draw.randrange(len(suited)))]

    def const(self, array: Any) -> str:
        """An initializer."""
        name = f"c{len(self.constants)}"
        self.constants.append(constant(name, np.asarray(array)))
        return name

    def floats(self, *shape: int) -> str:
        """An initializer of random numbers."""
        return self.const(self.array(shape, "f4", False))

    def ints(self, numbers: Any) -> str:
        return self.const(np.asarray(numbers, np.int64))

    def axes(self, numbers: list[int], since: int, **attributes: Any) -> tuple[str, dict[str, Any]]:
        """Axes as an operand, from that opset on, or as an attribute."""
        if self.opset >= since:
            return " " + self.ints(numbers), attributes
        return "", attributes | {"axes": numbers}

    def since(self, opset: int) -> None:
        """Leave the op to graphs of later opsets."""
        if self.opset < opset:
            raise Unfit

    def add(self, type: str, inputs: str, results: int = 1, **attributes: Any) -> Value:
        """Add a node, and return the first of its results."""
        names = [f"v{len(self.values) + i}" for i in range(results)]
        added = node(type, inputs, " ".join(names), f"n{len(self.nodes)}", **attributes)
        reads = _reads(added)
        operands = [x for x in self.values if x.name in reads]
        alone = graph(
            [added],
            [x.described() for x in operands],
            "",
            [x for x in self.constants if x.name in reads],
        )
        vars(alone)["output"] = [ProtoMessage("Value", name=name) for name in names]
        runtime = session(model(alone, self.opset))
        arrays = runtime.run(None, {x.name: x.array for x in operands})
        if any(x.size > MOST or x.ndim > 5 or x.size == 0 for x in arrays):
            raise Unfit
        computes = {"linear", "cubic", "add", "mul"} & {
            each for each in attributes.values() if isinstance(each, str)
        }
        is_exact = type in EXACT and not computes and all(x.is_exact for x in operands)
        self.used |= reads
        self.nodes.append(added)
        self.values += [
            Value(name, x, is_exact or x.dtype.kind != "f")
            for name, x in zip(names, arrays, strict=True)
        ]
        return self.values[-results]

    def clipped(self, x: Value, most: float) -> Value:
        """The value within bounds: of a larger operand, its last bit decides."""
        return self.add("Clip", f"{x.name} {self.single(-most)} {self.single(most)}")

    def single(self, number: float) -> str:
        """An initializer of one f32."""
        return self.const(np.float32(number))

    def graph(self, *, everything: bool = False) -> Graph:
        """The file: its outputs are what nothing asks for, and more."""
        made = [x for x in self.values if x.name[0] == "v"]
        if not everything:
            made = [x for x in made if x.name not in self.used][-OUTPUTS:]
        whole = graph(self.nodes, [x.described() for x in self.inputs], "", self.constants)
        vars(whole)["output"] = [value(x.name, NAMES[DType.of(x.array.dtype)]) for x in made]
        operands = {x.name: x.array for x in self.inputs}
        return Graph(model(whole, self.opset), operands, ["in0", "in1", "in2"])


def _reads(each: ProtoMessage) -> set[str]:
    """The names of the values that a node has, also in its bodies."""
    bodies = [a.g.node for a in each.attribute if a.g is not None]
    return {*each.input, *(name for body in bodies for inner in body for name in _reads(inner))}


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
    m.since({"HardSwish": 14, "Mish": 18, "Gelu": 20}.get(name, 0))
    most = {"Exp": 4, "Sinh": 4, "Cosh": 4, "Sin": 64, "Cos": 64}.get(name)
    if most is not None:
        x = m.clipped(x, most)
    m.add(name, x.name, **attributes)


@op(3)
def _exact(m: Maker) -> None:
    name = m.draw.choice(["Neg", "Abs", "Relu", "Identity", "Clip", "Dropout"])
    inputs = m.pick().name
    if name == "Clip":
        inputs += f" {m.draw.choice(['-', m.single(-1.5)])} {m.single(2.25)}"
    m.add(name, inputs)


@op(3)
def _rounding(m: Maker) -> None:
    m.add(m.draw.choice(["Floor", "Ceil", "Round", "Sign"]), m.pick(exact=True).name)


@op(6)
def _pairs(m: Maker) -> None:
    x = m.pick(m.draw.choice(["f4", "f4", "i8", "i4", "f8"]))
    m.add(m.draw.choice(["Add", "Sub", "Mul", "Max", "Min"]), f"{x.name} {_neighbour(m, x)}")


def _neighbour(m: Maker, x: Value) -> str:
    """A value, or a constant, that broadcasts with x."""

    def fits(y: Value) -> bool:
        try:
            np.broadcast_shapes(x.shape, y.shape)
        except ValueError:
            return False
        return True

    if m.draw.random() < 0.4:
        shape = tuple(m.draw.choice([n, 1]) for n in x.shape)[m.draw.randrange(x.ndim + 1) :]
        return m.const(m.array(shape, x.dtype, x.is_exact))
    return m.pick(x.dtype, fits=fits).name


def _alike(m: Maker, x: Value, *, exact: bool = False) -> str:
    """A value of the same dtype and shape."""
    return m.pick(x.dtype, exact=exact, fits=lambda y: y.shape == x.shape).name


@op(2)
def _quotient(m: Maker) -> None:
    x = m.pick()
    by = m.add("Add", f"{m.add('Abs', _alike(m, x)).name} {m.single(0.5)}").name
    name = m.draw.choice(["Div", "Sqrt", "Log", "Reciprocal", "Pow"])
    power = m.single(m.draw.choice([2, 0.5, 3, -1]))
    m.add(name, {"Div": f"{x.name} {by}", "Pow": f"{by} {power}"}.get(name, by))


@op(2)
def _integers(m: Maker) -> None:
    x = m.pick("i8 i4")
    name = m.draw.choice(["Mod", "Div", "Neg", "Abs", "Sign"])
    if name == "Div":  # which rounds as the machine likes below 0
        x = m.add("Abs", x.name)
    by = m.draw.choice([2, 3, 5, -2] if name == "Mod" else [2, 3])
    m.add(name, x.name + (f" {m.const(np.asarray(by, x.dtype))}" if name in ("Mod", "Div") else ""))


@op(2)
def _comparison(m: Maker) -> None:
    x = m.pick("f4 i8 i4", exact=True)
    name = m.draw.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"])
    m.add(name, f"{x.name} {_alike(m, x, exact=True)}")


@op(2)
def _logic(m: Maker) -> None:
    _of_one_or_two(m, m.pick("?"), ["And", "Or", "Xor", "Not"])


def _of_one_or_two(m: Maker, x: Value, names: list[str]) -> None:
    """A node of these types, of which `Not` has one operand."""
    name = m.draw.choice(names)
    m.add(name, x.name if name.endswith("Not") else f"{x.name} {_alike(m, x)}")


@op(2)
def _where(m: Maker) -> None:
    condition = m.pick("?")
    x = m.pick("f4 i8", fits=lambda y: y.shape == condition.shape)
    m.add("Where", f"{condition.name} {x.name} {_neighbour(m, x)}")


@op(3)
def _cast(m: Maker) -> None:
    x = m.pick("f4 i8 i4 ? f8 u1")
    to = m.draw.choice(["f4", "i8", "i4", "?", "f8"])
    if x.dtype[0] == "f" and to[0] != "f":
        x = m.pick("f4", exact=True)
    if m.opset >= 15 and m.draw.random() < 0.5:
        m.add("CastLike", f"{x.name} {m.const(np.zeros(1, to))}")
    else:
        m.add("Cast", x.name, to=NAMES[DType.of(np.dtype(to))])


@op()
def _variadic(m: Maker) -> None:
    x = m.pick()
    third = m.const(m.array((), "f4", True))
    m.add(m.draw.choice(["Sum", "Mean", "Max", "Min"]), f"{x.name} {_neighbour(m, x)} {third}")


@op()
def _prelu(m: Maker) -> None:
    x = m.pick(ndim=range(1, 5))
    m.add("PRelu", f"{x.name} {m.floats(x.shape[-1])}")


@op()
def _bits(m: Maker) -> None:
    m.since(18)
    names = ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"]
    _of_one_or_two(m, m.pick("i8 i4"), names)


# --- layout -------------------------------------------------------------------------------

_ANY: Final = "f4 i8 i4 ? f8"


def _axis(m: Maker, x: Value) -> int:
    """One of the axes, from either end."""
    return m.draw.randrange(-x.ndim, x.ndim)


@op(3)
def _transpose(m: Maker) -> None:
    x = m.pick(_ANY, range(2, 6))
    m.add("Transpose", x.name, perm=m.draw.sample(range(x.ndim), x.ndim))


@op(3)
def _reshape(m: Maker) -> None:
    x = m.pick(_ANY)
    shape = [1]
    for n in _factors(x.array.size):
        shape[m.draw.randrange(len(shape))] *= n
        if m.draw.random() < 0.4 and len(shape) < 4:
            shape.insert(m.draw.randrange(len(shape) + 1), 1)
    if m.draw.random() < 0.5:
        shape[m.draw.randrange(len(shape))] = -1
    m.add("Reshape", f"{x.name} {m.ints(shape)}")


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
        m.add("Squeeze", f"{x.name} {m.ints([m.draw.choice(ones) - m.draw.choice([0, x.ndim])])}")
    else:
        m.add("Unsqueeze", f"{x.name} {m.ints([m.draw.randrange(x.ndim + 1)])}")


@op()
def _flatten(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    m.add("Flatten", x.name, axis=m.draw.randrange(-x.ndim, x.ndim + 1))


@op(2)
def _concat(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis = m.draw.randrange(x.ndim)

    def fits(y: Value) -> bool:
        return np.delete(x.shape, axis).tolist() == np.delete(y.shape, axis).tolist()

    y = m.pick(x.dtype, x.ndim, fits=fits)
    m.add("Concat", f"{x.name} {y.name}", axis=axis - m.draw.choice([0, x.ndim]))


@op(2)
def _split(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5), fits=lambda x: max(x.shape) > 1)
    axis = m.draw.choice([i for i, n in enumerate(x.shape) if n > 1])
    n = x.shape[axis]
    at = m.draw.randrange(1, n)
    if m.opset >= 18 and at == -(-n // 2) and m.draw.random() < 0.7:
        m.add("Split", x.name, 2, axis=axis, num_outputs=2)
    else:
        m.add("Split", f"{x.name} {m.ints([at, n - at])}", 2, axis=axis - x.ndim)


@op(3)
def _slice(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis, step = _axis(m, x), m.draw.choice([1, 1, 2, 3, -1, -2])
    n = x.shape[axis]
    start, end = m.draw.randrange(-n - 3, n + 3), m.draw.randrange(-n - 3, n + 3)
    if m.draw.random() < 0.2:
        end = (1 << 63) - 1 if step > 0 else -(1 << 63)
    m.add("Slice", " ".join([x.name, *(m.ints([n]) for n in (start, end, axis, step))]))


@op(2)
def _expand(m: Maker) -> None:
    x = m.pick(_ANY, range(4))
    if m.draw.random() < 0.5:
        shape = [m.draw.choice([2, 3]) if n == 1 else m.draw.choice([n, 1]) for n in x.shape]
        m.add("Expand", f"{x.name} {m.ints([2] * m.draw.randrange(2) + shape)}")
    elif x.ndim:
        m.add("Tile", f"{x.name} {m.ints([m.draw.choice([1, 2]) for _ in x.shape])}")


@op(2)
def _pad(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5))
    mode = m.draw.choice(["constant", "reflect", "edge", *(["wrap"] if m.opset >= 19 else [])])
    widths = []
    for n in x.shape * 2:
        most = min(n - 1, 2) if mode in ("reflect", "wrap") else 2
        widths.append(m.draw.randint(-1 if mode == "constant" and n > 2 else 0, most))
    inputs = f"{x.name} {m.ints(widths)}"
    if mode == "constant" and m.draw.random() < 0.6:
        inputs += " " + m.const(np.asarray(1.5 if x.dtype == "f4" else 2, x.dtype))
    m.add("Pad", inputs, mode=mode)


@op()
def _blocks(m: Maker) -> None:
    x = m.pick("f4", 4)
    if x.shape[1] % 4 == 0:
        m.add("DepthToSpace", x.name, blocksize=2, mode=m.draw.choice(["DCR", "CRD"]))
    elif x.shape[2] % 2 == x.shape[3] % 2 == 0:
        m.add("SpaceToDepth", x.name, blocksize=2)


@op()
def _triangle(m: Maker) -> None:
    m.since(14)
    x = m.pick("f4 i8", range(2, 5))
    k = m.const(np.asarray(m.draw.randint(-2, 2), np.int64))
    m.add("Trilu", f"{x.name} {k}", upper=m.draw.randrange(2))


@op()
def _crop(m: Maker) -> None:
    m.since(18)
    x = m.pick("f4", range(1, 4))
    lengths = m.ints([max(n + m.draw.randint(-2, 2), 1) for n in x.shape])
    m.add("CenterCropPad", f"{x.name} {lengths}")


# --- picks --------------------------------------------------------------------------------


@op(2)
def _gather(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    axis = _axis(m, x)
    n = x.shape[axis]
    places = m.rng.integers(-n, n, m.draw.choice([(), (2,), (3, 2)]))
    dtype = m.draw.choice([np.int64, np.int32])
    m.add("Gather", f"{x.name} {m.const(places.astype(dtype))}", axis=axis)


@op()
def _gather_elements(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5))
    axis = m.draw.randrange(x.ndim)
    shape = [m.draw.randint(1, n) if i != axis else 3 for i, n in enumerate(x.shape)]
    places = m.rng.integers(-x.shape[axis], x.shape[axis], shape)
    m.add("GatherElements", f"{x.name} {m.const(places)}", axis=axis)


@op()
def _gather_nd(m: Maker) -> None:
    x = m.pick("f4 i8", range(2, 5))
    depth = m.draw.randint(1, x.ndim)
    places = np.stack([m.rng.integers(-n, n, 3) for n in x.shape[:depth]], axis=-1)
    m.add("GatherND", f"{x.name} {m.const(places)}")


@op(2)
def _scatter(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    how = m.draw.choice(["none"] + (["add", "mul"] if m.opset >= 16 else []))
    how = m.draw.choice([how, "max", "min"]) if m.opset >= 18 else how
    more: dict[str, Any] = {"reduction": how} if m.opset >= 16 else {}
    if m.draw.random() < 0.5:
        axis = m.draw.randrange(x.ndim)
        shape = [m.draw.randint(1, n) for n in x.shape]
        places = m.rng.permuted(np.moveaxis(np.indices(x.shape)[axis], axis, -1), axis=-1)
        places = np.moveaxis(places, -1, axis)[tuple(map(slice, shape))]
        type, more = "ScatterElements", more | {"axis": axis}
    else:
        places = m.rng.permutation(x.shape[0])[:2].reshape(-1, 1)
        shape = [len(places), *x.shape[1:]]
        type = "ScatterND"
    updates = m.array(tuple(shape), "f4", True)
    m.add(type, f"{x.name} {m.ints(places)} {m.const(updates)}", **more)


@op(2)
def _largest(m: Maker) -> None:
    x = m.pick("f4 i8", range(1, 5), exact=True)
    axis = m.draw.randrange(x.ndim)
    name = m.draw.choice(["ArgMax", "ArgMin", "TopK"])
    if name == "TopK":
        k = m.draw.randint(1, x.shape[axis])
        m.add(name, f"{x.name} {m.ints([k])}", 2, axis=axis, largest=m.draw.randrange(2))
        return
    flags = {"keepdims": m.draw.randrange(2), "select_last_index": m.draw.randrange(2)}
    m.add(name, x.name, axis=axis, **flags)


@op()
def _one_hot(m: Maker) -> None:
    x = m.pick("i8", range(1, 3))
    inputs = f"{x.name} {m.ints([5])} {m.const(np.asarray([-1, 2], np.float32))}"
    m.add("OneHot", inputs, axis=m.draw.randint(-x.ndim - 1, x.ndim))


@op()
def _along(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    at = m.const(np.asarray(_axis(m, x), np.int64))
    flags = {"exclusive": m.draw.randrange(2), "reverse": m.draw.randrange(2)}
    m.add("CumSum", f"{x.name} {at}", **flags)


@op()
def _of_shape(m: Maker) -> None:
    x = m.pick(_ANY, range(1, 5))
    starts = m.draw.random() < 0.5 and m.opset >= 15
    m.add("Shape", x.name, **({"start": m.draw.randrange(x.ndim)} if starts else {}))


# --- reductions ---------------------------------------------------------------------------


@op(4)
def _reduce(m: Maker) -> None:
    name = m.draw.choice(
        ["Sum", "Mean", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp", "Prod"]
    )
    x = m.pick("f4 i8 i4" if name in ("Sum", "Mean", "Max", "Min") else "f4", range(1, 5))
    axes = sorted(m.draw.sample(range(x.ndim), m.draw.randint(1, x.ndim)))
    numbers = [i - m.draw.choice([0, x.ndim]) for i in axes]
    since = 13 if name == "Sum" else 18
    more, attributes = m.axes(numbers, since, keepdims=m.draw.randrange(2))
    m.add(f"Reduce{name}", x.name + more, **attributes)


@op(2)
def _softmax(m: Maker) -> None:
    x = m.pick("f4", range(1, 5))
    m.add(m.draw.choice(["Softmax", "LogSoftmax"]), x.name, axis=_axis(m, x))


@op(2)
def _normal(m: Maker) -> None:
    x = m.pick("f4", range(3, 5))
    c = x.shape[1]
    rows = [m.floats(c) for _ in range(3)]
    name = m.draw.choice(["Batch", "Instance", "Layer", "LRN"])
    if name == "Batch":
        spread = m.const(np.abs(m.array((c,), "f4", False)) + np.float32(0.5))
        m.add("BatchNormalization", " ".join([x.name, *rows, spread]), epsilon=0.01)
    elif name == "Instance":
        inputs = " ".join([m.clipped(x, 8).name, *rows[:2]])
        m.add("InstanceNormalization", inputs, epsilon=0.1)
    elif name == "Layer" and m.opset >= 17:
        axis = m.draw.randrange(1, x.ndim)
        rows = [m.floats(*x.shape[axis:]) for _ in range(m.draw.randint(1, 2))]
        m.add("LayerNormalization", " ".join([x.name, *rows]), axis=axis, epsilon=0.1)
    elif name == "LRN" and x.ndim == 4:
        m.add("LRN", x.name, size=3, alpha=0.1)


# --- products -----------------------------------------------------------------------------


@op(2)
def _matmul(m: Maker) -> None:
    x = m.pick("f4", range(2, 5))
    if m.draw.random() < 0.6:
        m.add("MatMul", f"{x.name} {m.floats(x.shape[-1], m.draw.randint(1, 4))}")
        return
    y = m.pick("f4", x.ndim, fits=lambda y: y.shape[:-1] == (*x.shape[:-2], x.shape[-1]))
    m.add("MatMul", f"{x.name} {y.name}")


@op(2)
def _gemm(m: Maker) -> None:
    x = m.pick("f4", 2)
    turned, other = m.draw.randrange(2), m.draw.randrange(2)
    rows, inner = x.shape[::-1] if turned else x.shape
    k = m.draw.randint(1, 4)
    w = m.floats(*((k, inner) if other else (inner, k)))
    bias = m.floats(*m.draw.choice([(k,), (1,), (), (rows, 1)]))
    flags: dict[str, Any] = {"transA": turned, "transB": other, "alpha": 0.5, "beta": 2.0}
    m.add("Gemm", f"{x.name} {w} {bias}", **flags)


def _window(m: Maker, x: Value) -> tuple[list[int], list[int], list[int], list[int]]:
    """Window, strides, dilations and pads, by which there is a place for a window."""
    axes = x.ndim - 2
    window = [m.draw.randint(1, 3) for _ in range(axes)]
    strides = [m.draw.randint(1, 2) for _ in range(axes)]
    rates = [m.draw.choice([1, 1, 2]) for _ in range(axes)]
    pads = [m.draw.randint(0, window[i % axes] // 2) for i in range(2 * axes)]
    for i, n in enumerate(x.shape[2:]):
        if n + pads[i] + pads[i + axes] <= (window[i] - 1) * rates[i]:
            raise Unfit
    return window, strides, rates, pads


@op(3)
def _conv(m: Maker) -> None:
    x = m.pick("f4", range(3, 6))
    c = x.shape[1]
    window, strides, rates, pads = _window(m, x)
    groups = m.draw.choice([k for k in (1, c) if c % k == 0])
    out = groups * m.draw.randint(1, 2)
    flags: dict[str, Any] = {"strides": strides, "dilations": rates, "group": groups, "pads": pads}
    if m.draw.random() < 0.3 and x.ndim < 5:
        for i, n in enumerate(x.shape[2:]):
            whole = (n - 1) * strides[i] + (window[i] - 1) * rates[i]
            if whole < pads[i] + pads[i + len(window)]:
                raise Unfit
        w = m.floats(c, out // groups, *window)
        m.add("ConvTranspose", f"{x.name} {w}", **flags)
        return
    inputs = f"{x.name} {m.floats(out, c // groups, *window)}"
    if m.draw.random() < 0.5:
        inputs += " " + m.floats(out)
    m.add("Conv", inputs, **flags)


@op(3)
def _pool(m: Maker) -> None:
    x = m.pick("f4", range(3, 6))
    name = m.draw.choice(["MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"])
    if name.startswith("Global"):
        m.add(name, x.name)
        return
    window, strides, rates, pads = _window(m, x)
    flags: dict[str, Any] = {"kernel_shape": window, "strides": strides, "pads": pads}
    padded = name == "MaxPool" and any(pads)  # windows of padding alone differ by runtime
    if (name == "MaxPool" and not padded) or (name == "AveragePool" and m.opset >= 19):
        flags["dilations"] = rates
    if name == "AveragePool":
        flags["count_include_pad"] = m.draw.randrange(2)
    if name == "LpPool":
        flags["p"] = m.draw.choice([1, 2])
    places = name == "MaxPool" and x.is_exact and m.draw.random() < 0.3
    m.add(name, x.name, 1 + places, **flags)


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
    sizes = m.draw.choice([m.const(single), f"- {m.ints(counts)}"])
    m.add("Resize", f"{x.name} - {sizes}", **flags)


@op()
def _grid(m: Maker) -> None:
    m.since(16)
    x = m.pick("f4", 4)
    grid = m.rng.uniform(-1.2, 1.2, (x.shape[0], 2, 3, 2)).astype(np.float32)
    flags: dict[str, Any] = {
        "mode": "bilinear" if m.opset < 20 else "linear",
        "padding_mode": m.draw.choice(["zeros", "border", "reflection"]),
        "align_corners": m.draw.randrange(2),
    }
    m.add("GridSample", f"{x.name} {m.const(grid)}", **flags)


@op()
def _quantized(m: Maker) -> None:
    x = m.pick("f4", range(1, 5), exact=True)
    scale, zero = m.single(0.25), m.const(np.asarray(3, np.uint8))
    q = m.add("QuantizeLinear", f"{x.name} {scale} {zero}")
    m.add("DequantizeLinear", f"{q.name} {scale} {zero}")


@op()
def _integer_product(m: Maker) -> None:
    x = m.pick("f4", range(2, 4), exact=True)
    q = m.add("DynamicQuantizeLinear", x.name, 3)
    w = m.const(m.rng.integers(-127, 128, (x.shape[-1], m.draw.randint(1, 4))).astype(np.int8))
    zeros = f"{m.values[-1].name} {m.const(np.asarray(3, np.int8))}"
    m.add("MatMulInteger", f"{q.name} {w} {zeros}")


@op()
def _recurrent(m: Maker) -> None:
    x = m.pick("f4", 3)
    name, gates = m.draw.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    direction, count = m.draw.choice([("forward", 1), ("reverse", 1), ("bidirectional", 2)])
    hidden, width = 2, x.shape[-1]
    w = m.floats(count, gates * hidden, width)
    r = m.floats(count, gates * hidden, hidden)
    b = m.floats(count, 2 * gates * hidden)
    flags: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if name == "GRU":
        flags["linear_before_reset"] = m.draw.randrange(2)
    m.add(name, f"{x.name} {w} {r} {b}", 2, **flags)


@op(2)
def _seldom(m: Maker) -> None:
    x = m.pick("f4", range(1, 5), exact=True)
    n = x.shape[0]
    match m.draw.randrange(8):
        case 0:
            m.add("Hardmax", x.name, axis=_axis(m, x))
        case 1:
            m.add("Shrink", x.name, lambd=0.5, bias=0.25)
        case 2:
            m.add("Size", x.name)
        case 3 if x.ndim > 1:
            lengths = m.ints(m.rng.integers(1, n + 1, x.shape[1]))
            m.add("ReverseSequence", f"{x.name} {lengths}", time_axis=0, batch_axis=1)
        case 4 if x.ndim == 2:
            m.add("EyeLike", x.name, k=m.draw.randint(-1, 1))
        case 5:
            mask = m.rng.integers(0, 2, n).astype(bool)
            mask[0] = True
            m.add("Compress", f"{x.name} {m.const(mask)}", axis=0)
        case 6:
            fill = constant("", np.asarray([1.5], np.float32))
            m.add("ConstantOfShape", m.ints(x.shape), value=fill)
        case 7:
            bounds = [m.const(np.asarray(k)) for k in (m.draw.randint(-3, 3), 7, 2)]
            m.add("Range", " ".join(bounds))


@op()
def _einsum(m: Maker) -> None:
    x = m.pick("f4", 3)
    equation = m.draw.choice(["abc,cd->dab", "abc,cd->ad"])
    m.add("Einsum", f"{x.name} {m.floats(x.shape[-1], 2)}", equation=equation)


@op()
def _branch(m: Maker) -> None:
    x = m.pick("f4", range(4))
    flag = m.add("ReduceMax", m.pick("i8", range(1, 5)).name, keepdims=0)
    yes = m.add("Greater", f"{flag.name} {m.const(np.asarray(1))}")
    at = len(m.values)
    first = graph([node("Tanh", x.name, f"t{at}")], [], f"t{at}")
    other = graph([node("Mul", f"{x.name} {x.name}", f"e{at}")], [], f"e{at}")
    m.add("If", yes.name, then_branch=first, else_branch=other)


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
    m.add("Loop", f"{m.const(np.asarray(turns, np.int64))} - {x.name}", 2, body=body)


# --- tried --------------------------------------------------------------------------------


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


def fuzz(
    programs: int, seed: int, first: int = 0, nodes: int = NODES
) -> tuple[Outcomes, str | None]:
    """Try a number of graphs; what came out, and those that differ."""

    def attempt(number: int) -> str:
        maker = Maker(seed << 32 | number, nodes)
        try:
            message = difference(maker.graph())
        except Exception as error:
            if type(error).__module__.startswith("onnxruntime"):
                return "refused by ONNX Runtime"
            raise
        if message is not None:
            raise Wrong(f"seed {seed}, opset {maker.opset}: {message}\n{_first_node(maker)}")
        return "the same"

    return outcomes_of(range(first, first + programs), attempt)


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
            names = {*each.input, *each.output}
            types = [(x.name, x.dtype, x.shape) for x in values if x.name in names]
            attributes = {a.name: a.ints or a.i or a.f or bytes(a.s) for a in each.attribute}
            constants = {c.name: (c.dims, bytes(c.raw_data)[:64]) for c in maker.constants
                     if c.name in each.input}  # fmt: skip
            call = f"{each.op_type}({each.input}) -> {each.output}, {attributes}"
            return f"{call}: {message}\n{types}\n{constants}"
    return "alone no node differs"
