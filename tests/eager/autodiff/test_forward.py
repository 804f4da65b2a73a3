"""The forward rules, beside finite differences in f64, and beside the rules back, transposed."""

from __future__ import annotations

import numpy as np

from mlvm.core.op import OPS
from mlvm.core.types import Array
from mlvm.eager.autodiff.forward import tangent_of
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.autodiff.op_rules import OpRules
from mlvm.eager.autodiff.rules import VJPS
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import from_array
from tests.cases import Case
from tests.eager.autodiff import test_rules as rules
from tests.walks.crossing import crossed

_TRANSPOSED = "lu det_vjp slogdet eigh eigvalsh eig eigvals qr svd svdvals pinv"
"""Ops without a rule forward of their own."""


def _drawn(x: Array, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.standard_normal(x.shape))
    if x.dtype.kind == "c":
        values = values + 1j * rng.standard_normal(x.shape)
    return values.astype(x.dtype)


def _inner(x: Array, y: Array) -> float:
    return float(np.sum(np.conj(x) * y).real)


def test_which_ops_have_the_rule_back_transposed() -> None:
    names = [
        name
        for name, row in VJPS.items()
        if row and not isinstance(row, OpRules) and not OPS[name].elementwise
    ]
    assert " ".join(names) == _TRANSPOSED


@crossed(rules._is_f64, cases=rules._CASES)
def test_a_tangent_is_the_slope_and_the_rule_back_transposed(name: str, case: Case) -> None:
    numbers = rules._wide(name, case)
    call, xs = one_op(name, **case.attributes), [from_array(x) for x in case.inputs]
    out = apply(call, *xs)
    ts = [_drawn(x, 3) if i in numbers else None for i, x in enumerate(case.inputs)]
    if name in ("eigh", "eigvalsh", "cholesky"):
        ts = [None if t is None else t + np.conj(t.swapaxes(-1, -2)) for t in ts]
    tangents = [None if t is None else from_array(t) for t in ts]
    tangent = tangent_of(call, tuple(xs), tangents, out)
    assert tangent.type is out.type

    def moved(h: float) -> Array:
        near = [x if t is None else x + h * t for x, t in zip(case.inputs, ts, strict=True)]
        return apply(call, *map(from_array, near)).numpy()

    h = 1e-6
    with np.errstate(all="ignore"):
        slopes = np.nan_to_num((moved(h) - moved(-h)) / (2 * h))
    np.testing.assert_allclose(tangent.numpy(), slopes, rtol=2e-5, atol=2e-6)
    function = rules._function(name, case, numbers)
    _, pull = vjp(function, *[xs[i] for i in numbers])
    g = _drawn(out.numpy(), 4)
    back = [x.numpy() for x in pull(from_array(g))]
    total = sum([_inner(b, np.asarray(ts[i])) for b, i in zip(back, numbers, strict=True)], 0.0)
    np.testing.assert_allclose(_inner(g, tangent.numpy()), total, rtol=1e-9, atol=1e-10)
    each = [
        tangent_of(call, tuple(xs), [t if i == k else None for i, t in enumerate(tangents)], out)
        for k in numbers
    ]
    np.testing.assert_allclose(
        sum(t.numpy() for t in each), tangent.numpy(), rtol=1e-9, atol=1e-10, err_msg="one by one"
    )


def test_the_tangent_of_a_selection_or_a_difference_is_one_op() -> None:
    """A sum of tangents, each with zeros for the other operand, would lose the sign of a zero."""
    condition = from_array(np.array([True, False, True]))
    x, y = from_array(np.array([1.0, 2.0, 3.0])), from_array(np.array([4.0, 5.0, 6.0]))
    tx, ty = from_array(np.array([-0.0, 1.0, 2.0])), from_array(np.array([3.0, -0.0, 4.0]))
    for name, operands, tangents, expected in (
        ("where", (condition, x, y), (None, tx, ty), [-0.0, -0.0, 2.0]),
        ("where", (condition, x, y), (None, None, ty), [0.0, -0.0, 0.0]),
        ("subtract", (x, y), (tx, ty), [-3.0, 1.0, -2.0]),
    ):
        call = one_op(name)
        tangent = tangent_of(call, operands, tangents, apply(call, *operands))
        assert tangent.numpy().tobytes() == np.array(expected).tobytes()
