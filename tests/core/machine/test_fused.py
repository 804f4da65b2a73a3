"""`fused`: a chain gives the bits that its ops give one by one, wherever its blocks end.

Blocks are those of the reference kernel; `tests/machines/native/test_chain.py` is about the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core import errors
from mlvm.core.machine import fused
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.fused import Chain, Link
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Op
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, DType, Shape, TensorType
from mlvm.machines.dry import DryVM
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses
from tests.core.programs import f32s, put

ELEMENTWISE = [op for op in OPS.values() if op.elementwise]
REDUCTIONS = [op for op in OPS.values() if op.reduces]
DTYPES = ["bool", "u8", "i32", "i64", "f32", "f64"]


class Example(NamedTuple):
    """A chain, arrays for its parameters from the first operand on, and what its outputs get."""

    chain: Chain
    operands: list[Array]
    expected: list[Array]

    @property
    def program(self) -> Program:
        nparams = len(self.expected) + len(self.operands)
        return Program.of_op("fused", nparams, self.chain.attributes(), 0)


@contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Blocks of few elements, so that small tensors have many."""
    with mock.patch.object(fused, "BLOCK_SIZE", size):
        yield


def alone(op: Op, attributes: Attributes, *operands: Array) -> Array | None:
    """Return the op's result by itself, None if it refuses the operands."""
    try:
        type = op.infer([TensorType.of(x) for x in operands], attributes)
        assert type is not None
        out = np.empty(type.shape, type.dtype.numpy)
        with np.errstate(all="ignore"):
            op.kernel(out, *operands, **attributes)
    except errors.OpError:
        return None
    return out


# --- random chains -------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    lengths = st.one_of(st.integers(1, 6), st.sampled_from([0, 1, 9, 17]))
    return tuple(draw(st.lists(lengths, max_size=4)))


def draw_array(draw: st.DrawFn, shape: Shape, *, broadcast: bool) -> Array:
    """An array of that shape, or one that broadcasts to it."""
    if broadcast:
        shape = tuple([1 if draw(st.booleans()) else n for n in shape])
        shape = shape[draw(st.integers(0, len(shape))) :]
    dtype = DType.named(draw(st.sampled_from(DTYPES))).numpy
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0 if dtype.kind == "u" else -4, 5, shape) / 2).astype(dtype)


def draw_attributes(draw: st.DrawFn, op: Op, shape: Shape) -> Attributes:
    arguments: dict[str, Any] = {}
    if op.name == "astype":
        arguments["dtype"] = draw(st.sampled_from(DTYPES))
    if op.name == "broadcast_to":
        arguments["shape"] = shape
    if op.name == "betainc_slope":
        arguments["by"] = draw(st.sampled_from(["a", "b"]))
    return op.bind(arguments)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """A chain of ops of every kind on operands of every kind, with some of its values written."""
    shape = draw(shapes())
    values = [draw_array(draw, shape, broadcast=i > 0) for i in range(draw(st.integers(1, 3)))]
    noperands = len(values)
    calls: list[tuple[Op, Attributes, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from(ELEMENTWISE))
        last = len(values) - 1
        sources = [draw(st.integers(0, last)) for _ in op.inputs]
        sources[draw(st.integers(0, len(sources) - 1))] = last
        attributes = draw_attributes(draw, op, shape)
        out = alone(op, attributes, *[values[i] for i in sources])
        if out is not None and out.shape == shape:
            calls.append((op, attributes, tuple(sources)))
            values.append(out)
    if not calls:
        calls.append((OPS["copy"], NO_ATTRIBUTES, (0,)))
        values.append(values[0].copy())
    written = draw(st.sets(st.integers(noperands, len(values) - 1))) | {len(values) - 1}
    for _ in range(draw(st.integers(0, 2))):
        op = draw(st.sampled_from(REDUCTIONS))
        axis = draw(st.sampled_from([None, *range(-len(shape), len(shape))]))
        arguments = {"axis": axis, "keepdims": draw(st.booleans())}
        attributes = op.bind({k: v for k, v in arguments.items() if k in op.attributes})
        source = draw(st.integers(noperands, noperands + len(calls) - 1))
        if values[source].shape == shape:
            out = alone(op, attributes, values[source])
            if out is not None:
                calls.append((op, attributes, (source,)))
                written.add(len(values))
                values.append(out)
    results = sorted(written)
    chain = number(calls, noperands, results, values)
    return Example(chain, values[:noperands], [values[i] for i in results])


def number(
    calls: list[tuple[Op, Attributes, tuple[int, ...]]],
    noperands: int,
    written: list[int],
    values: list[Array],
) -> Chain:
    """The chain of these calls, with scratch used again as soon as it may be."""
    numbers = {value: len(written) + value for value in range(noperands)}
    numbers.update({value: out for out, value in enumerate(written)})
    last_read = {source: i for i, (_, _, sources) in enumerate(calls) for source in sources}
    free: dict[Any, list[int]] = {}
    scratch_count = 0
    links = []
    for i, (op, attributes, sources) in enumerate(calls):
        value = noperands + i
        operands = tuple([numbers[source] for source in sources])
        ended = {s for s in sources if last_read[s] == i and numbers[s] < 0}
        if op.in_place:
            for s in ended:
                free.setdefault(values[s].dtype, []).append(numbers[s])
        if value not in numbers:
            stock = free.setdefault(values[value].dtype, [])
            scratch_count += not stock
            numbers[value] = stock.pop() if stock else -scratch_count
        if not op.in_place:
            for s in ended:
                free.setdefault(values[s].dtype, []).append(numbers[s])
        links.append(Link(op, numbers[value], operands, attributes))
    return Chain(links, len(written))


def launch(vm: VMProtocol, example: Example) -> list[Array]:
    outs = [vm.alloc_tensor(TensorType.of(x)) for x in example.expected]
    operands = [put(vm, x) for x in example.operands]
    assert vm.launch(example.program, [*outs, *operands]) == []
    return [vm.read(handle) for handle in outs]


def assert_same_bits(actual: Sequence[Array], expected: Sequence[Array]) -> None:
    assert [(x.dtype, x.shape) for x in actual] == [(x.dtype, x.shape) for x in expected]
    assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected]


