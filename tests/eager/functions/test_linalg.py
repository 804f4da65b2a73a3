"""`ml.linalg` beside numpy, finite differences and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, DTypeError, GradientError, LinAlgError, ShapeError
from mlvm.core.types import Array
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses
from tests.slopes import check_slopes

la: Any = ml.linalg
untyped: Any = ml
RNG = np.random.default_rng(31)
inf = math.inf


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> Array:
    x = random(*shape)
    product: Array = x @ x.swapaxes(-1, -2) + np.eye(shape[-1])
    return product


def parts(result: Any) -> list[Array]:
    several = result if isinstance(result, tuple) else (result,)
    return [np.asarray(each) for each in several]


def assert_like(result: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Equal dtypes, shapes and, nearly, values."""
    for actual, reference in zip(parts(result), parts(expected), strict=True):
        assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape)
        np.testing.assert_allclose(actual, reference, rtol=tolerance, atol=tolerance)


@cases(
    "name, shapes",
    ("det", [(2, 3, 3)]),
    ("slogdet", [(2, 3, 3)]),
    ("inv", [(2, 3, 3)]),
    ("solve", [(2, 3, 3), (3,)]),
    ("solve", [(2, 3, 3), (3, 2)]),
    ("qr", [(2, 4, 3)]),
    ("svd", [(2, 4, 3)]),
    ("svdvals", [(4, 3)]),
    ("pinv", [(2, 4, 3)]),
    ("matrix_rank", [(2, 4, 3)]),
    ("diagonal", [(2, 4, 3)]),
    ("trace", [(2, 4, 3)]),
    ("matrix_transpose", [(2, 4, 3)]),
    ("matrix_norm", [(2, 4, 3)]),
    ("vector_norm", [(2, 4)]),
    ("outer", [(2,), (3,)]),
    ("cross", [(4, 1, 3), (2, 3)]),
    ("matmul", [(2, 1, 2, 3), (5, 3, 2)]),
    ("tensordot", [(2, 3, 4), (3, 4, 5)]),
    ("vecdot", [(4, 1, 3), (2, 3)]),
    ("eig", [(3, 3)]),
    ("eigvals", [(2, 3, 3)]),
)
def test_as_numpy(name: str, shapes: list[tuple[int, ...]]) -> None:
    for dtype, tolerance in (("d", 1e-12), ("f", 1e-4)):
        xs = [random(*shape).astype(dtype) for shape in shapes]
        expected = getattr(np.linalg, name)(*xs)
        if name in ("eig", "eigvals"):
            expected = [each.astype(dtype.upper()) for each in parts(expected)]
        assert_like(
            getattr(la, name)(*map(ml.asarray, xs)),
            tuple(parts(expected)) if not isinstance(expected, list) else tuple(expected),
            tolerance,
        )


def test_hermitian_as_numpy() -> None:
    x = positive(2, 3, 3)
    for name in ("cholesky", "eigh", "eigvalsh"):
        assert_like(getattr(la, name)(ml.asarray(x)), getattr(np.linalg, name)(x))
    assert_like(la.cholesky(ml.asarray(x), upper=True), np.linalg.cholesky(x, upper=True))


def test_results_have_the_names_of_the_standard() -> None:
    x = ml.asarray(positive(2, 2))
    for result, names in (
        (la.eigh(x), ("eigenvalues", "eigenvectors")),
        (la.eig(x), ("eigenvalues", "eigenvectors")),
        (la.qr(x), ("Q", "R")),
        (la.slogdet(x), ("sign", "logabsdet")),
        (la.svd(x), ("U", "S", "Vh")),
    ):
        assert result._fields == names
        assert all(each.shape[: x.ndim - 2] == () for each in result)
    assert [each.shape for each in la.svd(ml.asarray(random(5, 2)), full_matrices=False)] == [
        *((5, 2), (2,), (2, 2))
    ]
    assert [each.shape for each in la.qr(ml.asarray(random(5, 2)), mode="complete")] == [
        *((5, 5), (5, 2))
    ]


def test_integers_and_bools_become_the_default_float() -> None:
    x = np.array([[2, 1], [1, 3]])
    for matrix in (ml.asarray(x), ml.asarray(x, dtype="u8")):
        assert_like(la.det(matrix), np.float32(5), 1e-6)
        assert_like(la.vector_norm(matrix), np.sqrt(np.float32(15)), 1e-6)
        assert_like(la.solve(matrix, ml.asarray([3, 4])), np.ones(2, "f"), 1e-6)
    assert la.matrix_rank(ml.asarray([[True, False], [True, False]])).item() == 1
    y = np.array([100, 2, 3], "i1")
    for name in ("vecdot", "cross", "outer"):
        assert_like(getattr(la, name)(*[ml.asarray(y)] * 2), getattr(np.linalg, name)(y, y))
    assert_like(la.tensordot(*[ml.asarray(y)] * 2, axes=1), np.tensordot(y, y, 1))


