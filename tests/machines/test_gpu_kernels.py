"""Every case of every op on fake CuPy arrays (`fake_cupy`): the table of kernels, and the reference
kernels that stay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import OpError
from mlvm.core.machine.callee import Kernels
from mlvm.core.op import OPS
from mlvm.core.types import Array, TensorType
from mlvm.machines.gpu_checks import noting, settle
from mlvm.machines.gpu_kernels import WAITS, gpu_kernels
from tests.brief import cases, refuses
from tests.core.ops.cases import CASES, Case
from tests.core.ops.evaluate import evaluate
from tests.machines.fake_cupy import Fake, install

TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "complex128": 1e-12, "complex64": 4e-6}

OTHERWISE = frozenset(
    [
        *("erf", "gelu", "gelu_vjp"),  # CuPy has erf
        *("layer_norm", "layer_norm_normalize", "layer_norm_vjp", "layer_norm_scale_vjp"),
        *("batch_contract", "avg_pool2d", "conv2d", "conv_transpose2d", "conv2d_kernel_vjp"),
        "matmul",
        *("scatter_add", "scatter_add_along_axis", "index_add"),
        *("sum", "mean", "var", "logsumexp"),
    ]
)
"""Ops whose sums are made in another order than on the processor. All others have its bits."""

LIBRARIES = frozenset(
    [
        *("matmul", "batch_contract", "conv2d", "conv_transpose2d", "conv2d_kernel_vjp"),
        *("det", "slogdet", "qr"),
    ]
)
"""Ops by cuBLAS and cuSOLVER, which CuPy refuses to have recorded, though they wait for nothing."""

STREAM = 12 + 19 * 10  # kernels of one stream of Philox


def most_launches(name: str, case: Case) -> float:
    """How many calls of CuPy an op may take: none of them depends on how large a tensor is."""
    if OPS[name].kernel.__module__.endswith(".random") or name == "dropout":
        return STREAM + 10 + 90 * (name == "normal")
    if "scatter_add" in name or name == "index_add":
        return 20 + 5 * math.log2(case.inputs[-1].size + 1)
    if OPS[name].kernel.__module__.endswith(".special"):
        return 220
    if name == "unpatches":
        return 6 + 4 * math.prod(case.inputs[0].shape[3:5])
    if name == "weighted_take":
        return 10 + 6 * case.inputs[1].shape[-1]
    if name in ("conv_transpose2d", "max_pool2d_vjp"):
        window: tuple[int, ...] = case.attributes.get("window", case.inputs[1].shape[:-2])
        return 15 + 4 * math.prod(window)
    return 25


class Rig:
    """The fake and the kernels on it."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.cupy = fake.cupy
        self.kernels: Kernels = gpu_kernels(fake.cupy)

    def ready(self, name: str, case: Case) -> tuple[Any, list[Any], dict[str, Any]]:
        """A result to be written, full of 0xFF bytes (None if the op makes it), operands,
        attributes."""
        op = OPS[name]
        attributes = dict(op.bind(case.attributes))
        operands = [self.cupy.asarray(np.array(x, order="C")) for x in case.inputs]
        type = op.infer([TensorType.of(x) for x in operands], attributes)
        out = None if type is None else self.cupy.empty(type.shape, type.dtype.numpy)
        return out, operands, attributes

    def run(self, name: str, out: Any, operands: list[Any], attributes: dict[str, Any]) -> Any:
        kernel = self.kernels.get(name, OPS[name].kernel)
        with np.errstate(all="ignore"):
            if out is None:
                return kernel(*operands, **attributes)
            kernel(out, *operands, **attributes)
        return out

    def apply(self, name: str, *inputs: Any, **attributes: Any) -> Array:
        result = self.run(name, *self.ready(name, Case(inputs, len, attributes)))
        found: Array = result.get()
        return found


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        yield Rig(install(patch))


