"""A pipeline takes data sets besides a `Dataset`: arrays, columns, samples by number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import PipelineError
from mlvm.core.types import Array, DType
from mlvm.input.datasets import as_dataset
from mlvm.machines.wire import WireVM
from tests.brief import refuses
from tests.cases.claim_tests import claims

X = np.random.default_rng(0).normal(size=(11, 4))
Y = np.arange(11)


class Frame:
    """The interface of frames of pandas and polars, with labels that are no positions."""

    columns = ("height", "tall enough", "label")

    def __getitem__(self, name: str) -> Array:
        return {"height": X[:, 0], "tall enough": X[:, 0] > 0, "label": Y}[name]

    def to_numpy(self) -> Array:
        raise AssertionError("its columns are taken one by one")


class Reversed:
    """Samples one by one. It takes arrays of indices too, and does something else with them."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: Any) -> Any:
        return X[i][::-1], int(Y[i])


class Rows(Reversed):
    """Samples one by one, and many at once in the same way."""

    def __getitem__(self, i: Any) -> Any:
        assert np.ndim(i) == 0 or len(i) > 0
        return {"x": X[i], "y": Y[i]}


class InOrder(Reversed):
    """As a file of HDF5: it takes increasing indices alone, and turns into an array as a whole."""

    def __array__(self, *_: object) -> Array:
        raise AssertionError("it is larger than memory")

    def __getitem__(self, i: Any) -> Any:
        if np.ndim(i) and (np.diff(i) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        return X[i]


class Pair(NamedTuple):
    x: Any
    y: Any


WANTED: dict[str, Array] = {"x": X.astype(np.float32), "y": Y, "r": X[:, ::-1].astype(np.float32)}


def batched(data: Any, fields: str, workers: int) -> Any:
    """The names of the columns, if batches of the data have these fields."""
    with ml.Pipeline(data, 4, shuffle=True, seed=3, workers=workers) as batches:
        assert len(batches) == 3
        results = [[x.numpy() for x in batch] for batch in batches]
        names = getattr(batches.get(), "_fields", ())
    for column, name in enumerate(fields):
        rows = np.concatenate([batch[column] for batch in results])
        where = np.lexsort(rows.reshape(len(rows), -1).T)
        expected = WANTED[name][np.lexsort(WANTED[name].reshape(len(rows), -1).T)]
        assert rows.dtype == expected.dtype
        assert rows[where].tolist() == expected.tolist()
    order = np.concatenate([batch[-1] for batch in results])
    again = ml.Pipeline((X, Y), 4, shuffle=True, seed=3)
    shuffled = [[x.numpy() for x in batch] for batch in again]
    x, y = (np.concatenate([batch[i] for batch in shuffled]) for i in (0, 1))
    assert order.tolist() == {"x": x, "r": x[:, ::-1], "y": y}[fields[-1]].tolist()
    return names


def test_samples_that_many_indices_give_alike_are_read_at_once() -> None:
    rows = Rows()
    assert as_dataset(rows) is rows
    for source in (Reversed(), InOrder(), [X[0], X[1]]):
        dataset = as_dataset(source)
        assert dataset is not source
        assert as_dataset(dataset) is dataset


def test_a_frame_gives_its_columns_by_name() -> None:
    with ml.Pipeline(Frame(), 3) as batches:
        batch: Any = batches.get()
    assert batch._fields == ("height", "_1", "label")
    assert [str(x.type) for x in batch] == ["f32[3]", "bool[3]", "i64[3]"]
    assert batch.label.tolist() == [0, 1, 2]


def test_a_frame_of_pandas_gives_rows_by_position() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "b": Y, "c": Y > 5}, index=Y[::-1] * 2)
    with ml.Pipeline(frame, 3, shuffle=True) as batches:
        rows = [(a.numpy(), b.numpy()) for a, b, _ in batches]
    for a, b in rows:
        assert a.tolist() == X[b, 0].astype(np.float32).tolist()
    with ml.Pipeline({"x": frame[["a", "c"]].astype(float), "y": frame["b"]}, 3) as batches:
        x, y = batches.get()
        assert (str(x.type), y.tolist()) == ("f32[3,2]", [0, 1, 2])
    frame["text"] = "a"
    refuses(
        PipelineError,
        "unsupported samples in column 'text'",
        ml.Pipeline,
        frame,
        3,
    )


