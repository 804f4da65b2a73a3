"""Gradient rules of `core.ops.decompositions` and `core.ops.fft`, which are parts of `rules`.

Matrix derivatives follow Giles, Collected matrix derivative results for forward and reverse mode
algorithmic differentiation, 2008, unless a rule names a different source. For a complex matrix, a
cotangent is dL/dx + i dL/dy, and transposes in the formulas are conjugate.

Eigenvectors and singular vectors have a gradient if the eigenvalues or singular values are distinct
and the loss does not depend on the sign or phase of a vector. Otherwise it is inf, nan, or one of
many, as in PyTorch. If only the values are used (`eigvalsh`, `svdvals`, or a loss that ignores the
vectors), neither condition is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from mlvm.core.errors import GradientError
from mlvm.core.ops.decompositions import QRMode, qr_shapes, svd_shapes
from mlvm.core.ops.fft import OTHER_WAY, Norm
from mlvm.core.rules import normalize_axis
from mlvm.core.types import TensorType, c64, promote
from mlvm.eager.autodiff.op_rules import Rules, forward, in_its_place, linear
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.matrices import adjoint, columns, conj, cut, diagonal_of, order_of, real
from mlvm.eager.functions.shapes import concat, expand_dims, reshape
from mlvm.eager.functions.sums import cumulative_prod
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor, is_tracked


def _row(x: Tensor) -> Tensor:
    """Reshape f[..., n] to f[..., 1, n]."""
    return expand_dims(x, axis=-2)


def _column(x: Tensor) -> Tensor:
    """Reshape f[..., n] to f[..., n, 1]."""
    return expand_dims(x, axis=-1)


def _scalar(x: Tensor) -> Tensor:
    """Reshape f[...] to f[..., 1, 1], to be multiplied with matrices."""
    return expand_dims(x, axis=(-2, -1))


def _i(x: Tensor) -> Tensor:
    """Return the imaginary number i x of a real x."""
    return x * constant(1j, promote(x.dtype, c64))


def _off_diagonal(x: Tensor) -> Tensor:
    return op.tril(x, k=-1) + op.triu(x, k=1)


def _on_diagonal(x: Tensor) -> Tensor:
    """Return diagonal matrices: f[..., n] to f[..., n, n]."""
    return _column(x) * op.eye(rows=x.shape[-1], columns=x.shape[-1], dtype=x.dtype.name)


def _hermitian(x: Tensor) -> Tensor:
    return (x + adjoint(x)) * 0.5


def _over(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y, and 0 for 0 / 0, so that equal values without a cotangent do not matter."""
    both = op.logical_and(op.equal(x, 0.0), op.equal(y, 0.0))
    return x / op.where(both, constant(math.inf, y.dtype), y)


def _differences(x: Tensor) -> Tensor:
    """Return x_j - x_i in row i and column j."""
    return _row(x) - _column(x)


# --- factorisations and equations ----------------------------------------------------


def _cholesky(g: Tensor, out: Tensor, upper: bool) -> Tensor:
    """Return the Hermitian part of L^-H Phi(L^H g) L^-1.

    Phi halves the diagonal and is 0 above it (Murray, Differentiation of the Cholesky
    decomposition, 2016)."""
    if upper:
        g, out = adjoint(g), adjoint(out)
    product = op.matmul(adjoint(out), g)
    phi = (op.tril(product) + op.tril(product, k=-1)) * 0.5
    left = op.solve(adjoint(out), phi)
    return _hermitian(op.solve(adjoint(out), adjoint(left)))


def _cholesky_forward(t: Tensor, out: Tensor, upper: bool) -> Tensor:
    """Return L Phi(L^-1 T L^-H), for the Hermitian part T of the tangent."""
    if upper:
        out = adjoint(out)
    left = op.solve(out, _hermitian(t))
    product = op.solve(out, adjoint(left))
    result = op.matmul(out, (op.tril(product) + op.tril(product, k=-1)) * 0.5)
    return adjoint(result) if upper else result


def _inv(g: Tensor, out: Tensor) -> Tensor:
    """Return -X^-H g X^-H."""
    inverse = adjoint(out)
    return -(inverse @ g @ inverse)


def _solve_y(g: Tensor, x: Tensor, y_type: TensorType) -> Tensor:
    """Return X^-H g."""
    if y_type.ndim == 1:
        return _solve_y(_column(g), x, y_type.with_shape((1, 1)))[..., 0]
    return op.solve(adjoint(x), g)


