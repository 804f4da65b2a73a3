"""Scales have round ticks, and axes show them where the scales put them."""

from __future__ import annotations

import pytest

from mlvm.show.svg import (
    MOST_COLOURED,
    Scale,
    axes,
    colours_of,
    document,
    px,
)
from tests.brief import cases
from tests.cases.claim_tests import claims
from tests.drawn import SVG, parse


@cases("low, high, whole, ticks",
    (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 4.2, False, [0, 1, 2, 3, 4]),
    (0, 99, False, [0, 20, 40, 60, 80]), (7, 31, False, [10, 15, 20, 25, 30]),
    (0, 3e-7, False, [0, 5e-8, 1e-7, 1.5e-7, 2e-7, 2.5e-7, 3e-7]), (0, 2, True, [0, 1, 2]),
    (3, 3, True, [3]),
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, whole: bool, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 100, whole).ticks() == pytest.approx(ticks)


def test_a_scale_maps_its_ends_to_pixels() -> None:
    scale = Scale(2, 4, 100, 50)
    assert [scale(value) for value in (2, 3, 4)] == [100, 75, 50]
    assert Scale(5, 5, 100, 50)(5) == 100


def test_labels_group_the_digits_of_whole_numbers() -> None:
    assert Scale(0, 1, 0, 1, whole=True).label(12000) == "12,000"
    assert Scale(0, 1, 0, 1).label(0.25) == "0.25"


def test_coordinates_are_short() -> None:
    assert [px(3.0), px(3.04), px(2.96), px(0.55)] == ["3", "3", "3", "0.6"]


def test_an_op_has_one_colour_in_all_pictures() -> None:
    kinds = [f"op{i}" for i in range(40)]
    alone = {kind: colours_of([kind])[kind] for kind in ("matmul", "parameter", *kinds)}
    assert len({*colours_of(kinds).values()}) == len(colours_of(kinds)) == MOST_COLOURED
    for first in range(20):
        several = colours_of([*kinds[first : first + 10], "parameter", "matmul"])
        assert len({*several.values()}) == 12
        assert [several[kind] for kind in ("matmul", "parameter")] == [
            alone["matmul"],
            alone["parameter"],
        ]
        assert several[kinds[first]] == alone[kinds[first]]  # that of the largest


def test_axes_have_a_line_and_a_number_for_each_tick() -> None:
    x, y = Scale(0, 4, 50, 250, whole=True), Scale(0, 1, 150, 20)
    root = parse(document(300, 200, "", axes(x, y, "steps", "loss")))
    assert root.attrib["viewBox"] == "0 0 300 200"
    texts = {each.text: each.attrib for each in root.iter(f"{SVG}text")}
    assert set(texts) == {*map(x.label, x.ticks()), *map(y.label, y.ticks()), "steps", "loss"}
    assert texts["3"]["x"] == px(x(3))
    assert float(texts["0.4"]["y"]) == pytest.approx(y(0.4), abs=5)
    grid = [path for path in root.iter(f"{SVG}path") if path.attrib["class"] == "grid"]
    assert len(grid) == len(y.ticks())


test_rows = claims("svg", globals())
