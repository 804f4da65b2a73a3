"""The gradient rules, beside finite differences in f64, at first and second order.

The examples are those that the kernels are checked with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from mlvm.arena.arena import Arena
from mlvm.core.errors import GradientError, OpError
from mlvm.core.op import OPS
from mlvm.core.types import TensorType, c128, f64
from mlvm.eager.autodiff.grad import grad, vjp
from mlvm.eager.autodiff.op_rules import NON_DIFFERENTIABLE
from mlvm.eager.autodiff.rules import VJPS
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor, from_array
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
        if x.dtype == dtype and inputs[min(i, len(inputs) - 1)] in VJPS.get(name, ())
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


def _function(name: str, case: Case, numbers: list[int]) -> Function:
    """The op as a function of those operands alone."""
    call, fixed = one_op(name, **case.attributes), [from_array(x) for x in case.inputs]

    def function(*operands: Tensor) -> Tensor:
        inputs = dict(zip(numbers, operands, strict=True))
        return apply(call, *[inputs.get(i, x) for i, x in enumerate(fixed)])

    return function


def _tried(dtype: str) -> set[tuple[str, str]]:
    """The ops and operands whose rules have a case of that dtype, computed in f64."""
    return {
        (name, OPS[name].inputs[min(i, len(OPS[name].inputs) - 1)])
        for name, cases in _CASES.items()
        for case in cases
        if _is_f64(name, case)
        for i in _differentiable(name, case, dtype)
    }


def test_every_rule_is_tried_in_f64() -> None:
    rules = {(name, operand) for name, entry in VJPS.items() for operand in entry}
    of_f32 = [("dequantize_linear", "scale"), ("quantized_matmul", "x")]
    # tests/eager/nn/test_quantization.py has them
    assert sorted(rules - _tried("f8")) == of_f32


UP_TO_PHASES = {"eig", "eigh", "svd"}
"""Ops whose complex vectors have phases that nothing determines. `test_linalg.py` checks their
gradients in functions that leave the phases out."""


def test_every_rule_of_an_op_that_takes_complex_operands_is_tried_with_them() -> None:
    tried = _tried("c16")
    takes = {name for name, entry in VJPS.items() if entry and _takes_complex(name)}
    takes -= UP_TO_PHASES
    rules = {(name, operand) for name in takes for operand in VJPS[name]}
    assert sorted(rules - tried) == []
    holomorphic = {name for name, op in OPS.items() if op.traits.is_holomorphic}
    assert takes - holomorphic == {name for name, _ in tried} - holomorphic
    assert takes >= holomorphic


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
    is_complex = any(x.dtype.kind == "c" for x in case.inputs)
    order = 1 if is_complex and max(x.size for x in primals) > 3 else 2
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
        if VJPS.get(name) is NON_DIFFERENTIABLE
        and cases[0].inputs
        and all(x.dtype == "f8" for x in cases[0].inputs)
        and np.asarray(cases[0].expected(*cases[0].inputs, **cases[0].attributes)).dtype == "f8"
    ],
)
def test_a_gradient_that_would_be_a_silent_zero_is_refused(name: str, case: Case) -> None:
    function = _function(name, case, [0])
    with pytest.raises(GradientError, match=rf"^{name}\(f64.* no gradient for \w+; use stop_grad"):
        grad(lambda x: op.sum(function(x)))(from_array(case.inputs[0]))


# --- memory --------------------------------------------------------------------------


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
