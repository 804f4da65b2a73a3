"""All contenders make the same products, of operands that lie in memory as their names say."""

from __future__ import annotations

import pytest

from bench import products
from bench.products import CASES, Shape

SMALL = [Shape(transposed, 5, 7, 3) for transposed in ("NN", "NT", "TN", "TT")]


def test_there_are_24_shapes_with_all_transposes() -> None:
    assert len(CASES) == len(products.SHAPES) == 24
    assert {shape.transposed for shape in CASES.values()} == {"NN", "NT", "TN", "TT"}
    assert {1, 12544} <= {shape.rows for shape in CASES.values()}


@pytest.mark.parametrize("library", ["mlvm", "machine", "numpy", "torch", "jax"])
def test_a_contender_makes_the_product(library: str) -> None:
    pytest.importorskip("mlvm" if library == "machine" else library)
    for shape in SMALL:
        multiply, array = getattr(products, f"in_{library}")(shape)
        assert 0 < products.error_of(shape, array(multiply(1))) < 10


def test_another_product_is_far_off() -> None:
    x, y = SMALL[0].turned(*SMALL[0].operands)
    assert products.error_of(SMALL[0], x @ y + 1) > 1e5
