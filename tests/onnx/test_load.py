"""ONNX files as Modules: what they compute, how they are trained, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, ModelError
from mlvm.core.protocol import VMProtocol
from mlvm.onnx import load, wire
from tests.brief import Patch, cases, refuses
from tests.onnx import backend, damaged, exports
from tests.onnx.making import computed, constant, graph, model, node, value

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 6, 5)).astype(np.float32)
W = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
B = RNG.standard_normal(4).astype(np.float32)
IMAGES = value("x", 1, ("n", 3, "h", "w"))
FROZEN = backend.frozen()


def network() -> bytes:
    """A convolution, a batch norm, a residual, a pool and a dense layer."""
    scale = np.abs(RNG.standard_normal(4)).astype(np.float32) + 0.5
    dense = RNG.standard_normal((7, 4)).astype(np.float32)
    weights = "w", "b", "s", "m", "dense", "k"
    return model(
        graph(
            [
                node("Conv", "x w b", "c", pads=[1, 1, 1, 1]),
                node("BatchNormalization", "c s b m s", "y"),
                node("Relu", "y", "r"),
                node("Add", "r y", "sum"),
                node("GlobalAveragePool", "sum", "p"),
                node("Flatten", "p", "f"),
                node("Gemm", "f dense k", "logits", transB=1),
            ],
            [IMAGES],
            "logits",
            [*map(constant, weights, (W, B, scale, B, dense, np.ones(7, np.float32)))],
        )
    )


NETWORK = network()


@pytest.mark.parametrize("name", FROZEN)
def test_a_part_of_the_backend_suite(name: str) -> None:
    backend.run(FROZEN[name], captured=False)


@pytest.mark.parametrize("name", [*FROZEN][::4])
def test_a_part_of_the_backend_suite_captured(name: str) -> None:
    backend.run(FROZEN[name], captured=True)


def test_a_model_is_a_module_that_may_be_captured_and_trained() -> None:
    net = load(NETWORK)
    assert net.inputs == {"x": "f32[n,3,h,w]"}
    assert list(net.outputs) == ["logits"]
    assert sorted(net.named_parameters()) == [
        "weights/b",
        "weights/dense",
        "weights/k",
        "weights/w",
    ]
    x = ml.asarray(X)
    eager = net(x)
    assert eager.shape == (2, 7)
    assert np.array_equal(ml.capture(net)(x), eager)

    def loss_of(net: Any, x: Any) -> Any:
        return ml.mean(ml.square(net(x)))

    optimizer = ml.optim.SGD(net, 0.01)

    @ml.capture
    def step(net: Any, x: Any) -> Any:
        loss, gradients = ml.value_and_grad(loss_of)(net, x)
        optimizer.update(gradients)
        return loss

    losses = [float(step(net, x)) for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_model_is_copied_pickled_saved_and_shown(tmp_path: Path) -> None:
    net, x = load(NETWORK), ml.asarray(X)
    expected = net(x).numpy()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert np.array_equal(other(x), expected)
    ml.save(tmp_path / "weights", net)
    net.weights["k"] = ml.zeros(7)
    assert not np.array_equal(net(x), expected)
    assert np.array_equal(ml.load(tmp_path / "weights", into=net)(x), expected)
    assert "weights" in repr(net)
    assert net.num_parameters() == sum(y.size for y in net.named_parameters().values())


def test_a_batch_norm_is_folded_into_the_convolution_before_it() -> None:
    net = load(NETWORK)
    assert [n.type for n in net.graph.nodes].count("BatchNormalization") == 0
    constants = {each.name: each for each in wire.decode(memoryview(NETWORK)).graph.initializer}
    assert "s" in constants


@cases("power", True, False)
def test_a_layer_norm_of_seven_nodes_becomes_one(power: bool) -> None:
    nodes = [
        node("ReduceMean", "x", "m", axes=[-1]),
        node("Sub", "x m", "d"),
        node("Pow", "d two", "s") if power else node("Mul", "d d", "s"),
        node("ReduceMean", "s", "v", axes=[-1]),
        node("Add", "v eps", "a"),
        node("Sqrt", "a", "r"),
        node("Div", "d r", "n"),
        node("Mul", "n w", "y"),
    ]
    constants = [*map(constant, ("two", "eps", "w"), (np.float32(2), np.float32(1e-3), B))]
    x = RNG.standard_normal((3, 5, 4)).astype(np.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * B
    for outputs, count in (("y", 2), ("y v", 8)):
        data = model(graph(nodes, [value("x", 1, ("n", 5, 4))], outputs, constants), 13)
        net = load(data)
        assert len(net.graph.nodes) == count
        y = net(ml.asarray(x))
        np.testing.assert_allclose(y[0] if count == 8 else y, expected, rtol=1e-5, atol=1e-5)


def test_images_lie_channels_last_until_the_end() -> None:
    program = ml.disassemble(ml.program_of(load(NETWORK), ml.asarray(X)))
    assert program.count("permute_dims") == 1  # that of the images


def test_a_model_runs_on_any_vm(vm: VMProtocol) -> None:
    net = load(NETWORK)
    expected = net(ml.asarray(X)).numpy()
    with ml.Arena(vm, "there").allocating():
        there = load(NETWORK)
        np.testing.assert_allclose(there(ml.asarray(X)).numpy(), expected, rtol=2e-5, atol=1e-5)


def test_lengths_and_branches_are_known_or_not() -> None:
    branches = [
        graph([node(type, operands, name)], [], name)
        for type, operands, name in (("Mul", "x x", "squared"), ("Neg", "x", "negated"))
    ]
    data = model(
        graph(
            [
                node("Reshape", "x shape", "flat"),
                node("If", "yes", "picked", then_branch=branches[0], else_branch=branches[1]),
                node("Shape", "flat", "found"),
            ],
            [value("x", 1, ("n", 4)), value("shape", 7, ("k",)), value("yes", 9, ())],
            "flat picked found",
        )
    )
    net = load(data)
    assert net.static_inputs == {"shape", "yes"}
    with pytest.warns(DeprecationWarning, match=r"^Model.asked is now Model.static_inputs"):
        assert net.asked == net.static_inputs  # type: ignore[attr-defined]
    x = ml.reshape(ml.arange(8.0), (2, 4))
    step = ml.capture(net)
    for shape, yes in (((8,), True), ((4, 2), False)):
        flat, picked, result_shape = step(x, shape, yes)
        assert flat.shape == shape
        assert result_shape.tolist() == [*shape]
        assert np.array_equal(picked, x * x if yes else -x)
        assert np.array_equal(step(x, shape, ml.asarray(yes))[1], picked)  # both are recorded
        assert np.array_equal(net(x, ml.asarray(shape), ml.asarray(yes))[1], picked)
    text = "operand 1 of Reshape: expected numbers"
    refuses(ml.errors.CaptureError, text, step, x, ml.asarray([8]), True)


def test_a_loop_goes_round_as_often_as_a_tensor_says() -> None:
    body = graph(
        [node("Add", "s s", "s_next"), node("Less", "s_next limit", "go")],
        [value("i", 7, ()), value("before", 9, ()), value("s", 1, ())],
        "go s_next",
    )
    data = model(
        graph(
            [node("Loop", "- yes s0", "end", body=body)],
            [value("s0", 1, ()), value("limit", 1, ())],
            "end",
            [constant("yes", np.asarray(True))],
        )
    )
    net = load(data)
    for function in (net, ml.capture(net)):
        assert float(function(ml.asarray(1.0), ml.asarray(100.0))) == 128.0
        assert float(function(ml.asarray(3.0), ml.asarray(5.0))) == 6.0


def test_weights_in_other_files_are_read_beside_the_model(tmp_path: Path) -> None:
    def data(location: str, length: int = W.nbytes) -> bytes:
        places = {"location": location, "offset": "16", "length": str(length)}
        pairs = [wire.ProtoMessage("Pair", key=key, value=each) for key, each in places.items()]
        outside = constant("w", W, raw_data=None, external_data=pairs, data_location=1)
        return model(graph([node("Conv", "x w", "y")], [IMAGES], "y", [outside]))

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.bin").write_bytes(bytes(16) + W.tobytes())
    (tmp_path / "secret").write_bytes(bytes(16) + W.tobytes())
    file = tmp_path / "models" / "model.onnx"
    file.write_bytes(data("weights.bin"))
    inside = model(graph([node("Conv", "x w", "y")], [IMAGES], "y", [constant("w", W)]))
    assert np.array_equal(load(file)(X), load(inside)(X))
    for location, length in (
        ("../secret", W.nbytes),
        ("none", W.nbytes),
        ("weights.bin", 9),
        ("", 4),
        ("w\0", W.nbytes),
    ):
        file.write_bytes(data(location, length))
        refuses(ModelError, "w", load, file)
    refuses(ModelError, "load the model from its file", load, data("weights.bin"))


def test_functions_of_a_file_stand_for_their_nodes() -> None:
    inner = wire.ProtoMessage("OperatorSet", version=21)
    by = wire.ProtoMessage("Attribute", name="alpha", type=1, ref_attr_name="slope")
    body = wire.ProtoMessage("Node", op_type="LeakyRelu", input=["a"], output=["t"], attribute=[by])
    function = wire.ProtoMessage(
        "Function", name="Twice", domain="own", input=["a"], output=["b"], attribute=["slope"],
        node=[body, node("Add", "t t", "b")], opset_import=[inner],
    )  # fmt: skip
    call = node("Twice", "x", "y", domain="own", slope=0.5)
    net = load(model(graph([call], [value("x", 1, ("n",))], "y"), functions=[function]))
    assert net(ml.asarray([1.0, -1.0])).tolist() == [2.0, -1.0]
    endless = wire.ProtoMessage(
        "Function", name="Twice", domain="own", input=["a"], output=["b"],
        node=[node("Twice", "a", "b", domain="own")], opset_import=[inner],
    )  # fmt: skip
    data = model(graph([call], [value("x", 1, ("n",))], "y"), functions=[endless])
    refuses(ModelError, "calls itself", load, data)


def only(*nodes: Any, constants: Any = (), opset: int = 21) -> bytes:
    return model(graph(nodes, [value("x", 1, ("n",))], "y", constants), opset)


ROW = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8)


@cases(
    "count, scale, attributes, places",
    # 8 * 0.6 is 4 columns, whose corners are those of the image: not 4.8 columns'
    (8, 0.6, {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
     [0, 7 / 3, 14 / 3, 7]),
    (5, 1.1, {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
     [0, 1, 2, 3, 4]),
    # one column is the first, however much of another there would be
    (2, 0.9, {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, [0]),
    # 3.3 in f32, times 10, is 33 columns
    (1, 3.3, {"coordinate_transformation_mode": "asymmetric"}, [0] * 3),
    # 7 / 0.7 is 10 in f32, and a little less where 0.7f is widened
    (8, 0.5, {"mode": "linear", "antialias": 1, "exclude_outside": 1},
     [(0.75 * 0 + 0.75 * 1 + 0.25 * 2) / 1.75, 2.5, 4.5, (0.25 * 5 + 0.75 * 6 + 0.75 * 7) / 1.75]),
    (8, 0.5, {"mode": "linear", "antialias": 1},
     [(1 * 0 + 0.75 * 1 + 0.25 * 2) / 2, 2.5, 4.5, (0.25 * 5 + 0.75 * 6 + 1 * 7) / 2]),
)  # fmt: skip
def test_a_resize_places_its_columns(
    count: int, scale: float, attributes: Any, places: Any
) -> None:
    scales = np.asarray([1, 1, 1, scale], np.float32)
    result = computed("Resize", ROW[..., :count], None, scales, **attributes)
    np.testing.assert_allclose(result.ravel(), places, rtol=1e-6, atol=1e-6)


def test_a_resize_rounds_places_and_lengths_in_f32() -> None:
    by = np.float32(1.1)
    row = np.arange(40, dtype=np.float32).reshape(1, 1, 1, 40)
    for rule, place in (("floor", np.floor), ("ceil", np.ceil)):
        result = computed("Resize", row, None, np.asarray([1, 1, 1, by], np.float32),
                        coordinate_transformation_mode="asymmetric", nearest_mode=rule)  # fmt: skip
        expected = np.minimum(place(np.arange(44, dtype=np.float32) / by), 39)
        assert result.ravel().tolist() == expected.tolist()
    whole = computed("Resize", row[..., :10], B[:0], np.asarray([1, 1, 1, 3.3], np.float32))
    assert whole.size == 33  # 32.99... where 3.3f is widened


@cases(
    "start, end, step, expected",
    (-100, -100, -1, [0]), (-6, -100, -2, [0]), (100, -100, -2, [4, 2, 0]),
    (3, -6, -1, [3, 2, 1, 0]), (-100, 100, 2, [0, 2, 4]), (-100, -3, -1, []),
)  # fmt: skip
def test_a_slice_begins_within_its_axis(start: int, end: int, step: int, expected: Any) -> None:
    x, bounds = ROW.ravel()[:5], [np.asarray([n]) for n in (start, end, 0, step)]
    assert computed("Slice", x, *bounds).tolist() == expected


def test_a_mean_of_integers_is_rounded_towards_zero() -> None:
    for dtype in ("i4", "i8"):
        x = np.asarray([[-3, -4], [3, 4], [-5, 2]], dtype)
        assert computed("ReduceMean", x, opset=13, axes=[1]).ravel().tolist() == [-3, 3, -1]
    large = np.full((1, 240), 2**27, "i4")  # their sum has 35 bits
    assert computed("ReduceMean", large, opset=13, axes=[1]).tolist() == [[2**27]]


def test_known_numbers_keep_their_dtype() -> None:
    for dtype in ("f8", "f2", "i4", "u1"):
        constants = [constant("a", np.asarray(2, dtype)), constant("b", np.asarray(3, dtype))]
        nodes, inputs = [node("Where", "x a b", "y")], [value("x", 9, ("n",))]
        result = load(model(graph(nodes, inputs, "y", constants)))(np.asarray([True, False]))
        assert (result.dtype.numpy, result.tolist()) == (dtype, [2, 3])


def test_what_is_known_only_in_a_call_is_reduced_there() -> None:
    """Of a length that the call brings, captured too."""
    nodes = [node("Shape", "x", "n"), node("Cast", "n", "f", to=1),
             node("ReduceLogSumExp", "f", "y", keepdims=0)]  # fmt: skip
    net = load(model(graph(nodes, [value("x", 1, ("n", "k"))], "y"), 13))
    for function in (net, ml.capture(net)):
        assert float(function(ml.ones((3, 4)))) == pytest.approx(np.log(np.exp(3) + np.exp(4)))


def test_zeros_are_quantized_by_one() -> None:
    result = computed("DynamicQuantizeLinear", np.zeros(2, np.float32), outputs=3, opset=13)
    assert [each.tolist() for each in result] == [[0, 0], 1.0, 0]


@cases(
    "data, text",
    (b"", "without a graph"),
    (b"none", "not an ONNX file, or damaged: .*wire type 6"),
    (NETWORK[:-9], "bytes, but only"),
    (only(node("Fly", "x", "y", "wing")), "'wing': the op Fly is not supported"),
    (only(node("StringConcat", "x x", "y", "s")), "'s': the op StringConcat is not supported"),
    (only(node("Add", "x z", "y", "n")), "Add 'n' reads 'z', which no earlier node"),
    (only(node("Neg", "z", "y"), node("Neg", "y", "z")), "reads 'z'"),
    (only(node("Neg", "x", "y"), node("Abs", "x", "y")), "computes 'y', which is already defined"),
    (only(node("Add", "x", "y", "n")), "Add 'n': expected at least 2 operands, got 1"),
    (only(node("Neg", "x", "z")), "the output 'y' is not computed by any node"),
    (only(node("Neg", "x", "y"), opset=0), "expected an opset from 1 to 999, got 0"),
    (
        only(node("Add", "x w", "y"), constants=[constant("w", B), constant("w", B)]),
        "expected unique names of initializers, got 'w' twice",
    ),
    (only(node("Add", "x w", "y"), constants=[constant("w", B, dims=[1 << 60])]), "expected"),
    (only(node("Add", "x w", "y"), constants=[constant("w", B, dims=[-4])]), "shape"),
    (only(node("Add", "x w", "y"), constants=[constant("w", B, data_type=99)]), "dtype 99"),
    (only(node("Add", "x w", "y"), constants=[constant("w", B, data_type=8)]), "strings"),
    (
        only(node("Reshape", "w s", "y"), constants=[constant("w", B), constant("s", [5])]),
        "Reshape",
    ),
    (
        only(node("Add", "x w", "y"), constants=[constant("w", B[:0], dims=[0, 1 << 62, 1 << 62])]),
        "shape",
    ),
    (
        only(node("Split", "w", "y", num_outputs=0), constants=[constant("w", B)]),
        "expected 1 parts, one for each output, got 0",
    ),
    (
        only(node("Split", "w", "y", num_outputs=1 << 40), constants=[constant("w", B)]),
        "parts, one for each output, got",
    ),
    (
        only(node("CumSum", "w a", "y"), constants=[constant("w", B), constant("a", [9])]),
        "axis 9 is out of range",
    ),
    (
        only(node("Split", "w", "y", "n", axis=5), constants=[constant("w", B)]),
        r"Split 'n'\(\): axis 5 is out of range",
    ),
    *(
        (only(node("Pad", "w p", "y", mode=mode),
              constants=[constant("w", B), constant("p", [0, 9])]),
         f"expected mode as constant, reflect, edge or wrap, got '{mode}'")
        for mode in ("empty", "symmetric", "bogus")
    ),
    (only(node("Size", "", "y", "n")), "Size 'n'"),
    (only(node("Conv", "x w", "y", "n"), constants=[constant("w", B)]), "Conv 'n'"),
    *(
        (only(node(op, "x w", "c", "n"), node("Add", "c b", "y"),
              constants=[constant("w", w), constant("b", B)]), f"{op} 'n'")
        for op in ("Conv", "ConvTranspose") for w in (np.float32(1), B)
    ),
    (
        only(node("DepthToSpace", "w", "y", blocksize=0), constants=[constant("w", X)]),
        "DepthToSpace",
    ),
)  # fmt: skip
def test_what_is_refused_says_why_before_anything_runs(data: bytes, text: str) -> None:
    refuses(ModelError, text, load, data)


@cases(
    "op, operands",
    *((op, ["x", ""]) for op in ("Concat", "Sum", "Max", "Einsum", "SequenceConstruct")),
    *((op, operands) for op in ("Reshape", "Unsqueeze", "Slice", "Pad", "TopK")
      for operands in (["x"], ["x", ""])),
)  # fmt: skip
def test_a_missing_operand_is_refused_at_load(op: str, operands: list[str]) -> None:
    lacking = node(op, "x", "y", "n")
    lacking.input = operands  # type: ignore[attr-defined]
    refuses(ModelError, f"{op} 'n': operand 1 is required, got none", load, only(lacking))


def test_a_file_of_a_model_in_training_is_loaded_with_a_warning() -> None:
    flags = [constant("rate", np.float32(0.5)), constant("yes", True), constant("no", False)]
    drops = only(node("Dropout", "x rate yes", "y", "drop"), constants=flags)
    with pytest.warns(UserWarning, match=r"Dropout 'drop', 1 nodes in total; .*model.eval\(\)"):
        net = load(drops)
    assert float(ml.max(net(np.ones(64, np.float32)))) == 2.0
    load(only(node("Dropout", "x rate no", "y"), constants=flags))


COLUMN = node("ConstantOfShape", "n1", "p"), node("ConstantOfShape", "n2", "q")
SIZES = constant("n1", [1 << 14, 1]), constant("n2", [1, 1 << 14])
SHAPE, BY = constant("s", [1 << 14, 1 << 14]), constant("s", [1 << 28])
MANY = [1, 1, 1 << 14, 1 << 14]
LARGE: dict[str, tuple[Any, Any]] = {
    "doubled": ([node("Concat", "c c", "c0", axis=0), *(
        node("Concat", f"c{i} c{i}", f"c{i + 1}", axis=0) for i in range(30)),
        node("Add", "x c30", "y")], [constant("c", np.ones(1, "f4"))]),
    **{op: ([*COLUMN, node(op, "p q", "r"), node("Add", "r x", "y")], SIZES)
       for op in ("Add", "Mul", "Pow")},
    "Less": ([*COLUMN, node("Less", "p q", "r"), node("Where", "r x x", "y")], SIZES),
    "of the input": ([*COLUMN, node("Add", "p x", "r"), node("Add", "r q", "y")], SIZES),
    "Gather": ([*COLUMN, node("Cast", "q", "i", to=7), node("Transpose", "p", "t"),
                node("Gather", "t i", "r", axis=0), node("Add", "x r", "y")], SIZES),
    "MatMul": ([*COLUMN, node("Cast", "q", "i", to=7), node("Cast", "p", "j", to=7),
                node("MatMul", "j i", "r"), node("Cast", "r", "y", to=1)], SIZES),
    "CenterCropPad": ([node("CenterCropPad", "c s", "y")],
                      [constant("c", np.ones((1, 1), "f4")), SHAPE]),
    "ConstantOfShape": ([node("ConstantOfShape", "s", "y")], [SHAPE]),
    "AffineGrid": ([node("AffineGrid", "c s", "y")],
                   [constant("c", np.ones((1, 2, 3), "f4")), constant("s", MANY)]),
    "Col2Im": ([node("Col2Im", "c s b", "y")], [constant("c", np.ones((1, 1, 1), "f4")),
                                                constant("b", [1 << 14] * 2), SHAPE]),
    "Expand": ([node("Expand", "x s", "y")], [SHAPE]),
    "Tile": ([node("Tile", "x s", "y")], [BY]),
    "Resize": ([node("Resize", "x - s", "y", mode="linear")],
               [constant("s", np.asarray([1 << 28], "f4"))]),
    "OneHot": ([node("OneHot", "i s v", "y")], [constant("i", np.zeros(1 << 10, "i8")),
               constant("s", 1 << 18), constant("v", np.ones(2, "f4"))]),
    "DequantizeLinear": ([node("DequantizeLinear", "q c", "r", axis=0, block_size=1 << 28),
                          node("Add", "x r", "y")],
                         [constant("q", np.zeros(4, "u1")), constant("c", np.ones(4, "f4"))]),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_small_file_is_no_large_memory(name: str, monkeypatch: Patch) -> None:
    """It is folded as far as its size allows, and a call is refused at its first large result."""
    monkeypatch.setattr("mlvm.onnx.model._LEAST", (1 << 20, 1 << 24))
    monkeypatch.setattr("mlvm.onnx.model.Model.limit", 1 << 24)
    nodes, constants = LARGE[name]
    vm = ml.VM("mine")
    with ml.Arena(vm, "there").allocating():
        net = load(model(graph(nodes, [value("x", 1, (1,))], "y", constants), 21))
        graphs = net.graph.all()
        arrays = [x for each in graphs for node in each.nodes for x in node.inputs]
        assert sum(x.nbytes for x in arrays if isinstance(x, np.ndarray)) <= 3 << 20
        for function in (net, ml.capture(net)):
            message = "cannot allocate .* bytes: a call may allocate .*limit"
            refuses(ml.errors.OutOfMemoryError, message, function, np.ones(1, np.float32))
        assert vm.consumed_size_in_mib() < 17 + 16


def test_a_larger_limit_allows_more() -> None:
    net = load(only(node("Expand", "x s", "y"), constants=[constant("s", [1 << 20])]))
    net.limit = 1 << 20
    with ml.Arena(ml.VM(), "there").allocating():
        refuses(ml.errors.OutOfMemoryError, "may allocate 1,048,576", net, np.ones(1, np.float32))
        net.limit = 1 << 23
        assert net(np.ones(1, np.float32)).shape == (1 << 20,)


def test_a_result_that_an_op_does_not_make_is_refused() -> None:
    for op in ("Neg", "Identity"):
        net = load(model(graph([node(op, "x", "z y", "n")], [value("x", 1, ("n",))], "y")))
        text = f"{op} 'n': expected at most 1 result, but the graph uses 'y'"
        refuses(ModelError, text, net, ml.ones(3))


def test_other_inputs_than_the_file_declares_are_refused() -> None:
    net, integers = load(NETWORK), ml.zeros((2, 3, 5, 5), dtype=ml.int32)
    text = r"expected the input 'x' as f32\[n,3,h,w\], got f32\[2,4,5,5\]"
    refuses(ml.errors.ShapeError, text, net, ml.zeros((2, 4, 5, 5)))
    refuses(ml.errors.DTypeError, "the input 'x' as f32", net, integers)
    refuses(ml.errors.ArgumentError, "missing input 'x'", net)
    refuses(ml.errors.ArgumentError, "unknown input 'z'", net, ml.asarray(X), z=1)
    refuses(ml.errors.ArgumentError, "a file name", load, cast(Any, 3))
    refuses(FileNotFoundError, "none.onnx", load, "none.onnx")


def test_damaged_files_give_typed_errors() -> None:
    damaged.run(600, 0)


@cases("name", "LSTM(8, 5)", "Upsample(scale_factor=2.3, mode='bilinear')", "x.topk(2, -1)")
def test_what_pytorch_exports_is_as_there(name: str) -> None:
    pytest.importorskip("torch")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    [(make, operands)] = [each[1:] for each in exports.cases() if each[0] == name]
    assert exports.difference(make, operands, captured=True) is None


def test_names_of_lengths_are_for_inputs_passed_by_name() -> None:
    step = ml.capture(load(NETWORK), dynamic_axes={"x": ("batch", None, None, None)})
    x = ml.asarray(X)
    assert step(x=x).shape[0] == x.shape[0]
    refuses(ArgumentError, "dynamic_axes= names 'x', but the arguments of", step, x)
