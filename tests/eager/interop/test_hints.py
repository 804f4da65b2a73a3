"""Names of other libraries say what they are called here."""

from __future__ import annotations

import functools
import math
import pydoc
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mlvm
import mlvm.eager as ml
from mlvm.eager.interop.hints import hints, rows
from mlvm.machines.gpu.devices import why_not
from tests.brief import refuses

NAMESPACES = {name: getattr(ml, name) for name in dir(ml)}
NAMESPACES = {name: each for name, each in NAMESPACES.items() if isinstance(each, ModuleType)}
NAMESPACES["nn.init"] = ml.nn.init
TABLE = hints()
METHODS, OF_MODULES = TABLE["mlvm.eager.Tensor"], TABLE["mlvm.eager.nn.Module"]
OWNERS = [owner for owner in TABLE if owner.rpartition(".")[2][0].isupper()]
FUNCTIONS = [owner for owner in TABLE if owner.startswith("mlvm.") and owner not in OWNERS]


OWN_LAYERS: dict[str, Callable[[], Any]] = {
    "Embedding": lambda: ml.nn.Embedding(3, 3),
    "EmbeddingBag": lambda: ml.nn.EmbeddingBag(3, 3),
    "Linear": lambda: ml.nn.Linear(3, 3),
    "PReLU": ml.nn.PReLU,
    "GroupNorm": lambda: ml.nn.GroupNorm(1, 3),
    **{
        f"{n}Norm": partial(getattr(ml.nn, f"{n}Norm"), 3)
        for n in ("Batch", "Instance", "Layer", "RMS")
    },
    **{f"Conv{n}d": partial(getattr(ml.nn, f"Conv{n}d"), 3, 4, 3) for n in (1, 2, 3)},
}
"""The layers whose fields have hints of their own."""


def operands(owner: str, code: str) -> dict[str, Any]:
    """Return the values of the names in the code of hints. Write the file if the code has one."""
    x = ml.asarray([[1.0, -2.0, 3.0], [4.0, 0.5, -6.0], [2.0, 1.0, 0.25]])
    vector = ml.asarray([3.0, 1.0, 2.0])
    model = OWN_LAYERS.get(owner.rpartition(".")[2], lambda: ml.nn.Linear(3, 3))()
    trained = ml.nn.Linear(3, 3)
    optimizer = ml.optim.SGD(trained, 0.1)
    scale: Any = ml.optim.LossScale()
    average = ml.optim.EMA(model)
    states: dict[str, Any] = {
        "Optimizer": optimizer,
        "MultiSteps": optimizer,
        "EMA": average,
        "LossScale": scale,
    }
    state: Any = states.get(owner.rpartition(".")[2], model)
    if "(file" in code:
        ml.save("file", optimizer if state is optimizer else model)
    layer, scale = trained, scale if "LossScale" in owner else 2.0
    z, c2, padding, update, weights = x * x + 1.0, x < -1, x < 0, x[:1], ml.ones((3, 3))
    u, p, i, j = (ml.asarray(each) for each in ([0.5], [0.25, 0.5], [1, 0, 2], [2, 1]))
    labels, indices, cov = ml.asarray([0, 1, 2]), ml.asarray([[0, 2, 1]]), ml.eye(3)
    edges, keys, arena = ml.sort(vector), ml.random.split(ml.random.key(0), 2), ml.default_arena()
    gradients, args, rows = {"kernel": x, "bias": vector}, (x,), [[x, x], [x, x]]
    make, shape, widths = (lambda key: ml.random.normal(3, key=key)), (3, 3), ((0, 0), (1, 1))
    name, iterable, path, text, file = "x", range(3), "path", "text", "file"
    return {
        **dict.fromkeys(["x", "weight", "points", "theta", "logits", "x1", "angle"], x),
        **dict.fromkeys(["y", "x2"], x.T),
        **dict.fromkeys(["c", "bias", "s", "major", "minor"], vector),
        **dict.fromkeys(["mask", "c1"], x > 0),
        **dict.fromkeys(["seed", "m", "axis", "start", "end", "length", "degree", "groups"], 1),
        **dict.fromkeys(["n", "df", "num", "channels", "features"], 3),
        **dict.fromkeys(["k", "stop"], 2),
        **dict.fromkeys(["b", "r", "value", "std", "alpha"], 2.0),
        **dict.fromkeys(["q", "t", "rate", "temperature"], 0.5),
        **dict.fromkeys(["min", "low"], -1.0),
        **dict.fromkeys(["max", "high", "margin", "mean", "loc", "most"], 1.0),
        "ml": ml,
        "mlvm": mlvm,
        "math": math,
        "numpy": np,
        "vm": ml.default_vm(),
        "dtype": ml.float32,
        "fn": ml.sin,
        "arrays": {**state.state()},
        "default": 0.0,
        **locals(),
    }