def _solve_x(g: Tensor, x: Tensor, out: Tensor, y_type: TensorType) -> Tensor:
    """Return -X^-H g Z^H, for the solution Z."""
    if y_type.ndim == 1:
        g, out = _column(g), _column(out)
    return -(op.solve(adjoint(x), g) @ adjoint(out))


def _solve_forward(t: Tensor, x: Tensor, out: Tensor, y_type: TensorType) -> Tensor:
    """Return -X^-1 T Z, for the solution Z."""
    if y_type.ndim == 1:
        return _solve_forward(t, x, _column(out), y_type.with_shape((1, 1)))[..., 0]
    return -op.solve(x, t @ out)


def _triangular_y(
    g: Tensor, x: Tensor, y_type: TensorType, lower: bool, unit_diagonal: bool
) -> Tensor:
    """Return X^-H g."""
    return op.solve_triangular(adjoint(x), g, lower=not lower, unit_diagonal=unit_diagonal)


def _triangular_x(
    g: Tensor, x: Tensor, out: Tensor, y_type: TensorType, lower: bool, unit_diagonal: bool
) -> Tensor:
    """Return the triangle of -X^-H g Z^H, for the solution Z."""
    back = op.solve_triangular(adjoint(x), g, lower=not lower, unit_diagonal=unit_diagonal)
    if y_type.ndim == 1:
        back, out = _column(back), _column(out)
    whole = -(back @ adjoint(out))
    inside = 1 if unit_diagonal else 0
    return op.tril(whole, k=-inside) if lower else op.triu(whole, k=inside)


def _triangular_forward(
    t: Tensor, x: Tensor, out: Tensor, y_type: TensorType, lower: bool, unit_diagonal: bool
) -> Tensor:
    """Return -X^-1 T Z, for the solution Z and the triangle T of the tangent."""
    inside = 1 if unit_diagonal else 0
    t = op.tril(t, k=-inside) if lower else op.triu(t, k=inside)
    columns = _column(out) if y_type.ndim == 1 else out
    moved = -op.solve_triangular(x, t @ columns, lower=lower, unit_diagonal=unit_diagonal)
    return moved[..., 0] if y_type.ndim == 1 else moved


def _lu(g: Tensor, out: Tensor, x_type: TensorType) -> Tensor:
    """Return P L^-H (tril(L^H gL, -1) + triu(gU U^H)) U^-H for a square matrix.

    The additional columns of a wide matrix are multiplied by L^-1, and the additional rows of a
    tall matrix by U^-1. The cotangents of these are added to gL and gU (De Hoog, Anderssen and
    Lukas, Differentiation of matrix functionals using triangular factorization, 2011)."""
    rows, wide = x_type.shape[-2:]
    n = min(rows, wide)
    (g, _), (factors, order) = [cut(each, (rows, wide), (rows,)) for each in (g, out)]
    square, first = factors[..., :n, :n], g[..., :n, :n]
    extra: list[Tensor] = []
    if wide > n:
        beyond = op.solve_triangular(_unit_adjoint(square), g[..., n:], lower=False)
        first = first - op.tril(beyond @ adjoint(factors[..., n:]), k=-1)
        extra = [beyond]
    if rows > n:
        upper = op.triu(square)
        beneath = adjoint(op.solve_triangular(upper, adjoint(g[..., n:, :]), lower=False))
        first = first - op.triu(adjoint(factors[..., n:, :]) @ beneath)
        extra = [beneath]
    middle = op.tril(_unit_adjoint(square) @ op.tril(first, k=-1), k=-1)
    middle = middle + op.triu(op.triu(first) @ adjoint(op.triu(square)))
    left = op.solve_triangular(_unit_adjoint(square), middle, lower=False)
    result = adjoint(op.solve_triangular(square, adjoint(left), lower=False))
    if extra:
        result = concat([result, *extra], axis=-1 if wide > n else -2)
    return op.one_hot(order_of(order), num_classes=rows, dtype=g.dtype.name).mT @ result


def _unit_adjoint(x: Tensor) -> Tensor:
    """Return L^H, for the unit lower triangular L that is stored below the diagonal of x."""
    return adjoint(op.tril(x, k=-1)) + op.eye(
        rows=x.shape[-2], columns=x.shape[-1], dtype=x.dtype.name
    )


