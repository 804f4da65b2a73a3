"""The picture is well-formed SVG and shows what it is given."""

from __future__ import annotations

import itertools
import math
from xml.etree.ElementTree import Element

import pytest

from models.training.plot import loss_curve
from tests.drawn import SVG, parse, texts


def lines(root: Element) -> list[list[tuple[float, float]]]:
    """The points of each polyline."""
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]  # type: ignore[misc]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_the_loss_curve_has_a_point_for_each_step_and_each_epoch() -> None:
    losses = [4.0, 3.0, 2.0, 1.0, 0.5, 0.5]
    root = parse(loss_curve("Loss of <a> & <b>", losses, [3.5, 1.5, 0.5]))
    assert "Loss of <a> & <b>" in texts(root)
    assert {"epochs", "training loss"} <= set(texts(root))
    steps, means = lines(root)
    assert [y for _, y in means[::2]] == [y for _, y in means[1::2]]
    assert [(a[0], b[0]) for a, b in itertools.pairwise(means)][1::2] == [
        (means[i][0], means[i][0]) for i in (2, 4)
    ]
    epochs = [((a[0] + b[0]) / 2, a[1]) for a, b in zip(means[::2], means[1::2], strict=True)]
    heights = [-y for _, y in steps]
    assert len(steps) == 6
    assert heights[:5] == sorted(heights[:5], reverse=True)
    assert heights[4] == heights[5]
    assert [x for x, _ in epochs] == pytest.approx(
        [(steps[i][0] + steps[i + 1][0]) / 2 for i in (0, 2, 4)], abs=0.1
    )
    hover = [title.text for title in root.iter(f"{SVG}title")]
    assert hover == ["epoch 1: 3.5", "epoch 2: 1.5", "epoch 3: 0.5"]


def test_the_mean_of_the_only_epoch_is_a_line_over_all_of_it() -> None:
    steps, [first, last] = lines(parse(loss_curve("any", [2.0, 1.0, 0.6], [1.2])))
    assert first[0] < steps[0][0] < steps[-1][0] < last[0]
    assert first[1] == last[1]


def test_test_losses_stand_at_the_end_of_their_epochs() -> None:
    root = parse(loss_curve("any", [4.0, 3.0, 2.0, 1.0], [3.5, 1.5], {1: 3.0, 2: 5.0, 3: math.nan}))
    assert {"loss", "test after an epoch"} <= set(texts(root))
    _, means, tests = lines(root)
    assert [x for x, _ in tests] == [means[1][0], means[3][0]]
    assert min(y for _, y in tests) > 80  # higher losses than those of training are on the plot
    hover = [title.text for title in root.iter(f"{SVG}title")]
    assert hover[2:] == ["test after epoch 1: 3", "test after epoch 2: 5"]


@pytest.mark.parametrize("losses", [[0.0], [1e-9], [1e9, 2e9], [2.3] * 500])
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    root = parse(loss_curve("any", losses, [math.fsum(losses) / len(losses)]))
    numbers = [text for text in texts(root) if text.replace(".", "").replace("e-", "").isdigit()]
    assert 4 <= len(numbers) <= 40
