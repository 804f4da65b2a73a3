"""The gradient rules, beside finite differences in f64, at first and second order.

The examples are those that the kernels are checked with.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import GradientError, OpError
from mlvm.core.op import OPS
from mlvm.core.types import TensorType, c128, f64
from mlvm.eager import optim
from mlvm.eager.autodiff.grad import grad, vjp
from mlvm.eager.autodiff.rows import NON_DIFFERENTIABLE
from mlvm.eager.autodiff.rules import HOLOMORPHIC, VJPS
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor, from_array
from tests.brief import cases
from tests.cases import CASES, Case, quantized
from tests.slopes import check_slopes
from tests.walks.crossing import crossed

Function = Callable[..., Tensor]

_STAYS_F64 = Case((np.array([0.5, -1.25]),), lambda x, dtype: x, {"dtype": "f64"})
_STAYS_C128 = Case((np.array([0.5, -1.25j]),), lambda x, dtype: x, {"dtype": "c128"})
_CASES = {**CASES, "astype": [*CASES["astype"], _STAYS_F64, _STAYS_C128]}
_CASES = {name: cases for name, cases in _CASES.items() if name not in quantized.CASES}


# --- the table -------------------------------------------------------------------------


def test_every_op_has_rules_or_is_declared_to_have_none() -> None:
    assert sorted(OPS.keys() - VJPS.keys()) == [], "ops without an entry in VJPS"
    assert sorted(VJPS.keys() - OPS.keys()) == [], "entries in VJPS of no op"


@pytest.mark.parametrize("name", VJPS)
def test_rules_are_of_operands_and_ask_for_what_there_is(name: str) -> None:
    described = OPS[name]
    values = [*described.inputs, "out"]
    others = [*described.attributes, *[f"{x}_type" for x in described.inputs]]
    others += ["attributes", "types", "position"]
    for operand, rule in VJPS[name].items():
        assert operand in described.inputs
        cotangent, *parameters = inspect.signature(rule).parameters
        assert cotangent not in {*values, *others}
        assert set(parameters) <= {*values, *others}
        assert parameters == sorted(parameters, key=lambda x: x not in values), "values come first"


# --- finite differences ----------------------------------------------------------------


def _differentiable(name: str, case: Case, dtype: str) -> list[int]:
    """The numbers of the operands of that dtype that have a rule."""
    inputs = OPS[name].inputs
    return [
        i
        for i, x in enumerate(case.inputs)
        if x.dtype == dtype and inputs[min(i, len(inputs) - 1)] in VJPS[name]
    ]


def _is_f64(name: str, case: Case) -> bool:
    """Return whether the case has an operand to differentiate for, and computes in f64 alone."""
    if not _wide(name, case):
        return False
    result = OPS[name].infer(
        [TensorType.of(x) for x in case.inputs], one_op(name, **case.attributes).attributes
    )
    floats = {x.dtype for x in case.inputs if x.dtype.kind in "fc"}
    return floats <= {f64.numpy, c128.numpy} and (result is None or result.dtype in (f64, c128))


def _wide(name: str, case: Case) -> list[int]:
    """The numbers of the operands in f64 and c128 that have a rule."""
    return _differentiable(name, case, "f8") + _differentiable(name, case, "c16")


def _is_complex(case: Case) -> bool:
    return any(x.dtype.kind == "c" for x in case.inputs)


def _function(name: str, case: Case, numbers: list[int]) -> Function:
    """The op as a function of those operands alone."""
    call, fixed = one_op(name, **case.attributes), [from_array(x) for x in case.inputs]

    def function(*operands: Tensor) -> Tensor:
        inputs = dict(zip(numbers, operands, strict=True))
        return apply(call, *[inputs.get(i, x) for i, x in enumerate(fixed)])

    return function


def test_every_rule_is_tried_in_f64() -> None:
    tried = {
        (name, OPS[name].inputs[min(i, len(OPS[name].inputs) - 1)])
        for name, cases in _CASES.items()
        for case in cases
        if _is_f64(name, case)
        for i in _differentiable(name, case, "f8")
    }
    rules = {(name, operand) for name, entry in VJPS.items() for operand in entry}
    of_f32 = [("dequantize_linear", "scale"), ("quantized_matmul", "x")]
    # tests/eager/nn/test_quantized.py has them
    assert sorted(rules - tried) == of_f32


UP_TO_PHASES = {"eig", "eigh", "svd"}
"""Ops whose complex vectors have phases that nothing determines. `test_linalg.py` checks their
gradients in functions that leave the phases out."""


def test_every_rule_of_an_op_that_takes_complex_operands_is_tried_with_them() -> None:
    tried = {
        (name, OPS[name].inputs[min(i, len(OPS[name].inputs) - 1)])
        for name, cases in _CASES.items()
        for case in cases
        if _is_f64(name, case)
        for i in _differentiable(name, case, "c16")
    }
    takes = {name for name, entry in VJPS.items() if entry and _takes_complex(name)}
    takes -= UP_TO_PHASES
    rules = {(name, operand) for name in takes for operand in VJPS[name]}
    assert sorted(rules - tried) == []
    assert takes - HOLOMORPHIC == {name for name, _ in tried} - HOLOMORPHIC
    assert takes >= HOLOMORPHIC


def _takes_complex(name: str) -> bool:
    """Return whether a case of the op is allowed with complex numbers for its floats."""
    for case in CASES[name]:
        types = [TensorType.of(x) for x in case.inputs]
        numbers = [i for kind in ("f4", "f8") for i in _differentiable(name, case, kind)]
        wide = [x.with_dtype(c128) if i in numbers else x for i, x in enumerate(types)]
        if any(type.dtype.is_float for type in types):
            try:
                OPS[name].infer(wide, one_op(name, **case.attributes).attributes)
            except OpError:
                continue
            return True
    return False


@crossed(_is_f64, cases=_CASES)
def test_first_and_second_order(name: str, case: Case) -> None:
    """Of complex operands larger than a few elements, the first order alone: it takes longer."""
    numbers = _wide(name, case)
    primals = [from_array(np.asarray(case.inputs[i])) for i in numbers]
    order = 1 if _is_complex(case) and max(x.size for x in primals) > 3 else 2
    check_slopes(_function(name, case, numbers), *primals, order=order)


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
@crossed(lambda name, case: _differentiable(name, case, "f4"), cases=_CASES)
def test_a_gradient_has_its_operands_dtype(name: str, case: Case) -> None:
    """f32, also beside f64; and the value that f64 gives."""
    numbers = sorted(_differentiable(name, case, "f4") + _differentiable(name, case, "f8"))
    wide = [x.astype("f8") if x.dtype == "f4" else x for x in case.inputs]
    gradients = []
    for inputs in (case.inputs, wide):
        function = _function(name, Case(tuple(inputs), case.expected, case.attributes), numbers)
        value, pullback = vjp(function, *[from_array(inputs[i]) for i in numbers])
        cotangent = np.asarray(np.random.default_rng(2).standard_normal(value.shape))
        gradients.append(pullback(from_array(cotangent.astype(value.dtype.numpy))))
    for i, narrow, expected in zip(numbers, *gradients, strict=True):
        assert narrow.dtype.numpy == case.inputs[i].dtype
        np.testing.assert_allclose(narrow.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, cases[0], id=name)
        for name, cases in _CASES.items()
        if VJPS[name] is NON_DIFFERENTIABLE
        and cases[0].inputs
        and all(x.dtype == "f8" for x in cases[0].inputs)
        and np.asarray(cases[0].expected(*cases[0].inputs, **cases[0].attributes)).dtype == "f8"
    ],
)
def test_a_gradient_that_would_be_a_silent_zero_is_refused(name: str, case: Case) -> None:
    function = _function(name, case, [0])
    with pytest.raises(GradientError, match=rf"^{name}\(f64.* no gradient for x; stop_gradient"):
        grad(lambda x: op.sum(function(x)))(from_array(case.inputs[0]))


# --- where the derivative jumps, or a formula would divide by zero -----------------------


def _gradients(function: Function, *values: object) -> list[Any]:
    """The gradients of the sum of a function's results, as nested lists."""
    tensors = [from_array(np.asarray(x, np.float64)) for x in values]
    gradients = grad(lambda *xs: op.sum(function(*xs)), tuple(range(len(tensors))))(*tensors)
    return [g.numpy().tolist() for g in gradients]