def each_case(only: frozenset[str] | None = None) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
        if only is None or name in only
    ]


@pytest.mark.parametrize(("name", "case"), each_case())
def test_case(rig: Rig, name: str, case: Case) -> None:
    expected = evaluate(name, *case.inputs, **case.attributes)
    given = rig.ready(name, case)
    counts = rig.fake.counts
    before = counts.waits, counts.transfers, counts.launches
    with noting() as notes:
        result = rig.run(name, *given)
    waits, transfers, launches = counts.waits, counts.transfers, counts.launches
    settle(notes)
    found = result.get()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if name in OTHERWISE:
        tolerance = TOLERANCE[found.dtype.name] if found.dtype.kind in "fc" else 0
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    else:
        assert found.tobytes() == expected.tobytes()
    if name not in WAITS and (name, found.dtype) != ("normal", np.float64):
        assert (waits, transfers) == before[:2]
        assert launches - before[2] <= most_launches(name, case)


@pytest.mark.parametrize("name", OPS)
def test_what_waits_cannot_be_recorded_and_all_else_can(rig: Rig, name: str) -> None:
    case = CASES[name][0]
    expected = evaluate(name, *case.inputs, **case.attributes)
    given = rig.ready(name, case)
    stream = rig.cupy.cuda.Stream(non_blocking=True)
    waited = False
    with stream, noting() as notes:
        stream.begin_capture()
        try:
            result = rig.run(name, *given)
        except (RuntimeError, NotImplementedError):
            waited = True
        graph = stream.end_capture()
    assert waited == (name in WAITS | LIBRARIES)
    if not waited:
        graph.launch()
        settle(notes)
        found = result.get()
        if name in OTHERWISE:
            np.testing.assert_allclose(found, expected, rtol=4e-6, atol=4e-6)
        else:
            assert found.tobytes() == expected.tobytes()


def test_a_kernel_is_of_an_op_and_waits_are_of_kernels(rig: Rig) -> None:
    assert set(rig.kernels) <= set(OPS)
    assert set(OPS) >= WAITS


@pytest.mark.parametrize("name", ["gelu", "multiply_add", "erf", "sum", "softmax", "layer_norm"])
def test_large_tensors_take_no_more_launches(rig: Rig, name: str) -> None:
    """The reference kernels cut these into blocks of 65536 elements."""
    x = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    inputs = {"multiply_add": (x, x, x), "layer_norm": (x, x[0], x[0])}.get(name, (x,))
    attributes = {"eps": 1e-6} if name == "layer_norm" else {}
    before = rig.fake.counts.launches
    found = rig.apply(name, *inputs, **attributes)
    assert rig.fake.counts.launches - before <= 15
    expected = evaluate(name, *inputs, **attributes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-2 if name == "sum" else 1e-5)