_VECTOR: Any = {"x": ml.asarray([3.0, 1.0, 2.0]), "y": ml.asarray([0.5, 2.0])}
_DEEP: Any = {"x": ml.ones((2, 2, 3)), "arrays": [ml.ones((2, 2, 1))] * 2}
OTHER_OPERANDS: dict[str, dict[str, Any]] = {
    "ml.concat([x, ml.asarray([y], dtype=x.dtype)])": {**_VECTOR, "y": 4.0},
    "functools.reduce(lambda y, c: y * x + c, p)": {"functools": functools},
    "ml.where(s.sign < 0, ml.nan, s.logabsdet)": {"s": ml.linalg.slogdet(ml.eye(2))},
    "q * ml.sign(ml.linalg.diagonal(r))": dict(zip("qr", ml.linalg.qr(ml.eye(2)), strict=True)),
    "ml.random.choice(len(p), n, replace=False, p=p)": {"n": 2},
    "1 + ml.floor(ml.random.exponential(shape) / -math.log1p(-p))": {"p": 0.5},
    "ml.unflatten(x, axis, shape)": {"shape": (3, 1)},
    **{
        f"ml.scatter(x, axis, indices, values{more})": {
            "indices": ml.asarray([[0], [2], [1]]),
            "values": 1.0,
        }
        for more in ("", ', reduce="add"')
    },
    **{f"ml.{each}(x, kth)": {"kth": 1} for each in ("partition", "argpartition")},
    "ml.multigammaln(x, d)": {"d": 2},
    "ml.concat([x[:i], ml.asarray([y]), x[i:]])": {**_VECTOR, "i": 1, "y": 4.0},
    "ml.cumulative_sum(x)": _VECTOR,
    "ml.cumulative_sum(ml.where(ml.isnan(x), 0.0, x))": _VECTOR,
    "x[:, None] ** ml.arange(n - 1, -1, -1)": _VECTOR,
    "x[:, None] ** ml.arange(n)": _VECTOR,
    "ml.split(x, [i, j])": {"i": 1, "j": 2},
    "ml.split(x, n, axis=2)": _DEEP,
    "i * m + j": {"j": 0},
    "ml.take(x, start + ml.arange(n), axis=0)": {"start": 0},
    "numpy.polyfit(x.numpy(), y.numpy(), degree)": _VECTOR | {"y": _VECTOR["x"]},
    "x[mask] = y": {"y": 2.0},
    "ml.where(c, x, y)": {"c": ml.asarray([True, False, True])},
    "ml.check(c, text)": {"c": ml.asarray([True, True])},
    "x * ml.dropout(ml.ones((n, 1, c)), rate)": {"c": 3},
    "x * ml.dropout(ml.ones((n, 1, 1, c)), rate)": {"c": 3},
    "x * ml.dropout(ml.ones((n, 1, 1, 1, c)), rate)": {"c": 3},
    'ml.quantize(model, "i4")': {"model": ml.nn.Linear(2, 2)},
    "model.named_parameters()[path]": {"path": "kernel"},
    **{
        f"numpy.{f}(x.numpy(), y.numpy())": dict.fromkeys("xy", ml.asarray(6))
        for f in ("gcd", "lcm")
    },
    **{
        f"numpy.testing.{f}(x, y)": _VECTOR | {"y": _VECTOR["x"]}
        for f in ("assert_allclose", "assert_array_equal")
    },
}
"""What code of a hint means by its names, where that is not what other code means by them."""

