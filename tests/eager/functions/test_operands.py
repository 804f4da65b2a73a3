"""Arrays and lists as operands, as indices, and as what a model is called on."""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import AxisError, DTypeError, ShapeError
from mlvm.core.op import OPS
from mlvm.eager.tensor import primitives
from mlvm.machines.wire import WireVM
from tests.brief import cases, count_calls, refuses

X = np.array([[1.5, -2.0, 3.0], [4.0, 0.5, -6.0]], np.float32)
Y = np.array([2.0, 4.0, 8.0], np.float32)

untyped: Any = ml

OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]


@pytest.mark.parametrize("fn", OPERATORS)
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist])
def test_an_array_is_an_operand(fn: Callable[[Any, Any], Any], kind: Callable[[Any], Any]) -> None:
    for got in (fn(ml.asarray(X), kind(Y)), fn(kind(X), ml.asarray(Y))):
        assert type(got) is ml.Tensor
        np.testing.assert_array_equal(got.numpy(), fn(X, Y), strict=True)


# --- f64 from outside ------------------------------------------------------------------

DATA: Any = np.full((2, 3), 0.1)


def test_a_training_on_f64_data_is_one_in_f32() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))

    def trained(x: Any, y: Any, *, captured: bool) -> list[bytes]:
        first, last = (ml.nn.Linear(n, m, key=ml.random.key(n)) for n, m in ((3, 4), (4, 2)))
        model = ml.nn.Sequential(first, ml.gelu, last)
        optimizer = ml.optim.Adam(model, 0.1)

        def step(x: Any, y: Any) -> Any:
            loss, grads = ml.value_and_grad(lambda m: ml.mean_squared_error(m(x), y))(model)
            optimizer.update(grads)
            return loss

        run = ml.capture(step) if captured else step
        losses = [run(x, y).numpy().tobytes() for _ in range(3)]
        return losses + [p.numpy().tobytes() for p in model.named_parameters().values()]

    narrow = [ml.asarray(each, dtype="f32") for each in (x, y)]
    histories = [trained(x, y, captured=captured) for captured in (False, True)]
    assert histories == [trained(*narrow, captured=False)] * 2


@cases(
    "product, operands",
    (lambda n: ml.ones((n, 3), dtype="f64") @ ml.ones((3, 2)), "matmul(f64[{n},3], f32[3,2])"),
    (lambda n: ml.ones((n, 3)) @ ml.ones((3, 2), dtype="f64"), "matmul(f32[{n},3], f64[3,2])"),
    (lambda n: ml.nn.Linear(n, 2)(ml.ones((1, n), dtype="f64")), "matmul(f64[1,{n}], f32[{n},2])"),
    (
        lambda n: ml.einsum("ij,kj->ik", ml.ones((n, 3), dtype="f64"), ml.ones((2, 3))),
        "matmul(f64[{n},3], f32[2,3])",
    ),
)
def test_the_first_mixed_product_of_a_line_is_told(product: Any, operands: str) -> None:
    with pytest.warns(ml.PrecisionWarning) as records:
        dtypes = {product(n).dtype for n in (101, 102, 101)}
    assert dtypes == {ml.float64}
    assert [str(each.message).partition(" computes")[0] for each in records] == [
        operands.format(n=101)
    ]
    assert records[0].filename == __file__
    assert "ml.astype(x, ml.float32)" in str(records[0].message)


