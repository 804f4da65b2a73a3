"""Batches of a data set: selection of samples, and construction.

Both depend only on seed, epoch and position, so any worker can construct any batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from mlvm.core.errors import DTypeError, PipelineError, brief, counted, with_article
from mlvm.core.ops.half import convert
from mlvm.core.types import Array, DType, Shape, TensorType, c64, c128, f32, f64, promote
from mlvm.input.datasets import Arrays, Dataset, as_dataset, length_of, parts_of, with_parts
from mlvm.input.padding import Padding, longest_of
from mlvm.input.sampling import Indices, SampleRandom, order

_NARROWED: Final = {f64: f32, c128: c64}
"""Default dtypes of numpy and pandas, and the dtypes to which a batch narrows them."""


_SCANNED: Final = 256
"""Number of samples that are read together to find lengths."""


class Transform(Protocol):
    """Transform of each batch.

    It maps the arrays and random numbers of a batch to arrays with the same number of rows.

    The random numbers of a sample depend only on seed, epoch and sample.

        >>> class Numbers:
        ...     def __len__(self): return 10
        ...     def __getitem__(self, indices): return (indices,)
        >>> def noisy(arrays, random): return (arrays[0] + random.uniform(0.0, 0.5),)
        >>> ml.Pipeline(Numbers(), 4, vm=ml.VM(), transform=noisy).get()[0].type
        f32[4]
    """

    def __call__(self, arrays: Arrays, random: SampleRandom, /) -> Arrays: ...


class Batch(NamedTuple):
    """Samples at positions `start` to `stop - 1` in the order of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Schedule(NamedTuple):
    """The batches of `epochs` epochs of `length` samples.

    With `epochs` None the sequence is infinite.
    """

    length: int
    batch_size: int
    epochs: int | None
    drop_last: bool

    def at(self, epoch: int, start: int) -> Batch | None:
        """Return the batch at position `start` of the epoch, or the first of the next epoch.

        Return None after the last epoch.
        """
        remaining = self.length - start
        if remaining < (self.batch_size if self.drop_last else 1):
            epoch, start, remaining = epoch + 1, 0, self.length
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return Batch(epoch, start, start + min(remaining, self.batch_size))

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def after(self, batch: Batch) -> Batch | None:
        return self.at(batch.epoch, batch.stop)

    def starting(self, first: Batch | None) -> Iterator[Batch]:
        """Yield the batch `first` and all later batches; nothing if `first` is None."""
        while first is not None:
            yield first
            first = self.after(first)

    def sizes(self, first: Batch) -> set[int]:
        """Return the sizes of `first` and all later batches."""
        sizes = {min(self.batch_size, self.length - first.start)}
        for start in (first.start, 0):
            whole, rest = divmod(self.length - start, self.batch_size)
            sizes |= {self.batch_size} if whole else set()
            sizes |= {rest} if rest and not self.drop_last else set()
        return sizes


