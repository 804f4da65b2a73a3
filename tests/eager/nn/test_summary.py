"""Pictures of a model: printed, as a table of its layers, and in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, ShapeError
from mlvm.eager import nn
from mlvm.eager.nn.summary import Row
from tests.brief import refuses


class Tagger(nn.Module):
    def __init__(self) -> None:
        self.words = nn.Embedding(10, 4)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm(4)
        self.heads = {"a": nn.buffer(nn.Linear(4, 3)), "b": None}
        self.counter = nn.buffer(ml.zeros((), dtype=ml.int64))

    def __call__(self, words: ml.Tensor, lengths: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        self.counter = self.counter + 1
        x, _ = self.lstm(self.dropout(self.words(words)), lengths=lengths)
        x = self.norm(self.norm(x))
        return self.heads["a"](x), x  # type: ignore[misc]


WORDS, LENGTHS = np.zeros((7, 3), np.int64), ml.asarray([7, 4, 1])


def test_a_model_is_printed_with_its_counts() -> None:
    model = Tagger().freeze("words")
    assert repr(model).splitlines() == [
        "Tagger, 152 parameters",
        "  words: Embedding",
        "    embedding: frozen f32[10,4]",
        "  dropout: Dropout(rate=0.5)",
        "  lstm: LSTM(input_size=4, backward=[]), 144 parameters",
        "    dropout: Dropout(rate=0.0)",
        "    forward_0: LSTMCell(input_size=4, hidden_size=4), 144 parameters",
        "      input_kernel: f32[4,16]",
        "      hidden_kernel: f32[4,16]",
        "      bias: f32[16]",
        "  norm: BatchNorm(eps=1e-05, momentum=0.1), 8 parameters",
        "    scale: f32[4]",
        "    bias: f32[4]",
        "    mean: buffer f32[4]",
        "    var: buffer f32[4]",
        "  heads: dict(b=None)",
        "    a: buffer Linear(axis=-1)",
        "      kernel: f32[4,3]",
        "      bias: f32[3]",
        "  counter: buffer i64[]",
    ]


def test_a_summary_has_outputs_parameters_and_bytes() -> None:
    model = Tagger()
    state, keys = {p: x.numpy() for p, x in model.state().items()}, ml.random.state()
    table = model.summary(WORDS, lengths=LENGTHS)
    x, states = ml.TensorType("f32", [7, 3, 4]), ml.TensorType("f32", [1, 3, 4])
    logits = ml.TensorType("f32", [7, 3, 3])
    assert table.rows == [
        Row("", "Tagger", 192, 192 * 4 + 2 * 16 + 60 + 8, ((logits, x),)),
        Row("words", "Embedding", 40, 160, ((x,),)),
        Row("dropout", "Dropout", 0, 0, ((x,),)),
        Row("lstm", "LSTM", 144, 576, ((x, states, states),)),
        Row("lstm/dropout", "Dropout", 0, 0, ()),
        Row("lstm/forward_0", "LSTMCell", 144, 576, ()),
        Row("norm", "BatchNorm", 8, 64, ((x,), (x,))),
        Row("heads/a", "Linear", 0, 60, ((logits,),)),
    ]
    head, whole, *_, heads, last = repr(table).splitlines()
    assert head.split() == ["parameters", "bytes", "output", "bytes", "output", "layer"]
    assert re.split(r"  +", whole.strip()) == [
        "192",
        "868",
        "588",
        "f32[7,3,3], f32[7,3,4]",
        "Tagger",
    ]
    assert heads.split() == ["0", "60", "252", "f32[7,3,3]", "heads/a:", "Linear"]
    assert "  lstm: LSTM\n" in repr(table)
    assert "    forward_0: LSTMCell\n" in repr(table)
    assert "f32[7,3,4] in 2 calls" in repr(table)
    assert last == f"a call needs {table.needed:,} additional bytes"
    needed = ml.measure(lambda i, n: model(i, n), ml.TensorType("i64", [7, 3]), LENGTHS).arena
    assert abs(table.needed - needed) <= 256
    assert {p: x.tobytes() for p, x in state.items()} == {
        p: x.numpy().tobytes() for p, x in model.state().items()
    }
    np.testing.assert_array_equal(ml.random.state(), keys)
    assert type(model.norm) is nn.BatchNorm
    assert repr(model.summary()).splitlines()[:2] == [
        "parameters  bytes  layer",
        "       192    868  Tagger",
    ]


def test_what_a_summary_takes_and_refuses() -> None:
    linear = nn.Linear(2, 3)
    types = [ml.TensorType("f32", [1, 2]), ml.ones((1, 2)), np.ones((1, 2), np.float32)]
    assert len({repr(linear.summary(each)) for each in types}) == 1
    large = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert "f32[1000000000,2]" in repr(large.summary(ml.TensorType("f32", [10**9, 2])))
    assert repr(linear.summary((4, 2))) == repr(linear.summary(ml.ones((4, 2))))
    text = r"^Linear: expected 2 features, x has 3 \(f32\[1,3\], axis -1\)$"
    refuses(ShapeError, text, linear.summary, ml.ones((1, 3)))

    class Reading(nn.Module):
        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return x * float(ml.sum(x))

    refuses(CaptureError, "cannot read a tensor", Reading().summary, ml.ones(2))


def test_a_module_is_no_sequence_and_says_so() -> None:
    model: Any = nn.Linear(2, 3)
    for call in (lambda: model[0], lambda: len(model), lambda: list(model), lambda: [*model]):
        refuses(TypeError, "such as this Linear .*; its layers are its fields, and an nn.Seq", call)
    assert model
    assert nn.Sequential(ml.relu)

    class Stack(nn.Module):
        def __len__(self) -> int:
            return 0

    assert not Stack()


# --- notebooks -----------------------------------------------------------------------


class Seen(HTMLParser):
    """The texts of a page, and its tags, which all end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(x: Any) -> Seen:
    return Seen(x._repr_html_())


