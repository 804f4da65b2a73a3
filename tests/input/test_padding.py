"""`Pipeline(pad=, pad_to=)`: samples of many lengths."""

from typing import Any

import numpy as np

from mlvm.core.vm import VM
from mlvm.input.pipeline import Pipeline
from mlvm.machines.wire import WireVM
from tests.brief import cases
from tests.cases.claim_tests import claims

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


@cases("make_vm", VM, lambda: WireVM(VM()), ids=["local", "elsewhere"])
@cases("options", {}, {"workers": 2}, ids=["here", "threads"])
@cases("to, lengths",
    ("longest", (7, 9, 8)), ("powers of two", (8, 16, 8)), ([12, 7, 8], (7, 12, 8)),
    (10, [10] * 3),
)  # fmt: skip
def test_batches_are_padded(make_vm: Any, options: Any, to: Any, lengths: Any) -> None:
    with Pipeline(COLUMNS, 3, vm=make_vm(), pad=VALUES, pad_to=to, **options) as pipeline:
        reference = [expected(3 * i, min(3 * i + 3, 8), n) for i, n in enumerate(lengths)]
        for _ in range(3):  # in slots that held longer and shorter batches
            assert batches(pipeline) == reference


def test_batches_of_processes_are_padded() -> None:
    options: Any = {"pad": VALUES, "pad_to": [8, 16], "workers": 1, "processes": True}
    with Pipeline(COLUMNS, 4, vm=VM(), **options) as pipeline:
        assert batches(pipeline) == [expected(0, 4, 8), expected(4, 8, 16)]


def test_a_transform_gets_padded_arrays_and_peek_takes_nothing() -> None:
    def shifted(arrays: Any, random: Any) -> Any:
        (tokens,) = arrays
        return tokens[:, :-1], tokens[:, 1:]

    with Pipeline(TEXTS, 8, vm=VM(), pad=0, pad_to=16, transform=shifted) as pipeline:
        assert [x.type.shape for x in pipeline.peek()] == [x.type.shape for x in pipeline.get()]
    with Pipeline([[], [1], [2, 3]], 1, vm=VM(), pad=0) as pipeline:
        assert [str(x.type) for (x,) in pipeline] == ["i64[1,0]", "i64[1,1]", "i64[1,2]"]


test_rows = claims("padding", globals())


def padded(dataset: Any, size: int, **options: Any) -> list[list[Any]]:
    with Pipeline(dataset, size, vm=VM(), **options) as pipeline:
        return batches(pipeline)