WRITTEN_OUT: dict[str, str] = {
    "ml.asarray(numpy.frombuffer(...))": "ml.asarray(numpy.frombuffer(bytes(x), dtype='f4'))",
    "ml.asarray(numpy.fromfile(...))": "ml.asarray(numpy.fromfile(path))",
    "ml.asarray(numpy.loadtxt(...))": 'ml.asarray(numpy.loadtxt(["1 2"]))',
    "ml.grad(lambda model: ...)(model)": "ml.grad(lambda model: ml.sum(model(x)))(model)",
    'ml.nn.Upsample(..., mode="bilinear", align_corners=True)': "ml.nn.Upsample(scale=2)",
    "optimizer.search(lambda: ml.value_and_grad(loss_of)(params))": (
        "ml.optim.LBFGS(x, 0.1).search(lambda: ml.value_and_grad(lambda x: ml.sum(x * x))(x))"
    ),
    "ml.onnx.load(file)": 'ml.onnx.save(model, (x,), "m.onnx"); ml.onnx.load("m.onnx")',
    "python -m mlvm info": "",
    "python -m mlvm serve --library FILE.so": "",
    "python -m mlvm show SCRIPT": "",
}
"""Code with what `...` stands for, and the two lines for a shell."""

WALK = {(owner, code): name for owner, name, hint in rows() for code in re.findall("`(.+?)`", hint)}


_IN_PROCESS = re.compile(r"device=|vm\(\)\.trace")
_LOCAL = pytest.mark.local(reason="only a VM of this process has a device, or a trace")


@pytest.mark.parametrize(
    ("owner", "code"),
    [
        pytest.param(*each, id=" ".join(each), marks=[_LOCAL] * bool(_IN_PROCESS.search(each[1])))
        for each in WALK
    ],
)
@pytest.mark.usefixtures("folder_of_file")
def test_the_code_of_a_hint_runs(owner: str, code: str) -> None:
    if "cuda:" in code and (why := why_not("opencl")):  # which takes its place
        pytest.skip(why)
    np.zeros(4).tofile("path")
    names = {**operands(owner, code), **OTHER_OPERANDS.get(code, {}), "breakpoint": list}
    written = WRITTEN_OUT.get(code, code).replace("axis=...", "axis=0")
    written = written.replace("cuda:", "opencl:")
    written = written.replace("low=..., high=...", "low=0, high=5")
    assert (
        "..." not in written or "[...]" in written or "x[..., " in written or ")[..., " in written
    )
    if 'axis_name="i"' in code:
        ml.vmap(lambda x: eval(written, {**names, "x": x}), axis_name="i")(names["x"])
    elif written.startswith("with "):
        exec(f"{written}: pass", names)
    else:
        exec(written, names)


def test_code_in_hints_is_between_backticks() -> None:
    for _, name, hint in rows():
        text = re.sub("`.+?`", "", hint)
        assert not re.search(r"\b(ml|x|model|optimizer)\.\w+", text.replace("ml's", "")), (
            name,
            text,
        )


@pytest.mark.parametrize("module", FUNCTIONS)
def test_a_name_from_elsewhere_is_none_of_the_module(module: str) -> None:
    [namespace] = [each for each in (ml, *NAMESPACES.values()) if each.__name__ == module]
    for name, hint in TABLE[module].items():
        with pytest.raises(AttributeError, match=f"^{module} has no {name}; {re.escape(hint)}$"):
            getattr(namespace, name)
        assert not hasattr(namespace, name)


def test_a_method_from_elsewhere_is_none_of_a_tensor() -> None:
    x = ml.ones(2)
    for name, hint in METHODS.items():
        refuses(AttributeError, f"^a Tensor has no {name}; {re.escape(hint)}$", getattr, x, name)


@pytest.mark.local(reason="a VM of another process has no hints")
def test_a_field_from_elsewhere_is_none_of_a_model_or_optimizer() -> None:
    model = ml.nn.Linear(2, 2)
    for owner, section, kind in (
        (ml.nn.ReLU(), "nn.Module", "a ReLU"),
        *[(make(), f"nn.{kind}", "an? " + kind) for kind, make in OWN_LAYERS.items()],
        (ml.optim.Adam(model, 0.1), "optim.Optimizer", "an Adam"),
        (ml.optim.SGD(model, 0.1), "optim.Optimizer", "an SGD"),
        (ml.optim.MultiSteps(ml.optim.SGD(model, 0.1), 2), "optim.MultiSteps", "a MultiSteps"),
        (ml.optim.EMA(model), "optim.EMA", "an EMA"),
        (ml.optim.LossScale(), "optim.LossScale", "a LossScale"),
        (ml.float32, "DType", "a DType"),
        (ml.default_vm(), "VM", "an? \\w+"),
        (ml.capture(ml.sin), "Captured", "a Captured"),
        (ml.Pipeline([1.0], 1), "Pipeline", "a Pipeline"),
        (ml.zeros(3).at[0], "Places", "a Places"),
    ):
        for name, hint in TABLE[f"mlvm.eager.{section}"].items():
            with pytest.raises(AttributeError, match=f"^{kind} has no {name}; {re.escape(hint)}$"):
                getattr(owner, name)