def test_one_place_each() -> None:
    for name in ("matmul", "matrix_transpose", "tensordot", "vecdot", "outer"):
        assert getattr(la, name) is getattr(ml, name)
    assert not hasattr(la, "numpy")
    assert not hasattr(la, "cut")


# --- products ------------------------------------------------------------------------


@cases(
    "shapes, axes",
    ([(2, 3), (4,)], 0),
    ([(), ()], 0),
    ([(2, 3), (3, 2)], ((0, 1), (1, 0))),
    ([(2, 3, 4), (4, 3, 5)], ([-2, 2], (1, -3))),
    ([(2, 3), (3,)], (1, 0)),
    ([(2, 0), (0, 3)], 1),
    ([(0, 2), (2, 3)], 1),
    ([(2, 3), (4, 5)], ((), ())),
)
def test_tensordot(shapes: list[tuple[int, ...]], axes: Any) -> None:
    x, y = (random(*shape) for shape in shapes)
    assert_like(ml.tensordot(ml.asarray(x), ml.asarray(y), axes), np.tensordot(x, y, axes))


def test_axes_count_from_the_last() -> None:
    x, y = random(3, 2, 1), random(3, 1, 4)
    operands = ml.asarray(x), ml.asarray(y)
    assert_like(la.cross(*operands, axis=-3), np.linalg.cross(*np.broadcast_arrays(x, y), axis=0))
    assert_like(la.vecdot(*operands, axis=-3), np.sum(x * y, 0))
    assert_like(la.vecdot(*operands, axis=0), np.sum(x * y, 0))


def test_matrix_power() -> None:
    x = random(2, 3, 3)
    for n in (-5, -1, 0, 1, 2, 3, 7, 10):
        assert_like(la.matrix_power(ml.asarray(x), n), np.linalg.matrix_power(x, n), 1e-8)
    t = ml.asarray(x)
    assert la.matrix_power(t, 1) is not t


def test_diagonals() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    for offset in range(-5, 6):
        expected = np.diagonal(x, min(max(offset, -3), 4), -2, -1)
        assert_like(la.diagonal(ml.asarray(x), offset=offset), expected)
        assert_like(la.trace(ml.asarray(x), offset=offset), expected.sum(-1))
    narrow = ml.asarray(x, dtype="i8")
    assert la.trace(narrow).dtype == ml.int64
    assert la.trace(narrow, dtype=ml.float64).dtype == ml.float64
    assert la.diagonal(narrow).dtype == ml.int8


# --- norms, ranks, least squares -------------------------------------------------------


@pytest.mark.parametrize("ord", [2, 3, 1.5, 0.5, -2])
def test_gradients_of_vector_norms_of_zeros_are_zero(ord: float) -> None:
    gradient = ml.grad(lambda x: ml.sum(la.vector_norm(x, axis=-1, ord=ord)))
    assert gradient(ml.zeros(3)).tolist() == [0.0] * 3
    assert gradient(ml.zeros(2, dtype="c64")).tolist() == [0.0] * 2
    row, mixed = gradient(ml.asarray([[2.0, 1.0], [0.0, 1.0]])).tolist()
    expected = np.asarray([2.0, 1.0]) ** (ord - 1) * (2.0**ord + 1) ** (1 / ord - 1)
    np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert mixed == ([0.0, 1.0] if ord > 0 else [0.0, 0.0])


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, -1, -2, -1.5, inf, -inf])
def test_vector_norms(ord: float) -> None:
    x = random(2, 3, 4)
    for axis in (None, 1, (0, -1)):
        for keepdims in (False, True):
            how: Any = {"axis": axis, "keepdims": keepdims, "ord": ord}
            assert_like(la.vector_norm(ml.asarray(x), **how), np.linalg.vector_norm(x, **how))


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, 2, -1, -2, inf, -inf, None])
def test_matrix_norms(ord: Any) -> None:
    x = random(2, 3, 4)
    for keepdims in (False, True):
        how: Any = {"keepdims": keepdims, "ord": ord}
        assert_like(la.matrix_norm(ml.asarray(x), **how), np.linalg.matrix_norm(x, **how))
        turned = {"axis": (2, 0), **how}
        assert_like(la.norm(ml.asarray(x), **turned), np.linalg.norm(x, **turned))


