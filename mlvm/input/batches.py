"""Which samples make up each batch of a data set, and how the batch is made from them.

Both are functions of seed, epoch and position alone, so any worker can make any batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from mlvm.core.errors import DTypeError, PipelineError, brief
from mlvm.core.types import Array, TensorType
from mlvm.input.sampling import Indices, SampleRandom, order

Arrays: TypeAlias = tuple[Array, ...]


class Transform(Protocol):
    """A change of each batch: from its arrays and random numbers to arrays of as many rows.

    Each sample has random numbers of its own, which depend on seed, epoch and sample alone.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> def noisy(arrays, random): return (arrays[0] + random.uniform(0.0, 0.5),)
        >>> ml.Pipeline(Numbers(), 4, vm=ml.VM(), transform=noisy).get()[0].type
        f64[4]
    """

    def __call__(self, arrays: Arrays, random: SampleRandom, /) -> Arrays: ...


@runtime_checkable
class Dataset(Protocol):
    """Samples by number. With `indices` i64[B] in any order, `dataset[indices]` is a tuple of
    arrays [B, ...]; row b belongs to sample `indices[b]`. Several threads may call it at once.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> isinstance(Numbers(), ml.Dataset), Numbers()[[3, 1]]
        (True, ([3, 1],))
    """

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Indices, /) -> Arrays: ...


class Batch(NamedTuple):
    """The samples at positions `start` to `stop - 1` of the order of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Schedule(NamedTuple):
    """The batches of `epochs` epochs of `length` samples. With `epochs` None there is no end."""

    length: int
    batch_size: int
    epochs: int | None
    drop_last: bool

    def at(self, epoch: int, start: int) -> Batch | None:
        """The batch that begins at position `start` of the epoch, or else the first of the next
        epoch. None if there is neither."""
        left = self.length - start
        if left < (self.batch_size if self.drop_last else 1):
            epoch, start, left = epoch + 1, 0, self.length
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return Batch(epoch, start, start + min(left, self.batch_size))

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def after(self, batch: Batch) -> Batch | None:
        return self.at(batch.epoch, batch.stop)

    def starting(self, first: Batch | None) -> Iterator[Batch]:
        """The batch `first` and all batches after it. Without `first` there are none."""
        while first is not None:
            yield first
            first = self.after(first)

    def sizes(self, first: Batch) -> set[int]:
        """The sizes of `first` and of all batches after it."""
        found = {min(self.batch_size, self.length - first.start)}
        for start in (first.start, 0):
            whole, rest = divmod(self.length - start, self.batch_size)
            found |= {self.batch_size} if whole else set()
            found |= {rest} if rest and not self.drop_last else set()
        return found


class Recipe:
    """How a batch is made. It is what a worker process is sent."""

    def __init__(
        self, dataset: Dataset, transform: Transform | None, *, shuffle: bool, seed: int
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.shuffle = shuffle
        self.seed = seed
        self.length = _length(dataset)
        self._order: tuple[int, Indices] | None = None  # of the epoch asked for last

    def with_seed(self, seed: int) -> Recipe:
        """The same recipe with other random numbers."""
        return Recipe(self.dataset, self.transform, shuffle=self.shuffle, seed=seed)

    def indices(self, batch: Batch) -> Indices:
        """The numbers of the batch's samples, i64[B]."""
        if not self.shuffle:
            return np.arange(batch.start, batch.stop)
        known = self._order
        if known is None or known[0] != batch.epoch:
            known = batch.epoch, order(self.length, seed=self.seed, epoch=batch.epoch)
            self._order = known
        return known[1][batch.start : batch.stop]

    def types(self) -> tuple[TensorType, ...]:
        """The types of a batch of one sample. They are found by making the batch of sample 0."""
        try:
            return tuple(map(TensorType.of, self._made(0, np.zeros(1, np.int64))))
        except DTypeError as error:
            raise PipelineError(f"samples are what no tensor holds: {error}") from None

    def fill(self, batch: Batch, slot: Sequence[Array]) -> None:
        """Make the batch in the arrays of `slot`. An error is raised with a note that names the
        sample."""
        indices = self.indices(batch)
        try:
            arrays = self._made(batch.epoch, indices)
            if len(arrays) != len(slot):
                raise PipelineError(
                    f"samples differ: this batch has {len(arrays)} arrays, the first sample "
                    f"{len(slot)}"
                )
            for array, place in zip(arrays, slot, strict=True):
                if array.dtype != place.dtype or array.shape != place.shape:
                    raise PipelineError(
                        f"samples differ: this batch has {array.dtype} {array.shape} where the "
                        f"first sample told {place.dtype} {place.shape}"
                    )
                np.copyto(place, array)
        except Exception as error:
            error.add_note(self._culprit(batch, indices, error))
            raise

    def _made(self, epoch: int, indices: Indices) -> Arrays:
        try:
            arrays = self.dataset[indices]
        except IndexError as error:
            raise PipelineError(
                f"the dataset says it has {self.length} samples, and has no {brief(indices)}: "
                f"{error}"
            ) from error
        arrays = _checked(arrays, len(indices), "dataset")
        if self.transform is not None:
            random = SampleRandom(self.seed, epoch, indices)
            arrays = _checked(self.transform(arrays, random), len(indices), "transform")
        return arrays

    def _culprit(self, batch: Batch, indices: Indices, error: Exception) -> str:
        """Text that names the first sample to raise such an error alone, or all if none does."""
        for position, index in enumerate(indices, batch.start):
            try:
                self._made(batch.epoch, np.array([index]))
            except type(error):
                return f"at sample {index}, position {position} of epoch {batch.epoch}"
            except Exception:
                continue
        named = ", ".join(map(str, indices[:20])) + ", ..." * (len(indices) > 20)
        return f"at epoch {batch.epoch}, in the batch of samples {named}"


def _length(dataset: Dataset) -> int:
    if not isinstance(dataset, Dataset):
        raise PipelineError(
            f"a dataset has a length and samples by number, unlike a {type(dataset).__name__}"
        )
    try:
        length = operator.index(len(dataset))
    except (TypeError, ValueError) as error:
        raise PipelineError(f"the dataset's length is none: {error}") from error
    if not length:
        raise PipelineError("the dataset has no samples")
    return length


def _checked(arrays: object, rows: int, source: str) -> Arrays:
    """The arrays, unchanged. Raises `PipelineError` unless they are a batch of `rows` samples."""
    if not isinstance(arrays, tuple) or not arrays:
        raise PipelineError(f"the {source} gives a tuple of arrays, not {brief(arrays)}")
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise PipelineError(f"the {source} gives numpy arrays, not a {type(array).__name__}")
        if array.ndim == 0 or len(array) != rows:
            raise PipelineError(
                f"the {source} was asked for {rows} samples, and gives an array {array.shape}"
            )
    return arrays
