"""Batches of recursions: each result has the bits of its input alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.dynamic_sizes import random_tree
from mlvm.core.errors import (
    CheckError,
    DTypeError,
    EncodingError,
    HostFunctionError,
    LimitExceededError,
    MachineError,
    OperandValueError,
    OutOfMemoryError,
    ProgramError,
    ShapeError,
)
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Instruction, Opcode, Program
from mlvm.eager import nn
from mlvm.eager.tensor.context import current_arena
from mlvm.machines import lane_link, lane_runs
from mlvm.machines.native.extension import EXTENSION
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.watchdog import Watchdog
from models.tree_lstm import TreeLstm
from tests.brief import Fn, Patch, cases, refuses
from tests.core.programs import put
from tests.trees import arrays, assert_close, bits

RANDOM = np.random.default_rng(7)


def noise(*shape: int) -> ml.Tensor:
    return ml.asarray(RANDOM.standard_normal(shape, np.float32))


def equal(xs: Any, ys: Any) -> bool:
    """Return whether two trees have the same bits. numpy's products, where there are no native
    ones, have other bits beside other rows; lanes run on the host, and a device has other bits."""
    if EXTENSION is None or not getattr(current_arena().vm, "on_host", True):
        pairs = zip(arrays(xs), arrays(ys), strict=True)
        return all(np.allclose(x, y, atol=1e-5) for x, y in pairs)
    return bits(xs) == bits(ys)


def tree(leaves: int) -> ml.Tensor:
    """Nodes i64[2 leaves - 1, 3] of a random tree, as `TreeLstm` takes them."""
    return ml.asarray(random_tree(leaves, RANDOM))


@ml.subroutine
def halvings(x: ml.Tensor) -> Any:
    return ml.cond(x < 1.0, lambda: ml.zeros(()), lambda: 1.0 + halvings(x / 2))


@ml.subroutine
def fibonacci(n: ml.Tensor) -> Any:
    return ml.cond(n < 2, lambda: n, lambda: fibonacci(n - 1) + fibonacci(n - 2))


def collatz(n: ml.Tensor) -> Any:
    def turn(state: Any) -> Any:
        n, turns = state
        return ml.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), turns + 1

    return ml.while_loop(lambda state: state[0] != 1, turn, (n, 0))[1]


def swapped(x: ml.Tensor) -> Any:
    """Loops that swap their state, keep rows, and read them again."""
    (a, b), rows = ml.scan(lambda s, row: ((s[1], s[0] + row), s[0] * row), (x[0], x[1]), x)
    return ml.sum(rows, axis=0) * 2.0 + a - b + rows[1]


def many_ops(x: dict[str, Any]) -> Any:
    """Ops with rules of several kinds, and some without, which run lane by lane."""
    a, b = x["a"], x["deep"][0]
    weight = ml.reshape(ml.arange(12, dtype=ml.float32), (3, 4))
    return {
        "matmul": [a @ weight, ml.matrix_transpose(a) @ b, b @ weight, a[0] @ weight],
        "reduced": [ml.sum(a), ml.max(a, axis=1), ml.mean(b, axis=(0,), keepdims=True)],
        "moved": [ml.concat([a, b]), ml.flip(a), a[1:, ::2], ml.pad(b, ((1, 0), (0, 2)))],
        "rows": [ml.softmax(a, axis=0), ml.sort(b, axis=1), ml.argmax(a), ml.linalg.det(a @ a.T)],
        "taken": [weight[x["i"]], a[x["i"]], ml.take(b, ml.asarray([1, 0]), axis=1)],
        "chosen": ml.where(a > 0, a, 2.0) + ml.switch(x["i"], [lambda: 1.0, lambda: 2.0]),
        "own": 3.0,
    }


def in_place(x: ml.Tensor) -> Any:
    y = x * 2.0
    z = y + 1.0
    y[1] = 5.0
    y += z
    return y * z


@cases(
    "fn, inputs",
    (halvings, [ml.asarray(v) for v in (0.5, 1.0, 1000.0, 3e8)]),
    (fibonacci, [ml.asarray(n) for n in (0, 7, 3, 10, 1)]),
    (collatz, [ml.asarray(n) for n in (1, 27, 6, 7)]),
    (swapped, [noise(4, 3) for _ in range(3)]),
    (many_ops, [{"a": noise(2, 3), "deep": (noise(2, 3),), "i": i % 2} for i in range(5)]),
    (in_place, [noise(3) for _ in range(2)]),
    (lambda x: [x[0][i] for i in x[1]], [(noise(300), (np.array(200, "u1"), np.array(-1, "i1")))]),
    (lambda x: (x, x.shape[0], ml.zeros((0, 2)), ml.zeros((0,)) @ ml.zeros((0, 3))), [noise(2)]),
)
def test_a_batch_has_the_bits_of_each_input_alone(fn: Fn, inputs: list[Any]) -> None:
    alone = [fn(x) for x in inputs]
    captured = ml.capture(lambda xs: ml.auto_batch(fn)(xs))
    assert equal(ml.auto_batch(fn)(inputs), [ml.tree.map(ml.asarray, each) for each in alone])
    assert equal(captured(inputs), ml.auto_batch(fn)(inputs))
    assert equal(ml.auto_batch(fn)(inputs[:1]), ml.auto_batch(fn)(inputs)[:1])


W, V, T = noise(4, 3), noise(4), noise(7, 4)
FLOATS: list[tuple[Callable[[Any], Any], tuple[int, ...]]] = [
    (lambda x: x @ W, (2, 5, 4)),
    (lambda x: W @ x, (3,)),
    (lambda x: x @ x, (5,)),
    (lambda x: ml.ones((2, 3, 4)) @ x, (2, 4, 2)),
    (lambda x: ml.scaled_dot_product_attention(x, x, x), (2, 5, 4)),
    (lambda x: nn.LayerNorm(4)(x) + ml.layer_norm(x, x[0], V, eps=0.1), (2, 4)),
    (lambda x: ml.var(x, axis=1) + ml.std(x), (2, 6)),
    (lambda x: ml.softmax_cross_entropy(x, ml.asarray([1, 0])), (2, 4)),
    (lambda x: ml.concat([x, V]), (4,)),
    (lambda x: x[:, None] * x[None] + ml.flip(x), (3,)),
    (lambda x: ml.where(x > 0, x, V) + ml.clip(x, -0.5, 0.5), (4,)),
    (lambda x: x * V, ()),
    (lambda x: x.at[0].set(1.0), (3, 2)),
    (lambda x: T[ml.astype(ml.abs(x) * 2, ml.int64) % 7] * x[:, None], (3,)),
    (lambda x: T[i := ml.abs(x).astype("i64")] * x[:, None] + ml.take(W, i, axis=1).T, (3,)),
    (lambda x: ml.tril(x) + ml.linalg.inv(x + 5 * ml.eye(3)), (3, 3)),
]


def test_each_op_has_the_bits_and_the_gradient_of_one_lane() -> None:
    def loss(y: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.cos(ml.astype(y, ml.float32)))

    def total(run: Callable[[list[ml.Tensor]], list[ml.Tensor]]) -> Callable[[Any], ml.Tensor]:
        return lambda xs: ml.sum(ml.stack([loss(y) for y in run(xs)]))

    for i, (fn, shape) in enumerate(FLOATS):
        xs = [noise(*shape) for _ in range(3)]
        assert equal(ml.auto_batch(fn)(xs), [fn(x) for x in xs]), i
        each = ml.grad(total(lambda xs, fn=fn: [fn(x) for x in xs]))(xs)  # type: ignore[misc]
        assert_close(ml.grad(total(ml.auto_batch(fn)))(xs), each, 1e-4, 1e-5)


def test_a_batch_of_none_is_none() -> None:
    assert ml.auto_batch(halvings)([]) == []
    assert ml.auto_batch(halvings)(ml.zeros((0,))).shape == (0,)


def test_sentences_of_any_length_go_their_own_way() -> None:
    """No turn is computed of a padding, which would fail the check."""
    cell = nn.LSTMCell(5, 20, key=ml.random.key(0))

    def turn(state: Any, x: ml.Tensor) -> Any:
        ml.check(ml.any(x != 0), "a padding")
        return cell.step(cell.project(x[None]), state), None

    def last(sentence: Any) -> Any:
        words, length = sentence
        return ml.scan(turn, cell.initial_state(1), words, length)[0]

    lengths = [3, 9, 1, 0, 6, 9, 2]
    sentences = [(noise(n, 5), n) for n in lengths]
    alone = [last((x, ml.asarray(n))) for x, n in sentences]
    assert equal(ml.auto_batch(last)(sentences), alone)
    sentences[2] = sentences[2][0], 2
    refuses(CheckError, "a padding", ml.auto_batch(last), sentences)


class Rooted(TreeLstm):
    """A Tree-LSTM whose leaves are computed where they are met."""

    def root(self, tree: Any) -> Any:
        words, nodes = tree

        @ml.subroutine
        def state(words: Any, nodes: Any, node: ml.Tensor) -> Any:
            word, left, right = nodes[node]

            def at_children() -> Any:
                return self.at_node(state(words, nodes, left), state(words, nodes, right))

            return ml.cond(left < 0, lambda: self.at_leaf(words[word]), at_children)

        return state(words, nodes, ml.zeros((), dtype=ml.int64))[0]


SIZES = [5, 2, 1, 9, 6, 14]


def trees() -> list[Any]:
    return [(noise(n, 6), tree(n)) for n in SIZES]


def loss_of(root: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.sin(root) * ml.arange(7, dtype=ml.float32))


def test_gradients_of_trees_are_those_of_each_tree() -> None:
    model, inputs = Rooted(6, 7, key=ml.random.key(1)), trees()

    def one_by_one(model: Any, inputs: Any) -> Any:
        return sum((loss_of(model.root(x)) for x in inputs), ml.zeros(()))

    def at_once(model: Any, inputs: Any) -> Any:
        return sum((loss_of(y) for y in ml.auto_batch(model.root)(inputs)), ml.zeros(()))

    assert equal(ml.auto_batch(model.root)(inputs), [model.root(x) for x in inputs])
    args = model, [(words, nodes) for words, nodes in inputs]
    expected_loss, expected = ml.value_and_grad(one_by_one)(*args)
    loss, grads = ml.value_and_grad(at_once)(*args)
    assert equal(loss, expected_loss)
    assert_close(grads, expected, 1e-4, 1e-5)
    step = ml.capture(ml.value_and_grad(at_once))
    assert equal(step(*args), (loss, grads))


@pytest.mark.processor(reason="lanes run on the host, by its kernels")
@pytest.mark.skipif(EXTENSION is None, reason="there is no scheduler")
def test_no_schedule_changes_a_bit(monkeypatch: Patch) -> None:
    """The definition runs row by row: values and sums have the same bits as by the scheduler."""
    inputs = trees()

    def grads() -> Any:
        with ml.use(ml.VM()):
            model = Rooted(6, 7, key=ml.random.key(1))
            each = [(ml.asarray(x.numpy()), ml.asarray(nodes.numpy())) for x, nodes in inputs]

            def loss(model: Rooted) -> ml.Tensor:
                return loss_of(ml.stack(ml.auto_batch(model.root)(each)))

            return bits(ml.value_and_grad(loss)(model))

    expected = grads()
    monkeypatch.setattr(lane_runs.Lanes, "_in_steps", lambda *_: None)
    assert grads() == expected


def test_one_program_is_for_any_trees_and_any_number_of_them() -> None:
    model = Rooted(6, 7, key=ml.random.key(1))
    step = ml.capture(lambda words, nodes, n: ml.auto_batch(model.root)((words, nodes), n))
    for count in (8, 3, 0):
        each = [(noise(n, 6), tree(n)) for n in RANDOM.integers(1, 12, size=count)]
        words, nodes = np.zeros((8, 11, 6), np.float32), np.zeros((8, 21, 3), np.int64)
        for i, (some, rows) in enumerate(each):
            words[i, : len(some)], nodes[i, : len(rows)] = some.numpy(), rows.numpy()
        result = step(ml.asarray(words), ml.asarray(nodes), ml.asarray(count))
        assert equal([result[i] for i in range(count)], [model.root(x) for x in each])
        assert not result[count:].numpy().any()
    assert step.signatures == 1


def test_gradients_of_loops_of_a_tables_rows_and_of_branches() -> None:
    table, weight = noise(10, 4), noise(4, 4)

    def of(params: Any, lane: Any) -> Any:
        table, weight = params
        symbols, n = lane
        turn = lambda h, s: (ml.tanh(table[s] + h @ weight), h)  # noqa: E731
        h, rows = ml.scan(turn, ml.ones(4), symbols, n)
        return ml.sum(ml.cond(n > 2, lambda: h * rows[0], lambda: ml.exp(h)))

    inputs = [(ml.asarray(RANDOM.integers(10, size=n)), n) for n in (3, 1, 5, 2)]

    def alone(params: Any) -> Any:
        return sum((of(params, (s, ml.asarray(n))) for s, n in inputs), ml.zeros(()))

    def together(params: Any) -> Any:
        lanes = ml.auto_batch(lambda lane: of(params, lane))(inputs)
        return sum(lanes, ml.zeros(()))

    expected = ml.value_and_grad(alone)((table, weight))
    result = ml.value_and_grad(together)((table, weight))
    assert_close(result, expected, 1e-4, 1e-5)
    assert equal(ml.capture(ml.value_and_grad(together))((table, weight)), result)


def test_a_batch_in_a_lane_goes_row_by_row() -> None:
    rows = [noise(3, 2), noise(3, 2)]
    inner: Any = ml.auto_batch(lambda row: ml.tanh(row) @ row)
    assert equal(ml.auto_batch(inner)(rows), [inner(x) for x in rows])


def launched(program: Program | str, *arrays: Any) -> list[Any]:
    """Return the arrays after `lanes.run`: results, the number of rows, arguments and so on."""
    text = program if isinstance(program, str) else program.to_bytes().decode("latin-1")
    vm = ml.VM()
    handles = [put(vm, x) for x in arrays]
    vm.launch(Program.of_op(lane_runs.RUN, len(arrays), {"program": text}, 0), handles)
    return [vm.read(handle).tolist() for handle in handles]


I64 = np.array([7, 8])


def rows_of(code: str, extra: str = "", locals_: str = '"i64[]", "i64[]"') -> Program:
    """A program of one row, i64[], that runs this code."""
    spec = f'{{"params": ["i64[]"], "locals": [{locals_}], "shared": [], "sums": 0}}'
    return assemble(f"""
    .func main 0 *
        load_arg 0
        call row
        halt
    .func row 1 1
        push_str "lanes.frame"
        cfunc 0 {locals_.count("[")} {spec}
        {code}
        return 1
    {extra}
    """)


def op(name: str, nparams: int, nresults: int = 1, attributes: str = "") -> str:
    return f'\npush_str "{name}"\ncfunc {nparams} {nresults} {attributes}\n'


DOUBLED = "get -1\nget -1" + op("add", 2)
PART = '{"arguments": "input 0 i64[1] output 0 i64[1]", "nbytes": 0, %s}'
TOLD = '"ins": [%s], "outs": [%s], "shared": [], "heavy": true, "sum": -1'


def segment(spec: str, rows: int = 1) -> str:
    """A function `s`, whose part says that of itself."""
    return f"""
    .func s 1 1
        get -1
        push_str "negative"
        cfunc 1 1
        return 1
    .func s.x{rows} 0 *
        push_str "lanes.part"
        cfunc 0 0 {PART % spec}
        load_arg 1
        load_arg 0
        push_str "negative.out"
        cfunc 2 0
        halt
    """


NEGATED = "get -1\ncall s\nset 1\nget 1"
PUSH, READ = op("residuals.push", 2, 0), op("residuals.read", 2, 0)
TAKE, INDICES = op("take", 2, 1, '{"axis": 0}'), ("i8", "i16", "i32", "u64")
LOCALS = '"i64[]", "i64[4]", "%s[]", "i64[]"'
MIXED: Any = {"locals_": '"i64[]", "u8[]", "i64[]"'}


@pytest.mark.local(reason="a server answers such a launch later")
@cases(
    "program, expected",
    (rows_of("get -1"), [7, 8]),
    (rows_of(DOUBLED), [14, 16]),
    (rows_of("get -1\nget 1\nset -1\nset 1\nget 1"), [7, 8]),
    (rows_of("get 0"), None),
    (rows_of("get 1"), [0, 0]),
    (rows_of("get 1", locals_='"i64[]", "i64[1]"'), [0, 0]),
    *[(rows_of(NEGATED, segment(TOLD % n)), [-7, -8]) for n in ((8, 8), (0, 8), (8, 0))],
    *[(rows_of(f"get 1\nget 2{TAKE}set 3\nget 3", locals_=LOCALS % of), [0, 0]) for of in INDICES],
)
def test_an_ordinary_program_runs_on_rows(program: Program, expected: Any) -> None:
    """Also one that the scheduler has no steps for, or that keeps values on its stack."""
    result = launched(program, np.zeros(2, np.int64), np.array(2), I64)[0]
    assert result == expected or expected is None


@pytest.mark.local(reason="a server answers such a launch later")
@cases(
    "program, error, text",
    ("", EncodingError, "header"),
    ("\u1234", MachineError, "expected a program for rows"),
    (Program.straight([Instruction(Opcode.halt)]), MachineError, "expected a program for rows"),
    (rows_of("get -1\nget -1\njump_if_false end\npop 1\nend:\nget -1"), ProgramError, "values"),
    (rows_of("get 9"), ProgramError, "slot 9"),
    (rows_of("get -1" + op("matmul", 1)), (ShapeError, ProgramError, MachineError), "matmul"),
    (rows_of("get -1", locals_='"f32[-1]"'), (ShapeError, MachineError), ""),
    (rows_of(NEGATED, segment(TOLD % (8, 8), rows=2)), MachineError, "a single row"),
    (rows_of(NEGATED, segment(TOLD % (8, 8), rows=0)), MachineError, "a single row"),
    (rows_of(NEGATED, segment('"ins": [8]')), MachineError, "expected a program for rows"),
    (rows_of("get 1\nset 2\nget 2", **MIXED), MachineError, "lanes: expected result"),
    (rows_of(f"jump a\na:\nget 1\nget -1{PUSH}get 2", **MIXED), HostFunctionError, "i64"),
    (
        rows_of(f"jump a\na:\nget 2\nget 1{PUSH}get -1\nget 2{READ}get -1", **MIXED),
        (MachineError, HostFunctionError),
        "no record|record .* does not exist",
    ),
)
def test_what_is_no_program_for_rows_is_refused(program: Any, error: Any, text: str) -> None:
    refuses(error, text, launched, program, np.zeros(2, np.int64), np.array(2), I64)


@pytest.mark.local(reason="a server answers such a launch later")
@pytest.mark.skipif(EXTENSION is None, reason="rows that run one by one run no part")
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_part_of_other_bytes_is_refused(side: str) -> None:
    part = segment(TOLD % (8, 8)).replace(f"{side} 0 i64[1]", f"{side} 0 i64[2]")
    program = rows_of(NEGATED, part)
    arrays = np.zeros(2, np.int64), np.array(2), I64
    refuses((MachineError, DTypeError), "", launched, program, *arrays)


@pytest.mark.local(reason="the limits are of the VM that a server lends")
def test_rows_that_loop_forever_end_with_their_launch() -> None:
    """Also where the scheduler in C runs them, and lets other threads run meanwhile."""
    vm = BoundedVM("bounded", Limits(launch_seconds=0.2), Watchdog())
    arrays = np.zeros(2, np.int64), np.array(2), np.zeros(2, np.int64)
    handles = [put(vm, x) for x in arrays]
    rows = lane_link.LaneProgram.of(rows_of("again:\nget -1\njump_if_false again\nget -1"))
    program = Program.of_op(lane_runs.RUN, 3, {"program": rows}, 0)
    refuses(LimitExceededError, "exceeded the limit", vm.launch, program, handles)


@pytest.mark.local(reason="the limits are of the VM that a server lends")
@pytest.mark.skipif(EXTENSION is None, reason="in Python rows run one after the other")
def test_frames_of_rows_count_as_bytes_of_their_launch() -> None:
    """400,000 calls wait at once, each for a few numbers."""
    vm = BoundedVM("bounded", Limits(launch_bytes=1 << 20, launch_seconds=60.0), Watchdog())

    depth = ml.subroutine(lambda n: ml.cond(n < 1.0, lambda: n, lambda: depth(n - 1.0) + 1.0))

    deep = ml.auto_batch(depth)
    with ml.use(vm):
        assert float(deep(ml.full(4, 200.0)).sum()) == 800.0
        refuses(OutOfMemoryError, "the limit is 1,048,576", deep, ml.full(2000, 200.0))
        assert float(deep(ml.full(4, 100.0)).sum()) == 400.0


def summed(outs: str) -> Program:
    """A program that adds its rows, u8[1048576], to a sum of such results."""
    facts = f'"ins": [1048576], "outs": [{outs}], "shared": [], "heavy": false, "sum": 0'
    return assemble(f"""
    .func main 0 *
        load_arg 0
        call row
        halt
    .func row 1 0
        push_str "lanes.frame"
        cfunc 0 1 {{"params": ["u8[1048576]"], "locals": ["i64[]"], "shared": [], "sums": 1}}
        get 0
        get -1
        push_str "lanes.add"
        cfunc 2 0 {{"site": 0}}
        return 0
    .func a0.x1 0 *
        push_str "lanes.part"
        cfunc 0 0 {{"arguments": "", "nbytes": 0, {facts}}}
        halt
    """)


@pytest.mark.local(reason="a server answers such a launch later")
def test_a_sum_of_several_results_is_refused() -> None:
    """The scheduler copies rows behind the one sum."""
    rows = np.ones((2, 1 << 20), np.uint8)
    refuses(MachineError, "one result", launched, summed("8, 0"), np.array(0), np.array(2), rows)


@pytest.mark.local(reason="a server answers such a launch later")
def test_a_function_with_other_parameters_than_it_says_runs_row_by_row() -> None:
    text = '{"params": [], "locals": ["i64[]"], "shared": [], "sums": 0}'
    function = f"""
    .func f 3 0
        push_str "lanes.frame"
        cfunc 0 1 {text}
        return 0
    """
    program = rows_of("get -1\nget -1\nget -1\ncall f\nget -1", function)
    message = "parameters of f, got"
    refuses(MachineError, message, lane_link.Linked, lane_link.LaneProgram.of(program))
    assert launched(program, np.zeros(2, np.int64), np.array(2), I64)[0] == [7, 8]


@pytest.mark.local(reason="a server answers such a launch later")
def test_rows_without_operands_are_refused() -> None:
    text = '{"params": [], "locals": ["i64[]"], "shared": [], "sums": 0}'
    program = assemble(f"""
    .func main 0 *
        call row
        halt
    .func row 0 0
        push_str "lanes.frame"
        cfunc 0 1 {text}
        return 0
    """)
    refuses(
        OperandValueError, "expected operands with at least", launched, program, np.array(1 << 61)
    )


@pytest.mark.local(reason="a server answers such a launch later")
def test_rows_of_other_bytes_are_refused() -> None:
    program = rows_of("get -1")
    for operands in (
        (np.zeros(2, np.int64), np.array(2), I64.astype("f4")),
        (np.zeros(2, np.float32), np.array(2), I64),
        (np.zeros(2, np.int64), np.array(3), I64),
        (np.array(2), I64),
    ):
        refuses((MachineError, OperandValueError, ShapeError), "", launched, program, *operands)


@pytest.mark.local(reason="a server answers such a launch later")
def test_a_step_of_older_code_says_what_to_do() -> None:
    vm = ml.VM()
    handle = vm.alloc_tensor(ml.TensorType("i64", ()))
    program = Program.of_op(lane_runs.RUN, 1, {"code": "{}"}, 0)
    refuses(MachineError, "capture and save it again", vm.launch, program, (handle,))


def test_a_result_may_be_a_tensor_from_outside() -> None:
    weight, rows = noise(2), [noise(2) for _ in range(3)]

    def total(w: ml.Tensor) -> ml.Tensor:
        parts = ml.auto_batch(lambda x: (w, w * x))(rows)
        return ml.sum(ml.stack([ml.sum(y) + ml.sum(z) for y, z in parts]))

    result = ml.auto_batch(lambda x: (weight, x, ml.reshape(weight, (2, 1))))(rows)
    assert equal(result, [(weight, x, ml.reshape(weight, (2, 1))) for x in rows])
    expected = 3.0 + np.sum([x.numpy() for x in rows], axis=0)
    for gradient in (ml.grad(total), ml.capture(ml.grad(total))):
        np.testing.assert_allclose(gradient(weight).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_error_of_a_lane_has_no_code() -> None:
    with pytest.raises(IndexError, match="index 7") as caught:
        ml.auto_batch(lambda both: ml.take(*both))((ml.ones((2, 3)), ml.asarray([[0], [7]])))
    assert max(map(len, caught.value.__notes__)) < 300


def test_an_op_that_may_raise_runs_only_for_the_elements_that_take_its_branch() -> None:
    w, powers = ml.asarray([2, 3]), ml.asarray([-1, 2])

    def f(x: ml.Tensor) -> ml.Tensor:
        return ml.cond(x > 0, lambda: x + ml.sum(w**powers), lambda: x)

    assert [y.item() for y in ml.auto_batch(f)([ml.asarray(-1), ml.asarray(-2)])] == [-1, -2]
    inputs = [ml.asarray(-1), ml.asarray(2)]
    refuses(OperandValueError, "got a negative exponent", ml.auto_batch(f), inputs)
