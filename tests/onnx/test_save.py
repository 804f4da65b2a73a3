"""Functions as ONNX files: read back they make the same bits, by ONNX's own ops nearly the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
import mlvm.onnx.graph
from mlvm.core.op import OPS
from mlvm.core.types import DType
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tree import flatten, named_tensors, replace
from mlvm.onnx import load, save, writing
from mlvm.onnx.bodies import BODIES
from tests.brief import Fn, Patch, cases, refuses, with_long
from tests.cases import CASES as CASES_OF_OPS
from tests.onnx.making import constant, graph, model, node, value
from tests.trees import arrays, bits

F = "f32"


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """An array of small numbers, none of them 0 or near an integer."""
    x = np.random.default_rng(seed).uniform(-2, 2, shape)
    return np.where(abs(x) < 0.1, 0.3, x).astype("f4")


X, Y, V = draw((3, 4)), draw((3, 4), seed=1), draw((4,), seed=2)
IMAGES, KERNEL = draw((2, 6, 5, 3)), draw((3, 2, 3, 4), seed=5)


def one(name: str, **attributes: Any) -> Fn:
    """A function of one op."""
    op = one_op(name, **attributes)
    return lambda *xs: apply(op, *map(ml.asarray, xs))


KINDS = ("bool", "signed", "unsigned", "float")


def cases_of_ops() -> dict[str, tuple[Any, ...]]:
    """The cases of each op with a form, `add-0`: numbers that ONNX has, in f32 for f64."""
    by_name: dict[str, tuple[Any, ...]] = {}
    for name in BODIES:
        for i, case in enumerate(CASES_OF_OPS[name]):
            dtypes = [x.dtype for x in case.inputs] + [case.attributes.get("dtype") or "f32"]
            if case.inputs and all(DType.of(x, in_bits=True).kind in KINDS for x in dtypes):
                with np.errstate(over="ignore"):
                    xs = [np.asarray(x, {"f8": "f4"}.get(x.dtype.str[1:])) for x in case.inputs]
                by_name[f"{name}-{i}"] = one(name, **case.attributes), *xs
    return by_name


def loss(w: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.tanh(ml.layer_norm(ml.gelu(x @ w), ml.ones(4), ml.zeros(4), eps=1e-5)) ** 2)


def of_images(kernel: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
    y = ml.conv2d(x, kernel, stride=(2, 1), padding=((1, 1), (1, 0)))
    y = ml.avg_pool2d(ml.max_pool2d(y, window=(2, 2), stride=(1, 1), padding=((0, 0), (0, 0))),
                      window=(2, 1), stride=(1, 2), padding=((1, 0), (0, 0)))  # fmt: skip
    return ml.sum(y * y)


def depthwise(kernel: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.conv2d(x, kernel, groups=3, dilation=(2, 1), stride=2) ** 2)


def of_volumes(kernel: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.conv3d(x, kernel, groups=2, stride=(1, 2, 1)) ** 2)


def branch(x: ml.Tensor) -> Any:
    small = ml.cond(ml.sum(x) > 0, lambda x: x * 2, lambda x: x - 1, x)
    return ml.cond(ml.max(small) > 100, lambda x: ml.exp(x), lambda x: small + x, x)


def loop(x: ml.Tensor) -> Any:
    x, n = ml.while_loop(
        lambda c: ml.sum(ml.abs(c[0])) < 100.0, lambda c: (c[0] * 1.5, c[1] + 1), (x, ml.asarray(0))
    )
    total = ml.fori_loop(0, 4, lambda i, y: y + ml.take(x, i % 3, axis=0), ml.zeros(4))
    last, rows = ml.scan(lambda carry, row: (carry * 0.5 + row, ml.tanh(carry)), ml.zeros(4), x)
    return {"x": x, "n": n, "total": total, "rows": (last, rows)}


@ml.subroutine
def twice(x: ml.Tensor) -> ml.Tensor:
    return ml.sin(x) * 2


def scanned(w: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
    last, _ = ml.scan(lambda h, row: (ml.tanh(h @ w + row), None), ml.zeros(4), x)
    return ml.sum(last)


OF_OPS = cases_of_ops()
CASES: dict[str, tuple[Any, ...]] = {
    **OF_OPS,
    "hypot of large ones": (one("hypot"), X * 1e30, Y * 1e30),
    "hypot of extremes": (one("hypot"), V[:2] * np.inf, np.zeros(2, "f4")),
    **{f"beyond the range of {dtype}": (one("astype", dtype=DType.named(dtype)), X * 1e19)
       for dtype in ("u8", "i8", "u16", "i16", "u32", "i32", "i64")},
    "a dilated pool": (lambda x: ml.max_pool2d(x, (2, 2), stride=1, dilation=(2, 1)), IMAGES),
    "a depthwise convolution": (
        ml.grad(depthwise),
        draw((2, 3, 1, 6)), IMAGES),
    "volumes": (
        ml.value_and_grad(of_volumes, argnums=(0, 1)),
        draw((2, 2, 1, 1, 4)), draw((1, 3, 4, 3, 2))),
    "unpack four bits": (lambda x: x + ml.astype(ml.asarray([[1, -2, 3, 4]], dtype="i4"), F), X),
    "gradient of a network": (ml.value_and_grad(loss), draw((4, 4)), X),
    "gradient of images": (ml.value_and_grad(of_images, argnums=(0, 1)), KERNEL, IMAGES),
    "gradient of a scan": (ml.value_and_grad(scanned), draw((4, 4)), X),
    "branches": (branch, X),
    "loops": (loop, X),
    "functions": (lambda x: twice(twice(x) + 1), X),
    "a tree": (lambda tree, *, scale: {"y": tree["a"] * scale, "same": tree["a"]}, {"a": X}),
    "constants": (lambda x: x + ml.arange(4) * ml.eye(3, 4) + ml.linspace(0, 1, 4), X),
    "a view": (lambda x: ml.sum(ml.reshape(x, (6, 2)) * 2, axis=0), X),
}  # fmt: skip


def close(a: Any, b: Any, by: float = 1e-6) -> bool:
    scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.allclose(a, b, rtol=by, atol=2 * by * scale, equal_nan=True)
    )


def arrays_of(args: Any) -> list[np.ndarray[Any, Any]]:
    ends = {True: None, False: True}
    pairs = flatten(list(args), ends=lambda x: ends[isinstance(x, (list, dict))])[0]
    return [np.asarray(x) for _, x in pairs]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Any]:
    """Saves a case: the path, the arrays of its inputs, and the results."""

    def saves(fn: Any, *args: Any) -> Any:
        kwargs: Any = {"scale": 2.0} if isinstance(args[0], dict) else {}
        path = tmp_path / "it.onnx"
        save(fn, args, path, **kwargs)
        tensors = replace(ml.asarray, list(args), np.ndarray)
        return path, arrays_of(args), arrays(fn(*tensors, **kwargs))

    return saves


def require_same_there(path: Path, inputs: Any, expected: Any, by: float = 1e-6) -> None:
    """Check the file by ONNX, and ONNX Runtime's results of it, where these are installed."""
    try:
        onnx, runtime = map(importlib.import_module, ("onnx", "onnxruntime"))
    except ImportError:
        return
    onnx.checker.check_model(str(path), full_check=True)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    results = session.run(None, dict(zip(names, inputs, strict=True)))
    assert all(close(x, y, by) for x, y in zip(results, expected, strict=True))


