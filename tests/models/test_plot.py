"""The pictures are well-formed SVG and show what they are given."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest

import mlvm.eager as ml
from models.plot import loss_curve, occupancy

SVG = "{http://www.w3.org/2000/svg}"


def parse(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert not {"nan", "inf"} & set(svg.replace('"', " ").replace(",", " ").split())
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
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
    steps, epochs = lines(root)
    heights = [-y for _, y in steps]
    assert len(steps) == 6
    assert heights[:5] == sorted(heights[:5], reverse=True)
    assert heights[4] == heights[5]
    assert [x for x, _ in epochs] == pytest.approx(
        [(steps[i][0] + steps[i + 1][0]) / 2 for i in (0, 2, 4)], abs=0.1
    )
    hover = [title.text for title in root.iter(f"{SVG}title")]
    assert hover == ["epoch 1: 3.5", "epoch 2: 1.5", "epoch 3: 0.5"]


@pytest.mark.parametrize("losses", [[0.0], [1e-9], [1e9, 2e9], [2.3] * 500])
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    root = parse(loss_curve("any", losses, [math.fsum(losses) / len(losses)]))
    numbers = [text for text in texts(root) if text.replace(".", "").replace("e-", "").isdigit()]
    assert 4 <= len(numbers) <= 40


def record_step() -> ml.Recording:
    batch = ml.Arena(ml.VM(), "batch")
    with ml.record(batch) as recording, batch:
        x = ml.asarray(np.ones((16, 32), np.float32))
        y = ml.square(x)
        z = ml.sum(y)
        del y
        z + 1.0
    return recording


def test_the_occupancy_has_a_rectangle_for_each_tensor() -> None:
    recording = record_step()
    root = parse(occupancy("Memory", recording))
    group = root.find(f"{SVG}g")
    assert group is not None
    hover = [title.text or "" for title in group.iter(f"{SVG}title")]
    assert len(hover) == len(recording.lifetimes) == 4
    assert hover[0] == "f32[16,32]: 2,048 bytes at 0, moments 1 to 6"
    assert [text.split(":")[0] for text in hover] == ["f32[16,32]", "f32[16,32]", "f32[]", "f32[]"]
    boxes = [
        {name: float(each.attrib[name]) for name in ("x", "y", "width", "height")}
        for each in group.iter(f"{SVG}rect")
    ]
    assert boxes[0]["width"] > boxes[1]["width"] > 0
    assert boxes[0]["height"] == boxes[1]["height"] == pytest.approx(32 * boxes[2]["height"], 0.01)
    assert boxes[1]["y"] < boxes[0]["y"]  # a higher address is further up
    assert len({each.attrib["fill"] for each in group.iter(f"{SVG}rect")}) == 2


def test_the_occupancy_tells_what_was_in_use_at_most() -> None:
    recording = record_step()
    most, top = max(recording.used()), 2 * 2048 + 64
    root = parse(occupancy("Memory", recording))
    assert f"most bytes in use at once {most:,}" in texts(root)
    assert any(text.startswith("highest address 4,") for text in texts(root))
    assert most == top
    assert len(lines(root)[0]) == recording.moments


def test_an_arena_in_which_nothing_happened_can_be_drawn() -> None:
    parse(occupancy("Nothing", ml.Recording("batch")))