def test_reference_kernels_that_stay_cut_nothing_into_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 2 elements, they take as many launches as with large ones."""
    for name in sorted(set(OPS) - set(rig.kernels)):
        case = CASES[name][0]
        launches = []
        for size in (1 << 16, 2):
            for module in ("blocks", "elementwise"):
                monkeypatch.setattr(f"mlvm.core.ops.{module}.BLOCK_SIZE", size)
            monkeypatch.setattr("mlvm.core.ops.reduction._LARGE", size)
            given = rig.ready(name, case)
            before = rig.fake.counts.launches
            rig.run(name, *given)
            launches.append(rig.fake.counts.launches - before)
        assert launches[0] == launches[1], name


def test_each_device_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, devices=2)
    expected = evaluate("normal", _KEY, shape=(4,))
    for number in (0, 1):
        with fake.cupy.cuda.Device(number):
            found = Rig(fake).apply("normal", _KEY, shape=(4,))
        assert found.tobytes() == expected.tobytes()


# --- values that are refused ---------------------------------------------------------

_X = np.arange(12.0).reshape(4, 3)
_KEY = np.array([3, 4], np.uint64)
REFUSED: dict[str, tuple[tuple[Array, ...], dict[str, Any]]] = {
    "pow": ((np.array([2, 3]), np.array([1, -1])), {}),
    "take": ((_X, np.array([0, -5, 9])), {"axis": 0}),
    "take_along_axis": ((_X, np.array([[0, 4, 0]])), {"axis": 0}),
    "scatter_add": ((_X[:2], np.array([1, 7])), {"axis": 0, "length": 5}),
    "scatter_add_along_axis": ((_X[:1], np.array([[0, 9, 1]])), {"axis": 0, "length": 5}),
    "index_add": ((_X, _X[:2], np.array([1, 4])), {"axis": 0}),
    "index_set": ((_X, _X[:2], np.array([1, -9], np.int8)), {"axis": 0}),
    "dynamic_update": ((_X, _X[:2], np.array(3)), {"axis": 0}),
    "one_hot": ((np.array([1, -1]),), {"num_classes": 3}),
    "mask_scatter": ((_X[:3], np.array([True, False, True, False])), {"shape": (4, 3)}),
    "mask_set": ((_X, _X[:3], np.array([True, False, True, False])), {}),
    "softmax_cross_entropy": ((_X, np.array([0, 1, 3, 0])), {}),
    "softmax_cross_entropy_vjp": ((_X[:, 0], _X, np.array([0, 1, -3, 0])), {}),
    "bernoulli": ((_KEY, np.array([0.5, np.nan])), {"shape": (2,)}),
    "cholesky": ((-np.eye(3),), {}),
    "inv": ((np.zeros((2, 2)),), {}),
    "solve": ((np.zeros((2, 2)), np.ones(2)), {}),
}


def message(name: str, inputs: tuple[Array, ...], attributes: dict[str, Any]) -> str:
    refused = refuses(OpError, "", evaluate, name, *inputs, **attributes)
    return str(refused)


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_is_the_reference_kernels(rig: Rig, name: str) -> None:
    inputs, attributes = REFUSED[name]
    expected = message(name, inputs, attributes)
    refused = refuses(OpError, "", rig.apply, name, *inputs, **attributes)
    assert str(refused).endswith(expected)


@pytest.mark.parametrize("name", sorted(set(REFUSED) - WAITS))
def test_a_note_tells_it_later(rig: Rig, name: str) -> None:
    inputs, attributes = REFUSED[name]
    fine = rig.ready("take", CASES["take"][0])
    with noting() as notes:
        rig.run("take", *fine)
        rig.run(name, *rig.ready(name, Case(inputs, len, attributes)))
    before = rig.fake.counts.to_host
    settle(notes[:1])
    assert rig.fake.counts.to_host == before + 1
    refused = refuses(OpError, "", settle, notes)
    assert str(refused).endswith(message(name, inputs, attributes))
    assert str(refused).startswith(name)


@pytest.mark.parametrize("name", ["index_add", "index_set", "dynamic_update", "mask_set"])
@pytest.mark.parametrize("noted", [True, False])
def test_what_is_refused_leaves_a_tensor_updated_in_place_as_it_was(
    rig: Rig, name: str, noted: bool
) -> None:
    inputs, attributes = REFUSED[name]
    _, operands, bound = rig.ready(name, Case(inputs, len, attributes))
    if noted:
        with noting():
            rig.run(name, operands[0], operands, bound)
    else:
        with pytest.raises(OpError):
            rig.run(name, operands[0], operands, bound)
    assert operands[0].get().tobytes() == inputs[0].tobytes()


@pytest.mark.parametrize("name", ["index_add", "index_set", "dynamic_update", "mask_set"])
def test_updates_in_place(rig: Rig, name: str) -> None:
    for case in CASES[name]:
        expected = evaluate(name, *case.inputs, **case.attributes)
        _, operands, bound = rig.ready(name, case)
        with noting() as notes:
            rig.run(name, operands[0], operands, bound)
        settle(notes)
        np.testing.assert_allclose(operands[0].get(), expected, rtol=1e-6, atol=1e-12)


# --- sums by index, sorting, random --------------------------------------------------


def test_sums_of_many_updates_of_few_elements(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((1000, 3))
    for high in (1, 7, 2000):
        indices = rng.integers(-high, high, 1000)
        given = {"axis": 0, "length": high}
        found = rig.apply("scatter_add", updates, indices, **given)
        np.testing.assert_allclose(
            found, evaluate("scatter_add", updates, indices, **given), rtol=1e-12, atol=1e-12
        )


def test_the_last_of_several_values_for_an_element_stays(rig: Rig) -> None:
    indices = np.array([1, 0, 1, -3, 1, 0])
    values = np.arange(6.0)
    found = rig.apply("index_set", np.zeros(4), values, indices, axis=0)
    assert found.tolist() == [5, 4, 0, 0]


@cases(
    "dtype, low, high",
    *(("i8", -128, 128), ("u8", 0, 200), ("i16", -9, 30000), ("u16", 0, 2**16)),
    *(("i32", -(2**31), 2**31), ("i32", 5, 6), ("u32", 0, 3 * 10**9)),
    *(("i64", -5, 2**33 * 3), ("i64", -(2**63), 2**63), ("u64", 2**62, 2**63 + 2**62 + 5)),
    *(("i64", -7, 2**32 - 7), ("i64", 0, 2**31 + 1), ("u64", 1, 2**64)),
)
def test_integers_have_the_bits_of_the_processor(rig: Rig, dtype: str, low: int, high: int) -> None:
    given = {"low": low, "high": high, "shape": (3, 211), "dtype": dtype}
    expected = evaluate("randint", _KEY, **given)
    assert rig.apply("randint", _KEY, **given).tobytes() == expected.tobytes()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 8, 1001])
def test_draws_of_any_number_have_the_bits_of_the_processor(rig: Rig, n: int) -> None:
    cases: dict[str, dict[str, Any]] = {
        "uniform": {"shape": (n,), "dtype": "f32"},
        "normal": {"shape": (n,), "dtype": "f32"},
        "split_key": {"n": n},
        "permutation": {"n": n},
    }
    for name, given in cases.items():
        expected = evaluate(name, _KEY, **given)
        assert rig.apply(name, _KEY, **given).tobytes() == expected.tobytes()


def test_normal_values_of_every_layer_and_of_the_tail(rig: Rig) -> None:
    """Of 100000, about 27 lie in the tail, and 2000 are refused once or more."""
    given = {"shape": (100_000,), "dtype": "f32"}
    expected = evaluate("normal", _KEY, **given)
    assert np.abs(expected).max() > 3.66
    assert rig.apply("normal", _KEY, **given).tobytes() == expected.tobytes()


def test_a_fold_of_any_number_carries(rig: Rig) -> None:
    for data in (-1, 0, 5, 2**63 - 1):
        expected = evaluate("fold_in", _KEY, np.array(data))
        assert rig.apply("fold_in", _KEY, np.array(data)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quotients_that_round_up(rig: Rig, name: str, dtype: type) -> None:
    """1 // 0.1 is 9, and floor(1 / 0.1) is 10."""
    special = [0.0, -0.0, 1.0, -1.0, 0.1, -0.3, 3.0, 7.5, np.inf, -np.inf, np.nan, 1e300]
    with np.errstate(over="ignore"):
        x: Array = np.array(special).astype(dtype)
    expected = evaluate(name, x[:, None], x)
    np.testing.assert_array_equal(rig.apply(name, x[:, None], x), expected)
    zeros = np.signbit(expected) & (expected == 0)
    found = rig.apply(name, x[:, None], x)
    np.testing.assert_array_equal(np.signbit(found) & (found == 0), zeros)