WIDE_BORDERS = ("max_pool2d-0", "max_pool2d-2", "avg_pool2d-0", "avg_pool2d-2")
"""Whose padding is as wide as the window, which ONNX Runtime does not take."""


@pytest.mark.parametrize("name", CASES)
def test_read_back_it_makes_the_same_bits(name: str, saved: Fn, monkeypatch: Patch) -> None:
    path, inputs, expected = saved(*CASES[name])
    model = load(path)
    for fn in (model, ml.capture(model)):
        assert bits(fn(*inputs)) == bits(expected)
    monkeypatch.setattr(mlvm.onnx.graph, "own_op", lambda _: None)
    plain = load(path)  # by what stands there for others
    for x, y in zip(arrays(plain(*inputs)), expected, strict=True):
        assert close(x, y)
    if name not in WIDE_BORDERS:
        require_same_there(path, inputs, expected)


DTYPES = ("f64", "i8", "u8", "f16", "i16", "u16", "i32", "u32", "i64", "u64", "bool", F)
UNORDERED = {"pow", "max", "min", "argmax", "argmin", "sort", "argsort", "top_indices"}


def in_dtype(name: str, dtype: str) -> tuple[Any, ...] | None:
    """A case whose operands of the first one's dtype are of another; None where it takes none."""
    fn, *args = CASES[name]
    own = args[0].dtype
    cast = [
        np.asarray(ml.astype(ml.asarray(abs(x) if dtype[0] == "u" else x), DType.named(dtype)))
        if x.dtype == own and own.kind != "b"
        else x
        for x in args
    ]
    try:
        fn(*cast)
    except ml.errors.MlvmError:
        return None
    return fn, *cast