@given(examples(), st.integers(1, 40))
def test_a_chain_has_the_bits_of_its_ops_one_by_one(example: Example, block: int) -> None:
    with small_blocks(block):
        assert_same_bits(launch(VM(native=False), example), example.expected)


@given(examples(), st.integers(1, 40))
def test_so_has_one_that_is_not_bound_to_its_blocks(example: Example, block: int) -> None:
    outs = [np.empty_like(x) for x in example.expected]
    with small_blocks(block), np.errstate(all="ignore"):
        fused.run(*outs, *example.operands, chain=example.chain)
    assert_same_bits(outs, example.expected)


def test_a_chain_runs_behind_the_wire_and_on_workers() -> None:
    x = np.linspace(-2, 2, 3 * 70_000, dtype=np.float32).reshape(3, -1)
    halved = x * np.float32(0.5)
    example = Example(
        Chain(
            [
                Link(OPS["multiply"], -1, (2, 3)),
                Link(OPS["square"], 0, (-1,)),
                Link(OPS["max"], 1, (-1,), OPS["max"].bind({"axis": 1})),
            ],
            2,
        ),
        [x, f32s(0.5)],
        [np.square(halved), halved.max(1)],
    )
    for vm in (VM(), WireVM(VM()), VM(workers=2), VM(checked=False)):
        assert_same_bits(launch(vm, example), example.expected)
        assert_same_bits(launch(vm, example), example.expected)


@cases("keepdims", False, True)
@cases("axis", None, 0, 1, 2, -1, (0, 2))
def test_a_reduction_ends_in_a_parameter_whatever_its_axis(axis: Any, keepdims: bool) -> None:
    x = np.arange(5 * 5 * 5, dtype=np.float64).reshape(5, 5, 5)
    expected = [np.negative(x), np.negative(x).sum(axis, keepdims=keepdims)]
    attributes = OPS["sum"].bind({"axis": axis, "keepdims": keepdims})
    chain = Chain([Link(OPS["negative"], 0, (2,)), Link(OPS["sum"], 1, (0,), attributes)], 2)
    with small_blocks(10):
        assert_same_bits(launch(VM(native=False), Example(chain, [x], expected)), expected)


# --- writing over operands -----------------------------------------------------------

READ_AFTER = {"chain": [["add", 0, 2, 3], ["add", 1, 2, 3]], "outputs": 2}