def test_a_constructor_of_the_users_own_has_its_keywords() -> None:
    class Placed(ml.nn.Module):
        def __init__(self, **options: str) -> None:
            self.where = options["device"]

    assert Placed(device="here").where == "here"
    layer, x = ml.nn.TransformerEncoderLayer(2, 1), ml.ones((1, 3, 2))
    padding = x[..., 0] < 1  # what the hint of src_key_padding_mask says
    assert layer(x, mask=ml.logical_not(padding)[:, None, None, :]).shape == (1, 3, 2)


def test_hints_name_devices() -> None:
    for hint in (METHODS["cuda"], OF_MODULES["to"], TABLE["mlvm.eager"]["cuda"]):
        assert 'ml.VM(device="cuda:0")' in hint


def test_help_shows_a_hint() -> None:
    shown = pydoc.plain(pydoc.render_doc(ml.nn.Linear))
    assert f"state_dict\n |      There is none; {OF_MODULES['state_dict']}." in shown


def test_a_module_with_forward_is_told_of_call() -> None:
    class Net(ml.nn.Module):
        def forward(self, x: ml.Tensor) -> ml.Tensor:
            return x

    text = "^Net defines no __call__; rename forward to __call__$"
    refuses(NotImplementedError, text, Net(), ml.ones(2))


def test_a_name_from_elsewhere_is_none_of_a_module() -> None:
    class Scaled(ml.nn.Module):
        def __init__(self) -> None:
            self.weight = ml.ones(2)

    model = ml.nn.Linear(2, 2)
    assert not {*dir(model)} & {*OF_MODULES}
    assert "kernel" in dir(model)
    scaled = Scaled()
    assert "weight" in dir(scaled)
    assert list(scaled.state()) == ["weight"]


X, Y = np.array([3.0, 1.0, np.nan, 2.0]), np.array([[1.0, 2.0], [3.0, 5.0]])
WRITTEN: list[tuple[str, tuple[np.ndarray[Any, Any], ...]]] = [
    ("fliplr", (Y,)),
    ("flipud", (Y,)),
    ("intersect1d", (X[:2], X[1:2])),
    ("setdiff1d", (X[:2], X[1:2])),
    ("union1d", (X[:2], X[1:])),
    ("diagflat", (Y,)),
    ("ediff1d", (Y,)),
    ("isneginf", (np.array([-np.inf, np.inf, 1.0]),)),
    ("isposinf", (np.array([-np.inf, np.inf, 1.0]),)),
    ("nanargmax", (X,)),
    ("nanargmin", (X,)),
    ("nancumsum", (X,)),
    ("nanprod", (X,)),
]


@pytest.mark.parametrize(("name", "arrays"), WRITTEN, ids=[name for name, _ in WRITTEN])
def test_what_to_write_for_a_function_that_there_is_not(
    name: str, arrays: tuple[np.ndarray[Any, Any], ...]
) -> None:
    text = TABLE["mlvm.eager"][name].removeprefix("write ").split(", and ")[0]
    tensors = dict(zip(("x", "y"), map(ml.asarray, arrays), strict=False))
    result = eval(text, {"ml": ml, "math": math, "atol": 1e-8, "rtol": 1e-5, **tensors})
    np.testing.assert_allclose(np.asarray(result), getattr(np, name)(*arrays), rtol=1e-6)


def test_an_assignment_without_effect_is_refused() -> None:
    x: Any = ml.ones((2, 3))
    for name, hint in TABLE["assigned"].items():
        refuses(AttributeError, f"^the {name} of .*; {re.escape(hint)}$", setattr, x, name, None)
    model = ml.nn.Linear(2, 2)
    model.weight = ml.ones(2)  # type: ignore[attr-defined]
    assert "weight" in model.named_parameters()


@pytest.mark.parametrize("name", ["", *NAMESPACES])
def test_a_namespace_lists_what_is_public(name: str) -> None:
    import mlvm.eager.stub  # noqa: F401  (leaves a name in the package)

    module = NAMESPACES[name] if name else ml
    assert sorted(dir(module)) == sorted(module.__all__)
    for each in dir(module):
        path = f"{name}.{each}" if name else each
        assert not isinstance(getattr(module, each), ModuleType) or path in NAMESPACES