def test_measured_memory_in_a_notebook() -> None:
    measured = ml.measure(lambda x: ml.sum(ml.sort(x)), ml.TensorType("f32", [1000]))
    texts = parsed(measured).texts
    assert texts[texts.index("eagerly, in an arena") - 1] == f"{measured.arena:,}"
    plan = measured.plan
    row = texts.index(f"captured, in a plan of {len(plan.offsets)} blocks")
    assert texts[row - 1] == f"{plan.nbytes:,}"
    assert parsed(plan).texts[1:] == texts[row - 1 :]  # below the same head
    assert repr(plan) == f"<Plan of {len(plan.offsets)} blocks: {plan}>"


def test_a_tensor_in_a_notebook() -> None:
    small = parsed(ml.asarray([[1.5, -2.0], [0.0, ml.nan]]))
    assert small.texts == ["0", "1", "1.5", "-2.", "0.", "nan", "f32[2,2]"]
    assert parsed(ml.asarray([True, False])).texts == ["0", "1", "True", "False", "bool[2]"]
    for x in (ml.ones(17), ml.ones((2, 2, 2)), ml.zeros(()), ml.ones((0, 2)), ml.ones((2, 0))):
        assert parsed(x).texts == [repr(x)]
    with ml.Arena(ml.VM(), "<b>") as arena:
        stale = ml.ones(2)
        assert "<b>" in "".join(parsed(arena).texts)
        assert "b" not in parsed(arena).tags
    assert "was freed: the arena was reset" in parsed(stale).texts[0]
    with ml.Arena(ml.DryVM(), "dry").allocating():
        assert parsed(ml.ones(2)).texts == ["<dry f32[2], arena='dry'>"]


def test_a_model_in_a_notebook() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            self.text = "<script>"
            self.part = nn.Linear(2, 3)

    page = parsed(Named())
    assert page.texts == [line.strip() for line in repr(Named()).splitlines()]
    assert "script" not in page.tags
    assert page.tags.count("details") == 2
    assert parsed(nn.Linear(2, 3).summary(ml.ones((1, 2)))).tags.count("tr") == 2


@pytest.mark.local(reason="a picture is of a VM of this process")
def test_memory_in_a_notebook() -> None:
    arena = ml.Arena(ml.default_vm(), "batch")
    assert parsed(arena).tags == ["pre"]
    with arena:
        x = ml.ones((4, 4))
        page = parsed(arena)
        assert page.tags == ["img", "pre"]
        assert x.type is not None
    step = ml.capture(lambda x: ml.sum(ml.sort(x)))
    assert parsed(step).texts == [
        "<captured test_memory_in_a_notebook.<locals>.<lambda>, 0 programs>"
    ]
    step(ml.ones(100))
    page = parsed(step)
    assert page.tags == ["img", "pre"]
    assert str(step.plan) in page.texts[0]