def test_ties_share_the_cotangent() -> None:
    assert _gradients(op.max, [1.0, 3.0, 3.0, 2.0]) == [[0.0, 0.5, 0.5, 0.0]]
    rows = [[1.0, 1.0], [2.0, 1.0]]
    assert _gradients(lambda x: op.min(x, axis=1), rows) == [[[0.5, 0.5], [0.0, 1.0]]]
    assert _gradients(op.maximum, [1.0, 2.0, 0.0], [1.0, 1.0, 1.0]) == [[0.5, 1, 0], [0.5, 0, 1]]
    assert _gradients(op.minimum, [1.0, 2.0, 0.0], [1.0, 1.0, 1.0]) == [[0.5, 0, 1], [0.5, 1, 0]]


def test_a_tie_within_windows_that_overlap_is_shared_in_each() -> None:
    def pooled(x: Tensor) -> Tensor:
        return op.max_pool2d(x, window=(1, 2), stride=(1, 1), padding=((0, 0), (0, 0)))

    [gradient] = _gradients(pooled, np.array([1.0, 1.0, 0.0]).reshape(1, 1, 3, 1))
    assert np.ravel(gradient).tolist() == [0.5, 1.5, 0.0]


def test_clip_gives_the_edges_of_the_interval_to_x() -> None:
    assert _gradients(op.clip, [0.0, 1.0, 2.0, -1.0, 3.0], 0.0, 2.0) == [[1, 1, 1, 0, 0], 1.0, 1.0]
    assert _gradients(op.clip, 0.5, 2.0, 1.0) == [0.0, 0.0, 1.0], "upper wins where they cross"


