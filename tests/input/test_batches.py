"""Batches have the samples of their indices; wrong data sets are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import PipelineError
from mlvm.input.batches import Batch, Recipe, Schedule
from mlvm.input.sampling import Indices, SampleRandom
from tests.brief import refuses
from tests.cases.claim_tests import claims
from tests.input.datasets import Numbers


def recipe(dataset: Any, transform: Any = None, *, shuffle: bool = False) -> Recipe:
    return Recipe(dataset, transform, shuffle=shuffle, seed=0)


# --- the schedule --------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(1, 12), st.integers(0, 4), st.booleans(), st.integers(0, 200)
)
def test_each_epoch_has_each_position_once(
    length: int, batch_size: int, epochs: int, drop_last: bool, start: int
) -> None:
    schedule = Schedule(length, batch_size, epochs, drop_last)
    if drop_last and length < batch_size:
        return
    whole = list(schedule.starting(schedule.at(0, 0)))
    count = length // batch_size * batch_size if drop_last else length
    for epoch in range(epochs):
        batches = [range(b.start, b.stop) for b in whole if b.epoch == epoch]
        assert [i for each in batches for i in each] == list(range(count))
        assert all(len(each) == batch_size for each in batches[:-1])
    assert {b.epoch for b in whole} == set(range(epochs))
    if whole:
        assert {b.size for b in whole} <= schedule.sizes(whole[0])
        k = start % len(whole)
        assert list(schedule.starting(schedule.at(whole[k].epoch, whole[k].start))) == whole[k:]


# --- the recipe ----------------------------------------------------------------------


def filled(recipe: Recipe, batch: Batch) -> tuple[np.ndarray[Any, Any], ...]:
    slot = tuple(
        np.zeros((batch.size, *type.shape[1:]), type.dtype.numpy) for type in recipe.types()
    )
    recipe.fill(batch, slot)
    return slot


def test_a_batch_has_the_samples_of_its_positions() -> None:
    x, y = filled(recipe(Numbers()), Batch(0, 3, 6))
    assert x.tolist() == [[3, 3], [4, 4], [5, 5]]
    assert y.tolist() == [3, 4, 5]
    shuffled = recipe(Numbers(10), shuffle=True)
    _, one = filled(shuffled, Batch(1, 0, 10))
    _, part = filled(recipe(Numbers(10), shuffle=True), Batch(1, 4, 9))
    assert sorted(one) == list(range(10))
    assert part.tolist() == one[4:9].tolist()


def test_a_transform_may_give_other_types_than_the_dataset() -> None:
    def halves(arrays: Any, random: SampleRandom) -> Any:
        assert len(random) == len(arrays[0])
        return (arrays[0][:, :1].astype(np.float64) / 2,)

    batches = recipe(Numbers(), halves)
    assert [str(type) for type in batches.types()] == ["f32[1,1]"]
    assert filled(batches, Batch(0, 2, 4))[0].tolist() == [[1.0], [1.5]]


class Lying(Numbers):
    """It says it has 20 samples, and has 10."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, indices: Indices) -> Any:
        return (np.arange(10)[indices],)


class Short(Numbers):
    """It drops odd samples."""

    def __getitem__(self, indices: Indices) -> Any:
        return (indices[indices % 2 == 0],)


def test_a_length_that_lies_is_told_with_the_sample() -> None:
    with pytest.raises(PipelineError, match="reports 20 samples, but has no") as caught:
        filled(recipe(Lying()), Batch(2, 8, 12))
    assert caught.value.__notes__ == ["at sample 10, position 10 of epoch 2"]
    assert isinstance(caught.value.__cause__, IndexError)


def test_too_few_rows_are_told_with_the_batch() -> None:
    with pytest.raises(
        PipelineError, match=r"must return 4 samples, got an array of shape \(2,\)"
    ) as e:
        filled(recipe(Short()), Batch(0, 2, 6))
    assert e.value.__notes__ == ["at sample 3, position 3 of epoch 0"]


def test_samples_of_another_type_than_the_first_are_refused() -> None:
    class Changing(Numbers):
        def __getitem__(self, indices: Indices) -> Any:
            return (np.zeros((len(indices), 3 if indices[-1] > 4 else 2), np.float32),)

    with pytest.raises(PipelineError, match=r"has float32 \(3, 3\) .* has float32 \(3, 2\)") as e:
        filled(recipe(Changing()), Batch(0, 4, 7))
    assert e.value.__notes__ == ["at epoch 0, in the batch of samples 4, 5, 6"]

    class Growing(Numbers):
        def __getitem__(self, indices: Indices) -> Any:
            return (indices,) * (1 + int(indices[-1] > 4))

    with pytest.raises(PipelineError, match="this batch has 2 arrays, the first sample 1"):
        filled(recipe(Growing()), Batch(0, 4, 7))


def test_the_first_sample_that_fails_is_named() -> None:
    def picky(arrays: Any, random: SampleRandom) -> Any:
        if (arrays[1] == 7).any():
            raise ZeroDivisionError("seven")
        return arrays

    batches = recipe(Numbers(10), picky, shuffle=True)
    position = list(batches.indices(Batch(0, 0, 10))).index(7)
    caught = refuses(ZeroDivisionError, "seven", filled, batches, Batch(0, 0, 10))
    assert caught.__notes__ == [f"at sample 7, position {position} of epoch 0"]


def test_a_failure_that_does_not_repeat_is_told_with_the_batch() -> None:
    calls: list[int] = []

    def once(arrays: Any, random: SampleRandom) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("once")
        return arrays

    caught = refuses(RuntimeError, "once", filled, recipe(Numbers(100), once), Batch(0, 0, 30))
    [note] = caught.__notes__
    assert note.startswith("at epoch 0, in the batch of samples 0, 1, 2")
    assert note.endswith("19, ...")


test_rows = claims("batches", globals())


class Wrong(Numbers):
    def __getitem__(self, indices: Indices) -> Any:
        if np.ndim(indices):
            return self.length
        raise TypeError("it takes arrays")

    def __len__(self) -> int:
        return 23


def from_dataset(returned: Any) -> None:
    recipe(Wrong(returned)).types()


def from_transform(returned: Any) -> None:
    recipe(Numbers(), lambda arrays, random: returned).types()