def test_a_result_over_an_operand_still_read_is_refused() -> None:
    vm = VM()
    x, y, z = (put(vm, f32s(1, 2)) for _ in range(3))
    with pytest.raises(
        errors.MachineError, match="fused: parameter 0, a result, overlaps parameter 2"
    ):
        vm.launch(Program.of_op("fused", 4, READ_AFTER, 0), [x, y, x, z])
    with pytest.raises(
        errors.MachineError, match="fused: parameter 0, a result, overlaps parameter 1"
    ):
        vm.launch(Program.of_op("fused", 4, READ_AFTER, 0), [x, x, y, z])
    assert [vm.read(h).tolist() for h in (x, y, z)] == [[1, 2]] * 3


@given(examples(), st.integers(1, 40), st.data())
def test_whatever_may_lie_over_an_operand_gives_the_same_bits(
    example: Example, block: int, data: st.DataObject
) -> None:
    vm = VM(native=False)
    noutputs = len(example.expected)
    operands = [put(vm, x) for x in example.operands]
    free = list(range(len(operands)))
    outs = []
    for i, x in enumerate(example.expected):
        fits = [
            j
            for j in free
            if TensorType.of(example.operands[j]) is TensorType.of(x)
            and example.chain.may_replace(i, noutputs + j)
        ]
        over: bool = data.draw(st.booleans())
        if fits and over:
            free.remove(fits[0])
            outs.append(operands[fits[0]])
        else:
            outs.append(vm.alloc_tensor(TensorType.of(x)))
    with small_blocks(block):
        try:
            vm.launch(example.program, [*outs, *operands])
        except errors.MachineError:  # written where another output's link still reads
            return
    assert_same_bits([vm.read(h) for h in outs], example.expected)


def test_a_result_over_bytes_of_another_layout_is_refused() -> None:
    """A bool[8,4] over the f64[4] that it broadcasts: the first block would end its operand."""
    vm = VM()
    storage = vm.alloc_storage(64)
    out = vm.tensor_from_storage(storage, TensorType("bool", (8, 4)), 0)
    x = vm.tensor_from_storage(storage, TensorType("f64", (4,)), 0)
    y = put(vm, np.ones((8, 1)))
    with pytest.raises(
        errors.MachineError, match="fused: parameter 0, a result, overlaps parameter 1"
    ):
        vm.launch(Program.of_op("fused", 3, {"chain": [["less", 0, 1, 2]], "outputs": 1}, 0),
                  [out, x, y])  # fmt: skip
    with pytest.raises(errors.MachineError, match="overlaps an operand that is still read"):
        vm.launch(Program.of_op("less.out", 3, {}, 0), [out, x, y])


def test_a_result_may_lie_over_an_operand_with_leading_ones() -> None:
    vm = VM()
    storage = vm.alloc_storage(64)
    row = vm.tensor_from_storage(storage, TensorType("f32", (1, 4)), 0)
    flat = vm.tensor_from_storage(storage, TensorType("f32", (4,)), 0)
    vm.write(flat, f32s(1, 2, 3, 4))
    vm.launch(Program.of_op("add.out", 3, {}, 0), [row, row, flat])
    np.testing.assert_array_equal(vm.read(flat), [2, 4, 6, 8])


# --- chains that make no sense -------------------------------------------------------

F = TensorType("f32", (4, 4))
ROW = TensorType("f32", (1, 4))
B = TensorType("bool", (4, 4))

U64, I64 = TensorType("u64"), TensorType("i64")

_LINES = Path(__file__).with_name("refused_chains.txt").read_text("utf-8").splitlines()
BAD = [line for line in _LINES if " | " in line and line[0] != "#"]
NO_CHAINS = [line for line in _LINES if line.startswith("{")]


@pytest.mark.parametrize("text", BAD)
def test_a_chain_that_makes_no_sense_is_refused(text: str) -> None:
    parts = text.partition(": ")[2].split(" | ")
    chain, outputs, types = (eval(part, globals()) for part in parts[:3])
    error = getattr(errors, parts[3])
    vm = VM()
    program = Program.of_op("fused", len(types), {"chain": chain, "outputs": outputs}, 0)
    before = vm.consumed_size_in_mib()
    handles = [vm.alloc_tensor(type) for type in types]
    caught = refuses(error, "", vm.launch, program, handles)
    refuses(error, "", vm.estimate, program, types)
    text = " ".join([str(caught), *getattr(caught, "__notes__", ())])
    assert "fused" in text
    for handle in handles:
        vm.dealloc_tensor(handle)
    assert vm.consumed_size_in_mib() == before


