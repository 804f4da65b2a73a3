"""Error function 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x, which numpy lacks.

f64 uses W. J. Cody's rational Chebyshev approximation (Math. Comp. 23, 1969, 631-637). For |x| <=
0.46875, |erf(x)| is |x| P(x^2) / Q(x^2); for larger |x| it is 1 - exp(-x^2) R(|x|) / S(|x|). Cody
uses the second formula up to 4. It is used up to 6 here, where erf is 1 in f64; between 4 and 6 the
error of the formula is far below the last bit of erf.

f32 uses x P(x^2) / Q(x^2), with P and Q of degree 5. They were fitted to erf on |x| <= 3.92 by
least squares with Lawson's weights; for larger |x|, erf is 1 in f32. The fit has a relative error
of 2e-8. The rest of the error, at most 8 units in the last place, is rounding in f32.
"""

from __future__ import annotations

import numpy as np

from mlvm.core.ops.block_memory import blocks
from mlvm.core.types import Array

Coefficients = tuple[float, ...]  # highest power first

NEAR_P, NEAR_Q = zip(
    (1.85777706184603153e-1, 1.0),
    (3.16112374387056560e0, 2.36012909523441209e1),
    (1.13864154151050156e2, 2.44024637934444173e2),
    (3.77485237685302021e2, 1.28261652607737228e3),
    (3.20937758913846947e3, 2.84423683343917062e3),
    strict=True,
)
FAR_P, FAR_Q = zip(
    (2.15311535474403846e-8, 1.0),
    (5.64188496988670089e-1, 1.57449261107098347e1),
    (8.88314979438837594e0, 1.17693950891312499e2),
    (6.61191906371416295e1, 5.37181101862009858e2),
    (2.98635138197400131e2, 1.62138957456669019e3),
    (8.81952221241769090e2, 3.29079923573345963e3),
    (1.71204761263407058e3, 4.36261909014324716e3),
    (2.05107837782607147e3, 3.43936767414372164e3),
    (1.23033935479799725e3, 1.23033935480374942e3),
    strict=True,
)
_F32_P = (2.05008846e-06, 0.000284883326, 0.00376563177, 0.0527487701, 0.190406775, 1.12837915)
_F32_Q = (3.80917586e-05, 0.00116253959, 0.0149692462, 0.114109245, 0.502076352, 1.0)


def write_erf(out: Array, x: Array) -> None:
    """Write erf(x) into `out`, which may be `x`.

    Both arrays are contiguous, of the same shape, and both f32 or both f64. The relative error is
    below 1e-15 in f64 and 1e-6 in f32; erf(+-inf) is +-1, erf(nan) is nan.
    """
    part = _erf_f32 if out.dtype == np.float32 else _erf_f64
    flat_out, flat_x = out.reshape(-1), x.reshape(-1)
    for block in blocks(flat_out.size):
        part(flat_out[block], flat_x[block])


def _erf_f64(out: Array, x: Array) -> None:
    magnitude = np.minimum(np.absolute(x), 6.0)
    square = np.square(magnitude)
    workspace = np.empty_like(square)

    near = _polynomial(NEAR_P, square, np.empty_like(square))
    near *= magnitude
    near /= _polynomial(NEAR_Q, square, workspace)

    far = _polynomial(FAR_P, magnitude, np.empty_like(square))
    far /= _polynomial(FAR_Q, magnitude, workspace)
    np.negative(square, square)
    far *= np.exp(square, square)
    np.subtract(1.0, far, far)

    np.copyto(far, near, where=magnitude <= 0.46875)
    np.copysign(far, x, out)


def _erf_f32(out: Array, x: Array) -> None:
    clipped = np.minimum(x, 3.92)
    np.maximum(clipped, -3.92, out=clipped)
    square = np.square(clipped)
    _polynomial(_F32_P, square, out)
    out *= clipped
    out /= _polynomial(_F32_Q, square, clipped)
    np.minimum(out, 1.0, out=out)
    np.maximum(out, -1.0, out=out)


def _polynomial(coefficients: Coefficients, x: Array, out: Array) -> Array:
    """Evaluate a polynomial by Horner's rule into `out`, which must not be `x`; return `out`."""
    np.multiply(x, coefficients[0], out)
    for coefficient in coefficients[1:-1]:
        out += coefficient
        out *= x
    out += coefficients[-1]
    return out