def _expm(g: Tensor, x: Tensor) -> Tensor:
    """Return the derivative at X^H in the direction of g.

    It is a block of an exponential of twice the size (Al-Mohy and Higham, Computing the Frechet
    derivative of the matrix exponential, 2009)."""
    n, turned = x.shape[-1], adjoint(x)
    above = concat([turned, g], axis=-1)
    beneath = concat([turned * 0.0, turned], axis=-1)
    return op.expm(concat([above, beneath], axis=-2))[..., :n, n:]


def _det_vjp_g(c: Tensor, x: Tensor, g_type: TensorType) -> Tensor:
    ones = full(g_type.shape, 1.0, dtype=g_type.dtype)
    return op.sum(conj(op.det_vjp(ones, x)) * c, axis=(-2, -1))


def _det_vjp_x(c: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Return g conj(det(X)) (tr(c^H Y) Y - Y c^H Y), for Y = X^-H.

    The singular values give it without a division, also for singular matrices. They have no
    derivative where they are equal, so derivatives of this rule need a nonsingular matrix."""
    if is_tracked(x):
        inverse = adjoint(op.inv(x))
        trace = op.sum(conj(c) * inverse, axis=(-2, -1), keepdims=True)
        return _scalar(g * conj(op.det(x))) * (trace * inverse - inverse @ adjoint(c) @ inverse)
    n = x.shape[-1]
    u, s, vh = cut(op.svd(x, full_matrices=False), *svd_shapes((n, n), False))
    inner, others = vh @ adjoint(c) @ u, _products_without_two(s)
    sums = others @ _column(diagonal_of(inner))
    middle = op.eye(rows=n, columns=n, dtype=x.dtype.name) * sums - others * inner
    return _scalar(g * conj(op.det(u) * op.det(vh))) * (u @ middle @ vh)


def _products_without_two(s: Tensor) -> Tensor:
    """Return the product of all elements but s_i and s_j in row i and column j, and 0 for i = j."""
    rows = _row(s) + _column(s) * 0.0
    rows = op.triu(rows, k=1) + op.tril(rows * 0.0 + 1.0, k=0)
    between = cumulative_prod(rows, axis=-1, exclusive=True)
    before = cumulative_prod(s, axis=-1, exclusive=True)
    after = op.flip(cumulative_prod(op.flip(s, axis=-1), axis=-1, exclusive=True), axis=-1)
    upper = op.triu(_column(before) * between * _row(after), k=1)
    return upper + adjoint(upper)


def _slogdet(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return (gl + i Im(conj(s) gs)) X^-H, for the logarithm l and the sign s.

    This follows from d log(det(X)) = tr(X^-1 dX) and ds = i s Im(d log(det(X))). A real sign has no
    gradient."""
    inverse = adjoint(op.inv(x))
    (gs, gl), (sign, _) = cut(g, (), ()), cut(out, (), ())
    if x.dtype.is_float:
        return _scalar(gl) * inverse
    return _scalar(real(gl) + _i(op.imag(conj(sign) * gs))) * inverse


def _qr(g: Tensor, out: Tensor, x_type: TensorType, mode: QRMode) -> Tensor:
    """Return the cotangent of a matrix from the cotangents of Q and R.

    The first columns of a wide matrix [X | Y] = Q [U | V] are the QR factorisation of X, and V =
    Q^H Y (Roberts and Roberts, QR and LQ decomposition matrix backpropagation algorithms, 2020)."""
    rows, wide = x_type.shape[-2:]
    if mode == "complete" and rows > wide:
        raise GradientError(
            f'qr({x_type}) has no gradient with mode="complete": nothing determines the last '
            f'columns of Q; use mode="reduced"'
        )
    shapes = qr_shapes((rows, wide), mode)
    (gq, gr), (q, r) = cut(g, *shapes), cut(out, *shapes)
    if rows >= wide:
        return _square_qr(gq, gr, q, r)
    gv, v = columns(gr, rows, wide - rows), columns(r, rows, wide - rows)
    gq = gq + q @ (v @ adjoint(gv))
    first = _square_qr(gq, columns(gr, 0, rows), q, columns(r, 0, rows))
    return concat([first, q @ gv], axis=-1)


def _square_qr(gq: Tensor, gr: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Return (gQ + Q C) R^-H.

    C is the Hermitian matrix with the upper triangle of gR R^H - Q^H gQ (Walter and
    Lehmann, Algorithmic differentiation of linear algebra functions, 2012)."""
    product = gr @ adjoint(r) - adjoint(q) @ gq
    symmetric = _hermitian(op.triu(product) + op.triu(product, k=1))
    return adjoint(op.solve(r, adjoint(gq + q @ symmetric)))


def _pinv(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return the adjoint of dP = -P dX P + P P^H dX^H (1 - X P) + (1 - P X) dX^H P^H P.

    The formula is valid while the rank is constant (Golub and Pereyra, The differentiation of
    pseudo-inverses and nonlinear least squares problems whose variables separate, 1973)."""
    inverse, back = adjoint(out), adjoint(g)
    left, right = back @ out @ inverse, inverse @ out @ back
    parts = left - x @ (out @ left) + right - (right @ out) @ x
    return parts - inverse @ g @ inverse


# --- eigenvalues and singular values -------------------------------------------------


def _eigh(g: Tensor, out: Tensor, x_type: TensorType) -> Tensor:
    """Return V (diag(gL) + (V^H gV) / E) V^H, with E_ij = L_j - L_i, and 0 on the diagonal."""
    n = x_type.shape[-1]
    (gl, gv), (values, v) = cut(g, (n,), (n, n)), cut(out, (n,), (n, n))
    turned = _over(_off_diagonal(adjoint(v) @ gv), _differences(values))
    return _hermitian(v @ (_on_diagonal(real(gl)) + turned) @ adjoint(v))


def _eigvalsh(g: Tensor, x: Tensor) -> Tensor:
    """Return V diag(g) V^H."""
    n = g.shape[-1]
    _, v = cut(op.eigh(x), (n,), (n, n))
    return (v * _row(g)) @ adjoint(v)


def _eig(g: Tensor, out: Tensor, x_type: TensorType) -> Tensor:
    """Return V^-H (diag(gL) + (V^H gV - V^H V diag(Re(V^H gV))) / conj(E)) V^H.

    E_ij = L_j - L_i (Boeddeker et al., On the computation of complex-valued gradients with
    application to statistically optimum beamforming, 2017)."""
    n = x_type.shape[-1]
    (gl, gv), (values, v) = cut(g, (n,), (n, n)), cut(out, (n,), (n, n))
    product = adjoint(v) @ gv
    product = product - (adjoint(v) @ v) * _row(real(diagonal_of(product)))
    turned = _over(_off_diagonal(product), conj(_differences(values)))
    return op.solve(adjoint(v), (_on_diagonal(gl) + turned) @ adjoint(v))


def _eigvals(g: Tensor, x: Tensor) -> Tensor:
    """Return V^-H diag(g) V^H."""
    n = g.shape[-1]
    _, v = cut(op.eig(x), (n,), (n, n))
    return op.solve(adjoint(v), _column(g) * adjoint(v))


def _svd(g: Tensor, out: Tensor, x_type: TensorType, full_matrices: bool) -> Tensor:
    """Return U (diag(gS) + F(U^H gU) S + S F(V^H gV)) V^H, and the parts orthogonal to U and V.

    F(A)_ij = (A - A^H)_ij / (S_j^2 - S_i^2) (Seeger et al., Auto-differentiating linear algebra,
    2017). Complex matrices add i Im(U^H gU - V^H gV) / 2S to the diagonal (Wan and Zhang, Automatic
    differentiation for complex valued SVD, 2019).

    The additional columns U2 of a full U depend only on the other columns, by U2 dU2^H = -dU1 U1^H,
    for a loss that does not change when U2 is rotated.
    """
    rows, wide = x_type.shape[-2:]
    inner = min(rows, wide)
    shapes = svd_shapes((rows, wide), full_matrices)
    (gu, gs, gvh), (u, s, vh) = cut(g, *shapes), cut(out, *shapes)
    gv, v = adjoint(gvh), adjoint(vh)
    (gu, u), (gv, v) = _thin(gu, u, inner), _thin(gv, v, inner)

    u_gu, v_gv = adjoint(u) @ gu, adjoint(v) @ gv
    squares = _differences(op.square(s))
    middle = _on_diagonal(gs)
    if not x_type.dtype.is_float:
        phases = _i(op.imag(diagonal_of(u_gu) - diagonal_of(v_gv)) * 0.5)
        middle = _on_diagonal(real(gs) + _over(phases, s))
    middle = middle + _over(_off_diagonal(u_gu - adjoint(u_gu)), squares) * _row(s)
    middle = middle + _over(_off_diagonal(v_gv - adjoint(v_gv)), squares) * _column(s)
    result = u @ middle @ adjoint(v)
    if rows > inner:
        result = result + _over(gu - u @ u_gu, _row(s)) @ adjoint(v)
    if wide > inner:
        result = result + u @ adjoint(_over(gv - v @ v_gv, _row(s)))
    return result


def _thin(g: Tensor, u: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Return the first columns, and the cotangent that includes the part from the other columns."""
    rest = u.shape[-1] - inner
    if not rest:
        return g, u
    thin, others = columns(u, 0, inner), columns(u, inner, rest)
    return columns(g, 0, inner) - others @ (adjoint(columns(g, inner, rest)) @ thin), thin


def _svdvals(g: Tensor, x: Tensor) -> Tensor:
    """Return U diag(g) V^H."""
    shapes = svd_shapes((x.shape[-2], x.shape[-1]), False)
    u, _, vh = cut(op.svd(x, full_matrices=False), *shapes)
    return (u * _row(g)) @ vh


# --- Fourier transforms --------------------------------------------------------------
# They are linear: the rule is the adjoint, which is the transform back with the other norm.


def _rfft(g: Tensor, x_type: TensorType, axis: int, norm: Norm) -> Tensor:
    """Return Re(sum_k g_k exp(2 pi i j k / n)).

    `irfft` adds each inner element and the conjugate of that element."""
    n = x_type.shape[axis]
    halves = g * _weights(n, 0.5, g.type, axis)
    return op.irfft(halves, n=n, axis=axis, norm=OTHER_WAY[norm])


def _irfft(g: Tensor, x_type: TensorType, n: int, axis: int, norm: Norm) -> Tensor:
    spectrum = op.rfft(g, axis=axis, norm=OTHER_WAY[norm])
    return spectrum * _weights(n, 2.0, spectrum.type, axis)


def _weights(n: int, inner: float, type: TensorType, axis: int) -> Tensor:
    """Return a weight for each element of a half spectrum of n elements.

    Elements without a conjugate counterpart have weight 1: the first and, if n is even, the last.
    """
    ends = (1, 1 - n % 2)
    twins = full((n // 2 + 1 - sum(ends),), inner, dtype=type.dtype.real)
    along = (1,) * (type.ndim - 1 - normalize_axis(axis, type.ndim))
    return reshape(op.pad(twins, widths=(ends,), value=1.0), (n // 2 + 1, *along))


TRANSFORMS: Final[Mapping[str, Rules]] = {
    "fft": linear(x=lambda g, axes, norm: op.ifft(g, axes=axes, norm=OTHER_WAY[norm])),
    "ifft": linear(x=lambda g, axes, norm: op.fft(g, axes=axes, norm=OTHER_WAY[norm])),
    "rfft": linear(x=_rfft),
    "irfft": linear(x=_irfft),
}

DECOMPOSITIONS: Final[Mapping[str, Rules]] = {
    "cholesky": forward({"x": _cholesky}, x=_cholesky_forward),
    "inv": forward({"x": _inv}, x=lambda t, out: -(out @ t @ out)),
    "solve": forward({"x": _solve_x, "y": _solve_y}, x=_solve_forward, y=in_its_place),
    "solve_triangular": forward(
        {"x": _triangular_x, "y": _triangular_y}, x=_triangular_forward, y=in_its_place
    ),
    "lu": {"x": _lu},
    "expm": forward({"x": _expm}, x=lambda t, x: _expm(t, adjoint(x))),
    "det": forward(
        {"x": lambda g, x: op.det_vjp(g, x)}, x=lambda t, x, out: _det_vjp_g(t, x, out.type)
    ),
    "det_vjp": {"g": _det_vjp_g, "x": _det_vjp_x},
    "slogdet": {"x": _slogdet},
    "eigh": {"x": _eigh},
    "eigvalsh": {"x": _eigvalsh},
    "eig": {"x": _eig},
    "eigvals": {"x": _eigvals},
    "qr": {"x": _qr},
    "svd": {"x": _svd},
    "svdvals": {"x": _svdvals},
    "pinv": {"x": _pinv},
}