@pytest.mark.parametrize("text", NO_CHAINS)
def test_attributes_that_are_no_chain_are_refused(text: str) -> None:
    attributes: dict[str, Any] = eval(text)
    vm = VM()
    x, y = put(vm, f32s(1)), put(vm, f32s(1))
    program = Program.of_op("fused", 2, attributes, 0)
    e = refuses(errors.ArgumentError, "", vm.launch, program, [x, y])
    assert "fused" in " ".join([str(e), *getattr(e, "__notes__", ())])


def test_equal_attributes_are_one_chain_and_those_that_are_only_equal_in_python_none() -> None:
    bind = FunctionTable().binding("fused").callee.bind

    def attributes(target: Any) -> dict[str, Any]:
        return {"chain": (("add", target, 1, 1),), "outputs": 1}

    chain = bind(attributes(0))["chain"]
    assert bind(attributes(0))["chain"] is chain
    refuses(errors.ArgumentError, "expected numbers of parameters", bind, attributes(False))


def test_a_call_with_too_few_tensors_to_write_or_with_values_is_refused() -> None:
    vm = VM()
    chain = {"chain": [["abs", 0, 2], ["sign", 1, 2]], "outputs": 2}
    refuses(
        errors.MlvmError, "", vm.launch, Program.of_op("fused", 1, chain, 0), [put(vm, f32s(1))]
    )
    text = '.func main 0 *\n push_int 1\n push_int 2\n push_str "fused"\n cfunc 2 0 {}\n halt'
    refuses((errors.ProgramError, errors.OpError), "", vm.launch, assemble(text))


def test_a_chain_on_a_constant_is_not_written_there() -> None:
    text = """
        .const c f32[2] 1 2
        .func main 0 *
        push_const c
        load_arg 0
        push_str "fused"
        cfunc 2 0 {"chain": [["abs", 0, 1]], "outputs": 1}
        halt
    """
    vm = VM()
    refuses(errors.ProgramError, "constant", vm.launch, assemble(text), [put(vm, f32s(1, 2))])


# --- costs ---------------------------------------------------------------------------


def test_the_cost_of_a_chain_is_that_of_its_ops_and_no_bytes() -> None:
    type = TensorType("f32", (100, 10))
    chain = {"chain": [["multiply", -1, 1, 1], ["tanh", 0, -1]], "outputs": 1}
    program = Program.of_op("fused", 2, chain, 0)
    for vm in (VM(), DryVM()):
        assert vm.estimate(program, [type, type]) == (0, 2000)
    dry = DryVM()
    out, x = dry.alloc_tensor(type), dry.alloc_tensor(type)
    assert dry.launch(program, [out, x]) == []
    refuses(errors.HandleError, "", dry.read, out)


def test_a_chain_on_nothing_writes_nothing() -> None:
    empty = np.zeros((0, 3), np.float32)
    chain = Chain(
        [Link(OPS["abs"], 0, (2,)), Link(OPS["sum"], 1, (0,), OPS["sum"].bind({"axis": 0}))], 2
    )
    expected = [empty, np.zeros(3, np.float32)]
    assert_same_bits(launch(VM(), Example(chain, [empty], expected)), expected)


@given(shapes(), st.integers(1, 50), st.integers(0, 4))
def test_blocks_cover_the_shape_once_in_order(shape: Shape, size: int, depth: int) -> None:
    with small_blocks(size):
        blocks = fused._blocks(shape, min(depth, len(shape)))
    marks = np.arange(math.prod(shape)).reshape(shape)
    covered = [marks[block].ravel() for block in blocks]
    assert np.concatenate(covered).tolist() == marks.ravel().tolist()
    if depth >= len(shape):
        assert len(blocks) == 1 or max(map(len, covered)) <= size


# --- workers and the command line ----------------------------------------------------