def test_forms_in_other_dtypes_are_those_that_onnxruntime_runs(
    saved: Callable[..., Any], monkeypatch: Patch
) -> None:
    """Each op in a dtype or two, and in those without a kernel; u64 has no order then."""
    firsts = [name for name in OF_OPS if name.endswith("-0")]
    turns = with_long((7,), (0, 7))
    picks = [(name, DTYPES[(i * 5 + k) % 12]) for i, name in enumerate(firsts) for k in turns]
    names = "negative var atan2 pow argmax where matmul max sum remainder floor_divide clip"
    picks += [(f"{name}-0", dtype) for name in names.split() for dtype in DTYPES]
    monkeypatch.setattr(mlvm.onnx.graph, "own_op", lambda _: None)
    for name, dtype in dict.fromkeys(picks):
        case = in_dtype(name, dtype)
        if case is None:
            continue
        if dtype == "u64" and name[:-2] in UNORDERED:
            refuses(ml.errors.ModelError, "of u64, cannot be expressed in ONNX", saved, *case)
            continue
        path, inputs, expected = saved(*case)
        by = 1e-2 if dtype == "f16" else 1e-5
        for x, y in zip(arrays(load(path)(*inputs)), expected, strict=True):
            assert close(x, y, by), (name, dtype, x, y)
        if name not in WIDE_BORDERS:
            require_same_there(path, inputs, expected, by)


def test_every_form_has_a_case() -> None:
    of_lengths = {"arange", "eye", "linspace", "zeros"}  # else they are constants; see `formulas`
    assert BODIES.keys() - {name.split("-")[0] for name in OF_OPS} == {*of_lengths, "unpack"}
    assert BODIES.keys() <= OPS.keys()


@ml.subroutine
def endless(x: ml.Tensor) -> Any:
    return ml.cond(ml.sum(x) > 9, lambda x: x, lambda x: endless(x + 1), x)


def updated(x: ml.Tensor) -> ml.Tensor:
    x += 1.0
    return x


def checked(x: ml.Tensor) -> ml.Tensor:
    ml.check(ml.sum(x) > 0, "it is positive")
    return x * 2


def doubled(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.while_loop(lambda x: ml.sum(x) < 9, lambda x: x * 2, x))