def test_the_way_back_and_pure_products_tell_nothing() -> None:
    w, x = ml.ones((3, 107)), ml.ones((5, 3), dtype="f64")
    line = sys._getframe().f_lineno + 2
    with pytest.warns(ml.PrecisionWarning) as records:
        grads = ml.grad(lambda w: ml.sum((x @ w) ** 2))(w)
    assert [each.lineno for each in records] == [line]
    assert grads.dtype is ml.float32
    with warnings.catch_warnings(action="error"):
        for a, b in (("f64", "f64"), ("f32", "f16"), ("i64", "f64"), ("c64", "f32")):
            ml.ones((4, 3), dtype=a) @ ml.ones((3, 109), dtype=b)
        assert (w[:, :3] * x[:3]).dtype is ml.float64  # no product of matrices


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.local(reason="calls of this process's kernels are counted")
def test_a_mixed_product_is_that_of_f64(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlvm.machines.native.kernels")
    ran = count_calls(monkeypatch, OPS["matmul"], "kernel")
    x = ml.asarray(np.random.default_rng(0).normal(size=(33, 47)))
    w = ml.asarray(np.random.default_rng(1).normal(size=(47, 21)), dtype="f32")

    def both(x: ml.Tensor, w: ml.Tensor) -> Any:
        y = x @ w
        return y, *ml.vjp(ml.matmul, x, w)[1](y)

    with ml.use(ml.VM(native=True)):
        x, w = (ml.asarray(each.numpy()) for each in (x, w))
        fn = ml.capture(both) if captured else both
        results = [each.numpy() for each in fn(x, w)]
        expected = [each.numpy() for each in fn(x, ml.astype(w, "f64"))]
    assert not ran
    for each, as_f64 in zip(results, expected, strict=True):
        assert each.tobytes() == as_f64.astype(each.dtype).tobytes()


@pytest.mark.parametrize("dtype", ["bool", "u8", "i32", "i64", "f32", "f64", "c64", "c128"])
@pytest.mark.parametrize("number", [True, 1, 0.1, 0.1j])
def test_a_list_has_the_dtype_of_one_of_its_numbers(dtype: str, number: Any) -> None:
    x = ml.asarray([1, 0], dtype=dtype)
    pairs: list[tuple[Any, Any]]
    if dtype == "bool" and number is True:  # bools are not added
        pairs = [(x | [number, False], x | number), ([number, False] | x, number | x)]
    else:
        pairs = [
            (x - [number, False], x - number),
            ((number, number) * x, number * x),
            (x * [[number], [number]], x * number),
        ]
    pairs.append((untyped.where(x == x, [number, number], x), untyped.where(x == x, number, x)))
    pairs.append((untyped.where(x != x, x, (number, False)), untyped.where(x != x, x, number)))
    pairs.append((untyped.stack([x, [number] * 2])[1], untyped.where(x != x, x, number)))
    for got, expected in pairs:
        assert got.dtype is expected.dtype
        assert (got == expected).tolist()[-1][0] if got.ndim == 2 else got[0] == expected[0]


def test_an_update_takes_a_list_as_it_takes_a_number() -> None:
    x = ml.zeros((2, 3))
    x[0] = [7.0, 1, True]
    x += [1, 2.5, 1e300]
    assert x.tolist() == [[8.0, 3.5, np.inf], [1.0, 2.5, np.inf]]
    x[:, 1] = (0.25, 0.5)
    x[0, :0] = []
    assert x[:, 1].tolist() == [0.25, 0.5]
    i, c = ml.zeros(2, dtype="i32"), ml.zeros(2, dtype="c64")
    i[:] = [1, 2]
    c[:] = [1, 2j]
    i += [1, 1]
    assert (i.tolist(), c.tolist()) == ([2, 3], [1, 2j])
    x[0] = [ml.asarray(1.0), 2.0, 3.0]
    assert x[0].tolist() == [1.0, 2.0, 3.0]


@cases(
    "dtype, values, text",
    ("i16", np.ones(3, np.float32), r"write values\.astype\(np\.int16\)"),
    ("i32", ml.ones(3, dtype="f64"), r"write ml\.astype\(values, ml\.int32\)"),
    ("i32", 1.5, r"expected i32 values, got f32; write ml\.asarray\(values\)\.astype\(ml\.int32\)"),
    ("u8", np.ones(3, np.int64), r"write values\.astype\(np\.uint8\)"),
    ("bool", [0, 1, 2], r"write ml\.asarray\(values\)\.astype\(ml\.bool\)"),
    ("f64", [1j, 2, 3], "ml.real"),
)
def test_an_update_names_the_remedy(dtype: str, values: Any, text: str) -> None:
    x = ml.zeros(3, dtype=dtype)
    with pytest.raises(ml.errors.DTypeError, match=rf"^setitem\({dtype}.*{text}"):
        x[...] = values
    assert not ml.any(x != x.dtype.numpy.type(0))
    if "write" in text:
        remedy = text.partition("write ")[2].replace("\\", "")
        x[...] = eval(remedy, {"np": np, "ml": ml, "values": values})


def test_an_update_takes_an_array() -> None:
    x = ml.asarray(X)
    same = x
    x += Y
    x *= [1.0, 2.0, 3.0]
    assert x is same
    np.testing.assert_array_equal(x.numpy(), (X + Y) * np.array([1, 2, 3], np.float32))
    y = Y.copy()
    with pytest.raises(
        TypeError, match="does not accept tensors"
    ):  # numpy's own memory is numpy's to update
        y += x
    refuses(DTypeError, "tensors; write x // y, x % y", np.divmod, x, x)
    refuses(DTypeError, r"tensors; write ml.ptp\(x\)", lambda: np.ptp(x))
    refuses(DTypeError, "lose its mask", ml.from_dlpack, np.ma.array([1.0], mask=True))
    assert np.linalg.vecdot(x, x).tolist() == np.linalg.vecdot(x.numpy(), x.numpy()).tolist()


def test_every_public_function_of_tensors_takes_arrays() -> None:
    """But those that run functions of the user's, and of the machine's, on them."""
    lacking = []
    for space in (untyped, untyped.linalg, untyped.fft):
        for name in space.__all__:
            function = getattr(space, name)
            wrapped = hasattr(function, "is_public") or name in primitives.__all__
            if inspect.isfunction(function) and not wrapped:
                parameters = inspect.signature(function).parameters.values()
                if any(str(each.annotation).startswith("Tensor") for each in parameters):
                    lacking.append(name)
    assert lacking == ["cond", "fori_loop", "host_call", "scan", "switch"]


@pytest.mark.local(reason="a VM elsewhere is behind a wire already")
def test_a_vm_elsewhere_takes_them_too() -> None:
    calls: list[Any] = [lambda x: x + Y, lambda x: Y * x, lambda x: x[[0]], lambda x: x == X]
    references = [call(ml.asarray(X)).numpy() for call in calls]
    with ml.Arena(WireVM(ml.VM()), "elsewhere").allocating():
        for call, expected in zip(calls, references, strict=True):
            np.testing.assert_array_equal(call(ml.asarray(X)).numpy(), expected)
        assert str(ml.nn.Linear(3, 2)(DATA).type) == "f32[2,2]"


# --- numpy's functions of elements ------------------------------------------------------


def test_numpys_functions_of_elements_compute_with_tensors() -> None:
    x = ml.asarray([[1.0, 2.0], [3.0, 4.0]])
    a = np.full((2, 2), 3.0, np.float32)
    one: tuple[Any, ...] = (np.exp, np.sqrt, np.arctan, np.absolute, np.isnan, np.rint)
    for function in one:
        result = function(x)
        assert isinstance(result, ml.Tensor)
        np.testing.assert_allclose(result.numpy(), function(x.numpy()), rtol=1e-6)
    two: tuple[Any, ...] = (np.add, np.power, np.arctan2, np.maximum, np.matmul, np.less)
    for pairs in two:
        for result in (pairs(a, x), pairs(x, a)):
            assert isinstance(result, ml.Tensor)
        np.testing.assert_allclose(pairs(a, x).numpy(), pairs(a, x.numpy()), rtol=1e-6)
    gradient = ml.grad(lambda x: ml.sum(np.square(x)))(x)
    np.testing.assert_array_equal(gradient.numpy(), 2 * x.numpy())


def test_attention_and_embedding_take_arrays() -> None:
    layer, x = untyped.nn.MultiHeadAttention(4, 2), ml.random.normal((1, 3, 4))
    mask = np.tri(3, dtype=np.bool_)
    want = layer(x, mask=ml.asarray(mask)).numpy()
    np.testing.assert_array_equal(layer(x.numpy(), mask=mask).numpy(), want, strict=True)
    cache = layer.init_cache(1, 6)
    want = layer(x, cache=cache, position=2)[0].numpy()
    for position in (np.int64(2), np.asarray(2)):
        y, _ = layer(x, cache=cache, position=position)
        np.testing.assert_array_equal(y.numpy(), want, strict=True)
    table = untyped.nn.Embedding(5, 3)
    want = table(ml.asarray([[1, 4]])).numpy()
    for indices in ([[1, 4]], np.array([[1, 4]])):
        np.testing.assert_array_equal(table(indices).numpy(), want, strict=True)


def test_draws_take_arrays() -> None:
    key, p = ml.random.key(3), np.array([0.1, 0.2, 0.7])
    draws: list[tuple[Callable[..., Any], Any]] = [
        (lambda p: untyped.random.bernoulli((4, 3), p, key=key), p),
        (lambda p: ml.random.choice(3, 8, p=p, key=key), p),
        (lambda x: ml.random.choice(x, 8, key=key), X),
        (lambda x: ml.random.permutation(x, key=key), X),
        (lambda x: ml.random.categorical(x, key=key), X),
        (lambda x: ml.random.truncated_normal(x, x + 1, key=key), X),
    ]
    for draw, argument in draws:
        np.testing.assert_array_equal(
            draw(argument).numpy(), draw(ml.asarray(argument)).numpy(), strict=True
        )
    assert bool(ml.all(untyped.random.bernoulli(5, np.float32(1.0))))


@cases("shape", (), (3,), (2, 3))
@cases("count", 5, 17, 40, 300)
def test_joining_many_tensors(count: int, shape: tuple[int, ...]) -> None:
    """More than 16 small tensors are joined in groups, with the same values and gradients."""
    arrays = [np.full(shape, i, np.float32) for i in range(count)]
    xs = [ml.asarray(x) for x in arrays]
    for axis in range(-1, len(shape) + 1):
        np.testing.assert_array_equal(ml.stack(xs, axis=axis).numpy(), np.stack(arrays, axis))
        g = ml.grad(lambda xs, axis=axis: ml.sum(ml.stack(xs, axis=axis) ** 2))(xs)
        assert [x.tolist() for x in g] == [(2 * x).tolist() for x in arrays]
    np.testing.assert_array_equal(ml.asarray(xs).numpy(), np.stack(arrays))
    if shape:
        np.testing.assert_array_equal(ml.concat(xs, axis=-1).numpy(), np.concatenate(arrays, -1))
        mixed = [*xs[:-1], xs[-1].astype("f64")]
        assert ml.concat(mixed).dtype is ml.float64
        types = r"(f32\S+, ){7}f32\S+, \.\.\." if count > 8 else rf"(f32\S+, ){{{count - 1}}}f32\S+"
        with pytest.raises(ShapeError, match=rf"^concat\({types}\): .*operand {count - 1}\)"):
            ml.concat([*xs[:-1], ml.ones((1, *shape, 2))])
        with pytest.raises(AxisError, match=rf"^concat\({types}\): "):
            ml.concat(xs, axis=len(shape))


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
@pytest.mark.parametrize("captured", [False, True])
def test_a_mixed_step_is_native(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products were made by numpy, which is slower than in f64 alone."""
    pytest.importorskip("mlvm.machines.native.kernels")

    def loss(model: Any, x: ml.Tensor) -> ml.Tensor:
        y = model[1](model[0](x), is_causal=True)
        return ml.mean(ml.gelu(model[2](x + y)) ** 2)

    with ml.use(ml.VM(native=True)):
        model = [ml.nn.RMSNorm(8), ml.nn.MultiHeadAttention(8, 2), ml.nn.Linear(8, 5)]
        step = ml.value_and_grad(loss)
        x = ml.ones((2, 7, 8), dtype="f64")
        ops = ("matmul", "batch_contract", "multiply", "softmax", "gelu_slope", "sum")
        ran = [count_calls(monkeypatch, OPS[name], "kernel") for name in ops]
        value, grads = (ml.capture(step) if captured else step)(model, x)
    assert value.dtype is ml.float64
    assert {g.dtype for g in ml.tree.leaves(grads)} == {ml.float32}
    assert not any(ran)