def test_what_a_chain_writes_anew_is_no_longer_bad() -> None:
    """On a VM with workers an error stays with the bytes it left unwritten, until they are."""
    vm = VM(workers=1)
    loss, logits = put(vm, f32s(0)), put(vm, np.zeros((1, 3), np.float32))
    labels = put(vm, np.array([7]))
    vm.launch(Program.of_op("softmax_cross_entropy.out", 3, {}, 0), [loss, logits, labels])
    vm.quiesce()
    chain = {"chain": [["negative", 0, 1]], "outputs": 1}
    vm.launch(Program.of_op("fused", 2, chain, 0), [loss, put(vm, f32s(3))])
    np.testing.assert_array_equal(vm.read(loss), [-3])
    vm.close()


# --- windows ------------------------------------------------------------------------------


def window(start: Shape, length: Shape, step: Shape = (1, 1)) -> Attributes:
    return {"start": start, "length": length, "step": step}


def mean_of_neighbours() -> Chain:
    """The sum of two windows of parameter 1, written into the middle of parameter 0."""
    return Chain(
        [
            Link(OPS["slice"], -1, (1,), window((0, 1), (3, 4))),
            Link(OPS["slice"], -2, (1,), window((4, 5), (3, 4), (-1, -1))),
            Link(OPS["add"], -3, (-1, -2)),
            Link(OPS["slice_set"], 0, (2, -3), window((1, 1), (3, 4))),
        ],
        1,
    )


@cases("block", 2, 8, 1000)
def test_windows_are_read_and_written_where_they_are(block: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((5, 6)), rng.random((5, 6))
    expected = y.copy()
    expected[1:4, 1:5] = x[0:3, 1:5] + x[4:1:-1, 5:1:-1]
    chain = mean_of_neighbours()
    with small_blocks(block):
        for out in (np.empty_like(y), y.copy()):
            fused.run(out, x, out if out[0, 0] == y[0, 0] else y, chain=chain)
            np.testing.assert_array_equal(out, expected)
            bound = fused.bound(chain, [out, x, y], fused.Workspace())
            fused.run(out, x, y, chain=bound)
            np.testing.assert_array_equal(out, expected)


def test_a_window_is_written_over_its_tensor_and_no_other_that_is_read() -> None:
    chain = mean_of_neighbours()
    assert chain.may_replace(0, 2)
    assert not chain.may_replace(0, 1)


@pytest.mark.parametrize(
    ("start", "free"), [((1, 1), True), ((0, 1), False), ((2, 1), False), ((1, 3), True)]
)
def test_windows_of_the_tensor_that_is_written_are_the_same_or_apart(
    start: Shape, free: bool
) -> None:
    links = [
        Link(OPS["slice"], -1, (1,), window(start, (2, 2))),
        Link(OPS["negative"], -2, (-1,)),
        Link(OPS["slice_set"], 0, (1, -2), window((1, 1), (2, 2))),
    ]
    assert Chain(links, 1).may_replace(0, 1) is free
    links[1:1] = [Link(OPS["square"], 1, (-1,))]
    renumbered = [link.renumbered({0: 0, 1: 2, -1: -1, -2: -2}) for link in (links[0], links[-1])]
    late = [renumbered[0], Link(OPS["negative"], -2, (-1,)), renumbered[1]]
    late.append(Link(OPS["square"], 1, (-1,)))
    assert Chain(late, 2).may_replace(0, 2) is (free and start != (1, 1))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([("slice", 0, 1)], "expected a window of an operand"),
        ([("slice", -1, 0)], "reads value 0 before the first write"),
        ([("negative", -1, 1), ("slice", -2, -1)], "expected a window of an operand"),
        (
            [("slice", -1, 1), ("negative", -1, 1)],
            "value -1 is a window, which cannot be overwritten",
        ),
        ([("slice", -2, 1), ("slice_set", -1, 1, -2)], "expected a window of an operand"),
        ([("slice_set", 0, 1, 2)], "expects values of the window's type"),
    ],
)
def test_windows_that_make_no_sense_are_refused(links: Any, message: str) -> None:
    part = window((0, 0), (2, 2))
    made = [
        Link(OPS[name], target, tuple(sources), part if "slice" in name else NO_ATTRIBUTES)
        for name, target, *sources in links
    ]
    with pytest.raises(errors.OpError, match=message):
        Chain(made, 1).infer([TensorType("f64", shape) for shape in ((3, 3), (3, 3), (1, 2))])