def test_norm_chooses_as_numpy_does() -> None:
    x = random(3, 4)
    for y, args in (
        (x, ()),
        (random(2, 3, 4), ()),
        (x[0], (3,)),
        (x, (1,)),
        (x, ("nuc",)),
        (x, (2, 0)),
        (x, (None, 1)),
        (x, (None, (0, 1))),
    ):
        assert_like(la.norm(ml.asarray(y), *args), np.linalg.norm(y, *args))


def test_norms_of_nothing_are_zero() -> None:
    empty = ml.zeros((2, 0, 3))
    for ord in ("fro", "nuc", 1, 2, inf):
        assert la.matrix_norm(empty, ord=ord).tolist() == [0.0, 0.0]
    assert la.vector_norm(ml.zeros(0), ord=inf).item() == 0.0
    assert la.matrix_rank(empty).tolist() == [0, 0]
    assert la.pinv(empty).shape == (2, 3, 0)


def test_ranks_have_a_tolerance_for_each_matrix() -> None:
    x = np.stack([np.diag([1.0, 1e-3, 1e-9])] * 2).astype("f")
    assert la.matrix_rank(ml.asarray(x)).tolist() == [2, 2]
    assert la.matrix_rank(ml.asarray(x), rtol=0.01).tolist() == [1, 1]
    assert la.matrix_rank(ml.asarray(x), rtol=ml.asarray([0.01, 1e-10])).tolist() == [1, 3]
    assert la.matrix_rank(ml.zeros((3, 3))).item() == 0
    assert_like(la.pinv(ml.asarray(x), rtol=0.01), np.linalg.pinv(x, rtol=0.01))


@pytest.mark.parametrize(("m", "n", "k"), [(5, 3, (2,)), (3, 5, (2,)), (5, 3, ())])
def test_least_squares(m: int, n: int, k: tuple[int, ...]) -> None:
    x, y = random(m, n), random(m, *k)
    z, residuals, rank, s = la.lstsq(ml.asarray(x), ml.asarray(y))
    expected = np.linalg.lstsq(x, y, rcond=None)
    assert_like((z, s), (expected[0], expected[3]))
    assert rank.item() == expected[2]
    np.testing.assert_allclose(residuals.numpy(), np.sum((x @ z.numpy() - y) ** 2, 0), atol=1e-12)


@pytest.mark.parametrize("rcond", [None, -1, 0.5])
def test_least_squares_take_rcond_as_numpy_does(rcond: float | None) -> None:
    x, y = np.diag([1.0, 2.0, 8e-16, 0.0])[:, :3], np.array([1.0, 2.0, 0.0, 3.0])
    expected = np.linalg.lstsq(x, y, rcond)
    got = la.lstsq(ml.asarray(x), ml.asarray(y), rcond=rcond)
    assert got.rank.item() == expected[2]
    assert_like(got.solution, expected[0])
    assert la.lstsq(ml.asarray(x), ml.asarray(y), rcond).rank.item() == expected[2]


# --- gradients -------------------------------------------------------------------------


def complete(x: ml.Tensor) -> Any:
    """The projector onto what no column of x reaches, from the last columns of a full U."""
    u = la.svd(x).U[:, 1:]
    return u @ u.mT


GRADIENTS: list[tuple[str, Callable[..., Any], list[Array]]] = [
    ("vecdot", ml.vecdot, [random(2, 1, 3), random(2, 3)]),
    ("tensordot", ml.tensordot, [random(2, 2, 2), random(2, 2)]),
    ("cross", la.cross, [random(2, 3), random(3)]),
    ("matrix_power", lambda x: la.matrix_power(x, 3), [random(2, 2)]),
    ("a negative power", lambda x: la.matrix_power(x, -2), [random(2, 2)]),
    ("diagonal", lambda x: la.diagonal(x, offset=1), [random(2, 2, 3)]),
    ("trace", la.trace, [random(3, 2)]),
    ("frobenius", la.matrix_norm, [random(2, 3)]),
    ("nuclear", lambda x: la.matrix_norm(x, ord="nuc"), [random(2, 3)]),
    ("spectral", lambda x: la.matrix_norm(x, ord=2), [random(2, 3)]),
    ("columns", lambda x: la.matrix_norm(x, ord=1), [random(2, 3)]),
    ("a norm of 3", lambda x: la.vector_norm(x, ord=3, axis=1), [random(2, 3)]),
    ("lstsq", lambda x, y: la.lstsq(x, y)[:2], [random(3, 2), random(3, 1)]),
    ("a full svd", complete, [random(4, 1)]),
    ("a full svd, wide", lambda x: complete(x.mT), [random(1, 3)]),
    ("eigh", lambda x: tuple(la.eigh(x)), [positive(2, 2)]),
    ("svd", lambda x: tuple(la.svd(x, full_matrices=False)), [random(2, 3)]),
    ("qr", lambda x: tuple(la.qr(x)), [random(3, 2)]),
    ("slogdet", lambda x: la.slogdet(x).logabsdet, [random(2, 2)]),
]


