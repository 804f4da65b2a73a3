"""`einsum` beside numpy's, its gradients, and the subscripts it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from tests.brief import cases, refuses
from tests.slopes import check_slopes

RNG = np.random.default_rng(5)

SUBSCRIPTS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,kj->ik", [(2, 3), (4, 3)]),
    ("ji,jk", [(3, 2), (3, 4)]),
    ("bij,bjk->bik", [(5, 2, 3), (5, 3, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
    ("ibj,jkb->kbi", [(2, 5, 3), (3, 4, 5)]),
    ("i,i", [(3,), (3,)]),
    ("i,i->i", [(3,), (3,)]),
    ("i,j", [(3,), (4,)]),
    ("ij,j", [(2, 3), (3,)]),
    (" i , ij -> j ", [(2,), (2, 3)]),
    ("ij->ji", [(2, 3)]),
    ("ba", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ij->j", [(2, 3)]),
    ("ii", [(3, 3)]),
    ("ii->i", [(3, 3)]),
    ("iji->ji", [(3, 2, 3)]),
    ("iii->i", [(3, 3, 3)]),
    ("ijij->ij", [(2, 3, 2, 3)]),
    ("ii,ij->j", [(3, 3), (3, 2)]),
    (",ij", [(), (2, 3)]),
    (",", [(), ()]),
    ("->", [()]),
    ("...ij,...jk->...ik", [(5, 2, 3), (3, 4)]),
    ("...ij,...jk", [(5, 1, 2, 3), (7, 3, 4)]),
    ("i...,...i", [(3, 2), (4, 2, 3)]),
    ("...,...", [(2, 3), (3,)]),
    ("i...->...", [(2, 3, 4)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("a...b->b...a", [(2, 5, 3)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("i,ij,j", [(2,), (2, 3), (3,)]),
    ("bi,bo,io->b", [(4, 2), (4, 3), (2, 3)]),
    ("ab,ac,ad->abcd", [(2, 3), (2, 4), (2, 5)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("ij,ij->ij", [(2, 1), (2, 4)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
    ("ij,jk->ik", [(0, 3), (3, 4)]),
    ("ij,jk->k", [(2, 3), (3, 0)]),
]


def _operands(shapes: list[tuple[int, ...]], dtype: str = "f8") -> list[Any]:
    return [RNG.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(("subscripts", "shapes"), SUBSCRIPTS)
def test_einsum_is_numpys(subscripts: str, shapes: list[tuple[int, ...]]) -> None:
    for dtype, tolerance in (("f8", 1e-12), ("f4", 1e-5), ("i4", 0)):
        xs = [x * 9 if dtype == "i4" else x for x in _operands(shapes)]
        xs = [x.astype(dtype) for x in xs]
        expected = np.einsum(subscripts, *xs)
        result = ml.einsum(subscripts, *map(ml.asarray, xs)).numpy()
        assert (result.dtype, result.shape) == (xs[0].dtype, expected.shape)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("subscripts", "shapes"), [each for each in SUBSCRIPTS if 0 not in sum(each[1], ())][::2]
)
def test_gradients(subscripts: str, shapes: list[tuple[int, ...]]) -> None:
    xs = [ml.asarray(x) for x in _operands(shapes)]
    check_slopes(lambda *xs: ml.einsum(subscripts, *xs), *xs, order=2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_einsum_is_numpys_for_any_subscripts(data: st.DataObject) -> None:
    lengths = {"a": 2, "b": 3, "c": 1, "d": 4}
    parts = data.draw(st.lists(st.text("abcd", max_size=4), min_size=1, max_size=4))
    named = sorted(set("".join(parts)))
    out = "".join(data.draw(st.permutations(named))[: data.draw(st.integers(0, len(named)))])
    subscripts = ",".join(parts) + data.draw(st.sampled_from(["->" + out, ""]))
    xs = _operands([tuple(lengths[label] for label in part) for part in parts])
    result = ml.einsum(subscripts, *map(ml.asarray, xs)).numpy()
    np.testing.assert_allclose(result, np.einsum(subscripts, *xs), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
def test_dtypes_promote() -> None:
    x, y = _operands([(2, 3), (3, 4)])
    result = ml.einsum("ij,jk", ml.asarray(x.astype("f4")), ml.asarray(y))
    assert result.dtype is ml.float64


def test_a_product_of_matrices_is_one_matmul_without_a_copy() -> None:
    x, y = ml.zeros((4, 6)), ml.zeros((5, 6))
    listed = ml.disassemble(ml.program_of(lambda x, y: ml.einsum("ij,kj->ik", x, y), x, y))
    assert listed.count("cfunc") == 1
    assert '"transpose_y": true' in listed
    q, k = ml.zeros((2, 3, 4, 5)), ml.zeros((2, 3, 6, 5))
    listed = ml.disassemble(ml.program_of(lambda q, k: ml.einsum("bhqd,bhkd->bhqk", q, k), q, k))
    assert listed.count("cfunc") == 1


def test_the_smallest_product_is_made_first() -> None:
    """A matrix times a matrix times a vector: two products of a matrix and a vector."""
    operands = ml.zeros((40, 40)), ml.zeros((40, 40)), ml.zeros(40)
    with ml.Arena(ml.default_vm(), "einsum") as arena:
        ml.einsum("ij,jk,k", *operands)
        assert arena.high_water < 40 * 40 * 4


@cases(
    "subscripts, shapes, error, text",
    ("ij,jk", [(2, 3), (4, 5)], ml.errors.ShapeError, r"f32\[4,5\]\): axis 'j' has lengths 3"),
    ("...,...", [(2,), (3,)], ml.errors.ShapeError, "an axis of ... has lengths 2 and 3"),
    ("ii", [(1, 3)], ml.errors.ShapeError, "axis 'i' has lengths 1 and 3"),
    ("ij", [(2,)], ml.errors.ShapeError, "'ij' of 'ij' does not fit 1 dimensions"),
    ("i", [(2, 3)], ml.errors.ShapeError, "does not fit 2 dimensions"),
    ("i,j", [(2,)], ml.errors.ArgumentError, "expected 2 operands, got 1"),
    ("i", [], ml.errors.ArgumentError, "expected 1 operands, got 0"),
    ("i->j", [(2,)], ml.errors.ArgumentError, "'j' is in no operand"),
    ("i->ii", [(2,)], ml.errors.ArgumentError, "twice in the result"),
    ("...i->i", [(2, 3)], ml.errors.ArgumentError, "the result lacks the ..."),
    ("i.j", [(2, 3, 4)], ml.errors.ArgumentError, "expected letters as subscripts"),
    ("i1", [(2, 3)], ml.errors.ArgumentError, "expected letters as subscripts"),
    ("......", [(2,)], ml.errors.ArgumentError, "once for each operand"),
    (["i"], [(2,)], ml.errors.ArgumentError, "expected subscripts as a string, got a list"),
)
def test_refused(subscripts: Any, shapes: Any, error: type[Exception], text: str) -> None:
    refuses(error, text, ml.einsum, subscripts, *[ml.zeros(shape) for shape in shapes])


def test_operands_are_tensors_of_numbers() -> None:
    untyped: Any = ml.einsum
    refuses(ml.errors.DTypeError, "asarray", untyped, "i", "12")
    with pytest.raises(ml.errors.DTypeError, match="bool"):
        ml.einsum("i,i", ml.ones(2, dtype=ml.bool), ml.ones(2, dtype=ml.bool))


def test_beside_torch() -> None:
    torch = pytest.importorskip("torch")
    for subscripts, shapes in SUBSCRIPTS[:8]:
        xs = _operands(shapes)
        leaves = [torch.tensor(x, requires_grad=True) for x in xs]
        torch.sin(torch.einsum(subscripts, *leaves)).sum().backward()
        gradients = ml.grad(
            lambda *xs, named=subscripts: ml.sum(ml.sin(ml.einsum(named, *xs))),
            tuple(range(len(xs))),
        )(*map(ml.asarray, xs))
        for gradient, leaf in zip(gradients, leaves, strict=True):
            np.testing.assert_allclose(gradient.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)