REFUSED: dict[str, tuple[Any, str]] = {
    "a draw": (
        lambda x: ml.random.normal(x.shape, key=ml.random.key(0)) + x,
        r"test_save.py:\d+: normal cannot be expressed in ONNX; .* after model.eval\(\)",
    ),
    "dropout": (
        lambda x: ml.nn.Dropout(0.5)(x),
        "cannot be expressed in ONNX; .* after model.eval",
    ),
    "a batch norm": (ml.nn.BatchNorm(4), "updated in place, .* after model.eval"),
    "an inverse": (
        lambda x: ml.linalg.inv(x[:3, :3]),
        r"test_save.py:\d+: inv cannot be expressed in ONNX",
    ),
    "an update": (updated, r"test_save.py:\d+: an f32\[3,4\] is updated in place, an argument of"),
    "a check": (checked, r"test_save.py:\d+: machine.check cannot be expressed in ONNX"),
    "complex numbers": (
        lambda x: ml.abs(ml.astype(x, "c64")),
        r"astype of c64 cannot be expressed in ONNX",
    ),
    "a recursion": (
        endless,
        r"the function 'endless', which calls itself, cannot be expressed in ONNX",
    ),
    "no tensor": (lambda x: 3, "expected a function that returns a tensor"),
    "unknown turns": (
        ml.grad(doubled),
        r"test_save.py:\d+: residuals.push cannot be expressed in ONNX",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_file_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.onnx"
    path.write_bytes(b"before")
    fn, text = REFUSED[name]
    refuses(ml.errors.ModelError, text, save, fn, [X], path)
    assert [each.name for each in tmp_path.iterdir()] == ["it.onnx"]
    assert path.read_bytes() == b"before"


def test_a_path_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("none/x.onnx", "file/x.onnx", ""):
        error = refuses(OSError, "", save, ml.tanh, [ml.ones(2)], tmp_path / place)
        assert error.filename == str(tmp_path / place)
    refuses(
        ml.errors.ArgumentError,
        "a text or a path of a file, got 5",
        save,
        ml.tanh,
        [ml.ones(2)],
        cast(Any, 5),
    )
    refuses(OSError, "not a regular file", load, tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_a_loaded_model_keeps_the_names_of_its_file(tmp_path: Path) -> None:
    """Also those that no parameter of Python's may have."""
    rows = value("rows.1", 1, ("n", 4))
    nodes = [node("MatMul", "rows.1 w", "m"), node("Add", "m other", "logits:0"),
             node("Neg", "m", "w_2")]  # fmt: skip
    inputs = [rows, value("other", 1, ("n", 2))]
    data = model(graph(nodes, inputs, "logits:0 w_2", [constant("w", draw((4, 2)))]))
    net, path, args = load(data), tmp_path / "it.onnx", [draw((3, 4)), draw((3, 2))]
    for fn in (net, ml.capture(net)):
        save(fn, args, path, dynamic_axes={"rows.1": {0: "n"}, "other": {0: "n"}})
        again = load(path)
        assert again.inputs == {"rows.1": "f32[n,4]", "other": "f32[n,2]"}
        assert [*again.outputs] == ["logits:0", "w_2"]
        assert bits(again(*args)) == bits(net(*args))
    by_name: Any = dict(zip(net.inputs, args, strict=True))
    save(net, [], path, **by_name)
    assert [*load(path).inputs] == ["rows.1", "other"]
    refuses(ml.errors.ArgumentError, "got 3 inputs", save, net, [*args, X], path)


def test_names_of_weights_do_not_grow_with_each_round_trip(tmp_path: Path) -> None:
    net: Any = ml.nn.Sequential(ml.nn.Linear(2, 3), ml.relu, ml.nn.Linear(3, 2))
    names = []
    for _ in range(3):
        save(net, [ml.TensorType(F, (1, 2))], tmp_path / "it.onnx")
        net = load(tmp_path / "it.onnx")
        names.append([*net.state()])
    assert names[0] == names[1] == names[2]
    save(ml.nn.Sequential(net, ml.relu), [ml.TensorType(F, (1, 2))], tmp_path / "it.onnx")
    inner = [path.replace("weights/", "weights/layers_0.") for path in names[0]]
    assert [*load(tmp_path / "it.onnx").state()] == inner


def test_weights_may_lie_beside_the_file(tmp_path: Path) -> None:
    model = ml.nn.Linear(64, 32, key=ml.random.key(0))
    save(model, [ml.TensorType(F, (2, 64))], tmp_path / "it.onnx", external=True)
    assert (tmp_path / "it.onnx").stat().st_size < 2000 < (tmp_path / "it.onnx.data").stat().st_size
    x = ml.asarray(draw((2, 64)))
    read = load(tmp_path / "it.onnx")
    assert np.array_equal(read(x), model(x))
    assert read.inputs == {"x": "f32[2,64]"}
    assert {"kernel"} <= {name.rpartition("/")[2] for name in read.weights}


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16", "i32", "u8"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    w = ml.astype(ml.asarray(abs(X) * 2), dtype)
    save(lambda x: x * w + w[0], [w], tmp_path / "it.onnx")
    read = load(tmp_path / "it.onnx")
    assert read.outputs == {"output": f"{dtype}[3,4]"}
    assert np.array_equal(ml.astype(read(w), "f64"), ml.astype(w * w + w[0], "f64"))


@cases("dtype, bound", ("u8", "Clip"), ("i32", "Clip"), ("i64", "Max"))
def test_a_float_is_bounded_before_it_becomes_an_integer(dtype: str, bound: str) -> None:
    """ONNX leaves open what a float beyond the range becomes; `load` takes the nearest."""
    function = lambda x: ml.astype(x, dtype)  # noqa: E731
    [body] = writing._Model(function, [X], {}, {}, {}).functions.values()
    assert bound in [each["op_type"] for each in body["node"]]


def test_what_autocast_makes_computes_in_f32_where_others_run_it(
    saved: Callable[..., Any], monkeypatch: Patch
) -> None:
    layers = ml.nn.Linear(4, 8, key=ml.random.key(0)), ml.nn.Linear(8, 3, key=ml.random.key(1))

    @ml.autocast("bfloat16")
    def net(x: ml.Tensor) -> ml.Tensor:
        y = layers[1](ml.silu(layers[0](x)))
        y = ml.cond(ml.sum(y) > 0, lambda: y * 2, lambda: -y)
        return ml.softmax(y)

    bodies = writing._Model(net, [X], {}, {}, {}).functions
    op_types = {x["name"]: [each["op_type"] for each in x["node"]] for x in bodies.values()}
    assert op_types["matmul"] == ["Cast", "Cast", "MatMul", "Cast"]
    path, inputs, [expected] = saved(layers[0], X)
    with ml.autocast("bfloat16"):
        assert close(np.asarray(load(path)(*inputs)), np.asarray(layers[0](*inputs)))
        assert not np.array_equal(load(path)(*inputs), expected)
    path, inputs, [expected] = saved(net, X)
    assert np.array_equal(load(path)(*inputs), expected)
    monkeypatch.setattr(mlvm.onnx.graph, "own_op", lambda _: None)
    assert close(np.asarray(load(path)(*inputs)), expected)
    require_same_there(path, inputs, [expected])


@pytest.mark.parametrize("dtype", ["i4", "u4", "i2", "u2", "f8e4m3", "f8e5m2", "f4e2m1"])
def test_weights_of_few_bits_stay_so(dtype: str, tmp_path: Path) -> None:
    q, scale = ml.quantize_groups(ml.asarray(draw((6, 64)) / 3), dtype, group=32)
    path, x, places = tmp_path / "it.onnx", draw((3, 64)), np.array([4, 0])

    def net(x: ml.Tensor, places: ml.Tensor) -> Any:
        return ml.quantized_matmul(x, q, scale), ml.dequantize_rows(places, q, scale)

    save(net, [x, places], path, dynamic_axes={"x": {0: "n"}})
    read = load(path)
    dtypes = [x.type.dtype.name for x in named_tensors(read, buffers=True).values()]
    assert dtypes.count(dtype) == 1
    for a, b in zip(read(x[:2], places), net(ml.asarray(x[:2]), ml.asarray(places)), strict=True):
        assert np.array_equal(a, b)
    refuses(ml.errors.ModelError, "'q' is .*only weights", save, lambda q: ml.dequantize(q, scale),
            [q], path)  # fmt: skip
    if dtype != "f4e2m1":  # which ONNX Runtime does not cast
        expected = arrays(net(ml.asarray(x), ml.asarray(places)))
        require_same_there(path, [x, places], expected)


def heads(x: ml.Tensor) -> Any:
    batch, length, width = x.shape
    y = ml.permute_dims(ml.reshape(x, (batch, length, 2, width // 2)), (0, 2, 1, 3))
    mask = ml.where(ml.tril(ml.ones((length, length))) > 0, 0.0, -1e9)
    y = ml.softmax(y @ ml.matrix_transpose(y) + mask) @ y
    flat = ml.reshape(ml.permute_dims(y, (0, 2, 1, 3)), (batch * length, width))
    return flat, ml.arange(length), ml.zeros((length, 3)), ml.mean(y)


def convnet(x: ml.Tensor) -> ml.Tensor:
    y = ml.relu(ml.conv2d(x, ml.ones((3, 3, 3, 4)), stride=2, padding="SAME"))
    return ml.mean(ml.max_pool2d(y, (2, 2)), axis=(1, 2))


def along(x: ml.Tensor) -> Any:
    return (
        ml.var(x, axis=0),
        ml.sort(x, axis=0),
        x[::-1],
        x[1:-1],
        ml.concat([x, x]),
        x / x.shape[0],
    )


def images_loss(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(convnet(x) ** 2)


def choice(x: ml.Tensor) -> Any:
    return ml.cond(ml.sum(x) > 0, lambda x: x[1:] * 2, lambda x: x[:-1], x)


def mean_loss(x: ml.Tensor) -> ml.Tensor:
    return ml.mean(ml.tanh(ml.layer_norm(x, ml.ones(4), ml.zeros(4), eps=1e-5)) ** 2)


def formulas(x: ml.Tensor) -> Any:
    """Sizes and numbers that are no sums of products."""
    n = x.shape[0]
    y = ml.copy(x)
    y[1 : n // 2] = 0.5
    halves = ml.concat([x[: n // 2], x[::2], x[-(-n // 3) :: -2]])
    scaled = x * (n // 3) - n % 4 + abs(2 - n) / (2.0**100 * n) + n**2 + n**-0.5
    counted = ml.zeros((n, 2)), ml.eye(n, k=n // 2), ml.linspace(0.3, 1.0, n), ml.arange(n, 0, -1)
    return ml.std(x, axis=0, correction=1), y, halves, scaled, ml.median(x), counted


def turns_loss(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(ml.fori_loop(0, x.shape[0] - 1, lambda i, s: ml.tanh(s + x[i]), x[-1]))


def dead_decision(x: ml.Tensor) -> ml.Tensor:
    y = ml.exp(x) if x.shape[0] > 100 else x
    print(f"{len(x)} rows of {y}")
    return x * 2.0


ROWS = {"x": {0: "n"}}
OPEN: dict[str, tuple[Any, Any, Any, list[Any], str]] = {
    "heads": (heads, draw((2, 5, 8)), {"x": {0: "b", 1: "n"}}, [draw((1, 3, 8)), draw((4, 9, 8))],
              "f32[b*n,8]"),
    "images": (convnet, draw((1, 8, 8, 3)), {"x": {0: "b", 1: "4*h", -2: "4*w"}},
               [draw((2, 12, 4, 3))], "f32[b,4]"),
    "rows": (along, X, ROWS, [draw((9, 4)), draw((4, 4))], "f32[4]"),
    "a gradient": (ml.grad(mean_loss), X, ROWS, [draw((7, 4))], "f32[n,4]"),
    "a gradient of images": (ml.grad(images_loss), draw((1, 8, 8, 3)), ROWS,
                             [draw((3, 8, 8, 3))], "f32[n,8,8,3]"),
    "a scan": (lambda x: ml.scan(lambda c, row: (c * 0.5 + row, c), ml.zeros(4), x)[1], X, ROWS,
               [draw((6, 4)), draw((1, 4))], "f32[n,4]"),
    "formulas": (formulas, X, ROWS, [draw((4, 4)), draw((9, 4)), draw((23, 4))], "f32[4]"),
    "a gradient of a loop": (ml.grad(turns_loss), X, ROWS, [draw((9, 4))], "f32[n,4]"),
    "halves": (lambda x: x[: x.shape[0] // 2], X, ROWS, [draw((9, 4))], "f32[floordiv(n, 2),4]"),
    "a decision about dead code": (dead_decision, X, ROWS, [draw((9, 4))], "f32[n,4]"),
    "five lengths": (lambda x: ml.sum(x, axis=4) * x.shape[0], draw((2, 3, 4, 5, 6)),
                     {"x": tuple("abcde")}, [draw((3, 2, 2, 4, 7))], "f32[a,b,c,d]"),
    "a choice": (choice, X, ROWS, [X[:2], -abs(Y)], "f32[n - 1,4]"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_lengths_are_left_open(name: str, tmp_path: Path) -> None:
    """At any length the same, here and by ONNX Runtime, where it is."""
    fn, x, axes, others, output = OPEN[name]
    save(fn, [x], path := tmp_path / "it.onnx", dynamic_axes=axes)
    model = load(path)
    assert next(iter(model.outputs.values())) == output
    captured = ml.capture(model)
    for other in (x, *others):
        expected = arrays(fn(ml.asarray(other)))
        for run in (model, captured):
            assert bits(run(other)) == bits(expected)
        require_same_there(path, [other], expected)


def test_axes_that_cannot_be_open_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.onnx"
    images = draw((1, 8, 8, 3))
    for fn, axes, text in (
        (convnet, {0: "b", 1: "h"}, r"test_save.py:\d+ is not valid for other lengths: .* of h;"),
        (
            lambda x: x[: len(x) // 2],
            {0: "b"},
            r"test_save.py:\d+ is not valid for other lengths.* of b; write x.sh",
        ),
        (lambda x: x[:100], {0: "b"}, r"test_save.py:\d+ is not valid for other lengths"),
        (
            lambda x: x if x.shape[0] < 6 else ml.exp(-x),
            {0: "b"},
            r"test_save.py:\d+ is not valid for other lengths",
        ),
        (lambda x: x[:10] + 1, {0: "b"}, r"test_save.py:\d+ is not valid for other lengths"),
        (lambda x: x[:100] + 1, {0: "b"}, r"test_save.py:\d+ is not valid for other lengths"),
        (lambda x: x * (len(x) // 32), {0: "b"}, r"the value of b; write x.shape\[0\] for len"),
        (lambda x: ml.grad(ml.prod)(x), {0: "b"}, r"test_save.py:\d+: cumulative_prod, along an"),
        (lambda x: x[:, 0, 0, 0] * (np.arange(len(x)) > 0), {0: "b"}, r"without numpy"),
        (
            lambda x: x if type(x.shape[0]) is int else -x,
            {0: "b"},
            r"type\(n\).* isinstance\(n, int",
        ),
        (lambda x: x * (x.shape[0] & 3), {0: "b"}, r"and_ of a length cannot be expressed in ONNX"),
    ):
        refuses(ml.errors.ModelError, text, save, fn, [images], path, dynamic_axes={"x": axes})
    with pytest.raises(ml.errors.ShapeError, match="reshape") as caught:
        save(lambda x: ml.reshape(x, (8, 24)), [images], path, dynamic_axes={"x": {0: "b"}})
    assert caught.value.__notes__ == ["traced with dynamic_axes at b = 4"]
    bad: tuple[tuple[Any, str], ...] = (
        ({"y": {0: "b"}}, "unknown input 'y'; the inputs are x"),
        ({"x": {4: "b"}}, "got 4"),
        ({"x": {0: "2 b"}}, "'2 b' is not a name"),
        ({"x": {1: "3*b"}}, r"a multiple of 3 for 3\*b, got axis 1 of x, which is 8"),
        ({"x": [0]}, "expected a name or None for each axis of x"),
        ({"x": ("b",)}, r"each axis of x, f32\[1,8,8,3\], as in .*, got \('b',\)"),
        ({"x": dict(enumerate("abcd")), "y": {0: "e"}}, "unknown input 'y'"),
    )
    for option, text in bad:
        refuses(ml.errors.ArgumentError, text, save, ml.sin, [images], path, dynamic_axes=option)
    refuses(
        ml.errors.ArgumentError, r"list: for 'f32\[2\]' write \[ml.T", save, ml.sin, "f32[2]", path
    )
    refuses(ml.errors.ArgumentError, r"list, \[x\] for one", save, ml.sin, cast(Any, images), path)
    refuses(
        ml.errors.ArgumentError, r"argument opset=: .* opset 20", save, convnet, [X], path, opset=9
    )
    assert not path.exists()