@pytest.mark.parametrize(("name", "function", "xs"), GRADIENTS, ids=[each[0] for each in GRADIENTS])
def test_gradients(name: str, function: Callable[..., Any], xs: list[Array]) -> None:
    check_slopes(function, *map(ml.asarray, xs), order=2, tolerance=1e-5)


def test_a_gradient_through_rank_one() -> None:
    """The rank stays while both vectors move."""

    def function(u: ml.Tensor, v: ml.Tensor) -> Any:
        return la.pinv(ml.linalg.outer(u, v), rtol=1e-6)

    check_slopes(function, ml.asarray(random(3)), ml.asarray(random(2)))


def test_equal_eigenvalues_do_no_harm_to_values() -> None:
    """If no cotangent reaches the vectors, there is none of a division by zero."""
    x = ml.asarray(np.eye(2))
    for function in (
        lambda x: ml.sum(la.eigh(x).eigenvalues),
        lambda x: ml.sum(la.eigvalsh(x)),
        lambda x: ml.sum(la.svd(x).S),
        lambda x: ml.sum(la.svdvals(x)),
    ):
        np.testing.assert_allclose(ml.grad(function)(x).numpy(), np.eye(2), atol=1e-12)
    vectors = ml.grad(lambda x: ml.sum(la.eigh(x).eigenvectors[:, 0]))(x).numpy()
    assert not np.isfinite(vectors).all(), "nothing chooses these vectors: no silent gradient"


def test_the_gradient_of_a_singular_determinant() -> None:
    x = ml.asarray([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0, 1.0, 1.0]])
    check_slopes(la.det, x)
    refuses(LinAlgError, "a matrix is singular", ml.grad(lambda x: ml.sum(ml.grad(la.det)(x))), x)


def test_where_there_is_no_gradient() -> None:
    x = ml.asarray(random(3, 2))
    with pytest.raises(GradientError, match='no gradient with mode="complete"'):
        ml.grad(lambda x: ml.sum(la.qr(x, mode="complete").Q))(x)
    with pytest.raises(GradientError, match=r"pinv.* no gradient for rtol"):
        ml.grad(lambda rtol: ml.sum(la.pinv(x, rtol=rtol)))(ml.asarray(1e-3))
    with pytest.raises(LinAlgError, match="a matrix is singular"):
        ml.grad(lambda x: la.slogdet(x).logabsdet)(ml.zeros((2, 2)))


TORCH: list[tuple[str, list[Array], Callable[..., Any]]] = [
    ("cholesky", [positive(3, 3)], lambda f, x: f.cholesky(x)),
    ("inv", [random(2, 3, 3)], lambda f, x: f.inv(x)),
    ("det", [random(2, 3, 3)], lambda f, x: f.det(x)),
    ("solve", [random(3, 3), random(3, 2)], lambda f, x, y: f.solve(x, y)),
    ("qr", [random(3, 5)], lambda f, x: f.qr(x)[1]),
    ("eigvalsh", [positive(3, 3)], lambda f, x: f.eigvalsh(x)),
    ("svdvals", [random(4, 3)], lambda f, x: f.svdvals(x)),
    ("pinv", [random(4, 3)], lambda f, x: f.pinv(x)),
    ("nuclear", [random(4, 3)], lambda f, x: f.matrix_norm(x, ord="nuc")),
    ("eigvals", [random(3, 3)], lambda f, x: abs(f.eigvals(x))),
]


