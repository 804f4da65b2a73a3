"""The picture of an arena is well-formed SVG, shows what was recorded, and stays small."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.types import TensorType
from mlvm.show.picture import MOST_RECTANGLES, timeline
from mlvm.show.record import snapshot
from tests.drawn import SVG, parse, texts


def groups(root: Element) -> list[Element]:
    """For each colour the group of its rectangles."""
    [tensors] = [g for g in root.iter(f"{SVG}g") if "tensors" in g.attrib.get("class", "")]
    return list(tensors)


def hovers(root: Element) -> list[str]:
    return [title.text or "" for group in groups(root) for title in group.iter(f"{SVG}title")]


@pytest.fixture
def batch() -> ml.Arena:
    batch = ml.Arena(ml.VM(), "batch")
    with ml.record(batch), batch:
        x = ml.asarray(np.ones((16, 32), np.float32))
        y = ml.square(x)
        z = ml.sum(y)
        del y
        z = z + 1.0
    return batch


def test_a_tensor_is_a_rectangle_that_tells_what_it_is(batch: ml.Arena, tmp_path: Path) -> None:
    batch.plot(tmp_path / "a.svg", title="A <step> & more")
    root = parse((tmp_path / "a.svg").read_text("utf-8"))
    assert "A <step> & more" in texts(root)
    line = f"{Path(__file__).name}:{batch_line('asarray')}"
    tooltips = {re.split(":", hover)[0]: hover.splitlines() for hover in hovers(root)}
    assert set(tooltips) == {"copied in", "square", "sum", "add"}
    assert tooltips["copied in"][:3] == [
        "copied in: f32[16,32]", "2,048 bytes at 0", "events 1 to 6",
    ]  # fmt: skip
    assert tooltips["copied in"][3].endswith(line)
    assert tooltips["add"][3].endswith(f"{Path(__file__).name}:{batch_line('z + 1.0')}")
    boxes = {
        hover.split(":")[0]: {k: float(v) for k, v in each.attrib.items()}
        for group in groups(root)
        for each in group
        for hover in [each[0].text or ""]
    }
    x, y, z = boxes["copied in"], boxes["square"], boxes["sum"]
    assert x["width"] > y["width"] > 0 < z["width"]
    assert x["height"] == y["height"] == pytest.approx(32 * z["height"], rel=0.05)
    assert z["y"] < y["y"] < x["y"]  # a higher address is further up
    assert len({group.attrib["fill"] for group in groups(root)}) == 4


def batch_line(text: str) -> int:
    source = Path(__file__).read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(source, 1) if text in line and "batch_line" not in line)


def test_lower_bound_and_high_water_are_lines_with_labels(batch: ml.Arena) -> None:
    assert batch.recording is not None
    root = parse(timeline(batch.recording))
    assert texts(root)[1].endswith(" times the lower bound")
    bound, top = max(batch.recording.used()), 2 * 2048 + 64 + 64
    assert f"lower bound: {bound:,} bytes live at the same time" in texts(root)
    assert any(re.fullmatch(r"highest address: 4,\d+ bytes", t) for t in texts(root))
    assert bound == 2 * 2048 + 64 < top
    lines = [p for p in root.iter(f"{SVG}path") if "level" in p.attrib.get("class", "")]
    heights = {p.attrib["class"]: float(p.attrib["d"].split()[1].split("H")[0]) for p in lines}
    assert heights["level top"] <= heights["level bound"]


def test_the_line_of_bytes_in_use_hides_no_colours() -> None:
    """A line that would go up and down all the time is that of its peaks."""
    type = TensorType("f32", (16,))
    lifetimes = [Lifetime(type, 0, 64 * (1 + (i > 4000)), i, i + 1) for i in range(0, 8000, 2)]

    def staircase(recording: Recording) -> list[float]:
        root = parse(timeline(recording))
        labels.append(next(text for text in texts(root) if text.endswith("bytes in use")))
        line = next(p.attrib["d"] for p in root.iter(f"{SVG}path") if "used" in p.attrib["class"])
        return [float(height) for height in re.findall(r"V(\d+)", line)]

    labels: list[str] = []
    assert len(staircase(Recording("batch", 128, 20, lifetimes[:10]))) == 19
    [step] = staircase(Recording("batch", 128, 8000, lifetimes))
    assert labels == ["bytes in use", "peaks of bytes in use"]
    assert step == pytest.approx(680 - 62 - (680 - 62 - 92) / 1.07, abs=1)


def test_a_label_of_the_legend_is_whole() -> None:
    chain = "multiply, layer_norm_vjp, add and 2 more"
    lifetime = Lifetime(TensorType("f32", (16,)), 0, 64, 0, 1, chain)
    assert chain in texts(parse(timeline(Recording("batch", 64, 1, [lifetime]))))


def test_narrow_rectangles_have_no_edges() -> None:
    """White ones would bleach a long recording."""
    type = TensorType("f32", (16,))
    lifetimes = [Lifetime(type, 0, 64, i, i + 1, "exp") for i in range(2000)]
    for count, classes in ((20, "tensors"), (2000, "tensors dense")):
        root = parse(timeline(Recording("batch", 64, count, lifetimes[:count])))
        assert [g.attrib["class"] for g in root.iter(f"{SVG}g") if "class" in g.attrib] == [classes]


def test_without_a_recording_the_picture_shows_what_lives_now(tmp_path: Path) -> None:
    weights = ml.Arena(ml.VM(), "weights")
    with weights.allocating():
        tensors = [ml.ones(10), ml.ones((2, 3)), ml.ones(10)]
    weights.plot(tmp_path / "w.svg")
    root = parse((tmp_path / "w.svg").read_text("utf-8"))
    assert sorted(hover.splitlines()[0] for hover in hovers(root)) == ["f32[10]"] * 2 + ["f32[2,3]"]
    del tensors


def test_parameters_and_their_state_have_their_names() -> None:
    vm = ml.VM()
    weights = ml.Arena(vm, "weights")

    def names(recording: Recording) -> set[str]:
        return {
            hover.splitlines()[0].split(": ")[0] for hover in hovers(parse(timeline(recording)))
        }

    with ml.record(weights) as recording, weights.allocating():
        params = {"w": ml.ones(3), "b": ml.ones(1)}
        optimizer = ml.optim.SGD(params, 0.1, momentum=0.9)
    with ml.Arena(vm, "batch"):
        optimizer.update({"w": ml.ones(3), "b": ml.ones(1)})
    expected = {"parameter w", "parameter b", "momentum w", "momentum b"}
    assert names(recording) >= expected
    assert {"parameter", "momentum"} <= set(texts(parse(timeline(recording))))
    with ml.record(weights) as later:
        assert "momentum w" in weights.report()
    assert names(later) >= expected
    assert names(snapshot(weights)) >= expected
    del params["w"], optimizer
    with weights.allocating():
        another = ml.ones(3)  # where a named one was
    assert names(snapshot(weights)) == {"parameter b", "f32[3]"}
    del another


def test_a_queue_has_its_slots_by_what_they_are() -> None:
    vm = ml.VM()
    queue = ml.QueueTensor(vm, ["f32[4]"], 2)
    with ml.record(queue.arena) as recording:
        queue.put([np.ones(4, np.float32)])
        [x] = queue.get()
        del x
    moments = [hover.splitlines()[::2][:2] for hover in hovers(parse(timeline(recording)))]
    assert moments == [
        ["full slot: f32[4]", "events 1 to 1"],
        ["lent slot: f32[4]", "events 3 to 3"],
    ]


def test_a_running_recording_can_be_drawn(tmp_path: Path) -> None:
    batch = ml.Arena(ml.VM(), "batch")
    with ml.record(batch), batch:
        x = ml.ones(100)
        ml.square(x)
        batch.plot(tmp_path / "now.svg")
    root = parse((tmp_path / "now.svg").read_text("utf-8"))
    assert [hover.splitlines()[2] for hover in hovers(root)] == ["events 1 to 3", "events 2 to 2"]


def test_an_arena_in_which_nothing_happened_can_be_drawn() -> None:
    assert not hovers(parse(timeline(Recording("batch"))))


def test_a_picture_says_what_is_forgotten(tmp_path: Path) -> None:
    batch = ml.Arena(ml.VM(), "batch \x1b \ud800")
    with ml.record(batch, max_tensors=5) as recording, batch:
        ml.ones(100)
        for _ in range(20):
            ml.ones(3)
    batch.plot(tmp_path / "a.svg")
    labels = texts(parse((tmp_path / "a.svg").read_text("utf-8")))
    assert labels[0] == "Arena batch \ufffd \ufffd"
    assert "peak use 448" in labels[1]
    assert labels[2] == (
        f"12 tensors that ended by moment {recording.first} are forgotten; "
        "since then at most 64 bytes in use"
    )
    assert "lower bound: 64 bytes live at the same time" in labels


def test_a_picture_is_drawn_alike_everywhere(tmp_path: Path) -> None:
    """Nothing is in it that some editor or converter does not know, and no text leaves it."""
    name = "an_op_of_a_very_long_name_indeed"
    lifetimes = [
        Lifetime(TensorType("f32", (64,)), 1 << 40, 1 << 38, i, i + 9, f"{name}_{i}")
        for i in range(20)
    ]
    svg = timeline(Recording("batch", 1 << 41, 30, lifetimes), title="A step & more " * 20)
    assert not re.search(r"var\(|@media|transform|paint-order", svg)
    root = parse(svg)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    paper = root[1]
    assert (paper.attrib["width"], paper.attrib["height"]) == (f"{width:g}", f"{height:g}")
    labels: dict[str, list[tuple[float, float]]] = {}
    for element in root.iter(f"{SVG}text"):
        size = 0.62 * float(element.attrib.get("font-size", 13)) * len(element.text or "")
        kinds = element.attrib.get("class", "").split()
        before = size if "right" in kinds else size / 2 if "middle" in kinds else 0
        left = float(element.attrib["x"]) - before
        assert 0 <= left <= left + size <= width, element.text
        assert 13 <= float(element.attrib["y"]) <= height
        labels.setdefault(element.attrib["y"], []).append((left, left + size))
    legend = [sorted(row) for row in labels.values() if len(row) == 2 and row[0][0] > 900]
    assert len(legend) == 13
    assert all(first[1] <= second[0] for first, second in legend)  # none under its number

    converter = shutil.which("rsvg-convert")
    if converter is not None:
        (tmp_path / "a.svg").write_text(svg, encoding="utf-8")
        command = [converter, "--output", str(tmp_path / "a.png"), str(tmp_path / "a.svg")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_large_step_stays_below_a_megabyte() -> None:
    type = TensorType("f32", (123, 456))
    lifetimes = [
        Lifetime(type, 64 * i, type.nbytes, i, i + 1 + i % 7, f"op{i % 40}") for i in range(10_000)
    ]
    svg = timeline(Recording("batch", 1 << 30, 10_010, lifetimes))
    assert len(svg) < 1 << 20
    root = parse(svg)
    assert len(hovers(root)) == MOST_RECTANGLES
    assert len(groups(root)) == 13  # twelve colours, and grey
    assert "28 others" in texts(root)
    assert any("the largest 4,000 of 10,000 tensors" in text for text in texts(root))