def test_kinks_at_zero() -> None:
    assert _gradients(op.relu, [-1.0, 0.0, 1.0]) == [[0.0, 0.0, 1.0]]
    assert _gradients(op.abs, [-1.0, 0.0, 1.0]) == [[-1.0, 0.0, 1.0]]
    assert _gradients(op.atan2, [0.0, 1.0], [0.0, 2.0]) == [[0.0, 0.4], [0.0, -0.2]]


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e170, 1e300])
def test_the_gradient_of_atan2_is_right_for_small_and_large_numbers(size: float) -> None:
    for gradient, expected in zip(_gradients(op.atan2, 3 * size, -4 * size), (-4, -3), strict=True):
        assert gradient * size == pytest.approx(expected / 25)


def test_a_root_has_no_gradient_at_zero_and_none_again() -> None:
    """Its slope is infinite there; of a norm or a standard deviation 0 is a subgradient."""
    rows = [[2.0, 2.0], [1.0, 3.0]]
    for deviation in (lambda x: ml.std(x, axis=1), lambda x: op.sqrt(op.var(x, axis=1))):
        assert _gradients(deviation, rows) == [[[0.0, 0.0], [-0.5, 0.5]]]
    for norm in (lambda x: op.sqrt(op.sum(x * x)), lambda x: optim.global_norm({"x": x})):
        assert _gradients(norm, [0.0, 0.0]) == [[0.0, 0.0]]
        np.testing.assert_allclose(_gradients(norm, [3.0, 4.0]), [[0.6, 0.8]])
    assert _gradients(grad(lambda x: op.sum(op.sqrt(x))), [0.0, 4.0]) == [[0.0, -1 / 32]]  # type: ignore[misc]


def test_pow_at_zero() -> None:
    assert _gradients(lambda x: x**3, [0.0, 2.0, -2.0]) == [[0.0, 12.0, 12.0]]
    assert _gradients(lambda x: x**1, [0.0]) == [[1.0]]
    assert _gradients(lambda x: x**0, [0.0, 1.0]) == [[0.0, 0.0]]
    assert _gradients(op.pow, [0.0, 0.0], [2.0, 0.0]) == [[0.0, 0.0], [0.0, 0.0]]


def test_pow_of_zero_at_infinity_and_again() -> None:
    infinite = [math.inf, -math.inf]
    assert _gradients(lambda x: x**0, infinite) == [[0.0, 0.0]]
    assert _gradients(grad(lambda x: op.sum(x**0)), [0.0, 2.0, *infinite]) == [[0.0] * 4]  # type: ignore[misc]


@cases(
    "x, first, second",
    ([2.0, 3.0, 5.0], [15, 10, 6], [8, 7, 5]),
    ([0.0, 3.0, 5.0], [15, 0, 0], [8, 5, 3]),
    ([0.0, 3.0, 0.0], [0, 0, 0], [3, 0, 3]),
    ([0.0, 0.0, 0.0], [0, 0, 0], [0, 0, 0]),
)
def test_prod_of_zeros(x: list[float], first: list[int], second: list[int]) -> None:
    """prod(x) = x0 x1 x2, whose second derivatives in row 0 are 0, x2 and x1, ..."""
    assert _gradients(op.prod, x) == [first]
    assert _gradients(grad(op.prod), x) == [second]


def test_empty_tensors_have_empty_gradients() -> None:
    empty = np.zeros((0, 3))
    for function in (op.sum, op.mean, op.prod, op.var, op.logsumexp):
        with np.errstate(all="ignore"):
            assert _gradients(function, empty) == [[]]


def test_a_matrix_that_a_batch_is_multiplied_with_needs_no_gradient_an_example() -> None:
    """dw of x[N,S,C] @ w[C,D] and of w[S,T]^T @ x[N,S,C], without N matrices on the way."""
    arena = Arena(default_vm(), "weights")
    with arena:
        x = from_array(np.ones((64, 8, 16)))
        for w_shape, function in (
            ((16, 48), lambda w: x @ w),
            ((8, 48), lambda w: op.matmul(w, x, transpose_x=True)),
        ):
            w = from_array(np.ones(w_shape))
            value, pullback = vjp(function, w)
            before = arena.high_water = arena.used
            pullback(from_array(np.ones(value.shape)))
            assert arena.high_water - before < value.type.nbytes + 4 * w.type.nbytes