@pytest.mark.parametrize(("name", "xs", "function"), TORCH, ids=[each[0] for each in TORCH])
def test_gradients_are_pytorchs(name: str, xs: list[Array], function: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    theirs = [torch.tensor(x, requires_grad=True) for x in xs]
    torch.sum(function(torch.linalg, *theirs)).backward()
    ours = ml.grad(lambda *xs: ml.sum(function(la, *xs)), tuple(range(len(xs))))(
        *map(ml.asarray, xs)
    )
    for g, x in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(g.numpy(), x.grad.numpy(), rtol=1e-9, atol=1e-9)


# --- complex matrices ------------------------------------------------------------------


def hermitian(x: ml.Tensor) -> Any:
    return x @ ml.conj(x).mT + ml.eye(x.shape[-1], dtype=x.dtype)


def phaseless(vectors: ml.Tensor) -> Any:
    """The projectors onto the columns, whatever their phases."""
    columns = ml.expand_dims(vectors.mT, axis=-1)
    return columns @ ml.conj(columns).mT


COMPLEX: list[tuple[str, Callable[..., Any], list[tuple[int, ...]]]] = [
    ("cholesky", lambda x: la.cholesky(hermitian(x)), [(2, 2)]),
    ("upper cholesky", lambda x: la.cholesky(hermitian(x), upper=True), [(2, 2)]),
    ("inv", la.inv, [(2, 2)]),
    ("solve", la.solve, [(2, 2), (2,)]),
    ("det", la.det, [(3, 3)]),
    ("slogdet", lambda x: tuple(la.slogdet(x)), [(2, 2)]),
    ("qr", lambda x: tuple(la.qr(x)), [(3, 2)]),
    ("wide qr", lambda x: tuple(la.qr(x)), [(2, 3)]),
    ("pinv", la.pinv, [(3, 2)]),
    ("eigvalsh", lambda x: la.eigvalsh(hermitian(x)), [(2, 2)]),
    ("eigh", lambda x: phaseless(la.eigh(hermitian(x)).eigenvectors), [(2, 2)]),
    ("eigvals", lambda x: ml.sum(la.eigvals(x) ** 3), [(2, 2)]),
    ("eig", lambda x: ml.sum(phaseless(la.eig(x).eigenvectors), axis=0), [(2, 2)]),
    ("svdvals", la.svdvals, [(3, 2)]),
    ("svd", lambda x: la.svd(x, False).U[:, :1] @ la.svd(x, False).Vh[:1, :], [(2, 3)]),
    ("full svd", lambda x: phaseless(la.svd(x).U), [(3, 2)]),
    ("vecdot", la.vecdot, [(2, 2), (2,)]),
    ("cross", la.cross, [(3,), (3,)]),
    ("norm", la.norm, [(2, 2)]),
]


@pytest.mark.parametrize(("name", "function", "shapes"), COMPLEX, ids=[each[0] for each in COMPLEX])
def test_gradients_of_complex_matrices(
    name: str, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    xs = [ml.asarray(random(*shape) + 1j * random(*shape)) for shape in shapes]
    order = 1 if "svd" in name else 2  # a second order of those takes seconds
    check_slopes(function, *xs, order=order, tolerance=1e-5)


def test_gradients_of_real_matrices_through_complex_ones() -> None:
    x, y = ml.asarray(random(2, 2)), ml.asarray(random(2) + 1j * random(2))
    check_slopes(la.solve, x, y, order=2, tolerance=1e-5)
    check_slopes(lambda x: ml.sum(la.eigvals(x) ** 2), x, tolerance=1e-5)
    check_slopes(lambda x: ml.abs(la.eigvals(x)), ml.asarray([[1.0, 2.0], [-1, 0.5]]))


def test_complex_as_numpy() -> None:
    x, y = (random(2, 3, 3) + 1j * random(2, 3, 3) for _ in range(2))
    s, t = ml.asarray(x), ml.asarray(y)
    assert_like(la.vecdot(s, t), np.linalg.vecdot(x, y))
    assert_like(la.tensordot(s, t, (2, 1)), np.tensordot(x, y, (2, 1)))
    assert_like(la.cross(s, t), np.linalg.cross(x, y))
    assert_like(la.slogdet(s), np.linalg.slogdet(x))
    assert_like(la.svd(s).S, np.linalg.svdvals(x))
    assert_like(la.eigh(s @ ml.conj(s).mT).eigenvalues, np.linalg.svdvals(x)[:, ::-1] ** 2, 1e-10)
    assert_like(la.pinv(s), np.linalg.pinv(x))
    assert_like(la.matrix_rank(s), np.linalg.matrix_rank(x))
    assert_like(la.lstsq(s[0], t[0]).solution, np.linalg.solve(x[0], y[0]), 1e-10)
    for ord in (0, 1, 2, 3, -1, inf):
        assert_like(la.vector_norm(s, ord=ord), np.linalg.vector_norm(x, ord=ord))
    kinds: list[Any] = ["fro", "nuc", 1, 2, inf]
    for kind in kinds:
        assert_like(la.matrix_norm(s, ord=kind), np.linalg.matrix_norm(x, ord=kind))


# --- elsewhere -------------------------------------------------------------------------


def test_captured_is_eager_bit_for_bit() -> None:
    def step(x: ml.Tensor, y: ml.Tensor) -> Any:
        def loss(x: ml.Tensor) -> Any:
            u, s, _ = la.svd(x, full_matrices=False)
            return ml.sum(u[:, 0] * s) + la.slogdet(x).logabsdet + ml.sum(la.solve(x, y))

        return ml.value_and_grad(loss)(x)

    x, y = ml.asarray(random(3, 3)), ml.asarray(random(3))
    for _ in range(2):
        for eager, captured in zip(step(x, y), ml.capture(step)(x, y), strict=True):
            np.testing.assert_array_equal(eager.numpy(), captured.numpy())


@pytest.mark.local(reason="the VM behind the wire is here")
def test_an_error_has_its_class_behind_the_wire() -> None:
    with ml.Arena(WireVM(ml.VM()), "elsewhere"), pytest.raises(np.linalg.LinAlgError) as caught:
        la.inv(ml.zeros((2, 2)))
    assert str(caught.value) == "inv(f32[2,2]): a matrix is singular"
    assert isinstance(caught.value, LinAlgError)


# --- refused ---------------------------------------------------------------------------

v2, v3, m22, m23 = (ml.ones(shape) for shape in (2, 3, (2, 2), (2, 3)))


@cases(
    "call, error, text",
    (lambda: la.inv(m23), ShapeError, r"inv\(f32\[2,3\]\): expected square matrices"),
    (lambda: la.matrix_power(m23, 2), ShapeError, "matrix_power.*expected square matrices"),
    (lambda: la.outer(v2, "x"), DTypeError, r"outer\(\): expected a tensor, got str"),
    (lambda: la.outer(m22, "x"), DTypeError, r"outer\(\): expected a tensor, got str"),
    (lambda: ml.eye("a"), ArgumentError, r"eye\(\): expected n_rows as an int, got 'a'"),  # type: ignore[arg-type]
    (lambda: ml.eye(2, 1.5), ArgumentError, r"eye\(\): expected n_cols as an int, got 1.5"),  # type: ignore[arg-type]
    (lambda: ml.tensordot(v2, v2, axes="ab"), ArgumentError, "an int or a pair of seq"),  # type: ignore[arg-type]
    (lambda: la.matrix_power(m22, 0.5), ArgumentError, "expected n as an int, got 0.5"),
    (lambda: la.vecdot(v2, v3), ShapeError, "vecdot.*lengths 2 and 3, which do not broadcast"),
    (lambda: la.vecdot(m22, ml.ones((2, 1))), ShapeError, "lengths 2 and 1"),
    (lambda: la.vecdot(v2 > 0, v2 > 0), DTypeError, "vecdot"),
    (lambda: la.vecdot(m22, v2, axis=0), ArgumentError, "axis 0 is another one in each"),
    (lambda: la.vecdot(m22, v2, axis=-2), ArgumentError, "axis -2 is out of range"),
    (lambda: la.cross(v2, v2), ShapeError, "cross.*expected vectors of length 3, got 2 and 2"),
    (lambda: la.cross(v3, 1.0), DTypeError, "cross.*expected a tensor, got float"),
    (lambda: la.tensordot(m22, m23, 1.5), ArgumentError, "int or a pair of sequences, got 1.5"),
    (lambda: ml.tensordot(m22, v2, 2), ArgumentError, "tensordot.*at most the dimensions"),
    (lambda: ml.tensordot(m22, m23, ([0],)), ArgumentError, "a pair of sequences"),
    (lambda: ml.tensordot(m22, v3, 1), ShapeError, r"lengths \[2\] and \[3\]"),
    (lambda: ml.tensordot(v2 > 0, v2 > 0, 1), DTypeError, r"tensordot\(bool\[2\]"),
    (lambda: la.diagonal(v2), ShapeError, "diagonal.*expected matrices"),
    (lambda: la.trace(v2), ShapeError, "trace.*expected matrices"),
    (lambda: la.vector_norm(v2, ord="fro"), ArgumentError, "expected ord as a number, got 'fro'"),
    (lambda: la.vector_norm(v2, axis=1), ArgumentError, "vector_norm.*out of range"),
    (lambda: la.matrix_norm(m22, ord=3), ArgumentError, 'expected ord "fro", "nuc", '),
    (lambda: la.matrix_norm(v2), ShapeError, "matrix_norm.*expected matrices"),
    (lambda: la.norm(ml.ones((2, 2, 2)), 1), ShapeError, "one axis or two for a norm, got 3"),
    (lambda: la.lstsq(m22, v3), ShapeError, r"lstsq\(f32\[2,2\], f32\[3\]\)"),
    (
        lambda: la.pinv(m22, rtol="big"),
        DTypeError,
        "expected rtol as a float or a tensor, got 'big'",
    ),
    (lambda: la.svd("1"), DTypeError, "svd.*expected a tensor, got str; make one"),
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    refuses(error, text, call)


# --- elimination, substitution, exponentials -----------------------------------------


@pytest.mark.parametrize(
    "shape", [(3, 3), (2, 5, 3), (2, 3, 5), (90, 90), (70, 50), (0, 0), (2, 0)]
)
@pytest.mark.parametrize("dtype", ["d", "D"])
def test_lu(shape: tuple[int, ...], dtype: str) -> None:
    x = (random(*shape) + 1j * random(*shape)).astype(dtype) if dtype == "D" else random(*shape)
    factors = la.lu(ml.asarray(x))
    p, lower, upper = parts(factors)
    k = min(shape[-2:])
    assert (lower.shape, upper.shape) == ((*shape[:-1], k), (*shape[:-2], k, shape[-1]))
    np.testing.assert_allclose(p @ lower @ upper, x, atol=1e-12)
    np.testing.assert_array_equal(p.sum(-1), np.ones(shape[:-1]))
    np.testing.assert_array_equal(lower, np.tril(lower))
    np.testing.assert_array_equal(lower[..., range(k), range(k)], np.ones((*shape[:-2], k)))
    np.testing.assert_array_equal(upper, np.triu(upper))
    assert (np.abs(lower) <= 1).all()  # the largest was the pivot
    both, order = la.lu_factor(ml.asarray(x))
    rows = np.take_along_axis(x, order.numpy()[..., None], -2)
    np.testing.assert_allclose(lower @ upper, rows, atol=1e-12)
    np.testing.assert_array_equal(np.triu(both.numpy())[..., :k, :], upper)
    np.testing.assert_array_equal(np.tril(both.numpy(), -1)[..., :k], np.tril(lower, -1))


@pytest.mark.parametrize("n", [3, 70])
def test_solvers_as_numpys(n: int) -> None:
    x, right = random(2, n, n), random(n, 3)
    tall = ml.asarray(right)
    assert_like(la.lu_solve(la.lu_factor(ml.asarray(x)), tall), np.linalg.solve(x, right), 1e-9)
    solution = la.lu_solve(la.lu_factor(ml.asarray(x)), tall[:, 0])
    assert_like(solution, np.linalg.solve(x, right[:, :1])[..., 0], 1e-9)
    for lower, take in ((True, np.tril), (False, np.triu)):
        whole = x + 5 * np.sqrt(n) * np.eye(n)
        expected = np.linalg.solve(take(whole), right)
        assert_like(la.solve_triangular(ml.asarray(whole), tall, lower=lower), expected)
        ones = take(x / n, -1 if lower else 1) + np.eye(n)
        solution = la.solve_triangular(ml.asarray(x / n), tall, lower=lower, unit_diagonal=True)
        assert_like(solution, np.linalg.solve(ones, right))
    c = positive(n, n)
    for upper in (False, True):
        factor = la.cholesky(ml.asarray(c), upper=upper)
        solution = la.cholesky_solve(factor, tall[:, 0], upper=upper)
        assert_like(solution, np.linalg.solve(c, right[:, 0]), 1e-9)
        assert_like(la.cholesky_solve(factor, tall, upper=upper), np.linalg.solve(c, right), 1e-9)


def test_expm() -> None:
    for scale in (1e-3, 1.0, 30.0):
        x = random(3, 4, 4) * scale
        values, vectors = np.linalg.eig(x)
        expected = (vectors * np.exp(values)[:, None, :] @ np.linalg.inv(vectors)).real
        result = la.expm(ml.asarray(x)).numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    for angle in (0.1, 3.0, 100.0):
        c, s = math.cos(angle), math.sin(angle)
        assert_like(la.expm(ml.asarray(turn * angle)), np.array([[c, -s], [s, c]]), 1e-11)
    narrow = la.expm(ml.asarray((turn * 3).astype("f")))
    np.testing.assert_allclose(narrow.numpy(), la.expm(ml.asarray(turn * 3)).numpy(), atol=1e-6)
    strange = np.stack([np.full((2, 2), np.inf), np.zeros((2, 2))])
    result = la.expm(ml.asarray(strange)).numpy()
    assert np.isnan(result[0]).all()
    np.testing.assert_array_equal(result[1], np.eye(2))
    assert la.expm(ml.zeros((0, 0))).shape == (0, 0)


SMOOTH: dict[str, tuple[Callable[..., Any], list[Array]]] = {
    "lu": (lambda x: la.lu(x)[1:], [random(2, 3, 3)]),
    "lu tall": (lambda x: la.lu(x)[1:], [random(5, 3)]),
    "lu wide": (lambda x: la.lu(x)[1:], [random(3, 5)]),
    "lu complex": (lambda x: la.lu(x)[1:], [random(3, 3) + 1j * random(3, 3)]),
    "lu_solve": (lambda x, y: la.lu_solve(la.lu_factor(x), y), [positive(2, 3, 3), random(3)]),
    "cholesky_solve": (
        lambda x, y: la.cholesky_solve(la.cholesky(x), y),
        [positive(3, 3), random(3, 2)],
    ),
    **{
        f"solve_triangular {lower} {unit}": (
            lambda x, y, lower=lower, unit=unit: la.solve_triangular(
                x, y, lower=lower, unit_diagonal=unit
            ),
            [random(3, 3) + 3 * np.eye(3), random(2, 3, 2)],
        )
        for lower in (False, True)
        for unit in (False, True)
    },
    "solve_triangular complex": (
        lambda x, y: la.solve_triangular(x, y),
        [random(3, 3) + 3 * np.eye(3) + 1j * random(3, 3), random(3)],
    ),
    "expm": (la.expm, [random(2, 3, 3)]),
    "expm complex": (la.expm, [random(2, 2) + 1j * random(2, 2)]),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_and_captures_of_solvers(name: str) -> None:
    fn, operands = SMOOTH[name]
    tensors = [ml.asarray(x) for x in operands]
    order = 1 if "complex" in name or (" " in name and "solve" not in name) else 2
    check_slopes(fn, *tensors, order=order, tolerance=1e-5)
    captured = ml.capture(fn)
    captured(*tensors)
    for eager, replayed in zip(parts(fn(*tensors)), parts(captured(*tensors)), strict=True):
        np.testing.assert_array_equal(eager, replayed)


def test_solvers_of_halves_and_integers() -> None:
    x = np.array([[2, 1], [0, 4]])
    for dtype in (ml.float16, ml.bfloat16):
        half = ml.asarray(x, dtype=dtype)
        for result in (
            la.solve_triangular(half, half),
            la.lu_solve(la.lu_factor(half), half),
            la.lu(half).U - half + ml.eye(2, dtype=dtype),
        ):
            assert result.dtype is dtype
            np.testing.assert_allclose(result.numpy(), np.eye(2), atol=1e-2)
        np.testing.assert_allclose(la.expm(half * 0.0).numpy(), np.eye(2))
    assert la.lu(ml.asarray(x)).L.dtype is ml.float32
    assert la.expm(ml.asarray(x)).dtype is ml.float32


@cases(
    "call, error, text",
    (lambda: la.solve_triangular(ml.zeros((2, 2)), ml.ones(2)), LinAlgError, "singular"),
    (lambda: la.solve_triangular(ml.ones((2, 3)), ml.ones(2)), ShapeError, "square matrices"),
    (lambda: la.lu_solve(la.lu_factor(ml.ones((2, 2))), ml.ones(2)), LinAlgError, "singular"),
    (lambda: la.lu_solve(la.lu_factor(ml.ones((3, 2))), ml.ones(2)), ShapeError, "square"),
    (lambda: la.lu_solve(la.lu_factor(ml.eye(2)), ml.ones(3)), ShapeError, "2 rows on the"),
    (lambda: la.cholesky_solve(ml.ones(2), ml.ones(2)), ShapeError, "cholesky_solve.*2 dimensions"),
    (lambda: la.expm(ml.ones((2, 3))), ShapeError, r"expm\(f32\[2,3\]\): expected square"),
    (lambda: la.lu(ml.ones(2)), ShapeError, "2 dimensions or more"),
)
def test_solvers_refuse(call: Callable[[], object], error: type[Exception], text: str) -> None:
    refuses(error, text, call)