class Recipe:
    """Recipe of batches: data set, transform and options. Worker processes receive it."""

    def __init__(
        self,
        dataset: object,
        transform: Transform | None,
        *,
        shuffle: bool,
        seed: int,
        dtype: DType | None = None,
        padding: Padding | None = None,
    ) -> None:
        self.dataset: Dataset = as_dataset(dataset, ragged=padding is not None)
        self.padding = padding
        self.transform = transform
        self.shuffle = shuffle
        self.seed = seed
        self.dtype = dtype
        self.length = length_of(self.dataset)
        self._order: tuple[int, Indices] | None = None  # epoch and order of the last request

    def with_seed(self, seed: int) -> Recipe:
        """Return the same recipe with other random numbers."""
        other = copy.copy(self)
        other.seed, other._order = seed, None
        return other

    def indices(self, batch: Batch) -> Indices:
        """Return the sample indices of the batch, i64[B]."""
        if not self.shuffle:
            return np.arange(batch.start, batch.stop)
        entry = self._order
        if entry is None or entry[0] != batch.epoch:
            entry = batch.epoch, order(self.length, seed=self.seed, epoch=batch.epoch)
            self._order = entry
        return entry[1][batch.start : batch.stop]

    def types(self) -> tuple[TensorType, ...]:
        """Build the batch of sample 0, and return the types by column name."""
        try:
            arrays = self._build(0, np.zeros(1, np.int64), self._longest())
        except PipelineError as error:
            error.add_note("at sample 0")
            raise
        types = []
        for name, x in zip(getattr(arrays, "_fields", range(len(arrays))), arrays, strict=True):
            try:
                types.append(TensorType(self._entering(x), x.shape))
            except DTypeError as error:
                texts = "; texts are numbered by np.unique(texts, return_inverse=True)[1]"
                hint = texts if x.dtype.kind in "OSTU" else ""
                raise PipelineError(
                    f"unsupported samples in column {name!r}: {error}{hint}"
                ) from None
        return with_parts(arrays, types)

    def _longest(self) -> list[int | None] | None:
        """Return the largest length of a batch by column, or None if there is no padding.

        If the lengths depend on the samples, this reads all samples.
        """
        if self.padding is None:
            return None
        columns = parts_of(self.dataset[np.zeros(1, np.int64)])
        self.padding.require_columns(getattr(columns, "_fields", (None,) * len(columns)))
        if self.padding.lengths:
            return [self.padding.lengths[-1]] * len(columns)
        longest = [0] * len(columns)
        for start in range(0, self.length, _SCANNED):
            indices = np.arange(start, min(start + _SCANNED, self.length))
            lengths = map(longest_of, parts_of(self.dataset[indices]))
            longest = [max(pair) for pair in zip(longest, lengths, strict=True)]
        return [self.padding.rounded(length) for length in longest]

    def _entering(self, array: Array) -> DType:
        """Return the dtype of an array in a batch: for floats `dtype`, or at most the default."""
        own = DType.of(array.dtype)
        if self.dtype is None:
            return _NARROWED.get(own, own)
        if own.is_float:
            return self.dtype
        return promote(self.dtype, c64) if own.is_inexact else own

    def fill(self, batch: Batch, slot: Sequence[Array]) -> list[Shape]:
        """Build the batch in the arrays of `slot`; return its shapes.

        A batch with shorter padding uses the start of the arrays. A note on an error names the
        sample.
        """
        indices = self.indices(batch)
        try:
            arrays = self._build(batch.epoch, indices)
            if len(arrays) != len(slot):
                raise PipelineError(
                    f"samples differ: this batch has {counted(len(arrays), 'array')}, "
                    f"the first sample {len(slot)}; return the same parts for each sample"
                )
            for array, place in zip(arrays, slot, strict=True):
                if self.padding is not None and array.shape != place.shape:
                    place = _beginning(place, array.shape)
                if array.shape != place.shape or self._entering(array).numpy != place.dtype:
                    raise PipelineError(
                        f"samples differ: this batch has {array.dtype} {array.shape} where the "
                        f"first sample has {place.dtype} {place.shape}; convert, or pad "
                        "them with pad=0"
                    )
                if array.dtype == place.dtype:
                    np.copyto(place, array)
                else:
                    with np.errstate(all="ignore"):  # out-of-range values convert as in `astype`
                        convert(place, array)
            return [array.shape for array in arrays]
        except Exception as error:
            error.add_note(self._culprit(batch, indices, error))
            raise

    def _build(
        self, epoch: int, indices: Indices, lengths: Sequence[int | None] | None = None
    ) -> Arrays:
        try:
            arrays = self.dataset[indices]
        except IndexError as error:
            raise PipelineError(
                f"the dataset reports {self.length} samples, but has no sample {brief(indices)}: "
                f"{error}; correct __len__"
            ) from error
        arrays = parts_of(arrays)
        if self.padding is not None:
            names = getattr(arrays, "_fields", (None,) * len(arrays))
            sizes = lengths or (None,) * len(arrays)
            padded = map(self.padding.padded, arrays, range(len(arrays)), names, sizes)
            arrays = with_parts(arrays, [*padded])
        arrays = _checked(arrays, len(indices), "dataset")
        if self.transform is not None:
            changed = parts_of(self.transform(arrays, SampleRandom(self.seed, epoch, indices)))
            if type(changed) is tuple and len(changed) == len(arrays):
                changed = with_parts(arrays, changed)
            arrays = _checked(changed, len(indices), "transform")
        return arrays

    def _culprit(self, batch: Batch, indices: Indices, error: Exception) -> str:
        """Return text that names the first sample that raises the error separately.

        If no sample does, name all samples.
        """
        for position, index in enumerate(indices, batch.start):
            try:
                self._build(batch.epoch, np.array([index]))
            except type(error):
                return f"at sample {index}, position {position} of epoch {batch.epoch}"
            except Exception:
                continue
        named = ", ".join(map(str, indices[:20])) + ", ..." * (len(indices) > 20)
        return f"at epoch {batch.epoch}, in the batch of samples {named}"


def _beginning(place: Array, shape: Shape) -> Array:
    """Return the start of a slot's array in the shape of a batch with shorter padding.

    If the shapes differ in a different way, return the array itself.
    """
    fits = len(shape) == place.ndim > 1 and shape[1] < place.shape[1]
    if not fits or (shape[0], *shape[2:]) != (place.shape[0], *place.shape[2:]):
        return place
    return place.reshape(-1)[: math.prod(shape)].reshape(shape)


def _checked(arrays: tuple[Any, ...], rows: int, source: str) -> Arrays:
    """Return the arrays, unchanged. Raises `PipelineError` unless they are a batch of `rows`
    samples."""
    if not arrays:
        raise PipelineError(f"the {source} must return a tuple of arrays, got {brief(arrays)}")
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise PipelineError(
                f"the {source} must return numpy arrays, got {with_article(type(array).__name__)}"
            )
        if array.ndim == 0 or len(array) != rows:
            raise PipelineError(
                f"the {source} must return {counted(rows, 'sample')}, got an "
                f"array of shape {array.shape}"
            )
    return arrays
