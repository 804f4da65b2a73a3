"""Random steps as data flow, what numpy makes of them, and a VM to run their plans on."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from mlvm.core.errors import OpError
from mlvm.core.machine.frame import Frame
from mlvm.core.op import OPS
from mlvm.core.types import Array, TensorType, f32
from mlvm.core.vm import VM
from mlvm.step.compile import Planned
from mlvm.step.flow import Call, Flow, Home, Role, Unit, Use, Value

OPERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("add", {}), ("multiply", {}), ("subtract", {}), ("maximum", {}), ("multiply_add", {}),
    ("tanh", {}), ("negative", {}), ("abs", {}), ("copy", {}), ("relu", {}), ("relu", {}),
    ("less", {}), ("where", {}), ("astype", {"dtype": "f32"}), ("logical_not", {}),
    ("gelu", {"approximate": True}), ("gelu_slope", {"approximate": True}),
    ("sum", {"axis": 0, "keepdims": True}), ("sum", {"axis": None}), ("max", {"axis": -1}),
    ("mean", {"axis": 1, "keepdims": True}), ("softmax", {"axis": -1}),
    ("permute_dims", {"axes": (1, 0)}), ("matmul", {}),
    ("slice_add", {"start": (0, 0), "step": (1, 1)}),
    ("slice_add", {"start": (23,), "step": (-1,)}),
    ("broadcast_to", {"shape": (4, 6)}), ("broadcast_to", {"shape": (24,)}),
]  # fmt: skip
SHAPES = [(4, 6), (6, 4), (24,), (1, 6), (6,), (4, 1), (6, 1), (1, 4), (1,), ()]


@dataclass(eq=False)
class Cell:
    """A tensor of the step, as a recorder sees it: the value it holds now, and its numbers."""

    type: TensorType
    value: Value
    array: Array
    home: Home | None = None


Operand: TypeAlias = tuple[Cell, TensorType]


@dataclass
class Step:
    """A flow, the arrays it starts from, and those it has to leave."""

    calls: list[Call] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    inputs: list[Array] = field(default_factory=list)
    states: list[Array] = field(default_factory=list)
    results: list[Cell] = field(default_factory=list)

    @property
    def flow(self) -> Flow:
        return Flow(self.calls, [cell.value for cell in self.results])

    def cell(self, role: Role, array: Array) -> Cell:
        before = self.inputs if role == "input" else self.states
        type = TensorType.of(array)
        home = Home(role, len(before), type)
        before.append(array.copy())
        self.cells.append(Cell(type, Value(type.nbytes, home), array.copy(), home))
        return self.cells[-1]

    def expected(self, role: Role) -> list[Array]:
        """Return the arrays of the tensors of that role at the end."""
        homes = {
            cell.home.index: cell for cell in self.cells if cell.home and cell.home.role == role
        }
        return [homes[index].array for index in sorted(homes)]

    # --- what a function does -----------------------------------------------------

    def call(
        self, name: str, attrs: dict[str, Any], operands: list[Operand], into: Cell | None = None
    ) -> Cell | None:
        """The result of an op on cells seen as types, in a new cell or, if it fits, written over
        another; None if the op refuses them."""
        op = OPS[name]
        try:
            attributes = op.bind(attrs)
            type = op.infer([view for _, view in operands], attributes)
        except OpError:
            return None
        assert type is not None  # there is no dynamic op among them
        if into is not None and (
            type is not into.type or any(cell is into for cell, _ in operands[op.in_place :])
        ):
            return None
        output = np.empty(type.shape, type.dtype.numpy)
        with np.errstate(all="ignore"):
            arrays = [cell.array.reshape(view.shape) for cell, view in operands]
            op.kernel(output, *arrays, **attributes)
        ins = [Use(cell.value, view) for cell, view in operands]
        home = None if into is None else into.home
        value = Value(type.nbytes, home)
        self.calls.append(
            Call(f"{name}.out", op, attributes, [Use(value, type)], ins, self._line())
        )
        if into is None:
            self.cells.append(Cell(type, value, output))
            return self.cells[-1]
        into.value = value
        into.array[...] = output
        return into

    def apply(self, name: str, *cells: Cell, into: Cell | None = None, **attributes: Any) -> Cell:
        """The result of `call` on cells as their own types, which the op takes."""
        result = self.call(name, attributes, [(cell, cell.type) for cell in cells], into)
        assert result is not None
        return result

    def double(self, cells: list[Cell]) -> None:
        """A host function that changes all its operands in place."""
        for cell in cells:
            if cell.home is None:
                cell.home = cell.value.home = Home("scratch", len(self.calls), cell.type)
        ins = [Use(cell.value, cell.type) for cell in cells]
        for cell in cells:
            cell.value = Value(cell.type.nbytes, cell.home)
            cell.array *= 2
        outs = [Use(cell.value, cell.type) for cell in cells]
        self.calls.append(Call("double", None, {}, outs, ins, self._line()))

    def result(self, cell: Cell) -> None:
        if cell.home is None:
            cell.home = cell.value.home = Home("scratch", 0, cell.type)
        if cell.home.role == "scratch":
            cell.home.role, cell.home.index = "output", len(self.expected("output"))
        self.results.append(cell)

    def _line(self) -> str:
        return f"line {len(self.calls)}"


def floats(*shape: int, seed: int = 0) -> Array:
    """A few different numbers, exact in f32."""
    return (np.random.default_rng(seed).integers(-8, 9, shape) / 4).astype(np.float32)


def mlp(layers: int) -> Step:
    """A step as of an MLP: activations on the way, gradients back, and the weights updated."""
    step = Step()
    x = step.cell("input", floats(64, 16))
    weights = [step.cell("state", floats(16, 16, seed=i) / 8) for i in range(layers)]
    call, saved = step.apply, []
    for weight in weights:
        before = call("matmul", x, weight)
        saved.append((x, before))
        x = call("gelu", before)
    g = call("negative", x)
    for weight, (entry, before) in zip(reversed(weights), reversed(saved), strict=True):
        g = call("multiply", g, before)
        slope = call("matmul", entry, g, transpose_x=True)
        g = call("matmul", g, weight, transpose_y=True)
        call("add", weight, slope, into=weight)
    step.result(call("sum", x))
    return step


# --- single calls --------------------------------------------------------------------

TYPE = TensorType(f32, (4,))


def value(home: Home | None = None) -> Value:
    return Value(TYPE.nbytes, home)


def call(name: str, out: Value, *operands: Value) -> Call:
    op = OPS[name]
    return Call(
        f"{name}.out", op, op.bind({}), [Use(out, TYPE)], [Use(each, TYPE) for each in operands]
    )


def in_turn(calls: list[Call]) -> list[Unit]:
    return [Unit([each]) for each in calls]


def assert_runs(units: list[Unit], calls: list[Call]) -> None:
    """Check that the units have every call once, in an order that they can run in."""
    order = [each for unit in units for each in unit.calls]
    assert sorted(map(id, order)) == sorted(map(id, calls))
    place = {id(each): i for i, each in enumerate(order)}
    for earlier, later in combinations(calls, 2):
        if Unit([earlier]).must_precede(Unit([later])):
            assert place[id(earlier)] < place[id(later)]


# --- random steps --------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn, *, most: int = 25) -> Step:
    """A step of a few inputs and states, and what a hostile function may do with them."""
    step = Step()
    roles: tuple[Role, ...] = ("input", "input", "state", "state")
    for role in roles:
        shape = draw(st.sampled_from(SHAPES[:5]))
        step.cell(role, floats(*shape, seed=draw(st.integers(0, 99))))

    def pick() -> Operand:
        """One of the last cells, mostly, as its own type or another."""
        cell = step.cells[-1 - draw(st.integers(0, min(9, len(step.cells) - 1)))]
        types = [cell.type]
        if draw(st.integers(0, 3)) == 0:
            types += [
                cell.type.with_shape(shape)
                for shape in SHAPES
                if cell.type.with_shape(shape).nbytes == cell.type.nbytes
            ]
        return cell, draw(st.sampled_from(types))

    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.integers(0, 19))
        if kind == 0:
            cells = {id(cell): cell for cell, _ in (pick(), pick()) if cell.type.dtype is f32}
            step.double(list(cells.values()))
            continue
        name, attributes = draw(st.sampled_from(OPERATIONS))
        operands = [pick() for _ in OPS[name].inputs]
        if kind < 6:
            step.call(name, attributes, operands, into=operands[0][0])
        else:
            step.call(name, attributes, operands)
    for _ in range(draw(st.integers(0, 3))):
        step.result(pick()[0])
    return step


# --- running -------------------------------------------------------------------------


def double(frame: Frame) -> None:
    for i in range(frame.nparams):
        array = frame.param(i)
        assert isinstance(array, np.ndarray)
        array *= 2


def run(
    planned: Planned, inputs: list[Array], states: list[Array], outputs: list[TensorType]
) -> tuple[list[Array], list[Array], list[Array]]:
    """Run the plan, on memory full of other numbers; return its inputs, states and outputs."""
    vm = VM()
    vm.register("double", double)
    memory: dict[tuple[str, int], tuple[int, TensorType]] = {}
    for role, arrays in (("input", inputs), ("state", states)):
        for i, array in enumerate(arrays):
            memory[role, i] = _tensor(vm, TensorType.of(array), array)
    for i, type in enumerate(outputs):
        memory["output", i] = _tensor(vm, type, None)
    scratch, _ = _tensor(vm, TensorType("u8", (planned.plan.nbytes,)), None)
    handles = []
    for role, place, type in planned.arguments:
        storage = scratch if role == "scratch" else memory[role, place][0]
        offset = place if role == "scratch" else 0
        handles.append(vm.tensor_from_storage(storage, type, offset))
    assert vm.launch(planned.program, handles) == []

    def read(role: str, count: int) -> list[Array]:
        places = [memory[role, i] for i in range(count)]
        return [vm.read(vm.tensor_from_storage(storage, type, 0)) for storage, type in places]

    return read("input", len(inputs)), read("state", len(states)), read("output", len(outputs))


def _tensor(vm: VM, type: TensorType, array: Array | None) -> tuple[int, TensorType]:
    storage = vm.alloc_storage(type.nbytes)
    handle = vm.tensor_from_storage(storage, type, 0)
    if array is None:
        garbage = np.full(type.nbytes, 0xA5, np.uint8)
        vm.write(vm.tensor_from_storage(storage, TensorType.of(garbage), 0), garbage)
    else:
        vm.write(handle, array)
    return storage, type


def assert_same_bits(actual: list[Array], expected: list[Array]) -> None:
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in expected]
    assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected]
