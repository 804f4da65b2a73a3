"""`Pipeline(pad=, pad_to=)`: samples of many lengths."""

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import PipelineError
from mlvm.core.vm import VM
from mlvm.input.pipeline import Pipeline
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses

LENGTHS = (3, 7, 5, 2, 9, 4, 1, 8)
TEXTS = [[10 * i + k for k in range(n)] for i, n in enumerate(LENGTHS, 1)]
LABELS = [[token + 1 for token in text] for text in TEXTS]
COLUMNS = {"tokens": TEXTS, "labels": LABELS, "length": list(LENGTHS)}
VALUES: dict[str | int, float] = {"tokens": 0, "labels": -100}


class Samples:
    """Samples by number, as a data set of PyTorch has them."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return np.asarray(TEXTS[i]), np.asarray(LABELS[i]), np.asarray(LENGTHS[i])


def expected(start: int, stop: int, length: int) -> list[list[Any]]:
    rows = range(start, stop)
    columns = zip((TEXTS, LABELS), VALUES.values(), strict=True)
    padded = [[[*c[i], *[v] * (length - LENGTHS[i])] for i in rows] for c, v in columns]
    return [*padded, list(LENGTHS[start:stop])]


def batches(pipeline: Pipeline) -> list[list[Any]]:
    values = []
    for batch in pipeline:
        assert [x.type.shape[0] for x in batch] == [x.type.shape[0] for x in batch[:1]] * 3
        values.append([x.arena.vm.read(x.handle).tolist() for x in batch])
        del batch
    return values


@pytest.mark.parametrize("make_vm", [VM, lambda: WireVM(VM())], ids=["local", "elsewhere"])
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=["here", "threads"])
@cases(
    "to, lengths",
    ("longest", (7, 9, 8)),
    ("powers of two", (8, 16, 8)),
    ([12, 7, 8], (7, 12, 8)),
    (10, [10] * 3),
)
def test_batches_are_padded(make_vm: Any, options: Any, to: Any, lengths: Any) -> None:
    with Pipeline(COLUMNS, 3, vm=make_vm(), pad=VALUES, pad_to=to, **options) as pipeline:
        reference = [expected(3 * i, min(3 * i + 3, 8), n) for i, n in enumerate(lengths)]
        for _ in range(3):  # in slots that held longer and shorter batches
            assert batches(pipeline) == reference


def test_batches_of_processes_are_padded() -> None:
    options: Any = {"pad": VALUES, "pad_to": [8, 16], "workers": 1, "processes": True}
    with Pipeline(COLUMNS, 4, vm=VM(), **options) as pipeline:
        assert batches(pipeline) == [expected(0, 4, 8), expected(4, 8, 16)]


@cases(
    "dataset, pad",
    (Samples(), {0: 0, 1: -100}),
    ((TEXTS, LABELS, list(LENGTHS)), {0: 0, 1: -100}),
    (
        [tuple(map(np.asarray, row)) for row in zip(TEXTS, LABELS, LENGTHS, strict=True)],
        {0: 0, 1: -100},
    ),
    ({**COLUMNS, "tokens": np.array(TEXTS, object)}, VALUES),
    ids=["samples", "columns", "rows", "objects"],
)
def test_data_sets_of_many_lengths(dataset: Any, pad: Any) -> None:
    with Pipeline(dataset, 4, vm=VM(), pad=pad) as pipeline:
        assert batches(pipeline) == [expected(0, 4, 7), expected(4, 8, 9)]


def test_a_transform_gets_padded_arrays_and_peek_takes_nothing() -> None:
    def shifted(arrays: Any, random: Any) -> Any:
        (tokens,) = arrays
        return tokens[:, :-1], tokens[:, 1:]

    with Pipeline(TEXTS, 8, vm=VM(), pad=0, pad_to=16, transform=shifted) as pipeline:
        assert [x.type.shape for x in pipeline.peek()] == [x.type.shape for x in pipeline.get()]
    with Pipeline([[], [1], [2, 3]], 1, vm=VM(), pad=0) as pipeline:
        assert [str(x.type) for (x,) in pipeline] == ["i64[1,0]", "i64[1,1]", "i64[1,2]"]


@cases("dataset, options, message",
        (COLUMNS, {"pad_to": 8}, "pad_to needs a value"),
        (COLUMNS, {"pad": "0"}, "pad: expected a number"),
        (COLUMNS, {"pad": 0, "pad_to": "shortest"}, "pad_to: expected 'longest', 'powers of two'"),
        (COLUMNS, {"pad": 0, "pad_to": []}, "or lengths >= 1"),
        (COLUMNS, {"pad": {"token": 0}}, "the columns are 'tokens', 'labels', 'length'"),
        (COLUMNS, {"pad": {"tokens": 0}}, "pad={'labels': 0} pads them"),
        (COLUMNS, {"pad": 0, "pad_to": 8}, "length 9, and the largest of pad_to is 8"),
        ([np.zeros((2, 3)), np.zeros((4, 5))], {"pad": 0}, "behind their first axis"),
        ([np.zeros(2, "u1"), np.zeros(3, "u1")], {"pad": -100}, "-100 does not fit uint8"),

)  # fmt: skip
def test_refusals(dataset: Any, options: Any, message: str) -> None:
    def run() -> None:
        with Pipeline(dataset, 2, vm=VM(), **options) as pipeline:
            batches(pipeline)

    caught = refuses(PipelineError, "", run)
    assert message in str(caught)


def test_without_pad_the_error_names_it() -> None:
    with pytest.raises(PipelineError, match="pad=0 pads them"):
        Pipeline([np.zeros(2), np.zeros(3)], 2, vm=VM()).get()