def test_samples_of_torch_are_taken() -> None:
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.asarray(X), torch.asarray(Y))
    with ml.Pipeline(dataset, 4) as batches:
        x, y = batches.get()
        assert x.tolist() == X[:4].astype(np.float32).tolist()
        assert y.tolist() == Y[:4].tolist()


def test_a_transform_gets_the_names_too() -> None:
    with ml.Pipeline({"x": X, "y": Y}, 4, transform=lambda a, _: type(a)(2 * a.x, a.y)) as batches:
        batch: Any = batches.get()
        assert batch.x.tolist() == (2 * X[:4]).astype(np.float32).tolist()
        assert batch._fields == ("x", "y")

    def first_batch(transform: Any) -> Any:
        return ml.Pipeline({"x": X, "y": Y}, 4, transform=transform).get()

    assert [x.tolist() for x in first_batch(lambda arrays, _: arrays.y)] == [[0, 1, 2, 3]]
    assert first_batch(lambda arrays, _: {"a": arrays[0], "b": arrays[1]})._fields == ("a", "b")
    assert type(first_batch(lambda arrays, _: (*arrays, arrays[0]))) is tuple


def test_named_batches_are_arguments_of_captured_functions() -> None:
    step = ml.capture(lambda batch: ml.sum(batch.x, 1) * batch.y)
    with ml.Pipeline({"x": X, "y": Y}, 4, drop_last=True) as batches:
        for batch in batches:
            assert step(batch).tolist() == (ml.sum(batch.x, 1) * batch.y).tolist()  # type: ignore[attr-defined]
    assert step.signatures == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_processes_and_vms_elsewhere_get_the_same_batches() -> None:
    results = []
    for options in ({}, {"workers": 2, "processes": True}, {"vm": WireVM(ml.VM())}):
        arguments: Any = options
        with ml.Pipeline({"x": X, "y": list(Y)}, 4, shuffle=True, seed=3, **arguments) as batches:
            results.append([[x.numpy().tobytes() for x in batch] for batch in batches])
    assert results[0] == results[1] == results[2]


# --- dtypes --------------------------------------------------------------------------


def entered(own: str, dtype: Any) -> str:
    """The dtype in which floats enter: the default, or the one asked for."""
    values = np.abs(X) if own in ("u8", "bool") else X
    array = values.astype(DType.of(own).numpy)
    with ml.Pipeline((array,), 4, dtype=dtype) as batches:
        [x] = batches.get()
    assert x.tolist() == ml.astype(ml.asarray(array[:4]), x.dtype).tolist()
    return x.dtype.name


# --- what is refused -------------------------------------------------------------------


class Missing(Reversed):
    def __init__(self, raises: Callable[[Any], object]) -> None:
        self.raises = raises

    def __getitem__(self, i: Any) -> Any:
        return self.raises(i)


def no_file(i: Any) -> object:
    raise FileNotFoundError(f"{[1, 2][0 if np.ndim(i) else i]}.png")


def test_a_name_that_python_does_not_take_is_a_place() -> None:
    with ml.Pipeline(
        {"unit price": np.ones(3), "n": np.arange(3), "class": np.zeros(3)}, 3
    ) as batches:
        batch: Any = batches.get()
    assert batch._fields == ("_0", "n", "_2")


test_rows = claims("datasets", globals())


def first(source: Any) -> Any:
    return ml.Pipeline(source, 4).get()[0]
